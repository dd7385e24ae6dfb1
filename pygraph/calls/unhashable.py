"""Arguments that cannot tell one kind of calls from another: which they are, in the user's words, and what to pass."""

# Arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.errors import with_article
from pygraph.guards.iterators import is_opaque
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.ir.value_keys import attributes_of


def refusal(args: tuple[Any, ...], kwargs: dict[str, Any], leaf: int) -> str:
    """The reason why a call is no graph of which a leaf cannot be part of its key, with the remedy.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        leaf: The position of the leaf among theirs.

    >>> refusal(({1, 2},), {}, 0)
    'args[0] is a set, whose items may change from call to call. Pass tuple(sorted(args[0])) instead.'
    """
    path, value = flatten_with_path((args, kwargs))[0][leaf]
    name = argument_path(path)
    problem, remedy = next(words(name, value) for matches, words in _WORDS if matches(value))
    return f"{name} is {problem}. {remedy}"


def _of_array(name: str, value: Any) -> tuple[str, str]:
    if value.dtype.kind in "biufc":
        return "a NumPy array, which may change from call to call", f"Pass torch.from_numpy({name}).to(device) instead."
    return f"a NumPy array of {value.dtype}", "Pass its numbers as a tensor, and its texts as a tuple."


def _of_file(name: str, value: Any) -> tuple[str, str]:
    return f"a file ({_kind(value)})", f"Read {name} before the call, and pass what you have read."


def _of_opaque(name: str, value: Any) -> tuple[str, str]:
    problem = f"of class {_kind(value)}, which gives something else whenever it is used"
    return problem, f"Use {name} before the call, and pass what it gives."


def _of_set(name: str, value: Any) -> tuple[str, str]:
    try:
        sorted(value)
    except TypeError:  # its items have no order
        return _items(value), f"Pass tuple({name}) instead."
    return _items(value), f"Pass tuple(sorted({name})) instead."


def _of_mapping(name: str, value: Any) -> tuple[str, str]:
    return _items(value), f"Pass dict({name}) instead."


def _of_sequence(name: str, value: Any) -> tuple[str, str]:
    return _items(value), f"Pass list({name}) instead."


def _of_dataclass(name: str, value: Any) -> tuple[str, str]:
    problem = f"{with_article(type(value))}, a dataclass that may change from call to call"
    attributes = attributes_of(value)
    if type(value).__dataclass_params__.frozen:
        field = next((key for key, item in attributes.items() if not _is_hashable(item)), None)
        held = f"{name}.{field}" if field is not None else "one of its fields"
        return f"{with_article(type(value))}, of which {held} may change from call to call", f"Make {held} a tuple."
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(list(attributes.values()))):
        registered = f"torch.export.register_dataclass({_kind(value)})"
        return problem, (
            f"Pass its tensors and numbers instead, or call {registered} once, which makes its fields arguments; "
            "if it is the same object at every call, as self is, make it a @dataclass(eq=False)."
        )
    return problem, "Make it a @dataclass(frozen=True), whose fields hold tuples instead of lists."


def _of_other(name: str, value: Any) -> tuple[str, str]:
    del name
    problem = f"{with_article(type(value))}, of which Python makes no hash, as it may change from call to call"
    return problem, "Pass its tensors and numbers instead, in a dict or a tuple, or define __hash__ in its class."


def _items(value: Any) -> str:
    return f"{with_article(type(value))}, whose items may change from call to call"


def _kind(value: Any) -> str:
    return type(value).__name__


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


_WORDS: tuple[tuple[Callable[[Any], bool], Callable[[str, Any], tuple[str, str]]], ...] = (
    (lambda value: isinstance(value, np.ndarray), _of_array),
    (lambda value: isinstance(value, io.IOBase), _of_file),
    (is_opaque, _of_opaque),
    (lambda value: isinstance(value, Set), _of_set),
    (lambda value: isinstance(value, Mapping), _of_mapping),
    (lambda value: isinstance(value, (list, tuple)), _of_sequence),
    (dataclasses.is_dataclass, _of_dataclass),
    (lambda value: isinstance(value, Sequence), _of_sequence),
    (lambda value: True, _of_other),
)
"""Kinds of arguments, and the words for each: what it is, and what to do."""
