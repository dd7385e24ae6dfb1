"""The library's own operations, on both devices, fake, traced and functionalized."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.errors import ArgumentError, DeviceError
from pygraph.ir import ops

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:, :1].expand(4, 6),
    "0-d": lambda x: x[1, 2],
    "empty": lambda x: x[:0],
}


def base(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(24).to(dtype).view(4, 6).to(device)


def table_of(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_is_the_same_memory(device: torch.device, layout: str, dtype: torch.dtype) -> None:
    for where in (CPU, device):
        x = LAYOUTS[layout](base(dtype, where))
        y = ops.load(table_of(x), 0, x.shape, x.stride(), dtype, where)
        assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), dtype, x.device)
        assert torch.equal(x.cpu(), y.cpu())
        if x.numel():
            assert y.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_store_writes_the_span(device: torch.device, layout: str, dtype: torch.dtype) -> None:
    for where in (CPU, device):
        x = LAYOUTS[layout](base(dtype, where))
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        target = torch.zeros(span + 2, dtype=dtype, device=where)
        ops.store(table_of(x, target), 1, x)
        assert torch.equal(target.as_strided(x.shape, x.stride()).cpu(), x.cpu())
        assert target[span:].cpu().tolist() == [0, 0]


def test_load_sees_later_writes_and_store_reaches_the_owner() -> None:
    x = torch.zeros(3)
    view = ops.load(table_of(x), 0, (3,), (1,), torch.float32, CPU)
    x[1] = 5
    assert view.tolist() == [0, 5, 0]
    ops.store(table_of(x), 0, torch.ones(3))
    assert view.tolist() == [1, 1, 1]


def test_lazy_conjugates_are_written_out() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    out = torch.zeros_like(x)
    ops.store(table_of(out), 0, x.conj())
    assert torch.equal(out, x.conj().resolve_conj())


def test_an_empty_slot_is_refused() -> None:
    empty = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="address 0"):
        ops.load(empty, 1, (3,), (1,), torch.float32, CPU)
    with pytest.raises(ArgumentError, match="address 0"):
        ops.store(empty, 1, torch.ones(3))
    assert ops.load(empty, 1, (0, 3), (3, 1), torch.float32, CPU).shape == (0, 3)
    ops.store(empty, 1, torch.ones(0))


@pytest.mark.parametrize("table", [torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64)], ids=["dtype", "dims"])
def test_a_wrong_table_is_refused(table: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="1-d int64 CPU tensor"):
        ops.load(table, 0, (1,), (1,), torch.float32, CPU)


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="register_memory_view"):
        ops.load(torch.ones(1, dtype=torch.int64), 0, (1,), (1,), torch.float32, torch.device("xpu"))


def test_a_registered_view_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def view(*spec: Any) -> torch.Tensor:
        seen.append(spec)
        return torch.zeros(2)

    monkeypatch.setitem(ops._MEMORY_VIEWS, "xpu", view)
    ops.load(torch.tensor([64]), 0, (2,), (1,), torch.float32, torch.device("xpu"))
    assert seen == [(64, (2,), (1,), torch.float32)]


@pytest.mark.parametrize(
    ("value", "dtype", "want"),
    [
        (2.5, torch.float32, 2.5),
        (3, torch.bfloat16, 3.0),
        (True, torch.bool, True),
        (-1, torch.uint8, 255),
        (300, torch.uint8, 44),
        (2**40, torch.int32, 0),
        (2.7, torch.int64, 2),
        (1e60, torch.float32, math.inf),
        (-1e60, torch.float32, -math.inf),
        (1e6, torch.float16, math.inf),
        (1 + 2j, torch.complex64, 1 + 2j),
    ],
)
def test_scalar_converts_as_tensors_do(device: torch.device, value: Any, dtype: torch.dtype, want: Any) -> None:
    for where in (CPU, device):
        out = ops.scalar(value, dtype=dtype, device=where)
        assert (out.shape, out.dtype, out.device.type) == ((), dtype, where.type)
        assert out.item() == want


def test_fakes_have_the_layout_and_no_data(device: torch.device) -> None:
    with FakeTensorMode():
        for where in (CPU, device):
            table, value = torch.empty(1, dtype=torch.int64), torch.empty(2, 3, device=where)
            loaded = ops.load(table, 0, (2, 3), (1, 2), torch.bfloat16, where)
            assert (loaded.shape, loaded.stride(), loaded.dtype) == ((2, 3), (1, 2), torch.bfloat16)
            assert loaded.device.type == where.type
            ops.store(table, 0, value)
            assert ops.scalar(2.0, dtype=torch.float64, device=where).device.type == where.type


def test_operations_survive_tracing_functionalization_and_dead_code() -> None:
    x, out = torch.arange(3.0), torch.zeros(3)

    def body(table: torch.Tensor) -> torch.Tensor:
        value = ops.load(table, 0, (3,), (1,), torch.float32, CPU) * ops.scalar(2, dtype=torch.float32, device=CPU)
        ops.store(table, 1, value)
        return table

    module = make_fx(torch.func.functionalize(body))(table_of(x, out))
    module.graph.eliminate_dead_code()
    module.recompile()
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert names == ["pygraph.load.default", "pygraph.scalar.default", "aten.mul.Tensor", "pygraph.store.default"]
    out.zero_()
    module(table_of(x, out))
    assert out.tolist() == [0, 2, 4]


def test_only_store_is_an_effect() -> None:
    graph = fx.Graph()
    store, load = (graph.call_function(op.default) for op in (torch.ops.pygraph.store, torch.ops.pygraph.load))
    assert store.is_impure()
    assert not load.is_impure()
