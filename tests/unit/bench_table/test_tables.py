"""Tables and figures of results made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.table import comparison, results, tables, ways
from benchmarks.table.results import Row
from pygraph.__main__ import main


def result(name: str, number: int, times: dict[str, float | None], **more: Any) -> Row:
    found = {
        way: {"error": "ValueError: no\nmore"} if time is None else {
            "wall_us": [time - 1, time, time + 1], "cpu_us": [1.0, 2.0, 3.0], "compile_s": 1.0, "distance": 1e-3,
            "right": way != "backend", "first_reserved": 2 << 20, "steady_reserved": 1 << 20,
        }
        for way, time in times.items()
    }  # fmt: skip
    return {
        "row": name, "number": number, "title": name.upper(), "training": name.endswith("-t"), "batch_size": 8,
        "source": "here", "hard": "a | b", "differs": "", "ways": found, "inputs": 100, "input_bytes": 4096,
        "reference": "eager in float32", "environment": {
            "command": "python -m pygraph bench", "gpu": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0",
            "python": "3.12.1", "cores": 16,
        }, **more,
    }  # fmt: skip


ROWS = [
    result("a-i", 0, {"eager": 200.0, "compile": 100.0, "reduce-overhead": 80.0, "jit": 40.0, "limit": 30.0}),
    result("b-i", 1, {"eager": 200.0, "compile": 100.0, "reduce-overhead": 125.0, "jit": 110.0, "limit": None}),
    result("c-t", 2, {"eager": 100.0, "compile": None, "reduce-overhead": 50.0, "jit": 50.5}),
]
FAILED: Row = {**result("d-t", 3, {}), "error": "the process ended with code 9 while compiling jit:\nKilled"}


def test_comparisons() -> None:
    over_mode = comparison.compare(ROWS, ("jit",), ("reduce-overhead",))
    assert over_mode.mean == pytest.approx((2.0 * 125 / 110 * 50 / 50.5) ** (1 / 3))
    assert (over_mode.won, over_mode.lost, over_mode.rows) == (2, (), 3)
    over_best = comparison.compare(ROWS[:2], ("jit",), ways.MODES)
    assert over_best.mean == pytest.approx((2.0 * 100 / 110) ** 0.5)
    assert (over_best.won, over_best.lost, over_best.rows) == (1, ("b-i",), 2)
    assert comparison.compare(ROWS[2:], ("jit",), ("compile",)) == comparison.Comparison(None, 0, (), 0)


def test_rounds_that_differ_by_more_than_two_ways_decide_nothing() -> None:
    row = result("a-i", 0, {"compile": 9500.0, "backend": 10400.0, "jit": 9700.0})
    row["ways"]["backend"] |= {"wall_us": [9540.0, 10400.0, 10470.0], "right": True}
    row["ways"]["compile"]["wall_us"] = [9480.0, 9500.0, 9630.0]
    found = comparison.compare([row], ("backend",), ("compile",))
    assert (found.won, found.lost) == (0, ())
    assert found.mean == pytest.approx(9500 / 10400), "the mean has it as it was measured"
    assert comparison.compare([row], ("jit",), ("compile",)).lost == ("a-i",)
    assert comparison.compare([row], ("compile",), ("jit",)).won == 1


def test_the_tables_of_times() -> None:
    page = tables.render([*ROWS, FAILED])
    assert (
        """\
| workload | batch | eager | compile | reduce-overhead | jit | limit | jit: speed-up |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| a-i | 8 | 200 | 100 | 80 | 40 | 30 | 2.00 × |
| b-i | 8 | 200 | 100 | 125 | 110 | failed | 0.91 × |
| c-t | 8 | 100 | failed | 50 | 50 | – | 0.99 × |
| d-t | 8 | failed | failed | failed | failed | failed | – |
"""
        in page
    )
    assert (
        """\
|  | way | over default | over reduce-overhead | over best mode | won | lost |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| inference | reduce-overhead | 1.00 × | – | 1.00 × | 1 of 2 | 1: b-i |
| inference | jit | 1.51 × | 1.51 × | 1.35 × | 1 of 2 | 1: b-i |
| inference | limit | 3.33 × | 2.67 × | 2.67 × | 1 of 1 | 0 |
| inference | pygraph's best | 1.51 × | 1.51 × | 1.35 × | 1 of 2 | 1: b-i |
| training | reduce-overhead | – | – | – | 0 of 0 | 0 |
| training | jit | – | 0.99 × | 0.99 × | 0 of 1 | 0 |
| training | limit | – | – | – | 0 of 0 | 0 |
| training | pygraph's best | – | 0.99 × | 0.99 × | 0 of 1 | 0 |
"""
        in page
    )
    assert page.endswith("\n## Commands\n\n- `python -m pygraph bench`\n")
    assert (
        """\
## Failures

- b-i, limit: ValueError: no more
- c-t, compile: ValueError: no more
- d-t: the process ended with code 9 while compiling jit: Killed
"""
        in page
    )
    assert "Measured on: NVIDIA H200, torch 2.11.0, CUDA 13.0, Python 3.12.1, 16 cores." in page
    assert "| a-i | 1.0e-03 | 1.0e-03 | 1.0e-03 | 1.0e-03 | eager in float32 |" in page
    assert "| a-i | 1 / 2 | 1 / 2 | 1 / 2 | 1 / 2 |" in page


def test_wrong_results_win_nothing() -> None:
    page = tables.render([result("a-i", 0, {"compile": 100.0, "backend": 10.0, "jit": 50.0})])
    assert "| a-i | 8 | 100 | 10, **wrong** | 50 | – | 2.00 × |" in page
    assert "| a-i | 1.0e-03 | 1.0e-03, **wrong** | 1.0e-03 | eager in float32 |" in page
    assert "| inference | backend | – | – | – | 0 of 0 | 0 |" in page
    assert "| inference | pygraph's best | 2.00 × | – | 2.00 × | 1 of 1 | 0 |" in page


def test_published_figures_are_beside_ours() -> None:
    row = result("xlnet-i", 0, {"compile": 300.0, "reduce-overhead": 200.0, "jit": 100.0}, title="XLNetLMHeadModel")
    row["ways"]["jit"]["profile"] = {"coverage": 0.98, "coverage_time": 0.99, "kernels": 400.0, "copied": {},
                                     "copy_kernels": 0.0}  # fmt: skip
    page = tables.render([row])
    assert "| XLNetLMHeadModel I: over torch's CUDA graphs | 3.36 × | – | 2.00 × | – | – |" in page
    assert "| XLNetLMHeadModel I: kernels in graphs | 0 % → 99 % | – | 98 % | – | – |" in page
    assert "| xlnet-i | – | 98 %, 99 % of 400 |" in page


def test_the_table_of_the_ablation() -> None:
    rows = [
        result("a-i", 0, {"eager": 200.0, "graphs": 10.0, "+ devicify": 50.0, "+ indirect": None}),
        result("b-i", 1, {"eager": 200.0, "graphs": 100.0, "+ devicify": 50.0, "+ indirect": 20.0}),
    ]
    page = tables.render([], rows)
    assert "Means are of the 1 rows in which all of these have run." in page
    assert (
        """\
| workload | eager | graphs | + devicify | + indirect | graphs: speed-up | + devicify: speed-up | + indirect: speed-up |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| a-i | 200 | 10 | 50 | failed | 20.00 × | 4.00 × | – |
| b-i | 200 | 100 | 50 | 20 | 2.00 × | 4.00 × | 10.00 × |
| geometric mean | – | – | – | – | 2.00 × | 4.00 × | 10.00 × |
"""
        in page
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for row in [*ROWS, FAILED]:
        results.write(tmp_path, row["row"], row, ablation=False)
    ablation = result("a-i", 0, {"eager": 200.0, "graphs": 100.0, "+ devicify": 50.0})
    results.write(tmp_path, "a-i", ablation, ablation=True)
    assert not list(tmp_path.glob("*.tmp"))
    return tmp_path


def test_rendering_without_matplotlib(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--render", "--out", str(folder)]) == 0
    assert "pip install -e '.[bench]'" in capsys.readouterr().out
    assert "## Failures" in (folder / "README.md").read_text()


def test_figures(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "--render", "--out", str(folder)]) == 0
    for name in ("speedups", "cdf", "ablation"):
        assert "<svg" in (folder / f"{name}.svg").read_text()


def test_files_hold_what_was_measured(folder: Path) -> None:
    assert json.loads((folder / "a-i.json").read_text()) == ROWS[0]
    assert [row["row"] for row in results.read(folder, ablation=False)] == ["a-i", "b-i", "c-t", "d-t"]
