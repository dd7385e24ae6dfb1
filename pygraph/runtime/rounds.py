"""Comparing ways of running in interleaved rounds, until an interval decides between them or a budget ends.

In every round each candidate runs once, so what slows one of them down for a while slows down all. The default is what
runs unless another candidate is proven to be faster by more than a margin: noise decides nothing, and ties go to it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from pygraph.ir.selections import Candidate, Compared, Objective, margin
from pygraph.runtime.samples import Interval, Sample, median_interval

CONFIDENCE = 0.98
"""The least confidence of an interval that decides."""

LOOKS = (7, 11, 16, 24, 36, 54)
"""After so many rounds intervals are looked at: seldom, as every look may be wrong."""

_CALLS = 10_000
"""Calls that a gain is taken to be for, when it is weighed against the time that finding it takes."""


def worth(gain_us: float) -> float:
    """The seconds that may be spent on finding out whether each call gains so many microseconds.

    >>> worth(3.0), worth(200.0)
    (0.03, 2.0)
    """
    return gain_us * _CALLS / 1e6


@dataclasses.dataclass(frozen=True)
class Verdict:
    """An outcome of rounds.

    Attributes:
        chosen: The candidate that runs.
        is_decided: Whether intervals have decided between launches and graphs. Where they have not between two graphs,
            the default is good enough.
        lead: The interval of how much more the best of the others takes; None if there is no other, or no interval.
    """

    chosen: Candidate
    is_decided: bool
    lead: Interval | None


class Rounds:
    """Samples of candidates, and what they prove.

    Args:
        default: The candidate that is chosen unless another one is faster.
        objective: The time that counts.
        is_exact: Whether a sample is the same at every run, so that one says all.

    Attributes:
        samples: The samples of each candidate, by round.
    """

    def __init__(self, default: Candidate, objective: Objective, *, is_exact: bool = False) -> None:
        self.default = default
        self.objective: Objective = objective
        self.samples: dict[Candidate, list[Sample]] = {default: []}
        self._is_exact = is_exact

    def run(
        self,
        samplers: Mapping[Candidate, Callable[[], Sample]],
        budget: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Run rounds until every candidate is decided about, or the budget ends, but one round at least.

        They also end when what may be gained is not worth the time that they have taken.

        Args:
            samplers: Run each candidate once; simple ones come first.
            budget: Seconds.
            clock: The time in seconds.
        """
        begin = clock()
        for count in range(1, LOOKS[-1] + 1):
            self.run_once(samplers)
            spent = clock() - begin
            if self._is_exact or spent > budget or (count in LOOKS and spent >= worth(self.possible_gain())):
                return

    def run_once(self, samplers: Mapping[Candidate, Callable[[], Sample]]) -> None:
        """Run one round, which begins with another candidate than the last one: each runs after each other one."""
        order = list(samplers)
        for candidate in order:
            self.samples.setdefault(candidate, [])
        first = len(self.samples[self.default]) % len(order)
        for candidate in (*order[first:], *order[:first]):
            self.samples[candidate].append(samplers[candidate]())

    def undecided(self) -> list[Candidate]:
        """The candidates of which it is not known whether they are faster than the default by more than the margin."""
        return [one for one in self._others() if self._is_faster(one) is None]

    def possible_gain(self) -> float:
        """Microseconds that a candidate which is not decided about may be faster than the default, at most."""
        gains = [0.0]
        for one in self.undecided():
            interval = self._interval(one, self.default)
            gains.append(math.inf if interval is None else -interval.low)
        return max(gains)

    def verdict(self) -> Verdict:
        """The candidate to run in: of those that are proven to be faster than the default the fastest, else that."""
        faster = [one for one in self._others() if self._is_faster(one)]
        chosen = self.default
        if faster:
            best = min(map(self.median, faster))
            chosen = next(one for one in faster if self.median(one) <= best + margin(best))
        others = [one for one in self.samples if one != chosen and self.samples[one]]
        lead = None if not others else self._interval(min(others, key=self.median), chosen)
        is_open = any("launch" in (one.way, self.default.way) for one in self.undecided())
        return Verdict(chosen, not is_open, lead)

    def median(self, candidate: Candidate) -> float:
        """The median time of a candidate."""
        return statistics.median(one.time(self.objective) for one in self.samples[candidate])

    def compared(self) -> tuple[Compared, ...]:
        """The medians of all candidates that have run."""
        return tuple(
            Compared(
                one, self.median(one), statistics.median(sample.host for sample in samples),
                statistics.median(sample.device for sample in samples), len(samples),
            )
            for one, samples in self.samples.items()
            if samples
        )  # fmt: skip

    def _others(self) -> list[Candidate]:
        return [one for one, samples in self.samples.items() if samples and one != self.default]

    def _is_faster(self, candidate: Candidate) -> bool | None:
        """Whether a candidate is faster than the default by more than the margin; None if that is not decided."""
        interval = self._interval(candidate, self.default)
        if interval is None:
            return None
        needed = -margin(self.median(self.default))
        return True if interval.high < needed else False if interval.low >= needed else None

    def _interval(self, candidate: Candidate, other: Candidate) -> Interval | None:
        """The interval of how much more a candidate takes than another one, in the same rounds."""
        times, others = ([one.time(self.objective) for one in self.samples[which]] for which in (candidate, other))
        differences = [mine - its for mine, its in zip(times, others, strict=False)]
        if self._is_exact:
            return Interval(differences[-1], differences[-1], 1.0)
        return median_interval(differences, CONFIDENCE)


def is_clearly_slower(samples: Sequence[Sample], default: Sequence[Sample], objective: Objective) -> bool:
    """Whether samples that were not taken in rounds show that a candidate is no better than the default.

    Every run of it took longer than every one of the default, or not that much less that it would be chosen. Other work
    may have slowed it down, but then the default runs, as it would without a proof.

    >>> slow, fast = [Sample(9.0, 1.0)] * 5, [Sample(3.0, 4.0)] * 5
    >>> is_clearly_slower(slow, fast, "throughput"), is_clearly_slower(fast, slow, "throughput")
    (True, False)
    """
    longest = max(one.time(objective) for one in default)
    return min(one.time(objective) for one in samples) > longest - margin(longest)
