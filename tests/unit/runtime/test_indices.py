"""Which values become indices; neither poison nor a made-up argument does where it might be out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph.calls.measuring import example_leaves, measured_program
from pygraph.lowering.aten import lower
from pygraph.runtime.devices import driver_for
from pygraph.runtime.discovery import Discovery
from pygraph.runtime.driver import Run
from pygraph.runtime.emulated import driver as emulated
from pygraph.runtime.indices import Reach, index_reach
from pygraph.runtime.selecting import SelectionPolicy
from tests.property.test_faults import missed_pointer

NOT, UNCHANGED, COMPUTED = Reach.NOT, Reach.UNCHANGED, Reach.COMPUTED


def ids(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 3, 2], device=device)


def table(device: torch.device) -> torch.Tensor:
    return torch.arange(20.0, device=device).view(4, 5)


def accumulated(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    position = torch.zeros_like(i)
    position.add_(i)
    return x[position]


# A function of a table and of indices, and how each reaches an index.
CASES: list[tuple[Callable[..., Any], Reach, Reach]] = [
    (lambda x, i: x * i.sum(), NOT, NOT),
    (lambda x, i: x[i], NOT, UNCHANGED),
    (lambda x, i: x.index_select(0, i.view(3, 1).expand(3, 2).reshape(-1)), NOT, UNCHANGED),
    (lambda x, i: F.embedding(i.to(torch.int32), x), NOT, UNCHANGED),
    (lambda x, i: x.gather(1, torch.cat([i, i])[:4, None]), NOT, UNCHANGED),
    (lambda x, i: x.scatter_add(0, i[:, None], x), NOT, UNCHANGED),
    (lambda x, i: x.index_copy(0, i, x[:3]), NOT, UNCHANGED),
    (lambda x, i: torch.take(x, i.clamp(min=0)), NOT, UNCHANGED),
    (lambda x, i: F.one_hot(i, 4) * x.sum(), NOT, NOT),  # traced, it compares
    (lambda x, i: x[torch.where(i > 2, i, 0)], NOT, COMPUTED),
    (lambda x, i: x[i - 1], NOT, COMPUTED),
    (lambda x, i: x[i.cumsum(0) // 3], NOT, COMPUTED),
    (lambda x, i: x[i.clamp(min=2)], NOT, COMPUTED),
    (accumulated, NOT, COMPUTED),
    (lambda x, i: x[x[:, 0].clamp(0, 3).long()] * i.sum(), UNCHANGED, NOT),
    (lambda x, i: x[(x[:, 0] / 20).long()] * i.sum(), COMPUTED, NOT),
    (lambda x, i: x[x.argmax(1).clamp(0, 3)] * i.sum(), NOT, NOT),
    (lambda x, i: x.gather(1, x.topk(2).indices) * i.sum(), NOT, NOT),
    (lambda x, i: x[x.topk(2).values.long() * 0] * i.sum(), COMPUTED, NOT),
    (lambda x, i: F.binary_cross_entropy(torch.sigmoid(x), x * 0) + i.sum(), COMPUTED, NOT),
    (lambda x, i: F.nll_loss(x[:3], i), NOT, UNCHANGED),
]


@pytest.mark.parametrize("stack", [lambda p: p, lambda p: pygraph.graphify(pygraph.indirect(p))])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_how_arguments_reach_an_index(device: torch.device, number: int, stack: Any) -> None:
    fn, *expected = CASES[number]
    program = stack(pygraph.trace(fn)(table(device), ids(device)))
    reach = index_reach(program.nodes)
    nodes = program.placeholders
    if program.table is not None:
        nodes = sorted((node for node in program.nodes if "load" in node.name), key=lambda node: node.args[1])
    assert [reach.get(node, NOT) for node in nodes] == expected


def test_what_is_written_after_an_index_was_read_reaches_none(device: torch.device) -> None:
    """An optimizer updates an embedding's positions, say: gradients are no indices for that."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        rows = x[i]
        i.copy_(x[0, : i.numel()] * 0)
        return rows

    def earlier(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        view = i[:]
        i.copy_(x[0, : i.numel()] * 0)
        return x[view]

    for one, expected in ((fn, NOT), (earlier, COMPUTED)):
        program = lower(pygraph.trace(one)(table(device), ids(device)))
        assert index_reach(program.nodes).get(program.placeholders[0], NOT) == expected


@pytest.mark.parametrize("number", range(len(CASES)))
def test_select_makes_up_no_index(device: torch.device, number: int) -> None:
    """On the emulated device an index that is out of range is an error; on CUDA it would be the end of the process."""
    fn, *reach = CASES[number]
    x, i = table(device), ids(device)
    program = pygraph.graphify(pygraph.indirect(pygraph.trace(fn)(x, i)))
    chosen = measured_program(program)
    torch.testing.assert_close(pygraph.evaluate(chosen, x, i), fn(x, i))
    reasons = [fallback.reason for fallback in chosen.fallbacks if fallback.what == "select"]
    assert bool(reasons) == (COMPUTED in reach)
    assert all("apply select to the function" in reason for reason in reasons)
    assert bool(chosen.regions[-1].times) == (not reasons)


def test_numbers_are_never_made_up_as_indices(device: torch.device) -> None:
    fn = lambda x, k: x[torch.zeros(1, dtype=torch.int64, device=x.device) + k]  # noqa: E731
    program = pygraph.graphify(pygraph.indirect(pygraph.devicify(pygraph.trace(fn)(table(device)[:1], 0))))
    chosen = measured_program(program)
    assert [fallback.what for fallback in chosen.fallbacks] == ["select"]


def test_numbers_are_made_up_elsewhere(device: torch.device) -> None:
    fn = lambda x, i, k: x[i] * (k * 2 + 1)  # noqa: E731
    program = pygraph.graphify(pygraph.indirect(pygraph.devicify(pygraph.trace(fn)(table(device), ids(device), 3))))
    chosen = measured_program(program)
    assert chosen.fallbacks == ()
    assert chosen.regions[-1].times


def test_nothing_is_looked_up_in_what_is_empty_for_made_up_arguments(device: torch.device) -> None:
    fn = lambda x, i, mask: x[mask][i]  # noqa: E731
    mask = torch.ones(4, dtype=torch.bool, device=device)
    program = pygraph.graphify(pygraph.indirect(pygraph.trace(fn)(table(device), ids(device), mask)))
    assert "select" in [fallback.what for fallback in measured_program(program).fallbacks]


def test_captured_positions_are_real_and_stay_where_they_are(device: torch.device) -> None:
    buffer, position = torch.zeros(2, 5, device=device), torch.tensor([1], device=device)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.index_copy_(0, position, x)
        position.add_(1)
        return buffer.sum()

    program = pygraph.graphify(pygraph.indirect(pygraph.trace(write)(table(device)[:1])))
    driver = driver_for(device)
    assert driver is not None
    # By a timer of the caller's, all ways are tried; by the device's own, copies only where they may be faster.
    policy = SelectionPolicy(timer=lambda run: driver.sample(Run(run)).host)
    chosen = measured_program(program, policy=policy)
    assert chosen.fallbacks == ()
    assert {way.partition(" ")[0] for way, _ in chosen.regions[0].times} == {"launch", "patch", "copy"}
    assert (position.item(), buffer.sum().item()) == (1, 0.0)


def test_made_up_indices_of_floating_point_are_zero(device: torch.device) -> None:
    program = pygraph.trace(lambda x, y: x[y.long()])(table(device), torch.ones(2, device=device))
    assert example_leaves(program)[1].tolist() == [0.0, 0.0]


# ---- poison ----------------------------------------------------------------------------------------------------

MISSING: list[Callable[..., Any]] = [
    lambda x, i: x[i - 1],
    lambda x, i: x[3 - i],
    lambda x, i: x.gather(1, (i[:, None] - 1)),
    lambda x, i: x[(torch.cumprod(x[:, 0] / 100, 0) + 1).long()] + i.sum(),
    lambda x, i: x[torch.cumprod(i, 0) // 2 - i[0]],
    lambda x, i: x[i] + x[(i * 1.0).long() - 1] - x[x.argmax(1)[:3] - 4],
]


@pytest.mark.parametrize("readers", [True, False], ids=["readers", "poison only"])
@pytest.mark.parametrize("missed", [True, False], ids=["missed", "found"])
@pytest.mark.parametrize("number", range(len(MISSING)))
def test_poison_is_never_an_index(number: int, missed: bool, readers: bool) -> None:
    """Also where a pointer was missed, so that a kernel of the proof's replay reads the poisoned buffer."""
    emu = emulated.driver().device
    fn = MISSING[number]
    with pytest.MonkeyPatch.context() as patch:
        if missed:
            missed_pointer(patch)
        if not readers:
            patch.setattr(Discovery, "_unproven_inputs", lambda self, words: set())
        fast = pygraph.jit(fn)
        for shift in range(3):
            x, i = table(emu) + shift, ids(emu).roll(shift)
            torch.testing.assert_close(fast(x, i), fn(x, i))
    report = fast.explain().to_dict()
    assert report["kernels_in_graphs"] == report["kernels"]


def test_what_indices_are_computed_from_is_patched_where_its_kernel_hides_nothing(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, i: x[i - 1])
    for shift in range(3):
        x, i = table(device), ids(device).roll(shift)
        assert torch.equal(fast(x, i), x[i - 1])
    assert fast.explain().to_dict()["bytes_copied_per_replay"] == 0
