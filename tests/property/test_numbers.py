"""Steps that compute numbers in Python, while others change what they find: all is as in eager, errors too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedules

import pygraph
from tests import extent
from tests.steps import assert_same

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "SGD at once": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda params: AdamW(params, lr=0.01, foreach=False),
    "AdamW capturable": lambda params: AdamW(params, lr=0.01, capturable=True),
}
SCHEDULES: dict[str, Callable[..., Any]] = {
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.95),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 10),
    "steps": lambda optimizer: schedules.StepLR(optimizer, 3),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 0.2, total_steps=200),
}


class Trainer:
    def __init__(self, device: torch.device, optimizer: str, schedule: str, *, all_at_first: bool) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 2)).to(device)
        self.parameters = list(self.net.parameters())
        self.optimizer = OPTIMIZERS[optimizer](self.parameters if all_at_first else self.parameters[:3])
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.count, self.weight, self.log = 0, 1.0, list[Any]()

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.count += 1
        if self.count % 6 == 0:
            self.weight = self.weight * 0.9
        self.optimizer.zero_grad()
        loss = (self.net(x) - y).square().mean() * self.weight
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        if self.count % 4 == 1:
            self.log.append(loss.item())
        if self.count % 9 == 8:
            raise KeyError(self.count)
        return loss.detach(), self.schedule.get_last_lr()

    def state(self) -> tuple[Any, Any]:
        """All tensors, and all numbers."""
        numbers = [group.copy() for group in self.optimizer.param_groups]
        for group in numbers:
            del group["params"]
        of_schedule = {
            key: value for key, value in vars(self.schedule).items() if isinstance(value, (int, float, list))
        }
        tensors = [[p.detach().clone(), None if p.grad is None else p.grad.clone()] for p in self.parameters]
        states = [
            {k: torch.as_tensor(v).cpu() for k, v in s.items()} for s in self.optimizer.state_dict()["state"].values()
        ]
        return [tensors, states], repr([numbers, of_schedule, self.count, self.weight, self.log])


def _set(trainer: Trainer, key: str, change: Callable[[float], float]) -> None:
    trainer.optimizer.param_groups[0][key] = change(trainer.optimizer.param_groups[0][key])


def _add_group(trainer: Trainer) -> None:
    if len(trainer.optimizer.param_groups) == 1 and len(trainer.optimizer.param_groups[0]["params"]) == 3:
        trainer.optimizer.add_param_group({"params": trainer.parameters[3:], "lr": 0.02})
        trainer.schedule = schedules.ExponentialLR(trainer.optimizer, 0.95)


EVENTS: dict[str, Callable[[Trainer], object]] = {
    "nothing": lambda trainer: None,
    "another rate": lambda trainer: _set(trainer, "lr", lambda lr: lr * 0.5),
    "another decay": lambda trainer: _set(trainer, "weight_decay", lambda decay: 0.01 * trainer.count),
    "another mode": lambda trainer: trainer.net.train(not trainer.net.training),
    "another weight": lambda trainer: setattr(trainer, "weight", 1.5),
    "another schedule": lambda trainer: setattr(trainer, "schedule", schedules.StepLR(trainer.optimizer, 5)),
    "another group": _add_group,
    "state of the optimizer": lambda t: t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict())),
    "state of the schedule": lambda t: t.schedule.load_state_dict(copy.deepcopy(t.schedule.state_dict())),
    "no gradients": lambda trainer: trainer.net.zero_grad(),
    "zeros for gradients": lambda trainer: trainer.net.zero_grad(set_to_none=False),
}


@settings(max_examples=extent.examples(2, 100))
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    all_at_first=st.booleans(),
    events=st.lists(st.sampled_from(sorted(EVENTS)), min_size=2, max_size=4),
    sizes=st.lists(st.sampled_from([4, 8]), min_size=2, max_size=2),
)
def test_any_history_of_a_step(
    device: torch.device, optimizer: str, schedule: str, all_at_first: bool, events: list[str], sizes: list[int]
) -> None:
    mine, theirs = (Trainer(device, optimizer, schedule, all_at_first=all_at_first) for _ in range(2))
    fast = pygraph.jit(mine.step)
    for number in range(6 * (len(events) + 1)):
        if number and number % 6 == 0:
            for trainer in (mine, theirs):
                EVENTS[events[number // 6 - 1]](trainer)
        size = sizes[number // 9 % 2]
        x, y = torch.rand(size, 4, device=device), torch.rand(size, 2, device=device)
        outcomes: list[Any] = []
        for call in (fast, theirs.step):
            torch.manual_seed(number)
            try:
                outcomes.append(call(x, y))
            except KeyError as error:
                outcomes.append(str(error))
        if isinstance(outcomes[1], tuple):
            assert_same(outcomes[0], outcomes[1], device)
        else:
            assert outcomes[0] == outcomes[1]
        assert_same(mine.state()[0], theirs.state()[0], device)
        assert mine.state()[1] == theirs.state()[1]
    assert fast.cache_info().hits >= 4
