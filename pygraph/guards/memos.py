"""The cache of ``functools.lru_cache``: reading it, and removing single entries, which functools itself cannot do.

The cache of a function is a dict. In one without a bound, results are its values; in one with a bound, links of a ring
are, which also says which entry goes first. A link holds its result as long as it is part of the ring. The layout of
the ring is private to CPython (checked with 3.11, 3.12 and 3.13); the addresses that are read are compared with
the referents that the collector reports before anything is written.
"""

# Cached results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

from pygraph.guards.storage import delete_keys, holds_symbol

Memo = type(functools.lru_cache(lambda: None))
"""The class of functions with a cache."""

# Fields of a link, after the header that all objects have; the function itself is the ring's first link.
_WORD = ctypes.sizeof(ctypes.c_void_p)
_PREVIOUS, _NEXT, _HASH, _KEY, _RESULT = (object.__basicsize__ + _WORD * index for index in range(5))
_LINK = "_lru_list_elem"


def cache_of(memo: Any) -> dict[Any, Any] | None:
    """The dict of a function's cache; None if it is not known which one that is."""
    size, own = memo.cache_info().currsize, memo.__dict__
    found = [d for d in gc.get_referents(memo) if type(d) is dict and d is not own and len(d) == size]
    if memo.cache_info().maxsize is not None:
        found = [d for d in found if all(type(link).__name__ == _LINK for link in d.values())]
    return found[-1] if found else None  # results come first, and may be dicts as well


def memo_of(cache: dict[Any, Any]) -> Any:
    """The function whose cache a dict is; None if it is another dict."""
    found = [one for one in gc.get_referrers(cache) if type(one) is Memo]
    return next((memo for memo in found if cache_of(memo) is cache), None)


def results_of(memo: Any) -> list[tuple[Any, Any, Any]]:
    """The key of every entry, the value that the dict has for it (a result or a link), and the result."""
    cache = cache_of(memo)
    if cache is None:
        return []
    if memo.cache_info().maxsize is None:
        return [(key, result, result) for key, result in cache.items()]
    # The collector reports the key, the result and the class of every link in turn.
    referents = gc.get_referents(memo)
    keys = set(map(id, cache))
    found: dict[int, Any] = {}
    for key, result, kind in zip(referents[1::3], referents[2::3], referents[3::3], strict=False):
        if id(key) not in keys or getattr(kind, "__name__", None) != _LINK:
            break
        found[id(key)] = result
    return [(key, link, found[id(key)]) for key, link in cache.items() if id(key) in found]


def forget(memo: Any, item: Any) -> bool:
    """Remove the entries that have this very object as their key or their result.

    Returns:
        Whether nothing in the cache refers to it any more.
    """
    return _remove(memo, [(key, link) for key, link, result in results_of(memo) if key is item or result is item])


class Remembered:
    """The keys of what a function with a cache remembers at some time.

    Args:
        memo: The function.
        keys: The very keys of its entries.

    Example:
        >>> double = functools.lru_cache(lambda number: 2 * number)
        >>> _ = double(1)
        >>> before = Remembered(double, [key for key, *_ in results_of(double)])
        >>> _ = double(1), double(2), double(3)
        >>> before.forget_others(lambda result: result > 4), double.cache_info().currsize
        (True, 2)
    """

    def __init__(self, memo: Any, keys: Sequence[Any]) -> None:
        self._memo, self._keys = memo, keys

    def forget_others(self, is_lost: Callable[[Any], bool]) -> bool:
        """Remove entries that have come since, of which the results are to be lost; whether there were any."""
        before = set(map(id, self._keys))
        found = results_of(self._memo)
        others = [(key, entry) for key, entry, result in found if id(key) not in before and is_lost(result)]
        _remove(self._memo, others)
        return bool(others)


def _remove(memo: Any, entries: Sequence[tuple[Any, Any]]) -> bool:
    """Remove entries, given as keys and what the dict has for them; whether there were any, and all are gone."""
    cache = cache_of(memo)
    if cache is None or not entries:
        return False
    wanted = {id(key) for key, _ in entries}
    found = [(key, link) for key, link in cache.items() if id(key) in wanted or holds_symbol(key)]
    links = [link for _, link in found if type(link).__name__ == _LINK]
    if not all(_unlink(memo, cache, link) for link in links):  # the first one fails, or none
        return False
    delete_keys(cache, [key for key, _ in found])
    return True


def _unlink(memo: Any, cache: dict[Any, Any], link: Any) -> bool:
    """Remove a link from its ring; whether the ring was laid out as expected."""
    ring = {id(memo), *map(id, cache.values())}
    previous, following = _read(id(link), _PREVIOUS), _read(id(link), _NEXT)
    keys, referents = set(map(id, cache)), set(map(id, gc.get_referents(memo)))
    is_known = (
        {previous, following} <= ring
        and _read(previous, _NEXT) == id(link) == _read(following, _PREVIOUS)
        and _read(id(link), _KEY) in keys
        and _read(id(link), _RESULT) in referents
    )
    if is_known:
        _write(previous, _NEXT, following)
        _write(following, _PREVIOUS, previous)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(link))  # the ring's reference
    return is_known


def _read(address: int, offset: int) -> int:
    return ctypes.c_size_t.from_address(address + offset).value


def _write(address: int, offset: int, value: int) -> None:
    ctypes.c_size_t.from_address(address + offset).value = value
