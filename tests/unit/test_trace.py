"""trace: what each kind of input and output becomes, what is refused and how, and that nothing real is touched."""

from __future__ import annotations

import contextlib
import math
import queue
import random
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pygraph
from pygraph.errors import TraceError
from pygraph.ir.descriptors import Alias, Argument, Base, Captured, Mutation, Result, ScalarArgument, Static, TensorSpec
from pygraph.ir.effects import is_random
from pygraph.ir.leaves import is_live_number, static_leaves, to_number
from pygraph.ir.program import Program
from pygraph.tracing import settings
from pygraph.tracing.trace import trace_call

X = torch.arange(6.0).view(2, 3)


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.nodes if node.op == "call_function"]


def static_of(fn: Callable[..., Any], *args: Any) -> frozenset[int]:
    return trace_call(fn, args, {}).static_leaves


# ---- inputs ----------------------------------------------------------------------------------------------------


def test_tensors_are_arguments_by_path() -> None:
    program = pygraph.trace(lambda p, *, x: p["w"][0] + x)({"w": [X]}, x=X + 1)
    assert program.inputs == (
        Argument("args[0]['w'][0]", 0, TensorSpec.of(X)),
        Argument("kwargs['x']", 1, TensorSpec.of(X)),
    )


@pytest.mark.parametrize(
    ("number", "kind"),
    [(2, int), (2.5, float), (np.int64(3), int), (np.float32(0.5), float), (np.float64(0.5), float), (-(2**63), int)],
)
def test_numbers_are_live(number: Any, kind: type) -> None:
    program = pygraph.trace(lambda x, k: x * k)(X, number)
    assert program.inputs[1] == ScalarArgument("args[1]", 1, kind)
    assert torch.equal(pygraph.evaluate(program, X, to_number(number) + 1), X * (to_number(number) + 1))


@pytest.mark.parametrize("leaf", [True, np.bool_(True), math.inf, math.nan, 2**63, "text", None, 1j, torch.float32])
def test_other_leaves_are_not_live(leaf: Any) -> None:
    assert not is_live_number(leaf)


def test_non_numbers_are_baked_in() -> None:
    program = pygraph.trace(lambda x, flag, name: x + 1 if flag and name == "add" else x)(X, True, "add")
    assert [type(d) for d in program.inputs] == [Argument]
    assert targets(program) == [torch.ops.aten.add.Tensor]


def test_captured_tensors_say_what_they_are() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("mean", torch.zeros(3))
            self.plain = torch.ones(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.mean + self.plain + torch.tensor([1.0, 2.0, 3.0])

    model = Model()
    with torch.no_grad():
        program = pygraph.trace(model)(X)
    captured = [d for d in program.inputs if isinstance(d, Captured)]
    assert [(d.kind, d.name) for d in captured] == [
        ("parameter", "weight"),
        ("buffer", "mean"),
        ("closed-over", "plain"),
        ("constant", "constant_3"),
    ]
    assert captured[0].value is model.weight


def test_a_closed_over_tensor_is_one_input_however_often_it_is_used() -> None:
    weight = torch.ones(3)
    program = pygraph.trace(lambda x: x * weight + weight.sum())(X)
    assert [d.name for d in program.inputs if isinstance(d, Captured)] == ["weight"]


def test_overlapping_arguments_of_which_one_is_written_become_one_base() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    memory = torch.arange(6.0)
    a, b = memory[1:5], memory[2:6].view(2, 2)  # the base is not at the start of its storage
    program = pygraph.trace(fn)(a, b)
    (base,) = program.inputs
    assert isinstance(base, Base)
    assert (base.leaves, base.start, base.spec.shape) == ((0, 1), 0, (5,))
    other = memory.clone()
    expected = fn(other[1:5], other[2:6].view(2, 2))
    assert torch.equal(pygraph.evaluate(program, a, b), expected)
    assert torch.equal(memory, other)


def test_overlapping_arguments_that_are_only_read_stay_apart() -> None:
    memory = torch.arange(6.0)
    program = pygraph.trace(lambda a, b: a + b)(memory[1:5], memory[2:])
    assert [type(d) for d in program.inputs] == [Argument, Argument]


def test_the_same_tensor_twice_is_written_once() -> None:
    x = torch.zeros(3)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        b.add_(1)
        return a + b

    program = pygraph.trace(fn)(x, x)
    assert pygraph.evaluate(program, x, x).tolist() == [4.0, 4.0, 4.0]
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_labels_for_the_profiler_are_no_operations() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
            x = x * 2
        return x + 1

    assert targets(pygraph.trace(fn)(X)) == [torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor]


# ---- outputs ---------------------------------------------------------------------------------------------------


def test_results_by_path() -> None:
    program = pygraph.trace(lambda x: {"a": x + 1, "b": (x * 2, None)})(X)
    assert [(d.path, d.leaf) for d in program.outputs if isinstance(d, Result)] == [
        ("result['a']", 0),
        ("result['b'][0]", 1),
    ]
    assert program.statics == (Static("result['b'][1]", 2, None),)


def test_live_numbers_can_be_returned() -> None:
    program = pygraph.trace(lambda x, k: (x * k, k * 2 + 1))(X, 3)
    assert pygraph.evaluate(program, X, 5)[1] == 11
    assert [d.spec for d in program.outputs if isinstance(d, Result)][1] is int


def test_mutation_of_an_argument_a_buffer_and_a_closed_over_tensor() -> None:
    closed = torch.zeros(3)
    norm = nn.BatchNorm1d(3)

    def fn(x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["n"].add_(1)
        closed.copy_(x[0])
        return norm(x)

    with torch.no_grad():
        program = pygraph.trace(fn)(X, {"n": torch.zeros(())})
    names = [
        getattr(program.inputs[d.input], "name", None) or getattr(program.inputs[d.input], "path", None)
        for d in program.outputs
        if isinstance(d, Mutation)
    ]
    assert sorted(str(name) for name in names) == [
        "args[1]['n']",
        "closed",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert torch.equal(closed, torch.zeros(3))
    assert norm.num_batches_tracked == 0


def test_a_returned_argument_is_the_very_object() -> None:
    program = pygraph.trace(lambda x: x.add_(1))(torch.zeros(2))
    x = torch.zeros(2)
    assert pygraph.evaluate(program, x) is x


def test_a_returned_view_shows_the_argument() -> None:
    program = pygraph.trace(lambda x: x[1:].t())(X)
    assert program.aliases == (Alias("result", 0, "input", 0, TensorSpec((3, 1), (1, 3), X.dtype, X.device, 3)),)
    out = pygraph.evaluate(program, x := X.clone())
    x.zero_()
    assert out.abs().sum() == 0


def test_a_view_of_an_offset_argument_is_relative_to_it() -> None:
    memory = torch.arange(8.0)
    program = pygraph.trace(lambda x: x[1:])(memory[3:])
    assert pygraph.evaluate(program, memory[3:]).data_ptr() == memory[4:].data_ptr()


def test_results_that_share_memory_still_do() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        return y, y[0]

    program = pygraph.trace(fn)(X)
    assert [alias.of for alias in program.aliases] == ["output", "output"]
    y, row = pygraph.evaluate(program, X)
    row.zero_()
    assert y[0].abs().sum() == 0


def test_a_view_of_a_closed_over_tensor_shows_it() -> None:
    closed = torch.zeros(3)
    program = pygraph.trace(lambda x: (x + 1, closed[1:]))(X)
    pygraph.evaluate(program, X)[1].fill_(7)
    assert closed.tolist() == [0.0, 7.0, 7.0]


def test_a_returned_captured_tensor_is_the_very_object() -> None:
    module = nn.Linear(3, 3)
    program = pygraph.trace(lambda x: (x + 1, module.weight))(X)
    assert pygraph.evaluate(program, X)[1] is module.weight


def test_strides_are_those_of_eager() -> None:
    program = pygraph.trace(lambda x: (x.t() + 1, torch.empty(2, 3).t().add(x.t())))(X)
    assert [d.spec.stride for d in program.outputs if isinstance(d, Result)] == [(1, 3), (1, 3)]


# ---- numbers ---------------------------------------------------------------------------------------------------


def test_an_if_bakes_its_number_in() -> None:
    def fn(x: torch.Tensor, k: int, s: float) -> torch.Tensor:
        return x * s if k > 1 else x + s

    assert static_of(fn, X, 3, 0.5) == {1}
    program = pygraph.trace(fn)(X, 3, 0.5)
    assert torch.equal(pygraph.evaluate(program, X, 3, 2.0), X * 2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, k: x.new_ones(k),
        lambda x, k: x[:k],
        lambda x, k: x.expand(k, 2, 3),
        lambda x, k: torch.arange(k),
        lambda x, k: sum((x for _ in range(k)), x),
        lambda x, k: [x, x + 1, x + 2][k],
    ],
)
def test_sizes_and_counts_are_baked_in(fn: Callable[..., Any]) -> None:
    assert static_of(fn, X, 2) == {1}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, k: x * k + k * k,
        lambda x, k: torch.full_like(x, k),
        lambda x, k: x.clamp(min=k),
        lambda x, k: torch.tensor(k) + x,
        lambda x, k: torch.where(x > k, x, 0.0),
        lambda x, k: x + (k * 3 - 1) / 2,
        lambda x, k: torch.add(x, x, alpha=k),
    ],
)
def test_values_stay_live(fn: Callable[..., Any]) -> None:
    for first, second in ((2.5, -4.0), (3, 7)):
        assert static_of(fn, X, first) == frozenset()
        program = pygraph.trace(fn)(X, first)
        torch.testing.assert_close(pygraph.evaluate(program, X, second), fn(X, second))


def test_math_of_a_number_bakes_it_in() -> None:
    assert static_of(lambda x, k: x * math.sqrt(k), X, 4.0) == {1}


def test_static_arguments_are_baked_in() -> None:
    fn = pygraph.trace(lambda x, k, *, s: x * k + s, static_argnums=(1,), static_argnames=("s",))
    program = fn(X, 2, s=3)
    assert [type(d) for d in program.inputs] == [Argument]


def test_static_leaves_counts_leaves() -> None:
    args, kwargs = ([1, 2], 3, (4, {"a": 5})), {"x": [6, 7], "y": 8}
    assert static_leaves(args, kwargs, (1,), ()) == {2}
    assert static_leaves(args, kwargs, (0, -1), ("x",)) == {0, 1, 3, 4, 5, 6}
    assert static_leaves((), {}, (0,), ("x",)) == frozenset()


# ---- what is refused -------------------------------------------------------------------------------------------


def _grow(state: list[torch.Tensor]) -> None:
    state.append(state[0])


def _set_grad(x: torch.Tensor) -> None:
    x.grad = torch.ones_like(x)


def _seed(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(3)


def _seed_for_a_while(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return x + torch.rand(2)


def _branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def _assign_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x + 1
    z.data = y * 2
    return z * 3


def _assign_data_quietly(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        x.data = y
    return x + 1


def _set_quietly(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        x.set_(y)
    return x + 1


def _fill_parameter(x: torch.Tensor) -> torch.Tensor:
    parameter = nn.Parameter(torch.empty(2), requires_grad=False)
    parameter.data = x * 2
    return parameter * 1


_TAIL = torch.arange(9.0)[3:]

REFUSED: list[tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]], str]] = [
    ("NumPy array", lambda x: torch.ones(2), lambda: (np.ones(2),), "is a NumPy array; expected a tensor"),
    ("container", _grow, lambda: ([torch.ones(2)],), r"it changes args\[0\], which it is passed"),
    ("shape", lambda x: x.unsqueeze_(0), lambda: (torch.ones(2),), r"it changes the shape or strides of args\[0\]"),
    ("resize", lambda x: x.t_(), lambda: (torch.ones(2, 3),), r"it changes the shape or strides of args\[0\]"),
    ("seed", _seed, lambda: (torch.ones(2),), "it seeds or draws from torch.s generator"),
    ("seed put back", _seed_for_a_while, lambda: (torch.ones(2),), "it seeds or draws from torch.s generator"),
    ("seed of random", lambda x: (random.seed(3), x + 1)[1], lambda: (torch.ones(2),), "seeds .* Python's random"),
    ("seed of NumPy", lambda x: (np.random.seed(3), x + 1)[1], lambda: (torch.ones(2),), "seeds .* NumPy's"),
    (".data", _assign_data, lambda: (torch.ones(2), torch.zeros(2)), r"it assigns \.data of a tensor"),
    (".data caught", _assign_data_quietly, lambda: (torch.ones(2), torch.zeros(2)), r"it assigns \.data of a tensor"),
    (".data of a result", _fill_parameter, lambda: (torch.ones(2),), r"it assigns \.data of a tensor"),
    ("set_", lambda x, y: x.set_(y), lambda: (torch.ones(2), torch.zeros(2)), "it gives a tensor other memory"),
    ("requires_grad_", lambda x: (x.requires_grad_(), x.detach() * 2)[1], lambda: (torch.ones(2),), "requires grad"),
    (
        "requires_grad off",
        lambda x: x.requires_grad_(False) * 2,
        lambda: (torch.ones(2, requires_grad=True),),
        "whether a tensor of the caller requires grad",
    ),
    ("requires_grad set", lambda x: setattr(x, "requires_grad", True), lambda: (torch.ones(2),), "requires grad"),
    ("detach_", lambda x: x.detach_() * 2, lambda: (torch.ones(2, requires_grad=True),), "requires grad"),
    ("attribute", lambda x: setattr(x, "tag", 5), lambda: (torch.ones(2),), "it changes an argument.tag"),
    (
        "new parameter",
        lambda x: nn.Parameter(x * 2, requires_grad=False),
        lambda: (torch.ones(2),),
        "result is a new torch.nn.Parameter",
    ),
    ("inference", lambda x: torch.inference_mode()(lambda: x * 2)(), lambda: (torch.ones(2),), "inference mode"),
    ("text", lambda x: (x * 2, str(x)), lambda: (torch.ones(2),), "the text of a tensor"),
    ("text of a list", lambda x: (x * 2, str([x])), lambda: (torch.ones(2),), "the text of a tensor"),
    ("format", lambda x: (x * 2, f"{x.sum():.2f}"), lambda: (torch.ones(2),), "the text of a tensor"),
    ("text of an item", lambda x: (x, f"{x.sum().item()}"), lambda: (torch.ones(2),), "text of a number that is comp"),
    ("text of a list of items", lambda x: (x, str(x.tolist())), lambda: (torch.ones(2),), "text of a number"),
    ("text of arithmetic", lambda x: (x, str(2 * x.sum().item())), lambda: (torch.ones(2),), "text of a number"),
    ("comparison", lambda x: (x * 2, x.sum().item() == x.mean().item()), lambda: (torch.ones(2),), "data-dependent"),
    (
        "offset",
        lambda x: x[1:] * x[1:].storage_offset(),
        lambda: (torch.ones(3),),
        r"storage_offset\(\) of an argument",
    ),
    ("base", lambda x: x if x._base is None else x + 1, lambda: (torch.ones(3),), "_base of an argument"),
    ("view", lambda x: x if x._is_view() else x + 1, lambda: (torch.ones(3),), r"_is_view\(\) of an argument"),
    ("overlap", lambda x: x[1:].add_(x[:-1]), lambda: (torch.ones(3),), "that it also reads"),
    ("overlap of out", lambda x: torch.mul(x[1:], 2, out=x[:-1]), lambda: (torch.ones(3),), "that it also reads"),
    (
        "as_strided",
        lambda x: x.as_strided((2,), (1,), 0) + 1,
        lambda: (torch.arange(9.0)[3:],),
        "with a storage_offset",
    ),
    (
        "as_strided of a closed-over tensor",
        lambda x: x + _TAIL.as_strided((3,), (1,), 0),
        lambda: (torch.ones(3),),
        "with a storage_offset",
    ),
    (
        "gradient of as_strided",
        lambda x: torch.func.grad(lambda x: x.as_strided((2,), (1,), 0).sum())(x),
        lambda: (torch.arange(9.0)[3:],),
        "with a storage_offset",
    ),
    (
        "view at a place on the device",
        lambda x, k: (torch.narrow(x, 0, k, 2), x + 1),
        lambda: (torch.ones(4), torch.tensor(1)),
        "is a view whose layout depends on data",
    ),
    (
        "views of one result at a place on the device",
        lambda x, k: (lambda y: (y, torch.narrow(y, 0, k, 2)))(x + 1),
        lambda: (torch.ones(4), torch.tensor(1)),
        "is a view whose layout depends on data",
    ),
    ("expanded", lambda x: x.expand(3, 4).add_(1), lambda: (torch.ones(4),), "whose elements share memory"),
    (
        "fill of an expanded",
        lambda x: torch.zeros(3).expand(2, 3).fill_(2) + x,
        lambda: (torch.ones(3),),
        "share memory",
    ),
    ("complex", lambda x: x.mul_(2j), lambda: (torch.ones(3),), "torch.complex64, which cannot be cast"),
    ("integers in masks", lambda x: (x > 1).mul_(2), lambda: (torch.ones(3),), "torch.int64, which cannot be cast"),
    ("set_ caught", _set_quietly, lambda: (torch.ones(2), torch.zeros(2)), "it gives a tensor other memory"),
    (
        "foreach twice",
        lambda x: torch._foreach_add_([x, x], 1.0),
        lambda: (torch.ones(3),),
        "at once that share memory",
    ),
    (
        "foreach with each other",
        lambda x, y: torch._foreach_add_([x, y], [y, x]),
        lambda: (torch.ones(3), torch.ones(3)),
        "one after the other that it also reads",
    ),
    (
        "foreach with one of them",
        lambda x, y: torch._foreach_mul_([x, y], x),
        lambda: (torch.tensor(2.0), torch.ones(3)),
        "one after the other that it also reads",
    ),
    ("divided by its own column", lambda x: x.div_(x[:, :1]), lambda: (torch.rand(3, 3),), "that it also reads"),
    ("out of its own product", lambda x: torch.mm(x, x, out=x), lambda: (torch.rand(3, 3),), "that it also reads"),
    (
        "out of another type",
        lambda x, y: torch.sort(x, out=(y, torch.empty(3, dtype=torch.int64))),
        lambda: (torch.rand(3), torch.ones(3, dtype=torch.float64)),
        "cannot be cast",
    ),
    ("powers of two", lambda x: x.ldexp_(x + 1), lambda: (torch.ones(3, dtype=torch.int64),), "cannot be cast"),
    ("logits of integers", lambda x: x.logit_(), lambda: (torch.ones(3, dtype=torch.int64),), "cannot be cast"),
    (
        "out beside running statistics",
        lambda x, mean, out: torch.ops.aten._native_batch_norm_legit.out(
            x, None, None, mean, mean + 1, True, 0.1, 1e-5, out=out, save_mean=out[0, 0], save_invstd=out[0, 1]
        ),
        lambda: (torch.rand(3, 3, 3), torch.zeros(3), torch.zeros(3, 3, 3)),
        "besides those given as out=",
    ),
    ("out to an empty part", lambda x: torch.arange(3, out=x[:0]), lambda: (torch.ones(3),), "it resizes"),
    ("foreach", lambda x: torch._foreach_mul_([x], 2j), lambda: (torch.ones(3),), "cannot be cast"),
    ("grad", _set_grad, lambda: (torch.ones(2),), r"it sets args\[0\]\.grad"),
    ("branch", _branch, lambda: (torch.ones(2),), "From test_trace.py:"),
    ("item in if", lambda x: x if x.item() > 0 else -x, lambda: (torch.ones(()),), "From test_trace.py:"),
    ("raises", lambda x: {}[3], lambda: (torch.ones(2),), "KeyError: 3"),
    ("requires grad", lambda x: x * 2, lambda: (torch.ones(2, requires_grad=True),), "result requires grad"),
    ("sparse", lambda x: x, lambda: (torch.eye(2).to_sparse(),), "is not a plain strided tensor"),
    ("conjugate", lambda x: x, lambda: (torch.ones(2, dtype=torch.complex64).conj(),), "not a plain strided tensor"),
]


@pytest.mark.parametrize(("fn", "make", "text"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], text: str) -> None:
    args = make()
    before = [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    random = torch.get_rng_state()
    with pytest.raises(TraceError, match=text) as caught:
        pygraph.trace(fn)(*args)
    assert re.match(r"trace\(.*\)\(…\): ", str(caught.value))
    leaves = torch.utils._pytree.tree_leaves(args)
    after = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert len(after) == len(before)
    for a, b in zip(after, before, strict=True):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert a.grad is None
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_what_an_operation_is_composed_of_may_write(shape: tuple[int, ...]) -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight, out=out)  # pyright: ignore

    args = torch.rand(shape), torch.rand(4, 8), torch.zeros(*shape[:-1], 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own linear resizes what it is given for a vector
        program = pygraph.trace(fn)(*args)
    assert not any(node.target._schema.is_mutable for node in program.nodes if hasattr(node.target, "_schema"))
    result = pygraph.evaluate(program, *args)
    assert result is args[2]
    torch.testing.assert_close(result, nn.functional.linear(args[0], args[1]))
    product = next(node for node in program.nodes if "mm" in str(node.target))
    assert product.meta["source"].startswith("test_trace.py")


def test_setting_an_attribute_of_a_module_is_refused_and_undone() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = x
            return x + 1

    model = Counter()
    with pytest.raises(TraceError, match=r"it changes .*; expected no lasting change"):
        pygraph.trace(model)(X)
    assert model.calls == 0
    assert model.last is None


def test_changing_a_closed_over_container_is_refused_and_undone() -> None:
    log: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        log.append(x)
        return x + 1

    with pytest.raises(TraceError, match="it changes log"):
        pygraph.trace(fn)(X)
    assert log == []


def test_a_nonlocal_variable_is_put_back() -> None:
    count = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x + 1

    with pytest.raises(TraceError, match="it changes count"):
        pygraph.trace(fn)(X)
    assert count == 0


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_out_that_would_be_resized_is_refused() -> None:
    """Eager writes where it lies, over what is beside it."""
    with pytest.raises(TraceError, match="it resizes what is given as out="):
        pygraph.trace(lambda x, y: torch.sum(x, 0, out=y[0]))(torch.ones(3), torch.ones(2, 2))


@pytest.mark.parametrize("assign", [lambda w, x: setattr(w, "data", x * 2), lambda w, x: w.requires_grad_(False),
                                    lambda w, x: setattr(w, "tag", x)])  # fmt: skip
def test_a_parameter_that_is_closed_over_stays_as_it_is(assign: Callable[..., Any]) -> None:
    weight = nn.Parameter(torch.ones(3))
    memory = weight.data_ptr()

    def fn(x: torch.Tensor) -> torch.Tensor:
        assign(weight, x)
        return x + weight.detach()

    with pytest.raises(TraceError):
        pygraph.trace(fn)(torch.ones(3))
    assert (type(weight), weight.requires_grad, weight.data_ptr(), vars(weight)) == (nn.Parameter, True, memory, {})


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "device": (lambda: torch.get_default_device(), lambda: torch.set_default_device("meta")),
    "grad mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "cudnn": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: torch._C._set_cudnn_benchmark(not torch.backends.cudnn.benchmark),
    ),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, lambda: torch.backends.cuda.enable_flash_sdp(False)),
    "precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("high")),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_global_setting_that_is_changed_is_put_back(
    setting: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    getter, change = SETTINGS[setting]
    monkeypatch.setattr(settings, "is_alone", lambda: True)  # the workers of pytest-xdist have threads

    def fn(x: torch.Tensor) -> torch.Tensor:
        change()
        return {}[3] if fails else x + 1

    before = getter()
    with pytest.raises(TraceError, match="KeyError" if fails else "it changes"):
        pygraph.trace(fn)(X)
    assert getter() == before


@pytest.mark.parametrize(
    "seed",
    [lambda n: torch.manual_seed(n), lambda n: random.seed(n), lambda n: np.random.seed(n)],
    ids=["torch", "random", "numpy"],
)
def test_a_seed_that_leads_to_where_the_generator_is_already_is_noticed(seed: Callable[[int], Any]) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        seed(0)
        with pytest.raises(TraceError, match="it seeds or draws from"):
            pygraph.trace(lambda x: (seed(0), x + torch.rand(3))[1])(X)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


# Dynamo keeps functions by identity, in tables that it fills once: here, while a trace watches some of them.
DYNAMO_IN_A_TRACE = """
import random
import numpy as np
import torch
import pygraph
from torch._dynamo import trace_rules
from torch._dynamo.variables import misc, torch as functions

watched = [torch.cuda.get_rng_state, torch.cuda.set_rng_state, np.random.seed, torch.overrides.has_torch_function]

def counted_loop(x):
    trace_rules.get_torch_obj_rule_map()
    trace_rules.is_numpy(x)
    misc.get_np_to_tnp_map()
    functions.TorchInGraphFunctionVariable._get_handlers()
    return torch._higher_order_ops.while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (x,))[0]

pygraph.trace(counted_loop)(torch.ones(3))
for function in watched[:2]:
    assert function in trace_rules.get_torch_obj_rule_map(), function
assert trace_rules.is_numpy(watched[2])
known = {id(value) for module in trace_rules.NP_SUPPORTED_MODULES for value in vars(module).values()}
assert trace_rules._numpy_function_ids() <= known
assert watched[2] in misc.get_np_to_tnp_map()
assert watched[3] in functions.TorchInGraphFunctionVariable._get_handlers()

layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
with torch.no_grad():
    torch.compile(layer, backend="eager", fullgraph=True)(torch.ones(1, 3, 8))
"""


def test_dynamo_knows_the_functions_that_a_trace_watches() -> None:
    subprocess.run([sys.executable, "-c", DYNAMO_IN_A_TRACE], check=True, timeout=300)


def test_every_generator_is_where_it_was_after_a_trace() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    pygraph.trace(lambda x: x + torch.rand(3))(X)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[2], strict=True))


NOT_REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy through .data": lambda x: x.data.copy_(x * 2),
    "grad of its own": lambda x: (x.detach() + 1).requires_grad_().detach(),
    "detach_ of its own": lambda x: (x + 1).detach_() * 2,
    "offset of its own": lambda x: x * (x + 1)[1:].storage_offset(),
    "what a fake remembers": lambda x: (x.sum(), x * x.sum().item(), x[0, 1].item(), (x > 1).nonzero().sum())[1],
    "item of an argument": lambda x: x.view(-1)[1:2] * x.view(-1)[:1].item(),
    "attribute of its own": lambda x: (setattr(y := x + 1, "tag", 5), y * 2)[1],
    "in place on itself": lambda x: torch.mul(x, x, out=x),
    "foreach on itself": lambda x: (torch._foreach_mul_([x], [x]), x)[1],
    "copied onto itself": lambda x: x.copy_(x),
    "out of nothing": lambda x: torch.sum(x, 0, out=torch.empty(0)),
    "interleaved": lambda x: x.view(-1)[::2].add_(x.view(-1)[1::2]),
    "beside each other": lambda x: x[0].add_(x[1]),
    "floats in complex": lambda x: x.to(torch.complex64).mul_(2.5).real,
    "comparison in floats": lambda x: x.clone().ge_(2),
    "casting copy": lambda x: torch.zeros(2, 3, dtype=torch.int64).copy_(x),
    "default dtype for a while": lambda x: x + _in_double(),
}


def _in_double() -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(3)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", NOT_REFUSED)
def test_what_is_allowed_stays_traced(name: str) -> None:
    fn = NOT_REFUSED[name]
    mine, eager = X.clone(), X.clone()
    assert torch.equal(pygraph.evaluate(pygraph.trace(fn)(mine), mine), fn(eager))
    assert torch.equal(mine, eager)


@pytest.mark.parametrize(
    "number", [2.5, 3, np.float64(0.1), np.float32(0.1), np.float16(2), np.uint8(200), np.int16(3)]
)
@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.scalar_tensor])
def test_a_tensor_of_a_number_has_the_dtype_of_eager(make: Callable[[Any], torch.Tensor], number: Any) -> None:
    def fn(x: torch.Tensor, k: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return make(k), x * (make(k) * 2)

    traced = trace_call(fn, (X, number), {})
    assert traced.static_leaves == frozenset()
    for got, expected in zip(pygraph.evaluate(traced.program, X, number), fn(X, number), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_the_text_of_what_is_computed_from_a_number_bakes_it_in() -> None:
    fn = lambda x, k, j: (x * j, f"{2 * k}")  # noqa: E731
    traced = trace_call(fn, (X, 1.5, 2.5), {})
    assert traced.static_leaves == {1}
    assert pygraph.evaluate(traced.program, X, 1.5, 3.5)[1] == "3.0"


def test_a_number_that_is_read_from_a_tensor_has_its_type() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x.sum().item(), float)
        assert isinstance(x.long().sum().item(), int)
        assert isinstance(x.view(-1).tolist()[0], float)
        return x * 2

    pygraph.trace(fn)(X)


def test_a_tensor_cannot_be_static() -> None:
    with pytest.raises(TraceError, match=r"args\[0\] is a tensor marked static.* Unmark it"):
        pygraph.trace(lambda x: x, static_argnums=(0,))(X)


def test_the_cause_is_kept() -> None:
    with pytest.raises(TraceError) as caught:
        pygraph.trace(lambda x: {}[3])(X)
    assert isinstance(caught.value.__cause__, KeyError)


# ---- nothing real is touched -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,)])
@pytest.mark.parametrize(
    "update",
    [
        lambda t, x: t.add_(1),
        lambda t, x: t.mul_(2.0),
        lambda t, x: t.copy_(torch.full_like(t, 9)),
        lambda t, x: t.fill_(4),
        lambda t, x: t.zero_(),
        lambda t, x: t.add_(x.sum()),
        lambda t, x: t.__iadd__(1),
        lambda t, x: torch.add(t, 1, out=t),
        lambda t, x: torch._foreach_add_([t], 1),
        lambda t, x: t.data.add_(1),
        lambda t, x: t.uniform_(),
    ],
)
def test_real_tensors_never_change(shape: tuple[int, ...], update: Callable[..., Any]) -> None:
    closed = torch.full(shape, 5.0)
    module = nn.Module()
    module.register_buffer("buffer", torch.full(shape, 5.0))
    argument = torch.full(shape, 5.0)

    def fn(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        update(closed, x)
        update(module.buffer, x)
        update(t, x)
        return t + closed

    random = torch.get_rng_state()
    pygraph.trace(fn)(argument, X)
    for tensor in (closed, module.buffer, argument):
        assert torch.equal(tensor, torch.full(shape, 5.0))
    assert torch.equal(torch.get_rng_state(), random)


def test_random_operations_are_nodes_and_draw_at_every_evaluation() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand(5)  # unused, but the generator moves
        return nn.functional.dropout(x, 0.5) + torch.randn(3)

    random = torch.get_rng_state()
    program = pygraph.trace(fn)(X)
    assert torch.equal(torch.get_rng_state(), random)
    assert sum(is_random(node) for node in program.nodes) == 3
    for _ in range(2):
        state = torch.get_rng_state()
        got = pygraph.evaluate(program, X)
        torch.set_rng_state(state)
        assert torch.equal(got, fn(X))


# ---- transforms inside -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # in torch's own jvp
@pytest.mark.parametrize(
    "fn",
    [
        torch.func.vmap(lambda row: row @ row),
        torch.func.grad(lambda x: (x**3).sum()),
        lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),)),
        lambda x: torch.func.jacrev(lambda row: row**2)(x[0]),
        lambda x: torch.func.vmap(torch.func.grad(lambda row: (row**2).sum()))(x),
    ],
)
def test_torch_func_inside(fn: Callable[..., Any]) -> None:
    program = pygraph.trace(fn)(X)
    torch.testing.assert_close(pygraph.evaluate(program, X + 1), fn(X + 1))


def test_autograd_inside() -> None:
    weight = nn.Parameter(torch.ones(3))

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss = ((x * weight) ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        return gradient

    program = pygraph.trace(fn)(X)
    torch.testing.assert_close(pygraph.evaluate(program, X), fn(X))
    assert weight.grad is None


def test_an_optimizer_step_inside() -> None:
    def make() -> tuple[nn.Linear, torch.optim.Optimizer, Callable[[torch.Tensor], torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.1)
            return loss.detach()

        return model, optimizer, step

    model, _, step = make()
    other, _, eager = make()
    program = pygraph.trace(step)(X)
    for _ in range(3):
        torch.testing.assert_close(pygraph.evaluate(program, X), eager(X))
    torch.testing.assert_close(model.weight, other.weight)


def test_the_traced_function_keeps_its_name_and_doc() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        """Add one."""
        return x + 1

    traced = pygraph.trace(step)
    assert traced.__name__ == "step"
    assert traced.__doc__ == "Add one."
    assert traced(X).name == "step"


@pytest.mark.parametrize(
    ("make", "fn", "reason"),
    [
        (lambda d: torch.ones(1, device=d).expand(3), lambda x: x[0].add_(1), "whose elements share memory"),
        (lambda d: torch.ones(5, 8, device=d)[:, :4], lambda x: x.normal_(), "into memory with gaps"),
    ],
)
def test_writes_that_functionalization_gets_wrong_are_refused(
    device: torch.device, make: Any, fn: Any, reason: str
) -> None:
    with pytest.raises(TraceError, match=reason):
        pygraph.trace(fn)(make(device))
    torch.manual_seed(0)
    got = make(device)
    pygraph.jit(fn)(got)
    torch.manual_seed(0)
    want = make(device)
    fn(want)
    assert torch.equal(got, want)


def test_a_generator_of_its_own_is_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(TraceError, match="a generator of its own"):
        pygraph.trace(lambda x: x + torch.rand(3, generator=generator))(torch.ones(3))


def test_subtracting_a_mask_raises_as_in_eager(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="with a bool tensor is not supported"):
        pygraph.jit(lambda x, flag: x - flag)(x, True)


def test_the_address_of_a_fake_is_an_error_and_not_garbage(device: torch.device) -> None:
    """A kernel launched with a fake's address would read and write anywhere."""
    with pytest.raises(TraceError, match=r"data pointer.*test_trace"):
        pygraph.trace(lambda x: x + x.data_ptr())(torch.ones(3, device=device))


@pytest.mark.parametrize("update", [False, True])
def test_a_literal_that_is_returned_is_new_in_every_call(update: bool, device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        literal = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return literal.mul_(x) if update else literal

    x = torch.full((3,), 2.0, device=device)
    program, fast = pygraph.trace(fn)(x), pygraph.jit(fn)
    for run in (lambda: pygraph.evaluate(program, x), lambda: fast(x)):
        first = run()
        assert torch.equal(first, fn(x))
        first.add_(5)
        assert torch.equal(run(), fn(x))


def test_what_functorch_would_decompose_stays_one_operation(device: torch.device) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(x.mul_(2), y, reduction="none")

    x, y = torch.linspace(-5, 5, 21, device=device).half(), torch.linspace(0, 1, 21, device=device).half()
    program = pygraph.trace(fn)(x.clone(), y)
    assert "aten.binary_cross_entropy_with_logits.default(" in str(program)
    assert torch.equal(pygraph.jit(fn)(x.clone(), y), fn(x.clone(), y)), "to the last bit"


def test_functorch_decomposes_nothing_else_that_is_not_composite() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if has(name, "FuncTorchDynamicLayerFrontMode") and not has(name, "CompositeImplicitAutograd")
    }
    assert found == {"aten::binary_cross_entropy_with_logits"}


def test_the_first_trace_of_a_process_is_like_all_others(device: torch.device) -> None:
    """Torch's cache of fake results must not show."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fn(x: torch.Tensor) -> torch.Tensor:
        x[5] = 1.0
        return x

    FakeTensorMode.cache_clear()
    texts = {str(pygraph.indirect(pygraph.devicify(pygraph.trace(fn)(torch.zeros(17, device=device))))) for _ in "abc"}
    assert len(texts) == 1


def test_an_expanded_argument_that_is_passed_twice_is_not_written() -> None:
    x = torch.ones(1).expand(3)
    with pytest.raises(TraceError, match="whose elements share memory"):
        pygraph.trace(lambda x, y: x[0].add_(y[0]))(x, x)


def test_generators_stay_as_they_are_while_a_function_is_traced() -> None:
    """Other threads draw from them meanwhile."""
    states: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def look() -> None:
        states.put((torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()))

    def fn(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return x + torch.rand(3)

    look()
    pygraph.trace(fn)(torch.ones(3))
    before, meanwhile = states.get(), states.get()
    assert torch.equal(before[0], meanwhile[0])
    assert before[1:] == meanwhile[1:]
    assert isinstance(torch.random.default_generator, torch.Generator)


def test_tensors_that_are_no_strided_memory_are_refused() -> None:
    with pytest.raises(TraceError, match=r"layout torch\.sparse_coo"):
        pygraph.trace(lambda x: x.to_sparse().to_dense() * 2)(torch.eye(2))


def test_closed_over_tensors_that_are_used_again(device: torch.device) -> None:
    """All uses of one are of the same alias; updates between them, other modes and other shapes must not show in it."""
    buffer, weight = torch.ones(2, 3, device=device), torch.arange(6.0, device=device).view(2, 3)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = weight * x + buffer
        buffer.add_(x)
        with torch.inference_mode():
            inside = (weight + buffer).clone()
        turned = weight.detach()
        turned.t_()
        flat = weight.view(-1)
        flat.unsqueeze_(0)
        buffer.mul_(weight)
        return first, inside * 1, turned @ (weight + buffer), flat, weight - buffer, weight.sum(0)

    x = torch.full((2, 3), 2.0, device=device)
    expected, kept = [], buffer.clone()
    for _ in range(3):
        expected.append(([y.clone() for y in fn(x)], buffer.clone()))
    buffer.copy_(kept)
    jitted = pygraph.jit(fn)
    for results, updated in expected:
        for found, y in zip(jitted(x), results, strict=True):
            torch.testing.assert_close(found, y)
            assert found.stride() == y.stride()
        torch.testing.assert_close(buffer, updated)
    assert jitted.cache_info().captures == 1
