"""Draws of Python's `random` and of NumPy's global generator, in a trace: operations whose results are live.

A trace has at most a few numbers of them: those by which a loop decides at each turn would make of each call another
path, so its statement runs as Python. There is no limit for arrays and lists, which torch takes as tensors.
"""

# Arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13

from pygraph.ir.python_draws import DRAWS, OF_INTEGERS, PYTHON_DRAW, SAMPLE, SHUFFLE, Draw
from pygraph.tracing.patches import replaced
from pygraph.tracing.proxy_trace import tracing_here

# Numbers of one trace that are live; more are drawn as Python does.
_MOST_NUMBERS = 4

# Doubles hold integers up to this.
_LARGEST = 1 << 53


class PythonDraws:
    """The draws of one trace."""

    def __init__(self) -> None:
        self._numbers = 0

    @contextlib.contextmanager
    def served(self) -> Generator[None, None, None]:
        """Record draws for the time of the context."""
        with contextlib.ExitStack() as stack:
            for name, draw in DRAWS.items():
                make = functools.partial(self._drawing, name, draw)
                stack.enter_context(replaced(draw.owner, draw.name, make))
            stack.enter_context(replaced(random, "sample", _sampling))
            stack.enter_context(replaced(random, "shuffle", _shuffling))
            yield

    def _drawing(self, name: str, draw: Draw, original: Any) -> Any:
        @functools.wraps(original)
        def drawing(*args: Any, **kwargs: Any) -> Any:
            is_served = original is draw.function and _is_recorded()
            found = _numbers_of(name, draw, args, kwargs) if is_served else None
            if found is None:
                return original(*args, **kwargs)
            numbers, size = found
            dtype = torch.int64 if name in OF_INTEGERS else torch.float64
            if size is None and name != "numpy.random.permutation":
                self._numbers += 1
                if self._numbers > _MOST_NUMBERS:
                    return original(*args, **kwargs)
                return PYTHON_DRAW(name, numbers, None, dtype).item()
            return PYTHON_DRAW(name, numbers, size, dtype).numpy()

        return drawing


def _sampling(original: Any) -> Any:
    @functools.wraps(original)
    def sample(population: Any, k: Any, **kwargs: Any) -> Any:
        items = _items_of(population) if not kwargs and type(k) is int and _is_recorded() else None
        if items is None or getattr(original, "__func__", None) is not random.Random.sample or k > len(population):
            return original(population, k, **kwargs)
        return items(PYTHON_DRAW(SAMPLE, [len(population), k], None, torch.int64)).tolist()

    return sample


def _shuffling(original: Any) -> Any:
    @functools.wraps(original)
    def shuffle(x: Any) -> None:
        items = _items_of(x) if type(x) is list and _is_recorded() else None
        if items is None or getattr(original, "__func__", None) is not random.Random.shuffle:
            original(x)
            return
        x[:] = items(PYTHON_DRAW(SHUFFLE, [len(x)], None, torch.int64)).tolist()

    return shuffle


def _is_recorded() -> bool:
    return get_proxy_mode() is not None and tracing_here()


def _numbers_of(
    name: str, draw: Draw, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[float], list[int] | None] | None:
    """The numbers and the shape of a draw; None if it is passed anything else."""
    names = _PARAMETERS.get(name, ())
    given = {**dict(zip(names, args, strict=False)), **kwargs} if names else {}
    if names and (len(args) > len(names) or not given.keys() <= {*names}):
        return None
    if not names:  # of a shape alone
        return ([], list(args) or None) if not kwargs and all(type(one) is int for one in args) else None
    size = given.pop("size", None) if draw.takes_size else None
    size = [size] if type(size) is int else size
    if size is not None and (type(size) not in (tuple, list) or not all(type(one) is int for one in size)):
        return None
    numbers = [given[one] for one in names if one in given]
    if [one for one in names if one in given] != list(names[: len(numbers)]):
        return None
    if draw.owner is random and len(numbers) < len(names):
        return None
    are_known = all(type(one) in (int, float) and abs(one) < _LARGEST for one in numbers)
    are_integers = all(type(one) is int for one in numbers)
    return (numbers, size) if are_known and (are_integers or name not in OF_INTEGERS) else None


_PARAMETERS: dict[str, tuple[str, ...]] = {
    "random.random": (), "random.uniform": ("a", "b"), "random.randint": ("a", "b"), "random.gauss": ("mu", "sigma"),
    "random.normalvariate": ("mu", "sigma"), "random.betavariate": ("alpha", "beta"),
    "numpy.random.random": ("size",), "numpy.random.random_sample": ("size",),
    "numpy.random.uniform": ("low", "high", "size"), "numpy.random.normal": ("loc", "scale", "size"),
    "numpy.random.beta": ("a", "b", "size"), "numpy.random.randint": ("low", "high", "size"),
    "numpy.random.permutation": ("x",),
}  # fmt: skip


def _items_of(population: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that gives the items of a population at positions; None if they are no known integers."""
    if type(population) is range:
        return lambda order: order * population.step + population.start
    if type(population) in (list, tuple) and population and all(type(one) is int for one in population):
        return lambda order: torch.tensor(population, device="cpu")[order]
    return None
