"""The top of a report: counts, what kinds of calls differ in, and rows that stand for several."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.report.call_report import NO_COUNTS, NO_MECHANISMS, NO_MEMORY, CallReport
from pygraph.report.verdict import Totals, differences, groups, title_of


def report(function: str | None = None, arguments: tuple[str, ...] = ("x: float32[2]",), **baked: str) -> CallReport:
    return CallReport(arguments, NO_COUNTS, (), (), 1, NO_MEMORY, NO_MECHANISMS, function=function, baked=baked)


def test_counts_in_words() -> None:
    assert str(Totals(1, 0, 1, 0, 0.5)) == (
        "1 call: 1 hit, 0 compiled or looked at; 1 graph recorded, 0.50 s of compiling"
    )
    assert str(Totals(5, 4, 3, 2, 1.0)).endswith(
        "3 graphs recorded, 1.00 s of compiling, 2 kinds of calls dropped for others"
    )

    assert str(Totals(5, 4, 3, 0, 1.0, skipped=20)).startswith(
        "29 calls: 5 hits, 4 compiled or looked at, 20 run as they are; "
    )


def test_calls_that_nobody_looks_at_are_counted(device: torch.device) -> None:
    """Kinds of calls that seldom come again run as they are, most of them without a look."""
    fast = pygraph.jit(lambda x: x + 1)
    count = 0
    for size in range(1, 40):
        for _ in range(1 + size % 7):
            fast(torch.ones(size, device=device))
            count += 1
    report = fast.explain()
    assert str(report).startswith(f"<lambda>: {count} calls: ")
    assert report.totals is not None
    assert sum(report.inlined.values()) >= report.totals.skipped
    fast.cache_clear()
    assert str(fast.explain().totals).startswith("0 calls")


def test_each_call_of_the_user_counts_once(device: torch.device) -> None:
    def halves(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return x

    class Model(torch.nn.Module):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * 2

    class Indexed(torch.nn.Module):
        index = 0

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y[self.index % 3] = 0
            self.index += 1
            return y

    x = torch.arange(4.0, device=device)
    functions: list[tuple[Any, tuple[Any, ...]]] = [
        (pygraph.jit(halves), (x,)),
        (pygraph.jit(lambda x: x if x.sum() > 0 else -x), (x,)),
        (pygraph.jit(Model()), (x,)),
        (pygraph.jit(Indexed()), (x,)),
        (pygraph.jit(lambda x, names: x + len(names)), (x, {1, 2})),
        (pygraph.jit(lambda x: x * 2), (x.clone().requires_grad_(),)),
    ]
    for fast, args in functions:
        for number in range(1, 21):
            fast(args[0].detach().requires_grad_(args[0].requires_grad), *args[1:])
            report, info = fast.explain(), fast.cache_info()
            totals = report.totals
            assert totals.hits + totals.misses + totals.skipped == number
            assert (info.hits, info.misses) == (totals.hits, totals.misses)


def test_kinds_of_calls_that_differ_in_values_are_one_row() -> None:
    calls = [report(n=str(n)) for n in (1, 2, 2)] + [report(k="1"), report(), report(), report("backward(f)", n="1")]
    found = groups(calls)
    assert [len(group) for group in found] == [3, 1, 1, 1, 1]
    assert [title_of(group) for group in found] == [
        "x: float32[2], n = 1, 2", "x: float32[2], k = 1", "x: float32[2]", "x: float32[2]",
        "backward(f): x: float32[2], n = 1",
    ]  # fmt: skip
    (line,) = differences(calls)
    assert line.startswith("3 kinds of calls differ in nothing but values: n was 1, 2. Pass it as a tensor if")


def test_the_remedy_for_other_objects_is_that_of_the_warning() -> None:
    (line,) = differences([report(mode=f"'{n}'") for n in "ab"])
    assert line.endswith("mode was 'a', 'b'. Pass the same value, or object, at every call, or let there be few.")


def test_many_values_are_cut() -> None:
    calls = [report(n=str(n), name="'same'") for n in range(20)]
    assert title_of(calls) == "x: float32[2], n = 0, 1, 2, 3, 4, 5, 6, 7, 12 more, name = 'same'"
    assert "name" not in differences(calls)[0]


def test_the_report_of_a_function_that_compiles_often(device: torch.device) -> None:
    def cut(x: Tensor, length: int) -> Tensor:
        return x[:length] * 2

    fast, x = pygraph.jit(cut), torch.ones(9, device=device)
    for length in (3, 4, 5, 5):
        fast(x, length)
    told = fast.explain()
    assert str(told).startswith("cut: 4 calls: 1 hit, 3 compiled or looked at; 3 graphs recorded, ")
    line = "cut: 3 kinds of calls differ in nothing but values: args[1] was 3, 4, 5. Pass it as a tensor"
    assert line in " ".join(str(told).split())
    assert str(told).count("args[0]: float32[9]") <= 2  # in the table, and in that of memory
    data = told.to_dict()
    assert [entry["baked"] for entry in data["entries"]] == [{"args[1]": "3"}, {"args[1]": "4"}, {"args[1]": "5"}]
    assert data["totals"]["hits"] == 1
    assert data["totals"]["seconds"] >= sum(entry["seconds"] for entry in data["entries"]) - 0.01
    assert "differ in nothing" not in str(pygraph.jit(lambda x, k: x * k).explain())


def test_long_values_are_cut(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, text: x + len(text), static_argnums=1)
    fast(torch.ones(2, device=device), "a" * 100)
    (entry,) = fast.explain().to_dict()["entries"]
    assert entry["baked"]["args[1]"] == f"'{'a' * 59}…"


@pytest.mark.parametrize("count", [1, 3])
def test_equal_selections_are_one_line(device: torch.device, count: int) -> None:
    fast, x = pygraph.jit(lambda x, length: x[:length] * 2), torch.ones(9, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in range(2, 2 + count):
            fast(x, length)
    text = " ".join(str(fast.explain()).split())
    selections = [entry["regions"][0]["selection"] for entry in fast.explain().to_dict()["entries"]]
    if len({str(one) for one in selections}) == 1:  # they may have been measured in two seconds
        assert text.count("region 0 runs by") == 1
        assert ("(in 3 kinds of calls)" in text) == (count == 3)
