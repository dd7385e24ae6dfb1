"""Saved tensors of compiled forwards: in the same memory from call to call, as long as nobody refers to it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import checkpoint

import pygraph
from pygraph.interop import live
from pygraph.process import extension
from pygraph.runtime.saved_memory import SavedMemory
from tests.memory import live_bytes
from tests.unit.native.test_replay import fake  # noqa: F401  # pyright: ignore[reportUnusedImport]  # a fixture

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
    pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason())),
]


class Training:
    """A perceptron beside a compiled one, and the addresses of what the latter's forwards save."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(
            device
        )
        self.fast = torch.compile(self.model, backend=pygraph.backend)

    def inputs(self, rows: int = 16) -> torch.Tensor:
        return torch.randn(rows, 4).to(self.device)

    def gradients(self, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        self.model.zero_grad()
        run().square().sum().backward()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def check(self, x: torch.Tensor) -> None:
        got = self.gradients(lambda: self.fast(x))
        torch.testing.assert_close(got, self.gradients(lambda: self.model(x)))


def saved(result: torch.Tensor) -> list[int]:
    """Addresses of the tensors that a compiled forward has saved, but not of parameters and arguments."""
    return [tensor.data_ptr() for tensor in result.grad_fn.saved_tensors if not tensor.requires_grad]  # pyright: ignore


def kept_memory() -> SavedMemory:
    """The memory of the tensors that the forwards save."""
    (saved,) = [
        graph.saved
        for called in live.CALLABLES
        for f in called.functions()
        for entry in f.cache.entries
        for graph in entry.executable.graphs
        if graph.saved is not None
    ]
    return saved


@pytest.fixture(autouse=True)
def _native(request: pytest.FixtureRequest, device: torch.device) -> None:
    """Have the emulated device replay natively."""
    if device.type == "emu":
        request.getfixturevalue("fake")


@pytest.fixture
def training(_native: None, device: torch.device) -> Iterator[Training]:
    made = Training(device)
    for _ in range(4):
        made.check(made.inputs())
    yield made
    ways = [one.plan.way for called in live.CALLABLES for f in called.functions() for one in f.cache.native._made]
    assert ways
    assert set(ways) == {"replay"}


def test_it_stays_where_it_is(training: Training) -> None:
    x, found, blocks = training.inputs(), [], []
    for _ in range(4):
        result = training.fast(x)
        found.append(saved(result))
        result.sum().backward()
        del result
        blocks.append(torch.randn(16, 64).to(training.device))  # what takes freed memory
    assert found[0]
    assert all(one == found[0] for one in found)


def test_it_begins_with_the_memory_of_the_recording(device: torch.device) -> None:
    """From the first call in Python to native ones."""
    training = Training(device)
    x, found = training.inputs(), []
    for _ in range(6):
        result = training.fast(x)
        found.append([address for address in saved(result) if address != x.data_ptr()])
        result.sum().backward()
        del result
    assert found[0]
    assert set(found[0]) <= {base.data_ptr() for base in kept_memory().bases if base is not None}
    assert all(one == found[0] for one in found)


def test_its_tensors_are_made_once(training: Training) -> None:
    """While the last call alone has referred to them and to their storages, and has left them as they were."""
    x, memory = training.inputs(), kept_memory()

    def tensor() -> torch.Tensor:
        (one, _), *_ = memory.lent  # pyright: ignore
        return one

    def call(held: object = None) -> list[int]:
        result = training.fast(x)
        assert {one.data_ptr() for one, _ in memory.lent} <= set(saved(result))  # pyright: ignore
        del held
        result.sum().backward()
        return [id(one) for one, _ in memory.lent]  # pyright: ignore

    assert call() == call()
    assert not memory.is_used()  # which has made an object of each storage
    assert call() == call()
    first = training.fast(x)  # its backward is still to come
    assert not set(call()) & {id(one) for one in first.grad_fn.saved_tensors}  # pyright: ignore
    del first
    assert call() == call()
    for hold in (lambda: tensor(), lambda: tensor().untyped_storage(), lambda: tensor().view(-1)):
        held = hold()
        before = held.data_ptr()
        call()
        assert tensor().data_ptr() != before
        del held
        assert call() == call()
    tensor().unsqueeze_(0)
    call()
    assert tensor().dim() == 2
    training.check(x)


def test_memory_that_is_given_back_has_no_tensors(training: Training) -> None:
    memory = kept_memory()
    assert not memory.is_used()
    training.check(training.inputs())
    memory.release()
    assert memory.lent == [None] * len(memory.lent)
    training.check(training.inputs())


def test_two_forwards_before_a_backward(training: Training) -> None:
    """As in gradient accumulation: each has memory of its own, also in the next step."""
    for _ in range(3):
        x, y = training.inputs(), training.inputs()

        def both(run: Any, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            first, second = run(x), run(y)
            return first * 2 + second

        got = training.gradients(lambda both=both: both(training.fast))
        torch.testing.assert_close(got, training.gradients(lambda both=both: both(training.model)))


@torch._functorch.config.patch(donated_buffer=False)  # else torch allows none
def test_a_retained_graph(device: torch.device) -> None:
    training = Training(device)
    for _ in range(4):
        training.check(training.inputs())
    x = training.inputs()
    result = training.fast(x)
    result.sum().backward(retain_graph=True)
    training.check(training.inputs())
    training.check(training.inputs())
    training.model.zero_grad()
    result.sum().backward()
    got = [parameter.grad.clone() for parameter in training.model.parameters()]  # pyright: ignore
    training.model.zero_grad()
    training.model(x).sum().backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in training.model.parameters()])


def test_a_saved_tensor_that_somebody_holds(training: Training) -> None:
    result = training.fast(training.inputs())
    kept = [tensor for tensor in result.grad_fn.saved_tensors if not tensor.requires_grad]  # pyright: ignore
    values = [tensor.clone() for tensor in kept]
    views = [tensor.view(-1)[:3] for tensor in kept if tensor.is_contiguous()]
    firsts = [view.clone() for view in views]
    result.sum().backward()
    del result
    for _ in range(2):
        training.check(training.inputs())
    torch.testing.assert_close(kept, values)
    kept.clear()
    for _ in range(2):
        training.check(training.inputs())
    torch.testing.assert_close(views, firsts)


def test_hooks_get_tensors_of_their_own(training: Training) -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    for _ in range(3):
        packed.clear()
        x = training.inputs()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
            got = training.gradients(lambda x=x: training.fast(x))
        torch.testing.assert_close(got, training.gradients(lambda x=x: training.model(x)))


def test_another_batch_size_takes_over(device: torch.device, training: Training) -> None:
    """Only the last kind of call that saves tensors keeps memory."""
    for rows in (8, 8, 8):
        training.check(training.inputs(rows))
    small = live_bytes(device)
    for rows in (512, 512, 512, 512):
        training.check(training.inputs(rows))
    for rows in (8, 8, 8):
        training.check(training.inputs(rows))
    assert live_bytes(device) - small < 512 * 64 * 4, "the memory that the large batch saved is back"


def test_parts_of_one_model_all_keep_theirs(device: torch.device) -> None:
    """Their saved tensors live at the same time."""
    trainings = [Training(device) for _ in range(2)]
    found: list[list[int]] = []
    for _ in range(6):
        x = trainings[0].inputs()
        results = [training.fast(x) for training in trainings]
        found.append([one for result in results for one in saved(result) if one != x.data_ptr()])
        (results[0] * results[1]).sum().backward()
        del results
    assert all(one == found[0] for one in found)


def test_blocks_that_are_recomputed_need_the_memory_of_one(device: torch.device) -> None:
    """Checkpoints around compiled blocks: each saves when the backward comes to it."""
    width = 1 << 14
    blocks = [pygraph.jit(lambda x, k=k: torch.sin(torch.cos(x * k)) * x) for k in range(1, 7)]

    def step() -> torch.Tensor:
        x = torch.ones(width, device=device, requires_grad=True)
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=True)
        y.sum().backward()  # pyright: ignore
        assert x.grad is not None
        return x.grad

    step()
    base = live_bytes(device)
    for _ in range(4):
        step()
    assert live_bytes(device) - base <= 3 * 4 * width, "one block saves at most three tensors"


def test_saved_tensors_of_jitted_functions_stay(device: torch.device) -> None:
    function = pygraph.jit(lambda x: torch.sin(torch.cos(x) * 2) * x)
    x = torch.randn(1000).to(device).requires_grad_()
    expected: list[torch.Tensor] = []
    for _ in range(6):
        first, second = function(x), function(x * 2)
        (found,) = torch.autograd.grad(first.sum() + second.sum(), x)
        expected.append(found)
        torch.randn(1000).to(device)
    leaf = x.detach().requires_grad_()
    fn = lambda x: torch.sin(torch.cos(x) * 2) * x  # noqa: E731
    (reference,) = torch.autograd.grad(fn(leaf).sum() + fn(leaf * 2).sum(), leaf)
    for one in expected:
        torch.testing.assert_close(one, reference)


def test_it_is_given_back_with_the_graphs(device: torch.device) -> None:
    base = live_bytes(device)
    training = Training(device)
    for _ in range(5):
        training.check(training.inputs())
    watch = weakref.ref(training.model)
    del training
    torch._dynamo.reset()
    gc.collect()
    assert watch() is None
    assert live_bytes(device) <= base


class History:
    """Random steps of a compiled perceptron beside eager: what waits for its backward, and what is held of it."""

    def __init__(self, training: Training, seed: int) -> None:
        self.training, self.memory, self.choose = training, kept_memory(), random.Random(seed)
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []  # with what is in it

    def forward(self) -> None:
        if len(self.waiting) < 4:
            x = self.training.inputs()
            self.waiting.append((self.training.fast(x), self.training.model(x)))

    def backward(self, retain: bool = False) -> None:
        if self.waiting:
            number = self.choose.randrange(len(self.waiting))
            losses = [result.square().sum() for result in self.waiting[number]]
            weights = list(self.training.model.parameters())
            torch.testing.assert_close(*[torch.autograd.grad(loss, weights, retain_graph=retain) for loss in losses])
            if not retain:
                self.waiting.pop(number)

    def retain(self) -> None:
        self.backward(retain=True)

    def hold(self) -> None:
        """Hold a saved tensor, a view of it, or its storage."""
        if self.waiting:
            result, _ = self.choose.choice(self.waiting)
            one: torch.Tensor = self.choose.choice(result.grad_fn.saved_tensors)  # pyright: ignore
            again = torch.empty(0, dtype=one.dtype, device=one.device)
            again.set_(one.untyped_storage(), one.storage_offset(), one.shape, one.stride())  # pyright: ignore
            self.held.append((self.choose.choice([one, one.detach()[:1], again]), one.detach().clone()))

    def let_go(self) -> None:
        if self.held:
            self.held.pop(self.choose.randrange(len(self.held)))

    def ask(self) -> None:
        self.memory.is_used()

    def give_back(self) -> None:
        self.memory.give_back()

    def check(self) -> None:
        for got, expected in self.waiting:
            torch.testing.assert_close(got, expected)
        for one, content in self.held:
            assert torch.equal(one, content[: len(one)])


@torch._functorch.config.patch(donated_buffer=False)  # else torch allows no retained graph
@pytest.mark.parametrize("seed", range(6))
def test_histories(training: Training, seed: int) -> None:
    torch.manual_seed(seed)
    history = History(training, seed)
    for _ in range(50):
        step = history.choose.choice([
            history.forward, history.forward, history.backward, history.backward, history.retain, history.hold,
            history.let_go, history.ask, history.give_back,
        ])  # fmt: skip
        step()
        history.check()
