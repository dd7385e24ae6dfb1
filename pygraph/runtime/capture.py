"""Recording a region as a graph, finding its pointers, and proving the plan before its first use.

A region is recorded twice, with inputs and outputs at different addresses. Words that moved along are pointers. Then
the proof: the buffers of the first recording are poisoned, the graph is replayed on other tensors, and results,
updated arguments and memory beyond the results must be what ordinary launches give. What does not pass is copied.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph.effects import is_operation, is_random
from pygraph.errors import CaptureError
from pygraph.evaluate import clone_strided
from pygraph.printing import target_text
from pygraph.program import Fallback, TensorSpec, Way
from pygraph.runtime.body import RegionBody, alignment, copy_span, stand_in
from pygraph.runtime.driver import Driver, Pool, RecordedGraph
from pygraph.runtime.pointers import Extent, Patcher, ValueWord, Word, pointer_words, same_structure, value_words

# Two numbers that every dtype represents exactly and that nothing else in a kernel's parameters is likely to be.
_SENTINELS = {"float": (1.671875, -2.34375), "int": (87, 101), "bool": (True, False)}

# Operations that take a tensor for its shape and dtype only, so that their nodes need not point to it.
_SHAPE_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")

# Bytes after a result that are watched during the proof, on top of what its operation used as scratch memory.
_RED_ZONE = 256


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
        scratch: Bytes that this operation allocated besides.
    """

    spec: TensorSpec
    flat: TensorSpec
    extent: Extent
    scratch: int


class RegionGraph:
    """A region recorded as a graph, with a proven plan for every input, number and output.

    Raises:
        RefusedError: The device does not record a node, or a replay does not give what ordinary launches give.

    Attributes:
        patched: Positions of inputs whose pointers are patched; the others are copied to stand-ins.
        patched_outputs: Which pieces of fresh memory the graph writes to directly; the others are copied out.
        fallbacks: Why what is copied is copied.
    """

    def __init__(
        self,
        body: RegionBody,
        driver: Driver,
        pool: Pool,
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        way: Way,
    ) -> None:
        self.body = body
        self.driver = driver
        self.pool = pool
        self.fallbacks: list[Fallback] = []
        self._slots = [i for i, tensor in enumerate(inputs) if tensor.numel()]
        self._input_specs = [TensorSpec.of(tensor) for tensor in inputs]
        self._stand_ins: list[torch.Tensor | None] = [stand_in(t) if t.numel() else None for t in inputs]
        self._alignments = [alignment(tensor.data_ptr()) for tensor in inputs]
        self._empties = [None if tensor.numel() else tensor for tensor in inputs]
        self.graph: RecordedGraph
        self._record(inputs, list(numbers))
        self.graph.draws = any(is_random(node) for node in body.nodes)
        try:
            self._prove(inputs, numbers, way)
        except BaseException:
            self.release()
            raise

    # -- recording ------------------------------------------------------------------------------------------------

    def _record(self, inputs: Sequence[torch.Tensor], numbers: list[Any]) -> None:
        body = self.body
        self._warm_up(inputs, numbers)
        sentinels: list[list[Any]] = [list(numbers), list(numbers)]
        for _, position, dtype in body.scalar_nodes():
            kind = "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"
            sentinels[0][position], sentinels[1][position] = _SENTINELS[kind]
        first, outputs, marks = self._record_once(self._stand_ins, sentinels[0])
        self.graph = first
        others = [stand_in(tensor) if tensor.numel() else None for tensor in inputs]
        try:
            second, outputs_again, _ = self._record_once(others, sentinels[1])
        except BaseException:
            first.release()
            raise
        try:
            self._plan(outputs, outputs_again, others, marks, second, sentinels)
        except BaseException:
            first.release()
            raise
        finally:
            second.release()

    def _warm_up(self, inputs: Sequence[torch.Tensor], numbers: list[Any]) -> None:
        """Run once with ordinary launches, so that libraries allocate and choose before anything is recorded."""
        trial = [stand_in(tensor) if tensor.numel() else tensor for tensor in inputs]
        with _Undisturbed(self.driver, self.body):
            self.driver.warm_up(lambda: self.body.run(trial, numbers))

    def _record_once(
        self, inputs: Sequence[torch.Tensor | None], numbers: list[Any]
    ) -> tuple[RecordedGraph, list[torch.Tensor], list[int]]:
        position = -1
        totals: list[int] = []
        actual = [empty if tensor is None else tensor for tensor, empty in zip(inputs, self._empties, strict=True)]

        def record(mark: Callable[[int], None]) -> list[torch.Tensor]:
            def step(index: int) -> None:
                nonlocal position
                position = index
                totals.append(self.driver.allocated_total())
                mark(index)

            outputs = self.body.run(actual, numbers, step)  # pyright: ignore[reportArgumentType]
            totals.append(self.driver.allocated_total())
            return outputs

        try:
            with _Undisturbed(self.driver, None):
                graph, outputs = self.driver.record(record, self.pool)
        except CaptureError as error:
            raise RefusedError(position if position >= 0 else None, _reason(error)) from error
        return graph, outputs, totals

    # -- planning -------------------------------------------------------------------------------------------------

    def _plan(
        self,
        outputs: list[torch.Tensor],
        outputs_again: list[torch.Tensor],
        others: Sequence[torch.Tensor | None],
        totals: list[int],
        second: RecordedGraph,
        sentinels: list[list[Any]],
    ) -> None:
        """Find the words of every input, output memory and number."""
        body = self.body
        self._static_outputs = outputs
        self._memory: list[FreshMemory] = []
        memory_again: list[Extent] = []
        self._views: list[tuple[int, TensorSpec]] = []
        known: dict[int, int] = {}
        for index, (tensor, again) in enumerate(zip(outputs, outputs_again, strict=True)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known or not tensor.numel():
                known[storage.data_ptr()] = len(self._memory)
                op = body.producer(index)
                scratch = max(totals[op + 1] - totals[op] - storage.nbytes(), 0)
                flat = TensorSpec((storage.nbytes() // tensor.element_size(),), (1,), tensor.dtype, tensor.device)
                spec = TensorSpec.of(tensor)
                whole = spec.offset == 0 and spec.nbytes == storage.nbytes()
                extent = Extent(storage.data_ptr(), storage.nbytes(), op)
                self._memory.append(FreshMemory(spec if whole else flat, flat, extent, scratch))
                memory_again.append(Extent(again.untyped_storage().data_ptr(), storage.nbytes(), op))
            self._views.append((known[storage.data_ptr()], TensorSpec.of(tensor)))

        nodes, nodes_again = self.graph.nodes, second.nodes
        comparable = same_structure(nodes, nodes_again)
        if not comparable:
            self.fallbacks.append(Fallback("every pointer", "two recordings of the region differ in their kernels"))
        extents = [self._extent(self._stand_ins[i]) for i in self._slots] + [m.extent for m in self._memory]
        extents_again = [self._extent(others[i]) for i in self._slots] + memory_again
        words = pointer_words(nodes, nodes_again, extents, extents_again) if comparable else []
        self._words = words
        self._values = self._find_numbers(nodes, nodes_again, sentinels) if comparable or body.numbers else []
        self._unfound = self._unproven_inputs(words) if comparable else set(range(len(self._slots)))

    @staticmethod
    def _extent(tensor: torch.Tensor | None) -> Extent:
        assert tensor is not None
        return Extent(tensor.data_ptr(), TensorSpec.of(tensor).nbytes)

    def _find_numbers(self, nodes: Any, nodes_again: Any, sentinels: list[list[Any]]) -> list[ValueWord]:
        found: list[ValueWord] = []
        for op, position, dtype in self.body.scalar_nodes():
            if str(dtype).removeprefix("torch.") in ("float16", "bfloat16"):
                raise RefusedError(op, "a live number of 16 bits cannot be told apart in a kernel's parameters")
            encoded = [torch.tensor(values[position], dtype=dtype).numpy().tobytes() for values in sentinels]
            name = str(dtype).removeprefix("torch.")
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
        for slot, position in enumerate(self._slots):
            for op in self.body.readers(position):
                node = self.body.nodes[op]
                name = target_text(node.target)
                if op not in recorded or (slot, op) in found:
                    continue
                if is_operation(node) and any(part in name for part in _SHAPE_ONLY):
                    continue
                missing.add(slot)
                self._note_copy(
                    position, f"no pointer to it was found in the kernels of {name}", node.meta.get("source")
                )
                break
        return missing

    def _note_copy(self, position: int, reason: str, source: str | None = None) -> None:
        self.fallbacks.append(Fallback(f"input {self.body.inputs[position].name} is copied", reason, source))

    # -- proof ----------------------------------------------------------------------------------------------------

    def _prove(self, inputs: Sequence[torch.Tensor], numbers: Sequence[Any], way: Way) -> None:
        """Choose how each slot changes: patched as far as that is proven, or copied if ``way`` is ``copy``."""
        slots = len(self._slots) + len(self._memory)
        candidates = set(range(slots)) - self._unfound if way == "patch" and self._words else set[int]()
        if way == "patch":
            # Memory that no node points to (an output that no kernel writes) cannot be patched.
            pointed = {word.slot for word in self._words}
            candidates -= {s for s in range(len(self._slots), slots) if s not in pointed}
        expected = self._reference(inputs, numbers)
        if not self._passes(candidates, inputs, numbers, expected):
            bad = {slot for slot in candidates if not self._passes({slot}, inputs, numbers, expected)}
            candidates -= bad
            for slot in sorted(bad):
                self._explain_bad(slot)
            if not self._passes(candidates, inputs, numbers, expected):
                candidates = set[int]()
                self.fallbacks.append(Fallback("every pointer", "the proof failed only for several together"))
                if not self._passes(candidates, inputs, numbers, expected):
                    raise RefusedError(None, "its replay does not give the results of ordinary launches")
        self._configure(candidates, keep_stand_ins=False)

    def _explain_bad(self, slot: int) -> None:
        reason = "the proof by poisoned buffers failed: a kernel holds its pointer where it cannot be patched"
        if slot < len(self._slots):
            position = self._slots[slot]
            readers = [target_text(self.body.nodes[op].target) for op in self.body.readers(position)]
            self._note_copy(position, f"{reason} (read by {', '.join(dict.fromkeys(readers))})")
        else:
            self.fallbacks.append(Fallback("a result is copied", reason))

    def _configure(self, patched: set[int], keep_stand_ins: bool) -> None:
        count = len(self._slots)
        self.patched = [position for slot, position in enumerate(self._slots) if slot in patched]
        self._copied = [position for slot, position in enumerate(self._slots) if slot not in patched]
        self.patched_outputs = [slot - count for slot in range(count, count + len(self._memory)) if slot in patched]
        self._patched_memory = [self._memory[index] for index in self.patched_outputs]
        self._whole = len(self._patched_memory) == len(self._views) and all(
            self._memory[number].spec == spec and number == index for index, (number, spec) in enumerate(self._views)
        )
        order = [slot for slot in range(count + len(self._memory)) if slot in patched]
        renumber = {slot: index for index, slot in enumerate(order)}
        words = [dataclasses.replace(w, slot=renumber[w.slot]) for w in self._words if w.slot in renumber]
        # Nodes whose words were patched under another configuration get their recorded addresses back.
        for word in self._words:
            if word.slot not in renumber:
                self._reset_word(word)
        self.patcher = Patcher(self.graph, words, self._values, len(order), len(self.body.numbers))
        if not keep_stand_ins:
            for position in self.patched:
                self._stand_ins[position] = None
            self._static_outputs = [
                None if memory in self.patched_outputs else tensor
                for tensor, (memory, _) in zip(self._static_outputs, self._views, strict=True)
            ]  # pyright: ignore[reportAttributeAccessIssue]

    def _reset_word(self, word: Word) -> None:
        count = len(self._slots)
        if word.slot < count:
            tensor = self._stand_ins[self._slots[word.slot]]
            start = 0 if tensor is None else tensor.data_ptr()
        else:
            start = self._memory[word.slot - count].extent.start
        if start:
            cell = ctypes.c_uint64.from_address(self.graph.params_address(word.node) + word.offset)
            if cell.value != start + word.delta:
                cell.value = start + word.delta
                self.graph.commit(word.node)

    def _reference(self, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[torch.Tensor]:
        """What ordinary launches give: outputs, then updated inputs, then updated captured tensors."""
        trial = self._trial(inputs)
        with _Undisturbed(self.driver, self.body):
            outputs = [clone_strided(output) if output.numel() else output for output in self.body.run(trial, numbers)]
            written = [trial[i].clone() for i in self.body.written]
            written += [self.body.static_values[i].detach().clone() for i in self.body.written_statics]
        return [*outputs, *written]

    def _trial(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs, with copies in place of those that the region writes to."""
        return [
            stand_in(tensor) if i in self.body.written and tensor.numel() else tensor.detach()
            for i, tensor in enumerate(inputs)
        ]

    def _passes(
        self, patched: set[int], inputs: Sequence[torch.Tensor], numbers: Sequence[Any], expected: list[torch.Tensor]
    ) -> bool:
        """Replay with ``patched`` slots elsewhere and their recorded buffers poisoned; compare with ``expected``."""
        self._configure(patched, keep_stand_ins=True)
        trial = self._trial(inputs)
        for position in self._slots:
            if position in self.patched:
                _poison(self._stand_ins[position])
        for tensor, (memory, _) in zip(self._static_outputs, self._views, strict=True):
            if memory in self.patched_outputs:
                _poison(tensor)
        zones: list[torch.Tensor] = []

        def guarded(memory: FreshMemory) -> torch.Tensor:
            size = -(-memory.extent.size // 16) * 16
            zone = torch.full((size + memory.scratch + _RED_ZONE,), 0x7F, dtype=torch.uint8, device=memory.spec.device)
            zones.append(zone[size:])
            flat = zone[: memory.extent.size].view(memory.spec.dtype)
            return flat.as_strided(memory.spec.shape, memory.spec.stride, 0)

        with _Undisturbed(self.driver, self.body):
            outputs = self(trial, numbers, allocate=guarded)
            results = [*outputs, *(trial[i] for i in self.body.written)]
            results += [self.body.static_values[i].detach() for i in self.body.written_statics]
            same = all(_agree(a, b) for a, b in zip(results, expected, strict=True))
            untouched = all(bool((zone == 0x7F).all()) for zone in zones)
        return same and untouched

    def fits(self, position: int, tensor: torch.Tensor) -> bool:
        """Whether input number ``position`` may be ``tensor``: laid out, and at least aligned, as it was recorded."""
        spec = self._input_specs[position]
        same = tensor.shape == spec.shape and tensor.stride() == spec.stride and tensor.dtype == spec.dtype
        return same and tensor.data_ptr() % self._alignments[position] == 0

    # -- replay ---------------------------------------------------------------------------------------------------

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        allocate: Callable[[FreshMemory], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Replay on ``inputs`` and ``numbers``; the outputs are in memory of their own."""
        self.pool.order()
        if allocate is None:
            fresh = [memory.spec.empty() for memory in self._patched_memory]
        else:
            fresh = [allocate(memory) for memory in self._patched_memory]
        for position in self._copied:
            copy_span(inputs[position], self._stand_ins[position])  # pyright: ignore[reportArgumentType]
        addresses = [inputs[position].data_ptr() for position in self.patched]
        addresses += [tensor.data_ptr() for tensor in fresh]
        try:
            self.patcher(addresses, numbers)
            self.graph.replay()
        except BaseException:
            self.patcher.forget()  # what was sent before the interruption is not known
            raise
        for position in self._copied:
            if position in self.body.written:
                copy_span(self._stand_ins[position], inputs[position])  # pyright: ignore[reportArgumentType]
        if self._whole:
            return fresh
        return self._assemble_outputs(dict(zip(self.patched_outputs, fresh, strict=True)))

    def _assemble_outputs(self, fresh: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Outputs as views of fresh memory; what the graph wrote elsewhere is cloned first."""
        outputs: list[torch.Tensor] = []
        for index, (number, spec) in enumerate(self._views):
            if number not in fresh:
                memory = self._memory[number]
                static = self._static_outputs[index]
                assert static is not None
                flat = static.as_strided(memory.flat.shape, (1,), 0).clone()
                fresh[number] = flat.as_strided(memory.spec.shape, memory.spec.stride, 0)
            outputs.append(fresh[number].as_strided(spec.shape, spec.stride, spec.offset))
        return outputs

    @property
    def bytes_copied(self) -> int:
        """Bytes of inputs and outputs that every replay copies."""
        total = 0
        for position in self._copied:
            times = 2 if position in self.body.written else 1
            total += times * self._input_specs[position].nbytes
        copied = {memory for memory, _ in self._views} - set(self.patched_outputs)
        return total + sum(self._memory[memory].extent.size for memory in copied)

    def release(self) -> None:
        """Give the graph and its buffers back."""
        self.graph.release()
        self._stand_ins = []
        self._static_outputs = []

    def __del__(self) -> None:
        # A replay may still run, on another stream than the one that the buffers' memory goes back to.
        if "graph" in self.__dict__ and not sys.is_finalizing():
            self.release()


class _Undisturbed:
    """Run trials without a trace: the random generator and captured tensors that a region updates are put back."""

    def __init__(self, driver: Driver, body: RegionBody | None) -> None:
        self._driver = driver
        self._written = [] if body is None else [body.static_values[i].detach() for i in body.written_statics]

    def __enter__(self) -> None:
        self._random = self._driver.random_state()
        self._saved = [clone_strided(tensor) for tensor in self._written]

    def __exit__(self, *error: object) -> None:
        self._driver.set_random_state(self._random)
        for tensor, saved in zip(self._written, self._saved, strict=True):
            tensor.copy_(saved)


def _poison(tensor: torch.Tensor | None) -> None:
    """Fill a buffer with what must not be seen again: NaN, or zeros where any other integer could be unsafe."""
    if tensor is None or not tensor.numel():
        return
    span = TensorSpec.of(tensor).span
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset())
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        flat.fill_(float("nan"))
    else:
        flat.zero_()  # an index of zero is in range wherever any index is


def _agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, or for floating point close: kernels with atomics do not repeat to the last bit."""
    if got.numel() == 0:
        return True
    if got.dtype.is_floating_point or got.dtype.is_complex:
        if got.dtype.itemsize < 2 or str(got.dtype).startswith("torch.float8"):
            return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        tolerance = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-7, torch.complex128: 1e-7}
        rtol = tolerance.get(got.dtype, 1.3e-5)
        scale = float(torch.nan_to_num(expected.abs().float(), 0.0, 0.0, 0.0).max())
        return torch.allclose(got, expected, rtol=rtol, atol=rtol * max(scale, 1e-30), equal_nan=True)
    return torch.equal(got, expected)


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return (lines[0] if lines else type(cause).__name__).rstrip(".")
