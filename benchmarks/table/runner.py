"""A run of the table: rows compile side by side, and are then measured one after the other.

Rows are taken in groups. While one row of a group is measured the others wait, and no row compiles. Rows that ran out
of the device's memory beside others run again alone. Every finished row is written at once. On several GPUs each takes
the next group when it is free.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.table import results, ways
from benchmarks.table.places import Place
from benchmarks.table.process import Worker
from benchmarks.table.progress import Reporter
from benchmarks.table.results import Row
from benchmarks.table.row_processes import RowProcesses
from benchmarks.table.worker import Job
from benchmarks.table.workload import Workload

GRACE = 20.0
"""Seconds that a worker may be late before it is ended: an operation of the compiler cannot be interrupted."""

_OVERHEAD = 25.0
"""Seconds of profiling and of calibrating a row, besides the seconds of measuring."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        folder: Where results are written.
        ways: The ways to build, in order.
        module: The module with the workloads.
        ablation: Whether the ways are those of the ablation, whose results have files of their own.
        small: Whether models are small.
        inputs: How many batches each row has.
        seconds: How long each row is measured.
        jobs: How many rows compile side by side.
        budget: Seconds for compiling all ways of a row.
        limit: Seconds after which the run has ended; None for no limit.
        warm: Whether each row compiles again, in another process with the caches of the first.
    """

    folder: Path
    ways: tuple[str, ...]
    module: str
    ablation: bool = False
    small: bool = False
    inputs: int = 100
    seconds: float = 10.0
    jobs: int = 1
    budget: float = 900.0
    limit: float | None = None
    warm: bool = False


def default_jobs(cores: int) -> int:
    """Rows that compile side by side: one for each five cores, up to three, as every way of a row is a process.

    >>> default_jobs(2), default_jobs(12), default_jobs(64)
    (1, 2, 3)
    """
    return max(1, min(3, cores // 5))


Numbered = tuple[int, Workload]
"""A row with its number in the table."""

Groups = collections.deque[list[Numbered]]
"""Groups of rows that wait for being measured."""


def groups_of(rows: Sequence[Numbered], jobs: int) -> Groups:
    """Divide rows into groups that compile side by side."""
    return collections.deque(list(rows[i : i + jobs]) for i in range(0, len(rows), jobs))


class Outcome(NamedTuple):
    """The names of rows that have failed, and of those that time did not suffice for."""

    failed: list[str]
    unfinished: list[str]


def run(
    options: Options,
    rows: Sequence[Numbered],
    reporter: Reporter,
    places: Sequence[Place] = (),
    start_worker: Callable[..., Worker] = Worker,
) -> Outcome:
    """Measure rows, on several GPUs if there are places for that.

    Args:
        options: The options.
        rows: The rows.
        reporter: Shows how far it is.
        places: The places; none for the GPU that is used by default.
        start_worker: Starts a worker for a job, with so many threads, at a place.
    """
    groups = groups_of(rows, options.jobs)
    runners = [Runner(options, groups, reporter, start_worker, place) for place in (places or (None,))]
    if len(runners) == 1:
        runners[0].run()
    else:
        with concurrent.futures.ThreadPoolExecutor(len(runners)) as pool:
            try:
                list(pool.map(Runner.run, runners))
            except BaseException:  # Ctrl-C: threads wait for their processes
                for one in runners:
                    one.stop()
                raise
    failed = [name for one in runners for name in one.failed]
    unfinished = [name for one in runners for name in one.unfinished]
    return Outcome(failed, unfinished + [row.name for group in groups for _, row in group])


class Runner:
    """A run of some rows on one device.

    Args:
        options: The options.
        groups: The groups of rows, which other runners may take some of.
        reporter: Shows how far it is.
        start_worker: Starts a worker for a job, with so many threads, at a place.
        place: The device and the cores; None for those that this process has.

    Attributes:
        failed: Rows that have failed.
        unfinished: Rows that were begun, and that time did not suffice for.
    """

    def __init__(
        self,
        options: Options,
        groups: Groups,
        reporter: Reporter,
        start_worker: Callable[..., Worker] = Worker,
        place: Place | None = None,
    ) -> None:
        self._options, self._groups, self._reporter = options, groups, reporter
        self._start_worker = start_worker if place is None else functools.partial(start_worker, place=place)
        self._environment = results.environment()
        if place is not None:
            self._environment["cores"] = len(place.cores)
        self._started = time.monotonic()
        self._is_first = True
        self._running: list[RowProcesses] = []
        self._is_stopped = False
        self.failed: list[str] = []
        self.unfinished: list[str] = []

    def stop(self) -> None:
        """End all processes, and write no more results."""
        self._is_stopped = True
        for processes in self._running:
            processes.stop()

    def run(self) -> None:
        """Measure groups while there are any, and time to measure one."""
        while self._left() > self._options.seconds + _OVERHEAD and not self._is_stopped:
            try:
                group = self._groups.popleft()
            except IndexError:
                return
            again = self._run_group(group)
            self._is_first = False
            self._groups.extend([row] for row in again)

    def _left(self) -> float:
        """Seconds until the end of the run."""
        limit = self._options.limit
        return float("inf") if limit is None else self._started + limit - time.monotonic()

    def _run_group(self, group: list[Numbered]) -> list[Numbered]:
        """Compile rows side by side and measure them; returns those that need the device for themselves."""
        options, again = self._options, []
        measuring = len(group) * (options.seconds + _OVERHEAD)
        budget = min(options.budget, max((self._left() - measuring) * (0.6 if options.warm else 1.0), 1.0))
        is_cut = budget < options.budget
        with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as caches:
            jobs = {
                row.name: Job(
                    row.name, options.module, options.ways, str(Path(caches) / row.name), options.small,
                    options.inputs, options.seconds, budget,
                )
                for _, row in group
            }  # fmt: skip
            found: dict[str, Row] = {}
            with contextlib.ExitStack() as stack:
                compiled = self._compile(jobs, stack)
                for number, row in group:
                    if compiled[row.name].out_of_memory and len(group) > 1:
                        again.append((number, row))
                        text = "out of memory beside other rows; it runs again, alone"
                        self._reporter.finish(row.name, text, counts=False)
                        compiled[row.name].stop()
                for number, row in group:
                    processes = compiled[row.name]
                    if is_cut and self._is_better_begun_anew(processes):
                        continue
                    if (number, row) not in again and (self._left() > options.seconds or not processes.is_ready):
                        found[row.name] = {**results.description(row, number), **self._measured(processes)}
                        self._write(row.name, found[row.name], len(group))
            self.unfinished += [r.name for n, r in group if r.name not in found and (n, r) not in again]
            if options.warm:
                self._compile_again({n: jobs[n] for n in found if "error" not in found[n]}, found, len(group))
        return again

    def _is_better_begun_anew(self, processes: RowProcesses) -> bool:
        """Whether a row lacks ways for want of time that another call, which begins with it, may have."""
        missing = processes.not_compiled()
        return bool(missing) and (not self._is_first or len(missing) >= len(processes.job.ways) - 1)

    def _write(self, name: str, row: Row, together: int) -> None:
        if self._is_stopped:
            return
        options = self._options
        row |= {"environment": self._environment, "small": options.small, "seconds": options.seconds,
                "compiled_together": together, "inputs_wanted": options.inputs}  # fmt: skip
        results.write(options.folder, name, row, options.ablation)

    # ---- compiling -------------------------------------------------------------------------------------------------

    def _compile(self, jobs: dict[str, Job], stack: contextlib.ExitStack) -> dict[str, RowProcesses]:
        """Start the processes of rows and wait until they have compiled their ways, or failed."""
        count = sum(len(ways.processes(job.ways)) for job in jobs.values())
        threads = functools.partial(ways.threads, cores=self._environment["cores"], processes=count)
        started: dict[str, RowProcesses] = {}
        for name, job in jobs.items():
            started[name] = RowProcesses(job, threads, self._start_worker)
            stack.callback(started[name].stop)
        self._running = list(started.values())
        with concurrent.futures.ThreadPoolExecutor(max(len(jobs), 1)) as pool:
            try:
                list(pool.map(functools.partial(self._wait_for, is_alone=len(jobs) == 1), started.values()))
            except BaseException:  # Ctrl-C: threads wait for their processes
                self.stop()
                raise
        return started

    def _wait_for(self, processes: RowProcesses, is_alone: bool) -> None:
        job, start = processes.job, time.monotonic()

        def until() -> float:
            return time.monotonic() + min(job.budget + GRACE, max(self._left() - 10, 1.0))

        processes.compile(until(), self._updating(job.row))
        if is_alone and processes.out_of_memory:
            processes.compile_again(until, self._updating(job.row))
        if processes.is_ready:
            self._reporter.line(f"{job.row}: compiled in {time.monotonic() - start:.0f} s")

    def _updating(self, row: str) -> Callable[[str, int, int], None]:
        return lambda doing, done, of: self._reporter.update(row, doing, done, of)

    def _compile_again(self, jobs: dict[str, Job], found: dict[str, Row], together: int) -> None:
        """Add the seconds that compiling takes in other processes, with the caches that the first have filled."""
        jobs = {name: dataclasses.replace(job, compile_only=True) for name, job in jobs.items()}
        with contextlib.ExitStack() as stack:
            for name, processes in self._compile(jobs, stack).items():
                for way, seconds in processes.seconds_of_compiling().items():
                    found[name]["ways"][way]["warm_s"] = seconds
                self._write(name, found[name], together)

    # ---- measuring -------------------------------------------------------------------------------------------------

    def _measured(self, processes: RowProcesses) -> Row:
        """Measure a row that has been compiled; its result, or why there is none."""
        job, update = processes.job, self._updating(processes.job.row)
        until = time.monotonic() + min(4 * (job.seconds + _OVERHEAD) + GRACE, self._left() + 20)
        processes.measure(job.seconds, until, update)
        processes.profile(until, update)
        processes.stop()
        found = processes.result()
        if "error" in found:
            self.failed.append(job.row)
            self._reporter.finish(job.row, f"failed: {found['error'].splitlines()[0]}")
        else:
            self._reporter.finish(job.row, _in_words(found["ways"]))
        return found


def _in_words(found: dict[str, Any]) -> str:
    """Median times of all ways, for a line."""
    parts = [f"{name} {one['wall_us'][1]:.0f} µs" if "wall_us" in one else f"{name} failed"
             for name, one in found.items() if not name.startswith("limit of")]  # fmt: skip
    return ", ".join(parts)
