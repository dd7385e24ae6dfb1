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


class Buffer:
    """What is sampled from: it reads its own attributes by texts."""

    def __init__(self, device: torch.device) -> None:
        self.rewards = torch.ones(2, 2, device=device)
        self.scale, self._rate = 1.0, 1.0

    def by_dict(self, name: str = NAME) -> float:
        return [self.__dict__[name] for _ in range(1)][0]  # noqa: RUF015

    def by_vars(self) -> float:
        return vars(self)[NAME]

    def by_method(self) -> float:
        return getattr(self, "ra" + "te")()

    def rate(self) -> float:
        return self._rate


class Plain:
    """An object with an attribute that no code has a name for."""

    def __init__(self) -> None:
        vars(self)[FACTOR] = self.deep = 1.0


FACTOR = "fac" + "tor"


class Sampler:
    """Methods that read attributes of another object."""

    def of_other(self, other: Plain) -> float:
        return other.__dict__[FACTOR]

    def of_other_by_getattr(self, other: Plain) -> float:
        return getattr(other, FACTOR)

    def of_another_self(self, other: Any) -> float:
        self = other
        return self.__dict__[FACTOR]


def d1(plain: Plain, how: str) -> float:
    return d2(plain, how)


def d2(plain: Plain, how: str) -> float:
    return d3(plain, how)


def d3(plain: Plain, how: str) -> float:
    return d4(plain, how)


def d4(plain: Plain, how: str) -> float:
    return d5(plain, how)


def d5(plain: Plain, how: str) -> float:
    return d6(plain) if how == "a function" else Deep(plain).read() if how == "a class" else plain.deep


def d6(plain: Plain) -> float:
    return getattr(plain, FACTOR)


class Deep:
    """A class of which only a deep function makes objects."""

    def __init__(self, plain: Plain) -> None:
        self.plain = plain

    def read(self) -> float:
        return vars(self.plain)[FACTOR]


class Tools:
    """Functions in a class that have no object."""

    @staticmethod
    def scale_of(options: Any) -> float:
        return options.__dict__[NAME]


class Net(nn.Module):
    """A module that prints a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class Reader:
    """A trainer whose buffer reads its own attributes, with others that change."""

    def __init__(self, device: torch.device) -> None:
        self.buffer, self.monitor = Buffer(device), Options()
        self.options, self.net, self.sampler, self.plain = Options(), Net(), Sampler(), Plain()

    def print_progress(self) -> float:
        print(f"{self.buffer.scale:.1f}", str(self.buffer.scale), end="")
        print("{:.1f} {b._rate}".format(1.0, b=self.buffer), end="")  # noqa: UP032
        self.net.eval()
        return self.buffer.scale


OWN: dict[str, Callable[[Reader], float]] = {
    "__dict__": lambda self: self.buffer.by_dict(),
    "vars": lambda self: self.buffer.by_vars(),
    "getattr by a constant": lambda self: getattr(self.buffer, "scale", 0.0),
    "a text": Reader.print_progress,
    "a dict's copy": lambda self: {"scale": self.buffer.scale}.copy()["scale"],
}


@pytest.mark.parametrize("name", OWN)
def test_reads_of_its_own_attributes_let_others_change(device: torch.device, name: str) -> None:
    reader, reads = Reader(device), OWN[name]

    class Step(Reader):
        def __call__(self, x: Tensor) -> Tensor:
            return x * reads(self) * self.buffer.rewards

    step = Step(device)
    step.buffer = reader.buffer
    fast = pygraph.jit(step)
    for number in range(20):
        step.monitor.other = number
        step.monitor = Options(other=number)
        fast(torch.ones(2, device=device))
    assert fast.cache_info().captures <= 1
    step.buffer.scale = 3.0
    assert fast(torch.ones(2, device=device)).tolist() == [[3.0] * 2] * 2


OTHERS: dict[str, tuple[Callable[[Reader], float], Callable[[Reader], None]]] = {
    "a method by its name": (lambda self: self.buffer.by_method(), lambda self: setattr(self.buffer, "_rate", 2.0)),
    "another object by __dict__": (
        lambda self: self.sampler.of_other(self.plain), lambda self: setattr(self.plain, FACTOR, 2.0),
    ),
    "another object by getattr": (
        lambda self: self.sampler.of_other_by_getattr(self.plain), lambda self: setattr(self.plain, FACTOR, 2.0),
    ),
    "another object by the same name": (
        lambda self: self.sampler.of_another_self(self.plain), lambda self: setattr(self.plain, FACTOR, 2.0),
    ),
    "a deep function": (lambda self: d1(self.plain, "a function"), lambda self: setattr(self.plain, FACTOR, 2.0)),
    "a deep class": (lambda self: d1(self.plain, "a class"), lambda self: setattr(self.plain, FACTOR, 2.0)),
    "a name in a deep function": (lambda self: d1(self.plain, "a name"), lambda self: setattr(self.plain, "deep", 2.0)),
    "a static method": (lambda self: Tools.scale_of(self.options), lambda self: setattr(self.options, "scale", 2.0)),
    "a method of another class": (
        lambda self: Buffer.by_dict(self.options), lambda self: setattr(self.options, "scale", 2.0),  # type: ignore[arg-type]
    ),
    "a module's text": (
        lambda self: float(str(self.net).partition("=")[2].rstrip(")")), lambda self: setattr(self.net, "scale", 2.0),
    ),
    "a module's text in another": (
        lambda self: float(f"{self.net}".partition("=")[2].rstrip(")")), lambda self: setattr(self.net, "scale", 2.0),
    ),
    "a field of a format": (
        lambda self: float("{.scale}".format(self.options)),  # noqa: UP032
        lambda self: setattr(self.options, "scale", 2.0),
    ),
    "a deep copy": (
        lambda self: copy.deepcopy(self).__dict__["options"].__dict__[NAME],
        lambda self: setattr(self.options, "scale", 2.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_reads_of_others_by_methods_are_noticed(device: torch.device, name: str) -> None:
    reads, change = OTHERS[name]
    reader = Reader(device)
    fast = pygraph.jit(lambda x: x * reads(reader))
    for _ in range(2):
        assert fast(torch.ones(2, device=device)).tolist() == [1.0] * 2
    change(reader)
    assert fast(torch.ones(2, device=device)).tolist() == [2.0] * 2
