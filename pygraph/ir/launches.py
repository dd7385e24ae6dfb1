"""The launch of a Triton kernel as an operation: ``pygraph::launch``, which says in its schema what it writes.

A launch has three parts: which kernel with which constants on which grid (a `Launch`, known by its name here),
the tensors that it writes and reads, and the numbers that differ from call to call. The first is code and stays for
as long as the process; a second launch of the same kernel with the same constants is the same `Launch`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from pygraph.errors import PygraphError, describe
from pygraph.ir import ops
from pygraph.ir.constants import IMMUTABLE

Number = int | float | bool | complex

Kind = Literal["written", "read", "number", "constant"]
"""The source of a kernel's argument: the tensors that it writes, those that it only reads, the numbers that the node
holds, or the constants of the launch."""


class Launchable(Protocol):
    """A kernel with its constants, for ``pygraph::launch``."""

    @property
    def kernel(self) -> Any:
        """The Triton kernel, which has ``run`` and ``fn``."""

    def tensors(self) -> Iterator[tuple[str, Kind, int]]:
        """Names of parameters, with the kind of tensor that each is given, and its position among those."""
        ...

    def __call__(
        self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], numbers: Sequence[Number]
    ) -> None:
        """Launch the kernel on the current stream."""

    def signature(self) -> Any:
        """A value that is equal for equal launches."""


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """A Triton kernel with everything about a launch that stays the same.

    Attributes:
        kernel: A ``triton.jit`` function, or an autotuner or heuristics around one.
        arguments: Parameter names in order, with where their values come from: the kind, and the position among the
            tensors or numbers of that kind, or the constant itself.
        options: Other arguments of ``run``: meta-parameters, ``num_warps``.
        choices: Names of the parameters that an autotuner chooses.
        grids: The grid for each choice of those.
    """

    kernel: Any
    arguments: tuple[tuple[str, Kind, Any], ...]
    options: Mapping[str, Any]
    choices: tuple[str, ...]
    grids: Mapping[tuple[Any, ...], tuple[int, ...]]

    def tensors(self) -> Iterator[tuple[str, Kind, int]]:
        """Names of parameters, with the kind of tensor that each is given, and its position among those."""
        return ((name, kind, value) for name, kind, value in self.arguments if kind in ("written", "read"))

    def __call__(
        self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], numbers: Sequence[Number]
    ) -> None:
        """Launch the kernel on the current stream."""
        sources: dict[str, Sequence[Any]] = {"written": written, "read": read, "number": numbers}
        values = [value if kind == "constant" else sources[kind][value] for _, kind, value in self.arguments]
        self.kernel.run(*values, grid=self._grid, warmup=False, **self.options)

    def _grid(self, meta: Mapping[str, Any]) -> tuple[int, ...]:
        choice = tuple(meta[name] for name in self.choices)
        if choice not in self.grids:
            raise PygraphError(
                describe(kernel_name(self.kernel), f"the autotuner chose {choice}, unknown at the trace")
            )
        return self.grids[choice]

    def signature(self) -> Any:
        """A value that is equal for equal launches."""
        arguments = [(name, kind, constant_key(value)) for name, kind, value in self.arguments]
        options = [(name, constant_key(value)) for name, value in sorted(self.options.items())]
        return repr((id(self.kernel), arguments, options, self.choices, dict(self.grids)))


def constant_key(value: Any) -> str:
    """A text that tells a constant from every other: 1 from True, 0.0 from -0.0, objects by identity."""
    return f"{type(value).__name__} {value!r}" if isinstance(value, IMMUTABLE) else f"object {id(value)}"


def kernel_name(kernel: Any) -> str:
    """The name of the Python function behind a kernel.

    Example:
        >>> def scale(): ...
        >>> kernel_name(scale)
        'scale'
    """
    while getattr(kernel, "fn", None) is not None:  # one that was compiled in another process has no Python function
        kernel = kernel.fn
    return getattr(kernel, "__name__", type(kernel).__name__)


_LAUNCHES: dict[str, Launchable] = {}
_NAMES: dict[str, str] = {}
_LOCK = threading.Lock()


def register(launch: Launchable) -> str:
    """The name under which ``pygraph::launch`` finds a launch: the kernel's, numbered if others have it already."""
    signature = launch.signature()
    with _LOCK:
        if signature not in _NAMES:
            stem = kernel_name(launch.kernel)
            same = sum(name.partition("#")[0] == stem for name in _LAUNCHES)
            name = f"{stem}#{same}" if same else stem
            _LAUNCHES[name] = launch
            _NAMES[signature] = name
        return _NAMES[signature]


def launch_of(name: str) -> Launchable:
    """The launch that was registered under a name."""
    return _LAUNCHES[name]


def _launch(kernel: str, written: list[torch.Tensor], read: list[torch.Tensor], numbers: list[Number]) -> None:
    _LAUNCHES[kernel](written, read, numbers)


def _launch_fake(kernel: str, written: list[torch.Tensor], read: list[torch.Tensor], numbers: list[Number]) -> None:
    return None


ops.define("launch(str kernel, Tensor(a!)[] written, Tensor[] read, Scalar[] numbers) -> ()", _launch, _launch_fake)
