"""Live lists: replicas for lists of numbers in a traced function, which torch makes tensors of without reading them.

Where each call is passed a list of other numbers (indices of a minibatch, returns of an episode), one tensor on the
host stands for them. Its replica passes for a ``list`` (``isinstance``), knows its length, gives a tensor to
`torch.tensor` and `torch.as_tensor`, is an index of tensors, and its items and parts are live as well. Whatever else is
done with it needs the numbers themselves, which it notes. It is no list, so that code in C has to ask it.
"""

# Lists hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from pygraph.errors import TraceError


class LiveList:
    """A replica for a list of numbers.

    Args:
        name: What reports call it.
        kind: The class of its numbers, ``int`` or ``float``.
        tensor: A tensor that shows them.
        note_read: Called when something is done with it that needs its numbers.
    """

    __hash__: Any = None

    def __init__(self, name: str, kind: type, tensor: torch.Tensor, note_read: Callable[[], object]) -> None:
        self.__dict__.update(_name=name, _kind=kind, _tensor=tensor, _note_read=note_read)

    @property
    def __class__(self) -> type:  # pyright: ignore
        return list

    def __len__(self) -> int:
        return self._tensor.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if type(index) is slice and all(one is None or type(one) is int for one in (index.start, index.stop)):
            if index.step is None:
                return LiveList(self._name, self._kind, self._tensor[index], self._note_read)
        elif type(index) is int:
            if not -len(self) <= index < len(self):
                raise IndexError("list index out of range")
            return self._tensor[index].item()
        return _refuse(self)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        return (self[index] for index in reversed(range(len(self))))

    def __getattr__(self, name: str) -> Any:
        if not hasattr(list, name):
            raise AttributeError(f"'list' object has no attribute {name!r}")
        return _refuse(self)


def _refuse(array: LiveList, *_: Any, **__: Any) -> NoReturn:
    state = array.__dict__
    state["_note_read"]()
    raise TraceError(f"it reads {state['_name']}, a list of numbers that are others at every call")


for _name in (
    "__setitem__", "__delitem__", "__contains__", "__add__", "__radd__", "__mul__", "__rmul__", "__iadd__", "__imul__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__str__", "__format__", "__reduce_ex__",
    "__copy__", "__deepcopy__", "__sizeof__", "__array__", "__index__",
):  # fmt: skip
    setattr(LiveList, _name, _refuse)


def tensor_of_list(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that a function of torch's makes of a live list; None if it is another function, or of others."""
    if func not in _MAKERS or not args or type(args[0]) is not LiveList:
        return None
    if func is torch.as_tensor:
        kwargs = {**dict(zip(("dtype", "device"), args[1:], strict=False)), **kwargs}
    elif len(args) > 1:
        return None  # torch says what is wrong
    kind, tensor = args[0].__dict__["_kind"], args[0].__dict__["_tensor"]
    dtype = kwargs.get("dtype") or (torch.int64 if kind is int else torch.get_default_dtype())
    # Of others, torch looks whether they can hold each number.
    if not kwargs.keys() <= {"dtype", "device"} or dtype not in _DTYPES[kind]:
        _refuse(args[0])
    device = kwargs.get("device")
    device = torch.get_default_device() if device is None else torch.device(device)
    return tensor.to(device=device, dtype=dtype, copy=True)


def tensor_of_numbers(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that a function of torch's makes of a list with live numbers; None if there are none, or others."""
    if func not in _MAKERS or len(args) != 1 or not kwargs.keys() <= {"dtype", "device"}:
        return None
    found = _flattened(args[0])
    if found is None:
        return None
    shape, numbers = found
    kinds = {kind for one in numbers for kind in _KINDS if isinstance(one, kind)}
    is_float = not kinds.isdisjoint((float, torch.SymFloat))
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if is_float else torch.int64)
    if dtype not in _DTYPES[float if is_float else int]:
        return None
    device = kwargs.get("device")
    return _stacked(numbers, dtype).view(shape).to(torch.get_default_device() if device is None else device)


def _flattened(values: Any) -> tuple[tuple[int, ...], list[Any]] | None:
    """The shape and the numbers of nested lists, if some of them are live and not too many; else None."""
    shape: list[int] = []
    while type(values) in _SEQUENCES and values:
        shape.append(len(values))
        if any(type(one) in _SEQUENCES for one in values):
            if not all(type(one) in _SEQUENCES and len(one) == len(values[0]) for one in values):
                return None
            values = [item for one in values for item in one]
            shape[-1:] = [shape[-1]]
            continue
        break
    if not shape or type(values) not in _SEQUENCES or len(values) > _MOST:
        return None
    if not all(type(one) in _PLAIN or isinstance(one, _LIVE) for one in values):
        return None
    if not any(isinstance(one, _LIVE) for one in values):
        return None
    sizes = [shape[0], *(after // before for before, after in zip(shape, shape[1:], strict=False))]
    return tuple(sizes), list(values)


def _stacked(numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of numbers on the host, of one dimension."""
    host = torch.device("cpu")
    return torch.stack([torch.ops.pygraph.scalar(one, dtype=dtype, device=host) for one in numbers])


_MAKERS = (torch.tensor, torch.as_tensor)
_SEQUENCES = (list, tuple)
_PLAIN = (int, float, bool)
_LIVE = (torch.SymInt, torch.SymFloat)
_KINDS = (int, float, *_LIVE)

# More items of a list are no operations of their own.
_MOST = 1024
_DTYPES = {
    int: (torch.int64, torch.float64, torch.float32),
    float: (torch.float64, torch.float32, torch.float16, torch.bfloat16),
}


def index_of_list(numbers: LiveList, device: torch.device) -> torch.Tensor:
    """The tensor on a device that a live list is as an index."""
    return numbers.__dict__["_tensor"].to(device) if numbers.__dict__["_kind"] is int else _refuse(numbers)


def index_of_numbers(index: Any, device: torch.device) -> torch.Tensor | None:
    """The tensor on a device that a list with live integers is as an index; None if there are none, or others."""
    if type(index) is not list or len(index) > _MOST or not any(isinstance(one, torch.SymInt) for one in index):
        return None
    if not all(type(one) is int or isinstance(one, torch.SymInt) for one in index):
        return None
    return _stacked(index, torch.int64).to(device)
