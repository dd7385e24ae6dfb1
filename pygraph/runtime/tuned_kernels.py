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
    """The kernel that a tuner launches, with ``function`` and ``hash``; None before it has chosen a configuration."""
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
    for assembler in (None, *_assemblers()):
        with _assembling_with(assembler):
            built = compiler.compile(source, target=target, options=options)
        if built.hash == kernel.hash:
            return built
    return None


def _assemblers() -> list[str]:
    """The files of the ptxas that Inductor may have used: torch's in its workers, either in this process."""
    theirs = pathlib.Path(torch.__file__).parent / "bin" / "ptxas"
    (folder,) = importlib.import_module("triton").__path__
    tritons = pathlib.Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
    return [str(path) for path in (theirs, tritons) if os.access(path, os.X_OK)]


@contextlib.contextmanager
def _assembling_with(ptxas: str | None) -> Generator[None, None, None]:
    """Have Triton use a ptxas, whose version is part of a kernel's cache key; None for the one that it would use.

    Triton remembers the version that it has asked for first, and Inductor may have set another path since.
    """
    if ptxas is None:
        yield
        return
    version = importlib.import_module("triton.backends.nvidia.compiler").get_ptxas_version
    with _LOCK:
        before = os.environ.get(_PTXAS)
        os.environ[_PTXAS] = ptxas
        version.cache_clear()
        try:
            yield
        finally:
            if before is None:
                del os.environ[_PTXAS]
            else:
                os.environ[_PTXAS] = before
            version.cache_clear()
