"""Call histories of one jitted function, with eager PyTorch beside it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.utils import _pytree as pytree

import pygraph
from pygraph.ir.selections import MECHANISMS, Mechanism
from tests import extent
from tests.property.laws import Outcome, assert_same_value, scramble
from tests.property.strategies import TensorInput


class World(nn.Module):
    """One function with all that it closes over; there are two, one jitted and one not."""

    def __init__(self, kind: str, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.net = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(4))
        with torch.no_grad():
            for value in self.net.parameters():
                value.copy_(torch.randn(value.shape, generator=generator))
        self.mode = 1
        self.device = device
        self.to(device)
        self.fn = getattr(self, f"make_{kind}")()

    def make_pure(self) -> Any:
        return lambda x, k: (torch.tanh(x) * k, x.sum(-1))

    def make_views(self) -> Any:
        return lambda x, k: {"same": x, "view": x[..., 1:], "both": (y := x * k, y.t() if y.dim() == 2 else y)}

    def make_mutating(self) -> Any:
        def fn(x: torch.Tensor, k: Any) -> Any:
            x.add_(1)
            x[..., :2].mul_(k)
            return x, x + 1

        return fn

    def make_module(self) -> Any:
        def fn(x: torch.Tensor, k: Any) -> Any:
            x = x.to(self.net.weight.dtype)
            self.count.add_(1)
            y = self.norm(self.net(x.reshape(-1, 4))) * k if self.training else self.net(x)
            return F.dropout(y, 0.25, self.training) + self.count

        return fn

    def make_random(self) -> Any:
        return lambda x, k: (torch.rand_like(x, dtype=torch.float32) * k, F.dropout(x, 0.5))

    def make_closed_over(self) -> Any:
        offset = torch.full((4,), 2.0, device=self.device)
        mode = 1

        def fn(x: torch.Tensor, k: Any) -> Any:
            return x + offset * mode + self.mode, offset * k

        def change(value: int) -> None:
            nonlocal mode, offset
            if value % 2:
                mode = value
            else:
                offset = torch.full((4,), float(value), device=self.device)

        self.change = change
        return fn

    def make_data_dependent(self) -> Any:
        return lambda x, k: (x * k)[x > 0].sum() + x.float().sum().item() * x

    def change(self, value: int) -> None:
        self.mode = value


KINDS = ("pure", "views", "mutating", "module", "random", "closed_over", "data_dependent")
Pair = tuple[Any, Any]


class Histories(RuleBasedStateMachine):
    """Every rule does the same to both worlds; every call is compared, and so is all that is still held."""

    device: torch.device
    wrap = staticmethod(pygraph.jit)

    @initialize(kind=st.sampled_from(KINDS))
    def start(self, kind: str) -> None:
        self.kind = kind
        self.mine, self.eager = World(kind, self.device), World(kind, self.device)
        self.jitted = self.wrap(self.mine.fn)
        self.arguments: list[Pair] = []
        self.held: list[Pair] = []
        self.layout = TensorInput((2, 4))
        self.scalar: Any = 2.0
        self.counter = 0

    # -- calls ----------------------------------------------------------------------------------------------------

    def call(self, pair: Pair, seed: int) -> None:
        outcomes = []
        for function, world, x in ((self.eager.fn, self.eager, pair[1]), (self.jitted, self.mine, pair[0])):
            with torch.no_grad():
                outcomes.append(
                    Outcome(function, (x, self.scalar), list(world.state_dict(keep_vars=True).values()), seed)
                )
        outcomes[1].check_same(outcomes[0])
        self.held.append((outcomes[1].result, outcomes[0].result))
        del self.held[:-6]

    @rule()
    def call_fresh(self) -> None:
        self.counter += 1
        pair = self.layout.make(self.device, self.counter), self.layout.make(self.device, self.counter)
        self.arguments.append(pair)
        del self.arguments[:-4]
        self.call(pair, self.counter)

    @precondition(lambda self: self.arguments)
    @rule(which=st.integers(0, 3))
    def call_again(self, which: int) -> None:
        self.counter += 1
        self.call(self.arguments[which % len(self.arguments)], self.counter)

    @precondition(lambda self: self.arguments)
    @rule(count=st.integers(2, 3))
    def call_in_one_stream(self, count: int) -> None:
        """Several draws without seeding in between: the stream goes on where the last call left it."""
        results = []
        for function, index in ((self.eager.fn, 1), (self.jitted, 0)):
            torch.manual_seed(self.counter)
            with torch.no_grad():
                results.append([function(self.arguments[-1][index], self.scalar) for _ in range(count)])
        self.held.append((results[1], results[0]))

    @precondition(lambda self: self.held)
    @rule()
    def call_on_a_result(self) -> None:
        mine = [
            leaf for leaf in pytree.tree_leaves(self.held[-1][0]) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        ]
        eager = [
            leaf for leaf in pytree.tree_leaves(self.held[-1][1]) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        ]
        if mine and mine[0].shape[-1] == 4:
            self.counter += 1
            self.call((mine[0], eager[0]), self.counter)

    # -- arguments ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.arguments)
    @rule(which=st.integers(0, 3), value=st.sampled_from((1, 2, -3)))
    def mutate_an_argument(self, which: int, value: int) -> None:
        for tensor in self.arguments[which % len(self.arguments)]:
            tensor.add_(value)

    @precondition(lambda self: self.arguments)
    @rule()
    def free_an_argument(self) -> None:
        """Its memory goes to somebody else, who writes to it."""
        pair = self.arguments.pop(0)
        shape, dtype = pair[0].shape, pair[0].dtype
        del pair
        self.garbage = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(4)]
        for tensor in self.garbage:
            scramble(tensor)

    @rule()
    def forget_results(self) -> None:
        self.held.clear()

    @rule(scalar=st.sampled_from((2.0, 0.5, -1.0, 3, 0.0, -0.0, 1)))
    def change_the_scalar(self, scalar: Any) -> None:
        self.scalar = scalar

    @rule(layout=st.sampled_from([
        TensorInput((2, 4)), TensorInput((4, 4)), TensorInput((4,)), TensorInput((2, 4), offset=1), TensorInput((0, 4)),
        TensorInput((4, 4), layout="transposed"), TensorInput((2, 4), layout="sliced"),
        TensorInput((2, 4), torch.float64), TensorInput((2, 4), torch.bfloat16),
    ]))  # fmt: skip
    def change_the_layout(self, layout: TensorInput) -> None:
        if self.kind != "module" or (len(layout.shape) > 1 and 0 not in layout.shape):  # BatchNorm wants several rows
            self.layout = layout

    # -- what is closed over --------------------------------------------------------------------------------------

    @rule(how=st.sampled_from(("data", "assign", "load", "update", "to", "buffer", "norm")), value=st.integers(1, 3))
    def change_the_module(self, how: str, value: int) -> None:
        for world in (self.mine, self.eager):
            weight = world.net.weight
            with torch.no_grad():
                match how:
                    case "data":
                        weight.data = torch.full_like(weight, value / 4)
                    case "assign":
                        world.net.weight = nn.Parameter(torch.full_like(weight, value / 2))
                    case "load":
                        world.load_state_dict({k: torch.full_like(v, value) for k, v in world.state_dict().items()})
                    case "update":
                        weight.add_(value / 8)
                    case "to":
                        world.to(torch.float64 if weight.dtype == torch.float32 else torch.float32)
                    case "buffer":
                        world.count = torch.full_like(world.count, value)
                    case _:
                        world.norm.momentum = value / 10

    @rule()
    def toggle_training(self) -> None:
        for world in (self.mine, self.eager):
            world.train(not world.training)

    @rule(value=st.integers(1, 4))
    def change_a_closed_over_value(self, value: int) -> None:
        for world in (self.mine, self.eager):
            world.change(value)

    @rule()
    def clear_the_cache(self) -> None:
        self.jitted.cache_clear()

    # -- what holds at every step ---------------------------------------------------------------------------------

    @invariant()
    def held_results_are_what_they_were(self) -> None:
        for mine, eager in getattr(self, "held", []):
            for got, expected in zip(pytree.tree_leaves(mine), pytree.tree_leaves(eager), strict=True):
                assert_same_value(got, expected, "a held result")

    def teardown(self) -> None:
        if hasattr(self, "jitted"):
            self.jitted.cache_clear()
        gc.collect(0)


def run_histories(device: torch.device, examples: int, steps: int, wrap: Any = pygraph.jit, **options: Any) -> None:
    """Run the state machine on a device; raises what the first failing history raises."""
    machine = type("Histories", (Histories,), {"device": device, "wrap": staticmethod(wrap)})
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        **options,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)


def test_histories_equal_eager(device: torch.device) -> None:
    run_histories(device, extent.examples(30, 400), 25)


def test_histories_with_a_small_cache_equal_eager(device: torch.device) -> None:
    run_histories(device, extent.examples(8, 150), 25, pygraph.jit(max_graphs=2))


def test_histories_without_indirection_equal_eager(device: torch.device) -> None:
    run_histories(device, extent.examples(6, 100), 20, pygraph.graphify)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_histories_with_each_mechanism_equal_eager(device: torch.device, mechanism: Mechanism) -> None:
    run_histories(
        device,
        extent.examples(5, 100),
        20,
        lambda fn: pygraph.graphify(pygraph.indirect(pygraph.devicify(fn), mechanism=mechanism)),
    )
