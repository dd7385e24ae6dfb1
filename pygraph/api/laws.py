"""The laws of transforms, for those that users write: pure, legal, and the same results."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.errors import ArgumentError, ProgramError, describe
from pygraph.ir.check import check_program
from pygraph.ir.descriptors import CapturedGenerator
from pygraph.ir.evaluate import clone_strided
from pygraph.ir.fields import check_is_program
from pygraph.ir.program import Program
from pygraph.ir.structures import unflatten
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import random_states_restored


def check_transform(transform: Any, program: Program, *args: Any, rtol: float | None = None, **kwargs: Any) -> Program:
    """Apply a transform to a Program, and check that it keeps the laws of transforms.

    A transform does not change the Program that it is given; it returns one that keeps the rules of its stage; and
    both compute the same on these arguments: results, updates of arguments, and random numbers.

    Args:
        transform: A transform, as of `pygraph.transform`.
        program: A Program at a stage that it takes.
        *args: Positional arguments that the Program takes; they are not changed.
        rtol: How far results may differ, relatively; by default what `torch.testing.assert_close` allows.
        **kwargs: Keyword arguments likewise.

    Returns:
        The Program that the transform returns.

    Raises:
        ArgumentError: There is no transform, or no Program that it is applied to.
        ProgramError: A law is broken.

    Example:
        >>> import torch, pygraph
        >>> x = torch.ones(2)
        >>> pygraph.check_transform(pygraph.devicify, pygraph.trace(torch.sin)(x), x).history
        ('trace', 'devicify')
    """
    if isinstance(transform, Program) or not callable(transform):
        problem = f"{type(transform).__name__} is no transform"
        raise ArgumentError(describe("check_transform(…)", problem, expected="a transform, and then a Program"))
    check_is_program("check_transform(…, {})", program)
    call, text = f"{getattr(transform, '__name__', transform)}({program.name})", str(program)
    result: Any = transform(program)
    if not isinstance(result, Program):
        raise ProgramError(describe(call, f"it returns a {type(result).__name__}", expected="a Program"))
    check_program(result)
    if str(program) != text:
        raise ProgramError(
            describe(call, "it changes the Program that it is given", remedy="Edit program.copy_graph().")
        )
    expected, found = _run(program, args, kwargs), _run(result, args, kwargs)
    try:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=None if rtol is None else rtol, equal_nan=True)
    except AssertionError as error:
        raise ProgramError(describe(call, f"results or updated arguments differ: {error}")) from None
    return result


def _run(program: Program, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """The leaves of a Program's result and of its arguments after a call, from the present random state."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    copies = {id(leaf): clone_strided(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    copied = [copies.get(id(leaf), leaf) for leaf in leaves]
    passed, named = unflatten(copied, tree)
    generators = [one.value for one in program.inputs if isinstance(one, CapturedGenerator)]
    with torch.no_grad(), random_states_restored(driver_for(program.device), generators):
        results = pytree.tree_leaves(program(*passed, **named))
    return [_plain(value) for value in results], [_plain(value) for value in copied]


def _plain(value: Any) -> Any:
    return value if isinstance(value, (torch.Tensor, int, float, complex, bool)) else repr(value)
