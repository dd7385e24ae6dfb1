"""Kernels of a run of ATen operations: one graph of Inductor's, or two where a backward begins in the run."""

# Inductor's entry point is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pygraph.ir.descriptors import Fallback, TensorSpec
from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.ir.program import output_values
from pygraph.ir.scopes import Origin, came_from
from pygraph.lowering.draws import chain_draws, check_draws, check_order
from pygraph.lowering.inductor import compile_graph, settings, start_workers, wrapper_of
from pygraph.lowering.joint import Halves, Value, split
from pygraph.lowering.kernel_recorder import KernelGraph
from pygraph.lowering.run_cache import Recipe, RunCache
from pygraph.lowering.wrapper import kernel_graph
from pygraph.process.collection import collection_postponed

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Kernels that run in a row.

    Attributes:
        kernels: The kernels.
        inputs: What they take: inputs of the run, or results of the part before.
        key: The key of their code in Inductor's cache; None if it is not there.
    """

    kernels: KernelGraph
    inputs: tuple[Value, ...]
    key: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class FusedRun:
    """A run as kernels.

    Attributes:
        parts: Forward and backward, or the forward alone.
        results: The results of the run, in order.
        notes: What is worse than it could be.
    """

    parts: tuple[Part, ...]
    results: tuple[Value, ...]
    notes: tuple[Fallback, ...]

    def recipe(self) -> Recipe | None:
        """How to put it together again; None if that takes more than what Inductor's cache has."""
        parts = tuple((part.key, part.inputs) for part in self.parts if part.key is not None)
        return Recipe(parts, self.results) if len(parts) == len(self.parts) and not self.notes else None


def compile_run(
    module: fx.GraphModule, specs: Sequence[TensorSpec], name: str, begins: Collection[int], static: Collection[int]
) -> FusedRun | None:
    """Compile a graph of ATen operations with Inductor, from its decompositions on.

    Args:
        module: The graph; updates of inputs are ``copy_`` at its end.
        specs: Its inputs.
        name: Its name in reports.
        begins: Positions of the inputs that backwards begin with.
        static: Positions of the inputs that are there before and after, as parameters.

    Returns:
        Its kernels; None if it computes nothing.

    Raises:
        OtherDrawsError: The kernels draw other random numbers than the graph, or in another order.
    """
    found: list[FusedRun | None] = []
    origins = {node.name: came_from(node) for node in module.graph.nodes if node.meta.get("source")}

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        options.pop("get_decomp_fn", None)
        options["origins"] = origins
        check_order(module.graph, graph.graph)
        chain_draws(graph.graph)  # here, as AOTAutograd takes no operation of ours that makes views
        graph.recompile()
        halves = split(graph, begins, static) if begins else None
        run = None if halves is None else _compile_halves(halves, specs, inputs, name, options)
        if run is None:
            with TracingContext.report_output_strides():  # those of a forward may be in there already
                run = _compile_whole(graph, specs, inputs, name, options)
        found.append(run)
        return _never_called

    # Without an environment of shapes, Inductor keeps nothing. This one has no shapes that depend on data.
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    # The run has a cache of its own instead of AOTAutograd's, which would keep functions that are never called.
    with settings(), functorch_config.patch(enable_autograd_cache=False), torch.no_grad(), mode:
        with collection_postponed():
            inputs = [_fake(spec) for spec in specs]
            for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
                node.meta["val"] = value
            cache = RunCache(module, mode, specs, begins, static)
            cached = _from_cache(cache, specs, origins)
        cache.note(found=cached is not None)
        if cached is not None:
            return _checked(cached, module)
        start_workers()
        with no_dispatch_modes():  # it imports more than a run that is kept needs
            from torch._inductor.compile_fx import compile_fx
        compile_fx(module, inputs, inner_compile=inner)
        run = _checked(found[0] if found else None, module)
        recipe = None if run is None else run.recipe()
        if recipe is not None:
            cache.save(recipe)
    return run


def _checked(run: FusedRun | None, module: fx.GraphModule) -> FusedRun | None:
    """The run, which draws as its graph does; nothing of its kernels is there for the order of draws alone."""
    check_draws(module.graph, [part.kernels.module for part in ([] if run is None else run.parts)])
    return run


def _from_cache(cache: RunCache, specs: Sequence[TensorSpec], origins: Mapping[str, Origin]) -> FusedRun | None:
    """The run, put together from what caches have of it; None if they do not have all of it."""
    recipe = cache.recipe()
    if recipe is None:
        return None
    known: dict[str, list[TensorSpec | None]] = {"input": list(specs)}
    parts: list[Part] = []
    try:
        for of, (key, inputs) in zip(("forward", "backward"), recipe.parts, strict=False):
            code = cache.code(key)
            if code is None:
                return None
            given: list[Any] = [known[value.of][value.number] for value in inputs]
            kernels = kernel_graph(wrapper_of(code), given, origins)
            known[of] = _specs(kernels)
            parts.append(Part(kernels, inputs, key))
        for value in recipe.results:
            known[value.of][value.number]
    except Exception:  # whatever a file that is damaged after all may raise: the run is compiled anew
        return None
    return FusedRun(tuple(parts), recipe.results, ())


def _specs(kernels: KernelGraph) -> list[TensorSpec | None]:
    values = output_values(kernels.module.graph)
    return [value.meta["spec"] if isinstance(value, fx.Node) else None for value in values]


def _compile_whole(
    graph: fx.GraphModule, specs: Sequence[TensorSpec], inputs: Sequence[Any], name: str, options: dict[str, Any]
) -> FusedRun | None:
    values = output_values(graph.graph)
    results = tuple(Value("forward", index) for index, value in enumerate(values) if isinstance(value, fx.Node))
    _keep_strides(graph, [value.number for value in results])
    compiled = compile_graph(graph, inputs, name, **options)
    if compiled is None:
        return None
    kernels, note = compiled.kernels(specs)
    sources = tuple(Value("input", index) for index in range(len(specs)))
    return FusedRun((Part(kernels, sources, compiled.key),), results, () if note is None else (note,))


def _compile_halves(
    halves: Halves, specs: Sequence[TensorSpec], inputs: Sequence[Any], name: str, options: dict[str, Any]
) -> FusedRun | None:
    """Compile a forward, and its backward for the layouts of what the forward saves; None if that cannot be seen."""
    _keep_strides(halves.forward, range(halves.visible))
    taken = halves.forward_inputs
    chosen: dict[str, Any] = {**options, "is_inference": False, "static_input_idxs": []}
    forward = compile_graph(halves.forward, [inputs[index] for index in taken], f"{name}, forward", **chosen)
    if forward is None:
        return None
    first, note = forward.kernels([specs[index] for index in taken])
    if note is not None:
        return None
    saved: list[Any] = _specs(first)
    given: list[TensorSpec] = [specs[index] if of == "input" else saved[index] for of, index in halves.backward_inputs]
    fakes = [_fake(spec) for spec in given]
    restore_strides(halves.backward, fakes)
    _keep_strides(halves.backward, range(len(output_values(halves.backward.graph))))
    chosen |= {"is_backward": True, "static_input_idxs": list(range(len(given)))}
    with TracingContext.report_output_strides():  # the forward's are in there already
        backward = compile_graph(halves.backward, fakes, f"{name}, backward", **chosen)
    if backward is None:
        return None
    second, note = backward.kernels(given)
    sources = tuple(Value("input", index) for index in taken)
    parts = Part(first, sources, forward.key), Part(second, halves.backward_inputs, backward.key)
    return FusedRun(parts, halves.results, () if note is None else (note,))


def restore_strides(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Copy results that have other strides, where saved tensors have others than in eager, to those of eager.

    The gradient of a convolution's weight is in channels-last format where the saved input is.
    """
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    values = output_values(module.graph)
    wanted = [value.meta["val"] for value in values]
    view_to_reshape(module)  # as Inductor does it: a view may not be one of other strides
    fake_tensor_prop(module, inputs)
    with module.graph.inserting_before(module.graph.output_node()):
        for position, (value, one) in enumerate(zip(values, wanted, strict=True)):
            if value.meta["val"].stride() == one.stride():
                continue
            options = {"dtype": one.dtype, "device": one.device}
            memory = module.graph.call_function(aten.empty_strided.default, (one.shape, one.stride()), options)
            values[position] = module.graph.call_function(aten.copy.default, (memory, value))
            memory.meta = values[position].meta = {"val": one}
    module.graph.output_node().args = (tuple(values),)
    module.recompile()


def _keep_strides(module: fx.GraphModule, results: Sequence[int]) -> None:
    """Have results keep the strides that they have in eager: other nodes take them."""
    module.graph.output_node().meta["user_visible_output_idxs"] = list(results)


def _never_called(inputs: list[Any]) -> Sequence[Any]:
    raise NotImplementedError


def _fake(spec: TensorSpec) -> torch.Tensor:
    """A fake tensor at the offset of the spec in its storage, by which Inductor sees whether it is aligned."""
    flat = torch.empty(spec.offset + spec.span, dtype=spec.dtype, device=spec.device)
    return flat.as_strided(spec.shape, spec.stride, spec.offset)
