"""Autograd's state of tensors: versions, `requires_grad`, tangents, inference tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import pygraph


def warm(fn: Callable[..., Any], *makes: Callable[[], Any]) -> Any:
    """A transformed function that has been called a few times under no_grad."""
    function = pygraph.jit(fn)
    with torch.no_grad():
        for _ in range(4):
            function(*(make() for make in makes))
    return function


UPDATES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda x: x.mul_(2),
    "a view of it": lambda x: x[1:].add_(1),
    "and a result": lambda x: (x.exp(), x.add_(1))[0],
    "partly by the host": lambda x: (x.add_(1), float(x.sum()), x.mul_(2))[0],
}


@pytest.mark.parametrize("name", UPDATES)
def test_autograd_notices_that_a_saved_argument_was_updated(device: torch.device, name: str, native: bool) -> None:
    function = warm(UPDATES[name], lambda: torch.ones(4, device=device))
    for update in (UPDATES[name], function):
        a = torch.ones(4, device=device, requires_grad=True)
        b = torch.full((4,), 3.0, device=device)
        loss = (a * b).sum()
        with torch.no_grad():
            update(b)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_autograd_notices_that_a_saved_captured_tensor_was_updated(device: torch.device, native: bool) -> None:
    state = torch.ones(4, device=device)
    function = warm(lambda x: state.add_(x) * 2, lambda: torch.ones(4, device=device))
    a = torch.ones(4, device=device, requires_grad=True)
    loss = (a * state).sum()
    with torch.no_grad():
        function(torch.ones(4, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_only_read_keeps_its_version(device: torch.device, native: bool) -> None:
    weight = torch.ones(4, device=device)
    function = warm(lambda x: x * weight, lambda: torch.ones(4, device=device))
    x = torch.ones(4, device=device)
    before = x._version, weight._version
    with torch.no_grad():
        function(x)
    assert (x._version, weight._version) == before


@pytest.mark.parametrize("calls", [1, 4])
def test_running_statistics_move_no_version_as_in_eager(device: torch.device, calls: int, native: bool) -> None:
    for transform in (lambda module: module, pygraph.jit):  # type: ignore[no-any-return]
        norm = torch.nn.BatchNorm1d(2).to(device)
        function: Any = transform(norm)
        loss = norm(torch.randn(4, 2, device=device, requires_grad=True)).square().sum()
        before = norm.running_mean._version  # pyright: ignore
        with torch.no_grad():
            for _ in range(calls):
                function(torch.randn(4, 2, device=device))
        assert norm.running_mean._version == before  # pyright: ignore
        loss.backward()


def gradients_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * 2


ASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "enables gradients": gradients_inside,
    "asks": lambda x: x * 2 if x.requires_grad else x * 3,
}


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("first", [True, False])
def test_who_requires_grad_matters_without_grad_mode(
    device: torch.device, name: str, first: bool, native: bool
) -> None:
    function = warm(ASKS[name], lambda: torch.ones(4, device=device, requires_grad=first))
    x = torch.ones(4, device=device, requires_grad=not first)
    with torch.no_grad():
        for _ in range(3):
            got, expected = function(x), ASKS[name](x)
            assert torch.equal(got, expected)
            assert got.requires_grad == expected.requires_grad


def test_whether_a_parameter_requires_grad_matters_without_grad_mode(device: torch.device, native: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    fn = lambda x: x * weight if weight.requires_grad else x - weight  # noqa: E731
    x = torch.full((4,), 5.0, device=device)
    function = warm(fn, lambda: x)
    weight.requires_grad_(False)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(function(x), fn(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_tangents_go_through(device: torch.device, native: bool) -> None:
    function = pygraph.jit(torch.sin)
    for _ in range(4):
        function(torch.ones(4, device=device))
    with forward_ad.dual_level():
        for _ in range(2):
            dual = forward_ad.make_dual(torch.ones(4, device=device), torch.ones(4, device=device))
            tangent = forward_ad.unpack_dual(function(dual)).tangent
            assert tangent is not None
            torch.testing.assert_close(tangent, torch.cos(torch.ones(4, device=device)))
    assert torch.equal(function(torch.ones(4, device=device)), torch.sin(torch.ones(4, device=device)))


def test_an_inference_tensor_is_not_updated_outside_inference_mode(device: torch.device, native: bool) -> None:
    function = warm(lambda x: x.add_(1), lambda: torch.ones(4, device=device))
    for _ in range(2):
        with torch.inference_mode():
            x = torch.ones(4, device=device)
        with torch.no_grad(), pytest.raises(RuntimeError, match="inference"):
            function(x)
    with torch.inference_mode():
        x = torch.ones(4, device=device)
        assert torch.equal(function(x), torch.full((4,), 2.0, device=device))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_memory_of_their_own_run_as_they_are(device: torch.device) -> None:
    function = pygraph.jit(lambda x: x * 2)
    assert function(torch.ones(2, device="meta")).is_meta
    zeros = torch._efficientzerotensor((2,), device="cpu")  # pyright: ignore
    assert torch.equal(function(zeros), torch.zeros(2))
    nested = function(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided))
    assert [part.tolist() for part in nested.unbind()] == [[2.0] * 2, [2.0] * 3]
    reasons = str(function.explain().to_dict()["fallbacks"])
    for reason in ("on the meta device", "a tensor of zeros", "a nested tensor"):
        assert reason in reasons


@pytest.mark.parametrize("calls", [1, 4])
def test_a_detached_argument_does_not_require_grad(device: torch.device, calls: int, native: bool) -> None:
    weight = torch.ones(4, device=device, requires_grad=True)
    fn = lambda x: (x.detach(), x.detach()[1:], weight.detach(), x + 1)  # noqa: E731
    function = pygraph.jit(fn)
    with torch.no_grad():
        for _ in range(calls):
            x = torch.ones(4, device=device, requires_grad=True)
            got, expected = function(x), fn(x)
    for mine, other in zip(got, expected, strict=True):
        assert (mine.requires_grad, mine.is_leaf) == (other.requires_grad, other.is_leaf)
    assert got[0].data_ptr() == x.data_ptr()
    assert got[2].data_ptr() == weight.data_ptr()
