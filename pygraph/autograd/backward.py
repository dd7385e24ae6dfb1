"""Backwards: flat functions that compute gradients by a Program, from cotangents and saved tensors."""

# Results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pygraph.autograd.backward_evaluation import evaluate_batched, evaluate_cast
from pygraph.autograd.backward_graph import Source
from pygraph.autograd.derived import TransformableFunction, Vjp
from pygraph.autograd.result_spec import ResultSpec
from pygraph.autograd.specialization import with_numbers, without_results
from pygraph.guards.environment import Environment
from pygraph.ir.autocasting import is_autocast_on
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.evaluate import evaluate_leaves
from pygraph.ir.program import Program
from pygraph.tracing.function_kinds import SelfTracing, Traced
from pygraph.tracing.trace import trace_call


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardProgram:
    """A Program that computes gradients from the cotangents of some results.

    Attributes:
        program: The Program.
        sources: Where its arguments come from.
        results: The results whose cotangents it takes, in that order.
    """

    program: Program
    sources: tuple[Source, ...]
    results: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, sources: tuple[Source, ...], differentiated: Sequence[int]) -> BackwardProgram:
        """Return the backward of a trace, which numbers cotangents as the results that it differentiates."""
        cotangents = (source.index for source in sources if source.of == "cotangent")
        return cls(program, sources, tuple(differentiated[number] for number in cotangents))


class Backward(TransformableFunction):
    """The gradients of a call, from its tensors, cotangents, and further saved tensors.

    Args:
        inner: The function that is differentiated.
        backward: The Program that computes the gradients.
        positions: Where among the tensors and numbers here each argument of the Program is.
        differentiable: Which of the function's tensors the Program computes gradients for.
        mask: Which of the function's tensors gradients are wanted for.
        extras: How many tensors were saved besides the function's.
        repeated: By their numbers, tensors of the function's that were passed before, and the first of each.

    Attributes:
        own_engine: The engine of the Program.
        results: The results whose cotangents it takes.
        positions: Where among the tensors and numbers here each argument of the Program is.
        unsaved: The Program's arguments that no forward has saved, with what they were traced for.
    """

    returns_fresh = True  # see `in_own_memory`

    def __init__(
        self,
        inner: TransformableFunction,
        backward: BackwardProgram,
        positions: Sequence[int],
        differentiable: tuple[bool, ...],
        mask: tuple[bool, ...],
        extras: int,
        repeated: Mapping[int, int],
    ) -> None:
        self._first_extra = inner.arity + len(backward.results)
        super().__init__(inner.function, f"backward({inner.name})", self._first_extra + extras, {})
        self.effects = inner.effects
        self._inner = inner
        self.results = backward.results
        self.positions = positions
        rows = [(index, s.spec, s.of) for index, s in enumerate(backward.sources) if s.spec is not None]
        self._tensors = [(index, spec) for index, spec, _ in rows]
        self.unsaved = [(index, spec) for index, spec, of in rows if of in ("argument", "cotangent")]
        self._mask, self._repeated = mask, repeated
        self._wanted = [wanted for has_gradient, wanted in zip(differentiable, mask, strict=True) if has_gradient]
        self._spec: ResultSpec | None = None  # the same for all calls, as absent gradients are a part of the Program
        program = backward.program
        unwanted = [leaf for leaf, wanted in enumerate(self._wanted) if not wanted]
        self._program = without_results(program, unwanted) if unwanted else program
        absent = {static.leaf for static in program.statics}
        present = [leaf not in absent for leaf, wanted in enumerate(self._wanted) if wanted]
        self._present = [number for number, is_there in enumerate(present) if is_there]
        self.own_engine = inner.function.derive(_TracedBackward(self.name, self._program))

    def rerun(self) -> Vjp:
        """Return the gradients by a second run of the user's function, with zeros for the gradients that are None here.

        They can be differentiated.
        """
        inner, results, repeated = self._inner, self.results, self._repeated
        key = ("vjp with zeros", self._mask, results, tuple(repeated.items()))
        return inner.derive(key, lambda: Vjp(inner, self._mask, results, has_zeros=True, repeated=repeated))

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], ResultSpec]:
        """Evaluate the Program, for a batch if need be."""
        found, spec, _ = self.unpack(evaluate_batched(self._program, self._arguments(tensors, numbers)))
        return found, spec

    def run_compiled(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any], *, unchanged: bool = False
    ) -> tuple[list[torch.Tensor], ResultSpec, Any]:
        """Run the Program by its engine, on tensors with the strides that it was traced for."""
        return self.unpack(
            self.own_engine(*self._strided(tensors, numbers, self.unsaved if unchanged else self._tensors))
        )

    def plan_of_arguments(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[Any, Any] | None:
        """Return the native dispatcher and plan of a call of the engine with saved tensors; None if there is none."""
        with torch.no_grad():
            return self.own_engine.cache.native.match(tuple(self._strided(tensors, numbers, self.unsaved)))

    def _strided(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any], specs: Sequence[tuple[int, TensorSpec]]
    ) -> list[Any]:
        """Return the Program's arguments, of which these are without history and have the strides of the trace."""
        given = self._arguments(tensors, numbers)
        for index, spec in specs:
            value = given[index]
            if value.requires_grad or value.stride() != spec.stride:
                given[index] = _with_strides(value, spec)
        return given

    def _arguments(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[Any]:
        leaves = [*tensors, *numbers]
        return [leaves[position] for position in self.positions]

    def unpack(self, result: Any) -> tuple[list[torch.Tensor], ResultSpec, Any]:
        """Return the gradients that are wanted; a gradient that depends on no tensor is None."""
        chosen = [gradient for gradient, wanted in zip(result, self._wanted, strict=True) if wanted]
        if self._spec is None:
            self._spec = ResultSpec.of_tuple(chosen)
        return [gradient for gradient in chosen if gradient is not None], self._spec, None

    def batched(
        self, tensors: Sequence[torch.Tensor], in_dims: tuple[int | None, ...], size: int, randomness: str
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the function of a batch of gradients, by a second run if the function has no effects."""
        if self.effects is not None:
            return super().batched(tensors, in_dims, size, randomness)
        first = self._first_extra
        return self.rerun().batched(tensors[:first], in_dims[:first], size, randomness)

    def save(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of a second run: the function's, and cotangents."""
        return list(tensors[: self._first_extra])

    def pull_back(
        self,
        saved: Sequence[torch.Tensor],
        mask: tuple[bool, ...],
        cotangents: Sequence[torch.Tensor | None],
        numbers: Sequence[Any],
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the gradient of the gradient."""
        given = dict(zip(self._present, cotangents, strict=True))
        filled = [given.get(number) for number in range(sum(self._wanted))]
        return self.rerun().pull_back(saved, mask[: self._first_extra], filled, numbers)

    def push_forward(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], results: tuple[int, ...]
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the tangent of the gradient."""
        chosen = tuple(self._present[index] for index in results)
        return self.rerun().push_forward(saved, tangents[: self._first_extra], chosen)


class BackwardOfResult(Backward):
    """The gradients of one result, of the results and tensors that it is computed from; differentiated once."""

    def rerun(self) -> Vjp:
        """Refuse a second derivative, which would be that of a run up to the first result."""
        raise RuntimeError(
            f"a gradient of one result of a call for another one, {self.name}, cannot be differentiated; expected that"
            " it is taken inside of the function, or with create_graph=False"
        )

    def batched(
        self, tensors: Sequence[torch.Tensor], in_dims: tuple[int | None, ...], size: int, randomness: str
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the function of a batch of gradients, by the Program."""
        return TransformableFunction.batched(self, tensors, in_dims, size, randomness)


class _TracedBackward(SelfTracing):
    """A backward whose Program is given."""

    def __init__(self, name: str, program: Program) -> None:
        self.__name__ = name
        self._program = program

    def __call__(self, *args: Any) -> Any:
        return self._cast(*args) if is_autocast_on() else evaluate_leaves(self._program, args)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        if is_autocast_on():  # where a backward is called, it holds for that too
            traced = trace_call(self._cast, args, kwargs, static=static, name=name)
            return dataclasses.replace(traced, environment=Environment(None))
        numbers = {leaf: args[leaf] for leaf in static}
        return Traced(with_numbers(self._program, numbers), static, Environment(None))

    def _cast(self, *leaves: Any) -> Any:
        return evaluate_cast(self._program, leaves)


def _with_strides(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor without history, and with the strides of the trace."""
    if tensor.stride() == spec.stride or not tensor.numel():
        return tensor.detach()
    return spec.empty().copy_(tensor)
