"""Errors that only a trace raises, and that the function has caught: what it does then is not what eager does."""

# Symbols are torch's private parts. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pygraph.ir.source_lines import is_in_library
from pygraph.tracing.torch_errors import in_words, is_of_a_trace


class Symbols(ShapeEnv):
    """The numbers of a trace, which notes errors about those that are on the device.

    Attributes:
        raised: The errors.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.raised: list[BaseException] = []

    def _make_data_dependent_error(self, *args: Any, **kwargs: Any) -> Any:
        error: BaseException = super()._make_data_dependent_error(*args, **kwargs)
        self.raised.append(error)
        return error


def caught_by_function(errors: Iterable[BaseException]) -> str | None:
    """The first error that only a trace raises and that user code has caught, in words; None if there is none.

    A traceback begins at the frame that has caught the error. Torch catches some of its own.
    """
    for error in errors:
        caught = error.__traceback__
        if caught is not None and is_of_a_trace(error) and not is_in_library(caught.tb_frame.f_code.co_filename):
            return f"{in_words(error)[0]}, and it catches the error, which is none in eager"
    return None
