"""Run one entry in one dtype: all of its samples in all variants, each compared with eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from conformance_cases import UNINITIALISED, Case, Check, Mismatch, check_calls, check_device, eager_call, first_line

import pygraph
from tests.conformance.samples import Sample, differentiable, load_samples
from tests.conformance.variants import batched, batched_sets, call, call_out, gradient, out_sets

VARIANTS = ("forward", "in place", "out=", "gradient outside", "gradient inside", "vmap")

WAYS = ("graph", "partly", "launches", "no work")
"""How a call that is right ran: replayed, replayed in part, as ordinary launches, or without work for the device."""

FAILURES = ("wrong", "error")
"""A result, alias, updated argument or exception that is not eager's; an exception where eager has none."""

OUTCOMES = (*FAILURES, *WAYS, "raises", "no eager")
"""``raises``: both raise. ``no eager``: eager cannot take this gradient or vmap."""

_TURNS = 3
"""Calls of each function, with both sets of tensors in turn: one traces, one makes a plan, one takes the native path."""

_KINDS = 8
"""Kinds of calls that are kept, so that samples meet the graphs of others like them."""


@dataclasses.dataclass(frozen=True)
class Record:
    """How one sample ended in one variant."""

    variant: str
    sample: int
    outcome: str
    reason: str = ""


class Subject:
    """One entry in one dtype on a device, with its jitted functions, which all of its samples share."""

    def __init__(self, name: str, entry: Any, device: torch.device, dtype: str) -> None:
        self._name, self._entry, self._device, self._dtype = name, entry, device, dtype
        self._operator = pygraph.jit(entry.op, max_graphs=_KINDS)
        self._in_place = pygraph.jit(entry.inplace_variant, max_graphs=_KINDS) if entry.inplace_variant else None
        self._differentiable = differentiable(entry, device.type, dtype)

    def samples(self, requires_grad: bool) -> list[Sample]:
        """All samples; those for gradients, if there are any, with ``requires_grad``."""
        if requires_grad and not self._differentiable:
            return []
        found = load_samples(self._entry, self._device, self._dtype, requires_grad=requires_grad)
        return [sample for sample in found if sample.wanted or not requires_grad]

    def run(self, index: int, sample: Sample, for_gradients: bool) -> Iterator[Record]:
        """A sample in all variants that it is meant for."""
        entry, operator, fast = self._entry, self._entry.op, self._operator
        if for_gradients:
            eager = gradient(sample, operator)
            yield self._compare("gradient outside", index, sample.sets, eager, gradient(sample, fast), fast)
            inside = pygraph.jit(eager)
            yield self._compare("gradient inside", index, sample.sets, eager, inside, inside)
            inside.cache_clear()
            return
        record = self._compare("forward", index, sample.sets, call(sample, operator), call(sample, fast), fast)
        yield record
        if self._in_place is not None and sample.sets[0] and not sample.broadcasts:
            functions = call(sample, entry.inplace_variant), call(sample, self._in_place)
            yield self._compare("in place", index, sample.sets, *functions, self._in_place)
        given = None if record.outcome == "raises" or not entry.supports_out else out_sets(sample, operator)
        if given is not None:
            sets, structure = given
            functions = call_out(sample, operator, structure), call_out(sample, fast, structure)
            yield self._compare("out=", index, sets, *functions, fast)
        if sample.sets[0]:
            try:
                sets = batched_sets(sample)
            except (RuntimeError, NotImplementedError) as error:  # sparse tensors cannot be stacked
                yield Record("vmap", index, "no eager", first_line(error))
            else:
                functions = batched(sample, operator), batched(sample, fast)
                yield self._compare("vmap", index, sets, *functions, fast)

    def clear(self) -> None:
        """Give back all graphs."""
        self._operator.cache_clear()
        if self._in_place is not None:
            self._in_place.cache_clear()

    def _compare(
        self, variant: str, index: int, sets: Any, eager: Callable[..., Any], ours: Callable[..., Any], fast: Any
    ) -> Record:
        case = Case(eager, sets)
        try:
            expected = [eager_call(case, tensors) for tensors in sets]
        except Exception as error:
            check_device(error)
            return Record(variant, index, *self._both_raise(variant, case, ours, error))
        before = _inlined(fast)
        try:
            check_calls(case, expected, ours, Check(self._name.partition(".")[0] not in UNINITIALISED), _TURNS)
        except Mismatch as error:
            return Record(variant, index, "wrong", str(error))
        except Exception as error:
            check_device(error)
            return Record(variant, index, "error", f"{type(error).__name__}: {first_line(error)}")
        return Record(variant, index, *_way(fast, before))

    def _both_raise(self, variant: str, case: Case, ours: Callable[..., Any], error: Exception) -> tuple[str, str]:
        kind = type(error).__name__
        if variant not in ("forward", "in place", "out="):
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


def _inlined(fast: Any) -> int:
    return sum(fast.explain().inlined.values())


def _way(fast: Any, inlined_before: int) -> tuple[str, str]:
    """How the last calls of a jitted function ran, and why not as one graph."""
    explanation = fast.explain()
    if sum(explanation.inlined.values()) > inlined_before:
        return "launches", next(reversed(explanation.inlined)).reason
    latest = explanation.calls[-1]
    reason = latest.fallbacks[0].reason if latest.fallbacks else ""
    kernels, in_graphs = latest.counts["kernels"], latest.counts["kernels_in_graphs"]
    if not in_graphs:
        return ("launches" if kernels or reason else "no work"), reason
    return ("partly" if in_graphs < kernels else "graph"), reason
