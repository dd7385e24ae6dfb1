"""Time derivatives of a jitted function from outside: training of a module, gradients of samples, a Hessian.

    python benchmarks/composition.py --out benchmarks/results/composition-h200.json

Every way is timed in turns in the same process; medians and quartiles of wall time, in µs, the device waited for.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reporting import command_line, quartiles
from torch import nn
from torch.func import functional_call, grad, hessian, vmap

import pygraph

Call = Callable[[], Any]


def encoder(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device).train()


def training(device: torch.device) -> dict[str, Call]:
    """Forward and backward of a small transformer, gradients cleared."""
    x = torch.randn(8, 64, 256, device=device)

    def call(model: Any, params: list[nn.Parameter]) -> Any:
        model(x).square().mean().backward()
        found = params[0].grad
        for param in params:
            param.grad = None
        return found

    def way(wrap: Callable[[nn.Module], Any]) -> Call:
        model = encoder(device)
        wrapped, params = wrap(model), list(model.parameters())
        return lambda: call(wrapped, params)

    return {
        "eager": way(lambda model: model),
        "pygraph": way(pygraph.jit),
        "compile": way(lambda model: torch.compile(model)),
        "reduce-overhead": way(lambda model: torch.compile(model, mode="reduce-overhead")),
    }


def per_sample(device: torch.device) -> dict[str, Call]:
    """``vmap(grad(loss))`` over 32 samples of a perceptron, as torch's tutorial has it."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)).to(device)
    params = {name: value.detach() for name, value in model.named_parameters()}
    x, y = torch.randn(32, 64, device=device), torch.randint(0, 10, (32,), device=device)

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    def way(fn: Any) -> Call:
        stack = vmap(grad(fn), (None, 0, 0))
        return lambda: stack(params, x, y)

    whole = pygraph.jit(vmap(grad(loss), (None, 0, 0)))
    compiled = torch.compile(vmap(grad(loss), (None, 0, 0)))
    return {
        "eager": way(loss),
        "pygraph": way(pygraph.jit(loss)),
        "pygraph, all inside": lambda: whole(params, x, y),
        "compile": lambda: compiled(params, x, y),
    }


def second(device: torch.device) -> dict[str, Call]:
    """The Hessian of a function of 64 numbers."""
    w, x = torch.randn(64, 64, device=device), torch.randn(64, device=device)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(w @ x) ** 2).sum() + torch.logsumexp(w.t() @ x, 0)

    inside, outside, plain = pygraph.jit(hessian(energy)), hessian(pygraph.jit(energy)), hessian(energy)
    return {"eager": lambda: plain(x), "pygraph": lambda: outside(x), "pygraph, all inside": lambda: inside(x)}


def measure(ways: dict[str, Call], rounds: int) -> dict[str, Any]:
    """Quartiles per way, in turns; every way has given eager's result first."""
    wanted = ways["eager"]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        for _ in range(5):
            torch.testing.assert_close(copy.copy(call()), wanted, rtol=2e-2, atol=2e-3)
    for _ in range(rounds):
        for name, call in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times[name].append(1e6 * (time.perf_counter() - start))
    return {name: quartiles(taken, 1) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    found = {case.__name__: measure(case(device), options.rounds) for case in (training, per_sample, second)}
    report = {
        "command": command_line(), "torch": torch.__version__, "device": torch.cuda.get_device_name(),
        "quartiles_us": found,
    }  # fmt: skip
    for case, ways in found.items():
        for name, (low, middle, high) in ways.items():
            print(f"{case:12s} {name:22s} {middle:9.1f} µs  ({low:.1f} to {high:.1f})")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
