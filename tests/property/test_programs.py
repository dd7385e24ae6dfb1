"""Generated programs of ordinary statements: results, and all state that they leave behind, are those of eager.

They update tensors that they close over, read numbers from them again and again, make constants, take views, decide by
values of the device and of the host, catch errors, and change attributes, lists and dicts.
"""

from __future__ import annotations

import textwrap
import types
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pygraph
from tests import extent
from tests.sources import execute

TENSORS = ("x", "c", "a", "b", "m.w", "things[0]", "named['k']")
NUMBERS = ("2.0", "k", "n", "s")
# What can be in a graph.
OPERATIONS = (
    "a = {t} + {u}", "b = {t} * {r}", "{t}.add_({u})", "{t}.mul_({r})", "{t}.sub_(0.5)",
    "s = {t}.sum().item()", "a = a * {t}.view(-1)[0].item()", "b = b - s",
    "a = {t}.view(-1)", "b = {t}.detach()", "a = {t}.flip(0)", "b = {t}.clone()", "{t}[:1] = {u}[1:]",
    "c.fill_(2.0)", "c.copy_(x)", "counted.add_(1.0)", "a = a + counted[0].item()",
    "torch._foreach_mul_([{t}, {u}], 0.5)", "torch._foreach_add_([{t}, {u}], {r})",
    "m.saved = {t} * 2", "m.w = m.w + 1", "things[0] = things[0] * 2", "named['k'], things[0] = things[0], named['k']",
    "a = torch.rand_like({t})", "for _ in range(2):\n    {t}.add_({r})", "with torch.no_grad():\n    {t}.add_(1)",
)  # fmt: skip

# What reads numbers that it has updated.
READS = (
    "scalar.add_(1)\na = a + scalar.item()", "scalar.mul_(0.5)\nb = b + scalar.item()", "a = a * scalar.item()",
    "torch._foreach_add_([scalar, number], 1.0)\nb = b * number.item()", "number.add_(1)\na = a - number.item()",
    "made = torch.tensor([3.0, 1.0])\nmade.add_(counted)\nb = b + made[1].item()",
    "made = torch.tensor(3.0)\ntorch._foreach_add_([made, number], 1.0)\na = a + made.item()",
)  # fmt: skip

# What decides, asks for a value on the host, catches errors, or changes other state.
OTHERS = (
    "if {t}.sum() > 0:\n    {u}.add_(1)", "if {t}.mean() > s:\n    {u}.mul_(2)\nelse:\n    m.count += 1",
    "if scalar > 4:\n    scalar.sub_(2)", "if k > 1:\n    {t}.mul_(2)\nelse:\n    m.count += 1",
    "if n % 2 == 0:\n    {t}.add_({u})", "if m.flag:\n    {t}.add_(0.25)", "if len(things) > 2:\n    things.pop()",
    "m.flag = not m.flag", "m.total = m.total + {t}.sum().item()", "s = float({t}.max())", "{t}[n % 2] = {r}",
    "things.append({t} + 0)", "things.reverse()", "named['n'] = named.get('n', 0) + 1", "named['j'] = {t} * 1",
    "for _ in range(n % 3):\n    {t}.add_({r})",
    "try:\n    s = int({t}.sum())\nexcept RuntimeError:\n    s = -1.0",
    "try:\n    s = named['missing']\nexcept KeyError:\n    s = -2.0",
)  # fmt: skip


@st.composite
def sources(draw: st.DrawFn) -> str:
    """The source of a function of a tensor, a float and an int."""
    name, number = st.sampled_from(TENSORS), st.sampled_from(NUMBERS)
    operations = st.lists(st.sampled_from(OPERATIONS) | st.sampled_from(READS), min_size=2, max_size=8)
    others = st.lists(st.sampled_from(OTHERS), max_size=2)
    chosen = draw(st.permutations([*draw(operations), *draw(others)]))
    lines = [one.format(t=draw(name), u=draw(name), r=draw(number)) for one in chosen]
    body = "\n".join(["a, b, s = x * 1, x + 1, 1.5", *lines, "return [a, b, s]"])
    return f"def function(x, k, n):\n{textwrap.indent(body, '    ')}\n"


def module_of(source: str, device: torch.device) -> types.ModuleType:
    """A module with the function, and what it closes over."""
    module = types.ModuleType("program")
    held = types.SimpleNamespace(w=torch.tensor([1.0, 2.0]).to(device), flag=True, count=0, total=0.0, saved=None)
    vars(module).update(
        torch=torch, m=held, c=torch.tensor([3.0, 4.0]).to(device), counted=torch.tensor([1.0, 2.0]),
        scalar=torch.tensor(5.0).to(device), number=torch.tensor(1.0),
        things=[torch.ones(2).to(device)], named={"k": torch.full((2,), 5.0).to(device)},
    )  # fmt: skip
    execute(source, vars(module))
    return module


def history(module: types.ModuleType, function: Any, device: torch.device) -> list[Any]:
    """Results or kinds of errors of some calls, and what each has left behind."""
    torch.manual_seed(0)
    found: list[Any] = []
    for call, (k, n) in enumerate([(0.5, 0), (2.0, 1), (2.0, 2), (3.0, 1), (2.0, 1), (0.5, 4)]):
        x = torch.tensor([call - 2.0, 0.5]).to(device)
        try:
            result: Any = function(x, k, n)
        except Exception as error:  # which one, is compared
            result = type(error).__name__
        left = [x, vars(module.m), module.c, module.counted, module.scalar, module.number, module.things, module.named]
        found.append(plain([result, left]))
    return found


def plain(value: Any) -> Any:
    """A copy of a value in which tensors are lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def are_same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal, NaN to itself and floats but for rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other) or abs(one - other) <= 1e-5 * max(1.0, abs(one))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(are_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@settings(
    max_examples=extent.examples(25, 400), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(source=sources())
def test_programs_do_what_they_do_in_eager(device: torch.device, source: str) -> None:
    eager, fast = module_of(source, device), module_of(source, device)
    expected = history(eager, eager.function, device)
    found = history(fast, pygraph.jit(fast.function), device)
    for call, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert are_same(one, other), f"call {call} of\n{source}\neager  {one}\npygraph {other}"
