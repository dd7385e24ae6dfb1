"""The page of results: how many cases ended how, in every variant, and each operator's row."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tests.conformance.expected import EXPECTED
from tests.conformance.running import FAILURES, OUTCOMES, VARIANTS

_HEAD = """\
Every entry of PyTorch's own operator test list (`op_db`), with all of its samples in float32 and in another dtype (the
first of complex64, int64, bfloat16, float16, float64, bool that it supports), through `pygraph.jit`. Each function is
called three times, with tensors at other addresses and of other values in turn, the first of them poisoned; values,
shapes, strides, dtypes, aliases, updates of arguments and exceptions must be those of eager, and earlier results must
stay as they were. Written by a program; do not edit."""

_MEANING = {
    "wrong": "a value, layout, alias, update or exception is not eager's",
    "error": "pygraph raises where eager does not",
    "graph": "right, replayed as a graph",
    "partly": "right, in part replayed and in part launched",
    "launches": "right, by ordinary launches",
    "no work": "right, and nothing to launch (views, empty tensors)",
    "raises": "eager raises, and so does the jitted function",
    "no eager": "eager cannot take this gradient or vmap, or the sample cannot be made: nothing to compare with",
}


def markdown(rows: Sequence[dict[str, Any]], kind: str, command: str, versions: dict[str, str]) -> str:
    """The page; ``rows`` hold name, dtype, variant, sample, outcome and reason, and ``kind`` is the type of device."""
    rows = sorted(rows, key=lambda row: (row["name"], row["dtype"], row["variant"], row["sample"]))
    names = sorted({row["name"] for row in rows})
    failed = [row for row in rows if row["outcome"] in FAILURES]
    compared = [row for row in rows if row["outcome"] != "no eager"]
    lines = [
        "# Which operators give what eager gives",
        "",
        _HEAD,
        "",
        f"`{command}`",
        "",
        ", ".join(f"{key} {value}" for key, value in versions.items()),
        "",
        "## Summary",
        "",
        f"{len(names)} operators, {len(rows)} cases (operator, dtype, variant, sample), of which {len(compared)} could"
        f" be compared with eager and **{_percent(len(compared) - len(failed), len(compared))} %** are equal.",
        f"{len(names) - len({row['name'] for row in failed})} operators pass in every case"
        f" ({_percent(len(names) - len({row['name'] for row in failed}), len(names))} %).",
        "",
        f"| Outcome | {' | '.join(VARIANTS)} | Meaning |",
        f"|{' --- |' * (len(VARIANTS) + 2)}",
    ]
    counts = collections.Counter((row["outcome"], row["variant"]) for row in rows)
    for outcome in OUTCOMES:
        cells = [str(counts[outcome, variant]) for variant in VARIANTS]
        lines.append(f"| {outcome} | {' | '.join(cells)} | {_MEANING[outcome]} |")
    lines += [
        "",
        "*Gradient outside* is `vjp(jit(f))`, *gradient inside* `jit(vjp(f))`, *vmap* `vmap(jit(f))`.",
        "",
        "## Failures",
        "",
        *(
            f"- `{row['name']}` {row['dtype']}, {row['variant']}, sample {row['sample']}: {row['outcome']}:"
            f" {_cell(row['reason'])}"
            for row in failed
        ),
        *([] if failed else ["None."]),
        "",
        "Expected failures, which are listed in `tests/conformance/expected.py`:",
        "",
        *(f"- `{case[0]}` {case[1]}, {case[2]}: {_cell(reason)}" for case, reason in EXPECTED[kind].items()),
        *([] if EXPECTED[kind] else ["None."]),
        "",
    ]
    for outcome, title in (
        ("partly", "What runs between graphs"),
        ("launches", "What is launched"),
        ("raises", "Raised"),
    ):
        lines += [f"## {title}", ""]
        lines += [f"- {count}: {reason}" for reason, count in _reasons(rows, outcome)] or ["Nothing."]
        lines.append("")
    lines += ["## Operators", "", f"| Operator | {' | '.join(VARIANTS)} |", f"|{' --- |' * (len(VARIANTS) + 1)}"]
    groups: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        groups[row["name"], row["variant"]][row["outcome"]] += 1
    for name in names:
        cells = [_counts(groups[name, variant]) for variant in VARIANTS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(part: int, whole: int) -> float:
    """Rounded down, so that 100 means all.

    >>> _percent(2999, 3000)
    99.9
    """
    return part * 1000 // whole / 10 if whole else 0.0


def _reasons(rows: Iterable[dict[str, Any]], outcome: str) -> list[tuple[str, int]]:
    """The reasons of an outcome, without what differs from case to case, and how many cases have each."""
    counts = collections.Counter(_general(row["reason"]) for row in rows if row["outcome"] == outcome)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _general(reason: str) -> str:
    """A reason without names of functions, places, numbers and shapes.

    >>> _general("trace(sum)(…): it reads [3, 4] of aten.sum.default. From /a/b.py:12.")
    'it reads … of ….'
    """
    reason = re.sub(r"^\w+\([\w.]*\)\(…\): | From \S+:\d+\.?$", "", reason)
    reason = re.sub(r"\b(aten|prims)\.[\w.]*\w|\[[\d, ]*\]|\b\d[\d.]*\b|'[^']*'", "…", reason)
    return _cell(reason)[:160] or "no reason given"


def _counts(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]) or "–"


def _cell(text: str) -> str:
    """Text that does not break a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")[:400]
