"""What a function reaches besides its arguments: guards see every change, and a snapshot undoes it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pygraph.environment import Environment

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
        return self.block(self.linear(x)) * self.scale + self.mean


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
    model(torch.ones(2)).sum().backward()
    assert environment.restore() is not None
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
