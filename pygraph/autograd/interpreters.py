"""Interpreters of torch.func's innermost transform, by which a call is made one level below it.

torch does so for any ``autograd.Function``, at about a millisecond a level: it makes a class for every call, and
flattens arguments and results as pytrees. Here are flat lists of tensors only.
"""

# They have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import torch
from torch._C import _functorch as functorch  # pyright: ignore
from torch._C import _is_fwd_grad_enabled
from torch._functorch.pyfunctorch import GradInterpreter, JvpInterpreter, VmapInterpreter, coerce_cinterpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from pygraph.runtime.devices import hold_accumulators


class Batching:
    """A level of ``torch.vmap``.

    Attributes:
        size: The batch size.
        randomness: The transform's ``randomness``.
    """

    def __init__(self, interpreter: VmapInterpreter) -> None:
        self._level = interpreter.level()
        self.size = interpreter.batch_size()
        self.randomness = interpreter.randomness()
        self.lower = interpreter.lower

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int | None, ...]]:
        """Return the tensors with the batch as a dimension, and the batch dimension of each."""
        pairs = [functorch._unwrap_batched(tensor, self._level) for tensor in tensors]
        return [plain for plain, _ in pairs], tuple(dim for _, dim in pairs)

    def join(self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> list[torch.Tensor]:
        """Return batched tensors of this level, of tensors with these batch dimensions."""
        pairs = zip(tensors, dims, strict=True)
        return [t if dim is None else functorch._add_batch_dim(t, dim, self._level) for t, dim in pairs]


class Differentiating:
    """A level of ``torch.func.grad``, ``vjp`` or ``jacrev``, or of ``torch.func.jvp`` or ``jacfwd``."""

    def __init__(self, interpreter: GradInterpreter | JvpInterpreter) -> None:
        self._level = interpreter.level()
        self._interpreter = interpreter
        # Each kind leaves the other's setting to what surrounds the call, and its own to what surrounds the transform.
        self._backwards = isinstance(interpreter, GradInterpreter) or torch.is_grad_enabled()
        self._forwards = isinstance(interpreter, JvpInterpreter) or _is_fwd_grad_enabled()

    def lift(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all tensors as tensors of this level."""
        lift = self._interpreter._cptr.lift
        return [lift(tensor) for tensor in tensors]

    def unwrap(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the level below."""
        return [functorch._unwrap_for_grad(tensor, self._level) for tensor in tensors]

    def wrap(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of this level, of tensors of the level below."""
        return [functorch._wrap_for_grad(tensor, self._level) for tensor in tensors]

    @contextlib.contextmanager
    def lower(self) -> Generator[None, None, None]:
        """Enter the level below, with the grad modes that an ``autograd.Function`` has turned off turned on again."""
        with torch.set_grad_enabled(self._backwards), _set_fwd_grad_enabled(self._forwards), self._interpreter.lower():
            yield


Transform: TypeAlias = Batching | Differentiating


def current_transform() -> Transform | None:
    """Return the innermost transform; None if no transform is active."""
    pointer: Any = functorch.peek_interpreter_stack()
    if pointer is None:
        return None
    interpreter = coerce_cinterpreter(pointer)
    if isinstance(interpreter, VmapInterpreter):
        return Batching(interpreter)
    assert isinstance(interpreter, GradInterpreter | JvpInterpreter)
    return Differentiating(interpreter)


class LevelFunction(torch.autograd.function._SingleLevelFunction):
    """An ``autograd.Function`` of one level only, which its ``forward`` leaves by itself."""

    @classmethod
    def at(cls, transform: Differentiating | None, call: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Apply the function at the level of a transform, or below all levels."""
        held = hold_accumulators(tensors) if transform is None else None
        if transform is not None:
            tensors = transform.lift(tensors)
        apply: Any = cls.apply  # pyright: ignore[reportAttributeAccessIssue]  # of torch._C._FunctionBase
        with enable_single_level_autograd_function():
            results = list(apply(call, transform, *tensors))
        del held
        return results
