"""Errors of the user's own code in strict calls: raised as they are, as in eager."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import FallbackError
from tests.fakes import assert_no_fake_left, fakes_followed


class OurError(Exception):
    pass


def chained(x: Tensor, k: int) -> Tensor:
    try:
        return {}["key"]
    except KeyError as error:
        raise OurError("no key") from error


def too_large(x: Tensor, k: int) -> Tensor:
    y = x * k
    if k > 2:
        raise ValueError(f"k too large: {k}")
    return y


def asserts(x: Tensor, k: int) -> Tensor:
    if x.dim() != 2:  # pytest has its own `assert`, which asks for the text of x
        raise AssertionError("a matrix is needed")
    return x * 2


def unknown_name(x: Tensor, k: int) -> Tensor:
    return x * nowhere  # type: ignore[name-defined]  # noqa: F821


def of_a_library(x: Tensor, k: int) -> Tensor:
    return x * json.loads("{")


def of_a_module(x: Tensor, k: int) -> Tensor:
    return torch.nn.Linear(3, 3).wieght * x  # type: ignore[operator]


def through_another(x: Tensor, k: int) -> Tensor:
    return too_large(x, k)


def wrong_inner_call(x: Tensor, k: int) -> Tensor:
    return too_large(x, k, scale=2)  # type: ignore[call-arg]


def own_runtime_error(x: Tensor, k: int) -> Tensor:
    raise RuntimeError("not today")


FUNCTIONS: list[tuple[Callable[..., Any], type[Exception]]] = [
    (chained, OurError),
    (too_large, ValueError),
    (asserts, AssertionError),
    (unknown_name, NameError),
    (of_a_library, json.JSONDecodeError),
    (of_a_module, AttributeError),
    (wrong_inner_call, TypeError),
    (own_runtime_error, RuntimeError),
    (lambda x, k: x * [1, 2][k], IndexError),
    (lambda x, k: x * {}["missing"], KeyError),
]


@pytest.mark.parametrize(("fn", "kind"), FUNCTIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_it_is_eager_s_error_with_the_frames_of_user_code(
    device: torch.device, fn: Callable[..., Any], kind: type[Exception], requires_grad: bool
) -> None:
    x = torch.ones(3, device=device, requires_grad=requires_grad)
    with pytest.raises(kind) as eager:
        fn(x, 3)
    fast = pygraph.jit(fn, strict=True)
    for _ in range(2):  # nothing is remembered that would change it
        with pytest.raises(kind) as caught:
            fast(x, 3)
        assert type(caught.value) is type(eager.value)
        assert str(caught.value) == str(eager.value)
        name = fn.__name__
        assert caught.value.__notes__ == [f"Raised while pygraph traced {name}(…), with strict=True."]
        files = [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert set(files) == {"test_own_errors.py"}
        innermost = traceback.extract_tb(eager.value.__traceback__)
        ours = [frame.lineno for frame in innermost if frame.filename == __file__]
        assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == ours[-1]
        printed = "".join(traceback.format_exception(caught.value))
        for frame in traceback.extract_tb(eager.value.__traceback__)[1:]:
            if frame.filename == __file__:
                assert "".join(traceback.format_list([frame])) in printed  # with the marks below the code
        assert type(caught.value.__cause__) is type(eager.value.__cause__)
        assert type(caught.value.__context__) is type(eager.value.__context__)


def test_a_call_that_does_not_fit_the_signature(device: torch.device) -> None:
    x = torch.ones(3, device=device)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

        @pygraph.jit(strict=True)
        def method(self, x: Tensor) -> Tensor:
            return x * 2

    model = Model()
    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (too_large, pygraph.jit(too_large, strict=True)),
        (model, pygraph.jit(model, strict=True)),
        (functools.partial(Model.method.fn, model), model.method),
    ]
    for plain, one in pairs:
        for args, kwargs in (((x,) * 9, {}), ((), {}), ((x,), {"other": 1})):
            with pytest.raises(TypeError) as eager:
                plain(*args, **kwargs)
            with pytest.raises(TypeError) as caught:
                one(*args, **kwargs)
            assert str(caught.value) == str(eager.value)
            assert not isinstance(caught.value, pygraph.PygraphError)


def test_nothing_outside_has_changed_and_nothing_of_the_trace_is_left(device: torch.device) -> None:
    log: list[int] = []
    count = 0

    def fails(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        log.append(1)
        x.add_(1)
        held = [x * 2]
        raise OurError("no", held[0].shape)

    x = torch.ones(3, device=device)
    with fakes_followed():
        with pytest.raises(OurError) as caught:
            pygraph.jit(fails, strict=True)(x)
        assert (count, log, x.tolist()) == (0, [], [1.0, 1.0, 1.0])
        assert caught.value.args == ("no", torch.Size([3]))
        assert_no_fake_left()


def test_its_frames_lead_to_no_others(device: torch.device) -> None:
    with pytest.raises(ValueError, match="too large") as caught:
        pygraph.jit(through_another, strict=True)(torch.ones(3, device=device), 3)
    ours = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)][1:]
    assert [frame.f_code.co_name for frame in ours] == ["through_another", "too_large"]
    for frame in ours:
        while frame := frame.f_back:
            assert "torch" not in frame.f_code.co_filename
            assert frame.f_code.co_name not in ("record", "call", "in_user_code")


def test_errors_that_hold_what_only_a_trace_has_stay_those_of_strict(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    class_of = type  # by this name, it tells the classes of a trace

    def holds_a_tensor(x: Tensor) -> Tensor:
        raise OurError(x * 2)

    def after_a_value(x: Tensor) -> Tensor:
        k = x.sum().item()
        if class_of(k) is not float:
            raise OurError("only in a trace")
        return x * k

    def from_a_refusal(x: Tensor) -> Tensor:
        try:
            return x * int(x.sum())
        except Exception as error:
            raise OurError("what is this?") from error

    def extension(x: Tensor) -> Tensor:
        return torch.as_tensor(x.cpu().numpy())

    for fn in (holds_a_tensor, after_a_value, from_a_refusal, extension):
        with pytest.raises(FallbackError):
            pygraph.jit(fn, strict=True)(x)


def test_errors_of_operations_stay_those_of_strict(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    for fn in (lambda x: x @ torch.ones(4, device=device), lambda x: x.view(2), lambda x: torch.cat([x, x[None]])):
        with pytest.raises(FallbackError, match=r"From test_own_errors\.py:\d+\.") as caught:
            pygraph.jit(fn, strict=True)(x)
        assert caught.value.__cause__ is not None


def test_under_vmap_and_grad_it_is_the_own_error_too(device: torch.device) -> None:
    fast = pygraph.jit(too_large, strict=True)
    for outer in (torch.func.vmap(fast, in_dims=(0, None)), torch.func.grad(lambda x, k: fast(x, k).sum())):
        with pytest.raises(ValueError, match="k too large: 3"):
            outer(torch.ones(3, device=device), 3)


def test_an_error_of_an_operation_of_user_code_has_no_frames_of_the_library_before_it(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    fast = pygraph.jit(lambda x, w: torch.relu(x) @ w)
    with pytest.raises(RuntimeError) as caught:
        fast(x, torch.ones(4, device=device))
    assert [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)][:2] == [__file__] * 2


def test_without_strict_eager_s_error_has_no_frames_of_the_library_between(device: torch.device) -> None:
    fast = pygraph.jit(too_large)
    x = torch.ones(3, device=device)
    for _ in range(3):
        with pytest.raises(ValueError, match="too large") as caught:
            fast(x, 3)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.name for frame in frames][1:] == ["too_large"]
