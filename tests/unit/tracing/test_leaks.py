"""Nothing fake survives a trace: whatever a function stores its values in holds what eager code would have there."""

from __future__ import annotations

import asyncio
import builtins
import collections
import contextvars
import dataclasses
import functools
import itertools
import logging
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

import pygraph
from pygraph.errors import StateChangeError
from pygraph.tracing import leaks
from pygraph.tracing.leak_search import LeakSearch
from pygraph.tracing.references import Reference, packages_of
from tests import extent
from tests.fakes import assert_no_fake_left

Tensor = torch.Tensor
NUMBERS = itertools.count()
Case = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]


@dataclasses.dataclass(slots=True)
class Slots:
    """An object without a dict."""

    last: Any = None


@dataclasses.dataclass
class Node:
    """A chain of objects."""

    inner: Any = None
    count: int = 0
    last: Any = None


class Counting(dict[str, Any]):
    """A dict of a class of its own."""


class Weakly:
    """What weak references refer to."""


class Keeping(logging.Handler):
    """A handler that keeps its records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.records.append(record)


def chain(length: int) -> Node:
    """The first of many objects, each in an attribute of the one before."""
    node = Node()
    for _ in range(length):
        node = Node(node)
    return node


def last(node: Node) -> Node:
    """The last of a chain."""
    while node.inner is not None:
        node = node.inner
    return node


def storing(store: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """A function that stores something that it computes."""

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        store(y)
        return y + 1

    return fn


def lru_cache(device: torch.device, maxsize: int | None) -> Case:
    """Results behind functools.lru_cache, beside a singleton."""

    @functools.lru_cache(maxsize=maxsize)
    def freqs(n: int) -> Tensor:
        return torch.arange(n, device=device) * 1.0

    single = freqs(1)

    def fn(x: Tensor) -> Tensor:
        return x + freqs(3)

    return fn, lambda: (freqs(3), freqs(1) is single, freqs.cache_info().currsize)


def lru_cache_of_pairs(device: torch.device) -> Case:
    """Several tensors in one result, of which one is a view of the other, with keywords and a bound that is reached."""

    @functools.lru_cache(maxsize=2)
    def tables(n: int, *, base: float = 2.0) -> dict[str, Tensor]:
        angles = torch.arange(n, device=device) * base
        return {"angles": angles, "first": angles[:1]}

    def fn(x: Tensor) -> Tensor:
        return x + tables(3, base=3.0)["angles"] + tables(3)["first"]

    tables(7), tables(8)
    return fn, lambda: (tables(3), tables(3, base=3.0), tables.cache_info().currsize)


def lru_cache_of_methods(device: torch.device) -> Case:
    """Results per instance."""

    class Rope:
        @functools.lru_cache  # noqa: B019
        def freqs(self, n: int) -> Tensor:
            return torch.arange(n, device=device) * 1.0

    rope = Rope()
    return lambda x: x + rope.freqs(3), lambda: rope.freqs(3)


def lru_cache_by_tensor(device: torch.device) -> Case:
    """A tensor that depends on an argument, by the argument."""
    del device

    @functools.lru_cache
    def double(x: Tensor) -> Tensor:
        return x * 2

    return lambda x: double(x) + 1, lambda: double.cache_info().currsize


def cached_property(device: torch.device) -> Case:
    """An attribute that is computed when it is first asked for."""

    class Rope:
        @functools.cached_property
        def freqs(self) -> Tensor:
            return torch.arange(3, device=device) * 1.0

    rope = Rope()
    return lambda x: x + rope.freqs, lambda: rope.freqs


def thread_local(device: torch.device) -> Case:
    """Values of this thread."""
    del device
    buffers = threading.local()
    buffers.count = 0

    def store(y: Tensor) -> None:
        buffers.count += 1
        buffers.last = y

    return storing(store), lambda: vars(buffers)


def context_variable(device: torch.device) -> Case:
    """A variable of the context."""
    del device
    current = contextvars.ContextVar[Any]("current", default=None)
    return storing(current.set), current.get


def weak_keys(device: torch.device) -> Case:
    """A weak dictionary's value."""
    del device
    key, values = Weakly(), weakref.WeakKeyDictionary[Weakly, Any]()
    return storing(lambda y: values.__setitem__(key, y)), lambda: (key, values[key])[1]


def weak_values(device: torch.device) -> Case:
    """An object that a weak dictionary knows, and a set holds."""
    del device
    values = weakref.WeakValueDictionary[str, Any]()
    kept: list[Any] = []

    def store(y: Tensor) -> None:
        node = Node(last=y)
        values["last"] = node
        kept.append(node)

    return storing(store), lambda: (len(kept), values["last"].last)


def user_dict(device: torch.device) -> Case:
    """A UserDict."""
    del device
    values = collections.UserDict[str, Any]()
    return storing(lambda y: values.__setitem__("last", y)), lambda: values.data


def chain_map(device: torch.device) -> Case:
    """A ChainMap."""
    del device
    values = collections.ChainMap[str, Any]({})
    return storing(lambda y: values.__setitem__("last", y)), lambda: dict(values)


def a_queue(device: torch.device) -> Case:
    """A queue of threads."""
    del device
    values = queue.Queue[Any]()
    return storing(values.put), lambda: list(values.queue)


def simple_queue(device: torch.device) -> Case:
    """The same, written in C."""
    del device
    values = queue.SimpleQueue[Any]()
    values.put(torch.ones(1))

    def read() -> Any:
        found = [values.get() for _ in range(values.qsize())]
        for item in found:
            values.put(item)
        return found

    return storing(values.put), read


def asyncio_queue(device: torch.device) -> Case:
    """A queue of coroutines."""
    del device
    values = asyncio.Queue[Any]()
    return storing(values.put_nowait), lambda: list(values._queue)  # type: ignore[attr-defined]


def log_records(device: torch.device) -> Case:
    """A handler that keeps records."""
    del device
    handler, log = Keeping(), logging.Logger("a log of a test")
    log.addHandler(handler)
    return storing(lambda y: log.warning("%s", y)), lambda: [record.args for record in handler.records]


def error_attribute(device: torch.device) -> Case:
    """An attribute of an exception."""
    del device
    error = ValueError("some")
    return storing(lambda y: setattr(error, "last", y)), lambda: vars(error)


def error_arguments(device: torch.device) -> Case:
    """What an exception was made with, and its frames."""
    del device
    errors: dict[str, Exception] = {}

    def store(y: Tensor) -> None:
        try:
            raise ValueError("some", y)
        except ValueError as error:
            errors["last"] = error

    return storing(store), lambda: errors["last"].args


def nine_deep(device: torch.device) -> Case:
    """Objects nine deep."""
    del device
    first = chain(9)

    def store(y: Tensor) -> None:
        last(first).count += 1
        last(first).last = y

    return storing(store), lambda: (last(first).count, last(first).last)


def buffers_nine_deep(device: torch.device) -> Case:
    """Buffers of modules nine deep."""
    inner: torch.nn.Module = torch.nn.Identity().to(device)
    inner.register_buffer("seen", torch.zeros(3, device=device))
    module = inner
    for _ in range(9):
        module = torch.nn.Sequential(module)

    def store(y: Tensor) -> None:
        inner.seen = y  # type: ignore[assignment]

    def fn(x: Tensor) -> Tensor:
        y = module(x) * 2
        store(y)
        return y

    return fn, lambda: inner.seen


def slots(device: torch.device) -> Case:
    """A dataclass with slots."""
    del device
    holder = Slots()
    return storing(lambda y: setattr(holder, "last", y)), lambda: holder.last


def namespace(device: torch.device) -> Case:
    """A namespace."""
    del device
    holder = types.SimpleNamespace()
    return storing(lambda y: setattr(holder, "last", y)), lambda: vars(holder)


def a_deque(device: torch.device) -> Case:
    """A deque."""
    del device
    values = collections.deque[Any](maxlen=3)
    return storing(values.append), lambda: list(values)


def derived_dict(device: torch.device) -> Case:
    """A dict of a class of its own."""
    del device
    values = Counting()
    return storing(lambda y: values.__setitem__("last", y)), lambda: dict(values)


def array_of_objects(device: torch.device) -> Case:
    """A NumPy array of objects."""
    del device
    values = np.empty(2, dtype=object)
    return storing(lambda y: values.__setitem__(0, y)), lambda: list(values)


def closure(device: torch.device) -> Case:
    """A closure that is made at run time, in a place that is not known."""
    del device
    values: queue.Queue[Any] = queue.Queue()
    return storing(lambda y: values.put(lambda: y)), lambda: [item() for item in values.queue]


def default_argument(device: torch.device) -> Case:
    """A default argument that is a cache."""
    del device

    def store(y: Tensor, cache: dict[str, Any] = {}) -> None:  # noqa: B006
        cache.setdefault("first", y)

    return storing(store), lambda: store.__defaults__


def class_attribute(device: torch.device) -> Case:
    """An attribute of a class, made at run time."""
    del device

    class Holder:
        pass

    return storing(lambda y: setattr(Holder, "last", y)), lambda: Holder.last  # type: ignore[attr-defined]


def in_sys_modules(device: torch.device) -> Case:
    """A module made at run time."""
    del device

    name = f"a_module_of_a_test_{next(NUMBERS)}"

    def store(y: Tensor) -> None:
        module = types.ModuleType(name)
        module.last = y  # type: ignore[attr-defined]
        sys.modules[name] = module

    return storing(store), lambda: sys.modules.pop(name).last  # type: ignore[attr-defined]


def in_builtins(device: torch.device) -> Case:
    """A name for all modules."""
    del device

    name = f"a_value_of_a_test_{next(NUMBERS)}"
    return storing(lambda y: setattr(builtins, name, y)), lambda: vars(builtins).pop(name)


def tensor_attribute(device: torch.device) -> Case:
    """An attribute of a tensor."""
    tensor = torch.ones(3, device=device)

    def fn(x: Tensor) -> Tensor:
        tensor.tag = y = x * 2  # type: ignore[attr-defined]
        return y + tensor

    return fn, lambda: tensor.tag  # type: ignore[attr-defined]


def hook(device: torch.device) -> Case:
    """A hook of a tensor, which closes over what was computed."""
    weight = torch.ones(3, device=device, requires_grad=True)

    def read() -> Any:
        weight.grad = None
        (weight * 2).sum().backward()
        return weight.grad

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        weight.register_hook(lambda gradient: gradient * y)
        return y + 1

    return fn, read


def unknown_owner(device: torch.device) -> Case:
    """A place that the walk over what a function reaches does not find, with something real beside it."""
    del device
    bound = [torch.ones(1)]
    append = bound.append  # a method written in C does not tell whose it is

    return storing(append), lambda: bound


def objects_in_an_unknown_place(device: torch.device) -> Case:
    """An object with what was computed, where only the object is to go."""
    del device
    bound: list[Any] = [1]
    append = bound.append
    return storing(lambda y: append([Node(last={"one": y})])), lambda: [one[0].last for one in bound[1:]]


def autograd_context(device: torch.device) -> Case:
    """What a custom Function saves in its context, and a context that is kept."""
    del device
    kept: list[Any] = []
    append = kept.append

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.factor = x * 0 + 2
            ctx.save_for_backward(x * 3)
            append(ctx)
            return x * ctx.factor

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * ctx.factor

    return lambda x: Double.apply(x) + 1, lambda: [ctx.factor for ctx in kept]  # type: ignore[no-untyped-call]


CASES: dict[str, Callable[[torch.device], Case]] = {
    "lru_cache": functools.partial(lru_cache, maxsize=128),
    "lru_cache without bound": functools.partial(lru_cache, maxsize=None),
    **{case.__name__: case for case in (
        lru_cache_of_pairs, lru_cache_of_methods, lru_cache_by_tensor, cached_property, thread_local, context_variable,
        weak_keys, weak_values, user_dict, chain_map, a_queue, simple_queue, asyncio_queue, log_records,
        error_attribute, error_arguments, nine_deep, buffers_nine_deep, slots, namespace, a_deque, derived_dict,
        array_of_objects, closure, default_argument, class_attribute, in_sys_modules, in_builtins, tensor_attribute,
        hook, unknown_owner,
        objects_in_an_unknown_place, autograd_context,
    )},
}  # fmt: skip


def comparable(value: Any) -> Any:
    """Tensors as lists, whatever they lie in."""
    return pytree.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, value)


@pytest.mark.parametrize("name", extent.third(extent.third(list(CASES))))
def test_what_holds_values_holds_those_of_eager(device: torch.device, name: str) -> None:
    (eager, expected), (fn, found) = CASES[name](device), CASES[name](device)
    fast = pygraph.jit(fn)
    inputs = [torch.full((3,), float(index), device=device) for index in range(extent.examples(2, 4))]
    for x in inputs:
        assert comparable(fast(x)) == comparable(eager(x))
    left = comparable(found())
    assert left == comparable(expected())
    assert_no_fake_left()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_trace_with_symbols_is_not_looked_for_among_all_objects(
    device: torch.device, requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search takes the longer the more objects the process has, and symbols of sizes were found alive each time."""
    searches: list[bool] = []
    may_find_any = LeakSearch.may_find_any
    monkeypatch.setattr(
        LeakSearch, "may_find_any", lambda search: searches.append(may_find_any(search)) or searches[-1]
    )
    fn = lambda x, k: torch.tanh(x) * torch.arange(0, k * 6, k, device=x.device)  # noqa: E731
    x = torch.randn(4, 6, device=device).requires_grad_(requires_grad)
    fast = pygraph.jit(fn)
    for k in (2, 3):
        torch.testing.assert_close(fast(x, k), fn(x, k))
    assert searches == []


@pytest.mark.heap
def test_what_another_thread_is_about_to_let_go_of(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread says that a backward is over before it frees its nodes, which hold tensors in C++."""
    held: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        future: Any = torch.futures.Future()
        future.set_result(y)
        held.put(future)  # the queue is emptied by the other thread, as it were
        return y + 1

    pauses: list[float] = []
    monkeypatch.setattr(leaks, "sleep", lambda seconds: (pauses.append(seconds), held.get(block=False)))
    fast = pygraph.jit(fn)
    x = torch.ones(3, device=device)
    assert fast(x).tolist() == [3.0] * 3
    assert fast.cache_info().captures == 1, fast.explain()
    assert len(pauses) == 1
    assert_no_fake_left()


@pytest.mark.heap
def test_a_fake_tensor_that_another_thread_is_making() -> None:
    """It has no mode yet."""
    meta = torch.empty(2, device="meta")
    unfinished: Any = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True)  # pyright: ignore
    assert not hasattr(unfinished, "fake_mode")
    with FakeTensorMode() as mode:
        finished = torch.empty(2)
    search = LeakSearch([weakref.ref(mode)], frozenset())
    found = {id(one) for one in search._find_traced()}
    assert id(finished) in found
    assert id(unfinished) not in found
    assert not LeakSearch([], frozenset()).may_find_any()


def _while_another_thread_works(work: Callable[[], None]) -> Callable[[], None]:
    """Start a thread that does nothing as yet; returns what has it work and waits for its end."""
    go = threading.Event()
    thread = threading.Thread(target=lambda: go.wait(20) and work(), daemon=True)
    thread.start()

    def run() -> None:
        go.set()
        thread.join(20)

    return run


@pytest.mark.heap
def test_what_another_thread_keeps_meanwhile() -> None:
    """Its nodes of autograd's graph are as young as those of the trace, and may hold tensors in C++ as these do."""
    weight = torch.ones(3, requires_grad=True)
    kept, state = [1], dict[str, Any](step=1)

    def work() -> None:
        state["loss"] = (weight * 2).sum()
        state["node"] = state["loss"].grad_fn

    works = _while_another_thread_works(work)

    def run() -> None:
        mode = FakeTensorMode()
        leaks.remember(mode)
        with mode:
            kept.append(torch.ones(2))  # pyright: ignore[reportArgumentType]
        works()

    with pytest.raises(StateChangeError, match="in an item of"):
        leaks.leaving_nothing("f(x)", run)
    assert kept == [1]
    assert [*state] == ["step", "loss", "node"]
    state["loss"].backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))  # pyright: ignore[reportArgumentType]
    assert_no_fake_left()


@pytest.mark.heap
def test_a_node_that_is_kept_where_no_other_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "is_alone", lambda: True)  # pytest may have threads of its own
    kept = list[Any]()

    def run() -> None:
        mode = FakeTensorMode()
        leaks.remember(mode)
        with mode:
            kept.append(torch.ones(2, requires_grad=True).exp().grad_fn)

    with pytest.raises(StateChangeError, match="in an item of"):
        leaks.leaving_nothing("f(x)", run)
    assert kept == []
    assert_no_fake_left()


def test_variables_of_dynamo() -> None:
    """Dynamo keeps what it compiles in variables of the user's modules, also while another thread traces."""
    module = types.ModuleType("users")
    module.__dict__.update(__compiled_fn_1_ab=lambda: None, own=lambda: None)
    found = {name: packages_of(Reference(vars(module), vars(module)[name])) for name in ("__compiled_fn_1_ab", "own")}
    assert found == {"__compiled_fn_1_ab": frozenset({"torch"}), "own": frozenset()}
    x = torch.ones(2)
    torch.compile(lambda x: x + 1, backend="eager")(x)
    assert any(name.startswith("__compiled_fn_") for name in globals())  # the name that Dynamo has for them
