"""Random draws as Inductor keeps them: in eager's order, by data, and of eager's numbers."""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.ir.descriptors import TensorSpec, contiguous_strides, tensor_specs
from pygraph.ir.drawn_after import DRAWN_AFTER
from pygraph.ir.effects import is_random
from pygraph.ir.program import Program
from pygraph.ir.random_draws import (
    LAST_IS_BEFORE,
    can_be_chained,
    draws_of,
    drop_links,
    is_chained,
)
from pygraph.ir.samples import SAMPLE
from pygraph.lowering.dropouts import Note, ValueOf, split_dropouts

aten = torch.ops.aten


class OtherDrawsError(Exception):
    """Inductor draws in another order than eager, or other random numbers."""


def prepare_program_draws(program: Program) -> Program:
    """Replace dropouts and samples in a Program at stage ``aten`` by what Inductor may have: see `split_dropouts`.

    IR before::

        new_empty = aten.new_empty.default(x, [8, 1, 1])
        bernoulli = aten.bernoulli.p(new_empty, 0.9)
        rand = aten.rand.default([8], device=device("cuda:0"))

    IR after::

        bernoulli = pygraph.sample.default("bernoulli", [8, 1, 1], torch.float32, device("cuda:0"), [0.9], None)
        rand = pygraph.sample.default("uniform", [8], torch.float32, device("cuda:0"), [0.0, 1.0], None)

    Args:
        program: The Program. One that draws nothing is returned as it is.

    Returns:
        A Program at the same stage, whose draws are in the same order.
    """
    if not any(is_random(node) for node in program.nodes):
        return program
    module = program.copy_graph()
    mode = FakeTensorMode()

    def value_of(node: fx.Node) -> Any:
        spec = node.meta["spec"]
        if not isinstance(spec, TensorSpec):
            return None
        with mode:
            memory = torch.empty(spec.offset + spec.span, dtype=spec.dtype, device=spec.device)
            return memory.as_strided(spec.shape, spec.stride, spec.offset)

    def note(made: fx.Node, value: torch.Tensor, like: fx.Node) -> None:
        made.meta = {**like.meta, "spec": TensorSpec.of(value)}

    split_dropouts(module.graph, value_of, note)
    _replace_samples(module.graph, value_of, note)
    module.recompile()
    return program.replace(module=module)


def prepare_aot_draws(graph: fx.Graph) -> None:
    """Replace dropouts and samples in a graph of AOTAutograd's, and chain its draws: see `chain_draws`.

    Args:
        graph: The graph, which is changed; its nodes have fake tensors in ``meta["val"]``.
    """
    split_dropouts(graph, _value_of, _note)
    _replace_samples(graph, _value_of, _note)
    chain_draws(graph)


def chain_draws(graph: fx.Graph) -> None:
    """Have each draw depend on the one before by data, as Inductor orders operations by that alone.

    IR before::

        first = pygraph.dropout_mask.default([8], [1], torch.float32, device("cuda:0"), 0.1, None)
        attention = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.1)
        second = pygraph.dropout_mask.default([8], [1], torch.float32, device("cuda:0"), 0.1, None)

    IR after::

        first = pygraph.dropout_mask.default([8], [1], torch.float32, device("cuda:0"), 0.1, None)
        query = pygraph.drawn_after.default(q, first)
        attention = aten._scaled_dot_product_flash_attention.default(query, k, v, 0.1)
        second = pygraph.dropout_mask.default([8], [1], torch.float32, device("cuda:0"), 0.1, attention[1])

    That holds too where the operations between depend on each other already: what Inductor computes otherwise, or not
    at all, cannot undo it, and it can be seen in Inductor's kernels. A draw that cannot take another stays as it is.

    Args:
        graph: A graph of AOTAutograd's, which is changed; its nodes have fake tensors in ``meta["val"]``.
    """
    last: dict[torch.device, fx.Node] = {}  # each device has a generator
    for node in draws_of(graph):
        result = _result(graph, node)
        if result is None:
            continue
        device: torch.device = _value_of(result).device
        if device in last and can_be_chained(node):
            _put_after(graph, node, last[device])
        last[device] = result


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val")


def _note(made: fx.Node, value: torch.Tensor, like: fx.Node) -> None:
    made.meta = {name: like.meta[name] for name in ("stack_trace", "from_node") if name in like.meta}
    made.meta["val"] = value


def _result(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The tensor that a draw makes; of several the second, as that of attention is laid out in one way only."""
    value = _value_of(node)
    if not isinstance(value, (list, tuple)):
        return node if isinstance(value, torch.Tensor) else None
    results: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
    index = next((index for index in (1, 0) if isinstance(results[index], torch.Tensor)), None)
    found = next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)
    if found is None and index is not None:
        with graph.inserting_after(node):
            found = graph.call_function(operator.getitem, (node, index))
        _note(found, results[index], node)
    return found


def _put_after(graph: fx.Graph, node: fx.Node, last: fx.Node) -> None:
    if node.target in LAST_IS_BEFORE:
        node.args = (*node.args[:-1], last)
        return
    x: Any = node.args[0]
    fake = _value_of(x)
    with graph.inserting_before(node):
        link = graph.call_function(DRAWN_AFTER, (x, last))
    with fake.fake_mode:
        _note(link, DRAWN_AFTER(fake, _value_of(last)), node)
    node.args = (link, *node.args[1:])


# ---- samples ---------------------------------------------------------------------------------------------------

# Memory that has no values yet: an operation on it draws as it does on any memory of that layout.
_NEW_MEMORY = frozenset(
    {
        aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
        aten.new_empty.default, aten.new_empty_strided.default,
    }
)  # fmt: skip

# By operation, the draw of `pygraph::sample`, and where its numbers are: names of arguments, or the numbers themselves.
_SAMPLES: dict[Any, tuple[str, tuple[str | float, ...]]] = {
    aten.bernoulli.p: ("bernoulli", ("p",)),
    aten.uniform.default: ("uniform", ("from", "to")),
    aten.normal_functional.default: ("normal", ("mean", "std")),
    aten.rand.default: ("uniform", (0.0, 1.0)),
    aten.rand_like.default: ("uniform", (0.0, 1.0)),
    aten.randn.default: ("normal", (0.0, 1.0)),
    aten.randn_like.default: ("normal", (0.0, 1.0)),
    aten.randint.default: ("randint", (0.0, "high")),
    aten.randint.low: ("randint", ("low", "high")),
}

_IN_PLACE = frozenset({aten.bernoulli.p, aten.uniform.default, aten.normal_functional.default})
"""Functions here that are in-place operations in eager."""

_EXACT = 2**53
"""Integers up to this one are floats as well."""


def _replace_samples(graph: fx.Graph, value_of: ValueOf, note: Note) -> None:
    """Replace draws that need no tensor's values, on contiguous memory that is new.

    Args:
        graph: The graph, which is changed.
        value_of: The fake tensor that a node is.
        note: Notes what a new node is.
    """
    for node in draws_of(graph):
        known = _SAMPLES.get(node.target)
        if known is None:
            continue
        args, value = _arguments(node), value_of(node)
        draw, names = known
        numbers = [args[name] if isinstance(name, str) else name for name in names]
        if not _is_known(args, value, numbers) or (node.target in _IN_PLACE and not _is_new(args["self"])):
            continue
        given: Any = (draw, list(value.shape), value.dtype, value.device, [float(one) for one in numbers], None)
        with graph.inserting_before(node):
            made = graph.call_function(SAMPLE, given)
        with value.fake_mode:
            note(made, SAMPLE(*given), node)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        if node.target in _IN_PLACE:
            graph.erase_node(args["self"])  # only the draw has used it


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation, by name."""
    target: Any = node.target
    found: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        found[argument.name] = node.args[position] if position < len(node.args) else default
    return {**found, **node.kwargs}


def _is_known(args: dict[str, Any], value: Any, numbers: list[Any]) -> bool:
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda" or args.get("generator") is not None:
        return False
    shape, stride = tuple(value.shape), tuple(value.stride())
    layout: tuple[Any, ...] = (*shape, *stride)  # of symbols, where sizes are
    if not all(isinstance(number, int) for number in layout):
        return False
    if stride != contiguous_strides(shape) or value.dtype.is_complex or args.get("layout") not in (None, torch.strided):
        return False
    return all(type(number) in (int, float) and abs(number) <= _EXACT for number in numbers)


def _is_new(memory: Any) -> bool:
    return isinstance(memory, fx.Node) and memory.target in _NEW_MEMORY and len(memory.users) == 1


# ---- what Inductor has made of them ----------------------------------------------------------------------------


def check_order(run: fx.Graph, graph: fx.Graph) -> None:
    """Check that AOTAutograd and Inductor's passes on its graph have left draws in their order, before it is kept.

    Args:
        run: The run.
        graph: The graph that AOTAutograd has made of it.

    Raises:
        OtherDrawsError: They have exchanged draws.
    """
    wanted = [node.name for node in draws_of(run)]
    # An interpreter notes of which nodes it makes others (torch 2.13). Notes of another kind say nothing.
    origins: list[Any] = [node.meta.get("from_node") or [node] for node in draws_of(graph)]
    found = [origin[0].name for origin in origins]
    if found != wanted and sorted(found) == sorted(wanted):
        raise OtherDrawsError(f"Inductor draws in the order {found}, eager {wanted}")


def check_draws(graph: fx.Graph, parts: Iterable[fx.GraphModule]) -> None:
    """Check that kernels draw what a run draws, in its order, and drop what has kept that order.

    Args:
        graph: The run, as it was before Inductor.
        parts: Its kernels, which run one after the other; they are changed.

    Raises:
        OtherDrawsError: They draw otherwise, or something could have let Inductor exchange two of them.
    """
    wanted = [_described(node) for node in draws_of(graph)]
    found: list[tuple[str, Any]] = []
    for part in parts:
        draws = draws_of(part.graph)
        if not is_chained(draws, part.graph):
            raise OtherDrawsError(f"Inductor may exchange the draws {[node.name for node in draws]}")
        found += map(_described, draws)
        if draws:
            drop_links(part.graph)
            part.recompile()
    if len(wanted) != len(found) or not all(map(_is_same, wanted, found)):
        raise OtherDrawsError(f"Inductor draws {found}, eager {wanted}")


def _described(node: fx.Node) -> tuple[str, Any]:
    """The operation of a draw, and the shape of what it draws; None if that is not known."""
    spec = next(iter(tensor_specs(node.meta.get("spec"))), None)
    return str(node.target), None if spec is None else spec.shape


def _is_same(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    return one[0] == other[0] and (None in (one[1], other[1]) or one[1] == other[1])
