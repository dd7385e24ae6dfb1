"""Attention whose scores are divided by a number of NumPy's: six layers, ``torch.compile`` and pygraph.

    python benchmarks/host_scalars.py --out benchmarks/results/host-scalars-h200.json

Each layer keeps its temperature as ``np.float64``, which Dynamo passes as a 0-d tensor of the host; with ``--chain`` it
computes one of it. Wall time of a call in a row of calls, in µs as quartiles, in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from reporting import command_line, quartiles

sys.path.insert(0, str(Path(__file__).parent.parent))

import pygraph
from tests.unit.interop.test_host_scalars import attention

WAYS: dict[str, Any] = {
    "eager": lambda model: model,
    "compile": torch.compile,
    "reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "backend": lambda model: torch.compile(model, backend=pygraph.backend),
    "jit": pygraph.jit,
    "jit fused": lambda model: pygraph.jit(model, fuse=True),
}


def measure(chain: bool, rounds: int = 15, calls: int = 40) -> dict[str, list[float]]:
    """Quartiles of each way."""
    batches = [torch.randn(8, 64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    runs: dict[str, Any] = {}
    for name, make in WAYS.items():
        torch.manual_seed(0)
        runs[name] = make(attention(torch.device("cuda"), width=256, heads=4, chain=chain).bfloat16().eval())
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for run in runs.values():
            for i in range(20):
                run(batches[i % 3])
        for _ in range(rounds):
            for name, run in runs.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for i in range(calls):
                    run(batches[i % 3])
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {name: quartiles(found, 1) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "command": command_line(), "torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
    }  # fmt: skip
    for chain in (False, True):
        report["computed from" if chain else "passed"] = found = measure(chain)
        for name, times in found.items():
            print(f"{'chain' if chain else 'plain':6} {name:16} {times}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
