"""What a call keeps for its derivatives."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pygraph.composition.joint import Pullback
from pygraph.composition.levels import is_dual_level, levels, saved_tensors_hooks
from pygraph.composition.unread import Kind, stand_in, without_memory


class Kept:
    """The tensors that a call's derivatives are computed from.

    Autograd lets all go that a call has saved as soon as one of its results has been differentiated. In eager, what
    the others need stays, and what nothing needs is not held: so it is kept here, where autograd itself differentiates
    a call, and nobody has asked to see what it saves. As in eager, the caller may update in place what the backward
    does not read. A derivative of the gradient needs that too.

    A call keeps hundreds of tensors, so they are kept in rows.

    Args:
        rule: How the call is differentiated.
        tensors: What it was passed.
        results: What it returned.

    Attributes:
        is_own: Whether all is kept here.
        saved: What autograd keeps.
    """

    def __init__(self, rule: Any, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        kept: list[torch.Tensor] = rule.kept(tensors, results)
        self._rule = rule
        self._unread: dict[int, int | None] = {}  # and the version that each is to stay at, if any
        self._waiting: set[int] = set()
        self.is_own = False
        captured: Sequence[torch.Tensor] = ()
        inside: Sequence[int] = ()
        if isinstance(rule, Pullback) and not levels():
            reading = rule.reads(tensors)
            captured, inside = reading.captured, reading.found_inside
            hidden = is_dual_level() or saved_tensors_hooks() is not None
            without_history = (tensor for tensor, chosen in zip(tensors, rule.mask, strict=True) if not chosen)
            others = (*without_history, *kept[len(tensors) :])
            self.is_own = not hidden and bool(rule.differentiated) and not any(map(torch.Tensor.is_inference, others))
            updated = rule.inner.effects.arguments if rule.inner.effects is not None else ()
            for index in reading.unread:
                tensor = kept[index]
                watched = index not in updated and not tensor.is_inference()
                self._unread[index] = tensor._version if watched else None
                kept[index] = stand_in(tensor)
        if self.is_own:
            self._waiting = set(rule.differentiated)
            self._versions = [tensor._version for tensor in kept]
            for index in range(rule.first_result, len(kept)):  # a result refers to this; what was saved has no history
                kept[index] = kept[index].detach()
            watched = [*captured, *(tensors[index] for index in inside)]
            self._watched = [(tensor, tensor._version) for tensor in watched]
            self._kinds: Sequence[Kind] = rule.kinds(kept)
            # What is kept here; None for what autograd keeps, or has been let go.
            self._tensors: list[torch.Tensor | None] = [*kept]
            self.saved: list[torch.Tensor] = []
        else:
            self._tensors = [tensor if index in self._unread else None for index, tensor in enumerate(kept)]
            self.saved = [*(tensor for index, tensor in enumerate(kept) if index not in self._unread), *captured]
        self._has_saved = bool(self.saved)

    def is_saved(self) -> None:
        """Autograd keeps it now."""
        del self.saved

    def restore(self, ctx: Any, cotangents: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor]:
        """All that was kept.

        Args:
            ctx: What autograd has kept it in.
            cotangents: Those of the results, if it is for a backward.

        Raises:
            RuntimeError: It has been let go, or updated in place.
        """
        again = torch.is_grad_enabled()
        if again:
            self._check_unread()
        if not self.is_own:
            given = iter(ctx.saved_tensors if self._has_saved else ())
            return [next(given) if tensor is None else tensor for tensor in self._tensors]
        found = [
            without_memory(*self._kinds[index]) if tensor is None else tensor
            for index, tensor in enumerate(self._tensors)
        ]
        # One that is differentiated may read any.
        self._check(range(len(found)) if again else self._rule.needed(found, cotangents, ctx.call.numbers))
        return found

    def release(self, cotangents: Sequence[torch.Tensor | None], numbers: Sequence[Any]) -> bool:
        """Let go what a backward has read that is not to be repeated; whether no result is left to differentiate."""
        if not self.is_own:
            return False
        self._waiting -= {index for index, cotangent in enumerate(cotangents) if cotangent is not None}
        if not self._waiting:
            self._tensors = [None] * len(self._tensors)
            return True
        for index in self._rule.needed((), cotangents, numbers):  # it is known by now what is needed
            self._tensors[index] = None
        return False

    def _check(self, places: Iterable[int]) -> None:
        """Complain, in the words of torch, if what a backward reads has been let go or is not as it was."""
        tensors, versions, unread = self._tensors, self._versions, self._unread
        for index in places:
            tensor = tensors[index]
            if tensor is None:
                raise RuntimeError(_LET_GO)
            if tensor._version != versions[index] and index not in unread:
                raise _updated(tensor, versions[index])
        for tensor, version in self._watched:
            if tensor._version != version:
                raise _updated(tensor, version)

    def _check_unread(self) -> None:
        """Complain if the backward may be differentiated, and what only that reads has been updated."""
        for index, version in self._unread.items():
            tensor = self._tensors[index]
            if tensor is not None and version is not None and tensor._version != version:
                raise RuntimeError(
                    "an argument of a transformed function was modified by an inplace operation, and is needed for the"
                    " gradient of the gradient"
                )


_LET_GO = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have"
    " already been freed). Saved intermediate values of the graph are freed when you call .backward() or"
    " autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or"
    " if you need to access saved tensors after calling backward."
)


def _updated(tensor: torch.Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of"
        f" shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead."
    )
