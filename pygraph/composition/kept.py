"""What a call keeps for its derivatives."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pygraph.composition.joint import Pullback
from pygraph.composition.levels import is_dual_level, levels
from pygraph.composition.unread import Unread, without_memory


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
        self._unread: dict[int, Unread] = {}
        self._read: dict[int, _Read] = {}
        self._watched: list[_Read] = []
        self._waiting: set[int] = set()
        captured: list[torch.Tensor] = []
        if isinstance(rule, Pullback) and not levels():
            read, captured = rule.reads(tensors)
            updated = rule.inner.effects.arguments if rule.inner.effects is not None else ()
            others = (index for index in range(len(tensors)) if index not in read)
            self._unread = {index: Unread(tensors[index], watched=index not in updated) for index in others}
            if not is_dual_level() and not _are_hooked() and not any(tensor.is_inference() for tensor in kept):
                count = len(tensors)
                rows = ((index, tensor) for index, tensor in enumerate(kept) if index not in self._unread)
                self._read = {index: _Read(tensor, is_result=index >= count) for index, tensor in rows}
                found_inside = (tensors[index] for index in read if index not in rule.passed)
                self._watched = [_Read(tensor, is_result=False) for tensor in (*captured, *found_inside)]
                self._waiting = set(rule.differentiated)
        self._count = len(kept)
        self._is_own = bool(self._waiting)
        self.saved = [] if self._is_own else [*(t for i, t in enumerate(kept) if i not in self._unread), *captured]
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
        if not self._is_own:
            given = iter(ctx.saved_tensors if self._has_saved else ())
            return [self._unread[i].restore() if i in self._unread else next(given) for i in range(self._count)]
        found = [self._unread[i].restore() if i in self._unread else self._read[i].tensor for i in range(self._count)]
        for index in self._needed(found, cotangents, ctx.call.numbers):
            if index in self._read:
                self._read[index].check()
            elif not self._unread[index].is_there:
                raise RuntimeError(_GONE)
        for read in self._watched:
            read.check()
        return found

    def release(self, cotangents: Sequence[torch.Tensor | None], numbers: Sequence[Any]) -> bool:
        """Let go what a backward has read that is not to be repeated; whether no result is left to differentiate."""
        if not self._is_own:
            return False
        self._waiting -= {index for index, cotangent in enumerate(cotangents) if cotangent is not None}
        found = [self._unread[i].restore() if i in self._unread else self._read[i].tensor for i in range(self._count)]
        for index in self._rule.needed(found, cotangents, numbers):
            if index in self._read:
                self._read[index].release()
        if not self._waiting:
            for unread in self._unread.values():
                unread.release()
        return not self._waiting

    def _needed(
        self, found: list[torch.Tensor], cotangents: Sequence[torch.Tensor | None], numbers: Sequence[Any]
    ) -> Iterable[int]:
        """Which tensors a backward of these cotangents reads; one that is differentiated may read any."""
        return range(self._count) if torch.is_grad_enabled() else self._rule.needed(found, cotangents, numbers)


class _Read:
    """A tensor that a backward reads."""

    def __init__(self, tensor: torch.Tensor, *, is_result: bool) -> None:
        self.tensor = tensor.detach() if is_result else tensor  # which refers to this
        self._version = tensor._version
        self._is_there = True

    def check(self) -> None:
        """Complain if it is not as it was, in the words of torch."""
        if not self._is_there:
            raise RuntimeError(_GONE)
        if self.tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version}; expected version"
                f" {self._version} instead."
            )

    def release(self) -> None:
        """Let it go."""
        self._is_there = False
        self.tensor = without_memory(self.tensor)
        self._version = self.tensor._version


_GONE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been"
    " freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify"
    " retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors"
    " after calling backward."
)


def _are_hooked() -> bool:
    """Whether somebody sees what is saved. Private; checked with torch 2.11 and 2.13."""
    autograd: Any = torch._C._autograd  # pyright: ignore
    return autograd._top_saved_tensors_default_hooks(True) is not None
