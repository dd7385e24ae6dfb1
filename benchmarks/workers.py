"""Units of work done by worker processes, which are replaced when they hang, die or lose the device.

A unit consists of cases that are numbered from 0. A worker announces every case before it runs it, so that after a
death the next worker goes on behind the case that was fatal, which is recorded as an error.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from conformance_cases import DeviceLostError

_LIVES = 3
"""How many workers one unit may cost."""

Record = dict[str, Any]
Serve = Callable[[Any, int], Iterator[dict[str, Any]]]
"""Answers for a unit from its n-th case on: ``{"begin": n}`` before each case, and ``{"record": …, "case": n}``."""


def work(prepare: Callable[[], Serve]) -> None:
    """Be a worker: serve requests from standard input until it ends, in JSON lines on what was standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    serve = prepare()
    answers.write('{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        try:
            for answer in serve(request["unit"], request["start"]):
                answers.write(json.dumps(answer) + "\n")
        except DeviceLostError as error:
            answers.write(json.dumps({"lost": str(error)}) + "\n")
            answers.flush()
            os._exit(3)  # tearing down CUDA after such an error may hang
        answers.write('{"end": true}\n')


class _Worker:
    """A worker process, as its master sees it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._rest = b""
        self._answer(180.0)

    def ask(self, unit: Any, start: int, timeout: float) -> Iterator[dict[str, Any]]:
        """Answers for a unit; raises RuntimeError when the worker dies or takes longer than ``timeout`` for one."""
        self._input.write(json.dumps({"unit": unit, "start": start}).encode() + b"\n")
        self._input.flush()
        while "end" not in (answer := self._answer(timeout)):
            if "lost" in answer:
                raise RuntimeError(f"the device was lost: {answer['lost']}")
            yield answer

    def _answer(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._rest:
            if not self._selector.select(max(deadline - time.monotonic(), 0.0)):
                raise RuntimeError(f"no answer within {timeout:.0f} s")
            piece = os.read(self._output.fileno(), 1 << 16)
            if not piece:
                raise RuntimeError(f"the process died with code {self._process.wait()}: {self._last_words()}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "no message"

    def stop(self) -> None:
        """End the process, at once if it does not end by itself."""
        self._input.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        self._output.close()
        self._errors.close()


class Run:
    """All units of work, handed out to workers.

    Args:
        units: What to do, as JSON; each is served by one worker at a time.
        command: Starts a worker, whose program calls `work`.
        environment: Variables for the workers.
        keep: Is called, by one thread at a time, with a unit and a record; the record of a case that was fatal is None,
            with its number and the reason.
        progress: Text for the line that is printed every ten seconds.
    """

    def __init__(
        self,
        units: Sequence[Any],
        command: Sequence[str],
        environment: dict[str, str],
        keep: Callable[[Any, Record | None, int, str], None],
        progress: Callable[[], str],
    ) -> None:
        self._command, self._environment = command, environment
        self._keep_record, self._text = keep, progress
        self._units: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for unit in units:
            self._units.put(unit)
        self._total = len(units)
        self._done = 0
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._failures: list[str] = []

    def __call__(self, jobs: int, timeout: float, minutes: float) -> int:
        """Run everything with so many workers; how many units were not run.

        Args:
            jobs: Worker processes.
            timeout: Seconds for one case.
            minutes: After this, nothing more is started.
        """
        arguments = (timeout, self._begin + 60 * minutes)
        threads = [threading.Thread(target=self._serve_worker, args=arguments) for _ in range(max(1, jobs))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(10.0 / len(threads))
            self._progress()
        left = self._total - self._done
        if left:
            print(f"{left} of {self._total} were not run", *self._failures[:3], sep="\n", flush=True)
        return left

    def _serve_worker(self, timeout: float, end: float) -> None:
        worker: _Worker | None = None
        try:
            while time.monotonic() < end:
                try:
                    unit = self._units.get_nowait()
                except queue.Empty:
                    return
                worker = self._run_unit(unit, worker, timeout)
                with self._lock:
                    self._done += 1
        except RuntimeError as error:  # a worker that does not even start; the others go on
            with self._lock:
                self._failures.append(f"a worker did not start: {error}")
        finally:
            if worker is not None:
                worker.stop()

    def _run_unit(self, unit: Any, worker: _Worker | None, timeout: float) -> _Worker | None:
        """Run one unit; a worker that is still good, to be used again."""
        start = 0
        for _ in range(_LIVES):
            worker = worker or _Worker(self._command, self._environment)
            try:
                for answer in worker.ask(unit, start, timeout):
                    if "begin" in answer:
                        start = max(start, answer["begin"])
                    else:
                        with self._lock:
                            self._keep_record(unit, answer["record"], answer["case"], "")
                        start = answer["case"] + 1
                return worker
            except (RuntimeError, BrokenPipeError) as error:
                worker.stop()
                worker = None
                with self._lock:
                    self._keep_record(unit, None, start, str(error))
                start += 1
        return worker

    def _progress(self) -> None:
        with self._lock:
            seconds = time.monotonic() - self._begin
            print(f"{seconds:4.0f} s: {self._done} of {self._total} done: {self._text()}", flush=True)
