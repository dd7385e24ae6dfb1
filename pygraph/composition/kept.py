"""What a call keeps for its derivatives."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.composition.joint import Pullback
from pygraph.composition.levels import is_dual_level, levels, saved_tensors_hooks
from pygraph.composition.unread import Held, Unread


class Kept:
    """The tensors that a call's derivatives are computed from.

    Autograd lets all go that a call has saved as soon as one of its results has been differentiated. In eager, what
    the others need stays, and what nothing needs is not held: so it is kept here, where autograd itself differentiates
    a call, and nobody has asked to see what it saves. As in eager, the caller may update in place what the backward
    does not read. A derivative of the gradient needs that too.

    Args:
        rule: How the call is differentiated.
        tensors: What it was passed.
        results: What it returned.

    Attributes:
        saved: What autograd keeps.
    """

    def __init__(self, rule: Any, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        kept: list[torch.Tensor] = rule.kept(tensors, results)
        self._rule = rule
        # Where None is, autograd keeps it.
        self._slots: list[_Read | Unread | None] = [None] * len(kept)
        self._watched: list[_Read] = []
        self._waiting: set[int] = set()
        read: set[int] = set()
        captured: list[torch.Tensor] = []
        if isinstance(rule, Pullback) and not levels():
            read, captured = rule.reads(tensors)
            updated = rule.inner.effects.arguments if rule.inner.effects is not None else ()
            for index, tensor in enumerate(tensors):
                if index not in read:
                    self._slots[index] = Unread(tensor, watched=index not in updated)
            if not is_dual_level() and saved_tensors_hooks() is None and not any(map(torch.Tensor.is_inference, kept)):
                self._waiting = set(rule.differentiated)
        self._is_own = bool(self._waiting)
        if self._is_own:
            for index, tensor in enumerate(kept):
                if self._slots[index] is None:
                    # A result refers to this; what was saved has no history.
                    self._slots[index] = _Read(tensor.detach() if index >= rule.first_result else tensor)
            found_inside = (tensors[index] for index in read if index not in rule.passed)
            self._watched = [_Read(tensor) for tensor in (*captured, *found_inside)]
            self.saved: list[torch.Tensor] = []
        else:
            self.saved = [*(t for t, slot in zip(kept, self._slots, strict=True) if slot is None), *captured]
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
        given = iter(ctx.saved_tensors if self._has_saved else ())
        found = [next(given) if slot is None else slot.restore() for slot in self._slots]
        if self._is_own:
            # One that is differentiated may read any.
            again = torch.is_grad_enabled()
            places = range(len(found)) if again else self._rule.needed(found, cotangents, ctx.call.numbers)
            for slot in (*(self._slots[index] for index in places), *self._watched):
                if slot is not None:
                    slot.check()
        return found

    def release(self, cotangents: Sequence[torch.Tensor | None], numbers: Sequence[Any]) -> bool:
        """Let go what a backward has read that is not to be repeated; whether no result is left to differentiate."""
        if not self._is_own:
            return False
        self._waiting -= {index for index, cotangent in enumerate(cotangents) if cotangent is not None}
        places = self._rule.needed((), cotangents, numbers) if self._waiting else range(len(self._slots))
        for index in places:  # it is known by now what is needed
            slot = self._slots[index]
            if slot is not None:
                slot.release()
        return not self._waiting


class _Read(Held):
    """A tensor that a backward reads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor, tensor._version)

    def check(self) -> torch.Tensor:
        """The tensor; complain if it is not as it was, in the words of torch."""
        tensor = super().check()
        if tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(tensor.shape)} is at version {tensor._version}; expected version"
                f" {self._version} instead."
            )
        return tensor
