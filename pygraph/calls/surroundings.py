"""When a transformed function is traced through instead of running its own graph."""

# The length of a stack of modes is known to torch._C only. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import (  # checked with torch 2.11 and 2.13
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad  # its _current_level: checked with torch 2.11 and 2.13
from torch.fx._symbolic_trace import is_fx_symbolic_tracing  # checked with torch 2.11 and 2.13
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.jit._trace import is_tracing
from torch.overrides import _get_current_function_mode_stack  # checked with torch 2.11 and 2.13
from torch.utils._device import DeviceContext

from pygraph.guards.donated import DonatedTensor, donated_error

INSIDE_TRACE = "it is inside a trace, which includes it"
INSIDE_CAPTURE = "a CUDA graph is being captured, which includes it"
UNDER_MODE = "a mode is active that sees every operation, which a replay would not show it"

INFERENCE = "it is differentiated or batched in inference mode"
INSIDE_BATCH = "it is inside a batch of torch.autograd.functional, which is no vmap of torch.func"

EXPECTED = frozenset({INSIDE_TRACE, INSIDE_CAPTURE})
"""Reasons that are no loss: the work becomes part of something larger."""


class InlineError(Exception):
    """A call runs as it is, for the reason that the message gives."""


class UntraceableError(InlineError):
    """A call runs as it is, as it has been found out just now that calls like it cannot be traced inside other work.

    They may be traced by themselves: what they do is not what others of their kind have done.
    """


def is_dual_level() -> bool:
    """Whether forward-mode differentiation is active, by torch.func or by itself."""
    level: Any = forward_ad._current_level
    return level >= 0


def inline_reason() -> str | None:
    """Why a call now becomes part of an outer transformation; None if it stands for itself."""
    if torch.compiler.is_compiling() or get_proxy_mode() is not None or is_fx_symbolic_tracing():
        return INSIDE_TRACE
    if is_tracing():
        return INSIDE_TRACE
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return INSIDE_CAPTURE
    if is_dual_level() and _is_inside_batch():
        return INSIDE_BATCH
    if torch._C._len_torch_dispatch_stack() or (torch._C._len_torch_function_stack() and _is_watched()):
        return UNDER_MODE
    return None


def _is_inside_batch() -> bool:
    """Whether this thread is inside the older kind of ``vmap`` that autograd has for itself."""
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level > 1


def is_transformed(leaves: Sequence[Any]) -> bool:
    """Whether a call is inside a transform of torch.func, or one of forward-mode differentiation."""
    interpreter: Any = peek_interpreter_stack()
    return (
        interpreter is not None
        or is_dual_level()
        or any(isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in leaves)
    )


def _is_watched() -> bool:
    """Whether a TorchFunctionMode is active besides those of default devices, which are in the cache key."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def special_tensor(leaves: Sequence[Any]) -> str | None:
    """Why tensors among the leaves rule out a graph; None if they are all plain. Raises DonatedError for a used one."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            if isinstance(leaf, FakeTensor):
                return INSIDE_TRACE
            if isinstance(leaf, DonatedTensor):
                raise donated_error(leaf)
            return f"an argument is a {type(leaf).__name__}, not a plain tensor"
        if isinstance(leaf, torch.Tensor):
            if is_legacy_batchedtensor(leaf):
                return INSIDE_BATCH
            if leaf.layout != torch.strided or leaf.is_nested or leaf._is_zerotensor() or leaf.is_meta:
                return f"an argument is {_kind(leaf)}"
            if leaf.is_conj() or leaf.is_neg():
                return "an argument is lazily conjugated or negated; resolve_conj() or resolve_neg() gives a plain one"
    return None


def _kind(tensor: torch.Tensor) -> str:
    """The kind of a tensor that has no memory of its own, or more than one piece."""
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}"
    return "a nested tensor" if tensor.is_nested else "on the meta device" if tensor.is_meta else "a tensor of zeros"
