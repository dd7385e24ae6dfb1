"""Kernel times of a compiled call, by the operations of its Program.

Each region is run with ordinary launches, from the state of the call and on copies of what it updates: those launch the
kernels that are in its graph, one operation after the other, so that it is known which operation each kernel is of.
What pygraph adds to graphs (nodes that patch and copy) is not part of it.
"""

# It measures the parts of an executable.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from pygraph.ir.printing import target_text
from pygraph.ir.scopes import scopes_of
from pygraph.report.profile import OperationTime, Profile
from pygraph.runtime.body import RegionBody
from pygraph.runtime.driver import KernelTime
from pygraph.runtime.executable import Executable
from pygraph.runtime.proof import WrittenState
from pygraph.runtime.selecting import BoundCall

_RUNS = 5
"""The runs of which the median counts."""


def can_profile() -> bool:
    """Whether kernels can be measured now: torch has one profiler at a time in a thread."""
    return not torch.autograd._profiler_enabled()  # pyright: ignore  # checked with torch 2.11 and 2.13


def profile_call(executable: Executable, leaves: Sequence[Any]) -> Profile | str:
    """Measure the kernels of a call, which leaves no trace.

    Args:
        executable: The compiled call.
        leaves: The leaves of ``(args, kwargs)`` of the call, which are afterwards as they were.

    Returns:
        The profile, or why there is none.
    """
    times: list[OperationTime] = []
    driver, pool, regions = executable.driver, executable.pool, executable.regions
    with executable._trial(leaves, runs=regions[:-1]) as env:
        for bound in regions:
            inputs, numbers = bound.border(env)
            if bound.region.kind != "host":
                state = WrittenState(bound.body, inputs)
                times += _region_times(BoundCall(bound.body, driver, pool, inputs, numbers, state))
            if bound is not regions[-1]:
                bound.launch(env)
    driver.give_back()
    if not any(one.kernels for one in times):
        return f"no kernels were seen ({driver.kernel_clock})"
    return Profile.of(times, driver.kernel_clock)


def _region_times(call: BoundCall) -> list[OperationTime]:
    with call.trial() as trial:
        runs = call.driver.kernel_times(
            lambda mark: call.body.run(trial.inputs, call.numbers, mark), trial.restore, _RUNS
        )
    return operation_times(call.body, runs)


def operation_times(body: RegionBody, runs: Sequence[Sequence[KernelTime]]) -> list[OperationTime]:
    """The kernels of each operation of a region, with the median of their times in several runs."""
    found: list[OperationTime] = []
    for op, node in enumerate(body.nodes):
        times = [[kernel.us for kernel in run if kernel.op == op] for run in runs]
        # A run may have one more, as where a library looks for its fastest kernel.
        usual = statistics.mode(map(len, times)) if times else 0
        alike = [one for one in times if len(one) == usual]
        kernels = tuple(statistics.median(kernel) for kernel in zip(*alike, strict=True))
        forward = node.meta.get("backward_of")
        found.append(
            OperationTime(
                forward or node.meta.get("source"), scopes_of(node), target_text(node.target), kernels,
                is_backward=forward is not None, node=node.name,
            )
        )  # fmt: skip
    return found
