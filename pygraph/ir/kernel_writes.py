"""The tensors that a Triton kernel writes, read off its code by torch's analysis."""

# That analysis has no public name. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pygraph.ir.dispatch_modes import no_dispatch_modes


def jit_function(kernel: Any) -> Any:
    """The ``triton.jit`` function inside autotuners and heuristics."""
    while hasattr(kernel, "configs") or hasattr(kernel, "values"):  # an autotuner, or heuristics
        kernel = kernel.fn
    return kernel


def written_parameters(kernel: Any, meta: Mapping[str, Any]) -> list[str]:
    """Names of the tensor parameters that a kernel of Inductor's, made of a user's code, writes or may write."""
    function = jit_function(kernel)
    if function.fn is None and callable(getattr(kernel, "_reload_kernel", None)):
        function = kernel._reload_kernel().fn  # it was compiled in another process
    if function.fn is None:
        return [name for name, value in meta.items() if isinstance(value, torch.Tensor)]
    configs: Any = [made.config for made in (*kernel.launchers, *kernel.compile_results)] or kernel.configs
    return written_by(function, function, {**meta, **configs[0].kwargs})


def written_by(kernel: Any, function: Any, meta: Mapping[str, Any]) -> list[str]:
    """Names of the tensor parameters that the kernel writes, or may write."""
    tensors = [name for name, value in meta.items() if isinstance(value, torch.Tensor)]
    while kernel is not function:
        hooks = [config.pre_hook for config in getattr(kernel, "configs", ()) if config.pre_hook is not None]
        if hooks:
            return tensors  # a hook may do anything to them
        kernel = kernel.fn
    if function.pre_run_hooks:
        return tensors
    import torch._higher_order_ops.triton_kernel_wrap as wrap

    with no_dispatch_modes():
        if hasattr(wrap, "identify_accessed_tensors"):  # torch 2.13
            found = {
                write.name for write in wrap.identify_accessed_tensors(function, dict(meta), {}).read_writes.writes
            }
        else:  # torch 2.11
            found = set(wrap.identify_mutated_tensors(function, dict(meta), {}))  # pyright: ignore
    return [name for name in tensors if name in found]
