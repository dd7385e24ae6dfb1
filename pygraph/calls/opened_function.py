"""A function of objects that were taken apart: it is traced on replicas that are made of their leaves."""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.errors import ContainerChangeError, TraceError
from pygraph.guards.argument_containers import Change, ChangingContainers, ContainersBefore
from pygraph.guards.objects import with_parts
from pygraph.guards.opened import OpenedCall, is_opened
from pygraph.guards.replicas import Owners, Replicas, Write, with_owners
from pygraph.ir.constants import IMMUTABLE
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.ir.structures import unflatten
from pygraph.runtime.node_errors import not_without_effects
from pygraph.tracing.failing_operations import note_failures
from pygraph.tracing.function_kinds import Renaming
from pygraph.tracing.live_arrays import LiveArray
from pygraph.tracing.live_lists import LiveList
from pygraph.tracing.results import stays_whole
from pygraph.tracing.unread_values import UnreadValue


class AsItWas:
    """The result of a call that has run as it is, on the caller's own objects.

    Args:
        result: The result.
    """

    __slots__ = ("result",)

    def __init__(self, result: Any) -> None:
        self.result = result


class Effects(NamedTuple):
    """The effects of a run of a function.

    Attributes:
        writes: Where it has stored something on objects of the caller's.
        stored: Objects of the caller's among what it has stored.
        returned: Objects of the caller's in its result.
    """

    writes: tuple[Write, ...]
    stored: Owners
    returned: Owners


class OpenedFunction(Renaming):
    """A function that takes `Opened` objects among its arguments.

    Args:
        fn: The function of the objects themselves.
        name: What reports call it.
        changing: The containers that its calls are known to change.

    Attributes:
        effects: What its runs have left behind.
    """

    def __init__(self, fn: Callable[..., Any], name: str, changing: ChangingContainers) -> None:
        self.effects = [Effects((), (), ())]
        self._changing = changing
        self.__name__ = name
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Returns:
            Which of ``effects`` it has, the values that are stored, and its result; `AsItWas` of arguments of a call,
            and not of what a trace has put in their place.
        """
        keyed, tree = flatten_with_path((args, kwargs), is_leaf=is_opened)
        call = call_of(leaf for _, leaf in keyed)
        if call is not None:
            with not_without_effects():
                return AsItWas(self.__wrapped__(*call.args, **call.kwargs))
        note_failures()
        problems: list[str] = []
        made = Replicas(
            functools.partial(_array, problems), _numbers, lambda name, cls: UnreadValue(name, cls, problems)
        )
        leaves = [made.make(leaf, argument_path(path)) if is_opened(leaf) else leaf for path, leaf in keyed]
        given = unflatten(leaves, tree)
        containers = ContainersBefore(*given)
        made.watch()
        try:
            result = self.__wrapped__(*given[0], **given[1])
        except Exception:
            if not made.read:
                raise
            result = None
        if made.read:  # also if it has caught the error
            names = " and ".join(sorted(made.read))
            text = f"it reads {names}, of which nothing was to be read"
            raise ContainerChangeError(text, made.read)
        if problems:
            raise TraceError(problems[0])
        _check_containers(containers.changed(made.is_one), made, self._changing)
        writes, values = made.writes()
        _check_shared(values, result, made, containers)
        values, stored = made.replaced(values)
        _check_storable(writes, values)
        result, returned = made.replaced(result)
        made.put_back()
        made.check_references()
        return self._number(Effects(writes, stored, returned)), values, result

    @property
    def leaves_something(self) -> bool:
        """Whether some of its calls store something on objects of the caller's."""
        return any(effects.writes for effects in self.effects)

    def _number(self, effects: Effects) -> int:
        if effects not in self.effects:
            self.effects.append(effects)
        return self.effects.index(effects)

    def result_of(self, call: OpenedCall, number: int, values: Sequence[Any], result: Any) -> Any:
        """The result of a call, after what it leaves behind is stored on the caller's own objects.

        Args:
            call: The call.
            number: Which of ``effects`` it has.
            values: What is stored.
            result: Its result, without objects of the caller's.
        """
        writes, stored, returned = self.effects[number]
        for write, value in zip(writes, with_owners(values, stored, call.owners), strict=True):
            write.store(call.owners[write.number], value)
        return with_owners(result, returned, call.owners)

    def path(self, path: str) -> str:
        """The name that reports give to an argument or a result of this function."""
        if path.startswith("result[2]"):
            return f"result{path.removeprefix('result[2]')}"
        return "what is stored in an argument" if path.startswith("result[") else path


def call_of(leaves: Any) -> OpenedCall | None:
    """The call that objects among the leaves are passed in; None if they were put together of other leaves."""
    return next((opened.call for opened in filter(is_opened, leaves) if opened.call is not None), None)


def _array(problems: list[str], name: str, dtype: str, tensor: torch.Tensor) -> Any:
    """An array of a tensor that shows its memory; a live one, where the tensor has no values."""
    return tensor.numpy() if _has_values(tensor) else LiveArray(name, dtype, tensor, problems.append)


def _numbers(name: str, cls: type, tensor: torch.Tensor, note_read: Callable[[], object]) -> Any:
    """A list of the numbers in a tensor; a live one, where the tensor has no values."""
    return tensor.tolist() if _has_values(tensor) else LiveList(name, cls, tensor, note_read)


def _has_values(tensor: torch.Tensor) -> bool:
    return not (isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor))


def _check_containers(changed: dict[str, Change], made: Replicas, changing: ChangingContainers) -> None:
    """Refuse changes of containers that were not taken apart, or not as lists that grow.

    Raises:
        ContainerChangeError: There are some that were not known.
    """
    grown = {name: Change.GROWS for name in made.grown() if changing.is_new(name, Change.GROWS)}
    found = {**changed, **grown}
    if found:
        raise ContainerChangeError(f"it changes {' and '.join(found)}, which it is passed", found)


def _check_storable(writes: Sequence[Write], values: Sequence[Any]) -> None:
    """Refuse to store what is no tensor, number or object of the caller's, as calls would share it."""
    for write, value in zip(writes, values, strict=True):
        for one in pytree.tree_leaves(with_parts(value, kind=FakeTensor)):
            if one is not ... and not isinstance(one, (torch.Tensor, torch.SymInt, torch.SymFloat, *IMMUTABLE)):
                raise TraceError(f"it stores a {type(one).__name__} in {write.name}")


def _check_shared(values: Sequence[Any], result: Any, made: Replicas, containers: ContainersBefore) -> None:
    """Refuse to store a container in two places, or to store and to return it: each would get one of its own.

    Raises:
        ContainerChangeError: It is one of the caller's, which is to be taken apart as well.
        TraceError: It is another one.
    """
    stored, returned = list(_changeable(values, made)), list(_changeable([result], made))
    name = next(filter(None, map(containers.name_of, (*stored, *returned))), None)
    if name is not None:
        raise ContainerChangeError(f"it stores or returns {name}, which it is passed", {name: Change.CHANGES})
    is_known = len({*map(id, stored)}) < len(stored) or not {*map(id, stored)}.isdisjoint(map(id, returned))
    if is_known or any(map(made.has_tuple, stored)) or any(map(stays_whole, (*stored, *returned))):
        raise TraceError("it stores a container or an object in several places")


def _changeable(value: Any, made: Replicas) -> Iterator[Any]:
    """The containers and objects in a value that are not the caller's."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, _ITERABLE) else ():
        if not isinstance(part, (torch.Tensor, torch.SymInt, torch.SymFloat, *IMMUTABLE)) and not made.is_one(part):
            if type(part) is not tuple or part:  # of those without items there is one
                yield part
            if stays_whole(part):
                continue
            yield from _changeable(part, made)


_ITERABLE = (list, tuple, collections.deque)
