"""What is known to fail, by name and with its reason. The table may only shrink.

An error that pygraph raises where eager has none may be listed; a wrong value, shape, alias, update or a missing
exception may not. What is listed and passes fails the tests until it is struck off, and `AT_MOST` is lowered.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.conformance.running import FAILURES, Record

Case = tuple[str, str, str]
"""An entry, a dtype and a variant."""

EXPECTED: dict[str, dict[Case, str]] = {"emu": {}, "cuda": {}}
"""Reasons, by type of device and case."""

AT_MOST = {"emu": 0, "cuda": 0}
"""How long the tables are: lower it when a case is struck off, and never raise it."""


def complaints(
    name: str, records: Iterable[tuple[str, Record]], expected: dict[Case, str], *, complete: bool = True
) -> list[str]:
    """What is wrong with the records of an entry: failures that are not listed, and listed cases without a failure.

    Without ``complete``, which means that there are records of all samples, only the former can be told.
    """
    found: list[str] = []
    failed: set[Case] = set()
    for dtype, record in records:
        case = (name, dtype, record.variant)
        if record.outcome in FAILURES:
            failed.add(case)
            if case not in expected or record.outcome != "error":
                found.append(f"{' '.join(case)}, sample {record.sample}: {record.outcome}: {record.reason}")
    listed = {case for case in expected if complete and case[0] == name}
    found += [f"{' '.join(case)}: passes; strike it off the list" for case in sorted(listed - failed)]
    return found
