"""``pygraph::python_draw``: numbers that Python's `random` or NumPy's global generator draws, as a tensor on the host.

It runs on the host, between graphs, in the order of the program, so that the generator's state is that of eager.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pygraph.ir.ops import define


class Draw(NamedTuple):
    """A function that draws.

    Attributes:
        owner: The module that has it.
        name: Its name there.
        function: The function.
        takes_size: Whether a shape of the result may follow its numbers.
    """

    owner: Any
    name: str
    function: Callable[..., Any]
    takes_size: bool = False


_numpy: Any = np.random  # some functions have no stubs

_NAMES = (
    (random, False, ("random", "uniform", "randint", "gauss", "normalvariate", "betavariate")),
    (_numpy, True, ("random", "random_sample", "uniform", "normal", "beta", "randint", "permutation")),
    (_numpy, False, ("rand", "randn")),
)
DRAWS: Mapping[str, Draw] = {
    f"{owner.__name__}.{name}": Draw(owner, name, getattr(owner, name), takes_size)
    for owner, takes_size, names in _NAMES
    for name in names
}
"""The functions by their names, as they were when this was imported."""

OF_INTEGERS = frozenset({"random.randint", "numpy.random.randint", "numpy.random.permutation"})
"""Functions that take integers and give integers."""

SAMPLE, SHUFFLE = "random.sample", "random.shuffle"
"""The draws of so many of the integers up to a number, and of an order of them."""


_sample, _shuffle = random.sample, random.shuffle
_drawn = set[str]()


def _python_draw(function: str, numbers: list[float], size: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
    given = [*map(int, numbers)] if function in OF_INTEGERS else numbers
    if function == SAMPLE:
        drawn: Any = _sample(range(int(numbers[0])), int(numbers[1]))
    elif function == SHUFFLE:
        drawn = list(range(int(numbers[0])))
        _shuffle(drawn)
    elif DRAWS[function].takes_size and size is not None:
        drawn = DRAWS[function].function(*given, size=tuple(size))
    else:
        drawn = DRAWS[function].function(*given, *(size or ()))
    return torch.as_tensor(np.asarray(drawn)).to(dtype)


def _python_draw_fake(function: str, numbers: list[float], size: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
    _drawn.add(function)
    if function == SAMPLE:
        size = [int(numbers[1])]
    elif function in (SHUFFLE, "numpy.random.permutation"):
        size = [int(numbers[0])]
    return torch.empty(size or (), dtype=dtype, device="cpu")


define(
    "python_draw(str function, float[] numbers, int[]? size, ScalarType dtype) -> Tensor",
    _python_draw,
    _python_draw_fake,
    [torch.Tag.nondeterministic_seeded],
)

PYTHON_DRAW: Any = torch.ops.pygraph.python_draw.default
"""The operation."""


def are_drawn() -> bool:
    """Whether any trace of this process has such draws."""
    return bool(_drawn)


class PythonStates:
    """The present states of both generators, to which they can be put back."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
