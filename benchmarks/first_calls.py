"""Time of first calls, and of BERT's replays: each tree of the package in processes of its own, in turn.

    python benchmarks/first_calls.py --trees . ../before --out first_calls.json

A first call traces, lowers, captures and proves. Every process imports, calls a small function, another one, ten
linear layers, the same with gradients, and BERT-base (if transformers is there), and then times rows of BERT's replays;
medians over processes. Inductor's caches are those of the machine: the first processes fill them and are not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reporting import command_line


def measure() -> dict[str, float]:
    """Milliseconds of the import and of first calls, and microseconds of replays, in this process."""
    import torch

    found: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        synchronize()
        found[name] = (time.perf_counter() - start) * 1e3
        return result

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    pygraph = timed("import, ms", lambda: __import__("pygraph"))
    device = torch.device(pygraph.default_device())
    x = torch.randn(64, 64, device=device)
    (x @ x).sum().item()  # the libraries of torch are loaded
    with torch.no_grad():
        timed("x * 2 + 1, ms", lambda: pygraph.jit(lambda x: x * 2 + 1)(x))
        timed("another function, ms", lambda: pygraph.jit(lambda x: torch.relu(x) - 3)(x))
        layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(10)]).to(device)
        timed("ten linear layers, ms", lambda: pygraph.jit(layers)(x))
    training = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(10)]).to(device)
    timed("ten linear layers and backward, ms", lambda: pygraph.jit(training)(x).sum().backward())
    if device.type == "cuda":
        bert(timed, found)
    return found


def bert(timed: Callable[[str, Callable[[], Any]], Any], found: dict[str, float]) -> None:
    """The first call of BERT-base, and its replays: in a row, and each with a synchronisation."""
    import torch

    import pygraph

    if importlib.util.find_spec("transformers") is None:
        return
    import models

    from pygraph.process import extension

    model, make = models.MODELS["BERT-base b1 s128 bf16"]()
    sets = [make() for _ in range(3)]
    with torch.no_grad():
        model(*sets[0])
        fast = pygraph.jit(model)
        timed("BERT, ms", lambda: fast(*sets[0]))
        extension.start(wait=True)
        turn = itertools.cycle(sets)
        rounds = [models.measure(lambda: fast(*next(turn)), 30) for _ in range(16)][1:]
    rows, _, single = zip(*rounds, strict=True)
    found["BERT's replay in a row, µs"] = statistics.median(rows)
    found["BERT's replay alone, µs"] = statistics.median(single)


def main() -> None:
    """Measure trees in turn and write the medians, or measure in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", nargs="+", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help="measure in this process and print JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    found: dict[str, list[dict[str, float]]] = {str(tree): [] for tree in options.trees}
    for number in range(options.rounds + 1):
        for tree in options.trees:
            environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
            command = [sys.executable, __file__, "--measure"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            times = json.loads(done.stdout.splitlines()[-1])
            print(number, tree, times, flush=True)
            if number:
                found[str(tree)].append(times)
    result: dict[str, Any] = {"command": command_line(), "trees": {}}
    for tree, rounds in found.items():
        result["trees"][tree] = {
            name: {"median": round(statistics.median(values), 2), "all": [round(value, 2) for value in values]}
            for name in rounds[0]
            for values in [[times[name] for times in rounds]]
        }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
