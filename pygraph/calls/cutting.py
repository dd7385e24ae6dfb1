"""Whether and where calls of a function are cut into parts: found out once, when they are all unlike each other."""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from pygraph.calls.engine import Engine
from pygraph.calls.parted import PartedCalls, PartPolicy
from pygraph.errors import FallbackError, describe
from pygraph.tracing.function_parts import CutError

_REMEDY = "compute in statements of the function itself, that compute no tensors, what decides and is another each time"


class Cutting:
    """The cuts of one function.

    Args:
        of_part: Makes the rules of a part.
        note_unsteady: Called with the reason when calls are all unlike each other, of a part, which is not cut itself.
        note_failed: Called with the engine and the arguments of a call that cannot be traced, of a part.

    Attributes:
        why_whole: Why the function is not cut, as the end of a sentence; empty if that is not known.
    """

    def __init__(
        self,
        of_part: PartPolicy,
        note_unsteady: Callable[[str], None] | None,
        note_failed: Callable[..., None] | None = None,
    ) -> None:
        self._of_part, self._note_unsteady, self._note_failed = of_part, note_unsteady, note_failed
        self._parts: PartedCalls | None = None
        self.why_whole = ""
        self._why_cut = ""
        self._is_known = self.is_of_part
        self._is_tried = False

    @property
    def is_of_part(self) -> bool:
        """Whether the function is a part itself."""
        return self._note_unsteady is not None

    def parts(self) -> PartedCalls | None:
        """The runner of calls part by part; None if the function is not cut."""
        parts = self._parts
        if parts is not None and not parts.is_current():
            if parts.why_useless is None:
                self._is_known = False  # the function is another one by now
            else:
                self.why_whole = f"; where it is cut, {parts.why_useless}"
            parts.release()
            parts = self._parts = None
        return parts

    def cut_outside(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> bool:
        """Cut the function of an engine before and behind what computes tensors; returns whether that can be done.

        Args: as of `cut`.
        """
        if self._is_tried or self._is_known:
            return False
        _check_strict(engine, reason)
        self._is_tried, self._why_cut = True, reason
        with contextlib.suppress(CutError), engine.turn():
            self._parts = PartedCalls(engine, args, kwargs, self._of_part, outside_alone=True)
        return self._parts is not None

    def cut(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Cut the function of an engine, if that is of use.

        Args:
            engine: The engine.
            args: The arguments of a call.
            kwargs: Its keyword arguments.
            reason: Why calls are all unlike each other.
        """
        if self._note_unsteady is not None:  # it is a part itself
            self._note_unsteady(reason)
        if not self._is_known:
            _check_strict(engine, reason)
            self._is_known, self._why_cut = True, reason
            try:
                with engine.turn():
                    self._parts = PartedCalls(engine, args, kwargs, self._of_part)
            except CutError as error:
                self.why_whole = f"; it is not cut, as {error}: {_REMEDY}"

    def note_failed(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a call cannot be traced, of a part, which is cut where it is cut from then on.

        Args: as of `cut`.
        """
        if self._note_failed is not None:
            self._note_failed(engine, args, kwargs)

    def in_python(self) -> str | None:
        """The lines that run as Python at each call, and why; None if the function is not cut."""
        parts = self.parts()
        return None if parts is None else f"{parts.described()}: {self._why_cut}"


def _check_strict(engine: Engine, reason: str) -> None:
    """Raise FallbackError where lines of a function would run as Python, and options do not allow that."""
    if engine.function.options.strict:
        remedy = "Do that before or after the call. strict=True refuses what does not run as a graph."
        raise FallbackError(describe(f"{engine.name}(…)", reason, remedy=remedy))
