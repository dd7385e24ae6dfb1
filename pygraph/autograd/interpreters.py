"""The transform of torch.func that is on top of the stack: how a call is made one level below it.

torch has this for any ``autograd.Function``, at about a millisecond a level: it makes a class for every call, and takes
arguments and results apart as pytrees. Here are tensors in rows only.
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


class Batching:
    """``torch.vmap``.

    Attributes:
        size: How many examples there are.
        randomness: What it makes of random numbers.
    """

    def __init__(self, interpreter: VmapInterpreter) -> None:
        self._level = interpreter.level()
        self.size = interpreter.batch_size()
        self.randomness = interpreter.randomness()
        self.lower = interpreter.lower

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int | None, ...]]:
        """The tensors with the batch as a dimension, and where it is in each."""
        pairs = [functorch._unwrap_batched(tensor, self._level) for tensor in tensors]
        return [plain for plain, _ in pairs], tuple(dim for _, dim in pairs)

    def join(self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> list[torch.Tensor]:
        """What is one example to those who are inside, of tensors with the batch at these dimensions."""
        pairs = zip(tensors, dims, strict=True)
        return [t if dim is None else functorch._add_batch_dim(t, dim, self._level) for t, dim in pairs]


class Differentiating:
    """``torch.func.grad`` and its kin, or ``torch.func.jvp`` and its kin."""

    def __init__(self, interpreter: GradInterpreter | JvpInterpreter) -> None:
        self._level = interpreter.level()
        self._interpreter = interpreter
        # Each kind leaves the other's setting to what surrounds the call, and its own to what surrounds the transform.
        self._backwards = isinstance(interpreter, GradInterpreter) or torch.is_grad_enabled()
        self._forwards = isinstance(interpreter, JvpInterpreter) or _is_fwd_grad_enabled()

    def lift(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All tensors as tensors of this level."""
        lift = self._interpreter._cptr.lift
        return [lift(tensor) for tensor in tensors]

    def unwrap(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the level below."""
        return [functorch._unwrap_for_grad(tensor, self._level) for tensor in tensors]

    def wrap(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of the level below, as those of this one."""
        return [functorch._wrap_for_grad(tensor, self._level) for tensor in tensors]

    @contextlib.contextmanager
    def lower(self) -> Generator[None, None, None]:
        """Be one level below, which an ``autograd.Function`` has just forbidden to differentiate."""
        with torch.set_grad_enabled(self._backwards), _set_fwd_grad_enabled(self._forwards), self._interpreter.lower():
            yield


Transform: TypeAlias = Batching | Differentiating


def current_transform() -> Transform | None:
    """The innermost transform."""
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
        """Apply it at the level of a transform, or of none."""
        if transform is not None:
            tensors = transform.lift(tensors)
        apply: Any = cls.apply  # pyright: ignore[reportAttributeAccessIssue]  # of torch._C._FunctionBase
        with enable_single_level_autograd_function():
            return list(apply(call, transform, *tensors))
