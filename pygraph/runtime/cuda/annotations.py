"""Torch's annotations of kernels in graphs, by which the file of a profile says of each kernel of a replay what it is.

Torch keeps them by the numbers that profilers have for nodes of executable graphs, and
``torch.cuda._annotate_cuda_graph_trace`` writes them into a file that a profiler has exported.
"""

# Torch's module of annotations is private. Checked with torch 2.13; torch 2.11 has none, and later ones have another
# form of it: there nothing is annotated.
from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pygraph.runtime.cuda.api import cu

_MODULE = "torch.cuda._graph_annotations"


def annotate(executable: Any, notes: Iterable[tuple[Any, dict[str, str]]]) -> list[int]:
    """Annotate nodes of an executable graph, if the user has switched annotations on.

    Args:
        executable: The executable graph.
        notes: The handles of nodes in the graph that it was made from, and what to say of each.

    Returns:
        The numbers under which torch has the notes, for `forget`; none where that is not possible.
    """
    store = _store()
    if store is None or not hasattr(cu, "cuGraphNodeGetToolsId"):  # cuda-bindings before 13.1
        return []
    graph = _number(cu.cuGraphExecGetId(executable))
    if graph is None:
        return []
    keys: list[int] = []
    for node, note in notes:
        number = _number(cu.cuGraphNodeGetToolsId(node))
        if number is None:  # the driver is older than CUDA 13.1
            break
        key = graph << 32 | number & 0xFFFFFFFF
        store[key] = [note]
        keys.append(key)
    return keys


def forget(keys: Sequence[int]) -> None:
    """Drop the notes of a graph that is destroyed."""
    store = _store(is_enabled=False) if keys else None
    if store is not None:
        for key in keys:
            store.pop(key, None)


def _store(*, is_enabled: bool = True) -> dict[int, list[Any]] | None:
    """The notes that torch has, by number; None if there are none, or in another form than here."""
    module: Any = sys.modules.get(_MODULE)  # who has not imported it has not switched annotations on
    if module is None or (is_enabled and not getattr(module, "_annotations_enabled", False)):
        return None
    store: Any = getattr(module, "_kernel_annotations", None)
    return store if isinstance(store, collections.defaultdict) else None  # pyright: ignore[reportUnknownVariableType]


def _number(result: tuple[Any, ...]) -> int | None:
    return int(result[1]) if result[0] == cu.CUresult.CUDA_SUCCESS else None
