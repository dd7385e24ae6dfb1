"""Proxies of functions: for the time of a trace, one is stored wherever the traced function finds such a function."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any


class FunctionProxy:
    """A proxy that passes for a function or a class.

    Args:
        original: The function or class.
    """

    __slots__ = ("__weakref__", "_original")

    def __init__(self, original: Any) -> None:
        self._original = original

    @property
    def __class__(self) -> Any:
        return original_of(self).__class__

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a function cannot be set")

    def __hash__(self) -> int:
        return hash(original_of(self))

    def __eq__(self, other: object) -> bool:
        return other is self or original_of(self) == original_of(other)

    def __repr__(self) -> str:
        return repr(original_of(self))


def original_of(value: object) -> Any:
    """The function or class of a proxy; any other value itself."""
    return object.__getattribute__(value, "_original") if issubclass(type(value), FunctionProxy) else value


@contextlib.contextmanager
def builtin_replaced(name: str, proxy: FunctionProxy, modules: Iterable[dict[str, Any]]) -> Generator[None, None, None]:
    """Have code of modules find a proxy in place of a builtin, unless it has a variable of that name.

    Args:
        name: The builtin's name.
        proxy: The proxy.
        modules: The variables of the modules.
    """
    found = [variables for variables in {id(one): one for one in modules}.values() if name not in variables]
    try:
        for variables in found:
            variables[name] = proxy
        yield
    finally:
        for variables in found:
            if variables.get(name) is proxy:
                del variables[name]
