"""A row's model and batches on the device, and one iteration of it: a forward, or a step of training."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.table.workload import Batch, Task, Workload

Iteration = Callable[[Batch], Any]
"""One iteration on a batch: the outputs of a forward, or the loss of a step."""

MOST_BYTES = 8 << 30
"""Bytes of the device that the batches of a row may take, in all of its processes."""

FEWEST_BATCHES = 2


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in dictionaries, sequences and dataclasses, in order.

    >>> [x.item() for x in tensors({"a": torch.tensor(1), "b": [None, (torch.tensor(2), 3)]})]
    [1, 2]
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, list | tuple):
        return [found for one in value for found in tensors(one)]
    return []


def device_bytes(value: Any) -> int:
    """Bytes of the tensors that are not on the CPU."""
    return sum(x.numel() * x.element_size() for x in tensors(value) if x.device.type != "cpu")


def number_of_batches(wanted: int, bytes_each: int, most: int = MOST_BYTES) -> int:
    """How many batches are made: as many as are wanted, or fit.

    >>> number_of_batches(100, 1 << 20), number_of_batches(100, 1 << 30), number_of_batches(2, 1)
    (100, 8, 2)
    """
    return min(wanted, max(FEWEST_BATCHES, most // max(bytes_each, 1)))


class Setting:
    """A row on a device.

    Args:
        workload: The row.
        small: Whether the model is the small one, for tests.
        device: The device.
        inputs: How many batches are wanted.
        processes: How many processes have the row on the device.

    Attributes:
        task: The model and its batches.
        training: Whether an iteration is a step of training.
        device: The device.
        batches: The batches, each at other addresses.
    """

    def __init__(self, workload: Workload, small: bool, device: torch.device, inputs: int, processes: int = 1) -> None:
        torch.manual_seed(0)
        self.task: Task = workload.make(small)
        self.training, self.device = workload.training, device
        self._dtype = torch.float32 if workload.training else torch.bfloat16
        first = self._batch(0)
        count = number_of_batches(inputs, processes * device_bytes(first))
        self.batches = [first, *(self._batch(seed) for seed in range(1, count))]

    def _batch(self, seed: int) -> Batch:
        return self.task.batch(seed, self.device, self._dtype)

    @property
    def input_bytes(self) -> int:
        """Bytes of the tensors of one batch on the device."""
        return device_bytes(self.batches[0])

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A copy of the model with the same weights, on the device, in training or evaluation mode.

        In inference the weights are rounded to bfloat16 also where ``dtype`` is another one.
        """
        model = copy.deepcopy(self.task.model).to(self.device).to(self._dtype)
        return (model if dtype is None else model.to(dtype)).train(self.training)

    def iteration(self, model: nn.Module, call: Callable[..., Any] | None = None, autocast: bool = True) -> Iteration:
        """One iteration of a model.

        Args:
            model: The model; an optimizer updates its parameters in training.
            call: A function to call instead of it, as the compiled model.
            autocast: Whether training computes in bfloat16 where autocast wants so.
        """
        run = model if call is None else call
        if not self.training:
            return _forward(run)
        loss_of, kind = self.task.loss, self.device.type
        assert loss_of is not None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)

        def step(batch: Batch) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast(kind, torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = loss_of(run(**batch), batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step


def _forward(run: Callable[..., Any]) -> Iteration:
    def forward(batch: Batch) -> Any:
        with torch.no_grad():
            return run(**batch)

    return forward


def in_float32(batch: Batch) -> Batch:
    """The batch with its bfloat16 tensors, also those inside of containers, in float32."""
    return {name: _in_float32(value) for name, value in batch.items()}


def _in_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if isinstance(value, dict):
        return in_float32(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_in_float32(one) for one in value)
    return value


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything; the emulated one always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
