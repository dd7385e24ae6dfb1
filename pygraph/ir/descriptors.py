"""Descriptors: the meaning of each input, output, region and fallback of a Program.

Positions and names of nodes carry no meaning: their descriptors do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from pygraph.ir.selections import Mechanism, Selection, Way
from pygraph.ir.value_keys import value_key

if TYPE_CHECKING:
    from typing import TypeAlias

Stage = Literal["aten", "kernels", "pointers", "regions"]
"""How far a Program has come: functional ATen operations; kernels with explicit writes; arguments and results
behind pointer slots; cut into regions that say how they run."""

STAGES: tuple[Stage, ...] = ("aten", "kernels", "pointers", "regions")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype, device and storage offset of a tensor, without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe ``tensor``; the offset is the one in its storage."""
        offset: Any = tensor.storage_offset()
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, offset)

    @property
    def span(self) -> int:
        """Number of elements from the first to the last one that the strides reach."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes that the elements span."""
        return self.span * self.dtype.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may have the same address, as in an expanded tensor."""
        reach = 0
        for stride, size in sorted((t, n) for t, n in zip(self.stride, self.shape, strict=True) if n > 1):
            if stride <= reach:
                return True
            reach += (size - 1) * stride
        return False

    @property
    def has_gaps(self) -> bool:
        """Whether the elements do not fill their span, as in a slice of columns."""
        return self.span > math.prod(self.shape)

    def reaches_as(self, other: TensorSpec) -> bool:
        """Whether shape, dtype, device and strides are equal, as far as strides matter.

        The stride of a dimension of one element says nothing, and kernels give others than torch foresees.
        """
        if (self.shape, self.dtype, self.device) != (other.shape, other.dtype, other.device):
            return False
        strides = zip(self.shape, self.stride, other.stride, strict=True)
        return 0 in self.shape or all(size == 1 or mine == others for size, mine, others in strides)

    def empty(self) -> torch.Tensor:
        """Allocate an uninitialised tensor of this shape, strides and dtype, offset zero."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        text = f"{str(self.dtype).removeprefix('torch.')}[{dims}]"
        if self.stride != contiguous_strides(self.shape):
            text += f" strides ({', '.join(map(str, self.stride))})"
        return f"{text} {self.device.type}"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major tensor of ``shape``, as torch computes them (a zero size counts as one)."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# What a node's value is: node.meta["spec"]. A tuple for operations with several results, an empty one for random
# generators; a Python type for host scalars; None for nothing, or for what is known only when it runs (a data-dependent
# shape).
Spec: TypeAlias = "TensorSpec | type[int] | type[float] | type[bool] | tuple[Spec, ...] | None"


# ---- inputs ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor that the caller passes, found at ``path`` in ``(args, kwargs)``, e.g. ``args[0]['w']``.

    One that is spent holds anything after a call, as nobody reads it then.
    """

    path: str
    leaf: int
    spec: TensorSpec
    is_spent: bool = False


@dataclasses.dataclass(frozen=True)
class ScalarArgument:
    """A Python or NumPy number that the caller passes; its value is not baked in."""

    path: str
    leaf: int
    type: type[int] | type[float]


@dataclasses.dataclass(frozen=True)
class Base:
    """The memory shared by overlapping arguments of which one is written, as one flat tensor.

    ``leaves`` are the leaf positions of those arguments, ``start`` the one with the lowest address.
    """

    path: str
    leaves: tuple[int, ...]
    start: int
    spec: TensorSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A tensor that the function reaches otherwise than by its arguments: static, read at its own address.

    ``kind`` says what it is; ``name`` where it is found (``encoder.0.weight``), ``value`` is the tensor itself. It is
    ``quiet`` if it is only updated by operations that do not increase its version, as running statistics are.
    """

    kind: Literal["parameter", "buffer", "closed-over", "constant"]
    name: str
    value: torch.Tensor
    quiet: bool = False

    @property
    def spec(self) -> TensorSpec:
        """The current layout of the tensor; the function's owner may have replaced its memory."""
        return TensorSpec.of(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class CapturedGenerator:
    """A random generator that the function passes to operations, whose state every call finds and advances.

    ``name`` is what printed Programs call it, ``value`` the caller's generator.
    """

    name: str
    value: torch.Generator


@dataclasses.dataclass(frozen=True)
class Element:
    """The number in a host tensor of one element, which is an input too: every call reads it when it begins."""

    of: Argument | Captured
    type: type[int] | type[float] | type[bool]

    @property
    def path(self) -> str:
        """Where the tensor is found."""
        return self.of.name if isinstance(self.of, Captured) else self.of.path


@dataclasses.dataclass(frozen=True)
class Slot:
    """One entry of a pointer table: where an argument is read, or a result written."""

    role: Literal["argument", "result"]
    of: Argument | Base | Result
    spec: TensorSpec


@dataclasses.dataclass(frozen=True)
class PointerTable:
    """An int64 host tensor of addresses, one per slot; the only way into and out of an indirect Program.

    ``mechanism`` is how a graph gets the addresses to its kernels, wherever a kernel allows it.
    """

    slots: tuple[Slot, ...]
    mechanism: Mechanism = "auto"


Input: TypeAlias = Argument | ScalarArgument | Element | Base | Captured | CapturedGenerator | PointerTable


# ---- outputs ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """A value that the function returns at ``path``; ``leaf`` is its position among the output leaves.

    ``leaf`` is -1 for a hidden result: memory that several returned tensors share (see ``Alias``). A result that
    ``is_saved`` goes to autograd alone, which gives it to a backward.
    """

    path: str
    leaf: int
    spec: Spec
    is_saved: bool = False


@dataclasses.dataclass(frozen=True)
class Mutation:
    """The new contents of input number ``input``, which the function updated in place."""

    input: int


@dataclasses.dataclass(frozen=True)
class Stored:
    """A result that a ``store`` node has written through pointer slot number ``slot``; the element is None."""

    slot: int


Output: TypeAlias = Result | Mutation | Stored


@dataclasses.dataclass(frozen=True)
class Alias:
    """A returned leaf that is memory of something else: no computation, only a view or the same object.

    ``of`` is the kind of its source. ``input`` and ``output``: a view of input or output number ``index``, or that
    captured tensor itself if ``identical``; ``spec.offset`` is relative to its first element, and the view may be one
    that is ``conjugated`` or ``negated`` when it is read. ``argument``: the very object at leaf ``index`` of the
    caller's arguments, which may be a number (``spec`` is None). ``result``: the object returned at leaf ``index``.
    """

    path: str
    leaf: int
    of: Literal["input", "output", "argument", "result"]
    index: int
    spec: TensorSpec | None
    identical: bool = False
    conjugated: bool = False
    negated: bool = False


@dataclasses.dataclass(frozen=True)
class Static:
    """A returned leaf that is no tensor and does not change: None, a string, a number known from the trace."""

    path: str
    leaf: int
    value: Any


@dataclasses.dataclass(frozen=True)
class Baked:
    """A leaf of the arguments that is no input: the trace depends on its value, which a call must repeat.

    ``is_marked`` says that the user has marked it as static: what its class calls equal is the same value then.
    """

    path: str
    leaf: int
    value: Any
    is_marked: bool = False

    def admits(self, value: Any) -> bool:
        """Whether ``value`` is the one that was baked in: of the same type, and with all that can be read the same."""
        if value is self.value:
            return True
        if type(value) is not type(self.value):
            return False
        if not self.is_marked or isinstance(value, (float, complex)):
            return value_key(value) == value_key(self.value)
        try:
            return bool(value == self.value)
        except Exception:  # what cannot be compared is not known to be the same
            return False


# ---- regions and notes -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Region:
    """A run of nodes that go to the device together.

    ``kind`` is what the nodes allow: ``graph`` (can be recorded), ``eager`` (device work that cannot, for
    ``reason``) or ``host`` (no device work). ``way`` is how they are run: ``launch`` node by node, ``patch`` as a
    graph with patched pointers, ``copy`` as a graph with copied inputs. ``selection`` says why that way was selected,
    and ``times`` holds the microseconds of each.
    """

    index: int
    kind: Literal["graph", "eager", "host"]
    way: Way
    reason: str | None = None
    source: str | None = None
    times: tuple[tuple[str, float], ...] = ()
    selection: Selection | None = None


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Something that does not run in the best way: what, why, and the user's source line."""

    what: str
    reason: str
    source: str | None = None

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.what}: {self.reason}{where}"


def tensor_specs(spec: Spec) -> Iterator[TensorSpec]:
    """Every TensorSpec inside a node's spec."""
    if isinstance(spec, TensorSpec):
        yield spec
    elif isinstance(spec, tuple):
        for item in spec:
            yield from tensor_specs(item)
