"""``float(t)`` and ``int(t)`` of a traced value: a number that stays live, as that of ``t.item()`` does.

``float`` takes a real float from whatever it is called with, so nothing that a tensor of a trace answers could make
the result live. So it is replaced for the time of a trace, in the modules of the user's functions that call it: they
find the proxy among their global variables. A module whose functions do anything else with the class
(``dtype=float``, ``type(k) is float``) than to call it, to ask ``isinstance(k, float)`` or to ``map`` by it, is left as
it is, and so is one that the walk over what the traced function reaches does not find: there, the number is needed on
the host. The same holds for ``int``, of tensors of integers; of others it rounds, for which the number is needed; and
for ``enumerate``, which would take the number with which it begins by value (``enumerate(loader, epoch * n)``).
"""

# Values are of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Generator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils._python_dispatch import _disable_current_modes  # checked with torch 2.11 and 2.13

from pygraph.guards.environment import Environment
from pygraph.tracing.function_proxies import FunctionProxy, builtin_replaced, original_of
from pygraph.tracing.live_numbers import Live, computed_number
from pygraph.tracing.number_operations import derived
from pygraph.tracing.proxy_trace import tracing_here
from pygraph.tracing.type_function import class_in_eager


class _ClassProxy(FunctionProxy):
    """A proxy of a class; to all but traced values it is the class."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return getattr(original_of(self), name)

    def __instancecheck__(self, instance: Any) -> bool:
        return issubclass(class_in_eager(instance), original_of(self))

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, original_of(self))

    def __or__(self, other: Any) -> Any:
        return original_of(self) | original_of(other)

    def __ror__(self, other: Any) -> Any:
        return original_of(other) | original_of(self)


class FloatClass(_ClassProxy):
    """A proxy of ``float`` that knows traced values."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The number that a value is; that of a traced one is live."""
        if len(args) != 1 or kwargs or not tracing_here():
            return float(*args, **kwargs)
        value = args[0]
        if isinstance(value, FakeTensor) and _is_number(value):
            _warn_as_torch(value)
            value = value.item()
        return _float_of(value) if issubclass(type(value), Live) else float(value)


class IntClass(_ClassProxy):
    """A proxy of ``int`` that knows traced tensors of integers."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The number that a value is; that of a traced tensor of integers is live."""
        if len(args) != 1 or kwargs or not tracing_here() or not isinstance(args[0], FakeTensor):
            return int(*args, **kwargs)
        is_integer = _is_number(args[0]) and not args[0].is_floating_point()
        return args[0].item() if is_integer else int(args[0])


class EnumerateClass(_ClassProxy):
    """A proxy of ``enumerate`` that counts from live numbers."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pairs of numbers and items; the numbers are live if the first one is."""
        start: Any = args[1] if len(args) == 2 else kwargs.get("start")
        if len(args) + len(kwargs) != 2 or not args or not tracing_here() or not issubclass(type(start), Live):
            return enumerate(*args, **kwargs)
        return ((start + count, item) for count, item in enumerate(args[0]))


_NUMBERS: dict[str, _ClassProxy] = {"float": FloatClass(float), "int": IntClass(int)}
_PROXIES: dict[str, _ClassProxy] = {**_NUMBERS, "enumerate": EnumerateClass(enumerate)}


def _is_number(tensor: FakeTensor) -> bool:
    """Whether a tensor is one number that only a run knows, and that an item of it is as well."""
    is_one = tensor.constant is None and tensor.numel() == 1
    return is_one and not tensor.is_complex() and tensor.dtype is not torch.bool


def _warn_as_torch(tensor: torch.Tensor) -> None:
    """Have torch say, once in a process, that a tensor which requires grad becomes a number."""
    if tensor.requires_grad:
        with _disable_current_modes():
            float(torch.zeros((), device="cpu", requires_grad=True))


def _float_of(number: Any) -> Any:
    if number.source is None:
        is_float = isinstance(number, torch.SymFloat)
        return number if is_float else computed_number(torch.sym_float(number), is_of_host=number.is_of_host)
    return number if number.kind is float else derived("float", float, (number,))


def reads_numbers(environment: Environment) -> bool:
    """Whether code of the user's may read numbers of the device."""
    return any(map(environment.has_code_for, ("item", "tolist"))) or any(map(environment.calls_builtin, _NUMBERS))


@contextlib.contextmanager
def number_classes_served(environment: Environment) -> Generator[None, None, None]:
    """Have functions of the user's make live numbers of traced values for the time of a trace."""
    with contextlib.ExitStack() as stack:
        for name, proxy in _PROXIES.items():
            stack.enter_context(builtin_replaced(name, proxy, _modules_calling(environment, name)))
        yield


def _modules_calling(environment: Environment, name: str) -> list[dict[str, Any]]:
    """The variables of modules of the user's whose functions only call a class of numbers."""
    modules: dict[int, dict[str, Any]] = {}
    others: set[int] = set()
    for fn in environment.functions_calling(name):
        modules[id(fn.__globals__)] = fn.__globals__
        if not is_only_called(fn.__code__, name):
            others.add(id(fn.__globals__))
    return [variables for key, variables in modules.items() if key not in others]


@functools.lru_cache(maxsize=4096)
def is_only_called(code: types.CodeType, name: str) -> bool:
    """Whether code does no more with a class of this name than to call it, to map by it, and to ask for its instances.

    >>> is_only_called((lambda k: float(k) if isinstance(k, (int, float)) else 0.0).__code__, "float")
    True
    >>> is_only_called((lambda ks: sum(map(float, ks))).__code__, "float")
    True
    >>> is_only_called((lambda k: type(k) is float).__code__, "float")
    False
    >>> is_only_called((lambda t: float(t.float().sum())).__code__, "float")  # the name of an attribute is another one
    True
    """
    begins: set[Any] = set()
    questions: list[Any] = []
    others: list[Any] = []
    for instruction in dis.get_instructions(code):
        where: Any = instruction.positions
        if instruction.argval in ("isinstance", "issubclass", "map"):
            begins.add(where[::2])
        elif instruction.opname.startswith("CALL") and where[::2] in begins:
            questions.append(where)
        elif instruction.argval == name and instruction.opname in _LOOKED_UP and not _is_called(instruction):
            others.append(where)
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    is_asked_about = all(any(_is_inside(one, question) for question in questions) for one in others)
    return is_asked_about and all(is_only_called(one, name) for one in inner)


_LOOKED_UP = ("LOAD_GLOBAL", "LOAD_NAME")


def _is_called(load: dis.Instruction) -> bool:
    """Whether what an instruction loads is called by that name: the lowest bit says so."""
    return load.opname == "LOAD_GLOBAL" and bool((load.arg or 0) & 1)


def _is_inside(inner: Any, outer: Any) -> bool:
    """Whether a place in the source is inside of another; one that is not known is in none."""
    if None in inner or None in outer:
        return False
    return outer[::2] <= inner[::2] and inner[1::2] <= outer[1::2]  # lines and columns, of beginning and end
