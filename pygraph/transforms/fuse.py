"""Fusion: runs of ATen operations become the kernels that Inductor makes of them."""

# An anchor in a graph is a private attribute. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pygraph.errors import StageError, describe
from pygraph.ir.attention_states import is_unset_state
from pygraph.ir.autocasting import without_autocast
from pygraph.ir.descriptors import Captured, Fallback, Input, TensorSpec, contiguous_strides, tensor_specs
from pygraph.ir.effects import (
    host_reason,
    is_first_gradient,
    is_operation,
    is_selection,
    is_view,
    is_work,
    root,
)
from pygraph.ir.order import number_nodes
from pygraph.ir.program import Program, graph_module, output_values
from pygraph.ir.random_draws import can_be_chained, is_draw
from pygraph.ir.scopes import Origin, came_from, joined
from pygraph.ir.value_names import value_name
from pygraph.lowering.aten import lower
from pygraph.lowering.draws import OtherDrawsError, prepare_program_draws
from pygraph.lowering.fused_run import compile_run
from pygraph.lowering.in_place import is_write_back
from pygraph.lowering.joint import Value
from pygraph.lowering.kernel_recorder import KernelGraph
from pygraph.lowering.states import join
from pygraph.process import progress
from pygraph.transforms.fusable_run import FusableRun
from pygraph.transforms.schedule import alternating_runs

aten = torch.ops.aten

_MIN_OPERATIONS = 2
"""Operations that a run must have at least, as fewer have nothing to fuse."""

_MOST_FAILURES = 12
"""Runs that may fail to compile in a row before those that fail are no longer halved: nothing can be compiled then."""


def fuse_program(program: Program) -> Program:
    """Replace runs of ATen operations by fused kernels, with their allocations.

    IR before::

        mul = aten.mul.Tensor(x, y)
        sum = aten.sum.dim_IntList(mul, [1])
        return (sum,)

    IR after::

        empty_strided = aten.empty_strided.default([8], [1], dtype=torch.float32, device=device("cuda:0"))
        launch = pygraph.launch("triton_per_fused_mul_sum_0", [empty_strided], [x, y], [])
        return (empty_strided,)

    Inductor decides what becomes one kernel. Random numbers are eager's: draws are operations of their own, in the
    order that they have, and of a dropout only the mask is drawn. What has to run between graphs stays as it is, and so
    does what is no operation of ATen's, as a user's Triton kernels and custom operations, or a draw that Inductor could
    exchange with another. Updates of inputs whose values a run computes are part of it.

    Args:
        program: A Program at stage ``aten``. On a device other than ``cuda`` it is only lowered, with a
            fallback that says so.

    Returns:
        A Program at stage ``kernels``.

    Raises:
        StageError: The Program is further than that.

    Source: PyGraph is "built atop PyTorch2's compilation framework", arXiv 2503.19779.
    """
    if program.stage != "aten":
        raise StageError(
            describe(f"fuse({program.name})", f"stage {program.stage!r}", expected="'aten'",
                     remedy="Apply fuse after devicify and before the others: graphify(indirect(fuse(devicify(f)))).")
        )  # fmt: skip
    reason = _why_not(program)
    if reason is not None:
        notes = (*program.fallbacks, Fallback("fusion", reason))
        lowered = lower(program.replace(fallbacks=tuple(dict.fromkeys(notes))))
        return lowered.replace(history=(*program.history, "fuse"))
    with without_autocast():  # the trace has all casts
        fused = _fused(prepare_program_draws(program))
    return lower(fused).replace(history=(*program.history, "fuse"))


def _fused(program: Program) -> Program:
    """The Program with its runs as kernels. Where Inductor draws in another order than eager, draws are in none."""
    try:
        return _Fusion(program).run()
    except OtherDrawsError as error:
        note = Fallback("random draws", f"they are borders between fused runs: {_in_a_line(error)}")
    return _Fusion(program.replace(fallbacks=(*program.fallbacks, note)), draws=False).run()


def _why_not(program: Program) -> str | None:
    device = program.device
    if device.type != "cuda":
        return f"Inductor makes no kernels for {device.type} that a graph could hold"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _is_fusable(node: fx.Node, draws: bool = True) -> bool:
    """Whether Inductor may have a node: an operation of torch's on the device, or a draw whose order it must keep."""
    if not is_operation(node) or host_reason(node) is not None:
        return False
    if is_draw(node):
        if not draws or not can_be_chained(node):
            return False
    elif node.target.namespace not in ("aten", "prims") or node.target is aten.empty_strided.default:  # pyright: ignore
        return False
    if is_write_back(node) or _is_read_by_strides(node):
        return False
    specs = [*tensor_specs(node.meta["spec"])]
    if node.target is aten._grouped_mm.default and specs[0].dtype != torch.bfloat16:
        return False  # Inductor knows it in that dtype only (torch 2.11 to 2.13)
    specs += [spec for argument in node.all_input_nodes for spec in tensor_specs(argument.meta.get("spec"))]
    return all(spec.device.type == "cuda" and not spec.dtype.is_complex for spec in specs)


_CAUSE = re.compile(r"[\w.]+(Error|Exception|OutOfResources)\b")


def _in_a_line(error: Exception) -> str:
    """The kind of an error and its first line, with the kernel and the cause that an error of another process names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    kernels = [line for line in lines[1:] if line.startswith("Name=")]
    causes = [line for line in lines[1:] if _CAUSE.match(line)]
    return f"{type(error).__name__}: {' '.join([lines[0], *kernels[:1], *causes[-1:]])}"


_BY_STRIDES = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}


def _is_read_by_strides(node: fx.Node) -> bool:
    """Whether operations read a node's memory by strides of their own: Inductor may lay it out in another way."""
    return any(user.target in _BY_STRIDES or (is_view(user) and _is_read_by_strides(user)) for user in node.users)


def _halves(nodes: Sequence[fx.Node]) -> tuple[Sequence[fx.Node], Sequence[fx.Node]] | None:
    """Two parts of a run with as many operations, and their selections; None if they were too short to fuse."""
    operations = [node for node in nodes if not is_selection(node)]
    if len(operations) < 2 * _MIN_OPERATIONS:
        return None
    first = set(operations[: len(operations) // 2])
    for node in nodes:
        if is_selection(node) and node.args[0] in first:
            first.add(node)
    return [node for node in nodes if node in first], [node for node in nodes if node not in first]


class _Fusion:
    """Fusion of one Program: a new graph, in which runs are replaced one after the other.

    Args:
        program: The Program.
        draws: Whether random draws may be part of runs.
    """

    def __init__(self, program: Program, draws: bool = True) -> None:
        self._draws = draws
        self._program = program
        self._old = program.module.graph
        self._new = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._notes = list(program.fallbacks)
        self._inputs: list[Input] = list(program.inputs)
        self._updated: set[int] = set()
        self._before: set[fx.Node] = set()
        self._failures = 0

    def run(self) -> Program:
        """The Program with kernels, and with those updates of inputs that are part of no run.

        Raises:
            OtherDrawsError: The kernels of a run draw in another order than eager.
        """
        program = self._program
        for node in program.placeholders:
            self._env[node] = self._copy(node)
        self._last_placeholder = self._env[program.placeholders[-1]] if program.placeholders else None
        reasons = {
            node: ""
            for node in self._old.nodes
            if is_work(node) and not is_selection(node) and not _is_fusable(node, self._draws)
        }
        runs = [
            (nodes, fusable and sum(not is_selection(node) and not is_draw(node) for node in nodes) >= _MIN_OPERATIONS)
            for fusable, nodes in alternating_runs(self._old, reasons)
        ]
        # A run in which a backward begins has two graphs.
        progress.phase("kernels", sum(1 + any(map(is_first_gradient, nodes)) for nodes, fusable in runs if fusable))
        for nodes, fusable in runs:
            self._take(nodes, fusable)
        remaining = [position for position in range(len(program.outputs)) if position not in self._updated]
        values = output_values(self._old)
        results = tuple(self._value(values[position]) for position in remaining)
        output = self._new.output(results)
        output.meta = dict(self._old.output_node().meta)
        join(self._new)
        number_nodes(self._new)  # kernels, too: none may come before what decides or raises before it
        moved = {old: new for new, old in enumerate(remaining)}
        aliases = tuple(
            dataclasses.replace(alias, index=moved[alias.index]) if alias.of == "output" else alias
            for alias in program.aliases
        )
        return program.replace(
            module=graph_module(program.module, self._new),
            inputs=tuple(self._inputs),
            outputs=tuple(program.outputs[position] for position in remaining),
            aliases=aliases,
            fallbacks=tuple(dict.fromkeys(self._notes)),
        )

    def _take(self, nodes: Sequence[fx.Node], fusable: bool) -> None:
        """Put a run in the new graph: its kernels, those of its halves if it cannot be compiled, or its operations."""
        if not fusable or not self._fuse(nodes):
            for node in nodes:
                self._env[node] = self._copy(node)
        self._before.update(nodes)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self._ones(node.meta["spec"]) if is_first_gradient(node) else None
        copy = self._new.node_copy(node, self._value) if copy is None else copy
        copy.meta = dict(node.meta)
        return copy

    def _ones(self, spec: TensorSpec) -> fx.Node | None:
        """Ones that do not read the loss that they are like; None if they are not contiguous."""
        if spec.stride != contiguous_strides(spec.shape):
            return None
        options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
        return self._new.call_function(aten.full.default, (list(spec.shape), 1), options)

    def _value(self, value: Any) -> Any:
        """The node of the new graph for one of the old; views are made where they are needed."""
        if not isinstance(value, fx.Node):
            return value
        if value not in self._env:
            self._env[value] = self._copy(value)
        return self._env[value]

    # -- one run --------------------------------------------------------------------------------------------------

    def _fuse(self, nodes: Sequence[fx.Node]) -> bool:
        run = FusableRun(self._program, nodes, self._before)
        failure = None
        try:
            fused = compile_run(run.module, run.specs, self._program.name, run.begins, run.static)
        except Exception as error:  # whatever a compiler of a hundred thousand lines may raise
            if self._draws and isinstance(error, OtherDrawsError):
                raise
            fused, failure = None, _in_a_line(error)
        if failure is not None:  # no longer in the handler, which would keep what has failed
            return self._fuse_halves(nodes, failure)
        self._failures = 0
        if fused is None:
            return False
        self._notes += fused.notes
        wanted = dict(zip(fused.results, run.outputs, strict=True))
        found: dict[Value, fx.Node] = {}
        origin = joined([came_from(node) for node in nodes])
        for of, part in zip(("forward", "backward"), fused.parts, strict=False):
            inputs = [
                found[value] if value.of != "input" else self._value(run.inputs[value.number]) for value in part.inputs
            ]
            owned = {value.number for value in wanted if value.of == of}
            results = self._splice(part.kernels, inputs, owned, origin)
            found |= {Value(of, index): result for index, result in enumerate(results) if result is not None}
            for value, node in wanted.items():
                if value.of == of:
                    self._env[node] = result = self._as_in_eager(found[value], node)
                    result.meta["value_name"] = value_name(node)
        self._env |= {node: self._value(target) for node, target in run.updated.items()}
        self._updated |= set(run.updates)
        return True

    def _fuse_halves(self, nodes: Sequence[fx.Node], failure: str) -> bool:
        """Fuse the halves of a run that cannot be compiled: the one without what cannot be compiled can."""
        self._failures += 1
        halves = _halves(nodes) if self._failures < _MOST_FAILURES else None
        if halves is None:
            operations = f"{len(nodes)} operations from {nodes[0].name} to {nodes[-1].name}"
            self._notes.append(Fallback(operations, f"not fused: {failure}", nodes[0].meta.get("source")))
            return False
        for half in halves:
            self._take(half, True)
        return True

    def _splice(
        self, kernels: KernelGraph, inputs: list[fx.Node], owned: set[int], origin: Origin
    ) -> list[fx.Node | None]:
        """Put kernels in the new graph.

        Args:
            kernels: The kernels.
            inputs: What they take.
            owned: Positions of the results that need memory of their own.
            origin: The user's line and scopes of kernels that have none of their own.

        Returns:
            The nodes of the results; None for one that is no tensor.
        """
        inputs = [*inputs, *(self._captured(tensor) for tensor in kernels.constants)]
        env: dict[fx.Node, fx.Node] = {}
        arguments, values = iter(inputs), output_values(kernels.module.graph)
        for node in kernels.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(arguments)
            elif node.op != "output":
                is_unset = is_unset_state(node) and not any(node is values[index] for index in owned)
                env[node] = self._memory(node) if is_unset else self._new.node_copy(node, env.__getitem__)
                env[node].meta = dict(node.meta) if node.meta.get("source") else {**node.meta, **origin}
        taken = set(inputs)
        found: list[fx.Node | None] = []
        for index, value in enumerate(values):
            if not isinstance(value, fx.Node):
                found.append(None)
                continue
            node = env[value]
            if index in owned and root(node) in taken:  # Inductor gives an input, or one result for two that are equal
                copy = self._new.call_function(aten.clone.default, (node,))
                copy.meta = dict(node.meta)
                node = copy
            taken.add(root(node))
            found.append(node)
        return found

    def _as_in_eager(self, value: fx.Node, node: fx.Node) -> fx.Node:
        """A result of kernels in the strides of ``node``, which it is the value of."""
        wanted = node.meta["spec"]
        if value.meta["spec"].reaches_as(wanted):
            return value
        memory = self._memory(node)
        memory.meta = {**node.meta, "spec": dataclasses.replace(wanted, offset=0)}
        self._new.call_function(aten.copy_.default, (memory, value)).meta = dict(memory.meta)
        return memory

    def _memory(self, node: fx.Node) -> fx.Node:
        """Uninitialised memory in the layout of a node."""
        spec: TensorSpec = node.meta["spec"]
        options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
        return self._new.call_function(aten.empty_strided.default, (list(spec.shape), list(spec.stride)), options)

    def _captured(self, tensor: torch.Tensor) -> fx.Node:
        anchor = self._new._root if self._last_placeholder is None else self._last_placeholder
        with self._new.inserting_after(anchor):
            node = self._new.placeholder(f"constant_{len(self._inputs)}")
        node.meta = {"spec": TensorSpec.of(tensor), "source": None}
        self._last_placeholder = node
        self._inputs.append(Captured("constant", f"constant of Inductor's, number {len(self._inputs)}", tensor))
        return node
