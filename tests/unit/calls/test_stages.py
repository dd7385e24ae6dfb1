"""lower(*args).compile(): step by step, like jax.stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.calls.stages import Compiled, Lowered
from pygraph.errors import ArgumentError, FallbackError, TraceError


def step(x: torch.Tensor, k: float = 2.0, *, flip: bool = False) -> torch.Tensor:
    return (x * k).flip(0) if flip else x * k


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(6.0, device=device).view(2, 3)


def test_lower_and_compile(x: torch.Tensor) -> None:
    fn = pygraph.jit(step)
    lowered = fn.lower(x, 2.0)
    assert isinstance(lowered, Lowered)
    assert lowered.program.stage == "regions"
    assert lowered.as_text() == str(lowered.program)
    compiled = lowered.compile()
    assert isinstance(compiled, Compiled)
    for k in (2.0, 3.0):
        assert torch.equal(compiled(x + 1, k), (x + 1) * k)
    assert fn.cache_info().size == 0


def test_lowering_changes_nothing(x: torch.Tensor) -> None:
    before, random = x.clone(), torch.get_rng_state()
    pygraph.jit(lambda x: x.add_(torch.rand(3, device=x.device))).lower(x).compile()
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), random)


def test_each_stack_lowers_as_far_as_it_goes(x: torch.Tensor) -> None:
    assert pygraph.devicify(step).lower(x, 2.0).program.stage == "aten"
    assert pygraph.indirect(step).lower(x, 2.0).program.stage == "pointers"
    assert pygraph.graphify(torch.sin).lower(x).program.regions[0].way == "copy"
    for transform in (pygraph.devicify, pygraph.indirect, pygraph.graphify):
        assert torch.equal(transform(step).lower(x, 2.0).compile()(x, 2.0), x * 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: ((x[:1], 2.0), {}), r"args\[0\] is float32\[1, 3\]"),
        (lambda x: ((x.double(), 2.0), {}), "float64"),
        (lambda x: ((x.t().contiguous().t(), 2.0), {}), r"strides \(1, 2\)"),
        (lambda x: ((x.cpu(), 2.0), {}), "cpu; expected"),
        (lambda x: ((x,), {}), "another structure"),
        (lambda x: ((x, x), {}), r"args\[1\] is a tensor; expected a number"),
    ],
)
def test_a_call_that_does_not_fit(x: torch.Tensor, change: Any, text: str) -> None:
    compiled = pygraph.jit(step).lower(x, 2.0).compile()
    args, kwargs = change(x)
    with pytest.raises(ArgumentError, match=text):
        compiled(*args, **kwargs)
    assert torch.equal(compiled(x, 2.0), x * 2)


def test_another_static_value_does_not_fit(x: torch.Tensor) -> None:
    compiled = pygraph.jit(step).lower(x, 2.0, flip=True).compile()
    assert torch.equal(compiled(x, 3.0, flip=True), (x * 3).flip(0))
    with pytest.raises(ArgumentError, match=r"kwargs\['flip'\] is False; expected True, which was baked in"):
        compiled(x, 2.0, flip=False)


def test_another_alignment_or_overlap_does_not_fit(x: torch.Tensor) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    memory = torch.zeros(256, device=x.device)
    compiled = pygraph.jit(fn).lower(memory[:4].clone(), memory[4:8].clone()).compile()
    for a, b, text in (
        (memory[1:5], memory[64:68], "is not aligned as when it was compiled"),
        (memory[64:68], memory[64:68], "the arguments share memory otherwise"),
    ):
        with pytest.raises(ArgumentError, match=text):
            compiled(a, b)
    assert memory.sum() == 0
    assert compiled(memory[64:68], memory[128:132].clone()).tolist() == [0.0] * 4
    assert memory.sum() == 4


class Scaled:
    """A function of a weight, its factor, and how many times it is applied."""

    def __init__(self, device: torch.device) -> None:
        self.weight, self.factor, self.times = torch.ones(3, 3, device=device), 2.0, 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(x @ self.weight) * self.factor
        return x


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda fn: setattr(fn, "factor", 3.0), "factor is another"),
        (lambda fn: setattr(fn, "times", 2), "times is another"),
        (lambda fn: setattr(fn, "weight", fn.weight * 2), "weight is another"),
        (lambda fn: setattr(fn.weight, "data", fn.weight * 2), "weight is another"),
        (lambda fn: setattr(fn.weight, "data", (fn.weight * 2).t()), "weight is another"),
    ],
)
def test_a_call_that_would_read_something_else_does_not_fit(
    x: torch.Tensor, change: Callable[[Scaled], object], name: str
) -> None:
    fn = Scaled(x.device)
    compiled = pygraph.jit(fn).lower(x).compile()
    fn.weight.mul_(0.5)
    torch.testing.assert_close(compiled(x), fn(x))
    change(fn)
    with pytest.raises(ArgumentError, match=name):
        compiled(x)
    torch.testing.assert_close(pygraph.jit(fn).lower(x).compile()(x), fn(x))


def test_what_has_changed_since_it_was_lowered_is_not_compiled(x: torch.Tensor) -> None:
    fn = Scaled(x.device)
    lowered = pygraph.jit(fn).lower(x)
    fn.weight.data = fn.weight * 2
    torch.testing.assert_close(lowered.compile()(x), fn(x))  # nothing was recorded yet where it was
    with torch.autocast(x.device.type, torch.bfloat16), pytest.raises(ArgumentError, match="autocast is another"):
        lowered.compile()
    fn.weight.data = fn.weight.t()
    with pytest.raises(ArgumentError, match="weight is another"):
        lowered.compile()


def test_without_graphs_tensors_are_read_where_they_are(x: torch.Tensor) -> None:
    fn = Scaled(x.device)
    compiled = pygraph.devicify(fn).lower(x).compile()
    fn.weight.data = fn.weight * 2
    torch.testing.assert_close(compiled(x), fn(x))
    fn.times = 2
    with pytest.raises(ArgumentError, match="times is another"):
        compiled(x)


def test_a_call_under_other_settings_does_not_fit(x: torch.Tensor) -> None:
    compiled = pygraph.jit(step).lower(x).compile()
    with torch.no_grad():
        assert torch.equal(compiled(x), x * 2)
    with torch.inference_mode():
        assert torch.equal(compiled(x), x * 2)
    with torch.autocast(x.device.type, torch.bfloat16), pytest.raises(ArgumentError, match="autocast is another"):
        compiled(x)
    assert torch.equal(compiled(x), x * 2)


def test_what_cannot_be_traced_raises(x: torch.Tensor) -> None:
    with pytest.raises(TraceError, match=r"From test_stages\.py"):
        pygraph.jit(lambda x: x if x.sum() > 0 else -x).lower(x)


def test_explain_of_one_call(x: torch.Tensor) -> None:
    compiled = pygraph.jit(step).lower(x, 2.0).compile()
    compiled(x, 2.0)
    report = compiled.explain().to_dict()
    assert report["kernels"] == report["kernels_in_graphs"] > 0
    assert report["bytes_copied_per_replay"] == 0


STRICT_CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a shape that depends on data": lambda x: x[x > 0] * 2,
    "a value that is needed on the host": lambda x: x * x.nonzero()[0, 1],
    "part of it": lambda x: ((x * 2)[x > 0] * 2).sum() + x,
}


@pytest.mark.parametrize("fn", STRICT_CALLS.values(), ids=STRICT_CALLS)
def test_strict_stages_raise_what_a_call_raises(x: torch.Tensor, fn: Any) -> None:
    jitted = pygraph.jit(fn, strict=True)
    with pytest.raises(FallbackError) as of_call:
        jitted(x)
    lowered = jitted.lower(x)
    with pytest.raises(FallbackError) as of_stage:
        lowered.compile()
    assert str(of_stage.value) == str(of_call.value)
    assert pygraph.jit(fn).lower(x).compile().explain().to_dict()["fallbacks"]


def test_strict_stages_raise_on_the_cpu() -> None:
    jitted, x = pygraph.jit(step, strict=True), torch.ones(2, 3)
    with pytest.raises(FallbackError, match="its tensors are on the cpu"):
        jitted.lower(x, 2.0).compile()


def test_strict_stages_that_are_graphs(x: torch.Tensor) -> None:
    compiled = pygraph.jit(step, strict=True).lower(x, 2.0).compile()
    assert torch.equal(compiled(x, 3.0), x * 3)
    assert torch.equal(pygraph.devicify(step).lower(x, 2.0).compile()(x, 3.0), x * 3)  # which records nothing
