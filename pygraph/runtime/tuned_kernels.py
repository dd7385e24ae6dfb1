"""Inductor's kernels as Triton's compiled ones, of which trampolines are made.

Inductor launches its kernels by launchers of its own, which know no more than a loaded function. The source is found
again in the ``CachingAutotuner`` that has chosen the configuration; Triton has what it compiled of it on disk.
"""

# Inductor's autotuner is private, and Triton has no types. Checked with torch 2.11 and 2.13, triton 3.6 and 3.7.
# pyright: reportPrivateUsage=false, reportMissingImports=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
import threading
from collections.abc import Generator
from typing import Any

import torch

AUTOTUNER = "torch._inductor.runtime.triton_heuristics"

_PTXAS = "TRITON_PTXAS_PATH"
_LOCK = threading.Lock()


def autotuner() -> type | None:
    """Inductor's class of kernels; None if Inductor has none in this process."""
    module = sys.modules.get(AUTOTUNER)
    return None if module is None else module.CachingAutotuner


def loaded(tuner: Any) -> Any:
    """What a tuner launches, which has a ``function`` and a ``hash``; None before it has chosen a configuration."""
    if len(tuner.launchers) != 1:
        return None
    scope = tuner.launchers[0].__globals__
    return scope["bin"] if "bin" in scope else getattr(scope.get("runner"), "__self__", None)


def compiled_kernel(tuner: Any) -> Any:
    """The ``triton.compiler.CompiledKernel`` of the configuration that a tuner has chosen, not loaded.

    Returns:
        The kernel; None where what Triton makes of the source is not what the tuner launches.
    """
    kernel = loaded(tuner)
    if kernel is None:
        return None
    compiler = importlib.import_module("triton.compiler")
    config = tuner.launchers[0].config
    meta = tuner._create_compile_meta(config)
    function = tuner.fn
    if function.fn is None:  # it was compiled in another process
        function = tuner._reload_kernel().fn
    source = compiler.ASTSource(function, meta["signature"], meta["constants"], meta["configs"][0])
    target = importlib.import_module("triton.backends.compiler").GPUTarget(
        meta["device_type"], meta["cc"], tuner.device_props.warp_size or 32
    )
    options = tuner._create_compile_options(config, meta)
    built = compiler.compile(source, target=target, options=options)
    if built.hash != kernel.hash:
        with _LOCK, assembling_as_workers_do():
            built = compiler.compile(source, target=target, options=options)
    return built if built.hash == kernel.hash else None


@contextlib.contextmanager
def assembling_as_workers_do() -> Generator[None, None, None]:
    """Have Triton use the ptxas that comes with torch, as in the processes in which Inductor compiles ahead of use.

    Those have another cache key then than what this process compiles by itself, with the ptxas that comes with Triton.
    """
    ptxas = pathlib.Path(torch.__file__).parent / "bin" / "ptxas"
    if _PTXAS in os.environ or not os.access(ptxas, os.X_OK):
        yield
        return
    version = importlib.import_module("triton.backends.nvidia.compiler").get_ptxas_version  # which is remembered
    os.environ[_PTXAS] = str(ptxas)
    version.cache_clear()
    try:
        yield
    finally:
        del os.environ[_PTXAS]
        version.cache_clear()
