"""Rules for objects that lead to others in a way of their own: weak references, caches, state of threads, events."""

# Referents are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import weakref
from typing import Any

from pygraph.guards import memos
from pygraph.guards.contents import Contents
from pygraph.guards.packages import is_library_class
from pygraph.guards.report_names import join, key_name
from pygraph.guards.thread_state import contents_in_thread, items_in_thread
from pygraph.guards.values import is_plain
from pygraph.guards.walk.containers import LARGE, walk_attributes, walk_container
from pygraph.guards.walk.state import Walk
from pygraph.guards.weak_references import life_of, referent_of


def walk_weak_reference(walk: Walk, name: str, reference: Any, depth: int) -> None:
    """Guard that the referent is alive, and walk it without keeping it alive."""
    walk.guards.add_contents(life_of(reference))
    referent = referent_of(reference)
    if referent is not None:
        walk.visit(name, referent, depth + 1, weakly=True)
    if issubclass(type(reference), weakref.WeakMethod):
        walk.visit(name, reference._func_ref, depth)  # pyright: ignore  # as from CPython 3.11 to 3.14


def walk_weak_set(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Walk the set of references of a ``weakref.WeakSet``."""
    walk.visit(name, value.data, depth)


def walk_weak_dict(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Guard and walk the dict of a ``WeakKeyDictionary`` or ``WeakValueDictionary``."""
    walk_container(walk, name, value.data, depth)


def walk_memo(walk: Walk, name: str, memo: Any, depth: int) -> None:
    """Guard what ``functools.lru_cache`` remembers, but not that it remembers no more, and walk it."""
    cache = memos.cache_of(memo)
    results = memos.results_of(memo)
    if not walk.packaged:
        walk.snapshot.memos.append((name, memos.Remembered(memo, [key for key, *_ in results])))
    if cache is not None and len(results) <= LARGE:
        walk.objects.append(cache)
        # One that is full forgets some when it comes to remember others.
        is_full = len(results) == memo.cache_info().maxsize
        for key, entry, result in results:
            if not is_plain(result) or not is_full:
                walk.guards.entries.append((cache, key, entry))
                walk.visit(f"{name}({key_name(key, walk.names)})", result, depth + 1)
    wrapped = memo.__dict__.get("__wrapped__")
    if wrapped is not None:
        walk.visit(name, wrapped, depth)
    walk_attributes(walk, name, memo, depth)


def walk_thread_state(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Guard and snapshot what the current thread finds in a thread-local or a context variable, and walk it."""
    walk.guard_contents(name, contents_in_thread(value))
    for key, item in items_in_thread(value).items():
        walk.visit(join(name, key), item, depth + 1)
    if not is_library_class(type(value)):
        walk.guards.code.add_object(name, value)
        walk.visit_class_of(name, value, depth)


def walk_event(walk: Walk, name: str, event: Any, depth: int) -> None:
    """Guard whether an event is set, but do not put it back: other threads set it, and wait for it."""
    walk.guards.add_contents(Contents(lambda: (event.is_set(),)))
