"""Copies on the host of large tensors on a device, which needs its memory for the tensors themselves.

While graphs are recorded and tried, arguments of a call and results of ordinary launches have to be there as well as
what replays read and write. Arguments are read where they are, and are compared with their copies afterwards; results
are on the device only while one is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from pygraph.ir.descriptors import TensorSpec
from pygraph.process.host_memory import has_room

LARGE = 2**16
"""From so many bytes on, a copy is on the host."""

_PIECE = 2**25
"""So many bytes are compared at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class HostCopy:
    """A copy on the host of a tensor's memory.

    Attributes:
        spec: The tensor.
        bytes: Its memory, from its first element to its last one.
    """

    spec: TensorSpec
    bytes: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostCopy | None:
        """Copy a tensor; None if it is too small for that, lazily conjugated or negated, or the host has no memory."""
        spec = TensorSpec.of(tensor)
        if not is_large(spec) or tensor.is_conj() or tensor.is_neg() or not has_room(spec.nbytes):
            return None
        try:
            memory = _touched(spec.nbytes)
        except RuntimeError:
            return None
        return cls(spec, memory.copy_(bytes_of(tensor)))

    def on_device(self) -> torch.Tensor:
        """A tensor with this memory on the device, beside the one that was copied."""
        flat = self.bytes.to(self.spec.device).view(self.spec.dtype)
        return flat.as_strided(self.spec.shape, self.spec.stride, 0)

    def write(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor that was copied with what it was."""
        bytes_of(tensor).copy_(self.bytes)

    def restore(self, tensor: torch.Tensor) -> bool:
        """Put back what has changed in the memory of the tensor that was copied; whether anything has."""
        has_changed = False
        memory = bytes_of(tensor)
        for start in range(0, memory.numel(), _PIECE):
            now = memory[start : start + _PIECE]
            wanted = self.bytes[start : start + _PIECE].to(self.spec.device)
            if not torch.equal(now, wanted):
                now.copy_(wanted)
                has_changed = True
        return has_changed


class OffloadedTensors:
    """Tensors of which large ones are on the host, and on the device again while they are looked at.

    Args:
        tensors: The tensors, or copies of them.

    Attributes:
        are_on_host: Whether any of them is.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | HostCopy]) -> None:
        self._kept = [one if isinstance(one, HostCopy) else HostCopy.of(one) or one for one in tensors]
        self.are_on_host = any(isinstance(one, HostCopy) for one in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> torch.Tensor:
        kept = self._kept[index]
        return kept.on_device() if isinstance(kept, HostCopy) else kept

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(len(self)))


def _touched(nbytes: int) -> torch.Tensor:
    """Bytes on the host that all threads have written to.

    A system hands out pages as they are touched, by one thread slower than a device copies: 2 GiB took 1.9 s on an
    H200's machine, and 0.3 s like this.
    """
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


def is_large(spec: TensorSpec) -> bool:
    """Whether a tensor on a device has so many bytes that there should be no second one like it."""
    return spec.device.type not in ("cpu", "meta") and spec.nbytes >= LARGE


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, from its first element to its last one."""
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.data_ptr() - storage.data_ptr()
    return memory.set_(storage, offset, (TensorSpec.of(tensor).nbytes,), (1,))  # pyright: ignore
