"""Joint graphs split in forward and backward: both together compute what the whole computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.ir.program import output_values
from pygraph.lowering.joint import Halves, split

aten = torch.ops.aten

X, W, MEAN, ONES = 0, 1, 2, 3
"""The inputs of the graphs here: data, a parameter, statistics, and the gradient that the backward begins with."""


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5, 4), torch.randn(4, 4), torch.randn(4), torch.ones(())]


def joint(fn: Callable[..., Any]) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*inputs())


def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.tanh(x @ w)
    return hidden, hidden.sum()


def gradient(x: torch.Tensor, w: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ w)
    return x.t() @ (ones.expand(5, 4) * (1 - hidden * hidden))


def run(halves: Halves, given: list[torch.Tensor]) -> list[Any]:
    """Both halves, one after the other, as what runs their kernels does it."""
    first = halves.forward(*(given[index] for index in halves.forward_inputs))
    sources = {"input": given, "forward": first}
    second = halves.backward(*(sources[of][index] for of, index in halves.backward_inputs))
    return [{"forward": first, "backward": second}[of][index] for of, index in halves.results]


def check(fn: Callable[..., Any], **more: Any) -> Halves:
    """Split a graph, and compare results and updates with those of the function."""
    halves = split(joint(fn), {ONES}, more.pop("static", set()))
    assert halves is not None
    wanted, got = inputs(), inputs()
    expected = fn(*wanted)
    torch.testing.assert_close(run(halves, got), list(expected))
    torch.testing.assert_close(got, wanted)
    return halves


def written(module: fx.GraphModule) -> list[str]:
    return [str(node.args[0]) for node in module.graph.nodes if node.target is aten.copy_.default]


def test_a_forward_and_its_backward() -> None:
    def fn(x: Any, w: Any, mean: Any, ones: Any) -> Any:
        return gradient(x, w, ones), forward(x, w)[1], forward(x, w)[0] * 2

    halves = check(fn)
    assert halves.visible == 2
    assert halves.results[0].of == "backward"
    assert {value.of for value in halves.results[1:]} == {"forward"}
    assert ONES not in halves.forward_inputs


def test_updates_of_both() -> None:
    def fn(x: Any, w: Any, mean: Any, ones: Any) -> Any:
        hidden, loss = forward(x, w)
        new = w - gradient(x, w, ones)
        mean.copy_(hidden.mean(0) + mean)
        w.copy_(new)
        return (loss,)

    halves = check(fn)
    assert written(halves.forward) == [f"primals_{MEAN}"]
    assert written(halves.backward) == [f"primals_{W}"]


def test_an_update_waits_for_a_backward_that_reads_the_old_contents() -> None:
    def fn(x: Any, w: Any, mean: Any, ones: Any) -> Any:
        _, loss = forward(x, w)
        found = gradient(x, w, ones) * mean
        mean.copy_(mean + 1)
        return loss, found

    halves = check(fn, static={MEAN})
    assert not written(halves.forward)
    assert written(halves.backward) == [f"primals_{MEAN}"]


def test_an_update_waits_for_a_backward_that_reads_a_view_of_the_old_contents() -> None:
    def fn(x: Any, w: Any, mean: Any, ones: Any) -> Any:
        loss = (x @ w).sum()
        found = ones.expand(5, 4) @ w.t()
        w.copy_(w + 1)
        return loss, found

    halves = check(fn)
    assert not written(halves.forward)


def test_values_that_are_inputs_or_the_same_twice() -> None:
    def fn(x: Any, w: Any, mean: Any, ones: Any) -> Any:
        hidden, loss = forward(x, w)
        found = gradient(x, w, ones)
        w.copy_(found)
        return loss, x, hidden, found, found, ones * 1, hidden

    check(fn)


def test_what_is_computed_again_is_not_saved() -> None:
    """A chain of cheap operations goes to the backward, from the input."""

    def fn(x: Any, w: Any, mean: Any, ones: Any) -> Any:
        y = x.sin().exp().cos()
        return y.sum(), ones.expand(5, 4) * y.sin() * x.sin().exp() * x.cos()

    halves = check(fn)
    assert len(output_values(halves.forward.graph)) == halves.visible
    assert {value.of for value in halves.backward_inputs} == {"input"}


def test_nothing_to_split() -> None:
    def early(x: Any, w: Any, mean: Any, ones: Any) -> Any:
        return (forward(x, w)[1],)

    def late(x: Any, w: Any, mean: Any, ones: Any) -> Any:
        return (gradient(x, w, ones),)

    assert split(joint(early), {ONES}, set()) is None
    assert split(joint(late), {ONES}, set()) is None
