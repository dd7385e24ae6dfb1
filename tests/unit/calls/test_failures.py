"""Operations that fail by their data, whose error the caller catches: what the call has done until then is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": torch.linalg.cholesky,
    "inv": lambda m: torch.linalg.inv(m * (m > 0)),
    "svd on the host": lambda m: torch.linalg.svd(m.cpu() / (m.cpu().sum() > 0))[1],
    "draw on the host": lambda m: torch.multinomial(m.cpu().diagonal(), 1),
    "index on the host": lambda m: torch.arange(3)[(m.cpu().diagonal() < 0).long() * 5],
    "nothing": lambda m: m,
}


class Trainer:
    """Steps that leave much behind before something in them may fail."""

    def __init__(self, operation: Callable[[Tensor], Tensor], device: torch.device) -> None:
        torch.manual_seed(0)
        self.operation, self.net = operation, nn.Linear(3, 3).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.calls = self.later = 0
        self.log: list[Tensor] = []
        self.last: Tensor | None = None
        self.mean = torch.zeros(3, device=device)

    def count(self, x: Tensor, m: Tensor) -> Any:
        """Count, and then compute."""
        self.calls += 1
        found = self.operation(m)
        self.later += 1
        return found.sum() + x.sum().cpu().to(found.device)

    def train(self, x: Tensor, m: Tensor) -> Any:
        """A step of training; the operation may fail between the backward and the update."""
        self.optimizer.zero_grad()
        loss = self.net(x).pow(2).mean()
        loss.backward()
        self.calls += 1
        self.mean.mul_(0.9).add_(x.mean(0))
        found = self.operation(m)
        self.optimizer.step()
        self.mean.add_(1)
        self.later += 1
        return found.sum(), loss.detach()

    def store(self, x: Tensor, m: Tensor) -> Any:
        """Store things in lists and attributes."""
        self.last = x * 2
        self.log.append(x.sum())
        found = self.operation(m)
        self.log.append(x.mean())
        return found.sum()

    def draw(self, x: Tensor, m: Tensor) -> Any:
        """Draw random numbers before and after."""
        self.last = torch.rand_like(x)
        found = self.operation(m)
        self.calls += 1
        return found.sum(), torch.rand_like(x)

    def forward(self, x: Tensor, m: Tensor) -> Any:
        """Compute what is differentiated outside."""
        self.calls += 1
        found = self.operation(m).sum().to(x.device)
        self.later += 1
        return self.net(x).sum() * found

    def update(self, x: Tensor, m: Tensor) -> Any:
        """Update in place what the operation takes."""
        self.mean.mul_(0.5).add_(1)
        found = self.operation(m * self.mean)
        self.mean.mul_(3)
        self.calls += 1
        return found.sum() + x.sum().cpu().to(found.device)

    def decide(self, x: Tensor, m: Tensor) -> Any:
        """Decide by a value before."""
        self.calls += 1 if x.sum() > 0 else 2
        found = self.operation(m)
        self.later += 1
        return found.sum()

    def state(self) -> list[Any]:
        """All that calls change."""
        gradients = [one.grad for one in self.net.parameters()]
        found = [self.calls, self.later, self.log, self.last, self.mean, gradients, self.net.state_dict()]
        return [*found, torch.rand(2, device=self.mean.device)]


@pytest.mark.parametrize("way", ["count", "train", "store", "draw", "forward", "decide", "update"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_as_in_eager(device: torch.device, name: str, way: str) -> None:
    operation = OPERATIONS[name]
    expected, found = Trainer(operation, device), Trainer(operation, device)
    fast = pygraph.jit(getattr(found, way))

    def run(call: Callable[..., Any], number: int) -> Any:
        torch.manual_seed(number)
        sign = -1.0 if number in (4, 5, 8) else 1.0
        x = torch.full((2, 3), number + 1.0, device=device)
        try:
            result = call(x, torch.eye(3, device=device) * sign)
        except (RuntimeError, IndexError) as error:
            return type(error)
        if way == "forward":
            result.backward()
            return result.detach()
        return result

    for number in range(10):
        of_fast = run(fast, number), found.state()
        of_eager = run(getattr(expected, way), number), expected.state()
        assert isinstance(of_fast[0], type) == isinstance(of_eager[0], type)
        if isinstance(of_eager[0], type):
            assert of_fast[0] is of_eager[0]
        else:
            torch.testing.assert_close(of_fast[0], of_eager[0])
        torch.testing.assert_close(of_fast[1], of_eager[1])


def test_steps_that_may_fail_are_graphs(device: torch.device) -> None:
    found = Trainer(torch.linalg.cholesky, device)
    fast = pygraph.jit(found.train)
    for _ in range(6):
        fast(torch.ones(2, 3, device=device), torch.eye(3, device=device))
    assert fast.cache_info().hits >= 3
    assert found.calls == 6
