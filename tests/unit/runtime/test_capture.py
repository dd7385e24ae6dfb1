"""Recording one region: what is found, what is proven, what is copied, and that trials leave no trace."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import CaptureError
from pygraph.ir.selections import Way
from pygraph.runtime import patchable
from pygraph.runtime.alignment import aligned_copy, alignment_of, copy_span, is_aligned
from pygraph.runtime.body import RegionBody
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.devices import driver_for
from pygraph.runtime.discovery import RefusedError
from pygraph.runtime.driver import InterruptedCaptureError
from pygraph.runtime.proof import Example
from pygraph.runtime.replay_proof import ReplayProof

pytestmark = pytest.mark.usefixtures("sizes")


@pytest.fixture
def driver(device: torch.device) -> Any:
    return driver_for(device)


def record(fn: Callable[..., Any], driver: Any, *inputs: torch.Tensor, way: Way = "patch") -> RegionGraph:
    program = pygraph.graphify(pygraph.indirect(pygraph.trace(fn)(*inputs)))
    body = RegionBody(program, 0)
    return RegionGraph(body, driver, driver.new_pool(), Example.of(body, driver, inputs, []), way)


def test_inputs_and_outputs_are_patched(driver: Any) -> None:
    a, b = torch.ones(4, device=driver.device), torch.ones(4, device=driver.device) * 2
    graph = record(lambda a, b: (a + b, a * b), driver, a, b)
    try:
        assert graph.patched == [0, 1]
        assert graph.patched_outputs == [0, 1]
        assert graph.fallbacks == []
        assert graph.bytes_copied == 0
        for n in range(3):
            x, y = a + n, b * n
            total, product = graph([x, y], [])
            assert torch.equal(total, x + y)
            assert torch.equal(product, x * y)
    finally:
        graph.release()


def test_the_way_copy_patches_no_input(driver: Any) -> None:
    a = torch.ones(4, device=driver.device)
    graph = record(torch.sin, driver, a, way="copy")
    try:
        assert graph.patched == []
        assert graph.bytes_copied >= a.nbytes
        assert torch.equal(graph([a + 1], [])[0], torch.sin(a + 1))
    finally:
        graph.release()


def test_recording_changes_no_input_and_no_generator(driver: Any) -> None:
    a = torch.ones(4, device=driver.device)
    random = driver.random_state()
    graph = record(lambda a: a.add_(torch.rand_like(a)), driver, a)
    graph.release()
    assert a.tolist() == [1.0] * 4
    now = driver.random_state()
    assert (
        torch.equal(torch.as_tensor(now), torch.as_tensor(random)) if isinstance(now, torch.Tensor) else now == random
    )


def test_a_refused_node_is_named_and_the_device_works_on(driver: Any) -> None:
    traced = pygraph.trace(lambda a: torch.cos(torch.sin(a)))(torch.ones(4, device=driver.device))
    program = pygraph.graphify(pygraph.indirect(traced))
    body = RegionBody(program, 0)
    original = body.run

    def run(inputs: Any, numbers: Any = (), mark: Any = None, *others: Any, **more: Any) -> Any:
        def refusing(index: int) -> None:
            mark(index)
            if index == 1:
                raise CaptureError("not this one")

        return original(inputs, numbers, mark and refusing, *others, **more)

    body.run = run
    a = torch.ones(4, device=driver.device)
    example = Example.of(body, driver, [a], [])
    with pytest.raises(RefusedError) as caught:
        RegionGraph(body, driver, driver.new_pool(), example, "patch")
    assert caught.value.node == 1
    assert caught.value.reason == "not this one"
    graph = record(torch.sin, driver, a)
    assert torch.equal(graph([a], [])[0], torch.sin(a))
    graph.release()


@pytest.mark.parametrize("interruptions", [2, 100])
def test_an_interrupted_recording_is_made_again_a_few_times(driver: Any, interruptions: int) -> None:
    program = pygraph.graphify(pygraph.indirect(pygraph.trace(torch.sin)(torch.ones(4, device=driver.device))))
    body = RegionBody(program, 0)
    original, left = body.run, interruptions

    def run(inputs: Any, numbers: Any = (), mark: Any = None, *others: Any, **more: Any) -> Any:
        def interrupting(index: int) -> None:
            nonlocal left
            mark(index)
            left -= 1
            if left >= 0:
                raise InterruptedCaptureError("somebody waited")

        return original(inputs, numbers, mark and interrupting, *others, **more)

    body.run = run
    a = torch.ones(4, device=driver.device)
    example = Example.of(body, driver, [a], [])
    if interruptions > 10:
        with pytest.raises(RefusedError, match="somebody waited"):
            RegionGraph(body, driver, driver.new_pool(), example, "patch")
        assert left > 90
        return
    graph = RegionGraph(body, driver, driver.new_pool(), example, "patch")
    assert graph.patched == [0]
    assert torch.equal(graph([a + 1], [])[0], torch.sin(a + 1))
    graph.release()


def test_outputs_that_share_memory_stay_together(driver: Any) -> None:
    def fn(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b = a * 2
        return b, b[1:]

    fast = pygraph.jit(fn)
    a = torch.ones(4, device=driver.device)
    for _ in range(2):
        b, tail = fast(a)
        tail.zero_()
        assert b.tolist() == [2.0, 0.0, 0.0, 0.0]


def test_empty_tensors(driver: Any) -> None:
    fn = pygraph.jit(lambda a, b: (torch.cat([a, b]), b * 2))
    a, b = torch.ones(3, device=driver.device), torch.ones(0, device=driver.device)
    for _ in range(2):
        whole, empty = fn(a, b)
        assert whole.tolist() == [1.0] * 3
        assert empty.shape == (0,)


@pytest.mark.parametrize("shift", [0, 1, 3, 4, 64])
def test_a_copy_is_aligned_as_the_original(driver: Any, shift: int) -> None:
    memory = torch.arange(256.0, device=driver.device)
    view = memory[shift : shift + 12].view(3, 4).t()
    copy = aligned_copy(view)
    assert torch.equal(copy, view)
    assert copy.stride() == view.stride()
    assert copy.data_ptr() != view.data_ptr()
    assert alignment_of(copy.data_ptr()) == alignment_of(view.data_ptr())


def test_copy_span_copies_what_strides_reach(driver: Any) -> None:
    source = torch.arange(12.0, device=driver.device).view(3, 4).t()
    target = torch.zeros(12, device=driver.device).view(3, 4).t()
    copy_span(source, target)
    assert torch.equal(source, target)


ALIGNMENTS = [(0, 256), (1, 1), (4, 4), (12, 12), (28, 12), (48, 16), (512, 256), (768, 256)]


@pytest.mark.parametrize(("address", "expected"), ALIGNMENTS)
def test_alignment(address: int, expected: int) -> None:
    assert alignment_of(address) == expected
    assert is_aligned(address, expected)
    assert is_aligned(address + 256, expected)
    assert not is_aligned(address + 8, expected)


def test_memory_that_nothing_writes_is_neither_copied_nor_compared(driver: Any) -> None:
    a = torch.ones(5, device=driver.device)
    graph = record(lambda a: (torch.empty(5, dtype=torch.int64, device=a.device), a + 1), driver, a)
    try:
        assert graph.fallbacks == []
        assert graph.bytes_copied == 0
        assert torch.equal(graph([a * 2], [])[1], a * 2 + 1)
    finally:
        graph.release()


@torch.library.custom_op("test_capture::and_unwritten", mutates_args=())
def and_unwritten(x: torch.Tensor) -> list[torch.Tensor]:
    """As flash attention without dropout: some results are only allocated."""
    return [x + 1, torch.empty(3, dtype=torch.int64, device=x.device), torch.empty(4, device=x.device)]


@and_unwritten.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x), x.new_empty(3, dtype=torch.int64), x.new_empty(4, dtype=torch.float32)]


@pytest.mark.parametrize("fill", [0, 0xA5, 0x7F])
def test_results_of_an_operation_that_it_does_not_write(driver: Any, fill: int) -> None:
    a = torch.ones(5, device=driver.device)
    junk = [torch.full((512,), fill, dtype=torch.uint8, device=driver.device) for _ in range(64)]
    del junk  # whatever is allocated next is full of this
    graph = record(lambda a: tuple(and_unwritten(a)), driver, a)
    try:
        assert graph.fallbacks == []
        assert graph.bytes_copied == 0
        for n in range(3):
            plus, numbers, more = graph([a * n], [])
            assert torch.equal(plus, a * n + 1)
            assert (numbers.shape, more.shape) == ((3,), (4,))
    finally:
        graph.release()


def _is_recording(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    from pygraph.runtime.emulated import launches

    return launches.recorder is not None


@torch.library.custom_op("test_capture::and_seed", mutates_args=())
def and_seed(x: torch.Tensor) -> list[torch.Tensor]:
    """As memory-efficient attention: in a capture, the random state that it did not need is on the device."""
    return [x + 1, torch.empty(2, dtype=torch.int64, device=x.device if _is_recording(x.device) else "cpu")]


@and_seed.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x), x.new_empty(2, dtype=torch.int64)]


def test_a_result_that_is_on_another_device_in_a_capture(driver: Any) -> None:
    a = torch.ones(5, device=driver.device)
    with pytest.raises(RefusedError, match="does not give the results of ordinary launches"):
        record(lambda a: tuple(and_seed(a)), driver, a)
    plus, seed = pygraph.jit(lambda a: tuple(and_seed(a)))(a)
    assert torch.equal(plus, a + 1)
    assert seed.device.type == "cpu"


def test_a_result_that_is_copied_has_a_reason() -> None:
    from pygraph.runtime.emulated import driver as emulated  # its cumprod hides its pointers

    driver = emulated.driver()
    a = torch.ones(5, device=driver.device) * 2
    graph = record(lambda a: torch.cumprod(a, 0), driver, a)
    try:
        assert graph.bytes_copied == 2 * a.nbytes
        assert [fallback.what for fallback in graph.fallbacks] == ["input load_default is copied", "a result is copied"]
        assert all("aten::cumprod.out" in fallback.reason for fallback in graph.fallbacks)
        assert torch.equal(graph([a + 1], [])[0], torch.cumprod(a + 1, 0))
    finally:
        graph.release()


@pytest.mark.parametrize("takes", ["nothing", "what was recorded"])
@pytest.mark.parametrize("number", [0, -1])
def test_a_node_that_takes_no_new_parameters(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, takes: str, number: int
) -> None:
    """Its input is copied, or the region runs as ordinary launches; the caller gets no error."""
    graph: Any = type(record(torch.relu, driver_for(device), torch.ones(4, device=device)).graph)
    commit = graph.commit

    def refuse(self: Any, node: int) -> None:
        if node == range(len(self.nodes))[number]:
            now = ctypes.string_at(self.params_address(node), len(self.nodes[node].params))
            if takes == "nothing" or now != self.nodes[node].params:
                raise CaptureError("refused")
        commit(self, node)

    monkeypatch.setattr(graph, "commit", refuse)
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")  # which sends nodes without that method
    function = pygraph.jit(lambda x: torch.relu(x) + 1)
    for n in range(4):
        x = torch.full((8,), float(n - 1), device=device)
        assert torch.equal(function(x), torch.relu(x) + 1)
    assert function.explain().to_dict()["fallbacks"]


def test_what_one_node_refuses_is_copied_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The driver's words are in the report, and the other nodes of the region are patched."""
    graph: Any = type(record(torch.relu, driver_for(device), torch.ones(4, device=device)).graph)
    commit = graph.commit

    def refuse(self: Any, node: int) -> None:
        if node == 0 and self.nodes[node].op == 0:
            raise CaptureError("no such pointer")
        commit(self, node)

    monkeypatch.setattr(graph, "commit", refuse)
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")  # which sends nodes without that method
    driver = driver_for(device)
    inputs = [torch.full((8,), float(n), device=device) for n in range(3)]
    graph = record(lambda x, y, z: (torch.relu(x) + 1, y * 2, z.exp()), driver, *inputs)
    try:
        assert graph.patched == [1, 2]
        (fallback,) = graph.fallbacks
        assert fallback.what.endswith("is copied")
        assert "no such pointer" in fallback.reason
        for _ in range(2):
            inputs = [x + 1 for x in inputs]
            x, y, z = inputs
            for got, expected in zip(graph(inputs, []), (torch.relu(x) + 1, y * 2, z.exp()), strict=True):
                assert torch.equal(got, expected)
    finally:
        graph.release()


@torch.library.custom_op("pygraph_tests::crowded", mutates_args=())
def crowded(x: torch.Tensor) -> torch.Tensor:
    scratch = x.repeat(16)
    total = scratch.view(16, -1).sum(0)
    del scratch
    return total * 2


@crowded.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("size", [256, 1 << 19])
def test_a_result_where_its_operation_had_larger_scratch_memory(device: torch.device, size: int) -> None:
    """A pointer to the one looks like a pointer to the other; recorded again with room, they are apart."""
    function = pygraph.jit(lambda x: crowded(x + 1))
    for n in range(4):
        x = torch.full((size,), float(n), device=device)
        assert torch.equal(function(x), torch.full((size,), 32.0 * (n + 1), device=device))
    report = function.explain().to_dict()
    assert not report["fallbacks"]
    assert report["bytes_copied_per_replay"] == 0


def test_scratch_memory_of_several_results_is_looked_at_in_turns(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patchable, "_MOST_SCRATCH", 0)
    found: list[bool] = []
    stays_inside = ReplayProof.stays_inside
    monkeypatch.setattr(ReplayProof, "stays_inside", lambda proof: found.append(stays_inside(proof)) or found[-1])
    function = pygraph.jit(lambda x, y: (crowded(x + 1), crowded(y - 1)))
    for n in range(4):
        x, y = (torch.full((1 << 19,), float(n), device=device) for _ in range(2))
        for got, expected in zip(function(x, y), (32.0 * (n + 1), 32.0 * (n - 1)), strict=True):
            assert torch.equal(got, torch.full_like(x, expected))
    if device.type == "emu":  # where scratch memory begins is no secret there
        assert found[0] is False  # a pointer to it was taken for one to a result
    assert found[-2:] == [True, True]  # the last recording, which has room for it
    assert function.explain().to_dict()["bytes_copied_per_replay"] == 0


def test_memory_of_the_host_is_refused(driver: Any) -> None:
    """Operations outside of graphs may return it though they say otherwise; a kernel that reads it ends the process."""
    a = torch.ones(4, device=driver.device)
    body = RegionBody(pygraph.graphify(pygraph.indirect(pygraph.trace(torch.sin)(a))), 0)
    example = Example.of(body, driver, [a], [])
    wrong = dataclasses.replace(example, inputs=[a.cpu()])
    with pytest.raises(RefusedError, match="is on the cpu"):
        RegionGraph(body, driver, driver.new_pool(), wrong, "patch")
    graph = RegionGraph(body, driver, driver.new_pool(), example, "patch")
    assert not graph.fits(0, a.cpu())
    graph.release()
