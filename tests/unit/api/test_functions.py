"""What can be transformed, options that fit no argument, and calls that run as they are."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import ArgumentError


class Model(torch.nn.Module):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale


async def waits(x: Tensor) -> Tensor:
    return x


async def waits_for_many(x: Tensor) -> AsyncIterator[Tensor]:
    yield x


def generates(x: Tensor) -> Iterator[Tensor]:
    yield x


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (Model, r"jit\(Model\): Model is a class; .*Make an object of it, and transform that: jit\(Model\(…\)\)"),
        (waits, r"jit\(waits\): waits is an async function; .*call that from the async one"),
        (waits_for_many, r"waits_for_many is an async function"),
        (generates, r"jit\(generates\): generates is a generator function; .*call that from the generator"),
        (3, r"jit\(3\): not callable; expected a function or an nn\.Module"),
    ],
)
def test_what_is_no_function_that_computes(fn: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        pygraph.jit(fn)
    with pytest.raises(ArgumentError, match=told.replace("jit", "graphify")):
        pygraph.graphify(fn)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"static_argnums": 7}, r"jit\(step\): static_argnums has 7; expected one of its arguments: x, scale"),
        ({"static_argnums": (0, -3)}, r"static_argnums has -3"),
        ({"donate_argnums": 2}, r"donate_argnums has 2"),
        ({"static_argnames": "size"}, r"jit\(step\): static_argnames has 'size'; expected one of its arguments"),
        ({"donate_argnames": ["x", "y"]}, r"donate_argnames has 'y'"),
        ({"static_argnums": None}, r"jit\(…\): static_argnums=None; expected integers"),
        ({"static_argnames": None}, r"jit\(…\): static_argnames=None; expected strings"),
        ({"static_argnums": 1.5}, r"static_argnums=1.5; expected integers"),
    ],
)
def test_options_are_checked_when_they_are_given(options: dict[str, Any], told: str) -> None:
    def step(x: Tensor, scale: float = 2.0, *, flag: bool = False) -> Tensor:
        return x * scale

    with pytest.raises(ArgumentError, match=told):
        pygraph.jit(step, **options)
    with pytest.raises(ArgumentError, match=told.replace("step", "Model").replace(", flag", "")):
        pygraph.jit(Model(), **options)


def test_options_of_functions_that_take_whatever_they_are_passed(device: torch.device) -> None:
    @functools.wraps(torch.sin)
    def decorated(*args: Any, **kwargs: Any) -> Tensor:
        return args[0] * args[1] * kwargs["scale"]

    fast = pygraph.jit(decorated, static_argnums=[1], static_argnames=("scale",))
    assert fast(torch.ones(1, device=device), 3, scale=2).tolist() == [6.0]
    pygraph.jit(torch.mul, static_argnums=1)  # in C, without a signature


class Layer:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @pygraph.jit
    def scaled(self, x: Tensor, shift: float = 0.0) -> Tensor:
        """Scale."""
        return x * self.scale + shift


def test_a_method_has_what_a_function_has(device: torch.device) -> None:
    layer, x = Layer(3.0), torch.ones(2, device=device)
    layer.scaled.cache_clear()
    assert layer.scaled(x).tolist() == [3.0, 3.0]
    assert layer.scaled(x, shift=1.0).tolist() == [4.0, 4.0]
    assert layer.scaled.cache_info().misses == 2
    assert layer.scaled.explain().to_dict()["name"].endswith("scaled")
    lowered = layer.scaled.lower(x, shift=2.0)
    assert isinstance(lowered, pygraph.Lowered)
    assert lowered.compile()(layer, x, shift=2.0).tolist() == [5.0, 5.0]
    assert list(inspect.signature(layer.scaled).parameters) == ["x", "shift"]
    assert layer.scaled.passes == Layer.scaled.passes
    assert pickle.loads(pickle.dumps(layer.scaled))(x).tolist() == [3.0, 3.0]
    layer.scaled.cache_clear()
    assert layer.scaled.cache_info().misses == 0


def test_kinds_of_what_is_returned_are_exported(device: torch.device) -> None:
    fast = pygraph.jit(torch.sin)
    lowered = fast.lower(torch.ones(2, device=device))
    found = (fast, lowered, lowered.compile(), fast.explain())
    kinds = (pygraph.Transformed, pygraph.Lowered, pygraph.Compiled, pygraph.Explanation)
    assert all(isinstance(one, kind) for one, kind in zip(found, kinds, strict=True))


def test_shapes_suffice_to_lower(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_DEVICE", str(device.type).replace("emu", "emulated"))

    def step(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return x.t() @ batch["y"] + 1

    fast = pygraph.jit(step)
    x, y = torch.randn(3, 4, device=device).t(), torch.randn(4, 3, device=device)
    shapes = torch.empty(3, 4, device="meta").t(), {"y": torch.empty(4, 3, device="meta")}
    lowered = fast.lower(*shapes)
    assert lowered.as_text() == fast.lower(x, {"y": y}).as_text()
    torch.testing.assert_close(lowered.compile()(x, {"y": y}), step(x, {"y": y}), rtol=0, atol=0)
    assert lowered.program.device.type == device.type


def test_calls_in_a_block_run_as_they_are(device: torch.device) -> None:
    seen: list[bool] = []

    def step(x: Tensor) -> Tensor:
        seen.append(type(x) is Tensor)
        return x + 1

    ways: dict[str, Callable[[Tensor], Tensor]] = {"jit": pygraph.jit(step), "module": pygraph.jit(Model())}
    x = torch.ones(2, device=device)
    with pygraph.disable():
        for way in ways.values():
            assert way(x).tolist() == [2.0, 2.0]
        with pygraph.disable():
            pass
        assert ways["jit"](x).tolist() == [2.0, 2.0]
    assert seen == [True, True]
    assert all(way.cache_info().misses == 0 for way in ways.values())  # type: ignore[attr-defined]
    assert ways["jit"](x).tolist() == [2.0, 2.0]
    assert ways["jit"].cache_info().misses == 1  # type: ignore[attr-defined]

    @pygraph.disable()
    def plainly() -> list[float]:
        return ways["jit"](x).tolist()

    @pygraph.disable
    def as_plainly(count: int) -> list[list[float]]:
        return [ways["jit"](x).tolist() for _ in range(count)]

    assert plainly() == [2.0, 2.0]
    assert as_plainly(count=2) == [[2.0, 2.0], [2.0, 2.0]]
    assert ways["jit"].cache_info().hits == 0  # type: ignore[attr-defined]


def test_a_block_is_a_thread_s_or_a_task_s_own(device: torch.device) -> None:
    fast, x = pygraph.jit(torch.sin), torch.ones(2, device=device)
    with pygraph.disable():
        thread = threading.Thread(target=fast, args=[x])
        thread.start()
        thread.join()
    assert fast.cache_info().misses == 1

    async def disabled() -> None:
        with pygraph.disable():
            await asyncio.sleep(0)
            fast(x)

    async def both() -> None:
        task = asyncio.create_task(disabled())
        await asyncio.sleep(0)
        fast(x)
        await task

    asyncio.run(both())
    assert fast.cache_info().hits == 1


def test_a_whole_process() -> None:
    script = (
        "import torch, pygraph; fast = pygraph.jit(torch.sin); fast(torch.ones(2, device=pygraph.default_device()))"
    )
    for value, misses in (("1", "0"), ("0", "1")):
        found = subprocess.run(
            [sys.executable, "-c", f"{script}; print(fast.cache_info().misses)"], capture_output=True, text=True,
            env={**os.environ, "PYGRAPH_DISABLE": value}, check=True,
        )  # fmt: skip
        assert found.stdout.split() == [misses]
