"""Streams and events: a function that uses them runs as it is, or that statement does."""

# Functions that use a stream find it as a variable, which is made here for the machine at hand.
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import FallbackError
from pygraph.tracing import streams


def waiting(device: torch.device) -> Callable[[], None]:
    """What waits for the device."""
    return torch.cuda.synchronize if device.type == "cuda" else torch.emu.synchronize  # type: ignore[attr-defined]


def reasons(fn: Any) -> str:
    report = fn.explain().to_dict()
    return "".join(map(str, report["in_python"])) + "".join(one["reason"] for one in report["fallbacks"])


def test_a_function_that_waits_for_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = torch.cuda if device.type == "cuda" else torch.emu  # type: ignore[attr-defined]
    synchronize, waits = owner.synchronize, list[int]()

    def counted(*of: torch.device) -> None:
        if sys._getframe(1).f_code.co_filename == __file__:  # the recording of a graph waits, too
            waits.append(1)
        synchronize(*of)

    counted.__module__, counted.__qualname__ = synchronize.__module__, "synchronize"
    monkeypatch.setattr(owner, "synchronize", counted)

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        owner.synchronize()
        return y + 1

    for number in range(1, 5):
        waits.clear()
        assert fn(torch.ones(2, device=device)).tolist() == [3, 3]
        assert waits == [1], number
    assert ".synchronize(), which a replay would not" in reasons(fn)


def test_an_alias_is_found(device: torch.device) -> None:
    wait = waiting(device)
    fast = pygraph.jit(lambda x: (wait(), x + 1)[1], strict=True)
    with pytest.raises(FallbackError, match="synchronize"):
        fast(torch.ones(2, device=device))


def made_inside(x: torch.Tensor) -> torch.Tensor:
    torch.Event(device=x.device).record()
    return x + 1


def test_events_of_any_device(device: torch.device) -> None:
    """Found by a name, in an attribute, or made inside."""

    class Timed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.events = [torch.Event(device=device)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.events[0].record()
            return x + 1

    event, module = torch.Event(device=device), Timed()
    for function in (made_inside, lambda x: (event.record(), x + 1)[1], module):
        fast = pygraph.jit(function)
        for _ in range(3):
            assert fast(torch.ones(2, device=device)).tolist() == [2, 2]
        assert "torch.Event" in reasons(fast)
    assert type(module.events[0]) is type(event) is torch.Event


def test_a_stream_that_is_entered(device: torch.device) -> None:
    stream = torch.Stream(device=device)

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        with stream:
            return x + 1

    for _ in range(3):
        x = torch.ones(2, device=device)
        waiting(device)()
        y = fn(x)
        waiting(device)()
        assert y.tolist() == [2, 2]
    assert "it enters a torch.Stream" in reasons(fn)


class Stub:
    """What methods are called with."""

    stream = "a stream"


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in streams._METHODS for name in names])
def test_methods_of_cuda_are_watched_during_a_trace(cls: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on machines without a GPU, where the classes are there and have no streams."""
    device, called = pygraph.default_device(), list[int]()
    # A method of the name of the original, as the reason says it.
    original = vars(cls)[name]
    namespace: dict[str, Any] = {"called": called}
    exec("def method(self, *args): called.append(1)", namespace)
    namespace["method"].__qualname__ = original.__qualname__
    monkeypatch.setattr(cls, name, namespace["method"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    one = Stub()  # a stream cannot be made everywhere
    fast = pygraph.jit(lambda x: (getattr(cls, name)(one), x + 1)[1])
    for number in range(1, 4):
        assert fast(torch.ones(2, device=device)).tolist() == [2, 2]
        assert len(called) == number
    assert "it calls torch.cuda." in reasons(fast)
    assert vars(cls)[name] is namespace["method"]


def test_the_current_stream_and_none_may_be_entered(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        contexts: list[Any] = [torch.cuda.stream(None), torch.cuda.stream(torch.cuda.current_stream())]
    else:
        contexts = [object.__new__(torch.cuda.StreamContext)]
        contexts[0].stream = None
        monkeypatch.setattr(torch.cuda.StreamContext, "__enter__", lambda self: None)
        monkeypatch.setattr(torch.cuda.StreamContext, "__exit__", lambda self, *raised: None)

    for context in contexts:

        def fn(x: torch.Tensor, context: Any = context) -> torch.Tensor:
            with context:
                return x + 1

        fast = pygraph.jit(fn, strict=True)
        for _ in range(3):
            assert fast(torch.ones(2, device=device)).tolist() == [2, 2]
        assert fast.cache_info().captures == 1


@pytest.mark.parametrize("name", ["memory_allocated", "max_memory_allocated", "memory_reserved", "memory_stats"])
def test_memory_is_asked_at_every_call(name: str, device: torch.device) -> None:
    ask = getattr(torch.cuda, name)
    fast = pygraph.jit(lambda x: (x + 1, ask()), strict=True)
    with pytest.raises(FallbackError, match=rf"torch\.cuda\.{name}\(\)"):
        fast(torch.ones(2, device=device))
