"""The text of a Program: runnable Python, the same for equal Programs, without addresses.

Names are given here, at print time, from descriptors and operations; they mean nothing to any pass. `NAMESPACE` is
what the text needs to run.
"""

# torch has no public names for operator overloads and their schemas (checked with torch 2.11 and 2.13), and
# isinstance leaves the items of a node's nested arguments unknown.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from pygraph.ir.constants import IMMUTABLE
from pygraph.ir.descriptors import (
    Alias,
    Argument,
    Base,
    Captured,
    CapturedGenerator,
    Element,
    Input,
    Mutation,
    Output,
    PointerTable,
    Result,
    ScalarArgument,
    Slot,
    Spec,
    TensorSpec,
)
from pygraph.ir.fields import ProgramFields

NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "aten": torch.ops.aten,
    "pygraph_ops": torch.ops.pygraph,
    "operator": operator,
    "math": math,
    "device": torch.device,
    "inf": math.inf,
    "nan": math.nan,
}


def program_text(program: ProgramFields, namer: Namer | None = None) -> str:
    """The Program as Python source: a header with its history, then one function.

    Args:
        program: The Program.
        namer: Names for nodes, where some have names already; it knows the names of all afterwards.

    Example:
        >>> import torch, pygraph
        >>> text = program_text(pygraph.trace(torch.sin)(torch.ones(2)))
        >>> scope = dict(NAMESPACE)
        >>> exec(text, scope)
        >>> scope["program"](torch.zeros(2))
        (tensor([0., 0.]),)
    """
    namer = Namer() if namer is None else namer
    lines = [f"# {program.name} ({program.stage}): {' | '.join(program.history)}"]
    for fallback in program.fallbacks:
        where = f", {fallback.source}" if fallback.source else ""
        lines.append(f"# fallback: {fallback.what}: {fallback.reason}{where}")
    for region in program.regions:
        lines.append(f"# region {region.index}: {region.kind}, {region.way}" + _because(region.reason, region.source))
    lines += _submodules(program.module, "")
    lines.append("def program(" if program.inputs else "def program():")
    for node, descriptor in zip(program.placeholders, program.inputs, strict=True):
        name = namer.give(node, input_name(descriptor))
        spec = "generator" if isinstance(descriptor, CapturedGenerator) else spec_text(node.meta.get("spec"))
        lines.append(f'    {name}: "{spec}",  # {input_text(descriptor)}')
    if program.inputs:
        lines.append("):")
    lines += _body(program.module.graph, namer, "    ", program)
    lines.append("    return (")
    for value, descriptor in zip(program.results, program.outputs, strict=True):
        lines.append(f"        {namer.text(value)},  # {output_text(descriptor, program)}")
    lines.append("    )")
    for alias in program.aliases:
        lines.append(f"    # {alias.path}: {_alias_text(alias, program)}")
    for static in program.statics:
        lines.append(f"    # {static.path}: {_value_text(static.value)}")
    for baked in program.baked:
        lines.append(f"    # {baked.path} was {_value_text(baked.value)}")
    return "\n".join(lines) + "\n"


def spec_text(spec: Spec) -> str:
    """A node's spec as the printed annotation."""
    if spec is None:
        return "?"
    if isinstance(spec, TensorSpec):
        return str(spec)
    if isinstance(spec, tuple):
        return f"({', '.join(map(spec_text, spec))})"
    return spec.__name__


def target_text(target: Any) -> str:
    """How an FX target is written in the printed program."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        prefix = {"aten": "aten", "pygraph": "pygraph_ops"}.get(namespace, f"torch.ops.{namespace}")
        return f"{prefix}.{name}.{target._overloadname}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target.__name__}"
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    if module in ("_operator", "operator"):
        return f"operator.{name}"
    if module.startswith("torch"):
        return f"torch.{name}" if hasattr(torch, name) else f"{module}.{name}"
    return f"{module}.{name}" if module else name


class Namer:
    """Unique, readable names for nodes, in order of appearance.

    Args:
        given: Names that some nodes have already.
        taken: Names that no other node is to get.
    """

    def __init__(self, given: Mapping[fx.Node, str] | None = None, taken: Iterable[str] = ()) -> None:
        self.names: dict[fx.Node, str] = dict(given or {})
        self._taken = {*taken, *self.names.values()}
        self._counts: dict[str, int] = {}

    def give(self, node: fx.Node, stem: str) -> str:
        """Name a node after a word, and a number if another one has that name; one that has a name keeps it."""
        if node in self.names:
            return self.names[node]
        stem = re.sub(r"\W+", "_", stem).strip("_").removesuffix("_default") or "value"
        if stem[0].isdigit() or stem in ("program", *NAMESPACE):
            stem = f"_{stem}"
        count = self._counts.get(stem, 0)
        while (name := stem if not count else f"{stem}_{count}") in self._taken:
            count += 1
        self._counts[stem] = count + 1
        self._taken.add(name)
        self.names[node] = name
        return name

    def text(self, value: Any) -> str:
        """An argument of a node as Python source."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            items = ", ".join(map(self.text, value))
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.text(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        return repr(value)


def _body(graph: fx.Graph, namer: Namer, indent: str, program: ProgramFields | None) -> list[str]:
    lines: list[str] = []
    region: int | None = None
    for node in graph.nodes:
        if program is not None and program.regions and node.meta.get("region", region) != region:
            region = node.meta["region"]
            lines.append(f"{indent}# region {region}")
        if node.op == "get_attr":
            namer.give(node, str(node.target))
            continue
        if node.op == "call_function":
            lines.append(indent + node_text(node, namer))
    return lines


def node_text(node: fx.Node, namer: Namer) -> str:
    """The line of a node that calls an operation, whose arguments have names."""
    args = [namer.text(arg) for arg in node.args]
    args += [f"{key}={namer.text(value)}" for key, value in node.kwargs.items()]
    target = target_text(node.target)
    name = namer.give(node, operation_name(node.target))
    source = f"  # {node.meta['source']}" if node.meta.get("source") else ""
    annotation = spec_text(node.meta.get("spec"))
    return f'{name}: "{annotation}" = {target}({", ".join(args)}){source}'


def operation_name(target: Any) -> str:
    """The name of an operation, without its namespace and overload; nodes are named after it."""
    text = target_text(target)
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else text.rpartition(".")[2]


def _submodules(module: fx.GraphModule, indent: str) -> list[str]:
    """Functions that higher-order operations take, printed before the program that uses them."""
    lines: list[str] = []
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name, child in module.named_children():
        if name not in used or not isinstance(child, fx.GraphModule):
            continue
        namer = Namer()
        lines += _submodules(child, indent)
        names = [namer.give(node, "x") for node in child.graph.nodes if node.op == "placeholder"]
        lines.append(f"{indent}def {name}({', '.join(names)}):")
        lines += _body(child.graph, namer, indent + "    ", None)
        lines.append(f"{indent}    return {namer.text(child.graph.output_node().args[0])}")
    return lines


def input_name(descriptor: Input) -> str:
    """The word that an input is named after."""
    match descriptor:
        case Argument() | ScalarArgument():
            return descriptor.path
        case Element():
            return "element_of_" + descriptor.path
        case Base():
            return "base_" + descriptor.path
        case Captured() | CapturedGenerator():
            return descriptor.name
        case PointerTable():
            return "table"


def input_text(descriptor: Input) -> str:
    """The meaning of an input in words."""
    match descriptor:
        case Argument():
            return descriptor.path
        case ScalarArgument():
            return f"{descriptor.path}, live"
        case Element():
            return f"the number in {descriptor.path}, live"
        case Base():
            return f"memory shared by {descriptor.path}"
        case Captured():
            return f"{descriptor.kind} {descriptor.name}"
        case CapturedGenerator():
            return f"random {descriptor.name}"
        case PointerTable():
            slots = "; ".join(f"{i}: {_slot_text(slot)}" for i, slot in enumerate(descriptor.slots))
            return slots if descriptor.mechanism == "auto" else f"by {descriptor.mechanism}: {slots}"


def _slot_text(slot: Slot) -> str:
    return f"{slot.role} {slot.of.path}"


def output_text(descriptor: Output, program: ProgramFields) -> str:
    """The meaning of an output in words."""
    match descriptor:
        case Result():
            return descriptor.path
        case Mutation():
            return f"new contents of {input_text(program.inputs[descriptor.input])}"
        case _:
            return f"stored in slot {descriptor.slot}"


def _alias_text(alias: Alias, program: ProgramFields) -> str:
    if alias.of in ("argument", "result"):
        return f"is leaf {alias.index} of the {alias.of}s"
    if alias.of == "input":
        of = _referred_text(alias.index, program)
    else:
        of = f"output {alias.index}"
    if alias.spec is None or alias.identical:
        return f"is {of}"
    lazy = "conjugated " * alias.conjugated + "negated " * alias.negated
    return f"{alias.spec} {lazy}view of {of} at {alias.spec.offset}"


def _value_text(value: Any) -> str:
    """A value that is no tensor, without its address."""
    return repr(value) if isinstance(value, IMMUTABLE) else f"a {type(value).__name__}"


def _because(reason: str | None, source: str | None) -> str:
    return (f", because {reason}" if reason else "") + (f" ({source})" if source else "")


def _referred_text(index: int, program: ProgramFields) -> str:
    """An input by number, or past the inputs a slot of the pointer table."""
    if index < len(program.inputs):
        return input_text(program.inputs[index])
    assert program.table is not None
    return program.table.slots[index - len(program.inputs)].of.path
