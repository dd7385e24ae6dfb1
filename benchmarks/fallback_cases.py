"""Functions that run eagerly, one for every kind of fallback, as `fallbacks.py` times them.

A kind is a function of a number of tensors or submodules that makes a `Case`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import pygraph

DEVICE = pygraph.default_device()


class Case(NamedTuple):
    """A function, the arguments of its next call, and the context of its calls."""

    fn: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    options: dict[str, Any] = {}  # noqa: RUF012  (of a NamedTuple)
    warm: int = 100
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fn: fn


KINDS: dict[str, Callable[[int], Case]] = {}


def kind(make: Callable[[int], Case]) -> Callable[[int], Case]:
    """Add a kind of fallback: a function of the number of tensors or submodules."""
    KINDS[make.__name__.replace("_", " ")] = make
    return make


def tensors(count: int, device: Any = DEVICE, **options: Any) -> tuple[torch.Tensor, ...]:
    """A number of small tensors."""
    return tuple(torch.ones(4, device=device, **options) for _ in range(count))


def always(*args: Any) -> Callable[[], tuple[Any, ...]]:
    """Pass equal arguments at every call."""
    return lambda: args


class Tower(torch.nn.Module):
    """A module of which a call runs few submodules, so that its guards are the cost of a call."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, **options) for _ in range(count))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first layer, and a question about a value."""
        x = self.layers[0](x)
        return x if int(x.sum()) > 0 else -x


# ---- functions that cannot be traced ---------------------------------------------------------------------------------


@kind
def branch_on_a_value(count: int) -> Case:
    """A Python `if` on an integer that is read from a tensor."""
    return Case(lambda *xs: xs[0] if int(xs[0].sum()) > 0 else xs[-1], always(*tensors(count)))


@kind
def value_of_a_tensor(count: int) -> Case:
    """`float()` of a tensor on the device."""
    return Case(lambda *xs: xs[0] if float(xs[0].sum()) > 0 else xs[-1], always(*tensors(count)))


@kind
def text_of_a_tensor(count: int) -> Case:
    """The text of a tensor."""
    return Case(lambda *xs: (xs[0], len(str(xs[0].shape)) + int(xs[0].sum())), always(*tensors(count)))


@kind
def state_changes(count: int) -> Case:
    """A list that grows, and whose length is read."""
    seen: list[int] = []

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        seen.append(len(seen))
        return xs[0] + 1

    return Case(fn, always(*tensors(count)))


@kind
def changes_at_every_call(count: int) -> Case:
    """A number that the function closes over changes at every call."""
    box = [0]

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        return xs[0] + 1 if box[0] >= 0 else xs[0]

    xs = tensors(count)

    def args() -> tuple[Any, ...]:
        box[0] += 1
        return xs

    return Case(fn, args, warm=200)


@kind
def past_the_budget(count: int) -> Case:
    """More kinds of calls than there may be graphs, none of which comes twice."""
    size = [0]
    x, rest = torch.ones(100_000, device=DEVICE), tensors(count - 1)

    def args() -> tuple[Any, ...]:
        size[0] += 1
        return (x[: size[0]], *rest)

    return Case(lambda *xs: xs[0].detach(), args, options={"max_graphs": 2})


@kind
def past_the_budget_in_turn(count: int) -> Case:
    """More kinds of calls than there may be graphs, that come again and again."""
    size = [0]
    x, rest = torch.ones(100_000, device=DEVICE), tensors(count - 1)

    def args() -> tuple[Any, ...]:
        size[0] = (size[0] + 1) % 50
        return (x[: size[0] + 1], *rest)

    return Case(lambda *xs: xs[0].detach(), args, options={"max_graphs": 2}, warm=200)


@kind
def nothing_to_record(count: int) -> Case:
    """A function whose operations all need the host."""
    return Case(lambda *xs: torch.nonzero(xs[0]), always(*tensors(count)))


# ---- arguments -------------------------------------------------------------------------------------------------------


@kind
def unhashable_argument(count: int) -> Case:
    """A set."""
    return Case(lambda s, *xs: xs[0] + 1, always({1}, *tensors(count)))


@kind
def unhashable_static_argument(count: int) -> Case:
    """An object that cannot be hashed, among the static arguments."""

    class Config:
        __hash__ = None  # type: ignore[assignment]

    return Case(lambda s, *xs: xs[0] + 1, always(Config(), *tensors(count)), options={"static_argnums": 0})


@kind
def tensor_subclass(count: int) -> Case:
    """A tensor of another class, last."""

    class Other(torch.Tensor):
        pass

    xs = tensors(count)
    return Case(lambda *xs: xs[0].detach(), always(*xs[:-1], xs[-1].as_subclass(Other)))


@kind
def numpy_array(count: int) -> Case:
    """An array, last."""
    return Case(lambda *xs: xs[0] + 1, always(*tensors(count), np.ones(3)))


@kind
def sparse_tensor(count: int) -> Case:
    """A sparse tensor, last."""
    return Case(lambda *xs: xs[0] + 1, always(*tensors(count), torch.eye(3, device="cpu").to_sparse()))


@kind
def cpu_tensors(count: int) -> Case:
    """Nothing on a device."""
    return Case(lambda *xs: xs[0] + 1, always(*tensors(count, "cpu")))


@kind
def several_devices(count: int) -> Case:
    """A result on the device and one on the CPU, of arguments on both."""
    return Case(lambda *xs: (xs[0].detach(), xs[-1] + 1), always(*tensors(count), torch.ones(3, device="cpu")))


@kind
def shared_memory(count: int) -> Case:
    """An argument lies in memory that the function closes over and updates."""
    buffer = torch.zeros(8, device=DEVICE)

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return xs[0].detach()

    return Case(fn, always(*tensors(count), buffer[:4]))


@kind
def shared_memory_of_a_known_call(count: int) -> Case:
    """An argument lies in memory that the function updates, in a kind of call that has a graph already."""
    buffer = torch.zeros(8, device=DEVICE)

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return xs[0].detach()

    rest = tensors(count)
    state = [0]

    def args() -> tuple[Any, ...]:
        state[0] += 1
        return (*rest, buffer[:4] if state[0] > 8 else rest[0].clone())

    return Case(fn, args)


@kind
def donated(count: int) -> Case:
    """A function that consumes an argument, and cannot be traced."""
    x = tensors(count)
    return Case(
        lambda y, *xs: xs[0] if xs[0].sum() > 0 else xs[-1], lambda: (x[0].detach(), *x), options={"donate_argnums": 0}
    )


# ---- surroundings ----------------------------------------------------------------------------------------------------


@kind
def inside_another_call(count: int) -> Case:
    """A finalizer, hook or operation makes the call."""
    from pygraph.process.reentrancy import here

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        here.inside = True
        try:
            yield
        finally:
            here.inside = False

    return Case(lambda *xs: xs[0].detach(), always(*tensors(count)), inside)


@kind
def below_a_dispatch_mode(count: int) -> Case:
    """A mode sees every operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return Case(lambda *xs: xs[0].detach(), always(*tensors(count)), Watching)


@kind
def inference_mode_and_dual_level(count: int) -> Case:
    """Forward-mode differentiation in inference mode."""

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with torch.autograd.forward_ad.dual_level(), torch.inference_mode():
            yield

    return Case(lambda *xs: xs[0] + 1, always(*tensors(count)), both)


@kind
def inside_vmap_refused(count: int) -> Case:
    """A call inside vmap that cannot be compiled."""
    xs = [torch.ones(3, 4, device=DEVICE) for _ in range(count)]

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        if float(torch.ones((), device="cpu").item()) > 0:
            return xs[0] * torch.ones(4, device=DEVICE).nonzero().sum()
        return xs[0]

    return Case(fn, always(*xs), wrap=lambda fn: torch.func.vmap(fn))


@kind
def differentiated_with_hooks(count: int) -> Case:
    """A call under autograd that puts a hook on a tensor."""

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        y = xs[0] * 2
        y.register_hook(lambda g: g)
        return y

    return Case(fn, always(*tensors(count, requires_grad=True)))


@kind
def differentiated_and_untraceable(count: int) -> Case:
    """A call under autograd that reads an integer."""
    return Case(lambda *xs: xs[0] * 2 if int(xs[0].sum()) > 0 else xs[-1], always(*tensors(count, requires_grad=True)))


@kind
def saved_tensors_hooks(count: int) -> Case:
    """A call under autograd while hooks see what is saved."""

    def around() -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    return Case(lambda *xs: xs[0] * 2, always(*tensors(count, requires_grad=True)), around)


@kind
def differentiated_forward_not_compiled(count: int) -> Case:
    """A call under autograd of which nothing runs as a graph."""
    return Case(lambda *xs: xs[0][torch.nonzero(xs[-1])[0]], always(*tensors(count, requires_grad=True)))


@kind
def differentiated_on_the_cpu(count: int) -> Case:
    """A call under autograd of tensors on the CPU."""
    return Case(lambda *xs: xs[0] * 2, always(*tensors(count, "cpu", requires_grad=True)))


@kind
def unsteady_step(count: int) -> Case:
    """A module that stores a cache that grows."""

    class Model:
        def __init__(self) -> None:
            self.cache = torch.ones(1, device=DEVICE)

        def __call__(self, *xs: torch.Tensor) -> torch.Tensor:
            self.cache = torch.cat([self.cache, xs[0][:1]])
            return xs[0].detach()

    return Case(Model(), always(*tensors(count)))


@kind
def step_as_it_is(count: int) -> Case:
    """A step of training whose loss decides."""
    x = tensors(count, requires_grad=True)

    def fn(*xs: torch.Tensor) -> float:
        x[0].grad = None
        loss = (x[0] * xs[0]).sum()
        loss.backward()
        return 1.0 if loss > 0 else 0.0

    return Case(fn, always(*tensors(count)))


@kind
def growing_object(count: int) -> Case:
    """An object that is passed, and that the function changes: a cache of keys and values."""

    class Cache:
        def __init__(self) -> None:
            self.keys = torch.ones(1, device=DEVICE)

    def fn(cache: Cache, *xs: torch.Tensor) -> torch.Tensor:
        cache.keys = torch.cat([cache.keys, xs[0][:1]])
        return xs[0].detach()

    cache = [Cache()]
    xs = tensors(count)

    def args() -> tuple[Any, ...]:
        if cache[0].keys.shape[0] > 16:
            cache[0] = Cache()
        return (cache[0], *xs)

    return Case(fn, args)


@kind
def new_object_at_every_call(count: int) -> Case:
    """An object that is made for each call."""

    class Options:
        def __init__(self) -> None:
            self.scale = 2.0

    xs = tensors(count)
    return Case(lambda o, *xs: xs[0] * o.scale, lambda: (Options(), *xs), warm=200)


# ---- modules ---------------------------------------------------------------------------------------------------------


def tower(count: int, **options: Any) -> Tower:
    """A tower on the device."""
    return Tower(count, device=DEVICE).requires_grad_(options.pop("requires_grad", False))


@kind
def module_that_branches(count: int) -> Case:
    """A module whose call decides by a value."""
    return Case(tower(10 if count == 1 else 300), always(*tensors(1)))


@kind
def module_that_branches_in_training(count: int) -> Case:
    """A module whose call decides by a value, with parameters that require grad."""
    return Case(tower(10 if count == 1 else 300, requires_grad=True), always(*tensors(1)))


@kind
def module_with_a_part_that_is_no_graph(count: int) -> Case:
    """A module of which one operation runs between graphs."""
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4, device=DEVICE) for _ in range(10 if count == 1 else 100)))
    module.requires_grad_(False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return self.inner(x[torch.nonzero(x > -1e9)[:, 0]])

    return Case(Model(), always(*tensors(1)), options={})
