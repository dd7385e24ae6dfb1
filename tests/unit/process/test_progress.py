"""The line that says what is compiled: on a terminal and by a clock that are not real."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import pygraph
from pygraph import installation
from pygraph.api import graphed_callables
from pygraph.calls import pipeline
from pygraph.interop import dynamo
from pygraph.process import progress
from pygraph.process.progress import ProgressLine
from pygraph.tracing.trace import trace_call


class Terminal(io.StringIO):
    """A terminal that remembers what was written since it was last asked."""

    def isatty(self) -> bool:
        return True

    def new(self) -> str:
        text = self.getvalue()
        self.truncate(0)
        self.seek(0)
        return text


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, run: Callable[[], None]) -> Callable[[], object]:
        entry = (self.now + seconds, run)
        self.waiting.append(entry)
        return lambda: self.waiting.remove(entry) if entry in self.waiting else None

    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = [entry for entry in self.waiting if entry[0] <= self.now]
        self.waiting = [entry for entry in self.waiting if entry not in due]
        for _, run in due:
            run()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Terminal:
    """Standard error, with a line by the clock."""
    found = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    for name in ("PYGRAPH_PROGRESS", "LOCAL_RANK", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))  # pytest puts its own in sys before the test
    line = ProgressLine(found, clock, clock.after, refreshes=False)
    monkeypatch.setattr(progress, "_LINES", {id(found): line})
    return found


def test_nothing_is_shown_of_what_is_fast(terminal: Terminal, clock: Clock) -> None:
    with progress.compiling("step"):
        progress.phase("tracing")
        clock.wait(2.9)
    assert not clock.waiting
    clock.wait(10)
    assert terminal.new() == ""


def test_the_phases_of_what_is_slow(terminal: Terminal, clock: Clock) -> None:
    with progress.compiling("step[0]"):
        progress.phase("tracing")
        assert terminal.new() == ""
        clock.wait(3)
        shown = terminal.new()
        assert "compiling step[0]: tracing" in shown
        assert "0:00:03" in shown
        progress.phase("kernels", 2)
        progress.next_part()
        assert "kernels 1 of 2" in terminal.new()
        progress.next_part()
        assert "kernels 2 of 2" in terminal.new()
        progress.next_part()  # one more than was foreseen
        assert "kernels 2 of 2" in terminal.new()
        clock.wait(60)
        progress.phase("proving")
        shown = terminal.new()
        assert "step[0]: proving" in shown
        assert "0:01:03" in shown
    assert "\x1b[2K" in terminal.new(), "the line is not erased"
    progress.phase("tracing")
    progress.next_part()
    assert terminal.new() == ""


def test_it_ends_with_an_error(terminal: Terminal, clock: Clock) -> None:
    def fail() -> None:
        with progress.compiling("step"):
            clock.wait(5)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    terminal.new()
    progress.phase("tracing")
    assert terminal.new() == ""


def test_a_compilation_inside_of_another_is_part_of_it(terminal: Terminal, clock: Clock) -> None:
    with progress.compiling("outer"):
        with progress.compiling("inner"):
            clock.wait(4)
        assert "inner" not in terminal.new()
        progress.phase("capturing")
        assert "outer: capturing" in terminal.new()


def test_one_line_for_several(terminal: Terminal, clock: Clock) -> None:
    (line,) = progress._LINES.values()
    first = line.begin("first")
    clock.wait(1)
    second = line.begin("second")
    clock.wait(2)
    assert "first" in terminal.new()
    line.update(second, phase="tracing")
    assert "second" not in terminal.new()
    clock.wait(1)
    line.end(first)
    shown = terminal.new()
    assert "compiling second: tracing" in shown
    assert "0:00:03" in shown
    line.end(second)
    assert line._shown is None


def test_threads(terminal: Terminal, clock: Clock) -> None:
    def compile_often() -> None:
        for number in range(30):
            with progress.compiling(threading.current_thread().name):
                progress.phase("kernels", 3)
                clock.wait(3)
                for _ in range(number % 4):
                    progress.next_part()

    threads = [threading.Thread(target=compile_often) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (line,) = progress._LINES.values()
    assert not line._running
    assert line._shown is None


@pytest.mark.parametrize(("name", "value"), [("PYGRAPH_PROGRESS", "0"), ("TERM", "dumb"), ("LOCAL_RANK", "1")])
def test_it_is_turned_off(
    name: str, value: str, terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with progress.compiling("step"):
        clock.wait(9)
    assert terminal.new() == ""


@pytest.mark.parametrize("stream", ["pipe", "closed", "none"])
def test_nothing_is_written_where_there_is_no_terminal(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    if stream == "closed":
        pipe.close()
    monkeypatch.delenv("PYGRAPH_PROGRESS", raising=False)
    monkeypatch.setattr(sys, "stderr", None if stream == "none" else pipe)
    monkeypatch.setattr(progress, "_LINES", {})
    with progress.compiling("step"):
        progress.phase("tracing")
        assert not progress._LINES
    if stream == "pipe":
        assert pipe.getvalue() == ""


def test_a_terminal_that_goes_away(terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> int:
        raise OSError("input/output error")

    with progress.compiling("step"):
        clock.wait(3)
        monkeypatch.setattr(terminal, "write", fail)
        progress.phase("tracing")
    assert not progress._here.compilation


def test_a_forked_process_begins_anew(terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.compiling("step"):
        here = dict(vars(progress._here))
        lines = dict(progress._LINES)
        progress._forget()
        assert not progress._LINES
        assert progress._here.compilation is None
        vars(progress._here).update(here)
        progress._LINES.update(lines)


def test_a_call_says_what_it_does(
    terminal: Terminal, clock: Clock, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    @pygraph.jit
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    monkeypatch.setattr(pipeline, "trace_call", slow(clock, 3, trace_call))
    x = torch.ones(3).to(device)
    assert double(x).tolist() == [2, 2, 2]
    shown = terminal.new()
    for phase in ("tracing", "capturing", "proving"):
        assert f"double: {phase}" in shown
    double(x)
    assert terminal.new() == "", "a call that compiles nothing shows something"


@pytest.fixture
def slow_timer(clock: Clock) -> Callable[[Callable[[], object]], float]:
    """A timer of runs, each of which takes two seconds."""

    def timer(run: Callable[[], object]) -> float:
        run()
        clock.wait(2)
        return 10.0

    return timer


def test_measurements_are_said(
    terminal: Terminal, clock: Clock, device: torch.device, slow_timer: Callable[[Callable[[], object]], float]
) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(3).to(device)
    fast = pygraph.select(pygraph.graphify(pygraph.indirect(double)), timer=slow_timer)
    fast(x)
    assert "compiling double: measuring" in terminal.new()
    program = pygraph.graphify(pygraph.indirect(pygraph.trace(double)(x)))
    pygraph.select(program, timer=slow_timer)
    assert "compiling double: measuring" in terminal.new(), "of a Program"
    lowered = fast.lower(x)
    assert terminal.new() == ""
    lowered.compile()
    assert "compiling double: measuring" in terminal.new(), "ahead of a call"


def slow(clock: Clock, seconds: float, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes some seconds before it does what another one does."""

    def slowly(*args: Any, **kwargs: Any) -> Any:
        clock.wait(seconds)
        return run(*args, **kwargs)

    return slowly


def test_lowering_is_said(
    terminal: Terminal, clock: Clock, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    monkeypatch.setattr(pipeline, "trace_call", slow(clock, 4, trace_call))
    pygraph.jit(halve).lower(torch.ones(3).to(device))
    assert "compiling halve: tracing" in terminal.new()


def test_graphed_callables_are_one_compilation(
    terminal: Terminal, clock: Clock, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of it is shorter than the delay."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    monkeypatch.setattr(pipeline, "trace_call", slow(clock, 2, trace_call))
    monkeypatch.setattr(graphed_callables, "_run_once", slow(clock, 2, graphed_callables._run_once))
    pygraph.make_graphed_callables(scale, (torch.ones(3).to(device),), num_warmup_iters=1)
    assert "compiling scale: tracing" in terminal.new()


def test_graphs_of_torch_compile(
    terminal: Terminal, clock: Clock, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamo.Compilers, "aten", slow(clock, 4, dynamo.Compilers.aten))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=pygraph.backend, options={"fuse": False})
    assert compiled(torch.ones(2).to(device)).tolist() == [2, 2]
    assert "compiling a graph of torch.compile: AOTAutograd" in terminal.new()


def test_the_path_in_cpp(terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.extension, "start", slow(clock, 4, lambda wait: None))
    assert installation.build(Console(file=io.StringIO())) == 2
    assert "compiling the path in C++" in terminal.new()
