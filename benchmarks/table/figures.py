"""The results as figures: speed-ups of every row, their distribution, steps of training, and the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table.comparison import compare, speed_up
from benchmarks.table.results import Row
from benchmarks.table.ways import OURS, STACKS

COLORS = {
    "reduce-overhead": "#8c8c8c",
    "max-autotune": "#c4c4c4",
    "backend": "#1f77b4",
    "jit": "#ff7f0e",
    "jit fused": "#2ca02c",
    "limit": "#111111",
}


def draw(folder: Path, rows: Sequence[Row], ablation: Sequence[Row]) -> list[Path]:
    """Write the figures as SVG.

    Args:
        folder: Where to.
        rows: Results of the rows.
        ablation: Results of the ablation.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pygraph"  # the same names in every run
    from matplotlib import pyplot

    made: list[Path] = []
    measured = [row for row in rows if "error" not in row]
    stacks = [row for row in ablation if "error" not in row]
    for name, part, plot in (
        ("speedups", measured, _bars),
        ("cdf", measured, _distribution),
        ("training", [row for row in measured if row["training"]], _steps),
        ("ablation", stacks, _stacks),
    ):
        if not part:
            continue
        figure = plot(pyplot, part)
        path = folder / f"{name}.svg"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
        made.append(path)
    return made


def _bars(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Speed-ups over default ``torch.compile``: bars of each row; the limit is a line above them."""
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.62 * len(rows) + 1.5), 4.2))
    ways = ["reduce-overhead", *OURS]
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        ratios = [speed_up(row, (way,), ("compile",)) or 0.0 for row in rows]
        places = [i + (number - (len(ways) - 1) / 2) * width for i in range(len(rows))]
        axes.bar(places, ratios, width, label=way, color=COLORS[way])
    limits = {i: found for i, row in enumerate(rows) if (found := speed_up(row, ("limit",), ("compile",))) is not None}
    if limits:
        left, right = ([i + side for i in limits] for side in (-0.42, 0.42))
        axes.hlines(list(limits.values()), left, right, color=COLORS["limit"], linewidth=1.2, label="limit")
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(rows)), [row["row"] for row in rows], rotation=60, ha="right")
    axes.set_ylabel("speed-up over torch.compile")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(ncols=len(ways) + 1, fontsize="small", loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)
    return figure


def _steps(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Speed-ups of steps of training over default ``torch.compile``, the largest on top."""
    ways = {"reduce-overhead": 'torch.compile(mode="reduce-overhead")', "jit fused": "pygraph.jit(step, fuse=True)"}
    found = {row["row"]: [speed_up(row, (way,), ("compile",)) or 0.0 for way in ways] for row in rows}
    names = sorted(found, key=lambda name: found[name][-1])
    figure, axes = pyplot.subplots(figsize=(8.0, 0.42 * len(names) + 1.2))
    for number, (way, label) in enumerate(ways.items()):
        places = [i + 0.2 - 0.4 * number for i in range(len(names))]
        ratios = [found[name][number] for name in names]
        bars = axes.barh(places, ratios, 0.38, label=label, color=COLORS[way])
        axes.bar_label(bars, [f"{ratio:.2f}" if ratio else "failed" for ratio in ratios], padding=3, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.6)
    axes.set_yticks(range(len(names)), [name.removesuffix("-t") for name in names])
    axes.set_xlabel("times faster than default torch.compile, a whole step of training")
    axes.margins(x=0.08)
    axes.legend(fontsize="small", loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _distribution(pyplot: Any, rows: Sequence[Row]) -> Any:
    """The share of rows with at most a speed-up, over reduce-overhead and over default."""
    figure, both = pyplot.subplots(1, 2, figsize=(9.0, 3.6), sharey=True)
    for axes, over in zip(both, ("reduce-overhead", "compile"), strict=True):
        for way in OURS:
            ratios = sorted(ratio for row in rows if (ratio := speed_up(row, (way,), (over,))) is not None)
            if ratios:
                shares = [(i + 1) / len(ratios) for i in range(len(ratios))]
                axes.step([ratios[0], *ratios], [0.0, *shares], where="post", label=way, color=COLORS[way])
        axes.axvline(1.0, color="black", linewidth=0.6)
        axes.set_xlabel(f"speed-up over {'torch.compile' if over == 'compile' else over}")
    both[0].set_ylabel("share of rows")
    if both[0].get_legend_handles_labels()[1]:
        both[0].legend(fontsize="small")
    return figure


def _stacks(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Geometric means of speed-ups over eager as transforms are added, in inference and training."""
    figure, axes = pyplot.subplots(figsize=(7.0, 3.6))
    for number, (kind, training) in enumerate((("inference", False), ("training", True))):
        part = [row for row in rows if row["training"] == training]
        means = [compare(part, (way,), ("eager",)).mean or 0.0 for way in STACKS]
        axes.bar([i + (number - 0.5) * 0.4 for i in range(len(STACKS))], means, 0.4, label=kind)
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(STACKS)), STACKS)
    axes.set_ylabel("geometric mean over eager")
    axes.legend(fontsize="small")
    return figure
