"""Pads the results of a graph whose sizes depend on data, wherever there is a bound for them."""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pygraph.ir.decisions import SIZED
from pygraph.ir.descriptors import Fallback
from pygraph.ir.effects import has_effect
from pygraph.ir.printing import target_text
from pygraph.transforms.host_values.graph_edit import GraphEdit
from pygraph.transforms.padding.indices import index, index_put
from pygraph.transforms.padding.rows import is_mask, padded_in, plain
from pygraph.transforms.padding.rules import rule_of
from pygraph.transforms.padding.sources import Bound, Sources
from pygraph.transforms.padding.values import Builder, NoRuleError, Number, Padded, aten

Bounds: TypeAlias = "Mapping[str, Bound] | Sequence[tuple[str, Bound]]"
"""Bounds by the name of an operation, ``nonzero``, or by its line, ``train.py:7``."""

BOUNDED = ("nonzero", "index", "masked_select", "unique", "repeat_interleave")
"""The operations that may have one."""


def pad_to_bounds(edit: GraphEdit, bounds: Bounds) -> list[Fallback]:
    """Pad what has a bound, as far as the operations that take it allow; behind these, sizes depend on data again.

    Args:
        edit: The graph that is edited.
        bounds: The bounds.

    Returns:
        A fallback for each operation that takes a padded tensor and needs it without padding.
    """
    padding = _Padding(edit, bounds)
    for node in list(edit.graph.nodes):
        padding.visit(node)
    edit.graph.eliminate_dead_code(is_impure_node=has_effect)
    return padding.fallbacks


_NAMES = {"_unique2": "unique"}


def _name(node: fx.Node) -> str:
    """The operation's name, as bounds have it."""
    target: Any = node.target
    name = target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""
    return _NAMES.get(name, name)


class _Padding:
    def __init__(self, edit: GraphEdit, bounds: Bounds) -> None:
        self._bounds = dict(bounds)
        self._build = Builder(edit)
        self._sources = Sources(self._build)
        self._values: dict[fx.Node, Any] = {}
        self._whole: dict[fx.Node, fx.Node] = {}
        self.fallbacks: list[Fallback] = []

    def visit(self, node: fx.Node) -> None:
        """Replace a node by what stands for its result, or its operands by tensors without padding."""
        self._build.at = node
        value = None
        try:
            value = self._value(node) if node.op == "call_function" else None
        except NoRuleError as error:
            if padded_in(self._known((node.args, node.kwargs))) or self._has_bound(node):
                self.fallbacks.append(Fallback(target_text(node.target), str(error), node.meta.get("source")))
        if isinstance(value, fx.Node):
            node.replace_all_uses_with(value)
        elif value is not None:
            self._values[node] = value
        else:
            is_returned = node.op == "output"
            node.args = map_arg(node.args, lambda one: self._without_padding(one, is_returned=is_returned))
            node.kwargs = map_arg(node.kwargs, lambda one: self._without_padding(one, is_returned=is_returned))

    def _known(self, args: Any) -> Any:
        """Arguments with what stands for nodes."""
        return pytree.tree_map_only(fx.Node, lambda one: self._values.get(one, one), args)

    def _value(self, node: fx.Node) -> Any:
        """The equivalent of a node's result; None if it stays as it is."""
        args, kwargs = self._known(node.args), self._known(node.kwargs)
        if node.target is operator.getitem:
            return args[0][args[1]] if isinstance(args[0], tuple) and node.args[0] in self._values else None
        if node.target is operator.mul and isinstance(args[0], Number) and isinstance(args[1], int):
            return Number(args[0].size, args[0].times * args[1])
        if _takes_masks(node, args):
            return self._by_masks(node, args)
        make = self._source(node)
        if make is not None and self._has_bound(node):
            return make(self._bound(node), *_without_choosing_padding(self._build, args), **kwargs)
        if not any(isinstance(one, (Padded, Number)) for one in pytree.tree_leaves((args, kwargs))):
            return None
        rule = rule_of(node.target)
        if rule is None:
            raise NoRuleError("it is not known what padding would do to its result")
        return rule(self._build, args, kwargs)

    def _source(self, node: fx.Node) -> Callable[..., Any] | None:
        return {
            aten.nonzero.default: self._sources.nonzero,
            aten.masked_select.default: self._sources.masked_select,
            aten.repeat_interleave.Tensor: self._sources.repeat_interleave,
            aten._unique2.default: self._sources.unique,
        }.get(node.target)

    def _by_masks(self, node: fx.Node, args: Any) -> Any:
        """``index`` by masks, and ``index_put`` of what such an ``index`` has chosen."""
        x, indices, *others = args
        if node.target is aten.index.Tensor and not self._has_bound(node):
            if padded_in(args):
                raise NoRuleError("it has no bound")
            return None
        if node.target is aten.index_put.default and not padded_in(args):
            return None
        masks = [one for one in indices if is_mask(one)]
        if len(masks) != 1 or sum(one is not None for one in indices) != 1:
            raise NoRuleError("it takes several indices, one of them a mask")
        place = indices.index(masks[0])
        if node.target is aten.index.Tensor:
            x, mask = _without_choosing_padding(self._build, (x, masks[0]), place)
            columns, size = self._sources.columns(mask, self._bound(node))
        else:
            columns, size = self._sources.known_columns(masks[0])
        padded = [Padded(column, 0, size) for column in columns]
        rule = index if node.target is aten.index.Tensor else index_put
        return rule(self._build, node.target, x, [*indices[:place], *padded], *others)

    def _has_bound(self, node: fx.Node) -> bool:
        is_source = self._source(node) is not None or node.target is aten.index.Tensor
        if any(user.target is SIZED for user in node.users):
            return False  # the size is a question, which has been answered
        return is_source and bool({node.meta.get("source"), _name(node)} & set(self._bounds))

    def _bound(self, node: fx.Node) -> Bound:
        return next(self._bounds[key] for key in (node.meta.get("source"), _name(node)) if key in self._bounds)

    def _without_padding(self, node: fx.Node, *, is_returned: bool) -> Any:
        """The operand for a node of an operation that has no rule, or the result of the function for it."""
        value = self._values.get(node, node)
        if isinstance(value, Number):
            return self._build.number(value)
        if not isinstance(value, Padded):
            return value
        if value.node not in self._whole:
            self._whole[value.node] = self._build.unknown(
                aten.slice.Tensor, value.node, value.dim, 0, self._build.number(Number(value.size))
            )
        whole = self._whole[value.node]
        return self._build.unknown(aten.clone.default, whole) if is_returned else whole


def _takes_masks(node: fx.Node, args: Any) -> bool:
    return node.target in (aten.index.Tensor, aten.index_put.default) and any(map(is_mask, args[1]))


def _without_choosing_padding(build: Builder, args: Any, first: int = 0) -> Any:
    """Arguments of an operation that chooses elements, of which padding is none that it chooses.

    Args:
        build: What makes nodes.
        args: A tensor and, if that is not the one that says what is chosen, a mask.
        first: The dimension of the tensor at which the mask begins.
    """
    *others, chosen = args
    if not padded_in(args):
        return args
    if not isinstance(chosen, Padded) or not is_mask(chosen):
        raise NoRuleError("it would choose padding")
    for other in others:
        if not isinstance(other, Padded) or other.size != chosen.size or other.dim != first + chosen.dim:
            raise NoRuleError("it would choose padding")
    return [*plain(others), build.filled(chosen, 0)]
