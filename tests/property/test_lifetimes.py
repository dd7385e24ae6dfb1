"""Memory and state over time: interruptions anywhere, arguments freed or reused, references, alignment."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pygraph
from pygraph.process.collection import collect, collection_postponed, no_collection
from pygraph.process.reentrancy import here
from tests import extent
from tests.memory import live_bytes
from tests.property.laws import scramble

# ---- interruptions ---------------------------------------------------------------------------------------------

# What puts things back. A second interruption in there cannot be survived by any program.
_CLEANUP = frozenset(
    {
        "__exit__", "__del__", "restore", "_restore_random", "release", "forget", "renew", "_clear", "_drop", "_end",
        "_reset_word", "undo", "set_random_state", "_synchronize", "no_collection", "turn",
    }
)  # fmt: skip


class Interrupter:
    """Raises at the start of the n-th function of pygraph that is called, or only counts them."""

    def __init__(self, at: int = -1, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at = at
        self.error = error
        self.count = 0
        self.where = ""

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event != "call" or not self._counts(frame):
            return
        self.count += 1
        if self.count == self.at + 1:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise self.error(self.where)

    @staticmethod
    def _counts(frame: Any) -> bool:
        if "/pygraph/" not in frame.f_code.co_filename or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False  # a generator is also entered to be closed, where exceptions get lost
        while frame is not None:
            name = frame.f_code.co_filename
            # The emulated device stands for C++ code, which no Python code interrupts.
            if "/pygraph/" in name and (frame.f_code.co_name in _CLEANUP or "emulated" in name):
                return False
            frame = frame.f_back
        return True

    def __enter__(self) -> Interrupter:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


class World:
    """A function with everything that an interruption could leave half done."""

    def __init__(self, device: torch.device, stack: Callable[[Any], Any], several: bool) -> None:
        self.device = device
        self.weight = torch.full((4, 4), 0.5, device=device)
        self.count = torch.zeros(4, device=device)
        self.settings = {"scale": 2.0}
        self.list: list[int] = []
        self.several = several
        self.jitted = stack(self.fn)

    def fn(self, x: torch.Tensor, k: float) -> Any:
        self.list.append(1)
        y = torch.relu(x @ self.weight) * k
        self.count.add_(1)
        y = y * self.settings["scale"] + torch.rand(4, device=self.device)
        if self.several:  # regions: graph, eager, graph
            y = y + y.sum().item()
        self.list.pop()
        return y, self.count * 1

    def call(self, value: float, k: float) -> Any:
        return self.jitted(torch.full((4, 4), value, device=self.device), k)

    def check_call(self, value: float, k: float) -> None:
        before = self.count.clone()
        torch.manual_seed(1)
        expected = self.fn(torch.full((4, 4), value, device=self.device), k)
        self.count.copy_(before)
        torch.manual_seed(1)
        for got, want in zip(self.call(value, k), expected, strict=True):
            torch.testing.assert_close(got, want)


STACKS = {"jit": pygraph.jit, "graphify": pygraph.graphify}


@pytest.mark.parametrize(
    ("stack", "cached", "error"),
    [("jit", False, KeyboardInterrupt), ("jit", True, KeyboardInterrupt), ("graphify", False, MemoryError)],
)
def test_an_interruption_anywhere_leaves_everything_intact(
    device: torch.device, stack: str, cached: bool, error: type[BaseException]
) -> None:
    def start(several: bool) -> World:
        world = World(device, STACKS[stack], several)
        if cached:
            world.check_call(1.0, 0.5)
        return world

    counts: dict[bool, int] = {}
    with torch.no_grad():
        for several in (False, True):
            world = start(several)
            with Interrupter() as counter:
                world.call(2.0, 1.5)
            counts[several] = counter.count
        del world

    @settings(max_examples=extent.examples(3, 40), deadline=None)
    @given(at=st.integers(0, 1 << 20), several=st.booleans())
    @torch.no_grad()
    def interrupted(at: int, several: bool) -> None:
        base = live_bytes(device)
        world = start(several)
        calls = world.count[0].item()
        torch.manual_seed(0)
        state = torch.rand(3, device=device)
        torch.manual_seed(0)
        interrupter = Interrupter(at % counts[several], error)
        try:
            with interrupter:
                world.call(2.0, 1.5)
        except error:
            pass
        where = interrupter.where
        assert not torch.is_grad_enabled(), where
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0, where
        assert here.inside is False, where
        assert gc.isenabled(), where
        assert world.list == [], where
        done = world.count[0].item() - calls
        assert done in (0.0, 1.0), where
        assert world.count.tolist() == [calls + done] * 4, where
        if not done:
            assert torch.equal(torch.rand(3, device=device), state), where
        for value, k in ((3.0, 0.25), (1.0, 2.0)):
            world.check_call(value, k)
        world.jitted.cache_clear()
        del world, state
        assert live_bytes(device) <= base, where

    interrupted()


def test_an_exception_of_the_timer_or_the_device_is_survived(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording, the second recording, the proof and the measurement fail with an error of the device's."""
    from pygraph.runtime.capture import RegionGraph
    from pygraph.runtime.discovery import Discovery
    from pygraph.runtime.executable import Executable
    from pygraph.runtime.replay_proof import ReplayProof

    base = live_bytes(device)
    for owner, name, nth in (
        (Discovery, "_record_once", 1),
        (Discovery, "_record_once", 2),
        (Discovery, "_plan", 1),
        (RegionGraph, "_prove", 1),
        (ReplayProof, "passes", 1),
        (RegionGraph, "__call__", 1),
        (Executable, "_record", 1),
    ):
        world = World(device, pygraph.jit, False)
        calls = 0
        original = getattr(owner, name)

        def failing(self: Any, *args: Any, original: Any = original, nth: int = nth, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise RuntimeError("the device has failed")
            return original(self, *args, **kwargs)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(owner, name, failing)
            with pytest.raises(RuntimeError, match="the device has failed"):
                world.call(2.0, 1.5)
        with torch.no_grad():
            assert world.count.tolist() == [0.0] * 4, name
            world.check_call(2.0, 1.5)
            world.check_call(1.0, 0.5)
        assert world.jitted.cache_info().hits == 1
        world.jitted.cache_clear()
        del world
        assert live_bytes(device) <= base, (name, nth)


# ---- arguments, results and captured tensors --------------------------------------------------------------------


def drop(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        scramble(tensor)


@settings(max_examples=extent.examples(6, 100), deadline=None)
@given(data=st.data())
def test_an_argument_is_freed_or_reused_right_after_the_call(device: torch.device, data: st.DataObject) -> None:
    """No result is read before the arguments' memory has had another owner, who writes to it."""
    function = data.draw(st.sampled_from(FUNCTIONS))
    jitted = pygraph.jit(function)
    held: list[tuple[Any, Any]] = []
    for step in range(data.draw(st.integers(2, 6))):
        rows = data.draw(st.sampled_from((4, 8)))
        x = torch.arange(rows * 8, device=device).view(rows, 8) / 16 + step
        expected = function(x)
        result = jitted(x)
        if data.draw(st.booleans()):
            scramble(x)  # the caller reuses it
        del x
        others = [torch.full((rows, 8), float("nan"), device=device) for _ in range(3)]
        held.append((result, expected))
        del others
    for result, expected in held:
        torch.testing.assert_close(result, expected)


FUNCTIONS = (
    lambda x: x * 2 + 1,
    lambda x: (torch.relu(x) @ x.t()).softmax(-1),
    lambda x: torch.cumprod(x / x.max(), 0),  # hides its pointers on the emulated device
    lambda x: torch.cat([x, x + 1]).sum(0),
    lambda x: torch.nn.functional.layer_norm(x, (8,)),
)


def test_nothing_of_a_call_is_kept(device: torch.device) -> None:
    """The cache holds no argument and no result, of the first call (which was traced) or of a later one."""
    jitted = pygraph.jit(lambda batch, k, empty: {"y": batch["x"] * k, "e": empty + 1})
    base = live_bytes(device)
    alive: list[weakref.ref[torch.Tensor]] = []
    for step in range(3):
        x = torch.full((5,), float(step), device=device)
        whole = torch.ones(10_000, device=device)
        result = jitted({"x": x}, 2.0, whole[:0])
        alive += [weakref.ref(x), weakref.ref(whole), weakref.ref(result["y"])]
        del x, whole, result
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive), step
    assert jitted.cache_info()[:2] == (2, 1)
    assert live_bytes(device) <= base + (4096 if device.type == "emu" else 1 << 20)
    jitted.cache_clear()
    assert live_bytes(device) <= base


def test_a_container_among_the_arguments_may_change(device: torch.device) -> None:
    """It is in the key, so changing it is no reason to trace anew, or to give up."""
    jitted = pygraph.jit(lambda batch, items: batch["x"] * batch["k"] + len(items))
    batch: dict[str, Any] = {}
    items: list[int] = [1, 2]
    for step in range(60):
        batch["x"] = torch.full((3,), float(step), device=device)
        batch["k"] = step + 0.5
        items[0] = step
        assert torch.equal(jitted(batch, items), batch["x"] * batch["k"] + 2)
    assert jitted.cache_info()[:2] == (59, 1)
    batch["x"], batch["new"] = batch["x"][:2], 1
    assert torch.equal(jitted(batch, items), batch["x"] * batch["k"] + 2)
    assert jitted.cache_info()[:2] == (59, 2)


def test_attributes_of_an_object_among_the_arguments_are_guarded(device: torch.device) -> None:
    class Config:
        scale = 2.0

    config = Config()
    jitted = pygraph.jit(lambda x, config: x * config.scale)
    x = torch.ones(3, device=device)
    for scale in (2.0, 3.0, 3.0, -1.0):
        config.scale = scale
        assert torch.equal(jitted(x, config), x * scale)


def test_what_is_closed_over_lives_as_long_as_the_cache(device: torch.device) -> None:
    holder = {"weight": torch.ones(3, device=device)}
    jitted = pygraph.jit(lambda x: x * holder["weight"])
    x = torch.full((3,), 2.0, device=device)
    for step in range(4):
        before = weakref.ref(holder["weight"])
        holder["weight"] = torch.full((3,), float(step), device=device)
        assert torch.equal(jitted(x), x * step)
        gc.collect()
        assert before() is None, step


# ---- alignment -------------------------------------------------------------------------------------------------

VECTORISED = {
    "elementwise": lambda x: x * 2 + x,
    "where": lambda x: torch.where(x > 1, x, -x),
    "matmul": lambda x: x.float() @ x.float().t(),
    "half matmul": lambda x: x.half() @ x.half().t(),
    "sum": lambda x: x.float().sum(-1),
    "softmax": lambda x: x.float().softmax(-1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x.float(), (16,)),
    "cat": lambda x: torch.cat([x, x], 1),
    "copy": lambda x: x.clone(),
    "index": lambda x: x[:, [3, 1]],
    "conv": lambda x: torch.nn.functional.conv1d(x.float()[:, None], torch.ones(1, 1, 3, device=x.device)),
    "update": lambda x: x.mul_(2),
    # Where the argument lies 4 bytes behind a multiple of 16, this lies at one; where it lies 12 behind, it does not.
    "three behind": lambda x: x.flatten()[3:] * 2,
    "one behind": lambda x: x.flatten()[1:] * 2,
}


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", VECTORISED)
def test_alignment(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Views at every offset, captured aligned and called unaligned, and the other way round."""
    function = VECTORISED[kind]
    for offsets in ((0, 1, 2, 3, 4, 8, 0, 1), (1, 0, 3, 16, 2, 1)):
        jitted = pygraph.jit(function)
        for step, offset in enumerate(offsets):
            memory = torch.arange(80, device=device).to(dtype) + step
            x = memory[offset : offset + 64].view(4, 16)
            reference = memory.clone()[offset : offset + 64].view(4, 16)
            expected = function(reference)
            torch.testing.assert_close(jitted(x), expected)
            assert torch.equal(x, reference)
            around = torch.cat([memory[:offset], memory[offset + 64 :]])
            untouched = torch.arange(80, device=device).to(dtype) + step
            assert torch.equal(around, torch.cat([untouched[:offset], untouched[offset + 64 :]]))


@torch.library.custom_op("pygraph_tests_lifetimes::shifted", mutates_args=())
def _shifted(x: torch.Tensor) -> torch.Tensor:
    """A copy that lies, and is aligned, as the data says."""
    offset = int(x.flatten()[0].item())
    memory = torch.zeros(x.numel() + 16, device=x.device)
    result = memory[offset : offset + x.numel()].view(x.shape)
    result.copy_(x)
    return result


@_shifted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("first", [0, 1])
def test_alignment_of_what_an_operation_outside_of_graphs_returns(device: torch.device, first: int) -> None:
    fn = lambda x: _shifted(x * 1) * 2 + 1  # noqa: E731
    jitted = pygraph.graphify(pygraph.indirect(fn))
    for offset in (first, 1, 0, 2, 4, 1, 0):
        x = torch.arange(64.0, device=device)
        x[0] = offset
        assert torch.equal(jitted(x), fn(x))
    assert jitted.cache_info().misses == 1
    if first == 0:
        reasons = [fallback["reason"] for fallback in jitted.explain().to_dict()["fallbacks"]]
        assert any("laid out in another way" in reason for reason in reasons)


# ---- collections -----------------------------------------------------------------------------------------------


@pytest.fixture
def collecting() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("inner", [no_collection, collection_postponed])
@pytest.mark.parametrize("outer", [no_collection, collection_postponed])
@pytest.mark.parametrize("on", [True, False])
def test_no_collection_nests_and_leaves_what_it_found(
    collecting: None, on: bool, outer: Callable[[], Any], inner: Callable[[], Any]
) -> None:
    (gc.enable if on else gc.disable)()
    with outer():
        assert not gc.isenabled()
        with pytest.raises(KeyError), inner():
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled() is on


def test_a_postponed_collection_may_be_asked_for(collecting: None) -> None:
    with collection_postponed():
        assert collect(0)
        with no_collection():
            assert collect(0)
            with no_collection():
                assert not collect(0)
