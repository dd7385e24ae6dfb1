"""Effects of a node besides computing its value: viewing, writing, drawing random numbers, reading the host.

They are read off the schema of the node's operation, so that custom operations with honest schemas are treated right.
"""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import pygraph.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers pygraph::load and pygraph::store
from pygraph.ir.decisions import NO_QUESTION, decisions_among, is_question
from pygraph.ir.descriptors import TensorSpec, tensor_specs
from pygraph.ir.packed_sequences import is_on_packed

aten = torch.ops.aten

MASKS = (torch.bool, torch.uint8)
"""Dtypes of tensors that are masks where they are an index."""

# Operations that return their argument's memory although their schemas do not say so.
_SILENT_VIEWS = (aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default)

# Operations that synchronise with the host, or have a result whose shape depends on data, without a tag that says so.
_SYNCHRONIZING = frozenset(
    {
        "aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero",
        "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
        "aten::bincount", "aten::repeat_interleave", "aten::_assert_async", "aten::multinomial",
        "pygraph::ctc_loss", "pygraph::ctc_loss_backward",
    }
)  # fmt: skip


# Namespaces in which operations that return nothing are checks, launches, or labels.
KNOWN_NAMESPACES = ("aten", "prims", "pygraph", "profiler")


def is_operation(node: fx.Node) -> bool:
    """Whether the node calls an operation with a schema."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def is_view(node: fx.Node) -> bool:
    """Whether the node's value is memory of its first argument, and no work is done."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and _makes_views(target)  # pyright: ignore[reportUnknownArgumentType]


@functools.cache
def _makes_views(target: Any) -> bool:
    """Whether all results of an operation are memory of its arguments; cached, as passes ask it again and again."""
    if target in _SILENT_VIEWS:
        return True
    returns: Any = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_selection(node: fx.Node) -> bool:
    """Whether the node picks one of the several results of another, which is not a view."""
    return node.op == "call_function" and node.target is operator.getitem and not is_view(node)


def is_first_gradient(node: fx.Node) -> bool:
    """Whether the node makes the gradient that a backward begins with, ones like a loss."""
    return bool(node.meta.get("first_gradient"))


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random generator, or a part of it does if it is control flow."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return any(is_random(one) for part in _parts(node) for one in part.graph.nodes)
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":  # attention draws only to drop
            value: Any = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(value != 0.0)
    return True


def _parts(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs of a node of control flow, which are attributes of the module that it is in."""
    module = node.graph.owning_module
    found = [getattr(module, str(one.target), None) for one in node.all_input_nodes if one.op == "get_attr"]
    return [one for one in found if isinstance(one, fx.GraphModule)]


def may_draw(node: fx.Node) -> bool:
    """Whether a node may draw from a random generator: an operation of others, or a part of control flow, may."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return is_random(node) or target.namespace not in KNOWN_NAMESPACES
    return isinstance(target, torch._ops.HigherOrderOperator)


def has_effect(node: fx.Node) -> bool:
    """Whether a node stays although nobody uses it: it writes, draws random numbers, or returns nothing at all."""
    return node.is_impure() or is_random(node) or is_action(node)


def is_action(node: fx.Node) -> bool:
    """Whether a node returns nothing and declares no update, as an assertion: it is called for another effect."""
    return is_operation(node) and not node.target._schema.returns and not is_written(node)  # pyright: ignore


def may_raise(node: fx.Node) -> bool:
    """Whether a node that the host launches may end the call with an error that depends on data.

    Such are assertions, decompositions of matrices, custom operations, and operations that check whether a number of
    the host is in range.
    """
    if not is_operation(node) or is_host_number(node):
        return False
    target: Any = node.target
    if is_action(node) or target.namespace not in KNOWN_NAMESPACES:
        return True
    name: str = target._schema.name.partition("::")[2]
    if name.startswith(_RAISING):
        return True
    if torch.Tag.pointwise in target.tags or name.startswith(_TAKING_ANY):
        return False
    return any(is_host_number(source) for argument in node.all_input_nodes for source in sources(argument))


def fails(operation: Any, kwargs: Mapping[str, Any], *, on_host: bool) -> bool:
    """Whether an operation of aten looks at values on the host, and raises an error by them.

    Others fail on the device, after which a process can use that no more.

    Args:
        operation: The operation.
        kwargs: Its keyword arguments.
        on_host: Whether it is of tensors on the host.
    """
    name = operation.overloadpacket.__name__
    return name in _FAILING or (on_host and name in _FAILING_ON_HOST) or bool(kwargs.get("check_errors"))


def asked_failures(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The operations among nodes that fail by their data, where that is asked behind them."""
    is_asked = any(one.args[2] == NO_QUESTION for one in decisions_among(nodes))
    return list(filter(fails_by_data, nodes)) if is_asked else []


def fails_by_data(node: fx.Node) -> bool:
    """Whether the operation of a node is one of those that `fails` knows."""
    if not is_operation(node):
        return False
    specs = [spec for source in node.all_input_nodes for spec in tensor_specs(source.meta.get("spec"))]
    return fails(node.target, node.kwargs, on_host=bool(specs) and specs[0].device.type == "cpu")


_FAILING = frozenset({
    "_linalg_check_errors", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_eigvals", "_linalg_svd",
    "linalg_lstsq", "linalg_cholesky", "linalg_inv", "linalg_solve", "cholesky", "inverse", "bincount",
})  # fmt: skip
_FAILING_ON_HOST = frozenset({
    "multinomial", "repeat_interleave", "index", "index_select", "gather", "embedding", "take", "take_along_dim",
    "index_put",
})  # fmt: skip

# Prefixes of names of operations that take any number.
_TAKING_ANY = ("_foreach_", "_fused_", "fill", "full", "copy", "_to_copy", "scalar_tensor")

# Prefixes of names of operations that check what they have computed.
_RAISING = ("_linalg_", "linalg_", "cholesky", "_cholesky", "lu_", "geqrf", "ormqr", "multinomial")


def is_written(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    return is_operation(node) and node.target._schema.is_mutable  # pyright: ignore


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node writes to."""
    if not is_written(node):
        return []
    found: list[fx.Node] = []
    target: Any = node.target
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value: Any = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            items: Any = [value] if isinstance(value, fx.Node) else value or ()
            found += [item for item in items if isinstance(item, fx.Node)]  # others may be None
    return found


def writes_memory(nodes: Iterable[fx.Node]) -> bool:
    """Whether any of the nodes updates memory that is not its own; storing a result through a slot does not count."""
    return any(is_written(node) and node.target is not torch.ops.pygraph.store.default for node in nodes)


def root(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of views shows."""
    while is_view(node):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


def argument_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node takes, as often as it takes them."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda argument: found.append(argument) or argument)  # pyright: ignore
    return found


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes that determine a value: the one whose memory it is a view of, and the numbers that the views take."""
    numbers: list[fx.Node] = []
    while is_view(node):
        shown = node.args[0]
        assert isinstance(shown, fx.Node)
        numbers += [argument for argument in node.all_input_nodes if argument is not shown]
        node = shown
    return [node, *numbers]


BACKWARDS_OF_BATCH_NORM = (
    aten.native_batch_norm_backward, aten.batch_norm_backward, aten.cudnn_batch_norm_backward
)  # fmt: skip
"""All take running statistics in places 3 and 4, and the first two take in place 7 whether they are of training."""


def unread_statistics(node: fx.Node) -> tuple[int, ...]:
    """Where the backward of batch norm takes running statistics that it does not read: in training, those of the batch.

    Nothing for other operations.
    """
    operation = getattr(node.target, "overloadpacket", None)
    if operation not in BACKWARDS_OF_BATCH_NORM:
        return ()
    # cuDNN's is of training only (torch 2.11 and 2.13), and keeps the places for a second derivative.
    training = operation is aten.cudnn_batch_norm_backward or node.args[7] is True
    return (3, 4) if training else ()


def is_host_number(node: fx.Node) -> bool:
    """Whether the node's value is a Python number."""
    return isinstance(node.meta.get("spec"), type)


def device_of(node: fx.Node) -> torch.device | None:
    """The device of the node's tensors; None if it has none."""
    for spec in tensor_specs(node.meta.get("spec")):
        return spec.device
    return None


ON_CPU = "its tensors are on the cpu; graphs need a device"
"""The reason for which nothing is recorded where no tensor is on a device."""


def host_reason(node: fx.Node) -> str | None:
    """The reason for which a node cannot be recorded in a graph; None if it can."""
    if not is_operation(node):
        return None if is_selection(node) else "it is control flow or host code"
    return _reason_of_operation(node) or _reason_of_arguments(node) or _reason_of_result(node)


def _reason_of_operation(node: fx.Node) -> str | None:
    """The reason that lies in the operation: it synchronises, or has effects or a result of unknown shape."""
    target: Any = node.target
    name: str = target._schema.name
    if name == "aten::_local_scalar_dense":
        is_returned = bool(node.users) and all(user.op == "output" for user in node.users)
        return "it needs a value on the host, to return it" if is_returned else "it needs a value on the host"
    if name in _SYNCHRONIZING:
        return "it synchronises with the host"
    if target is aten._grouped_mm.default and _reads_offsets(node):
        return "it reads its offsets on the host, but for bfloat16 on recent devices"
    if is_on_packed(node):
        return "how many steps packed sequences have is on the host"
    if torch.Tag.cudagraph_unsafe in target.tags:
        return "its author has tagged it as unsafe in CUDA graphs"
    if is_action(node) and target.namespace not in KNOWN_NAMESPACES:
        return "it returns nothing and declares no updates, so what it does is not known"
    depends = torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags
    if depends and not (name in ("aten::index", "aten::index_put") and node.meta.get("spec") is not None):
        return "the shape of its result depends on data"
    if node.meta.get("spec") is None and target._schema.returns:
        return "the shape of its result depends on data"
    return None


def has_sizes_of_data(target: Any, args: Sequence[Any]) -> bool:
    """Whether data decides the sizes of what a call of an operation returns."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in target.tags:
        return False
    if target is not aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in MASKS for index in args[1])


def _reads_offsets(node: fx.Node) -> bool:
    """Whether a grouped product of matrices is one product for each group, of which the host asks the size.

    CUDA has a kernel for all groups for bfloat16, with capability 9 or 10 (``GroupedBlas.cpp``).
    """
    if node.kwargs.get("offs", node.args[2] if len(node.args) > 2 else None) is None:
        return False
    (spec,) = tensor_specs(node.meta.get("spec"))
    if spec.dtype != torch.bfloat16 or spec.device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(spec.device)[0] not in (9, 10)


def _unknown_view(argument: fx.Node) -> fx.Node | None:
    """The argument, or a view that it is taken of, if only a run knows how that lies; None if all is known.

    A view of a known size may be taken of one of an unknown size: ``x[:n].expand(4)``.
    """
    while True:
        if argument.meta.get("spec") is None and not is_selection(argument):
            return argument
        if not is_view(argument):
            return None
        source = argument.args[0]
        assert isinstance(source, fx.Node)
        argument = source


def _reason_of_arguments(node: fx.Node) -> str | None:
    """The reason that lies in an argument: a replay would not read it, or the host has to look at it."""
    target: Any = node.target
    name: str = target._schema.name
    for argument in node.all_input_nodes:
        spec = argument.meta.get("spec")
        unknown = _unknown_view(argument)
        if unknown is not None:
            is_item = unknown.target is aten.select.int
            return "where an argument lies depends on data" if is_item else "the shape of an argument depends on data"
        if isinstance(spec, type) and name != "pygraph::scalar":
            return f"it takes the host value {argument.name} by value"
        if isinstance(spec, TensorSpec) and spec.device.type == "cpu":
            return "it reads a tensor on the cpu"
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"):
        for index in node.args[1]:  # pyright: ignore
            spec = index.meta.get("spec") if isinstance(index, fx.Node) else None
            if isinstance(spec, TensorSpec) and spec.dtype in MASKS:
                return "a boolean mask as index synchronises with the host"
    return None


def _reason_of_result(node: fx.Node) -> str | None:
    """The reason that lies in the result: a part of it is on the host."""
    for spec in tensor_specs(node.meta.get("spec")):
        if spec.device.type == "cpu":
            return "its result is on the cpu"
    return None


def is_load(node: fx.Node) -> bool:
    """Whether the node reads an argument through the pointer table."""
    return node.target is torch.ops.pygraph.load.default


def is_store(node: fx.Node) -> bool:
    """Whether the node writes a result through the pointer table."""
    return node.target is torch.ops.pygraph.store.default


def is_work(node: fx.Node) -> bool:
    """Whether the node is work of its own, on the device or on the host."""
    return node.op == "call_function" and not is_view(node) and not is_load(node) and not is_store(node)


def touches_device(node: fx.Node) -> bool:
    """Whether the node reads or makes tensors on an accelerator."""
    if is_selection(node) or is_question(node):
        return False
    devices = [device_of(argument) for argument in node.all_input_nodes] + [device_of(node)]
    unknown = node.meta.get("spec") is None and not is_store(node) and not _is_of_the_host(node)
    return unknown or any(device is not None and device.type not in ("cpu", "meta") for device in devices)


def _is_of_the_host(node: fx.Node) -> bool:
    """Whether a node without results launches nothing: it sets a random generator back, or checks a decision."""
    return is_operation(node) and node.target._schema.name in _OF_THE_HOST  # pyright: ignore


_OF_THE_HOST = ("pygraph::set_random_state", "pygraph::ask")


def count_kernels(nodes: Iterable[fx.Node]) -> int:
    """The number of nodes that are work on the device."""
    return sum(is_work(node) and touches_device(node) for node in nodes)
