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


@pytest.mark.parametrize(
    ("row", "way", "over", "text"),
    [
        ("xlnet-i", "backend", "compile", "7.2 × as fast"),
        ("mobilebert-i", "backend", "compile", "2.8 × on MobileBERT"),
        ("dlrm-i", "backend", "compile", "2.3 × on DLRM"),
        ("lcnet-i", "backend", "compile", "1.05 × by `backend="),
        ("distilgpt2-t", "jit fused", "compile", "1.05 × by `jit(step, fuse=True)`"),
        ("maskrcnn-i", "backend", "compile", "1.00 ×"),
        ("speech-transformer-i", "backend", "reduce-overhead", "1.24 × as fast as `reduce-overhead`"),
    ],
)
def test_rows_that_the_results_name(row: str, way: str, over: str, text: str) -> None:
    ways_of_row = json.loads((RESULTS / f"{row}.json").read_text())["ways"]
    number = text.split()[0]
    found = ways_of_row[over]["wall_us"][1] / ways_of_row[way]["wall_us"][1]
    assert f"{found:.{len(number.partition('.')[2])}f}" == number
    assert text in (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("`pygraph.jit`", "native"),
        ('`torch.compile(mode="reduce-overhead")`', "reduce-overhead"),
        ("`torch.compile`", "torch.compile"),
    ],
)
def test_times_of_calls(name: str, way: str) -> None:
    rows = {row["name"]: row for row in json.loads((RESULTS.parent / "callpath-h200.json").read_text())["results"]}
    found = [rows[row]["us"][way][1] for row in ("add of 1", "add of 32", "bert, a tensor out")]
    cells = " | ".join(f"{time:.1f}" if time < 10 else f"{time:.0f}" for time in found)
    assert f"| {name} | {cells} |" in (ROOT / "docs/results.md").read_text().splitlines()
