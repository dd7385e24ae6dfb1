"""The page of a report: one HTML file with styles and pictures in it, which loads nothing and runs nothing.

Everything that is not markup is escaped by the templates, which `jinja2` fills.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pygraph.ir.descriptors import Fallback, Region
from pygraph.ir.drawing import Drawing, region_title
from pygraph.ir.outline import Outline, OutlineNode
from pygraph.ir.source_lines import text_of
from pygraph.process.cache import readable
from pygraph.report.call_report import MEMORY_TITLES, CallReport
from pygraph.report.glossary import TERMS, pieces
from pygraph.report.profile import Profile, ProfileRow
from pygraph.report.remedies import remedy_of
from pygraph.report.verdict import differences, groups, title_of

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_MOST_DRAWN = 12
"""Kinds of calls of which a page draws the Program and lists its nodes: those with the most calls."""

_MOST_LINES = 30
"""Lines with kernel times that a page shows, of each kind of call."""

_MOST_OPEN = 2
"""Kinds of calls whose sections are open at first."""


class ReportFields(Protocol):
    """The fields of an `pygraph.Explanation` that pages are made of, and that templates name besides these."""

    @property
    def calls(self) -> tuple[CallReport, ...]:
        """One report per kind of call."""
        ...

    def counted_fallbacks(self) -> dict[Fallback, int]:
        """Fallbacks with numbers of calls."""
        ...


def page(report: ReportFields) -> str:
    """A report as a page of its own."""
    return _environment().get_template("page.html").render(_contents(report))


def fragment(report: ReportFields) -> str:
    """A report as part of another page, as notebooks are."""
    return _environment().get_template("fragment.html").render(_contents(report))


@functools.cache
def _environment() -> Environment:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    made = jinja2.Environment(
        autoescape=True, loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"glossed": _glossed, "size": readable}  # pyright: ignore[reportUnknownMemberType]
    return made


def _glossed(text: str) -> Markup:
    """A text with links from the words that the glossary explains."""
    from markupsafe import Markup, escape

    link = Markup('<a class="pg-term" href="#{}" title="{}">{}</a>')
    return Markup().join(
        escape(piece) if term is None else link.format(term.anchor, term.meaning, piece) for piece, term in pieces(text)
    )


# ---- what the templates show -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Bar:
    """The time of one candidate."""

    name: str
    time: str
    parts: str
    share: float
    is_chosen: bool


@dataclasses.dataclass(frozen=True)
class _ProfileView:
    """Kernel times of a kind of call, by line."""

    title: str
    rows: Sequence[ProfileRow]
    rest: str


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of the user's, with the nodes that come from it."""

    source: str
    code: str
    nodes: list[OutlineNode]

    @property
    def has_times(self) -> bool:
        """Whether kernels of it were measured."""
        return any(node.us is not None for node in self.nodes)


@dataclasses.dataclass(frozen=True)
class _RegionView:
    """A region of a kind of call."""

    kind: str
    is_graph: bool
    title: str
    sentences: list[str]
    bars: list[_Bar]
    lines: list[_Line]
    count: int
    more: int


def _contents(report: ReportFields) -> dict[str, Any]:
    found = groups(report.calls)
    by_calls = sorted(range(len(found)), key=lambda number: -_calls(found[number]))
    ranks = {number: rank for rank, number in enumerate(by_calls)}
    kinds = [_kind(group, ranks[number]) for number, group in enumerate(found)]
    counted = report.counted_fallbacks().items()
    return {
        "report": report,
        "differences": differences(report.calls),
        "kinds": kinds,
        "fallbacks": [(one, count, text_of(one.source), remedy_of(one)) for one, count in counted],
        "terms": TERMS,
        "memory_names": MEMORY_TITLES,
        "most_memory": max((sum(kind["memory"].values()) for kind in kinds), default=0),
    }


def _calls(group: Sequence[CallReport]) -> int:
    return sum(one.calls for one in group)


def _kind(group: Sequence[CallReport], rank: int) -> dict[str, Any]:
    """Kinds of calls that differ in values only, as one section shows them; the rank is that by numbers of calls."""
    from markupsafe import Markup

    call = next((one for one in group if isinstance(one.profile, Profile)), group[0])
    outline = call.outline if rank < _MOST_DRAWN else None
    return {
        "title": title_of(group), "call": call, "is_open": rank < _MOST_OPEN, "rank": rank,
        "calls": _calls(group), "seconds": sum(one.seconds for one in group), "count": len(group),
        "memory": {name: max(one.memory[name] for one in group) for name in call.memory},
        "mechanisms": _mechanisms(call),
        "regions": [_region(region, outline) for region in call.regions],
        "program": _program(outline),
        "profile": _profile(call.profile) if isinstance(call.profile, Profile) else call.profile,
        "svg": None if outline is None or not outline.nodes else Markup(Drawing(outline).svg),  # all text is escaped
        "is_left_out": outline is not call.outline,
    }  # fmt: skip


def _profile(profile: Profile) -> _ProfileView:
    shown, rest = profile.rows[:_MOST_LINES], profile.rows[_MOST_LINES:]
    us = sum(row.us for row in rest)
    return _ProfileView(
        f"Kernel times by line: {profile.us:,.1f} µs ({profile.how})", shown,
        f"{len(rest)} more lines: {us:,.1f} µs" if rest else "",
    )  # fmt: skip


def _mechanisms(call: CallReport) -> list[str]:
    """How pointers and numbers change between replays, with numbers of nodes."""
    counts = call.mechanisms
    numbers = call.counts["patched_nodes"] - counts["host"] - counts["device"] - counts["table"]
    found = [
        (counts["host"], "node by the host", "nodes by the host"),
        (counts["device"], "node by the device", "nodes by the device"),
        (counts["table"], "node by a table", "nodes by a table"),
        (numbers, "node with numbers only, by the host", "nodes with numbers only, by the host"),
        (counts["copy"], "input or result is copied", "inputs or results are copied"),
    ]
    return [f"{count} {one if count == 1 else many}" for count, one, many in found if count > 0]


def _program(outline: Outline | None) -> list[_Line]:
    """The nodes of a Program that has no regions."""
    if outline is None or outline.regions:
        return []
    return _lines([node for node in outline.nodes if node.kind != "input"])


def _region(region: Region, outline: Outline | None) -> _RegionView:
    nodes = [] if outline is None else [node for node in outline.nodes if node.region == region.index]
    more = 0 if outline is None else outline.more.get(region.index, 0)
    sentences = [] if region.selection is None else region.selection.sentences()
    if region.source is not None:
        sentences.append(f"line: {region.source} {text_of(region.source)}".rstrip())
    return _RegionView(
        region.kind, region.way != "launch", region_title(region), sentences, _bars(region), _lines(nodes),
        len(nodes) + more, more,
    )  # fmt: skip


def _bars(region: Region) -> list[_Bar]:
    selection = region.selection
    if selection is None:
        return []
    longest = max((one.time for one in selection.compared), default=0.0) or 1.0
    return [
        _Bar(
            one.candidate.name, f"{'' if one.runs else 'about '}{one.time:.1f} µs",
            f"host {one.host:.1f} µs, device {one.device:.1f} µs"
            + (f", median of {one.runs} run{'s' * (one.runs != 1)}" if one.runs else ", by the model of costs"),
            max(100 * one.time / longest, 1.0), one.candidate == selection.chosen,
        )
        for one in selection.compared
    ]  # fmt: skip


def _lines(nodes: Iterable[OutlineNode]) -> list[_Line]:
    grouped = itertools.groupby(nodes, lambda node: node.source)
    return [_Line(source or "", text_of(source), list(found)) for source, found in grouped]
