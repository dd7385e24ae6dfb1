"""Effects of a recorded function: random numbers that it draws, and tensors that it reads and updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pygraph.ir.effects import is_random, is_view, root, written_arguments
from pygraph.tracing.hidden_writes import updated_in_hiding
from pygraph.tracing.recording import Recording


class RecordedEffects:
    """The effects of a recorded function besides computing its results.

    Args:
        recording: The recording.
        count: How many leaves its arguments have; the others are lifted tensors.

    Attributes:
        draws: Whether it draws random numbers.
        generators: The generators that it passes to operations.
        writes: Whether it updates tensors that it was passed or closes over.
        written: The leaves that it updates, and whether its results depend on what they were.
        captured: The tensors that it closes over and updates, likewise.
        used: The lifted tensors that it reads, by number.
    """

    def __init__(self, recording: Recording, count: int) -> None:
        nodes = list(recording.module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        inputs: list[Any] = list(recording.inputs)  # arguments only, which have leaves
        leaf_of: dict[fx.Node, int] = {node: one.leaf for node, one in zip(placeholders, inputs, strict=True)}
        self.draws = any(is_random(node) for node in nodes)
        self.generators = tuple({id(one.value): one.value for one in recording.generators.values()}.values())
        roots = {root(a) for node in nodes for a in (*written_arguments(node), *updated_in_hiding(node))}
        self.writes = any(node.op in ("placeholder", "get_attr") for node in roots)
        self.written = {leaf_of[node]: _is_read(node) for node in roots if node in leaf_of}
        updated = {node.target for node in roots if node.op == "get_attr"}
        captured: dict[str, bool] = {}
        for node in nodes:
            if node.op == "get_attr" and node.target in updated:
                captured[str(node.target)] = captured.get(str(node.target), False) or _is_read(node)
        self.captured: tuple[tuple[torch.Tensor, bool], ...] = tuple(
            (getattr(recording.module, name), is_read) for name, is_read in captured.items()
        )
        self.used = {leaf - count for node, leaf in leaf_of.items() if leaf >= count and node.users}


def _is_read(node: fx.Node) -> bool:
    """Whether a value is used otherwise than to be updated; the result of an update counts where it is used."""
    for user in node.users:
        if is_view(user):
            if _is_read(user):
                return True
        elif node not in updated_in_hiding(user) and (node not in written_arguments(user) or user.users):
            return True
    return False
