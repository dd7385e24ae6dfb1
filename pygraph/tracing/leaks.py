"""Nothing of a trace outlives it: its tensors that are still alive afterwards are taken out of what holds them.

While a function is traced it computes with fakes of tensors and symbols of numbers. What it stores of them in its
closure, its module or in objects there is put back by `pygraph.environment`; but a cache of ``functools``, a list of
records of ``logging``, or anything else that the walk there does not know, would keep a fake, which fails far away and
later.

Every fake tensor refers to the mode that it was made under, so a weak reference to the mode tells whether any is left.
Where one is, the garbage collector says who holds it, and what the trace has made: the place to empty is where
something older refers to something young.
"""

# Objects of any type are looked at here, and some private parts of torch.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # checked with torch 2.11 and 2.13
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13

from pygraph.errors import StateChangeError, describe
from pygraph.process.collection import collect, ids_of_objects, no_collection, objects_of, referrers_of
from pygraph.tracing.holders import LIBRARIES, Held, is_result, name_of, packages_of, take_out
from pygraph.tracing.turn import turn

R = TypeVar("R")

# What is taken out may have been held in two places, or in a place of a place.
_ROUNDS = 4

# What refers to it is followed so far: garbage that could not be collected may be a long chain.
_FAR = 24

# Since 3.14 the collector has one old generation, and is told of a dict when that is made. Before, it is told when the
# first object that may be part of a cycle is put into it, so that an old dict may seem young.
_ONE_OLD_GENERATION = sys.version_info >= (3, 14)


class _Trace(threading.local):
    """What the traces under way in a thread have made; None outside."""

    modes: list[weakref.ref[Any]] | None = None
    lines: list[tuple[weakref.ref[Any], str]]
    ages: _Ages


_trace = _Trace()


def remember(mode: FakeTensorMode) -> None:
    """Have the tensors of a mode looked for when the trace under way is over."""
    if _trace.modes is not None:
        _trace.modes.append(weakref.ref(mode))


def remember_numbers() -> None:
    """The same for the symbols that make_fx follows now, which stand for numbers. Private; checked with torch 2.13."""
    tracing = get_proxy_mode()
    if _trace.modes is not None and tracing is not None:
        _trace.modes += [weakref.ref(node) for node in tracing.tracer.symnode_tracker.sym_node_dict]


def remember_line(tensor: Any, line: str | None) -> None:
    """Note which of the user's lines has made a tensor, for errors."""
    if line is not None and _trace.modes is not None and isinstance(tensor, torch.Tensor):
        _trace.lines.append((weakref.ref(tensor), line))


def leaving_nothing(call: str, run: Callable[[], R]) -> R:
    """Trace something, and have nothing of it left but what is returned, which holds no tensors of the trace.

    Args:
        call: What errors call it.
        run: Traces it. Its variables are gone when it returns.

    Raises:
        StateChangeError: There was something left. It has been taken out of where it was.
    """
    if _trace.modes is not None:
        return run()  # as part of a larger trace, which looks when it is over
    _trace.modes, _trace.lines = [], []
    try:
        with turn(), no_collection(), _unprofiled():
            _trace.ages = _Ages()
            with _trace.ages.told_apart():
                try:
                    result = run()
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # whose variables hold what the trace has made
                    _remove_what_is_left(failed=True)
                    raise
                left = _remove_what_is_left(failed=False)
    finally:
        _trace.modes, _trace.lines = None, []
    if left is None:
        return result
    places, line = left
    error = StateChangeError(
        describe(call, f"it stores a tensor or number of its own in {' and in '.join(places)}",
                 expected="no lasting change but to tensors in place", source=line,
                 remedy="Return it, or compute it before.")
    )  # fmt: skip
    error.fills = True
    raise error


@contextlib.contextmanager
def _unprofiled() -> Generator[None, None, None]:
    """Keep what is inside from this thread's profiler, whose events may refer to tensors as long as it runs.

    Of one with ``record_shapes=True``, a reference in C++ keeps what a tensor of functionalization stands for. Nor are
    operations on fakes what a profile is made for. Private; checked with torch 2.11 and 2.13.
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


def _remove_what_is_left(*, failed: bool) -> tuple[list[str], str | None] | None:
    """Take out what is left; the names of the places where it was, and the line that has made it."""
    made = _trace.modes or []
    if _are_gone(made):
        return None
    young = _trace.ages.collect_young()
    if _are_gone(made):
        return None
    search = _Search(made, young())
    if not search.finds_stand_ins():
        return None  # the mode alone is alive, as part of something that holds no tensors
    with _trace.ages.all_seen():
        return _take_out_all(search, made, failed=failed)


def _take_out_all(
    search: _Search, made: Sequence[weakref.ref[Any]], *, failed: bool
) -> tuple[list[str], str | None] | None:
    """The same, when it is known that there is something that is no young garbage."""
    names: dict[str, None] = {}
    line: str | None = None
    stays = False
    is_collected = False  # not where another thread records a graph: then garbage may look like something that is held
    for _ in range(_ROUNDS):
        found = search.look()
        line = line or search.line(_trace.lines)
        packages = [packages_of(held) for held in found]
        stays = stays or any(names & LIBRARIES for names in packages)
        found = [held for held, names in zip(found, packages, strict=True) if not names & LIBRARIES]
        packages = [names for names in packages if not names & LIBRARIES]
        places = [None if names else name_of(held) for held, names in zip(found, packages, strict=True)]
        for place, held in zip(places, found, strict=True):
            if any(item is held.item for item in gc.get_referents(held.holder)):  # not yet taken out from there
                is_out = take_out(held)
                stays = stays or not is_out
                if place is not None:
                    names[place + ("" if is_out else " (from where it could not be taken)")] = None
        is_done = not found
        held = found = None
        search.forget()
        if not _are_gone(made):
            is_collected = collect()
        if is_done or _are_gone(made):
            break
    if is_collected and not (names or stays or failed) and not _are_gone(made) and search.finds_any():
        names["something that does not tell Python what it holds"] = None
    return (list(names), line) if names else None


def _are_gone(made: Iterable[weakref.ref[Any]]) -> bool:
    return all(reference() is None for reference in made)


class _Ages:
    """Tells what a trace has made from what was there before.

    The collector is asked to leave alone what there is, so that everything that it knows afterwards is young. Where the
    user has done so before, for other objects, that could not be undone for ours alone. There, a mark is left at the
    end of the youngest generation, which the collector keeps in the order in which objects were made: what follows is
    young. A collection in the middle of a trace, as by Dynamo, moves these objects, so they are noted before it.
    """

    are_users = False
    """Whether the user has been seen to ask the same of the collector. Asking takes long where it is so."""

    is_frozen = False
    """Whether a trace has asked it of the collector just now."""

    def __init__(self) -> None:
        self._are_users = _Ages.are_users = _Ages.are_users or gc.get_freeze_count() > 0
        self._noted: set[int] = set()
        self._is_moved = False  # whether a collection has moved all that the youngest generation had at the start
        self._mark: list[Any] = []

    @contextlib.contextmanager
    def told_apart(self) -> Generator[None, None, None]:
        """Keep them apart while what is inside runs."""
        if not self._are_users:
            _Ages.is_frozen = True
            gc.freeze()
            try:
                yield
            finally:
                gc.unfreeze()
                _Ages.is_frozen = False
            return
        note = self._before_collection  # the very object that is taken away again
        gc.callbacks.append(note)
        try:
            yield
        finally:
            if note in gc.callbacks:
                gc.callbacks.remove(note)

    def collect_young(self) -> Callable[[], frozenset[int]]:
        """Collect garbage that is young, which would come next anyway; what tells the ids of other young objects."""
        if not self._are_users:
            collect()
            return lambda: frozenset(ids_of_objects())
        if not collect(2 if self._is_moved else 0):
            self._note()
        return lambda: frozenset(self._noted)

    def _before_collection(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._note()
            self._is_moved = True

    def _note(self) -> None:
        """Remember what was made since the start and is in the youngest generation now.

        Where one of these dies, an object that has its address later is young as well.
        """
        found = ids_of_objects(0)
        mark = id(self._mark)
        first = found.index(mark) + 1 if not self._is_moved and mark in found else 0
        self._noted.update(found[first:])

    @contextlib.contextmanager
    def all_seen(self) -> Generator[None, None, None]:
        """Have the collector look at all objects while what is inside runs.

        What the user has asked of it for some objects is not asked again, as it would then be asked for all: what of
        them becomes garbage later would stay.
        """
        gc.unfreeze()
        try:
            yield
        finally:
            if not self._are_users:
                gc.freeze()


def _after_fork() -> None:
    """Have the collector look at all objects in a child process, where the thread does not exist whose trace it was."""
    if _Ages.is_frozen and _trace.modes is None:
        gc.unfreeze()
        _Ages.is_frozen = False


os.register_at_fork(after_in_child=_after_fork)


class _Search:
    """Where something that was there before a trace refers to something that the trace has made.

    Args:
        made: The modes of the trace, and its symbols.
        young: The ids of objects that the trace has made. Some may have been freed since.
    """

    def __init__(self, made: Iterable[weakref.ref[Any]], young: frozenset[int]) -> None:
        self._made, self._young = made, young
        self._stand_ins: list[Any] = []
        self._layer: list[Any] = []
        self._found: list[Held] = []

    def look(self) -> list[Held]:
        """These places, as far as they lead to tensors and symbols of the trace."""
        self._stand_ins = self._find_stand_ins()
        seen = set(map(id, self._stand_ins))
        below: dict[int, set[int]] = {}  # what young objects hold of that, by ids
        running = _running_frames()
        layer = list(self._stand_ins)
        for _ in range(_FAR):
            self._layer = []
            ids = set(map(id, layer))
            for referrer in referrers_of(layer):
                if self._is_own(referrer) or id(referrer) in running:
                    continue
                items = {id(item): item for item in gc.get_referents(referrer) if id(item) in ids}
                if id(referrer) not in self._young:
                    self._found += [Held(referrer, item) for item in items.values()]
                else:
                    below.setdefault(id(referrer), set()).update(items)
                    if id(referrer) not in seen:
                        seen.add(id(referrer))
                        self._layer.append(referrer)
            if not self._layer:
                break
            layer = self._layer
        return [*self._precisely(below), *_held_by_threads(seen)]

    def line(self, lines: Iterable[tuple[weakref.ref[Any], str]]) -> str | None:
        """The user's line that has made one of the tensors that were found."""
        found = set(map(id, self._stand_ins))
        return next((line for reference, line in lines if id(reference()) in found), None)

    def finds_stand_ins(self) -> bool:
        """Whether there is anything that may be, or hold, a tensor or symbol of the trace."""
        return bool(self._find_stand_ins())

    def finds_any(self) -> bool:
        """Whether there are any tensors or symbols of the trace."""
        self._stand_ins = self._find_stand_ins()
        return any(not isinstance(value, Node) for value in self._stand_ins)

    def forget(self) -> None:
        """Hold nothing of what was found any more."""
        self._stand_ins, self._layer, self._found = [], [], []

    def _is_own(self, value: Any) -> bool:
        return type(value) is Held or value is self._stand_ins or value is self._layer or value is self._found

    def _precisely(self, below: dict[int, set[int]]) -> list[Held]:
        """What was found, where a dict that seems young is taken to be as old as what refers to it."""
        found: list[Held] = []
        for held in self._found:
            if type(held.item) is dict and not _ONE_OLD_GENERATION and not is_result(held):
                ids = below.get(id(held.item), set())
                found += [Held(held.item, item) for item in gc.get_referents(held.item) if id(item) in ids]
            else:
                found.append(held)
        return found

    def _find_stand_ins(self) -> list[Any]:
        """Tensors and symbols of the trace, and young nodes of autograd's graph, which may hold some in C++."""
        made = {id(value) for reference in self._made if (value := reference()) is not None}
        tests: dict[type, _IsMade] = {}

        def is_wanted(kind: type) -> bool:
            test = _test_for(kind)
            if test is not None:
                tests[kind] = test
            return test is not None

        return [
            value
            for value in objects_of(is_wanted)
            if tests[type(value)](value, made) and (id(value) in self._young or not issubclass(type(value), Node))
        ]


_IsMade: TypeAlias = "Callable[[Any, set[int]], bool]"


def _test_for(kind: type) -> _IsMade | None:
    """How to see that an object of a class is of a trace; None if none of that class is."""
    if issubclass(kind, FakeTensor):
        return lambda value, made: id(value.fake_mode) in made
    if issubclass(kind, torch.Tensor):
        return _wraps_fake
    if issubclass(kind, Node):
        return lambda value, made: True
    if issubclass(kind, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return lambda value, made: id(value.node) in made
    return None


def _wraps_fake(tensor: Any, made: set[int]) -> bool:
    """Whether a tensor of functorch's is one of a trace inside."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return isinstance(tensor, FakeTensor) and id(tensor.fake_mode) in made


def _running_frames() -> set[int]:
    """The ids of this thread's frames, whose variables are not what is looked for."""
    found: set[int] = set()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back
    return found


def _held_by_threads(young: set[int]) -> list[Held]:
    """What is in variables of functions that other threads run."""
    found: list[Held] = []
    for thread, top in sys._current_frames().items():
        frame: types.FrameType | None = top if thread != threading.get_ident() else None
        while frame is not None:
            found += [Held(frame, item) for item in gc.get_referents(frame) if id(item) in young]
            frame = frame.f_back
    return found
