"""Work of the host ahead of the one graph of a Program, which makes the graph's numbers of others and of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from pygraph.ir.descriptors import Argument, Base, Element, Input
from pygraph.ir.effects import has_effect, is_operation
from pygraph.ir.evaluate import input_value
from pygraph.runtime.body import RegionBody
from pygraph.runtime.calling_convention import CallingConvention


class HostWork:
    """The regions of the host ahead of a graph as a function, which may be called again in the same call.

    Args:
        bodies: The regions.
        convention: Where their inputs come from.
        wanted: The nodes whose values are returned.

    Attributes:
        leaves: The leaves of ``(args, kwargs)`` that it takes, in order.
    """

    def __init__(self, bodies: Sequence[RegionBody], convention: CallingConvention, wanted: Sequence[fx.Node]) -> None:
        taken = {node for body in bodies for node in (*body.inputs, *body.numbers)}
        self._bodies, self._wanted = bodies, wanted
        self._passed = [(node, leaf) for node, leaf in (*convention.tensors, *convention.numbers) if node in taken]
        described: list[tuple[fx.Node, Input]] = [*convention.elements, *convention.others]
        self._described = [(node, descriptor) for node, descriptor in described if node in taken]
        found = dict.fromkeys(leaf for _, leaf in self._passed)
        found |= dict.fromkeys(leaf for _, descriptor in self._described for leaf in _leaves_of(descriptor))
        self.leaves = tuple(found)
        self._count = max(self.leaves, default=-1) + 1

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """The numbers, from the values of `leaves`."""
        leaves: list[Any] = [None] * self._count
        for leaf, value in zip(self.leaves, values, strict=True):
            leaves[leaf] = value
        env = {node: leaves[leaf] for node, leaf in self._passed}
        for node, descriptor in self._described:
            env[node] = input_value(descriptor, leaves)
        for body in self._bodies:
            results = body.run([env[node] for node in body.inputs], [env[node] for node in body.numbers])
            env.update(zip(body.outputs, results, strict=True))
        return tuple([env[node] for node in self._wanted])


def _leaves_of(descriptor: Input) -> tuple[int, ...]:
    of = descriptor.of if isinstance(descriptor, Element) else descriptor
    return of.leaves if isinstance(of, Base) else (of.leaf,) if isinstance(of, Argument) else ()


def is_repeatable(node: fx.Node) -> bool:
    """Whether a node only computes a value, so that a call that is begun again may run it again."""
    if has_effect(node):
        return False
    if is_operation(node):
        return node.target.namespace in ("aten", "prims")  # pyright: ignore
    return getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
