"""Edits of a copy of a Program's graph: new nodes with their specs and source lines, and new inputs for constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import Argument, Captured, Element, Input, Spec, TensorSpec
from pygraph.ir.program import Program
from pygraph.ir.scopes import Origin, came_from


def number_type(dtype: torch.dtype) -> type[int] | type[float] | type[bool]:
    """The type of the Python number in a tensor of a dtype that is not complex."""
    return bool if dtype is torch.bool else float if dtype.is_floating_point else int


class GraphEdit:
    """A copy of a Program's graph that is edited, and its inputs.

    Args:
        program: The Program; it is not changed.

    Attributes:
        module: The copy.
        graph: Its graph.
        inputs: The descriptors of its placeholders.
        device: The accelerator that it runs on.
        origin: The source line and scopes of the node that is being replaced; new nodes get them if they replace none
            themselves.
    """

    def __init__(self, program: Program) -> None:
        self.module = program.copy_graph()
        self.graph = self.module.graph
        self.inputs: list[Input] = list(program.inputs)
        self.device = program.device
        self.origin: Origin = {"source": None, "backward_of": None, "scopes": ()}

    def call(self, op: Any, args: Any, kwargs: Any, spec: Any, before: fx.Node, of: fx.Node | None = None) -> fx.Node:
        """A new node before another, with the source line and the order of ``of``, or of the node that it precedes."""
        with self.graph.inserting_before(before):
            new = self.graph.call_function(op, args, kwargs)
        of = of or before
        origin = came_from(of) if of.meta.get("source") else self.origin
        new.meta = {"spec": spec, **origin, "from": "devicify", "order": of.meta.get("order")}
        return new

    def capture(self, value: torch.Tensor, name: str, of: fx.Node | None) -> fx.Node:
        """A new input that holds the value of a constant on the device, with the source line of ``of``."""
        value = value.detach().to(self.device)
        source = of.meta.get("source") if of else self.origin["source"]
        return self._new_input(Captured("constant", name, value), TensorSpec.of(value), source)

    def read(self, of: Argument | Captured, node: fx.Node) -> fx.Node:
        """A new input that is the number in an input of one element, with the source line of ``node``."""
        kind = number_type(of.spec.dtype)
        return self._new_input(Element(of, kind), kind, node.meta.get("source"))

    def _new_input(self, descriptor: Input, spec: Spec, source: str | None) -> fx.Node:
        with self.graph.inserting_before(self._first()):
            node = self.graph.placeholder(f"devicify_{len(self.inputs)}")
        node.meta = {"spec": spec, "source": source, "from": "devicify"}
        self.inputs.append(descriptor)
        return node

    def after(self, node: fx.Node) -> fx.Node:
        """The node before which others go that use this one."""
        return self._first() if node.op == "placeholder" else node.next

    def _first(self) -> fx.Node:
        return next(node for node in self.graph.nodes if node.op != "placeholder")
