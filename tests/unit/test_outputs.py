"""What a call returns and writes: views, aliases, arguments, ``out=``; always as in eager PyTorch."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fractions
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import pygraph

WRAPS: dict[str, Callable[[Any], Any]] = {
    "jit": pygraph.jit,
    "patched": lambda fn: pygraph.graphify(pygraph.indirect(pygraph.devicify(fn))),
    "copied": lambda fn: pygraph.graphify(pygraph.devicify(fn)),
}


def ones(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), device=device).to(dtype).view(shape)


def sharing(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Which tensors share memory, and at which distance."""
    found: list[tuple[int, int]] = []
    for tensor in tensors:
        start = tensor.untyped_storage().data_ptr()
        first = next(i for i, other in enumerate(tensors) if other.untyped_storage().data_ptr() == start)
        found.append((first, tensor.data_ptr() - tensors[first].data_ptr()))
    return found


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # out= given an argument
    "out": lambda x, y: torch.add(x, y, out=y),
    "out in place": lambda x, y: torch.mul(x, 2, out=x),
    "out of a matmul": lambda x, y: torch.mm(x, x, out=y),
    "out and more": lambda x, y: (torch.sin(x, out=y), y + 1, torch.cos(y)),
    "out to a view": lambda x, y: torch.add(x[0], 1, out=y[1]),
    "out read and written": lambda x, y: torch.sub(y, x, out=y).sum(),
    "out not returned": lambda x, y: (torch.exp(x, out=y), None)[1],
    "out twice": lambda x, y: (torch.add(x, 1, out=y), torch.add(y, 1, out=x)),
    "several outs": lambda x, y: torch.max(x, 0, out=(y[0], torch.empty(3, dtype=torch.long, device=x.device))),
    "out to a column": lambda x, y: torch.sum(x, 1, out=y[:, 1]),
    # in-place updates
    "updated": lambda x, y: x.add_(y),
    "updated through a view": lambda x, y: (x[1:].mul_(2), y)[1] + x,
    "both updated": lambda x, y: (x.copy_(y), y.zero_()),
    "updated and read before": lambda x, y: (x + 1, x.add_(1), x + 1),
    # outputs that are inputs, views of them, or share memory
    "the input": lambda x, y: x,
    "swapped": lambda x, y: (y, x),
    "views of an input": lambda x, y: (x[1:], x.t(), x.view(-1), x * y),
    "a view of an updated input": lambda x, y: (x.add_(1)[1:], x.t()),
    "views of one result": lambda x, y: ((z := x + y), z[1:], z.t(), z.view(-1)),
    "a result twice": lambda x, y: [(z := x * y), z],
    "parts of one result": lambda x, y: torch.chunk(x + y, 3),
    "an expanded result": lambda x, y: (x + y)[:1].expand(3, 3),
    "a result inside containers": lambda x, y: {"a": [x + y, {"b": (x - y,)}], "c": None, "d": 1},
    "nothing": lambda x, y: None,
    "empty": lambda x, y: (x[:0], x[:0] * 2, y),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_are_those_of_eager(device: torch.device, name: str, wrap: str) -> None:
    fn = FUNCTIONS[name]
    fast = WRAPS[wrap](fn)
    held: list[tuple[Any, Any]] = []
    for n in range(4):
        mine, eager = [[ones(device, 3, 3) + n, ones(device, 3, 3) * 2] for _ in range(2)]
        got, expected = fast(*mine), fn(*eager)
        check(got, expected, mine, eager)
        # Writing to a result shows wherever it does in eager.
        for result in (got, expected):
            for leaf in pytree.tree_leaves(result):
                if (
                    isinstance(leaf, torch.Tensor)
                    and leaf.numel()
                    and not leaf.is_inference()
                    and leaf.stride()[:1] != (0,)
                ):
                    leaf.mul_(2)
                    break
        check(got, expected, mine, eager)
        held.append((got, expected))
    for got, expected in held:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def check(got: Any, expected: Any, mine: list[torch.Tensor], eager: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, check_stride=True)
    torch.testing.assert_close(mine, eager, rtol=0, atol=0)
    all_mine = [*mine, *(leaf for leaf in pytree.tree_leaves(got) if isinstance(leaf, torch.Tensor) and leaf.numel())]
    all_eager = [
        *eager, *(leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor) and leaf.numel())
    ]  # fmt: skip
    assert sharing(all_mine) == sharing(all_eager)
    same = [[a is b for b in all_mine] for a in all_mine]
    assert same == [[a is b for b in all_eager] for a in all_eager]


@pytest.mark.parametrize("wrap", WRAPS)
def test_out_of_another_dtype_or_shape(device: torch.device, wrap: str) -> None:
    """Results are cast to ``out``; one of a wrong shape raises or resizes as in eager."""
    fast = WRAPS[wrap](lambda x, out: torch.add(x, 1, out=out))
    for dtype in (torch.float32, torch.float64):
        x, out = ones(device, 3), torch.zeros(3, dtype=dtype, device=device)
        assert fast(x, out) is out
        assert torch.equal(out, ones(device, 3, dtype=dtype) + 1)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_result_as_out_of_the_next_call(device: torch.device, wrap: str) -> None:
    fast = WRAPS[wrap](lambda x, out: (torch.add(x, out, out=out), out * 2))
    x, out = ones(device, 3, 3), torch.zeros(3, 3, device=device)
    x_eager, out_eager = x.clone(), out.clone()
    for _ in range(4):
        out, x = fast(x, out)
        out_eager, x_eager = torch.add(x_eager, out_eager, out=out_eager), out_eager * 2
        torch.testing.assert_close((x, out), (x_eager, out_eager), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", WRAPS)
def test_out_that_overlaps_an_argument(device: torch.device, wrap: str) -> None:
    fn = lambda x, out: torch.mul(x, 3, out=out)  # noqa: E731
    fast = WRAPS[wrap](fn)
    for _ in range(3):
        mine, eager = ones(device, 3, 3), ones(device, 3, 3)
        assert torch.equal(fast(mine[0], mine[1]), fn(eager[0], eager[1]))
        assert torch.equal(mine, eager)
        assert torch.equal(fast(mine[0], mine[0]), fn(eager[0], eager[0]))
        assert torch.equal(mine, eager)


LAZY: dict[str, Callable[..., Any]] = {
    "conjugated": lambda z: (z * 2).conj(),
    "real inverse": lambda z: torch.fft.ifft(z.real),
    "negated": lambda z: (z * 2).conj().imag,
    "conjugated, as it is, and a part": lambda z: ((y := z * 2), y.conj(), y.conj()[1:]),
    "only parts": lambda z: ((y := (z * 2).conj())[1:], y[:1]),
    "one of several": lambda z: (z.real + 1, (z * 2).conj(), z * 3),
    "read again": lambda z: ((y := (z * 2).conj()), y * 2),
    "of an argument": lambda z: (z.conj(), z.conj()[1:], z.t(), z * 2),
    "of an updated argument": lambda z: (z.mul_(2).conj(), z + 1),
    "updated through it": lambda z: (z.conj().mul_(2j), z + 1),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("wrap", [*WRAPS, "reused"])
def test_results_that_are_conjugated_when_they_are_read(device: torch.device, wrap: str, name: str) -> None:
    fn = LAZY[name]
    fast: Any = pygraph.jit(fn, reuse_outputs=True) if wrap == "reused" else WRAPS[wrap](fn)
    for step in range(4):
        z = torch.complex(ones(device, 3, 7) + step, ones(device, 3, 7) - step)
        again = z.clone()
        got, expected = [z, *pytree.tree_leaves(fast(z))], [again, *pytree.tree_leaves(fn(again))]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())
            assert a.is_conj() == b.is_conj()
        if wrap != "reused" and name != "negated":
            assert sharing(got) == sharing(expected)
    report = fast.explain().to_dict()
    assert report["kernels_in_graphs"] == report["kernels"] > 0, report["fallbacks"]


def test_a_conjugated_view_of_a_captured_tensor(device: torch.device) -> None:
    weight = torch.complex(ones(device, 3), ones(device, 3))
    fast = pygraph.jit(lambda x: (weight.conj(), weight, x * weight))
    for step in range(3):
        conjugated, same, product = fast(ones(device, 3) * step)
        assert same is weight
        assert conjugated.is_conj()
        assert conjugated.data_ptr() == weight.data_ptr()
        assert torch.equal(conjugated.resolve_conj(), weight.conj().resolve_conj())
        assert torch.equal(product, ones(device, 3) * step * weight)
    assert "conjugated view" in str(pygraph.trace(lambda x: (weight.conj(), x * 2))(ones(device, 3)))


# ---- what is returned besides tensors ---------------------------------------------------------------------------


class Box:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def method(self) -> None: ...


class ByValue(Box):
    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and other.value == self.value


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class Color(enum.Enum):
    RED = 1


KNOWN = Box()
KNOWN_SET = {1}
KNOWN_ARRAY = np.zeros(2)


def counter() -> Callable[[], int]:
    count = 0

    def count_up() -> int:
        nonlocal count
        count += 1
        return count

    return count_up


NEW: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": lambda x: np.zeros(2),
    "set": lambda x: {1, 2},
    "object": lambda x: Box(),
    "bytearray": lambda x: bytearray(b"ab"),
    "object that is hashed by value": lambda x: ByValue(1),
    "frozen dataclass of a list": lambda x: Frozen([1]),
    "frozen set of tensors": lambda x: frozenset({x * 2}),
    "function with variables": lambda x: counter(),
    "function of a tensor": lambda x: lambda: x * 2,
    "method": lambda x: Box().method,
    "method of a tensor": lambda x: (x * 2).sum,
    "partial": lambda x: functools.partial(print, 1),
    "iterator": lambda x: iter([1, 2]),
    "exception": lambda x: ValueError(),
}

SAME: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda x: None,
    "string": lambda x: "a" + str(len(x.shape)),
    "number": lambda x: 2**70,
    "type": lambda x: Box,
    "function": lambda x: len,
    "function made anew": lambda x: lambda: 1,
    "module": lambda x: torch,
    "enum": lambda x: Color.RED,
    "dtype": lambda x: x.dtype,
    "layout": lambda x: x.layout,
    "NumPy number": lambda x: np.float32(2),
    "frozen set": lambda x: frozenset({1, (2, "a")}),
    "frozen dataclass": lambda x: Frozen((1, "a", Color.RED)),
    "fraction": lambda x: fractions.Fraction(1, 3),
    "ellipsis": lambda x: ...,
    "slice": lambda x: slice(1, 2),
    "object that was there": lambda x: KNOWN,
    "set that was there": lambda x: KNOWN_SET,
    "array that was there": lambda x: KNOWN_ARRAY,
    "method of what was there": lambda x: KNOWN.method,
}


@pytest.mark.parametrize("name", NEW)
def test_an_object_made_anew_is_not_shared_among_calls(device: torch.device, name: str, native: bool) -> None:
    fast = pygraph.jit(lambda x: (x * 2, NEW[name](x)))
    x = ones(device, 3)
    results = [fast(x)[1] for _ in range(4)]
    assert len({id(result) for result in results}) == 4
    assert type(results[-1]) is type(NEW[name](x))
    assert "that it makes anew" in str(fast.explain())


@pytest.mark.parametrize("name", SAME)
def test_an_object_that_cannot_change_or_was_there_is_returned(device: torch.device, name: str, native: bool) -> None:
    fn = SAME[name]
    fast = pygraph.jit(lambda x: (x * 2, fn(x)))
    x = ones(device, 3)
    for _ in range(4):
        got, expected = fast(x)[1], fn(x)
        assert type(got) is type(expected)
        assert got is expected or got == expected or name == "function made anew"
    assert not fast.explain().to_dict()["fallbacks"]


def test_the_class_of_a_tensor_is_that_of_eager(device: torch.device, native: bool) -> None:
    fast = pygraph.jit(lambda x, k: (x * k, type(x), [x * 2, type(k)]))
    for _ in range(4):
        _, of_tensor, (_, of_number) = fast(ones(device, 3), 2.0)
        assert of_tensor is torch.Tensor
        assert of_number is float
    assert not fast.explain().to_dict()["fallbacks"]


def test_the_class_of_a_tensor_by_another_name_for_type(device: torch.device, native: bool) -> None:
    class_of = type
    fast = pygraph.jit(lambda x, k: (x * k, class_of(x), [x * 2, class_of(k)]))
    for _ in range(4):
        _, of_tensor, (_, of_number) = fast(ones(device, 3), 2.0)
        assert of_tensor is torch.Tensor
        assert of_number is float
    assert "is the class of a tensor or number" in str(fast.explain())


def test_an_object_among_the_arguments_is_returned(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, box: (x * 2, box, box.value))
    x, box = ones(device, 3), Box({1})
    for _ in range(4):
        got = fast(x, box)
        assert got[1] is box
        assert got[2] is box.value
    assert not fast.explain().to_dict()["fallbacks"]


def test_statistics_that_batch_norm_saves_are_those_of_the_device(device: torch.device) -> None:
    x, mean, var = (ones(device, *shape) for shape in ((4, 3), (3,), (3,)))

    def normalised(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.native_batch_norm(x, None, None, mean, var, False, 0.1, 1e-5)

    fast = pygraph.jit(normalised)
    for _ in range(2):
        for got, expected in zip(fast(x), normalised(x), strict=True):
            torch.testing.assert_close(got, expected)
    assert not fast.explain().to_dict()["fallbacks"]


# ---- containers of other classes ------------------------------------------------------------------------------------


class Output(collections.OrderedDict[str, Any]):
    """A dict that pytree knows without names of its items, like the outputs of diffusers."""


class Pair:
    """The same of a class that has no keys."""

    def __init__(self, parts: Any) -> None:
        self.parts = list(parts)


pytree.register_pytree_node(Output, lambda o: (list(o.values()), list(o)), lambda v, k: Output(zip(k, v, strict=True)))
pytree.register_pytree_node(Pair, lambda pair: (pair.parts, None), lambda parts, _: Pair(parts))


def test_containers_without_names_for_their_items(device: torch.device, native: bool) -> None:
    def fn(given: Any) -> Any:
        return Output(sample=given["x"] * 2, rest=Pair([given["pair"].parts[0] + 1, {"size": 3, "none": None}]))

    fast = pygraph.jit(fn)
    for step in range(4):
        given = Output(x=ones(device, 3) * step, pair=Pair([ones(device, 2) * step]))
        got, expected = fast(given), fn(given)
        assert type(got) is Output
        assert list(got) == ["sample", "rest"]
        assert type(got["rest"]) is Pair
        torch.testing.assert_close(pytree.tree_leaves(got), pytree.tree_leaves(expected), rtol=0, atol=0)
    assert not fast.explain().to_dict()["fallbacks"]
    program = pygraph.trace(fn)(given)
    assert [node.path for node in program.inputs] == ["args[0]['x']", "args[0]['pair'][0]"]
    assert [node.path for node in program.outputs][:2] == ["result['sample']", "result['rest'][0]"]


def test_gradients_through_containers_without_names_for_their_items(device: torch.device) -> None:
    module = torch.nn.Linear(2, 2).to(device)

    class Model(torch.nn.Module):
        def forward(self, given: Any) -> Any:
            return Output(loss=module(given["x"]).sum())

    def step(x: torch.Tensor) -> Any:
        out = Output(loss=module(x).sum())
        out["loss"].backward()
        return out

    x = ones(device, 3, 2)
    fast, whole = pygraph.jit(Model()), pygraph.jit(step)
    for run in (lambda: fast(Output(x=x))["loss"].backward(), lambda: whole(x)):
        for _ in range(3):
            module.zero_grad()
            run()
            assert module.bias.grad is not None
            assert module.bias.grad.tolist() == [3.0, 3.0]
    assert not fast.explain().to_dict()["fallbacks"]
    assert not whole.explain().to_dict()["fallbacks"]


# ---- objects with tensors -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Prediction:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    names: list[str] = dataclasses.field(default_factory=list[str])
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Compact:
    first: torch.Tensor
    rest: Any


class Gaussian:
    """As outputs of autoencoders are: made by code that needs tensors, with methods."""

    def __init__(self, moments: torch.Tensor) -> None:
        assert moments.shape[-1] % 2 == 0
        self.mean, self.deviation = moments.chunk(2, -1)
        self.kind = "diagonal"
        self.__dict__["size"] = moments * 2  # beside a property of that name

    @property
    def size(self) -> int:
        return self.mean.numel()

    def mode(self) -> torch.Tensor:
        return self.mean


CONFIG = Box([1])
MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": lambda x: Prediction(x * 2, x.sum(), ["a"]),
    "frozen dataclass": lambda x: Frozen(x * 2),
    "frozen dataclass of containers": lambda x: Frozen({"a": [x * 2, None], "b": (x, 1.5)}),
    "slots": lambda x: Compact(x * 2, {"k": x + 1}),
    "nested": lambda x: [Prediction(x, inner=Compact(x + 1, Box(x + 2)))],
    "namespace": lambda x: types.SimpleNamespace(y=x * 2, n=3),
    "methods": lambda x: Gaussian(torch.cat([x, x * 2], -1)),
    "with what was there": lambda x: (Prediction(x * 2, inner=CONFIG), CONFIG),
    "argument": lambda x: Frozen(x),
    "view of an argument": lambda x: Frozen(x[:2]),
    "distribution": lambda x: torch.distributions.Normal(x * 2, x + 1, validate_args=False),
}


def described(value: Any) -> Any:
    """All that is in an object, to be compared."""
    if isinstance(value, (list, tuple)):
        return [type(value), *map(described, value)]
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Compact):
        return [Compact, described(value.first), described(value.rest)]
    return [type(value), described(vars(value))] if hasattr(value, "__dict__") and value is not CONFIG else value


@pytest.mark.parametrize("name", MADE)
def test_an_object_with_tensors_is_made_anew(device: torch.device, name: str, native: bool) -> None:
    fn = MADE[name]
    fast = pygraph.jit(lambda x: (x * 2, fn(x)))
    results: list[Any] = []
    for step in range(5):
        x = ones(device, 4) * step
        results.append(fast(x)[1])
        assert described(results[-1]) == described(fn(x))
        if name == "argument":
            assert results[-1].value is x
    assert [described(result) for result in results] == [described(fn(ones(device, 4) * step)) for step in range(5)]
    assert len({id(result) for result in results}) == 5
    assert not fast.explain().to_dict()["fallbacks"]
    assert fast.cache_info().captures == 1


@pytest.mark.parametrize("native_", [False, True], ids=["in a step", "outside"])
def test_gradients_through_an_object_with_tensors(device: torch.device, native_: bool) -> None:
    layer = torch.nn.Linear(4, 4).to(device)

    def forward(x: torch.Tensor) -> Prediction:
        y = layer(x)
        return Prediction(y, y.square().mean(), ["a"], inner=[Compact(y * 2, CONFIG)])

    def step(x: torch.Tensor) -> Prediction:
        layer.zero_grad()
        out = forward(x)
        out.loss.backward()  # pyright: ignore[reportOptionalMemberAccess]
        return out

    fast = pygraph.jit(forward if native_ else step)
    for number in range(5):
        x = ones(device, 2, 4) * number / 8
        out: Any = fast(x)
        if native_:
            layer.zero_grad()
            (out.loss + out.inner[0].first.sum()).backward()
        got = [out.logits, out.loss, out.inner[0].first, layer.weight.grad]
        assert out.inner[0].rest is CONFIG
        assert out.names == ["a"]
        layer.zero_grad()
        expected = forward(x)
        (expected.loss + (expected.inner[0].first.sum() if native_ else 0)).backward()
        torch.testing.assert_close(got, [expected.logits, expected.loss, expected.inner[0].first, layer.weight.grad])
    assert not fast.explain().to_dict()["fallbacks"]


def test_objects_that_cannot_be_taken_apart(device: torch.device) -> None:
    """One that comes twice, or is part of itself, would be several."""

    def twice(x: torch.Tensor) -> Any:
        box = Box(x * 2)
        return box, box

    def cycle(x: torch.Tensor) -> Any:
        box = Box(x * 2)
        box.value = [box.value, box]
        return box

    for fn in (twice, cycle):
        fast = pygraph.jit(fn)
        for _ in range(3):
            got = fast(ones(device, 3))
        if fn is twice:
            assert got[0] is got[1]
        else:
            assert got.value[1] is got
        assert "that it makes anew" in str(fast.explain())


def test_an_object_with_tensors_that_was_there(device: torch.device) -> None:
    weight = ones(device, 3).float().requires_grad_()
    known = Box(weight.detach() * 2)
    fast = pygraph.jit(lambda x: (x * weight, known))
    for _ in range(4):
        out, box = fast(ones(device, 3))
        assert box is known
        out.sum().backward()
    with torch.no_grad():
        for _ in range(4):
            assert fast(ones(device, 3))[1] is known


VIEWS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "select": lambda x, k: x.select(0, k),
    "narrow": lambda x, k: x.narrow(0, k, 1),
    "start": lambda x, k: x[k:],
    "stop": lambda x, k: x[:k],
    "of a view": lambda x, k: x.t().select(1, k)[1:],
    "of which there is a view": lambda x, k: x.narrow(0, k, 1).narrow(1, k, 1)[0],
    "of fewer": lambda x, k: x[:, :2].reshape(8)[k : k + 2].view(2, 1),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_views_by_a_number_that_is_read_from_a_tensor(
    device: torch.device, view: str, whole: bool, native: bool
) -> None:
    """The number is another one at every call, and so is the view."""

    def function(x: torch.Tensor, k: torch.Tensor) -> Any:
        y = x * 2 + 1
        part = VIEWS[view](y, k.item())
        return (part, x.sigmoid(), y) if whole else (part, x.sigmoid())

    fast = pygraph.jit(function)
    held: list[tuple[Any, Any]] = []
    for number in (0, 1, 2, 1, 0):
        x = torch.arange(12.0, device=device).view(4, 3) * (number + 1)
        k = torch.tensor(number, device=device)
        held.append((fast(x, k), function(x, k)))
        for results in held[-1]:
            results[0].add_(1)  # which is seen in what it is a view of
    for got, expected in held:
        torch.testing.assert_close(got, expected)
    assert whole or fast.cache_info().captures > 0  # which results share memory, and how, is part of a Program


VIEWS_WITHOUT_ELEMENTS: dict[str, Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]] = {
    "first": lambda rows: (rows[1][1:], rows[1], rows[0]),
    "second": lambda rows: (rows[0], rows[1][1:], rows[1]),
    "last": lambda rows: (rows[1], rows[0], rows[0][1:]),
    "alone": lambda rows: (rows[0][1:], rows[0]),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("views", VIEWS_WITHOUT_ELEMENTS)
def test_views_without_elements_leave_the_others_together(wrap: str, views: str, device: torch.device) -> None:
    """They were given memory of their own, and so was what came after them, or all results of one memory."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return VIEWS_WITHOUT_ELEMENTS[views](list((x * 2).split(1)))

    wrapped = WRAPS[wrap](fn)
    for _ in range(3):
        x = ones(device, 2, 3)
        got, expected = wrapped(x), fn(x)
        assert len({one.untyped_storage().data_ptr() for one in got}) == 1
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert one.storage_offset() == other.storage_offset()
