"""``python -m pygraph bench``: its options, and whole runs of tiny workloads by real processes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import pygraph
from benchmarks.table import command, results, rows, ways
from benchmarks.table.capture import CaptureError
from benchmarks.table.setting import Setting
from pygraph import __main__
from pygraph.__main__ import main
from tests.bench_workloads import WORKLOADS

TINY = ["--workloads", "tests.bench_workloads"]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", *TINY, "--only", "tiny-t"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tiny-t: Tiny-T, training, batch 2",
        "    from: written here",
        "    hard: a scalar",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nothing", "tiny-i"], ["--only nothing:", "tiny-i, tiny-t"]),
        (["--ways", "slow", "--out", "nowhere"], ["'slow'", "'jit fused'"]),
        (["--ways", "graphs", "--out", "nowhere"], ["'graphs'"]),
        (["--render", "--out", "nowhere"], ["no results in nowhere", "--out"]),
        (["--workloads", "tests.no_workloads", "--list"], ["tests.no_workloads", "checkout"]),
    ],
)
def test_what_is_not_there_is_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words)


def test_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "pygraph" / "__main__.py"))
    assert main(["bench", "--list"]) == 2
    assert "Run it in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0/3", "4/3", "2", "a/b"])
def test_shards_are_numbered_from_one(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--shard", value])
    assert "--shard" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_hold_every_row_once(count: int) -> None:
    shards = [rows.chosen(WORKLOADS, None, (number, count)) for number in range(1, count + 1)]
    assert sorted(row.name for shard in shards for row in shard) == sorted(WORKLOADS)


def test_ways_are_in_order_and_have_eager() -> None:
    assert rows.check_ways(("jit", "compile"), ways.WAYS) == ("eager", "compile", "jit")
    last = ("limit of compile", "limit of eager", "max-autotune", "backend max-autotune")
    assert ways.in_order(ways.WAYS)[-4:] == last


def test_the_table_has_the_rows_of_the_paper() -> None:
    workloads = pytest.importorskip("benchmarks.table.workloads")
    assert len(workloads.WORKLOADS) == 25
    assert all(name == row.name for name, row in workloads.WORKLOADS.items())


# ---- whole runs ----------------------------------------------------------------------------------------------------


def bench(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a run."""
    output = io.StringIO()
    options = __main__.build_parser().parse_args(["bench", *TINY, "--seconds", "0.2", "--inputs", "4", *arguments])
    return command.run(options, Console(file=output, width=500)), output.getvalue()


def test_a_run_on_the_emulated_device(tmp_path: Path) -> None:
    """Two rows by real processes; a second run has nothing to do."""
    selected = ["--only", "tiny-i", "tiny-t", "--out", str(tmp_path), "--jobs", "2", "--ways", "jit"]
    code, output = bench(*selected)
    assert code == 0, output
    assert "2 rows to measure, 0 have a result" in output
    found = {row["row"]: row for row in results.read(tmp_path, ablation=False)}
    assert list(found) == ["tiny-i", "tiny-t"]
    for row in found.values():
        assert list(row["ways"]) == ["eager", "jit"]
        jit = row["ways"]["jit"]
        assert jit["right"]
        assert jit["distance"] == row["ways"]["eager"]["distance"]
        assert jit["bytes_copied"] == 0
        assert jit["wall_us"][0] <= jit["wall_us"][1] <= jit["wall_us"][2]
        assert row["inputs"] == 4
        assert row["input_bytes"] == 2 * 8 * (4 if row["training"] else 2)
        assert row["reference"] == "eager in float32"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    code, output = bench(*selected)
    assert code == 0
    assert "0 rows to measure, 2 have a result" in output
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == before
    assert "| tiny-t | 2 |" in (tmp_path / "README.md").read_text()


def test_a_limit_needs_cuda() -> None:
    if pygraph.default_device().type == "cuda":
        pytest.skip("here there is one")
    setting = Setting(WORKLOADS["tiny-i"], True, pygraph.default_device(), 2)
    with pytest.raises(CaptureError, match="a capture by torch needs a CUDA device"):
        ways.build("limit of eager", setting)


def test_the_ablation(tmp_path: Path) -> None:
    stacks = ("+ devicify", "+ indirect")
    selected = ["--ways", *stacks, "--only", "tiny-i", "--out", str(tmp_path)]
    code, output = bench(*selected, "--ablation")
    assert code == 0, output
    (row,) = results.read(tmp_path, ablation=True)
    assert results.read(tmp_path, ablation=False) == []
    assert list(row["ways"]) == ["eager", *stacks]
    assert all(row["ways"][way]["right"] for way in stacks)
    assert row["ways"]["+ indirect"]["bytes_copied"] == 0
    assert row["ways"]["+ devicify"]["bytes_copied"] > 0
    assert "+ indirect: speed-up" in (tmp_path / "README.md").read_text()
