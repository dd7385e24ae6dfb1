"""Objects and NumPy arrays among the arguments: their tensors and numbers are arguments like any others.

Each program runs on objects that are made anew for each call, as a whole and with what it leaves behind compared with
eager; then it is said which objects stay whole, and why.
"""

from __future__ import annotations

import dataclasses
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pygraph
from tests.described import check, described
from tests.unit.calls.opened_programs import PROGRAMS, Batch, Encoding, Encodings, Filter, Plain, array

pytestmark = pytest.mark.usefixtures("native")


def maker(device: torch.device) -> Callable[[int], Tensor]:
    return lambda seed: torch.randn(4, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("name", PROGRAMS)
def test_new_objects_are_no_new_kinds_of_calls(device: torch.device, name: str) -> None:
    program, make = PROGRAMS[name], maker(device)
    fast = check(program.function, lambda: [program.arguments(make, i) for i in range(6)])
    info = fast.cache_info()
    if program.captures < 0:
        assert info.hits > 3
    else:
        assert (info.captures, info.hits) == (program.captures, 6 - program.captures)


def test_leaves_have_their_names(device: torch.device) -> None:
    make = maker(device)
    fast = pygraph.jit(lambda b, batches: b.x[: b.weight] * batches[0].more["k"][: b.weight])
    for count in (2, 3):
        fast(Batch(make(0), count), [Batch(make(1), 1.0, {"k": make(2)})])
    text = str(fast.explain())
    assert "args[0].x: " in text
    assert "args[1][0].more['k']: " in text
    assert "args[0].weight is 3 and was 2" in fast.explain_misses()


def test_gradients_of_what_objects_hold(device: torch.device) -> None:
    make, weight = maker(device), torch.ones(4, device=device).requires_grad_()

    def loss(batch: Batch) -> Tensor:
        return (batch.x * weight * batch.weight).square().sum()

    fast = pygraph.jit(loss)
    for i in range(4):
        x, mine = make(i).requires_grad_(), make(i).requires_grad_()
        expected = torch.autograd.grad(loss(Batch(x, float(i))), [x, weight])
        found = torch.autograd.grad(fast(Batch(mine, float(i))), [mine, weight])
        torch.testing.assert_close(found, expected)
    assert fast.cache_info().captures == 2


def test_a_training_step_on_a_dataclass(device: torch.device) -> None:
    make = maker(device)

    def trained(jit: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        state = types.SimpleNamespace(steps=0, loss=None)

        def step(batch: Batch, state: Any) -> Tensor:
            optimizer.zero_grad()
            loss = (model(batch.x) - batch.more).square().mean() * batch.weight
            loss.backward()
            optimizer.step()
            state.steps += 1
            state.loss = loss.detach()
            return state.loss

        run = jit(step)
        losses = [run(Batch(make(i), 1.0 + i, make(i + 1)), state) for i in range(6)]
        assert state.steps == 6
        assert state.loss is losses[-1]
        return losses

    torch.testing.assert_close(trained(pygraph.jit), trained(lambda step: step))


def test_transforms_of_torch_func(device: torch.device) -> None:
    make, fast = maker(device), pygraph.jit(lambda b: (b.x * b.weight).sin())
    for i in range(3):
        x = torch.stack([make(i), make(i + 1)])
        expected = torch.func.vmap(lambda row: (row * 2.0).sin())(x)
        torch.testing.assert_close(torch.func.vmap(lambda row: fast(Batch(row, 2.0)))(x), expected)


def test_objects_that_are_the_same_at_every_call(device: torch.device) -> None:
    make = maker(device)
    expected, found = Filter(make(0)), Filter(make(0))
    fast = pygraph.jit(Filter.step)
    for i in range(6):
        torch.testing.assert_close(fast(found, make(i)), expected.step(make(i)))
    assert described(found) == described(expected)
    assert fast.cache_info().captures == 1


def test_a_static_object_stays_whole(device: torch.device) -> None:
    make = maker(device)
    fast, batch = pygraph.jit(lambda x, b: x * b.x, static_argnums=1), Plain(x=make(1))
    for i in range(3):
        torch.testing.assert_close(fast(make(i), batch), make(i) * batch.x)
    assert fast.cache_info().captures == 1


# ---- objects that stay whole ---------------------------------------------------------------------------------------


def test_an_object_that_is_reached_otherwise(device: torch.device) -> None:
    make = maker(device)
    known = [Batch(make(9))]

    def function(batch: Batch) -> Tensor:
        return batch.x * 2 + 1 if any(batch is one for one in known) else batch.x + 1

    check(function, lambda: [(known[0] if i % 2 else Batch(make(i)),) for i in range(6)])


def test_a_weak_set_of_objects(device: torch.device) -> None:
    make, seen = maker(device), weakref.WeakSet[Plain]()
    batches = [Plain(x=make(i)) for i in range(4)]
    seen.update(batches[::2])
    check(lambda b: b.x * 2 + 1 if b in seen else b.x + 1, lambda: [(batch,) for batch in batches])


def test_ids_of_objects(device: torch.device) -> None:
    make = maker(device)
    batches = [Plain(x=make(i)) for i in range(4)]
    ids = set(map(id, batches[::2]))
    check(lambda b: b.x * 2 + 1 if id(b) in ids else b.x + 1, lambda: [(batch,) for batch in batches])


def test_a_tensor_that_is_closed_over_too(device: torch.device) -> None:
    make = maker(device)
    shared = make(0)

    def function(batch: Batch) -> Tensor:
        batch.x.add_(1)
        return shared * 2 + (1 if batch.x is shared else 0)

    fast = pygraph.jit(function)
    for i in range(4):
        x = shared if i % 2 else make(i)
        before = shared.clone()
        found = fast(Batch(x))
        expected = (before + 1 if i % 2 else before) * 2 + i % 2
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, given: given.append(b) or b.x * 2,
        lambda b, given: given.append(b.more) or b.x * 2,
        lambda b, given: (Batch(b.x * 2, b), 1),
        lambda b, given: (b.halved, b.x + 1),
        lambda b, given: (lambda: b, b.x + 1)[1:],
    ],
    ids=["stored", "part stored", "in a new object", "bound method", "closure"],
)
def test_what_is_given_away_is_the_callers_own(device: torch.device, function: Callable[..., Any]) -> None:
    make = maker(device)
    for mine in (False, True):
        given: list[Any] = []
        run = pygraph.jit(function) if mine else function
        for i in range(4):
            batch = Plain(x=make(i), more={"k": 1})
            result = run(batch, given)
            assert all(one is batch or one is batch.more for one in given[i:])
            if isinstance(result[0], Batch):
                assert result[0].weight is batch
            elif callable(result[0]):
                assert result[0].__self__ is batch


def test_an_inner_object_that_is_moved_elsewhere(device: torch.device) -> None:
    make, held = maker(device), [None]

    def function(batch: Batch) -> Tensor:
        held[0], batch.more = batch.more, None
        return batch.x * 2

    fast = pygraph.jit(function)
    for i in range(4):
        inner = Plain(x=make(i))
        fast(Batch(make(i), 1.0, inner))
        assert held[0] is inner


class Ended:
    ends = 0

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __del__(self) -> None:
        Ended.ends += 1


def test_only_the_callers_objects_are_finalized(device: torch.device) -> None:
    make, fast, Ended.ends = maker(device), pygraph.jit(lambda b: b.x * 2 + 1), 0
    objects = [Ended(make(i)) for i in range(3)]
    for one in objects:
        torch.testing.assert_close(fast(one), one.x * 2 + 1)
    assert Ended.ends == 0


def test_locks_are_the_callers(device: torch.device) -> None:
    make, lock = maker(device), threading.Lock()

    def function(plain: Plain) -> Any:
        with plain.lock:
            assert lock.locked()
            return plain.x * 2 + 1

    check(function, lambda: [(Plain(x=make(i), lock=lock),) for i in range(3)])


class Missing:
    """A class of which there is one object."""


MISSING = Missing()


def test_values_that_are_only_compared_by_identity(device: torch.device) -> None:
    make = maker(device)

    def function(batch: Batch) -> Tensor:
        return batch.x * 2 + 1 if batch.more is MISSING else batch.x + 1

    values = (Encoding(1), MISSING, Missing(), MISSING)
    check(function, lambda: [(Batch(make(i), 1.0, value),) for i, value in enumerate(values)])


def test_a_sentinel_of_no_class_of_its_own(device: torch.device) -> None:
    make, missing = maker(device), object()

    def function(batch: Batch) -> Tensor:
        return batch.x * 2 + 1 if batch.more is missing else batch.x + 1

    fast = pygraph.jit(function)
    for i in range(4):
        batch = Batch(make(i), 1.0, missing if i % 2 else object())
        torch.testing.assert_close(fast(batch), function(batch))


def test_objects_are_free_after_a_call(device: torch.device) -> None:
    make, fast = maker(device), pygraph.jit(lambda b, x: b.x * x + 1)
    for i in range(4):
        batch = Plain(x=make(i))
        held, shown = weakref.ref(batch), weakref.ref(batch.x)
        fast(batch, make(i))
        del batch
        assert held() is None
        assert i < 2 or shown() is None


def test_values_that_are_read_after_all(device: torch.device) -> None:
    make = maker(device)

    def function(b: Encodings) -> Tensor:
        return b["x"] * 2 + 1 if b[0].ids else b["x"] + 1

    check(function, lambda: [(Encodings({"x": make(i)}, [Encoding(i % 2)]),) for i in range(4)])


def test_all_attributes_are_read(device: torch.device) -> None:
    make = maker(device)

    def function(batch: Batch) -> Tensor:
        return batch.x * 2 + sum(value == "1" for value in vars(batch).values())

    check(function, lambda: [(Batch(make(i), 1.0, str(i)),) for i in range(4)])


def test_a_dataclass_with_a_model(device: torch.device) -> None:
    @dataclasses.dataclass
    class Trainer:
        model: torch.nn.Module
        steps: int = 0

    torch.manual_seed(0)
    make, model = maker(device), torch.nn.Linear(4, 4).to(device)

    def function(trainer: Trainer, x: Tensor) -> Tensor:
        trainer.steps += 1
        with torch.no_grad():
            return trainer.model(x) * trainer.steps

    mine, eager, fast = Trainer(model), Trainer(model), pygraph.jit(function)
    for i in range(6):
        torch.testing.assert_close(fast(mine, make(i)), function(eager, make(i)))
    assert mine.steps == 6
    assert fast.cache_info().captures == 1


# ---- arrays that are read ------------------------------------------------------------------------------------------


def swallowed(a: np.ndarray, x: Tensor) -> Tensor:
    try:
        factor = float(a.mean())
    except Exception:
        factor = 1.0
    return x * factor + 1


def stored(a: np.ndarray, x: Tensor) -> Tensor:
    a[0] = 5.0
    return x * 2 + 1


@pytest.mark.parametrize(
    "function",
    [
        lambda a, x: x * float(a.mean()) + 1,
        lambda a, x: x * float(a[0]) + 1,
        lambda a, x: x * torch.tensor(a.cumsum(), device=x.device) + 1,
        lambda a, x: x * torch.from_numpy(np.asarray(a)).to(x.device) + 1,
        lambda a, x: x * torch.tensor(np.stack([a, a]), device=x.device).sum() + 1,
        lambda a, x: x * 2 + 1 if a.any() else x,
        lambda a, x: x * 2 + (1 if 0.5 in a else 0),
        lambda a, x: x * torch.tensor([a, a]).to(x.device).sum(),
        lambda a, x: x * float(np.max(a)) + 1,
        lambda a, x: (x * 2 + 1, f"{a}"),
        swallowed,
        stored,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list")
def test_other_uses_of_an_array_are_as_in_eager(device: torch.device, function: Callable[..., Any]) -> None:
    make = maker(device)
    fast = check(function, lambda: [(array(i, 4), make(i)) for i in range(4)])
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert "NumPy array" in fallback["reason"] or "LiveArray" in fallback["reason"]


@pytest.mark.parametrize("function", [lambda a, x: x * sum(a.tolist()) + 1, lambda a, x: x * a[:1].item() + 1])
def test_numbers_of_an_array_are_live(device: torch.device, function: Callable[..., Any]) -> None:
    make = maker(device)
    fast = check(function, lambda: [(array(i, 4), make(i)) for i in range(4)])
    assert fast.cache_info().captures == 1


def test_an_array_is_updated_through_a_tensor(device: torch.device) -> None:
    def function(a: np.ndarray, x: Tensor) -> Tensor:
        torch.from_numpy(a).add_(1)
        return x * 2 + 1

    check(function, lambda: [(array(i, 4), maker(device)(i)) for i in range(4)])


def test_an_array_that_is_reached_otherwise(device: torch.device) -> None:
    make, known = maker(device), array(9, 4)

    def function(a: np.ndarray, x: Tensor) -> Tensor:
        shown = torch.from_numpy(a).to(x.device) * x
        return shown * 2 + torch.from_numpy(known).to(x.device) if a is known else shown + 1

    fast = pygraph.jit(function)
    for i in range(6):
        a = known if i % 2 else array(i, 4)
        torch.testing.assert_close(fast(a, make(i)), function(a, make(i)))


def test_arrays_that_are_not_tensors(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    fast = pygraph.jit(lambda x, a: x * float(a.sum()) + 1)
    constant = np.ones(2, np.float32)
    constant.setflags(write=False)
    for a in (constant, np.ones(2, ">f4"), np.ones(4, np.float32)[::-2], np.array([1, 1], object)):
        torch.testing.assert_close(fast(x, a), torch.full((2,), 3.0, device=device))


# ---- any objects ---------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.sampled_from(["x", 2, 2.5, True, None, "text"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        st.tuples(inner, inner),
        st.builds(lambda value: ("plain", value), inner),
        st.builds(lambda value: ("batch", value), inner),
    ),
    max_leaves=6,
)


def made(shape: Any, make: Callable[[int], Tensor], i: int) -> Any:
    """An object of a drawn shape, with other tensors at each call."""
    if shape == "x":
        return make(i)
    if isinstance(shape, list):
        return [made(one, make, i + n) for n, one in enumerate(shape)]
    if isinstance(shape, dict):
        return {key: made(one, make, i + n) for n, (key, one) in enumerate(shape.items())}
    if isinstance(shape, tuple) and shape[0] in ("plain", "batch"):
        inner = made(shape[1], make, i + 1)
        return Plain(x=make(i), more=inner) if shape[0] == "plain" else Batch(make(i), 2.0, inner)
    return tuple(made(one, make, i + n) for n, one in enumerate(shape)) if isinstance(shape, tuple) else shape


def total(value: Any) -> Any:
    if isinstance(value, (Tensor, int, float)):
        return value * 2
    if isinstance(value, (list, tuple)):
        return sum(map(total, value))
    if isinstance(value, dict):
        return sum(map(total, value.values()))
    return total(value.x) + total(value.more) if isinstance(value, (Plain, Batch)) else 0


@settings(max_examples=25, deadline=None)
@given(shape=VALUES, writes=st.booleans())
def test_any_object_is_as_in_eager(device: torch.device, shape: Any, writes: bool) -> None:
    make = maker(device)

    def function(batch: Batch) -> Any:
        result = total(batch)
        if writes:
            batch.more, batch.weight = batch.x * 2, batch.more
        return result, batch.weight

    check(function, lambda: [(Batch(make(i), 1.0, made(shape, make, i)),) for i in range(3)])
