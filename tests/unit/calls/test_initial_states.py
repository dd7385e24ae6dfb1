"""The states of random generators before a call: looked for where replays may draw from them, and not at every call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pygraph
from pygraph.calls import initial_states


class Batch(dict[str, Tensor]):
    """A batch that is one object for calls."""


class Taken(dict[str, Tensor]):
    """A batch that is a container for calls, as a TensorDict."""


pytree.register_pytree_node(
    Taken,
    lambda batch: (list(batch.values()), list(batch)),
    lambda values, keys: Taken(zip(keys, values, strict=True)),
)


class Head(nn.Module):
    """The end of a policy, which keeps the distribution from which it has drawn."""

    def __init__(self, *, validates: bool) -> None:
        super().__init__()
        self.validates = validates
        self.scale = nn.Parameter(torch.ones(2))
        self.distribution: Any = None

    def forward(self, mean: Tensor) -> Tensor:
        self.distribution = torch.distributions.Normal(mean, self.scale.expand_as(mean), self.validates)
        return self.distribution.sample()


class Policy(nn.Module):
    """A policy that notes something in its batch."""

    def __init__(self, *, validates: bool) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(5, 2), Head(validates=validates)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        batch["seen"] = batch["policy"]
        return self.head(self.net(batch["policy"]))


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("kind", [Batch, Taken])
def test_calls_that_run_as_they_are_do_not_look_for_generators(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: Any, validates: bool
) -> None:
    looked: list[int] = []
    generators_of = initial_states.generators_of

    def counted(environment: Any) -> Any:
        looked[-1] += 1
        return generators_of(environment)

    monkeypatch.setattr(initial_states, "generators_of", counted)
    ours = Policy(validates=validates).to(device)
    eagers = copy.deepcopy(ours)
    fast = pygraph.jit(ours)
    for number in range(16):
        looked.append(0)
        x = torch.randn(3, 5, device=device)
        samples: list[Tensor] = []
        for policy, call in ((ours, fast), (eagers, eagers)):
            torch.manual_seed(number)
            batch = kind(policy=x)
            samples.append(call(batch))
            assert batch["seen"] is x
            policy.head.distribution.log_prob(samples[-1]).sum().backward()
        torch.testing.assert_close(*samples)
    for one, other in zip(ours.parameters(), eagers.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert not any(looked[10:])
