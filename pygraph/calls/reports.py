"""The report of one kind of call, from its entry."""

from __future__ import annotations

from pygraph.calls.entries import Differentiated, Entry
from pygraph.ir.descriptors import Argument
from pygraph.ir.effects import count_kernels
from pygraph.ir.evaluate import argument_descriptors
from pygraph.report.explain import NO_COUNTS, NO_MECHANISMS, NO_MEMORY, CallReport


def call_report(entry: Entry) -> CallReport:
    """Make the report of one kind of call."""
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
    regions = program.regions if program is not None else ()
    fallbacks = entry.fallbacks if executable is None else executable.fallbacks
    return CallReport(
        tuple(arguments), counts, regions, tuple(fallbacks), entry.calls, memory, mechanisms,
        differentiated=isinstance(entry, Differentiated),
    )  # fmt: skip
