"""The states of random generators that attention hands from its forward to its backward.

Where they are depends on whether a graph is being captured: on the device then, else on the host (torch's "Note [Seed
and Offset Device]"). A forward and a backward that are graphs of their own need them in one place, which is the device.
Without dropout they are memory as it was found, which stands in nobody's way as zeros.
"""

from __future__ import annotations

import torch

from pygraph import ops

# Names of attention's arguments and results. Checked with torch 2.11 and 2.13.
STATES = frozenset({"philox_seed", "philox_offset"})
UNUSED_STATES = frozenset({"rng_state", "unused"})


def read(state: torch.Tensor) -> torch.Tensor:
    """The state where an operation reads it that is launched now.

    Args:
        state: It, on the device.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return state if capturing else state.cpu()


def keep(state: torch.Tensor, device: torch.device, drawn: bool) -> torch.Tensor:
    """The state on the device.

    Args:
        state: It, wherever an operation has put it.
        device: The device.
        drawn: Whether the operation has drawn random numbers.
    """
    return state.to(device, copy=True) if drawn else torch.zeros_like(state, device=device)


ops.define("state_to_read(Tensor(a) state) -> Tensor(a)", read, torch.empty_like)
ops.define("state_to_keep(Tensor state, Device device, bool drawn) -> Tensor", keep, keep)
