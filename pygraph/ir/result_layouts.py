"""Results in the strides that kernels of a Program were compiled for.

A kernel of Inductor's, and one of the user's that was told strides while the function was traced, knows by heart how
its tensors lie in memory. PyTorch describes most operations without running them, and may be wrong about the device.
Where a kernel reads a result, what the device has made is compared with the description, and copied if it lies
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import fx

from pygraph.errors import CaptureError
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import is_selection, root

Layout: TypeAlias = TensorSpec | tuple["Layout | None", ...]
"""The expected shape and strides of a node's value, or of its several values."""


def expected_layouts(nodes: Iterable[fx.Node]) -> dict[fx.Node, Layout]:
    """The operations whose results kernels read, or other results in the same memory, and what they are expected to be.

    Args:
        nodes: The nodes of a whole Program. Those of pygraph make what they say, and have no entry.
    """
    found: dict[fx.Node, Layout] = {}
    for reader in nodes:
        if not _is_kernel(reader.target):
            continue
        for argument in reader.all_input_nodes:
            read = root(argument)
            if read.op == "call_function" and "spec" in read.meta and not _is_exact(read.target):
                _add(found, read, read.meta["spec"])
    return found


def _add(found: dict[fx.Node, Layout], node: fx.Node, layout: Layout) -> None:
    """Expect a layout of a node; of one that picks a value, of that value of the operation."""
    while is_selection(node):
        source: Any = node.args[0]
        index: Any = node.args[1]
        others: Any = found.get(source) or (None,) * len(source.meta["spec"])
        layout, node = (*others[:index], layout, *others[index + 1 :]), source
    found[node] = layout


def _is_kernel(target: Any) -> bool:
    """Whether an operation knows the strides of what it takes; by name, as these operations are defined later."""
    return getattr(target, "namespace", "").startswith("pygraph") and str(target) in _KERNELS


_KERNELS = ("pygraph.launch.default", "pygraph.reinterpret.default", "pygraph_functional.pygraph_launch.default")


def _is_exact(target: Any) -> bool:
    """Whether an operation is told the strides of its result."""
    return target is torch.ops.aten.empty_strided.default or getattr(target, "namespace", "") == "pygraph"


def in_layout(value: Any, layout: Layout | None) -> Any:
    """A result as it is expected to lie in memory: itself, or a copy if the device has laid it out otherwise.

    Raises:
        CaptureError: It has another shape.

    >>> columns = torch.ones(2, 3).t().contiguous().t()
    >>> in_layout(columns, TensorSpec.of(torch.ones(2, 3))).stride()
    (3, 1)
    """
    if isinstance(layout, tuple):
        return tuple(in_layout(one, expected) for one, expected in zip(value, layout, strict=True))
    if layout is None or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    if tuple(value.shape) != layout.shape:
        raise CaptureError(
            f"a kernel reads a result of shape {tuple(value.shape)}, which PyTorch describes as {layout.shape}. "
            "Correct the description, by `register_fake` of the operation."
        )
    strides = zip(layout.shape, value.stride(), layout.stride, strict=True)
    if value.numel() == 0 or all(size < 2 or mine == wanted for size, mine, wanted in strides):
        return value
    laid_out = torch.empty_strided(layout.shape, layout.stride, dtype=value.dtype, device=value.device)
    return laid_out.copy_(value)
