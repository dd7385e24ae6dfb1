"""Distances of results from eager in float32, and whether they are near enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.table.setting import Iteration, Setting, in_float32, synchronize, tensors

LEAST_TOLERANCE = 2e-2
"""Distances up to this are right: bfloat16 has 8 bits, and layers add up what they round."""

STEPS = 6
"""Steps of training whose losses are compared."""

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
    found, wanted = found.detach(), wanted.to(found.device)
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return (found != wanted).float().mean().item()
    found, wanted = found.float(), wanted.float()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    difference = torch.where(same, 0.0, found - wanted).norm().item()
    size = torch.where(wanted.isfinite(), wanted, 0.0).norm().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else difference


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
        results: Results for the first and the last batch; or the losses of the first steps.
        tolerance: The largest distance of a right result.
        spread: How far losses with other random numbers are; 0 if the row draws none.
    """

    name: str
    results: Any
    tolerance: float
    spread: float = 0.0

    def check(self, results: Any, draws_otherwise: bool = False) -> dict[str, Any]:
        """The distance of results, null if they have other shapes, and whether they are right."""
        far = (
            loss_distance(results, self.results) if isinstance(results[0], float) else _farthest(results, self.results)
        )
        tolerance = max(self.tolerance, 2 * self.spread if draws_otherwise else 0.0)
        return {"distance": far if math.isfinite(far) else None, "right": far <= tolerance}


def _farthest(found: Sequence[Result], wanted: Sequence[Result]) -> float:
    return max(distance(a, b) for a, b in zip(found, wanted, strict=True))


def results_of(run: Iteration, setting: Setting) -> list[Result]:
    """Results for the first and the last batch, on the CPU: the next call may overwrite them."""
    return [[x.detach().cpu() for x in tensors(run(setting.batches[i]))] for i in (0, -1)]


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
    model = setting.model(torch.float32)
    exact = setting.iteration(model)
    wanted = [[x.cpu() for x in tensors(exact(in_float32(setting.batches[i])))] for i in (0, -1)]
    del model, exact
    eager = results_of(setting.iteration(setting.model()), setting)
    own = _farthest(eager, wanted)
    synchronize(setting.device)
    if not math.isfinite(own):
        return Reference("eager in bfloat16", eager, LEAST_TOLERANCE)
    return Reference("eager in float32", wanted, max(2 * own, LEAST_TOLERANCE))


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
        return Reference("eager with autocast", eager, LEAST_TOLERANCE, spread)
    spread = spread if math.isfinite(spread) and spread > max(own / 4, 1e-4) else 0.0
    return Reference("eager in float32", wanted, max(2 * own, LEAST_TOLERANCE), spread)
