"""The report of one kind of call, from its entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from pygraph.calls.cache import Cache
from pygraph.calls.counts import Counts
from pygraph.calls.entries import Differentiated, Entry, Recorded, Stateful
from pygraph.calls.misses import short_text
from pygraph.ir.descriptors import Argument, Fallback
from pygraph.ir.effects import count_kernels
from pygraph.ir.evaluate import argument_descriptors
from pygraph.ir.outline import Outline, outline
from pygraph.ir.program import Program
from pygraph.process import extension
from pygraph.report.call_report import NO_COUNTS, NO_MECHANISMS, NO_MEMORY, CallReport
from pygraph.report.explain import Explanation
from pygraph.report.profile import Profile
from pygraph.report.verdict import Totals
from pygraph.runtime.executable import Executable


def totals_of(counts: Counts, caches: Iterable[Cache]) -> Totals:
    """Counts of a function and of all that is derived from it, whose caches these are."""
    seconds = sum(cache.seconds for cache in caches)
    calls = counts.of_calls()
    return Totals(calls.hits, calls.misses, counts.captures, counts.evictions, seconds, calls.as_they_are)


_NO_GRAPH = "calls of this kind replay no graph; torch.profiler shows their kernels, and their lines (with_stack=True)"


def _profile(entry: Entry) -> Profile | str | None:
    """The kernel times of a kind of call, or why there are none; None where other functions run it."""
    if isinstance(entry, Recorded):
        return entry.profile
    return None if isinstance(entry, (Differentiated, Stateful)) else _NO_GRAPH


def _baked(program: Program | None) -> dict[str, str]:
    """Texts of the values of arguments that a trace depends on."""
    if program is None:
        return {}
    # The answer to a question about a value on the device is a text already.
    return {b.path: b.value if b.path.startswith("decision ") else short_text(b.value) for b in program.baked}


_MOST_NODES = 200
"""Nodes of a Program that a report draws."""


def _outline(program: Program, executable: Executable | None, profile: Profile | str | None) -> Outline:
    """The Program as plain data, with what graphs have recorded for its nodes and what their kernels take."""
    recorded: dict[fx.Node, tuple[tuple[str, ...], str]] = {}
    for bound in executable.regions if executable is not None else ():
        recorded |= {} if bound.graph is None else bound.graph.recorded_nodes(bound.body.nodes)
    return outline(program, _MOST_NODES, recorded, profile.nodes if isinstance(profile, Profile) else None)


def report_of(
    name: str, entries: Iterable[Entry], inlined: Mapping[Fallback, int], *, profile: bool = False
) -> Explanation:
    """Make the report of the kinds of calls of a function, without those of functions that are derived from it.

    Args:
        name: The function's name.
        entries: Its kinds of calls.
        inlined: Numbers of calls that no entry has served, by reason.
        profile: Whether to include kernel times.
    """
    entries = list(entries)
    calls = tuple(call_report(entry, profile=profile) for entry in entries if not entry.counts_itself)
    in_python = (entry.runner.in_python() for entry in entries if isinstance(entry, Stateful))
    lines = tuple(dict.fromkeys(filter(None, in_python)))
    return Explanation(name, calls, dict(inlined), in_python=lines, slow_calls=extension.reason())


def call_report(entry: Entry, *, profile: bool = False) -> CallReport:
    """Make the report of one kind of call, with its kernel times if they are asked for."""
    program, executable = entry.reported, entry.executable
    arguments: list[str] = []
    if program is not None:
        for descriptor in argument_descriptors(program):
            kind = descriptor.spec if isinstance(descriptor, Argument) else descriptor.type.__name__
            arguments.append(f"{descriptor.path}: {kind}")
    counts, memory, mechanisms = dict(NO_COUNTS), dict(NO_MEMORY), dict(NO_MECHANISMS)
    if executable is not None:
        counts, memory, mechanisms = executable.counts(), executable.memory_use(), executable.mechanisms()
    elif program is not None:
        counts["kernels"] = count_kernels(program.nodes)
    regions = () if program is None else program.regions if executable is None else executable.reported_regions()
    fallbacks = entry.fallbacks if executable is None else executable.fallbacks
    measured = _profile(entry) if profile else None
    return CallReport(
        tuple(arguments), counts, regions, tuple(fallbacks), entry.calls, memory, mechanisms,
        differentiated=isinstance(entry, Differentiated), baked=_baked(program), seconds=round(entry.seconds, 4),
        outline=None if program is None else _outline(program, executable, measured),
        profile=measured,
    )  # fmt: skip
