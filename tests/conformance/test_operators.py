"""Every operator that PyTorch tests, in every variant, through `pygraph.jit` against eager."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch

import pygraph
from tests import extent
from tests.conformance import __main__ as program
from tests.conformance import report, running
from tests.conformance.expected import AT_MOST, EXPECTED, complaints
from tests.conformance.running import Record, run_entry
from tests.conformance.samples import dtypes, load_entries

pytestmark = pytest.mark.filterwarnings("ignore")  # operators warn of many things

ENTRIES = load_entries()
NAMES = sorted(ENTRIES)


# In a short run every third, as those of a family follow each other, in one dtype each.
@pytest.mark.parametrize("name", extent.third(NAMES))
def test_entry(name: str, device: torch.device, request: pytest.FixtureRequest) -> None:
    known, entry = EXPECTED[device.type], ENTRIES[name]
    limit, chosen = request.config.option.conformance_samples, dtypes(entry, device.type)
    # What is listed runs as a whole, or it could not be told when it passes.
    if any(case[0] == name for case in known):
        limit = None
    else:
        chosen = extent.one_of(chosen, NAMES.index(name) // 3)
    found = complaints(name, run_entry(name, entry, device, limit, chosen), known)
    assert not found, "\n".join(found)


# -- what is known to fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["emu", "cuda"])
def test_the_list_of_expected_failures_only_shrinks(kind: str) -> None:
    assert len(EXPECTED[kind]) == AT_MOST[kind]
    assert all(EXPECTED[kind].values()), "each has a reason"
    assert {name for name, _, _ in EXPECTED[kind]} <= set(ENTRIES)


@pytest.mark.parametrize("kind", ["emu", "cuda"])
def test_at_least_98_percent_of_the_entries_pass(kind: str) -> None:
    assert len({name for name, _, _ in EXPECTED[kind]}) <= 0.02 * len(ENTRIES)


def test_what_is_listed_must_fail_and_what_fails_must_be_listed() -> None:
    listed = {("add", "float32", "vmap"): "because"}
    right, error, wrong = (("float32", Record("vmap", 3, outcome, "r")) for outcome in ("graph", "error", "wrong"))
    assert not complaints("mul", [right], listed)
    assert not complaints("add", [right, error], listed)
    assert complaints("add", [error], {}) == ["add float32 vmap, sample 3: error: r"]
    assert complaints("add", [wrong], listed) == ["add float32 vmap, sample 3: wrong: r"]
    assert complaints("add", [right], listed) == ["add float32 vmap: passes; strike it off the list"]
    assert not complaints("add", [right], listed, complete=False)


# -- the suite itself ---------------------------------------------------------------------------------------------


def test_examples() -> None:
    found = doctest.testmod(program)  # pytest leaves out every __main__.py
    assert found.attempted
    assert not found.failed


def outcomes(name: str, device: torch.device) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, record in run_entry(name, ENTRIES[name], device, 2):
        found.setdefault(record.variant, set()).add(record.outcome)
    return found


def test_all_variants_run(device: torch.device) -> None:
    found = outcomes("mul", device)
    assert list(found) == ["forward", "in place", "out=", "vmap", "gradient outside", "gradient inside"]
    assert set(found) == set(running.VARIANTS)
    assert all(found[variant] == {"graph"} for variant in ("forward", "in place", "out=", "gradient inside")), found


class Faulty:
    """A jitted function with one fault, which shows in the second call."""

    def __init__(self, fn: Any, fault: str) -> None:
        self._fast, self._fault, self._calls = REAL_JIT(fn), fault, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._fault == "raises" and self._calls == 2:
            raise ValueError("mine")
        result = self._fast(*args, **kwargs)
        return result + 1 if self._fault == "is off" and self._calls == 2 else result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)


REAL_JIT = pygraph.jit


@pytest.mark.parametrize(("fault", "outcome"), [("is off", "wrong"), ("raises", "error")])
def test_faults_are_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch, fault: str, outcome: str) -> None:
    monkeypatch.setattr(pygraph, "jit", lambda fn, **options: Faulty(fn, fault))
    assert outcome in outcomes("exp", device)["forward"]


def test_an_exception_that_is_missing_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pygraph, "jit", lambda fn, **options: REAL_JIT(lambda x, *args, **kwargs: x))
    record = next(record for _, record in run_entry("linalg.cholesky", Raising(), device, 1))
    assert (record.outcome, record.reason) == ("wrong", "eager raises RuntimeError: no")


class Raising:
    """An entry whose operator raises."""

    supports_autograd = supports_out = False
    inplace_variant = None

    def __getattr__(self, name: str) -> Any:
        return getattr(ENTRIES["exp"], name)

    def op(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")


def test_a_page_is_made() -> None:
    rows = [
        {"name": "add", "dtype": "float32", "variant": "forward", "sample": 0, "outcome": "graph", "reason": ""},
        {"name": "add", "dtype": "float32", "variant": "vmap", "sample": 0, "outcome": "launches", "reason": "a | b"},
        {"name": "add", "dtype": "int64", "variant": "vmap", "sample": 0, "outcome": "wrong", "reason": "off"},
    ]
    page = report.markdown(rows, "emu", "python x", {"torch": "2"})
    assert "| `add` | 1 graph | – | – | – | – | 1 wrong, 1 launches |" in page
    assert "66.6 %" in page
    assert "- `add` int64, vmap, sample 0: wrong: off" in page
    assert "a \\| b" in page
