"""The results as tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.table import comparison
from benchmarks.table.comparison import BASELINES, MARGIN, speed_up
from benchmarks.table.published_table import published
from benchmarks.table.results import Row
from benchmarks.table.text import Cell, percent, size, table, times
from benchmarks.table.ways import MODES, OURS, STACKS, WAYS

COVERED = ("reduce-overhead", "backend", "jit", "jit fused")
"""The ways that replay CUDA graphs."""


def render(rows: Sequence[Row], ablation: Sequence[Row] = ()) -> str:
    """All tables.

    Args:
        rows: Results of the rows.
        ablation: Results of the ablation.
    """
    parts = ["# The table of 25 workloads", "", *_conditions([*rows, *ablation])]
    measured = [row for row in rows if "error" not in row]
    if rows:
        sections: list[tuple[str, str]] = [
            ("Time of an iteration", _speed(rows)),
            ("Geometric means", _means(measured)),
            ("Time of the CPU", _cpu(measured)),
            ("Kernels that graphs launch", _coverage(measured)),
            ("Bytes copied per iteration", _copied(measured)),
            ("Seconds of compiling", _compiling(measured)),
            ("Memory", _memory(measured)),
            ("Results", _right(measured)),
        ]
        for title, text in sections:
            parts += ["", f"## {title}", "", text]
    if ablation:
        parts += ["", "## What each transform adds", "", _ablation([row for row in ablation if "error" not in row])]
    if rows:
        parts += ["", "## Beside the paper", "", published(measured, ablation), "", "## Rows", "", _rows(rows)]
        parts += ["", "## Failures", "", _failures([*rows, *ablation])]
    parts += ["", "## Commands", "", _commands([*rows, *ablation])]
    return "\n".join(parts) + "\n"


def _conditions(rows: Sequence[Row]) -> list[str]:
    """GPU and versions of the results; more than one if results of several runs are here."""
    found: dict[str, set[int]] = {}
    for row in rows:
        one = row["environment"]
        text = f"{one['gpu']}, torch {one['torch']}, CUDA {one['cuda']}, Python {one['python']}"
        found.setdefault(text, set()).add(one["cores"])
    machines = [f"{text}, {_counts(cores)} cores" for text, cores in found.items()]
    lines = [f"Measured on: {'; '.join(machines)}."]
    if any(row.get("small") for row in rows):
        lines += ["", "**Of small models: times mean nothing.**"]
    return lines


def _counts(numbers: Iterable[int]) -> str:
    """Numbers as text, as in "12, 16 or 18"."""
    *others, last = map(str, sorted(numbers))
    return f"{', '.join(others)} or {last}" if others else last


def _commands(rows: Iterable[Row]) -> str:
    return "\n".join(f"- `{command}`" for command in dict.fromkeys(row["environment"]["command"] for row in rows))


def _per_way(rows: Iterable[Row], ways: Sequence[str], cell: Callable[[Row, str], Cell]) -> list[list[Cell]]:
    return [[row["row"], *(cell(row, way) for way in ways)] for row in rows]


def _ways_in(rows: Iterable[Row], ways: Sequence[str]) -> list[str]:
    """The ways that at least one row was run in."""
    names = {name for row in rows for name in row["ways"]}
    return [way for way in ways if way in names]


def _value(row: Row, way: str, text: Callable[[dict[str, Any]], Cell]) -> Cell:
    """The text of a value of a way; "failed" if it did not run, a dash if it was not to or has no such value."""
    one = row["ways"].get(way)
    if one is None:
        return None
    return "failed" if "error" in one else text(one)


def _speed(rows: Sequence[Row]) -> str:
    ways = _ways_in(rows, WAYS)
    ours = [way for way in ways if way in OURS]
    lines: list[list[Cell]] = []
    for row in rows:
        if "error" in row:
            lines.append([row["row"], str(row["batch_size"]), *["failed"] * len(ways), *[None] * len(ours)])
            continue
        cells = [_value(row, way, _time) for way in ways]
        ratios = [times(speed_up(row, (way,), MODES)) for way in ours]
        lines.append([row["row"], str(row["batch_size"]), *cells, *ratios])
    headings = ["workload", "batch", *ways, *(f"{way}: speed-up" for way in ours)]
    note = ("Microseconds, median of rounds in which all ways take turns. Speed-ups are over the fastest mode of "
            "`torch.compile` in that row; wrong results have none, and are in no mean.")  # fmt: skip
    return f"{note}\n\n{table(headings, lines)}"


def _time(one: dict[str, Any]) -> str:
    wrong = ", **wrong**" if one.get("right") is False else ""
    return f"{one['wall_us'][1]:.0f}{wrong}"


BEST = "pygraph's best"
"""The fastest way of pygraph in each row."""


def _means(rows: Sequence[Row]) -> str:
    compared = {way: (way,) for way in _ways_in(rows, WAYS) if way not in ("eager", "compile")}
    compared[BEST] = OURS
    lines: list[list[Cell]] = []
    for kind, training in (("inference", False), ("training", True)):
        part = [row for row in rows if row["training"] == training]
        for way, own in compared.items() if part else ():
            cells: list[Cell] = [kind, way]
            for name, over in BASELINES.items():
                found = comparison.compare(part, own, [one for one in over if one != way])
                cells.append(None if name == way else times(found.mean))
            best = comparison.compare(part, own, [one for one in MODES if one != way])
            cells += [f"{best.won} of {best.rows}", f"{len(best.lost)}: {', '.join(best.lost)}" if best.lost else "0"]
            lines.append(cells)
    headings = ["", "way", *(f"over {name}" for name in BASELINES), "won", "lost"]
    note = (f"Geometric means of speed-ups, where both have run. Won and lost: rows that are faster or slower than the "
            f"fastest (other) mode of `torch.compile` by more than {MARGIN:.0%}, and whose quartiles do not overlap. "
            f"“{BEST}” is the fastest of "
            f"{', '.join(OURS)} in each row.")  # fmt: skip
    return f"{note}\n\n{table(headings, lines)}"


def _cpu(rows: Sequence[Row]) -> str:
    ways = _ways_in(rows, WAYS)
    lines = _per_way(rows, ways, lambda row, way: _value(row, way, lambda one: f"{one['cpu_us'][1]:.0f}"))
    return f"Microseconds until an iteration is submitted, into an empty queue.\n\n{table(['workload', *ways], lines)}"


def _coverage(rows: Sequence[Row]) -> str:
    ways = _ways_in(rows, COVERED)

    def cell(row: Row, way: str) -> Cell:
        def text(one: dict[str, Any]) -> Cell:
            seen = one.get("profile")
            if seen is None or seen["coverage"] is None:
                return None
            return f"{percent(seen['coverage'])}, {percent(seen['coverage_time'])} of {seen['kernels']:.0f}"

        return _value(row, way, text)

    note = ("By torch's profiler: the share of kernels that launches of graphs have launched, the share of the "
            "kernels' time, and the number of kernels of an iteration.")  # fmt: skip
    return f"{note}\n\n{table(['workload', *ways], _per_way(rows, ways, cell))}"


def _copied(rows: Sequence[Row]) -> str:
    ways = _ways_in(rows, OURS)
    lines: list[list[Cell]] = []
    for row in rows:
        mode = _value(row, "reduce-overhead", lambda one, row=row: size(row["input_bytes"]))
        seen = [_value(row, way, _seen_copies) for way in ("reduce-overhead", *ways)]
        lines.append(
            [row["row"], mode, *(_value(row, way, lambda one: size(one.get("bytes_copied"))) for way in ways), *seen]
        )
    headings = ["workload", "reduce-overhead: inputs", *ways, *(f"{way}: seen" for way in ("reduce-overhead", *ways))]
    note = ("`reduce-overhead` copies the inputs of a graph that are no parameters: the bytes of a batch. What pygraph "
            "copies is what `explain()` reports of the iteration. Seen: bytes of the copies that the profiler shows on "
            "the device, and the number of kernels that are called after copies, whose bytes it does not show; both "
            "hold copies that the model itself asks for.")  # fmt: skip
    return f"{note}\n\n{table(headings, lines)}"


def _seen_copies(one: dict[str, Any]) -> Cell:
    seen = one.get("profile")
    if seen is None:
        return None
    copied = sum(copied for _, copied in seen["copied"].values())
    return f"{size(copied)}, {seen['copy_kernels']:.0f} kernels"


def _compiling(rows: Sequence[Row]) -> str:
    ways = [way for way in _ways_in(rows, WAYS) if way not in ("eager", "limit")]

    def cell(row: Row, way: str) -> Cell:
        def text(one: dict[str, Any]) -> Cell:
            warm = one.get("warm_s")
            return f"{one['compile_s']:.1f}" + (f" / {warm:.1f}" if warm is not None else "")

        return _value(row, way, text)

    note = ("Seconds until three iterations have run, with empty caches on disk / in another process with the caches "
            "that this has left. Rows compile side by side.")  # fmt: skip
    return f"{note}\n\n{table(['workload', *ways], _per_way(rows, ways, cell))}"


def _memory(rows: Sequence[Row]) -> str:
    ways = [way for way in _ways_in(rows, WAYS) if way != "limit"]

    def cell(row: Row, way: str) -> Cell:
        def text(one: dict[str, Any]) -> Cell:
            if one.get("steady_reserved") is None:
                return None
            return f"{one['steady_reserved'] / 2**20:.0f} / {one['first_reserved'] / 2**20:.0f}"

        return _value(row, way, text)

    note = "MiB reserved at most, with the model and its optimizer: of later iterations / of the first ones."
    return f"{note}\n\n{table(['workload', *ways], _per_way(rows, ways, cell))}"


def _right(rows: Sequence[Row]) -> str:
    ways = [way for way in _ways_in(rows, WAYS) if way != "limit"]

    def cell(row: Row, way: str) -> Cell:
        def text(one: dict[str, Any]) -> Cell:
            if "right" not in one:
                return None
            far = "other shapes" if one["distance"] is None else f"{one['distance']:.1e}"
            return far if one["right"] else f"{far}, **wrong**"

        return _value(row, way, text)

    lines = _per_way(rows, ways, cell)
    for line, row in zip(lines, rows, strict=True):
        line.append(row.get("reference"))
    note = ("Distances of results from the reference: the largest relative norm of a difference; in training the "
            "largest relative difference of the losses of six steps. Wrong is more than twice the distance of eager in "
            "bfloat16 and more than 2e-2; where a model draws random numbers, the modes of `torch.compile` draw "
            "others, and may be as far as twice what another seed makes.")  # fmt: skip
    return f"{note}\n\n{table(['workload', *ways, 'reference'], lines)}"


def _ablation(rows: Sequence[Row]) -> str:
    ways = _ways_in(rows, ("eager", "compile", *STACKS))
    stacks = [way for way in ways if way in STACKS]
    lines: list[list[Cell]] = []
    for row in rows:
        cells = [_value(row, way, lambda one: f"{one['wall_us'][1]:.0f}") for way in ways]
        lines.append([row["row"], *cells, *(times(speed_up(row, (way,), ("eager",))) for way in stacks)])
    complete = [row for row in rows if all(speed_up(row, (way,), ("eager",)) for way in stacks)]
    means = [comparison.compare(complete, (way,), ("eager",)).mean for way in stacks]
    lines.append(["geometric mean", *[None] * len(ways), *(times(mean) for mean in means)])
    shares = [["kernels in graphs", *[None] * len(ways), *(_mean_coverage(complete, way) for way in stacks)]]
    note = ("Microseconds, and speed-ups over eager. `graphs` records the function as it is and copies inputs; the "
            "others add one transform each; `+ select` is `jit`, `+ fuse` is `jit(fuse=True)`. Means are of the "
            f"{len(complete)} rows in which all of these have run.")  # fmt: skip
    return f"{note}\n\n{table(['workload', *ways, *(f'{way}: speed-up' for way in stacks)], lines + shares)}"


def _mean_coverage(rows: Iterable[Row], way: str) -> Cell:
    """The mean share of kernels in graphs over rows."""
    profiles = [row["ways"].get(way, {}).get("profile") for row in rows]
    shares = [one["coverage"] for one in profiles if one is not None and one["coverage"] is not None]
    return percent(sum(shares) / len(shares)) if shares else None


def _rows(rows: Sequence[Row]) -> str:
    lines: list[list[Cell]] = [
        [row["row"], row["title"], str(row["batch_size"]), str(row.get("inputs", "–")), row["source"], row["hard"],
         row["differs"] or "nothing"] for row in rows
    ]  # fmt: skip
    return table(
        ["workload", "title", "batch", "inputs", "source", "hard for CUDA graphs", "differs"], lines, numbers=False
    )


def _failures(rows: Sequence[Row]) -> str:
    lines: list[str] = []
    for row in rows:
        if "error" in row:
            lines.append(f"- {row['row']}: {_one_line(row['error'])}")
        if "profile_error" in row:
            lines.append(f"- {row['row']}: no profiles: {_one_line(row['profile_error'])}")
        lines += [f"- {row['row']}, {way}: {_one_line(one['error'])}" for way, one in row["ways"].items()
                  if "error" in one and not (way.startswith("limit of") and "limit" in row["ways"])]  # fmt: skip
    return "\n".join(lines) or "None."


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
