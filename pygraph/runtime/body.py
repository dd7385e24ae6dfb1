"""The nodes of one region as a function of what crosses its border; run to launch, to record, and to check."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pygraph.ir.attention_states import is_unused_state, keep
from pygraph.ir.autocasting import without_autocast
from pygraph.ir.control_flow import is_conditional
from pygraph.ir.decisions import is_question
from pygraph.ir.descriptors import Argument, Captured, CapturedGenerator
from pygraph.ir.effects import (
    device_of,
    is_host_number,
    is_load,
    is_selection,
    is_store,
    is_view,
    root,
    written_arguments,
)
from pygraph.ir.evaluate import clone_strided
from pygraph.ir.program import Program
from pygraph.ir.ranges import Ranges
from pygraph.ir.result_layouts import expected_layouts, in_layout
from pygraph.runtime import control_flow
from pygraph.runtime.control_flow import Recording
from pygraph.runtime.indices import Reach, index_reach
from pygraph.runtime.node_errors import node_of, note_failure, note_line
from pygraph.runtime.straight_line import Straight, straight_line


class RegionBody:
    """One region of a Program: its nodes, and the values that cross its border.

    Attributes:
        nodes: The nodes that are run, in order, loads and stores left out.
        inputs: Nodes from outside whose tensors differ from call to call.
        statics: Placeholders of captured tensors that the region uses.
        numbers: Nodes from outside that are Python numbers.
        outputs: Nodes whose values are needed outside: by other regions, by stores, or as results.
        written: Positions in ``inputs`` of tensors that the region writes to.
        updated: Those of them whose new values are read: by later regions, or after a call.
        written_statics: Positions in ``statics`` of tensors that the region writes to.
        static_values: The captured tensors of ``statics``.
        generators: The random generators that the region's nodes are passed, by placeholder.
        versioned_statics: Captured tensors whose version counters a replay has to increment.
        producers: The nodes that allocate the memory of ``outputs``.
        layouts: Expected strides of results that kernels read, in this region or later.
        last_use: Per node, the nodes whose values are not needed after it.
    """

    def __init__(self, program: Program, region: int) -> None:
        inside = [node for node in program.nodes if node.op == "call_function" and node.meta.get("region") == region]
        self.nodes = [node for node in inside if not is_load(node) and not is_store(node)]
        described = dict(zip(program.placeholders, program.inputs, strict=True))
        captured = {node: descriptor for node, descriptor in described.items() if isinstance(descriptor, Captured)}
        taken = self._from_outside(program, [node for node in inside if is_store(node)])
        self.generators: dict[fx.Node, torch.Generator] = {}
        for node in taken:
            if isinstance(descriptor := described.get(node), CapturedGenerator):
                self.generators[node] = descriptor.value
        outside = [node for node in taken if node not in self.generators]
        self.statics = [node for node in outside if node in captured]
        self.numbers = [node for node in outside if is_host_number(node)]
        self.inputs = [node for node in outside if node not in captured and not is_host_number(node)]
        # `data` is the same memory with a version of its own.
        self.static_values = [
            captured[node].value.data if captured[node].quiet else captured[node].value for node in self.statics
        ]
        self.outputs = self._needed_outside()
        # A result may be a tensor from outside as it is (an argument, a captured tensor): those need no node.
        writes = {root(argument) for node in self.nodes for argument in written_arguments(node)}
        self.written = [i for i, node in enumerate(self.inputs) if node in writes]
        spent = self._spent(program)
        self.updated = [i for i in self.written if self.inputs[i] not in spent]
        self.written_statics = [i for i, node in enumerate(self.statics) if node in writes]
        updated = [captured[self.statics[i]] for i in self.written_statics]
        self.versioned_statics = [descriptor.value for descriptor in updated if not descriptor.quiet]
        self.producers = {_producer(node) for node in self.outputs}
        self.layouts = expected_layouts(program.nodes)
        self._module = program.module
        self.last_use = self._last_uses()
        # Where numbers are read and compared alone, looking for autocast would take as long.
        self._casts = not all(
            is_question(node) or node.target is torch.ops.aten._local_scalar_dense.default for node in self.nodes
        )
        self._straight: Straight | None = None
        self._operations: dict[int, fx.Node] = {}
        self._name = program.name
        self._unused_states = [
            (i, device) for i, node in enumerate(self.outputs) if is_unused_state(node) and (device := device_of(node))
        ]

    def _from_outside(self, program: Program, stores: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes from outside that the region and its stores take, but constants and the pointer table."""
        members = set(self.nodes)
        table = program.placeholders[0] if program.table is not None else None
        arguments = dict.fromkeys(one for node in (*self.nodes, *stores) for one in node.all_input_nodes)
        return [one for one in arguments if one not in members and one.op != "get_attr" and one is not table]

    def _spent(self, program: Program) -> set[fx.Node]:
        """The inputs that hold anything after a call, and that no later region reads."""
        slots = () if program.table is None else program.table.slots
        spent = {
            node
            for node in self.inputs
            if is_load(node)
            and isinstance(descriptor := slots[node.args[1]].of, Argument)  # pyright: ignore
            and descriptor.is_spent
        }
        members = {*self.nodes}
        for node in reversed(program.nodes):
            if node in members or not spent:
                break
            spent -= {root(argument) for argument in node.all_input_nodes}
        return spent

    def _needed_outside(self) -> list[fx.Node]:
        """The nodes whose values other regions, stores or the Program's results take."""
        members = set(self.nodes)
        return [
            node
            for node in self.nodes
            if any(user not in members or is_store(user) for user in node.users) and not _is_tuple(node)
        ]

    @functools.cached_property
    def reach(self) -> dict[fx.Node, Reach]:
        """How values reach the indices that the region uses; values that reach none are left out."""
        return index_reach(self.nodes)

    @property
    def allocations(self) -> list[fx.Node]:
        """The nodes that only allocate memory of outputs, as Inductor's code does for its kernels."""
        return [node for node in self.nodes if node in self.producers and node.target in _ALLOCATIONS]

    def _last_uses(self) -> list[list[fx.Node]]:
        keep = set(self.outputs)
        last: dict[fx.Node, int] = {}
        for index, node in enumerate(self.nodes):
            last[node] = index
            for argument in node.all_input_nodes:
                last[argument] = index
        drop: list[list[fx.Node]] = [[] for _ in self.nodes]
        members = set(self.nodes)
        for node, index in last.items():
            if node in members and node not in keep:
                drop[index].append(node)
        return drop

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[Any] = (),
        mark: Callable[[int], None] | None = None,
        statics: Sequence[torch.Tensor] | None = None,
        generators: Mapping[torch.Generator, torch.Generator] | None = None,
        allocated: Mapping[fx.Node, torch.Tensor] | None = None,
        recording: Recording | None = None,
    ) -> list[Any]:
        """Run the nodes and return the values of ``outputs``; ``mark(i)`` is called before node ``i``.

        In a run with ``mark``, ``generators`` are drawn from instead of those of the region, ``allocated`` are the
        values of some of its ``allocations``, and branches and loops are nodes of what is recorded.
        """
        statics = self.static_values if statics is None else statics
        with without_autocast() if self._casts else _NOTHING:
            if mark is not None:
                return self._interpret(inputs, numbers, mark, statics, generators or {}, allocated or {}, recording)
            if self._straight is None:
                self._straight, self._operations = straight_line(self, own_memory, in_layout)
            try:
                results = self._straight(inputs, statics, numbers)
            except Exception as error:
                failed = node_of(error, self._straight, self._operations)
                if failed is not None:
                    note_line(error, failed, self._name)
                    note_failure(error, failed)
                raise
            for position, device in self._unused_states:
                # An ordinary launch has them on the host, where no graph can read them.
                results[position] = keep(results[position], device, drawn=False)
            return results

    def _interpret(
        self,
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        mark: Callable[[int], None],
        statics: Sequence[torch.Tensor],
        generators: Mapping[torch.Generator, torch.Generator],
        allocated: Mapping[fx.Node, torch.Tensor],
        recording: Recording | None,
    ) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(self.inputs, inputs, strict=True))
        env.update(zip(self.statics, statics, strict=True))
        env.update(zip(self.numbers, numbers, strict=True))
        env.update((node, generators.get(value, value)) for node, value in self.generators.items())

        def value(node: fx.Node) -> Any:
            return self.constant(node) if node.op == "get_attr" else env[node]

        for index, node in enumerate(self.nodes):
            mark(index)
            if node in allocated:
                env[node] = allocated[node]
                continue
            args: Any = map_arg(node.args, value)
            kwargs: Any = map_arg(node.kwargs, value)
            target: Any = node.target
            try:
                result: Any = (
                    control_flow.record(node, args, recording)
                    if recording is not None and is_conditional(node)
                    else target(*args, **kwargs)
                )
            except Exception as error:
                note_line(error, node, self._name)
                raise
            if node in self.producers:
                result = own_memory(result, args)
            if node in self.layouts:
                result = in_layout(result, self.layouts[node])
            env[node] = result
            del args, kwargs, result
            for done in self.last_use[index]:
                del env[done]
        return [env[node] for node in self.outputs]

    def constant(self, node: fx.Node) -> Any:
        """The value of a node that is the same in every call: an attribute of the Program's module, or a generator."""
        if node in self.generators:
            return self.generators[node]
        return getattr(self._module, str(node.target))

    def producer(self, output: int) -> int:
        """Position of the node that allocates the memory of output number ``output``."""
        return self.nodes.index(_producer(self.outputs[output]))

    def scalar_nodes(self) -> list[tuple[int, int, torch.dtype]]:
        """Live numbers on the device: (position in ``nodes``, position in ``numbers``, dtype)."""
        found: list[tuple[int, int, torch.dtype]] = []
        for index, node in enumerate(self.nodes):
            if node.target is torch.ops.pygraph.scalar.default and isinstance(node.args[0], fx.Node):
                found.append((index, self.numbers.index(node.args[0]), node.kwargs["dtype"]))  # pyright: ignore
        return found

    def readers(self, position: int) -> list[int]:
        """Positions of the nodes that take input number ``position``, directly or through views."""
        origin = self.inputs[position]
        return [
            index
            for index, node in enumerate(self.nodes)
            if not is_view(node) and any(root(argument) is origin for argument in node.all_input_nodes)
        ]

    def takes_only_at(self, node: fx.Node, position: int, argument: int) -> bool:
        """Whether a node takes input number ``position`` as that argument and as no other."""
        origin = self.inputs[position]
        others = [a for index, a in enumerate(node.args) if index != argument] + list(node.kwargs.values())
        return not any(isinstance(a, fx.Node) and root(a) is origin for a in pytree.tree_leaves(others))


def _producer(node: fx.Node) -> fx.Node:
    """The node that allocates the memory of a value."""
    node = root(node)
    while is_selection(node):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("spec"), tuple)


def own_memory(result: Any, args: Any) -> Any:
    """Clone results that are memory of an argument although their operation is no view, and resolve lazy ones."""
    if (
        type(result) is torch.Tensor
        and not result.is_conj()
        and not result.is_neg()
        and _shares_no_memory(result, args)
    ):
        return result
    taken = Ranges(tensor for tensor in pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor))

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            return value.resolve_conj().resolve_neg()  # some operations (real FFTs) leave that to their readers
        if isinstance(value, torch.Tensor) and taken.meet(value):
            return clone_strided(value)
        return value

    return pytree.tree_map(own, result)


def _shares_no_memory(result: torch.Tensor, args: Any) -> bool:
    """Whether a result certainly has no memory of an argument; cheap, as every launch asks for it."""
    if result.layout != torch.strided:
        return False
    storage = result.untyped_storage()
    start = storage.data_ptr()
    end = start + storage.nbytes()
    for argument in args:
        if isinstance(argument, (list, tuple)):
            if not _shares_no_memory(result, argument):
                return False
        elif isinstance(argument, torch.Tensor):
            if argument.layout != torch.strided:
                return False
            other = argument.untyped_storage()
            first = other.data_ptr()
            if first < end and start < first + other.nbytes():
                return False
        elif not isinstance(argument, _NO_TENSORS):
            return False
    return True


_NOTHING = contextlib.nullcontext()

_ALLOCATIONS = (torch.ops.aten.empty_strided.default, torch.ops.aten.empty.memory_format)

_NO_TENSORS = (int, float, str, bool, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
