"""Random stacks of our transforms, torch.func's and autograd around them, and the law that ours change nothing.

A `Composition` is data, as a `Case` is: layers over a random function, innermost first. `build` makes the expression
of it, with our transforms or without; every layer takes the function's arguments, to which each vmap adds a dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import pygraph
from tests.property.laws import Outcome
from tests.property.strategies import FLOATS, NUMBER_KINDS, Case, NumberInput, State, Step, TensorInput

OURS: dict[str, Callable[[Any], Any]] = {
    "jit": pygraph.jit,
    "graphify∘indirect∘devicify": lambda fn: pygraph.graphify(pygraph.indirect(pygraph.devicify(fn))),
    "devicify": pygraph.devicify,
    "indirect∘devicify": lambda fn: pygraph.indirect(pygraph.devicify(fn)),
    "select∘graphify": lambda fn: pygraph.select(pygraph.graphify(fn)),
}
_BATCH = 2

# ---- layers ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ours:
    """One of our stacks."""

    name: str = "jit"

    def __call__(self, fn: Any) -> Any:
        return OURS[self.name](fn)


@dataclasses.dataclass(frozen=True)
class Vmap:
    """`torch.vmap`: ``dims`` says, for every tensor argument, where its new dimension is, or None.

    Results have theirs first: where one does not depend on what is mapped, torch 2.13 fails for other places (it makes
    garbage, or crashes).
    """

    dims: tuple[int | None, ...] = (0,)
    randomness: str = "different"
    chunk_size: int | None = None

    def __call__(self, fn: Any) -> Any:
        def mapped(*args: Any) -> Any:
            options = {"randomness": self.randomness, "chunk_size": self.chunk_size}
            return torch.vmap(fn, self.in_dims(args), **options)(*args)

        return mapped

    def in_dims(self, args: tuple[Any, ...]) -> tuple[int | None, ...]:
        dims = iter(self.dims * len(args))
        found = [next(dims) if _is_device(arg) else None for arg in args]
        return (0, *found[1:]) if set(found) == {None} else tuple(found)


@dataclasses.dataclass(frozen=True)
class Derivative:
    """One of torch.func's derivatives, for some of the arguments that have one."""

    kind: str = "grad"
    every: bool = False

    def __call__(self, fn: Any) -> Any:
        return lambda *args: _DERIVATIVES[self.kind](fn, args, self._argnums(args))

    def _argnums(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        floats = [i for i, arg in enumerate(args) if _is_device(arg) and arg.dtype.is_floating_point]
        return tuple(floats) if self.every else (floats[0],)


Layer = Ours | Vmap | Derivative


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"


def _floats(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in pytree.tree_leaves(result) if _is_device(t) and t.dtype.is_floating_point)


def scalar(result: Any) -> torch.Tensor:
    """One number of all floating-point results; the others have no derivative."""
    return torch.stack([t.to(torch.float32).sum() for t in _floats(result)]).sum()


def _at(fn: Any, args: tuple[Any, ...], argnums: tuple[int, ...]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """``fn`` as a function of the arguments at ``argnums``, and these."""

    def of_some(*some: Any) -> Any:
        chosen = dict(zip(argnums, some, strict=True))
        return fn(*(chosen.get(i, arg) for i, arg in enumerate(args)))

    return of_some, [args[i] for i in argnums]


def _vjp(fn: Any, args: tuple[Any, ...], argnums: tuple[int, ...]) -> Any:
    of_some, some = _at(fn, args, argnums)
    out, pull = torch.func.vjp(lambda *some: _floats(of_some(*some)), *some)
    return out, pull(tuple(t.cos() for t in out))


def _jvp(fn: Any, args: tuple[Any, ...], argnums: tuple[int, ...]) -> Any:
    of_some, some = _at(fn, args, argnums)
    return torch.func.jvp(of_some, tuple(some), tuple(t.sin() for t in some))


_DERIVATIVES: dict[str, Callable[[Any, tuple[Any, ...], tuple[int, ...]], Any]] = {
    "grad": lambda fn, args, n: torch.func.grad(lambda *a: scalar(fn(*a)), n)(*args),
    "grad_and_value": lambda fn, args, n: torch.func.grad_and_value(
        lambda *a: (lambda out: (scalar(out), out))(fn(*a)), n, has_aux=True
    )(*args),
    "vjp": _vjp,
    "jvp": _jvp,
    "jacrev": lambda fn, args, n: torch.func.jacrev(lambda *a: _floats(fn(*a))[-1], n)(*args),
    "jacfwd": lambda fn, args, n: torch.func.jacfwd(lambda *a: _floats(fn(*a))[-1], n, randomness="same")(*args),
    "hessian": lambda fn, args, n: torch.func.hessian(lambda *a: scalar(fn(*a)), n)(*args),
}

# ---- what is around them ---------------------------------------------------------------------------------------


def _plain(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return call(*args)


def _under(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[..., Any]:
    def around(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with mode():
            return call(*args)

    return around


def _requiring(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in _floats(args)]


def _backward(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    leaves = _requiring(args)
    out = call(*args)
    total = scalar(out)
    if total.requires_grad:
        total.backward()
    return out, [_or_zeros(leaf.grad, leaf) for leaf in leaves]


def _or_zeros(gradient: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor:
    """No gradient is a zero one: a second derivative, or a tangent, may not know that it depends on nothing."""
    return torch.zeros_like(leaf) if gradient is None else gradient


def _twice(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    leaves = _requiring(args)
    first = _gradients(call(*args), leaves)
    return first, _gradients(first, leaves)


def _gradients(result: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    total = scalar([result, leaves[0] * 0])  # which is of the leaves, if the result is not
    found = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    return [_or_zeros(gradient, leaf) for gradient, leaf in zip(found, leaves, strict=True)]


def _forward(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(arg, arg.cos()) if _floats(arg) else arg for arg in args]
        return pytree.tree_map_only(torch.Tensor, _dual, call(*duals))


def _dual(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    primal, tangent = forward_ad.unpack_dual(tensor)
    return primal, _or_zeros(tangent, primal)


AMBIENT: dict[str, Callable[[Callable[..., Any], tuple[Any, ...]], Any]] = {
    "nothing": _plain,
    "backward": _backward,
    "two gradients": _twice,
    "forward mode": _forward,
    "no_grad": _under(torch.no_grad),
    "inference_mode": _under(torch.inference_mode),
}
# How often they differentiate.
_ORDERS = {"backward": 1, "two gradients": 2, "forward mode": 1}

# ---- whole compositions ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Composition:
    """A random function, the layers over it, and what is around the call."""

    case: Case
    layers: tuple[Layer, ...]
    ambient: str

    @property
    def is_differentiated(self) -> bool:
        """Whether there are gradients, which may have other strides than in eager."""
        layers = any(isinstance(layer, Derivative) for layer in self.layers)
        return layers or self.ambient in _ORDERS

    @property
    def rounding(self) -> float:
        """The tolerance of gradients, relative to the largest: each is rounded to the dtypes of its operations.

        Three that meet in one value are added in another order than in eager (docs/limits/README.md).
        """
        casts = [FLOATS[step.c % len(FLOATS)] for step in self.case.steps if step.op == "cast"]
        low = [torch.finfo(dtype).eps for dtype in casts if dtype.itemsize == 2]
        return 4 * max(low) if low and self.is_differentiated else 0.0

    def build(self, device: torch.device, *, ours: bool) -> tuple[Callable[..., Any], State]:
        """The expression, and the state that its function closes over."""
        fn: Any = self.case.function(device)
        state = fn.state
        for layer in self.layers:
            if ours or not isinstance(layer, Ours):
                fn = layer(fn)
        return fn, state

    def arguments(self, device: torch.device, seed: int, layout: str) -> tuple[Any, ...]:
        """Flat arguments: every vmap has added a dimension where its `dims` say."""
        mapped = [layer for layer in self.layers if isinstance(layer, Vmap)]
        made: list[Any] = []
        plain = self.case.arguments(device, seed=seed, number_seed=seed)
        specs = list(self.case.inputs)
        shapes = [list(spec.shape) if isinstance(spec, TensorInput) else None for spec in specs]
        for layer in mapped:
            for shape, dim in zip(shapes, layer.in_dims(plain), strict=True):
                if shape is not None and dim is not None:
                    shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, _BATCH)
        for position, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
            if isinstance(spec, TensorInput):
                grown = dataclasses.replace(spec, shape=tuple(shape or ()), layout=layout)
                made.append(grown.make(device, seed * 100 + position))
            else:
                made.append(plain[position])
        return tuple(made)


_SHAPES = ((3,), (2, 3), (), (1, 3), (4,), (3, 3))
_KINDS = (
    "smooth",
    "smooth",
    "temporary",
    "unary",
    "binary",
    "number",
    "view",
    "reduce",
    "matmul",
    "where",
    "index",
    "cat",
)
_steps = st.builds(
    Step,
    st.sampled_from((*_KINDS, "random", "host", "cast")),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 11),
    st.sampled_from((1.0, 0.5, -1.5, 3.0)),
)
_floating = st.builds(TensorInput, st.sampled_from(_SHAPES), st.sampled_from((torch.float32, torch.float64)))
_others = st.one_of(
    _floating,
    st.builds(TensorInput, st.sampled_from(_SHAPES), st.sampled_from((torch.int64, torch.bool))),
    st.builds(NumberInput, st.sampled_from(NUMBER_KINDS)),
)
# A function of no dimensions may be mapped over the first one only.
_vmaps = st.builds(
    Vmap,
    st.lists(st.sampled_from((0, 0, -1, None)), min_size=1, max_size=3).map(tuple),
    st.sampled_from(("different", "same", "error")),
    st.sampled_from((None, None, 1)),
)
_derivatives = st.builds(Derivative, st.sampled_from(tuple(_DERIVATIVES)), st.booleans())
_ours = st.builds(Ours, st.sampled_from(tuple(OURS)))


def _is_of_low_order(layers: Sequence[Layer], ambient: str) -> bool:
    """Whether there are at most four derivatives of one another: five have taken minutes in eager as well."""
    kinds = [layer.kind for layer in layers if isinstance(layer, Derivative)]
    return len(kinds) + kinds.count("hessian") + _ORDERS.get(ambient, 0) <= 4


@st.composite
def compositions(draw: st.DrawFn, ambient: str) -> Composition:
    """Up to four layers, at least one of them ours, around a function that is mostly differentiable."""
    module = draw(st.sampled_from((None, None, None, "eval")))
    kinds = _steps if module is None else st.one_of(_steps, st.builds(Step, st.just("module"), st.integers(0, 5)))
    case = Case(
        (draw(_floating), *draw(st.lists(_others, max_size=2))),
        tuple(draw(st.lists(kinds, min_size=1, max_size=5))),
        tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))),
        draw(st.sampled_from(("tuple", "single", "dict", "nested"))),
        tuple(draw(st.lists(_floating, max_size=1))),
        module,
    )
    drawn = st.lists(st.one_of(_vmaps, _derivatives, _ours), min_size=0, max_size=3)
    layers = draw(drawn.filter(lambda layers: _is_of_low_order(layers, ambient)))
    layers.insert(draw(st.integers(0, len(layers))), draw(_ours))
    kept = [
        layer for i, layer in enumerate(layers)
        if not (isinstance(layer, Ours) and i and isinstance(layers[i - 1], Ours))
    ]  # fmt: skip  # ours on ours is another test's business
    return Composition(case, tuple(kept), ambient)


# ---- the law ---------------------------------------------------------------------------------------------------


def check_ours_change_nothing(composition: Composition, device: torch.device) -> None:
    """The expression with our transforms does what it does without them, at every call, for other layouts too."""
    reference, state = composition.build(device, ours=False)
    mine, my_state = composition.build(device, ours=True)
    if composition.ambient == "inference_mode" and composition.is_differentiated and torch.__version__ < "2.13":
        return  # torch 2.11 does not differentiate there: gradients are zero, or an error
    # Gradients of gradients that are constant: zeros here, not known to autograd in eager (docs/limits/README.md).
    known = composition.ambient != "two gradients" and not any(
        isinstance(layer, Derivative) for layer in composition.layers
    )
    for call, layout in enumerate(("contiguous", "contiguous", "transposed")):
        mode, seeds = AMBIENT[composition.ambient], (call, layout)
        expected = Outcome(
            _with_state(reference, mode, state, known),
            composition.arguments(device, *seeds),
            state.all_tensors(),
            call,
        )
        got = Outcome(
            _with_state(mine, mode, my_state, known),
            composition.arguments(device, *seeds),
            my_state.all_tensors(),
            call,
        )
        got.check_same(expected, memory=not composition.is_differentiated, rounding=composition.rounding)


def _with_state(call: Callable[..., Any], around: Callable[..., Any], state: State, known: bool) -> Callable[..., Any]:
    """Return the call, with autograd's state of closed-over tensors, and of results if that is ``known``."""

    def with_state(*args: Any) -> Any:
        result = around(call, args)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        facts = [(t.requires_grad, t.is_leaf) for t in tensors if known]
        return result, facts, [t.grad for t in state.all_tensors()]

    return with_state
