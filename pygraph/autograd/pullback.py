"""Pull-backs: how a call is differentiated whose forward was traced together with its backward."""

# Results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # checked with torch 2.11 and 2.13

from pygraph.autograd.backward import Backward, BackwardOfResult, BackwardProgram
from pygraph.autograd.derived import TransformableFunction
from pygraph.autograd.flat_function import EngineOwner
from pygraph.autograd.joint_function import JointFunction
from pygraph.autograd.levels import plain_of
from pygraph.autograd.partition import another_backward, partition_program
from pygraph.autograd.placeholders import Metadata
from pygraph.autograd.result_spec import ResultSpec
from pygraph.calls.engine import Engine
from pygraph.errors import TraceError
from pygraph.ir.descriptors import Captured
from pygraph.tracing.function_kinds import Traced
from pygraph.tracing.trace import trace_call

Chosen: TypeAlias = "frozenset[int] | int"
"""A backward of a call: of the results that have cotangents, or of one result up to those that it depends on."""


@dataclasses.dataclass(frozen=True)
class ReadTensors:
    """The tensors that the backward of a call reads, and those that it does not.

    Attributes:
        unlifted: The function's tensors that are read where it closes over them.
        unread: The function's tensors that the backward does not read, by number.
        captured: The tensors that the backward reads and that are none of the function's.
        watched: The captured tensors, and the unlifted ones that the backward reads.
    """

    unlifted: tuple[torch.Tensor, ...]
    unread: frozenset[int]
    captured: tuple[torch.Tensor, ...]
    watched: tuple[torch.Tensor, ...]


class Pullback(EngineOwner):
    """The derivative rule of one forward; the forward's Program returns it with each result.

    Args:
        joint: The function that was traced for the forward.
        traced: The joint Program.
        args: The tensors and numbers that it was traced with.

    Attributes:
        partition: The Programs of forward and backward.
        inner: The function that is differentiated.
        mask: Which of its tensors gradients are wanted for.
        connected: Which of these its results depend on; the others have none, as in eager. All are, if none is: results
            require gradients also where they depend on leaves alone that are made inside.
        differentiated: The results that have a gradient, by number among its tensors.
        passed: The function's tensors that the forward's Program takes; the others are captured.
        count: How many tensors the function returns.
        out_dims: The batch dimensions of its results.
        first_result: The position among the saved tensors of the first result that the backward reads.
        returned: The results that the backward reads.
        returns_fresh: Whether the function's results are known to share no memory with its arguments.
        dependencies: What each of several results is computed from.
        links: The same as rows of numbers: the result, the results and the tensors that it is computed from.
        with_cotangents: The results whose cotangents the backward of all reads.
    """

    def __init__(self, joint: JointFunction, traced: Traced, args: Sequence[Any]) -> None:
        forward = joint.forward
        self._joint = joint
        ids = [id(value) for value in args]
        self._first = [ids.index(one) for one in ids]  # of the arguments that are this one: a tensor may come twice
        self._static = traced.static_leaves
        self.inner = joint.inner
        self.mask = joint.mask
        self.differentiated = joint.differentiated
        self.dependencies = joint.dependencies
        self.links = tuple((index, one.results, one.tensors) for index, one in joint.dependencies.items())
        self.out_dims = joint.out_dims
        self.partition = partition_program(traced.program, self)
        self.passed = [index for index in range(self.inner.arity) if index not in forward.unlifted]
        firsts = zip(self.passed, self._first, strict=False)
        self._repeated = {index: self.passed[first] for index, first in firsts if index != self.passed[first]}
        self._unlifted = sorted(forward.unlifted)
        programs = (self.partition.forward, self.partition.backward)
        self._captured = {id(d.value) for program in programs for d in program.inputs if isinstance(d, Captured)}
        self._read: ReadTensors | None = None
        self._metadata: list[Metadata] | None = None
        self.count = len(joint.tensor_leaves)
        last = max(joint.tensor_leaves, default=-1)
        shared = any(alias.leaf <= last for alias in self.partition.forward.aliases)
        self.returns_fresh = not shared and self.inner.function.function.records
        returned = {source.index for source in self.partition.sources if source.of == "result"}
        self.returned = [joint.tensor_leaves.index(leaf) for leaf in sorted(returned)]
        self._leaves = sorted(returned)
        self._saved = sum(source.of == "saved" for source in self.partition.sources)
        self.first_result = self.inner.arity + self._saved
        absent = {static.leaf for static in self.partition.backward.statics}
        wanted = itertools.count()
        connected = tuple(one and next(wanted) not in absent for one in self.mask)
        self.connected = connected if any(connected) else self.mask
        of_all = BackwardProgram.of(self.partition.backward, self.partition.sources, joint.differentiated)
        self._programs: dict[Chosen, BackwardProgram | None] = {frozenset(of_all.results): of_all}
        self.with_cotangents = frozenset(of_all.results)
        self._needed: dict[Chosen, set[int]] = {self.with_cotangents: self._read_by(of_all)}
        self._backwards: dict[tuple[Chosen, tuple[bool, ...]], Backward] = {}

    def engines(self) -> Iterator[Engine]:
        """Iterate over the engines of its backwards."""
        for backward in list(self._backwards.values()):
            yield backward.own_engine

    # -- the tensors of a call ----------------------------------------------------------------------------------------

    def without_unconnected(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the function's tensors, without history where no result depends on them."""
        if self.connected == self.mask:
            return tensors
        pairs = zip(tensors, self.mask, self.connected, strict=True)
        return [tensor.detach() if wanted and not known else tensor for tensor, wanted, known in pairs]

    def has_gradient(self, index: int) -> bool:
        """Whether result number ``index`` of the forward has a gradient; saved tensors have none."""
        return index in self.differentiated

    def save(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the forward's tensors, the values that it saves, and its results that the backward reads."""
        return [*tensors, *results[self.count :], *(results[index] for index in self.returned)]

    def read_tensors(self, tensors: Sequence[torch.Tensor]) -> ReadTensors:
        """Return which tensors the backward of a call reads."""
        unlifted = [tensors[index] for index in self._unlifted]
        if self._read is not None and all(map(operator.is_, unlifted, self._read.unlifted)):
            return self._read
        others = {tensor.data_ptr(): tensor for tensor in self.partition.captured}
        inside = [i for i in self._unlifted if others.pop(tensors[i].data_ptr(), None) is not None]
        read = {index for index in self._needed[self.with_cotangents] if index < self.inner.arity} | {*inside}
        captured = tuple(others.values())
        watched = (*captured, *(tensors[index] for index in inside))
        found = ReadTensors(tuple(unlifted), frozenset(range(self.inner.arity)) - read, captured, watched)
        if all(id(tensor) in self._captured for tensor in unlifted):
            self._read = found
        return found

    def always_reads(self, read: ReadTensors) -> bool:
        """Whether these are what all calls read that close over the same tensors."""
        return self._read is read

    def returns_leaves(self, spec: ResultSpec) -> bool:
        """Whether the first leaves of what the forward's Program returns are those of the function's result."""
        return self.partition.forward.out_tree.children()[0] == spec.tree

    def metadata(self, saved: Sequence[torch.Tensor]) -> Sequence[Metadata]:
        """Return shapes, dtypes and devices of saved tensors, which are equal for all calls."""
        if self._metadata is None:
            self._metadata = [(tensor.shape, tensor.dtype, tensor.device) for tensor in saved]
        return self._metadata

    def needed(self, saved: Sequence[torch.Tensor], chosen: Chosen, numbers: Sequence[Any]) -> set[int]:
        """Return which of the saved tensors a backward reads."""
        if chosen not in self._needed:
            self._needed[chosen] = self._read_by(self._program(chosen, saved[: self.inner.arity], numbers))
        return self._needed[chosen]

    def reads_captured(self, chosen: Chosen, tensor: torch.Tensor) -> bool:
        """Whether a backward, which is known, reads a tensor that the function closes over."""
        backward = self._programs.get(chosen)
        if backward is None:
            return True
        captured = (one.value for one in backward.program.inputs if isinstance(one, Captured))
        return any(one.data_ptr() == tensor.data_ptr() for one in captured)

    def _read_by(self, backward: BackwardProgram | None) -> set[int]:
        arity = self.inner.arity
        if backward is None:
            return set(range(arity))
        found: set[int] = set()
        for source in backward.sources:
            if source.of == "saved":
                found.add(arity + source.index)
            elif source.of == "result":
                found.add(self.first_result + self._leaves.index(source.index))
            elif source.of == "argument" and source.spec is not None:
                found.add(self.passed[source.index])
        return found

    # -- derivatives --------------------------------------------------------------------------------------------------

    def push_forward(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], results: tuple[int, ...]
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the tangents of the function that is differentiated."""
        return self.inner.push_forward(saved[: self.inner.arity], tangents, results)

    def pull_back(
        self,
        saved: Sequence[torch.Tensor],
        mask: tuple[bool, ...],
        cotangents: Sequence[torch.Tensor | None],
        numbers: Sequence[Any],
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the `Backward`, and its tensors: the forward's, cotangents, and the rest of the saved tensors."""
        arity = self.inner.arity
        given = self.given(cotangents)
        backward = self._program(given, saved[:arity], numbers)
        if backward is None:
            return self.inner.pull_back(saved[:arity], mask, cotangents[: self.count], numbers)
        key = (given, mask)
        if key not in self._backwards:
            positions, extras = self._positions(backward), len(saved) - arity
            made = Backward(self.inner, backward, positions, self.mask, mask, extras, self._repeated)
            self._backwards.setdefault(key, made)
        return self._backwards[key], self._tensors_of(backward, saved, cotangents)

    def pull_back_result(
        self, index: int, saved: Sequence[torch.Tensor], cotangent: torch.Tensor, numbers: Sequence[Any]
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the backward of one result up to what it depends on, and its tensors.

        Raises:
            RuntimeError: The forward has not saved what it reads.
        """
        arity = self.inner.arity
        backward = self._program(index, saved[:arity], numbers)
        if backward is None:
            raise RuntimeError(_NOT_SAVED.format(self.inner.name))
        dependency = self.dependencies[index]
        wanted = (True,) * (len(dependency.results) + len(dependency.tensors))
        if (index, wanted) not in self._backwards:
            positions, extras = self._positions(backward), len(saved) - arity
            made = BackwardOfResult(self.inner, backward, positions, wanted, wanted, extras, {})
            self._backwards.setdefault((index, wanted), made)
        return self._backwards[index, wanted], self._tensors_of(backward, saved, {index: cotangent})

    def _tensors_of(
        self,
        backward: BackwardProgram,
        saved: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the tensors of a `Backward`: the forward's, cotangents, and the rest of the saved tensors."""
        arity = self.inner.arity
        # A second run computes its own results for further derivatives: the backward reads them as constants.
        extras = (tensor.detach() if tensor.requires_grad else tensor for tensor in saved[arity:])
        filled = (cotangents[index] for index in backward.results)
        return [*saved[:arity], *(c for c in filled if c is not None), *extras]

    def given(self, cotangents: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Return the results that have a gradient and a cotangent."""
        return frozenset(index for index in self.with_cotangents if cotangents[index] is not None)

    def _program(
        self, chosen: Chosen, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> BackwardProgram | None:
        """Return the backward of these results only; None if the forward has not saved the values that it needs."""
        if chosen not in self._programs:
            self._programs[chosen] = self._trace_again(chosen, tensors, numbers)
        return self._programs[chosen]

    def _trace_again(
        self, chosen: Chosen, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> BackwardProgram | None:
        joint = self._joint.of_result(chosen) if isinstance(chosen, int) else self._joint.with_cotangents_of(chosen)
        try:
            with self.inner.function.turn(), temporarily_clear_interpreter_stack():
                passed = [plain_of(tensors[index]).detach() for index in self.passed]
                args = [passed[first] for first, _ in zip(self._first, passed, strict=False)] + [*numbers]
                program = trace_call(joint, tuple(args), {}, static=self._static, name=self.inner.name).program
                found = another_backward(program, self.partition)
        except TraceError:
            return None
        return None if found is None else BackwardProgram.of(*found, joint.differentiated)

    def _positions(self, backward: BackwardProgram) -> list[int]:
        """Return where among a `Backward`'s tensors and numbers each argument of its Program is."""
        first_saved = self.inner.arity + len(backward.results)
        first_number = first_saved + self._saved + len(self._leaves)
        positions: list[int] = []
        cotangents = itertools.count(self.inner.arity)
        for source in backward.sources:
            if source.of == "cotangent":
                positions.append(next(cotangents))
            elif source.of == "saved":
                positions.append(first_saved + source.index)
            elif source.of == "result":
                positions.append(first_saved + self._saved + self._leaves.index(source.index))
            elif source.index < len(self.passed):
                positions.append(self.passed[source.index])
            else:
                positions.append(first_number + source.index - len(self.passed))
        return positions


_NOT_SAVED = (
    "the gradient of one result of a call of {} for another one needs tensors that the call has not saved; expected"
    " that it is taken inside of the function"
)
