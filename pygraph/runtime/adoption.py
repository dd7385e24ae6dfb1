"""Donated memory: results of the last graph take over the memory of arguments that the call consumes.

A result may do so if it has the layout of the argument, and every kernel that reads the argument comes before the first
one that writes the result; or that is the same kernel and it works element by element. Recorded parameters show which
kernels those are, and a replay that overwrites copies of the arguments is compared with ordinary launches.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.guards.donated import is_sole_owner
from pygraph.ir.descriptors import Argument, TensorSpec
from pygraph.ir.effects import argument_nodes, is_operation, root
from pygraph.ir.ranges import Ranges
from pygraph.runtime.alignment import ALIGNMENT, aligned_copy
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.comparison import agree
from pygraph.runtime.gaps import close
from pygraph.runtime.proof import Example, Undisturbed, WrittenState

Notes = collections.Counter[tuple[str, str | None]]
"""Counts of how often an argument's memory became a result's (None), or for which reason it did not."""


class Adoption:
    """Pieces of a graph's fresh memory that are donated arguments'.

    Args:
        graph: The graph of the last region.
        donated: The donated arguments and their nodes.
        notes: Where every call says what became of their memory.
        captured: Where the graphs read what the function closes over.
    """

    def __init__(self, graph: RegionGraph, donated: Mapping[fx.Node, Argument], notes: Notes, captured: Ranges) -> None:
        self._graph = graph
        self._notes = notes
        self._captured = captured
        self._reasons: list[tuple[str, str]] = []
        self.pairs: list[tuple[fx.Node, int, Argument]] = []
        taken: set[int] = set()
        for node, argument in donated.items():
            fitting = [i for i in graph.patched_outputs if graph.memory[i].spec == argument.spec and i not in taken]
            legal = [i for i in fitting if self._is_read_before(node, i)]
            if legal:
                taken.add(legal[0])
                self.pairs.append((node, legal[0], argument))
            elif fitting:
                self.refuse(argument, "it is still read when a result of its layout is written")
            elif graph.reuses_outputs:
                self.refuse(argument, "results go to the same memory at every call")
            else:
                self.refuse(argument, "no result, or none that is left, has its shape, strides and dtype")

    def refuse(self, argument: Argument, reason: str) -> None:
        """Note at every call that the argument's memory is not used, and why."""
        self._reasons.append((argument.path, reason))

    def drop(self, reason: str) -> None:
        """Use no memory at all."""
        for _, _, argument in self.pairs:
            self.refuse(argument, reason)
        self.pairs = []

    def memory(self, env: Mapping[fx.Node, Any]) -> dict[int, torch.Tensor]:
        """The tensors of one call whose memory becomes fresh memory, by its entry."""
        for note in self._reasons:
            self._notes[note] += 1
        found: dict[int, torch.Tensor] = {}
        for node, index, argument in self.pairs:
            tensor: torch.Tensor = env[node]
            reason = _unfit(tensor, self._captured)
            self._notes[argument.path, reason] += 1
            if reason is None:
                found[index] = tensor.detach()
        return found

    # -- legality -------------------------------------------------------------------------------------------------

    def _is_read_before(self, node: fx.Node, index: int) -> bool:
        """Whether ``node``'s memory is not needed any more when the fresh memory is first written."""
        graph = self._graph
        if node not in graph.body.inputs:
            return True  # earlier regions only
        position = graph.body.inputs.index(node)
        if position not in graph.patched:
            return False
        slot = graph.slots.index(position)
        reads = graph.nodes_of(slot)
        first = min(graph.nodes_of(len(graph.slots) + index))
        if max(reads) < first:
            return True
        return max(reads) == first and self._is_elementwise(first, node, slot, index)

    def _is_elementwise(self, kernel: int, node: fx.Node, slot: int, index: int) -> bool:
        """Whether a kernel reads every element of ``node`` only where it writes that of the result."""
        graph = self._graph
        op = graph.graph.nodes[kernel].op
        producer = graph.body.nodes[op]
        if not is_operation(producer) or sum(recorded.op == op for recorded in graph.graph.nodes) != 1:
            return False
        target: Any = producer.target
        spec = graph.memory[index].spec
        uses = [argument for argument in argument_nodes(producer) if root(argument) is node]
        plain = all(argument is node and argument.meta["spec"] == spec for argument in uses)
        # A kernel that reads more than its arguments say, through a view that no schema declares, has more pointers.
        whole = len(graph.offsets_of(slot, kernel)) <= len(uses) and set(graph.offsets_of(slot, kernel)) == {0}
        return (
            torch.Tag.pointwise in target.tags
            and producer.meta["spec"] == spec
            and not spec.overlaps_itself
            and plain
            and whole
        )

    # -- proof ----------------------------------------------------------------------------------------------------

    def works(self, env: Mapping[fx.Node, Any], inputs: Sequence[torch.Tensor], numbers: Sequence[Any]) -> bool:
        """Whether a replay that overwrites copies of the arguments gives what ordinary launches give."""
        graph, body = self._graph, self._graph.body
        state = WrittenState(body)
        example = Example.of(body, graph.driver, inputs, numbers, state)

        def replay() -> list[torch.Tensor]:
            with Undisturbed(graph.driver, state):
                trial = _copies(inputs)
                copies = {node: trial[position] for position, node in enumerate(body.inputs)}
                memory = {
                    index: copies[node] if node in copies else aligned_copy(env[node]) for node, index, _ in self.pairs
                }
                got = [*graph(trial, numbers, memory)]
                close(example.gaps, got)
                got += (trial[i] for i in body.updated)
                return got + [body.static_values[i].detach().clone() for i in body.written_statics]

        got = replay()
        return all(map(agree, got, example.expected)) or graph.spread.covers(got, example, replay)


def _copies(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [aligned_copy(tensor) if tensor.numel() else tensor for tensor in inputs]


def _unfit(tensor: torch.Tensor, captured: Ranges) -> str | None:
    """The reason why the memory of this argument cannot be a result's; None if it can."""
    if captured.meet(tensor):  # no key of a call says so: an argument may be closed over as well
        return "it shares memory with a tensor that the function closes over"
    if not is_sole_owner(tensor):
        return "something else can reach its memory: a view, what it is a view of, autograd, a storage"
    spec = TensorSpec.of(tensor)
    if spec.offset or spec.nbytes != tensor.untyped_storage().nbytes():
        return "it is a part of its memory"
    if tensor.data_ptr() % ALIGNMENT:
        return f"its memory does not begin at a multiple of {ALIGNMENT} bytes"
    if tensor.is_inference() != torch.is_inference_mode_enabled():
        return "it was made in another inference mode"
    return None
