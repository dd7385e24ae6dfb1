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
