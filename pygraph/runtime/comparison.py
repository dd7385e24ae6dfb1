"""Comparing the results of replays with those of ordinary launches, also where neither repeats to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

# How much further apart than some runs a replay may be from launches, and how many elements even more than that.
_FURTHER = 8.0
_FEW = 1000


class Results(Protocol):
    """Results of a run, which may be somewhere else than on the device until they are looked at."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[torch.Tensor]: ...


@dataclasses.dataclass(frozen=True)
class Spread:
    """Distances between runs of a region whose results do not repeat.

    Kernels with atomics add in any order, and what follows may amplify that: a first step of Adam is the learning rate
    with the sign of the gradient, whatever its size. Then replays do not repeat either, as ordinary launches do not.
    Memory that a replay should have read or written, and has not, still shows: it is poisoned.

    Attributes:
        distances: Per result, the largest difference; for integers, the share of elements that differ.
        largest: The largest difference of any result that does not repeat, relative to the result's largest element;
            None if all repeat.
    """

    distances: tuple[float, ...]
    largest: float | None

    @classmethod
    def of(cls, first: Results, others: Iterable[Results]) -> Spread:
        """The distances of the results of other runs from those of the first."""
        distances = [0.0] * len(first)
        largest: float | None = None
        for results in others:
            for index, (got, expected) in enumerate(zip(results, first, strict=True)):
                error = _error(got, expected) if got.numel() else None
                if error is None:
                    continue
                distances[index] = max(distances[index], _size(error))
                if not agree(got, expected):
                    relative = _size(error) / max(_scale(expected), 1e-30) if error.is_floating_point() else 0.0
                    largest = max(largest or 0.0, relative)
        return cls(tuple(distances), largest)

    def minimum(self, other: Spread) -> Spread:
        """The smaller of both spreads: that one kind of runs is further apart says nothing of the other kind."""
        largest = None if self.largest is None or other.largest is None else min(self.largest, other.largest)
        return Spread(tuple(map(min, self.distances, other.distances)), largest)

    def covers(self, results: Results, expected: Results) -> bool:
        """Whether results are as close to those expected as runs are to each other."""
        largest = self.largest
        return largest is not None and all(
            _is_close(got, wanted, distance, largest)
            for got, wanted, distance in zip(results, expected, self.distances, strict=True)
        )


def _is_close(got: torch.Tensor, expected: torch.Tensor, distance: float, largest: float) -> bool:
    """Whether a result is as close to the one expected as runs are, ``distance``; but for a few elements of many."""
    if agree(got, expected):
        return True
    error = _error(got, expected)
    if error is None:
        return False
    few = error.numel() // _FEW
    if not error.is_floating_point():
        return int(error.sum()) <= few + _FURTHER * distance * error.numel()
    scale = _scale(expected)
    outliers = error > _tolerance(got.dtype) * scale + _FURTHER * distance
    return int(outliers.sum()) <= few and _size(error) <= _FURTHER * max(largest * scale, distance)


def _error(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | None:
    """The distance of each element, or whether it differs; None if the tensors cannot be compared."""
    if got.device != expected.device or got.dtype != expected.dtype:
        return None
    if _is_exact(got.dtype):
        return _comparable(got) != _comparable(expected)
    if not torch.equal(got.isnan(), expected.isnan()):
        return None
    # Equal infinities have no distance.
    return (got - expected).abs().masked_fill(got == expected, 0.0).nan_to_num(0.0)


def _is_exact(dtype: torch.dtype) -> bool:
    """Whether values are equal or not and have no distance: torch has no arithmetic for 8-bit floating point."""
    return not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that torch compares: 8-bit floating point as bytes, complex32 as pairs of float16."""
    if tensor.dtype is torch.complex32:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 2 else tensor


def _size(error: torch.Tensor) -> float:
    return float(error.max()) if error.is_floating_point() else float(error.float().mean())


def _scale(expected: torch.Tensor) -> float:
    """The largest element."""
    return float(torch.nan_to_num(expected.abs().float(), 0.0, 0.0, 0.0).max())


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-7, torch.complex128: 1e-7}.get(dtype, 1.3e-5)


def agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether tensors are equal, or close in floating point: kernels with atomics do not repeat to the last bit."""
    if got.device != expected.device or got.dtype != expected.dtype:
        return False  # some operations return their random state on the host, and in a capture on the device
    if got.numel() == 0:
        return True
    if torch.equal(_comparable(got), _comparable(expected)):
        return True
    if _is_exact(got.dtype):
        return False
    rtol = _tolerance(got.dtype)
    return torch.allclose(got, expected, rtol=rtol, atol=rtol * max(_scale(expected), 1e-30), equal_nan=True)
