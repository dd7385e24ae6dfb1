"""Custom autograd functions and operations: their own derivatives and batching rules, in graphs and through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad, jvp, vmap

import pygraph
from tests.steps import assert_same, check_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # by torch, for forward derivatives
]

# Every derivative below is wrong on purpose, so that the one of the operations inside would be noticed.


class OldStyle(Function):
    """``forward`` with a context, which torch.func does not take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


class StraightThrough(Function):
    """Rounds, and passes gradients on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class AllRules(Function):
    """With rules of its own for ``vmap`` and ``jvp``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 5

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return AllRules.apply(x) + 1, in_dims[0]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0] * 7


class Once(Function):
    """Not differentiable twice."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


class InPlace(Function):
    """Writes to its argument."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 11


class Several(Function):
    """A number as argument, and a result without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, k: Any) -> Any:
        return x * k, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.k = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        return gradient * ctx.k * 5, None


@torch.library.custom_op("pygraph_tests::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return torch.sin(x)


@sine.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos() * 3,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
sine.register_vmap(lambda info, in_dims, x: (sine(x) + 1, in_dims[0]))


@torch.library.custom_op("pygraph_tests::increase", mutates_args=("x",))
def increase(x: Tensor, by: Tensor) -> None:
    x.add_(by)


@increase.register_fake
def _(x: Tensor, by: Tensor) -> None:
    return None


@torch.library.custom_op("pygraph_tests::undescribed", mutates_args=())
def undescribed(x: Tensor) -> Tensor:
    return torch.sin(x)


_LIBRARY = torch.library.Library("pygraph_tests_too", "DEF")
_LIBRARY.define("twice(Tensor x) -> Tensor")
_LIBRARY.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
_LIBRARY.define("thrice(Tensor x) -> Tensor")
_LIBRARY.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "old style": OldStyle.apply,
    "straight-through": StraightThrough.apply,
    "all rules": AllRules.apply,
    "once differentiable": Once.apply,
    "in place": lambda x: InPlace.apply(x * 1.0),
    "several results": lambda x: Several.apply(x, 3.0)[0],
    "custom_op": sine,
    "composite operation": torch.ops.pygraph_tests_too.twice,
    "operation": torch.ops.pygraph_tests_too.thrice,
}


def total(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x).sum()


def by_autograd(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(fn(leaf).sum(), leaf)[0]

    return gradient


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "none": lambda fn: fn,
    "autograd": by_autograd,
    "grad": lambda fn: grad(total(fn)),
    "vmap": vmap,
    "vmap(grad)": lambda fn: vmap(grad(total(fn))),
    "jvp": lambda fn: lambda x: jvp(fn, (x,), (x + 1,)),
}

# Rules that eager torch (2.11 to 2.13) asks for and these do not have.
REFUSED = {
    "old style": {"grad", "vmap", "vmap(grad)", "jvp"},
    "straight-through": {"jvp"},
    "several results": {"jvp"},
    "once differentiable": {"vmap", "vmap(grad)", "jvp"},
    "in place": {"vmap", "vmap(grad)", "jvp"},
    "custom_op": {"grad", "vmap(grad)"},
    "operation": {"autograd", "grad", "vmap(grad)", "jvp"},
}
CASES = [(name, transform) for name in FUNCTIONS for transform in TRANSFORMS if transform not in REFUSED.get(name, ())]


@pytest.mark.parametrize(("name", "transform"), CASES)
def test_transforms_inside_are_one_graph(name: str, transform: str, device: torch.device) -> None:
    torch.manual_seed(1)
    check_steps(TRANSFORMS[transform](FUNCTIONS[name]), (torch.randn(3, 4, device=device),), device, steps=3)


@pytest.mark.parametrize(("name", "transform"), CASES)
def test_transforms_outside_give_what_eager_gives(name: str, transform: str, device: torch.device) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 4, device=device)
    fast = pygraph.jit(FUNCTIONS[name])
    for _ in range(3):
        assert_same(TRANSFORMS[transform](fast)(x), TRANSFORMS[transform](FUNCTIONS[name])(x), device)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "operation"])
def test_backward_through_a_graph(name: str, device: torch.device) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 4, device=device)
    fast = pygraph.jit(total(FUNCTIONS[name]))
    for _ in range(3):
        grads: list[Any] = []
        for fn in (fast, total(FUNCTIONS[name])):
            leaf = x.clone().requires_grad_()
            fn(leaf).backward()
            grads.append(leaf.grad)
        assert_same(*grads, device)


def test_a_function_keeps_a_live_number(device: torch.device) -> None:
    def fn(x: Tensor, k: float) -> Tensor:
        return grad(lambda x: Several.apply(x, k)[0].sum())(x)

    check_steps(fn, (torch.randn(3, device=device), 2.0), device, lambda args, out, i: (args[0], args[1] + 1), steps=4)


def test_a_function_that_writes_to_an_argument(device: torch.device) -> None:
    check_steps(InPlace.apply, (torch.ones(3, device=device),), device, steps=4)


@pytest.mark.parametrize("target", ["argument", "view of an argument", "value"])
def test_an_operation_that_writes(target: str, device: torch.device) -> None:
    def fn(x: Tensor, by: Tensor) -> Tensor:
        written = {"argument": x, "view of an argument": x[1], "value": x * 2}[target]
        increase(written, by)
        return written + x

    check_steps(fn, (torch.ones(3, 4, device=device), torch.ones((), device=device)), device, steps=4)


def test_an_operation_without_a_description_runs_as_it_is(device: torch.device) -> None:
    fast = pygraph.jit(undescribed)
    x = torch.ones(3, device=device)
    for _ in range(2):
        assert torch.equal(fast(x), x.sin())
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert "register_fake" in fallback["reason"]


_SEEN: list[list[float]] = []
_LIBRARY.define("show(Tensor x) -> ()")
_LIBRARY.impl("show", lambda x: _SEEN.append(x.tolist()), "CompositeExplicitAutograd")
torch.library.register_fake("pygraph_tests_too::show", lambda x: None, lib=_LIBRARY)


def test_an_operation_that_returns_nothing_runs_at_every_call(device: torch.device) -> None:
    """Nobody uses what it makes, and what it does is not known: it is neither dropped nor recorded."""

    @pygraph.jit
    def fn(x: Tensor) -> Tensor:
        torch.ops.pygraph_tests_too.show(x + 1)
        doubled = x * 2
        torch.ops.pygraph_tests_too.show(doubled)
        return doubled.relu()

    fn(torch.zeros(1, device=device))
    del _SEEN[:]
    for i in range(3):
        assert fn(torch.full((1,), float(i), device=device)).item() == 2 * i
    assert _SEEN == [[1.0], [0.0], [2.0], [2.0], [3.0], [4.0]]
    assert any("returns nothing" in fallback["reason"] for fallback in fn.explain().to_dict()["fallbacks"])


def test_assertions_hold_at_every_call() -> None:
    """On the emulated device alone: one that fails on a GPU ends the process's use of it."""
    x = torch.ones(3, device=pygraph.default_device())
    if x.is_cuda:
        pytest.skip("a failed assertion breaks the CUDA context")

    @pygraph.jit
    def fn(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all())
        return x * 2

    for _ in range(3):
        assert torch.equal(fn(x), x * 2)
        with pytest.raises(RuntimeError, match="nonzero"):
            fn(-x)
