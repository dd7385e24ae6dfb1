"""Patches of torch for the time of a trace: values and functions that differ only in threads that trace.

Other threads find the behaviour from before. A patch is undone when the last trace ends, unless other code has replaced
it meanwhile; so it must do no harm if it stays.
"""

# Checked with torch 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import logging
import threading
import types
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch.nn.modules import activation

from pygraph.tracing.dynamo import fill_tables
from pygraph.tracing.proxy_trace import session_here, tracing_here
from pygraph.tracing.user_scopes import NvtxHere


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Generator[None, None, None]:
    """Replace an attribute for the time of the context.

    Torch replaces some attributes too, and restores what it has found: another thread may restore a patch of ours when
    its trace has ended. The patch does nothing then, and the next trace removes it.

    Args:
        owner: A module or a class.
        name: Its attribute.
        make: Makes the replacement of a value: it differs only in threads that trace, and until the context has ended.
    """
    fill_tables()
    before = without_ended(vars(owner)[name])
    instead = make(before)
    instead.pygraph_replaces, instead.pygraph_ended = before, False
    try:
        setattr(owner, name, instead)
        yield
    finally:
        instead.pygraph_ended = True
        if vars(owner)[name] is instead:
            setattr(owner, name, before)


@contextlib.contextmanager
def of_class(module: Any, cls: type[types.ModuleType]) -> Generator[None, None, None]:
    """Set the class of a module for the time of the context; its properties replace variables of the module."""
    before = cast("Any", type(module))
    try:
        module.__class__ = cls
        yield
    finally:
        module.__class__ = before


def without_ended(value: Any) -> Any:
    """The original of a replacement that has ended; any other value itself."""
    while getattr(value, "pygraph_ended", False):
        value = value.pygraph_replaces
    return value


@contextlib.contextmanager
def patched() -> Generator[None, None, None]:
    """Patch torch so that in this thread, and only here, it is inside a trace of ours; traces come one at a time."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with contextlib.ExitStack() as stack:
        # Compiled functions do not run on fakes: they raise an error, by which the trace ends.
        stack.enter_context(replaced(symbolic_trace, "_is_fx_tracing_flag", _TracingHere))
        # With a limit, torch executes in-place updates of small closed-over tensors for real.
        stack.enter_context(replaced(proxy_tensor, "CONSTANT_NUMEL_LIMIT", _Limit))
        stack.enter_context(of_class(proxy_tensor, _ProxyTensorModule))
        stack.enter_context(replaced(torch._ops, "mode_stack_state_for_pre_dispatch", _modes_before_autograd))
        # Attention modules have one operation for all their work, and do not use it where a TorchFunctionMode or
        # make_fx might look on; its results differ in the last bits, and for padding in more.
        stack.enter_context(replaced(torch.overrides, "has_torch_function", _has_torch_function))
        stack.enter_context(replaced(activation, "_is_make_fx_tracing", _is_make_fx_tracing))
        stack.enter_context(replaced(torch.cuda.nvtx, "_nvtx", NvtxHere))
        # It logs a traceback for every error of the function; that error is reported, or raised by eager.
        log.addFilter(_is_elsewhere)
        stack.callback(log.removeFilter, _is_elsewhere)
        yield


class _TracingHere:
    """Torch's flag that FX traces symbolically: true in threads that are in a trace of ours, else as it was.

    It is false when that trace has ended, though it may have begun while a tracer of torch's had raised the flag.
    """

    pygraph_ended = False

    def __init__(self, before: Any) -> None:
        self._before = before

    def __bool__(self) -> bool:
        return tracing_here() or (bool(self._before) and not self.pygraph_ended)

    def __repr__(self) -> str:
        return repr(bool(self))


class _Limit(int):
    """The limit of elements for a tensor to count as a constant: in a trace of ours, no tensor does."""

    def __ge__(self, elements: Any) -> bool:
        # As ``elements <= limit``, in which a subclass is asked first.
        return (-1 if tracing_here() else int(self)) >= elements


class _ProxyTensorModule(types.ModuleType):
    """The module of `make_fx` with a thread's own current tracer; higher-order operations import it from there."""

    @property
    def _CURRENT_MAKE_FX_TRACER(self) -> Any:
        session = session_here()
        return vars(self)["_CURRENT_MAKE_FX_TRACER"] if session is None else session

    @_CURRENT_MAKE_FX_TRACER.setter
    def _CURRENT_MAKE_FX_TRACER(self, tracer: Any) -> None:
        vars(self)["_CURRENT_MAKE_FX_TRACER"] = tracer


def _modes_before_autograd(asked: Callable[[], Any]) -> Callable[[], Any]:
    """The modes that see operations before autograd does, which torch keeps for the whole process.

    While another thread exports, they are its own; torch would take them off and put them on in this thread.
    """
    own = threading.local()

    def modes_before_autograd() -> Any:
        if not tracing_here():
            return asked()
        if not hasattr(own, "state"):
            own.state = type(asked())()
        return own.state

    return modes_before_autograd


def _has_torch_function(asked: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def has_torch_function(tensors: Any) -> bool:
        # In this order, Dynamo sees what it knows when another thread compiles.
        return asked(tensors) and (not tracing_here() or _has_users_mode())

    return has_torch_function


def _has_users_mode() -> bool:
    """Whether a mode of the user's is active; traced tensors have no ``__torch_function__`` of their own."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not type(mode).__module__.startswith(("pygraph.", "torch.fx.")) for mode in modes)


def _is_make_fx_tracing(asked: Callable[[], bool]) -> Callable[[], bool]:
    def is_make_fx_tracing() -> bool:
        return asked() and not tracing_here()

    return is_make_fx_tracing


def _is_elsewhere(record: logging.LogRecord) -> bool:
    del record
    return not tracing_here()
