"""Replays of one graph by C++ in calls that Python serves, as those of several graphs with work of the host between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.guards.native_description import NO_GUARDS
from pygraph.process import extension
from pygraph.runtime.driver import Counters
from pygraph.runtime.native_description import DescribedGraph, describe_graph, describe_stream

_PLANNED = 2
"""The call that makes a plan, as most graphs that are tried are called no second time."""


class NativeReplay:
    """Replays a graph by C++ wherever that can serve a call.

    Args:
        counters: Counts replays. The graph has this, and ends it when it is released.
    """

    def __init__(self, counters: Counters) -> None:
        self._plan: Any = None
        self._miss: object = None
        self._calls = 0
        self._counters = counters

    def __call__(
        self, graph: DescribedGraph, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> list[torch.Tensor] | None:
        """The outputs of a replay; None if Python is to replay the graph.

        Args:
            graph: The graph.
            inputs: Its inputs.
            numbers: Its numbers.
        """
        plan = self._plan
        if plan is None:
            self._calls += 1
            if self._calls != _PLANNED:
                return None
            plan = self._plan = self._described(graph, inputs, numbers)
            if plan is None:
                return None
        before = plan.patches
        outputs = plan.replay((*inputs, *numbers))
        if outputs is self._miss:
            return None
        counters = self._counters
        counters.replays += 1
        counters.launches += 1
        counters.patches += plan.patches - before
        return outputs

    def _described(self, graph: DescribedGraph, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Any:
        """A plan of replays on inputs and numbers as these; None if there can be none."""
        module = extension.loaded()
        if module is None or not all(type(number) in (int, float) for number in numbers):
            return None
        leaves, first = [*inputs, *numbers], len(inputs)
        sources = [("leaf", first + number) for number in range(len(numbers))]
        replay = describe_graph(graph, range(first), sources)
        if replay is None:
            return None
        outputs = range(len(graph.body.outputs))
        description = {
            "live": frozenset(range(first, len(leaves))),
            "leaves": leaves,
            "device": graph.driver.device.type,
            "captured": (),
            "owned": (),
            "environment": NO_GUARDS,
            "callable": None,
            "is_executable": True,
            "is_eager": False,
            "most_hits": None,
            "replay": {
                **replay,
                "host_work": None,
                "range": "",  # the call has one
                "updated": tuple(graph.body.updated),
                "updated_captured": (),
                "results": tuple(("output", output) for output in outputs),
                "example": list(outputs),
                "unflatten": None,
            },
            "stream": describe_stream(graph.driver, graph.pool),
            "released": (),
        }
        self._miss = module.MISS
        try:
            return module.Plan(tuple(leaves), {}, description)
        except ValueError:  # inputs share memory
            return None

    def end(self) -> None:
        """Replay nothing any more, as the graph is released."""
        if self._plan is not None:
            self._plan.end()
        self._plan, self._calls = None, _PLANNED
