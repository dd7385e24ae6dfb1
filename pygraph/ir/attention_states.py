"""The states of random generators that attention saves in its forward for its backward.

Their device depends on whether a graph is being captured: the tensors' then, else the host (torch's "Note [Seed
and Offset Device]"), where the memory-efficient backward wants them; cuDNN's takes them on the device alone. A forward
and a backward that are graphs of their own need them on one device, which is that of the tensors. Without dropout they
are uninitialised memory, which zeros may replace.
"""

# torch has no public names for operator overloads. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from pygraph.ir.effects import is_operation, is_random
from pygraph.ir.ops import define

# Names of attention's arguments and results. Checked with torch 2.11 and 2.13.
STATES = frozenset({"philox_seed", "philox_offset"})
UNUSED_STATES = frozenset({"rng_state", "unused"})

# Backwards that have the tag of random operations, but read the state that their forward has saved, and leave the
# generator as it is: ATen's memory-efficient one makes a `PhiloxCudaState` of it, cuDNN's takes pointers to it (read in
# ATen's sources). The flash backward has no tag. Tags were checked with torch 2.13.
_DRAWING_AGAIN = frozenset(
    {
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_cudnn_attention_backward",
    }
)  # fmt: skip

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


define("state_to_read(Tensor(a) state) -> Tensor(a)", read, torch.empty_like)
define("state_to_keep(Tensor state, Device device, bool drawn) -> Tensor", keep, keep)


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


def draws_again(node: fx.Node) -> bool:
    """Whether a node makes the numbers of an earlier draw again, of its saved state: it is no draw, despite its tag."""
    target: Any = node.target
    return is_operation(node) and target._schema.name in _DRAWING_AGAIN


def is_state(source: fx.Node, index: int) -> bool:
    """Whether one of the results of an operation is a state, or unused memory instead of one."""
    target: Any = source.target
    returns: Any = target._schema.returns if is_operation(source) else ()
    name: str = returns[index].name if index < len(returns) else ""
    return name in STATES or (name in UNUSED_STATES and not is_random(source))


def is_state_on_device(node: fx.Node) -> bool:
    """Whether a node is a state on the device, copied from where an operation has returned it."""
    return node.target is torch.ops.pygraph.state_to_keep.default


def is_unset_state(node: fx.Node) -> bool:
    """Whether a node is the state of attention that has drawn nothing: zeros instead of uninitialised memory."""
    return is_state_on_device(node) and node.args[2] is False


def is_unused_state(node: fx.Node) -> bool:
    """Whether a node picks what an operation that has drawn nothing returns instead of a state."""
    source = _source_of_state(node)
    return source is not None and not is_random(source)


def is_drawn_state(node: fx.Node) -> bool:
    """Whether a node picks a state from the results of an operation that has drawn random numbers."""
    source = _source_of_state(node)
    return source is not None and is_random(source)


def _source_of_state(node: fx.Node) -> fx.Node | None:
    """The operation among whose results a node picks a state, or what is there instead; None for any other node."""
    if node.target is not operator.getitem:
        return None
    source: Any = node.args[0]
    return source if isinstance(source, fx.Node) and is_state(source, node.args[1]) else None  # pyright: ignore
