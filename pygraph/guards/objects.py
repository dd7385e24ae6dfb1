"""Objects that a function makes and returns with tensors in their attributes: pytree nodes, as containers are.

Dataclasses, namespaces, outputs of models: to pytree they are leaves. Here they are nodes of a class of our own, from
which the same kind of object is made again, without its ``__init__``.
"""

# Attributes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.ir.value_keys import attributes_of, has_only_attributes

# Classes whose objects have state besides their attributes, or are compared by identity.
_WHOLE = (
    torch.Tensor, torch.nn.Module, torch.optim.Optimizer, BaseException, type,
    torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip

# Objects in attributes of objects are followed this deep.
_DEEP = 6


@dataclasses.dataclass
class _Parts:
    """An object's class, and its attributes by name."""

    cls: type
    attributes: dict[str, Any]

    def whole(self) -> Any:
        """A new object of the class with these attributes."""
        made: Any = self.cls.__new__(self.cls)  # pyright: ignore[reportCallIssue]
        for name, value in self.attributes.items():
            if isinstance(getattr(self.cls, name, None), types.MemberDescriptorType):
                object.__setattr__(made, name, value)
            else:
                made.__dict__[name] = value  # whatever the class has of that name
        return made


def _flatten(parts: _Parts) -> tuple[list[Any], Any]:
    return list(parts.attributes.values()), (parts.cls, tuple(parts.attributes))


def _flatten_with_keys(parts: _Parts) -> tuple[list[tuple[Any, Any]], Any]:
    return [(pytree.GetAttrKey(name), value) for name, value in parts.attributes.items()], _flatten(parts)[1]


def _unflatten(values: Any, context: Any) -> Any:
    cls, names = context
    return _Parts(cls, dict(zip(names, values, strict=True))).whole()


pytree.register_pytree_node(_Parts, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def with_parts(result: Any, is_leaf: Callable[[Any], bool] | None = None, kind: type[Any] = torch.Tensor) -> Any:
    """A result in which objects with tensors are replaced by nodes that pytree flattens and unflattens.

    Args:
        result: The result of a function.
        is_leaf: Whether an object stays as it is though it has items.
        kind: The class of tensors that count, as `FakeTensor`: an object from before a trace has none.

    Returns:
        The result itself if there are no such objects. One that comes twice stays as it is, once.

    >>> import dataclasses, torch
    >>> @dataclasses.dataclass
    ... class Output:
    ...     loss: torch.Tensor
    ...     steps: int
    >>> leaves, tree = pytree.tree_flatten(with_parts({"out": Output(torch.ones(2), 3)}))
    >>> pytree.tree_unflatten(leaves, tree)
    {'out': Output(loss=tensor([1., 1.]), steps=3)}
    """
    if not has_objects(pytree.tree_leaves(result, is_leaf=is_leaf)):
        return result
    seen: set[int] = set()

    def convert(value: Any, depth: int = 0) -> Any:
        if id(value) in seen or depth == _DEEP or not holds_tensors(value, kind) or (is_leaf and is_leaf(value)):
            return value
        seen.add(id(value))
        deeper = functools.partial(convert, depth=depth + 1)
        parts = {name: pytree.tree_map(deeper, item, is_leaf=is_leaf) for name, item in attributes_of(value).items()}
        return _Parts(type(value), parts)

    return pytree.tree_map(convert, result, is_leaf=is_leaf)


def has_objects(leaves: Iterable[Any]) -> bool:
    """Whether any leaf is an object that may be flattened."""
    return any(has_parts(type(leaf)) for leaf in leaves)


def holds_tensors(value: Any, kind: type[Any] = torch.Tensor, depth: int = 0) -> bool:
    """Whether an object that can be flattened has a tensor of a class in its attributes, or in theirs."""
    if depth > _DEEP or not has_parts(type(value)):
        return False
    leaves = pytree.tree_leaves(list(attributes_of(value).values()))
    return any(isinstance(leaf, kind) or holds_tensors(leaf, kind, depth + 1) for leaf in leaves)


@functools.cache
def has_parts(cls: type) -> bool:
    """Whether objects of a class are nothing but their attributes."""
    if issubclass(cls, _WHOLE) or cls in pytree.SUPPORTED_NODES:
        return False
    made_from = object if cls.__new__ is object.__new__ else types.SimpleNamespace
    if cls.__new__ is not made_from.__new__ or cls.__reduce__ is not made_from.__reduce__:
        return False
    if cls.__reduce_ex__ is not object.__reduce_ex__ or any(hasattr(cls, name) for name in ("__del__", "__setstate__")):
        return False
    return has_only_attributes(cls)
