"""Decisions: Python code that asks for the truth of a value on the device, or for a number that is there.

``if``, ``while`` and ``and`` ask for an outcome; ``int(t)``, a slice up to ``n.item()`` and the size of ``x[mask]`` for
a number. A trace takes the answer for granted, which is recorded as an operation that checks it
(`pygraph.ir.decisions`). So it is only done for a caller that makes another trace where the answer is another one, see
`pygraph.calls.deciding`. Answers that are not given are those of the call that is traced, see
`pygraph.tracing.real_values`.
"""

# Symbols and conditions have no types, and belong to private parts of torch. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import sympy  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.ir.decisions import Answer, answer_of, ask, is_question, text_of
from pygraph.ir.effects import has_sizes_of_data
from pygraph.ir.packed_sequences import UNSIZED
from pygraph.ir.source_lines import user_frame
from pygraph.tracing.fake_arguments import FakeArguments
from pygraph.tracing.number_hashes import give_hash
from pygraph.tracing.patches import replaced
from pygraph.tracing.proxy_trace import session_here
from pygraph.tracing.real_values import are_known, value_at
from pygraph.tracing.sized_views import SizedViews

MAX_DECISIONS = 64
"""As many questions as a trace asks; more are taken for a loop whose length is data."""


UNKNOWN_PATH = ("?",)
"""Instead of the answers of a call, where none are known: to trace it tells them."""


class OtherPathError(BaseException):
    """A call goes another way than its trace was told; no code of a user's catches it.

    Args:
        path: The answers that it gives, as texts.
    """

    def __init__(self, path: tuple[str, ...]) -> None:
        super().__init__()
        self.path = path


class Decisions:
    """The answers that one trace takes for granted.

    Args:
        given: The texts of the first ones.
        restore: Puts random generators back to where they were when the call began; None if no call is traced, and
            all answers must be given.
        trusted: Whether those given are the call's own; else each is looked up, and the right one taken.
        numbers: Whether questions for numbers are answered as well.
        sizes: Whether all sizes are asked for, those of packed sequences as well.
        keeps_all: Whether values are to outlast the next question that this trace does not read behind it.
        too_often: Lines that have asked too often in other traces of the function; one of this is added.

    Attributes:
        answers: The texts of all of them.
        lines: The user's lines that ask.
        before: The last node before the operation under way; None between operations.
        views: The views of which the trace has copies.
    """

    def __init__(
        self,
        given: Sequence[str],
        restore: Callable[[], None] | None,
        *,
        trusted: bool,
        numbers: bool,
        sizes: bool = False,
        keeps_all: bool = False,
        too_often: set[str | None] | None = None,
    ) -> None:
        self._too_often = set[str | None]() if too_often is None else too_often
        self._given, self._restore, self._trusted = tuple(given), restore, trusted or restore is None
        self.numbers, self.sizes, self._keeps_all = numbers, sizes, keeps_all
        self._outcomes: dict[Any, bool] = {}
        self.answers: list[str] = []
        self.lines: list[str | None] = []
        self.before: fx.Node | None = None
        self.views = SizedViews()
        self._is_in_operation = False

    def outcome(self, condition: Any) -> bool:
        """The outcome of a condition, whose check is recorded the first time."""
        expression = condition.node.expr
        if expression not in self._outcomes:
            tracer = _tracer()
            with self._in_order(tracer):
                proxy = get_proxy_slot(condition, tracer).force()
            self._outcomes[expression] = bool(self._asked(tracer, proxy, is_outcome=True))
        return self._outcomes[expression]

    def number(self, symbol: Any) -> int | float | None:
        """The number that a symbol stands for, for which it is not asked again; None if it is computed nowhere."""
        tracer = _tracer()
        found = tracer.sympy_expr_tracker.get(symbol)
        if found is None:
            return None
        with self._in_order(tracer):
            proxy = found.proxy.force()
        return self._asked(tracer, proxy, is_outcome=False)

    def sized(self, tensor: torch.Tensor, *, is_of_data: bool = False) -> torch.Tensor:
        """A tensor with the sizes that it has in the call, for each of which is asked that only a run knows.

        Args:
            tensor: The tensor.
            is_of_data: Whether only a run knows them in any case, though another result of the same mask was asked.
        """
        unknown: list[Any] = [size for size in tensor.shape if free_unbacked_symbols(size)]
        if not unknown and not is_of_data:
            return tensor
        self._is_in_operation = True
        try:
            for size in unknown:
                (symbol,) = free_unbacked_symbols(size)
                number = self.number(symbol)
                assert isinstance(number, int), symbol
                size.node.shape_env.fix(symbol, number)
        finally:
            self._is_in_operation = False
        return torch.ops.pygraph.sized(tensor, [int(size) for size in tensor.shape])

    @contextlib.contextmanager
    def _in_order(self, tracer: Any) -> Generator[None, None, None]:
        """Have what is recorded inside come before the operation under way, which depends on it."""
        if self.before is None:
            yield
            return
        behind = self.before.next
        with tracer.graph.inserting_after(self.before):
            yield
        new = list(itertools.takewhile(lambda node: node is not behind, _from(self.before.next)))
        for node in new:  # what an operation is made of may have computed what they take
            latest = max(node.all_input_nodes, default=node)
            if node < latest:
                latest.append(node)

    def _asked(self, tracer: Any, proxy: Any, *, is_outcome: bool) -> Answer:
        """The answer to a question for the value of a proxy."""
        index, line = len(self.answers), user_frame(sys._getframe(1))
        if index >= MAX_DECISIONS:
            self._too_often.add(collections.Counter(self.lines).most_common(1)[0][0])
        if index >= MAX_DECISIONS or line in self._too_often:
            raise TraceError(f"it decides more than {MAX_DECISIONS} times by values on the device")
        value: fx.Node = proxy.node
        last = next(iter(reversed(tracer.graph.nodes))) if self.before is None else max(self.before, value)
        answer = answer_of(self._given[index]) if index < len(self._given) else None
        if answer is None or not self._trusted:
            answer = self._looked_up(last, value, tracer.root)
            answer = bool(answer) if is_outcome else answer
        self.answers.append(text_of(answer))
        needed = [fx.Proxy(one, tracer) for one in self._since_last(last)] if self._keeps_all else []
        with tracer.graph.inserting_after(last):
            arguments = (proxy, answer, index, needed) if needed else (proxy, answer, index)
            node = tracer.create_proxy("call_function", ask(), arguments, {}).node
        self.lines.append(line)
        if not self._is_in_operation:  # which else notes the line of all its nodes
            node.meta["source"] = self.lines[-1]
        return answer

    def _since_last(self, last: fx.Node) -> list[fx.Node]:
        """The nodes up to this one, behind the last question, whose values are tensors."""
        found: list[fx.Node] = []
        for node in last.graph.nodes:
            if is_question(node):
                found.clear()
            elif node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
                found.append(node)
            if node is last:
                break
        return found

    def _looked_up(self, last: fx.Node, value: fx.Node, root: Any) -> Answer:
        """The value of a node in the call that is traced."""
        if self._restore is None:
            raise TraceError("it decides by a value on the device that the call has not asked for")
        if not are_known(_here.given):
            raise OtherPathError(UNKNOWN_PATH)  # what differentiates it is traced; the function itself is to be first
        return value_at(value, last, root, _here.given, self._restore)


def _from(node: fx.Node) -> Generator[fx.Node, None, None]:
    while True:
        yield node
        node = node.next


def _tracer() -> Any:
    """The tracer of the trace under way."""
    session = session_here()
    if session is None or session.parent_tracer is not None:
        raise TraceError("it decides by a value on the device inside a branch of control flow")
    return session.fx_tracer


class _Here(threading.local):
    """The trace under way in a thread.

    Attributes:
        decisions: Its answers; None if there are none.
        given: The call's tensors and numbers, one for each placeholder.
    """

    decisions: Decisions | None = None
    given: Sequence[Any] = ()


_here = _Here()


@contextlib.contextmanager
def deciding(
    given: Sequence[str], restore: Callable[[], None] | None, **options: Any
) -> Generator[Decisions, None, None]:
    """Have what is traced inside decide by these answers, and by those of the call that is traced.

    Args: as of `Decisions`.
    """
    before = _here.decisions
    _here.decisions = Decisions(given, restore, **options)
    try:
        yield _here.decisions
    finally:
        _here.decisions = before


@contextlib.contextmanager
def operation_under_way(last: fx.Node | None) -> Generator[None, None, None]:
    """Have checks of what an operation asks come before it, behind the last node that was there when it began."""
    decisions = _here.decisions
    if decisions is None or decisions.before is not None:
        yield
        return
    decisions.before = last
    try:
        yield
    finally:
        decisions.before = None


def has_unknown_sizes(out: Any) -> bool:
    """Whether only a run knows a size of a result."""
    tensors = (one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor))
    return any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for one in tensors for size in one.shape)


class Questions(TorchFunctionMode):
    """Answers questions for values that only a run knows.

    Args:
        arguments: The arguments of the trace.

    Attributes:
        undecided: Whether there was a question, and no answer.
        needs_number: Whether such a question was for a number, and not for the outcome of a condition alone.
        needs_float: Whether that was no integer.
    """

    def __init__(self, arguments: FakeArguments) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._arguments = arguments
        self.undecided = self.needs_number = self.needs_float = self._is_of_truth = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EQUAL and len(args) == 2 and _are_comparable(*args):
            with self:
                return _are_equal(*args)
        if func not in _ASKING:
            return func(*args, **(kwargs or {}))
        if _here.decisions is not None and args[0].numel() == 1 and not args[0].is_complex():
            return bool(args[0].item())
        with self._of_truth():
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def noticed(self) -> Generator[None, None, None]:
        """Notice questions, for the truth of numbers as well, for the time of the context."""
        shapes = self._arguments.shapes
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, shapes, "answer", None)  # caches of torch's keep them
            shapes.answer = self._answer
            stack.callback(setattr, _here, "given", _here.given)
            _here.given = self._arguments.given()
            for kind in (torch.SymBool, torch.SymInt, torch.SymFloat):
                stack.enter_context(replaced(kind, "__bool__", self._noticing))
            stack.enter_context(replaced(torch.SymInt, "__hash__", self._hashing))
            yield

    def _decisions(self) -> Decisions | None:
        """The answers; None if there are none, which is noted."""
        decisions = _here.decisions
        if decisions is None or threading.get_ident() != self._thread:
            self.undecided = self.undecided or decisions is None
            return None
        return decisions

    @contextlib.contextmanager
    def _of_truth(self) -> Generator[None, None, None]:
        """Note of a question inside that it is for the outcome of a condition."""
        before, self._is_of_truth = self._is_of_truth, True
        try:
            yield
        finally:
            self._is_of_truth = before

    def _noticing(self, truth: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def noticed(number: Any) -> bool:
            decisions = self._decisions() if free_unbacked_symbols(number) else None
            if decisions is None:
                with self._of_truth():
                    return truth(number)
            known = self._arguments.shapes.if_known(lambda: truth(number))
            if known is not None:
                return known
            return decisions.outcome(number if isinstance(number, torch.SymBool) else number != 0)

        return noticed

    def _hashing(self, own: Callable[[Any], int]) -> Callable[[Any], int]:
        """The hash of a number, for which a user's sets and dictionaries need it; torch's own do without symbols."""

        def hashed(number: Any) -> int:
            is_torchs = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
            # As it was computed, which tells where it is from when its value is known as well.
            is_of_device = free_unbacked_symbols(number.node._expr) if number.node.is_symbolic() else ()
            if is_torchs or threading.get_ident() != self._thread or not is_of_device:
                return own(number)
            return give_hash(number, int(number))

        return hashed

    def _answer(self, expression: Any) -> Any:
        """An expression of numbers of the device, of which the values are known from now on; None if they are not."""
        decisions = self._decisions()
        if decisions is None or not decisions.numbers:
            self.undecided = True
            self.needs_number = self.needs_number or not self._is_of_truth
            self.needs_float = not all(symbol.is_integer for symbol in free_unbacked_symbols(expression))
            return None
        for symbol in sorted(free_unbacked_symbols(expression), key=str):
            if not self._is_answered(decisions, symbol):
                return None
        return expression.xreplace(self._arguments.shapes.known)

    def _is_answered(self, decisions: Decisions, symbol: Any) -> bool:
        """Ask for the number that a symbol stands for, if it was not asked for before; whether it is known then."""
        if symbol in self._arguments.shapes.known:
            return True
        number = decisions.number(symbol)
        if number is None:
            return False
        if isinstance(number, int):
            self._arguments.shapes.fix(symbol, number)
        elif math.isfinite(number):
            self._arguments.shapes.known[symbol] = sympy.Float(number)
        else:
            raise TraceError(f"it needs a number of the device on the host, which is {number}")
        return True


def _are_comparable(first: object, second: object) -> bool:
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    is_strided = first.layout is second.layout is torch.strided and not first.is_cpu
    return is_strided and first.device == second.device and first.dtype == second.dtype


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether tensors on a device are equal, as a question; CUDA does not compare memory with itself."""
    if first.shape != second.shape:
        return False
    if first.numel() == 0 or (first.is_cuda and _memory(first) == _memory(second)):
        return True
    return bool((first == second).all())


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    own = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()
    return *own, tensor.is_conj(), tensor.is_neg()


def with_known_sizes(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The results of an operation under way, with the sizes that they have in the call, where data decides these.

    Each size is a question. None is asked where numbers are not answered, nor of an operation on packed sequences,
    which runs between graphs whatever the sizes are: another one that takes its results asks.
    """
    decisions = _here.decisions
    if decisions is None:
        return out
    decisions.views.note_results(out)
    if not decisions.numbers or (func in _KEEP_UNSIZED and not decisions.sizes):
        return out
    sized = functools.partial(decisions.sized, is_of_data=has_sizes_of_data(func, args))
    found = pytree.tree_map_only(torch.Tensor, sized, out)
    decisions.views.note((args, kwargs), out, found)
    return found


def with_asked_sizes(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of an operation, with the sizes that they have in the call.

    Raises:
        TraceError: It updates one of which they are not known, or with a part of which they were not.
    """
    decisions = _here.decisions
    if decisions is None:
        return args, kwargs
    decisions.views.check(func, args, kwargs)
    if not decisions.numbers or func in _KEEP_UNSIZED or not has_unknown_sizes((args, kwargs)):
        return args, kwargs
    if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
        raise TraceError(f"{func} updates packed sequences")
    found = pytree.tree_map_only(torch.Tensor, decisions.sized, (args, kwargs))
    decisions.views.note((args, kwargs), (args, kwargs), found)
    return found


_KEEP_UNSIZED = frozenset({*UNSIZED, torch.ops.aten.detach.default, torch.ops.aten.alias.default})


# Private; checked with torch 2.11 and 2.13.
_Tensor: Any = torch.Tensor
_EQUAL: Any = (torch.equal, _Tensor.equal)
_ASKING = (_Tensor.__bool__, _Tensor.is_nonzero, torch.is_nonzero)
