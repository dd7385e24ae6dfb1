"""Names of state in reports and errors, as a user would write it: ``model.linear.weight``, ``config['scale']``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pygraph.guards.storage import changed_keys
from pygraph.ir.constants import IMMUTABLE


def join(name: str, attribute: str) -> str:
    """The name of an attribute of the object of a name, which may be empty.

    >>> join("model", "weight"), join("", "weight")
    ('model.weight', 'weight')
    """
    return f"{name}.{attribute}" if name else attribute


def key_name(key: Any, names: Mapping[int, str]) -> str:
    """The text of a key; keys that are tensors, as in the state of an optimizer, are not to be printed.

    Args:
        key: The key of an entry, or the index of an item.
        names: Names of objects, by id.

    >>> weight, other = object(), object()
    >>> key_name(("exp_avg", weight, other), {id(weight): "model.weight"})
    "('exp_avg', model.weight, a object)"
    """
    if type(key) is tuple:
        return f"({', '.join(key_name(part, names) for part in key)})"  # pyright: ignore[reportUnknownVariableType]
    return repr(key) if type(key) in IMMUTABLE else names.get(id(key), f"a {type(key).__name__}")


def entry_name(container: str, key: Any, names: Mapping[int, str]) -> str:
    """The name of one entry of a dict, which may be the attributes, parameters or buffers of an object.

    >>> entry_name("model._buffers", "mean", {})
    'model.mean'
    """
    if type(key) not in IMMUTABLE:
        return f"{container}[{key_name(key, names)}]"
    container = container.removesuffix("._buffers").removesuffix("._parameters").removesuffix("._modules")
    return join(container.removeprefix("_buffers").removeprefix("_parameters"), str(key))


def changed_entry(name: str, container: Any, before: Any, names: Mapping[int, str]) -> str:
    """The name of the first entry of a dict that differs from a copy of it; a list is named as a whole."""
    if not isinstance(container, dict):
        return name or "a list"
    keys = changed_keys(container, before)
    return entry_name(name, keys[0], names) if keys else f"the order of {name or 'a dict'}"
