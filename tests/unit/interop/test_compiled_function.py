"""Training graphs that are called without AOTAutograd's wrappers behave as with them, and as in eager.

Each scenario is run in eager, or by ``backend="aot_eager"``, whose calls have the wrappers, and by pygraph, most after
two steps, so that the wrappers are left out.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils import _pytree as pytree

import pygraph
from pygraph.interop import compiled_function, plain_graphs

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's, which differ between versions
]

Compile = Callable[[Any], Any]
Scenario = Callable[[Compile, torch.device], Any]


def backend(name: str) -> Compile:
    if name == "eager":
        return lambda fn: fn
    return lambda fn: torch.compile(fn, backend=pygraph.backend if name == "pygraph" else name)


def is_direct(result: torch.Tensor) -> bool:
    """Whether a result was made without the wrappers."""
    function: Any = getattr(result.grad_fn, "_forward_cls", None)
    return function is not None and function.forward.__module__ == compiled_function.__name__


def model(device: torch.device) -> nn.Module:
    """A model with updated buffers, and results that are an unsafe view, not differentiable, and of no use."""
    torch.manual_seed(0)
    return _Model().to(device)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.norm(self.first(x)))
        logits = self.last(hidden.view(2, 3, 8))
        return logits, logits.argmax(-1), hidden.square().mean()


def example(device: torch.device, seed: int = 1) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(device)


def warm(compile: Compile, net: nn.Module, device: torch.device) -> Any:
    """Compile a model and do two steps with it, which leave no gradients."""
    fast = compile(net)
    for seed in (10, 11):
        fast(example(device, seed))[0].sum().backward()
        net.zero_grad()
    return fast


def gradients(net: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.cpu().clone() for p in net.parameters()]


# ---- scenarios: what a user sees -------------------------------------------------------------------------------------


def steps(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    fast, seen = compile(net), []
    for seed in range(6):
        optimizer.zero_grad()
        logits, best, extra = fast(example(device, seed))
        (logits.square().mean() + extra).backward()
        optimizer.step()
        seen += [logits.detach().cpu(), best.cpu(), best.requires_grad, logits._is_view(), logits.is_leaf]
    return seen, [value.cpu() for value in net.state_dict().values()]


def accumulated(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = warm(compile, net, device)
    for seed in range(3):
        fast(example(device, seed))[0].sum().backward()
    return gradients(net)


def several_forwards(compile: Compile, device: torch.device) -> Any:
    """Forwards before the first backward, which is compiled then, and backwards in another order."""
    net = model(device)
    fast = compile(net)
    losses = [fast(example(device, seed))[0].square().sum() for seed in range(4)]
    for loss in reversed(losses):
        loss.backward()
    return gradients(net), [loss.detach().cpu() for loss in losses]


def one_result(number: int) -> Scenario:
    """Backward from one result: the cotangents of the others are undefined."""

    def scenario(compile: Compile, device: torch.device) -> Any:
        net = model(device)
        warm(compile, net, device)(example(device))[number].sum().backward()
        return gradients(net)

    return scenario


def some_gradients(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = warm(compile, net, device)
    unused = torch.ones(2, device=device, requires_grad=True)
    inputs = [net.first.weight, unused, net.last.weight]
    found = torch.autograd.grad(fast(example(device))[2], inputs, allow_unused=True)
    return [None if one is None else one.cpu() for one in found], gradients(net)


def unused_input(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = warm(compile, net, device)
    unused = torch.ones(2, device=device, requires_grad=True)
    return torch.autograd.grad(fast(example(device))[0].sum(), [unused])


def cotangent(make: Callable[[torch.Tensor], torch.Tensor]) -> Scenario:
    """A cotangent with other strides than the result's."""

    def scenario(compile: Compile, device: torch.device) -> Any:
        net = model(device)
        logits = warm(compile, net, device)(example(device))[0]
        logits.backward(make(torch.arange(18.0).to(device)))
        return gradients(net)

    return scenario


def update_of(choose: Callable[[Any, nn.Module], torch.Tensor]) -> Scenario:
    """An update of a tensor that is saved for backward."""

    def scenario(compile: Compile, device: torch.device) -> Any:
        net = model(device)
        fast = warm(compile, net, device)
        results = fast(example(device))
        with torch.no_grad():
            choose(results, net).mul_(2)
        results[0].sum().backward()
        return gradients(net)

    return scenario


def twice(retain: bool, from_the_start: bool = False) -> Scenario:
    """A second backward through the same graph."""

    def scenario(compile: Compile, device: torch.device) -> Any:
        net = model(device)
        fast = compile(net)
        for seed in range(2):
            fast(example(device, seed))[0].sum().backward(retain_graph=from_the_start)
        loss = fast(example(device))[0].square().sum()
        loss.backward(retain_graph=retain)
        loss.backward()
        return gradients(net)

    return scenario


def higher_order(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = compile(net)
    for seed in range(3):
        loss = fast(example(device, seed))[0].square().sum()
        (first,) = torch.autograd.grad(loss, [net.last.weight], create_graph=True)
    assert first.requires_grad
    first.sum().backward()
    return gradients(net)


def saved_hooks(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = warm(compile, net, device)
    packed: list[tuple[int, ...]] = []
    unpacked: list[tuple[int, ...]] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(value.shape))
        return value.clone()

    def unpack(value: torch.Tensor) -> torch.Tensor:
        unpacked.append(tuple(value.shape))
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = fast(example(device))[0].sum()
    loss.backward()
    assert packed
    assert unpacked
    return gradients(net)


def gradient_hooks(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    seen: list[Any] = []
    net.last.weight.register_hook(lambda grad: grad * 2)
    net.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.cpu().clone()))
    fast = warm(compile, net, device)
    logits = fast(example(device))[0]
    logits.register_hook(lambda grad: grad + 1)
    logits.sum().backward()
    return gradients(net), seen


def other_modes(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = warm(compile, net, device)
    with torch.no_grad():
        first = fast(example(device))[0]
    with torch.inference_mode():
        second = fast(example(device))[0].clone()
    third = fast(example(device))[0]
    third.sum().backward()
    return first.requires_grad, first.cpu(), second.cpu(), third.detach().cpu(), gradients(net)


def autocast(compile: Compile, device: torch.device) -> Any:
    """Compiled under autocast, with a backward under it and without."""
    net = model(device)
    fast = compile(net)
    for seed in range(4):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = fast(example(device, seed))[0]
            loss = logits.float().sum()
            if seed % 2:
                loss.backward()
        if not seed % 2:
            loss.backward()
    return logits.dtype, gradients(net)


def backward_under_autocast(compile: Compile, device: torch.device) -> Any:
    """Compiled without autocast; the surroundings of a backward do not change what it computes."""
    net = model(device)
    fast = warm(compile, net, device)
    loss = fast(example(device))[0].square().sum()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss.backward()
    return [grad.dtype for grad in gradients(net)]


def inputs_that_require_grad(compile: Compile, device: torch.device) -> Any:
    """An input with a gradient, and one that never gets any: its own graph stays as it is."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y.detach()).sin().sum()

    fast = compile(fn)
    for seed in range(3):
        x, leaf = (example(device, seed + k).requires_grad_() for k in (0, 5))
        y = leaf * 2
        fast(x, y).backward()
        y.sum().backward()
    return x.grad.cpu(), leaf.grad.cpu()


def in_a_thread(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = warm(compile, net, device)
    loss = fast(example(device))[0].sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return gradients(net)


def inside_of_a_function(compile: Compile, device: torch.device) -> Any:
    """A step whose backward breaks Dynamo's graph, so that Dynamo looks at all that runs in it."""
    net = model(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x)[0].square().sum()
        torch._dynamo.graph_break()
        loss.backward()
        return loss.detach()

    fast = compile(step)
    return [fast(example(device, seed)).cpu() for seed in range(4)], gradients(net)


def after_a_reset(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = warm(compile, net, device)
    loss = fast(example(device))[0].sum()
    torch._dynamo.reset()
    loss.backward()
    fast(example(device, 2))[0].sum().backward()
    return gradients(net)


def frozen(compile: Compile, device: torch.device) -> Any:
    net = model(device)
    fast = warm(compile, net, device)
    net.first.requires_grad_(False)
    for seed in range(3):
        fast(example(device, seed))[0].sum().backward()
    return gradients(net)


def deterministic(compile: Compile, device: torch.device) -> Any:
    """A backward under deterministic algorithms that was compiled without."""
    net = model(device)
    loss = warm(compile, net, device)(example(device))[0].sum()
    torch.use_deterministic_algorithms(True)
    try:
        loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return gradients(net)


def transform(compile: Compile, device: torch.device) -> Any:
    """A compiled backward within a transform, where AOTAutograd refuses to run."""
    net = model(device)
    fast = warm(compile, net, device)
    logits = fast(example(device))[0]

    def pullback(v: torch.Tensor) -> Any:
        return torch.autograd.grad(logits, list(net.parameters())[:1], v, retain_graph=True)

    return [one.cpu() for one in torch.func.vmap(pullback)(torch.ones(2, *logits.shape, device=device))]


RESULTS: dict[str, Scenario] = {
    "steps": steps,
    "accumulated gradients": accumulated,
    "several forwards": several_forwards,
    "one result": one_result(0),
    "a cotangent that is expanded": cotangent(lambda v: v[:1].expand(2, 3, 3)),
    "a cotangent that is transposed": cotangent(lambda v: v.view(3, 3, 2).permute(2, 0, 1)),
    "a cotangent that is contiguous": cotangent(lambda v: v.view(2, 3, 3)),
    "saved-tensor hooks": saved_hooks,
    "hooks of gradients": gradient_hooks,
    "other modes": other_modes,
    "backward under autocast": backward_under_autocast,
    "inputs that require grad": inputs_that_require_grad,
    "backward in a thread": in_a_thread,
    "inside of a function": inside_of_a_function,
    "after a reset": after_a_reset,
    "frozen parameters": frozen,
}

# Zeros for gradients that are None in eager, casts at other points, and errors, of which the user sees AOTAutograd's.
UNLIKE_EAGER: dict[str, Scenario] = {
    "another result": one_result(2),
    "some gradients": some_gradients,
    "autocast": autocast,
    "an update of a parameter": update_of(lambda results, net: net.last.weight),
    "an update of a result": update_of(lambda results, net: results[0]),
    "a second backward": twice(False),
    "a second backward of a graph that is retained": twice(True),
    "a graph that is retained from the start": twice(True, from_the_start=True),
    "a result that is not differentiable": one_result(1),
    "an unused input": unused_input,
    "a second derivative": higher_order,
    "deterministic algorithms": deterministic,
    "a transform": transform,
}


def outcome(scenario: Scenario, name: str, device: torch.device) -> Any:
    """The result of a scenario, or the type and first line of its error."""
    torch._dynamo.reset()
    try:
        return scenario(backend(name), device)
    except Exception as error:
        return type(error), str(error).split("\n")[0][:60]


def check_same(got: Any, expected: Any) -> None:
    got_leaves, got_tree = pytree.tree_flatten(got)
    leaves, tree = pytree.tree_flatten(expected)
    assert got_tree == tree, (got, expected)
    for one, other in zip(got_leaves, leaves, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


@pytest.mark.rotates
@pytest.mark.parametrize("name", RESULTS)
def test_results(device: torch.device, name: str) -> None:
    got, eager = (outcome(RESULTS[name], one, device) for one in ("pygraph", "eager"))
    check_same(got, eager)


@pytest.mark.rotates
@pytest.mark.parametrize("name", UNLIKE_EAGER)
def test_results_of_aot_autograd(device: torch.device, name: str) -> None:
    same_kernels = "inductor" if device.type == "cuda" else "aot_eager"
    got, wrapped = (outcome(UNLIKE_EAGER[name], one, device) for one in ("pygraph", same_kernels))
    check_same(got, wrapped)


# ---- which calls leave the wrappers out ------------------------------------------------------------------------------


def test_calls_after_the_first_leave_the_wrappers_out(device: torch.device) -> None:
    """If this fails with a new version of torch, `plain_graphs` no longer finds what it looks for in AOTAutograd."""
    net = model(device)
    fast = backend("pygraph")(net)
    for number in range(4):
        logits, _, extra = fast(example(device, number))
        assert is_direct(logits) == is_direct(extra) == (number > 0)
        assert logits.grad_fn is not None
        assert logits.grad_fn.name() == "CompiledFunctionBackward"
        (logits.sum() + extra).backward()


def test_ordinary_backwards_leave_the_wrappers_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(device)
    fast = warm(backend("pygraph"), net, device)
    inherited: list[bool] = []
    tangents = compiled_function._tangents

    def recorded(*args: Any) -> Any:
        found = tangents(*args)
        inherited.append(found is None)
        return found

    monkeypatch.setattr(compiled_function, "_tangents", recorded)
    for tangent in (torch.ones(2, 3, 3), torch.ones(2, 3, 3).transpose(0, 2).contiguous().transpose(0, 2)):
        fast(example(device))[0].backward(tangent.to(device))
    assert inherited == [False, True]


def _with_view(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * w).sum(), w.view(-1)


def _with_update(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.add_(w)
    return x.sum(), w.sin()


WRAPPED: dict[str, Callable[..., Any]] = {"a view of an input": _with_view, "an input that is updated": _with_update}


@pytest.mark.parametrize("name", WRAPPED)
def test_graphs_that_are_not_plain_have_the_wrappers(device: torch.device, name: str) -> None:
    fn = WRAPPED[name]
    fast = backend("pygraph")(fn)
    for seed in range(3):
        w = torch.ones(4, device=device, requires_grad=True)
        other = w.detach().clone().requires_grad_()
        results, expected = fast(example(device, seed), w), fn(example(device, seed), other)
        assert not is_direct(results[0])
        results[0].backward()
        expected[0].backward()
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(w.grad, other.grad)


def test_sizes_that_vary_have_the_wrappers(device: torch.device) -> None:
    net = nn.Linear(4, 3).to(device)
    fast = torch.compile(net, backend=pygraph.backend, dynamic=True)
    for n in (3, 5, 4, 6):
        x = torch.ones(n, 4, device=device)
        result = fast(x)
        assert not is_direct(result)
        net.zero_grad()
        result.sum().backward()
        torch.testing.assert_close(net.bias.grad, torch.full((3,), float(n), device=device))


@pytest.mark.parametrize("name", plain_graphs._PLAIN)
def test_metadata_that_is_not_understood_has_the_wrappers(
    device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plain_graphs._PLAIN, name, ("what a new version of torch says",))
    net = nn.Linear(4, 3).to(device)
    fast = backend("pygraph")(net)
    for _ in range(3):
        result = fast(example(device))
        assert not is_direct(result)
        result.sum().backward()


def test_hooks_that_are_compiled_have_the_wrappers(device: torch.device) -> None:
    net = model(device)
    fast = backend("pygraph")(net)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        for seed in range(3):
            assert not is_direct(fast(example(device, seed))[0])


def test_fake_tensors(device: torch.device) -> None:
    """A compiled function that has been called is called with fake tensors."""
    net = model(device)
    fast = warm(backend("pygraph"), net, device)
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = mode.from_tensor(example(device))
        with contextlib.suppress(Exception):  # as Dynamo refuses it
            assert fast(fake)[0].shape == (2, 3, 3)
    logits = fast(example(device))[0]
    assert is_direct(logits)
    assert type(logits) is torch.Tensor


def test_a_first_call_with_fake_tensors() -> None:
    """Dynamo calls the parts of a graph that it splits for DDP with fake tensors, to compile them."""
    forwards: list[Any] = []

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def call(args: list[Any]) -> Any:
            return graph(*args)

        call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        forwards.append(call)
        return call

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled = aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)
        call = compiled_function.without_wrappers(compiled, forwards[0])
        mode = torch._subclasses.FakeTensorMode()
        assert isinstance(call(*map(mode.from_tensor, inputs))[0], torch._subclasses.FakeTensor)
        return call

    net = nn.Linear(4, 3)
    fast = torch.compile(net, backend=compiler)
    for number in range(3):
        result = fast(torch.ones(2, 4))
        assert is_direct(result) == (number > 0)
        net.zero_grad()
        result.sum().backward()
        torch.testing.assert_close(net.bias.grad, torch.full((3,), 2.0))


def test_compiled_autograd(device: torch.device) -> None:
    """Compiled autograd finds the backward graph in what is applied."""
    expected_net = model(device)
    net = copy.deepcopy(expected_net)
    fast = backend("pygraph")(net)
    for seed in range(4):
        loss = fast(example(device, seed))[0].square().sum()
        expected = expected_net(example(device, seed))[0].square().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(net), gradients(expected_net))


def test_nothing_outlives_its_users(device: torch.device) -> None:
    """Saved tensors go with the graph of a call, and after its backward."""
    net = model(device)
    fast = warm(backend("pygraph"), net, device)
    logits = fast(example(device))[0]
    assert is_direct(logits)
    node: Any = logits.grad_fn
    assert len(node.saved_tensors) > 0
    logits.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        node.saved_tensors  # noqa: B018
