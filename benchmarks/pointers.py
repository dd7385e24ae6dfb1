"""Cost of calling a graph on other tensors, for each way of changing its pointers and for PyTorch's own ways.

    python benchmarks/pointers.py --out docs/pointers.json --table docs/pointers.md --plot docs/pointers.svg
    python benchmarks/pointers.py --quick

Three functions of N tensors: one Triton kernel that reads all of them; one Triton kernel for each, with N results;
and a chain of N operations of PyTorch's own. Two sets of tensors in turn, so that every pointer changes at every
call; all ways take turns in one process, each round from another one on, and each after a few calls that are not
timed, as another way has just had the caches; medians with quartiles over rounds. CPU is the time until the call
returns, wall the time per call in a row of calls, single the time of one call with a synchronisation after it.
``replay alone`` is a capture by torch replayed on the captured tensors, whatever is passed: the limit.

``--check 1.03`` ends with an error if ``auto`` takes more than 1.03 times as long as the best of the mechanisms
``host``, ``device`` and ``table`` in any combination: by its wall time, and by more than the spread of both, as rounds
differ as well. Two graphs that do the same differ too, by up to 8 % of some microseconds: what counts is the choice, so
the time of the mechanism that ``auto`` has chosen counts as well as its own. A combination that fails is measured once
more, as the speed of the host can change by a factor of two between one and the next.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reporting import command_line, quartiles

import pygraph
from pygraph.runtime.devices import driver_for

LIMIT = "replay alone"
MECHANISMS = ("auto", "host", "device", "table", "copy")
WAYS = (LIMIT, *(f"pygraph {m}" for m in MECHANISMS), "copies + replay", "reduce-overhead", "eager")
MEASURES = ("cpu", "wall", "single")
JUDGED = ("one kernel", 32, 4 << 20)
"""32 tensors of 4 MB into one kernel: wanted within 1.1 times replay alone."""

_WARM_UP = 6
"""Calls before each row of timed ones; even, as the number of those, so that every row begins with the other set."""

_MEMORY = 16 << 30
"""Bytes of one set of tensors beyond which a combination is left out; there are two sets."""

Arguments = tuple[torch.Tensor, ...]
Config = tuple[str, int, int]


# -- the functions ------------------------------------------------------------------------------------------------


def triton_module(counts: Sequence[int]) -> Any:
    """A module of Triton kernels: ``double``, and for each count one that adds up as many tensors.

    Triton reads a kernel's source from its file, so a generated one has to be in a file.
    """
    lines = ["import triton", "import triton.language as tl", ""]
    for count in (0, *counts):
        name, pointers = (f"add_{count}", [f"p{i}" for i in range(count)]) if count else ("double", ["p0"])
        first, *others = pointers
        lines += [
            "", "@triton.jit",
            f"def {name}({', '.join(pointers)}, out, n, BLOCK: tl.constexpr):",
            "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "    inside = at < n",
            f"    total = tl.load({first} + at, mask=inside)" + ("" if count else " * 2"),
            *(f"    total += tl.load({pointer} + at, mask=inside)" for pointer in others),
            "    tl.store(out + at, total, mask=inside)", "",
        ]  # fmt: skip
    path = Path(tempfile.mkdtemp()) / "pointer_kernels.py"
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("pointer_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def define_operators(counts: Sequence[int]) -> None:
    """``pointers::add_up`` and ``pointers::double``, which launch one Triton kernel each."""
    kernels = triton_module(counts)

    def launch(kernel: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(tensors[0])
        block = 1024
        kernel[(-(-out.numel() // block),)](*tensors, out, out.numel(), BLOCK=block)
        return out

    add_up = torch.library.custom_op(
        "pointers::add_up", lambda xs: launch(getattr(kernels, f"add_{len(xs)}"), xs),
        mutates_args=(), schema="(Tensor[] xs) -> Tensor",
    )  # fmt: skip
    add_up.register_fake(lambda xs: torch.empty_like(xs[0]))
    double = torch.library.custom_op(
        "pointers::double", lambda x: launch(kernels.double, [x]), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    double.register_fake(torch.empty_like)


def one_kernel(*xs: torch.Tensor) -> torch.Tensor:
    return torch.ops.pointers.add_up(list(xs))


def each(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [torch.ops.pointers.double(x) for x in xs]


def chain(*xs: torch.Tensor) -> torch.Tensor:
    total = torch.neg(xs[0])
    for x in xs[1:]:
        total = torch.add(total, x)
    return total


# Without Triton (the emulated device) only the program itself can be tried, with kernels of PyTorch's own.
_PLAIN: dict[str, Callable[..., Any]] = {
    "one kernel": lambda *xs: torch.stack(xs).sum(0), "each": lambda *xs: [torch.mul(x, 2) for x in xs], "chain": chain,
}  # fmt: skip
_TRITON: dict[str, Callable[..., Any]] = {"one kernel": one_kernel, "each": each, "chain": chain}


# -- the ways -----------------------------------------------------------------------------------------------------


def capture(fn: Callable[..., Any], arguments: Arguments) -> torch.cuda.CUDAGraph:
    """The function captured by torch itself."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn(*arguments)
    return graph


def copies_and_replay(fn: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """Copy every input to where it was captured, then replay, as users do by hand."""
    static = tuple(x.clone() for x in arguments)
    graph = capture(fn, static)

    def run(*xs: torch.Tensor) -> None:
        for target, x in zip(static, xs, strict=True):
            target.copy_(x)
        graph.replay()

    return run


def is_compiled(config: Config) -> bool:
    """Whether ``torch.compile`` takes part: it takes seconds to compile, and depends little on the size."""
    shape, count, nbytes = config
    return shape != "chain" and count <= 32 and nbytes in (4 << 10, 4 << 20)


def make_ways(config: Config, fn: Callable[..., Any], sets: Sequence[Arguments]) -> dict[str, Callable[..., Any]]:
    """All ways to call ``fn`` that make sense for a configuration, warmed up on both sets, and right on both."""
    cuda = sets[0][0].is_cuda
    ways: dict[str, Callable[..., Any]] = {"eager": fn}
    if cuda:
        graph = capture(fn, sets[0])
        ways[LIMIT] = lambda *_: graph.replay()
        ways["copies + replay"] = copies_and_replay(fn, sets[0])
        if is_compiled(config):
            torch._dynamo.reset()
            ways["reduce-overhead"] = torch.compile(fn, mode="reduce-overhead")
    for mechanism in MECHANISMS:
        if mechanism == "table" and (config[0] == "chain" or not cuda):
            continue  # only Triton kernels can load their pointers
        indirect: Any = pygraph.indirect(fn, mechanism=mechanism)
        ways[f"pygraph {mechanism}"] = pygraph.graphify(indirect)
    for run in ways.values():
        for _ in range(3):
            for arguments in sets:
                run(*arguments)
    for way, run in ways.items():
        if way.startswith("pygraph"):
            for arguments in sets:
                torch.testing.assert_close(run(*arguments), fn(*arguments), rtol=0, atol=0)
    return {way: ways[way] for way in WAYS if way in ways}


# -- measuring ----------------------------------------------------------------------------------------------------


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(run: Callable[..., Any], sets: Sequence[Arguments], calls: int) -> tuple[float, float, float]:
    """Microseconds per call: CPU in a row, wall in a row, and the median of single synchronised calls."""
    device = sets[0][0].device
    turns = [sets[index % len(sets)] for index in range(calls)]
    for arguments in turns[:_WARM_UP]:
        run(*arguments)
    synchronise(device)
    start = time.perf_counter()
    for arguments in turns:
        run(*arguments)
    submitted = time.perf_counter()
    synchronise(device)
    done = time.perf_counter()
    single: list[float] = []
    for arguments in turns:
        begin = time.perf_counter()
        run(*arguments)
        synchronise(device)
        single.append(time.perf_counter() - begin)
    return (submitted - start) / calls * 1e6, (done - start) / calls * 1e6, statistics.median(single) * 1e6


def benchmark(config: Config, fn: Callable[..., Any], device: torch.device, rounds: int) -> dict[str, Any]:
    """One configuration: the medians and quartiles of every way."""
    _, count, nbytes = config
    sets = [tuple(torch.randn(nbytes // 4, device=device) for _ in range(count)) for _ in range(2)]
    ways = make_ways(config, fn, sets)
    # Even numbers, so that both sets have the same share, and not too few: the first call of a row overlaps with none.
    calls = {way: 2 * max(8, min(20, int(5_000 / measure(run, sets, 2)[2]))) for way, run in ways.items()}
    found: dict[str, list[tuple[float, float, float]]] = collections.defaultdict(list)
    order = list(ways)
    for _ in range(rounds):
        for way in order:
            found[way].append(measure(ways[way], sets, calls[way]))
        order = [*order[1:], order[0]]
    result: dict[str, Any] = {"function": config[0], "inputs": count, "bytes": nbytes, "calls": calls, "ways": {}}
    for way, rows in found.items():
        result["ways"][way] = {
            name: quartiles(values, 2) for name, values in zip(MEASURES, zip(*rows, strict=True), strict=True)
        }
        if way.startswith("pygraph"):
            result["ways"][way]["graph"] = what_happened(ways[way])
            ways[way].cache_clear()  # pyright: ignore
    ways.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def what_happened(fast: Any) -> dict[str, Any]:
    """The part of ``explain()`` that says how a replay works."""
    report = fast.explain().to_dict()
    keys = ("nodes", "patched_nodes", "bytes_copied_per_replay", "mechanisms")
    reasons = list(dict.fromkeys(f"{f['what']}: {f['reason']}" for f in report["fallbacks"]))
    return {**{key: report[key] for key in keys if key in report}, **({"fallbacks": reasons} if reasons else {})}


def slower_than_the_best(row: dict[str, Any], share: float) -> str | None:
    """How much longer ``auto`` takes than the best mechanism, if that is more than ``share`` and no noise.

    Args:
        row: The times of one combination.
        share: What its wall time may be of the best mechanism's.
    """
    ways = {m: row["ways"][f"pygraph {m}"] for m in MECHANISMS if f"pygraph {m}" in row["ways"]}
    ways.pop("copy")  # which reads every byte once more; `auto` copies nothing that it can patch
    chosen = ways["auto"]["graph"]["mechanisms"]
    mine = min((way["wall"] for way in ways.values() if way["graph"]["mechanisms"] == chosen), key=lambda wall: wall[1])
    times = {m: way["wall"] for m, way in ways.items() if m != "auto"}
    best = min(times, key=lambda m: times[m][1])
    if mine[1] <= share * times[best][1] or mine[0] <= share * times[best][2]:
        return None
    what = f"{row['function']}, {row['inputs']} × {size_text(row['bytes'])}"
    return f"{what}: auto takes {mine[1]:.1f} µs, {best} {times[best][1]:.1f} ({mine[1] / times[best][1]:.2f})"


def configs(quick: bool) -> Iterator[Config]:
    """The configurations to measure, the most important first."""
    counts, sizes = (1, 4, 8, 32, 128), (4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20)
    if quick:
        counts, sizes = (1, 8, 32), (4 << 10, 4 << 20)
    yield JUDGED
    grid = [("chain", count, 4 << 10) for count in counts if count > 1]
    for nbytes in sorted(sizes, key=lambda n: (n not in (4 << 10, 4 << 20), n)):
        grid += [(shape, count, nbytes) for shape in ("one kernel", "each") for count in counts]
    for shape, count, nbytes in sorted(grid, key=lambda c: c[2] not in (4 << 10, 4 << 20)):
        # Beside the two sets there are copies for the other ways, and results.
        if (shape, count, nbytes) != JUDGED and 2 * count * nbytes * (2 if shape == "each" else 1) <= _MEMORY:
            yield shape, count, nbytes


# -- showing ------------------------------------------------------------------------------------------------------


def size_text(nbytes: int) -> str:
    """A number of bytes as it is said.

    >>> size_text(4096), size_text(64 << 20)
    ('4 KB', '64 MB')
    """
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def markdown(result: dict[str, Any]) -> str:
    """The page: the judged case in full, then one table per function and measure."""
    lines = [
        "# What changing a pointer costs", "",
        "Calls of a graph on two sets of tensors in turn, so that every pointer changes at every call. Microseconds,",
        "medians over rounds in which all ways take turns, each after a few calls that are not timed. *CPU*: until the",
        "call returns; *wall*: per call in a row of calls; *single*: one call with a synchronisation after it. *replay",
        "alone* does not look at its arguments: the limit. Written by a program; do not edit.", "",
        f"`{result['command']}`", "", ", ".join(f"{k} {v}" for k, v in result["versions"].items()), "",
    ]  # fmt: skip
    rows = result["rows"]
    for row in rows:
        if (row["function"], row["inputs"], row["bytes"]) == JUDGED and LIMIT in row["ways"]:
            lines += _judged(row)
    names = {
        "one kernel": "One kernel reads all",
        "each": "One kernel and one result for each",
        "chain": "A chain of additions",
    }
    for shape, title in names.items():
        mine = [row for row in rows if row["function"] == shape]
        ways = [way for way in WAYS if any(way in row["ways"] for row in mine)]
        if not mine:
            continue
        lines += [f"## {title}", "", "CPU / wall / single, µs.", ""]
        lines += [f"| inputs | of | {' | '.join(ways)} |", "| --- " * (2 + len(ways)) + "|"]
        for row in sorted(mine, key=lambda r: (r["bytes"], r["inputs"])):
            cells = [_cell(row["ways"].get(way)) for way in ways]
            lines.append(f"| {row['inputs']} | {size_text(row['bytes'])} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _judged(row: dict[str, Any]) -> list[str]:
    limit = row["ways"][LIMIT]
    lines = [
        f"## {row['inputs']} inputs of {size_text(row['bytes'])} into one kernel", "",
        "Median (quartiles); the last columns are shares of replay alone.", "",
        "| way | CPU | wall | single | wall ratio | single ratio |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for way, found in row["ways"].items():
        cells = [f"{found[m][1]:.1f} ({found[m][0]:.1f}–{found[m][2]:.1f})" for m in MEASURES]
        ratios = [f"{found[m][1] / limit[m][1]:.2f}" for m in ("wall", "single")]
        lines.append(f"| {way} | {' | '.join(cells + ratios)} |")
    return [*lines, ""]


def _cell(found: dict[str, Any] | None) -> str:
    return "–" if found is None else " / ".join(f"{found[m][1]:.1f}" for m in MEASURES)


def plot(result: dict[str, Any], path: Path) -> None:
    """CPU and wall time against the number of inputs, per way."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(shape, nbytes) for shape in ("one kernel", "each") for nbytes in (4 << 10, 4 << 20)]
    figure, axes = pyplot.subplots(2, len(panels), figsize=(4.2 * len(panels), 7), squeeze=False, sharex=True)
    colours = dict(zip(WAYS, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for column, (shape, nbytes) in enumerate(panels):
        mine = [row for row in result["rows"] if (row["function"], row["bytes"]) == (shape, nbytes)]
        mine.sort(key=lambda row: row["inputs"])
        for line, name in enumerate(("cpu", "wall")):
            axis = axes[line][column]
            for way in WAYS:
                points = [(row["inputs"], *row["ways"][way][name]) for row in mine if way in row["ways"]]
                if points:
                    counts, low, middle, high = zip(*points, strict=True)
                    axis.plot(counts, middle, marker="o", markersize=3, label=way, color=colours[way])
                    axis.fill_between(counts, low, high, alpha=0.2, color=colours[way])
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{shape}, {size_text(nbytes)}: {name}", fontsize=9)
            axis.grid(alpha=0.3)
        axes[1][column].set_xlabel("inputs")
    for line in axes:
        line[0].set_ylabel("µs per call")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(WAYS), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path)


# -- the command --------------------------------------------------------------------------------------------------


def versions(device: torch.device) -> dict[str, str]:
    found = {"Python": sys.version.split()[0], "torch": torch.__version__}
    if device.type == "cuda":
        import triton

        found["triton"] = triton.__version__
    found["on"] = torch.cuda.get_device_name() if device.type == "cuda" else "pygraph's emulated device"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON, written anew after every combination")
    parser.add_argument("--table", type=Path, help="Markdown")
    parser.add_argument("--plot", type=Path, help="a picture, if matplotlib is installed")
    parser.add_argument("--quick", action="store_true", help="few combinations and rounds")
    parser.add_argument("--rounds", type=int, default=0, help="9, or 5 if quick")
    parser.add_argument("--minutes", type=float, default=5.5, help="after this, start no other combination")
    parser.add_argument("--check", type=float, help="fail if auto takes more than this share of the best mechanism")
    options = parser.parse_args()
    begin = time.monotonic()
    device = pygraph.default_device()
    planned = list(configs(options.quick))
    functions = _PLAIN
    if device.type == "cuda":
        define_operators(sorted({count for shape, count, _ in planned if shape == "one kernel"}))
        functions = _TRITON
    result: dict[str, Any] = {
        "command": command_line(),
        "versions": versions(device), "costs": dataclasses.asdict(driver_for(device).costs()), "rows": [],
    }  # fmt: skip
    with torch.no_grad():
        for config in planned:
            if time.monotonic() - begin > 60 * options.minutes:
                print(f"out of time; left out: {planned[len(result['rows']) :]}")
                break
            rounds = options.rounds or (5 if options.quick else 9)
            row = benchmark(config, functions[config[0]], device, rounds)
            if options.check and slower_than_the_best(row, options.check) is not None:
                row = benchmark(config, functions[config[0]], device, rounds) | {"measured": 2}
            result["rows"].append(row)
            medians = {way: found["wall"][1] for way, found in row["ways"].items()}
            seconds = time.monotonic() - begin
            print(f"{seconds:4.0f} s {config[0]}, {config[1]} × {size_text(config[2])}: wall {medians}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if options.table:
        options.table.write_text(markdown(result) + "\n")
    if options.plot:
        plot(result, options.plot)
    if options.check:
        slow = [text for row in result["rows"] if (text := slower_than_the_best(row, options.check)) is not None]
        print(
            *slow,
            f"auto is within {options.check} of the best in all but {len(slow)} of {len(result['rows'])}",
            sep="\n",
        )
        sys.exit(bool(slow))


if __name__ == "__main__":
    main()
