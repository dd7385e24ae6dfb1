"""Random functions, arguments and transform stacks.

A `Case` is data: inputs, closed-over state, steps and a choice of results. `Case.function` makes an ordinary Python
function of it that picks its operands by what is in its pool (modulo), so that every drawn case runs and shrinks
towards fewer, simpler steps. `Case.arguments` makes a call's arguments, the same bits for the same seed.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import pygraph

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.bool)
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")
SHAPES = ((3,), (2, 3), (3, 3), (), (4,), (1, 3), (2, 2, 3), (0,), (0, 3), (5, 4), (1,), (2, 0, 3), (17,))
_LARGEST = 600  # elements; a step that would make more is left out

# ---- inputs ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TensorInput:
    """A tensor on the device (or the host): its layout is part of the key, its contents come from a seed."""

    shape: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    offset: int = 0
    host: bool = False

    def make(self, device: torch.device | str, seed: int) -> torch.Tensor:
        device = "cpu" if self.host else device
        shape, index = list(self.shape), (...,)
        if self.layout == "transposed":
            shape.reverse()
        elif self.layout == "sliced" and shape:
            index = (..., slice(None, None, 2))
            shape[-1] *= 2
        elif self.layout == "expanded" and shape:
            shape[0] = 1
        count = int(np.prod(shape, dtype=int))
        memory = torch.empty(count + self.offset, dtype=self.dtype, device=device)
        memory.copy_(contents(count + self.offset, self.dtype, seed))
        tensor = memory[self.offset :].view(shape)
        if self.layout == "transposed":
            return tensor.permute(tuple(reversed(range(len(shape)))))
        if self.layout == "expanded" and shape:
            return tensor.expand(self.shape)
        return tensor[index] if self.layout == "sliced" and shape else tensor


@dataclasses.dataclass(frozen=True)
class AliasInput:
    """The tensor input number ``of`` (modulo) once more, or a view that overlaps it."""

    of: int = 0
    view: str = "same"


@dataclasses.dataclass(frozen=True)
class NumberInput:
    """A number: ``float``, ``int``, ``bool``, a NumPy scalar, or a 0-d CPU tensor."""

    kind: str = "float"

    def make(self, seed: int) -> Any:
        value = ((seed * 7919) % 15 - 6) / 4 or 0.5
        match self.kind:
            case "float":
                return value
            case "int":
                return int(value * 2) or 1
            case "bool":
                return bool(seed % 2)
            case "np.float32":
                return np.float32(value)
            case "np.int64":
                return np.int64(int(value * 2) or 1)
            case "cpu float":
                return torch.tensor(value)
            case _:
                return torch.tensor(int(value * 2) or 1)


@dataclasses.dataclass(frozen=True)
class ConstantInput:
    """``None`` or a string: part of the tree or of the key, never of the work."""

    value: Any = None


def contents(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Tame numbers that every dtype holds exactly: eighths in [-2, 2), small integers, booleans."""
    numbers = np.random.default_rng(seed).integers(-16, 16, count)
    if dtype == torch.bool:
        return torch.from_numpy(numbers > 0)
    if dtype.is_floating_point:
        return torch.from_numpy(numbers / 8).to(dtype)
    return torch.from_numpy(numbers // 6).to(dtype)


# ---- steps -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: an operation, three choices of operands, and a small number."""

    op: str
    a: int = 0
    b: int = 0
    c: int = 0
    k: float = 1.0


class Pool:
    """The values that steps choose from; what steps do with them."""

    def __init__(self, device: torch.device, state: State) -> None:
        self.device = device
        self.state = state
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Any] = []
        self.extra: list[Any] = []

    def add(self, leaf: Any) -> None:
        """Put an argument, or an element of a result, into the pool."""
        if isinstance(leaf, torch.Tensor) and (leaf.dim() or leaf.device.type != "cpu"):
            self.tensors.append(leaf)
        elif leaf is not None and not isinstance(leaf, str):
            self.numbers.append(leaf)

    def pick(self, index: int, suits: Callable[[torch.Tensor], bool] = lambda t: True) -> torch.Tensor | None:
        found = [tensor for tensor in self.tensors if tensor.device.type != "cpu" and suits(tensor)]
        return found[-1 - index % len(found)] if found else None

    def number(self, step: Step) -> Any:
        """A live number if there is one and the step's choice says so, else its own."""
        return self.numbers[step.c % len(self.numbers)] if self.numbers and step.c % 3 else step.k

    def other(self, index: int, like: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        """A second operand that broadcasts against ``like`` (``exact``: to its shape)."""
        other = self.pick(index)
        assert other is not None
        try:
            shape = torch.broadcast_shapes(other.shape, like.shape)
        except RuntimeError:
            shape = None
        if shape is None or (exact and shape != like.shape) or _count(shape) > _LARGEST:
            other = other.to(torch.float32).sum() if other.dtype == torch.bool else other.sum()
        return other

    def source(self, index: int, target: torch.Tensor, *, indexed: bool = False) -> torch.Tensor:
        """What may be written to ``target`` in place: its kind of dtype, and no partial overlap."""
        other = self.other(index, target, exact=True)
        if other.dtype.is_floating_point and not target.dtype.is_floating_point:
            other = other > 0
        if target.dtype == torch.bool:
            other = other != 0
        elif indexed:
            other = other.to(target.dtype)
        if other.untyped_storage()._cdata == target.untyped_storage()._cdata and other is not target:
            other = other.clone()
        return other


def _count(shape: Any) -> int:
    return int(np.prod(tuple(shape), dtype=int))


def is_float(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point


def is_integer(t: torch.Tensor) -> bool:
    return not t.dtype.is_floating_point and t.dtype != torch.bool


def is_number_like(t: torch.Tensor) -> bool:
    return t.dtype != torch.bool


def is_writable(t: torch.Tensor) -> bool:
    """Whether no element of ``t`` is in memory twice, as in expanded tensors."""
    return not t.numel() or all(stride or size < 2 for size, stride in zip(t.shape, t.stride(), strict=True))


def _writable_float(t: torch.Tensor) -> bool:
    return is_float(t) and is_writable(t)


_BINARY = (torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum)
_UNARY = (torch.relu, torch.tanh, torch.neg, torch.sigmoid, torch.abs, torch.cos)
_COMPARE = (torch.gt, torch.le, torch.eq, torch.ne)


def _unary(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, is_float)
    return None if x is None else _UNARY[s.c % len(_UNARY)](x)


def _binary(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, is_number_like)
    if x is None:
        return None
    other = p.other(s.b, x)  # torch.sub refuses masks
    return _BINARY[s.c % len(_BINARY)](x, other.to(x.dtype) if other.dtype == torch.bool else other)


def _number(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, is_number_like)
    if x is None:
        return None
    k = p.number(s)
    return (lambda: x * k, lambda: x + k, lambda: k - x, lambda: x / k if k != 0 else x)[s.b % 4]()


def _where(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, is_number_like)
    if x is None:
        return None
    y = p.other(s.b, x)
    if y.is_complex() or y.dtype == torch.bool:
        return None
    return torch.where(_COMPARE[s.c % len(_COMPARE)](x, y), x, y if s.k > 0 else s.k)


def _matmul(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: is_float(t) and t.dim() in (1, 2, 3))
    if x is None:
        return None
    y = p.pick(s.b, lambda t: t.dtype == x.dtype and t.dim() == 2 and t.shape[0] == x.shape[-1])
    y = y if y is not None else (x.mT if x.dim() > 1 else x)
    return torch.addmm(x[:, :1], x, y) if s.c % 4 == 3 and x.dim() == 2 == y.dim() else x @ y


def _reduce(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: is_float(t) and t.numel() > 0)
    if x is None:
        return None
    dim = s.b % max(x.dim(), 1)
    return (
        lambda: x.sum(),
        lambda: x.mean(dim),
        lambda: x.amax(dim, keepdim=True),
        lambda: torch.softmax(x, dim),
        lambda: x.max(dim) if x.dim() else x.sum(),
        lambda: x.cumsum(dim),
        lambda: x.var(dim, correction=0),
        lambda: torch.sort(x, dim=dim, stable=True),
        lambda: x.cumprod(dim),  # on the emulated device it hides its pointers
    )[s.c % 9]()


def _view(p: Pool, s: Step) -> Any:
    x = p.pick(s.a)
    if x is None:
        return None
    dims = x.dim()
    return (
        lambda: x.reshape(-1),
        lambda: x.transpose(0, -1) if dims else x.view(1),
        lambda: x[s.b % 2 :] if dims else x,
        lambda: x.unsqueeze(s.b % (dims + 1)),
        lambda: x.expand(2, *x.shape),
        lambda: x.squeeze(),
        lambda: x[..., ::2] if dims else x,
        lambda: x.select(0, s.b % x.shape[0]) if dims and x.shape[0] else x,
        lambda: tuple(x.chunk(2)) if dims else x,
        lambda: x.contiguous(),
        lambda: x.diagonal() if dims > 1 else x,
        lambda: x.detach(),
    )[s.c % 12]()


def _index(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: t.dim() > 0 and t.shape[0] > 0)
    if x is None:
        return None
    index = p.pick(s.b, lambda t: is_integer(t) and t.numel() <= 8)
    if index is None or s.c % 3 == 0:  # made on the host and moved to the device
        index = torch.arange(s.b % 3 + 1).to(p.device)
    index = index.long() % x.shape[0]
    if _count(index.shape) * _count(x.shape[1:]) > _LARGEST:
        return None
    return x.index_select(0, index.reshape(-1)) if s.c % 3 == 1 else x[index]


def _write(p: Pool, s: Step) -> Any:
    """In place on anything in the pool: arguments, views of arguments, intermediates, closed-over state."""
    x = p.pick(s.a, is_writable)
    if x is None:
        return None
    y = p.source(s.b, x)
    if x.dtype == torch.bool:
        x.logical_or_(y)
        return None
    k = p.number(s)
    k = k if x.dtype.is_floating_point or not _is_fraction(k) else 2
    (
        lambda: x.add_(y),
        lambda: x.mul_(k),
        lambda: x.copy_(y),
        lambda: x.add_(k),
        lambda: x.zero_(),
        lambda: x.fill_(s.k if x.dtype.is_floating_point else 3),
        lambda: x.clamp_(-2, 2),
        lambda: x.sub_(y.to(x.dtype), alpha=2),  # of booleans torch subtracts nothing
    )[s.c % 8]()
    return x if s.b % 4 == 3 else None


def _is_fraction(k: Any) -> bool:
    return k.is_floating_point() if isinstance(k, torch.Tensor) else isinstance(k, (float, np.floating))


def _write_index(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: is_writable(t) and t.dim() > 0 and t.shape[0] > 0)
    if x is None:
        return None
    match s.c % 4:
        case 0:
            x[s.b % x.shape[0]] = 1
        case 1:
            x[::2] = p.source(s.b, x[::2])
        case 2:
            rows = torch.arange(x.shape[0], device=p.device).flip(0)[:2]
            x[rows] = p.source(s.b, x[:2], indexed=True)
        case _:
            rows = torch.arange(min(2, x.shape[0])).to(p.device)
            x.index_put_((rows,), p.source(s.b, x[: len(rows)], indexed=True), accumulate=x.dtype != torch.bool)
    return None


def _random(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, is_float)
    if x is None:
        return None
    return (
        lambda: torch.rand_like(x),
        lambda: F.dropout(x, 0.5),
        lambda: torch.bernoulli(x.clamp(0, 1)),
        lambda: torch.empty_like(x).normal_(),
        lambda: x + torch.randn(x.shape, device=p.device, dtype=x.dtype),
        lambda: torch.randint(0, 3, (3,), device=p.device),
        lambda: torch.randperm(4, device=p.device),
    )[s.c % 7]()


def _random_write(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, _writable_float)
    if x is not None:
        x.uniform_(-1, 1) if s.c % 2 else x.normal_()


def _host(p: Pool, s: Step) -> Any:
    """Constants and factories of the host on their way to the device."""
    x = p.pick(s.a, lambda t: is_float(t) and t.dim() > 0 and t.shape[-1] <= 5)
    if x is None:
        return None
    n = x.shape[-1]
    return (
        lambda: x + torch.arange(n).to(p.device),
        lambda: x * torch.tensor(s.k),
        lambda: x - torch.ones(n).to(x),
        lambda: x + torch.full((), 2.0),
        lambda: torch.where(x > 0, x, torch.tensor(float(s.k))),
        lambda: x * torch.linspace(0, 1, n).to(p.device, x.dtype),
        lambda: x.masked_fill(x < 0, p.number(s) if not isinstance(p.number(s), torch.Tensor) else 0.5),
        lambda: x + torch.rand(n).to(p.device),
        lambda: torch.full((n,), 1.5, device=p.device) + x,
    )[s.c % 9]()


def _cast(p: Pool, s: Step) -> Any:
    x = p.pick(s.a)
    return None if x is None else x.to(FLOATS[s.c % len(FLOATS)])


def _cat(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: t.dim() > 0 and t.numel() < _LARGEST // 2)
    if x is None:
        return None
    y = p.other(s.b, x, exact=True).expand(x.shape).to(x.dtype) if is_float(x) else x
    return torch.cat([x, y], 0) if s.c % 2 else torch.stack([x, y])


def _module(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: t.dtype == torch.float32 and t.numel() > 0)
    if x is None or p.state.module is None:
        return None
    return p.state.module(x.reshape(-1)[:1].expand(2, 3) if x.numel() % 3 else x.reshape(-1, 3))


def _item(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: is_float(t) and t.numel() > 0)
    if x is None:
        return None
    return x * x.sum().item() if s.c % 2 else (x > 0).sum().item() + x


def _mask(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: is_float(t) and t.dim() > 0)
    if x is None:
        return None
    if s.c % 3 == 2:
        p.extra.append(x[x > 0])
        return None
    return x[x > 0].sum() if s.c % 3 else torch.nonzero(x > 0).sum()


def _branch(p: Pool, s: Step) -> Any:
    """A Python ``if`` on a live number, or on a tensor."""
    x = p.pick(s.a, is_float)
    if x is None:
        return None
    if p.numbers and s.c % 3:
        return x + 1 if p.numbers[s.b % len(p.numbers)] > 0 else x - 1
    return x * 2 if bool(x.sum() > 0) else x * 3


def _functorch(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, lambda t: t.dtype in (torch.float32, torch.float64) and t.dim() == 2 and t.numel() > 0)
    if x is None:
        return None
    if s.c % 3 == 0:
        return torch.func.vmap(lambda row: row.cos() * row.sum())(x)
    if s.c % 3 == 1:
        return torch.func.grad(lambda t: (t * t).sum())(x)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)[0]


def _output(p: Pool, s: Step) -> Any:
    """Keep a number, as a result of its own."""
    if p.numbers:
        k = p.numbers[s.a % len(p.numbers)]
        p.extra.append(k * 2 if s.c % 2 else k)


OPERATIONS: dict[str, Callable[[Pool, Step], Any]] = {
    "unary": _unary,
    "binary": _binary,
    "number": _number,
    "view": _view,
    "write": _write,
    "reduce": _reduce,
    "matmul": _matmul,
    "where": _where,
    "index": _index,
    "write_index": _write_index,
    "random": _random,
    "random_write": _random_write,
    "host": _host,
    "cast": _cast,
    "cat": _cat,
    "module": _module,
    "functorch": _functorch,
    "output": _output,
}
DATA_DEPENDENT: dict[str, Callable[[Pool, Step], Any]] = {"item": _item, "mask": _mask, "branch": _branch}


class TripledExp(torch.autograd.Function):
    """An exponential whose derivatives are three times what they should be, so that they are seen to be used."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] * 3

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent * ctx.saved_tensors[0] * 3


def _smooth(p: Pool, s: Step) -> Any:
    x = p.pick(s.a, is_float)
    if x is None:
        return None
    return (
        lambda: x.sin(),
        lambda: x.tanh() * x,
        lambda: F.softplus(x),
        lambda: x.square() + s.k,
        lambda: x * x.detach(),
        lambda: TripledExp.apply(x.clamp(-1, 1)),
        lambda: _without_gradient(x) + x.cos(),
        lambda: torch.func.grad(lambda t: (t.sin() * x).sum())(x),
    )[s.c % 8]()


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.square()


def _temporary(p: Pool, s: Step) -> Any:
    """In place on something that the function has made."""
    x = p.pick(s.a, is_float)
    if x is None:
        return None
    made = x * 2
    match s.c % 5:
        case 0:
            made.mul_(x).add_(s.k)
        case 1:
            made.relu_()
        case 2 if made.dim():
            made[..., :1] = x[..., :1].cos()
        case 3 if made.dim():
            made.select(-1, 0).zero_() if made.shape[-1] else None
        case _:
            made.copy_(x.sin())
    return made


DIFFERENTIABLE: dict[str, Callable[[Pool, Step], Any]] = {"smooth": _smooth, "temporary": _temporary}

# ---- whole cases -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Every kind of state: weights, tied weights, running statistics, a buffer that forward updates, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x = F.dropout(self.first(x), 0.5, self.training)
        return self.last(torch.relu(x)) + self.count if len(x) < 2 else self.last(self.norm(x))


class State:
    """What a function closes over."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.tensors = [spec.make(device, 1000 + i) for i, spec in enumerate(case.closed)]
        self.module: Net | None = None
        if case.module is not None:
            self.module = Net()
            with torch.no_grad():
                for i, value in enumerate(self.module.state_dict().values()):
                    if value.is_floating_point():
                        value.copy_(contents(value.numel(), value.dtype, 2000 + i).view(value.shape).abs() + 0.25)
            self.module.train(case.module == "train").to(device)

    def all_tensors(self) -> list[torch.Tensor]:
        return [*self.tensors, *(self.module.state_dict(keep_vars=True).values() if self.module is not None else ())]


Input = TensorInput | AliasInput | NumberInput | ConstantInput


@dataclasses.dataclass(frozen=True)
class Case:
    """A random function and its arguments."""

    inputs: tuple[Input, ...] = (TensorInput(),)
    steps: tuple[Step, ...] = ()
    results: tuple[int, ...] = (0,)
    tree: str = "tuple"
    closed: tuple[TensorInput, ...] = ()
    module: str | None = None
    argument_tree: str = "flat"

    def function(self, device: torch.device, spy: Callable[[str, Step, Pool], None] | None = None) -> Any:
        """A function of ``(*inputs)``; ``.state`` is what it closes over, made anew."""
        state = State(self, device)
        operations = {**OPERATIONS, **DATA_DEPENDENT, **DIFFERENTIABLE}

        def fn(*args: Any) -> Any:
            pool = Pool(device, state)
            for leaf in _flat(args):
                pool.add(leaf)
            for tensor in state.tensors:
                pool.add(tensor)
            for step in self.steps:
                if spy is not None:
                    spy(step.op, step, pool)
                made = operations[step.op](pool, step)
                for value in made if isinstance(made, tuple) else (made,):
                    if value is not None:
                        pool.add(value)
            chosen = [pool.tensors[-1 - i % len(pool.tensors)] for i in self.results if pool.tensors]
            return _shape_results([*chosen, *pool.extra], self.tree)

        fn.state = state
        return fn

    def arguments(self, device: torch.device, seed: int = 0, number_seed: int = 0) -> tuple[Any, ...]:
        """Arguments of one call; ``seed`` decides the contents of tensors, ``number_seed`` the numbers."""
        made: list[Any] = []
        for position, spec in enumerate(self.inputs):
            if isinstance(spec, TensorInput):
                made.append(spec.make(device, seed * 100 + position))
            elif isinstance(spec, NumberInput):
                made.append(spec.make(number_seed * 10 + position))
            elif isinstance(spec, AliasInput):
                tensors = [m for m in made if isinstance(m, torch.Tensor) and m.device.type != "cpu"]
                made.append(_alias(tensors[spec.of % len(tensors)], spec.view) if tensors else None)
            else:
                made.append(spec.value)
        if self.argument_tree == "dict" and len(made) > 1:
            return (made[0], {f"k{i}": value for i, value in enumerate(made[1:])})
        if self.argument_tree == "list":
            return (made,)
        return tuple(made)


def _alias(tensor: torch.Tensor, view: str) -> torch.Tensor:
    if view == "same":
        return tensor
    if view == "transposed":
        return tensor.transpose(0, -1) if tensor.dim() else tensor.view(1)
    if view == "tail" and tensor.dim():
        return tensor[1:]
    return tensor.detach()


def _flat(args: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(args)


def _shape_results(values: list[Any], tree: str) -> Any:
    match tree:
        case "single":
            return values[0] if values else None
        case "dict":
            return {f"r{i}": value for i, value in enumerate(values)}
        case "nested":
            return {"first": values[:1], "rest": (tuple(values[1:]), None, "text", 3)}
        case "list":
            return values
        case _:
            return tuple(values)


@st.composite
def tensor_inputs(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> TensorInput:
    """Shapes (empty and 0-d too), dtypes, strides, storage offsets, alignments."""
    plain = st.just("contiguous")
    return TensorInput(
        draw(st.sampled_from(SHAPES)),
        draw(st.one_of(st.just(torch.float32), st.sampled_from(dtypes))),
        draw(st.one_of(plain, st.sampled_from(LAYOUTS))),
        draw(st.one_of(st.just(0), st.sampled_from((1, 3, 4, 64)))),
    )


NUMBER_KINDS = ("float", "int", "np.float32", "cpu float", "bool", "np.int64", "cpu int")

steps = st.builds(
    Step,
    st.one_of(st.sampled_from(tuple(OPERATIONS)), st.sampled_from(("write", "view", "number", "binary"))),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 11),
    st.sampled_from((1.0, 0.5, -1.5, 3.0)),
)
data_dependent_steps = st.builds(
    Step, st.sampled_from(tuple(DATA_DEPENDENT)), st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)
)


@st.composite
def cases(draw: st.DrawFn, *, data_dependent: bool = True, modules: bool = True, aliases: bool = True) -> Case:
    """Functions with arguments; data-dependent steps in one case of six."""
    others = st.one_of(
        tensor_inputs(),
        st.builds(NumberInput, st.sampled_from(NUMBER_KINDS)),
        *([st.builds(AliasInput, st.integers(0, 2), st.sampled_from(("same", "tail", "transposed", "detached")))]
          if aliases else []),
        st.builds(ConstantInput, st.sampled_from((None, "text"))),
    )  # fmt: skip
    inputs = (draw(tensor_inputs()), *draw(st.lists(others, max_size=3)))
    module = draw(st.sampled_from((None, None, "eval", "train"))) if modules else None
    kinds = steps if module is None else st.one_of(steps, st.builds(Step, st.just("module"), st.integers(0, 5)))
    if data_dependent and draw(st.integers(0, 5)) == 5:
        kinds = st.one_of(kinds, data_dependent_steps)
    return Case(
        inputs,
        tuple(draw(st.lists(kinds, min_size=1, max_size=7))),
        tuple(draw(st.lists(st.integers(0, 8), min_size=1, max_size=4))),
        draw(st.sampled_from(("tuple", "single", "dict", "nested", "list"))),
        tuple(draw(st.lists(tensor_inputs(), max_size=1))),
        module,
        draw(st.sampled_from(("flat", "dict", "list"))),
    )


# ---- stacks ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stack:
    """A legal stack of transforms, innermost first."""

    names: tuple[str, ...]

    def __call__(self, fn: Any) -> Any:
        for name in self.names:
            fn = getattr(pygraph, name)(fn)
        return fn


_SUBSETS = [
    tuple(name for bit, name in enumerate(("devicify", "indirect", "graphify", "select")) if mask >> bit & 1)
    for mask in range(1, 16)
]
STACKS = (
    Stack(("jit",)),
    *(Stack(names) for names in reversed(_SUBSETS) if "select" not in names or "graphify" in names),
)
stacks = st.sampled_from(STACKS)
graph_stacks = st.sampled_from([stack for stack in STACKS if {"jit", "graphify"} & set(stack.names)])


def collect() -> None:
    """Break reference cycles of a finished example."""
    gc.collect()
