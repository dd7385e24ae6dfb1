"""Summaries of the records of a conformance run: counts, one row per operator, and a page in Markdown."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any

from conformance_cases import CLASSES, DTYPES

_MEANING = {
    "wrong": "a result, argument or alias differs from eager",
    "error": "pygraph raises, or the process dies, where eager does not",
    "copied": "replayed as a graph, but some input or output is copied",
    "partly": "some kernels in graphs and the rest launched between them, 0 bytes copied",
    "not capturable": "runs as ordinary launches, with the reason",
    "zero-copy": "every kernel is replayed from a graph, 0 bytes copied",
    "no device work": "views, empty tensors, and operators that launch nothing",
    "skipped": "the sample fails in eager PyTorch on this device",
}
_JUDGED = ("zero-copy", "copied", "wrong", "error")


def in_order(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort records by operator, dtype and sample, without all but the last of each."""
    unique = {(r["operator"], DTYPES.index(r["dtype"]), r["sample"]): r for r in records}
    return [unique[key] for key in sorted(unique)]


def by_operator(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per operator: its class (the first of `CLASSES` that occurs), counts per dtype, and reasons."""
    rows: list[dict[str, Any]] = []
    groups: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for record in records:
        groups[record["operator"]].append(record)
    for name in sorted(groups):
        group = groups[name]
        ended = {record["class"] for record in group}
        row: dict[str, Any] = {"operator": name, "class": next(c for c in CLASSES if c in ended), "dtypes": {}}
        for dtype in DTYPES:
            counts = collections.Counter(record["class"] for record in group if record["dtype"] == dtype)
            if counts:
                row["dtypes"][dtype] = {c: counts[c] for c in CLASSES if counts[c]}
        row["kernels"] = max(record.get("kernels", 0) for record in group)
        row["exact"] = all(record.get("exact", True) for record in group)
        found = [reason for c in CLASSES for record in group if record["class"] == c for reason in record["reasons"]]
        row["reasons"] = list(dict.fromkeys(found))
        row["notes"] = list(dict.fromkeys(record["note"] for record in group if record.get("note")))
        rows.append(row)
    return rows


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of cases and operators per class, and the share of zero-copy among what can be captured.

    The share is zero-copy cases among those that are zero-copy, copied, wrong or an error; for operators likewise,
    each counted as the worst of its cases among these four.
    """
    cases = collections.Counter(record["class"] for record in records)
    rows = by_operator(records)
    operators = collections.Counter(row["class"] for row in rows)
    judged: collections.Counter[str] = collections.Counter()
    for row in rows:
        found = {c for counts in row["dtypes"].values() for c in counts}
        worst = next((c for c in ("wrong", "error", "copied", "zero-copy") if c in found), None)
        if worst is not None:
            judged[worst] += 1
    exact = sum(record.get("exact", False) for record in records if record["class"] == "zero-copy")
    return {
        "operators": len(rows),
        "cases": len(records),
        "classes": {c: {"cases": cases[c], "operators": operators[c]} for c in CLASSES if cases[c] or operators[c]},
        "zero_copy_cases_percent": _share(cases),
        "zero_copy_operators_percent": _share(judged),
        "bit_exact_cases": exact,
        "not_capturable": reasons(records, "not capturable"),
        "partly": reasons(records, "partly"),
        "copied": reasons(records, "copied"),
    }


def _share(counts: collections.Counter[str]) -> float:
    """Percentage of zero-copy, rounded down, so that 100 means all."""
    total = sum(counts[c] for c in _JUDGED)
    return counts["zero-copy"] * 1000 // total / 10 if total else 0.0


def reasons(records: Iterable[dict[str, Any]], ended: str) -> dict[str, int]:
    """How many cases of a class have each reason."""
    counts: collections.Counter[str] = collections.Counter()
    for record in records:
        if record["class"] == ended:
            counts.update({general(reason) for reason in record["reasons"]})
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def general(reason: str) -> str:
    """Strip from a reason the details that differ from case to case.

    >>> general("input load is copied: no pointer to it was found in the kernels of aten.sum.default")
    'an input is copied: no pointer to it was found in the kernels of …'
    """
    reason = re.sub(r"^input \w+ is", "an input is", reason)
    reason = re.sub(r"^(aten|prims|pygraph|torch_\w+)\.\S+: ", "", reason)
    return re.sub(r"\b(aten|prims)\.[\w.]+(, (aten|prims)\.[\w.]+)*", "…", reason)


# -- the page -----------------------------------------------------------------------------------------------------


def markdown(result: dict[str, Any]) -> str:
    """The page: how it was made, the summary, and the operators by class, what matters most first."""
    summary, rows = result["summary"], result["rows"]
    lines = [
        "# Which operators replay without copying",
        "",
        "Every operator of PyTorch's own test list (`op_db`) as a function of its tensors, through",
        "`pygraph.graphify(pygraph.indirect(pygraph.devicify(f)))`. The tensors of the first call are filled with NaN",
        "(integers: zeros) after it; later calls get tensors at other addresses with other values, and every call must",
        "give what eager gives: values, shapes, strides, dtypes, updates of arguments, aliases, and earlier results as",
        "they were. Written by a program; do not edit.",
        "",
        f"`{result['command']}`",
        "",
        ", ".join(f"{key} {value}" for key, value in result["versions"].items()),
        "",
        "## Summary",
        "",
        f"{summary['operators']} operators, {summary['cases']} cases (operator, dtype, sample). Of the cases that can",
        f"be captured, **{summary['zero_copy_cases_percent']} %** are zero-copy"
        f" ({summary['zero_copy_operators_percent']} % of the operators); {summary['bit_exact_cases']} of these cases"
        " agree with eager to the last bit.",
        "",
        "| Class | Cases | Operators | Meaning |",
        "| --- | --- | --- | --- |",
    ]
    for ended, counts in summary["classes"].items():
        lines.append(f"| {ended} | {counts['cases']} | {counts['operators']} | {_MEANING[ended]} |")
    lines += ["", "An operator counts under the first of these classes that one of its cases falls into.", ""]
    titles = {
        "copied": "What is copied",
        "partly": "What runs between graphs",
        "not_capturable": "What is not captured",
    }
    for ended, title in titles.items():
        if summary[ended]:
            lines += [f"{title}, and in how many cases:", ""]
            lines += [f"- {count}: {_cell(reason)}" for reason, count in summary[ended].items()]
            lines.append("")
    for ended in CLASSES:
        group = [row for row in rows if row["class"] == ended]
        if not group:
            continue
        lines += [f"## {ended.capitalize()} ({len(group)})", ""]
        if ended == "no device work" and not any(row["reasons"] or row["notes"] for row in group):
            lines += [", ".join(f"`{row['operator']}`" for row in group), ""]
            continue
        lines += [f"| Operator | {' | '.join(DTYPES)} | Kernels | Remarks |", f"|{' --- |' * (len(DTYPES) + 3)}"]
        for row in group:
            cells = [_counts(row["dtypes"].get(dtype, {})) for dtype in DTYPES]
            remarks = [*row["reasons"], *row["notes"]]
            remark = _cell("; ".join(remarks[:3]) + (f"; and {len(remarks) - 3} more" if len(remarks) > 3 else ""))
            lines.append(f"| `{row['operator']}` | {' | '.join(cells)} | {row['kernels']} | {remark} |")
        lines.append("")
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {ended}" for ended, count in counts.items()) or "–"


def _cell(text: str) -> str:
    """Text that does not break a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")[:400]
