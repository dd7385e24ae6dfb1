"""Calls that append to lists, as logs of losses: replays append what eager appends, however long the list is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pygraph
from pygraph.errors import StateChangeError
from tests.steps import assert_same, no_synchronization


class Log:
    """Lists, and a function that fills them."""

    def __init__(self, write: Callable[[Log, Tensor, int], Any]) -> None:
        self.losses: list[Any] = []
        self.nested: dict[str, list[Any]] = {"a": []}
        self.lists: list[list[Any]] = [[], []]
        self.again = self.losses
        self.steps = 0
        self.weight: nn.Parameter | None = None
        self.write = write

    def state(self) -> Any:
        return [list(self.losses), {key: list(value) for key, value in self.nested.items()},
                [list(one) for one in self.lists], self.steps]  # fmt: skip


def tensor(log: Log, x: Tensor, k: int) -> None:
    log.losses.append(x.sum().detach())


def number(log: Log, x: Tensor, k: int) -> None:
    log.losses.append(x.sum().item())


def several(log: Log, x: Tensor, k: int) -> Any:
    log.losses.extend([x.sum(), x.mean()])
    log.losses += [x.max()]
    log.nested["a"].append({"step": log.steps, "loss": x.min()})
    log.lists[1].append((x * 2, None, 3))
    log.steps += 1
    return x + 1


def the_same_twice(log: Log, x: Tensor, k: int) -> Any:
    y = x * 2
    log.losses.append(y)
    log.losses.append(y)
    log.lists[0].append(y[0])
    return y


def at_times(log: Log, x: Tensor, k: int) -> None:
    if k:
        log.losses.append(x * 2)


def by_a_value(log: Log, x: Tensor, k: int) -> Any:
    if x.sum() > 3:
        log.losses.append(x.sum().item())
    return x * 2


def by_what_is_new(log: Log, x: Tensor, k: int) -> Any:
    """What has just been appended is read, and not what was there."""
    log.losses.extend((x * 2, x.sum()))
    return log.losses[-1] + log.losses[-2]


FILLING = [tensor, number, several, the_same_twice, at_times, by_a_value, by_what_is_new]


def by_length(log: Log, x: Tensor, k: int) -> Any:
    log.losses.append(x.sum())
    return x * len(log.losses)


def if_there_is_one(log: Log, x: Tensor, k: int) -> Any:
    y = x if not log.losses else x * 2
    log.losses.append(y)
    return y


def by_the_last(log: Log, x: Tensor, k: int) -> Any:
    y = x + (log.losses[-1] if k else 0)
    log.losses.append(y)
    return y


def all_of_them(log: Log, x: Tensor, k: int) -> Any:
    log.losses.append(x.sum())
    return torch.stack(log.losses).sum()


def by_numpy(log: Log, x: Tensor, k: int) -> Any:
    log.losses.append(float(k))
    return x * float(np.mean(log.losses))


def spread_out(log: Log, x: Tensor, k: int) -> Any:
    log.losses.append(x)
    return sum([*log.losses])


def at_the_front(log: Log, x: Tensor, k: int) -> None:
    log.losses.insert(0, x)


def no_more_than_three(log: Log, x: Tensor, k: int) -> None:
    log.losses.append(x)
    del log.losses[:-3]


def by_a_method_of_it(log: Log, x: Tensor, k: int) -> None:
    log.method = getattr(log, "method", log.losses.append)  # pyright: ignore
    log.method(x * 2)  # pyright: ignore


def returned(log: Log, x: Tensor, k: int) -> Any:
    log.losses.append(x.sum())
    return log.losses


def as_text(log: Log, x: Tensor, k: int) -> Any:
    log.losses.append(k)
    return x * len(f"{log.losses}")


def with_its_graph(log: Log, x: Tensor, k: int) -> Any:
    log.losses.append((log.weight * x).sum())


READING = [
    by_length, if_there_is_one, by_the_last, all_of_them, by_numpy, spread_out, at_the_front, no_more_than_three,
    by_a_method_of_it, returned, as_text, with_its_graph,
]  # fmt: skip


def run(device: torch.device, write: Any, transform: Callable[[Any], Any], calls: int = 9) -> tuple[Any, Any]:
    log = Log(write)
    log.weight = nn.Parameter(torch.ones((), device=device))
    fast = transform(lambda x, k: log.write(log, x, k))
    results = [fast(torch.full((3,), float(call), device=device), call % 2) for call in range(calls)]
    results = pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, results)
    state = pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, log.state())
    return (results, state), fast


@pytest.mark.parametrize("write", FILLING, ids=lambda write: write.__name__)
def test_replays_append_what_eager_appends(device: torch.device, write: Any) -> None:
    found, fast = run(device, write, pygraph.jit)
    assert_same(found, run(device, write, lambda fn: fn)[0], device)
    assert fast.cache_info().hits >= 3, (fast.cache_info(), str(fast.explain()))
    assert fast.explain().to_dict()["kernels_in_graphs"] > 0


@pytest.mark.parametrize("write", READING, ids=lambda write: write.__name__)
def test_a_list_that_is_read_as_well(device: torch.device, write: Any) -> None:
    """Its items would have to be passed: such a call runs as it is."""
    found, _ = run(device, write, pygraph.jit)
    assert_same(found, run(device, write, lambda fn: fn)[0], device)


def test_the_reason_says_what_is_read(device: torch.device) -> None:
    log = Log(by_length)
    log.losses.extend(range(100))
    fast = pygraph.jit(lambda x: by_length(log, x, 1))
    for _ in range(4):
        fast(torch.ones(3, device=device))
    reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
    assert any("it reads log.losses, to which it appends" in reason for reason in reasons)


def test_a_list_that_grows_and_is_read_has_no_graph_for_each_length(device: torch.device) -> None:
    log = Log(by_length)
    fast = pygraph.jit(lambda x: by_length(log, x, 1))
    for call in range(40):
        assert fast(torch.ones(3, device=device)).tolist() == [call + 1] * 3
    info = fast.cache_info()
    assert info.captures <= 3, fast.explain()
    assert info.misses <= 6, fast.explain()


def test_what_is_appended_is_not_overwritten(device: torch.device) -> None:
    log = Log(tensor)
    fast = pygraph.jit(lambda x: log.losses.append(x * 2))
    for call in range(6):
        fast(torch.full((3,), float(call), device=device))
    assert [item[0].item() for item in log.losses] == [2.0 * call for call in range(6)]
    assert len({item.data_ptr() for item in log.losses}) == 6


def test_lists_that_the_caller_changes(device: torch.device) -> None:
    log = Log(tensor)
    fast = pygraph.jit(lambda x: log.losses.append(x.sum()))
    x = torch.ones(3, device=device)
    for _ in range(4):
        fast(x)
    log.losses.clear()
    fast(x)
    assert len(log.losses) == 1
    log.losses = log.again = ["other"]
    fast(x)
    assert len(log.losses) == 2
    log.losses = [1]  # no longer what `again` is
    fast(x)
    assert (len(log.losses), len(log.again)) == (2, 2)
    log.losses = None  # pyright: ignore
    with pytest.raises(AttributeError, match="append"):
        fast(x)
    log.losses = log.again
    fast(x)
    assert len(log.losses) == 3
    assert type(log.losses) is list


def test_replays_wait_for_nothing(device: torch.device) -> None:
    log = Log(tensor)
    fast = pygraph.jit(lambda x: log.losses.append(x.sum()))
    x = torch.ones(3, device=device)
    for _ in range(5):
        fast(x)
    with no_synchronization(device):
        fast(x)
    assert len(log.losses) == 6


def test_a_trace_leaves_the_list_as_it_was(device: torch.device) -> None:
    log = Log(tensor)
    log.losses.append("first")
    before = log.losses
    with pytest.raises(StateChangeError):
        pygraph.trace(lambda x: log.losses.append(x.sum()))(torch.ones(3, device=device))
    assert log.losses is before
    assert before == ["first"]


def test_differentiated_from_outside(device: torch.device) -> None:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.log: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            self.log.append(out.detach().mean())
            return out

    torch.manual_seed(1)
    modules = [Logging().to(device)]
    modules.append(copy.deepcopy(modules[0]))
    fast = pygraph.jit(modules[0])
    for call in range(8):
        x = torch.full((2, 3), float(call), device=device)
        for module, forward in zip(modules, (fast, modules[1]), strict=True):
            module.zero_grad()
            forward(x).square().sum().backward()
        assert_same([p.grad for p in modules[0].parameters()], [p.grad for p in modules[1].parameters()], device)
    assert_same(modules[0].log, modules[1].log, device)


def test_a_list_in_a_variable_that_functions_share(device: torch.device, native: bool) -> None:
    log: list[Any] = []

    def one(x: Tensor) -> Tensor:
        log.append("one")
        return x + 1

    def other(x: Tensor) -> Tensor:
        log.append("other")
        return x + 2

    table = {"one": one, "other": other}
    fast = pygraph.jit(lambda x: table["one"](x))
    for number in range(4):
        assert fast(torch.ones(2, device=device)).tolist() == [2, 2]
        assert log == ["one"] * (number + 1)


def test_a_list_that_is_an_attribute_of_a_class(device: torch.device) -> None:
    """No other list can be put in its place while the function is traced."""

    def make() -> Any:
        class Writer:
            log: list[Any] = []  # noqa: RUF012  # of the class, as loggers have it

            def add(self, *values: Any) -> None:
                self.log.append(values)

        return Writer()

    mine, theirs = make(), make()

    def step(x: Tensor, writer: Any) -> Tensor:
        loss = x.square().mean()
        writer.add(1.0, loss)
        return loss * 2

    fast = pygraph.jit(lambda x: step(x, mine))
    for number in range(6):
        x = torch.full((3,), float(number), device=device)
        assert_same((fast(x), mine.log), (step(x, theirs), theirs.log), device)
    report = str(fast.explain().to_dict())
    assert "AttributeError" not in report, report
