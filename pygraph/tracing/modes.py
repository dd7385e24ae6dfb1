"""What is switched on while a function is traced: fake tensors, source lines on nodes, live numbers."""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np
import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # checked with torch 2.11 and 2.13
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # checked with torch 2.11 and 2.13
)

import pygraph.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers pygraph::scalar
from pygraph.errors import TraceError
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.functional_variants import check_apart, needs_functional_variant
from pygraph.ir.source_lines import user_frame
from pygraph.tracing import fx_notes
from pygraph.tracing.assumptions import Assumptions
from pygraph.tracing.descriptions import without_undescribed
from pygraph.tracing.indexing import selected
from pygraph.tracing.leaks import remember_line
from pygraph.tracing.live_numbers import LiveFloat, LiveInt
from pygraph.tracing.patches import patched
from pygraph.tracing.triton_launches import launches_written_down
from pygraph.tracing.writes import check_sizes, check_write

aten = torch.ops.aten


@contextlib.contextmanager
def fake_tracing(mode: FakeTensorMode) -> Generator[None, None, None]:
    """Fake tensors on, launches off; torch's caches of real values off, which would bake them in or keep fakes."""
    autocast_cache = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with mode, launches_written_down(), patched(), fx_notes.apart():
            yield
    finally:
        torch.set_autocast_cache_enabled(autocast_cache)


class Sources(TorchDispatchMode):
    """Write the user's source line on every node that an operation adds to the graph.

    Args:
        seeded: Called at every draw; names a generator that the function has moved since it began, None if there is
            none.
        arguments: The fakes of the arguments.
        meta: Knows whether code in Python uses that device.
        assumptions: Told which of them operations make themselves.

    Attributes:
        problem: What was refused first, also if the function catches the error; None if nothing was.
        used: Tensors from outside that operations were given, besides arguments, by id.
    """

    supports_higher_order_operators = True

    def __init__(
        self, seeded: Callable[[], str | None], arguments: Iterable[torch.Tensor], meta: UsesOfMeta,
        assumptions: Assumptions,
    ) -> None:  # fmt: skip
        super().__init__()
        self._seeded, self._meta, self._assumptions = seeded, meta, assumptions
        # Which keeps their memory from being that of others.
        self._outside = {tensor.untyped_storage()._cdata: tensor for tensor in arguments}
        devices = [tensor.device for tensor in self._outside.values() if tensor.device.type != "cpu"]
        self._default = next(iter(devices), torch.device("cpu"))
        self._dtype = torch.get_default_dtype()
        self.problem: str | None = None
        self.used: dict[int, torch.Tensor] = {}
        # By tracer, as branches of control flow have graphs of their own; a step uses each parameter ten times.
        self._aliases: dict[Any, dict[tuple[int, bool], torch.Tensor]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether Dynamo may work under this mode (asked by torch 2.11 and 2.13).

        Control flow (``torch.cond``) has Dynamo compile it, in eager too. Where Dynamo declines because of a mode, it
        does so for good: it then skips torch's function that calls the operation, and later calls in eager fail.
        """
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = proxy_tensor.get_proxy_mode()
        if tracing is None:
            return func(*args, **(kwargs or {}))
        if func not in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            # A closed-over tensor is traced through an alias: torch reads its value at once for item(), and its fast
            # path for binary operations updates it in place for real (seen with torch 2.11 and 2.13).
            # One alias for all uses, but for an operation that changes what shape it has.
            stays = isinstance(func, torch._ops.OpOverload) and torch.Tag.inplace_view not in func.tags
            traceable = functools.partial(
                self._traceable, self._aliases.setdefault(tracing.tracer, {}) if stays else {}
            )
            args, kwargs = pytree.tree_map_only(torch.Tensor, traceable, (args, kwargs or {}))
        device = (kwargs or {}).get("device")
        if isinstance(device, torch.device) and device == _CUDA:
            # The current device is part of the cache key, but not of what torch's cache of fakes goes by.
            kwargs = {**(kwargs or {}), "device": torch.device("cuda", torch.cuda.current_device())}
        if isinstance(device, torch.device) and device.type == "meta" and not self._meta.asked:
            kwargs = {**(kwargs or {}), "device": self._device_instead(func, args, device)}
        with self._noticing():
            outs = self._check(func, args, kwargs or {})
        graph: fx.Graph = tracing.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        self._assumptions.before_operation()
        out = without_undescribed(func, args, func(*args, **(kwargs or {})))
        self._assumptions.after_operation(graph, func)
        with self._noticing():
            check_sizes(outs)
            _check_layout(out)
        source: str | None = None
        for node in reversed(graph.nodes):
            if node is last or "source" in node.meta:
                break
            source = source or user_frame(sys._getframe(1))
            node.meta["source"] = source
            if node.target is func and self._has_another_dtype(func, args, kwargs or {}):
                node.kwargs = {**node.kwargs, "dtype": out.dtype}
        remember_line(out, source)
        return out

    def _has_another_dtype(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation takes a default dtype that is not the one where its trace is run."""
        if torch.get_default_dtype() == self._dtype or kwargs.get("dtype") is not None:
            return False
        chooses = any(argument.name == "dtype" for argument in func._schema.arguments)
        return chooses and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs)))

    def _traceable(self, known: dict[tuple[int, bool], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor._is_zerotensor():
            device = self._default if tensor.is_meta else tensor.device
            return aten._efficientzerotensor.default(list(tensor.shape), dtype=tensor.dtype, device=device)
        self.used[id(tensor)] = tensor
        key = id(tensor), torch.is_inference_mode_enabled()
        if key not in known:
            known[key] = alias = aten.alias.default(tensor)
            self._outside[alias.untyped_storage()._cdata] = alias
        return known[key]

    def _device_instead(self, func: Any, args: Any, device: torch.device) -> torch.device:
        """Where to do what torch does where it takes a tangent zero to be: on fakes, where their elements are."""
        if func is aten._to_copy.default and not args[0].is_meta:
            return args[0].device  # the other summand
        zero = func is aten._efficientzerotensor.default or (func is aten.zeros.default and not args[0])
        return self._default if zero else device

    @contextlib.contextmanager
    def _noticing(self) -> Generator[None, None, None]:
        try:
            yield
        except TraceError as error:
            self.problem = self.problem or str(error)
            raise

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Size]]:
        """Refuse an operation that a replay would do otherwise than eager; returns what `check_sizes` wants to see."""
        if func is aten.as_strided.default:
            offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
            if offset or (offset is not None and args[0].untyped_storage()._cdata in self._outside):
                # An absolute position in the storage is not preserved when the argument lies elsewhere in its own.
                raise TraceError("as_strided with a storage_offset")
        _check_draw(func, args, kwargs, self._seeded)
        _check_subtraction(func, args)
        if func in _MOVES_MEMORY:
            raise TraceError("it gives a tensor other memory, by set_()")
        if needs_functional_variant(func):
            check_apart(func, args, kwargs)
        return check_write(func, args, kwargs)


_CUDA = torch.device("cuda")

_MOVES_MEMORY = tuple(getattr(aten.set_, overload) for overload in aten.set_.overloads())


def _check_layout(out: Any) -> None:
    """Refuse results that are no strided memory, whose parts a graph does not know."""
    for tensor in pytree.tree_leaves(out):
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            raise TraceError(f"it makes a tensor of layout {tensor.layout}")


def _check_draw(func: Any, args: Any, kwargs: dict[str, Any], seeded: Callable[[], str | None]) -> None:
    """Refuse random draws that a replay would not repeat as eager draws them."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        raise TraceError("it draws from a generator of its own, not from the device's default one")
    if func._schema.is_mutable and TensorSpec.of(args[0]).has_gaps:
        # The functional operation fills a dense copy, in another order.
        raise TraceError("it draws random numbers into memory with gaps, whose order depends on the layout")
    with _disable_current_modes():
        generator = seeded()
    if generator is not None:  # a seed that is put back afterwards, as by torch.random.fork_rng, shows only here
        raise TraceError(f"it seeds or draws from {generator} before another draw, which a replay would not repeat")


def _check_subtraction(func: Any, args: Any) -> None:
    """Refuse to subtract masks: eager raises, but fake tensors forget to."""
    if getattr(func, "overloadpacket", None) in (aten.sub, aten.sub_, aten.rsub):
        for value in args[:2]:
            if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
                raise TraceError("it subtracts a mask")


class UsesOfMeta(TorchFunctionMode):
    """Note that code in Python makes a tensor on ``meta``: what torch does there by itself looks the same.

    Attributes:
        asked: Whether it is being done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.asked = any(_is_meta(value) for value in (*args, *kwargs.values()))
        try:
            return func(*args, **kwargs)
        finally:
            self.asked = False


def _is_meta(place: Any) -> bool:
    """Whether it is the device ``meta``, or a tensor there."""
    if isinstance(place, torch.Tensor):
        return place.is_meta
    return (isinstance(place, torch.device) and place.type == "meta") or (isinstance(place, str) and place == "meta")


# Private; checked with torch 2.13.
_torch: Any = torch
_TAKE_LEARNING_RATE = (_torch._fused_adam_, _torch._fused_adamw_, _torch._fused_sgd_)


class NumbersStayLive(TorchFunctionMode):
    """Make ``torch.tensor(k)`` of a live number an operation; torch itself would read its value.

    A fused optimizer gets a live learning rate as a tensor: a number, its kernel would take by value. What is read by
    an index that only a run knows is selected: torch would want to know it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.scalar_tensor) and args:
            data = args[0]
            if isinstance(data, (torch.SymInt, torch.SymFloat)) and not kwargs.get("requires_grad"):
                dtype = kwargs.get("dtype") or _dtype_of(func, data)
                device = kwargs.get("device")
                device = torch.get_default_device() if device is None else torch.device(device)
                return torch.ops.pygraph.scalar(data, dtype=dtype, device=device)
        if func in _TAKE_LEARNING_RATE and isinstance(kwargs["lr"], torch.SymFloat):
            rate = torch.ops.pygraph.scalar(kwargs["lr"], dtype=torch.float32, device=args[0][0].device)
            kwargs = {**kwargs, "lr": rate}
        if func is torch.Tensor.__getitem__ and (found := selected(args[0], args[1])) is not None:
            view, rest = found
            return view[rest] if rest else view
        return func(*args, **kwargs)


_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__  # checked with torch 2.11 and 2.13


class GradientsRead(TorchFunctionMode):
    """Note whose ``.grad`` the function reads among closed-over tensors; an argument's it may not read.

    Args:
        arguments: The fakes of arguments, by id, and what errors call them.

    Attributes:
        tensors: The closed-over tensors whose gradient was read.
    """

    def __init__(self, arguments: dict[int, str]) -> None:
        super().__init__()
        self._arguments = arguments
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRADIENT:
            tensor = args[0]
            if id(tensor) in self._arguments:
                raise TraceError(f"it reads {self._arguments[id(tensor)]}.grad, which its calls do not pass on")
            # That of another tensor is always None, and warns.
            if not isinstance(tensor, FakeTensor) and (tensor.is_leaf or tensor.retains_grad):
                self.tensors.append(tensor)
        return func(*args, **(kwargs or {}))


def _dtype_of(func: Any, number: torch.SymInt | torch.SymFloat) -> torch.dtype:
    """The type that torch gives a tensor of a number: that of a NumPy number, or the one for Python's."""
    kind = number.kind if isinstance(number, (LiveInt, LiveFloat)) else None
    if func is not torch.scalar_tensor:
        if kind is not None and issubclass(kind, np.generic):
            return torch.from_numpy(np.zeros((), kind)).dtype
        if isinstance(number, torch.SymInt):
            return torch.int64
    return torch.get_default_dtype()
