"""Comparing a function as a whole with ordinary launches: its regions affect each other.

A region on its own is timed from an idle device. In a call it may have to wait for a value that the host reads between
two regions, and what a graph gains may be lost there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from pygraph.ir.effects import KNOWN_NAMESPACES, is_action, is_operation, is_store
from pygraph.ir.selections import Candidate, Selection
from pygraph.runtime.driver import Run
from pygraph.runtime.executable import Executable
from pygraph.runtime.prior import LAUNCH
from pygraph.runtime.rounds import Rounds
from pygraph.runtime.selecting import Selecting, judged

GRAPHS = Candidate("patch")
"""All regions as they were selected."""


def select_whole(executable: Executable, selecting: Selecting, leaves: Sequence[Any]) -> dict[int, Selection] | None:
    """The selections of all regions if ordinary launches of the whole function are faster than its graphs.

    Args:
        executable: The recorded Program, which runs as was selected for each region.
        selecting: How to select.
        leaves: The leaves of ``(args, kwargs)`` of a call, which are afterwards as they were.

    Returns:
        Launches for every region; None if graphs stay, if there are fewer than two, or if something between them must
        not run again and again.
    """
    if not selecting.policy.measures or len(executable.graphs) < 2 or not _may_repeat(executable):
        return None
    driver = executable.driver
    is_exact = driver.is_exact and selecting.policy.timer is None
    rounds = Rounds(GRAPHS, "latency", is_exact=is_exact)
    try:
        with selecting.spending(), executable.trials(leaves) as (run, launch, restore):
            samplers = {
                one: selecting.policy.sampler(Run(action, restore, f"the whole by {name}"), driver, latency=True)
                for one, action, name in ((LAUNCH, launch, "launch"), (GRAPHS, run, "graphs"))
            }
            rounds.run(samplers, selecting.budget)
    except torch.OutOfMemoryError:
        return None
    finally:
        driver.give_back()
    found = judged(rounds, GRAPHS, None)
    if found.chosen != LAUNCH or found.provisional is not None:
        return None
    reason = "the whole function was faster by ordinary launches than by its graphs"
    return dict.fromkeys(executable.selections, dataclasses.replace(found, reason=reason))


def _may_repeat(executable: Executable) -> bool:
    """Whether nothing that runs outside of graphs has an effect besides its results."""
    outside = [node for node in executable.launched_nodes() if is_operation(node) and not is_store(node)]
    return all(not is_action(node) and node.target.namespace in KNOWN_NAMESPACES for node in outside)  # pyright: ignore
