"""The state of torch while a function is traced: fake tensors on, launches and caches of real values off."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # checked with torch 2.11 and 2.13

from pygraph.tracing import fx_notes
from pygraph.tracing.patches import patched
from pygraph.tracing.triton_launches import launches_recorded


@contextlib.contextmanager
def fake_tracing(mode: FakeTensorMode) -> Generator[None, None, None]:
    """Switch fake tensors on, and launches and torch's caches off, which would bake values in or keep fake tensors."""
    autocast_cache = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with mode, launches_recorded(), patched(), fx_notes.separated():
            yield
    finally:
        torch.set_autocast_cache_enabled(autocast_cache)
