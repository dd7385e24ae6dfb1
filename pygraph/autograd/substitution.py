"""Running a function with other tensors in the place of those that it closes over.

Tensors are told apart by identity, in every call of torch's Python functions; what a function closes over is not
changed, so that other threads see nothing.
"""

# Arguments are of any type, and torch.func's wrappers have no public names.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch._functorch import eager_transforms, utils, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pygraph.tracing.dynamo import fill_tables


class Substitution(TorchFunctionMode):
    """Pass other tensors to torch than the code says.

    Args:
        given: The tensors to pass, by the id of the one in whose place.
    """

    def __init__(self, given: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._given = given

    def instead(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is passed in the place of a tensor."""
        return self._given.get(id(tensor), tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.instead, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Active(threading.local):
    modes: tuple[Substitution, ...] = ()


_active = _Active()
_lock = threading.Lock()
_users = 0

_functions: Any = torch.autograd.function
_utils: Any = utils
_grads: Any = eager_transforms
_vmaps: Any = vmap
_unwrap_dead_wrappers: Any = _utils.unwrap_dead_wrappers
_custom_function_call: Any = _functions.custom_function_call
_wrap_for_grad: Any = _grads._wrap_for_grad
_add_batch_dim: Any = _vmaps._add_batch_dim


@contextlib.contextmanager
def substituting(mode: Substitution) -> Generator[None, None, None]:
    """Have a substitution at work in this thread."""
    before = _active.modes
    _active.modes = (*before, mode)
    try:
        with _functions_seen(), mode:
            yield
    finally:
        _active.modes = before


@contextlib.contextmanager
def substituted(given: Mapping[int, torch.Tensor]) -> Generator[None, None, None]:
    """The same for tensors by id; nothing is done if there are none."""
    if not given:
        yield
        return
    with substituting(Substitution(given)):
        yield


@contextlib.contextmanager
def _functions_seen() -> Generator[None, None, None]:
    """Substitute also what no mode sees: arguments of custom Functions, and what torch.func's transforms wrap.

    They look at tensors before any operation does. ``Function.apply`` itself may have been taken before, as
    ``apply = Function.apply``; what is replaced is what it calls. Checked with torch 2.11 and 2.13.
    """
    global _users
    fill_tables()
    with _lock:
        _users += 1
        _utils.unwrap_dead_wrappers = _unwrap_substituted
        _functions.custom_function_call = _call_substituted
        _grads._wrap_for_grad = _wrap_substituted
        _vmaps._add_batch_dim = _batch_substituted
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _utils.unwrap_dead_wrappers = _unwrap_dead_wrappers
                _functions.custom_function_call = _custom_function_call
                _grads._wrap_for_grad = _wrap_for_grad
                _vmaps._add_batch_dim = _add_batch_dim


def _unwrap_substituted(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return _unwrap_dead_wrappers(pytree.tree_map_only(torch.Tensor, _instead, args))


def _call_substituted(function: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map_only(torch.Tensor, _instead, (args, kwargs))
    return _custom_function_call(function, *args, **kwargs)


def _wrap_substituted(tensor: torch.Tensor, level: int) -> torch.Tensor:
    return _wrap_for_grad(_instead(tensor), level)


def _batch_substituted(tensor: torch.Tensor, dim: int, level: int) -> torch.Tensor:
    return _add_batch_dim(_instead(tensor), dim, level)


def _instead(tensor: torch.Tensor) -> torch.Tensor:
    for mode in reversed(_active.modes):
        tensor = mode.instead(tensor)
    return tensor
