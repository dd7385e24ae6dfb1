"""Discovery of the pointers, numbers and allocations of a region's graph, from two recordings.

The recordings have their inputs and outputs at different addresses and different numbers; words that moved along are
pointers, and bytes that changed with a number are that number. One only serves the comparison: it is made with the
example inputs themselves, as a recording changes nothing, in a pool that is given back before the other one is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.errors import CaptureError
from pygraph.ir.descriptors import Fallback, TensorSpec
from pygraph.ir.effects import is_operation, is_view, root, unread_statistics
from pygraph.ir.evaluate import physical
from pygraph.ir.printing import target_text
from pygraph.runtime.body import RegionBody
from pygraph.runtime.driver import Driver, Pool, patiently
from pygraph.runtime.graph_generators import GraphGenerator
from pygraph.runtime.pointers import LIVE_DTYPES, Extent, ValueWord, Word, pointer_words, same_structure, value_words
from pygraph.runtime.proof import Example, Trial, Undisturbed
from pygraph.runtime.recorded_graph import RecordedGraph
from pygraph.runtime.recorded_inputs import recorded_inputs
from pygraph.runtime.recorded_outputs import allocations_in_one_memory
from pygraph.runtime.reservations import Reservations

# Two numbers that every dtype represents exactly and that nothing else in a kernel's parameters is likely to be.
_SENTINELS = {"float": (1.671875, -2.34375), "int": (87, 101), "bool": (True, False)}

# Operations that take a tensor for its shape and dtype only, so that their nodes need not point to it.
_SHAPE_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")

# Operations that do so with some of their arguments: their positions.
_SHAPE_ONLY_ARGUMENTS = {"aten.fill": (0,), "aten.max_pool2d_with_indices_backward": (1,)}


class RefusedError(CaptureError):
    """A region cannot be a graph because of its node number ``node``; None if it is the region as a whole."""

    def __init__(self, node: int | None, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class FreshMemory:
    """Memory that a replay allocates for one or more outputs.

    Attributes:
        spec: How it is allocated: as the output itself where one output is all of it, else as ``flat``.
        flat: The whole memory as a flat tensor.
        extent: Where it was when the graph was recorded, and which operation allocated it.
        scratch: Bytes that this operation allocated besides, and freed.
    """

    spec: TensorSpec
    flat: TensorSpec
    extent: Extent
    scratch: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the memory of a recording is to lie.

    Attributes:
        reserved: Bytes of results by the operation that makes them, which the recording that stays shall have where
            neither values before them nor other graphs have been; see `pygraph.runtime.reservations`.
        taken: Address and size of memory that other graphs use.
        allocates: Whether memory of outputs that the region only allocates is to be outside of the pool: replays write
            elsewhere, so that no graph has to have it.
        room: Sizes of results by the operation that makes them, for which there shall be free memory of exactly these
            sizes. Otherwise a result may begin where its operation had larger scratch memory, whose pointers look like
            the result's.
        separate: Positions of inputs that are recorded in memory of their own; see `pygraph.runtime.recorded_inputs`.
        shares: Whether several outputs outside of the pool may be recorded in the same memory; see
            `pygraph.runtime.recorded_outputs`.
    """

    reserved: Mapping[int, Sequence[int]]
    taken: Sequence[tuple[int, int]]
    allocates: bool
    room: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict[int, Sequence[int]])
    separate: frozenset[int] = frozenset()
    shares: bool = True


class Discovery:
    """A region, recorded twice; one recording only serves the comparison.

    Args:
        body: The region.
        driver: The device.
        pool: Memory for what the region allocates.
        example: A call, whose inputs are not changed.
        placement: Where memory is to lie.

    Raises:
        RefusedError: The device does not record a node, or a number was not found.

    Attributes:
        graph: The other recording.
        input_buffers: The inputs that it was recorded with; None for those without memory.
        together: Slots that were recorded in the same memory, so that nothing can be copied there.
        output_buffers: The outputs that it writes.
        slots: Positions of inputs that have memory.
        memory: The memory that the outputs are in.
        views: Per output, which memory it is in, and where.
        lazy: Outputs that are conjugated or negated when they are read: whether the one and whether the other.
        words: The pointer words of ``slots``, then of ``memory``.
        values: Where the numbers are.
        unfound: Slots that some kernel reads through a pointer that was not found.
        blank: Memory that no operation writes to.
        reserved: Memory that lies where it was reserved.
        outside: Memory that lies outside of the pool.
        overlapping: Memory of ``together``.
        unpointed: Other memory that no pointer was found to, and what to report about it.
        notes: Pointers that were not found, for the report.
    """

    graph: RecordedGraph

    def __init__(
        self,
        body: RegionBody,
        driver: Driver,
        pool: Pool,
        example: Example,
        placement: Placement,
    ) -> None:
        self.body = body
        self._placement = placement
        sizes = {op: its for op, its in placement.reserved.items() if op not in placement.room}
        self._reservations: Mapping[int, Sequence[tuple[int, int]]] = {}
        self.driver = driver
        inputs = example.inputs
        self.slots = [i for i, tensor in enumerate(inputs) if tensor.numel()]
        self.notes: list[Fallback] = []
        self._empties = [None if tensor.numel() else tensor for tensor in inputs]
        self._example = example
        self._record(inputs, list(example.numbers), pool, sizes)
        self.reserved = frozenset(number for number, one in enumerate(self.memory) if self._is_reserved(one.extent))
        outside = {body.nodes.index(node) for node in body.allocations} if placement.allocates else set[int]()
        self.outside = frozenset(n for n, one in enumerate(self.memory) if one.extent.first_op in outside)

    def _record(
        self, inputs: Sequence[torch.Tensor], numbers: list[Any], pool: Pool, sizes: Mapping[int, Sequence[int]]
    ) -> None:
        body = self.body
        sentinels: list[list[Any]] = [list(numbers), list(numbers)]
        for _, position, dtype in body.scalar_nodes():
            kind = "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"
            sentinels[0][position], sentinels[1][position] = _SENTINELS[kind]
        # Not `detach`, which would let the recording increment the versions of the examples.
        examples = [tensor.data if tensor.numel() else None for tensor in inputs]
        temporary = self.driver.new_pool(lasting=False)
        other, outputs_again, _ = self._record_once(examples, sentinels[1], temporary, {}, {})
        other.release()  # its nodes stay known; its outputs stay until none of their addresses can be in both
        self.driver.give_back()
        recorded = recorded_inputs(body, inputs, self._placement.separate)
        self.input_buffers: list[torch.Tensor | None] = list(recorded.tensors)
        self.together = frozenset(slot for slot, position in enumerate(self.slots) if position in recorded.together)
        self._tangled = frozenset(slot for slot, position in enumerate(self.slots) if position in recorded.tangled)
        shares = self._placement.allocates and self._placement.shares
        in_one_memory = allocations_in_one_memory(body) if shares else {}
        graph, outputs, allocations = self._record_once(self.input_buffers, sentinels[0], pool, sizes, in_one_memory)
        self.graph = graph
        addresses_again = [output.untyped_storage().data_ptr() for output in outputs_again]
        del outputs_again
        self.driver.give_back()
        try:
            self._plan(outputs, addresses_again, examples, allocations, other, sentinels, in_one_memory)
        except BaseException:
            graph.release()
            raise

    def _record_once(
        self,
        inputs: Sequence[torch.Tensor | None],
        numbers: list[Any],
        pool: Pool,
        sizes: Mapping[int, Sequence[int]],
        in_one_memory: Mapping[fx.Node, torch.Tensor],
    ) -> tuple[RecordedGraph, list[torch.Tensor], list[tuple[int, int]]]:
        position = -1
        allocations: list[tuple[int, int]] = []
        allocations_of = self.body.allocations if self._placement.allocates else []
        allocated: dict[fx.Node, Any] = {
            node: in_one_memory[node] if node in in_one_memory else node.target(*node.args, **node.kwargs)  # pyright: ignore
            for node in allocations_of
        }
        actual = [empty if tensor is None else tensor for tensor, empty in zip(inputs, self._empties, strict=True)]

        def record(generators: Sequence[GraphGenerator], mark: Callable[[int], None]) -> list[torch.Tensor]:
            walls: list[torch.Tensor] = []
            before = self._allocated()
            reservations = Reservations(sizes, self._placement.taken, self.driver.device)
            if sizes:
                self._reservations = reservations.extents
            after = self._allocated()
            made, held = after[0] - before[0], after[1] - before[1]  # of `walls` and `reservations`, not of operations

            def note_allocations() -> None:
                total, live = self._allocated()
                allocations.append((total - made, live - held))

            def before_operation(index: int) -> None:
                nonlocal position, made, held
                position = index
                note_allocations()
                room = self._placement.room
                if walls or index in room or reservations.concerns(index):
                    before = self._allocated()
                    walls.clear()
                    reservations.free_for(index)
                    walls.extend(_make_room(room.get(index, ()), self.driver.device))
                    after = self._allocated()
                    made, held = made + after[0] - before[0], held + after[1] - before[1]
                mark(index)

            allocations.clear()
            own = {generator.original: generator.own for generator in generators}
            outputs = self.body.run(actual, numbers, before_operation, None, own, allocated, self.driver)  # pyright: ignore[reportArgumentType]
            note_allocations()
            return outputs

        def attempt() -> tuple[RecordedGraph, list[torch.Tensor]]:
            generators = [GraphGenerator(generator) for generator in dict.fromkeys(self.body.generators.values())]
            return self.driver.record(functools.partial(record, generators), pool, generators)

        try:
            with Undisturbed(self.driver, None):
                graph, outputs = patiently(attempt)
        except CaptureError as error:
            self._settle_libraries()
            raise RefusedError(position if position >= 0 else None, _reason(error)) from error
        return graph, outputs, allocations

    def _is_reserved(self, extent: Extent) -> bool:
        pieces = self._reservations.get(extent.first_op, ())
        return any(start <= extent.start and extent.start + extent.size <= start + size for start, size in pieces)

    def _allocated(self) -> tuple[int, int]:
        """Bytes allocated since the start, and those in use."""
        return self.driver.allocated_total(), self.driver.live_bytes()

    def _settle_libraries(self) -> None:
        """Run once more after a refused recording: cuSOLVER fails the next call too (torch 2.11), and then no more."""
        example = self._example
        trial = Trial(self.driver, self.body, example.inputs, example.state)
        with trial, contextlib.suppress(RuntimeError):
            self.body.run(trial.inputs, example.numbers)

    def _plan(
        self,
        outputs: list[torch.Tensor],
        addresses_again: list[int],
        examples: Sequence[torch.Tensor | None],
        allocations: list[tuple[int, int]],
        other: RecordedGraph,
        sentinels: list[list[Any]],
        in_one_memory: Collection[fx.Node],
    ) -> None:
        """Find the words of every input, output memory and number."""
        self.output_buffers = [physical(output) for output in outputs]
        self.lazy = {i: (t.is_conj(), t.is_neg()) for i, t in enumerate(outputs) if t.is_conj() or t.is_neg()}
        memory_again = self._find_memory(outputs, addresses_again, allocations)
        overlapping = {self.body.nodes.index(node) for node in in_one_memory}
        self.overlapping = frozenset(n for n, one in enumerate(self.memory) if one.extent.first_op in overlapping)
        self.together |= {len(self.slots) + number for number in self.overlapping}
        nodes, nodes_again = self.graph.nodes, other.nodes
        comparable = same_structure(nodes, nodes_again)
        if not comparable:
            self.notes.append(Fallback("every pointer", "two recordings of the region differ in their kernels"))
        extents = [extent_of(self.input_buffers[i]) for i in self.slots] + [m.extent for m in self.memory]
        extents_again = [extent_of(examples[i]) for i in self.slots] + memory_again
        together = self.together - self._tangled
        self.words = (
            pointer_words(nodes, nodes_again, extents, extents_again, together, self._tangled) if comparable else []
        )
        self.values = self._find_numbers(nodes, nodes_again, sentinels) if comparable or self.body.numbers else []
        self.unfound = self._unproven_inputs(self.words) if comparable else set(range(len(self.slots)))
        self.blank: frozenset[int] = frozenset()
        self.unpointed: dict[int, Fallback] = {}
        if comparable:
            self._find_unpointed()

    def _find_memory(
        self, outputs: list[torch.Tensor], addresses_again: list[int], allocations: list[tuple[int, int]]
    ) -> list[Extent]:
        """Find the memory of the outputs; return where it was in the other recording."""
        self.memory: list[FreshMemory] = []
        self.views: list[tuple[int, TensorSpec]] = []
        again_extents: list[Extent] = []
        known: dict[int, int] = {}
        for index, (tensor, again) in enumerate(zip(outputs, addresses_again, strict=True)):
            storage = tensor.untyped_storage()
            # Memory without bytes has no address of its own, and is no other's.
            if storage.data_ptr() not in known or not storage.nbytes():
                known[storage.data_ptr()] = len(self.memory)
                op = self.body.producer(index)
                self.memory.append(_fresh_memory(tensor, op, allocations[op], allocations[op + 1]))
                again_extents.append(Extent(again, storage.nbytes(), op))
            self.views.append((known[storage.data_ptr()], TensorSpec.of(tensor)))
        return again_extents

    def _find_numbers(self, nodes: Any, nodes_again: Any, sentinels: list[list[Any]]) -> list[ValueWord]:
        found: list[ValueWord] = []
        for op, position, dtype in self.body.scalar_nodes():
            name = str(dtype).removeprefix("torch.")
            if name not in LIVE_DTYPES:
                raise RefusedError(op, f"a live number of {name} cannot be told apart in a kernel's parameters")
            encoded = [
                torch.tensor(values[position], dtype=dtype, device="cpu").numpy().tobytes() for values in sentinels
            ]
            words = value_words(nodes, nodes_again, op, position, encoded[0], encoded[1], name)
            if len(words) != 1:
                raise RefusedError(op, f"its number was found {len(words)} times in the kernel's parameters")
            found += words
        return found

    def _unproven_inputs(self, words: list[Word]) -> set[int]:
        """Slots of inputs that some kernel reads through a pointer that was not found."""
        found = {(word.slot, self.graph.nodes[word.node].op) for word in words}
        recorded = {node.op for node in self.graph.nodes}
        missing: set[int] = set()
        for slot, position in enumerate(self.slots):
            for op in self.body.readers(position):
                node = self.body.nodes[op]
                if op not in recorded or (slot, op) in found or self._takes_no_bytes(node, position):
                    continue
                if takes_shape_only(node):
                    continue
                if any(self.body.takes_only_at(node, position, ignored) for ignored in _unread_arguments(node)):
                    continue
                missing.add(slot)
                self._note_copy(
                    position,
                    f"no pointer to it was found in the kernels of {self.kernels_of(op)}",
                    node.meta.get("source"),
                )
                break
        return missing

    def _takes_no_bytes(self, node: fx.Node, position: int) -> bool:
        """Whether a node takes only parts of an input that have no elements, for which kernels need no pointer."""
        parts = [one.meta.get("spec") for one in node.all_input_nodes if root(one) is self.body.inputs[position]]
        return all(isinstance(spec, TensorSpec) and 0 in spec.shape for spec in parts)

    def _find_unpointed(self) -> None:
        """Distinguish memory that nothing is written to, as that of ``empty``, from other memory without a pointer."""
        recorded = {node.op for node in self.graph.nodes}
        pointed = {word.slot - len(self.slots) for word in self.words}
        taken = {root(a) for node in self.body.nodes if not is_view(node) for a in node.all_input_nodes}
        blank: set[int] = set()
        for output, (number, _) in zip(self.body.outputs, self.views, strict=True):
            op = self.memory[number].extent.first_op
            if not self.memory[number].extent.size:
                continue
            if op not in recorded and root(output) not in taken:
                blank.add(number)
            elif number not in pointed:
                reason = f"no pointer to it was found in the kernels of {self.kernels_of(op)}"
                self.unpointed[number] = Fallback("a result is copied", reason, self.body.nodes[op].meta.get("source"))
        self.blank = frozenset(blank)
        # A word that is the address of memory which no kernel takes is padding: something lay there before.
        self.words = [word for word in self.words if word.slot - len(self.slots) not in blank]

    def _note_copy(self, position: int, reason: str, source: str | None = None) -> None:
        self.notes.append(Fallback(f"input {self.body.inputs[position].name} is copied", reason, source))

    def kernels_of(self, op: int) -> str:
        """The operation and the nodes that it became, for a report."""
        names = dict.fromkeys(node.name for node in self.graph.nodes if node.op == op)
        return f"{target_text(self.body.nodes[op].target)} ({', '.join(names)})"


def _fresh_memory(tensor: torch.Tensor, op: int, before: tuple[int, int], after: tuple[int, int]) -> FreshMemory:
    """The memory of an output.

    Args:
        tensor: The output.
        op: The operation that allocates it.
        before: Bytes allocated since the start, and those in use, before that operation.
        after: The same numbers after it.
    """
    storage = tensor.untyped_storage()
    (total, live), (total_after, live_after) = before, after
    # Memory that stays allocated beside the result, as of a library's workspace, never was where it is.
    lasting = max(live_after - live, storage.nbytes())
    scratch = max(total_after - total - lasting, 0)
    flat = TensorSpec((storage.nbytes() // tensor.element_size(),), (1,), tensor.dtype, tensor.device)
    spec = TensorSpec.of(tensor)
    whole = spec.offset == 0 and spec.nbytes == storage.nbytes()
    return FreshMemory(spec if whole else flat, flat, Extent(storage.data_ptr(), storage.nbytes(), op), scratch)


def takes_shape_only(node: fx.Node) -> bool:
    """Whether an operation reads no element of what it takes, as ``zeros_like``."""
    return is_operation(node) and any(part in target_text(node.target) for part in _SHAPE_ONLY)


def _unread_arguments(node: fx.Node) -> tuple[int, ...]:
    """Positions of the arguments whose elements an operation does not read."""
    name = target_text(node.target).rpartition(".")[0]
    return unread_statistics(node) or _SHAPE_ONLY_ARGUMENTS.get(name, ())


_PIECES = 8
"""The number of free pieces of a result's size: its operation may use some for scratch memory first."""

_WALL = 2**20 + 1
"""A size above which torch's allocator has memory of another kind, with segments of its own."""


def _make_room(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Leave free memory of these sizes, in pieces that cannot become one as long as the returned tensors live."""
    pieces: list[torch.Tensor] = []
    walls: list[torch.Tensor] = []
    for size in sizes:
        for _ in range(_PIECES):
            pieces.append(torch.empty(size, dtype=torch.uint8, device=device))
            walls.append(torch.empty(_WALL if size >= _WALL else 1, dtype=torch.uint8, device=device))
    return walls


def extent_of(tensor: torch.Tensor | None) -> Extent:
    """The memory of a buffer that a region was recorded with."""
    assert tensor is not None
    return Extent(tensor.data_ptr(), TensorSpec.of(tensor).nbytes)


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return (lines[0] if lines else type(cause).__name__).rstrip(".")
