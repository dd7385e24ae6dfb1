"""Parts of the proof of a recorded region: trials that leave no trace, examples, watched memory, poisoned buffers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Generator, Sequence
from typing import Any, Self

import torch

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import is_random
from pygraph.ir.evaluate import clone_strided
from pygraph.ir.ranges import Ranges
from pygraph.runtime.alignment import aligned_copy
from pygraph.runtime.body import RegionBody
from pygraph.runtime.comparison import Spread
from pygraph.runtime.driver import Driver
from pygraph.runtime.gaps import Gaps, close, gaps_of
from pygraph.runtime.graph_generators import SavedStates
from pygraph.runtime.host_copies import HostCopy, OffloadedTensors
from pygraph.runtime.indices import Reach

# Bytes after a result that are watched, on top of what its operation used as scratch memory.
_RED_ZONE = 256
_UNTOUCHED = 0x7F


class WrittenState:
    """Copies of what a region updates, which trials put back; those of large tensors are on the host.

    Args:
        body: The region.
        inputs: Its inputs, of which trials update the large ones where they are; none if they have copies of all.

    Attributes:
        generators: Random generators that the region is passed.
        in_place: Positions of these inputs.
    """

    def __init__(self, body: RegionBody, inputs: Sequence[torch.Tensor] = ()) -> None:
        self.generators = list(body.generators.values())
        nodes = (*body.statics, *body.inputs) if inputs else body.statics
        values = (*body.static_values, *inputs)
        self._indexing = Ranges(one for node, one in zip(nodes, values, strict=True) if node in body.reach)
        self._hosted: list[tuple[HostCopy, torch.Tensor]] = []
        self._others: list[torch.Tensor] = []
        for tensor in (body.static_values[i].detach() for i in body.written_statics):
            copy = HostCopy.of(tensor)
            if copy is None:
                self._others.append(tensor)
            else:
                self._hosted.append((copy, tensor))
        self._copies = [clone_strided(tensor) for tensor in self._others]
        written = {i: HostCopy.of(inputs[i].detach()) for i in body.written} if inputs else {}
        self._hosted += [(copy, inputs[i].data) for i, copy in written.items() if copy is not None]
        self.in_place = frozenset(i for i, copy in written.items() if copy is not None)

    def put_back(self) -> None:
        """Have the tensors hold what they held."""
        for copy, tensor in self._hosted:
            copy.write(tensor)
        copy_spans(self._copies, self._others)

    def on_device(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies on the device of the tensors that have to be put back before each of many runs, and these tensors.

        They are the small ones, and those that indices depend on: others may hold anything while a region is timed.
        """
        indexing = [(copy, tensor) for copy, tensor in self._hosted if self._indexing.meet(tensor)]
        copies = [copy.on_device() for copy, _ in indexing]
        return [*self._copies, *copies], [*self._others, *(tensor for _, tensor in indexing)]

    def __bool__(self) -> bool:
        """Whether there are such tensors."""
        return bool(self._hosted or self._others)


class Undisturbed:
    """Run trials without a trace: random generators and what a region updates are put back.

    Args:
        driver: The device.
        state: What it updates; None to put back random generators only.
    """

    def __init__(self, driver: Driver, state: WrittenState | None) -> None:
        self._driver, self._state = driver, state
        self._generators = [] if state is None else state.generators

    def __enter__(self) -> Self:
        self._random, self._states = self._driver.random_state(), SavedStates(self._generators)
        return self

    def __exit__(self, *error: object) -> None:
        self._put_generators_back()
        if self._state is not None:
            self._state.put_back()

    def _put_generators_back(self) -> None:
        self._driver.set_random_state(self._random)
        self._states.restore()


class Trial(Undisturbed):
    """Run a region as often as wanted, each time from the state that the call finds; at the end all is put back.

    A run that goes on from where an earlier one has ended may go where no call goes: a position that every run
    advances leaves its buffer, which on CUDA ends the process's use of the device. Large tensors that no index depends
    on are put back at the end only.

    Args:
        driver: The device.
        body: The region.
        inputs: Its inputs, which are afterwards as they were.
        state: What it updates.

    Attributes:
        inputs: Its inputs, with copies instead of those that it writes to, unless these are put back.
        has_state: Whether a run leaves another state behind than it has found.
    """

    def __init__(self, driver: Driver, body: RegionBody, inputs: Sequence[torch.Tensor], state: WrittenState) -> None:
        super().__init__(driver, state)
        self.inputs = trial_inputs(body, inputs, state.in_place)
        self._draws = any(is_random(node) for node in body.nodes)
        copied = [i for i in body.written if i not in state.in_place]
        self._copies = [self.inputs[i] for i in copied]
        self._originals = [inputs[i].detach() for i in copied]
        self._on_device = functools.cache(state.on_device)  # only where a run is to be repeated
        self.has_state = self._draws or bool(self._copies or state)

    def restore(self) -> None:
        """Put back what runs have changed: what the region updates, and random generators if drawn from.

        That is a copy of each written tensor, all in one launch where the device can do that.
        """
        if self._draws:
            self._put_generators_back()
        copies, captured = self._on_device()
        copy_spans([*self._originals, *copies], [*self._copies, *captured])


def trial_inputs(body: RegionBody, inputs: Sequence[torch.Tensor], in_place: Container[int]) -> list[torch.Tensor]:
    """The inputs of a region, with copies instead of those that it writes to, but those that are put back.

    What is written to where it is has a version of its own.
    """
    trial: list[torch.Tensor] = []
    for i, tensor in enumerate(inputs):
        if i not in body.written or not tensor.numel():
            trial.append(tensor.detach())
        else:
            trial.append(tensor.data if i in in_place else aligned_copy(tensor))
    return trial


def copy_spans(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy the memory of tensors to that of others, which are laid out as they are."""
    pairs = [(_flat(source), _flat(target)) for source, target in zip(sources, targets, strict=True) if source.numel()]
    if len(pairs) > 1:
        # One launch on CUDA; it has no public name. Checked with torch 2.13.
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])  # pyright: ignore
    elif pairs:
        ((source, target),) = pairs
        target.copy_(source)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((TensorSpec.of(tensor).span,), (1,), tensor.storage_offset())


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A call of a region, with the results of ordinary launches.

    Attributes:
        inputs: Its inputs, which are afterwards as they were.
        numbers: Its numbers.
        expected: Outputs, then updated inputs, then updated captured tensors.
        state: What the region updates, as the call has found it.
        gaps: Bytes of outputs that say nothing; they are zeros in ``expected``.
    """

    inputs: Sequence[torch.Tensor]
    numbers: Sequence[Any]
    expected: OffloadedTensors
    state: WrittenState
    gaps: Gaps

    @classmethod
    def of(
        cls,
        body: RegionBody,
        driver: Driver,
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        state: WrittenState | None = None,
        gaps: Gaps | None = None,
    ) -> Example:
        """Run the region with ordinary launches, for an example of their results.

        They are the device's warm-up as well, after which the region can be recorded.
        """
        state = WrittenState(body, inputs) if state is None else state
        gaps = gaps_of(body, driver) if gaps is None else gaps
        with Undisturbed(driver, state):
            expected = OffloadedTensors(_launched(body, driver, inputs, numbers, state, gaps))
        if expected.are_on_host:
            driver.give_back()  # their memory on the device was that of the stream that captures
        return cls(inputs, numbers, expected, state, gaps)

    def again(self, body: RegionBody, driver: Driver) -> Example:
        """An example of the same call, with the results of ordinary launches now."""
        return Example.of(body, driver, self.inputs, self.numbers, self.state, self.gaps)


def _launched(
    body: RegionBody,
    driver: Driver,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[Any],
    state: WrittenState,
    gaps: Gaps,
) -> Sequence[torch.Tensor | HostCopy]:
    trial = trial_inputs(body, inputs, state.in_place)

    others = {tensor.untyped_storage().data_ptr() for tensor in (*trial, *body.static_values)}

    def run() -> list[torch.Tensor | HostCopy]:
        results = body.run(trial, numbers)
        close(gaps, results)
        kept: list[torch.Tensor | HostCopy] = []
        while results:
            result = results.pop(0)  # so that its memory can go when no other result is in it
            storage = result.untyped_storage()
            # What is in the region's own memory stays as it is, but not what it returns a part of.
            is_part = storage.data_ptr() in others or storage.nbytes() > TensorSpec.of(result).nbytes
            kept.append(_copied(result) if result.numel() and is_part else result)
        kept += [_copied(trial[i]) for i in body.updated]
        return kept + [_copied(body.static_values[i].detach()) for i in body.written_statics]

    return driver.warm_up(run)


def _copied(tensor: torch.Tensor) -> torch.Tensor | HostCopy:
    """A copy, of a large tensor on the host at once."""
    return HostCopy.of(tensor) or clone_strided(tensor)


_RUNS = 3
"""How often launches and replays are repeated to see how far they are apart."""


class LaunchSpread:
    """Distances between ordinary launches of a region, measured when they are first needed.

    Args:
        body: The region.
        driver: The device.
    """

    def __init__(self, body: RegionBody, driver: Driver) -> None:
        self._body = body
        self._driver = driver
        self._spread: Spread | None = None

    def covers(
        self,
        results: Sequence[torch.Tensor],
        example: Example,
        replay: Callable[[], Sequence[torch.Tensor] | None],
    ) -> bool:
        """Whether results that are not those of ordinary launches differ from them as both do among themselves.

        What does not repeat in ordinary launches, and does in replays, has been recorded as it was: a number that an
        operation draws on the host, say.

        Args:
            results: The results of one replay.
            example: The call, with what ordinary launches give.
            replay: Replays once more; None if the replay wrote where it may not.
        """
        if self._spread is None:
            runs = (example.again(self._body, self._driver).expected for _ in range(_RUNS))
            self._spread = Spread.of(example.expected, runs)
        if self._spread.largest is None:
            return False
        strayed = False

        def replays() -> Generator[Sequence[torch.Tensor], None, None]:
            nonlocal strayed
            for _ in range(_RUNS):
                found = replay()
                if found is None:
                    strayed = True
                    return
                yield found

        distances = Spread.of(results, replays())  # one after the other, as each needs memory for all results
        return not strayed and self._spread.minimum(distances).covers(results, example.expected)


class RedZones:
    """Memory for results with watched bytes behind it, where a graph could write what is not its own."""

    def __init__(self) -> None:
        self._zones: list[torch.Tensor] = []

    def allocate(self, spec: TensorSpec, nbytes: int, scratch: int) -> torch.Tensor:
        """A tensor of ``spec`` in ``nbytes`` of memory; more bytes than ``scratch`` behind it are watched."""
        size = -(-nbytes // 16) * 16
        zone = torch.full((size + scratch + _RED_ZONE,), _UNTOUCHED, dtype=torch.uint8, device=spec.device)
        self._zones.append(zone[size:])
        return zone[:nbytes].view(spec.dtype).as_strided(spec.shape, spec.stride, 0)

    def untouched(self) -> bool:
        """Whether nothing was written behind any of them."""
        return all(bool((zone == _UNTOUCHED).all()) for zone in self._zones)


def poison(tensor: torch.Tensor | None, reach: Reach = Reach.NOT, safe: torch.Tensor | None = None) -> None:
    """Fill a buffer with values that must not reach a result: NaN, or zeros where another integer could be unsafe.

    Args:
        tensor: The buffer; None for one that is not there.
        reach: How its values reach an index. If they are computed with first, no value is known to be safe but those
            that the call has, and a kernel that reads them here is not noticed.
        safe: These values.
    """
    if tensor is None or not tensor.numel():
        return
    flat = _flat(tensor)
    if reach is Reach.COMPUTED:
        assert safe is not None
        if safe.stride() == tensor.stride():
            copy_spans([safe], [tensor])
        else:
            tensor.copy_(safe)
    elif reach is Reach.NOT and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        flat.fill_(float("nan"))
    else:
        flat.zero_()  # an index of zero is in range wherever any index is
