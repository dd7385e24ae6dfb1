"""Random histories of calls: with the extension and without it, results and statistics are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph
from pygraph.process import extension
from tests import extent

pytest.importorskip("hypothesis")
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))

TENSORS = ["plain", "other", "long", "transposed", "shifted", "double", "grad", "host", "view"]
STEP = st.one_of(
    st.tuples(st.just("call"), st.sampled_from(TENSORS), st.sampled_from(TENSORS), st.sampled_from([1, 2, 0.5, -0.0])),
    st.tuples(st.just("no_grad call"), st.sampled_from(TENSORS), st.sampled_from(TENSORS), st.just(2)),
    st.tuples(st.just("set"), st.sampled_from(["factor", "table", "items", "weight", "shift"]), st.integers(1, 3)),
)


OVERTAKEN: list[Any] = [  # a plan serves a call under autograd, and then Python one of another kind
    ("call", "plain", "host", 1),
    ("call", "plain", "double", 1),
    ("call", "grad", "plain", 1),
    ("set", "items", 2),
    ("set", "items", 2),
    ("call", "double", "transposed", 1),
    ("set", "table", 2),
    ("call", "long", "plain", 0.5),
    ("call", "other", "other", 2),
    ("call", "view", "double", -0.0),
    ("set", "table", 2),
    ("call", "host", "double", 0.5),
    ("call", "view", "grad", 1),
]


class State:
    def __init__(self, device: torch.device) -> None:
        self.factor: Any = 1
        self.table = {"a": 1}
        self.items = [1]
        self.shift = torch.ones(4, device=device)

    def change(self, what: str, value: int, device: torch.device) -> None:
        if what == "factor":
            self.factor = value
        elif what == "table":
            self.table["a"] = value
        elif what == "items":
            self.items[:] = [1] * value
        elif what == "weight":
            self.shift.fill_(value)
        else:
            self.shift = torch.full((4,), float(value), device=device)


def make_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    memory = torch.arange(64.0, device=device)
    return {
        "plain": memory[:16].view(4, 4),
        "other": torch.randn(4, 4, device=device),
        "long": torch.randn(8, 4, device=device),
        "transposed": torch.randn(4, 4, device=device).t(),
        "shifted": memory[17:33].view(4, 4),
        "double": torch.randn(4, 4, device=device, dtype=torch.float64),
        "grad": torch.randn(4, 4, device=device, requires_grad=True),
        "host": torch.randn(()),
        "view": memory[4:20].view(4, 4),
    }


def play(steps: list[tuple[Any, ...]], device: torch.device, transform: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    state, tensors = State(device), make_tensors(device)

    def fn(x: torch.Tensor, y: torch.Tensor, k: Any) -> torch.Tensor:
        return (x * k + state.shift * state.factor + len(state.items)) * state.table["a"] + y

    function = transform(fn)
    results: list[Any] = []
    for step in steps:
        if step[0] == "set":
            state.change(step[1], step[2], device)
            continue
        try:
            with torch.set_grad_enabled(step[0] == "call"):
                result = function(tensors[step[1]], tensors[step[2]], step[3])
            results.append((result.detach().cpu(), result.requires_grad))
        except RuntimeError:
            results.append("error")
    return results, function


@settings(max_examples=extent.examples(8, 50))
@given(steps=st.lists(STEP, min_size=4, max_size=14).map(lambda steps: [*steps, *steps]))
@example(steps=[*OVERTAKEN, *OVERTAKEN])
def test_histories(device: torch.device, steps: list[tuple[Any, ...]]) -> None:
    expected, _ = play(steps, device, lambda fn: fn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYGRAPH_NATIVE", "0")
        python, slow = play(steps, device, lambda fn: pygraph.jit(fn, max_graphs=4))
    native, fast = play(steps, device, lambda fn: pygraph.jit(fn, max_graphs=4))
    assert slow.engine.cache.native.dispatch is None
    for one, two, three in zip(native, python, expected, strict=True):
        torch.testing.assert_close(one, three) if one != "error" else None
        torch.testing.assert_close(two, three) if two != "error" else None
        assert (one == "error") == (two == "error") == (three == "error")
    assert fast.cache_info() == slow.cache_info()
    assert [r.calls for r in fast.explain().calls] == [r.calls for r in slow.explain().calls]
