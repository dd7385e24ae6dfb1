"""Memory for tensors that only autograd refers to, the saved tensors of a graph: it stays with the graph.

The next call has it again if nothing else refers to it then, as after a backward: nothing is allocated, and no pointer
to it changes. It begins with the memory that the graph was recorded with, where that is free (see
`pygraph.runtime.own_results`). Calls in Python and native plans of the same graph take the same memory.

If all graphs kept theirs, blocks that are recomputed one after the other in a backward would need the memory of all
blocks. So a graph that takes memory has those give theirs back that keep some which nobody uses at that time. Graphs
whose saved tensors live at the same time, as those of the parts of one model, all keep theirs.
"""

# Hooks on saved tensors have no public name. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from pygraph.guards.donated import is_sole_owner
from pygraph.ir.descriptors import TensorSpec

ANY_STREAM = 2**64 - 1
"""The stream of memory that no stream has used yet; no handle of a stream has this value."""


class SavedMemory:
    """The memory for the saved tensors of one graph.

    Args:
        specs: By number of the graph's memory, how it is allocated.
        own: Tensors in the memory that the graph was recorded with, by number.
        in_pool: Which of these lie in the pool of the graph.
        current_stream: The raw current stream; None on a device without streams.
        unwritten: Where address and size of memory of the pool go that is given back while the graph stays.

    Attributes:
        bases: A tensor for each memory, in the order of ``specs``; None where none is kept. Native plans share it.
        lent: What native plans made of these last, which further calls have again if nobody else refers to it: each a
            tensor and its storage, or None.
        streams: The raw stream that has used each; `ANY_STREAM` if none has.
        is_keeper: Nonzero if the graph is among those that keep memory now.
    """

    def __init__(
        self,
        specs: Mapping[int, TensorSpec],
        own: Mapping[int, torch.Tensor],
        in_pool: Container[int],
        current_stream: Callable[[], int] | None,
        unwritten: list[tuple[int, int]],
    ) -> None:
        self._specs = dict(specs)
        self._position = {number: position for position, number in enumerate(specs)}
        self._current_stream = current_stream
        self.bases: list[torch.Tensor | None] = [own.get(number) for number in specs]
        #: The address of each that lies in the pool: only replays, which are ordered, get such memory.
        self._pooled = [own[number].data_ptr() if number in in_pool and number in own else 0 for number in specs]
        now = self._stream()
        self.streams = (ctypes.c_uint64 * len(self.bases))(*[ANY_STREAM if one else now for one in self._pooled])
        self.lent: list[tuple[torch.Tensor, torch.UntypedStorage] | None] = [None] * len(self.bases)
        self._unwritten = unwritten
        self._is_of_a_trial = False
        self.is_keeper = ctypes.c_int64(0)

    def position(self, number: int) -> int | None:
        """The position in ``bases`` of a number of the graph's memory; None if that memory is not kept."""
        return self._position.get(number)

    def take(self) -> dict[int, torch.Tensor]:
        """Tensors for a call in Python, by number of the graph's memory; none if the call is to have fresh memory."""
        # Hooks get saved tensors, and may have other streams read them for longer than they refer to them.
        if _fills_memory() or has_saved_tensors_hooks() or torch.is_inference_mode_enabled():
            return {}
        self.keep()
        stream = self._stream()
        positions = self._position.items()
        return {number: self._take(position, self._specs[number], stream) for number, position in positions}

    def _stream(self) -> int:
        return 0 if self._current_stream is None else self._current_stream() % 2**64

    def _take(self, position: int, spec: TensorSpec, stream: int) -> torch.Tensor:
        self.lent[position] = None
        base = self.bases[position]
        # On another stream, the allocator could give it away too early; its storage may have been resized.
        is_here = self.streams[position] in (ANY_STREAM, stream)
        if base is None or not is_here or base.untyped_storage().nbytes() < spec.nbytes or not is_sole_owner(base):
            base = self.bases[position] = spec.empty()
        self.streams[position] = stream
        return base.data  # not `detach`: the tensors of two calls have versions of their own

    def is_used(self) -> bool:
        """Whether anything else refers to a part of it."""
        self._forget_lent()
        return any(base is not None and not is_sole_owner(base) for base in list(self.bases))

    def forget_streams(self) -> None:
        """Let the next call have memory of the pool on whatever stream: until now only replays have."""
        for position, base in enumerate(self.bases):
            if base is not None and base.data_ptr() == self._pooled[position]:
                self.streams[position] = ANY_STREAM

    def leave_others_alone(self) -> None:
        """Have no graph give its memory back: this one is replayed in a trial, between replays of one that may stay."""
        self._is_of_a_trial = True

    def keep(self) -> None:
        """Be among those that keep memory, and have others give back what nobody uses."""
        if not self.is_keeper.value and not self._is_of_a_trial:
            release_unused()
            self.is_keeper.value = 1
            _keepers.append(weakref.ref(self))

    def give_back(self) -> None:
        """Keep nothing, until the next call. What lies in the pool, another recording may have for such results."""
        pairs = zip(self.release(), self._pooled, strict=True)
        addresses = [
            (base.data_ptr(), base.nbytes) for base, own in pairs if base is not None and base.data_ptr() == own
        ]
        self._unwritten += [(start, -(-size // _GRANULE) * _GRANULE) for start, size in addresses]

    def release(self) -> list[torch.Tensor | None]:
        """Keep nothing, until the next call; return what was kept."""
        self.is_keeper.value = 0
        self._forget_lent()
        kept = list(self.bases)
        self.bases[:] = [None] * len(kept)  # in place: native plans share the list
        return kept

    def _forget_lent(self) -> None:
        self.lent[:] = [None] * len(self.lent)  # in place, too


_GRANULE = 512
"""Torch's allocator gives out multiples of this many bytes."""

_keepers: list[weakref.ref[SavedMemory]] = []


def release_unused() -> None:
    """Have graphs give back the memory that nobody uses now, as another graph is about to need some."""
    for reference in list(_keepers):
        saved = reference()
        if saved is not None and saved.is_keeper.value and saved.is_used():
            continue
        if reference in _keepers:
            _keepers.remove(reference)
        if saved is not None and saved.is_keeper.value:
            saved.give_back()


def _fills_memory() -> bool:
    """Whether torch fills fresh memory with a value, as a debugging aid."""
    settings: Any = torch.utils.deterministic
    return torch.are_deterministic_algorithms_enabled() and bool(settings.fill_uninitialized_memory)


def has_saved_tensors_hooks() -> bool:
    """Whether hooks see the tensors that autograd saves, as in a region that is computed again."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
    return top(True) is not None
