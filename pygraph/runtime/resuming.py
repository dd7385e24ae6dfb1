"""Calls that go on in another Executable, from the question that they answer otherwise than the first one.

The two are traces of one function, which compute the same up to there. Results of the first one's graphs that the
second one needs have equal names (`pygraph.ir.value_names`); so only its regions behind the question run.
"""

# Arguments of calls are of any type.
from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from pygraph.ir.decisions import is_question
from pygraph.ir.descriptors import Argument, Element, ScalarArgument, TensorSpec
from pygraph.ir.effects import is_action, is_load, is_random, may_draw, root, written_arguments
from pygraph.ir.program import Program
from pygraph.ir.random_states import set_random_state
from pygraph.ir.value_names import value_name
from pygraph.runtime.bound_region import BoundRegion
from pygraph.runtime.calling_convention import CallingConvention, Values
from pygraph.runtime.driver import RandomStates


class Resumable(Protocol):
    """The attributes of an Executable that going on depends on."""

    program: Program
    regions: list[BoundRegion]
    convention: CallingConvention
    resumptions: Resumptions


@dataclasses.dataclass
class Stopped:
    """A call that has stopped at a question.

    Attributes:
        executable: What it ran.
        region: The region that asks.
        question: The number of the question.
        env: The values of nodes so far.
        leaves: Its leaves.
        earlier: The same call where it had stopped before, if it has gone on from there; None if it began here.
        random_states: The states of random generators there; None if nothing has been drawn.
        is_resumed: Whether another Executable has gone on with it.
        missing: The names of the tensors that kept another one from that; empty if something else did.
    """

    executable: Resumable
    region: int
    question: int
    env: Values
    leaves: Sequence[Any]
    earlier: Stopped | None = None
    random_states: RandomStates | None = None
    is_resumed: bool = False
    missing: frozenset[str] = frozenset()

    @property
    def is_of_host(self) -> bool:
        """Whether the device has done nothing for it: it decides by what the host draws, each time anew."""
        done = self.executable.regions[: self.region + 1]
        return bool(done) and all(bound.region.kind == "host" for bound in done)


@dataclasses.dataclass(frozen=True)
class Resumption:
    """Where an Executable goes on for calls that have stopped at a question of another one.

    Attributes:
        begin: The first region that runs; 0 if the call has to begin anew.
        values: The nodes whose values it takes over, with those of the other one, and what they must be like.
        others: Further ones, with which yet another Executable may go on.
        leaves: Pairs of leaves, of the other one and its own, that must be the same objects.
        missing: The names of tensors that the other one has not computed as results of its regions.
    """

    begin: int = 0
    values: tuple[tuple[fx.Node, fx.Node, TensorSpec | None], ...] = ()
    others: tuple[tuple[fx.Node, fx.Node], ...] = ()
    leaves: tuple[tuple[int, int], ...] = ()
    missing: frozenset[str] = frozenset()


class Resumptions:
    """Resumptions of calls by one Executable."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Resumption]] = weakref.WeakKeyDictionary()

    def of(self, mine: Resumable, stopped: Stopped) -> Resumption:
        """The resumption of an Executable for a call."""
        found = self._found.setdefault(stopped.executable, {})
        key = stopped.region, stopped.question
        if key not in found:
            found[key] = _resumption(mine, stopped.executable, *key)
        return found[key]


class _Here(threading.local):
    """The call that has stopped in this thread, and is about to go on."""

    stopped: Stopped | None = None


here = _Here()


@contextlib.contextmanager
def going_on(stopped: Stopped) -> Generator[None, None, None]:
    """Have the Executable that is called inside go on with a call, if it can."""
    here.stopped = stopped
    try:
        yield
    finally:
        here.stopped = None


def begin_of(mine: Resumable, leaves: Sequence[Any], env: Values) -> int:
    """The region at which an Executable begins a call, whose values until then are put into its environment.

    Random generators are put into the states that they had there, from those at the beginning of the call.
    """
    stopped, here.stopped = here.stopped, None  # what runs after it may find updated tensors
    while stopped is not None:
        begin = _begin(mine, stopped, leaves, env)
        if begin > 0:
            stopped.is_resumed = True
            if stopped.random_states is not None:
                stopped.random_states.restore()
            return begin
        stopped = stopped.earlier
    return 0


def _begin(mine: Resumable, stopped: Stopped, leaves: Sequence[Any], env: Values) -> int:
    found, known = mine.resumptions.of(mine, stopped), stopped.env
    if found.begin == 0:
        stopped.missing = found.missing
        return 0
    if any(stopped.leaves[theirs] is not leaves[own] for theirs, own in found.leaves):
        return 0
    # One that has gone on itself has not all values of its own.
    if not all(theirs in known and _is_like(known[theirs], spec) for _, theirs, spec in found.values):
        return 0
    env.update((own, known[theirs]) for own, theirs, _ in found.values)
    env.update((own, known[theirs]) for own, theirs in found.others if theirs in known)
    return found.begin


def _is_like(value: Any, spec: TensorSpec | None) -> bool:
    return spec is None or (value.shape == spec.shape and value.stride() == spec.stride and value.dtype == spec.dtype)


def _resumption(mine: Resumable, other: Resumable, region: int, question: int) -> Resumption:
    """Where one Executable goes on for calls that have stopped at a question in a region of another one."""
    at = next((index for index, bound in enumerate(mine.regions) if _position(bound, question) is not None), None)
    if at is None or not other.regions:  # released, as the second trace was made
        return Resumption()
    done = [node for bound in other.regions[:region] for node in bound.body.nodes]
    done += other.regions[region].body.nodes[: _position(other.regions[region], question)]
    results = _results(other, region)
    behind = mine.regions[at].body.nodes[(_position(mine.regions[at], question) or 0) + 1 :]
    begins = [at] if any(map(_must_run, behind)) else [at + 1, at]
    missing: frozenset[str] = frozenset()
    for begin in begins:
        skipped = [node for bound in mine.regions[:begin] for node in bound.body.nodes]
        leaves = _leaves(mine, other, begin)
        if begin == 0 or leaves is None or not _may_be_skipped(skipped, done):
            continue
        needed = _needed(mine, begin, skipped)
        absent = [node for node in needed if value_name(node) not in results]
        if not absent:
            pairs = [(node, results[str(value_name(node))]) for node in needed]
            if _are_as_separate(pairs):
                values = tuple((own, theirs, _spec(own)) for own, theirs in pairs)
                return Resumption(begin, values, _others(mine, begin, pairs, results), leaves)
        elif not missing:
            computed = {node for bound in mine.regions[:at] for node in bound.body.nodes}
            if all(value_name(node) and node in computed and _spec(node) is not None for node in absent):
                missing = frozenset(str(value_name(node)) for node in absent)
    return Resumption(missing=missing)


def _position(bound: BoundRegion, question: int) -> int | None:
    """The position of a question in a region; None if it is not there."""
    asking = (i for i, node in enumerate(bound.body.nodes) if is_question(node) and node.args[2] == question)
    return next(asking, None)


def _must_run(node: fx.Node) -> bool:
    """Whether a node does more than to compute a value."""
    return is_action(node) or may_draw(node) or bool(written_arguments(node))


def _may_be_skipped(skipped: Sequence[fx.Node], done: Sequence[fx.Node]) -> bool:
    """Whether nodes need not run where others have run: they update nothing, and draw what those have drawn."""
    names = {value_name(node) for node in done}
    if not _draw_alike(skipped, done):
        return False
    for node in skipped:
        if any(root(one).op == "placeholder" or is_load(root(one)) for one in written_arguments(node)):
            return False
        if is_action(node) and not is_question(node) and (value_name(node) is None or value_name(node) not in names):
            return False
    return True


def _draw_alike(skipped: Sequence[fx.Node], done: Sequence[fx.Node]) -> bool:
    """Whether random generators are in the same states behind nodes as behind others that have run."""
    moving = [
        [node for node in nodes if may_draw(node) or node.target is set_random_state()] for nodes in (skipped, done)
    ]
    if any(may_draw(node) and not is_random(node) for nodes in moving for node in nodes):
        return False  # an operation of others, which may draw in secret
    names, others = ([value_name(node) for node in nodes] for nodes in moving)
    return None not in names and names == others


def _results(other: Resumable, count: int) -> dict[str, fx.Node]:
    """The results of an Executable's first regions by name, but those that these have overwritten since.

    Memory that goes to autograd alone is lent, and is left out.
    """
    found: dict[str, fx.Node] = {}
    lent = other.convention.saved_nodes()
    for bound in other.regions[:count]:
        written = {root(one) for node in bound.body.nodes for one in written_arguments(node)}
        found = {name: node for name, node in found.items() if root(node) not in written}
        named = ((value_name(node), node) for node in bound.body.outputs if node not in lent)
        found |= {name: node for name, node in named if name is not None}
    return found


def _needed(mine: Resumable, begin: int, skipped: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of skipped regions whose values the others, or the results of a call, take."""
    members = set(skipped)
    convention = mine.convention
    taken = [node for bound in mine.regions[begin:] for node in (*bound.body.inputs, *bound.body.numbers)]
    taken += [node for _, node, _ in convention.results]
    taken += [source for _, source in convention.aliases if isinstance(source, fx.Node)]
    return [node for node in dict.fromkeys(taken) if node in members]


def _others(
    mine: Resumable, begin: int, pairs: Sequence[tuple[fx.Node, fx.Node]], results: Mapping[str, fx.Node]
) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """Results of skipped regions that are known besides those that are needed, with the nodes that they replace."""
    needed = {own for own, _ in pairs}
    outputs = [node for bound in mine.regions[:begin] for node in bound.body.outputs if node not in needed]
    found = [(node, results[name]) for node in outputs if (name := value_name(node)) is not None and name in results]
    return tuple(found) if _are_as_separate([*pairs, *found]) else ()


def _spec(node: fx.Node) -> TensorSpec | None:
    spec = node.meta.get("spec")
    return spec if isinstance(spec, TensorSpec) else None


def _are_as_separate(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether values share memory where those that they replace do, and only there: some may be overwritten later."""
    roots = {(root(own), root(theirs)) for own, theirs in pairs}
    return len(roots) == len({own for own, _ in roots}) == len({theirs for _, theirs in roots})


def _leaves(mine: Resumable, other: Resumable, begin: int) -> tuple[tuple[int, int], ...] | None:
    """The leaves that skipped regions take, behind those of the other Executable; None if that has not all of them."""
    taken = {node for bound in mine.regions[:begin] for node in (*bound.body.inputs, *bound.body.numbers)}
    convention = mine.convention
    own = {leaf for node, leaf in (*convention.tensors, *convention.numbers) if node in taken}
    own |= {d.of.leaf for node, d in convention.elements if node in taken and isinstance(d.of, Argument)}
    paths, others = _paths(mine.program), {path: leaf for leaf, path in _paths(other.program).items()}
    pairs = [(others.get(paths.get(leaf, "")), leaf) for leaf in sorted(own)]
    found = tuple((theirs, leaf) for theirs, leaf in pairs if theirs is not None)
    return found if len(found) == len(pairs) else None


def _paths(program: Program) -> dict[int, str]:
    """The paths of the leaves that a Program reads."""
    slots = () if program.table is None else program.table.slots
    inputs: list[Any] = [*program.inputs, *(slot.of for slot in slots)]
    inputs = [one.of if isinstance(one, Element) else one for one in inputs]
    return {one.leaf: one.path for one in inputs if isinstance(one, (Argument, ScalarArgument))}
