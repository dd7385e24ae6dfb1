"""Samples of how long ways of running take, and what a few of them prove in spite of noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from pygraph.ir.selections import Objective


@dataclasses.dataclass(frozen=True)
class Sample:
    """Times of one run, in microseconds.

    Attributes:
        host: Of the host, until it has launched everything.
        device: Of the device, which does not wait for the host.
        latency: From the start on an idle device until everything is done; None if that was not measured.
        clock: Cycles that the device counted in a microsecond just before; None if that is not known.
    """

    host: float
    device: float
    latency: float | None = None
    clock: float | None = None

    def time(self, objective: Objective) -> float:
        """The time that counts.

        >>> sample = Sample(host=5.0, device=20.0, latency=23.0)
        >>> sample.time("throughput"), sample.time("latency"), sample.time("cpu")
        (20.0, 23.0, 5.0)
        """
        if objective == "cpu":
            return self.host
        if objective == "throughput":
            return max(self.host, self.device)
        return self.host + self.device if self.latency is None else self.latency


@dataclasses.dataclass(frozen=True)
class Interval:
    """An interval in which a median lies with some confidence."""

    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float], confidence: float) -> Interval | None:
    """The interval of the median by order statistics, whatever the distribution: bursts are but a few large values.

    Args:
        values: Independent samples.
        confidence: The least probability that the median is in the interval.

    Returns:
        The interval; None if there are too few samples for that.

    Example:
        >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 900.0], 0.98)
        Interval(low=1.0, high=900.0, confidence=0.984375)
        >>> median_interval([1.0, 2.0], 0.98) is None
        True
    """
    count = len(values)
    ordered = sorted(values)
    outside = 0.0  # the probability that the median is below the smallest values so far, or above the largest
    found: Interval | None = None
    for left_out in range(count // 2):
        outside += 2 * math.comb(count, left_out) / 2**count
        if 1 - outside < confidence:
            break
        found = Interval(ordered[left_out], ordered[count - 1 - left_out], 1 - outside)
    return found


_STEADY = 0.1
"""The share of a median by which the middle half of samples may spread on a device that does nothing else."""

_SHORT = 4.0
"""Microseconds of spread that say nothing."""

_STEADY_CLOCK = 0.05


def unsteadiness(samples: Sequence[Sample]) -> str | None:
    """Signs that something besides what is measured uses the device or the host; None without any.

    Args:
        samples: Samples of one way of running, in the order in which they were taken.

    Example:
        >>> unsteadiness([Sample(2.0, 100.0 + n % 2) for n in range(8)])
        >>> unsteadiness([Sample(2.0, 100.0 * (1 + n % 2)) for n in range(8)])
        'times of the device spread by 67 %'
        >>> unsteadiness([Sample(2.0, 100.0 + 5 * n) for n in range(9)])
        'times of the device have drifted by 25 %'
    """
    if len(samples) < _FEWEST:
        return None
    clocks = [one.clock for one in samples if one.clock is not None]
    if len(clocks) == len(samples):
        low, high = quartiles(clocks)
        if high - low > _STEADY_CLOCK * statistics.median(clocks):
            return f"the clock of the device changed, from {low:.0f} to {high:.0f} MHz"
    times = [one.device for one in samples]
    median, third = statistics.median(times), len(times) // 3
    drift = abs(statistics.median(times[-third:]) - statistics.median(times[:third])) if third else 0.0
    if third >= _FEWEST_OF_A_THIRD and _is_monotonic(times) and drift > _STEADY * median and drift > _SHORT:
        return f"times of the device have drifted by {100 * drift / median:.0f} %"
    for name, found, steady, short in (
        ("device", times, _STEADY, _SHORT),
        ("host", [one.host for one in samples], _STEADY_HOST, _SHORT_HOST),
    ):
        low, high = quartiles(found)
        if high - low > steady * statistics.median(found) and high - low > short:
            return f"times of the {name} spread by {100 * (high - low) / statistics.median(found):.0f} %"
    return None


_FEWEST, _FEWEST_OF_A_THIRD = 4, 2
_STEADY_HOST, _SHORT_HOST = 0.5, 20.0  # a host's caches are cold when it has waited for the device


def _is_monotonic(times: Sequence[float]) -> bool:
    """Whether the medians of three parts rise or fall."""
    third = len(times) // 3
    first, middle, last = (statistics.median(part) for part in (times[:third], times[third:-third], times[-third:]))
    return first < middle < last or first > middle > last


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
