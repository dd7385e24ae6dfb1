"""A process that compiles and measures ways of one row: ``python -m benchmarks.table.worker JOB``, where JOB is JSON.

It writes JSON lines to what was standard output: ``{"doing": …}`` as it goes on, ``{"ready": …}`` when all ways are
compiled. Then it reads commands, a line of JSON each, and answers each by ``{"did": …}`` with what it has found about
each way: ``{"calibrate": SECONDS}`` and ``{"round": NUMBER}`` measure, ``{"profile": true}`` has the profiler see them.
Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.table.limits import (
    OutOfTimeError,
    alarm,
    clean,
    described,
    give_back,
    is_out_of_memory,
    most_reserved,
    use_caches,
)

NOT_COMPILED = "not compiled: "
"""How the reason begins why a way was not compiled, where time was over."""

CALLS = 3
"""Iterations that are part of compiling: the third is the first that finds everything compiled and recorded."""


_SECONDS_BETWEEN_LOOKS = 2.0
"""How often a worker looks whether its runner is there."""

MOST_SELECTIONS = 24
"""Selections that a result has: a model with sizes that depend on data has hundreds."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A row, and what is to be done with it.

    Attributes:
        row: Its name.
        module: The module with ``WORKLOADS``.
        ways: The ways to build, in order.
        caches: A folder for compiled code; each way has caches of its own below it.
        small: Whether the model is the small one.
        inputs: How many batches are wanted.
        seconds: How long measuring takes.
        budget: Seconds for compiling all ways; those that it does not suffice for are not compiled.
        processes: How many processes have this row on the device.
        compile_only: Whether only the times of compiling are wanted.
    """

    row: str
    module: str
    ways: tuple[str, ...]
    caches: str
    small: bool = False
    inputs: int = 100
    seconds: float = 10.0
    budget: float = 900.0
    processes: int = 1
    compile_only: bool = False


Say = Callable[..., None]


def main(argv: list[str]) -> int:
    """Do a job, and write its result; 1 if there is none."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    data = json.loads(argv[0])
    try:
        run(Job(**{**data, "ways": tuple(data["ways"])}), say)
    except Exception as error:
        traceback.print_exc()
        say(failed=described(error), out_of_memory=is_out_of_memory(error))
        return 1
    answers.flush()
    sys.stderr.flush()
    os._exit(0)  # tearing down compilers, pools and graphs may hang


def run(job: Job, say: Say) -> None:
    """Compile ways of a row, and obey commands until there are no more."""
    say(doing="loading")
    from benchmarks.table.rows import load
    from benchmarks.table.setting import Setting

    start = time.monotonic()
    workload = load(job.module)[job.row]
    device = _prepared(len(job.ways))
    setting = Setting(workload, job.small, device, job.inputs, job.processes)
    row = _Row(job, setting, say, start + job.budget)
    row.compile()
    say(ready=row.found, reference=row.reference_name, inputs=len(setting.batches), input_bytes=setting.input_bytes,
        out_of_memory=row.out_of_memory)  # fmt: skip
    for line in sys.stdin:
        ((command, value),) = json.loads(line).items()
        say(
            did=row.calibrate(value) if command == "calibrate" else row.round() if command == "round" else row.profile()
        )


def _prepared(ways: int) -> Any:
    """The device, with all loaded that a compilation would otherwise load."""
    import pygraph
    from pygraph.process import extension

    extension.start(wait=True)
    device = pygraph.default_device()
    if device.type == "cuda":  # Inductor has no code for the emulated device
        import torch
        import torch._dynamo
        import torch._inductor.compile_fx

        # All copies of a model share code objects, which have one entry for each way and reason to compile.
        torch._dynamo.config.recompile_limit *= ways + 1
        torch._dynamo.config.accumulated_recompile_limit *= ways + 1
    return device


class _Row:
    """A row being compiled and measured.

    Args:
        job: The job.
        setting: The row on the device.
        say: Writes a message.
        deadline: The end of compiling, by the monotonic clock.
    """

    def __init__(self, job: Job, setting: Any, say: Say, deadline: float) -> None:
        self._job, self._setting, self._say, self._deadline = job, setting, say, deadline
        self.found: dict[str, dict[str, Any]] = {}
        self.reference_name: str | None = None
        self.out_of_memory = False
        self._made: dict[str, Any] = {}
        self._reference: Any = None
        self._meters: Any = None

    def compile(self) -> None:
        """Build every way, let it run, and check its results."""
        from benchmarks.table.checking import reference

        if not self._job.compile_only:
            self._say(doing="eager in float32")
            try:
                self._reference = reference(self._setting)
                self.reference_name = self._reference.name
            except Exception as error:  # results are not checked then
                self.out_of_memory |= is_out_of_memory(error)
                self.reference_name = f"none: {described(error)}"
            clean(self._setting.device)
        for name in self._job.ways:
            self._say(doing=f"compiling {name}")
            try:
                with alarm(self._deadline - time.monotonic()):
                    self.found[name] = self._compiled(name)
            except OutOfTimeError:
                self._failed(name, f"{NOT_COMPILED}the {self._job.budget:.0f} s for compiling this row were over")
            except Exception as error:  # one way that fails must not hide the others
                traceback.print_exc()
                self.out_of_memory |= is_out_of_memory(error)
                self._failed(name, described(error))
        clean(self._setting.device)  # for the processes that still compile

    def _failed(self, name: str, text: str) -> None:
        self._made.pop(name, None)
        self.found[name] = {"error": text}
        with contextlib.suppress(Exception):
            clean(self._setting.device)

    def _compiled(self, name: str) -> dict[str, Any]:
        """A way that has run: seconds of compiling, memory, and whether its results are right."""
        import torch

        from benchmarks.table import checking, ways
        from benchmarks.table.setting import synchronize

        setting = self._setting
        use_caches(Path(self._job.caches) / ways.cache_of(name).replace(" ", "-"))
        before = clean(setting.device)
        torch.manual_seed(0)
        start = time.perf_counter()
        way = ways.build(name, setting)
        if not way.is_limit:  # a limit is compiled by now; else only the model has been copied
            start = time.perf_counter()
        first = self._losses(way) if setting.training and not way.is_limit else None
        if first is None:
            for i in range(CALLS):
                way.run(setting.batches[i % len(setting.batches)])
        synchronize(setting.device)
        found: dict[str, Any] = {}
        found["compile_s"] = round(first[1] if first else time.perf_counter() - start, 2)
        found["first_reserved"] = most_reserved(setting.device, before)
        if self._reference is not None and not way.is_limit:
            if first:
                far = checking.loss_distance(first[0], self._reference.results)
            else:
                far = self._reference.distance_of(way.run, setting)
            found |= self._reference.check(far, name in ways.DRAWS_OTHERWISE)
        for i in range(CALLS):
            way.run(setting.batches[i % len(setting.batches)])
        clean(setting.device)
        for i in range(CALLS):
            way.run(setting.batches[i % len(setting.batches)])
        synchronize(setting.device)
        found["steady_reserved"] = most_reserved(setting.device, before)
        if self._job.compile_only:
            return found
        self._made[name] = way
        return found

    def _losses(self, way: Any) -> tuple[list[float], float]:
        """The losses of the first steps, and the seconds until `CALLS` of them were done."""
        import torch

        from benchmarks.table.checking import STEPS
        from benchmarks.table.setting import synchronize

        torch.manual_seed(0)
        start, losses = time.perf_counter(), []
        seconds = 0.0
        for i in range(STEPS):
            losses.append(float(way.run(self._setting.batches[i % len(self._setting.batches)])))
            if i == CALLS - 1:
                synchronize(self._setting.device)
                seconds = time.perf_counter() - start
        return losses, seconds

    def calibrate(self, seconds: float) -> dict[str, Any]:
        """Warm up, and choose how many iterations a round of these seconds has for each way."""
        from benchmarks.table.measuring import Meters
        from benchmarks.table.setting import synchronize

        setting = self._setting
        clean(setting.device)
        runs = {name: way.run for name, way in self._made.items()}
        self._meters = Meters(runs, setting.batches, lambda: synchronize(setting.device))
        self._meters.calibrate(seconds)
        give_back(setting.device)
        return {}

    def round(self) -> dict[str, Any]:
        """Measure every way once more, and leave the device's memory to other processes; the times of each so far."""
        self._meters.round()
        give_back(self._setting.device)
        times = self._meters.result()
        self._made = {name: way for name, way in self._made.items() if "error" not in times[name]}
        return times

    def profile(self) -> dict[str, Any]:
        """Profile every way, and ask pygraph for its report."""
        return {name: _reported(way, self._setting) | _profiled(way, self._setting) for name, way in self._made.items()}


def _reported(way: Any, setting: Any) -> dict[str, Any]:
    """Bytes that pygraph says it copies per iteration, and what does not run in the best way."""
    from benchmarks.table.tracing import ITERATIONS, bytes_per_iteration

    if way.report is None:
        return {}
    try:
        before = way.report().to_dict()["entries"]
        for i in range(ITERATIONS):
            way.run(setting.batches[i % len(setting.batches)])
        report = way.report().to_dict()
        copied = bytes_per_iteration(before, report["entries"], ITERATIONS)
        fallbacks = [f"{one['what']}: {one['reason']} ({one['source']})" for one in report["fallbacks"]]
        return {"bytes_copied": copied, "fallbacks": fallbacks[:8], "patched_nodes": report["patched_nodes"],
                "selections": _selections(report["entries"])[:MOST_SELECTIONS]}  # fmt: skip
    except Exception as error:  # times are worth having without it
        return {"report_error": described(error)}


def _selections(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How the regions run that were selected, and why, of entries with calls."""
    found = [(entry["function"], region) for entry in entries if entry["calls"] for region in entry["regions"]]
    return [
        {"function": function, "way": region["way"], "reason": region["reason"], **(region["selection"] or {})}
        for function, region in found
        if region["kind"] == "graph"
    ]


def _profiled(way: Any, setting: Any) -> dict[str, Any]:
    from benchmarks.table.tracing import profile

    if setting.device.type != "cuda":
        return {}
    try:
        return {"profile": profile(way.run, setting.batches)}
    except Exception as error:  # times are worth having without it
        return {"profile_error": described(error)}


def _end_with(runner: int) -> None:
    """End this process and those that it has started when its runner has: it would hold the device's memory."""
    while os.getppid() == runner:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if os.getpgrp() == os.getpid():  # a runner has started it
        threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    sys.exit(main(sys.argv[1:]))
