"""Programs over Python's state, as source text: where state lives, what a function does with it, who changes it when.

A program is the text of a module with a function ``step(x, k)``, so a failing example prints as something to read and
run. It is executed twice, in two namespaces, of which one is run by eager PyTorch and one transformed.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import textwrap
import types
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from tests.sources import execute


@dataclasses.dataclass(frozen=True)
class Place:
    """A kind of place where a value can lie, as snippets of code; ``{n}`` is the number of the site.

    Attributes:
        setup: Statements at module level that put ``{value}`` there.
        read: An expression for what lies there.
        write: A statement that puts ``{value}`` there.
        declare: What a function has to declare to be able to write.
    """

    setup: str
    read: str
    write: str = ""
    declare: str = ""

    def __post_init__(self) -> None:
        if not self.write:
            object.__setattr__(self, "write", f"{self.read} = {{value}}")


def _deep(depth: int) -> Place:
    """An attribute so many objects deep."""
    setup = "class Node{n}: pass\nroot{n} = last{n} = Node{n}()\n"
    setup += f"for _ in range({depth - 1}):\n    last{{n}}.next = Node{{n}}()\n    last{{n}} = last{{n}}.next\n"
    setup += "last{n}.value = {value}\ndel last{n}"
    return Place(setup, "root{n}" + ".next" * (depth - 1) + ".value")


PLACES: dict[str, Place] = {
    "global": Place("v{n} = {value}", "v{n}", declare="global v{n}"),
    "closure": Place(
        "def _cell{n}(c):\n    def get(): return c\n    def put(v):\n        nonlocal c\n        c = v\n"
        "    return get, put\nget{n}, put{n} = _cell{n}({value})",
        "get{n}()", "put{n}({value})",
    ),
    "attribute": _deep(1),
    "attribute, 5 deep": _deep(5),
    "attribute, 9 deep": _deep(9),
    "attribute, 14 deep": _deep(14),
    "dict": Place("d{n} = {{'a': 0, 'k': {value}}}", "d{n}['k']"),
    "dict in a dict": Place("d{n} = {{'a': {{'k': {value}}}}}", "d{n}['a']['k']"),
    "dict with objects as keys": Place("key{n} = type('K', (), {{}})()\nd{n} = {{key{n}: {value}}}", "d{n}[key{n}]"),
    "list": Place("l{n} = [0, {value}]", "l{n}[1]"),
    "deque": Place("l{n} = collections.deque([0, {value}])", "l{n}[1]"),
    "class": Place("class C{n}:\n    value = {value}", "C{n}.value"),
    "base class": Place(
        "class B{n}:\n    value = {value}\nclass C{n}(B{n}): pass", "C{n}.value", "B{n}.value = {value}"
    ),
    "slots": Place("class S{n}:\n    __slots__ = ('value',)\ns{n} = S{n}()\ns{n}.value = {value}", "s{n}.value"),
    "function": Place("def h{n}(): return h{n}.value\nh{n}.value = {value}", "h{n}()", "h{n}.value = {value}"),
    "default": Place("def h{n}(box=[{value}]): return box\n", "h{n}()[0]"),
    "namespace": Place("o{n} = types.SimpleNamespace(value={value})", "o{n}.value"),
    "dataclass": Place(
        "@dataclasses.dataclass\nclass D{n}:\n    value: object\no{n} = D{n}({value})", "o{n}.value"
    ),
    "frozen dataclass in a list": Place(
        "@dataclasses.dataclass(frozen=True)\nclass D{n}:\n    value: object\no{n} = [D{n}({value})]",
        "o{n}[0].value", "o{n}[0] = D{n}({value})",
    ),
    "property": Place(
        "class P{n}:\n    @property\n    def value(self): return self._v\n    @value.setter\n"
        "    def value(self, v): self._v = v\no{n} = P{n}()\no{n}.value = {value}",
        "o{n}.value",
    ),
    "__getattr__": Place(
        "class G{n}:\n    def __init__(self, v): self.__dict__['store'] = {{'value': v}}\n"
        "    def __getattr__(self, key): return self.store[key]\n"
        "    def __setattr__(self, key, v): self.store[key] = v\no{n} = G{n}({value})",
        "o{n}.value",
    ),
    "descriptor": Place(
        "class Desc{n}:\n    def __get__(self, o, t): return o.__dict__['_v']\n"
        "    def __set__(self, o, v): o.__dict__['_v'] = v\nclass O{n}:\n    value = Desc{n}()\n"
        "o{n} = O{n}()\no{n}.value = {value}",
        "o{n}.value",
    ),
    "UserDict": Place("d{n} = collections.UserDict(k={value})", "d{n}['k']"),
    "ChainMap": Place("d{n} = collections.ChainMap({{}}, {{'k': {value}}})", "d{n}['k']"),
    "defaultdict": Place("d{n} = collections.defaultdict(int)\nd{n}['k'] = {value}", "d{n}['k']"),
    "OrderedDict": Place("d{n} = collections.OrderedDict(k={value})", "d{n}['k']"),
    "WeakKeyDictionary": Place(
        "key{n} = type('K', (), {{}})()\nd{n} = weakref.WeakKeyDictionary()\nd{n}[key{n}] = {value}", "d{n}[key{n}]"
    ),
    "thread-local": Place("t{n} = threading.local()\nt{n}.value = {value}", "t{n}.value"),
    "context variable": Place(
        "cv{n} = contextvars.ContextVar('cv{n}')\ncv{n}.set({value})", "cv{n}.get()", "cv{n}.set({value})"
    ),
    "queue": Place("q{n} = queue.Queue()\nq{n}.put({value})", "q{n}.queue[0]"),
    "exception": Place("e{n} = ValueError('held')\ne{n}.value = {value}", "e{n}.value"),
    "array of objects": Place("a{n} = np.empty(2, object)\na{n}[1] = {value}", "a{n}[1]"),
    "module": Place("m{n} = nn.Linear(2, 2)\nm{n}.value = {value}", "m{n}.value"),
    "module in modules": Place(
        "m{n} = nn.Sequential(nn.Sequential(nn.ReLU()), nn.Identity())\nm{n}[0][0].value = {value}", "m{n}[0][0].value"
    ),
    "tensor attribute": Place("w{n} = torch.zeros(3, device=device)\nw{n}.value = {value}", "w{n}.value"),
    "imported module": Place(
        "lib{n} = types.ModuleType('lib{n}')\nlib{n}.value = {value}", "lib{n}.value"
    ),
    "bound method": Place(
        "class M{n}:\n    def get(self): return self.v\no{n} = M{n}()\no{n}.v = {value}\nget{n} = o{n}.get",
        "get{n}()", "o{n}.v = {value}",
    ),
    "partial": Place("p{n} = functools.partial(max)\np{n}.value = {value}", "p{n}.value"),
    "memo": Place("@functools.lru_cache\ndef h{n}(): return 1.0\nh{n}.value = {value}", "h{n}.value"),
    "dict that is replaced": Place(
        "class R{n}: pass\no{n} = R{n}()\no{n}.value = {value}", "o{n}.value", "o{n}.__dict__ = {{'value': {value}}}"
    ),
    "dict that objects share": Place(
        "class R{n}:\n    all = {{'value': {value}}}\n    def __init__(self): self.__dict__ = self.all\no{n} = R{n}()",
        "R{n}().value", "o{n}.value = {value}",
    ),
    "view of a dict": Place("d{n} = {{'k': {value}}}\nv{n} = d{n}.values()", "next(iter(v{n}))", "d{n}['k'] = {value}"),
    "tuple in an attribute": Place("class T{n}: pass\no{n} = T{n}()\no{n}.pair = (0, {value})", "o{n}.pair[1]",
                                   "o{n}.pair = (0, {value})"),
}  # fmt: skip

KINDS = ("number", "count", "flag", "text", "tensor")

_FIRST = {
    "number": "2.0",
    "count": "1",
    "flag": "True",
    "text": "'a'",
    "tensor": "torch.full((3,), 2.0, device=device)",
}
_OTHERS = {
    "number": ("0.5", "-1.0", "2.0"),
    "count": ("0", "3", "1"),
    "flag": ("False", "True"),
    "text": ("'b'", "'a'"),
    "tensor": ("torch.full((3,), 0.25, device=device)", "torch.ones(3, device=device)"),
}
_USES = {
    "number": ("y = y * {read}", "y = y + {read}", "y = y if {read} > 0 else -y"),
    "count": ("y = y * {read}", "y = y.repeat({read} % 3 + 1)[:3]", "y = y + k if {read} > 1 else y"),
    "flag": ("y = y + 1 if {read} else y - 1",),
    "text": ("y = {{'a': y.sin, 'b': y.cos}}[{read}]()",),
    "tensor": ("y = y + {read}", "y = torch.minimum(y, {read})", "y = y * {read}.sum()"),
}
_UPDATES = {
    "number": ("{read} + 1.0", "0.25", "k"),
    "count": ("{read} + 1", "7"),
    "flag": ("not {read}",),
    "text": ("'b'",),
    "tensor": ("y * 1.0", "{read} + 1", "torch.zeros(3, device=device)", "{read}"),
}

# What may be replaced in the code between calls, as (setup, use, one change after another).
CODE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a function": ("def f{n}(y): return y + 1", "y = f{n}(y)", ("def f{n}(y): return y - 1", "f{n} = torch.neg")),
    "its code": (
        "def f{n}(y): return y + 1\ndef g{n}(y): return y * 3\ncode{n} = f{n}.__code__",
        "y = f{n}(y)",
        ("f{n}.__code__ = g{n}.__code__", "f{n}.__code__ = code{n}"),
    ),
    "its defaults": ("def f{n}(y, a=2.0): return y * a", "y = f{n}(y)", ("f{n}.__defaults__ = (5.0,)",)),
    "its keyword defaults": (
        "def f{n}(y, *, a=2.0): return y * a", "y = f{n}(y)", ("f{n}.__kwdefaults__ = {{'a': 5.0}}",)
    ),
    "a method": (
        "class A{n}:\n    def go(self, y): return y + 1\na{n} = A{n}()", "y = a{n}.go(y)",
        ("A{n}.go = lambda self, y: y - 2", "a{n}.go = torch.neg"),
    ),
    "__call__": (
        "class A{n}:\n    def __call__(self, y): return y + 1\na{n} = A{n}()", "y = a{n}(y)",
        ("A{n}.__call__ = lambda self, y: y - 2",),
    ),
    "the class of an object": (
        "class A{n}:\n    def go(self, y): return y + 1\nclass B{n}(A{n}):\n    def go(self, y): return y * 5\n"
        "a{n} = A{n}()", "y = a{n}.go(y)", ("a{n}.__class__ = B{n}", "a{n}.__class__ = A{n}"),
    ),
    "a base class": (
        "class A{n}:\n    def go(self, y): return y + 1\nclass B{n}:\n    def go(self, y): return y * 5\n"
        "class C{n}(A{n}): pass\na{n} = C{n}()", "y = a{n}.go(y)", ("C{n}.__bases__ = (B{n},)",),
    ),
    "__getattr__": (
        "class A{n}:\n    def __getattr__(self, key): return 2.0\na{n} = A{n}()", "y = y * a{n}.scale",
        ("A{n}.__getattr__ = lambda self, key: 3.0", "A{n}.scale = 7.0", "a{n}.scale = 9.0"),
    ),
    "a metaclass": (
        "class M{n}(type):\n    value = 2.0\nclass A{n}(metaclass=M{n}): pass", "y = y * A{n}.value",
        ("M{n}.value = 3.0", "A{n}.value = 4.0"),
    ),
    "a property": (
        "class A{n}:\n    @property\n    def value(self): return 2.0\na{n} = A{n}()", "y = y * a{n}.value",
        ("A{n}.value = property(lambda self: 3.0)",),
    ),
    "the class of a module": (
        "m{n} = nn.Sequential(nn.Identity(), nn.ReLU())", "y = m{n}(y)",
        ("m{n}[1].__class__ = nn.Sigmoid", "m{n}[1].__class__ = nn.Tanh"),
    ),
    "a module's forward": (
        "class R{n}(nn.Module):\n    def forward(self, y): return y + 1\nm{n} = R{n}()", "y = m{n}(y)",
        ("R{n}.forward = lambda self, y: y * 4", "m{n}.forward = torch.neg",
         "m{n}.register_forward_hook(lambda m, i, o: o * 2)"),
    ),
    "the order of a dict": (
        "d{n} = dict(a=torch.sin, b=torch.exp)", "for h in d{n}.values(): y = h(y)",
        ("d{n}['a'] = d{n}.pop('a')", "d{n}['b'] = d{n}.pop('b')"),
    ),
    "the order of modules": (
        "m{n} = nn.Sequential(collections.OrderedDict(a=nn.Tanh(), b=nn.Softplus()))", "y = m{n}(y)",
        ("m{n}._modules['a'] = m{n}._modules.pop('a')",),
    ),
    "an attribute that was not there": (
        "class A{n}: pass\na{n} = A{n}()", "y = y * 2 if hasattr(a{n}, 'extra') else y + 1",
        ("a{n}.extra = 1", "vars(a{n}).pop('extra', None)", "A{n}.extra = 1"),
    ),
    "a global that was not there": (
        "", "try: y = y * late{n}\nexcept NameError: y = y + 1",
        ("late{n} = 3.0", "late{n} = 2.0", "globals().pop('late{n}', None)")
    ),
    "a builtin": ("", "y = y * len((1, 2, 3))", ("len = lambda value: 5", "globals().pop('len', None)")),
    "an imported function": (
        "lib{n} = types.ModuleType('lib{n}')\nlib{n}.f = torch.sin", "y = lib{n}.f(y)", ("lib{n}.f = torch.cos",)
    ),
    "a partial": (
        "p{n} = functools.partial(torch.add, other=1.0)", "y = p{n}(y)", ("p{n}.keywords['other'] = 4.0",)
    ),
    "a wrapped function": (
        "def w{n}(f):\n    @functools.wraps(f)\n    def inner(*a): return f(*a) * 2\n    return inner\n"
        "def base{n}(y): return y + 1\nf{n} = w{n}(base{n})",
        "y = f{n}(y)", ("base{n}.__code__ = (lambda y: y - 3).__code__",),
    ),
    "a module in sys.modules": (
        "def lib{n}(value):\n    made = sys.modules['pygraph_lib{n}'] = types.ModuleType('pygraph_lib{n}')\n"
        "    made.value = value\nlib{n}(2.0)",
        "import pygraph_lib{n}\ny = y * pygraph_lib{n}.value",
        ("lib{n}(3.0)", "sys.modules['pygraph_lib{n}'].value = 4.0"),
    ),
    "raw memory": (
        "data{n} = bytearray([2])\nm{n} = memoryview(data{n})", "y = y * m{n}[0]", ("data{n}[0] = 3", "m{n}[0] = 4"),
    ),
    "a number of C": ("c{n} = ctypes.c_float(2.0)", "y = y * c{n}.value", ("c{n}.value = 3.0",)),
    "a number that processes share": (
        "c{n} = multiprocessing.Value('d', 2.0)", "y = y * c{n}.value", ("c{n}.value = 3.0",)
    ),
    "a static method": (
        "class A{n}:\n    @staticmethod\n    def go(y): return y + 1", "y = A{n}.go(y)",
        ("A{n}.go = staticmethod(lambda y: y * 3)",),
    ),
}  # fmt: skip

# State that a call advances or fills by itself, as (setup, use): no write of a value to a place.
SPECIAL: dict[str, tuple[str, str]] = {
    "an iterator of a list": ("it{n} = iter([1.0, 2.0, 3.0] * 9)", "y = y * next(it{n})"),
    "a generator": ("def gen{n}():\n    yield from map(float, range(1, 99))\nit{n} = gen{n}()", "y = y * next(it{n})"),
    "a generator in an attribute": (
        "class L{n}: pass\nl{n} = L{n}()\nl{n}.batches = (float(i) for i in range(1, 99))", "y = y * next(l{n}.batches)"
    ),
    "itertools.count": ("it{n} = itertools.count(1)", "y = y * next(it{n})"),
    "itertools.cycle": ("it{n} = itertools.cycle([1.0, 2.0])", "y = y * next(it{n})"),
    "enumerate": ("it{n} = enumerate([5.0] * 30)", "y = y + next(it{n})[0]"),
    "an iterator in a tuple": ("pair{n} = (iter([1.0, 2.0, 3.0] * 9), 1)", "y = y * next(pair{n}[0])"),
    "a zip of iterators": (
        "it{n} = zip(itertools.count(), [2.0] * 30)", "for a, b in it{n}:\n    y = y * b + a\n    break"
    ),
    "an iterator class": (
        "class I{n}:\n    def __init__(self): self.i = 0\n    def __iter__(self): return self\n"
        "    def __next__(self):\n        self.i += 1\n        return float(self.i)\nit{n} = I{n}()",
        "y = y * next(it{n})",
    ),
    "random.Random": ("rng{n} = random.Random(0)", "y = y * rng{n}.random()"),
    "a NumPy generator": ("rng{n} = np.random.default_rng(0)", "y = y * float(rng{n}.random())"),
    "functools.lru_cache": (
        "@functools.lru_cache\ndef memo{n}(size): return torch.arange(size, device=device) * 1.0", "y = y + memo{n}(3)"
    ),
    "functools.cache with calls counted": (
        "calls{n} = []\n@functools.cache\ndef memo{n}(size):\n    calls{n}.append(size)\n"
        "    return torch.arange(size, device=device) * 1.0",
        "y = y + memo{n}(3)",
    ),
    "lru_cache of a size": (
        "@functools.lru_cache(maxsize=2)\ndef memo{n}(size): return torch.arange(size, device=device) * 1.0",
        "y = y + memo{n}(x.shape[0])[:3]",
    ),
    "a dict as memo": (
        "memo{n} = {{}}", "if 3 not in memo{n}: memo{n}[3] = torch.arange(3, device=device) * 1.0\ny = y + memo{n}[3]"
    ),
    "a dict as memo by size": (
        "memo{n} = {{}}",
        "if x.shape[0] not in memo{n}: memo{n}[x.shape[0]] = torch.arange(x.shape[0], device=device) * 1.0\n"
        "y = y + memo{n}[x.shape[0]][:3]",
    ),
    "a cached property": (
        "class A{n}:\n    @functools.cached_property\n    def table(self):\n"
        "        return torch.arange(3, device=device) * 1.0\na{n} = A{n}()",
        "y = y + a{n}.table",
    ),
    "a memo of a value": (
        "memo{n} = {{}}", "if 'first' not in memo{n}: memo{n}['first'] = y * 1.0\ny = y + memo{n}['first']"
    ),
    "a list that grows": ("log{n} = []", "log{n}.append(k)\ny = y + len(log{n})"),
    "a list of results": ("log{n} = []", "log{n}.append(y * 1.0)\ny = y + log{n}[0]"),
    "a window": ("w{n} = [torch.zeros(3, device=device)] * 2", "w{n}.append(y * 1.0)\ny = y + w{n}.pop(0)"),
    "a window that is filled": ("w{n} = []", "w{n}.append(y * 1.0)\ndel w{n}[:-2]\ny = y + w{n}[0]"),
    "a deque that is filled": ("w{n} = collections.deque(maxlen=2)", "w{n}.appendleft(y * 1.0)\ny = y + w{n}[-1]"),
    "a deque that turns": ("w{n} = collections.deque([1.0, 2.0, 3.0])", "w{n}.rotate(1)\ny = y + w{n}[0]"),
    "items that change places": (
        "w{n} = [torch.zeros(3, device=device), 2.0]", "w{n}.reverse()\ny = y + w{n}[0]\nw{n}[1] = w{n}[1] + 1"
    ),
    "a list in two places": (
        "w{n} = [torch.zeros(3, device=device), 0]\nv{n} = {{'w': w{n}}}",
        "w{n}[0] = y * 1.0\nv{n}['w'][1] += 1\ny = y + v{n}['w'][0] * w{n}[1]",
    ),
    "an item in two lists": (
        "w{n} = [torch.zeros(3, device=device)]\nv{n} = [w{n}[0]]",
        "w{n}[0] = w{n}[0] + y\nv{n}[0].add_(1)\ny = y + v{n}[0]",
    ),
    "items in a list that is replaced": (
        "w{n} = [1.0]\nu{n} = w{n}", "global w{n}\nw{n}[0] += 1\nw{n} = [w{n}[0] * 2]\ny = y + w{n}[0] + u{n}[0]"
    ),
    "a list of lists": ("w{n} = [[1.0], [2.0]]", "w{n}[0][0] += 1\nw{n}.reverse()\ny = y + w{n}[0][0]"),
    "a set": ("seen{n} = set()", "seen{n}.add(k)\ny = y + len(seen{n})"),
    "a queue that is emptied": ("q{n} = collections.deque(range(1, 40))", "y = y + q{n}.popleft()"),
    "raw memory": ("m{n} = memoryview(bytearray([2]))", "m{n}[0] += 1\ny = y + m{n}[0]"),
    "a number of C": ("c{n} = ctypes.c_float(2.0)", "c{n}.value += 1\ny = y + c{n}.value"),
    "setdefault": ("d{n} = {{}}", "y = y + d{n}.setdefault('k', k)"),
    "a weak dictionary": (
        "d{n} = weakref.WeakValueDictionary()\nclass V{n}: pass\nkept{n} = []",
        "o = d{n}.get('k')\nif o is None:\n    o = V{n}()\n    o.value = y * 1.0\n    d{n}['k'] = o\n"
        "    kept{n}.append(o)\ny = y + o.value",
    ),
    "a finalizer": (
        "class F{n}:\n    def __del__(self): total{n}.add_(1)\ntotal{n} = torch.zeros(3, device=device)",
        "o = F{n}()\ndel o\ny = y + total{n}",
    ),
}  # fmt: skip

_HEADER = """\
import collections, contextvars, ctypes, dataclasses, functools, itertools, multiprocessing, queue, random, sys
import threading, types, weakref
import numpy as np
import torch
from torch import nn
"""

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class World:
    """A program with what happens between its calls.

    Attributes:
        source: The text of the module; it is executed with ``device`` among its variables.
        observed: Expressions for all that its sites hold.
        events: ``("call", size, number)``, or ``("run", statements)``, or ``("thread", statements)``, in order.
    """

    source: str
    observed: tuple[str, ...]
    events: tuple[tuple[Any, ...], ...]

    def __repr__(self) -> str:
        events = "\n".join(map(repr, self.events))
        return f"World:\n{textwrap.indent(self.source, '    ')}\n{textwrap.indent(events, '    ')}"

    def module(self, device: torch.device) -> types.ModuleType:
        """The program, executed; its lines are known to tracebacks."""
        name = f"generated_world_{next(_numbers)}"
        module = types.ModuleType(name)
        module.__dict__["device"] = device
        sys.modules[name] = module
        execute(self.source, module.__dict__)
        return module


def world(
    setups: Sequence[str], body: Sequence[str], observed: Sequence[str], events: Sequence[tuple[Any, ...]]
) -> World:
    """A world whose function does what ``body`` says with ``y``, a part of its argument ``x``, and a number ``k``."""
    declared = [line for line in body if line.startswith("global ")]
    lines = [
        *dict.fromkeys(declared),
        "y = x[:3] * 1.0",
        *(line for line in body if line not in declared),
        "return y * k",
    ]
    step = "def step(x, k):\n" + textwrap.indent("\n".join(lines), "    ")
    source = "\n".join([_HEADER, *filter(None, setups), step, ""])
    return World(source, tuple(observed), (CALL, *events, CALL))


CALL = ("call", 3, 1.5)


def world_of_place(name: str) -> World:
    """Five sites of one kind, of which two are written, changed one after the other."""
    place = PLACES[name]
    setups, body, observed, events = list[str](), list[str](), list[str](), list[tuple[Any, ...]]()
    for n, kind in enumerate(KINDS):
        read = place.read.format(n=n)
        setups.append(place.setup.format(n=n, value=_FIRST[kind]))
        observed.append(read)
        body.append(_USES[kind][0].format(read=read))
        if kind in ("count", "tensor"):
            body.append(place.write.format(n=n, value=_UPDATES[kind][0].format(read=read)))
            body += [place.declare.format(n=n)] if place.declare else []
        events += [CALL, CALL, ("thread" if n % 2 else "run", place.write.format(n=n, value=_OTHERS[kind][0]))]
    return world(setups, body, observed, [*events, CALL, ("call", 5, 1.5)])


def world_of_code(name: str) -> World:
    """Code that is replaced between calls, also from another thread."""
    setup, use, changes = CODE[name]
    events: list[tuple[Any, ...]] = [CALL, CALL]
    for index, text in enumerate(changes):
        events += [("thread" if index % 2 else "run", text.format(n=0)), CALL, CALL]
    return world([setup.format(n=0)], use.format(n=0).split("\n"), (), events)


def world_of_special(name: str) -> World:
    """State that calls advance or fill by themselves."""
    setup, use = SPECIAL[name]
    events = [CALL, CALL, ("call", 5, 1.5), ("call", 5, -0.5)]
    return world([setup.format(n=0)], use.format(n=0).split("\n"), (), events)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Programs with one to three sites, and four to eight events."""
    setups: list[str] = []
    body: list[str] = []
    observed: list[str] = []
    changes: list[str] = []
    for n in range(draw(st.integers(1, 3))):
        what = draw(st.sampled_from(("place", "place", "code", "special")))
        if what == "place":
            place, kind = PLACES[draw(st.sampled_from(sorted(PLACES)))], draw(st.sampled_from(KINDS))
            read = place.read.format(n=n)
            setups.append(place.setup.format(n=n, value=_FIRST[kind]))
            observed.append(read)
            for _ in range(draw(st.integers(1, 2))):
                if draw(st.integers(0, 3)):
                    body.append(draw(st.sampled_from(_USES[kind])).format(read=read))
                elif kind == "tensor" and draw(st.booleans()):
                    body.append(f"{read}.add_(1)")
                else:
                    value = draw(st.sampled_from(_UPDATES[kind])).format(read=read)
                    body.append(place.write.format(n=n, value=value))
                    body += [place.declare.format(n=n)] if place.declare else []
            changes += [place.write.format(n=n, value=value) for value in _OTHERS[kind]]
        elif what == "code":
            setup, use, replaced = CODE[draw(st.sampled_from(sorted(CODE)))]
            setups.append(setup.format(n=n))
            body += use.format(n=n).split("\n")
            changes += [text.format(n=n) for text in replaced]
        else:
            setup, use = SPECIAL[draw(st.sampled_from(sorted(SPECIAL)))]
            setups.append(setup.format(n=n))
            body += use.format(n=n).split("\n")
    events: list[tuple[Any, ...]] = []
    call = st.tuples(st.just("call"), st.sampled_from((3, 3, 3, 5)), st.sampled_from((1.5, 1.5, -0.5)))
    for _ in range(draw(st.integers(3, 7))):
        if changes and draw(st.integers(0, 2)) == 0:
            events.append((draw(st.sampled_from(("run", "run", "thread"))), draw(st.sampled_from(changes))))
        else:
            events.append(draw(call))
    return world(setups, body, observed, events)
