"""A function that is cut and calls itself: a part that calls it again depends on what its other parts read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pygraph

pytestmark = pytest.mark.rotates

Tensor = torch.Tensor


class Recursive:
    """Methods that call themselves, with a statement in them that no trace has."""

    def __init__(self) -> None:
        self.scale, self.count = 1.5, 0

    def plain(self, x: Tensor, depth: int = 3) -> Tensor:
        """By a function that is in a closure."""

        def descend(x: Tensor, depth: int) -> Tensor:
            self.count += 1
            x = x * self.scale
            if depth == 3:
                print(end="")
            return x if depth == 0 else descend(x + 1, depth - 1)

        return descend(x, depth)

    def method(self, x: Tensor, depth: int = 3) -> Tensor:
        """By its own name."""
        self.count += 1
        x = x * self.scale
        if depth == 3:
            print(end="")
        return x if depth == 0 else self.method(x + 1, depth - 1)

    def renamed(self, x: Tensor, depth: int = 3) -> Tensor:
        """By another name of the object."""
        self.count += 1
        x = x * self.scale
        if depth == 3:
            print(end="")
        again = self
        return x if depth == 0 else again.renamed(x + 1, depth - 1)

    def helped(self, x: Tensor, depth: int = 3) -> Tensor:
        """By another function."""
        self.count += 1
        x = x * self.scale
        if depth == 3:
            print(end="")
        return x if depth == 0 else descended(self, x, depth)


def descended(of: Recursive, x: Tensor, depth: int) -> Tensor:
    return of.helped(x + 1, depth - 1)


def of_closure(found: Recursive) -> Callable[[Tensor], Tensor]:
    """A function that is no method."""

    def descend(x: Tensor, depth: int = 3) -> Tensor:
        found.count += 1
        x = x * found.scale
        if depth == 3:
            print(end="")
        return x if depth == 0 else descend(x + 1, depth - 1)

    return descend


FORMS: tuple[Callable[[Recursive], Callable[[Tensor], Tensor]], ...] = (
    lambda found: found.plain,
    lambda found: found.method,
    lambda found: found.renamed,
    lambda found: found.helped,
    of_closure,
)


@pytest.mark.parametrize("form", FORMS, ids=["plain", "method", "renamed", "helped", "closure"])
def test_what_other_parts_read_and_change(
    device: torch.device, form: Callable[[Recursive], Callable[[Tensor], Tensor]]
) -> None:
    eager, jitted = Recursive(), Recursive()
    call, fast = form(eager), pygraph.jit(form(jitted))
    for index in range(9):
        eager.scale = jitted.scale = 1.5 + index // 3 * 0.25
        x = torch.full((2,), float(index), device=device)
        assert (fast(x).tolist(), jitted.count) == (call(x).tolist(), eager.count)


class Tree:
    """Objects of one class, each of which calls the method of others."""

    def __init__(self, depth: int, scale: list[float]) -> None:
        self.children = [Tree(depth - 1, scale) for _ in range(2)] if depth else []
        self.depth, self.scale = depth, scale

    def go(self, x: Tensor) -> Tensor:
        x = x * self.scale[0]
        if self.depth == 2:
            print(end="")
        return sum((child.go(x) for child in self.children), torch.zeros_like(x)) if self.children else x


def test_the_same_method_of_other_objects(device: torch.device) -> None:
    scale = [1.5]
    tree = Tree(2, scale)
    fast = pygraph.jit(tree.go)
    for index in range(9):
        scale[0] = 1.5 + index // 3 * 0.25
        x = torch.full((2,), float(index), device=device)
        assert fast(x).tolist() == tree.go(x).tolist()
