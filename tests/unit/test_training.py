"""Whole training steps: one graph without a synchronisation that equals eager over 50 steps from the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value
from torch.optim import adagrad, adam, adamw, nadam, radam, rmsprop, sgd
from torch.utils.checkpoint import checkpoint

import pygraph
from tests.steps import assert_one_graph, assert_same, check_steps, history, no_synchronization, same_arguments

pytestmark = pytest.mark.rotates

Tensors = dict[str, Tensor]


class Net(nn.Module):
    """A small model with dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a norm has no gradient but rounding, which Adam makes as large as any.
        self.body = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make(device: torch.device, model: Callable[[], nn.Module] = Net) -> tuple[nn.Module, Tensors, Tensors]:
    """A model with its parameters and buffers."""
    torch.manual_seed(1)
    net = model().to(device)
    return net, {k: v.detach() for k, v in net.named_parameters()}, dict(net.named_buffers())


def batch(device: torch.device, size: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(size, 4, device=device), torch.randint(0, 3, (size,), device=device)


def loss_of(net: nn.Module) -> Callable[..., Tensor]:
    return lambda params, buffers, x, y: F.cross_entropy(functional_call(net, (params, buffers), (x,)), y)


def zeros(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def decayed(step: int) -> float:
    """A learning rate that is another number in every step."""
    return 0.1 / (step + 2)


# ---- the forms of a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [(), (0,)], ids=["kept", "donated"])
def test_new_parameters_are_returned(device: torch.device, donate: tuple[int, ...]) -> None:
    net, params, buffers = make(device)
    loss = loss_of(net)

    def step(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float) -> Any:
        grads, value = grad_and_value(loss)(params, buffers, x, y)
        return {name: params[name] - rate * grads[name] for name in params}, value

    check_steps(step, (params, buffers, *batch(device), 0.1), device,
                lambda args, out, i: (out[0], *args[1:4], decayed(i)), donate_argnums=donate)  # fmt: skip


def test_parameters_are_updated_in_place(device: torch.device) -> None:
    net, params, buffers = make(device)
    loss = loss_of(net)

    def step(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float) -> Tensor:
        grads, value = grad_and_value(loss)(params, buffers, x, y)
        with torch.no_grad():
            for name in params:
                params[name].add_(grads[name], alpha=-rate)
        return value

    check_steps(step, (params, buffers, *batch(device), 0.1), device, lambda args, out, i: (*args[:4], decayed(i)))


def test_backward_on_leaves_made_inside(device: torch.device) -> None:
    net, params, buffers = make(device)
    loss = loss_of(net)

    def step(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float) -> Any:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        value = loss(leaves, buffers, x, y)
        value.backward()
        with torch.no_grad():
            return {name: leaf - rate * leaf.grad for name, leaf in leaves.items()}, value.detach()

    check_steps(step, (params, buffers, *batch(device), 0.1), device,
                lambda args, out, i: (out[0], *args[1:4], decayed(i)))  # fmt: skip


def test_a_closure_over_a_module(device: torch.device) -> None:
    """Parameters that the function closes over are updated where they are, running statistics too."""
    first, _, _ = make(device)
    second, _, _ = make(device)

    def step_of(net: nn.Module) -> Callable[..., Tensor]:
        params = list(net.parameters())

        def step(x: Tensor, y: Tensor, rate: float) -> Tensor:
            value = F.cross_entropy(net(x), y)
            grads = torch.autograd.grad(value, params)
            with torch.no_grad():
                for param, gradient in zip(params, grads, strict=True):
                    param.sub_(rate * gradient)
            return value.detach()

        return step

    start = (*batch(device), 0.1)

    def following(args: Any, out: Any, i: int) -> Any:
        return (*args[:2], decayed(i))

    expected = history(step_of(first), start, following, 50)
    fast = pygraph.jit(step_of(second))
    assert_same(history(fast, start, following, 50), expected, device)
    assert_same(second.state_dict(), first.state_dict(), device)
    assert_one_graph(fast, 50)


def ordinary_step(net: nn.Module, optimizer: torch.optim.Optimizer, clears: str) -> Callable[..., Tensor]:
    """A step as in every tutorial; gradients are cleared before it, after it, or filled with zeros before it."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        if clears != "after":
            optimizer.zero_grad(set_to_none=clears == "before")
        value = F.cross_entropy(net(x), y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        if clears == "after":
            optimizer.zero_grad()
        return value.detach()

    return step


def train_twice(
    device: torch.device, make_optimizer: Callable[..., Any], clears: str, after: Callable[[Any, int], None], calls: int
) -> tuple[Any, list[Any]]:
    """Train a model in eager and another by a jitted step; the step, and what both have come to."""
    found: list[Any] = []
    fast: Any = None
    data = batch(device)
    for _ in range(2):
        net, _, _ = make(device)
        optimizer = make_optimizer(net.parameters())
        if clears == "with zeros":
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
        step = ordinary_step(net, optimizer, clears)
        if found:
            step = fast = pygraph.jit(step)
        torch.manual_seed(0)
        values: list[Tensor] = []
        for call in range(calls):
            values.append(step(*data))
            after(optimizer, call)
        found.append((values, net.state_dict(), optimizer.state_dict()))
    return fast, found


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, capturable=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused Adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
}


@pytest.mark.parametrize(("name", "clears"), [*[(name, "after") for name in OPTIMIZERS], ("AdamW", "with zeros")])
def test_an_ordinary_step_is_one_graph(device: torch.device, name: str, clears: str) -> None:
    """No gradient is replaced by the step as a whole. The first call, which makes the optimizer's state, is eager's."""
    fast, (expected, found) = train_twice(device, OPTIMIZERS[name], clears, lambda optimizer, call: None, 50)
    assert_same(found, expected, device)
    info = fast.cache_info()
    assert (info.misses, info.captures, info.hits) == (2, 1, 48)
    assert not fast.explain().to_dict()["fallbacks"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_begins_with_zero_grad_is_one_graph(device: torch.device, name: str) -> None:
    """As every tutorial has it. Before the first call there are no gradients: that is another kind of call."""
    fast, (expected, found) = train_twice(device, OPTIMIZERS[name], "before", lambda optimizer, call: None, 50)
    assert_same(found, expected, device)
    info = fast.cache_info()
    assert info.captures <= 2
    assert info.hits >= 47
    assert not fast.explain().to_dict()["fallbacks"]


def test_a_schedule_of_a_learning_rate_in_a_tensor(device: torch.device) -> None:
    schedules: dict[int, Any] = {}

    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(params, lr=torch.tensor(0.1, device=device), capturable=True)
        schedules[id(optimizer)] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    fast, (expected, found) = train_twice(
        device, make_optimizer, "after", lambda optimizer, call: schedules[id(optimizer)].step(), 50
    )
    assert_same(found, expected, device)
    assert fast.cache_info().captures == 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "for each"])
def test_a_gradient_scaler_runs_as_it_is(device: torch.device, fused: bool) -> None:
    """A scaler counts in Python, and reads whether there was an overflow; tracing it leaves nothing behind."""
    found: list[Any] = []
    for jitted in (False, True):
        net, _, _ = make(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=3)

        def step(x: Tensor, y: Tensor, net: Any = net, optimizer: Any = optimizer, scaler: Any = scaler) -> Tensor:
            with torch.autocast(device.type, dtype=torch.float16):
                value = F.cross_entropy(net(x), y)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return value.detach()

        fn = pygraph.jit(lambda x, y, step=step: step(x, y)) if jitted else step
        values = history(fn, batch(device), same_arguments, 6)
        found.append((values, net.state_dict(), scaler.state_dict()))
    assert_same(found[1], found[0], device)


# ---- optimizers --------------------------------------------------------------------------------------------------


def test_momentum_written_down(device: torch.device) -> None:
    net, params, buffers = make(device)
    loss = loss_of(net)

    def step(params: Tensors, momenta: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float) -> Any:
        grads, value = grad_and_value(loss)(params, buffers, x, y)
        momenta = {name: 0.9 * momenta[name] + grads[name] for name in params}
        return {name: params[name] - rate * momenta[name] for name in params}, momenta, value

    check_steps(step, (params, zeros(params), buffers, *batch(device), 0.1), device,
                lambda args, out, i: (out[0], out[1], *args[2:5], decayed(i)))  # fmt: skip


@pytest.mark.parametrize("count", ["on the host", "on the device"])
def test_adam_written_down(device: torch.device, count: str) -> None:
    net, params, buffers = make(device)
    loss = loss_of(net)

    def step(params: Tensors, m: Tensors, v: Tensors, t: Any, buffers: Tensors, x: Tensor, y: Tensor, rate: float):
        grads, value = grad_and_value(loss)(params, buffers, x, y)
        t = t + 1
        m = {name: torch.lerp(m[name], grads[name], 0.1) for name in params}
        v = {name: 0.99 * v[name] + 0.01 * grads[name] ** 2 for name in params}
        scale = {name: rate / ((v[name] / (1 - 0.99**t)).sqrt() + 1e-8) for name in params}
        return {name: params[name] - scale[name] * m[name] / (1 - 0.9**t) for name in params}, m, v, t, value

    t = 0 if count == "on the host" else torch.zeros((), device=device)
    check_steps(step, (params, zeros(params), zeros(params), t, buffers, *batch(device), 0.1), device,
                lambda args, out, i: (*out[:4], *args[4:7], decayed(i)),
                recorded=2 if count == "on the host" else 1)  # fmt: skip


def _of_sgd(p: Any, g: Any, state: Any, rate: float, **how: Any) -> None:
    sgd.sgd(p, g, state[0], weight_decay=0.01, momentum=0.9, lr=rate, dampening=0.0, nesterov=True, maximize=False,
            **{k: v for k, v in how.items() if k != "capturable"})  # fmt: skip


def _of_adam(p: Any, g: Any, state: Any, rate: float, **how: Any) -> None:
    adam.adam(p, g, state[0], state[1], [], state[-1], amsgrad=False, beta1=0.9, beta2=0.99, lr=rate,
              weight_decay=0.01, eps=1e-8, maximize=False, **how)  # fmt: skip


def _of_adamw(p: Any, g: Any, state: Any, rate: float, **how: Any) -> None:
    adamw.adamw(p, g, state[0], state[1], state[2], state[-1], amsgrad=True, beta1=0.9, beta2=0.99, lr=rate,
                weight_decay=0.01, eps=1e-8, maximize=False, **how)  # fmt: skip


def _of_rmsprop(p: Any, g: Any, state: Any, rate: float, **how: Any) -> None:
    rmsprop.rmsprop(p, g, state[0], state[1], state[2], state[-1], lr=rate, alpha=0.99, eps=1e-8, weight_decay=0.01,
                    momentum=0.9, centered=True, **how)  # fmt: skip


def _of_nadam(p: Any, g: Any, state: Any, rate: float, **how: Any) -> None:
    nadam.nadam(p, g, state[0], state[1], state[-2], state[-1], beta1=0.9, beta2=0.99, lr=rate, weight_decay=0.01,
                momentum_decay=4e-3, eps=1e-8, **how)  # fmt: skip


def _of_radam(p: Any, g: Any, state: Any, rate: float, **how: Any) -> None:
    radam.radam(p, g, state[0], state[1], state[-1], beta1=0.9, beta2=0.99, lr=rate, weight_decay=0.01, eps=1e-8, **how)


def _of_adagrad(p: Any, g: Any, state: Any, rate: float, **how: Any) -> None:
    adagrad.adagrad(p, g, state[0], state[-1], lr=rate, weight_decay=0.01, lr_decay=0.1, eps=1e-8, maximize=False,
                    **{k: v for k, v in how.items() if k != "capturable"})  # fmt: skip


ON_THE_HOST, ON_THE_DEVICE = {"capturable": False}, {"capturable": True}

UPDATES = [
    *[(_of_sgd, {"foreach": each}) for each in (False, True)],
    *[
        (update, {"foreach": each, **where})
        for update in (_of_adam, _of_adamw, _of_rmsprop, _of_nadam)
        for each in (False, True)
        for where in (ON_THE_HOST, ON_THE_DEVICE)
    ],
    # With steps that are counted on the host, it has an `if` on their number.
    *[(_of_radam, {"foreach": each, **ON_THE_DEVICE}) for each in (False, True)],
    *[(_of_adagrad, {"foreach": each}) for each in (False, True)],
]


@pytest.mark.parametrize(("update", "how"), UPDATES, ids=lambda value: str(getattr(value, "__name__", value)))
def test_optimizers_of_torch(device: torch.device, update: Any, how: dict[str, Any]) -> None:
    """Torch's functional updates, with a learning rate that changes, and steps that are counted on either side."""
    net, params, buffers = make(device, lambda: nn.Linear(4, 3))
    loss = loss_of(net)

    def step(params: Tensors, state: Any, x: Tensor, y: Tensor, rate: float) -> Tensor:
        grads, value = grad_and_value(loss)(params, buffers, x, y)
        update(list(params.values()), list(grads.values()), state, rate, **how)
        return value

    counted = device if how.get("capturable") else torch.device("cpu")
    moments = [list(zeros(params).values()) for _ in range(3)]
    counts = [[make_count((), device=counted) for _ in params] for make_count in (torch.ones, torch.zeros)]
    check_steps(step, (params, [*moments, *counts], *batch(device), 0.1), device,
                lambda args, out, i: (*args[:4], decayed(i)), steps=12)  # fmt: skip


@pytest.mark.parametrize("update", [_of_sgd, _of_adam, _of_adamw], ids=lambda update: update.__name__)
def test_fused_optimizers(device: torch.device, update: Any) -> None:
    """One kernel updates everything. It gets the live learning rate as a tensor of float32."""
    torch.manual_seed(1)
    params = [torch.randn(3, device=device), torch.randn(2, 2, device=device)]

    def step(params: list[Tensor], grads: list[Tensor], state: Any, rate: float) -> None:
        update(params, grads, state, rate, fused=True)

    state = [[torch.zeros_like(p) for p in params] for _ in range(3)]
    start = (params, [p.sin() for p in params], [*state, [torch.zeros((), device=device) for _ in params]], 0.1)

    def following(args: Any, out: Any, i: int) -> Any:
        return (*args[:3], decayed(i))

    fast = pygraph.jit(step)
    torch.testing.assert_close(history(fast, start, following, 50), history(step, start, following, 50))
    assert_one_graph(fast, 50)


# ---- buffers, mixed precision, accumulation, clipping --------------------------------------------------------------


def test_buffers_are_returned(device: torch.device) -> None:
    net, params, buffers = make(device)

    def step(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float) -> Any:
        def loss(params: Tensors) -> Any:
            new = {name: buffer.clone() for name, buffer in buffers.items()}
            return F.cross_entropy(functional_call(net, (params, new), (x,)), y), new

        grads, (value, new) = grad_and_value(loss, has_aux=True)(params)
        return {name: params[name] - rate * grads[name] for name in params}, new, value

    check_steps(step, (params, buffers, *batch(device), 0.1), device,
                lambda args, out, i: (out[0], out[1], *args[2:4], decayed(i)))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("check", ["written down", "torch's"])
def test_mixed_precision_with_a_dynamic_loss_scale(device: torch.device, dtype: torch.dtype, check: str) -> None:
    """Autocast, a check for overflow and a scale that grows and shrinks, all on the device."""
    net, params, buffers = make(device)
    x, y = batch(device)

    def step(params: Tensors, buffers: Tensors, scale: Tensor, good: Tensor, x: Tensor, rate: float) -> Any:
        def loss(params: Tensors) -> Any:
            new = {name: buffer.clone() for name, buffer in buffers.items()}
            with torch.autocast(device.type, dtype=dtype):
                out = functional_call(net, (params, new), (x,))
            value = F.cross_entropy(out.float(), y)
            return value * scale, (value, new)

        grads, (_, (value, new)) = grad_and_value(loss, has_aux=True)(params)
        if check == "torch's":
            overflow, many = torch.zeros((), device=device), list(grads.values())
            torch._amp_foreach_non_finite_check_and_unscale_(many, overflow, 1 / scale)
            grads, finite = dict(zip(grads, many, strict=True)), overflow == 0
            scale, good = scale.clone(), good.clone()
            torch._amp_update_scale_(scale, good, overflow, 2.0, 0.5, 3)
        else:
            grads = {name: value / scale for name, value in grads.items()}
            finite = torch.stack([value.isfinite().all() for value in grads.values()]).all()
            good = torch.where(finite, good + 1, 0)
            scale = torch.where(finite, torch.where(good == 3, scale * 2, scale), scale * 0.5)
            good = torch.where(good == 3, 0, good)
        params = {name: torch.where(finite, params[name] - rate * grads[name], params[name]) for name in params}
        return params, new, scale, good, value

    def following(args: Any, out: Any, i: int) -> Any:
        return (*out[:4], torch.full_like(x, torch.inf) if i % 7 == 6 else x, decayed(i))

    # Running statistics take the infinity over, so every step after the first overflow has one.
    net.eval()
    good = torch.zeros((), dtype=torch.int32, device=device)
    scale = torch.full((), 2.0**12, device=device)
    scales = [out[2].item() for out in history(step, (params, buffers, scale, good, x, 0.1), following, 8)[:-1]]
    assert max(scales) > scales[0]
    assert scales[-1] < max(scales)
    check_steps(step, (params, buffers, scale, good, x, 0.1), device, following)


def test_gradients_accumulate_inside(device: torch.device) -> None:
    net, params, buffers = make(device)
    loss = loss_of(net)

    def step(params: Tensors, buffers: Tensors, xs: Any, ys: Any, rate: float) -> Any:
        total, value = zeros(params), 0.0
        for x, y in zip(xs, ys, strict=True):
            grads, part = grad_and_value(loss)(params, buffers, x, y)
            total = {name: total[name] + grads[name] / len(xs) for name in params}
            value = value + part / len(xs)
        return {name: params[name] - rate * total[name] for name in params}, value

    x, y = batch(device)
    check_steps(step, (params, buffers, x.chunk(2), y.chunk(2), 0.1), device,
                lambda args, out, i: (out[0], *args[1:4], decayed(i)))  # fmt: skip


def test_gradients_accumulate_across_calls(device: torch.device) -> None:
    """One function adds gradients up in place, and another applies them every fourth time."""
    net, params, buffers = make(device)
    loss = loss_of(net)

    def accumulate(params: Tensors, buffers: Tensors, total: Tensors, x: Tensor, y: Tensor) -> Tensor:
        grads, value = grad_and_value(loss)(params, buffers, x, y)
        for name in total:
            total[name].add_(grads[name])
        return value

    def apply(params: Tensors, total: Tensors, rate: float) -> None:
        for name in params:
            params[name].sub_(rate * total[name])
            total[name].zero_()

    def train(accumulate: Any, apply: Any) -> Any:
        own = {name: value.clone() for name, value in params.items()}
        statistics = {name: value.clone() for name, value in buffers.items()}
        total, values, data = zeros(params), [], batch(device)
        torch.manual_seed(0)
        for i in range(52):
            values.append(accumulate(own, statistics, total, *data))
            if i % 4 == 3:
                apply(own, total, decayed(i))
        return own, statistics, values

    expected = train(accumulate, apply)
    fast = pygraph.jit(accumulate), pygraph.jit(apply)
    assert_same(train(*fast), expected, device)
    assert_one_graph(fast[0], 52)
    assert_one_graph(fast[1], 13)


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
def test_clipping_by_norm(device: torch.device, foreach: bool) -> None:
    net, params, buffers = make(device)
    loss = loss_of(net)

    def step(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float) -> Any:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        grads = torch.autograd.grad(loss(leaves, buffers, x, y), list(leaves.values()))
        for leaf, gradient in zip(leaves.values(), grads, strict=True):
            leaf.grad = gradient
        norm = torch.nn.utils.get_total_norm(grads, foreach=foreach)
        torch.nn.utils.clip_grads_with_norm_(list(leaves.values()), 0.5, norm, foreach=foreach)
        again = torch.nn.utils.clip_grad_norm_(list(leaves.values()), 0.4, foreach=foreach)
        with torch.no_grad():
            return {name: leaf - rate * leaf.grad for name, leaf in leaves.items()}, norm, again

    check_steps(step, (params, buffers, *batch(device), 0.1), device,
                lambda args, out, i: (out[0], *args[1:4], decayed(i)))  # fmt: skip


def test_clipping_written_down_by_a_live_bound(device: torch.device) -> None:
    net, params, buffers = make(device)
    loss = loss_of(net)

    def step(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float, bound: float) -> Any:
        grads = grad(loss)(params, buffers, x, y)
        norm = torch.nn.utils.get_total_norm(grads.values())
        factor = (bound / (norm + 1e-6)).clamp(max=1.0)
        return {name: params[name] - rate * factor * grads[name].clamp(-bound, bound) for name in params}, norm

    check_steps(step, (params, buffers, *batch(device), 0.1, 0.1), device,
                lambda args, out, i: (out[0], *args[1:4], decayed(i), 0.1 * (i + 1)))  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_draws_the_same_numbers_again(device: torch.device, dropout: float, reentrant: bool) -> None:
    """A checkpoint restores the generator's state, between two graphs."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        leaf = weight.detach().requires_grad_()
        hidden = checkpoint(lambda x, w: F.dropout(torch.tanh(x @ w), dropout), x, leaf, use_reentrant=reentrant)
        (hidden * hidden).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    start = batch(device)[0], torch.ones(4, 4, device=device)
    if not dropout:
        check_steps(fn, start, device, steps=4)
        return
    fast = pygraph.jit(fn)
    assert_same(history(fast, start, same_arguments, 4), history(fn, start, same_arguments, 4), device)
    assert fast.cache_info().captures == 2


# ---- models ------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Convolutions with the norms that go with them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Transformer(nn.Module):
    """An embedding and a layer with attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x)).mean(1))


class Recurrent(nn.Module):
    """A cell that is applied in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
        return self.head(state)


@pytest.mark.parametrize("model", [Convolutions, Transformer, Recurrent], ids=lambda model: model.__name__)
def test_models(device: torch.device, model: Callable[[], nn.Module]) -> None:
    net, params, buffers = make(device, model)
    loss = loss_of(net)
    x = {
        Convolutions: torch.randn(4, 1, 8, 8),
        Transformer: torch.randint(0, 11, (4, 5)),
        Recurrent: torch.randn(4, 3, 4),
    }[model]

    def step(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, rate: float) -> Any:
        grads, value = grad_and_value(loss)(params, buffers, x, y)
        return {name: params[name] - rate * grads[name] for name in params}, value

    start = (params, buffers, x.to(device), torch.tensor([0, 1, 2, 1], device=device), 0.1)
    check_steps(step, start, device, lambda args, out, i: (out[0], *args[1:4], decayed(i)))


def test_a_step_waits_for_nothing_from_the_second_call_on(device: torch.device) -> None:
    """The counter counts synchronisations of eager, so that the other tests mean something."""
    fast = pygraph.jit(lambda x: x * 2)
    x = torch.ones(3, device=device)
    fast(x)
    with no_synchronization(device):
        fast(x)
    with pytest.raises((AssertionError, RuntimeError)), no_synchronization(device):
        fast(x).sum().item()
