"""Clocks, files and processes: a function that asks them runs as it is, by whatever name it finds them."""

# A function that reads the clock by a name of its own module.
from __future__ import annotations

import contextlib
import csv
import datetime
import functools
import hashlib
import io
import json
import logging
import multiprocessing
import os
import pathlib
import pprint
import random
import subprocess
import sys
import threading
import time
import uuid
import warnings
import zlib
from collections.abc import Callable
from datetime import datetime as moment
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import numpy as np
import pytest
import torch

import pygraph
from pygraph.errors import FallbackError
from pygraph.guards.system_calls import PATH_METHODS


class Clock:
    """A clock that an object holds."""

    def __init__(self) -> None:
        self.read = time.monotonic_ns

    def __call__(self) -> float:
        return self.read() % 10**6


held, partial = Clock(), functools.partial(time.time_ns)


def elapsed() -> float:
    return clock() % 1


CLOCKS: dict[str, Callable[[], float]] = {
    "time.time": lambda: time.time() % 1,
    "time.perf_counter": elapsed,
    "time.monotonic_ns": held,
    "datetime.datetime.now": lambda: datetime.datetime.now().microsecond,
    "datetime.datetime.today": lambda: moment.today().microsecond,
    "os.urandom": lambda: int.from_bytes(os.urandom(3), "little"),
    "uuid.uuid4": lambda: uuid.uuid4().int % 10**6,
    "numpy.random.default_rng": lambda: np.random.default_rng().random(),
    "numpy.random.RandomState": lambda: np.random.RandomState(None).rand(),
    "os.times": lambda: os.times().elapsed,
}


@pytest.mark.parametrize("name", CLOCKS)
def test_what_is_new_at_every_call(name: str, device: torch.device) -> None:
    ask = CLOCKS[name]
    fast = pygraph.jit(lambda x: x * ask())
    x = torch.ones(2, device=device, dtype=torch.float64)
    found: list[float] = []
    for _ in range(3):
        found.append(fast(x)[0].item())
        time.sleep(0.02)  # the clock of `os.times` is coarse
    assert len(set(found)) == 3
    [fallback] = fast.explain().counted_fallbacks()
    assert f"it calls {name}(), which a replay would not" in fallback.reason
    assert "test_system_calls.py:" in str(fallback)


def content(path: Path) -> str:
    with open(path) as file:
        return file.read()


FILES: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: content(path),
    "pathlib.Path.read_text": lambda path: path.read_text(),
    "os.path.getsize": lambda path: os.path.getsize(path),
    "os.listdir": lambda path: len(os.listdir(path.parent)),
    "pathlib.Path.iterdir": lambda path: len(list(path.parent.iterdir())),
    "numpy.load": lambda path: np.load(path.with_suffix(".npy"))[0],
    "torch.load": lambda path: torch.load(path.with_suffix(".pt")),
    "subprocess.run": lambda path: subprocess.run(["cat", path], capture_output=True, check=True).stdout,
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_read(name: str, device: torch.device, tmp_path: Path) -> None:
    path, read = tmp_path / "value.txt", FILES[name]

    def write(value: int) -> None:
        path.write_text("1" * value)
        np.save(path.with_suffix(".npy"), np.full(1, value))
        torch.save(value, path.with_suffix(".pt"))
        (tmp_path / f"{value}.more").touch()

    fast = pygraph.jit(lambda x: x * float(read(path)))
    x = torch.ones(2, device=device, dtype=torch.float64)
    found: list[float] = []
    for value in (1, 2, 3):
        write(value)
        found.append(fast(x)[0].item())
    assert found == [found[0], *found[1:]]
    assert len(set(found)) == 3
    assert [f"it calls {name}()" in one.reason for one in fast.explain().counted_fallbacks()] == [True]


def test_what_is_written(device: torch.device, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"

    def opened(x: torch.Tensor) -> torch.Tensor:
        with open(log, "a") as file:
            file.write("x")
        return x + 1

    def saved(x: torch.Tensor) -> torch.Tensor:
        torch.save(x, tmp_path / "x.pt")
        return x + 1

    fast, also = pygraph.jit(opened), pygraph.jit(saved)
    for value in (1.0, 2.0, 3.0):
        x = torch.full((2,), value, device=device)
        assert torch.equal(fast(x), x + 1)
        assert torch.equal(also(x), x + 1)
        assert torch.equal(torch.load(tmp_path / "x.pt"), x)
    assert log.read_text() == "xxx"


def test_strict_refuses_with_the_line_and_what_to_do(device: torch.device) -> None:
    fast = pygraph.jit(lambda x: x * time.time(), strict=True)
    with pytest.raises(FallbackError) as found:
        fast(torch.ones(2, device=device))
    text = str(found.value)
    assert "time.time()" in text
    assert "test_system_calls.py:" in text
    assert "Call it outside of the function, and pass what it gives as an argument." in text


def test_what_others_ask_does_no_harm(device: torch.device) -> None:
    """A logger that is not enabled, a warning, dates that are made of numbers, and what is named but not called."""

    def function(x: torch.Tensor, is_timed: bool = False) -> torch.Tensor:
        if is_timed:
            return x * time.time()
        logging.getLogger("test").debug("step")
        warnings.warn("it is slow", stacklevel=1)
        day = datetime.date(2026, 11, 28)
        assert isinstance(datetime.datetime(2026, 11, 28), datetime.date)
        assert isinstance(day, datetime.date)
        return x * day.day

    fast = pygraph.jit(function)
    x, expected = torch.ones(2, device=device), torch.full((2,), 28.0, device=device)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(fast(x), expected)
    assert fast.explain().counted_fallbacks() == {}
    assert fast.cache_info().captures == 1
    assert len(shown) == 1


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "it prints": lambda x: print("the shape is", x.shape),
    "it prints a value": lambda x: print("the sum is", x.sum()),
    "it prints a number": lambda x: print("the sum is", x.sum().item()),
    "it prints to stderr": lambda x: print("here", file=sys.stderr),
    "it prints by sys": lambda x: sys.stdout.write("here"),
    "it prints by pprint": lambda x: pprint.pprint(tuple(x.shape)),
    "it logs": lambda x: LOGGER.warning("the shape is %s", tuple(x.shape)),
    "it logs a value": lambda x: LOGGER.warning("the sum is %s", x.sum()),
}
LOGGER = logging.getLogger("of the test")


@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_is_printed_is_that_of_eager(device: torch.device, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every call prints, once, and nothing is printed by a trace."""
    output = OUTPUTS[kind]
    handler = logging.StreamHandler(sys.stdout)
    LOGGER.addHandler(handler)

    def function(x: torch.Tensor) -> torch.Tensor:
        output(x)
        return x * 2

    inputs = [torch.full((2,), float(value), device=device) for value in range(4)]
    for x in inputs:
        function(x)
    expected = capsys.readouterr()
    fast = pygraph.jit(function)
    for x in inputs:
        assert torch.equal(fast(x), x * 2)
    found = capsys.readouterr()
    LOGGER.removeHandler(handler)
    assert (found.out, found.err) == (expected.out, expected.err)
    [fallback] = fast.explain().counted_fallbacks()
    assert f"{' '.join(kind.split()[:2])}, which a replay would not" in fallback.reason
    assert "test_system_calls.py" in str(fallback)
    assert "after the call" in str(fallback)


def test_what_prints_only_once_is_a_graph(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """As a message of a library about its first call does, which it remembers."""

    @functools.lru_cache
    def warn_once(text: str) -> None:
        print(text)

    def function(x: torch.Tensor) -> torch.Tensor:
        warn_once("the first call")
        return x * 2

    fast = pygraph.jit(function)
    for value in range(4):
        x = torch.full((2,), float(value), device=device)
        assert torch.equal(fast(x), x * 2)
    assert capsys.readouterr().out == "the first call\n"
    assert fast.cache_info().captures == 1


def test_what_is_captured_by_the_function_itself_is_not_printed(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print(*x.shape)
        return x * len(text.getvalue())

    fast = pygraph.jit(function)
    for _ in range(3):
        assert torch.equal(fast(torch.ones(2, device=device)), torch.full((2,), 2.0, device=device))
    assert fast.cache_info().captures == 1


def test_a_branch_that_is_not_taken_does_nothing(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace may follow it before it is known that it is not taken. It exits, prints and writes as little as eager."""

    def guarded(x: torch.Tensor) -> torch.Tensor:
        y = x.sum()
        if not torch.isfinite(y):
            sys.exit(3)
        if y < 0:
            print("negative")
            (tmp_path / "negative").touch()
            torch.save(x, tmp_path / "negative.pt")
            raise ValueError("negative")
        return y * 2

    fast = pygraph.jit(guarded)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert fast(torch.full((2,), value, device=device)).item() == 4 * value
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="negative"):
        fast(torch.full((2,), -1.0, device=device))
    assert capsys.readouterr().out == "negative\n"
    with pytest.raises(SystemExit):
        fast(torch.full((2,), torch.inf, device=device))
    assert fast(torch.ones(2, device=device)).item() == 4


def test_a_generator_with_a_seed_draws_the_same_at_every_call(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        old = np.random.RandomState(seed=3)
        assert isinstance(old, np.random.RandomState)
        return x * np.random.default_rng(7).random() + old.rand()

    x = torch.ones(2, device=device, dtype=torch.float64)
    fast = pygraph.jit(function)
    for _ in range(3):
        assert torch.equal(fast(x), function(x))
    assert fast.cache_info().captures == 1
    assert fast.explain().counted_fallbacks() == {}


def test_everything_is_as_it_was(device: torch.device) -> None:
    """After the trace, and for another thread during it."""
    before = (time.time, vars(Path).copy(), held.read, datetime.datetime, random.random, sys.stdout, sys.stderr)
    handlers = logging.Logger.callHandlers
    seen: list[object] = []

    def look() -> None:
        seen.extend([time.time(), isinstance(moment.now(), datetime.datetime), Path(__file__).exists(), clock()])

        class Later(moment):
            """A class that is made of the proxy, if there is one."""

        seen.append(Later.__mro__[1])

    def function(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return x + (0.0 if len(seen) else moment.now().microsecond + time.time())

    fast = pygraph.jit(function)
    x = torch.ones(2, device=device)
    assert torch.equal(fast(x), x)
    assert [type(one) for one in seen[:5]] == [float, bool, bool, float, type]
    assert seen[4] is datetime.datetime
    assert before == (
        time.time, vars(Path).copy(), held.read, datetime.datetime, random.random, sys.stdout, sys.stderr,
    )  # fmt: skip
    assert logging.Logger.callHandlers is handlers
    assert before[0] is sys.modules["time"].time
    assert moment is datetime.datetime


def test_a_function_that_is_returned_is_itself(device: torch.device) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, object, type]:
        return x + 1, time.time, datetime.datetime

    for _ in range(3):
        _, read, cls = pygraph.jit(function)(torch.ones(2, device=device))
        assert read is time.time
        assert cls is datetime.datetime


def test_all_methods_of_paths_exist() -> None:
    assert all(callable(getattr(pathlib.Path, name)) for name in PATH_METHODS)


def _written(stream: Any, k: int) -> None:
    stream.write(f"{k}\n")


WRITERS: dict[str, Callable[[Any, int], Any]] = {
    "write": _written,
    "writelines": lambda stream, k: stream.writelines(["a", str(k)]),
    "print": lambda stream, k: print(k, file=stream),
    "a row": lambda stream, k: csv.writer(stream).writerow([k, 2]),
    "json": lambda stream, k: json.dump({"k": k}, stream),
    "redirected": lambda stream, k: _redirected(stream, k),
}


def _redirected(stream: Any, k: int) -> None:
    with contextlib.redirect_stdout(stream):
        print(k)


@pytest.mark.parametrize("kind", ["file", "text"])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_open_is_written_to_at_each_call(device: torch.device, name: str, kind: str, tmp_path: Path) -> None:
    def texts(run: Callable[..., Any], path: Path) -> str:
        stream: Any = path.open("w+") if kind == "file" else io.StringIO()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            WRITERS[name](stream, len(x))
            return y.sum()

        call = run(step)
        for _ in range(5):
            assert call(torch.ones(3, device=device)).item() == 6
        stream.seek(0)
        with contextlib.closing(stream):
            return stream.read()

    assert texts(pygraph.jit, tmp_path / "mine") == texts(lambda fn: fn, tmp_path / "theirs")


@pytest.mark.parametrize("name", ["rows", "digest", "compressed"])
def test_what_takes_bytes_and_rows_takes_them_at_each_call(device: torch.device, name: str) -> None:
    def taken(run: Callable[..., Any]) -> object:
        rows, digest, compressed, stream = list[bytes](), hashlib.sha256(), zlib.compressobj(), io.StringIO()
        writer = csv.writer(stream)
        takes: dict[str, Callable[[], Any]] = {
            "rows": lambda: writer.writerow([1, 2]),
            "digest": lambda: digest.update(b"a"),
            "compressed": lambda: rows.append(compressed.compress(b"a")),
        }
        take = takes[name]

        def step(x: torch.Tensor) -> torch.Tensor:
            take()
            return x * 2

        call = run(step)
        for _ in range(5):
            call(torch.ones(3, device=device))
        return stream.getvalue(), digest.hexdigest(), compressed.flush()

    assert taken(pygraph.jit) == taken(lambda fn: fn)


def test_variables_of_the_environment_are_set_at_each_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_TESTED_STEPS", "0")

    @pygraph.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        os.environ["PYGRAPH_TESTED_STEPS"] = str(int(os.environ["PYGRAPH_TESTED_STEPS"]) + 1)
        return x * 2

    for number in range(5):
        step(torch.ones(3, device=device))
        assert os.environ["PYGRAPH_TESTED_STEPS"] == str(number + 1)


def test_who_makes_a_lock_holds_no_other_one_behind_a_trace(device: torch.device) -> None:
    """As the first progress bar of tqdm does: a lock of processes has a random name, which ends no trace."""
    outer = threading.Lock()

    @pygraph.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        outer.acquire()
        multiprocessing.RLock()
        outer.release()
        return x * 2

    for _ in range(3):
        step(torch.ones(3, device=device))
        assert not outer.locked()
    assert step.cache_info().captures == 1


def test_messages_beside_a_progress_bar_are_those_of_eager(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tqdm.write` prints, also where it ends a loop that is cut, or is a part by itself."""
    tqdm = pytest.importorskip("tqdm").tqdm
    weight = torch.ones(4, device=device, requires_grad=True)

    def epoch(batches: list[torch.Tensor]) -> torch.Tensor:
        bar = tqdm(total=len(batches), disable=True)
        total = torch.zeros((), device=device)
        for x in batches:
            bar.update(1)
            total += (x * weight).sum().detach()
            bar.write(f"loss {total.item():.3f}")
        bar.write("done")
        bar.close()
        return total

    fast = pygraph.jit(epoch)
    for number in range(6):
        batches = [torch.full((4,), float(number + i), device=device) for i in range(2)]
        found, printed = fast(batches), capsys.readouterr().out
        torch.testing.assert_close(found, epoch(batches))
        assert printed == capsys.readouterr().out
