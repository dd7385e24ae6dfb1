"""torch's global settings, in one table: which are part of every call's key, and which a trace restores.

Settings that choose kernels or change results belong to the key; `pygraph/native/torch_settings.h` reads those again
for calls in C++. Settings that few functions read, and that have names in code, are in `settings`.
"""

# Some settings have private getters and setters only, and the public ones of others are ten times as slow.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.backends import cuda


@dataclasses.dataclass(frozen=True)
class TorchSetting:
    """A global setting of torch.

    Attributes:
        title: Its name in reports.
        read: Returns its value.
        write: Sets it to such a value; None where no trace changes it.
        of_thread: Whether each thread has its own.
        in_key: Whether it is part of every call's key; then the value is hashable.
    """

    title: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    of_thread: bool = False
    in_key: bool = False


def looks_at_gradients() -> bool:
    """Whether autograd looks for what is not a number in all that it computes, and raises an error where it is."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def autocast(kind: str) -> TorchSetting:
    """The setting of a device type's autocast: whether it is on, and its dtype."""

    def write(values: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(kind, values[0])
        torch.set_autocast_dtype(kind, values[1])

    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    return TorchSetting("autocast", read, write, of_thread=True)


def _default_device() -> torch.device | None:
    """The device set by ``torch.set_default_device``; None if there is none."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # checked with torch 2.11 and 2.13
    return None if context is None else context.device


def _device_of_new_tensors() -> str | None:
    """The device set by ``torch.set_default_device`` or a ``with`` block; None if there is none."""
    if _default_device() is not None or torch._C._len_torch_function_stack():
        return str(torch.get_default_device())
    return None


def _use_deterministic_algorithms(values: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(values[0], warn_only=values[1])


def _of_matmul(name: str) -> TorchSetting:
    read = getattr(torch._C, f"_get_cublas_{name}")
    return TorchSetting(f"{name} of matrix products", read, functools.partial(setattr, cuda.matmul, name), in_key=True)


def _precision(backend: str, operation: str) -> TorchSetting:
    read = functools.partial(torch._C._get_fp32_precision_getter, backend, operation)
    write = functools.partial(torch._C._set_fp32_precision_setter, backend, operation)
    return TorchSetting("a float32 precision", read, write, in_key=backend == "cuda" and operation != "all")


def _matmul_precision() -> str | None:
    """The precision that the older of torch's two switches is set to; None where only the newer one has been used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it does not say then
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


# Private names were checked with torch 2.11 and 2.13; tests/unit/calls/test_keys.py compares them with public ones.
SETTINGS: tuple[TorchSetting, ...] = (
    TorchSetting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, of_thread=True, in_key=True),
    TorchSetting("inference mode", torch.is_inference_mode_enabled, None, of_thread=True, in_key=True),
    TorchSetting(
        "forward-mode differentiation", torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled, of_thread=True
    ),
    TorchSetting(
        "threads of a backward", torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled,
        of_thread=True,
    ),
    TorchSetting(
        "how autograd makes views", torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled, of_thread=True
    ),
    TorchSetting("the search for what is not a number", looks_at_gradients, None, in_key=True),
    TorchSetting("the default dtype", torch.get_default_dtype, torch.set_default_dtype, in_key=True),
    TorchSetting("the default device", _default_device, torch.set_default_device, of_thread=True),
    TorchSetting("the device of new tensors", _device_of_new_tensors, None, of_thread=True, in_key=True),
    TorchSetting(
        "the use of deterministic algorithms",
        lambda: (torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()),
        _use_deterministic_algorithms, in_key=True,
    ),
    # The properties of torch.backends.cudnn may be locked.
    TorchSetting("the use of cuDNN", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, in_key=True),
    TorchSetting(
        "cuDNN's choice by measurement", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark, in_key=True
    ),
    TorchSetting(
        "cuDNN's determinism", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic, in_key=True
    ),
    TorchSetting("flash attention", torch._C._get_flash_sdp_enabled, cuda.enable_flash_sdp, in_key=True),
    TorchSetting(
        "memory-efficient attention", torch._C._get_mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp,
        in_key=True,
    ),
    TorchSetting("attention by formula", torch._C._get_math_sdp_enabled, cuda.enable_math_sdp, in_key=True),
    TorchSetting("cuDNN's attention", torch._C._get_cudnn_sdp_enabled, cuda.enable_cudnn_sdp, in_key=True),
    TorchSetting(
        "another device's attention", torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable,
        in_key=True,
    ),
    TorchSetting("flash attention 3", torch._C._get_fa3_sdp_enabled, torch._C._set_sdp_use_fa3, in_key=True),
    TorchSetting(
        "reduction in attention by formula", torch._C._get_math_sdp_allow_fp16_bf16_reduction,
        cuda.allow_fp16_bf16_reduction_math_sdp, in_key=True,
    ),
    TorchSetting(
        "the library for linear algebra", torch._C._get_linalg_preferred_backend,
        torch._C._set_linalg_preferred_backend, in_key=True,
    ),
    TorchSetting(
        "the library for matrix products", torch._C._get_blas_preferred_backend, torch._C._set_blas_preferred_backend,
        in_key=True,
    ),
    TorchSetting(
        "what is in uninitialised memory", torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory, in_key=True,
    ),
    TorchSetting(
        "the order of attentions", lambda: tuple(torch._C._get_sdp_priority_order()),
        lambda order: torch._C._set_sdp_priority_order(list(order)), in_key=True,
    ),
    _of_matmul("allow_fp16_reduced_precision_reduction"),
    _of_matmul("allow_bf16_reduced_precision_reduction"),
    _of_matmul("allow_fp16_accumulation"),
    TorchSetting("the precision of matrix products", _matmul_precision, _set_matmul_precision),
    # The older switch changes those of the newer one, and those of all change those of each: they come later.
    _precision("generic", "all"),
    *(_precision(backend, of) for backend in ("cuda", "mkldnn") for of in ("all", "matmul", "conv", "rnn")),
)  # fmt: skip

_IN_KEY = tuple(setting for setting in SETTINGS if setting.in_key)
_READ_FOR_KEY = tuple(setting.read for setting in _IN_KEY)
KEY_TITLES = ("autocast", "autocast of the CPU", *(setting.title for setting in _IN_KEY), "the current device")
"""The names of the settings in `mode_key`."""


def mode_key(device_type: str) -> tuple[Hashable, ...]:
    """The settings that decide which operations or kernels run, with the autocast of a device type and of the CPU."""
    on_cuda = torch.cuda.is_initialized()
    if on_cuda:
        _settle_attention()
    accelerated = torch.is_autocast_enabled(device_type)
    cpu = torch.is_autocast_enabled("cpu")
    return (
        accelerated and torch.get_autocast_dtype(device_type),
        cpu and torch.get_autocast_dtype("cpu"),
        *(read() for read in _READ_FOR_KEY),
        # Where "cuda" without a number is. Checked with torch 2.11 and 2.13.
        torch._C._cuda_getDevice() if on_cuda else 0,
    )


@functools.cache
def _settle_attention() -> None:
    """Have torch choose the order of its attention kernels, a setting that the first attention of a process changes."""
    query = torch.empty(0, 1, 1, 8, dtype=torch.float16, device="cuda")
    with contextlib.suppress(RuntimeError):  # all kernels may be switched off
        torch.ops.aten._fused_sdp_choice(query, query, query)  # checked with torch 2.11 and 2.13
