"""The command line: ``python -m pygraph COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pygraph
from pygraph.errors import PygraphError, describe

CANNOT_RUN = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_EXTRAS = {"cuda": "cuda", "matplotlib": "bench", "timm": "bench", "torchvision": "bench"}
"""The extra that installs a package; others belong to the demo."""


class CommandError(PygraphError):
    """A command needs what is not there.

    Example: ``bench`` with an installed package, which has no benchmarks. Remedy: run it in a checkout.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 for success, 1 if results are wrong, 2 if the command cannot run, 130 after Ctrl-C.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("pygraph: interrupted", file=sys.stderr)
        return INTERRUPTED
    except PygraphError as error:
        print(f"pygraph: {error}", file=sys.stderr)
        return CANNOT_RUN
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "pygraph"):
            raise
        extra = _EXTRAS.get(package, "demo")
        remedy = f"In the checkout, run `pip install -e '.[{extra}]'`."
        print(f"pygraph: the package {package} is not installed. {remedy}", file=sys.stderr)
        return CANNOT_RUN


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``run``."""
    parser = argparse.ArgumentParser(prog="python -m pygraph", description="CUDA Graphs for PyTorch functions.")
    parser.add_argument("--version", action="version", version=f"pygraph {pygraph.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="embed sentences with all-MiniLM-L6-v2, eagerly and as a graph, and compare",
    )
    demo.add_argument("--batch", type=positive, default=4, help="sentences per call (%(default)s)")
    demo.add_argument(
        "--repeat", type=positive, default=20, help="timed calls, of which the median is shown (%(default)s)"
    )
    demo.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of the model (%(default)s)"
    )
    demo.add_argument("--sentences", type=Path, metavar="FILE", help="your own sentences, one per line")
    demo.set_defaults(run=run_demo)
    info = commands.add_parser("info", help="print versions, the device, how calls are recognised, and what is on disk")
    info.add_argument("--clear", action="store_true", help="remove what is kept on disk first")
    info.set_defaults(run=run_info)
    build = commands.add_parser("build", help="build the path of calls in C++ now, instead of at the first call")
    build.set_defaults(run=run_build)
    _add_bench(commands.add_parser("bench", help="measure the table of 25 workloads and write its tables and figures"))
    return parser


def _add_bench(bench: argparse.ArgumentParser) -> None:
    """The options of the ``bench`` command."""
    bench.add_argument(
        "--list", action="store_true", help="print the rows, where they come from and what makes them hard"
    )
    bench.add_argument("--only", nargs="+", metavar="NAME", help="measure these rows")
    bench.add_argument("--shard", type=shard, metavar="K/N", help="measure the K-th of N shares of the rows")
    bench.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of results (benchmarks/results/table-<gpu> of the checkout)"
    )
    bench.add_argument("--ways", nargs="+", metavar="WAY", help="run rows in these ways, and eager (all)")
    bench.add_argument("--seconds", type=positive_number, default=10.0, help="of measuring for each row (%(default)g)")
    bench.add_argument("--inputs", type=positive, default=100, help="batches at different addresses (%(default)s)")
    bench.add_argument("--small", action="store_true", help="small models, for a trial")
    bench.add_argument(
        "--devices", type=positive, default=1, metavar="N", help="GPUs to measure rows on, side by side (1)"
    )
    bench.add_argument("--jobs", type=positive, metavar="N", help="rows that compile side by side (by cores)")
    bench.add_argument(
        "--budget", type=positive_number, default=900.0, metavar="SECONDS",
        help="for compiling one row; ways that it does not suffice for say so (%(default)g)",
    )  # fmt: skip
    bench.add_argument(
        "--limit",
        type=positive_number,
        metavar="SECONDS",
        help="end in time: rows that do not fit wait for another call",
    )
    bench.add_argument("--warm", action="store_true", help="compile again in other processes, with full caches")
    bench.add_argument("--again", action="store_true", help="measure also rows that have a result")
    bench.add_argument(
        "--ablation", action="store_true", help="measure what each transform adds, in files of their own"
    )
    bench.add_argument("--render", action="store_true", help="only write tables and figures of the results there are")
    bench.add_argument("--workloads", default="benchmarks.table.workloads", help=argparse.SUPPRESS)
    bench.set_defaults(run=run_bench)


def run_demo(arguments: argparse.Namespace) -> int:
    """The ``demo`` command."""
    from pygraph.demo import Options, run

    return run(Options(arguments.batch, arguments.repeat, arguments.dtype, arguments.sentences))


def run_info(arguments: argparse.Namespace) -> int:
    """The ``info`` command."""
    from rich.console import Console

    from pygraph.installation import info

    return info(Console(highlight=False, markup=False), arguments.clear)


def run_build(arguments: argparse.Namespace) -> int:
    """The ``build`` command."""
    from rich.console import Console

    from pygraph.installation import build

    return build(Console(highlight=False, markup=False))


def run_bench(arguments: argparse.Namespace) -> int:
    """The ``bench`` command, which is part of the checkout and not of the installed package.

    Raises:
        CommandError: There is no checkout.
    """
    root = Path(__file__).parents[1]
    if not (root / "benchmarks" / "table" / "command.py").is_file():
        raise CommandError(
            describe("python -m pygraph bench", f"there is no benchmarks/table beside {Path(__file__).parent}",
                     remedy="Run it in a checkout of pygraph's repository.")
        )  # fmt: skip
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.table.command").run(arguments)


def shard(text: str) -> tuple[int, int]:
    """K and N of ``K/N``, for argparse.

    Example:
        >>> shard("2/3")
        (2, 3)
    """
    number, _, count = text.partition("/")
    found = int(number), int(count)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


def positive_number(text: str) -> float:
    """A number above zero, for argparse."""
    number = float(text)
    if not number > 0:
        raise ValueError(text)
    return number


def positive(text: str) -> int:
    """An integer of at least one, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
