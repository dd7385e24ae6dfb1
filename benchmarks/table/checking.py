"""Distances of results from eager in float32, and whether they are near enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.table.setting import Iteration, Setting, in_float32, tensors

LEAST_TOLERANCE = 2e-2
"""Distances up to this are right: bfloat16 has 8 bits, and layers add up what they round."""

STEPS = 6
"""Steps of training whose losses are compared."""

_NO_DIGIT = 0.5
"""The distance of eager in bfloat16 beyond which it has no digit right, so that nearly everything is."""

_PIECE = 1 << 24
"""Elements that are compared at a time, so that gigabytes of logits need no more of them."""

Result = list[torch.Tensor]


def distance(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest relative norm of a difference between tensors; infinite if their number or shapes differ.

    Of integers and booleans the share of elements that differ. Equal infinities do not differ, nor do two NaN.

    >>> distance([torch.tensor([3.0, 4.5])], [torch.tensor([3.0, 4.0])])
    0.1
    >>> distance([torch.tensor([1, 2])], [torch.tensor([1, 3])]), distance([], [torch.ones(1)])
    (0.5, inf)
    """
    if len(found) != len(wanted) or any(a.shape != b.shape for a, b in zip(found, wanted, strict=True)):
        return math.inf
    return max((_distance(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if not found.numel():
        return 0.0
    if found.device.type != "cuda":
        found = found.cpu()
    is_exact = not (wanted.is_floating_point() or wanted.is_complex())
    difference = size = 0.0
    for own, other in zip(found.detach().reshape(-1).split(_PIECE), wanted.reshape(-1).split(_PIECE), strict=True):
        other = other.to(own.device)
        if is_exact:
            difference += (own != other).sum().item()
            continue
        own, other = own.float(), other.float()
        same = (own == other) | (own.isnan() & other.isnan())
        difference += torch.where(same, 0.0, own - other).square().sum(dtype=torch.float64).item()
        size += torch.where(other.isfinite(), other, 0.0).square().sum(dtype=torch.float64).item()
    if is_exact:
        return difference / found.numel()
    if not math.isfinite(difference):
        return math.inf
    return math.sqrt(difference / size) if size else math.sqrt(difference)


def loss_distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of losses; infinite where one is not finite.

    >>> loss_distance([2.0, 1.1], [2.0, 1.0]) < 0.11
    True
    """
    pairs = list(zip(found, wanted, strict=True))
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)


@dataclasses.dataclass
class Reference:
    """The results that others are compared with.

    Attributes:
        name: How they were computed.
        results: Results for the first and the last batch, on the CPU; or the losses of the first steps.
        tolerance: The largest distance of a right result.
        spread: How far results with other random numbers are; 0 if the row draws none.
    """

    name: str
    results: Any
    tolerance: float
    spread: float = 0.0

    def check(self, far: float, draws_otherwise: bool = False) -> dict[str, Any]:
        """A distance, null if results have other shapes or are not finite, and whether it is that of right results."""
        tolerance = max(self.tolerance, 2 * self.spread if draws_otherwise else 0.0)
        return {"distance": far if math.isfinite(far) else None, "right": far <= tolerance}

    def distance_of(self, run: Iteration, setting: Setting) -> float:
        """How far the results of a forward are from these, for the first and the last batch."""
        return max(distance(found, wanted) for found, wanted in zip(_outputs(run, setting), self.results, strict=True))


def _outputs(run: Iteration, setting: Setting, seed: int = 0) -> Iterator[Result]:
    """Outputs for the first and the last batch, with random numbers of a seed; each must be used before the next."""
    for batch in (setting.batches[0], setting.batches[-1]):
        torch.manual_seed(seed)
        yield tensors(run(batch))


def _in_float32(setting: Setting) -> list[Result]:
    """Results of the model and the batches in float32, on the CPU."""
    exact = setting.iteration(setting.model(torch.float32))
    return _on_cpu(_outputs(lambda batch: exact(in_float32(batch)), setting))


def _on_cpu(outputs: Iterator[Result]) -> list[Result]:
    return [[x.cpu() for x in output] for output in outputs]


def losses_of(run: Iteration, setting: Setting, seed: int = 0) -> list[float]:
    """The losses of the first steps, with random numbers of a seed."""
    torch.manual_seed(seed)
    losses = [run(setting.batches[i % len(setting.batches)]) for i in range(STEPS)]
    return [float(loss) for loss in losses]


def reference(setting: Setting) -> Reference:
    """Results of eager in float32; the tolerance is twice the distance of eager in bfloat16 from it.

    The weights and inputs are rounded to bfloat16 in both. Where shapes depend on values (boxes that a detector finds)
    the two have different shapes, and results are compared with eager in bfloat16.
    """
    if setting.training:
        return _reference_losses(setting)
    found = Reference("eager in float32", _in_float32(setting), 0.0)
    if not any(x.any() for output in found.results for x in output):
        found.name += ", all of which is 0"
    eager = setting.iteration(setting.model())
    own = found.distance_of(eager, setting)
    rounded = Reference("eager in bfloat16", _on_cpu(_outputs(eager, setting)), LEAST_TOLERANCE)
    other = max(map(distance, _outputs(eager, setting, seed=1), rounded.results))
    if not math.isfinite(own):
        return dataclasses.replace(rounded, spread=_spread(other, 0.0))
    if own > _NO_DIGIT:
        found.name += f", from which bfloat16 is {own:.1e} away"
    return dataclasses.replace(found, tolerance=max(2 * own, LEAST_TOLERANCE), spread=_spread(other, own))


def _reference_losses(setting: Setting) -> Reference:
    """Losses of eager without autocast, with the same seed."""
    model = setting.model()
    wanted = losses_of(setting.iteration(model, autocast=False), setting)
    model = setting.model()
    eager = losses_of(setting.iteration(model), setting)
    model = setting.model()
    other = losses_of(setting.iteration(model), setting, seed=1)
    own, spread = loss_distance(eager, wanted), loss_distance(other, eager)
    if not math.isfinite(own):
        return Reference("eager with autocast", eager, LEAST_TOLERANCE, _spread(spread, 0.0))
    return Reference("eager in float32", wanted, max(2 * own, LEAST_TOLERANCE), _spread(spread, own))


def _spread(other: float, own: float) -> float:
    """The distance that another seed makes; 0 where that is no more than rounding, as no random numbers are drawn."""
    return other if math.isfinite(other) and other > max(own / 4, 1e-4) else 0.0
