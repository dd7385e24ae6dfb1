"""Surroundings of a call and of its backward: settings, the locations of tensors, threads, memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, vmap

import pygraph
from pygraph.autograd.site import Site
from pygraph.calls.variants import Variants

Function = Callable[..., Any]


def both(function: Function) -> tuple[Function, Function]:
    return function, pygraph.jit(function)


# -- tensors that a function closes over -------------------------------------------------------------------------------


class Mul(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return gradient * w, gradient * x


class Multiplying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.mul = nn.Parameter(torch.ones(3)), Mul.apply

    def forward(self, x: Tensor) -> Tensor:
        return self.mul(x, self.w).sum()


def test_a_function_whose_apply_was_taken_before(device: torch.device) -> None:
    module, x = Multiplying().to(device), torch.full((3,), 4.0, device=device)
    for f in both(module):
        module.w.grad = None
        f(x).backward()
        assert module.w.grad is not None
        assert module.w.grad.tolist() == [4.0] * 3
        assert grad(lambda w, f=f: functional_call(f, {"w": w}, x))(module.w.detach()).tolist() == [4.0] * 3


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a * self.b).sum()


@pytest.mark.parametrize("tied_first", [True, False])
def test_one_tensor_in_two_places_becomes_two(device: torch.device, tied_first: bool) -> None:
    module, x = Product().to(device), torch.ones(3, device=device)
    two, five = torch.full((3,), 2.0, device=device), torch.full((3,), 5.0, device=device)
    results = []
    for f in both(module):

        def tied(w: Tensor, f: Any = f) -> Tensor:
            return functional_call(f, {"a": w, "b": w}, x)

        def untied(w: Tensor, v: Tensor, f: Any = f) -> Tensor:
            return functional_call(f, {"a": w, "b": v}, x)

        found = {}
        for is_tied in (tied_first, not tied_first, tied_first):
            if is_tied:
                found["tied"] = grad(tied)(two), vmap(tied)(two[None])
            else:
                found["untied"] = *grad(untied, (0, 1))(two, five), vmap(untied)(two[None], five[None])
        results.append({name: [tensor.tolist() for tensor in tensors] for name, tensors in found.items()})
    assert results[0] == results[1]


def test_a_tensor_that_is_replaced_in_one_of_two_places(device: torch.device) -> None:
    x, results = torch.ones(3, device=device), []
    for jit in (lambda f: f, pygraph.jit):

        class Model:
            start = w = torch.full((3,), 2.0, device=device).requires_grad_()

        f = jit(lambda x, m=Model: (x * m.w).sum() + ((m.w - m.start.detach()) ** 2).sum())
        rows = []
        for _ in range(3):
            out = f(x)
            (gradient,) = torch.autograd.grad(out, Model.w)
            rows.append((out.item(), gradient.tolist()))
            Model.w = (Model.w - 0.1 * gradient).detach().requires_grad_()
        results.append(rows)
    assert results[0] == results[1]


def test_a_place_that_is_no_more(device: torch.device) -> None:
    tensors = {"a": torch.ones(3, device=device).requires_grad_()}
    f = pygraph.jit(lambda x: sum((x * tensor).sum() for tensor in tensors.values()))
    x = torch.ones(3, device=device)
    f(x).backward()
    del tensors["a"]
    tensors["b"] = torch.full((3,), 3.0, device=device).requires_grad_()
    assert f(x).item() == 9


class Global(torch.autograd.Function):
    weight: Tensor

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * Global.weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * Global.weight


def test_a_backward_that_reads_what_it_was_not_passed(device: torch.device) -> None:
    for f in both(lambda x: Global.apply(x).sum()):

        def loss(x: Tensor, w: Tensor, f: Any = f) -> Tensor:
            Global.weight = w
            return f(x)

        one = torch.ones(1, device=device)
        assert [grad(loss)(one, k * one).item() for k in (2.0, 3.0, 4.0)] == [2, 3, 4]


# -- settings ----------------------------------------------------------------------------------------------------------


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient @ ctx.saved_tensors[0]


def in_part(x: Tensor) -> Tensor:
    product = x @ x
    with torch.autocast(x.device.type, enabled=False):
        other = x @ x + product.float()
    return other @ x


UNDER_AUTOCAST: dict[str, Function] = {
    "in part": in_part,
    "a custom function": Tanh.apply,
    "products": lambda x: x @ x @ x,
}


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_autocast_of_a_forward_and_of_a_backward(
    device: torch.device, name: str, forward: bool, backward: bool
) -> None:
    torch.manual_seed(0)
    start, found = torch.randn(5, 5, device=device), []
    for f in both(UNDER_AUTOCAST[name]):
        for _ in range(3):
            x = start.clone().requires_grad_()
            with torch.autocast(device.type, torch.bfloat16, enabled=forward, cache_enabled=False):
                out = f(x * 1)
            with torch.autocast(device.type, torch.bfloat16, enabled=backward, cache_enabled=False):
                out.float().sum().backward()
            assert x.grad is not None
            found.append((out.detach(), x.grad))
    for out, gradient in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(gradient, found[0][1])


def test_an_inner_block_without_autocast(device: torch.device) -> None:
    f, x = pygraph.jit(in_part), torch.randn(5, 5, device=device)
    for enabled in (True, False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            for _ in range(2):
                assert torch.equal(f(x), in_part(x))


def thirds(x: Tensor) -> Tensor:
    return (x**3 * torch.ones(3, device=x.device).mul(1 / 3)).sum()


def twos(x: Tensor) -> Tensor:
    return (x**3 * torch.full((3,), 2.0)).sum()


@pytest.mark.parametrize("name", ["dtype", "device"])
def test_defaults_of_a_forward(device: torch.device, name: str) -> None:
    found = []
    for f in both(thirds if name == "dtype" else twos):
        x = torch.ones(3, dtype=torch.float64, device=device).requires_grad_()
        if name == "dtype":
            torch.set_default_dtype(torch.float64)
            try:
                out = f(x)
            finally:
                torch.set_default_dtype(torch.float32)
        else:
            with device:
                out = f(x)
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        found.append(torch.autograd.grad(gradient.sum(), x)[0])
    assert torch.equal(*found)


def test_a_default_dtype_for_a_while(device: torch.device) -> None:
    def in_double(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        third = torch.ones(3, device=x.device) / 3 + torch.full((3,), 0.1, device=x.device)
        torch.set_default_dtype(torch.float32)
        return x.double() * third + torch.ones(3, device=x.device)

    x = torch.ones(3, device=device)
    f = pygraph.jit(in_double)
    for _ in range(2):
        assert torch.equal(f(x), in_double(x))


# -- several backwards of one call -------------------------------------------------------------------------------------


def test_results_are_differentiated_one_after_the_other(device: torch.device) -> None:
    for f in both(lambda x, y: ((x * 2).sin(), y.exp())):
        x, y = (torch.ones(3, device=device).requires_grad_() for _ in range(2))
        one, other = f(x, y)
        one.sum().backward()
        other.sum().backward()
        assert torch.allclose(x.grad, 2 * (2 * x).cos())  # pyright: ignore[reportArgumentType]
        assert torch.allclose(y.grad, y.exp())  # pyright: ignore[reportArgumentType]
        for result in (one, other):
            with pytest.raises(RuntimeError, match="a second time"):
                result.sum().backward()


def test_what_two_results_share_is_gone_after_one(device: torch.device) -> None:
    for f in both(lambda x: ((h := x.exp()).sum(), h * 2)):
        x = torch.ones(3, device=device).requires_grad_()
        loss, other = f(x)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            other.sum().backward()


def test_a_call_that_saves_nothing_is_differentiated_twice(device: torch.device) -> None:
    for f in both(lambda x: x + 1):
        x = torch.ones(3, device=device).requires_grad_()
        out = f(x)
        out.sum().backward()
        (out * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3.0] * 3


def test_a_retained_graph(device: torch.device) -> None:
    for f in both(lambda x: x.exp() * x):
        x = torch.ones(3, device=device).requires_grad_()
        out = f(x).sum()
        first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        torch.autograd.grad(out, x)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(out, x, create_graph=True)


def test_memory_is_given_back_by_a_backward(device: torch.device) -> None:
    f = pygraph.jit(lambda h, mask: h.relu().exp() + mask)
    losses, memory, w = [], [], torch.randn(1000, device=device).requires_grad_()
    for _ in range(3):
        h, mask = w * 2, torch.ones(1000, device=device)
        memory += [h.untyped_storage(), mask.untyped_storage()]
        loss = f(h, mask).sum()
        loss.backward()
        losses.append(loss)
    del h, mask
    gc.collect()
    assert [torch._C._storage_Use_Count(storage._cdata) for storage in memory] == [1] * 6  # pyright: ignore


# -- errors and threads ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_error_of_a_trace_leaves_the_dispatcher_as_it_was(device: torch.device) -> None:
    x = torch.randn(3, 5, device=device)

    def spread(x: Tensor) -> Tensor:
        return (torch.quantile(x, 0.3, -1) ** 2).sum()

    expected = vmap(grad(spread))(x), vmap(jacfwd(spread))(x)
    found = vmap(grad(pygraph.jit(spread)))(x), vmap(jacfwd(pygraph.jit(spread)))(x)
    torch.testing.assert_close(found, expected)
    assert vmap(torch.sin)(torch.ones(3)).tolist() == torch.ones(3).sin().tolist()


def test_a_backward_while_another_thread_compiles(device: torch.device) -> None:
    things = [{"k": [i]} for i in range(1500)]  # that a trace walks
    f = pygraph.jit(lambda x: (x * len(things) * x).sum())
    x = torch.randn(3, device=device).requires_grad_()
    for _ in range(3):
        f(x).backward()
    failures: list[BaseException] = []

    def compile_others() -> None:
        try:
            for size in range(4, 16):
                f(torch.randn(size, device=device).requires_grad_()).backward()
        except BaseException as error:
            failures.append(error)

    other = threading.Thread(target=compile_others, daemon=True)
    other.start()
    while other.is_alive():
        f(x).backward()
    assert not failures


def test_the_cache_is_cleared_by_another_thread_during_a_lookup(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")
    f = pygraph.jit(lambda x: (x * 2).sum())
    x = torch.randn(3, device=device).requires_grad_()
    f(x)
    others: list[threading.Thread] = []
    find = Variants[Any, Any].find

    def find_and_clear(self: Variants[Any, Any], key: Any) -> Any:
        found = find(self, key)
        if isinstance(found, Site):
            others.append(threading.Thread(target=f.cache_clear))
            others[-1].start()
            others[-1].join(timeout=0.2)  # it has to wait for its turn
        return found

    monkeypatch.setattr(Variants, "find", find_and_clear)
    torch.testing.assert_close(f(x), (x * 2).sum())
    assert others
    for other in others:
        other.join()
    torch.testing.assert_close(f(x), (x * 2).sum())
