"""Functions of tensors by position: the user's function, and what torch.func's transforms make of it.

Each runs the user's Python again, so that a custom ``autograd.Function``, ``detach()`` or ``no_grad()`` in it means
what it means in eager; nothing is derived from a trace. Each is compiled by an engine of its own, a `Transformed`.
"""

# Results and arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13
from torch._functorch import eager_transforms
from torch._functorch.vmap import restore_vmap
from torch.utils import _pytree as pytree

from pygraph.autograd.levels import Level, is_dual_level, levels, plain_of
from pygraph.autograd.repeating import Effects
from pygraph.autograd.sharing import Shared
from pygraph.autograd.substitution import substituted
from pygraph.autograd.taken_apart import TakenApart
from pygraph.calls.engine import Engine
from pygraph.errors import TraceError
from pygraph.guards.objects import has_objects, with_parts
from pygraph.ir.autocasting import autocast_kinds
from pygraph.ir.descriptors import Captured, TensorSpec
from pygraph.ir.program import Program
from pygraph.tracing.function_kinds import Rebinding
from pygraph.tracing.results import is_known_size

Place: TypeAlias = "Callable[[], Any]"
"""Looks up the tensor that a function closes over."""


@dataclasses.dataclass(frozen=True)
class Rest:
    """What a result is besides its tensors: the structure, and the other leaves.

    ``dims`` says for each ``vmap`` that the result has been through where the batch is in each tensor, the innermost
    first. Where there is no structure, it is a tuple.
    """

    tree: pytree.TreeSpec | None
    leaves: tuple[Any, ...]
    dims: tuple[tuple[int | None, ...], ...] = ()

    @property
    def tensor_leaves(self) -> list[int]:
        """Which leaves are tensors."""
        return [index for index, leaf in enumerate(self.leaves) if leaf is _TENSOR]

    def join(self, tensors: Iterable[Any]) -> Any:
        """The result again, with these tensors."""
        if self is _ONE_TENSOR:
            (tensor,) = tensors
            return tensor
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return tuple(leaves) if self.tree is None else pytree.tree_unflatten(leaves, self.tree)

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Rest:
        """That of a tuple of tensors and None."""
        return cls(None, tuple(None if leaf is None else _TENSOR for leaf in row))


_TENSOR = object()
_ONE_TENSOR = Rest(pytree.tree_structure(0), (_TENSOR,))


def take_apart(result: Any) -> tuple[list[torch.Tensor], Rest]:
    """A result's tensors, and the rest."""
    if isinstance(result, torch.Tensor):
        return [result], _ONE_TENSOR
    leaves, tree = pytree.tree_flatten(result, is_leaf=is_known_size)
    if has_objects(leaves):
        leaves, tree = pytree.tree_flatten(with_parts(result, is_known_size), is_leaf=is_known_size)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, Rest(tree, tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))


class HasEngines:
    """Something that has compiled functions."""

    def engines(self) -> Iterator[Engine]:
        """Its compiled functions."""
        raise NotImplementedError


class Flat(HasEngines):
    """A function of tensors and numbers by position.

    Args:
        function: The transformed function that it comes from.
        name: What reports call it.
        arity: How many tensors it takes.
        lifted: By position, where the user's function finds tensors that are passed to it here.

    Attributes:
        differentiable: By result, whether it has a gradient; None if all have.
        replaced: The results that whoever calls it makes otherwise.
        effects: What it does besides computing results, if anything.
        repeats: Whether it runs the user's function once more, so that it must find what that has found.
        may_save: Whether a `Forward` of it is worth its while.
        returns_fresh: Whether its results are known to be no memory that it was passed, and each another tensor.
    """

    replaced: frozenset[int] = frozenset()
    effects: Effects | None = None
    repeats = False
    may_save = False
    returns_fresh = False

    def __init__(self, function: Engine, name: str, arity: int, lifted: dict[int, Place]) -> None:
        self.function = function
        self.name = name
        self.arity = arity
        self.lifted = lifted
        self._lifted = frozenset(lifted)
        self._not_lifted = [index for index in range(arity) if index not in lifted]
        self.differentiable: tuple[bool, ...] | None = None
        self._derived: dict[Any, Flat] = {}
        self._engines: dict[frozenset[int], Engine] = {}

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], Rest]:
        """Run it as it is; the results' tensors, and the rest of what the user's function returns."""
        raise NotImplementedError

    def example(self, *leaves: Any) -> Any:
        """The same as a function of everything in one row, as engines call and trace it."""
        tensors, rest = self.run(leaves[: self.arity], leaves[self.arity :])
        return rest.join(tensors), rest.dims

    def has_gradient(self, index: int) -> bool:
        """Whether result number ``index`` has a gradient."""
        return self.differentiable is None or self.differentiable[index]

    def derive(self, key: Any, make: Callable[[], Flat]) -> Any:
        """What ``make`` returns, once for each key."""
        if key not in self._derived:
            self._derived.setdefault(key, make())
        return self._derived[key]

    def compiled(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any], *, undisturbed: bool = False
    ) -> tuple[list[torch.Tensor], Rest, Any]:
        """Run it by its engine on plain tensors; the results' tensors, and what else `unpack` finds.

        Args:
            tensors: What it takes.
            numbers: The same.
            undisturbed: Whether what it takes besides arguments is known to be as it was.
        """
        if undisturbed:
            bound, passed = self._lifted, self._not_lifted
        else:
            bound = frozenset(i for i, place in self.lifted.items() if _is_same_memory(tensors[i], place()))
            passed = [index for index in range(len(tensors)) if index not in bound]
        stand_ins: dict[int, torch.Tensor] = {}  # one for each object, as the function may ask
        for tensor in (tensors[index] for index in passed):
            if id(tensor) not in stand_ins:
                stand_ins[id(tensor)] = _stand_in(tensor)
        arguments = [stand_ins[id(tensors[index])] for index in passed]
        found, rest, pullback = self.unpack(self.engine(bound)(*arguments, *numbers))
        given = {id(stand_in): tensors[index] for index, stand_in in zip(passed, arguments, strict=True)}
        return [given.get(id(tensor), tensor) for tensor in found], rest, pullback

    def unpack(self, result: Any) -> tuple[list[torch.Tensor], Rest, Any]:
        """The tensors that a call by the engine returns, the rest, and how it is differentiated, if not as usual."""
        returned, dims = result
        tensors, rest = take_apart(returned)
        return tensors, dataclasses.replace(rest, dims=dims) if dims else rest, None

    def engine(self, bound: frozenset[int]) -> Engine:
        """The compiled function of the tensors that are not ``bound``; the user's function finds those itself."""
        if bound not in self._engines:
            self._engines.setdefault(bound, self.function.derive(self.example_without(bound)))
        return self._engines[bound]

    def batched(
        self, tensors: Sequence[torch.Tensor], dims: tuple[int | None, ...], size: int, randomness: str
    ) -> tuple[Flat, list[torch.Tensor]]:
        """What ``torch.vmap`` makes of it, and the tensors that this takes."""
        key = ("vmap", dims, size, randomness)
        return self.derive(key, lambda: Vmapped(self, dims, size, randomness)), list(tensors)

    def kept(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What `pull_back` and `push_forward` need of a call's tensors and results."""
        return list(tensors)

    def pull_back(
        self,
        kept: Sequence[torch.Tensor],
        mask: tuple[bool, ...],
        cotangents: Sequence[torch.Tensor | None],
        numbers: Sequence[Any],
    ) -> tuple[Flat, list[torch.Tensor]]:
        """What computes gradients of the tensors in ``mask``, and the tensors that it takes.

        Args:
            kept: What `kept` has returned.
            mask: The tensors that gradients are wanted for.
            cotangents: Those of the results, None where there is none.
            numbers: The numbers that it was called with.
        """
        given = tuple(i for i, cotangent in enumerate(cotangents) if cotangent is not None)
        flat = self.derive(("vjp", mask, given), lambda: Vjp(self, mask, given))
        return flat, [*kept, *(cotangent for cotangent in cotangents if cotangent is not None)]

    def push_forward(
        self, kept: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], results: tuple[int, ...]
    ) -> tuple[Flat, list[torch.Tensor]]:
        """What computes tangents of these results, and the tensors that it takes."""
        mask = tuple(tangent is not None for tangent in tangents)
        flat = self.derive(("jvp", mask, results), lambda: Jvp(self, mask, results))
        return flat, [*kept, *(tangent for tangent in tangents if tangent is not None)]

    def engines(self) -> Iterator[Engine]:
        """The engines of this function and of all that is derived from it."""
        for engine in list(self._engines.values()):
            yield engine
            for mark in engine.static_results():
                if isinstance(mark, HasEngines):
                    yield from mark.engines()
        for flat in list(self._derived.values()):
            yield from flat.engines()

    def example_without(self, bound: frozenset[int]) -> Any:
        """`example` as a function of the tensors that are not ``bound``."""
        return Bound(self, bound)


class Bound(Rebinding):
    """A flat function of which some tensors are found where the user's function finds them; they are static then."""

    def __init__(self, flat: Flat, bound: frozenset[int]) -> None:
        self.flat = flat
        self.bound = bound
        self.__name__ = flat.name
        self.__wrapped__: Any = flat.function.fn  # what it closes over

    def __call__(self, *leaves: Any) -> Any:
        """Run it."""
        return self.flat.example(*self.fill(leaves))

    def fill(self, leaves: Sequence[Any]) -> list[Any]:
        """All leaves, from those that are not bound."""
        rest = iter(leaves)
        found = [self.flat.lifted[i]().detach() if i in self.bound else next(rest) for i in range(self.flat.arity)]
        return [*found, *rest]

    def rebound(self) -> list[torch.Tensor]:
        """What is now in the places whose tensors are passed."""
        found = (place() for index, place in self.flat.lifted.items() if index not in self.bound)
        return [tensor for tensor in found if tensor is not None]

    def check(self, program: Program) -> None:
        """Refuse what a derivative of a custom ``Function`` reads by itself, when the user's function has returned."""
        rebound = [plain_of(tensor) for tensor in self.rebound()]
        for descriptor in program.inputs:
            if isinstance(descriptor, Captured) and any(_is_same_memory(descriptor.value, now) for now in rebound):
                raise TraceError(f"a derivative of {self.__name__} reads a tensor that was not passed to its forward")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What of torch decides what a function does besides its arguments, as it was when it was called.

    Attributes:
        grad: Whether operations are recorded for derivatives.
        autocast: By device type, whether it is on, and the dtype.
        dtype: That of new tensors.
        device: Where they are.
        transformed: Whether transforms of torch.func were active.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    dtype: torch.dtype
    device: torch.device
    transformed: bool

    @classmethod
    def now(cls) -> Settings:
        """The present settings."""
        return cls(
            torch.is_grad_enabled(),
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in autocast_kinds()),
            torch.get_default_dtype(), torch.get_default_device(), bool(levels()),
        )  # fmt: skip

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Have them again; a backward runs later, and elsewhere."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if torch.get_default_dtype() != self.dtype:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            if self.transformed and not levels():
                stack.enter_context(TakenApart())
            yield


class Primal(Flat):
    """The user's function itself.

    Args:
        function: The transformed function.
        tree: The structure of ``(args, kwargs)``.
        leaves: Their leaves; those at ``tensors`` and ``numbers`` are passed.
        tensors: Positions of tensors among the leaves.
        numbers: Positions of live numbers.
        lifted: Where it finds the tensors that are passed after those, each in one or more places.
        settings: The settings under which it was called.

    Attributes:
        places: The same.
        shared: Results that are its tensors or views of them.
    """

    may_save = True

    def __init__(
        self,
        function: Engine,
        tree: pytree.TreeSpec,
        leaves: Sequence[Any],
        tensors: Sequence[int],
        numbers: Sequence[int],
        lifted: Sequence[tuple[Place, ...]],
        settings: Settings,
    ) -> None:
        first = {len(tensors) + index: places[0] for index, places in enumerate(lifted)}
        super().__init__(function, function.name, len(tensors) + len(lifted), first)
        self.places = tuple(lifted)
        passed = {*tensors, *numbers}
        self.leaves = [None if index in passed else leaf for index, leaf in enumerate(leaves)]
        self.tree = tree
        self.tensors = tuple(tensors)
        self.numbers = tuple(numbers)
        self.settings = settings
        self.shared: dict[int, Shared] = {}

    @property
    def replaced(self) -> frozenset[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of `shared`."""
        return frozenset(self.shared)

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], Rest]:
        """Run the user's function, on these tensors instead of those that it closes over."""
        rows = zip(tensors[len(self.tensors) :], self.places, strict=True)
        given = {id(place()): tensor for tensor, places in rows for place in places}
        if self.effects is not None and set(levels()) & {Level.GRAD, Level.JVP}:
            # It runs once more, for a derivative: what it updates are copies, which torch.func demands.
            copies = {index: tensors[index].clone() for index in self.effects.arguments}
            tensors = [copies.get(index, tensor) for index, tensor in enumerate(tensors)]
            given |= {id(tensor): tensor.clone() for tensor, _ in self.effects.captured}
        leaves = list(self.leaves)
        for index, value in zip((*self.tensors, *self.numbers), (*tensors[: len(self.tensors)], *numbers), strict=True):
            leaves[index] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        with self.settings.restored(), substituted(given):
            result = self.function.fn(*args, **kwargs)
        found, rest = take_apart(result)
        return [given.get(id(tensor), tensor) for tensor in found], rest


class Vmapped(Flat):
    """``torch.vmap`` of another."""

    def __init__(self, inner: Flat, dims: tuple[int | None, ...], size: int, randomness: str) -> None:
        super().__init__(inner.function, f"vmap({inner.name})", inner.arity, inner.lifted)
        self.differentiable = inner.differentiable
        self.effects, self.repeats = inner.effects, inner.repeats
        self.replaced = inner.replaced
        self.may_save = inner.may_save
        self._inner = inner
        self._dims = dims
        self._size = size
        self._randomness = randomness

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], Rest]:
        """Run the other for a whole batch."""
        rests: list[Rest] = []

        def one(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found, rest = self._inner.run(tensors, numbers)
            rests.append(rest)
            return tuple(found)

        # Unlike vmap itself, it tells which results are not batched. Private; checked with torch 2.11 and 2.13.
        found, dims = restore_vmap(one, self._dims, self._size, self._randomness)(*tensors)
        return list(found), dataclasses.replace(rests[0], dims=(*rests[0].dims, tuple(dims)))


class Vjp(Flat):
    """``torch.func.vjp`` of another: its tensors and cotangents of results in, gradients out.

    Args:
        inner: The other.
        mask: Which of its tensors gradients are wanted for.
        results: Of which of its results there are cotangents.
    """

    def __init__(self, inner: Flat, mask: tuple[bool, ...], results: tuple[int, ...]) -> None:
        super().__init__(inner.function, f"vjp({inner.name})", inner.arity + len(results), inner.lifted)
        self.repeats = inner.repeats or inner.effects is not None
        self._inner = inner
        self._mask = mask
        self._results = results

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], Rest]:
        """Run the other forwards and backwards."""
        primals, cotangents = tensors[: self._inner.arity], tensors[self._inner.arity :]

        def selected(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results, _ = self._inner.run(_merged(primals, chosen, self._mask), numbers)
            return tuple(results[index] for index in self._results or self._differentiable(results))

        found, pull, *_ = torch.func.vjp(selected, *_chosen(primals, self._mask))
        # Gradients that depend on no cotangent, as a custom Function's may, are those of any.
        given = tuple(cotangents) if self._results else tuple(map(torch.zeros_like, found))
        with torch.enable_grad():  # without it, some formulas take shortcuts that have no derivatives
            gradients = pull(given)
        return take_apart(apart(gradients, tensors))

    def _differentiable(self, results: Sequence[torch.Tensor]) -> list[int]:
        floating = (index for index, result in enumerate(results) if result.is_floating_point() or result.is_complex())
        return [index for index in floating if self._inner.has_gradient(index)]


class Jvp(Flat):
    """``torch.func.jvp`` of another: its tensors and tangents of some of them in, tangents of its results out."""

    def __init__(self, inner: Flat, mask: tuple[bool, ...], results: tuple[int, ...]) -> None:
        super().__init__(inner.function, f"jvp({inner.name})", inner.arity + sum(mask), inner.lifted)
        self.repeats = inner.repeats or inner.effects is not None
        self._inner = inner
        self._mask = mask
        self._results = results

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], Rest]:
        """Run the other with tangents."""
        primals, tangents = tensors[: self._inner.arity], tensors[self._inner.arity :]

        def selected(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results, _ = self._inner.run(_merged(primals, chosen, self._mask), numbers)
            return tuple(results[index] for index in self._results)

        with _inside_dual_level():
            _, moved, *_ = torch.func.jvp(selected, tuple(_chosen(primals, self._mask)), tuple(tangents))
        return take_apart(moved)


@contextlib.contextmanager
def _inside_dual_level() -> Generator[None, None, None]:
    """Have ``torch.func.jvp`` use the dual level that is active: there can be no second one.

    It does so by itself inside another ``torch.func.jvp``. Private; checked with torch 2.11 and 2.13.
    """
    nesting = eager_transforms.JVP_NESTING
    eager_transforms.JVP_NESTING = max(nesting, int(is_dual_level()))
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING = nesting


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a call, without history."""
    plain = tensor.detach()
    return torch.nn.Parameter(plain, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else plain


def apart(gradients: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Gradients in memory of their own: autograd accumulates in it."""
    taken = {plain_of(other).untyped_storage()._cdata for other in others}
    found: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            gradient = gradient.clone() if plain_of(gradient).untyped_storage()._cdata in taken else gradient
            taken.add(plain_of(gradient).untyped_storage()._cdata)
        found.append(gradient)
    return tuple(found)


def _is_same_memory(one: torch.Tensor, other: Any) -> bool:
    """Whether a plain tensor is all of another, so that it may be read where that is found."""
    if one is other:
        return True
    if not isinstance(other, torch.Tensor):
        return False
    if is_functorch_wrapped_tensor(other) or one.data_ptr() != other.data_ptr() or not one.data_ptr():
        return False
    return TensorSpec.of(one) == TensorSpec.of(other)


def _chosen(values: Sequence[torch.Tensor], mask: Sequence[bool]) -> list[torch.Tensor]:
    return [value for value, wanted in zip(values, mask, strict=True) if wanted]


def _merged(values: Sequence[torch.Tensor], chosen: Sequence[torch.Tensor], mask: Sequence[bool]) -> list[torch.Tensor]:
    """All values, with the chosen ones in the places that the mask says."""
    given = iter(chosen)
    return [next(given) if wanted else value for value, wanted in zip(values, mask, strict=True)]
