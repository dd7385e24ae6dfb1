"""State that a call depends on besides its arguments: the `Environment` of a function, without its inputs."""

# Functions take and return values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph.guards.environment import Environment
from pygraph.ir.constants import IMMUTABLE
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.ir.value_keys import dict_keys
from pygraph.tracing.function_kinds import Rebinding, WithStateInputs


def reached_besides(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    read: Sequence[torch.Tensor] = (),
    toggled: Sequence[torch.Tensor] = (),
    *,
    hooks: bool = False,
) -> Environment:
    """The state that a call depends on besides its inputs.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        read: Closed-over tensors whose gradients it reads.
        toggled: Closed-over tensors of which it changes whether they require grad.
        hooks: Whether it has autograd call hooks of closed-over tensors.
    """
    outer = with_state_inputs(fn)
    with contextlib.nullcontext() if outer is None else outer.locations_emptied():
        environment = Environment(fn, objects_among(args, kwargs), read, toggled, hooks=hooks)
    if outer is not None:
        environment.release_locations((*outer.numbers, *outer.locations))
    environment.forget_copies()
    return environment


def with_state_inputs(fn: Any) -> WithStateInputs | None:
    """The function that takes state as inputs: the function itself, or the one that a `Rebinding` calls."""
    inner = fn.__wrapped__ if isinstance(fn, Rebinding) else fn
    return inner if isinstance(inner, WithStateInputs) else None


def objects_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments whose attributes a trace bakes in, by path, and such keys of dicts.

    Tensors and containers are part of the cache key.
    """
    keyed, structure = flatten_with_path((args, kwargs))
    found = {argument_path(path): leaf for path, leaf in keyed if not isinstance(leaf, (torch.Tensor, *IMMUTABLE))}
    for number, key in enumerate(dict_keys(structure)):
        if type(key) not in IMMUTABLE:
            found[f"key {number} of dicts among the arguments"] = key
    return found
