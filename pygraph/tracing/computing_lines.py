"""The lines of a function that compute tensors, found by tracing it once."""

# Functions take and return values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._tensor as torch_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # checked with torch 2.11 and 2.13
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.ir.source_lines import TORCH_FOLDER, is_in_library
from pygraph.tracing.decorated import DECORATED
from pygraph.tracing.error_frames import entries_of
from pygraph.tracing.gradients import is_spent
from pygraph.tracing.trace import trace_call

# Functions of torch that compute no tensor: what they read, eager reads as fast.
_WAIT = frozenset({
    "item", "tolist", "cpu", "numpy", "__repr__", "__str__", "__format__", "__float__", "__int__", "__index__",
    "__bool__",
})  # fmt: skip
_READ = _WAIT | {
    "__get__",
    "__len__",
    "__hash__",
    "detach",
    "size",
    "stride",
    "dim",
    "numel",
    "data_ptr",
    "is_floating_point",
    "get_device",
    "register_hook",
    "storage_offset",
}


class ComputingLines(TorchFunctionMode):
    """Notes the lines of one function from which functions of torch are called that compute tensors.

    Args:
        fn: The function as it is called, a method perhaps.
        code: The code in which lines are noted.

    Attributes:
        lines: The lines.
        kernels: The lines among them, but for those that only set attributes, as gradients.
        waiting: The lines that read a value from the device.
        open: The lines among them at which the function has a variable with a graph of autograd that is still good.
        failed: The line at which its trace has failed, if no such variable is there; that of the first `backward()`
            where this reaches arguments; None if there is none.
        failed_in: The code of what that line calls, where it has failed; None if it has failed at the line itself.
        asks_in_torch: Whether it has failed in a function of torch's that decides by a value on the device.
        ended: Whether the function has come to its end.
        recurs: Whether it calls itself.
    """

    def __init__(self, fn: Callable[..., Any], code: types.CodeType) -> None:
        super().__init__()
        self.lines: set[int] = set()
        self.kernels: set[int] = set()
        self.waiting: set[int] = set()
        self.open: set[int] = set()
        self.failed: int | None = None
        self.failed_in: types.CodeType | None = None
        self.ended = self.recurs = self.asks_in_torch = False
        self._backward: int | None = None
        self._code = code
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and note lines."""
        with self:
            try:
                result = self.__wrapped__(*args, **kwargs)
            except Exception as error:
                self._note_failure(error)
                raise
        self.ended = True
        if self._sets_gradients((args, kwargs)):
            self.failed = self._backward
        return result

    def _sets_gradients(self, arguments: Any) -> bool:
        """Whether gradients have gone back to arguments: to a graph of autograd that others have begun."""
        with torch._C.DisableTorchFunction():
            tensors = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
            return any(tensor.is_leaf and tensor.grad is not None for tensor in tensors)

    def _note_failure(self, error: Exception) -> None:
        entries = itertools.dropwhile(
            lambda one: one.tb_frame.f_code is not self._code, entries_of(error.__traceback__)
        )
        entry = next(entries, None)
        if entry is not None and not any(map(_has_graph, list(entry.tb_frame.f_locals.values()))):
            self.failed = entry.tb_lineno
            inner = next(entries, None)
            self.asks_in_torch = (
                isinstance(error, GuardOnDataDependentSymNode) and inner is not None and _is_a_step(inner)
            )
            self.failed_in = None if inner is None or _is_torchs(inner.tb_frame.f_code) else inner.tb_frame.f_code

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if (name in _WAIT and not _is_on_host(args)) or name not in _READ:
            frames = [frame for frame in _frames(sys._getframe(1)) if frame.f_code is self._code]
            self.recurs = self.recurs or len(frames) > 1
            if frames:
                self._note(frames[0], name)
        return func(*args, **(kwargs or {}))

    def _note(self, frame: Any, name: str) -> None:
        line = frame.f_lineno
        if name in _WAIT:
            self.waiting.add(line)
            return
        if name == "backward" and self._backward is None:
            self._backward = line
        if name != "__set__":
            self.kernels.add(line)
        if line not in self.lines:
            self.lines.add(line)
            if any(map(_has_graph, list(frame.f_locals.values()))):
                self.open.add(line)


def _is_on_host(args: Any) -> bool:
    """Whether a function of torch is called on a tensor of the host, as optimizers read their steps from one."""
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu"


def _frames(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_torchs(code: types.CodeType) -> bool:
    """Whether code is no user's, and not what torch has put around a user's by a context that decorates it."""
    return is_in_library(code.co_filename) and code is not DECORATED


def _is_a_step(entry: types.TracebackType) -> bool:
    """Whether an entry is of a function of torch's, as an optimizer, and not of what tensors answer to Python."""
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(TORCH_FOLDER) and file != torch_tensor.__file__


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None and not is_spent(value)


def computing_lines(
    fn: Callable[..., Any], code: types.CodeType, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> ComputingLines | None:
    """The lines of a function that compute tensors in this call; None if that cannot be told.

    Args:
        fn: The function as it is called.
        code: Its code.
        args: Its arguments.
        kwargs: Its keyword arguments.
        name: What errors call the function.
    """
    found = ComputingLines(fn, code)
    with contextlib.suppress(TraceError):  # that it changes state is why one asks
        trace_call(found, args, kwargs, name=name)
    return found if (found.ended or found.failed is not None) and not found.recurs else None
