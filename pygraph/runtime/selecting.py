"""Choosing in which way a region runs, when it is recorded and later.

Ordinary launches are timed before there is a graph, when there is most memory for them. Where they are clearly slower,
that is all. Otherwise all candidates are timed in interleaved rounds, beside each other. What was measured while other
work kept the device busy decides nothing: the prior does for now, and rounds are run again between later calls.
See docs/design/0031-selections.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import numbers
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from pygraph.errors import ArgumentError, describe
from pygraph.ir.descriptors import Fallback
from pygraph.ir.effects import count_kernels
from pygraph.ir.selections import Candidate, Mode, Objective, Selection
from pygraph.process import progress
from pygraph.runtime import prior
from pygraph.runtime.body import RegionBody
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.discovery import RefusedError
from pygraph.runtime.driver import Costs, Driver, InterruptedCaptureError, Pool, Run
from pygraph.runtime.prior import LAUNCH
from pygraph.runtime.proof import Trial, WrittenState
from pygraph.runtime.rounds import LOOKS, Rounds, Verdict, is_clearly_slower, worth
from pygraph.runtime.samples import Interval, Sample, unsteadiness

Timer = Callable[[Callable[[], object]], float]
Runs = Callable[[list[torch.Tensor], list[Any]], object]
"""Runs a region on inputs and numbers."""

_FIRST, _FEWEST = 7, 3
"""Samples that are taken of each candidate before rounds, and how many at least if a sample takes long."""

_SHARE_OF_FIRST = 0.25
"""The share of what is left of the budget in which more than these few are taken."""


@dataclasses.dataclass(frozen=True)
class SelectionPolicy:
    """Rules of a selection; `pygraph.select` describes them."""

    objective: Objective = "throughput"
    budget: float = 1.0
    mode: Mode = "measure"
    timer: Timer | None = None

    @property
    def measures(self) -> bool:
        """Whether it takes measurements."""
        return self.mode == "measure"

    def sampler(self, run: Run, driver: Driver, *, latency: bool = False) -> Callable[[], Sample]:
        """A function that samples a run, by the timer or by the device."""
        timer = self.timer
        if timer is None:
            return lambda: driver.sample(run, latency=latency)

        def timed() -> Sample:
            microseconds = timer(run)
            if not isinstance(microseconds, numbers.Real) or not 0 <= microseconds < math.inf:
                expected = "the microseconds of a run, a number from 0 on"
                raise ArgumentError(describe("select(…)", f"the timer returns {microseconds!r}", expected=expected))
            return Sample(microseconds, microseconds, microseconds)

        return timed

    def disturbance(self, samples: Sequence[Sample], driver: Driver) -> str | None:
        """Signs that samples of one way are not to be trusted; other processes mean nothing to a timer."""
        found = unsteadiness(samples)
        return driver.others() if found is None and self.timer is None else found


DEFAULT_POLICY = SelectionPolicy()


@dataclasses.dataclass
class Selecting:
    """Selections of the regions of a Program, while it is recorded.

    Attributes:
        policy: The rules.
        remembered: The selections of an earlier process, by region; empty if there are none.
        launches: Samples of ordinary launches so far, by the names of a region's nodes. They are the same when nodes
            elsewhere are refused and the Program is recorded again.
        spent: Seconds that measurements have taken so far.
    """

    policy: SelectionPolicy
    remembered: Mapping[int, Selection] = dataclasses.field(default_factory=dict[int, Selection])
    launches: dict[tuple[str, ...], list[Sample]] = dataclasses.field(
        default_factory=dict[tuple[str, ...], list[Sample]]
    )
    spent: float = 0.0

    @property
    def budget(self) -> float:
        """Seconds that are left for measurements."""
        return max(self.policy.budget - self.spent, 0.0)

    @contextlib.contextmanager
    def spending(self) -> Generator[None, None, None]:
        """A block that measures."""
        progress.phase("measuring")
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - begin


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """A region with a call of it.

    Attributes:
        body: The region.
        driver: The device.
        pool: The memory of its graph.
        inputs: The inputs of the call, which are afterwards as they were.
        numbers: Its numbers.
        state: What the region updates, as the call has found it.
    """

    body: RegionBody
    driver: Driver
    pool: Pool
    inputs: Sequence[torch.Tensor]
    numbers: Sequence[Any]
    state: WrittenState

    def trial(self) -> Trial:
        """Runs that leave no trace."""
        return Trial(self.driver, self.body, self.inputs, self.state)

    def sampler(self, candidate: Candidate, run: Runs, trial: Trial, policy: SelectionPolicy) -> Callable[[], Sample]:
        """A function that runs a candidate from the state of the call, and says how long it took."""

        def restore() -> None:
            self.pool.order()  # a timer may run on several streams
            trial.restore()

        numbers = list(self.numbers)
        one = Run(lambda: run(trial.inputs, numbers), restore if trial.has_state else None, candidate.name)
        return policy.sampler(one, self.driver, latency=policy.objective == "latency")

    @contextlib.contextmanager
    def samplers(
        self, candidates: Mapping[Candidate, Runs], policy: SelectionPolicy
    ) -> Generator[dict[Candidate, Callable[[], Sample]], None, None]:
        """Samplers of candidates, which run from the state of the call."""
        with self.trial() as trial:
            yield {one: self.sampler(one, run, trial, policy) for one, run in candidates.items()}


class RegionSelector:
    """Chooses how one region runs.

    Args:
        selecting: The selections of its Program.
        call: The region with a call.
        default: The candidate that it is recorded as.
    """

    def __init__(self, selecting: Selecting, call: BoundCall, default: Candidate) -> None:
        self._selecting, self._call, self._default = selecting, call, default
        self._policy = selecting.policy
        self._objective: Objective = selecting.policy.objective
        self._is_exact = call.driver.is_exact and selecting.policy.timer is None
        nodes = tuple(node.name for node in call.body.nodes)
        if selecting.policy.measures and nodes not in selecting.launches:
            selecting.launches[nodes] = self._first_samples(LAUNCH, call.body.run)
        self._launches = selecting.launches.get(nodes, [])

    def select(self, graph: RegionGraph, seconds: float, record: Callable[[Candidate, Pool], RegionGraph]) -> Selection:
        """Choose between ordinary launches, the graph that was recorded, and others that may be faster.

        Args:
            graph: The graph that was recorded.
            seconds: The time that its recording took.
            record: Records a graph of another candidate in a pool.
        """
        found = prior.estimates(self._default, self._host_of_launches(), graph.choice)
        preferred = prior.preferred(found, self._default, self._objective)
        if not self._policy.measures:
            return Selection(preferred, "the cost model estimates it", prior.compared(found, self._objective))
        replays = self._first_samples(self._default, graph)
        others = self._worth_a_try(graph, seconds)
        if preferred == self._default and not others and is_clearly_slower(self._launches, replays, self._objective):
            return self._clear(replays)
        rounds = Rounds(preferred, self._objective, is_exact=self._is_exact)
        recorded: dict[Candidate, RegionGraph] = {}
        try:
            for one in others:
                self._try_to_record(one, record, recorded, graph)
            self._run_rounds(rounds, {LAUNCH: self._call.body.run, self._default: graph, **recorded})
        except torch.OutOfMemoryError:
            return Selection(preferred, "there is not enough memory to run the candidates beside each other")
        finally:
            for one in recorded.values():
                one.release()
            self._call.driver.give_back()  # what runs have left, beside which there has to be the memory of a graph
        # Launches would be for good, as there is no graph then to compare later.
        for_now = self._default if preferred == LAUNCH else preferred
        return judged(rounds, for_now, self._disturbance(rounds.samples[self._default]))

    # -- samples ----------------------------------------------------------------------------------------------------

    def _costs(self) -> Costs:
        return self._call.driver.costs()

    def _host_of_launches(self) -> float:
        """The microseconds that the host needs for ordinary launches: the least that were measured, else by the model.

        Whatever disturbs a measurement adds to it.
        """
        modelled = self._costs().launch * count_kernels(self._call.body.nodes)
        return min((sample.host for sample in self._launches), default=modelled)

    def _first_samples(self, candidate: Candidate, run: Runs) -> list[Sample]:
        """A few samples of one candidate, fewer if they take long, after a run that loads what it needs."""
        samples = list[Sample]()
        with self._selecting.spending(), self._call.samplers({candidate: run}, self._policy) as samplers:
            sampler = samplers[candidate]
            if not self._is_exact:
                sampler()
            begin = time.perf_counter()
            for count in range(1, (1 if self._is_exact else _FIRST) + 1):
                samples.append(sampler())
                if count >= _FEWEST and time.perf_counter() - begin > _SHARE_OF_FIRST * self._selecting.budget:
                    break
        self._call.driver.give_back()
        return samples

    def _run_rounds(self, rounds: Rounds, candidates: Mapping[Candidate, Runs]) -> None:
        with self._selecting.spending(), self._call.samplers(candidates, self._policy) as samplers:
            rounds.run(samplers, self._selecting.budget)

    # -- candidates -------------------------------------------------------------------------------------------------

    def _worth_a_try(self, graph: RegionGraph, seconds: float) -> list[Candidate]:
        """Other graphs that may be faster than the one that was recorded, which takes a recording to find out.

        Copies gain nothing where the device is slower than the host, nor where they take longer than sending every
        node. Nor is it worth a recording if the host has next to nothing to send.
        """
        choice, costs = graph.choice, self._costs()
        if self._default.way != "patch":
            return []
        matters = choice.host_us > choice.device_us or self._objective == "cpu"
        if not matters and self._policy.timer is None:
            return []
        nbytes = sum(tensor.nbytes for tensor in self._call.inputs)
        copies = nbytes / costs.copy_rate <= costs.host_node * count_kernels(self._call.body.nodes)
        found = [Candidate("patch", mechanism) for mechanism in graph.alternatives]
        found += [Candidate("copy")] if copies else []
        least = costs.replay if self._objective == "cpu" else max(costs.replay, choice.replay_us)
        is_worth_it = seconds * len(found) <= worth(choice.host_us - least)
        return found if is_worth_it or self._is_exact or self._policy.timer is not None else []

    def _try_to_record(
        self,
        candidate: Candidate,
        record: Callable[[Candidate, Pool], RegionGraph],
        recorded: dict[Candidate, RegionGraph],
        graph: RegionGraph,
    ) -> None:
        """Record a candidate in a pool of its own, as it hardly ever stays; say so if the device refuses that."""
        try:
            made = recorded[candidate] = record(candidate, self._call.driver.new_pool())
            if made.saved is not None:
                made.saved.leave_others_alone()
        except (RefusedError, InterruptedCaptureError) as error:
            if isinstance(error, RefusedError) and error.node is not None:
                raise  # the device does not record it in any way
            graph.fallbacks.append(Fallback(f"{candidate.name} was not tried", str(error)))

    # -- judging ----------------------------------------------------------------------------------------------------

    def _clear(self, replays: list[Sample]) -> Selection:
        """The selection of the graph, as every launch took longer than every replay."""
        rounds = Rounds(self._default, self._objective)
        rounds.samples = {LAUNCH: self._launches, self._default: replays}
        times, others = ([one.time(self._objective) for one in samples] for samples in (replays, self._launches))
        # Each median is between the least and the largest sample, unless all are on one side of it.
        outside = 0.0 if self._is_exact else 2 / 2 ** len(times) + 2 / 2 ** len(others)
        lead = Interval(min(others) - max(times), max(others) - min(times), 1 - outside)
        verdict = Verdict(self._default, is_decided=True, lead=lead)
        return _selection(rounds, verdict, self._default, self._disturbance(replays))

    def _disturbance(self, samples: Sequence[Sample]) -> str | None:
        """Signs that the measurement is not to be trusted."""
        return None if self._is_exact else self._policy.disturbance(samples, self._call.driver)


def judged(rounds: Rounds, for_now: Candidate, disturbance: str | None) -> Selection:
    """The selection that rounds prove, or another one for now where they prove nothing or were disturbed."""
    return _selection(rounds, rounds.verdict(), for_now, disturbance)


def _selection(rounds: Rounds, verdict: Verdict, for_now: Candidate, disturbance: str | None) -> Selection:
    chosen, provisional = verdict.chosen, disturbance
    if disturbance is None and not verdict.is_decided:
        provisional = "its rounds decided nothing"
    if provisional is not None:
        chosen = for_now
        is_preferred = for_now == rounds.default
        reason = "the cost model prefers it" if is_preferred else "launches are not proven to be faster"
    elif verdict.lead is None or verdict.lead.low > 0:
        reason = "it was the fastest"
    else:
        reason = "nothing was faster by more than noise"
    lead = verdict.lead if chosen == verdict.chosen else None
    return Selection(
        chosen, reason, rounds.compared(), None if lead is None else (round(lead.low, 3), round(lead.high, 3)),
        0.0 if lead is None else lead.confidence, provisional, now(),
    )  # fmt: skip


def now() -> str:
    """The time, in UTC, to a second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Review:
    """Later rounds of a provisional selection, one at a time.

    Args:
        selecting: The selections of its Program.
        selection: The selection.

    Attributes:
        selection: The selection, which is another one when the rounds have decided.
        time: The microseconds of the chosen way, as they were measured first.
    """

    def __init__(self, selecting: Selecting, selection: Selection) -> None:
        self._policy, self.selection = selecting.policy, selection
        self.time = next(one.time for one in selection.compared if one.candidate == selection.chosen)
        self._rounds = Rounds(selection.chosen, self._policy.objective)
        self._count = 0

    def run_round(self, call: BoundCall, graph: RegionGraph) -> bool:
        """Run a round; True if it was the last one, as it is decided how the region runs."""
        candidates: dict[Candidate, Runs] = {LAUNCH: call.body.run, self.selection.chosen: graph}
        try:
            with call.samplers(candidates, self._policy) as samplers:
                self._rounds.run_once(samplers)
        except torch.OutOfMemoryError:
            self.selection = dataclasses.replace(self.selection, provisional=None)
            return True
        finally:
            call.driver.give_back()
        self._count += 1
        if self._count not in LOOKS:
            return False
        recent = self._rounds.samples[self.selection.chosen][-_FIRST:]
        disturbance = self._policy.disturbance(recent, call.driver)
        found = judged(self._rounds, self.selection.chosen, disturbance)
        is_over = found.provisional is None or self._count >= LOOKS[-1]
        if is_over:
            self.selection = dataclasses.replace(found, provisional=None)
        return is_over
