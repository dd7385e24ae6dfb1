"""What an error leaves that an operation between graphs raises in the middle of a call: what eager leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph


@torch.library.custom_op("test_errors::checked", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def checked(x: Tensor) -> Tensor:
    if float(x.sum()) < 0:
        raise ValueError("negative")
    return x * 2


@checked.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class State(nn.Module):
    """Two buffers that change before and after an operation that fails for some arguments.

    Args:
        fail: The operation.
        before: What happens before it.
        after: What happens after it, given its result.
    """

    def __init__(self, fail: Callable[..., Tensor], before: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", torch.ones(3))
        self._fail, self._before, self._after = fail, before, after

    def forward(self, x: Tensor) -> Tensor:
        self._before(self, x)
        y = self._fail(x)
        self._after(self, y)
        return y.sum() + self.a + self.b


FAILING: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": torch.linalg.cholesky,
    "inverse": torch.linalg.inv,
    "custom operation": checked,
    "number in range": lambda x: x.select(0, x[0, 0].long().item() + 1),  # pyright: ignore
}
UPDATES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "before": (lambda m, x: m.a.add_(1), lambda m, y: None),
    "after": (lambda m, x: None, lambda m, y: m.a.add_(1)),
    "both": (lambda m, x: m.a.add_(1), lambda m, y: m.a.mul_(2)),
    "result": (lambda m, x: m.a.add_(1), lambda m, y: m.b.add_(y.sum())),
    "copies": (lambda m, x: m.a.copy_(m.b + 1), lambda m, y: m.b.copy_(m.a * 2)),
    "part": (lambda m, x: m.a[1:].add_(1), lambda m, y: m.b[0].sub_(m.a[1])),
    "drawn": (lambda m, x: m.a.add_(torch.rand_like(m.a)), lambda m, y: m.b.add_(torch.rand_like(m.b))),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("stack", [pygraph.jit, pygraph.graphify], ids=["jit", "graphify"])
def test_updates_before_an_error_are_done_and_no_others(
    device: torch.device, stack: Callable[[Any], Any], failing: str, update: str
) -> None:
    good = torch.eye(3, device=device)
    bad = {"cholesky": -good, "inverse": good * 0, "custom operation": -good, "number in range": good * 5}[failing]
    results: list[list[Tensor]] = []
    for transform in (lambda fn: fn, stack):
        torch.manual_seed(0)
        model = State(FAILING[failing], *UPDATES[update]).to(device)
        fast = transform(model)
        found: list[Tensor] = []
        for x in (good, good, bad, good, bad, bad, good):
            if x is bad:
                with pytest.raises((RuntimeError, ValueError, IndexError)):
                    fast(x)
            else:
                found.append(fast(x))
            found += [model.a.clone(), model.b.clone(), torch.rand(2, device=device), torch.rand(2)]
        results.append(found)
    assert fast.cache_info().captures > 0
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


CHECKED: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "check": (lambda x, k: torch._check(k < 3) or x * k, (0, 2, -1), (3, 9)),
    "narrow": (lambda x, k: x.narrow(0, k, 2), (0, 1, 2, -2, -4), (3, 4, 9, -1, -9)),
    "written": (lambda x, k: x.clone().narrow(0, k, 1).fill_(7), (0, 3, -1), (4, -5)),
    "not negative": (lambda x, k: torch._check(k >= 0) or x * k, (0, 3), (-1, -2)),
    "equal": (lambda x, k: torch._check(k == 3) or x * k, (3,), (4, -1)),
    "size that is worked out": (lambda x, k: x.reshape(k, 3), (4, -1), (5, 2)),
    "expanded": (lambda x, k: x.expand(k, 3), (4, -1), (5, 1)),
    "taken apart": (lambda x, k: x.flatten().unflatten(0, (k, 3)), (4, -1), (5, 2)),
    "select": (lambda x, k: x.select(0, k), (0, 3, -4), (4, -5)),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_number_that_eager_refuses_is_refused(device: torch.device, name: str) -> None:
    """Torch notes what code checks of a number that a trace does not know, and goes on."""
    check, good, bad = CHECKED[name]

    def function(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return check(x * 2 + 1, k.item()), x.sigmoid()

    fast = pygraph.jit(function)
    x = torch.arange(12.0, device=device).view(4, 3) - 5
    for number in (*good, *bad, *good):
        k = torch.tensor(number, device=device)
        if number in bad:
            for run in (function, fast):
                with pytest.raises((RuntimeError, IndexError)):
                    run(x, k)
        else:
            torch.testing.assert_close(fast(x, k), function(x, k))
    assert fast.cache_info().captures > 0


def test_an_operation_that_fails_when_it_is_recorded(device: torch.device) -> None:
    """Its description takes the dtypes that the kernel refuses: what comes before it is done, as in eager."""
    count, weight = torch.zeros(1, device=device), torch.ones(4, 4, 2, device=device)

    @pygraph.jit
    def step(x: Tensor) -> Tensor:
        count.add_(1)
        return torch.nn.functional.conv_transpose1d(x.half(), weight)

    for number in range(4):
        with pytest.raises(RuntimeError, match="type"):
            step(torch.ones(1, 4, 3, device=device))
        assert count.item() == number + 1
    assert step.cache_info().hits >= 2
    strict = pygraph.jit(step.fn, strict=True)
    with pytest.raises(RuntimeError, match="type"):
        strict(torch.ones(1, 4, 3, device=device))
