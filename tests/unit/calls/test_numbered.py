"""Numbers on the host that change: what a function asks of them is in the key, and they are live."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pygraph
from tests.extent import examples


def check(fn: Callable[..., Any], jitted: Callable[..., Any], *args: Any) -> None:
    """The result of a call, or its error, is that of eager."""
    try:
        expected = fn(*args)
    except (ValueError, ArithmeticError, TypeError, OverflowError) as error:
        with pytest.raises(type(error)):
            jitted(*args)
        return
    got = jitted(*args)
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)
    else:
        assert repr(got) == repr(expected)  # also of zeros with a sign, and of what is no number


# ---- decisions -----------------------------------------------------------------------------------------------------


def every_fourth(x: torch.Tensor, step: Any) -> torch.Tensor:
    return x * 2 if step % 4 == 0 else x + 1


def late(x: torch.Tensor, pos: Any) -> torch.Tensor:
    y = x * 2 if pos > 5 else x
    return y * pos


def both(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * 2 if k > 3 and k % 2 == 1 else x * 3 if k < -2 or k == 0 else x


def among(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * 2 if k in (1, 3, 5) else x * k


def clipped(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * min(max(k, -3), 7)


def truth(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * 2 if k else x * 3 if not k - 1 else x


def float_sums(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * 2 if 0.1 + k * 0.1 + 0.7 > 1.2 else x * 3


def rounded(x: torch.Tensor, k: Any) -> torch.Tensor:
    y = x
    for _ in range(int(k * 0.25) % 3):
        y = y * 2
    return y


DECIDING: dict[str, tuple[Callable[..., Any], int]] = {
    "every fourth": (every_fourth, 2),
    "late": (late, 2),
    "both": (both, 3),
    "among": (among, 4),
    "clipped": (clipped, 3),
    "truth": (truth, 3),
    "sums of floats": (float_sums, 2),
    "rounded": (rounded, 6),
}


@pytest.mark.parametrize("kind", DECIDING)
def test_there_are_as_many_traces_as_paths(device: torch.device, kind: str) -> None:
    fn, paths = DECIDING[kind]
    jitted = pygraph.jit(fn)
    x = torch.arange(3.0).to(device)
    for k in (*range(-6, 14), *range(-6, 14)):
        check(fn, jitted, x, k)
    info = jitted.cache_info()
    # The first value is baked in: a number that stays the same costs nothing then.
    assert info.captures <= paths + 1
    assert info.hits >= 40 - info.misses
    assert jitted.explain().to_dict()["fallbacks"] == []


def test_a_number_that_does_not_change_is_baked_in(device: torch.device) -> None:
    jitted = pygraph.jit(every_fourth)
    x = torch.arange(3.0).to(device)
    for _ in range(4):
        assert torch.equal(jitted(x, 8), x * 2)
    assert jitted.cache_info()[:3] == (3, 1, 1)


def test_under_autograd(device: torch.device) -> None:
    layer = torch.nn.Linear(3, 2).to(device)

    def fn(x: torch.Tensor, step: int) -> torch.Tensor:
        y = layer(x)
        return (y * 2 if step % 4 == 0 else y).sum() * math.sqrt(step + 1)

    jitted = pygraph.jit(fn)
    x = torch.arange(6.0).view(2, 3).to(device)
    for step in range(12):
        results = []
        for run in (fn, jitted):
            layer.zero_grad()
            loss = run(x, step)
            loss.backward()
            assert layer.weight.grad is not None
            results.append((loss.detach().cpu(), layer.weight.grad.cpu()))
        torch.testing.assert_close(*results)
    assert jitted.cache_info().misses <= 5
    assert jitted.explain().to_dict()["fallbacks"] == []


def test_a_path_asks_more_under_autograd(device: torch.device) -> None:
    layer = torch.nn.Linear(3, 2).to(device)

    def fn(x: torch.Tensor, step: int) -> torch.Tensor:
        y = layer(x)
        if step > 3:
            y = y * math.exp(-step / 10) if step % 3 == 0 else y + step
        return y.square().sum()

    jitted = pygraph.jit(fn)
    x = torch.arange(6.0).view(2, 3).to(device)
    for step in (*range(12), *range(12)):
        results = []
        for run in (fn, jitted):
            layer.zero_grad()
            loss = run(x, step)
            loss.backward()
            assert layer.weight.grad is not None
            results.append((loss.detach().cpu(), layer.weight.grad.cpu()))
        torch.testing.assert_close(*results)
    assert jitted.cache_info().hits >= 16
    assert jitted.explain().to_dict()["fallbacks"] == []


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_inside_transforms_of_torch(device: torch.device, transform: str) -> None:
    def fn(x: torch.Tensor, step: int) -> torch.Tensor:
        return ((x * 2 if step % 4 == 0 else x.sin()) * math.sqrt(step)).sum()

    jitted = pygraph.jit(fn)
    make = {"vmap": lambda f: torch.func.vmap(f, (0, None)), "grad": torch.func.grad}[transform]
    x = torch.arange(6.0).view(2, 3).to(device)
    for step in range(9):
        torch.testing.assert_close(make(jitted)(x, step).cpu(), make(fn)(x, step).cpu())
        torch.testing.assert_close(jitted(x, step).cpu(), fn(x, step).cpu())


def test_numbers_in_containers_and_by_name(device: torch.device) -> None:
    def fn(x: torch.Tensor, state: dict[str, Any], *, scale: float) -> torch.Tensor:
        y = x * 2 if state["step"] % 3 == 0 else x
        return y * (scale if scale > 0.5 else 0.5) + state["step"]

    jitted = pygraph.jit(fn)
    x = torch.arange(3.0).to(device)
    for step in range(12):
        state, scale = {"step": step}, step / 10
        assert torch.equal(jitted(x, state, scale=scale), fn(x, state, scale=scale))
    assert jitted.cache_info().captures <= 5


def test_with_static_arguments(device: torch.device) -> None:
    def fn(x: torch.Tensor, mode: str, step: int) -> torch.Tensor:
        return x * 2 if (step % 3 == 0) == (mode == "even") else x

    jitted = pygraph.jit(fn, static_argnums=(1,))
    x = torch.arange(3.0).to(device)
    for step in range(8):
        for mode in ("even", "odd"):
            assert torch.equal(jitted(x, mode, step), fn(x, mode, step))
    assert jitted.cache_info().captures <= 6


def test_a_path_is_not_asked_what_only_another_one_asks(device: torch.device) -> None:
    """Numbers for which a comparison of another path has another outcome are one path all the same."""

    def fn(x: torch.Tensor, k: int) -> torch.Tensor:
        if k > 10:
            return x * 2 if 100 // (k - 10) > 20 else x * 3
        return x * 5

    jitted = pygraph.jit(fn)
    x = torch.arange(3.0).to(device)
    for k in (1, 2, 12, 40, 3, 10, 0, 13, 50, 9):  # for 10, the comparison of the other path is an error
        assert torch.equal(jitted(x, k), fn(x, k))
    assert jitted.cache_info().captures == 4


def test_a_number_that_the_first_path_alone_needs(device: torch.device) -> None:
    def fn(x: torch.Tensor, k: int) -> torch.Tensor:
        return x[k] * 2 if k > 1 else x[:k] + 1

    jitted = pygraph.jit(fn, strict=True)
    x = torch.arange(24.0).view(12, 2).to(device)
    for k in range(1, 11):
        assert torch.equal(jitted(x, k), fn(x, k))
    assert jitted.cache_info().captures <= 4


def test_more_comparisons_than_there_is_room_for(device: torch.device) -> None:
    def fn(x: torch.Tensor, k: int) -> torch.Tensor:
        for number in range(20):
            if k == number:
                return x * number
        return x

    jitted = pygraph.jit(fn)
    x = torch.arange(3.0).to(device)
    for k in (*range(12), 30, 31, *range(12), 30, 31):
        assert torch.equal(jitted(x, k), fn(x, k)), k


def check_training(fn: Callable[..., torch.Tensor], layer: torch.nn.Module, steps: int, device: torch.device) -> None:
    """Compare the losses of so many steps with eager's, from the same start, by few graphs."""
    jitted = pygraph.jit(fn)
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    results = []
    for run in (fn, jitted):
        layer.load_state_dict(start)
        results.append([run(torch.arange(6.0).view(2, 3).to(device), step).cpu() for step in range(steps)])
    torch.testing.assert_close(*results)
    assert jitted.cache_info().captures <= 6


def test_a_new_step_of_training_takes_a_number(device: torch.device) -> None:
    layer = torch.nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def fn(x: torch.Tensor, step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean() * (2 if step % 3 == 0 else 1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    check_training(fn, layer, 10, device)


def test_a_step_of_training_computes_its_learning_rate(device: torch.device) -> None:
    layer = torch.nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def fn(x: torch.Tensor, step: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1) / 4 if step < 4 else 0.05 * (1 + math.cos(math.pi * step / 20))
        optimizer.zero_grad()
        loss = layer(x).square().mean() * math.sqrt(step + 1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    check_training(fn, layer, 14, device)


def test_what_a_number_reaches_may_change_between_calls(device: torch.device) -> None:
    limit = [5]

    def fn(x: torch.Tensor, k: int) -> torch.Tensor:
        return x * 2 if k > limit[0] else x

    jitted = pygraph.jit(fn)
    x = torch.arange(3.0).to(device)
    for k in (1, 7, 2, 8):
        assert torch.equal(jitted(x, k), fn(x, k))
    limit[0] = 1
    for k in (1, 7, 2, 8):
        assert torch.equal(jitted(x, k), fn(x, k))


# ---- numbers that are computed -------------------------------------------------------------------------------------


COMPUTED: dict[str, Callable[..., Any]] = {
    "sqrt": lambda x, k: x / math.sqrt(k),
    "cosine": lambda x, k: x * (0.5 * (1 + math.cos(math.pi * k / 100))),
    "exp": lambda x, k: x * math.exp(-k / 10) + math.log1p(k),
    "square": lambda x, k: x * k**2,
    "root": lambda x, k: x * k**0.5,
    "inverse": lambda x, k: x * (1 / k),
    "round": lambda x, k: x * round(k * 0.3),
    "round to digits": lambda x, k: x * round(k / 7, 2),
    "floor": lambda x, k: x * math.floor(k / 7) + math.ceil(k / 3),
    "rest": lambda x, k: x * (k % 0.3) + k // 0.7,
    "divmod": lambda x, k: x * divmod(k, 4)[0] + divmod(k, 4)[1],
    "numpy": lambda x, k: x * np.sqrt(k) + np.cos(k),
    "two": lambda x, k: x * math.hypot(k, k + 1) - math.atan2(k, 3),
    "of computed": lambda x, k: x * (math.sin(k * 0.1) * 2) ** 2,
    "gcd": lambda x, k: x * math.gcd(k, 12) if isinstance(k, int) else x,
    "full": lambda x, k: torch.full_like(x, math.sqrt(k)),
    "tensor": lambda x, k: x + torch.tensor(math.sqrt(k), device=x.device),
    "type": lambda x, k: x * (2.0 if isinstance(math.sqrt(k), float) else 3.0) * (k if isinstance(k * 2, int) else 1),
    "returned": lambda x, k: math.sqrt(k) * 2,
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_numbers_that_are_computed_are_live(device: torch.device, kind: str) -> None:
    fn = COMPUTED[kind]
    jitted = pygraph.jit(fn)
    x = torch.arange(3.0).to(device)
    for k in range(1, 13):
        check(fn, jitted, x, k)
    assert jitted.cache_info().misses <= 3
    assert jitted.explain().to_dict()["fallbacks"] == []


NUMBERS = st.one_of(
    st.integers(-20, 20), st.integers(-(2**70), 2**70), st.floats(), st.booleans(),
    st.sampled_from([0, -0.0, 0.0, math.nan, math.inf, -math.inf, 2**63 - 1, -(2**63), 1e-320]),
    st.integers(-20, 20).map(np.int64), st.floats(width=32).map(np.float32), st.floats().map(np.float64),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, of what is no number
@pytest.mark.parametrize(
    "kind",
    [
        "sqrt",
        "cosine",
        "exp",
        "square",
        "root",
        "inverse",
        "round",
        "rest",
        "divmod",
        "numpy",
        "of computed",
        "type",
        "returned",
    ],
)
@given(numbers=st.lists(NUMBERS, min_size=3, max_size=6))
@settings(max_examples=examples(4, 60), deadline=None)
def test_computed_numbers_are_those_of_python(device: torch.device, kind: str, numbers: list[Any]) -> None:
    fn = COMPUTED[kind]
    jitted = pygraph.jit(fn)
    x = torch.arange(3.0, dtype=torch.float64).to(device)
    for number in numbers:
        check(fn, jitted, x, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_computed_integer_of_more_than_64_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Operations take none; a replay would."""
    fn = COMPUTED["square"]
    jitted = pygraph.jit(fn)
    x = torch.arange(3.0).to(device, dtype)
    for number in (1, 2, 2**32, 3, 2**33, 2**31 - 1):
        check(fn, jitted, x, number)


@pytest.mark.parametrize("kind", [name for name in DECIDING if name != "rounded"])
@given(numbers=st.lists(NUMBERS, min_size=3, max_size=6))
@settings(max_examples=examples(4, 60), deadline=None)
def test_decisions_are_those_of_python(device: torch.device, kind: str, numbers: list[Any]) -> None:
    fn, _ = DECIDING[kind]
    jitted = pygraph.jit(fn)
    x = torch.arange(3.0, dtype=torch.float64).to(device)
    for number in numbers:
        check(fn, jitted, x, number)


# ---- small tensors of the host -------------------------------------------------------------------------------------


def schedule(ac: torch.Tensor, x: torch.Tensor, t: Any) -> torch.Tensor:
    """One step of a diffusion model, as its schedulers write it."""
    a = ac[t]
    before = ac[t - 1] if t > 0 else torch.tensor(1.0)
    x0 = (x - (1 - a) ** 0.5 * x.sin()) / a**0.5
    return before**0.5 * x0 + (1 - before) ** 0.5 * x.sin()


@pytest.mark.parametrize("kind", ["int", "numpy", "tensor"])
def test_tensors_of_the_host_that_are_only_looked_at(device: torch.device, kind: str) -> None:
    ac = torch.linspace(0.99, 0.1, 20).cumprod(0)
    make: dict[str, Callable[[int], Any]] = {"int": int, "numpy": np.int64, "tensor": torch.tensor}
    jitted = pygraph.jit(lambda x, t: schedule(ac, x, t))
    for t in range(9, -1, -1):
        x = torch.randn(3, generator=torch.Generator().manual_seed(t)).to(device)
        expected = schedule(ac, x, make[kind](t))
        torch.testing.assert_close(jitted(x, make[kind](t)).cpu(), expected.cpu())
        ac[t] *= 0.5  # which the next call reads
        expected = schedule(ac, x, make[kind](t))
        torch.testing.assert_close(jitted(x, make[kind](t)).cpu(), expected.cpu())
    assert jitted.cache_info().captures <= 3


def test_a_position_outside_of_a_tensor_of_the_host(device: torch.device) -> None:
    ac = torch.linspace(0.99, 0.1, 5)
    jitted = pygraph.jit(lambda x, t: x * ac[t])
    x = torch.ones(3).to(device)
    for t in (1, 2, 3, -1, 4):
        assert torch.equal(jitted(x, t), x * ac[t])
    for t in (5, -6):
        with pytest.raises(IndexError):
            jitted(x, t)


def part_of_a_part(data: torch.Tensor, i: Any, n: Any) -> torch.Tensor:
    return data[:n][i] * 2


def batches(data: torch.Tensor, i: Any, n: Any) -> torch.Tensor:
    n = min(max(2, int(n)), data.size(0) - 1 - i)
    return data[i : i + n] * 2 - data[i + 1 : i + 1 + n]


@pytest.mark.parametrize("fn", [part_of_a_part, batches])
def test_positions_in_what_has_a_size_that_is_a_number(device: torch.device, fn: Callable[..., Any]) -> None:
    fast, data = pygraph.jit(fn), torch.arange(36.0, device=device).reshape(12, 3)
    for n, i in ((3, 2), (3, 1), (4, 3), (5, 2), (5, 4), (6, 0), (4, 1), (7, 6), (8, 5), (6, 3), (5, 1)):
        check(fn, fast, data, i, n)


# ---- what does not know live numbers -------------------------------------------------------------------------------


STRICT: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "integer of bits": lambda x, k: x * k if isinstance(k & 3, int) else x * 3,
    "integer of a shift": lambda x, k: x * k if isinstance(1 << k, int) and isinstance(k >> 1, int) else x * 3,
    "generator": lambda x, k: x * torch.Generator().manual_seed(k).initial_seed(),
    "number of threads": lambda x, k: (torch.set_num_threads(1 + 0 * k), x * k)[1],
    "clip of NumPy's": lambda x, k: x * np.clip(k, 2, 5) + np.interp(k, [0, 10], [0, 1]),
}


@pytest.mark.parametrize("kind", STRICT)
def test_numbers_that_code_in_c_is_given(device: torch.device, kind: str) -> None:
    fn = STRICT[kind]
    jitted = pygraph.jit(fn, strict=True)
    x = torch.arange(3.0).to(device)
    for k in range(1, 7):
        check(fn, jitted, x, k)


@pytest.mark.parametrize("generator", [torch.default_generator, None])
def test_a_seed_is_refused_as_any_other(device: torch.device, generator: torch.Generator | None) -> None:
    def fn(x: torch.Tensor, k: int) -> torch.Tensor:
        (generator or torch).manual_seed(k)
        return x * torch.rand(3).to(x.device)

    jitted = pygraph.jit(fn)
    x = torch.arange(3.0).to(device)
    for k in range(1, 5):
        check(fn, jitted, x, k)
        jitted(x, k)
        assert torch.initial_seed() == k
    reasons = [fallback.reason for fallback in jitted.explain().counted_fallbacks()]
    assert reasons
    assert not any("Live" in reason for reason in reasons)


def test_a_warning_shows_the_number(device: torch.device) -> None:
    def fn(x: torch.Tensor, k: float) -> torch.Tensor:
        warnings.warn(f"{k} {k!r} {[k]}", stacklevel=1)
        return x * k

    fast, x = pygraph.jit(fn), torch.ones(3, device=device)
    for k in (0.5, 1.5, 2.5):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            fast(x, k)
        assert {str(warning.message) for warning in shown} == {f"{k} {k} [{k}]"}
