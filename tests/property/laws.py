"""The laws, as plain functions: what every pass and every stack must keep. Each raises AssertionError if broken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import pygraph
from pygraph.ir.descriptors import ScalarArgument, TensorSpec
from pygraph.ir.evaluate import bind
from pygraph.ir.printing import NAMESPACE
from tests.memory import live_bytes
from tests.property.strategies import Case, is_writable

Pass = Callable[[pygraph.Program], pygraph.Program]

PASSES: dict[str, Pass] = {
    "devicify": pygraph.devicify,
    "indirect": pygraph.indirect,
    "graphify": pygraph.graphify,
    "select": pygraph.select,
}


# ---- comparing -------------------------------------------------------------------------------------------------


def assert_same_value(
    got: Any, expected: Any, where: str = "a value", strides: bool = True, rounding: float = 0.0
) -> None:
    """Equal, with the same shape, strides, dtype and device; on a GPU close, as kernels with atomics differ.

    ``rounding``, relative to the largest element, is what sums of gradients may differ by, added in another order.
    """
    assert type(got) is type(expected) or isinstance(got, type(expected)), (where, got, expected)
    if not isinstance(expected, torch.Tensor):
        assert got == expected, (where, got, expected)
        return
    assert got.shape == expected.shape, (where, got.shape, expected.shape)
    assert got.dtype == expected.dtype, (where, got.dtype, expected.dtype)
    assert got.device == expected.device, (where, got.device, expected.device)
    if expected.numel() and strides:
        assert _strides(got) == _strides(expected), (where, got.stride(), expected.stride())
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if torch.equal(got, expected):
        return
    if not expected.dtype.is_floating_point:
        raise AssertionError((where, got, expected))
    scale = max(1.0, torch.nan_to_num(expected.double(), 0, 0, 0).abs().max().item())
    rtol = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-7}.get(expected.dtype, 1.3e-6)
    atol = {torch.float16: 1e-5, torch.bfloat16: 1e-5, torch.float64: 1e-7}.get(expected.dtype, 1e-5)
    atol = max(atol, rounding) * scale
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{where}: {text}")


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides that matter: those of dimensions with more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def sharing(arguments: list[Any], others: list[Any]) -> list[Any]:
    """How leaves share memory: which argument each is, and where it lies in whose memory."""
    leaves = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in (*arguments, *others)]
    storages = [leaf.untyped_storage().data_ptr() if leaf is not None and leaf.numel() else None for leaf in leaves]
    pattern: list[Any] = []
    for leaf, storage in zip(leaves, storages, strict=True):
        same = next((i for i, other in enumerate(arguments) if other is leaf), None) if leaf is not None else None
        first = storages.index(storage)
        place = (first, leaf.data_ptr() - leaves[first].data_ptr()) if storage else None  # type: ignore[union-attr]
        pattern.append((same, place))
    return pattern


class Outcome:
    """What a call did: its result or exception, its arguments and state afterwards, and the random stream."""

    def __init__(self, call: Callable[..., Any], args: Any, state: list[torch.Tensor], seed: int | None) -> None:
        if seed is not None:
            torch.manual_seed(seed)
        self.error: Exception | None = None
        self.result: Any = None
        try:
            self.result = call(*args)
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            if isinstance(error, pygraph.PygraphError):
                raise
            self.error = error
        self.args, self.state = args, state
        device = next((leaf.device for leaf in [*pytree.tree_leaves(args), *state] if _is_device(leaf)), "cpu")
        self.random = torch.rand(2, device=device).cpu() if seed is not None else None

    def sharing(self) -> list[Any]:
        return sharing(pytree.tree_leaves(self.args), [*self.state, *pytree.tree_leaves(self.result)])

    def check_same(self, other: Outcome, memory: bool = True, rounding: float = 0.0) -> None:
        """Check that the outcome is that of ``other``, the reference, and its ``memory`` laid out and shared alike."""
        assert type(self.error) is type(other.error), (self.error, other.error)
        if other.error is not None:
            assert _first_line(self.error) == _first_line(other.error), (self.error, other.error)
        mine, theirs = pytree.tree_flatten_with_path(self.result), pytree.tree_flatten_with_path(other.result)
        assert mine[1] == theirs[1], (mine[1], theirs[1])
        for (path, got), (_, expected) in zip(mine[0], theirs[0], strict=True):
            assert_same_value(got, expected, "result" + pytree.keystr(path), strides=memory, rounding=rounding)
        for (path, got), (_, expected) in zip(
            pytree.tree_flatten_with_path(self.args)[0], pytree.tree_flatten_with_path(other.args)[0], strict=True
        ):
            assert_same_value(got, expected, "args" + pytree.keystr(path) + " afterwards")
        for index, (got, expected) in enumerate(zip(self.state, other.state, strict=True)):
            assert_same_value(got, expected, f"state {index} afterwards")
        names = [f"argument {i}" for i in range(len(pytree.tree_leaves(self.args)))]
        names += [f"state {i}" for i in range(len(self.state))]
        for index, (place, wanted) in enumerate(zip(self.sharing(), other.sharing(), strict=True)):
            name = names[index] if index < len(names) else f"result {index - len(names)}"
            assert place == wanted or not memory, (
                f"{name} shares memory in another way: {place}, expected {wanted} ({names})"
            )
        if other.random is not None:
            assert torch.equal(self.random, other.random), "the random stream is at another place"


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"


def _first_line(error: Exception | None) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def _without_grad(law: Callable[..., Any]) -> Callable[..., Any]:
    """Modules' parameters require grad, and a call that records a gradient runs as it is: not what is tested here."""

    @functools.wraps(law)
    def checked(*args: Any, **kwargs: Any) -> Any:
        case = next(value for value in (*args, *kwargs.values()) if isinstance(value, Case))
        with torch.set_grad_enabled(case.module is None):
            return law(*args, **kwargs)

    return checked


# ---- laws of stacks --------------------------------------------------------------------------------------------


@_without_grad
def check_stack_equals_eager(
    case: Case, stack: Callable[[Any], Any], device: torch.device, calls: int = 3, *, numbers: bool = True
) -> Any:
    """A stack gives what eager gives, over several calls with fresh arguments at other addresses, other contents and
    other numbers; what earlier calls returned stays as it was; arguments are freed (and overwritten) in between.
    """
    eager, mine = case.function(device), case.function(device)
    stacked = stack(mine)
    held: list[tuple[Any, Any]] = []
    for call in range(calls):
        seeds = {"seed": call, "number_seed": call if numbers else 0}
        expected = Outcome(eager, case.arguments(device, **seeds), eager.state.all_tensors(), call)
        got = Outcome(stacked, case.arguments(device, **seeds), mine.state.all_tensors(), call)
        got.check_same(expected)
        held.append((got.result, expected.result))
        garbage = [scramble(leaf) for leaf in pytree.tree_leaves(got.args) if _is_disposable(leaf, got)]
        del got, expected, garbage
        for number, (result, reference) in enumerate(held[:-1]):
            check_held(result, reference, f"the result of call {number}")
    return stacked


def _is_disposable(leaf: Any, outcome: Outcome) -> bool:
    """Whether an argument's memory belongs to nobody else."""
    if not _is_device(leaf) or not leaf.numel():
        return False
    storage = leaf.untyped_storage().data_ptr()
    others = [*outcome.state, *pytree.tree_leaves(outcome.result)]
    return all(
        not isinstance(o, torch.Tensor) or not o.numel() or o.untyped_storage().data_ptr() != storage for o in others
    )


def scramble(tensor: torch.Tensor) -> None:
    """Overwrite a tensor that will not be used again, as the next owner of its memory would."""
    with torch.no_grad():
        span = TensorSpec.of(tensor).span
        flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
        flat.fill_(float("nan") if tensor.dtype.is_floating_point else 1)


def check_held(result: Any, reference: Any, where: str) -> None:
    """A result is still what the reference is (which changes with an argument or state that it is a view of)."""
    for got, expected in zip(pytree.tree_leaves(result), pytree.tree_leaves(reference), strict=True):
        assert_same_value(got, expected, where)


@_without_grad
def check_composes(case: Case, stack: Callable[[Any], Any], device: torch.device) -> None:
    """``f(f(x))``: a result may be the next argument."""
    eager, mine = case.function(device), case.function(device)
    stacked = stack(mine)
    for _ in range(2):
        got, expected = (
            Outcome(lambda function=function: _composed(function, case, device), (), state.all_tensors(), 0)
            for function, state in ((stacked, mine.state), (eager, eager.state))
        )
        got.check_same(expected)


def _composed(function: Callable[..., Any], case: Case, device: torch.device) -> list[Any]:
    """The last result and what would be the next argument, after three calls."""
    first, *rest = case.arguments(device)
    if not _is_device(first):  # the arguments are in one list
        first, *rest = first
    value, result = first, None
    for _ in range(3):
        result = function([value, *rest]) if case.argument_tree == "list" else function(value, *rest)
        same = [r for r in pytree.tree_leaves(result) if _is_device(r) and _kind(r) == _kind(first)]
        value = same[0].detach() if same else value
    return [result, value]


def _kind(tensor: torch.Tensor) -> Any:
    return (tensor.shape, tensor.dtype, tensor.stride())


@_without_grad
def check_no_leak(case: Case, stack: Callable[[Any], Any], device: torch.device, rounds: int = 2) -> None:
    """When the function, its arguments and its results are gone, so is all their memory."""
    for _ in range(rounds):
        before = live_bytes(device)
        fn = case.function(device)
        stacked = stack(fn)
        for call in range(2):
            torch.manual_seed(0)
            stacked(*case.arguments(device, seed=call))
        stacked.cache_clear()
        del fn, stacked
        after = live_bytes(device)
    # The first round may leave what libraries keep (workspaces); the second must leave nothing.
    assert after <= before, f"{after - before} bytes are still in use"


# ---- laws of passes --------------------------------------------------------------------------------------------


@_without_grad
def check_pass(transform: Pass, program: pygraph.Program, case: Case, device: torch.device, eager: Any) -> Any:
    """One pass: legal result, input unchanged, and evaluating the result gives what the function gives.

    Args:
        transform: The pass.
        program: A Program of a function with the state ``eager.state``.
        case: The case.
        device: The device.
        eager: The function that was traced.
    """
    before, inputs = str(program), (program.inputs, program.outputs, program.aliases, program.history)
    after = transform(program)
    assert str(program) == before, "the pass changed the Program that it was given"
    assert inputs == (program.inputs, program.outputs, program.aliases, program.history)
    pygraph.check_program(after)
    assert str(after) == str(after)
    check_evaluates(after, case, device, eager)
    return after


def check_evaluates(program: pygraph.Program, case: Case, device: torch.device, eager: Any) -> None:
    """``evaluate(program)`` does what the traced function does, also with other contents and other live numbers."""
    with torch.set_grad_enabled(case.module is None):  # as it was traced
        _check_evaluates(program, case, device, eager)


def _check_evaluates(program: pygraph.Program, case: Case, device: torch.device, eager: Any) -> None:
    live = sum(isinstance(d, ScalarArgument) for d in program.inputs)
    numbers = sum((isinstance(leaf, (int, float)) and not isinstance(leaf, bool)) or _is_numpy(leaf)
                  for leaf in pytree.tree_leaves(case.arguments(torch.device("cpu"))))  # fmt: skip
    for seed in (0, 1):
        seeds = {"seed": seed, "number_seed": seed if live == numbers else 0}
        state = eager.state.all_tensors()
        saved = [tensor.detach().clone() for tensor in state]
        expected = Outcome(eager, case.arguments(device, **seeds), state, seed)
        changed = [tensor.detach().clone() for tensor in state]
        _restore(state, saved)
        got = Outcome(lambda *args: pygraph.evaluate(program, *args), case.arguments(device, **seeds), state, seed)
        for index, (tensor, wanted) in enumerate(zip(state, changed, strict=True)):
            assert_same_value(tensor.detach().clone(), wanted, f"state {index} afterwards")
        got.check_same(expected)
        _restore(state, saved)


def _is_numpy(leaf: Any) -> bool:
    return type(leaf).__module__ == "numpy" and not isinstance(leaf, bool)


def _restore(state: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, contents in zip(state, saved, strict=True):
            if is_writable(tensor):
                tensor.copy_(contents)


@_without_grad
def check_text_runs(program: pygraph.Program, case: Case, device: torch.device) -> None:
    """The printed text is a function that does what the module does."""
    scope = dict(NAMESPACE)
    exec(str(program), scope)
    outcomes = []
    for run in (program.module, scope["program"]):
        leaves = pytree.tree_leaves((case.arguments(device), {}))
        inputs, stored = bind(program, leaves)
        copies = [value.clone() if _is_captured(value, leaves) else value for value in inputs]
        torch.manual_seed(0)
        with torch.no_grad():
            results = run(*copies)
        outcomes.append([*results, *stored.values(), *copies])
    for index, (expected, got) in enumerate(zip(*outcomes, strict=True)):
        if program.table is None or not (isinstance(got, torch.Tensor) and got.device.type == "cpu"):
            assert_same_value(got, expected, f"value {index}")


def _is_captured(value: Any, leaves: list[Any]) -> bool:
    return _is_device(value) and all(value is not leaf for leaf in leaves)
