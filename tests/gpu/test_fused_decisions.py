"""Functions that decide by values on the device, with fused kernels: nothing of another way to go has happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from tests.steps import scaled_step_of
from tests.unit.calls.test_deciding import SIGNS, after_draws, after_updates, by_both, by_truth, of_what_it_updates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Inductor's, which differ between versions
]


def protected(x: Tensor) -> Tensor:
    """Whose positions are right only where it asks whether they are."""
    positions = (x.cumsum(0) * 2).long()
    y = (x.sin() + 1) * x
    if (positions < 9).all() and (positions >= 0).all():
        y = (y[positions % 4] * torch.arange(9.0, device=x.device)[positions]).cos() + y
    return (y * 2).exp() + x


@pytest.mark.parametrize(
    "fn", [by_truth, by_both, after_draws, after_updates, of_what_it_updates, protected], ids=lambda fn: fn.__name__
)
def test_calls_go_where_eager_goes(fn: Callable[[Tensor], Any]) -> None:
    fast = pygraph.jit(fn, fuse=True)
    found: list[list[Any]] = []
    for call in (fn, fast):
        torch.manual_seed(1)
        found.append([])
        for value in SIGNS:
            x = torch.full((4,), float(value), device="cuda")
            found[-1].append((call(x), x, torch.rand(2, device="cuda")))
    torch.testing.assert_close(found[1], found[0])
    assert fast.cache_info().hits >= 6, str(fast.explain())


class Net(nn.Module):
    """With running statistics, which are updated before a step decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-2, capturable=True),
}


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_scaler_skips_steps(optimizer: str, clips: bool) -> None:
    def make() -> tuple[nn.Module, Any, Callable[[Tensor, Tensor], Tensor]]:
        torch.manual_seed(0)
        net = Net().cuda()
        optimizing = OPTIMIZERS[optimizer](net.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.float16):
                return F.cross_entropy(net(x), y)

        return net, scaler, scaled_step_of(net, optimizing, scaler, loss_of, 1.0 if clips else None)

    eager, eager_scaler, slow = make()
    fused, fused_scaler, step = make()
    fast = pygraph.jit(step, fuse=True)
    for index in range(16):
        x, y = torch.randn(8, 16, device="cuda"), torch.randint(0, 4, (8,), device="cuda")
        if index in (7, 11):
            x[0, 0] = torch.inf  # gradients overflow, and the step is skipped
        torch.testing.assert_close(fast(x, y), slow(x, y), rtol=2e-2, atol=2e-2, equal_nan=True)
        assert fused_scaler.get_scale() == eager_scaler.get_scale()
        if index in (7, 11):  # statistics are spoilt in both
            for net in (eager, fused):
                net.layers[1].reset_running_stats()  # pyright: ignore
    for got, expected in zip(fused.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert fast.cache_info().hits >= 8, str(fast.explain())
