"""The rules of a user's function: its calls may leave state behind, decide by values on the device, and be cut."""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.calls import limits
from pygraph.calls.asked_numbers import Leaves, decision_slots
from pygraph.calls.cache import Cache
from pygraph.calls.cutting import Cutting
from pygraph.calls.deciding import DecidingCalls
from pygraph.calls.decorated import DecoratedCalls
from pygraph.calls.engine import Engine
from pygraph.calls.entries import StateRunner
from pygraph.calls.first_step import FirstStep
from pygraph.calls.function import Call, Function
from pygraph.calls.keys import Key
from pygraph.calls.numbered import NumberedCalls
from pygraph.calls.opened_function import call_of
from pygraph.calls.part_runner import PartRunner, PartRunnerOfObjects
from pygraph.calls.policy import ClosedError, Policy, ReopenedError
from pygraph.calls.state_policy import reached_state, state_left_behind
from pygraph.calls.stateful import StatefulCalls
from pygraph.errors import StateChangeError, TraceError, UndecidedError
from pygraph.guards.argument_containers import Change, ChangingContainers
from pygraph.guards.environment import Environment
from pygraph.guards.opened import OpenedCall, is_opened
from pygraph.tracing.call_environment import objects_among
from pygraph.tracing.decorated import decoration_of
from pygraph.tracing.function_kinds import StateInputs
from pygraph.tracing.number_uses import NumberUse


class UsersPolicy(Policy):
    """The rules of a user's function.

    Args:
        carries_state: Whether calls may leave gradients, attributes and variables behind.
        decides: Whether calls may begin anew where they decide otherwise than their trace.
        note_unsteady: Called with the reason when calls are all unlike each other, of a part of a function.
        note_failed: Called with the engine and the arguments of a call that cannot be traced, of such a part.
        carrying: The runners of calls of the function, of its ways and parts, that take state and return it.
    """

    is_users = True
    composes = True

    def __init__(
        self,
        *,
        carries_state: bool,
        decides: bool = False,
        note_unsteady: Callable[[str], None] | None = None,
        note_failed: Callable[..., None] | None = None,
        carrying: weakref.WeakSet[StatefulCalls] | None = None,
    ) -> None:
        self._carrying = weakref.WeakSet[StatefulCalls]() if carrying is None else carrying
        self.carries_state, self.decides = carries_state, decides
        self.asks_for_numbers = self.asks_for_sizes = decides
        self.changing = ChangingContainers(limits.LIMITS.changing_containers)
        self._cutting = Cutting(self.of_part, note_unsteady, note_failed)
        self._begins = not self._cutting.is_of_part
        self._is_begun = False
        self._new_optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def containers_changed(self, changed: Mapping[str, Change]) -> None:
        """Note which containers among its arguments the function changes, by their names.

        Raises:
            ReopenedError: Some of this is new.
        """
        if self.changing.note(changed):
            raise ReopenedError(self)

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """The state that calls are to take and return, if that is all that is in the way of a trace."""
        if isinstance(error, UndecidedError):
            return StateInputs(decisions=True) if self.decides and not error.needs_number else None
        return state_left_behind(error, is_known=is_known) if self.carries_state else None

    def is_carried(self, error: TraceError) -> bool:
        """Whether all that a trace has found to change is taken and returned by other calls of the function already."""
        found = error.locations or () if isinstance(error, StateChangeError) else ()
        carried = [one for runner in self._carrying for one in runner.stateful.locations]
        return bool(found) and all(any(map(one.is_same, carried)) for one in found)

    def state_runner(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateInputs
    ) -> StateRunner:
        """A runner of calls of an engine that leave state behind, or decide by values on the device."""
        if state.decisions:
            return DecidingCalls(engine, numbers=state.numbers_of_device)
        return self._stateful_calls(engine, args, kwargs, state)

    def _stateful_calls(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateInputs, **options: Any
    ) -> StatefulCalls:
        runner = StatefulCalls(engine, args, kwargs, state, self._cutting, **options)
        self._carrying.add(runner)
        return runner

    def part_runner(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> StateRunner | None:
        """A runner of calls of an engine that cannot be traced as a whole; None if they cannot be cut into parts."""
        if self._cutting.is_of_part:
            self._cutting.note_failed(engine, args, kwargs)
            return None
        if not self.carries_state:
            return None
        self._cutting.cut(engine, args, kwargs, reason)
        return None if self._cutting.parts() is None else PartRunner(engine, self._cutting, reason)

    def cut_runner(self, engine: Engine, reason: str) -> StateRunner | None:
        """A runner of calls of an engine with arguments that are taken apart; None if the function is not cut yet."""
        return None if self._cutting.parts() is None else PartRunnerOfObjects(engine, self._cutting, reason)

    def first_step(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], error: TraceError | None = None
    ) -> StateRunner | None:
        """A runner of calls of an engine that are steps of training by their code; None if they are not.

        With ``strict``, a first step is traced as well, since it may be a graph, or be none for another reason.
        """
        if error is not None:
            new, self._new_optimizers = self._new_optimizers, ()
            return FirstStep(engine, self, new) if new and isinstance(error, StateChangeError) else None
        if not torch.is_inference_mode_enabled() and (found := decoration_of(engine.fn)) and found.is_inference:
            return self.decorated_runner(engine)
        if self._is_begun or not self.carries_state or not self._begins:
            return None
        self._is_begun, options = True, engine.function.options
        if options.donates or not engine.function.records or not torch.is_grad_enabled():
            return None
        try:
            found = reached_state(engine, args, kwargs)
        except TraceError:  # by something whose state cannot be seen: the trace is refused for it, which is the reason
            return None
        if found.new_optimizers:
            if not options.strict:
                return FirstStep(engine, self, found.new_optimizers)
            self._new_optimizers = tuple(found.new_optimizers)
            return None
        if not found.may_train:
            return None
        return self._stateful_calls(engine, args, kwargs, StateInputs(gradients=True), is_expected=True)

    def of_objects(self, engine: Engine) -> Policy | None:
        """The rules of the function of an engine, of objects that are taken apart; None if arguments are consumed."""
        return None if engine.function.options.donates else OpenedPolicy(engine, self)

    def number_runner(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Sequence[NumberUse]
    ) -> StateRunner | None:
        """A runner of calls of an engine whose numbers change; None if it is not passed what it asks of them."""
        if engine.function.options.donates or not uses or not all(map(Leaves.of(args, kwargs).can_compute, uses)):
            return None
        return NumberedCalls(engine, args, kwargs, uses, _OfNumbers(engine, self))

    def decorated_runner(self, engine: Engine) -> StateRunner | None:
        """A runner of calls of an engine in the context that decorates its function; None if there is none."""
        found = decoration_of(engine.fn) if self.carries_state and not self._cutting.is_of_part else None
        if found is None:
            return None
        return DecoratedCalls(engine, found, UsersPolicy(carries_state=True, decides=self.decides))

    def of_inner(self) -> UsersPolicy:
        """The rules of a module or a function inside of the function, where that runs as it is."""
        rules = UsersPolicy(carries_state=True, decides=self.decides)
        rules.single_kinds = limits.LIMITS.single_kinds_of_modules
        return rules

    def of_part(
        self, note_unsteady: Callable[[str], None], note_failed: Callable[..., None] | None = None
    ) -> UsersPolicy:
        """The rules of a part of the function, or of what stands for it, that is not cut by itself.

        Args:
            note_unsteady: Called with the reason when its calls are all unlike each other.
            note_failed: Called with its engine and the arguments of a call that cannot be traced; None if nothing is.
        """
        return UsersPolicy(
            carries_state=True, decides=self.decides, note_unsteady=note_unsteady, note_failed=note_failed,
            carrying=self._carrying,
        )  # fmt: skip


class OpenedPolicy(UsersPolicy):
    """The rules of a function of objects that are taken apart.

    It is not cut into parts: the user's function is, and its parts take objects apart by themselves.

    Args:
        users: The engine of the function of the objects themselves.
        rules: Its rules.
    """

    def __init__(self, users: Engine, rules: UsersPolicy) -> None:
        super().__init__(
            carries_state=rules.carries_state, decides=rules.decides, note_unsteady=self._close,
            carrying=rules._carrying,
        )  # fmt: skip
        self._begins, self._users = rules._begins, users  # of the same class
        self._rules, self.asks_before_cutting = rules, rules._cutting.is_of_part
        self._arrays: list[weakref.ref[Any]] = []  # that the function reaches

    def _close(self, reason: str) -> None:
        raise ClosedError(reason)

    def static_leaves(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Leaf positions that the options of the user's function make static."""
        return super().static_leaves(self._users.function, args, kwargs)

    def of_objects(self, engine: Engine) -> None:
        """Nothing: what is left as it is stays so."""

    def before_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Refuse objects that are reached in other ways too.

        Raises:
            ClosedError: There is one.
        """
        self.check_arguments(call.args, call.kwargs)

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse objects that are reached in other ways too, as the function could tell them from others.

        Raises:
            ClosedError: There is one, or another object of such a class, with which it may be compared.
        """
        try:
            environment = Environment(self._users.fn, objects_among(args, kwargs))
        except TraceError:  # by something whose state cannot be seen, which the trace says
            return
        opened = [leaf for leaf in pytree.tree_leaves((args, kwargs), is_leaf=is_opened) if is_opened(leaf)]
        call = call_of(opened)
        classes = {cls for one in opened for cls in (*one.layout.classes, *one.layout.unread)}
        found = set(filter(environment.reaches_objects_of, classes))
        if found:
            names = ", ".join(sorted(cls.__qualname__ for cls in found))
            raise ClosedError(f"the function reaches objects of class {names} in other ways too")
        if any(one.__name__ not in _MAY_ASK_FOR_ID for one in environment.functions_calling("id")):
            raise ClosedError("the function asks for the id() of an object")
        self._arrays = [weakref.ref(one) for one in environment.objects() if type(one) is np.ndarray]
        tensors = (value for one in opened for value in one.values if isinstance(value, torch.Tensor))
        if any(map(environment.reaches, tensors if call is None else (*call.owners, *tensors))):
            raise ClosedError("the function reaches what an object holds that it is passed in other ways too")

    def check_call(self, call: OpenedCall) -> None:
        """Refuse arrays that the function reaches in other ways too.

        Raises:
            ClosedError: There is one.
        """
        if any(one() is owner for one in self._arrays for owner in call.owners):
            raise ClosedError("the function reaches a NumPy array in other ways too")

    def containers_changed(self, changed: Mapping[str, Change]) -> None:
        """Note which containers the user's function changes."""
        self._rules.containers_changed(changed)

    def part_runner(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Nothing: what cannot be traced as a whole is left to the user's function, which is noted if it is a part.

        Raises:
            ClosedError: Always.
        """
        call = call_of(pytree.tree_leaves((args, kwargs), is_leaf=is_opened))
        if call is not None:
            self._rules._cutting.note_failed(self._users, call.args, call.kwargs)
        raise ClosedError(reason)


# Two objects are equal by their identity or not, as their replicas are; a text has another address in any case.
_MAY_ASK_FOR_ID = frozenset({"__eq__", "__ne__", "__repr__"})


class _OfNumbers(UsersPolicy):
    """The rules of a `NumberFunction`, which stands for a user's function.

    Args:
        users: The engine of that function.
        policy: Its rules.
    """

    def __init__(self, users: Engine, policy: UsersPolicy) -> None:
        super().__init__(
            carries_state=policy.carries_state, decides=policy.decides, note_unsteady=_ignored,
            carrying=policy._carrying,
        )  # fmt: skip
        self._users, self._rules = users, policy

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """The state that calls are to take and return, if that is all that is in the way of a trace."""
        return super().state_left_behind(error, is_known=is_known or self.is_carried(error))

    def containers_changed(self, changed: Mapping[str, Change]) -> None:
        """Note which containers the user's function changes."""
        self._rules.containers_changed(changed)

    def static_leaves(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """The decisions, and the leaves that the options of the user's function make static."""
        first, decisions = len(args[0]), decision_slots()
        return frozenset((*decisions, *(first + leaf for leaf in self._users.keys.static_leaves(*args[1:]))))


def _ignored(reason: str) -> None:
    """Calls of a `NumberFunction` that are all unlike each other run as they are."""
    del reason
