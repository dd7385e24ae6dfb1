"""torch's global settings that decide which operations or kernels run; they are part of every call's key."""

# Settings that choose kernels have public properties ten times as slow as the private getters, see `_SETTINGS`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable
from typing import Any

import torch


def mode_key(device_type: str) -> tuple[Hashable, ...]:
    """Global settings that decide which operations or kernels run."""
    on_cuda = torch.cuda.is_initialized()
    if on_cuda:
        _settle_attention()
    accelerated = torch.is_autocast_enabled(device_type)
    cpu = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        accelerated and torch.get_autocast_dtype(device_type),
        cpu and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        *(getter() for getter in _SETTINGS),
        looks_at_gradients(),
        _default_device(),
        # Where "cuda" without a number is. Checked with torch 2.11 and 2.13.
        torch._C._cuda_getDevice() if on_cuda else 0,
    )


def looks_at_gradients() -> bool:
    """Whether autograd looks for what is not a number in all that it computes, and raises an error where it is."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


@functools.cache
def _settle_attention() -> None:
    """Have torch choose the order of its attention kernels, a setting that the first attention of a process changes."""
    query = torch.empty(0, 1, 1, 8, dtype=torch.float16, device="cuda")
    with contextlib.suppress(RuntimeError):  # all kernels may be switched off
        torch.ops.aten._fused_sdp_choice(query, query, query)  # checked with torch 2.11 and 2.13


def _default_device() -> Any:
    """The device set by ``torch.set_default_device`` or a ``with`` block; None if there is none."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # checked with torch 2.11 and 2.13
    if context is not None or torch._C._len_torch_function_stack():
        return str(torch.get_default_device())
    return None


# Settings that choose among kernels; their getters in torch._C cost a tenth of the public properties.
# Checked with torch 2.11 and 2.13; tests/unit/guards/test_torch_settings.py compares each with its public property.
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
    torch._C._get_cublas_allow_fp16_accumulation,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    torch._C._get_overrideable_sdp_enabled,
    torch._C._get_fa3_sdp_enabled,
    lambda: tuple(torch._C._get_sdp_priority_order()),
    torch._C._get_linalg_preferred_backend,
    torch._C._get_blas_preferred_backend,
    torch._C._get_deterministic_fill_uninitialized_memory,
)
