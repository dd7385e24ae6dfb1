"""Calls that set gradients: replays leave behind what eager does, in new tensors where eager makes new ones."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from pygraph.errors import FallbackError, GradientChangeError, SpentGraphError, StateChangeError
from pygraph.process import extension
from tests.steps import assert_same, no_synchronization, scaled_step_of, traced_kinds

Step = Callable[..., Any]


def make_net(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    # No bias before the norm, whose gradient is nothing but rounding.
    return nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    ).to(device)


def batches(device: torch.device, count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(size, 4, device=device), torch.randint(0, 3, (size,), device=device)) for _ in range(count)]


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def train(
    device: torch.device,
    make_step: Callable[[nn.Module, Any], Step],
    jitted: bool,
    *,
    steps: int = 8,
    make_optimizer: Callable[..., Any] = lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    between: Callable[[int, nn.Module, Any], object] = lambda call, net, optimizer: None,
    **options: Any,
) -> tuple[Any, Any]:
    """Train by a step; what every call returned and left in ``.grad``, the state at the end, and the step."""
    net = make_net(device)
    optimizer = make_optimizer(net.parameters())
    step = make_step(net, optimizer)
    step = pygraph.jit(step, **options) if jitted else step
    data = batches(device, steps)
    torch.manual_seed(0)
    found: list[Any] = []
    for call, batch in enumerate(data):
        result = step(*batch)
        found.append((result.detach().clone(), result.requires_grad, gradients(net)))
        between(call, net, optimizer)
    return (found, net.state_dict(), optimizer.state_dict()), step


def check(device: torch.device, make_step: Callable[[nn.Module, Any], Step], hits: int, **how: Any) -> Any:
    """Train in eager and jitted, compare all, and expect so many replays."""
    expected, _ = train(device, make_step, False, **how)
    found, fast = train(device, make_step, True, **how)
    assert_same(found, expected, device)
    assert fast.cache_info().hits == hits, fast.cache_info()
    return fast


def ordinary(net: nn.Module, optimizer: Any) -> Step:
    """As every tutorial has it."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def accumulating(net: nn.Module, optimizer: Any) -> Step:
    """The gradients of one batch, added to those that there are."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss.detach()

    return step


# ---- what is left behind -------------------------------------------------------------------------------------------


def test_the_loss_is_returned_as_it_is(device: torch.device) -> None:
    fast = check(device, ordinary, hits=6)
    assert "no fallbacks" in str(fast.explain())
    assert fast.cache_info().captures == 1


def test_replays_wait_for_nothing(device: torch.device) -> None:
    net = make_net(device)
    fast = pygraph.jit(ordinary(net, torch.optim.SGD(net.parameters(), 0.1)))
    (batch,) = batches(device, 1)
    for _ in range(3):
        fast(*batch)
    with no_synchronization(device):
        fast(*batch)


def test_a_gradient_that_is_held_is_not_overwritten(device: torch.device) -> None:
    net = make_net(device)
    fast = pygraph.jit(ordinary(net, torch.optim.SGD(net.parameters(), 0.1)))
    held: list[tuple[Tensor, Tensor]] = []
    for batch in batches(device, 6):
        fast(*batch)
        grad = net[0].weight.grad
        held.append((grad, grad.clone()))
    assert len({id(grad) for grad, _ in held}) == len({grad.data_ptr() for grad, _ in held}) == 6
    for grad, then in held:
        assert torch.equal(grad, then)


def test_earlier_gradients_are_not_kept(device: torch.device) -> None:
    """What was there when a call was traced is gone after the next one, as in eager."""
    net = make_net(device)
    fast = pygraph.jit(ordinary(net, torch.optim.SGD(net.parameters(), 0.1)))
    left: list[list[weakref.ref[Tensor]]] = []
    for batch in batches(device, 5):
        fast(*batch)
        left.append([weakref.ref(parameter.grad) for parameter in net.parameters() if parameter.grad is not None])
        gc.collect()
        assert [ref() is not None for refs in left for ref in refs] == [refs is left[-1] for refs in left for _ in refs]


@pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))
def test_replaced_gradients_go_before_there_are_new_ones(device: torch.device) -> None:
    """Results can have their memory then, as in eager after ``zero_grad``; a gradient that is held stays what it is."""
    net = make_net(device)
    fast = pygraph.jit(ordinary(net, torch.optim.SGD(net.parameters(), 0.1)))
    data = batches(device, 8)
    for batch in data[:4]:
        fast(*batch)
    found: list[list[Tensor | None]] = []
    watching = [
        weakref.ref(parameter.grad, lambda _: found.append([other.grad for other in net.parameters()]))
        for parameter in net.parameters()
        if parameter.grad is not None
    ]
    fast(*data[4])
    assert found == [[None] * len(watching)] * len(watching)
    held = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    values = [gradient.clone() for gradient in held]
    fast(*data[5])
    assert_same(held, values, device)
    assert fast.cache_info().hits == 4


@pytest.mark.parametrize("native", [True, False], indirect=True, ids=["native", "python"])
def test_a_step_that_clears_gradients_at_times(device: torch.device, native: bool) -> None:
    """What a replay has not read, another call of the same arguments may read."""
    clears = [True] * 5 + [False] * 3 + [True] * 4 + [False, True, False, True]

    def clearing(net: nn.Module, optimizer: Any) -> Step:
        settings = {"clears": True}

        def step(x: Tensor, y: Tensor) -> Tensor:
            if settings["clears"]:
                optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        optimizer.settings = settings  # where `between` finds them
        return step

    def switch(call: int, net: nn.Module, optimizer: Any) -> None:
        if call + 1 < len(clears):
            optimizer.settings["clears"] = clears[call + 1]

    fast = check(device, clearing, steps=len(clears), between=switch, hits=13)
    assert "no fallbacks" in str(fast.explain())


def test_gradients_are_as_eager_makes_them(device: torch.device) -> None:
    """Strides, dtype, no history, and one tensor that stays where a backward adds to it."""
    net = make_net(device)
    fast = pygraph.jit(accumulating(net, None))
    data = batches(device, 6)
    for batch in data[:3]:
        fast(*batch)
    first = net[0].weight.grad
    fast(*data[3])
    assert net[0].weight.grad is first
    assert first.stride() == net[0].weight.stride()
    assert not first.requires_grad
    version = first._version
    fast(*data[4])
    assert first._version > version
    assert fast.cache_info().hits >= 2


def test_a_second_backward_of_the_loss_is_an_error_as_in_eager(device: torch.device) -> None:
    net = make_net(device)
    fast = pygraph.jit(ordinary(net, torch.optim.SGD(net.parameters(), 0.1)))
    for batch in batches(device, 4):
        loss = fast(*batch)
        assert loss.requires_grad
        assert not loss.is_leaf
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert fast.cache_info().hits == 2


def test_several_results_of_a_spent_graph(device: torch.device) -> None:
    net = make_net(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        scores = net(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "again": loss, "scores": scores, "accuracy": (scores.argmax(1) == y).sum(), "k": 3}

    fast = pygraph.jit(step)
    for batch in batches(device, 4):
        out = fast(*batch)
        assert out["loss"] is out["again"]
        assert out["scores"].requires_grad
        assert not out["accuracy"].requires_grad
        assert out["k"] == 3
        out["scores"].add_(1)  # no view of anything
    assert fast.cache_info().hits == 2


def test_a_loss_whose_graph_is_kept_needs_eager(device: torch.device) -> None:
    net = make_net(device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward(retain_graph=True)
        return loss

    fast = pygraph.jit(step)
    for batch in batches(device, 3):
        fast(*batch).backward()
    twice = gradients(net)
    net.zero_grad()
    assert fast.cache_info().hits == 0 or "requires grad" in str(fast.explain())
    assert all(grad is not None for grad in twice)


def test_a_step_that_clears_at_its_end_may_return_its_loss(device: torch.device) -> None:
    def make(net: nn.Module, optimizer: Any) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    fast = check(device, make, hits=6)
    assert "no fallbacks" in str(fast.explain())


# ---- accumulation --------------------------------------------------------------------------------------------------


def test_accumulation_over_gradients_that_are_replaced(device: torch.device) -> None:
    """A replay once added to the gradient of the trace, which was no longer that of the parameter."""

    def clear(call: int, net: nn.Module, optimizer: Any) -> None:
        if call % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    fast = check(device, accumulating, steps=12, between=clear, hits=10)
    assert "no fallbacks" in str(fast.explain())


@pytest.mark.parametrize("native", [True, False], indirect=True, ids=["native", "python"])
def test_a_gradient_that_is_replaced_by_another(device: torch.device, native: bool) -> None:
    def replace(call: int, net: nn.Module, optimizer: Any) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None and call > 2:
                parameter.grad = torch.full_like(parameter.grad, call)

    check(device, accumulating, steps=10, between=replace, hits=8)


def test_micro_batches_inside_a_step(device: torch.device) -> None:
    def make(net: nn.Module, optimizer: Any) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device=x.device)
            for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
                loss = F.cross_entropy(net(part), wanted) / 4
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        return step

    assert "no fallbacks" in str(check(device, make, hits=6).explain())


# ---- what else a step has ------------------------------------------------------------------------------------------


def with_clipping(net: nn.Module, optimizer: Any) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        optimizer.step()
        return loss.detach() + norm

    return step


def with_autocast(net: nn.Module, optimizer: Any) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def with_a_closure(net: nn.Module, optimizer: Any) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step


def with_gradients_written(net: nn.Module, optimizer: Any) -> Step:
    parameters = list(net.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad.sign()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    "make_step", [with_clipping, with_autocast, with_a_closure, with_gradients_written], ids=lambda make: make.__name__
)
def test_forms_of_a_step(device: torch.device, make_step: Callable[..., Step]) -> None:
    assert "no fallbacks" in str(check(device, make_step, hits=6).explain())


def test_batches_of_another_size(device: torch.device) -> None:
    results: list[Any] = []
    for transform in (lambda fn: fn, pygraph.jit):
        net = make_net(device)
        step = transform(ordinary(net, torch.optim.SGD(net.parameters(), 0.1)))
        torch.manual_seed(0)
        for size in (16, 16, 7, 16, 7, 16, 7):
            step(*batches(device, 1, size)[0])
        results.append((gradients(net), net.state_dict()))
    assert_same(results[1], results[0], device)
    assert step.cache_info().hits >= 3


def test_an_optimizer_in_the_backward(device: torch.device) -> None:
    """Hooks after accumulation step and clear, parameter by parameter."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        for parameter in net.parameters():
            own = torch.optim.SGD([parameter], 0.1)

            def hook(p: Tensor, own: Any = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)
        return accumulating(net, None)

    expected, _ = train(device, make, False)
    found, _ = train(device, make, True)
    assert_same(found, expected, device)


def test_two_networks_that_train_each_other(device: torch.device) -> None:
    """Each step leaves gradients in both, and clears those of one."""

    def play(transform: Callable[..., Any]) -> Any:
        makers, judges = make_net(device), make_net(device)
        steps = []
        for mine, theirs, sign in ((makers, judges, 1.0), (judges, makers, -1.0)):
            optimizer = torch.optim.Adam(mine.parameters(), 0.01)

            def step(x: Tensor, y: Tensor, mine=mine, theirs=theirs, optimizer=optimizer, sign=sign) -> Tensor:  # type: ignore[no-untyped-def]
                optimizer.zero_grad()
                loss = sign * (F.cross_entropy(mine(x), y) - F.cross_entropy(theirs(x), y))
                loss.backward()
                optimizer.step()
                return loss

            steps.append(transform(lambda x, y, step=step: step(x, y)))
        torch.manual_seed(0)
        values = [step(*batch).detach() for batch in batches(device, 6) for step in steps]
        return values, makers.state_dict(), judges.state_dict(), gradients(makers), gradients(judges)

    assert_same(play(pygraph.jit), play(lambda fn: fn), device)


def test_a_parameter_that_is_unfrozen_is_trained(device: torch.device) -> None:
    def unfreeze(call: int, net: nn.Module, optimizer: Any) -> None:
        net[4].weight.requires_grad_(call >= 3)

    # The second call deletes the gradient of what has been frozen since, and no later one finds it.
    check(device, ordinary, steps=9, between=unfreeze, hits=4)


def test_a_parameter_that_is_replaced(device: torch.device) -> None:
    def replace(call: int, net: nn.Module, optimizer: Any) -> None:
        if call == 3:
            with torch.no_grad():
                new = nn.Parameter(net[4].bias * 2)
            optimizer.state.pop(net[4].bias)
            optimizer.param_groups[0]["params"][-1] = net[4].bias = new

    expected, _ = train(device, ordinary, False, between=replace)
    found, fast = train(device, ordinary, True, between=replace)
    assert_same(found[:2], expected[:2], device)
    assert fast.cache_info().hits >= 3


def test_a_module_as_an_argument(device: torch.device) -> None:
    results: list[Any] = []
    for transform in (lambda fn: fn, pygraph.jit):
        nets = [make_net(device), make_net(device)]

        def step(net: nn.Module, x: Tensor, y: Tensor, rate: float = 0.1) -> Tensor:
            net.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= rate * parameter.grad
            return loss

        fn = transform(lambda *args, step=step: step(*args))
        torch.manual_seed(0)
        values = [fn(net, *batch, 0.1 / (i + 1)).detach() for i, batch in enumerate(batches(device, 4)) for net in nets]
        results.append((values, [net.state_dict() for net in nets], [gradients(net) for net in nets]))
    assert_same(results[1], results[0], device)
    assert fn.cache_info().hits == 4


@pytest.mark.parametrize("native", [True, False], indirect=True, ids=["native", "python"])
def test_what_surrounds_a_step(device: torch.device, native: bool) -> None:
    """A level of forward-mode differentiation, in which graphs are not replayed."""
    surroundings = [contextlib.nullcontext] * 4 + [torch.autograd.forward_ad.dual_level, contextlib.nullcontext] * 2
    results: list[Any] = []
    for jitted in (False, True):
        net = make_net(device)
        step = ordinary(net, torch.optim.SGD(net.parameters(), 0.1))
        step = pygraph.jit(step) if jitted else step
        torch.manual_seed(0)
        found: list[Any] = []
        for surrounding, batch in zip(surroundings, batches(device, len(surroundings)), strict=True):
            with surrounding():
                found.append((step(*batch).detach().clone(), gradients(net)))
        results.append((found, net.state_dict()))
    assert_same(results[1], results[0], device)
    assert step.cache_info().hits == 4


def test_a_static_argument(device: torch.device) -> None:
    def make(net: nn.Module, optimizer: Any) -> Step:
        inner = ordinary(net, optimizer)
        return lambda x, y, form="mean": inner(x, y) if form == "mean" else x

    check(device, make, hits=6, static_argnums=2)


def test_threads_take_turns(device: torch.device) -> None:
    net = make_net(device).eval()
    fast = pygraph.jit(accumulating(net, None))
    (batch,) = batches(device, 1)
    for _ in range(3):
        fast(*batch)
    before = net[4].bias.grad.clone() / 3
    workers = [threading.Thread(target=lambda: [fast(*batch) for _ in range(5)]) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.testing.assert_close(net[4].bias.grad, before * 18)


# ---- learning rates ------------------------------------------------------------------------------------------------

SCHEDULED: dict[str, Callable[..., Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "SGD one by one": lambda params: torch.optim.SGD(params, 0.1, foreach=False),
    "Adam": lambda params: torch.optim.Adam(params, 0.01),
    "AdamW, capturable": lambda params: torch.optim.AdamW(params, 0.01, capturable=True),
    "two groups": lambda params: torch.optim.SGD([{"params": [p], "lr": 0.1 / n} for n, p in enumerate(params, 1)]),
}


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize("begins", [True, False], ids=["cleared before", "cleared after"])
def test_a_learning_rate_that_a_schedule_changes_is_live(device: torch.device, name: str, begins: bool) -> None:
    """It is a number in an optimizer that the step closes over; baked in until it changes for the first time."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        step = ordinary(net, optimizer)

        def then_clear(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step if begins else then_clear

    schedules: list[Any] = []

    def make_optimizer(params: Any) -> Any:
        optimizer = SCHEDULED[name](params)
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        return optimizer

    def schedule(call: int, net: nn.Module, optimizer: Any) -> None:
        schedules[-1].step()

    fast = check(device, make, steps=10, make_optimizer=make_optimizer, between=schedule, hits=7)
    assert fast.cache_info().captures <= 2
    assert "no fallbacks" in str(fast.explain())


def test_the_learning_rate_of_a_group_that_is_added_is_live_too(device: torch.device) -> None:
    def change(call: int, net: nn.Module, optimizer: Any) -> None:
        if call == 3:
            optimizer.add_param_group({"params": list(net[4].parameters()), "lr": 0.2})
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    fast = check(device, ordinary, steps=10, between=change, hits=6,
                 make_optimizer=lambda params: torch.optim.SGD(list(params)[:-2], 0.1))  # fmt: skip
    assert "no fallbacks" in str(fast.explain())


def test_a_learning_rate_that_becomes_a_tensor(device: torch.device) -> None:
    def change(call: int, net: nn.Module, optimizer: Any) -> None:
        (group,) = optimizer.param_groups
        group["lr"] = 0.1 / (call + 2) if call < 5 else torch.tensor(0.01 * call, device=device)

    check(device, ordinary, steps=9, make_optimizer=lambda params: torch.optim.SGD(params, 0.1, foreach=False),
          between=change, hits=5)  # fmt: skip


@pytest.mark.parametrize("foreach", [False, True])
def test_a_momentum_that_a_schedule_cycles_is_live(device: torch.device, foreach: bool) -> None:
    schedules: list[Any] = []

    def make_optimizer(params: Any) -> Any:
        optimizer = torch.optim.SGD(params, 0.1, momentum=0.9, foreach=foreach)
        schedules.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20))
        return optimizer

    check(device, ordinary, steps=12, make_optimizer=make_optimizer,
          between=lambda call, net, optimizer: schedules[-1].step(), hits=9)  # fmt: skip


# ---- gradient scalers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_scaler(device: torch.device, fused: bool, clips: bool) -> None:
    """With an optimizer that skips steps on the device, all of it is one graph; others ask the host, as in eager."""
    scalers: list[torch.amp.GradScaler] = []

    def make_step(net: nn.Module, optimizer: Any) -> Step:
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3)
        scalers.append(scaler)

        return scaled_step_of(net, optimizer, scaler, lambda x, y: F.cross_entropy(net(x), y), 0.5 if clips else None)

    def between(call: int, net: nn.Module, optimizer: Any) -> None:
        scales.append(scalers[-1].get_scale())
        if call == 4:  # the next step overflows
            scalers[-1].update(2.0**120)

    histories: list[Any] = []
    for jitted in (True, False):
        scales: list[float] = []
        found, step = train(
            device, make_step, jitted, between=between, make_optimizer=lambda p: torch.optim.Adam(p, 0.01, fused=fused)
        )
        histories.append((found, scales))
        if jitted:
            report = step.explain().to_dict()
            reasons = [fallback["reason"] for fallback in report["fallbacks"]] + report["in_python"]
            assert bool(reasons) != fused, reasons
    assert_same(histories[0], histories[1], device)
    assert len(set(histories[0][1])) > 2


def test_a_gradient_scaler_that_is_switched_off(device: torch.device) -> None:
    def make_step(net: nn.Module, optimizer: Any) -> Step:
        scaler = torch.amp.GradScaler(device.type, enabled=False)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step

    check(device, make_step, hits=6)


def test_an_optimizers_first_step_says_that_later_ones_set_gradients(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one makes the optimizer's state and runs as it is; the second is traced only as what it is."""
    traced = traced_kinds(monkeypatch)
    check(device, ordinary, hits=6)
    assert traced == ["StatefulFunction"]


def test_a_first_call_that_alone_sets_gradients(device: torch.device) -> None:
    """It calibrates itself; what later calls return is differentiated from outside."""

    def run(jitted: bool) -> Any:
        torch.manual_seed(1)
        net, scales = nn.Linear(4, 4).to(device), dict[str, Tensor]()

        def forward(x: Tensor) -> Tensor:
            if not scales:
                net(x).square().mean().backward()
                assert net.weight.grad is not None
                scales["first"] = net.weight.grad.abs().mean()
            return net(x) / scales["first"]

        function = pygraph.jit(forward) if jitted else forward
        found: list[Tensor] = []
        for x, _ in batches(device, 5):
            y = function(x)
            (gradient,) = torch.autograd.grad(y.square().sum(), net.weight)
            found += [y.detach(), gradient, net.weight.grad.clone()]  # pyright: ignore
        return found

    torch.testing.assert_close(run(True), run(False))


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_tracing_says_what_a_step_changes(device: torch.device) -> None:
    net = make_net(device)
    (batch,) = batches(device, 1)
    with pytest.raises(GradientChangeError, match=r"it changes .*\.grad"):
        pygraph.trace(accumulating(net, None))(*batch)
    assert all(parameter.grad is None for parameter in net.parameters())

    def spent(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        net.zero_grad()
        return loss

    with pytest.raises(SpentGraphError, match="requires grad"):
        pygraph.trace(spent)(*batch)
    assert all(parameter.grad is None for parameter in net.parameters())


class Counts(list[int]):
    """A list that may do something of its own."""


def test_a_step_that_changes_a_list_of_its_own_class_counts_before_its_graph(device: torch.device) -> None:
    def make(net: nn.Module, optimizer: Any) -> Step:
        inner, calls = ordinary(net, optimizer), Counts([0])

        def step(x: Tensor, y: Tensor) -> Tensor:
            calls[0] += 1
            return inner(x, y) * calls[0]

        return step

    fast = check(device, make, hits=3)
    report = fast.explain().to_dict()
    assert report["fallbacks"] == []
    assert "it changes calls" in report["in_python"][0]


def test_a_step_inside_a_statement_without_a_graph_is_one(device: torch.device) -> None:
    """No statement comes between what computes and the value; the function that computes it is cut out."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        inner = ordinary(net, optimizer)

        def step(x: Tensor, y: Tensor) -> Tensor:
            return loss if str(loss := inner(x, y)) else -loss

        return step

    expected, _ = train(device, make, False)
    found, fast = train(device, make, True)
    assert_same(found, expected, device)
    assert fast.cache_info().captures > 0
    net = make_net(device)
    with pytest.raises((FallbackError, StateChangeError)):
        pygraph.jit(make(net, torch.optim.SGD(net.parameters(), 0.1)), strict=True)(*batches(device, 1)[0])


def test_an_error_leaves_gradients_as_eager_does(device: torch.device) -> None:
    net = make_net(device)
    fast = pygraph.jit(ordinary(net, torch.optim.SGD(net.parameters(), 0.1)))
    x, y = batches(device, 1)[0]
    for _ in range(3):
        fast(x, y)
    with pytest.raises(Exception, match=r"size|shape|batch"):
        fast(x, y[:3])
    assert all(parameter.grad is None for parameter in net.parameters())  # cleared before the error


def test_an_error_before_gradients_are_cleared_leaves_them(device: torch.device) -> None:
    """Graphs that replace gradients take their memory before the function runs anew."""
    net = make_net(device)
    clear_and_train = ordinary(net, torch.optim.SGD(net.parameters(), 0.1))
    is_stopped = False

    def step(x: Tensor, y: Tensor) -> Tensor:
        if is_stopped:
            raise ValueError("stopped")
        return clear_and_train(x, y)

    fast = pygraph.jit(step)
    x, y = batches(device, 1)[0]
    for _ in range(4):
        fast(x, y)
    there = [parameter.grad for parameter in net.parameters()]
    assert not any(grad is None for grad in there)
    is_stopped = True
    with pytest.raises(ValueError, match="stopped"):
        fast(x, y)
    assert all(parameter.grad is grad for parameter, grad in zip(net.parameters(), there, strict=True))


def test_gradients_that_require_grad_need_eager(device: torch.device) -> None:
    net = make_net(device).eval()

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward(create_graph=True)
        return x + 1

    fast = pygraph.jit(step)
    for batch in batches(device, 3):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
            fast(*batch)
        assert net[0].weight.grad.requires_grad
    net.zero_grad()


def test_sparse_gradients_need_eager() -> None:
    """On the host: the emulated device has no sparse tensors."""
    found: list[Tensor] = []
    for transform in (lambda fn: fn, pygraph.jit):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), 0.1)

        def step(x: Tensor, table: Any = table, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = table(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        fn = transform(lambda x, step=step: step(x))
        for _ in range(4):
            fn(torch.tensor([1, 3, 1]))
        assert table.weight.grad.is_sparse
        found.append(table.weight.detach())
    assert torch.equal(*found)


def test_gradients_that_are_one_tensor_or_a_view(device: torch.device) -> None:
    def make(net: nn.Module, optimizer: Any) -> Step:
        inner = accumulating(net, None)

        def step(x: Tensor, y: Tensor) -> Tensor:
            net.zero_grad()
            loss = inner(x, y)
            net[1].weight.grad = net[1].bias.grad
            net[4].bias.grad = net[4].weight.grad[:, 0]
            return loss

        return step

    check(device, make, steps=5, hits=3)


@pytest.mark.parametrize("deep", [False, True])
def test_gradients_of_tensors_that_are_hard_to_find(device: torch.device, deep: bool) -> None:
    """What is deeper than the walk over what a function reaches goes is trained by eager."""
    net = make_net(device).eval()
    held: Any = net
    for _ in range(12 if deep else 1):
        held = [held]

    def step(x: Tensor, y: Tensor) -> Tensor:
        found = held
        while isinstance(found, list):
            found = found[0]
        loss = F.cross_entropy(found(x), y)
        loss.backward()
        return loss.detach()

    fast = pygraph.jit(step)
    reference = make_net(device).eval()
    for batch in batches(device, 4):
        fast(*batch)
        F.cross_entropy(reference(batch[0]), batch[1]).backward()
        assert_same(gradients(net), gradients(reference), device)


def test_stages_without_graphs(device: torch.device) -> None:
    """A stack that evaluates its Program sets gradients too."""
    expected, _ = train(device, ordinary, False)
    net = make_net(device)
    step = pygraph.devicify(ordinary(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)))
    data = batches(device, 8)
    torch.manual_seed(0)
    for batch in data:
        assert step(*batch).requires_grad
    assert_same(net.state_dict(), expected[1], device)
