"""Options are checked when they are given, by errors that name the call, the option, and what it may be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import ArgumentError
from pygraph.interop.dynamo import backend


def step(x: torch.Tensor, k: float = 2.0) -> torch.Tensor:
    return x * k


def graphed(**options: Any) -> Any:
    return pygraph.make_graphed_callables(step, (torch.ones(2),), **options)


def compiled(**options: Any) -> Any:
    return backend(torch.fx.symbolic_trace(lambda x: x + 1), [torch.ones(2)], options=options)


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "jit": (functools.partial(pygraph.jit, step), r"jit\(…\)"),
    "jit as a decorator": (pygraph.jit, r"jit\(…\)"),
    "jit of a stack": (functools.partial(pygraph.jit, pygraph.devicify(step)), r"jit\(…\)"),
    "graphify": (functools.partial(pygraph.graphify, step), r"graphify\(…\)"),
    "graphify as a decorator": (pygraph.graphify, r"graphify\(…\)"),
    "graphify of a stack": (functools.partial(pygraph.graphify, pygraph.indirect(step)), r"graphify\(…\)"),
    "torch.compile": (compiled, r"torch\.compile\(backend='pygraph'\)"),
}


@pytest.mark.parametrize(("call", "name"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strict": "no"}, "strict='no'; expected True or False"),
        ({"strict": 1}, "strict=1; expected True or False"),
        ({"reuse_outputs": None}, "reuse_outputs=None; expected True or False"),
        ({"max_graphs": 0}, "max_graphs=0; expected a positive integer"),
        ({"max_graphs": -3}, "max_graphs=-3; expected a positive integer"),
    ],
)
def test_options_of_graphs(call: Any, name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: {told}"):
        call(**options)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: pygraph.jit(step, fuse="no"), r"jit\(…\): fuse='no'; expected True or False"),
        (lambda: pygraph.jit(fuse="no"), r"jit\(…\): fuse='no'; expected True or False"),
        (lambda: pygraph.jit(static_argnums=True), r"jit\(…\): static_argnums=True; expected integers"),
        (lambda: pygraph.jit(donate_argnums=(0, False)), r"donate_argnums=\(0, False\); expected integers"),
        (lambda: pygraph.jit(objective="speed"), r"jit\(…\): objective='speed'; expected 'throughput' or"),
        (lambda: pygraph.select(objective="speed"), r"select\(…\): objective='speed'; expected 'throughput' or"),
        (lambda: pygraph.select(timer=3), r"select\(…\): timer=3; expected a function"),
        (lambda: pygraph.indirect(mechanism="gpu"), r"indirect\(…\): mechanism='gpu'; expected 'auto' or"),
        (lambda: compiled(mechanism="gpu"), r"torch\.compile\(backend='pygraph'\): mechanism='gpu'; expected 'auto'"),
        (lambda: compiled(fuse="no"), r"torch\.compile\(backend='pygraph'\): fuse='no'; expected True or False"),
        (
            lambda: graphed(allow_unused_input="no"),
            r"make_graphed_callables\(…\): allow_unused_input='no'; expected True",
        ),
        (
            lambda: pygraph.make_graphed_callables(torch.nn.Linear, (torch.ones(2),)),
            r"make_graphed_callables\(Linear\): Linear is a class; .*make_graphed_callables\(Linear\(…\)\)",
        ),
        (lambda: pygraph.transform(stage="fx"), r"transform\(…\): stage='fx'; expected 'aten' or 'kernels' or"),
        (lambda: pygraph.transform(stage=3), r"transform\(…\): stage=3; expected 'aten' or"),
        (lambda: pygraph.transform(stage=["aten", "fx"]), r"transform\(…\): stage='fx'; expected"),
        (lambda: pygraph.transform(leaves="foo"), r"transform\(…\): leaves='foo'; expected 'aten' or"),
        (lambda: pygraph.transform(name=3), r"transform\(…\): name=3; expected a string"),
        (lambda: pygraph.transform(3), r"transform\(3\): no function; expected a function from Program to Program"),
    ],
)
def test_other_options(call: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        call()


@pytest.mark.parametrize(
    ("passes", "told"),
    [
        (pygraph.graphify, r"passes=graphify; expected a list of transforms. Write passes=\[graphify\] for one"),
        (pygraph.transform(lambda program: program, name="mine"), r"passes=mine; .*Write passes=\[mine\] for one"),
        ("graphify", "passes='graphify'; expected a list of transforms"),
        (3, "passes=3; expected a list of transforms"),
        ([print], "print> in passes is no transform"),
    ],
)
def test_passes(passes: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        pygraph.jit(step, passes=passes)
    with pytest.raises(ArgumentError, match=told):
        pygraph.jit(passes=passes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"static_argnums": 7}, r"trace\(step\): static_argnums has 7; expected one of its arguments: x, k"),
        ({"static_argnums": (7,)}, r"trace\(step\): static_argnums has 7"),
        ({"static_argnums": "k"}, r"trace\(…\): static_argnums='k'; expected integers"),
        ({"static_argnames": "q"}, r"trace\(step\): static_argnames has 'q'"),
        ({"static_argnames": 1}, r"trace\(…\): static_argnames=1; expected strings"),
    ],
)
def test_options_of_trace(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        pygraph.trace(step, **options)


def test_what_trace_takes() -> None:
    for fn, told in ((3, r"trace\(3\): not callable"), (torch.nn.Linear, r"trace\(Linear\): Linear is a class")):
        with pytest.raises(ArgumentError, match=told):
            pygraph.trace(fn)  # pyright: ignore
    x = torch.ones(2)
    for options in ({"static_argnums": 1}, {"static_argnums": (-1,)}, {"static_argnums": [1]}):
        assert pygraph.trace(step, **options)(x, 3.0).baked[0].value == 3.0
    assert pygraph.trace(step, static_argnames="k")(x, k=3.0).baked[0].value == 3.0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: pygraph.jit(step, fus=True), r"jit\(…\): there is no option 'fus'. Did you mean fuse\?"),
        (lambda: pygraph.jit(max_graph=3), r"jit\(…\): there is no option 'max_graph'. Did you mean max_graphs\?"),
        (
            lambda: pygraph.jit(step, colour="red"),
            r"jit\(…\): there is no option 'colour'\. There are static_argnums, .*, passes\.$",
        ),
        (lambda: pygraph.graphify(step, stricht=True), r"graphify\(…\): .*Did you mean strict\?"),
        (lambda: pygraph.select(objectiv="cpu"), r"select\(…\): .*Did you mean objective\?"),
        (lambda: pygraph.indirect(step, mechanisms="copy"), r"indirect\(…\): .*Did you mean mechanism\?"),
        (lambda: pygraph.devicify(step, strict=True), r"devicify\(…\): there is no option 'strict'"),
        (lambda: pygraph.trace(step, static_argnum=1), r"trace\(…\): .*Did you mean static_argnums\?"),
        (lambda: pygraph.transform(stages="aten"), r"transform\(…\): .*Did you mean stage\?"),
        (lambda: graphed(num_warmup_iter=1), r"make_graphed_callables\(…\): .*Did you mean num_warmup_iters\?"),
        (lambda: compiled(max_graph=1), r"torch\.compile.*there is no option 'max_graph'; .*Did you mean max_graphs\?"),
    ],
)
def test_misspelt_options(call: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        call()


def test_iterators_are_read_once() -> None:
    stack = [pygraph.devicify, pygraph.indirect, pygraph.graphify]
    decorator = pygraph.jit(passes=iter(stack), static_argnums=iter([1]))  # pyright: ignore
    for fast in (decorator(step), decorator(step), pygraph.jit(pygraph.devicify(step), static_argnums=iter([1]))):  # pyright: ignore
        made: Any = fast
        assert made.options.static_argnums == (1,)
    assert [one.name for one in decorator(step).passes] == ["devicify", "indirect", "graphify"]
