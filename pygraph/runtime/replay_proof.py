"""The proof of a recorded region: replays on other buffers, with the recorded ones poisoned.

Results, updated arguments and captured tensors must be what ordinary launches give, and memory behind the results must
stay as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Generator, Sequence

import torch

from pygraph.runtime.alignment import copy_span
from pygraph.runtime.comparison import agree
from pygraph.runtime.gaps import close
from pygraph.runtime.indices import Reach
from pygraph.runtime.proof import Example, LaunchSpread, RedZones, Trial, poison
from pygraph.runtime.recorded_region import RecordedRegion

_Replayed = tuple["list[torch.Tensor] | None", "Callable[[], None] | None"]
"""Results of a replay, None if it wrote behind them; and what puts back what it changed, None if it changes nothing."""


class ReplayProof:
    """Replays of a recorded region on tensors that it was not recorded with.

    Args:
        region: The recorded region.
        example: A call, with what ordinary launches give for it.
        spread: How far ordinary launches are apart.
        reuses_outputs: Whether the graph leaves results where it was recorded, from where the proof copies them.
        measures: Whether a replay is timed as well.

    Attributes:
        replay_us: Microseconds that the device needs for a replay, once one with copies outside of the graph was right.
        watched: The entries of the region's ``memory`` behind which as many bytes are watched as their operations had
            for scratch memory, which may have begun where the result does. Behind the others are a few.
    """

    def __init__(
        self,
        region: RecordedRegion,
        example: Example,
        spread: LaunchSpread,
        reuses_outputs: bool,
        measures: bool = True,
    ) -> None:
        self.region = region
        self.example = example
        self.replay_us = 0.0
        self.watched: Container[int] = range(len(region.memory))
        self._spread = spread
        self._reuses_outputs, self._measures = reuses_outputs, measures

    def passes(self, copy_outside: bool = False) -> bool:
        """Whether a replay gives what ordinary launches give.

        Args:
            copy_outside: Whether what the region's choice copies is copied here, and not by the graph.
        """
        with self._replayed(copy_outside) as (results, restore):
            if results is None:
                return False
            if all(map(agree, results, self.example.expected)):
                if copy_outside:
                    self._measure(restore)
                return True
            results = self._own(results)

        def replay() -> list[torch.Tensor] | None:
            with self._replayed(copy_outside) as (again, _):
                return None if again is None else self._own(again)

        if not self._spread.covers(results, self.example, replay):
            return False
        if copy_outside:
            with self._replayed(copy_outside) as (_, restore):
                self._measure(restore)
        return True

    def stays_inside(self) -> bool:
        """Whether a replay, with copies outside of the graph, writes to no memory that is watched behind results."""
        with self._replayed(copy_outside=True) as (results, _):
            return results is not None

    def _measure(self, restore: Callable[[], None] | None) -> None:
        if self._measures:
            self.replay_us = self.region.driver.replay_time(self.region.graph, restore)

    def _own(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Results that stay as they are when what the region updates is put back."""
        first = len(self.region.body.outputs)
        return [*results[:first], *(updated.clone() for updated in results[first:])]

    @contextlib.contextmanager
    def _replayed(self, copy_outside: bool) -> Generator[_Replayed, None, None]:
        """Replay on other buffers; that leaves no trace afterwards."""
        region, body = self.region, self.region.body
        region.pool.order()
        self._poison_buffers()
        zones = RedZones()
        fresh = [
            zones.allocate(memory.spec, memory.extent.size, memory.scratch if number in self.watched else 0)
            for number, memory in enumerate(region.memory)
        ]
        copied = region.choice.copied if copy_outside else frozenset[int]()
        if self._reuses_outputs:
            copied |= region.output_slots
        with Trial(region.driver, body, self.example.inputs, self.example.state) as run:
            trial = run.inputs
            self._copy_in(trial, copied)
            region.replay(trial, self.example.numbers, fresh)
            self._copy_out(trial, fresh, copied)
            results = [*self._written_outputs(fresh), *(trial[i] for i in body.updated)]
            results += [body.static_values[i].detach() for i in body.written_statics]

            def restore() -> None:
                run.restore()
                for slot, position in enumerate(region.slots):
                    if slot in copied and position in body.written:
                        copy_span(trial[position], region.input_buffer(position))

            yield (results if zones.untouched() else None), (restore if run.has_state else None)

    def _poison_buffers(self) -> None:
        region, body = self.region, self.region.body
        for nodes, buffers, safe in (
            (body.inputs, region.input_buffers, self.example.inputs),
            (body.outputs, region.output_buffers, self.example.expected),
        ):
            for index, (node, buffer) in enumerate(zip(nodes, buffers, strict=True)):
                reach = body.reach.get(node, Reach.NOT)
                poison(buffer, reach, safe[index] if reach is Reach.COMPUTED else None)

    def _copy_in(self, inputs: Sequence[torch.Tensor], copied: frozenset[int]) -> None:
        """Copy inputs to where the graph was recorded with them."""
        for slot, position in enumerate(self.region.slots):
            if slot in copied:
                copy_span(inputs[position], self.region.input_buffer(position))

    def _copy_out(self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor], copied: frozenset[int]) -> None:
        """Copy updated inputs and outputs from where the graph was recorded with them."""
        region = self.region
        for slot, position in enumerate(region.slots):
            if slot in copied and position in region.body.updated:
                copy_span(region.input_buffer(position), inputs[position])
        for buffer, (memory, _) in zip(region.output_buffers, region.views, strict=True):
            if len(region.slots) + memory in copied and buffer.numel():
                flat = region.memory[memory].flat
                target = fresh[memory].as_strided(flat.shape, flat.stride, 0)
                target.copy_(buffer.as_strided(flat.shape, flat.stride, 0))

    def _written_outputs(self, fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, with those that nothing is written to as they are expected.

        What is in such memory says nothing; some operations have it on another device in a capture.
        """
        region = self.region
        outputs = region.outputs(fresh)
        for index, (number, _) in enumerate(region.views):
            if number in region.blank:
                wanted = self.example.expected[index]
                outputs[index] = wanted if outputs[index].device == wanted.device else outputs[index]
        close(self.example.gaps, outputs)
        return outputs
