"""Memory of results that only the patched pointers of a graph reach: nothing is written where it was recorded.

A replay writes results to memory that it is given. Then the memory of the recording is as good as any other, and may be
what replays are given, or may be freed. In a pool it has to be what the recording has reserved for the result, see
`pygraph.runtime.reservations`, so that no value before it and no other graph has it. What operations do there beside
the patched pointers, with scratch memory or through hidden ones, is put to the test: replays whose results go elsewhere
leave the memory of the recording as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from pygraph.errors import CaptureError
from pygraph.runtime.indices import Reach
from pygraph.runtime.proof import Trial
from pygraph.runtime.recorded_region import RecordedRegion
from pygraph.runtime.replay_proof import ReplayProof


def own_results(proof: ReplayProof, saved: Iterable[int]) -> frozenset[int]:
    """The entries of ``memory``, outside of the pool or reserved in it, to whose memory no replay writes any more.

    Args:
        proof: Where the region is, which is proven.
        saved: The entries of interest among those in the pool.
    """
    region = proof.region
    candidates = region.outside | (region.reserved & frozenset(saved))
    patched = {number for number in candidates if _is_patched(region, number)}
    return _left_alone(proof, patched - _computed_indices(region))


def _is_patched(region: RecordedRegion, number: int) -> bool:
    return len(region.slots) + number not in region.choice.copied and number not in region.blank


def _computed_indices(region: RecordedRegion) -> set[int]:
    """Entries from whose values indices are computed, which must not hold anything else."""
    views = zip(region.body.outputs, region.views, strict=True)
    return {number for node, (number, _) in views if region.body.reach.get(node, Reach.NOT) is Reach.COMPUTED}


def _left_alone(proof: ReplayProof, numbers: set[int]) -> frozenset[int]:
    """The entries whose memory of the recording replays leave as it is while results go elsewhere."""
    region, left = proof.region, numbers
    region.pool.order()
    for fill in (0x00, 0xA5):
        if not left:
            break
        recorded = {number: region.bytes_of(number) for number in left}
        for memory in recorded.values():
            memory.fill_(fill)
        with Trial(region.driver, region.body, proof.example.inputs, proof.example.state) as trial:
            try:
                region.replay(trial.inputs, proof.example.numbers, [memory.spec.empty() for memory in region.memory])
            except CaptureError:  # the driver takes no other parameters for a node
                return frozenset()
        left = {number for number in left if bool((recorded[number] == fill).all())}
    return frozenset(left)
