"""The 25 workloads of the table: small ones on the emulated device, in eager and as graphs."""

from __future__ import annotations

import copy
import doctest
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pygraph
from benchmarks.table import workloads
from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads import WORKLOADS, ocean_state, turbulence, without_dropout

BATCHES = {
    "xlnet-i": 1, "xlnet-t": 8, "mt5-i": 16, "mt5-t": 16, "mobilebert-i": 128, "debertav2-i": 1, "deberta-t": 8,
    "blenderbot-small-t": 64, "distilgpt2-t": 16, "speech2text2-t": 256, "bert-pytorch-t": 16, "multimodal-clip-i": 1,
    "speech-transformer-i": 1, "dalle2-i": 1, "equation-of-state-i": 1048576, "turbulent-kinetic-energy-i": 1048576,
    "maskrcnn-i": 1, "deeprecommender-i": 8192, "deeprecommender-t": 256, "alexnet-i": 2, "dcgan-t": 32,
    "lcnet-i": 256, "densenet121-i": 64, "dlrm-i": 2048, "efficientdet-t": 1,
}  # fmt: skip
"""The paper's list of workloads and batch sizes."""

UNUSED = {
    "xlnet-t": ("mask_emb", "r_s_bias", "seg_embed"),
    "blenderbot-small-t": ("encoder_attn",),
    "mt5-t": ("shared",),  # a move to the emulated device unties it from the embeddings of both halves
}
"""Parts of the names of parameters that are never used, so that they get no gradient."""

LONG = ("mt5-t", "blenderbot-small-t", "distilgpt2-t", "maskrcnn-i", "efficientdet-t")
"""Workloads that take seconds to trace, and have no construct of the host or need a package that tests do not have."""

INFERENCE = [name for name, workload in WORKLOADS.items() if not workload.training]
TRAINING = [name for name, workload in WORKLOADS.items() if workload.training]


def small(name: str) -> Task:
    """The small task of a workload, always with the same weights."""
    for package in WORKLOADS[name].packages:
        pytest.importorskip(package)
    torch.manual_seed(0)
    return WORKLOADS[name].make(True)


def on(device: torch.device, task: Task) -> nn.Module:
    """The model of a task on a device, with its weights tied again, which a move to the emulated device unties."""
    model = task.model.to(device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def long_ones_apart(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in names]


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def copied(batch: Batch) -> Batch:
    """A batch of its own, as some models write to theirs."""
    return pytree.tree_map_only(Tensor, torch.clone, batch)


def assert_same(found: Any, expected: Any) -> None:
    found, expected = tensors(found), tensors(expected)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-5)


def step_of(task: Task, model: nn.Module) -> Callable[[Batch], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        assert task.loss is not None
        loss = task.loss(model(**batch), batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# ---- the table -------------------------------------------------------------------------------------------------------


def test_all_rows() -> None:
    assert [(name, workload.batch_size) for name, workload in WORKLOADS.items()] == list(BATCHES.items())
    assert set(WORKLOADS) >= workloads.RANDOM


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_a_row_says_what_is_hard(workload: Workload) -> None:
    assert len(workload.hard) > 40
    assert workload.title
    assert workload.source
    assert workload.differs or workload.source != "written here" or workload.name == "deeprecommender-i"


def test_a_name_says_what_is_run() -> None:
    with pytest.raises(ValueError, match="-t for training"):
        Workload("x-i", "x", True, 1, "", "", "", lambda small: Task(nn.Identity(), lambda *given: {}))


def test_examples() -> None:
    assert doctest.testmod(importlib.import_module("benchmarks.table.workloads")) == (0, 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_batches(name: str) -> None:
    """Other seeds give other values of the same shapes; the same seed gives the same values."""
    task, host = small(name), torch.device("cpu")
    first, again, other = (tensors(task.batch(seed, host, torch.float32)) for seed in (0, 0, 1))
    assert [tensor.shape for tensor in first] == [tensor.shape for tensor in other]
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert any(not torch.equal(one, two) for one, two in zip(first, other, strict=True))
    assert (task.loss is not None) == WORKLOADS[name].training


@pytest.mark.parametrize("name", INFERENCE)
def test_low_precision(name: str) -> None:
    """Inference takes floating-point numbers of the dtype it is asked for, but for one workload, and runs in it."""
    task, host = small(name), torch.device("cpu")
    batch = task.batch(0, host, torch.bfloat16)
    expected = torch.float64 if name == "turbulent-kinetic-energy-i" else torch.bfloat16
    assert {tensor.dtype for tensor in tensors(batch) if tensor.is_floating_point()} <= {expected}
    with torch.no_grad():
        assert tensors(task.model.eval().bfloat16()(**batch))


def test_without_dropout() -> None:
    task = small("bert-pytorch-t")
    without_dropout(task.model.train())
    batch = task.batch(0, torch.device("cpu"), torch.float32)
    assert_same(task.model(**batch), task.model(**batch))


# ---- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("name", long_ones_apart(INFERENCE))
def test_inference(name: str, device: torch.device) -> None:
    task = small(name)
    model = on(device, task).eval()
    fast = pygraph.jit(model)
    with torch.no_grad():
        for seed in range(3):
            batch = task.batch(seed, device, torch.float32)
            written, given = copied(batch), copied(batch)
            torch.manual_seed(seed)
            expected = model(**written)
            assert all(tensor.isfinite().all() for tensor in tensors(expected))
            torch.manual_seed(seed)
            assert_same(fast(**given), expected)
            assert_same(given, written)


@pytest.mark.rotates
@pytest.mark.parametrize("name", long_ones_apart(TRAINING))
def test_training(name: str, device: torch.device) -> None:
    """A whole step: its losses, the gradients of the last one, weights and statistics are those of eager."""
    task = small(name)
    model = on(device, task).train()
    own = copy.deepcopy(model)
    step, fast = step_of(task, model), pygraph.jit(step_of(task, own))
    for seed in range(3):
        batch = task.batch(seed, device, torch.float32)
        torch.manual_seed(seed)
        expected = step(copied(batch))
        assert expected.dtype == torch.float32
        assert expected.shape == ()
        torch.manual_seed(seed)
        assert_same(fast(copied(batch)), expected)
    for path, parameter in model.named_parameters():
        if parameter.grad is None:
            assert any(part in path for part in UNUSED.get(name, ())), path
        else:
            assert parameter.grad.isfinite().all(), path
    assert_same(dict(own.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("name", long_ones_apart(TRAINING))
def test_autocast(name: str) -> None:
    """Training computes in bfloat16 where autocast wants so, as the table has it."""
    task, host = small(name), torch.device("cpu")
    batch = task.batch(0, host, torch.float32)
    assert task.loss is not None
    with torch.autocast("cpu", torch.bfloat16):
        loss = task.loss(task.model.train()(**batch), batch)
    loss.backward()
    assert loss.isfinite()
    assert all(one.grad.isfinite().all() for one in task.model.parameters() if one.grad is not None)


# ---- physics ---------------------------------------------------------------------------------------------------------


def test_slope_of_enthalpy() -> None:
    """The derivative of the integral of specific volume over pressure, by a sum and by autograd."""
    batch = ocean_state.equation_of_state(True).batch(0, torch.device("cpu"), torch.float64)
    salinity, temperature, pressure = batch.values()
    temperature.requires_grad_()
    below = [pair[0] for pair in ocean_state.denominators(salinity, temperature)]
    above = [pair[0] for pair in ocean_state.numerators(salinity, temperature)]
    total = torch.zeros_like(temperature)
    for part in (torch.arange(400).double() + 0.5) / 400:  # the midpoint rule
        p = part * pressure
        volume = above[0] + p * (above[1] + p * (above[2] + p * above[3]))
        total = total + pressure / 400 * volume / (below[0] + p * (2 * below[1] + p * below[2]))
    (expected,) = torch.autograd.grad(1e4 * total.sum(), temperature)
    found = ocean_state.enthalpy_slope(salinity, temperature.detach(), pressure)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_tridiagonal_systems() -> None:
    generator = torch.Generator().manual_seed(0)
    below, above, right = (torch.rand(3, 5, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    diagonal = torch.full_like(below, 4.0)
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(below[..., 1:], -1) + torch.diag_embed(above[..., :-1], 1)
    expected = torch.linalg.solve(matrix, right)
    torch.testing.assert_close(turbulence.solve_tridiagonal(below, diagonal, above, right), expected)
