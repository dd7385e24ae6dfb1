"""The states of generators that attention hands from its forward to its backward."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from pygraph.ir.attention_states import is_unused_state
from pygraph.ir.descriptors import TensorSpec
from pygraph.lowering.states import Crossing, join, settle, settle_between_regions

CUDA = torch.device("cuda", 0)
ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


def graph(p: float) -> fx.Graph:
    """A forward that returns its states, and a backward that takes others."""
    found = fx.Graph()

    def placed(node: fx.Node, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node.meta = {"spec": TensorSpec(shape, (1,) * len(shape), dtype, CUDA), "source": None}
        return node

    q, seed, offset = (placed(found.placeholder(name), 2) for name in ("q", "seed", "offset"))
    attention = placed(found.call_function(ATTENTION, (q, q, q, None, True, p)), 2)
    parts = [placed(found.call_function(operator.getitem, (attention, i)), 2) for i in range(4)]
    args: Any = (q, q, q, q, None, parts[0], parts[1], seed, offset, p, [True, True, True, False])
    gradient = placed(found.call_function(BACKWARD, args), 2)
    found.output((parts[0], parts[2], parts[3], gradient))
    return found


def test_crossing() -> None:
    assert Crossing.of(graph(0.1)) == Crossing(frozenset({1, 2}), {1: True, 2: True})
    assert Crossing.of(graph(0.0)) == Crossing(frozenset({1, 2}), {1: False, 2: False})
    states = Crossing(frozenset({0}), {1: True, 2: False})
    assert states.before([torch.ones(())])[0].device.type == "cpu"
    kept = states.after([None, torch.tensor(3), torch.tensor(4)], torch.device("cpu"))
    assert kept[0] is None
    assert kept[1:] == [torch.tensor(3), torch.tensor(0)]


def test_settle() -> None:
    found = graph(0.1)
    settle(found, CUDA)
    backward = next(node for node in found.nodes if node.target is BACKWARD)
    assert [str(argument.target) for argument in backward.args[7:9]] == ["pygraph.state_to_read.default"] * 2
    returned = found.output_node().args[0]
    assert [str(value.target) for value in returned[1:3]] == ["pygraph.state_to_keep.default"] * 2
    assert all(value.args[1:] == (CUDA, True) for value in returned[1:3])
    found.lint()


def test_what_was_not_drawn_stays() -> None:
    found = graph(0.0)
    settle(found, CUDA)
    assert not any("state_to_keep" in str(node.target) for node in found.nodes)


def between(p: float) -> tuple[fx.Graph, fx.Node]:
    """A forward in one region, and its backward in the next one."""
    found = graph(p)
    attention = next(node for node in found.nodes if node.target is ATTENTION)
    parts = sorted(attention.users, key=lambda node: node.args[1])
    backward = next(node for node in found.nodes if node.target is BACKWARD)
    backward.args = (*backward.args[:7], parts[2], parts[3], *backward.args[9:])
    for node in found.nodes:
        node.meta["region"] = int(node is backward)
    return found, backward


def test_drawn_states_cross_regions_on_the_device() -> None:
    found, backward = between(0.1)
    settle_between_regions(found, CUDA)
    for read in backward.args[7:9]:
        kept = read.args[0]
        assert [str(one.target) for one in (read, kept)] == [
            "pygraph.state_to_read.default",
            "pygraph.state_to_keep.default",
        ]
        assert (read.meta["region"], kept.meta["region"]) == (1, 0)
    found.lint()


def test_drawn_states_stay_in_their_region() -> None:
    found, _ = between(0.1)
    for node in found.nodes:
        node.meta["region"] = 0
    settle_between_regions(found, CUDA)
    assert not any("state_to" in str(node.target) for node in found.nodes)


def test_what_was_not_drawn_crosses_regions_as_it_is() -> None:
    """Launches put it on the device, where a graph has it: `RegionBody.run`."""
    found, backward = between(0.0)
    settle_between_regions(found, CUDA)
    assert all(is_unused_state(node) for node in backward.args[7:9])


def test_join() -> None:
    """What has settled a forward and its backward is undone where both are in one graph."""
    found, backward = between(0.1)
    states = backward.args[7:9]
    before = str(found)
    settle(found, CUDA)
    assert "state_to_keep" in str(found)
    returned: Any = found.output_node().args[0]
    found.output_node().args = ((returned[0], *states, returned[3]),)
    join(found)
    found.lint()
    assert backward.args[7:9] == states
    assert str(found) == before


def test_states_that_are_returned_are_kept() -> None:
    found, backward = between(0.1)
    settle(found, CUDA)
    join(found)
    found.lint()
    returned: Any = found.output_node().args[0]
    assert [str(value.target) for value in returned[1:3]] == ["pygraph.state_to_keep.default"] * 2
    assert [value.args[0] for value in returned[1:3]] == list(backward.args[7:9])


def test_a_state_is_copied_once() -> None:
    """A Program has been settled, and what records the kernels that it becomes keeps states as well."""
    found, backward = between(0.1)
    seed: Any = backward.args[7]
    with found.inserting_after(seed):
        inner = found.call_function(torch.ops.pygraph.state_to_keep.default, (seed, CUDA, True))
    with found.inserting_after(inner):
        outer = found.call_function(torch.ops.pygraph.state_to_keep.default, (inner, CUDA, True))
    found.output_node().args = ((outer,),)
    join(found)
    assert outer.args[0] is seed
    assert inner not in found.nodes


def test_a_state_is_read_where_its_forward_returns_it() -> None:
    """As the kernels of a backward read it, where its forward has been left as it was."""
    found, backward = between(0.1)
    states = backward.args[7:9]
    for state in states:
        with found.inserting_before(backward):
            read = found.call_function(torch.ops.pygraph.state_to_read.default, (state,))
        backward.replace_input_with(state, read)  # pyright: ignore[reportArgumentType]
    join(found)
    assert backward.args[7:9] == states
