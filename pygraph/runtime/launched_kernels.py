"""Triton kernels by the functions that nodes of captured graphs launch, registered while a capture runs."""

# Triton has no types, and neither its compiled kernels nor their sources are public. Checked with triton 3.6.
# pyright: reportPrivateUsage=false, reportMissingImports=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Generator
from typing import Any

from pygraph.runtime.trampoline import COMPILING, why_no_trampoline
from pygraph.runtime.tuned_kernels import autotuner, compiled_kernel, loaded

_KERNELS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_TUNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_REBUILT: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()


def register(kernel: Any) -> None:
    """Make a compiled kernel that is loaded known to `kernel_of`."""
    if isinstance(kernel.function, int):
        _KERNELS[kernel.function] = kernel


def kernel_of(function: int) -> Any:
    """The ``CompiledKernel`` behind a ``CUfunction`` handle, if it was registered and is still loaded, or None."""
    kernel = _KERNELS.get(function)
    return kernel if kernel is not None and kernel.function == function else None


def holder_of(function: int) -> Any:
    """The object that keeps the code behind a ``CUfunction`` handle loaded, if it was registered, or None."""
    tuner = _tuner_of(function)
    return kernel_of(function) if tuner is None else tuner


def rebuilt_kernel_of(function: int) -> Any:
    """The ``CompiledKernel`` behind a handle; of Inductor's kernels, one that Triton compiles again and does not load.

    None if it was not registered, or if Triton makes another kernel of the source than Inductor has.
    """
    known, tuner = kernel_of(function), _tuner_of(function)
    if known is not None or tuner is None:
        return known
    with COMPILING:
        if tuner not in _REBUILT or _REBUILT[tuner][0] != function:
            _REBUILT[tuner] = function, compiled_kernel(tuner)
        return _REBUILT[tuner][1]


def why_not_loaded(function: int, name: str) -> str | None:
    """The reason why a Triton kernel has no trampoline; None if it has one, or is none of Triton's.

    Args:
        function: Its ``CUfunction`` handle.
        name: Its name; those of Inductor's begin with ``triton_``.
    """
    kernel = rebuilt_kernel_of(function)
    if kernel is not None:
        return why_no_trampoline(kernel)
    if _tuner_of(function) is not None:
        return "Triton makes another kernel of its source than Inductor has"
    return "its launch was not seen" if name.startswith("triton_") else None


def _tuner_of(function: int) -> Any:
    """Inductor's kernel behind a handle, if it was registered and still launches that, or None."""
    tuner = _TUNERS.get(function)
    return tuner if tuner is not None and _function_of(tuner) == function else None


def _function_of(tuner: Any) -> int | None:
    return getattr(loaded(tuner), "function", None)


@contextlib.contextmanager
def launched_kernels() -> Generator[None, None, None]:
    """Register every Triton kernel that is launched in the context, by whatever thread."""
    try:
        jit = importlib.import_module("triton.runtime.jit")
    except ImportError:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_after_run(jit.JITFunction, _note_kernel))
        if (tuners := autotuner()) is not None:
            stack.enter_context(_after_run(tuners, _note_tuner))
        yield


@contextlib.contextmanager
def _after_run(owner: Any, note: Callable[[Any, Any, dict[str, Any]], None]) -> Generator[None, None, None]:
    """Call ``note`` after every ``run`` of a class's instances."""
    original = owner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        note(self, result, kwargs)
        return result

    owner.run = run
    try:
        yield
    finally:
        owner.run = original


def _note_kernel(function: Any, kernel: Any, options: dict[str, Any]) -> None:
    if kernel is not None and not options.get("warmup"):
        register(kernel)


def _note_tuner(tuner: Any, result: Any, options: dict[str, Any]) -> None:
    handle = _function_of(tuner)
    if isinstance(handle, int):
        _TUNERS[handle] = tuner
