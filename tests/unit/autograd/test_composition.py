"""Transforms and autograd around a jitted function: eager's results, from compiled functions that are found again."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)  # fmt: skip
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import pygraph
from tests import extent
from tests.unit.interop.common import counted

Function = Callable[..., Any]
Transform = Callable[[Function], Any]
Make = Callable[[Transform, torch.device], Callable[[], Any]]


class Tensors:
    """Inputs in double precision, equal for every call."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(7)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.double, generator=generator).to(device)

        self.x, self.w, self.rows, self.weights = made(3), made(3), made(5, 3), made(2, 3)

    def leaf(self) -> torch.Tensor:
        return self.x.clone().requires_grad_()


def assert_same(got: Any, wanted: Any) -> None:
    found, structure = pytree.tree_flatten(got)
    expected, expected_structure = pytree.tree_flatten(wanted)
    assert structure == expected_structure
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)
            assert a.requires_grad == b.requires_grad
        else:
            assert a == b


CALLS = 6
"""The later ones under autograd run natively."""


def run(make: Make, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Any]]:
    """Compare calls with eager; the number of traces in each, and the functions that were transformed."""
    made: list[Any] = []

    def jit(fn: Function) -> Any:
        made.append(pygraph.jit(fn))
        return made[-1]

    fast, eager = make(jit, device), make(lambda fn: fn, device)
    traces: list[int] = []
    for call in range(CALLS):
        torch.manual_seed(call)
        with counted(monkeypatch, device) as work:
            got = fast()
        traces.append(work.traces)
        torch.manual_seed(call)
        assert_same(got, eager())
    return traces, made


def of(fn: Function, use: Callable[[Function, Tensors], Any]) -> Make:
    """A case: ``use`` calls the function, transformed once."""

    def make(jit: Transform, device: torch.device) -> Callable[[], Any]:
        function, tensors = jit(fn), Tensors(device)
        return lambda: use(function, tensors)

    return make


def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.sum()


def power(x: torch.Tensor) -> torch.Tensor:
    return (x**5).sum()


def drop(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x * x, 0.5, True)


def backward(fn: Function, tensors: Tensors) -> Any:
    leaf = tensors.leaf()
    result = fn(leaf)
    result.sum().backward()
    return result, leaf.grad


class Constant(torch.autograd.Function):
    """Its gradient is the same for every cotangent."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.full((3,), 7.0, dtype=gradient.dtype, device=gradient.device)


class Straight(torch.autograd.Function):
    """Rounds; its gradient is seven times that of the result."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 7

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return Straight.apply(x), in_dims[0]


def without_history(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        total = x.sum()
    return (x * total).sum() + (x.detach() * x**3).sum()


def double_backward(fn: Function, tensors: Tensors) -> Any:
    leaf = tensors.leaf()
    (first,) = torch.autograd.grad(fn(leaf).sum(), leaf, create_graph=True)
    ((first.norm() - 1) ** 2).backward()
    return first, leaf.grad


def constant_gradients(fn: Function, tensors: Tensors) -> Any:
    leaf = tensors.leaf()
    (first,) = torch.autograd.grad(fn(leaf).sum(), leaf, create_graph=True)
    second = torch.autograd.grad((first * leaf).sum(), leaf)
    rows = torch.autograd.grad(
        fn(leaf), leaf, torch.eye(3, dtype=leaf.dtype, device=leaf.device), is_grads_batched=True
    )
    return first.detach(), second, rows


def dual(fn: Function, tensors: Tensors) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(fn(forward_ad.make_dual(tensors.x, tensors.w))))


def hooks(fn: Function, tensors: Tensors) -> Any:
    leaf, seen = tensors.leaf(), []
    leaf.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    result = fn(leaf)
    result.register_hook(lambda gradient: gradient * 3)
    result.sum().backward()
    return leaf.grad, seen


def checkpointed(fn: Function, tensors: Tensors) -> Any:
    leaf = tensors.leaf()
    for reentrant in (True, False):
        checkpoint(fn, leaf, use_reentrant=reentrant).sum().backward()
    return leaf.grad


def twice_backward(fn: Function, tensors: Tensors) -> Any:
    leaf = tensors.leaf()
    result = fn(leaf)
    result.sum().backward(retain_graph=True)
    result.sum().backward()
    return leaf.grad


def aliases(fn: Function, tensors: Tensors) -> Any:
    leaf = tensors.leaf()
    same, doubled, part = fn(leaf, tensors.w)
    (gradient,) = torch.autograd.grad((same * 3 + doubled).sum() + part.sum(), leaf)
    return same is leaf, doubled, part, part._base is leaf, gradient


def pytrees(fn: Function, tensors: Tensors) -> Any:
    def loss(params: Any) -> torch.Tensor:
        out = fn(params, scale=3.0)
        assert out["n"] == 3
        return out["o"].sum()

    return grad(loss)({"a": tensors.x, "b": [tensors.w]})


CASES: dict[str, Make] = {
    "grad": of(power, lambda f, t: grad(f)(t.x)),
    "vmap": of(wave, lambda f, t: vmap(f)(t.rows)),
    "in_dims": of(lambda x, y: x * y, lambda f, t: vmap(f, (1, None))(t.rows, t.rows[:, 0])),
    "negative in_dims, out_dims": of(wave, lambda f, t: vmap(f, -1, -1)(t.rows)),
    "several out_dims": of(lambda x: (x.sin(), x.sum()), lambda f, t: vmap(f, 0, (1, 0))(t.rows)),
    "chunk_size": of(wave, lambda f, t: vmap(f, chunk_size=2)(t.rows)),
    "vjp": of(lambda x: (x.sin(), x.cos() * 2), lambda f, t: vjp(f, t.x)[1]((t.w, t.x))),
    "jvp": of(lambda x: (x.sin(), x.argmax()), lambda f, t: jvp(f, (t.x,), (t.w,))),
    "jacrev": of(wave, lambda f, t: jacrev(f)(t.x)),
    "jacfwd": of(wave, lambda f, t: jacfwd(f)(t.x)),
    "hessian": of(power, lambda f, t: hessian(f)(t.x)),
    "vmap(hessian)": of(power, lambda f, t: vmap(hessian(f))(t.rows)),
    "jacfwd(jacrev)": of(wave, lambda f, t: jacfwd(jacrev(f))(t.x)),
    "jacrev(jacfwd)": of(wave, lambda f, t: jacrev(jacfwd(f))(t.x)),
    "vmap(grad)": of(power, lambda f, t: vmap(grad(f))(t.rows)),
    "grad(vmap)": of(power, lambda f, t: grad(lambda x: vmap(f)(x).sum())(t.rows)),
    "vmap(jvp)": of(wave, lambda f, t: vmap(lambda x: jvp(f, (x,), (t.w,)))(t.rows)),
    "four deep": of(power, lambda f, t: vmap(vmap(grad(lambda x: grad(f)(x).sum())))(t.rows[None])),
    "grad of grad of grad": of(
        power, lambda f, t: grad(lambda x: grad(lambda x: grad(f)(x).sum())(x).sum())(t.x)
    ),
    "tangent of a pull-back": of(wave, lambda f, t: jvp(vjp(f, t.x)[1], (t.w,), (t.x,))),
    "gradient of a pull-back": of(wave, lambda f, t: grad(lambda c: vjp(f, t.x)[1](c)[0].sum())(t.w)),
    "torch.autograd.grad in grad": of(
        power, lambda f, t: grad(lambda x: torch.autograd.grad(f(x), x, create_graph=True)[0].sum())(t.x)
    ),
    "grad_and_value": of(power, lambda f, t: grad_and_value(f)(t.x)),
    "has_aux": of(
        lambda x: ((x * x).sum(), {"next": x + 1, "which": x.argmax()}), lambda f, t: grad(f, has_aux=True)(t.x)
    ),
    "pytrees": of(lambda p, scale: {"o": (p["a"] * scale).sin() + p["b"][0], "n": 3}, pytrees),
    "live numbers": of(lambda x, k: (x * k).sum(), lambda f, t: [grad(f)(t.x, k) for k in (2.0, 3.0, 4.5)]),
    "integers": of(lambda x, i: x[i].sum(), lambda f, t: grad(f)(t.x, torch.tensor([0, 2]).to(t.x.device))),
    "without history": of(without_history, lambda f, t: (grad(f)(t.x), hessian(f)(t.x))),
    "custom Function": of(lambda x: Straight.apply(x * 2).sum(), lambda f, t: (grad(f)(t.x), vmap(grad(f))(t.rows))),
    "custom Function twice": of(lambda x: (Straight.apply(x) * x).sum(), lambda f, t: jacrev(jacrev(f))(t.x)),
    "backward": of(wave, backward),
    "backward to one tensor that is two arguments": of(
        lambda x, y: x.sin() * y, lambda f, t: backward(lambda x: f(x, x), t)
    ),
    "backward to what is no leaf": of(wave, lambda f, t: backward(lambda x: f(x * 2), t)),
    "backward, draws": of(drop, backward),
    "grad, draws": of(lambda x: drop(x).sum(), lambda f, t: grad(f)(t.x)),
    "jacrev, draws": of(drop, lambda f, t: jacrev(f)(t.x)),
    "vmap, different draws": of(drop, lambda f, t: vmap(f, randomness="different")(t.rows)),
    "vmap, the same draws": of(drop, lambda f, t: vmap(f, randomness="same")(t.rows)),
    "grad(vmap), different draws": of(
        drop, lambda f, t: grad(lambda x: vmap(f, randomness="different")(x).sum())(t.rows)
    ),
    "double backward": of(wave, double_backward),
    "a gradient that depends on nothing": of(Constant.apply, constant_gradients),
    "double backward without history": of(without_history, double_backward),
    "backward twice": of(wave, twice_backward),
    "checkpoint": of(wave, checkpointed),
    "checkpoint inside": of(lambda x: checkpoint(wave, x, use_reentrant=False), backward),
    "hooks": of(wave, hooks),
    "dual numbers": of(wave, dual),
    "tangents without grad mode": of(
        wave, lambda f, t: torch.no_grad()(lambda: (jvp(f, (t.x,), (t.w,)), dual(f, t), jacfwd(f)(t.x)))()
    ),
    "tangents of a leaf without grad mode": of(
        wave, lambda f, t: torch.no_grad()(lambda: (jvp(f, (t.leaf(),), (t.w,)), jacfwd(f)(t.leaf())))()
    ),
    "tangents of a leaf without grad mode inside": of(
        wave, lambda f, t: jvp(lambda x: torch.no_grad()(f)(x), (t.leaf(),), (t.w,))
    ),
    "tangents of a block without history": of(without_history, lambda f, t: (jvp(f, (t.x,), (t.w,)), dual(f, t))),
    "tangents of the same result twice": of(
        lambda x: (lambda y: (y, y))(x.sin()), lambda f, t: (jvp(f, (t.x,), (t.w,)), jacfwd(f)(t.x), jacrev(f)(t.x))
    ),
    "tangents of integers beside": of(
        lambda x: (x.sin(), x.argmax()), lambda f, t: torch.no_grad()(lambda: jvp(f, (t.x,), (t.w,)))()
    ),
    "a batch of gradients": of(wave, lambda f, t: torch.autograd.functional.jacobian(f, t.x, vectorize=True)),
    "autograd's hessian": of(power, lambda f, t: torch.autograd.functional.hessian(f, t.x)),
    "aliases": of(lambda x, y: (x, y * 2 + x, x[1:]), aliases),
    "one result of two": of(
        lambda x: (x.sin(), x.cos()), lambda f, t: (lambda x: torch.autograd.grad(f(x)[1].sum(), x))(t.leaf())
    ),
    "an argument without gradient": of(
        lambda x, y: x.sin(),
        lambda f, t: (lambda x, y: torch.autograd.grad(f(x, y).sum(), (x, y), allow_unused=True))(t.leaf(), t.leaf()),
    ),
    "results without gradient": of(lambda x: (x.sin(), x.detach() * 2, x.argmax()), lambda f, t: f(t.leaf())),
    "an expanded cotangent": of(
        lambda x: x.t().contiguous() * 2, lambda f, t: vjp(f, t.rows)[1](t.w[:, None].expand(3, 5))
    ),
    "an update in place": of(lambda x: x.mul_(2), lambda f, t: (lambda y: (vmap(f)(y), y))(t.rows.clone())),
    "an updated argument": of(
        lambda x, y: (y.add_(1), (x * y).sum())[1],
        lambda f, t: (lambda x, y: (f(x, y).backward(), x.grad, y)[1:])(t.leaf(), t.w.clone()),
    ),
    "another derivative inside": of(
        lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].sum(), backward
    ),
    "vmap inside": of(lambda x: vmap(lambda y: (y * y).sum())(x).sum(), lambda f, t: grad(f)(t.rows)),
}  # fmt: skip


@pytest.mark.parametrize("name", extent.third(list(CASES)))
def test_compiled_and_found_again(device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, made = run(CASES[name], device, monkeypatch)
    assert not any(traces[1:])
    assert sum(function.cache_info().captures for function in made) > 0
    assert all(not function.explain().to_dict()["fallbacks"] for function in made)


# -- what the function closes over ---------------------------------------------------------------------------------


def closure(transform: Callable[[Function], Any], values: str) -> Make:
    """The gradient with respect to what the function finds in a list."""

    def make(jit: Transform, device: torch.device) -> Callable[[], Any]:
        tensors = Tensors(device)
        box: list[Any] = [None]
        function = jit(lambda x: (x * box[0]).sum())

        def loss(value: torch.Tensor) -> torch.Tensor:
            box[0] = value
            return function(tensors.x)

        return lambda: transform(loss)(getattr(tensors, values))

    return make


def parameter(jit: Transform, device: torch.device) -> Callable[[], Any]:
    tensors = Tensors(device)
    weight = tensors.w.clone().requires_grad_()
    function = jit(lambda x: Straight.apply(weight) @ x + (x * weight).sum())

    def call() -> Any:
        weight.grad = None
        function(tensors.x).backward()
        return weight.grad

    return call


def module(build: Callable[[], nn.Module], use: Callable[[Any, Tensors], Any]) -> Make:
    def make(jit: Transform, device: torch.device) -> Callable[[], Any]:
        torch.manual_seed(3)
        model = build().to(torch.double).to(device)
        function, tensors = jit(model), Tensors(device)
        return lambda: use(function, tensors)

    return make


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(3, 6), nn.Unflatten(0, (1, 5)), nn.TransformerEncoder(layer, 2))


def train(model: Any, tensors: Tensors) -> Any:
    model.zero_grad()
    out = model(tensors.rows)
    out.square().sum().backward()
    return out, [p.grad.clone() for p in model.parameters()], [b.clone() for b in model.buffers()]


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def functional_gradient(model: Any, tensors: Tensors) -> Any:
    return grad(lambda p: functional_call(model, p, (tensors.rows,)).square().sum())(parameters(model))


def per_sample(model: Any, tensors: Tensors) -> Any:
    def loss(params: Any, row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, params, (row,)).square().sum()

    return vmap(grad(loss), (None, 0))(parameters(model), tensors.rows)


def ensemble(model: Any, tensors: Tensors) -> Any:
    params, buffers = stack_module_state([copy.deepcopy(getattr(model, "_pygraph_module", model)) for _ in range(4)])
    return vmap(lambda p, b: functional_call(model, (p, b), (tensors.rows,)))(params, buffers)


def ensemble_without_elements(jit: Transform, device: torch.device) -> Callable[[], Any]:
    """An ensemble as in torch's tutorial: the module's own parameters are on ``meta``."""
    tensors = Tensors(device)
    torch.manual_seed(5)
    models = [network().to(device, torch.double) for _ in range(3)]
    params, buffers = stack_module_state(models)
    params = {name: value.detach() for name, value in params.items()}
    base = copy.deepcopy(models[0]).to("meta")

    def predict(params: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(base, (params, buffers), (x,))

    predicted = jit(predict)
    loss = jit(lambda params, buffers, x: predict(params, buffers, x).square().sum())
    return lambda: (
        vmap(predicted, (0, 0, None))(params, buffers, tensors.rows),
        vmap(grad(loss), (0, 0, None))(params, buffers, tensors.rows),
    )


CLOSURES: dict[str, Make] = {
    "an ensemble without elements": ensemble_without_elements,
    "grad": closure(grad, "w"),
    "vmap": closure(vmap, "weights"),
    "vmap(grad)": closure(lambda f: vmap(grad(f)), "weights"),
    "jvp": closure(lambda f: lambda w: jvp(f, (w,), (w,)), "w"),
    "hessian": closure(hessian, "w"),
    "a parameter": parameter,
    "a module": module(network, train),
    "a module with statistics and draws": module(noisy, train),
    "a transformer": module(transformer, train),
    "functional_call": module(network, functional_gradient),
    "per-sample gradients": module(network, per_sample),
    "ensemble": module(network, ensemble),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_closed_over_tensors(device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, made = run(CLOSURES[name], device, monkeypatch)
    assert not any(traces[1:])
    assert sum(function.cache_info().captures for function in made) > 0
    assert not [f for function in made for f in function.explain().to_dict()["fallbacks"] if f["what"] == "the call"]


def test_a_function_made_anew_in_every_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(jit: Transform, device: torch.device) -> Callable[[], Any]:
        tensors = Tensors(device)
        return lambda: grad(lambda w: jit(lambda x: (x * w).sum())(tensors.x))(tensors.w)

    run(make, device, monkeypatch)


# -- what runs as it is --------------------------------------------------------------------------------------------


def _gradient_inside(x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    return (gradient * x).sum()


def _cell(x: torch.Tensor, row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = torch.lstm_cell(x[None], [row[None], row[None]], weight, weight)
    return found[0].sum() + (found[1] ** 2).sum()


INLINE: dict[str, Make] = {
    "an operation that vmap takes only apart": of(
        _cell, lambda f, t: vmap(grad(f), (0, None, None))(t.rows, t.x, torch.cat([t.rows, t.rows, t.weights]))
    ),
    "autograd inside of vmap and grad": of(_gradient_inside, lambda f, t: vmap(grad(f))(t.rows)),
    "vmap(grad), draws": of(lambda x: drop(x).sum(), lambda f, t: vmap(grad(f), randomness="different")(t.rows)),
    "jvp, draws": of(drop, lambda f, t: jvp(f, (t.x,), (t.w,))),
    "draws for a batch": of(
        lambda w: w * torch.rand_like(w), lambda f, t: vmap(lambda x: x + f(t.w), randomness="different")(t.rows)
    ),
    "an update of what is differentiated": of(lambda x: x.mul_(2), lambda f, t: backward(lambda x: f(x * 1), t)),
    "the same in grad": of(lambda x: x.mul_(2).sum(), lambda f, t: grad(lambda x: f(x * 1.5))(t.x)),
    "a branch on a value": of(lambda x: x * 2 if x.sum() > 100 else x * 3, backward),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", INLINE)
def test_runs_as_it_is_and_says_why(device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (function,) = run(INLINE[name], device, monkeypatch)
    assert function.explain().to_dict()["fallbacks"]


def test_requires_grad_inside_of_a_transform_is_refused(device: torch.device) -> None:
    tensors = Tensors(device)
    for jit in (pygraph.jit, lambda fn: fn):
        with pytest.raises(RuntimeError, match="requires_grad_"):
            grad(jit(lambda x: (x * 1).requires_grad_().sum()))(tensors.x)


def test_random_draws_in_error_mode(device: torch.device) -> None:
    tensors = Tensors(device)
    for function in (drop, pygraph.jit(drop)):
        with pytest.raises(RuntimeError, match="randomness error mode"):
            vmap(function, randomness="error")(tensors.rows)


class Noisy(nn.Module):
    """Draws, and updates what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return nn.functional.dropout(self.norm(self.linear(x)).tanh() + self.count, 0.5)


def _update(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(1)
    return (x + total).sin() * torch.rand_like(x)


REPEATED: dict[str, Callable[[Transform, nn.Module], Any]] = {
    "draws": lambda jit, module: jit(drop),
    "draws of a batch": lambda jit, module: vmap(jit(drop), randomness="different"),
    "a module that updates and draws": lambda jit, module: jit(module),
    "an argument that is updated": lambda jit, module: functools.partial(jit(_update), total=module.count),
}


@pytest.mark.parametrize("name", REPEATED)
def test_second_derivatives_of_what_is_not_the_same_twice(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    module = Noisy().double().to(device)
    found = []
    for jit in (pygraph.jit, lambda fn: fn):
        mine = copy.deepcopy(module)
        function = REPEATED[name](jit, mine)
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
            out = function(x * 2)
            other = function(x.detach() + 1)  # is the last value that the module has had
            (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            versions = [tensor._version for tensor in mine.buffers()]
            between = torch.rand(2, device=device)
            gradients = torch.autograd.grad((first.square() * x).sum(), (x, *mine.parameters()), allow_unused=True)
            assert versions == [tensor._version for tensor in mine.buffers()]
            after = torch.rand(2, device=device)
            known = [torch.zeros(()) if gradient is None else gradient for gradient in gradients]
            found.append([out, other, first, between, after, *known, *(b.clone() for b in mine.buffers())])
    count = len(found) // 2
    for got, wanted in zip(found[:count], found[count:], strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_pull_back_of_draws_is_differentiated_outside(device: torch.device) -> None:
    found = []
    for jit in (pygraph.jit, lambda fn: fn):
        tensors = Tensors(device)
        torch.manual_seed(0)
        _, pull = torch.func.vjp(jit(drop), tensors.x)
        cotangent = tensors.w.clone().requires_grad_()
        found.append(torch.autograd.grad(pull(cotangent)[0].sum(), cotangent))
    assert_same(*found)


# -- results that are arguments, or views of them ---------------------------------------------------------------


def _halves(jit: Transform, device: torch.device, function: Function) -> Any:
    base = torch.arange(1.0, 5.0, device=device).requires_grad_()
    first, second = (base * 1).chunk(2)
    results = jit(function)(first, second)
    sum(result.sum() for result in results).backward()
    return base.grad, [result is second for result in results], [result.requires_grad for result in results]


def _expanded(jit: Transform, device: torch.device) -> Any:
    x = torch.ones(2, device=device).expand(3, 2).requires_grad_()
    results = jit(lambda x: (x[1:], x * 2))(x)
    results[0].sum().backward()
    return x.grad, results


def _closed(jit: Transform, device: torch.device) -> Any:
    weight = torch.tensor([2.0, 3.0], device=device, requires_grad=True)
    first, second = jit(lambda x: (x * weight, weight))(torch.ones(2, device=device, requires_grad=True))
    (first.sum() + second.square().sum()).backward()
    return weight.grad, second is weight


def _conjugated(jit: Transform, device: torch.device) -> Any:
    x = torch.tensor([1 + 2j], device=device, requires_grad=True)
    return [result.resolve_conj().detach() for result in jit(lambda x: (x.conj(), x * 2))(x)]


def _tangent(jit: Transform, device: torch.device) -> Any:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, device=device), torch.ones(2, device=device))
        return tuple(forward_ad.unpack_dual(result).tangent for result in jit(lambda x: (x[1:], x * 2))(x))


def _written(jit: Transform, device: torch.device) -> Any:
    function = jit(lambda x: x.view(-1))

    def around(x: torch.Tensor) -> torch.Tensor:
        product = x * 1
        function(product).mul_(3)
        return product.sum()

    x = torch.ones(1, 2, device=device)
    squared = lambda x: around(x) ** 2  # noqa: E731
    return vmap(grad(around))(x), grad(around)(x[0]), jvp(grad(squared), (x[0],), (x[0],))


def _detached(jit: Transform, device: torch.device) -> Any:
    x = torch.ones(2, device=device, requires_grad=True)
    results = jit(lambda x: (x.detach(), x * 2))(x)
    results[1].sum().backward()
    return x.grad, [result.requires_grad for result in results], results[0].data_ptr() == x.data_ptr()


def _part(jit: Transform, device: torch.device) -> Any:
    function, found = jit(lambda x, n: (x[:n], x * 2)), []
    for n in (1, 2):
        x = torch.ones(3, device=device, requires_grad=True)
        first, second = function(x, n)
        (first.sum() + second.sum()).backward()
        found.append(x.grad)
    return found


SHARED: dict[str, Callable[[Transform, torch.device], Any]] = {
    "a view of one of two parts": lambda jit, d: _halves(jit, d, lambda x, y: (x * 1, y.view(2, 1))),
    "one of two parts": lambda jit, d: _halves(jit, d, lambda x, y: (x * 2, y)),
    "a part of what is expanded": _expanded,
    "what is closed over": _closed,
    "a conjugated view": _conjugated,
    "a view with a tangent": _tangent,
    "a view that is written to": _written,
    "a detached argument": _detached,
    "a view by a live number": _part,
}


@pytest.mark.parametrize("name", SHARED)
def test_results_that_are_arguments_or_views(device: torch.device, name: str) -> None:
    for _ in range(2):
        assert_same(SHARED[name](pygraph.jit, device), SHARED[name](lambda fn: fn, device))


# -- results that are not used -------------------------------------------------------------------------------------


class Materialized(torch.autograd.Function):
    """A Function whose backward reads which cotangents are missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        if second is None:
            return first * 100
        return second * 1000 if first is None else first + second


PARTLY_USED: dict[str, Function] = {
    "a derivative that is infinite": lambda x, y: (x * 2, (x - x).sqrt(), y * 3),
    "arguments that others need": lambda x, y: (x * y, y.exp(), x.tanh()),
    "a custom Function": lambda x, y: (*Materialized.apply(x), y),
    "draws": lambda x, y: (drop(x), drop(y), drop(x * y)),
    "constants": lambda x, y: (x * torch.tensor([1.0, 2.0], device=x.device), y.exp(), x.sin()),
}


@pytest.mark.parametrize("name", PARTLY_USED)
def test_results_that_are_not_used(device: torch.device, name: str) -> None:
    found = []
    for jit in (pygraph.jit, lambda fn: fn):
        function = jit(PARTLY_USED[name])
        torch.manual_seed(0)
        for used in ((0,), (1,), (0, 1), (2,), (0,), (0, 1, 2)):
            x, y = (torch.tensor([1.0, i], device=device, requires_grad=True) for i in (0.5, 2.0))
            results = function(x, y)
            sum(results[index].sum() for index in used).backward()  # type: ignore[union-attr]
            found.append((x.grad, y.grad))
    assert_same(found[:6], found[6:])


def test_a_backward_of_some_results_is_compiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    function = pygraph.jit(lambda x: ((x.tanh() * 2).sum(), x.exp() * 3))
    for call in range(3):
        x = torch.ones(2, device=device, requires_grad=True)
        with counted(monkeypatch, device) as work:
            function(x)[0].backward()
        assert call == 0 or (work.traces, work.captures, work.replays) == (0, 0, 2)
    assert not function.explain().to_dict()["fallbacks"]


# -- autograd's rules ----------------------------------------------------------------------------------------------


def test_gradcheck(device: torch.device) -> None:
    function = pygraph.jit(lambda x, y: (x.tanh() @ y, (x * y).exp().sum()))
    tensors = Tensors(device)
    inputs = (tensors.leaf(), tensors.w.clone().requires_grad_())
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "relu", "softmax", "sqrt", "relu_"])
def test_second_derivatives_where_the_backward_reads_the_result(device: torch.device, name: str) -> None:
    functions: dict[str, Function] = {
        "softmax": lambda x: torch.softmax(x, 0),
        "relu_": lambda x: (x * 2).relu_(),
    }
    function = functions.get(name) or getattr(torch, name)
    found = []
    for f in (pygraph.jit(function), function):
        x = torch.tensor([0.5, 1.5, 0.25], dtype=torch.float64, device=device, requires_grad=True)
        result = f(x)
        (first,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        (third,) = torch.autograd.grad((second * result).sum(), x)
        found.append((result, first, second, third))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_derivatives_of_gradients_beside_arguments_that_have_none(device: torch.device) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return y.sin() * z.exp()

    found = []
    for f in (pygraph.jit(function), function):
        x, y, z = (torch.tensor([i, 0.5], device=device).requires_grad_() for i in (1.0, 2.0, 3.0))
        first = torch.autograd.grad(f(x, y, z).sum(), (x, y, z), create_graph=True, allow_unused=True)
        assert first[0] is None
        second = torch.autograd.grad(first[1].sum() + first[2].square().sum(), (y, z))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(y, y.detach().cos())
            gradients = torch.autograd.grad(f(x, dual, z).sum(), (x, y, z), allow_unused=True)
            moved = [forward_ad.unpack_dual(gradient).tangent for gradient in gradients[1:]]
        found.append((*first[1:], *second, *moved))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_equal_gradients_are_not_one_memory(device: torch.device) -> None:
    function = pygraph.jit(lambda x, y: x + y)
    x, y = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    for _ in range(3):
        function(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == y.grad.tolist() == [3, 3]
    x.grad.zero_()
    assert y.grad.tolist() == [3, 3]
    cotangent = torch.ones(2, device=device)
    x.grad = y.grad = None
    function(x, y).backward(cotangent)
    x.grad.zero_()  # type: ignore[attr-defined]
    assert cotangent.tolist() == [1, 1]


@pytest.mark.parametrize("batched", [False, True])
def test_derivatives_of_equal_gradients(device: torch.device, batched: bool) -> None:
    found = []
    for jit in (pygraph.jit, lambda fn: fn):
        x = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
        y = torch.tensor([3.0, 4.0], device=device, requires_grad=True)
        if batched:
            cotangents = torch.eye(2, device=device)
            result = jit(lambda x, y: (x + y) * 2)(x, y)
            found.append(torch.autograd.grad(result, (x, y), cotangents, is_grads_batched=True))
        else:
            first = torch.autograd.grad(jit(lambda x, y: ((x + y) ** 3).sum())(x, y), (x, y), create_graph=True)
            found.append(torch.autograd.grad((first[0] * first[1]).sum(), (x, y)))
    assert_same(*found)


@pytest.mark.parametrize("operation", [torch.linalg.det, torch.linalg.slogdet, torch.linalg.inv])
def test_derivatives_of_gradients_that_take_shortcuts(device: torch.device, operation: Function) -> None:
    matrix = torch.tensor([[2.0, 1.0], [0.5, 3.0]], dtype=torch.float64, device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return sum(result.sum() for result in pytree.tree_leaves(operation(x)))  # type: ignore[return-value]

    for stack in (lambda f: jvp(grad(f), (matrix,), (matrix.cos(),)), lambda f: hessian(f)(matrix)):
        torch.testing.assert_close(stack(pygraph.jit(function)), stack(function))


def test_what_a_custom_backward_reads_is_not_baked_in(device: torch.device) -> None:
    factors = [2.0]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * factors[0]

    function = pygraph.jit(lambda x: Scaled.apply(x))
    for factor in (2.0, 3.0, 4.0):
        factors[0] = factor
        x = torch.ones(2, device=device, requires_grad=True)
        function(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [factor, factor]


def test_what_is_kept_for_no_backward_does_not_keep_itself_alive(device: torch.device) -> None:
    function = pygraph.jit(lambda x: x * 2)
    for requires_grad in (True, False):
        x = torch.ones(2, device=device, requires_grad=True)
        hidden = x * 1 if requires_grad else torch.ones(2, device=device)
        gone = weakref.ref(hidden)
        hidden += function(hidden) if requires_grad else pygraph.jit(lambda x, y: x * 2 + y)(x, hidden)
        hidden.sum().backward()
        del hidden
        assert gone() is None


def test_arguments_that_autograd_does_not_count(device: torch.device) -> None:
    with torch.inference_mode():
        x = torch.ones(2, device=device)
    weight = torch.ones(2, device=device, requires_grad=True)
    pygraph.jit(lambda x: x + weight)(x).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_saved_tensors_are_what_hooks_make_of_them(device: torch.device) -> None:
    weight = torch.full((2,), 3.0, device=device, requires_grad=True)
    x = torch.ones(2, device=device, requires_grad=True)
    function = pygraph.jit(lambda x: x * weight)
    with torch.autograd.graph.save_on_cpu():
        out = function(x)
    with torch.no_grad():
        weight.fill_(100)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def _hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x * 3


def test_hooks_on_what_comes_from_outside(device: torch.device) -> None:
    found = []
    for jit in (pygraph.jit, lambda fn: fn):
        x = torch.ones(2, device=device, requires_grad=True)
        inner = x * 1
        (jit(_hooked)(inner) + inner * 5).sum().backward()
        found.append(x.grad)
    assert_same(*found)


def test_pull_backs_that_are_closed_over(device: torch.device) -> None:
    def outer(jit: Transform, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        _, pull = torch.func.vjp(torch.sin, x)
        return jit(lambda y: pull(y)[0])(y).sum()

    x, y = torch.ones(2, device=device), torch.ones(2, device=device)
    assert_same(*(grad(lambda x, jit=jit: outer(jit, x, y))(x) for jit in (pygraph.jit, lambda fn: fn)))


def test_gradients_of_powers_with_an_exponent_on_the_host(device: torch.device) -> None:
    function = pygraph.jit(lambda x, n: (x**n).sum())
    for exponent in (2.0, 0.0, 3.0):
        x = torch.tensor([2.0, 0.5], device=device, requires_grad=True)
        function(x, torch.tensor(exponent)).backward()
        wanted = torch.autograd.grad((x ** torch.tensor(exponent)).sum(), x)
        assert_same((x.grad,), wanted)


def test_results_that_are_expanded_in_forward_mode(device: torch.device) -> None:
    found = []
    for jit in (pygraph.jit, lambda fn: fn):
        function = jit(grad(lambda x, y: (y.sin() + x).sum()))
        with forward_ad.dual_level():
            x, y = (forward_ad.make_dual(torch.ones(2, device=device), torch.ones(2, device=device)) for _ in range(2))
            found.append(forward_ad.unpack_dual(function(x, y)).primal)
    assert_same(*found)


def test_what_objects_are(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    for function, arguments in (
        (lambda x, y: x * 2 if x is y else x * 3, (parameter, parameter)),
        (lambda x: x * 2 if isinstance(x, nn.Parameter) else x * 3, (parameter,)),
    ):
        assert_same(pygraph.jit(function)(*arguments).detach(), function(*arguments).detach())


def test_what_the_backward_does_not_read_may_be_updated(device: torch.device) -> None:
    function = pygraph.jit(lambda x, y: torch.relu(x + 1) * 2 + y)
    tensors = Tensors(device)
    leaf, other = tensors.leaf(), tensors.w.clone()
    hidden = leaf * 1
    out = function(hidden, other)
    hidden += out.detach()
    other.zero_()
    out.sum().backward()
    assert torch.equal(leaf.grad, 2.0 * (leaf + 1 > 0))  # pyright: ignore


@pytest.mark.parametrize("kind", ["argument", "closed-over", "parameter"])
def test_an_update_of_what_the_backward_reads_is_an_error(device: torch.device, kind: str) -> None:
    tensors = Tensors(device)
    held = tensors.w.clone().requires_grad_(kind == "parameter")
    function = pygraph.jit((lambda x, y: x * y) if kind == "argument" else lambda x, y: x * held)
    for _ in range(2):
        out = function(tensors.leaf(), held.detach())
        with torch.no_grad():
            held.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


VIEWS: dict[str, Function] = {
    "beside another": lambda x: (x.sum(), (x * 2)[1:]),
    "beside a tensor of its own": lambda x: (x * 3, (x * 2)[:2]),
    "transposed": lambda x: (x.cos(), (x * 2).expand(2, 3).clone().t()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_results_that_are_views_may_be_updated(device: torch.device, name: str) -> None:
    function = pygraph.jit(VIEWS[name])
    for _ in range(2):
        gradients: list[Any] = []
        for call in (VIEWS[name], function):
            leaf = Tensors(device).leaf()
            other, view = call(leaf)
            view.mul_(3)
            (other.sum() + view.square().sum()).backward()
            gradients.append(leaf.grad)
        assert_same(*gradients)
    assert not function.explain().inlined


def test_an_update_of_a_view_of_another_result_is_an_error(device: torch.device) -> None:
    whole, part = pygraph.jit(lambda x: (lambda y: (y, y[1:]))(x * 2))(Tensors(device).leaf())
    with pytest.raises(RuntimeError, match="view"):
        part.mul_(3)
    assert whole.grad_fn is not None


def test_tangents_of_inference_tensors(device: torch.device) -> None:
    function = pygraph.jit(wave)
    for _ in range(2):
        tensors = Tensors(device)
        with torch.inference_mode():
            x = tensors.x * 2
            assert_same(jvp(function, (x,), (tensors.w,)), jvp(wave, (x,), (tensors.w,)))


def test_tangents_of_scalars_have_their_dtype(device: torch.device) -> None:
    x = torch.tensor(0.7, device=device)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x.square() * 3.0

    for function in (scaled, pygraph.jit(scaled)):
        with forward_ad.dual_level():
            primal, tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.cos())))
        assert primal.dtype == torch.float32
        assert tangent is not None
        assert tangent.dtype == torch.float32
        assert torch.allclose(tangent, 6 * x * x.cos())


def test_nothing_is_recorded_without_grad_mode(device: torch.device) -> None:
    function = pygraph.jit(wave)
    leaf = Tensors(device).leaf()
    with torch.no_grad():
        assert not function(leaf).requires_grad
    assert function(leaf).requires_grad
    with torch.inference_mode():
        assert not function(leaf).requires_grad


def test_autocast_is_the_forwards(device: torch.device) -> None:
    """A second derivative runs the function again, after the block has ended."""
    matrix, other = torch.randn(2, 8, 8, device=device)
    results: list[Any] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        return (x @ other).float().square().sum()

    for function in (product, pygraph.jit(product)):
        leaf = matrix.clone().requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = function(leaf)
        (first,) = torch.autograd.grad(out, leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), leaf)
        results.append((out, first, second))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_clearing_the_cache_forgets_derived_functions(device: torch.device) -> None:
    function = pygraph.jit(power)
    x = Tensors(device).x
    wanted = grad(power)(x)
    assert torch.equal(grad(function)(x), wanted)
    assert function.cache_info().size == 2
    function.cache_clear()
    assert function.cache_info() == (0, 0, 0, 0, 0)
    assert torch.equal(grad(function)(x), wanted)


def test_a_backward_outlives_the_function(device: torch.device) -> None:
    leaf = Tensors(device).leaf()
    out = pygraph.jit(power)(leaf)
    out.backward()
    torch.testing.assert_close(leaf.grad, grad(power)(leaf.detach()))


def test_other_stacks_of_transforms(device: torch.device) -> None:
    x = Tensors(device).x
    wanted = hessian(power)(x)
    for transform in (
        pygraph.devicify, pygraph.indirect, pygraph.graphify,
        lambda f: pygraph.select(pygraph.graphify(pygraph.indirect(pygraph.devicify(f)))),
    ):  # fmt: skip
        torch.testing.assert_close(hessian(transform(power))(x), wanted)
        torch.testing.assert_close(transform(hessian(power))(x), wanted)


@pytest.mark.parametrize("reads", [True, False])
def test_no_graph_behind_an_argument_on_which_no_result_depends(device: torch.device, reads: bool) -> None:
    """It may have been freed by a backward before: in eager, nothing leads there."""

    def fn(x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        if reads and before is not None:
            x = x + (before > 0).float()
        return (x * 2).sin().mean()

    fast, before = pygraph.jit(fn), [None, None]
    for number in range(6):
        for run, transformed in enumerate((fn, fast)):
            leaf = torch.full((3,), number / 4, device=device, requires_grad=True)
            found = transformed(leaf.tanh(), before[run])
            assert [one is not None for one, _ in found.grad_fn.next_functions].count(True) == 1
            found.backward()
            before[run] = found
        torch.testing.assert_close(before[1], before[0])


def test_a_result_whose_class_looks_at_what_it_holds(device: torch.device) -> None:
    linear = nn.Linear(4, 4).to(device)

    def fn(packed: rnn.PackedSequence) -> rnn.PackedSequence:
        return rnn.PackedSequence(linear(packed.data).tanh(), *packed[1:])

    fast, lengths = pygraph.jit(fn), torch.tensor([6, 4, 3, 1])
    for _ in range(3):
        packed = rnn.pack_padded_sequence(torch.randn(6, 4, 4, device=device), lengths)
        found, expected = fast(packed), fn(packed)
        assert type(found) is rnn.PackedSequence
        torch.testing.assert_close(found.data, expected.data)
        gradients = [torch.autograd.grad(one.data.sum(), [*linear.parameters()]) for one in (found, expected)]
        torch.testing.assert_close(*gradients)
