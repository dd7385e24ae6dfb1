"""Results that may lie where a graph was recorded with them, from call to call.

A replay writes results to memory that it is given. The memory of the recording is as good as any other if nothing but
the patched pointers leads there: not the scratch memory of an operation, nor a value that the region has freed before,
nor one of another graph in the same pool. That is put to the test: replays whose results go elsewhere leave it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pygraph.errors import CaptureError
from pygraph.runtime.indices import Reach
from pygraph.runtime.pointers import points_into
from pygraph.runtime.proof import Trial
from pygraph.runtime.recorded_region import RecordedRegion
from pygraph.runtime.replay_proof import ReplayProof


def own_results(proof: ReplayProof, numbers: Iterable[int], taken: Sequence[tuple[int, int]]) -> frozenset[int]:
    """The entries of a region's ``memory`` whose memory of the recording only the patched pointers of results reach.

    Args:
        proof: Where the region is, which is proven.
        numbers: The entries in question.
        taken: Address and size of memory that other graphs may use.
    """
    region = proof.region
    candidates = frozenset(number for number in numbers if _is_patched(region, number))
    candidates = frozenset(number for number in candidates if not _meets(region, number, taken))
    candidates -= _computed_indices(region)
    return _left_alone(proof, candidates - _reached_before(region, candidates))


def _is_patched(region: RecordedRegion, number: int) -> bool:
    slot = len(region.slots) + number
    return slot not in region.choice.copied and number not in region.blank and region.memory[number].extent.size > 0


def _meets(region: RecordedRegion, number: int, taken: Sequence[tuple[int, int]]) -> bool:
    extent = region.memory[number].extent
    return any(start < extent.start + extent.size and extent.start < start + size for start, size in taken)


def _computed_indices(region: RecordedRegion) -> set[int]:
    """Entries from whose values indices are computed, which must not hold anything else."""
    views = zip(region.body.outputs, region.views, strict=True)
    return {number for node, (number, _) in views if region.body.reach.get(node, Reach.NOT) is Reach.COMPUTED}


def _reached_before(region: RecordedRegion, numbers: Iterable[int]) -> set[int]:
    """Entries to whose memory operations point that run before it is allocated."""
    found: set[int] = set()
    for number in numbers:
        extent = region.memory[number].extent
        before = [node for node in region.graph.nodes if 0 <= node.op < extent.first_op]
        if any(points_into(node.params, extent.start, extent.size) for node in before):
            found.add(number)
    return found


def _left_alone(proof: ReplayProof, numbers: frozenset[int]) -> frozenset[int]:
    """The entries whose memory of the recording replays leave as it is while results go elsewhere."""
    region, left = proof.region, set(numbers)
    region.pool.order()
    for fill in (0x00, 0xA5):
        if not left:
            break
        recorded = {number: region.bytes_of(number) for number in left}
        for memory in recorded.values():
            memory.fill_(fill)
        with Trial(region.driver, region.body, proof.example.inputs) as trial:
            try:
                region.replay(trial.inputs, proof.example.numbers, [memory.spec.empty() for memory in region.memory])
            except CaptureError:  # the driver takes no other parameters for a node
                return frozenset()
        left = {number for number in left if bool((recorded[number] == fill).all())}
    return frozenset(left)
