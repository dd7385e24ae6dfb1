"""Calls of transformed functions inside ``vmap``, ``grad`` and ``jvp``, and under autograd.

A call goes this way. `find_site` looks up the `Site` of such calls, or discovers it: which tensors the function closes
over that carry gradients or batches. These are lifted: passed like arguments from there on. `apply` runs the function
as one operation to all levels that differentiate or batch its tensors.
"""

# Arguments and results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.autograd.forward import NotCompiledError
from pygraph.autograd.levels import levels
from pygraph.autograd.lookup import find_site
from pygraph.autograd.native_operation import native_operation
from pygraph.autograd.operation import Application, apply
from pygraph.autograd.outcome import Outcome
from pygraph.autograd.site import Site
from pygraph.autograd.sites import Sites
from pygraph.calls import limits
from pygraph.calls.engine import Engine
from pygraph.calls.entries import Entry
from pygraph.calls.function import Call
from pygraph.calls.surroundings import InlineError
from pygraph.ir.descriptors import Fallback
from pygraph.process import extension


class Composed:
    """The composition of one engine, see `pygraph.calls.policy.Composition`.

    Args:
        max_graphs: How many kinds of calls have sites at a time.
        clock: Gives the time by which the engine's native plans tell when they served a call.
    """

    def __init__(self, max_graphs: int, clock: Callable[[], int]) -> None:
        self._sites = Sites(max_graphs, clock)

    def call(self, engine: Engine, call: Call, entry: Entry | None) -> Any:
        """Return the result of a call that is differentiated or batched from outside.

        Raises:
            InlineError: The call must run as it is.
        """
        leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
        site = find_site(self._sites, engine, leaves, structure, engine.keys.static_leaves(call.args, call.kwargs))
        result = compose(site, leaves)
        if entry is not None:
            _plan(engine, entry, site, Call(call.args, call.kwargs, leaves, call.structure))
        return result

    def functions(self) -> Iterator[Engine]:
        """Iterate over the engines of all derived functions."""
        return self._sites.engines()

    def settle(self) -> None:
        """Bring the order of sites up to date with the calls that came by native plans."""
        self._sites.settle()

    def clear(self) -> None:
        """Forget all sites, and give back the graphs of derived functions."""
        self._sites.clear()


def _plan(engine: Engine, entry: Entry, site: Site, call: Call) -> None:
    """Have later calls like this one find their site natively."""
    if extension.loaded() is None or not site.may_be_planned:
        return
    if any(isinstance(call.leaves[index], torch.Tensor) for index in site.baked):
        return
    with engine.shared.lock:
        requirements = site.requirements()
        plans = site.plans_for(requirements) if engine.may_plan else None
        if plans is None or requirements is None:
            return
        lifted = [one.tensor for one in requirements.tensors[: len(site.primal.lifted)]]
        plan = engine.plan_composed(entry, call, PlannedCall(engine, site, lifted), requirements, site.baked)
        if plan is not None:
            plans.append(plan)


class PlannedCall:
    """Calls whose site and lifted tensors are known.

    Args:
        engine: The engine of the function.
        site: The site.
        lifted: The tensors that the function closes over.
    """

    def __init__(self, engine: Engine, site: Site, lifted: Sequence[torch.Tensor]) -> None:
        self._engine, self._site, self._lifted = engine, site, lifted
        self._native: Any = None
        self._tries = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call."""
        self._site.serves()
        native = self._native  # another thread may replace it
        if native is not None:
            result = native.call((args, kwargs))
            if result is not self._engine.cache.native.miss:
                return result
        try:
            result = compose(self._site, pytree.tree_leaves((args, kwargs)), self._lifted)
        except InlineError as error:
            reason = str(error)
        else:
            self._make_native(args, kwargs, result)
            return result
        self._site.discard_plans()  # the next call is noted where calls that run as they are skip the lookup
        return self._engine.run_inline(Fallback("the call", reason), args, kwargs)

    def _make_native(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Have further calls like one that was composed run natively, if that is possible by now."""
        if (self._native is None or self._native.is_dead) and self._tries < limits.LIMITS.native_tries:
            self._tries += 1
            self._native = native_operation(self._site, args, kwargs, self._lifted, result)


def compose(site: Site, leaves: Sequence[Any], lifted: Sequence[torch.Tensor] | None = None) -> Any:
    """Call a function where its call is differentiated or batched from outside.

    Args:
        site: The site of such calls.
        leaves: The leaves of ``(args, kwargs)``.
        lifted: The tensors that the function closes over now; None to look them up.

    Returns:
        The function's result, at this level.

    Raises:
        InlineError: The call must run as it is; nothing has been changed.
    """
    tensors = site.tensors(leaves, lifted)
    stack = levels()
    reason = site.refusal(stack, tensors)
    if reason is not None:
        raise InlineError(reason)
    outcome = Outcome()
    try:
        call = Application(site.primal, site.numbers(leaves), outcome, unchanged=lifted is not None and not stack)
        results = apply(call, tensors)
    except NotCompiledError:
        raise InlineError("its forward does not run as a graph") from None
    except RuntimeError as error:
        site.note_failure(stack, error)
        raise
    assert outcome.spec is not None
    for index, operand in outcome.inputs.items():
        results[index] = tensors[operand]
    for index, (operand, view) in outcome.input_views.items():
        if not stack and index not in site.primal.aliases:
            tensor = tensors[operand]
            results[index] = view.of(tensor if results[index].requires_grad else tensor.detach())
    for index, alias in site.primal.aliases.items():
        results[index] = alias.of(tensors[alias.operand])
    for index, first in outcome.duplicates.items():
        results[index] = results[first]
    return outcome.spec.unflatten(results)
