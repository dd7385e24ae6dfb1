"""The rules of a function whose state is inputs and outputs: when it must take more, and when it is of no use."""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from pygraph.calls import limits
from pygraph.calls.asked_numbers import decision_slots
from pygraph.calls.cache import Cache
from pygraph.calls.engine import Engine
from pygraph.calls.entries import Entry, Evaluated, Recorded
from pygraph.calls.found_answers import FoundAnswers
from pygraph.calls.function import Call, Function
from pygraph.calls.initial_states import InitialStates
from pygraph.calls.keys import Key
from pygraph.calls.outdated_state import outdated_inputs
from pygraph.calls.policy import Policy
from pygraph.calls.stateful_function import (
    AsItIsError,
    NumbersAskedError,
    NumbersTakenError,
    OutdatedError,
    StatefulFunction,
    UnexpectedError,
)
from pygraph.errors import GradientChangeError, SpentGraphError, StateChangeError, TraceError, UndecidedError
from pygraph.guards.argument_containers import Change
from pygraph.guards.environment import Environment
from pygraph.ir.decisions import NO_QUESTION, decisions_among
from pygraph.ir.descriptors import Fallback
from pygraph.ir.paths import flatten_with_path
from pygraph.tracing.function_kinds import StateInputs
from pygraph.tracing.number_uses import NumberUse


class UnsteadyError(Exception):
    """No call is like another: what each leaves behind has another shape, or decides what the next one does.

    Args:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def state_left_behind(error: TraceError, *, is_known: bool) -> StateInputs | None:
    """The state that calls are to take and return, if that is all that is in the way of a trace.

    Args:
        error: The error of the trace.
        is_known: Whether there was a call like this: a first one may fill attributes that later ones only read.
    """
    if isinstance(error, GradientChangeError):
        return StateInputs(gradients=True, thawed=error.thawed)
    if isinstance(error, SpentGraphError):
        return StateInputs(gradients=True)
    if isinstance(error, StateChangeError) and error.locations and is_known:
        return StateInputs(locations=error.locations)
    return None


def _changes_numbers(error: TraceError) -> bool:
    """Whether all that a trace has failed at is that numbers are others afterwards."""
    locations = error.locations or () if isinstance(error, StateChangeError) else ()
    return bool(locations) and all(type(location()) in (int, float) for location in locations)


class StatePolicy(Policy):
    """The rules of a `StatefulFunction`.

    Args:
        function: The function.
        users: The engine of the user's function.
        state: The state that it is passed.
        unsteady: Why calls are seldom like each other, so that none is compiled before its like comes again; None if
            they are not so.

    Attributes:
        releases: Whether calls take gradients out of the list that they are passed.
        may_fail: Whether an operation of a call may raise an error by its data, when nothing has been done yet.
        initial_states: The states of random generators when the call under way began; None if it never begins anew.
    """

    def __init__(
        self, function: StatefulFunction, users: Engine, state: StateInputs, unsteady: str | None = None
    ) -> None:
        self.composes = not state.gradients
        self.is_patient = unsteady is not None
        if unsteady is not None:
            self.seldom = Fallback("the call", unsteady)
        self.releases = self.may_fail = False
        self.initial_states: InitialStates | None = None
        self._function, self._users, self._state = function, users, state
        # The number of calls that were found again, up to the last that was not, and of those that were not since.
        self._found_again = self._missed = 0
        # Compilations in a row for another value of a number that decides, and the calls that were found again before.
        self._decided = self._used = 0
        # The numbers of items of lists in the last call that was looked at, and how often they were others in a row.
        self._lengths, self._filled = tuple[int, ...](), 0

    @property
    def found_answers(self) -> FoundAnswers | None:
        """The trace of a call of the user's function that was told no answers to its questions."""
        return self._users.policy.found_answers

    @property
    def needed_values(self) -> Collection[str]:
        """Names of values that other traces of the function go on with where a call decides otherwise."""
        return self._users.policy.needed_values

    @property
    def asks_for_numbers(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the user's function may still be traced for each number of the device that it needs."""
        return self._users.policy.asks_for_numbers

    @property
    def asks_for_sizes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the user's function may still be traced for each size that depends on data."""
        return self._users.policy.asks_for_sizes

    def restart(self) -> None:
        """Forget what became of calls."""
        self._found_again = self._missed = self._decided = self._used = self._filled = 0

    def static_leaves(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Leaf positions that the options of the user's function make static, and those of decisions."""
        first = _state_leaves(args)[1].stop + len(args[3])
        static = frozenset(first + leaf for leaf in self._users.keys.static_leaves(*args[4:6]))
        if not args[6]:
            return static
        last = first + len(pytree.tree_leaves(args[4:6]))
        return static.union(last + slot for slot in decision_slots())

    def released_items(self, entry: Entry, args: tuple[Any, ...]) -> Sequence[int]:
        """Positions of the gradients that a call replaces and does not read, as after ``zero_grad``."""
        (gradients, *_), executable = args, entry.executable
        questions = [] if executable is None else decisions_among(executable.program.nodes)
        self.may_fail = self.may_fail or any(one.args[2] == NO_QUESTION for one in questions)
        if questions:
            return ()  # the call may begin anew
        unread: frozenset[int] = frozenset() if executable is None else executable.unread
        found = [index for index in range(len(gradients)) if index in unread and gradients[index] is not None]
        self.releases = self.releases or bool(found)
        return found

    def before_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Refuse a call that needs other state to be passed, or that is unlike each one before.

        Raises:
            OutdatedError: Other state is to be passed.
            NumbersTakenError: Counters that have been equal are not so any more.
            UnsteadyError: No call is like another.
            AsItIsError: A list is being filled.
        """
        self._users.policy.check_arguments(call.args[4], call.args[5])
        if self.initial_states is not None:
            self.initial_states.save_all()
        if self._function.forgets(call.args):
            raise NumbersTakenError
        function, now = self._function, reached_state(self._users, *call.args[4:6])
        differentiable = now.differentiable_with(self._state.thawed)
        if self._state.gradients and not _are_same(differentiable, function.differentiated):
            raise OutdatedError
        traced = (
            entry.traced.environment for entry in cache.entries.of(key) if isinstance(entry, (Recorded, Evaluated))
        )
        if self._state.learning_rates and not _are_same(now.rates, function.groups):
            raise OutdatedError
        more = outdated_inputs(list(traced))
        if self._state | more != self._state:
            raise OutdatedError(more)
        if function.locations and not self.is_patient:
            cache.settle()
            found_again = sum(entry.calls - 1 for entry in cache.entries)
            self._missed = self._missed + 1 if found_again == self._found_again else 0
            self._found_again = found_again
            if self._is_filling(call.args[2]):
                raise AsItIsError(_FILLING)
            if self._missed > limits.LIMITS.state_shapes:
                raise UnsteadyError(_why_unsteady(function.deciding(call.args)))

    def _is_filling(self, values: Sequence[Any]) -> bool:
        """Whether a call runs as it is, as a list has another number of items than in the call before, and so before.

        A window or a stack of frames has as many from some call on.
        """
        before, self._lengths = self._lengths, self._function.lengths(values)
        if self._missed < limits.LIMITS.filled_lists or before == self._lengths:
            self._filled = 0
            return False
        self._filled += 1
        if self._filled > limits.LIMITS.filling_calls:  # it grows without end
            self._missed = limits.LIMITS.state_shapes + 1
            return False
        self._missed -= 1
        return True

    def after_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Refuse a call in which state is a number that changes at every call, and decides what the call does.

        Raises:
            UnsteadyError: It is so.
        """
        numbers, stored = _state_leaves(call.args)
        decisive = cache.baked.get(key.kind, frozenset()).intersection(range(numbers.start, stored.stop))
        used = cache.used_numbers.get(key.kind)
        if used is not None and self._function.may_ask(call.args[:6], used.uses):
            decisive -= used.explained
        if not decisive or self.is_patient:
            return
        cache.settle()
        found_again = sum(entry.calls - 1 for entry in cache.entries)
        self._decided = self._decided + 1 if found_again == self._used else 1
        self._used = found_again
        if not decisive.isdisjoint(stored) or self._decided > limits.LIMITS.wasted_traces:
            keyed = flatten_with_path((call.args, call.kwargs))[0]
            name = self._function.path("args" + pytree.keystr(keyed[min(decisive)][0][1:]))
            raise UnsteadyError(_why_unsteady(name))

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """Nothing more: what is found is to be passed as well.

        Raises:
            OutdatedError: More state is left behind than is passed.
            UnexpectedError: It is not known that calls set gradients, and this trace does not say so.
        """
        if isinstance(error, UndecidedError) and self._users.policy.decides and not error.needs_number:
            raise OutdatedError(StateInputs(decisions=True))
        # That a number changes is no memo of a first call: a schedule begins anew at some step.
        found = state_left_behind(error, is_known=is_known or _changes_numbers(error))
        if found is not None and (more := self._state | found) != self._state:
            raise OutdatedError(more)
        if self._function.is_expected:
            is_once = isinstance(error, StateChangeError) and not self._users.function.options.strict
            raise UnexpectedError(str(error) if is_once and self._function.sets_gradients else None)
        return None

    def containers_changed(self, changed: Mapping[str, Change]) -> None:
        """Note which containers the user's function changes."""
        self._users.policy.containers_changed(changed)

    def numbers_left(self) -> StateInputs:
        """Nothing: it is the user's function that is traced for each number.

        Raises:
            OutdatedError: It is not yet.
            OtherPathError: It takes answers already, and those for numbers from now on.
        """
        raise OutdatedError(self._users.policy.numbers_left())

    def number_runner(
        self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Sequence[NumberUse]
    ) -> None:
        """Nothing: the function itself is given what it asks of state; what it asks of arguments, the user's function.

        Raises:
            NumbersTakenError: The function is given more.
            NumbersAskedError: The user's function can be given what it asks for.
        """
        first = len(pytree.tree_leaves(args[:4]))
        is_of_state = any(leaf < first for use in uses for leaf in use.leaves())
        if is_of_state and not self._users.function.options.donates and self._function.ask(args[:6], uses):
            raise NumbersTakenError
        own = {first + leaf: leaf for leaf in range(len(pytree.tree_leaves(args[4:6])))}
        of_arguments = [one for use in uses if (one := use.renumbered(own)) is not None]
        runner = self._users.policy.number_runner(self._users, args[4], args[5], of_arguments)
        if runner is not None:
            raise NumbersAskedError(runner)

    def part_runner(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Nothing: it is the user's function that is cut.

        Raises:
            UnsteadyError: It can be.
        """
        if self._users.policy.part_runner(self._users, args[4], args[5], reason) is not None:
            raise UnsteadyError(reason)


_FILLING = Fallback("the call", "a list or a deque that it changes has another number of items at every call")


def _why_unsteady(deciding: str | None) -> str:
    """Why no call is like another, given the name of the number that decides what calls do."""
    if deciding is None:
        return "what it leaves behind in attributes or variables has another shape at every call"
    return f"{deciding} is another number at every call, and decides what it does"


def _state_leaves(args: tuple[Any, ...]) -> tuple[range, range]:
    """The leaves of a `StatefulFunction`'s arguments that are numbers, and those that are stored at its locations."""
    gradients, numbers, values, *_ = args
    first = len(gradients)
    second = first + len(pytree.tree_leaves(numbers))
    return range(first, second), range(second, second + len(pytree.tree_leaves(values)))


def reached_state(function: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Environment:
    """The Python state that a call of the function can reach."""
    return Environment(function.fn, {"args": args, "kwargs": kwargs}, hooks=True)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
