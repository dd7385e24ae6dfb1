"""Steps that are put together at random, of what loops of training do: replays leave what eager leaves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pygraph
from tests.steps import assert_same, copied

pytestmark = pytest.mark.rotates

Part = Callable[["Trainer", Tensor, Tensor], object]


class Trainer:
    """The state of a loop: networks, an optimizer, statistics, logs, and what a step has computed so far."""

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.net: nn.Module = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)
        ).to(device)  # fmt: skip
        self.target = copy.deepcopy(self.net)
        make: Any = [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.01)][seed % 2]
        self.optimizer: torch.optim.Optimizer = make(self.net.parameters())
        self.total, self.count_on_host = torch.zeros(3, device=device), torch.zeros(())
        self.calls, self.average = 0, 0.0
        self.losses: list[Any] = []
        self.records: list[Any] = []
        self.loss: Tensor | None = None
        self.drawn: Tensor | None = None

    def state(self) -> Any:
        parts = [(p.grad, p.requires_grad) for net in (self.net, self.target) for p in net.parameters()]
        return copied([self.net.state_dict(), self.target.state_dict(), parts, self.optimizer.state_dict()["state"],
                       self.total, self.count_on_host, self.calls, self.average, list(self.losses),
                       list(self.records), self.loss, self.drawn])  # fmt: skip


def _clear(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.optimizer.zero_grad()


def _forward(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.loss = F.cross_entropy(t.net(x), y)


def _forward_in_a_checkpoint(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.loss = F.cross_entropy(checkpoint(t.net, x, use_reentrant=False), y)


def _backward(t: Trainer, x: Tensor, y: Tensor) -> None:
    assert t.loss is not None
    t.loss.backward()
    t.loss = t.loss.detach()


def _update(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.optimizer.step()


def _assigned_average(t: Trainer, x: Tensor, y: Tensor) -> None:
    for follows, online in zip(t.target.parameters(), t.net.parameters(), strict=True):
        follows.data = follows.data * 0.9 + online.data * 0.1


def _average_in_place(t: Trainer, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        for follows, online in zip(t.target.parameters(), t.net.parameters(), strict=True):
            follows.lerp_(online, 0.1)


def _freeze(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.target.requires_grad_(False)


def _thaw(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.target.requires_grad_(True)


def _backward_of_the_target(t: Trainer, x: Tensor, y: Tensor) -> None:
    if any(parameter.requires_grad for parameter in t.target.parameters()):
        t.target(x).square().mean().backward()


def _decide(t: Trainer, x: Tensor, y: Tensor) -> None:
    if x.sum() > 0:
        t.total.add_(x[:3, 0])
    else:
        t.total.mul_(0.5)


def _decide_by_what_is_updated(t: Trainer, x: Tensor, y: Tensor) -> None:
    if t.total.sum() > 1:
        t.total.sub_(1)


def _decide_by_a_draw(t: Trainer, x: Tensor, y: Tensor) -> None:
    if torch.rand((), device=x.device) > 0.3:
        t.total.add_(torch.rand(3, device=x.device))


def _decide_on_the_host(t: Trainer, x: Tensor, y: Tensor) -> None:
    if t.count_on_host == 0:
        t.total.fill_(1)
    t.count_on_host += 1


def _log(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.losses.append(1.0 if t.loss is None else t.loss.detach())


def _log_at_times(t: Trainer, x: Tensor, y: Tensor) -> None:
    if x.max().item() > 1.5:
        t.losses.append(x.max().item())


def _record(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.calls += 1
    t.average += x.mean().item()
    t.records.append((t.calls, x.mean()))


def _update_the_batch(t: Trainer, x: Tensor, y: Tensor) -> None:
    x.add_(0.1)


def _draw_again(t: Trainer, x: Tensor, y: Tensor) -> None:
    on_cuda = x.device.type == "cuda"
    get, put = (torch.cuda if on_cuda else torch).get_rng_state, (torch.cuda if on_cuda else torch).set_rng_state
    before = get()
    first = torch.rand(2, device=x.device)
    after = get()
    put(before)
    t.drawn = first - torch.rand(2, device=x.device)
    put(after)


def _clip(t: Trainer, x: Tensor, y: Tensor) -> None:
    if any(parameter.grad is not None for parameter in t.net.parameters()):
        nn.utils.clip_grad_norm_(t.net.parameters(), 0.5, error_if_nonfinite=True)


PARTS: list[Part] = [
    _assigned_average, _average_in_place, _freeze, _thaw, _backward_of_the_target, _decide, _decide_by_what_is_updated,
    _decide_by_a_draw, _decide_on_the_host, _log, _log_at_times, _record, _update_the_batch, _draw_again, _clip,
]  # fmt: skip


ERRORS = ("non-finite", "modified by an inplace operation")
"""Errors that such steps may end in, in eager as well."""


def parts_of(seed: int) -> list[Part]:
    """A step of training, with other parts anywhere in it."""
    choose = random.Random(seed)
    found: list[Part] = [_clear, choose.choice([_forward, _forward_in_a_checkpoint]), _backward, _update]
    for part in choose.sample(PARTS, choose.randint(2, 6)):
        found.insert(choose.randint(0, len(found)), part)
    return found


def run(device: torch.device, seed: int, transform: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """The state after every call, errors, and what is drawn next; and the step."""
    trainer, parts = Trainer(device, seed), parts_of(seed)

    def step(x: Tensor, y: Tensor) -> None:
        for part in parts:
            part(trainer, x, y)

    fast = transform(step)
    torch.manual_seed(seed + 1)
    found: list[Any] = []
    for call in range(10):
        x, y = torch.randn(5, 4, device=device), torch.randint(0, 3, (5,), device=device)
        x = x * torch.inf if call % 5 == 4 and seed % 3 == 0 else x
        failed = 0
        try:
            fast(x, y)
        except RuntimeError as error:
            failed = next((number for number, text in enumerate(ERRORS, 1) if text in str(error)), 0)
            if not failed:
                raise
        found.append((failed, x, trainer.state(), torch.rand(1, device=device), torch.rand(1)))
    return found, fast


@pytest.mark.parametrize("seed", range(18))
def test_steps_leave_what_eager_leaves(device: torch.device, seed: int) -> None:
    expected, _ = run(device, seed, lambda fn: fn)
    found, _ = run(device, seed, pygraph.jit)
    assert_same(found, expected, device)
