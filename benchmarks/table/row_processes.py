"""The processes of a row: each builds some of its ways, all compile side by side, and they are measured in turns."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from benchmarks.table import ways
from benchmarks.table.measuring import ROUNDS
from benchmarks.table.process import Worker, WorkerError
from benchmarks.table.results import Row
from benchmarks.table.worker import NOT_COMPILED, Job

Update = Callable[[str, int, int], None]
"""Is called with what is being done, and how far that is."""

Group = tuple[str, ...]
"""The ways of one process."""

FEWEST_ROUNDS = 3
"""Rounds that are run even if that takes too long."""

PATIENCE = 30.0
"""Seconds that an answer may come late."""


class RowProcesses:
    """The processes of one row.

    Args:
        job: The job, of all ways.
        threads: Tells how many threads and processes that of some ways may compile with.
        start_worker: Starts a process for a job, with so many threads.

    Attributes:
        job: The job.
    """

    def __init__(self, job: Job, threads: Callable[[Group], int], start_worker: Callable[[Job, int], Worker]) -> None:
        groups = ways.processes(job.ways)
        self.job = job
        self._failures: dict[Group, WorkerError] = {}
        self._ready: list[Group] = []
        self._short: set[Group] = set()
        self._found: dict[str, Row] = {name: {} for name in job.ways}
        self._about: Row = {}
        self._start = lambda group: start_worker(
            dataclasses.replace(job, ways=group, processes=len(groups)), threads(group)
        )
        self._workers: dict[Group, Worker] = {group: self._start(group) for group in groups}

    def stop(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.stop()

    # ---- compiling -------------------------------------------------------------------------------------------------

    def compile(self, until: float, update: Update) -> None:
        """Wait until every process has compiled its ways, or failed."""
        with concurrent.futures.ThreadPoolExecutor(len(self._workers)) as pool:
            list(pool.map(lambda group: self._wait_for(group, until, update), self._workers))

    def compile_again(self, until: Callable[[], float], update: Update) -> None:
        """Compile those again for which there was too little memory, one after the other.

        Processes that have compiled hold what they need to run, of which compiling takes up to three times as much.

        Args:
            until: When one that begins now is too late, by the monotonic clock.
            update: Is told how far it is.
        """
        again, self._short = [group for group in self._workers if group in self._short], set()
        for group in again:
            self._workers[group].stop()
            self._failures.pop(group, None)
            self._ready = [one for one in self._ready if one != group]
            self._found |= {name: {} for name in group}
            self._workers[group] = self._start(group)
            self._wait_for(group, until(), update)

    @property
    def out_of_memory(self) -> bool:
        """Whether the device had too little memory for a process."""
        return bool(self._short)

    def _wait_for(self, group: Group, until: float, update: Update) -> None:
        def show(message: Row) -> None:
            update(message["doing"], len(self._ready) + len(self._failures), len(self._workers))

        try:
            message = self._workers[group].wait_for(("ready",), until, show)
        except WorkerError as error:
            self._fail(group, WorkerError(f"{NOT_COMPILED}{error}") if error.is_late else error)
            return
        self._ready.append(group)
        if message["out_of_memory"]:
            self._short.add(group)
        self._about = {name: message[name] for name in ("reference", "inputs", "input_bytes")}
        for name, found in message["ready"].items():
            self._found[name] |= found

    def _going_on(self) -> list[Group]:
        """The processes that have not failed, in the order of the ways."""
        return [group for group in self._workers if group in self._ready]

    def not_compiled(self) -> list[str]:
        """The ways for which there was no time."""
        return [name for name, found in self._found.items() if found.get("error", "").startswith(NOT_COMPILED)]

    @property
    def is_ready(self) -> bool:
        """Whether there is something to measure."""
        return bool(self._ready)

    def _fail(self, group: Group, error: WorkerError, reason: str = "error") -> None:
        """Say of the ways of a process that has failed why they have no result, or no profile."""
        self._failures[group] = error
        if error.out_of_memory:
            self._short.add(group)
        for name in group:
            self._found[name].setdefault(reason, str(error))
        if group in self._ready:
            self._ready.remove(group)
            self._workers[group].stop()

    # ---- measuring -------------------------------------------------------------------------------------------------

    def measure(self, seconds: float, until: float, update: Update) -> None:
        """Measure all ways in turns; every round begins with those of another process.

        Args:
            seconds: How long that takes, about.
            until: When no more rounds begin, by the monotonic clock.
            update: Is told how far it is.
        """
        share = seconds / ROUNDS / max(len(self.job.ways), 1)
        self._ask_each(self._going_on(), until, calibrate=share)
        for number in range(ROUNDS):
            if number >= FEWEST_ROUNDS and time.monotonic() > until:
                break
            update("measuring", number, ROUNDS)
            groups = self._going_on()
            first = number % max(len(groups), 1)
            self._ask_each(groups[first:] + groups[:first], until, round=number)

    def profile(self, until: float, update: Update) -> None:
        """Profile the ways, one after the other; those that time does not suffice for have times without a profile."""
        groups = self._going_on()
        for number, group in enumerate(groups):
            update("profiling", number, len(groups))
            self._ask_each([group], until, "profile_error", profile=True)

    def _ask_each(self, groups: list[Group], until: float, reason: str = "error", **command: Any) -> None:
        """Have processes do something, one after the other; one that fails is not asked again."""
        for group in groups:
            try:
                for name, found in self._workers[group].ask(until + PATIENCE, **command).items():
                    self._found[name] |= found
            except WorkerError as error:
                self._fail(group, error, reason)

    # ---- results ---------------------------------------------------------------------------------------------------

    def result(self) -> Row:
        """All that has been found out, or why no process has found anything."""
        if len(self._failures) == len(self._workers) and not any("wall_us" in one for one in self._found.values()):
            return {"error": str(next(iter(self._failures.values())))}
        found = {name: one if "error" not in one else _without_times(one) for name, one in self._found.items()}
        _add_limit(found)
        return {"ways": found, "out_of_memory": self.out_of_memory, **self._about}

    def seconds_of_compiling(self) -> dict[str, float]:
        """How long each way took to compile, of those that did."""
        return {name: one["compile_s"] for name, one in self._found.items() if "compile_s" in one}


def _without_times(found: Row) -> Row:
    """What is known of a way that failed while it was measured."""
    return {name: value for name, value in found.items() if name not in ("wall_us", "cpu_us", "iterations")}


def _add_limit(found: dict[str, dict[str, Any]]) -> None:
    """Add the faster of the two captures as ``limit``, or why there is none."""
    both = {name: found[name] for name in ("limit of compile", "limit of eager") if name in found}
    timed = {name: one for name, one in both.items() if "wall_us" in one}
    if timed:
        best = min(timed, key=lambda name: timed[name]["wall_us"][1])
        found["limit"] = {**timed[best], "is": best}
    elif both:
        found["limit"] = {"error": "; ".join(f"{name}: {one.get('error')}" for name, one in both.items())}
