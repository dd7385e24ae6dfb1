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
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE)]

import workers  # noqa: E402
from conformance_cases import CLASSES, DTYPES, cases, load_operators, run_case, supports  # noqa: E402
from conformance_report import by_operator, in_order, markdown, summarise  # noqa: E402
from reporting import command_line  # noqa: E402

# -- a worker -----------------------------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace) -> workers.Serve:
    """The function by which a worker runs a unit: an operator and a dtype."""
    import torch

    import pygraph

    device = pygraph.default_device()
    operators = load_operators()

    def serve(unit: tuple[str, str], start: int) -> Iterator[dict[str, Any]]:
        name, dtype = unit
        found = cases(operators[name], device, getattr(torch, dtype), options.samples)
        with torch.no_grad():
            for index in itertools.count():
                yield {"begin": index}
                try:
                    case = next(found, None)
                except Exception as error:  # the sample cannot be made on this device
                    lines = str(error).splitlines() or [type(error).__name__]
                    yield {"case": index, "record": {"class": "skipped", "reasons": [f"sample: {lines[0][:200]}"]}}
                    return
                if case is None:
                    return
                if index >= start:
                    yield {"case": index, "record": run_case(name, case, options.mechanism)}

    return serve


# -- the master ---------------------------------------------------------------------------------------------------


class _Records:
    """Answers of the workers, also written to a file one by one."""

    def __init__(self, lines: TextIO | None) -> None:
        self.all: list[dict[str, Any]] = []
        self._lines = lines
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, unit: tuple[str, str], record: dict[str, Any] | None, case: int, reason: str) -> None:
        record = record or {"class": "error", "reasons": [reason]}
        record = {"operator": unit[0], "dtype": unit[1], "sample": case, **record}
        self.all.append(record)
        self._counts[record["class"]] += 1
        if self._lines is not None:
            self._lines.write(json.dumps(record) + "\n")
            self._lines.flush()
        if record["class"] in ("wrong", "error"):
            print(f"{record['class']}: {' '.join(unit)} {case}: {'; '.join(record['reasons'])}", flush=True)

    def counts(self) -> str:
        return ", ".join(f"{self._counts[c]} {c}" for c in CLASSES if self._counts[c])


def _run(options: argparse.Namespace, lines: TextIO | None) -> list[dict[str, Any]]:
    """Run all units; the records."""
    command = [sys.executable, str(_HERE / "conformance.py"), "--worker"]
    command += ["--samples", str(options.samples), "--mechanism", options.mechanism]
    records = _Records(lines)
    run = workers.Run(units(options), command, {"PYGRAPH_DEVICE": options.device}, records.add, records.counts)
    run(options.jobs, options.timeout, options.minutes)
    return records.all


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
    """Versions of everything that the results depend on."""
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
        workers.work(lambda: _prepare(options))
        return
    import torch

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "emulated")
    if options.merge:
        records = [json.loads(line) for path in options.merge for line in path.read_text().splitlines()]
    else:
        lines = open(options.out.with_suffix(".jsonl"), "w") if options.out else None  # noqa: SIM115
        try:
            records = _run(options, lines)
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
