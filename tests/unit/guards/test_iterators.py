"""Iterators that were there before a call: each call takes one item, as in eager, wherever the iterator lies."""

from __future__ import annotations

import collections
import csv
import functools
import io
import itertools
import random
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pygraph
from pygraph.errors import FallbackError, TraceError

HERE: Any = sys.modules[__name__]
SHARED: Any = None


def _numbers() -> Iterator[float]:
    yield from map(float, range(1, 1000))


def _batches() -> Any:
    return torch.utils.data.DataLoader(torch.arange(64.0).reshape(32, 2), batch_size=2)


class Sliced:
    """Slots, for one."""

    __slots__ = ("source",)

    def __init__(self, source: Any) -> None:
        self.source = source


class Trainer:
    batches: Any = None

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.batches)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Counting:
    """An iterator whose state is an attribute."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


ITERATORS: dict[str, Callable[[], Any]] = {
    "generator": _numbers,
    "list": lambda: iter([float(k) for k in range(1000)]),
    "range": lambda: iter(range(1000)),
    "dict view": lambda: iter(dict.fromkeys(range(1000)).keys()),
    "set": lambda: iter(set(range(1000))),
    "reversed": lambda: reversed(range(1000)),
    "count": lambda: itertools.count(),
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "chain": lambda: itertools.chain([1.0], range(1000)),
    "islice": lambda: itertools.islice(range(1000), 900),
    "tee": lambda: itertools.tee(range(1000))[1],
    "map": lambda: map(float, range(1000)),
    "filter": lambda: filter(None, range(1000)),
    "callable": lambda: iter(functools.partial(next, itertools.count()), None),
    "np.nditer": lambda: map(float, np.nditer(np.arange(1000.0))),
    "np.flat": lambda: map(float, np.arange(1000.0).flat),
    "of a class": Counting,
}


def _places(it: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Functions that take an item from an iterator, by where it lies."""
    global SHARED
    SHARED = it
    trainer, sliced = Trainer(it), Sliced(it)
    items, entries, pair, nested = [it], {"it": it}, (1, it), [((it,),)]
    deque = collections.deque([it])
    taken, bound = functools.partial(next, it), it.__next__

    class Holder:
        source = it

    def default(x: torch.Tensor, it: Any = it) -> torch.Tensor:
        return x * next(it)

    def keyword(x: torch.Tensor, *, it: Any = it) -> torch.Tensor:
        return x * next(it)

    def loop(x: torch.Tensor) -> torch.Tensor:
        for item in it:
            return x * item
        return x

    def caught(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * next(it)
        except Exception:
            return x

    return {
        "closure": lambda x: x * next(it),
        "global": lambda x: x * next(SHARED),
        "global of a module": lambda x: x * next(HERE.SHARED),
        "attribute": lambda x: x * next(trainer.batches),
        "method": trainer.step,
        "slot": lambda x: x * next(sliced.source),
        "list": lambda x: x * next(items[0]),
        "dict": lambda x: x * next(entries["it"]),
        "tuple": lambda x: x * next(pair[1]),
        "tuples in a list": lambda x: x * next(nested[0][0][0]),
        "deque": lambda x: x * next(deque[0]),
        "class": lambda x: x * next(Holder.source),
        "default": default,
        "default of a keyword": keyword,
        "partial": lambda x: x * taken(),
        "bound": lambda x: x * bound(),
        "zip": lambda x: x * next(zip(it, it, strict=False))[0],
        "slice": lambda x: x * next(itertools.islice(it, 1)),
        "loop": loop,
        "caught": caught,
        "with a default": lambda x: x * next(it, 0),
    }


def _check(fast: Any, slow: Any, device: torch.device, calls: int = 5) -> None:
    """That a transformed function and another one that uses other iterators give the same, call by call."""
    x = torch.ones(2, device=device)
    for _ in range(calls):
        assert fast(x).tolist() == slow(x).tolist()


@pytest.mark.parametrize("place", sorted(_places(iter([]))))
def test_an_iterator_gives_the_next_item_wherever_it_lies(place: str, native: bool, device: torch.device) -> None:
    fast_at, slow_at = _numbers(), _numbers()
    x = torch.ones(2, device=device)
    for _ in range(5):
        slow = _places(slow_at)[place](x)
        fast = pygraph.jit(_places(fast_at)[place])
        assert fast(x).tolist() == slow.tolist()
    expected, fast = _places(slow_at)[place], pygraph.jit(_places(fast_at)[place])
    if place.startswith("global"):  # there is one for both
        values = [fast(x)[0].item() for _ in range(4)]
        assert values == [values[0] + k for k in range(4)]
    else:
        _check(fast, expected, device)
    assert "a generator" in str(fast.explain())
    assert "test_iterators.py" in str(fast.explain())


@pytest.mark.parametrize("kind", sorted(ITERATORS))
def test_every_kind_of_iterator_moves_on_by_one_item_a_call(kind: str, native: bool, device: torch.device) -> None:
    fast_at, slow_at = ITERATORS[kind](), ITERATORS[kind]()
    _check(pygraph.jit(lambda x: x * next(fast_at)), lambda x: x * next(slow_at), device)


DRAWS: dict[str, Callable[[], Callable[[], Any]]] = {
    "random": lambda: (lambda rng: lambda: rng.random())(random.Random(0)),
    "uniform": lambda: (lambda rng: lambda: rng.uniform(0, 2))(random.Random(0)),
    "shuffle": lambda: (lambda rng: lambda: rng.sample(range(100), 3)[0])(random.Random(0)),
    "bound": lambda: random.Random(0).random,
    "numpy": lambda: (lambda rng: lambda: float(rng.random()))(np.random.default_rng(0)),
    "numpy's older ones": lambda: (lambda rng: lambda: float(rng.rand()))(np.random.RandomState(0)),
    "file": lambda: (lambda file: lambda: float(file.readline()))(io.StringIO("\n".join(map(str, range(100))))),
    "lines": lambda: (lambda file: lambda: float(next(file)))(io.StringIO("\n".join(map(str, range(100))))),
    "csv": lambda: (lambda rows: lambda: float(next(rows)[0]))(csv.reader(map(str, range(100)))),
    "csv by name": lambda: (lambda rows: lambda: float(next(rows)["k"]))(csv.DictReader(["k", *map(str, range(100))])),
    "send": lambda: (lambda gen: lambda: gen.send(None))(_numbers()),
    "loader's iterator": lambda: (lambda it: lambda: next(it)[0, 0].item())(iter(_batches())),
}


@pytest.mark.parametrize("kind", sorted(DRAWS))
def test_what_is_drawn_or_read_is_another_at_every_call(kind: str, native: bool, device: torch.device) -> None:
    fast_draw, slow_draw = DRAWS[kind](), DRAWS[kind]()
    _check(pygraph.jit(lambda x: x * fast_draw()), lambda x: x * slow_draw(), device)


def test_secrets_are_not_baked_in(device: torch.device) -> None:
    fast = pygraph.jit(lambda x: x * secrets.randbelow(2**20))
    assert len({fast(torch.ones(1, device=device)).item() for _ in range(8)}) > 1


def test_a_loop_over_a_loader_begins_anew_at_every_call(native: bool, device: torch.device) -> None:
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)

    def total(x: torch.Tensor) -> torch.Tensor:
        for position, batch in enumerate(loader):
            x = x + batch.to(x.device) * (position + 1)
        return x

    fast, x = pygraph.jit(total), torch.ones(2, device=device)
    torch.manual_seed(0)
    expected = [total(x).tolist() for _ in range(4)]
    torch.manual_seed(0)
    assert [fast(x).tolist() for _ in range(4)] == expected
    assert "DataLoader" in str(fast.explain())


def test_an_iterator_that_is_only_reachable_does_no_harm(native: bool, device: torch.device) -> None:
    trainer = Trainer(_numbers())
    pair = (trainer, _numbers())

    def fn(x: torch.Tensor) -> torch.Tensor:
        return trainer.scaled(x) + len(pair)

    fast, x = pygraph.jit(fn, strict=True), torch.ones(2, device=device)
    for _ in range(4):
        assert fast(x).tolist() == [4.0, 4.0]
    assert fast.cache_info().captures == 1
    assert next(trainer.batches) == 1.0
    assert next(pair[1]) == 1.0
    assert type(trainer.batches) is type(_numbers())


def test_an_iterator_that_is_stored_and_returned_is_itself(device: torch.device) -> None:
    it = _numbers()
    trainer = Trainer(it)

    def fn(x: torch.Tensor) -> Any:
        trainer.kept = trainer.batches  # type: ignore[attr-defined]
        return x * 2, trainer.batches, isinstance(trainer.batches, type(it))

    fast, x = pygraph.jit(fn), torch.ones(2, device=device)
    for _ in range(4):
        _, returned, is_generator = fast(x)
        assert returned is it
        assert is_generator
        assert trainer.kept is it  # type: ignore[attr-defined]
    assert next(it) == 1.0


def test_an_iterator_as_argument_is_never_baked_in(native: bool, device: torch.device) -> None:
    fast = pygraph.jit(lambda x, it: x * next(it))
    it, x = _numbers(), torch.ones(1, device=device)
    assert [fast(x, it).item() for _ in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [fast(x, it=it).item() for _ in range(2)] == [6.0, 7.0]
    assert "generator" in str(fast.explain())
    assert fast.cache_info().size == 0


def test_strict_says_where_and_what_to_do(device: torch.device) -> None:
    it = _numbers()
    fast = pygraph.jit(lambda x: x * next(it), strict=True)
    with pytest.raises(FallbackError, match=r"a generator that was there .*test_iterators.py:\d+.*Pass the batch"):
        fast(torch.ones(1, device=device))
    assert next(it) == 1.0


def test_another_thread_takes_from_the_iterator_during_a_trace(device: torch.device) -> None:
    trainer = Trainer(_numbers())
    inside, done = threading.Event(), threading.Event()
    taken: list[float] = []

    def take() -> None:
        inside.wait(20)
        taken.append(next(trainer.batches))
        taken.extend(itertools.islice(trainer.batches, 2))
        done.set()

    def fn(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        done.wait(20)
        return trainer.scaled(x)

    thread = threading.Thread(target=take)
    thread.start()
    pygraph.jit(fn)(torch.ones(1, device=device))
    thread.join()
    assert taken == [1.0, 2.0, 3.0]
    assert next(trainer.batches) == 4.0


def test_an_iterator_as_argument_inside_a_gradient(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, it: (x * next(it)).sum())
    it, x = _numbers(), torch.ones(1, device=device)
    assert [torch.func.grad(fast)(x, it).item() for _ in range(3)] == [1.0, 2.0, 3.0]
    leaf = x.clone().requires_grad_()
    fast(leaf, it).backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 4.0


def test_a_program_is_not_made_of_an_iterator_that_is_an_argument(device: torch.device) -> None:
    it, x = _numbers(), torch.ones(1, device=device)
    with pytest.raises(TraceError, match="a generator that was there before the call"):
        pygraph.trace(lambda x, it: x * next(it))(x, it)
    assert next(it) == 1.0


def test_a_generator_that_the_function_makes_with_a_seed_is_part_of_the_graph(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * random.Random(3).random()

    fast, x = pygraph.jit(fn, strict=True), torch.ones(1, dtype=torch.float64, device=device)
    assert [fast(x).item() for _ in range(3)] == [random.Random(3).random()] * 3


def test_what_a_module_draws_when_it_is_imported_is_its_own(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries make generators when they are imported, and torch imports some when a trace needs them first."""
    (tmp_path / "drawing_at_import.py").write_text("import random\nONE = 1 if random.Random().random() < 2 else 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def fn(x: torch.Tensor) -> torch.Tensor:
        import drawing_at_import  # pyright: ignore[reportMissingImports]

        return x + drawing_at_import.ONE  # pyright: ignore[reportUnknownMemberType]

    fast, x = pygraph.jit(fn), torch.ones(1, device=device)
    try:
        assert [fast(x).item() for _ in range(4)] == [2.0] * 4
    finally:
        del sys.modules["drawing_at_import"]
    assert fast.cache_info().captures == 1, str(fast.explain())
