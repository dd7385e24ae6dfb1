"""What a transformed function keeps for each kind of call, and how it is found again.

The key of a call holds its arguments and settings. What the function reads besides them is in the environment of each
entry, so one key may have several: a module that goes back and forth between training and evaluation has one for each.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pygraph.calls.keys import Key
from pygraph.calls.retries import Traces
from pygraph.guards.environment import Environment
from pygraph.guards.locations import Location
from pygraph.ir.descriptors import Captured, Fallback
from pygraph.ir.effects import writes_memory
from pygraph.ir.program import Program
from pygraph.ir.ranges import Ranges
from pygraph.lowering.aten import written_inputs
from pygraph.runtime.executable import Executable
from pygraph.tracing.function_kinds import Traced

if TYPE_CHECKING:
    from pygraph.calls.steps import Steps

# Of one key, as many are kept that differ in what the function reads besides its arguments.
MOST_VARIANTS = 8


@dataclasses.dataclass(eq=False)
class Entry:
    """What one kind of call runs: an executable, a Program that is evaluated, or the function as it is.

    ``described`` is a Program to report when it is not the one that runs, ``recordable`` the one that the executable
    was recorded from. With ``once``, this call alone runs like that, and the next one is traced again, as a step if
    this one ``sets_gradients``: an optimizer's first step changes more than later ones do; it has ``filled`` locations
    where nothing was. What cannot be traced is ``refused_in`` the modes that its modules are in. Calls that are
    ``differentiated`` by autograd run as compiled functions of their own, see `pygraph.composition`; those that set
    gradients or attributes by ``steps``. Calls run like that ``until`` there may be another trace. What is not
    ``is_kept`` is for this call alone. ``traces`` are those of calls of its form; its own has taken so many
    ``seconds``.
    """

    traced: Traced | None
    program: Program | None
    executable: Executable | None
    fallbacks: list[Fallback]
    calls: int = 0
    described: Program | None = None
    plans: int = 0
    stamp: int = 0
    once: bool = False
    filled: tuple[Location, ...] = ()
    sets_gradients: bool = False
    differentiated: bool = False
    recordable: Program | None = None
    refused_in: Environment | None = None
    steps: Steps | None = None
    until: Traces | None = None
    is_kept: bool = True
    seconds: float = 0.0
    traces: Traces | None = None

    def __post_init__(self) -> None:
        program = self.program or self.described
        self._captured = [] if program is None else [d.value for d in program.inputs if isinstance(d, Captured)]
        self._specs = [_layout(value) for value in self._captured]
        self._offsets = [value.storage_offset() for value in self._captured]
        self._writes = program is not None and (bool(written_inputs(program)) or writes_memory(program.nodes))
        self._owned = Ranges(self._captured if self._writes else ())

    @property
    def environment(self) -> Environment | None:
        """What it depends on besides its arguments and settings; None if nothing."""
        return self.refused_in if self.traced is None else self.traced.environment

    def points_to_live_memory(self) -> bool:
        """Whether captured tensors are still where the graphs read them: without this a replay is not safe."""
        return self.executable is None or self.executable.is_current()

    def shares_memory(self, leaves: list[Any]) -> bool:
        """Whether an argument lies in a captured tensor's memory and one of them is written: not this Program."""
        if not self._writes or not self._captured:
            return False
        # Graphs read captured tensors where they were; a Program that is evaluated reads them where they are.
        owned = self._owned if self.executable is not None else Ranges(self._captured)
        return any(isinstance(x, torch.Tensor) and owned.meet(x) for x in leaves)

    def is_current(self) -> bool:
        """Whether everything else that was baked in is unchanged."""
        environment = self.environment
        if environment is not None and not environment.is_current():
            return False
        return [_layout(value) for value in self._captured] == self._specs

    def has_only_moved(self) -> bool:
        """Whether its Program is what a trace would give now, although its graphs read where tensors were."""
        if self.once or self.recordable is None or not self.is_current():
            return False
        return [value.storage_offset() for value in self._captured] == self._offsets

    def changed(self) -> str | None:
        """The name of something that the function reads and that is another now, if it is known."""
        return None if self.environment is None else self.environment.changed()

    def may_return(self) -> bool:
        """Whether it may be current again, although it is not now."""
        environment = self.environment
        return not self.once and environment is not None and environment.may_return()


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


class Entries:
    """Entries by key, the least recently used first; those of one key differ in what the function reads besides."""

    def __init__(self) -> None:
        self._keys: collections.OrderedDict[Entry, Key] = collections.OrderedDict()
        self._by_key: dict[Key, list[Entry]] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._keys))  # another thread may add some

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: Key) -> Entry | None:
        """The entry that this call runs, most recently used ones first; None if it must be compiled."""
        for entry in self._by_key.get(key, ()):
            if not entry.once and entry.points_to_live_memory() and entry.is_current():
                return entry
        return None

    def of(self, key: Key) -> list[Entry]:
        """All of a key, the most recently used first."""
        return list(self._by_key.get(key, ()))

    def oldest(self) -> Entry:
        """The least recently used one."""
        return next(iter(self._keys))

    def add(self, key: Key, entry: Entry) -> None:
        """Put in an entry, as the most recently used one."""
        self._keys[entry] = key
        self._by_key.setdefault(key, []).insert(0, entry)

    def remove(self, entry: Entry) -> None:
        """Take out an entry."""
        key = self._keys.pop(entry)
        self._by_key[key].remove(entry)
        if not self._by_key[key]:
            del self._by_key[key]

    def touch(self, entry: Entry) -> None:
        """Note that an entry was used."""
        self._keys.move_to_end(entry)
        same = self._by_key[self._keys[entry]]
        if same[0] is not entry:
            same.remove(entry)
            same.insert(0, entry)

    def order(self) -> None:
        """Put entries in the order of their stamps, in which they were used by calls that came by another path."""
        for entry in sorted(self._keys, key=lambda entry: entry.stamp):
            self.touch(entry)
