"""Links: nodes of autograd's graph between results of one call, of which some may be computed from others.

A call is one node of that graph, with one backward. Each of several results has a node of its own before it, the link,
with edges to the call, to the results that it is computed from, and to the tensors that it depends on besides. So a
hook on one is not called where only others are differentiated. As long as nobody looks at the gradients of the results
that it depends on, the link hands its gradient to the call, which goes on with all at once. Else it computes theirs, so
that autograd adds them up, calls hooks with them, and keeps them, as in eager.

Links are in C++ (`native/result_link.h`), but here where a result is a view, or the extension is not there.
"""

# Contexts have attributes of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from pygraph.autograd.pullback import Pullback
from pygraph.process import extension

GradientsOfResult: TypeAlias = "Callable[[Any, int, torch.Tensor], list[torch.Tensor | None]]"
"""A function of a call's node, a result's number and its cotangent; the gradients of what the result depends on."""


def without_links(results: Sequence[torch.Tensor], pullback: Pullback) -> tuple[torch.Tensor, ...]:
    """Return results for the call's own node: others in the place of those that get a link."""
    linked = pullback.dependencies
    return tuple(result.detach() if index in linked else result for index, result in enumerate(results))


def with_links(
    made: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    pullback: Pullback,
    tensors: Sequence[torch.Tensor],
    gradients: GradientsOfResult,
) -> Sequence[torch.Tensor]:
    """Return the results of a call, with their history.

    Args:
        made: What the call's node has made of `without_links`.
        results: The results.
        pullback: The derivative rule of the call.
        tensors: The tensors that it was passed.
        gradients: Computes gradients of what a result depends on.
    """
    found, module = list(made), extension.loaded()
    if module is not None and not any(results[index]._is_view() for index in pullback.dependencies):
        for index in pullback.dependencies:
            found[index] = results[index]
        module.link_results(tuple(found), tuple(made), tuple(tensors), pullback.links, gradients)
        return found
    for index, others, own in pullback.links:  # of views, torch keeps more than a node
        edges = (made[index], *(found[number] for number in others), *(tensors[number] for number in own))
        found[index] = _Link.apply((results[index], index, gradients), *edges)  # pyright: ignore
    return found


def node_of_call(function: Any) -> Any:
    """Return the node of the call that has computed a result, of the result's node."""
    if function is None or function.name() not in ("ResultLinkBackward", "_LinkBackward"):
        return function
    return function.next_functions[0][0]


class _Link(torch.autograd.function._SingleLevelFunction):
    """The link of a result."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, given: tuple[torch.Tensor, int, GradientsOfResult], *edges: torch.Tensor
    ) -> torch.Tensor:
        """Return the result, which has no history yet; edges lead to the call and to what the result depends on."""
        ctx.set_materialize_grads(False)
        result, ctx.index, ctx.gradients = given
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor | None) -> Any:  # pyright: ignore
        """Return the gradient of the call's node, or those of the results and tensors that this one depends on."""
        if cotangent is None or len(ctx.needs_input_grad) == 2:
            return None, cotangent, *[None] * (len(ctx.needs_input_grad) - 2)
        # Whether anybody looks at the gradients of these is known in C++ only.
        return None, None, *ctx.gradients(ctx.next_functions[0][0], ctx.index, cotangent)
