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

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.calls.cache import Cache
from pygraph.calls.engine import Engine
from pygraph.calls.entries import Entry, Evaluated, Recorded, StateRunner
from pygraph.calls.function import Call, Function
from pygraph.calls.keys import Key
from pygraph.calls.policy import Policy
from pygraph.calls.retries import MAX_RETRACES, SETTLED, TRACES, Budget, Traces
from pygraph.errors import GradientChangeError, SpentGraphError, StateChangeError, TraceError
from pygraph.guards.environment import Environment
from pygraph.guards.locations import Location
from pygraph.guards.objects import with_parts
from pygraph.ir.descriptors import Fallback
from pygraph.ir.paths import flatten_with_path
from pygraph.tracing.function_kinds import StateInputs, WithStateInputs
from pygraph.tracing.gradients import is_spent
from pygraph.tracing.results import is_known_size

# After this many kinds of calls in a row that are unlike each one before, what is left behind is taken to change shape
# at every call, as a cache that grows.
MAX_SHAPES = 4

# Why calls run as they are, once their traces have come to nothing.
_UNSTEADY = Fallback(
    "the call", "what it leaves behind in attributes or variables has another shape or decisive value at every call"
)
_CHANGING = Fallback("the call", "something that the function closes over changes at every call")


@dataclasses.dataclass(frozen=True)
class _Returned:
    """What a call returned: its structure, and which of its leaves require grad but have no graph left for it."""

    tree: pytree.TreeSpec
    spent: tuple[int, ...]


class AsItIsError(Exception):
    """A call has no graph: the function itself is to run, and sets gradients and attributes by itself."""


class StatefulFunction(WithStateInputs):
    """A function of gradients, learning rates, attributes, and another function's arguments, to be traced.

    Args:
        fn: The other function.
        name: What reports call it.
        differentiated: The tensors whose gradients it takes and returns, by the names that reports have for them.
        groups: The parameter groups whose learning rates it takes.
        locations: The attributes and variables that it takes and returns.

    Attributes:
        returned: What calls have returned.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        differentiated: Sequence[tuple[str, torch.Tensor]],
        groups: Sequence[dict[str, Any]],
        locations: Sequence[Location],
    ) -> None:
        self.differentiated, self.groups = [tensor for _, tensor in differentiated], groups
        self.locations = locations
        self.returned: list[_Returned] = []
        self._names = [name for name, _ in differentiated]
        self._paths: list[str] = []
        self.__name__ = name
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it

    def __call__(
        self, gradients: list[Any], rates: list[Any], values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The new gradients, the number of what is in ``returned``, and the leaves of what is stored at the locations
        then and of what the function returns.
        """
        if get_proxy_mode() is None:
            raise AsItIsError
        before = self.found()
        try:
            self._put(gradients, rates, values)
            result = self.__wrapped__(*args, **kwargs)
            returned = with_parts(([location.get() for location in self.locations], result), is_known_size, FakeTensor)
            for location, value in zip(self.locations, returned[0], strict=True):
                if any(map(_has_graph, pytree.tree_leaves(value))):
                    raise TraceError(f"it stores {location.name} with a graph of autograd, for outside")
            return [*(tensor.grad for tensor in self.differentiated), *self._numbered(returned)]
        finally:
            self._put(*before)

    def found(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradients, the learning rates, and what lies in the locations now."""
        gradients = [tensor.grad for tensor in self.differentiated]
        return gradients, [group["lr"] for group in self.groups], [location.get() for location in self.locations]

    def _put(self, gradients: list[Any], rates: list[Any], values: list[Any]) -> None:
        for tensor, gradient in zip(self.differentiated, gradients, strict=True):
            tensor.grad = gradient
        for group, rate in zip(self.groups, rates, strict=True):
            group["lr"] = rate
        for location, value in zip(self.locations, values, strict=True):
            location.put(value)

    def _numbered(self, result: Any) -> list[Any]:
        keyed, tree = flatten_with_path(result, is_leaf=is_known_size)
        self._paths = [self._result_path(path) for path, _ in keyed]
        leaves = [leaf for _, leaf in keyed]
        spent = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_spent(leaf)
        ]
        detached = {id(leaves[index]): leaves[index].detach() for index in spent}
        leaves = [detached.get(id(leaf), leaf) for leaf in leaves]
        returned = _Returned(tree, tuple(spent))
        if returned not in self.returned:
            self.returned.append(returned)
        return [self.returned.index(returned), *leaves]

    def _result_path(self, path: pytree.KeyPath) -> str:
        rest = pytree.keystr(path[2:] if path[0] == _LEFT else path[1:])
        return self.locations[path[1].idx].name + rest if path[0] == _LEFT else f"result{rest}"  # pyright: ignore

    def path(self, path: str) -> str:
        """What reports call an argument or a result of this function."""
        kind, first, rest = path.partition("]")[0].partition("[")[0], _index(path), path.partition("]")[2]
        count = len(self.differentiated)
        if kind == "result":
            if first < count:
                return f"{self._names[first]}.grad"
            return "what is returned" if first == count else self._paths[first - count - 1]
        if first == 0:
            return f"{self._names[_index(rest)]}.grad"
        if first == 2:
            return self.locations[_index(rest)].name + rest.partition("]")[2]
        return f"learning rate {_index(rest)}" if first == 1 else ("args", "kwargs")[first - 3] + rest


def _index(path: str) -> int:
    """The first index in a path, as the 1 in ``args[1][2]``."""
    return int(path.partition("[")[2].partition("]")[0])


# The first of the two parts of what is returned.
_LEFT = pytree.SequenceKey(0)


class OutdatedError(Exception):
    """The function reaches other tensors than before, or something has changed that is not passed.

    Args:
        passed: What is to be passed from now on.
    """

    def __init__(self, passed: StateInputs = StateInputs()) -> None:  # noqa: B008  (it is immutable)
        super().__init__()
        self.passed = passed


class UnsteadyError(Exception):
    """No call is like another: what each leaves behind has another shape, or decides what the next one does."""


def state_left_behind(error: TraceError, *, is_known: bool) -> StateInputs | None:
    """The state that calls are to take and return, if that is all that is in the way of a trace.

    Args:
        error: The error of the trace.
        is_known: Whether there was a call like this: a first one may fill attributes that later ones only read.
    """
    if isinstance(error, (GradientChangeError, SpentGraphError)):
        return StateInputs(gradients=True)
    if isinstance(error, StateChangeError) and error.locations and is_known:
        return StateInputs(locations=error.locations)
    return None


class UsersPolicy(Policy):
    """The rules of a user's function.

    Args:
        carries_state: Whether calls may leave gradients, attributes and variables behind.
    """

    is_users = True
    composes = True

    def __init__(self, *, carries_state: bool) -> None:
        self.carries_state = carries_state

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """The state that calls are to take and return, if that is all that is in the way of a trace."""
        return state_left_behind(error, is_known=is_known) if self.carries_state else None

    def state_runner(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateInputs
    ) -> StateRunner:
        """What runs calls of an engine that leave state behind."""
        return StatefulCalls(engine, args, kwargs, state)


class _StatePolicy(Policy):
    """The rules of a `StatefulFunction`.

    Attributes:
        releases: Whether calls take gradients out of the list that they are passed.
    """

    def __init__(self, function: StatefulFunction, users: Engine, state: StateInputs) -> None:
        self.composes = not state.gradients
        self.releases = False
        self._function, self._users, self._state = function, users, state
        # The number of calls that were found again, up to the last that was not, and of those that were not since.
        self._found_again = self._missed = 0

    def restart(self) -> None:
        """Forget what became of calls."""
        self._found_again = self._missed = 0

    def static_leaves(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Leaf positions that the options of the user's function make static."""
        first = _stored_leaves(args).stop
        return frozenset(first + leaf for leaf in self._users.keys.static_leaves(*args[3:]))

    def released_items(self, entry: Entry, args: tuple[Any, ...]) -> Sequence[int]:
        """Positions of the gradients that a call replaces and does not read, as after ``zero_grad``."""
        (gradients, *_), executable = args, entry.executable
        unread: frozenset[int] = frozenset() if executable is None else executable.unread
        found = [index for index in range(len(gradients)) if index in unread and gradients[index] is not None]
        self.releases = self.releases or bool(found)
        return found

    def before_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Refuse a call that needs other state to be passed, or that is unlike each one before.

        Raises:
            OutdatedError: Other state is to be passed.
            UnsteadyError: No call is like another.
        """
        function, now = self._function, reached(self._users, *call.args[3:])
        if self._state.gradients and not _are_same(now.differentiable, function.differentiated):
            raise OutdatedError
        traced = (entry.environment for entry in cache.entries.of(key) if isinstance(entry, (Recorded, Evaluated)))
        environments = list(traced)
        if self._state.learning_rates:
            if not _are_same(now.rates, function.groups):
                raise OutdatedError
        elif any(not environment.rates_are_current() for environment in environments):
            raise OutdatedError(StateInputs(learning_rates=True))
        if not self._state.gradients and any(not environment.step_is_current() for environment in environments):
            raise OutdatedError(StateInputs(gradients=True))
        if function.locations:
            cache.settle()
            found_again = sum(entry.calls - 1 for entry in cache.entries)
            self._missed = self._missed + 1 if found_again == self._found_again else 0
            self._found_again = found_again
            if self._missed > MAX_SHAPES:
                raise UnsteadyError

    def after_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Refuse a call in which state is a number that changes at every call, and decides what the call does.

        Raises:
            UnsteadyError: It is so.
        """
        if not cache.baked(key[0]).isdisjoint(_stored_leaves(call.args)):
            raise UnsteadyError

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """Nothing more: what is found is to be passed as well.

        Raises:
            OutdatedError: More state is left behind than is passed.
        """
        found = state_left_behind(error, is_known=is_known)
        if found is not None and (more := self._state | found) != self._state:
            raise OutdatedError(more)
        return None


def _stored_leaves(args: tuple[Any, ...]) -> range:
    """Which leaves of a `StatefulFunction`'s arguments lie in its locations."""
    gradients, rates, values, *_ = args
    first = len(gradients) + len(rates)
    return range(first, first + len(pytree.tree_leaves(values)))


def reached(function: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Environment:
    """What a call of the function can reach besides tensors that it is passed."""
    return Environment(function.fn, {"args": args, "kwargs": kwargs})


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class StatefulCalls:
    """Runs calls of one kind that set gradients or attributes.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        passed: What changes from call to call, and is passed.

    Attributes:
        engine: What runs them.
        traces: Those of calls of this form.
    """

    def __init__(
        self,
        function: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        passed: StateInputs,
    ) -> None:
        self._function, self._passed = function, passed
        self._renewals, self._settled = Budget(MAX_RETRACES, TRACES), 0
        self.traces: Traces | None = None
        self._why_not = _CHANGING
        self.engine = self._make(args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
        found, passed = reached(self._function, args, kwargs), self._passed
        groups = found.rates if passed.learning_rates else []
        tensors = found.differentiable if passed.gradients else []
        named = [(found.names[id(tensor)], tensor) for tensor in tensors]
        self.stateful = StatefulFunction(self._function.fn, self._function.name, named, groups, passed.locations)
        self.policy = _StatePolicy(self.stateful, self._function, passed)
        return self._function.derive(self.stateful, self.policy)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and leave behind what it leaves behind."""
        function = self._function
        while self._renewals.allows():
            with function.shared.lock:  # no other call of the function sees gradients in between
                try:
                    return self._run(args, kwargs)
                except AsItIsError:
                    break
                except UnsteadyError:
                    self._why_not = _UNSTEADY
                    self._renewals.lose(self.engine.cache.seconds, MAX_RETRACES + 1)
                    if self.traces is not None:
                        self.traces.is_unsteady(self.engine.cache.seconds)
                    self.engine.release()
                    self.engine.cache.seconds = 0.0
                    self.policy.restart()
                    return self._inline(args, kwargs)
                except OutdatedError as error:
                    self._passed |= error.passed
                self._renewals.lose(self.engine.cache.seconds)
                self._settled = 0
                self.engine.release()
                self.engine = self._make(args, kwargs)
        else:
            return self._inline(args, kwargs)
        return function.fn(*args, **kwargs)

    def refusal(self) -> Fallback | None:
        """Why calls run as they are for now; None if they do not."""
        return None if self._renewals.allows() else self._why_not

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._function.run_inline(self._why_not, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The same as the function is called."""
        return self(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = self.stateful
        before, rates, found_there = function.found()
        values = with_parts(found_there) if found_there else []
        if self.policy.releases:
            found = self._run_released(before, rates, values, args, kwargs)
        else:
            found = self.engine(before, rates, values, args, kwargs)
        count = len(before)
        for tensor, new in zip(function.differentiated, found[:count], strict=True):
            if tensor.grad is not new:
                tensor.grad = new
        self._settled += 1
        if self._settled >= SETTLED:
            self._renewals.renew()
        returned, leaves = function.returned[found[count]], found[count + 1 :]
        if returned.spent:
            _mark_spent(leaves, returned.spent)
        left, result = pytree.tree_unflatten(leaves, returned.tree)
        for location, old, new in zip(function.locations, found_there, left, strict=True):
            if not _is_left_alone(old, new):
                location.put(new)
        return result

    def _run_released(
        self, before: list[Any], rates: list[Any], values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run it so that memory of gradients that it replaces is free for new ones, as after ``zero_grad`` in eager.

        Nobody but the list holds them then, and whoever holds one besides keeps it.
        """
        tensors = self.stateful.differentiated
        try:
            for tensor in tensors:
                tensor.grad = None
            return self.engine(before, rates, values, args, kwargs)
        except BaseException:
            for tensor, gradient in zip(tensors, before, strict=True):
                tensor.grad = gradient
            raise

    def release(self) -> None:
        """Give back its graphs."""
        self.engine.release()


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and not is_spent(value)


def _is_left_alone(old: Any, new: Any) -> bool:
    """Whether a container that is returned holds the very things that the one that was passed does."""
    if old is new:
        return True
    (before, structure), (after, now) = pytree.tree_flatten(with_parts(old)), pytree.tree_flatten(with_parts(new))
    return structure == now and not structure.is_leaf() and all(map(operator.is_, before, after))


def _mark_spent(leaves: list[Any], spent: Sequence[int]) -> None:
    """Have results require grad as in eager, where a gradient of them is an error."""
    marked: dict[int, torch.Tensor] = {}
    with torch.enable_grad():
        for index in spent:
            leaf = leaves[index]
            if id(leaf) not in marked:
                marked[id(leaf)] = _Spent.apply(_ANCHOR, leaf)  # pyright: ignore
            leaves[index] = marked[id(leaf)]


# What has no gradient, as its graph ends in an error, but makes results require one.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


class _Spent(torch.autograd.Function):
    """The graph of a result of which the call itself has taken the backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        """The value, which requires grad."""
        del ctx, anchor
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An error, as eager's."""
        raise RuntimeError(
            "Trying to backward through the graph a second time: the call that returned this tensor has taken its"
            " backward. Specify retain_graph=True there if you need to backward through the graph again."
        )
