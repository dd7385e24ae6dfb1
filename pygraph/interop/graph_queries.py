"""Questions about the FX graphs that AOTAutograd hands to a compiler: device, random draws, work for the host.

Nodes of such graphs say in ``meta["val"]`` what they are: fake tensors and symbolic sizes.
"""

# torch's symbolic shapes are private. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from pygraph.ir.descriptors import TensorSpec, tensor_specs
from pygraph.ir.effects import host_reason, is_work
from pygraph.ir.random_draws import draws_of

Draw = tuple[str, tuple[int, ...]]
"""A random operation, and the shape of what it draws; ``()`` if a size is not known."""


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with the metadata of its nodes; Inductor mutates the graph that it compiles."""
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = copied.output(copied.graph_copy(graph.graph, mapping))
    output.meta = dict(graph.graph.output_node().meta)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    return fx.GraphModule(graph, copied)


def device_of(graph: fx.GraphModule) -> torch.device:
    """The graph's CUDA device; the host if it has none."""
    devices = (device for node in graph.graph.nodes for device in _devices(node.meta.get("val")))
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def touches_cuda(graph: fx.GraphModule) -> bool:
    """Whether a graph has tensors on a CUDA device."""
    return device_of(graph).type == "cuda"


def inductor_supports(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether Inductor makes kernels for a graph of Dynamo's: all its tensors are on CUDA devices or the host."""
    types = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    types |= {device.type for node in module.graph.nodes for device in _devices(node.meta.get("example_value"))}
    return types <= {"cuda", "cpu"}


def _devices(value: Any) -> list[torch.device]:
    """Devices of the tensors in a node's example value."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    return [item.device for item in items if isinstance(item, torch.Tensor)]


# Higher-order operations that Inductor makes launches of.
_LAUNCHES = ("triton_kernel_wrapper", "auto_functionalized")


def needs_host(graph: fx.Graph) -> bool:
    """Whether a graph has work that cannot be captured, for which Inductor would synchronise or use the host."""
    with _with_specs(graph):
        return any(
            host_reason(node) is not None
            for node in graph.nodes
            if is_work(node) and not _is_number(node) and not str(node.target).startswith(_LAUNCHES)
        )


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def aten_random_draws(graph: fx.Graph) -> list[Draw]:
    """The random draws of a graph of AOTAutograd's, in order."""
    with _with_specs(graph):
        return random_draws(graph)


def random_draws(graph: fx.Graph) -> list[Draw]:
    """The random draws of a graph whose nodes have specs, in order."""
    found: list[Draw] = []
    for node in draws_of(graph):
        spec = next(iter(tensor_specs(node.meta["spec"])), None)
        shape = () if spec is None else spec.shape
        found.append((str(node.target), () if -1 in shape else shape))
    return found


@contextlib.contextmanager
def _with_specs(graph: fx.Graph) -> Generator[None, None, None]:
    """Give every node a spec in ``meta["spec"]``, as Programs have; backed symbolic sizes count as known."""
    for node in graph.nodes:
        node.meta["spec"] = _spec(node.meta.get("val"))
    try:
        yield
    finally:
        for node in graph.nodes:
            del node.meta["spec"]


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if free_unbacked_symbols(value):
            return None
        shape = tuple(-1 if isinstance(n, torch.SymInt) else n for n in value.shape)
        return TensorSpec(shape, (), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(map(_spec, value))
    unknown = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(value)
    return None if unknown else ()
