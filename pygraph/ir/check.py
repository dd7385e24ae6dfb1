"""The check that runs after every pass: nodes and descriptors are legal in the stage of their Program.

The table `_LEGAL` is the whole rule: what each stage allows. A Program that breaks it is a bug of the pass that made
it, and the error shows the node, its source line and its neighbours.
"""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pygraph.errors import ProgramError
from pygraph.ir.descriptors import (
    Argument,
    Base,
    Captured,
    CapturedGenerator,
    Element,
    Mutation,
    PointerTable,
    Result,
    ScalarArgument,
    Stage,
    Stored,
)
from pygraph.ir.effects import is_selection
from pygraph.ir.fields import check_is_program
from pygraph.ir.printing import target_text
from pygraph.ir.program import Program


@dataclasses.dataclass(frozen=True)
class _Rules:
    """Descriptors and effects that a stage allows beyond functional operations and host arithmetic."""

    inputs: tuple[type, ...]
    outputs: tuple[type, ...]
    writes: bool
    pointers: bool
    regions: bool


_VALUES = (Argument, ScalarArgument, Element, Base, Captured, CapturedGenerator)

_LEGAL: dict[Stage, _Rules] = {
    "aten": _Rules(_VALUES, (Result, Mutation), False, False, False),
    "kernels": _Rules(_VALUES, (Result,), True, False, False),
    "pointers": _Rules((*_VALUES, PointerTable), (Result, Stored), True, True, False),
    "regions": _Rules((*_VALUES, PointerTable), (Result, Stored), True, True, True),
}

_HOST_MODULES = ("_operator", "operator", "math", "torch", "builtins")


def check_program(program: Program) -> Program:
    """Return ``program`` if it keeps the rules of its stage.

    Raises:
        ArgumentError: It is no Program.
        ProgramError: With the fault, the node as text, its source line, and the nodes around it.

    Example:
        >>> import torch, pygraph
        >>> check_program(pygraph.trace(torch.cos)(torch.ones(1))).stage
        'aten'
    """
    check_is_program("check_program({})", program)
    rules = _LEGAL[program.stage]
    placeholders = program.placeholders
    if len(placeholders) != len(program.inputs):
        raise _fault(program, None, f"{len(placeholders)} placeholders for {len(program.inputs)} inputs")
    for node, descriptor in zip(placeholders, program.inputs, strict=True):
        if not isinstance(descriptor, rules.inputs):
            raise _fault(program, node, f"a {type(descriptor).__name__} input is not legal in stage {program.stage}")
    if len(program.results) != len(program.outputs):
        raise _fault(program, None, f"{len(program.results)} results for {len(program.outputs)} outputs")
    for descriptor in program.outputs:
        if not isinstance(descriptor, rules.outputs):
            raise _fault(program, None, f"a {type(descriptor).__name__} output is not legal in stage {program.stage}")
    leaves = _output_leaves(program)
    if sorted(leaves) != list(range(program.out_tree.num_leaves)):
        raise _fault(program, None, f"leaves {sorted(leaves)} do not fill a tree of {program.out_tree.num_leaves}")
    if bool(program.regions) != rules.regions and program.stage != "regions":
        raise _fault(program, None, f"regions are not legal in stage {program.stage}")
    for node in program.nodes:
        _check_node(program, node, rules)
    program.module.graph.lint()
    return program


def _output_leaves(program: Program) -> list[int]:
    """The leaves of the output tree that an output, an alias or a static value fills."""
    slots = program.table.slots if program.table is not None else ()
    results = [*program.outputs, *(slot.of for slot in slots if slot.role == "result")]
    leaves = [result.leaf for result in results if isinstance(result, Result) and result.leaf >= 0]
    return leaves + [alias.leaf for alias in program.aliases] + [static.leaf for static in program.statics]


def _check_node(program: Program, node: fx.Node, rules: _Rules) -> None:
    if node.op in ("placeholder", "output"):
        return
    if node.op == "get_attr":
        if not isinstance(getattr(program.module, str(node.target), None), torch.nn.Module):
            raise _fault(program, node, "only functions of higher-order operations are attributes")
        return
    if node.op != "call_function":
        raise _fault(program, node, f"a {node.op} node is not legal")
    if "spec" not in node.meta or "source" not in node.meta:
        raise _fault(program, node, "it has no spec or source")
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace == "pygraph" and target._schema.name in ("pygraph::load", "pygraph::store"):
            if not rules.pointers:
                raise _fault(program, node, f"pointer operations are not legal in stage {program.stage}")
        elif target._schema.is_mutable and not rules.writes:
            raise _fault(program, node, f"writing in place is not legal in stage {program.stage}")
    elif not isinstance(target, torch._ops.HigherOrderOperator) and not _is_host_function(target):
        raise _fault(program, node, "it is neither an operation nor arithmetic on numbers")
    if rules.regions and "region" not in node.meta:
        raise _fault(program, node, "it belongs to no region")
    if rules.regions and is_selection(node) and node.meta["region"] != node.args[0].meta["region"]:  # pyright: ignore
        raise _fault(program, node, "it picks a result of an operation of another region")


def _is_host_function(target: Callable[..., Any] | str) -> bool:
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", "")
    if module.startswith("torch.") and name.startswith("sym_"):
        return True
    return module in _HOST_MODULES or hasattr(operator, name) or hasattr(math, name)


def _fault(program: Program, node: fx.Node | None, problem: str) -> ProgramError:
    text = f"check_program({program.name}, after {program.history[-1]}): {problem}."
    if node is None:
        return ProgramError(text)
    nodes = program.nodes
    at = nodes.index(node)
    around = [
        f"  {'->' if other is node else '  '} {other.name} = {target_text(other.target)}{tuple(other.args)}"
        for other in nodes[max(at - 2, 0) : at + 3]
    ]
    source = node.meta.get("source")
    return ProgramError("\n".join([text + (f" From {source}." if source else ""), *around]))
