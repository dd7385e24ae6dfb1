"""From a Python callable to a Program.

The function runs once on fake tensors while `make_fx` writes down the ATen operations below autograd, so that
``torch.func`` transforms, ``torch.autograd.grad`` and random operations inside it become plain operations. The
record still has in-place operations; a second run through ``torch.func.functionalize`` removes them and leaves
updates of inputs as explicit outputs. Aliasing is read off the first run, where storages are shared as in eager.

Numbers are traced as symbols. One whose value the function needs (an ``if``, a size) is baked in and the trace
repeated; the caller finds its leaf among `Traced.static_leaves`.
"""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import random
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # checked with torch 2.11 and 2.13
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import pygraph.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers pygraph::scalar
from pygraph.effects import is_random, is_written
from pygraph.environment import Environment
from pygraph.errors import TraceError, describe
from pygraph.program import (
    Alias,
    Argument,
    Baked,
    Base,
    Captured,
    Input,
    Mutation,
    Output,
    Program,
    Result,
    ScalarArgument,
    Spec,
    Static,
    TensorSpec,
    output_values,
)

P = ParamSpec("P")
R = TypeVar("R")
aten = torch.ops.aten

# Each round bakes in at least one more number, so this is only reached by calls with many that matter in turn.
_MAX_SPECIALIZATIONS = 16

_LOCK = threading.RLock()  # make_fx patches nn.Module for all threads while it traces


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A Program with what its validity depends on.

    Attributes:
        program: The Program.
        static_leaves: Number leaves that were baked in because the trace needed their values.
        environment: What the function could reach when it was traced.
    """

    program: Program
    static_leaves: frozenset[int]
    environment: Environment


def trace(
    fn: Callable[P, Any], *, static_argnums: Sequence[int] = (), static_argnames: Sequence[str] = ()
) -> Callable[P, Program]:
    """Return a function that traces ``fn`` on its arguments and returns the Program, like ``jax.make_jaxpr``.

    Args:
        fn: A function or module over pytrees of tensors, numbers, ``None`` and static values.
        static_argnums: Positions of arguments that are baked in as they are.
        static_argnames: The same for keyword arguments.

    Returns:
        A function with the signature of ``fn`` that returns a `Program` at stage ``aten``.

    Raises:
        TraceError: The function cannot be written down; the message says why and where.

    Example:
        >>> import torch, pygraph
        >>> print(pygraph.trace(lambda x, k: x * k + 1)(torch.ones(3), 2.0), end="")  # doctest: +ELLIPSIS
        # <lambda> (aten): trace
        def program(
            args_0: "float32[3] cpu",  # args[0]
            args_1: "float",  # args[1], live
        ):
            mul: "float32[3] cpu" = aten.mul.Tensor(args_0, args_1)  # ...:1
            add: "float32[3] cpu" = aten.add.Tensor(mul, 1)  # ...:1
            return (
                add,  # result
            )
    """

    @functools.wraps(fn, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def traced(*args: P.args, **kwargs: P.kwargs) -> Program:
        static = static_leaves(args, kwargs, static_argnums, static_argnames)
        return trace_call(fn, args, kwargs, static=static).program

    return traced


def static_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Sequence[int], argnames: Sequence[str]
) -> frozenset[int]:
    """Leaf positions of ``(args, kwargs)`` that belong to static arguments."""
    if not argnums and not argnames:
        return frozenset()
    static: set[int] = set()
    chosen = {index % len(args) if index < 0 else index for index in argnums} if args else set[int]()
    position = 0
    for index, arg in enumerate(args):
        count = len(pytree.tree_leaves(arg))
        if index in chosen:
            static.update(range(position, position + count))
        position += count
    for name, value in kwargs.items():
        count = len(pytree.tree_leaves(value))
        if name in argnames:
            static.update(range(position, position + count))
        position += count
    return frozenset(static)


def is_live_number(leaf: Any) -> bool:
    """Whether a leaf is a number whose value is read at every call rather than baked in."""
    if isinstance(leaf, (bool, np.bool_)):
        return False
    if isinstance(leaf, (int, np.integer)):
        return -(2**63) <= int(leaf) < 2**63
    return isinstance(leaf, (float, np.floating)) and math.isfinite(leaf)


def to_number(leaf: Any) -> int | float:
    """A Python number equal to a Python or NumPy one."""
    return int(leaf) if isinstance(leaf, (int, np.integer)) else float(leaf)


def trace_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    static: frozenset[int] = frozenset(),
    name: str | None = None,
) -> Traced:
    """Trace one call; numbers at the leaves in ``static`` are baked in from the start."""
    name = str(name or getattr(fn, "__name__", type(fn).__name__))
    with _LOCK:
        for _ in range(_MAX_SPECIALIZATIONS):
            environment = Environment(fn, {"args": args, "kwargs": kwargs})
            recording = _record(fn, args, kwargs, static, name, environment)
            if recording.specialize <= static:
                return Traced(_functional(recording), static, environment)
            static |= recording.specialize
    raise TraceError(describe(f"trace({name})", "its arguments' values decide its operations without end"))


def _functional(recording: _Recording) -> Program:
    """The second run, with torch's errors as TraceErrors."""
    try:
        return _functionalize(recording)
    except TraceError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {_first_line(error)}"
        raise TraceError(describe(f"trace({recording.name})(…)", problem, source=_user_line(error))) from error


# ---- first run: what the function does --------------------------------------------------------------------------


@dataclasses.dataclass
class _Recording:
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
    specialize: frozenset[int]
    baked: tuple[Baked, ...]


def _record(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: frozenset[int],
    name: str,
    environment: Environment,
) -> _Recording:
    call = f"trace({name})(…)"
    keyed, in_tree = pytree.tree_flatten_with_path((args, kwargs))
    paths = [_input_path(path) for path, _ in keyed]
    leaves = [leaf for _, leaf in keyed]
    shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)

    inputs: list[Input] = []
    values: list[Any] = []
    symbols: dict[Any, int] = {}
    traced_leaves = list(leaves)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if index in static:
                raise TraceError(describe(call, f"{paths[index]} is a tensor marked static", remedy="Unmark it."))
            _check_plain(leaf, paths[index], call)
            inputs.append(Argument(paths[index], index, _relative_spec(leaf)))
        elif index not in static and is_live_number(leaf):
            number = to_number(leaf)
            traced_leaves[index] = symbol = _symbol(shape_env, number, paths[index])
            symbols[symbol.node.expr] = index
            inputs.append(ScalarArgument(paths[index], index, type(number)))
            values.append(symbol)
            continue
        elif isinstance(leaf, np.ndarray):
            raise TraceError(
                describe(call, f"{paths[index]} is a NumPy array", expected="a tensor", remedy="Use torch.from_numpy.")
            )
        elif isinstance(leaf, (np.integer, np.floating, np.bool_)):
            traced_leaves[index] = leaf.item()
            continue
        else:
            continue
        values.append(None)
    fakes = _fake_inputs(mode, leaves)
    for position, descriptor in enumerate(inputs):
        if isinstance(descriptor, Argument):
            values[position] = traced_leaves[descriptor.leaf] = fakes[descriptor.leaf]
    before = {index: TensorSpec.of(fake) for index, fake in fakes.items()}

    box: dict[str, Any] = {}
    fake_args, fake_kwargs = pytree.tree_unflatten(traced_leaves, in_tree)

    def body(*placeholders: Any) -> list[Any]:
        del placeholders  # the same objects as in fake_args, which keep their Python containers
        with _Sources(), _NumbersStayLive():
            box["out"] = fn(*fake_args, **fake_kwargs)
        keyed_out, box["tree"] = pytree.tree_flatten_with_path(box["out"])
        box["paths"] = [_output_path(path) for path, _ in keyed_out]
        box["leaves"] = [leaf for _, leaf in keyed_out]
        return [leaf for leaf in box["leaves"] if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))]

    random_states = _random_states()
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    failure: BaseException | None = None
    module: fx.GraphModule | None = None
    try:
        with _tracing(mode), torch.inference_mode(False), torch.set_grad_enabled(grad):
            module = proxy_tensor.make_fx(body, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    except Exception as error:
        failure = error
    finally:
        changed = environment.restore()
        seeded = _restore_random(random_states)
    if failure is not None:
        raise TraceError(
            describe(call, f"{type(failure).__name__}: {_first_line(failure)}", source=_user_line(failure))
        ) from failure
    assert module is not None
    if changed is not None:
        raise TraceError(
            describe(call, f"it changes {changed}", expected="no lasting change but to tensors in place",
                     remedy="Return the new value instead.")
        )  # fmt: skip
    if seeded is not None:
        raise TraceError(
            describe(call, f"it seeds or draws from {seeded}, whose numbers would be baked in",
                     remedy="Draw with torch on the device, and seed before the call.")
        )  # fmt: skip
    _check_arguments_kept(call, traced_leaves, in_tree, fake_args, fake_kwargs, fakes, before, paths)
    for path, leaf in zip(box["paths"], box["leaves"], strict=True):
        if isinstance(leaf, FakeTensor) and leaf.requires_grad:
            raise TraceError(
                describe(call, f"{path} requires grad", expected="no gradient outside the call",
                         remedy="Call it under torch.no_grad(), or take the gradient inside it.")
            )  # fmt: skip
    return _Recording(
        name, mode, module, inputs, values, box["leaves"], box["paths"], in_tree, box["tree"], environment,
        _needed_values(shape_env, module, symbols), _baked(inputs, paths, leaves),
    )  # fmt: skip


def _baked(inputs: list[Input], paths: list[str], leaves: list[Any]) -> tuple[Baked, ...]:
    """The leaves that are no inputs."""
    live = {descriptor.leaf for descriptor in inputs if isinstance(descriptor, (Argument, ScalarArgument))}
    return tuple(Baked(paths[i], i, leaf) for i, leaf in enumerate(leaves) if i not in live)


def _check_plain(leaf: torch.Tensor, path: str, call: str) -> None:
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TraceError(describe(call, f"{path} is a {type(leaf).__name__}", expected="a plain tensor"))
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_conj() or leaf.is_neg():
        raise TraceError(describe(call, f"{path} is not a plain strided tensor", expected="layout torch.strided"))


def _relative_spec(tensor: torch.Tensor) -> TensorSpec:
    return dataclasses.replace(TensorSpec.of(tensor), offset=0)


def _symbol(shape_env: ShapeEnv, number: int | float, path: str) -> Any:
    """A SymInt or SymFloat that stands for ``number`` and remembers every question asked about its value."""
    from torch._dynamo.source import ConstantSource  # checked with torch 2.11 and 2.13

    source = ConstantSource(path)
    symbol = shape_env.create_unspecified_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    if isinstance(number, int):
        return shape_env.create_symintnode(symbol, hint=number, source=source)
    return shape_env.create_symfloatnode(symbol, hint=number, source=source)


def overlap_groups(leaves: Sequence[Any]) -> list[list[int]]:
    """Tensor leaves that share memory, as groups of two or more leaf positions."""
    by_storage: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(index)
    return [group for group in by_storage.values() if len(group) > 1]


def _fake_inputs(mode: FakeTensorMode, leaves: Sequence[Any]) -> dict[int, FakeTensor]:
    """A fake for every tensor leaf; leaves that share memory get fakes that share a storage."""
    fakes: dict[int, Any] = {}
    same: dict[int, int] = {}
    with mode, torch.inference_mode(False), torch.no_grad():
        for group in overlap_groups(leaves):
            start = min(leaves[index].data_ptr() for index in group)
            size = max(leaves[i].data_ptr() - start + _relative_spec(leaves[i]).nbytes for i in group)
            flat = torch.empty(size, dtype=torch.uint8, device=leaves[group[0]].device)
            for index in group:
                if id(leaves[index]) in same:
                    fakes[index] = fakes[same[id(leaves[index])]]
                    continue
                same[id(leaves[index])] = index
                spec = _relative_spec(leaves[index])
                offset = leaves[index].data_ptr() - start
                if offset % spec.dtype.itemsize:
                    raise TraceError(describe("trace", "overlapping arguments of different element sizes"))
                pad = -size % spec.dtype.itemsize
                whole = flat if not pad else torch.empty(size + pad, dtype=torch.uint8, device=flat.device)
                typed = whole.view(spec.dtype)
                fakes[index] = typed.as_strided(spec.shape, spec.stride, offset // spec.dtype.itemsize).detach()
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and index not in fakes:
                if id(leaf) in same:
                    fakes[index] = fakes[same[id(leaf)]]
                    continue
                same[id(leaf)] = index
                fakes[index] = _relative_spec(leaf).empty()
    for index, fake in fakes.items():
        if leaves[index].requires_grad and not fake.requires_grad:
            fake.requires_grad_()
    return fakes


@contextlib.contextmanager
def _tracing(mode: FakeTensorMode) -> Generator[None, None, None]:
    """Fake tensors on; torch's caches of real values off, which would bake them in or keep fakes."""
    limit = proxy_tensor.CONSTANT_NUMEL_LIMIT  # checked with torch 2.11 and 2.13
    autocast_cache = torch.is_autocast_cache_enabled()
    # It logs a traceback for every error of the function that is traced; that error is reported, or raised by eager.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    logged = log.disabled
    log.disabled = True
    # With a limit, make_fx executes in-place updates of small closed-over tensors for real.
    proxy_tensor.CONSTANT_NUMEL_LIMIT = -1
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with mode:
            yield
    finally:
        log.disabled = logged
        proxy_tensor.CONSTANT_NUMEL_LIMIT = limit
        torch.set_autocast_cache_enabled(autocast_cache)


class _Sources(TorchDispatchMode):
    """Write the user's source line on every node that an operation adds to the graph."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = proxy_tensor.get_proxy_mode()
        if tracing is None:
            return func(*args, **(kwargs or {}))
        if func not in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            # A closed-over tensor is traced through an alias: torch reads its value at once for item(), and its fast
            # path for binary operations updates it in place for real (seen with torch 2.11 and 2.13).
            args, kwargs = pytree.tree_map_only(torch.Tensor, _traceable, (args, kwargs or {}))
        if func is aten.as_strided.default and ((len(args) > 3 and args[3]) or (kwargs or {}).get("storage_offset")):
            # An absolute position in the storage is not preserved when the argument lies elsewhere in its own.
            raise TraceError("as_strided with a storage_offset")
        graph: fx.Graph = tracing.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        out = func(*args, **(kwargs or {}))
        source: str | None = None
        for node in reversed(graph.nodes):
            if node is last or "source" in node.meta:
                break
            source = source or user_frame(sys._getframe(1))
            node.meta["source"] = source
        return out


def _traceable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else aten.alias.default(tensor)


class _NumbersStayLive(TorchFunctionMode):
    """Make ``torch.tensor(k)`` of a live number an operation; torch itself would read its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.scalar_tensor) and args:
            data = args[0]
            if isinstance(data, (torch.SymInt, torch.SymFloat)) and not kwargs.get("requires_grad"):
                dtype = kwargs.get("dtype") or (
                    torch.int64 if isinstance(data, torch.SymInt) else torch.get_default_dtype()
                )
                device = kwargs.get("device")
                device = torch.get_default_device() if device is None else torch.device(device)
                return torch.ops.pygraph.scalar(data, dtype=dtype, device=device)
        return func(*args, **kwargs)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep


def user_frame(frame: Any) -> str | None:
    """The innermost line outside torch and pygraph, as ``file.py:41``."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH, _HERE, "<frozen")):
            return f"{os.path.basename(filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _user_line(error: BaseException) -> str | None:
    """The innermost line outside torch and pygraph in an error's traceback."""
    line: str | None = None
    step = error.__traceback__
    while step is not None:
        filename = step.tb_frame.f_code.co_filename
        if not filename.startswith((_TORCH, _HERE, "<frozen")):
            line = f"{os.path.basename(filename)}:{step.tb_lineno}"
        step = step.tb_next
    return line


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message").rstrip(".")


def _random_states() -> list[Any]:
    """The states of every generator that a function could draw from or seed behind the trace's back."""
    states: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _restore_random(before: list[Any]) -> str | None:
    """Put generators back; which had moved, if one had."""
    moved: str | None = None
    restore = (torch.set_rng_state, random.setstate, np.random.set_state, torch.cuda.set_rng_state)
    names = ("torch's generator", "the generator of Python's random", "NumPy's generator", "torch.cuda's generator")
    for name, put_back, now, then in zip(names, restore, _random_states(), before, strict=False):
        if not _same_state(now, then):
            put_back(then)
            moved = moved or name
    return moved


def _same_state(now: Any, then: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return torch.equal(now, then)
    if isinstance(now, tuple):
        return all(np.array_equal(a, b) for a, b in zip(now, then, strict=True))
    return bool(now == then)


def _check_arguments_kept(
    call: str,
    leaves: list[Any],
    tree: pytree.TreeSpec,
    args: Any,
    kwargs: Any,
    fakes: dict[int, FakeTensor],
    before: dict[int, TensorSpec],
    paths: list[str],
) -> None:
    """Refuse a function that changed its arguments' containers, shapes or gradients."""
    after, tree_after = pytree.tree_flatten((args, kwargs))
    if tree_after != tree or any(a is not b for a, b in zip(after, leaves, strict=True)):
        raise TraceError(describe(call, "it changes a container among its arguments", remedy="Return a new one."))
    for index, fake in fakes.items():
        if TensorSpec.of(fake) != before[index]:
            raise TraceError(describe(call, f"it changes the shape or strides of {paths[index]}"))
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


# ---- second run: the same without in-place operations ------------------------------------------------------------


def _functionalize(recording: _Recording) -> Program:
    """Turn a recording into a Program: functional, updates of inputs as outputs, aliasing described."""
    module, inputs, values = recording.module, list(recording.inputs), list(recording.values)
    attributes = _lift_attributes(recording, inputs, values)
    inputs, values, rebuild = _merge_overlapping(recording, inputs, values)
    aliases, statics, results, hidden = _classify_outputs(recording, inputs, rebuild)
    specs = [_spec(value) for value in values]

    def flat(*placeholders: Any) -> list[Any]:
        originals = rebuild.unpack(placeholders)
        outs = _Replay(module, attributes, originals).run()
        kept = [_with_strides(outs[position], recording.out_leaves[leaf]) for position, leaf in results]
        shared = [_whole_memory(outs[position], size, recording, position) for position, size in hidden]
        return kept + shared

    with _tracing(recording.mode), torch.inference_mode(False), torch.no_grad():
        fresh = [_fresh(value) for value in values]
        functional = torch.func.functionalize(flat, remove="mutations")
        graph_module = proxy_tensor.make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(*fresh)

    graph = graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    outputs: list[Output] = []
    out_values: list[Any] = []
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in placeholders:
            outputs.append(Mutation(placeholders.index(node.args[0])))
            out_values.append(node.args[1])
            graph.erase_node(node)
    returned = output_values(graph)
    for (_, leaf), value in zip(results, returned, strict=False):
        outputs.append(Result(recording.out_paths[leaf], leaf, _spec(recording.out_leaves[leaf])))
        out_values.append(value)
    first_hidden = len(outputs)
    for value in returned[len(results) :]:
        outputs.append(Result("shared memory of results", -1, _spec(value.meta["val"])))
        out_values.append(value)
    graph.output_node().args = (tuple(out_values),)
    _make_bases_relative(graph, recording.mode, inputs)
    with _tracing(recording.mode):
        _relative_views(graph, placeholders, inputs)
    _finish_graph(graph, inputs, specs)
    graph_module.recompile()
    aliases = [
        dataclasses.replace(alias, index=alias.index + first_hidden) if alias.of == "output" else alias
        for alias in aliases
    ]
    return Program(
        name=recording.name,
        module=graph_module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        aliases=tuple(aliases),
        statics=tuple(statics),
        in_tree=recording.in_tree,
        out_tree=recording.out_tree,
        stage="aten",
        history=("trace",),
        baked=recording.baked,
    )


def _lift_attributes(recording: _Recording, inputs: list[Input], values: list[Any]) -> dict[str, int]:
    """Make every tensor that the recording reaches an input; maps attribute names to input numbers."""
    attributes: dict[str, int] = {}
    known: dict[int, int] = {}
    for node in recording.module.graph.nodes:
        if node.op != "get_attr" or node.target in attributes:
            continue
        value = _attribute(recording.module, node.target)
        if not isinstance(value, torch.Tensor):
            continue  # a submodule of a higher-order operation
        if id(value) not in known:
            known[id(value)] = len(inputs)
            environment = recording.environment
            literal = all(user.target in (aten.lift_fresh_copy.default, aten.lift_fresh.default) for user in node.users)
            kind = environment.kinds.get(id(value), "constant" if literal else "closed-over")
            name = environment.names.get(id(value)) or f"{kind}_{sum(isinstance(i, Captured) for i in inputs)}"
            _check_plain(value, name, f"trace({recording.name})(…)")
            inputs.append(Captured(kind, name, value))  # pyright: ignore[reportArgumentType]
            with recording.mode, torch.no_grad():
                values.append(_relative_spec(value).empty())
        attributes[node.target] = known[id(value)]
    return attributes


class _Rebuild:
    """How the recording's inputs come out of the Program's, where some became views of a shared base."""

    def __init__(self, count: int) -> None:
        self.sources: list[tuple[int, TensorSpec | None, torch.dtype | None]] = [(i, None, None) for i in range(count)]

    def unpack(self, placeholders: Sequence[Any]) -> list[Any]:
        values: list[Any] = []
        for index, spec, dtype in self.sources:
            value = placeholders[index]
            if spec is not None:
                value = value if dtype is None else value.view(dtype)
                value = value.as_strided(spec.shape, spec.stride, spec.offset)
            values.append(value)
        return values


def _merge_overlapping(
    recording: _Recording, inputs: list[Input], values: list[Any]
) -> tuple[list[Input], list[Any], _Rebuild]:
    """Replace inputs that share memory, one of which is written, by one flat base of which they are views."""
    rebuild = _Rebuild(len(inputs))
    groups: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and isinstance(inputs[index], Argument) and value.numel():
            groups.setdefault(value.untyped_storage()._cdata, []).append(index)
    shared = [group for group in groups.values() if len(group) > 1]
    if not shared or not _has_writes(recording.module):
        return inputs, values, rebuild
    merged: dict[int, int] = {}
    new_inputs: list[Input] = []
    new_values: list[Any] = []
    for index, descriptor in enumerate(inputs):
        group = next((group for group in shared if index in group), None)
        if group is None:
            merged[index] = len(new_inputs)
            new_inputs.append(descriptor)
            new_values.append(values[index])
        elif index == group[0]:
            dtypes = {values[member].dtype for member in group}
            if len(dtypes) > 1:
                raise TraceError(
                    describe(f"trace({recording.name})(…)", "overlapping arguments of different dtypes, one written")
                )
            first = min(group, key=lambda member: values[member].storage_offset())
            start = values[first].storage_offset()
            specs = {member: TensorSpec.of(values[member]) for member in group}
            size = max(spec.offset - start + spec.span for spec in specs.values())
            spec = TensorSpec((size,), (1,), values[first].dtype, values[first].device)
            leaves = tuple(inputs[member].leaf for member in group)  # pyright: ignore
            path = " + ".join(inputs[member].path for member in group)  # pyright: ignore
            for member in group:
                merged[member] = len(new_inputs)
                view = dataclasses.replace(specs[member], offset=specs[member].offset - start)
                rebuild.sources[member] = (len(new_inputs), view, None)
            new_inputs.append(Base(path, leaves, inputs[first].leaf, spec))  # pyright: ignore
            with recording.mode, torch.no_grad():
                new_values.append(spec.empty())
    rebuild.sources = [(merged[i], spec, dtype) for i, (_, spec, dtype) in enumerate(rebuild.sources)]
    return new_inputs, new_values, rebuild


def _is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to have no elements; asking a data-dependent shape would be an error."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    return any(isinstance(size, int) and size == 0 for size in sizes)


def _has_writes(module: fx.GraphModule) -> bool:
    return any(is_written(node) or node.target in _HIDDEN_WRITES for node in module.graph.nodes)


def _classify_outputs(
    recording: _Recording, inputs: list[Input], rebuild: _Rebuild
) -> tuple[list[Alias], list[Static], list[tuple[int, int]], list[tuple[int, int]]]:
    """Sort the returned leaves into aliases, static values and results.

    Returns aliases (those of outputs count from the first hidden result), statics, results as (position among the
    recording's outputs, leaf), and hidden results as (position, number of elements of the shared storage).
    """
    originals = [*recording.values]
    by_storage: dict[int, int] = {}
    for index, value in enumerate(originals):
        if isinstance(value, torch.Tensor):
            by_storage.setdefault(value.untyped_storage()._cdata, index)
    for index, descriptor in enumerate(inputs):
        if isinstance(descriptor, Captured):  # returned itself, or as a view of the fake that stood for it
            for value in (descriptor.value, recording.mode.from_tensor(descriptor.value)):
                by_storage.setdefault(value.untyped_storage()._cdata, -1 - index)

    aliases: list[Alias] = []
    statics: list[Static] = []
    fresh: dict[int, list[tuple[int, int]]] = {}
    results: list[tuple[int, int]] = []
    hidden: list[tuple[int, int]] = []
    position = 0
    arguments = {
        id(recording.values[index]): descriptor.leaf
        for index, descriptor in enumerate(recording.inputs)
        if isinstance(descriptor, Argument)
    }
    returned: dict[int, int] = {}
    repeats: list[Alias] = []
    for leaf, value in enumerate(recording.out_leaves):
        path = recording.out_paths[leaf]
        if id(value) in arguments:
            aliases.append(Alias(path, leaf, "argument", arguments[id(value)], TensorSpec.of(value)))
            position += 1
        elif isinstance(value, torch.Tensor) and id(value) in returned:
            repeats.append(Alias(path, leaf, "result", returned[id(value)], _fixed_spec(value)))
            position += 1
        elif isinstance(value, torch.Tensor):
            returned[id(value)] = leaf
            owner = None if _is_empty(value) else by_storage.get(value.untyped_storage()._cdata)
            if owner is not None:
                aliases.append(_input_alias(recording, inputs, rebuild, owner, value, path, leaf))
            else:
                fresh.setdefault(value.untyped_storage()._cdata, []).append((position, leaf))
            position += 1
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            results.append((position, leaf))
            position += 1
        else:
            statics.append(Static(path, leaf, value))
    for group in fresh.values():
        first = recording.out_leaves[group[0][1]]
        if len(group) == 1 or _is_empty(first) or any(not isinstance(n, int) for n in first.shape):
            results.extend(group)
            continue
        itemsize = first.element_size()
        if any(recording.out_leaves[leaf].dtype != first.dtype for _, leaf in group):
            raise TraceError(describe(f"trace({recording.name})(…)", "results of different dtypes share memory"))
        for _, leaf in group:
            spec = TensorSpec.of(recording.out_leaves[leaf])
            aliases.append(Alias(recording.out_paths[leaf], leaf, "output", len(hidden), spec))
        hidden.append((group[0][0], first.untyped_storage().nbytes() // itemsize))
    return aliases + repeats, statics, sorted(results), hidden


def _fixed_spec(value: torch.Tensor) -> TensorSpec:
    """The spec of a tensor, without sizes that only a run will tell."""
    if all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return TensorSpec.of(value)
    return TensorSpec((), (), value.dtype, value.device)


def _input_alias(
    recording: _Recording,
    inputs: list[Input],
    rebuild: _Rebuild,
    owner: int,
    value: torch.Tensor,
    path: str,
    leaf: int,
) -> Alias:
    spec = TensorSpec.of(value)
    if owner < 0:
        captured = inputs[-1 - owner]
        assert isinstance(captured, Captured)
        if captured.value.dtype != value.dtype:
            raise TraceError(describe(f"trace({recording.name})(…)", f"{path} is a view of another dtype"))
        spec = dataclasses.replace(spec, offset=spec.offset - captured.value.storage_offset())
        return Alias(path, leaf, "input", -1 - owner, spec, value is captured.value)
    source = recording.values[owner]
    index, view, _ = rebuild.sources[owner]
    if source.dtype != value.dtype:
        raise TraceError(describe(f"trace({recording.name})(…)", f"{path} is a view of another dtype"))
    start = source.storage_offset() - (view.offset if view is not None else 0)
    spec = dataclasses.replace(spec, offset=spec.offset - start)
    return Alias(path, leaf, "input", index, spec)


# Operations that update running statistics without saying so in their schemas; functionalization misses them.
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    out, save_mean, save_invstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, training, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, save_mean, save_invstd


def _cudnn_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    out, save_mean, save_var, reserve, new_mean, new_var = aten._batch_norm_with_update_functional(
        x, weight, bias, mean, var, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, save_mean, save_var, reserve


_HIDDEN_WRITES: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
}


class _Replay(fx.Interpreter):
    """Run a recording again, with its attributes given as values and its source lines carried over."""

    def __init__(self, module: fx.GraphModule, attributes: dict[str, int], values: list[Any]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._attributes = attributes
        self._values = values

    def run(self) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        count = sum(node.op == "placeholder" for node in self.module.graph.nodes)  # pyright: ignore
        return list(super().run(*self._values[:count]))

    def run_node(self, n: fx.Node) -> Any:
        tracing = proxy_tensor.get_proxy_mode()
        assert tracing is not None
        graph: fx.Graph = tracing.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        out = super().run_node(n)
        for node in reversed(graph.nodes):
            if node is last:
                break
            node.meta.setdefault("source", n.meta.get("source"))
        return out

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self._attributes:
            return self._values[self._attributes[target]]
        return super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        rule = _HIDDEN_WRITES.get(target)
        if rule is not None and args[3] is not None and args[4] is not None and args[5]:
            return rule(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _with_strides(value: Any, like: Any) -> Any:
    """``value`` with the strides that the first run, and so eager, gave it."""
    if not isinstance(value, torch.Tensor) or any(not isinstance(n, int) for n in like.shape):
        return value
    if value.stride() == like.stride() or _is_empty(value):
        return value
    return aten.copy(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device), value)


def _make_bases_relative(graph: fx.Graph, mode: FakeTensorMode, inputs: list[Input]) -> None:
    """Take views of a base relative to its first element: an absolute offset counts from the start of its storage."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for base, descriptor in zip(placeholders, inputs, strict=True):
        if not isinstance(descriptor, Base):
            continue
        for user in list(base.users):
            source, value = base, base.meta["val"]
            if user.target is aten.as_strided.default:
                size, stride, offset = user.args[1:4]
                with mode, graph.inserting_before(user):
                    if offset:
                        source = graph.call_function(aten.slice.Tensor, (base, 0, offset))
                        value = aten.slice.Tensor(value, 0, offset)
                user.args = (source, size, stride)
            elif user.target is aten.as_strided_scatter.default and user.args[0] is base:
                with mode, graph.inserting_before(user):
                    source, value = graph.call_function(aten.clone.default, (base,)), aten.clone.default(value)
                user.args = (source, *user.args[1:])
            if source is not base:
                source.meta = {"val": value, "source": user.meta.get("source")}


def _whole_memory(value: torch.Tensor, size: int, recording: _Recording, position: int) -> torch.Tensor:
    """The memory that several results share, as a flat tensor laid out as in the first run."""
    tensors = [leaf for leaf in recording.out_leaves if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))]
    like = tensors[position]
    if like.untyped_storage().nbytes() == TensorSpec.of(like).nbytes:
        value = _with_strides(value, like)
    same = value.stride() == like.stride() and value.storage_offset() == like.storage_offset()
    if not same or value.untyped_storage().nbytes() != size * value.element_size():
        raise TraceError(describe(f"trace({recording.name})(…)", "results share memory in a way that cannot be kept"))
    return value.as_strided((size,), (1,), 0)


def _relative_views(graph: fx.Graph, placeholders: list[fx.Node], inputs: list[Input]) -> None:
    """Say where views of a base lie in it, not in its storage: at a call the base lies anywhere in its own."""
    bases = {node for node, descriptor in zip(placeholders, inputs, strict=True) if isinstance(descriptor, Base)}
    for node in list(graph.nodes):
        scatter = node.target is aten.as_strided_scatter.default
        if not (scatter or node.target is aten.as_strided.default) or node.args[0] not in bases:
            continue
        if len(node.args) < (5 if scatter else 4):
            continue  # without an offset it is relative already
        base, *middle, size, stride, offset = node.args
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        part_value = base.meta["val"].new_empty(span)
        with graph.inserting_before(node):
            part = graph.call_function(aten.slice.Tensor, (base, 0, offset, offset + span))
        part.meta = {**node.meta, "val": part_value}
        node.args = (part, *middle, size, stride)
        if scatter:
            with graph.inserting_after(node):
                whole = graph.call_function(aten.slice_scatter.default, (base, node, 0, offset, offset + span))
            node.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)
            whole.meta = {**node.meta}
            node.meta["val"] = part_value
            bases.add(whole)


def _fresh(value: Any) -> Any:
    return _relative_spec(value).empty() if isinstance(value, torch.Tensor) else value


def _finish_graph(graph: fx.Graph, inputs: list[Input], specs: list[Spec]) -> None:
    """Drop dead and empty operations, turn fake values into specs, and name placeholders by their descriptors."""
    for node in list(graph.nodes):
        if node.target in (aten.lift_fresh.default, aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=_has_effect)
    position = 0
    for node in graph.nodes:
        value = node.meta.pop("val", None)
        source = node.meta.get("source")
        node.meta = {"spec": _spec(value), "source": source}
        if node.op == "placeholder":
            node.meta["spec"] = specs[position]
            position += 1
    assert position == len(inputs)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node stays although nobody uses it: an unused random draw still moves the generator."""
    return node.is_impure() or is_random(node)


def _spec(value: Any) -> Spec:
    if isinstance(value, torch.Tensor):
        layout: tuple[Any, ...] = (*value.shape, *value.stride())
        known = all(isinstance(n, int) or n.node.is_constant() for n in layout)
        if not known or not isinstance(value.storage_offset(), int):
            return None
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_spec(item) for item in value)
    for symbolic, kind in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
        if isinstance(value, symbolic):
            return kind
    if isinstance(value, (bool, int, float)):
        return type(value)
    return None


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _input_path(path: Any) -> str:
    """``args[0]['w']`` or ``kwargs['x']`` from a pytree key path of ``(args, kwargs)``."""
    return ("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:])


def _output_path(path: Any) -> str:
    return "result" + pytree.keystr(path)
