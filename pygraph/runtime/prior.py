"""The prior of a selection: how long ways of running a region take by a model, from its kernels and bytes.

It decides where nothing is measured, or where measurements decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from pygraph.ir.selections import Candidate, Compared, Objective, margin
from pygraph.runtime.mechanisms import Choice
from pygraph.runtime.samples import Sample

LAUNCH = Candidate("launch")


def estimates(default: Candidate, launches: float, choice: Choice) -> dict[Candidate, Sample]:
    """Estimate ordinary launches, and the graph that is there.

    Args:
        default: The candidate that the graph is.
        launches: Microseconds that the host needs for ordinary launches.
        choice: How the pointers of the graph change, with its times by the model; these include what it copies.
    """
    busy = min(choice.replay_us, choice.device_us)
    return {
        LAUNCH: Sample(host=launches, device=busy),
        default: Sample(host=choice.host_us, device=choice.device_us),
    }


def preferred(found: Mapping[Candidate, Sample], default: Candidate, objective: Objective) -> Candidate:
    """The candidate with the least estimated time: the default, unless another one is faster by more than the margin.

    >>> long, short = Sample(50.0, 9.0), Sample(4.0, 9.5)
    >>> preferred({LAUNCH: long, Candidate("patch"): short}, Candidate("patch"), "throughput").name
    'patch'
    >>> preferred({LAUNCH: short, Candidate("copy"): long}, Candidate("copy"), "throughput").name
    'launch'
    """
    times = {one: sample.time(objective) for one, sample in found.items()}
    best = min(times, key=lambda one: times[one])
    return best if times[best] < times[default] - margin(times[default]) else default


def compared(found: Mapping[Candidate, Sample], objective: Objective) -> tuple[Compared, ...]:
    """Estimates as a report has them."""
    return tuple(Compared(one, sample.time(objective), sample.host, sample.device, 0) for one, sample in found.items())
