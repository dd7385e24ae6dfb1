"""The backend that ``torch.compile(backend="pygraph")`` calls for each graph of Dynamo's.

Dynamo, AOTAutograd and Inductor do what they do for ``torch.compile`` itself; the callable that launches Inductor's
kernels one by one is replaced by one that replays them as CUDA graphs. A graph with host values, or with work that no
CUDA graph can hold, goes through `devicify` and `fuse` first, so that only that work runs between graphs.
"""

# Dynamo's and Inductor's entry points for backends are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.api.options import make_options, unknown_option
from pygraph.calls.options import check_flag
from pygraph.errors import ArgumentError, describe
from pygraph.interop import live
from pygraph.interop.compiled_function import without_wrappers
from pygraph.interop.compilers import Compilers, Settings, bundles_code
from pygraph.interop.graph_queries import inductor_supports
from pygraph.lowering.inductor import SETTINGS, settings, start_workers
from pygraph.process import progress
from pygraph.tracing.descriptions import described

_CALL = "torch.compile(backend='pygraph')"
# Options that are not Inductor's.
_OWN = ("max_graphs", "strict", "reuse_outputs", "mechanism", "fuse")


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's: ``torch.compile(model, backend="pygraph")``.

    Inference, and forward and backward of training, become CUDA graphs of Inductor's kernels that read their inputs
    where they are and return fresh results. Random numbers are those of eager.

    Args:
        module: The graph.
        inputs: Its example inputs.
        mode: As for ``torch.compile``; those with ``no-cudagraphs`` in their name replay nothing.
        options: ``max_graphs``, ``strict``, ``reuse_outputs`` and ``mechanism`` as in `pygraph.jit`; ``fuse`` (default
            True) as there; all others are Inductor's. ``strict`` concerns the graphs that Dynamo makes; what breaks
            a graph runs between them, of which a backend is told nothing: ``fullgraph=True`` raises there.

    Returns:
        A function of the inputs.

    Raises:
        ArgumentError: There is no such mode or option.
        FallbackError: With ``strict``, when called.

    Example:
        >>> import torch, pygraph
        >>> @torch.compile(backend=pygraph.backend)
        ... def f(x):
        ...     return torch.relu(x) + 1
        >>> f(torch.tensor([-1.0, 2.0], device=pygraph.default_device())).tolist()
        [1.0, 3.0]

    Source: PyGraph is "built atop PyTorch2's compilation framework", arXiv 2503.19779.
    """
    chosen = _settings(mode, options or {})
    _register_reset()
    compilers = Compilers(chosen, module)
    with_inductor = chosen.fuse and inductor_supports(module, inputs)
    with progress.compiling("a graph of torch.compile"):
        progress.phase("Inductor" if with_inductor else "AOTAutograd")
        made = (_with_inductor if with_inductor else _without_inductor)(compilers, module, inputs)
    if compilers.forward is None or bundles_code():
        return made
    return without_wrappers(made, compilers.forward)


def _settings(mode: str | None, options: Mapping[str, Any]) -> Settings:
    """Divide the options of a ``torch.compile`` into ours and Inductor's.

    Raises:
        ArgumentError: There is no such mode or option.
    """
    from torch._inductor import config, list_mode_options

    own = {key: options[key] for key in _OWN if key in options}
    inductor = {key.replace("-", "_"): value for key, value in options.items() if key not in _OWN}
    modes: Mapping[str, Any] = list_mode_options()
    if mode is not None and mode not in modes:
        raise ArgumentError(describe(_CALL, f"mode={mode!r}", expected=", ".join(modes)))
    known = config.get_config_copy()
    for key in inductor:
        if key not in known:
            expected = f"{', '.join(_OWN)}, or one of torch._inductor.list_options()"
            raise ArgumentError(unknown_option(_CALL, key, [*_OWN, *known], expected))
    of_mode = {key: value for key, value in (modes[mode] if mode else {}).items() if key != "triton.cudagraphs"}
    fuse = own.pop("fuse", True)
    check_flag(_CALL, "fuse", fuse)
    replay = mode is None or "no-cudagraphs" not in mode
    return Settings(make_options(_CALL, **own), fuse, replay, {**of_mode, **inductor})


def _register_reset() -> None:
    """Register the backend with Dynamo, so that it is reset too; a reset forgets it. Checked with torch 2.13."""
    known: dict[int, Any] | None = getattr(torch._dynamo.eval_frame, "cached_backends", None)
    if known is not None:
        known.setdefault(id(backend), backend)


def _with_inductor(compilers: Compilers, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of Dynamo's by Inductor: its kernels are replayed."""
    start_workers()
    from torch._inductor.compile_fx import compile_fx

    options = compilers.chosen.inductor
    with settings(**options), compilers.aot_cache(module.graph):
        made: Any = compile_fx(module, inputs, inner_compile=compilers.inductor, config_patches={**SETTINGS, **options})
        return made


def _without_inductor(compilers: Compilers, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of Dynamo's by AOTAutograd alone: its graphs are replayed as ATen operations."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode

    made: Any = aot_autograd(
        fw_compiler=compilers.aten("forward"),
        bw_compiler=compilers.aten("backward"),
        inference_compiler=compilers.aten("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    with described(detect_fake_mode(inputs)):  # kernels are the device's, and not what decompositions say
        return made(module, inputs)


backend.reset = live.reset  # pyright: ignore[reportFunctionMemberAccess]
