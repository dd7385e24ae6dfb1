"""Gradients of native replays: stored without objects of Python, in the memory of those that nobody else refers to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.process import extension
from pygraph.runtime.emulated.memory import Allocator
from tests.unit.native.test_replay import fake  # noqa: F401  # pyright: ignore[reportUnusedImport]  # a fixture

pytestmark = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))


@pytest.fixture
def native(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """A device that replays natively, as the emulated one does with functions of C."""
    if device.type == "emu":
        request.getfixturevalue("fake")
    return device


class Training:
    """A perceptron that is trained by a jitted step, and one that is trained in eager."""

    def __init__(self, device: torch.device, *, clears: bool = True, momentum: float = 0.9) -> None:
        self.device = device
        self.nets, self.steps = [], []
        for _ in range(2):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=momentum)
            self.nets.append(net)
            self.steps.append(self._step(net, optimizer, clears))
        self.steps[0] = pygraph.jit(self.steps[0])

    @staticmethod
    def _step(net: nn.Module, optimizer: torch.optim.Optimizer, clears: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            if clears:
                optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self.nets[0].parameters())

    def run(self, times: int = 1) -> None:
        """Take steps, which must be as in eager."""
        for _ in range(times):
            x = torch.randn(5, 4).to(self.device)
            torch.testing.assert_close(self.steps[0](x), self.steps[1](x))
        for got, expected in zip(self.parameters, self.nets[1].parameters(), strict=True):
            torch.testing.assert_close(got, expected)

    def check_gradients(self) -> None:
        for got, expected in zip(self.parameters, self.nets[1].parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)

    def count(self, name: str) -> int:
        """A count of all native replays: ``hits`` or ``patches``."""
        made = [made for engine in self.steps[0].engine.family() for made in engine.cache.native._made]
        return sum(getattr(one.plan, name) for one in made if one.plan.way == "replay")


@pytest.fixture
def training(native: torch.device) -> Iterator[Training]:
    made = Training(native)
    made.run(6)
    hits = made.count("hits")
    assert hits
    yield made
    assert made.count("hits") > hits


def allocations(device: torch.device, run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the device's allocator is asked for memory while a function runs."""
    if device.type == "cuda":
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        run()
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before
    sizes: list[int] = []
    with monkeypatch.context() as patches:
        original = Allocator.allocate
        patches.setattr(
            Allocator, "allocate", lambda self, nbytes, **own: sizes.append(nbytes) or original(self, nbytes, **own)
        )
        run()
    return len(sizes)


def test_memory_stays(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step allocates its loss alone, and sends no node for a gradient."""
    x = torch.randn(5, 4).to(training.device)
    training.steps[0](x)
    patches, losses = training.count("patches"), []
    count = allocations(training.device, lambda: losses.extend(training.steps[0](x) for _ in range(3)), monkeypatch)
    assert count == 3
    assert training.count("patches") - patches <= 3
    for _ in range(4):
        training.steps[1](x)
    training.run()
    training.check_gradients()


def held(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def view(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.view(-1)


def storage(gradient: torch.Tensor) -> torch.UntypedStorage:
    return gradient.untyped_storage()


def values(kept: Any) -> list[float]:
    return kept.tolist() if isinstance(kept, torch.UntypedStorage) else kept.flatten().tolist()


@pytest.mark.parametrize("keep", [held, view, storage], ids=["tensor", "view", "storage"])
def test_what_somebody_holds_stays_as_it_is(training: Training, keep: Callable[[torch.Tensor], Any]) -> None:
    kept = [keep(parameter.grad) for parameter in training.parameters]  # pyright: ignore
    before = [values(one) for one in kept]
    training.run(3)
    assert [values(one) for one in kept] == before
    training.check_gradients()
    del kept
    training.run(3)
    training.check_gradients()


def test_gradients_are_other_objects_than_before(training: Training) -> None:
    """As in eager, where a step that clears them makes new ones."""
    gradients = [parameter.grad for parameter in training.parameters]
    training.run()
    assert all(p.grad is not before for p, before in zip(training.parameters, gradients, strict=True))
    assert all(p.grad is p.grad for p in training.parameters)


def test_what_was_added_to_a_gradient_is_gone_with_it(training: Training) -> None:
    for parameter in training.parameters:
        parameter.grad.is_mine = True  # pyright: ignore
        parameter.grad.requires_grad_()  # pyright: ignore
    training.run()
    for parameter in training.parameters:
        assert parameter.grad is not None
        assert not parameter.grad.requires_grad
        assert not hasattr(parameter.grad, "is_mine")
    training.run()


def test_gradients_of_the_callers(training: Training) -> None:
    """Cleared outside, replaced, and made by a backward in between."""
    for net in training.nets:
        net.zero_grad()
    training.run(2)
    mine = [torch.ones_like(parameter) for parameter in training.parameters]
    for parameter, gradient in zip(training.parameters, mine, strict=True):
        parameter.grad = gradient
    training.run(2)
    assert all(gradient.eq(1).all() for gradient in mine)
    for net in training.nets:
        net(torch.ones(2, 4).to(training.device)).sum().backward()
    training.run(2)
    training.check_gradients()


def test_one_tensor_as_the_gradient_of_two(training: Training) -> None:
    first, second = training.parameters[0], training.parameters[2]
    shared = torch.zeros(8, 8).to(training.device)
    first.grad, second.grad = shared[:, :4], shared[:3]
    training.run(2)
    assert not shared.any()
    training.check_gradients()


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_that_come_together(native: torch.device, steps: int) -> None:
    """A step that reads those of the last one writes to them, as in eager."""
    training = Training(native, clears=False)
    training.run(6)
    assert training.count("hits")
    gradients = [parameter.grad for parameter in training.parameters]
    training.run(steps)
    assert all(p.grad is before for p, before in zip(training.parameters, gradients, strict=True))
    training.check_gradients()
    for net in training.nets:
        net.zero_grad(set_to_none=False)
    training.run(2)
    training.check_gradients()


def test_another_class_of_gradients(training: Training) -> None:
    class Mine(torch.Tensor):
        pass

    for parameter in training.parameters:
        parameter.grad = parameter.grad.as_subclass(Mine)  # pyright: ignore
    training.run()
    assert all(type(parameter.grad) is torch.Tensor for parameter in training.parameters)
    training.run(2)


def test_steps_of_two_threads(training: Training) -> None:
    """They take turns, and each finds the gradients of the one before."""
    x = torch.randn(5, 4).to(training.device)
    errors: list[BaseException] = []

    def steps() -> None:
        try:
            for _ in range(20):
                training.steps[0](x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for _ in range(40):
        training.steps[1](x)
    training.run()
    training.check_gradients()


def test_a_replay_that_is_refused(fake: Any) -> None:  # noqa: F811
    """As in a step that fails in eager, there are no gradients then, and the next step makes them."""
    training = Training(torch.device("emu"))
    training.run(6)
    fake.refuse = "launch"
    with pytest.raises(RuntimeError, match="could not be launched"):
        training.steps[0](torch.ones(5, 4).to(training.device))
    assert all(parameter.grad is None for parameter in training.parameters)
    fake.refuse = None
    training.run(3)
    training.check_gradients()
