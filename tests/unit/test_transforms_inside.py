"""torch.func inside a function: ensembles, per-sample gradients, inner loops, Jacobians and kernels are one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

import pygraph
from tests.steps import check_steps

# By torch, for forward derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Tensors = dict[str, Tensor]


def network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def parameters(net: nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def batch(device: torch.device, *shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(*shape, 4, device=device), torch.randint(0, 3, shape, device=device)


def decayed(step: int) -> float:
    return 0.1 / (step + 2)


# ---- ensembles -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ensemble(device: torch.device) -> tuple[nn.Module, Tensors, Tensors]:
    torch.manual_seed(1)
    nets = [network().to(device) for _ in range(3)]
    params, buffers = stack_module_state(nets)
    return nets[0], {name: value.detach() for name, value in params.items()}, buffers


@pytest.mark.parametrize("data", [None, 0], ids=["the same data", "data of their own"])
def test_an_ensemble_predicts(ensemble: Any, data: int | None, device: torch.device) -> None:
    net, params, buffers = ensemble
    x, _ = batch(device, 5) if data is None else batch(device, 3, 5)

    def predict(params: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        return vmap(lambda p, b, x: functional_call(net, (p, b), (x,)), in_dims=(0, 0, data))(params, buffers, x)

    check_steps(predict, (params, buffers, x), device, steps=4)


def test_an_ensemble_trains(ensemble: Any, device: torch.device) -> None:
    net, params, buffers = ensemble

    def loss(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, (params, buffers), (x,)), y)

    def step(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float) -> Any:
        grads, values = vmap(grad_and_value(loss), in_dims=(0, 0, None, None))(params, buffers, x, y)
        return {name: params[name] - rate * grads[name] for name in params}, values

    check_steps(step, (params, buffers, *batch(device, 8), 0.1), device,
                lambda args, out, i: (out[0], *args[1:4], decayed(i)))  # fmt: skip


# ---- gradients of each sample, of inner loops ----------------------------------------------------------------------


@pytest.mark.parametrize(("dropout", "randomness"), [(0.0, "error"), (0.5, "different"), (0.5, "same")])
def test_gradients_of_each_sample(device: torch.device, dropout: float, randomness: str) -> None:
    torch.manual_seed(1)
    net = network(dropout).to(device)

    def loss(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, params, (x[None],)), y[None])

    def each(params: Tensors, x: Tensor, y: Tensor) -> Tensors:
        return vmap(grad(loss), in_dims=(None, 0, 0), randomness=randomness)(params, x, y)

    check_steps(each, (parameters(net), *batch(device, 6)), device, steps=4)


def test_private_training_clips_the_gradient_of_each_sample(device: torch.device) -> None:
    torch.manual_seed(1)
    net = network().to(device)

    def loss(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, params, (x[None],)), y[None])

    def clipped(params: Tensors, x: Tensor, y: Tensor) -> Tensors:
        grads = grad(loss)(params, x, y)
        norm = torch.stack([value.norm() for value in grads.values()]).norm()
        factor = (0.1 / norm).clamp(max=1.0)
        return {name: value * factor for name, value in grads.items()}

    def step(params: Tensors, x: Tensor, y: Tensor, rate: float) -> Tensors:
        grads = vmap(clipped, in_dims=(None, 0, 0))(params, x, y)
        noisy = {name: value.mean(0) + 0.01 * torch.randn_like(value[0]) for name, value in grads.items()}
        return {name: params[name] - rate * noisy[name] for name in params}

    check_steps(step, (parameters(net), *batch(device, 6), 0.1), device,
                lambda args, out, i: (out, *args[1:3], decayed(i)))  # fmt: skip


def test_meta_learning_differentiates_through_inner_steps(device: torch.device) -> None:
    """MAML: a gradient through three steps of gradient descent, for several tasks at once."""
    torch.manual_seed(1)
    shapes = {"w1": (1, 8), "b1": (8,), "w2": (8, 1)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    x = torch.randn(4, 10, 1, device=device)

    def loss(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return ((torch.sin(x @ params["w1"] + params["b1"]) @ params["w2"] - y) ** 2).mean()

    def of_task(params: Tensors, x: Tensor, y: Tensor, inner_rate: float) -> Tensor:
        for _ in range(3):
            grads = grad(loss)(params, x, y)
            params = {name: params[name] - inner_rate * grads[name] for name in params}
        return loss(params, x + 0.1, y)

    def step(params: Tensors, x: Tensor, y: Tensor, inner_rate: float, rate: float) -> Any:
        def mean(params: Tensors) -> Tensor:
            return vmap(lambda x, y: of_task(params, x, y, inner_rate))(x, y).mean()

        grads, value = grad_and_value(mean)(params)
        return {name: params[name] - rate * grads[name] for name in params}, value

    check_steps(step, (params, x, x.sin(), 0.05, 0.01), device,
                lambda args, out, i: (out[0], *args[1:3], decayed(i), 0.01))  # fmt: skip


# ---- Jacobians, Hessians, products -----------------------------------------------------------------------------------


def _forward_ad(fn: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, t)))[1]


def _linearize(fn: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Any:
    out, product = linearize(fn, x)
    return out, product(t), product(2 * t)


def _vjp(fn: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Any:
    out, product = vjp(fn, x)
    return out, product(t)


def _sum(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x).sum()


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Any]] = {
    "jacrev": lambda fn, x, t: jacrev(fn)(x),
    "jacrev in chunks": lambda fn, x, t: jacrev(fn, chunk_size=2)(x),
    "jacfwd": lambda fn, x, t: jacfwd(fn)(x),
    "hessian": lambda fn, x, t: hessian(_sum(fn))(x),
    "Hessians of a batch": lambda fn, x, t: vmap(hessian(_sum(fn)))(torch.stack([x, t])),
    "Laplacian": lambda fn, x, t: vmap(lambda x: torch.trace(hessian(_sum(fn))(x)))(torch.stack([x, t])),
    "Hessian times vector": lambda fn, x, t: jvp(grad(_sum(fn)), (x,), (t,))[1],
    "third derivative": lambda fn, x, t: grad(lambda x: jvp(grad(_sum(fn)), (x,), (t,))[1].sum())(x),
    "jvp": lambda fn, x, t: jvp(fn, (x,), (t,)),
    "linearize": _linearize,
    "vjp": _vjp,
    "forward_ad": _forward_ad,
    "autograd.functional.hessian": lambda fn, x, t: torch.autograd.functional.hessian(_sum(fn), x),
    "autograd.functional.jacobian": lambda fn, x, t: torch.autograd.functional.jacobian(fn, x, vectorize=True),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's linearize
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name: str, device: torch.device) -> None:
    torch.manual_seed(1)
    weight = torch.randn(4, 4, device=device)

    def derivative(x: Tensor, t: Tensor) -> Any:
        return DERIVATIVES[name](lambda x: torch.tanh(x @ weight), x, t)

    check_steps(derivative, (torch.randn(4, device=device), torch.randn(4, device=device)), device, steps=3)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x[None], torch.ones(1, dtype=torch.int64, device=x.device))[None],
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "gelu": F.gelu,
    "logsumexp": lambda x: torch.stack([x, x.sin()]).logsumexp(-1),
    "attention": lambda x: F.scaled_dot_product_attention(*x.view(1, 1, 2, 2).expand(3, 1, 2, 2)[:, None]).flatten(),
    "a convolution": lambda x: F.conv1d(x.view(1, 1, 4), x[:2].view(1, 1, 2)).flatten(),
    "a norm": lambda x: x.square().sum()[None].sqrt(),
}


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("name", ["hessian", "Hessians of a batch", "Hessian times vector", "third derivative"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_second_derivatives(function: str, name: str, device: torch.device) -> None:
    """Tangents of an operation that torch decomposes for a second derivative are zero in part, and views of zeros."""

    def derivative(x: Tensor, t: Tensor) -> Any:
        return DERIVATIVES[name](FUNCTIONS[function], x, t)

    torch.manual_seed(1)
    check_steps(derivative, (torch.randn(4, device=device), torch.randn(4, device=device)), device, steps=3)


@pytest.mark.parametrize("returned", [True, False])
def test_a_tensor_that_is_moved_to_meta(returned: bool, device: torch.device) -> None:
    def shape_only(x: Tensor) -> tuple[Any, Tensor]:
        moved = x.to("meta") + torch.zeros((), device="meta")
        return (moved if returned else moved.is_meta), x + moved.numel()

    x = torch.randn(3, device=device)
    fast = pygraph.jit(shape_only)
    for _ in range(2):
        on_meta, result = fast(x)
        assert on_meta.is_meta if returned else on_meta
        assert torch.equal(result, x + 3)
    assert bool(fast.explain().to_dict()["fallbacks"]) == returned


@pytest.mark.parametrize("how", ["by Jacobians", "by products"])
def test_tangent_kernel(how: str, device: torch.device) -> None:
    """The empirical neural tangent kernel, in both ways of functorch's tutorial."""
    torch.manual_seed(1)
    net = network().to(device)

    def out(params: Tensors, x: Tensor) -> Tensor:
        return functional_call(net, params, (x[None],))[0]

    def by_jacobians(params: Tensors, one: Tensor, other: Tensor) -> Tensor:
        rows = [vmap(jacrev(out), (None, 0))(params, x) for x in (one, other)]
        parts = [torch.einsum("Naf,Mbf->NMab", rows[0][k].flatten(2), rows[1][k].flatten(2)) for k in params]
        return torch.stack(parts).sum(0)

    def by_products(params: Tensors, one: Tensor, other: Tensor) -> Tensor:
        def entry(one: Tensor, other: Tensor) -> Tensor:
            _, back = vjp(lambda params: out(params, one), params)
            return vmap(lambda t: jvp(lambda params: out(params, other), (params,), back(t))[1])(
                torch.eye(3, device=device)
            )

        return vmap(vmap(entry, (None, 0)), (0, None))(one, other)

    kernel = by_jacobians if how == "by Jacobians" else by_products
    x, _ = batch(device, 5)
    check_steps(kernel, (parameters(net), x[:2], x[2:]), device, steps=3)
