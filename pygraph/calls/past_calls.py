"""Past calls of a kind, and of the same form, as a new one of them is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from pygraph.calls.entries import Entry, Recorded, Refused
from pygraph.calls.keys import Key
from pygraph.calls.retries import Traces
from pygraph.tracing.function_kinds import StateInputs


@dataclasses.dataclass(frozen=True)
class PastCalls:
    """The entries of a key and the traces of its form before a call of that key is compiled.

    Attributes:
        last: The entry that was used last; None if there was none.
        form: The part of the key that it has in common with those of other objects.
        traces: The budget of traces of that form; None if there was none.
        state: The state that is another one now, so that calls are to take it.
        moved: An entry of which only tensors have moved.
    """

    last: Entry | None
    form: Hashable
    traces: Traces | None
    state: StateInputs
    moved: Recorded | None

    @property
    def last_refusal(self) -> Refused | None:
        """The entry that was used last, if it says that calls cannot be traced."""
        return self.last if isinstance(self.last, Refused) else None

    @property
    def has_other_objects(self) -> bool:
        """Whether calls of the form were traced with other objects before."""
        return self.traces is not None and self.last is None

    def is_of_new_form(self, key: Key) -> bool:
        """Whether no call of its form was traced before, whatever its objects were."""
        return self.last is None and (self.form is key.kind or self.traces is None)

    @property
    def was_once(self) -> bool:
        """Whether the last call could not be traced, and that held for it alone."""
        return self.last_refusal is not None and self.last_refusal.for_one_call
