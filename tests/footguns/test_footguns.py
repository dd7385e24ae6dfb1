"""Known surprises, each as a passing test with one line that explains it."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pygraph
from pygraph.errors import DonatedError, FallbackError

SCALE = 2.0


def ones(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + int(np.prod(shape)), device=device).view(shape)


def reasons(fn: Any) -> list[str]:
    """Why calls of a transformed function did not run in the best way."""
    return [fallback["reason"] for fallback in fn.explain().to_dict()["fallbacks"]]


def in_graphs(fn: Any) -> bool:
    """Whether every kernel of the latest kind of call is in a graph."""
    report = fn.explain().to_dict()
    return report["kernels_in_graphs"] == report["kernels"] > 0


def agree(
    fast: Callable[..., Any], fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], calls: int = 3
) -> None:
    """The same results as eager, and the same arguments afterwards."""
    for _ in range(calls):
        mine, theirs = make(), make()
        torch.testing.assert_close(fast(*mine), fn(*theirs), rtol=0, atol=0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


# ---- Python side effects ---------------------------------------------------------------------------------------


def test_append_to_a_closed_over_list_happens_at_every_call(device: torch.device) -> None:
    """A replay runs no Python, but what it would have appended is returned, and appended then."""
    log: list[int] = []

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        log.append(1)
        return x + 1

    for _ in range(3):
        assert fn(ones(device, 2)).tolist() == [2, 3]
    assert len(log) == 3
    assert fn.cache_info().hits >= 1


def test_append_a_tensor_never_leaks_a_traced_one(device: torch.device) -> None:
    """What tracing left in the list is taken out again; the ordinary call puts a real tensor there."""
    kept: list[torch.Tensor] = []

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x

    fn(ones(device, 2))
    assert [type(tensor) for tensor in kept] == [torch.Tensor]
    assert kept[0].tolist() == [2, 4]


def test_print_happens_once_per_trace(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """As in JAX: print runs while tracing, not in a replay. It changes nothing that a caller could read."""
    fn = pygraph.jit(lambda x: (print("traced"), x + 1)[1])
    for _ in range(3):
        fn(ones(device, 2))
    assert set(capsys.readouterr().out.split()) == {"traced"}


def test_an_attribute_set_in_forward_is_set_at_every_call(device: torch.device) -> None:
    """A replay sets no attribute: the number is passed to the graph, and the next one is stored."""

    class Counts(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return x * self.calls

    module = Counts()
    fast = pygraph.jit(module)
    assert [fast(ones(device, 1)).item() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert module.calls == 5
    assert not reasons(fast)


def test_a_buffer_assigned_in_forward_is_assigned_at_every_call(device: torch.device) -> None:
    """``self.b = self.b + 1`` puts a new tensor in the module, which a replay cannot: it is stored after it."""

    class Assigns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b = self.b + 1
            return x + self.b

    module = Assigns().to(device)
    fast = pygraph.jit(module)
    assert [fast(torch.zeros(2, device=device))[0].item() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert type(module.b) is torch.Tensor
    assert module.b.tolist() == [5, 5]
    assert not reasons(fast)


def test_a_buffer_updated_in_place_is_updated_by_the_graph(device: torch.device) -> None:
    """In-place updates of buffers are part of the graph."""

    class Updates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b += 1
            return x + self.b

    module = Updates().to(device)
    fast = pygraph.jit(module)
    assert [fast(torch.zeros(2, device=device))[0].item() for _ in range(3)] == [1, 2, 3]
    assert in_graphs(fast)


def test_a_container_argument_that_is_changed_is_changed(device: torch.device) -> None:
    """A function that writes into a dict argument is a graph, and each call stores what it computes."""
    fn = pygraph.jit(lambda d: d.update(y=d["x"] + 1))
    for _ in range(3):
        data = {"x": ones(device, 2)}
        fn(data)
        assert data["y"].tolist() == [2, 3]
        assert type(data["y"]) is torch.Tensor
    assert not reasons(fn)


# ---- what a function closes over -------------------------------------------------------------------------------


def test_a_global_number_is_seen_when_it_changes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Globals are part of what a trace depends on; a change traces anew."""
    fn = pygraph.jit(lambda x: x * SCALE)
    assert fn(ones(device, 2)).tolist() == [2, 4]
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert fn(ones(device, 2)).tolist() == [5, 10]


def test_a_closed_over_number_is_seen_when_it_changes(device: torch.device) -> None:
    """The same for variables of an enclosing function."""
    k = 2
    fn = pygraph.jit(lambda x: x * k)
    assert fn(ones(device, 2)).tolist() == [2, 4]
    k = 3
    assert fn(ones(device, 2)).tolist() == [3, 6]


def test_a_closed_over_numpy_number_is_seen_when_it_changes(device: torch.device) -> None:
    """NumPy scalars are values, too."""
    k = np.float32(2)
    fn = pygraph.jit(lambda x: x * k)
    assert fn(ones(device, 2)).tolist() == [2, 4]
    k = np.float32(0.5)
    assert fn(ones(device, 2)).tolist() == [0.5, 1]


def test_a_closed_over_tensor_is_read_live(device: torch.device) -> None:
    """Its contents may change in place, and the variable may be bound to another tensor."""
    w = torch.ones(2, device=device)
    fn = pygraph.jit(lambda x: x * w)
    assert fn(ones(device, 2)).tolist() == [1, 2]
    w.fill_(3)
    assert fn(ones(device, 2)).tolist() == [3, 6]
    w = torch.zeros(2, device=device)
    assert fn(ones(device, 2)).tolist() == [0, 0]


def test_a_closed_over_tensor_that_is_returned_is_that_tensor(device: torch.device) -> None:
    """Not a copy: writing to the result writes to the tensor, as in eager."""
    w = torch.ones(2, device=device)
    fn = pygraph.jit(lambda x: (x + 1, w, w[1:]))
    for _ in range(2):
        _, same, view = fn(ones(device, 2))
        assert same.data_ptr() == w.data_ptr()
        assert view.data_ptr() == w[1:].data_ptr()


def test_a_mutable_default_argument_is_read_live(device: torch.device) -> None:
    """Defaults live with the function and may change between calls."""

    def fn(x: torch.Tensor, scale: list[float] = [2.0]) -> torch.Tensor:  # noqa: B006
        return x * scale[0]

    fast = pygraph.jit(fn)
    assert fast(ones(device, 2)).tolist() == [2, 4]
    assert fn.__defaults__ is not None
    fn.__defaults__[0][0] = 7.0
    assert fast(ones(device, 2)).tolist() == [7, 14]


# ---- results ---------------------------------------------------------------------------------------------------


def test_a_result_may_be_the_next_argument(device: torch.device) -> None:
    """``f(f(x))``: a CUDA graph alone would read and write the same buffer."""
    fn = pygraph.jit(lambda x: x * 2 + 1)
    assert fn(fn(fn(ones(device, 2)))).tolist() == [15, 23]


def test_held_results_do_not_change(device: torch.device) -> None:
    """A CUDA graph alone returns the same memory every time."""
    fn = pygraph.jit(lambda x, k: x * k)
    held = [fn(ones(device, 2), float(k)) for k in range(5)]
    assert [result.tolist() for result in held] == [[k, 2 * k] for k in range(5)]


def test_a_held_result_outlives_the_function(device: torch.device) -> None:
    """Results are ordinary memory, not the pool's."""
    fn = pygraph.jit(lambda x: x + 1)
    result = fn(ones(device, 2))
    fn.cache_clear()
    del fn
    gc.collect()
    torch.full((64,), 9.0, device=device)
    assert result.tolist() == [2, 3]


def test_an_input_may_be_freed_after_the_call(device: torch.device) -> None:
    """No replay reads what an earlier call was given."""
    fn = pygraph.jit(lambda x: x + 1)
    for _ in range(3):
        x = ones(device, 64)
        first = fn(x)
        del x
        garbage = [torch.full((64,), float("nan"), device=device) for _ in range(3)]
        assert first[0].item() == 2
        del garbage


def test_an_argument_returned_as_it_is_is_the_same_object(device: torch.device) -> None:
    """Identity of arguments survives, also for empty tensors."""
    fn = pygraph.jit(lambda x, y: (y + 1, x))
    for x in (ones(device, 2), torch.empty(0, device=device)):
        assert fn(x, ones(device, 1))[1] is x


def test_a_view_of_an_argument_is_a_view(device: torch.device) -> None:
    """Writing to the result writes to the argument, as in eager."""
    fn = pygraph.jit(lambda x: (x[1:], x + 1))
    for _ in range(2):
        x = ones(device, 3)
        fn(x)[0].zero_()
        assert x.tolist() == [1, 0, 0]


def test_dict_results_and_none(device: torch.device) -> None:
    """Any pytree goes in and comes out; what is no tensor stays what it is."""
    fn = pygraph.jit(lambda x, y: {"sum": x if y is None else x + y, "none": None, "text": "a", "number": 3})
    assert fn(ones(device, 2), None)["sum"].tolist() == [1, 2]
    result = fn(ones(device, 2), ones(device, 2))
    assert result["sum"].tolist() == [2, 4]
    assert (result["none"], result["text"], result["number"]) == (None, "a", 3)


# ---- arguments -------------------------------------------------------------------------------------------------


def test_the_same_tensor_twice(device: torch.device) -> None:
    """Whether two arguments share memory is part of the key."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    fast = pygraph.jit(fn)
    agree(fast, fn, lambda: (ones(device, 3), ones(device, 3)))
    agree(fast, fn, lambda: (x := ones(device, 3), x))
    agree(fast, fn, lambda: (ones(device, 3), ones(device, 3)))


@pytest.mark.parametrize("offset", [0, 1])
def test_overlapping_views_of_which_one_is_written(device: torch.device, offset: int) -> None:
    """What is written through one argument is seen through the other, wherever they lie in their storage."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        base = ones(device, 7)[offset:]
        return base[:4], base[2:5]

    agree(pygraph.jit(fn), fn, make)


def test_an_argument_updated_through_a_view(device: torch.device) -> None:
    """The caller's tensor changes."""

    def fn(x: torch.Tensor) -> None:
        x.t()[0].zero_()

    agree(pygraph.jit(fn), fn, lambda: (ones(device, 2, 2),))


def test_numbers_are_read_at_every_call(device: torch.device) -> None:
    """Python and NumPy numbers and 0-d CPU tensors are live: one trace, no matter their value."""
    fn = pygraph.jit(lambda x, k: x * k)
    for k in (2.0, -0.5, 1e3):
        assert fn(ones(device, 2), k).tolist() == [k, 2 * k]
    assert fn.cache_info().misses == 1
    for k in (np.float32(2), np.float32(0.25)):
        assert fn(ones(device, 2), k).tolist() == [float(k), 2 * float(k)]
    assert fn.cache_info().misses == 2
    for k in (torch.tensor(3.0), torch.tensor(4.0)):
        assert fn(ones(device, 2), k).tolist() == [k.item(), 2 * k.item()]
    assert fn.cache_info().misses == 3
    assert in_graphs(fn)


def test_a_number_that_an_if_looks_at_is_baked_in(device: torch.device) -> None:
    """Its value is part of the key from then on; other calls trace anew."""
    fn = pygraph.jit(lambda x, k: x * k if k > 0 else x - k)
    assert [fn(ones(device, 1), k).item() for k in (2.0, -2.0, 3.0, 2.0)] == [2, 3, 3, 2]


def test_true_and_one_are_different_arguments(device: torch.device) -> None:
    """``1 == True == 1.0`` in Python, but not to torch."""
    fn = pygraph.jit(lambda x, k: x + k)
    x = torch.ones(2, dtype=torch.int32, device=device)
    for k in (1, True, 1.0, 1):
        assert fn(x, k).dtype == (x + k).dtype


def test_a_numpy_array_argument(device: torch.device) -> None:
    """An array is no tensor: the function runs as it is, and says so."""
    fn = pygraph.jit(lambda x, a: x + torch.from_numpy(a).to(x.device))
    for value in (1.0, 2.0):
        assert fn(torch.zeros(2, device=device), np.full(2, value, np.float32)).tolist() == [value, value]
    assert reasons(fn)


def test_none_and_missing_arguments(device: torch.device) -> None:
    """None is part of the structure, so a tensor in its place is another kind of call."""

    def fn(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x if mask is None else x * mask

    fast = pygraph.jit(fn)
    for args in ((), (None,), (torch.zeros(2, device=device),), (None,)):
        assert fast(ones(device, 2), *args).tolist() == fn(ones(device, 2), *args).tolist()


def test_keyword_arguments_in_another_order(device: torch.device) -> None:
    """Order of keywords changes nothing but, at most, the number of traces."""
    fn = pygraph.jit(lambda *, a, b: a - b)
    x, y = ones(device, 2), torch.zeros(2, device=device)
    assert fn(a=x, b=y).tolist() == fn(b=y, a=x).tolist() == [1, 2]


def test_static_arguments(device: torch.device) -> None:
    """A static value is baked in, and a new one traces anew."""
    fn = pygraph.jit(lambda x, n, mode="sum": getattr(torch, mode)(x[:n]), static_argnums=1, static_argnames="mode")
    assert fn(ones(device, 4), 2).item() == 3
    assert fn(ones(device, 4), 3).item() == 6
    assert fn(ones(device, 4), 3, mode="mean").item() == 2
    assert fn.cache_info().misses == 3


def test_an_unhashable_argument(device: torch.device) -> None:
    """An object without a hash is taken apart; what cannot be part of a key runs as it is, and says so."""

    class Options:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, scale: int) -> None:
            self.scale = scale

        def __eq__(self, other: object) -> bool:
            return True

    class Finalized(Options):
        def __del__(self) -> None:
            pass

    fn = pygraph.jit(lambda x, options: x * options.scale)
    assert fn(ones(device, 2), Options(2)).tolist() == [2, 4]
    assert fn(ones(device, 2), Options(3)).tolist() == [3, 6]
    assert not reasons(fn)
    assert fn(ones(device, 2), Finalized(2)).tolist() == [2, 4]
    assert any("of which Python makes no hash" in reason for reason in reasons(fn))


def test_cpu_tensors_run_as_ordinary_calls(device: torch.device) -> None:
    """There is nothing to record on the CPU, and that is said."""
    fn = pygraph.jit(lambda x: x + 1)
    assert fn(torch.ones(2)).tolist() == [2, 2]
    assert fn.cache_info().captures == 0
    assert reasons(fn)


# ---- values on the host ----------------------------------------------------------------------------------------


def test_item(device: torch.device) -> None:
    """``.item()`` waits for the device: it runs between two graphs, or stays on the device, but is never baked in."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    fast = pygraph.jit(fn)
    for scale in (1.0, 2.0, -3.0):
        agree(fast, fn, lambda scale=scale: (ones(device, 3) * scale,), 1)


def test_item_returned(device: torch.device) -> None:
    """A number that comes from the device is a number, fresh at every call."""
    fn = pygraph.jit(lambda x: (x + 1, x.sum().item()))
    assert [fn(ones(device, 2) * k)[1] for k in (1, 2)] == [3.0, 6.0]
    assert reasons(fn)


def test_boolean_mask(device: torch.device) -> None:
    """The shape depends on data: that part runs as it is, and says so."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2)[x > 0] + 1

    fast = pygraph.jit(fn)
    for shift in (0.0, 1.5, 9.0):
        agree(fast, fn, lambda shift=shift: (ones(device, 4) - shift,), 1)
    assert any("depends on data" in reason or "synchronises" in reason for reason in reasons(fast))


def test_if_on_a_tensor(device: torch.device) -> None:
    """A branch on data is a trace for each outcome; the value is read between graphs, which the report says."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    fast = pygraph.jit(fn)
    for sign in (1, -1, 1):
        agree(fast, fn, lambda sign=sign: (ones(device, 2) * sign,), 1)
    assert reasons(fast)


# ---- random numbers --------------------------------------------------------------------------------------------


def test_dropout_follows_manual_seed(device: torch.device) -> None:
    """The same stream as eager: the first call, which traces and records, draws no more than the others."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x)

    fast = pygraph.jit(fn)
    streams = []
    for function in (fn, fast, fast):
        torch.manual_seed(0)
        streams.append(
            [function(ones(device, 32)).tolist() for _ in range(3)] + [torch.rand(2, device=device).tolist()]
        )
    assert streams[0] == streams[1] == streams[2]


def test_seeding_inside_the_function(device: torch.device) -> None:
    """Seeding is a side effect: the function runs as it is."""

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.rand_like(x)

    assert fn(ones(device, 3)).tolist() == fn(ones(device, 3)).tolist()
    assert reasons(fn)


# ---- modes -----------------------------------------------------------------------------------------------------


def test_a_result_that_needs_grad(device: torch.device) -> None:
    """A graph records no gradient: under grad mode there is a second one for the backward."""
    fn = pygraph.jit(lambda w: (w * w).sum())
    w = ones(device, 2).requires_grad_()
    fn(w).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2, 4]
    assert not reasons(fn)
    with torch.no_grad():
        assert not fn(w).requires_grad
    assert in_graphs(fn)


def test_gradients_taken_inside(device: torch.device) -> None:
    """A whole training step can be one graph, if it takes its gradient inside."""

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return w - 0.5 * torch.func.grad(lambda w: ((w * x).sum() - 1) ** 2)(w)

    fast = pygraph.jit(step)
    agree(fast, step, lambda: (ones(device, 2), ones(device, 2)))
    assert in_graphs(fast)


def test_inference_mode(device: torch.device) -> None:
    """Results under inference mode are inference tensors, outside they are not."""
    fn = pygraph.jit(lambda x: x + 1)
    for _ in range(2):
        with torch.inference_mode():
            inside = fn(ones(device, 2))
        assert inside.tolist() == [2, 3]
        assert fn(ones(device, 2)).add_(1).tolist() == [3, 4]


def test_autocast(device: torch.device) -> None:
    """Autocast is part of the key."""
    fn = pygraph.jit(lambda x: x @ x)
    for _ in range(2):
        assert fn(ones(device, 2, 2)).dtype == torch.float32
        with torch.autocast(device.type, torch.bfloat16):
            assert fn(ones(device, 2, 2)).dtype == torch.bfloat16


def test_default_dtype(device: torch.device) -> None:
    """So is the default dtype."""
    fn = pygraph.jit(lambda x: x.int() / 2)
    assert fn(ones(device, 2)).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert fn(ones(device, 2)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# ---- nesting ---------------------------------------------------------------------------------------------------


def test_jit_inside_jit(device: torch.device) -> None:
    """The inner function becomes part of the outer one's graph."""
    inner = pygraph.jit(lambda x: x * 2)
    outer = pygraph.jit(lambda x: inner(x) + 1)
    assert outer(ones(device, 2)).tolist() == [3, 5]
    assert in_graphs(outer)
    assert inner.cache_info().captures == 0
    assert inner(ones(device, 2)).tolist() == [2, 4]


def test_jit_inside_vmap_and_grad(device: torch.device) -> None:
    """``torch.func`` transforms trace through it."""
    fn = pygraph.jit(lambda x: (x * x).sum())
    x = ones(device, 3, 2)
    assert torch.func.vmap(fn)(x).tolist() == [5, 25, 61]
    assert torch.func.grad(fn)(x).tolist() == (2 * x).tolist()


def test_vmap_and_grad_inside_jit(device: torch.device) -> None:
    """They are plain operations by the time that a graph is recorded."""

    def fn(x: torch.Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(lambda v: (v * v).sum()))(x), torch.func.vmap(torch.sum)(x)

    fast = pygraph.jit(fn)
    agree(fast, fn, lambda: (ones(device, 3, 2),))
    assert in_graphs(fast)


def test_vmap_of_jit_inside_jit(device: torch.device) -> None:
    """And in any mixture."""
    inner = pygraph.jit(torch.sum)
    fn = pygraph.jit(lambda x: torch.func.vmap(inner)(x) * 2)
    assert fn(ones(device, 2, 2)).tolist() == [6, 14]


# ---- options ---------------------------------------------------------------------------------------------------


def test_strict_raises(device: torch.device) -> None:
    """With strict, what would not run as a graph is an error, and nothing has been changed."""
    fn = pygraph.jit(lambda x: (x.add_(1), x.sum().item())[1], strict=True)
    x = ones(device, 2)
    with pytest.raises(FallbackError, match="test_footguns"):
        fn(x)
    assert x.tolist() == [1, 2]
    branch = pygraph.jit(lambda x: x if x.sum() > 0 else -x, strict=True)
    with pytest.raises(FallbackError):
        branch(x)
    assert pygraph.jit(lambda x: x + 1, strict=True)(x).tolist() == [2, 3]


def test_max_graphs_evicts_the_least_recently_used(device: torch.device) -> None:
    """Past the budget the oldest makes room; if the cache only turns over, calls run as they are."""
    fn = pygraph.jit(lambda x: x + 1, max_graphs=2)
    for n in (1, 2, 1, 3):
        assert fn(ones(device, n)).tolist() == [i + 2 for i in range(n)]
    info = fn.cache_info()
    assert info.evictions == 1
    fn(ones(device, 1))
    assert fn.cache_info().hits == info.hits + 1
    for n in range(4, 40):
        assert fn(ones(device, n)).tolist() == [i + 2 for i in range(n)]
    assert fn.cache_info().captures < 40
    assert fn.cache_info().size <= 64


# ---- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x @ x,
        lambda x: x.view(7),
        lambda x: x[5],
        lambda x: x + "a",
        lambda x: {}["missing"],
        lambda x: x.nonsense,
    ],
)
def test_exceptions_are_those_of_eager(device: torch.device, fn: Callable[[Any], Any]) -> None:
    """The same type and text, also the second time."""
    with pytest.raises(Exception) as expected:  # noqa: PT011
        fn(ones(device, 2, 3))
    fast = pygraph.jit(fn)
    for _ in range(2):
        with pytest.raises(expected.type) as got:
            fast(ones(device, 2, 3))
        assert str(got.value) == str(expected.value)


def test_an_exception_after_an_update_leaves_the_update(device: torch.device) -> None:
    """As in eager: what was done before the error stays done, once."""

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        raise ValueError("late")

    x = torch.zeros(2, device=device)
    with pytest.raises(ValueError, match="late"):
        fn(x)
    assert x.tolist() == [1, 1]


# ---- modules ---------------------------------------------------------------------------------------------------


@pytest.fixture(name="linear")
def fixture_linear(device: torch.device) -> nn.Linear:
    module = nn.Linear(2, 2).to(device)
    with torch.no_grad():
        module.weight.copy_(torch.eye(2))
        module.bias.zero_()
    return module.requires_grad_(False)


def test_weights_that_move_are_found_again(device: torch.device, linear: nn.Linear) -> None:
    """``.to()``, ``load_state_dict``, ``.data =`` and assignment: the next call reads the weight that is there now."""
    fast = pygraph.jit(linear)
    x = ones(device, 1, 2)
    assert fast(x).tolist() == [[1, 2]]
    linear.load_state_dict({"weight": 2 * torch.eye(2), "bias": torch.zeros(2)})
    assert fast(x).tolist() == [[2, 4]]
    linear.weight.data = 3 * torch.eye(2, device=device)
    assert fast(x).tolist() == [[3, 6]]
    linear.weight = nn.Parameter(4 * torch.eye(2, device=device), requires_grad=False)
    assert fast(x).tolist() == [[4, 8]]
    linear.weight.mul_(2)
    assert fast(x).tolist() == [[8, 16]]
    linear.to(torch.float64)
    assert fast(x.double()).dtype == torch.float64
    linear.to(torch.float32)
    assert fast(x).tolist() == [[8, 16]]


def test_the_jitted_module_is_the_module(device: torch.device, linear: nn.Linear) -> None:
    """State is shared: ``state_dict``, ``eval()``, ``parameters()`` are the original's."""
    fast = pygraph.jit(linear)
    assert isinstance(fast, nn.Module)
    assert list(fast.state_dict()) == ["weight", "bias"]
    fast.eval()
    assert not linear.training
    fast.weight = nn.Parameter(torch.zeros(2, 2, device=device), requires_grad=False)
    assert linear(ones(device, 1, 2)).tolist() == fast(ones(device, 1, 2)).tolist() == [[0, 0]]


def test_tied_weights(device: torch.device) -> None:
    """One tensor under two names is one static input."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device).requires_grad_(False)
    model[1].weight = model[0].weight
    fast = pygraph.jit(model)
    for value in (1.0, 2.0):
        model[0].weight.fill_(value)
        torch.testing.assert_close(fast(ones(device, 1, 2)), model(ones(device, 1, 2)), rtol=0, atol=0)
    assert in_graphs(fast)


def test_batch_norm_in_train_mode(device: torch.device) -> None:
    """Running statistics move once per call, the first one included."""
    model = nn.BatchNorm1d(3).to(device)
    twin = copy.deepcopy(model)
    fast = pygraph.jit(model)
    with torch.no_grad():
        for scale in (1.0, 2.0, 3.0):
            torch.testing.assert_close(fast(ones(device, 4, 3) * scale), twin(ones(device, 4, 3) * scale))
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))
    assert int(model.num_batches_tracked) == 3


def test_train_and_eval(device: torch.device) -> None:
    """The mode is part of what a trace depends on."""
    model = nn.Sequential(nn.Dropout(0.99), nn.Identity()).to(device)
    fast = pygraph.jit(model)
    for _ in range(2):
        model.train()
        torch.manual_seed(0)
        assert fast(torch.ones(64, device=device)).sum().item() != 64
        model.eval()
        assert fast(torch.ones(64, device=device)).sum().item() == 64


def test_a_hook_added_later_runs(device: torch.device, linear: nn.Linear) -> None:
    """Hooks are part of a module's call."""
    fast = pygraph.jit(linear)
    assert fast(ones(device, 1, 2)).tolist() == [[1, 2]]
    handle = linear.register_forward_hook(lambda module, args, result: result * 10)
    assert fast(ones(device, 1, 2)).tolist() == [[10, 20]]
    handle.remove()
    assert fast(ones(device, 1, 2)).tolist() == [[1, 2]]


def test_a_method_as_a_decorated_function(device: torch.device) -> None:
    """The instance is static, found by identity; its attributes are read live."""

    class Model:
        scale = 2.0

        @pygraph.jit
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    first, second = Model(), Model()
    second.scale = 3.0
    assert first.run(ones(device, 1)).item() == 2
    assert second.run(ones(device, 1)).item() == 3
    first.scale = 5.0
    assert first.run(ones(device, 1)).item() == 5


def test_a_class_attribute_is_seen_when_it_changes(device: torch.device) -> None:
    """What an instance inherits from its class is read as well."""

    class Model(nn.Module):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    fast = pygraph.jit(Model())
    assert fast(ones(device, 1)).item() == 2
    Model.scale = 4.0
    assert fast(ones(device, 1)).item() == 4


# ---- memory that calls share or consume ----------------------------------------------------------------------------


def test_reused_results_change_with_the_next_call(device: torch.device) -> None:
    """With reuse_outputs a list of results is a list of one memory; clones are kept."""
    fn = pygraph.graphify(pygraph.indirect(lambda x: x * 2), reuse_outputs=True)
    results = [fn(ones(device, 2) + n) for n in range(3)]
    kept = [fn(ones(device, 2) + n).clone() for n in range(3)]
    assert [result.tolist() for result in results] == [[6, 8]] * 3
    assert [result.tolist() for result in kept] == [[2, 4], [4, 6], [6, 8]]


def test_reused_results_of_two_functions_are_apart(device: torch.device) -> None:
    """Every transformed function has memory of its own, also of the same function."""
    one, two = (pygraph.graphify(lambda x: x * 2, reuse_outputs=True) for _ in range(2))
    first = one(ones(device, 2))
    two(ones(device, 2) + 5)
    assert first.tolist() == [2, 4]


def test_a_donated_tensor_is_consumed_under_every_name(device: torch.device) -> None:
    """The object is consumed, so a model or dict that holds it holds a consumed tensor."""
    fn = pygraph.jit(lambda w: w * 2, donate_argnums=0)
    net = nn.Linear(2, 2, bias=False).to(device).requires_grad_(False)
    new = fn(net.weight)
    with pytest.raises(DonatedError):
        net(ones(device, 1, 2))
    net.weight = nn.Parameter(new, requires_grad=False)
    assert net(ones(device, 1, 2)).shape == (1, 2)


def test_a_view_of_a_donated_tensor_stays(device: torch.device) -> None:
    """Views made before keep the memory and their values; only the donated object is consumed."""
    fn = pygraph.jit(lambda x: x * 2, donate_argnums=0)
    x = ones(device, 4)
    view = x[1:]
    fn(x)
    assert view.tolist() == [2, 3, 4]


def test_one_donated_tensor_twice_in_a_loop(device: torch.device) -> None:
    """The same initial state cannot start two loops."""
    fn = pygraph.jit(lambda x: x * 2, donate_argnums=0)
    start = ones(device, 2)
    fn(start)
    with pytest.raises(DonatedError, match="donate a clone"):
        fn(start)


WRITES_THAT_RAISE: dict[str, Callable[[torch.Tensor], Any]] = {
    "overlapping": lambda x: x[1:].add_(x[:-1]),
    "transposed": lambda x: x[:4].view(2, 2).add_(x[:4].view(2, 2).t()),
    "expanded": lambda x: x.expand(3, 5).add_(1),
    "out=": lambda x: torch.mul(x[1:], 2, out=x[:-1]),
    "complex into real": lambda x: x.mul_(2j),
    "numbers into a mask": lambda x: (x > 1).mul_(2),
    "several at once": lambda x: torch._foreach_add_([x], 2j),
}


@pytest.mark.parametrize("name", WRITES_THAT_RAISE)
def test_a_write_that_eager_refuses_raises_its_error(device: torch.device, name: str) -> None:
    """Nothing is written, and the error is eager's."""
    fn = WRITES_THAT_RAISE[name]
    fast = pygraph.jit(fn)
    for _ in range(3):
        x = ones(device, 5)
        with pytest.raises(RuntimeError) as expected:
            fn(ones(device, 5))
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value).splitlines()[0])):
            fast(x)
        assert torch.equal(x, ones(device, 5))


LASTING: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor, Any], Any]]] = {
    ".data": (lambda x: (setattr(x, "data", x * 2), x + 1)[1], lambda x, r: (x.tolist(), r.tolist())),
    "requires_grad_": (lambda x: (x.requires_grad_(), x.detach() * 2)[1], lambda x, r: x.requires_grad),
    "attribute": (lambda x: (setattr(x, "tag", 5), x * 2)[1], lambda x, r: getattr(x, "tag", None)),
    "parameter": (lambda x: nn.Parameter(x * 2, requires_grad=False), lambda x, r: type(r)),
    "inference": (lambda x: torch.inference_mode()(lambda: x * 2)(), lambda x, r: r.is_inference()),
    "text": (lambda x: (x * 2, f"{x}"), lambda x, r: r[1]),
    "text of a number": (lambda x: (x * 2, f"{x.sum().item() * 2}"), lambda x, r: r[1]),
    "comparison": (lambda x: (x * 2, x.sum().item() == x.sum().item()), lambda x, r: (r[1], type(r[1]))),
    "offset": (lambda x: x * (1 + x.storage_offset()), lambda x, r: r.tolist()),
    "seed": (lambda x: (torch.manual_seed(0), x + torch.rand(2, device=x.device))[1], lambda x, r: r.tolist()),
}


@pytest.mark.parametrize("name", LASTING)
def test_what_a_trace_cannot_say_is_done_at_every_call(device: torch.device, name: str) -> None:
    """Changes of the tensor as an object, and questions about it, are as in eager, and counted."""
    fn, see = LASTING[name]
    fast = pygraph.jit(fn)
    torch.manual_seed(0)
    for n in range(3):
        mine, eager = (ones(device, 4).mul_(n + 1)[2:] for _ in range(2))
        assert see(mine, fast(mine)) == see(eager, fn(eager))
    assert reasons(fast)
