"""The page of a report: complete, escaped, on its own, and in agreement with itself."""

from __future__ import annotations

import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.ir.descriptors import Fallback, Region
from pygraph.ir.drawing import Drawing
from pygraph.ir.selections import Candidate, Compared, Selection
from pygraph.report.call_report import NO_COUNTS, NO_MECHANISMS, NO_MEMORY, CallReport
from pygraph.report.explain import DonatedReport, Explanation
from pygraph.report.page import fragment, page
from pygraph.report.profile import OperationTime, Profile

EVIL = "<script>alert('1')</script>&\"<b>"
VOID = {"meta", "br"}


class Checked(HTMLParser):
    """Reads a page, and fails where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def call(**fields: Any) -> CallReport:
    return CallReport(
        **{
            "arguments": ("x: float32[2]",), "counts": NO_COUNTS, "regions": (), "fallbacks": (), "calls": 1,
            "memory": NO_MEMORY, "mechanisms": NO_MECHANISMS, **fields,
        }
    )  # fmt: skip


def three_regions(device: torch.device, **options: Any) -> Any:
    @pygraph.jit(**options)
    def step(x: torch.Tensor, k: float) -> torch.Tensor:
        y = torch.relu(x * k)
        return y + y[y > 0].sum()

    for _ in range(3):
        step(torch.ones(3, 4, device=device), 2.0)
    return step


def test_it_has_what_the_text_has(device: torch.device) -> None:
    report = three_regions(device).explain()
    found = Checked(page(report))
    remedy = "Keep the shape: torch.where or a mask"
    for line in (str(report.totals), "the shape of its result depends on data", remedy, "eager: launch"):
        assert line in found.text
    assert len(report.calls[0].regions) == 3
    for region in report.calls[0].regions:
        assert f"{region.kind}: {region.way}" in found.text
        if region.selection is not None:
            assert "; ".join(region.selection.sentences()) in found.text
            for one in region.selection.compared:
                assert f"{one.time:.1f} µs (host {one.host:.1f} µs, device {one.device:.1f} µs" in found.text
    assert {"memory", "words", "fallbacks"} <= {word.lower() for word in found.text.split()}


def test_nodes_have_decisions_and_the_users_lines(device: torch.device) -> None:
    found = Checked(page(three_regions(device, mode="replay").explain()))
    assert "y = torch.relu(x * k)" in found.text
    assert re.search(r"test_page\.py:\d+ return y \+ y\[y > 0\]\.sum\(\)", found.text)
    assert re.search(rf"relu float32\[3, 4\] {device.type} .*relu.* (as recorded|pointers)", found.text)
    assert re.search(rf"add float32\[3, 4\] {device.type} .*add.* pointers: \d+ by the (host|device)", found.text)
    assert "numbers: 1 by the host" in found.text
    assert len(re.findall(r"\d+ nodes, recorded from one stream", found.text)) == 2
    assert "svg" in found.tags


def test_numbers_agree(device: torch.device) -> None:
    """Patched nodes are those of each way together."""
    report = three_regions(device, mode="replay").explain()
    found = re.search(r"Pointers change: (.*?)\. transforms", Checked(page(report)).text)
    assert found is not None
    counts = [int(count) for count in re.findall(r"(\d+) nodes? (?:by|with)", found[1])]
    assert sum(counts) == report.calls[0].counts["patched_nodes"] > counts[0]


@pytest.mark.parametrize("make", [page, fragment])
def test_nothing_is_loaded_or_run(make: Any, device: torch.device) -> None:
    found = Checked(make(three_regions(device).explain()))
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(found.tags)
    loading = [value for _, name, value in found.attributes if name in ("src", "href", "xlink:href", "action", "data")]
    assert all(value.startswith("#") for value in loading)
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert "url(" not in "".join(found.texts)
    assert "@import" not in "".join(found.texts)


def test_links_lead_to_words(device: torch.device) -> None:
    found = Checked(page(three_regions(device).explain()))
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for tag, name, value in found.attributes if (tag, name) == ("a", "href")} <= set(ids)


def test_all_text_is_escaped(device: torch.device) -> None:
    selection = Selection(Candidate("patch"), EVIL, (Compared(Candidate("patch"), 1.0, 1.0, 1.0, 7),))
    region = Region(0, "graph", "patch", EVIL, EVIL, selection=selection)
    fallback = Fallback(EVIL, EVIL, EVIL)
    named = call(
        arguments=(EVIL,) * 5, regions=(region,), fallbacks=(fallback,), function=EVIL, baked={EVIL: EVIL},
        outline=pygraph.trace(lambda d: d[EVIL] + 1)({EVIL: torch.ones(2)}).draw().outline,
    )  # fmt: skip
    report = Explanation(EVIL, (named, named), {fallback: 1}, (DonatedReport(EVIL, EVIL, 1),), (EVIL,), EVIL)
    found = Checked(page(report))
    assert "script" not in found.tags
    assert found.tags.count("b") == 6  # the numbers of the one kind of call
    assert found.text.count("<script>alert('1')</script>") > 10


def test_a_faster_way_that_does_not_run_has_a_word(device: torch.device) -> None:
    patch, copy = Compared(Candidate("patch"), 3.4, 3.4, 3.0, 7), Compared(Candidate("copy"), 3.0, 3.0, 2.9, 7)
    selection = Selection(
        Candidate("patch"), "nothing was faster by more than noise", (patch, copy), (-0.6, 0.1), 0.984
    )
    report = Explanation("f", (call(regions=(Region(0, "graph", "patch", selection=selection),)),), {})
    for text in (Checked(page(report)).text, " ".join(str(report).split())):
        assert "copy was measured 0.4 µs faster, within the margin of 1.0 µs" in text


def test_of_many_kinds_of_calls_those_with_the_most_calls_are_drawn() -> None:
    drawn = pygraph.trace(torch.sin)(torch.ones(2)).draw().outline
    kinds = [call(arguments=(f"x: float32[{n}]",), calls=n, outline=drawn) for n in range(40)]
    found = Checked(page(Explanation("f", tuple(kinds), {})))
    assert found.tags.count("svg") == found.text.count("The Program drawn") == 12
    assert found.text.count("too many kinds of calls to show all") == 28
    sections = found.text.split("x: float32[")[1:41]
    assert ["The Program drawn" in section for section in sections] == [n >= 28 for n in range(40)]


def test_reports_without_calls_and_without_graphs() -> None:
    assert "none yet" in Checked(page(pygraph.jit(torch.sin).explain())).text
    fast = pygraph.jit(lambda x: x if int(x.sum()) > 0 else -x)
    fast(torch.ones(2))
    text = Checked(page(fast.explain())).text
    assert "as it is" in text
    differentiated = Explanation("f", (call(differentiated=True),), {})
    assert "Autograd differentiates these calls" in Checked(page(differentiated)).text


def test_kinds_that_differ_in_values_are_one_section(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, n: x[:n] * 2)
    for n in (2, 3, 4):
        fast(torch.ones(9, device=device), n)
    found = Checked(page(fast.explain()))
    assert "args[1] was 2, 3, 4" in found.text
    assert "3 kinds of calls, which differ in baked values only" in found.text
    assert found.tags.count("svg") == 1


def test_files(device: torch.device, tmp_path: Path) -> None:
    report = three_regions(device).explain()
    report.save(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text == page(report)
    assert text.startswith("<!DOCTYPE html>")
    assert report._repr_html_() in text
    assert "prefers-color-scheme: dark" in text
    report.save(str(tmp_path / "other.html"))
    assert (tmp_path / "other.html").read_text(encoding="utf-8") == text


def test_lines_of_every_file_have_their_code(device: torch.device, tmp_path: Path) -> None:
    """Not only those of the function's own file; but where two files have the same name, neither is shown."""
    sources = {"one/helper.py": "def helper(x):\n    return x * 3\n", "two/same.py": "def same(x):\n    return x + 4\n"}
    sources["three/same.py"] = "\n" + "def same(x): return x - 5\n"
    found: list[Any] = []
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(source, encoding="utf-8")
        found.append(runpy.run_path(str(path))[path.stem])
    helper, one, other = found
    fast = pygraph.jit(lambda x: other(one(helper(x))))
    fast(torch.ones(3, device=device))
    text = Checked(page(fast.explain())).text
    assert "helper.py:2 return x * 3" in text
    assert "same.py:2" in text
    assert "return x + 4" not in text
    assert "return x - 5" not in text


def test_kernel_times(device: torch.device) -> None:
    """By line and by node; why there are none, where they were asked for."""
    step = three_regions(device)
    assert "µs (" not in Checked(page(step.explain())).text.replace("µs (host", "")
    waiting = Checked(page(step.explain(profile=True)))
    assert "Kernel times: the next call of this kind measures it" in waiting.text
    assert "µs" not in waiting.texts  # no column
    step(torch.ones(3, 4, device=device), 2.0)
    report = step.explain(profile=True)
    [profile] = [call.profile for call in report.calls]
    assert isinstance(profile, Profile)
    found = Checked(page(report))
    assert f"Kernel times by line: {profile.us:,.1f} µs ({profile.how})" in found.text
    for row in profile.rows:
        assert row.text in found.text
        assert f"{row.us:.1f}" in found.text
    [outline] = [call.outline for call in report.calls]
    assert outline is not None
    times = {node.label: node.us for node in outline.nodes}
    assert times["relu"] is not None
    assert sum(us for us in times.values() if us is not None) == pytest.approx(profile.us, abs=0.01)
    assert f"{times['relu']:,.1f} µs" in Drawing(outline).svg


def test_many_lines_of_kernel_times_are_added_up() -> None:
    times = [OperationTime(f"train.py:{n}", (), "aten.sin", (float(n),)) for n in range(1, 41)]
    found = Checked(page(Explanation("f", (call(profile=Profile.of(times, "by the clock")),), {})))
    assert "train.py:11" in found.text
    assert "train.py:10" not in found.text
    assert "10 more lines: 55.0 µs" in found.text
