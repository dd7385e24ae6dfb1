"""Calls that set gradients: steps of training as they are written, with ``zero_grad``, ``backward`` and an optimizer.

A replay sets no attribute. So a function whose call leaves other ``.grad``s behind than there were is compiled as
another one (`Step`), which is passed the gradients that there are, and returns those that there are to be. `Steps` is
around it: it reads the gradients before a call, and sets them after it. Learning rates that a schedule changes, which
the function finds in its optimizer, are passed in the same way.
"""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.environment import Environment
from pygraph.program import Fallback
from pygraph.trace import Passing
from pygraph.tracing.gradients import is_spent
from pygraph.tracing.recording import is_known_size
from pygraph.transformed import MAX_RETRACES, SETTLED, Transformed

if TYPE_CHECKING:
    from pygraph.entries import Entry
    from pygraph.keys import Key


@dataclasses.dataclass(frozen=True)
class _Returned:
    """What a call returned: its structure, and which of its leaves require grad but have no graph left for it."""

    tree: pytree.TreeSpec
    spent: tuple[int, ...]


class AsItIsError(Exception):
    """A call has no graph: the function itself is to run, and sets gradients by itself."""


class Step(Passing):
    """A function of gradients, learning rates, and another function's arguments, to be traced.

    Args:
        fn: The other function.
        name: What reports call it.
        differentiated: The tensors whose gradients it takes and returns, by the names that reports have for them.
        groups: The parameter groups whose learning rates it takes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        differentiated: Sequence[tuple[str, torch.Tensor]],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        self.differentiated, self.groups = [tensor for _, tensor in differentiated], groups
        self.returned: list[_Returned] = []
        self._names = [name for name, _ in differentiated]
        self._paths: list[str] = []
        self.__name__ = name
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it

    def __call__(self, gradients: list[Any], rates: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The new gradients, the number of what is in ``returned``, and the leaves of what the function returns."""
        if get_proxy_mode() is None:
            raise AsItIsError
        before = [tensor.grad for tensor in self.differentiated], [group["lr"] for group in self.groups]
        try:
            self._put(gradients, rates)
            result = self.__wrapped__(*args, **kwargs)
            return [*(tensor.grad for tensor in self.differentiated), *self._numbered(result)]
        finally:
            self._put(*before)

    def _put(self, gradients: list[Any], rates: list[Any]) -> None:
        for tensor, gradient in zip(self.differentiated, gradients, strict=True):
            tensor.grad = gradient
        for group, rate in zip(self.groups, rates, strict=True):
            group["lr"] = rate

    def _numbered(self, result: Any) -> list[Any]:
        keyed, tree = pytree.tree_flatten_with_path(result, is_leaf=is_known_size)
        self._paths = [pytree.keystr(path) for path, _ in keyed]
        leaves = [leaf for _, leaf in keyed]
        spent = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_spent(leaf)
        ]
        detached = {id(leaves[index]): leaves[index].detach() for index in spent}
        leaves = [detached.get(id(leaf), leaf) for leaf in leaves]
        returned = _Returned(tree, tuple(spent))
        if returned not in self.returned:
            self.returned.append(returned)
        return [self.returned.index(returned), *leaves]

    def path(self, path: str) -> str:
        """What reports call an argument or a result of this function."""
        kind, first, rest = path.partition("]")[0].partition("[")[0], _index(path), path.partition("]")[2]
        count = len(self.differentiated)
        if kind == "result":
            if first < count:
                return f"{self._names[first]}.grad"
            return "what is returned" if first == count else f"result{self._paths[first - count - 1]}"
        if first == 0:
            return f"{self._names[_index(rest)]}.grad"
        return f"learning rate {_index(rest)}" if first == 1 else ("args", "kwargs")[first - 2] + rest


def _index(path: str) -> int:
    """The first index in a path, as the 1 in ``args[1][2]``."""
    return int(path.partition("[")[2].partition("]")[0])


class OutdatedError(Exception):
    """The function reaches other tensors than before, or a learning rate has changed that is not passed."""

    def __init__(self, scheduled: bool = False) -> None:
        super().__init__()
        self.scheduled = scheduled


class Engine(Transformed[..., Any]):
    """What compiles and runs a `Step`.

    Attributes:
        step: It.
        gives_up: Whether calls take gradients out of the list that they are passed.
    """

    def __init__(self, step: Step, function: Transformed[..., Any]) -> None:
        super().__init__(step, function.passes, function.derived_options(), function)
        self.step = step
        self.gives_up = False
        self._function = function

    def static_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Those that the options of the function make static."""
        gradients, rates, *given = args
        first = len(gradients) + len(rates)
        return frozenset(first + leaf for leaf in self._function.static_leaves(*given))

    def given_up(self, entry: Entry, args: tuple[Any, ...]) -> Sequence[int]:
        """The gradients that a step replaces and does not read, as after ``zero_grad``."""
        (gradients, *_), executable = args, entry.executable
        unread: frozenset[int] = frozenset() if executable is None else executable.unread
        found = [index for index in range(len(gradients)) if index in unread and gradients[index] is not None]
        self.gives_up = self.gives_up or bool(found)
        return found

    def _compile(self, key: Key, leaves: list[Any], structure: Any, args: Any, kwargs: Any) -> Entry:
        step, now = self.step, reached(self._function, *args[2:])
        if not _are_same(now.differentiable, step.differentiated):
            raise OutdatedError
        if step.groups:
            if not _are_same(now.rates, step.groups):
                raise OutdatedError
        elif any(e.traced is not None and not e.traced.environment.rates_are_current() for e in self._entries.of(key)):
            raise OutdatedError(scheduled=True)
        return super()._compile(key, leaves, structure, args, kwargs)


def reached(function: Transformed[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Environment:
    """What a call of the function can reach besides tensors that it is passed."""
    return Environment(function.fn, {"args": args, "kwargs": kwargs})


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class Steps:
    """Runs calls of one kind that set gradients.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        scheduled: Whether learning rates change from call to call, and are passed.

    Attributes:
        engine: What runs them.
    """

    def __init__(
        self, function: Transformed[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scheduled: bool
    ) -> None:
        self._function, self._scheduled = function, scheduled
        self._renewals = self._settled = 0
        self.engine = self._make(args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
        found = reached(self._function, args, kwargs)
        groups = found.rates if self._scheduled else []
        tensors = [(found.names[id(tensor)], tensor) for tensor in found.differentiable]
        return Engine(Step(self._function.fn, self._function.function_name, tensors, groups), self._function)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and leave the gradients behind that it leaves behind."""
        function = self._function
        while self._renewals <= MAX_RETRACES:
            with function._lock:  # no other call of the function sees gradients in between
                try:
                    return self._run(args, kwargs)
                except AsItIsError:
                    break
                except OutdatedError as error:
                    self._scheduled = self._scheduled or error.scheduled
                self._renewals += 1
                self._settled = 0
                self.engine.forget()
                self.engine = self._make(args, kwargs)
        else:
            note = Fallback("the call", "something that the function closes over changes at every call")
            return function._run_inline(note, args, kwargs)
        return function.fn(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The same as the function is called."""
        return self(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step, rates = self.engine.step, [group["lr"] for group in self.engine.step.groups]
        before = [tensor.grad for tensor in step.differentiated]
        if self.engine.gives_up:
            found = self._give_up(before, rates, args, kwargs)
        else:
            found = self.engine(before, rates, args, kwargs)
        count = len(before)
        for tensor, new in zip(step.differentiated, found[:count], strict=True):
            if tensor.grad is not new:
                tensor.grad = new
        self._settled += 1
        if self._settled >= SETTLED:
            self._renewals = 0
        returned, leaves = step.returned[found[count]], found[count + 1 :]
        if returned.spent:
            _mark_spent(leaves, returned.spent)
        return pytree.tree_unflatten(leaves, returned.tree)

    def _give_up(self, before: list[Any], rates: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it so that memory of gradients that it replaces is free for new ones, as after ``zero_grad`` in eager.

        Nobody but the list holds them then, and whoever holds one besides keeps it.
        """
        tensors = self.engine.step.differentiated
        try:
            for tensor in tensors:
                tensor.grad = None
            return self.engine(before, rates, args, kwargs)
        except BaseException:
            for tensor, gradient in zip(tensors, before, strict=True):
                tensor.grad = gradient
            raise

    def forget(self) -> None:
        """Give back its graphs."""
        self.engine.forget()


def _mark_spent(leaves: list[Any], spent: Sequence[int]) -> None:
    """Have results require grad as in eager, where a gradient of them is an error."""
    marked: dict[int, torch.Tensor] = {}
    with torch.enable_grad():
        for index in spent:
            leaf = leaves[index]
            if id(leaf) not in marked:
                marked[id(leaf)] = _Spent.apply(_ANCHOR, leaf)  # pyright: ignore
            leaves[index] = marked[id(leaf)]


# What has no gradient, as its graph ends in an error, but makes results require one.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


class _Spent(torch.autograd.Function):
    """The graph of a result of which the call itself has taken the backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        """The value, which requires grad."""
        del ctx, anchor
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An error, as eager's."""
        raise RuntimeError(
            "Trying to backward through the graph a second time: the call that returned this tensor has taken its"
            " backward. Specify retain_graph=True there if you need to backward through the graph again."
        )
