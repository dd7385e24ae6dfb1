"""An interpreter that runs a recording again under functionalization, and keeps its strides and source lines."""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.guards.iterators import is_generator
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import is_first_gradient
from pygraph.ir.evaluate import physical
from pygraph.ir.functional_variants import (
    call_functionally,
    functional_variant_of,
    is_fused_optimizer,
    needs_functional_variant,
)
from pygraph.ir.interpreter import Interpreter
from pygraph.ir.scopes import came_from
from pygraph.tracing import interruptions
from pygraph.tracing.descriptions import check_described
from pygraph.tracing.hidden_writes import HIDDEN_WRITES, updates_in_hiding
from pygraph.tracing.number_nodes import number_again
from pygraph.tracing.output_aliases import is_empty
from pygraph.tracing.recording import Recording
from pygraph.tracing.results import graph_values
from pygraph.tracing.unwritten_values import AGAIN, UnwrittenValues

aten = torch.ops.aten


class RecordingInterpreter(Interpreter):
    """Runs the graph of a recording, of which each operation is traced again.

    Args:
        module: The graph.
        attributes: The number of the value that each attribute of the graph is.
        values: The values of the graph's placeholders, followed by those of attributes.
        unwritten: Copies nodes that need not be traced again; None if all are.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        attributes: dict[str, int],
        values: list[Any],
        unwritten: UnwrittenValues | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._attributes = attributes
        self._values = values
        self._unwritten = unwritten

    def run(self) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the graph on the values."""
        count = sum(node.op == "placeholder" for node in self.module.graph.nodes)  # pyright: ignore
        return list(super().run(*self._values[:count]))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; the nodes that are traced for it get its source line."""
        interruptions.check()
        if self._unwritten is not None and (value := self._unwritten.value(n, self.env)) is not AGAIN:
            return value
        if _is_custom(n.target) or is_fused_optimizer(n.target):
            return self.traced_for(n, lambda: self._call_custom(n))
        again = super().run_node
        return self.traced_for(n, lambda: again(n) if (number := self._number(n)) is None else number)

    def _number(self, n: fx.Node) -> Any:
        """The symbol that a node computes from numbers; None if it is another one."""
        if n.op != "call_function" or not isinstance(n.meta.get("val"), (torch.SymFloat, torch.SymBool)):
            return None
        return number_again(n, self.fetch_args_kwargs_from_env(n)[0])

    @staticmethod
    def traced_for(n: fx.Node, run: Callable[[], Any]) -> Any:
        """Trace something in place of a node, from which the traced nodes get their source line."""
        tracing = proxy_tensor.get_proxy_mode()
        assert tracing is not None
        graph: fx.Graph = tracing.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        out = run()
        for node in reversed(graph.nodes):
            if node is last:
                break
            node.meta = {**came_from(n), **node.meta}
            if is_first_gradient(n):
                node.meta["first_gradient"] = True
        return out

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """The arguments of a node that is traced again."""
        if self._unwritten is not None:
            self._unwritten.make(n.all_input_nodes, self.env)
        return super().map_nodes_to_values(args, n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The value that an attribute is."""
        if target in self._attributes:
            return self._values[self._attributes[target]]
        return super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One operation, or the variant of it that functionalization treats right."""
        check_described(target, args)
        if target in HIDDEN_WRITES and updates_in_hiding(args):
            return HIDDEN_WRITES[target](*args, **kwargs)
        if _is_decomposed_by_functorch(target):
            target = functional_variant_of(target)
        functional = _functional_draw(target) if any(map(is_generator, (*args, *kwargs.values()))) else None
        if functional is not None:
            return args[0].copy_(functional(*args, **kwargs))
        return super().call_function(target, args, kwargs)

    def _call_custom(self, node: fx.Node) -> Any:
        """Call a custom operation, which may depend on strides, on arguments with the strides of the first run."""
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
    """Whether ``torch.func.functionalize`` would decompose an operation into others, which round differently.

    functorch has such decompositions for its transforms. The only one in recordings is that of
    ``binary_cross_entropy_with_logits`` (torch 2.11 and 2.13); the others are composite, and recorded as their parts.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = target.name()
    return has(name, "FuncTorchDynamicLayerFrontMode") and not has(name, "CompositeImplicitAutograd")


@functools.cache
def _functional_draw(target: Any) -> Any:
    """The operation that draws what ``target`` draws in place; None if there is none.

    Functionalization asks torch's description of ``target``, which takes no generator for some (``exponential_``).
    """
    name, overload = target._schema.name.partition("::")[2], target._overloadname
    functional = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(functional, overload, None)


def _is_custom(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")


def with_strides(value: Any, like: Any) -> Any:
    """``value``, copied to the strides of ``like`` if it has others: those of the first run, which eager has."""
    if not isinstance(value, torch.Tensor) or any(not isinstance(n, int) for n in (*like.shape, *value.shape)):
        return value
    if value.stride() == like.stride() or is_empty(value):
        return value
    return aten.copy(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device), value)


def whole_memory(value: torch.Tensor, size: int, recording: Recording, position: int) -> torch.Tensor:
    """The memory that several results share, as a flat tensor laid out as in the first run."""
    like: Any = graph_values(recording.out_leaves)[position]
    value = physical(value)
    if like.untyped_storage().nbytes() == TensorSpec.of(like).nbytes:
        value = with_strides(value, like)
    same = value.stride() == like.stride() and value.storage_offset() == like.storage_offset()
    if not same or value.untyped_storage().nbytes() != size * value.element_size():
        raise TraceError(
            describe(f"trace({recording.name})(…)", "results share memory in a way that a graph cannot reproduce")
        )
    return value.as_strided((size,), (1,), 0)
