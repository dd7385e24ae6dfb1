"""Host time of a training step under ``torch.compile``, part by part, without the graphs themselves.

Run on any machine; nothing is replayed, and no device is needed::

    python benchmarks/wrappers.py --layers 4 12

A transformer is compiled by AOTAutograd with stand-ins for the compiled forward and backward, which return tensors that
are there. Medians over many steps: Dynamo, AOTAutograd's wrappers with ``Function.apply``, the function's backward, and
the autograd engine; with the wrappers and without (docs/design/0025).
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.function import BackwardCFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pygraph.interop.compiled_function import without_wrappers

Times = dict[str, list[float]]


class Model(nn.Module):
    """A small transformer with twelve parameters per layer, and four more."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(16, width), nn.Embedding(8, width)
        make = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, **make) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.words.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def timed(fn: Callable[..., Any], name: str, times: Times) -> Any:
    """The function, whose calls are timed."""

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        result = fn(*args)
        times[name].append(time.perf_counter() - start)
        return result

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def stand_in(graph: torch.fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """A boxed function with the graph's results of the first call: its inputs, and tensors that are detached anew."""
    results: list[Any] = []

    def call(args: list[Any]) -> list[Any]:
        if not results:
            inputs = {id(value): index for index, value in enumerate(args)}
            results.extend(inputs.get(id(value), value) for value in graph(*args))
        made = [args[one] if isinstance(one, int) else one if one is None else one.detach() for one in results]
        args.clear()
        return made

    return call


def measure(layers: int, wrapped: bool, steps: int) -> dict[str, float]:
    """Microseconds of the parts of a step."""
    times: Times = collections.defaultdict(list)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        forwards: list[Any] = []

        def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
            forwards.append(timed(stand_in(graph), "forward graph", times))
            return forwards[-1]

        def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
            return timed(stand_in(graph), "backward graph", times)

        compiled = aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)
        return timed(compiled if wrapped else without_wrappers(compiled, forwards[0]), "call", times)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, tokens = Model(layers), torch.randint(0, 16, (2, 8))
    run, parameters = torch.compile(model, backend=backend), list(model.parameters())
    names = [name for name in ("apply", "apply_boxed") if hasattr(BackwardCFunction, name)]
    originals = {name: getattr(BackwardCFunction, name) for name in names}
    for name, original in originals.items():
        setattr(BackwardCFunction, name, timed(original, "function", times))
    try:
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = None
            loss = timed(run, "forward", times)(tokens)
            timed(loss.backward, "backward", times)()
    finally:
        for name, original in originals.items():
            setattr(BackwardCFunction, name, original)
    median = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    return {
        "parameters": len(parameters),
        "Dynamo": median["forward"] - median["call"],
        "wrappers and apply": median["call"] - median["forward graph"],
        "the function's backward": median["function"] - median["backward graph"],
        "engine": median["backward"] - median["function"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("torch", torch.__version__)
    for layers in options.layers:
        for wrapped in (True, False):
            parts = measure(layers, wrapped, options.steps)
            text = ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if name != "parameters")
            print(f"{parts['parameters']:.0f} parameters, {'with' if wrapped else 'without'} wrappers: {text}")


if __name__ == "__main__":
    main()
