"""Which tensors of a Triton kernel its addresses depend on, read off its source."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.launches import Kind, Launch, Launchable, register
from pygraph.lowering.wrapper_globals import TunedLaunch
from pygraph.runtime.indices import Reach, index_reach
from pygraph.runtime.kernel_addresses import parameters_in_addresses


def kernel(body: str, parameters: str = "in_ptr0, in_ptr1, in_ptr2, out_ptr0, xnumel, XBLOCK : tl.constexpr") -> str:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"def triton_poi({parameters}):\n{lines}\n"


POINTWISE = """
xoffset = tl.program_id(0) * XBLOCK
xindex = xoffset + tl.arange(0, XBLOCK)[:]
xmask = xindex < xnumel
x0 = xindex % 8
tmp0 = tl.load(in_ptr0 + (x0), xmask)
"""
STORE = "\ntl.store(out_ptr0 + (x0), tmp9, xmask)"

FORMS: dict[str, tuple[str, set[str] | None]] = {
    "no index": ("tmp9 = tmp0 * tl.load(in_ptr1 + (x0), xmask).to(tl.float32)", set()),
    "gather": (
        "tmp1 = tl.where(tmp0 < 0, tmp0 + 5, tmp0)\n"
        "tl.device_assert(((0 <= tmp1) & (tmp1 < 5)) | ~(xmask), 'index out of bounds')\n"
        "tmp8 = tl.load(in_ptr1 + (tmp1), xmask)\n"
        "tmp9 = tmp8 * tl.load(in_ptr2 + (x0), xmask).to(tl.int64)",
        {"in_ptr0"},
    ),
    "an index that is computed": (
        "tmp1 = tl.load(in_ptr1 + (x0), xmask)\ntmp2 = (tmp0 * tmp1).to(tl.int64)\n"
        "tmp9 = tl.load(in_ptr2 + (tmp2), xmask)",
        {"in_ptr0", "in_ptr1"},
    ),
    "only asserted": ("tl.device_assert(tmp0 > 0, 'a')\ntmp9 = tmp0", {"in_ptr0"}),
    "inside of an address": ("tmp9 = tl.load(in_ptr1 + tl.load(in_ptr2 + (x0), xmask), xmask)", {"in_ptr2"}),
    "an index that is stored first": (
        "tmp1 = tl.load(in_ptr1 + (x0), xmask)\ntl.store(out_ptr0 + (x0), tmp1, xmask)\n"
        "tmp2 = tl.load(out_ptr0 + (x0), xmask)\ntmp9 = tl.load(in_ptr2 + (tmp2), xmask)",
        {"in_ptr1", "in_ptr2", "out_ptr0"},  # all that is stored there counts, at the end as well
    ),
    "scatter": ("tmp9 = tl.load(in_ptr1 + (x0), xmask)\ntl.atomic_add(out_ptr0 + (tmp0), tmp9, xmask)", {"in_ptr0"}),
    "a mask": ("tmp9 = tl.load(in_ptr1 + (x0), xmask & tmp0, other=0.0)", {"in_ptr0"}),
    "a loop": (
        "tmp9 = tl.load(in_ptr1 + (x0), xmask)\nfor r0_offset in tl.range(0, 8, 2):\n"
        "    tmp3 = tl.load(in_ptr2 + (x0 + r0_offset), xmask)\n    tmp9 += tmp3\n"
        "tl.load(in_ptr0 + tmp9.to(tl.int32), xmask)",
        {"in_ptr1", "in_ptr2"},
    ),
    "sums of each block, beside an index": (  # Inductor's sums over rows, in the kernel that has those of columns
        "tmp1 = tl.load(in_ptr1 + (x0), xmask)\ntl.atomic_add(out_ptr0 + (tmp0), tmp1, xmask & (x0 < xnumel))\n"
        "tl.store(in_ptr2 + (tl.program_id(0) + 1 * tl.num_programs(0)) * xnumel + x0, tl.sum(tmp1, 0), xmask)\n"
        "tmp9 = tmp1",
        {"in_ptr0"},
    ),
    "a pointer of two": ("tmp9 = tl.load((in_ptr1 if xnumel < 4 else in_ptr2) + x0, xmask)", {"in_ptr1", "in_ptr2"}),
    "a helper that looks into memory": (
        "tmp1 = triton_helpers.bucketize_binary_search(tmp0, in_ptr1, 8)\ntmp9 = tl.load(in_ptr2 + (x0), xmask)",
        {"in_ptr0", "in_ptr1"},
    ),
    "another name for a pointer": ("A = in_ptr1\ntmp9 = tl.load(A + (x0), xmask)", {"in_ptr1"}),
    "an address with a name": ("a = in_ptr1 + x0\ntmp9 = tl.load(a, xmask)", {"in_ptr1"}),
    "a store to an address with a name": ("a = in_ptr1 + x0\ntmp9 = tmp0\ntl.store(a, tmp0)", None),
    "a function inside": ("def inner(x):\n    return x\ntmp9 = tmp0", None),
}


@pytest.mark.parametrize("form", FORMS)
def test_parameters_in_addresses(form: str) -> None:
    body, expected = FORMS[form]
    found = parameters_in_addresses(kernel(POINTWISE + body + STORE))
    assert (None if found is None else found - {"xnumel", "XBLOCK"}) == expected


def test_what_is_no_function() -> None:
    assert parameters_in_addresses("in_ptr0 +") is None
    assert parameters_in_addresses("x = 1") is None


def reached(launch: Launchable) -> list[Reach]:
    """How a float, an integer and another float that are given to a kernel reach its indices, and what it writes."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("weights", "index", "scale", "out")]
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
    for node, dtype in zip(given, dtypes, strict=True):
        node.meta["spec"] = TensorSpec.of(torch.empty(8, dtype=dtype))
    graph.call_function(torch.ops.pygraph.launch.default, (register(launch), given[3:], given[:3], []))
    found = index_reach(graph.nodes)
    return [found.get(node, Reach.NOT) for node in given]


def launch_of(kernel: Any) -> Launchable:
    arguments: list[tuple[str, Kind, Any]] = [("in_ptr0", "read", 0), ("in_ptr1", "read", 1), ("in_ptr2", "read", 2)]
    arguments += [("out_ptr0", "written", 0), ("xnumel", "number", 0)]
    return Launch(kernel, tuple(arguments), {}, (), {})


def tuned(kernel: Any) -> Launchable:
    arguments: list[tuple[Kind, Any]] = [("read", 0), ("read", 1), ("read", 2), ("written", 0), ("constant", 8)]
    return TunedLaunch(kernel, tuple(arguments))


NAMES = ["in_ptr0", "in_ptr1", "in_ptr2", "out_ptr0", "xnumel", "XBLOCK"]
INDEXING = kernel(
    POINTWISE.replace("in_ptr0", "in_ptr1")
    + "tl.device_assert(tmp0 < 5, 'a')\ntmp9 = tl.load(in_ptr0 + (tmp0), xmask) * tl.load(in_ptr2 + (x0)).to(tl.int32)"
    + STORE
)


@pytest.mark.parametrize("launch", [launch_of, tuned])
def test_a_kernel_of_inductors(launch: Callable[[Any], Launchable]) -> None:
    function = types.SimpleNamespace(src=INDEXING, __name__="triton_poi", arg_names=NAMES)
    assert reached(launch(types.SimpleNamespace(fn=function, inductor_meta={}))) == [0, Reach.COMPUTED, 0, 0]
    quiet = types.SimpleNamespace(src=INDEXING.replace("device_assert", "no"), __name__="triton_poi", arg_names=NAMES)
    assert reached(launch(types.SimpleNamespace(fn=quiet, inductor_meta={}))) == [0, 0, 0, 0]


def test_a_kernel_of_the_users() -> None:
    """It may have Inductor's autotuner, but asserts nothing; its values are not followed."""
    function = types.SimpleNamespace(src=INDEXING.replace("device_assert", "nothing"), __name__="gather")
    users = types.SimpleNamespace(name="USER_AUTOTUNE")
    for kernel in (function, types.SimpleNamespace(fn=function, inductor_meta={}, heuristic_type=users)):
        assert reached(launch_of(kernel)) == [Reach.COMPUTED] * 4
    plain = types.SimpleNamespace(
        src=INDEXING.replace("device_assert", "nothing").replace(".to(", ".as("), __name__="g"
    )
    assert reached(launch_of(plain)) == [0, Reach.COMPUTED, 0, 0]
