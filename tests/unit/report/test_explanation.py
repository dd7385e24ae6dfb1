"""Explanations as text: by `str`, and as `rich` prints them; what they hold, and what they do not."""

from __future__ import annotations

import gc
import io
import json
import weakref
from typing import Any

import torch
from rich.console import Console

import pygraph
from pygraph.ir.descriptors import Fallback
from pygraph.report.explain import Explanation


def some(device: torch.device) -> Any:
    fast = pygraph.jit(lambda x: torch.sin(x)[x > 0])
    for _ in range(2):
        fast(torch.ones(3, 4, device=device))
    return fast


def printed(report: Explanation, width: int, **options: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=width, legacy_windows=False, **options).print(report)
    return text.getvalue()


def test_text_is_plain_and_of_120_columns(device: torch.device) -> None:
    report = some(device).explain()
    assert "\x1b" not in str(report)
    assert max(map(len, str(report).splitlines())) == 120
    assert str(report) == str(report) == repr(report)


def test_rich_prints_in_its_width_and_in_colour(device: torch.device) -> None:
    report = some(device).explain()
    for width in (60, 100, 160):
        assert max(map(len, printed(report, width, color_system=None).splitlines())) <= width
    assert "\x1b[33mfallback" in printed(report, 200, force_terminal=True, color_system="standard")
    assert printed(report, 120, color_system=None) == str(report)


def test_a_narrow_terminal_leaves_room_for_the_arguments(device: torch.device) -> None:
    lines = printed(some(device).explain(), 80, color_system=None).splitlines()
    column = next(line for line in lines if line.startswith("┏")).split("┳")[0]
    assert len(column) >= 24


def test_markup_in_names_is_text(device: torch.device) -> None:
    report = Explanation("[red]f[/red]", (), {Fallback("[bold]x", "[/]"): 1})
    assert "fallback ×1: [bold]x: [/]" in str(report)
    assert "pygraph: [red]f[/red]" in str(report)


def test_it_keeps_no_graph_and_no_tensor_alive(device: torch.device) -> None:
    def scaling() -> tuple[Explanation, list[weakref.ref[Any]]]:
        weight = torch.ones(4, device=device)
        fast: Any = pygraph.jit(lambda x: x * weight)
        fast(torch.ones(3, 4, device=device))
        (entry,) = list(fast.engine.cache.entries)
        return fast.explain(), [weakref.ref(one) for one in (entry, entry.executable, entry.program, weight)]

    report, gone = scaling()
    gc.collect()
    assert [one() for one in gone] == [None] * 4
    assert "closed-over weight" in report._repr_html_()


def test_plain_data_has_no_pictures(device: torch.device) -> None:
    data = some(device).explain().to_dict()
    assert "outline" not in json.dumps(data)
