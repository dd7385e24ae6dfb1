"""Deliberately broken variants: each law notices the fault that it is there for, and passes without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase

import pygraph
from pygraph.calls.keys import Key, Keys, Kind
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.program import Program
from pygraph.runtime import discovery, proof, recorded_region
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.discovery import Discovery
from pygraph.runtime.pointers import Patcher
from pygraph.runtime.replay_proof import ReplayProof
from tests.property.laws import check_pass, check_stack_equals_eager
from tests.property.strategies import Case, NumberInput, Step, TensorInput
from tests.property.test_histories import run_histories

# x, k -> (tanh(x) * k, ...): two inputs, a live number, a result.
CASE = Case(
    inputs=(TensorInput((2, 3)), TensorInput((2, 3)), NumberInput("float")),
    steps=(Step("binary", 0, 1, 2), Step("number", 0, 0, 1)),
    results=(0, 1),
)

Breaks = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are made in what calls run in Python; tests/unit/native has those of the native path."""
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")


def stack(fn: Any) -> Any:
    return pygraph.graphify(pygraph.indirect(pygraph.devicify(fn)))


def missed_pointer(patch: pytest.MonkeyPatch) -> None:
    """Discovery overlooks the pointers to the first input."""
    found = discovery.pointer_words
    patch.setattr(discovery, "pointer_words", lambda *args: [word for word in found(*args) if word.slot != 0])


def missed_result_pointer(patch: pytest.MonkeyPatch) -> None:
    """Discovery overlooks the pointers to the last result."""
    found = discovery.pointer_words
    patch.setattr(discovery, "pointer_words", lambda *args: [w for w in found(*args) if w.slot != len(args[2]) - 1])


def no_proof(patch: pytest.MonkeyPatch) -> None:
    """A plan is used unproven."""
    patch.setattr(ReplayProof, "passes", lambda self, *args, **kwargs: True)
    patch.setattr(Discovery, "_unproven_inputs", lambda self, words: set())


def stale_number(patch: pytest.MonkeyPatch) -> None:
    """Numbers are sent to the device once and never again."""
    call = Patcher.__call__

    def stale(self: Any, addresses: Any, numbers: Any) -> None:
        self.first = getattr(self, "first", list(numbers))
        call(self, addresses, self.first)

    patch.setattr(Patcher, "__call__", stale)


def output_left_in_pool(patch: pytest.MonkeyPatch) -> None:
    """A graph returns its own buffer, which the next replay overwrites."""
    call = RegionGraph.__call__

    def static(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(self, *args, **kwargs)
        self.pool_memory = getattr(self, "pool_memory", [output.clone() for output in outputs])
        for memory, output in zip(self.pool_memory, outputs, strict=True):
            memory.copy_(output)
        return [memory.detach() for memory in self.pool_memory]

    patch.setattr(RegionGraph, "__call__", static)


def pointer_of_the_call_before(patch: pytest.MonkeyPatch) -> None:
    """A replay reads the arguments of the call before, which may have been freed."""
    call = Patcher.__call__

    def late(self: Any, addresses: Any, numbers: Any) -> None:
        before = getattr(self, "before", None)
        self.before = list(addresses)
        inputs = 2
        call(self, [*(before or addresses)[:inputs], *addresses[inputs:]], numbers)

    patch.setattr(Patcher, "__call__", late)


def written_argument_is_a_copy(patch: pytest.MonkeyPatch) -> None:
    """What a graph writes to a copied argument is not copied back."""
    call = RegionGraph.__call__

    def forgetful(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, [tensor.clone() for tensor in inputs], *args, **kwargs)

    patch.setattr(RegionGraph, "__call__", forgetful)
    patch.setattr(ReplayProof, "passes", lambda self, *args, **kwargs: True)


def forgotten_work(patch: pytest.MonkeyPatch) -> None:
    """The nodes that we add leave out the first thing that they are to do."""
    wiring = recorded_region.wiring

    def less(*args: Any) -> Any:
        work, values = wiring(*args)
        changes = {name: getattr(work, name)[1:] for name in ("updates", "copies_in")}
        # A table's entries are filled for what loads from it; filling them with another value is as bad.
        loads = tuple((0, node, offset) for _, node, offset in work.loads)
        return dataclasses.replace(work, **changes, loads=loads), values

    patch.setattr(recorded_region, "wiring", less)


def moving_generator(patch: pytest.MonkeyPatch) -> None:
    """Capture draws from the generator and does not put it back."""
    patch.setattr(proof.Undisturbed, "__exit__", lambda self, *error: None)
    from pygraph.runtime.executable import Executable

    build = Executable.__init__

    def disturbing(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        torch.rand(1, device=self.driver.device)

    patch.setattr(Executable, "__init__", disturbing)


@pytest.mark.parametrize(
    "faults",
    [
        (missed_pointer, no_proof),
        (stale_number,),
        (output_left_in_pool,),
        (pointer_of_the_call_before, no_proof),
        (moving_generator,),
    ],
    ids=lambda faults: "+".join(fault.__name__ for fault in faults),
)
def test_a_broken_runtime_breaks_the_law(device: torch.device, faults: tuple[Breaks, ...]) -> None:
    check_stack_equals_eager(CASE, stack, device)
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            fault(patch)
        with pytest.raises(AssertionError):
            check_stack_equals_eager(CASE, stack, device)
    check_stack_equals_eager(CASE, stack, device)


@pytest.mark.parametrize("mechanism", ["device", "table", "copy"])
def test_work_that_is_forgotten_breaks_the_law_or_the_proof(device: torch.device, mechanism: Any) -> None:
    def stack(fn: Any) -> Any:
        return pygraph.graphify(pygraph.indirect(pygraph.devicify(fn), mechanism=mechanism))

    if mechanism == "table" and device.type == "cuda":
        pytest.skip("this case has no Triton kernel, so that nothing loads from a table")
    used = {"device": "device", "table": "table", "copy": "copy"}[mechanism]
    assert executable(check_stack_equals_eager(CASE, stack, device)).graphs[0].choice.counts()[used]
    with pytest.MonkeyPatch.context() as patch:
        forgotten_work(patch)
        stacked = check_stack_equals_eager(CASE, stack, device)  # the proof fails, and another mechanism is taken
        assert not executable(stacked).graphs[0].choice.counts()[used] or mechanism == "copy"
        assert any("proof" in fallback["reason"] for fallback in stacked.explain().to_dict()["fallbacks"])
        no_proof(patch)
        with pytest.raises(AssertionError):
            check_stack_equals_eager(CASE, stack, device)


def executable(stacked: Any) -> Any:
    return list(stacked.engine.cache.entries)[-1].executable


@pytest.mark.parametrize("faults", [(missed_pointer, no_proof), (stale_number,), (output_left_in_pool,)],
                         ids=lambda faults: "+".join(fault.__name__ for fault in faults))  # fmt: skip
def test_a_broken_runtime_breaks_a_history(device: torch.device, faults: tuple[Breaks, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            fault(patch)
        with pytest.raises((AssertionError, ExceptionGroup)):
            run_histories(device, 40, 15, stack, database=None, phases=(Phase.generate,), derandomize=True)


def test_writing_to_a_copy_breaks_the_law(device: torch.device) -> None:
    case = Case(inputs=(TensorInput((4,)), NumberInput()), steps=(Step("write", 0, 0, 3),), results=(0,))
    check_stack_equals_eager(case, stack, device)
    with pytest.MonkeyPatch.context() as patch:
        written_argument_is_a_copy(patch)
        with pytest.raises(AssertionError):
            check_stack_equals_eager(case, stack, device)


@pytest.mark.parametrize("fault", [missed_pointer, missed_result_pointer])
def test_the_proof_notices_a_missed_pointer_and_copies(device: torch.device, fault: Breaks) -> None:
    assert "copied" not in str(check_stack_equals_eager(CASE, stack, device).explain().to_dict()["fallbacks"])
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        stacked = check_stack_equals_eager(CASE, stack, device)
    report = stacked.explain().to_dict()
    assert report["bytes_copied_per_replay"] > 0
    assert report["kernels_in_graphs"] == report["kernels"] > 0


def test_the_poison_alone_notices_a_missed_pointer(device: torch.device) -> None:
    """Without the count of readers, which comes before it."""
    with pytest.MonkeyPatch.context() as patch:
        missed_pointer(patch)
        patch.setattr(Discovery, "_unproven_inputs", lambda self, words: set())
        stacked = check_stack_equals_eager(CASE, stack, device)
    report = stacked.explain().to_dict()
    assert any("poison" in fallback["reason"] for fallback in report["fallbacks"])


# ---- keys ------------------------------------------------------------------------------------------------------

SAME_FOR_ALL = Key(Kind(None, frozenset(), (), "always the same", ()), ())


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("shape", TensorInput((2, 3)), TensorInput((4,))),
        ("dtype", TensorInput((4,)), TensorInput((4,), torch.int32)),
        ("strides", TensorInput((3, 3)), TensorInput((3, 3), layout="transposed")),
    ],
)
def test_a_key_that_forgets_breaks_the_law(
    device: torch.device, what: str, first: TensorInput, second: TensorInput
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def check() -> None:
        stacked = stack(fn)
        for spec in (first, second):
            x = spec.make(device, 1)
            got, expected = stacked(x), fn(x)
            assert TensorSpec.of(got) == TensorSpec.of(expected), what
            assert torch.equal(got, expected)

    check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "of", lambda self, *args: SAME_FOR_ALL)
        with pytest.raises((AssertionError, RuntimeError)):
            check()


def test_a_key_that_forgets_a_static_value_breaks_the_law(device: torch.device) -> None:
    def fn(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return x + 1 if flag else x - 1

    def check() -> None:
        stacked, x = stack(fn), torch.ones(3, device=device)
        for flag in (True, False):
            assert torch.equal(stacked(x, flag), fn(x, flag))

    check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "of", lambda self, *args: SAME_FOR_ALL)
        with pytest.raises(AssertionError):
            check()


def test_a_key_that_forgets_overlap_breaks_the_law(device: torch.device) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    def check() -> None:
        stacked = stack(fn)
        for shared in (True, False):
            x = torch.ones(3, device=device)
            y = x if shared else torch.ones(3, device=device)
            assert stacked(x, y).tolist() == ([4.0] * 3 if shared else [2.0] * 3)

    check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "of", lambda self, *args: SAME_FOR_ALL)
        with pytest.raises(AssertionError):
            check()


# ---- passes ----------------------------------------------------------------------------------------------------


def writes_to_its_input(program: Program) -> Program:
    """Edits the graph that it was given instead of a copy."""
    node = next(node for node in program.nodes if node.op == "call_function")
    with program.module.graph.inserting_after(node):
        program.module.graph.call_function(node.target, node.args, node.kwargs).meta = dict(node.meta)
    program.module.recompile()
    return program.replace(history=(*program.history, "broken"))


def changes_the_meaning(program: Program) -> Program:
    """Multiplies where the function adds."""
    module = program.copy_graph()
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.add.Tensor:
            node.target = torch.ops.aten.mul.Tensor
    module.recompile()
    return program.replace(module=module, history=(*program.history, "broken"))


def forgets_a_mutation(program: Program) -> Program:
    """Drops the update of an argument."""
    module = program.copy_graph()
    output = module.graph.output_node()
    output.args = (tuple(output.args[0])[1:],)  # type: ignore[arg-type]
    module.recompile()
    return program.replace(module=module, outputs=program.outputs[1:], history=(*program.history, "broken"))


@pytest.mark.parametrize("broken", [writes_to_its_input, changes_the_meaning, forgets_a_mutation])
def test_a_broken_pass_breaks_the_law(device: torch.device, broken: Callable[[Program], Program]) -> None:
    case = Case(inputs=(TensorInput((4,)), TensorInput((4,))), steps=(Step("write", 0, 1, 0), Step("binary", 0, 1, 0)))

    def check(transform: Callable[[Program], Program]) -> None:
        fn = case.function(device)
        check_pass(transform, pygraph.trace(fn)(*case.arguments(device)), case, device, fn)

    check(pygraph.devicify)
    with pytest.raises(AssertionError):
        check(broken)
