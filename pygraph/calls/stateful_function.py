"""A function whose state is inputs and outputs: gradients, learning rates, other numbers, attributes, variables."""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.calls import limits
from pygraph.calls.asked_numbers import AskedNumbers, Leaves
from pygraph.calls.entries import StateRunner
from pygraph.calls.function import CONDITION
from pygraph.calls.moved_objects import check_moves
from pygraph.errors import TraceError
from pygraph.guards.argument_containers import ContainersBefore
from pygraph.guards.locations import Item, Items, Location, union
from pygraph.guards.objects import with_parts
from pygraph.ir.descriptors import Fallback
from pygraph.ir.paths import ANSWERS, flatten_with_path
from pygraph.tracing.failing_operations import note_failures
from pygraph.tracing.function_kinds import Renaming, StateInputs, WithStateInputs
from pygraph.tracing.gradients import is_spent
from pygraph.tracing.number_conditions import Comparison, Condition, condition_of
from pygraph.tracing.number_uses import MissingNumbersError, NumberUse
from pygraph.tracing.results import check_shared, stays_whole


@dataclasses.dataclass(frozen=True)
class Returned:
    """The structure of a result, and which of its leaves require grad but have no graph left for it."""

    tree: pytree.TreeSpec
    spent: tuple[int, ...]

    def parts(self, leaves: list[Any]) -> tuple[list[Any], Any]:
        """Return what is stored at the locations, and the result, made of their leaves."""
        if self._is_one_tensor:
            return [], leaves[0]
        left, result = pytree.tree_unflatten(leaves, self.tree)
        return left, result

    @functools.cached_property
    def _is_one_tensor(self) -> bool:
        left, result = self.tree.children()
        return not left.children() and result.is_leaf()


class OutdatedError(Exception):
    """The function reaches other tensors than before, or something has changed that it is not given.

    Args:
        state: The state that is to be taken from now on.
    """

    def __init__(self, state: StateInputs = StateInputs()) -> None:  # noqa: B008  (it is immutable)
        super().__init__()
        self.state = state


class NumbersAskedError(Exception):
    """The function computes numbers of its arguments, so that calls run as those of a function that is given these.

    Args:
        runner: What runs them.
    """

    def __init__(self, runner: StateRunner) -> None:
        super().__init__()
        self.runner = runner


class NumbersTakenError(Exception):
    """The function takes more than before of what it asks of numbers, so that calls are other ones."""


class UnexpectedError(Exception):
    """Calls were expected to set gradients, and a trace has not found that this is all that they change.

    Args:
        reason: Why the call runs as it is, as it changes other state too, perhaps this time only; None if it sets no
            gradients, or cannot be traced.
    """

    def __init__(self, reason: str | None = None) -> None:
        super().__init__()
        self.reason = reason


class AsItIsError(Exception):
    """A call has no graph: the function itself is to run, and sets gradients and attributes by itself.

    Args:
        note: Why, for the report; None if that is known.
    """

    def __init__(self, note: Fallback | None = None) -> None:
        super().__init__()
        self.note = note


class StatefulFunction(WithStateInputs):
    """A function of gradients, numbers, attributes, and another function's arguments, to be traced.

    Args:
        fn: The other function.
        name: What reports call it.
        differentiated: The tensors whose gradients it takes and returns, by the names that reports have for them.
        groups: The parameter groups whose learning rates it takes.
        numbers: Other attributes and variables that it takes as numbers.
        locations: The attributes and variables that it takes and returns.
        conditions: The comparisons whose outcomes it takes.

    Attributes:
        returned: What calls have returned.
        asked: What it asks of numbers, and takes; None if that is nothing.
        is_expected: Whether it is not known yet that calls set gradients.
        sets_gradients: Whether the last trace has set any.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        differentiated: Sequence[tuple[str, torch.Tensor]],
        groups: Sequence[dict[str, Any]],
        numbers: Sequence[Location],
        locations: Sequence[Location],
        conditions: Sequence[Condition],
    ) -> None:
        self.differentiated, self.groups = [tensor for _, tensor in differentiated], groups
        rates = [Item(group, "lr", f"learning rate {index}") for index, group in enumerate(groups)]
        read = [one for one in union(rates, numbers) if not any(map(one.is_same, locations))]
        self.numbers, self.locations, self.conditions = read, locations, conditions
        self._written: tuple[Location, ...] = ()
        self.returned: list[Returned] = []
        self.asked: AskedNumbers | None = None
        self.is_expected = self.sets_gradients = False
        self._names = [name for name, _ in differentiated]
        self._paths: list[str] = []
        self.__name__ = name
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it

    def __call__(
        self, gradients: list[Any], numbers: list[Any], values: list[Any], outcomes: list[Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], found: list[Any],
    ) -> Any:  # fmt: skip
        """The new gradients, the number of what is in ``returned``, and the leaves of what is stored at the locations
        then and of what the function returns.
        """
        if get_proxy_mode() is None:
            raise AsItIsError
        taken = (gradients, numbers, values, outcomes, args, kwargs)
        asked = self.asked
        if asked is None or not asked.are_of(taken, {}):
            return self._traced(gradients, numbers, values, args, kwargs)
        with asked.given(taken, {}, found):
            return self._traced(gradients, numbers, values, args, kwargs)

    def _traced(
        self, gradients: list[Any], numbers: list[Any], values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = (self.gradients(), *self.found())
        self.sets_gradients = False
        try:
            self._put(gradients, numbers, values)
            note_failures()
            passed = ContainersBefore((numbers, values), {})
            result = self.__wrapped__(*args, **kwargs)
            pairs = zip(self.differentiated, gradients, strict=True)
            self.sets_gradients = any(tensor.grad is not gradient for tensor, gradient in pairs)
            found = zip(self.numbers, numbers, strict=True)
            self._written = tuple(location for location, number in found if location.get() is not number)
            left = [location.get() for location in self.locations], result
            check_moves(self.locations, values, left[0])
            check_shared(left)
            passed.check_absent(result)
            returned = with_parts(left, stays_whole, FakeTensor)
            for location, value in zip(self.locations, returned[0], strict=True):
                if self.differentiated and any(map(_has_live_graph, pytree.tree_leaves(value))):
                    raise TraceError(f"it stores {location.name} with a graph of autograd, for outside")
            return [*(tensor.grad for tensor in self.differentiated), *self._numbered(returned)]
        finally:
            self._put(*before)

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients now."""
        return [tensor.grad for tensor in self.differentiated]

    def found(self) -> tuple[list[Any], list[Any]]:
        """The numbers, and what lies in the locations now."""
        return [number.get() for number in self.numbers], [location.get() for location in self.locations]

    def lengths(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return how many items lists and deques have in a call, of which all items are taken."""
        pairs = zip(self.locations, values, strict=True)
        return tuple(len(value) for location, value in pairs if isinstance(location, Items))

    def outcomes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The outcomes of the conditions in a call with these arguments."""
        return [condition.outcome(args, kwargs) for condition in self.conditions]

    def answers(
        self, numbers: list[Any], values: list[Any], outcomes: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Answer what the function asks of numbers, in a call with this state and these arguments."""
        return [] if self.asked is None else self.asked.of_call(([], numbers, values, outcomes, args, kwargs), {})

    def ask(self, args: tuple[Any, ...], uses: Sequence[NumberUse]) -> bool:
        """Take more of what the function asks of numbers.

        Args:
            args: Its arguments in a call, but for what it asks.
            uses: What it asks.

        Returns:
            Whether that is more than before.
        """
        if self.asked is None:
            self.asked = AskedNumbers(Leaves.of(args, {}))
        return self.asked.are_of(args, {}) and self.asked.ask(uses, args, {})

    def forgets(self, args: tuple[Any, ...]) -> bool:
        """Whether counters that have been equal are not so in a call: the function takes nothing then until it asks."""
        if self.asked is None or self.asked.are_equal(args[6]):
            return False
        self.asked = None
        return True

    def takes(self, error: MissingNumbersError) -> bool:
        """Whether it is this function that can be given what is missing; it takes that then."""
        if error.asked is not self.asked or self.asked is None:
            return False
        self.asked.give(error.uses)
        return True

    def deciding(self, args: tuple[Any, ...]) -> str | None:
        """The name of a number whose value, and not the outcome of a comparison of it, decides what a call does."""
        name = None if self.asked is None else self.asked.deciding(args[6])
        return None if name is None else self.path(name)

    def may_ask(self, args: tuple[Any, ...], uses: Sequence[NumberUse]) -> bool:
        """Whether the function, with these arguments, can take more of what it asks of numbers, and that is new."""
        asked = AskedNumbers(Leaves.of(args, {})) if self.asked is None else self.asked
        return asked.are_of(args, {}) and bool(asked.wanted(uses))

    def taken(
        self, comparisons: Sequence[Comparison], needed: Sequence[str], read: Sequence[torch.Tensor]
    ) -> Collection[Comparison]:
        """The comparisons in a trace whose outcomes are inputs.

        Args:
            comparisons: All that could be.
            needed: The paths of arguments whose values the trace needs all the same.
            read: The closed-over tensors whose gradients it reads.

        Raises:
            OutdatedError: There are more that should be, or other state is.
            UnexpectedError: No gradient is set, as was expected.
        """
        # A step that ends with zero_grad() may find no gradient and leave none.
        is_step = self.sets_gradients or (bool(read) and all(one.grad is None for one in self.differentiated))
        if self.is_expected and not is_step:
            raise UnexpectedError
        if self._written:  # what was thought to be read alone
            raise OutdatedError(StateInputs(locations=self._written))
        found: dict[Comparison, Condition] = {}
        for comparison in comparisons:
            condition = condition_of(comparison, self._base_of)
            if condition is not None:
                found[comparison] = condition
        known = union(self.conditions, tuple(found.values()))
        is_unsteady = any(_index(path) == 2 for path in needed)
        is_taken = self.asked is not None  # as far as calls can
        if len(self.conditions) < len(known) <= limits.LIMITS.conditions and not is_unsteady and not is_taken:
            raise OutdatedError(StateInputs(conditions=known))
        return [comparison for comparison, condition in found.items() if any(map(condition.is_same, self.conditions))]

    def _base_of(self, path: str) -> tuple[Location | str, str] | None:
        """Where a call finds the number that an argument of this function is made from, and the rest of its path."""
        kind, rest = _index(path), path.partition("]")[2]
        if kind in (1, 2):
            return (self.numbers if kind == 1 else self.locations)[_index(rest)], rest.partition("]")[2]
        return (("args", "kwargs")[kind - 4], rest) if kind in (4, 5) else None

    def _put(self, gradients: list[Any], numbers: list[Any], values: list[Any]) -> None:
        for tensor, gradient in zip(self.differentiated, gradients, strict=True):
            tensor.grad = gradient
        for location, value in zip((*self.numbers, *self.locations), (*numbers, *values), strict=True):
            location.put(value)

    def _numbered(self, result: Any) -> list[Any]:
        keyed, tree = flatten_with_path(result, is_leaf=stays_whole)
        self._paths = [self._result_path(path) for path, _ in keyed]
        leaves = [leaf for _, leaf in keyed]
        spent = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_spent(leaf)
        ]
        detached = {id(leaves[index]): leaves[index].detach() for index in spent}
        leaves = [detached.get(id(leaf), leaf) for leaf in leaves]
        returned = Returned(tree, tuple(spent))
        if returned not in self.returned:
            self.returned.append(returned)
        return [self.returned.index(returned), *leaves]

    def _result_path(self, path: pytree.KeyPath) -> str:
        rest = pytree.keystr(path[2:] if path[0] == _LEFT else path[1:])
        return self.locations[path[1].idx].name + rest if path[0] == _LEFT else self._users_path(f"result{rest}")  # pyright: ignore

    def path(self, path: str) -> str:
        """The name that reports give to an argument or a result of this function."""
        kind, indexed, rest = path.partition("[")[0], "[" in path, path.partition("]")[2]
        if not indexed or (kind == "args" and not rest and _index(path) not in (4, 5)):
            return f"the {path} of a call with its state"  # a container that is made here
        first, count = _index(path), len(self.differentiated)
        if kind == "result":
            if first < count:
                return f"{self._names[first]}.grad"
            return "what is returned" if first == count else self._paths[first - count - 1]
        if first == 0:
            return f"{self._names[_index(rest)]}.grad"
        if first == 2:
            return self.locations[_index(rest)].name + rest.partition("]")[2]
        if first == 1:
            return self.numbers[_index(rest)].name + rest.partition("]")[2]
        if first == 6:
            return "" if self.asked is None else self.asked.name_of(_index(rest), self.path)
        if first == 5 and rest.startswith(f"['{ANSWERS}']"):
            return f"decision {_index(rest.partition(']')[2]) + 1}"
        return CONDITION if first == 3 else self._users_path(("args", "kwargs")[first - 4] + rest)

    def _users_path(self, path: str) -> str:
        inner = self.__wrapped__
        return inner.path(path) if isinstance(inner, Renaming) else path


def _index(path: str) -> int:
    """The first index in a path, as the 1 in ``args[1][2]``."""
    return int(path.partition("[")[2].partition("]")[0])


# The first of the two parts of what is returned.
_LEFT = pytree.SequenceKey(0)


def _has_live_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and not is_spent(value)
