"""Changes that a traced function makes to its arguments as objects: to their containers, shapes, gradients, attributes.

Updates of an argument's elements are operations, which the graph has. These changes are not, so they are refused.
"""

# Attributes of fake tensors are of any type, and some of torch's are private.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.errors import ContainerChangeError, TraceError, describe
from pygraph.guards.argument_containers import Change, ContainersBefore
from pygraph.guards.objects import with_parts
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.tracing.fake_arguments import FakeArguments


class ArgumentChanges:
    """Compares the arguments of a call with what they are now, before the function runs.

    Args:
        arguments: The arguments.
        args: The very containers of arguments that the function gets.
        kwargs: Those of keyword arguments.
    """

    def __init__(self, arguments: FakeArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments, self._args, self._kwargs = arguments, args, kwargs
        self._containers = ContainersBefore(args, kwargs)
        fakes = arguments.fakes
        self._specs = {index: TensorSpec.of(fake) for index, fake in fakes.items()}
        self._requiring_grad = {index: fake.requires_grad for index, fake in fakes.items()}
        self._attributes = {index: _attributes_of(fake) for index, fake in fakes.items()}

    def changed_attribute(self) -> str | None:
        """The first attribute that user code has stored on an argument, or deleted from it; None if there is none."""
        missing = object()
        for index, before in self._attributes.items():
            now = _attributes_of(self._arguments.fakes[index])
            for key in {*now, *before}:
                if now.get(key, missing) is not before.get(key, missing):
                    return f"an argument.{key}"
        return None

    def has_container(self, value: Any) -> bool:
        """Whether a value is one of the containers that the function gets."""
        return self._containers.name_of(value) is not None

    def check_results(self, call: str, results: Iterable[Any]) -> None:
        """Refuse a function that returns containers among its arguments: the caller gets the very same in eager.

        Raises:
            ContainerChangeError: It does.
        """
        names = [name for name in map(self._containers.name_of, results) if name is not None]
        if names:
            changed = dict.fromkeys(names, Change.CHANGES)
            raise ContainerChangeError(describe(call, f"it returns {' and '.join(names)}, which it is passed"), changed)

    def check(self, call: str) -> None:
        """Refuse a function that has changed its arguments' containers, shapes or gradients.

        Args:
            call: What errors call the function.

        Raises:
            ContainerChangeError: It has changed a list, a dict or a deque.
            TraceError: It has changed something else.
        """
        arguments = self._arguments
        changed = self._containers.changed()
        if changed:
            text = f"it changes {' and '.join(changed)}, which it is passed"
            raise ContainerChangeError(describe(call, text, remedy="Return a new one."), changed)
        leaves, tree = pytree.tree_flatten(with_parts((self._args, self._kwargs), kind=FakeTensor))
        if tree != arguments.tree or any(a is not b for a, b in zip(leaves, arguments.traced, strict=True)):
            raise TraceError(describe(call, "it changes a container among its arguments", remedy="Return a new one."))
        for index, fake in arguments.fakes.items():
            path = arguments.paths[index]
            if TensorSpec.of(fake) != self._specs[index]:
                raise TraceError(describe(call, f"it changes the shape or strides of {path}"))
            if fake.requires_grad != self._requiring_grad[index]:
                raise TraceError(describe(call, f"it changes whether {path} requires grad"))
            if fake.grad is not None:
                raise TraceError(
                    describe(call, f"it sets {path}.grad", remedy="Use torch.autograd.grad or torch.func.grad.")
                )


def stored_attribute(result: torch.Tensor) -> str | None:
    """Something that user code has stored on a tensor that it has made, which a replay would not; None if nothing."""
    if result.is_leaf and result.grad is not None:
        return "a gradient"
    known = _attributes_of_new_fake()
    stored = (key for key in vars(result) if key not in known and not _is_fakes_own(key))
    return next((f"an attribute {key!r}" for key in stored), None)


@functools.cache
def _attributes_of_new_fake() -> frozenset[str]:
    with no_dispatch_modes(), FakeTensorMode():
        return frozenset(vars(torch.empty(0, device="cpu")))


def _attributes_of(fake: FakeTensor) -> dict[str, Any]:
    """The attributes of a fake, without those that it stores for its own ends."""
    return {key: value for key, value in vars(fake).items() if not _is_fakes_own(key)}


def _is_fakes_own(key: str) -> bool:
    """Whether a fake stores an attribute for its own ends, such as the symbol that its ``item()`` has returned."""
    return key in _FAKES_OWN or key.lstrip("_").startswith(_MEMOS)


# Private; checked with torch 2.11 and 2.13.
_FAKES_OWN = frozenset(vars(FakeTensor))
_MEMOS = tuple(name for name in _FAKES_OWN if name.endswith("_memo"))
