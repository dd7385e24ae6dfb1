"""The transforms as users see them: on functions, which they stack on, and on Programs, which they rewrite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import torch

from pygraph.api.functions import is_method_wrapper
from pygraph.api.module import TransformedModule, transformed, transformed_behind
from pygraph.api.options import check_choice, make_options, merged_options, no_unknown_options, selection_policy
from pygraph.calls.measuring import measured_program
from pygraph.calls.transformed import Transformed
from pygraph.errors import ArgumentError, describe
from pygraph.ir.descriptors import STAGES, Stage
from pygraph.ir.program import Program
from pygraph.ir.selections import Mechanism, Mode, Objective
from pygraph.transforms.passes import (
    DEVICIFY,
    FUSE,
    GRAPHIFY,
    INDIRECT,
    SELECT,
    Pass,
    check_order,
)

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """A transform whose options have been given: it takes a function, a module or a Program."""

    @overload
    def __call__(self, fn: torch.nn.Module, /) -> TransformedModule: ...

    @overload
    def __call__(self, fn: Program, /) -> Program: ...

    @overload
    def __call__(self, fn: Callable[P, R], /) -> Transformed[P, R]: ...


@overload
def devicify(fn: torch.nn.Module, /, *, bounds: Mapping[str, int | None] | None = None) -> TransformedModule: ...


@overload
def devicify(fn: Program, /, *, bounds: Mapping[str, int | None] | None = None) -> Program: ...


@overload
def devicify(fn: Callable[P, R], /, *, bounds: Mapping[str, int | None] | None = None) -> Transformed[P, R]: ...


@overload
def devicify(fn: None = None, /, *, bounds: Mapping[str, int | None] | None = None) -> Decorator: ...


@no_unknown_options
def devicify(fn: Any = None, /, *, bounds: Mapping[str, int | None] | None = None) -> Any:
    """Make Python numbers and CPU scalars inputs of the graph, so that they may change from call to call.

    Without it, an operation that takes such a number or scalar cuts the graph in two. Constants on the CPU are uploaded
    once, and uploads and downloads move to the ends of the call. `print(pygraph.devicify(program))` shows what has
    changed.

    With `bounds`, results whose size depends on data are padded, so that they and what follows are in the graph: a mask
    says which entries are real, and sums, means, losses, products and indices leave the others out. Where an operation
    needs a tensor without padding, and for results of the function, the size is read on the host.

    Args:
        fn: A function, a module, or a Program.
        bounds: The most entries of such results, by the name of an operation (``nonzero``, which ``torch.where(mask)``
            is, ``index`` by a mask, ``masked_select``, ``unique``, ``repeat_interleave``) or by its line, as
            ``{"train.py:12": 64}``. None is as many as there are elements. More entries than their bound end the
            process's use of the device with an error, as an index out of range does.

    Returns:
        The same kind of thing.

    Raises:
        StageError: A later transform has been applied already.
        ArgumentError: A bound is no positive number, or no such operation has one.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> pygraph.devicify(lambda x, k: x * k)(x, 2.5).tolist()
        [2.5, 2.5]
        >>> mean = pygraph.jit(lambda x: x[x > 1].mean(), bounds={"index": None}, strict=True)
        >>> mean(x * 3).item(), mean(x + torch.arange(2, device=x.device)).item()
        (3.0, 2.0)
    """
    return _apply(DEVICIFY, fn, {"bounds": bounds})


@overload
def fuse(fn: torch.nn.Module, /) -> TransformedModule: ...


@overload
def fuse(fn: Program, /) -> Program: ...


@overload
def fuse(fn: Callable[P, R], /) -> Transformed[P, R]: ...


@overload
def fuse(fn: None = None, /) -> Decorator: ...


@no_unknown_options
def fuse(fn: Any = None, /) -> Any:
    """Have Inductor fuse the device's operations to fewer kernels.

    See `pygraph.transforms.fuse.fuse_program` for the IR. Results are within the dtype's tolerance of eager's, random
    numbers the same. Devices other than ``cuda`` keep their operations, and ``explain()`` says so.

    Args:
        fn: A function, a module, or a Program at stage ``aten``.

    Returns:
        The same kind of thing.

    Raises:
        StageError: It or a later transform has been applied already.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> pygraph.graphify(pygraph.indirect(pygraph.fuse(lambda x: x.exp() + 1)))(x).shape
        torch.Size([2])
    """
    return _apply(FUSE, fn, {})


@overload
def indirect(fn: torch.nn.Module, /, *, mechanism: Mechanism = "auto") -> TransformedModule: ...


@overload
def indirect(fn: Program, /, *, mechanism: Mechanism = "auto") -> Program: ...


@overload
def indirect(fn: Callable[P, R], /, *, mechanism: Mechanism = "auto") -> Transformed[P, R]: ...


@overload
def indirect(fn: None = None, /, *, mechanism: Mechanism = "auto") -> Decorator: ...


@no_unknown_options
def indirect(fn: Any = None, /, *, mechanism: Mechanism = "auto") -> Any:
    """Let a graph read arguments and write results at addresses that change at every call, instead of copying.

    Before a replay, the pointers in the graph are changed, and no data is moved. Without it, arguments are copied to
    fixed addresses.

    Args:
        fn: A function, a module, or a Program.
        mechanism: How graphs change pointers: ``host``, ``device``, ``table`` or ``copy`` wherever a kernel allows it,
            or ``auto`` for the cheapest.

    Returns:
        The same kind of thing.

    Raises:
        StageError: It or a later transform has been applied already.
        ArgumentError: There is no such mechanism.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> pygraph.indirect(torch.exp)(x).shape
        torch.Size([2])
    """
    return _apply(INDIRECT, fn, {"mechanism": mechanism})


@overload
def graphify(
    fn: torch.nn.Module, /, *, max_graphs: int = 64, strict: bool = False, reuse_outputs: bool = False
) -> TransformedModule: ...


@overload
def graphify(fn: Program, /, *, max_graphs: int = 64, strict: bool = False, reuse_outputs: bool = False) -> Program: ...


@overload
def graphify(
    fn: Callable[P, R], /, *, max_graphs: int = 64, strict: bool = False, reuse_outputs: bool = False
) -> Transformed[P, R]: ...


@overload
def graphify(
    fn: None = None, /, *, max_graphs: int = 64, strict: bool = False, reuse_outputs: bool = False
) -> Decorator: ...


@no_unknown_options
def graphify(fn: Any = None, /, *, max_graphs: int = 64, strict: bool = False, reuse_outputs: bool = False) -> Any:
    """Record runs of kernels as CUDA graphs and replay them; what cannot be recorded runs between them.

    Args:
        fn: A function, a module, or a Program.
        max_graphs: How many kinds of calls are kept as graphs.
        strict: Raise FallbackError where something would not run as a graph.
        reuse_outputs: Write results to the same memory at every call; any later call may overwrite them.

    Returns:
        The same kind of thing.

    Raises:
        StageError: It or a later transform has been applied already.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> f = pygraph.graphify(pygraph.indirect(lambda x: x + 1))
        >>> f(f(x)).tolist()
        [3.0, 3.0]
    """
    options = {"max_graphs": max_graphs, "strict": strict, "reuse_outputs": reuse_outputs}
    return _apply(GRAPHIFY, fn, options)


@overload
def select(
    fn: torch.nn.Module,
    /,
    *,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> TransformedModule: ...


@overload
def select(
    fn: Program,
    /,
    *,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> Program: ...


@overload
def select(
    fn: Callable[P, R],
    /,
    *,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> Transformed[P, R]: ...


@overload
def select(
    fn: None = None,
    /,
    *,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> Decorator: ...


@no_unknown_options
def select(
    fn: Any = None,
    /,
    *,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> Any:
    """Run every region in the fastest way: by ordinary launches, or as a graph, by one mechanism or another.

    The candidates are timed in interleaved rounds, each run from the state that the call finds, until an interval of
    the median decides, the budget ends, or ten thousand calls could not gain as much as has been spent. Another way
    than the one that a model of costs prefers must be faster by 1 % and by 1 µs. While other work keeps the device busy
    the model decides, and later calls measure again, at less than a thousandth of the time. What was measured is
    remembered in the user's cache directory: a second process measures nothing. See
    `pygraph.transforms.select.select_program` for the IR, and ``explain()`` for the reasons.

    Source: "selective CUDA Graphs" (SCG), arXiv 2503.19779.

    Args:
        fn: A function or module with ``graphify`` applied, or a Program at stage ``regions``.
        objective: The time that is to be short: ``throughput`` (of a call in a row of calls, for which the host works
            ahead of the device), ``latency`` (of a call on an idle device until its result is there), or ``cpu`` (of
            the host).
        budget: Seconds for the measurements of one kind of call, at most; a few runs of each way are made in any case.
        mode: ``measure``; ``heuristic`` to have the model of costs decide; ``replay`` or ``launch`` to have all regions
            run as graphs or by ordinary launches.
        timer: Microseconds of one ``run()``; the device's own measurement by default. It may call ``run`` as often as
            it likes: every run starts from the state that the call finds. Putting that back is part of ``run()``; a
            timer that wants to leave it out calls ``run.prepare()``, and then ``run.timed()`` for what it measures;
            ``run.way`` is the candidate. Its times are not remembered.

    Returns:
        The same kind of thing. A Program is measured with made-up arguments, unless it computes indices from them.

    Raises:
        StageError: ``graphify`` has not been applied.
        ArgumentError: An option has a wrong value.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> fast = pygraph.select(pygraph.graphify(torch.sin), objective="latency")
        >>> fast(x).shape
        torch.Size([2])
    """
    policy = selection_policy("select(…)", objective, budget, mode, timer)
    return _apply(SELECT, fn, {"selection": policy}, functools.partial(measured_program, policy=policy))


def _apply(
    one: Pass, fn: Any, options: Mapping[str, Any], on_program: Callable[[Program], Program] | None = None
) -> Any:
    """Apply a pass to a function or a module, whose stack it joins, or to a Program.

    Args:
        one: The pass.
        fn: A function, a module, or a Program; None for a decorator.
        options: Options of the stack.
        on_program: What is done to a Program, if that is not the pass with its options.
    """
    call = f"{one.name}(…)"
    made = make_options(call, **options)
    if fn is None or is_method_wrapper(fn):
        decorator = functools.partial(_apply, one, options=options, on_program=on_program)
        return decorator if fn is None else type(fn)(decorator(fn.__func__))
    if isinstance(fn, Program):
        return on_program(fn) if on_program is not None else one(fn, **{name: options[name] for name in one.options})
    inner = transformed_behind(fn)
    if inner is None:
        check_order(one, (), getattr(fn, "__name__", type(fn).__name__))
        return transformed(fn, (one,), made, one.name)
    check_order(one, inner.passes, inner.engine.name)
    return transformed(inner.fn, (*inner.passes, one), merged_options(call, inner.options, options), one.name)


class Transform:
    """A transform made from a pass of a user's, see `pygraph.transform`.

    Attributes:
        applied: The pass, with the stages that it takes and leaves.
    """

    def __init__(self, applied: Pass) -> None:
        self.applied = applied
        self.__name__, self.__doc__ = applied.name, applied.function.__doc__

    def __call__(self, fn: Any, /) -> Any:
        """Apply the transform to a function, a module or a Program; the same kind of thing is returned."""
        return _apply(self.applied, fn, {})

    def __repr__(self) -> str:
        return f"<pygraph transform {self.applied.name}>"


@no_unknown_options
def transform(
    fn: Callable[[Program], Program] | None = None,
    /,
    *,
    stage: Stage | Sequence[Stage] = "aten",
    leaves: Stage | None = None,
    name: str | None = None,
) -> Any:
    """Make a transform of a function from Programs to Programs, which stacks with those of pygraph.

    The function must be pure: it copies the graph that it edits (``program.copy_graph()``), and what it returns
    computes the same. Every Program that it returns is checked against the rules of its stage.

    Args:
        fn: A function from Program to Program. None to use it as a decorator with options.
        stage: The stage, or the stages, of Programs that it takes: ``aten``, ``kernels``, ``pointers`` or ``regions``.
        leaves: The stage of what it returns, if that is another one.
        name: What history and errors call it; the function's name by default.

    Returns:
        A transform: it takes a function, a module or a Program, and returns the same kind of thing.

    Raises:
        ArgumentError: There is no such stage, or ``fn`` is not callable.

    Example:
        >>> import torch, pygraph
        >>> @pygraph.transform(stage="aten")
        ... def sine_as_cosine(program):
        ...     module = program.copy_graph()
        ...     for node in module.graph.nodes:
        ...         if node.target is torch.ops.aten.sin.default:
        ...             node.target = torch.ops.aten.cos.default
        ...     module.recompile()
        ...     return program.replace(module=module)
        >>> x = torch.zeros(2, device=pygraph.default_device())
        >>> pygraph.graphify(pygraph.indirect(sine_as_cosine(torch.sin)))(x).tolist()
        [1.0, 1.0]
    """
    takes = cast("tuple[Stage, ...]", tuple(stage) if isinstance(stage, (tuple, list)) else (stage,))
    for one in takes:
        check_choice("transform(…)", "stage", one, STAGES)
    if leaves is not None:
        check_choice("transform(…)", "leaves", leaves, STAGES)
    if name is not None and not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(describe("transform(…)", f"name={name!r}", expected="a string"))
    if fn is None:
        return functools.partial(transform, stage=stage, leaves=leaves, name=name)
    if not callable(fn) or isinstance(fn, type):
        raise ArgumentError(
            describe(f"transform({fn!r})", "no function", expected="a function from Program to Program")
        )
    return Transform(Pass(name or getattr(fn, "__name__", type(fn).__name__), fn, takes, leaves))
