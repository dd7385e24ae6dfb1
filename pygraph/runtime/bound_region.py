"""One region of an Executable as it runs: its nodes, and its graph if it is one."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from pygraph.ir.descriptors import Fallback, Region
from pygraph.runtime.adoption import Adoption
from pygraph.runtime.body import RegionBody
from pygraph.runtime.calling_convention import Values
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.selecting import Review


@dataclasses.dataclass
class BoundRegion:
    """One region as it runs.

    Attributes:
        region: The region.
        body: Its nodes.
        graph: Its graph; None if its nodes are launched.
        unkeyed: Inputs of the graph that operations outside of graphs make: their layout is in no cache key.
        adoption: The arguments whose memory its results take over.
        review: What measures its selection again, while that is provisional.
        least: Seconds of the host for its ordinary launches, the least that were measured; None if none were.
    """

    region: Region
    body: RegionBody
    graph: RegionGraph | None = None
    unkeyed: list[int] = dataclasses.field(default_factory=list[int])
    adoption: Adoption | None = None
    review: Review | None = None
    least: float | None = None

    def border(self, env: Values) -> tuple[list[torch.Tensor], list[Any]]:
        """The tensors and the numbers that it takes."""
        return [env[node] for node in self.body.inputs], [env[node] for node in self.body.numbers]

    def launch(self, env: Values) -> None:
        """Run by ordinary launches, and add the results to the environment."""
        inputs, numbers = self.border(env)
        env.update(zip(self.body.outputs, self.body.run(inputs, numbers), strict=True))

    def run_measured(self, env: Values) -> None:
        """`run`, with a note of what launches have taken, waiting for the device included."""
        begin = time.perf_counter()
        self.run(env)
        seconds = time.perf_counter() - begin
        if self.graph is None:
            self.least = seconds if self.least is None else min(self.least, seconds)

    def run(self, env: Values) -> None:
        """Run as it was selected, and add the results to the environment."""
        if self.graph is None:
            self.launch(env)
            return
        inputs, numbers = self.border(env)
        if self.unkeyed and not all(self.graph.fits(position, inputs[position]) for position in self.unkeyed):
            reason = "a value from outside of graphs is laid out in another way now"
            note = Fallback(f"region {self.region.index}", reason)
            if note not in self.graph.fallbacks:
                self.graph.fallbacks.append(note)
            self.launch(env)
            return
        taken = None if self.adoption is None else self.adoption.memory(env)
        env.update(zip(self.body.outputs, self.graph(inputs, numbers, taken), strict=True))
