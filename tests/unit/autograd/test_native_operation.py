"""Native operations: calls under autograd that C++ serves give what eager gives, and what is special goes to Python."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import pygraph
from pygraph.autograd.native_operation import NativeOperation
from pygraph.autograd.operation import Operation
from pygraph.autograd.result_links import node_of_call
from pygraph.process import extension
from tests.memory import live_bytes
from tests.unit.native.test_replay import fake  # noqa: F401  # pyright: ignore[reportUnusedImport]  # a fixture

pytestmark = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))

WARM = 8
"""Calls after which the next ones are native, also backwards."""


@pytest.fixture(params=["replays", "executables"], autouse=True)
def way(request: pytest.FixtureRequest, device: torch.device) -> None:
    """Have the emulated device replay natively, as CUDA does, or not."""
    if request.param == "replays" and device.type == "emu":
        request.getfixturevalue("fake")


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forwards and backwards that Python serves."""
    served: list[str] = []

    def forward(call: Any, *args: Any, original: Any = Operation.forward) -> Any:
        served.append("forward")
        return original(call, *args)

    def backward(ctx: Any, *args: Any, original: Any = Operation.backward) -> Any:
        served.append("backward")
        return original(ctx, *args)

    monkeypatch.setattr(Operation, "forward", staticmethod(forward))
    monkeypatch.setattr(Operation, "backward", staticmethod(backward))
    return served


class Results(NamedTuple):
    first: Tensor
    second: Tensor


class Net(nn.Module):
    """Layers whose weights and results a backward reads, and a bias that it does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.second(torch.sigmoid(self.first(x))) * scale)


class Pair:
    """Two equal modules, in eager and with a graphed forward that runs natively."""

    def __init__(self, device: torch.device, make: Callable[[], nn.Module] = Net) -> None:
        self.device = device
        self.theirs: Any = make().to(device)
        self.mine: Any = make().to(device)
        pygraph.make_graphed_callables(self.mine, (self.input(0),))
        for number in range(WARM):
            self.step(number)

    def step(self, number: int) -> None:
        x = self.input(number)
        self.both(lambda net: net(x).square().sum().backward())

    def input(self, number: int) -> Tensor:
        return torch.randn(2, 3, generator=torch.Generator().manual_seed(number)).to(self.device)

    def both(self, run: Callable[[nn.Module], Any]) -> Any:
        """What is run with the graphed module, compared with eager; or the errors of both."""
        outcomes: list[Any] = []
        for net in (self.mine, self.theirs):
            net.zero_grad()
            torch.manual_seed(3)
            outcomes.append((run(net), [parameter.grad for parameter in net.parameters()]))
        torch.testing.assert_close(outcomes[0], outcomes[1])
        return outcomes[0]

    def both_raise(self, run: Callable[[nn.Module], Any], match: str) -> None:
        for net in (self.mine, self.theirs):
            net.zero_grad()
            with pytest.raises(RuntimeError, match=match):
                run(net)


@pytest.fixture
def pair(device: torch.device, way: None) -> Pair:
    return Pair(device)


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def is_native(result: Tensor) -> bool:
    return isinstance(node_of_call(result.grad_fn), NativeOperation._backward_cls)  # pyright: ignore


def test_training_steps_do_without_python(pair: Pair, in_python: list[str]) -> None:
    for number in range(4):
        pair.step(number)
    assert not in_python
    assert is_native(pair.mine(pair.input(0)))
    assert "no fallbacks" in str(pair.mine.forward.explain())


def test_backwards_outside_of_autocast_after_some_inside(pair: Pair, in_python: list[str]) -> None:
    """As in training with autocast: the block in which a callable is made has a backward, and no other has."""

    def step(net: nn.Module, inside: bool) -> Tensor:
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.autocast(pair.device.type, torch.bfloat16, cache_enabled=False),
        ):
            loss = net(pair.input(3)).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return loss

    for inside in (True, False):
        for _ in range(WARM):
            in_python.clear()
            pair.both(lambda net, inside=inside: step(net, inside))
        assert not in_python


def _evaluated(net: nn.Module, x: Tensor, number: int) -> None:
    net(x).square().sum().backward()
    with torch.no_grad() if number % 2 else torch.inference_mode():
        net.eval()(x)
    net.train()


def _of_inputs(net: nn.Module, x: Tensor, number: int) -> Any:
    x = x.requires_grad_()
    net(x).square().sum().backward()
    return x.grad


def _retained(net: nn.Module, x: Tensor, number: int) -> None:
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _frozen_in_turns(net: Any, x: Tensor, number: int) -> None:
    net.first.requires_grad_(number % 2 == 0)
    net(x).square().sum().backward()


def _loaded(net: nn.Module, x: Tensor, number: int) -> None:
    net(x).square().sum().backward()
    net.load_state_dict({name: tensor * 0.9 for name, tensor in net.state_dict().items()})


def _hooked(net: nn.Module, x: Tensor, number: int) -> None:
    result = net(x)
    result.register_hook(lambda gradient: gradient * 2)
    result.square().sum().backward()


LOOPS: dict[str, Callable[[Any, Tensor, int], Any]] = {
    "evaluated between steps": _evaluated,
    "gradients of inputs": _of_inputs,
    "a graph that is kept": _retained,
    "two forwards before a backward": lambda net, x, number: (net(x).sum() + net(x).square().sum()).backward(),
    "a smaller batch now and then": lambda net, x, number: net(x[number % 3 == 0 :]).square().sum().backward(),
    "parameters frozen in turns": _frozen_in_turns,
    "weights loaded": _loaded,
    "a hook on the result": _hooked,
    "transposed": lambda net, x, number: net(x.t().contiguous().t()).square().sum().backward(),
    "torch.autograd.grad": lambda net, x, number: torch.autograd.grad(net(x).sum(), [*net.parameters()]),
}


@pytest.mark.rotates
@pytest.mark.parametrize("loop", LOOPS)
def test_what_loops_do_runs_natively_soon(pair: Pair, in_python: list[str], loop: str) -> None:
    for number in range(3 * WARM):
        if number == 2 * WARM:
            in_python.clear()
        pair.both(lambda net, number=number: LOOPS[loop](net, pair.input(number), number))
    assert not in_python


def test_results_are_fresh(pair: Pair) -> None:
    results = [pair.mine(pair.input(number)) for number in range(3)]
    for number in (1, 0, 2):
        torch.testing.assert_close(results[number], pair.theirs(pair.input(number)))
        found = torch.autograd.grad(results[number].sum(), [*pair.mine.parameters()])
        wanted = torch.autograd.grad(pair.theirs(pair.input(number)).sum(), [*pair.theirs.parameters()])
        torch.testing.assert_close(found, wanted)


def test_broadcast_and_transposed_cotangents(pair: Pair, in_python: list[str]) -> None:
    x = pair.input(0)
    transposed = torch.arange(6.0, device=pair.device).view(3, 2).t()
    pair.both(lambda net: net(x).sum().backward())
    pair.both(lambda net: net(x).backward(transposed))
    assert not in_python


def test_numbers_are_read_at_every_call(device: torch.device, in_python: list[str]) -> None:
    pair = Pair(device)
    for number in range(WARM):
        x = pair.input(number)
        in_python.clear()
        pair.both(lambda net, x=x, number=number: net(x, 0.5 * number).sum().backward())
    assert not in_python


def test_arguments_that_require_grad(pair: Pair, in_python: list[str]) -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(net(net(leaf * 2)).square().sum(), leaf)
        return gradient

    for number in range(WARM):
        in_python.clear()
        x = pair.input(number)
        pair.both(lambda net, x=x: run(net, x))
    assert not in_python


def test_one_tensor_as_two_arguments(device: torch.device, in_python: list[str]) -> None:
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x * weight) * y

    function = pygraph.jit(fn)
    for number in range(WARM):
        in_python.clear()
        leaf = torch.full((3,), 0.1 * number, device=device, requires_grad=True)
        args = (leaf, leaf)
        found = torch.autograd.grad(function(*args).sum(), [leaf, weight])
        torch.testing.assert_close(found, torch.autograd.grad(fn(*args).sum(), [leaf, weight]))
    assert not in_python


@pytest.mark.parametrize("kind", ["dict", "named", "list"])
def test_structures_of_results(device: torch.device, kind: str, in_python: list[str]) -> None:
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def fn(x: Tensor) -> Any:
        first, second = torch.sin(x * weight), torch.argmax(x)
        if kind == "named":
            return Results(first, second)
        return {"a": first, "n": 3, "b": (second, None)} if kind == "dict" else [first, [second, first.cos()]]

    function = pygraph.jit(fn)
    for number in range(WARM):
        in_python.clear()
        x = torch.arange(3.0, device=device) * number
        found, wanted = function(x), fn(x)
        assert type(found) is type(wanted)
        torch.testing.assert_close(found, wanted)
        flat = [[leaf for leaf in pytree.tree_leaves(r) if isinstance(leaf, Tensor)] for r in (found, wanted)]
        assert [one.requires_grad for one in flat[0]] == [one.requires_grad for one in flat[1]]
        sums = [total([one for one in tensors if one.requires_grad]) for tensors in flat]
        torch.testing.assert_close(*(torch.autograd.grad(one, weight) for one in sums))
    assert not in_python


def exp_and_sin(device: torch.device) -> tuple[Tensor, Any, Any]:
    """A weight, and a function with two results of it which save tensors of their own, in eager and compiled."""
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x * weight).exp(), torch.exp(x * weight).sin()

    return weight, fn, pygraph.jit(fn)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_loss_alone_of_several_results(device: torch.device, in_python: list[str], keeps: bool) -> None:
    """As of a model that returns its loss and its logits: what Python serves is what comes after it."""
    weight, fn, function = exp_and_sin(device)
    x = torch.arange(3.0, device=device) / 8
    for _ in range(WARM):
        in_python.clear()
        found, wanted = function(x), fn(x)
        for results in (found, wanted):
            results[0].sum().backward(retain_graph=keeps)
        torch.testing.assert_close(found, wanted)
    assert is_native(found[0])
    assert not in_python
    weight.grad = None
    for index in (1, 0) if keeps else (1,):
        grads = [torch.autograd.grad(results[index].sum(), weight) for results in (found, wanted)]
        torch.testing.assert_close(*grads)
    for results in (found, wanted):
        with pytest.raises(RuntimeError, match="second time"):
            results[0].sum().backward()


def test_the_loss_again_after_its_own_tensors_are_freed(device: torch.device) -> None:
    _, fn, function = exp_and_sin(device)
    x = torch.arange(3.0, device=device) / 8
    for one in (fn, *[function] * WARM):
        results = one(x)
        results[0].sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            results[0].sum().backward()
        results[1].sum().backward()


def test_the_loss_alone_frees_what_it_has_read(device: torch.device) -> None:
    weight = torch.full((1 << 10,), 0.5, device=device, requires_grad=True)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.sin(torch.exp(x * weight))
        return logits.square().sum(), logits

    function = pygraph.jit(fn)
    x = torch.ones(1 << 10, device=device)
    for _ in range(WARM):
        weight.grad = None
        loss, logits = function(x)
        loss.backward()
        del loss, logits
    kept: list[Tensor] = []
    before = live_bytes(device)
    for _ in range(4):
        loss, logits = function(x)
        kept.append(logits)
        loss.backward()
    del loss, logits
    assert live_bytes(device) - before <= 4 * (weight.nbytes + 512)


# -- what is special goes to Python ------------------------------------------------------------------------------------


def test_one_result_after_the_other(device: torch.device) -> None:
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x * weight), torch.exp(x * weight)

    function = pygraph.jit(fn)
    x = torch.arange(3.0, device=device)
    for _ in range(WARM):
        total([*function(x)]).backward()
    for order in ((0, 1), (1, 0)):
        found, wanted = function(x), fn(x)
        assert is_native(found[0])
        for index in order:
            torch.testing.assert_close(
                torch.autograd.grad(found[index].sum(), weight, retain_graph=index == order[0]),
                torch.autograd.grad(wanted[index].sum(), weight, retain_graph=index == order[0]),
            )
        with pytest.raises(RuntimeError, match="second time"):
            found[order[1]].sum().backward()


def test_a_retained_graph(pair: Pair) -> None:
    def run(net: nn.Module) -> None:
        result = net(pair.input(0))
        result.sum().backward(retain_graph=True)
        result.square().sum().backward(retain_graph=True)
        result.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            result.sum().backward()

    pair.both(run)


def test_a_second_backward(pair: Pair) -> None:
    def run(net: nn.Module) -> None:
        result = net(pair.input(0))
        result.sum().backward()
        result.sum().backward()

    pair.both_raise(run, "second time")


@pytest.mark.parametrize("create_graph", [True, False])
def test_gradients_of_gradients(pair: Pair, create_graph: bool) -> None:
    def run(net: nn.Module, x: Tensor) -> Any:
        leaf = x.clone().requires_grad_()
        hidden = leaf * 2
        result = net(hidden)
        parameters = [*net.parameters()]
        first = torch.autograd.grad(
            result.square().sum(), [leaf, hidden, *parameters], create_graph=create_graph, retain_graph=True
        )
        if not create_graph:
            return first
        return first, torch.autograd.grad(total([one.square() for one in first]), [leaf, *parameters])

    for number in range(WARM):
        x = pair.input(number)
        pair.both(lambda net, x=x: run(net, x))


def test_gradients_of_gradients_by_an_argument_that_no_backward_reads(device: torch.device) -> None:
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(y * weight) + x

    function = pygraph.jit(fn)
    y = torch.arange(3.0, device=device)
    for _ in range(WARM):
        leaf = torch.ones(3, device=device, requires_grad=True)
        outcomes: list[Any] = []
        for one in (function, fn):
            result = one(leaf.exp(), y)
            first = torch.autograd.grad(result.square().sum(), [leaf, weight], create_graph=True)
            outcomes.append((first, torch.autograd.grad(total(first), [leaf, weight])))
        torch.testing.assert_close(*outcomes)


def test_updated_tensors(pair: Pair) -> None:
    def result_updated(net: nn.Module) -> None:
        result = net(pair.input(0))
        with torch.no_grad():
            result.mul_(2)
        result.sum().backward()

    def weight_updated(net: Any) -> None:
        result = net(pair.input(0))
        with torch.no_grad():
            net.second.weight.add_(0)
        result.sum().backward()

    def argument_updated(net: nn.Module) -> None:
        x = pair.input(0)
        result = net(x)
        x.add_(1)
        result.sum().backward()

    for run in (result_updated, weight_updated, argument_updated):
        pair.both_raise(run, "modified by an inplace operation")


def test_an_updated_tensor_that_no_backward_reads(pair: Pair, in_python: list[str]) -> None:
    def run(net: Any) -> None:
        result = net(pair.input(0))
        with torch.no_grad():
            net.first.bias.add_(0)
        result.sum().backward()

    pair.both(run)
    assert in_python in ([], ["backward"])


def test_hooks(pair: Pair) -> None:
    def run(net: nn.Module) -> Any:
        seen: list[Any] = []
        result = net(pair.input(0))
        handles = [
            next(net.parameters()).register_hook(lambda gradient: gradient * 2),
            result.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 3),
            result.grad_fn.register_hook(lambda given, taken: seen.append([one is None for one in given])),  # pyright: ignore
            result.grad_fn.register_prehook(lambda taken: (taken[0] + 1,)),  # pyright: ignore
        ]
        result.sum().backward()
        for handle in handles:
            handle.remove()
        return seen[0]

    pair.both(run)


@pytest.mark.parametrize("forward", [True, False])
def test_hooks_on_saved_tensors(pair: Pair, forward: bool, in_python: list[str]) -> None:
    def run(net: nn.Module) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
        if forward:
            with hooks:
                result = net(pair.input(0))
        else:
            result = net(pair.input(0))
            with hooks:
                result.sum().backward(retain_graph=True)
        result.sum().backward()

    pair.both(run)
    pair.both(lambda net: net(pair.input(1)).sum().backward())


def test_a_batch_of_gradients(pair: Pair) -> None:
    def run(net: nn.Module) -> Any:
        result = net(pair.input(0))
        batch = torch.eye(6, device=pair.device).view(6, 2, 3)
        return torch.autograd.grad(result, [*net.parameters()], batch, is_grads_batched=True)

    pair.both(run)


def test_tangents_of_gradients(pair: Pair) -> None:
    def run(net: nn.Module) -> Any:
        result = net(pair.input(0))
        with forward_ad.dual_level():
            cotangent = forward_ad.make_dual(torch.ones_like(result), torch.full_like(result, 2.0))
            gradients = torch.autograd.grad(result, [*net.parameters()], cotangent)
            return [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]

    pair.both(run)


def test_anomaly_mode(pair: Pair) -> None:
    def run(net: nn.Module) -> None:
        with torch.autograd.detect_anomaly(check_nan=False):
            net(pair.input(0)).sum().backward()

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        pair.both(run)


def test_some_gradients_only(pair: Pair) -> None:
    def run(net: nn.Module) -> Any:
        return torch.autograd.grad(net(pair.input(0)).sum(), [next(net.parameters())])

    pair.both(run)


def test_graphs_that_are_gone(pair: Pair) -> None:
    x = pair.input(0)
    result = pair.mine(x)
    assert is_native(result)
    pair.mine.forward.cache_clear()
    found = torch.autograd.grad(result.sum(), [*pair.mine.parameters()])
    torch.testing.assert_close(found, torch.autograd.grad(pair.theirs(x).sum(), [*pair.theirs.parameters()]))
    for _ in range(WARM):
        pair.both(lambda net: net(x).sum().backward())
    assert is_native(pair.mine(x))


def test_moved_parameters(pair: Pair) -> None:
    x = pair.input(0)
    for number in range(3):
        for net in (pair.mine, pair.theirs):
            for parameter in net.parameters():
                parameter.data = parameter.data.clone() * (1 + number)
        for _ in range(WARM):
            pair.both(lambda net: net(x).sum().backward())


class Kept:
    """What a call returns beside its tensors, as the cache of a language model."""

    def __init__(self, layers: list[dict[str, Tensor]]) -> None:
        self.layers, self.is_full, self.dtype, self.name = layers, False, torch.float32, None


class Keeping(nn.Module):
    """Returns objects with tensors, of which some are saved and some are results of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return the result, and an object with what lies in between."""
        hidden = self.first(x).tanh()
        result = self.second(hidden)
        return {"result": result, "kept": Kept([{"hidden": hidden}, {"product": hidden * 2}])}


def test_objects_with_tensors(device: torch.device) -> None:
    torch.manual_seed(0)
    net = Keeping().to(device)
    fast = pygraph.jit(net)
    kept: list[Any] = []
    for number in range(WARM + 3):
        x = torch.full((2, 3), float(number), device=device)
        found, gradients = [], []
        for fn in (net, fast):
            net.zero_grad()
            found.append(fn(x))
            one = found[-1]["kept"]
            (
                found[-1]["result"].sum() + one.layers[0]["hidden"].sum() + one.layers[1]["product"].square().sum()
            ).backward()
            gradients.append([parameter.grad for parameter in net.parameters()])
        expected, mine = found
        assert torch.equal(expected["result"], mine["result"])
        assert isinstance(mine["kept"], Kept)
        assert (mine["kept"].is_full, mine["kept"].dtype, mine["kept"].name) == (False, torch.float32, None)
        for one, other in zip(expected["kept"].layers, mine["kept"].layers, strict=True):
            assert one.keys() == other.keys()
            assert all(map(torch.equal, one.values(), other.values()))
        assert all(map(torch.equal, *gradients))
        kept.append((mine, [mine["kept"].layers[0]["hidden"].clone()]))
    assert is_native(mine["result"])
    assert all(torch.equal(one["kept"].layers[0]["hidden"], before) for one, (before,) in kept)


class Heads(nn.Module):
    """Two results, each of a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        y = self.trunk(x).tanh()
        return self.left(y), self.right(y)


@pytest.mark.parametrize("warm", [(0, 1), (0,), (1,)])
def test_no_gradient_is_not_zero_after_parameters_have_moved(device: torch.device, warm: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = Heads().to(device)
    fast = pygraph.jit(net)
    x = torch.ones(2, 3, device=device)
    for _ in range(WARM):
        results = fast(x)
        total([results[index] for index in warm]).backward()

    def first_and_second(fn: Callable[..., Any], moves: bool) -> list[Any]:
        parameters = [*net.parameters()]
        result = fn(x)[0]
        if moves:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
        first = torch.autograd.grad(result.square().sum(), parameters, create_graph=True, allow_unused=True)
        kept = [gradient for gradient in first if gradient is not None]
        return [*first, *torch.autograd.grad(total(kept), parameters, allow_unused=True)]

    expected = first_and_second(net, False)
    for _ in range(3):
        found = first_and_second(fast, True)
        assert [gradient is None for gradient in found] == [gradient is None for gradient in expected]
        for a, b in zip(found, expected, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b)


def test_a_function_with_effects(device: torch.device, in_python: list[str]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))

    pair = Pair(device, make)
    in_python.clear()
    for number in range(4):
        pair.step(number)
    assert not in_python

    def twice(net: nn.Module) -> Any:
        first = torch.autograd.grad(net(pair.input(0)).square().sum(), [*net.parameters()], create_graph=True)
        return torch.autograd.grad(total(first), [*net.parameters()], allow_unused=True)

    pair.both(twice)
    torch.testing.assert_close(pair.mine.state_dict(), pair.theirs.state_dict())


# -- memory and threads ------------------------------------------------------------------------------------------------


def test_a_backward_frees_what_was_saved(pair: Pair) -> None:
    before = live_bytes(pair.device)
    for _ in range(3):
        pair.mine(pair.input(0)).sum().backward()
        pair.mine.zero_grad()
    assert live_bytes(pair.device) <= before


def test_a_module_that_holds_its_result_can_be_collected(device: torch.device) -> None:
    pair = Pair(device)
    gone = weakref.ref(pair.mine)
    held: Any = pair.mine
    held.last = held(pair.input(0))
    assert is_native(held.last)
    del held, pair
    gc.collect()
    assert gone() is None


def test_results_outlive_their_module(device: torch.device) -> None:
    pair = Pair(device)
    parameters = [*pair.mine.parameters()]
    result, wanted = pair.mine(pair.input(0)), pair.theirs(pair.input(0))
    del pair.mine
    gc.collect()
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), parameters), torch.autograd.grad(wanted.sum(), [*pair.theirs.parameters()])
    )


def test_threads(pair: Pair) -> None:
    errors: list[BaseException] = []
    parameters = {net: [*net.parameters()] for net in (pair.mine, pair.theirs)}

    def steps(number: int) -> None:
        try:
            for step in range(6):
                x = pair.input(10 * number + step)
                found, wanted = (torch.autograd.grad(net(x).sum(), given) for net, given in parameters.items())
                torch.testing.assert_close(found, wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=steps, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
