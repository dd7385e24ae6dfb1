"""What a trace changes of the whole process, or of its thread, and must leave as it was."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import random
import signal
import sys
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
import torch.fx._lazy_graph_module
import torch.fx._symbolic_trace
import torch.fx.experimental.proxy_tensor
from torch import nn
from torch.nn.modules import activation
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph.runtime.turns import here
from pygraph.tracing.patches import without_ended
from pygraph.tracing.proxy_trace import session_here

# Modules and classes of which no attribute may become another one.
_OWNERS: dict[str, Any] = {
    "nn.Module": nn.Module,
    "torch.overrides": torch.overrides,
    "torch.random": torch.random,
    "torch.cuda": torch.cuda,
    "torch.fx._symbolic_trace": torch.fx._symbolic_trace,
    "torch.fx._lazy_graph_module": torch.fx._lazy_graph_module,
    "proxy_tensor": torch.fx.experimental.proxy_tensor,
    "activation": activation,
    "random": random,
    "numpy.random": np.random,
    "SymInt": torch.SymInt,
    "SymFloat": torch.SymFloat,
    "SymBool": torch.SymBool,
}

_TRITON = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))

_STATES: dict[str, Callable[[], Any]] = {
    "sys.unraisablehook": lambda: sys.unraisablehook,
    "sys.gettrace": sys.gettrace,
    "sys.getprofile": sys.getprofile,
    "signal handlers": lambda: [signal.getsignal(number) for number in signal.valid_signals()],
    "gc.isenabled": gc.isenabled,
    "gc.callbacks": lambda: list(gc.callbacks),
    "filters of torch's log": lambda: list(logging.getLogger("torch._subclasses.fake_tensor").filters),
    "class of proxy_tensor": lambda: type(torch.fx.experimental.proxy_tensor),
    "dispatch modes": _get_current_dispatch_mode_stack,
    "function modes": torch.overrides._get_current_function_mode_stack,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast cache": torch.is_autocast_cache_enabled,
    "included keys": lambda: str(torch._C._dispatch_tls_local_include_set()),
    "excluded keys": lambda: str(torch._C._dispatch_tls_local_exclude_set()),
    "a trace": session_here,
    "inside a call": lambda: here.inside,
}


def _now() -> dict[str, Any]:
    owners = dict(_OWNERS)
    for module, name in _TRITON:
        if module in sys.modules:
            owners[name] = getattr(importlib.import_module(module), name)
    # A tracer of torch in another thread may put something of ours back that does nothing any more.
    found = {
        f"{owner}.{name}": without_ended(value)
        for owner, holder in owners.items()
        for name, value in vars(holder).items()
    }
    return {**found, **{name: get() for name, get in _STATES.items()}}


# Which torch fills when it is first asked.
_FILLED_LATER = ("torch.cuda._", "torch.cuda.default_generators", ".__")


@contextlib.contextmanager
def nothing_patched() -> Generator[None, None, None]:
    """Fail if what is inside leaves something of torch, Python or this thread other than it was."""
    before = _now()
    yield
    after = _now()
    changed = [name for name in before if not _is_same(after.get(name), before[name])]
    own = ("nn.Module.__call__", "nn.Module.__getattr__")
    assert not [n for n in changed if n in own or not any(part in n for part in _FILLED_LATER)], changed


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (isinstance(then, (list, str, int, float, bool)) and type(now) is type(then) and now == then)
