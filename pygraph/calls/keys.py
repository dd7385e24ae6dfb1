"""The cache key of a call: everything that its trace and its kernels depend on, besides what is read live."""

# Arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.calls.function import Call
from pygraph.guards.iterators import is_opaque
from pygraph.guards.object_classes import openable
from pygraph.guards.tensor_hooks import backward_hooks
from pygraph.guards.torch_settings import mode_key
from pygraph.ir.leaves import is_live_number, overlap_groups
from pygraph.ir.ranges import are_disjoint, holder, span_of
from pygraph.ir.value_keys import SIMPLE, Identity, Parts, form, module_key, structure_key, value_key
from pygraph.runtime.alignment import ALIGNMENT, alignment_of


class Kind(NamedTuple):
    """The part of a call's key that is known before its trace.

    Attributes:
        structure: A key of the structure of ``(args, kwargs)``.
        static: The positions of leaves that are static.
        leaves: A key of each leaf: a tensor's layout and alignment, a live number's type, or a static value.
        overlaps: How tensors share memory.
        settings: torch's settings.
    """

    structure: Hashable
    static: frozenset[int]
    leaves: tuple[Hashable, ...]
    overlaps: Hashable
    settings: tuple[Hashable, ...]


class Key(NamedTuple):
    """The key of a call in the cache.

    Attributes:
        kind: What is known before the trace.
        numbers: By leaf, the values of the numbers that decide what calls of this kind do, as their traces have shown,
            and the identities of the objects whose state calls change.
    """

    kind: Kind
    numbers: tuple[tuple[int, Hashable], ...]


class HasLeaves(Protocol):
    """A kind of call, of which one part has a key for each leaf."""

    @property
    def leaves(self) -> tuple[Hashable, ...]:
        """The keys of leaves."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all parts."""
        ...


class UnhashableError(TypeError):
    """An argument cannot be part of a key; ``leaf`` is its position."""

    def __init__(self, leaf: int) -> None:
        super().__init__(leaf)
        self.leaf = leaf


_LEAVES = (torch.Tensor, int, float, str, type(None))


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Hashable]:
    """The leaves of ``(args, kwargs)`` and a key of their structure; containers cost a walk, plain leaves do not."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not isinstance(leaf, _LEAVES):
            leaves, structure = pytree.tree_flatten((args, kwargs))
            return leaves, structure_key(structure)
    return leaves, (len(args), *kwargs)


def leaf_keys(leaves: Sequence[Any], static: frozenset[int], by_value: Collection[type] = ()) -> tuple[Hashable, ...]:
    """Per leaf: a tensor's class and layout, a live number's type, or the key of a value, see `object_key`."""
    keys: list[Hashable] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            address = 0 if leaf.is_cpu else leaf.data_ptr()  # graphs read host memory through copies only
            placed = ALIGNMENT if address % ALIGNMENT == 0 else alignment_of(address)
            # Also under no_grad: a function may ask for it, or enable gradients inside.
            grad = leaf.requires_grad and ("with hooks" if backward_hooks(leaf) else True)
            flags = (grad, leaf.is_inference())
            keys.append((leaf.__class__, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, placed, *flags))
        elif index not in static and is_live_number(leaf):
            keys.append(leaf.__class__)
        else:
            keys.append(object_key(leaf, index, by_value, is_marked=index in static))
    return tuple(keys)


def object_key(leaf: Any, index: int, by_value: Collection[type] = (), *, is_marked: bool) -> Hashable:
    """The key of an argument that is neither a tensor nor a number which is read at every call.

    Args:
        leaf: The argument.
        index: Its position among the leaves.
        by_value: Classes of modules that are told by their attributes, see `module_key`.
        is_marked: Whether the user has marked it as static: then its ``==`` and its hash decide, as in JAX. Else all
            that can be read of it decides, see `value_key`.

    Raises:
        UnhashableError: It cannot be part of a key.
    """
    kind = type(leaf)
    if kind in SIMPLE:
        return (kind, leaf)
    if kind in by_value:
        return module_key(leaf)
    if is_opaque(leaf):  # by whatever key, it gives something else at every call
        raise UnhashableError(index)
    if kind is not slice:
        try:
            hash(leaf)
        except TypeError:
            if type(key := value_key(leaf)) is not Identity or openable(kind) is None:
                raise UnhashableError(index) from None
            return key  # as of an object that has a hash, its attributes are compared where a trace has read them
    # Of numbers, 0.0 and -0.0 differ all the same, and NaN is itself.
    return (kind, leaf) if is_marked and not issubclass(kind, (float, complex, np.number)) else value_key(leaf)


def form_of(kind: HasLeaves) -> object:
    """The part that kinds of calls have in common which pass objects without a value, as one that each call makes.

    It is the kind itself where there are no such objects.
    """
    formed = tuple(map(_form, kind.leaves))
    return kind if formed == kind.leaves else tuple(formed if part is kind.leaves else part for part in kind)


def objects_by_value(kind: Kind) -> frozenset[int]:
    """Positions of the leaves that are objects, and equal to others of which all that can be read is the same."""
    return frozenset(index for index, key in enumerate(kind.leaves) if isinstance(key, Parts))


def other_objects(kind: HasLeaves, earlier: HasLeaves) -> frozenset[int]:
    """Positions of the leaves that are other objects than in an earlier kind of calls of the same form."""
    leaves = enumerate(zip(kind.leaves, earlier.leaves, strict=True))
    return frozenset(index for index, (key, before) in leaves if isinstance(key, Identity) and key != before)


def _baked_key(key: Hashable, leaf: Any) -> Hashable:
    """The key of a leaf whose value decides what calls of its kind do, given its part of the kind."""
    return Identity(leaf) if isinstance(key, Parts) else value_key(leaf)


def _form(leaf: Hashable) -> Hashable:
    """A leaf's key without the object, if it is that of an object without a value which the user has marked."""
    if type(leaf) is tuple and len(leaf) == 2 and type(leaf[1]) not in SIMPLE:
        return leaf[0] if type(leaf[1]).__hash__ is object.__hash__ else leaf
    return form(leaf)


def overlap_key(leaves: Sequence[Any]) -> Hashable:
    """How the tensors share memory: which leaves are the same object or overlap, and at what distance.

    Also whether one storage holds all that overlaps: without one there is no view that stands for all of it.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) < 2 or are_disjoint(tensors) or not (groups := overlap_groups(leaves)):
        return ()
    key: list[Hashable] = []
    for group in groups:
        members = [leaves[index] for index in group]
        span = span_of(members)
        places = tuple(
            (index, leaves[index].data_ptr() - span[0], next(i for i in group if leaves[i] is leaves[index]))
            for index in group
        )
        key.append((places, holder(members, span) is not None))
    return tuple(key)


class Keys:
    """The keys of calls of one function.

    Args:
        static_leaves: The positions of leaves that are static, of ``(args, kwargs)``.
        baked: By kind of call, the leaves whose numbers decide what such calls do.
        pools: The memory of the function's graphs, by device.

    Attributes:
        by_value: Classes of modules that are told by their attributes, as calls are passed others each time.
    """

    def __init__(
        self,
        static_leaves: Callable[[tuple[Any, ...], dict[str, Any]], frozenset[int]],
        baked: Mapping[Kind, frozenset[int]],
        pools: Mapping[torch.device, object],
    ) -> None:
        self.static_leaves, self._baked, self._pools = static_leaves, baked, pools
        self.by_value: set[type] = set()

    def of(self, call: Call) -> Key:
        """The key of a call.

        Raises:
            UnhashableError: An argument cannot be part of one.
        """
        leaves, static = call.leaves, self.static_leaves(call.args, call.kwargs)
        settings = mode_key(self.device_type(leaves))
        kind = Kind(call.structure, static, leaf_keys(leaves, static, self.by_value), overlap_key(leaves), settings)
        baked = self._baked.get(kind)
        return Key(kind, tuple([(i, _baked_key(kind.leaves[i], leaves[i])) for i in sorted(baked)]) if baked else ())

    def live_numbers(self, key: Key, call: Call) -> frozenset[int]:
        """Positions of the leaves that a call of this kind reads as numbers."""
        static = self.leaves_by_value(key, call)
        return frozenset(i for i, leaf in enumerate(call.leaves) if i not in static and is_live_number(leaf))

    def leaves_by_value(self, key: Key, call: Call) -> frozenset[int]:
        """Positions of the leaves whose values are part of the key: static ones, and numbers that decide."""
        return self.static_leaves(call.args, call.kwargs) | self._baked.get(key.kind, frozenset())

    def device_type(self, leaves: Sequence[Any]) -> str:
        """The accelerator whose autocast setting matters: that of the first tensor, or of what is closed over."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                return leaf.device.type
        pools = tuple(self._pools)  # at once: another thread may clear the cache
        return pools[0].type if pools else _default_accelerator()


def _default_accelerator() -> str:
    """The type of the machine's accelerator, or of the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
