"""Calls of a function inside ``vmap``, ``grad`` and ``jvp``, and under autograd, as its engine makes them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.autograd.lookup import find_site
from pygraph.autograd.shell import compose
from pygraph.autograd.site import Site
from pygraph.autograd.sites import Sites
from pygraph.calls.engine import Engine
from pygraph.calls.entries import Entry
from pygraph.calls.function import Call
from pygraph.calls.keys import Key
from pygraph.calls.surroundings import InlineError
from pygraph.ir.descriptors import Fallback
from pygraph.process import extension


class Composed:
    """The composition of one engine, see `pygraph.calls.policy.Composition`.

    Args:
        max_graphs: The number of kinds of calls of which sites are kept.
    """

    def __init__(self, max_graphs: int) -> None:
        self._sites = Sites(max_graphs)

    def call(self, engine: Engine, call: Call, found: tuple[Key, Entry] | None) -> Any:
        """The result of a call that is differentiated or batched from outside.

        Raises:
            InlineError: It must run as it is.
        """
        leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
        site = find_site(self._sites, engine, leaves, structure, engine.keys.static_leaves(call.args, call.kwargs))
        result = compose(site, leaves)
        if found is not None:
            _plan(engine, found, site, Call(call.args, call.kwargs, leaves, call.structure))
        return result

    def functions(self) -> Iterator[Engine]:
        """The engines of all derived functions."""
        return self._sites.engines()

    def clear(self) -> None:
        """Forget all sites, and give back the graphs of derived functions."""
        self._sites.clear()


def _plan(engine: Engine, found: tuple[Key, Entry], site: Site, call: Call) -> None:
    """Have calls like this one find their site natively from now on."""
    if extension.loaded() is None or not site.may_be_planned:
        return
    if any(isinstance(call.leaves[index], torch.Tensor) for index in site.baked):
        return
    with engine.shared.lock:
        reached = site.reached()
        plans = site.plans_for(reached) if engine.may_plan else None
        if plans is None:
            return
        lifted = reached.tensors[: len(site.primal.lifted)]
        run = functools.partial(_planned_call, engine, site, lifted)
        plan = engine.plan_composed(found, call, run, reached, site.baked)
        if plan is not None:
            plans.append(plan)


def _planned_call(engine: Engine, site: Site, lifted: Sequence[torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a call whose site is known, as are the tensors that the function closes over."""
    site.serves()
    try:
        return compose(site, pytree.tree_leaves((args, kwargs)), lifted)
    except InlineError as error:
        reason = str(error)
    site.discard_plans()  # the next call is noted where those are skipped that run as they are
    return engine.run_inline(Fallback("the call", reason), args, kwargs)
