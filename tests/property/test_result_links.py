"""Gradients of results of a call that others of its results are computed from, in every way that looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pygraph
from tests.extent import examples

CALLS = 4
WIDTH = 3

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "half": lambda a: a * 0.5,
    "first": lambda a: a.split(2, 1)[0].repeat(1, 2)[:, :WIDTH],
    "softmax": lambda a: a.softmax(-1),
    "view": lambda a: a.contiguous().view(-1).view(a.shape),
    "detach": lambda a: a.detach(),
    "in place": lambda a: (a * 1).mul_(2),
    "norm": lambda a: torch.nn.functional.layer_norm(a, (WIDTH,)),
}
"""Operations on one value."""

LOOKS = ("nothing", "retain_grad", "hook", "changing hook", "capture", "prehook")
"""Ways to look at the gradient of a result."""

values = st.integers(0, 9)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), values),
        st.tuples(st.just("weight"), st.integers(0, 2), values),
        st.tuples(st.just("add"), values, values),
        st.tuples(st.just("mul"), values, values),
    ),
    min_size=1,
    max_size=7,
)


def run(program: list[Any], chosen: list[int], x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """Run a program of which every value may be computed from every earlier one, and return some of them."""
    known = [x * weights[0].sum()]
    for kind, first, second in program:
        if kind == "unary":
            known.append(UNARY[first](known[second % len(known)]))
        elif kind == "weight":
            known.append(known[second % len(known)] @ weights[first])
        elif kind == "add":
            known.append(known[first % len(known)] + known[second % len(known)])
        else:
            known.append(known[first % len(known)] * known[second % len(known)])
    return tuple(dict.fromkeys(known[number % len(known)] for number in chosen))


def differentiate(
    results: tuple[Tensor, ...], weights: list[Tensor], looks: list[str], roots: list[int], repeats: bool
) -> list[Any]:
    """Differentiate some results, and look at others; return all that is seen."""
    seen: list[Any] = []
    captured: list[Tensor] = []

    def note(number: int, gradient: Tensor | None) -> None:
        if gradient is not None:  # as in eager of results of one operation
            seen.append((number, gradient.clone()))

    for number, (result, look) in enumerate(zip(results, looks, strict=False)):
        if not result.requires_grad:
            continue
        if look == "retain_grad":
            result.retain_grad()
        elif look == "hook":
            result.register_hook(lambda gradient, number=number: note(number, gradient))
        elif look == "changing hook":
            result.register_hook(lambda gradient: None if gradient is None else gradient * 2)
        elif look == "prehook" and result.grad_fn is not None:
            torch.autograd.graph.register_multi_grad_hook([result], lambda gradients: seen.append(gradients))
        elif look == "capture":
            captured.append(result)
    chosen = [results[number % len(results)] for number in roots]
    losses = [(result * (k + 1)).sum() for k, result in enumerate(chosen) if result.requires_grad]
    for k, loss in enumerate(losses):
        keep = repeats or k + 1 < len(losses)
        if captured:
            given = torch.autograd.grad(loss, [*captured, *weights], retain_graph=keep, allow_unused=True)
            seen += [None if one is None or not bool(one.any()) else one for one in given]
        else:
            loss.backward(retain_graph=keep)
    if losses and repeats:
        sum(losses).backward()
    seen += [result.grad for result, look in zip(results, looks, strict=False) if look == "retain_grad"]
    return [*seen, *(weight.grad for weight in weights)]


@settings(max_examples=examples(40, 600))
@given(
    program=steps,
    chosen=st.lists(values, min_size=2, max_size=4),
    looks=st.lists(st.sampled_from(LOOKS), min_size=4, max_size=4),
    roots=st.lists(values, min_size=1, max_size=2),
    repeats=st.booleans(),
)
def test_gradients_of_results(
    device: torch.device, program: list[Any], chosen: list[int], looks: list[str], roots: list[int], repeats: bool
) -> None:
    found: list[list[Any]] = []
    exact = torch.float64  # gradients that come together are added in another order, which tells in large ones
    for decorate in (lambda fn: fn, pygraph.jit):
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=exact) for _ in range(3)]
        weights = [weight.to(device).requires_grad_() for weight in weights]
        fast = decorate(lambda x, weights=weights: run(program, chosen, x, weights))
        for k in range(CALLS):
            x = torch.linspace(-1, 1, 2 * WIDTH, device=device, dtype=exact).view(2, WIDTH) + k
            found.append(differentiate(fast(x), weights, looks, roots, repeats))
    for expected, got in zip(found[:CALLS], found[CALLS:], strict=True):
        torch.testing.assert_close(got, expected)
