"""Calls that leave state behind: steps of training, with ``zero_grad``, ``backward`` and an optimizer, and modules that
store what they have computed in attributes.

A replay sets no attribute. So a function whose call leaves other ``.grad``s or attributes behind than there were is
compiled as another one (`StatefulFunction`), which takes those that there are, and returns those that there are to be.
`StatefulCalls` reads them before a call, and sets them after it. Learning rates that a schedule changes, which the
function finds in its optimizer, are taken in the same way.
"""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.calls import limits
from pygraph.calls.cutting import Cutting
from pygraph.calls.deciding import DecidingCalls
from pygraph.calls.engine import Engine
from pygraph.calls.entries import StateRunner
from pygraph.calls.initial_states import Draws, InitialStates, KnownDraws
from pygraph.calls.retries import Budget, Traces
from pygraph.calls.spent_results import mark_spent
from pygraph.calls.state_policy import StatePolicy, UnsteadyError, reached_state
from pygraph.calls.stateful_function import (
    AsItIsError,
    NumbersAskedError,
    NumbersTakenError,
    OutdatedError,
    StatefulFunction,
    UnexpectedError,
)
from pygraph.guards.locations import Items, Location
from pygraph.guards.objects import with_parts
from pygraph.ir.descriptors import Fallback
from pygraph.process import extension
from pygraph.runtime.node_errors import is_failure
from pygraph.tracing.function_kinds import StateInputs
from pygraph.tracing.number_uses import MissingNumbersError

# Why calls run as they are, once their traces have come to nothing.
_CHANGING = Fallback("the call", "something that the function closes over changes at every call")

_PATIENCE = "It runs as it is until the same comes again"


class StatefulCalls:
    """Runs calls of one kind that set gradients or attributes.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        state: The state that changes from call to call, and that the calls take as arguments.
        cutting: The cuts of the function.
        is_expected: Whether it is only expected that calls set gradients, of which no trace has been made yet.

    Attributes:
        engine: The engine of the function that takes and returns the state.
        traces: The budget of traces of such calls.
        state: The state that the calls take as arguments.
    """

    def __init__(
        self,
        function: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: StateInputs,
        cutting: Cutting,
        *,
        is_expected: bool = False,
    ) -> None:
        self._function, self.state, self._cutting = function, state, cutting
        self._is_expected = is_expected
        self._first: Fallback | None = None  # why a first call ran as it is, which is reported until the next one
        self._renewals, self._settled = Budget(limits.LIMITS.outdated_traces, limits.LIMITS.trace_share), 0
        self.traces: Traces | None = None
        self._why_unsteady: str | None = None
        self._is_patient = False
        self._draws = KnownDraws(function, lambda: Draws.of(self.engine), first=Draws(any=True, generators=None))
        self._decided: StateRunner | None = None  # runs the calls, once they decide or compute numbers
        self.engine = self._make(args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
        found, state = reached_state(self._function, args, kwargs), self.state
        groups = found.rates if state.learning_rates else []
        numbers = list(filter(found.has, state.numbers))
        tensors = found.differentiable_with(state.thawed) if state.gradients else []
        named = [(found.names[id(tensor)], tensor) for tensor in tensors]
        # A list may have been replaced by another one since.
        locations = [one for one in state.locations if not isinstance(one, Items) or found.reaches(one.container)]
        self.stateful = StatefulFunction(
            self._function.fn, self._function.name, named, groups, numbers, locations, state.conditions
        )
        self.stateful.is_expected = self._is_expected
        self.policy = StatePolicy(
            self.stateful, self._function, state, self._why_not().reason if self._is_patient else None
        )
        self._reads_natively = all(map(_has_plain_gradient, tensors))
        self._gradients: Any = None
        return self._function.derive(self.stateful, self.policy)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and store the state that it leaves behind."""
        if self._decided is not None:
            return self._decided(args, kwargs)
        if self._first is not None:
            self._function.cache.inlined.pop(self._first, None)
            self._first = None
        parts = self._cutting.parts()
        try:
            return self._whole(args, kwargs) if parts is None else parts(args, kwargs)
        except UnexpectedError as error:
            reason = error.reason
        return self._otherwise(reason, args, kwargs)

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function, as_it_is = self._function, None
        if self._is_seldom_looked_up():
            return self._inline(args, kwargs)
        if self._has_patience_left():
            self._be_patient(args, kwargs)
        while self._renewals.allows():
            with function.shared.lock:  # no other call of the function sees gradients in between
                try:
                    return self._run_again_if_failed(args, kwargs)
                except AsItIsError as error:
                    as_it_is = error
                    break  # it runs when other threads may have their turns, as those of its backwards must
                except UnsteadyError as error:
                    self._note_unsteady(error.reason, args, kwargs)
                    break
                except NumbersAskedError as error:
                    self.engine.release()
                    self._decided = error.runner
                    break
                except MissingNumbersError as error:
                    if not self.stateful.takes(error):
                        raise
                    self.policy.restart()
                    continue
                except NumbersTakenError:
                    self._renewals.lose(self.engine.cache.seconds)
                    self.policy.restart()
                    self.engine.release()
                    self.engine = function.derive(self.stateful, self.policy)
                    continue
                except OutdatedError as error:
                    if error.state.decisions:
                        self.engine.release()
                        self._decided = DecidingCalls(function, numbers=error.state.numbers_of_device)
                        break
                    decides = self._deciding(error.state)
                    if decides is not None and self._cutting.cut_outside(function, args, kwargs, decides):
                        self.engine.release()
                        break
                    self.state |= error.state
                self._renewals.lose(self.engine.cache.seconds)
                self._settled = 0
                self.engine.release()
                self.engine = self._make(args, kwargs)
        if as_it_is is not None:
            return self._as_it_is(as_it_is.note, args, kwargs)
        if self._decided is not None:
            return self._decided(args, kwargs)
        parts = self._cutting.parts()
        return self._inline(args, kwargs) if parts is None else parts(args, kwargs)

    def _as_it_is(self, note: Fallback | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function itself: it has no graph, or there is a note why there is none yet."""
        if note is None:
            return self._function.function.as_it_is(*args, **kwargs)
        return self._function.run_inline(note, args, kwargs, once=True)

    def _otherwise(self, reason: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a first call that is no step, or not that alone, as if none had been expected."""
        function = self._function
        if reason is not None:
            self._is_expected = self.stateful.is_expected = False
            self._first = Fallback("the call", reason)
            return function.run_inline(self._first, args, kwargs)
        with function.shared.lock:
            for entry in [one for one in function.cache.entries if getattr(one, "runner", None) is self]:
                function.cache.entries.drop(entry)
        return function.call(args, kwargs, again=True)

    def _deciding(self, state: StateInputs) -> str | None:
        """Why calls may better run part by part: a number that they change is one by which they decide."""
        for base in (base for condition in state.conditions for base in condition.bases):
            if isinstance(base, Location) and any(map(base.is_same, self.stateful.locations)):
                return f"{base.name} is another number at every call, and decides what it does"
        return None

    def _note_unsteady(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have calls, which are all unlike each other, run part by part or as they are."""
        self._renewals.lose(self.engine.cache.seconds, limits.LIMITS.outdated_traces + 1)
        if self.traces is not None:
            self.traces.note_unsteady(self.engine.cache.seconds)
        self.engine.release()
        self.engine.cache.seconds = 0.0
        self.policy.restart()
        if not self._is_patient:
            self._cutting.cut(self._function, args, kwargs, reason)
        self._why_unsteady = reason

    def _be_patient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have calls that were all unlike each other, and cannot be cut, be graphs where their like comes again.

        A cache that grows has the sizes of the last sequence again in the next one.
        """
        self._is_patient = True
        self._renewals, self._settled = Budget(limits.LIMITS.outdated_traces, limits.LIMITS.trace_share), 0
        self.engine = self._make(args, kwargs)

    def refusal(self) -> Fallback | None:
        """Why calls run as they are for now; None if they do not."""
        if self._decided is not None:
            return self._decided.refusal()
        if self._is_seldom_looked_up():
            return self._why_not()
        is_left = self._renewals.allows() or self._has_patience_left() or self._cutting.parts() is not None
        return None if is_left else self._why_not()

    def _is_seldom_looked_up(self) -> bool:
        """Whether calls have waited in vain for their like, so that the next one is not even prepared."""
        return self._is_patient and self.engine.cache.looks.are_all_skipped()

    def _has_patience_left(self) -> bool:
        """Whether calls that were all unlike each other have not been patient yet."""
        return self._why_unsteady is not None and not self._is_patient

    def _why_not(self) -> Fallback:
        reason = self._why_unsteady
        return _CHANGING if reason is None else Fallback("the call", f"{reason}{self._cutting.why_whole}. {_PATIENCE}")

    def in_python(self) -> str | None:
        """The lines that run as Python at each call, and why; None if there are none."""
        return self._cutting.in_python()

    def engines(self) -> Iterator[Engine]:
        """The engines of the functions that run instead."""
        if self._decided is not None:
            yield from self._decided.engines()
            return
        parts = self._cutting.parts()
        yield from (self.engine,) if parts is None else parts.engines()

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._function.run_inline(self._why_not(), args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call, given arguments as the function takes them."""
        return self(args, kwargs)

    def _run_again_if_failed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; one in which an operation fails by its data has done nothing yet, and is to run as it is.

        Raises:
            AsItIsError: It is so.
        """
        draws = self._draws.now()
        states = InitialStates(self._function, args, kwargs, draws)
        if draws.any and (self.policy.may_fail or self._settled == 0):
            states.save()
            self.policy.initial_states = states
        try:
            return self._run(args, kwargs)
        except Exception as error:
            if not is_failure(error):
                raise
        finally:
            self.policy.initial_states = None
        states.restore()
        raise AsItIsError

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = self.stateful
        numbers, found_there = function.found()
        values = with_parts(found_there) if found_there else []
        taken = (numbers, values, function.outcomes(args, kwargs), args, kwargs)
        rest = (*taken, function.answers(*taken))
        found = self._native_results(rest)
        if found is None:
            found = self._results(rest)
        self._is_expected = function.is_expected = False
        self._settled += 1
        if self._settled >= limits.LIMITS.settled_calls:
            self._renewals.renew()
        returned, leaves = function.returned[found[0]], found[1:]
        if returned.spent:
            mark_spent(leaves, returned.spent)
        left, result = returned.parts(leaves)
        for location, old, new in zip(function.locations, found_there, left, strict=True):
            if not _is_left_alone(old, new):
                location.put(new)
        return result

    def _native_results(self, rest: tuple[Any, ...]) -> list[Any] | None:
        """The results of a call besides gradients, which C++ reads and stores; None if no native replay takes it."""
        if self._gradients is None:
            module = extension.loaded() if self._reads_natively else None
            if module is None:
                return None
            self._gradients = module.Gradients(tuple(self.stateful.differentiated))
        return self.engine.replay(self._gradients, *rest)

    def _results(self, rest: tuple[Any, ...]) -> list[Any]:
        """The results of a call besides gradients, which are read and stored here."""
        function = self.stateful
        before = function.gradients()
        found = self._run_released(before, rest) if self.policy.releases else self.engine(before, *rest)
        for tensor, new in zip(function.differentiated, found, strict=False):
            if tensor.grad is not new:
                tensor.grad = new
        return found[len(before) :]

    def _run_released(self, before: list[Any], rest: tuple[Any, ...]) -> list[Any]:
        """Run a call with the memory of gradients that it replaces free for new ones, as after ``zero_grad`` in eager.

        The tensors do not refer to their gradients meanwhile; a gradient that somebody else refers to stays alive.
        """
        tensors = self.stateful.differentiated
        try:
            for tensor in tensors:
                tensor.grad = None
            return self.engine(before, *rest)
        except BaseException:
            for tensor, gradient in zip(tensors, before, strict=True):
                tensor.grad = gradient
            raise

    def release(self) -> None:
        """Give back its graphs."""
        for engine in self.engines():
            engine.release()


def _has_plain_gradient(tensor: torch.Tensor) -> bool:
    """Whether what autograd stores for a tensor is its ``grad``, and no class has another idea of that."""
    return tensor.is_leaf and type(tensor).grad is torch.Tensor.grad


def _is_left_alone(old: Any, new: Any) -> bool:
    """Whether a container that is returned has the very items of the one that was passed."""
    if old is new:
        return True
    (before, structure), (after, now) = pytree.tree_flatten(with_parts(old)), pytree.tree_flatten(with_parts(new))
    return structure == now and not structure.is_leaf() and all(map(operator.is_, before, after))
