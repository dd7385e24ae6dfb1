"""The description of a plan, which C++ reads: what a call must match, and how it is replayed.

Everything that a plan does without Python is described exactly. A replay is described only where it is one graph on the
caller's own tensors and numbers; other executables are called in Python by their plan.
"""

# Descriptions are made of parts of entries, executables and environments, and hold values of any type.
# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.calls.call_plan import CallPlan
from pygraph.calls.function import Call
from pygraph.guards.opened import Opened
from pygraph.ir.constants import IMMUTABLE
from pygraph.ir.descriptors import Captured
from pygraph.runtime.host_work import HostWork, is_repeatable
from pygraph.runtime.native_description import describe_graph, describe_stream
from pygraph.runtime.profiler_ranges import range_name

if TYPE_CHECKING:
    from pygraph.runtime.calling_convention import CallingConvention
    from pygraph.runtime.executable import Executable


def is_describable(leaves: Sequence[Any], live: frozenset[int]) -> bool:
    """Whether static leaves are immutable, or equal to nothing but themselves."""
    return all(
        isinstance(leaf, torch.Tensor)
        or index in live
        or type(leaf) in IMMUTABLE
        or type(leaf).__hash__ is object.__hash__
        for index, leaf in enumerate(leaves)
    )


def describe_plan(plan: CallPlan, call: Call, most_hits: int | None = None) -> dict[str, Any]:
    """Describe what calls like this one must match, and how they run, as `native/plan_type.h` reads it.

    What its key says, C++ reads off the call itself.

    Args:
        plan: The plan of such calls.
        call: The call.
        most_hits: How many calls it may serve; None for any number.

    Returns:
        Addresses and objects by name. C++ holds references to the objects; ``owners`` own what addresses point to.
    """
    executable = plan.executable
    return {
        "live": plan.live,
        "leaves": call.leaves,
        "opened": Opened,
        "device": plan.device_type,
        **plan.requirements.description(),
        "callable": plan.target,
        "is_executable": executable is not None,
        "is_eager": plan.is_eager,
        "most_hits": most_hits,
        "replay": None if executable is None else _replay(executable),
        "stream": None if executable is None else describe_stream(executable.driver, executable.pool),
        "released": plan.released,
    }


def _replay(executable: Executable) -> dict[str, Any] | None:
    """The replay of an executable that is one graph on the caller's tensors and numbers; None if it is more.

    The host may compute numbers before, see `_host_work`.
    """
    convention = executable.convention
    if not executable.regions or executable.regions[-1].graph is None or convention.aliases:
        return None
    region = executable.regions[-1]
    graph, body = region.graph, region.body
    assert graph is not None
    if region.adoption is not None:
        return None
    tensors = dict(convention.tensors)
    captured = {id(tensor): index for index, tensor in enumerate(executable.captured)}
    numbers, host_work = _numbers(convention, captured), _host_work(executable)
    if host_work is not None:
        numbers |= {node: ("computed", i, _is_real(node)) for i, node in enumerate(host_work[0])}
    elif len(executable.regions) > 1:
        return None
    outputs = {node: index for index, node in enumerate(body.outputs)}
    if not all(node in tensors for node in body.inputs) or not all(node in numbers for node in body.numbers):
        return None
    if not all(node in outputs and not foreign for _, node, foreign in convention.results):
        return None
    replay = describe_graph(graph, [tensors[node] for node in body.inputs], [numbers[node] for node in body.numbers])
    if replay is None:
        return None
    return {
        **replay,
        "host_work": None if host_work is None else _described_work(*host_work),
        "range": range_name(executable.program.name),
        "updated": tuple(tensors[body.inputs[position]] for position in body.updated),
        "updated_captured": tuple(captured[id(tensor)] for tensor in body.versioned_statics),
        "results": _results(convention, outputs),
        **_returned(convention.out_tree),
        "owners": (graph, executable),  # alive while addresses of theirs are used
    }  # fmt: skip


def _host_work(executable: Executable) -> tuple[list[fx.Node], HostWork] | None:
    """The numbers that the host computes for the last region, and what computes them; None if it does more."""
    *earlier, last = executable.regions
    bodies = [bound.body for bound in earlier]
    if not earlier or any(bound.region.kind != "host" for bound in earlier):
        return None
    if not all(is_repeatable(node) for body in bodies for node in body.nodes):
        return None
    made = {node for body in bodies for node in body.outputs}
    wanted = [node for node in last.body.numbers if node in made]
    return wanted, HostWork(bodies, executable.convention, wanted)


def _described_work(wanted: list[fx.Node], work: HostWork) -> tuple[Any, ...]:
    return work, work.leaves, tuple(map(_is_real, wanted))


def _is_real(node: fx.Node) -> bool:
    return node.meta["spec"] is float


def _numbers(convention: CallingConvention, captured: Mapping[int, int]) -> dict[fx.Node, tuple[Any, ...]]:
    """Where numbers of a call are: in a leaf, which may be a tensor on the host, or in a captured tensor.

    Those of a dtype that C++ does not read are left out.
    """
    found: dict[fx.Node, tuple[Any, ...]] = {node: ("leaf", leaf) for node, leaf in convention.numbers}
    for node, element in convention.elements:
        of = element.of
        if of.spec.dtype in _READ:
            found[node] = ("captured", captured[id(of.value)]) if isinstance(of, Captured) else ("leaf", of.leaf)
    return found


_READ = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    }
)  # fmt: skip
"""The dtypes of tensors on the host whose numbers C++ reads (`read_element`)."""


def _results(convention: CallingConvention, outputs: dict[fx.Node, int]) -> tuple[tuple[str, Any], ...]:
    """The origin of every result leaf: an output of the graph, a static value, an argument or an earlier leaf."""
    results: list[Any] = [None] * convention.out_tree.num_leaves
    for leaf, node, _ in convention.results:
        results[leaf] = ("output", outputs[node])
    for leaf, value in convention.statics:
        results[leaf] = ("static", value)
    for leaf, argument in convention.arguments:
        results[leaf] = ("argument", argument)
    for leaf, earlier in convention.repeats:
        results[leaf] = ("repeat", earlier)
    return tuple(results)


def _returned(tree: pytree.TreeSpec) -> dict[str, Any]:
    """The structure of the returned object: an example of it, or else a function that makes it of all leaves."""
    if is_plain(tree):
        return {"example": pytree.tree_unflatten(range(tree.num_leaves), tree), "unflatten": None}
    return {"unflatten": functools.partial(pytree.tree_unflatten, treespec=tree)}


def is_plain(tree: pytree.TreeSpec) -> bool:
    """Whether a structure is one of nested tuples, lists and dicts, which C++ reads and makes."""
    return tree.is_leaf() or (tree.type in (tuple, list, dict) and all(map(is_plain, tree.children())))
