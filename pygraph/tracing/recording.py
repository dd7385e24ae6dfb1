"""The first run of a function: what it does, written down with its in-place operations.

Everything real that the function could change is put back, and what a Program could not say is refused.
"""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextvars
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # checked with torch 2.11 and 2.13
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes  # as in `pygraph.tracing.modes`

from pygraph.errors import (
    DisturbedTraceError,
    GradientChangeError,
    GradientError,
    SpentGraphError,
    StateChangeError,
    TraceError,
    describe,
)
from pygraph.guards.environment import Environment
from pygraph.guards.locations import ABSENT
from pygraph.guards.objects import with_parts
from pygraph.ir.descriptors import Argument, Baked, Input, ScalarArgument, TensorSpec
from pygraph.ir.leaves import is_live_number, overlap_groups, to_number
from pygraph.ir.paths import flatten_with_path
from pygraph.ir.ranges import holder, span_of
from pygraph.ir.source_lines import first_line, user_line
from pygraph.tracing.assumptions import Assumptions
from pygraph.tracing.generators import Generators
from pygraph.tracing.gradients import Accumulations, is_spent
from pygraph.tracing.iterators import REMEDY, Iterators, behind
from pygraph.tracing.leaks import remember, remember_numbers
from pygraph.tracing.live_numbers import LiveFloat, LiveInt, texts_noticed
from pygraph.tracing.modes import GradientsRead, NumbersStayLive, Sources, UsesOfMeta, fake_tracing
from pygraph.tracing.numpy_uses import numpy_served
from pygraph.tracing.outside import IgnoredErrors, Outside
from pygraph.tracing.proxy_trace import proxy_trace
from pygraph.tracing.refusals import Refusals
from pygraph.tracing.settings import SettingsWatch, forget_cached_fakes


@dataclasses.dataclass
class Recording:
    """The first trace: an FX graph with in-place operations, and what was seen while it was made."""

    name: str
    mode: FakeTensorMode
    module: fx.GraphModule
    inputs: list[Input]
    values: list[Any]
    out_leaves: list[Any]
    out_paths: list[str]
    in_tree: pytree.TreeSpec
    out_tree: pytree.TreeSpec
    environment: Environment
    gradients: list[torch.Tensor]
    specialize: frozenset[int]
    baked: tuple[Baked, ...]


def record(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: frozenset[int],
    name: str,
    environment: Environment,
    asked: set[int] | None = None,
    unclear: SettingsWatch | None = None,
) -> Recording:
    """Run ``fn`` once on fakes of its arguments.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        static: Leaves of numbers that are baked in.
        name: What errors call the function.
        environment: What the function can reach besides; put back afterwards.
        asked: Gets the leaves of numbers whose type the function asks for, also if it fails.
        unclear: Where it is not known who changed a setting in a first run: what watched that.

    Raises:
        TraceError: The function fails, or does what a Program cannot say.
        DisturbedTraceError: A setting has changed meanwhile, perhaps by another thread.
    """
    call = f"trace({name})(…)"
    keyed, in_tree = flatten_with_path((args, kwargs))
    paths = [_input_path(path) for path, _ in keyed]
    leaves = [leaf for _, leaf in keyed]
    shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    # A fake's address is an error, not garbage: on a device, a kernel that is launched with garbage ends the process.
    # Private; checked with torch 2.11 and 2.13.
    mode._allow_unsafe_data_ptr_access = False
    remember(mode)

    inputs: list[Input] = []
    values: list[Any] = []
    symbols: dict[Any, int] = {}
    asked = set() if asked is None else asked
    iterators = Iterators(environment)
    traced_leaves = [iterators.instead(leaf) for leaf in leaves]
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if index in static:
                raise TraceError(describe(call, f"{paths[index]} is a tensor marked static", remedy="Unmark it."))
            check_plain(leaf, paths[index], call)
            inputs.append(Argument(paths[index], index, relative_spec(leaf)))
        elif index not in static and is_live_number(leaf):
            number = to_number(leaf)
            traced_leaves[index] = symbol = _symbol(shape_env, leaf, paths[index], index, asked)
            symbols[symbol.node.expr] = index
            inputs.append(ScalarArgument(paths[index], index, type(number)))
            values.append(symbol)
            continue
        elif isinstance(leaf, np.ndarray):
            raise TraceError(
                describe(call, f"{paths[index]} is a NumPy array", expected="a tensor", remedy="Use torch.from_numpy.")
            )
        else:
            continue
        values.append(None)
    fakes = _fake_inputs(mode, leaves)
    for position, descriptor in enumerate(inputs):
        if isinstance(descriptor, Argument):
            values[position] = traced_leaves[descriptor.leaf] = fakes[descriptor.leaf]
    before = {index: TensorSpec.of(fake) for index, fake in fakes.items()}
    required = {index: fake.requires_grad for index, fake in fakes.items()}

    gradients = GradientsRead({id(fake): paths[index] for index, fake in fakes.items()})
    box: dict[str, Any] = {}
    context = contextvars.copy_context()  # in which the function's own variables change
    fake_args, fake_kwargs = pytree.tree_unflatten(traced_leaves, in_tree)

    def body(*placeholders: Any) -> list[Any]:
        del placeholders  # the same objects as in fake_args, which keep their Python containers
        with (
            outside.others_kept_out(), ignored.watched(),
            sources, meta, NumbersStayLive(), gradients, refusals, settings.watch(),
        ):  # fmt: skip
            box["out"] = context.run(fn, *fake_args, **fake_kwargs)
            remember_numbers()
        returned = with_parts(box["out"], is_known_size, FakeTensor)
        for size in pytree.tree_leaves(returned, is_leaf=lambda value: isinstance(value, torch.Size)):
            if isinstance(size, torch.Size) and free_symbols(size) <= symbols.keys():
                torch.Size(map(int, size))  # on which the trace depends then: of symbols, torch makes a tuple
        keyed_out, box["tree"] = flatten_with_path(returned, is_leaf=is_known_size)
        box["paths"] = [_output_path(path) for path, _ in keyed_out]
        # A comparison of numbers is a bool: its value is needed.
        found = [behind(leaf) for _, leaf in keyed_out]
        box["leaves"] = [bool(leaf) if isinstance(leaf, torch.SymBool) else leaf for leaf in found]
        return [leaf for leaf in box["leaves"] if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))]

    outside, ignored = Outside(), IgnoredErrors()
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    inference = torch.is_inference_mode_enabled()
    if inference and environment.has_code_for("is_inference_mode_enabled"):
        raise TraceError(
            describe(
                call, "it asks for inference mode, which is off in a trace", remedy="Call it under torch.no_grad()."
            )
        )
    generators = Generators()
    meta = UsesOfMeta()
    assumptions = Assumptions(shape_env)
    sources = Sources(generators.drawing, fakes.values(), meta, assumptions)
    refusals = Refusals(fakes.values())
    settings = SettingsWatch({fake.device.type for fake in fakes.values()}, unclear)
    attributes = _attributes(fakes)
    accumulations = Accumulations()
    before_gradients = environment.gradients()
    failure: BaseException | None = None
    module: fx.GraphModule | None = None
    try:
        with (
            accumulations.watched(environment.differentiable), fake_tracing(mode), torch.inference_mode(False),
            torch.set_grad_enabled(grad), texts_noticed(symbols, asked), numpy_served(), generators.watched(),
            iterators.hidden(),
        ):  # fmt: skip
            module = proxy_trace(body, values)
            assumptions.write(module.graph)
    except Exception as error:
        failure = error
    finally:
        locations = environment.snapshot.changed_locations()
        changed = environment.restore()
        gradient = environment.restore_gradients(before_gradients)
        elsewhere = _changed_attribute(fakes, attributes) or _unreached_gradient(sources.used.values())
        seeded = generators.restore()
        forget_cached_fakes()
    if settings.unclear is not None:
        return record(fn, args, kwargs, static, name, environment, asked, settings)
    if settings.others is not None:
        raise DisturbedTraceError(
            describe(call, f"another thread changes {settings.others} meanwhile", remedy="Trace it again.")
        )
    if iterators.problem is not None:
        raise TraceError(describe(call, iterators.problem, source=iterators.source, remedy=REMEDY)) from failure
    if failure is not None:
        raise TraceError(
            describe(call, f"{type(failure).__name__}: {first_line(failure)}", source=user_line(failure))
        ) from failure
    assert module is not None
    elsewhere = elsewhere or settings.changed or _changed_variable(context)
    changed = changed or elsewhere
    refused = sources.problem or refusals.problem or ignored.problem
    if refused is not None:  # the function has caught the error
        raise TraceError(describe(call, refused))
    held = next(filter(environment.reaches_weakly, sources.used.values()), None)
    if held is not None:
        name_of_held = environment.names.get(id(held)) or "a tensor"
        raise TraceError(
            describe(call, f"only a weak reference leads to {name_of_held}, which a graph would keep alive",
                     remedy="Hold the tensor, or pass it as an argument.")
        )  # fmt: skip
    if changed is not None or gradient is not None:
        kind = GradientChangeError if changed is None else StateChangeError
        error = kind(
            describe(call, f"it changes {changed or gradient}", expected="no lasting change but to tensors in place",
                     remedy="Return the new value instead.")
        )  # fmt: skip
        error.locations = locations if elsewhere is None else None
        error.gradients = gradient is not None
        error.fills = bool(error.locations) and all(location.get() is ABSENT for location in error.locations or ())
        raise error
    if seeded is not None:
        raise TraceError(
            describe(call, f"it seeds or draws from {seeded}, whose numbers would be baked in",
                     remedy="Draw with torch on the device, and seed before the call.")
        )  # fmt: skip
    _check_arguments_kept(call, traced_leaves, in_tree, fake_args, fake_kwargs, fakes, before, paths, required)
    given = {id(fake) for fake in fakes.values()}
    tracked = [leaf for leaf in box["leaves"] if isinstance(leaf, FakeTensor) and leaf.requires_grad]
    spent = tracked and all(map(is_spent, tracked))
    for path, leaf in zip(box["paths"], box["leaves"], strict=True):
        if not isinstance(leaf, FakeTensor):
            continue
        if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in given:
            raise TraceError(describe(call, f"{path} is a new torch.nn.Parameter", expected="a plain tensor"))
        if leaf.is_inference() and not inference:
            raise TraceError(describe(call, f"{path} is made in inference mode", expected="an ordinary tensor"))
        if leaf.is_meta:
            raise TraceError(describe(call, f"{path} is on meta", expected="a tensor with elements"))
        carried = None if id(leaf) in given else carried_by(leaf)
        if carried is not None:
            raise TraceError(describe(call, f"{path} carries {carried}", expected="a tensor that is only that"))
        if leaf.requires_grad:
            raise (SpentGraphError if spent else GradientError)(
                describe(call, f"{path} requires grad", expected="no gradient outside the call",
                         remedy="Call it under torch.no_grad(), or take the gradient inside it.")
            )  # fmt: skip
    return Recording(
        name, mode, module, inputs, values, box["leaves"], box["paths"], in_tree, box["tree"], environment,
        list({id(tensor): tensor for tensor in (*gradients.tensors, *accumulations.tensors)}.values()),
        _needed_values(shape_env, module, symbols) | _computed_by_numpy(module, inputs, leaves) | asked,
        _baked(inputs, paths, leaves),
    )  # fmt: skip


def _changed_variable(context: contextvars.Context) -> str | None:
    """A context variable that has another value in a context than in the current one; torch has some of its own."""
    now = contextvars.copy_context()
    for variable, value in context.items():
        if (variable not in now or now[variable] is not value) and not _is_torchs(variable):
            return f"the context variable {variable.name}"
    return None


def _is_torchs(variable: contextvars.ContextVar[Any]) -> bool:
    if variable.name.startswith(("torch.", "decimal_context")):
        return True
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    if any(value is variable for module in modules for value in list(vars(module).values())):
        return True
    # Every setting in torch's modules of settings has one. Private; checked with torch 2.13.
    tables = [table for module in modules if isinstance(table := vars(module).get("_config"), dict)]
    settings = [entry for table in tables for entry in list(table.values())]
    return any(getattr(entry, "user_override", None) is variable for entry in settings)


def _unreached_gradient(used: Iterable[torch.Tensor]) -> str | None:
    """A gradient that the function has set of a tensor that was not found before it ran; all such are cleared.

    There was none: autograd adds to one in place.
    """
    changed: str | None = None
    for tensor in used:
        if tensor.is_leaf and isinstance(tensor.grad, FakeTensor):
            tensor.grad = None
            changed = "the gradient of a tensor that is too deep in what it closes over"
    return changed


def _computed_by_numpy(module: fx.GraphModule, inputs: list[Input], leaves: list[Any]) -> set[int]:
    """Leaves that are NumPy numbers and computed with on the host, in NumPy's types, which symbols know nothing of."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return {
        descriptor.leaf
        for node, descriptor in zip(placeholders, inputs, strict=False)
        if isinstance(descriptor, ScalarArgument)
        and isinstance(leaves[descriptor.leaf], np.generic)
        and any(u.op == "call_function" and not isinstance(u.target, torch._ops.OpOverload) for u in node.users)
    }


def _baked(inputs: list[Input], paths: list[str], leaves: list[Any]) -> tuple[Baked, ...]:
    """The leaves that are no inputs."""
    live = {descriptor.leaf for descriptor in inputs if isinstance(descriptor, (Argument, ScalarArgument))}
    return tuple(Baked(paths[i], i, leaf) for i, leaf in enumerate(leaves) if i not in live)


def check_plain(leaf: torch.Tensor, path: str, call: str) -> None:
    """Refuse tensors that are more than strided memory: subclasses, sparse and quantized ones, lazy conjugates."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor):
        raise TraceError(describe(call, f"{path} is a {type(leaf).__name__}", expected="a plain tensor"))
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or leaf._is_zerotensor():
        raise TraceError(describe(call, f"{path} is not a plain strided tensor", expected="layout torch.strided"))


def relative_spec(tensor: torch.Tensor) -> TensorSpec:
    """What a tensor is, wherever in its storage it lies."""
    return dataclasses.replace(TensorSpec.of(tensor), offset=0)


def _symbol(shape_env: ShapeEnv, value: Any, path: str, leaf: int, asked: set[int]) -> Any:
    """A SymInt or SymFloat that stands for a number and remembers every question asked about its value or text."""
    from torch._dynamo.source import ConstantSource  # checked with torch 2.11 and 2.13

    source, number, kind = ConstantSource(path), to_number(value), value.__class__
    symbol = shape_env.create_unspecified_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    if isinstance(number, int):
        integer: Any = shape_env.create_symintnode(symbol, hint=number, source=source)
        return LiveInt(integer.node, kind, (value, leaf), asked)
    real: Any = shape_env.create_symfloatnode(symbol, hint=number, source=source)
    return LiveFloat(real.node, kind, (value, leaf), asked)


_LARGEST_ELEMENT = 16


def _fake_inputs(mode: FakeTensorMode, leaves: Sequence[Any]) -> dict[int, FakeTensor]:
    """A fake for every tensor leaf; leaves that share memory get fakes that share a storage."""
    fakes: dict[int, Any] = {}
    same: dict[int, int] = {}
    with mode, torch.inference_mode(False), torch.no_grad():
        for group in overlap_groups(leaves):
            members = [leaves[index] for index in group]
            start, end = span_of(members)
            if len({member.device for member in members}) > 1:
                raise TraceError(describe("trace", "overlapping arguments on different devices"))
            if holder(members, (start, end)) is None:
                raise TraceError(describe("trace", "overlapping arguments in storages of which none holds all of them"))
            size = -(-(end - start) // _LARGEST_ELEMENT) * _LARGEST_ELEMENT  # so that it can be seen as any dtype
            flat = torch.empty(size, dtype=torch.uint8, device=members[0].device)
            for index in group:
                if id(leaves[index]) in same:
                    fakes[index] = fakes[same[id(leaves[index])]]
                    continue
                same[id(leaves[index])] = index
                spec = relative_spec(leaves[index])
                offset = leaves[index].data_ptr() - start
                if offset % spec.dtype.itemsize:
                    raise TraceError(describe("trace", "overlapping arguments of different element sizes"))
                typed = flat.view(spec.dtype)
                fakes[index] = typed.as_strided(spec.shape, spec.stride, offset // spec.dtype.itemsize).detach()
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and index not in fakes:
                if id(leaf) in same:
                    fakes[index] = fakes[same[id(leaf)]]
                    continue
                same[id(leaf)] = index
                fakes[index] = relative_spec(leaf).empty()
    for index, fake in fakes.items():
        if leaves[index].requires_grad and not fake.requires_grad:
            fake.requires_grad_()
        if isinstance(leaves[index], torch.nn.Parameter):
            fake._is_param = True  # by which torch says that it is one
    return fakes


def _attributes(fakes: dict[int, FakeTensor]) -> list[dict[str, Any]]:
    """What is stored on fakes, besides what they store for their own ends."""
    return [{key: value for key, value in vars(f).items() if not _is_fakes_own(key)} for f in fakes.values()]


def carried_by(result: torch.Tensor) -> str | None:
    """What user code has stored on a tensor that it has made, which a replay would not; None if nothing."""
    if result.is_leaf and result.grad is not None:
        return "a gradient"
    known = _keys_of_new_fake()
    stored = (key for key in vars(result) if key not in known and not _is_fakes_own(key))
    return next((f"an attribute {key!r}" for key in stored), None)


@functools.cache
def _keys_of_new_fake() -> frozenset[str]:
    with _disable_current_modes(), FakeTensorMode():
        return frozenset(vars(torch.empty(0)))


def _changed_attribute(fakes: dict[int, FakeTensor], before: list[dict[str, Any]]) -> str | None:
    """The first attribute that user code has stored on an argument, or taken from it; the fakes are thrown away."""
    missing = object()
    for now, then in zip(_attributes(fakes), before, strict=True):
        for key in {*now, *then}:
            if now.get(key, missing) is not then.get(key, missing):
                return f"an argument.{key}"
    return None


def _is_fakes_own(key: str) -> bool:
    """Whether a fake stores an attribute for its own ends, as the number that it has said stands for its item()."""
    return key in _FAKES_OWN or key.lstrip("_").startswith(_MEMOS)


# Private; checked with torch 2.11 and 2.13.
_FAKES_OWN = frozenset(vars(FakeTensor))
_MEMOS = tuple(name for name in _FAKES_OWN if name.endswith("_memo"))


def _check_arguments_kept(
    call: str,
    leaves: list[Any],
    tree: pytree.TreeSpec,
    args: Any,
    kwargs: Any,
    fakes: dict[int, FakeTensor],
    before: dict[int, TensorSpec],
    paths: list[str],
    required: dict[int, bool],
) -> None:
    """Refuse a function that changed its arguments' containers, shapes or gradients."""
    after, tree_after = pytree.tree_flatten(with_parts((args, kwargs), kind=FakeTensor))
    if tree_after != tree or any(a is not b for a, b in zip(after, leaves, strict=True)):
        raise TraceError(describe(call, "it changes a container among its arguments", remedy="Return a new one."))
    for index, fake in fakes.items():
        if TensorSpec.of(fake) != before[index]:
            raise TraceError(describe(call, f"it changes the shape or strides of {paths[index]}"))
        if fake.requires_grad != required[index]:
            raise TraceError(describe(call, f"it changes whether {paths[index]} requires grad"))
        if fake.grad is not None:
            raise TraceError(
                describe(call, f"it sets {paths[index]}.grad", remedy="Use torch.autograd.grad or torch.func.grad.")
            )


def _needed_values(shape_env: ShapeEnv, module: fx.GraphModule, symbols: dict[Any, int]) -> frozenset[int]:
    """Leaves of the numbers whose values the trace depends on: guarded, or part of a shape."""
    needed: set[Any] = set()
    for guard in shape_env.guards:
        needed |= guard.expr.free_symbols
    needed |= set(shape_env.replacements)
    for node in module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                needed |= free_symbols((*value.shape, *value.stride(), value.storage_offset()))
    return frozenset(symbols[symbol] for symbol in needed if symbol in symbols)


def _input_path(path: Any) -> str:
    """``args[0]['w']`` or ``kwargs['x']`` from a pytree key path of ``(args, kwargs)``."""
    return ("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:])


def is_known_size(value: Any) -> bool:
    """Whether a value is a torch.Size of numbers, which torch would put together again as a tuple."""
    return isinstance(value, torch.Size) and not any(isinstance(size, torch.SymInt) for size in value)


def _output_path(path: Any) -> str:
    return "result" + pytree.keystr(path)
