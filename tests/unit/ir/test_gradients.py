"""A Program computes values: a call that would drop a gradient raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import pygraph
from pygraph.errors import ArgumentError

FORMS: dict[str, Callable[..., Any]] = {
    "program": lambda fn, *args: pygraph.trace(fn)(*args),
    "evaluate": lambda fn, *args: functools.partial(pygraph.evaluate, pygraph.trace(fn)(*args)),
    "lowered": lambda fn, *args: pygraph.jit(fn).lower(*args).program,
    "compiled": lambda fn, *args: pygraph.jit(fn).lower(*args).compile(),
    "compiled without graphs": lambda fn, *args: pygraph.devicify(fn).lower(*args).compile(),
    "jitted program": lambda fn, *args: pygraph.jit(pygraph.trace(fn)(*args)),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(3.0, device=device)


@every_form
def test_an_argument_that_requires_grad_only_now(form: Any, x: torch.Tensor) -> None:
    called = form(lambda x, rest: x * rest["w"], x, {"w": x + 1})
    w = x.clone().requires_grad_()
    with pytest.raises(ArgumentError, match=r"args\[1\]\['w'\] requires grad.*Call it under torch.no_grad"):
        called(x, {"w": w})
    assert torch.equal(called(x, {"w": x + 1}), x * (x + 1))
    with torch.no_grad():
        assert torch.equal(called(x, {"w": w}), x * x)
    with torch.inference_mode():
        assert torch.equal(called(x, {"w": w}), x * x)


@every_form
def test_parameters_of_what_was_traced_under_no_grad(form: Any, x: torch.Tensor) -> None:
    model = torch.nn.Linear(3, 2).to(x.device)
    with torch.no_grad():
        called = form(model, x)
        assert torch.equal(called(x), model(x))
    with pytest.raises(ArgumentError, match=r"weight requires grad.*expected gradients off, as when it was traced"):
        called(x)
    model.requires_grad_(False)
    if not isinstance(called, pygraph.Compiled):  # which finds that another thing is read
        assert torch.equal(called(x), model(x))


@every_form
def test_gradients_that_are_taken_inside(form: Any, x: torch.Tensor) -> None:
    model = torch.nn.Linear(3, 1).to(x.device)

    def fn(w: torch.Tensor) -> Any:
        return torch.autograd.grad(model(w).exp().sum(), [w, model.weight])

    w = x.clone().requires_grad_()
    called = form(fn, w)
    torch.testing.assert_close(called(w), fn(w))


@every_form
def test_detached_inside(form: Any, x: torch.Tensor) -> None:
    w = x.clone().requires_grad_()
    called = form(lambda w: w.detach() * 2, w)
    assert torch.equal(called(w), w.detach() * 2)


@every_form
def test_a_view_drops_gradients_too(form: Any, x: torch.Tensor) -> None:
    called = form(lambda x: x[1:], x)
    with pytest.raises(ArgumentError, match=r"args\[0\] requires grad"):
        called(x.clone().requires_grad_())


@every_form
def test_results_that_cannot_have_gradients(form: Any, x: torch.Tensor) -> None:
    w = x.clone().requires_grad_()
    called = form(lambda x: (x.argmax(), x > 1), x)
    assert [one.tolist() for one in called(w)] == [2, [False, False, True]]
    itself = form(lambda x: x, x)
    assert itself(w) is w


@every_form
def test_an_updated_argument_would_have_a_gradient(form: Any, x: torch.Tensor) -> None:
    called = form(lambda x, y: x.add_(y).argmax(), x, x.clone())
    before = x.clone()
    with pytest.raises(ArgumentError, match=r"args\[1\] requires grad"):
        called(x, x.clone().requires_grad_())
    assert torch.equal(x, before)


@pytest.mark.parametrize("form", [form for name, form in FORMS.items() if name != "jitted program"])
def test_tensors_of_transforms(form: Any, x: torch.Tensor) -> None:
    called = form(lambda x: x * 2, x)
    calls = [
        lambda: torch.func.grad(lambda x: called(x).sum())(x),
        lambda: torch.func.vmap(called)(torch.stack([x, x])),
        lambda: torch.func.jvp(called, (x,), (x,)),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match=r"args\[0\] is one of a transform of torch.func"):
            call()
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="has a tangent"):
        called(forward_ad.make_dual(x, x))
    others = torch.func.vmap(lambda y: called(x) + y)(torch.stack([x, x]))  # of which it is passed none
    assert torch.equal(others, torch.stack([x * 3, x * 3]))


def test_a_check_of_a_transform_is_of_values(x: torch.Tensor) -> None:
    w = x.clone().requires_grad_()
    program = pygraph.trace(lambda x: x * 2)(x)
    assert pygraph.check_transform(pygraph.devicify, program, w).history == ("trace", "devicify")
