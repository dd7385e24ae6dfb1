"""A recorded region: its graph, the buffers that the graph was recorded with, and how its pointers change now."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.ir.descriptors import Fallback
from pygraph.ir.effects import is_random
from pygraph.ir.evaluate import as_lazy
from pygraph.runtime.body import RegionBody
from pygraph.runtime.discovery import Discovery, extent_of
from pygraph.runtime.driver import Driver, Pool
from pygraph.runtime.mechanisms import Choice, wiring
from pygraph.runtime.pointers import Extent, Patcher, Word


class UnprovenError(CaptureError):
    """A graph to which nodes of our own were added cannot be made, or does not give what ordinary launches give."""


class RecordedRegion:
    """One recording of a region, whose pointers can be made to change in different ways.

    Args:
        body: The region.
        driver: The device.
        pool: The memory that the graph allocates from.
        found: The recording, with the pointers and numbers that were found in it.

    Attributes:
        graph: The recorded graph.
        slots: Positions of the inputs that have memory; the patcher's first slots, before one per entry of ``memory``.
        memory: The memory that a replay allocates for outputs.
        views: Per output, which entry of ``memory`` it is in, and where.
        lazy: Outputs that are conjugated or negated when they are read: whether the one and whether the other.
        words: The pointer words of all slots.
        values: The parameter bytes that hold numbers.
        reserved: Entries of ``memory`` that lie where neither values before them nor other graphs have been.
        outside: Entries that lie outside of the pool, where nothing else of the region has been.
        overlapping: Those of them that lie in the same memory.
        blank: Entries of ``memory`` that replays leave as they are.
        input_buffers: The tensors that were inputs of the recording; None where a replay reads them no more.
        output_buffers: The tensors that were its outputs.
        fallbacks: Why what is copied is copied.
        choice: By which mechanism each pointer changes.
        patcher: Sends what changes to the graph.
    """

    choice: Choice
    patcher: Patcher

    def __init__(self, body: RegionBody, driver: Driver, pool: Pool, found: Discovery) -> None:
        self.body, self.driver, self.pool = body, driver, pool
        self.graph, self.slots, self.memory = found.graph, found.slots, found.memory
        self.views, self.lazy = found.views, found.lazy
        self.words, self.values, self.blank = found.words, found.values, found.blank
        self.reserved, self.outside, self.overlapping = found.reserved, found.outside, found.overlapping
        self.input_buffers, self.output_buffers = found.input_buffers, found.output_buffers
        self.fallbacks: list[Fallback] = found.notes
        pool.graphs.add(self.graph)
        self.graph.draws = any(is_random(node) for node in body.nodes)

    # -- how pointers change --------------------------------------------------------------------------------------

    @property
    def output_slots(self) -> frozenset[int]:
        """The slots of the memory of outputs, which come after those of inputs."""
        return frozenset(range(len(self.slots), len(self.slots) + len(self.memory)))

    def patch_on_host(self, patched: frozenset[int]) -> None:
        """Have the host patch the pointers of these slots, and leave those of the others.

        Raises:
            CaptureError: The driver does not take a node's parameters.
        """
        self._restore_addresses()
        host = tuple(word for word in self.words if word.slot in patched)
        every = frozenset(range(len(self.slots))) | self.output_slots
        self.choice = Choice(host, (), (), every - patched)
        self.patcher = self._make_patcher(host)

    def follow(self, choice: Choice) -> None:
        """Have pointers change as was chosen, by nodes that are added to the graph if the choice needs some.

        Raises:
            UnprovenError: The driver does not take a node's parameters, or the added nodes.
        """
        try:
            self._restore_addresses()
            words = list(choice.host)
            if not choice.only_host:
                words += self._add_nodes(choice)
        except CaptureError as error:
            raise UnprovenError(str(error)) from error
        self.choice = choice
        self.patcher = self._make_patcher(words)

    def _add_nodes(self, choice: Choice) -> list[Word]:
        """Add the nodes that patch and copy; the words of their parameters, which the host changes."""
        inputs = [_location(extent_of(self.input_buffers[position])) for position in self.slots]
        outputs = [_location(memory.extent) for memory in self.memory]
        updated = frozenset(slot for slot, position in enumerate(self.slots) if position in self.body.updated)
        added, values = wiring(choice, inputs, outputs, updated)
        return [
            Word(node, offset, slot, delta)
            for (slot, delta), locations in zip(values, self.graph.wire(added), strict=True)
            for node, offset in locations
        ]

    def _make_patcher(self, words: Sequence[Word]) -> Patcher:
        return Patcher(self.graph, words, self.values, len(self.slots) + len(self.memory), len(self.body.numbers))

    def refusals(self, slots: frozenset[int], addresses: Sequence[int]) -> dict[int, str]:
        """Why the driver does not take these addresses as pointers to slots, by slot; each node is sent by itself.

        The graph must be restored afterwards.
        """
        words: dict[int, list[Word]] = {}
        for word in self.words:
            if word.slot in slots:
                words.setdefault(word.node, []).append(word)
        found: dict[int, str] = {}
        for node, its in words.items():
            for word in its:
                cell = ctypes.c_uint64.from_address(self.graph.params_address(node) + word.offset)
                cell.value = addresses[word.slot] + word.delta
            try:
                self.graph.commit(node)
            except CaptureError as error:
                found |= {word.slot: str(error) for word in its}
        return found

    def _restore_addresses(self) -> None:
        """Send the recorded addresses of all slots again."""
        for word in self.words:
            address = self._recorded_start(word.slot) + word.delta
            cell = ctypes.c_uint64.from_address(self.graph.params_address(word.node) + word.offset)
            before = cell.value
            if before != address:
                cell.value = address
                try:
                    self.graph.commit(word.node)
                except CaptureError:
                    cell.value = before  # which the node still has
                    raise

    def _recorded_start(self, slot: int) -> int:
        if slot < len(self.slots):
            return extent_of(self.input_buffers[self.slots[slot]]).start
        return self.memory[slot - len(self.slots)].extent.start

    # -- buffers --------------------------------------------------------------------------------------------------

    def input_buffer(self, position: int) -> torch.Tensor:
        """The tensor that was input number ``position`` of the recording."""
        tensor = self.input_buffers[position]
        assert tensor is not None
        return tensor

    def bytes_of(self, number: int) -> torch.Tensor:
        """The recorded memory of an entry of ``memory`` as bytes."""
        buffers = zip(self.output_buffers, self.views, strict=True)
        buffer = next(buffer for buffer, (memory, _) in buffers if memory == number)
        size = self.memory[number].extent.size
        return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage(), 0, (size,), (1,))

    def nodes_of(self, slot: int) -> list[int]:
        """Recorded nodes with a pointer into a slot's memory, in the order in which they run."""
        return sorted({word.node for word in self.words if word.slot == slot})

    # -- replay ---------------------------------------------------------------------------------------------------

    def replay(self, inputs: Sequence[torch.Tensor], numbers: Sequence[Any], fresh: Sequence[torch.Tensor]) -> None:
        """Replay on ``inputs`` and ``numbers``, with ``fresh`` as the entries of ``memory``."""
        self.pool.order()
        addresses = [inputs[position].data_ptr() for position in self.slots]
        addresses += [tensor.data_ptr() for tensor in fresh]
        try:
            self.patcher(addresses, numbers)
            self.graph.replay()
        except BaseException:
            self.patcher.forget()  # what was sent before the interruption is not known
            raise

    def outputs(self, fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, as views of the memory that a replay has written."""
        found = [fresh[number].as_strided(spec.shape, spec.stride, spec.offset) for number, spec in self.views]
        for index, (conjugated, negated) in self.lazy.items():
            found[index] = as_lazy(found[index], conjugated, negated)
        return found

    def release(self, *keep: object) -> None:
        """Give the graph and its buffers back, and drop ``keep``, which replays use as well."""
        self.pool.end_use(self.graph)
        # A replay may still run, on another stream than the one that the buffers' memory goes back to.
        self.graph.release(self.input_buffers, self.output_buffers, self.body, *keep)
        self.input_buffers, self.output_buffers = [], []

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Bound above, as at the end of a process a module's names are gone.
        if "output_buffers" in self.__dict__ and not is_finalizing():
            self.release()


def _location(extent: Extent) -> tuple[int, int]:
    return extent.start, extent.size
