"""Specialization of backward Programs: to the gradients that are wanted, and to the values of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx.node import map_arg

from pygraph.ir.descriptors import Baked, Result, ScalarArgument, Static
from pygraph.ir.effects import has_effect
from pygraph.ir.program import Program


def without_results(program: Program, unwanted: Iterable[int]) -> Program:
    """Return a Program of which some results are None, and not computed.

    Args:
        program: A Program that updates nothing.
        unwanted: The leaves of those results.
    """
    left_out = set(unwanted)
    aliases = [alias for alias in program.aliases if alias.leaf not in left_out]
    if any(alias.of == "result" and alias.index in left_out for alias in aliases):
        return program
    hidden = {alias.index for alias in aliases if alias.of == "output"}
    outputs = [
        number
        for number, descriptor in enumerate(program.outputs)
        if isinstance(descriptor, Result) and (number in hidden or 0 <= descriptor.leaf not in left_out)
    ]
    module = program.copy_graph()
    results = program.results
    module.graph.output_node().args = (tuple(module.graph.output_node().args[0][number] for number in outputs),)  # pyright: ignore
    assert len(results) == len(program.outputs)
    module.graph.eliminate_dead_code(is_impure_node=has_effect)
    module.recompile()
    known = {static.leaf for static in program.statics}
    return program.replace(
        module=module,
        outputs=tuple(program.outputs[number] for number in outputs),
        aliases=tuple(
            dataclasses.replace(alias, index=outputs.index(alias.index)) if alias.of == "output" else alias
            for alias in aliases
        ),
        statics=(*program.statics, *(Static(f"result[{leaf}]", leaf, None) for leaf in sorted(left_out - known))),
    )


def with_numbers(program: Program, values: Mapping[int, Any]) -> Program:
    """Return a Program with numbers as constants.

    Args:
        program: A Program.
        values: Values by leaf of the arguments; values of leaves that are no live numbers are ignored.
    """
    baked = [d for d in program.inputs if isinstance(d, ScalarArgument) and d.leaf in values]
    if not baked:
        return program
    module = program.copy_graph()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, descriptor in zip(placeholders, program.inputs, strict=True):
        if descriptor in baked:
            value = values[descriptor.leaf]  # pyright: ignore
            for user in list(node.users):
                user.args, user.kwargs = map_arg(
                    (user.args, user.kwargs), lambda used, node=node, value=value: value if used is node else used
                )
            module.graph.erase_node(node)
    module.recompile()
    return program.replace(
        module=module,
        inputs=tuple(descriptor for descriptor in program.inputs if descriptor not in baked),
        baked=(*program.baked, *(Baked(d.path, d.leaf, values[d.leaf]) for d in baked)),
    )
