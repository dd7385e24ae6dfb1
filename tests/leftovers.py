"""What a trace could leave in a process: modes, settings, patches and hooks, compared before and after a test."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
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
import torch.fx.traceback
from torch import nn
from torch.nn.modules import activation
from torch.nn.modules import module as module_of_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph.process.reentrancy import here
from pygraph.tracing import fx_notes
from pygraph.tracing.patches import without_ended
from pygraph.tracing.proxy_trace import session_here
from pygraph.tracing.settings import SettingsWatch

# What is read must be the same object, or equal, after a test. Private names were checked with torch 2.11 and 2.13.
_READ: dict[str, Callable[[], Any]] = {
    "dispatch modes": _get_current_dispatch_mode_stack,
    "function modes": torch.overrides._get_current_function_mode_stack,
    "torch.func's levels": torch._C._functorch.peek_interpreter_stack,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast's cache": torch.is_autocast_cache_enabled,
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
    "what FX notes of nodes": lambda: (
        dict(torch.fx.traceback.current_meta), torch.fx.traceback.should_preserve_node_meta,
    ),
    "what notes them": lambda: [
        type(torch.fx.traceback), *(without_ended(vars(torch.fx.traceback)[name]) for name in fx_notes.FUNCTIONS),
    ],
    "garbage collection": gc.isenabled,
    "sys.gettrace": sys.gettrace,
    "sys.getprofile": sys.getprofile,
    "sys.unraisablehook": lambda: sys.unraisablehook,
    "the handler of SIGINT": lambda: signal.getsignal(signal.SIGINT),
    "a trace": session_here,
    "being inside a call": lambda: here.inside,
}  # fmt: skip

# What tests, and the tools that run them, change themselves; it is compared where `nothing_patched` is asked.
_READ_WHERE_ASKED: dict[str, Callable[[], Any]] = {
    "callbacks of the collector": lambda: list(gc.callbacks),
    "filters of torch's log": lambda: list(logging.getLogger("torch._subclasses.fake_tensor").filters),
    "handlers of signals": lambda: [signal.getsignal(number) for number in signal.valid_signals()],
}

# Modules and classes of which no attribute may become another one, likewise.
_OWNERS: dict[str, Any] = {
    "nn.Module": nn.Module,
    "torch.overrides": torch.overrides,
    "torch.random": torch.random,
    "torch.cuda": torch.cuda,
    "torch.fx._symbolic_trace": torch.fx._symbolic_trace,
    "torch.fx._lazy_graph_module": torch.fx._lazy_graph_module,
    "proxy_tensor": torch.fx.experimental.proxy_tensor,
    "activation": activation,
    "math": math,
    "random": random,
    "numpy.random": np.random,
    "SymInt": torch.SymInt,
    "SymFloat": torch.SymFloat,
    "SymBool": torch.SymBool,
}

_TRITON = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))

# Which torch fills when it is first asked.
_FILLED_LATER = ("torch.cuda._", "torch.cuda.default_generators", ".__")


def state() -> dict[str, Any]:
    """All of it, as it is now in this thread."""
    return _state(_READ)


def _state(read: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.cuda.init()  # so that torch makes the choices that it makes once
    settings = enumerate(SettingsWatch(["cpu"])._settings)  # some have the same name
    found = {f"torch's setting {number}, {setting.title}": setting.read() for number, setting in settings}
    # A tracer of torch's in another thread may put a replacement of ours back, which then does nothing any more.
    return found | {name: without_ended(getter()) for name, getter in read.items()}


def changed(before: dict[str, Any], now: dict[str, Any] | None = None) -> list[str]:
    """What is not as it was."""
    now = state() if now is None else now
    return [name for name, value in now.items() if value is not before[name] and value != before[name]]


@contextlib.contextmanager
def all_restored() -> Generator[None, None, None]:
    """Put torch's settings back: each has a switch, but some switches change others too, and do not put those back."""
    watch = SettingsWatch(["cpu"])
    before = watch._values()
    try:
        yield
    finally:
        watch._put_back(before, of_process=True)


@contextlib.contextmanager
def nothing_patched() -> Generator[None, None, None]:
    """Fail if what is inside leaves something other than it was, be it an attribute of torch's or Python's modules."""
    everything = _READ | _READ_WHERE_ASKED
    before, attributes = _state(everything), _attributes()
    yield
    left = changed(before, _state(everything))
    assert not left, f"it left changed: {', '.join(left)}"
    now = _attributes()
    replaced = [name for name, value in attributes.items() if now.get(name) is not value]
    replaced = [name for name in replaced if not any(part in name for part in _FILLED_LATER)]
    assert not replaced, f"it left replaced: {', '.join(replaced)}"


def _attributes() -> dict[str, Any]:
    owners = dict(_OWNERS)
    for module, name in _TRITON:
        if module in sys.modules:
            owners[name] = getattr(importlib.import_module(module), name)
    owners["class of proxy_tensor"] = type(torch.fx.experimental.proxy_tensor)
    return {
        f"{owner}.{name}": without_ended(value)
        for owner, holder in owners.items()
        for name, value in vars(holder).items()
    }
