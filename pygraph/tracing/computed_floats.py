"""NumPy floats that a traced function computes of live numbers, which are no inputs of the trace yet.

Each is the value of one call, on which the trace depends. It knows what it was computed of, so that what the function
computes of it is known as well, and the next trace is passed all of that at once: a schedule in NumPy is many steps.
`pygraph.tracing.number_operations` has its operators.
"""

# NumPy's floats have no types of their parts.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import Any

import numpy as np

from pygraph.tracing.live_numbers import Source
from pygraph.tracing.number_uses import NumberUses


class ComputedFloat(np.float64):
    """A NumPy float that knows what it was computed of.

    Attributes:
        source: That.
        uses: What is asked of the numbers of the trace.
    """

    source: Source
    uses: NumberUses

    @classmethod
    def of(cls, source: Source, uses: NumberUses) -> ComputedFloat:
        """The value of a source."""
        number = cls(source.value)
        number.source, number.uses = source, uses
        return number

    @property
    def __class__(self) -> type:  # pyright: ignore
        """As in eager."""
        return np.float64

    def __reduce__(self) -> Any:
        return self.source.value.__reduce__()

    def __copy__(self) -> Any:
        return self  # numbers are never copied

    def __deepcopy__(self, memo: Any) -> Any:
        del memo
        return self


def without_source(value: Any) -> Any:
    """A value as NumPy has computed it.

    >>> number = ComputedFloat.of(Source("n0", np.float64(2), frozenset({0})), NumberUses())
    >>> type(without_source(number)), without_source("text")
    (<class 'numpy.float64'>, 'text')
    """
    return value.source.value if type(value) is ComputedFloat else value
