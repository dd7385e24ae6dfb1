"""Steps that update tensors which lie in one storage, as the weights of a recurrent layer do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pygraph
from tests.steps import assert_same, step_of


def in_one_buffer(net: nn.Module, step: int = 0) -> nn.Module:
    """The net with its parameters behind each other in one storage, each ``step`` elements early."""
    parameters = list(net.parameters())
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
    offset = 0
    for parameter in parameters:
        view = buffer[offset : offset + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
        offset += parameter.numel() - step
    return net


def net_on(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)


def train(
    device: torch.device, step: int, foreach: bool, transform: Callable[..., Callable[..., Tensor]]
) -> list[object]:
    net = in_one_buffer(net_on(device), step)
    fn = transform(step_of(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=foreach)))
    torch.manual_seed(1)
    found: list[object] = [
        fn(torch.randn(6, 4, device=device), torch.randint(0, 3, (6,), device=device)) for _ in range(6)
    ]
    assert len({parameter.untyped_storage().data_ptr() for parameter in net.parameters()}) == 1
    return [*found, copy.deepcopy(net.state_dict())]


@pytest.mark.parametrize(
    ("step", "foreach"),
    [(0, False), (0, True), (1, False)],  # where they overlap, an update of all at once is a race on CUDA, in eager too
    ids=["behind each other", "behind each other, all at once", "overlapping"],
)
def test_parameters_in_one_storage(device: torch.device, step: int, foreach: bool) -> None:
    expected = train(device, step, foreach, lambda fn: fn)
    made: list[pygraph.Transformed] = []

    def jit(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        made.append(pygraph.jit(fn))
        return made[0]

    assert_same(train(device, step, foreach, jit), expected, device)
    report = " ".join(str(made[0].explain()).split())
    if step:
        assert "share memory, and one is written" in report
    else:
        assert "share memory" not in report
        assert "no fallbacks" in report
        assert made[0].cache_info().hits >= 4


def test_views_beyond_a_tensor(device: torch.device) -> None:
    """Which would be other memory in a graph, if a tensor behind it is written."""
    buffer = torch.arange(8.0, device=device)
    first, second = buffer[:4], buffer[4:]

    def fn() -> Tensor:
        before = first.as_strided((8,), (1,)).sum()
        second.add_(1)
        return before + first.as_strided((8,), (1,)).sum()

    fast = pygraph.jit(fn)
    for call in range(4):
        assert fast().item() == 2 * (28 + 4 * call) + 4
    assert "share memory" in str(fast.explain())
