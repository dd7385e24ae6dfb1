"""The options of a transformed function: how it treats its arguments, its cache and its memory."""

from __future__ import annotations

import dataclasses

from pygraph.errors import ArgumentError, describe
from pygraph.ir.selections import Mechanism
from pygraph.runtime.selecting import DEFAULT_POLICY, SelectionPolicy


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a transformed function; `pygraph.jit` describes them."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    max_graphs: int = 64
    strict: bool = False
    selection: SelectionPolicy = DEFAULT_POLICY
    mechanism: Mechanism = "auto"
    reuse_outputs: bool = False
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    bounds: tuple[tuple[str, int | None], ...] = ()

    @property
    def donates(self) -> bool:
        """Whether calls consume arguments."""
        return bool(self.donate_argnums or self.donate_argnames)

    def of_derived(self) -> Options:
        """The options of a function that is derived from this one, whose arguments are others."""
        return dataclasses.replace(
            self, static_argnums=(), static_argnames=(), donate_argnums=(), donate_argnames=(), reuse_outputs=False
        )


def check_flag(call: str, name: str, value: object) -> None:
    """Raise ArgumentError unless an option is True or False: ``strict="no"`` would be true."""
    if not isinstance(value, bool):
        raise ArgumentError(describe(call, f"{name}={value!r}", expected="True or False"))
