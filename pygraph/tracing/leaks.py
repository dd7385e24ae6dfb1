"""Leaks of a trace: tensors of it that are still alive afterwards are removed from the objects that hold them.

A function that is traced computes with fake tensors and symbols. Those that it stores in its closure, its module or in
objects there are put back by `pygraph.guards.environment`. But a cache of ``functools``, a list of records of
``logging``, or anything else that is not reached from there, would keep a fake tensor, which fails far away and later.

Every fake tensor refers to the mode that it was made under, so a weak reference to the mode tells whether any is left.
If one is, the garbage collector tells who holds it, and which objects the trace has made: the reference to clear is one
from an older object to a young one.
"""

# Objects of any type are looked at here, and some private parts of torch.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from time import sleep
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # checked with torch 2.11 and 2.13
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pygraph.errors import StateChangeError, describe
from pygraph.process.collection import collect, no_collection
from pygraph.tracing.leak_search import LeakSearch
from pygraph.tracing.number_hashes import hashes_given
from pygraph.tracing.reference_clearing import clear_reference
from pygraph.tracing.references import LIBRARIES, name_of, packages_of
from pygraph.tracing.settings import is_alone
from pygraph.tracing.turn import turn
from pygraph.tracing.young_objects import YoungObjects

R = TypeVar("R")

# An object may be held by two others, or by one that is held itself.
_ROUNDS = 5

_PAUSES = (0.0, 0.001, 0.01, 0.1, 0.5)
"""Seconds, one after the other, in which another thread may let go of what it holds in C++: autograd's thread says that
a backward is over before it frees the nodes."""


class _Trace(threading.local):
    """The trace under way in a thread.

    Attributes:
        modes: Its modes of fake tensors, and its symbols; None outside a trace.
        shape_envs: What its modes know of symbols.
        lines: Its tensors, with the user's lines that have made them.
        young: The objects that were made since it began.
        alone: Whether there was no other thread then, which would make some of these.
    """

    modes: list[weakref.ref[Any]] | None = None
    shape_envs: list[weakref.ref[ShapeEnv]]
    lines: list[tuple[weakref.ref[Any], str]]
    young: YoungObjects
    alone: bool


_trace = _Trace()


def remember(mode: FakeTensorMode) -> None:
    """Have the tensors of a mode looked for when the trace under way is over."""
    if _trace.modes is not None:
        _trace.modes.append(weakref.ref(mode))
        if mode.shape_env is not None:
            _trace.shape_envs.append(weakref.ref(mode.shape_env))


def remember_numbers() -> None:
    """Have the symbols that are traced now looked for when the trace is over. Private; checked with torch 2.13."""
    tracing = get_proxy_mode()
    if _trace.modes is not None and tracing is not None:
        _trace.modes += [weakref.ref(node) for node in tracing.tracer.symnode_tracker.sym_node_dict]


def remember_line(tensor: Any, line: str | None) -> None:
    """Note which of the user's lines has made a tensor, for errors."""
    if line is not None and _trace.modes is not None and isinstance(tensor, torch.Tensor):
        _trace.lines.append((weakref.ref(tensor), line))


def leaving_nothing(call: str, run: Callable[[], R]) -> R:
    """Trace, and have nothing of the trace left but what is returned, which holds no tensors of the trace.

    Args:
        call: What errors call the trace.
        run: Traces. Its variables are gone when it returns.

    Raises:
        StateChangeError: Something was left. The references to it have been cleared.
    """
    # Not imported first while it runs: its modules would come to be among what has changed.
    import torch._dynamo  # noqa: F401  # pyright: ignore

    if _trace.modes is not None:
        return run()  # as part of a larger trace, which looks when it is over
    _trace.modes, _trace.shape_envs, _trace.lines, _trace.alone = [], [], [], is_alone()
    try:
        with turn(), no_collection(), _unprofiled(), hashes_given():
            _trace.young = YoungObjects()
            with _trace.young.tracked():
                result: list[R] = []
                try:
                    result.append(run())
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # whose variables hold what the trace has made
                    _remove_leaks(result, failed=True)
                    raise
                left = _remove_leaks(result, failed=False)
    finally:
        _trace.modes, _trace.shape_envs, _trace.lines = None, [], []
    if left is None:
        return result[0]
    names, line = left
    error = StateChangeError(
        describe(call, f"it stores a tensor or number of its own in {' and in '.join(names)}",
                 expected="no lasting change but to tensors in place", source=line,
                 remedy="Return it, or compute it before.")
    )  # fmt: skip
    error.fills = True
    raise error


@contextlib.contextmanager
def _unprofiled() -> Generator[None, None, None]:
    """Keep what is inside from this thread's profiler, whose events may refer to tensors as long as it runs.

    With ``record_shapes=True``, its references in C++ keep the values of functional tensors alive. Nor are operations
    on fakes of interest in a profile. Private; checked with torch 2.11 and 2.13.
    """
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if not autograd._profiler_enabled():
        yield
        return
    autograd._enable_record_function(False)
    try:
        yield
    finally:
        autograd._enable_record_function(True)


def _remove_leaks(result: list[Any], *, failed: bool) -> tuple[list[str], str | None] | None:
    """Clear the references to what is left; returns what users call them, and the line that has made it.

    Args:
        result: The trace. It is dropped if something was left: what it notes of the function may be of that.
        failed: Whether there is none, as the trace has failed.
    """
    made = _trace.modes or []
    _forget_symbols()
    if _are_gone(made):
        return None
    young = _trace.young.collect()
    if _are_gone(made):
        return None
    search = LeakSearch(made, young())
    if not search.may_find_any():
        return None  # the mode alone is alive, as part of something that holds no tensors
    with _trace.young.all_unfrozen():
        return _clear_references(search, made, result, failed=failed)


def _clear_references(
    search: LeakSearch, made: Sequence[weakref.ref[Any]], result: list[Any], *, failed: bool
) -> tuple[list[str], str | None] | None:
    """Clear the references to what is left, when it is known that something is, and that it is no young garbage."""
    names: dict[str, None] = {}
    line: str | None = None
    stays = nodes = False
    is_collected = False  # not where another thread records a graph: then garbage may look like something that is held
    for _ in range(_ROUNDS):
        found = search.look(nodes=nodes)
        line = line or search.line(_trace.lines)
        packages = [packages_of(reference) for reference in found]
        stays = stays or any(names & LIBRARIES for names in packages)
        found = [reference for reference, names in zip(found, packages, strict=True) if not names & LIBRARIES]
        packages = [names for names in packages if not names & LIBRARIES]
        called = [None if names else name_of(reference) for reference, names in zip(found, packages, strict=True)]
        cleared: list[bool] = []
        for name, reference in zip(called, found, strict=True):
            if any(item is reference.referent for item in gc.get_referents(reference.referrer)):  # not cleared yet
                is_cleared = clear_reference(reference)
                cleared.append(is_cleared)
                if name is not None:
                    names[name + ("" if is_cleared else " (from where it could not be taken)")] = None
        stays = stays or not all(cleared)
        is_done = not any(cleared) and (nodes or not _trace.alone)  # else another look may find who else holds it
        nodes = nodes or (not any(cleared) and _trace.alone)
        reference = found = None
        search.forget()
        if names:
            result.clear()
        if not _are_gone(made) and not (is_done and is_collected):
            is_collected = collect()
        if is_done or _are_gone(made) or not search.may_find_any():
            break
    if is_collected and not (names or stays or failed) and not _are_gone_soon(made, search):
        names["something that does not tell Python what it holds"] = None
    return (list(names), line) if names else None


def _are_gone_soon(made: Sequence[weakref.ref[Any]], search: LeakSearch) -> bool:
    """Whether tensors and symbols of the trace, which nobody is known to hold, are gone after some pauses."""
    for seconds in _PAUSES:
        sleep(seconds)
        is_found = not _are_gone(made) and search.finds_any()
        search.forget()
        if not is_found:
            return True
    return False


def _forget_symbols() -> None:
    """Empty caches of fake results by symbols: torch keeps some of what knows of symbols in caches of its own.

    The symbols would be looked for among all objects of the process. Private; checked with torch 2.11 and 2.13.
    """
    for reference in _trace.shape_envs:
        shape_env = reference()
        if shape_env is not None:
            shape_env.fake_tensor_cache.clear()


def _are_gone(made: Iterable[weakref.ref[Any]]) -> bool:
    return all(reference() is None for reference in made)
