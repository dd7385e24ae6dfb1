"""Traits of operations on which the emulated device's dispatch depends."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import torch

aten: Final = torch.ops.aten

Op = torch._ops.OpOverload


@dataclasses.dataclass(frozen=True)
class Traits:
    """Traits of one operation, from its schema and tags.

    Attributes:
        view: Whether it returns views of its arguments, or changes their geometry, and touches no data.
        returns: Per result the position or name of the argument that is returned, None for a new tensor.
        operands: Positions of the arguments that are tensors.
        out: Names of the ``out=`` arguments.
        synchronizes: The host needs data of the device for it.
        takes_host_scalars: CUDA accepts 0-d CPU tensors among its operands.
    """

    view: bool
    returns: tuple[int | str | None, ...]
    operands: frozenset[int]
    out: tuple[str, ...]
    synchronizes: bool
    takes_host_scalars: bool


INDEXING: Final = frozenset({"index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"})
_ANSWERS: Final = frozenset({"_nested_tensor_from_mask_left_aligned", "_nested_tensor_from_mask"})  # have no tag
_HOST_SCALARS: Final = INDEXING | {"fill", "masked_fill", "copy", "where", "lerp", "clamp"}


def base_name(op: Op) -> str:
    """The operation's name without namespace, overload and the underscore of in-place variants."""
    return op._opname.removesuffix("_")


@functools.cache
def traits_of(op: Op) -> Traits:
    """Read an operation's traits off its schema and tags."""
    schema = op._schema
    places = {argument.name: argument.name if argument.kwarg_only else i for i, argument in enumerate(schema.arguments)}
    writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    returns: list[int | str | None] = []
    view = torch.Tag.inplace_view in op.tags
    for result in schema.returns:
        info = result.alias_info
        returns.append(None)
        if info is None:
            continue
        view |= not info.is_write
        for argument in writes:
            if argument.alias_info and argument.alias_info.before_set & info.before_set:
                returns[-1] = places[argument.name]
    base = base_name(op)
    family = [op]
    packet = getattr(getattr(torch.ops, op.namespace), base, None)
    if packet is not None:
        family += [getattr(packet, overload) for overload in packet.overloads()]
    return Traits(
        view=view,
        returns=tuple(returns),
        operands=frozenset(i for i, arg in enumerate(schema.arguments) if isinstance(arg.type, torch.TensorType)),
        out=tuple(argument.name for argument in writes if argument.kwarg_only),
        synchronizes=base in _ANSWERS
        or (
            bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags))
            and base not in INDEXING
        ),
        takes_host_scalars=base in _HOST_SCALARS
        or base.startswith("_foreach_")
        or any(torch.Tag.pointwise in member.tags for member in family),
    )
