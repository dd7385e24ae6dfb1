"""Calls that are passed objects with tensors, or NumPy arrays: these are taken apart, their leaves are arguments."""

# Functions here are of any type, and so is what they are called with; engines know this module.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pygraph.calls.entries import StateRunner
from pygraph.calls.function import Call
from pygraph.calls.initial_states import Draws, InitialStates, KnownDraws, entries_of
from pygraph.calls.keys import flatten_call
from pygraph.calls.limits import LIMITS
from pygraph.calls.opened_function import AsItWas, OpenedFunction
from pygraph.calls.policy import ClosedError, Policy, ReopenedError
from pygraph.errors import FallbackError, TraceError
from pygraph.guards.argument_containers import Change, ContainersBefore, containers_among
from pygraph.guards.environment import Environment
from pygraph.guards.layouts import Layout
from pygraph.guards.object_classes import names_in_methods
from pygraph.guards.opened import NotOpenedError, Opened, OpenedCall, Opening, is_openable
from pygraph.ir.effects import asked_failures
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.ir.program import Program
from pygraph.ir.structures import unflatten
from pygraph.process.reentrancy import here
from pygraph.runtime.node_errors import is_failure


@dataclasses.dataclass(frozen=True)
class Closed:
    """A call whose objects are not taken apart.

    Attributes:
        reason: Why they cannot be; None if there are none, or they are as good as they are.
    """

    reason: str | None = None


_NO_OBJECTS = Closed()
_READ = Closed("a value is read that is another one at every call")


class ObjectCalls:
    """Runs calls of one function whose arguments are taken apart.

    Args:
        users: The engine of the function.
    """

    def __init__(self, users: Any) -> None:
        self._users = users
        self._function = OpenedFunction(users.fn, users.name, users.policy.changing)
        self._engine: Any = None  # made when it is needed
        self._closed: dict[tuple[Layout, ...], Closed] = {}
        self._layouts: dict[Layout, Layout] = {}
        self._is_new = True  # the last call, or this one, which is the first
        self._named: dict[type, Callable[[str], bool]] = {}
        self._draws = KnownDraws(users, self._draws_before_failures)

    def serve(self, look_up: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call by what looks it up: again as long as more is found of the containers that it changes."""
        counts, changing = self._users.shared.counts, self._users.policy.changing
        before = ContainersBefore(args, kwargs) if self._is_new else None
        compilations = counts.compilations
        while True:
            try:
                result = look_up(args, kwargs)
                break
            except ReopenedError as error:
                self._reopen(error)
        self._is_new = counts.compilations != compilations
        if before is not None:  # what runs as Python may add to a list, which would make of each call another kind
            changing.note({name: change for name, change in before.changed().items() if change is Change.GROWS})
        return result

    def run_planned(self, runner: StateRunner, *args: Any, **kwargs: Any) -> Any:
        """The result of a call that a native plan takes to what runs it."""
        try:
            return runner(args, kwargs)
        except ReopenedError as error:
            self._reopen(error)
        return self._users.call(args, kwargs, again=True)

    def _reopen(self, error: ReopenedError) -> None:
        if error.policy is not self._users.policy:
            raise error
        with self._users.shared.lock:  # no plan leads to what has been made without that knowledge
            self._users.cache.clear()
            self.clear()

    def call(self, call: Call) -> Any:
        """The result of a call; `Closed` if its objects stay as they are."""
        changing = self._users.policy.changing.known
        if here.inside or not (changing or any(map(is_openable, call.leaves))):
            return _NO_OBJECTS
        if self._engine is None:
            policy: Policy | None = self._users.policy.of_objects(self._users)
            if policy is None:
                return _NO_OBJECTS
            self._engine = self._users.derive(self._function, policy)
        containers = (
            {id(value): name for name, value in containers_among(call.args, call.kwargs) if name in changing}
            if changing
            else {}
        )
        result = self._result(call, self._is_named, containers)
        return self._result(call, None, containers) if result is _READ else result

    def _result(self, call: Call, is_named: Callable[[type, str], bool] | None, containers: Mapping[int, str]) -> Any:
        """The result of a call; `Closed` if its objects stay as they are, or, as `_READ`, are to be read whole."""
        changing = self._users.policy.changing.known
        growing = {one for one, name in containers.items() if changing[name] is Change.GROWS}
        opening = Opening(call.args, call.kwargs, is_named, growing, changing)
        found = self._opened(call, opening, containers)
        if found is None:
            return _NO_OBJECTS
        opened, args, kwargs = found
        if len(self._layouts) > LIMITS.forms:
            self._layouts.clear()
        for one in opened:  # native plans compare layouts by identity
            one.layout = self._layouts.setdefault(one.layout, one.layout)
        form = tuple(one.layout for one in opened)
        closed = self._closed.get(form)
        if closed is not None and not self._run_by_parts(args, kwargs, closed):
            return closed
        try:
            self._engine.policy.check_call(opening.call)
        except ClosedError as error:
            return Closed(str(error))
        states = self._states(opening.call)
        try:
            result = self._engine(*args, **kwargs)
        except Exception as error:
            if is_failure(error) and self._function.leaves_something:
                return self._as_it_is(opening.call, states)
            if not isinstance(error, (ClosedError, FallbackError)):
                raise
            if isinstance(error, FallbackError) and not self._users.function.options.strict:
                raise  # of a function that it calls
            if len(self._closed) > LIMITS.forms:
                self._closed.clear()
            closed = self._closed[form] = _READ if opening.has_unread else Closed(str(error))
            return closed
        self._closed.pop(form, None)
        if type(result) is AsItWas:
            return result.result
        return self._function.result_of(opening.call, *result)

    def _states(self, call: OpenedCall) -> InitialStates:
        """The states of the generators from which a call may draw before an operation fails by its data."""
        draws = self._draws.now()
        states = InitialStates(self._users, call.args, call.kwargs, draws)
        if draws.any:
            states.save()
        return states

    def _draws_before_failures(self) -> Draws:
        """Look up what calls may draw from before an operation fails; nothing where that does not matter."""
        may_fail = self._function.leaves_something and any(asked_failures(one.nodes) for one in _programs(self._engine))
        return Draws.of(self._engine) if may_fail else Draws()

    def _as_it_is(self, call: OpenedCall, states: InitialStates) -> Any:
        """Run a call in which an operation has failed by its data, and nothing was stored or updated until then."""
        states.restore()
        return self._users.function.as_it_is(*call.args, **call.kwargs)

    def _run_by_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any], closed: Closed) -> bool:
        """Have calls like one that stays as it is run by the parts of its function, if that has been cut meanwhile."""
        runner = None if closed.reason is None else self._users.policy.cut_runner(self._users, closed.reason)
        if runner is None:
            return False
        engine, (leaves, structure) = self._engine, flatten_call(args, kwargs)
        call = Call(args, kwargs, leaves, structure)
        with engine.shared.lock:
            key = engine.keys.of(call)
            engine.cache.entries.drop_all(key)
            engine.compiler.add_runner(key, call, runner)
        return True

    def _is_named(self, cls: type, name: str) -> bool:
        """Whether code of the function or of a class has a name for anything, as far as that can be told."""
        if cls not in self._named:
            if len(self._named) > LIMITS.forms:
                self._named.clear()
            own = names_in_methods(cls)
            try:
                environment = Environment(self._users.fn)
                self._named[cls] = lambda name: name in own or environment.has_attribute_for(cls, name)
            except TraceError:  # by something whose state cannot be seen
                self._named[cls] = lambda _: True
        return self._named[cls](name)

    def _opened(
        self, call: Call, opening: Opening, containers: Mapping[int, str]
    ) -> tuple[list[Opened], tuple[Any, ...], dict[str, Any]] | None:
        """The objects of a call and its arguments with these in the place of what they stand for."""
        static, opened = self._users.keys.static_leaves(call.args, call.kwargs), list[Opened]()
        if containers and static:  # which are counted by leaves
            return None
        keyed, tree = flatten_with_path((call.args, call.kwargs), lambda value: id(value) in containers)
        leaves = [leaf for _, leaf in keyed]
        for index, (path, leaf) in enumerate(keyed):
            is_changing = id(leaf) in containers
            if index in static or not (is_changing or is_openable(leaf)):
                continue
            try:
                leaves[index] = one = opening.open(leaf, argument_path(path))
            except NotOpenedError:
                if is_changing:
                    return None
                continue
            opened.append(one)
        return (opened, *unflatten(leaves, tree)) if opened else None

    def engines(self) -> Iterator[Any]:
        """The engine of the function of objects that are taken apart, if there were any."""
        if self._engine is not None:
            yield self._engine

    def clear(self) -> None:
        """Forget all calls, and give back their graphs."""
        self._closed.clear()
        self._layouts.clear()
        self._named.clear()
        for engine in self.engines():
            engine.release()


def _programs(engine: Any) -> Iterator[Program]:
    return (entry.program for _, entry in entries_of(engine) if entry.program is not None)
