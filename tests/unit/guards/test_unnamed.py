"""State that a function reads where no code has a name for it: in methods that the interpreter calls, by text, behind
weak references, in what derived classes add to numbers.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.guards.environment import Environment
from pygraph.guards.values import same
from tests.property.python_state import _HEADER


@dataclasses.dataclass(frozen=True)
class Case:
    """The text of a module, what its function returns for ``x``, and changes one after the other."""

    setup: str
    result: str
    changes: tuple[str, ...]


def _method(name: str, use: str, arguments: str = "self, *_", value: str = "K", base: str = "") -> Case:
    """A method that the interpreter calls reads a variable of its module."""
    setup = f"K = 2.0\nclass A{base}:\n    def {name}({arguments}): return {value}\na = A()"
    return Case(setup, use, ("K = 5.0", "K = 2.0"))


def _of_metaclass(name: str, use: str, arguments: str = "cls, *_") -> Case:
    setup = f"K = 2.0\nclass M(type):\n    def {name}({arguments}): return K\nclass A(metaclass=M): pass"
    return Case(setup, use, ("K = 5.0",))


def _made(body: str) -> Case:
    """What makes an object reads a variable of its module."""
    return Case(f"K = 2.0\nclass A:\n{body}", "x * A().k", ("K = 5.0", "K = 2.0"))


_INIT = "    def __init__(self): self.k = K\n"

CASES: dict[str, Case] = {
    "item": _method("__getitem__", "x * a[1]"),
    "length": _method("__len__", "x * len(a)", value="int(K)"),
    "membership": _method("__contains__", "x * 2 if 1 in a else x * 3", value="K > 3"),
    "truth": _method("__bool__", "x * 2 if a else x * 3", value="K > 3"),
    "operator": _method("__rmul__", "x * a", "self, x", "x * K"),
    "missing attribute": _method("__getattr__", "x * a.k"),
    "any attribute": _method("__getattribute__", "x * a.k"),
    "missing item": _method("__missing__", "x * a['k']", base="(dict)"),
    "iteration": _method("__iter__", "sum(x * k for k in a)", value="iter((K, K))"),
    "torch's functions": Case(
        "K = 2.0\nclass A:\n    @classmethod\n    def __torch_function__(cls, fn, types, args, kwargs=None):\n"
        "        return args[0] * K\na = A()", "torch.add(x, a)", ("K = 5.0",)),
    "item of a class": _method("__class_getitem__", "x * A[1]"),
    "call of what is made inside": _method("__call__", "x * A()()"),
    "call of a metaclass": _of_metaclass("__call__", "x * A()"),
    "attribute by a metaclass": _of_metaclass("__getattr__", "x * A.k"),
    "isinstance by a metaclass": Case(
        "K = True\nclass M(type):\n    def __instancecheck__(cls, value): return K\nclass A(metaclass=M): pass",
        "x * 2 if isinstance(3, A) else x * 3", ("K = False",)),
    "descriptor": Case("K = 2.0\nclass D:\n    def __get__(self, *_): return K\nclass A:\n    k = D()\na = A()",
                       "x * a.k", ("K = 5.0",)),
    "init": _made(_INIT),
    "new": _made("    def __new__(cls):\n        made = object.__new__(cls)\n        made.k = K\n        return made"),
    "init of a base": Case(
        f"K = 2.0\nclass A:\n{_INIT}class B(A):\n    def __init__(self): super().__init__()", "x * B().k",
        ("K = 5.0",)),
    "init of a class like this": Case(
        f"K = 2.0\nclass A:\n{_INIT}    def like(self): return type(self)()\na = A()", "x * a.like().k", ("K = 5.0",)),
    "init by a class method": Case(
        f"K = 2.0\nclass A:\n{_INIT}    @classmethod\n    def new(cls): return cls()\na = A()", "x * a.new().k",
        ("K = 5.0",)),
    "after the init of a dataclass": Case(
        "K = 2.0\n@dataclasses.dataclass\nclass A:\n    k: float = 0.0\n    def __post_init__(self): self.k += K",
        "x * A().k", ("K = 5.0",)),
    "method of an enum": Case("K = 2.0\nclass E(enum.Enum):\n    A = 1\n    def k(self): return K", "x * E.A.k()",
                              ("K = 5.0",)),
    "attribute of an enum's member": Case("class E(enum.Enum):\n    A = [2.0]", "x * E.A.value[0]",
                                          ("E.A.value[0] = 5.0",)),
    "partial method": Case(
        "K = 2.0\nclass A:\n    def _k(self, more): return K + more[0]\n    k = functools.partialmethod(_k, [0.0])\n"
        "a = A()",
        "x * a.k()", ("K = 5.0", "vars(A)['k'].args[0][0] = 1.0")),
    "method by text": Case(
        "K = 2.0\nclass A:\n    def k(self): return K\na = A()", "x * getattr(a, 'k')()", ("K = 5.0",)),
    "variable of a module by text": Case(
        "lib = types.ModuleType('lib')", "x * getattr(lib, 'k', 2.0)", ("lib.k = 5.0", "lib.k = 3.0", "del lib.k")),
    "whether a module has a variable": Case(
        "lib = types.ModuleType('lib')", "x * 2 if hasattr(lib, 'k') else x * 3", ("lib.k = 5.0", "del lib.k")),
    "variable in globals()": Case("K = 2.0", "x * globals()['K']", ("K = 5.0",)),
    "environment variable": Case(
        "import os\nos.environ['PYGRAPH_TEST_K'] = '2'", "x * float(os.environ.get('PYGRAPH_TEST_K', 3))",
        ("os.environ['PYGRAPH_TEST_K'] = '5'", "os.environ.pop('PYGRAPH_TEST_K', None)",
         "os.environ['PYGRAPH_TEST_K'] = '7'", "os.environ.pop('PYGRAPH_TEST_K', None)")),
    "default of a context variable": Case(
        "c = contextvars.ContextVar('c', default={'k': 2.0})", "x * c.get()['k']", ("c.get()['k'] = 5.0",)),
    "class of a thread-local": Case(
        "K = 1.0\nclass T(threading.local):\n    k = 2.0\n    def m(self): return K\nt = T()", "x * t.k * t.m()",
        ("T.k = 5.0", "K = 3.0", "t.k = 4.0")),
    "what makes missing items": Case(
        "d = collections.defaultdict(lambda: 2.0)", "x * d.default_factory()", ("d.default_factory = lambda: 5.0",)),
    "view of another mapping": Case(
        "d = collections.ChainMap({'k': 2.0})\nm = types.MappingProxyType(d)", "x * m['k']", ("d['k'] = 5.0",)),
    "array": Case("import array\na = array.array('f', [2.0])", "x * a[0] * len(a)", ("a[0] = 5.0", "a.append(1.0)")),
    "event": Case("e = threading.Event()", "x * 2 if e.is_set() else x * 3", ("e.set()", "e.clear()")),
    "number that prints as another": Case(
        "class D(float):\n    def __repr__(self): return 'D'\nclass A: pass\na = A()\na.k = D(2.0)",
        "x * float.__mul__(a.k, 1.0)", ("a.k = D(5.0)",)),
    "attribute of a number": Case("class D(float): pass\nd = D(2.0)\nd.k = 3.0", "x * d.k", ("d.k = 5.0",)),
    "attribute of a text": Case("class D(str): pass\nd = D('a')\nd.k = 3.0", "x * d.k", ("d.k = 5.0",)),
    "what a function remembers": Case(
        "K = 2.0\n@functools.lru_cache\ndef k(): return K", "x * k()", ("K = 5.0", "k.cache_clear()")),
    "registered class": Case(
        "import abc\nclass I(abc.ABC): pass\nclass A: pass\na = A()", "x * 2 if isinstance(a, I) else x * 3",
        ("I.register(A)",)),
    "what is weakly referenced": Case(
        "class A: pass\na = A()\na.k = 2.0\nr = weakref.ref(a)", "x * r().k if r() is not None else x * 9",
        ("a.k = 5.0", "a.more = 1", "del a")),
    "what is behind a proxy": Case(
        "class A: pass\na = A()\na.k = [2.0]\np = weakref.proxy(a)", "x * p.k[0]", ("a.k[0] = 5.0",)),
    "module behind a proxy": Case(
        "a = nn.ReLU()\np = weakref.proxy(a)", "p(x)", ("a.forward = lambda x: x * 5.0", "del a.forward")),
    "weakly referenced method": Case(
        "class A:\n    def k(self): return self.v\na = A()\na.v = 2.0\nr = weakref.WeakMethod(a.k)", "x * r()()",
        ("a.v = 5.0",)),
    "weak set": Case("class A: pass\na, b = A(), A()\ns = weakref.WeakSet([a])", "x * len(s)", ("s.add(b)", "del b")),
    "value of a weak dictionary": Case(
        "class A: pass\na = A()\na.k = 2.0\nd = weakref.WeakValueDictionary(a=a)",
        "x * d['a'].k if 'a' in d else x * 9",
        ("a.k = 5.0", "del a")),
}  # fmt: skip


def _module(case: Case) -> Any:
    module = types.ModuleType(__name__)  # dataclasses ask for it
    source = f"import enum\n{_HEADER}\n{case.setup}\ndef step(x): return {case.result}\n"
    exec(compile(source, "<unnamed>", "exec"), module.__dict__)
    return module


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed(name: str, native: bool, device: torch.device) -> None:
    case, x = CASES[name], torch.arange(3.0, device=device)
    eager, ours = _module(case), _module(case)
    fast, results = pygraph.jit(ours.step), list[list[float]]()
    for change in ("", *case.changes):
        for module in (eager, ours):
            exec(change, module.__dict__)
            expected = eager.step(x.clone())
        for _ in range(3):
            assert torch.equal(fast(x.clone()), expected)
        results.append(expected.tolist())
    assert len({str(result) for result in results}) > 1
    assert not fast.explain().to_dict()["fallbacks"]


def test_a_variable_that_is_assigned_later_is_noticed(native: bool, device: torch.device) -> None:
    def make() -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            try:
                return x * k
            except NameError:
                return x + 1

        def assign(value: float) -> None:
            nonlocal k
            k = value

        if False:
            k = 0.0
        return step, assign

    (step, assign), (mine, mine_assigns) = make(), make()
    fast, x = pygraph.jit(mine), torch.ones(3, device=device)
    for value in (None, 3.0, 2.0):
        if value is not None:
            assign(value)
            mine_assigns(value)
        for _ in range(3):
            assert torch.equal(fast(x), step(x))


_MAIN = """
def names(x):
    from .settings import K
    return x * K
def module(x):
    from . import settings
    return x * settings.K
"""


@pytest.mark.parametrize("name", ["main.names", "main.module", "below.main.names", "below.main.module"])
def test_a_change_in_a_module_that_a_function_imports_from_its_package(
    name: str, native: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    package = tmp_path / "pygraph_test_package"
    (package / "below").mkdir(parents=True)
    for place, text in ((package, _MAIN), (package / "below", _MAIN.replace("from .", "from .."))):
        (place / "__init__.py").write_text("")
        (place / "main.py").write_text(text)
    (package / "settings.py").write_text("K = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    module, _, function = f"{package.name}.{name}".rpartition(".")
    try:
        fast, x = pygraph.jit(getattr(importlib.import_module(module), function)), torch.ones(3, device=device)
        assert [fast(x).tolist() for _ in range(3)] == [[2.0] * 3] * 3
        settings: Any = sys.modules[f"{package.name}.settings"]
        settings.K = 5.0
        assert [fast(x).tolist() for _ in range(3)] == [[5.0] * 3] * 3
    finally:
        for loaded in [key for key in sys.modules if key.startswith(package.name)]:
            del sys.modules[loaded]


def test_what_is_weakly_referenced_is_not_kept_alive(native: bool, device: torch.device) -> None:
    class Owner:
        pass

    owner: Any = Owner()
    owner.k, owner.part = 2.0, Owner()
    reference, part = weakref.ref(owner), weakref.ref(owner.part)
    fast, x = pygraph.jit(lambda x: x * reference().k), torch.ones(3, device=device)  # type: ignore[union-attr]
    for _ in range(3):
        fast(x)
    del owner
    gc.collect()
    assert reference() is None
    assert part() is None


def test_what_a_trace_changes_behind_a_weak_reference_is_put_back(native: bool, device: torch.device) -> None:
    class Owner:
        calls = 0

    owner = Owner()
    owner.calls = 0
    reference: Any = weakref.ref(owner)

    def step(x: torch.Tensor) -> torch.Tensor:
        reference().calls += 1
        return x * reference().calls

    fast, x = pygraph.jit(step), torch.ones(3, device=device)
    assert [fast(x).tolist() for _ in range(4)] == [[float(k)] * 3 for k in (1, 2, 3, 4)]
    assert owner.calls == 4


def test_a_dead_proxy_is_no_error(device: torch.device) -> None:
    module = nn.Linear(3, 3)
    proxies = [weakref.proxy(module)]
    fast, x = pygraph.jit(lambda x: x * len(proxies)), torch.ones(3, device=device)
    for _ in range(2):
        fast(x)
    del module
    gc.collect()
    assert torch.equal(fast(x), x)
    assert torch.equal(pygraph.jit(lambda x: x * len(proxies))(x), x)


def test_equal_values_in_another_tuple_are_no_change(native: bool, device: torch.device) -> None:
    """As where a size is set before every call."""
    module = nn.Flatten()

    def size(*values: Any) -> tuple[Any, ...]:
        return values

    module.size, module.part = size(2, 3), slice(0, 2)  # type: ignore[assignment]
    fast, x = pygraph.jit(lambda x: x.view(module.size)[module.part] * 2), torch.arange(6.0, device=device)
    for _ in range(30):
        module.size, module.part = size(2, 3), slice(0, 2)  # type: ignore[assignment]
        assert fast(x).shape == (2, 3)
    assert fast.cache_info().misses == 1
    module.size = size(3, 2)  # type: ignore[assignment]
    assert fast(x).shape == (2, 2)
    module.size = size(2, 3)  # type: ignore[assignment]
    assert fast(x).shape == (2, 3)
    assert fast.cache_info().misses == 2


@pytest.mark.parametrize(
    ("value", "expected", "answer"),
    [((1, (2.0, None)), (1, (2.0, None)), True), ((1, 2), (1, 2.0), False), ((0.0,), (-0.0,), False),
     (([],), ([],), False), (range(3), range(3), True), (slice(1, None), slice(1, 2), False)],
)  # fmt: skip
def test_tuples_are_compared_by_their_items(value: Any, expected: Any, answer: bool) -> None:
    assert same(value, expected) is answer


def test_what_an_installed_package_reads_where_it_makes_objects_is_not_followed() -> None:
    from packaging.version import Version  # any class of an installed package

    environment = Environment(lambda x: Version(x))
    assert Version.__init__ not in [function for function, *_ in environment.guards.code.functions]
