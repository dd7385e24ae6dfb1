"""Tensors that a function makes to require grad: what it returns has the gradients that it has in eager."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import pygraph
from pygraph.errors import FallbackError

pytestmark = pytest.mark.heap

WEIGHT: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def weight(device: torch.device) -> Generator[None, None, None]:
    """A parameter that functions close over."""
    WEIGHT.append(torch.tensor([0.5, -1.0, 2.0], device=device, requires_grad=True))
    yield
    WEIGHT.clear()


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
    return y.requires_grad_()


def with_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return leaf(x) * 2


def returned_and_used(x: torch.Tensor) -> Any:
    w = leaf(x)
    return w, (w * 3).sum()


def used_with_the_argument(x: torch.Tensor) -> Any:
    w = leaf(x)
    return {"leaf": w, "loss": (w * x).sum()}


def updated(x: torch.Tensor) -> Any:
    w = leaf(x)
    with torch.no_grad():
        w.add_(1)
    return w * x, w.detach()


def view_updated(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 2, device=x.device)
    y[:, 0] = leaf(x)
    return y


def gradient_inside(x: torch.Tensor) -> Any:
    w = leaf(x)
    return torch.autograd.grad((w**2).sum(), w)[0]


def gradient_with_graph(x: torch.Tensor) -> Any:
    w = leaf(x)
    return torch.autograd.grad((w**3).sum(), w, create_graph=True)[0]


def penalty(x: torch.Tensor) -> Any:
    w = (x.detach() * 2).requires_grad_()
    (gradient,) = torch.autograd.grad(((w * WEIGHT[0]) ** 2).sum(), w, create_graph=True)
    return (gradient.norm() - 1) ** 2


def backward_inside(x: torch.Tensor) -> Any:
    w = leaf(x)
    (w * 2).sum().backward()
    return w, w.grad


def gradient_left_on_it(x: torch.Tensor) -> Any:
    w = leaf(x)
    (w * 2).sum().backward()
    return w.requires_grad_(False)


def gradient_stored(x: torch.Tensor) -> Any:
    y = torch.zeros(3, device=x.device)
    y.grad = x.detach() * 2
    return y, x + 1


def attribute(x: torch.Tensor) -> Any:
    y = x * 2
    y.tag = "mine"
    return y


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "computed of a leaf": lambda x: leaf(x) * 2,
    "a leaf": leaf,
    "a view made a leaf": lambda x: x.detach().requires_grad_(),
    "a view of a view": lambda x: x.view(3, 1).detach().requires_grad_(),
    "a copy that requires grad": lambda x: x.clone().requires_grad_(),
    "a result that requires grad": lambda x: (x * 2).requires_grad_(),
    "a factory": lambda x: torch.full((4,), 2.0, requires_grad=True, device=x.device),
    "a factory beside": lambda x: (x * 2, torch.ones(4, requires_grad=True, device=x.device)),
    "a literal": lambda x: torch.tensor([1.0, 2.0, 3.0], requires_grad=True, device=x.device) * x,
    "a parameter": lambda x: torch.nn.Parameter(x.detach() * 2),
    "computed of a parameter": lambda x: torch.nn.Parameter(x.detach() * 2) * 3,
    "depends on the argument's": lambda x: torch.zeros(3, device=x.device).requires_grad_(x.requires_grad),
    "under no_grad": without_grad,
    "under enable_grad": with_grad,
    "returned and used": returned_and_used,
    "used with the argument": used_with_the_argument,
    "a part of it": lambda x: (leaf(x)[1:], x * 1),
    "twice": lambda x: [leaf(x)] * 2,
    "updated": updated,
    "written into another": view_updated,
    "detached": lambda x: (leaf(x) * 2).detach_(),
    "beside a parameter": lambda x: (leaf(x), x * WEIGHT[0]),
    "with a parameter": lambda x: leaf(x) * WEIGHT[0],
    "two apart": lambda x: (leaf(x) * 2, x * WEIGHT[0]),
    "gradient inside": gradient_inside,
    "gradient with graph": gradient_with_graph,
    "penalty": penalty,
    "backward inside": backward_inside,
    "gradient left on it": gradient_left_on_it,
    "gradient stored": gradient_stored,
    "attribute": attribute,
}


def described(result: Any) -> list[Any]:
    """Values, and what autograd knows of every tensor."""
    found: list[Any] = []
    for value in pytree.tree_leaves(result):
        has_gradient = value.is_leaf and value.grad is not None
        parameter = isinstance(value, torch.nn.Parameter)
        found.append((value.tolist(), value.requires_grad, value.is_leaf, has_gradient, parameter, vars(value)))
    return found


def outcome(fn: Callable[[torch.Tensor], Any], device: torch.device, requires_grad: bool) -> Any:
    """A call, and all gradients after a backward of what it returns."""
    x = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=requires_grad)
    WEIGHT[0].grad = None
    result = fn(x)
    seen = described(result)
    tensors = list({id(value): value for value in pytree.tree_leaves(result)}.values())
    differentiable = [value.sum() for value in tensors if value.requires_grad]
    if differentiable:
        sum(differentiable).backward()  # pyright: ignore
    leaves = [x, WEIGHT[0], *(value for value in tensors if value.is_leaf)]
    return seen, [None if value.grad is None else value.grad.tolist() for value in leaves]


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_have_the_gradients_that_they_have_in_eager(
    name: str, requires_grad: bool, device: torch.device
) -> None:
    fn = FUNCTIONS[name]
    expected = outcome(fn, device, requires_grad)
    for transform in (pygraph.jit, pygraph.devicify):
        fast = transform(fn)
        assert [outcome(fast, device, requires_grad) for _ in range(3)] == [expected] * 3


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_so_it_is_under_every_grad_mode(name: str, mode: Callable[[], Any], device: torch.device) -> None:
    fn = FUNCTIONS[name]
    fast = pygraph.jit(fn)

    def seen(called: Callable[..., Any]) -> Any:
        x = torch.tensor([1.0, 2.0, 3.0], device=device)
        try:
            with mode():
                return described(called(x))
        except RuntimeError:  # as a gradient where there is no graph
            return "an error"

    assert [seen(fast) for _ in range(2)] == [seen(fn)] * 2


@pytest.mark.parametrize("name", ["gradient inside", "detached", "penalty", "two apart", "with a parameter"])
def test_what_nobody_else_can_reach_costs_no_graph(name: str, device: torch.device) -> None:
    fast = pygraph.jit(FUNCTIONS[name])
    x = torch.ones(3, device=device)
    fast(x)
    assert not fast.explain().to_dict()["fallbacks"]
    assert fast.cache_info().captures


@pytest.mark.parametrize("name", ["a leaf", "computed of a leaf", "returned and used", "a factory beside", "attribute"])
def test_what_others_can_reach_runs_as_it_is_with_a_reason(name: str, device: torch.device) -> None:
    fast = pygraph.jit(FUNCTIONS[name])
    x = torch.ones(3, device=device)
    fast(x)
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert "made" in fallback["reason"] or "carries" in fallback["reason"]
    with pytest.raises(FallbackError, match=r"made|carries"):
        pygraph.jit(FUNCTIONS[name], strict=True)(x)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_below_transforms_of_torch_func(requires_grad: bool, device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0], requires_grad=True, device=x.device)

    x = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=requires_grad)
    rows = torch.ones(2, 3, device=device, requires_grad=requires_grad)
    for _ in range(2):
        for wrap, given in (
            (torch.func.vmap, rows),
            (lambda f: torch.func.grad(lambda x: f(x).sum()), x),
            (lambda f: lambda x: torch.func.jvp(f, (x,), (x,)), x),
            (lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum())), rows),
        ):
            wrap: Any
            assert described(wrap(pygraph.jit(fn))(given)) == described(wrap(fn)(given))


def test_graphed_callables(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> Any:
        return x * 2, torch.ones(2, device=x.device, requires_grad=True)

    x = torch.ones(3, device=device, requires_grad=True)
    fast = pygraph.make_graphed_callables(fn, (x,))
    y, made = fast(x)
    (y.sum() + made.sum()).backward()
    assert made.is_leaf
    assert made.grad.tolist() == [1, 1]
    assert x.grad is not None


def test_a_step_that_stores_or_returns_a_leaf(device: torch.device) -> None:
    def outcomes(transform: Callable[[Any], Any]) -> list[Any]:
        model = torch.nn.Linear(3, 1).to(device)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.zero_()

        def step(x: torch.Tensor) -> Any:
            model.zero_grad()
            w = x.detach().requires_grad_()
            model(w).sum().backward()
            model.last = w * 2
            return w, w.grad

        called = transform(step)
        found: list[Any] = []
        for _ in range(4):
            w, gradient = called(torch.ones(2, 3, device=device))
            found.append((described((w, gradient, model.last)), model.weight.grad.tolist()))
        return found

    assert outcomes(pygraph.jit) == outcomes(lambda fn: fn)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks for it
def test_a_leaf_below_torch_compile(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> Any:
        return x * 2, (x.detach() * 3).requires_grad_()

    fast = torch.compile(fn, backend=pygraph.backend)
    x = torch.ones(3, device=device, requires_grad=True)
    y, made = fast(x)
    (y.sum() + made.sum()).backward()
    assert made.is_leaf
    assert made.grad.tolist() == [1, 1, 1]
    assert x.grad.tolist() == [2, 2, 2]  # pyright: ignore
