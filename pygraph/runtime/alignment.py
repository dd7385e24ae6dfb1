"""Alignment of tensors' memory, by which libraries choose kernels, and copies that are aligned alike."""

from __future__ import annotations

import torch

from pygraph.ir.descriptors import TensorSpec

ALIGNMENT = 256
"""Kernels are chosen for alignments up to this many bytes; more makes no difference."""

WIDEST_LOAD = 16
"""Bytes of the widest load of a GPU thread."""


def alignment_of(address: int) -> int:
    """The alignment of an address, as far as kernels are chosen for it or for a view that begins behind it.

    The largest power of two up to `ALIGNMENT` that divides it; what it is more than a multiple of `WIDEST_LOAD`, if it
    is none: behind one that is 4 more lies a multiple at another distance than behind one that is 12 more.
    """
    return address % WIDEST_LOAD or (min(address & -address, ALIGNMENT) if address else ALIGNMENT)


def is_aligned(address: int, needed: int) -> bool:
    """Whether an address will do where one of this `alignment_of` was."""
    return address % needed == 0 if needed >= WIDEST_LOAD else address % WIDEST_LOAD == needed


def copy_span(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the whole memory span of one tensor to that of another with the same strides."""
    span = TensorSpec.of(source).span
    flat = source.as_strided((span,), (1,), source.storage_offset())
    target.as_strided((span,), (1,), target.storage_offset()).copy_(flat)


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in other memory, with the same strides and, on a device, the same alignment."""
    spec = TensorSpec.of(tensor)
    # Host memory starts where its storage does: torch's set_rng_state (2.13) reads a state from there, wherever it is.
    host = tensor.device.type == "cpu"
    shift = 0 if host else alignment_of(tensor.data_ptr()) % ALIGNMENT // tensor.element_size()
    flat = torch.empty(spec.span + shift, dtype=spec.dtype, device=spec.device)
    copy = flat.as_strided(spec.shape, spec.stride, shift)
    copy_span(tensor.detach(), copy)
    return copy
