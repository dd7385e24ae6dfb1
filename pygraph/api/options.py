"""Options of transforms as users give them, checked and in one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pygraph.calls.options import Options
from pygraph.errors import ArgumentError, describe
from pygraph.ir.descriptors import Mechanism


def make_options(
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
    timer: Callable[[Callable[[], object]], float] | None = None,
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
    return Options(numbers, names, max_graphs, strict, timer, mechanism, bool(reuse_outputs), donated, donated_names)


def merged_options(inner: Options, options: Mapping[str, Any]) -> Options:
    """The options of a stack, with those of one more transform that are not the defaults."""
    kept = {key: getattr(inner, key) for key in Options.__dataclass_fields__}
    changed = {key: value for key, value in options.items() if value != getattr(Options(), key)}
    return make_options(**{**kept, **changed})


def _positions(option: str, value: int | Sequence[int]) -> tuple[int, ...]:
    positions = (value,) if isinstance(value, int) else tuple(value)
    if not _all_are(int, positions):
        raise ArgumentError(describe("jit(…)", f"{option}={value!r}", expected="integers"))
    return positions


def _names(option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not _all_are(str, names):
        raise ArgumentError(describe("jit(…)", f"{option}={value!r}", expected="strings"))
    return names


def _all_are(kind: type, values: Sequence[object]) -> bool:
    return all(isinstance(value, kind) for value in values)
