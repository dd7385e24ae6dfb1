"""Bytes of results that their operation leaves as it finds them, as in the reserve of cuDNN's recurrent layers.

What they hold differs from run to run and says nothing, so that they have to be known before results are compared. The
operation alone, recorded with other tensors, is replayed over two kinds of bytes: where both stay, it writes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableSequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from pygraph.errors import CaptureError
from pygraph.ir.recurrent import is_reserve
from pygraph.runtime.body import RegionBody
from pygraph.runtime.driver import Driver, patiently

_FILLS = (0x00, 0xFF)

Gaps = Mapping[int, torch.Tensor]
"""By position of an output, which of its bytes are never written."""


def gaps_of(body: RegionBody, driver: Driver) -> Gaps:
    """Find the gaps in the outputs of a region that may have some."""
    found = {index: _unwritten(node, driver) for index, node in enumerate(body.outputs) if is_reserve(node)}
    return {index: gaps for index, gaps in found.items() if gaps is not None}


def close(gaps: Gaps, outputs: MutableSequence[Any]) -> None:
    """Replace outputs that have gaps with copies that have zeros there."""
    for index, unwritten in gaps.items():
        outputs[index] = outputs[index].masked_fill(unwritten, 0)


def _unwritten(node: fx.Node, driver: Driver) -> torch.Tensor | None:
    """Whether each byte of one result of an operation is never written; None if the device does not record it."""
    source: Any = node.args[0]
    position: Any = node.args[1]
    args, kwargs = map_arg((source.args, source.kwargs), _zeros)

    def run(mark: Callable[[int], None] = lambda index: None) -> torch.Tensor:
        mark(0)
        return source.target(*args, **kwargs)[position]

    pool = driver.new_pool(lasting=False)
    driver.warm_up(run)
    try:
        graph, result = patiently(lambda: driver.record(run, pool))
    except CaptureError:
        return None  # nor as a part of the region, which says why
    try:
        left: list[torch.Tensor] = []
        for fill in _FILLS:
            result.fill_(fill)
            graph.replay()
            left.append(result == fill)
        return left[0] & left[1]
    finally:
        del result
        graph.release()
        driver.give_back()


def _zeros(node: fx.Node) -> Any:
    return dataclasses.replace(node.meta["spec"], offset=0).empty().zero_()
