"""torch's global settings: what a function changes is noticed and put back, since a replay would not change it."""

# Some settings have private getters and setters only. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.backends import cuda

from pygraph.keys import mode_key

Setting: TypeAlias = "tuple[str, Callable[[], Any], Callable[[Any], Any]]"


class SettingsWatch:
    """Compares torch's global settings before and after a function.

    Args:
        device_types: The devices whose autocast settings count.

    Attributes:
        changed: The first setting that `watch` found changed and has put back; None if there is none.
    """

    def __init__(self, device_types: Iterable[str]) -> None:
        kinds = filter(torch.amp.is_autocast_available, sorted({"cpu", *device_types}))
        self._settings = [*_SETTINGS, *map(_autocast, kinds)]
        self.changed: str | None = None
        mode_key("cpu")  # what it asks torch for once must not become part of the trace

    @contextmanager
    def watch(self) -> Generator[None, None, None]:
        """Run what is inside; also where it fails, its changes are put back."""
        before, key = [getter() for _, getter, _ in self._settings], mode_key("cpu")
        try:
            yield
        finally:
            if mode_key("cpu") != key:
                self.changed = "a global setting of torch"
            for (name, getter, put_back), then in zip(self._settings, before, strict=True):
                if getter() != then:
                    self.changed = name
                    put_back(then)


def _autocast(kind: str) -> Setting:
    def put_back(values: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(kind, values[0])
        torch.set_autocast_dtype(kind, values[1])

    return "autocast", lambda: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)), put_back


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _of_matmul(name: str) -> Setting:
    matmul = cuda.matmul
    return (
        f"{name} of matrix products",
        functools.partial(getattr, matmul, name),
        functools.partial(setattr, matmul, name),
    )


def _precision(operation: str) -> Setting:
    getter = functools.partial(torch._C._get_fp32_precision_getter, "cuda", operation)
    setter = functools.partial(torch._C._set_fp32_precision_setter, "cuda", operation)
    return "a float32 precision", getter, setter


_SETTINGS: list[Setting] = [
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the default device", _default_device, torch.set_default_device),
    ("the use of deterministic algorithms", _deterministic,
     lambda values: torch.use_deterministic_algorithms(values[0], warn_only=values[1])),
    # The properties of torch.backends.cudnn may be locked.
    ("the use of cuDNN", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    ("cuDNN's choice by measurement", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    ("cuDNN's determinism", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    ("flash attention", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    ("memory-efficient attention", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    ("attention by formula", cuda.math_sdp_enabled, cuda.enable_math_sdp),
    ("cuDNN's attention", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    _of_matmul("allow_fp16_reduced_precision_reduction"),
    _of_matmul("allow_bf16_reduced_precision_reduction"),
    _of_matmul("allow_fp16_accumulation"),
    ("the precision of matrix products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _precision("matmul"),
    _precision("conv"),
    _precision("rnn"),
]  # fmt: skip
