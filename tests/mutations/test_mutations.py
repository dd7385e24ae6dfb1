"""The faults fit the package, and what the tests say of them is understood."""

from __future__ import annotations

import ast
import doctest
import itertools
import sys
from pathlib import Path

import pytest

from tests.mutations import __main__ as program
from tests.mutations import running
from tests.mutations.faults import FAULTS, Fault
from tests.mutations.running import FaultError, judge, place, put_in, try_fault


def test_every_fault_is_in_one_place_and_no_error_of_syntax() -> None:
    problems: list[str] = []
    for fault in FAULTS:
        try:
            path = place(fault)
        except FaultError as error:
            problems.append(str(error))
            continue
        assert fault.replacement != fault.text
        if path.suffix == ".py":
            ast.parse(path.read_text(encoding="utf-8").replace(fault.text, fault.replacement))
    assert problems == []


def test_names_tell_faults_apart() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 36
    assert all(fault.bug.endswith(".") for fault in FAULTS)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a package of one module."""
    (tmp_path / "pygraph" / "deep").mkdir(parents=True)
    (tmp_path / "pygraph" / "__init__.py").write_text("")
    (tmp_path / "pygraph" / "deep" / "one.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_it.py").write_text(
        "from pygraph.deep.one import double\n\n\ndef test_it():\n    assert double(3) == 6\n"
    )
    monkeypatch.setattr(running, "ROOT", tmp_path)
    return tmp_path


COMMAND = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "test_it.py"]


def test_what_fails_with_a_fault_and_passes_without_one(tree: Path) -> None:
    fault = Fault("triple", "It is three times as much.", "2 * x", "3 * x")
    clock = itertools.count().__next__
    found = try_fault(fault, COMMAND, 60.0, clock)
    assert (found.caught, found.test, found.seconds) == (True, "test_it.py::test_it", 1)
    assert not try_fault(None, COMMAND, 60.0, clock).caught
    assert "2 * x" in (tree / "pygraph" / "deep" / "one.py").read_text()


def test_a_run_that_does_not_end_is_caught(tree: Path) -> None:
    found = try_fault(None, [sys.executable, "-c", "import time; time.sleep(60)"], 0.1, itertools.count().__next__)
    assert (found.caught, found.test) == (True, "it does not end")


def test_a_text_that_occurs_twice_or_never_is_no_fault(tree: Path) -> None:
    with pytest.raises(FaultError, match="occurs 0 times"):
        put_in(Fault("a", "b", "nowhere", ""), tree)
    with pytest.raises(FaultError, match=r"occurs 2 times \(pygraph.*one.py, pygraph.*one.py\)"):
        put_in(Fault("a", "b", "x", ""), tree)


def test_a_worker_that_ends_is_caught() -> None:
    found = judge(1, "worker 'gw0' crashed while running 'tests/test_a.py::test_b'\n", 1.0)
    assert (found.caught, found.test) == (True, "tests/test_a.py::test_b (the process ended)")


def test_examples() -> None:
    assert not doctest.testmod(running).failed
    assert not doctest.testmod(program).failed


def test_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list", "--only", "key-without-strides"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
