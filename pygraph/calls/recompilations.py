"""Compilations that are said: each in the log, and a warning where values or state keep a function compiling."""

# `sys._getframe` is how a warning finds the user's line.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable

from pygraph.calls.entries import Entry, Evaluated, Launched, Recorded
from pygraph.calls.function import CONDITION, Call
from pygraph.calls.limits import LIMITS
from pygraph.calls.misses import Misses, short_text
from pygraph.calls.requirements import Requirements
from pygraph.errors import RecompilationWarning, describe
from pygraph.ir.source_lines import frame_outside, user_frame
from pygraph.process.log import log
from pygraph.report.remedies import STATE, remedy_of_values
from pygraph.report.verdict import varying

Values = dict[str, str]
"""Texts of the values that a trace depends on, by the paths of their arguments."""


class Recompilations:
    """The values that calls of one function were compiled for, by what these calls have in common.

    Args:
        name: What messages call the function.
        path_of: The name that reports have for a path in ``(args, kwargs)``.

    Attributes:
        misses: The last calls that were compiled.
    """

    def __init__(self, name: str, path_of: Callable[[str], str] = str) -> None:
        self._name = name
        self.misses = Misses(path_of)
        self._values: dict[Hashable, list[Values]] = {}
        self._numbers: set[str] = set()
        self._seconds: dict[Hashable, float] = {}
        self._changes: dict[str, list[float]] = {}  # seconds, by the name of state that had changed

    def note(self, call: Call, entry: Entry, before: Requirements | None, seconds: float) -> None:
        """Note that a call was compiled, log it, and warn once where only values differ each time.

        Args:
            call: The call.
            entry: What was made of it. If that is for this call alone, calls like it may come often, and only
                debugging is told.
            before: What the last entry with its key depended on; None if there was none.
            seconds: How long that took.
        """
        if entry.plan is None:
            log.debug("%s: %s", self._name, _outcome(entry))
            return
        key = entry.plan.key
        log.info("%s: %s, in %.3f s", self._name, _outcome(entry), seconds)
        for fallback in entry.fallbacks if isinstance(entry, Recorded) else entry.fallbacks[1:]:
            log.info("%s: %s", self._name, fallback)
        changed = None if before is None else before.changed()
        self.misses.note(key, call, changed, user_frame(sys._getframe(1)), _outcome(entry), seconds)
        if not isinstance(entry, (Recorded, Launched, Evaluated)) or entry.reported is None:
            return
        if changed is not None:
            self._note_change(changed, seconds)
            return
        baked = {one.leaf: one for one in entry.reported.baked}
        if not baked or len(self._values) > LIMITS.forms:
            return
        leaves = tuple(None if index in baked else leaf for index, leaf in enumerate(key.kind.leaves))
        signature = (*(leaves if part is key.kind.leaves else part for part in key.kind), tuple(baked))
        values = self._values.setdefault(signature, [])
        found = {one.path: short_text(one.value) for one in baked.values()}
        if len(values) >= LIMITS.recompilations or found in values:
            return
        values.append(found)
        self._numbers |= {one.path for one in baked.values() if isinstance(one.value, (int, float, complex))}
        self._seconds[signature] = self._seconds.get(signature, 0.0) + seconds
        if len(values) == LIMITS.recompilations:
            self._warn(values, self._seconds[signature])

    def _note_change(self, name: str, seconds: float) -> None:
        """Note that state has changed since calls like this were compiled, and warn once if that goes on."""
        if len(self._changes) > LIMITS.forms:
            return
        past = self._changes.setdefault(name, [])
        past.append(seconds)
        if len(past) == LIMITS.recompilations:
            often = f"compiled {len(past)} times, in {sum(past):.1f} s"
            self._warn_of(f"{often}, each time because {name} had changed", STATE)

    def _warn(self, values: list[Values], seconds: float) -> None:
        different = varying([{path: one[path] for path in one if path != CONDITION} for one in values])
        if not different:
            return
        shown = "; and ".join(f"{path}, which was {', '.join(texts)}" for path, texts in different.items())
        often = f"compiled {len(values)} times, in {seconds:.1f} s"
        problem = f"{often}, for calls that differ in nothing but {shown}"
        self._warn_of(problem, remedy_of_values(are_numbers=self._numbers.issuperset(different)))

    def _warn_of(self, problem: str, remedy: str) -> None:
        text = describe(f"{self._name}(…)", problem, remedy=remedy)
        frame = frame_outside(sys._getframe(1))
        if frame is None:
            warnings.warn(text, RecompilationWarning, stacklevel=2)
            return
        scope = frame.f_globals
        warnings.warn_explicit(
            text, RecompilationWarning, frame.f_code.co_filename, frame.f_lineno, scope.get("__name__"),
            scope.setdefault("__warningregistry__", {}),
        )  # fmt: skip


def _outcome(entry: Entry) -> str:
    """The outcome of a compilation, in words."""
    if isinstance(entry, Recorded):
        count = len(entry.graphs.graphs)
        return f"recorded as {count} graph{'s' if count > 1 else ''}"
    if entry.fallbacks:
        return f"runs as it is: {entry.fallbacks[0].reason}"
    return "is evaluated" if isinstance(entry, Evaluated) else f"is {type(entry).__name__.lower()}"
