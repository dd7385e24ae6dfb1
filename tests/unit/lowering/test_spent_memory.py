"""Temporaries of a graph of kernels in inputs that are spent: the same is computed, in less memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from pygraph.calls.options import Options
from pygraph.errors import ArgumentError
from pygraph.interop import live
from pygraph.interop.boxed import BoxedReplay
from pygraph.interop.inductor_graphs import InductorSource
from pygraph.ir.descriptors import TensorSpec
from pygraph.lowering import spent_memory
from pygraph.lowering.inductor import FusedGraph
from pygraph.lowering.spent_memory import reuse_spent_memory
from pygraph.lowering.states import Crossing
from pygraph.lowering.wrapper import kernel_graph

Call = Callable[[list[Any]], Any]


@pytest.fixture(autouse=True)
def _few_bytes_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent_memory, "LARGE", 16)
    monkeypatch.setattr(spent_memory, "_GRANULE", 16)


def placed(call: Call, inputs: Sequence[Tensor], spent: Sequence[int]) -> tuple[fx.GraphModule, list[tuple[str, int]]]:
    """The graph of a wrapper with its temporaries placed: where each lies, by name of the input and first byte."""
    module = kernel_graph(call, [TensorSpec.of(one) for one in inputs]).module
    holders = module.graph.find_nodes(op="placeholder")
    reuse_spent_memory(module.graph, [holders[index] for index in spent])
    module.recompile()
    module.graph.lint()
    target = torch.ops.pygraph.scratch.default
    found = [(f"{node.args[0]}", node.args[3]) for node in module.graph.find_nodes(op="call_function", target=target)]
    return module, found  # pyright: ignore[reportReturnType]


def test_a_temporary_lies_where_an_input_was_read_before() -> None:
    def call(args: list[Any]) -> Any:
        saved, grad = args
        args.clear()
        buf0 = torch.empty_strided((8,), (1,))
        torch.mul(saved, grad, out=buf0)
        buf1 = torch.empty_strided((8,), (1,))
        torch.sin(buf0, out=buf1)
        buf2 = torch.empty_strided((8,), (1,))
        torch.cos(buf1, out=buf2)
        return (buf2,)

    inputs = [torch.rand(8), torch.rand(8)]
    module, found = placed(call, inputs, [0])
    assert found == [("arg0", 0)]
    expected = call(list(inputs))
    assert torch.equal(module(*inputs)[0], expected[0])
    assert placed(call, inputs, [])[1] == [], "whose values somebody needs"
    assert placed(call, inputs, [1])[1] == [("arg1", 0)]


def test_what_is_still_read_stays() -> None:
    """Also through a view, and what is returned is no temporary, nor is what holds it."""

    def call(args: list[Any]) -> Any:
        saved, other = args
        args.clear()
        row = saved.view(2, 4)[0]
        buf0 = torch.empty_strided((8,), (1,))
        torch.sin(saved, out=buf0)
        buf1 = torch.empty_strided((8,), (1,))
        torch.sin(buf0, out=buf1)
        buf2 = torch.empty_strided((4,), (1,))
        torch.add(row, buf1[:4], out=buf2)
        return (buf2, other)

    assert placed(call, [torch.rand(8), torch.rand(8)], [0, 1])[1] == []


def test_parts_of_an_input_are_used_again_and_put_together() -> None:
    def call(args: list[Any]) -> Any:
        (saved,) = args
        args.clear()
        buf0 = torch.empty_strided((16,), (1,))
        torch.sin(saved, out=buf0)
        buf1 = torch.empty_strided((4,), (1,))  # bytes 0 to 16
        torch.sin(buf0[:4], out=buf1)
        buf2 = torch.empty_strided((8,), (1,))  # 16 to 48
        torch.sin(buf0[:8], out=buf2)
        buf3 = torch.empty_strided((8,), (1,))  # there are only 16 left
        torch.add(buf2, buf2, out=buf3)
        buf4 = torch.empty_strided((4,), (1,))  # 16 to 32, where buf2 was
        torch.add(buf1, buf3[:4], out=buf4)
        torch.add(buf4, buf4, out=buf3[:4])
        buf5 = torch.empty_strided((16,), (1,))  # all of it
        buf5.copy_(buf0)
        buf6 = torch.empty_strided((8,), (1,))
        torch.add(buf5[:8], buf3, out=buf6)
        return (buf6,)

    inputs = [torch.rand(16)]
    module, found = placed(call, inputs, [0])
    assert found == [("arg0", 0), ("arg0", 16), ("arg0", 16), ("arg0", 0)]
    assert torch.equal(module(*[one.clone() for one in inputs])[0], call(list(inputs))[0])


@pytest.mark.parametrize(
    "saved",
    [torch.rand(16)[::2], torch.arange(8), torch.rand(1).expand(8), torch.rand(3)],
    ids=["gaps", "indices", "overlapping itself", "small"],
)
def test_inputs_that_hold_nothing(saved: Tensor) -> None:
    def call(args: list[Any]) -> Any:
        saved, x = args
        args.clear()
        buf0 = torch.empty_strided((8,), (1,))
        torch.mul(x, saved[:1], out=buf0)
        buf1 = torch.empty_strided((8,), (1,))
        torch.sin(buf0, out=buf1)
        buf2 = torch.empty_strided((8,), (1,))
        torch.sin(buf1, out=buf2)
        return (buf2,)

    assert placed(call, [saved, torch.rand(8)], [0])[1] == []


def test_integers_stay_apart() -> None:
    def call(args: list[Any]) -> Any:
        (saved,) = args
        args.clear()
        buf0 = torch.empty_strided((8,), (1,))
        torch.sin(saved[:8], out=buf0)
        buf1 = torch.empty_strided((8,), (1,), dtype=torch.int64)
        buf1.copy_(buf0)
        buf2 = torch.empty_strided((8,), (1,))
        torch.add(buf0, buf1, out=buf2)
        return (buf2,)

    assert placed(call, [torch.rand(32)], [0])[1] == []


def test_memory_in_which_no_element_can_lie() -> None:
    """A view that begins between two elements of the other type."""
    memory = torch.ones(9, dtype=torch.bfloat16)[1:]
    with pytest.raises(ArgumentError, match="begin at byte 2"):
        torch.ops.pygraph.scratch(memory, [2], [1], 0, torch.float32)
    torch.ops.pygraph.scratch(memory, [2], [1], 2, torch.float32).fill_(0)
    assert memory.tolist() == [1, 0, 0, 0, 0, 1, 1, 1]


# ---- any graph -------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64]


def random_call(seed: int, count: int) -> tuple[Call, list[Tensor]]:
    """A wrapper of so many kernels with buffers of all sizes and types, and inputs for it."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.rand(chance.randint(1, 40), generator=generator).to(chance.choice(DTYPES[:4]))
        for _ in range(chance.randint(1, 4))
    ]
    lengths = [one.numel() for one in inputs]
    steps: list[tuple[int, torch.dtype, int, int, bool]] = []
    for number in range(count):
        recent = [*range(len(lengths))][-3:] if chance.random() < 0.9 else [*range(len(lengths))]
        first, second = chance.choice(recent), chance.choice(recent)
        shorter = min(lengths[first], lengths[second])
        length = chance.randint(-(-shorter // 2), shorter)
        steps.append((length, chance.choice(DTYPES), first, second, number == count - 1 or chance.random() < 0.1))
        lengths.append(length)

    def call(args: list[Any], steps: Any = tuple(steps)) -> Any:
        values = [*args]
        args.clear()
        results: list[Tensor] = []
        for length, dtype, first, second, is_result in steps:
            buffer = torch.empty_strided((length,), (1,), dtype=dtype)
            buffer.copy_(values[first][:length])
            buffer.add_(values[second][-length:].to(dtype))
            values.append(buffer)
            if is_result:
                results.append(buffer)
        return tuple(results)

    return call, inputs


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_any_graph_computes_the_same(seed: int) -> None:
    call, inputs = random_call(seed, 4 + seed % 20)
    expected = call([one.clone() for one in inputs])
    module, _ = placed(call, inputs, range(len(inputs)))
    given = [one.clone() for one in inputs]
    got = module(*given)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_random_graphs_have_placed_temporaries() -> None:
    counts = [len(placed(*made, range(len(made[1])))[1]) for made in (random_call(seed, 20) for seed in range(20))]
    assert sum(count > 2 for count in counts) > 5, counts


# ---- replays ---------------------------------------------------------------------------------------------------------

SIZE = 800


def make_backward() -> Call:
    """By a function of the name that Inductor's have."""

    def call(args: list[Any]) -> Any:
        """Gradients of something, with temporaries between; ``weight`` is read and stays."""
        weight, first, second, grad = args
        args.clear()
        buf0 = torch.empty_strided((SIZE, SIZE), (SIZE, 1), device=grad.device)
        torch.mul(first, grad, out=buf0)
        buf1 = torch.empty_strided((SIZE, SIZE), (SIZE, 1), device=grad.device)
        torch.mul(buf0, weight, out=buf1)
        buf2 = torch.empty_strided((SIZE, SIZE), (SIZE, 1), device=grad.device)
        torch.mul(second, buf1, out=buf2)
        buf3 = torch.empty_strided((SIZE, SIZE), (SIZE, 1), dtype=torch.bfloat16, device=grad.device)
        buf3.copy_(buf2).add_(buf0)
        buf4 = torch.empty_strided((SIZE, SIZE), (SIZE, 1), device=grad.device)
        torch.add(buf3, buf1, out=buf4)
        return (buf4,)

    return call


backward = make_backward()


def replayed(
    device: torch.device,
    spent: frozenset[int],
    call: Call = backward,
    results: int = 1,
    saved: frozenset[int] = frozenset(),
) -> BoxedReplay:
    code: Any = lambda inputs: call(inputs)  # noqa: E731
    code.current_callable = call
    states = Crossing(frozenset(), {})
    graph = FusedGraph(
        code, (None,) * results, (), frozenset(), states, device, "kernels", saved=saved, spent=spent
    )  # fmt: skip
    return BoxedReplay(InductorSource(graph), [], Options(), live.pool_owner(), "kernels")


def made(device: torch.device, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(SIZE, SIZE, generator=generator).to(device) for _ in range(4)]


def graph_of(called: BoxedReplay) -> Any:
    (entry,) = called.functions()[0].cache.entries
    (graph,) = entry.executable.graphs  # pyright: ignore
    return graph


def test_replays_write_to_spent_inputs_only(device: torch.device) -> None:
    called, apart = replayed(device, frozenset({1, 2})), replayed(device, frozenset())
    for seed in range(5):
        inputs = made(device, seed)
        expected, before = backward(list(inputs)), [one.clone() for one in inputs]
        versions = [one._version for one in inputs]
        assert torch.equal(apart(list(inputs))[0], expected[0])
        assert all(torch.equal(one, other) for one, other in zip(inputs, before, strict=True))
        assert torch.equal(called(list(inputs))[0], expected[0])
        assert [torch.equal(one, other) for one, other in zip(inputs, before, strict=True)] == [
            True, False, False, True
        ]  # fmt: skip
        assert [one._version for one in inputs] == versions
    graph = graph_of(called)
    assert graph.bytes_copied == 0
    assert graph.body.updated == []
    assert len(graph.body.written) == 2
    assert not called.functions()[0].explain().to_dict()["fallbacks"]


def test_less_memory_is_held(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA's allocator takes 20 MiB for a few tensors of less than 10.
    monkeypatch.setattr("tests.unit.lowering.test_spent_memory.SIZE", 1800)
    held: list[int] = []
    for spent in (frozenset[int](), frozenset({1, 2})):
        live.reset()
        called = replayed(device, spent)
        called(made(device, 0))
        graph = graph_of(called)
        held.append(graph.pool.nbytes())
        del graph, called
    assert held[1] < held[0]


def test_first_calls_leave_what_they_are_given_until_it_is_spent(device: torch.device) -> None:
    """The trials of a first call put spent inputs back, from which the call itself then computes."""
    for seed in range(3):
        called = replayed(device, frozenset({1, 2}))
        inputs = made(device, seed)
        expected = backward(list(inputs))
        assert torch.equal(called(list(inputs))[0], expected[0])


def test_inputs_that_share_memory_are_not_spent(device: torch.device) -> None:
    called = replayed(device, frozenset({1, 2}))
    for seed in range(4):
        weight, first, _, grad = made(device, seed)
        inputs = [weight, first, first, grad] if seed % 2 else [weight, first, weight, grad]
        expected, kept = backward(list(inputs)), weight.clone()
        assert torch.equal(called(list(inputs))[0], expected[0])
        assert torch.equal(weight, kept)


def make_forward() -> Call:
    """A forward that saves two tensors, as ``backward`` takes them."""

    def call(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        buf0 = torch.empty_strided((SIZE, SIZE), (SIZE, 1), device=x.device)
        torch.sin(x, out=buf0)
        buf1 = torch.empty_strided((SIZE, SIZE), (SIZE, 1), device=x.device)
        torch.mul(buf0, x, out=buf1)
        buf2 = torch.empty_strided((SIZE, SIZE), (SIZE, 1), device=x.device)
        torch.add(buf1, buf0, out=buf2)
        return (buf2, buf0, buf1)

    return call


forward = make_forward()


@pytest.mark.parametrize("seed", range(12))
def test_forwards_and_backwards_in_any_order(device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several forwards may wait for their backwards, and none of what they have saved is written to before its own."""
    monkeypatch.setattr("tests.unit.lowering.test_spent_memory.SIZE", 64)
    chance = random.Random(seed)
    run = replayed(device, frozenset(), forward, 3, saved=frozenset({1, 2}))
    run_back = replayed(device, frozenset({1, 2}))
    weight = torch.randn(64, 64).to(device)
    waiting: list[tuple[list[Tensor], Tensor]] = []
    held: list[tuple[Tensor, Tensor]] = []
    for _ in range(30):
        action = chance.random()
        if action < 0.5 or not waiting:
            x = torch.randn(64, 64).to(device)
            result, *saved = run([x])
            expected, first, second = forward([x])
            grad = torch.randn(64, 64).to(device)
            held.append((result, expected))
            waiting.append(([weight, *saved, grad], backward([weight, first, second, grad])[0]))
            del result, saved
        elif action < 0.9:
            inputs, expected = waiting.pop(chance.randrange(len(waiting)))
            held.append((run_back(inputs)[0], expected))
            assert inputs == []
        else:
            waiting.pop(chance.randrange(len(waiting)))
        del held[: max(0, len(held) - chance.randint(2, 12))]
        for got, wanted in held:
            assert torch.equal(got, wanted)
    graph = graph_of(run_back)
    assert (len(graph.body.written), graph.body.updated) == (2, [])
    assert graph.bytes_copied == 0


@torch.library.custom_op("pygraph_tests_spent::asked", mutates_args=())
def ask(x: Tensor) -> Tensor:
    """What no graph can hold: it asks for a value."""
    return x * float(x.sum().cpu())


@ask.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def make_divided() -> Call:
    def call(args: list[Any]) -> Any:
        saved, grad = args
        args.clear()
        buf0 = torch.empty_strided((64, 64), (64, 1), device=grad.device)
        torch.mul(saved, grad, out=buf0)
        buf1 = torch.empty_strided((64, 64), (64, 1), device=grad.device)
        torch.sin(buf0, out=buf1)
        between = torch.ops.pygraph_tests_spent.asked(buf0)
        buf2 = torch.empty_strided((64, 64), (64, 1), device=grad.device)
        torch.add(buf1, between, out=buf2)
        return (buf2,)

    return call


divided = make_divided()


def test_a_temporary_that_a_later_region_reads(device: torch.device) -> None:
    """What the first graph leaves in the input is compared, then, and stays until it is read."""
    called = replayed(device, frozenset({0}), divided)
    for _ in range(4):
        saved, grad = (torch.rand(64, 64).to(device) for _ in range(2))
        expected = divided([saved, grad])
        torch.testing.assert_close(called([saved, grad])[0], expected[0])
    (entry,) = called.functions()[0].cache.entries
    first, last = entry.executable.graphs  # pyright: ignore
    assert len(first.body.updated) == len(first.body.written) == 1
    assert last.body.nodes[0].target is torch.ops.pygraph.scratch.default


@pytest.mark.parametrize("first", [0, 1, 4])
def test_inputs_that_begin_where_no_element_of_any_type_can(device: torch.device, first: int) -> None:
    called = replayed(device, frozenset({1, 2}))
    for seed in range(3):
        weight, _, second, grad = made(device, seed)
        part = torch.rand(SIZE * SIZE + 4).to(device)[first : first + SIZE * SIZE].view(SIZE, SIZE)
        expected, before = backward([weight, part, second, grad]), part.clone()
        assert torch.equal(called([weight, part, second, grad])[0], expected[0])
        assert torch.equal(part, before) == (first == 1)
