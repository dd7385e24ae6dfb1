"""Scalars of the host below ``torch.compile`` on a GPU: numbers of the one graph, beside `pygraph.jit` and Inductor."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import pygraph
from pygraph.interop import live
from pygraph.process import extension
from tests.unit.interop.test_host_scalars import LAYERS, attention, check_one_graph, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def extension_loaded() -> None:
    """The path in C++, which is built in the background, and may not be there yet."""
    extension.start(wait=True)


def ways() -> Counter[str]:
    """By how calls run (``replay`` is all of C++'s), how many calls did."""
    functions = [function for replay in live.CALLABLES for function in replay.functions()]
    found: Counter[str] = Counter()
    for planned in [planned for function in functions for planned in function.cache.native._made]:
        found[planned.plan.way] += planned.plan.hits
    return found


def activity(run: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """Names and counts of what the device did in a call, and of ATen operations that the host ran."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    device, host = Counter[str](), Counter[str]()
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            device[event.name] += 1
        elif event.name.startswith("aten::"):
            host[event.name] += 1
    return device, host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_of_attention(dtype: torch.dtype) -> None:
    model = attention(CUDA, width=256, heads=4).to(dtype).eval()
    fast, inductor = torch.compile(model, backend=pygraph.backend), torch.compile(model)
    with torch.no_grad():
        for i in range(8):
            for number, layer in enumerate(model):
                layer.temperature = np.float64(4.0 + i + number)
            x = torch.randn(8, 64, 256, device=CUDA, dtype=dtype)
            exact = copy.deepcopy(model).double()(x.double())
            errors = {fn: (fn(x).double() - exact).norm() / exact.norm() for fn in (fast, inductor, model)}
            # In bfloat16, Inductor's own softmax of scores that are divided is several times less exact than eager's.
            assert errors[fast] <= max(1.01 * errors[inductor], 2 * errors[model]) + 1e-6
        check_one_graph("inference")
        assert not any("not fused" in one.reason for call in pygraph.explain().calls for one in call.fallbacks)
        assert ways()["replay"] >= 5, f"{ways()}\n{pygraph.explain()}"


def test_nothing_runs_on_the_host_that_reads_a_scalar() -> None:
    """No copy to the device; a kernel for each scalar at most besides those of `jit`.

    Dynamo itself reads each of NumPy's numbers once, whatever the backend.
    """
    model = attention(CUDA, width=256, heads=4).eval()
    x = torch.randn(8, 64, 256, device=CUDA)
    fast, jitted = torch.compile(model, backend=pygraph.backend), pygraph.jit(model, fuse=True)
    with torch.no_grad():
        for _ in range(4):
            fast(x), jitted(x)
        device, host = activity(lambda: fast(x))
        theirs, _ = activity(lambda: jitted(x))
    seen = f"device {device}\nhost {host}\ndevice of jit {theirs}\n{pygraph.explain()}"
    assert host["aten::_local_scalar_dense"] <= LAYERS, seen
    assert not any("Memcpy HtoD" in name for name in device), seen
    assert sum(device.values()) <= sum(theirs.values()) + LAYERS, seen


def test_training() -> None:
    model = attention(CUDA, width=64, heads=4)
    fast = torch.compile(model, backend=pygraph.backend)
    for i in range(5):
        for number, layer in enumerate(model):
            layer.temperature = np.float64(2.0 + i + number)
        x = torch.randn(4, 16, 64, device=CUDA, requires_grad=True)
        found: list[list[torch.Tensor]] = []
        for fn in (fast, model):
            model.zero_grad(set_to_none=True)
            found.append([*train(fn, [x]), *(parameter.grad.clone() for parameter in model.parameters())])
        torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)
    check_one_graph("backward", "forward")
