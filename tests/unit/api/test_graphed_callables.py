"""`pygraph.make_graphed_callables`: the signature of torch's, and none of its limits, each by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from pygraph.errors import ArgumentError
from tests.steps import assert_same


def make_net(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    ).to(device)


def data(device: torch.device, *shape: int, seed: int = 2) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape, device=device)


def state(net: nn.Module) -> Any:
    return copy.deepcopy(net.state_dict()), [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def compare(
    device: torch.device, make: Callable[[], nn.Module], sample: tuple[Any, ...], use: Callable[[nn.Module], Any]
) -> nn.Module:
    """Use a graphed module and another one that is as it was made, and compare results, state and gradients."""
    plain, graphed = make(), make()
    assert pygraph.make_graphed_callables(graphed, sample) is graphed
    assert_same(state(graphed), state(plain), device)
    torch.manual_seed(5)
    expected = use(plain)
    torch.manual_seed(5)
    found = use(graphed)
    assert_same(found, expected, device)
    assert_same(state(graphed), state(plain), device)
    return graphed


def graphs(fn: Any) -> int:
    return fn.cache_info().captures


# ---- the contract of torch's ----------------------------------------------------------------------------------------


def test_the_signature_is_that_of_torch() -> None:
    mine = inspect.signature(pygraph.make_graphed_callables).parameters
    theirs = inspect.signature(torch.cuda.make_graphed_callables).parameters
    assert [(p.name, p.kind, p.default) for p in mine.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_what_is_returned_has_the_structure_of_what_is_passed(device: torch.device) -> None:
    net, x = make_net(device), data(device, 16, 4)

    def double(x: Tensor) -> Tensor:
        return x * 2

    fast = pygraph.make_graphed_callables(double, (x,))
    assert torch.equal(fast(x), x * 2)
    both = pygraph.make_graphed_callables((net, double), ((x,), (x,)))
    assert isinstance(both, tuple)
    assert both[0] is net
    assert torch.equal(both[1](x), x * 2)
    again = pygraph.make_graphed_callables(net, (x,))  # graphed already
    assert again is net
    assert not hasattr(net.forward.fn, "cache_info")


def test_a_call_like_the_sample_is_compiled_ahead_with_its_backward(device: torch.device) -> None:
    net, x = make_net(device), data(device, 16, 4)
    pygraph.make_graphed_callables(net, (x,))
    before = net.forward.cache_info()
    assert before.captures == 2
    net(x.clone()).sum().backward()
    after = net.forward.cache_info()
    assert (after.misses, after.captures) == (before.misses, before.captures)


def test_running_the_sample_changes_nothing(device: torch.device) -> None:
    net, x = make_net(device), data(device, 16, 4)
    net[0].weight.grad = held = torch.full_like(net[0].weight, 7.0)
    x.requires_grad_()
    notes = torch.zeros(3, device=device)

    def fn(x: Tensor, notes: Tensor) -> Tensor:
        notes.add_(1)
        (net[4].weight * x.detach().sum()).sum().backward()
        return net(x) + torch.rand((), device=x.device)

    before, contents = state(net), x.detach().clone()
    torch.manual_seed(7)
    expected = torch.rand(2), torch.rand(2, device=device)
    torch.manual_seed(7)
    pygraph.make_graphed_callables(fn, (x, notes))
    assert_same((torch.rand(2), torch.rand(2, device=device)), expected, device)
    assert_same(state(net), before, device)
    assert net[0].weight.grad is held
    assert x.grad is None
    assert torch.equal(x, contents)
    assert torch.equal(notes, torch.zeros_like(notes))
    versions = [p._version for p in net.parameters()]
    pygraph.make_graphed_callables(net, (x,))
    assert [p._version for p in net.parameters()] == versions


def test_training(device: torch.device) -> None:
    def train(net: nn.Module) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        values = []
        for step in range(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(data(device, 16, 4, seed=step)), torch.arange(16, device=device) % 3)
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
        return values

    net = compare(device, lambda: make_net(device), (data(device, 16, 4),), train)
    assert graphs(net.forward) == 2
    assert "no fallbacks" in str(net.forward.explain())


def test_a_part_of_a_model(device: torch.device) -> None:
    def use(net: nn.Module) -> Any:
        net(data(device, 16, 4)).square().sum().backward()
        return net(data(device, 16, 4, seed=3))

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), make_net(device), nn.Linear(3, 2)).to(device)

    plain, graphed = make(), make()
    pygraph.make_graphed_callables(graphed[1], (data(device, 16, 4).requires_grad_(),))
    torch.manual_seed(5)
    expected = use(plain)
    torch.manual_seed(5)
    assert_same(use(graphed), expected, device)
    assert_same(state(graphed), state(plain), device)
    assert graphs(graphed[1].forward) == 2


# ---- the limits of torch's, none of which is one here ------------------------------------------------------------


class Options(nn.Module):
    """Has arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, scale: Any = 1.0, *, mode: str = "relu", extra: dict[str, Tensor] | None = None
    ) -> dict[str, Any]:
        y = self.linear(x) * scale
        y = F.relu(y) if mode == "relu" else torch.tanh(y)
        if extra is not None:
            y = y + extra["bias"]
        return {"y": y, "pair": (y.sum(), [x * 2]), "mode": mode, "n": 3}


def make_options(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return Options().to(device)


def use_and_differentiate(net: nn.Module, *args: Any, **kwargs: Any) -> Any:
    out = net(*args, **kwargs)
    (out["y"].square().sum() + out["pair"][0]).backward()
    return out["y"].detach(), out["pair"][0].detach(), out["pair"][1], out["mode"] == "relu", out["n"]


def test_keyword_arguments(device: torch.device) -> None:
    x, bias = data(device, 5, 4), data(device, 4, seed=3)

    def use(net: nn.Module) -> Any:
        return [
            use_and_differentiate(net, x, mode="tanh"),
            use_and_differentiate(net, x=x, scale=3.0),
            use_and_differentiate(net, x, extra={"bias": bias}),
            use_and_differentiate(net, x, extra={"bias": bias * 2}),
        ]

    compare(device, lambda: make_options(device), (x,), use)


def test_arguments_that_are_no_tensors(device: torch.device) -> None:
    x = data(device, 5, 4)
    net = compare(
        device,
        lambda: make_options(device),
        (x, 2.0),
        lambda net: [use_and_differentiate(net, x, scale) for scale in (2.0, 3.0, 0.5)],
    )
    assert graphs(net.forward) == 2  # a number is live


def test_nested_arguments_and_results(device: torch.device) -> None:
    def fn(tree: dict[str, Any], pair: tuple[Tensor, list[Tensor]]) -> Any:
        return {"sum": tree["a"] + pair[0], "rest": [tree["b"]["c"] * part for part in pair[1]], "none": None}

    x = [data(device, 3, seed=seed).requires_grad_() for seed in range(4)]
    sample = ({"a": x[0], "b": {"c": x[1]}}, (x[2], [x[3]]))
    fast = pygraph.make_graphed_callables(fn, sample)
    found, expected = fast(*sample), fn(*sample)
    assert_same(found, expected, device)
    for out in (found, expected):
        (out["sum"].sum() + out["rest"][0].square().sum()).backward()
    for tensor in x:
        tensor.grad = None


def test_other_shapes(device: torch.device) -> None:
    def use(net: nn.Module) -> Any:
        found = []
        for size in (16, 7, 16, 9, 7):
            y = net(data(device, size, 4))
            y.sum().backward()
            found.append(y.detach())
        return found

    net = compare(device, lambda: make_net(device), (data(device, 16, 4),), use)
    assert graphs(net.forward) == 6


def test_double_backward(device: torch.device) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        # The last layer has no bias: where there is no second derivative, eager has None, and a graph zeros.
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)).to(device)

    def use(net: nn.Module) -> Any:
        x = data(device, 5, 4).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()  # the penalty of WGAN-GP
        return slope.detach(), x.grad

    compare(device, make, (data(device, 5, 4).requires_grad_(),), use)


def test_hooks_on_the_module(device: torch.device) -> None:
    """Registered before or after, of every kind."""

    def make() -> nn.Module:
        net = make_options(device).linear
        net.calls = []
        net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        net.register_forward_hook(lambda module, args, out: out + 1)
        return net

    def use(net: nn.Module) -> Any:
        net.register_full_backward_hook(lambda module, before, after: (before[0] * 3,))
        net.register_forward_hook(lambda module, args, out: net.calls.append(tuple(out.shape)))
        x = data(device, 5, 4).requires_grad_()
        for _ in range(3):
            y = net(x)
            y.sum().backward()
        return y.detach(), x.grad, net.calls

    compare(device, make, (data(device, 5, 4).requires_grad_(),), use)


def test_hooks_on_a_submodule(device: torch.device) -> None:
    def make() -> nn.Module:
        net = make_net(device)
        net[0].register_forward_hook(lambda module, args, out: out * 2)
        return net

    compare(device, make, (data(device, 16, 4),), lambda net: net(data(device, 16, 4)).detach())


def test_inputs_that_share_memory(device: torch.device) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    sample = data(device, 8)
    fast = pygraph.make_graphed_callables(fn, (sample, data(device, 8, seed=3)))
    for make in (lambda t: (t, t), lambda t: (t[:4], t[2:6]), lambda t: (t[4:], t[:4]), lambda t: (t, t.clone())):
        mine, theirs = sample.clone(), sample.clone()
        assert_same(fast(*make(mine)), fn(*make(theirs)), device)
        assert_same(mine, theirs, device)


def test_outputs_that_are_inputs(device: torch.device) -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        return x, x[1:], y, y.view(-1), x * y

    x, y = data(device, 2, 3), data(device, 2, 3, seed=3)
    fast = pygraph.make_graphed_callables(fn, (x, y))
    for _ in range(2):
        out = fast(x, y)
        assert out[0] is x
        assert out[2] is y
        assert out[1].data_ptr() == x[1:].data_ptr()
        assert out[3].data_ptr() == y.data_ptr()
        assert torch.equal(out[4], x * y)


def test_outputs_are_not_overwritten(device: torch.device) -> None:
    net = make_net(device).eval()
    pygraph.make_graphed_callables(net, (data(device, 16, 4),))
    held = [(y := net(data(device, 16, 4, seed=seed)), y.detach().clone()) for seed in range(5)]
    for y, then in held:
        assert torch.equal(y, then)
    grads = []
    for y, _ in reversed(held):  # each backward reads what its own forward has kept
        grads.append(torch.autograd.grad(y.square().sum(), net[4].weight)[0])
    plain = make_net(device).eval()
    expected = [
        torch.autograd.grad(plain(data(device, 16, 4, seed=seed)).square().sum(), plain[4].weight)[0]
        for seed in reversed(range(5))
    ]
    assert_same(grads, expected, device)


def test_training_and_evaluation(device: torch.device) -> None:
    """Graphs of both modes stay, with and without gradients."""

    def use(net: nn.Module) -> Any:
        found = []
        for step in range(8):
            net.train(step % 2 == 0)
            y = net(data(device, 16, 4, seed=step))
            y.sum().backward()
            found.append(y.detach())
            with torch.no_grad():
                found.append(net.eval()(data(device, 16, 4, seed=step)))
        return found

    net = compare(device, lambda: make_net(device), (data(device, 16, 4),), use)
    assert graphs(net.forward) == 5  # forward and backward of each, and the forward without a backward


def test_parameters_that_move(device: torch.device) -> None:
    def use(net: nn.Module) -> Any:
        found = []
        for step in range(6):
            if step == 2:
                for parameter in net.parameters():
                    parameter.data = parameter.data.clone()
            if step == 4:
                with torch.no_grad():
                    net[4].bias = nn.Parameter(net[4].bias * 2)
            y = net(data(device, 16, 4, seed=step))
            y.sum().backward()
            found.append(y.detach())
        return found

    compare(device, lambda: make_net(device), (data(device, 16, 4),), use)


def test_parameters_that_are_added(device: torch.device) -> None:
    def use(net: nn.Module) -> Any:
        first = net(data(device, 16, 4)).detach()
        torch.manual_seed(3)
        net.append(nn.Linear(3, 2).to(device))
        y = net(data(device, 16, 4))
        y.sum().backward()
        return first, y.detach(), net[5].weight.grad

    compare(device, lambda: make_net(device), (data(device, 16, 4),), use)


def test_buffers_that_require_grad(device: torch.device) -> None:
    class Shifted(nn.Module):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(4).requires_grad_())

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.shift).square()

    def make() -> nn.Module:
        net = Shifted()
        net.shift = net.shift.detach().to(device).requires_grad_()
        return net

    def use(net: nn.Module) -> Any:
        for seed in range(3):
            net(data(device, 5, 4, seed=seed)).sum().backward()
        return net.shift.grad

    compare(device, make, (data(device, 5, 4),), use)


def test_autocast_with_its_cache(device: torch.device) -> None:
    def use(net: nn.Module) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = net(data(device, 16, 4))
        y.float().sum().backward()
        return y.detach()

    plain, graphed = make_net(device), make_net(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        pygraph.make_graphed_callables(graphed, (data(device, 16, 4),))
    torch.manual_seed(5)
    expected = use(plain)
    torch.manual_seed(5)
    assert_same(use(graphed), expected, device)
    assert_same(state(graphed), state(plain), device)


def test_inputs_that_are_not_used(device: torch.device) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x * 2

    x, y = data(device, 3).requires_grad_(), data(device, 3).requires_grad_()
    with pytest.raises(ArgumentError, match=r"sample_args\[1\] requires grad, and no result depends on it"):
        pygraph.make_graphed_callables(fn, (x, y))
    fast = pygraph.make_graphed_callables(fn, (x, y), allow_unused_input=True)
    fast(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is None
    pygraph.make_graphed_callables(fn, (x, y.detach()))

    net = make_net(device)
    net.register_parameter("idle", nn.Parameter(torch.ones(2, device=device)))
    with pytest.raises(ArgumentError, match="idle requires grad"):
        pygraph.make_graphed_callables(net, (data(device, 16, 4),))
    assert "forward" not in vars(net)
    pygraph.make_graphed_callables(net, (data(device, 16, 4),), allow_unused_input=True)
    assert "forward" in vars(net)


def test_copies_and_whole_steps(device: torch.device) -> None:
    """A graphed module can be copied, and is part of a larger graph."""
    net = make_net(device)
    pygraph.make_graphed_callables(net, (data(device, 16, 4),))
    other = copy.deepcopy(net)
    assert other.forward.fn.__self__ is other
    optimizer = torch.optim.SGD(other.parameters(), 0.1)

    @pygraph.jit
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = other(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for seed in range(5):
        step(data(device, 16, 4, seed=seed))
    assert step.cache_info().hits >= 3
    assert not torch.equal(other[4].weight, net[4].weight)
    assert list(net.state_dict()) == list(make_net(device).state_dict())


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((3, ()), r"callables is a int; expected a function or an nn.Module"),
        (((len, 3), ((), ())), r"callables\[1\] is a int"),
        ((len, [1]), r"sample_args is not of the right structure; expected a tuple of arguments"),
        (((len,), ([1],)), r"expected a tuple of tuples, one for each callable"),
        (((len, len), ((),)), r"sample_args has 1 items; expected 2, one for each callable"),
        ((len, (), -1), r"num_warmup_iters=-1; expected an integer from 0 on"),
        ((len, (), 3, False, "pool"), r"pool is a str; expected None or a token of graph_pool_handle"),
    ],
)
def test_wrong_arguments(args: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        pygraph.make_graphed_callables(*args)


def test_a_sample_that_does_not_fit_raises_eager_s_error_and_changes_nothing(device: torch.device) -> None:
    net = make_net(device)
    before = state(net)
    with pytest.raises(RuntimeError, match="shape"):
        pygraph.make_graphed_callables(net, (data(device, 16, 5),))
    assert "forward" not in vars(net)
    assert_same(state(net), before, device)
