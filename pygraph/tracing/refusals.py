"""Refusals: uses of tensors as Python objects that a trace cannot reproduce, as of their text, layout or requires_grad.

Operations on their elements are checked by `OperationsMode`.
"""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import _tensor as torch_tensor
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.guards.locations import is_updated, memory_of
from pygraph.guards.torch_settings import looks_at_gradients
from pygraph.ir.source_lines import PYGRAPH_FOLDER
from pygraph.tracing import interruptions
from pygraph.tracing.data_assignments import DataAssignments
from pygraph.tracing.gradient_hooks import ADD_HOOKS, FINDS_NODE, GradientHooks
from pygraph.tracing.gradients import goes_beyond
from pygraph.tracing.live_arrays import array_of
from pygraph.tracing.live_numbers import computed_number
from pygraph.tracing.toggles import Toggles
from pygraph.tracing.user_frames import is_user_frame

# Private; checked with torch 2.11 and 2.13.
_Tensor: Any = torch.Tensor
_is_of_functorch: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore

_DATA = _Tensor.data.__get__
_TEXT = (_Tensor.__repr__, _Tensor.__format__)
_NUMBERS = (_Tensor.item, _Tensor.tolist)
_SIZES = (_Tensor.shape.__get__, _Tensor.size, _Tensor.stride, _Tensor.numel, _Tensor.nelement, torch.numel)
_CHANGE_GRAD = (_Tensor.requires_grad_, _Tensor.requires_grad.__set__, _Tensor.detach_, torch.detach_)
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, _Tensor.backward)
_LAYOUT = {
    _Tensor.storage_offset: "storage_offset()",
    _Tensor._base.__get__: "_base",
    _Tensor._is_view: "_is_view()",
}

# Files of the frames between the code that asks for a tensor's text and the mode.
_BETWEEN = tuple(os.path.abspath(one.__file__ or "") for one in (torch.overrides, torch_tensor, torch.nn.parameter))


class Refusals(TorchFunctionMode):
    """Refuses calls of torch that would silently be lost, or give answers about a fake tensor.

    Args:
        arguments: The function's arguments, as the fakes that it is given.
        toggles: Changes whether tensors that it closes over require grad.
        data: Has these tensors stand for what is assigned to their ``.data``.
        hooks: Tells whether autograd would call hooks that the trace knows nothing of.
        used: The closed-over tensors that operations have taken so far.

    Attributes:
        problem: The first refusal, also if the function catches the error; None if there was none.
        raised: Errors of what the function has called, of which it may have caught some.
    """

    def __init__(
        self,
        arguments: Iterable[torch.Tensor],
        toggles: Toggles,
        data: DataAssignments,
        hooks: GradientHooks,
        used: Mapping[int, torch.Tensor],
    ) -> None:
        super().__init__()
        self._used = used
        self._toggles, self._data, self._hooks = toggles, data, hooks
        self._arguments = {id(argument): argument for argument in arguments}
        self._storages = {argument.untyped_storage()._cdata for argument in self._arguments.values()}
        self.problem: str | None = None
        self.raised: list[BaseException] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # which compiles branches, and this with them
            interruptions.check(sys._getframe(1))  # no mode sees sooner what the user's code calls
        kwargs = kwargs or {}
        if func == _Tensor.data.__set__:
            # On a fake it would be lost; on a real tensor, it would leave a fake's memory there.
            if not self._data.assign(*args):
                self._refuse("it assigns .data of a tensor that it has made or is passed, or of another layout")
            return None
        if func is is_updated:
            return self._data.is_updated(args[0])
        if func in (_DATA, memory_of):
            return self._data.read(args[0], lambda: func(*args))
        if func in _CHANGE_GRAD:
            self._check_requires_grad(func, args, kwargs)
        elif func in ADD_HOOKS or func is FINDS_NODE[0]:
            self._check_hooked(func, args[0])
        elif func in _TEXT or func in _LAYOUT:
            self._check_question(func, args[0])
        elif func is _Tensor.numpy and type(args[0]) is FakeTensor and not kwargs:
            array = array_of(args[0], self._note)
            if array is not None:
                return array
        elif func in _DIFFERENTIATE:
            self._check_hooks()
            self._check_graphs(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            self.raised.append(error)
            raise
        if func in _NUMBERS:
            live = functools.partial(computed_number, is_of_host=args[0].is_cpu)
            out = pytree.tree_map_only(torch.SymBool, bool, out)  # which is asked for: nothing else passes for True
            return pytree.tree_map_only((torch.SymInt, torch.SymFloat), live, out)
        return _with_live_sizes(out) if func in _SIZES else out

    def _refuse(self, problem: str) -> None:
        self._note(problem)
        raise TraceError(problem)

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _check_hooks(self) -> None:
        """Refuse to differentiate where autograd would show gradients to code that is not part of the trace."""
        problem = self._hooks.problem()
        if looks_at_gradients():
            problem = "anomaly detection is on, which looks at the values of all gradients"
        if problem is not None:
            self._refuse(problem)

    def _check_hooked(self, func: Any, tensor: Any) -> None:
        """Refuse a hook on a tensor of the caller's: it would stay there, or be called by the trace alone."""
        inside = isinstance(tensor, FakeTensor) or _is_of_functorch(tensor)
        if inside and id(tensor) not in self._arguments:
            return
        code = _asking_frame().f_code
        if code is FINDS_NODE[1] if func is FINDS_NODE[0] else not code.co_filename.startswith(PYGRAPH_FOLDER):
            self._refuse("it registers a hook on the gradient of a tensor that was there before the call")

    def _check_graphs(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse to differentiate through a graph from before the call, which a trace would use up."""
        outputs = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
        inputs = args[1] if func is torch.autograd.grad and len(args) > 1 else kwargs.get("inputs")
        roots = [one for one in pytree.tree_leaves(outputs) if isinstance(one, torch.Tensor)]
        ends = None if inputs is None else pytree.tree_leaves(inputs)
        others = (one for one in (*self._used.values(), *roots) if not isinstance(one, FakeTensor))
        if goes_beyond(roots, ends, (one for one in others if not _is_of_functorch(one))):
            self._refuse("it differentiates through a graph of autograd that was there before the call")

    def _check_requires_grad(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse a change that cannot be put back; tensors of the function itself may start to require grad."""
        tensor = args[0]
        inside = isinstance(tensor, FakeTensor) or _is_of_functorch(tensor)
        if id(tensor) not in self._arguments and inside:
            return
        detaches = func in (_Tensor.detach_, torch.detach_)
        wanted = False if detaches else (*args[1:], *kwargs.values(), True)[0]
        if tensor.requires_grad == bool(wanted) or (not detaches and not inside and self._toggles.toggle(tensor)):
            return
        self._refuse("it changes whether a tensor of the caller requires grad; detach() or clone() it first")

    def _check_question(self, func: Any, tensor: torch.Tensor) -> None:
        """Refuse questions for values, and about the caller's memory, in which a fake tensor is not."""
        if func in _TEXT and _asked_by_user():
            self._refuse("it asks for the text of a tensor, whose values are on the device")
        if func in _TEXT or not isinstance(tensor, FakeTensor) or not _asked_by_user():
            return
        if torch.Tensor.untyped_storage(tensor)._cdata in self._storages:
            self._refuse(f"it asks for {_LAYOUT[func]} of an argument, which is not the same at every call")


def _with_live_sizes(sizes: Any) -> Any:
    """Sizes, or one of them, that the function takes for plain ints where torch has symbols."""
    if isinstance(sizes, tuple):
        is_known = all(type(size) is int for size in sizes)  # pyright: ignore[reportUnknownVariableType]
        return sizes if is_known else type(sizes)(map(_with_live_sizes, sizes))  # pyright: ignore
    return computed_number(sizes, is_of_host=False) if isinstance(sizes, torch.SymInt) else sizes


def _asked_by_user() -> bool:
    """Whether user code calls torch here."""
    return is_user_frame(_asking_frame())


def _asking_frame() -> Any:
    """The frame of the code that calls torch here."""
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or _is_between(frame.f_code)):
        frame = frame.f_back
    return frame


def _is_between(code: types.CodeType) -> bool:
    """Whether code is what passes an operation on, as other modes of ours do."""
    of_mode = code.co_name == "__torch_function__" and code.co_filename.startswith(PYGRAPH_FOLDER)
    return of_mode or code.co_filename in _BETWEEN
