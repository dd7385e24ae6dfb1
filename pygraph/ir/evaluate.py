"""Reference evaluation of a Program, node by node, with which every transform is compared.

The calling convention of a Program lives here too: `bind` turns a call's leaves into placeholder values and
`assemble` turns output values into what the function returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.errors import ArgumentError, describe
from pygraph.ir.autocasting import without_autocast
from pygraph.ir.descriptors import (
    Alias,
    Argument,
    Base,
    Captured,
    CapturedGenerator,
    Element,
    Input,
    Mutation,
    PointerTable,
    Result,
    ScalarArgument,
    Stored,
    TensorSpec,
)
from pygraph.ir.fields import ProgramFields, check_is_program
from pygraph.ir.gradients import check_gradients
from pygraph.ir.interpreter import Interpreter
from pygraph.ir.leaves import to_number
from pygraph.ir.ranges import Ranges, holder
from pygraph.ir.result_layouts import Layout, expected_layouts, in_layout
from pygraph.ir.structures import structure_differences


def evaluate(program: ProgramFields, *args: Any, **kwargs: Any) -> Any:
    """Run ``program`` on a call's arguments with ordinary launches, updating arguments in place as it says.

    Args:
        program: A Program at any stage; pointer tables are filled with real addresses.
        *args: Positional arguments as the traced function took them; shapes, strides, dtypes and devices must match.
        **kwargs: Keyword arguments likewise.

    Returns:
        What the traced function returns.

    Raises:
        ArgumentError: The arguments do not fit what was traced, or gradients are to be taken through the call, which
            computes values alone; nothing has been changed.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2)
        >>> program = pygraph.trace(lambda x: x.add_(1))(x)
        >>> pygraph.evaluate(program, x) is x, x
        (True, tensor([2., 2.]))
    """
    check_is_program("evaluate({}, …)", program)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    check_call(program, leaves, tree)
    check_gradients(program, leaves)
    return evaluate_leaves(program, leaves)


def evaluate_leaves(program: ProgramFields, leaves: Sequence[Any]) -> Any:
    """Run ``program`` on the leaves of ``(args, kwargs)`` that fit it, for their values alone."""
    with torch.no_grad(), without_autocast():
        inputs, stored = bind(program, leaves)
        layouts = expected_layouts(program.module.graph.nodes)
        is_plain = not stored and not layouts
        outputs = list(program.module(*inputs) if is_plain else _Run(program, stored, layouts).run(*inputs))
        for position, descriptor in enumerate(program.outputs):
            if isinstance(descriptor, Stored):
                outputs[position] = stored[descriptor.slot]
        return assemble(program, leaves, [*inputs, *slot_values(program, leaves)], outputs)


class _Run(Interpreter):
    """Runs a Program on values for its inputs, with a pointer table, and results laid out as its kernels expect.

    Args:
        program: The Program.
        stored: The tensors for its results, by slot. A result with other strides than its fake replaces its entry, as
            `pygraph.store` would write it as another tensor, or past the end.
        layouts: What is expected of results that kernels read.
    """

    def __init__(
        self, program: ProgramFields, stored: dict[int, torch.Tensor], layouts: Mapping[fx.Node, Layout]
    ) -> None:
        super().__init__(program.module)
        self._stored = stored
        self._layouts = layouts

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        result = super().run_node(n)
        return in_layout(result, self._layouts[n]) if n in self._layouts else result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation."""
        if target is torch.ops.pygraph.store.default:
            _, slot, value = args
            if value.stride() != self._stored[slot].stride() and value.numel():
                self._stored[slot] = value
                return None
        return super().call_function(target, args, kwargs)


def check_call(program: ProgramFields, leaves: Sequence[Any], tree: pytree.TreeSpec) -> None:
    """Raise ArgumentError unless the leaves of ``(args, kwargs)`` fit what was traced."""
    call = f"{program.name}(…)"
    if tree != program.in_tree:
        different = structure_differences(tree, program.in_tree)
        raise ArgumentError(
            describe(
                call, f"the arguments have another structure than those that it was traced for: {different}",
                remedy="Trace again; a jitted function does so by itself.",
            )
        )  # fmt: skip
    for descriptor in argument_descriptors(program):
        value = leaves[descriptor.leaf]
        if isinstance(descriptor, ScalarArgument):
            if isinstance(value, torch.Tensor):
                raise ArgumentError(describe(call, f"{descriptor.path} is a tensor", expected="a number"))
            if not any(hasattr(value, way) for way in ("__float__", "__int__", "__index__")):
                raise ArgumentError(describe(call, f"{descriptor.path} is {value!r}", expected="a number"))
            continue
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                describe(call, f"{descriptor.path} is {type(value).__name__}", expected=str(descriptor.spec))
            )
        got = TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
        if not got.reaches_as(descriptor.spec):
            raise ArgumentError(describe(call, f"{descriptor.path} is {got}", expected=str(descriptor.spec)))
    for baked in program.baked:
        if not baked.admits(leaves[baked.leaf]):
            raise ArgumentError(
                describe(
                    call, f"{baked.path} is {leaves[baked.leaf]!r}", expected=f"{baked.value!r}, which was baked in",
                    remedy="Trace again; a jitted function does so by itself.",
                )
            )  # fmt: skip


def argument_descriptors(program: ProgramFields) -> list[Argument | ScalarArgument]:
    """The tensors and numbers that the caller passes, without those that are merged into a Base."""
    found: list[Argument | ScalarArgument] = []
    for descriptor in program.inputs:
        if isinstance(descriptor, (Argument, ScalarArgument)):
            found.append(descriptor)
        elif isinstance(descriptor, PointerTable):
            found += [slot.of for slot in descriptor.slots if isinstance(slot.of, Argument)]
    return found


def bind(program: ProgramFields, leaves: Sequence[Any]) -> tuple[list[Any], dict[int, torch.Tensor]]:
    """Placeholder values for a call, and the tensors allocated for results that go through pointer slots."""
    values: list[Any] = []
    stored: dict[int, torch.Tensor] = {}
    for descriptor in program.inputs:
        if isinstance(descriptor, PointerTable):
            addresses: list[int] = []
            for number, slot in enumerate(descriptor.slots):
                if slot.role == "result":
                    tensor = stored[number] = slot.spec.empty()
                else:
                    assert isinstance(slot.of, (Argument, Base))
                    tensor = input_value(slot.of, leaves)
                addresses.append(tensor.data_ptr())
            values.append(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        else:
            values.append(input_value(descriptor, leaves))
    return values, stored


def slot_values(program: ProgramFields, leaves: Sequence[Any]) -> list[Any]:
    """The tensors behind the slots of a pointer table; None for a result's."""
    slots = program.table.slots if program.table is not None else ()
    return [input_value(slot.of, leaves) if isinstance(slot.of, (Argument, Base)) else None for slot in slots]


def input_value(descriptor: Input, leaves: Sequence[Any]) -> Any:
    """The value of one input: a caller's tensor or number, a base over several, or what is captured."""
    match descriptor:
        case Argument():
            return leaves[descriptor.leaf]
        case ScalarArgument():
            return to_number(leaves[descriptor.leaf])
        case Element():
            return input_value(descriptor.of, leaves).item()
        case Base():
            return _base_value(descriptor, leaves)
        case Captured() | CapturedGenerator():
            return descriptor.value
        case PointerTable():
            raise TypeError("a pointer table is not a value of the caller")


def _base_value(base: Base, leaves: Sequence[Any]) -> torch.Tensor:
    first = leaves[base.start].detach()
    offset = first.storage_offset()
    if (offset + base.spec.span) * first.element_size() > first.untyped_storage().nbytes():
        # Its storage ends before the others' memory does: theirs are other ones, over the same addresses.
        address = first.data_ptr()
        members = [leaves[leaf].detach() for leaf in base.leaves]
        whole = holder(members, (address, address + base.spec.nbytes))
        assert whole is not None, "the cache key says that there is one"
        offset = whole.storage_offset() - (whole.data_ptr() - address) // whole.element_size()
        first = whole
    return first.as_strided(base.spec.shape, base.spec.stride, offset)


def assemble(program: ProgramFields, leaves: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Apply mutations and put results, aliases and static leaves into the output tree.

    Args:
        program: The Program.
        leaves: The leaves of the caller's ``(args, kwargs)``.
        inputs: Placeholder values, followed by the tensors behind the slots of a pointer table.
        outputs: One value per output descriptor.
    """
    owned = Ranges(value for value in inputs if isinstance(value, torch.Tensor))
    values = list(outputs)
    for position, descriptor in enumerate(program.outputs):
        # A functional operation may return its argument; a result must be memory of its own, as in eager.
        value = values[position]
        if not isinstance(descriptor, Result) or not isinstance(value, torch.Tensor):
            continue
        if any(value is taken for taken in inputs) or owned.meet(value):
            values[position] = clone_strided(value)
    for position, descriptor in enumerate(program.outputs):
        if isinstance(descriptor, Mutation):
            inputs[descriptor.input].copy_(values[position])
    out: list[Any] = [None] * program.out_tree.num_leaves
    for descriptor, value in zip(program.outputs, values, strict=True):
        if isinstance(descriptor, Result) and descriptor.leaf >= 0:
            out[descriptor.leaf] = value
        elif isinstance(descriptor, Stored):
            result = program.table.slots[descriptor.slot].of  # pyright: ignore[reportOptionalMemberAccess]
            if isinstance(result, Result) and result.leaf >= 0:
                out[result.leaf] = value
    for static in program.statics:
        out[static.leaf] = static.value
    sources = {"input": inputs, "output": values, "argument": leaves, "result": out}
    for alias in program.aliases:  # those of results come last
        out[alias.leaf] = alias_view(alias, sources[alias.of][alias.index])
    return pytree.tree_unflatten(out, program.out_tree)


def alias_view(alias: Alias, base: torch.Tensor) -> torch.Tensor:
    """The view of ``base`` that an alias describes, or ``base`` itself."""
    if alias.identical or alias.of in ("argument", "result"):
        return base
    assert alias.spec is not None
    view = base.as_strided(alias.spec.shape, alias.spec.stride, base.storage_offset() + alias.spec.offset)
    if base.requires_grad:  # a result that requires grad is not traced, so the function has detached this one
        view = view.detach()
    return as_lazy(view, alias.conjugated, alias.negated)


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor's memory as it is, without lazy conjugation and negation."""
    return as_lazy(tensor, tensor.is_conj(), tensor.is_neg())


def as_lazy(tensor: torch.Tensor, conjugated: bool, negated: bool) -> torch.Tensor:
    """A view of ``tensor`` that is lazily conjugated or negated, or both."""
    tensor = tensor.conj() if conjugated else tensor
    # It has no public name; checked with torch 2.11 and 2.13.
    return torch._neg_view(tensor) if negated else tensor  # pyright: ignore


def clone_strided(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in memory of its own, with the same strides (overlapping ones included)."""
    spec = TensorSpec.of(tensor)
    flat = tensor.as_strided((spec.span,), (1,), spec.offset).clone()
    return flat.as_strided(spec.shape, spec.stride, 0)
