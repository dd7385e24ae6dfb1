"""A run of the table: rows compile side by side, and are then measured one after the other.

Rows are taken in groups. While one row of a group is measured the others wait, and no row compiles. Rows that ran out
of the device's memory beside others run again alone. Every finished row is written at once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import results
from benchmarks.table.process import Worker, WorkerError
from benchmarks.table.progress import Reporter
from benchmarks.table.results import Row
from benchmarks.table.worker import Job
from benchmarks.table.workload import Workload

GRACE = 60.0
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


def default_jobs() -> int:
    """Rows that compile side by side: one for each three cores, up to five, whose models fit on one GPU.

    >>> 1 <= default_jobs() <= 5
    True
    """
    return max(1, min(5, results.cores() // 3))


class Runner:
    """A run of some rows.

    Args:
        options: The options.
        rows: The rows, each with its number in the table.
        reporter: Shows how far it is.
        start_worker: Starts a worker for a job, with so many threads.
    """

    def __init__(
        self,
        options: Options,
        rows: Sequence[tuple[int, Workload]],
        reporter: Reporter,
        start_worker: Callable[[Job, int], Worker] = Worker,
    ) -> None:
        self._options, self._rows, self._reporter = options, list(rows), reporter
        self._start_worker = start_worker
        self._environment = results.environment()
        self._started = time.monotonic()
        self._longest = 0.0
        self.failed: list[str] = []
        self.unfinished: list[str] = []

    def run(self) -> None:
        """Measure all rows; those that time does not suffice for stay without a result."""
        groups = [self._rows[i : i + self._options.jobs] for i in range(0, len(self._rows), self._options.jobs)]
        while groups:
            group = groups.pop(0)
            if self._left() < self._longest or self._left() <= 0:
                self.unfinished += [row.name for rows in (group, *groups) for _, row in rows]
                return
            begin = time.monotonic()
            again = self._run_group(group)
            self._longest = max(self._longest, time.monotonic() - begin)
            groups += [[row] for row in again]

    def _left(self) -> float:
        """Seconds until the end of the run."""
        limit = self._options.limit
        return float("inf") if limit is None else self._started + limit - time.monotonic()

    def _run_group(self, group: list[tuple[int, Workload]]) -> list[tuple[int, Workload]]:
        """Compile rows side by side and measure them; returns those that need the device for themselves."""
        options, again = self._options, []
        measuring = len(group) * (options.seconds + _OVERHEAD)
        budget = min(options.budget, max((self._left() - measuring) * (0.6 if options.warm else 1.0), 1.0))
        with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as caches:
            jobs = {
                row.name: Job(
                    row.name, options.module, options.ways, str(Path(caches) / row.name), options.small,
                    options.inputs, options.seconds, budget,
                )
                for _, row in group
            }  # fmt: skip
            found: dict[str, Row] = {}
            with contextlib.ExitStack() as workers:
                compiled = self._compile(jobs, workers)
                for number, row in group:
                    outcome = compiled[row.name]
                    if _ran_out_of_memory(outcome) and len(group) > 1:
                        again.append((number, row))
                        text = "out of memory beside other rows; it runs again, alone"
                        self._reporter.finish(row.name, text, counts=False)
                        if isinstance(outcome, tuple):
                            outcome[0].stop()
                for number, row in group:
                    if (number, row) not in again and (self._left() > options.seconds or not _is_ready(compiled, row)):
                        result = self._measure(compiled[row.name], jobs[row.name])
                        found[row.name] = {**results.description(row, number), **result}
                        self._write(row.name, found[row.name], len(group))
            self.unfinished += [r.name for n, r in group if r.name not in found and (n, r) not in again]
            if options.warm:
                self._compile_again({n: jobs[n] for n in found if "error" not in found[n]}, found, len(group))
        return again

    def _write(self, name: str, row: Row, together: int) -> None:
        options = self._options
        row |= {"environment": self._environment, "small": options.small, "seconds": options.seconds,
                "compiled_together": together, "inputs_wanted": options.inputs}  # fmt: skip
        results.write(options.folder, name, row, options.ablation)

    # ---- compiling -------------------------------------------------------------------------------------------------

    def _compile(
        self, jobs: dict[str, Job], workers: contextlib.ExitStack
    ) -> dict[str, tuple[Worker, Row] | WorkerError]:
        """Start workers and wait until each has compiled its row, or failed."""
        threads = max(1, results.cores() // max(len(jobs), 1))
        started: dict[str, Worker] = {}
        for name, job in jobs.items():
            started[name] = self._start_worker(job, threads)
            workers.callback(started[name].stop)
        with concurrent.futures.ThreadPoolExecutor(max(len(jobs), 1)) as pool:
            try:
                outcomes = pool.map(lambda name: self._compiled(started[name]), jobs)
                return dict(zip(jobs, outcomes, strict=True))
            except BaseException:  # Ctrl-C: threads wait for their workers
                for worker in started.values():
                    worker.stop()
                raise

    def _compiled(self, worker: Worker) -> tuple[Worker, Row] | WorkerError:
        name, start = worker.job.row, time.monotonic()
        until = start + min(worker.job.budget + GRACE, max(self._left() - 10, 1.0))
        try:
            message = worker.wait_for(("ready",), until, lambda message: self._reporter.update(name, message))
        except WorkerError as error:
            return error
        self._reporter.line(f"{name}: compiled in {time.monotonic() - start:.0f} s")
        return worker, message

    def _compile_again(self, jobs: dict[str, Job], found: dict[str, Row], together: int) -> None:
        """Add the seconds that compiling takes in another process, with the caches that the first has filled."""
        jobs = {name: dataclasses.replace(job, compile_only=True) for name, job in jobs.items()}
        with contextlib.ExitStack() as workers:
            for name, outcome in self._compile(jobs, workers).items():
                if isinstance(outcome, WorkerError):
                    found[name]["warm_error"] = str(outcome)
                else:
                    for way, one in outcome[1]["ready"].items():
                        if way in found[name]["ways"] and "compile_s" in one:
                            found[name]["ways"][way]["warm_s"] = one["compile_s"]
                self._write(name, found[name], together)

    # ---- measuring -------------------------------------------------------------------------------------------------

    def _measure(self, outcome: tuple[Worker, Row] | WorkerError, job: Job) -> Row:
        """Measure a row that has been compiled; the result of a row, or why there is none."""
        if isinstance(outcome, tuple):
            worker, _ = outcome
            until = time.monotonic() + min(4 * (job.seconds + _OVERHEAD) + GRACE, self._left() + 20)
            worker.go()
            try:
                result = worker.wait_for(("result",), until, lambda message: self._reporter.update(job.row, message))
                self._reporter.finish(job.row, _in_words(result["result"]["ways"]))
                return result["result"]
            except WorkerError as error:
                outcome = error
                if worker.timed is not None:  # only the profiles are missing
                    self._reporter.finish(job.row, f"{_in_words(worker.timed['ways'])}; no profiles: {error}")
                    return {**worker.timed, "profile_error": str(error)}
            finally:
                worker.stop()
        self.failed.append(job.row)
        text = str(outcome)
        self._reporter.finish(job.row, f"failed: {text.splitlines()[0]}")
        return {"error": text}


def _is_ready(compiled: dict[str, tuple[Worker, Row] | WorkerError], row: Workload) -> bool:
    return isinstance(compiled[row.name], tuple)


def _ran_out_of_memory(outcome: tuple[Worker, Row] | WorkerError) -> bool:
    return outcome.out_of_memory if isinstance(outcome, WorkerError) else bool(outcome[1]["out_of_memory"])


def _in_words(ways: dict[str, Any]) -> str:
    """Median times of all ways, for a line."""
    parts = [f"{name} {one['wall_us'][1]:.0f} µs" if "wall_us" in one else f"{name} failed"
             for name, one in ways.items() if not name.startswith("limit of")]  # fmt: skip
    return ", ".join(parts)
