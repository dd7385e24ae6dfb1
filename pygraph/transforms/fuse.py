"""Fusion: runs of ATen operations become the kernels that Inductor makes of them."""

# Inductor's entry point is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.errors import StageError, describe
from pygraph.ir.autocasting import without_autocast
from pygraph.ir.descriptors import Captured, Fallback, Input, Mutation, TensorSpec, tensor_specs
from pygraph.ir.effects import host_reason, is_operation, is_random, is_selection, is_view, is_work, root
from pygraph.ir.program import Program, graph_module, output_values
from pygraph.lowering.aten import lower
from pygraph.lowering.inductor import FusedGraph, compile_graph, settings
from pygraph.lowering.kernel_recorder import KernelGraph
from pygraph.transforms.schedule import alternating_runs

aten = torch.ops.aten

_LEAST = 2
"""A run of fewer operations has nothing to fuse."""


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

    Inductor decides what becomes one kernel. Random draws stay the operations that they were, so that the random
    numbers are eager's; so does what has to run between graphs, and what is no operation of ATen's, as a user's Triton
    kernels and custom operations. Updates of inputs that follow from a run are part of it.

    Args:
        program: A Program at stage ``aten``. On a device other than ``cuda`` it is only lowered, and says so.

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
        fused = _Fusion(program).run()
    return lower(fused).replace(history=(*program.history, "fuse"))


def _why_not(program: Program) -> str | None:
    device = program.device
    if device.type != "cuda":
        return f"Inductor makes no kernels for {device.type} that a graph could hold"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _is_fusable(node: fx.Node) -> bool:
    """Whether Inductor may have a node: a deterministic operation of torch's on the device."""
    if not is_operation(node) or is_random(node) or host_reason(node) is not None:
        return False
    if node.target.namespace not in ("aten", "prims") or node.target is aten.empty_strided.default:  # pyright: ignore
        return False
    specs = [*tensor_specs(node.meta["spec"])]
    specs += [spec for argument in node.all_input_nodes for spec in tensor_specs(argument.meta.get("spec"))]
    return all(spec.device.type == "cuda" and not spec.dtype.is_complex for spec in specs)


class _Fusion:
    """One pass over a Program: a new graph, in which runs are replaced one after the other."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._old = program.module.graph
        self._new = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._notes = list(program.fallbacks)
        self._inputs: list[Input] = list(program.inputs)
        self._done: set[int] = set()
        self._before: set[fx.Node] = set()

    def run(self) -> Program:
        """The Program with kernels, still with the updates that no run has taken over."""
        program = self._program
        for node in program.placeholders:
            self._env[node] = self._copy(node)
        self._last_placeholder = self._env[program.placeholders[-1]] if program.placeholders else None
        reasons = {
            node: "" for node in self._old.nodes if is_work(node) and not is_selection(node) and not _is_fusable(node)
        }
        for fusable, nodes in alternating_runs(self._old, reasons):
            if not fusable or sum(not is_selection(node) for node in nodes) < _LEAST or not self._fuse(nodes):
                for node in nodes:
                    self._env[node] = self._copy(node)
            self._before.update(nodes)
        kept = [position for position in range(len(program.outputs)) if position not in self._done]
        values = output_values(self._old)
        results = tuple(self._value(values[position]) for position in kept)
        output = self._new.output(results)
        output.meta = dict(self._old.output_node().meta)
        moved = {old: new for new, old in enumerate(kept)}
        aliases = tuple(
            dataclasses.replace(alias, index=moved[alias.index]) if alias.of == "output" else alias
            for alias in program.aliases
        )
        return program.replace(
            module=graph_module(program.module, self._new),
            inputs=tuple(self._inputs),
            outputs=tuple(program.outputs[position] for position in kept),
            aliases=aliases,
            fallbacks=tuple(dict.fromkeys(self._notes)),
        )

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self._new.node_copy(node, self._value)
        copy.meta = dict(node.meta)
        return copy

    def _value(self, value: Any) -> Any:
        """What a node of the old graph is in the new one; views are made where they are needed."""
        if not isinstance(value, fx.Node):
            return value
        if value not in self._env:
            self._env[value] = self._copy(value)
        return self._env[value]

    # -- one run --------------------------------------------------------------------------------------------------

    def _fuse(self, nodes: Sequence[fx.Node]) -> bool:
        run = _Run(self._program, nodes, self._before)
        try:
            compiled = compile_run(run.module, run.specs, self._program.name)
        except Exception as error:  # whatever a compiler of a hundred thousand lines may raise
            first = str(error).strip().partition("\n")[0]
            what = f"{len(nodes)} operations from {nodes[0].name} to {nodes[-1].name}"
            self._notes.append(
                Fallback(what, f"not fused: {type(error).__name__}: {first}", nodes[0].meta.get("source"))
            )
            return False
        if compiled is None:
            return False
        kernels, note = compiled.kernels(run.specs)
        if note is not None:
            self._notes.append(note)
        found = self._splice(kernels, [self._value(node) for node in run.inputs], nodes[0].meta.get("source"))
        for node, value in zip(run.outputs, found, strict=False):
            self._env[node] = value
        self._done |= set(run.updates)
        return True

    def _splice(self, kernels: KernelGraph, inputs: list[fx.Node], source: str | None) -> list[fx.Node]:
        """Put kernels in the new graph, and give the nodes of what they return, each with memory of its own."""
        inputs = [*inputs, *(self._captured(tensor) for tensor in kernels.constants)]
        env: dict[fx.Node, fx.Node] = {}
        given = iter(inputs)
        for node in kernels.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op != "output":
                env[node] = self._new.node_copy(node, env.__getitem__)
                env[node].meta = {**node.meta, "source": source}
        taken = set(inputs)
        found: list[fx.Node] = []
        for value in output_values(kernels.module.graph):
            if not isinstance(value, fx.Node):
                continue
            node = env[value]
            if root(node) in taken:  # Inductor gives an input, or one result for two that are equal
                copy = self._new.call_function(aten.clone.default, (node,))
                copy.meta = dict(node.meta)
                node = copy
            taken.add(root(node))
            found.append(node)
        return found

    def _captured(self, tensor: torch.Tensor) -> fx.Node:
        place = self._new._root if self._last_placeholder is None else self._last_placeholder
        with self._new.inserting_after(place):
            node = self._new.placeholder(f"constant_{len(self._inputs)}")
        node.meta = {"spec": TensorSpec.of(tensor), "source": None}
        self._last_placeholder = node
        self._inputs.append(Captured("constant", f"constant of Inductor's, number {len(self._inputs)}", tensor))
        return node


class _Run:
    """Some nodes of a Program as a graph of their own.

    Args:
        program: The Program.
        nodes: The nodes, in order.
        before: The work that runs before them.

    Attributes:
        module: The graph; updates of inputs are ``copy_`` at its end.
        inputs: The nodes that it takes; memory from outside, of which it makes its views itself.
        specs: Their specs.
        outputs: The nodes that are needed outside, in the order in which they are returned.
        updates: Positions among the Program's outputs of the updates that are part of it.
    """

    def __init__(self, program: Program, nodes: Sequence[fx.Node], before: set[fx.Node]) -> None:
        self._inside, self._before = set(nodes), before
        self._graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self._anchor: fx.Node | None = None
        for node in nodes:
            self._env[node] = self._graph.node_copy(node, self._local)
        self.updates = self._take_updates(program)
        values = [value for position, value in enumerate(program.results) if position not in self.updates]
        self.outputs = [node for node in nodes if _is_needed(node, self._inside, values) and not _is_tuple(node)]
        self._graph.output(tuple(self._env[node] for node in self.outputs))
        self.module = fx.GraphModule(torch.nn.Module(), self._graph)
        self.specs: list[TensorSpec] = [node.meta["spec"] for node in self.inputs]

    def _local(self, node: fx.Node) -> fx.Node:
        if node not in self._env:
            self._env[node] = self._graph.node_copy(node, self._local) if is_view(node) else self._placeholder(node)
        return self._env[node]

    def _placeholder(self, node: fx.Node) -> fx.Node:
        place = self._graph._root if self._anchor is None else self._anchor
        with self._graph.inserting_after(place):
            self._anchor = self._graph.placeholder(f"arg{len(self.inputs)}")
        self.inputs.append(node)
        return self._anchor

    def _take_updates(self, program: Program) -> tuple[int, ...]:
        """Write the new contents of inputs to them, where nobody else reads their old contents later."""
        placeholders = program.placeholders
        values = program.results
        taken: list[int] = []
        for position, descriptor in enumerate(program.outputs):
            if not isinstance(descriptor, Mutation):
                continue
            value, target = values[position], placeholders[descriptor.input]
            if not isinstance(value, fx.Node) or root(value) not in self._inside:
                continue
            others = [other for index, other in enumerate(values) if index != position]
            if target.meta["spec"].device.type != "cuda" or _is_needed(target, self._inside | self._before, others):
                continue
            self._graph.call_function(aten.copy_.default, (self._local(target), self._local(value)))
            taken.append(position)
        return tuple(taken)


def _is_needed(node: fx.Node, inside: set[fx.Node], values: Sequence[Any]) -> bool:
    """Whether work outside of a run, or one of these values, takes a node or a view of it."""
    wanted = {value for value in values if isinstance(value, fx.Node)}
    pending, seen = [node], set[fx.Node]()
    while pending:
        one = pending.pop()
        if one in wanted:
            return True
        for user in one.users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if is_view(user):
                pending.append(user)
            elif user not in inside:
                return True
    return False


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("spec"), tuple)


def compile_run(module: fx.GraphModule, specs: Sequence[TensorSpec], name: str) -> FusedGraph | None:
    """Compile a graph of ATen operations with Inductor, from its decompositions on; None if it computes nothing."""
    from torch._inductor.compile_fx import compile_fx

    found: list[FusedGraph | None] = []

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        output = graph.graph.output_node()
        # All results are looked at by what follows, in the strides that they have in eager.
        output.meta["user_visible_output_idxs"] = [
            index for index, value in enumerate(output_values(graph.graph)) if isinstance(value, fx.Node)
        ]
        options.pop("get_decomp_fn", None)
        found.append(compile_graph(graph, inputs, name, **options))
        return _never_called

    with settings(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [_fake(spec) for spec in specs]
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["val"] = value
        compile_fx(module, inputs, inner_compile=inner)
    return found[0] if found else None


def _never_called(inputs: list[Any]) -> Sequence[Any]:
    raise NotImplementedError


def _fake(spec: TensorSpec) -> torch.Tensor:
    """A tensor that lies in its storage where the spec says, for Inductor to see whether it is aligned."""
    flat = torch.empty(spec.offset + spec.span, dtype=spec.dtype, device=spec.device)
    return flat.as_strided(spec.shape, spec.stride, spec.offset)
