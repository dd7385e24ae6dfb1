"""Steps with a schedule inside: Python numbers that change at every call, and all state of it, are as in eager."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as schedules

import pygraph
from pygraph.errors import FallbackError
from tests.steps import assert_same

STEPS = 30

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "SGD one by one": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "Adam": lambda params: Adam(params, lr=0.01, foreach=True),
    "AdamW": lambda params: AdamW(params, lr=0.01, foreach=False),
    "AdamW capturable": lambda params: AdamW(params, lr=0.01, capturable=True),
}


def sequential(optimizer: Any) -> Any:
    warmup = schedules.LinearLR(optimizer, 0.1, 1.0, 10)
    return schedules.SequentialLR(optimizer, [warmup, schedules.CosineAnnealingLR(optimizer, 15)], [10])


def chained(optimizer: Any) -> Any:
    parts = [schedules.ConstantLR(optimizer, 0.3, 10), schedules.ExponentialLR(optimizer, 0.97)]
    return schedules.ChainedScheduler(parts, optimizer)


class Warmup:
    """A schedule as users write it: no class of torch's, a list of what there was, and Python's control flow."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.calls, self.phase = optimizer, 0, "warm"
        self.history: list[float] = []

    def step(self) -> None:
        self.calls += 1
        self.phase = "warm" if self.calls < 8 else "cold"
        for index, group in enumerate(self.optimizer.param_groups):
            group["lr"] = (0.01 * self.calls if self.phase == "warm" else 0.1 / self.calls) / (index + 1)
        self.history.append(self.optimizer.param_groups[0]["lr"])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.97),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 20),
    "steps": lambda optimizer: schedules.StepLR(optimizer, 7, 0.5),
    "milestones": lambda optimizer: schedules.MultiStepLR(optimizer, [5, 11, 25], 0.5),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 0.97**epoch),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 0.2, total_steps=80),
    "one cycle, momentum alone": lambda optimizer: schedules.OneCycleLR(
        optimizer, 0.2, total_steps=80, cycle_momentum=False
    ),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, 10),
    "linear": lambda optimizer: schedules.LinearLR(optimizer, 0.1, 1.0, 10),
    "constant": lambda optimizer: schedules.ConstantLR(optimizer, 0.3, 10),
    "polynomial": lambda optimizer: schedules.PolynomialLR(optimizer, 25, 2.0),
    "sequential": sequential,
    "chained": chained,
    "warm restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 10, 2),
    "the user's own": Warmup,
}


def plain(value: Any, depth: int = 0) -> Any:
    """The state behind a value, with the types of its numbers."""
    if isinstance(value, Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, dict):
        return {key: plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, (int, float, str, type(None))):
        return type(value), value
    return type(value).__name__ if depth > 3 or callable(value) else plain(getattr(value, "__dict__", {}), depth + 1)


def make_net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)


def batches(device: torch.device, count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 6).to(device), torch.randn(4, 3).to(device)) for _ in range(count)]


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in net.parameters() if p.ndim > 1]
    biases = [p for p in net.parameters() if p.ndim < 2]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.003}]


def train(device: torch.device, optimizer: str, schedule: str, *, jitted: bool, groups: bool) -> tuple[Any, Any]:
    net = make_net(device)
    optimizer_ = OPTIMIZERS[optimizer](two_groups(net) if groups else net.parameters())
    schedule_ = SCHEDULES[schedule](optimizer_)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer_.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer_.step()
        schedule_.step()
        return loss

    fast = pygraph.jit(step) if jitted else step
    found: list[Any] = []
    for x, y in batches(device):
        loss = fast(x, y)
        found.append((loss.detach().clone(), [p.grad.clone() for p in net.parameters()]))
        found.append(str((plain(optimizer_.state_dict()), plain(vars(schedule_)))))
    return [*found, net.state_dict()], fast


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def assert_same_text(mine: str, theirs: str, device: torch.device) -> None:
    """The same text, with numbers as close as the kernels of a device are, printed with four digits."""
    if device.type != "cuda":
        assert mine == theirs
        return
    assert NUMBER.sub("", mine).split() == NUMBER.sub("", theirs).split()
    for one, other in zip(NUMBER.findall(mine), NUMBER.findall(theirs), strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-3, abs=2e-4)


@pytest.mark.rotates
@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_inside_a_step(device: torch.device, schedule: str, optimizer: str, groups: bool) -> None:
    expected, _ = train(device, optimizer, schedule, jitted=False, groups=groups)
    found, fast = train(device, optimizer, schedule, jitted=True, groups=groups)
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(mine, str):
            assert_same_text(mine, theirs, device)
        else:
            assert_same(mine, theirs, device)
    info, report = fast.cache_info(), fast.explain().to_dict()
    assert not report["fallbacks"], report["fallbacks"]
    assert info.hits >= STEPS - 8, info
    assert info.captures <= 5, info


def test_the_end_of_a_schedule_is_an_error_as_in_eager(device: torch.device) -> None:
    """It comes when the parameters have been updated."""
    outcomes: list[Any] = []
    for jitted in (False, True):
        net = make_net(device)
        optimizer = SGD(net.parameters(), lr=0.1)
        schedule = schedules.OneCycleLR(optimizer, 0.2, total_steps=12)

        def step(x: Tensor, y: Tensor, net: Any = net, optimizer: Any = optimizer, schedule: Any = schedule) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss

        fast = pygraph.jit(step) if jitted else step
        with pytest.raises(ValueError, match="Tried to step 13 times") as error:  # noqa: PT012
            for x, y in batches(device):
                fast(x, y)
        gradients = [p.grad for p in net.parameters()]
        rate = optimizer.param_groups[0]["lr"]
        outcomes.append((str(error.value), net.state_dict(), gradients, schedule.last_epoch, rate))
    assert_same(outcomes[1][1:3], outcomes[0][1:3], device)
    assert outcomes[1][3:] == outcomes[0][3:]
    assert outcomes[1][0] == outcomes[0][0]


# ---- numbers in Python, wherever a step computes them ----------------------------------------------------------------


def warmup(count: int) -> float:
    return 0.1 * min(1.0, (count + 1) / 10)


class Trainer:
    """What steps below use; each has a ``step`` of its own."""

    rate = 0.0

    def __init__(self, device: torch.device) -> None:
        self.net = make_net(device)
        self.optimizer: Any = SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.schedule: Any = schedules.CosineAnnealingLR(self.optimizer, 20)
        self.average = [p.detach().clone() for p in self.net.parameters()]
        self.count, self.log = 0, list[Any]()
        self.schedules = [self.schedule, schedules.StepLR(self.optimizer, 7)]

    def backward(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.net(x) - y).square().mean() * weight
        loss.backward()
        return loss

    def state(self) -> Any:
        gradients = [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]
        numbers = plain([self.count, self.rate, self.log, self.schedule, self.optimizer.state_dict()])
        return [p.detach().clone() for p in self.net.parameters()], gradients, self.average, str(numbers)


class SetsAtTheBeginning(Trainer):
    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = warmup(self.count) if self.count % 7 else 2.0**-self.count
        loss = self.backward(x, y)
        self.optimizer.step()
        return loss


class SetsInBetween(Trainer):
    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        loss = self.backward(x, y)
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5**self.count
            group["weight_decay"] = 0.01 * warmup(self.count)
        self.optimizer.step()
        return loss


class WeighsTheLoss(Trainer):
    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        self.count += 1
        self.rate = min(1.0, self.count / 10)
        loss = self.backward(x, y, self.rate)
        self.optimizer.step()
        return loss.detach()


class WeighsTheLossInBetween(Trainer):
    """A counter's comparison is made before the call, and the weight is live."""

    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        self.optimizer.zero_grad()
        loss = (self.net(x) - y).square().mean()
        self.count += 1
        loss = loss * min(1.0, self.count / 10)
        loss.backward()
        self.optimizer.step()
        return loss


class Accumulates(Trainer):
    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        self.count += 1
        loss = (self.net(x) - y).square().mean()
        (loss / 4).backward()
        if self.count % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


class AccumulatesByArgument(Trainer):
    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        loss = (self.net(x) - y).square().mean()
        (loss / 4).backward()
        if (number + 1) % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


class AccumulatesAtTheEnd(Trainer):
    """What only some calls do may be work of the device, and is no statement that computes numbers alone."""

    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        loss = (self.net(x) - y).square().mean()
        (loss / 4).backward()
        self.count += 1
        if self.count % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


class Averages(Trainer):
    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        loss = self.backward(x, y)
        self.optimizer.step()
        self.count += 1
        decay = min(0.99, (1 + self.count) / (10 + self.count))
        with torch.no_grad():
            for average, parameter in zip(self.average, self.net.parameters(), strict=True):
                average.mul_(decay).add_(parameter, alpha=1 - decay)
        return loss


class Logs(Trainer):
    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        loss = self.backward(x, y)
        self.optimizer.step()
        self.schedule.step()
        self.log.append(self.optimizer.param_groups[0]["lr"])
        if number % 10 == 0:
            print(f"{number}: {loss.item():.3f}")
        return {"loss": loss.detach(), "lr": self.schedule.get_last_lr()[0]}


class SeveralSchedules(Trainer):
    def after(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        loss = self.backward(x, y)
        self.optimizer.step()
        self.after()
        return loss


class Plateau(Trainer):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.schedule = schedules.ReduceLROnPlateau(self.optimizer, patience=2)

    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        loss = self.backward(x, y)
        self.optimizer.step()
        self.schedule.step(loss.item())
        return loss


class AtTimes(Trainer):
    def step(self, x: Tensor, y: Tensor, number: int) -> Any:
        loss = self.backward(x, y)
        self.optimizer.step()
        self.count += 1
        if self.count % 5 == 0:
            self.schedule.step()
        return loss


@pytest.mark.rotates
@pytest.mark.parametrize("kind", Trainer.__subclasses__())
def test_numbers_that_change_at_every_step(device: torch.device, kind: type[Any]) -> None:
    mine, theirs = kind(device), kind(device)
    fast = pygraph.jit(mine.step)
    for number, (x, y) in enumerate(batches(device, 40)):
        outputs = [io.StringIO(), io.StringIO()]
        with contextlib.redirect_stdout(outputs[0]):
            found = fast(x, y, number)
        with contextlib.redirect_stdout(outputs[1]):
            expected = theirs.step(x, y, number)
        assert_same(found, expected, device)
        (*tensors, numbers), (*others, their_numbers) = mine.state(), theirs.state()
        assert_same(tensors, others, device)
        assert numbers == their_numbers
        assert outputs[0].getvalue() == outputs[1].getvalue()
    info, report = fast.cache_info(), fast.explain().to_dict()
    assert not report["fallbacks"], report["fallbacks"]
    assert info.captures <= 6, info
    assert info.hits >= 30, info
    if kind in (Accumulates, AccumulatesAtTheEnd):
        assert not report["in_python"]


def test_numbers_inside_a_statement_that_computes_tensors_have_a_reason_and_a_remedy(device: torch.device) -> None:
    mine, theirs = Trainer(device), Trainer(device)
    factors = [1 / (number + 1) for number in range(20)]

    def whole(trainer: Trainer) -> Callable[..., Any]:
        def inner(x: Tensor, y: Tensor) -> Tensor:
            loss = trainer.backward(x, y)
            trainer.optimizer.step()
            trainer.schedule.step()
            return loss * factors[trainer.schedule.last_epoch]

        def step(x: Tensor, y: Tensor) -> Tensor:
            return inner(x, y)

        return step

    fast, slow = pygraph.jit(whole(mine)), whole(theirs)
    for x, y in batches(device, 16):
        assert_same(fast(x, y), slow(x, y), device)
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert "last_epoch is another number at every call, and decides what it does" in fallback["reason"]
    assert "none of its statements" in fallback["reason"]


class Decorated(Trainer):
    """A method that is transformed in its class: it is passed the instance."""

    @pygraph.jit
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.backward(x, y)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


class LightModule(nn.Module):
    """A method of a module that has the schedule among its attributes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.net = make_net(device)
        self.optimizer: Any = SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.schedule: Any = schedules.CosineAnnealingLR(self.optimizer, 20)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.net(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss


SCRIPT = """
import torch

trainer = schedule = optimizer = None


def step(x, y):
    loss = trainer.backward(x, y)
    optimizer.step()
    schedule.step()
    return loss
"""
"""A script whose step has the name of the optimizer's method."""


def script(path: Path, trainer: Trainer) -> Callable[..., Any]:
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.trainer, module.optimizer, module.schedule = trainer, trainer.optimizer, trainer.schedule
    return module.step


@pytest.mark.parametrize("form", ["decorated method", "method of a module", "function of a script"])
def test_forms_of_a_step(device: torch.device, form: str, tmp_path: Path) -> None:
    found: list[Any] = []
    for jitted in (True, False):
        trainer: Any
        if form == "decorated method":
            trainer = Decorated(device)
            call = trainer.step if jitted else lambda x, y, trainer=trainer: Decorated.step.fn(trainer, x, y)
        elif form == "method of a module":
            trainer = LightModule(device)
            call = pygraph.jit(trainer.step) if jitted else trainer.step
        else:
            trainer = Trainer(device)
            step = script(tmp_path / f"train_{jitted}.py", trainer)
            call = pygraph.jit(step) if jitted else step
        losses = [call(x, y).detach().clone() for x, y in batches(device, 16)]
        parameters = [p.detach() for p in trainer.net.parameters()]
        found.append((losses, parameters, trainer.schedule.get_last_lr(), trainer.schedule.last_epoch))
        if jitted:
            info = Decorated.step.cache_info() if form == "decorated method" else call.cache_info()
            assert info.hits >= 10, info
            assert info.captures <= 3, info
    Decorated.step.cache_clear()
    assert_same(found[0], found[1], device)


def test_a_schedule_inside_is_computed_before_the_call(device: torch.device) -> None:
    """Also where nothing may run as Python."""
    mine, theirs = Trainer(device), Trainer(device)

    def step(trainer: Trainer) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = trainer.backward(x, y)
            trainer.optimizer.step()
            trainer.schedule.step()
            return loss

        return step

    fast, slow = pygraph.jit(step(mine), strict=True), step(theirs)
    for x, y in batches(device, 20):
        assert_same(fast(x, y), slow(x, y), device)
        assert mine.schedule.last_epoch == theirs.schedule.last_epoch
        assert mine.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]
    assert fast.cache_info().captures <= 4


def test_strict_refuses_a_schedule_that_decides(device: torch.device) -> None:
    """Its lines, and perhaps the update, would run as Python; nothing is changed by the call that is refused."""
    net = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    rates = [0.1 / (number + 1) for number in range(20)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: rates[number])

    @pygraph.jit(strict=True)
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    x = torch.randn(3, 4, device=device)
    number, before = 0, list[Tensor]()

    def steps() -> None:
        nonlocal number, before
        while number < 12:
            before = [parameter.clone() for parameter in net.parameters()]
            step(x)
            number += 1

    with pytest.raises(FallbackError, match=r"schedule\.last_epoch is another number .* Do that before or after"):
        steps()
    assert schedule.last_epoch == number
    assert all(torch.equal(one, parameter) for one, parameter in zip(before, net.parameters(), strict=True))
