"""Which results of a call are computed from others, as the graph of autograd says that its trace has made."""

# Nodes of autograd's graph have no public type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Dependency:
    """A result, and what it is computed from, if that are other results of the call.

    Attributes:
        results: The results that it is computed from, with no other result between, by number.
        tensors: The tensors of the call that it is computed from by no other result, by number.
    """

    results: tuple[int, ...]
    tensors: tuple[int, ...]


def find_dependencies(
    results: Mapping[int, torch.Tensor], tensors: Mapping[int, torch.Tensor]
) -> dict[int, Dependency]:
    """Find which of several results are computed from others.

    Args:
        results: Results that have a gradient, by number, in the graph of autograd that has made them.
        tensors: Leaves of that graph, by number; of one that comes several times, the first.

    Returns:
        The dependencies by result, in an order in which each comes after those that it depends on; none of a result
        alone, and none where a backward between two of them would run a custom Function too often.
    """
    made: dict[tuple[Any, int], int] = {}
    for number, result in results.items():
        if result.grad_fn is not None:  # else it is a leaf, and calls that return one have no graph
            made.setdefault((result.grad_fn, result.output_nr), number)
    if len(made) < 2:
        return {}
    found = {number: Dependency((), ()) for number in made.values()}
    if not _reached([node for node, _ in made], made)[0]:  # as nearly always
        return found
    leaves = {id(tensor): number for number, tensor in reversed([*tensors.items()])}
    for (node, _), number in made.items():
        others, variables, _ = _reached([node], made)
        if others:
            known = sorted({leaves[id(one)] for one in variables if id(one) in leaves})
            found[number] = Dependency(tuple(sorted(others)), tuple(known))
    has_custom = _reached([node for node, _ in made], {})[2]
    if has_custom and any(_runs_users_code(results, one, tensors) for one in found.values()):
        return {}
    return {number: found[number] for number in _in_order(found)}


def _reached(start: Iterable[Any], made: Mapping[tuple[Any, int], int]) -> tuple[set[int], list[torch.Tensor], bool]:
    """Follow autograd's graph from these nodes up to the outputs of ``made``.

    Returns:
        The outputs that are met, the leaves that are met, and whether a custom Function is among the nodes.
    """
    found: set[int] = set()
    leaves: list[torch.Tensor] = []
    seen = set(start)
    queue = list(seen)
    is_custom = False
    while queue:
        node = queue.pop()
        is_custom = is_custom or isinstance(node, torch.autograd.function.BackwardCFunction)
        for edge in node.next_functions:
            number = made.get(edge)
            if number is not None:
                found.add(number)
            elif edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                queue.append(edge[0])
                if hasattr(edge[0], "variable"):  # a leaf
                    leaves.append(edge[0].variable)
    return found, leaves, is_custom


def _runs_users_code(results: Mapping[int, torch.Tensor], one: Dependency, tensors: Mapping[int, torch.Tensor]) -> bool:
    """Whether a backward from a result to those that it depends on would run a custom Function behind these.

    Torch passes it zeros there, of which it may make anything, and does so where there is a way on to what is asked
    for: another of these results, or a tensor that the result depends on by itself.
    """
    own = {id(tensors[number]) for number in one.tensors}
    made = {(results[number].grad_fn, results[number].output_nr): number for number in one.results}
    for number in one.results:
        others, leaves, is_custom = _reached([results[number].grad_fn], made)
        if is_custom and (others or any(id(leaf) in own for leaf in leaves)):
            return True
    return False


def _in_order(found: Mapping[int, Dependency]) -> list[int]:
    ordered: dict[int, None] = {}

    def add(number: int) -> None:
        if number in found and number not in ordered:
            for other in found[number].results:
                add(other)
            ordered[number] = None

    for number in found:
        add(number)
    return list(ordered)


@contextlib.contextmanager
def stopping_at(results: Collection[torch.Tensor]) -> Generator[None, None, None]:
    """Have backwards stop at these results, the gradients of which they find but do not go on with."""
    numbers: dict[Any, set[int]] = {}
    for result in results:
        numbers.setdefault(result.grad_fn, set()).add(result.output_nr)

    def hook(stops: set[int]) -> Any:
        def without(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
            return tuple(None if index in stops else gradient for index, gradient in enumerate(gradients))

        return without

    with contextlib.ExitStack() as stack:
        for node, stops in numbers.items():
            # It runs after autograd has captured the gradients. Checked with torch 2.11 and 2.13.
            stack.callback(node.register_prehook(hook(stops)).remove)
        yield
