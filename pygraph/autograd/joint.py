"""A function traced together with its gradient: a forward that saves what the backward needs, and that backward.

This is how a call runs that is differentiated once. Where more derivatives are taken, they run the user's function
again, as `pygraph.autograd.flat.Vjp` does.
"""

# Results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # checked with torch 2.11 and 2.13

from pygraph.autograd.backward_evaluation import evaluate_batched, evaluate_cast
from pygraph.autograd.backward_graph import Source
from pygraph.autograd.flat import Bound, Flat, HasEngines, Rest, Vjp, apart
from pygraph.autograd.levels import plain_of
from pygraph.autograd.partition import another_backward, partition_program
from pygraph.autograd.specialization import with_numbers, without_results
from pygraph.autograd.unread import Kind
from pygraph.calls.engine import Engine
from pygraph.errors import PygraphError, TraceError
from pygraph.guards.environment import Environment
from pygraph.ir.autocasting import is_autocast_on, without_autocast
from pygraph.ir.descriptors import Captured, TensorSpec
from pygraph.ir.evaluate import evaluate
from pygraph.ir.ops import cotangent
from pygraph.ir.program import Program
from pygraph.tracing.function_kinds import Rebinding, SelfTracing, Traced
from pygraph.tracing.trace import trace_call


class NotCompiledError(PygraphError):
    """A forward has no graph, for a reason that its engine notes; the whole call runs as it is then."""


class Forward(Flat):
    """A function that returns besides its results what its gradient needs, and its `Backward`.

    Args:
        inner: The function.
        mask: Which of its tensors gradients are wanted for.
        differentiable_again: Whether to use formulas that can be differentiated, as torch.func does.
    """

    def __init__(self, inner: Flat, mask: tuple[bool, ...], differentiable_again: bool) -> None:
        super().__init__(inner.function, f"forward({inner.name})", inner.arity, inner.lifted)
        self.inner = inner
        self.mask = mask
        self.differentiable_again = differentiable_again

    def example_without(self, bound: frozenset[int]) -> Any:
        """The forward of the tensors that are not ``bound``."""
        return _BoundForward(self, bound)

    def unpack(self, result: Any) -> tuple[list[torch.Tensor], Rest, Any]:
        """The function's results and what was saved, and the `Pullback`."""
        returned, saved, pullback = result
        tensors, rest, _ = super().unpack((returned, pullback.dims))
        return [*tensors, *saved], rest, pullback

    def batched(
        self, tensors: Sequence[torch.Tensor], dims: tuple[int | None, ...], size: int, randomness: str
    ) -> tuple[Flat, list[torch.Tensor]]:
        """Never asked for: it is made below all batches."""
        raise NotImplementedError


class _BoundForward(Bound, SelfTracing):
    flat: Forward

    def __call__(self, *leaves: Any) -> Any:
        raise NotCompiledError(self.__name__)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        joint = _Joint(self)
        traced = trace_call(joint, args, kwargs, static=static, name=self.flat.inner.name)
        pullback = Pullback(self, joint, traced)
        return Traced(pullback.parts.forward, traced.static_leaves, traced.environment)


class _Joint(Rebinding):
    """What is traced: results and gradients, of cotangents that stand for those to come.

    Args:
        forward: What computes the results.
        given: The results that there are cotangents of; None if of all that have a gradient.

    Attributes:
        differentiated: The results that have a gradient, once it has run.
        tensor_leaves: Which leaves of the function's result are tensors.
        dims: Where batches are in its results.
    """

    def __init__(self, forward: _BoundForward, given: frozenset[int] | None = None) -> None:
        self._forward = forward
        self._given = given
        self.differentiated: tuple[int, ...] = ()
        self.tensor_leaves: list[int] = []
        self.dims: tuple[tuple[int | None, ...], ...] = ()
        self.__name__ = forward.flat.inner.name
        self.__wrapped__ = forward.__wrapped__

    def rebound(self) -> list[torch.Tensor]:
        return self._forward.rebound()

    def check(self, program: Program) -> None:
        self._forward.check(program)

    def __call__(self, *leaves: Any) -> Any:
        flat = self._forward.flat
        filled = self._forward.fill(leaves)
        tensors, numbers = filled[: flat.arity], filled[flat.arity :]
        wanted = [tensor for tensor, chosen in zip(tensors, flat.mask, strict=True) if chosen]
        _set_requires_grad(wanted, True)
        with torch.enable_grad():
            results, rest = flat.inner.run(tensors, numbers)
            self.tensor_leaves, self.dims = rest.tensor_leaves, rest.dims
            gradients = self._gradients(results, tensors, wanted)
        _set_requires_grad(wanted, False)
        passed = {id(tensor) for tensor in tensors}
        detached = {id(result): result if id(result) in passed else result.detach() for result in results}
        results = [detached[id(result)] for result in results]
        return rest.join(results), apart([*map(_plain, gradients)], [*tensors, *results])

    def _gradients(
        self, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        passed = {id(tensor) for tensor in tensors}
        given = range(len(results)) if self._given is None else sorted(self._given)
        own = [index for index in given if index not in self._forward.flat.inner.replaced]
        found = [index for index in own if results[index].requires_grad and id(results[index]) not in passed]
        self.differentiated = tuple(found)
        if not found:
            return [None] * len(wanted)
        chosen = [results[index] for index in found]
        cotangents = [cotangent(result.detach(), number) for number, result in enumerate(chosen)]
        again = self._forward.flat.differentiable_again
        # A backward runs outside of its forward's autocast. Autograd's own thread may be waiting for this one.
        with without_autocast(), torch.autograd.set_multithreading_enabled(False):
            return list(torch.autograd.grad(chosen, wanted, cotangents, create_graph=again, allow_unused=True))


def _set_requires_grad(tensors: Sequence[torch.Tensor], value: bool) -> None:
    """Set it without the tracer's modes, which refuse it to the user's code."""
    with torch._C.DisableTorchFunction():  # checked with torch 2.11 and 2.13
        for tensor in tensors:
            tensor.requires_grad_(value)


def _plain(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient without a lazy conjugation or history."""
    return None if gradient is None else gradient.resolve_conj().resolve_neg().detach()


@dataclasses.dataclass(frozen=True, eq=False)
class Formula:
    """How gradients are computed of the cotangents of some results.

    Attributes:
        program: The backward's Program.
        sources: What it takes.
        results: The results whose cotangents it takes, in that order.
    """

    program: Program
    sources: tuple[Source, ...]
    results: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, sources: tuple[Source, ...], differentiated: Sequence[int]) -> Formula:
        """The formula that a trace has given, which numbers cotangents as the results that it differentiates."""
        cotangents = (source.index for source in sources if source.of == "cotangent")
        return cls(program, sources, tuple(differentiated[number] for number in cotangents))


@dataclasses.dataclass(frozen=True)
class Reading:
    """Which tensors the backward of a call reads.

    Attributes:
        bound: The tensors that the function finds where it closes over them.
        unread: Those that the function is passed and the backward does not read, by number.
        captured: Those that it reads and the function is not passed.
        watched: These, and those among `bound` that it reads.
    """

    bound: tuple[torch.Tensor, ...]
    unread: frozenset[int]
    captured: tuple[torch.Tensor, ...]
    watched: tuple[torch.Tensor, ...]


class Pullback(HasEngines):
    """How gradients of one kind of `Forward`'s calls are computed; the forward's Program returns it with its result.

    Attributes:
        parts: The Programs of forward and backward.
        inner: The function that is differentiated.
        mask: Which of its tensors have gradients.
        differentiated: The results that have a gradient, by number among its tensors.
        passed: The function's tensors that the forward's Program takes; the others are captured.
        count: How many tensors the function returns.
        dims: Where batches are in them.
        first_result: Where among the tensors that are kept the results begin that the backward reads.
        returns_fresh: Whether the function's results are known to be no memory that it was passed.
    """

    def __init__(self, forward: _BoundForward, joint: _Joint, traced: Traced) -> None:
        self._forward = forward
        self._static = traced.static_leaves
        self.inner = forward.flat.inner
        self.mask = forward.flat.mask
        self.differentiated = joint.differentiated
        self.dims = joint.dims
        self.parts = partition_program(traced.program, self)
        self.passed = [index for index in range(forward.flat.arity) if index not in forward.bound]
        self._bound = sorted(forward.bound)
        programs = (self.parts.forward, self.parts.backward)
        self._held = {id(d.value) for program in programs for d in program.inputs if isinstance(d, Captured)}
        self._reading: Reading | None = None
        self._kinds: list[Kind] | None = None
        self.count = len(joint.tensor_leaves)
        last = max(joint.tensor_leaves, default=-1)
        shared = any(alias.leaf <= last for alias in self.parts.forward.aliases)
        self.returns_fresh = not shared and forward.flat.function.function.records
        returned = {source.index for source in self.parts.sources if source.of == "result"}
        self._returned = [joint.tensor_leaves.index(leaf) for leaf in sorted(returned)]
        self._leaves = sorted(returned)
        self._saved = sum(source.of == "saved" for source in self.parts.sources)
        self.first_result = self.inner.arity + self._saved
        of_all = Formula.of(self.parts.backward, self.parts.sources, joint.differentiated)
        self._formulas: dict[frozenset[int], Formula | None] = {frozenset(of_all.results): of_all}
        self._taken = frozenset(of_all.results)
        self._needed = {self._taken: self._read_by(of_all)}
        self._backwards: dict[tuple[frozenset[int], tuple[bool, ...]], Backward] = {}

    def places(self, formula: Formula) -> list[int]:
        """Where among a `Backward`'s tensors and numbers each argument of its Program is."""
        first_saved = self.inner.arity + len(formula.results)
        first_number = first_saved + self._saved + len(self._leaves)
        places: list[int] = []
        cotangents = itertools.count(self.inner.arity)
        for source in formula.sources:
            if source.of == "cotangent":
                places.append(next(cotangents))
            elif source.of == "saved":
                places.append(first_saved + source.index)
            elif source.of == "result":
                places.append(first_saved + self._saved + self._leaves.index(source.index))
            elif source.index < len(self.passed):
                places.append(self.passed[source.index])
            else:
                places.append(first_number + source.index - len(self.passed))
        return places

    def _formula(
        self, given: frozenset[int], tensors: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> Formula | None:
        """How gradients are computed of these results only; None if the forward has not saved what that takes."""
        if given not in self._formulas:
            self._formulas[given] = self._traced_again(given, tensors, numbers)
        return self._formulas[given]

    def _traced_again(
        self, given: frozenset[int], tensors: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> Formula | None:
        joint = _Joint(self._forward, given)
        try:
            with self.inner.function.turn(), temporarily_clear_interpreter_stack():
                args = (*(plain_of(tensors[index]).detach() for index in self.passed), *numbers)
                program = trace_call(joint, args, {}, static=self._static, name=self.inner.name).program
                found = another_backward(program, self.parts)
        except TraceError:
            return None
        return None if found is None else Formula.of(*found, joint.differentiated)

    def engines(self) -> Iterator[Engine]:
        """Those of its backwards."""
        for backward in list(self._backwards.values()):
            yield backward.own_engine

    def reads(self, tensors: Sequence[torch.Tensor]) -> Reading:
        """Which of the function's tensors the backward reads, and the others that it reads."""
        bound = [tensors[index] for index in self._bound]
        if self._reading is not None and all(map(operator.is_, bound, self._reading.bound)):
            return self._reading
        others = {tensor.data_ptr(): tensor for tensor in self.parts.captured}
        inside = [i for i in self._bound if others.pop(tensors[i].data_ptr(), None) is not None]
        read = {index for index in self._needed[self._taken] if index < self.inner.arity} | {*inside}
        captured = tuple(others.values())
        watched = (*captured, *(tensors[index] for index in inside))
        reading = Reading(tuple(bound), frozenset(range(self.inner.arity)) - read, captured, watched)
        if all(id(tensor) in self._held for tensor in bound):
            self._reading = reading
        return reading

    def kinds(self, kept: Sequence[torch.Tensor]) -> Sequence[Kind]:
        """Shapes, dtypes and devices of what is kept, which are those of every call."""
        if self._kinds is None:
            self._kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in kept]
        return self._kinds

    def needed(
        self, kept: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None], numbers: Sequence[Any]
    ) -> set[int]:
        """Which of the tensors that were kept a backward of these cotangents reads."""
        given = self._given(cotangents)
        if given not in self._needed:
            self._needed[given] = self._read_by(self._formula(given, kept[: self.inner.arity], numbers))
        return self._needed[given]

    def _read_by(self, formula: Formula | None) -> set[int]:
        arity = self.inner.arity
        if formula is None:
            return set(range(arity))
        found: set[int] = set()
        for source in formula.sources:
            if source.of == "saved":
                found.add(arity + source.index)
            elif source.of == "result":
                found.add(self.first_result + self._leaves.index(source.index))
            elif source.of == "argument" and source.spec is not None:
                found.add(self.passed[source.index])
        return found

    def _given(self, cotangents: Sequence[torch.Tensor | None]) -> frozenset[int]:
        return frozenset(index for index in self._taken if cotangents[index] is not None)

    def has_gradient(self, index: int) -> bool:
        """Whether result number ``index`` of the forward has a gradient; what it saved has none."""
        return index in self.differentiated

    def kept(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The forward's tensors, what it saved, and its results that the backward reads."""
        return [*tensors, *results[self.count :], *(results[index] for index in self._returned)]

    def push_forward(
        self, kept: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], results: tuple[int, ...]
    ) -> tuple[Flat, list[torch.Tensor]]:
        """The tangents of the function that was differentiated."""
        return self.inner.push_forward(kept[: self.inner.arity], tangents, results)

    def pull_back(
        self,
        kept: Sequence[torch.Tensor],
        mask: tuple[bool, ...],
        cotangents: Sequence[torch.Tensor | None],
        numbers: Sequence[Any],
    ) -> tuple[Flat, list[torch.Tensor]]:
        """The `Backward`, and what it takes: the forward's tensors, cotangents, and the rest of what was kept."""
        arity = self.inner.arity
        given = self._given(cotangents)
        formula = self._formula(given, kept[:arity], numbers)
        if formula is None:
            return self.inner.pull_back(kept[:arity], mask, cotangents[: self.count], numbers)
        key = (given, mask)
        if key not in self._backwards:
            self._backwards.setdefault(key, Backward(self, formula, mask, len(kept) - arity))
        # Results that the backward reads are known here, and not differentiated: it runs the function again for that.
        extras = (tensor.detach() if tensor.requires_grad else tensor for tensor in kept[arity:])
        filled = (cotangents[index] for index in formula.results)
        return self._backwards[key], [*kept[:arity], *(c for c in filled if c is not None), *extras]


class Backward(Flat):
    """Gradients of a `Forward`'s call: its tensors, cotangents, and what else was kept in.

    Args:
        pullback: The forward that has run.
        formula: How they are computed.
        mask: Which of the function's tensors gradients are wanted for.
        extras: How many tensors were kept besides the function's.

    Attributes:
        own_engine: What runs its Program.
    """

    returns_fresh = True  # see `apart`

    def __init__(self, pullback: Pullback, formula: Formula, mask: tuple[bool, ...], extras: int) -> None:
        inner = pullback.inner
        self._first_extra = inner.arity + len(formula.results)
        super().__init__(inner.function, f"backward({inner.name})", self._first_extra + extras, {})
        self.effects = inner.effects
        self._inner = inner
        self._formula = formula
        self._places = pullback.places(formula)
        rows = [(index, s.spec, s.of) for index, s in enumerate(formula.sources) if s.spec is not None]
        self._tensors = [(index, spec) for index, spec, _ in rows]
        self._unsaved = [(index, spec) for index, spec, of in rows if of in ("argument", "cotangent")]
        self._mask = mask
        wanted = zip(pullback.mask, mask, strict=True)
        self._wanted = [asked for differentiable, asked in wanted if differentiable]
        self._rest: Rest | None = None  # the same for all calls, as what is absent is a part of the Program
        program = formula.program
        unwanted = [leaf for leaf, asked in enumerate(self._wanted) if not asked]
        self._program = without_results(program, unwanted) if unwanted else program
        absent = {static.leaf for static in program.statics}
        present = [leaf not in absent for leaf, asked in enumerate(self._wanted) if asked]
        self._present = [number for number, is_there in enumerate(present) if is_there]
        self.own_engine = inner.function.derive(_Prepared(self.name, self._program))

    def again(self) -> Vjp:
        """The same gradients by running the user's function once more, with zeros for those that are None here.

        This one can be differentiated.
        """
        inner, results = self._inner, self._formula.results
        return inner.derive(("vjp", self._mask, results), lambda: Vjp(inner, self._mask, results))

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], Rest]:
        """Evaluate the backward's Program, for a batch if need be."""
        found, rest, _ = self.unpack(evaluate_batched(self._program, self._arguments(tensors, numbers)))
        return found, rest

    def compiled(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any], *, undisturbed: bool = False
    ) -> tuple[list[torch.Tensor], Rest, Any]:
        """Run the backward's Program by its engine, on tensors with the strides that it was traced for."""
        given = self._arguments(tensors, numbers)
        for index, spec in self._unsaved if undisturbed else self._tensors:
            value = given[index]
            if value.requires_grad or value.stride() != spec.stride:
                given[index] = _as_traced(value, spec)
        return self.unpack(self.own_engine(*given))

    def _arguments(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[Any]:
        leaves = [*tensors, *numbers]
        return [leaves[place] for place in self._places]

    def unpack(self, result: Any) -> tuple[list[torch.Tensor], Rest, Any]:
        """The gradients that are wanted; those that do not depend on a tensor are None."""
        chosen = [gradient for gradient, asked in zip(result, self._wanted, strict=True) if asked]
        if self._rest is None:
            self._rest = Rest.of_row(chosen)
        return [gradient for gradient in chosen if gradient is not None], self._rest, None

    def batched(
        self, tensors: Sequence[torch.Tensor], dims: tuple[int | None, ...], size: int, randomness: str
    ) -> tuple[Flat, list[torch.Tensor]]:
        """Several gradients at once, by running the function again if it may be."""
        if self.effects is not None:
            return super().batched(tensors, dims, size, randomness)
        first = self._first_extra
        return self.again().batched(tensors[:first], dims[:first], size, randomness)

    def kept(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the function takes to run again, with cotangents."""
        return list(tensors[: self._first_extra])

    def pull_back(
        self,
        kept: Sequence[torch.Tensor],
        mask: tuple[bool, ...],
        cotangents: Sequence[torch.Tensor | None],
        numbers: Sequence[Any],
    ) -> tuple[Flat, list[torch.Tensor]]:
        """The gradient of the gradient."""
        given = dict(zip(self._present, cotangents, strict=True))
        filled = [given.get(number) for number in range(sum(self._wanted))]
        return self.again().pull_back(kept, mask[: self._first_extra], filled, numbers)

    def push_forward(
        self, kept: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], results: tuple[int, ...]
    ) -> tuple[Flat, list[torch.Tensor]]:
        """The tangent of the gradient."""
        chosen = tuple(self._present[index] for index in results)
        return self.again().push_forward(kept, tangents[: self._first_extra], chosen)


class _Prepared(SelfTracing):
    """A backward that is given as a Program."""

    def __init__(self, name: str, program: Program) -> None:
        self.__name__ = name
        self._program = program

    def __call__(self, *args: Any) -> Any:
        return self._cast(*args) if is_autocast_on() else evaluate(self._program, *args)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        if is_autocast_on():  # where a backward is called, it holds for that too
            traced = trace_call(self._cast, args, kwargs, static=static, name=name)
            return dataclasses.replace(traced, environment=Environment(None))
        numbers = {leaf: args[leaf] for leaf in static}
        return Traced(with_numbers(self._program, numbers), static, Environment(None))

    def _cast(self, *leaves: Any) -> Any:
        return evaluate_cast(self._program, leaves)


def _as_traced(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor without history, and with the strides of the trace."""
    if tensor.stride() == spec.stride or not tensor.numel():
        return tensor.detach()
    return spec.empty().copy_(tensor)
