"""Named stacks of torch.func's transforms and ours: equal to the same expression without ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.utils import _pytree as pytree

import pygraph
from tests import extent
from tests.property.strategies import TripledExp
from tests.unit.interop.common import TRANSFORMS, arguments, check_compiled, check_same

# torch.func.linearize: what it folds are its own attributes.
pytestmark = [pytest.mark.rotates, pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")]

Wrapper = Callable[[Any], Any]


def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Any shape whose last dimension is y's."""
    return (x * y).sin() * x.exp().mean() + torch.relu(x) * y**2


def _like(jacobian: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return jacobian.reshape(-1, *x.shape).sum(0)


def _with_aux(fn: Any) -> Any:
    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = fn(x, y)
        return out.sum(), out

    def wrapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        gradients, (value, aux) = grad_and_value(both, argnums=(0, 1), has_aux=True)(x, y)
        return gradients[0] * gradients[1] + value + aux

    return wrapped


def _pulled(fn: Any) -> Any:
    def wrapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, pull = vjp(fn, x, y)
        return pull(out.sin())[0] + pull(out)[1]

    return wrapped


# Each makes of a function of (x, y) with a result like x another one.
WRAPPERS: dict[str, Wrapper] = {
    "vmap": lambda fn: vmap(fn, (0, None)),
    "grad": lambda fn: grad(lambda x, y: fn(x, y).sum()),
    "vjp": _pulled,
    "jvp": lambda fn: lambda x, y: jvp(fn, (x, y), (x.cos(), y.sin()))[1],
    "jacrev": lambda fn: lambda x, y: _like(jacrev(fn)(x, y), x),
    "jacfwd": lambda fn: lambda x, y: _like(jacfwd(fn)(x, y), x),
    "hessian": lambda fn: lambda x, y: _like(hessian(lambda x, y: fn(x, y).sum())(x, y), x),
    "grad_and_value": _with_aux,
    "functionalize": functionalize,
}
STACKS = (
    *((name,) for name in WRAPPERS),
    ("grad", "vmap"),
    ("vmap", "grad"),
    ("vmap", "vmap"),
    ("grad", "grad"),
    ("jvp", "grad"),
    ("grad", "jvp"),
    ("jvp", "jvp"),
    ("vmap", "jacrev"),
    ("jacfwd", "vmap"),
    ("jacrev", "jacfwd"),
    ("hessian", "vmap"),
    ("functionalize", "vmap"),
    ("grad", "grad", "vmap", "vmap"),
    ("vmap", "jvp", "vjp", "vmap"),
    ("grad", "vmap", "jacrev", "jvp"),
    ("grad_and_value", "jacfwd", "vmap", "grad"),
)
"""Innermost first."""


def stacked(fn: Any, stack: tuple[str, ...], transform: Wrapper, where: str) -> Any:
    """The stack over ``fn``, with a transform of ours innermost, outermost, or at every level."""
    if where in ("inside", "everywhere"):
        fn = transform(fn)
    for number, name in enumerate(stack, 1):
        fn = WRAPPERS[name](fn)
        if where == "everywhere" or (where == "outside" and number == len(stack)):
            fn = transform(fn)
    return fn


def inputs(device: torch.device, seed: int, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=generator).to(device) for s in ((*leading, 4), (4,)))  # type: ignore[return-value]


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("stack", STACKS, ids="∘".join)
def test_a_stack_over_a_transformed_function(device: torch.device, stack: tuple[str, ...], transform: str) -> None:
    check_stack(device, stack, transform, "inside")


@pytest.mark.parametrize("stack", extent.third(STACKS), ids="∘".join)
def test_jit_at_every_level_of_a_stack(device: torch.device, stack: tuple[str, ...]) -> None:
    check_stack(device, stack, "jit", "everywhere")


@pytest.mark.pairwise
@pytest.mark.parametrize("where", ["outside", "everywhere"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("stack", [("vmap",), ("grad",), ("grad", "vmap"), ("vmap", "jvp")], ids="∘".join)
def test_a_transformed_stack(device: torch.device, stack: tuple[str, ...], transform: str, where: str) -> None:
    check_stack(device, stack, transform, where)


def check_stack(device: torch.device, stack: tuple[str, ...], transform: str, where: str) -> None:
    mine = stacked(plain, stack, TRANSFORMS[transform], where)
    expected = stacked(plain, stack, TRANSFORMS[transform], "nowhere")
    for seed, leading in enumerate(((1, 2), (1, 2), (2, 1))):
        args = inputs(device, seed, *leading)
        check_same(mine(*args), expected(*args))


# ---- one transform at a time, with all its options ---------------------------------------------------------------


def _tree(tree: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
    return {"product": tree["a"] * tree["b"][0] * scale, "rest": (tree["b"][0].cos(), [tree["a"].sum()])}


def _trees(device: torch.device) -> dict[str, Any]:
    return {"a": inputs(device, 1, 3)[0], "b": [inputs(device, 2, 3)[0]]}


def _aux(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (x * y).sum(), {"product": x * y, "norm": x.norm()}


def _mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        frozen = x.square()
    return frozen * x + x.detach() * y


def _temporary(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z.mul_(y).add_(1)
    z[..., 1:].relu_()
    return z


CALLS: dict[str, Callable[[Wrapper, torch.device], Any]] = {
    "vmap over a tree": lambda T, d: vmap(T(_tree))(_trees(d)),
    "in_dims of a tree": lambda T, d: vmap(T(_tree), ({"a": 1, "b": [-1]}, None))(_trees(d), 2.0),
    "in_dims with None": lambda T, d: vmap(T(_tree), ({"a": 0, "b": [None]},))(
        {"a": inputs(d, 1, 3)[0], "b": [inputs(d, 2)[0]]}
    ),
    "out_dims": lambda T, d: vmap(T(_tree), out_dims={"product": 1, "rest": (-1, [0])})(_trees(d)),
    "out_dims with None": lambda T, d: vmap(T(lambda x, y: (x + 1, y * 2)), (0, None), (1, None))(*inputs(d, 0, 3)),
    "negative dims": lambda T, d: vmap(T(plain), (-2, None), -1)(*inputs(d, 0, 2, 3)),
    "chunks": lambda T, d: vmap(T(plain), (0, None), chunk_size=2)(*inputs(d, 0, 5)),
    "chunks of one": lambda T, d: vmap(T(plain), (0, None), chunk_size=1)(*inputs(d, 0, 3)),
    "keywords": lambda T, d: vmap(T(lambda x, *, y: x * y))(inputs(d, 0, 3)[0], y=inputs(d, 1)[0]),
    "same random numbers": lambda T, d: vmap(T(torch.rand_like), randomness="same")(inputs(d, 0, 3)[0]),
    "different random numbers": lambda T, d: vmap(T(torch.rand_like), randomness="different")(inputs(d, 0, 3)[0]),
    "different dropout": lambda T, d: vmap(T(torch.dropout), (0, None, None), randomness="different")(
        inputs(d, 0, 3)[0], 0.5, True
    ),
    "random numbers from nothing": lambda T, d: vmap(
        T(lambda x: x + torch.randn(4, device=d)), randomness="different"
    )(inputs(d, 0, 3)[0]),
    "a closure over what is mapped": lambda T, d: (lambda y: vmap(lambda x: vmap(T(lambda y: x * y))(y)))(
        inputs(d, 1)[0]
    )(inputs(d, 0, 3)[0]),
    "nothing is mapped inside": lambda T, d: (lambda y: vmap(lambda x: T(torch.sin)(y) * x))(inputs(d, 1)[0])(
        inputs(d, 0, 3)[0]
    ),
    "an update of a temporary": lambda T, d: vmap(T(_temporary), (0, None))(*inputs(d, 0, 3)),
    "an update of what is mapped": lambda T, d: (lambda x: (vmap(T(lambda x: x.add_(1)))(x), x))(inputs(d, 0, 3)[0]),
    "argnums": lambda T, d: grad(T(lambda x, y: plain(x, y).sum()), argnums=(1, 0))(*inputs(d, 0, 3)),
    "negative argnums": lambda T, d: grad(T(lambda x, y: plain(x, y).sum()), argnums=-1)(*inputs(d, 0, 3)),
    "grad of a tree": lambda T, d: grad(T(lambda t: _tree(t)["product"].sum()))(_trees(d)),
    "grad with aux": lambda T, d: grad(T(_aux), has_aux=True)(*inputs(d, 0, 3)),
    "grad_and_value with aux": lambda T, d: grad_and_value(T(_aux), argnums=(0, 1), has_aux=True)(*inputs(d, 0, 3)),
    "grad for keywords": lambda T, d: grad(T(lambda x, *, k: (x * k).sum()))(inputs(d, 0)[0], k=3.0),
    "grad with numbers": lambda T, d: [grad(T(lambda x, k: (x**2 * k).sum()))(inputs(d, 0)[0], k) for k in (1.5, 2, 3)],
    "vjp with aux": lambda T, d: (lambda out, pull, aux: (out, pull(out), aux))(
        *vjp(T(lambda x, y: (x * y, x.cos())), *inputs(d, 0, 3), has_aux=True)
    ),
    "jvp with aux": lambda T, d: jvp(
        T(lambda x, y: (x * y, x.cos())), inputs(d, 0, 3), inputs(d, 1, 3), has_aux=True
    ),
    "jvp of a tree": lambda T, d: jvp(T(_tree), (_trees(d),), (_trees(d),)),
    "jacrev with argnums": lambda T, d: jacrev(T(plain), argnums=(0, 1))(*inputs(d, 0, 2)),
    "jacrev in chunks": lambda T, d: jacrev(T(plain), chunk_size=3)(*inputs(d, 0, 2)),
    "jacrev with aux": lambda T, d: jacrev(T(lambda x, y: (x * y, y)), has_aux=True)(*inputs(d, 0, 2)),
    "jacfwd with argnums": lambda T, d: jacfwd(T(plain), argnums=(0, 1))(*inputs(d, 0, 2)),
    "jacfwd with randomness": lambda T, d: jacfwd(T(lambda x: x * torch.rand_like(x)), randomness="same")(
        inputs(d, 0)[0]
    ),
    "hessian with argnums": lambda T, d: hessian(T(lambda x, y: plain(x, y).sum()), argnums=(0, 1))(*inputs(d, 0, 2)),
    "linearize": lambda T, d: (lambda out, push: (out, push(*inputs(d, 1, 3)), push(*inputs(d, 2, 3))))(
        *linearize(T(plain), *inputs(d, 0, 3))
    ),
    "a custom Function": lambda T, d: [
        wrapper(T(lambda x, y: TripledExp.apply(x * y)))(*inputs(d, 0, 2, 3))
        for wrapper in (WRAPPERS["vmap"], WRAPPERS["grad"], WRAPPERS["jvp"], WRAPPERS["hessian"])
    ],
    "no_grad and detach inside": lambda T, d: [
        wrapper(T(_mixed))(*inputs(d, 0, 2, 3)) for wrapper in (WRAPPERS["grad"], WRAPPERS["jvp"], WRAPPERS["hessian"])
    ],
    "no_grad outside": lambda T, d: torch.no_grad()(WRAPPERS["grad"](T(plain)))(*inputs(d, 0, 3)),
    "in inference mode": lambda T, d: torch.inference_mode()(lambda: WRAPPERS["vmap"](T(plain))(*inputs(d, 0, 3)))(),
    "an ignored argument": lambda T, d: grad(T(lambda x, y: x.sum()), argnums=(0, 1))(*inputs(d, 0, 3)),
    "a constant result": lambda T, d: jvp(T(lambda x: torch.ones(2, device=d)), (inputs(d, 0)[0],), (inputs(d, 1)[0],)),
    "results that are arguments": lambda T, d: (
        vmap(T(lambda x, y: (x, y, x[1:])))(inputs(d, 0, 3)[0], inputs(d, 1, 3)[0]),
        vjp(T(lambda x: (x, x.t())), inputs(d, 0, 3)[0])[0],
    ),
    "integer results": lambda T, d: vmap(T(lambda x, y: ((x > y).sum(), x.argmax(), x * 2)), (0, None))(
        *inputs(d, 0, 3)
    ),
    "perturbations are kept apart": lambda T, d: grad(
        T(lambda x: x * grad(T(lambda y: (x * y).sum()))(torch.ones((), device=d)))
    )(torch.full((), 3.0, device=d)),
    "ambient gradients": lambda T, d: (lambda x, y: torch.autograd.grad(
        (WRAPPERS["grad"](T(plain))(x, y) * WRAPPERS["vmap"](T(plain))(x, y)).sum(), (x, y)
    ))(*(t.requires_grad_() for t in inputs(d, 0, 3))),
    # From the tutorials.
    "Hessian-vector product, forward over reverse": lambda T, d: jvp(
        grad(T(lambda x: plain(x, x[0]).sum())), (inputs(d, 0, 3)[0],), (inputs(d, 1, 3)[0],)
    )[1],
    "Hessian-vector product, reverse over reverse": lambda T, d: vjp(
        grad(T(lambda x: plain(x, x[0]).sum())), inputs(d, 0, 3)[0]
    )[1](inputs(d, 1, 3)[0]),
    "batch of Hessians": lambda T, d: vmap(hessian(T(lambda x, y: plain(x, y).sum())), (0, None))(*inputs(d, 0, 2)),
    "Laplacian": lambda T, d: vmap(lambda x: hessian(T(lambda x: (x**3).sum()))(x).trace())(inputs(d, 0, 3)[0]),
    "gradients through steps of descent": lambda T, d: grad(
        lambda x, y: plain(x - 0.1 * grad(T(lambda x, y: plain(x, y).sum()))(x, y), y).sum()
    )(*inputs(d, 0, 3)),
}  # fmt: skip


def run(call: Callable[[Wrapper, torch.device], Any], transform: Wrapper, device: torch.device) -> Any:
    torch.manual_seed(0)
    result = call(transform, device)
    return [result, torch.rand(2, device=device)]  # the random stream goes on at the same place


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("transform", ["indirect∘devicify", "jit"])
@pytest.mark.parametrize("name", CALLS)
def test_options(device: torch.device, name: str, transform: str) -> None:
    made: dict[Any, Any] = {}

    def once(fn: Any) -> Any:
        """The same transformed function for the same code at the second call."""
        return made.setdefault(fn.__code__ if hasattr(fn, "__code__") else fn, TRANSFORMS[transform](fn))

    expected = run(CALLS[name], lambda fn: fn, device)
    if name in ("a closure over what is mapped", "perturbations are kept apart"):  # other closures each time
        check_same(run(CALLS[name], TRANSFORMS[transform], device), expected)
        return
    for _ in range(2):
        check_same(run(CALLS[name], once, device), expected)


# ---- errors ------------------------------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[Wrapper, torch.device], Any]] = {
    "randomness is an error": lambda T, d: vmap(T(torch.rand_like))(inputs(d, 0, 3)[0]),
    "a value of what is mapped": lambda T, d: vmap(T(lambda x: x.sum().item()))(inputs(d, 0, 3)[0]),
    "a branch on what is mapped": lambda T, d: vmap(T(lambda x: x if x.sum() > 0 else -x))(inputs(d, 0, 3)[0]),
    "a result that is no tensor": lambda T, d: vmap(T(lambda x: 3))(inputs(d, 0, 3)[0]),
    "grad of a vector": lambda T, d: grad(T(lambda x: x * 2))(inputs(d, 0)[0]),
    "grad of integers": lambda T, d: grad(T(lambda x: x.sum()))(inputs(d, 0)[0].long()),
    "another size": lambda T, d: vmap(T(torch.add))(inputs(d, 0, 3)[0], inputs(d, 0, 2)[0]),
    "an error in the function": lambda T, d: vmap(T(lambda x: x.view(17)))(inputs(d, 0, 3)[0]),
    "a wrong dim": lambda T, d: vmap(T(torch.sin), 3)(inputs(d, 0, 3)[0]),
    "an update of what is not mapped": lambda T, d: vmap(T(lambda x, y: y.add_(x)), (0, None))(*inputs(d, 0, 3)),
    "a tangent of another shape": lambda T, d: jvp(T(torch.sin), (inputs(d, 0, 3)[0],), (inputs(d, 0, 2)[0],)),
    "a gradient of another shape": lambda T, d: vjp(T(torch.sin), inputs(d, 0, 3)[0])[1](inputs(d, 0, 2)[0]),
    "a sparse shape": lambda T, d: vmap(T(torch.nonzero))(inputs(d, 0, 3)[0]),
}


@pytest.mark.parametrize("transform", ["devicify", "jit"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors(device: torch.device, name: str, transform: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as expected:
        ERRORS[name](lambda fn: fn, device)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as got:
            ERRORS[name](TRANSFORMS[transform], device)
        assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


# ---- with our options --------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "static": {"static_argnums": 1},
    "donated": {"donate_argnums": 0},
    "reused memory": {"reuse_outputs": True},
    "few graphs": {"max_graphs": 1},
    "strict": {"strict": True},
}


@pytest.mark.parametrize("wrapper", ["vmap", "grad", "jvp"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_ours(device: torch.device, option: str, wrapper: str) -> None:
    power = lambda x, k: (x**k).sin()  # noqa: E731
    k = 3 if option == "static" else 2.5
    function = pygraph.jit(power, **OPTIONS[option])
    around = {
        "vmap": lambda fn, x: vmap(fn, (0, None))(x, k),
        "grad": lambda fn, x: grad(lambda x: fn(x, k).sum())(x),
        "jvp": lambda fn, x: jvp(lambda x: fn(x, k), (x,), (x + 1,)),
    }[wrapper]
    held = []
    for seed in range(3):
        x = inputs(device, seed, 3)[0].abs()
        expected = around(power, x)
        held.append((around(function, x), expected))
        assert x.isfinite().all(), "what is transformed is not consumed"
    for got, expected in held if option != "reused memory" else held[-1:]:
        check_same(got, expected)


# ---- modules and methods -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_modules(device: torch.device, transform: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)).to(device)
    fast = TRANSFORMS[transform](model)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = arguments(device, 0)[0]
    for _ in range(2):
        for expression in (
            lambda m: vmap(m)(x),
            lambda m: jacrev(m)(x),
            lambda m: jvp(m, (x,), (x,)),
            lambda m: grad(lambda s: functional_call(m, s, (x,)).sum())(state),
            lambda m: vmap(grad(lambda s, x: functional_call(m, s, (x,)).sum()), (None, 0))(state, x),
        ):
            check_same(expression(fast), expression(model), strides=False)  # of gradients (docs/limits/README.md)
    check_compiled(fast, lambda: fast(x), lambda: model(x))


def test_a_neural_tangent_kernel(device: torch.device) -> None:
    """The tutorial's: Jacobians of every sample, contracted, and products with vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).to(device)
    fast = pygraph.jit(model)
    state = {name: p.detach() for name, p in model.named_parameters()}
    first, second = arguments(device, 1, rows=3)[0], arguments(device, 2, rows=2)[0]

    def contracted(m: Any) -> torch.Tensor:
        one = lambda s, x: functional_call(m, s, (x[None],))[0]  # noqa: E731
        left = vmap(jacrev(one), (None, 0))(state, first)
        right = vmap(jacrev(one), (None, 0))(state, second)
        pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
        return sum(torch.einsum("naf,mbf->nmab", a.flatten(2), b.flatten(2)) for a, b in pairs)

    for _ in range(2):
        check_same(contracted(fast), contracted(model))
        check_same(pygraph.jit(contracted)(fast), contracted(model))


class Layer:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @pygraph.jit
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).tanh()


def test_methods(device: torch.device) -> None:
    weight = inputs(device, 1)[0]
    layer = Layer(weight)
    x = inputs(device, 0, 3)[0]
    plain = lambda x: (x * layer.weight).tanh()  # noqa: E731
    for _ in range(2):
        check_same(vmap(layer.apply)(x), vmap(plain)(x))
        check_same(jacrev(layer.apply)(x), jacrev(plain)(x))
        layer.weight = layer.weight * 2
    w = inputs(device, 2)[0]

    def loss(w: torch.Tensor) -> torch.Tensor:
        return Layer(w).apply(x).sum()

    check_same(grad(loss)(w), grad(lambda w: (x * w).tanh().sum())(w))
