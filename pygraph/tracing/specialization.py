"""Specialization: a function is recorded again, with more numbers baked in, until no value of a symbol is needed."""

# Functions take and return values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.guards.environment import Environment
from pygraph.ir.leaves import is_live_number
from pygraph.process.collection import no_collection
from pygraph.tracing.error_frames import preserved_dispatch_state
from pygraph.tracing.gradient_hooks import UnseenHooksError
from pygraph.tracing.interruptions import uninterrupted
from pygraph.tracing.number_uses import NumberUses
from pygraph.tracing.recording import Recording, record
from pygraph.tracing.torch_errors import in_words
from pygraph.tracing.turn import turn

# Each round bakes in at least one more number, so this is only reached by calls with many that matter in turn.
_MAX_SPECIALIZATIONS = 16


def record_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str
) -> tuple[Recording, frozenset[int]]:
    """Record a call as `record_specialized` does, with handlers of signals put off."""
    return uninterrupted(lambda: record_specialized(fn, args, kwargs, static, name))


def record_specialized(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str
) -> tuple[Recording, frozenset[int]]:
    """Record a call, with as many of its numbers baked in as the trace needs.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        static: Leaves of numbers that are baked in from the start.
        name: What errors call the function.

    Returns:
        The recording, and the leaves that are baked in.

    Raises:
        TraceError: The function cannot be traced.
    """
    with turn(), no_collection(), _saved_tensors_unseen(), preserved_dispatch_state():
        hooks, used = False, None
        for _ in range(_MAX_SPECIALIZATIONS):
            environment = Environment(fn, {"args": args, "kwargs": kwargs}, hooks=hooks)
            uses = NumberUses()
            asked = uses.asked
            try:
                recording = record(fn, args, kwargs, static, name, environment, uses)
                recording.used = used = used or uses.summary()
            except GuardOnDataDependentSymNode as error:  # what the trace itself asks of a size that data decides
                problem, remedy = in_words(error)
                raise TraceError(describe(f"trace({name})(…)", problem, remedy=remedy)) from error
            except UnseenHooksError:
                hooks = True
                continue
            except TraceError as error:
                asked |= _suspected_numbers(error, pytree.tree_leaves((args, kwargs)), static, asked)
                if asked <= static:
                    error.used = used or uses.summary()
                    raise
                used = used or uses.summary()
                static |= asked  # it may have failed because the answer was not a number's
                continue
            if recording.specialize <= static:
                return recording, static
            static |= recording.specialize
    raise TraceError(describe(f"trace({name})", "its arguments' values decide its operations without end"))


def _suspected_numbers(error: TraceError, leaves: list[Any], static: frozenset[int], asked: set[int]) -> set[int]:
    """The leaves of live numbers without whose symbols a function may not have failed."""
    numbers = {index: leaf for index, leaf in enumerate(leaves) if is_live_number(leaf)}
    if any(text in str(error) for text in _WANTS_INTEGERS) or _OF_LIVE_NUMBERS.search(str(error)):
        integers = {index for index, leaf in numbers.items() if isinstance(leaf, (int, np.integer))}
        return set(numbers) if integers <= static else integers
    if asked <= static and _may_be_for_a_symbol(error.__cause__):
        return set(numbers)
    return set()


# Messages of torch where an operation takes sizes as plain integers only (torch 2.11 to 2.13).
_WANTS_INTEGERS = ("SymIntArrayRef expected to contain", "dispatch_on_subclass called with NO overloaded args")


# Code in C names the class of what it is given, where it takes numbers only: "expected a long, but got LiveInt".
_OF_LIVE_NUMBERS = re.compile(r"\bLive(Int|Float|Bool)\b")


def _may_be_for_a_symbol(error: BaseException | None) -> bool:
    """Whether code may have failed as it was given a symbol for a number, as ``decimal.Decimal(k)`` does."""
    if isinstance(error, NotImplementedError):
        return True
    return isinstance(error, Exception) and not isinstance(error, (TraceError, RuntimeError))


@contextlib.contextmanager
def _saved_tensors_unseen() -> Generator[None, None, None]:
    """Keep tensors that autograd saves in a trace from saved-tensor hooks around the call: a checkpoint counts them."""
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]  # checked with torch 2.11 and 2.13
    if hooks._top_saved_tensors_default_hooks(True) is None:
        yield  # functions of torch.func refuse any hooks
        return
    with torch.autograd.graph.saved_tensors_hooks(_without_graph, lambda tensor: tensor):
        yield


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for a node to save: a node that saved its own result with its graph would refer to itself."""
    return tensor if tensor.grad_fn is None else tensor.detach()
