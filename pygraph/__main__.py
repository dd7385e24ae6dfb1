"""The command line: ``python -m pygraph COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pygraph.errors import PygraphError

CANNOT_RUN = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


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
        extra = "cuda" if package == "cuda" else "demo"
        remedy = f"In the checkout, run `pip install -e '.[{extra}]'`."
        print(f"pygraph: the package {package} is not installed. {remedy}", file=sys.stderr)
        return CANNOT_RUN


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``run``."""
    parser = argparse.ArgumentParser(prog="python -m pygraph", description="CUDA Graphs for PyTorch functions.")
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
    return parser


def run_demo(arguments: argparse.Namespace) -> int:
    """The ``demo`` command."""
    from pygraph.demo import Options, run

    return run(Options(arguments.batch, arguments.repeat, arguments.dtype, arguments.sentences))


def positive(text: str) -> int:
    """An integer of at least one, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
