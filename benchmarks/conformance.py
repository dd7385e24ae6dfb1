"""Conformance of zero-copy replay: every operator that PyTorch tests, captured, poisoned, and compared with eager.

    python benchmarks/conformance.py --jobs 12 --out docs/conformance.json --table docs/conformance.md
    python benchmarks/conformance.py --device emulated --ops add,mm
    python benchmarks/conformance.py --shard 1/2 --out a.json            # and 2/2 into b.json, then
    python benchmarks/conformance.py --merge a.jsonl b.jsonl --out docs/conformance.json --table docs/conformance.md

Operators are run by worker processes. A worker that hangs, dies or loses the device is replaced, and the case is
recorded as an error. Records are also written one by one to OUT with the suffix .jsonl, so that a run that was cut
short can be put into tables by --merge.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE)]

from conformance_cases import (  # noqa: E402
    CLASSES,
    DTYPES,
    DeviceLostError,
    cases,
    load_operators,
    run_case,
    supports,
)
from conformance_report import by_operator, in_order, markdown, summarise  # noqa: E402
from reporting import command_line  # noqa: E402

_LIVES = 3
"""How many workers one operator and dtype may cost."""


# -- a worker -----------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Serve requests from standard input until it ends; answer in JSON lines on what was standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    warnings.simplefilter("ignore")
    import torch

    import pygraph

    torch.set_num_threads(1)
    device = pygraph.default_device()
    operators = load_operators()
    answers.write(json.dumps({"ready": str(device)}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        operator, dtype = operators[request["operator"]], getattr(torch, request["dtype"])
        try:
            with torch.no_grad():
                for answer in _serve(request, operator, device, dtype, options):
                    answers.write(json.dumps(answer) + "\n")
        except DeviceLostError as error:
            answers.write(json.dumps({"lost": str(error)}) + "\n")
            answers.flush()
            os._exit(3)  # tearing down CUDA after such an error may hang
        answers.write('{"end": true}\n')


def _serve(
    request: dict[str, Any], operator: Any, device: Any, dtype: Any, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Records of the cases from ``request["start"]`` on, each announced before."""
    found = cases(operator, device, dtype, options.samples)
    index = -1
    while True:
        index += 1
        yield {"begin": index}
        try:
            case = next(found, None)
        except Exception as error:  # the sample cannot be made on this device
            lines = str(error).splitlines() or [type(error).__name__]
            yield {"record": {"sample": index, "class": "skipped", "reasons": [f"sample: {lines[0][:200]}"]}}
            return
        if case is None:
            return
        if index >= request["start"]:
            yield {"record": {"sample": index, **run_case(request["operator"], case, options.mechanism)}}


class _Worker:
    """A worker process, as its master sees it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, str(_HERE / "conformance.py"), "--worker"]
        command += ["--samples", str(options.samples), "--mechanism", options.mechanism]
        environment = {**os.environ, "PYGRAPH_DEVICE": options.device, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._rest = b""
        self.device = self._answer(180.0)["ready"]

    def ask(self, request: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        """Answers to a request; raises RuntimeError when the worker dies or takes longer than ``timeout`` for one."""
        self._input.write(json.dumps(request).encode() + b"\n")
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


# -- the master ---------------------------------------------------------------------------------------------------


class _Run:
    """All units of work (an operator and a dtype), handed out to workers, and their records."""

    def __init__(self, options: argparse.Namespace, units: list[tuple[str, str]], lines: TextIO | None) -> None:
        self.options = options
        self.records: list[dict[str, Any]] = []
        self._lines = lines
        self._units: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        for unit in units:
            self._units.put(unit)
        self._total = len(units)
        self._done = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._failures: list[str] = []

    def __call__(self) -> list[dict[str, Any]]:
        """Run everything; the records."""
        threads = [threading.Thread(target=self._serve_worker) for _ in range(max(1, self.options.jobs))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(10.0 / len(threads))
            self._progress()
        if self._done < self._total:
            print(
                f"{self._total - self._done} of {self._total} were not run", *self._failures[:3], sep="\n", flush=True
            )
        return self.records

    def _serve_worker(self) -> None:
        worker: _Worker | None = None
        try:
            while time.monotonic() - self._begin < 60 * self.options.minutes:
                try:
                    unit = self._units.get_nowait()
                except queue.Empty:
                    return
                worker = self._run_unit(unit, worker)
                with self._lock:
                    self._done += 1
        except RuntimeError as error:  # a worker that does not even start; the others go on
            with self._lock:
                self._failures.append(f"a worker did not start: {error}")
        finally:
            if worker is not None:
                worker.stop()

    def _run_unit(self, unit: tuple[str, str], worker: _Worker | None) -> _Worker | None:
        """Run one operator in one dtype; a worker that is still good, to be used again."""
        operator, dtype = unit
        start = 0
        for _ in range(_LIVES):
            worker = worker or _Worker(self.options)
            try:
                request = {"operator": operator, "dtype": dtype, "start": start}
                for answer in worker.ask(request, self.options.timeout):
                    if "begin" in answer:
                        start = max(start, answer["begin"])
                    else:
                        self._keep(operator, dtype, answer["record"])
                        start = answer["record"]["sample"] + 1
                return worker
            except (RuntimeError, BrokenPipeError) as error:
                worker.stop()
                worker = None
                self._keep(operator, dtype, {"sample": start, "class": "error", "reasons": [str(error)]})
                start += 1
        return worker

    def _keep(self, operator: str, dtype: str, record: dict[str, Any]) -> None:
        record = {"operator": operator, "dtype": dtype, **record}
        with self._lock:
            self.records.append(record)
            self._counts[record["class"]] += 1
            if self._lines is not None:
                self._lines.write(json.dumps(record) + "\n")
                self._lines.flush()
            if record["class"] in ("wrong", "error"):
                print(
                    f"{record['class']}: {operator} {dtype} {record['sample']}: {'; '.join(record['reasons'])}",
                    flush=True,
                )

    def _progress(self) -> None:
        with self._lock:
            counts = ", ".join(f"{self._counts[c]} {c}" for c in CLASSES if self._counts[c])
            print(f"{time.monotonic() - self._begin:4.0f} s: {self._done} of {self._total} done: {counts}", flush=True)


def units(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The operators and dtypes to run, in a reproducible order."""
    operators = load_operators()
    wanted = [name for name in options.ops.split(",") if name]
    if unknown := [name for name in wanted if not any(_is_named(operator, name) for operator in operators)]:
        raise SystemExit(f"unknown operators: {', '.join(unknown)}")
    names = [name for name in sorted(operators) if not wanted or any(_is_named(name, part) for part in wanted)]
    index, count = map(int, options.shard.split("/"))
    dtypes = [dtype for dtype in DTYPES if not options.dtypes or dtype in options.dtypes.split(",")]
    return [
        (name, dtype)
        for name in names[index - 1 :: count]
        for dtype in dtypes
        if supports(operators[name], options.device, dtype)
    ]


def _is_named(operator: str, name: str) -> bool:
    """Whether an operator is the named one, or a variant of it.

    >>> _is_named("div.floor_rounding", "div"), _is_named("div", "div.floor_rounding")
    (True, False)
    """
    return operator in (name, f"{name}_") or operator.startswith((f"{name}.", f"{name}_."))


def versions(device: str) -> dict[str, str]:
    """What the results depend on."""
    import torch

    found = {"Python": sys.version.split()[0], "torch": torch.__version__}
    for package in ("triton", "cuda-bindings", "cuda-core"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["on"] = torch.cuda.get_device_name() if device == "cuda" else "pygraph's emulated device"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "emulated"), default="")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--shard", default="1/1", help="i/n: the i-th of n parts")
    parser.add_argument("--ops", default="", help="operators by name, with all their variants; all by default")
    parser.add_argument("--dtypes", default="", help=f"some of {','.join(DTYPES)}")
    parser.add_argument("--samples", type=int, default=3, help="samples per operator and dtype")
    parser.add_argument("--mechanism", default="auto", help="how graphs change pointers, see pygraph.indirect")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one case")
    parser.add_argument("--minutes", type=float, default=60.0, help="after this, start nothing more")
    parser.add_argument("--out", type=Path, help="JSON; records go to the same name with .jsonl as they come")
    parser.add_argument("--table", type=Path, help="Markdown")
    parser.add_argument("--merge", type=Path, nargs="+", help="make the tables of these .jsonl files; run nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    import torch

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "emulated")
    if options.merge:
        records = [json.loads(line) for path in options.merge for line in path.read_text().splitlines()]
    else:
        lines = open(options.out.with_suffix(".jsonl"), "w") if options.out else None  # noqa: SIM115
        try:
            records = _Run(options, units(options), lines)()
        finally:
            if lines is not None:
                lines.close()
    records = in_order(records)
    result = {
        "command": command_line(),
        "versions": versions(options.device),
        "summary": summarise(records),
        "rows": by_operator(records),
    }
    print(json.dumps(result["summary"], indent=1, ensure_ascii=False))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if options.table:
        options.table.write_text(markdown(result) + "\n")


if __name__ == "__main__":
    main()
