"""The conformance suite by worker processes, in parts, and its table.

    python -m tests.conformance --device cuda --jobs 14 --shard 1/3 --out a.jsonl        # and 2/3, 3/3; then
    python -m tests.conformance --device cuda --merge a.jsonl b.jsonl c.jsonl --table docs/conformance-variants.md
    python -m tests.conformance --device emulated --ops add,mm --samples 3

A worker that hangs, dies or loses the device is replaced, and its case recorded as an error. The program fails if a
case that is not listed in `tests/conformance/expected.py` does, or if one that is listed passes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import conformance
import torch
import workers

import pygraph
from tests import steady
from tests.conformance.expected import EXPECTED, complaints
from tests.conformance.report import markdown
from tests.conformance.running import FAILURES, OUTCOMES, Record, Subject, unmade
from tests.conformance.samples import differentiable, dtypes, load_entries, load_samples

_PART = 60
"""Samples in one unit of work."""


# -- a worker -----------------------------------------------------------------------------------------------------


def prepare(limit: int | None) -> workers.Serve:
    """What a worker does with a unit: an entry, a dtype, and which part of its samples."""
    if torch.cuda.is_available():
        steady.install()
    device, entries = pygraph.default_device(), load_entries()

    @functools.lru_cache(maxsize=1)  # parts of an entry follow each other
    def tasks(name: str, dtype: str) -> tuple[Subject, list[Any]]:
        subject = Subject(name, entries[name], device, dtype)
        return subject, subject.tasks(limit)

    def serve(unit: tuple[str, str, int, int], start: int) -> Iterator[dict[str, Any]]:
        name, dtype, part, parts = unit
        yield {"begin": 0}
        try:
            subject, found = tasks(name, dtype)
        except Exception as error:
            if part == 0:
                yield {"case": 0, "record": [dataclasses.asdict(unmade(error))]}
            return
        for index, task in list(enumerate(found[part::parts]))[start:]:
            yield {"begin": index}
            yield {"case": index, "record": [dataclasses.asdict(record) for record in subject.run(task)]}
        subject.clear()

    return serve


# -- the master ---------------------------------------------------------------------------------------------------


def make_units(options: argparse.Namespace) -> list[tuple[str, str, int, int]]:
    """The units of a shard, which has every n-th pair of entry and dtype, large ones in several units."""
    entries = load_entries()
    wanted = [name for name in options.ops.split(",") if name]
    if unknown := set(wanted) - set(entries):
        raise SystemExit(f"unknown operators: {', '.join(sorted(unknown))}")
    kind = "cuda" if options.device == "cuda" else "emu"
    subjects = [(name, dtype) for name in wanted or sorted(entries) for dtype in dtypes(entries[name], kind)]
    index, count = map(int, options.shard.split("/"))
    units: list[tuple[str, str, int, int]] = []
    torch.set_num_threads(1)  # samples are small; on a host of many cores, threads made counting take minutes
    for name, dtype in subjects[index - 1 :: count]:
        parts = -(-_count(entries[name], dtype, kind, options.samples) // _PART)
        units += [(name, dtype, part, parts) for part in range(parts)]
    return units


def _count(entry: Any, dtype: str, kind: str, limit: int | None) -> int:
    """About how many samples an entry has, at least one."""
    if limit is not None:
        return 2 * limit
    host = torch.device("cpu")
    count = 1 + sum(1 for _ in load_samples(entry, host, dtype))
    if differentiable(entry, kind, dtype):
        count += sum(1 for _ in load_samples(entry, host, dtype, requires_grad=True))
    return count


class _Rows:
    """All records so far, also written to a file as they come."""

    def __init__(self, lines: TextIO | None, versions: dict[str, str]) -> None:
        self.all: list[dict[str, Any]] = []
        self._lines = lines
        self._write({"versions": versions})
        self._counts: collections.Counter[str] = collections.Counter()

    def keep(self, unit: tuple[str, str, int, int], records: list[Any] | None, case: int, reason: str) -> None:
        name, dtype, part, parts = unit
        if records is None:
            died = Record("forward", part + case * parts, "error", f"the worker: {reason}")
            records = [dataclasses.asdict(died)]
        for record in records:
            row = {"name": name, "dtype": dtype, **record}
            self.all.append(row)
            self._counts[row["outcome"]] += 1
            self._write(row)
            if row["outcome"] in FAILURES:
                print(row, flush=True)

    def _write(self, line: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()

    def counts(self) -> str:
        return ", ".join(f"{self._counts[outcome]} {outcome}" for outcome in OUTCOMES if self._counts[outcome])


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Run a shard; its rows, and how many units were not run."""
    command = [sys.executable, "-m", "tests.conformance", "--worker"]
    command += [] if options.samples is None else ["--samples", str(options.samples)]
    with open(options.out, "w") if options.out else contextlib.nullcontext() as lines:
        rows = _Rows(lines, conformance.versions(options.device))
        units = make_units(options)
        work = workers.Run(units, command, {"PYGRAPH_DEVICE": options.device}, rows.keep, rows.counts)
        left = work(options.jobs, options.timeout, options.minutes)
    return rows.all, left


def merged(paths: list[Path]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows in the files of all shards, and the versions that these ran with."""
    rows, versions = [], []
    for path in paths:
        first, *lines = path.read_text().splitlines()
        versions.append(json.loads(first)["versions"])
        rows += [json.loads(line) for line in lines]
    if any(other != versions[0] for other in versions):
        sys.exit(f"{', '.join(map(str, paths))}: run with different versions: {versions}")
    return rows, versions[0]


def judge(rows: list[dict[str, Any]], kind: str, complete: bool) -> list[str]:
    """What is not as it should be in the rows of a run, which may have all samples of its entries.

    >>> row = {"name": "add", "dtype": "int64", "variant": "vmap", "sample": 0, "outcome": "error", "reason": "r"}
    >>> judge([row, {**row, "name": "sub", "outcome": "graph"}], "emu", True)
    ['add int64 vmap, sample 0: error: r']
    """
    by_name: dict[str, list[tuple[str, Record]]] = collections.defaultdict(list)
    for row in rows:
        record = {key: row[key] for key in ("variant", "sample", "outcome", "reason")}
        by_name[row["name"]].append((row["dtype"], Record(**record)))
    return [
        line for name in sorted(by_name) for line in complaints(name, by_name[name], EXPECTED[kind], complete=complete)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "emulated"), default="")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--shard", default="1/1", help="i/n: the i-th of n parts")
    parser.add_argument("--ops", default="", help="operators by name; all by default")
    parser.add_argument("--samples", type=int, help="samples per operator, dtype and kind; all by default")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one sample")
    parser.add_argument("--minutes", type=float, default=60.0, help="after this, start nothing more")
    parser.add_argument("--out", type=Path, help="the versions, then records as they come, each a line of JSON")
    parser.add_argument("--table", type=Path, help="a page in Markdown")
    parser.add_argument("--merge", type=Path, nargs="+", help="judge and tabulate these records; run nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        workers.work(lambda: prepare(options.samples))
        return
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "emulated")
    left = 0
    if options.merge:
        rows, versions = merged(options.merge)
    else:
        (rows, left), versions = run(options), conformance.versions(options.device)
    kind = "cuda" if options.device == "cuda" else "emu"
    if options.table:
        command = " ".join(["python -m tests.conformance", *(Path(a).name for a in sys.argv[1:])])
        options.table.write_text(markdown(rows, kind, command, versions) + "\n")
    complete = bool(options.merge) or (options.shard == "1/1" and options.samples is None)
    found = judge(rows, kind, complete)
    print(*found, f"{len(rows)} records, {len(found)} complaints, {left} units not run", sep="\n")
    sys.exit(bool(found or left))


if __name__ == "__main__":
    main()
