"""Results of ``torch.compile(backend="pygraph")`` that are parameters, views of inputs, or on meta, on both devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.interop import dynamo

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo's and Inductor's, which differ between versions

META = torch.device("meta")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    dynamo._LIVE.clear()  # what other tests have compiled may be alive still
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Of two parameters and a buffer, what ``body`` makes of it."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 3))
        self.whole = nn.Parameter(torch.randn(6))
        self.register_buffer("b", torch.randn(3))
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def facts(value: Any, model: Model, args: tuple[Any, ...]) -> Any:
    """What can be told of a result without its elements; whose memory it is, by name."""
    if not isinstance(value, torch.Tensor):
        return value
    known = {"w": model.w, "whole": model.whole, "b": model.b, **{f"args[{i}]": arg for i, arg in enumerate(args)}}
    tensors = {name: one for name, one in known.items() if isinstance(one, torch.Tensor)}
    storage = value.untyped_storage()._cdata
    return (
        type(value), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device,
        value.requires_grad, value.is_leaf, type(value.grad_fn).__name__, value.is_conj(),
        [name for name, one in tensors.items() if one is value],
        [name for name, one in tensors.items() if one is value._base],
        [name for name, one in tensors.items() if one.untyped_storage()._cdata == storage],
    )  # fmt: skip


def elements(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) and not value.is_meta else None


def run(
    model: Model, fn: Any, args: tuple[Any, ...], update: Callable[..., None] | None, grad: bool, differentiate: bool
) -> Any:
    """A call, an update of what it returned, a backward: all that can be seen of it."""
    model.zero_grad()
    with torch.set_grad_enabled(grad):
        results = fn(*args)
    seen: list[Any] = [[(facts(one, model, args), elements(one)) for one in results]]
    if grad and differentiate:
        loss = sum((one * one).sum() for one in results if isinstance(one, torch.Tensor) and one.requires_grad)
        if isinstance(loss, torch.Tensor) and not loss.is_meta:
            loss.backward()
    seen.append([elements(one.grad) for one in (model.w, model.whole)])
    seen.append([elements(one.grad) for one in args if isinstance(one, torch.Tensor) and one.is_leaf])
    if update is not None:
        with torch.no_grad():
            update(*results)
    seen.append([elements(one) for one in (model.w, model.whole, model.b, *args)])
    return seen


def check(
    device: torch.device,
    body: Callable[..., Any],
    make: Callable[[int], tuple[Any, ...]],
    *,
    grad: bool,
    update: Callable[..., None] | None = None,
    differentiate: bool = True,
    graphs: int | None = None,
    **options: Any,
) -> None:
    """Compare calls with ``backend="eager"``; nothing falls back, and there are as many graphs."""
    seen: dict[Any, Any] = {}
    for backend in ("eager", pygraph.backend):
        torch._dynamo.reset()
        model = Model(body).to(device)
        fast = torch.compile(model, backend=backend, **options)
        seen[backend] = []
        for i in range(5):
            torch.manual_seed(i)
            seen[backend].append(run(model, fast, make(i), update, grad, differentiate))
    for ours, theirs in zip(seen[pygraph.backend], seen["eager"], strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:])
        for (mine, values), (other, expected) in zip(ours[0], theirs[0], strict=True):
            if isinstance(mine, tuple) and options.get("dynamic"):  # AOTAutograd has as_strided where sizes are symbols
                mine, other = (one[:8] + one[9:] for one in (mine, other))
            elif isinstance(mine, tuple) and mine[8] == "CompiledFunctionBackward":  # whatever eager's last operation is
                assert other[8] != "NoneType"
                mine, other = (one[:8] + one[9:] for one in (mine, other))
            assert mine == other
            torch.testing.assert_close(values, expected)
    report = pygraph.explain()
    assert not report.to_dict()["fallbacks"]
    replayed = sum(call.counts["nodes"] > 0 for call in report.calls)
    assert replayed == graphs if graphs is not None else replayed > 0


MODES = pytest.mark.parametrize("grad", [True, False])


def one(i: int, device: torch.device) -> tuple[torch.Tensor]:
    return (torch.randn(5, 4).to(device),)


BODIES: dict[str, Callable[..., Any]] = {
    "parameter": lambda m, x: (x @ m.w, m.w),
    "slice": lambda m, x: (x @ m.w, m.w[1:]),
    "transposed": lambda m, x: (x @ m.w, m.w.t()),
    "views of views": lambda m, x: (x @ m.w, m.w.t()[1:].unsqueeze(0), m.whole.view(2, 3)[:, ::2]),
    "split": lambda m, x: (x @ m.w, *m.whole.split(2)),
    "twice": lambda m, x: (x @ m.w, m.w[0], m.w[0]),
    "detached": lambda m, x: (x @ m.w, m.w.detach()[1:]),
    "the same": lambda m, x: (*[part := m.w[1:]] * 2, x @ m.w),
    "buffer": lambda m, x: (x @ m.w, m.b[1:]),
    "used": lambda m, x: (x[:, 1:] @ m.w[1:], m.w[1:]),
    "another dtype": lambda m, x: (x @ m.w, m.w.detach().view(torch.int32)),
    "complex": lambda m, x: (x @ m.w, torch.view_as_complex(m.whole.view(3, 2))),
}


@MODES
@pytest.mark.parametrize("name", BODIES)
def test_parameters_and_their_views(name: str, grad: bool, device: torch.device) -> None:
    complex_ = name == "complex"  # whose gradient of a square is no number

    def update(*results: torch.Tensor) -> None:
        for value in results:
            if value.dtype == torch.float32:
                value.add_(1)

    check(
        device, BODIES[name], lambda i: one(i, device), grad=grad, update=update, differentiate=not complex_,
        graphs=None if grad else 1,
    )  # fmt: skip


@MODES
def test_views_of_arguments_that_require_grad(grad: bool, device: torch.device) -> None:
    def make(i: int) -> tuple[Any, ...]:
        return (torch.randn(5, 4).to(device).requires_grad_(),)

    check(device, lambda m, x: (x @ m.w, x[1:]), make, grad=grad)


@MODES
def test_views_with_dynamic_sizes(grad: bool, device: torch.device) -> None:
    def make(i: int) -> tuple[Any, ...]:
        return (torch.randn(2 + i % 3, 4).to(device).requires_grad_(),)

    body = lambda m, x: (x @ m.w, m.w[: x.shape[0] - 1], x[1:].t())  # noqa: E731
    check(device, body, make, grad=grad, dynamic=True)


@MODES
def test_a_view_beside_an_update(grad: bool, device: torch.device) -> None:
    def body(m: Model, x: torch.Tensor) -> Any:
        m.b.add_(1)
        return x @ m.w + m.b, m.b[1:], m.w[1:]

    check(device, body, lambda i: one(i, device), grad=grad)


META_BODIES: dict[str, Callable[..., Any]] = {
    "made": lambda m, x: (x @ m.w, torch.empty(3, device=META) + 1),
    "strides": lambda m, x: (x @ m.w, torch.empty(3, 5, device=META, dtype=torch.float64).t()),
    "like an argument": lambda m, x: (x @ m.w, torch.empty_like(x, device=META) * 2),
    "moved": lambda m, x: (x @ m.w, x.to(META)),
    "moved result": lambda m, x: ((x @ m.w).detach(), ((x @ m.w).detach().t() * 2).to(META)),
    "random": lambda m, x: (x @ m.w, torch.rand(3, device=META)),
    "several": lambda m, x: (x @ m.w, *torch.empty(4, 3, device=META).topk(2)),
    "sharing memory": lambda m, x: ((y := torch.empty(4, device=META) + 1), y[1:], x @ m.w),
    "twice": lambda m, x: ((y := torch.empty(4, device=META) + 1), y, x @ m.w),
    "read by the device": lambda m, x: (x @ m.w, torch.zeros_like(torch.empty(3, device=META), device=x.device) + m.b),
    "a size": lambda m, x: (x @ m.w * torch.empty(3, 2, device=META).shape[1], torch.empty(x.shape[0], device=META)),
    "with a view": lambda m, x: (x @ m.w, m.w[1:], torch.empty(3, device=META) + 1),
}


@MODES
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", META_BODIES)
def test_meta_results(name: str, dynamic: bool, grad: bool, device: torch.device) -> None:
    def make(i: int) -> tuple[Any, ...]:
        return (torch.randn(2 + i % 3 if dynamic else 5, 4).to(device),)

    check(device, META_BODIES[name], make, grad=grad, dynamic=dynamic)


META_INPUTS: dict[str, Callable[..., Any]] = {
    "computed": lambda m, x, a: (x @ m.w, a * 2),
    "itself": lambda m, x, a: (x @ m.w, a),
    "a view": lambda m, x, a: (x @ m.w, a[1:], a.t()),
    "unused": lambda m, x, a: (x @ m.w,),
    "updated": lambda m, x, a: (x @ m.w, a.add_(1)),
    "only its size": lambda m, x, a: (x @ m.w * a.shape[0], a.sum()),
    "with a parameter": lambda m, x, a: (x @ m.w, a + m.w.to(META)),
    "moved": lambda m, x, a: (x @ m.w, a.to(torch.float64)),
}


@MODES
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", META_INPUTS)
def test_meta_arguments(name: str, dynamic: bool, grad: bool, device: torch.device) -> None:
    def make(i: int) -> tuple[Any, ...]:
        return torch.randn(2 + i % 3 if dynamic else 5, 4).to(device), torch.empty(3, 4, device=META).t()

    body = META_INPUTS[name]
    check(device, lambda m, x, a: body(m, x, a if "parameter" not in name else a[:4, :3]), make, grad=grad, dynamic=dynamic)


def test_an_update_of_a_meta_argument_is_counted(device: torch.device) -> None:
    def body(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return x * 2

    for backend in ("eager", pygraph.backend):
        fast = torch.compile(body, backend=backend)
        for _ in range(3):
            a = torch.empty(3, device=META)
            fast(torch.ones(2, device=device), a)
            assert a._version == 1


def test_meta_parameters(device: torch.device) -> None:
    x, off = torch.ones(2, 4).to(device), nn.Linear(4, 2, device=META)
    fast = torch.compile(lambda x: (x * 2, off(x.to(META))), backend=pygraph.backend)
    for _ in range(3):
        y, z = fast(x)
        torch.testing.assert_close(y, x * 2)
        assert z.is_meta and z.shape == (2, 2) and z.requires_grad
        z.sum().backward()
        assert off.weight.grad is not None and off.weight.grad.is_meta
    assert not pygraph.explain().to_dict()["fallbacks"]
