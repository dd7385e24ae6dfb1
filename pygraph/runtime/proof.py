"""What the proof of a plan needs: poisoned buffers, watched memory, comparison, and trials that leave no trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import is_random
from pygraph.ir.evaluate import clone_strided
from pygraph.runtime.body import RegionBody, stand_in
from pygraph.runtime.driver import Driver
from pygraph.runtime.indices import Reach

# Bytes after a result that are watched, on top of what its operation used as scratch memory.
_RED_ZONE = 256
_UNTOUCHED = 0x7F


class Undisturbed:
    """Run trials without a trace: the random generator and captured tensors that a region updates are put back."""

    def __init__(self, driver: Driver, body: RegionBody | None) -> None:
        self._driver = driver
        self._written = [] if body is None else [body.static_values[i].detach() for i in body.written_statics]

    def __enter__(self) -> Self:
        self._random = self._driver.random_state()
        self._saved = [clone_strided(tensor) for tensor in self._written]
        return self

    def __exit__(self, *error: object) -> None:
        self._driver.set_random_state(self._random)
        copy_spans(self._saved, self._written)


class Trial(Undisturbed):
    """Run a region as often as wanted, each time from the state that the call finds; at the end all is put back.

    What runs on from where an earlier run has ended may go where no call goes: a position that every run advances
    leaves its buffer, which on CUDA ends the process's use of the device.

    Args:
        driver: The device.
        body: The region.
        inputs: Its inputs, which are not changed.

    Attributes:
        inputs: The same, with copies in place of those that the region writes to.
        has_state: Whether a run leaves another state behind than it has found.
    """

    def __init__(self, driver: Driver, body: RegionBody, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(driver, body)
        self.inputs = trial_inputs(body, inputs)
        self._draws = any(is_random(node) for node in body.nodes)
        self._copies = [self.inputs[i] for i in body.written]
        self._originals = [inputs[i].detach() for i in body.written]
        self.has_state = self._draws or bool(self._copies or self._written)

    def restore(self) -> None:
        """Put back what runs have changed: written inputs and captured tensors, and the random generator if drawn from.

        That is a copy of each written tensor, all in one launch where the device can do that.
        """
        if self._draws:
            self._driver.set_random_state(self._random)
        copy_spans([*self._originals, *self._saved], [*self._copies, *self._written])


def trial_inputs(body: RegionBody, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs of a region, with copies in place of those that it writes to."""
    return [
        stand_in(tensor) if i in body.written and tensor.numel() else tensor.detach() for i, tensor in enumerate(inputs)
    ]


def copy_spans(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy the memory of tensors to that of others, which are laid out as they are."""
    pairs = [(_flat(source), _flat(target)) for source, target in zip(sources, targets, strict=True) if source.numel()]
    if len(pairs) > 1:
        # One launch on CUDA; it has no public name. Checked with torch 2.13.
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])  # pyright: ignore
    elif pairs:
        ((source, target),) = pairs
        target.copy_(source)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((TensorSpec.of(tensor).span,), (1,), tensor.storage_offset())


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A call of a region, with what ordinary launches give for it.

    Attributes:
        inputs: Its inputs, which are not changed.
        numbers: Its numbers.
        expected: Outputs, then updated inputs, then updated captured tensors.
    """

    inputs: Sequence[torch.Tensor]
    numbers: Sequence[Any]
    expected: Sequence[torch.Tensor]

    @classmethod
    def of(cls, body: RegionBody, driver: Driver, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Example:
        """Run the region with ordinary launches.

        They are the device's warm-up as well, after which the region can be recorded.
        """
        return cls(inputs, numbers, _launched(body, driver, inputs, numbers))

    def again(self, body: RegionBody, driver: Driver) -> Example:
        """The same call, with what ordinary launches give now."""
        return Example.of(body, driver, self.inputs, self.numbers)


def _launched(
    body: RegionBody, driver: Driver, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]
) -> list[torch.Tensor]:
    trial = trial_inputs(body, inputs)

    def run() -> list[torch.Tensor]:
        outputs = [clone_strided(output) if output.numel() else output for output in body.run(trial, numbers)]
        written = [trial[i].clone() for i in body.written]
        return [*outputs, *written, *(body.static_values[i].detach().clone() for i in body.written_statics)]

    with Undisturbed(driver, body):
        return driver.warm_up(run)


class RedZones:
    """Memory for results with watched bytes behind it, where a graph could write what is not its own."""

    def __init__(self) -> None:
        self._zones: list[torch.Tensor] = []

    def allocate(self, spec: TensorSpec, nbytes: int, scratch: int) -> torch.Tensor:
        """A tensor of ``spec`` in ``nbytes`` of memory; more bytes than ``scratch`` behind it are watched."""
        size = -(-nbytes // 16) * 16
        zone = torch.full((size + scratch + _RED_ZONE,), _UNTOUCHED, dtype=torch.uint8, device=spec.device)
        self._zones.append(zone[size:])
        return zone[:nbytes].view(spec.dtype).as_strided(spec.shape, spec.stride, 0)

    def untouched(self) -> bool:
        """Whether nothing was written behind any of them."""
        return all(bool((zone == _UNTOUCHED).all()) for zone in self._zones)


def poison(tensor: torch.Tensor | None, reach: Reach = Reach.NOT, safe: torch.Tensor | None = None) -> None:
    """Fill a buffer with what must not be seen again: NaN, or zeros where any other integer could be unsafe.

    Args:
        tensor: The buffer; None for one that is not there.
        reach: How its values reach an index. If they are computed with first, no value is known to be safe but those
            that the call has, and nothing can be seen of whoever reads them here.
        safe: These values.
    """
    if tensor is None or not tensor.numel():
        return
    flat = _flat(tensor)
    if reach is Reach.COMPUTED:
        assert safe is not None
        if safe.stride() == tensor.stride():
            copy_spans([safe], [tensor])
        else:
            tensor.copy_(safe)
    elif reach is Reach.NOT and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        flat.fill_(float("nan"))
    else:
        flat.zero_()  # an index of zero is in range wherever any index is


# How much further apart than some runs a replay may be from launches, and how many elements even more than that.
RUNS = 3
_FURTHER = 8.0
_FEW = 1000


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far runs of a region are apart whose results do not repeat.

    Kernels with atomics add in any order, and what follows may amplify that: a first step of Adam is the learning rate
    with the sign of the gradient, whatever its size. Then replays do not repeat either, as ordinary launches do not.
    Memory that a replay should have read or written, and has not, still shows: it is poisoned.

    Attributes:
        apart: Per result, the largest difference; for integers, the share of elements that differ.
        largest: The largest difference of any result that does not repeat, relative to the result's largest element;
            None if all repeat.
    """

    apart: tuple[float, ...]
    largest: float | None

    @classmethod
    def of(cls, first: Sequence[torch.Tensor], others: Iterable[Sequence[torch.Tensor]]) -> Spread:
        """How far the results of other runs are from those of the first."""
        apart = [0.0] * len(first)
        largest: float | None = None
        for results in others:
            for index, (got, expected) in enumerate(zip(results, first, strict=True)):
                error = _error(got, expected) if got.numel() else None
                if error is None:
                    continue
                apart[index] = max(apart[index], _size(error))
                if not agree(got, expected):
                    relative = _size(error) / max(_scale(expected), 1e-30) if error.is_floating_point() else 0.0
                    largest = max(largest or 0.0, relative)
        return cls(tuple(apart), largest)

    def and_of(self, other: Spread) -> Spread:
        """What both allow: runs of one kind may be further apart, which then says nothing of the other."""
        largest = None if self.largest is None or other.largest is None else min(self.largest, other.largest)
        return Spread(tuple(map(min, self.apart, other.apart)), largest)

    def covers(self, results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
        """Whether results are as close to those expected as runs are to each other."""
        largest = self.largest
        return largest is not None and all(
            _is_close(got, wanted, apart, largest)
            for got, wanted, apart in zip(results, expected, self.apart, strict=True)
        )


def _is_close(got: torch.Tensor, expected: torch.Tensor, apart: float, largest: float) -> bool:
    """Whether a result is close to the one expected, of which runs are ``apart``; but for a few elements of many."""
    if agree(got, expected):
        return True
    error = _error(got, expected)
    if error is None:
        return False
    few = error.numel() // _FEW
    if not error.is_floating_point():
        return int(error.sum()) <= few + _FURTHER * apart * error.numel()
    scale = _scale(expected)
    outliers = error > _tolerance(got.dtype) * scale + _FURTHER * apart
    return int(outliers.sum()) <= few and _size(error) <= _FURTHER * max(largest * scale, apart)


def _error(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | None:
    """Per element how far they are apart, or whether they differ; None if they cannot be compared."""
    if got.device != expected.device or got.dtype != expected.dtype:
        return None
    if not (got.dtype.is_floating_point or got.dtype.is_complex) or got.dtype.itemsize < 2:
        return _bits(got) != _bits(expected)
    if not torch.equal(got.isnan(), expected.isnan()):
        return None
    # The same infinities are not apart.
    return (got - expected).abs().masked_fill(got == expected, 0.0).nan_to_num(0.0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, of a dtype that can be compared: 8-bit floating point as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point else tensor


def _size(error: torch.Tensor) -> float:
    return float(error.max()) if error.is_floating_point() else float(error.float().mean())


def _scale(expected: torch.Tensor) -> float:
    """The largest element."""
    return float(torch.nan_to_num(expected.abs().float(), 0.0, 0.0, 0.0).max())


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-7, torch.complex128: 1e-7}.get(dtype, 1.3e-5)


def agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, or for floating point close: kernels with atomics do not repeat to the last bit."""
    if got.device != expected.device or got.dtype != expected.dtype:
        return False  # some operations return their random state on the host, and in a capture on the device
    if got.numel() == 0:
        return True
    if got.dtype.is_floating_point or got.dtype.is_complex:
        if got.dtype.itemsize < 2:
            return torch.equal(_bits(got), _bits(expected))
        rtol = _tolerance(got.dtype)
        return torch.allclose(got, expected, rtol=rtol, atol=rtol * max(_scale(expected), 1e-30), equal_nan=True)
    return torch.equal(got, expected)
