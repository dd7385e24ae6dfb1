"""Seconds of the first training steps until they are steady: a process with empty caches, and one with full ones.

    python benchmarks/first_steps.py --out first_steps.json

The eight models of ``training.py``, by ``torch.compile(mode="reduce-overhead")``, by the same with a compiled
optimizer, and by ``pygraph.jit(fuse=True)``, which compiles both.
Each model and way has caches of its own on disk, and two processes one after the other: the first fills them. With
``--together``, the models are compiled side by side, as there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reporting import command_line

_OPTIMIZER = "reduce-overhead, with optimizer"
WAYS = ("reduce-overhead", _OPTIMIZER, "jit fused")
_STEPS = 12


def measure(name: str, way: str) -> dict[str, Any]:
    """Seconds of the steps before those that are steady, in this process, and what caches on disk have found."""
    import torch
    from torch._dynamo.utils import counters
    from training import WAYS, Training
    from training_models import MODELS

    torch.manual_seed(0)
    model, make, loss = MODELS[name]()
    model = model.cuda().train()
    batch = make()
    batch = batch[0].cuda(), batch[1].cuda()
    training = Training(model, loss)
    training.step()(*batch)  # libraries are loaded, and the optimizer has its state
    torch.cuda.synchronize()
    step = WAYS["reduce-overhead" if way == _OPTIMIZER else way](training, batch)
    if way == _OPTIMIZER:
        training.optimizer.step = torch.compile(training.optimizer.step)
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        losses.append(step(*batch).item())
        seconds.append(time.perf_counter() - begin)
    steady = statistics.median(seconds[-4:])
    caches = {f"{kind} {event}": counters[kind][event] for kind in ("inductor", "aot_autograd", "pygraph")
              for event in counters[kind] if "cache" in event}  # fmt: skip
    first = sum(one for one in seconds if one > 3 * steady)
    return {"seconds": first, "steps": [round(one, 4) for one in seconds], "losses": losses, "caches": caches}


def first_and_second(name: str, way: str) -> dict[str, Any]:
    """What a process with empty caches measures, and one with the caches that it has filled."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        for which in ("cold", "warm"):
            command = [sys.executable, __file__, "--measure", name, way]
            done = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
            found[which] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name:24} {way:16} {which} {found[which]['seconds']:6.1f} s {found[which]['caches']}", flush=True)
    return found


def main() -> None:
    """Measure models in processes of their own and write the seconds, or measure one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--together", action="store_true", help="compile the models side by side")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "WAY"), help="measure in this process and print JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    from training_models import MODELS

    models = options.models or list(MODELS)
    result: dict[str, Any] = {"command": command_line(), "models": {name: {} for name in models}}
    for way in WAYS:
        with concurrent.futures.ThreadPoolExecutor(len(models) if options.together else 1) as pool:
            found = pool.map(first_and_second, models, [way] * len(models))
            for name, times in zip(models, found, strict=True):
                result["models"][name][way] = times
    for name, ways in result["models"].items():
        for other in WAYS[:-1]:
            ratios = {
                which: round(ways["jit fused"][which]["seconds"] / ways[other][which]["seconds"], 2)
                for which in ("cold", "warm")
            }
            print(f"{name:24} pygraph / {other}: {ratios}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
