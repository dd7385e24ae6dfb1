"""What a trace could leave in a process: modes, settings, patches and hooks, compared before and after a test."""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import activation
from torch.nn.modules import module as module_of_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph.runtime.turns import here
from pygraph.tracing.patches import without_ended

# What is read must be the same object, or equal, after a test. Private names were checked with torch 2.11 and 2.13.
_READ: dict[str, Callable[[], Any]] = {
    "dispatch modes": _get_current_dispatch_mode_stack,
    "function modes": torch.overrides._get_current_function_mode_stack,
    "torch.func's levels": torch._C._functorch.peek_interpreter_stack,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
    "hooks on saved tensors": lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    "included dispatch keys": lambda: str(torch._C._dispatch_tls_local_include_set()),
    "excluded dispatch keys": lambda: str(torch._C._dispatch_tls_local_exclude_set()),
    "nn.Module.__call__": lambda: nn.Module.__call__,
    "nn.Module.__getattr__": lambda: nn.Module.__getattr__,
    "nn.Module.__setattr__": lambda: nn.Module.__setattr__,
    "hooks on all modules": lambda: (
        len(module_of_modules._global_forward_hooks), len(module_of_modules._global_forward_pre_hooks),
        len(module_of_modules._global_backward_hooks), len(module_of_modules._global_backward_pre_hooks),
    ),
    "torch.overrides.has_torch_function": lambda: torch.overrides.has_torch_function,
    "torch.nn.modules.activation._is_make_fx_tracing": lambda: activation._is_make_fx_tracing,
    "torch.random.default_generator": lambda: torch.random.default_generator,
    "torch.manual_seed": lambda: torch.manual_seed,
    "torch.cuda.manual_seed": lambda: torch.cuda.manual_seed,
    "torch.cuda.get_rng_state": lambda: torch.cuda.get_rng_state,
    "random.seed": lambda: random.seed,
    "numpy.random.seed": lambda: np.random.seed,
    "garbage collection": gc.isenabled,
    "sys.gettrace": sys.gettrace,
    "sys.getprofile": sys.getprofile,
    "sys.unraisablehook": lambda: sys.unraisablehook,
    "the handler of SIGINT": lambda: signal.getsignal(signal.SIGINT),
    "being inside a call": lambda: here.inside,
}  # fmt: skip


def state() -> dict[str, Any]:
    """All of it, as it is now in this thread."""
    # A tracer of torch's in another thread may put a replacement of ours back, which then does nothing any more.
    return {name: without_ended(read()) for name, read in _READ.items()}


def changed(before: dict[str, Any]) -> list[str]:
    """What is not as it was."""
    return [name for name, value in state().items() if value is not before[name] and value != before[name]]
