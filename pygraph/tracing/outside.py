"""Code that runs in the middle of a trace but is no part of it: finalizers of garbage, functions of ``sys.settrace``.

While it runs, this thread is in the state from before the trace: no modes of a trace, no transform of ``torch.func``,
the caller's grad mode. So it sees real tensors, its operations are executed and not recorded, and a transformed
function that it calls runs without a graph.
"""

# Modes and the dispatcher's state have private names only. Checked with torch 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import contextlib
import gc
import sys
import threading
import types
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.process.reentrancy import here
from pygraph.tracing.patches import replaced
from pygraph.tracing.proxy_trace import outside_session, tracing_here


class CallerState:
    """The state of this thread when the object is made, before a trace begins."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._modes = list(_get_current_function_mode_stack())
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Restore that state for the time of the context."""
        inside, autocast_cache = here.inside, torch.is_autocast_cache_enabled()
        with (
            no_dispatch_modes(), outside_session(), temporarily_clear_interpreter_stack(),
            _function_modes(self._modes), torch._C._EnableTorchFunction(), torch.inference_mode(self._inference),
            torch._C._ForceDispatchKeyGuard(*self._keys), torch.set_grad_enabled(self._grad),
        ):  # fmt: skip
            here.inside = True
            torch.set_autocast_cache_enabled(self._autocast_cache)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(autocast_cache)
                here.inside = inside

    @contextlib.contextmanager
    def restored_for_callbacks(self) -> Generator[None, None, None]:
        """Have garbage collections and functions of ``sys.settrace`` and ``sys.setprofile`` run outside the trace."""
        with (
            self._collections(),
            self._watcher(sys.gettrace, sys.settrace),
            self._watcher(sys.getprofile, sys.setprofile),
        ):
            yield

    @contextlib.contextmanager
    def _collections(self) -> Generator[None, None, None]:
        """Restore the state for collections: they do not start by themselves, but the function may start one."""
        stack = contextlib.ExitStack()

        def first(phase: str, info: dict[str, Any]) -> None:
            del info
            if phase == "start" and threading.get_ident() == self._thread:
                stack.enter_context(self.restored())

        def last(phase: str, info: dict[str, Any]) -> None:
            del info
            if phase == "stop" and threading.get_ident() == self._thread:
                stack.close()

        gc.callbacks.insert(0, first)
        gc.callbacks.append(last)
        try:
            yield
        finally:
            gc.callbacks.remove(first)
            gc.callbacks.remove(last)

    @contextlib.contextmanager
    def _watcher(self, get: Callable[[], Any], put: Callable[[Any], None]) -> Generator[None, None, None]:
        """Have a tracing or profiling function in Python run outside; one in C, as coverage's, calls no torch."""
        function = get()
        if not _is_python(function):
            yield
            return
        watch = _Watch(self, function)
        try:
            put(watch)
            yield
        finally:
            watch.ended = True  # frames that outlive the trace refer to it
            if get() is watch:
                put(function)


class _Watch:
    """A function of ``sys.settrace`` or ``sys.setprofile``, or one of a frame."""

    def __init__(self, state: CallerState, function: Callable[..., Any], parent: _Watch | None = None) -> None:
        self._state, self._function, self._parent = state, function, parent
        self.ended = False

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if (self._parent or self).ended:
            return self._function(frame, event, argument)
        with self._state.restored():
            local = self._function(frame, event, argument)
        if local is self._function:
            return self
        return _Watch(self._state, local, self._parent or self) if callable(local) else local


def _is_python(function: Any) -> bool:
    """Whether a callable is written in Python."""
    kinds = (types.FunctionType, types.MethodType)
    defined = next((vars(kind)["__call__"] for kind in type(function).__mro__ if "__call__" in vars(kind)), None)
    return isinstance(function, kinds) or isinstance(defined, types.FunctionType)


@contextlib.contextmanager
def _function_modes(modes: list[Any]) -> Generator[None, None, None]:
    """Have only these modes see calls of torch's functions."""
    before = [_pop_mode() for _ in _get_current_function_mode_stack()]
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        while _get_current_function_mode_stack():
            _pop_mode()
        for mode in reversed(before):
            _push_mode(mode)


class IgnoredErrors:
    """Errors that Python prints and ignores: of finalizers, and of callbacks of weak references.

    A replay would not run the code that raises them, so the function is not replayed, and the eager call prints them.

    Attributes:
        problem: The reason to refuse the trace, if there was such an error; else None.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.problem: str | None = None

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Note such errors for the time of the context."""

        def instead(hook: Callable[[Any], None]) -> Callable[[Any], None]:
            def noticed(unraisable: Any) -> None:
                if ended or not (threading.get_ident() == self._thread or tracing_here()):
                    hook(unraisable)
                    return
                kind = unraisable.exc_type.__name__
                self.problem = f"a finalizer or the callback of a weak reference raises {kind}, which Python ignores"

            return noticed

        ended = False
        try:
            with replaced(sys, "unraisablehook", instead):
                yield
        finally:
            ended = True
