"""The published figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.table import published as paper
from benchmarks.table.comparison import compare, geometric_mean, speed_up
from benchmarks.table.results import Row
from benchmarks.table.text import Cell, percent, size, table, times
from benchmarks.table.ways import OURS


def published(rows: Sequence[Row], ablation: Sequence[Row]) -> str:
    """The table of published figures, with ours where their rows have run, and what differs."""
    lines = [*_means(rows), *_rows(rows), *_of_transforms(rows, ablation), *_compiling(rows)]
    headings = ["", f"{paper.SOURCE} ({paper.SETTING})", *OURS, "torch's reduce-overhead"]
    notes = "\n".join(f"- {text}" for text in paper.DIFFERENCES)
    return f"{table(headings, lines)}\n\nWhat differs:\n\n{notes}"


def _means(rows: Sequence[Row]) -> list[list[Cell]]:
    mode = compare(rows, ("reduce-overhead",), ("compile",))
    over_default: list[Cell] = [times(compare(rows, (way,), ("compile",)).mean) for way in OURS]
    over_mode: list[Cell] = [times(compare(rows, (way,), ("reduce-overhead",)).mean) for way in OURS]
    return [
        ["geometric mean over no CUDA graphs", times(paper.MEAN_OVER_DEFAULT), *over_default, None],
        ["… of torch's CUDA graphs", times(paper.MODE_OVER_DEFAULT), None, None, None, times(mode.mean)],
        ["mean over torch's CUDA graphs", times(paper.MEAN_OVER_MODE), *over_mode, None],
        ["rows that torch's CUDA graphs make slower", f"{paper.ROWS_SLOWED_BY_MODE} of 25", None, None, None,
         f"{len(mode.lost)} of {mode.rows}" if mode.rows else None],
    ]  # fmt: skip


def _found(rows: Sequence[Row], key: tuple[str, bool]) -> Row | None:
    """The row with a title, in inference or training."""
    return next((row for row in rows if (row["title"], row["training"]) == key and "error" not in row), None)


def _named(key: tuple[str, bool]) -> str:
    return f"{key[0]} {'T' if key[1] else 'I'}"


def _cells(row: Row | None, ways: Sequence[str], cell: Callable[[dict[str, Any]], Cell]) -> list[Cell]:
    """A text for each way that has run."""
    found = [row["ways"].get(way) if row is not None else None for way in ways]
    return [None if one is None or "error" in one else cell(one) for one in found]


def _rows(rows: Sequence[Row]) -> list[list[Cell]]:
    lines: list[list[Cell]] = []
    title, training, most = paper.MOST_OVER_MODE
    row = _found(rows, (title, training))
    ours = [times(speed_up(row, (way,), ("reduce-overhead",))) if row else None for way in OURS]
    lines.append([f"{_named((title, training))}: over torch's CUDA graphs", times(most), *ours, None])
    for key, change in paper.SLOWED_BY_MODE.items():
        row = _found(rows, key)
        own = speed_up(row, ("reduce-overhead",), ("compile",)) if row else None
        mode = None if own is None else percent(own - 1, signed=True)
        text = f"{_named(key)}: change of speed by torch's CUDA graphs"
        lines.append([text, percent(change, signed=True), None, None, None, mode])

    def coverage(one: dict[str, Any]) -> Cell:
        return percent(one["profile"]["coverage"]) if "profile" in one else None

    for key, (before, after) in paper.COVERAGE.items():
        row = _found(rows, key)
        texts = f"{percent(before)} → {percent(after)}"
        lines.append([f"{_named(key)}: kernels in graphs", texts, *_cells(row, (*OURS, "reduce-overhead"), coverage)])
    for key, (before, after) in paper.BYTES_COPIED.items():
        row = _found(rows, key)
        ours = _cells(row, OURS, lambda one: size(one.get("bytes_copied")))
        mode = _cells(row, ("reduce-overhead",), lambda one, row=row: size(row["input_bytes"]) if row else None)
        lines.append([f"{_named(key)}: bytes copied", f"{size(before)} → {size(after)}", *ours, *mode])
    return lines


def _of_transforms(rows: Sequence[Row], ablation: Sequence[Row]) -> list[list[Cell]]:
    """Speed-ups of single transforms, by the ablation; of devicify over the CUDA graphs of the function as it is."""
    lines: list[list[Cell]] = []
    for text, figures, way, over in (
        ("devicify", paper.DEVICIFY_OVER_MODE, "+ devicify", "graphs"),
        ("indirect", paper.INDIRECTION, "+ indirect", "+ devicify"),
    ):
        for key, ratio in figures.items():
            row = _found(ablation, key)
            own = times(speed_up(row, (way,), (over,))) if row else None
            lines.append([f"{_named(key)}: by {text} (`{way}` over `{over}`)", times(ratio), None, own, None, None])
    return lines


def _compiling(rows: Sequence[Row]) -> list[list[Cell]]:
    """Compile time relative to that of torch's CUDA graphs."""
    cells: list[Cell] = []
    for way in OURS:
        pairs = [(row["ways"].get(way, {}).get("compile_s"), row["ways"].get("reduce-overhead", {}).get("compile_s"))
                 for row in rows]  # fmt: skip
        cells.append(times(geometric_mean(own / mode for own, mode in pairs if own and mode)))
    return [["compile time over torch's CUDA graphs", times(paper.COMPILE_RATIO), *cells, None]]
