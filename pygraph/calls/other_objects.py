"""Objects without tensors of which each call is passed another one, as a criterion or a meter that a loop makes anew.

An object is told by its identity, until a call comes that is like an earlier one but for it. Then it is told by what
it holds: a module by its attributes, which are part of the key, and other objects are taken apart.
"""

# Arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pygraph.calls.function import Call
from pygraph.calls.keys import Key, Keys, other_objects
from pygraph.errors import TraceError
from pygraph.guards.argument_containers import Change, containers_among
from pygraph.guards.opened import is_openable, numbers_of
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.tracing.call_environment import objects_among, reached_besides

# Fewer numbers in a list are arguments each, which may be sizes.
_FEWEST = 16


def to_be_opened(key: Key, earlier: Key, call: Call) -> dict[str, Change]:
    """The objects of a call that are to be taken apart, by name, as an earlier call like it was passed others."""
    others = other_objects(key.kind, earlier.kind)
    keyed, _ = flatten_with_path((call.args, call.kwargs))
    return {
        argument_path(path): Change.CHANGES
        for index, (path, leaf) in enumerate(keyed)
        if index in others and is_openable(leaf)
    }


def lists_of_others(key: Key, earlier: Iterable[Key], call: Call) -> dict[str, Change]:
    """The lists of numbers among a call's arguments that decide what it does, by name, if earlier ones held others.

    Args:
        key: The key of the call.
        earlier: The keys of earlier calls.
        call: The call.
    """
    decisive = {index for index, _ in key.numbers}
    others: set[int] = set()
    for one in earlier:
        if one.kind == key.kind and {index for index, _ in one.numbers} == decisive:
            others |= {index for index, _ in set(one.numbers).symmetric_difference(key.numbers)}
    if not others:
        return {}
    keyed, _ = flatten_with_path((call.args, call.kwargs))
    names = {argument_path(keyed[index][0]) for index in others}
    return {
        name: Change.HOLDS_OTHERS
        for name, value in containers_among(call.args, call.kwargs)
        if len(value) >= _FEWEST and numbers_of(value) is not None
        if any(f"{name}[{index}]" in names for index in range(len(value)))
    }


def compares_by_value(fn: Callable[..., Any], keys: Keys, key: Key, earlier: Key, call: Call) -> bool:
    """Have modules of a call be told by their attributes, as an earlier call like it was passed others.

    Not if the function can tell them from others by their identity, as it reaches modules of that class itself.

    Args:
        fn: The function.
        keys: The keys of its calls.
        key: The key of the call.
        earlier: The key of a call of the same form.
        call: The call.

    Returns:
        Whether the call has another key now.
    """
    others = [call.leaves[index] for index in sorted(other_objects(key.kind, earlier.kind))]
    classes = {type(one) for one in others if isinstance(one, torch.nn.Module) and not _holds_tensors(one)}
    if classes:
        classes -= set(_reached(fn, classes, others, call))
    keys.by_value |= classes
    return bool(classes)


def _holds_tensors(module: torch.nn.Module) -> bool:
    """Whether a module has parameters or buffers, so that another one never holds the same."""
    held = itertools.chain(torch.nn.Module.parameters(module), torch.nn.Module.buffers(module))
    return next(held, None) is not None


def _reached(fn: Callable[..., Any], classes: Iterable[type], others: list[Any], call: Call) -> Iterable[type]:
    """The part of some classes of which the function may compare objects with other ones."""
    given, known = objects_among(call.args, call.kwargs), set(map(id, others))
    try:
        rest = tuple(one for one in given.values() if id(one) not in known)
        environment = reached_besides(fn, rest, {})
    except TraceError:  # by something whose state cannot be seen
        return classes
    if environment.calls_builtin("id"):
        return classes
    return filter(environment.reaches_objects_of, classes)
