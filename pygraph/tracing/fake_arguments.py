"""Arguments as a traced function gets them: fake tensors for tensors, symbols for numbers, all else as it is."""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # checked with torch 2.11 and 2.13
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.ir.descriptors import Argument, Input, ScalarArgument, TensorSpec
from pygraph.ir.leaves import is_live_number, overlap_groups, to_number
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.ir.ranges import holder, span_of
from pygraph.ir.structures import unflatten
from pygraph.tracing.caught_errors import Symbols
from pygraph.tracing.descriptions import describe_own
from pygraph.tracing.leaks import remember
from pygraph.tracing.live_numbers import argument_number
from pygraph.tracing.number_uses import NumberUses


@dataclasses.dataclass
class FakeArguments:
    """The arguments of one traced call.

    Attributes:
        leaves: The caller's values, flattened.
        paths: What errors and reports call each leaf, as ``args[0]['w']``.
        tree: The pytree of ``(args, kwargs)``.
        traced: The values that the function gets, one per leaf.
        inputs: A descriptor for each leaf that is a tensor or a live number.
        values: The fake tensor or symbol of each entry of ``inputs``.
        fakes: The fake tensors, by leaf.
        uses: What the function asks of numbers.
        mode: The mode of the fake tensors.
        shapes: The environment of the symbols.
        static: The leaves that are baked in, as they are marked or the trace needs their values.
    """

    leaves: list[Any]
    paths: list[str]
    tree: pytree.TreeSpec
    traced: list[Any]
    inputs: list[Input]
    values: list[Any]
    fakes: dict[int, FakeTensor]
    uses: NumberUses
    mode: FakeTensorMode
    shapes: Symbols
    static: frozenset[int]

    def unflatten(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments that the function gets, in containers of their own."""
        return unflatten(self.traced, self.tree)

    def given(self) -> list[Any]:
        """The caller's tensors and numbers, one for each entry of ``inputs``."""
        leaves = [self.leaves[one.leaf] for one in self.inputs]  # pyright: ignore[reportAttributeAccessIssue]
        return [leaf if isinstance(leaf, torch.Tensor) else to_number(leaf) for leaf in leaves]


def fake_arguments(
    call: str,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    static: frozenset[int],
    uses: NumberUses,
    substitute: Callable[[Any], Any],
) -> FakeArguments:
    """Make fakes and symbols for the arguments of a call.

    Args:
        call: What errors call the function.
        arguments: Its arguments and keyword arguments.
        static: Leaves that are baked in.
        uses: Gets what the function asks of numbers.
        substitute: Returns what the function gets for a leaf that is neither a tensor nor a live number.

    Raises:
        TraceError: An argument is of a kind that a Program cannot take.
    """
    keyed, tree = flatten_with_path(arguments)
    paths = [argument_path(path) for path, _ in keyed]
    leaves = [leaf for _, leaf in keyed]
    shapes = Symbols(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    # A fake's address is an error, not garbage: on a device, a kernel that is launched with garbage ends the process.
    # Private; checked with torch 2.11 and 2.13.
    mode._allow_unsafe_data_ptr_access = False
    describe_own(mode)
    remember(mode)
    traced = [substitute(leaf) for leaf in leaves]
    made = FakeArguments(leaves, paths, tree, traced, [], [], {}, uses, mode, shapes, static)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if index in static:
                raise TraceError(describe(call, f"{paths[index]} is a tensor marked static", remedy="Unmark it."))
            check_plain(leaf, paths[index], call)
            made.inputs.append(Argument(paths[index], index, relative_spec(leaf)))
        elif index not in static and is_live_number(leaf):
            traced[index] = _symbol(shapes, leaf, paths[index], index, uses)
            made.inputs.append(ScalarArgument(paths[index], index, type(to_number(leaf))))
        elif isinstance(leaf, np.ndarray):
            raise TraceError(
                describe(call, f"{paths[index]} is a NumPy array", expected="a tensor", remedy="Use torch.from_numpy.")
            )
    made.fakes = _fake_tensors(mode, leaves)
    for index, fake in made.fakes.items():
        traced[index] = fake
    made.values = [traced[descriptor.leaf] for descriptor in made.inputs]  # pyright: ignore[reportAttributeAccessIssue]
    return made


def check_plain(leaf: torch.Tensor, path: str, call: str) -> None:
    """Refuse tensors that are more than strided memory: subclasses, sparse and quantized ones, lazy conjugates."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor):
        raise TraceError(describe(call, f"{path} is a {type(leaf).__name__}", expected="a plain tensor"))
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or leaf._is_zerotensor():
        raise TraceError(describe(call, f"{path} is not a plain strided tensor", expected="layout torch.strided"))


def relative_spec(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor with offset 0, wherever in its storage the tensor lies."""
    return dataclasses.replace(TensorSpec.of(tensor), offset=0)


def _symbol(shapes: ShapeEnv, value: Any, path: str, leaf: int, uses: NumberUses) -> Any:
    """A SymInt or SymFloat for a number, which notes what is asked of it."""
    from torch._dynamo.source import ConstantSource  # checked with torch 2.11 and 2.13

    source, number = ConstantSource(path), to_number(value)
    symbol = shapes.create_unspecified_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    if isinstance(number, int):
        integer: Any = shapes.create_symintnode(symbol, hint=number, source=source)
        return argument_number(integer, value, leaf, uses)
    real: Any = shapes.create_symfloatnode(symbol, hint=number, source=source)
    return argument_number(real, value, leaf, uses)


# ---- fake tensors --------------------------------------------------------------------------------------------------

_LARGEST_ELEMENT = 16


def _fake_tensors(mode: FakeTensorMode, leaves: Sequence[Any]) -> dict[int, FakeTensor]:
    """A fake for every tensor leaf; leaves that share memory get fakes that share a storage."""
    fakes: dict[int, Any] = {}
    first_leaf: dict[int, int] = {}  # of each tensor, by its id: a tensor that is passed twice has one fake
    with mode, torch.inference_mode(False), torch.no_grad():
        for group in overlap_groups(leaves):
            _fake_group(leaves, group, fakes, first_leaf)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and index not in fakes:
                if id(leaf) in first_leaf:
                    fakes[index] = fakes[first_leaf[id(leaf)]]
                    continue
                first_leaf[id(leaf)] = index
                fakes[index] = relative_spec(leaf).empty()
    for index, fake in fakes.items():
        if leaves[index].requires_grad and not fake.requires_grad:
            fake.requires_grad_()
        if isinstance(leaves[index], torch.nn.Parameter):
            fake._is_param = True  # by which torch says that it is one
    return fakes


def _fake_group(leaves: Sequence[Any], group: list[int], fakes: dict[int, Any], first_leaf: dict[int, int]) -> None:
    """Make fakes for leaves that share memory, as views of one fake storage that covers all of them."""
    members = [leaves[index] for index in group]
    start, end = span_of(members)
    if len({member.device for member in members}) > 1:
        raise TraceError(describe("trace", "overlapping arguments on different devices"))
    if holder(members, (start, end)) is None:
        raise TraceError(describe("trace", "overlapping arguments in storages of which none holds all of them"))
    size = -(-(end - start) // _LARGEST_ELEMENT) * _LARGEST_ELEMENT  # so that it can be seen as any dtype
    flat = torch.empty(size, dtype=torch.uint8, device=members[0].device)
    for index in group:
        if id(leaves[index]) in first_leaf:
            fakes[index] = fakes[first_leaf[id(leaves[index])]]
            continue
        first_leaf[id(leaves[index])] = index
        spec = relative_spec(leaves[index])
        offset = leaves[index].data_ptr() - start
        if offset % spec.dtype.itemsize:
            raise TraceError(describe("trace", "overlapping arguments of different element sizes"))
        typed = flat.view(spec.dtype)
        fakes[index] = typed.as_strided(spec.shape, spec.stride, offset // spec.dtype.itemsize).detach()
