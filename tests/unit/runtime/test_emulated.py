"""The emulated device: a torch device that behaves as CUDA, and graphs that behave as CUDA graphs."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import pygraph
from pygraph.errors import ArgumentError, CaptureError
from pygraph.runtime.driver import Run
from pygraph.runtime.emulated import driver as emulated
from pygraph.runtime.emulated import launches, parameters
from pygraph.runtime.emulated import tensors as emulated_tensors
from pygraph.runtime.emulated.driver import EmulatedDriver
from pygraph.runtime.emulated.nodes import HIDES_POINTERS
from pygraph.runtime.graph_generators import GraphGenerator
from pygraph.runtime.recorded_graph import RecordedGraph
from pygraph.runtime.samples import Sample
from tests.memory import live_bytes

Body = Callable[[], Any]


@pytest.fixture(name="driver")
def fixture_driver():
    """The driver; afterwards no memory of the device is in use that was not before."""
    driver = emulated.driver()
    device = torch.device("emu")  # not known on a machine with a GPU, where this module is only collected
    live = live_bytes(device)
    yield driver
    assert live_bytes(device) <= live
    assert launches.recorder is None


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def emu(*shape: int, seed: int = 1) -> torch.Tensor:
    return values(*shape, seed=seed).to("emu")


def record(driver: EmulatedDriver, body: Body) -> tuple[RecordedGraph, Any]:
    return driver.record(lambda mark: body(), driver.new_pool())


def patch(graph: RecordedGraph, old: int, new: int) -> int:
    """Replace every aligned parameter word ``old``; returns how many there were."""
    patched = 0
    for index, node in enumerate(graph.nodes):
        address = graph.params_address(index)
        hits = [at for at in range(0, len(node.params) - 7, 8) if node.params[at : at + 8] == struct.pack("<Q", old)]
        for at in hits:
            ctypes.memmove(address + at, struct.pack("<Q", new), 8)
        if hits:
            graph.commit(index)
        patched += len(hits)
    return patched


# ---- the device ------------------------------------------------------------------------------------------------


def _setitem(device: str) -> torch.Tensor:
    x = values(5, 4).to(device)
    x[0] = 5.0
    x[x > 1] = 1.0
    x[torch.tensor([1, 2], device=device), torch.tensor([1, 2], device=device)] = 7.0
    x[torch.tensor([3])] = 2.0
    x[x < 0] = x[x < 0] * 2
    return x


def _optimize(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).to(device)
        steps = optimizer(model.parameters(), lr=0.1, **options)
        for seed in range(3):
            loss = F.cross_entropy(model(values(2, 1, 4, 4, seed=seed).to(device)), torch.tensor([0, 2]).to(device))
            steps.zero_grad()
            loss.backward()
            steps.step()
        return [*model.state_dict().values(), loss]

    return run


def _module(make: Callable[[], nn.Module], *shape: int) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = make().to(device)
        x = values(*shape).to(device).requires_grad_()
        y = pytree.tree_leaves(model(x))[0]
        y.square().sum().backward()
        return [y, x.grad, *(parameter.grad for parameter in model.parameters())]

    return run


COMPUTATIONS: dict[str, Callable[[str], Any]] = {
    "arithmetic": lambda d: values(3, 4).to(d) + values(4).to(d) * 2.5 - 1,
    "abs": lambda d: values(3, 4).to(d).abs(),
    "setitem": _setitem,
    "index": lambda d: [
        (x := values(5, 4).to(d))[2],
        x[1:3],
        x[[0, 2]],
        x[torch.tensor([0, 2], device=d)],
        x[torch.tensor([0, 1])],
        x[x > 0],
        x[:, None, ::2],
    ],
    "conversions": lambda d: [values(3).to(d, torch.float64), values(3).to(d).half(), values(3, 4).t().to(d).clone()],
    "factories": lambda d: [
        torch.full((2,), 3, device=d),
        torch.arange(5, device=d),
        torch.eye(3, device=d),
        torch.tensor([1.0, 2.0], device=d),
        torch.tril_indices(3, 3, device=d),
        torch.zeros(2, 3, 4, 5, device=d).to(memory_format=torch.channels_last),
    ],
    "random": lambda d: [
        torch.randn(4, device=d),
        torch.randperm(5, device=d),
        torch.randint(0, 9, (4,), device=d),
        torch.bernoulli(torch.full((9,), 0.5, device=d)),
        torch.multinomial(torch.ones(4, device=d), 2),
        torch.empty(4, device=d).exponential_(),
    ],
    "deepcopy": lambda d: copy.deepcopy(values(3, 4).to(d)[1:]),
    "views": lambda d: [
        values(4).to(d).view(torch.int32),
        torch.view_as_complex(values(4, 2).to(d)),
        values(4, 4).to(d).unfold(0, 2, 1),
        values(4, 4).to(d).t().reshape(16),
        values(4, 4).to(d).t_(),
        values(4, 4).to(d).expand(2, 4, 4),
    ],
    "out": lambda d: [
        torch.add(values(3).to(d), 1, out=torch.empty(0, device=d)),
        torch.sort(values(4).to(d), out=(torch.empty(0, device=d), torch.empty(0, device=d, dtype=torch.long))),
        values(3).to(d).resize_(2, 1),
    ],
    "without kernels of their own": lambda d: [
        torch.fft.fft(values(4).to(d)).conj_physical_().real.clone(),
        torch.mode(values(4).to(d), out=(torch.empty(0, device=d), torch.empty(0, device=d, dtype=torch.long))),
    ],
    "host scalars": lambda d: [
        values(3).to(d) * torch.tensor(2.0, dtype=torch.float64),
        values(3).to(d).masked_fill(values(3).to(d) > 0, torch.tensor(2.0)),
        torch.ones(3, device=d, dtype=torch.bool) | False,
        torch.remainder(values(3).to(d, torch.bfloat16), 0.1),
        torch.arange(3, device=d) % 0.7,
        torch.xlogy(torch.tensor(2, device=d, dtype=torch.int8), 3),
        torch.fmod(torch.ones((), device=d, dtype=torch.float16), 0.3),
    ],
    "foreach": lambda d: torch._foreach_addcdiv([values(3).to(d)], [values(3).to(d)], [values(3).to(d)], 1.5),
    "reductions": lambda d: [
        values(9).to(d).topk(3),
        values(9).to(d).sort(),
        values(9).to(d).cumsum(0),
        values(9).to(d).cumprod(0),
        values(9).to(d).logcumsumexp(0),
        values(3, 4).to(d).max(1),
    ],
    "joins": lambda d: [
        torch.cat([values(3).to(d), values(2).to(d)]),
        torch.einsum("ij,kj", *[values(2, 3).to(d)] * 2),
    ],
    "linalg": lambda d: [
        torch.linalg.solve(values(3, 3).to(d), values(3, 2).to(d)),
        torch.linalg.qr(values(3, 3).to(d)),
    ],
    "fft": lambda d: [torch.fft.fft(values(8).to(d)).conj().cpu(), torch.fft.fft(values(8).to(d)).conj().imag * 2],
    "data-dependent": lambda d: [
        values(9).to(d).gt(0).nonzero(),
        values(9).to(d).masked_select(values(9).to(d) > 0),
        torch.tensor([1, 2, 1], device=d).unique(return_counts=True),
    ],
    "embedding": lambda d: F.embedding(torch.tensor([1, 0], device=d), values(3, 4).to(d)),
    "attention": lambda d: F.scaled_dot_product_attention(*[values(2, 2, 5, 8).to(d)] * 3, is_causal=True),
    "layer_norm": _module(lambda: nn.LayerNorm(4), 3, 4),
    "conv": _module(lambda: nn.Conv2d(3, 4, 3, padding=1), 2, 3, 8, 8),
    "conv_transpose": _module(lambda: nn.ConvTranspose1d(3, 4, 3, bias=False), 2, 3, 8),
    "lstm": _module(lambda: nn.LSTM(4, 5, 2, bidirectional=True), 3, 2, 4),
    "transformer": _module(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 3, 2, 8),
    "sgd": _optimize(torch.optim.SGD, momentum=0.9),
    "adamw": _optimize(torch.optim.AdamW, foreach=True),
    "grad": lambda d: torch.func.grad(lambda x: (x.sin() ** 2).sum())(values(3).to(d)),
    "vmap": lambda d: torch.vmap(lambda x, y: (x * y).sum(), (0, None))(values(3, 4).to(d), values(4).to(d)),
    "vmap of grad": lambda d: torch.vmap(torch.func.grad(lambda x: x.exp().sum()))(values(3, 4).to(d)),
    "inference": lambda d: torch.inference_mode()(lambda: values(3).to(d) + 1)(),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_device_computes_what_the_cpu_computes(driver: EmulatedDriver, name: str):
    torch.manual_seed(0)
    found = pytree.tree_leaves(COMPUTATIONS[name]("emu"))
    torch.manual_seed(0)
    expected = pytree.tree_leaves(COMPUTATIONS[name]("cpu"))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a.cpu(), b.cpu())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch compiles its jvp rules so, on any device
def test_jvp(driver: EmulatedDriver):
    primal, tangent = torch.func.jvp(torch.sin, (emu(3),), (emu(3, seed=2),))
    torch.testing.assert_close(primal.cpu(), values(3).sin())
    torch.testing.assert_close(tangent.cpu(), values(3).cos() * values(3, seed=2))


def test_tensors_are_genuine(driver: EmulatedDriver):
    x = torch.zeros(4, 4, device="emu")
    row = x[1]
    assert x.device == driver.device
    assert row._base is x
    assert row.data_ptr() == x.data_ptr() + 16
    version = x._version
    row.add_(1)
    assert x._version == version + 1
    assert x.sum().item() == 4
    assert "device='emu:0'" in repr(x)


def test_register_twice_and_no_registration_at_import():
    emulated.register()
    emulated.register()
    code = (
        "import torch, pygraph.runtime.emulated.driver\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_interpreter_ends_quietly_with_tensors_alive():
    code = (
        "import torch\nfrom pygraph.runtime.emulated.driver import driver\nd = driver()\n"
        "x = torch.ones(4, device='emu')\n"
        "cycle = [torch.ones(3, device='emu')]; cycle.append(cycle)\n"
        "graph, y = d.record(lambda mark: (x + 1).cumprod(0), d.new_pool())\nx.requires_grad_().sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3).add_(x),
        lambda x: torch.mm(x.expand(3, 3), torch.ones(3, 3)),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: F.embedding(torch.tensor([1]), x[:, None]),
        lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1)),
    ],
)
def test_devices_do_not_mix(driver: EmulatedDriver, mix: Callable[[torch.Tensor], torch.Tensor]):
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device, but found at least two devices"
    ):
        mix(emu(3))


def test_generators_of_other_devices_are_refused(driver: EmulatedDriver):
    with pytest.raises(RuntimeError, match="Expected a 'emu' device type for generator but found 'cpu'"):
        emu(3).uniform_(generator=torch.Generator())


def test_a_recording_draws_from_generators_of_its_own(driver: EmulatedDriver):
    """As on CUDA, one that is not registered is refused; a replay has the caller's state, and advances it."""
    caller = torch.Generator(device="emu").manual_seed(4)
    with pytest.raises(CaptureError, match="not registered with the graph"):
        record(driver, lambda: torch.rand(3, device="emu", generator=caller))
    registered = GraphGenerator(caller)
    graph, drawn = driver.record(
        lambda mark: torch.rand(3, device="emu", generator=registered.own), driver.new_pool(), [registered]
    )
    for seed in (4, 4, 9):
        caller.manual_seed(seed)
        expected = [torch.rand(3, generator=one) for one in [torch.Generator().manual_seed(seed)] * 2]
        for numbers in expected:
            graph.replay()
            assert torch.equal(drawn.cpu(), numbers)
    graph.release()


def test_overlapping_writes_are_refused(driver: EmulatedDriver):
    x = emu(4)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.index_put_((torch.tensor([0], device="emu"),), x[0])


def test_autocast_and_default_device(driver: EmulatedDriver):
    with torch.autocast("emu", dtype=torch.bfloat16):
        assert (emu(3, 4) @ emu(4, 3)).dtype == torch.bfloat16
    with torch.device("emu"):
        assert torch.ones(3).device == driver.device


def test_fake_tensors(driver: EmulatedDriver):
    x = emu(4, 3)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert isinstance(fake @ fake.t(), FakeTensor)
        assert torch.tensor([1.0, 2.0], device="emu").device == driver.device
    before = x.cpu()

    def computation(x: torch.Tensor) -> torch.Tensor:
        x = x * torch.tensor(3.0, device="emu") + torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0], device="emu")
        return torch.func.grad(lambda y: y.square().sum())(x)

    traced = make_fx(computation, tracing_mode="fake")(x)
    torch.testing.assert_close(traced(x).cpu(), computation(x).cpu())
    torch.testing.assert_close(x.cpu(), before)


# ---- counters --------------------------------------------------------------------------------------------------


def counted(driver: EmulatedDriver, run: Body) -> dict[str, int]:
    before = dict(vars(driver.counters))
    run()
    return {name: value - before[name] for name, value in vars(driver.counters).items() if value != before[name]}


def test_counters(driver: EmulatedDriver):
    x = emu(8)
    assert counted(driver, lambda: x.view(2, 4).t()[1]) == {}
    assert counted(driver, lambda: torch.empty(3, device="emu")) == {}
    assert counted(driver, lambda: x + 1) == {"launches": 1}
    assert counted(driver, lambda: values(8).to("emu")) == {"copies": 1, "copied_bytes": 32}
    assert counted(driver, x.cpu) == {"copies": 1, "copied_bytes": 32, "synchronizations": 1}
    assert counted(driver, x.clone) == {"copies": 1, "copied_bytes": 32}
    assert counted(driver, lambda: x[0].item()) == {"synchronizations": 1}
    assert counted(driver, lambda: x.equal(x)) == {"launches": 1, "synchronizations": 1}
    assert counted(driver, lambda: x.nonzero())["synchronizations"] == 1
    mask = x > 0
    assert counted(driver, lambda: x[mask])["synchronizations"] == 1
    assert counted(driver, lambda: x.index_put_((mask,), x[:1].squeeze())).get("synchronizations") is None
    assert counted(driver, driver.synchronize) == {"synchronizations": 1}


def test_samples_are_those_of_a_model(driver: EmulatedDriver):
    x = emu(8)
    graph, _ = record(driver, lambda: (x + 1) * 2)
    assert driver.is_exact
    assert driver.sample(Run(lambda: (x + 1) * 2)) == Sample(host=10.0, device=1.0)
    assert driver.sample(Run(graph.replay)) == Sample(host=3.0, device=1.0)
    assert driver.sample(Run(lambda: graph.commit(0))) == Sample(host=pytest.approx(0.3), device=0.0)
    assert driver.sample(Run(x.clone)) == Sample(host=4.0, device=pytest.approx(0.00032))
    graph.release()


def test_what_is_measured_runs_several_times_each_from_the_same_state(driver: EmulatedDriver):
    x = torch.zeros(1, device="emu")
    found: list[float] = []

    def run():
        found.append(x.item())
        x.add_(1)

    assert driver.sample(Run(run)).host == 5.0
    assert len(found) > 2
    assert found == [float(index) for index in range(len(found))]
    found.clear()
    assert driver.sample(Run(run, x.zero_)).host == 5.0
    assert len(found) > 2
    assert set(found) == {0.0}


def test_a_replay_is_really_replayed_to_be_timed(driver: EmulatedDriver):
    x = torch.zeros(1, device="emu")
    graph, _ = record(driver, lambda: x.add_(1))
    driver.replay_time(graph)
    assert x.item() >= 2
    driver.replay_time(graph, x.zero_)
    assert x.item() == 1
    graph.release()


# ---- memory ----------------------------------------------------------------------------------------------------


def test_freed_memory_is_poisoned_and_reused(driver: EmulatedDriver):
    x = torch.ones(7, device="emu")
    address = x.data_ptr()
    assert address % 512 == 0
    stale = driver.tensor_at(address, (7,), (1,), torch.float32)
    del x
    assert stale.cpu().isnan().all()
    assert driver.tensor_at(address, (7,), (1,), torch.int32).cpu().eq(-1).all()
    blocks = [torch.empty(7, device="emu") for _ in range(64)]
    assert address in {block.data_ptr() for block in blocks}


def test_accounting(driver: EmulatedDriver):
    live, total = driver.live_bytes(), driver.allocated_total()
    x = torch.empty(100, device="emu")
    y = torch.empty(3 << 20, dtype=torch.uint8, device="emu")
    view = x[5:]
    assert driver.live_bytes() == live + 400 + (3 << 20)
    del x, y
    assert driver.live_bytes() == live + 400
    del view
    assert driver.live_bytes() == live
    assert driver.allocated_total() == total + 400 + (3 << 20)


@given(st.lists(st.tuples(st.integers(1, 3_000_000), st.integers(0, 9)), max_size=30))
def test_blocks_in_use_never_overlap(requests: list[tuple[int, int]]):
    driver = emulated.driver()
    live = driver.live_bytes()
    held: list[torch.Tensor] = []
    for size, drop in requests:
        if drop < len(held):
            del held[drop]
        held.append(torch.empty(size, dtype=torch.uint8, device="emu"))
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert driver.live_bytes() == live + sum(tensor.numel() for tensor in held)
    held.clear()
    assert driver.live_bytes() == live


def test_foreign_tensor(driver: EmulatedDriver):
    x = emu(4, 4)
    column = driver.tensor_at(x.data_ptr() + 4, (4,), (4,), torch.float32)
    torch.testing.assert_close(column.cpu(), values(4, 4)[:, 1])
    column.zero_()
    assert x[:, 1].eq(0).all().item()
    assert driver.tensor_at(0, (0, 3), (3, 1), torch.float32).shape == (0, 3)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        driver.tensor_at(4096, (4,), (1,), torch.float32)


def test_pool_memory_is_private_until_its_last_graph_is_released(driver: EmulatedDriver):
    x, pool = emu(8), driver.new_pool()
    assert pool.nbytes() == 0
    first, y = driver.record(lambda mark: (x + 1) * 2, pool)
    address = y.data_ptr()
    second, z = driver.record(lambda mark: x + 3, pool)
    size = pool.nbytes()
    assert size > 0
    del y, z
    tensors = [torch.empty(8, device="emu") for _ in range(64)]
    assert address not in {tensor.data_ptr() for tensor in tensors}
    first.release()
    first.release()
    assert pool.nbytes() == size
    second.release()
    assert pool.nbytes() == 0
    pool.order()


# ---- recording -------------------------------------------------------------------------------------------------


def test_recording_does_not_execute(driver: EmulatedDriver):
    x, y = emu(8), emu(8, seed=2)
    norm = nn.BatchNorm1d(4).to("emu")
    torch.manual_seed(3)

    def body(mark: Callable[[int], None]) -> torch.Tensor:
        mark(0)
        x.add_(1)
        mark(1)
        y[2:].copy_(x[2:])
        norm(x.view(2, 4))
        return x * torch.rand(8, device="emu")

    recordings: list[Any] = []
    assert counted(driver, lambda: recordings.extend(driver.record(body, driver.new_pool()))) == {"captures": 1}
    graph, result = recordings
    recordings.clear()
    torch.testing.assert_close(x.cpu(), values(8))
    torch.testing.assert_close(y.cpu(), values(8, seed=2))
    assert norm.running_mean.eq(0).all().item()
    assert norm.num_batches_tracked.item() == 0
    assert result.isnan().all().item()
    torch.testing.assert_close(torch.rand(8), torch.rand(8, generator=torch.Generator().manual_seed(3)))
    assert [node.op for node in graph.nodes][:2] == [0, 1]
    assert [node.kind for node in graph.nodes][:2] == ["kernel", "memcpy"]
    assert graph.nodes[0].name == "aten::add.out"
    assert graph.nodes[1].params == struct.pack("<QQ", x.data_ptr() + 8, y.data_ptr() + 8)

    torch.manual_seed(3)
    assert counted(driver, graph.replay) == {"launches": 1, "replays": 1}
    torch.manual_seed(3)
    torch.testing.assert_close(x.cpu(), values(8) + 1)
    torch.testing.assert_close(y[2:].cpu(), values(8)[2:] + 1)
    torch.testing.assert_close(result.cpu(), (values(8) + 1) * torch.rand(8))
    assert norm.num_batches_tracked.item() == 1
    graph.release()
    with pytest.raises(RuntimeError, match="released"):
        graph.replay()


@pytest.mark.parametrize(
    "run",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.conv1d(x, x[:, :, :2], padding=1),
        lambda x: x.topk(2) + x.sort(descending=True) + x.max(1),
        lambda x: torch._foreach_addcdiv([x, x[0]], [x, x[1]], [x, x[0]], 1.5),
        lambda x: torch.fft.fft(x).conj().imag.clone(),
        lambda x: [x.transpose(1, 2).contiguous(), x.to(torch.int32), torch.cat([x, x[:1]]), x.permute(2, 0, 1) * 2],
        lambda x: [
            x.new_zeros(3),
            x.new_full((2,), 2.5),
            torch.arange(3, device=x.device),
            x[:, None].expand(4, 4, 4, 4).sum(),
        ],
        lambda x: torch.func.vmap(torch.func.grad(lambda row: row.tanh().sum()))(x),
        lambda x: [x % 0.3, x.fmod(2), torch.xlogy(x.abs(), 3), x.to(torch.int8) % 3, (x > 0) & True],
        lambda x: torch.where(x > 0, x, 0.0).masked_fill(x > 1, 3).clamp(max=2) == x,
        lambda x: [torch.empty(0, device=x.device).new_empty(0, 3).sum(), x[:, :0].sum(), x.dtype],
    ],
)
def test_replays_equal_eager(driver: EmulatedDriver, run: Callable[[torch.Tensor], Any]):
    x, source = emu(4, 4, 4), emu(4, 4, 4, seed=2)
    graph, results = record(driver, lambda: run(x))
    x.copy_(source)
    graph.replay()
    for a, b in zip(pytree.tree_leaves(results), pytree.tree_leaves(run(source)), strict=True):
        assert a == b if not isinstance(a, torch.Tensor) else torch.equal(a, b)
    graph.release()


def test_random_replays_draw_anew(driver: EmulatedDriver):
    x = torch.ones(50, device="emu")
    graph, y = record(driver, lambda: F.dropout(x, 0.5))
    torch.manual_seed(7)
    graph.replay()
    first = y.cpu()
    graph.replay()
    second = y.cpu()
    torch.manual_seed(7)
    assert torch.equal(F.dropout(x, 0.5).cpu(), first)
    assert torch.equal(F.dropout(x, 0.5).cpu(), second)
    assert not torch.equal(first, second)
    graph.release()


def test_training_step_replays(driver: EmulatedDriver):
    """Forward and backward (which autograd runs in another thread) and an update, recorded once."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        weights = list(model.parameters())
        with torch.no_grad():
            for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight -= 0.1 * grad
        return loss.detach()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    copied = copy.deepcopy(model).to("emu")
    x = values(2, 1, 4, 4)
    moved = x.to("emu")
    graph, loss = record(driver, lambda: step(copied, moved))
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(loss.cpu(), step(model, x))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(copied.state_dict()[name].cpu(), value)
    graph.release()


def test_a_tensor_that_dies_after_the_recording_leaves_the_graphs_memory_alone(driver: EmulatedDriver):
    """Autograd's thread lets go of what it computed at any time, also in the middle of a replay."""
    x = values(4).to("emu")
    held: list[torch.Tensor] = []

    def body() -> torch.Tensor:
        held.append(x * 2)
        return held[0] + 1

    graph, y = record(driver, body)
    graph.replay()
    address = held[0].data_ptr()
    held.clear()
    assert torch.equal(driver.tensor_at(address, (4,), (1,), torch.float32).cpu(), x.cpu() * 2)
    assert torch.equal(y.cpu(), x.cpu() * 2 + 1)
    graph.release()


def test_an_error_in_a_backward_does_not_end_the_process(driver: EmulatedDriver):
    """Torch leaves the device in a destructor, by a call of Python, while the error is under way."""

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.as_strided.default:
                raise ValueError("not strided")
            return func(*args, **(kwargs or {}))

    x = values(10).to("emu").requires_grad_()
    for _ in range(3):
        y = (x * 1).as_strided_((2, 2), (1, 2), 1)
        with Refusing(), pytest.raises(ValueError, match="not strided"):
            torch.autograd.grad(y.sum(), x)
    assert torch.equal(torch.autograd.grad((x * 2).sum(), x)[0].cpu(), torch.full((10,), 2.0))


def test_a_recording_waits_for_what_autograd_does(driver: EmulatedDriver):
    """An operation of autograd's thread that has begun ends first: it is of another thread's backward."""
    at_work, recording = threading.Event(), threading.Event()

    def slow(grad: torch.Tensor) -> torch.Tensor:
        at_work.set()
        recording.wait(0.2)
        return grad * 3

    with torch.library._scoped_library("emulated_turns", "DEF") as library:
        library.define("slow(Tensor grad) -> Tensor")
        library.impl("slow", slow, "CPU")
        x = emu(4).requires_grad_()
        y = x * 2
        y.register_hook(torch.ops.emulated_turns.slow)  # pyright: ignore
        found: list[torch.Tensor] = []
        other = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y.sum(), x)))
        other.start()
        at_work.wait(10)

        def body() -> torch.Tensor:
            recording.set()
            return x.detach() + 1

        graph, _ = record(driver, body)
        other.join(10)
        assert len(graph.nodes) == 1
        assert found[0].tolist() == [6.0] * 4
        graph.release()


# ---- patching --------------------------------------------------------------------------------------------------


def test_patched_words_read_and_write_new_buffers(driver: EmulatedDriver):
    x, other = emu(8), emu(8, seed=2)
    graph, y = record(driver, lambda: x[2:] * 3 + x[2:])
    address, elsewhere = x.data_ptr() + 8, other.data_ptr() + 8
    assert patch(graph, address, elsewhere) >= 2
    x.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y.cpu(), values(8, seed=2)[2:] * 4)
    fresh = torch.zeros(6, device="emu")
    assert patch(graph, y.data_ptr(), fresh.data_ptr()) >= 1
    graph.release()


def test_a_word_that_was_missed_reads_poison(driver: EmulatedDriver):
    held = [emu(8)]
    graph, y = record(driver, lambda: held[0] + 1)
    held.clear()
    graph.replay()
    assert y.isnan().all().item()
    graph.release()


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("aten::cumprod.out", lambda x: x.cumprod(0)),
        ("aten::_logcumsumexp", lambda x: x.logcumsumexp(0)),
        ("aten::linalg_qr.out", lambda x: torch.linalg.qr(x)[0]),
    ],
)
def test_hidden_pointers(driver: EmulatedDriver, name: str, run: Callable[[torch.Tensor], torch.Tensor]):
    assert name in HIDES_POINTERS
    x, other = emu(3, 3), emu(3, 3, seed=2)
    graph, y = record(driver, lambda: run(x))
    index = next(i for i, node in enumerate(graph.nodes) if node.name == name)
    graph.replay()
    torch.testing.assert_close(y.cpu(), run(values(3, 3)))
    # Whatever looks like the pointer is padding; the kernel reads the old buffer.
    patch(graph, x.data_ptr(), other.data_ptr())
    graph.commit(index)
    x.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(y.cpu(), run(torch.full((3, 3), 2.0)))
    graph.release()


def test_a_hidden_table_is_not_where_an_earlier_node_writes(driver: EmulatedDriver):
    x = emu(3, 3)

    def run() -> torch.Tensor:
        first, second = x * 2, x + 1
        y = first + second
        del first, second  # their memory is free when the next node allocates its result and its table
        return y.cumprod(0)

    graph, y = record(driver, run)
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close(y.cpu(), (values(3, 3) * 3 + 1).cumprod(0))
    graph.release()


@pytest.mark.parametrize(
    ("dtype", "first", "second"),
    [
        (torch.float32, 1.5, -2.25),
        (torch.float64, 1.5, 0.1),
        (torch.bfloat16, 1.5, 3.0),
        (torch.int64, 3, -4),
        (torch.int8, 3, -4),
        (torch.complex64, 1 + 2j, 3 - 1j),
    ],
)
def test_scalar_bytes(driver: EmulatedDriver, dtype: torch.dtype, first: Any, second: Any):
    encoded = [bytes(torch.full((1,), value, dtype=dtype).view(torch.uint8).tolist()) for value in (first, second)]
    graph, y = record(driver, lambda: torch.full((), first, dtype=dtype, device="emu"))
    (node,) = graph.nodes
    assert node.name == "aten::fill_.Scalar"
    at = [i for i in range(0, len(node.params), 8) if node.params[i:].startswith(encoded[0])]
    assert at
    graph.replay()
    assert y.item() == first
    for offset in at:
        ctypes.memmove(graph.params_address(0) + offset, encoded[1], len(encoded[1]))
    graph.replay()
    assert y.item() == first  # not committed
    graph.commit(0)
    graph.replay()
    assert y.item() == second
    graph.release()


def test_scalar_arguments_and_host_scalars_are_in_the_bytes(driver: EmulatedDriver):
    x = emu(4)
    graph, _ = record(driver, lambda: (x * 2.5, torch.add(x, x, alpha=3), x * torch.tensor(7.5)))
    for node, encoded in zip(graph.nodes, ("<d", "<q", "<f"), strict=True):
        value = {"<d": 2.5, "<q": 3, "<f": 7.5}[encoded]
        assert struct.pack(encoded, value) in node.params
        assert len(node.params) % 8 == 0
    graph.release()


@given(st.integers(0, 3), st.integers(1, 20), st.integers(0, 2))
def test_padding_differs_between_recordings(offset: int, size: int, seed: int):
    """Words that both recordings agree on, relative to the input, are operands; the rest is noise, and ignored."""
    driver = emulated.driver()
    inputs = [emu(offset + size, seed=seed), emu(offset + size, seed=seed + 1)]
    recordings = [record(driver, lambda x=x: (x[offset:] * 2).sin() + x[offset:]) for x in inputs]
    (first, y), (second, _) = recordings
    target = emu(offset + size, seed=9)
    for index, (a, b) in enumerate(zip(first.nodes, second.nodes, strict=True)):
        assert len(a.params) == len(b.params)
        for at in range(0, len(a.params) - 7, 8):
            words = [int.from_bytes(node.params[at : at + 8], "little") for node in (a, b)]
            moved = {word - x.data_ptr() for word, x in zip(words, inputs, strict=True)}
            if moved == {offset * 4}:
                address = first.params_address(index) + at
                ctypes.memmove(address, struct.pack("<Q", target.data_ptr() + offset * 4), 8)
                first.commit(index)
    inputs[0].fill_(float("nan"))
    first.replay()
    expected = values(offset + size, seed=9)[offset:]
    torch.testing.assert_close(y.cpu(), (expected * 2).sin() + expected)
    first.release()
    second.release()


def test_padding_holds_stale_addresses(driver: EmulatedDriver):
    x = emu(4)
    recordings = [record(driver, lambda: x + 1) for _ in range(8)]
    assert len({graph.nodes[0].params[-8:] for graph, _ in recordings}) > 1
    for graph, _ in recordings:
        graph.release()


def test_misaligned_and_illegal_addresses(driver: EmulatedDriver):
    x, other = emu(8), emu(9, seed=2)
    graph, _ = record(driver, lambda: x + 1)
    patch(graph, x.data_ptr(), other[1:].data_ptr())
    with pytest.raises(RuntimeError, match="misaligned address"):
        graph.replay()
    graph.release()
    graph, _ = record(driver, lambda: x + 1)
    patch(graph, x.data_ptr(), 1 << 20)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()
    graph.release()
    graph, _ = record(driver, lambda: x.zero_())
    assert graph.nodes[0].kind == "memset"
    graph.replay()
    assert x.eq(0).all().item()
    graph.release()


# ---- recordings that fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        lambda driver, x: x.sum().item(),
        lambda driver, x: x.cpu(),
        lambda driver, x: torch.ones(3).to("emu"),
        lambda driver, x: torch.tensor(1.0, device="emu"),
        lambda driver, x: x.nonzero(),
        lambda driver, x: x[x > 0],
        lambda driver, x: x[torch.tensor([0])],
        lambda driver, x: x.equal(x),
        lambda driver, x: driver.synchronize(),
    ],
)
def test_refusals(driver: EmulatedDriver, act: Callable[[EmulatedDriver, torch.Tensor], Any]):
    x, pool = emu(8), driver.new_pool()

    def body(mark: Callable[[int], None]) -> Any:
        temporary = x.add_(1) * 2
        return act(driver, temporary)

    live = driver.live_bytes()
    with pytest.raises(CaptureError, match="operation not permitted when stream is capturing") as caught:
        driver.record(body, pool)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert driver.live_bytes() == live
    assert pool.nbytes() == 0
    torch.testing.assert_close((x + 1).cpu(), values(8) + 1)
    graph, y = driver.record(lambda mark: x + 1, pool)
    graph.replay()
    torch.testing.assert_close(y.cpu(), values(8) + 1)
    graph.release()


@pytest.mark.parametrize(
    "act",
    [
        lambda x: torch.sin(x[:5], out=x[1:6]),
        lambda x: x[:1].expand(4).add_(1),
        lambda x: torch.cat([x[:4], x[4:]], out=x),
    ],
)
def test_operations_that_write_to_what_they_read_are_refused_in_recordings(
    driver: EmulatedDriver, act: Callable[[torch.Tensor], Any]
):
    """As by CUDA, where the host checks that without running anything."""
    x, pool = emu(8), driver.new_pool()
    with pytest.raises(RuntimeError, match="to a single memory location"):
        act(x)
    with pytest.raises(CaptureError, match="to a single memory location"):
        driver.record(lambda mark: act(x), pool)
    assert pool.nbytes() == 0


def test_a_refusal_that_the_body_swallows(driver: EmulatedDriver):
    def body(mark: Callable[[int], None]) -> None:
        with pytest.raises(RuntimeError, match="capturing"):
            emu(3)

    with pytest.raises(CaptureError):
        driver.record(body, driver.new_pool())


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_other_exceptions_propagate(driver: EmulatedDriver, kind: type[BaseException]):
    x, pool, error = emu(3), driver.new_pool(), kind()

    def body(mark: Callable[[int], None]) -> None:
        x.add_(1)
        raise error

    with pytest.raises(kind) as caught:
        driver.record(body, pool)
    assert caught.value is error
    assert pool.nbytes() == 0
    torch.testing.assert_close(x.cpu(), values(3))


def test_nested_recordings_and_replays_are_refused(driver: EmulatedDriver):
    x = emu(3)
    graph, _ = record(driver, lambda: x + 1)
    with pytest.raises(CaptureError, match="recording already"):
        record(driver, lambda: record(driver, lambda: x + 1))
    with pytest.raises(CaptureError, match="graph launch"):
        record(driver, graph.replay)
    graph.release()


def test_pools_of_other_devices_are_refused(driver: EmulatedDriver):
    with pytest.raises(ArgumentError, match="pool is a NoneType"):
        driver.record(lambda mark: None, None)  # type: ignore[arg-type]


# ---- lifetime --------------------------------------------------------------------------------------------------


def test_graphs_that_are_dropped_give_memory_back(driver: EmulatedDriver):
    x, pool = emu(3), driver.new_pool()
    graph, y = driver.record(lambda mark: x.cumprod(0), pool)
    del graph
    assert pool.nbytes() > 0
    del y
    gc.collect()
    assert pool.nbytes() == 0


def test_pools_reuse_what_pools_have_left(driver: EmulatedDriver):
    x = emu(3)

    def once() -> None:
        graph, _ = record(driver, lambda: x + 1)
        graph.release()

    once()
    segments = len(emulated_tensors.allocator._segments)
    for _ in range(5):
        once()
    assert len(emulated_tensors.allocator._segments) == segments


def test_memory_that_dies_while_recording_stays_poison(driver: EmulatedDriver):
    held = [emu(8)]
    address = held[0].data_ptr()

    def body(mark: Callable[[int], None]) -> torch.Tensor:
        y = held[0] + 1
        held.clear()
        return y

    graph, _ = driver.record(body, driver.new_pool())
    assert driver.tensor_at(address, (8,), (1,), torch.float32).isnan().all().item()
    graph.release()


def test_a_recorded_fill_of_a_dimension_of_one_with_any_stride(driver: EmulatedDriver) -> None:
    x = torch.ones(4, device=driver.device)[::2][:1]
    graph, _ = driver.record(lambda mark: (mark(0), x.zero_())[1], driver.new_pool())
    graph.replay()
    assert x.tolist() == [0.0]
    graph.release()


def test_padding_may_hold_the_address_of_memory_that_nothing_writes(
    driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another tensor that lay there before; such a word is no pointer to it, and the graph is not refused."""
    addresses, allocate = [0], emulated_tensors.allocator.allocate

    def noting(nbytes: int, *, own: bool = True) -> Any:
        found = allocate(nbytes, own=own)
        addresses[0] = found.ctypes.data if nbytes == 40 else addresses[0]
        return found

    monkeypatch.setattr(emulated_tensors.allocator, "allocate", noting)
    monkeypatch.setattr(parameters.stale_words, "word", lambda: addresses[0].to_bytes(8, "little"))
    a = emu(5)
    fast = pygraph.jit(lambda a: (torch.empty(5, dtype=torch.int64, device=a.device), a + 1), strict=True)
    for n in range(3):
        assert torch.equal(fast(a * n)[1], a * n + 1)
    assert fast.explain().to_dict()["bytes_copied_per_replay"] == 0
