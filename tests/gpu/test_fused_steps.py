"""Whole training steps with fused kernels: results as in eager, updates in place, forward and backward apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pygraph
from pygraph.calls.entries import Stateful
from tests.unit.runtime.test_threads import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Inductor's, which differ between versions
]

aten = torch.ops.aten


class Block(nn.Module):
    """Attention without dropout, and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.project, self.join = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + F.gelu(self.join(found.transpose(1, 2).flatten(2)))


def transformer() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    model = nn.Sequential(
        nn.Embedding(50, 32), Block(32), Block(32), nn.LayerNorm(32), nn.Linear(32, 50), nn.Flatten(0, 1)
    )
    return model, lambda: (torch.randint(0, 50, (4, 16)), torch.randint(0, 50, (64,)))


def convolutions() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """In which Inductor chooses the channels-last format; one weight has it from the start, one has a kernel of 1.

    A bias before a normalization would have a gradient of nothing but rounding.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU(),
        nn.Conv2d(128, 128, 1), nn.GroupNorm(8, 128), nn.SiLU(),
        nn.ConvTranspose2d(128, 64, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    model[4].to(memory_format=torch.channels_last)
    return model, lambda: (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))


# With a small eps the sign alone of a gradient decides, which rounding turns where it is nearly zero.
ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-2, "capturable": True}
MODELS = {"transformer": transformer, "convolutions": convolutions}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, fused=True, **ADAMW),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, foreach=True, **ADAMW),
    "one by one": lambda p: torch.optim.AdamW(p, foreach=False, **ADAMW),
    "fused SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
}


class Training:
    """A model, its optimizer, an average of its parameters, and a step."""

    def __init__(self, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model).cuda()
        self.average = copy.deepcopy(self.model)
        self.optimizer = optimizer(self.model.parameters())
        self.dtype = dtype

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", self.dtype, enabled=self.dtype != torch.float32):
            return F.cross_entropy(self.model(x).float(), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 0.1)
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        tensors = [*self.model.state_dict().values(), *self.average.state_dict().values()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values() if value is not None]
        return tensors + [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


def program_of(step: Any) -> Any:
    """The Program of the function that takes and returns gradients."""
    (runner,) = [entry.runner for entry in step.engine.cache.entries if isinstance(entry, Stateful)]
    (engine,) = runner.engines()
    *_, entry = engine.cache.entries
    return entry.program


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_steps_are_as_in_eager(model: str, optimizer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, batch = MODELS[model]()
    eager, fused = (Training(net, OPTIMIZERS[optimizer], dtype) for _ in range(2))
    step = pygraph.jit(fused.step, fuse=True)
    rough = 5e-2 if dtype == torch.bfloat16 else 2e-3
    for _ in range(6):
        x, y = (tensor.cuda() for tensor in batch())
        torch.testing.assert_close(step(x, y), eager.step(x, y), rtol=rough, atol=rough)
    for got, expected in zip(fused.state(), eager.state(), strict=True):
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected, rtol=rough, atol=rough)
    report = step.explain().to_dict()
    # Of the pooled values positions are computed, for backward; nothing else may be copied.
    unlike = [note for note in report["fallbacks"] if not note["reason"].startswith("indices are computed from it")]
    assert not unlike
    assert report["bytes_copied_per_replay"] <= x.nbytes


@pytest.mark.parametrize("model", MODELS)
def test_a_step_copies_nothing(model: str) -> None:
    """Parameters and states are updated where they are; what is copied changes the format of a convolution's weight."""
    net, batch = MODELS[model]()
    training = Training(net, OPTIMIZERS["fused AdamW"], torch.float32)
    step = pygraph.jit(training.step, fuse=True)
    for _ in range(4):
        step(*(tensor.cuda() for tensor in batch()))
    targets = [node.target for node in program_of(step).nodes]
    assert targets.count(aten._fused_adamw_.default) == 1
    assert not {aten.clone.default, aten.copy_.default, aten._foreach_copy_.default} & set(targets)
    assert torch.ops.pygraph.state_to_keep.default not in targets  # as attention has drawn nothing


def test_bits_are_those_of_torch_compile() -> None:
    """Both halves are the graphs that ``torch.compile`` makes of such a loss."""
    torch.manual_seed(0)
    net, batch = transformer()
    ours, theirs = (Training(net, OPTIMIZERS["fused SGD"], torch.float32) for _ in range(2))
    step = pygraph.jit(ours.step, fuse=True)
    theirs.loss = torch.compile(theirs.loss)  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(5):
        x, y = (tensor.cuda() for tensor in batch())
        torch.testing.assert_close(step(x, y), theirs.step(x, y), rtol=1e-6, atol=1e-6)
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_two_backwards_in_a_step() -> None:
    """Gradients of two batches come together; the second forward reads nothing of the first backward."""
    torch.manual_seed(0)
    net, batch = convolutions()
    eager, fused = (Training(net, OPTIMIZERS["SGD"], torch.float32) for _ in range(2))

    def step_of(training: Training) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            training.optimizer.zero_grad()
            losses = [training.loss(part, wanted) for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True)]
            for loss in losses:
                (loss / 2).backward()
            training.optimizer.step()
            return torch.stack([loss.detach() for loss in losses])

        return step

    fast, slow = pygraph.jit(step_of(fused), fuse=True), step_of(eager)
    for _ in range(5):
        x, y = (tensor.cuda() for tensor in batch())
        torch.testing.assert_close(fast(x, y), slow(x, y), rtol=2e-3, atol=2e-3)
    for got, expected in zip(fused.state(), eager.state(), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_a_penalty_on_gradients() -> None:
    """A backward through a backward: what the first one computes is saved for the second."""
    torch.manual_seed(0)
    weight = torch.randn(16, 16, device="cuda", requires_grad=True)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = torch.tanh(x @ weight).sin().sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            loss = y + (gradient.norm() - 1).square()
            (found,) = torch.autograd.grad(loss, weight)
        return loss.detach(), found

    fast = pygraph.jit(fn, fuse=True)
    for _ in range(4):
        x = torch.randn(8, 16, device="cuda")
        torch.testing.assert_close(fast(x), fn(x), rtol=1e-4, atol=1e-4)


_PROCESS = """
import hashlib
import torch
from torch._dynamo.utils import counters
import pygraph
from tests.gpu import test_fused_steps as tests

def perceptron():
    nn = torch.nn
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))
    return model, lambda: (torch.randn(16, 32), torch.randint(0, 10, (16,)))

torch.manual_seed(0)
digest = hashlib.sha256()
for make in (tests.transformer, tests.convolutions, perceptron):
    model, batch = make()
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = pygraph.jit(step, fuse=True)
    for _ in range(6):
        loss = fast(*(value.cuda() for value in batch()))
    # In the others, atomic operations add in any order.
    for value in (loss, *model.parameters()) if make is perceptron else ():
        digest.update(value.detach().cpu().numpy().tobytes())
ours, inductor = counters["pygraph"], counters["inductor"]
print(ours["run_cache_hit"], ours["run_cache_miss"], inductor["fxgraph_cache_miss"], digest.hexdigest())
"""


def test_a_second_process_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds forward and backward on disk, with the same tuned kernels: its results are equal bit for bit."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    first, second = (run_script(tmp_path, _PROCESS, torch.device("cuda"), timeout=600) for _ in range(2))
    assert int(first[1]) >= 3
    assert int(first[2]) >= 6
    assert int(second[0]) >= int(first[1])
    assert second[1:3] == ["0", "0"]
    assert second[3] == first[3]
