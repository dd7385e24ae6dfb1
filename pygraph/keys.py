"""The cache key of a call: everything that its trace and its kernels depend on, besides what is read live."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from pygraph.runtime.body import alignment
from pygraph.trace import is_live_number, overlap_groups


class UnhashableError(TypeError):
    """A static argument cannot be part of a key; ``leaf`` is its position."""

    def __init__(self, leaf: int) -> None:
        super().__init__(leaf)
        self.leaf = leaf


def leaf_keys(leaves: Sequence[Any], static: frozenset[int]) -> tuple[Hashable, ...]:
    """Per leaf: a tensor's layout, a live number's type, or a static value itself."""
    grad = torch.is_grad_enabled()
    keys: list[Hashable] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            keys.append(
                (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, alignment(leaf.data_ptr()), type(leaf),
                 grad and leaf.requires_grad)
            )  # fmt: skip
        elif index not in static and is_live_number(leaf):
            keys.append(type(leaf))
        else:
            keys.append(static_key(leaf, index))
    return tuple(keys)


def static_key(leaf: Any, index: int) -> Hashable:
    """A key that is equal for equal values only: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if isinstance(leaf, (float, complex)):
        return (type(leaf), repr(leaf))
    try:
        hash(leaf)
    except TypeError:
        raise UnhashableError(index) from None
    return (type(leaf), leaf)


def overlap_key(leaves: Sequence[Any]) -> Hashable:
    """How the tensors share memory: which leaves are the same object or overlap, and at what distance."""
    groups = overlap_groups(leaves)
    if not groups:
        return ()
    key: list[Hashable] = []
    for group in groups:
        start = min(leaves[index].data_ptr() for index in group)
        key.append(
            tuple(
                (index, leaves[index].data_ptr() - start, next(i for i in group if leaves[i] is leaves[index]))
                for index in group
            )
        )
    return tuple(key)


def mode_key(device_type: str) -> tuple[Hashable, ...]:
    """Global settings that decide which operations or kernels run."""
    autocast = torch.is_autocast_enabled(device_type) if device_type != "cpu" else False
    cpu_autocast = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast and torch.get_autocast_dtype(device_type),
        cpu_autocast and torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        str(torch.get_default_device()),
    )
