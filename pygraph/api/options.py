"""Options of transforms as users give them, checked and in one form."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from pygraph.calls.options import Options, check_flag
from pygraph.errors import ArgumentError, describe
from pygraph.ir.selections import MECHANISMS, MODES, OBJECTIVES, Mechanism, Mode, Objective
from pygraph.runtime.selecting import DEFAULT_POLICY, SelectionPolicy
from pygraph.transforms.padding.bounds import BOUNDED

F = TypeVar("F", bound=Callable[..., Any])


def make_options(  # noqa: PLR0913  # the options that users have
    call: str,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
    selection: SelectionPolicy = DEFAULT_POLICY,
    mechanism: Mechanism = "auto",
    reuse_outputs: bool = False,
    bounds: Mapping[str, int | None] | Sequence[tuple[str, int | None]] | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
) -> Options:
    """Check options and put them in one form; errors call what has them ``call``."""
    numbers = _positions(call, "static_argnums", static_argnums)
    names = _names(call, "static_argnames", static_argnames)
    donated = _positions(call, "donate_argnums", donate_argnums)
    donated_names = _names(call, "donate_argnames", donate_argnames)
    both = [*(index for index in donated if index in numbers), *(name for name in donated_names if name in names)]
    if both:
        raise ArgumentError(describe(call, f"{both[0]!r} is both static and donated", expected="one of them"))
    if not _are_integers([max_graphs]) or max_graphs < 1:
        raise ArgumentError(describe(call, f"max_graphs={max_graphs!r}", expected="a positive integer"))
    check_flag(call, "strict", strict)
    check_flag(call, "reuse_outputs", reuse_outputs)
    check_choice(call, "mechanism", mechanism, MECHANISMS)
    return Options(
        numbers, names, max_graphs, strict, selection, mechanism, reuse_outputs, donated, donated_names,
        _bounds(call, bounds),
    )  # fmt: skip


def check_choice(call: str, name: str, value: object, known: Sequence[str]) -> None:
    """Raise ArgumentError unless an option is one of the known values."""
    if value not in known:
        raise ArgumentError(describe(call, f"{name}={value!r}", expected=" or ".join(map(repr, known))))


def selection_policy(
    call: str, objective: str, budget: float, mode: str, timer: Callable[[Callable[[], object]], float] | None = None
) -> SelectionPolicy:
    """Check how ways of running are to be selected, and put it in one form.

    Args:
        call: The call that has these options.
        objective: Which time is to be short.
        budget: Seconds of measurements.
        mode: On which grounds ways are selected.
        timer: Microseconds of one run; None for the device's own measurement.

    Raises:
        ArgumentError: One of them has a wrong value.
    """
    check_choice(call, "objective", objective, OBJECTIVES)
    check_choice(call, "mode", mode, MODES)
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or not 0 < budget < float("inf"):
        raise ArgumentError(describe(call, f"budget={budget!r}", expected="a positive number of seconds"))
    if timer is not None and not callable(timer):
        raise ArgumentError(describe(call, f"timer={timer!r}", expected="a function that times a run"))
    return SelectionPolicy(cast("Objective", objective), float(budget), cast("Mode", mode), timer)


def merged_options(call: str, inner: Options, options: Mapping[str, Any]) -> Options:
    """The options of a stack, with those of one more transform that are not the defaults; errors call it ``call``."""
    kept = {key: getattr(inner, key) for key in Options.__dataclass_fields__}
    changed = {key: value for key, value in options.items() if value != getattr(Options(), key)}
    return make_options(call, **{**kept, **changed})


def no_unknown_options(function: F) -> F:
    """Have a function raise ArgumentError, which is a TypeError, for an option that it does not have."""
    name, known = getattr(function, "__name__", ""), list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        unknown = next((option for option in kwargs if option not in known), None)
        if unknown is not None:
            raise ArgumentError(unknown_option(f"{name}(…)", unknown, known))
        return function(*args, **kwargs)

    return cast("F", checked)


def unknown_option(call: str, option: str, known: Sequence[str], expected: str | None = None) -> str:
    """The message for an option that there is not, with one that it may be meant for."""
    similar = difflib.get_close_matches(option, known, n=1)
    remedy = f"Did you mean {similar[0]}?" if similar else None
    if remedy is None and expected is None:
        remedy = f"There are {', '.join(name for name in known if name not in ('fn', 'args', 'kwargs'))}."
    return describe(call, f"there is no option {option!r}", expected=expected, remedy=remedy)


def _positions(call: str, option: str, value: int | Sequence[int]) -> tuple[int, ...]:
    positions = _as_tuple(value)
    if not _are_integers(positions):
        raise ArgumentError(describe(call, f"{option}={value!r}", expected="integers"))
    return positions


def _names(call: str, option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    names = _as_tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(describe(call, f"{option}={value!r}", expected="strings"))
    return names


def _bounds(
    call: str, bounds: Mapping[str, int | None] | Sequence[tuple[str, int | None]] | None
) -> tuple[tuple[str, int | None], ...]:
    if bounds is None:
        return ()
    if not isinstance(bounds, (Mapping, tuple)):
        raise ArgumentError(describe(call, f"bounds={bounds!r}", expected="a dict from names or lines to sizes"))
    pairs = tuple(bounds.items()) if isinstance(bounds, Mapping) else tuple(bounds)
    for name, bound in pairs:
        if not isinstance(name, str) or (  # pyright: ignore[reportUnnecessaryIsInstance]
            name not in BOUNDED and ":" not in name
        ):
            expected = f"{', '.join(BOUNDED)}, or a line as 'train.py:12'"
            raise ArgumentError(describe(call, f"bounds has {name!r}", expected=expected))
        if bound is not None and (not _are_integers([bound]) or bound < 1):
            raise ArgumentError(describe(call, f"bounds[{name!r}]={bound!r}", expected="a positive integer or None"))
    return pairs


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)  # pyright: ignore


def _are_integers(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
