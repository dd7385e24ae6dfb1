"""Host cost of a call: microseconds per cache hit, and where they go.

Run on a machine with a GPU::

    python benchmarks/callpath.py --out callpath.json

Every way is timed in turn in one process: a number of submissions without waiting, then a synchronisation, several
rounds; quartiles and medians are reported. Without a GPU it runs on the emulated device, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reporting import quartiles

import pygraph
from pygraph.process import extension

Call = Callable[[], object]


@contextlib.contextmanager
def native(on: bool) -> Iterator[None]:
    """Whether functions get plans for the native path when they are called inside."""
    before = os.environ["PYGRAPH_NATIVE"]
    os.environ["PYGRAPH_NATIVE"] = "1" if on else "0"
    try:
        yield
    finally:
        os.environ["PYGRAPH_NATIVE"] = before


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_times(ways: dict[str, Call], device: torch.device, options: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of the host per submission, the ways in turn: lower quartile, median, upper quartile."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    counts: dict[str, int] = {}
    for name, call in ways.items():
        with native(name != "python"):
            counts[name] = submissions(call, device, options.count)
    for _ in range(options.rounds):
        for name, call in ways.items():
            synchronize(device)
            with native(name != "python"):
                start = time.perf_counter()
                for _ in range(counts[name]):
                    call()
                samples[name].append((time.perf_counter() - start) / counts[name] * 1e6)
            synchronize(device)
    return {name: quartiles(values, 3) for name, values in samples.items()}


def submissions(call: Call, device: torch.device, most: int) -> int:
    """How many calls in a row the device takes without making the host wait: what runs for a few milliseconds."""
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return max(4, min(most, int(0.01 / statistics.median(seconds))))


def breakdown(function: Any, args: tuple[Any, ...], count: int) -> dict[str, Any]:
    """Microseconds of the native path's parts; matching alone is measured from outside."""
    inner = getattr(function, "_pygraph_transformed", function)
    dispatcher = inner.engine.cache.native._dispatcher
    if dispatcher is None:
        return {"way": None}
    way = getattr(dispatcher.match(args, {}), "way", None)
    start = time.perf_counter()
    for _ in range(count):
        dispatcher.match(args, {})
    matching = (time.perf_counter() - start) / count * 1e6
    dispatcher.profile(True)
    for _ in range(count):
        function(*args)
    parts = dispatcher.profile(False)
    names = ("guards", "turn", "allocation", "patches", "launch")
    return {
        "way": way,
        "match": round(matching, 3),
        **{name: round(part / count / 1e3, 3) for name, part in zip(names, parts, strict=True)},
    }


def measure(
    name: str, fn: Any, inputs: list[tuple[Any, ...]], device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """All ways to call ``fn``, with several sets of inputs in turn, so that every call has other addresses."""
    extension.start(wait=True)
    ways: dict[str, Call] = {}
    fast = pygraph.jit(fn)
    for index in range(8):
        fast(*inputs[index % len(inputs)])

    def cycle(function: Any) -> Call:
        state = [0]

        def call() -> object:
            state[0] = (state[0] + 1) % len(inputs)
            return function(*inputs[state[0]])

        return call

    ways["native"] = cycle(fast)
    ways["native, same arguments"] = lambda: fast(*inputs[0])
    with native(False):
        slow = pygraph.jit(fn)
        for index in range(8):
            slow(*inputs[index % len(inputs)])
    ways["python"] = cycle(slow)
    if device.type == "cuda" and not options.no_compile:
        for label, mode in (("reduce-overhead", "reduce-overhead"), ("torch.compile", None)):
            torch._dynamo.reset()
            compiled = torch.compile(fn, mode=mode)
            for index in range(8):
                torch.compiler.cudagraph_mark_step_begin()
                compiled(*inputs[index % len(inputs)])
            ways[label] = cycle(compiled)
    result = {
        "name": name,
        "us": host_times(ways, device, options),
        "breakdown": breakdown(fast, inputs[0], submissions(ways["native"], device, options.count)),
        "hits": fast.cache_info().hits,
        "captures": fast.cache_info().captures,
    }
    print(json.dumps(result), flush=True)
    return result


def small(device: torch.device, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Elementwise functions of 1, 8 and 32 tensors."""
    for count in (1, 8, 32):
        sets = [tuple(torch.randn(4096, device=device) for _ in range(count)) for _ in range(3)]

        def add(*xs: torch.Tensor) -> torch.Tensor:
            return torch.relu(xs[0]) if len(xs) == 1 else functools.reduce(torch.add, xs)

        def stack(*xs: torch.Tensor) -> torch.Tensor:
            return torch.stack(xs)

        yield measure(f"add of {count}", add, sets, device, options)
        yield measure(f"stack of {count}", stack, sets, device, options)


def models(device: torch.device, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """An MLP, and BERT-base if transformers is there."""
    mlp = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)
    )
    mlp = mlp.to(device).eval().requires_grad_(False)
    yield measure("mlp", mlp, [(torch.randn(32, 256, device=device),) for _ in range(3)], device, options)
    if device.type != "cuda" or options.no_bert:
        return
    try:
        from transformers import BertConfig, BertModel
    except ImportError:
        print("transformers is not installed: no BERT")
        return
    bert = BertModel(BertConfig(), add_pooling_layer=True).to(device, torch.bfloat16).eval().requires_grad_(False)
    ids = [(torch.randint(0, 30000, (1, 128), device=device),) for _ in range(3)]
    yield measure("bert", bert, ids, device, options)
    first = Hidden(bert).eval()
    yield measure("bert, a tensor out", first, ids, device, options)


class Hidden(torch.nn.Module):
    """A model whose result is one tensor, so that no container has to be made."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The last hidden state."""
        return self.model(ids).last_hidden_state


def static_sweep(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds by the number of parameters; the slope is the cost of one."""
    points: dict[int, float] = {}
    matching: dict[int, float] = {}
    x = torch.randn(16, device=device)
    for count in (0, 50, 100, 200, 400):
        module = Sum(count).to(device).requires_grad_(False)
        function = pygraph.jit(module)
        for _ in range(8):
            function(x)
        points[count] = host_times({"native": lambda f=function: f(x)}, device, options)["native"][1]
        matching[count] = breakdown(function, (x,), options.count).get("match", 0.0)
    result = {
        "name": "static parameters",
        "us": points,
        "match": matching,
        "ns_per_parameter": round((points[400] - points[0]) / 400 * 1e3, 2),
        "ns_per_parameter_matching": round((matching[400] - matching[0]) / 400 * 1e3, 2),
    }
    print(json.dumps(result), flush=True)
    return result


class Sum(torch.nn.Module):
    """One module per parameter, as in real models; one kernel reads them all."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([Part() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the input and all parameters."""
        return torch.stack([x, *(part.weight for part in self.parts)]).sum(0)


class Part(torch.nn.Module):
    """A module with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-bert", action="store_true")
    options = parser.parse_args()
    os.environ["PYGRAPH_NATIVE"] = "1"  # already here: calls whose code asks for variables are told apart by them
    device = torch.device(pygraph.default_device())
    extension.start(wait=True)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else str(device),
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "extension": extension.reason() or "loaded",
        "results": [],
    }
    print(json.dumps({key: value for key, value in report.items() if key != "results"}), flush=True)
    with torch.no_grad():
        for result in (*small(device, options), *models(device, options), static_sweep(device, options)):
            report["results"].append(result)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
