"""Global settings of torch: changes by a traced function are noticed and put back, as a replay would not make them."""

# Some settings have private getters and setters only. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.backends import cuda
from torch.nn.utils import parametrize

from pygraph.guards.settings import NAMED
from pygraph.guards.torch_settings import mode_key

Setting: TypeAlias = "tuple[str, Callable[[], Any], Callable[[Any], Any]]"


class SettingsWatch:
    """Compares torch's global settings before and after a function.

    Most of them are the process's: another thread may have changed one, as `torch.export` does for a while, which must
    not be undone. So if it is not known who has changed one, the function is run again under a profiler that compares
    the settings around its calls of torch's setters. If these change nothing, the function may still have set a setting
    to the value that it has by now; the call itself will do the same.

    Args:
        device_types: The devices whose autocast settings count.
        unclear: The watch of a first run after which that was not known.

    Attributes:
        changed: The first setting that the function has changed, and that was put back; None if there is none.
        unclear: The first one that it or another thread has changed, and that was left so.
        others: The first one that another thread has changed, or the function as a call of it would.
    """

    def __init__(self, device_types: Iterable[str], unclear: SettingsWatch | None = None) -> None:
        kinds = filter(torch.amp.is_autocast_available, sorted({"cpu", *device_types}))
        self._settings = [*_SETTINGS, *map(_autocast, kinds)]
        self._first = unclear
        self._before: list[Any] = []
        self.changed: str | None = None
        self.unclear: str | None = None
        self.others: str | None = None
        mode_key("cpu")  # what it asks torch for once must not become part of the trace

    def watch(self) -> AbstractContextManager[None]:
        """Watch the function for the time of the context, and put its changes back, also if it fails."""
        return self._watch() if self._first is None else self._watch_again(self._first)

    @contextmanager
    def _watch(self) -> Generator[None, None, None]:
        self._before, key = self._values(), mode_key("cpu")
        try:
            yield
        finally:
            changed = self._changed(self._before)
            if not changed and mode_key("cpu") != key:
                changed = ["a global setting of torch"]
            alone = is_alone()
            self.changed = next((name for name in changed if alone or name in _OF_THREAD), None)
            self.unclear = next((name for name in changed if not alone and name not in _OF_THREAD), None)
            self._put_back(self._before, of_process=alone)

    @contextmanager
    def _watch_again(self, first: SettingsWatch) -> Generator[None, None, None]:
        self._before = self._values()
        calls = _SetterCalls(lambda: [*self._values(), mode_key("cpu")])
        try:
            with calls.profiled():
                yield
        finally:
            if calls.changed:
                self.changed = first.unclear
                self._put_back(first._before, of_process=True)
            else:
                self.others = first.unclear
                self._put_back(self._before, of_process=False)

    def _values(self) -> list[Any]:
        return [getter() for _, getter, _ in self._settings]

    def _changed(self, before: list[Any]) -> list[str]:
        now = self._values()
        return [name for (name, _, _), new, old in zip(self._settings, now, before, strict=True) if new != old]

    def _put_back(self, values: list[Any], *, of_process: bool) -> None:
        for (name, getter, put_back), then in zip(self._settings, values, strict=True):
            if (of_process or name in _OF_THREAD) and getter() != then:
                put_back(then)


def forget_cached_fakes() -> None:
    """Remove fake tensors from the cache of parametrized weights, which is on in `parametrize.cached`."""
    cache: dict[Any, Any] = parametrize._cache
    for key, value in list(cache.items()):
        if is_fake(value):
            del cache[key]


def is_alone() -> bool:
    """Whether this is the only thread that runs Python code."""
    return len(sys._current_frames()) == 1


class _SetterCalls:
    """The effect of this thread's calls of torch's setters."""

    def __init__(self, values: Callable[[], list[Any]]) -> None:
        self._values = values
        self._before: list[Any] | None = None
        self._after: list[Any] | None = None

    @property
    def changed(self) -> bool:
        """Whether the calls have changed a setting, and not put it back."""
        return self._before != self._after

    @contextmanager
    def profiled(self) -> Generator[None, None, None]:
        """Watch calls for the time of the context."""
        if sys.getprofile() is not None:
            yield  # the user's profiler could not be put back
            return
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: Any, event: str, arg: Any) -> None:
        if event.startswith("c_"):
            is_setter = getattr(arg, "__name__", "").startswith(_SETTERS)
        else:
            is_setter = frame.f_code in _SETTERS_IN_PYTHON
        if not is_setter:
            return
        if not event.endswith("call"):
            self._after = self._values()
        elif self._before is None:
            self._before = self._values()


# Prefixes of names of torch._C's functions that change a setting of the process. Checked with torch 2.11 and 2.13.
_SETTERS = (
    "_set_default_dtype", "_set_deterministic", "_set_cudnn", "_set_sdp", "_set_math_sdp", "_set_cublas", "_set_fp32",
    "_set_float32", "_set_linalg", "_set_blas", "_set_mkldnn", "_set_nnpack", "_set_warnAlways",
    "set_anomaly_enabled", "_set_check_sparse",
)  # fmt: skip

# Setters of settings that are in Python only.
_SETTERS_IN_PYTHON = frozenset(setter.__code__ for setting in NAMED for setter in setting.setters)

_OF_THREAD = frozenset(
    {
        "grad mode", "the default device", "autocast", "forward-mode differentiation", "threads of a backward",
        "how autograd makes views", "the number of threads",
    }
)  # fmt: skip


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


def _precision(backend: str, operation: str) -> Setting:
    getter = functools.partial(torch._C._get_fp32_precision_getter, backend, operation)
    setter = functools.partial(torch._C._set_fp32_precision_setter, backend, operation)
    return "a float32 precision", getter, setter


def _matmul_precision() -> str | None:
    """The precision that the older of torch's two switches is set to; None where only the newer one has been used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it does not say then
        return None


def _put_matmul_precision_back(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


_SETTINGS: list[Setting] = [
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("forward-mode differentiation", torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    ("threads of a backward", torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    ("how autograd makes views", torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    *((setting.title, setting.read, setting.write) for setting in NAMED if setting.write is not None),
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
    ("another device's attention", torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    ("flash attention 3", torch._C._get_fa3_sdp_enabled, torch._C._set_sdp_use_fa3),
    ("reduction in attention by formula", cuda.fp16_bf16_reduction_math_sdp_allowed,
     cuda.allow_fp16_bf16_reduction_math_sdp),
    ("the library for linear algebra", torch._C._get_linalg_preferred_backend, torch._C._set_linalg_preferred_backend),
    ("the library for matrix products", torch._C._get_blas_preferred_backend, torch._C._set_blas_preferred_backend),
    ("what is in uninitialised memory", torch._C._get_deterministic_fill_uninitialized_memory,
     torch._C._set_deterministic_fill_uninitialized_memory),
    ("the order of attentions", torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    _of_matmul("allow_fp16_reduced_precision_reduction"),
    _of_matmul("allow_bf16_reduced_precision_reduction"),
    _of_matmul("allow_fp16_accumulation"),
    ("the precision of matrix products", _matmul_precision, _put_matmul_precision_back),
    # The older switch changes those of the newer one, and those of all change those of each: they come later.
    _precision("generic", "all"),
    *(_precision(backend, of) for backend in ("cuda", "mkldnn") for of in ("all", "matmul", "conv", "rnn")),
]  # fmt: skip
