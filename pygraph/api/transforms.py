"""The transforms as users see them: on functions, which they stack on, and on Programs, which they rewrite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pygraph.api.jit import make_options
from pygraph.api.module import transformed
from pygraph.calls.measuring import measured_program
from pygraph.calls.options import Options
from pygraph.calls.transformed import Transformed
from pygraph.errors import ArgumentError, describe
from pygraph.ir.check import check_program
from pygraph.ir.descriptors import MECHANISMS, Mechanism
from pygraph.ir.program import Program
from pygraph.transforms.passes import DEVICIFY, FUSE, GRAPHIFY, INDIRECT, SELECT, Pass, check_order


def devicify(fn: Any = None, /) -> Any:
    """Take host values out of the way of a device program.

    Numbers and 0-d CPU tensors become device scalars that are refreshed at every call; constants, factories and
    uploads move off the device's path. See `pygraph.transforms.devicify.devicify_program` for the IR.

    Args:
        fn: A function, a module, or a Program.

    Returns:
        The same kind of thing.

    Raises:
        StageError: A later transform has been applied already.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> pygraph.devicify(lambda x, k: x * k)(x, 2.5).tolist()
        [2.5, 2.5]
    """
    return _apply(DEVICIFY, fn, DEVICIFY, {})


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
    return _apply(FUSE, fn, FUSE, {})


def indirect(fn: Any = None, /, *, mechanism: Mechanism = "auto") -> Any:
    """Put arguments and results behind pointer slots, so that a replay updates pointers instead of copying data.

    See `pygraph.transforms.indirect.indirect_program` for the IR.

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
    if mechanism not in MECHANISMS:
        expected = " or ".join(map(repr, MECHANISMS))
        raise ArgumentError(describe("indirect(…)", f"mechanism={mechanism!r}", expected=expected))
    on_program = functools.partial(INDIRECT, mechanism=mechanism)
    return _apply(INDIRECT, fn, on_program, {"mechanism": mechanism})


def graphify(fn: Any = None, /, *, max_graphs: int = 64, strict: bool = False, reuse_outputs: bool = False) -> Any:
    """Record runs of kernels as CUDA graphs and replay them; what cannot be recorded runs between them.

    See `pygraph.transforms.graphify.graphify_program` for the IR.

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
    return _apply(GRAPHIFY, fn, GRAPHIFY, options)


def select(fn: Any = None, /, *, timer: Callable[[Callable[[], object]], float] | None = None) -> Any:
    """Measure every graph against ordinary launches and against copies, and keep the fastest.

    Source: "selective CUDA Graphs" (SCG), arXiv 2503.19779.

    Args:
        fn: A function or module with ``graphify`` applied, or a Program at stage ``regions``.
        timer: Microseconds of one ``run()``; the device's own measurement by default. It may call ``run`` as often as
            it likes: every run starts from the state that the call finds. Putting that back is part of ``run()``; a
            timer that wants to leave it out calls ``run.prepare()``, and then ``run.timed()`` for what it measures.

    Returns:
        The same kind of thing. A Program is measured with made-up arguments, unless it computes indices from them.

    Raises:
        StageError: ``graphify`` has not been applied.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> pygraph.select(pygraph.graphify(torch.sin))(x).shape
        torch.Size([2])
    """
    return _apply(SELECT, fn, functools.partial(measured_program, timer=timer), {"timer": timer})


def _apply(one: Pass, fn: Any, on_program: Callable[[Program], Program], options: dict[str, Any]) -> Any:
    if fn is None:
        return functools.partial(_apply, one, on_program=on_program, options=options)
    if isinstance(fn, Program):
        return check_program(on_program(fn))
    inner = getattr(fn, "_pygraph_transformed", fn) if isinstance(fn, torch.nn.Module) else fn
    if not isinstance(inner, Transformed):
        check_order(one, (), getattr(fn, "__name__", type(fn).__name__))
        return transformed(fn, (one,), make_options(**options))
    check_order(one, inner.passes, inner.engine.name)
    kept = {key: getattr(inner.options, key) for key in Options.__dataclass_fields__}
    changed = {key: value for key, value in options.items() if value != getattr(Options(), key)}
    return transformed(inner.fn, (*inner.passes, one), make_options(**{**kept, **changed}))
