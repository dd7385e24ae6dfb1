"""Put a fault into a copy of the tree, run the short tests there, and tell which one notices."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.mutations.faults import Fault

ROOT = Path(__file__).parents[2]
PACKAGE = "pygraph"

_SUFFIXES = (".py", ".cpp", ".h")
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build")

# Of pytest's summary, and of a worker's end.
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\[\s]+(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
_CRASHED = re.compile(r"crashed while running '([^']+)'")


class FaultError(Exception):
    """The text of a fault is not there once."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the tests say of a fault.

    Attributes:
        caught: Whether any test failed.
        test: The first that did, or how the run ended otherwise.
        seconds: How long that took.
        output: The end of what pytest printed.
    """

    caught: bool
    test: str
    seconds: float
    output: str


def place(fault: Fault, root: Path = ROOT) -> Path:
    """The file that a fault is in.

    Raises:
        FaultError: Its text does not occur in the package, or more than once.
    """
    found: list[Path] = []
    for path in sorted((root / PACKAGE).rglob("*")):
        if path.suffix in _SUFFIXES:
            found += [path] * path.read_text(encoding="utf-8").count(fault.text)
    if len(found) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in found)
        raise FaultError(f"{fault.name}: its text occurs {len(found)} times{f' ({where})' if where else ''}")
    return found[0]


def put_in(fault: Fault, root: Path) -> None:
    """Write a fault into a tree."""
    path = place(fault, root)
    path.write_text(path.read_text(encoding="utf-8").replace(fault.text, fault.replacement), encoding="utf-8")


def pytest_command(workers: int, tests: Sequence[str] = ()) -> list[str]:
    """The short run, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "600", "-p", "no:cacheprovider"]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "worksteal"]
    # Where a fault is, its text is not, which the tests of the faults would notice.
    command += ["--ignore", "tests/mutations"]
    return [*command, *(tests or ("--doctest-modules", PACKAGE, "tests"))]


def try_fault(fault: Fault | None, command: Sequence[str], limit: float, clock: Callable[[], float]) -> Outcome:
    """Run a command in a copy of the tree that has a fault, or none.

    Caches are the copy's own: what is built or measured with a fault must not be found without it.
    """
    with tempfile.TemporaryDirectory(prefix="pygraph-fault-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT, symlinks=True)
        if fault is not None:
            put_in(fault, tree)
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),  # before the checkout that is installed
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYGRAPH_CACHE_DIR": str(Path(folder) / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        }
        begin = clock()
        code, output = _run(command, tree, environment, limit)
        return judge(code, output, clock() - begin)


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str], limit: float) -> tuple[int | None, str]:
    """The exit status, None if it took too long, and what was printed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # The group has no other members than pytest and its workers.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        return code, printed.read()


def judge(code: int | None, output: str, seconds: float) -> Outcome:
    """What an exit status of pytest and its output say.

    Examples:
        >>> judge(1, "FAILED tests/test_a.py::test_b[x - y] - AssertionError: 1 - 2", 3.0).test
        'tests/test_a.py::test_b[x - y]'
        >>> judge(0, "2 passed", 3.0).caught, judge(None, "", 600.0).caught, judge(-11, "", 3.0).caught
        (False, True, True)
    """
    crash = _CRASHED.search(output)
    failures = _FAILED.findall(output)
    if code is None:
        test = "it does not end"
    elif failures or crash:
        test = failures[0] if failures else f"{crash[1]} (the process ended)"  # type: ignore[index]
    else:
        test = "" if code == 0 else f"exit status {code}"
    return Outcome(code != 0, test, seconds, output[-4000:])
