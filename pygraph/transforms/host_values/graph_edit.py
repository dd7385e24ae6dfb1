"""Edits of a copy of a Program's graph: new nodes with their specs and source lines, and new inputs for constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import Captured, Input, TensorSpec
from pygraph.ir.program import Program


class GraphEdit:
    """A copy of a Program's graph that is edited, and its inputs.

    Args:
        program: The Program; it is not changed.

    Attributes:
        module: The copy.
        graph: Its graph.
        inputs: The descriptors of its placeholders.
        device: The accelerator that it runs on.
        source: The user's line of the node that is being replaced; new nodes get it if they replace none themselves.
    """

    def __init__(self, program: Program) -> None:
        self.module = program.copy_graph()
        self.graph = self.module.graph
        self.inputs: list[Input] = list(program.inputs)
        self.device = program.device
        self.source: str | None = None

    def call(self, op: Any, args: Any, kwargs: Any, spec: Any, before: fx.Node, of: fx.Node | None = None) -> fx.Node:
        """A new node before another, with the source line and the order of ``of``, or of the node that it precedes."""
        with self.graph.inserting_before(before):
            new = self.graph.call_function(op, args, kwargs)
        source = (of or before).meta.get("source") or self.source
        new.meta = {"spec": spec, "source": source, "from": "devicify", "order": (of or before).meta.get("order")}
        return new

    def capture(self, value: torch.Tensor, name: str, of: fx.Node | None) -> fx.Node:
        """A new input that holds the value of a constant on the device, with the source line of ``of``."""
        value = value.detach().to(self.device)
        with self.graph.inserting_before(self._first()):
            node = self.graph.placeholder(f"device_constant_{len(self.inputs)}")
        source = of.meta.get("source") if of else self.source
        node.meta = {"spec": TensorSpec.of(value), "source": source, "from": "devicify"}
        self.inputs.append(Captured("constant", name, value))
        return node

    def after(self, node: fx.Node) -> fx.Node:
        """The node before which others go that use this one."""
        return self._first() if node.op == "placeholder" else node.next

    def _first(self) -> fx.Node:
        return next(node for node in self.graph.nodes if node.op != "placeholder")
