"""Nodes of the emulated device's graphs: the parameter bytes of a launch, and a function of these for replays."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from pygraph.runtime.emulated import tensors as memory
from pygraph.runtime.emulated.launches import Launch
from pygraph.runtime.emulated.parameters import Leaf, Operand, Packer, operand_at
from pygraph.runtime.emulated.wiring import NodeFunction
from pygraph.runtime.recorded_graph import RecordedNode

HIDES_POINTERS: Final = frozenset({"aten::cumprod.out", "aten::_logcumsumexp", "aten::linalg_qr.out"})
"""Operations whose nodes hold one pointer, to a table in device memory in which the pointers to their operands are.

They behave as kernels whose pointers cannot be found among the arguments (multi-tensor kernels with long lists,
libraries with workspaces): a replay with other inputs must notice that these are not read.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class KernelNode:
    """A node that runs a kernel; ``table`` is where its pointers are, if they are hidden."""

    kernel: Callable[..., Any]
    leaves: tuple[Leaf, ...]
    spec: pytree.TreeSpec
    outputs: tuple[Operand | None, ...]
    table: torch.Tensor | None
    table_bytes: bytes

    def run(self, params: bytes) -> None:
        """Run the kernel on the tensors whose addresses are in the bytes."""
        pointers = params
        if self.table is not None:
            (address,) = struct.unpack_from("<Q", params, 16)
            memory.allocator.check_range(address, len(self.table_bytes))
            pointers = ctypes.string_at(address, len(self.table_bytes))
        args, kwargs = pytree.tree_unflatten([leaf.read(params, pointers) for leaf in self.leaves], self.spec)
        targets = [output and output.read(params, pointers) for output in self.outputs]
        results = pytree.tree_leaves(self.kernel(*args, **kwargs))
        for target, result in zip(targets, results, strict=False):
            if target is not None:
                target.copy_(result)


@dataclasses.dataclass(frozen=True, eq=False)
class MemcpyNode:
    """A node that copies bytes."""

    source: Operand
    target: Operand

    def run(self, params: bytes) -> None:
        """Copy between the addresses in the bytes."""
        source, target = self.source.read(params, params), self.target.read(params, params)
        target.copy_(source)


@dataclasses.dataclass(frozen=True, eq=False)
class MemsetNode:
    """A node that sets every byte to one value."""

    target: Operand

    def run(self, params: bytes) -> None:
        """Fill memory at the address in the bytes."""
        target = self.target.read(params, params)
        # A dimension of size one may have any stride, which a view as bytes does not allow.
        target.as_strided((target.numel(),), (1,)).view(torch.uint8).fill_(params[8])


def node_of(launch: Launch, op: int) -> tuple[RecordedNode, NodeFunction]:
    """The node for a launch: its parameter bytes, and how a replay reads them."""
    tensors = [leaf for leaf in launch.leaves if memory.is_emulated(leaf)]
    plain = all(t.is_contiguous() and t.numel() and not t.is_conj() and not t.is_neg() for t in tensors)
    if (
        launch.name == "aten::copy_"
        and plain
        and tensors[0].dtype == tensors[1].dtype
        and tensors[0].shape == tensors[1].shape
    ):
        target, source = tensors
        params = struct.pack("<QQ", source.data_ptr(), target.data_ptr())
        return RecordedNode("memcpy", "memcpy", op, params), MemcpyNode(operand_at(0, source), operand_at(8, target))
    if launch.name == "aten::zero_" and plain:
        params = struct.pack("<QQ", tensors[0].data_ptr(), 0)
        return RecordedNode("memset", "memset", op, params), MemsetNode(operand_at(0, tensors[0]))
    packer = Packer(launch.name, hidden=launch.name in HIDES_POINTERS)
    fill = tensors[0].dtype if launch.name == "aten::fill_.Scalar" else None
    leaves = tuple(packer.leaf(leaf, fill) for leaf in launch.leaves)
    outputs = tuple(output if output is None else packer.tensor(output) for output in launch.outputs)
    table = packer.finish()
    function = KernelNode(
        launch.kernel, leaves, launch.spec, outputs, table, bytes(packer.pointers) if table is not None else b""
    )
    return RecordedNode("kernel", launch.name, op, bytes(packer.params)), function
