"""Dropouts, of attention too, below ``torch.compile`` and in fused steps: eager's random numbers, in eager's order."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

import pygraph
from pygraph.interop import live
from pygraph.interop.inductor_graphs import InductorSource
from pygraph.ir.drawn_after import DRAWN_AFTER
from pygraph.transforms import fuse
from tests.gpu.test_fused_steps import program_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
]
CUDA = torch.device("cuda", 0)


def node_names() -> list[str]:
    """The names of the nodes of all graphs that are alive."""
    entries = [e for replay in live.CALLABLES for function in replay.functions() for e in function.cache.entries]
    graphs = [graph for entry in entries if entry.executable is not None for graph in entry.executable.graphs]
    return [node.name for graph in graphs for node in graph.graph.nodes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4,), (256,), (1028,), (300, 4096), (7, 132, 1056, 8)])
def test_masks_are_those_of_eager(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def fn(x: torch.Tensor) -> Any:
        first = dropout(x, 0.1)
        return first, dropout(first * 2, 0.7), torch.rand(5, device=CUDA)

    fast = torch.compile(fn, backend=pygraph.backend)
    for seed in range(4):
        x = torch.randn(shape, device=CUDA, dtype=dtype)
        found = []
        for one in (fast, fn):
            torch.manual_seed(seed)
            found.append([*one(x), torch.cuda.get_rng_state()])
        (first, second, *mine), (other_first, other_second, *others) = found
        for one, other in zip([first, second == 0, *mine], [other_first, other_second == 0, *others], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(second, other_second)  # Inductor does not round what is only read by the same kernel
    assert sum("pygraph_dropout_mask" in name for name in node_names()) == 2
    assert not any("fused_dropout" in name for name in node_names())


@pytest.mark.parametrize("count", [1, 3, 6, 1026])
def test_sizes_that_eager_draws_in_another_way(count: int) -> None:
    fast = torch.compile(lambda x: dropout(x, 0.5) + 1, backend=pygraph.backend)
    for seed in range(3):
        x = torch.randn(count, device=CUDA)
        torch.manual_seed(seed)
        mine = fast(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(mine, dropout(x, 0.5) + 1, rtol=0, atol=0)


def test_training() -> None:
    """Attention and a layer with dropouts: losses and gradients of eager with the same seed."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1)).to(CUDA)

    def step(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        scores = dropout(run(x).softmax(-1), 0.3)
        loss = (scores @ x.transpose(-1, -2)).square().mean()
        loss.backward()
        return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]

    fast = torch.compile(model, backend=pygraph.backend)
    for seed in range(5):
        x = torch.randn(8, 32, 64, device=CUDA)
        torch.manual_seed(seed)
        mine = step(fast, x)
        torch.manual_seed(seed)
        torch.testing.assert_close(mine, step(model, x), rtol=1e-4, atol=1e-5)
    assert sum("pygraph_dropout_mask" in name for name in node_names()) == 2
    fallbacks = pygraph.explain().to_dict()["fallbacks"]
    assert not [one for one in fallbacks if "a result is copied" in one["what"]], fallbacks


KERNELS = {
    "memory-efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "cuDNN": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
}


class Block(nn.Module):
    """A layer as GPT-2's: what attention has found, and what a perceptron makes of it, are dropped in part."""

    def __init__(self, kernel: SDPBackend) -> None:
        super().__init__()
        self.kernel = kernel
        self.project, self.join = nn.Linear(64, 192), nn.Linear(64, 64)
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernel):
            found = scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=True)
        x = x + dropout(self.join(found.transpose(1, 2).flatten(2)), 0.4)
        return x + dropout(self.narrow(torch.nn.functional.gelu(self.wide(x))), 0.5)


class DropPath(nn.Module):
    """Stochastic depth as timm and torchvision have it: a layer is left out for whole examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
        return x + torch.tanh(self.layer(x)) * keep.div_(0.7)


def attention_model(kernel: str) -> tuple[nn.Module, torch.dtype]:
    """Two layers, or a skipped test where torch has no such kernel here."""
    backend, dtype = KERNELS[kernel]
    model = nn.Sequential(Block(backend), Block(backend)).to(CUDA, dtype)
    try:
        model(torch.randn(2, 32, 64, device=CUDA, dtype=dtype)).sum().backward()
    except RuntimeError as error:
        if "kernel" not in str(error):
            raise
        pytest.skip(f"torch has no {kernel} attention here: {error}")
    model.zero_grad()
    return model, dtype


def step_of(model: nn.Module, run: Callable[..., torch.Tensor] | None = None) -> Callable[..., Any]:
    """A training step; returns the loss, and which values the last dropout has dropped, if any is exactly 0."""
    run = run or model

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        out = run(x)
        loss = (out.float() * x.float().cos()).square().mean()
        loss.backward()
        return loss.detach(), (out == x)

    return step


def check_steps(fast: Any, mine: nn.Module, slow: Any, theirs: nn.Module, dtype: torch.dtype) -> None:
    """Check losses, gradients, what is dropped, and the generator's state of several steps."""
    rough = 6e-2 if dtype == torch.bfloat16 else 1e-3  # other masks make a difference of half of a gradient
    for seed in range(6):
        x = torch.randn(8, 32, 64, device=CUDA, dtype=dtype)
        torch.manual_seed(seed)
        loss, dropped = fast(x)
        state = torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        wanted, others = slow(x)
        assert torch.equal(state, torch.cuda.get_rng_state())
        torch.testing.assert_close(loss, wanted, rtol=rough, atol=rough)
        assert torch.equal(dropped, others) or dtype == torch.bfloat16
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            distance = (one.grad - other.grad).float().norm() / other.grad.float().norm()
            assert distance < rough, distance


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs that are compiled in this test, of each Program."""
    found: list[Any] = []
    original, fuse_one = fuse.compile_run, fuse._Fusion.run

    def compile_run(*args: Any, **options: Any) -> Any:
        found[-1].append(args)
        return original(*args, **options)

    def begin(fusion: Any) -> Any:
        found.append([])
        return fuse_one(fusion)

    monkeypatch.setattr(fuse, "compile_run", compile_run)
    monkeypatch.setattr(fuse._Fusion, "run", begin)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_in_fused_steps(kernel: str, runs: list[Any]) -> None:
    torch.manual_seed(0)
    model, dtype = attention_model(kernel)
    mine = copy.deepcopy(model)
    fast = pygraph.jit(step_of(mine), fuse=True)
    check_steps(fast, mine, step_of(model), model, dtype)
    assert {len(one) for one in runs} == {1}
    report = fast.explain().to_dict()
    assert not [one for one in report["fallbacks"] if "not fused" in one["reason"]], report["fallbacks"]
    targets = [str(node.target) for node in program_of(fast).nodes]
    assert str(DRAWN_AFTER) not in targets
    assert not [one for one in targets if "state_to" in one], "forward and backward are in one graph"
    assert sum("dropout_mask" in one for one in targets) == 4


def test_stochastic_depth_in_fused_steps(runs: list[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(DropPath() for _ in range(3)), nn.Dropout(0.2), DropPath()).to(CUDA)
    mine = copy.deepcopy(model)
    fast = pygraph.jit(step_of(mine), fuse=True)
    check_steps(fast, mine, step_of(model), model, torch.float32)
    assert {len(one) for one in runs} == {1}
    targets = [str(node.target) for node in program_of(fast).nodes]
    assert targets.count("pygraph.sample.default") == 4


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_below_torch_compile(kernel: str) -> None:
    torch.manual_seed(0)
    model, dtype = attention_model(kernel)
    mine = copy.deepcopy(model)
    fast = step_of(mine, torch.compile(mine, backend=pygraph.backend))
    check_steps(fast, mine, step_of(model), model, dtype)
    assert sum("pygraph_dropout_mask" in name for name in node_names()) == 4


def test_noise_of_many_kinds(runs: list[Any]) -> None:
    """Draws that depend on nothing but the ones before, of which some are of one kind and shape."""

    def fn(x: torch.Tensor) -> Any:
        first, second = torch.rand(32, device=CUDA), torch.rand(32, device=CUDA)
        noise = torch.randn_like(x) * first + dropout(x, 0.5) * second
        chosen = torch.randint(0, 4, (64,), device=CUDA)
        return noise.exp(), chosen * 2, first - second, torch.rand(32, device=CUDA) + 1

    fast = pygraph.jit(fn, fuse=True)
    for seed in range(4):
        x = torch.randn(64, 32, device=CUDA)
        torch.manual_seed(seed)
        mine = [*fast(x), torch.cuda.get_rng_state()]
        torch.manual_seed(seed)
        torch.testing.assert_close(mine, [*fn(x), torch.cuda.get_rng_state()])
    assert {len(one) for one in runs} == {1}


def test_saved_tensors_where_inductor_draws_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a forward is made in another way then; its backward reads convolutions' inputs as they lie there."""
    monkeypatch.setattr(InductorSource, "draws_in_order", lambda self, inputs: False)
    torch.manual_seed(0)
    widths = (3, 32, 32, 32)
    layers = [
        part
        for before, after in itertools.pairwise(widths)
        for part in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.SiLU(), DropPath())
    ]
    model = nn.Sequential(*layers, nn.Dropout(0.2)).to(CUDA)
    mine = copy.deepcopy(model)
    fast = torch.compile(mine, backend=pygraph.backend)
    for seed in range(4):
        x = torch.randn(4, 3, 16, 64, device=CUDA)
        found = []
        for run, parameters in ((fast, mine.parameters()), (model, model.parameters())):
            torch.manual_seed(seed)
            loss = run(x).square().mean()
            found.append([loss.detach(), *torch.autograd.grad(loss, tuple(parameters))])
        torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-3)
