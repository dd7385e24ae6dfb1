"""The nodes of a region as Python code: interpreting a graph costs as much as launching its kernels."""

# Arguments of nodes are of any type.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from pygraph.ir.decisions import ask, check


class Region(Protocol):
    """The attributes of a region that its code depends on, see `pygraph.runtime.body.RegionBody`."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    statics: list[fx.Node]
    numbers: list[fx.Node]
    generators: dict[fx.Node, torch.Generator]
    outputs: list[fx.Node]
    last_use: list[list[fx.Node]]

    @property
    def layouts(self) -> Mapping[fx.Node, Any]:
        """Expected strides of results that kernels read."""
        ...

    @property
    def producers(self) -> Collection[fx.Node]:
        """The nodes that allocate the memory of outputs."""
        ...

    def constant(self, node: fx.Node) -> Any:
        """The value of a ``get_attr`` node, or of a generator."""
        ...


Straight: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[Any]], list[Any]]
"""A function of the inputs, the captured tensors and the numbers of a region, which returns its outputs."""


def straight_line(
    body: Region, own_memory: Callable[[Any, Any], Any], in_layout: Callable[[Any, Any], Any]
) -> tuple[Straight, dict[int, fx.Node]]:
    """The nodes of a region as one function, in which each value is deleted after its last use.

    Returns:
        The function, and its nodes by the lines of its code that run their operations.

    Args:
        body: The region.
        own_memory: Makes of a result and its operation's arguments a result in memory of its own.
        in_layout: Makes of a result and what it is expected to be one that lies in memory like that.

    For a region of ``y = aten.relu(x)`` and ``z = aten.add(y, 2)``, of which ``z`` is needed outside::

        def region(inputs, statics, numbers):
            v0, = inputs
            v1 = f0(v0)
            v2 = f1(v1, 2)
            v2 = own_memory(v2, (v1, 2,))
            del v1
            return [v2]
    """
    scope: dict[str, Any] = {"own_memory": own_memory, "in_layout": in_layout}
    names: dict[fx.Node, str] = {}

    def bind(value: Any) -> str:
        name = f"c{len(scope)}"
        scope[name] = value
        return name

    def name(node: fx.Node) -> str:
        if (node.op == "get_attr" or node in body.generators) and node not in names:
            names[node] = bind(body.constant(node))
        return names.setdefault(node, f"v{len(names)}")

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return name(value)
        if type(value) in _LITERALS:
            return repr(value)
        if isinstance(value, slice):
            parts: slice[Any, Any, Any] = value
            return f"slice({text(parts.start)}, {text(parts.stop)}, {text(parts.step)})"
        if isinstance(value, (tuple, list)):
            items = "".join(f"{text(item)}, " for item in value)
            if hasattr(value, "_fields"):  # a named tuple
                return f"{bind(type(value))}({items})"
            return f"({items})" if isinstance(value, tuple) else f"[{items}]"
        if isinstance(value, dict):
            return "{" + "".join(f"{bind(key)}: {text(item)}, " for key, item in value.items()) + "}"
        return bind(value)

    lines = ["def region(inputs, statics, numbers):"]
    for group, nodes in (("inputs", body.inputs), ("statics", body.statics), ("numbers", body.numbers)):
        lines.append(f"    {''.join(name(node) + ', ' for node in nodes)}= {group}" if nodes else "    pass")
    operations: dict[int, fx.Node] = {}
    for index, node in enumerate(body.nodes):
        result = name(node)
        args = "".join(f"{text(argument)}, " for argument in node.args)
        kwargs = f"**{text(dict(node.kwargs))}" if node.kwargs else ""  # a name may be a keyword of Python's
        lines.append(f"    {result} = {bind(_function(node.target))}({args}{kwargs})")
        operations[len(lines)] = node
        lines += [f"    {result} = own_memory({result}, ({args}))"] if node in body.producers else []
        lines += [f"    {result} = in_layout({result}, {bind(body.layouts[node])})"] if node in body.layouts else []
        if body.last_use[index]:
            lines.append(f"    del {', '.join(map(name, body.last_use[index]))}")
    lines.append(f"    return [{', '.join(map(name, body.outputs))}]")
    exec("\n".join(lines), scope)  # the text is made of names and literals from above only
    return scope["region"], operations


def _function(target: Any) -> Any:
    """The function that runs a node: an operation without the wrapper around it, which only forwards its arguments."""
    if target is ask():
        return check  # of numbers on the host; torch's way to it takes as long as reading them
    if target is torch.ops.aten._local_scalar_dense.default:
        return torch.Tensor.item
    return target._op if type(target) is torch._ops.OpOverload else target  # pyright: ignore  # torch 2.11 and 2.13


_LITERALS = (int, bool, str, type(None))
