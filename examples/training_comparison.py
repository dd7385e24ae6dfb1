"""Train a small transformer without graphs, as one graph, and with graphs of parts, and compare times and losses.

    python examples/training_comparison.py
    python examples/training_comparison.py --width 512 --layers 6 --batch 16 --length 128 --rounds 50

It learns the bytes of its own source. The ways of training are those of "Accelerating PyTorch with CUDA Graphs" on
PyTorch's blog: no graph; the whole step, with loss, backward and optimizer; forward and backward of the model; of a
submodule only. On CUDA there is also the whole step with kernels that Inductor has fused, and torch's own ways of doing
the same stand beside them.

CPU time is how long the thread that trains is busy until its steps are submitted, wall time until the device has done
them. Each round trains a block of steps in every way, in turns; medians and quartiles over rounds, in µs per step.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph

Step = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mixing = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to one of equal shape: batch, length, width."""
        batch, length, width = x.shape
        parts = self.project(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.mix(self.before_mixing(x))


class Transformer(nn.Module):
    """Scores of each next byte."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.body = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of 256 bytes for each of a batch of bytes."""
        return self.head(self.body(self.tokens(x) + self.places))


@dataclasses.dataclass(frozen=True)
class Task:
    """A training task: sizes, device and seed."""

    device: torch.device
    width: int = 32
    layers: int = 2
    heads: int = 4
    batch: int = 4
    length: int = 16

    def model(self) -> Transformer:
        """A model, the same at every call."""
        torch.manual_seed(0)
        return Transformer(self.width, self.layers, self.heads, self.length).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer that counts its steps on the device, as ``torch.cuda.graph`` needs it."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """So many batches of bytes, and of the bytes that follow."""
        text = torch.tensor(list(Path(__file__).read_bytes()))
        generator = torch.Generator().manual_seed(1)
        found: list[tuple[Tensor, Tensor]] = []
        for _ in range(count):
            starts = torch.randint(0, len(text) - self.length, (self.batch,), generator=generator)
            rows = torch.stack([text[start : start + self.length + 1] for start in starts.tolist()])
            found.append((rows[:, :-1].contiguous().to(self.device), rows[:, 1:].contiguous().to(self.device)))
        return found

    def sample(self) -> tuple[Tensor, Tensor]:
        """Arguments of the model and of its body."""
        ((x, _),) = self.batches(1)
        return x, torch.zeros(self.batch, self.length, self.width, device=self.device, requires_grad=True)


def step_of(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """A step of training as in every tutorial."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


# ---- ways to train -------------------------------------------------------------------------------------------------


def no_graph(task: Task) -> tuple[Step, Any]:
    """Eager PyTorch."""
    model = task.model()
    return step_of(model, task.optimizer(model)), None


def whole_step(task: Task) -> tuple[Step, Any]:
    """Forward, loss, backward and optimizer as one graph: a decorator on the step."""
    model = task.model()
    step = pygraph.jit(step_of(model, task.optimizer(model)))
    return step, step


def fused_whole_step(task: Task) -> tuple[Step, Any]:
    """The same with fused kernels."""
    model = task.model()
    step = pygraph.jit(step_of(model, task.optimizer(model)), fuse=True)
    return step, step


def graphed_model(task: Task) -> tuple[Step, Any]:
    """Forward and backward of the model as graphs."""
    model = task.model()
    pygraph.make_graphed_callables(model, task.sample()[:1])
    return step_of(model, task.optimizer(model)), model.forward


def graphed_submodule(task: Task) -> tuple[Step, Any]:
    """Forward and backward of the blocks as graphs; embedding, head and loss are not."""
    model = task.model()
    pygraph.make_graphed_callables(model.body, task.sample()[1:])
    return step_of(model, task.optimizer(model)), model.body.forward


def torch_whole_step(task: Task, fused: bool = False) -> tuple[Step, Any]:
    """``torch.cuda.graph``: inputs are copied to where the graph reads them, and the loss from where it writes it."""
    model = task.model()
    optimizer = task.optimizer(model)
    run = torch.compile(model) if fused else model
    step, ((x, y),) = step_of(run, optimizer), task.batches(1)
    contents = [parameter.detach().clone() for parameter in model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss = step(x, y)
    with torch.no_grad():  # the warm-up has trained
        for parameter, before in zip(model.parameters(), contents, strict=True):
            parameter.copy_(before)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()

    # A graph does not keep what it reads, and the next capture gives freed memory back to the device.
    def replay(given: Tensor, wanted: Tensor, _read: Any = (model, optimizer)) -> Tensor:
        x.copy_(given)
        y.copy_(wanted)
        graph.replay()
        return loss.detach().clone()

    return replay, None


def torch_fused_whole_step(task: Task) -> tuple[Step, Any]:
    """The same of a model that was compiled."""
    return torch_whole_step(task, fused=True)


def torch_graphed_model(task: Task) -> tuple[Step, Any]:
    """``torch.cuda.make_graphed_callables`` of the model."""
    model = task.model()
    torch.cuda.make_graphed_callables(model, task.sample()[:1])
    return step_of(model, task.optimizer(model)), None


def torch_graphed_submodule(task: Task) -> tuple[Step, Any]:
    """``torch.cuda.make_graphed_callables`` of the blocks alone."""
    model = task.model()
    torch.cuda.make_graphed_callables(model.body, task.sample()[1:])
    return step_of(model, task.optimizer(model)), None


WAYS: dict[str, Callable[[Task], tuple[Step, Any]]] = {
    "no graph": no_graph,
    "whole step": whole_step,
    "model forward and backward": graphed_model,
    "submodule only": graphed_submodule,
}
WAYS_ON_CUDA: dict[str, Callable[[Task], tuple[Step, Any]]] = {
    "whole step, fused": fused_whole_step,
    "torch: whole step": torch_whole_step,
    "torch: whole step, fused": torch_fused_whole_step,
    "torch: model forward and backward": torch_graphed_model,
    "torch: submodule only": torch_graphed_submodule,
}


# ---- the comparison ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Way:
    """One way of training, and what has come of it: losses, and the times of each block in µs per step."""

    name: str
    step: Step
    graphed: Any
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    wall: list[float] = dataclasses.field(default_factory=list)

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Train a block of steps."""
        for x, y in batches:
            self.losses.append(self.step(x, y).detach())


def compare(task: Task, rounds: int, block: int, warm_up: int = 5) -> list[Way]:
    """Train in all ways, in turns.

    Args:
        task: The training task.
        rounds: How many blocks are timed of each way.
        block: How many steps are submitted before the device is waited for.
        warm_up: How many steps come before that.

    Raises:
        AssertionError: A way does not have the losses of training without graphs.
    """
    on_cuda = task.device.type == "cuda"
    wait = torch.cuda.synchronize if on_cuda else lambda: None  # other devices have done their work when a call returns
    ways = [Way(name, *make(task)) for name, make in (WAYS | WAYS_ON_CUDA if on_cuda else WAYS).items()]
    batches = task.batches(warm_up + rounds * block)
    for way in ways:
        way.train(batches[:warm_up])
    for first in range(warm_up, len(batches), block):
        for way in ways:
            wait()
            start = time.perf_counter()
            way.train(batches[first : first + block])
            submitted = time.perf_counter()
            wait()
            way.cpu.append(1e6 * (submitted - start) / block)
            way.wall.append(1e6 * (time.perf_counter() - start) / block)
    expected = torch.stack(ways[0].losses).cpu()
    allowed = _deviation_of_eager(task, batches, expected) if on_cuda else torch.zeros_like(expected)
    for way in ways[1:]:
        # Fused kernels round otherwise, which training amplifies.
        limits = allowed + 0.1 * expected if "fused" in way.name else allowed
        worst, step = ((torch.stack(way.losses).cpu() - expected).abs() - limits).max(0)
        if worst > 0:
            raise AssertionError(
                f"{way.name}: the loss of step {step} is {way.losses[step]}, without graphs {expected[step]}"
            )
    return ways


def _deviation_of_eager(task: Task, batches: Sequence[tuple[Tensor, Tensor]], losses: Tensor) -> Tensor:
    """How far losses may be apart at each step: on CUDA some backwards add in no fixed order, and training amplifies
    that. Training without graphs is repeated to see by how much.
    """
    furthest = torch.zeros_like(losses)
    for _ in range(3):  # one may happen to stay close for long
        again = Way("no graph", *no_graph(task))
        again.train(batches)
        furthest = furthest.maximum((torch.stack(again.losses).cpu() - losses).abs())
    return 1e-4 + 1e-3 * losses + 10 * furthest.cummax(0).values


def table(ways: Sequence[Way]) -> str:
    """Times and last losses as text."""
    lines = [f"{'':34s} {'CPU µs per step':>28s} {'wall µs per step':>28s} {'speed-up':>9s} {'last loss':>10s}"]
    whole = statistics.median(ways[0].wall)
    for way in ways:
        faster = whole / statistics.median(way.wall)
        times = f"{_spread(way.cpu):>28s} {_spread(way.wall):>28s}"
        lines.append(f"{way.name:34s} {times} {faster:8.2f}× {way.losses[-1].item():10.6f}")
    return "\n".join(lines)


def _spread(times: Sequence[float]) -> str:
    """The median, and the quartiles around it."""
    if len(times) < 2:
        return f"{times[0]:.1f}"
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 128), ("layers", 4), ("heads", 4), ("batch", 8), ("length", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block", type=int, default=5)
    options = parser.parse_args(arguments)
    device = pygraph.default_device()
    task = Task(device, options.width, options.layers, options.heads, options.batch, options.length)
    print(f"{device}, torch {torch.__version__}, {sum(p.numel() for p in task.model().parameters()):,} parameters")
    ways = compare(task, options.rounds, options.block)
    print(table(ways))
    print("All losses are equal" + (" up to what kernels round otherwise." if device.type == "cuda" else "."))
    for way in ways:
        if way.graphed is not None:
            fallbacks = way.graphed.explain().to_dict()["fallbacks"]
            print(
                f"{way.name}: {len(fallbacks)} fallbacks", *(fallback["reason"] for fallback in fallbacks), sep="\n  "
            )


if __name__ == "__main__":
    main()
