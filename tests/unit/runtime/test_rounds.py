"""Rounds: what is proven is true as often as they say, whatever noise there is, and noise decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.ir.selections import Candidate
from pygraph.runtime.rounds import CONFIDENCE, LOOKS, Rounds, is_clearly_slower, margin
from pygraph.runtime.samples import Sample, median_interval, unsteadiness
from tests import extent

LAUNCH, PATCH, COPY = Candidate("launch"), Candidate("patch"), Candidate("copy")


def rounds_of(
    sampler: Callable[[Candidate], float], candidates: tuple[Candidate, ...] = (LAUNCH, PATCH), budget: float = 1e9
) -> Rounds:
    """Rounds with made-up times; the default is to patch."""
    rounds = Rounds(PATCH, "throughput")
    rounds.run({one: lambda one=one: Sample(sampler(one), 0.0) for one in candidates}, budget, clock=lambda: 0.0)
    return rounds


# ---- intervals ---------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.floats(0.5, 0.999))
@settings(max_examples=extent.examples(40, 400))
def test_an_interval_is_of_order_statistics(values: list[float], confidence: float) -> None:
    found = median_interval(values, confidence)
    if found is None:
        assert not values or 1 - 2 / 2 ** len(values) < confidence
        return
    assert found.confidence >= confidence
    ordered = sorted(values)
    low, high = ordered.index(found.low), len(values) - 1 - ordered[::-1].index(found.high)
    assert low <= high
    inside = sum(math.comb(len(values), k) for k in range(len(values) + 1)) / 2 ** len(values)
    assert math.isclose(inside, 1.0)


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        found = median_interval(list(random.exponential(1.0, 16)), CONFIDENCE)
        assert found is not None
        held += found.low <= math.log(2) <= found.high
    assert held / 2000 >= CONFIDENCE - 0.01


# ---- verdicts ----------------------------------------------------------------------------------------------------


def test_without_noise_the_first_look_decides() -> None:
    rounds = rounds_of(lambda one: {LAUNCH: 3000.0, PATCH: 600.0}[one])
    verdict = rounds.verdict()
    assert (verdict.chosen, verdict.is_decided) == (PATCH, True)
    assert len(rounds.samples[PATCH]) == LOOKS[0]
    assert verdict.lead is not None
    assert (verdict.lead.low, verdict.lead.high) == (2400.0, 2400.0)


def test_a_faster_way_must_be_faster_by_the_margin() -> None:
    for lead, chosen in ((margin(600.0) - 0.1, PATCH), (margin(600.0) + 0.1, COPY)):
        rounds = rounds_of(lambda one, lead=lead: 600.0 - lead * (one == COPY), (PATCH, COPY))
        assert rounds.verdict().chosen == chosen
        assert rounds.verdict().is_decided


def test_of_two_faster_ways_that_tie_the_simpler_one_is_chosen() -> None:
    times = {LAUNCH: 300.0, PATCH: 600.0, COPY: 299.5}
    assert rounds_of(times.__getitem__, (LAUNCH, PATCH, COPY)).verdict().chosen == LAUNCH
    times[COPY] = 290.0
    assert rounds_of(times.__getitem__, (LAUNCH, PATCH, COPY)).verdict().chosen == COPY


def test_drift_that_slows_all_down_decides_nothing() -> None:
    """The device gets slower and slower; one after the other, the later way would lose."""
    count = 0

    def sampler(one: Candidate) -> float:
        nonlocal count
        count += 1
        return (100.0 if one == PATCH else 130.0) * 1.01**count

    verdict = rounds_of(sampler).verdict()
    assert (verdict.chosen, verdict.is_decided) == (PATCH, True)


NOISES: dict[str, Callable[[np.random.Generator], float]] = {
    "none": lambda random: 0.0,
    "normal": lambda random: float(random.normal(0, 30)),
    "exponential": lambda random: float(random.exponential(100)),
    "bursts": lambda random: 5000.0 * (random.random() < 0.15),
    "slices": lambda random: float(random.uniform(0, 20000)) * (random.random() < 0.4),
}


@given(st.integers(0, 2**32 - 1), st.sampled_from(list(NOISES)), st.sampled_from([-300.0, -60.0, 0.0, 2.0, 300.0]))
@settings(max_examples=extent.examples(60, 2000))
def test_another_way_than_the_default_is_proven(seed: int, noise: str, difference: float) -> None:
    random = np.random.default_rng(seed)
    rounds = rounds_of(lambda one: 600.0 + difference * (one == LAUNCH) + NOISES[noise](random))
    verdict = rounds.verdict()
    pairs = zip(rounds.samples[LAUNCH], rounds.samples[PATCH], strict=True)
    differences = [one.host - other.host for one, other in pairs]
    if verdict.chosen == LAUNCH:
        assert verdict.is_decided
        assert verdict.lead is not None
        assert verdict.lead.low > margin(rounds.median(PATCH))
        assert sum(one < 0 for one in differences) > len(differences) / 2
    if noise == "none":
        assert verdict.is_decided
        assert verdict.chosen == (LAUNCH if difference < -margin(600.0) else PATCH)


@pytest.mark.parametrize("noise", NOISES)
def test_noise_decides_nothing(noise: str) -> None:
    """Of two ways that are the same, the default is chosen nearly always."""
    random = np.random.default_rng(1)
    others = sum(rounds_of(lambda one: 600.0 + NOISES[noise](random)).verdict().chosen != PATCH for _ in range(300))
    assert others <= 0.05 * 300


def test_a_budget_ends_rounds() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.1
        return now

    rounds = Rounds(PATCH, "throughput")
    random = np.random.default_rng(2)
    rounds.run(
        {one: lambda: Sample(float(random.uniform(0, 1000)), 0.0) for one in (LAUNCH, PATCH)}, 0.5, clock
    )  # fmt: skip
    assert 1 <= len(rounds.samples[PATCH]) <= 6
    assert rounds.verdict().chosen == PATCH
    assert not rounds.verdict().is_decided


@pytest.mark.parametrize(("scale", "count"), [(1.0, LOOKS[0]), (1000.0, LOOKS[-1])])
def test_rounds_end_when_what_may_be_gained_is_not_worth_them(scale: float, count: int) -> None:
    """Two graphs of one speed, give or take some microseconds or milliseconds; each sample takes ten milliseconds."""
    now = 0.0
    random = np.random.default_rng(3)

    def sample() -> Sample:
        nonlocal now
        now += 0.01
        return Sample(scale * float(random.uniform(20, 26)), 0.0)

    rounds = Rounds(PATCH, "throughput")
    rounds.run({PATCH: sample, COPY: sample}, 1e9, clock=lambda: now)
    assert len(rounds.samples[PATCH]) == count
    assert rounds.undecided() == [COPY]
    assert rounds.verdict().chosen == PATCH
    assert rounds.verdict().is_decided, "between two graphs the default is good enough"


def test_objectives() -> None:
    fast_host, fast_device = Sample(1.0, 100.0), Sample(50.0, 60.0)
    chosen = {}
    for objective in ("throughput", "cpu", "latency"):
        rounds = Rounds(PATCH, objective)
        rounds.run({LAUNCH: lambda: fast_host, PATCH: lambda: fast_device}, 1e9)
        chosen[objective] = rounds.verdict().chosen
    assert chosen == {"throughput": PATCH, "cpu": LAUNCH, "latency": LAUNCH}


def test_first_samples_decide_only_for_the_default() -> None:
    slow, fast = [Sample(n, 0.0) for n in (30.0, 31.0, 35.0)], [Sample(n, 0.0) for n in (9.0, 10.0, 20.0)]
    assert is_clearly_slower(slow, fast, "throughput")
    assert not is_clearly_slower(fast, slow, "throughput")
    assert not is_clearly_slower([*slow, Sample(8.0, 0.0)], fast, "throughput")


# ---- company -----------------------------------------------------------------------------------------------------


def samples(times: list[float], clock: float | None = None) -> list[Sample]:
    return [Sample(5.0, time, clock=clock) for time in times]


def test_a_quiet_device_is_quiet() -> None:
    random = np.random.default_rng(0)
    for base in (5.0, 100.0, 6000.0):
        for _ in range(50):
            quiet = samples([base * (1 + 0.01 * float(random.normal())) for _ in range(7)], 1980.0)
            assert unsteadiness(quiet) is None


@pytest.mark.parametrize(
    ("found", "sign"),
    [
        (samples([600.0, 2600.0, 600.0, 4600.0, 600.0, 2600.0, 2600.0]), "spread"),
        (samples([100.0, 110.0, 120.0, 130.0, 140.0, 150.0, 160.0]), "drifted"),
        ([Sample(5.0, 100.0, clock=1980.0 - 150 * n) for n in range(7)], "clock"),
        ([Sample(5.0 * (1 + 5 * (n % 2)), 100.0) for n in range(8)], "times of the host"),
    ],
)
def test_company_shows(found: list[Sample], sign: str) -> None:
    assert sign in (unsteadiness(found) or "")
