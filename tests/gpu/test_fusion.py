"""Fused kernels on a GPU: what Inductor makes, replayed on other memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, layer_norm, scaled_dot_product_attention

import pygraph
from pygraph.interop import live
from tests.unit.runtime.test_threads import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Inductor's, which differ between versions
]
CUDA = torch.device("cuda")


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, check_stride=True)


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, cache: torch.Tensor, k: float) -> Any:
    h = dropout(torch.relu(x @ w + b).softmax(-1), 0.5)
    h = layer_norm(h, (h.shape[-1],))
    cache.add_(h.mean() * k)
    return h.t(), (x * 2 + 1).sum(-1), torch.sort(x, -1)[0], x[0], (x + 1, x + 1)


def arguments() -> list[Any]:
    shapes = (64, 128), (128, 256), (256,), (7,)
    return [torch.randn(shape, device="cuda") for shape in shapes]


STACKS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: pygraph.jit(f, fuse=True),
    "fuse": lambda f: pygraph.graphify(pygraph.indirect(pygraph.fuse(pygraph.devicify(f)))),
    "copies": lambda f: pygraph.graphify(pygraph.fuse(pygraph.devicify(f))),
    "no graphs": lambda f: pygraph.fuse(pygraph.devicify(f)),
    "table": lambda f: pygraph.graphify(pygraph.indirect(pygraph.fuse(pygraph.devicify(f)), mechanism="table")),
    "compile": lambda f: torch.compile(f, backend=pygraph.backend),
}


@pytest.mark.parametrize("stack", STACKS)
def test_a_block_with_everything(stack: str) -> None:
    """Matrix products, reductions, random numbers, updates, views, a live number: as eager, call after call."""
    fast = STACKS[stack](block)
    kept: list[Any] = []
    for i in range(4):
        args = arguments()
        others = copy.deepcopy(args)
        torch.manual_seed(i)
        expected = block(*others, 0.5 + i)
        torch.manual_seed(i)
        kept.append((fast(*args, 0.5 + i), expected))
        close(args, others)
    for got, expected in kept:
        close(got, expected)


def test_kernels_are_fused() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return ((x.sin() + 1) * x).exp().sum(-1)

    fused, plain = pygraph.jit(f, fuse=True), pygraph.jit(f)
    x = torch.randn(64, 64, device="cuda")
    close(fused(x), f(x))
    close(plain(x), f(x))
    assert fused.explain().to_dict()["nodes"] < plain.explain().to_dict()["nodes"]


def test_fused_kernels_load_their_pointers_from_a_table() -> None:
    """Where that is asked for: kernels whose inputs or results move get trampolines, made of their source."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x.sin() + y).softmax(-1), ((x * y).relu() @ y.t()).sum(-1)

    fast = STACKS["table"](f)
    kept: list[Any] = []
    for _ in range(4):  # of positive numbers, whose sums do not cancel out: Inductor adds them up in another order
        x, y = torch.rand(64, 96, device="cuda"), torch.rand(64, 96, device="cuda")
        kept.append((fast(x, y), f(x, y)))
    for got, expected in kept:
        close(got, expected)
    report = fast.explain().to_dict()
    assert report["mechanisms"]["table"] > 0, report["fallbacks"]


def test_fused_kernels_have_the_users_lines() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return y.relu().softmax(-1)

    fast = STACKS["compile"](f)
    with torch.no_grad():
        fast(*(torch.randn(64, 64, device="cuda") for _ in range(2)))
    (one,) = live.CALLABLES
    (function,) = one.functions()
    (entry,) = function.cache.entries
    first = f.__code__.co_firstlineno
    sources = {
        node.meta["source"] for node in entry.program.nodes if "mm" in str(node.target) or "launch" in str(node.target)
    }
    assert sources == {f"test_fusion.py:{first + 1}", f"test_fusion.py:{first + 2}"}


def test_bits_are_those_of_torch_compile() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        theirs = torch.compile(model)
        ours = torch.compile(model, backend=pygraph.backend)
        for _ in range(3):
            x = torch.randn(4, 16, 64, device="cuda", dtype=torch.bfloat16)
            assert torch.equal(ours(x), theirs(x))


def test_tuned_kernels_are_replayed() -> None:
    """The modes of ``torch.compile`` choose kernels, and graphs are ours."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu() + 1

    fast = torch.compile(f, backend=pygraph.backend, mode="max-autotune")
    for _ in range(3):
        x, w = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) / 4 for _ in range(2))
        close(fast(x, w), f(x, w))
    (one,) = live.CALLABLES
    (function,) = one.functions()
    (entry,) = function.cache.entries
    assert entry.executable is not None
    assert len(entry.executable.graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("way", ["compile", "jit"])
def test_attention_hands_on_its_generators_state(dtype: torch.dtype, p: float, way: str) -> None:
    """Forward and backward are graphs of their own; attention's backward drops what its forward has dropped."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q * 1.5, k.sin(), v, dropout_p=p).cos()

    fast = torch.compile(f, backend=pygraph.backend) if way == "compile" else pygraph.jit(f, fuse=True)
    for i in range(4):
        args = [torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
        found = []
        for run in (f, fast):
            torch.manual_seed(i)
            out = run(*args)
            torch.manual_seed(99)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), args)))
        for got, expected in zip(found[1], found[0], strict=True):
            rough = 2e-2 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(got, expected, rtol=rough, atol=rough)


def test_a_users_kernels_and_operations() -> None:
    from tests import fused_kernels

    for fn in (fused_kernels.with_triton, fused_kernels.with_operation, fused_kernels.with_updating_operation):
        for stack in ("jit", "compile"):
            torch._dynamo.reset()
            fast = STACKS[stack](fn)
            for _ in range(4):
                x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
                close(fast(x, y), fn(x, y))


def test_what_inductor_cannot_lower_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that is not understood is one node of a graph; a run that fails to compile keeps its operations."""
    from pygraph.lowering import inductor, kernel_recorder
    from pygraph.transforms import fuse

    def refuse(*_: Any) -> Any:
        raise kernel_recorder.UntraceableError("it is a test")

    def fail(*_: Any) -> Any:
        raise RuntimeError("it is a test")

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(x.mean())
        return (x @ x).relu() + 1

    for where, name, instead in ((inductor, "kernel_graph", refuse), (fuse, "compile_run", fail)):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, instead)
            fast = pygraph.jit(f, fuse=True)
            for _ in range(3):
                x, y = torch.randn(32, 32, device="cuda"), torch.randn(3, device="cuda")
                z = y.clone()
                close(fast(x, y), f(x, z))
                close(y, z)
            assert any("it is a test" in fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"])
            assert fast.explain().to_dict()["nodes"]


def test_misaligned_tensors() -> None:
    """Kernels that read 16 bytes at once are not given others, however the tensors come to lie there."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1) * 2

    whole = torch.randn(4097, device="cuda")
    for stack in ("jit", "compile", "fuse"):
        fast = STACKS[stack](f)
        for start in (0, 1, 0, 2, 3, 4, 1):
            x = whole[start : start + 4000]
            close(fast(x), f(x))
    torch.cuda.synchronize()


def test_sizes_and_views_among_what_a_forward_saves() -> None:
    """With dynamic shapes, a backward is told the sizes and views of this call, not of the first."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.view(-1, 4).sin() @ w).view(x.shape[0], -1).cos() * x.shape[0]

    fast = torch.compile(f, backend=pygraph.backend, dynamic=True)
    for n in (3, 5, 3, 8, 5, 2):
        found = []
        x, w = torch.randn(n, 8, device="cuda"), torch.randn(4, 6, device="cuda")
        for run in (f, fast):
            leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            found.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
        torch.testing.assert_close(found[1], found[0])


def test_under_autocast() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            y = (x.sin() + 1) @ w
        return (y @ w).relu() + y

    fast = pygraph.jit(f, fuse=True)
    for _ in range(3):
        x, w = torch.randn(16, 16, device="cuda"), torch.randn(16, 16, device="cuda") / 4
        with torch.autocast("cuda", torch.bfloat16):
            torch.testing.assert_close(fast(x, w), f(x, w), rtol=2e-2, atol=2e-2)


def gated_gelu(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> Any:
    """What MT5 computes with its dropout, and keeps for the backward: one kernel, which stores values of two sizes."""
    wide = a.float()
    half = wide * 0.5
    tanh = torch.tanh((wide + wide * wide * wide * 0.044715) * 0.7978845608028654)
    one = tanh + 1
    product = half * one
    result = product * b.float() * mask.float() * (1 / 0.9)
    return half.to(a.dtype), tanh, one, product, result.to(a.dtype)


@pytest.mark.parametrize("stack", ["jit", "compile"])
def test_a_kernel_that_triton_compiles_in_one_configuration_only(stack: str) -> None:
    """Triton 3.6 fails at it with eight elements for each thread (``PassManager::run failed``)."""
    fast = STACKS[stack](gated_gelu)
    for _ in range(3):
        a, b = (torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        mask = torch.rand(4096, 1024, device="cuda") < 0.9
        for one, other in zip(fast(a, b, mask), gated_gelu(a, b, mask), strict=True):
            torch.testing.assert_close(one, other)
    report = fast.explain() if stack == "jit" else pygraph.explain()
    assert not any("not fused" in fallback["reason"] for fallback in report.to_dict()["fallbacks"])


def test_a_training_step_as_one_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4)).cuda()
    reference = copy.deepcopy(model)

    def step_of(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    fast, slow = pygraph.jit(step_of(model), fuse=True), step_of(reference)
    for i in range(6):
        x, y = torch.randn(8, 16, device="cuda"), torch.randint(0, 4, (8,), device="cuda")
        torch.manual_seed(i)
        expected = slow(x, y)
        torch.manual_seed(i)
        close(fast(x, y), expected)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        close(a, b)


_PROCESS = """
import sys, torch, pygraph
from tests import steady
from torch import nn
from torch._dynamo.utils import counters

steady.install()  # other processes must not make graphs slower than launches
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True).cuda()
fast = torch.compile(layer, backend=pygraph.backend)
for train in (False, True):
    layer.train(train)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(3, 7, 32, device="cuda")
        found = []
        for model in (fast, layer):
            torch.manual_seed(seed)
            layer.zero_grad()
            with torch.set_grad_enabled(train):
                result = model(x)
            if train:
                result.square().sum().backward()
            found.append([result] + [parameter.grad for parameter in layer.parameters() if train])
        for got, expected in zip(*found):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
kinds = sorted(call.function.split()[0] for call in pygraph.explain().calls if call.counts["nodes"])
assert kinds == ["backward", "forward", "inference"], kinds
counts = counters["aot_autograd"]
print(counts["autograd_cache_saved"], counts["autograd_cache_hit"])
"""


@pytest.fixture
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.usefixtures("_own_caches")
def test_a_second_process_traces_nothing(tmp_path: Path) -> None:
    """Inference and training with dropout: what AOTAutograd has kept is loaded, and replayed with the same numbers."""
    assert [" ".join(run_script(tmp_path, _PROCESS, CUDA)) for _ in range(2)] == ["2 0", "0 2"]


_MOVED = """
import sys, torch, pygraph
from torch._dynamo.utils import counters

def f(x):
    return torch.relu(x * 2).sum(-1)

x = torch.randn(64, 128, device="cuda")
torch.testing.assert_close(torch.compile(f, backend=pygraph.backend)(x), f(x))
counts, inductor = counters["aot_autograd"], counters["inductor"]
print(counts["autograd_cache_saved"], counts["autograd_cache_hit"], inductor["fxgraph_cache_pickle_error"])
"""


@pytest.mark.usefixtures("_own_caches")
def test_a_function_that_has_moved_to_other_lines_is_kept_again(tmp_path: Path) -> None:
    """Inductor's cache has its kernels, which are loaded then."""
    texts = [_MOVED, _MOVED, "\n" + _MOVED, "\n" + _MOVED]
    told = [" ".join(run_script(tmp_path, text, CUDA)) for text in texts]
    assert told == ["1 0 0", "0 1 0", "1 0 0", "0 1 0"]
