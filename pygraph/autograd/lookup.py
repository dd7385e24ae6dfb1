"""Lookup of the site of a call, discovered if need be."""

# Arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from pygraph.autograd.discovery import discover
from pygraph.autograd.settings import Settings
from pygraph.autograd.site import Refused, Site, describe_tensor
from pygraph.autograd.sites import Sites
from pygraph.calls import retries
from pygraph.calls.engine import Engine
from pygraph.calls.failed_traces import failure_of
from pygraph.calls.keys import UnhashableError, form_of, object_key
from pygraph.calls.own_errors import raise_own
from pygraph.calls.retries import Traces
from pygraph.calls.surroundings import InlineError, UntraceableError
from pygraph.calls.unhashable import refusal
from pygraph.errors import DisturbedTraceError, TraceError
from pygraph.guards.environment import Environment, modes_of
from pygraph.guards.locations import are_same
from pygraph.ir.leaves import is_live_number
from pygraph.ir.structures import unflatten
from pygraph.ir.value_keys import structure_key, value_key
from pygraph.tracing.call_environment import objects_among
from pygraph.tracing.leaks import leaving_nothing


class _Key(NamedTuple):
    """A kind of call: structure, static leaves, a key for each leaf, and torch's settings."""

    structure: Hashable
    static: frozenset[int]
    leaves: tuple[Hashable, ...]
    settings: Settings


def find_site(
    sites: Sites, function: Engine, leaves: Sequence[Any], tree: pytree.TreeSpec, static: frozenset[int]
) -> Site:
    """Return the site of a call, discovered if need be.

    Args:
        sites: The sites of the function.
        function: The engine of the function.
        leaves: The leaves of ``(args, kwargs)``.
        tree: The structure of ``(args, kwargs)``.
        static: The leaves that are static arguments.

    Raises:
        InlineError: The call cannot be traced.
        UntraceableError: The call cannot be traced, which was not known before.
    """
    settings = Settings.now()
    try:
        key = _Key(structure_key(tree), static, _leaf_keys(leaves, static, function.keys.by_value), settings)
    except UnhashableError as error:
        args, kwargs = unflatten(leaves, tree)
        raise InlineError(refusal(args, kwargs, error.leaf)) from None
    # Threads take turns, as sites may be dropped; a handler that makes a call meanwhile has it run as it is.
    with function.turn():
        kind = (key, _values(leaves, sites.baked.get(key, ())))
        known = sites.get(kind)
        if known is None:
            return _discover_site(sites, function, leaves, tree, static, kind)
        sites.note_used(known)
    if isinstance(known, Refused):
        raise InlineError(known.reason)
    known.serves()
    return known


def _discover_site(
    sites: Sites,
    function: Engine,
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    static: frozenset[int],
    kind: tuple[_Key, tuple[Hashable, ...]],
) -> Site:
    """Discover the site of a call of a kind that has none, within the budget of such calls."""
    sites.settle()  # the least recently used is forgotten first
    key = kind[0]
    form = form_of(key)
    traces = sites.traces.of(form)
    reason = sites.refusal(kind, traces, of_objects=form is not key)
    if reason is not None:
        raise InlineError(reason)
    began = retries.clock()
    try:
        site, baked = leaving_nothing(
            f"trace({function.name})(…)", lambda: discover(function, leaves, tree, static, key.settings)
        )
    except DisturbedTraceError as error:
        raise InlineError(str(error)) from error  # the next call is traced again
    except TraceError as error:
        if error.raised is not None and function.function.options.strict:
            raise_own(error.raised, function.name)
        seconds = retries.clock() - began
        raise _refuse(sites, kind, error, traces, seconds, lambda: _modes(function, leaves, tree)) from error
    site.baked = sites.baked[key] = baked
    site.traces, site.seconds = traces, retries.clock() - began
    traces.note_made(site.seconds)
    sites.put((key, _values(leaves, baked)), site)
    return site


def _refuse(
    sites: Sites,
    kind: Hashable,
    error: TraceError,
    traces: Traces,
    seconds: float,
    modes_now: Callable[[], Environment | None],
) -> InlineError:
    """Remember that calls of a kind cannot be traced, and return the error that says so.

    Args:
        sites: The sites of the function.
        kind: The kind of call.
        error: The error of the trace.
        traces: The budget of traces of such calls.
        seconds: How long the trace took.
        modes_now: Returns the modes of the modules that the function reaches.
    """
    before = sites.latest(kind)
    last = before if isinstance(before, Refused) else None
    failure = failure_of(error, is_first=before is None, was_once=last is not None and last.once)
    if failure.is_unsteady:
        traces.note_unsteady(seconds)
    modes = None if failure.once or failure.is_unsteady else modes_now()
    until = traces if failure.is_unsteady else None
    sites.put(kind, Refused(str(error), modes, failure.once, until, failure.filled))
    # A call that fills other locations than the last one fills a memo, for another key.
    is_memo = failure.is_unsteady and not (last is not None and are_same(failure.filled, last.filled))
    return (InlineError if failure.once or is_memo else UntraceableError)(str(error))


def _modes(function: Engine, leaves: Sequence[Any], tree: pytree.TreeSpec) -> Environment | None:
    return modes_of(function.fn, objects_among(*unflatten(leaves, tree)))


def _values(leaves: Sequence[Any], numbers: Sequence[int]) -> tuple[Hashable, ...]:
    found = (leaves[index] for index in numbers)
    return tuple(value_key(leaf.item() if isinstance(leaf, torch.Tensor) else leaf) for leaf in found)


def _leaf_keys(leaves: Sequence[Any], static: frozenset[int], by_value: Collection[type]) -> tuple[Hashable, ...]:
    keys: list[Hashable] = []
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            keys.append((first.setdefault(id(leaf), index), *describe_tensor(leaf)))
        elif index not in static and is_live_number(leaf):
            keys.append(leaf.__class__)
        else:
            keys.append(object_key(leaf, index, by_value, is_marked=index in static))
    return tuple(keys)
