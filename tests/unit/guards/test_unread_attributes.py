"""Attributes that no code of a function has names for: they may change, where nothing reads attributes otherwise."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from operator import attrgetter as reader_of
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph

read = getattr
clone = copy.copy


@dataclasses.dataclass
class Options:
    scale: float = 1.0
    other: int = 0

    def doubled(self, by: float = 1.0) -> float:
        return self.scale * by


class Trainer:
    """A loop with all that belongs to it, of which a step needs a part."""

    def __init__(self, device: torch.device) -> None:
        self.model = nn.Linear(4, 4).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.history: list[Tensor] = []
        self.best: dict[str, Any] = {}
        self.epoch = 0
        self.last: Tensor | None = None

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_what_a_step_does_not_read_may_change(device: torch.device) -> None:
    trainer = Trainer(device)
    fast = pygraph.jit(trainer.step, strict=True)
    for number in range(20):
        trainer.last = fast(torch.ones(2, 4, device=device))
        trainer.history.append(trainer.last)
        trainer.best = {"epoch": number}
        trainer.epoch = number
        trainer.schedule.step()
    assert fast.cache_info().captures <= 2
    assert fast.cache_info().hits >= 16


def test_a_module_may_count_its_own_calls_elsewhere(device: torch.device) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    net = Net().to(device)
    fast = pygraph.jit(net)
    with torch.no_grad():
        for number in range(8):
            net.seen = number
            fast(torch.ones(2, 2, device=device))
    assert fast.cache_info()[:2] == (7, 1)


def first(options: Options) -> float:
    return second(options)


def second(options: Options) -> float:
    return third(options)


def third(options: Options) -> float:
    return fourth(options)


def fourth(options: Options) -> float:
    return fifth(options)


def fifth(options: Options) -> float:
    return sixth(options)


def sixth(options: Options) -> float:
    return options.scale


def by_pattern(options: Any) -> float:
    match options:
        case Options(scale):
            return scale
        case _:
            return 0.0


NAME = "sc" + "ale"
METHOD = "dou" + "bled"
SCALE = operator.attrgetter(NAME)
TWICE = operator.methodcaller(METHOD, by=2)

READERS: dict[str, Callable[[Any], float]] = {
    "getattr": lambda options: getattr(options, NAME),
    "getattr by another name": lambda options: read(options, NAME),
    "vars": lambda options: vars(options)[NAME],
    "__dict__": lambda options: options.__dict__[NAME],
    "attrgetter": lambda options: operator.attrgetter(NAME)(options),
    "attrgetter by another name": lambda options: reader_of(NAME)(options),
    "attrgetter made before": lambda options: SCALE(options),
    "methodcaller made before": lambda options: TWICE(options) / 2,
    "a method": lambda options: getattr(options, METHOD)(),
    "a copy": lambda options: next(iter(vars(copy.copy(options)).values())),
    "a copy by another name": lambda options: list(clone(options).__dict__.values())[0],  # noqa: RUF015
    "fields": lambda options: dataclasses.astuple(options)[0],
    "a format": lambda options: float("{0.scale}".format(options)),  # noqa: UP030, UP032
    "a text": lambda options: float(repr(options).partition("=")[2].partition(",")[0]),
    "a pattern": by_pattern,
    "equality": lambda options: 1.0 if options == Options() else 0.5,
    "functions of functions": first,
}


@pytest.mark.parametrize("name", READERS)
def test_reads_without_a_name_are_noticed(device: torch.device, name: str) -> None:
    options, reads = Options(), READERS[name]
    fast = pygraph.jit(lambda x: x * reads(options))
    for value in (1.0, 1.0, 0.5, 0.5, 1.0):
        options.scale = value
        assert fast(torch.ones(2, device=device)).tolist() == [value] * 2
