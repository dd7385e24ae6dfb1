"""Random generators that a function passes to operations: found, watched during a trace, and inputs of its Program.

For the time of a trace, a substitute is stored wherever such a generator was found. It refuses to be seeded or asked
for its state, which a replay would not repeat. Operations on fakes move no generator.
"""

# Generators and their methods are torch._C's; checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any, Final

import torch
from torch import fx

from pygraph.errors import TraceError, describe
from pygraph.guards.iterators import is_generator
from pygraph.ir.descriptors import CapturedGenerator
from pygraph.ir.program import Program

SEED_BEFORE = "Seed the generator before the call."

_Generator: Final[Any] = torch._C.Generator


class WatchedGenerator(_Generator):
    """A substitute for a generator of the caller's, of the same device.

    Args:
        original: The generator.
        check: Raises an error if the traced function is asking, and not other code in another thread.
    """

    original: torch.Generator
    check: Callable[[], None]

    def __new__(cls, original: torch.Generator, check: Callable[[], None]) -> WatchedGenerator:  # noqa: D102
        on_cuda = original.device.type == "cuda"
        made = _Generator.__new__(cls, original.device) if on_cuda else _Generator.__new__(cls)
        made.original, made.check = original, check
        if on_cuda:
            # What another thread draws from it meanwhile is drawn from the original.
            _Generator.graphsafe_set_state(made, original)
        return made

    def __init__(self, original: torch.Generator, check: Callable[[], None]) -> None:
        pass

    @property
    def device(self) -> torch.device:
        """The device of the original."""
        return self.original.device

    def __hash__(self) -> int:
        return hash(self.original)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original


def _asking(name: str) -> Callable[..., Any]:
    """A method that reads or sets the state."""

    def method(self: WatchedGenerator, *args: Any) -> Any:
        self.check()
        return getattr(self.original, name)(*args)

    return method


for _name in (
    "manual_seed", "seed", "initial_seed", "get_state", "set_state", "get_offset", "set_offset", "clone_state",
    "graphsafe_get_state", "graphsafe_set_state", "__reduce__", "__reduce_ex__",
):  # fmt: skip
    if hasattr(_Generator, _name):
        setattr(WatchedGenerator, _name, _asking(_name))


class _Here(threading.local):
    generators: tuple[torch.Generator, ...] = ()


_here = _Here()


@contextlib.contextmanager
def inputs_known(program: Program) -> Generator[None, None, None]:
    """A block that runs the nodes of a Program, perhaps in a trace: they draw from generators that are inputs of it.

    No code of the user's runs there, which might seed them.
    """
    before = _here.generators
    _here.generators = tuple(one.value for one in program.inputs if isinstance(one, CapturedGenerator))
    try:
        yield
    finally:
        _here.generators = before


class ExplicitGenerators:
    """The generators that operations of a traced function draw from.

    Args:
        watched: The substitutes for generators that were found before the trace.

    Attributes:
        found: An input for each generator that was drawn from, by the address of the generator that operations see.
    """

    def __init__(self, watched: dict[int, WatchedGenerator]) -> None:
        self._watched = watched
        self.found: dict[int, CapturedGenerator] = {}

    def check(self, generator: Any) -> None:
        """Refuse a draw that a replay would not repeat from this generator, or note the generator as an input."""
        if generator._cdata in self.found:
            return
        substituted = (one.original for one in self._watched.values() if one._cdata == generator._cdata)
        known = (one for one in _here.generators if one._cdata == generator._cdata)  # pyright: ignore
        original = next(substituted, next(known, None))
        if original is None:
            raise TraceError("it draws from a generator that it has made, or that was not found before the call")
        if original.device.type == "cpu":
            raise TraceError("it draws from a generator of its own on the host")
        others = [one.value for one in self.found.values()]
        if original.device.type == "cuda":
            others.append(torch.cuda.default_generators[original.device.index])
        if any(_share_state(original, other) for other in others):
            raise TraceError("it draws from two generators that share a state")
        self.found[generator._cdata] = CapturedGenerator(f"generator_{len(self.found)}", original)


def _share_state(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether both are the same generator to the device, as after ``graphsafe_set_state`` on CUDA."""
    if one.device.type != "cuda" or one.initial_seed() != other.initial_seed():
        return False
    offset = one.get_offset()
    if other.get_offset() != offset:
        return False
    one.set_offset(offset + 4)  # of which it must be a multiple
    try:
        return other.get_offset() != offset
    finally:
        one.set_offset(offset)


def is_watched(value: object) -> bool:
    """Whether a trace has a substitute for a value: a generator, but of no class of a user's, and no default one."""
    made_by_torch = type(value).__module__.startswith(("torch.", "pygraph."))
    return is_generator(value) and made_by_torch and type(value) is not WatchedGenerator and not is_default(value)


def is_default(generator: Any) -> bool:
    """Whether a generator is a device's default one, from which operations draw in any case."""
    defaults: tuple[Any, ...] = (torch.default_generator, *torch.cuda.default_generators)
    return generator._cdata in {one._cdata for one in defaults}


def without_default(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an operation on CUDA, without its default generator."""
    if not any(map(is_generator, (*args, *kwargs.values()))):
        return args, kwargs

    def explicit(value: Any) -> Any:
        return None if is_generator(value) and value.device.type == "cuda" and is_default(value) else value

    return tuple(map(explicit, args)), {name: explicit(value) for name, value in kwargs.items()}


def lift_generators(call: str, module: fx.GraphModule, found: dict[int, CapturedGenerator]) -> list[CapturedGenerator]:
    """Turn attributes of a graph that are generators into placeholders, after all others; returns their descriptors.

    Raises:
        TraceError: A branch of control flow draws from one. Its graph has the inputs that the operation passes.
    """
    for part in module.modules():
        if part is not module and any(map(is_generator, vars(part).values())):
            raise TraceError(describe(call, "a branch of control flow draws from a generator of its own"))
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    lifted: dict[CapturedGenerator, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = getattr(module, name)
        if not is_generator(value):
            continue
        descriptor = found[value._cdata]
        if descriptor not in lifted:
            last = [*placeholders, *lifted.values()][-1:]
            with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
                lifted[descriptor] = graph.placeholder(descriptor.name)
        node.replace_all_uses_with(lifted[descriptor])
        graph.erase_node(node)
        if not graph.find_nodes(op="get_attr", target=name):
            delattr(module, name)
    return list(lifted)
