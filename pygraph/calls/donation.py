"""Donated arguments (``donate_argnums``, ``donate_argnames``), as in JAX: a call consumes them.

After a call every tensor of a donated argument is used up, whether the call ran as a graph or not; its memory may have
become a result's (`pygraph.runtime.adoption`). While a call is traced by an outer transform nothing is consumed.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.calls import surroundings
from pygraph.calls.options import Options
from pygraph.errors import ArgumentError, describe
from pygraph.guards.donated import Consumed, consume
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.program import Program
from pygraph.ir.source_lines import user_frame
from pygraph.runtime.adoption import Notes

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Donation:
    """Which arguments of a function are consumed.

    Attributes:
        notes: What became of the memory of donated arguments.
    """

    def __init__(self, fn: Callable[..., Any], options: Options, name: str) -> None:
        self.notes: Notes = Notes()
        self._options = options
        self._name = name
        self._positions: dict[str, int] = {}
        self._any_keyword = True
        try:
            plain = fn.forward if isinstance(fn, torch.nn.Module) else fn
            parameters = inspect.signature(plain, follow_wrapped=False).parameters.values()
        except (TypeError, ValueError):  # a builtin has no signature
            return
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positions = {p.name: i for i, p in enumerate(p for p in parameters if p.kind in positional)}
        self._keywords = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        self._any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call, and consume the donated arguments if that went well."""
        if surroundings.inline_reason() is not None:
            return call(*args, **kwargs)
        tensors: dict[int, tuple[torch.Tensor, str, int, pytree.TreeSpec | None]] = {}
        for label, value in self._donated(args, kwargs):
            leaves, tree = ([value], None) if isinstance(value, torch.Tensor) else pytree.tree_flatten(value)
            for part, leaf in enumerate(leaves):
                if type(leaf) in _PLAIN and not is_functorch_wrapped_tensor(leaf):
                    tensors[id(leaf)] = (leaf, label, part, tree)
        before = self.notes.total()
        result = call(*args, **kwargs)
        if tensors and self.notes.total() == before:
            for label in dict.fromkeys(label for _, label, _, _ in tensors.values()):
                self.notes[label, "the call runs as ordinary launches"] += 1
        heirs = {key: _heir(tensor) for key, (tensor, *_) in tensors.items() if _contains(result, tensor)}
        if heirs:
            leaves, tree = pytree.tree_flatten(result)
            result = pytree.tree_unflatten([heirs.get(id(leaf), leaf) for leaf in leaves], tree)
        source = user_frame(sys._getframe(1)) or "unknown"  # pyright: ignore[reportPrivateUsage]
        for tensor, label, part, tree in tensors.values():
            consume(tensor, Consumed(self._name, label, part, tree, source, TensorSpec.of(tensor)))
        return result

    def leaves(self, program: Program) -> frozenset[int]:
        """Positions of the donated leaves among those of ``(args, kwargs)``."""
        # Without containers of numbers: classes may look at what they are made of.
        positions, (args, kwargs) = itertools.count(), program.in_tree.children()
        of_args, of_kwargs = (
            [list(itertools.islice(positions, one.num_leaves)) for one in part.children()] for part in (args, kwargs)
        )
        by_name = dict(zip(kwargs.context, of_kwargs, strict=True))
        return frozenset(leaf for _, leaves in self._donated(tuple(of_args), by_name) for leaf in leaves)

    def _donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """The donated arguments of a call, with their labels; those left to their defaults are not there."""
        names = {position: name for name, position in self._positions.items()}
        for index in self._options.donate_argnums:
            position = index + len(args) if index < 0 else index
            if 0 <= position < len(args):
                yield f"args[{position}]", args[position]
            elif position not in names:
                raise self._error(f"donate_argnums has {index}", f"a position among {len(args)} arguments")
            elif names[position] in kwargs:
                yield f"kwargs[{names[position]!r}]", kwargs[names[position]]
        for name in self._options.donate_argnames:
            if name in kwargs:
                yield f"kwargs[{name!r}]", kwargs[name]
            elif name in self._positions:
                if self._positions[name] < len(args):
                    yield f"args[{self._positions[name]}]", args[self._positions[name]]
            elif not self._any_keyword and name not in self._keywords:
                raise self._error(f"donate_argnames has {name!r}", "the name of an argument")

    def _error(self, problem: str, expected: str) -> ArgumentError:
        return ArgumentError(describe(f"{self._name}(…)", problem, expected=expected))


def _contains(result: Any, tensor: torch.Tensor) -> bool:
    return any(leaf is tensor for leaf in pytree.tree_leaves(result))


def _heir(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object on the same memory, for a donated argument that is returned as it is."""
    if tensor.grad_fn is not None:
        return tensor.view_as(tensor)
    heir = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(heir, tensor.requires_grad)
    return heir.requires_grad_(tensor.requires_grad)
