"""Modules whose state cannot be seen, or that talk to other processes: they run as they are, with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pygraph
from pygraph.errors import FallbackError


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    pygraph.default_device()  # autograd counts devices at the first backward
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def gradients(call: Any, parameters: Any) -> list[torch.Tensor]:
    """Those of the third of some calls."""
    parameters = list(parameters)
    for x in torch.arange(36.0).reshape(3, 3, 4).tanh():
        for parameter in parameters:
            parameter.grad = None
        call(x).square().sum().backward()
    return [getattr(one.grad, "full_tensor", lambda one=one: one.grad)() for one in parameters]


def expected() -> list[torch.Tensor]:
    plain = model()
    return gradients(plain, plain.parameters())


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = model()
    fully_shard(module[0], mesh=init_device_mesh("cpu", (1,)))
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(model())


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("make", [replicated, sharded])
@pytest.mark.parametrize("as_module", [True, False], ids=["the module", "a function with it"])
def test_data_parallel_modules_run_as_they_are(make: Any, as_module: bool) -> None:
    module = make()
    fast = pygraph.jit(module) if as_module else pygraph.jit(lambda x: module(x))
    torch.testing.assert_close(gradients(fast, module.parameters()), expected())
    reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
    assert len(reasons) == 1
    assert "talks to other processes" in reasons[0]
    assert type(module).__name__ in reasons[0]
    with pytest.raises(FallbackError, match="talks to other processes"):
        pygraph.jit(module, strict=True)(torch.ones(3, 4))


@pytest.mark.usefixtures("one_process")
def test_transformed_parts_of_data_parallel_modules() -> None:
    module = nn.parallel.DistributedDataParallel(pygraph.jit(model()))
    torch.testing.assert_close(gradients(module, module.parameters()), expected())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_script_modules_run_as_they_are(grad: bool) -> None:
    script = torch.jit.script(model())
    fast = pygraph.jit(lambda x: script(x))
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(fast(torch.ones(3, 4)), model()(torch.ones(3, 4)))
    assert "ScriptModule" in fast.explain().to_dict()["fallbacks"][0]["reason"]
