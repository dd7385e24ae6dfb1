"""Fusion where there is nothing to fuse for: on the emulated device, and in stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.profiler import record_function

import pygraph
from pygraph.errors import StageError
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import is_selection, is_work
from pygraph.ir.program import output_values
from pygraph.ir.random_draws import draws_of
from pygraph.ir.scopes import scopes_of
from pygraph.lowering.draws import OtherDrawsError
from pygraph.lowering.fused_run import FusedRun, Part
from pygraph.lowering.joint import Value
from pygraph.lowering.kernel_recorder import KernelGraph
from pygraph.transforms import fuse
from pygraph.transforms.fuse import _in_a_line
from tests.unit.transforms.test_fusable_run import program_on_cuda

aten = torch.ops.aten


def f(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1) * 2


def test_it_says_why_it_does_nothing(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("there it does something: tests/gpu/test_fusion.py")
    fast = pygraph.jit(f, fuse=True)
    x = torch.randn(4).to(device)
    for _ in range(3):
        assert torch.equal(fast(x).cpu(), f(x).cpu())
    reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
    assert reasons == ["Inductor makes no kernels for emu that a graph could hold"]
    assert fast.explain().to_dict()["kernels_in_graphs"] == 3
    with pytest.raises(pygraph.errors.FallbackError, match="Inductor makes no kernels"):
        pygraph.jit(f, fuse=True, strict=True)(x)


def test_its_place_in_stacks(device: torch.device) -> None:
    x = torch.randn(4).to(device)
    stack = pygraph.graphify(pygraph.indirect(pygraph.fuse(pygraph.devicify(f))))
    torch.testing.assert_close(stack(x), f(x))
    assert repr(stack) == "<pygraph graphify(indirect(fuse(devicify(f))))>"
    with pytest.raises(StageError, match=r"graphify\(indirect\(fuse\(f\)\)\)"):
        pygraph.fuse(pygraph.graphify(pygraph.indirect(f)))
    program = pygraph.trace(f)(x)
    assert pygraph.fuse(program).stage == "kernels"
    with pytest.raises(StageError, match="stage 'kernels'"):
        pygraph.fuse(pygraph.fuse(program))


def test_the_cause_of_an_error_in_another_process_is_said() -> None:
    """Inductor compiles kernels in processes, whose errors come as a traceback in a text."""
    text = """An exception occurred in a subprocess:

    Name=triton_poi_fused_add_0
    Traceback (most recent call last):
      File "pool.py", line 1, in work
        raise ValueError("no")
    triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 300000
    """
    found = _in_a_line(RuntimeError(text))
    assert found == (
        "RuntimeError: An exception occurred in a subprocess: Name=triton_poi_fused_add_0 "
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 300000"
    )
    assert _in_a_line(ValueError("")) == "ValueError: "


class Unfusable(Exception):
    pass


def compiler_without(name: str) -> Callable[..., FusedRun]:
    """A compiler whose kernels are the operations that it is given, but for one, which it fails at."""

    def compile_run(module: fx.GraphModule, specs: Sequence[TensorSpec], *_: Any) -> FusedRun:
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        if name in _operations(calls):
            raise Unfusable(f"{len(calls)}")
        results = tuple(Value("forward", index) for index in range(len(output_values(module.graph))))
        inputs = tuple(Value("input", index) for index in range(len(specs)))
        return FusedRun((Part(KernelGraph(module, ()), inputs, None),), results, ())

    return compile_run


def test_kernels_without_a_line_of_their_own_have_that_of_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the scopes that all of the run is in."""
    compile_run = compiler_without("nothing")

    def compile_some(module: fx.GraphModule, *args: Any) -> FusedRun:
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.meta = {"spec": node.meta["spec"], "source": "own.py:1" if "cos" in node.name else None}
        return compile_run(module, *args)

    def function(x: torch.Tensor) -> torch.Tensor:
        with record_function("outer"):
            y = x.sin()
            with record_function("inner"):
                return y.exp().cos()

    monkeypatch.setattr(fuse, "compile_run", compile_some)
    monkeypatch.setattr(fuse, "_why_not", lambda program: None)  # as Triton is not installed everywhere
    program = program_on_cuda(function, (4,))
    first = next(node.meta["source"] for node in program.nodes if "sin" in node.name)
    found = {node.name.partition("_")[0]: node for node in fuse.fuse_program(program).nodes if is_work(node)}
    assert [found[name].meta["source"] for name in ("sin", "exp", "cos")] == [first, first, "own.py:1"]
    assert [scopes_of(found[name]) for name in ("sin", "exp", "cos")] == [("outer",), ("outer",), ()]


def long(x: torch.Tensor) -> Any:
    for _ in range(3):
        x = x.sin() + x.cos()
        x = x.topk(3).values.exp() * 2
    return x, x.sum()


def _operations(nodes: Iterable[fx.Node]) -> list[str]:
    names: Any = [node.target for node in nodes if is_work(node) and not is_selection(node)]
    return [target.__name__.partition(".")[0] for target in names]


@pytest.mark.parametrize("name", ["topk", "sum", "sin", "nothing"])
def test_what_cannot_be_compiled_is_left_out_of_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_run = compiler_without(name)

    def note(module: fx.GraphModule, *args: Any) -> FusedRun:
        run = compile_run(module, *args)
        compiled.extend(_operations(module.graph.nodes))
        return run

    monkeypatch.setattr(fuse, "compile_run", note)
    monkeypatch.setattr(fuse, "_why_not", lambda program: None)
    program = program_on_cuda(long, (4, 3))
    fused = pygraph.fuse(program)
    left = [fallback for fallback in fused.fallbacks if "not fused: Unfusable" in fallback.reason]
    assert bool(left) == (name != "nothing")
    lengths = [int(fallback.what.split()[0]) for fallback in left]
    assert all(length <= 4 for length in lengths)  # fewer than two halves that may be fused, and a selection
    assert len(compiled) >= len(_operations(program.nodes)) - sum(lengths)
    assert name not in compiled
    x = torch.randn(4, 3)
    torch.testing.assert_close(fused.module(x), long(x), rtol=0, atol=0)


def attention(x: torch.Tensor) -> torch.Tensor:
    """A layer with its backward, of which both draw by their tags: attention, and what is added to it, drop."""
    query = x * 2
    drawn = aten._scaled_dot_product_efficient_attention(query, x, x, None, True, 0.1)
    out = aten.native_dropout(drawn[0].exp(), 0.1, True)[0]
    args = out, query, x, x, None, *drawn, 0.1, [True, False, False, False]
    return out + aten._scaled_dot_product_efficient_attention_backward(*args)[0]


def stochastic_depth(x: torch.Tensor) -> torch.Tensor:
    keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.8)
    return x + x.sin() * keep.div_(0.8)


def noise(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.rand_like(x)).exp() * torch.randint(2, 5, x.shape, device=x.device)


@pytest.mark.parametrize("layer", [attention, stochastic_depth, noise])
def test_draws_are_part_of_one_run(
    layer: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[fx.Graph] = []
    compile_run = compiler_without("nothing")

    def note(module: fx.GraphModule, *args: Any) -> FusedRun:
        compiled.append(module.graph)
        return compile_run(module, *args)

    monkeypatch.setattr(fuse, "compile_run", note)
    monkeypatch.setattr(fuse, "_why_not", lambda program: None)
    program = program_on_cuda(lambda x: layer(layer(x)), (2, 2, 8, 4))
    fused = pygraph.fuse(program)
    (run,) = compiled
    assert len(draws_of(run)) == len(draws_of(program.module.graph)) >= 2
    assert not [node for node in fused.nodes if is_work(node) and "empty" in str(node.target)]
    cut = pygraph.graphify(fused)
    assert [region.kind for region in cut.regions] == ["graph"]
    assert not [node for node in cut.nodes if "state_to" in str(node.target)], "forward and backward are in one region"


def test_draws_that_cannot_be_ordered_are_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[fx.Graph] = []
    compile_run = compiler_without("nothing")

    def note(module: fx.GraphModule, *args: Any) -> FusedRun:
        compiled.append(module.graph)
        return compile_run(module, *args)

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = aten.native_dropout(x.sin().exp(), 0.1, True)[0]
        x = (torch.bernoulli(x.sigmoid()) * x).exp()
        return aten.native_dropout(x.sin().exp(), 0.1, True)[0]

    monkeypatch.setattr(fuse, "compile_run", note)
    monkeypatch.setattr(fuse, "_why_not", lambda program: None)
    fused = pygraph.fuse(program_on_cuda(fn, (4, 4)))
    assert [len(draws_of(run)) for run in compiled] == [1, 1]
    found = [str(node.target) for node in draws_of(fused.module.graph)]
    assert found == ["pygraph.dropout_mask.default", "aten.bernoulli.default", "pygraph.dropout_mask.default"]


def test_where_inductor_draws_otherwise_draws_are_in_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_run = compiler_without("nothing")
    counts: list[int] = []

    def check(module: fx.GraphModule, *args: Any) -> FusedRun:
        counts.append(len(draws_of(module.graph)))
        if counts[-1]:
            raise OtherDrawsError("Inductor draws in another order")
        return compile_run(module, *args)

    monkeypatch.setattr(fuse, "compile_run", check)
    monkeypatch.setattr(fuse, "_why_not", lambda program: None)
    program = program_on_cuda(lambda x: stochastic_depth(stochastic_depth(x)), (2, 2, 8, 4))
    fused = pygraph.fuse(program)
    assert counts == [2, 0], "both are drawn before the one run"
    assert len(draws_of(fused.module.graph)) == 2
    (note,) = fused.fallbacks
    assert note.reason == "they are borders between fused runs: OtherDrawsError: Inductor draws in another order"


def test_draws_alone_are_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "compile_run", None)
    monkeypatch.setattr(fuse, "_why_not", lambda program: None)
    fused = pygraph.fuse(program_on_cuda(lambda x: (torch.rand_like(x), torch.randn_like(x), x.sin()), (4, 4)))
    assert not fused.fallbacks
    assert len(draws_of(fused.module.graph)) == 2


def test_where_nothing_can_be_compiled_runs_are_not_halved_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def compile_run(module: fx.GraphModule, *_: Any) -> FusedRun:
        tried.append(len(module.graph.nodes))
        raise Unfusable

    monkeypatch.setattr(fuse, "compile_run", compile_run)
    monkeypatch.setattr(fuse, "_why_not", lambda program: None)

    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            x = x.sin()
        return x

    fused = pygraph.fuse(program_on_cuda(fn, (3,)))
    assert len(tried) < 30
    assert sum(tried) < 5 * 200
    torch.testing.assert_close(fused.module(torch.ones(3)), (fn(torch.ones(3)),))
