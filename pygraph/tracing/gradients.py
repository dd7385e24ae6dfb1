"""Autograd while a function is traced: accumulated gradients, spent graphs, and the leaves of graphs."""

# Nodes of autograd's graph are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.autograd.graph import get_gradient_edge


class Accumulations:
    """Notes to which tensors' gradients a backward adds: autograd reads them itself, where no mode sees it.

    Attributes:
        tensors: The tensors whose gradients a backward has added to.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        # The nodes are kept alive, as leaves do not do it: another node for the leaf would not have the hook.
        self._watched: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def watched(self, leaves: Iterable[torch.Tensor]) -> Generator[None, None, None]:
        """Watch these leaves of autograd's graph while what is inside runs."""
        if torch.is_inference_mode_enabled():
            yield  # where autograd is off
            return
        try:
            for leaf in leaves:
                self.watch(leaf)
            yield
        finally:
            for _, hook in self._watched:
                hook.remove()
            self._watched.clear()

    def watch(self, leaf: torch.Tensor) -> None:
        """Watch another leaf, until `watched` ends."""
        with torch.enable_grad():  # by a view it is found
            view = leaf.view_as(leaf).grad_fn
            if leaf.grad_fn is None and view is not None and view.next_functions[0][0] is None:
                return  # a view of a parameter that was made without autograd: no backward reaches it
            node = get_gradient_edge(leaf).node
        self._watched.append((node, node.register_prehook(self._note(leaf))))

    def _note(self, leaf: torch.Tensor) -> Any:
        def hook(gradients: object) -> None:
            del gradients
            self.tensors.append(leaf)

        return hook


def is_spent(tensor: torch.Tensor) -> bool:
    """Whether a backward of ``tensor`` would raise an error, as another backward has freed the saved tensors."""
    return any(map(_is_freed, _history([tensor])))


def leaves_behind(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves to which a backward of the tensors would add gradients; a leaf leads to itself."""
    tensors = [tensor for tensor in tensors if tensor.requires_grad]
    found = [tensor for tensor in tensors if tensor.grad_fn is None]
    found += [node.variable for node in _history(tensors) if node.name() == _LEAF]
    return list({id(tensor): tensor for tensor in found}.values())


_LEAF = "torch::autograd::AccumulateGrad"  # checked with torch 2.13


def goes_beyond(roots: Iterable[torch.Tensor], inputs: Iterable[Any] | None, others: Iterable[torch.Tensor]) -> bool:
    """Whether a backward of ``roots`` runs nodes of the graphs of other tensors.

    Args:
        roots: The tensors that are differentiated.
        inputs: The tensors, or edges of the graph, by which they are; None for all leaves.
        others: The tensors that have graphs of their own.
    """
    others = [one for one in others if one.grad_fn is not None]
    if not others:
        return False
    reached = set(_history(roots))
    ends = None if inputs is None else {node for node in map(_node_of, inputs) if node is not None}
    for node in {one.grad_fn for one in others if one.grad_fn in reached}:
        if ends is None or not ends.isdisjoint(following for following in _behind(node) if following is not node):
            return True
    return False


def _node_of(value: Any) -> Any:
    """The node of autograd's graph for a tensor or an edge; None if there is none."""
    if isinstance(value, torch.Tensor):
        return get_gradient_edge(value).node if value.requires_grad else None
    return value.node


def _history(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of autograd's graph behind tensors, each once."""
    yield from _behind(*(tensor.grad_fn for tensor in tensors))


def _behind(*nodes: Any) -> Iterator[Any]:
    """Nodes of autograd's graph and all that follow them, each once."""
    seen: set[Any] = set()
    queue: list[Any] = [*nodes]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        queue += [following for following, _ in node.next_functions]


def _is_freed(node: Any) -> bool:
    """Whether a node's saved tensors are freed, which shows when one is read."""
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    for name in names:
        try:
            getattr(node, name)
        except RuntimeError as error:
            return _SPENT in str(error)
    return False


# What autograd says of it (torch 2.11 to 2.13).
_SPENT = "backward through the graph a second time"


def clear_unreached_gradients(used: Iterable[torch.Tensor]) -> str | None:
    """Delete gradients that the function has given to tensors that were not found before it ran.

    These tensors had no gradients: autograd adds to one in place.

    Returns:
        Such a change, in words; None if there is none.
    """
    changed: str | None = None
    for tensor in used:
        if tensor.is_leaf and isinstance(tensor.grad, FakeTensor):
            tensor.grad = None
            changed = "the gradient of a tensor that is too deep in what it closes over"
    return changed
