"""Loops whose number of turns values on the device decide: Python runs the loop, and a turn is a graph."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pygraph
from tests.extent import examples
from tests.steps import assert_same


def doubled(x: Tensor, limit: Any) -> Any:
    turns = 0
    while x.sum() < limit:
        x = x * 2 + 1
        turns += 1
    return x, turns


def written(x: Tensor, limit: Any) -> Tensor:
    out = torch.zeros(12, 4, device=x.device)
    ended = torch.zeros(4, dtype=torch.bool, device=x.device)
    for position in range(12):
        x = torch.where(ended, x, x * 1.5 + position)
        out[position] = x
        ended = ended | (x > limit)
        if ended.all():
            break
    else:
        return out - 1
    return out


def nested(x: Tensor, limit: Any) -> Any:
    found: list[Tensor] = []
    for outer in range(4):
        y = x * (outer + 1)
        while y.max() < limit:
            y = y.exp().clamp(max=1e6) + x
            if y.min() < 0:
                continue
            best = y.mean()
        found.append(y)
        x = x + y.mean()
    return found, best  # pyright: ignore[reportPossiblyUnboundVariable]


def with_a_method(x: Tensor, limit: Any) -> Any:
    return Solver(3.0).to(x.device).solve(x, limit)


class Solver(nn.Module):
    """A loop in a method, which updates a buffer."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(4))

    def solve(self, x: Tensor, limit: Any) -> Tensor:
        with torch.no_grad():
            while True:
                x = x + self.rate * x.abs() + 0.5
                self.seen.add_(x)
                if x.sum() > limit:
                    return x + self.seen


def drawing(x: Tensor, limit: Any) -> Tensor:
    while x.sum() < limit:
        noise = torch.rand_like(x)
        x = x * 1.7 + noise
    return x


def first_in_a_turn(x: Tensor, limit: Any) -> Any:
    for number in range(20):
        if x.sum() > limit:
            return x, number
        if number % 2:
            last = x.sin()  # without a value in the first turn
        x = x + last if number % 2 else x * 1.5 + 1  # pyright: ignore[reportPossiblyUnboundVariable]
    return x


def raising(x: Tensor, limit: Any) -> Tensor:
    for number in range(20):
        x = x * 2 + 1
        if x.sum() > limit:
            raise ValueError(f"after {number}")
    return x


def converging(x: Tensor, limit: Any) -> Any:
    error, history = 1e9, []
    while error > 1 / limit:
        new = (x + 2 / x) / 2
        error = (new - x).abs().max().item()
        history.append(error)
        x = new
    return x, len(history)


LOOPS = [doubled, written, nested, with_a_method, drawing, first_in_a_turn, raising, converging]


def outcome(fn: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(5)
    try:
        result = fn(*args)
    except ValueError as error:
        result = [*map(ord, str(error))]
    return result, torch.rand(2, device=args[0].device)


@pytest.mark.parametrize("fn", LOOPS, ids=lambda fn: fn.__name__)
def test_any_number_of_turns(fn: Callable[..., Any], device: torch.device) -> None:
    fast = pygraph.jit(fn)
    limits = [40, 90, 3000, 7, 400, 100000, 40, 7000, 90, 650, 9000]
    for number, limit in enumerate(limits):
        x = torch.full((4,), 1.0 + number / 8, device=device)
        bound = torch.tensor(float(limit), device=device) if fn is not converging else limit
        assert_same(outcome(fast, x, bound), outcome(fn, x, bound), device)
    before = fast.cache_info().captures
    for limit in (55, 100, 12345, 777):
        x, bound = torch.ones(4, device=device), torch.tensor(float(limit), device=device)
        assert_same(outcome(fast, x, bound if fn is not converging else limit), outcome(fn, x, bound), device)
    if fn in (doubled, written, drawing):
        assert fast.cache_info().captures == before
        report = fast.explain().to_dict()
        assert "how often it repeats something" in report["in_python"][0]
        assert report["kernels_in_graphs"] > 0


class Refining(nn.Module):
    """A module that repeats itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, limit: Tensor) -> tuple[Tensor, int]:
        turns = 0
        while x.sum() < limit:
            x = self.layer(x).relu() + x + 0.5
            turns += 1
        return x, turns


def test_a_module(device: torch.device) -> None:
    """Its hooks run wherever it has some."""
    torch.manual_seed(0)
    model = Refining().to(device).requires_grad_(False)
    fast, called = pygraph.jit(model), list[int]()
    handle = None
    for number, limit in enumerate([4.0, 20.0, 50.0, 9.0, 33.0, 70.0, 15.0, 28.0, 41.0, 66.0]):
        if number == 6:
            assert "how often it repeats something" in fast.explain().to_dict()["in_python"][0]
            handle = model.register_forward_hook(lambda *_: called.append(1))
        if number == 8 and handle is not None:
            handle.remove()
        x, bound = torch.ones(4, device=device), torch.tensor(limit, device=device)
        called.clear()
        found = fast(x, bound)
        assert len(called) == (number in (6, 7))
        assert_same(found, model(x, bound), device)


def test_gradients(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)

    def fn(x: Tensor, limit: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        while total < limit:
            x = layer(x).tanh() + 0.5
            total = total + x.abs().sum()
        return total

    fast = pygraph.jit(fn)
    for number in (3.0, 9.0, 20.0, 5.0, 14.0, 33.0, 6.0):
        x, limit = torch.ones(4, device=device), torch.tensor(number, device=device)
        found = []
        for run in (fast, fn):
            value = run(x, limit)
            found.append((value.detach(), torch.autograd.grad(value, [*layer.parameters()])))
        assert_same(found[0], found[1], device)


def test_a_training_step_with_a_line_search(device: torch.device) -> None:
    def make() -> tuple[nn.Module, Callable[[Tensor], tuple[Tensor, int]]]:
        torch.manual_seed(0)
        net = nn.Linear(4, 1).to(device)

        def step(x: Tensor) -> tuple[Tensor, int]:
            loss = net(x).square().mean()
            gradients = torch.autograd.grad(loss, [*net.parameters()])
            rate, tries = 1.0, 0
            with torch.no_grad():
                while True:
                    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                        parameter.sub_(rate * gradient)
                    if net(x).square().mean() <= loss:
                        return loss.detach(), tries
                    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                        parameter.add_(rate * gradient)
                    rate, tries = rate / 2, tries + 1

        return net, step

    (mine, fast), (theirs, slow) = make(), make()
    fast = pygraph.jit(fast)
    for number in range(10):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number)).to(device) * (1 + number % 4)
        assert_same(fast(x), slow(x), device)
        assert_same([*mine.parameters()], [*theirs.parameters()], device)


def test_methods_of_tensors_are_not_functions_of_the_host(device: torch.device) -> None:
    def make() -> tuple[nn.Module, Callable[[list[tuple[Tensor, Tensor]]], float]]:
        torch.manual_seed(0)
        net = nn.Linear(4, 1).to(device)
        optimizer = torch.optim.Adam(net.parameters())

        def epoch(batches: list[tuple[Tensor, Tensor]]) -> float:
            total = 0.0
            for number, (x, target) in enumerate(batches):
                loss = (net(x) - target.float().log1p()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
                if number % 2:
                    print("loss", total)
            return total

        return net, epoch

    (mine, fast), (theirs, slow) = make(), make()
    fast = pygraph.jit(fast)
    for number in range(6):
        x = torch.rand(2, 6, 4, generator=torch.Generator().manual_seed(number)).to(device)
        batches = [(one, one.sum(1, keepdim=True)) for one in x]
        assert_same(fast(batches), slow(batches), device)
        assert_same([*mine.parameters()], [*theirs.parameters()], device)
    assert "it sets" not in str(fast.explain())  # of a step whose loss Python would compute


class Meter:
    """A mean that other people's training loops keep."""

    def __init__(self) -> None:
        self.value = self.mean = self.total = 0.0
        self.count = 0

    def update(self, value: float, count: int = 1) -> None:
        self.value = value
        self.total += value * count
        self.count += count
        self.mean = self.total / self.count


def epochs_of(device: torch.device, run: Callable[..., Any], keep: Callable[..., Any]) -> list[Any]:
    """Train for some epochs, of which each keeps numbers between the loss and its backward."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def epoch(batches: list[tuple[Tensor, Tensor]]) -> Any:
        losses, right = Meter(), Meter()
        kept: list[Any] = []
        for number, (x, target) in enumerate(batches):
            output = net(x)
            loss = nn.functional.cross_entropy(output, target)
            correct = output.argmax(1).eq(target).float().mean()
            losses.update(loss.item(), x.size(0))
            right.update(correct.item(), x.size(0))
            kept.append(keep(output))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % 2:
                print("loss", losses.mean)
        return losses.mean, right.mean, losses.count, kept

    call, found = run(epoch), list[Any]()
    for number in range(7):
        generator = torch.Generator().manual_seed(number)
        xs = torch.randn(4, 6, 4, generator=generator).to(device)
        targets = torch.randint(0, 3, (4, 6), generator=generator).to(device)
        found.append((call(list(zip(xs, targets, strict=True))), [one.detach().clone() for one in net.parameters()]))
    return [found, call]


@pytest.mark.parametrize(
    ("keep", "is_whole"),
    [(lambda y: y.max().item(), True), (lambda y: y.argmax(1).tolist(), False), (lambda y: int(y.argmax()), False)],
)
def test_numbers_that_are_kept_between_a_loss_and_its_backward(
    device: torch.device, keep: Callable[..., Any], is_whole: bool
) -> None:
    """Also where each epoch makes the objects that keep them."""
    found, fast = epochs_of(device, pygraph.jit, keep)
    assert_same(found, epochs_of(device, lambda fn: fn, keep)[0], device)
    assert not is_whole or "it sets" not in str(fast.explain())


def test_parts_of_data_and_loops_through_parameters(device: torch.device) -> None:
    """A turn is one graph: what nobody reads behind it is not returned, and loops through parameters are part of it."""

    def make(run: Callable[..., Any]) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        net, mean = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)

        def epoch(data: Tensor) -> float:
            total, last = 0.0, 0
            for number, start in enumerate(range(0, data.size(0) - 3, 3)):
                x, target = data[start : start + 3], data[start + 1 : start + 4]
                net.zero_grad()
                loss = nn.functional.mse_loss(net(x), target)
                loss.backward()
                for parameter in net.parameters():
                    parameter.data.add_(parameter.grad, alpha=-0.05)  # pyright: ignore[reportArgumentType]
                with torch.no_grad():
                    for one, other in zip(mean.parameters(), net.parameters(), strict=True):
                        one.mul_(0.9).add_(other, alpha=0.1)
                last = start
                total += loss.item()
                if number % 3 == 2:
                    print("loss", total)
            return total + last

        call, found = run(epoch), list[Any]()
        for number in range(6):
            data = torch.randn(40, 4, generator=torch.Generator().manual_seed(number)).to(device)
            found.append((call(data), [one.detach().clone() for one in (*net.parameters(), *mean.parameters())]))
        return call, found

    (fast, mine), (_, expected) = make(pygraph.jit), make(lambda fn: fn)
    assert_same(mine, expected, device)
    reasons = [one["reason"] for one in fast.explain().to_dict()["fallbacks"]]
    assert not any("shares memory" in one or "it sets" in one or "seldom" in one for one in reasons)
    assert fast.cache_info().captures <= 2


def test_variables_that_are_read_behind_a_turn(device: torch.device) -> None:
    def fn(data: Tensor) -> Any:
        parameter, found = None, []
        for start in range(4):
            if start:
                found.append(x * 2)  # noqa: F821  # of the turn before
            x, y = data[start : start + 2], data[start + 1]
            x = x * y.sum()
            z = x + 1
            for parameter in layer.parameters():
                z = z + parameter.sum()
            if start % 2:
                print("turn", start)
        return found, z, parameter

    layer = nn.Linear(3, 3).to(device).requires_grad_(False)
    fast = pygraph.jit(fn)
    for number in range(5):
        data = torch.randn(6, 3, generator=torch.Generator().manual_seed(number)).to(device)
        assert_same(fast(data), fn(data), device)


STATEMENTS = [
    "x = x * 1.25 + 0.5", "y = x.sin() + y", "y.add_(x)", "x = x + y.mean()", "n += 1", "out[n % 8] = x",
    "z = x.exp().clamp(max=9)", "kept.append(x.sum())", "x = torch.where(x > y, x, y)", "x, y = y + 1, x",
    "if n % 2: x = x + 1", "if x.mean() > 3: y = y * 0.5", "with torch.no_grad(): x = x + 0.25",
    "n = n + int(x.sum() > 5)", "for k in range(2): x = x + k", "x = x + torch.rand_like(x)",
]  # fmt: skip
ENDS = ["if x.sum() > limit: break", "if not (x.sum() < limit): return x, y, n", "if n > 9 or x.max() > limit: break"]


@given(data=st.data())
@settings(max_examples=examples(4, 100), deadline=None)
def test_any_loop(device: torch.device, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    turn = data.draw(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=6))
    end = data.draw(st.sampled_from(ENDS))
    turn.insert(data.draw(st.integers(0, len(turn))), end)
    head = data.draw(st.sampled_from(["while True:", "for step in range(14):"]))
    turn += ["x = x.abs() + 0.75", "n += 1", "if n > 40: break"]
    body = textwrap.indent("\n".join(turn), " " * 8)
    source = (
        "import torch\n\ndef fn(x, limit):\n    y, n, kept = x * 0.5, 0, []\n"
        f"    out = torch.zeros(8, 4, device=x.device)\n    {head}\n{body}\n    return x, y, n, out, kept\n"
    )
    path: Path = tmp_path_factory.mktemp("loops") / "loop.py"
    path.write_text(source)
    scope: dict[str, Any] = {"__name__": "loop"}
    exec(compile(source, str(path), "exec"), scope)
    fn = scope["fn"]
    fast = pygraph.jit(fn)
    for limit in data.draw(st.lists(st.sampled_from([2.0, 9.0, 20.0, 45.0, 90.0]), min_size=6, max_size=9)):
        x = torch.arange(4.0, device=device) / 3
        assert_same(
            outcome(fast, x, torch.tensor(limit, device=device)),
            outcome(fn, x, torch.tensor(limit, device=device)),
            device,
        )


@pytest.mark.parametrize("logs", ["appended", "printed"])
def test_a_scaler_decides_inside_of_a_turn(device: torch.device, logs: str) -> None:
    """Its `step` looks for infinities; what it keeps for its optimizer is there from `unscale_` to `update` alone."""

    def train(run: Callable[..., Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        scaler = torch.amp.GradScaler(device.type)  # pyright: ignore[reportPrivateImportUsage]
        kept: list[dict[str, float]] = []

        def epoch(batches: list[tuple[Tensor, Tensor]], number: int) -> float:
            total = 0.0
            for count, (x, target) in enumerate(batches, start=number * len(batches)):
                with torch.autocast(device.type):
                    loss = nn.functional.mse_loss(net(x).float(), target)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                total += loss.item()
                if logs == "appended":
                    kept.append({"loss": loss.item(), "step": count})
                else:
                    print("loss", loss.item())
            return total

        call, found = run(epoch), list[Any]()
        for number in range(7):
            generator = torch.Generator().manual_seed(number)
            xs = torch.randn(2, 6, 4, generator=generator).to(device)
            if number == 5:
                xs[1] = torch.inf
            batches = [(x, x[:, :3]) for x in xs]
            found.append(
                (call(batches, number), [one.detach().clone() for one in net.parameters()], scaler.get_scale())
            )
        return [*found, kept], call

    mine, fast = train(pygraph.jit)
    assert_same(mine, train(lambda fn: fn)[0], device)
    entries = fast.explain().to_dict()["entries"]
    assert max(entry["kernels_in_graphs"] for entry in entries) > 40  # forward, backward and Adam
    assert "_per_optimizer_states" not in str(fast.explain())
