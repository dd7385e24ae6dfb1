"""The second run: the recording without in-place operations, with updates of inputs as explicit outputs."""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from pygraph.errors import TraceError, describe
from pygraph.ir.descriptors import Argument, Base, Captured, Input, Mutation, Output, Result, Spec, TensorSpec
from pygraph.ir.effects import root, written_arguments
from pygraph.ir.functional_variants import mutating_operation_of
from pygraph.ir.program import Program, output_values
from pygraph.tracing.explicit_generators import lift_generators
from pygraph.tracing.fake_arguments import check_plain, relative_spec
from pygraph.tracing.fake_tracing import fake_tracing
from pygraph.tracing.graph_cleanup import clean_up_graph, drop_fake_values, spec_of
from pygraph.tracing.hidden_writes import updated_in_hiding
from pygraph.tracing.live_positions import PositionsInterpreter, has_live_positions
from pygraph.tracing.output_aliases import Outputs, classify_outputs
from pygraph.tracing.overlapping_inputs import InputViews, merge_overlapping, relative_views
from pygraph.tracing.proxy_trace import proxy_trace
from pygraph.tracing.recording import Recording
from pygraph.tracing.recording_interpreter import RecordingInterpreter, whole_memory, with_strides
from pygraph.tracing.unwritten_values import UnwrittenValues

aten = torch.ops.aten


def functionalize(recording: Recording) -> Program:
    """Turn a recording into a Program: functional, updates of inputs as outputs, aliasing described."""
    inputs, values = list(recording.inputs), list(recording.values)
    attributes = _lift_attributes(recording, inputs, values)
    _mark_quiet(recording, inputs, attributes)
    inputs, values, views = merge_overlapping(recording, inputs, values)
    classified = classify_outputs(recording, inputs, views)
    specs = [spec_of(value) for value in values]
    module = _functional_graph(recording, attributes, values, views, classified)
    graph = module.graph
    _restore_functional_operations(graph)
    outputs, out_values = _mutations(recording, graph, inputs, specs)
    returned = output_values(graph)
    first_shared = len(outputs) + len(classified.results)
    for (_, leaf), value in zip(classified.results, returned, strict=False):
        outputs.append(Result(recording.out_paths[leaf], leaf, spec_of(recording.out_leaves[leaf])))
        out_values.append(value)
    for value in returned[len(classified.results) :]:
        outputs.append(Result("shared memory of results", -1, spec_of(value.meta["val"])))
        out_values.append(value)
    graph.output_node().args = (tuple(out_values),)
    generators = lift_generators(f"trace({recording.name})(…)", module, recording.generators)
    inputs, specs = [*inputs, *generators], [*specs, *(() for _ in generators)]
    with fake_tracing(recording.mode):
        relative_views(graph, [node for node in graph.nodes if node.op == "placeholder"], inputs)
    clean_up_graph(graph, specs)
    drop_fake_values(module)
    module.recompile()
    aliases = [
        dataclasses.replace(alias, index=alias.index + first_shared) if alias.of == "output" else alias
        for alias in classified.aliases
    ]
    return Program(
        name=recording.name,
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        aliases=tuple(aliases),
        statics=tuple(classified.statics),
        in_tree=recording.in_tree,
        out_tree=recording.out_tree,
        stage="aten",
        history=("trace",),
        baked=recording.baked,
    )


# ---- the graph -----------------------------------------------------------------------------------------------------


def _functional_graph(
    recording: Recording, attributes: dict[str, int], values: list[Any], views: InputViews, classified: Outputs
) -> fx.GraphModule:
    """Trace the recording again under functionalization.

    Args:
        recording: The first run of the function.
        attributes: The input that each attribute of its graph is.
        values: The fake tensors and symbols of the Program's inputs.
        views: How the recording's inputs are computed from them.
        classified: The outputs.

    Returns:
        A graph that returns the results, followed by the memory that results share. It writes to nothing but its
        inputs, at the end, by ``copy_``.
    """

    def run(*placeholders: Any) -> list[Any]:
        module = recording.module
        unwritten = UnwrittenValues(module.graph, [position for position, _ in classified.shared])
        outs = RecordingInterpreter(module, attributes, views.apply(placeholders), unwritten).run()
        results = [with_strides(outs[position], recording.out_leaves[leaf]) for position, leaf in classified.results]
        shared = [whole_memory(outs[position], size, recording, position) for position, size in classified.shared]
        return results + shared

    with fake_tracing(recording.mode), torch.inference_mode(False), torch.no_grad():
        module = _without_writes(run, [_fresh(value) for value in values])
        if has_live_positions(module.graph):
            found = module

            def run_by_index(*placeholders: Any) -> list[Any]:
                return PositionsInterpreter(found, {}, list(placeholders)).run()

            module = _without_writes(run_by_index, [_fresh(value) for value in values])
        if not _writes(module):
            return module

        # An operation was composed of others below functionalization, as linear for linear.out.
        def run_again(*placeholders: Any) -> list[Any]:
            return RecordingInterpreter(module, {}, list(placeholders)).run()

        return _without_writes(run_again, [_fresh(value) for value in values])


def _without_writes(function: Any, values: list[Any]) -> fx.GraphModule:
    functional = torch.func.functionalize(function, remove="mutations")
    return proxy_trace(functional, values)


def _fresh(value: Any) -> Any:
    return relative_spec(value).empty() if isinstance(value, torch.Tensor) else value


def _writes(module: fx.GraphModule) -> bool:
    """Whether a graph writes in place, other than to its inputs at the end."""
    return any(
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and not (node.target is aten.copy_.default and node.args[0].op == "placeholder")  # pyright: ignore
        for node in module.graph.nodes
    )


def _restore_functional_operations(graph: fx.Graph) -> None:
    """Replace functional variants of operations that write to nothing by these operations."""
    for node in graph.nodes:
        original = mutating_operation_of(node.target)
        if original is not None and not original._schema.is_mutable:
            node.target = original


def _mutations(
    recording: Recording, graph: fx.Graph, inputs: list[Input], specs: list[Spec]
) -> tuple[list[Output], list[Any]]:
    """Turn the updates of inputs at the end of a graph into outputs: their descriptors and the new contents."""
    placeholders = {node: index for index, node in enumerate(node for node in graph.nodes if node.op == "placeholder")}
    outputs: list[Output] = []
    values: list[Any] = []
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in placeholders:
            index = placeholders[node.args[0]]
            if any(spec.overlaps_itself for spec in _written_specs(recording, inputs[index], specs[index])):
                # Functionalization takes the elements for separate ones.
                raise TraceError(
                    describe(f"trace({recording.name})(…)", "it writes to a tensor whose elements share memory")
                )
            outputs.append(Mutation(index))
            values.append(node.args[1])
            graph.erase_node(node)
    return outputs, values


def _written_specs(recording: Recording, written: Input, spec: Spec) -> list[TensorSpec]:
    """The tensors that an update of an input writes through: the input, or the arguments of which it is the base."""
    if isinstance(written, Base):
        return [d.spec for d in recording.inputs if isinstance(d, Argument) and d.leaf in written.leaves]
    return [spec] if isinstance(spec, TensorSpec) else []


# ---- inputs that the function closes over -----------------------------------------------------------------------


def _lift_attributes(recording: Recording, inputs: list[Input], values: list[Any]) -> dict[str, int]:
    """Make every tensor that the recording reaches an input; maps attribute names to input numbers."""
    attributes: dict[str, int] = {}
    known: dict[int, int] = {}
    for node in recording.module.graph.nodes:
        if node.op != "get_attr" or node.target in attributes:
            continue
        value = _attribute(recording.module, node.target)
        if not isinstance(value, torch.Tensor):
            continue  # a submodule of a higher-order operation
        if id(value) not in known:
            known[id(value)] = len(inputs)
            environment = recording.environment
            literal = all(user.target in (aten.lift_fresh_copy.default, aten.lift_fresh.default) for user in node.users)
            kind = environment.kinds.get(id(value), "constant" if literal else "closed-over")
            name = environment.names.get(id(value)) or f"{kind}_{sum(isinstance(i, Captured) for i in inputs)}"
            check_plain(value, name, f"trace({recording.name})(…)")
            inputs.append(Captured(kind, name, value))  # pyright: ignore[reportArgumentType]
            with recording.mode, torch.no_grad():
                values.append(relative_spec(value).empty())
        attributes[node.target] = known[id(value)]
    return attributes


def _mark_quiet(recording: Recording, inputs: list[Input], attributes: dict[str, int]) -> None:
    """Mark captured tensors that only operations update of which autograd does not learn."""
    hidden: set[int] = set()
    declared: set[int] = set()
    for node in recording.module.graph.nodes:
        unseen = updated_in_hiding(node)
        found, arguments = (hidden, unseen) if unseen else (declared, written_arguments(node))
        found |= {attributes[root(a).target] for a in arguments if root(a).target in attributes}  # pyright: ignore
    for index in hidden - declared:
        inputs[index] = dataclasses.replace(inputs[index], quiet=True)  # pyright: ignore


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
