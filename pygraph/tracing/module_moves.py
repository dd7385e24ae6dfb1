"""Modules that a function moves to where they are, as by ``expert.to(x.device)``: in a trace nothing is done.

Torch assigns to each parameter the memory that it has, and to its gradient, which a trace would take for a change.
"""

# Methods of modules have no types here.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn

from pygraph.ir.device_arguments import with_index
from pygraph.tracing.patches import replaced
from pygraph.tracing.proxy_trace import tracing_here

_Target = tuple[torch.device | None, torch.dtype | None]
"""A device, and the dtype of what is no integer; None for what stays."""


@contextlib.contextmanager
def idle_moves_skipped() -> Generator[None, None, None]:
    """Have a module that is moved to where it is be left alone, for the time of the context."""
    with contextlib.ExitStack() as stack:
        for name, target in _TARGETS.items():
            stack.enter_context(replaced(nn.Module, name, functools.partial(_moving, target)))
        yield


def _moving(target: Callable[..., _Target | None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def move(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if tracing_here():
            with torch._C.DisableTorchFunction():
                found = target(*args, **kwargs)
                if found is not None and _is_there(self, *found):
                    return self
        return original(self, *args, **kwargs)

    return move


def _is_there(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Whether all tensors of a module have a device and a dtype, and its class does no more where it is moved."""
    if any(type(one)._apply not in _PLAIN for one in nn.Module.modules(module)):
        return False
    for tensor in _tensors(module):
        if device is not None and tensor.device != device:
            return False
        if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != dtype:
            return False
    return True


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for one in nn.Module.modules(module):
        yield from (tensor for tensor in (*one._parameters.values(), *one._buffers.values()) if tensor is not None)


def _to(*args: Any, **kwargs: Any) -> _Target | None:
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)  # checked with torch 2.11 and 2.13
    except (RuntimeError, TypeError):  # which the method itself raises
        return None
    is_plain = memory_format is None and (dtype is None or dtype.is_floating_point)
    return (None if device is None else with_index(device), dtype) if is_plain else None


def _cuda(device: Any = None) -> _Target | None:
    if device is None:
        return with_index("cuda"), None
    return (with_index(device), None) if isinstance(device, (int, str, torch.device)) else None


def _to_dtype(dtype: torch.dtype) -> _Target:
    return None, dtype


_TARGETS: dict[str, Callable[..., _Target | None]] = {
    "to": _to,
    "cuda": _cuda,
    "float": functools.partial(_to_dtype, torch.float32),
    "double": functools.partial(_to_dtype, torch.float64),
    "half": functools.partial(_to_dtype, torch.float16),
    "bfloat16": functools.partial(_to_dtype, torch.bfloat16),
}
_PLAIN = (nn.Module._apply, nn.RNNBase._apply)  # the second one makes the same lists of weights again
