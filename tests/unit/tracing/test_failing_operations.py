"""Functions that may catch an error of an operation which fails by its data."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph


class OwnError(RuntimeError):
    """One that torch never raises."""


class ZeroDivisionErrorOfMine(ZeroDivisionError):
    """Another one."""


class Errors:
    own = OwnError
    torchs = RuntimeError


def other_class(matrix: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(matrix) + 1
    except OwnError:
        return matrix


def several(matrix: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(matrix) + 1
    except (OwnError, Errors.own):
        return matrix
    except ZeroDivisionErrorOfMine as error:
        raise ValueError from error
    finally:
        matrix = matrix + 1


def in_a_call(matrix: Tensor) -> Tensor:
    try:
        with contextlib.nullcontext():
            return several(matrix)
    except OwnError:
        return matrix * 2


def second_clause(matrix: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(matrix) + 1
    except OwnError:
        return matrix
    except torch.linalg.LinAlgError:
        return matrix + 3


def by_attribute(matrix: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(matrix) + 1
    except Errors.torchs:
        return matrix + 3


def of_variables(matrix: Tensor) -> Tensor:
    kinds: Any = (OwnError, ArithmeticError)
    try:
        return torch.linalg.cholesky(matrix) + 1
    except kinds:
        return matrix
    except Exception:
        return matrix + 3


def anything(matrix: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(matrix) + 1
    except:  # noqa: E722
        return matrix + 3


@pytest.mark.parametrize("fn", [other_class, several, in_a_call])
def test_an_error_of_another_class_is_not_caught(device: torch.device, fn: Callable[[Tensor], Tensor]) -> None:
    fast, good = pygraph.jit(fn), torch.eye(3, device=device)
    for factor in (1, 2, 3, -1, 4):
        matrix = good * factor
        if factor < 0:
            with pytest.raises(RuntimeError):
                fast(matrix)
        else:
            torch.testing.assert_close(fast(matrix), fn(matrix))
    assert "may catch" not in str(fast.explain())
    assert fast.cache_info().captures > 0


@pytest.mark.parametrize("fn", [second_clause, by_attribute, of_variables, anything])
def test_what_is_caught_is_as_in_eager(device: torch.device, fn: Callable[[Tensor], Tensor]) -> None:
    fast, good = pygraph.jit(fn), torch.eye(3, device=device)
    for factor in (1, 2, -1, 3, -2, 4):
        torch.testing.assert_close(fast(good * factor), fn(good * factor))


def test_what_a_call_has_left_on_its_arguments(device: torch.device) -> None:
    """An error that the caller catches leaves what was stored until then, and draws and updates of until then."""
    found: list[list[Any]] = []
    inner = pygraph.jit(lambda x, box: (setattr(box, "inner", 1), torch.linalg.cholesky(x))[1])
    for decorate in (lambda fn: fn, pygraph.jit):
        updated, seen = torch.zeros(2, 2, device=device), list[Any]()

        def fn(x: Tensor, box: Any, items: list[int], named: dict[str, Any], updated: Tensor = updated) -> Tensor:
            box.count += 1
            items.append(box.count)
            updated.add_(1)
            x = x + torch.rand(2, 2, device=x.device) * 0.01
            factor = torch.linalg.cholesky(x) * box.count
            named["sum"] = factor.sum()
            updated.mul_(2)
            return factor + torch.rand(2, 2, device=x.device) + inner(x, box)

        function = decorate(fn)
        torch.manual_seed(0)
        for k in range(8):
            box, items, named = types.SimpleNamespace(count=k), [k], dict[str, Any]()
            sign, seen = -1 if k in (0, 4, 5) else 1, [*seen]
            try:
                seen.append(function(torch.eye(2, device=device) * sign, box, items, named))
            except torch.linalg.LinAlgError:
                seen.append(None)
            seen += [vars(box), items, named, updated.clone(), torch.rand(1), torch.rand(1, device=device)]
        found.append(seen)
    torch.testing.assert_close(*found)
