"""Donated tensors: when a call has consumed a tensor, every later use of it raises an error that names the call."""

# Who else holds a tensor's memory is known to torch._C only. Checked with torch 2.13; 2.11 has the same functions.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.errors import DonatedError, describe
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.paths import flatten_with_path


@dataclasses.dataclass(frozen=True)
class Consumed:
    """Which call consumed a tensor.

    Attributes:
        function: The function's name.
        argument: The argument that the tensor was, or was part of, as ``args[0]``.
        part: The tensor's position among the leaves of that argument.
        tree: The structure of that argument; None for a tensor on its own.
        source: The line that called.
        spec: The tensor's shape, dtype and device.
    """

    function: str
    argument: str
    part: int
    tree: pytree.TreeSpec | None
    source: str
    spec: TensorSpec

    @property
    def path(self) -> str:
        """The argument by path, as ``args[0]['w']``."""
        if self.tree is None:
            return self.argument
        # Of tensors, as classes may look at what they are made of.
        made = pytree.tree_unflatten([torch.empty(0, device="cpu") for _ in range(self.tree.num_leaves)], self.tree)
        parts, _ = flatten_with_path(made)
        return self.argument + pytree.keystr(parts[self.part][0])


class DonatedTensor(torch.Tensor):
    """A consumed tensor: torch operations, methods and attributes raise DonatedError; it can be printed and compared
    by identity.
    """

    _consumed: Consumed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse every operation on a consumed tensor."""
        leaves = pytree.tree_leaves((args, kwargs or {}))
        raise donated_error(next(leaf for leaf in leaves if isinstance(leaf, DonatedTensor)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        note = self._consumed
        return f"<donated {note.spec}: {note.path} of {note.function}, at {note.source}>"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)


def donated_error(tensor: DonatedTensor) -> DonatedError:
    """The error for using a consumed tensor."""
    note = tensor._consumed
    return DonatedError(
        describe(
            f"{note.function}(…)", f"the tensor was donated to it as {note.path} ({note.spec}), and is used again",
            source=note.source, remedy="Use the call's result instead, or donate a clone.",
        )
    )  # fmt: skip


def consume(tensor: torch.Tensor, note: Consumed) -> None:
    """Make every later use of ``tensor`` raise, and free its memory where nobody else can reach it."""
    if tensor.is_cuda:
        # It may have been allocated on another stream, which must wait for the call before it uses the memory again.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    # Host memory may be a NumPy array's too, which holds the Python object only, so it goes with the last reference.
    if tensor.device.type not in ("cpu", "meta") and _references(tensor) == _SOLE[0]:
        tensor.data = _nothing(tensor.dtype, tensor.device)
    tensor._consumed = note  # pyright: ignore[reportAttributeAccessIssue]
    tensor.__class__ = DonatedTensor


def is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, autograd graph or storage object can reach the memory of ``tensor``."""
    return _owners(tensor) == _SOLE


def _references(tensor: torch.Tensor) -> int:
    """How many Python objects, autograd nodes and others hold a reference to the tensor itself."""
    return tensor._use_count()  # pyright: ignore


def _owners(tensor: torch.Tensor) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()
    return _references(tensor), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # pyright: ignore


_SOLE = _owners(torch.empty(1, device="cpu"))


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)
