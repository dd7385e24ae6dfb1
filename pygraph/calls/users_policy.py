"""The rules of a user's function: its calls may leave state behind, decide by values on the device, and be cut."""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph.calls.cutting import Cutting
from pygraph.calls.deciding import DecidingCalls
from pygraph.calls.engine import Engine
from pygraph.calls.entries import StateRunner
from pygraph.calls.first_step import FirstStep
from pygraph.calls.function import Function
from pygraph.calls.number_function import decision_slots
from pygraph.calls.numbered import NumberedCalls, can_be_computed
from pygraph.calls.part_runner import PartRunner
from pygraph.calls.policy import Policy
from pygraph.calls.state_policy import reached_state, state_left_behind
from pygraph.calls.stateful import StatefulCalls
from pygraph.errors import StateChangeError, TraceError, UndecidedError
from pygraph.tracing.function_kinds import StateInputs
from pygraph.tracing.number_uses import NumberUse


class UsersPolicy(Policy):
    """The rules of a user's function.

    Args:
        carries_state: Whether calls may leave gradients, attributes and variables behind.
        decides: Whether calls may begin anew where they decide otherwise than their trace.
        note_unsteady: Called with the reason when calls are all unlike each other, of a part of a function.
    """

    is_users = True
    composes = True

    def __init__(
        self, *, carries_state: bool, decides: bool = False, note_unsteady: Callable[[str], None] | None = None
    ) -> None:
        self.carries_state, self.decides = carries_state, decides
        self._cutting = Cutting(self.of_part, note_unsteady)
        self._is_begun = False
        self._new_optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """The state that calls are to take and return, if that is all that is in the way of a trace."""
        if isinstance(error, UndecidedError):
            return StateInputs(decisions=True) if self.decides else None
        return state_left_behind(error, is_known=is_known) if self.carries_state else None

    def state_runner(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateInputs
    ) -> StateRunner:
        """A runner of calls of an engine that leave state behind, or decide by values on the device."""
        return DecidingCalls(engine) if state.decisions else StatefulCalls(engine, args, kwargs, state, self._cutting)

    def part_runner(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> StateRunner | None:
        """A runner of calls of an engine that cannot be traced as a whole; None if they cannot be cut into parts."""
        if not self.carries_state or self._cutting.is_of_part:
            return None
        self._cutting.cut(engine, args, kwargs, reason)
        return None if self._cutting.parts() is None else PartRunner(engine, self._cutting, reason)

    def first_step(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], error: TraceError | None = None
    ) -> StateRunner | None:
        """A runner of calls of an engine that are steps of training by their code; None if they are not.

        With ``strict``, a first step is traced as well, since it may be a graph, or be none for another reason.
        """
        if error is not None:
            new, self._new_optimizers = self._new_optimizers, ()
            return FirstStep(engine, self, new) if new and isinstance(error, StateChangeError) else None
        if self._is_begun or not self.carries_state or self._cutting.is_of_part:
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
        return StatefulCalls(engine, args, kwargs, StateInputs(gradients=True), self._cutting, is_expected=True)

    def number_runner(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Sequence[NumberUse]
    ) -> StateRunner | None:
        """A runner of calls of an engine whose numbers change; None if it is not passed what it asks of them."""
        if not uses or engine.function.options.donates or not can_be_computed(uses, args, kwargs):
            return None
        return NumberedCalls(engine, args, kwargs, uses, _OfNumbers(engine, self))

    def of_part(self, note_unsteady: Callable[[str], None]) -> UsersPolicy:
        """The rules of a part of the function, or of what stands for it, that is not cut by itself.

        Args:
            note_unsteady: Called with the reason when its calls are all unlike each other.
        """
        return UsersPolicy(carries_state=True, decides=self.decides, note_unsteady=note_unsteady)


class _OfNumbers(UsersPolicy):
    """The rules of a `NumberFunction`, which stands for a user's function.

    Args:
        users: The engine of that function.
        policy: Its rules.
    """

    def __init__(self, users: Engine, policy: UsersPolicy) -> None:
        super().__init__(carries_state=policy.carries_state, decides=policy.decides, note_unsteady=_ignored)
        self._users = users

    def static_leaves(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """The decisions, and the leaves that the options of the user's function make static."""
        first, decisions = len(args[0]), decision_slots()
        return frozenset((*decisions, *(first + leaf for leaf in self._users.keys.static_leaves(*args[1:]))))


def _ignored(reason: str) -> None:
    """Calls of a `NumberFunction` that are all unlike each other run as they are."""
    del reason
