"""Compilations in the log, and the warning where values keep a function compiling."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import RecompilationWarning
from pygraph.runtime.devices import driver_for


def told(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [one for one in found if one.category is RecompilationWarning]


def test_values_that_differ_at_every_call_are_said_once(device: torch.device) -> None:
    def cut(x: Tensor, length: int, name: str = "cut") -> Tensor:
        return x[:length] * 2

    fast, x = pygraph.jit(cut, static_argnames=("name",)), torch.ones(40, device=device)
    assert told(lambda: [fast(x, length) for length in range(7)] and None) == []
    (warning,) = told(lambda: [fast(x, length) for length in range(7, 30)] and None)
    text = str(warning.message)
    assert "cut(…): compiled 8 times, in " in text
    assert "differ in nothing but args[1], which was 0, 1, 2, 3, 4, 5, 6, 7. Pass it as a tensor" in text
    assert warning.filename == __file__
    assert "fast(x, length)" in Path(__file__).read_text().splitlines()[warning.lineno - 1]


def test_other_differences_are_not(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, k: x * k), torch.ones(2, device=device)
    assert told(lambda: [fast(x, k) for k in range(20)] and None) == [], "the number is live"
    cut = pygraph.jit(lambda x, length: x[:length] * 2)
    sizes = [torch.ones(size, device=device) for size in range(8, 28)]
    assert told(lambda: [cut(x, 1 + i % 4) for i, x in enumerate(sizes)] and None) == [], "so are shapes"


def test_several_values(device: torch.device) -> None:
    def part(x: Tensor, begin: int, end: int, kind: str) -> Tensor:
        return x[begin:end] + len(kind)

    fast, x = pygraph.jit(part, static_argnums=3), torch.ones(40, device=device)
    (warning,) = told(lambda: [fast(x, i, i + 2, "same") for i in range(12)] and None)
    assert "args[1], which was 0, 1, 2, 3, 4, 5, 6, 7; and args[2], which was 2, 3" in str(warning.message)
    assert "args[3]" not in str(warning.message)


def test_a_warning_that_is_an_error_leaves_the_function_as_it_is(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, length: x[:length] * 2), torch.ones(40, device=device)
    for length in range(7):
        fast(x, length)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RecompilationWarning):
            fast(x, 7)
    assert [fast(x, length).numel() for length in (7, 3, 9)] == [7, 3, 9]


def test_state_that_changes_at_every_call_is_said_once(device: torch.device) -> None:
    class Net(torch.nn.Module):
        mode = "mode"

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.mode else x

    net = Net()
    fast, x = pygraph.jit(net), torch.ones(3, device=device)

    def calls(numbers: range) -> None:
        for number in numbers:
            net.mode = f"mode {number}"
            fast(x)

    assert told(lambda: calls(range(8))) == []
    (warning,) = told(lambda: calls(range(8, 30)))
    text = str(warning.message)
    assert "Net(…): compiled 8 times, in " in text
    assert "each time because mode had changed. Pass it as an argument, or keep it where" in text
    assert warning.filename == __file__


class Lines(logging.Handler):
    """Keeps messages; the fixture of pytest is not there where tests run without its logging."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    log, handler = logging.getLogger("pygraph"), Lines()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(before)


def test_compilations_are_logged(device: torch.device, lines: list[str]) -> None:
    def asks(x: Tensor) -> Tensor:
        return x + 1 if x.numpy(force=True).sum() > 0 else x

    x = torch.ones(3, device=device)
    for _ in range(2):
        pygraph.jit(torch.sin)(x)
        pygraph.jit(asks)(x)
    assert sum(line.startswith("sin: recorded as 1 graph, in ") for line in lines) == 2
    assert sum("asks: runs as it is: " in line for line in lines) == 2


def test_calls_that_make_room_for_others_are_logged(device: torch.device, lines: list[str]) -> None:
    fast = pygraph.jit(lambda x, n: x[:n] * 2, max_graphs=2)
    for n in (1, 2, 3):
        fast(torch.ones(4, device=device), n)
    assert [line for line in lines if "room" in line] == [
        "<lambda>: a kind of calls made room for another, as max_graphs=2"
    ]


def test_what_a_recorded_call_does_not_do_in_the_best_way_is_logged(device: torch.device, lines: list[str]) -> None:
    def partly(x: Tensor) -> Tensor:
        return (x + 1).nonzero() * 2

    pygraph.jit(partly)(torch.ones(3, device=device))
    assert any(line.startswith("partly: ") and "nonzero" in line for line in lines)


def test_debugging_is_told_of_traces_selections_and_what_is_on_disk(
    device: torch.device, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_for(device)
    monkeypatch.setattr(type(driver), "identity", lambda driver: ("a device", "driver 1"))
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))
    logging.getLogger("pygraph").setLevel(logging.DEBUG)
    pygraph.jit(torch.cos)(torch.ones(5, device=device))
    assert any(line.startswith("cos: traced, as ") for line in lines)
    assert any(line.startswith("cos: region 0 runs by ") for line in lines)
    assert any(line.startswith("selections on disk: none yet") for line in lines)


def test_torch_logs_names_the_package() -> None:
    script = (
        "import pygraph, torch; x = torch.ones(2, device=pygraph.default_device()); fast = pygraph.jit(torch.sin); "
        "fast(x); fast(x)"
    )
    for setting, traced in (("pygraph", False), ("+pygraph", True)):
        found = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "TORCH_LOGS": setting, "PYGRAPH_DEVICE": "emulated"},
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
        assert found.count("sin: recorded as 1 graph, in ") == 1, found
        assert ("sin: traced, as " in found) is traced, found
