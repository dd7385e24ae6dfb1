"""Every guard of a plan: a call that differs in what it guards is served by Python, as if there were no plan."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.guards import native_description
from pygraph.guards.values import same
from pygraph.process import extension
from pygraph.runtime.devices import driver_for

pytestmark = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))


def served(function: Any) -> int:
    """How many calls plans have served."""
    return sum(made.plan.hits for made in function.engine.cache.native._made)


def planned(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A transformed function with a plan for this call, which is seen to serve it."""
    function = pygraph.jit(fn)
    for _ in range(3):
        function(*args, **kwargs)
    assert served(function) == 1, "the third call is served natively"
    return function


def matches(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a plan matches; nothing is run."""
    return function.engine.cache.native._dispatcher.match(args, kwargs) is not None


def test_sizes(device: torch.device) -> None:
    x = torch.ones(6, device=device)
    function = planned(lambda x, size: (x * 2).view(size), x, torch.Size([2, 3]))
    assert matches(function, x, torch.Size([2, 3]))
    for size in (torch.Size([3, 2]), torch.Size([6]), torch.Size([2, 3, 1]), (2, 3), [2, 3]):
        assert not matches(function, x, size)
    function = planned(lambda x, size: x * size[0], x, torch.Size([2, 3]))
    assert matches(function, x, torch.Size([5, 3]))
    assert not matches(function, x, (2, 3))
    function = planned(lambda x, size: x * size[0], x, (2, 3))
    assert not matches(function, x, torch.Size([2, 3]))


def check_misses(function: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The call is not served natively, and is right."""
    before = served(function)
    assert not matches(function, *args, **kwargs)
    got, expected = function(*args, **kwargs), fn(*args, **kwargs)
    assert served(function) == before
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert got.requires_grad == expected.requires_grad


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda x: x[:3].clone(),
    "stride": lambda x: x.t().contiguous().t(),
    "dtype": lambda x: x.double(),
    "device": lambda x: x.cpu(),
    "alignment": lambda x: torch.empty(17, device=x.device)[1:].view(4, 4).copy_(x),
    "requires_grad": lambda x: x.detach().clone().requires_grad_(),
    "type": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False),
    "negative": lambda x: torch._neg_view(x),
    "number": lambda x: 3.0,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_of_another_kind(device: torch.device, change: str) -> None:
    x = torch.randn(4, 4, device=device)
    function = planned(double, x)
    assert matches(function, torch.randn(4, 4, device=device)), "another one of the same kind"
    other = CHANGES[change](x)
    if change == "number":
        assert not matches(function, other)
    else:
        check_misses(function, double, other)


def test_who_requires_grad_matters_without_grad_mode_too(device: torch.device) -> None:
    with torch.no_grad():
        x = torch.randn(4, device=device)
        function = planned(double, x.requires_grad_())
        assert matches(function, torch.randn(4, device=device).requires_grad_())
        assert not matches(function, torch.randn(4, device=device))


def _set(module: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def change() -> Any:
        before = getattr(module, name)
        setattr(module, name, value)
        try:
            yield
        finally:
            setattr(module, name, before)

    return change()


@contextlib.contextmanager
def _calling(setter: Callable[[Any], Any], value: Any, before: Any) -> Any:
    setter(value)
    try:
        yield
    finally:
        setter(before)


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_cublas = torch.backends.cuda.matmul
MODES: dict[str, Callable[[str], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": lambda device: torch.no_grad(),
    "inference_mode": lambda device: torch.inference_mode(),
    "autocast cpu": lambda device: torch.autocast("cpu", torch.bfloat16),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "default dtype": lambda device: _calling(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda device: torch.device("cpu"),
    "deterministic": lambda device: _calling(torch.use_deterministic_algorithms, True, False),
    "warn only": lambda device: _calling(
        lambda on: torch._C._set_deterministic_algorithms(False, warn_only=on), True, False
    ),
    "cudnn": lambda device: _calling(torch._C._set_cudnn_enabled, False, True),
    "cudnn benchmark": lambda device: _calling(torch._C._set_cudnn_benchmark, True, False),
    "cudnn deterministic": lambda device: _calling(torch._C._set_cudnn_deterministic, True, False),
    "flash": lambda device: _calling(torch._C._set_sdp_use_flash, False, True),
    "memory efficient": lambda device: _calling(torch._C._set_sdp_use_mem_efficient, False, True),
    "math": lambda device: _calling(torch._C._set_sdp_use_math, False, True),
    "cudnn attention": lambda device: _calling(torch._C._set_sdp_use_cudnn, False, True),
    "fp16 reduction": lambda device: _set(_cublas, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduction": lambda device: _set(_cublas, "allow_bf16_reduced_precision_reduction", False),
    "matmul precision": lambda device: _set(_cublas, "fp32_precision", "tf32"),
    "conv precision": lambda device: _set(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "rnn precision": lambda device: _set(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
    "fp16 accumulation": lambda device: _set(_cublas, "allow_fp16_accumulation", True),
    "reduction in math": lambda device: _calling(torch._C._set_math_sdp_allow_fp16_bf16_reduction, True, False),
    "overrideable attention": lambda device: _calling(torch._C._set_sdp_use_overrideable, False, True),
    "flash attention 3": lambda device: _calling(torch._C._set_sdp_use_fa3, True, False),
    "order of attentions": lambda device: _calling(
        torch._C._set_sdp_priority_order, [2, 1, 0, 3, 4], torch._C._get_sdp_priority_order()
    ),
    "uninitialised memory": lambda device: _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "function mode": lambda device: _Mode(),
    "dispatch mode": lambda device: _DispatchMode(),
}


@pytest.mark.parametrize("mode", MODES)
def test_another_mode(device: torch.device, mode: str) -> None:
    x = torch.randn(4, device=device)
    function = planned(double, x)
    with MODES[mode](device.type):
        assert not matches(function, x)
    assert matches(function, x)


def test_another_autocast_dtype(device: torch.device) -> None:
    x = torch.randn(4, device=device)
    with torch.autocast("cpu", torch.bfloat16):
        function = planned(double, x)
    with torch.autocast("cpu", torch.float16):
        assert not matches(function, x)


def test_inside_a_transform(device: torch.device) -> None:
    x = torch.randn(4, device=device)
    function = planned(double, x)
    torch.testing.assert_close(torch.func.vmap(function)(x), x * 2)
    torch.testing.assert_close(torch.func.grad(lambda x: function(x).sum())(x), torch.full_like(x, 2))
    assert served(function) == 1


# ---- structure -----------------------------------------------------------------------------------------------------


def total(tree: Any, **others: Any) -> torch.Tensor:
    leaves = [x for x in torch.utils._pytree.tree_leaves((tree, others)) if isinstance(x, torch.Tensor)]
    return sum(leaves[1:], leaves[0])  # type: ignore[no-any-return]


def test_structures(device: torch.device) -> None:
    a, b = torch.randn(4, device=device), torch.randn(4, device=device)
    trees = [
        (a, b),
        [a, b],
        {"a": a, "b": b},
        {"b": b, "a": a},
        (a, (b,)),
        ((a, b),),
        (a, [b]),
        (a, None, b),
        (a, b, a),
    ]
    for tree in trees:
        function = planned(total, tree)
        for other in trees:
            if other is not tree:
                assert not matches(function, other), (tree, other)


def test_keywords(device: torch.device) -> None:
    a, b, c = (torch.randn(4, device=device) for _ in range(3))
    function = planned(total, a, b=b, c=c)
    assert matches(function, a, b=c, c=b)
    assert not matches(function, a, c=c, b=b)
    assert not matches(function, a, b=b)
    assert not matches(function, a, b=b, d=c)
    assert not matches(function, a, b, c)


def test_a_namedtuple_is_served_by_python(device: torch.device) -> None:
    x = torch.randn(4, device=device)
    function = pygraph.jit(lambda value: value.values.clone())
    result = torch.return_types.sort((x, x))
    for _ in range(4):
        torch.testing.assert_close(function(result), x)
    assert served(function) == 0


# ---- numbers and static values -------------------------------------------------------------------------------------


def scaled(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * k


def test_live_numbers(device: torch.device) -> None:
    x = torch.randn(4, device=device)
    function = planned(scaled, x, 2.0)
    assert matches(function, x, -0.0)
    for other in (2, True, float("nan"), float("inf"), None, "2"):
        assert not matches(function, x, other), other
    function = planned(scaled, x, 2)
    assert matches(function, x, -7)
    for other in (2.0, True, 2**63, -(2**63) - 1):
        assert not matches(function, x, other), other


STATIC = [0, 1, 2**70, True, False, 0.0, -0.0, 1.0, float("nan"), float("inf"), None, "a", torch.float32, 1j]


@pytest.mark.parametrize("position", range(len(STATIC)), ids=[repr(value) for value in STATIC])
def test_static_values(device: torch.device, position: int) -> None:
    x = torch.randn(4, device=device)
    value = STATIC[position]
    function = pygraph.jit(lambda x, k: x + len(repr(k)), static_argnums=1)
    for _ in range(3):
        function(x, value)
    assert served(function) == 1
    for index, other in enumerate(STATIC):
        assert matches(function, x, other) == (index == position), other
    equal = {int: lambda v: int(str(v)), float: lambda v: float(str(v)), str: lambda v: "".join(list(v))}
    if type(value) in equal and value == value:
        assert matches(function, x, equal[type(value)](value)), "an equal one"


def test_a_number_that_the_trace_needed(device: torch.device) -> None:
    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        return x[: n % 3 + 1] * n

    x = torch.randn(4, device=device)
    function = planned(fn, x, 1)
    check_misses(function, fn, x, 2)


class _ByValue:
    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and other.value == self.value


def test_a_static_value_that_changes_its_hash(device: torch.device) -> None:
    x, key = torch.randn(4, device=device), _ByValue(1)
    function = pygraph.jit(lambda x, key: x * key.value, static_argnums=1)
    for _ in range(3):
        torch.testing.assert_close(function(x, key), x)
    key.value = 3
    torch.testing.assert_close(function(x, key), x * 3)


# ---- memory --------------------------------------------------------------------------------------------------------


def updated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


def test_shared_memory(device: torch.device) -> None:
    memory = torch.randn(64, device=device)
    apart = (torch.randn(4, device=device), torch.randn(4, device=device))
    same = memory[:4]
    calls = {
        "apart": apart,
        "equal": (memory[:4], memory[:4]),
        "the same object": (same, same),
        "overlapping": (memory[:4], memory[2:6]),
        "at another distance": (memory[:4], memory[6:10]),
        "in one storage": (memory[:4], memory[32:36]),
    }
    for name, call in calls.items():
        function = pygraph.jit(updated)
        for _ in range(3):
            torch.testing.assert_close(function(*call), call[0] * call[1])
        for other, arguments in calls.items():
            assert matches(function, *arguments) == (other == name and served(function) > 0), (name, other)


def foreign(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in another storage, which begins with the first of them."""
    if tensor.device.type != "emu":
        return torch.from_dlpack(tensor)
    driver = driver_for(tensor.device)
    assert driver is not None
    return driver.tensor_at(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def test_storages_that_overlap(device: torch.device) -> None:
    memory = torch.randn(512, device=device)  # every place is a multiple of 64 elements: alignments are the same
    apart = (memory[:100], torch.randn(100, device=device))
    function = planned(updated, *apart)
    assert matches(function, foreign(memory[:100]), foreign(apart[1])), "they do not overlap"
    assert matches(function, foreign(memory[:100]), foreign(memory[128:228]))
    for other in (
        (memory[:100], foreign(memory[:100])),
        (memory[:100], foreign(memory[64:164])),
        (foreign(memory[64:164]), memory[:100]),
        (memory[:100], foreign(memory[256:356])),
        (foreign(memory[:100]), foreign(memory[64:164])),
        (foreign(memory)[:100], foreign(memory[256:356])),
    ):
        assert not matches(function, *other)
        before = served(function)
        result = function(*other)
        torch.testing.assert_close(result, other[0] * other[1])
        assert served(function) == before
    assert matches(function, *apart)


def test_storages_that_begin_together_have_plans(device: torch.device) -> None:
    memory = torch.randn(512, device=device)
    function = planned(updated, memory[:100], foreign(memory[:100]))
    assert matches(function, memory[:100], memory[:100])
    assert matches(function, foreign(memory[:100]), memory[:100])
    assert not matches(function, memory[:100], torch.randn(100, device=device))
    assert not matches(function, memory[:100], foreign(memory[256:356]))
    function = pygraph.jit(updated)
    for _ in range(12):
        function(memory[:100], foreign(memory[256:356]))
    assert served(function) == 0, "only Python sees those"


@pytest.mark.parametrize("count", [3, 12, 50])
def test_storages_that_overlap_among_many(device: torch.device, count: int) -> None:
    def fn(*xs: torch.Tensor) -> torch.Tensor:
        xs[0].mul_(2)
        return xs[1] + xs[-1]

    memory = torch.randn(192 * count, device=device)
    xs = [foreign(memory[192 * i : 192 * i + 100]) for i in range(count)]
    function = planned(fn, *xs)
    assert matches(function, *reversed(xs))
    for first, last in ((0, count - 1), (count - 1, 0), (1, 2)):
        start = 192 * first + 64
        assert not matches(function, *xs[:last], foreign(memory[start : start + 100]), *xs[last + 1 :])
    assert not matches(function, memory[:100], *xs[1:]), "its storage holds all of them"
    assert matches(function, torch.randn(100, device=device), *xs[1:])


def test_sharing_among_many(device: torch.device) -> None:
    def fn(*xs: torch.Tensor) -> torch.Tensor:
        xs[3].mul_(2)
        return sum(xs[1:], xs[0])  # type: ignore[return-value]

    xs = [torch.randn(4, device=device) for _ in range(12)]
    function = planned(fn, *xs)
    assert not matches(function, *xs[:11], xs[3])
    assert not matches(function, *xs[:11], xs[3].view(4))
    assert matches(function, *reversed(xs))


def test_without_elements_there_is_nothing_to_share(device: torch.device) -> None:
    memory = torch.randn(8, device=device)
    function = planned(lambda a, b: a.sum() + b, memory[:0], torch.randn(4, device=device))
    assert matches(function, memory[:0], memory[:4])


def test_memory_of_a_captured_tensor_that_is_written(device: torch.device) -> None:
    memory = torch.zeros(512, device=device)
    state = foreign(memory[128:256])

    def fn(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x + 1

    x = torch.randn(128, device=device)
    function = planned(fn, x)
    assert not matches(function, state)
    assert not matches(function, foreign(state))
    assert not matches(function, foreign(memory[64:192])), "it begins before and ends in it"
    assert not matches(function, foreign(memory[192:320])), "it begins in it and ends behind"
    assert not matches(function, memory[256:384]), "it lies in a storage that holds it"
    assert matches(function, foreign(memory[:128]))
    assert matches(function, foreign(memory[256:384]))


# ---- what is closed over -------------------------------------------------------------------------------------------


def test_captured_tensors(device: torch.device) -> None:
    changes: dict[str, Callable[[torch.nn.Linear], Any]] = {
        "data": lambda m: setattr(m.weight, "data", torch.ones(4, 4, device=device)),
        "another object": lambda m: setattr(m, "weight", torch.nn.Parameter(torch.ones(4, 4, device=device))),
        "requires_grad": lambda m: m.weight.requires_grad_(),
        "none": lambda m: setattr(m, "bias", None),
        "strides": lambda m: setattr(m.weight, "data", m.weight.data.t()),
        "dtype": lambda m: m.double() and None,
    }
    for name, change in changes.items():
        module = torch.nn.Linear(4, 4, device=device).requires_grad_(False)
        x = torch.randn(2, 4, device=device)
        function = pygraph.jit(module)
        transformed = function._pygraph_transformed
        for _ in range(3):
            function(x)
        assert served(transformed) == 1
        change(module)
        if name == "dtype":
            x = x.double()
        assert not matches(transformed, x), name
        got, expected = function(x), module(x)
        torch.testing.assert_close(got, expected)
        assert got.requires_grad == expected.requires_grad, name


def test_a_captured_tensor_without_elements(device: torch.device) -> None:
    memory = torch.ones(8, device=device)
    nothing = memory[4:4]
    x = torch.ones(4, device=device)
    function = planned(lambda x: torch.cat([x, nothing]) * 2, x)
    assert matches(function, x), "its address is nobody's concern"


def test_a_parameter_updated_in_place_is_read(device: torch.device) -> None:
    module = torch.nn.Linear(4, 4, device=device).requires_grad_(False)
    function, x = pygraph.jit(module), torch.randn(2, 4, device=device)
    for step in range(5):
        module.weight.fill_(step)
        torch.testing.assert_close(function(x), module(x))
    assert served(function._pygraph_transformed) == 3


class _Holder:
    level = 2

    def __init__(self) -> None:
        self.factor: Any = 2
        self.table: dict[str, Any] = {"a": 1, "b": 2.0}
        self.items: list[Any] = [1, 2]


SCALE = 2


def test_closed_over_values(device: torch.device) -> None:
    global SCALE
    cell: Any = 1

    def make(holder: _Holder) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (
            x * holder.factor * holder.level + sum(holder.table.values()) + sum(holder.items) + cell * SCALE
        )

    def set_cell(holder: _Holder) -> None:
        nonlocal cell
        cell = 5

    def set_global(holder: _Holder) -> None:
        global SCALE
        SCALE = 7

    changes: list[Callable[[_Holder], Any]] = [
        lambda h: setattr(h, "factor", 3),
        lambda h: setattr(h, "factor", 2.0),
        lambda h: setattr(h, "factor", True),
        lambda h: setattr(_Holder, "level", 5),
        lambda h: h.table.update(a=4),
        lambda h: h.table.update(c=4),
        lambda h: h.table.pop("b"),
        lambda h: h.items.append(3),
        lambda h: h.items.__setitem__(0, 9),
        lambda h: h.items.clear(),
        lambda h: setattr(h, "table", {"z": 8}),
        set_cell,
        set_global,
    ]
    try:
        for index, change in enumerate(changes):
            cell, SCALE, _Holder.level = 1, 2, 2
            holder, x = _Holder(), torch.randn(4, device=device)
            fn = make(holder)
            function = planned(fn, x)
            change(holder)
            assert not matches(function, x), index
            torch.testing.assert_close(function(x), fn(x))
    finally:
        SCALE, _Holder.level = 2, 2


def test_the_length_of_a_list_whose_items_are_too_many_to_compare(device: torch.device) -> None:
    items, x = list(range(3000)), torch.randn(4, device=device)
    fn = lambda x: x * len(items)  # noqa: E731
    for change in (items.pop, lambda: items.extend([0, 0])):
        function = planned(fn, x)
        change()
        assert not matches(function, x)
        torch.testing.assert_close(function(x), fn(x))


def test_the_order_of_a_dict_with_equal_values(device: torch.device) -> None:
    table, x = {"a": 1, "b": 1}, torch.randn(4, device=device)
    fn = lambda x: x * (2 if next(iter(table)) == "a" else 3)  # noqa: E731
    function = planned(fn, x)
    table["a"] = table.pop("a")
    assert not matches(function, x)
    torch.testing.assert_close(function(x), fn(x))


def test_an_equal_value_is_no_change(device: torch.device) -> None:
    holder, x = _Holder(), torch.randn(4, device=device)
    holder.factor = float("1.5")
    function = planned(lambda x: x * holder.factor, x)
    for _ in range(3):
        holder.factor = float("1.5")
        holder.table["a"] = 1
        assert matches(function, x)
    holder.factor = float("-1.5")
    assert not matches(function, x)
    holder.factor = float("1.5")
    assert matches(function, x), "what is as it was fits again"


def test_a_dict_that_is_guarded_twice(device: torch.device) -> None:
    holder, x = _Holder(), torch.randn(4, device=device)
    first = planned(lambda x: x * holder.factor, x)
    second = planned(lambda x: x + holder.factor, x)
    holder.factor = 3
    assert not matches(first, x)
    assert not matches(second, x)
    first.cache_clear()
    holder.factor = 2
    assert matches(second, x)
    holder.factor = 4
    assert not matches(second, x)


# ---- life ----------------------------------------------------------------------------------------------------------


def test_nothing_is_kept(device: torch.device) -> None:
    holder, x = _Holder(), torch.randn(4, device=device)
    weight = torch.randn(4, device=device)

    def make(holder: _Holder, weight: torch.Tensor) -> Any:
        return planned(lambda x, k: x * holder.factor * weight + k, x, 2.0)

    function = make(holder, weight)
    watch = [weakref.ref(function), weakref.ref(holder), weakref.ref(weight), weakref.ref(function.engine.cache.native)]
    del function, holder, weight
    gc.collect()
    assert [ref() for ref in watch] == [None] * 4


def test_a_dropped_entry_takes_its_plan_along(device: torch.device) -> None:
    function = pygraph.jit(double, max_graphs=1)
    x, y = torch.randn(4, device=device), torch.randn(5, device=device)
    for _ in range(3):
        function(x)
    function(y)
    assert not matches(function, x)
    assert function.cache_info()[:4] == (2, 2, 2, 1)
    function.cache_clear()
    assert function.cache_info() == (0, 0, 0, 0, 0)
    torch.testing.assert_close(function(x), x * 2)


class _Comparison:
    """A comparison of values that is slow, and lets others run meanwhile."""

    meanwhile: Callable[[], Any] | None = None

    def __call__(self, value: Any, expected: Any) -> bool:
        if self.meanwhile is not None:
            self.meanwhile()
        return same(value, expected)


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> _Comparison:
    """How plans compare values that are other objects."""
    slow = _Comparison()
    monkeypatch.setattr(native_description, "same", slow)
    return slow


def test_a_change_is_seen_by_a_thread_that_comes_while_another_compares(
    device: torch.device, comparison: _Comparison
) -> None:
    import threading

    table = {"scale": 2.0}
    function = planned(lambda x: x * table["scale"], torch.ones(2, device=device))
    table["scale"] = 5.0
    seen: list[bool] = []

    def another() -> None:
        comparison.meanwhile = None
        thread = threading.Thread(target=lambda: seen.append(matches(function, torch.ones(2, device=device))))
        thread.start()
        thread.join()

    comparison.meanwhile = another
    seen.append(matches(function, torch.ones(2, device=device)))
    assert seen == [False, False]


def test_arguments_are_held_while_they_are_compared(device: torch.device, comparison: _Comparison) -> None:
    """A list among the arguments may lose what it had, by another thread or by what a comparison runs."""
    table = {"scale": 2.0}
    function = planned(lambda xs: xs[0] * table["scale"] + xs[1], [torch.ones(2, device=device) for _ in range(2)])
    xs = [torch.ones(2, device=device), torch.ones(2, device=device)]
    gone = weakref.ref(xs[0])
    alive: list[bool] = []

    def clear() -> None:
        comparison.meanwhile = None
        xs.clear()
        alive.append(gone() is not None)

    table["scale"] = float("2.0")
    comparison.meanwhile = clear
    assert matches(function, xs)
    assert alive == [True]
    assert gone() is None


def test_a_busy_function_is_left_to_python(device: torch.device) -> None:
    import threading

    x = torch.randn(4, device=device)
    function = planned(double, x)
    results: list[Any] = []
    with function.engine.shared.lock:
        thread = threading.Thread(target=lambda: results.append(function.engine.cache.native.dispatch((x,), {})))
        thread.start()
        thread.join()
    assert results == [function.engine.cache.native.miss]


def test_an_error_of_the_function_is_its_own(device: torch.device) -> None:
    fail = False

    class Error(Exception):
        pass

    def fn(x: torch.Tensor) -> float:
        if fail:
            raise Error
        return float(x.sum())

    x = torch.randn(4, device=device)
    function = pygraph.jit(fn)
    for _ in range(3):
        function(x)
    fail = True
    with pytest.raises(Error):
        function(x)


def test_switched_off(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")
    x = torch.randn(4, device=device)
    function = pygraph.jit(double)
    for _ in range(3):
        function(x)
    assert served(function) == 0
    assert function.engine.cache.native.dispatch is None
    assert extension.reason() == "PYGRAPH_NATIVE=0"
