"""The numbers of the README and of pages of results are those of the results that are committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.table import comparison, ways

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "table-h200"


@pytest.mark.parametrize(
    ("what", "training", "way"),
    [
        ("steps of training, `pygraph.jit(step, fuse=True)`", True, "jit fused"),
        ('steps of training, `torch.compile(model, backend="pygraph")`', True, "backend"),
        ('models in inference, `torch.compile(model, backend="pygraph")`', False, "backend"),
    ],
)
def test_numbers(what: str, training: bool, way: str) -> None:
    files = [path for path in RESULTS.glob("*.json") if ".ablation." not in path.name]
    rows = [row for row in map(json.loads, (path.read_text() for path in files)) if row["training"] is training]
    over = {name: comparison.compare(rows, (way,), modes) for name, modes in comparison.BASELINES.items()}
    best = comparison.compare(rows, (way,), ways.MODES)
    line = (
        f"| {len(rows)} {what} | {over['default'].mean:.2f} × | {over['reduce-overhead'].mean:.2f} × "
        f"| {len(best.lost)} |"
    )
    for page in ("README.md", "docs/results.md", "docs/bench.md"):
        assert line in (ROOT / page).read_text().splitlines(), page
