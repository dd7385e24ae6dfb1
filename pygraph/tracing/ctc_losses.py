"""``F.ctc_loss`` with lengths on the host, which torch does not describe (fake tensors of torch 2.11 to 2.13).

It would divide tensors of the device by lengths on the CPU, or read a tensor that has no memory. The steps are those of
torch's own (``LossCTC.cpp``), by the operation that takes lengths as tensors.
"""

# Arguments are of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import Any

import torch

CTC_LOSSES: tuple[Any, ...] = (torch.ctc_loss, torch.nn.functional.ctc_loss)
"""The functions that compute the loss, of which modes see the outer one first."""


def ctc_loss_of(args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The loss of a batch with lengths on the host; None for others.

    Args:
        args: The arguments of one of `CTC_LOSSES`.
        kwargs: Its keyword arguments.
    """
    given: dict[str, Any] = {**_DEFAULTS, **dict(zip(_NAMES, args, strict=False)), **kwargs}
    log_probs, targets, *lengths = (given.get(name) for name in _NAMES[:4])
    if not isinstance(log_probs, torch.Tensor) or log_probs.dim() != 3 or not all(map(_is_on_host, lengths)):
        return None
    reduction = given["reduction"] if isinstance(given["reduction"], int) else _REDUCTIONS.get(given["reduction"])
    if not isinstance(targets, torch.Tensor) or reduction is None:
        return None  # torch says what is wrong
    inputs, labels = map(_as_tensor, lengths)
    moved, options = targets.to(log_probs.device, torch.long), (given["blank"], given["zero_infinity"])
    losses = torch.ops.aten._ctc_loss.Tensor(log_probs, moved, inputs, labels, *options)[0]
    if given["zero_infinity"]:
        losses = torch.where(losses == torch.inf, torch.zeros_like(losses), losses)
    if reduction == _REDUCTIONS["mean"]:
        return (losses / labels.to(losses.device, losses.dtype).clamp_min(1)).mean()
    return losses.sum() if reduction == _REDUCTIONS["sum"] else losses


_NAMES = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
_DEFAULTS = {"blank": 0, "reduction": "mean", "zero_infinity": False}
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _as_tensor(lengths: Any) -> torch.Tensor:
    """Lengths as a tensor on the host, that of numbers which change from call to call as well."""
    if isinstance(lengths, torch.Tensor):
        return lengths
    scalar: Any = torch.ops.pygraph.scalar
    return torch.stack([scalar(one, dtype=torch.long, device=torch.device("cpu")) for one in lengths])


def _is_on_host(lengths: Any) -> bool:
    return lengths.is_cpu if isinstance(lengths, torch.Tensor) else isinstance(lengths, (list, tuple))
