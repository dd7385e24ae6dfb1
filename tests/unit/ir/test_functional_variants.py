"""Operations of somebody else that write to their arguments: traced as twins, lowered to writes, run in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import TraceError
from pygraph.ir.effects import is_written
from pygraph.ir.functional_variants import functional_variant_of, mutating_operation_of, needs_functional_variant
from pygraph.lowering.aten import lower

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@torch.library.custom_op("test_twins::scale", mutates_args={"out"})
def scale(x: Tensor, out: Tensor, k: float) -> None:
    out.copy_(x * k)


@torch.library.custom_op("test_twins::accumulate", mutates_args={"total", "parts"})
def accumulate(x: Tensor, total: Tensor, parts: list[Tensor]) -> Tensor:
    total.add_(x)
    for number, part in enumerate(parts):
        part.mul_(number + 2)
    return x * 2


@torch.library.custom_op("test_twins::scale_memory", mutates_args={"out"})
def scale_memory(x: Tensor, out: Tensor) -> None:
    """Element by element in memory, whatever the strides are: as a Triton kernel sees its pointers."""
    out.as_strided((out.numel(),), (1,)).copy_(x.as_strided((x.numel(),), (1,)) * 0.25)


_LIBRARY = torch.library.Library("test_twins_optional", "DEF")
_LIBRARY.define("clear(Tensor x, Tensor(a!)?[] xs) -> ()")
_LIBRARY.define("shift(Tensor x, Tensor(a!)? out=None, *, Tensor(b!)? more=None) -> Tensor")
_LIBRARY.define("halve(Tensor(a!)[]? xs, Tensor(b!)?[] ys, int k) -> (Tensor, Tensor)")


def _clear(x: Tensor, xs: list[Tensor | None]) -> None:
    for number, value in enumerate(xs):
        if value is not None:
            value.mul_(number).add_(x)


def _shift(x: Tensor, out: Tensor | None = None, *, more: Tensor | None = None) -> Tensor:
    for number, value in enumerate((out, more)):
        if value is not None:
            value.add_(x + number)
    return x * 5


def _halve(xs: list[Tensor] | None, ys: list[Tensor | None], k: int) -> tuple[Tensor, Tensor]:
    found = [*(xs or []), *(y for y in ys if y is not None)]
    total = sum(value.sum() for value in found)
    for value in found:
        value.mul_(0.5)
    return total * k, total + k  # pyright: ignore


for _name, _function in (("clear", _clear), ("shift", _shift), ("halve", _halve)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"test_twins_optional::{_name}", _function, lib=_LIBRARY)
optional: Any = torch.ops.test_twins_optional


@accumulate.register_fake
def _(x: Tensor, total: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.empty_like(x)


def into_new_memory(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    scale(x, out, 3.0)
    return out


def into_an_argument(x: Tensor, y: Tensor) -> Tensor:
    scale(x, y, 3.0)
    return y + 1


def old_contents_read_later(x: Tensor, y: Tensor) -> Tensor:
    half = y * 0.5
    scale(x, half, 3.0)
    before = y.clone()
    scale(half, y, 2.0)
    return before + y


def into_a_view(x: Tensor, y: Tensor) -> Tensor:
    scale(x[0], y[1], 3.0)
    scale(y[1], y[0], 0.5)
    return y.t()


def into_memory_with_gaps(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.zeros(2, 8, device=x.device)
    part = wide[:, 2:5]
    scale(x, part, 3.0)
    return wide, part


def several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.ones_like(x), x + 1
    twice = accumulate(x, y, [a, b])
    again = accumulate(twice, a, [y])
    return a, b, again


def copied_afterwards(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b = torch.empty_like(x), torch.empty_like(x)
    scale(x, a, 3.0)
    b.copy_(a)
    a.add_(1)
    return a, b


def unused(x: Tensor, y: Tensor) -> Tensor:
    scale(x, torch.empty_like(x), 3.0)
    return x + y


def written_twice(x: Tensor, y: Tensor) -> Tensor:
    scale(x, y, 3.0)
    first = y.clone()
    accumulate(x, y, [])
    return first


def overwritten_after_it_was_copied(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.ones_like(x), torch.zeros_like(x)
    b.copy_(a)
    scale(x, a, 3.0)
    return b + a * 10


def a_copy_is_overwritten(x: Tensor, y: Tensor) -> Tensor:
    y.copy_(x)
    scale(x, y, 0.5)
    return y + 0


def a_part_of_a_copy_is_overwritten(x: Tensor, y: Tensor) -> Any:
    y.copy_(x)
    scale(x[0], y[1], 0.5)
    optional.clear(x, [y, None])
    return y * 2


def a_constant_is_made_anew(x: Tensor, y: Tensor) -> Tensor:
    made = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=x.device)
    accumulate(x, made, [])
    return made * 2


def strides_are_those_of_eager(x: Tensor, y: Tensor) -> Tensor:
    turned, out = torch.empty(3, 2, device=x.device).t(), torch.empty_like(x)
    torch.add(x, y, out=turned)  # functionally a sum with strides of its own
    scale_memory(turned, out)
    return out


def some_of_several(x: Tensor, y: Tensor) -> Any:
    a, b = torch.ones_like(x), x + 1
    optional.clear(x, [None, a, None, y, b])
    optional.clear(x, [None, None])
    optional.clear(x, [])
    optional.clear(x[0], [y[1], None, a[0]])
    return a, b, y.sum()


def old_contents_of_some(x: Tensor, y: Tensor) -> Any:
    before, a = y.clone(), x * 2
    later = a + 1
    optional.clear(x, (y, None, a))
    return before, later, a


def given_or_not(x: Tensor, y: Tensor) -> Any:
    a = x + 1
    return optional.shift(x), optional.shift(x, None), optional.shift(x, a), optional.shift(x, more=y), a.clone()


def both_given(x: Tensor, y: Tensor) -> Any:
    made = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=x.device)
    return optional.shift(x, made, more=y), made, optional.shift(y, more=None, out=made)


def a_list_or_none(x: Tensor, y: Tensor) -> Any:
    a, b = x + 1, x + 2
    return optional.halve(None, [a, None], 2), optional.halve([b, y], [None, a], 3), optional.halve([], [b], 1), a, b


FUNCTIONS = [
    a_copy_is_overwritten, a_part_of_a_copy_is_overwritten,
    some_of_several, old_contents_of_some, given_or_not, both_given, a_list_or_none,
    overwritten_after_it_was_copied, a_constant_is_made_anew, strides_are_those_of_eager,
    into_new_memory, into_an_argument, old_contents_read_later, into_a_view, into_memory_with_gaps, several,
    copied_afterwards, unused, written_twice,
]  # fmt: skip


def arguments(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(6.0, device=device).view(2, 3), torch.full((2, 3), 0.25, device=device)


def assert_like_eager(fn: Callable[..., Any], run: Callable[..., Any], device: torch.device) -> None:
    ours, theirs = arguments(device), arguments(device)
    torch.testing.assert_close(run(*ours), fn(*theirs))
    torch.testing.assert_close(ours, theirs)
    ours = arguments(device)
    torch.testing.assert_close(run(*ours), fn(*arguments(device)))


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_every_stage_is_like_eager(fn: Callable[..., Any], device: torch.device) -> None:
    program = pygraph.trace(fn)(*arguments(device))
    text = str(program)
    assert not any(is_written(node) for node in program.nodes)
    assert_like_eager(fn, lambda *args: pygraph.evaluate(program, *args), device)
    lowered = pygraph.check_program(lower(program))
    assert str(program) == text
    assert not any(mutating_operation_of(node.target) for node in lowered.nodes)
    assert_like_eager(fn, lambda *args: pygraph.evaluate(lowered, *args), device)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_graph_of_it_is_like_eager(fn: Callable[..., Any], device: torch.device) -> None:
    fast = pygraph.jit(fn, strict=True)
    kept: list[tuple[Any, Any]] = []
    for _ in range(3):
        assert_like_eager(fn, fast, device)
        result = fast(*arguments(device))
        kept.append((result, torch.utils._pytree.tree_map(torch.clone, result)))
    for result, then in kept:  # nothing that was returned is written by a later call
        torch.testing.assert_close(result, then)


def copies(fn: Callable[..., Any]) -> int:
    program = lower(pygraph.trace(fn)(*arguments(torch.device("cpu"))))
    return sum(node.target in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default) for node in program.nodes)


def test_nothing_is_copied_where_nobody_reads_the_old_contents() -> None:
    assert copies(into_new_memory) == 0
    assert copies(into_an_argument) == 0
    assert copies(unused) == 0
    assert copies(old_contents_read_later) == 1  # the clone that the function itself makes


def test_overlapping_arguments_are_refused() -> None:
    x = torch.ones(4)
    for fn in (lambda x: scale(x[:3], x[1:], 2.0), lambda x: scale(x, x, 2.0)):
        with pytest.raises(TraceError, match=r"shares memory with another.*test_functional_variants"):
            pygraph.trace(fn)(x)
    with pytest.raises(TraceError, match="elements share memory"):
        pygraph.trace(lambda x: scale(x, torch.zeros(1).expand(4), 2.0))(x)
    pygraph.trace(lambda x: scale(x[:2], x[2:], 2.0))(x)
    for fn in (lambda x: optional.clear(x[:3], [None, x[1:]]), lambda x: optional.shift(x, more=x)):
        with pytest.raises(TraceError, match=r"shares memory with another.*test_functional_variants"):
            pygraph.trace(fn)(x)


def test_what_cannot_have_a_twin_is_refused() -> None:
    with torch.library._scoped_library("test_twins_more", "DEF") as library:
        library.define("returns(Tensor(a!) x) -> Tensor(a!)")
        with pytest.raises(TraceError, match="returns its memory"):
            functional_variant_of(torch.ops.test_twins_more.returns.default)


def test_functionalization_knows_atens_own() -> None:
    assert needs_functional_variant(torch.ops.test_twins.scale.default)
    assert not needs_functional_variant(torch.ops.aten.add_.Tensor)
    assert not needs_functional_variant(torch.ops.aten.index_put_.default)
    assert not needs_functional_variant(torch.ops.aten._foreach_add_.List)
    assert not needs_functional_variant(torch.ops.aten.mm.out)


# ---- arbitrary sequences of writes, reads and views ------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["scale", "scale", "accumulate", "add", "copy", "row", "rows", "column", "turned", "constant"]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


def play(steps: list[tuple[str, int, int]], returned: list[int], keep: bool, x: Tensor, y: Tensor) -> list[Tensor]:
    tensors = [x, y, torch.ones_like(x), (x * 2).t().contiguous().t()]
    for step, i, j in steps:
        a, b = tensors[i], tensors[j]
        if a is b:
            tensors[i] = a + 1
        elif step == "scale":
            scale(a, b, 0.5)
        elif step == "accumulate":
            tensors[i] = accumulate(a, b, [])
        elif step == "add":
            b.add_(a)
        elif step == "copy":
            b.copy_(a)
        elif step == "row":
            scale(a[0], b[1], 2.0)
        elif step == "rows":
            scale(b[0], b[1], 0.5)
        elif step == "column":
            b[:, 1].mul_(a[:, 0])
        elif step == "turned":
            scale_memory(a, b)
        else:
            made = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
            scale(a, made, 2.0)
            tensors[j] = made + 0
    return [tensors[i] if keep else tensors[i] + 0 for i in returned]


@hypothesis.given(steps=STEPS, returned=st.lists(st.integers(0, 3), unique=True), keep=st.booleans())
def test_any_sequence_of_writes_is_like_eager(
    steps: list[tuple[str, int, int]], returned: list[int], keep: bool
) -> None:
    cpu = torch.device("cpu")

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return play(steps, returned, keep, x, y)

    program = pygraph.trace(fn)(*arguments(cpu))
    assert_like_eager(fn, lambda *args: pygraph.evaluate(program, *args), cpu)
    lowered = pygraph.check_program(lower(program))
    assert_like_eager(fn, lambda *args: pygraph.evaluate(lowered, *args), cpu)
    assert_like_eager(fn, lambda *args: pygraph.evaluate(lowered, *args), cpu)
