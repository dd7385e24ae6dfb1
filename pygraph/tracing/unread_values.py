"""Values that a traced function is not expected to read: what an object has besides its tensors, numbers and flags.

A tokenizer's encodings, the name of a sample: they are others in each object, and a trace that read one would be good
for that object alone. So a function gets an `UnreadValue` in the place of each. Whatever is done with it ends the
trace, but for ``is``, ``type()``, and what passes it on.
"""

# Values are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from pygraph.errors import TraceError, with_article


class UnreadValue:
    """A value that ends a trace when anything is done with it.

    Args:
        name: What reports call it.
        cls: The class of the value.
        problems: Gets what is done with it.
    """

    __slots__ = ("__weakref__", "_problem", "_problems")

    def __init__(self, name: str, cls: type, problems: list[str]) -> None:
        object.__setattr__(self, "_problem", f"it uses {name}, {with_article(cls)}")
        object.__setattr__(self, "_problems", problems)

    def __getattribute__(self, name: str) -> NoReturn:
        _refuse(self)


def _refuse(value: UnreadValue) -> NoReturn:
    problem: str = object.__getattribute__(value, "_problem")
    object.__getattribute__(value, "_problems").append(problem)
    raise TraceError(problem)


def _refusing() -> Callable[..., NoReturn]:
    def refusing(self: UnreadValue, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        _refuse(self)

    return refusing


# Methods that Python looks up in a class, of classes that have nearly all of them.
_CLASSES = (object, int, float, str, list, dict, set, np.ndarray, types.FunctionType, types.CoroutineType, memoryview)
_MORE = ("__enter__", "__exit__", "__aiter__", "__anext__", "__next__", "__fspath__", "__call__", "__missing__",
         "__torch_function__", "__length_hint__", "__set__", "__set_name__", "__instancecheck__")  # fmt: skip
_OF_CLASSES = {
    "__new__", "__init__", "__getattribute__", "__init_subclass__", "__subclasshook__", "__doc__", "__module__",
    "__slots__", "__class_getitem__", "__del__", "__getattr__", "__class__", "__array_finalize__", "__qualname__",
    "__name__", "__dict__", "__weakref__",
}  # fmt: skip
for _name in {name for cls in _CLASSES for name in vars(cls) if name.startswith("__")} | {*_MORE}:
    if _name not in _OF_CLASSES:
        setattr(UnreadValue, _name, _refusing())
