"""Recurrent layers of cuDNN as graphs: LSTM, GRU and RNN, in inference and in training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of cuDNN's, that weights are put together

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": lambda **options: nn.LSTM(16, 32, **options),
    "GRU": lambda **options: nn.GRU(16, 32, **options),
    "tanh": lambda **options: nn.RNN(16, 32, **options),
    "relu": lambda **options: nn.RNN(16, 32, nonlinearity="relu", **options),
    "projected": lambda **options: nn.LSTM(16, 32, proj_size=8, **options),
}
SHAPES: list[dict[str, Any]] = [
    {}, {"num_layers": 2, "batch_first": True}, {"num_layers": 2, "bidirectional": True, "bias": False}
]  # fmt: skip
ROUGH = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def made(name: str, options: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name](**options).cuda().to(dtype)


@pytest.mark.parametrize("dtype", ROUGH, ids=str)
@pytest.mark.parametrize("options", SHAPES, ids=["plain", "batch first", "both ways"])
@pytest.mark.parametrize("name", LAYERS)
def test_inference(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    layer = made(name, options, dtype).eval()
    with torch.no_grad():
        fast = pygraph.jit(layer)
        state = None
        for _ in range(5):
            x = torch.randn(6, 4, 16, device="cuda", dtype=dtype)
            got, expected = fast(x, state), layer(x, state)
            torch.testing.assert_close(got, expected, rtol=ROUGH[dtype], atol=ROUGH[dtype])
            assert got[0].stride() == expected[0].stride()
            state = expected[1]
            next(layer.parameters()).mul_(1.01)  # where graphs read them
    assert fast.cache_info().captures > 0, str(fast.explain())
    assert fast.cache_info().hits >= 3


def steps(net: nn.Module, head: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> Any:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            found = net(x)
            state = found[1][0] if isinstance(found[1], tuple) else found[1]
            loss = (head(found[0]).float() - y).square().mean() + state.float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), found[0].detach()

    return step


@pytest.mark.parametrize("dtype", ROUGH, ids=str)
@pytest.mark.parametrize("options", SHAPES, ids=["plain", "batch first", "both ways"])
@pytest.mark.parametrize("name", LAYERS)
def test_training(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """With autocast for types of less precision."""
    check_training(name, options, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_inference_with_autocast(name: str, dtype: torch.dtype) -> None:
    """Torch gives cuDNN `float16` there, whatever autocast has."""
    layer = made(name, SHAPES[1], torch.float32).eval()

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cuda", dtype):
            return layer(x)[0]

    fast = pygraph.jit(forward)
    for _ in range(4):
        x = torch.randn(6, 4, 16, device="cuda")
        torch.testing.assert_close(fast(x), forward(x))
    assert fast.cache_info().captures > 0, str(fast.explain())


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_training_with_fused_kernels_around(name: str) -> None:
    torch._dynamo.reset()
    check_training(name, SHAPES[1], torch.bfloat16, fuse=True)


def check_training(name: str, options: dict[str, Any], dtype: torch.dtype, flat: bool = False, **jitted: Any) -> None:
    layer = made(name, options, torch.float32)
    width = (8 if name == "projected" else 32) * (1 + layer.bidirectional)  # pyright: ignore
    nets: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        net, head = copy.deepcopy(layer), nn.Linear(width, 3).cuda()
        if flat:
            net.flatten_parameters()  # pyright: ignore
        optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], 1e-3, eps=1e-2, capturable=True)
        nets.append((net, steps(net, head, optimizer, dtype)))
    (eager, slow), (other, step) = nets
    fast = pygraph.jit(step, **jitted)
    rough = ROUGH[dtype]
    for _ in range(6):
        x, y = torch.randn(6, 4, 16, device="cuda"), torch.randn(6, 4, 3, device="cuda")
        torch.testing.assert_close(fast(x, y), slow(x, y), rtol=rough, atol=rough)
    for got, expected in zip(other.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=rough, atol=rough)
        torch.testing.assert_close(got.grad, expected.grad, rtol=10 * rough, atol=10 * rough)
    assert fast.cache_info().captures > 0, str(fast.explain())
    assert fast.cache_info().hits >= 3


@pytest.mark.parametrize("train", [False, True])
def test_what_stays_as_it_is(train: bool) -> None:
    """Dropout between layers, packed sequences, and cuDNN switched off: as in eager."""
    torch.manual_seed(0)
    net = nn.LSTM(16, 32, 2, dropout=0.5).cuda().train(train)
    x = torch.randn(6, 4, 16, device="cuda")
    fast = pygraph.jit(net)
    for _ in range(3):
        torch.manual_seed(2)
        got = fast(x)
        torch.manual_seed(2)
        torch.testing.assert_close(got, net(x))
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 3, 1]))
    torch.testing.assert_close(fast(packed)[0].data.shape, net(packed)[0].data.shape)
    with torch.backends.cudnn.flags(enabled=False), torch.no_grad():
        plain = nn.GRU(16, 32).cuda()
        faster = pygraph.jit(plain)
        for _ in range(3):
            torch.testing.assert_close(faster(x), plain(x))


def assert_only_copied(fast: Any) -> None:
    """All of it is in graphs; some kernels of cuDNN's hold a pointer where it cannot be patched."""
    notes = fast.explain().to_dict()["fallbacks"]
    assert all(note["what"].endswith("is copied") for note in notes), str(fast.explain())


@pytest.mark.parametrize("dtype", ROUGH, ids=str)
@pytest.mark.parametrize("options", SHAPES, ids=["plain", "batch first", "both ways"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", ["jit", "graphed"])
def test_a_backward_from_outside(way: str, name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Forward and backward are graphs of their own; the reserve, of which cuDNN leaves parts unwritten, is saved."""
    net = made(name, options, dtype)
    other = copy.deepcopy(net)
    x = torch.randn(6, 4, 16, device="cuda", dtype=dtype)
    fast = pygraph.jit(other) if way == "jit" else pygraph.make_graphed_callables(other, (x,))
    rough = ROUGH[dtype]
    for _ in range(4):
        x = torch.randn(6, 4, 16, device="cuda", dtype=dtype)
        found: list[list[Tensor]] = []
        for module, call in ((net, net), (other, fast)):
            module.zero_grad()
            given = x.clone().requires_grad_()
            output, state = call(given)
            (output.float().square().sum() + state[0].float().sum()).backward()
            found.append([output.detach(), given.grad, *(one.grad.clone() for one in module.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=10 * rough, atol=10 * rough)
    if way == "jit":
        assert fast.cache_info().captures >= 2, str(fast.explain())
        assert_only_copied(fast)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_large_reserves(name: str) -> None:
    """Of sizes at which cuDNN's kernels leave gaps; two forwards wait for their backwards, and one runs twice."""
    torch.manual_seed(0)
    net = {"LSTM": nn.LSTM, "GRU": nn.GRU}[name](256, 256, 2, batch_first=True).cuda()
    other = copy.deepcopy(net)
    fast = pygraph.jit(other)
    for _ in range(4):
        x, y = torch.randn(2, 16, 32, 256, device="cuda").unbind()
        found: list[list[Tensor]] = []
        for module, call in ((net, net), (other, fast)):
            module.zero_grad()
            losses = [call(one)[0].square().mean() for one in (x, y)]
            losses[1].backward(retain_graph=True)
            losses[0].backward()
            losses[1].backward()
            found.append([one.grad.clone() for one in module.parameters()])
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
    assert fast.cache_info().captures >= 2, str(fast.explain())
    assert_only_copied(fast)


def test_weights_that_move() -> None:
    net = nn.LSTM(16, 32).cuda()
    fast = pygraph.jit(net)
    with torch.no_grad():
        for index in range(6):
            x = torch.randn(6, 4, 16, device="cuda")
            if index == 3:
                for parameter in net.parameters():
                    parameter.data = parameter.data.clone() * 1.5
            if index == 5:
                net.flatten_parameters()
            torch.testing.assert_close(fast(x), net(x))


@pytest.mark.parametrize("name", LAYERS)
def test_training_of_weights_behind_each_other(name: str) -> None:
    """As they are in a layer that was not copied, and as cuDNN wants them."""
    check_training(name, SHAPES[2], torch.float32, flat=True)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_numbers_of_dropout_are_as_in_eager(name: str) -> None:
    """They are in a state of cuDNN, which makes it anew after a seed; a generator is put back for graphs."""

    def losses(run: Callable[..., Any]) -> list[float]:
        net = made(name, {"num_layers": 2, "dropout": 0.5}, torch.float32)
        head = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Linear(32, 1)).cuda()
        optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], 0.01)
        step, found = run(steps(net, head, optimizer, torch.float32)), list[float]()
        for seed in range(8):
            x = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(seed)).cuda()
            found.append(step(x, x[..., :1])[0].item())
        return found

    expected = losses(lambda fn: fn)
    torch.testing.assert_close(losses(pygraph.jit), expected, rtol=1e-4, atol=1e-4)
