"""Settings of torch's that are no part of cache keys, but compared where code has a name for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import _tensor_str, nn
from torch.distributions import Distribution, Normal
from torch.nn.utils import parametrize

import pygraph
from pygraph.guards.settings import NAMED
from tests.leftovers import all_restored

READ: dict[str, tuple[Callable[[], float], Callable[[], object]]] = {
    "threads": (lambda: torch.get_num_threads(), lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "printing": (lambda: _tensor_str.PRINT_OPTS.precision, lambda: torch.set_printoptions(precision=2)),
    "oneDNN": (lambda: torch.backends.mkldnn.enabled + 1.0, lambda: torch._C._set_mkldnn_enabled(False)),
    "warnings": (lambda: torch.is_warn_always_enabled() + 1.0, lambda: torch.set_warn_always(True)),
    "anomalies": (
        lambda: torch.is_anomaly_enabled() + 1.0, lambda: torch.set_anomaly_enabled(True, check_nan=False)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_code_reads_is_compared(device: torch.device, name: str, native: bool) -> None:
    read, change = READ[name]
    jitted = pygraph.jit(lambda x: x * read())
    x = torch.ones(3, device=device)
    with all_restored():
        for _ in range(2):
            for _ in range(3):
                assert torch.equal(jitted(x), x * read())
            change()
    assert jitted.explain().to_dict()["fallbacks"] == []


def test_all_are_put_back(device: torch.device) -> None:
    """Each has a value other than its own for a while."""
    for setting in NAMED:
        if setting.write is None:
            continue
        before = setting.read()
        with all_restored():
            other = [not value if isinstance(value, bool) else 3 for value in before]
            setting.write(other)
            assert list(setting.read()) == other
        assert setting.read() == before


@pytest.mark.parametrize("first", [False, True])
def test_a_setting_that_a_call_makes_is_made_at_every_call(device: torch.device, first: bool, native: bool) -> None:
    """Also where it was so already when the call was traced."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.set_printoptions(precision=2)
        return x + 1

    jitted = pygraph.jit(fn)
    x = torch.ones(3, device=device)
    with all_restored():
        for precision in (2 if first else 3, 3, 3, 2, 2, 3):
            torch.set_printoptions(precision=precision)
            assert torch.equal(jitted(x), x + 1)
            assert _tensor_str.PRINT_OPTS.precision == 2


@pytest.fixture
def checks() -> Generator[None, None, None]:
    before = Distribution._validate_args
    yield
    Distribution.set_default_validate_args(before)


@pytest.mark.usefixtures("checks")
def test_checks_that_are_switched_on_later(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return Normal(x, -x).log_prob(x)

    jitted = pygraph.jit(fn)
    x = torch.ones(3, device=device)
    Distribution.set_default_validate_args(False)
    for _ in range(3):
        jitted(x)
    assert jitted.explain().to_dict()["fallbacks"] == []
    Distribution.set_default_validate_args(True)
    with pytest.raises(ValueError, match="scale"):
        jitted(x)


@pytest.mark.usefixtures("checks")
def test_checks_that_a_call_switches_off(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        Distribution.set_default_validate_args(False)
        return x + 1

    jitted = pygraph.jit(fn)
    for before in (True, True, False, True):
        Distribution.set_default_validate_args(before)
        jitted(torch.ones(3, device=device))
        assert Distribution._validate_args is False


def test_fast_paths_that_are_switched_off_later(device: torch.device) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).to(device).eval()
    jitted = pygraph.jit(attention)
    x = torch.ones(1, 3, 4, device=device)
    with all_restored(), torch.no_grad():
        for is_on in (True, True, False, False):
            torch.backends.mha.set_fastpath_enabled(is_on)
            for found, expected in zip(jitted(x, x, x), attention(x, x, x), strict=True):
                torch.testing.assert_close(found, expected, check_stride=True)


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_what_the_cache_of_parametrizations_holds(device: torch.device) -> None:
    layer: Any = nn.Linear(2, 2, bias=False).to(device)
    parametrize.register_parametrization(layer, "weight", Double())
    jitted = pygraph.jit(layer)
    x = torch.ones(1, 2, device=device)
    with torch.no_grad():
        for is_cached in (True, False, True, False):
            with parametrize.cached() if is_cached else contextlib.nullcontext():
                _ = layer.weight
                for _ in range(3):
                    assert torch.equal(jitted(x), layer(x))
            layer.parametrizations.weight.original.add_(1)
            assert torch.equal(jitted(x), layer(x))


def test_a_function_that_asks_for_inference_mode(device: torch.device) -> None:
    """A trace is never in it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if torch.is_inference_mode_enabled() else 3)

    jitted = pygraph.jit(fn)
    x = torch.ones(3, device=device)
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(jitted(x), x * 3)
        with torch.inference_mode():
            assert torch.equal(jitted(x), x * 2)
    assert jitted.cache_info().captures == 1
