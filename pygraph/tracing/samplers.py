"""Samplers of torch that draw an order of indices: in a trace they give live numbers, and need none on the host.

`SubsetRandomSampler` gives the items of a list or a range at drawn positions, for which Python would need each. Of many
items it does need them: each live number costs the trace some time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import SubsetRandomSampler

from pygraph.tracing.live_lists import MOST_NUMBERS
from pygraph.tracing.patches import replaced
from pygraph.tracing.proxy_trace import tracing_here


def _drawing(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:
        values = _values(self.indices) if tracing_here() and len(self.indices) <= MOST_NUMBERS else None
        if values is None:
            yield from original(self)
            return
        order = torch.randperm(len(self.indices), generator=self.generator)
        yield from values(order).tolist()  # pyright: ignore[reportUnknownMemberType]

    return __iter__


def _values(indices: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that gives the items of some indices at positions; None if they are no known integers."""
    if type(indices) is range:
        return lambda order: order * indices.step + indices.start
    if type(indices) in (list, tuple) and all(type(one) is int for one in indices):
        return lambda order: torch.tensor(indices, device=order.device)[order]
    return None


@contextlib.contextmanager
def samplers_served() -> Generator[None, None, None]:
    """Have orders that samplers draw be live for the time of the context."""
    with replaced(SubsetRandomSampler, "__iter__", _drawing):
        yield
