"""A worker process, as its runner sees it: messages from it, the end of its errors, and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table.places import Place
from benchmarks.table.worker import Job

ROOT = Path(__file__).parents[2]
"""The checkout."""

_LINES = 12
"""Lines of standard error that the row of a dead process shows."""


class WorkerError(Exception):
    """A worker that died, failed or was too slow.

    Attributes:
        out_of_memory: Whether it had too little memory of the device.
        is_late: Whether it was too slow.
    """

    def __init__(self, text: str, out_of_memory: bool = False, is_late: bool = False) -> None:
        super().__init__(text)
        self.out_of_memory, self.is_late = out_of_memory, is_late


def command(job: Job) -> list[str]:
    """The command line of a worker."""
    return [sys.executable, "-m", "benchmarks.table.worker", json.dumps(dataclasses.asdict(job))]


class Worker:
    """A process with a job.

    Args:
        job: The job.
        threads: How many threads and processes it may compile with.
        arguments: Its command line.
        place: Its GPU and its cores; None for all.

    Attributes:
        doing: What it does now.
    """

    def __init__(
        self, job: Job, threads: int, arguments: Sequence[str] | None = None, place: Place | None = None
    ) -> None:
        self.job = job
        self.doing = "starting"
        self._is_stopped = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        defaults = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        own = {"PYTHONPATH": path} if place is None else {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": place.gpu}
        self._process = subprocess.Popen(
            list(arguments or command(job)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, cwd=ROOT, env={**defaults, **os.environ, **own}, start_new_session=True,
        )  # fmt: skip
        if place is not None and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(ProcessLookupError):  # it has ended, which waiting finds out
                os.sched_setaffinity(self._process.pid, place.cores)  # before it starts others
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    self._messages.put(json.loads(line))
        self._messages.put(None)

    def wait_for(
        self, kinds: Collection[str], until: float, progress: Callable[[dict[str, Any]], None] = lambda message: None
    ) -> dict[str, Any]:
        """The next message of one of the kinds.

        Args:
            kinds: Keys of messages.
            until: When that is too late, by the monotonic clock.
            progress: Is called with messages about what the worker does.

        Raises:
            WorkerError: The process says that it failed, has ended, or is too slow.
        """
        while True:
            try:
                message = self._messages.get(timeout=max(until - time.monotonic(), 0.01))
            except queue.Empty:
                raise WorkerError(f"no answer in time while {self.doing}", is_late=True) from None
            if message is None:
                code = self._process.wait()
                raise WorkerError(f"the process ended with code {code} while {self.doing}{self.last_lines()}")
            if "failed" in message:
                raise WorkerError(f"{message['failed']} (while {self.doing})", message["out_of_memory"])
            if "doing" in message:
                self.doing = message["doing"]
                progress(message)
            if any(kind in message for kind in kinds):
                return message

    def ask(self, until: float, **command: Any) -> Any:
        """Have it do something when its ways are compiled; returns what it has found.

        Args:
            until: When the answer is too late, by the monotonic clock.
            **command: A name, and its value.

        Raises:
            WorkerError: The process says that it failed, has ended, or is too slow.
        """
        assert self._process.stdin is not None
        self.doing = {"calibrate": "measuring", "round": "measuring", "profile": "profiling"}[next(iter(command))]
        with contextlib.suppress(OSError):  # of one that has ended, which waiting finds out
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self.wait_for(("did",), until)["did"]

    def last_lines(self) -> str:
        """The last lines of its standard error, after a colon; nothing if there are none."""
        try:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
        except ValueError:
            return ""
        return ":\n" + "\n".join(line[:300] for line in lines[-_LINES:]) if lines else ""

    def stop(self) -> None:
        """End the process and those that it has started."""
        if self._is_stopped:
            return
        self._is_stopped = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                assert stream is not None
                stream.close()
        self._errors.close()
