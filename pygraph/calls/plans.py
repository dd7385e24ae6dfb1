"""The plans of one transformed function: which calls the extension takes, and what it does for each kind.

A plan is made from a call that the path in Python has just served. What it may skip, it describes exactly; where a call
is of a kind that cannot be described, there is no plan, and Python serves it again.
"""

# The plan is made of the private parts of what it replaces: entries, executables and environments.
# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import ctypes
import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad  # its _current_level: checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.calls.entries import Entry
from pygraph.calls.function import Call
from pygraph.calls.keys import Key
from pygraph.guards.environment import Environment
from pygraph.guards.native_description import NO_GUARDS, describe_guards
from pygraph.ir.constants import IMMUTABLE
from pygraph.process import extension
from pygraph.process.reentrancy import here, members
from pygraph.runtime.driver import Counters, add_replay_source

if TYPE_CHECKING:
    from pygraph.runtime.capture import RegionGraph
    from pygraph.runtime.executable import Executable

# Plans are stricter than cache keys, so that an entry can have several; beyond this it does without.
_MAX_PLANS = 8


@dataclasses.dataclass(eq=False)
class _Made:
    """A plan, whose it is, and what of its counts has been taken."""

    plan: Any
    key: Key
    entry: Entry
    counters: Counters | None
    hits: int = 0
    replays: int = 0
    patches: int = 0


@dataclasses.dataclass(frozen=True)
class Reached:
    """What calls depend on besides their arguments that another function runs, see `pygraph.autograd`.

    Attributes:
        environment: What the function reaches, but for the places below.
        tensors: The tensors that it reaches: whether they have gradients, and of which layout they are.
        items: Containers, keys, and the tensors that were found there.
        cells: Closed-over variables, and the tensors that they were.
    """

    environment: Environment
    tensors: tuple[torch.Tensor, ...]
    items: tuple[tuple[Any, Any, torch.Tensor], ...]
    cells: tuple[tuple[Any, torch.Tensor], ...]

    def is_same(self, other: Reached) -> bool:
        """Whether the same tensors are reached."""
        both = zip(self.tensors, other.tensors, strict=False)
        return len(self.tensors) == len(other.tensors) and all(mine is theirs for mine, theirs in both)

    def is_plain(self) -> bool:
        """Whether all its tensors have strides, by which a plan describes them."""
        return all(tensor.layout == torch.strided and not tensor.is_nested for tensor in self.tensors)


@dataclasses.dataclass(frozen=True)
class Served:
    """Calls that plans of one entry have served since the last time; ``stamp`` orders the last ones of entries."""

    key: Key
    entry: Entry
    hits: int
    stamp: int


class CallPath:
    """The native side of one transformed function.

    Args:
        lock: The function's lock; replays take it without waiting.

    Attributes:
        dispatch: ``dispatch(args, kwargs)`` gives the result, or ``miss``; None as long as there is no plan.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._dispatcher: Any = None
        self._made: list[_Made] = []
        self._left: list[Served] = []
        self.dispatch: Any = None
        self.miss: object = None
        _paths.add(self)

    def plan(
        self,
        key: Key,
        entry: Entry,
        live: frozenset[int],
        call: Call,
        fn: Any,
        device_type: str,
        released: Sequence[int] = (),
        reached: Reached | None = None,
    ) -> object | None:
        """Have calls like this one served natively from now on, if that is possible.

        Args:
            key: Of such calls.
            entry: What runs them.
            live: Positions of numbers that are read at every call.
            call: The call.
            fn: What runs them if the entry does not.
            device_type: The accelerator whose settings matter.
            released: Leaves that are taken out of the list that is the first argument, where they are items of the same
                number, before results are allocated; a call whose replay fails after that raises an error.
            reached: What calls depend on besides, if it is not the entry that says so.

        Returns:
            What `discard` takes; None if there is no plan.
        """
        module = extension.loaded()
        if module is None or entry.plans >= _MAX_PLANS or not _is_described(call.leaves, live):
            return None
        entry.plans += 1
        executable = entry.executable
        spec: dict[str, Any] = {
            "live": live,
            "leaves": call.leaves,
            "device": device_type,
            "captured": _captured(entry) if reached is None else tuple((tensor, None) for tensor in reached.tensors),
            "owned": tuple(entry.captured.owned.pairs),
            "environment": _environment_guards(entry.environment) if reached is None else _guards_of(reached),
            "run": fn if executable is None else executable,
            "alone": executable is not None,
            "as_it_is": executable is None and reached is None,
            "replay": None if executable is None else _replay(executable),
            "stream": None if executable is None else _stream(executable),
            "released": tuple(released),
        }
        try:
            plan = module.Plan(call.args, call.kwargs, spec)
        except ValueError:  # its arguments have a container that is not described
            return None
        if self._dispatcher is None:
            self._dispatcher = module.Dispatcher(self._lock.acquire, self._lock.release, here)
        counters = executable.driver.counters if executable is not None and plan.way == "replay" else None
        made = _Made(plan, key, entry, counters)
        self._made.append(made)
        self._dispatcher.add(plan)
        self.miss, self.dispatch = module.MISS, self._dispatcher.dispatch
        return made

    # -- counts -----------------------------------------------------------------------------------------------------

    def tick(self) -> int:
        """The next stamp of the clock that stamps plans."""
        return 0 if self._dispatcher is None else self._dispatcher.tick()

    @property
    def unsettled(self) -> int:
        """Calls served since the last `served`, but for those that steps count themselves."""
        new = sum(made.plan.hits - made.hits for made in self._made if not made.entry.counts_itself)
        return new + sum(served.hits for served in self._left if not served.entry.counts_itself)

    def served(self) -> list[Served]:
        """What plans have served since the last time this was called."""
        found, self._left = self._left, []
        for made in self._made:
            found += self._take(made)
        return found

    def _take(self, made: _Made) -> list[Served]:
        self._count_replays(made)
        hits, made.hits = made.plan.hits - made.hits, made.plan.hits
        return [Served(made.key, made.entry, hits, made.plan.stamp)] if hits else []

    def count_replays(self) -> None:
        """Bring the device's counters up to date."""
        for made in self._made:
            self._count_replays(made)

    @staticmethod
    def _count_replays(made: _Made) -> None:
        if made.counters is not None:
            replays, made.replays = made.plan.hits - made.replays, made.plan.hits
            patches, made.patches = made.plan.patches - made.patches, made.plan.patches
            made.counters.replays += replays
            made.counters.launches += replays
            made.counters.patches += patches

    # -- the end ----------------------------------------------------------------------------------------------------

    def drop(self, entry: Entry) -> None:
        """Forget the plans of an entry, before its graphs go."""
        for made in [made for made in self._made if made.entry is entry]:
            self.discard(made)
        entry.plans = _MAX_PLANS

    def discard(self, made: object) -> None:
        """Forget a plan, if that has not been done."""
        if made in self._made:
            assert isinstance(made, _Made)
            self._dispatcher.remove(made.plan)
            self._left += self._take(made)
            self._made.remove(made)
            made.entry.plans -= 1

    def clear(self) -> None:
        """Forget all plans."""
        if self._dispatcher is not None:
            self._dispatcher.clear()
        for made in self._made:
            self._left += self._take(made)
        self._made = []
        self.dispatch = None


_paths: weakref.WeakSet[CallPath] = weakref.WeakSet()


def count_replays() -> None:
    """Bring the devices' counters up to date with what was replayed natively."""
    for path in members(_paths):
        path.count_replays()


add_replay_source(count_replays)


# ---- descriptions --------------------------------------------------------------------------------------------------


def _is_described(leaves: Sequence[Any], live: frozenset[int]) -> bool:
    """Whether static leaves are immutable, or equal to nothing but themselves."""
    return all(
        isinstance(leaf, torch.Tensor)
        or index in live
        or type(leaf) in IMMUTABLE
        or type(leaf).__hash__ is object.__hash__
        for index, leaf in enumerate(leaves)
    )


def _captured(entry: Entry) -> tuple[tuple[torch.Tensor, int | None], ...]:
    """Captured tensors, and where the graphs read them."""
    if entry.executable is None:
        return tuple((tensor, None) for tensor in entry.captured.tensors)
    return tuple(zip(entry.executable.captured, entry.executable.static_addresses, strict=True))


def _guards_of(reached: Reached) -> tuple[Any, ...]:
    return _environment_guards(reached.environment, reached.items, reached.cells)


def _environment_guards(
    environment: Environment | None,
    more_items: Sequence[tuple[Any, Any, Any]] = (),
    more_cells: Sequence[tuple[Any, Any]] = (),
) -> tuple[Any, ...]:
    if environment is None:
        return NO_GUARDS
    # In Python, a call with tangents does not come as far as an environment.
    variables: Any = vars(forward_ad)
    return describe_guards(environment.guards, [(variables, "_current_level", -1)], more_items, more_cells)


def _replay(executable: Executable) -> dict[str, Any] | None:
    """How to replay an executable that is one graph on the caller's tensors and numbers; None if it is more."""
    if len(executable._regions) != 1 or executable._regions[0].graph is None or executable.plan.aliases:
        return None
    step = executable._regions[0]
    graph, body = step.graph, step.body
    assert graph is not None
    if graph.reuses_outputs or step.adoption is not None or graph.lazy:
        return None  # results are not in fresh memory, or are read in a way that is not described
    tensors, numbers = dict(executable.plan.tensors), dict(executable.plan.numbers)
    outputs = {node: index for index, node in enumerate(body.outputs)}
    if not all(node in tensors for node in body.inputs) or not all(node in numbers for node in body.numbers):
        return None
    if not all(node in outputs and not foreign for _, node, foreign in executable.plan.results):
        return None
    sent = _sent(graph)
    launch = graph.graph.native_launch()
    if sent is None or launch is None or executable.driver.native_stream() is None:
        return None
    commits, slots, values = sent
    results: list[Any] = [None] * executable.plan.out_tree.num_leaves
    for leaf, node, _ in executable.plan.results:
        results[leaf] = ("output", outputs[node])
    for leaf, value in executable.plan.statics:
        results[leaf] = ("static", value)
    for leaf, argument in executable.plan.arguments:
        results[leaf] = ("argument", argument)
    for leaf, earlier in executable.plan.repeats:
        results[leaf] = ("repeat", earlier)
    captured = {id(tensor): index for index, tensor in enumerate(executable.captured)}
    return {
        "inputs": tuple(tensors[body.inputs[position]] for position in graph.slots),
        "memory": tuple((_empty(m.spec.dtype, m.spec.device), m.spec.shape, m.spec.stride) for m in graph.memory),
        "slots": slots,
        "numbers": tuple(
            (numbers[node], *cells) for node, cells in zip(body.numbers, values, strict=True)
        ),
        "commits": commits,
        "synced": ctypes.addressof(graph.patcher.synced),
        "launch": launch,
        "updated": tuple(tensors[body.inputs[position]] for position in body.written),
        "updated_captured": tuple(captured[id(tensor)] for tensor in body.versioned_statics),
        "outputs": tuple(
            (number, None if graph.outputs_are_memory else (spec.shape, spec.stride, spec.offset))
            for number, spec in graph.views
        ),
        "results": tuple(results),
        **_returned(executable.plan.out_tree),
        "owners": (graph, executable),  # kept while addresses of theirs are used
    }  # fmt: skip


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What results are like but for shape and strides: one tensor for all plans, which keep it."""
    return torch.empty(0, dtype=dtype, device=device)


def _stream(executable: Executable) -> dict[str, Any] | None:
    """How to see that the current stream is the one of the last replay, and is not being captured; None if no matter.

    On any other stream Python decides: what a replay has to wait for, or that it must not run.
    """
    stream = executable.driver.native_stream()
    if stream is None:
        return None
    current_stream, is_capturing = stream
    return {
        "last_stream": ctypes.addressof(executable.pool.last_stream),  # pyright: ignore
        "is_capturing": is_capturing,
        "current_stream": current_stream,
        "device_index": executable.driver.device.index or 0,
        "owner": executable.pool,
    }


def _sent(graph: RegionGraph) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]] | None:
    """Commits, and per slot and per number its cells and which commits it needs; None if a node needs Python."""
    patcher = graph.patcher
    if len(patcher.cells) != len(graph.slots) + len(graph.memory):
        return None
    index: dict[int, int] = {}
    commits: list[tuple[int, ...]] = []
    for node in dict.fromkeys(n for nodes in (*patcher.slot_nodes, *patcher.number_nodes) for n in nodes):
        commit = graph.graph.native_commit(node)
        if commit is None:
            return None
        index[node] = len(commits)
        commits.append(dataclasses.astuple(commit))

    def described(cells: Sequence[Any], nodes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        return tuple(
            (tuple(here), tuple(index[n] for n in dict.fromkeys(needs)))
            for here, needs in zip(cells, nodes, strict=True)
        )

    return (
        tuple(commits),
        described(patcher.cells, patcher.slot_nodes),
        described(patcher.number_cells, patcher.number_nodes),
    )


def _returned(tree: pytree.TreeSpec) -> dict[str, Any]:
    """How results become what the function returns: an example of it, or else a function of all leaves."""
    if _is_plain(tree):
        return {"example": pytree.tree_unflatten(range(tree.num_leaves), tree), "unflatten": None}
    return {"unflatten": functools.partial(pytree.tree_unflatten, treespec=tree)}


def _is_plain(tree: pytree.TreeSpec) -> bool:
    return tree.is_leaf() or (tree.type in (tuple, list, dict) and all(map(_is_plain, tree.children())))
