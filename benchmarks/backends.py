"""Models under ``torch.compile``: its default, ``reduce-overhead``, and ``backend="pygraph"``.

    python benchmarks/backends.py --out benchmarks/results/backends-h200.json

Inference in bfloat16 without gradients, and training steps (forward, backward, SGD) with autocast. Every way is timed
in turns in the same process, on two sets of inputs in turn; ``limit`` is the replay of a raw capture of what
``torch.compile`` launches, on inputs that do not change. For each: wall time of a call in a row of calls, and CPU time
of a few calls into an empty queue, as quartiles in µs. With ``--compile``, each way compiles in a process of its own
with an empty cache, then in another with the cache that this has left: seconds until three calls have run, and memory.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reporting import command_line, quartiles

import pygraph

Call = Callable[[int], Any]
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compile": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "pygraph": {"backend": pygraph.backend},
}


def bert() -> tuple[torch.nn.Module, Callable[[], Any]]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), lambda: torch.randint(0, 30000, (1, 128))


def gpt2() -> tuple[torch.nn.Module, Callable[[], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)), lambda: torch.randint(0, 50000, (1, 128))


def xlnet() -> tuple[torch.nn.Module, Callable[[], Any]]:
    from transformers import XLNetConfig, XLNetModel

    return XLNetModel(XLNetConfig(d_model=768, n_head=12, d_inner=3072, n_layer=12)), lambda: torch.randint(
        0, 30000, (1, 128)
    )


def resnet50() -> tuple[torch.nn.Module, Callable[[], Any]]:
    from torchvision.models import resnet50 as model

    return model(), lambda: torch.randn(4, 3, 224, 224)


def small_transformer() -> tuple[torch.nn.Module, Callable[[], Any]]:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), lambda: torch.randn(8, 64, 256)


INFERENCE = {"bert": bert, "gpt2": gpt2, "resnet50": resnet50, "xlnet": xlnet}
TRAINING = {"bert": bert, "gpt2": gpt2, "resnet50": resnet50, "small-transformer": small_transformer}


def tensor_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def prepared(name: str, training: bool) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The model on the device, and two sets of inputs."""
    torch.manual_seed(0)
    model, make = (TRAINING if training else INFERENCE)[name]()
    inputs = [make() for _ in range(2)]
    dtype = torch.float32 if training else torch.bfloat16
    inputs = [(x.to(dtype) if x.is_floating_point() else x).cuda() for x in inputs]
    return model.cuda().to(dtype).train(training), inputs


def way_of(model: torch.nn.Module, inputs: list[torch.Tensor], training: bool, options: dict[str, Any] | None) -> Call:
    model = copy.deepcopy(model)
    run = model if options is None else torch.compile(model, **options)
    if not training:

        def infer(i: int) -> torch.Tensor:
            with torch.no_grad():
                return tensor_of(run(inputs[i % 2]))

        return infer
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, foreach=True)

    def step(i: int) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = tensor_of(run(inputs[i % 2])).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def limit_of(model: torch.nn.Module, inputs: list[torch.Tensor]) -> Call:
    """Replay a capture of the launches of ``torch.compile``, on equal inputs every time."""
    run = torch.compile(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(3):
            run(inputs[0])
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(inputs[0])
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # so that the graph has one of its own, which nobody clears
            with torch.cuda.graph(graph, stream=stream):
                kept = run(inputs[0])
            torch._C._cuda_clearCublasWorkspaces()

    def replay(_: int) -> Any:
        graph.replay()
        return kept, run  # whose parameters the graph reads

    return replay


def measure(calls: dict[str, Call], seconds: float, rounds: int = 7) -> dict[str, Any]:
    """Wall and CPU time of each way, in turns."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        for i in range(6):
            call(i)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(4):
            call(i)
        torch.cuda.synchronize()
        counts[name] = max(4, int(seconds / rounds / len(calls) * 4 / (time.perf_counter() - start)))
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(counts[name]):
                call(i)
            torch.cuda.synchronize()
            wall[name].append((time.perf_counter() - start) / counts[name] * 1e6)
            # What the host needs by itself: a few calls into an empty queue.
            few = min(counts[name], 10)
            start = time.perf_counter()
            for i in range(few):
                call(i)
            submitted = time.perf_counter() - start
            torch.cuda.synchronize()
            cpu[name].append(submitted / few * 1e6)
    return {name: {"wall_us": quartiles(wall[name], 1), "cpu_us": quartiles(cpu[name], 1)} for name in calls}


def compare(name: str, training: bool, seconds: float) -> dict[str, Any]:
    model, inputs = prepared(name, training)
    calls = {way: way_of(model, inputs, training, options) for way, options in WAYS.items()}
    found: dict[str, Any] = {}
    for way, call in calls.items():
        start = time.perf_counter()
        torch.manual_seed(7)
        found[way] = {
            "first": [float(call(i).float().sum()) for i in range(4)],
            "until_steady_s": time.perf_counter() - start,
        }
        with contextlib.suppress(RuntimeError):
            torch.compiler.cudagraph_mark_step_begin()
    if not training:
        calls["limit"] = limit_of(model, inputs)
        found["limit"] = {}
        with torch.no_grad():
            results = {way: calls[way](0).clone() for way in ("compile", "pygraph")}
        found["pygraph"]["equal_to_compile"] = torch.equal(results["compile"], results["pygraph"])
    for way, times in measure(calls, seconds).items():
        found[way].update(times)
    return found


def compile_alone(name: str, training: bool, way: str) -> dict[str, float]:
    """In a process of its own: seconds until three calls have run, and bytes reserved at most.

    ``torch.compile`` is among them: some backends load Inductor there, others in the first call.
    """
    model, inputs = prepared(name, training)
    tensor_of(model(inputs[0]))
    torch.cuda.synchronize()
    start = time.perf_counter()
    call = way_of(model, inputs, training, WAYS[way])
    for i in range(3):
        call(i)
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    for i in range(5):
        call(i)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    return {
        "seconds": seconds,
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
    }


def compile_times(name: str, training: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in ("compile", "reduce-overhead", "pygraph"):
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            for temperature in ("cold", "warm"):
                arguments = [sys.executable, __file__, "--alone", name, way] + ["--train"] * training
                done = subprocess.run(arguments, env=env, capture_output=True, text=True, check=False)
                line = done.stdout.strip().rpartition("\n")[2]
                found[f"{way}, {temperature}"] = json.loads(line) if done.returncode == 0 else done.stderr[-500:]
                print("compile", name, f"{way}, {temperature}", found[f"{way}, {temperature}"], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inference", nargs="*", default=list(INFERENCE))
    parser.add_argument("--training", nargs="*", default=list(TRAINING))
    parser.add_argument("--compile", nargs="*", default=[], help="names of models, those of training with a '+' before")
    parser.add_argument("--seconds", type=float, default=6.0, help="of measuring for each model")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(compile_alone(options.alone[0], options.train, options.alone[1])))
        return
    report: dict[str, Any] = {
        "command": command_line(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }
    jobs = [("inference", name, False) for name in options.inference]
    jobs += [("training", name, True) for name in options.training]
    for kind, name, training in jobs:
        torch._dynamo.reset()
        report.setdefault(kind, {})[name] = found = compare(name, training, options.seconds)
        for way, values in found.items():
            print(kind, name, way, json.dumps(values), flush=True)
        save(options.out, report)
    for name in options.compile:
        training = name.startswith("+")
        report.setdefault("compile", {})[name] = compile_times(name.removeprefix("+"), training)
        save(options.out, report)


def save(out: Path | None, report: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
