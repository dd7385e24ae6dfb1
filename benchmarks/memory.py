"""Memory of whole models: pygraph beside torch.compile with CUDA graphs, each in a process of its own.

Every process does the same: it loads the model, makes two sets of inputs, and calls twenty times on them in turn. Peaks
are of the calls, capture and compilation included; memory that stays allocated is measured when results are freed.

    python benchmarks/memory.py --out benchmarks/results/memory.json
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from models import MODELS
from reporting import command_line

import pygraph

CALLS = 20
MIB = 1 << 20

WAYS: dict[str, Callable[[torch.nn.Module], Callable[..., Any]]] = {
    "eager": lambda model: model,
    "reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "pygraph": pygraph.jit,
    "pygraph, reuse_outputs": lambda model: pygraph.jit(model, reuse_outputs=True),
}


def measure(name: str, way: str) -> dict[str, float]:
    """MiB of one model in one way, in this process."""
    with torch.no_grad():
        model, make = MODELS[name]()
        sets = [make() for _ in range(2)]
        clean()
        loaded = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run = WAYS[way](model)
        for call in range(CALLS):
            run(*sets[call % 2])
        torch.cuda.synchronize()
        found = {
            "loaded": loaded,
            "peak allocated": torch.cuda.max_memory_allocated(),
            "peak reserved": torch.cuda.max_memory_reserved(),
        }
        clean()
        torch.cuda.reset_peak_memory_stats()
        for call in range(CALLS):
            run(*sets[call % 2])
        torch.cuda.synchronize()
        found["steady peak allocated"] = torch.cuda.max_memory_allocated()
        clean()
        found["held allocated"] = torch.cuda.memory_allocated()
        found["held reserved"] = torch.cuda.memory_reserved()
    return {what: round(nbytes / MIB, 2) for what, nbytes in found.items()}


def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def in_a_process(name: str, way: str) -> dict[str, Any]:
    """Measure a model in a fresh process."""
    command = [sys.executable, __file__, "--one", name, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    found: list[dict[str, Any]] = []
    for name in MODELS:
        if options.only in name:
            found.append({"model": name, "MiB": {way: in_a_process(name, way) for way in WAYS}})
            print_table(found[-1])
    result = {
        "command": command_line(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(), "calls": CALLS, "models": found,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']}, MiB")
    rows = result["MiB"]
    columns = next((list(row) for row in rows.values() if "error" not in row), [])
    table.add_column("way")
    for column in columns:
        table.add_column(column, justify="right")
    for way, row in rows.items():
        cells = [row["error"]] if "error" in row else [f"{row[column]:.1f}" for column in columns]
        table.add_row(way, *cells[: max(len(columns), 1)])
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
