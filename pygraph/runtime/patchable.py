"""The slots of a recorded region whose pointers can be patched.

Replays decide, in which the host patches the pointers of some slots and the data of all others is copied beside the
graph. Where the results are wrong, halving the set finds the slots that are the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from pygraph.errors import CaptureError
from pygraph.ir.control_flow import is_conditional, is_loop
from pygraph.ir.descriptors import Fallback
from pygraph.ir.effects import argument_nodes, is_view, root
from pygraph.ir.printing import target_text
from pygraph.runtime.alignment import copy_span
from pygraph.runtime.discovery import Discovery, RefusedError, takes_shape_only
from pygraph.runtime.indices import Reach
from pygraph.runtime.proof import Trial
from pygraph.runtime.recorded_region import RecordedRegion
from pygraph.runtime.replay_proof import ReplayProof


class CrowdedError(CaptureError):
    """Results may lie where their operations had scratch memory before.

    Attributes:
        room: Sizes of those results by operation, as `Discovery` takes them.
    """

    def __init__(self, room: dict[int, list[int]]) -> None:
        super().__init__("results lie in memory that was scratch memory before")
        self.room = room


class TogetherError(CaptureError):
    """Something has to be copied to or from where the graph was recorded with it, which is the same memory for several.

    Attributes:
        positions: The inputs.
        outputs: Whether there are outputs, too.
    """

    def __init__(self, positions: frozenset[int], outputs: bool) -> None:
        super().__init__("inputs or outputs were recorded in the same memory")
        self.positions = positions
        self.outputs = outputs


def require_separate(found: Discovery, slots: frozenset[int] | None = None) -> None:
    """Raise a `TogetherError` if some of these slots, by default any, were recorded in the same memory."""
    together = found.together if slots is None else found.together & slots
    if together:
        inputs = frozenset(found.slots[slot] for slot in together if slot < len(found.slots))
        raise TogetherError(inputs, outputs=len(inputs) < len(together))


def find_blank_outputs(proof: ReplayProof, found: Discovery, note: bool) -> None:
    """Find the memory of outputs that replays leave as it is, as some results are only allocated.

    Args:
        proof: Where the region is, whose ``blank`` memory is found.
        found: The discovery of its pointers; only memory that no pointer was found to is looked at.
        note: Whether to report the rest of that memory, which is copied.

    Raises:
        TogetherError: Something has to be copied to find out, and was recorded in the same memory.
    """
    if not found.unpointed:
        return
    require_separate(found)
    region, example = proof.region, proof.example
    blank = set(found.unpointed)
    flats = {number: region.bytes_of(number) for number in blank}
    for fill in (0x00, 0xA5):
        for flat in flats.values():
            flat.fill_(fill)
        with Trial(region.driver, region.body, example.inputs, example.state) as trial:
            for position in region.slots:
                copy_span(trial.inputs[position], region.input_buffer(position))
            try:
                region.patch_on_host(frozenset())
                region.replay(trial.inputs, example.numbers, [memory.spec.empty() for memory in region.memory])
            except CaptureError:  # a node that does not take new parameters; the proof will say so
                region.graph.restore()
                blank.clear()
        blank = {number for number in blank if bool((flats[number] == fill).all())}
    region.blank |= blank
    if note:
        region.fallbacks += [fallback for number, fallback in found.unpointed.items() if number not in blank]


def patchable_slots(
    proof: ReplayProof, found: Discovery, candidates: frozenset[int], look_for_room: bool
) -> frozenset[int]:
    """The candidates whose pointers the host can patch, so that a replay gives what ordinary launches give.

    Args:
        proof: Replays of the region, which has a `Fallback` for every other candidate afterwards.
        found: The discovery of its pointers.
        candidates: Slots.
        look_for_room: Whether another recording, with room for results, is worth a try.

    Raises:
        CrowdedError: If it is.
        TogetherError: Something has to be copied to find out, and was recorded in the same memory.
        RefusedError: A replay is wrong even if everything is copied.
    """
    region = proof.region
    candidates -= _unprovable_slots(region, candidates)
    require_separate(found, frozenset(range(len(region.slots) + len(region.memory))) - candidates)
    works, refusal = _works_in_turns(proof, candidates)
    if works:
        return candidates
    require_separate(found)
    if refusal is not None:
        refused = _refused_slots(proof, candidates)
        region.fallbacks += [_why_copied(region, found, slot, reason) for slot, reason in refused.items()]
        candidates -= refused.keys()
        if refused and _works(proof, candidates)[0]:
            return candidates
    if not _works(proof, frozenset())[0]:
        raise RefusedError(None, "its replay does not give the results of ordinary launches")
    wrong = _wrong_slots(proof, sorted(candidates), None)
    if look_for_room:
        _look_for_room(region, wrong)
    region.fallbacks += [_why_copied(region, found, slot, reason) for slot, reason in wrong.items()]
    if _works(proof, candidates - wrong.keys())[0]:
        return candidates - wrong.keys()
    region.fallbacks.append(Fallback("every pointer", "the proof failed only for several together"))
    return frozenset()


def _unprovable_slots(region: RecordedRegion, candidates: frozenset[int]) -> set[int]:
    """Slots of which no poison would show that a pointer was missed, and of which that is not certain otherwise.

    A kernel that has as many pointers to an operand as its operation takes it hides none.
    """
    body = region.body
    found: set[int] = set()
    for slot in sorted(candidates):
        if slot < len(region.slots):
            nodes = [body.inputs[region.slots[slot]]]
        else:
            views = zip(body.outputs, region.views, strict=True)
            nodes = [node for node, (number, _) in views if number == slot - len(region.slots)]
        if all(body.reach.get(node, Reach.NOT) is not Reach.COMPUTED for node in nodes):
            continue
        readers = _operations_with_hidden_pointers(region, slot, nodes)
        if readers:
            reason = f"indices are computed from it, which forbids a proof, and {readers[0]} has several kernels"
            what = "a result" if slot >= len(region.slots) else f"input {nodes[0].name}"
            region.fallbacks.append(Fallback(f"{what} is copied", reason))
            found.add(slot)
    return found


def _operations_with_hidden_pointers(region: RecordedRegion, slot: int, nodes: Sequence[fx.Node]) -> list[str]:
    """The operations that take one of these nodes and may have more pointers to it than were found."""
    names: list[str] = []
    origins = {root(node) for node in nodes}
    for index, node in enumerate(region.body.nodes):
        uses = [one for one in argument_nodes(node) if root(one) in origins]
        recorded = [number for number, one in enumerate(region.graph.nodes) if one.op == index]
        if is_view(node) or not uses or not recorded or takes_shape_only(node):
            continue
        words = [word for word in region.words if word.slot == slot and word.node in recorded]
        # Of a branch's nodes outside of its parts, the one that tells it the predicate is alone in reading anything.
        reads_once = len(recorded) == 1 or (uses == [node.args[0]] and is_conditional(node) and not is_loop(node))
        if not reads_once or len(words) < len(uses):
            names.append(target_text(node.target))
    return names


def _works(proof: ReplayProof, patched: frozenset[int], compares: bool = True) -> tuple[bool, str | None]:
    """Whether a replay is right if these slots are patched and all others copied; and the driver's reason if not.

    Args:
        proof: Replays of the region.
        patched: The slots.
        compares: Whether results are compared, too, besides looking at the memory behind them.
    """
    graph = proof.region.graph
    try:
        proof.region.patch_on_host(patched)
        return proof.passes(copy_outside=True) if compares else proof.stays_inside(), None
    except CaptureError as error:  # a node does not take new parameters, and has others than its copy says
        graph.restore()
        return False, str(error)
    except Exception:
        if not graph.failed:
            raise
        graph.restore()  # a kernel has read poison, and says so at once, as the emulated device's do
        return False, None


_MOST_SCRATCH = 2**26
"""Bytes behind results that are watched at once in any case; of larger results, a quarter of their own."""


def _works_in_turns(proof: ReplayProof, patched: frozenset[int]) -> tuple[bool, str | None]:
    """As `_works`, but where operations had much scratch memory, what is behind their results is watched in turns.

    If all is right, it need not be watched any more. Results are compared once, when all are where they will be.
    """
    memory, first = proof.region.memory, len(proof.region.slots)
    most = max(_MOST_SCRATCH, sum(one.extent.size for one in memory) // 4)
    turns: list[set[int]] = [set()]
    total = 0
    for number in sorted(slot - first for slot in patched if slot >= first and memory[slot - first].scratch):
        if turns[-1] and total + memory[number].scratch > most:
            turns.append(set())
            total = 0
        turns[-1].add(number)
        total += memory[number].scratch
    if len(turns) == 1:
        return _works(proof, patched)
    every = proof.watched
    results = frozenset(first + number for turn in turns for number in turn)
    for turn in (*turns, None):
        proof.watched = turn or ()
        others = frozenset[int]() if turn is None else results - {first + number for number in turn}
        works, refusal = _works(proof, patched - others, compares=turn is None)
        if not works:
            proof.watched = every
            return works, refusal
    return True, None


def _refused_slots(proof: ReplayProof, slots: frozenset[int]) -> dict[int, str]:
    """The slots to which a node's driver does not take other pointers, with its reasons; nothing is replayed."""
    region = proof.region
    fresh = [memory.spec.empty() for memory in region.memory]
    addresses = [proof.example.inputs[position].data_ptr() for position in region.slots]
    addresses += [tensor.data_ptr() for tensor in fresh]
    try:
        return region.refusals(slots, addresses)
    finally:
        region.graph.restore()


def _wrong_slots(proof: ReplayProof, slots: Sequence[int], refusal: str | None) -> dict[int, str | None]:
    """The slots that cannot be patched, with the driver's reasons if it has any.

    Args:
        proof: Replays of the region.
        slots: Slots that cannot all be patched together.
        refusal: The driver's reason why these cannot.
    """
    if len(slots) == 1:
        return {slots[0]: refusal}
    found: dict[int, str | None] = {}
    for half in (slots[: len(slots) // 2], slots[len(slots) // 2 :]):
        works, reason = _works(proof, frozenset(half))
        if not works:
            found |= _wrong_slots(proof, half, reason)
    return found


def _look_for_room(region: RecordedRegion, wrong: Iterable[int]) -> None:
    """Ask for another recording if results may be wrong for lying where their operations had scratch memory."""
    memory = [region.memory[slot - len(region.slots)] for slot in wrong if slot >= len(region.slots)]
    room: dict[int, list[int]] = {}
    for one in memory:
        if one.scratch:
            room.setdefault(one.extent.first_op, []).append(one.extent.size)
    if room:
        raise CrowdedError(room)


def _why_copied(region: RecordedRegion, found: Discovery, slot: int, refusal: str | None) -> Fallback:
    """The reason why the data of a slot is copied, for the report."""
    reason = "the proof by poisoned buffers failed: a kernel holds its pointer where it cannot be patched"
    if refusal is not None:
        reason = f"the driver does not take another pointer to it ({refusal})"
    if slot < len(region.slots):
        position = region.slots[slot]
        readers = dict.fromkeys(found.kernels_of(op) for op in region.body.readers(position))
        what = f"input {region.body.inputs[position].name} is copied"
        return Fallback(what, f"{reason} (read by {', '.join(readers)})")
    names = dict.fromkeys(region.graph.nodes[node].name for node in region.nodes_of(slot))
    return Fallback("a result is copied", f"{reason} (written by {', '.join(names)})")
