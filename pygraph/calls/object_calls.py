"""Calls that are passed objects with tensors, or NumPy arrays: these are taken apart, their leaves are arguments."""

# Functions here are of any type, and so is what they are called with; engines know this module.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import _pytree as pytree

from pygraph.calls.function import Call
from pygraph.calls.limits import LIMITS
from pygraph.calls.opened_function import AsItWas, OpenedFunction
from pygraph.calls.policy import ClosedError, Policy
from pygraph.errors import FallbackError, TraceError
from pygraph.guards.environment import Environment
from pygraph.guards.object_classes import names_in_methods
from pygraph.guards.opened import Layout, NotOpenedError, Opened, Opening, is_openable
from pygraph.ir.structures import unflatten
from pygraph.process.reentrancy import here


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
        self._function = OpenedFunction(users.fn, users.name)
        self._engine: Any = None  # made when it is needed
        self._closed: dict[tuple[Layout, ...], Closed] = {}
        self._named: dict[type, Callable[[str], bool]] = {}

    def call(self, call: Call) -> Any:
        """The result of a call; `Closed` if its objects stay as they are."""
        if here.inside or not any(map(is_openable, call.leaves)):
            return _NO_OBJECTS
        if self._engine is None:
            policy: Policy | None = self._users.policy.of_objects(self._users)
            if policy is None:
                return _NO_OBJECTS
            self._engine = self._users.derive(self._function, policy)
        result = self._result(call, self._is_named)
        return self._result(call, None) if result is _READ else result

    def _result(self, call: Call, is_named: Callable[[type, str], bool] | None) -> Any:
        """The result of a call; `Closed` if its objects stay as they are, or, as `_READ`, are to be read whole."""
        opening = Opening(call.args, call.kwargs, is_named)
        found = self._opened(call, opening)
        if found is None:
            return _NO_OBJECTS
        opened, args, kwargs = found
        form = tuple(one.layout for one in opened)
        closed = self._closed.get(form)
        if closed is not None:
            return closed
        try:
            self._engine.policy.check_call(opening.call)
        except ClosedError as error:
            return Closed(str(error))
        try:
            result = self._engine(*args, **kwargs)
        except (ClosedError, FallbackError) as error:
            if isinstance(error, FallbackError) and not self._users.function.options.strict:
                raise  # of a function that it calls
            if len(self._closed) > LIMITS.forms:
                self._closed.clear()
            closed = self._closed[form] = _READ if opening.has_unread else Closed(str(error))
            return closed
        if type(result) is AsItWas:
            return result.result
        return self._function.result_of(opening.call, *result)

    def _is_named(self, cls: type, name: str) -> bool:
        """Whether code of the function or of a class has a name for anything, as far as that can be told."""
        if cls not in self._named:
            if len(self._named) > LIMITS.forms:
                self._named.clear()
            own = names_in_methods(cls)
            try:
                environment = Environment(self._users.fn)
                self._named[cls] = lambda name: name in own or environment.has_attribute_for(name)
            except TraceError:  # by something whose state cannot be seen
                self._named[cls] = lambda _: True
        return self._named[cls](name)

    def _opened(self, call: Call, opening: Opening) -> tuple[list[Opened], tuple[Any, ...], dict[str, Any]] | None:
        """The objects of a call and its arguments with these in the place of what they stand for."""
        static, opened = self._users.keys.static_leaves(call.args, call.kwargs), list[Opened]()
        leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
        for index, leaf in enumerate(leaves):
            if index in static or not is_openable(leaf):
                continue
            try:
                leaves[index] = one = opening.open(leaf)
            except NotOpenedError:
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
        self._named.clear()
        for engine in self.engines():
            engine.release()
