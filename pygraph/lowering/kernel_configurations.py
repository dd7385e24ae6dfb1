"""Fused kernels that Triton cannot compile in one of the configurations that Inductor chooses from.

Triton's optimizer fails at some kernels for some numbers of elements per thread: in Triton 3.6 it moves an operation in
front of what it takes (``operand #1 does not dominate this use``), where a kernel stores values of several sizes and
goes on computing with them, as that of a gated GELU with its dropout in a step of training. Inductor drops a
configuration that needs too much memory, but this error ends the whole compilation. Here such a kernel is compiled in
the others, or with more threads.
"""

# Inductor's compilation of kernels is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingModuleSource=false
from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Callable, Generator
from typing import Any

_FAILURE = "PassManager::run failed"
"""The text of the ``RuntimeError`` that Triton raises where its optimizer has failed. Checked with Triton 3.6."""

_IGNORED = ("OutOfResources", "PTXASError")
"""Errors of Triton's for which Inductor drops a configuration."""

_MOST_WARPS = 32

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("_active", default=False)


@contextlib.contextmanager
def other_configurations_tried() -> Generator[None, None, None]:
    """A block in which a kernel that Triton's optimizer fails at is compiled in other configurations."""
    _install()
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


@functools.cache
def _install() -> None:
    """Have Inductor ask here when a kernel has failed, for good; outside of the block it is told nothing."""
    from torch._inductor.async_compile import AsyncCompile

    original = AsyncCompile.triton

    @functools.wraps(original)
    def triton(self: Any, kernel_name: str, source_code: str, *args: Any, **kwargs: Any) -> Any:
        if not _active.get():
            return original(self, kernel_name, source_code, *args, **kwargs)
        otherwise = functools.partial(_in_other_configurations, kernel_name, source_code)
        made = _tried(functools.partial(original, self, kernel_name, source_code, *args, **kwargs), otherwise)
        if type(made).__name__ == "LambdaFuture":  # a process compiles it
            made.result_fn = functools.partial(_tried, made.result_fn, otherwise)
        return made

    AsyncCompile.triton = triton


def _tried(compile_: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """The result of the first function, or of the second where Triton's optimizer fails in the first."""
    try:
        return compile_()
    except Exception as error:  # of a process, with Triton's error in its text
        if _FAILURE not in str(error):
            raise
    return otherwise()


def _in_other_configurations(kernel_name: str, source_code: str) -> Any:
    """Compile a kernel in this process, in those configurations that Triton compiles.

    Raises:
        RuntimeError: There is none; or whatever else stands in the way.
    """
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.codecache import _load_triton_kernel_from_source
    from torch._inductor.runtime import compile_tasks

    CompiledTritonKernels.remove_future(source_code)
    for name in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):  # torch 2.13 has both
        getattr(compile_tasks, name, lambda: None)()
    kernel: Any = _load_triton_kernel_from_source(kernel_name, source_code)
    if kernel.configs is None:  # another graph has the same kernel, of which a process has one
        return kernel
    compile_in = kernel._precompile_config
    results: list[Any] = []
    failure: Exception | None = None
    for configuration in kernel.configs:
        result, error = _in_one(compile_in, configuration)
        results += [] if result is None else [result]
        failure = failure or error
    if not results and failure is not None:
        raise failure
    kernel.compile_results, kernel.configs = results, None
    kernel.precompile(warm_cache_only=False, static_triton_bundle_key=CompiledTritonKernels.key(source_code))
    return kernel


def _in_one(compile_in: Callable[[Any], Any], configuration: Any) -> tuple[Any, Exception | None]:
    """A kernel in a configuration, or in the like of it with more warps; None and the first error if in none."""
    failure: Exception | None = None
    for like in _with_more_warps(configuration):
        try:
            return compile_in(like), None
        except Exception as error:
            is_failure = _FAILURE in str(error)
            if not is_failure and type(error).__name__ not in _IGNORED:
                raise
            failure = failure or error
        if not is_failure:
            break
    return None, failure


def _with_more_warps(configuration: Any) -> Generator[Any, None, None]:
    """A configuration, and the like of it with twice, four times … as many warps."""
    while configuration.num_warps <= _MOST_WARPS:
        yield configuration
        configuration = copy.copy(configuration)
        configuration.num_warps *= 2
