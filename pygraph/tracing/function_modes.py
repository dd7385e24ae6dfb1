"""Calls of torch's Python functions in a traced function: noted, or replaced by what a trace can record."""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

import pygraph.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers pygraph::scalar
from pygraph.errors import TraceError
from pygraph.ir.device_arguments import or_default
from pygraph.ir.random_integers import random_integers
from pygraph.tracing.batch_norms import BATCH_NORMS, batch_norm_of
from pygraph.tracing.ctc_losses import CTC_LOSSES, ctc_loss_of
from pygraph.tracing.indexing import selected, selected_by_live
from pygraph.tracing.live_arrays import tensor_of, with_tensor_indices
from pygraph.tracing.live_lists import ListTensors
from pygraph.tracing.live_numbers import Live


class MetaDeviceUses(TorchFunctionMode):
    """Notes whether Python code uses the device ``meta``: operations that torch does there by itself look alike.

    Attributes:
        asked: Whether a call under way names the device, or a tensor there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.asked = any(map(_is_meta, args)) or any(map(_is_meta, kwargs.values()))
        try:
            return func(*args, **kwargs)
        finally:
            self.asked = False


def _is_meta(value: Any) -> bool:
    """Whether a value is the device ``meta``, or a tensor there."""
    if type(value) is FakeTensor:
        return value.fake_device.type == "meta"  # `is_meta` would ask by an operation
    if isinstance(value, torch.Tensor):
        return value.is_meta
    return (isinstance(value, torch.device) and value.type == "meta") or (isinstance(value, str) and value == "meta")


# Private; checked with torch 2.13.
_torch: Any = torch
_TAKE_LEARNING_RATE = (_torch._fused_adam_, _torch._fused_adamw_, _torch._fused_sgd_)


class LiveNumbersMode(TorchFunctionMode):
    """Records ``torch.tensor(k)`` of a live number, or array, as an operation; torch itself would read its value.

    A fused optimizer gets a live learning rate as a tensor, as its kernel would take a number by value. An index whose
    value only a run knows is recorded as a selection, as torch would ask for the value.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lists = ListTensors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.scalar_tensor) and args:
            data = args[0]
            if isinstance(data, (torch.SymInt, torch.SymFloat)) and not kwargs.get("requires_grad"):
                dtype = kwargs.get("dtype") or _dtype_of(func, data)
                return torch.ops.pygraph.scalar(data, dtype=dtype, device=or_default(kwargs.get("device")))
        for make in (tensor_of, self._lists.made):
            made = make(func, args, kwargs)
            if made is not None:
                return made
        if func in _TAKE_LEARNING_RATE and isinstance(kwargs["lr"], torch.SymFloat):
            rate = torch.ops.pygraph.scalar(kwargs["lr"], dtype=torch.float32, device=args[0][0].device)
            kwargs = {**kwargs, "lr": rate}
        if func is torch.randint and (drawn := random_integers(args, kwargs)) is not None:
            return drawn
        if func in CTC_LOSSES and (loss := ctc_loss_of(args, kwargs)) is not None:
            return loss
        if func in BATCH_NORMS and (normalized := batch_norm_of(func, args, kwargs)) is not None:
            return normalized
        if func in _SCATTERED:  # which do not ask, as views do, and count from the end in another trace
            for position in (*args, *kwargs.values()):
                if isinstance(position, torch.SymInt):
                    bool(position < 0)
        if func in _INDEXED:
            args = (args[0], with_tensor_indices(args[1], args[0].device, self._lists), *args[2:])
        if func is torch.Tensor.__getitem__ and (found := selected(args[0], args[1])) is not None:
            view, rest = found
            return view[rest] if rest else view
        if func is torch.Tensor.__setitem__ and (found := selected_by_live(args[0], args[1])) is not None:
            view, rest = found
            view[rest or ...] = args[2]
            return None
        return func(*args, **kwargs)


_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_SCATTERED: tuple[Any, ...] = (
    torch.select_scatter, torch.slice_scatter, torch.Tensor.select_scatter, torch.Tensor.slice_scatter,
)  # fmt: skip


def _dtype_of(func: Any, number: torch.SymInt | torch.SymFloat) -> torch.dtype:
    """The dtype that torch gives a tensor of a number: that of a NumPy number, or the default for a Python number."""
    kind = number.kind if isinstance(number, Live) else None
    if func is not torch.scalar_tensor:
        if kind is not None and issubclass(kind, np.generic):
            return torch.from_numpy(np.zeros((), kind)).dtype
        if isinstance(number, torch.SymInt):
            return torch.int64
    return torch.get_default_dtype()


_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__  # checked with torch 2.11 and 2.13


class OutsideReads(TorchFunctionMode):
    """Notes the closed-over tensors that the function looks at, and whose ``.grad`` it reads; no argument's.

    Args:
        arguments: The fakes of arguments, by id, and what errors call them.

    Attributes:
        tensors: The closed-over tensors whose gradient was read.
    """

    def __init__(self, arguments: dict[int, str]) -> None:
        super().__init__()
        self._arguments = arguments
        self._looked_at: dict[int, torch.Tensor] = {}
        self.tensors: list[torch.Tensor] = []

    def looked_at(self) -> list[torch.Tensor]:
        """The closed-over tensors of which the function may have read whether they require grad, or their shape."""
        return list(self._looked_at.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor: Any = args[0] if args else None
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and not is_dynamo_compiling():
            self._looked_at[id(tensor)] = tensor  # Dynamo, which traces branches of torch 2.11, would guard its length
        if func == _GRADIENT:
            if id(tensor) in self._arguments:
                raise TraceError(f"it reads {self._arguments[id(tensor)]}.grad, which its calls do not pass on")
            # The gradient of any other tensor is always None, and reading it warns.
            if not isinstance(tensor, FakeTensor) and (tensor.is_leaf or tensor.retains_grad):
                self.tensors.append(tensor)
        return func(*args, **(kwargs or {}))
