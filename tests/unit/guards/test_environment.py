"""What a function reaches besides its arguments: guards see every change, and a snapshot undoes it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import importlib
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import pygraph
from pygraph.errors import TraceError
from pygraph.guards.environment import Environment
from pygraph.process import extension

SETTING: Any = 1


class Config:
    def __init__(self) -> None:
        self.value = 1
        self.nested = types.SimpleNamespace(value=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.register_buffer("mean", torch.zeros(2))
        self.scale = 1.0
        self.sizes = [1, 2]
        self.options = {"a": 1}
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.sizes, self.options, self.config.value, self.config.nested.value
        return self.block(self.linear(x)) * self.scale + self.mean * len(kept)


def _set(path: str, value: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        owner, _, name = path.rpartition(".")
        target = model
        for part in owner.split(".") if owner else ():
            target = getattr(target, part)
        setattr(target, name, value)

    return change


CHANGES: dict[str, Callable[[Model], Any]] = {
    "float": _set("scale", 2.0),
    "type of a number": _set("scale", 1),
    "sign of zero": _set("scale", -0.0),
    "list item": lambda m: m.sizes.__setitem__(0, 9),
    "list length": lambda m: m.sizes.append(3),
    "list replaced": _set("sizes", [1, 2]),
    "dict item": lambda m: m.options.__setitem__("a", 2),
    "dict key": lambda m: m.options.__setitem__("b", 2),
    "attribute of an object": _set("config.value", 2),
    "attribute of an object in an object": _set("config.nested.value", 2),
    "attribute added": _set("extra", 1),
    "attribute removed": lambda m: delattr(m, "scale"),
    "parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.zeros(2, 2))),
    "buffer": _set("mean", torch.ones(2)),
    "submodule": _set("linear", nn.Linear(2, 2)),
    "submodule in a container": lambda m: m.block.__setitem__(0, nn.Linear(2, 2)),
    "submodule added": lambda m: m.block.append(nn.ReLU()),
    "training flag": lambda m: m.eval(),
    "training flag of a part": lambda m: m.block.eval(),
    "forward hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_of_a_module_is_seen(change: Callable[[Model], Any]) -> None:
    model = Model()
    if "scale" in change.__qualname__:
        model.scale = 0.0
    environment = Environment(model)
    assert environment.is_current()
    change(model)
    assert not environment.is_current()


def test_in_place_updates_and_reads_are_no_change() -> None:
    model = Model()
    environment = Environment(model)
    with torch.no_grad():
        model.linear.weight.add_(1)
    model.mean.fill_(3)
    model.load_state_dict(model.state_dict())
    model(torch.ones(2))
    model.scale = 1.0
    assert environment.is_current()


def test_global_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(lambda x: x * SETTING)
    assert environment.is_current()
    monkeypatch.setitem(globals(), "SETTING", 2)
    assert not environment.is_current()


def test_global_variable_of_a_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(lambda x: _helper(x))
    monkeypatch.setitem(globals(), "SETTING", 2)
    assert not environment.is_current()


def _helper(x: Any) -> Any:
    return x * SETTING


def test_closure_cell() -> None:
    scale = 1.0

    def fn(x: Any) -> Any:
        return x * scale

    environment = Environment(fn)
    assert environment.is_current()
    scale = 2.0
    assert not environment.is_current()


def test_keyword_default() -> None:
    def fn(x: Any, *, scale: float = 1.0) -> Any:
        return x * scale

    environment = Environment(fn)
    assert fn.__kwdefaults__ is not None
    fn.__kwdefaults__["scale"] = 2.0
    assert not environment.is_current()


def test_names_and_kinds_of_tensors() -> None:
    model = Model()
    loose = torch.ones(2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return model(x) + loose

    environment = Environment(fn)
    assert environment.names[id(model.linear.weight)] == "model.linear.weight"
    assert environment.kinds[id(model.linear.weight)] == "parameter"
    assert environment.names[id(model.mean)] == "model.mean"
    assert environment.kinds[id(model.mean)] == "buffer"
    assert environment.names[id(loose)] == "loose"
    assert environment.kinds[id(loose)] == "closed-over"


def test_partials_and_methods_are_walked() -> None:
    import functools

    model = Model()
    for fn in (functools.partial(model, scale=[1]), model.forward, functools.partial(model.forward)):
        assert Environment(fn).names[id(model.linear.weight)] == "linear.weight"


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_restore_undoes_a_change(change: Callable[[Model], Any]) -> None:
    model = Model()
    if "scale" in change.__qualname__:
        model.scale = 0.0
    environment = Environment(model)
    state = dict(model.state_dict(keep_vars=True))
    change(model)
    environment.restore()
    assert environment.is_current()
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state)
    assert all(after[name] is state[name] for name in state)


def test_restore_names_the_change_and_is_none_without_one() -> None:
    model = Model()
    environment = Environment(model)
    assert environment.restore() is None
    model.options["b"] = 1
    assert str(environment.restore()).startswith("options")
    assert model.options == {"a": 1}


def test_restore_undoes_gradients() -> None:
    model = Model()
    environment = Environment(model)
    before = environment.gradients()
    model(torch.ones(2)).sum().backward()
    assert environment.restore() is None
    assert environment.restore_gradients(before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_cycles_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    config = Config()
    config.nested.config = config
    assert Environment(lambda x: (x, loop, config)).is_current()


def test_a_large_container_is_guarded_by_length() -> None:
    vocabulary = {str(n): n for n in range(5000)}
    environment = Environment(lambda x: vocabulary.get(x))
    assert environment.is_current()
    vocabulary["more"] = 1
    assert not environment.is_current()


# ---- everything else that a function may read --------------------------------------------------------------------

settings = types.ModuleType("settings")  # as a user's module of that name that is imported here
part = types.ModuleType("settings.part")


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float


class OnlySlots:
    __slots__ = ("_hidden", "scale")

    def __init__(self) -> None:
        self.scale, self._hidden = 2.0, 1.0


class SlotsAndDict(OnlySlots):
    def __init__(self) -> None:
        super().__init__()
        self.extra = 1.0


class Levels:
    scales: ClassVar[list[float]] = [2.0]
    table: ClassVar[dict[str, float]] = {"a": 2.0}
    pair: ClassVar[tuple[list[float], ...]] = ([2.0],)
    flags: ClassVar[set[float]] = {2.0}
    config: ClassVar[Config] = Config()
    factor = 2.0

    class Inner:
        scale = 2.0

    def scaled(self, x: Any) -> Any:
        return x * FACTOR * self.factor

    @property
    def level(self) -> float:
        return FACTOR

    @staticmethod
    def fixed(x: Any) -> Any:
        return x * FACTOR

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x * FACTOR * cls.factor


class WithMethods(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR


def replaced(x: Any) -> Any:
    return x * 2


def with_attribute(x: Any) -> Any:
    return x * with_attribute.scale  # type: ignore[attr-defined]


def lazy(x: Any) -> Any:
    import settings

    return x * settings.SCALE


FACTOR: Any = 2.0
LEVELS = Levels
SLOTTED, ONLY_SLOTS, SLOTS_AND_DICT = Slotted(2.0), OnlySlots(), SlotsAndDict()
FLAGS: set[Any] = {2.0}
QUEUE: collections.deque[Any] = collections.deque([2.0], maxlen=4)
TABLE: collections.OrderedDict[str, Any] = collections.OrderedDict(a=2.0)
VIEW = types.MappingProxyType(TABLE)
ARRAY = np.array([2.0, 3.0])
OBJECTS = np.array([[2.0], None], dtype=object)
BYTES = bytearray(b"\x02")
WEIGHT = nn.Parameter(torch.ones(()), requires_grad=False)
METHODS = WithMethods()
NESTED_JIT = pygraph.jit(lambda x: x * FACTOR)


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what the tests below change."""
    monkeypatch.setitem(sys.modules, "settings", settings)
    for name, value in {"SCALE": 2.0, "part": part}.items():
        monkeypatch.setattr(settings, name, value, raising=False)
    part.LEVEL, part.FACTOR = 2.0, 2.0  # type: ignore[attr-defined]
    exec("def helper(x): return x * FACTOR", vars(part))
    for name in ("FACTOR", "LEVELS", "replaced"):
        monkeypatch.setitem(globals(), name, globals()[name])
    with_attribute.scale = 2.0  # type: ignore[attr-defined]
    Levels.scales[:], Levels.table["a"], Levels.pair[0][:], Levels.config.value = [2.0], 2.0, [2.0], 1
    for name in ("factor", "scaled", "level"):
        monkeypatch.setattr(Levels, name, vars(Levels)[name])
    Levels.Inner.scale = 2.0
    for items in (Levels.flags, FLAGS):
        items.clear()
        items.add(2.0)
    SLOTTED.scale = ONLY_SLOTS.scale = SLOTS_AND_DICT.scale = 2.0
    SLOTS_AND_DICT.extra = 1.0
    QUEUE.clear()
    QUEUE.append(2.0)
    TABLE["a"] = 2.0
    ARRAY[:], BYTES[:], OBJECTS[0][:] = [2.0, 3.0], b"\x02", [2.0]
    vars(WEIGHT).clear()
    WEIGHT.scale = 2.0  # type: ignore[attr-defined]


def _setting(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


def _refill(items: Any, *values: Any) -> None:
    items.clear()
    items.update(values)


# What a function reads, and a change of it that eager sees.
STATE: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "variable of a module": (lambda x: x * settings.SCALE, lambda: setattr(settings, "SCALE", 5.0)),
    "variable of a module in a module": (lambda x: x * settings.part.LEVEL, lambda: setattr(part, "LEVEL", 5.0)),
    "module in a module": (
        lambda x: x * settings.part.LEVEL,
        lambda: setattr(settings, "part", types.SimpleNamespace(LEVEL=5.0)),
    ),
    "function of a module": (lambda x: part.helper(x), lambda: setattr(part, "helper", lambda x: x * 5)),
    "variable of a function of a module": (lambda x: part.helper(x), lambda: setattr(part, "FACTOR", 5.0)),
    "module in a closure": ((lambda m: lambda x: x * m.SCALE)(settings), lambda: setattr(settings, "SCALE", 5.0)),
    "module in an object": (
        (lambda holder: lambda x: x * holder.module.SCALE)(types.SimpleNamespace(module=settings)),
        lambda: setattr(settings, "SCALE", 5.0),
    ),
    "module imported inside": (lazy, lambda: setattr(settings, "SCALE", 5.0)),
    "function": (lambda x: replaced(x), _setting("replaced", lambda x: x * 5)),
    "class": (lambda x: x * LEVELS.factor, _setting("LEVELS", type("Other", (Levels,), {"factor": 5.0}))),
    "attribute of a function": (with_attribute, lambda: setattr(with_attribute, "scale", 5.0)),
    "attribute of a helper": (lambda x: with_attribute(x), lambda: setattr(with_attribute, "scale", 5.0)),
    "list in a class": (lambda x: x * Levels.scales[0], lambda: Levels.scales.__setitem__(0, 5.0)),
    "dict in a class": (lambda x: x * Levels.table["a"], lambda: Levels.table.update(a=5.0)),
    "tuple in a class": (lambda x: x * Levels.pair[0][0], lambda: Levels.pair[0].__setitem__(0, 5.0)),
    "set in a class": (lambda x: x * sum(Levels.flags), lambda: Levels.flags.add(5.0)),
    "object in a class": (lambda x: x * Levels.config.value, lambda: setattr(Levels.config, "value", 5)),
    "class in a class": (lambda x: x * Levels.Inner.scale, lambda: setattr(Levels.Inner, "scale", 5.0)),
    "method of a class": (
        lambda x: Levels().scaled(x),
        lambda: setattr(Levels, "scaled", lambda self, x: x * 5),  # pyright: ignore
    ),
    "variable of a method": (lambda x: Levels().scaled(x), _setting("FACTOR", 5.0)),
    "variable of a property": (lambda x: x * Levels().level, _setting("FACTOR", 5.0)),
    "variable of a static method": (lambda x: Levels.fixed(x), _setting("FACTOR", 5.0)),
    "variable of a class method": (lambda x: Levels.of_class(x), _setting("FACTOR", 5.0)),
    "variable of a module's method": (METHODS, _setting("FACTOR", 5.0)),
    "variable of a transformed function": (lambda x: NESTED_JIT(x), _setting("FACTOR", 5.0)),
    "dataclass with slots": (lambda x: x * SLOTTED.scale, lambda: setattr(SLOTTED, "scale", 5.0)),
    "slots": (lambda x: x * ONLY_SLOTS.scale, lambda: setattr(ONLY_SLOTS, "scale", 5.0)),
    "slot not set": (
        lambda x: x * getattr(ONLY_SLOTS, "scale", 5.0),
        lambda: delattr(ONLY_SLOTS, "scale"),
    ),
    "slots of a base": (lambda x: x * SLOTS_AND_DICT.scale, lambda: setattr(SLOTS_AND_DICT, "scale", 5.0)),
    "dict beside slots": (lambda x: x * SLOTS_AND_DICT.extra, lambda: setattr(SLOTS_AND_DICT, "extra", 5.0)),
    "set": (lambda x: x * sum(FLAGS), lambda: FLAGS.add(5.0)),
    "set of the same length": (lambda x: x * sum(FLAGS), lambda: _refill(FLAGS, 5.0)),
    "deque": (lambda x: x * QUEUE[0], lambda: QUEUE.__setitem__(0, 5.0)),
    "length of a deque": (lambda x: x * len(QUEUE), lambda: QUEUE.append(5.0)),
    "view of a dict": (lambda x: x * VIEW["a"], lambda: TABLE.update(a=5.0)),
    "array": (lambda x: x * float(ARRAY[0]), lambda: ARRAY.__setitem__(0, 5.0)),
    "array of objects": (lambda x: x * OBJECTS[0][0], lambda: OBJECTS[0].__setitem__(0, 5.0)),
    "bytes": (lambda x: x * BYTES[0], lambda: BYTES.__setitem__(0, 5)),
    "attribute of a parameter": (lambda x: x * WEIGHT.scale, lambda: setattr(WEIGHT, "scale", 5.0)),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", STATE)
def test_other_state(name: str) -> None:
    fn, change = STATE[name]
    environment = Environment(fn)
    assert environment.is_current()
    assert environment.restore() is None
    change()
    assert not environment.is_current()


@pytest.mark.parametrize("name", STATE)
def test_a_call_sees_other_state(device: torch.device, name: str, native: bool) -> None:
    if native and extension.start(wait=True) is None:
        pytest.skip(str(extension.reason()))
    fn, change = STATE[name]
    x = torch.arange(1.0, 4.0, device=device)
    fast: Any = pygraph.jit(fn)
    fast = getattr(fast, "_pygraph_transformed", fast)
    for _ in range(4):
        assert torch.equal(fast(x), fn(x))
    assert sum(made.plan.hits for made in fast.engine.cache.native._made) == 2 * native
    assert fast.cache_info().hits == 3
    before = fn(x)
    change()
    assert not torch.equal(fn(x), before)
    for _ in range(3):
        assert torch.equal(fast(x), fn(x))
    assert not fast.explain().to_dict()["fallbacks"]


def test_what_is_as_it_was_is_no_change() -> None:
    environments = [Environment(fn) for fn, _ in STATE.values()]
    settings.SCALE = float("2.0")  # type: ignore[attr-defined]
    SLOTTED.scale = float("2.0")
    _refill(FLAGS, float("2.0"))
    QUEUE[0] = float("2.0")
    ARRAY[:] = ARRAY.copy()
    BYTES[:] = bytes(BYTES)
    assert all(environment.is_current() for environment in environments)


@pytest.mark.parametrize("items", [{1.0}, collections.deque([1.0])], ids=["set", "deque"])
def test_types_of_equal_items_count(items: Any) -> None:
    environment = Environment(lambda x: x * items)
    items.clear()
    (items.add if isinstance(items, set) else items.append)(1)
    assert not environment.is_current()


def test_large_contents_are_taken_not_to_change() -> None:
    array, items = np.zeros(100_000), set(range(5000))
    environment = Environment(lambda x: (x, array, items))
    array[0] = 1
    assert environment.is_current()
    items.add(-1)
    assert not environment.is_current()


def test_the_memory_of_very_many_arrays_is_taken_not_to_change() -> None:
    arrays = [np.zeros(8000) for _ in range(40)]
    environment = Environment(lambda x: (x, arrays))
    for array, seen in zip(arrays, [True] * 16 + [False] * 24, strict=True):
        array[-1] = 1
        assert environment.is_current() == (not seen)
        array[-1] = 0


def test_modules_of_libraries_are_not_walked() -> None:
    environment = Environment(lambda x: torch.nn.functional.relu(x) + np.pi)
    found = {key for container, key, _ in environment.guards.entries if container is vars(np)}
    assert found == {"pi"}  # what the function has a name for, and nothing else
    assert not any(isinstance(value, torch.Tensor) for _, _, value in environment.guards.entries)
    assert not environment.reaches(torch.nn.functional.gelu)


def test_nothing_of_the_user_runs_in_the_walk() -> None:
    class Touchy:
        scale = 1.0

        @property
        def value(self) -> float:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError

        def __len__(self) -> int:
            raise AssertionError

        __iter__ = __eq__ = __hash__ = __bool__ = __len__  # type: ignore[assignment]

    touchy = Touchy()
    assert Environment(lambda x: x * touchy.value).is_current()


class OwnWays:
    """Reading and writing that a guard must not run, and a copy that cannot be made."""

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("code of the user's class was run")

    __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = __eq__ = __bool__ = refuse  # pyright: ignore
    get = items = keys = values = clear = update = copy = append = refuse


class LazyDict(OwnWays, dict[str, Any]):
    pass


class LazyOrderedDict(OwnWays, collections.OrderedDict[str, Any]):
    pass


class LazyList(OwnWays, list[Any]):
    pass


def lazy_ordered() -> Any:
    container = LazyOrderedDict()
    collections.OrderedDict.__setitem__(container, "first", 0)
    collections.OrderedDict.__setitem__(container, "scale", 1)
    return container


@pytest.mark.parametrize(
    ("make", "key", "kind"),
    [
        (lambda: LazyDict(first=0, scale=1), "scale", dict),
        (lazy_ordered, "scale", collections.OrderedDict),
        (lambda: LazyList([0, 1]), 1, list),
    ],
    ids=["dict", "ordered", "list"],
)
def test_containers_of_derived_classes_are_read_as_they_lie(make: Callable[[], Any], key: Any, kind: Any) -> None:
    container: Any = make()

    def fn(x: Any) -> Any:
        return x * kind.__getitem__(container, key)

    environment = Environment(fn, {})
    assert environment.is_current()
    kind.__setitem__(container, key, 2)
    assert not environment.is_current()
    assert environment.may_return()
    assert environment.changed() == f"container.{key}"
    assert environment.restore() == ("container" if kind is list else "container.scale")
    assert environment.is_current()
    assert kind.__getitem__(container, key) == 1
    if isinstance(container, dict):
        kind.pop(container, key)
        assert not environment.is_current()
        assert environment.restore() is not None
        assert list(kind.items(container)) == [("first", 0), ("scale", 1)]
        assert environment.is_current()


def test_a_guard_adds_nothing_to_a_default_dict(device: torch.device, native: bool) -> None:
    scales = collections.defaultdict[str, float](lambda: 3.0, a=2.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * scales.get("a", 5.0)

    if native and extension.start(wait=True) is None:
        pytest.skip(str(extension.reason()))
    fast, x = pygraph.jit(fn), torch.ones(2, device=device)
    for _ in range(4):
        assert fast(x).tolist() == [2.0, 2.0]
    del scales["a"]
    scales["b"] = 1.0
    assert fast(x).tolist() == [5.0, 5.0]
    assert dict(scales) == {"b": 1.0}


class Key(enum.StrEnum):
    SCALE = "scale"


def test_keys_of_derived_classes() -> None:
    scales = {Key.SCALE: 1.0}

    def fn(x: Any) -> Any:
        return x * scales[Key.SCALE]

    environment = Environment(fn, {})
    assert environment.is_current()
    scales[Key.SCALE] = 2.0
    assert not environment.is_current()


def test_what_lies_deep_one_way_is_seen_another() -> None:
    shared = Config()
    deep: Any = shared
    for _ in range(6):
        deep = [deep]
    environment = Environment(lambda x: (deep, shared.nested.value, x))
    shared.nested.value = 5
    assert not environment.is_current()


# A function that changes what it reaches, and what of it one call makes.
WRITES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "variable": (lambda x: (globals().update(FACTOR=FACTOR + 1), x * 2)[1], lambda: FACTOR),
    "variable of a module": (lambda x: (setattr(settings, "SCALE", settings.SCALE + 1), x * 2)[1],
                             lambda: settings.SCALE),
    "attribute of a class": (lambda x: (setattr(Levels, "factor", Levels.factor + 1), x * 2)[1],
                             lambda: Levels.factor),
    "new attribute of a class": (lambda x: (setattr(Levels, "count", getattr(Levels, "count", 0) + 1), x * 2)[1],
                                 lambda: getattr(Levels, "count", 0)),
    "attribute of a function": (lambda x: (setattr(with_attribute, "scale", 3.0), x * 2)[1],
                                lambda: with_attribute.scale),  # type: ignore[attr-defined]
    "new attribute of a function": (lambda x: (setattr(replaced, "last", 3.0), x * 2)[1],
                                    lambda: vars(replaced)),
    "new attribute of a parameter": (lambda x: (setattr(WEIGHT, "last", 3.0), x * 2)[1], lambda: vars(WEIGHT)),
    "slot": (lambda x: (setattr(SLOTTED, "scale", SLOTTED.scale + 1), x * 2)[1], lambda: SLOTTED.scale),
    "slot deleted": (lambda x: (delattr(ONLY_SLOTS, "scale"), x * 2)[1], lambda: hasattr(ONLY_SLOTS, "scale")),
    "set": (lambda x: (FLAGS.add(len(FLAGS)), x * 2)[1], lambda: FLAGS),
    "deque": (lambda x: (QUEUE.append(len(QUEUE)), x * 2)[1], lambda: list(QUEUE)),
    "array": (lambda x: (ARRAY.__iadd__(1), x * 2)[1], lambda: ARRAY.tolist()),
    "bytes": (lambda x: (BYTES.append(1), x * 2)[1], lambda: bytes(BYTES)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_change_of_other_state_is_undone_and_refused(name: str, request: pytest.FixtureRequest) -> None:
    fn, state = WRITES[name]
    request.addfinalizer(lambda: (vars(replaced).clear(), "count" in vars(Levels) and delattr(Levels, "count")))
    x = torch.ones(2)
    before = copy.deepcopy(state())
    with pytest.raises(TraceError, match="it changes"):
        pygraph.trace(fn)(x)
    assert state() == before
    assert torch.equal(pygraph.jit(fn)(x), x * 2)
    assert state() != before


def test_a_new_global_variable_is_undone() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        global LAST
        LAST = x * 2
        return LAST

    with pytest.raises(TraceError, match="it changes LAST"):
        pygraph.trace(fn)(torch.ones(2))
    assert "LAST" not in globals()


IMPORTED: Any = None


def test_code_that_is_imported_when_it_is_first_needed_may_stay() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        global IMPORTED
        if IMPORTED is None:
            IMPORTED = torch.relu
        return IMPORTED(x)

    pygraph.trace(fn)(torch.ones(2))
    assert IMPORTED is torch.relu


HOOKS = torch.nn.modules.module


@pytest.mark.parametrize("register", [HOOKS.register_module_forward_hook, HOOKS.register_module_forward_pre_hook,
                                      HOOKS.register_module_full_backward_hook])  # fmt: skip
def test_hooks_of_all_modules(device: torch.device, register: Callable[[Any], Any]) -> None:
    model = nn.Linear(2, 2, device=device).requires_grad_(False)
    fast, x, calls = pygraph.jit(model), torch.ones(2, device=device), [0]
    for _ in range(3):
        fast(x)
    environment = Environment(model)
    handle = register(lambda *_: calls.__setitem__(0, calls[0] + 1))
    try:
        assert not environment.is_current()
        fast(x)
        model(x)
    finally:
        handle.remove()
    assert calls[0] == (0 if register is HOOKS.register_module_full_backward_hook else 2)
    assert environment.is_current()
    assert torch.equal(fast(x), model(x))


def test_gradients_are_guarded_where_they_are_read() -> None:
    weight = torch.ones(2, requires_grad=True)
    for gradients, seen in (([], False), ([weight], True)):
        weight.grad = None
        environment = Environment(lambda x: x * weight, None, gradients)
        assert environment.is_current()
        weight.grad = torch.ones(2)
        assert environment.is_current() == (not seen)


LIBRARY = """
KINDS = {}
FACTOR = 2.0
def scaled(x):
    KINDS.setdefault(type(x), len(KINDS))
    return x * FACTOR
"""


@pytest.mark.parametrize("installed", [True, False])
def test_what_installed_packages_keep_for_themselves(
    device: torch.device, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """A cache by types of tensors is put back after a trace; in the user's code, it has the types of eager.

    Variables are guarded.
    """
    name = f"keeps_kinds_{installed}_{device.type}"
    folder = tmp_path / "site-packages" if installed else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module(name)
    function, x = pygraph.jit(lambda x: library.scaled(x) + 1), torch.ones(2, device=device)
    for _ in range(4):
        assert torch.equal(function(x), x * 2 + 1)
    assert not function.explain().to_dict()["fallbacks"]
    assert list(library.KINDS) == ([] if installed else [torch.Tensor])
    library.FACTOR = 3.0
    assert torch.equal(function(x), x * 3 + 1)


def test_asserts_in_tests_do_not_lead_into_pytest(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 2
        return x + 1

    function = pygraph.jit(fn)
    for n in range(4):
        logging.getLogger(__name__).warning("kept by pytest: %d", n)
        function(torch.ones(2, device=device))
    assert function.cache_info()[:2] == (3, 1)
    assert not function.explain().to_dict()["fallbacks"]


def test_attributes_that_a_wrapper_copied_from_a_transformed_function(device: torch.device) -> None:
    """`functools.wraps` copies them, as torch.vmap does: the inner function's counters are not the user's state."""
    inner = pygraph.jit(lambda x: x * 2)

    @functools.wraps(inner)
    def wrapper(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + wrapper.offset  # type: ignore[attr-defined]

    wrapper.offset = 1.0  # type: ignore[attr-defined]
    function, mapped = pygraph.jit(wrapper), pygraph.jit(torch.vmap(inner))
    x = torch.ones(2, 3, device=device)
    for _ in range(3):
        assert function(x).tolist() == [[3] * 3] * 2
        assert mapped(x).tolist() == [[2] * 3] * 2
    assert (function.cache_info().misses, function.cache_info().captures) == (1, 1)
    assert (mapped.cache_info().misses, mapped.cache_info().captures) == (1, 1)
    wrapper.offset = 5.0  # type: ignore[attr-defined]
    assert function(x).tolist() == [[7] * 3] * 2


def test_keys_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of an optimizer has tensors as keys: their text takes a copy to the host, and objects run code."""

    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("printed")

    def refuse(tensor: torch.Tensor, **kwargs: Any) -> str:
        raise AssertionError("printed")

    weight, moment, other = torch.ones(2), torch.ones(2), torch.ones(2)
    state = {"weight": weight, "state": {weight: {"moment": moment}, (Loud(), 1): other}}
    monkeypatch.setattr(torch.Tensor, "__repr__", refuse)
    environment = Environment(lambda: state)
    assert environment.names[id(weight)] == "state['weight']"
    assert environment.names[id(moment)] == "state['state'][state['weight']]['moment']"
    assert environment.names[id(other)] == "state['state'][(a Loud, 1)]"
    state["state"][weight] = {}
    assert environment.restore() == "state['state'][state['weight']]"
    assert state["state"][weight]["moment"] is moment


def test_environment_variables_are_guarded_where_code_asks_for_them(
    device: torch.device, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jitted = pygraph.jit(lambda x: x * float(os.getenv("PYGRAPH_TEST_SCALE", "1")))
    x = torch.ones(3, device=device)
    for value in ("2", "2", "2", "3", "3", None, None):
        if value is None:
            monkeypatch.delenv("PYGRAPH_TEST_SCALE", raising=False)
        else:
            monkeypatch.setenv("PYGRAPH_TEST_SCALE", value)
        assert torch.equal(jitted(x), x * float(value or 1))
    assert jitted.cache_info().misses == 3
    assert Environment(lambda: os.environ).changed() is None
    others = Environment(lambda x: x)
    monkeypatch.setenv("PYGRAPH_TEST_SCALE", "5")
    assert others.is_current()
