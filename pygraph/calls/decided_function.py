"""A function that decides by values on the device as it is told, and the rules of its calls."""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13

from pygraph.calls.cache import Cache
from pygraph.calls.entries import StateRunner
from pygraph.calls.expected_paths import Path
from pygraph.calls.found_answers import FoundAnswers
from pygraph.calls.function import Call, Function
from pygraph.calls.initial_states import InitialStates
from pygraph.calls.keys import Key
from pygraph.calls.policy import Policy
from pygraph.errors import TraceError
from pygraph.guards.argument_containers import Change
from pygraph.ir.descriptors import Fallback
from pygraph.ir.paths import ANSWERS
from pygraph.tracing.decisions import UNKNOWN_PATH, OtherPathError, deciding
from pygraph.tracing.function_kinds import StateInputs

_SELDOM = Fallback("the call", "it decides by values on the device, in ways that seldom come again")


class DecidedFunction:
    """A function that decides as it is told, while it is traced.

    Args:
        fn: The function.
        name: What reports call it.
        numbers: Whether it is told numbers of the device as well, and not only outcomes of conditions.
        too_often: Lines that have asked too often in a trace.

    Attributes:
        sizes: Whether it is told all sizes, where packed sequences could do without.
        trusted: The answers that are known to be those of the call under way; None if they are not known.
        lines: The lines that ask, by their number, as of the last trace.
        states: The random generators' states when the call under way began.
        trying: The thread that looks for a replay of a call, and runs the function itself if there is none.
        needed: Names of values that traces go on with where a call decides otherwise than the one before.
        found: The trace of the call under way that was told no answers.
    """

    def __init__(self, fn: Callable[..., Any], name: str, *, numbers: bool, too_often: set[str | None]) -> None:
        self.__name__ = name
        self.numbers, self._too_often = numbers, too_often
        self.sizes = False
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it
        self.trusted: Path | None = None
        self.lines: dict[int, str | None] = {}
        self.states = InitialStates()
        self.trying: int | None = None
        self.needed: set[str] = set()
        self.found = FoundAnswers()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; the answers are the last keyword argument, so that other leaves keep their positions."""
        given: Path = kwargs.pop(ANSWERS)
        if get_proxy_mode() is None:
            if self.trying == threading.get_ident():
                raise AsItIsError
            return self.__wrapped__(*args, **kwargs)  # for a second derivative
        known, is_call = () if given == UNKNOWN_PATH else given, self.trying == threading.get_ident()
        finds = is_call and given == UNKNOWN_PATH
        if is_call:
            self.states.save_in_trace()
        restore = self.states.restore if is_call else None
        options = {"trusted": given == self.trusted, "numbers": self.numbers, "sizes": self.sizes}
        with deciding(known, restore, **options, keeps_all=bool(self.needed), too_often=self._too_often) as decisions:
            try:
                result = self.__wrapped__(*args, **kwargs)
            except Exception:
                if finds or known[: len(decisions.answers)] == tuple(decisions.answers):
                    raise
                result = None
            finally:
                self.lines |= enumerate(decisions.lines)
                found = tuple(decisions.answers)
                self.found.path = found if finds else None
            decisions.views.check_results(result)
        given = found if finds else given
        if found != given and not is_call:
            raise TraceError("it decides otherwise than in the call")
        if found != given:  # raised here, it has no context, whose frames hold what the trace made
            raise OtherPathError(found)
        self.trusted = given  # what differentiates it traces it again, where no values are known
        return result

    def end_call(self) -> None:
        """Forget the call under way."""
        self.trying, self.states = None, InitialStates()
        self.found.clear()

    def may_be_traced(self, path: Path) -> bool:
        """Whether a call under way is to be traced that has no trace of this path: if it is known to be its own."""
        return self.trying is None or path in (UNKNOWN_PATH, self.trusted)


class NoTraceError(Exception):
    """A call has no trace of the path that is tried, and it is not known to go it."""


class AsItIsError(Exception):
    """A call has no graph: the function itself is to run, when other threads may have their turns."""


class PartsError(Exception):
    """There is no trace whatever is decided, but the user's function can be cut into parts.

    Args:
        runner: Runs calls part by part.
    """

    def __init__(self, runner: StateRunner) -> None:
        super().__init__()
        self.runner = runner


class DecidingPolicy(Policy):
    """The rules of a `DecidedFunction`: those of the user's function.

    Args:
        users: The engine of the user's function.
        function: The function.

    Attributes:
        why_unsteady: Why all calls are unlike each other; None if they are not.
    """

    seldom = _SELDOM  # outcomes are part of a call's kind

    def __init__(self, users: Any, function: DecidedFunction) -> None:
        self._users: Policy = users.policy
        self.composes, self.carries_state = self._users.composes, self._users.carries_state
        self._engine, self._keys, self._function = users, users.keys, function
        self.why_unsteady: str | None = None
        self._last: weakref.ref[Any] | None = None  # the runner of the last way that leaves state behind
        self._finding: StateRunner | None = None  # the one whose trace finds the answers of the call under way

    def static_leaves(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Leaf positions that the options of the user's function make static."""
        return self._keys.static_leaves(args, {k: v for k, v in kwargs.items() if k != ANSWERS})

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """The state that calls are to take and return, if that is all that is in the way of a trace."""
        found = self._users.state_left_behind(error, is_known=is_known or self._users.is_carried(error))
        return None if found is None or found.decisions else found

    @property
    def found_answers(self) -> FoundAnswers:
        """The trace of the call under way that was told no answers."""
        return self._function.found

    @property
    def needed_values(self) -> Collection[str]:
        """Names of values that other traces of the function go on with where a call decides otherwise."""
        return self._function.needed

    @property
    def asks_for_numbers(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether calls are still to be traced for each number of the device that they need on the host."""
        return not self._function.numbers

    @property
    def asks_for_sizes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether calls are still to be traced for each size that depends on data."""
        return not self._function.sizes

    def numbers_left(self) -> StateInputs:
        """Nothing: they are asked for from now on, and sizes of packed sequences as well if they were before.

        Raises:
            OtherPathError: Always, as the call begins anew.
        """
        self._function.sizes, self._function.numbers = self._function.numbers, True
        raise OtherPathError(UNKNOWN_PATH)

    def containers_changed(self, changed: Mapping[str, Change]) -> None:
        """Note which containers the user's function changes."""
        self._users.containers_changed(changed)

    def before_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Refuse a call that may not go the path that is tried.

        Raises:
            NoTraceError: Another one is to be tried.
        """
        del key, cache
        if not self._function.may_be_traced(call.kwargs[ANSWERS]):
            raise NoTraceError

    def state_runner(
        self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateInputs
    ) -> StateRunner:
        """A runner of calls that leave state behind."""
        runner = self._users.of_part(self._note_unsteady).state_runner(engine, args, kwargs, state)
        self._last = weakref.ref(runner)
        return runner

    def way_runner(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StateRunner, bool] | None:
        """A runner of calls that are taken to leave behind what the last way has that leaves something behind.

        The trace that finds the answers of a call takes that state already, and is the one of the call that is told
        them: without it, all that such a trace says is that state changes.
        """
        finding, self._finding = self._finding, None
        path = kwargs[ANSWERS]
        if path != UNKNOWN_PATH:
            return (finding, True) if finding is not None and path == self._function.trusted else None
        last = None if self._last is None else self._last()
        if last is None or last.state.decisions:
            return None
        found = self._finding = self.state_runner(engine, args, kwargs, last.state)
        return found, False

    def end_call(self) -> None:
        """Forget the call under way."""
        self._finding = None

    def _note_unsteady(self, reason: str) -> None:
        self.why_unsteady = reason

    def part_runner(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Nothing: it is the user's function that is cut.

        Raises:
            PartsError: It can be.
        """
        users = {name: value for name, value in kwargs.items() if name != ANSWERS}
        runner = self._users.part_runner(self._engine, args, users, reason)
        if runner is not None:
            raise PartsError(runner)
