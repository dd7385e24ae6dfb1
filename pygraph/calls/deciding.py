"""Calls that decide by values on the device: a trace for each way to go, which checks that it is the right one.

``if`` asks the host for a value. A graph leads to where it is known; then the host reads it, as in eager, and goes on
if the trace has taken the right outcome for granted. Otherwise the call goes on with the trace of the other
outcome, or begins anew with it: nothing is updated before decisions are made, and random generators are set back. See
docs/design/0021-decisions.md and 0043-going-on-from-a-question.md.
"""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pygraph.calls import limits, retries
from pygraph.calls.comparing import Comparison
from pygraph.calls.decided_function import (
    AsItIsError,
    DecidedFunction,
    DecidingPolicy,
    NoTraceError,
    PartsError,
)
from pygraph.calls.entries import StateRunner
from pygraph.calls.expected_paths import ExpectedPaths, Path
from pygraph.calls.initial_states import Draws, InitialStates, KnownDraws, entries_of
from pygraph.calls.policy import ClosedError
from pygraph.calls.retries import Budget, Traces
from pygraph.ir.decisions import DecisionError, text_of
from pygraph.ir.descriptors import Fallback
from pygraph.ir.paths import ANSWERS
from pygraph.runtime.resuming import Stopped, going_on
from pygraph.tracing.decisions import MAX_DECISIONS, UNKNOWN_PATH, OtherPathError
from pygraph.tracing.loop_parts import may_be_in_a_loop

_AGAIN = Fallback("the call", "it has begun anew, as it decides otherwise than the last one by values on the device")
_CHANGING = Fallback("the call", "it decides by values on the device, and otherwise too often")
_NEEDING = "it needs a number of the device on the host, which is another one each time"
_REPEATING = "how often it repeats something, values on the device decide"


class _Stop(NamedTuple):
    """A trace that a call has left at a question.

    Attributes:
        path: Its answers.
        stopped: The call there; None if no other trace can go on with it.
        seconds: The time that it took until then.
    """

    path: Path
    stopped: Stopped | None
    seconds: float


class DecidingCalls:
    """Runs calls of a function that decides by values on the device.

    Args:
        users: The engine of the function.
        numbers: Whether numbers of the device are asked for as well.

    Attributes:
        engine: The engine of the function that decides as it is told.
        traces: The budget of traces of such calls; how often they may begin anew is a budget of its own.
    """

    def __init__(self, users: Any, *, numbers: bool) -> None:
        self._users = users
        self._function = DecidedFunction(users.fn, users.name, numbers=numbers, too_often=users.shared.asking_too_often)
        self._policy = DecidingPolicy(users, self._function)
        self.engine = users.derive(self._function, self._policy)
        self.traces: Traces | None = None
        self._paths = ExpectedPaths(limits.LIMITS.paths)
        self._as_it_is: dict[Path, None] = {}  # those without a graph
        self._again = Budget(limits.LIMITS.wasted_traces, limits.LIMITS.repeated_share)
        self._why_not = _CHANGING
        self._line: str | None = None  # that asked, where a call went another way last
        self._in_a_row = self._ran = self._new = 0
        self._turns = set[int]()  # how many decisions the paths have that repeat some
        self._draws = KnownDraws(users, lambda: Draws.of(self.engine))
        self._parts: StateRunner | None = None
        self._is_tried = False
        self._missing = collections.Counter[frozenset[str]]()  # how often values were, by their names
        self._renewed = collections.Counter[Path]()
        self._comparison = Comparison(users)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, by the trace that decides as the call does."""
        # Also where something that calls have changed has each of them looked at.
        refusal = None if self._parts is not None or self._policy.why_unsteady is not None else self.refusal()
        if refusal is not None and not self._is_tried and len(self._paths) > limits.LIMITS.few_paths:
            self._is_tried = True
            self._cut(args, kwargs, refusal.reason)
        if refusal is not None and self._parts is None:
            return self._users.run_inline(refusal, args, kwargs)
        if self._policy.why_unsteady is not None:
            self._parts = self._users.policy.part_runner(self._users, args, kwargs, self._policy.why_unsteady)
            self._policy.why_unsteady = None
        if self._parts is not None:
            return self._parts(args, kwargs)
        return self._comparison.run(self._by_ways, args, kwargs)

    def _by_ways(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call by the trace of its way, or as it is if there is none."""
        begin, function = retries.clock(), self._function
        with self._users.shared.lock:  # what it finds must not change before it begins anew
            function.trying, function.trusted = threading.get_ident(), None
            try:
                return self._decided(args, kwargs)
            except AsItIsError:
                self._note_ran(retries.clock() - begin)
            except PartsError as error:
                self._parts = error.runner
                self.engine.release()
            finally:
                function.end_call()
                self._policy.end_call()
        return self._users.function.as_it_is(*args, **kwargs) if self._parts is None else self._parts(args, kwargs)

    def _decided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call by replays, one for each answer that it has otherwise than expected."""
        stops: list[_Stop] = []
        try:
            return self._on_its_way(args, kwargs, stops)
        finally:
            if stops:
                self._note_stops(stops)

    def _on_its_way(self, args: tuple[Any, ...], kwargs: dict[str, Any], stops: list[_Stop]) -> Any:
        draws = self._draws.now()  # before it finds out that a call decides otherwise
        states = InitialStates(self._users, args, kwargs, draws)
        if draws.any:
            states.save()
        function, path, is_new = self._function, _or_unknown(self._paths.expected()), False
        function.states, began = states, retries.clock()
        begin: Path = ()  # what is known of the answers
        tried, found = set[Path](), set[Path]()
        stopped: Stopped | None = None
        for _ in range(2 * MAX_DECISIONS + len(self._paths)):
            began_again = retries.clock()
            tried.add(path)
            try:
                with _NOTHING if stopped is None else going_on(stopped):
                    result = self.engine(*args, **kwargs, **{ANSWERS: path})
            except DecisionError as error:
                begin, stopped = (*path[: error.index], text_of(error.answer)), error.stopped
                if stopped is not None:
                    stopped.random_states = states.now()
                self._line = function.lines.get(error.index)
                if len(self._paths):
                    stops.append(_Stop(path, stopped, retries.clock() - began_again))
                known = self._paths.beginning_with(begin, tried)
                path = _or_unknown(self._without_graph(begin) if known is None else known)
                self._in_a_row = 0
            except AsItIsError:
                if path == function.trusted:
                    self._note_as_it_is(path)
                    self._cut_loops(args, kwargs, path)
                raise
            except NoTraceError:
                path = _or_unknown(self._paths.beginning_with(begin, tried))
            except OtherPathError as error:
                if error.path in found and error.path != UNKNOWN_PATH:  # what it decides is not what its trace decides
                    self._again.lose(retries.clock() - began, limits.LIMITS.wasted_traces + 1)
                    self._cut(args, kwargs, _NEEDING)
                    break
                found.add(path := error.path)
                function.trusted, is_new = path, True
            else:
                self._note_replay(path, is_new=is_new, seconds=retries.clock() - began)
                if self._new > limits.LIMITS.new_numbers:
                    self._again.lose(retries.clock() - began, limits.LIMITS.wasted_traces + 1)
                    self._cut(args, kwargs, _NEEDING)
                elif is_new:
                    self._cut_loops(args, kwargs, path)
                return result
            states.restore()
        self._users.cache.inlined[_CHANGING] += 1
        raise AsItIsError

    def _note_stops(self, stops: Sequence[_Stop]) -> None:
        """Note where a call has decided otherwise, and whether the next trace has gone on from there."""
        for path, stopped, seconds in stops:
            if stopped is not None and (stopped.is_resumed or stopped.is_of_host):
                continue
            self._users.cache.inlined[_AGAIN] += 1
            self._again.lose(seconds)
            if stopped is not None and stopped.missing:
                self._note_missing(path, stopped)

    def _note_missing(self, path: Path, stopped: Stopped) -> None:
        """Note that a trace lacks values with which another could have gone on; if often, it is made again."""
        self._missing[stopped.missing] += 1
        is_frequent = self._missing[stopped.missing] >= limits.LIMITS.missed_values
        if not is_frequent or self._renewed[path] >= limits.LIMITS.renewals:
            return
        self._function.needed |= stopped.missing
        self._renewed[path] += 1
        for engine, entry in entries_of(self.engine):
            if entry.executable is stopped.executable:
                engine.cache.entries.drop(entry)

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Have calls run part by part, if they can be cut where they decide in ways that do not come again."""
        users = self._users
        if not users.function.options.strict:
            with contextlib.suppress(ClosedError):  # the call has been made
                self._parts = users.policy.part_runner(users, args, kwargs, reason)
        if self._parts is not None:
            self.engine.release()

    def _cut_loops(self, args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> None:
        """Have calls run part by part, if a new path is one of a loop that has turned otherwise often before."""
        if self._is_of_a_loop(path):
            self._turns.add(len(path))
        if len(self._turns) > limits.LIMITS.turns:
            self._turns.clear()
            self._cut(args, kwargs, _REPEATING)

    def _note_as_it_is(self, path: Path) -> None:
        if len(self._as_it_is) >= limits.LIMITS.paths:
            self._as_it_is.clear()
        self._as_it_is[path] = None

    def _without_graph(self, begin: Path) -> Path | None:
        """A way that begins so and has no graph, as one that ends in an error; None if none is known."""
        return next((path for path in self._as_it_is if path[: len(begin)] == begin), None)

    def _note_replay(self, path: Path, *, is_new: bool, seconds: float) -> None:
        """Note the path of a call, whether it was traced for it, and how long the call took."""
        self._paths.note(path)
        self._ran = 0
        self._in_a_row += 1
        if self._in_a_row >= limits.LIMITS.settled_calls:
            self._again.renew()
        is_of_number = is_new and any(text not in ("True", "False") for text in path)
        self._new = _with_another(self._new, seconds) if is_of_number else 0

    def _is_of_a_loop(self, path: Path) -> bool:
        """Whether a path asks more than once at lines in a loop of the function, or of one that it calls."""
        lines = [str(self._function.lines.get(number)) for number in range(len(path))]
        again = {line for line in lines if lines.count(line) > 1}
        return bool(again) and may_be_in_a_loop(self._users.fn, again)

    def _note_ran(self, seconds: float) -> None:
        """Note that a call ran as it is, without saying what it has decided."""
        self._ran = _with_another(self._ran, seconds)
        if self._ran > limits.LIMITS.settled_calls:
            self._why_not = next((note for entry in self.engine.cache.entries for note in entry.fallbacks), _CHANGING)
            self._again.lose(seconds, limits.LIMITS.wasted_traces + 1)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call, given arguments as the function takes them."""
        return self(args, kwargs)

    def refusal(self) -> Fallback | None:
        """Why calls run as they are for now; None if they do not."""
        if self._parts is not None:
            return self._parts.refusal()
        return None if self._again.allows() else dataclasses.replace(self._why_not, source=self._line)

    def engines(self) -> Iterator[Any]:
        """The engine of the function that decides as it is told, or those of parts."""
        yield from (self.engine,) if self._parts is None else self._parts.engines()

    def in_python(self) -> str | None:
        """The lines that run as Python at each call, and why; None if there are none."""
        return None if self._parts is None else self._parts.in_python()

    def release(self) -> None:
        """Give back its graphs."""
        if self._parts is not None:
            self._parts.release()
        self.engine.release()


_NOTHING = contextlib.nullcontext()


def _or_unknown(path: Path | None) -> Path:
    return UNKNOWN_PATH if path is None else path


def _with_another(in_a_row: int, seconds: float) -> int:
    """Calls in a row that were traced for nothing, with one more; a long one counts as several."""
    return in_a_row + 1 + (int(seconds / limits.LIMITS.long_trace) if in_a_row else 0)
