"""Run one entry in one dtype: all of its samples in all variants, each compared with eager."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from conformance_cases import UNINITIALISED, Case, Check, Mismatch, check_calls, check_device, eager_call, first_line

import pygraph
from tests.conformance.samples import Sample, differentiable, dtypes, load_samples
from tests.conformance.variants import batched, batched_sets, call, call_out, gradient, out_sets

T = TypeVar("T")

VARIANTS = ("forward", "in place", "out=", "gradient outside", "gradient inside", "vmap")

WAYS = ("graph", "partly", "launches", "no work")
"""How a call that is right ran: replayed, replayed in part, as ordinary launches, or without work for the device."""

FAILURES = ("wrong", "error")
"""A result, alias, updated argument or exception that is not eager's; an exception where eager has none."""

OUTCOMES = (*FAILURES, *WAYS, "raises", "no eager")
"""``raises``: both raise. ``no eager``: eager cannot take this gradient or vmap."""

_TURNS = 3
"""Calls of each function, with the sets of tensors in turn: one traces, one makes a plan, one takes the native path."""

_KINDS = 8
"""Kinds of calls that are kept, so that samples meet the graphs of others like them."""


_AMONG = 64
"""Where only some samples are run, they are chosen among so many, as making them takes time too."""


@dataclasses.dataclass(frozen=True)
class Record:
    """How one sample ended in one variant."""

    variant: str
    sample: int
    outcome: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """One sample, its number, and whether it is for gradients or for everything else."""

    index: int
    sample: Sample
    for_gradients: bool


class Subject:
    """One entry in one dtype on a device, with its jitted functions, which all of its samples share."""

    def __init__(self, name: str, entry: Any, device: torch.device, dtype: str) -> None:
        self._name, self._entry, self._device, self._dtype = name, entry, device, dtype
        self._operator = pygraph.jit(entry.op, max_graphs=_KINDS)
        self._in_place = pygraph.jit(entry.inplace_variant, max_graphs=_KINDS) if entry.inplace_variant else None

    def tasks(self, limit: int | None = None) -> list[Task]:
        """All samples, or so many of each kind, at even distances among the first `_AMONG`.

        Raises:
            Exception: As eager does, where a sample cannot be made on this device.
        """
        among = None if limit is None else _AMONG
        found = itertools.islice(load_samples(self._entry, self._device, self._dtype), among)
        chosen = spread([Task(i, s, False) for i, s in enumerate(found)], limit)
        if differentiable(self._entry, self._device.type, self._dtype):
            found = itertools.islice(load_samples(self._entry, self._device, self._dtype, requires_grad=True), among)
            chosen += spread([Task(i, s, True) for i, s in enumerate(found) if s.wanted], limit)
        return chosen

    def run(self, task: Task) -> Iterator[Record]:
        """A sample in all variants that it is meant for."""
        entry, operator, fast, sample = self._entry, self._entry.op, self._operator, task.sample
        if task.for_gradients:
            eager = gradient(sample, operator)
            yield self._compare("gradient outside", task, sample.sets, eager, gradient(sample, fast), fast)
            inside = pygraph.jit(eager)
            yield self._compare("gradient inside", task, sample.sets, eager, inside, inside)
            inside.cache_clear()
            return
        record = self._compare("forward", task, sample.sets, call(sample, operator), call(sample, fast), fast)
        yield record
        if self._in_place is not None and sample.sets[0] and not sample.broadcasts:
            functions = call(sample, entry.inplace_variant), call(sample, self._in_place)
            yield self._compare("in place", task, sample.sets, *functions, self._in_place)
        given = None if record.outcome == "raises" or not entry.supports_out else out_sets(sample, operator)
        if given is not None:
            sets, structure = given
            functions = call_out(sample, operator, structure), call_out(sample, fast, structure)
            yield self._compare("out=", task, sets, *functions, fast)
        if sample.sets[0]:
            try:
                sets = batched_sets(sample)
            except (RuntimeError, NotImplementedError) as error:  # sparse tensors cannot be stacked
                yield Record("vmap", task.index, "no eager", first_line(error))
            else:
                functions = batched(sample, operator), batched(sample, fast)
                yield self._compare("vmap", task, sets, *functions, fast)

    def clear(self) -> None:
        """Give back all graphs."""
        self._operator.cache_clear()
        if self._in_place is not None:
            self._in_place.cache_clear()

    def _compare(
        self, variant: str, task: Task, sets: Any, eager: Callable[..., Any], ours: Callable[..., Any], fast: Any
    ) -> Record:
        case = Case(eager, sets)
        try:
            expected = [eager_call(case, tensors) for tensors in sets]
        except Exception as error:
            check_device(error)
            return Record(variant, task.index, *self._both_raise(variant, case, ours, error))
        inlined = fast.explain().inlined
        try:
            defined = self._name.partition(".")[0] not in UNINITIALISED
            check_calls(case, expected, ours, Check(defined, strides=variant != "gradient outside"), _TURNS)
        except Mismatch as error:
            return Record(variant, task.index, "wrong", str(error))
        except Exception as error:
            check_device(error)
            return Record(variant, task.index, "error", f"{type(error).__name__}: {first_line(error)}")
        return Record(variant, task.index, *_way(fast, inlined))

    def _both_raise(self, variant: str, case: Case, ours: Callable[..., Any], error: Exception) -> tuple[str, str]:
        kind = type(error).__name__
        # Without a kernel: ours may be made of others, as out= is.
        if variant not in ("forward", "in place", "out=") or isinstance(error, NotImplementedError):
            return "no eager", f"{kind}: {first_line(error)}"
        try:
            for tensors in case.sets:
                eager_call(Case(ours, case.sets), tensors)
        except Exception as mine:
            check_device(mine)
            if type(mine) is type(error):
                return "raises", f"{kind}: {first_line(error)}"
            return "raises", f"{type(mine).__name__} instead of {kind}: {first_line(mine)}"
        return "wrong", f"eager raises {kind}: {first_line(error)}"


def spread(items: Sequence[T], limit: int | None) -> list[T]:
    """So many of the items, from the first to the last at even distances.

    >>> spread(range(10), 4), spread(range(3), 4), spread(range(3), None)
    ([0, 3, 6, 9], [0, 1, 2], [0, 1, 2])
    """
    if limit is None or len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(limit - 1, 1))] for i in range(limit)]


def run_entry(
    name: str, entry: Any, device: torch.device, limit: int | None = None, chosen: Sequence[str] | None = None
) -> Iterator[tuple[str, Record]]:
    """All records of an entry, each with its dtype.

    Args:
        name: What the entry is called.
        entry: A description of an operator.
        device: Where it runs.
        limit: The number of samples of each kind; default: all.
        chosen: The dtypes; default: those of `dtypes`.
    """
    for dtype in dtypes(entry, device.type) if chosen is None else chosen:
        subject = Subject(name, entry, device, dtype)
        try:
            tasks = subject.tasks(limit)
        except Exception as error:
            yield dtype, unmade(error)
            continue
        for task in tasks:
            for record in subject.run(task):
                yield dtype, record
        subject.clear()


def unmade(error: Exception) -> Record:
    """The record of an entry whose samples cannot be made on a device."""
    return Record("forward", 0, "no eager", f"sample: {type(error).__name__}: {first_line(error)}")


def _way(fast: Any, inlined: dict[Any, int]) -> tuple[str, str]:
    """How the last calls of a jitted function ran, and why not as one graph; ``inlined`` is what was inlined before."""
    explanation = fast.explain()
    for fallback, count in explanation.inlined.items():
        if count > inlined.get(fallback, 0):
            return "launches", fallback.reason
    if not explanation.calls:
        return "launches", "explain() knows of no call"
    latest = explanation.calls[-1]
    reason = latest.fallbacks[0].reason if latest.fallbacks else ""
    in_graphs = latest.counts["kernels_in_graphs"]
    if not in_graphs:
        return ("launches" if reason else "no work"), reason
    return ("partly" if in_graphs < latest.counts["kernels"] else "graph"), reason
