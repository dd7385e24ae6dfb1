"""The calling convention of a Program, as data: where the values of inputs come from, and what results are made of.

It is made once, when a Program is recorded. The executable reads it at every call, and so does the native call path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from pygraph.ir.descriptors import (
    Alias,
    Argument,
    Base,
    Element,
    Input,
    PointerTable,
    Result,
    ScalarArgument,
    Stored,
)
from pygraph.ir.effects import is_host_number, is_load, is_store, root
from pygraph.ir.evaluate import alias_view, clone_strided, input_value
from pygraph.ir.leaves import to_number
from pygraph.ir.program import Program

Values = dict[fx.Node, Any]
"""The values of nodes in one call."""


@dataclasses.dataclass(frozen=True)
class CallingConvention:
    """How a call's leaves become values of nodes, and these the result.

    Attributes:
        tensors: Nodes that are arguments, with their leaves.
        numbers: Nodes that are numbers of the caller's, with their leaves.
        elements: Nodes that are the numbers in tensors on the host, with their descriptors.
        others: Nodes of all other inputs, as captured tensors, with their descriptors.
        results: Result leaves, the nodes whose values they are, and whether these are memory of an input, so that they
            must be cloned.
        aliases: Result leaves that are views, and of what: an input, or a node.
        arguments: Result leaves that are arguments themselves, with their leaves.
        repeats: Result leaves that are the same object as an earlier one.
        statics: Result leaves that are the same at every call, and their values.
        saved: Result leaves that go to autograd alone.
        out_tree: The structure of the result.
    """

    tensors: tuple[tuple[fx.Node, int], ...]
    numbers: tuple[tuple[fx.Node, int], ...]
    elements: tuple[tuple[fx.Node, Element], ...]
    others: tuple[tuple[fx.Node, Input], ...]
    results: tuple[tuple[int, fx.Node, bool], ...]
    aliases: tuple[tuple[Alias, Input | fx.Node], ...]
    arguments: tuple[tuple[int, int], ...]
    repeats: tuple[tuple[int, int], ...]
    statics: tuple[tuple[int, Any], ...]
    saved: frozenset[int]
    out_tree: pytree.TreeSpec

    @classmethod
    def of(cls, program: Program, read: Iterable[fx.Node]) -> CallingConvention:
        """Make the convention of a Program.

        Args:
            program: The Program.
            read: The nodes that its regions take from outside of them.
        """
        returned = _returned(program)
        used = {*read, *(node for _, node, _ in returned)}
        sources = {node: descriptor for node, descriptor in _sources(program).items() if node in used}
        described = (Argument, ScalarArgument, Element, PointerTable)
        others = ((n, d) for n, d in sources.items() if not isinstance(d, described))
        return cls(
            tensors=tuple((n, d.leaf) for n, d in sources.items() if isinstance(d, Argument)),
            numbers=tuple((n, d.leaf) for n, d in sources.items() if isinstance(d, ScalarArgument)),
            elements=tuple((n, d) for n, d in sources.items() if isinstance(d, Element)),
            others=tuple(others),
            results=tuple((leaf, node, foreign) for leaf, node, foreign in returned if leaf >= 0),
            aliases=_aliases(program),
            arguments=tuple((alias.leaf, alias.index) for alias in program.aliases if alias.of == "argument"),
            repeats=tuple((alias.leaf, alias.index) for alias in program.aliases if alias.of == "result"),
            statics=tuple((static.leaf, static.value) for static in program.statics),
            saved=frozenset(one.leaf for one in _described(program) if isinstance(one, Result) and one.is_saved),
            out_tree=program.out_tree,
        )

    def saved_nodes(self) -> frozenset[fx.Node]:
        """The nodes whose values go to autograd alone."""
        shown = {earlier for leaf, earlier in self.repeats if leaf not in self.saved}
        others = {node for leaf, node, _ in self.results if leaf not in self.saved or leaf in shown}
        others |= {
            source for alias, source in self.aliases if isinstance(source, fx.Node) and alias.leaf not in self.saved
        }
        return frozenset(node for leaf, node, _ in self.results if leaf in self.saved) - others

    def values(self, leaves: Sequence[Any]) -> Values:
        """The values of the nodes that are inputs, from the leaves of ``(args, kwargs)``."""
        found: Values = {node: leaves[leaf] for node, leaf in self.tensors}
        for node, leaf in self.numbers:
            found[node] = to_number(leaves[leaf])
        for node, descriptor in (*self.elements, *self.others):
            found[node] = input_value(descriptor, leaves)
        return found

    def result_leaves(self, values: Values, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the result, from the values of nodes and the leaves of ``(args, kwargs)``."""
        out: list[Any] = [None] * self.out_tree.num_leaves
        for leaf, node, foreign in self.results:
            out[leaf] = clone_strided(values[node]) if foreign else values[node]
        for alias, source in self.aliases:
            base = values[source] if isinstance(source, fx.Node) else input_value(source, leaves)
            out[alias.leaf] = alias_view(alias, base)
        for leaf, value in self.statics:
            out[leaf] = value
        for leaf, argument in self.arguments:
            out[leaf] = leaves[argument]
        for leaf, earlier in self.repeats:
            out[leaf] = out[earlier]
        return out

    def read_leaves(self) -> set[int]:
        """The leaves of ``(args, kwargs)`` that a call looks at."""
        viewed = [source for _, source in self.aliases if not isinstance(source, fx.Node)]
        found = {leaf for _, leaf in (*self.tensors, *self.numbers, *self.arguments)}
        read = [element.of for _, element in self.elements]
        for descriptor in (*read, *(descriptor for _, descriptor in self.others), *viewed):
            if isinstance(descriptor, Argument):
                found.add(descriptor.leaf)
            elif isinstance(descriptor, Base):
                found |= set(descriptor.leaves)
        return found


def _sources(program: Program) -> dict[fx.Node, Input]:
    """The input that each placeholder is, and each node that loads one through the pointer table."""
    found: dict[fx.Node, Input] = dict(zip(program.placeholders, program.inputs, strict=True))
    slots = program.table.slots if program.table is not None else ()
    for node in program.nodes:
        if is_load(node):
            found[node] = slots[node.args[1]].of  # pyright: ignore
    return found


def _aliases(program: Program) -> tuple[tuple[Alias, Input | fx.Node], ...]:
    """The results that are views, with the input or the node that they are views of."""
    slots = program.table.slots if program.table is not None else ()
    inputs: list[Any] = [*program.inputs, *(slot.of for slot in slots)]
    outputs: list[Any] = _output_nodes(program)
    return tuple(
        (alias, (inputs if alias.of == "input" else outputs)[alias.index])
        for alias in program.aliases
        if alias.of in ("input", "output")
    )


def _output_nodes(program: Program) -> list[fx.Node | None]:
    """Per output, the node whose value it is, also where it is stored through a pointer slot."""
    stored: dict[int, fx.Node] = {
        node.args[1]: node.args[2]  # pyright: ignore
        for node in program.nodes
        if is_store(node)
    }
    return [
        stored[descriptor.slot] if isinstance(descriptor, Stored) else value if isinstance(value, fx.Node) else None
        for value, descriptor in zip(program.results, program.outputs, strict=True)
    ]


def _returned(program: Program) -> list[tuple[int, fx.Node, bool]]:
    """Results as (leaf, node, whether the node is memory of an input and must be cloned); hidden ones have leaf -1."""
    found: list[tuple[int, fx.Node, bool]] = []
    for node, result in zip(_output_nodes(program), _described(program), strict=True):
        if node is not None and isinstance(result, Result):
            origin = root(node)
            found.append(
                (result.leaf, node, is_load(origin) or (origin.op == "placeholder" and not is_host_number(origin)))
            )
    return found


def _described(program: Program) -> list[Any]:
    """The descriptor of each output, or of the pointer slot through which it is stored."""
    slots = program.table.slots if program.table is not None else ()
    return [slots[output.slot].of if isinstance(output, Stored) else output for output in program.outputs]
