"""The cache key of a call: everything that its trace and its kernels depend on, besides what is read live."""

# Settings that choose kernels have public properties ten times as slow as the private getters, see `_SETTINGS`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pygraph.runtime.body import ALIGNMENT, alignment
from pygraph.tracing.leaves import is_live_number, overlap_groups

Key: TypeAlias = tuple[Hashable, tuple[tuple[int, Hashable], ...]]
"""What is known of a call before its trace, and by leaf the values of the numbers that its trace turned out to need."""


class UnhashableError(TypeError):
    """A static argument cannot be part of a key; ``leaf`` is its position."""

    def __init__(self, leaf: int) -> None:
        super().__init__(leaf)
        self.leaf = leaf


_LEAVES = (torch.Tensor, int, float, str, type(None))


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Hashable]:
    """The leaves of ``(args, kwargs)`` and a key of their structure; containers cost a walk, plain leaves do not."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not isinstance(leaf, _LEAVES):
            return pytree.tree_flatten((args, kwargs))
    return leaves, (len(args), *kwargs)


def leaf_keys(leaves: Sequence[Any], static: frozenset[int]) -> tuple[Hashable, ...]:
    """Per leaf: a tensor's class and layout, a live number's type, or a static value itself."""
    grad = torch.is_grad_enabled()
    keys: list[Hashable] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            address = 0 if leaf.is_cpu else leaf.data_ptr()  # graphs read host memory through copies only
            aligned = ALIGNMENT if address % ALIGNMENT == 0 else alignment(address)
            required = grad and leaf.requires_grad
            keys.append((leaf.__class__, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, aligned, required))
        elif index not in static and is_live_number(leaf):
            keys.append(leaf.__class__)
        else:
            keys.append(static_key(leaf, index))
    return tuple(keys)


def static_key(leaf: Any, index: int) -> Hashable:
    """A key that is equal for equal values only: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    kind: Hashable = leaf.__class__
    if isinstance(leaf, (float, complex)):
        return (kind, repr(leaf))
    try:
        hash(leaf)
    except TypeError:
        raise UnhashableError(index) from None
    return (kind, leaf)


def overlap_key(leaves: Sequence[Any]) -> Hashable:
    """How the tensors share memory: which leaves are the same object or overlap, and at what distance."""
    storages = [leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(set(storages)) == len(storages) or not (groups := overlap_groups(leaves)):
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
    accelerated = torch.is_autocast_enabled(device_type)
    cpu = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        accelerated and torch.get_autocast_dtype(device_type),
        cpu and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        *(getter() for getter in _SETTINGS),
        _default_device(),
    )


def _default_device() -> Any:
    """The device set by ``torch.set_default_device`` or a ``with`` block; None if there is none."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # checked with torch 2.11 and 2.13
    if context is not None or torch._C._len_torch_function_stack():
        return str(torch.get_default_device())
    return None


# Settings that choose among kernels; their getters in torch._C cost a tenth of the public properties.
# Checked with torch 2.11 and 2.13; tests/unit/test_keys.py compares each with its public property.
_SETTINGS = (
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    functools.partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
    functools.partial(torch._C._get_fp32_precision_getter, "cuda", "conv"),
    functools.partial(torch._C._get_fp32_precision_getter, "cuda", "rnn"),
)
