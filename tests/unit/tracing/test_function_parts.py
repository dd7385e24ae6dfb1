"""Parts of a function: called one after the other they do what the function does, wherever it is cut."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest

from pygraph.tracing.function_parts import Body, CutError, parts_of

COUNT: Any = 0
LOG: list[Any] = []


def returns_early(x: int) -> Any:
    y = x + 1
    if y > 3:
        return "early", y
    z = y * 2
    return z


def falls_off(x: int) -> None:
    LOG.append(x)
    LOG.append(x + 1)


def loops(x: int, *rest: int, scale: int = 2, **others: int) -> Any:
    total = 0
    for number in (x, *rest):
        if number > 5:
            return total
        total += number * scale
    last = number
    found = {name: 2 * value for name, value in others.items()}
    number = sum(number for number in rest)
    return total, last, number, found


def deletes(x: int) -> Any:
    y = [x]
    del x
    z = y
    del y
    with contextlib.suppress(UnboundLocalError):
        z.append(y)  # type: ignore[unresolved-reference] # noqa: F821
    return z


def is_unbound(x: int) -> Any:
    if x > 1:
        y = x
    LOG.append("before")
    return y  # pyright: ignore[reportPossiblyUnboundVariable]


def declares(x: int) -> Any:
    global COUNT
    COUNT += x
    before = COUNT
    COUNT *= 2
    return before, COUNT


def catches(x: int) -> Any:
    try:
        1 // (x - 1)
    except ZeroDivisionError as error:
        text = str(error)
    else:
        text = "none"
    with contextlib.nullcontext(x) as same:
        x += 1
    match (x, same):
        case (a, [*b]):
            c = b
        case (a, b):
            c = [b]
    if (d := a + 1) > 2:
        d += 1
    import math as m

    return text, same, a, c, d, m.floor(2.5)


def defines(x: int) -> Any:
    """The text of a function is no statement that matters."""

    def twice(value: int) -> int:
        return 2 * value

    y = twice(x)
    z = [twice(v) + y for v in range(y)]
    return z, twice(1), (lambda: y)()


def fails(x: int) -> Any:
    LOG.append("first")
    y = [1, 2]
    LOG.append(y[x])
    return y


def reads_before(x: int) -> Any:
    LOG.append("first")
    if x > 1:
        LOG.append(COUNT)  # noqa: F823  # the local variable
    COUNT = 3
    return COUNT


FUNCTIONS = [returns_early, falls_off, loops, deletes, is_unbound, reads_before, declares, catches, defines, fails]


class Counter:
    """A method, and a function that closes over variables."""

    def __init__(self) -> None:
        self.count = 0

    def method(self, x: int) -> Any:
        self.count += x
        y = self.count
        self.count += 1
        return y, super().__init__ is not None, __class__.__name__  # type: ignore[name-defined]


def closes_over() -> Callable[[int], Any]:
    seen = 0

    def function(x: int) -> Any:
        nonlocal seen
        seen += x
        y = seen
        seen += 1
        return y, seen

    return function


def run(fn: types.FunctionType, cuts: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function part by part."""
    bound = inspect.signature(fn).bind(*args, **kwargs)
    bound.apply_defaults()
    variables = dict(bound.arguments)
    for part in parts_of(Body.of(fn), cuts):
        names = [] if part.is_first else sorted(part.named & variables.keys(), key=lambda name: (name != "self", name))
        call = part.function(names)
        taken = (args, kwargs) if part.is_first else ([variables[name] for name in names], {})
        is_returned, found = call(*taken[0], **taken[1])
        if is_returned:
            return found
        for name in part.assigned:
            variables.pop(name, None)
        variables.update(found)
    return None


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns or raises, and what it leaves behind."""
    globals()["COUNT"] = 1
    LOG.clear()
    try:
        result = call()
    except Exception as error:
        result = type(error), str(error)
    return result, COUNT, list(LOG)


def all_cuts(fn: types.FunctionType) -> list[tuple[int, ...]]:
    positions = range(1, len(Body.of(fn).statements))
    return [cuts for count in range(len(positions) + 1) for cuts in itertools.combinations(positions, count)]


@pytest.mark.parametrize("x", [0, 1, 2, 6])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_parts_do_what_the_function_does(fn: types.FunctionType, x: int) -> None:
    more = [((), {}), ((1, 2, 9), {"scale": 3, "k": 4})] if fn is loops else [((), {})]
    for cuts, (rest, kwargs) in itertools.product(all_cuts(fn), more):
        expected = outcome(lambda rest=rest, kwargs=kwargs: fn(x, *rest, **kwargs))
        found = outcome(lambda cuts=cuts, rest=rest, kwargs=kwargs: run(fn, cuts, (x, *rest), kwargs))
        assert found == expected, cuts


def test_parts_of_a_method_and_of_a_closure() -> None:
    method: Any = Counter.method
    for cuts in all_cuts(method):
        mine, theirs = Counter(), Counter()
        for x in (1, 2):
            assert run(method, cuts, (mine, x), {}) == theirs.method(x)
        assert mine.count == theirs.count
    for cuts in all_cuts(closes_over()):  # type: ignore[arg-type]
        one, other = closes_over(), closes_over()
        for x in (1, 2):
            assert run(one, cuts, (x,), {}) == other(x)  # type: ignore[arg-type]


def test_parts_have_the_lines_of_the_source() -> None:
    (first, second) = parts_of(Body.of(fails), [2])
    line = fails.__code__.co_firstlineno
    assert (first.lines, second.lines) == ((line + 1, line + 2), (line + 3, line + 4))
    with pytest.raises(IndexError) as error:
        second.function(["x", "y"])(5, [1])
    assert error.traceback[-1].lineno + 1 == line + 3
    assert str(error.traceback[-1].path) == __file__


def shares(x: int) -> Any:
    y = x

    def inner() -> int:
        return y

    y = 2
    return inner()


def shares_from_inside(x: int) -> Any:
    y = x

    def inner() -> None:
        nonlocal y
        y += 1

    inner()
    return y


def sees_later(x: int) -> Any:
    def inner() -> int:
        return y

    y = x
    return inner()


def looks(x: int) -> Any:
    y = x
    return sorted(locals()), y


def generates(x: int) -> Any:
    y = x
    yield y


def mangled(x: Any) -> Any:
    y = x.__private
    return y


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (shares, "an inner function shares the variable y"),
        (sees_later, "an inner function shares the variable y"),
        (shares_from_inside, "an inner function shares the variable y"),
        (looks, "it calls locals"),
        (generates, "it is a generator"),
        (mangled, "__private has another name in its class"),
        (eval("lambda x: x"), "it has no source, or another one by now"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_that_cannot_be_cut(fn: Any, reason: str) -> None:
    with pytest.raises(CutError, match=reason):
        parts_of(Body.of(fn), [1, 2][: len(Body.of(fn).statements) - 1])


def test_another_source_is_not_taken_for_it(tmp_path: Any) -> None:
    path = tmp_path / "source.py"
    path.write_text("def step(x):\n    y = x + 1\n    return y\n")
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), namespace)
    assert len(Body.of(namespace["step"]).statements) == 2
    path.write_text("def step(x):\n    y = x + 2\n    return y\n")
    import linecache

    linecache.checkcache(str(path))
    with pytest.raises(CutError, match="another one by now"):
        Body.of(namespace["step"])
