"""Nothing fake survives a trace that fails, nor in places that do not give it back."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import itertools
import queue
import signal
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import pygraph
from pygraph.errors import FallbackError
from tests import extent
from tests.fakes import assert_no_fake_left

pytestmark = [pytest.mark.rotates, pytest.mark.heap]

Tensor = torch.Tensor
NUMBERS = itertools.count()

VALUES = (1.0, 2.0, 3.0, 4.0)[: extent.examples(2, 4)]
"""A trace that leaves something is searched for in the whole process, at each call anew."""


class AnError(Exception):
    """The user's."""


def raising(y: Tensor) -> Tensor:
    """Fail, as in eager."""
    raise AnError("some")


def branching(y: Tensor) -> Tensor:
    """Depend on data."""
    return y + 1 if int(y.sum()) > 0 else y - 1


def printing(y: Tensor) -> Tensor:
    """Read data."""
    return y + y.tolist()[0]


def exiting(y: Tensor) -> Tensor:
    """Fail with what is no Exception."""
    raise KeyboardInterrupt


ENDS = [raising, branching, printing]


def in_lru_cache(device: torch.device) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A memo."""

    @functools.lru_cache
    def table(n: int) -> dict[str, Tensor]:
        made = {"all": torch.arange(n, device=device) * 1.0}
        made["more"] = made["all"] + 1
        return made

    return lambda x: x * table(3)["all"] + table(3)["more"], lambda: {k: v.tolist() for k, v in table(3).items()}


def in_list(device: torch.device) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A list in a place that is not known."""
    del device
    kept: list[Any] = []
    append = kept.append

    def store(x: Tensor) -> Tensor:
        y = x * 2
        append([y])
        return y

    return store, lambda: [entry[0].tolist() for entry in kept]


def in_known_list(device: torch.device) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A list that is found."""
    del device
    kept: list[Any] = []

    def store(x: Tensor) -> Tensor:
        kept.append({"x": x * 2})
        return x * 2

    return store, lambda: [entry["x"].tolist() for entry in kept]


def in_thread_local(device: torch.device) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A thread-local."""
    del device
    local = threading.local()

    def store(x: Tensor) -> Tensor:
        local.last = y = x * 2
        return y

    return store, lambda: local.last.tolist()


def in_queue(device: torch.device) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A queue that is written in C."""
    del device
    values = queue.SimpleQueue[Any]()

    def store(x: Tensor) -> Tensor:
        y = x * 2
        values.put((y, 1))
        return y

    def read() -> Any:
        found = [values.get() for _ in range(values.qsize())]
        for one in found:
            values.put(one)
        return [one[0].tolist() for one in found]

    return store, read


HOLDERS = [in_lru_cache, in_list, in_known_list, in_thread_local, in_queue]


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("training", [False, True])
def test_a_trace_that_fails(device: torch.device, holder: Any, end: Any, training: bool) -> None:
    (fast_store, found), (store, expected) = holder(device), holder(device)
    fast = pygraph.jit(lambda x: end(fast_store(x)))
    for value in VALUES[:3]:
        x = torch.full((3,), value, device=device, requires_grad=training)
        results = []
        for fn in (fast, lambda x: end(store(x))):
            try:
                results.append(fn(x).tolist())
            except AnError as error:
                results.append(type(error))
        assert results[0] == results[1]
        assert found() == expected()
        del x
        assert_no_fake_left()


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_call_that_is_interrupted_is_taken_back(device: torch.device, holder: Any) -> None:
    store, _ = holder(device)
    fast = pygraph.jit(lambda x: exiting(store(x)))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fast(torch.ones(3, device=device))
        assert_no_fake_left()


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_refused_by_strict_and_by_trace(device: torch.device, holder: Any) -> None:
    store, _ = holder(device)
    x = torch.ones(3, device=device)
    strict = pygraph.jit(lambda x: branching(store(x)), strict=True)
    with contextlib.suppress(FallbackError):  # a first call may fill a memo
        strict(x)
    with pytest.raises(FallbackError):
        strict(x)
    assert_no_fake_left()
    with pytest.raises(pygraph.PygraphError):
        pygraph.trace(lambda x: branching(store(x)))(x)
    assert_no_fake_left()


# ---- places that do not give it back -------------------------------------------------------------------------------


def refused(fn: Callable[[Tensor], Tensor], device: torch.device) -> str:
    """Call it with all of `VALUES`, which must give what eager does, and its reasons."""
    fast = pygraph.jit(fn)
    for value in VALUES:
        assert fast(torch.full((3,), value, device=device)).tolist() == [2 * value + 1] * 3
    return " ".join(str(fast.explain()).split())


def is_fake(value: Any) -> bool:
    """Whether something is of a trace."""
    return isinstance(value, FakeTensor)


def test_the_frame_of_a_generator(device: torch.device) -> None:
    suspended: list[Generator[Tensor]] = []
    append = suspended.append

    def values(y: Tensor) -> Generator[Tensor]:
        yield y
        yield y + 1

    def fn(x: Tensor) -> Tensor:
        generator = values(x * 2)
        append(generator)
        return next(generator) + 1

    refused(fn, device)
    assert [next(generator).tolist() for generator in suspended] == [[2 * value + 1] * 3 for value in VALUES]
    assert_no_fake_left()


def test_a_generator_that_was_there(device: torch.device) -> None:
    def values() -> Generator[int, Tensor]:
        last = None
        while True:
            last = yield (0 if last is None else 1)

    generator = values()
    next(generator)

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        generator.send(y)
        return y + 1

    refused(fn, device)
    assert not is_fake(generator.gi_frame.f_locals["last"])
    generator.close()
    assert_no_fake_left()


def test_a_thread_that_is_started_inside(device: torch.device) -> None:
    seen: list[bool] = []
    go = threading.Event()
    threads: list[threading.Thread] = []

    def work(y: Tensor) -> None:
        go.wait()  # a trace that fails puts lists back: what a thread writes meanwhile is gone
        seen.append(is_fake(y))

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        thread = threading.Thread(target=work, args=(y,))
        thread.start()
        threads.append(thread)
        return y + 1

    try:
        text = refused(fn, device)
    finally:
        go.set()
    assert "in Python: " in text  # the statements about threads; what they compute before and after is in graphs
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.endswith("(work)"):
            thread.join(20)
    assert seen.count(False) == len(VALUES)
    threads.clear()
    gc.collect()
    assert_no_fake_left()


def test_an_argument_of_a_signal_handler(device: torch.device) -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        signal.signal(signal.SIGUSR1, functools.partial(print, y))
        return y + 1

    refused(fn, device)
    handler = signal.getsignal(signal.SIGUSR1)
    assert isinstance(handler, functools.partial)
    assert handler.args[0].tolist() == [2 * VALUES[-1]] * 3
    del handler
    signal.signal(signal.SIGUSR1, before)
    assert_no_fake_left()


def test_an_argument_of_atexit(device: torch.device) -> None:
    seen: list[bool] = []

    def note(y: Tensor) -> None:
        seen.append(is_fake(y))

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        atexit.register(note, y)
        return y + 1

    text = refused(fn, device)
    atexit.unregister(note)
    assert "in Python: test_leaks_of_failures.py" in text  # between two graphs
    assert_no_fake_left()


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a module, or for a value."""
    found = f"a_name_of_a_test_{next(NUMBERS)}"
    yield found
    sys.modules.pop(found, None)
    vars(builtins).pop(found, None)


@pytest.mark.parametrize("nested", [False, True])
def test_a_module_that_is_made(device: torch.device, name: str, nested: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        module = types.ModuleType(name)
        module.last = {"y": [y]} if nested else y  # type: ignore[attr-defined]
        sys.modules[name] = module
        return y + 1

    refused(fn, device)
    last: Any = sys.modules[name].last  # type: ignore[attr-defined]
    assert (last["y"][0] if nested else last).tolist() == [2 * VALUES[-1]] * 3
    del last
    assert_no_fake_left()


@pytest.mark.parametrize("nested", [False, True])
def test_a_name_for_all(device: torch.device, name: str, nested: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        setattr(builtins, name, [y] if nested else y)
        return y + 1

    refused(fn, device)
    last: Any = getattr(builtins, name)
    assert (last[0] if nested else last).tolist() == [2 * VALUES[-1]] * 3
    del last
    assert_no_fake_left()
