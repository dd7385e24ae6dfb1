"""Operations of a traced function, seen by a dispatch mode: checked, and their nodes annotated with source lines."""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.errors import TraceError
from pygraph.guards.iterators import is_generator
from pygraph.ir.ctc_loss import of_static_size
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.device_arguments import with_index
from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.ir.functional_variants import check_disjoint_arguments, needs_functional_variant
from pygraph.ir.random_states import random_state
from pygraph.ir.source_lines import PYGRAPH_FOLDER, TORCH_FOLDER, user_frame
from pygraph.tracing.assumptions import Assumptions
from pygraph.tracing.backward_lines import BackwardLines
from pygraph.tracing.constants import without_constants
from pygraph.tracing.data_assignments import DataAssignments
from pygraph.tracing.decisions import (
    has_unknown_sizes,
    operation_under_way,
    with_asked_sizes,
    with_known_sizes,
)  # fmt: skip
from pygraph.tracing.descriptions import without_undescribed
from pygraph.tracing.explicit_generators import without_default
from pygraph.tracing.failing_operations import ask_behind, check_not_caught
from pygraph.tracing.function_modes import MetaDeviceUses
from pygraph.tracing.known_numbers import KnownNumbers
from pygraph.tracing.leaks import remember_line
from pygraph.tracing.outside_graphs import OutsideGraphs
from pygraph.tracing.unrolled_scans import steps_of
from pygraph.tracing.user_scopes import note_operation, open_scopes
from pygraph.tracing.writes import Reshaped, check_sizes, check_write

aten = torch.ops.aten


class OperationsMode(TorchDispatchMode):
    """Sees every operation of a traced function: refuses what a replay would not repeat, and gives nodes a source line.

    Args:
        seeded: Called at every draw; names a generator that the function has moved since it began, None if there is
            none.
        explicit: Called with every generator that an operation is passed, which it may refuse.
        arguments: The fakes of the arguments.
        meta: Knows whether code in Python uses that device.
        assumptions: Gets to know which assumptions on numbers an operation makes itself.
        data: Knows which tensors stand for others.
        graphs: Refuses writes by which tensors from before get a graph of autograd, unless it can be taken away.

    Attributes:
        problem: The first operation that was refused, also if the function catches the error; None if none was.
        used: Tensors besides arguments that operations have got from outside, by id.
        depends_on_data: Whether the host was told a value, or a shape, that only a run knows.
        reshaped: The tensors from outside whose shape it has changed.
        has_unknown_sizes: Whether there was a tensor whose shape only a run knows.
    """

    supports_higher_order_operators = True

    def __init__(
        self, seeded: Callable[[], str | None], explicit: Callable[[torch.Generator], None],
        arguments: Iterable[torch.Tensor], meta: MetaDeviceUses, assumptions: Assumptions, data: DataAssignments,
        graphs: OutsideGraphs,
    ) -> None:  # fmt: skip
        super().__init__()
        self._data, self._graphs = data, graphs
        self._seeded, self._explicit, self._meta, self._assumptions = seeded, explicit, meta, assumptions
        # By storage; kept alive, so that no other tensor gets the same storage.
        self._outside = {tensor.untyped_storage()._cdata: tensor for tensor in arguments}
        devices = [tensor.device for tensor in self._outside.values() if tensor.device.type != "cpu"]
        self._default = next(iter(devices), torch.device("cpu"))
        self._dtype = torch.get_default_dtype()
        self._known, self.reshaped = KnownNumbers(), Reshaped()
        self._backward_lines, self._thread = BackwardLines(), threading.get_ident()
        self.problem: str | None = None
        self.depends_on_data = self.has_unknown_sizes = False
        self.used: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}  # of these, when they were first used
        # By tracer, as branches of control flow have graphs of their own; a training step uses a parameter ten times.
        self._aliases: dict[Any, dict[tuple[int, bool], torch.Tensor]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether Dynamo may work under this mode (asked by torch 2.11 and 2.13).

        Control flow (``torch.cond``) has Dynamo compile it, in eager too. Where Dynamo declines because of a mode, it
        does so for good: it then skips torch's function that calls the operation, and later calls in eager fail.
        """
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # two of three calls: autograd asks the tensors of each operation
        tracing = proxy_tensor.get_proxy_mode()
        if tracing is None:
            return func(*args, **(kwargs or {}))
        note_operation(func, args)
        self.depends_on_data = self.depends_on_data or not _OF_DATA.isdisjoint(getattr(func, "tags", ()))
        self._data.note_updates(func, args, kwargs or {})
        with self._noticing():
            self._graphs.check(func, args, kwargs or {})
        given = args, kwargs or {}
        if func not in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            # A closed-over tensor is traced through an alias: torch reads its value at once for item(), and its fast
            # path for binary operations updates it in place for real (seen with torch 2.11 and 2.13).
            # One alias for all uses, and another one for all operations that change what shape it has.
            stays = isinstance(func, torch._ops.OpOverload) and torch.Tag.inplace_view not in func.tags
            traceable = functools.partial(self._traceable, self._aliases.setdefault((tracing.tracer, stays), {}), stays)
            args, kwargs = _with_tensors(traceable, args), _with_tensors(traceable, kwargs or {})
        taken = args, kwargs or {}
        kwargs = self._on_device(func, args, kwargs or {})
        if (steps := steps_of(func := of_static_size(func), args)) is not None:
            with self:
                return steps()
        with self._noticing():
            args, kwargs = with_asked_sizes(func, *without_default(args, kwargs))
            outs = self._check(func, args, kwargs)
        graph: fx.Graph = tracing.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        self._assumptions.before_operation(last)
        with operation_under_way(last), without_constants(func, args, kwargs):
            out = without_undescribed(func, args, func(*args, **kwargs))
        if not (isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable):  # whose results are arguments
            out = with_known_sizes(func, args, kwargs, out)
        self.has_unknown_sizes = self.has_unknown_sizes or has_unknown_sizes(out)
        self._assumptions.after_operation(graph, func)
        self._known.after_operation(func, args, kwargs, out, tracing.tracer)
        ask_behind(func, args, kwargs, tracing.tracer)
        with self._noticing():
            check_sizes(outs)
            self.reshaped.note(func, given, taken)
            _check_layout(out)
        source = forward = None
        for node in reversed(graph.nodes):
            if node is last or "source" in node.meta:
                break
            if source is None:
                source = user_frame(sys._getframe(1)) or self._waiting_line()
                forward = self._backward_lines.forward_of(source)
            node.meta |= {"source": source, "scopes": open_scopes(), "backward_of": forward}
            if func is aten.ones_like.default and _is_first_gradient(sys._getframe(1)):
                node.meta["first_gradient"] = True
            if node.target is func and self._has_another_dtype(func, args, kwargs):
                node.kwargs = {**node.kwargs, "dtype": out.dtype}
        remember_line(out, source)
        return out

    def restore_versions(self) -> None:
        """Have tensors from outside have been updated as often as before the trace, which only records updates.

        Autograd would refuse a backward of what has saved one of them before.
        """
        for number, before in reversed(self._versions.items()):  # views have the counter of their base
            tensor = self.used[number]
            if tensor._version != before:
                _set_versions((tensor,), (before,))

    def _waiting_line(self) -> str | None:
        """The line at which the function waits for a backward, whose operations are called by threads of autograd."""
        if threading.get_ident() == self._thread:
            return None
        return user_frame(sys._current_frames().get(self._thread))

    def _has_another_dtype(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation takes a default dtype that is not the one where its trace is run."""
        if torch.get_default_dtype() == self._dtype or kwargs.get("dtype") is not None:
            return False
        chooses = any(argument.name == "dtype" for argument in func._schema.arguments)
        return chooses and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs)))

    def _traceable(
        self, known: dict[tuple[int, bool], torch.Tensor], stays: bool, tensor: torch.Tensor
    ) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor._is_zerotensor():
            device = self._default if tensor.is_meta else tensor.device
            return aten._efficientzerotensor.default(list(tensor.shape), dtype=tensor.dtype, device=device)
        value = self._data.value_of(tensor)
        if value is not None:
            return value
        if stays and (problem := self.reshaped.problem(tensor)) is not None:
            self.problem = self.problem or problem
            raise TraceError(problem)
        if id(tensor) not in self.used and not tensor.is_inference():
            self._versions[id(tensor)] = tensor._version
        self.used[id(tensor)] = tensor
        key = id(tensor), torch.is_inference_mode_enabled()
        if key not in known:
            with _without_warning(tensor):
                known[key] = alias = aten.alias.default(tensor)
            self._outside[alias.untyped_storage()._cdata] = alias
        return known[key]

    def _on_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments with the device on which an operation is run."""
        device = kwargs.get("device")
        if not isinstance(device, torch.device):
            return kwargs
        if device == _CUDA:
            # The current device is part of the cache key, but not of what torch's cache of fakes goes by.
            return {**kwargs, "device": with_index(device)}
        if device.type == "meta" and not self._meta.asked:
            return {**kwargs, "device": self._device_of_tangent(func, args, device)}
        return kwargs

    def _device_of_tangent(self, func: Any, args: Any, device: torch.device) -> torch.device:
        """The device for an operation on a zero tangent, which torch puts on ``meta``: that of the fakes."""
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
        """Refuse an operation whose replay would differ from eager; returns the argument of `check_sizes`."""
        if func is aten.as_strided.default:
            offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
            if offset or (offset is not None and args[0].untyped_storage()._cdata in self._outside):
                # An absolute position in the storage is not preserved when the argument lies elsewhere in its own.
                raise TraceError("as_strided with a storage_offset")
        for value in filter(is_generator, (*args, *kwargs.values())):
            self._explicit(value)
        _check_draw(func, args, self._seeded)
        _check_subtraction(func, args)
        check_not_caught(func, kwargs, sys._getframe(1))
        if func in _MOVES_MEMORY:
            raise TraceError("it gives a tensor other memory, by set_()")
        if needs_functional_variant(func):
            check_disjoint_arguments(func, args, kwargs)
        return check_write(func, args, kwargs)


def _with_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Arguments with their tensors changed; most operations have no others than fakes."""
    if all(map(_stays, tree.values() if isinstance(tree, dict) else tree)):
        return tree
    return pytree.tree_map_only(torch.Tensor, change, tree)


def _stays(value: Any) -> bool:
    """Whether an argument is no tensor but a fake, nor a list with one."""
    return type(value) in _STAYING or (type(value) in (list, tuple) and all(type(one) in _STAYING for one in value))


@contextlib.contextmanager
def _without_warning(tensor: torch.Tensor) -> Generator[None, None, None]:
    """Let a tensor be described, for which torch reads the gradient, without a warning that it is none of a leaf.

    torch hides that as well, but not where warnings are errors (torch 2.11 to 2.13).
    """
    if tensor.is_leaf:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")
        yield


def _is_first_gradient(frame: Any) -> bool:
    """Whether torch makes the gradient with which a backward begins (its function checked with torch 2.11 and 2.13)."""
    while frame is not None and frame.f_code.co_filename.startswith((TORCH_FOLDER, PYGRAPH_FOLDER)):
        if frame.f_code is torch.autograd._make_grads.__code__:
            return True
        frame = frame.f_back
    return False


_set_versions: Any = torch._C._autograd._unsafe_set_version_counter  # pyright: ignore  # checked with torch 2.11 and 2.13
_CUDA = torch.device("cuda")
_DEVICE = torch.ops.prim.device.default

# Types of arguments in which `_traceable` has nothing to change.
_STAYING = frozenset({FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})

_OF_DATA = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

_MOVES_MEMORY = tuple(getattr(aten.set_, overload) for overload in aten.set_.overloads())


def _check_layout(out: Any) -> None:
    """Refuse results that are no strided memory, whose parts a graph does not know."""
    for tensor in pytree.tree_leaves(out):
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            raise TraceError(f"it makes a tensor of layout {tensor.layout}")


def _check_draw(func: Any, args: Any, seeded: Callable[[], str | None]) -> None:
    """Refuse random draws that a replay would not repeat as eager draws them."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return
    if func is random_state():
        return
    if func._schema.is_mutable and TensorSpec.of(args[0]).has_gaps:
        # The functional operation fills a dense copy, in another order.
        raise TraceError("it draws random numbers into memory with gaps, whose order depends on the layout")
    with no_dispatch_modes():
        generator = seeded()
    if generator is not None:  # a seed that is put back afterwards, as by torch.random.fork_rng, shows only here
        raise TraceError(f"it seeds or draws from {generator} before another draw, which a replay would not repeat")


def _check_subtraction(func: Any, args: Any) -> None:
    """Refuse to subtract masks: eager raises, but fake tensors forget to."""
    if getattr(func, "overloadpacket", None) in (aten.sub, aten.sub_, aten.rsub):
        for value in args[:2]:
            if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
                raise TraceError("it subtracts a mask")
