"""Functions that need numbers of the device on the host: each number is a way to go, as each outcome of a condition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pygraph
from pygraph.calls import limits
from tests.fakes import assert_no_fake_left, fakes_followed
from tests.steps import assert_same

pytestmark = pytest.mark.rotates


def inputs(device: torch.device, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Six rows, and a mask that has some of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator).to(device), (torch.arange(6) < count).to(device)


def check(device: torch.device, fn: Callable[..., Any], counts: Sequence[int], hits: int) -> Any:
    """Compare calls with masks of so many rows, what they update and what is drawn next, with eager."""
    fast = pygraph.jit(fn)
    results: list[Any] = []
    for call in (fn, fast):
        torch.manual_seed(1)
        results.append([])
        for index, count in enumerate(counts):
            x, mask = inputs(device, count, index)
            results[-1].append((call(x, mask), x, mask, torch.rand(2, device=device), torch.rand(2)))
    assert_same(results[1], results[0], device)
    assert fast.cache_info().hits >= hits, (fast.cache_info(), str(fast.explain()))
    assert not any("data-dependent" in one["reason"] for one in fast.explain().to_dict()["fallbacks"])
    return fast


COUNTS = [3, 3, 4, 4, 3, 4, 3, 4, 3, 4, 4, 3]


def sliced(x: Tensor, mask: Tensor) -> Tensor:
    count = int(mask.sum())
    return x[:count].exp().sum(0)


def sliced_from(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask.sum().item() - 1 :] * 2


def repeated(x: Tensor, mask: Tensor) -> Tensor:
    for _ in range(int(mask.sum())):
        x = torch.tanh(x)
    return x


def listed(x: Tensor, mask: Tensor) -> Tensor:
    lengths = torch.stack([mask.sum(), mask.sum() - 1]).tolist()
    return torch.stack([x[:length].mean(0) for length in lengths])


def reshaped(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_zeros(int(mask.sum()), 2).add(x.sum()).view(-1)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    rows = x[mask]
    total = rows.sum(0)
    for index in range(rows.shape[0]):
        total = total * 0.5 + index
    return rows @ total


def of_unique_values(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    values, counts = torch.unique(mask.long() + torch.arange(6, device=x.device) // 3, return_counts=True)
    return values.view(-1, 1).float() @ x[:1], counts.view(-1)


def of_nonzero(x: Tensor, mask: Tensor) -> Tensor:
    found = x.clone()
    rows = mask.nonzero(as_tuple=True)[0]
    if rows.numel() > 3:
        found[rows] = x[rows].view(-1, 2, 2).flip(1).reshape(-1, 4)
    return found


def one_hot(x: Tensor, mask: Tensor) -> Tensor:
    return F.one_hot(mask.sum() * torch.ones(2, dtype=torch.int64, device=x.device)).float() * x.sum()


def after_draws(x: Tensor, mask: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    count = 1 + int((noise[0, 0] > 0.5).long() + mask.sum() * 0)
    return torch.rand(count, device=x.device) + noise.sum()


def after_updates(x: Tensor, mask: Tensor) -> Tensor:
    view = x[:2]
    view.add_(1)
    mask.logical_not_()
    count = int(mask.sum() + (x[0] * 0).sum())
    x[count:].mul_(2)
    return x.sum() + view.sum()


def by_both(x: Tensor, mask: Tensor) -> Tensor:
    if mask.sum() > 3:
        x = x * 2
    return x[: int(mask.sum())].exp()


@pytest.mark.parametrize(
    "fn",
    [sliced, sliced_from, repeated, listed, reshaped, masked, of_unique_values, of_nonzero, one_hot, after_updates,
     by_both],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_calls_go_where_eager_goes(device: torch.device, fn: Callable[..., Any]) -> None:
    with torch.no_grad():
        fast = check(device, fn, COUNTS, hits=8)
    assert fast.cache_info().size <= (3 if fn is after_updates else 2)  # which is cut, as its number is a float
    captures = fast.cache_info().captures
    assert captures
    with torch.no_grad():
        for index, count in enumerate(COUNTS):
            fast(*inputs(device, count, index))
    assert fast.cache_info().captures == captures


def test_a_number_that_is_drawn(device: torch.device) -> None:
    check(device, after_draws, [2] * 12, hits=4)


def test_a_first_call_finds_its_way_in_one_trace(device: torch.device) -> None:
    """Nothing is guessed, so no graph is recorded for a way that no call goes."""

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        while x.abs().max() > 0.1:
            x = x * 0.5
        return x[: int(mask.sum())]

    fast = pygraph.jit(fn)
    x, mask = inputs(device, 3, 0)
    assert_same(fast(x, mask), fn(x, mask), device)
    assert fast.cache_info().size == 1
    with fakes_followed():
        pygraph.jit(fn)(x, mask)
        assert_no_fake_left()


def test_arguments_are_as_they_were_while_answers_are_looked_up(device: torch.device) -> None:
    """What the trace would update is copied: an error in what follows leaves the arguments alone, as in eager."""

    def fn(x: Tensor, flat: Tensor) -> Tensor:
        flat.add_(1)
        count = int(x[0, 0])
        flat.mul_(10)
        if count > 2:
            raise ValueError("too many")
        return x[:count].clone()

    fast = pygraph.jit(fn)
    for value in (0.0, 1.0, 0.0, 4.0, 1.0, 0.0):
        results: list[Any] = []
        for call in (fn, fast):
            x = torch.full((3, 2), value, device=device)
            try:
                results.append((call(x, x.view(-1)), x))
            except ValueError:
                results.append(x)
        assert_same(results[1], results[0], device)


def test_numbers_that_never_come_again_are_given_up(device: torch.device) -> None:
    def fn(x: Tensor) -> Tensor:
        scale = float(x.abs().max())
        return x / scale * (1 if scale > 100 else 2)

    fast = pygraph.jit(fn)
    for value in range(1, 20):
        x = torch.arange(4.0, device=device) + value
        assert_same(fast(x), fn(x), device)
    assert fast.cache_info().size <= limits.LIMITS.new_numbers + 2


def test_numbers_whose_traces_take_long_are_given_up_at_the_second(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(x: Tensor) -> Tensor:
        scale = float(x.abs().max())
        return x / scale * (1 if scale > 100 else 2)

    monkeypatch.setattr(limits, "LIMITS", dataclasses.replace(limits.LIMITS, long_trace=1e-6))
    fast = pygraph.jit(fn)
    for value in range(1, 8):
        x = torch.arange(4.0, device=device) + value
        assert_same(fast(x), fn(x), device)
    assert fast.cache_info().size <= 4


def test_a_call_is_not_made_twice_where_its_numbers_are_given_up(device: torch.device) -> None:
    """Objects are not taken apart in functions that are cut, which shows when the call has been made."""

    def fn(batch: Any) -> int:
        batch.x.add_(1)
        return int(batch.x.sum())

    fast = pygraph.jit(fn)
    for value in range(10):
        mine, theirs = (SimpleNamespace(x=torch.full((3,), float(value), device=device)) for _ in range(2))
        assert fast(mine) == fn(theirs)
        assert_same(mine.x, theirs.x, device)


def test_what_is_no_number_runs_as_it_is(device: torch.device) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * min(float(x.sum()), 2.0)

    fast = pygraph.jit(fn)
    for value in (torch.inf, torch.nan, 1.0, -torch.inf, -0.0, 0.0):
        x = torch.full((3,), value, device=device)
        assert_same(fast(x), fn(x), device)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return out


def test_gradients_through_rows_of_which_data_decides_the_number(device: torch.device) -> None:
    torch.manual_seed(0)
    module = Experts().to(device)
    fast = pygraph.jit(module)
    for seed in (0, 0, 1, 0, 1, 0, 1, 1):
        x, _ = inputs(device, 3, seed)
        found: list[Any] = []
        for call in (module, fast):
            module.zero_grad()
            out = call(x)
            out.square().sum().backward()
            found.append((out.detach(), [p.grad for p in module.parameters()]))
        assert_same(found[1], found[0], device)
    assert fast.cache_info().captures


def mean_of_positives(c: Tensor) -> Tensor:
    return c.square().sum() / (c > 0).sum().item()


def at_least_one(c: Tensor) -> Tensor:
    count = max((c > 0.5).sum().item(), 1)
    return (c.exp() * count).sum() / (count + 1)


def by_the_largest(c: Tensor) -> Tensor:
    return (c / c.detach().abs().max().item()).sin().sum()


def updated_mask(c: Tensor) -> Tensor:
    mask = torch.zeros(6, dtype=torch.bool, device=c.device)
    mask |= c.detach()[0] > 0
    return mask


def sizes_of_one_mask(c: Tensor) -> Tensor:
    """Two results have the size of a mask; for that of the second one nobody asks."""
    mask = updated_mask(c)
    first, second = c[:, mask], c.detach()[:, mask]
    out = c.new_zeros(3, first.shape[1])
    out[:] = second
    return (out * first).sum()


def assigned(c: Tensor) -> Tensor:
    mask = updated_mask(c)
    first, second = c[0][mask], c.detach()[1][mask]
    rows = c.new_zeros(first.shape[0], 4)
    rows[:, 0] = first / 2 - second
    return rows.square().sum()


def normalized(c: Tensor) -> Tensor:
    mask = updated_mask(c)
    first, second = c[:, mask], c.detach()[:, mask]
    scale = max(first.shape[1], 1)
    return (first.sigmoid() * second).sum() / scale + (first - second.amax(1, keepdim=True)).square().sum()


def matched(c: Tensor) -> Tensor:
    """As targets are assigned to anchors (SimOTA)."""
    matches = (c.detach() > 0).to(torch.uint8)
    counts = matches.sum(0)
    if counts.max() > 1:
        several = counts > 1
        best = torch.min(c[:, several], dim=0)[1]
        matches[:, several] *= 0
        matches[best, several] = 1
    found = counts > 0
    number = found.sum().item()
    chosen = matches[:, found].argmax(0)
    return c[:, found].sum() / number + c[chosen].square().sum()


OF_NUMBERS = [mean_of_positives, at_least_one, by_the_largest, sizes_of_one_mask, assigned, normalized, matched]


@pytest.mark.parametrize("fn", OF_NUMBERS)
def test_gradients_from_outside_by_numbers_of_the_device(device: torch.device, fn: Callable[[Tensor], Tensor]) -> None:
    """The backward reads a number that the forward has read, or what has a size of data."""
    w = torch.linspace(0.5, 2, 6, device=device, requires_grad=True)
    fast = pygraph.jit(lambda x: fn(x * w))
    for index, count in enumerate((1, 1, 2, 1, 2, 1)):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(index)).abs()
        x = x * torch.where(torch.arange(6) < count, 1, -1)
        x[1:] *= 1 if index % 2 else -1
        x = x.to(device)
        losses = fn(x * w), fast(x)
        assert_same(losses[1].detach(), losses[0].detach(), device)
        gradients = [torch.autograd.grad(loss, w)[0] for loss in losses]
        assert_same(gradients[1], gradients[0], device)
    reasons = [one["reason"] for one in fast.explain().to_dict()["fallbacks"]]
    assert not any("forward" in reason or "backward" in reason for reason in reasons), reasons
    assert fast.cache_info().captures >= 2


def test_a_training_step_with_a_mask(device: torch.device) -> None:
    results: list[Any] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, mask: Tensor) -> Tensor:
            rows = module(x)[mask]  # noqa: B023
            loss = (rows.view(-1, 2) ** 2).mean() / rows.shape[0]
            optimizer.zero_grad()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            return loss.detach()

        call = pygraph.jit(step) if compiles else step
        results.append([call(*inputs(device, count, index)) for index, count in enumerate(COUNTS)])
        results[-1] += list(module.parameters())
    assert_same(results[1], results[0], device)


def size_counted(x: Tensor, state: SimpleNamespace) -> Tensor:
    i = (x > 0).nonzero().squeeze(1)
    state.count += i.numel()
    return x[i].sum()


def size_decides(x: Tensor, state: SimpleNamespace) -> Tensor:
    if (x > 0).nonzero().numel() > 1:
        state.count += 1
    return x * 2


def number_decides(x: Tensor, state: SimpleNamespace) -> Tensor:
    if int(x.argmax()) > 1:
        state.count += 1
    return x * 2


def outcome_decides(x: Tensor, state: SimpleNamespace) -> Tensor:
    if x[0] > 0:
        state.count += 1
    return x * 2


def scaled(body: Any, w: Tensor, state: SimpleNamespace) -> Callable[[Tensor], Tensor]:
    return lambda x: body(x * w, state)


@pytest.mark.parametrize("body", [size_counted, size_decides, number_decides, outcome_decides])
def test_state_left_behind_and_gradients_from_outside(device: torch.device, body: Any) -> None:
    w, results = torch.ones(4, device=device, requires_grad=True), []
    for compiles in (False, True):
        state = SimpleNamespace(count=0)
        run: Any = scaled(body, w, state)
        run = pygraph.jit(run) if compiles else run
        for seed in range(5):
            x = torch.randn(4, generator=torch.Generator().manual_seed(seed)).to(device)
            (gradient,) = torch.autograd.grad(run(x).sum(), w)
            results.append((gradient.tolist(), state.count))
    assert results[:5] == results[5:]


@settings(deadline=None)
@given(data=st.data())
def test_any_program_of_questions(device: torch.device, data: st.DataObject) -> None:
    """Questions for outcomes, numbers and sizes in any order, on calls of any values."""
    kinds = data.draw(
        st.lists(st.sampled_from(["slice", "repeat", "mask", "if", "update", "draw", "size"]), min_size=1, max_size=4)
    )

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        out = x * 1
        for kind in kinds:
            if kind == "slice":
                out = out[: 1 + int(mask.sum())] + 1
            elif kind == "repeat":
                for _ in range(int(mask[:3].sum())):
                    out = out.sin()
            elif kind == "mask":
                out = out[: len(mask)][mask[: len(out)]].reshape(-1, 2).repeat(1, 2)
            elif kind == "if":
                out = out + 1 if out.sum() > 1 else out - 1
            elif kind == "update":
                x.add_(out.sum())
            elif kind == "draw":
                out = out + torch.rand_like(out)
            else:
                out = out * mask.nonzero().shape[0]
        return out

    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    with torch.no_grad():
        check(device, fn, counts, hits=0)
