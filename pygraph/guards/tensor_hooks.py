"""Guards on the hooks of tensors, which autograd calls with their gradients."""

# Where torch stores hooks is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_Hooks = dict[int, Any] | None
_Reader = Callable[[torch.Tensor], _Hooks]

_Tensor: Any = torch.Tensor
backward_hooks: _Reader = _Tensor._backward_hooks.__get__
"""The hooks of a tensor by `register_hook`."""

_accumulation_hooks: _Reader = _Tensor._post_accumulate_grad_hooks.__get__


def hooks_of(tensor: torch.Tensor) -> tuple[_Hooks, _Hooks]:
    """The hooks of a tensor, by `register_hook` and `register_post_accumulate_grad_hook`; None if it never had any."""
    with torch._C.DisableTorchFunctionSubclass():
        return backward_hooks(tensor), _accumulation_hooks(tensor)


class TensorHooks:
    """Tensors that must have the dicts of hooks that they had; what is in these is guarded as in any dict."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._before: tuple[list[_Hooks], list[_Hooks]] = [], []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Guard which dicts a tensor has."""
        self._names.append(name)
        self._tensors.append(tensor)
        for before, hooks in zip(self._before, hooks_of(tensor), strict=True):
            before.append(hooks)

    def hold(self) -> bool:
        """Whether all tensors have the same dicts, or none as before."""
        if not self._tensors:
            return True
        backward, accumulation = self._before
        with torch._C.DisableTorchFunctionSubclass():
            same = all(map(operator.is_, map(backward_hooks, self._tensors), backward))
            return same and all(map(operator.is_, map(_accumulation_hooks, self._tensors), accumulation))

    def changed(self) -> str | None:
        """The name of the first tensor with another dict, or None."""
        for name, tensor, *before in zip(self._names, self._tensors, *self._before, strict=True):
            if not all(map(operator.is_, hooks_of(tensor), before)):
                return f"the hooks of {name or 'a tensor'}"
        return None

    def release(self, released: set[int]) -> None:
        """Guard tensors of these ids no longer, nor hold them."""
        kept = [index for index, tensor in enumerate(self._tensors) if id(tensor) not in released]
        self._names, self._tensors = _chosen(self._names, kept), _chosen(self._tensors, kept)
        self._before = _chosen(self._before[0], kept), _chosen(self._before[1], kept)

    def description(self) -> tuple[Any, ...]:
        """All tensors with their dicts, as `native/guards.h` reads them."""
        return tuple(zip(self._tensors, *self._before, strict=True))


def _chosen(column: Sequence[T], indices: Sequence[int]) -> list[T]:
    return [column[index] for index in indices]
