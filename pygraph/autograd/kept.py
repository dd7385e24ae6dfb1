"""What a call keeps for its derivatives."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch

from pygraph.autograd.joint import Pullback
from pygraph.autograd.levels import is_dual_level, levels, saved_tensors_hooks
from pygraph.autograd.unread import Kind, stand_in, without_memory


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
        self.is_own = False
        self._unread: Set[int] = frozenset()
        self._waiting: set[int] = set()
        self._has_let_go = False
        captured: Sequence[torch.Tensor] = ()
        watched: Sequence[torch.Tensor] = ()
        if isinstance(rule, Pullback) and not levels():
            reading = rule.reads(tensors)
            captured, watched, self._unread = reading.captured, reading.watched, reading.unread
            hidden = is_dual_level() or saved_tensors_hooks() is not None
            without_history = (tensor for tensor, chosen in zip(tensors, rule.mask, strict=True) if not chosen)
            others = (*without_history, *kept[len(tensors) :])
            self.is_own = not hidden and bool(rule.differentiated) and not any(map(torch.Tensor.is_inference, others))
            for index in self._unread:
                kept[index] = stand_in(kept[index])
        # Of what is kept here: by number, the version that it is to stay at.
        self._versions: Sequence[int | None] | Mapping[int, int | None]
        if self.is_own:
            self._waiting = set(rule.differentiated)
            self._versions = list(map(_version, kept))
            for index in range(rule.first_result, len(kept)):  # a result refers to this; what was saved has no history
                kept[index] = kept[index].detach()
            self._watched, self._watched_versions = watched, list(map(_version, watched))
            self._kinds: Sequence[Kind] = rule.kinds(kept)
            # What is kept here; None for what autograd keeps, or has been let go.
            self._tensors: list[torch.Tensor | None] = [*kept]
            self.saved: list[torch.Tensor] = []
        else:
            unread = ((index, kept[index]) for index in self._unread)
            self._versions = {index: None if tensor.is_inference() else tensor._version for index, tensor in unread}
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
        if not self._has_let_go:
            found = cast("list[torch.Tensor]", self._tensors)
            if list(map(_version, found)) == self._versions:  # as nearly always: nothing has been updated at all
                self._check_watched()
                return found
        else:
            found = [
                without_memory(*self._kinds[index]) if tensor is None else tensor
                for index, tensor in enumerate(self._tensors)
            ]
        # One that is differentiated may read any.
        self._check(range(len(found)) if again else self._rule.needed(found, cotangents, ctx.call.numbers))
        self._check_watched()
        return found

    def release(self, cotangents: Sequence[torch.Tensor | None], numbers: Sequence[Any]) -> bool:
        """Let go what a backward has read that is not to be repeated; whether no result is left to differentiate."""
        if not self.is_own:
            return False
        self._waiting -= {index for index, cotangent in enumerate(cotangents) if cotangent is not None}
        self._has_let_go = True
        if not self._waiting:
            self._tensors = [None] * len(self._tensors)
            return True
        for index in self._rule.needed((), cotangents, numbers):  # it is known by now what is needed
            self._tensors[index] = None
        return False

    def _check(self, places: Iterable[int]) -> None:
        """Complain, in the words of torch, if what a backward reads has been let go or is not as it was."""
        for index in places:
            tensor, version = self._tensors[index], self._versions[index]
            if tensor is None:
                raise RuntimeError(_LET_GO)
            if tensor._version != version and index not in self._unread:
                raise _updated(tensor, version)

    def _check_watched(self) -> None:
        """Complain if what the backward finds where the function closes over it is not as it was."""
        if (now := list(map(_version, self._watched))) != self._watched_versions:
            changed = next(index for index, version in enumerate(now) if version != self._watched_versions[index])
            raise _updated(self._watched[changed], self._watched_versions[changed])

    def _check_unread(self) -> None:
        """Complain if the backward may be differentiated, and what only that reads has been updated."""
        effects = self._rule.inner.effects if self._unread else None
        for index in self._unread - effects.arguments.keys() if effects is not None else self._unread:
            tensor, version = self._tensors[index], self._versions[index]
            if tensor is not None and version is not None and tensor._version != version:
                raise RuntimeError(
                    "an argument of a transformed function was modified by an inplace operation, and is needed for the"
                    " gradient of the gradient"
                )


_version = operator.attrgetter("_version")

_LET_GO = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have"
    " already been freed). Saved intermediate values of the graph are freed when you call .backward() or"
    " autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or"
    " if you need to access saved tensors after calling backward."
)


def _updated(tensor: torch.Tensor, version: int | None) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of"
        f" shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead."
    )
