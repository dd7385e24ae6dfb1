"""Rules for the calls of one function: a user's function may do what a function that is derived from it may not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pygraph.calls import limits
from pygraph.calls.cache import Cache
from pygraph.calls.entries import Entry, StateRunner
from pygraph.calls.found_answers import FoundAnswers
from pygraph.calls.function import Call, Function
from pygraph.calls.keys import Key
from pygraph.calls.new_kinds import SELDOM
from pygraph.errors import TraceError
from pygraph.guards.argument_containers import Change, ChangingContainers
from pygraph.guards.opened import OpenedCall
from pygraph.ir.leaves import static_leaves
from pygraph.tracing.function_kinds import StateInputs
from pygraph.tracing.number_uses import NumberUse


class ClosedError(Exception):
    """Objects that a call is passed cannot be taken apart; the message says why."""


class ReopenedError(Exception):
    """A call is to be looked up again, as it changes containers that it is passed: these are taken apart.

    Args:
        policy: The rules of the function that is called.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy


class Policy:
    """The rules of a function that is derived from a user's, by ``vmap``, ``grad`` or ``jvp``.

    Attributes:
        is_users: Whether the function is a user's, so that calls of it may be inside transforms of ``torch.func``.
        composes: Whether calls that autograd differentiates have compiled functions of their own.
        carries_state: Whether calls may leave gradients, attributes and variables behind.
        decides: Whether calls may begin anew where they decide otherwise than their trace.
        asks_for_numbers: Whether they may be traced for each number of the device that they need on the host.
        asks_for_sizes: Whether they may be traced for each size that depends on data.
        asks_before_cutting: Whether that comes before a cut also where such a number is no integer.
        seldom: Why calls of a new kind are not compiled, where kinds seldom come again.
        single_kinds: Kinds of calls that are compiled in any case.
        is_patient: Whether no kind of calls is compiled before it comes again.
        changing: The containers among arguments that calls are known to change.
    """

    changing = ChangingContainers(0)
    is_users = False
    composes = False
    carries_state = False
    decides = False
    asks_for_numbers = False
    asks_for_sizes = False
    asks_before_cutting = False
    seldom = SELDOM
    single_kinds = limits.LIMITS.single_kinds
    is_patient = False

    @property
    def found_answers(self) -> FoundAnswers | None:
        """The trace of a call that was told no answers to its questions; None if there are no such calls."""
        return None

    @property
    def needed_values(self) -> Collection[str]:
        """Names of values that other traces of the function go on with where a call decides otherwise."""
        return ()

    def static_leaves(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Leaf positions of a call's arguments that the options make static."""
        return static_leaves(args, kwargs, function.options.static_argnums, function.options.static_argnames)

    def released_items(self, entry: Entry, args: tuple[Any, ...]) -> Sequence[int]:
        """Items of the list that is the first argument which calls take out of it before results are allocated."""
        del entry, args
        return ()

    def of_objects(self, engine: Any) -> Policy | None:
        """The rules of the function of an engine, of objects that are taken apart; None if they are not."""
        del engine
        return None

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of a call that is about to be traced.

        Raises:
            ClosedError: An object among them cannot be taken apart, as it is reached in other ways too.
        """

    def check_call(self, call: OpenedCall) -> None:
        """Look at a call whose objects are taken apart.

        Raises:
            ClosedError: One of them is another one's too.
        """

    def containers_changed(self, changed: Mapping[str, Change]) -> None:
        """Note which containers among its arguments a function changes, by their names.

        Raises:
            ReopenedError: They can be taken apart.
        """

    def before_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Look at a call that is about to be compiled; an error ends it."""

    def after_compilation(self, key: Key, call: Call, cache: Cache) -> None:
        """Look at what has become of it; an error ends the call."""

    def state_left_behind(self, error: TraceError, *, is_known: bool) -> StateInputs | None:
        """The state that calls are to take and return, if that is all that is in the way of a trace.

        Args:
            error: The error of the trace.
            is_known: Whether there was a call like this: a first one may fill attributes that later ones only read.
        """
        del error, is_known
        return None

    def is_carried(self, error: TraceError) -> bool:
        """Whether all that a trace has found to change is taken and returned by other calls of the function already."""
        del error
        return False

    def numbers_left(self) -> StateInputs:
        """State for calls that need numbers of the device, and cannot be cut where they do."""
        return StateInputs(decisions=True, numbers_of_device=True)

    def state_runner(
        self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateInputs
    ) -> StateRunner:
        """A runner of calls of an engine that leave state behind."""
        raise NotImplementedError

    def way_runner(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StateRunner, bool] | None:
        """A runner of calls of an engine that are taken to leave behind what other ways of its function do.

        Returns:
            The runner, and whether it is that of further calls; None if nothing is known of such calls.
        """
        del engine, args, kwargs
        return None

    def first_step(
        self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: TraceError | None = None
    ) -> StateRunner | None:
        """A runner of calls of an engine that are steps of training by their code; None if they are not.

        It is asked before the first trace of the engine's function, and with ``strict`` for its error as well.
        """
        del engine, args, kwargs, error
        return None

    def number_runner(
        self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Sequence[NumberUse]
    ) -> StateRunner | None:
        """A runner of calls of an engine whose numbers change; None if it is not passed what it asks of them."""
        del engine, args, kwargs, uses
        return None

    def of_part(self, note_unsteady: Callable[[str], None], note_failed: Callable[..., None] | None = None) -> Policy:
        """The rules of a part of the function, or of what stands for it, that is not cut by itself.

        Args:
            note_unsteady: Called with the reason when its calls are all unlike each other.
            note_failed: Called with its engine and the arguments of a call that cannot be traced; None if nothing is.
        """
        raise NotImplementedError

    def cut_runner(self, engine: Any, reason: str) -> StateRunner | None:
        """A runner of calls of an engine with arguments that are taken apart; None if the function is not cut yet.

        Args:
            engine: The engine of the function.
            reason: Why such calls cannot be traced as a whole.
        """
        del engine, reason
        return None

    def decorated_runner(self, engine: Any) -> StateRunner | None:
        """A runner of calls of an engine in the context that decorates its function; None if there is none."""
        del engine
        return None

    def of_inner(self) -> Policy:
        """The rules of a module or a function inside of the function, where that runs as it is."""
        raise NotImplementedError

    def part_runner(
        self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> StateRunner | None:
        """A runner of calls of an engine that cannot be traced as a whole; None if they cannot be cut into parts."""
        del engine, args, kwargs, reason
        return None


class Composition(Protocol):
    """Calls of one function inside transforms of ``torch.func`` and under autograd, see `pygraph.autograd`."""

    def call(self, engine: Any, call: Call, entry: Entry | None) -> Any:
        """The result of a call.

        Args:
            engine: The engine of the function.
            call: The call.
            entry: The entry that says that autograd differentiates it; None if it is inside a transform.

        Raises:
            InlineError: It must run as it is.
        """

    def functions(self) -> Iterator[Any]:
        """The engines of all derived functions."""
        ...

    def settle(self) -> None:
        """Bring the order of derived functions up to date with the calls that came by native plans."""

    def clear(self) -> None:
        """Forget what is known of calls, and give back the graphs of derived functions."""


CompositionFactory = Callable[[int, Callable[[], int]], Composition]
"""Makes the composition of an engine, of the number of kinds of calls that are kept and the clock of native plans."""


@dataclasses.dataclass(frozen=True)
class Runners:
    """The runners of calls of one engine that are not whole graphs.

    Attributes:
        policy: The rules of the engine.
        engine: The engine.
    """

    policy: Policy
    engine: Any

    def of_state(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: StateInputs) -> StateRunner:
        """The runner of calls that take and return state."""
        return self.policy.state_runner(self.engine, args, kwargs, state)

    def of_other_ways(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StateRunner, bool] | None:
        """The runner of calls that are taken to leave behind what other ways do, and whether it is that of others."""
        return self.policy.way_runner(self.engine, args, kwargs)

    def of_first_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: TraceError | None = None
    ) -> StateRunner | None:
        """The runner of calls that are steps of training by their code; None if they are not."""
        return self.policy.first_step(self.engine, args, kwargs, error)

    def of_decorated(self) -> StateRunner | None:
        """The runner of calls in the context that decorates the function; None if there is none."""
        return self.policy.decorated_runner(self.engine)

    def of_numbers(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Sequence[NumberUse]
    ) -> StateRunner | None:
        """The runner of calls whose numbers change; None if what the function asks of them is not passed."""
        return self.policy.number_runner(self.engine, args, kwargs, uses)

    def of_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> StateRunner | None:
        """The runner of calls that cannot be traced as a whole; None if they cannot be cut into parts either."""
        return self.policy.part_runner(self.engine, args, kwargs, reason)
