"""What tests of modules share: a jitted module and a plain one that live through the same history."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from tests.unit.interop.common import Work, check_same, counted


class Pair:
    """A jitted module and a copy of it that is not, to which the same is done.

    Args:
        module: The module.
        device: Where it goes.
        options: Options of `pygraph.jit`.
    """

    def __init__(self, module: nn.Module, device: torch.device, **options: Any) -> None:
        self.device = device
        self.reference: Any = copy.deepcopy(module).to(device)
        self.fast: Any = pygraph.jit(module.to(device), **options)
        self._calls = 0

    def change(self, change: Callable[[Any], object]) -> None:
        """Do the same to both, under ``no_grad`` and from the same seed."""
        for model in (self.fast, self.reference):
            torch.manual_seed(self._calls)
            with torch.no_grad():
                change(model)

    def check(self, *args: Any, grad: bool = False, **kwargs: Any) -> Any:
        """Call both, and compare results, buffers and, with ``grad``, the gradients of parameters and arguments."""
        self._calls += 1
        found = [self._run(model, grad, args, kwargs) for model in (self.fast, self.reference)]
        check_same(*found)
        if self.device.type != "cuda":  # where kernels may add in another order from run to run
            torch.testing.assert_close(*found, rtol=0, atol=0)
        return found[0][0]

    def _run(self, model: Any, grad: bool, args: Any, kwargs: Any) -> Any:
        torch.manual_seed(self._calls)
        args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        inputs = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        if grad:
            for tensor in inputs:
                tensor.requires_grad_()
        with torch.set_grad_enabled(grad):
            out = model(*args, **kwargs)
        gradients = None
        if grad:
            wanted = [*inputs, *(p for p in model.parameters() if p.requires_grad)]
            gradients = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
        # Results are kept as they were: a later call must not write to them.
        return out.detach().clone() if grad else out, gradients, [b.clone() for b in model.buffers()]

    def assert_graphs(self, grad: bool = False, but: str | None = None) -> None:
        """All of its calls ran as graphs, forwards and backwards; or a reason names what did not."""
        report = self.fast.explain().to_dict()
        # Some kernels on CUDA take a tensor that they do not read; what cannot be proven is copied inside the graph.
        told = [f for f in report["fallbacks"] if "no pointer to it was found" not in f["reason"]]
        if but is not None:
            assert any(but in fallback["what"] + fallback["reason"] for fallback in told), told
            return
        assert not told, told
        assert self.fast.cache_info().captures > 0
        compiled = [entry for entry in report["entries"] if entry["kernels"]]
        assert compiled
        assert all(entry["kernels_in_graphs"] == entry["kernels"] for entry in compiled)
        if grad:
            names = [entry["function"] or "" for entry in compiled]
            assert any(name.startswith("forward(") for name in names), names
            assert any(name.startswith("backward(") for name in names), names


@contextlib.contextmanager
def nothing_new(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[Work]:
    """Nothing is traced or captured inside, and something is replayed."""
    with counted(monkeypatch, device) as work:
        yield work
    assert (work.traces, work.captures) == (0, 0)
    assert work.replays > 0
