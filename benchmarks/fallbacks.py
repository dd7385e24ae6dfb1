"""Cost of calls that fall back to eager: host time per call beyond eager's, for every kind of fallback.

Run on any machine::

    python benchmarks/fallbacks.py --out fallbacks.json

The function and its jitted form are called in turn in one process, several rounds. Reported are eager's median, and of
the differences between the two medians of each round the quartiles and the median: their spread is the noise.
Each kind is measured for calls of few and of many tensors or submodules, on the native path and, with ``--python``,
without it. Without a GPU, tensors are on the emulated device, whose operations take tens of microseconds each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fallback_cases import DEVICE, KINDS, Case
from reporting import quartiles

import pygraph
from pygraph.process import extension


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Microseconds per call: eager's, and the overhead of the jitted function."""
    fast = pygraph.jit(case.fn, **case.options)
    slow, quick = case.wrap(case.fn), case.wrap(fast)
    with case.around():
        begin = time.perf_counter()
        for _ in range(case.warm):
            quick(*case.args())
        warm = time.perf_counter() - begin
        begin = time.perf_counter()
        for _ in range(5):
            slow(*case.args())
        count = max(3, min(100, int(0.005 / ((time.perf_counter() - begin) / 5))))
        rows: list[tuple[float, float]] = []
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            times: tuple[list[float], list[float]] = ([], [])
            for number in range(2 * count):
                function = (slow, quick)[number % 2]
                given = case.args()
                begin = time.perf_counter()
                function(*given)
                times[number % 2].append((time.perf_counter() - begin) * 1e6)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            rows.append((statistics.median(times[0]), statistics.median(times[1])))
        gc.enable()
    more = [after - before for before, after in rows]
    inner = getattr(fast, "_pygraph_transformed", fast)
    return {
        "eager_us": round(statistics.median(before for before, _ in rows), 1),
        "more_us": quartiles(more, 1),
        "warm_s": round(warm, 2),
        "reason": next(iter(inner.explain().to_dict()["fallbacks"]), None),
        "info": tuple(inner.cache_info()),
    }


def main() -> None:
    """Measure and print one line of JSON for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of kinds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--python", action="store_true", help="without the native path as well")
    options = parser.parse_args()
    extension.start(wait=True)
    found: list[dict[str, Any]] = []
    for way in ("1", "0") if options.python else ("1",):
        os.environ["PYGRAPH_NATIVE"] = way
        for name, make in KINDS.items():
            if options.only not in name:
                continue
            for count in (1, 40):
                row = {"kind": name, "count": count, "native": way == "1"}
                try:
                    row |= measure(make(count), options.rounds)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:200]
                found.append(row)
                print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"device": str(DEVICE), "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
