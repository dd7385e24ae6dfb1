"""Entries of the cache: what each kind of call runs.

The key of a call holds its arguments and settings. What the function reads besides them is in the environment of each
entry.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from pygraph.calls.requirements import Requirements
from pygraph.calls.retries import Traces
from pygraph.guards.environment import Environment
from pygraph.guards.locations import Location
from pygraph.ir.descriptors import Captured, Fallback
from pygraph.ir.effects import writes_memory
from pygraph.ir.program import Program
from pygraph.ir.ranges import Ranges
from pygraph.lowering.aten import written_inputs
from pygraph.runtime.executable import Executable
from pygraph.tracing.function_kinds import Traced

if TYPE_CHECKING:
    from collections.abc import Sequence


class CapturedTensors:
    """The tensors that a Program reads without being passed them, as they were when it was traced.

    Attributes:
        tensors: The tensors.
        owned: The memory in which no argument may lie: theirs, if the Program writes to anything.
    """

    def __init__(self, program: Program | None) -> None:
        self.tensors = [] if program is None else [d.value for d in program.inputs if isinstance(d, Captured)]
        self._layouts = [_layout(value) for value in self.tensors]
        self._offsets = [value.storage_offset() for value in self.tensors]
        self._writes = program is not None and (bool(written_inputs(program)) or writes_memory(program.nodes))
        self.owned = Ranges(self.tensors if self._writes else ())

    def have_same_layouts(self) -> bool:
        """Whether their shapes, strides, dtypes, devices and ``requires_grad`` are unchanged."""
        return [_layout(value) for value in self.tensors] == self._layouts

    def have_same_offsets(self) -> bool:
        """Whether each begins where it did in its storage."""
        return [value.storage_offset() for value in self.tensors] == self._offsets

    def meet(self, leaves: Sequence[Any], *, where_recorded: bool) -> bool:
        """Whether an argument lies in their memory and one of them is written.

        Args:
            leaves: The leaves of a call.
            where_recorded: Whether they are read where they were when they were recorded, as graphs do, or where they
                are now.
        """
        if not self._writes or not self.tensors:
            return False
        owned = self.owned if where_recorded else Ranges(self.tensors)
        return any(isinstance(leaf, torch.Tensor) and owned.meet(leaf) for leaf in leaves)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


@dataclasses.dataclass(eq=False, kw_only=True)
class Entry:
    """One kind of call. Each subclass is one way in which calls run.

    Attributes:
        fallbacks: Why calls do not run in the best way.
        calls: The number of calls that it has served.
        plans: The number of its native plans.
        stamp: The time of its last call, by the clock of the native plans.
        seconds: The time that its trace and recording have taken.
        traces: The budget of traces of calls of its form.
        is_cached: Whether later calls find it; one that is not is for a single call.
        counts_itself: Whether its calls are counted, and reported, by another function's cache.
    """

    counts_itself: ClassVar[bool] = False
    fallbacks: list[Fallback]
    calls: int = 0
    plans: int = 0
    stamp: int = 0
    seconds: float = 0.0
    traces: Traces | None = None
    is_cached: bool = True

    def __post_init__(self) -> None:
        self.captured = CapturedTensors(self.reported)

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
    def environment(self) -> Environment | None:
        """The Python state that it depends on besides arguments and settings; None if there is none."""
        return None

    @property
    def cost(self) -> float:
        """The seconds that its trace and recording have taken."""
        return self.seconds

    def is_valid(self) -> bool:
        """Whether a call that has its key runs it now."""
        return self.is_current()

    def is_current(self) -> bool:
        """Whether what was baked in besides the key is unchanged: Python state and the layouts of captured tensors."""
        environment = self.environment
        if environment is not None and not environment.is_current():
            return False
        return self.captured.have_same_layouts()

    def requirements(self) -> Requirements:
        """The state that calls depend on besides their key, to be compared in C++."""
        tensors, executable = self.captured.tensors, self.executable
        if executable is None:
            placed = tuple((tensor, None) for tensor in tensors)
        else:
            placed = tuple(zip(executable.captured, executable.static_addresses, strict=True))
        return Requirements(self.environment, placed, tuple(self.captured.owned.pairs))

    def shares_memory(self, leaves: Sequence[Any]) -> bool:
        """Whether an argument lies in a captured tensor's memory and one of them is written."""
        return self.captured.meet(leaves, where_recorded=self.executable is not None)

    def changed(self) -> str | None:
        """The name of something that the function reads and that is another now, if it is known."""
        return None if self.environment is None else self.environment.changed()

    def may_return(self) -> bool:
        """Whether it may be valid again, although it is not now."""
        environment = self.environment
        return environment is not None and environment.may_return()

    def release(self) -> None:
        """Give back its graphs."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Recorded(Entry):
    """Calls that replay graphs.

    Attributes:
        traced: The trace.
        graphs: The executable.
        recordable: The Program that it was recorded from, before nodes were refused and ways chosen.
    """

    traced: Traced
    graphs: Executable
    recordable: Program

    @property
    def program(self) -> Program:
        """The Program whose regions are recorded."""
        return self.graphs.program

    @property
    def executable(self) -> Executable:
        """The graphs that a call replays."""
        return self.graphs

    @property
    def environment(self) -> Environment:
        """The Python state that the trace depends on."""
        return self.traced.environment

    def is_valid(self) -> bool:
        """Whether a call that has its key runs it now: captured tensors are where the graphs read them, too."""
        return self.graphs.is_current() and self.is_current()

    def has_only_moved(self) -> bool:
        """Whether its trace is what a new one would be, although its graphs read where tensors were."""
        return self.is_current() and self.captured.have_same_offsets()

    def release(self) -> None:
        """Give back its graphs."""
        self.graphs.release()


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluated(Entry):
    """Calls that evaluate a Program node by node, of a stack that records no graphs."""

    traced: Traced
    evaluated: Program

    @property
    def program(self) -> Program:
        """The Program."""
        return self.evaluated

    @property
    def environment(self) -> Environment:
        """The Python state that the trace depends on."""
        return self.traced.environment


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

    @property
    def environment(self) -> Environment | None:
        """The training modes of modules."""
        return self.modes

    def is_valid(self) -> bool:
        """Whether calls still run like that."""
        return not self.for_one_call and self.is_current()

    def may_return(self) -> bool:
        """Whether it may hold again, although it does not now."""
        return not self.for_one_call and super().may_return()


@dataclasses.dataclass(eq=False, kw_only=True)
class Differentiated(Entry):
    """Calls that autograd differentiates: they run as compiled functions of their own, see `pygraph.autograd`."""


class StateRunner(Protocol):
    """Runs calls that leave state behind, see `pygraph.calls.stateful`."""

    traces: Traces | None
    engine: Any

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and store the state that it leaves behind."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call like the function itself."""

    def refusal(self) -> Fallback | None:
        """Why calls run as they are for now; None if they do not."""

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

    def release(self) -> None:
        """Give back its graphs."""
        self.runner.release()
