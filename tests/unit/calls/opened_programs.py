"""Programs with objects and NumPy arrays among their arguments, each with the number of graphs that all calls need."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass
class Batch:
    x: Any
    weight: Any = 1.0
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "a"


class Plain:
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    @property
    def rows(self) -> Any:
        return self.x.shape[0]

    def halved(self) -> Plain:
        self.x: Any = self.x * 0.5
        return self


class Slots:
    __slots__ = ("count", "x")

    def __init__(self, x: Tensor, count: int) -> None:
        self.x, self.count = x, count


class Keyed(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Store:
    def __init__(self, parent: Any) -> None:
        self.__dict__["mapping"], self.__dict__["parent"] = {}, weakref.ref(parent)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["mapping"][name]
        except KeyError:
            raise AttributeError(name) from None


class Data:
    """A graph as those of PyG: attributes lie in a store, which refers back weakly; one is a class."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__["attribute_class"], self.__dict__["store"] = Frozen, Store(self)
        for name, value in attributes.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "store":
            raise AttributeError(name)
        return getattr(self.store, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.store.__dict__["mapping"][name] = value

    def __eq__(self, other: object) -> bool:
        return id(self) == id(other)

    def __repr__(self) -> str:
        return f"Data at {id(self)}"


class Lazy:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    @functools.cached_property
    def doubled(self) -> Tensor:
        return self.x * 2


class Encoding:
    """An object of C's, as those of tokenizers: it is itself alone."""

    __slots__ = ("__weakref__", "ids")

    def __init__(self, ids: int) -> None:
        self.ids = ids

    def __reduce__(self) -> Any:
        return Encoding, (self.ids,)


class Encodings(collections.UserDict[Any, Any]):
    def __init__(self, data: dict[str, Any], encodings: list[Encoding]) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getitem__(self, key: Any) -> Any:
        return self.data[key] if isinstance(key, str) else self._encodings[key]


class Filter:
    def __init__(self, x: Tensor) -> None:
        self.x, self.steps = x, 0

    def step(self, z: Tensor) -> Tensor:
        self.x = self.x * 0.9 + z
        self.steps += 1
        return self.x.sum() * self.steps


class Program(NamedTuple):
    """A function, what makes the arguments of a call by its number, and how many graphs all calls need; -1 for any."""

    function: Callable[..., Any]
    arguments: Callable[[Callable[[int], Tensor], int], tuple[Any, ...]]
    captures: int


def swap(batch: Batch) -> Tensor:
    batch.x, batch.weight = batch.weight, batch.x
    return batch.x - batch.weight


def write(batch: Batch) -> Tensor:
    batch.more = batch.x * 2
    batch.weight = batch.weight + 1
    return batch.more * batch.weight


def update(batch: Batch) -> Any:
    batch.x.add_(1)
    return batch.weight * 2


def append(batch: Batch) -> Any:
    batch.x.append(batch.x[0] * 2)
    return batch.x[-1] + 1


def delete(plain: Plain) -> Any:
    x = plain.x
    del plain.x
    return x * 2


def put(batch: Batch) -> Tensor:
    batch.more["new"] = batch.x * 2
    del batch.more["old"]
    return batch.x + 1


def fill(keyed: Keyed) -> Tensor:
    keyed.y = keyed.x + 1
    return keyed.x * keyed["weight"]


def returned(batch: Batch) -> Any:
    batch.more = batch.x * 2
    return {"batch": batch, "more": [batch.more, batch]}


def same(a: Batch, b: Batch) -> Any:
    return a.x * 2 if a is b else a.x + b.x


def listed(batch: Batch) -> Any:
    return sum(batch.x) * batch.more["k"]


def shown(a: np.ndarray, x: Tensor) -> Tensor:
    return torch.as_tensor(a, device=x.device).reshape(a.shape[::-1]).sum() * len(a) * a.ndim * x


def cyclic(make: Callable[[int], Tensor], i: int) -> tuple[Any, ...]:
    first = Plain(x=make(i))
    first.other = Plain(x=make(i + 1), other=first)
    return (first,)


def overlapping(make: Callable[[int], Tensor], i: int) -> tuple[Any, ...]:
    x = make(i)
    return (Batch(x, x[1:]),)


def array(i: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(i).randn(*shape).astype(np.float32)


PROGRAMS: dict[str, Program] = {
    "dataclass": Program(lambda b: b.x * b.weight, lambda make, i: (Batch(make(i), float(i)),), 1),
    "namespace": Program(lambda b: b.x * b.k, lambda make, i: (types.SimpleNamespace(x=make(i), k=i),), 1),
    "plain": Program(lambda b: b.x * 2 / b.rows, lambda make, i: (Plain(x=make(i), y=None),), 1),
    "slots": Program(lambda b: b.x * b.count, lambda make, i: (Slots(make(i), i + 1),), 1),
    "frozen": Program(lambda b: b.x * 2 + 1, lambda make, i: (Frozen(make(i)),), 1),
    "mapping": Program(
        lambda b: {k: v * 2 for k, v in b.items()}, lambda make, i: (collections.UserDict(x=make(i), k=float(i)),), 1
    ),
    "dict": Program(fill, lambda make, i: (Keyed(x=make(i), weight=float(i)),), 1),
    "graph": Program(
        lambda b: b.x * b.x.size(0) + b.store.parent().edges, lambda make, i: (Data(x=make(i), edges=make(i + 1)),), 1
    ),
    "nested": Program(listed, lambda make, i: (Batch([make(i), make(i + 1)], 1.0, {"k": make(i)}),), 1),
    "cyclic": Program(lambda b: b.other.x * b.other.other.x, cyclic, 1),
    "in a list": Program(
        lambda batches: sum(b.x * b.weight for b in batches),
        lambda make, i: ([Batch(make(i), i + 1.0), Batch(make(i + 1), 2.0)],),
        1,
    ),
    "class": Program(
        lambda b: b.x * 2 if isinstance(b, Batch) and type(b) is Batch else b.x, lambda make, i: (Batch(make(i)),), 1
    ),
    "flag": Program(
        lambda b: b.x * 2 if b.more == "a" else b.x * 3, lambda make, i: (Batch(make(i), 1.0, "ab"[i % 2]),), 2
    ),
    "optional": Program(
        lambda b: b.x * 2 if b.more is None else b.x + b.more,
        lambda make, i: (Batch(make(i), 1.0, make(i + 1) if i % 2 else None),),
        2,
    ),
    "decision": Program(
        lambda b: b.x * 2 if b.x.sum() > 0 else b.x * 3, lambda make, i: (types.SimpleNamespace(x=make(0) + i),), -1
    ),
    "unread texts": Program(
        lambda b: b.x * 2 + 1, lambda make, i: (Plain(x=make(i), ids=[f"a{i}", f"b{i}"], label=f"{i}"),), 1
    ),
    "unread objects": Program(
        lambda b: b["x"] * 2 + 1, lambda make, i: (Encodings({"x": make(i)}, [Encoding(i), Encoding(i)]),), 1
    ),
    "function": Program(
        lambda b: b.call(b.x) + 1, lambda make, i: (types.SimpleNamespace(x=make(i), call=torch.sin),), 1
    ),
    # What is written, and is the caller's own.
    "written": Program(write, lambda make, i: (Batch(make(i), float(i)),), 1),
    "swapped": Program(swap, lambda make, i: (Batch(make(i), make(i + 1)),), 1),
    "deleted": Program(delete, lambda make, i: (Plain(x=make(i), y=1),), 1),
    "item": Program(put, lambda make, i: (Batch(make(i), 1.0, {"old": 1, "k": make(i)}),), 1),
    "list": Program(append, lambda make, i: (Batch([make(i)]),), 1),
    "lazy": Program(lambda b: b.doubled + b.doubled, lambda make, i: (Lazy(make(i)),), 1),
    "in place": Program(update, overlapping, 1),
    "returned": Program(returned, lambda make, i: (Batch(make(i)),), 1),
    "method": Program(lambda b: b.halved().halved(), lambda make, i: (Plain(x=make(i)),), 1),
    # Which is which.
    "twice": Program(
        same, lambda make, i: (lambda b: (b, b) if i % 2 else (b, Batch(make(i + 1))))(Batch(make(i))), 2
    ),
    "one tensor": Program(
        lambda b: b.x * 2 if b.x is b.weight else b.x + b.weight,
        lambda make, i: (lambda x: (Batch(x, x if i % 2 else make(i + 1)),))(make(i)),
        2,
    ),
    # Arrays.
    "from_numpy": Program(lambda a, x: torch.from_numpy(a).to(x.device) * x, lambda make, i: (array(i, 4), make(i)), 1),
    "tensor": Program(
        lambda a, x: torch.tensor(a, dtype=torch.float64, device=x.device) * x,
        lambda make, i: (array(i, 4), make(i)),
        1,
    ),
    "shape": Program(shown, lambda make, i: (array(i, 2, 3), make(i)), 1),
    "index": Program(
        lambda a, x: x[torch.as_tensor(a).to(x.device)] * 2,
        lambda make, i: (np.random.RandomState(i).randint(0, 3, 4), make(i)),
        1,
    ),
    "array in a dataclass": Program(
        lambda b: torch.from_numpy(b.x).to(b.more.device) * b.weight * b.more,
        lambda make, i: (Batch(array(i, 4), float(i), make(i)),),
        1,
    ),
    "arrays in a list": Program(
        lambda arrays, x: torch.stack([torch.from_numpy(a) for a in arrays]).to(x.device) * x,
        lambda make, i: ([array(i, 4), array(i + 1, 4)], make(i)),
        1,
    ),
    "returned array": Program(lambda a, x: (a, x * 2 + 1), lambda make, i: (array(i, 4), make(i)), 1),
}  # fmt: skip
