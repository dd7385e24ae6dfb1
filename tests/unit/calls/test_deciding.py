"""Functions that decide by values on the device: each way to go is a trace, and calls take the one that eager takes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pygraph
from pygraph.calls import initial_states, limits
from pygraph.calls.expected_paths import ExpectedPaths
from pygraph.errors import FallbackError, TraceError, UndecidedError
from pygraph.tracing import decisions
from tests.steps import assert_same, scaled_step_of

pytestmark = pytest.mark.rotates


def drawn(x: Tensor) -> Any:
    """What is drawn after a call."""
    return torch.rand(2, device=x.device), torch.rand(2)


def check(device: torch.device, fn: Callable[..., Any], values: Sequence[float], hits: int, **options: Any) -> Any:
    """Compare calls on vectors of these values, and what is drawn next, with eager; expect so many hits."""
    fast = pygraph.jit(fn, **options)
    results: list[Any] = []
    for call in (fn, fast):
        torch.manual_seed(1)
        results.append([])
        for value in values:
            x = torch.full((4,), float(value), device=device)
            results[-1].append((call(x), x, drawn(x)))
    assert_same(results[1], results[0], device)
    assert fast.cache_info().hits >= hits, (fast.cache_info(), str(fast.explain()))
    return fast


BEGAN_ANEW = "it has begun anew"
"""The reason that is counted where a call has run a graph in vain."""

SIGNS = [1, 1, 1, -1, -1, -1, 1, 1, 1, 1, -1, 1, 1, 1]


def by_truth(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def by_number(x: Tensor) -> Tensor:
    return x * 2 if x.max().item() > 0.5 else x * 3


def by_count(x: Tensor) -> Tensor:
    if not sum(value.item() for value in (x > 0).float()):
        return x.exp()
    return x.sin()


def by_both(x: Tensor) -> Tensor:
    if x.sum() > 0 and x.max().item() < 3:
        x = x * 2
    if (x > 1).all():
        x = x - 5
    return x


def by_the_same_again(x: Tensor) -> Any:
    found = x.sum() > 0
    return (x + 1 if found else x), (x * 2 if found else x * 3)


def after_draws(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    if (x + noise).sum() > 1:
        noise = noise + torch.rand_like(x)
    return noise


def after_updates(x: Tensor) -> Tensor:
    x.add_(1)
    if x.sum() > 0:
        x.mul_(2)
    x.sub_(3)
    return x + 1


def of_what_it_updates(x: Tensor) -> Tensor:
    x.mul_(0.5)
    if x.norm() > 0.25:
        x.add_(1)
    return x * x


def in_a_loop(x: Tensor) -> Tensor:
    while x.norm() > 0.6:
        x = x * 0.5
    return x


def by_an_assertion(x: Tensor) -> Tensor:
    assert x.sum() < 100
    return x * 2


@pytest.mark.parametrize(
    "fn",
    [by_truth, by_number, by_count, by_both, by_the_same_again, after_draws, after_updates, of_what_it_updates,
     in_a_loop, by_an_assertion],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_calls_go_where_eager_goes(device: torch.device, fn: Callable[..., Any]) -> None:
    fast = check(device, fn, SIGNS, hits=8)
    reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
    assert "it needs a value on the host" in reasons
    assert not any("data-dependent" in reason for reason in reasons)


def test_two_outcomes_are_two_traces(device: torch.device) -> None:
    fast = check(device, by_truth, SIGNS, hits=10)
    assert fast.cache_info().size == 2
    captures = fast.cache_info().captures
    for value in SIGNS:
        fast(torch.full((4,), float(value), device=device))
    assert fast.cache_info().captures == captures


def test_a_call_that_raises(device: torch.device) -> None:
    """An outcome that leads to an error leads eager there; the next calls are replays again."""

    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        if x.isnan().any():
            raise ValueError("not a number")
        return x * 2

    fast = pygraph.jit(fn)
    good, bad = torch.ones(3, device=device), torch.full((3,), torch.nan, device=device)
    for _ in range(3):
        for _ in range(3):
            assert_same(fast(good.clone()), fn(good.clone()), device)
        given = bad.clone()
        given[0] = 4.0
        with pytest.raises(ValueError, match="not a number"):
            fast(given)
        assert given[0].item() == 5.0
    assert fast.cache_info().hits >= 8


def test_a_way_that_ends_in_an_error_is_traced_once(device: torch.device) -> None:
    def fn(x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return x * 2

    fast = pygraph.jit(fn)
    good, bad = torch.ones(3, device=device), torch.full((3,), torch.nan, device=device)
    fast(good)
    compilations: list[int] = []
    for _ in range(3):
        with pytest.raises(ValueError, match="not a number"):
            fast(bad)
        compilations.append(fast.engine.shared.counts.compilations)
        assert_same(fast(good), fn(good), device)
    assert compilations[0] == compilations[-1]


def test_a_call_runs_as_it_is_while_others_have_their_turns(device: torch.device) -> None:
    """Code of the user's may wait for another thread that calls the same function."""
    entered, answered = threading.Event(), threading.Event()

    def fn(x: Tensor) -> Tensor:
        if x.sum() > 0:
            str(x)  # no trace goes on from here
            if not torch.compiler.is_compiling() and not entered.is_set():
                entered.set()
                assert answered.wait(60)
        return x + 1

    fast = pygraph.jit(fn)

    def call() -> None:
        entered.wait(60)
        fast(-torch.ones(3, device=device))
        answered.set()

    thread = threading.Thread(target=call)
    thread.start()
    fast(torch.ones(3, device=device))
    thread.join(60)
    assert answered.is_set()


@torch.library.custom_op("pygraph_test_deciding::with_noise", mutates_args=())
def with_noise(x: Tensor) -> Tensor:
    """An operation that draws, and does not say so."""
    return x + torch.rand_like(x) * 0.1


with_noise.register_fake(torch.empty_like)


def by_secret_draws(x: Tensor) -> Tensor:
    return x + 1 if with_noise(x).sum() > 0 else x - 1


def test_what_begins_anew_at_every_call_runs_as_it_is(device: torch.device) -> None:
    """That costs more than eager; behind an operation of others, which may draw, no other trace goes on."""
    signs: list[int] = []
    paths = ExpectedPaths(limits.LIMITS.paths)
    for _ in range(40):
        goes_up = paths.expected() != ("True",)
        signs.append(1 if goes_up else -1)
        paths.note((str(goes_up),))
    fast = check(device, by_secret_draws, signs, hits=0)
    reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
    assert any("otherwise too often" in reason for reason in reasons)
    assert limits.LIMITS.repeated_share <= 0.1


def test_what_decides_otherwise_goes_on_with_another_trace(device: torch.device) -> None:
    """Only until its first graphs give what the others need."""

    def fn(x: Tensor) -> Tensor:
        y, z = x.sin() * 2, x.cos() - 1
        return y * z if x.sum() > 0 else z + 1

    signs = [1 if number in (0, 3, 4, 7, 12, 13, 15, 20, 21, 22, 27, 30, 33) else -1 for number in range(40)]
    fast = check(device, fn, signs, hits=36)
    found = fast.explain().to_dict()["fallbacks"]
    assert sum(one["count"] for one in found if BEGAN_ANEW in one["reason"]) <= 2 * limits.LIMITS.missed_values
    assert not any("takes the host value" in one["reason"] for one in found)


def by_draws(x: Tensor) -> Tensor:
    return x + 1 if (x + torch.rand_like(x)).sum() > 2 else x - 1


def by_draws_in_turn(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    if noise[0] > 0.5:
        noise = noise + torch.rand_like(x)
    elif noise[1] > 0.5:
        noise = noise * torch.randn_like(x)
    dropped = torch.dropout(x, 0.5, True)
    return noise + dropped if (dropped * noise).sum() > 0 else noise * dropped


def by_equal_draws(x: Tensor) -> Tensor:
    """Each of them is other numbers, by an operation with the same arguments."""
    first, second = torch.rand_like(x), torch.rand_like(x)
    return first - second if first.sum() > second.sum() else second * 2 - first


def by_tokens(x: Tensor) -> Tensor:
    tokens = x
    for _ in range(4):
        token = torch.multinomial(torch.softmax(tokens, -1), 1)
        tokens = torch.cat((tokens[1:], token.to(x.dtype)))
        if (token == 2).any():
            break
    return tokens


@pytest.mark.parametrize("fn", [by_draws, by_draws_in_turn, by_equal_draws, by_tokens])
def test_what_decides_otherwise_behind_draws_goes_on_with_another_trace(
    device: torch.device, fn: Callable[..., Any]
) -> None:
    """What has been drawn is not drawn again, and what is drawn next is what eager draws."""
    fast = check(device, fn, [0.5, -0.5, 0.25] * 16, hits=36)
    found = fast.explain().to_dict()["fallbacks"]
    assert sum(one["count"] for one in found if BEGAN_ANEW in one["reason"]) <= 4 * limits.LIMITS.missed_values


def test_what_takes_turns_begins_anew_no_more(device: torch.device) -> None:
    fast = check(device, by_truth, [1, -1] * 20, hits=38)
    began_anew = [one["count"] for one in fast.explain().to_dict()["fallbacks"] if BEGAN_ANEW in one["reason"]]
    assert sum(began_anew) <= 3


def shrunk(x: Tensor) -> Tensor:
    while x.norm() > 1e-6:
        x = x * 0.9
    return x


def test_a_loop_of_many_steps_is_not_traced_to_its_end(device: torch.device) -> None:
    """Its turns have a graph instead."""
    fast = check(device, shrunk, [1.0] * 3, hits=2)
    assert "decides more than" in fast.explain().to_dict()["in_python"][0]
    assert fast.cache_info().captures == 1


def test_a_trace_by_itself_says_what_to_do(device: torch.device) -> None:
    with pytest.raises(UndecidedError, match="data-dependent"):
        pygraph.trace(by_truth)(torch.ones(2, device=device))
    assert issubclass(UndecidedError, TraceError)


def test_strict_names_the_line(device: torch.device) -> None:
    with pytest.raises(FallbackError, match=r"needs a value on the host.*test_deciding.py"):
        pygraph.jit(by_truth, strict=True)(torch.ones(2, device=device))


@pytest.mark.parametrize("options", [{"reuse_outputs": True}, {"donate_argnums": 0}], ids=str)
def test_memory_that_is_gone_when_a_call_begins_anew(device: torch.device, options: dict[str, Any]) -> None:
    fast = pygraph.jit(by_truth, **options)
    for value in SIGNS:
        x = torch.full((4,), float(value), device=device)
        expected = by_truth(x)
        assert_same(fast(x.clone()), expected, device)
    assert fast.cache_info().captures == 0


def test_an_operation_that_must_not_be_repeated(device: torch.device) -> None:
    """A custom operation that returns nothing is called for another effect, which restarting would have twice."""
    seen: list[float] = []
    with torch.library._scoped_library("pygraph_test_deciding", "FRAGMENT") as library:  # pyright: ignore
        library.define("tell(Tensor x) -> ()")
        library.impl("tell", lambda x: seen.append(x.sum().item()), "CompositeExplicitAutograd")
        library.impl("tell", lambda x: None, "Meta")

        def fn(x: Tensor) -> Tensor:
            torch.ops.pygraph_test_deciding.tell(x)
            return by_truth(x)

        fast = pygraph.jit(fn)
        for value in SIGNS:
            fast(torch.full((4,), float(value), device=device))
    assert seen == [4.0 * value for value in SIGNS]


# ---- training ------------------------------------------------------------------------------------------------------


def make_net(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    ).to(device)  # fmt: skip


Make = Callable[[nn.Module], tuple[Callable[..., Any], list[Any]]]


def train(device: torch.device, make: Make, transform: Callable[[Any], Any], steps: int) -> tuple[Any, Any]:
    """What each call returns, and all state at the end."""
    net = make_net(device)
    step, others = make(net)
    step = transform(step)
    torch.manual_seed(2)
    found: list[Any] = []
    for call in range(steps):
        x = torch.randn(8, 4, device=device)
        x = x * torch.inf if call % 9 == 7 else x
        found.append((step(x, torch.randint(0, 3, (8,), device=device)), [p.grad for p in net.parameters()], drawn(x)))
    return (found, net.state_dict(), [other.state_dict() for other in others]), step


def check_training(device: torch.device, make: Make, hits: int, steps: int = 20) -> Any:
    expected, _ = train(device, make, lambda fn: fn, steps)
    found, fast = train(device, make, pygraph.jit, steps)
    assert_same(found, expected, device)
    assert fast.cache_info().hits >= hits, (fast.cache_info(), str(fast.explain()))
    return fast


OPTIMIZERS = [
    lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    lambda params: torch.optim.AdamW(params, 0.01),
    lambda params: torch.optim.Adam(params, 0.01, capturable=True),
    lambda params: torch.optim.RMSprop(params, 0.01),
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS, ids=["sgd", "adamw", "capturable", "rmsprop"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_a_gradient_scaler_skips_steps(device: torch.device, make_optimizer: Any, clips: bool) -> None:
    """Parameters, moments and counts of steps stay as they are where there is an overflow, and the scale shrinks."""

    def make(net: nn.Module) -> Any:
        optimizer = make_optimizer(net.parameters())
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=4)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return F.cross_entropy(net(x), y)

        step = scaled_step_of(net, optimizer, scaler, loss_of, 1.0 if clips else None)
        return step, [optimizer, scaler]

    check_training(device, make, hits=14)


def test_clipping_that_raises_for_what_is_not_finite(device: torch.device) -> None:
    def make(net: nn.Module) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            return loss.detach()

        def noting(x: Tensor, y: Tensor) -> Any:
            try:
                return steps[0](x, y)
            except RuntimeError as error:
                return str(error)

        steps = [step]
        noting.steps = steps  # pyright: ignore
        return noting, [optimizer]

    def jitted(noting: Any) -> Any:
        noting.steps[0] = pygraph.jit(noting.steps[0])
        return noting

    expected, _ = train(device, make, lambda fn: fn, 20)
    found, noting = train(device, make, jitted, 20)
    assert_same(_without_text(found), _without_text(expected), device)
    texts = [[part[0] for part in run[0] if isinstance(part[0], str)] for run in (found, expected)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    assert noting.steps[0].cache_info().hits >= 13


def _without_text(run: Any) -> Any:
    found, *rest = run
    return [[part[1:] if isinstance(part[0], str) else part for part in found], *rest]


@pytest.mark.parametrize(
    "options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": lambda a, b, n: 0.9 * a + 0.1 * b}],
    ids=["mean", "ema", "own"],
)  # fmt: skip
def test_averaged_models(device: torch.device, options: dict[str, Any]) -> None:
    """They ask whether they have averaged anything yet: the count is on the host, so that nothing waits."""

    def make(net: nn.Module) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        average = AveragedModel(net, **options)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            average.update_parameters(net)
            return loss.detach()

        return step, [optimizer, average]

    fast = check_training(device, make, hits=14)
    fallbacks = fast.explain().to_dict()["fallbacks"]
    assert all(BEGAN_ANEW in fallback["reason"] for fallback in fallbacks)
    assert sum(fallback["count"] for fallback in fallbacks) <= 3  # the first calls that average


def test_an_average_that_is_updated_by_itself(device: torch.device) -> None:
    """The outcome that is guessed first leads to work of the host alone."""
    net = make_net(device)
    averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for _ in range(2)]
    fast = pygraph.jit(lambda: averages[0].update_parameters(net))
    for _ in range(12):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1)
        fast()
        averages[1].update_parameters(net)
    assert_same(averages[0].state_dict(), averages[1].state_dict(), device)
    assert fast.cache_info().captures > 0
    assert fast.explain().to_dict()["kernels_in_graphs"] > 0


def test_running_statistics_are_updated_once(device: torch.device) -> None:
    """They come before the decision, after which a call may begin anew."""

    def make(net: nn.Module) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            scores = net(x)
            if scores.detach().sum() > 0:
                scores = scores * 2
            return F.cross_entropy(scores, y).detach()

        return step, []

    check_training(device, make, hits=10)


def test_gradients_from_before_are_there_when_a_call_begins_anew(device: torch.device) -> None:
    """A replay that does not read the old gradients frees their memory; one that may begin anew must not."""

    def make(net: nn.Module) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x), y)
            if loss.detach() > 1.1:
                net.zero_grad()
            loss.backward()
            return loss.detach()

        return step, []

    check_training(device, make, hits=8)


def test_differentiated_from_outside(device: torch.device) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(device)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.net(x)
            return scores * 2 if self.training and scores.sum() > 0 else scores

    found: list[Any] = []
    torch.manual_seed(1)
    models: list[nn.Module] = [Deciding().to(device)]
    models.append(copy.deepcopy(models[0]))
    fast = pygraph.jit(models[0])
    for model, call in ((models[0], fast), (models[1], models[1])):
        torch.manual_seed(2)
        found.append([])
        for number in range(16):
            model.train(number % 4 != 3)
            x = torch.randn(8, 4, device=device)
            model.zero_grad()
            call(x).square().mean().backward()
            found[-1].append(([p.grad for p in model.parameters()], drawn(x)))
        found[-1].append(model.state_dict())
    assert_same(found[0], found[1], device)
    assert fast.cache_info().hits >= 10


def test_a_generator_of_its_own_is_set_back_when_a_call_begins_anew(device: torch.device) -> None:
    results: list[Any] = []
    for jitted in (False, True):
        generator = torch.Generator(device=device).manual_seed(3)

        def fn(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            noise = torch.rand(4, device=x.device, generator=generator)
            return x + noise if (x * noise).sum() > 0 else x - noise

        call = pygraph.jit(fn) if jitted else fn
        values = [torch.full((4,), float(sign), device=device) for sign in SIGNS]
        results.append([(call(x), generator.get_state()) for x in values])
    torch.testing.assert_close(results[1], results[0])


def test_static_arguments_stay_static(device: torch.device) -> None:
    """They are of the caller's type, also in the function that decides as it is told."""

    def fn(x: Tensor, k: int, scale: float) -> Tensor:
        assert type(k) is int
        return x * k * scale if x.sum() > 0 else x - k

    fast = pygraph.jit(fn, static_argnums=1)
    for value in SIGNS:
        x = torch.full((4,), float(value), device=device)
        assert_same(fast(x, 2, 0.5 + value), fn(x, 2, 0.5 + value), device)
    assert fast.cache_info().hits >= 8, str(fast.explain())


@pytest.mark.rotates
def test_an_optimizer_whose_state_grows_is_soon_as_fast_as_in_eager(device: torch.device, traces: list[str]) -> None:
    """L-BFGS keeps lists, which no trace may change; each call finds another state."""
    found: list[Any] = []
    for jitted in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1).to(device)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

        def step(x: Tensor, net: Any = net, optimizer: Any = optimizer) -> Any:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = net(x).tanh().square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure)

        run = pygraph.jit(step) if jitted else step
        losses: list[Tensor] = []
        for number in range(10):
            losses.append(run(torch.full((4, 3), 1.0 + number / 8, device=device)).detach())
        found.append((losses, net.state_dict()))
    assert len(traces) <= 12, len(traces)  # those of a few calls
    assert_same(found[0], found[1], device)


def test_a_question_inside_of_a_try(device: torch.device) -> None:
    """Of clipping that raises for infinite norms, which the function catches, as for a comparison that raises."""

    def played(jitted: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            try:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
                if norm > 0.5:
                    raise ValueError("large")
            except RuntimeError:
                return loss.detach(), None
            except ValueError:
                loss = loss * 2
            optimizer.step()
            return loss.detach(), norm

        run, found = pygraph.jit(step) if jitted else step, list[Any]()
        for i in range(9):
            x = torch.full((2, 3), 0.3 * i, device=device)
            if i % 3 == 2:
                x[0, 0] = torch.nan
            found.append((run(x), [parameter.detach().clone() for parameter in model.parameters()]))
        return run, found

    fast, found = played(True)
    torch.testing.assert_close(found, played(False)[1], equal_nan=True)
    assert fast.cache_info().captures > 1
    assert "in Python" not in str(fast.explain())


def test_calls_that_draw_look_for_generators_only_when_something_is_compiled(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[Any] = []
    looked_for = initial_states.generators_of
    monkeypatch.setattr(initial_states, "generators_of", lambda found: walks.append(found) or looked_for(found))

    def drop(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5)
        return y + 1 if y.sum() > 1 else y - torch.rand_like(y)

    fast = check(device, drop, SIGNS, 8)
    assert walks
    walks.clear()
    for value in SIGNS:
        fast(torch.full((4,), float(value), device=device))
    assert not walks


@pytest.mark.parametrize("is_passed", [False, True])
def test_generators_that_are_replaced(device: torch.device, is_passed: bool) -> None:
    def make(run: Callable[..., Any]) -> list[Any]:
        kept: list[torch.Generator] = [torch.Generator(device).manual_seed(0)]

        def drop(x: Tensor, passed: torch.Generator | None) -> Tensor:
            generator = kept[0] if passed is None else passed
            y = torch.rand(4, device=x.device, generator=generator) + x
            if y.sum() > 2:
                return y + torch.rand(4, device=x.device, generator=generator)
            return y - torch.rand_like(y)

        torch.manual_seed(0)
        call, found = run(drop), list[Any]()
        for number, value in enumerate([*SIGNS, *SIGNS]):
            if number % 7 == 6:
                kept[0] = torch.Generator(device).manual_seed(number)
            passed = kept[0] if is_passed else None
            x = torch.full((4,), 0.3 * value, device=device)
            found.append((call(x, passed), torch.rand(2, generator=kept[0], device=device)))
        return found

    assert_same(make(pygraph.jit), make(lambda fn: fn), device)


def test_a_line_that_asks_too_often_is_not_answered_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    look_up = decisions.value_at
    monkeypatch.setattr(decisions, "value_at", lambda *about: asked.append(1) or look_up(*about))

    def turned(x: Tensor) -> Tensor:
        for number in range(80):
            x = x * 1.01 + number
            if x.sum() > 1e9:
                break
        return x

    def whole(x: Tensor) -> Tensor:
        return turned(x) / 2

    fast = pygraph.jit(whole)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        x = torch.full((4,), value, device=device)
        torch.testing.assert_close(fast(x), whole(x))
    assert decisions.MAX_DECISIONS <= len(asked) < decisions.MAX_DECISIONS + 10


def test_a_new_way_of_a_function_that_leaves_state_behind_is_traced_once(
    device: torch.device, traces: list[str]
) -> None:
    """Its trace takes what the last way has changed, and finds the answers; one way changes nothing."""

    class Memory:
        def __init__(self) -> None:
            self.h = torch.zeros(4, device=device)
            self.calls = 0

    def step(x: Tensor, memory: Memory) -> Tensor:
        if x.min() < -5:
            return x + memory.h
        memory.calls += 1
        h = x * 2 if x.sum() > 0 else x * 3
        memory.h = h.sin() if x.max() > 2 else h.cos() + memory.h
        return memory.h.sum() * memory.calls

    theirs, mine = Memory(), Memory()
    fast = pygraph.jit(lambda x: step(x, mine))
    made: list[int] = []
    for value in (1, 1, 1, -1, 3, -9, 1, -9, -1, 3):
        x = torch.full((4,), float(value), device=device)
        traces.clear()
        assert_same((fast(x), mine.h, mine.calls), (step(x, theirs), theirs.h, theirs.calls), device)
        made.append(len(traces))
    assert made[3:] == [1, 1, 1, 0, 0, 0, 0], made
