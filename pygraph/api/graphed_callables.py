"""`pygraph.make_graphed_callables`: drop-in partial capture, as of `torch.cuda.make_graphed_callables`."""

# Modules have attributes of any type, and results of callables are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch.utils import _pytree as pytree

from pygraph.api.functions import check_function
from pygraph.api.jit import jit
from pygraph.api.module import TransformedModule
from pygraph.api.options import no_unknown_options
from pygraph.calls.options import check_flag
from pygraph.calls.transformed import Transformed
from pygraph.errors import ArgumentError, describe
from pygraph.guards.environment import Environment
from pygraph.guards.iterators import is_generator
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.evaluate import clone_strided
from pygraph.ir.paths import flatten_with_path
from pygraph.process import progress
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import RandomStates
from pygraph.tracing.generators import Generators
from pygraph.tracing.iterator_locations import generators_of

C = TypeVar("C", bound=Callable[..., Any])


@overload
def make_graphed_callables(
    callables: tuple[C, ...],
    sample_args: tuple[tuple[Any, ...], ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: tuple[int, int] | None = None,
) -> tuple[C, ...]: ...


@overload
def make_graphed_callables(
    callables: C,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: tuple[int, int] | None = None,
) -> C: ...


@no_unknown_options
def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: tuple[int, int] | None = None,
) -> Any:
    """Run functions and modules as graphs, forward and backward, with `torch.cuda.make_graphed_callables`'s signature.

    Unlike there, calls may differ from the sample: other shapes, dtypes and strides, keyword arguments, arguments that
    are no tensors, other addresses, arguments that share memory, the other of ``train()`` and ``eval()``. Each kind of
    call is compiled when it comes first; one like the sample is compiled here, with its backward. Results are never
    overwritten by later calls, second derivatives and hooks work, parameters may move, and buffers may require grad.

    Args:
        callables: A function or an ``nn.Module``, or a tuple of them.
        sample_args: The positional arguments of a call: a tuple of pytrees of tensors of any shape and dtype, numbers
            and other values. For a tuple of callables, a tuple of such tuples. Which tensors require grad should be as
            in later calls.
        num_warmup_iters: How many times the sample is run, forward and backward; at least once.
        allow_unused_input: Whether an argument or a parameter that requires grad may be of no influence on the results.
        pool: For compatibility: a token of `torch.cuda.graph_pool_handle`. It has no effect, as each callable's graphs
            share memory of their own, and what outlasts a call is in no graph's memory.

    Returns:
        For a function, a transformed function, as of `pygraph.jit`. A module itself, whose ``forward`` is replaced by a
        transformed one (``module.forward.explain()`` says how it runs); its hooks run around it. For a tuple, a tuple.
        Nothing else is changed by running the samples: random generators, gradients, and the contents of arguments,
        parameters and buffers are put back, for which there must be memory for a copy of them.

    Raises:
        ArgumentError: The arguments do not fit together, or something that requires grad is unused though
            ``allow_unused_input`` is False. No module has been changed.

    Example:
        >>> import torch, pygraph
        >>> device = pygraph.default_device()
        >>> model = torch.nn.Linear(4, 2).to(device)
        >>> x = torch.randn(8, 4, device=device)
        >>> model is pygraph.make_graphed_callables(model, (x,))
        True
        >>> model(x[:3]).sum().backward()  # of another shape than the sample
        >>> model.bias.grad.tolist()
        [3.0, 3.0]
    """
    several = isinstance(callables, tuple)
    given = cast("tuple[Any, ...]", callables if several else (callables,))
    samples: Any = sample_args if several else (sample_args,)
    _check(given, samples, several, num_warmup_iters, pool)
    check_flag(_NAME, "allow_unused_input", allow_unused_input)
    graphed: list[Any] = []
    with contextlib.ExitStack() as undo:
        for fn in given:
            graphed.append(_graphed(fn, undo))
        for index, (fn, args) in enumerate(zip(graphed, samples, strict=True)):
            where = f"sample_args[{index}]" if several else "sample_args"
            with progress.compiling(getattr(fn, "__name__", type(fn).__name__)):
                _run_sample(fn, args, where, max(num_warmup_iters, 1), allow_unused_input)
        undo.pop_all()  # all went well
    return tuple(graphed) if several else graphed[0]


_NAME = "make_graphed_callables(…)"


def _check(callables: tuple[Any, ...], samples: Any, several: bool, num_warmup_iters: object, pool: object) -> None:
    for index, fn in enumerate(callables):
        if not callable(fn):
            where = f"callables[{index}]" if several else "callables"
            raise ArgumentError(
                describe(_NAME, f"{where} is a {type(fn).__name__}", expected="a function or an nn.Module")
            )
        check_function("make_graphed_callables", fn)
    if not isinstance(samples, tuple) or not all(isinstance(args, tuple) for args in samples):
        expected = "a tuple of tuples, one for each callable" if several else "a tuple of arguments"
        raise ArgumentError(
            describe(
                _NAME, "sample_args is not of the right structure", expected=expected, remedy="Write (x,) for one."
            )
        )
    if len(samples) != len(callables):
        raise ArgumentError(
            describe(
                _NAME, f"sample_args has {len(samples)} items", expected=f"{len(callables)}, one for each callable"
            )
        )
    if not isinstance(num_warmup_iters, int) or isinstance(num_warmup_iters, bool) or num_warmup_iters < 0:
        raise ArgumentError(describe(_NAME, f"num_warmup_iters={num_warmup_iters!r}", expected="an integer from 0 on"))
    if pool is not None and not isinstance(pool, tuple):
        raise ArgumentError(
            describe(_NAME, f"pool is a {type(pool).__name__}", expected="None or a token of graph_pool_handle()")
        )


def _graphed(fn: Any, undo: contextlib.ExitStack) -> Any:
    """The transformed function; for a module the module, whose forward is one from now on."""
    if isinstance(fn, (Transformed, TransformedModule)):
        return fn
    if not isinstance(fn, torch.nn.Module):
        return jit(fn)
    if not isinstance(fn.forward, Transformed):
        before = vars(fn).get("forward")
        fn.forward = jit(fn.forward)
        undo.callback(_put_forward, fn, before)
    return fn


def _put_forward(module: torch.nn.Module, forward: Any) -> None:
    """Undo `_graphed`; a forward of the class has no place in the module itself."""
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _run_sample(fn: Any, args: tuple[Any, ...], where: str, times: int, allow_unused: bool) -> None:
    """Compile a call and its backward by running them; what they change is put back."""
    keyed = [(f"{where}{pytree.keystr(path)}", leaf) for path, leaf in flatten_with_path(args)[0]]
    tensors = [(name, leaf) for name, leaf in keyed if isinstance(leaf, torch.Tensor)]
    environment = Environment(fn, {where: args})
    inputs = [(name, tensor) for name, tensor in tensors if tensor.requires_grad]
    if isinstance(fn, torch.nn.Module):
        inputs += [(name, parameter) for name, parameter in fn.named_parameters() if parameter.requires_grad]
    known = {id(tensor) for _, tensor in inputs}
    # A function's own parameters are no inputs that must be used, but it is differentiated by them in the same way.
    others = [tensor for tensor in environment.differentiable if id(tensor) not in known]
    unused: list[bool] = []
    generators = [leaf for _, leaf in keyed if is_generator(leaf)]
    with _unchanged([*(tensor for _, tensor in tensors), *environment.tensors], environment, generators):
        for _ in range(times):
            unused = _run_once(fn, args, [tensor for _, tensor in inputs], others)
    names = [name for (name, _), is_unused in zip(inputs, unused, strict=True) if is_unused]
    if names and not allow_unused:
        raise ArgumentError(
            describe(
                _NAME, f"{', '.join(names)} requires grad, and no result depends on it",
                expected="inputs that are used", remedy="Pass allow_unused_input=True if that is meant.",
            )
        )  # fmt: skip


def _run_once(fn: Any, args: tuple[Any, ...], inputs: list[torch.Tensor], others: list[torch.Tensor]) -> list[bool]:
    """Call, take the gradients, and say which inputs have none although there are results that require grad."""
    results = [out for out in pytree.tree_leaves(fn(*args)) if isinstance(out, torch.Tensor) and out.requires_grad]
    results = [out for out in results if out.grad_fn is not None]
    if not results or not (inputs or others):
        return [False] * len(inputs)
    cotangents = [torch.ones_like(out) for out in results]
    found = torch.autograd.grad(results, [*inputs, *others], cotangents, allow_unused=True)
    gradients = cast("Sequence[torch.Tensor | None]", found)
    return [gradient is None for gradient in gradients[: len(inputs)]]


@contextlib.contextmanager
def _unchanged(
    tensors: Sequence[torch.Tensor], environment: Environment, arguments: Sequence[torch.Generator]
) -> Generator[None, None, None]:
    """Put back what runs inside change: contents of tensors and of their gradients, gradients, random generators."""
    gradients = environment.gradients()
    kept = {id(tensor): tensor for tensor in [*tensors, *(one for _, one in gradients if one is not None)]}
    devices = {tensor.device for tensor in kept.values()}
    drivers = [driver for driver in map(driver_for, devices) if driver is not None]
    generators = Generators()
    with torch.no_grad():
        contents = [(tensor, clone_strided(tensor.detach())) for tensor in kept.values() if _has_memory(tensor)]
    states = RandomStates(drivers, [*arguments, *generators_of(environment)])
    try:
        yield
    finally:
        states.restore()
        generators.restore()
        environment.restore_gradients(gradients)
        with torch.no_grad():
            for tensor, before in contents:
                _put_back(tensor, before)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized and tensor.numel() > 0


def _put_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Write old contents to a tensor that has other ones: a write for nothing would outdate graphs of autograd's."""
    if torch.equal(tensor, before):
        return
    span = TensorSpec.of(before).span  # as one piece: elements may share memory
    flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
    flat.copy_(before.as_strided((span,), (1,), 0))
