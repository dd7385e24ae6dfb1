"""``torch.compile(backend="pygraph")``, on both devices."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.errors import ArgumentError
from pygraph.interop import live

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
]


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend=pygraph.backend, options=options or None)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected)


def graphs() -> int:
    """How many graphs replay in what is compiled now."""
    return sum(call.counts["nodes"] > 0 for call in pygraph.explain().calls)


def reasons() -> set[str]:
    return {fallback["reason"] for fallback in pygraph.explain().to_dict()["fallbacks"]}


def perceptron(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
    return nn.Sequential(*layers).to(device)


def test_it_is_found_by_name_without_an_import() -> None:
    try:
        importlib.metadata.distribution("pygraph")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pygraph is not installed here, but on the path")
    lookup = "torch._dynamo.backends.registry.lookup_backend"
    script = f"import torch, torch._dynamo; print({lookup}('pygraph').__module__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("pygraph."), done.stderr


@pytest.mark.slow
def test_it_compiles_without_an_import() -> None:
    script = "import torch; print(torch.compile(lambda x: x + 1, backend='pygraph')(torch.ones(1)).item())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2.0", done.stderr


def test_inference(device: torch.device) -> None:
    model = perceptron(device).eval()
    fast = compiled(model)
    with torch.no_grad():
        kept = []
        for i in range(5):
            x = torch.randn(5, 4).to(device) + i
            kept.append((fast(x), model(x)))
    for got, expected in kept:
        same(got, expected)
    assert graphs() == 1


def test_training(device: torch.device) -> None:
    """Forward and backward, with what they update, and eager's random numbers."""
    model = perceptron(device)
    reference = copy.deepcopy(model)
    fast = compiled(model)
    for i in range(5):
        x = torch.randn(5, 4).to(device)
        for module, run in ((reference, reference), (model, fast)):
            torch.manual_seed(i)
            module.zero_grad()
            run(x).square().sum().backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            same(a.grad, b.grad)
        for a, b in zip(model.buffers(), reference.buffers(), strict=True):
            same(a, b)
    assert graphs() == 2
    assert {call.function.split()[0] for call in pygraph.explain().calls} == {"forward", "backward"}


def test_inputs_with_gradients(device: torch.device) -> None:
    """What a forward saves can be an input, which is not of the graph and may require a gradient."""
    fast = compiled(lambda x: (x * x.detach().cos()).sin().sum())
    for _ in range(3):
        x = torch.randn(4).to(device).requires_grad_()
        fast(x).backward()
        detached = x.detach()
        same(x.grad, (detached * detached.cos()).cos() * detached.cos())
    assert graphs() == 2
    assert not reasons()


def test_two_forwards_before_their_backwards(device: torch.device) -> None:
    """What a forward saves is not overwritten by the next, with reused outputs neither."""
    for options in ({}, {"reuse_outputs": True}):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        reference = copy.deepcopy(model)
        fast = compiled(model, **options)
        for _ in range(4):
            xs = [torch.randn(5, 4).to(device) for _ in range(3)]
            losses = [fast(x).square().sum() for x in xs]
            expected = [reference(x).square().sum() for x in xs]
            for loss in (*losses, *expected):
                loss.backward()
            for a, b in zip(model.parameters(), reference.parameters(), strict=True):
                same(a.grad, b.grad)


def test_results_stay_and_can_be_arguments(device: torch.device) -> None:
    f = compiled(lambda x: x * 2 + 1)
    x = torch.ones(3).to(device)
    a = f(x)
    b = f(f(a))
    same(a.cpu(), torch.full((3,), 3.0))
    same(b.cpu(), torch.full((3,), 15.0))


def test_graph_breaks(device: torch.device) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return y * y.sum()

    fast = compiled(f)
    for _ in range(4):
        x = torch.randn(6).to(device)
        same(fast(x), f(x))
    assert graphs() == 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(f, backend=pygraph.backend, fullgraph=True)(torch.ones(6).to(device))


def test_shapes_have_graphs_within_the_budget(device: torch.device) -> None:
    fast = torch.compile(lambda x: x * 2 + x.shape[0], backend=pygraph.backend, dynamic=True, options={"max_graphs": 2})
    for n in (3, 4, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 3, 4):
        x = torch.randn(n, 2).to(device)
        same(fast(x), x * 2 + n)
    assert sum(len(function.cache.entries) for one in live.CALLABLES for function in one.functions()) <= 2
    assert "past the budget of 2 graphs" in reasons()


def test_other_addresses_of_parameters(device: torch.device) -> None:
    model = nn.Linear(4, 3).to(device)
    fast = compiled(model)
    x = torch.randn(2, 4).to(device)
    with torch.no_grad():
        for _ in range(3):
            same(fast(x), model(x))
        model.weight.data = torch.randn(3, 4).to(device)
        for _ in range(3):
            same(fast(x), model(x))
        with torch.no_grad():
            model.weight.mul_(2)
        same(fast(x), model(x))


def test_one_graph_for_many_instances_of_a_module(device: torch.device) -> None:
    """Layers that Dynamo compiles once: each has graphs of its own, until they are too many."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) + x

    layers = nn.ModuleList(Layer() for _ in range(12)).to(device)
    fast = [torch.compile(layer, backend=pygraph.backend) for layer in layers]
    with torch.no_grad():
        for _ in range(3):
            x = y = torch.randn(2, 4).to(device)
            for layer, run in zip(layers, fast, strict=True):
                x, y = layer(x), run(y)
            same(y, x)


def test_compiled_optimizers(device: torch.device) -> None:
    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(3, 2).to(device)) for _ in range(3)]

    mine, theirs = parameters(), parameters()
    ours, other = torch.optim.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    step = torch.compile(ours.step, backend=pygraph.backend)
    for _ in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(3, 2).to(device)
            b.grad = a.grad.clone()
        step()
        other.step()
        for a, b in zip(mine, theirs, strict=True):
            same(a, b)


def test_stances(device: torch.device) -> None:
    fast = compiled(lambda x: x + 1)
    x = torch.ones(2).to(device)
    fast(x)
    before = sum(call.calls for call in pygraph.explain().calls)
    with torch.compiler.set_stance("force_eager"):
        same(fast(x), x + 1)
    assert sum(call.calls for call in pygraph.explain().calls) == before
    same(fast(x), x + 1)


def test_options() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    with pytest.raises(ArgumentError, match="no option 'max_graph'"):
        pygraph.backend(graph, [torch.ones(1)], options={"max_graph": 3})
    with pytest.raises(ArgumentError, match="mode='fast'"):
        pygraph.backend(graph, [torch.ones(1)], mode="fast")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(device: torch.device, mode: str) -> None:
    fast = torch.compile(lambda x: (x + 1).relu(), backend=pygraph.backend, mode=mode)
    x = torch.ones(2).to(device)
    for _ in range(3):
        same(fast(x), (x + 1).relu())
    assert graphs() == ("no-cudagraphs" not in mode)


# ---- what reduce-overhead gives up on --------------------------------------------------------------------------


def check(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], **options: Any) -> None:
    """Compare with eager, arguments that are updated included."""
    fast = torch.compile(fn, backend=pygraph.backend, **options)
    for i in range(4):
        torch.manual_seed(i)
        args = make()
        others = copy.deepcopy(args)
        same(fast(*args), fn(*others))
        same(args, others)


def test_mutated_inputs(device: torch.device) -> None:
    check(lambda x: (x.add_(1), x * 2)[1], lambda: (torch.randn(4).to(device),))
    assert graphs() == 1
    assert not reasons()


def test_host_scalars(device: torch.device) -> None:
    """``cpu device``: a tensor of the host that computes with the device's."""
    check(lambda x, k: x * k + torch.tensor(3.0), lambda: (torch.randn(4).to(device), torch.randn(())))
    assert graphs() == 1
    assert not reasons()


def test_host_results(device: torch.device) -> None:
    check(lambda x, k: ((x * 2).relu(), k + 1), lambda: (torch.randn(4).to(device), torch.randn(3)))
    assert graphs() == 1


def test_uploads(device: torch.device) -> None:
    check(lambda x, k: x * k.to(x.device) + 1, lambda: (torch.randn(4).to(device), torch.randn(4)))
    assert graphs() == 1


def test_values_on_the_host(device: torch.device) -> None:
    """``incompatible op``: the rest is replayed around it, and the report has its reason."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(lambda x: (x * 2).relu() * x.sum().item(), lambda: (torch.randn(4).to(device),))


def test_shapes_that_depend_on_data(device: torch.device) -> None:
    def f(x: torch.Tensor) -> Any:
        y = (x * 2).relu()
        return y, torch.nonzero(y), y.sum() + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(f, lambda: (torch.randn(4).to(device),))
    (fallback,) = [one for one in pygraph.explain().to_dict()["fallbacks"] if "nonzero" in one["what"]]
    assert "host" in fallback["reason"]
    assert str(fallback["source"]).startswith("test_backend.py:")
    assert "from test_backend.py:" in str(pygraph.explain().calls[0].function)
    assert graphs() == 1


def test_storage_that_is_replaced(device: torch.device) -> None:
    """``input storage mutation``."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.set_(y)
        return x + 1

    fast = compiled(f)
    for _ in range(3):
        x, y = torch.randn(3).to(device), torch.randn(3).to(device)
        same(fast(x, y), y + 1)
        assert x.data_ptr() == y.data_ptr()


def test_masks_as_indices(device: torch.device) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[x > 0] = 0
        return y * 2

    check(f, lambda: (torch.randn(4).to(device),))


def test_branches(device: torch.device) -> None:
    """``control flow operator``."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (y,)) * 3

    check(f, lambda: (torch.randn(4).to(device),))


def test_unsafe_custom_operations(device: torch.device) -> None:
    """``CUDAGraph-unsafe custom ops``: what their authors say is believed."""
    with torch.library._scoped_library("pygraph_tests_backend", "FRAGMENT") as library:
        library.define("unsafe(Tensor x) -> Tensor", tags=[torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag])
        library.impl("unsafe", torch.cos, "CompositeExplicitAutograd")
        torch.library.register_fake("pygraph_tests_backend::unsafe", torch.empty_like, lib=library)
        unsafe = torch.ops.pygraph_tests_backend.unsafe
        check(lambda x: unsafe((x + 1).relu()) * 2, lambda: (torch.randn(4).to(device),))
        assert "its author has tagged it as unsafe in CUDA graphs" in reasons()
        assert graphs() == 1


@pytest.mark.skipif(not hasattr(torch._dynamo, "override_cudagraphs"), reason="new in torch 2.13")
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_overrides(device: torch.device, mode: str) -> None:
    """``override_cudagraphs annotation``: which graphs are replayed can be said in the code."""

    def loss(x: torch.Tensor, forward: bool | None, backward: bool | None) -> torch.Tensor:
        with torch._dynamo.override_cudagraphs(fwd=forward, bwd=backward):
            return (x * 2).sin().sum()

    usual = int("no-cudagraphs" not in mode)
    found: dict[Any, int] = {}
    for says in ((None, None), (True, None), (False, None), (True, False), (None, False)):
        torch._dynamo.reset()
        live.CALLABLES.clear()
        fast = torch.compile(loss, backend=pygraph.backend, mode=mode)
        for _ in range(2):
            x = torch.randn(4).to(device).requires_grad_()
            fast(x, *says).backward()
            same(x.grad, 2 * (x.detach() * 2).cos())
        found[says] = graphs()
    expected = {(None, None): 2 * usual, (True, None): 2, (False, None): 0, (True, False): 1, (None, False): usual}
    assert found == expected


def test_a_wrapper_in_cpp(device: torch.device) -> None:
    """``cpp-wrapper does not support graph partition yet``: a graph needs no faster wrapper."""
    with torch._inductor.config.patch(cpp_wrapper=True):
        check(lambda x: ((x * 2).relu() @ x).sum(-1), lambda: (torch.randn(4, 4).to(device),))
    assert graphs() == 1
    assert not reasons()


@pytest.mark.parametrize("replayed", [0, 1, 2])
def test_bisecting(device: torch.device, replayed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``bisector``: the first graphs that it counts are replayed, the others are not."""
    bisector = pytest.importorskip("torch._inductor.compiler_bisector")
    chosen = {"BACKEND": "inductor", "SUBSYSTEM": "cudagraphs", "MAX": str(replayed - 1)}  # which it counts from 0
    monkeypatch.setattr(bisector, "get_env_val", lambda name: chosen.get(name.removeprefix("TORCH_BISECT_")))
    monkeypatch.setattr(bisector.CompilerBisector, "bisection_enabled", True)
    bisector.subsystem_call_counter.clear()
    with torch._inductor.config.patch({"test_configs.bisect_keep_custom_backend_for_inductor": True}):
        fast = torch.compile(lambda x: (x * 2).sin().sum(), backend=pygraph.backend)
        for _ in range(3):
            x = torch.randn(4).to(device).requires_grad_()
            fast(x).backward()
            same(x.grad, 2 * (x.detach() * 2).cos())
    assert graphs() == replayed  # of forward and backward
    bisector.subsystem_call_counter.clear()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.gpu
def test_two_devices() -> None:
    """``multiple devices``."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    check(
        lambda x, y: ((x * 2).to(second) + y, x.sin() + y.to(first)),
        lambda: (torch.randn(4).to(first), torch.randn(4).to(second)),
    )
    assert any("a graph is of one device" in reason for reason in reasons())


@pytest.mark.gpu
def test_sparse_tensors() -> None:
    """``sparsity not handled``; the emulated device has no sparse tensors."""
    device = torch.device("cuda", 0)
    weight = torch.eye(4).to_sparse().to(device)
    check(lambda x: (weight @ x).relu() + 1, lambda: (torch.randn(4, 4).to(device),))


def test_loops(device: torch.device) -> None:
    """``control flow operator: torch.while_loop``."""

    def f(x: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), dtype=torch.int64, device=x.device), x.sin()
        return torch._higher_order_ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), start)[1] + 1

    check(f, lambda: (torch.randn(4).to(device),))
    assert not reasons()  # it is a node of the graph


def test_sizes_that_depend_on_data(device: torch.device) -> None:
    """``unbacked binding ops``, and assertions on the host."""

    def f(x: torch.Tensor, n: torch.Tensor) -> Any:
        size = n.sum().item()
        torch._check(size >= 0)
        torch._check(size <= 4)
        return x[:size].sin() + 1, x.cos()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(f, lambda: (torch.randn(4).to(device), torch.randint(0, 3, (2,)).to(device)))
    assert graphs() == 1
    assert "it needs a value on the host" in reasons()


def test_strict(device: torch.device) -> None:
    fast = torch.compile(lambda x: torch.nonzero(x + 1), backend=pygraph.backend, options={"strict": True})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(pygraph.errors.FallbackError):
        fast(torch.ones(3).to(device))


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.nonzero() * 2, lambda x: x.sin() if x.sum() > 0 else x],
    ids=["a shape by data", "a branch by data"],
)
def test_strict_is_of_graphs_and_fullgraph_of_graph_breaks(device: torch.device, fn: Any) -> None:
    x = torch.ones(3).to(device)
    same(torch.compile(fn, backend=pygraph.backend, options={"strict": True})(x), fn(x))
    torch.compiler.reset()
    refusals = (torch._dynamo.exc.Unsupported, pygraph.errors.FallbackError)  # the latter of what it then takes in
    with pytest.raises(refusals):
        torch.compile(fn, backend=pygraph.backend, fullgraph=True, options={"strict": True})(x)


def test_misaligned_inputs(device: torch.device) -> None:
    check(lambda x: (x * 2).relu() + 1, lambda: (torch.randn(65).to(device)[1:],))
    fast = compiled(lambda x: (x * 2).relu() + 1)
    whole = torch.randn(65).to(device)
    for start in (0, 1, 0, 1, 2):  # Dynamo does not look at where a tensor lies
        x = whole[start : start + 60]
        same(fast(x), (x * 2).relu() + 1)


@pytest.mark.rotates
@pytest.mark.parametrize("options", [{}, {"max_graphs": 3}])
@pytest.mark.parametrize("trained", [False, True])
def test_a_reset_gives_everything_back_that_lies_before_a_graph_break(
    trained: bool, options: dict[str, Any], device: torch.device
) -> None:
    def alive() -> tuple[int, int]:
        gc.collect()
        engines = sum(len(one.functions()) for one in live.CALLABLES)
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
        return engines, len([one for one in tensors if one.device == device])

    def run() -> None:
        model = perceptron(device)

        def fn(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            torch._dynamo.graph_break()
            return y * 2

        fast = compiled(fn, **options)
        for count in (2, 3):
            for _ in range(3):
                with torch.set_grad_enabled(trained):
                    result = fast(torch.ones(count, 4, device=device)).sum()
                if trained:
                    result.backward()
            assert pygraph.explain().calls
            torch._dynamo.reset()  # the second one after calls of what was compiled before the first one
            assert not pygraph.explain().calls

    run()
    torch._dynamo.reset()
    before = alive()
    assert before[0] == 0
    run()
    torch._dynamo.reset()
    assert alive() == before
    assert not live.pool_owner().shared.pools


def test_a_backward_after_a_reset(device: torch.device) -> None:
    model, reference = perceptron(device).eval(), perceptron(device).eval()
    x = torch.randn(2, 4, device=device)
    reference(x).sum().backward()
    fast = compiled(model)
    for _ in range(3):
        model.zero_grad()
        loss = fast(x).sum()
        torch._dynamo.reset()
        loss.backward()
    for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
        same(got.grad, expected.grad)


def test_a_reset_inside_a_call(device: torch.device) -> None:
    called = []

    @torch.library.custom_op("pygraph_test::resets", mutates_args=())
    def resets(x: torch.Tensor) -> torch.Tensor:
        if len(called) == 2:
            torch._dynamo.reset()
        called.append(1)
        return x + 1

    resets.register_fake(torch.empty_like)
    model = nn.Linear(4, 4).to(device)
    fast = compiled(lambda x: resets(model(x) * 2) * 3)
    x = torch.randn(2, 4, device=device)
    with torch.no_grad():
        for _ in range(5):
            same(fast(x), (model(x) * 2 + 1) * 3)
