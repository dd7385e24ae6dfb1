"""Substitution: running a function with other tensors instead of the ones that it closes over.

Tensors are identified by ``id``, in every call of torch's Python functions; what a function closes over is not
changed, so that other threads are not affected.
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

from pygraph.guards.locations import memory_of
from pygraph.tracing.dynamo import fill_tables


class Substitution(TorchFunctionMode):
    """A mode that passes other tensors to torch's functions than their caller does.

    A tensor to whose ``.data`` the function assigns is passed itself from then on, as the trace has a value for it.

    Args:
        given: The tensors to pass, by the id of the tensor that they replace.
    """

    def __init__(self, given: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._given = given
        self._assigned: set[int] = set()

    def replacement(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that is passed instead of one."""
        return tensor if id(tensor) in self._assigned else self._given.get(id(tensor), tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a branch, of which closed-over tensors become operands
            return func(*args, **(kwargs or {}))
        if func == _SET_DATA:
            self._assigned.add(id(args[0]))
        if func is memory_of:
            return func(*args)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.replacement, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Active(threading.local):
    modes: tuple[Substitution, ...] = ()


_active = _Active()
_lock = threading.Lock()
_users = 0

_SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__  # checked with torch 2.11 and 2.13
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
    """Enable a substitution in this thread."""
    before = _active.modes
    _active.modes = (*before, mode)
    try:
        with _functions_patched(), mode:
            yield
    finally:
        _active.modes = before


@contextlib.contextmanager
def substituted(given: Mapping[int, torch.Tensor]) -> Generator[None, None, None]:
    """Substitute tensors by the id of the tensor that they replace, if there are any."""
    if not given:
        yield
        return
    with substituting(Substitution(given)):
        yield


@contextlib.contextmanager
def _functions_patched() -> Generator[None, None, None]:
    """Substitute also arguments of custom Functions and of torch.func's transforms, which no mode intercepts.

    ``Function.apply`` itself may have been read before, as ``apply = Function.apply``; so the functions that it calls
    are patched. Checked with torch 2.11 and 2.13.
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
    return _unwrap_dead_wrappers(pytree.tree_map_only(torch.Tensor, _replacement, args))


def _call_substituted(function: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map_only(torch.Tensor, _replacement, (args, kwargs))
    return _custom_function_call(function, *args, **kwargs)


def _wrap_substituted(tensor: torch.Tensor, level: int) -> torch.Tensor:
    return _wrap_for_grad(_replacement(tensor), level)


def _batch_substituted(tensor: torch.Tensor, dim: int, level: int) -> torch.Tensor:
    return _add_batch_dim(_replacement(tensor), dim, level)


def _replacement(tensor: torch.Tensor) -> torch.Tensor:
    for mode in reversed(_active.modes):
        tensor = mode.replacement(tensor)
    return tensor
