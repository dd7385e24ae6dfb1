"""The search for slots that cannot be patched, on replays that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pygraph
from pygraph.errors import CaptureError
from pygraph.ir.descriptors import TensorSpec
from pygraph.runtime import patchable
from pygraph.runtime.body import RegionBody
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.devices import driver_for
from pygraph.runtime.discovery import FreshMemory, _fresh_memory
from pygraph.runtime.patchable import CrowdedError, _look_for_room, _wrong_slots
from pygraph.runtime.pointers import Extent
from pygraph.runtime.proof import Example

pytestmark = pytest.mark.usefixtures("sizes")


@given(
    slots=st.sets(st.integers(0, 20), min_size=1), reasons=st.dictionaries(st.integers(0, 20), st.none() | st.text())
)
def test_halving_finds_the_slots_that_are_wrong(slots: set[int], reasons: dict[int, str | None]) -> None:
    """Each with the driver's reason of the replay in which it was the only one."""
    proof: Any = None
    replays: list[frozenset[int]] = []

    def works(_: Any, patched: frozenset[int]) -> tuple[bool, str | None]:
        replays.append(patched)
        wrong = sorted(patched & reasons.keys())
        return not wrong, reasons[wrong[0]] if len(wrong) == 1 else None

    wrong = slots & reasons.keys()
    if not wrong:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patchable, "_works", works)
        found = _wrong_slots(proof, sorted(slots), None)
    assert found.keys() == wrong
    if len(slots) > 1:  # of a single slot the reason has been asked for before
        assert found == {slot: reasons[slot] for slot in wrong}
    assert len(replays) <= 2 * len(slots)


def test_results_that_may_lie_in_scratch_memory_ask_for_room() -> None:
    spec = TensorSpec((4,), (1,), torch.float32, torch.device("cpu"))
    memory = [FreshMemory(spec, spec, Extent(0x1000, 16, op), scratch) for op, scratch in ((3, 0), (5, 512), (5, 64))]
    region: Any = SimpleNamespace(slots=[0, 1], memory=memory)
    _look_for_room(region, [0, 2])  # an input, and a result whose operation had no scratch memory
    with pytest.raises(CrowdedError) as caught:
        _look_for_room(region, [1, 2, 3, 4])
    assert caught.value.room == {5: [16, 16]}


@pytest.mark.parametrize(("live_after", "scratch"), [(82, 268), (90, 260), (50, 268)])
def test_memory_that_an_operation_has_used_beside_its_result(live_after: int, scratch: int) -> None:
    """300 bytes were allocated, 32 of them for the result; what stays allocated beside it is no scratch memory."""
    found = _fresh_memory(torch.empty(8), 3, (100, 50), (400, live_after))
    assert found.scratch == scratch
    assert found.extent.size == 32
    assert found.extent.first_op == 3
    assert found.spec == TensorSpec.of(torch.empty(8))
    part = _fresh_memory(torch.empty(2, 4)[1], 3, (0, 0), (32, 32))
    assert part.spec == part.flat == TensorSpec((8,), (1,), torch.float32, torch.device("cpu"))


def recorded(device: torch.device, refused: str, monkeypatch: pytest.MonkeyPatch) -> tuple[RegionGraph, list[int]]:
    """A graph of a device that takes no other pointers for kernels of an operation; and how many slots were tried."""
    x = torch.ones(4, device=device)
    driver: Any = driver_for(device)
    body = RegionBody(
        pygraph.graphify(pygraph.indirect(pygraph.trace(lambda x: [x + 1, x.sin(), x.cos(), x * 2])(x))), 0
    )
    example = Example.of(body, driver, [x], [])
    tried: list[int] = []
    original = patchable._works

    def works(proof: Any, patched: frozenset[int]) -> tuple[bool, str | None]:
        graph, names = proof.region.graph, [str(node.target) for node in body.nodes]
        if "commit" not in vars(graph):
            commit = graph.commit

            def choosy(node: int) -> None:
                if refused in names[graph.nodes[node].op]:
                    raise CaptureError("not this one")
                commit(node)

            monkeypatch.setattr(graph, "commit", choosy)
        tried.append(len(patched))
        return original(proof, patched)

    monkeypatch.setattr(patchable, "_works", works)
    return RegionGraph(body, driver, driver.new_pool(), example, "patch"), tried


def test_what_the_driver_refuses_is_asked_of_each_node(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, tried = recorded(device, "sin", monkeypatch)
    assert len(tried) == 2
    reasons = [note.reason for note in graph.fallbacks]
    assert len(reasons) == 2  # its operand and its result
    assert all("not this one" in reason for reason in reasons)
    assert graph.patched_outputs == [0, 2, 3]
    for n in range(3):
        x = torch.full((4,), float(n), device=device)
        assert all(map(torch.equal, graph([x], []), (x + 1, x.sin(), x.cos(), x * 2)))
    graph.release()


def test_a_driver_that_refuses_nothing_is_not_asked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, tried = recorded(device, "tanh", monkeypatch)
    assert len(tried) == 1
    assert graph.fallbacks == []
    graph.release()
