"""Objects of an installed package's classes that the user has made: what a function changes of them is the user's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph

CODE = """
class Layer:
    def __init__(self):
        self.values = None

    def add(self, x):
        self.values = x if self.values is None else self.values + x
        return self.values


class Cache:
    kind = Layer

    def __init__(self):
        self.layers = []

    @property
    def is_empty(self):
        return not self.layers

    def update(self, x):
        if self.is_empty:
            self.layers.append(self.kind())
        return self.layers[0].add(x) * 2
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a cache, as of an installed package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "package_with_cache.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module("package_with_cache")


def test_a_list_in_an_attribute_grows(device: torch.device, package: Any) -> None:
    def function(x: torch.Tensor, cache: Any) -> torch.Tensor:
        return cache.update(x) + 1

    fast, mine, expected = pygraph.jit(function), package.Cache(), package.Cache()
    for i in range(5):
        x = torch.full((3,), float(i), device=device)
        torch.testing.assert_close(fast(x, mine), function(x, expected))
        assert len(mine.layers) == 1


HANDLERS = """
STACK, COUNT, STEPS, KNOWN = [], {"n": 0}, 0, {}


class Registry:
    steps = 0

    def __init__(self):
        self.names, self.last = [], None


REGISTRY = Registry()


class Trace:
    def __enter__(self):
        self.nodes = {}
        STACK.append(self)
        return self

    def __exit__(self, *error):
        STACK.pop()


def record(name, x):
    global STEPS
    STEPS += 1
    COUNT["n"] += 1
    Registry.steps += 1
    REGISTRY.names.append(name)
    KNOWN.setdefault(type(x), name)
    for handler in STACK:
        handler.nodes[name] = x
    return x


def remember(x):
    KNOWN["x"] = x * 2
    return KNOWN["x"] + 1


def state():
    return STEPS, dict(COUNT), Registry.steps, list(REGISTRY.names)
"""


class Mine:
    """A handler of the user's class."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}


def play(package: Any, call: Any, device: torch.device, *, mine: bool) -> list[Any]:
    found: list[Any] = []
    for i in range(6):
        x = torch.full((2,), float(i), device=device)
        if mine:
            handler: Any = Mine()
            package.STACK.append(handler)
            out = call(x)
            package.STACK.pop()
        else:
            with package.Trace() as handler:
                out = call(x)
        found.append((out.tolist(), {key: value.tolist() for key, value in handler.nodes.items()}, package.state()))
    return found


@pytest.mark.parametrize("mine", [False, True])
def test_what_lies_on_a_list_of_a_package_is_not_the_packages(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: bool
) -> None:
    """Handlers, as of probabilistic programs: what they record is read outside. So are counters of a package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    found: list[Any] = []
    for name in ("eager", "jitted"):
        (folder / f"handlers_{name}_{mine}_{device.type}.py").write_text(HANDLERS)
        package = importlib.import_module(f"handlers_{name}_{mine}_{device.type}")

        def function(x: torch.Tensor, package: Any = package) -> torch.Tensor:
            return package.record("w", x * 2) + 1

        found.append(play(package, function if name == "eager" else pygraph.jit(function), device, mine=mine))
        assert list(package.KNOWN) in ([], [torch.Tensor])
    assert found[0] == found[1]


def test_a_tensor_that_a_package_remembers_is_there(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    (folder / f"remembers_{device.type}.py").write_text(HANDLERS)
    package = importlib.import_module(f"remembers_{device.type}")
    fast = pygraph.jit(lambda x: package.remember(x))
    for i in range(5):
        x = torch.full((2,), float(i), device=device)
        assert torch.equal(fast(x), x * 2 + 1)
        assert torch.equal(package.KNOWN["x"], x * 2)
