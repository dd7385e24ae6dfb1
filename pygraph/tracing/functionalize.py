"""The second run: the recording without in-place operations, updates of inputs as explicit outputs."""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.ir.descriptors import (
    Argument,
    Base,
    Captured,
    Input,
    Mutation,
    Output,
    Result,
    Spec,
    TensorSpec,
    contiguous_strides,
)
from pygraph.ir.effects import has_effect, is_view, root, written_arguments
from pygraph.ir.functional_variants import (
    call_functionally,
    functional_variant_of,
    is_fused_optimizer,
    mutating_operation_of,
    needs_functional_variant,
)
from pygraph.ir.interpreter import Interpreter
from pygraph.ir.program import Program, output_values
from pygraph.tracing import interruptions
from pygraph.tracing.aliasing import (
    classify_outputs,
    merge_overlapping,
    relative_views,
    whole_memory,
    with_strides,
)
from pygraph.tracing.descriptions import check_described
from pygraph.tracing.fake_arguments import check_plain, relative_spec
from pygraph.tracing.hidden_writes import HIDDEN_WRITES, updated_in_hiding, updates_in_hiding
from pygraph.tracing.modes import fake_tracing
from pygraph.tracing.proxy_trace import proxy_trace
from pygraph.tracing.recording import Recording

aten = torch.ops.aten


def functionalize(recording: Recording) -> Program:
    """Turn a recording into a Program: functional, updates of inputs as outputs, aliasing described."""
    module, inputs, values = recording.module, list(recording.inputs), list(recording.values)
    attributes = _lift_attributes(recording, inputs, values)
    _mark_quiet(recording, inputs, attributes)
    inputs, values, rebuild = merge_overlapping(recording, inputs, values)
    aliases, statics, results, hidden = classify_outputs(recording, inputs, rebuild)
    specs = [_spec(value) for value in values]

    def flat(*placeholders: Any) -> list[Any]:
        originals = rebuild.unpack(placeholders)
        outs = _Replay(module, attributes, originals).run()
        kept = [with_strides(outs[position], recording.out_leaves[leaf]) for position, leaf in results]
        shared = [whole_memory(outs[position], size, recording, position) for position, size in hidden]
        return kept + shared

    with fake_tracing(recording.mode), torch.inference_mode(False), torch.no_grad():
        fresh = [_fresh(value) for value in values]
        graph_module = _without_writes(flat, fresh)
        if _writes(graph_module):
            # What an operation was composed of below functionalization, as linear for linear.out.
            composed, fresh = graph_module, [_fresh(value) for value in values]

            def again(*placeholders: Any) -> list[Any]:
                return _Replay(composed, {}, list(placeholders)).run()

            graph_module = _without_writes(again, fresh)

    graph = graph_module.graph
    for node in graph.nodes:
        original = mutating_operation_of(node.target)
        if original is not None and not original._schema.is_mutable:
            node.target = original
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    outputs: list[Output] = []
    out_values: list[Any] = []
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in placeholders:
            index = placeholders.index(node.args[0])
            if any(spec.overlaps_itself for spec in _written_specs(recording, inputs[index], specs[index])):
                # Functionalization takes the elements for separate ones.
                raise TraceError(
                    describe(f"trace({recording.name})(…)", "it writes to a tensor whose elements share memory")
                )
            outputs.append(Mutation(index))
            out_values.append(node.args[1])
            graph.erase_node(node)
    returned = output_values(graph)
    for (_, leaf), value in zip(results, returned, strict=False):
        outputs.append(Result(recording.out_paths[leaf], leaf, _spec(recording.out_leaves[leaf])))
        out_values.append(value)
    first_hidden = len(outputs)
    for value in returned[len(results) :]:
        outputs.append(Result("shared memory of results", -1, _spec(value.meta["val"])))
        out_values.append(value)
    graph.output_node().args = (tuple(out_values),)
    with fake_tracing(recording.mode):
        relative_views(graph, placeholders, inputs)
    _finish_graph(graph, inputs, specs)
    _drop_values(graph_module)
    graph_module.recompile()
    aliases = [
        dataclasses.replace(alias, index=alias.index + first_hidden) if alias.of == "output" else alias
        for alias in aliases
    ]
    return Program(
        name=recording.name,
        module=graph_module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        aliases=tuple(aliases),
        statics=tuple(statics),
        in_tree=recording.in_tree,
        out_tree=recording.out_tree,
        stage="aten",
        history=("trace",),
        baked=recording.baked,
    )


def _without_writes(function: Any, values: list[Any]) -> fx.GraphModule:
    functional = torch.func.functionalize(function, remove="mutations")
    return proxy_trace(functional, values)


def _writes(module: fx.GraphModule) -> bool:
    """Whether a graph writes in place, other than to its inputs at the end."""
    return any(
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and not (node.target is aten.copy_.default and node.args[0].op == "placeholder")  # pyright: ignore
        for node in module.graph.nodes
    )


def _written_specs(recording: Recording, written: Input, spec: Spec) -> list[TensorSpec]:
    """What an update of an input writes through: the input, or the arguments whose shared memory it is."""
    if isinstance(written, Base):
        return [d.spec for d in recording.inputs if isinstance(d, Argument) and d.leaf in written.leaves]
    return [spec] if isinstance(spec, TensorSpec) else []


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
    """Say of captured tensors which are updated in hiding only."""
    hidden: set[int] = set()
    told: set[int] = set()
    for node in recording.module.graph.nodes:
        quietly = updated_in_hiding(node)
        found, arguments = (hidden, quietly) if quietly else (told, written_arguments(node))
        found |= {attributes[root(a).target] for a in arguments if root(a).target in attributes}  # pyright: ignore
    for index in hidden - told:
        inputs[index] = dataclasses.replace(inputs[index], quiet=True)  # pyright: ignore


class _Replay(Interpreter):
    """Run a recording again, with its attributes given as values and its source lines carried over."""

    def __init__(self, module: fx.GraphModule, attributes: dict[str, int], values: list[Any]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._attributes = attributes
        self._values = values

    def run(self) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        count = sum(node.op == "placeholder" for node in self.module.graph.nodes)  # pyright: ignore
        return list(super().run(*self._values[:count]))

    def run_node(self, n: fx.Node) -> Any:
        interruptions.check()
        tracing = proxy_tensor.get_proxy_mode()
        assert tracing is not None
        graph: fx.Graph = tracing.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        foreign = _is_foreign(n.target) or is_fused_optimizer(n.target)
        out = self._call_foreign(n) if foreign else super().run_node(n)
        for node in reversed(graph.nodes):
            if node is last:
                break
            node.meta.setdefault("source", n.meta.get("source"))
        return out

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self._attributes:
            return self._values[self._attributes[target]]
        return super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        check_described(target, args)
        if target in HIDDEN_WRITES and updates_in_hiding(args):
            return HIDDEN_WRITES[target](*args, **kwargs)
        if _is_decomposed_by_functorch(target):
            target = functional_variant_of(target)
        return super().call_function(target, args, kwargs)

    def _call_foreign(self, node: fx.Node) -> Any:
        """Call somebody else's operation, which may depend on strides, on arguments with those of the first run."""
        given = self.fetch_args_kwargs_from_env(node)
        recorded = map_arg((node.args, node.kwargs), _recorded_value)
        args, kwargs = pytree.tree_map(with_strides, given, recorded)
        target: Any = node.target
        if needs_functional_variant(target):
            return call_functionally(target, (args, kwargs), given)
        return target(*args, **kwargs)


def _recorded_value(node: fx.Node) -> Any:
    return node.meta.get("val")


@functools.cache
def _is_decomposed_by_functorch(target: Any) -> bool:
    """Whether ``torch.func.functionalize`` would put several operations, that round otherwise, in its place.

    functorch has such decompositions for its transforms. What is left of them in a recording is
    ``binary_cross_entropy_with_logits`` (torch 2.11 and 2.13); the others are composite, and recorded as their parts.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = target.name()
    return has(name, "FuncTorchDynamicLayerFrontMode") and not has(name, "CompositeImplicitAutograd")


def _is_foreign(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")


def _fresh(value: Any) -> Any:
    return relative_spec(value).empty() if isinstance(value, torch.Tensor) else value


def _finish_graph(graph: fx.Graph, inputs: list[Input], specs: list[Spec]) -> None:
    """Drop dead and empty operations, turn fake values into specs, and name placeholders by their descriptors."""
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", None) == "profiler":
            graph.erase_node(node)  # a label for the profiler, as of torch.optim around its step; it computes nothing
    for node in list(graph.nodes):
        if node.target in (aten.lift_fresh.default, aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    position = 0
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.pop("val", None)
        source = node.meta.get("source")
        spec = _spec(value)
        if node.target is aten.copy.default and isinstance(spec, TensorSpec):
            # The result is fresh; a fake one has the first argument's offset until torch's cache of fakes knows it.
            spec = dataclasses.replace(spec, offset=0)
        node.meta = {"spec": spec, "source": source}
        _fold_zeros(node, zeros)
        if node.op == "placeholder":
            node.meta["spec"] = specs[position]
            position += 1
    assert position == len(inputs)


def _drop_values(module: fx.GraphModule) -> None:
    """Have no fake tensors in what graphs of control flow know of their nodes, nor in nodes that were erased."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            # An erased node still has a name there. Private; checked with torch 2.13.
            for node in (*part.graph.nodes, *part.graph._graph_namespace._obj_to_name):
                if isinstance(node, fx.Node):
                    # "val", and for custom operations "eager_input_vals"; other versions may have others.
                    node.meta = {key: value for key, value in node.meta.items() if not _holds_fakes(value)}


def _holds_fakes(value: Any) -> bool:
    if isinstance(value, (str, int, type(None))):
        return False
    return any(isinstance(leaf, (FakeTensor, torch.SymInt, torch.SymFloat)) for leaf in pytree.tree_leaves(value))


def _fold_zeros(node: fx.Node, zeros: set[fx.Node]) -> None:
    """Make the tangents that torch knows to be zero ordinary zeros, and what it multiplies with them too.

    They have no memory in eager, and zero times infinity is zero for them.
    """
    spec = node.meta["spec"]
    multiplied = node.target is aten.mul.Tensor and any(arg in zeros for arg in node.args)
    divided = node.target is aten.div.Tensor and node.args[0] in zeros
    if node.target is aten._efficientzerotensor.default:
        node.target = aten.zeros.default
    elif (multiplied or divided) and isinstance(spec, TensorSpec) and spec.stride == contiguous_strides(spec.shape):
        node.target, node.args = aten.zeros.default, (list(spec.shape),)
        node.kwargs = {"dtype": spec.dtype, "device": spec.device}
    elif not (is_view(node) and node.args[0] in zeros):
        return
    zeros.add(node)


def _spec(value: Any) -> Spec:
    if isinstance(value, torch.Tensor):
        layout: tuple[Any, ...] = (*value.shape, *value.stride())
        known = all(isinstance(n, int) or n.node.is_constant() for n in layout)
        if not known or not isinstance(value.storage_offset(), int):
            return None
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_spec(item) for item in value)
    for symbolic, kind in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
        if isinstance(value, symbolic):
            return kind
    if isinstance(value, (bool, int, float)):
        return type(value)
    return None


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
