"""Live arrays: replicas for NumPy arrays in a traced function, which torch makes tensors of without reading them.

While a function is traced, an array that it was passed is a `LiveArray`, which passes for a ``numpy.ndarray``
(``isinstance``), knows its dtype and shape, and gives a tensor that shows its memory to `torch.as_tensor`,
`torch.tensor`, `torch.asarray`, `torch.from_numpy` and ``torch.FloatTensor``. Parts of it (``a[:, 1:]``), other shapes
and dtypes, and sums, products and quotients with constants are live arrays as well, which torch computes. Whatever else
is done with it needs its values, which are those of one call alone: that ends the trace. It is no array, so that NumPy
and other code in C has to ask it. ``type(a)`` cannot be noticed.
"""

# Arrays hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils import dlpack

from pygraph.errors import TraceError
from pygraph.ir.device_arguments import or_default
from pygraph.tracing.live_lists import ListTensors, LiveList
from pygraph.tracing.patches import replaced


class LiveArray:
    """A replica for an array.

    Args:
        name: What reports call it.
        dtype: Its dtype, as NumPy writes it.
        tensor: A tensor that shows its memory.
        note: Called with what is done with it that needs its values.
        is_made: Whether the function has made it, by ``tensor.numpy()``, and may return it.
    """

    __hash__: Any = None

    def __init__(
        self, name: str, dtype: str, tensor: torch.Tensor, note: Callable[[str], None], *, is_made: bool = False
    ) -> None:
        self.__dict__.update(_name=name, _dtype=np.dtype(dtype), _tensor=tensor, _note=note, _is_made=is_made)

    @property
    def __class__(self) -> type:  # pyright: ignore
        return np.ndarray

    @property
    def dtype(self) -> Any:
        """As of the array."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the array."""
        return tuple(self._tensor.shape)

    @property
    def ndim(self) -> int:
        """As of the array."""
        return self._tensor.ndim

    @property
    def size(self) -> int:
        """As of the array."""
        return self._tensor.numel()

    @property
    def itemsize(self) -> int:
        """As of the array."""
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """As of the array."""
        return self.size * self.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __index__(self) -> int:
        if self.size == 1:
            _refuse(self, "__index__")
        raise TypeError("only integer scalar arrays can be converted to a scalar index")  # who asks has another way

    def __getitem__(self, index: Any) -> Any:
        parts = index if type(index) is tuple else (index,)
        if not all(map(_is_basic, parts)):
            return _refuse(self, "__getitem__")
        part = self._tensor[index]
        if part.ndim:
            return self._like(part)
        # Torch looks at the first items of what indexes a tensor, to know whether it is several indices.
        return LiveElement(self) if part.dtype in _INDICES else _refuse(self, "__getitem__")

    def __iter__(self) -> Iterator[Any]:
        if self.ndim < 2:
            _refuse(self, "__iter__")
        return (self[index] for index in range(len(self)))

    @property
    def T(self) -> Any:
        """As of the array."""
        return self.transpose()

    def transpose(self, *axes: Any) -> Any:
        """As of the array."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        return self._like(self._tensor.permute(*(order or reversed(range(self.ndim)))))

    def reshape(self, *shape: Any, **order: Any) -> Any:
        """As of the array."""
        return _refuse(self, "reshape") if order else self._like(self._tensor.reshape(*shape))

    def ravel(self, *order: Any) -> Any:
        """As of the array."""
        return _refuse(self, "ravel") if order else self._like(self._tensor.reshape(-1))

    def flatten(self, *order: Any) -> Any:
        """As of the array."""
        return _refuse(self, "flatten") if order else self._like(self._tensor.reshape(-1).clone())

    def copy(self, *order: Any) -> Any:
        """As of the array."""
        copied = self._tensor.clone(memory_format=torch.contiguous_format)  # NumPy's order, unless another is asked for
        return _refuse(self, "copy") if order else self._like(copied)

    def tolist(self) -> Any:
        """As of the array: nested lists of live numbers."""
        return self._tensor.tolist() if self._dtype.kind in "iuf" else _refuse(self, "tolist")

    def item(self, *index: Any) -> Any:
        """As of the array, if there is a single item: a live number."""
        is_number = not index and self.size == 1 and self._dtype.kind in "iuf"
        return self._tensor.reshape(()).item() if is_number else _refuse(self, "item")

    def astype(self, dtype: Any, **options: Any) -> Any:
        """As of the array, where a number becomes the same one, or a rounded float."""
        wanted = np.dtype(dtype)
        kinds = self._dtype.kind, wanted.kind
        is_safe = (kinds[0] in "biu" and kinds[1] in "biuf") or kinds == ("f", "f")
        found = _TORCH_DTYPES.get(wanted) if is_safe else None
        if found is None or not options.keys() <= {"copy"}:
            return _refuse(self, "astype")
        return self._like(self._tensor.to(found, copy=options.get("copy", True)))

    def _like(self, tensor: torch.Tensor) -> Any:
        """A live array of what is computed of this one."""
        return LiveArray(self._name, _DTYPES[tensor.dtype].str, tensor, self._note, is_made=self._is_made)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        _refuse(self, name)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(np.ndarray, name):
            raise AttributeError(f"'numpy.ndarray' object has no attribute {name!r}")
        return _refuse(self, name)


def _refuse(array: LiveArray, use: str) -> NoReturn:
    name = array.__dict__["_name"]
    problem = f"it uses {use} of {name}, a NumPy array, whose values are those of one call"
    array.__dict__["_note"](problem)
    raise TraceError(problem)


def _is_basic(index: Any) -> bool:
    """Whether an index selects a part that shares memory, and is a constant."""
    if type(index) is slice:
        parts = (index.start, index.stop, index.step)
        return all(part is None or type(part) is int for part in parts) and (index.step or 1) > 0
    return index is None or index is Ellipsis or type(index) is int


# By dtype of torch's, that of NumPy's, where there is one.
_DTYPES = {
    torch.from_numpy(np.empty(0, dtype)).dtype: np.dtype(dtype)
    for dtype in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
_TORCH_DTYPES = {found: dtype for dtype, found in _DTYPES.items()}


def _arithmetic(name: str, function: Callable[[Any, Any], Any]) -> Callable[[LiveArray, Any], Any]:
    """An operator of a live array and a constant, which torch computes in NumPy's dtype."""

    def operate(self: LiveArray, other: Any) -> Any:
        array = self.__dict__
        if type(other) not in (int, float) or array["_dtype"].kind not in "iuf":
            return _refuse(self, name)
        try:
            with np.errstate(all="ignore"):
                result = function(np.ones(1, array["_dtype"]), other).dtype
        except OverflowError:
            return _refuse(self, name)
        found = _TORCH_DTYPES.get(result)
        if found is None:
            return _refuse(self, name)
        tensor = array["_tensor"].to(found)
        return self._like(function(tensor, torch.tensor(other, dtype=found, device="cpu")))  # pyright: ignore[reportPrivateUsage]

    return operate


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refusing(self: LiveArray, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        _refuse(self, name)

    return refusing


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: function(other, one)


for _short in ("add", "sub", "mul", "truediv"):
    _function: Callable[[Any, Any], Any] = getattr(operator, _short)
    setattr(LiveArray, f"__{_short}__", _arithmetic(f"__{_short}__", _function))
    setattr(LiveArray, f"__r{_short}__", _arithmetic(f"__r{_short}__", _reflected(_function)))

# What Python looks up in a class alone, and all else that code in C might find.
_OF_CLASSES = {"__array_finalize__", "__class_getitem__", "__doc__", "__new__", "__hash__"}
_PROPERTIES = {"__array_interface__", "__array_struct__", "__array_priority__"}
for _name in vars(np.ndarray):
    if _name.startswith("__") and _name not in _OF_CLASSES | vars(LiveArray).keys():
        setattr(LiveArray, _name, property(_refusing(_name)) if _name in _PROPERTIES else _refusing(_name))


class LiveElement:
    """An integer of an array, which may be passed on but not be looked at.

    Args:
        array: The array.
    """

    def __init__(self, array: LiveArray) -> None:
        self.__dict__["_array"] = array

    @property
    def __class__(self) -> type:  # pyright: ignore
        return self._array.dtype.type

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        _refuse(self._array, "__getitem__")

    def __getattr__(self, name: str) -> Any:
        if not hasattr(np.int64, name):
            raise AttributeError(f"'numpy.{self._array.dtype}' object has no attribute {name!r}")
        return _refuse(self._array, "__getitem__")


def _refusing_element(name: str) -> Any:
    def refusing(self: LiveElement, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        _refuse(self.__dict__["_array"], "__getitem__")

    return property(refusing) if name in _PROPERTIES else refusing


# That of items would make it a sequence.
_OF_ELEMENTS = {
    "__getattribute__", "__delattr__", "__dict__", "__init__", "__init_subclass__", "__subclasshook__", "__getitem__",
}  # fmt: skip
for _name in dir(np.int64):
    if _name.startswith("__") and _name not in _OF_CLASSES - {"__hash__"} | _OF_ELEMENTS | vars(LiveElement).keys():
        setattr(LiveElement, _name, _refusing_element(_name))
LiveElement.__hash__ = _refusing_element("__hash__")


def tensor_of(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that a function of torch's makes of a live array; None if it is another function, or of others."""
    if func not in _MAKERS or not args or type(args[0]) is not LiveArray:
        return None
    if func is torch.as_tensor:
        kwargs = {**dict(zip(("dtype", "device"), args[1:], strict=False)), **kwargs}
    elif len(args) > 1:
        return None  # torch says what is wrong
    if not kwargs.keys() <= {"dtype", "device", "copy"}:
        _refuse(args[0], f"torch.{func.__name__} with these arguments")
    copies = func is torch.tensor or bool(kwargs.get("copy"))
    device = or_default(kwargs.get("device"))
    shown = args[0].__dict__["_tensor"].detach()
    return shown.to(device=device, dtype=kwargs.get("dtype") or shown.dtype, copy=copies)


_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)


def with_tensor_indices(index: Any, device: torch.device, lists: ListTensors) -> Any:
    """An index in which arrays and lists are tensors on a device, to which torch copies them as well, and bytes masks.

    Torch's descriptions do not take bytes (2.11 to 2.13), of which an index has been a mask since before `torch.bool`.

    Args:
        index: What a tensor is indexed by, perhaps a tuple.
        device: The device of that tensor.
        lists: The lists of the trace that are tensors.
    """
    if type(index) is LiveArray:
        return _tensor_index(index, device)
    if isinstance(index, torch.Tensor) and index.dtype == torch.uint8:
        return index.bool()
    if type(index) in (list, LiveList) and (found := lists.as_index(index, device)) is not None:
        return found
    if type(index) is tuple and any(type(one) in _INDEXING or isinstance(one, torch.Tensor) for one in index):
        return tuple([with_tensor_indices(one, device, lists) for one in index])
    return index


def _tensor_index(array: LiveArray, device: torch.device) -> torch.Tensor:
    shown = array.__dict__["_tensor"].detach()
    return shown.to(device) if shown.dtype in _INDICES else _refuse(array, "its items as indices")


_INDEXING = (LiveArray, LiveList, list)
_INDICES = (torch.int64, torch.int32, torch.bool)


def array_of(tensor: torch.Tensor, note: Callable[[str], None]) -> Any:
    """The array that shows the memory of a tensor which a traced function has computed on the host.

    Args:
        tensor: The tensor.
        note: Called with what is done with the array that needs its values.

    Returns:
        A live array; None if eager raises an error, or NumPy has no such dtype.
    """
    is_shown = tensor.device.type == "cpu" and not tensor.requires_grad and tensor.layout == torch.strided
    if not is_shown or tensor.is_conj() or tensor.is_neg() or tensor.dtype not in _DTYPES:
        return None
    return LiveArray("the result of numpy()", _DTYPES[tensor.dtype].str, tensor, note, is_made=True)


def with_array_results(result: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """A result in which arrays that the function has made are nodes of pytree, made of tensors.

    Args:
        result: The result.
        is_leaf: Whether a container stays the very same.
    """
    if not any(map(_is_made, pytree.tree_leaves(result, is_leaf=is_leaf))):
        return result
    return pytree.tree_map(_as_node, result, is_leaf=is_leaf)


def _as_node(value: Any) -> Any:
    return _ArrayOf(value.__dict__["_tensor"]) if _is_made(value) else value


def _is_made(value: Any) -> bool:
    return type(value) is LiveArray and value.__dict__["_is_made"]


@dataclasses.dataclass
class _ArrayOf:
    """An array that shows the memory of a tensor."""

    tensor: Any


def _flatten(array: _ArrayOf) -> tuple[list[Any], Any]:
    return [array.tensor], None


def _flatten_with_keys(array: _ArrayOf) -> tuple[list[tuple[Any, Any]], Any]:
    return [(pytree.GetAttrKey("tensor"), array.tensor)], None


def _unflatten(values: Any, context: Any) -> Any:
    del context
    (tensor,) = values
    # In a trace there is no memory to be shown, nor where a structure is filled with something else.
    return tensor.numpy() if type(tensor) is torch.Tensor else _ArrayOf(tensor)


pytree.register_pytree_node(_ArrayOf, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


@contextlib.contextmanager
def arrays_served() -> Generator[None, None, None]:
    """Have ``torch.from_numpy`` take live arrays for the time of the context, and so does ``torch.FloatTensor``.

    That asks objects for their memory by ``from_dlpack``, a function in Python (torch 2.11 and 2.13).
    """

    def serving(reading: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def served(array: Any, /, **options: Any) -> torch.Tensor:
            if type(array) is not LiveArray or options:
                return reading(array, **options)
            return array.__dict__["_tensor"].detach()

        return served

    with replaced(torch, "from_numpy", serving), replaced(dlpack, "from_dlpack", serving):
        yield
