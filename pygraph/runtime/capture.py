"""A region as a graph: how each of its pointers changes, proven before the first use, and its replays.

Two recordings of the region show where its graph holds pointers. That is put to the proof: the buffers of the recording
are poisoned, the graph is replayed on other tensors, and results, updated arguments and memory beyond the results must
be what ordinary launches give. Whatever fails the proof is copied.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.errors import CaptureError
from pygraph.guards.donated import DonatedTensor
from pygraph.ir.descriptors import Fallback, TensorSpec
from pygraph.ir.printing import target_text
from pygraph.ir.scopes import scopes_of
from pygraph.ir.selections import Mechanism, Way
from pygraph.process import progress
from pygraph.runtime.alignment import alignment_of, is_aligned
from pygraph.runtime.body import RegionBody
from pygraph.runtime.discovery import Discovery, Placement, RefusedError
from pygraph.runtime.driver import Driver, Pool
from pygraph.runtime.mechanisms import Question, alternatives, choose
from pygraph.runtime.native_replay import NativeReplay
from pygraph.runtime.own_results import own_results
from pygraph.runtime.patchable import (
    CrowdedError,
    TogetherError,
    find_blank_outputs,
    patchable_slots,
    require_separate,
)
from pygraph.runtime.proof import Example, LaunchSpread
from pygraph.runtime.recorded_region import RecordedRegion, UnprovenError
from pygraph.runtime.replay_proof import ReplayProof
from pygraph.runtime.reservations import sizes_of_results
from pygraph.runtime.reuse import ReusedMemory
from pygraph.runtime.saved_memory import SavedMemory, release_unused


class RegionGraph:
    """A region recorded as a graph, with a proven plan for every input, number and output.

    Args:
        body: The region.
        driver: The device.
        pool: Memory for what the region allocates.
        example: A call to record and prove it with.
        way: ``patch`` or ``copy``.
        mechanism: How pointers change; what cannot be done falls back to less.
        reused: Where results go that stay in the graph's memory; None for fresh results.
        saved: Outputs that go to autograd alone.
        measures: Whether a replay is timed, on which the choice between mechanisms depends.

    Raises:
        RefusedError: The device does not record a node, or a replay does not give what ordinary launches give.

    Attributes:
        graph: The recorded graph.
        slots: Positions of the inputs that have memory; the patcher's first slots, before one per entry of ``memory``.
        memory: The memory that a replay allocates for outputs.
        choice: By which mechanism each pointer changes.
        alternatives: Other mechanisms that may be as cheap.
        patcher: Sends what changes to the graph.
        views: Per output, which entry of ``memory`` it is in, and where.
        outputs_are_memory: Whether the entries of ``memory`` are the outputs as they are.
        lazy: Outputs that are conjugated or negated when they are read: whether the one and whether the other.
        fallbacks: Why what is copied is copied.
        saved: Memory for saved tensors, which stays with the graph; None if it has none.
        spread: How far ordinary launches of the region are apart.
        holders: How many regions it serves; it lives until all of them have released it.
    """

    def __init__(
        self,
        body: RegionBody,
        driver: Driver,
        pool: Pool,
        example: Example,
        way: Way,
        mechanism: Mechanism = "auto",
        reused: ReusedMemory | None = None,
        saved: frozenset[fx.Node] = frozenset(),
        measures: bool = True,
    ) -> None:
        self.body = body
        self.driver = driver
        self.pool = pool
        self.holders = 1
        self.spread = LaunchSpread(body, driver)
        self._reused = reused
        self._saved_nodes = saved
        self._own, self._measures = frozenset[int](), measures
        self.alternatives: tuple[Mechanism, ...] = ()
        _refuse_host_memory(body, example.inputs)
        self._input_specs = [TensorSpec.of(tensor) for tensor in example.inputs]
        self._alignments = [alignment_of(tensor.data_ptr()) for tensor in example.inputs]
        self._take(self._record(example, "copy" if way == "copy" else mechanism))

    # -- recording ------------------------------------------------------------------------------------------------

    def _record(self, example: Example, mechanism: Mechanism) -> RecordedRegion:
        """Record the region, with simpler and simpler mechanisms until a graph passes its proof."""
        notes: list[Fallback] = []
        attempts: list[Mechanism | None] = list(dict.fromkeys((mechanism, "host", "copy", None)))
        taken: list[tuple[int, int]] = []
        if self._saved_nodes and self.pool.graphs:  # else nothing of theirs can be in it, as in the pool of a trial
            release_unused()
            taken = self.pool.taken()
        self.pool.unwritten.clear()  # the recording may use any of it
        reserved = sizes_of_results(self.body, self._saved_nodes)
        placement = Placement(reserved, taken, allocates=self._reused is None)
        while attempts:
            request = attempts[0]
            if request in ("copy", None):
                every = frozenset(range(len(example.inputs)))
                placement = dataclasses.replace(placement, separate=every, shares=False)
            progress.phase("capturing")
            found = Discovery(self.body, self.driver, self.pool, example, placement)
            region = RecordedRegion(self.body, self.driver, self.pool, found)
            region.fallbacks[:0] = notes
            proof = ReplayProof(region, example, self.spread, self._reused is not None, self._measures)
            progress.phase("proving")
            try:
                self._prove(proof, found, request, may_ask_for_room=not placement.room)
                self._own = own_results(proof, self._saved_numbers(region))
                return region
            except CrowdedError as error:
                region.release()
                placement = dataclasses.replace(placement, room=error.room)
            except TogetherError as error:
                region.release()
                separate, shares = placement.separate | error.positions, placement.shares and not error.outputs
                placement = dataclasses.replace(placement, separate=separate, shares=shares)
            except UnprovenError as error:
                region.release()
                notes.append(Fallback(f"mechanism {request}", str(error)))
                attempts.pop(0)
            except BaseException:
                region.release()
                raise
            example = example.again(self.body, self.driver)  # the graph may have written anywhere, to inputs too
        raise RefusedError(None, f"its replay does not give the results of ordinary launches ({notes[-1].reason})")

    def _prove(self, proof: ReplayProof, found: Discovery, request: Mechanism | None, may_ask_for_room: bool) -> None:
        """Find out which slots may be patched, choose how, and prove that; ``request`` None copies everything."""
        region = proof.region
        find_blank_outputs(proof, found, note=self._reused is None)
        inputs = frozenset(range(len(region.slots)))
        every = inputs
        if self._reused is None:  # else outputs stay where they were recorded
            written = [i for i, one in enumerate(region.memory) if one.extent.size and i not in region.blank]
            every |= {len(region.slots) + i for i in written}
        proven = frozenset[int]()
        if request is not None:
            candidates = every - found.unfound if request != "copy" else every - inputs
            # Memory that no node points to (an output that no kernel writes) cannot be patched.
            pointed = {word.slot for word in region.words}
            candidates = frozenset(slot for slot in candidates if slot in inputs or slot in pointed)
            proven = patchable_slots(proof, found, candidates, may_ask_for_room)
        question = Question(
            words=[word for word in region.words if word.slot in every],
            mechanisms=[region.graph.mechanisms(node, request or "copy") for node in range(len(region.graph.nodes))],
            pinned=frozenset(value.node for value in region.values),
            must_copy=every - proven,
            inputs=[self._input_specs[position].nbytes for position in region.slots],
            replay_us=proof.replay_us,
            allocations=0 if self._reused is not None else len(region.memory),
        )
        if request == "table":
            _explain_tables(region, question)
        choice = choose(question, self.driver.costs(), request or "copy")
        require_separate(found, choice.copied)
        region.follow(choice)
        self.alternatives = alternatives(question, self.driver.costs(), choice) if request == "auto" else ()
        if not region.choice.only_host:
            try:
                passes = proof.passes()
            except CaptureError as error:  # one of our own nodes does not take new parameters
                raise UnprovenError(str(error)) from error
            if not passes:
                raise UnprovenError("its proof by poisoned buffers failed")

    def _saved_numbers(self, region: RecordedRegion) -> list[int]:
        """The entries of ``memory`` in which nothing but saved tensors lies."""
        if self._reused is not None or region.lazy:
            return []
        views = list(zip(self.body.outputs, region.views, strict=True))
        shown = {number for node, (number, _) in views if node not in self._saved_nodes}
        return [number for number in range(len(region.memory)) if number not in shown]

    def _take(self, region: RecordedRegion) -> None:
        """Use a proven recording from now on, without the buffers that its graph does not read or write any more."""
        self._region = region
        self.graph, self.slots, self.memory = region.graph, region.slots, region.memory
        self.choice, self.patcher = region.choice, region.patcher
        self.graph.annotate(self._note)
        self.lazy, self.fallbacks = region.lazy, region.fallbacks
        self.views = region.views
        self.outputs_are_memory = not self.lazy and [
            (number, memory.spec) for number, memory in enumerate(self.memory)
        ] == list(self.views)
        self._native: NativeReplay | None = None
        #: The outputs' memory, if it is the same at every replay.
        self._reused_memory: list[torch.Tensor] | None = None
        self.saved: SavedMemory | None = None
        for position in self.patched:
            region.input_buffers[position] = None
        buffers = list(zip(region.output_buffers, region.views, strict=True))
        owners = {number: tensor for tensor, (number, _) in buffers}
        specs = [memory.spec for memory in self.memory]
        if self._reused is not None:
            self._reused.add(region.output_buffers)
            self._reused_memory = [owners[number].as_strided(s.shape, s.stride, 0) for number, s in enumerate(specs)]
        else:
            saved = {number: specs[number] for number in self._saved_numbers(region)}
            if saved:
                usable = self._own - region.overlapping
                own = {n: owners[n].as_strided(s.shape, s.stride, 0).data for n, s in saved.items() if n in usable}
                self.saved = SavedMemory(saved, own, region.reserved, self._current_stream(), self.pool.unwritten)
            written = {slot - len(self.slots) for slot in self.choice.copied}
            written |= region.outside - self._own - region.blank  # else others would get what replays may write to
            region.output_buffers = [tensor for tensor, (number, _) in buffers if number in written]

    def _note(self, op: int) -> dict[str, str]:
        """Words for profilers about the nodes of an operation; -1 stands for nodes that were added."""
        if op < 0:
            return {"operation": "pygraph"}
        node = self.body.nodes[op]
        return {
            "operation": target_text(node.target),
            "source": node.meta.get("backward_of") or node.meta.get("source") or "",
            "scopes": " / ".join(scopes_of(node)),
        }

    def _current_stream(self) -> Callable[[], int] | None:
        stream = self.driver.native_stream()
        return None if stream is None else functools.partial(stream[0], self.driver.device.index or 0)

    def fits(self, position: int, tensor: torch.Tensor) -> bool:
        """Whether input number ``position`` may be ``tensor``: laid out and aligned as it was recorded."""
        spec = self._input_specs[position]
        same = tensor.shape == spec.shape and tensor.stride() == spec.stride and tensor.dtype == spec.dtype
        return same and tensor.device == spec.device and is_aligned(tensor.data_ptr(), self._alignments[position])

    # -- replay ---------------------------------------------------------------------------------------------------

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        taken: Mapping[int, torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Replay on ``inputs`` and ``numbers``; the outputs are in memory of their own, or in the graph's if reused.

        ``taken`` are tensors that become entries of ``memory`` instead of newly allocated ones.
        """
        native = self._native if not taken else None
        if native is not None and (outputs := native(self, inputs, numbers)) is not None:
            if self.body.versioned_statics:
                torch.autograd.graph.increment_version(self.body.versioned_statics)
            return outputs
        reused = self._reused_memory
        if reused is not None:
            fresh = reused
        elif taken or self.saved is not None:
            found: dict[int, torch.Tensor] = {} if self.saved is None else self.saved.take()
            found.update(taken or {})
            fresh = [found[i] if i in found else memory.spec.empty() for i, memory in enumerate(self.memory)]
        else:
            fresh = [memory.spec.empty() for memory in self.memory]
        self._region.replay(inputs, numbers, fresh)
        if reused is not None or self.body.updated or self.body.versioned_statics:
            self._increment_versions(inputs)
        return fresh if self.outputs_are_memory and reused is None else self._region.outputs(fresh)

    def replay_natively(self) -> None:
        """Replay by C++ in calls that Python serves, once there have been some."""
        if self._native is None:
            self._native = NativeReplay(self.driver.counters)

    def _increment_versions(self, inputs: Sequence[torch.Tensor]) -> None:
        """Let autograd notice what a replay has changed: earlier results in reused memory, and updated tensors."""
        changed = [*(self._reused_memory or ()), *(inputs[i] for i in self.body.updated), *self.body.versioned_statics]
        torch.autograd.graph.increment_version(changed)

    # -- reporting ------------------------------------------------------------------------------------------------

    @property
    def reuses_outputs(self) -> bool:
        """Whether outputs are in the same memory at every replay."""
        return self._reused is not None

    def recorded_nodes(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[tuple[str, ...], str]]:
        """By node of a region, the names of what was recorded for it, and how that gets its pointers."""
        ways: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        changed = {
            "by the host": self.choice.host,
            "by the device": self.choice.device,
            "by a table": self.choice.table,
        }
        for way, words in changed.items():
            for word in words:
                ways[word.node][way] += 1
        for number, _ in {(word.node, word.slot) for word in self._region.words if word.slot in self.choice.copied}:
            ways[number]["of a copy"] += 1
        for value in self._region.values:
            ways[value.node][_NUMBER] += 1
        names: dict[fx.Node, list[str]] = {}
        totals: dict[fx.Node, collections.Counter[str]] = {}
        for number, recorded in enumerate(self.graph.nodes):
            if recorded.op >= 0:  # else it is one of ours
                node = nodes[recorded.op]
                names.setdefault(node, []).append(recorded.name)
                totals.setdefault(node, collections.Counter()).update(ways[number])
        return {node: (tuple(found), _pointers_text(totals[node])) for node, found in names.items()}

    def nodes_of(self, slot: int) -> list[int]:
        """Recorded nodes with a pointer into a slot's memory, in the order in which they run."""
        return self._region.nodes_of(slot)

    def offsets_of(self, slot: int, node: int) -> list[int]:
        """Where in the slot's memory that node's pointers point, in bytes from its start."""
        return [word.delta for word in self._region.words if word.slot == slot and word.node == node]

    @property
    def patched(self) -> list[int]:
        """Positions of inputs whose pointers change; the others are copied."""
        return [position for slot, position in enumerate(self.slots) if slot not in self.choice.copied]

    @property
    def patched_outputs(self) -> list[int]:
        """Which pieces of fresh memory the graph's nodes write to themselves; the others are copied out."""
        count = len(self.slots)
        words = {word.slot for word in (*self.choice.host, *self.choice.device, *self.choice.table)}
        return [index for index in range(len(self.memory)) if count + index in words]

    @property
    def patched_nodes(self) -> int:
        """How many recorded nodes have pointers or numbers that change."""
        words = (*self.choice.host, *self.choice.device, *self.choice.table, *self._region.values)
        return len({word.node for word in words})

    @property
    def bytes_copied(self) -> int:
        """Bytes of inputs and outputs that every replay copies."""
        total = 0
        for slot in self.choice.copied:
            if slot < len(self.slots):
                position = self.slots[slot]
                total += self._input_specs[position].nbytes * (2 if position in self.body.updated else 1)
            else:
                total += self.memory[slot - len(self.slots)].extent.size
        return total

    def memory_use(self) -> dict[str, int]:
        """Bytes of captured tensors, of buffers for copied inputs, and of results that a replay allocates."""
        values = [value for value in self.body.static_values if not isinstance(value, DonatedTensor)]
        static = {value.untyped_storage().data_ptr(): value.nbytes for value in values}
        fresh = [] if self.reuses_outputs else self.memory
        buffers = zip(self._input_specs, self._region.input_buffers, strict=False)
        return {
            "static": sum(static.values()),
            "copied": sum(spec.nbytes for spec, buffer in buffers if buffer is not None),
            "outputs": sum(memory.extent.size for memory in fresh),
        }

    def held_again(self) -> RegionGraph:
        """The graph for one more region, which releases it as others do."""
        self.holders += 1
        return self

    def release(self) -> None:
        """Give the graph and its buffers back, if no other region has it."""
        self.holders -= 1
        if self.holders > 0:
            return
        if self._native is not None:
            self._native.end()
        self._region.release([] if self.saved is None else self.saved.release())
        self._reused_memory = None


_NUMBER = "number"


def _pointers_text(ways: Mapping[str, int]) -> str:
    """Numbers of pointers, and of numbers that the host sends, in words.

    >>> _pointers_text({"by the host": 2, "of a copy": 1})
    'pointers: 2 by the host, 1 of a copy'
    """
    pointers = ", ".join(f"{count} {way}" for way, count in sorted(ways.items()) if way != _NUMBER)
    numbers = f"numbers: {ways[_NUMBER]} by the host" if _NUMBER in ways else ""
    return "; ".join(filter(None, [f"pointers: {pointers}" if pointers else "", numbers])) or "as recorded"


def _refuse_host_memory(body: RegionBody, inputs: Sequence[torch.Tensor]) -> None:
    """Refuse a region that an operation outside of graphs gives memory of the host, which no kernel may read."""
    for node, tensor in zip(body.inputs, inputs, strict=True):
        if tensor.numel() and tensor.device.type == "cpu":
            raise RefusedError(None, f"its input {node.name} is on the cpu")


def _explain_tables(region: RecordedRegion, question: Question) -> None:
    """Say which kernels get their pointers from the host though they might load them from a table."""
    nodes = sorted({word.node for word in question.words if "table" not in question.mechanisms[word.node]})
    reasons = {region.graph.nodes[node].name: region.graph.why_not_loaded(node) for node in nodes}
    for name, reason in reasons.items():
        if reason is not None:
            region.fallbacks.append(Fallback(f"{name} loads no pointers from a table", reason))
