"""Recording operations on fake tensors as a graph of kernels and allocations."""

# The wrapper's functions and Inductor's kernels are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import bisect
import dataclasses
import operator
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.ir import attention_states as states
from pygraph.ir.descriptors import TensorSpec, tensor_specs
from pygraph.ir.effects import is_random
from pygraph.ir.program import graph_module
from pygraph.ir.scopes import Origin, joined

aten = torch.ops.aten


class UntraceableError(Exception):
    """A wrapper does something that cannot be recorded as nodes."""


@dataclasses.dataclass(frozen=True)
class KernelGraph:
    """The nodes of a wrapper.

    Attributes:
        module: The graph: one placeholder per tensor argument, then one per entry of ``constants``. Nodes have a
            ``spec``. It returns a tuple of nodes and constants.
        constants: Tensors that Inductor has made.
    """

    module: fx.GraphModule
    constants: tuple[torch.Tensor, ...]


# Inductor's comment above every launch: the nodes of Dynamo's graph that it computes.
_COMMENT = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\]")


class Origins:
    """The user's line and scopes behind each line of a wrapper.

    Args:
        code: The wrapper's.
        origins: These, as metadata of nodes, by the names in its comments.
    """

    def __init__(self, code: types.CodeType, origins: Mapping[str, Origin]) -> None:
        self._code = code
        self._numbers: list[int] = []
        self._origins: list[Origin] = []
        if not origins:
            return
        try:
            text = Path(code.co_filename).read_text()
        except (OSError, UnicodeDecodeError):  # its file is gone, as torch's caches may be
            return
        for number, line in enumerate(text.splitlines(), 1):
            comment = _COMMENT.search(line)
            if comment is not None:
                self._numbers.append(number)
                names = comment.group(1).split(", ")
                self._origins.append(joined([origins[name] for name in names if name in origins]))

    def now(self) -> Origin:
        """The line and scopes behind what the wrapper runs now, as metadata of nodes."""
        frame = sys._getframe(1) if self._numbers else None
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        index = -1 if frame is None else bisect.bisect(self._numbers, frame.f_lineno) - 1
        return self._origins[index] if index >= 0 else joined(())


class KernelRecorder(TorchDispatchMode):
    """Records operations on fake tensors as nodes; a tensor that an operation writes to stays the node that it was."""

    def __init__(self, mode: FakeTensorMode, origins: Origins) -> None:
        super().__init__()
        self._mode = mode
        self._origins = origins
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []
        self._constants: list[torch.Tensor] = []
        self._last_placeholder: fx.Node | None = None

    def placeholder(self, spec: TensorSpec) -> torch.Tensor:
        """A fake tensor for an input."""
        tensor = spec.empty()
        node = self._new_placeholder(f"arg{len(self._nodes)}")
        self._register(tensor, node)
        return tensor

    def expect(self, tensor: torch.Tensor, stride: Sequence[int]) -> None:
        """Note the strides in which kernels read the result of an operation, where the fake tensor has others."""
        node = self._nodes[id(tensor)]
        node.meta["spec"] = dataclasses.replace(node.meta["spec"], stride=tuple(stride))

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for one that Inductor has made."""
        fake = self._mode.from_tensor(tensor, static_shapes=True)
        self._register(fake, self._new_placeholder(f"constant{len(self._constants)}"))
        self._constants.append(tensor)
        return fake

    def _new_placeholder(self, name: str) -> fx.Node:
        before = self._last_placeholder
        with self._graph.inserting_after(self._graph._root if before is None else before):
            self._last_placeholder = self._graph.placeholder(name)
        return self._last_placeholder

    def _register(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        node.meta = {"spec": TensorSpec.of(tensor), **self._origins.now()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation on fake tensors and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        args, kwargs = self._with_states(func, args, kwargs)
        known = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if func.namespace == "prim" or func in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
            if isinstance(result, torch.Tensor) and id(args[0]) in self._nodes:
                self._nodes[id(result)] = self._nodes[id(args[0])]
                self._alive.append(result)
            return result
        node: fx.Node = self._graph.call_function(func, *self._as_nodes((args, kwargs)))
        specs: Any = tuple(map(_spec, result)) if isinstance(result, (list, tuple)) else _spec(result)
        node.meta = {"spec": specs, **self._origins.now()}
        if isinstance(result, torch.Tensor):
            if id(result) not in known:
                self._register(result, node)
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor) and id(item) not in known:
                    self._register(item, self._graph.call_function(operator.getitem, (node, index)))
                    self._settle_state(node, index, item)
                elif item is not None and not isinstance(item, (torch.Tensor, int)):
                    raise UntraceableError(f"{func} returns a {type(item).__name__}")
        elif result is not None:
            raise UntraceableError(f"{func} returns a {type(result).__name__}")
        return result

    def _with_states(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an operation, with the random generator's state where attention reads it from.

        That is on the host in an ordinary launch and on the device in a capture.
        """
        names = states.reads(func)
        if not names:
            return args, kwargs

        def settled(name: str, value: Any) -> Any:
            if name not in states.STATES or not isinstance(value, torch.Tensor):
                return value
            node = self._graph.call_function(torch.ops.pygraph.state_to_read.default, (self._as_nodes(value),))
            read = torch.empty_like(value)
            self._register(read, node)
            return read

        return (
            tuple(settled(name, value) for name, value in zip(names, args, strict=False)),
            {name: settled(name, value) for name, value in kwargs.items()},
        )

    def _settle_state(self, node: fx.Node, index: int, item: torch.Tensor) -> None:
        """Have the random generator's state that attention returns on the device, captured or not."""
        if not states.is_state(node, index):
            return
        device = next(spec.device for a in node.all_input_nodes for spec in tensor_specs(a.meta["spec"]))
        args = (self._nodes[id(item)], device, is_random(node))
        state = self._graph.call_function(torch.ops.pygraph.state_to_keep.default, args)
        self._nodes[id(item)] = state
        state.meta = {**node.meta, "spec": dataclasses.replace(TensorSpec.of(item), device=device)}

    def _as_nodes(self, values: Any) -> Any:
        def node_of(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in self._nodes:
                if isinstance(leaf, FakeTensor):
                    raise UntraceableError("a tensor appears that no operation has made")
                self.constant(leaf)
                self._nodes[id(leaf)] = self._last_placeholder  # pyright: ignore
                self._alive.append(leaf)
            return self._nodes[id(leaf)]

        return pytree.tree_map(node_of, values)

    def finish(self, returned: Sequence[Any]) -> KernelGraph:
        """The graph, which returns the nodes of what the wrapper has returned."""
        self._graph.output(tuple(self._as_nodes(list(returned))))
        for node in reversed(list(self._graph.nodes)):
            if node.target is torch.ops.pygraph.state_to_keep.default and not node.users:
                self._graph.erase_node(node)  # a state that nothing reads
        return KernelGraph(graph_module(torch.nn.Module(), self._graph), tuple(self._constants))


def _spec(value: Any) -> TensorSpec | None:
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else None
