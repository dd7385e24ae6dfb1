"""Parameter indirection: arguments and results go through slots of a pointer table.

Source: "parameter indirection" (PI), arXiv 2503.19779.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

import pygraph.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers pygraph::load and pygraph::store
from pygraph.errors import StageError, describe
from pygraph.ir.descriptors import (
    Alias,
    Argument,
    Base,
    Input,
    Mechanism,
    Output,
    PointerTable,
    Result,
    Slot,
    Stored,
    TensorSpec,
)
from pygraph.ir.program import Program, output_values
from pygraph.lowering.aten import lower


def indirect_program(program: Program, mechanism: Mechanism = "auto") -> Program:
    """Put every device argument and result behind a slot of a pointer table.

    IR before::

        def program(x, k):
            mul = aten.mul.Tensor(x, k)
            return (mul,)

    IR after::

        def program(table, k):  # 0: argument args[0]; 1: result
            load = pygraph.load(table, 0, [3], [1], torch.float32, device("cuda:0"))
            mul = aten.mul.Tensor(load, k)
            store = pygraph.store(table, 1, mul)
            return (None,)

    Evaluated, these read and write real addresses. A graph made from it replays on other tensors by changing
    pointers, eight bytes each, instead of copying data.

    Args:
        program: A Program at stage ``aten`` (it is lowered first) or ``kernels``.
        mechanism: How graphs change pointers: ``host`` (the host changes kernels' parameters), ``device`` (a kernel at
            the graph's start does), ``table`` (Triton kernels load them from a table that it fills), ``copy`` (one
            kernel copies all inputs to where the others read them), or ``auto``: the cheapest for each graph by
            costs measured on this machine. Kernels that do not allow a mechanism get their pointers from the host.

    Returns:
        A Program at stage ``pointers``. Captured tensors stay inputs of their own, at their own addresses; so do
        numbers and tensors on the host.

    Raises:
        StageError: The Program has pointer slots already, or is cut into regions.
    """
    if program.stage not in ("aten", "kernels"):
        raise StageError(
            describe(
                f"indirect({program.name})", f"stage {program.stage!r}", expected="'aten' or 'kernels'",
                remedy="Apply indirect once, before graphify: graphify(indirect(devicify(f))).",
            )
        )  # fmt: skip
    program = lower(program)
    device = program.device
    if device.type == "cpu":
        return program.replace(stage="pointers", history=(*program.history, "indirect"))
    module = program.copy_graph()
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    slots: list[Slot] = []
    inputs: list[Input] = []
    kept: dict[int, int] = {}
    slot_of: dict[int, int] = {}

    with graph.inserting_before(placeholders[0] if placeholders else next(iter(graph.nodes))):
        table = graph.placeholder("table")
    anchor = placeholders[-1] if placeholders else table
    for index, (node, descriptor) in enumerate(zip(placeholders, program.inputs, strict=True)):
        if isinstance(descriptor, (Argument, Base)) and descriptor.spec.device.type == device.type:
            slot_of[index] = len(slots)
            with graph.inserting_after(anchor):
                load = anchor = _load(graph, table, len(slots), descriptor.spec)
            slots.append(Slot("argument", descriptor, descriptor.spec))
            node.replace_all_uses_with(load)
            graph.erase_node(node)
        else:
            kept[index] = 1 + len(inputs)
            inputs.append(descriptor)

    outputs: list[Output] = []
    values = output_values(graph)
    for position, descriptor in enumerate(program.outputs):
        spec = values[position].meta.get("spec") if isinstance(values[position], fx.Node) else None
        if isinstance(descriptor, Result) and isinstance(spec, TensorSpec) and spec.device.type == device.type:
            with graph.inserting_before(graph.output_node()):
                store = graph.call_function(torch.ops.pygraph.store.default, (table, len(slots), values[position]))
            store.meta = {"spec": None, "source": values[position].meta.get("source")}
            values[position] = None
            outputs.append(Stored(len(slots)))
            slots.append(Slot("result", descriptor, dataclasses.replace(spec, offset=0)))
        else:
            outputs.append(descriptor)
    graph.output_node().args = (tuple(values),)
    table.meta = {
        "spec": TensorSpec((len(slots),), (1,), torch.int64, torch.device("cpu")),
        "source": None,
    }
    module.recompile()

    def moved(alias: Alias) -> Alias:
        if alias.of != "input":
            return alias
        index = kept[alias.index] if alias.index in kept else 1 + len(inputs) + slot_of[alias.index]
        return dataclasses.replace(alias, index=index)

    return program.replace(
        module=module,
        inputs=(PointerTable(tuple(slots), mechanism), *inputs),
        outputs=tuple(outputs),
        aliases=tuple(map(moved, program.aliases)),
        stage="pointers",
        history=(*program.history, "indirect"),
    )


def _load(graph: fx.Graph, table: fx.Node, slot: int, spec: TensorSpec) -> fx.Node:
    args: tuple[Any, ...] = (table, slot, list(spec.shape), list(spec.stride), spec.dtype, spec.device)
    node = graph.call_function(torch.ops.pygraph.load.default, args)
    node.meta = {"spec": spec, "source": None}
    return node
