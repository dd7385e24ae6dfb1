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
from pygraph.ir.descriptors import Argument, Base, Input, Output, PointerTable, Result, Slot, Stored, TensorSpec
from pygraph.ir.program import Program, output_values
from pygraph.ir.selections import Mechanism
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
    if program.device.type == "cpu":
        return program.replace(stage="pointers", history=(*program.history, "indirect"))
    module = program.copy_graph()
    graph = module.graph
    table = _insert_table(graph)
    loaded = _load_arguments(graph, table, program)
    outputs, results = _store_results(graph, table, program, first_slot=len(loaded.slots))
    slots = (*loaded.slots, *results)
    table.meta = {"spec": TensorSpec((len(slots),), (1,), torch.int64, torch.device("cpu")), "source": None}
    module.recompile()
    return program.replace(
        module=module,
        inputs=(PointerTable(slots, mechanism), *loaded.inputs),
        outputs=outputs,
        aliases=tuple(
            dataclasses.replace(alias, index=loaded.index_of(alias.index)) if alias.of == "input" else alias
            for alias in program.aliases
        ),
        stage="pointers",
        history=(*program.history, "indirect"),
    )


def _insert_table(graph: fx.Graph) -> fx.Node:
    """A placeholder for the pointer table, before all others."""
    with graph.inserting_before(next(iter(graph.nodes))):
        return graph.placeholder("table")


@dataclasses.dataclass
class _Loaded:
    """Inputs of a Program, once those on the device have slots.

    Attributes:
        slots: The slots, in order.
        inputs: The descriptors of the inputs without a slot, which follow the table.
        slot_of: By index among the inputs of the Program, the slot.
        input_of: By index among the inputs of the Program, the index in ``inputs``.
    """

    slots: list[Slot] = dataclasses.field(default_factory=list[Slot])
    inputs: list[Input] = dataclasses.field(default_factory=list[Input])
    slot_of: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    input_of: dict[int, int] = dataclasses.field(default_factory=dict[int, int])

    def index_of(self, index: int) -> int:
        """The index by which an alias names an input now: the table is 0, inputs come next, slots come last."""
        if index in self.input_of:
            return 1 + self.input_of[index]
        return 1 + len(self.inputs) + self.slot_of[index]


def _load_arguments(graph: fx.Graph, table: fx.Node, program: Program) -> _Loaded:
    """Replace the placeholders of device arguments by loads of slots, one after the other."""
    loaded, device = _Loaded(), program.device.type
    placeholders = [node for node in graph.nodes if node.op == "placeholder" and node is not table]
    anchor = placeholders[-1] if placeholders else table
    for index, (node, descriptor) in enumerate(zip(placeholders, program.inputs, strict=True)):
        if isinstance(descriptor, (Argument, Base)) and descriptor.spec.device.type == device:
            loaded.slot_of[index] = len(loaded.slots)
            with graph.inserting_after(anchor):
                anchor = _load(graph, table, len(loaded.slots), descriptor.spec)
            loaded.slots.append(Slot("argument", descriptor, descriptor.spec))
            node.replace_all_uses_with(anchor)
            graph.erase_node(node)
        else:
            loaded.input_of[index] = len(loaded.inputs)
            loaded.inputs.append(descriptor)
    return loaded


def _store_results(
    graph: fx.Graph, table: fx.Node, program: Program, first_slot: int
) -> tuple[tuple[Output, ...], list[Slot]]:
    """Store device results through slots from ``first_slot`` on, and return the new outputs and these slots."""
    outputs: list[Output] = []
    slots: list[Slot] = []
    device = program.device.type
    values = output_values(graph)
    for position, descriptor in enumerate(program.outputs):
        value = values[position]
        spec = value.meta.get("spec") if isinstance(value, fx.Node) else None
        if isinstance(descriptor, Result) and isinstance(spec, TensorSpec) and spec.device.type == device:
            slot = first_slot + len(slots)
            with graph.inserting_before(graph.output_node()):
                store = graph.call_function(torch.ops.pygraph.store.default, (table, slot, value))
            store.meta = {"spec": None, "source": value.meta.get("source")}
            values[position] = None
            outputs.append(Stored(slot))
            slots.append(Slot("result", descriptor, dataclasses.replace(spec, offset=0)))
        else:
            outputs.append(descriptor)
    graph.output_node().args = (tuple(values),)
    return tuple(outputs), slots


def _load(graph: fx.Graph, table: fx.Node, slot: int, spec: TensorSpec) -> fx.Node:
    args: tuple[Any, ...] = (table, slot, list(spec.shape), list(spec.stride), spec.dtype, spec.device)
    node = graph.call_function(torch.ops.pygraph.load.default, args)
    node.meta = {"spec": spec, "source": None}
    return node
