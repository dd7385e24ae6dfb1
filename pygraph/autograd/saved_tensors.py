"""The saved tensors of a call, which its derivatives read."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch

from pygraph.autograd.levels import is_dual_level, levels, saved_tensors_hooks
from pygraph.autograd.placeholders import Metadata, alias_with_history, placeholder
from pygraph.autograd.pullback import Chosen, Pullback, ReadTensors


class SavedTensors:
    """The tensors that a call's derivatives are computed from.

    Autograd frees all tensors that a call has saved as soon as one of its results has been differentiated. In eager,
    tensors that other results need stay alive, and tensors that nothing needs are not held. So they are held here where
    autograd itself differentiates a call, and no hooks on saved tensors are active. As in eager, the caller may update
    in place what the backward does not read. A derivative of the gradient needs that too.

    A call saves hundreds of tensors, so they are held in lists.

    Args:
        rule: The derivative rule of the call: its `Pullback`, or its function.
        tensors: The tensors that it was passed.
        results: The tensors that it returned, and the ones that its forward has saved.

    Attributes:
        is_own: Whether all are held here, and none by autograd.
        saved: The tensors that autograd is to save.
    """

    def __init__(self, rule: Any, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        row: list[torch.Tensor] = rule.save(tensors, results)
        self._rule = rule
        self.is_own = False
        self._unread: Set[int] = frozenset()
        self._not_yet_differentiated: set[int] = set()
        self._has_freed = False
        captured: Sequence[torch.Tensor] = ()
        watched: Sequence[torch.Tensor] = ()
        if isinstance(rule, Pullback) and not levels():
            read = rule.read_tensors(tensors)
            captured, watched, self._unread = read.captured, read.watched, read.unread
            hidden = is_dual_level() or saved_tensors_hooks() is not None
            without_history = (tensor for tensor, chosen in zip(tensors, rule.mask, strict=True) if not chosen)
            others = (*without_history, *row[len(tensors) :])
            self.is_own = not hidden and bool(rule.differentiated) and not any(map(torch.Tensor.is_inference, others))
            for index in self._unread:
                row[index] = alias_with_history(row[index])
        # By number, the version of each tensor that is held here, at which it must stay.
        self._versions: Sequence[int | None] | Mapping[int, int | None]
        if self.is_own:
            self._not_yet_differentiated = set(rule.differentiated)
            self._versions = list(map(_version, row))
            for index in range(rule.first_result, len(row)):  # a result refers to this; saved values have no history
                row[index] = row[index].detach()
            self._watched, self._watched_versions = watched, list(map(_version, watched))
            self._metadata: Sequence[Metadata] = rule.metadata(row)
            # The tensors that are held here; None for tensors that autograd holds, or that have been freed.
            self._tensors: list[torch.Tensor | None] = [*row]
            self.saved: list[torch.Tensor] = []
        else:
            unread = ((index, row[index]) for index in self._unread)
            self._versions = {index: None if tensor.is_inference() else tensor._version for index, tensor in unread}
            self._tensors = [tensor if index in self._unread else None for index, tensor in enumerate(row)]
            self.saved = [*(tensor for index, tensor in enumerate(row) if index not in self._unread), *captured]
        self._has_saved = bool(self.saved)

    @classmethod
    def resumed(
        cls,
        rule: Pullback,
        read: ReadTensors,
        row: Sequence[torch.Tensor | None] | None,
        versions: Sequence[int],
        differentiated: Sequence[int],
    ) -> SavedTensors:
        """Return the saved tensors of a call that has run natively.

        Args:
            rule: The derivative rule.
            read: The tensors that the backward reads, and those that it does not.
            row: The saved tensors, None for one that has been freed; None if all have been.
            versions: Their versions when they were saved, and then those of ``read.watched``.
            differentiated: The results that have been differentiated, if some have, with what they have freed.
        """
        saved = cls.__new__(cls)
        count = len(versions) - len(read.watched)
        saved._rule, saved.is_own, saved._unread = rule, True, read.unread
        saved._not_yet_differentiated = set() if row is None else {*rule.differentiated}.difference(differentiated)
        saved._has_freed = row is None or bool(differentiated)
        saved._versions = versions[:count]
        saved._watched, saved._watched_versions = read.watched, versions[count:]
        saved._tensors = [None] * count if row is None else [*row]
        saved._metadata = rule.metadata(())  # which is known, as Python has served a call
        saved._has_saved, saved.saved = False, []
        return saved

    def hand_over(self) -> None:
        """Drop the references to the tensors that autograd has saved now."""
        del self.saved

    def restore(self, ctx: Any, chosen: Chosen = frozenset()) -> list[torch.Tensor]:
        """Return all saved tensors.

        Args:
            ctx: The context in which autograd has saved its part.
            chosen: The backward that is to read them, if it is for one.

        Raises:
            RuntimeError: A tensor has been freed, or updated in place.
        """
        again = torch.is_grad_enabled()
        if again:
            self._check_unread()
        if not self.is_own:
            given = iter(ctx.saved_tensors if self._has_saved else ())
            return [next(given) if tensor is None else tensor for tensor in self._tensors]
        if not self._has_freed:
            found = cast("list[torch.Tensor]", self._tensors)
            if list(map(_version, found)) == self._versions:  # as nearly always: no tensor has been updated at all
                self._check_watched()
                return found
        else:
            found = [
                placeholder(*self._metadata[index]) if tensor is None else tensor
                for index, tensor in enumerate(self._tensors)
            ]
        # A backward that is differentiated may read any.
        needed = range(len(found)) if again else self._rule.needed(found, chosen, ctx.call.numbers)
        differentiated = {chosen} if isinstance(chosen, int) else chosen
        if needed and not differentiated <= self._not_yet_differentiated:  # results whose own tensors are freed
            raise RuntimeError(_FREED)
        self._check(needed)
        self._check_watched(None if again else chosen)
        return found

    def note_differentiated(self, index: int) -> None:
        """Note that a backward has gone on from a result to those that it depends on, and is not to be repeated."""
        self._not_yet_differentiated.discard(index)
        self._has_freed = True

    def release(self, cotangents: Sequence[torch.Tensor | None], numbers: Sequence[Any]) -> bool:
        """Free the tensors that a backward has read, which is not to be repeated.

        Returns:
            Whether all results have been differentiated now.
        """
        if not self.is_own:
            return False
        self._not_yet_differentiated -= {index for index, given in enumerate(cotangents) if given is not None}
        self._has_freed = True
        if not self._not_yet_differentiated:
            self._tensors = [None] * len(self._tensors)
            return True
        for index in self._rule.needed(
            (), self._rule.given(cotangents), numbers
        ):  # which is known by now, without the tensors
            if index >= self._rule.inner.arity:  # in eager, each operation that takes one of these saves it for itself
                self._tensors[index] = None
        return False

    def _check(self, needed: Iterable[int]) -> None:
        """Raise torch's error if a tensor that a backward reads has been freed or updated."""
        for index in needed:
            tensor, version = self._tensors[index], self._versions[index]
            if tensor is None:
                raise RuntimeError(_FREED)
            if tensor._version != version and index not in self._unread:
                raise _update_error(tensor, version)

    def _check_watched(self, chosen: Chosen | None = None) -> None:
        """Raise torch's error if a tensor that the backward reads where the function closes over it was updated.

        Args:
            chosen: A backward, if only the tensors matter that this one reads.
        """
        if list(map(_version, self._watched)) == self._watched_versions:
            return
        for tensor, version in zip(self._watched, self._watched_versions, strict=True):
            if tensor._version != version and (chosen is None or self._rule.reads_captured(chosen, tensor)):
                raise _update_error(tensor, version)

    def _check_unread(self) -> None:
        """Raise an error if a tensor was updated that only a derivative of the backward reads."""
        effects = self._rule.inner.effects if self._unread else None
        for index in self._unread - effects.arguments.keys() if effects is not None else self._unread:
            tensor, version = self._tensors[index], self._versions[index]
            if tensor is not None and version is not None and tensor._version != version:
                raise RuntimeError(
                    "an argument of a transformed function was modified by an inplace operation, and is needed for the"
                    " gradient of the gradient"
                )


_version = operator.attrgetter("_version")

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have"
    " already been freed). Saved intermediate values of the graph are freed when you call .backward() or"
    " autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or"
    " if you need to access saved tensors after calling backward."
)


def _update_error(tensor: torch.Tensor, version: int | None) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of"
        f" shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead."
    )
