"""Draws in graphs: which they are, and whether data orders them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pygraph.ir.attention_states import draws_again
from pygraph.ir.drawn_after import DRAWN_AFTER
from pygraph.ir.dropout_masks import DROPOUT_MASK
from pygraph.ir.effects import is_view
from pygraph.ir.random_draws import can_be_chained, draws_of, drop_links, is_chained, is_draw, values_taken
from pygraph.ir.samples import SAMPLE

aten = torch.ops.aten
CPU = torch.device("cpu")
FLASH = aten._scaled_dot_product_flash_attention.default


class Graph:
    """A graph to which draws are added."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def mask(self, after: fx.Node | None = None) -> fx.Node:
        return self.call(DROPOUT_MASK, [4], [1], torch.float32, CPU, 0.5, after)

    def attention(self, query: fx.Node, p: float = 0.1) -> tuple[fx.Node, fx.Node]:
        node = self.call(FLASH, query, self.x, self.x, p)
        return node, self.call(operator.getitem, node, 0)

    def is_chained(self) -> bool:
        return is_chained(draws_of(self.graph), self.graph)


def test_attention_draws_where_it_drops() -> None:
    made = Graph()
    drawn, still = made.attention(made.x)[0], made.attention(made.x, 0.0)[0]
    assert (is_draw(drawn), is_draw(still)) == (True, False)
    assert can_be_chained(drawn)
    assert draws_of(made.graph) == [drawn]


@pytest.mark.parametrize(
    ("target", "place", "again"),
    [
        (aten._scaled_dot_product_efficient_attention_backward.default, 9, True),
        (aten._scaled_dot_product_cudnn_attention_backward.default, 13, True),
        (aten._scaled_dot_product_efficient_attention.default, 5, False),
        (aten._scaled_dot_product_cudnn_attention.default, 5, False),
    ],
)
def test_backwards_draw_again(target: Any, place: int, again: bool) -> None:
    """Their numbers are of a state that the forward has saved, whatever is drawn between."""
    made = Graph()
    args = [made.x] * place
    node = made.call(target, *args, 0.1)
    assert draws_again(node) == again
    assert is_draw(node) != again


@pytest.mark.parametrize("target", [aten.rand.default, aten.multinomial.default, aten.native_dropout.default])
def test_what_cannot_be_chained(target: Any) -> None:
    node = Graph().call(target, [4])
    assert is_draw(node)
    assert not can_be_chained(node)


def test_chains() -> None:
    made = Graph()
    first = made.mask()
    _, out = made.attention(made.call(DRAWN_AFTER, made.x, first))
    made.call(SAMPLE, "uniform", [4], torch.float32, CPU, [0.0, 1.0], out)
    assert len(draws_of(made.graph)) == 3
    assert made.is_chained()


def test_a_draw_may_take_the_one_before_by_way_of_kernels() -> None:
    """As where Inductor copies what attention takes to another layout."""
    made = Graph()
    link = made.call(DRAWN_AFTER, made.x, made.mask())
    memory = made.call(aten.empty_strided.default, [4], [1])
    made.call(torch.ops.pygraph.launch.default, "copy", [memory], [link], [])
    made.attention(made.call(torch.ops.pygraph.reinterpret.default, memory, [4], [1], 0))
    assert made.is_chained()


def unlinked(made: Graph) -> None:
    made.mask()
    made.attention(made.x)


def by_its_data(made: Graph) -> None:
    """Inductor may compute what depends on it in another way."""
    made.attention(made.call(aten.mul.Tensor, made.x, made.mask()))


def to_another(made: Graph) -> None:
    first = made.mask()
    made.mask(first)
    made.mask(first)


def of_another(made: Graph) -> None:
    made.call(DRAWN_AFTER, made.x, made.mask())
    made.attention(made.x)


@pytest.mark.parametrize("make", [unlinked, by_its_data, to_another, of_another])
def test_what_is_not_chained(make: Callable[[Graph], None]) -> None:
    made = Graph()
    make(made)
    assert not made.is_chained()


def test_values_are_taken_through_memory() -> None:
    made = Graph()
    memory = made.call(aten.empty.memory_format, [4])
    other = made.call(aten.sin.default, made.x)
    copy = made.call(aten.copy_.default, memory, made.call(aten.cos.default, made.x))
    made.call(aten.copy_.default, made.call(aten.empty.memory_format, [4]), other)
    last = made.call(aten.exp.default, made.call(aten.view.default, memory, [2, 2]))
    taken = values_taken(last, list(made.graph.nodes)[:-1])
    assert {memory, copy, copy.args[1], made.x} <= taken
    assert other not in taken


def test_links_are_dropped() -> None:
    made = Graph()
    link = made.call(DRAWN_AFTER, made.x, made.mask())
    attention, out = made.attention(link)
    last = made.mask(out)
    assert is_view(link)
    drop_links(made.graph)
    assert attention.args[0] is made.x
    assert last.args[-1] is None
    assert not made.graph.find_nodes(op="call_function", target=DRAWN_AFTER)


def test_drawn_after_is_what_it_takes() -> None:
    x = torch.randn(3)
    assert DRAWN_AFTER(x, torch.ones(2)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("draw", "numbers", "dtype", "fn"),
    [
        ("uniform", [0.0, 1.0], torch.float32, lambda: torch.rand(3, 5)),
        ("normal", [0.0, 1.0], torch.float64, lambda: torch.randn(3, 5, dtype=torch.float64)),
        ("randint", [-3.0, 70.0], torch.int64, lambda: torch.randint(-3, 70, (3, 5))),
        ("bernoulli", [0.3], torch.float32, lambda: torch.empty(3, 5).bernoulli_(0.3)),
        ("uniform", [-2.0, 0.1], torch.float32, lambda: torch.empty(3, 5).uniform_(-2, 0.1)),
    ],
)
def test_samples_are_eagers(draw: str, numbers: list[float], dtype: torch.dtype, fn: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    mine, after = SAMPLE(draw, [3, 5], dtype, CPU, numbers, None), torch.rand(2)
    torch.manual_seed(1)
    torch.testing.assert_close((mine, after), (fn(), torch.rand(2)), rtol=0, atol=0)
