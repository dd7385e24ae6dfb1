"""Entries of the cache: what each kind of call runs.

The key of a call holds its arguments and settings. What the function reads besides them is in the environment of each
entry.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pygraph.calls.call_plan import CallPlan
from pygraph.calls.requirements import Requirements
from pygraph.calls.retries import Traces
from pygraph.calls.reviews import Reviews
from pygraph.guards.environment import Environment
from pygraph.guards.locations import Location
from pygraph.ir.descriptors import Fallback
from pygraph.ir.program import Program
from pygraph.report.profile import Profile
from pygraph.runtime.executable import Executable
from pygraph.tracing.function_kinds import Traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclasses.dataclass(eq=False, kw_only=True)
class Entry:
    """One kind of call. Each subclass is one way in which calls run.

    Attributes:
        fallbacks: Why calls do not run in the best way.
        requirements: The state that calls depend on besides arguments and settings.
        plan: What calls must match and what they run; None for an entry that is for a single call.
        calls: The number of calls that it has served.
        plans: The number of its native plans.
        stamp: The time of its last call, by the clock of the native plans.
        seconds: The time that its trace and recording have taken.
        traces: The budget of traces of calls of its form.
        counts_itself: Whether its calls are counted, and reported, by another function's cache.
    """

    counts_itself: ClassVar[bool] = False
    fallbacks: list[Fallback]
    calls: int = 0
    plans: int = 0
    stamp: int = 0
    seconds: float = 0.0
    traces: Traces | None = None
    requirements: Requirements = dataclasses.field(init=False)
    plan: CallPlan | None = None

    def __post_init__(self) -> None:
        self.requirements = self._requirements()

    def _requirements(self) -> Requirements:
        return Requirements() if self.reported is None else Requirements.of(self.reported, None)

    @property
    def program(self) -> Program | None:
        """The Program that a call runs; None if calls run something else."""
        return None

    @property
    def reported(self) -> Program | None:
        """The Program to report, whether or not it is the one that runs."""
        return self.program

    @property
    def executable(self) -> Executable | None:
        """The graphs that a call replays."""
        return None

    @property
    def most_calls(self) -> int | None:
        """The number of calls after which one is to take the path in Python; None for no limit."""
        return None

    def target(self, fn: Callable[..., Any]) -> Executable | Callable[..., Any]:
        """The executable or function that calls run, given the function that a user has written."""
        return fn

    def may_be_planned(self, *, strict: bool) -> bool:
        """Whether calls that run it may go by a native plan; with ``strict``, what is no graph is said at each call."""
        return not (strict and self.fallbacks) or self.executable is not None

    @property
    def cost(self) -> float:
        """The seconds that its trace and recording have taken."""
        return self.seconds

    def is_valid(self) -> bool:
        """Whether a call that has its key runs it now."""
        return self.is_current()

    def is_current(self) -> bool:
        """Whether what was baked in besides the key is unchanged: Python state and the layouts of captured tensors."""
        return self.requirements.hold_anywhere()

    def may_return(self) -> bool:
        """Whether it may be valid again, although it is not now."""
        return self.requirements.may_hold_again()

    def release(self) -> None:
        """Give back its graphs."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Recorded(Entry):
    """Calls that replay graphs.

    Attributes:
        traced: The trace.
        graphs: The executable.
        recordable: The Program that it was recorded from, before nodes were refused and ways chosen.
        reviews: When selections that are provisional are measured again; None if all are final.
        profile: Its kernel times, or why there are none; None if nobody has asked for them.
        wants_profile: Whether the next call measures them.
    """

    traced: Traced
    graphs: Executable
    recordable: Program
    reviews: Reviews | None = None
    profile: Profile | str | None = None
    wants_profile: bool = False

    @property
    def program(self) -> Program:
        """The Program whose regions are recorded."""
        return self.graphs.program

    @property
    def executable(self) -> Executable:
        """The graphs that a call replays."""
        return self.graphs

    @property
    def most_calls(self) -> int | None:
        """The number of calls after which its kernels, or a provisional selection once more, are measured."""
        if self.wants_profile:
            return self.calls
        return None if self.reviews is None else self.reviews.due

    def target(self, fn: Callable[..., Any]) -> Executable:
        """The graphs that a call replays."""
        return self.graphs

    def _requirements(self) -> Requirements:
        return Requirements.of(self.program, self.traced.environment, self.graphs.static_addresses)

    def is_valid(self) -> bool:
        """Whether a call that has its key runs it now: captured tensors are where the graphs read them, too."""
        return self.requirements.hold()

    def has_only_moved(self) -> bool:
        """Whether its trace is what a new one would be, although its graphs read where tensors were."""
        return self.requirements.hold_anywhere(same_offsets=True)

    def release(self) -> None:
        """Give back its graphs."""
        self.graphs.release()


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluated(Entry):
    """Calls that evaluate a Program node by node, of a stack that records no graphs."""

    traced: Traced
    evaluated: Program

    def may_be_planned(self, *, strict: bool) -> bool:
        """Never: Python evaluates it."""
        return False

    @property
    def program(self) -> Program:
        """The Program."""
        return self.evaluated

    def _requirements(self) -> Requirements:
        return Requirements.of(self.evaluated, self.traced.environment)


@dataclasses.dataclass(eq=False, kw_only=True)
class Launched(Entry):
    """Calls that run the function itself, the fastest way to launch its kernels: no part of it is a graph.

    Attributes:
        described: The Program that was not worth a graph.
    """

    described: Program

    @property
    def reported(self) -> Program:
        """The Program that was not worth a graph."""
        return self.described


@dataclasses.dataclass(eq=False, kw_only=True)
class Refused(Entry):
    """Calls that run the function itself as they cannot be traced.

    Attributes:
        modes: The training modes of modules in which that is so.
        for_one_call: Whether it holds for a single call: what a first one changes, a second one may leave as it is.
        filled: The locations where nothing was before that call.
        sets_gradients: Whether that call has set gradients: the next one is traced as one that does.
        until: The budget of traces; when it allows another one, the entry is outdated.
    """

    modes: Environment | None = None
    for_one_call: bool = False
    filled: tuple[Location, ...] = ()
    sets_gradients: bool = False
    until: Traces | None = None

    def _requirements(self) -> Requirements:
        return Requirements(self.modes)

    def may_be_planned(self, *, strict: bool) -> bool:
        """Whether calls may go by a native plan, which asks for no budget."""
        return self.until is None and super().may_be_planned(strict=strict)

    def is_valid(self) -> bool:
        """Whether calls still run like that."""
        return not self.for_one_call and self.is_current()

    def may_return(self) -> bool:
        """Whether it may hold again, although it does not now."""
        return not self.for_one_call and super().may_return()


@dataclasses.dataclass(eq=False, kw_only=True)
class Differentiated(Entry):
    """Calls that autograd differentiates: they run as compiled functions of their own, see `pygraph.autograd`."""

    def may_be_planned(self, *, strict: bool) -> bool:
        """Never: what differentiates them plans them."""
        return False


class StateRunner(Protocol):
    """Runs calls that leave state behind, see `pygraph.calls.stateful`."""

    traces: Traces | None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and store the state that it leaves behind."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call like the function itself."""

    def refusal(self) -> Fallback | None:
        """Why calls run as they are for now; None if they do not."""

    def engines(self) -> Iterable[Any]:
        """The engines of the functions that run instead."""
        ...

    def in_python(self) -> str | None:
        """The lines that run as Python at each call, and why; None if there are none."""

    def release(self) -> None:
        """Give back its graphs."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Stateful(Entry):
    """Calls that leave gradients, attributes or variables behind: a function that takes and returns them runs instead.

    Attributes:
        runner: What runs them.
    """

    counts_itself = True
    runner: StateRunner

    def target(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Runs a call, and stores the state that it leaves behind."""
        return self.runner.run

    def _requirements(self) -> Requirements:
        return Requirements(Environment(None))  # the runner finds out for itself what has changed

    def release(self) -> None:
        """Give back its graphs."""
        self.runner.release()
