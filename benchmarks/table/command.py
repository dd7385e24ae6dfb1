"""The command ``python -m pygraph bench``: which rows are measured, in which ways, and what is written."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.table import results, runner
from benchmarks.table.places import places
from benchmarks.table.process import ROOT
from benchmarks.table.progress import Reporter
from benchmarks.table.rows import BenchError, check_ways, chosen, load
from benchmarks.table.ways import ABLATION, WAYS, in_order
from benchmarks.table.workload import Workload

TABLES = "README.md"
"""The file of the tables in the folder of results."""


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Run the command.

    Args:
        arguments: Its options, as ``pygraph.__main__`` parses them.
        console: Where progress is shown; standard output by default.

    Returns:
        0 if all rows have a result, 1 if rows failed or wait for another call.

    Raises:
        BenchError: A row or a way is not there.
        ResultError: A file of results is none.
    """
    console = console or Console(highlight=False)
    if not arguments.list and arguments.render:
        return render(_folder(arguments), console)
    rows = load(arguments.workloads)
    wanted = chosen(rows, arguments.only, arguments.shard)
    if arguments.list:
        for row in wanted:
            console.print(listed(row), markup=False, highlight=False, soft_wrap=True)
        return 0
    known = ABLATION if arguments.ablation else WAYS
    ways = in_order(check_ways(arguments.ways or known, known))
    folder = _folder(arguments)
    missing = [
        row for row in wanted if arguments.again or not results.path_of(folder, row.name, arguments.ablation).exists()
    ]
    console.print(
        f"{len(missing)} rows to measure, {len(wanted) - len(missing)} have a result in {folder}", soft_wrap=True
    )
    where = places(arguments.devices) if arguments.devices > 1 else []
    cores = where[0].cores if where else results.cores()
    options = runner.Options(
        folder, ways, arguments.workloads, arguments.ablation, arguments.small, arguments.inputs, arguments.seconds,
        arguments.jobs or runner.default_jobs(len(cores)), arguments.budget, arguments.limit, arguments.warm,
    )  # fmt: skip
    unfinished: list[str] = []
    failed: list[str] = []
    if missing:
        _prepare()
        numbers = {name: number for number, name in enumerate(rows)}
        with Reporter(console, len(missing)) as reporter:
            failed, unfinished = runner.run(options, [(numbers[row.name], row) for row in missing], reporter, where)
    if unfinished:
        console.print(f"left for another call, as time is over: {', '.join(unfinished)}", soft_wrap=True)
    if any(folder.glob("*.json")):
        render(folder, console)
    return 1 if failed or unfinished else 0


def listed(row: Workload) -> str:
    """The description of a row, on some lines."""
    lines = [f"{row.name}: {row.title}, {'training' if row.training else 'inference'}, batch {row.batch_size}"]
    lines += [f"    from: {row.source}", f"    hard: {row.hard}"]
    if row.differs:
        lines.append(f"    differs: {row.differs}")
    return "\n".join(lines)


def render(folder: Path, console: Console) -> int:
    """Write tables and figures of the results in a folder.

    Raises:
        BenchError: There are none.
        ResultError: A file is no result.
    """
    from benchmarks.table import figures, tables

    rows, ablation = (results.read(folder, which) for which in (False, True))
    if not rows and not ablation:
        raise BenchError(
            f"bench --render: there are no results in {folder}. Measure rows first, or name a folder by --out."
        )
    written: list[Path] = [folder / TABLES]
    written[0].write_text(tables.render(rows, ablation), encoding="utf-8")
    try:
        written += figures.draw(folder, rows, ablation)
    except ModuleNotFoundError as error:
        console.print(f"no figures: {error.name} is not installed. In the checkout, run `pip install -e '.[bench]'`.",
                      markup=False, soft_wrap=True)  # fmt: skip
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)
    return 0


def _folder(arguments: argparse.Namespace) -> Path:
    """The folder of results: as given, or by the GPU."""
    return arguments.out or ROOT / "benchmarks" / "results" / results.folder_name(results.gpu())


def _prepare() -> None:
    """Have the C++ extension built before workers load it, so that it is no part of their times."""
    from pygraph.process import extension

    extension.start(wait=True)
