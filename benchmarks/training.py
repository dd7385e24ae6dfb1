"""Training steps of eight models: eager, ``torch.compile``, pygraph, and raw captures as the limits.

    python benchmarks/training.py --out benchmarks/results/training-h100.json

A step is ``zero_grad``, forward with autocast in bfloat16, backward and ``AdamW(fused=True, capturable=True)``. The raw
captures, of the eager step and of one whose model is compiled, replay on inputs that are copied to them. Each model has
a process of its own; all processes compile side by side, and are measured one after the other, with all ways of a model
in turns. For each way: wall time of a step in a row of steps, and CPU time of a few steps into an empty queue, as
quartiles in µs; kernels and copies of one step, and how long these keep the device busy; the most memory that the first
steps and later ones need, with the model and its optimizer; and losses, of more steps with ``--steps``. Eight other
models are measured if ``--models`` names them, and ``max-autotune``, which compiles for minutes, if ``--ways`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reporting import command_line, quartiles
from torch import nn
from training_models import MODELS, OTHERS, Batch

sys.path.insert(0, str(Path(__file__).parent.parent))

import pygraph

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# ---- ways ------------------------------------------------------------------------------------------------------------


class Training:
    """A model with its optimizer, and steps of training."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        self.model, self._loss = copy.deepcopy(model), loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=True)

    def step(self, forward: Callable[..., Any] | None = None) -> Step:
        """A step as in every tutorial; of the model, or of what stands for it."""
        run = self.model if forward is None else forward

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = self._loss(run(x), y)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        return step


def raw_capture(training: Training, step: Step, batch: Batch) -> Step:
    """A step captured by torch itself; the inputs are copied, and the loss too."""
    x, y = (tensor.clone() for tensor in batch)
    before = copy.deepcopy(training.model.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss = step(x, y)
    with torch.no_grad():  # the warm-up has trained
        training.model.load_state_dict(before)
        for state in training.optimizer.state.values():
            for value in state.values():
                value.zero_()

    # A graph does not keep what it reads.
    def replay(given: torch.Tensor, wanted: torch.Tensor, _read: Any = (training, step)) -> torch.Tensor:
        x.copy_(given)
        y.copy_(wanted)
        graph.replay()
        return loss.clone()

    return replay


def _eager(training: Training, batch: Batch) -> Step:
    return training.step()


def _compiled(training: Training, batch: Batch, **options: Any) -> Step:
    return training.step(torch.compile(training.model, **options))


def _jit(training: Training, batch: Batch, **options: Any) -> Step:
    step = pygraph.jit(training.step(), **options)
    step.training = training  # pyright: ignore[reportAttributeAccessIssue]
    return step


def _graphed(make: Callable[..., Any]) -> Callable[[Training, Batch], Step]:
    def way(training: Training, batch: Batch) -> Step:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            make(training.model, (batch[0],))
        return training.step()

    return way


WAYS: dict[str, Callable[[Training, Batch], Step]] = {
    "eager": _eager,
    "compile": _compiled,
    "max-autotune": lambda training, batch: _compiled(training, batch, mode="max-autotune"),
    "reduce-overhead": lambda training, batch: _compiled(training, batch, mode="reduce-overhead"),
    "backend": lambda training, batch: _compiled(training, batch, backend=pygraph.backend),
    "jit": _jit,
    "jit fused": lambda training, batch: _jit(training, batch, fuse=True),
    "graphed": _graphed(pygraph.make_graphed_callables),
    "torch's graphed": _graphed(torch.cuda.make_graphed_callables),
    "raw, eager": lambda training, batch: raw_capture(training, training.step(), batch),
    "raw, compiled": lambda training, batch: raw_capture(training, _compiled(training, batch), batch),
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def kernels(run: Callable[[int], Any]) -> dict[str, Any]:
    """What one step launches, by a profile of four."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for i in range(4):
            run(i)
        torch.cuda.synchronize()
    events = [event for event in found.key_averages() if event.self_device_time_total]
    events.sort(key=lambda event: -event.self_device_time_total)
    copies = [event for event in events if event.key.startswith("Mem") or "_copy" in event.key or "_clone" in event.key]
    return {
        "kernels": sum(event.count for event in events) / 4,
        "copies": sum(event.count for event in copies) / 4,
        "busy_us": round(sum(event.self_device_time_total for event in events) / 4, 1),
        "most": [
            [event.key[:90], event.count / 4, round(event.self_device_time_total / 4, 1)] for event in events[:12]
        ],
    }


def reserved_bytes() -> int:
    """What torch has taken of the device, without what it could give back."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def most_bytes(run: Callable[[int], Any]) -> int:
    """What torch takes of the device at most in three steps."""
    reserved_bytes()
    torch.cuda.reset_peak_memory_stats()
    for i in range(3):
        run(i)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def described(step: Any) -> dict[str, Any]:
    """What pygraph reports of a step; nothing of one that is not its."""
    if not hasattr(step, "explain"):
        return {}
    report = step.explain().to_dict()
    reasons = [f"{note['what']}: {note['reason']}" for note in report["fallbacks"]]
    keys = ("nodes", "patched_nodes", "bytes_copied_per_replay")
    return {**{key: report[key] for key in keys}, "misses": step.cache_info().misses, "fallbacks": reasons[:6]}


def measure(runs: dict[str, Callable[[int], Any]], seconds: float, rounds: int = 9) -> dict[str, Any]:
    """Wall and CPU time per step of each way, in turns."""
    counts: dict[str, int] = {}
    for name, run in runs.items():
        start = time.perf_counter()
        for i in range(6):
            run(i)
        torch.cuda.synchronize()
        counts[name] = max(4, int(seconds / rounds / len(runs) * 6 / (time.perf_counter() - start)))
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run(0)  # others have trained meanwhile
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(counts[name]):
                run(i)
            torch.cuda.synchronize()
            wall[name].append((time.perf_counter() - start) / counts[name] * 1e6)
            start = time.perf_counter()
            for i in range(4):
                run(i)
            cpu[name].append((time.perf_counter() - start) / 4 * 1e6)
    torch.cuda.synchronize()
    return {name: {"wall_us": quartiles(wall[name], 1), "cpu_us": quartiles(cpu[name], 1)} for name in runs}


def serve(name: str, ways: list[str], seconds: float, steps: int) -> None:
    """One model: compile every way and train some steps, wait for a line of input, measure."""
    torch.manual_seed(0)
    model, make, loss = (MODELS | OTHERS)[name]()
    model = model.cuda().train()
    batches = [tuple(tensor.cuda() for tensor in make()) for _ in range(3)]
    found: dict[str, Any] = {}
    runs: dict[str, Callable[[int], Any]] = {}
    made: dict[str, Step] = {}
    for way in ways:
        torch._dynamo.reset()
        before, start = reserved_bytes(), time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        try:
            step = WAYS[way](Training(model, loss), batches[0])
            run = lambda i, step=step: step(*batches[i % 3])  # noqa: E731
            torch.manual_seed(0)
            losses = [float(run(i)) for i in range(6)]
        except Exception as error:  # one way that fails must not hide the others
            found[way] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        torch.cuda.synchronize()
        found[way] = {"until_steady_s": round(time.perf_counter() - start, 1)}
        found[way]["first_reserved_mib"] = round((torch.cuda.max_memory_reserved() - before) / 2**20)
        found[way]["losses"] = [*losses, *(float(run(i)) for i in range(6, steps))]
        found[way]["reserved_mib"] = round((most_bytes(run) - before) / 2**20)
        runs[way], made[way] = run, step
    print("ready", flush=True)
    sys.stdin.readline()
    for way, run in runs.items():
        for i in range(6):
            run(i)
        found[way] |= kernels(run) | described(made[way])
    for way, times in measure(runs, seconds).items():
        found[way] |= times
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=[way for way in WAYS if way != "max-autotune"])
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring for each model")
    parser.add_argument("--steps", type=int, default=6, help="whose losses are compared")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.ways, options.seconds, options.steps)
        return
    report: dict[str, Any] = {
        "command": command_line(), "torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "models": {},
    }  # fmt: skip
    children: dict[str, subprocess.Popen[str]] = {}
    for name in options.models:
        command = [
            sys.executable,
            __file__,
            "--serve",
            name,
            "--seconds",
            str(options.seconds),
            "--steps",
            str(options.steps),
            "--ways",
            *options.ways,
        ]
        children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ready = [name for name, child in children.items() if _line(child, "ready") is not None]
    for name in ready:
        child = children[name]
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write("go\n")
            child.stdin.flush()
        line = _line(child, "{")
        child.wait()
        if line is not None:
            report["models"][name] = json.loads(line)
            print_model(name, report["models"][name])
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=1) + "\n")


def _line(child: subprocess.Popen[str], begin: str) -> str | None:
    """The next line of a process that begins so; None if it has ended."""
    assert child.stdout is not None
    return next((line for line in child.stdout if line.startswith(begin)), None)


def print_model(name: str, found: dict[str, Any]) -> None:
    eager = found.get("eager", {}).get("losses")
    for way, row in found.items():
        if "error" in row:
            print(f"{name:24} {way:16} {row['error']}", flush=True)
            continue
        pairs = zip(row["losses"], eager, strict=True) if eager else ()
        off = max((abs(a - b) for a, b in pairs), default=float("nan"))
        texts = [f"{row['wall_us'][1]:8.0f} wall", f"{row['cpu_us'][1]:6.0f} cpu", f"{row['busy_us']:8.0f} busy"]
        texts += [
            f"{row['reserved_mib']:6} MiB",
            f"{row['kernels']:5.0f} kernels",
            f"{row['copies']:4.0f} copies",
            f"{off:.1e} off in losses",
        ]
        texts += [f"{row['until_steady_s']:.0f} s", *(str(row[key]) for key in ("misses", "fallbacks") if row.get(key))]
        print(f"{name:24} {way:16}", *texts, flush=True)


if __name__ == "__main__":
    main()
