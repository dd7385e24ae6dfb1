"""Time whole models: eager, torch.compile, torch.compile with CUDA graphs, pygraph, and a raw capture as the limit.

All ways take turns in one process; each line gives the median over rounds of wall and CPU time per call, with the
spread between the quartiles, for calls in a row and for single calls that wait for the device.

    python benchmarks/models.py --out benchmarks/results/models.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from reporting import command_line

import pygraph


def bert(
    layers: int, hidden: int, heads: int, dtype: torch.dtype
) -> tuple[torch.nn.Module, Callable[[], tuple[Any, ...]]]:
    """A BERT encoder at batch 1 and 128 tokens, without its embedding of words on the host."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden
    )
    model = transformers.BertModel(config).cuda().to(dtype).eval().requires_grad_(False)
    mask = torch.ones(1, 128, dtype=torch.long, device="cuda")
    return model, lambda: (torch.randint(0, 30000, (1, 128), device="cuda"), mask)


def resnet() -> tuple[torch.nn.Module, Callable[[], tuple[Any, ...]]]:
    """ResNet-50 at batch 1."""
    import torchvision

    model = torchvision.models.resnet50().cuda().bfloat16().eval().requires_grad_(False)
    return model, lambda: (torch.randn(1, 3, 224, 224, device="cuda", dtype=torch.bfloat16),)


def mlp() -> tuple[torch.nn.Module, Callable[[], tuple[Any, ...]]]:
    """A small multilayer perceptron, where the call path is most of the time."""
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(256, 256), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers).cuda().eval().requires_grad_(False)
    return model, lambda: (torch.randn(32, 256, device="cuda"),)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Callable[[], tuple[Any, ...]]]]] = {
    "BERT-base b1 s128 bf16": lambda: bert(12, 768, 12, torch.bfloat16),
    "MiniLM-L6 b1 s128 f32": lambda: bert(6, 384, 12, torch.float32),
    "ResNet-50 b1 bf16": resnet,
    "MLP 4x256 b32 f32": mlp,
}


def raw_capture(model: torch.nn.Module, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The model captured by torch itself; replays on the captured arguments whatever is passed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(*arguments)
    return lambda *_: graph.replay()


def measure(run: Callable[[], Any], calls: int) -> tuple[float, float, float]:
    """Microseconds per call: wall in a row, CPU in a row, and wall of a single call with a synchronisation."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    submitted = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    single: list[float] = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        single.append(time.perf_counter() - begin)
    return (done - start) / calls * 1e6, (submitted - start) / calls * 1e6, statistics.median(single) * 1e6


def benchmark(name: str, rounds: int, calls: int, compiled: bool) -> dict[str, Any]:
    model, make = MODELS[name]()
    sets = [make() for _ in range(2)]
    seconds: dict[str, float] = {}
    ways: dict[str, Callable[..., Any]] = {"eager": model, "raw capture": raw_capture(model, sets[0])}
    fast = pygraph.jit(model)
    if compiled:
        ways["torch.compile"] = torch.compile(model)
        ways["reduce-overhead"] = torch.compile(model, mode="reduce-overhead")
    ways["pygraph"] = fast
    for way, run in ways.items():
        start = time.perf_counter()
        for _ in range(3):
            for arguments in sets:
                run(*arguments)
        torch.cuda.synchronize()
        seconds[way] = time.perf_counter() - start
    difference = 0.0
    for arguments in sets:
        got, want = fast(*arguments), model(*arguments)
        got, want = (x if isinstance(x, torch.Tensor) else x[0] for x in (got, want))
        difference = max(difference, float((got.float() - want.float()).abs().max()))
    results: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            turn = iter(sets * (2 * calls))
            results[way].append(measure(lambda run=run, turn=turn: run(*next(turn)), calls))
    table: dict[str, Any] = {}
    for way, rows in results.items():
        table[way] = {"first calls s": round(seconds[way], 2)}
        for label, values in zip(("wall", "cpu", "single"), zip(*rows, strict=True), strict=True):
            low, middle, high = statistics.quantiles(values, n=4)
            table[way][label] = {"median": round(middle, 1), "quartiles": [round(low, 1), round(high, 1)]}
    report = fast.explain().to_dict()
    counts = ("kernels", "kernels_in_graphs", "nodes", "patched_nodes", "bytes_copied_per_replay")
    return {
        "model": name, "largest difference from eager": difference, "ways": table,
        **{key: report[key] for key in counts},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--only", default="", help="models whose names contain this")
    options = parser.parse_args()
    found = []
    with torch.no_grad():
        for name in MODELS:
            if options.only in name:
                found.append(benchmark(name, options.rounds, options.calls, not options.no_compile))
                print_table(found[-1])
    result = {
        "command": command_line(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(), "models": found,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    copied, difference = result["bytes_copied_per_replay"], result["largest difference from eager"]
    title = f"{result['model']}: {result['nodes']} nodes, {copied} bytes copied, difference {difference:.3g}"
    table = Table(title=title)
    for column in ("way", "wall µs", "cpu µs", "single call µs", "first calls s"):
        table.add_column(column)
    for way, row in result["ways"].items():
        cells = [
            f"{row[k]['median']} ({row[k]['quartiles'][0]}–{row[k]['quartiles'][1]})" for k in ("wall", "cpu", "single")
        ]
        table.add_row(way, *cells, str(row["first calls s"]))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
