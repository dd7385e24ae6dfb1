"""Write tokens one after the other until each sequence has come to its end: a loop of Python, and one in a graph.

    python examples/greedy_loop.py
    python examples/greedy_loop.py --width 1024 --batch 16 --limit 256 --rounds 50

The loop of Python asks at every token whether all sequences have ended, which waits for the device. As a `while_loop`
the question is asked on the device: the whole loop is one node of one graph, and a call is one launch, however many
tokens it writes. Times are medians and quartiles over rounds, in which all ways take turns, in µs per call.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop  # checked with torch 2.11 and 2.13

import pygraph

END = 0
"""The token that ends a sequence."""


class Writer(nn.Module):
    """A recurrent model of tokens: the next one is that with the highest score."""

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__()
        self.embed, self.scores = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.of_token, self.of_state = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width, bias=False)

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each sequence, int64[batch], and the next state, float[batch, width]."""
        gate, new = (self.of_token(self.embed(token)) + self.of_state(state)).chunk(2, -1)
        state = torch.lerp(state, new.tanh(), gate.sigmoid())
        return self.scores(state).argmax(-1), state


@dataclasses.dataclass
class Task:
    """Sequences to write.

    Attributes:
        model: What writes them.
        limit: The most tokens.
    """

    model: Writer
    limit: int

    def in_python(self, token: Tensor, state: Tensor) -> Tensor:
        """Tokens, int64[batch, limit], by a loop of Python that stops early."""
        written = torch.full((token.shape[0], self.limit), END, device=token.device)
        ended = torch.zeros_like(token, dtype=torch.bool)
        for position in range(self.limit):
            token, state = self.model(token, state)
            token = torch.where(ended, END, token)
            written[:, position] = token
            ended = ended | (token == END)
            if ended.all():
                break
        return written

    def in_a_graph(self, token: Tensor, state: Tensor) -> Tensor:
        """The same tokens, by a loop of the device's."""

        def goes_on(position: Tensor, token: Tensor, state: Tensor, ended: Tensor, written: Tensor) -> Tensor:
            return (position < self.limit) & ~ended.all()

        def turn(position: Tensor, token: Tensor, state: Tensor, ended: Tensor, written: Tensor) -> Any:
            token, state = self.model(token, state)
            token = torch.where(ended, END, token)
            written = written.index_copy(1, position.view(1), token[:, None])
            return position + 1, token, state, ended | (token == END), written

        start = torch.zeros((), dtype=torch.int64, device=token.device)
        ended = torch.zeros_like(token, dtype=torch.bool)
        written = torch.full((token.shape[0], self.limit), END, device=token.device)
        return while_loop(goes_on, turn, (start, token, state, ended, written))[-1]


def ways_of(task: Task) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The ways of writing, by name."""
    return {
        "a loop of Python": task.in_python,
        "the same, jitted": pygraph.jit(task.in_python),
        "a loop in a graph": pygraph.jit(task.in_a_graph),
    }


def compare(
    task: Task, device: torch.device, *, batch: int, width: int, rounds: int
) -> tuple[dict[str, list[float]], list[int]]:
    """The times of each way, and how many tokens the sequences had.

    Raises:
        AssertionError: A way writes other tokens than the loop of Python.
    """
    ways, times, lengths = ways_of(task), dict[str, list[float]](), list[int]()
    with torch.no_grad():
        for number in range(rounds + 4):
            generator = torch.Generator().manual_seed(number)
            token = torch.randint(1, 64, (batch,), generator=generator).to(device)
            state = torch.randn(batch, width, generator=generator).to(device)
            expected = task.in_python(token, state)
            lengths.append(int((expected != END).any(0).sum()) + 1)
            for name, write in ways.items():
                _wait(device)
                begin = time.perf_counter()
                found = write(token, state)
                _wait(device)
                if number >= 4:
                    times.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
                assert torch.equal(found, expected), f"{name} writes other tokens"
    return times, lengths


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def task_of(device: torch.device, width: int, limit: int, eagerness: float = 0.25) -> Task:
    """A task with a model that is the same in every run, and ends a sequence after some tens of tokens."""
    torch.manual_seed(0)
    model = Writer(width).requires_grad_(False)
    model.scores.bias[END] += eagerness
    return Task(model.to(device), limit)


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"width": 256, "batch": 8, "limit": 128, "rounds": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    device = pygraph.default_device()
    task = task_of(device, options.width, options.limit)
    times, lengths = compare(task, device, batch=options.batch, width=options.width, rounds=options.rounds)
    print(f"tokens per call: {statistics.median(lengths):.0f} ({min(lengths)} to {max(lengths)}); {device.type}")
    first = statistics.median(next(iter(times.values())))
    for name, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{name:<20} {middle:10.0f} µs ({low:.0f} to {high:.0f})  {first / middle:6.2f}×")


if __name__ == "__main__":
    main()
