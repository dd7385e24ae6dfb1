"""Memory of the emulated device: a caching allocator with private pools over host memory.

It follows PyTorch's CUDA caching allocator where graphs can see the difference: blocks are multiples of 512 bytes,
the best fitting free block is taken and split, neighbours are joined again, and a pool that recorded graphs use
keeps its memory to itself. Unlike there, memory without an owner (not even a graph) is filled with 0xFF (NaN, or -1),
so that a kernel that reads it through a stale pointer computes nonsense instead of the right numbers by accident. No
memory is ever given back to the operating system: a stale address never faults.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override  # torch depends on it

from pygraph.process.collection import no_collection
from pygraph.runtime.driver import Pool

GRANULE = 512
"""Every block starts at, and is as long as, a multiple of this many bytes."""

POISON = 0xFF
"""The value of every byte of memory that has no owner."""

_SMALL = 1 << 20  # requests up to this size share segments of _SEGMENT bytes, as in CUDACachingAllocator.cpp
_SEGMENT = 2 << 20

Bytes = npt.NDArray[np.uint8]


class Segment:
    """One piece of host memory, cut into blocks.

    Attributes:
        small: Whether it serves small requests.
        owned: Per granule, whether the recording in progress has allocated it.
    """

    def __init__(self, nbytes: int, small: bool, pool: EmulatedPool) -> None:
        raw = np.empty(nbytes + GRANULE, np.uint8)
        skip = -raw.ctypes.data % GRANULE
        self.bytes: Bytes = raw[skip : skip + nbytes]
        self.bytes.fill(POISON)
        self.base = int(self.bytes.ctypes.data)
        self.nbytes = nbytes
        self.small = small
        self.pool = pool
        self.first = Block(self, self.base, nbytes)
        self.owned = np.zeros(nbytes // GRANULE, np.bool_)

    def granules(self, address: int, nbytes: int) -> slice:
        """The part of ``owned`` that describes these bytes."""
        start = address - self.base
        return slice(start // GRANULE, -(-(start + nbytes) // GRANULE))


class Block:
    """A run of bytes in a segment, free or in use, linked to its neighbours there."""

    __slots__ = ("address", "after", "before", "free", "nbytes", "requested", "segment")

    def __init__(self, segment: Segment, address: int, nbytes: int) -> None:
        self.segment = segment
        self.address = address
        self.nbytes = nbytes
        self.requested = 0
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None


class EmulatedPool(Pool):
    """Memory that only allocations of one owner use.

    Attributes:
        owned: The pieces of host memory.
        holds: Recordings in progress and recorded graphs alive; while there are any, no memory leaves the pool.
    """

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self._allocator = allocator
        self.owned: list[Segment] = []
        self.free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # small or not: (size, address)
        self.holds = 0

    @override
    def segments(self) -> list[tuple[int, int]]:
        self._allocator.settle()
        return [(segment.base, segment.nbytes) for segment in self.owned]

    @override
    def order(self) -> None:
        """Nothing to do: the emulated device has one stream."""


class Allocator:
    """A caching allocator, described by the module."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # taken without collections: a finalizer may want memory
        self._bases: list[int] = []
        self._segments: list[Segment] = []  # of all pools, by address, as _bases
        self._live = 0
        self._total = 0
        # Arrays die at any time, in the garbage collector too, where no lock may be taken: blocks are put here
        # and given back at the next call.
        self._dead: collections.deque[Block] = collections.deque()
        self._released: collections.deque[EmulatedPool] = collections.deque()
        self.default = EmulatedPool(self)
        self.current = self.default
        self.freed: list[tuple[int, int]] | None = None
        """Address and size of every block that died since this was set to a list."""

    def allocate(self, nbytes: int, *, own: bool = True) -> Bytes:
        """Bytes from the current pool, in use until the array and every tensor over it is gone.

        While a recording is in progress the memory counts as the recording's own unless ``own`` is false.
        """
        with self.lock, no_collection():
            self.settle()
            block = self._take(max(GRANULE, -(-nbytes // GRANULE) * GRANULE))
            block.requested = nbytes
            self._live += nbytes
            self._total += nbytes
            segment = block.segment
            start = block.address - segment.base
            segment.owned[segment.granules(block.address, block.nbytes)] = own and self.current is not self.default
            array = segment.bytes[start : start + nbytes]
            weakref.finalize(array, self._die, block).atexit = False
            return array

    def live_bytes(self) -> int:
        """Requested bytes of all blocks in use."""
        with self.lock, no_collection():
            self.settle()
            return self._live

    def total_bytes(self) -> int:
        """Requested bytes of all blocks ever handed out."""
        return self._total

    def segment_at(self, address: int, nbytes: int) -> Segment | None:
        """The segment that all of these bytes are in."""
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        return segment if address + nbytes <= segment.base + segment.nbytes else None

    def check_range(self, address: int, nbytes: int) -> None:
        """Raise what CUDA reports for an access outside of the device's memory."""
        if nbytes and self.segment_at(address, nbytes) is None:
            raise RuntimeError(
                f"emu error: an illegal memory access was encountered: {nbytes} bytes at {address:#x} are not memory "
                "of the emulated device"
            )

    def release(self, pool: EmulatedPool) -> None:
        """Take back one of the pool's holds; safe in a finalizer."""
        self._released.append(pool)

    def poison_owned(self, pool: EmulatedPool) -> None:
        """Poison the memory that the recording in progress has allocated, and end its ownership."""
        with self.lock, no_collection():
            for segment in pool.owned:
                segment.bytes.reshape(-1, GRANULE)[segment.owned] = POISON
                segment.owned.fill(False)

    def settle(self) -> None:
        """Give back the memory of arrays that have died, and the holds released, since the last call."""
        if not self._dead and not self._released:
            return
        with self.lock, no_collection():
            trim: list[EmulatedPool] = []
            while self._released:
                pool = self._released.popleft()
                pool.holds -= 1
                trim.append(pool)
            while self._dead:
                block = self._dead.popleft()
                self._live -= block.requested
                self._give_back(block)
                trim.append(block.segment.pool)
            for pool in dict.fromkeys(trim):
                if pool.holds == 0 and pool is not self.default:
                    self._trim(pool)

    # ---- blocks ------------------------------------------------------------------------------------------------

    def _die(self, block: Block) -> None:
        # Not in a graph's memory: a tensor may die late, in another thread or a collection, while a replay uses it.
        if not block.segment.pool.holds:
            ctypes.memset(block.address, POISON, block.nbytes)
        if self.freed is not None:
            self.freed.append((block.address, block.nbytes))
        self._dead.append(block)

    def _take(self, nbytes: int) -> Block:
        """The best fitting free block of the current pool, cut to ``nbytes``."""
        small = nbytes <= _SMALL
        free = self.current.free[small]
        index = bisect.bisect_left(free, nbytes, key=_size)
        if index == len(free):
            segment = self._segment(_SEGMENT if small else -(-nbytes // _SEGMENT) * _SEGMENT, small)
            block = segment.first
        else:
            block = free.pop(index)[2]
        block.free = False
        rest = block.nbytes - nbytes
        if rest >= (GRANULE if small else _SMALL):
            tail = Block(block.segment, block.address + nbytes, rest)
            tail.before, tail.after, block.after, block.nbytes = block, block.after, tail, nbytes
            if tail.after is not None:
                tail.after.before = tail
            self._put(tail)
        return block

    def _segment(self, nbytes: int, small: bool) -> Segment:
        """An empty segment for the current pool: one that a pool has left, or a new one."""
        default = self.default
        for segment in default.owned if self.current is not default else ():
            if (segment.nbytes, segment.small) == (nbytes, small) and segment.first.free and not segment.first.after:
                self._unlist(segment.first)
                default.owned.remove(segment)
                segment.pool = self.current
                break
        else:
            segment = Segment(nbytes, small, self.current)
            at = bisect.bisect_left(self._bases, segment.base)
            self._bases.insert(at, segment.base)
            self._segments.insert(at, segment)
        self.current.owned.append(segment)
        return segment

    def _put(self, block: Block) -> None:
        bisect.insort(self._free_list(block), (block.nbytes, block.address, block), key=_order)

    def _free_list(self, block: Block) -> list[tuple[int, int, Block]]:
        return block.segment.pool.free[block.segment.small]

    def _give_back(self, block: Block) -> None:
        """Make the block free and join it with free neighbours."""
        block.requested = 0
        block.free = True
        before, after = block.before, block.after
        if after is not None and after.free:
            self._unlist(after)
            self._join(block, after)
        if before is not None and before.free:
            self._unlist(before)
            self._join(before, block)
            block = before
        self._put(block)

    def _join(self, block: Block, after: Block) -> None:
        block.nbytes += after.nbytes
        block.after = after.after
        if after.after is not None:
            after.after.before = block

    def _unlist(self, block: Block) -> None:
        free = self._free_list(block)
        del free[bisect.bisect_left(free, (block.nbytes, block.address), key=_order)]

    def _trim(self, pool: EmulatedPool) -> None:
        """Move the pool's unused segments to the default pool."""
        for segment in [segment for segment in pool.owned if segment.first.free and segment.first.after is None]:
            self._unlist(segment.first)
            pool.owned.remove(segment)
            segment.pool = self.default
            self.default.owned.append(segment)
            self._put(segment.first)


def _size(entry: tuple[int, int, Block]) -> int:
    return entry[0]


def _order(entry: tuple[Any, ...]) -> tuple[int, int]:
    return entry[0], entry[1]
