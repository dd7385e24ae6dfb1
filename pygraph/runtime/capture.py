"""A region as a graph: how each of its pointers changes, proven before the first use, and its replays.

What two recordings of the region told is put to the proof: the buffers of the first are poisoned, the graph is replayed
on other tensors, and results, updated arguments and memory beyond the results must be what ordinary launches give. What
does not pass is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.errors import CaptureError
from pygraph.guards.donated import DonatedTensor
from pygraph.ir.descriptors import Fallback, Mechanism, TensorSpec, Way
from pygraph.ir.effects import argument_nodes, is_random, is_view, root
from pygraph.ir.evaluate import as_lazy
from pygraph.ir.printing import target_text
from pygraph.runtime.body import RegionBody, copy_span, is_placed, placement
from pygraph.runtime.discovery import Discovery, RefusedError, extent_of
from pygraph.runtime.driver import Driver, Pool
from pygraph.runtime.indices import Reach
from pygraph.runtime.mechanisms import Choice, Question, choose, wiring
from pygraph.runtime.pointers import Extent, Patcher, Word
from pygraph.runtime.proof import RUNS, Example, RedZones, Spread, Trial, agree, poison
from pygraph.runtime.reuse import ReusedMemory


class UnprovenError(CaptureError):
    """A graph with work of our own in it does not give what ordinary launches give, or cannot be made."""


class _CrowdedError(CaptureError):
    """Results may lie where their operations had scratch memory before; ``room`` is what `Discovery` takes."""

    def __init__(self, room: dict[int, list[int]]) -> None:
        super().__init__("results lie in memory that was scratch memory before")
        self.room = room


_Replayed = tuple["list[torch.Tensor] | None", "Callable[[], None] | None"]
"""Results of a replay, None if it wrote behind them; and what puts back what it changed, None if it changes nothing."""


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

    Raises:
        RefusedError: The device does not record a node, or a replay does not give what ordinary launches give.

    Attributes:
        slots: Positions of the inputs that have memory; the patcher's first slots, before one per entry of ``memory``.
        memory: What a replay allocates for outputs.
        choice: By which mechanism each pointer changes.
        lazy: Outputs that are conjugated or negated when they are read: whether the one and whether the other.
        fallbacks: Why what is copied is copied.
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
    ) -> None:
        self.body = body
        self._reused = reused
        self._kept: list[torch.Tensor] | None = None
        self._spread: Spread | None = None
        self.driver = driver
        self.pool = pool
        self._input_specs = [TensorSpec.of(tensor) for tensor in example.inputs]
        self._placements = [placement(tensor.data_ptr()) for tensor in example.inputs]
        notes: list[Fallback] = []
        self._room: dict[int, list[int]] = {}
        attempts = _attempts("copy" if way == "copy" else mechanism)
        while attempts:
            request = attempts.pop(0)
            found = Discovery(body, driver, pool, example.inputs, example.numbers, self._room)
            self._take(found)
            self.fallbacks[:0] = notes
            self.graph.draws = any(is_random(node) for node in body.nodes)
            try:
                self._prove(found, example, request)
                return
            except _CrowdedError as error:
                self.release()
                self._room = error.room
                attempts.insert(0, request)
                example = example.again(body, driver)
            except UnprovenError as error:
                self.release()
                notes.append(Fallback(f"mechanism {request}", str(error)))
                example = example.again(body, driver)  # the graph may have written anywhere, to inputs too
            except BaseException:
                self.release()
                raise
        raise RefusedError(None, f"its replay does not give the results of ordinary launches ({notes[-1].reason})")

    def _take(self, found: Discovery) -> None:
        """Go on from what was found."""
        self.graph, self.slots, self.memory = found.graph, found.slots, found.memory
        self.fallbacks: list[Fallback] = found.notes
        self._stand_ins, self._static_outputs = found.stand_ins, found.static_outputs
        self._views, self._words, self._values = found.views, found.words, found.values
        self._blank, self.lazy = found.blank, found.lazy

    # -- proof ----------------------------------------------------------------------------------------------------

    def _prove(
        self,
        found: Discovery,
        example: Example,
        request: Mechanism | None,
    ) -> None:
        """Find out which slots may be patched, choose how, and prove that; ``request`` None copies everything."""
        self._find_blank(found, example)
        count = len(self.slots)
        written = [i for i, memory in enumerate(self.memory) if memory.extent.size and i not in self._blank]
        every = frozenset(range(count)) | {count + i for i in written}
        if self._reused is not None:
            every = frozenset(range(count))  # outputs stay where they were recorded
        proven = frozenset[int]()
        replay_us = 0.0
        if request is not None:
            candidates = every - found.unfound if request != "copy" else every - frozenset(range(count))
            # Memory that no node points to (an output that no kernel writes) cannot be patched.
            pointed = {word.slot for word in self._words}
            candidates = frozenset(slot for slot in candidates if slot < count or slot in pointed)
            candidates -= self._unpoisoned(candidates)
            proven = self._proven(found, candidates, example)
            replay_us = self._replay_us
        question = Question(
            words=[word for word in self._words if word.slot in every],
            mechanisms=[self.graph.mechanisms(node, request or "copy") for node in range(len(self.graph.nodes))],
            pinned=frozenset(value.node for value in self._values),
            must_copy=every - proven,
            inputs=[self._input_specs[position].nbytes for position in self.slots],
            replay_us=replay_us,
        )
        if request == "table":
            self._explain_tables(question)
        self._follow(choose(question, self.driver.costs(), request or "copy"))
        if not self.choice.only_host:
            try:
                passes = self._passes(example)
            except CaptureError as error:  # one of our own nodes does not take new parameters
                raise UnprovenError(str(error)) from error
            if not passes:
                raise UnprovenError("its proof by poisoned buffers failed")
        self._drop_buffers()

    def _find_blank(self, found: Discovery, example: Example) -> None:
        """Find memory without a pointer that replays leave as it is: some results are only allocated."""
        if not found.unpointed:
            return
        kept = set(found.unpointed)
        flats = {number: self._bytes_of(number) for number in kept}
        for fill in (0x00, 0xA5):
            for flat in flats.values():
                flat.fill_(fill)
            with Trial(self.driver, self.body, example.inputs) as trial:
                for position in self.slots:
                    copy_span(trial.inputs[position], self._stand_in(position))
                try:
                    self._patch_only(frozenset())
                    self._replay(trial.inputs, example.numbers, [memory.spec.empty() for memory in self.memory])
                except CaptureError:  # a node that does not take new parameters; the proof will say so
                    self.graph.restore()
                    kept.clear()
            kept = {number for number in kept if bool((flats[number] == fill).all())}
        self._blank |= kept
        if self._reused is None:
            self.fallbacks += [note for number, note in found.unpointed.items() if number not in kept]

    def _bytes_of(self, number: int) -> torch.Tensor:
        """The recorded memory of outputs as bytes."""
        static = next(s for s, (memory, _) in zip(self._static_outputs, self._views, strict=True) if memory == number)
        size = self.memory[number].extent.size
        return torch.empty(0, dtype=torch.uint8, device=static.device).set_(static.untyped_storage(), 0, (size,), (1,))

    def _proven(
        self,
        found: Discovery,
        candidates: frozenset[int],
        example: Example,
    ) -> frozenset[int]:
        """Those of the candidates whose pointers can be patched: tried by the host, with the rest copied by us."""
        if self._works(candidates, example):
            return candidates
        if not self._works(frozenset(), example):
            raise RefusedError(None, "its replay does not give the results of ordinary launches")
        bad = self._bad(sorted(candidates), example)
        self._look_for_room(bad)
        for slot, refusal in bad.items():
            self._explain_bad(found, slot, refusal)
        if self._works(candidates - bad.keys(), example):
            return candidates - bad.keys()
        self.fallbacks.append(Fallback("every pointer", "the proof failed only for several together"))
        return frozenset()

    def _unpoisoned(self, candidates: frozenset[int]) -> set[int]:
        """Slots of which no poison would show that a pointer was missed, and of which that is not certain otherwise.

        A kernel that has as many pointers to an operand as its operation takes it hides none.
        """
        found: set[int] = set()
        for slot in sorted(candidates):
            if slot < len(self.slots):
                nodes = [self.body.inputs[self.slots[slot]]]
            else:
                memory = slot - len(self.slots)
                views = zip(self.body.outputs, self._views, strict=True)
                nodes = [node for node, (number, _) in views if number == memory]
            if all(self.body.reach.get(node, Reach.NOT) is not Reach.COMPUTED for node in nodes):
                continue
            readers = self._hiding(slot, nodes)
            if readers:
                reason = f"indices are computed from it, which forbids a proof, and {readers[0]} has several kernels"
                what = "a result" if slot >= len(self.slots) else f"input {nodes[0].name}"
                self.fallbacks.append(Fallback(f"{what} is copied", reason))
                found.add(slot)
        return found

    def _hiding(self, slot: int, nodes: Sequence[fx.Node]) -> list[str]:
        """The operations that take one of these nodes and may have more pointers to it than were found."""
        names: list[str] = []
        origins = {root(node) for node in nodes}
        for index, node in enumerate(self.body.nodes):
            uses = [one for one in argument_nodes(node) if root(one) in origins]
            recorded = [number for number, one in enumerate(self.graph.nodes) if one.op == index]
            if is_view(node) or not uses or not recorded:
                continue
            words = [word for word in self._words if word.slot == slot and word.node in recorded]
            if len(recorded) > 1 or len(words) < len(uses):
                names.append(target_text(node.target))
        return names

    def _bad(self, candidates: Sequence[int], example: Example) -> dict[int, str | None]:
        """Those of candidates that do not work together which do not work, and the driver's reasons if it has any."""
        if len(candidates) == 1:
            return {candidates[0]: self._refusal}
        found: dict[int, str | None] = {}
        for half in (candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]):
            if not self._works(frozenset(half), example):
                found |= self._bad(half, example)
        return found

    def _look_for_room(self, bad: Iterable[int]) -> None:
        """Have the region recorded again if results may be bad for lying where their operations had scratch memory."""
        memory = [self.memory[slot - len(self.slots)] for slot in bad if slot >= len(self.slots)]
        crowded = [one for one in memory if one.scratch]
        if crowded and not self._room:
            room: dict[int, list[int]] = {}
            for one in crowded:
                room.setdefault(one.extent.first_op, []).append(one.extent.size)
            raise _CrowdedError(room)

    def _works(self, patched: frozenset[int], example: Example) -> bool:
        self._refusal = None
        try:
            self._patch_only(patched)
            return self._passes(example, copy_outside=True)
        except CaptureError as error:  # a node does not take new parameters, and has others than its copy says
            self._refusal = str(error)
            self.graph.restore()
            return False
        except Exception:
            if not self.graph.failed:
                raise
            self.graph.restore()  # a kernel has read poison, and says so at once, as the emulated device's do
            return False

    def _patch_only(self, patched: frozenset[int]) -> None:
        """Have the host patch these slots and nobody the others."""
        for word in self._words:
            self._reset_word(word)  # what another trial patched
        host = tuple(word for word in self._words if word.slot in patched)
        self.choice = Choice(host, (), (), frozenset(range(len(self.slots) + len(self.memory))) - patched)
        self.patcher = self._patcher(host)

    def _explain_bad(self, found: Discovery, slot: int, refusal: str | None) -> None:
        reason = "the proof by poisoned buffers failed: a kernel holds its pointer where it cannot be patched"
        if refusal is not None:
            reason = f"the driver does not take another pointer to it ({refusal})"
        if slot < len(self.slots):
            position = self.slots[slot]
            readers = [found.kernels_of(op) for op in self.body.readers(position)]
            what = f"input {self.body.inputs[position].name} is copied"
            self.fallbacks.append(Fallback(what, f"{reason} (read by {', '.join(dict.fromkeys(readers))})"))
        else:
            names = dict.fromkeys(self.graph.nodes[node].name for node in self.nodes_of(slot))
            self.fallbacks.append(Fallback("a result is copied", f"{reason} (written by {', '.join(names)})"))

    def _explain_tables(self, question: Question) -> None:
        """Say which kernels get their pointers from the host though they might load them from a table."""
        nodes = sorted({word.node for word in question.words if "table" not in question.mechanisms[word.node]})
        reasons = {self.graph.nodes[node].name: self.graph.why_not_loaded(node) for node in nodes}
        for name, reason in reasons.items():
            if reason is not None:
                self.fallbacks.append(Fallback(f"{name} loads no pointers from a table", reason))

    def _follow(self, choice: Choice) -> None:
        """Make the graph change its pointers as chosen."""
        try:
            for word in self._words:
                self._reset_word(word)
        except CaptureError as error:
            raise UnprovenError(str(error)) from error
        self.choice = choice
        words = list(choice.host)
        if not choice.only_host:
            inputs = [self._place(extent_of(self._stand_ins[position])) for position in self.slots]
            outputs = [self._place(memory.extent) for memory in self.memory]
            written = frozenset(slot for slot, position in enumerate(self.slots) if position in self.body.written)
            added, values = wiring(choice, inputs, outputs, written)
            try:
                places = self.graph.wire(added)
            except CaptureError as error:
                raise UnprovenError(str(error)) from error
            words += [
                Word(node, offset, slot, delta)
                for (slot, delta), found in zip(values, places, strict=True)
                for node, offset in found
            ]
        self.patcher = self._patcher(words)

    @staticmethod
    def _place(extent: Extent) -> tuple[int, int]:
        return extent.start, extent.size

    def _patcher(self, words: Sequence[Word]) -> Patcher:
        return Patcher(self.graph, words, self._values, len(self.slots) + len(self.memory), len(self.body.numbers))

    def _drop_buffers(self) -> None:
        """Let go of every buffer that the graph does not read or write any more."""
        count = len(self.slots)
        self._whole = (
            not self.lazy
            and len(self.memory) == len(self._views)
            and all(
                self.memory[number].spec == spec and number == index for index, (number, spec) in enumerate(self._views)
            )
        )
        for position in self.patched:
            self._stand_ins[position] = None
        if self._reused is not None:
            self._reused.add(self._static_outputs)
            owners = {number: tensor for tensor, (number, _) in zip(self._static_outputs, self._views, strict=True)}
            specs = [memory.spec for memory in self.memory]
            self._kept = [owners[number].as_strided(s.shape, s.stride, 0) for number, s in enumerate(specs)]
            return
        self._static_outputs = [
            tensor
            for tensor, (memory, _) in zip(self._static_outputs, self._views, strict=True)
            if count + memory in self.choice.copied
        ]

    def _reset_word(self, word: Word) -> None:
        """Put the recorded address back."""
        count = len(self.slots)
        if word.slot < count:
            start = extent_of(self._stand_ins[self.slots[word.slot]]).start
        else:
            start = self.memory[word.slot - count].extent.start
        cell = ctypes.c_uint64.from_address(self.graph.params_address(word.node) + word.offset)
        before = cell.value
        if before != start + word.delta:
            cell.value = start + word.delta
            try:
                self.graph.commit(word.node)
            except CaptureError:
                cell.value = before  # which the node still has
                raise

    def _passes(self, example: Example, copy_outside: bool = False) -> bool:
        """Replay on other buffers than the recorded ones, which are poisoned; compare with what is expected.

        With ``copy_outside``, what the choice copies is copied here and not by the graph.
        """
        with self._replayed(example, copy_outside) as (results, restore):
            if results is None:
                return False
            if all(map(agree, results, example.expected)):
                if copy_outside:
                    self._replay_us = self.driver.replay_time(self.graph, restore)
                return True
            found = self._kept_results(results)

        def replay() -> list[torch.Tensor] | None:
            with self._replayed(example, copy_outside) as (results, _):
                return None if results is None else self._kept_results(results)

        if not self.repeats(found, example, replay):
            return False
        if copy_outside:
            with self._replayed(example, copy_outside) as (_, restore):
                self._replay_us = self.driver.replay_time(self.graph, restore)
        return True

    def _kept_results(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same, once captured tensors are put back."""
        first = len(results) - len(self.body.written_statics)
        return [*results[:first], *(static.clone() for static in results[first:])]

    @contextlib.contextmanager
    def _replayed(self, example: Example, copy_outside: bool) -> Generator[_Replayed, None, None]:
        """Replay on other buffers; that leaves no trace afterwards."""
        self.pool.order()
        for node, tensor, safe in (
            *zip(self.body.inputs, self._stand_ins, example.inputs, strict=True),
            *zip(self.body.outputs, self._static_outputs, example.expected, strict=False),
        ):
            poison(tensor, self.body.reach.get(node, Reach.NOT), safe)
        zones = RedZones()
        fresh = [zones.allocate(memory.spec, memory.extent.size, memory.scratch) for memory in self.memory]
        copied = self.choice.copied if copy_outside else frozenset[int]()
        if self._reused is not None:
            copied |= set(range(len(self.slots), len(self.slots) + len(self.memory)))
        with Trial(self.driver, self.body, example.inputs) as run:
            trial = run.inputs
            for slot, position in enumerate(self.slots):
                if slot in copied:
                    copy_span(trial[position], self._stand_in(position))
            self._replay(trial, example.numbers, fresh)
            for slot, position in enumerate(self.slots):
                if slot in copied and position in self.body.written:
                    copy_span(self._stand_in(position), trial[position])
            for static, (memory, _) in zip(self._static_outputs, self._views, strict=True):
                if len(self.slots) + memory in copied and static.numel():
                    flat = self.memory[memory].flat
                    target = fresh[memory].as_strided(flat.shape, flat.stride, 0)
                    target.copy_(static.as_strided(flat.shape, flat.stride, 0))
            outputs = [
                # What is in blank memory says nothing; some operations have it on another device in a capture.
                wanted if number in self._blank and output.device == wanted.device else output
                for output, wanted, (number, _) in zip(
                    self._outputs(fresh), example.expected, self._views, strict=False
                )
            ]
            results = [*outputs, *(trial[i] for i in self.body.written)]
            results += [self.body.static_values[i].detach() for i in self.body.written_statics]

            def restore() -> None:
                run.restore()
                for slot, position in enumerate(self.slots):
                    if slot in copied and position in self.body.written:
                        copy_span(trial[position], self._stand_in(position))

            yield (results if zones.untouched() else None), (restore if run.has_state else None)

    def repeats(
        self,
        results: Sequence[torch.Tensor],
        example: Example,
        replay: Callable[[], Sequence[torch.Tensor] | None],
    ) -> bool:
        """Whether results that are not those of ordinary launches differ from them as both do among themselves.

        What does not repeat in ordinary launches, and does in replays, has been recorded as it was: a number that an
        operation draws on the host, say.

        Args:
            results: Of one replay.
            example: The call, with what ordinary launches give.
            replay: Replays once more.
        """
        if self._spread is None:
            runs = (example.again(self.body, self.driver).expected for _ in range(RUNS))
            self._spread = Spread.of(example.expected, runs)
        if self._spread.largest is None:
            return False
        replays: list[Sequence[torch.Tensor]] = []
        for _ in range(RUNS):
            found = replay()
            if found is None:
                return False
            replays.append(found)
        return self._spread.and_of(Spread.of(results, replays)).covers(results, example.expected)

    def _stand_in(self, position: int) -> torch.Tensor:
        tensor = self._stand_ins[position]
        assert tensor is not None
        return tensor

    def fits(self, position: int, tensor: torch.Tensor) -> bool:
        """Whether input number ``position`` may be ``tensor``: laid out and placed as it was recorded."""
        spec = self._input_specs[position]
        same = tensor.shape == spec.shape and tensor.stride() == spec.stride and tensor.dtype == spec.dtype
        return same and is_placed(tensor.data_ptr(), self._placements[position])

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
        if self._kept is not None:
            fresh = self._kept
        elif taken:
            fresh = [taken[i] if i in taken else memory.spec.empty() for i, memory in enumerate(self.memory)]
        else:
            fresh = [memory.spec.empty() for memory in self.memory]
        self._replay(inputs, numbers, fresh)
        if self._kept is not None or self.body.written or self.body.told_statics:
            self._tell(inputs)
        return fresh if self._whole and self._kept is None else self._outputs(fresh)

    def _tell(self, inputs: Sequence[torch.Tensor]) -> None:
        """Let autograd notice what a replay has changed: earlier results in reused memory, and updated tensors."""
        changed = [*(self._kept or ()), *(inputs[i] for i in self.body.written), *self.body.told_statics]
        torch.autograd.graph.increment_version(changed)

    def _replay(self, inputs: Sequence[torch.Tensor], numbers: Sequence[Any], fresh: Sequence[torch.Tensor]) -> None:
        self.pool.order()
        addresses = [inputs[position].data_ptr() for position in self.slots]
        addresses += [tensor.data_ptr() for tensor in fresh]
        try:
            self.patcher(addresses, numbers)
            self.graph.replay()
        except BaseException:
            self.patcher.forget()  # what was sent before the interruption is not known
            raise

    def _outputs(self, fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs as views of the memory that the graph wrote."""
        found = [fresh[number].as_strided(spec.shape, spec.stride, spec.offset) for number, spec in self._views]
        for index, (conjugated, negated) in self.lazy.items():
            found[index] = as_lazy(found[index], conjugated, negated)
        return found

    # -- reporting ------------------------------------------------------------------------------------------------

    @property
    def reuses_outputs(self) -> bool:
        """Whether outputs are in the same memory at every replay."""
        return self._reused is not None

    def nodes_of(self, slot: int) -> list[int]:
        """Recorded nodes with a pointer into a slot's memory, in the order in which they run."""
        return sorted({word.node for word in self._words if word.slot == slot})

    def offsets_of(self, slot: int, node: int) -> list[int]:
        """Where in the slot's memory that node's pointers point, in bytes from its start."""
        return [word.delta for word in self._words if word.slot == slot and word.node == node]

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
        words = (*self.choice.host, *self.choice.device, *self.choice.table, *self._values)
        return len({word.node for word in words})

    @property
    def bytes_copied(self) -> int:
        """Bytes of inputs and outputs that every replay copies."""
        total = 0
        for slot in self.choice.copied:
            if slot < len(self.slots):
                position = self.slots[slot]
                total += self._input_specs[position].nbytes * (2 if position in self.body.written else 1)
            else:
                total += self.memory[slot - len(self.slots)].extent.size
        return total

    def memory_use(self) -> dict[str, int]:
        """Bytes of captured tensors, of stand-ins for copied inputs, and of results that a replay allocates."""
        values = [value for value in self.body.static_values if not isinstance(value, DonatedTensor)]
        static = {value.untyped_storage().data_ptr(): value.nbytes for value in values}
        fresh = [] if self.reuses_outputs else self.memory
        return {
            "static": sum(static.values()),
            "copied": sum(self._input_specs[i].nbytes for i, held in enumerate(self._stand_ins) if held is not None),
            "outputs": sum(memory.extent.size for memory in fresh),
        }

    def release(self) -> None:
        """Give the graph and its buffers back."""
        # A replay may still run, on another stream than the one that the buffers' memory goes back to.
        self.graph.release(self._stand_ins, self._static_outputs, self._kept, self.body)
        self._stand_ins = []
        self._static_outputs = []
        self._kept = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Bound above, as at the end of a process a module's names are gone.
        if "graph" in self.__dict__ and not is_finalizing():
            self.release()


def _attempts(request: Mechanism) -> list[Mechanism | None]:
    """What to try in turn; None copies inputs and outputs alike."""
    return list(dict.fromkeys((request, "host", "copy", None)))
