"""Calls that decide by values on the device: a trace for each way to go, which checks that it is the right one.

``if`` asks the host for a value. A graph leads to where it is known; then the host reads it, as in eager, and goes on
if the trace has taken the right outcome for granted. Otherwise the call begins anew with the trace of the other
outcome: nothing is updated before decisions are made, and random generators are set back. See
docs/design/0021-decisions.md.
"""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.calls import limits, retries
from pygraph.calls.cache import Cache
from pygraph.calls.comparing import Comparison
from pygraph.calls.entries import StateRunner
from pygraph.calls.expected_paths import ExpectedPaths, Path
from pygraph.calls.function import Call, Function
from pygraph.calls.keys import Key
from pygraph.calls.policy import ClosedError, Policy
from pygraph.calls.retries import Budget, Traces
from pygraph.errors import TraceError
from pygraph.guards.environment import Environment
from pygraph.ir.decisions import DecisionError, text_of
from pygraph.ir.descriptors import Fallback
from pygraph.ir.paths import ANSWERS
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import RandomStates
from pygraph.tracing.decisions import MAX_DECISIONS, UNKNOWN_PATH, OtherPathError, deciding
from pygraph.tracing.function_kinds import StateInputs
from pygraph.tracing.iterator_locations import generators_of
from pygraph.tracing.loop_parts import may_be_in_a_loop

_AGAIN = Fallback("the call", "it has begun anew, as it decides otherwise than the last one by values on the device")
_CHANGING = Fallback("the call", "it decides by values on the device, and otherwise too often")
_NEEDING = "it needs a number of the device on the host, which is another one each time"
_REPEATING = "how often it repeats something, values on the device decide"
_SELDOM = Fallback("the call", "it decides by values on the device, in ways that seldom come again")


class DecidedFunction:
    """A function that decides as it is told, while it is traced.

    Args:
        fn: The function.
        name: What reports call it.
        numbers: Whether it is told numbers of the device as well, and not only outcomes of conditions.

    Attributes:
        trusted: The answers that are known to be those of the call under way; None if they are not known.
        lines: The lines that ask, by their number, as of the last trace.
        restore: Puts random generators back to where they were when the call under way began.
        trying: The thread that looks for a replay of a call, and runs the function itself if there is none.
    """

    def __init__(self, fn: Callable[..., Any], name: str, *, numbers: bool) -> None:
        self.__name__ = name
        self.numbers = numbers
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it
        self.trusted: Path | None = None
        self.lines: dict[int, str | None] = {}
        self.restore: Callable[[], None] = _nothing
        self.trying: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; the answers are the last keyword argument, so that other leaves keep their positions."""
        given: Path = kwargs.pop(ANSWERS)
        if get_proxy_mode() is None:
            if self.trying == threading.get_ident():
                raise _AsItIsError
            return self.__wrapped__(*args, **kwargs)  # for a second derivative
        known, is_call = () if given == UNKNOWN_PATH else given, self.trying == threading.get_ident()
        restore = self.restore if is_call else None
        with deciding(known, restore, trusted=given == self.trusted, numbers=self.numbers) as decisions:
            try:
                result = self.__wrapped__(*args, **kwargs)
            except Exception:
                if known[: len(decisions.answers)] == tuple(decisions.answers):
                    raise
                result = None
        self.lines |= enumerate(decisions.lines)
        found = tuple(decisions.answers)
        if found != given and not is_call:
            raise TraceError("it decides otherwise than in the call")
        if found != given:  # raised here, it has no context, whose frames hold what the trace made
            raise OtherPathError(found)
        self.trusted = given  # what differentiates it traces it again, where no values are known
        return result

    def may_be_traced(self, path: Path) -> bool:
        """Whether a call under way is to be traced that has no trace of this path: if it is known to be its own."""
        return self.trying is None or path in (UNKNOWN_PATH, self.trusted)


def _nothing() -> None:
    pass


class _NoTraceError(Exception):
    """A call has no trace of the path that is tried, and it is not known to go it."""


class _AsItIsError(Exception):
    """A call has no graph: the function itself is to run, when other threads may have their turns."""


class _PartsError(Exception):
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

    def static_leaves(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Leaf positions that the options of the user's function make static."""
        return self._keys.static_leaves(args, {k: v for k, v in kwargs.items() if k != ANSWERS})

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """The state that calls are to take and return, if that is all that is in the way of a trace."""
        found = self._users.state_left_behind(error, is_known=is_known)
        return None if found is None or found.decisions else found

    @property
    def asks_for_numbers(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether calls are still to be traced for each number of the device that they need on the host."""
        return not self._function.numbers

    def numbers_left(self) -> StateInputs:
        """Nothing: they are asked for from now on.

        Raises:
            OtherPathError: Always, as the call begins anew.
        """
        self._function.numbers = True
        raise OtherPathError(UNKNOWN_PATH)

    def before_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Refuse a call that may not go the path that is tried.

        Raises:
            _NoTraceError: Another one is to be tried.
        """
        del key, cache
        if not self._function.may_be_traced(call.kwargs[ANSWERS]):
            raise _NoTraceError

    def state_runner(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateInputs) -> Any:
        """A runner of calls that leave state behind."""
        return self._users.of_part(self._note_unsteady).state_runner(engine, args, kwargs, state)

    def _note_unsteady(self, reason: str) -> None:
        self.why_unsteady = reason

    def part_runner(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Nothing: it is the user's function that is cut.

        Raises:
            _PartsError: It can be.
        """
        users = {name: value for name, value in kwargs.items() if name != ANSWERS}
        runner = self._users.part_runner(self._engine, args, users, reason)
        if runner is not None:
            raise _PartsError(runner)


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
        self._function = DecidedFunction(users.fn, users.name, numbers=numbers)
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
        self._generators: list[torch.Generator] = []
        self._looked_at = -1  # the number of traces at that time
        self._parts: StateRunner | None = None
        self._is_tried = False
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
            except _AsItIsError:
                self._note_ran(retries.clock() - begin)
            except _PartsError as error:
                self._parts = error.runner
                self.engine.release()
            finally:
                function.trying, function.restore = None, _nothing
        return self._users.function.as_it_is(*args, **kwargs) if self._parts is None else self._parts(args, kwargs)

    def _decided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call by replays, one for each answer that it has otherwise than expected."""
        states = _random_states(self._users, (args, kwargs), self._generators_for(args, kwargs))
        function, path, is_new = self._function, _or_unknown(self._paths.expected()), False
        function.restore, began = states.restore, retries.clock()
        begin: Path = ()  # what is known of the answers
        tried: set[Path] = set()
        for _ in range(2 * MAX_DECISIONS + len(self._paths)):
            began_again = retries.clock()
            tried.add(path)
            try:
                result = self.engine(*args, **kwargs, **{ANSWERS: path})
            except DecisionError as error:
                begin = (*path[: error.index], text_of(error.answer))
                self._line = function.lines.get(error.index)
                known = self._paths.beginning_with(begin, tried)
                path = _or_unknown(self._without_graph(begin) if known is None else known)
                if len(self._paths):
                    self._users.cache.inlined[_AGAIN] += 1
                    self._again.lose(retries.clock() - began_again)
                self._in_a_row = 0
            except _AsItIsError:
                if path == function.trusted:
                    self._note_as_it_is(path)
                    self._cut_loops(args, kwargs, path)
                raise
            except _NoTraceError:
                path = _or_unknown(self._paths.beginning_with(begin, tried))
            except OtherPathError as error:
                path = function.trusted = error.path
                is_new = True
            else:
                self._note_replay(path, is_new=is_new)
                if self._new > limits.LIMITS.new_numbers:
                    self._again.lose(retries.clock() - began, limits.LIMITS.wasted_traces + 1)
                    self._cut(args, kwargs, _NEEDING)
                elif is_new:
                    self._cut_loops(args, kwargs, path)
                return result
            states.restore()
        self._users.cache.inlined[_CHANGING] += 1
        raise _AsItIsError

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

    def _generators_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
        """The generators that a call may pass to operations; looked for again after a call that was traced."""
        compilations = self._users.shared.counts.compilations
        if compilations != self._looked_at:
            environment = Environment(self._users.fn, {"args": args, "kwargs": kwargs})
            self._generators, self._looked_at = generators_of(environment), compilations
        return self._generators

    def _note_replay(self, path: Path, *, is_new: bool) -> None:
        """Note the path of a call, and whether it was traced for it."""
        self._paths.note(path)
        self._ran = 0
        self._in_a_row += 1
        if self._in_a_row >= limits.LIMITS.settled_calls:
            self._again.renew()
        self._new = self._new + 1 if is_new and any(text not in ("True", "False") for text in path) else 0

    def _is_of_a_loop(self, path: Path) -> bool:
        """Whether a path asks more than once at lines in a loop of the function, or of one that it calls."""
        lines = [str(self._function.lines.get(number)) for number in range(len(path))]
        again = {line for line in lines if lines.count(line) > 1}
        return bool(again) and may_be_in_a_loop(self._users.fn, again)

    def _note_ran(self, seconds: float) -> None:
        """Note that a call ran as it is, without saying what it has decided."""
        self._ran += 1
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


def _or_unknown(path: Path | None) -> Path:
    return UNKNOWN_PATH if path is None else path


def _random_states(users: Any, arguments: Any, generators: Sequence[torch.Generator]) -> RandomStates:
    """The states of the random generators that a call may draw from.

    Args:
        users: The engine of the function.
        arguments: The arguments of the call.
        generators: Those that are no default ones.
    """
    devices = {leaf.device for leaf in _leaves(arguments) if isinstance(leaf, torch.Tensor)}
    devices.update(users.shared.pools)
    if torch.cuda.is_initialized():  # before the first replay, it is not known where captured tensors are
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return RandomStates([driver for driver in map(driver_for, devices) if driver is not None], generators)


def _leaves(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Sequence[Any]:
    """The leaves of positional and keyword arguments; every call asks for them, and most have no structure."""
    args, kwargs = arguments
    flat = (*args, *kwargs.values())
    return flat if all(type(one) in _PLAIN for one in flat) else pytree.tree_leaves(arguments)


_PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None))
