"""Values of a graph that end up as indices, and the values that may replace them.

An index that is out of range ends the process's use of a CUDA device. So do a few other operands, of which kernels
assert that they are in a range: probabilities, say. Made-up or poisoned values must never become one of them.
"""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from pygraph.ir.control_flow import is_conditional
from pygraph.ir.descriptors import TensorSpec, tensor_specs
from pygraph.ir.dropout_masks import DROPOUT_MASK
from pygraph.ir.effects import is_host_number, is_operation, is_selection, is_view, root, written_arguments
from pygraph.ir.launches import launch_of
from pygraph.runtime.kernel_addresses import parameters_in_addresses


class Reach(enum.IntEnum):
    """How a value reaches an index."""

    NOT = 0
    """In no way."""
    UNCHANGED = 1
    """As it is. Zero is in range wherever any index is."""
    COMPUTED = 2
    """By arithmetic, of which only values of a call are known to give an index in range."""


# Operations by the names of the operands that must be in a range, of which zero is part.
_RANGED = {
    "index": ("indices",), "_unsafe_index": ("indices",), "index_put": ("indices",), "index_put_": ("indices",),
    "_index_put_impl_": ("indices",), "_unsafe_index_put": ("indices",), "_unsafe_masked_index": ("indices",),
    "_unsafe_masked_index_put_accumulate": ("indices",), "embedding": ("indices",), "embedding_renorm_": ("indices",),
    "embedding_dense_backward": ("indices",), "_embedding_bag": ("indices", "offsets"),
    "_embedding_bag_forward_only": ("indices", "offsets"), "one_hot": ("self",), "bincount": ("self",),
    "nll_loss_forward": ("target",), "nll_loss_backward": ("target",), "nll_loss2d_forward": ("target",),
    "nll_loss2d_backward": ("target",), "multi_margin_loss": ("target",), "multi_margin_loss_backward": ("target",),
    "multilabel_margin_loss_forward": ("target",), "multilabel_margin_loss_backward": ("target",),
    "max_unpool2d": ("indices",), "max_unpool3d": ("indices",), "binary_cross_entropy": ("self",),
    "_grouped_mm": ("offs",),
    "bernoulli": ("self", "p"), "bernoulli_": ("p",), "poisson": ("self",), "binomial": ("count", "prob"),
}  # fmt: skip

# Operations by the names of the operands that must be in a range of which zero is no part.
_ASSERTED = {"_assert_async": ("self",), "_functional_assert_async": ("self",), "multinomial": ("self",)}

# Operations whose results have no values but their operands', by the names of those. Sizes and dimensions do not count.
_UNCHANGED = {
    "clone": ("self",), "_to_copy": ("self",), "copy_": ("src",), "copy": ("src",), "cat": ("tensors",),
    "stack": ("tensors",), "where": ("self", "other"), "index_select": ("self",), "gather": ("self",),
    "index": ("self",), "take": ("self",), "embedding": ("weight",), "repeat": ("self",), "flip": ("self",),
    "roll": ("self",), "contiguous": ("self",), "constant_pad_nd": ("self",), "masked_fill": ("self",),
    "masked_fill_": ("self",), "lift_fresh_copy": ("self",), "slice_scatter": ("self", "src"),
    "select_scatter": ("self", "src"), "max": ("self", "other"), "min": ("self", "other"), "amax": ("self",),
    "amin": ("self",), "maximum": ("self", "other"), "minimum": ("self", "other"), "sort": ("self",), "topk": ("self",),
    "kthvalue": ("self",), "mode": ("self",), "cummax": ("self",), "cummin": ("self",),
    "index_copy": ("self", "source"), "index_copy_": ("self", "source"),
    "scatter": ("self", "src"), "scatter_": ("self", "src"), "index_put": ("self", "values"),
    "index_put_": ("self", "values"), "relu": ("self",), "expand_copy": ("self",), "view_copy": ("self",),
}  # fmt: skip

# Operations that return positions in an operand, whatever its values are: alone, or after its values.
_POSITIONS = frozenset({"argmax", "argmin", "argsort", "nonzero"})
_VALUES_AND_POSITIONS = frozenset(
    {"sort", "topk", "max", "min", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin",
     "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"}
)  # fmt: skip

_OURS = frozenset(
    {"load", "store", "scalar", "reinterpret", "cotangent", "state_to_read", "state_to_keep", "recurrent",
     "recurrent_backward", "dropout_mask", "sample", "drawn_after"}
)  # fmt: skip


def index_reach(nodes: Iterable[fx.Node]) -> dict[fx.Node, Reach]:
    """How the values of nodes reach the indices that these nodes use; nodes that reach none are left out.

    Args:
        nodes: Nodes of a graph, in order. What they take from outside is part of the answer.
    """
    found: dict[fx.Node, Reach] = {}

    def note(node: fx.Node, reach: Reach) -> None:
        for one in {node, root(node)}:
            found[one] = max(found.get(one, Reach.NOT), reach)

    # Backwards, as what is written to memory reaches what reads it later: its own node, or a view of that memory.
    for node in reversed([node for node in nodes if node.op == "call_function"]):
        reach = max([found.get(one, Reach.NOT) for one in (node, *map(root, written_arguments(node)))])
        for operand, as_index in _ranged_operands(node):
            note(operand, as_index)
        if reach:
            for argument, unchanged in _sources(node):
                note(argument, reach if unchanged else Reach.COMPUTED)
    return found


def _operands(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """The nodes that a node takes, with the names of its arguments."""
    found: list[tuple[str, fx.Node]] = []
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments] if is_operation(node) else []
    given = [*zip([*names, *[""] * len(node.args)], node.args, strict=False), *node.kwargs.items()]
    for name, value in given:
        map_arg(value, lambda one, name=name: found.append((name, one)))  # pyright: ignore
    return found


def _name(node: fx.Node) -> str:
    """An operation's name without its overload."""
    target: Any = node.target
    return target._schema.name.partition("::")[2] if is_operation(node) else ""


def _ranged_operands(node: fx.Node) -> list[tuple[fx.Node, Reach]]:
    """The operands of a node that must be in a range, and how they reach it."""
    operands = _operands(node)
    if is_view(node):  # a slice by a number
        return [(one, Reach.COMPUTED) for _, one in operands[1:]]
    if is_selection(node) or (is_host_number(node) and not is_operation(node)):
        return []
    target: Any = node.target
    if is_conditional(node):  # a loop on anything else might never end
        return [(one, Reach.COMPUTED) for _, one in operands if one.op != "get_attr"]
    if node.target is torch.ops.pygraph.launch.default:
        return [(one, Reach.COMPUTED) for _, one in operands if _may_index(node, one)]
    if not _is_known(node):
        return [(one, Reach.COMPUTED) for _, one in operands if _is_integral(one)]
    asserted, ranged = _ASSERTED.get(_name(node), ()), _RANGED.get(_name(node), ())
    if not ranged and any(argument.name == "index" and _is_tensor(argument) for argument in target._schema.arguments):
        ranged = ("index",)  # gather, scatter, index_select, index_add, take, put, …
    found = [
        (one, Reach.COMPUTED if given in asserted else Reach.UNCHANGED)
        for given, one in operands
        if given in asserted or (given in ranged and not (given == "indices" and _is_mask(one)))
    ]
    data = operands[0][1] if operands else None
    if found and data is not None and data is not found[0][0]:
        specs = list(tensor_specs(data.meta.get("spec")))
        if not any(math.prod(spec.shape) for spec in specs):  # where no index is in range, or none may be
            found = [(one, Reach.COMPUTED) for one in (*(one for one, _ in found), *(() if specs else (data,)))]
    return found


def _is_known(node: fx.Node) -> bool:
    """Whether a node's operation is one of torch's, or one of ours that runs no code of others."""
    target: Any = node.target
    namespace: str = target.namespace if is_operation(node) else ""
    return namespace in ("aten", "prims") or (namespace == "pygraph" and _name(node) in _OURS)


def _may_index(node: fx.Node, operand: fx.Node) -> bool:
    """Whether a Triton kernel may compute addresses from the values of an operand of its launch."""
    launch = launch_of(str(node.args[0]))
    launched = launch.kernel
    is_inductors, source = _is_generated(launched), None
    while launched is not None and source is None:
        source, launched = getattr(launched, "src", None), getattr(launched, "fn", None)
    if source is None:
        return _is_integral(operand)
    if is_inductors and "device_assert" not in source:  # which Inductor puts before every such address
        return False
    names = parameters_in_addresses(source) if is_inductors else None
    if names is None:
        return _is_integral(operand) or ".to(tl.int" in source
    given: dict[str, Any] = {"written": node.args[1], "read": node.args[2]}
    return any(given[kind][position] is operand for name, kind, position in launch.tensors() if name in names)


def _is_generated(kernel: Any) -> bool:
    """Whether Inductor has written a kernel; those of users have its autotuner, too."""
    # Private; checked with torch 2.11 and 2.13.
    heuristic = getattr(getattr(kernel, "heuristic_type", None), "name", None)
    return hasattr(kernel, "inductor_meta") and heuristic != "USER_AUTOTUNE"


def _sources(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """The operands that a node's value is made of, and whether its elements are theirs, unchanged."""
    operands = _operands(node)
    if is_selection(node):
        source = operands[0][1]
        return [] if _name(source) in _VALUES_AND_POSITIONS and node.args[1] != 0 else [(source, True)]
    if node.target is torch.ops.pygraph.scalar.default or is_view(node):
        return [(one, True) for _, one in operands]
    name = _name(node)
    if name in _POSITIONS or node.target is DROPOUT_MASK:  # a mask only comes after the one before
        return []
    unchanged = ("self",) if name == "clamp" and _clamps_around_zero(node) else _UNCHANGED.get(name, ())
    return [(one, given in unchanged) for given, one in operands]


def _clamps_around_zero(node: fx.Node) -> bool:
    low, high = [*node.args[1:], None, None][:2]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    return (not isinstance(low, fx.Node) and (low is None or low <= 0)) and (  # pyright: ignore
        not isinstance(high, fx.Node) and (high is None or high >= 0)  # pyright: ignore
    )


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument.type, torch.TensorType)


def _is_integral(node: fx.Node) -> bool:
    """Whether a node's values are integers; of several results, any."""
    if is_host_number(node):
        return node.meta["spec"] is int
    specs: list[TensorSpec] = list(tensor_specs(node.meta.get("spec")))
    return not specs or any(not (spec.dtype.is_floating_point or spec.dtype.is_complex) for spec in specs)


def _is_mask(node: fx.Node) -> bool:
    return any(spec.dtype in (torch.bool, torch.uint8) for spec in tensor_specs(node.meta.get("spec")))
