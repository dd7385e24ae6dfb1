"""Live arrays: replicas for NumPy arrays in a traced function, which torch makes tensors of without reading them.

While a function is traced, an array that it was passed is a `LiveArray`, which passes for a ``numpy.ndarray``
(``isinstance``), knows its dtype and shape, and gives a tensor that shows its memory to `torch.as_tensor`,
`torch.tensor`, `torch.asarray` and `torch.from_numpy`. Whatever else is done with it needs its values, which are those
of one call alone: that ends the trace. It is no array, so that NumPy and other code in C has to ask it.
``type(a)`` cannot be noticed.
"""

# Arrays hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import numpy as np
import torch

from pygraph.errors import TraceError
from pygraph.tracing.patches import replaced


class LiveArray:
    """A replica for an array.

    Args:
        name: What reports call it.
        dtype: Its dtype, as NumPy writes it.
        tensor: A tensor that shows its memory.
        problems: Gets what is done with it that needs its values.
    """

    __hash__: Any = None

    def __init__(self, name: str, dtype: str, tensor: torch.Tensor, problems: list[str]) -> None:
        self.__dict__.update(_name=name, _dtype=np.dtype(dtype), _tensor=tensor, _problems=problems)

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

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        _refuse(self, name)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(np.ndarray, name):
            raise AttributeError(f"'numpy.ndarray' object has no attribute {name!r}")
        return _refuse(self, name)


def _refuse(array: LiveArray, use: str) -> NoReturn:
    name = array.__dict__["_name"]
    problem = f"it uses {use} of {name}, a NumPy array, whose values are those of one call"
    array.__dict__["_problems"].append(problem)
    raise TraceError(problem)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refusing(self: LiveArray, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        _refuse(self, name)

    return refusing


# What Python looks up in a class alone, and all else that code in C might find.
_OF_CLASSES = {"__array_finalize__", "__class_getitem__", "__doc__", "__new__", "__hash__"}
_PROPERTIES = {"__array_interface__", "__array_struct__", "__array_priority__"}
for _name in vars(np.ndarray):
    if _name.startswith("__") and _name not in _OF_CLASSES | vars(LiveArray).keys():
        setattr(LiveArray, _name, property(_refusing(_name)) if _name in _PROPERTIES else _refusing(_name))


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
    device = kwargs.get("device")
    device = torch.get_default_device() if device is None else torch.device(device)
    shown = args[0].__dict__["_tensor"].detach()
    return shown.to(device=device, dtype=kwargs.get("dtype") or shown.dtype, copy=copies)


_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)


@contextlib.contextmanager
def arrays_served() -> Generator[None, None, None]:
    """Have ``torch.from_numpy`` take live arrays for the time of the context."""

    def serving(from_numpy: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        def served(array: Any, /) -> torch.Tensor:
            return array.__dict__["_tensor"].detach() if type(array) is LiveArray else from_numpy(array)

        return served

    with replaced(torch, "from_numpy", serving):
        yield
