"""Batch normalization whose momentum is a live number, as of a model in which it decays from epoch to epoch.

torch's operation takes the momentum by value. It runs with a momentum of one, which gives the statistics of the batch,
and these are mixed with the running ones by operations that take a live number.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from pygraph.tracing.live_numbers import LiveFloat

BATCH_NORMS: tuple[Any, ...] = (torch.batch_norm, torch.nn.functional.batch_norm)
"""The functions that normalize a batch, of which modes see the outer one first."""


def batch_norm_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of a batch normalization with a live momentum.

    Args:
        func: One of `BATCH_NORMS`.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result, with the running statistics updated; None for another momentum.
    """
    given: dict[str, Any] = {**dict(zip(_NAMES[func], args, strict=False)), **kwargs}
    momentum: Any = given.get("momentum")
    running: list[Any] = [given.get("running_mean"), given.get("running_var")]
    if type(momentum) not in (torch.SymFloat, LiveFloat):
        return None
    if not given.get("training") or any(one is None for one in running):
        return func(**{**given, "momentum": 0.0})  # nobody reads it
    of_batch = {name: torch.zeros_like(given[name]) for name in ("running_mean", "running_var")}
    result = func(**{**given, **of_batch, "momentum": 1.0})
    with torch.no_grad():
        for old, new in zip(running, of_batch.values(), strict=True):
            old.mul_(1.0 - momentum).add_(new * momentum)
    return result


# The parameters of the functions, of which the first is written in C++; checked with torch 2.11 and 2.13.
_NAMES: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: (
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled",
    ),
    torch.nn.functional.batch_norm: tuple(inspect.signature(torch.nn.functional.batch_norm).parameters),
}  # fmt: skip
