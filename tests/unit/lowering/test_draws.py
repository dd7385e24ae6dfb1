"""Draws as Inductor gets them, and what it makes of them: on the host, where its kernels call libraries only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.ir import random_draws
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.drawn_after import DRAWN_AFTER
from pygraph.ir.dropout_masks import DROPOUT_MASK
from pygraph.ir.random_draws import draws_of, is_chained
from pygraph.ir.samples import SAMPLE
from pygraph.lowering import draws, fused_run
from pygraph.lowering.draws import (
    OtherDrawsError,
    chain_draws,
    check_draws,
    prepare_aot_draws,
    prepare_program_draws,
)
from pygraph.lowering.fused_run import FusedRun, compile_run
from pygraph.lowering.joint import split
from tests.unit.lowering.test_dropouts import graph_of
from tests.unit.lowering.test_run_cache import _fresh  # noqa: F401  # pyright: ignore  # a fixture
from tests.unit.transforms.test_fusable_run import program_on_cuda

pytestmark = pytest.mark.filterwarnings("ignore")  # of Inductor's, which differ between versions

aten = torch.ops.aten
CPU = torch.device("cpu")
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


# ---- preparation -----------------------------------------------------------------------------------------------


def two_layers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        out = aten._scaled_dot_product_flash_attention(x, x * 2, x, 0.1)[0]
        x = aten.native_dropout(out, 0.2, True)[0] + x
    return x


def test_draws_are_chained() -> None:
    module = graph_of(two_layers, torch.ones(2, 2, 16, 8, dtype=torch.bfloat16))
    prepare_aot_draws(module.graph)
    module.graph.lint()
    found = draws_of(module.graph)
    assert [str(node.target) for node in found] == [
        "aten._scaled_dot_product_flash_attention.default", "pygraph.dropout_mask.default",
    ] * 2  # fmt: skip
    assert is_chained(found, module.graph)
    (link,) = module.graph.find_nodes(op="call_function", target=DRAWN_AFTER)
    assert link.args[1] is found[1]
    assert link.meta["val"].shape == (2, 2, 16, 8)
    assert found[2].args[0] is link


def test_a_draw_whose_results_nobody_takes_is_chained() -> None:
    def fn(x: torch.Tensor) -> Any:
        aten.native_dropout(x, 1.0, True)
        return aten.native_dropout(x, 0.5, True)[0]

    module = graph_of(fn, torch.ones(8))
    for node in list(module.graph.nodes):
        if str(node.target) == "<built-in function getitem>" and not node.users:
            module.graph.erase_node(node)
    prepare_aot_draws(module.graph)
    module.graph.lint()
    (mask,) = module.graph.find_nodes(op="call_function", target=DROPOUT_MASK)
    assert mask.args[-1].args[0].target is aten.native_dropout.default


def test_each_device_has_its_own_chain() -> None:
    graph = fx.Graph()
    for device in ("meta", "cpu") * 2:
        mask = graph.call_function(DROPOUT_MASK, ([4], [1], torch.float32, torch.device(device), 0.5, None))
        mask.meta["val"] = torch.empty(4, dtype=torch.bool, device=device)
    chain_draws(graph)
    found = draws_of(graph)
    assert [node.args[-1] for node in found] == [None, None, *found[:2]]


def samples(x: torch.Tensor) -> Any:
    drop = x.new_empty((x.shape[0], 1)).bernoulli_(0.8)
    noise = torch.empty((3,), device=x.device).normal_(1, 2), torch.empty_like(x).uniform_(0, 2)
    new = torch.rand(4, device=x.device), torch.randn(4, device=x.device), torch.randint(2, 5, (3,), device=x.device)
    return x * drop, *noise, *new, torch.rand_like(x), torch.randn_like(x)


def test_samples() -> None:
    program = program_on_cuda(samples, (3, 4))
    module = prepare_program_draws(program).copy_graph()
    found = draws_of(module.graph)
    assert [(node.args[0], *node.args[4]) for node in found] == [
        ("bernoulli", 0.8), ("normal", 1.0, 2.0), ("uniform", 0.0, 2.0), ("uniform", 0.0, 1.0), ("normal", 0.0, 1.0),
        ("randint", 2.0, 5.0), ("uniform", 0.0, 1.0), ("normal", 0.0, 1.0),
    ]  # fmt: skip
    assert not [one for one in targets(module.graph) if "empty" in one]
    assert [node.meta["spec"].shape for node in found] == [(3, 1), (3,), (3, 4), (4,), (4,), (3,), (3, 4), (3, 4)]
    for node in found:
        node.args = (*node.args[:3], CPU, *node.args[4:])
    module.recompile()
    x = torch.randn(3, 4)
    torch.manual_seed(2)
    mine = module(x)
    torch.manual_seed(2)
    torch.testing.assert_close(mine, samples(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: x.bernoulli_(0.5),  # the caller's memory is written
        lambda x: torch.rand_like(x.t()),
        lambda x: x.sin().uniform_(0, 1),
        lambda x: torch.randperm(5, device=x.device),
    ],
)
def test_draws_that_stay(fn: Callable[..., Any]) -> None:
    program = program_on_cuda(fn, (3, 4))
    assert "sample" not in str(prepare_program_draws(program))


def test_a_program_without_draws_is_the_same() -> None:
    program = program_on_cuda(torch.sin, (3,))
    assert prepare_program_draws(program) is program


# ---- Inductor --------------------------------------------------------------------------------------------------


@pytest.fixture
def _attention_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ATTENTION._schema.name
    monkeypatch.setattr(random_draws, "_ATTENTION", random_draws._ATTENTION | {name})


def step(x: torch.Tensor, w: torch.Tensor, ones: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A forward with draws that do not depend on each other, and a backward that takes what they have drawn."""
    first = DROPOUT_MASK([4, 4], [4, 1], torch.float32, CPU, 0.5, None)
    query, key = (x @ w).view(1, 1, 4, 4), w.view(1, 1, 4, 4)
    out = ATTENTION(query, key, key, 0.1)[0].view(4, 4)
    noise = SAMPLE("bernoulli", [4, 4], torch.float32, CPU, [0.5], None)
    other = ATTENTION(key, query, key, 0.1)[0].view(4, 4)
    more = SAMPLE("bernoulli", [4, 4], torch.float32, CPU, [0.5], None)
    return noise @ out, (ones @ noise) @ more, (ones @ other) @ out, more @ other, first


SPECS = [TensorSpec.of(torch.ones(4, 4))] * 3


def run_of(fn: Callable[..., Any]) -> fx.GraphModule:
    """The graph of a function, as a run of a Program is one; nothing is drawn."""
    graph = fx.Graph()
    traced = make_fx(fn, tracing_mode="fake")(*(torch.ones(4, 4) for _ in SPECS))
    graph.output(graph.graph_copy(traced.graph, {}))
    for node in graph.nodes:
        node.meta = {}
    return fx.GraphModule(torch.nn.Module(), graph)


def compiled(begins: Sequence[int] = ()) -> FusedRun:
    fused = compile_run(run_of(step), SPECS, "f", begins, ())
    assert fused is not None
    return fused


@pytest.mark.usefixtures("_attention_of_the_host")
@pytest.mark.parametrize("begins", [(), (2,)], ids=["whole", "halves"])
def test_kernels_draw_in_order(begins: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bool] = []
    check = draws.check_draws

    def note(graph: fx.Graph, parts: Sequence[fx.GraphModule]) -> None:
        checked.extend(is_chained(draws_of(part.graph), part.graph) for part in parts)
        check(graph, parts)

    monkeypatch.setattr(fused_run, "check_draws", note)
    wanted = [node.target for node in draws_of(run_of(step).graph)]
    for _ in range(2):  # the second one comes from the cache
        fused = compiled(begins)
        first, *others = [part.kernels.module.graph for part in fused.parts]
        assert len(others) == len(begins)
        assert [node.target for node in draws_of(first)] == wanted, "nothing is drawn again in a backward"
        assert not any(map(draws_of, others))
        assert not [one for graph in (first, *others) for one in targets(graph) if "drawn_after" in one]
    assert all(checked)
    assert fused.recipe() is not None


@pytest.mark.usefixtures("_attention_of_the_host")
def test_draws_that_could_be_exchanged_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_run, "chain_draws", lambda graph: None)
    with pytest.raises(OtherDrawsError, match="may exchange"):
        compiled()


def draw(graph: fx.Graph, shape: list[int], after: fx.Node | None = None) -> fx.Node:
    node = graph.call_function(SAMPLE, ("uniform", shape, torch.float32, CPU, [0.0, 1.0], after))
    node.meta["spec"] = TensorSpec.of(torch.empty(shape))
    return node


@pytest.mark.parametrize("found", [[], [[2]], [[2], [3], [3]], [[3], [2]], [[2], [4]]], ids=str)
def test_other_draws_are_refused(found: list[list[int]]) -> None:
    wanted, part = fx.Graph(), fx.Graph()
    for shape in ([2], [3]):
        draw(wanted, shape)
    last = None
    for shape in found:
        last = draw(part, shape, last)
    with pytest.raises(OtherDrawsError, match="Inductor draws"):
        check_draws(wanted, [fx.GraphModule(torch.nn.Module(), part)])


def test_draws_of_forward_and_backward_are_in_order() -> None:
    wanted, forward, backward = fx.Graph(), fx.Graph(), fx.Graph()
    for graph, shape in ((wanted, [2]), (wanted, [3]), (forward, [2]), (backward, [3])):
        draw(graph, shape)
    parts = [fx.GraphModule(torch.nn.Module(), graph) for graph in (forward, backward)]
    check_draws(wanted, parts)
    with pytest.raises(OtherDrawsError):
        check_draws(wanted, parts[::-1])


@pytest.mark.usefixtures("_attention_of_the_host")
def test_draws_that_a_pass_exchanges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one operation and one shape, which nothing else could tell."""
    original = fused_run.check_order

    def exchange(run: fx.Graph, graph: fx.Graph) -> None:
        first, second = graph.find_nodes(op="call_function", target=SAMPLE)
        first.append(second)  # nothing changes
        original(run, graph)
        first.prepend(second)
        original(run, graph)

    monkeypatch.setattr(fused_run, "check_order", exchange)
    with pytest.raises(OtherDrawsError, match="in the order"):
        compiled()


@pytest.mark.usefixtures("_attention_of_the_host")
def test_a_backward_draws_nothing_again() -> None:
    """Cheap as it seems to torch's partitioner, which knows not all draws as such."""
    module = make_fx(step, tracing_mode="fake")(*(torch.ones(4, 4) for _ in SPECS))
    prepare_aot_draws(module.graph)
    halves = split(module, {2}, set())
    assert halves is not None
    assert len(draws_of(halves.forward.graph)) == 5
    assert not draws_of(halves.backward.graph)
    assert "pygraph.drawn_after.default" not in targets(halves.backward.graph)
