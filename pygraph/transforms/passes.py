"""The table of passes: what each is called, the stages it takes and leaves, and its options.

A stack of transforms is a tuple of these, in the order in which they are applied. A pass of a user's is one more entry,
see `pygraph.transform`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from pygraph.errors import ProgramError, StageError, describe
from pygraph.ir.check import check_program
from pygraph.ir.descriptors import Stage
from pygraph.ir.program import Program
from pygraph.transforms.devicify import devicify_program, undevicified_scalars
from pygraph.transforms.fuse import fuse_program
from pygraph.transforms.graphify import graphify_program
from pygraph.transforms.indirect import indirect_program
from pygraph.transforms.select import select_program


@dataclasses.dataclass(frozen=True)
class Pass:
    """A function from Programs to Programs, with what it takes and leaves.

    Attributes:
        name: Its name, as ``history`` has it.
        function: The pass: ``function(program, **options)``, a Program that is as legal as the one it was given.
        takes: The stages of Programs that it takes.
        leaves: The stage of the Program that it returns; None if that is the stage of the one that it took.
        options: Names of the options of a stack that are passed to it.
        is_measured: Whether it takes selections, by region, which are made when the graphs are recorded.
        left_on_host: Inputs of a result whose values operations of the device still need; a function that is to be
            recorded is traced again with these baked in.
    """

    name: str
    function: Callable[..., Program]
    takes: tuple[Stage, ...]
    leaves: Stage | None = None
    options: tuple[str, ...] = ()
    is_measured: bool = False
    left_on_host: Callable[[Program], set[int]] | None = None

    def __call__(self, program: Program, **options: Any) -> Program:
        """Apply the pass, and check what it returns.

        Raises:
            StageError: The Program is at a stage that the pass does not take.
            ProgramError: The pass returns what is no legal Program of the stage that it leaves.
        """
        if self in PASSES:  # which check the stage themselves, with a remedy
            return check_program(self.function(program, **options))
        if program.stage not in self.takes:
            wanted = " or ".join(map(repr, self.takes))
            raise StageError(describe(f"{self.name}({program.name})", f"stage {program.stage!r}", expected=wanted))
        result = self.function(program, **options)
        call, stage = f"{self.name}({program.name})", self.leaves or program.stage
        if not isinstance(result, Program):  # pyright: ignore[reportUnnecessaryIsInstance]  # a user's may return anything
            raise ProgramError(describe(call, f"it returns a {type(result).__name__}", expected="a Program"))
        if result.stage != stage:
            raise ProgramError(describe(call, f"it leaves stage {result.stage!r}", expected=repr(stage)))
        if result.history == program.history:
            result = result.replace(history=(*program.history, self.name))
        return check_program(result)


DEVICIFY = Pass("devicify", devicify_program, ("aten",), options=("bounds",), left_on_host=undevicified_scalars)
FUSE = Pass("fuse", fuse_program, ("aten",), "kernels")
INDIRECT = Pass("indirect", indirect_program, ("aten", "kernels"), "pointers", options=("mechanism",))
GRAPHIFY = Pass("graphify", graphify_program, ("aten", "kernels", "pointers"), "regions")
SELECT = Pass("select", select_program, ("regions",), is_measured=True)

PASSES = (DEVICIFY, FUSE, INDIRECT, GRAPHIFY, SELECT)
"""The passes of pygraph, in the order in which they are applied."""

UNFUSED = tuple(one for one in PASSES if one is not FUSE)
"""The passes that `pygraph.jit` applies unless it is to fuse: kernels stay as they are."""


def records(passes: Iterable[Pass]) -> bool:
    """Whether a stack of passes has its regions recorded as graphs."""
    return GRAPHIFY in passes


def stage_after(passes: Iterable[Pass], stage: Stage = "aten") -> Stage:
    """The stage of a Program after passes, from the stage before them."""
    for one in passes:
        stage = one.leaves or stage
    return stage


def with_pass(passes: tuple[Pass, ...], new: Pass) -> tuple[Pass, ...] | None:
    """A stack with one more pass, as late as it fits; None if it fits nowhere."""
    fitting = [i for i in range(len(passes) + 1) if stage_after(passes[:i]) in new.takes]
    return (*passes[: fitting[-1]], new, *passes[fitting[-1] :]) if fitting else None


def check_order(new: Pass, before: tuple[Pass, ...], function: str) -> None:
    """Raise StageError unless a pass may follow those before it, saying the right order."""
    if new in before:
        raise _order_error(new, before, before, function, f"{new.name} has been applied already")
    if stage_after(before) in new.takes:
        return
    later = next((one for i, one in enumerate(before) if stage_after(before[: i + 1]) not in new.takes), None)
    right = with_pass(before, new)
    if new is SELECT and GRAPHIFY not in before:
        raise _order_error(new, before, (*before, GRAPHIFY, new), function, "there are no graphs to choose from yet")
    if right is None or later is None:
        wanted = " or ".join(map(repr, new.takes))
        problem = f"it takes a Program at stage {wanted}, and this one is at stage {stage_after(before)!r}"
        raise StageError(describe(f"{new.name}({_nested(before, function)})", problem))
    raise _order_error(new, before, right, function, f"{new.name} comes before {later.name}")


def check_passes(passes: Iterable[Pass], function: str) -> tuple[Pass, ...]:
    """The passes as a tuple, if they are in an order in which each takes what the one before it leaves.

    Raises:
        StageError: They are not; the message says the right order.
    """
    checked: tuple[Pass, ...] = ()
    for one in passes:
        check_order(one, checked, function)
        checked = (*checked, one)
    return checked


def _order_error(
    new: Pass, before: tuple[Pass, ...], right: tuple[Pass, ...], function: str, problem: str
) -> StageError:
    call = f"{new.name}({_nested(before, function)})"
    return StageError(describe(call, problem, remedy=f"The right order is {_nested(right, function)}."))


def _nested(passes: tuple[Pass, ...], function: str) -> str:
    for one in passes:
        function = f"{one.name}({function})"
    return function
