"""Programs as functions: a Program that is compiled is not traced again."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from pygraph.guards.environment import Environment
from pygraph.ir.evaluate import check_call
from pygraph.ir.gradients import check_gradients
from pygraph.ir.program import Program
from pygraph.tracing.function_kinds import SelfTracing, Traced


class ProgramFunction(SelfTracing):
    """The function that a Program is, whose trace is the Program itself.

    Args:
        program: The Program.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.__name__ = program.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the Program."""
        return self.program(*args, **kwargs)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        """The Program, if the arguments fit it.

        Raises:
            ArgumentError: They do not.
        """
        leaves, tree = pytree.tree_flatten((args, kwargs))
        check_call(self.program, leaves, tree)
        check_gradients(self.program, leaves)
        return Traced(self.program, frozenset(baked.leaf for baked in self.program.baked), Environment(None))
