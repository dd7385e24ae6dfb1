"""Parameter bytes of the emulated device's kernels, laid out like the argument buffer of a CUDA kernel.

The bytes of one node::

    header | pointer, number of elements [, stale word] | ... | scalar as C bytes [, stale bytes] | ... | stale word

A replay takes its pointers and scalars from these bytes, so a word that was not patched reads old memory. As in real
argument buffers there is padding, and it holds leftovers: addresses of tensors used earlier, now and then
that of an operand. Only a word that moved with an operand between two recordings says anything.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import collections
import dataclasses
import struct
import zlib
from typing import Any, Final, Protocol

import torch

from pygraph.runtime.emulated import tensors as memory

_ALIGNMENT: Final = 16  # the widest load of a GPU thread


class StaleWords:
    """The contents of padding: addresses of tensors of earlier kernels, in no order."""

    def __init__(self) -> None:
        self._addresses: collections.deque[int] = collections.deque([0x7F00_0000_0000], maxlen=64)
        self._state = 1

    def word(self) -> bytes:
        """Eight bytes of padding."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX generator
        return struct.pack("<Q", self._addresses[(self._state >> 33) % len(self._addresses)])

    def add(self, address: int) -> None:
        """Add an address that padding may hold from now on."""
        self._addresses.append(address)


stale_words: Final = StaleWords()


class Leaf(Protocol):
    """One argument of a kernel, as it is in a node's bytes or beside them."""

    def read(self, params: bytes, pointers: bytes) -> Any:
        """The value for a replay."""
        ...


@dataclasses.dataclass(frozen=True)
class _Constant:
    """An argument that is no data: a dtype, None, a flag."""

    value: Any

    def read(self, params: bytes, pointers: bytes) -> Any:
        return self.value


@dataclasses.dataclass(frozen=True)
class _Number:
    """A Python number as a C ``double``, ``long`` or two doubles."""

    offset: int
    format: str

    def read(self, params: bytes, pointers: bytes) -> Any:
        parts = struct.unpack_from(self.format, params, self.offset)
        return complex(*parts) if len(parts) == 2 else parts[0]


@dataclasses.dataclass(frozen=True)
class _HostScalar:
    """A number in a tensor dtype: a 0-d CPU tensor, or (``plain``) a Python number."""

    offset: int
    dtype: torch.dtype
    plain: bool

    def read(self, params: bytes, pointers: bytes) -> Any:
        data = bytearray(params[self.offset : self.offset + self.dtype.itemsize])
        scalar = torch.frombuffer(data, dtype=self.dtype)[0]
        return scalar.item() if self.plain else scalar


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor of the device: everything but its address."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    alignment: int
    conjugate: bool = False
    negative: bool = False

    def read(self, params: bytes, pointers: bytes) -> torch.Tensor:
        """The memory at the address in the bytes as a CPU tensor."""
        address = self.address(pointers)
        view = memory.host_view_at(address, self.shape, self.stride, self.dtype)
        view = view.conj() if self.conjugate else view
        return torch._neg_view(view) if self.negative else view

    def address(self, pointers: bytes) -> int:
        """The address in the bytes, if a tensor may be there."""
        (address,) = struct.unpack_from("<Q", pointers, self.offset)
        if 0 in self.shape:
            return 0
        if address % self.alignment:
            raise RuntimeError(
                f"emu error: misaligned address: {address:#x} is no multiple of {self.alignment}, as when recorded"
            )
        memory.allocator.check_range(address, memory.span_bytes(self.shape, self.stride, self.dtype))
        return address


def operand_at(offset: int, tensor: torch.Tensor) -> Operand:
    """A plain tensor of the device whose address is at this offset of the bytes."""
    address = tensor.data_ptr()
    stale_words.add(address)
    return Operand(offset, tuple(tensor.shape), tensor.stride(), tensor.dtype, min(_ALIGNMENT, address & -address))


class Packer:
    """Lays out the parameters of one node."""

    def __init__(self, name: str, *, hidden: bool) -> None:
        self._hash = zlib.crc32(name.encode())
        self._hidden = hidden
        self.params = bytearray(struct.pack("<QQ", self._hash, 0))
        self.pointers = bytearray() if hidden else self.params
        if hidden:
            self.params += bytes(8)  # of the table, known at the end
        self.addresses: list[int] = []

    def tensor(self, tensor: torch.Tensor) -> Operand:
        """Lay out the pointer of a tensor of the device."""
        address = tensor.data_ptr()
        offset = len(self.pointers)
        self.pointers += struct.pack("<QQ", address, tensor.numel())
        if self._hash >> len(self.addresses) % 32 & 1:
            self.pointers += stale_words.word()
        self.addresses.append(address)
        return Operand(
            offset,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            min(_ALIGNMENT, address & -address) if address else 1,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def scalar(self, value: torch.Tensor, *, plain: bool) -> _HostScalar:
        """Lay out a 0-d CPU tensor, which a replay reads as a Python number if ``plain``."""
        data = bytes(value.contiguous().reshape(1).view(torch.uint8).tolist())
        return _HostScalar(self._bytes(data), value.dtype, plain)

    def leaf(self, value: Any, fill: torch.dtype | None) -> Leaf:
        """Lay out one argument; numbers in the dtype ``fill`` where the kernel takes them so."""
        if memory.is_emulated(value):
            return self.tensor(value)
        if isinstance(value, torch.Tensor):
            return self.scalar(value, plain=False)
        if isinstance(value, (int, float, complex)) and fill is not None:
            return self.scalar(torch.full((), value, dtype=fill, device="cpu"), plain=True)
        if isinstance(value, float):
            return _Number(self._bytes(struct.pack("<d", value)), "<d")
        if isinstance(value, complex):
            return _Number(self._bytes(struct.pack("<dd", value.real, value.imag)), "<dd")
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return _Number(self._bytes(struct.pack("<q", value)), "<q")
        return _Constant(torch.device("cpu") if isinstance(value, torch.device) else value)

    def finish(self) -> torch.Tensor | None:
        """Pad the parameters; returns the table of the pointers if they are hidden."""
        table = None
        if self._hidden:
            # Outside the recording's pool, where earlier nodes of the graph may write before this one reads it.
            pool, memory.allocator.current = memory.allocator.current, memory.allocator.default
            try:
                table = memory.allocate((len(self.pointers),), (1,), torch.uint8, own=False)
            finally:
                memory.allocator.current = pool
            struct.pack_into("<Q", self.params, 16, table.data_ptr())
        self.params += stale_words.word()
        for address in self.addresses:
            stale_words.add(address)
        return table

    def _bytes(self, data: bytes) -> int:
        offset = len(self.params)
        self.params += data
        self.params += stale_words.word()[: -len(data) % 8]
        return offset
