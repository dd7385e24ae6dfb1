"""Fusion where there is nothing to fuse for: on the emulated device, and in stacks."""

from __future__ import annotations

import pytest
import torch

import pygraph
from pygraph.errors import StageError
from pygraph.transforms.fuse import _in_a_line


def f(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1) * 2


def test_it_says_why_it_does_nothing(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("there it does something: tests/gpu/test_fusion.py")
    fast = pygraph.jit(f, fuse=True)
    x = torch.randn(4).to(device)
    for _ in range(3):
        assert torch.equal(fast(x).cpu(), f(x).cpu())
    reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
    assert reasons == ["Inductor makes no kernels for emu that a graph could hold"]
    assert fast.explain().to_dict()["kernels_in_graphs"] == 3
    with pytest.raises(pygraph.errors.FallbackError, match="Inductor makes no kernels"):
        pygraph.jit(f, fuse=True, strict=True)(x)


def test_its_place_in_stacks(device: torch.device) -> None:
    x = torch.randn(4).to(device)
    stack = pygraph.graphify(pygraph.indirect(pygraph.fuse(pygraph.devicify(f))))
    torch.testing.assert_close(stack(x), f(x))
    assert repr(stack) == "<pygraph graphify(indirect(fuse(devicify(f))))>"
    with pytest.raises(StageError, match=r"graphify\(indirect\(fuse\(f\)\)\)"):
        pygraph.fuse(pygraph.graphify(pygraph.indirect(f)))
    program = pygraph.trace(f)(x)
    assert pygraph.fuse(program).stage == "kernels"
    with pytest.raises(StageError, match="stage 'kernels'"):
        pygraph.fuse(pygraph.fuse(program))


def test_the_cause_of_an_error_in_another_process_is_said() -> None:
    """Inductor compiles kernels in processes, whose errors come as a traceback in a text."""
    text = """An exception occurred in a subprocess:

    Name=triton_poi_fused_add_0
    Traceback (most recent call last):
      File "pool.py", line 1, in work
        raise ValueError("no")
    triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 300000
    """
    found = _in_a_line(RuntimeError(text))
    assert found == (
        "RuntimeError: An exception occurred in a subprocess: "
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 300000"
    )
    assert _in_a_line(ValueError("")) == "ValueError: "
