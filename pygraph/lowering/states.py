"""The states of random generators that attention saves in its forward for its backward.

Their device depends on whether a graph is being captured: the tensors' then, else the host (torch's "Note [Seed
and Offset Device]"), where the memory-efficient backward wants them; cuDNN's takes them on the device alone. A forward
and a backward that are graphs of their own need them on one device, which is that of the tensors. Without dropout they
are uninitialised memory, which zeros may replace.
"""

# torch has no public names for operator overloads. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pygraph.ir import ops
from pygraph.ir.effects import is_operation, is_random
from pygraph.ir.program import Program, output_values

# Names of attention's arguments and results. Checked with torch 2.11 and 2.13.
STATES = frozenset({"philox_seed", "philox_offset"})
UNUSED_STATES = frozenset({"rng_state", "unused"})

# The operations that read them on the host unless they are captured.
_READERS = frozenset({"aten::_scaled_dot_product_efficient_attention_backward", "aten::_efficient_attention_backward"})


def read(state: torch.Tensor) -> torch.Tensor:
    """The state on the host for an ordinary launch, on the device in a capture.

    Args:
        state: The state on the device.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return state if capturing else state.cpu()


def keep(state: torch.Tensor, device: torch.device, drawn: bool) -> torch.Tensor:
    """A copy of the state on the device.

    Args:
        state: The state where an operation has returned it.
        device: The device.
        drawn: Whether the operation has drawn random numbers; else its state is uninitialised memory.
    """
    return state.to(device, copy=True) if drawn else torch.zeros_like(state, device=device)


ops.define("state_to_read(Tensor(a) state) -> Tensor(a)", read, torch.empty_like)
ops.define("state_to_keep(Tensor state, Device device, bool drawn) -> Tensor", keep, keep)


def reads(target: Any) -> list[str]:
    """The names of an operation's arguments, if an ordinary launch of it reads states on the host; else none."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name not in _READERS:
        return []
    return [argument.name for argument in target._schema.arguments]


def read_by(node: fx.Node) -> list[fx.Node]:
    """The states that an ordinary launch of an operation reads on the host."""
    names = reads(node.target)
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs} if names else {}
    return [value for name, value in given.items() if name in STATES and isinstance(value, fx.Node)]


def is_state(source: fx.Node, index: int) -> bool:
    """Whether one of the results of an operation is a state, or unused memory instead of one."""
    target: Any = source.target
    returns: Any = target._schema.returns if is_operation(source) else ()
    name: str = returns[index].name if index < len(returns) else ""
    return name in STATES or (name in UNUSED_STATES and not is_random(source))


def is_unset_state(node: fx.Node) -> bool:
    """Whether a node is the state of attention that has drawn nothing: zeros instead of uninitialised memory."""
    return node.target is torch.ops.pygraph.state_to_keep.default and node.args[2] is False


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The states among the inputs and results of a graph.

    Attributes:
        inputs: Positions of the inputs that attention reads as states.
        results: Per position of a result that is one: whether random numbers were drawn.
    """

    inputs: frozenset[int]
    results: dict[int, bool]

    @classmethod
    def of(cls, graph: fx.Graph) -> Crossing:
        """Find the states among the inputs and results of a graph of ATen operations."""
        position = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
        inputs = {position[value] for node in graph.nodes for value in read_by(node) if value in position}
        results: dict[int, bool] = {}
        for index, value in enumerate(output_values(graph)):
            if isinstance(value, fx.Node) and value.target is operator.getitem:
                source: Any = value.args[0]
                if is_state(source, value.args[1]):  # pyright: ignore
                    results[index] = is_random(source)
        return cls(frozenset(inputs), results)

    def before(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with states on the device from which operations read them now."""
        return [read(value) if index in self.inputs else value for index, value in enumerate(inputs)]

    def after(self, results: Sequence[Any], device: torch.device) -> list[Any]:
        """The results with all states on the device."""
        return [
            keep(value, device, self.results[index]) if index in self.results else value
            for index, value in enumerate(results)
        ]


def settle(graph: fx.Graph, device: torch.device) -> None:
    """Insert moves of drawn states into a graph of ATen operations, so that it runs captured or not."""
    for node in list(graph.nodes):
        for state in read_by(node):
            with graph.inserting_before(node):
                there = graph.call_function(torch.ops.pygraph.state_to_read.default, (state,))
            there.meta = dict(state.meta)
            node.replace_input_with(state, there)
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and node.users and is_random(source) and is_state(source, node.args[1]):  # pyright: ignore
            with graph.inserting_after(node):
                kept = graph.call_function(torch.ops.pygraph.state_to_keep.default, (node, device, True))
            kept.meta = dict(node.meta)
            node.replace_all_uses_with(kept, delete_user_cb=functools.partial(operator.is_not, kept))


def settle_program(program: Program) -> Program:
    """A Program whose forward and backward may become graphs of their own.

    IR before::

        attention = aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.1)
        seed = operator.getitem(attention, 2)
        grads = aten._scaled_dot_product_efficient_attention_backward.default(…, seed, …)

    IR after::

        attention = aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.1)
        seed = operator.getitem(attention, 2)
        kept = pygraph.state_to_keep(seed, device("cuda:0"), True)
        read = pygraph.state_to_read(kept)
        grads = aten._scaled_dot_product_efficient_attention_backward.default(…, read, …)

    Args:
        program: A Program at stage ``aten``; without such operations it is returned as it is.

    Returns:
        A Program at the same stage.
    """
    if program.device.type != "cuda" or not any(map(read_by, program.nodes)):
        return program
    module = program.copy_graph()
    settle(module.graph, program.device)
    module.recompile()
    return program.replace(module=module)
