"""Selections: in which way a region runs, what that was compared with, and how sure the comparison is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

Way = Literal["launch", "patch", "copy"]
"""How a region runs: node by node, as a graph with patched pointers, or as a graph with copied inputs."""


Mechanism = Literal["auto", "host", "device", "table", "copy"]
"""How pointers change between replays: the host changes kernels' parameters, a node of the graph does on the device,
kernels load them from a table, the data is copied instead, or for each kernel what is cheapest."""

MECHANISMS: tuple[Mechanism, ...] = ("auto", "host", "device", "table", "copy")

Objective = Literal["throughput", "latency", "cpu"]
"""Time that is to be short: that of a call in a row of calls, that from the start of a call on an idle device to its
result, or that of the host."""

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

Mode = Literal["measure", "heuristic", "replay", "launch"]
"""Ground of a selection: measurements, a model of costs, or none, as all regions replay or are launched."""

MODES: tuple[Mode, ...] = get_args(Mode)


_LEAST_LEAD_US, _LEAST_LEAD = 1.0, 0.01
"""Leads that are worth another way than the default: microseconds, and a share of its time."""


_LEAST_SHOWN_US = 0.05
"""Microseconds that reports show as another time, which they round to tenths."""


def margin(default_us: float) -> float:
    """How much faster than the default another way must be to be chosen, in microseconds.

    >>> margin(600.0), margin(20.0)
    (6.0, 1.0)
    """
    return max(_LEAST_LEAD_US, _LEAST_LEAD * default_us)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way of running a region.

    Attributes:
        way: The way.
        mechanism: How pointers change in it; ``auto`` for what the cost model chooses.
    """

    way: Way
    mechanism: Mechanism = "auto"

    @property
    def name(self) -> str:
        """The way, with its mechanism if that is asked for.

        >>> Candidate("patch").name, Candidate("patch", "device").name
        ('patch', 'patch by device')
        """
        return self.way if self.mechanism == "auto" else f"{self.way} by {self.mechanism}"


@dataclasses.dataclass(frozen=True)
class Compared:
    """A candidate with its times, in microseconds.

    Attributes:
        candidate: The candidate.
        time: By the objective.
        host: Of the host.
        device: Of the device.
        runs: How many runs the times are medians of; 0 if the cost model estimates them.
    """

    candidate: Candidate
    time: float
    host: float
    device: float
    runs: int

    def __str__(self) -> str:
        kind = "" if self.runs else "about "
        return f"{self.candidate.name} {kind}{self.time:.1f} µs (host {self.host:.1f}, device {self.device:.1f})"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The way in which a region runs, and why.

    Attributes:
        chosen: The candidate that runs.
        reason: Why it is chosen.
        compared: All candidates with their times, the chosen one among them.
        lead: Between how many microseconds the best of the others takes more; None if that was not measured.
        confidence: The probability that the true lead is between these; 0 without measurements.
        provisional: Why it is measured again later; None if it is final.
        when: The time of the measurement, as ISO 8601 in UTC; empty without measurements.
        mechanism: How pointers changed in the chosen candidate, if the cost model chose that.
    """

    chosen: Candidate
    reason: str
    compared: tuple[Compared, ...] = ()
    lead: tuple[float, float] | None = None
    confidence: float = 0.0
    provisional: str | None = None
    when: str = ""
    mechanism: Mechanism = "auto"

    def __str__(self) -> str:
        first, *others = self.sentences()
        times = [", ".join(map(str, self.compared))] if self.compared else []
        return "; ".join([first, *times, *others])

    def sentences(self) -> list[str]:
        """The choice in words, without the times of all candidates."""
        parts = [f"runs by {self.chosen.name}: {self.reason}", *self.remarks()]
        if self.lead is not None:
            low, high = self.lead
            parts.append(f"the next best takes {low:+.1f} to {high:+.1f} µs more ({self.confidence:.1%} sure)")
        if self.when:
            parts.append(f"measured {self.when}")
        if self.provisional is not None:
            parts.append(f"to be measured again, as {self.provisional}")
        return parts

    def remarks(self) -> list[str]:
        """The candidates with a shorter time than the chosen one, each with the reason why it does not run.

        Example:
            >>> slow, fast = (Compared(Candidate(way), us, us, 3.0, 7) for way, us in (("patch", 3.4), ("copy", 3.0)))
            >>> Selection(slow.candidate, "nothing was faster by more than noise", (slow, fast)).remarks()
            ['copy was measured 0.4 µs faster, within the margin of 1.0 µs']
        """
        chosen = next((one for one in self.compared if one.candidate == self.chosen), None)
        if chosen is None:
            return []
        faster = (one for one in self.compared if chosen.time - one.time >= _LEAST_SHOWN_US)
        return [
            f"{one.candidate.name} was {'measured' if one.runs else 'estimated'} {chosen.time - one.time:.1f} µs "
            f"faster, {self._why_not(chosen.time, one)}"
            for one in faster
        ]

    def _why_not(self, time: float, faster: Compared) -> str:
        """The reason why a faster candidate does not run in place of the chosen one, which takes this time."""
        if time - faster.time <= margin(time):
            return f"within the margin of {margin(time):.1f} µs"
        if self.provisional is not None:
            return "but that is not certain"
        return "but single runs differ too much to prove it"

    def times(self) -> tuple[tuple[str, float], ...]:
        """Name and time of each candidate."""
        return tuple((one.candidate.name, round(one.time, 3)) for one in self.compared)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, which `from_dict` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Selection:
        """Make a selection of plain data.

        Raises:
            ValueError: The data is not what `to_dict` gives.
        """
        try:
            lead = data["lead"]
            return cls(
                chosen=_candidate(data["chosen"]),
                reason=_text(data["reason"]),
                compared=tuple(_compared(one) for one in data["compared"]),
                lead=None if lead is None else (_number(lead[0]), _number(lead[1])),
                confidence=_number(data["confidence"]),
                provisional=None if data["provisional"] is None else _text(data["provisional"]),
                when=_text(data["when"]),
                mechanism=_candidate({"way": "patch", "mechanism": data["mechanism"]}).mechanism,
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"not a selection: {error}") from error


def _candidate(data: Mapping[str, Any]) -> Candidate:
    way, mechanism = data["way"], data["mechanism"]
    if way not in get_args(Way) or mechanism not in MECHANISMS:
        raise ValueError(f"there is no way {way!r} by {mechanism!r}")
    return Candidate(way, mechanism)


def _compared(data: Mapping[str, Any]) -> Compared:
    times = (_number(data[name]) for name in ("time", "host", "device"))
    return Compared(_candidate(data["candidate"]), *times, runs=int(_number(data["runs"])))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"not a number: {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r}")
    return value
