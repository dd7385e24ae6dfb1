"""Random tensors for batches and the host's part of them."""

from __future__ import annotations

import torch

HOST = torch.device("cpu")


class Draws:
    """Random tensors on a device: the same for the same seed, device and dtype.

    They are drawn on the device itself where it is a CPU or a GPU, for some batches have gigabytes.
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._drawn_on = self.device if self.device.type in ("cpu", "cuda") else HOST
        self._generator = torch.Generator(self._drawn_on).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Numbers of the standard normal distribution."""
        drawn = torch.randn(shape, generator=self._generator, device=self._drawn_on, dtype=dtype or self.dtype)
        return drawn.to(self.device)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Numbers between two bounds."""
        drawn = torch.rand(shape, generator=self._generator, device=self._drawn_on, dtype=dtype or self.dtype)
        return (drawn * (high - low) + low).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers from a lower bound to below an upper one, as int64."""
        return torch.randint(low, high, shape, generator=self._generator, device=self._drawn_on).to(self.device)
