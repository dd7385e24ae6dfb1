"""The CTC loss as operations whose results have sizes that the sizes of their arguments decide.

``aten::_ctc_loss`` gives, for its backward alone, a tensor as wide as the longest target of the call. Here it is as
wide as a target may be, and the backward cuts it off. Both read lengths on the host, so they run between graphs.

================================  ==========================================================================
``pygraph::ctc_loss``             losses ``[N]``, and what the backward needs, ``[N, T, 2 * S + 1]``
``pygraph::ctc_loss_backward``    the gradient of the log probabilities ``[T, N, C]``
================================  ==========================================================================
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any

import torch

from pygraph.ir.ops import define

aten = torch.ops.aten


def of_static_size(func: Any) -> Any:
    """The operation of this module that does what one of aten's does; another one as it is."""
    return _OPERATIONS.get(func, func)


def _width(targets: torch.Tensor) -> int:
    """As many states as the longest possible target has: its labels, with blanks around them."""
    return 2 * targets.shape[-1] + 1


def _loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = input_lengths.tolist(), target_lengths.tolist()
    losses, alpha = aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)
    return losses, torch.nn.functional.pad(alpha, (0, _width(targets) - alpha.shape[-1]))


def _loss_fake(log_probs: torch.Tensor, targets: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    del others
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, _width(targets))


def _backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    losses: torch.Tensor,
    alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> torch.Tensor:
    lengths = input_lengths.tolist(), target_lengths.tolist()
    alpha = alpha[..., : 2 * max(lengths[1], default=0) + 1].contiguous()
    return aten._ctc_loss_backward.default(grad, log_probs, targets, *lengths, losses, alpha, blank, zero_infinity)


def _backward_fake(grad: torch.Tensor, log_probs: torch.Tensor, *others: Any) -> torch.Tensor:
    del grad, others
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


_LENGTHS = "Tensor input_lengths, Tensor target_lengths"
define(
    f"ctc_loss(Tensor log_probs, Tensor targets, {_LENGTHS}, int blank=0, bool zero_infinity=False)"
    " -> (Tensor, Tensor)",
    _loss, _loss_fake,
)  # fmt: skip
define(
    f"ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, {_LENGTHS}, Tensor losses, Tensor alpha, "
    "int blank, bool zero_infinity=False) -> Tensor",
    _backward, _backward_fake,
)  # fmt: skip

_OPERATIONS: dict[Any, Any] = {
    aten._ctc_loss.Tensor: torch.ops.pygraph.ctc_loss.default,
    aten._ctc_loss_backward.Tensor: torch.ops.pygraph.ctc_loss_backward.default,
}
