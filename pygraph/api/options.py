"""Options of transforms as users give them, checked and in one form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from pygraph.calls.options import Options
from pygraph.errors import ArgumentError, describe
from pygraph.ir.selections import MODES, OBJECTIVES, Mechanism, Mode, Objective
from pygraph.runtime.selecting import DEFAULT_POLICY, SelectionPolicy


def make_options(
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
    selection: SelectionPolicy = DEFAULT_POLICY,
    mechanism: Mechanism = "auto",
    reuse_outputs: bool = False,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
) -> Options:
    """Check options and put them in one form."""
    numbers, names = _positions("static_argnums", static_argnums), _names("static_argnames", static_argnames)
    donated, donated_names = _positions("donate_argnums", donate_argnums), _names("donate_argnames", donate_argnames)
    both = [*(index for index in donated if index in numbers), *(name for name in donated_names if name in names)]
    if both:
        raise ArgumentError(describe("jit(…)", f"{both[0]!r} is both static and donated", expected="one of them"))
    if not _all_are(int, [max_graphs]) or isinstance(max_graphs, bool) or max_graphs < 1:
        raise ArgumentError(describe("jit(…)", f"max_graphs={max_graphs!r}", expected="a positive integer"))
    return Options(
        numbers, names, max_graphs, strict, selection, mechanism, bool(reuse_outputs), donated, donated_names
    )


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
    for name, value, known in (("objective", objective, OBJECTIVES), ("mode", mode, MODES)):
        if value not in known:
            raise ArgumentError(describe(call, f"{name}={value!r}", expected=" or ".join(map(repr, known))))
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or not 0 < budget < float("inf"):
        raise ArgumentError(describe(call, f"budget={budget!r}", expected="a positive number of seconds"))
    if timer is not None and not callable(timer):
        raise ArgumentError(describe(call, f"timer={timer!r}", expected="a function that times a run"))
    return SelectionPolicy(cast("Objective", objective), float(budget), cast("Mode", mode), timer)


def merged_options(inner: Options, options: Mapping[str, Any]) -> Options:
    """The options of a stack, with those of one more transform that are not the defaults."""
    kept = {key: getattr(inner, key) for key in Options.__dataclass_fields__}
    changed = {key: value for key, value in options.items() if value != getattr(Options(), key)}
    return make_options(**{**kept, **changed})


def _positions(option: str, value: int | Sequence[int]) -> tuple[int, ...]:
    positions = _as_tuple(value)
    if not _all_are(int, positions):
        raise ArgumentError(describe("jit(…)", f"{option}={value!r}", expected="integers"))
    return positions


def _names(option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    names = _as_tuple(value)
    if not _all_are(str, names):
        raise ArgumentError(describe("jit(…)", f"{option}={value!r}", expected="strings"))
    return names


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)  # pyright: ignore


def _all_are(kind: type, values: Sequence[object]) -> bool:
    return all(isinstance(value, kind) for value in values)
