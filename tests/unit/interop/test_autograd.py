"""Autograd around calls of transformed functions: its functions, its hooks, checkpoints, forward mode, anomalies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import checkpoint

import pygraph
from tests.unit.interop.common import TRANSFORMS, arguments, check_compiled, check_same

pytestmark = pytest.mark.rotates


def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sin() + (x.exp() * y).mean() * y


def leaves(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = arguments(device, seed)
    return x.requires_grad_(), y.requires_grad_()


@pytest.fixture(params=["indirect∘devicify", "jit"])
def function(request: pytest.FixtureRequest, device: torch.device) -> Any:
    """`fn`, transformed, and called without gradients before."""
    transformed = TRANSFORMS[request.param](fn)
    with torch.no_grad():
        for _ in range(3):
            transformed(*arguments(device, 9))
    return transformed


@pytest.fixture
def jitted(device: torch.device) -> Any:
    transformed = pygraph.jit(fn)
    with torch.no_grad():
        for _ in range(3):
            transformed(*arguments(device, 9))
    return transformed


def check_afterwards(function: Any, device: torch.device) -> None:
    args = arguments(device, 8)
    check_compiled(function, lambda: function(*args), lambda: fn(*args))


# ---- reverse mode ----------------------------------------------------------------------------------------------


def test_backward(device: torch.device, function: Any) -> None:
    for seed in range(3):
        gradients = []
        for f in (function, fn):
            x, y = leaves(device, seed)
            out = f(x, y)
            assert out.requires_grad
            out.square().sum().backward()
            gradients.append((out.detach(), x.grad, y.grad))
        check_same(*gradients)
    check_afterwards(function, device)


def test_gradients_for_some_arguments(device: torch.device, function: Any) -> None:
    for mask in ((True, False), (False, True), (False, False)):
        gradients = []
        for f in (function, fn):
            args = tuple(t.requires_grad_(on) for t, on in zip(arguments(device, 1), mask, strict=True))
            out = f(*args)
            if any(mask):
                out.sum().backward()
            gradients.append((out, [t.grad for t in args]))
        check_same(*gradients)


def test_gradients_accumulate_over_several_calls_and_backwards(device: torch.device, function: Any) -> None:
    gradients = []
    for f in (function, fn):
        x, y = leaves(device)
        total = sum((f(x * k, y) for k in (1.0, 2.0, 3.0)), torch.zeros((), device=device)).sum()
        total.backward(retain_graph=True)
        total.backward()
        gradients.append((x.grad, y.grad))
    check_same(*gradients)


def test_two_backwards_need_retain_graph(device: torch.device, function: Any) -> None:
    for f in (function, fn):
        x, y = leaves(device)
        out = f(x, y).sum()
        out.backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()


def test_higher_orders(device: torch.device, function: Any) -> None:
    results = []
    for f in (function, fn):
        x, y = leaves(device)
        first = torch.autograd.grad(f(x, y).sum(), (x, y), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, y), create_graph=True)
        third = torch.autograd.grad(second[1].sum(), x)
        results.append((first, second, third))
    check_same(*results)


def test_an_argument_that_is_updated_before_backward(device: torch.device, function: Any) -> None:
    for f in (function, fn):
        x, y = leaves(device)
        out = f(x, y).sum()
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_gradcheck(device: torch.device, function: Any) -> None:
    if device.type == "emu":  # gradcheck perturbs memory through NumPy
        device = torch.device("cpu")
    x, y = (t.double().detach().requires_grad_() for t in arguments(device, 0))
    assert torch.autograd.gradcheck(function, (x, y), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (x[:1].detach().requires_grad_(), y))


FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "jacobian": torch.autograd.functional.jacobian,
    "jacobian, created": lambda f, args: torch.autograd.functional.jacobian(f, args, create_graph=True),
    "jacobian, vectorised": lambda f, args: torch.autograd.functional.jacobian(f, args, vectorize=True),
    "jacobian, forward": lambda f, args: torch.autograd.functional.jacobian(
        f, args, vectorize=True, strategy="forward-mode"
    ),
    "hessian": lambda f, args: torch.autograd.functional.hessian(lambda x, y: f(x, y).sum(), args),
    "hessian, forward": lambda f, args: torch.autograd.functional.hessian(
        lambda x, y: f(x, y).sum(), args, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "vjp": lambda f, args: torch.autograd.functional.vjp(f, args, args[0]),
    "jvp": lambda f, args: torch.autograd.functional.jvp(f, args, args),
    "vhp": lambda f, args: torch.autograd.functional.vhp(lambda x, y: f(x, y).sum(), args, args),
    "hvp": lambda f, args: torch.autograd.functional.hvp(lambda x, y: f(x, y).sum(), args, args),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_autograd_functional(device: torch.device, jitted: Any, name: str) -> None:
    for seed in range(2):
        args = arguments(device, seed)
        check_same(FUNCTIONAL[name](jitted, args), FUNCTIONAL[name](fn, args))
    check_afterwards(jitted, device)


# ---- forward mode ----------------------------------------------------------------------------------------------


def test_forward_mode(device: torch.device, function: Any) -> None:
    for seed in range(2):
        results = []
        for f in (function, fn):
            (x, y), (dx, dy) = arguments(device, seed), arguments(device, seed + 5)
            with forward_ad.dual_level():
                both = forward_ad.unpack_dual(f(forward_ad.make_dual(x, dx), forward_ad.make_dual(y, dy)))
                one = forward_ad.unpack_dual(f(forward_ad.make_dual(x, dx), y))
                none = forward_ad.unpack_dual(f(x, y))
                results.append((tuple(both), tuple(one), tuple(none)))
        check_same(*results)
    check_afterwards(function, device)


def test_forward_over_reverse(device: torch.device, jitted: Any) -> None:
    results = []
    for f in (jitted, fn):
        x, y = leaves(device)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, y.detach().expand_as(x))
            (gradient,) = torch.autograd.grad(f(dual, y).sum(), dual, create_graph=True)
            results.append(tuple(forward_ad.unpack_dual(gradient)))
    check_same(*results)


# ---- modes -----------------------------------------------------------------------------------------------------

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(device: torch.device, function: Any, mode: str) -> None:
    for _ in range(3):
        x, y = leaves(device)
        with MODES[mode]():
            got, expected = function(x, y), fn(x, y)
        check_same(got, expected)
        assert got.is_inference() == expected.is_inference()


def test_modes_inside_a_function(device: torch.device) -> None:
    def mixed(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.no_grad():
            frozen = x * y
        with torch.enable_grad():
            kept = x.cos()
        return frozen, kept * frozen, y.detach() * x, x.detach()

    jitted = pygraph.jit(mixed)
    for grad in (True, False):
        for _ in range(2):
            results = []
            for f in (jitted, mixed):
                x, y = leaves(device)
                with torch.set_grad_enabled(grad):
                    out = f(x, y)
                results.append((out, [x.grad, y.grad]))
                if out[1].requires_grad:
                    (out[1] + out[2]).sum().backward()
                    results[-1] = (out, [x.grad, y.grad])
            check_same(*results)


# ---- hooks -----------------------------------------------------------------------------------------------------


def test_tensor_hooks(device: torch.device, function: Any) -> None:
    results = []
    for f in (function, fn):
        seen: list[torch.Tensor] = []
        x, y = leaves(device)
        middle = x * 2
        middle.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        x.register_hook(lambda grad: grad * 10)
        y.register_post_accumulate_grad_hook(lambda t, seen=seen: seen.append(t.grad.clone()))
        out = f(middle, y)
        out.register_hook(lambda grad: grad + 1)
        out.retain_grad()
        out.sum().backward()
        results.append((seen, x.grad, y.grad, out.grad))
    check_same(*results)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_multi_grad_hooks(device: torch.device, jitted: Any, mode: Any) -> None:
    results = []
    for f in (jitted, fn):
        seen: list[Any] = []
        x, y = leaves(device)
        a, b = f(x, y), f(y.expand(3, 4), y)
        torch.autograd.graph.register_multi_grad_hook(
            (a, b), lambda grads, seen=seen: seen.append(torch.utils._pytree.tree_map(torch.clone, grads)), mode=mode
        )
        (a * b).sum().backward()
        results.append((seen, x.grad, y.grad))
    check_same(*results)


def test_saved_tensors_hooks(device: torch.device, function: Any) -> None:
    """What is packed is autograd's own affair; that all of it comes back through the hooks is not."""
    results = []
    for f in (function, fn):
        packed = unpacked = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal packed
            packed += 1
            return tensor.detach().clone()

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal unpacked
            unpacked += 1
            return tensor

        x, y = leaves(device)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = f(x, y)
        out.sum().backward()
        assert packed >= 1
        assert unpacked >= 1
        results.append((out, x.grad, y.grad))
    check_same(*results)


def test_saved_on_the_cpu(device: torch.device, jitted: Any) -> None:
    results = []
    for f in (jitted, fn):
        x, y = leaves(device)
        with torch.autograd.graph.save_on_cpu():
            out = f(x, y)
        out.sum().backward()
        results.append((out, x.grad, y.grad))
    check_same(*results)


def test_hooks_of_a_module(device: torch.device) -> None:
    results = []
    for transform in (pygraph.jit, lambda module: module):
        seen: list[Any] = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
        function: Any = transform(model)
        function.register_full_backward_pre_hook(lambda m, grads, seen=seen: seen.append(("before", grads)))
        function.register_full_backward_hook(lambda m, ins, outs, seen=seen: seen.append(("after", ins, outs)))
        model[0].register_full_backward_hook(lambda m, ins, outs: tuple(g * 2 for g in ins))
        function.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        function.register_forward_hook(lambda m, args, out: out * 3)
        for seed in range(2):
            x = arguments(device, seed)[0].requires_grad_()
            out = function(x)
            out.square().sum().backward()
            seen.append((out, x.grad, [p.grad for p in model.parameters()]))
        with torch.no_grad():
            seen += [function(x), function(x)]
        results.append(seen)
    check_same(*results)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("random", [True, False])
def test_checkpoints(device: torch.device, reentrant: bool, random: bool) -> None:
    def work(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.dropout(fn(x, y), 0.5, train=True) if random else fn(x, y)

    results = []
    function = pygraph.jit(work)
    for _ in range(2):
        results = []
        for f in (function, work):
            x, y = leaves(device)
            torch.manual_seed(0)
            hidden = checkpoint.checkpoint(f, x, y, use_reentrant=reentrant, preserve_rng_state=True)
            out = checkpoint.checkpoint(f, hidden, y, use_reentrant=reentrant)
            out.sum().backward()
            results.append((out, x.grad, y.grad))
        check_same(*results)


@pytest.mark.parametrize("operation", [torch.relu, torch.tanh, torch.exp, lambda x: x.softmax(-1)])
def test_checkpoints_of_what_saves_its_result(device: torch.device, operation: Any) -> None:
    """Its node must not hold the very result, which holds the node: that would last for ever, and was refused."""
    function = pygraph.jit(lambda x, y: operation(x * y) * y)
    for seed in range(3):
        results = []
        for f in (function, function.fn):
            x, y = leaves(device, seed)
            checkpoint.checkpoint(f, x, y, use_reentrant=False).sum().backward()
            results.append((x.grad, y.grad))
        check_same(*results)
    assert function.explain().to_dict()["fallbacks"] == []


def test_checkpoint_inside_a_jitted_function(device: torch.device) -> None:
    def work(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return checkpoint.checkpoint(fn, x, y, use_reentrant=False) * 2

    function = pygraph.jit(work)
    for _ in range(2):
        results = []
        for f in (function, work):
            x, y = leaves(device)
            out = f(x, y)
            out.sum().backward()
            results.append((out, x.grad, y.grad))
        check_same(*results)
    args = arguments(device, 3)
    with torch.no_grad():
        check_same((function(*args), function(*args)), (work(*args), work(*args)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode(device: torch.device, function: Any) -> None:
    with torch.autograd.detect_anomaly():
        results = []
        for f in (function, fn):
            x, y = leaves(device)
            f(x, y).sum().backward()
            results.append((x.grad, y.grad))
        check_same(*results)
    check_afterwards(function, device)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomaly_mode_finds_what_is_not_a_number(device: torch.device) -> None:
    root = lambda x: (x * 0).sqrt() * 0  # noqa: E731
    with torch.autograd.detect_anomaly():
        for f in (pygraph.jit(root), root):
            x = torch.ones(3, device=device, requires_grad=True)
            out = f(x).sum()
            with pytest.raises(RuntimeError, match="returned nan values"):
                out.backward()


def test_anomaly_mode_that_is_switched_on_and_off(device: torch.device) -> None:
    """A graph looks at no values. A call while it is on runs as it is, and tells of no error that there is not."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        root = (x.detach().requires_grad_() * 0).sqrt().sum()
        return torch.func.grad(lambda y: (y * 0).sqrt().nan_to_num().sum())(x).nan_to_num() + root.detach()

    def outside(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(outer(leaf).sum(), leaf)
        return found

    outer = pygraph.jit(lambda x: ((x * 0).sqrt() * 0).nan_to_num())
    inner = pygraph.jit(inside)
    x = torch.ones(3, device=device)
    for function, jitted in ((inner, inner), (outside, outer)):
        for is_on in (True, False, False, True, True, False):
            with torch.autograd.set_detect_anomaly(is_on):
                if is_on:
                    with pytest.warns(UserWarning, match="Error detected") as warned:  # noqa: SIM117
                        with pytest.raises(RuntimeError, match="returned nan values"):
                            function(x)
                    assert len(warned) == 1
                else:
                    function(x)
        reasons = [fallback["reason"] for fallback in jitted.explain().to_dict()["fallbacks"]]
        assert any("anomaly detection is on" in reason for reason in reasons)
        captures = jitted.cache_info().captures
        assert captures > 0
        function(x)
        assert jitted.cache_info().captures == captures
        assert [fallback["reason"] for fallback in jitted.explain().to_dict()["fallbacks"]] == reasons


# ---- what results are ------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """Its backward is a little wrong, so that it is seen to be used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 7 * x**2


RESULTS: dict[str, Callable[..., Any]] = {
    "an argument": lambda x, y: (x, x * y),
    "a view": lambda x, y: (x[1:], y.expand(2, 4), x.t()),
    "ignored": lambda x, y: y.cos(),
    "integers": lambda x, y: ((x > 0).sum(), x.argmax(), x.long(), x * y),
    "constant": lambda x, y: (torch.ones(2, device=x.device), x.sum()),
    "detached": lambda x, y: (x.detach() * 2, x * y.detach()),
    "updated temporary": lambda x, y: (x * 2).mul_(y).add_(1),
    "a custom Function": lambda x, y: Cube.apply(x * y),
    "a tree with None": lambda x, y: {"a": [x.sin(), None], "b": (y, 3)},
    "twice the same": lambda x, y: (lambda z: (z, z))(x * y),
    "two views of one": lambda x, y: tuple((x * y).unbind(0)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_every_kind(device: torch.device, name: str) -> None:
    work = RESULTS[name]
    function = pygraph.jit(work)
    for seed in range(2):
        results = []
        for f in (function, work):
            x, y = leaves(device, seed)
            out = f(x, y)
            tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            views = [(t._base is not None, t.is_leaf) for t in tensors]
            sum(t.square().sum() for t in tensors if t.requires_grad).backward()
            results.append((out, x.grad, y.grad, views))
        check_same(*results)


def test_an_update_of_an_argument(device: torch.device) -> None:
    def work(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(y)
        return x.sin()

    function = pygraph.jit(work)
    for _ in range(2):
        results = []
        for f in (function, work):
            x, y = leaves(device)
            middle = x * 2
            out = f(middle, y)
            (out.sum() + middle.sum()).backward()
            results.append((out, middle, x.grad, y.grad))
        check_same(*results)
    for f in (function, work):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            f(*leaves(device))


def test_closed_over_parameters_get_gradients(device: torch.device) -> None:
    for _ in range(2):
        results = []
        for transform in (pygraph.jit, lambda f: f):
            torch.manual_seed(0)
            layer = nn.Linear(4, 4).to(device)
            weight = arguments(device, 4)[1].requires_grad_()
            function: Any = transform(lambda x, layer=layer, weight=weight: layer(x) * weight)
            for seed in range(2):
                function(arguments(device, seed)[0]).square().sum().backward()
            results.append([p.grad for p in (*layer.parameters(), weight)])
        check_same(*results)


def test_a_training_loop(device: torch.device) -> None:
    results = []
    for transform in (pygraph.jit, lambda module: module):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)).to(
            device
        )
        function: Any = transform(model)
        optimizer = torch.optim.Adam(function.parameters(), 0.01)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            x, y = arguments(device, step)
            loss = (function(x) - y).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(function.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
        function.eval()
        with torch.no_grad():
            losses += [function(x), function(x)]
        results.append((losses, model.state_dict()))
    check_same(*results)
