"""Rows that fail, run out of memory or of time, and the processes that measure them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.table import limits, places, process, results, row_processes, runner
from benchmarks.table.places import Place
from benchmarks.table.progress import Reporter
from benchmarks.table.rows import BenchError
from benchmarks.table.worker import Job
from pygraph.__main__ import main
from tests.bench_workloads import WORKLOADS

PREAMBLE = """
import json, os, sys, time

def say(**message):
    print(json.dumps(message), flush=True)

def ready(**found):
    job = json.loads(sys.argv[1])
    say(ready={way: found for way in job["ways"]}, reference="none", inputs=3, input_bytes=5, out_of_memory=False)

def obey(last="profile"):
    for line in sys.stdin:
        ((command, value),) = json.loads(line).items()
        if command == last:
            return
        say(did={way: {"wall_us": [1, 2, 3]} for way in json.loads(sys.argv[1])["ways"]} if command == "round" else {})

"""

SCRIPTS = {
    "good-i": "ready(); obey()",
    "dies-i": 'say(doing="compiling jit"); sys.exit("the last words")',
    "hangs-i": "time.sleep(60)",
    "dies-later-i": "ready(); obey('round'); os._exit(3)",
    "hangs-later-i": "ready(); obey('profile'); time.sleep(60)",
    "one-dies-i": "ready() if '\"jit\"' in sys.argv[1] else os._exit(5); obey('never')",
    "needs-memory-i": 'say(failed="OutOfMemoryError: …", out_of_memory=True)',
    "noisy-i": 'print("no JSON"); ready(); obey("never")',
}


class Started:
    """Starts workers with scripts instead of benchmarks, and counts them."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.workers: list[process.Worker] = []

    def __call__(self, job: Job, threads: int, place: Place | None = None) -> process.Worker:
        self.jobs.append(job)
        arguments = [sys.executable, "-c", PREAMBLE + SCRIPTS[job.row], process.command(job)[-1]]
        self.workers.append(process.Worker(job, threads, arguments, place))
        return self.workers[-1]


def run_scripts(
    folder: Path, names: list[str], places: Sequence[Place] = (), **options: Any
) -> tuple[runner.Outcome, Started]:
    started = Started()
    values = {"jobs": len(names), "budget": 0.5, "seconds": 0.1, "ways": ("eager",), **options}
    chosen = runner.Options(folder, module="tests.bench_workloads", **values)
    listed = [(i, renamed(name)) for i, name in enumerate(names)]
    with Reporter(Console(file=io.StringIO()), len(names)) as reporter:
        ended = runner.run(chosen, listed, reporter, places, started)
    return ended, started


def renamed(name: str) -> Any:
    return dataclasses.replace(WORKLOADS["tiny-i"], name=name)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE", 1.0)
    monkeypatch.setattr(runner, "_OVERHEAD", 0.0)
    monkeypatch.setattr(row_processes, "PATIENCE", 0.1)


@pytest.mark.usefixtures("impatient")
def test_rows_that_fail_say_so_and_others_go_on(tmp_path: Path) -> None:
    names = [name for name in SCRIPTS if name not in ("needs-memory-i", "one-dies-i")]
    run, started = run_scripts(tmp_path, names)
    found = {row["row"]: row for row in results.read(tmp_path, ablation=False)}
    assert list(found) == names
    assert found["noisy-i"]["ways"] == {"eager": {"wall_us": [1, 2, 3]}}
    assert (found["noisy-i"]["reference"], found["noisy-i"]["inputs"], found["noisy-i"]["input_bytes"]) == (
        "none",
        3,
        5,
    )
    assert found["dies-i"]["error"] == "the process ended with code 1 while compiling jit:\nthe last words"
    assert found["hangs-i"]["error"] == "not compiled: no answer in time while starting"
    assert found["dies-later-i"]["error"] == "the process ended with code 3 while measuring"
    ended = {"eager": {"wall_us": [1, 2, 3], "profile_error": "the process ended with code 0 while profiling"}}
    assert found["good-i"]["ways"] == ended
    late = {"eager": {"wall_us": [1, 2, 3], "profile_error": "no answer in time while profiling"}}
    assert found["hangs-later-i"]["ways"] == late
    assert sorted(run.failed) == ["dies-i", "dies-later-i", "hangs-i"]
    assert run.unfinished == []
    assert all(one._process.returncode is not None for one in started.workers)


@pytest.mark.usefixtures("impatient")
def test_a_process_that_dies_leaves_the_other_ways(tmp_path: Path) -> None:
    run, started = run_scripts(tmp_path, ["one-dies-i"], ways=("eager", "jit", "limit of eager"))
    assert [job.ways for job in started.jobs] == [("eager", "limit of eager"), ("jit",)]
    assert [job.processes for job in started.jobs] == [2, 2]
    (row,) = results.read(tmp_path, ablation=False)
    dead = {"error": "the process ended with code 5 while starting"}
    assert row["ways"]["jit"] == {"wall_us": [1, 2, 3]}
    assert row["ways"]["eager"] == row["ways"]["limit of eager"] == dead
    assert run.failed == []


def test_a_worker_ends_with_its_runner(tmp_path: Path) -> None:
    job = Job("hanging-i", "tests.bench_workloads", ("eager",), str(tmp_path), small=True)
    script = "from benchmarks.table.process import Worker; from benchmarks.table.worker import Job; import os, time\n"
    script += f"worker = Worker({job!r}, 1); worker.wait_for(['doing'], time.monotonic() + 60)\n"
    script += "print(worker._process.pid, flush=True); os._exit(9)"
    pid = int(subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=process.ROOT).stdout)
    deadline = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/cmdline").read_bytes():  # empty of one that has ended
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.usefixtures("impatient")
def test_warm_caches_are_those_of_the_first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'caches = json.loads(sys.argv[1])["caches"]; os.makedirs(caches, exist_ok=True); '
    script += 'ready(compile_s=len(os.listdir(caches))); open(f"{caches}/code", "w").close(); obey("never")'
    monkeypatch.setitem(SCRIPTS, "good-i", script)
    _, started = run_scripts(tmp_path, ["good-i"], warm=True)
    assert [job.compile_only for job in started.jobs] == [False, True]
    (row,) = results.read(tmp_path, ablation=False)
    assert row["ways"]["eager"] == {"compile_s": 0, "wall_us": [1, 2, 3], "warm_s": 1}


@pytest.mark.usefixtures("impatient")
def test_a_row_without_memory_runs_again_alone(tmp_path: Path) -> None:
    run, started = run_scripts(tmp_path, ["needs-memory-i", "good-i"])
    assert [job.row for job in started.jobs] == ["needs-memory-i", "good-i", "needs-memory-i", "needs-memory-i"]
    assert run.failed == ["needs-memory-i"]
    found = {row["row"]: row for row in results.read(tmp_path, ablation=False)}
    assert found["needs-memory-i"]["compiled_together"] == 1
    assert "OutOfMemoryError" in found["needs-memory-i"]["error"]
    assert "error" not in found["good-i"]


@pytest.mark.usefixtures("impatient")
def test_ways_without_memory_compile_again_when_the_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
job, tries = json.loads(sys.argv[1]), "TRIES"
if job["ways"] == ["eager"]:
    ready()
else:
    with open(tries, "a") as file:
        file.write("x")
    if len(open(tries).read()) <= 2:
        say(failed="OutOfMemoryError: …", out_of_memory=True)
    else:
        ready()
obey("profile")
"""
    monkeypatch.setitem(SCRIPTS, "good-i", script.replace("TRIES", str(tmp_path / "tries")))
    _, started = run_scripts(tmp_path, ["good-i"], ways=("eager", "jit", "backend"), budget=5.0)
    assert [job.ways for job in started.jobs] == [(way,) for way in ("eager", "jit", "backend", "jit", "backend")]
    (row,) = results.read(tmp_path, ablation=False)
    assert len(row["ways"]) == 3
    assert all("wall_us" in way for way in row["ways"].values())
    assert not row["out_of_memory"]


LATE = """
job = json.loads(sys.argv[1])
late = [] if job["budget"] > 90 else WAYS
found = {way: {"error": "not compiled: time"} if way in late else {} for way in job["ways"]}
say(ready=found, reference="none", inputs=3, input_bytes=5, out_of_memory=False)
obey("profile")
"""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("late", "names", "written"),
    [
        (["jit"], ["good-i", "noisy-i"], ["good-i"]),  # the second might have more time in a call of its own
        (["eager", "backend", "jit"], ["good-i"], []),
        ([], ["good-i", "noisy-i"], ["good-i", "noisy-i"]),
    ],
)
def test_rows_that_a_limit_cuts_short_wait_for_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: list[str], names: list[str], written: list[str]
) -> None:
    for name in names:
        monkeypatch.setitem(SCRIPTS, name, LATE.replace("WAYS", repr(late)))
    ended, _ = run_scripts(tmp_path, names, jobs=1, limit=60.0, budget=900.0, ways=("eager", "backend", "jit"))
    assert [row["row"] for row in results.read(tmp_path, ablation=False)] == written
    assert ended.unfinished == [name for name in names if name not in written]
    assert ended.failed == []


@pytest.mark.usefixtures("impatient")
def test_rows_on_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU takes the next row when it is free, and has cores of its own."""
    core = min(os.sched_getaffinity(0))
    script = f"""
place = {{"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "cores": sorted(os.sched_getaffinity(0))}}
with open("{tmp_path}/places", "a") as file:
    file.write(json.dumps(place) + "\\n")
while len(open("{tmp_path}/places").readlines()) < 2:
    time.sleep(0.01)  # until the other one has begun
ready(); obey("never")
"""
    for name in ("good-i", "noisy-i"):
        monkeypatch.setitem(SCRIPTS, name, script)
    where = [Place("3", (core,)), Place("5", (core,))]
    ended, started = run_scripts(tmp_path, ["good-i", "noisy-i", "dies-i"], where, jobs=1, budget=20.0)
    assert ended == (["dies-i"], [])
    assert len(started.jobs) == 3
    found = [json.loads(line) for line in (tmp_path / "places").read_text().splitlines()]
    assert sorted(one["gpu"] for one in found) == ["3", "5"]
    assert [one["cores"] for one in found] == [[core], [core]]
    for row in results.read(tmp_path, ablation=False):
        assert row["environment"]["cores"] == 1


def test_places_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,4,6")
    found = places.places(2)
    assert [one.gpu for one in found] == ["1", "4"]
    assert {core for one in found for core in one.cores} == os.sched_getaffinity(0)
    with pytest.raises(BenchError, match="bench --devices 4: there are 3 GPUs"):
        places.places(4)


@pytest.mark.usefixtures("impatient")
def test_an_interruption_ends_all_processes_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = runner.Runner.run

    def run(self: runner.Runner) -> None:
        if self._environment["cores"] == 2:
            raise KeyboardInterrupt
        interrupted(self)

    monkeypatch.setattr(runner.Runner, "run", run)
    where = [Place("0", (0, 1)), Place("1", (0,))]
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_scripts(tmp_path, ["hangs-i", "hangs-i"], where, jobs=1, budget=30.0)
    assert time.monotonic() - begin < 20
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.usefixtures("impatient")
def test_groups_begin_while_there_is_time_to_measure_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], iter([30.0, 26.0])

    def run_group(self: runner.Runner, group: list[runner.Numbered]) -> list[runner.Numbered]:
        now[0] += next(took)
        return []

    monkeypatch.setattr(runner.Runner, "_run_group", run_group)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    ended, _ = run_scripts(tmp_path, ["good-i", "noisy-i", "dies-i"], jobs=1, limit=60.0, seconds=5.0)
    assert ended == ([], ["dies-i"])


def test_a_file_that_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut-i.json").write_text('{"row": "cut-')
    assert main(["bench", "--render", "--out", str(tmp_path)]) == 2
    assert "cut-i.json is no result" in capsys.readouterr().err


def test_an_alarm_ends_what_takes_too_long() -> None:
    def compile_for_long() -> None:
        for _ in range(500):
            with contextlib.suppress(Exception):
                time.sleep(0.01)
        pytest.fail("not ended")

    for seconds in (0.05, -1.0):
        with pytest.raises(limits.OutOfTimeError), limits.alarm(seconds):
            compile_for_long()


def test_errors_of_memory_are_known_by_their_cause() -> None:
    error = RuntimeError("compiling failed")
    assert not limits.is_out_of_memory(error)
    error.__cause__ = torch.OutOfMemoryError("no memory")
    assert limits.is_out_of_memory(error)


def test_the_limit_is_the_faster_capture() -> None:
    found: dict[str, dict[str, Any]] = {
        "limit of compile": {"wall_us": [1, 20, 30]},
        "limit of eager": {"wall_us": [1, 10, 30]},
    }
    row_processes._add_limit(found)
    assert found["limit"] == {"wall_us": [1, 10, 30], "is": "limit of eager"}
