"""Code that is replaced after a trace: classes, functions, what names mean, and the order of dicts."""

from __future__ import annotations

import abc
import builtins
import collections
import dataclasses
import functools
import math
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import pygraph
from pygraph.guards.environment import Environment

HERE: Any = sys.modules[__name__]


@dataclasses.dataclass
class Case:
    """A function, what is changed, and how it is changed back."""

    fn: Callable[[torch.Tensor], Any]
    change: Callable[[], object]
    back: Callable[[], object]


def _attribute(owner: Any, name: str, value: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Set an attribute, and set or delete it again as it was."""
    missing = object()
    before = vars(owner).get(name, missing)

    def back() -> None:
        if before is not missing:
            setattr(owner, name, before)
        elif name in vars(owner):
            delattr(owner, name)

    return lambda: setattr(owner, name, value), back


def _attribute_of(fn: Any, name: str, value: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    before = getattr(fn, name)
    return lambda: setattr(fn, name, value), lambda: setattr(fn, name, before)


def _helper(x: torch.Tensor, k: float = 2.0, *, bias: float = 1.0) -> torch.Tensor:
    return x * k + bias


def _other(x: torch.Tensor, k: float = 3.0, *, bias: float = 5.0) -> torch.Tensor:
    return x * k - bias


class Base:
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)


def _derived() -> Any:
    """A class of its own for each case, with one of everything."""

    class Meta(type):
        @property
        def factor(cls) -> float:
            return 2.0

    class Middle(Base, metaclass=Meta):
        def __getattr__(self, name: str) -> Any:
            if name == "made":
                return 1.0
            raise AttributeError(name)

    class Scale:
        def __init__(self, fn: Any) -> None:
            self.fn = fn

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return self if instance is None else self.fn(instance)

    class Derived(Middle):
        def __init__(self) -> None:
            self.k = 2.0

        @property
        def scale(self) -> float:
            return 2.0

        @staticmethod
        def static(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @classmethod
        def of_class(cls, x: torch.Tensor) -> torch.Tensor:
            return x + 2

        described = Scale(lambda _: 3.0)

        def __add__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 7

    return Derived


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def _calls(path: str, use: Callable[[Any, torch.Tensor], Any], value: Any) -> Callable[[torch.device], Case]:
    """A case about one attribute of `_derived`, or of a class or function behind it."""

    def make(device: torch.device) -> Case:
        cls = _derived()
        instance = cls()
        owner, _, name = path.rpartition(".")
        target = {"": cls, "base": cls.__mro__[2], "middle": cls.__mro__[1], "meta": type(cls)}.get(owner)
        if target is None:
            target = functools.reduce(getattr, owner.split("."), cls)
        set_it = _attribute_of if name == "__code__" else _attribute
        return Case(lambda x: use(instance, x), *set_it(target, name, value))

    return make


def _module(layers: Callable[[], list[nn.Module]], change: Callable[[nn.Sequential], Any]) -> Any:
    def make(device: torch.device) -> Case:
        torch.manual_seed(0)
        module = nn.Sequential(*layers()).to(device).requires_grad_(False)
        return Case(module, *change(module))

    return make


def _linear() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.ReLU()]


def _names(fn: Any, owner: Any, name: str, value: Any) -> Callable[[torch.device], Case]:
    return lambda _: Case(fn, *_attribute(owner, name, value))


def _function(change: Callable[[Any], tuple[Any, Any]]) -> Callable[[torch.device], Case]:
    """A case about a function that another one calls."""

    def make(device: torch.device) -> Case:
        copied = types.FunctionType(_helper.__code__, globals(), "copied", _helper.__defaults__)
        copied.__kwdefaults__ = dict(_helper.__kwdefaults__)  # type: ignore[arg-type]
        return Case(lambda x: copied(x), *change(copied))

    return make


def _reorder(items: dict[str, Any], key: str) -> None:
    items[key] = items.pop(key)


def _ordered(items: Any, change: Callable[[Any], object], back: Callable[[Any], object]) -> Any:
    def make(device: torch.device) -> Case:
        mine = items()

        def fn(x: torch.Tensor) -> torch.Tensor:
            for value in mine.values():
                x = x * value + 1
            return x

        return Case(fn, lambda: change(mine), lambda: back(mine))

    return make


def _order_of_modules(device: torch.device) -> Case:
    module = nn.Sequential(collections.OrderedDict(a=nn.ReLU(), b=nn.Tanh(), c=nn.Sigmoid())).to(device)

    def back() -> None:
        for key in "abc":
            _reorder(module._modules, key)

    return Case(module, lambda: _reorder(module._modules, "a"), back)


def _class_of(value: Any, cls: Any, use: Callable[[Any, torch.Tensor], Any]) -> Case:
    return Case(
        lambda x: use(value, x), *(functools.partial(setattr, value, "__class__", c) for c in (cls, type(value)))
    )


def _class_of_object(device: torch.device) -> Case:
    cls = _derived()

    class Other(cls):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x - 9

    return _class_of(cls(), Other, lambda value, x: value(x))


def _bases(device: torch.device) -> Case:
    class A:
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class B:
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x - 1

    class C(A):
        pass

    instance = C()
    return Case(
        lambda x: instance.step(x), lambda: setattr(C, "__bases__", (B,)), lambda: setattr(C, "__bases__", (A,))
    )


def _nested(device: torch.device) -> Case:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    code, other = inner.__code__, (lambda x: x - 3).__code__
    return Case(outer, lambda: setattr(inner, "__code__", other), lambda: setattr(inner, "__code__", code))


def _itself(device: torch.device) -> Case:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    code, other = fn.__code__, (lambda x: x - 3).__code__
    return Case(fn, lambda: setattr(fn, "__code__", other), lambda: setattr(fn, "__code__", code))


def _wrapped(device: torch.device) -> Case:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @functools.wraps(inner)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return outer.__wrapped__(x) * 2  # type: ignore[attr-defined]

    return Case(outer, *_attribute(outer, "__wrapped__", lambda x: x - 3))


def _partial(device: torch.device) -> Case:
    applied = functools.partial(_helper, k=4.0)
    state = (applied.func, applied.args, applied.keywords, None)
    other = (_other, (), {"k": 5.0}, None)
    return Case(lambda x: applied(x), lambda: applied.__setstate__(other), lambda: applied.__setstate__(state))  # type: ignore


def _hasattr(owner: Callable[[], Any]) -> Callable[[torch.device], Case]:
    def make(device: torch.device) -> Case:
        mine = owner()
        return Case(lambda x: x * 2 if hasattr(mine, "added") else x + 1, *_attribute(mine, "added", 1))

    return make


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x


def _module_attribute(device: torch.device) -> Case:
    def fn(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * HERE.not_there_yet
        except AttributeError:
            return x + 1

    return Case(fn, *_attribute(HERE, "not_there_yet", 5.0))


def _shadow(x: torch.Tensor) -> torch.Tensor:
    return x * len(oct(8))


def _cached_property(device: torch.device) -> Case:
    class A:
        @functools.cached_property
        def k(self) -> float:
            return 2.0

    stored = vars(A)["k"]
    return Case(lambda x: x * A().k, *_attribute(stored, "func", lambda self: 5.0))


def _added_by_subclass(device: torch.device) -> Case:
    class A(Base):
        pass

    instance = A()
    return Case(lambda x: instance.step(x), *_attribute(A, "step", lambda self, x: x - 4))


def _value_by_subclass(device: torch.device) -> Case:
    class A(Base):
        pass

    Base.factor = 2.0  # type: ignore[attr-defined]
    instance: Any = A()
    return Case(lambda x: x * instance.factor, *_attribute(A, "factor", 3.0))


def _abstract(device: torch.device) -> Case:
    class A(abc.ABC):
        @abc.abstractmethod
        def step(self, x: torch.Tensor) -> torch.Tensor: ...

    class B(A):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    instance = B()
    return Case(lambda x: instance.step(x), *_attribute(B, "step", lambda self, x: x - 4))


def _multihead(device: torch.device) -> Case:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).to(device).requires_grad_(False).eval()
    return Case(
        lambda x: attention(x[None], x[None], x[None])[0],
        *_attribute(F, "multi_head_attention_forward", lambda query, *_, **__: (query * 2, None)),
    )


def _dict_of(owner: Any, name: str, value: Any, use: Callable[[Any, torch.Tensor], Any]) -> Any:
    """A case about the whole dict of an object's attributes, which another one replaces."""

    def make(device: torch.device) -> Case:
        mine = owner()
        if isinstance(mine, nn.Module):
            mine.to(device)
        setattr(mine, name, 2.0)
        return Case(lambda x: use(mine, x), *_attribute_of(mine, "__dict__", {**vars(mine), name: value}))

    return make


def _imported_module(device: torch.device) -> Case:
    modules = [types.ModuleType("pygraph_tests_imported") for _ in range(2)]
    for k, module in enumerate(modules):
        module.k = float(k)  # type: ignore[attr-defined]

    def fn(x: torch.Tensor) -> torch.Tensor:
        import pygraph_tests_imported  # type: ignore[import-not-found]

        return x * pygraph_tests_imported.k

    put = functools.partial(operator.setitem, sys.modules, "pygraph_tests_imported")
    put(modules[0])
    return Case(fn, lambda: put(modules[1]), lambda: put(modules[0]))


def _less(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return input - 1


_add: Any = torch.Tensor.__add__
_relu, _linear_of_torch, _call = nn.ReLU.forward, F.linear, nn.Module.__call__

CASES: dict[str, Callable[[torch.device], Case]] = {
    "class of a module": _module(_linear, lambda m: (
        lambda: setattr(m[1], "__class__", nn.Sigmoid), lambda: setattr(m[1], "__class__", nn.ReLU))),
    "class of an object": _class_of_object,
    "forward of a library's module": _module(_linear, lambda m: _attribute(nn.ReLU, "forward", lambda self, x: x - 1)),
    "call of nn.Module": _module(
        _linear, lambda m: _attribute(nn.Module, "__call__", lambda self, *args: _call(self, *args) + 1)),
    "F.linear": _module(_linear, lambda m: _attribute(
        F, "linear", lambda x, w, b=None: _linear_of_torch(x, w, b) + 1)),
    "F.relu": _module(_linear, lambda m: _attribute(F, "relu", lambda x, inplace=False: x - 1)),
    "code of F.relu": _module(_linear, lambda m: _attribute_of(F.relu, "__code__", _less.__code__)),
    "torch.relu": _module(_linear, lambda m: _attribute(torch, "relu", lambda x: x - 1)),
    "attention": _multihead,
    "torch.tanh": _names(lambda x: torch.tanh(x), torch, "tanh", lambda x: x - 1),
    "a name of a name": _names(lambda x: torch.nn.functional.softplus(x), F, "softplus", lambda x: x - 1),
    "operator of tensors": _names(lambda x: x + 1, torch.Tensor, "__add__", lambda self, other: _add(self, other) * 2),
    "method of tensors": _names(lambda x: x.tanh(), torch.Tensor, "tanh", lambda self: self - 1),
    "function of math": _names(lambda x: x * math.sqrt(4.0), math, "sqrt", lambda k: 5.0),
    "constant of math": _names(lambda x: x * math.pi, math, "pi", 3.0),
    "call": _calls("__call__", lambda value, x: value(x), lambda self, x: x - 4),
    "call of a base": _calls("base.__call__", lambda value, x: value(x), lambda self, x: x - 4),
    "method of a base": _calls("base.step", lambda value, x: value(x), lambda self, x: x - 4),
    "code of a method": _calls("step.__code__", lambda value, x: value(x), (lambda self, x: x - 4).__code__),
    "getattr": _calls("middle.__getattr__", lambda value, x: x * value.made, lambda self, name: 5.0),
    "getattribute": _calls("__getattribute__", lambda value, x: x * value.k, lambda self, name: 5.0),
    "attribute of a metaclass": _calls("meta.factor", lambda value, x: x * type(value).factor,
                                       property(lambda cls: 5.0)),
    "call of a metaclass": _calls("meta.__call__", lambda value, x: x * type(value)().k,
                                  lambda cls: types.SimpleNamespace(k=5.0)),
    "property": _calls("scale", lambda value, x: x * value.scale, property(lambda self: 5.0)),
    "static method": _calls("static", lambda value, x: value.static(x), staticmethod(lambda x: x - 4)),
    "code of a static method": _calls("static.__code__", lambda value, x: value.static(x), (lambda x: x - 4).__code__),
    "class method": _calls("of_class", lambda value, x: value.of_class(x), classmethod(lambda cls, x: x - 4)),
    "descriptor": _calls("described.fn", lambda value, x: x * value.described, lambda _: 5.0),
    "operator of a class": _calls("__add__", lambda value, x: value + x, lambda self, x: x - 4),
    "constructor": _calls("__init__", lambda value, x: x * type(value)().k, lambda self: setattr(self, "k", 5.0)),
    "method added to a subclass": _added_by_subclass,
    "value added to a subclass": _value_by_subclass,
    "method of an abstract class": _abstract,
    "bases": _bases,
    "cached property": _cached_property,
    "code": _function(lambda f: _attribute_of(f, "__code__", _other.__code__)),
    "defaults": _function(lambda f: _attribute_of(f, "__defaults__", (9.0,))),
    "equal defaults of another type": _function(lambda f: _attribute_of(f, "__defaults__", (-0.0,))),
    "defaults of keywords": _function(lambda f: _attribute_of(f, "__kwdefaults__", {"bias": 9.0})),
    "item of defaults of keywords": _function(lambda f: (
        lambda: f.__kwdefaults__.update(bias=9.0), lambda: f.__kwdefaults__.update(bias=1.0))),
    "code of a nested function": _nested,
    "its own code": _itself,
    "wrapped function": _wrapped,
    "partial": _partial,
    "forward of a Function": _names(lambda x: Twice.apply(x), Twice, "forward", staticmethod(lambda ctx, x: x * 3)),
    "builtin in globals": _names(_shadow, HERE, "oct", lambda _: "1"),
    "builtin": _names(_shadow, builtins, "oct", lambda _: "1"),
    "attribute of a function": _hasattr(lambda: types.FunctionType(_plain.__code__, globals())),
    "attribute of a class": _hasattr(_derived),
    "attribute of an object": _hasattr(lambda: _derived()()),
    "attribute of a tensor": _hasattr(lambda: torch.zeros(2)),
    "attribute of a module": _module_attribute,
    "dict of an object": _dict_of(lambda: _derived()(), "k", 5.0, lambda value, x: value(x) * value.k),
    "dict of a module": _dict_of(lambda: nn.ReLU(), "k", 5.0, lambda value, x: value(x) * value.k),
    "dict of a function": _dict_of(
        lambda: types.FunctionType(_plain.__code__, globals()), "k", 5.0, lambda value, x: value(x) * value.k),
    "dict of a partial": _dict_of(lambda: functools.partial(_plain), "k", 5.0, lambda value, x: value(x) * value.k),
    "dict of a memo": _dict_of(
        lambda: functools.lru_cache(lambda: 1.0), "k", 5.0, lambda value, x: x * value() * value.k),
    "attribute of a partial": _hasattr(lambda: functools.partial(_plain)),
    "attribute of a memo": _hasattr(lambda: functools.lru_cache(_plain)),
    "dict of an exception": _dict_of(lambda: KeyError(), "k", 5.0, lambda value, x: x * value.k),
    "dict of a tensor": _dict_of(lambda: torch.zeros(2), "k", 5.0, lambda value, x: x * value.k),
    "imported module": _imported_module,
    "order of modules": _order_of_modules,
    "order of a dict": _ordered(
        lambda: {"a": 2.0, "b": 3.0}, lambda d: _reorder(d, "a"), lambda d: _reorder(d, "b")),
    "order of numbers as keys": _ordered(
        lambda: {1000: 2.0, 2000: 3.0}, lambda d: _reorder(d, 1000), lambda d: _reorder(d, 2000)),
    "order of an ordered dict": _ordered(
        lambda: collections.OrderedDict(a=2.0, b=3.0), lambda d: d.move_to_end("a"), lambda d: d.move_to_end("b")),
}  # fmt: skip


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Case]:
    """One of the cases, whose change does not outlive the test."""
    made = CASES[request.param](device)
    yield made
    made.back()


def _results(fn: Any, x: torch.Tensor, calls: int = 3) -> list[list[float]]:
    return [fn(x.clone()).double().cpu().ravel().tolist() for _ in range(calls)]


@pytest.mark.pairwise(strength=1)
def test_a_change_of_code_is_noticed(case: Case, native: bool, device: torch.device) -> None:
    x = (torch.arange(16.0) / 8 - 1).reshape(4, 4).to(device)
    fast = pygraph.jit(case.fn)
    assert _results(fast, x) == _results(case.fn, x)
    before = _results(case.fn, x, 1)
    assert fast.cache_info().hits >= 2, fast.explain()
    for change in (case.change, case.back, case.change, case.back):
        change()
        now = _results(case.fn, x)
        assert (now[0] == before[0]) == (change is case.back)
        assert _results(fast, x) == now
    assert fast.cache_info().captures >= 2


def test_a_trace_elsewhere_changes_no_code(native: bool, device: torch.device) -> None:
    """Torch's make_fx replaces `nn.Module.__call__` for all threads while it traces, which is no change of code."""
    module = nn.Sequential(*_linear()).to(device).requires_grad_(False)
    x = torch.ones(2, 4, device=device)
    fast = pygraph.jit(module)
    expected = [_results(fast, x, 1) for _ in range(3)]
    misses = fast.cache_info().misses
    inside, done = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        done.wait(20)
        return x + 1

    thread = threading.Thread(target=lambda: make_fx(slow)(x))
    thread.start()
    try:
        assert inside.wait(20)
        assert vars(nn.Module)["__call__"] is not _call
        assert [_results(fast, x, 1) for _ in range(3)] == expected
    finally:
        done.set()
        thread.join()
    fast(x)
    assert fast.cache_info().misses == misses


def test_what_has_changed_is_named() -> None:
    module = nn.Sequential(*_linear())
    instance = _derived()()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return instance(module(x)) + _helper(torch.tanh(x))

    environment = Environment(fn)
    assert environment.changed() is None
    for owner, name, value, expected in (
        (nn.ReLU, "forward", lambda self, x: x, "ReLU.forward"),
        (F, "linear", len, "torch.nn.functional.linear"),
        (torch, "tanh", len, "torch.tanh"),
        (Base, "step", len, "Base.step"),
    ):
        with mock.patch.object(owner, name, value):
            assert not environment.is_current()
            assert environment.changed() == expected
        assert environment.is_current()
    change, back = _attribute_of(_helper, "__code__", _other.__code__)
    change()
    assert environment.changed() == "the code of _helper"
    back()
    instance.__class__ = type("Other", (type(instance),), {})
    assert environment.changed() == "the class of instance"
    instance.__class__ = type(instance).__mro__[1]
    assert environment.is_current()
    instance.__dict__ = dict(instance.__dict__)
    assert not environment.is_current()
    assert environment.changed() == "instance.__dict__"


class _Shared:
    """Of which all objects have one dict between them."""

    everything: ClassVar[dict[str, Any]] = {"calls": 0.0}

    def __init__(self) -> None:
        self.__dict__ = self.everything


def test_a_dict_that_is_replaced_in_a_call(native: bool, device: torch.device) -> None:
    holder = _derived()()

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * holder.k
        holder.__dict__ = {"k": holder.k + 1}
        return y

    x = torch.ones(4, device=device)
    fast = pygraph.jit(fn)
    for expected in (2.0, 3.0, 4.0):
        assert torch.equal(fast(x), x * expected)
    assert vars(holder) == {"k": 5.0}
    assert "holder.__dict__" in str(fast.explain())


def test_objects_that_share_a_dict(native: bool, device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        shared = _Shared()
        shared.calls += 1.0
        return x * shared.calls

    x = torch.ones(4, device=device)
    fast = pygraph.jit(fn)
    _Shared.everything["calls"] = 0.0
    assert [fast(x).tolist() for _ in range(4)] == [[k] * 4 for k in (1.0, 2.0, 3.0, 4.0)]
    assert _Shared.everything == {"calls": 4.0}


def test_a_cache_that_a_library_keeps_in_a_class_is_no_change() -> None:
    environment = Environment(nn.Linear(2, 2))
    with mock.patch.object(nn.Linear, "some_cache", {}, create=True):
        assert environment.is_current()
    assert environment.is_current()
