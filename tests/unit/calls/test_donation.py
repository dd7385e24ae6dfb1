"""Donated arguments: what is consumed, whose memory results take over, and that neither changes a result."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pygraph
from pygraph.api.module import transformed
from pygraph.api.options import make_options
from pygraph.errors import ArgumentError, DonatedError
from pygraph.runtime.devices import driver_for
from pygraph.transforms.passes import UNFUSED
from tests.memory import live_bytes

pytestmark = pytest.mark.usefixtures("empty_padding")


def ones(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device=device).view(shape).clone()


CAPTURED = "it shares memory with a tensor that the function closes over"
REACHED = "something else can reach its memory: a view, what it is a view of, autograd, a storage"

NO_FIT = "no result, or none that is left, has its shape, strides and dtype"
STILL_READ = "it is still read when a result of its layout is written"


def replayed(fn: Any, **options: Any) -> Any:
    """Donating, and always as graphs: jit runs tiny functions as ordinary launches, which take over no memory."""
    return transformed(fn, UNFUSED[:-1], make_options("jit(…)", **options))


def notes(fn: Any) -> dict[str, set[str | None]]:
    """Per donated argument, why its memory did not become a result's; None if it did."""
    found: dict[str, set[str | None]] = {}
    for entry in fn.explain().to_dict()["donated"]:
        found.setdefault(entry["argument"], set()).add(entry["reason"])
    return found


def allocated(device: torch.device, call: Callable[[], object]) -> int:
    driver = driver_for(device)
    assert driver is not None
    before = driver.allocated_total()
    call()
    return driver.allocated_total() - before


# ---- memory --------------------------------------------------------------------------------------------------------


def test_a_chain_of_donations_lives_in_one_buffer(device: torch.device) -> None:
    driver = driver_for(device)
    assert driver is not None
    fn = pygraph.jit(lambda x: torch.tanh(x) * 2, donate_argnums=0)
    expected = x = ones(device, 64, 64)
    for _ in range(10):
        expected = torch.tanh(expected) * 2
    fn(x.clone())
    live, total, held = live_bytes(device), driver.allocated_total(), []
    for _ in range(10):
        held.append(x)  # whoever still holds a consumed argument holds no memory
        x = fn(x)
    assert driver.allocated_total() == total
    assert live_bytes(device) == live
    assert torch.equal(x, expected)
    assert notes(fn) == {"args[0]": {None}}


@pytest.mark.parametrize("kind", ["itself", "a view", "another storage", "a part of it"])
@pytest.mark.parametrize("first", ["captured", "others"])
def test_a_captured_tensor_is_not_overwritten_while_it_is_read(device: torch.device, kind: str, first: str) -> None:
    def make() -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        weight = ones(device, 1024)
        return weight, lambda x: (y := x * 2, y + weight.flip(0)[: len(x)])

    def given(weight: torch.Tensor) -> torch.Tensor:
        driver = driver_for(device)
        assert driver is not None
        match kind:
            case "itself":
                return weight
            case "a view":
                return weight[:]
            case "another storage":
                return driver.tensor_at(weight.data_ptr(), (1024,), (1,), weight.dtype)
            case _:
                return driver.tensor_at(weight.data_ptr() + 2048, (512,), (1,), weight.dtype)

    weight, fn = make()
    reference, eager = make()
    fast = replayed(fn, donate_argnums=0)
    size = len(given(reference))
    order = [False, False, True] if first == "others" else [True]
    for captured in order:
        x = given(weight) if captured else ones(device, size)
        expected = eager(given(reference) if captured else ones(device, size))
        for got, wanted in zip(fast(x), expected, strict=True):
            assert torch.equal(got, wanted)
        with pytest.raises(DonatedError):
            x.sum()
    assert notes(fast) == {"args[0]": {CAPTURED, *([None] if first == "others" else [])}}
    if kind != "itself":
        assert torch.equal(weight, reference)
        for _ in range(2):  # a refusal is one of that call only
            for got, wanted in zip(fast(ones(device, size)), eager(ones(device, size)), strict=True):
                assert torch.equal(got, wanted)
        assert notes(fast) == {"args[0]": {CAPTURED, None}}


def test_without_donation_every_call_allocates(device: torch.device) -> None:
    x = ones(device, 64, 64)
    fn = pygraph.jit(lambda x: torch.tanh(x) * 2)
    fn(x)
    assert allocated(device, lambda: fn(x)) >= x.nbytes


def test_memory_that_no_result_can_take_is_given_back(device: torch.device) -> None:
    driver = driver_for(device)
    assert driver is not None
    fn = pygraph.jit(lambda x: x.sum(), donate_argnums=0)
    fn(ones(device, 64, 64))
    x = ones(device, 64, 64)
    live = driver.live_bytes()
    fn(x)
    assert driver.live_bytes() < live
    assert notes(fn) == {"args[0]": {NO_FIT}}


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, y: x * y, None),
        (lambda x, y: torch.where(x > 1, x, y), None),
        (lambda x, y: (x @ y).exp(), None),  # the product is another piece of memory than the result
        (lambda x, y: x @ y, STILL_READ),
        (lambda x, y: x.t() * y, NO_FIT),  # its result is transposed, too
        (lambda x, y: y * x.t(), STILL_READ),
        (lambda x, y: x + x.t(), STILL_READ),
        (lambda x, y: torch.cumsum(x, 0), STILL_READ),
        (lambda x, y: torch.softmax(x, 0), STILL_READ),
        (lambda x, y: (y * 2, x.sum()), STILL_READ),
        (lambda x, y: torch.unsafe_split(x, 2)[1] + (y * 2).sum(), NO_FIT),
        (lambda x, y: torch.cat(torch.unsafe_split(x, 2)[::-1]) * y, None),
        (lambda x, y: (x * y, x), "it is returned"),
        (lambda x, y: (x * y, x[1:]), "it is returned"),
        (lambda x, y: x.mul_(y) + 1, "the function updates it"),
        (lambda x, y: y * 2, "the function does not read it"),
    ],
)  # fmt: skip
def test_who_takes_over_what(device: torch.device, fn: Callable[..., Any], reason: str | None) -> None:
    fast = replayed(fn, donate_argnums=0)
    for _ in range(3):
        x, y = ones(device, 4, 4), ones(device, 4, 4) / 8
        expected = fn(x.clone(), y)
        torch.testing.assert_close(fast(x, y), expected, rtol=0, atol=0)
        with pytest.raises(DonatedError):
            x.sum()
        assert torch.equal(y, ones(device, 4, 4) / 8)
    assert notes(fast) == {"args[0]": {reason}}
    assert fast.explain().to_dict()["kernels_in_graphs"] > 0


def test_a_result_written_early_does_not_overwrite_what_is_read_late(device: torch.device) -> None:
    """The first result has the argument's layout, but the second still reads the argument."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.zeros_like(x) + 5
        return first, torch.cumsum(x, 0)

    fast = replayed(fn, donate_argnums=0)
    for _ in range(3):
        torch.testing.assert_close(fast(ones(device, 3, 3)), fn(ones(device, 3, 3)), rtol=0, atol=0)


@pytest.mark.parametrize("hold", [lambda x: x[1:], lambda x: x.detach(), lambda x: x.untyped_storage()])
def test_memory_that_something_else_can_reach_is_left_alone(device: torch.device, hold: Callable[..., Any]) -> None:
    fn = replayed(lambda x: x * 2, donate_argnums=0)
    fn(ones(device, 4, 4))
    x = ones(device, 4, 4)
    other = hold(x)
    before = torch.empty(0, device=device).set_(other) if isinstance(other, torch.UntypedStorage) else other
    kept = before.clone()
    del before
    result = fn(x)
    assert torch.equal(result, ones(device, 4, 4) * 2)
    after = torch.empty(0, device=device).set_(other) if isinstance(other, torch.UntypedStorage) else other
    assert torch.equal(after, kept)
    assert notes(fn)["args[0]"] == {None, REACHED}


def test_a_part_of_a_larger_memory_is_left_alone(device: torch.device) -> None:
    fn = replayed(lambda x: x * 2, donate_argnums=0)
    for _ in range(2):
        base = ones(device, 256, 4)
        assert torch.equal(fn(base[:128]), ones(device, 256, 4)[:128] * 2)
        assert torch.equal(base, ones(device, 256, 4))
    assert REACHED in notes(fn)["args[0]"]
    part = torch.empty(0, device=device).set_(ones(device, 256, 4).untyped_storage(), 0, (128, 4), (4, 1))
    assert torch.equal(fn(part), ones(device, 256, 4)[:128] * 2)
    assert "it is a part of its memory" in notes(fn)["args[0]"]


def test_what_autograd_has_saved_is_left_alone(device: torch.device) -> None:
    fn = replayed(lambda x: x * 2, donate_argnums=0)
    with torch.no_grad():
        fn(ones(device, 4))
    x = ones(device, 4)
    weight = torch.ones(4, device=device, requires_grad=True)
    loss = (x * weight).sum()
    with torch.no_grad():
        fn(x)
    loss.backward()
    assert torch.equal(weight.grad, ones(device, 4))  # pyright: ignore


def test_a_tensor_that_the_function_closes_over(device: torch.device) -> None:
    bias = ones(device, 4)
    fn = replayed(lambda x: x + bias, donate_argnums=0)
    assert torch.equal(fn(ones(device, 4)), ones(device, 4) * 2)
    assert torch.equal(fn(bias), ones(device, 4) * 2)
    with pytest.raises(DonatedError):
        fn(ones(device, 4))  # bias is gone, as the caller has said


def test_a_consumed_tensor_in_reach_that_is_not_used(device: torch.device) -> None:
    history: list[torch.Tensor] = []
    factor = torch.full((4,), 2.0, device=device)
    fn = replayed(lambda x: x * factor if len(history) < 9 else history[-1] * x, donate_argnums=0)
    for _ in range(3):
        history.append(ones(device, 4))
        assert torch.equal(fn(history[-1]), ones(device, 4) * 2)
    history *= 3
    with pytest.raises(DonatedError):
        fn(ones(device, 4))


def test_the_same_tensor_twice(device: torch.device) -> None:
    fn = replayed(lambda x, y: x * 2 + y, donate_argnums=(0, 1))
    for _ in range(2):
        x = ones(device, 4)
        assert torch.equal(fn(x, x), ones(device, 4) * 3)
        with pytest.raises(DonatedError):
            x.sum()


def test_a_function_with_eager_work_in_the_middle(device: torch.device) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        few = y[y > 2]
        return x * 2, torch.tanh(y) * few.sum()

    fast = replayed(fn, donate_argnames=("x", "y"))
    for n in range(3):
        x, y = ones(device, 4, 4) + n, ones(device, 4, 4) - n
        expected = fn(x.clone(), y.clone())
        torch.testing.assert_close(fast(x, y), expected)
        for tensor in (x, y):
            with pytest.raises(DonatedError):
                tensor.sum()


def test_an_optimizer_step_updates_a_pytree(device: torch.device) -> None:
    def step(state: dict[str, Any], grad: torch.Tensor) -> dict[str, Any]:
        m = [0.9 * m + 0.1 * grad for m in state["m"]]
        return {"w": state["w"] - 0.5 * m[0] - 0.25 * m[1], "m": m, "n": state["n"] + 1}

    fast = replayed(step, donate_argnums=0)

    def make() -> dict[str, Any]:
        return {"w": ones(device, 8, 8), "m": [torch.zeros(8, 8, device=device), ones(device, 8, 8)], "n": 0}

    mine, eager = make(), make()
    for n in range(4):
        grad = ones(device, 8, 8) / (n + 1)
        previous, (mine, eager) = mine, (fast(mine, grad), step(eager, grad))
        torch.testing.assert_close(mine, eager)
        with pytest.raises(DonatedError, match=r"args\[0\]\['m'\]\[1\]"):
            previous["m"][1].sum()
    assert notes(fast)["args[0]['w']"] == {None}


def test_a_class_that_looks_at_what_it_is_made_of(device: torch.device) -> None:
    fast = pygraph.jit(lambda packed, *, scale: packed.data * scale, donate_argnums=0, donate_argnames="scale")
    for _ in range(3):
        scale = ones(device, 1)
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 3, 5), torch.tensor([4, 2, 1])).to(device)
        expected = packed.data * scale
        assert torch.equal(fast(packed, scale=scale), expected)
        with pytest.raises(DonatedError, match=r"as args\[0\]\.data "):
            packed.data.sum()
        with pytest.raises(DonatedError, match="scale"):
            scale.sum()


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "matmul": lambda a, b: a @ b, "t": lambda a, b: a.t() + b,
    "tanh": lambda a, b: torch.tanh(a), "cumsum": lambda a, b: torch.cumsum(a, 0), "flip": lambda a, b: a.flip(0),
    "sub": lambda a, b: b - a, "where": lambda a, b: torch.where(a > b, a, b), "row": lambda a, b: a + b[0],
}  # fmt: skip


@given(
    program=st.lists(
        st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7
    ),
    returned=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    donated=st.sets(st.integers(0, 2), min_size=1),
)
def test_any_function_equals_eager(
    device: torch.device, program: list[tuple[str, int, int]], returned: list[int], donated: set[int]
) -> None:
    """Whatever takes over whatever, results and what was not donated are those of eager."""

    def fn(*args: torch.Tensor) -> list[torch.Tensor]:
        values = list(args)
        for op, a, b in program:
            values.append(OPS[op](values[a % len(values)], values[b % len(values)]))
        return [values[-1 - i % len(values)] for i in returned]

    fast = replayed(fn, donate_argnums=tuple(donated))
    for n in range(2):
        args = [torch.sin(ones(device, 3, 3) * (i + n + 1)) for i in range(3)]
        expected = [value.clone() for value in fn(*args)]
        got = fast(*args)
        torch.testing.assert_close(got, expected)
        for i, arg in enumerate(args):
            if i in donated:
                with pytest.raises(DonatedError):
                    arg.sum()
            else:
                assert torch.equal(arg, torch.sin(ones(device, 3, 3) * (i + n + 1)))


# ---- what is consumed ----------------------------------------------------------------------------------------------

USES: dict[str, Callable[[torch.Tensor], object]] = {
    "shape": lambda x: x.shape, "dtype": lambda x: x.dtype, "data_ptr": lambda x: x.data_ptr(),
    "add": lambda x: x + 1, "radd": lambda x: 1 + x, "other": lambda x: torch.ones(1) + x, "item": lambda x: x[0],
    "cat": lambda x: torch.cat([x, x]), "bool": bool, "len": len, "iter": list, "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(), "detach": lambda x: x.detach(), "data": lambda x: x.data, "grad": lambda x: x.grad,
    "requires_grad": lambda x: x.requires_grad, "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps,
    "save": lambda x: torch.save(x, io.BytesIO()), "out": lambda x: torch.add(x, 1, out=x), "eq": lambda x: x == x,
    "add_": lambda x: x.add_(1), "setitem": lambda x: x.__setitem__(0, 1.0), "storage": lambda x: x.untyped_storage(),
    "set_data": lambda x: setattr(x, "data", torch.ones(1)), "linear": lambda x: nn.functional.linear(torch.ones(1), x),
    "vmap": lambda x: torch.vmap(lambda y: y + 1)(x),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_every_use_raises(device: torch.device, kind: str, use: str) -> None:
    fn = pygraph.jit(lambda x: x * 2, donate_argnums=0)
    x = ones(device, 4)
    x = nn.Parameter(x, requires_grad=False) if kind == "parameter" else x
    fn(x)
    with pytest.raises(DonatedError, match=r"<lambda>\(…\): the tensor was donated to it as args\[0\] \(float32\[4\]"):
        USES[use](x)


def test_a_consumed_tensor_can_be_printed_compared_by_identity_and_dropped(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: x * 2, donate_argnums=0)
    x = ones(device, 4)
    held = {x: 1}
    fn(x)
    assert repr(x) == f"{x}" == str(x)
    assert "args[0] of <lambda>, at test_donation.py:" in repr(x)
    assert held[x] == 1


def test_the_error_says_where(device: torch.device) -> None:
    @pygraph.jit(donate_argnames="state")
    def update(x: torch.Tensor, *, state: Any) -> torch.Tensor:
        return x + state[1]

    state = (0, ones(device, 4))
    update(ones(device, 4), state=state)
    with pytest.raises(DonatedError) as error:
        state[1].sum()
    assert str(error.value) == (
        f"update(…): the tensor was donated to it as kwargs['state'][1] (float32[4] {device.type}), and is used again. "
        f"From test_donation.py:{update_line()}. Use the call's result instead, or donate a clone."
    )


def update_line() -> int:
    code = test_the_error_says_where.__code__
    lines = Path(code.co_filename).read_text("utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if "update(ones(device, 4), state=state)" in line)


@pytest.mark.parametrize("wrap", [pygraph.jit, lambda f: pygraph.graphify(pygraph.indirect(f)), pygraph.devicify])
def test_a_consumed_tensor_is_no_argument(device: torch.device, wrap: Any) -> None:
    x = ones(device, 4)
    pygraph.jit(lambda x: x * 2, donate_argnums=0)(x)
    with pytest.raises(DonatedError):
        wrap(lambda x: 1)(x)


def test_a_result_that_is_the_argument_is_another_object(device: torch.device) -> None:
    fn = pygraph.jit(lambda x, y: {"same": x, "again": x, "view": x[1:], "sum": x + y}, donate_argnums=0)
    for _ in range(3):
        x = ones(device, 4)
        where = x.data_ptr()
        result = fn(x, x.clone())
        assert result["same"] is result["again"]
        assert result["same"].data_ptr() == where
        result["same"].add_(1)
        assert torch.equal(result["same"], ones(device, 4) + 1)
        assert torch.equal(result["view"], ones(device, 4)[1:] + 1)
        assert torch.equal(result["sum"], ones(device, 4) * 2)
        with pytest.raises(DonatedError):
            x.sum()


def test_a_returned_parameter_stays_a_parameter(device: torch.device) -> None:
    fn = pygraph.jit(lambda w: (w, w.detach() * 2), donate_argnums=0)
    with torch.no_grad():
        same, _ = fn(nn.Parameter(ones(device, 4)))
    assert isinstance(same, nn.Parameter)
    assert same.requires_grad
    assert torch.equal(same, ones(device, 4))


def test_ordinary_calls_consume_too(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: x if x.sum() > 0 else -x, donate_argnums=0)
    x = ones(device, 4)
    assert torch.equal(fn(x), ones(device, 4))
    with pytest.raises(DonatedError):
        x.sum()
    assert notes(fn) == {"args[0]": {"the call runs as ordinary launches"}}


def test_gradients_flow_through_a_consumed_argument(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: (x * x).sum(), donate_argnums=0)
    leaf = torch.ones(4, device=device, requires_grad=True)
    x = leaf * 3
    fn(x).backward()
    assert torch.equal(leaf.grad, torch.full((4,), 18.0, device=device))  # pyright: ignore
    with pytest.raises(DonatedError):
        x.sum()


def test_host_tensors_are_consumed_and_numpy_keeps_its_memory() -> None:
    x = torch.ones(4)
    array = x.numpy()
    assert pygraph.jit(lambda x: x * 2, donate_argnums=0)(x).tolist() == [2, 2, 2, 2]
    with pytest.raises(DonatedError):
        x.sum()
    assert array.tolist() == [1, 1, 1, 1]


def test_calls_inside_a_transform_consume_nothing(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: (x * x).sum(), donate_argnums=0)
    x = ones(device, 4)
    assert torch.equal(torch.func.grad(fn)(x), 2 * x)
    assert torch.equal(torch.vmap(fn)(x.view(2, 2)), (x * x).view(2, 2).sum(1))
    outer = pygraph.jit(lambda x: fn(x) + x.sum())
    assert torch.equal(outer(x), (x * x).sum() + x.sum())
    assert torch.equal(x, ones(device, 4))


def test_an_exception_leaves_the_argument(device: torch.device) -> None:
    fn = pygraph.jit(lambda x, y: x @ y, donate_argnums=0)
    x = ones(device, 2, 2)
    fn(x.clone(), x)
    with pytest.raises(RuntimeError, match="shape"):
        fn(x, ones(device, 3, 3))
    assert torch.equal(x, ones(device, 2, 2))
    assert torch.equal(fn(x, ones(device, 2, 2)), ones(device, 2, 2) @ ones(device, 2, 2))


def test_an_exception_after_graphs_leaves_the_argument(device: torch.device) -> None:
    """An operation between graphs fails, after one that has read the argument."""

    def fn(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.new_ones(2)[index[index > 0]]

    fast = pygraph.jit(fn, donate_argnums=0)
    x, good, bad = ones(device, 4), torch.tensor([1, 0], device=device), torch.tensor([1, -1], device=device)
    torch.testing.assert_close(fast(x.clone(), good), fn(x, good))
    assert torch.equal(fast(x, bad)[0], ones(device, 4) * 2)


def test_a_change_of_what_is_closed_over_leaves_the_argument_for_the_second_try(device: torch.device) -> None:
    factor = 2.0
    fn = replayed(lambda x: x * factor, donate_argnums=0)
    for factor in (2.0, 2.0, 3.0, 4.0, 4.0):
        assert torch.equal(fn(ones(device, 4)), ones(device, 4) * factor)
    assert notes(fn) == {"args[0]": {None}}


def test_compiled_calls_consume(device: torch.device) -> None:
    compiled = pygraph.jit(lambda x: x * 2, donate_argnums=0).lower(ones(device, 4)).compile()
    for _ in range(2):
        x = ones(device, 4)
        assert torch.equal(compiled(x), ones(device, 4) * 2)
        with pytest.raises(DonatedError):
            compiled(x)


def test_a_module(device: torch.device) -> None:
    fast = pygraph.jit(nn.Linear(4, 4).to(device).requires_grad_(False), donate_argnames="input")
    x = ones(device, 2, 4)
    fast(x)
    with pytest.raises(DonatedError):
        fast(x)


# ---- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"donate_argnums": 1}, lambda f, x: f(x)),
        ({"donate_argnums": 1}, lambda f, x: f(x, 1.0)),
        ({"donate_argnums": 1}, lambda f, x: f(x, k=1.0)),
        ({"donate_argnames": "k"}, lambda f, x: f(x)),
        ({"donate_argnums": -1}, lambda f, x: f(x, 2)),
    ],
)
def test_what_is_no_tensor_is_ignored(device: torch.device, options: dict[str, Any], call: Callable[..., Any]) -> None:
    x = ones(device, 4)
    call(pygraph.jit(lambda x, k=2.0: x * k, **options), x)
    assert x.sum() == 10


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"donate_argnums": 0}, lambda f, x: f(x)),
        ({"donate_argnums": -2}, lambda f, x: f(x, 2.0)),
        ({"donate_argnums": 0}, lambda f, x: f(x=x)),
        ({"donate_argnames": "x"}, lambda f, x: f(x, 1.0)),
        ({"donate_argnames": ["x"]}, lambda f, x: f(k=1.0, x=x)),
    ],
)
def test_arguments_by_position_and_by_name(
    device: torch.device, options: dict[str, Any], call: Callable[..., Any]
) -> None:
    x = ones(device, 4)
    call(pygraph.jit(lambda x, k=2.0: x * k, **options), x)
    with pytest.raises(DonatedError):
        x.sum()


@pytest.mark.parametrize("options", [{"donate_argnums": 2}, {"donate_argnums": -3}])
def test_options_that_fit_no_argument_of_a_call(device: torch.device, options: dict[str, Any]) -> None:
    x = ones(device, 4)
    fn = pygraph.jit(lambda *args: args[0] * args[1], **options)
    with pytest.raises(ArgumentError, match="donate_arg"):
        fn(x, 2.0)
    assert x.sum() == 10


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": "x"}, {"donate_argnames": 1.5}, {"donate_argnums": (0, "a")},
        {"donate_argnums": 0, "static_argnums": 0}, {"donate_argnames": "k", "static_argnames": ("a", "k")},
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises((ArgumentError, TypeError)):
        pygraph.jit(torch.sin, **options)
