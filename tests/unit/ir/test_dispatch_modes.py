"""Leaving the dispatch modes of a thread; those of another stay active, also the ones that torch has but once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer, make_fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph.ir.dispatch_modes import no_dispatch_modes
from tests.unit.runtime.test_threads import run_threads


def leave() -> None:
    before = _get_current_dispatch_mode_stack()
    with no_dispatch_modes():
        assert _get_current_dispatch_mode_stack() == []
        assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert _get_current_dispatch_mode_stack() == before


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_modes_of_this_thread(pre_dispatch: bool) -> None:
    seen: list[int] = []

    def fn(x: Tensor) -> Tensor:
        before = _len_torch_dispatch_stack_pre_dispatch()
        with no_dispatch_modes():
            seen.append(_len_torch_dispatch_stack_pre_dispatch())
        leave()
        assert _len_torch_dispatch_stack_pre_dispatch() == before
        return x + 1

    graph = make_fx(fn, pre_dispatch=pre_dispatch)(torch.ones(2)).graph
    assert sum(node.op == "call_function" for node in graph.nodes) == 1
    assert seen == [0]


def test_modes_of_another_thread() -> None:
    """Torch has one list of modes of this kind, as `torch.export` uses them, for the whole process."""
    inside = list[int]()

    def work() -> None:
        with no_dispatch_modes():
            inside.append(_len_torch_dispatch_stack_pre_dispatch())

    with ProxyTorchDispatchMode(PythonKeyTracer(), "real", pre_dispatch=True):
        run_threads(work)
        assert _len_torch_dispatch_stack_pre_dispatch() == 1
    assert inside == [1]
