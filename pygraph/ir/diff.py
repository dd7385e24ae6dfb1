"""Differences between two Programs, as a pass makes them: their texts with the same names for the same nodes.

Names are given when a Program is printed, by order of appearance, so one node that a pass inserts renames many that it
leaves alone. Here the nodes of both Programs are aligned first: inputs by what they mean, an argument with the load of
its pointer slot, other nodes by their line, and those that are left by operation, source line and shape.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import difflib
import html
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from torch import fx

from pygraph.ir.descriptors import Input, PointerTable, Result
from pygraph.ir.effects import is_load
from pygraph.ir.fields import check_is_program
from pygraph.ir.printing import Namer, input_name, input_text, node_text, operation_name, program_text, spec_text
from pygraph.ir.program import Program

_CONTEXT = 3
"""Lines that are shown around a change."""

_MOST_PAIRS = 4_000_000
"""Pairs of nodes of which the longest runs are sought; that takes about a second."""


@dataclasses.dataclass(frozen=True, repr=False)
class ProgramDiff:
    """Differences between two Programs; ``str()`` is a summary and a unified diff, and notebooks show it in colour.

    It is false where the Programs are the same.

    Attributes:
        lines: The lines of the unified diff.
        added: Numbers of nodes that are new, by operation.
        removed: Numbers of nodes that are gone, by operation.
        changed: Numbers of nodes whose line is another one, by operation.
        moved: Numbers of nodes that run before others after which they ran, by operation.
        same: The number of nodes that are as they were, wherever they are.
    """

    lines: tuple[str, ...]
    added: Mapping[str, int]
    removed: Mapping[str, int]
    changed: Mapping[str, int]
    moved: Mapping[str, int]
    same: int

    @property
    def summary(self) -> str:
        """Counts of nodes in one line."""
        counted = [
            f"{sum(counts.values())} {what} ({', '.join(f'{name} ×{count}' for name, count in counts.items())})"
            for what, counts in (
                ("added", self.added), ("removed", self.removed), ("changed", self.changed), ("moved", self.moved),
            )
            if counts
        ]  # fmt: skip
        return "nodes: " + ", ".join([*counted, f"{self.same} the same"])

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        return "\n".join([self.summary, *(self.lines or ["no differences"])])

    def __repr__(self) -> str:
        return f"<ProgramDiff: {self.summary}>"

    def _repr_html_(self) -> str:
        shown = [f"<b>{html.escape(self.summary)}</b>"]
        for line in self.lines or ("no differences",):
            colour = _COLOURS.get(line[:1], "")
            text = html.escape(line)
            shown.append(f'<span style="background:{colour}">{text}</span>' if colour else text)
        text = "\n".join(shown)
        return f'<pre style="overflow-x:auto">{text}</pre>'


_COLOURS = {"+": "rgba(46,160,67,.25)", "-": "rgba(248,81,73,.25)", "@": "rgba(130,140,155,.25)"}


def diff(before: Program, after: Program) -> ProgramDiff:
    """Show what differs between two Programs, as before and after a pass.

    Nodes are aligned, so that only what has changed is shown, whatever names a Program's own text gives.

    Args:
        before: A Program.
        after: Another one.

    Raises:
        ArgumentError: One of them is no Program.

    Example:
        >>> import torch, pygraph
        >>> program = pygraph.trace(lambda x: torch.sin(x) * x.sum().item())(torch.ones(2))
        >>> print(pygraph.diff(program, pygraph.devicify(program)).summary)
        nodes: 5 the same
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> program = pygraph.trace(lambda x: torch.sin(x) * x.sum().item())(x)
        >>> print(pygraph.diff(program, pygraph.devicify(program)).summary)
        nodes: 1 removed (_local_scalar_dense ×1), 1 changed (mul ×1), 3 the same
    """
    for name, program in (("before", before), ("after", after)):
        check_is_program(f"diff(…, {name}={{}})", program)
    first = Namer()
    old = program_text(before, first).splitlines()
    alignment = _Alignment(before, after, first.names)
    given = {new: first.names[node] for new, node in alignment.partners.items()}
    second = Namer(given, first.names.values())
    new = program_text(after, second).splitlines()
    lines = difflib.unified_diff(
        old, new, f"{before.name} ({before.stage})", f"{after.name} ({after.stage})", n=_CONTEXT, lineterm=""
    )
    texts = _texts(before, first), _texts(after, second)
    changed = [one for one, node in alignment.partners.items() if texts[0].get(node) != texts[1].get(one)]
    matched = set(alignment.partners.values())
    return ProgramDiff(
        tuple(lines),
        added=_counted(node for node in texts[1] if node not in alignment.partners),
        removed=_counted(node for node in texts[0] if node not in matched),
        changed=_counted(changed),
        moved=_counted(_moved(before, alignment.partners)),
        same=sum(node in texts[1] for node in alignment.partners) - len(changed),
    )


class _Alignment:
    """The nodes of two Programs that are the same.

    Attributes:
        partners: By node of the second Program, the one of the first; in the order of the second.
    """

    def __init__(self, before: Program, after: Program, names: dict[fx.Node, str]) -> None:
        self._names, self._found, self._used = names, dict[fx.Node, fx.Node](), set[fx.Node]()
        self._old = [node for node in before.nodes if node.op == "call_function"]
        self._new = [node for node in after.nodes if node.op == "call_function"]
        self._align_inputs(before, after)
        namer = Namer(names)
        self._lines = self._by_key(lambda node: [_body(node, namer)])
        self._likeness = self._by_key(_likeness)
        self._align(by_likeness=False)
        self._align_in_order()
        self._align(by_likeness=True)
        self.partners = {node: self._found[node] for node in after.nodes if node in self._found}

    def _align_inputs(self, before: Program, after: Program) -> None:
        """Align inputs by what they mean, and by the argument that a slot holds."""
        old = dict(reversed(_meanings(before)))  # the first of several
        for meaning, node in _meanings(after):
            if (partner := old.get(meaning)) is not None and partner not in self._used:
                self._match(node, partner)

    def _by_key(self, keys: Callable[[fx.Node], Iterable[Hashable]]) -> dict[Hashable, collections.deque[fx.Node]]:
        found: dict[Hashable, collections.deque[fx.Node]] = collections.defaultdict(collections.deque)
        for node in self._old:
            for key in keys(node):
                found[key].append(node)
        return found

    def _align(self, *, by_likeness: bool) -> None:
        """Align nodes whose line is the same once what they take is aligned; then those that are merely alike."""
        namer = Namer({new: self._names[node] for new, node in self._found.items()}, self._names.values())
        for node in self._new:
            if node in self._found:
                continue
            for one in node.all_input_nodes:
                namer.names.setdefault(one, f"?{len(namer.names)}")  # no line has that
            partner = self._unused(self._lines, _body(node, namer))
            if partner is None and by_likeness:
                found = (self._unused(self._likeness, key) for key in _likeness(node))
                partner = next(filter(None, found), None)
            if partner is not None:
                self._match(node, partner)
                namer.names[node] = self._names[partner]

    def _align_in_order(self) -> None:
        """Align runs of nodes that are alike, among those that are left."""
        old = [node for node in self._old if node not in self._used]
        new = [node for node in self._new if node not in self._found]
        keys = [[_likeness(node)[0] for node in nodes] for nodes in (old, new)]
        start = _shared(*keys)
        end = _shared(*(one[: start - 1 if start else None : -1] for one in keys))
        pairs = [*zip(old[:start], new[:start], strict=True)]
        pairs += zip(old[len(old) - end :], new[len(new) - end :], strict=True)
        middle = [one[start : len(one) - end] for one in keys]
        if len(middle[0]) * len(middle[1]) <= _MOST_PAIRS:
            for block in difflib.SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
                firsts, size = (start + block.a, start + block.b), block.size
                pairs += zip(old[firsts[0] : firsts[0] + size], new[firsts[1] : firsts[1] + size], strict=True)
        for partner, node in pairs:
            self._match(node, partner)

    def _unused(self, table: Mapping[Hashable, collections.deque[fx.Node]], key: Hashable) -> fx.Node | None:
        nodes = table.get(key)
        while nodes and nodes[0] in self._used:
            nodes.popleft()
        return nodes[0] if nodes else None

    def _match(self, node: fx.Node, partner: fx.Node) -> None:
        self._found[node] = partner
        self._used.add(partner)


def _shared(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """The number of items with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))


def _meanings(program: Program) -> list[tuple[str, fx.Node]]:
    """Inputs, loads of pointer slots, and functions that operations take, with what they mean."""
    found = [(_meaning(one), node) for node, one in zip(program.placeholders, program.inputs, strict=True)]
    found += [(f"attribute {node.target}", node) for node in program.nodes if node.op == "get_attr"]
    table = program.table
    if table is not None:
        loads = [node for node in program.nodes if is_load(node)]
        found += [(_meaning(table.slots[node.args[1]].of), node) for node in loads]  # pyright: ignore
    return found


def _meaning(descriptor: Input | Result) -> str:
    if isinstance(descriptor, Result):
        return descriptor.path
    return "the pointer table" if isinstance(descriptor, PointerTable) else input_text(descriptor)


def _body(node: fx.Node, namer: Namer) -> str:
    """The line of a node without its name and source."""
    is_named = node in namer.names
    namer.names.setdefault(node, "node")
    text = node_text(node, namer)
    if not is_named:
        del namer.names[node]
    return text.partition(": ")[2].partition("  # ")[0]


def _likeness(node: fx.Node) -> list[Hashable]:
    """Keys of which nodes that are alike share one; the first that another node has counts."""
    name, spec = operation_name(node.target).strip("_"), spec_text(node.meta.get("spec"))
    source = node.meta.get("source")
    return [(name, spec, source), (name, source, "source"), (name, spec, "spec")]


def _texts(program: Program, namer: Namer) -> dict[fx.Node, str]:
    """The line of every node."""
    found = {
        node: f"{namer.give(node, input_name(one))}: {spec_text(node.meta.get('spec'))} {input_text(one)}"
        for node, one in zip(program.placeholders, program.inputs, strict=True)
    }
    calls = (node for node in program.nodes if node.op == "call_function")
    return {**found, **{node: node_text(node, namer) for node in calls}}


def _counted(nodes: Iterable[fx.Node]) -> dict[str, int]:
    """Numbers of nodes by operation, the most frequent first."""
    names = ("input" if node.op == "placeholder" else operation_name(node.target) for node in nodes)
    return dict(sorted(collections.Counter(names).items(), key=lambda one: (-one[1], one[0])))


def _moved(before: Program, partners: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The fewest nodes that have to move for the others to run in the order of before."""
    numbers = {node: number for number, node in enumerate(before.nodes)}
    nodes = [node for node in partners if node.op == "call_function" and partners[node].op == "call_function"]
    ends: list[int] = []  # the least number with which a rising sequence of each length ends
    lengths: list[int] = []
    for node in nodes:
        number = numbers[partners[node]]
        length = bisect.bisect_left(ends, number)
        ends[length : length + 1] = [number]
        lengths.append(length)
    moved: list[fx.Node] = []
    wanted = len(ends) - 1
    for node, length in zip(reversed(nodes), reversed(lengths), strict=True):
        if length == wanted:
            wanted -= 1
        else:
            moved.append(node)
    return moved[::-1]
