"""Values that a traced function returns: flattened, with paths, and checked to be what a Program can return."""

# Results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator, Iterable, Set
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from pygraph.errors import GradientError, SpentGraphError, TraceError, describe
from pygraph.guards.argument_containers import is_container
from pygraph.guards.objects import has_parts, with_parts
from pygraph.ir.paths import flatten_with_path
from pygraph.tracing.argument_changes import stored_attribute
from pygraph.tracing.computed_floats import without_source
from pygraph.tracing.gradients import is_spent
from pygraph.tracing.iterators import unwrapped
from pygraph.tracing.live_arrays import with_array_results


@dataclasses.dataclass
class Results:
    """A function's result, flattened.

    Attributes:
        leaves: The values; a comparison of numbers is the bool that it is.
        paths: What errors and reports call each, as ``result['loss']``.
        tree: The pytree of the result.
    """

    leaves: list[Any]
    paths: list[str]
    tree: pytree.TreeSpec

    @classmethod
    def of(cls, result: Any, symbols: Set[Any]) -> Results:
        """Flatten a result.

        Args:
            result: What the function has returned.
            symbols: The symbols of the numbers that were passed.
        """
        check_shared(result)
        result = with_array_results(result, stays_whole)
        result = with_parts(result, stays_whole, FakeTensor)
        for size in pytree.tree_leaves(result, is_leaf=lambda value: isinstance(value, torch.Size)):
            if isinstance(size, torch.Size) and free_symbols(size) <= symbols:
                torch.Size(map(int, size))  # on which the trace depends then: of symbols, torch makes a tuple
        keyed, tree = flatten_with_path(result, is_leaf=stays_whole)
        found = [without_source(unwrapped(leaf)) for _, leaf in keyed]
        # The value of a comparison is needed.
        leaves = [bool(leaf) if isinstance(leaf, torch.SymBool) else leaf for leaf in found]
        return cls(leaves, ["result" + pytree.keystr(path) for path, _ in keyed], tree)

    def check(self, call: str, arguments: Iterable[torch.Tensor], *, inference: bool) -> None:
        """Refuse tensors that are more than a tensor's elements.

        Args:
            call: What errors call the function.
            arguments: The fakes of its arguments, which it may return.
            inference: Whether the call is made in inference mode.

        Raises:
            SpentGraphError: All results that require grad have been differentiated already.
            GradientError: A result requires grad.
            TraceError: A result is a new parameter, has attributes, or is where there are no elements.
        """
        passed = {id(argument) for argument in arguments}
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if isinstance(leaf, FakeTensor):
                self._check_tensor(call, path, leaf, is_new=id(leaf) not in passed, inference=inference)

    def _check_tensor(self, call: str, path: str, leaf: FakeTensor, *, is_new: bool, inference: bool) -> None:
        if isinstance(leaf, torch.nn.Parameter) and is_new:
            raise TraceError(describe(call, f"{path} is a new torch.nn.Parameter", expected="a plain tensor"))
        if leaf.is_inference() and not inference:
            remedy = "Use torch.no_grad() inside it, or torch.inference_mode() around the call."
            raise TraceError(
                describe(call, f"{path} is made in inference mode", expected="an ordinary tensor", remedy=remedy)
            )
        if leaf.is_meta:
            raise TraceError(describe(call, f"{path} is on meta", expected="a tensor with elements"))
        stored = stored_attribute(leaf) if is_new else None
        if stored is not None:
            raise TraceError(describe(call, f"{path} carries {stored}", expected="a tensor that is only that"))
        if leaf.requires_grad:
            if any(map(is_container, self.leaves)) and not self._are_spent():
                raise TraceError(
                    describe(
                        call, "it returns a container that was there before the call, and tensors that require grad"
                    )
                )
            raise (SpentGraphError if self._are_spent() else GradientError)(
                describe(call, f"{path} requires grad", expected="no gradient outside the call",
                         remedy="Call it under torch.no_grad(), or take the gradient inside it.")
            )  # fmt: skip

    def _are_spent(self) -> bool:
        """Whether every result that requires grad has been differentiated, without its graph being retained."""
        return all(is_spent(leaf) for leaf in self.leaves if isinstance(leaf, FakeTensor) and leaf.requires_grad)


def graph_values(leaves: Iterable[Any]) -> list[Any]:
    """The leaves of a result that are values of the graph: tensors and symbols."""
    return [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))]


def stays_whole(value: Any) -> bool:
    """Whether a value in a result is not taken apart: it would be put together again as another one.

    That is a torch.Size of numbers, of which torch would make a tuple, and in a trace a list, a dict, a deque or an
    object that was there before the call: the caller gets the very same.
    """
    return is_known_size(value) or ((is_container(value) or has_parts(type(value))) and _is_from_before.get()(value))


def is_known_size(value: Any) -> bool:
    """Whether a value is a torch.Size of numbers, which torch would put together again as a tuple."""
    return isinstance(value, torch.Size) and not any(isinstance(size, torch.SymInt) for size in value)


_is_from_before: contextvars.ContextVar[Callable[[Any], bool]] = contextvars.ContextVar(
    "_is_from_before", default=lambda _: False
)


@contextlib.contextmanager
def containers_from_before(is_from_before: Callable[[Any], bool]) -> Generator[None, None, None]:
    """Trace a function: say which containers were there before the call."""
    token = _is_from_before.set(is_from_before)
    try:
        yield
    finally:
        _is_from_before.reset(token)


def check_shared(result: Any) -> None:
    """Refuse a result that has one list, dict or deque in several places: each would get one of its own.

    Raises:
        TraceError: It has.
    """
    seen, queue = set[int](), [result]
    while queue:
        value = queue.pop()
        if stays_whole(value):
            continue
        if is_container(value):
            if id(value) in seen:
                raise TraceError(f"it returns or stores one {type(value).__name__} in several places")
            seen.add(id(value))
            queue += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            queue += value
