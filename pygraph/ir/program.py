"""The intermediate representation: a frozen, functional FX graph whose every input and output is described.

A Program is what every transform takes and returns. Positions and names carry no meaning: the descriptors do.
The calling convention is that of the FX graph: one placeholder per entry of ``inputs``, in order, and one element
of the returned tuple per entry of ``outputs``.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import (
    _LazyGraphModule,  # checked with torch 2.11 and 2.13  # pyright: ignore[reportPrivateUsage]
)
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from pygraph.errors import ArgumentError, describe
from pygraph.ir.descriptors import (
    Alias,
    Baked,
    Fallback,
    Input,
    Output,
    PointerTable,
    Region,
    Stage,
    Static,
    tensor_specs,
)
from pygraph.ir.drawing import Drawing
from pygraph.ir.evaluate import evaluate
from pygraph.ir.outline import outline
from pygraph.ir.printing import program_text


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function: a frozen FX graph with a meaning for every input and output.

    Attributes:
        name: The traced function's name.
        module: The FX graph, with submodules for higher-order operations. Never changed; a pass copies it.
        inputs: One descriptor per placeholder.
        outputs: One descriptor per element of the returned tuple.
        aliases: Returned leaves that are views of inputs or of other outputs.
        statics: Returned leaves that are constants of the trace.
        baked: Leaves of the arguments whose values the trace depends on.
        gradients: Leaves of the arguments that may require grad while gradients are on, as results have none even so;
            None if nothing that it reads may.
        in_tree: The pytree of ``(args, kwargs)``.
        out_tree: The pytree of the result.
        stage: How far the Program has come.
        history: The passes that made it, first to last.
        regions: How its nodes run, once `graphify` has cut it; ``node.meta["region"]`` is an index into it.
        fallbacks: What passes had to leave in a worse form, with reasons.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    aliases: tuple[Alias, ...]
    statics: tuple[Static, ...]
    in_tree: pytree.TreeSpec
    out_tree: pytree.TreeSpec
    stage: Stage
    history: tuple[str, ...]
    baked: tuple[Baked, ...] = ()
    gradients: frozenset[int] | None = None
    regions: tuple[Region, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in execution order, placeholders and output included."""
        return list(self.module.graph.nodes)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholder of each entry of ``inputs``."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[Any, ...]:
        """The arguments of the output node, one per entry of ``outputs``."""
        return tuple(output_values(self.module.graph))

    @property
    def table(self) -> PointerTable | None:
        """The pointer table, once arguments and results go through one."""
        for descriptor in self.inputs:
            if isinstance(descriptor, PointerTable):
                return descriptor
        return None

    @property
    def device(self) -> torch.device:
        """The accelerator that the Program runs on; ``cpu`` if none of its tensors is on one."""
        for node in self.module.graph.nodes:
            for spec in tensor_specs(node.meta.get("spec")):
                if spec.device.type not in ("cpu", "meta"):
                    return spec.device
        return torch.device("cpu")

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All accelerators that its tensors are on, in the order in which they are met."""
        specs = (spec for node in self.nodes for spec in tensor_specs(node.meta.get("spec")))
        return tuple(dict.fromkeys(spec.device for spec in specs if spec.device.type not in ("cpu", "meta")))

    def copy_graph(self) -> fx.GraphModule:
        """A copy of the graph, for a pass to edit, with the metadata of nodes; submodules are shared."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.module.graph, mapping)
        new_output = graph.output(output)
        new_output.meta = dict(self.module.graph.output_node().meta)
        for old, new in mapping.items():
            new.meta = dict(old.meta)
        return graph_module(self.module, graph)

    def replace(self, **changes: Any) -> Program:
        """A Program with some fields changed; the original stays as it is."""
        return dataclasses.replace(self, **changes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Program node by node on a call's arguments, see `pygraph.evaluate`.

        Raises:
            ArgumentError: The arguments do not fit what was traced, or gradients are to be taken through the call,
                which computes values alone; nothing has been changed.

        Example:
            >>> import torch, pygraph
            >>> program = pygraph.trace(lambda x: x + 1)(torch.ones(2))
            >>> program(torch.zeros(2))
            tensor([1., 1.])
        """
        return evaluate(self, *args, **kwargs)

    def draw(self, most: int = 200) -> Drawing:
        """A picture: nodes as boxes, in a frame for each region, with the values that they take and give.

        Args:
            most: The number of nodes that are drawn at most; the picture says how many more there are.

        Returns:
            What notebooks show; ``save("step.svg")`` writes it, and ``dot`` is its text for Graphviz.

        Raises:
            ArgumentError: ``most`` is no positive integer.

        Example:
            >>> import torch, pygraph
            >>> picture = pygraph.trace(lambda x: torch.sin(x) + 1)(torch.ones(2)).draw()
            >>> picture
            <Drawing of <lambda>: 3 nodes>
            >>> "float32[2] cpu" in picture.svg
            True
        """
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            is_name = isinstance(most, (str, os.PathLike))
            remedy = "For a file, write draw().save(…) with a name that ends in .svg, .dot or .gv."
            raise ArgumentError(
                describe("draw(…)", f"most={most!r}", expected="a positive integer", remedy=remedy if is_name else None)
            )
        return Drawing(outline(self, most))

    def __str__(self) -> str:
        return program_text(self)

    __repr__ = __str__


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, whose code is compiled if it runs; a pass edits it, or takes it over, before."""
    return _LazyGraphModule(root, graph)


def output_values(graph: fx.Graph) -> list[Any]:
    """The elements of the tuple that a graph returns."""
    (values,) = graph.output_node().args
    assert isinstance(values, (tuple, list))
    return list(values)
