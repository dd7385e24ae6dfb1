"""What torch offers around tensors, on the emulated device as on CUDA: files, generators, pinned memory and more."""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import operator
import pickle
import signal
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import pygraph

Function = Callable[..., Any]

WAYS: dict[str, Callable[[Function], Function]] = {
    "eager": lambda fn: fn,
    "jit": pygraph.jit,
    "compile": lambda fn: torch.compile(fn, backend=pygraph.backend),
}


@pytest.fixture(autouse=True)
def own_compilations() -> None:
    torch._dynamo.reset()


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(actual: Any, expected: Any) -> None:
    for one, other in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu())


# ---- operations ------------------------------------------------------------------------------------------------


def _laid_out(layout: str, device: torch.device | str) -> torch.Tensor:
    if layout == "channels last":
        return values(2, 6, 4, 5).to(device).contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return values(2, 4, 6, 5).to(device).transpose(1, 2)
    return values(2, 12, 4, 5).to(device)[:, ::2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["channels last", "transposed", "strided"])
def test_group_norm_of_what_is_not_contiguous(device: torch.device, layout: str, way: str) -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.group_norm(x, 3, weight, bias)
        return y, F.group_norm(x, 2)

    def gradients(fn: Function, place: torch.device | str) -> Any:
        x = _laid_out(layout, place).detach().requires_grad_()
        weight, bias = (values(6, seed=seed).to(place).requires_grad_() for seed in (2, 3))
        y, z = fn(x, weight, bias)
        (y.pow(3).sum() + z.sin().sum()).backward()
        if place != "cpu":
            assert y.is_contiguous()
            assert z.is_contiguous()
        return y, z, x.grad, weight.grad, bias.grad

    wrapped = WAYS[way](run)
    for _ in range(2):
        same(gradients(wrapped, device), gradients(run, "cpu"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("way", WAYS)
def test_transformer_encoder_takes_its_fast_path(device: torch.device, way: str) -> None:
    def encoder() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2).eval()

    reference, model = encoder(), encoder().to(device)
    wrapped = WAYS[way](model)
    # Below torch.compile PyTorch makes no nested tensors: there padding has other values, on every device.
    expected_of = torch.compile(reference, backend="eager") if way == "compile" else reference
    x = values(3, 5, 8)
    padding = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    for _ in range(2):
        with torch.no_grad():
            expected = expected_of(x, src_key_padding_mask=padding)
            # Nested tensors leave zeros where there is padding.
            assert expected[0, 3:].any() == (way == "compile"), torch._dynamo.utils.counters
            same(wrapped(x.to(device), src_key_padding_mask=padding.to(device)), expected)
            same(wrapped(x.to(device)), reference(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors(device: torch.device) -> None:
    rows = [values(2, 3), values(4, 3, seed=2)]
    nested = torch.nested.nested_tensor([row.to(device) for row in rows])
    assert nested.device == device
    same(nested.to_padded_tensor(0.0), torch.nested.nested_tensor(rows).to_padded_tensor(0.0))
    same((nested * 2).relu().unbind(), (torch.nested.nested_tensor(rows) * 2).relu().unbind())
    same(nested.cpu().unbind(), rows)
    same(torch.nested.nested_tensor(rows).to(device).unbind(), rows)
    nested.unbind()[0].zero_()
    assert not nested.to_padded_tensor(0.0)[0].any()


def test_there_is_no_other_device(device: torch.device) -> None:
    nowhere = f"{device.type}:63"
    for make in (lambda: torch.empty(3, device=nowhere), lambda: torch.zeros(3).to(nowhere)):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            make()


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("where", ["as saved", "cpu", "device", "torch.device", "function"])
def test_load(device: torch.device, where: str, weights_only: bool) -> None:
    saved = {"whole": (x := values(3, 4).to(device)), "view": x[1:], "parameter": nn.Parameter(x.half())}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    places: dict[str, Any] = {
        "cpu": "cpu",
        "device": device.type,
        "torch.device": device,
        "function": lambda storage, location: storage,
    }
    found = torch.load(file, map_location=places.get(where), weights_only=weights_only)
    on_device = where in ("as saved", "device", "torch.device")
    assert {tensor.device.type for tensor in found.values()} == {device.type if on_device else "cpu"}
    same(found, saved)
    found["whole"][1] = 7
    assert (found["view"][0] == 7).all()


def test_cpu_tensors_are_loaded_onto_the_device(device: torch.device) -> None:
    file = io.BytesIO()
    torch.save(values(3, 4), file)
    file.seek(0)
    loaded = torch.load(file, map_location=device)
    assert loaded.device == device
    same(loaded, values(3, 4))


def test_modules_and_optimizers_are_restored(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(values(5, 3).to(device)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    other.load_state_dict(state["model"])
    same(list(other.state_dict().values()), list(model.state_dict().values()))
    restored = torch.optim.Adam(other.parameters())
    restored.load_state_dict(state["optimizer"])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        two.grad = None if one.grad is None else one.grad.clone()
    optimizer.step()
    restored.step()
    same(list(other.parameters()), list(model.parameters()))


@pytest.mark.parametrize(
    "copied", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_copies_of_objects(device: torch.device, copied: Callable[[Any], Any]) -> None:
    module = nn.Linear(3, 4).to(device)
    x = values(3, 4).to(device).requires_grad_()
    other_module, other = copied(module), copied(x)
    assert other.requires_grad
    assert other.device == device
    assert other_module.weight.device == device
    same([other, *other_module.parameters()], [x, *module.parameters()])
    with torch.no_grad():
        other.zero_()
    assert x.any()


def test_storages(device: torch.device) -> None:
    empty = torch.UntypedStorage(16, device=device)
    assert empty.device == device
    assert empty.nbytes() == 16
    assert torch.UntypedStorage([1, 2, 3], device=device).tolist() == [1, 2, 3]
    assert torch.UntypedStorage(3).device.type == "cpu"
    over = torch.empty(0, device=device).set_(torch.UntypedStorage(16, device=device))
    same(over.fill_(2.0), torch.full((4,), 2.0))


# ---- generators ------------------------------------------------------------------------------------------------


def test_generators(device: torch.device) -> None:
    before = torch.get_rng_state()
    generator = torch.Generator(device=device).manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert generator.device == device
    assert generator.initial_seed() == 3
    first = torch.randn(4, generator=generator, device=device)
    state = generator.get_state()
    draws = [
        torch.rand(4, generator=generator, device=device),
        torch.randint(9, (4,), generator=generator, device=device),
        torch.randperm(5, generator=generator, device=device),
        torch.empty(4, device=device).normal_(generator=generator),
        torch.bernoulli(torch.full((9,), 0.5, device=device), generator=generator),
        torch.multinomial(torch.ones(4, device=device), 2, generator=generator),
    ]
    generator.set_state(state)
    same(torch.rand(4, generator=generator, device=device), draws[0])
    other = generator.clone_state()
    same(
        torch.rand(4, generator=other, device=device),
        torch.rand(4, generator=generator, device=device),
    )
    generator.manual_seed(3)
    same(torch.randn(4, generator=generator, device=device), first)
    assert torch.equal(torch.get_rng_state(), before)  # a generator of its own
    assert generator.seed() == generator.initial_seed()


def test_generators_of_another_device_are_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, generator=torch.Generator(), device=device)
    assert torch.Generator().device.type == "cpu"
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    generator = torch.Generator().manual_seed(4)
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(4)))


def test_draws_of_a_generator_go_on(device: torch.device) -> None:
    generator = torch.Generator(device=device).manual_seed(3)
    fn = pygraph.jit(lambda x: x + torch.rand(4, generator=generator, device=device))
    x = values(4).to(device)
    found = [fn(x) for _ in range(3)]
    generator.manual_seed(3)
    same(found, [x + torch.rand(4, generator=generator, device=device) for _ in range(3)])


# ---- pinned memory ---------------------------------------------------------------------------------------------


def test_pinned_memory(device: torch.device) -> None:
    x = values(4, 6)
    pinned = x.t()[1:].pin_memory()
    assert pinned.is_pinned()
    assert pinned.device.type == "cpu"
    assert not x.is_pinned()
    assert pinned[1:].is_pinned()
    assert pinned.pin_memory() is pinned
    same(pinned, x.t()[1:])
    moved = pinned.to(device, non_blocking=True)
    same(moved, x.t()[1:])
    pinned.copy_(moved * 2, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    same(pinned, x.t()[1:] * 2)
    kinds = [torch.zeros(0), torch.tensor(True), torch.tensor([1j])]
    same([tensor.pin_memory() for tensor in kinds], kinds)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_pins(device: torch.device, workers: int) -> None:
    data = torch.utils.data.TensorDataset(values(6, 2), torch.arange(6))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers)
    batches = list(loader)
    assert all(tensor.is_pinned() for batch in batches for tensor in batch)
    same(torch.cat([x.to(device, non_blocking=True) for x, _ in batches]), values(6, 2))


# ---- errors and recomputation ----------------------------------------------------------------------------------


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise ValueError("what the user raised") from error


def _hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        raise ValueError("what the user raised") from KeyError("cause")

    y.register_hook(hook)
    return y


@pytest.mark.parametrize("fails", [_Refusing.apply, _hooked], ids=["function", "hook"])
def test_a_backward_raises_what_was_raised_in_it(device: torch.device, fails: Function) -> None:
    x = values(3).to(device).requires_grad_()
    for _ in range(2):
        with pytest.raises(ValueError, match="what the user raised") as caught:
            fails(x.sin()).sum().backward()
        assert isinstance(caught.value.__cause__, KeyError)
    (x.sin().sum()).backward()
    same(x.grad, values(3).cos())


def test_a_backward_inside_a_backward_raises_what_was_raised_in_it(device: torch.device) -> None:
    x = values(3).to(device).requires_grad_()
    y = checkpoint(lambda x: _Refusing.apply(x.sin()), x, use_reentrant=True)
    with pytest.raises(ValueError, match="what the user raised"):
        y.sum().backward()


def test_no_signal_handler_runs_where_it_would_end_the_process() -> None:
    """The guard is asked in C++ functions that must not throw: a timeout there ended the worker of a test run."""
    from pygraph.runtime.emulated import errors as emulated_errors

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise Interrupted(frame and frame.f_code.co_name)

    def send_and_ask() -> list[Any]:
        return list(map(operator.call, (send, ask)))  # in C: no handler runs in between

    send = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGUSR1)
    ask = emulated_errors.Guard().type_
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted, match="send_and_ask"):
            send_and_ask()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_draw_the_same_numbers_again(device: torch.device, use_reentrant: bool, way: str) -> None:
    weight = values(8, 8).to(device)

    def step(x: torch.Tensor, recomputed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        def block(t: torch.Tensor) -> torch.Tensor:
            return F.dropout((t @ weight).sin(), 0.5) * t

        x = x.detach().clone().requires_grad_()
        y = checkpoint(block, x, use_reentrant=use_reentrant) if recomputed else block(x)
        y.sum().backward()
        return y.detach(), x.grad

    wrapped = WAYS[way](lambda x: step(x, True))
    for seed in range(3):
        x = values(8, 8, seed=seed).to(device)
        torch.manual_seed(seed)
        expected = step(x, False)
        torch.manual_seed(seed)
        same(wrapped(x), expected)
    if way == "jit":
        assert "SystemError" not in str(wrapped.explain())  # pyright: ignore


def test_recomputation_without_random_numbers_kept(device: torch.device) -> None:
    x = values(8, 8).to(device).requires_grad_()
    y = checkpoint(lambda t: t.sin() * t, x, use_reentrant=False, preserve_rng_state=False)
    y.sum().backward()
    same(x.grad, (values(8, 8).cos() * values(8, 8) + values(8, 8).sin()))


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_modules(device: torch.device, kind: type[nn.RNNBase], way: str) -> None:
    def make() -> nn.RNNBase:
        torch.manual_seed(0)
        return kind(4, 5, num_layers=2, batch_first=True, bidirectional=True)

    def run(module: nn.Module, called: Function, x: torch.Tensor) -> Any:
        module.zero_grad()
        x = x.clone().requires_grad_()
        y = called(x)
        y[0].sin().sum().backward()
        return y, x.grad, [parameter.grad for parameter in module.parameters()]

    # cuDNN adds in another order than the CPU.
    place = torch.device("cpu") if device.type == "emu" else device
    reference, module = make().to(place), make().to(device)
    wrapped = WAYS[way](module)
    for seed in range(2):
        x = values(2, 3, 4, seed=seed)
        same(run(module, wrapped, x.to(device)), run(reference, reference, x.to(place)))


def test_dynamo_leaves_the_emulated_device_alone() -> None:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    from pygraph.runtime.emulated import dispatch, special_operations
    from pygraph.runtime.emulated import driver as emulated

    emulated.driver()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cpu() + torch.zeros(3, device="emu").add(1).cpu()

    fn = torch.compile(run, backend="eager")
    for size in (3, 1, 3):
        fn(torch.ones(size).to("emu"))
    compiled = [dispatch.fallback, dispatch._launch, special_operations._empty, special_operations._copy_from]
    assert not any(_debug_get_cache_entry_list(function.__code__) for function in compiled)
