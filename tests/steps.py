"""What tests of whole steps share: a function is called many times, in eager and as one graph, and must agree."""

from __future__ import annotations

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pygraph
from pygraph.calls import pipeline
from pygraph.runtime.devices import driver_for
from pygraph.runtime.emulated import launches

Next = Callable[[tuple[Any, ...], Any, int], tuple[Any, ...]]


def same_arguments(args: tuple[Any, ...], result: Any, step: int) -> tuple[Any, ...]:
    """The next call takes what this one took."""
    del result, step
    return args


def copied(tree: Any) -> Any:
    """A pytree with copies of its tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


def history(fn: Callable[..., Any], start: tuple[Any, ...], following: Next, steps: int) -> list[Any]:
    """What each call returns, from the same seed, and the arguments that there would be for one more."""
    torch.manual_seed(0)
    args, found = copied(start), []
    for step in range(steps):
        result = fn(*args)
        found.append(copied(result))
        args = following(args, result, step)
    return [*found, copied(args)]


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step of a classifier."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def scaled_step_of(
    net: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, loss_of: Callable[..., Tensor], clip: float | None
) -> Callable[..., Tensor]:
    """A training step with a gradient scaler, of the loss of its arguments, with gradients clipped at a norm."""

    def step(*args: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(*args)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def traced_kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that the kind of each function that is traced from here on is added to."""
    found: list[str] = []
    original = pipeline.trace_call

    def trace_call(fn: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(type(fn).__name__)
        return original(fn, *args, **kwargs)

    monkeypatch.setattr(pipeline, "trace_call", trace_call)
    return found


@contextlib.contextmanager
def no_synchronization(device: torch.device) -> Iterator[None]:
    """Fail where the host waits for the device, and say where that is."""
    driver = driver_for(device)
    assert driver is not None
    before = driver.counters.synchronizations
    waits: list[str] = []
    with refused_synchronizations() if device.type == "cuda" else _noted_synchronizations(waits):
        yield
    assert driver.counters.synchronizations == before, "\n".join(waits)


@contextlib.contextmanager
def _noted_synchronizations(waits: list[str]) -> Iterator[None]:
    """Where it is noted which operations wait for the emulated device, in which thread, and who calls them."""
    original = launches.synchronize

    def synchronize(what: str) -> None:
        waits.append("".join((f"{what} in {threading.current_thread().name}:\n", *traceback.format_stack())))
        original(what)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(launches, "synchronize", synchronize)
        yield


@contextlib.contextmanager
def refused_synchronizations() -> Iterator[None]:
    """Where torch raises an error for what waits for a CUDA device."""
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode("default")


def _set_sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not find everything
        torch.cuda.set_sync_debug_mode(mode)


def assert_one_graph(fast: Any, calls: int, recorded: int = 1) -> None:
    """All calls but the first ones were replays of one graph, in which all work on the device is."""
    info, report = fast.cache_info(), fast.explain().to_dict()
    # Some backwards on CUDA take a tensor that their kernels do not read; what cannot be proven is copied in the graph.
    told = [f for f in report["fallbacks"] if "no pointer to it was found" not in f["reason"]]
    assert not told, told
    assert (info.misses, info.captures, info.hits) == (recorded, recorded, calls - recorded), info
    kinds = [region["kind"] for region in report["regions"]]
    assert kinds.count("graph") == 1
    assert set(kinds) <= {"graph", "host"}  # numbers that the host computes from numbers
    assert report["kernels_in_graphs"] == report["kernels"] > 0


def assert_same(mine: Any, theirs: Any, device: torch.device) -> None:
    """Bit for bit where the kernels are the same for sure, which they are on the emulated device."""
    tolerance = {} if device.type == "cuda" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(mine, theirs, equal_nan=True, **tolerance)


def check_steps(
    fn: Callable[..., Any],
    start: tuple[Any, ...],
    device: torch.device,
    following: Next = same_arguments,
    steps: int = 50,
    recorded: int = 1,
    **options: Any,
) -> Any:
    """Call ``fn`` many times, eager and as a graph, and compare every step.

    Args:
        fn: The function.
        start: The first call's arguments; every run gets copies.
        device: Where it runs.
        following: The next call's arguments, of a call's arguments, its result and its number.
        steps: How many calls.
        recorded: How many of the first calls are recorded: two, where the first has a number baked in.
        options: Options of `pygraph.jit`.
    """
    expected = history(fn, start, following, steps)
    fast = pygraph.jit(fn, **options)
    driver = driver_for(device)
    assert driver is not None

    def call(*args: Any) -> Any:
        misses = fast.cache_info().misses
        if misses < recorded:
            result = fast(*args)
            assert fast.cache_info().captures == misses + 1, fast.explain()
            return result
        replays, captures = driver.counters.replays, driver.counters.captures
        with no_synchronization(device):
            result = fast(*args)
            assert (driver.counters.replays, driver.counters.captures) == (replays + 1, captures), fast.explain()
        return result

    found = history(call, start, following, steps)
    assert_same(found, expected, device)
    assert_one_graph(fast, steps, recorded)
    return fast
