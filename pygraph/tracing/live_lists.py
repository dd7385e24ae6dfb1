"""Live lists: replicas for lists of numbers in a traced function, which torch makes tensors of without reading them.

Where each call is passed a list of other numbers (indices of a minibatch, returns of an episode), one tensor on the
host stands for them. Its replica passes for a ``list`` (``isinstance``), knows its length, gives a tensor to
`torch.tensor` and `torch.as_tensor`, and is an index of tensors. Whatever else is done with it or with its items needs
the numbers themselves, which it notes. It is no list, so that code in C has to ask it.
"""

# Lists hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from pygraph.errors import TraceError

MOST_NUMBERS = 64
"""So many numbers of lists are operations of their own in a trace."""


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
        if type(index) is not int:
            return _refuse(self)
        if not -len(self) <= index < len(self):
            raise IndexError("list index out of range")
        return _Item(self)  # torch looks at the items of what indexes a tensor, to know whether it is several indices

    def __getattr__(self, name: str) -> Any:
        if not hasattr(list, name):
            raise AttributeError(f"'list' object has no attribute {name!r}")
        return _refuse(self)


def _refuse(numbers: LiveList, *_: Any, **__: Any) -> NoReturn:
    state = numbers.__dict__
    state["_note_read"]()
    raise TraceError(f"it reads {state['_name']}, a list of numbers that are others at every call")


for _name in (
    "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__", "__add__", "__radd__", "__mul__",
    "__rmul__", "__iadd__", "__imul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__",
    "__str__", "__format__", "__reduce_ex__", "__copy__", "__deepcopy__", "__sizeof__", "__array__", "__index__",
):  # fmt: skip
    setattr(LiveList, _name, _refuse)


class _Item:
    """A number of a live list, which may be passed on but not be looked at."""

    __slots__ = ("_list",)

    def __init__(self, numbers: LiveList) -> None:
        self._list = numbers

    @property
    def __class__(self) -> type:  # pyright: ignore
        return self._list.__dict__["_kind"]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._list)


_OF_ITEMS = ({*dir(int), *dir(float)} - {*dir(object)}) | {"__eq__", "__ne__", "__repr__", "__str__", "__format__"}
for _name in (*_OF_ITEMS, "__hash__", "__reduce_ex__"):
    setattr(_Item, _name, _Item._refuse)  # pyright: ignore[reportPrivateUsage]


def _of_live(values: LiveList, options: dict[str, Any]) -> torch.Tensor:
    kind, tensor = values.__dict__["_kind"], values.__dict__["_tensor"]
    dtype, device = _given(options, kind)
    if dtype is None or not options.keys() <= {"self", "data", "dtype", "device"}:
        _refuse(values)
    return tensor.to(device=device, dtype=dtype, copy=True)


def _given(options: dict[str, Any], kind: type) -> tuple[torch.dtype | None, torch.device]:
    """The dtype and the device of a tensor of numbers; no dtype if torch looks whether that can hold each of them."""
    like: Any = options.get("self")
    dtype, device = options.get("dtype"), options.get("device")
    if dtype is None:
        dtype = like.dtype if like is not None else torch.int64 if kind is int else torch.get_default_dtype()
    if device is None:
        device = torch.get_default_device() if like is None else like.device
    return dtype if dtype in _DTYPES[kind] else None, torch.device(device)


def _shape_of(values: Any) -> list[int]:
    """The lengths of nested lists, by the first item of each."""
    shape: list[int] = []
    while type(values) in _SEQUENCES:
        shape.append(len(values))
        values = values[0] if values else None
    return shape


def _items(values: Any, shape: list[int]) -> list[Any]:
    """The items of nested lists of a shape; None for a list that has another one."""
    if not shape:
        return [values]
    if type(values) not in _SEQUENCES or len(values) != shape[0]:
        return [None]
    return [item for one in values for item in _items(one, shape[1:])]


_OPTIONS: dict[Any, tuple[str, ...]] = {
    torch.tensor: ("data",), torch.as_tensor: ("data", "dtype", "device"), torch.Tensor.new_tensor: ("self", "data"),
}  # fmt: skip
_MAKERS = frozenset(_OPTIONS)
_SEQUENCES = (list, tuple)
_PLAIN = (int, float, bool)
_LIVE = (torch.SymInt, torch.SymFloat)

_DTYPES = {
    int: (torch.int64, torch.float64, torch.float32),
    float: (torch.float64, torch.float32, torch.float16, torch.bfloat16),
}


class ListTensors:
    """The tensors that lists with live numbers are in one trace: as data of new tensors, and as indices.

    Each number is an operation, so there is a limit; beyond it, the numbers themselves are needed.
    """

    def __init__(self) -> None:
        self._indices: dict[Any, tuple[torch.Tensor, list[Any]]] = {}
        self._left = MOST_NUMBERS

    def made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The tensor that a function of torch's makes of a list; None if it has no live numbers, or too many."""
        if func not in _MAKERS:
            return None
        options = dict(zip(_OPTIONS[func], args, strict=False)) | kwargs
        values = options.get("data")
        if type(values) is LiveList:
            return _of_live(values, options)
        if type(values) not in _SEQUENCES or not options.keys() <= {"self", "data", "dtype", "device"}:
            return None
        shape = _shape_of(values)
        numbers = _items(values, shape)
        if not any(isinstance(one, _LIVE) for one in numbers):
            return None
        if not all(type(one) in _PLAIN or isinstance(one, _LIVE) for one in numbers):
            return None
        is_float = any(isinstance(one, (float, torch.SymFloat)) for one in numbers)
        dtype, device = _given(options, float if is_float else int)
        stacked = None if dtype is None else self._stacked(numbers, dtype)
        return None if stacked is None else stacked.view(shape).to(device)

    def as_index(self, index: Any, device: torch.device) -> torch.Tensor | None:
        """The tensor on a device that a list of live integers is; None if it has none, or others, or too many."""
        if type(index) is LiveList:
            return index.__dict__["_tensor"].to(device) if index.__dict__["_kind"] is int else _refuse(index)
        if type(index) is not list or not any(isinstance(one, torch.SymInt) for one in index):
            return None
        if not all(type(one) is int or isinstance(one, torch.SymInt) for one in index):
            return None
        key = (device, *map(id, index))
        if key not in self._indices:
            stacked = self._stacked(index, torch.int64)
            if stacked is None:
                return None
            self._indices[key] = stacked.to(device), list(index)  # which holds the numbers
        return self._indices[key][0]

    def _stacked(self, numbers: list[Any], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of numbers on the host, of one dimension; None if there are too many by now."""
        self._left -= len(numbers)
        if self._left < 0:
            return None
        host = torch.device("cpu")
        return torch.stack([torch.ops.pygraph.scalar(one, dtype=dtype, device=host) for one in numbers])
