"""One case of the conformance of zero-copy replay: one sample of one operator, against eager PyTorch.

The operator is a function of every tensor in its sample. It is captured with one set of tensors, whose memory is then
filled with NaN (integers: zero), and called again with tensors at other addresses and of other values. A replay that
still reads what was captured gives NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from conformance_tensors import Mismatch, aliases, clones, compare, plain, poison, same_bits, same_layout
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

import pygraph

CLASSES = (
    "wrong", "error", "copied", "partly", "not capturable", "zero-copy", "no device work", "skipped",
)  # fmt: skip
"""Outcomes of a case, the most important first."""

DTYPES = ("float32", "bfloat16", "int64")

# Their results are memory as it was found, of which only the layout is defined.
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)

_ROUNDS = 3
"""Calls on fresh tensors after the first."""

# Sums in no fixed order (atomic ones, on a GPU) often repeat themselves for a few calls.
_REPEATS = (4, 200)
"""How often eager is called again where a result is not the same: few calls first, as most show it at once."""


class DeviceLostError(Exception):
    """The device reports an error from which this process cannot recover, such as an illegal access."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One sample of an operator as a function of its tensors.

    Attributes:
        call: Takes the tensors, returns what the operator returns.
        sets: Tensors of the same layout and other values, one list per seed; the first belong to the sample.
    """

    call: Callable[..., Any]
    sets: tuple[list[torch.Tensor], ...]


class InPlace:
    """The in-place variant of an operator, described as the operator itself is."""

    def __init__(self, operator: Any) -> None:
        self.op = operator.inplace_variant
        self.supported_dtypes = operator.supported_dtypes
        self._operator = operator

    def sample_inputs_func(self, _: Any, *args: Any) -> Iterator[Any]:
        """The samples whose first argument can take the result."""
        for sample in self._operator.sample_inputs_func(self._operator, *args):
            if isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:
                yield sample


def load_operators() -> dict[str, Any]:
    """PyTorch's own operator descriptions (``op_db``) by name, with a variant's name after a dot.

    In-place variants end in ``_``.
    """
    try:
        import expecttest  # noqa: F401  # pyright: ignore
    except ModuleNotFoundError:
        # torch.testing's helpers import it for a base class of tests, of which there are none here.
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # pyright: ignore
        sys.modules["expecttest"] = stub
    with _same_hypothesis_profile():
        from torch.testing._internal import common_methods_invocations as descriptions  # checked with torch 2.11, 2.13

    # Random operators are described with a seed of their own inside; here the seed is set before each call.
    descriptions.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # pyright: ignore
    found: dict[str, Any] = {}
    for op in descriptions.op_db:
        found[".".join(filter(None, (op.name, op.variant_test_name)))] = op
        if op.inplace_variant is not None and not op.name.endswith("_"):
            found[".".join(filter(None, (f"{op.name}_", op.variant_test_name)))] = InPlace(op)
    return found


@contextlib.contextmanager
def _same_hypothesis_profile() -> Generator[None, None, None]:
    """Keep the profile that is loaded, for which torch.testing's helpers load one of their own."""
    hypothesis = sys.modules.get("hypothesis")
    if hypothesis is None:
        yield
        return
    name, profile = hypothesis.settings.get_current_profile_name(), hypothesis.settings.default
    try:
        yield
    finally:
        hypothesis.settings.register_profile(name, profile)
        hypothesis.settings.load_profile(name)


def supports(operator: Any, device_type: str, dtype: str) -> bool:
    """Whether the operator's description claims to support a dtype; the emulated device runs CPU kernels."""
    return getattr(torch, dtype) in operator.supported_dtypes("cuda" if device_type == "cuda" else "cpu")


# -- making cases -------------------------------------------------------------------------------------------------


def samples(
    operator: Any,
    device: torch.device,
    dtype: torch.dtype,
    count: int | None,
    seed: int,
    *,
    requires_grad: bool = False,
) -> Iterator[Any]:
    """The first samples of an operator, or all if ``count`` is None; other seeds give other values."""
    # Not by `sample_inputs`, which reads the source lines of all frames of the stack, to name a test.
    found = iter(operator.sample_inputs_func(operator, device, dtype, requires_grad))
    for index in itertools.count() if count is None else range(count):
        _seed_all(1000 * seed + index)
        try:
            yield next(found)
        except StopIteration:
            return


def cases(operator: Any, device: torch.device, dtype: torch.dtype, count: int) -> Iterator[Case]:
    """The first samples of an operator as cases, with values of other seeds where these have the same layout."""
    seeds = [samples(operator, device, dtype, count, seed) for seed in range(_ROUNDS)]
    for same in itertools.zip_longest(*seeds):
        flat = [None if s is None else pytree.tree_flatten((s.input, s.args, s.kwargs)) for s in same]
        if flat[0] is None:
            return
        leaves, structure = flat[0]
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        sets = [[leaves[place] for place in places]]
        for other in flat[1:]:
            usable = other is not None and other[1] == structure and same_layout(leaves, other[0])
            sets.append([other[0][place] for place in places] if usable else sets[0])
        yield Case(_as_function(operator.op, structure, leaves, places), tuple(sets))


def _as_function(operation: Any, structure: pytree.TreeSpec, leaves: Sequence[Any], places: list[int]) -> Any:
    """The operation as a function of its sample's tensors; everything else is closed over."""
    others = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(others)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, structure)
        return operation(first, *args, **kwargs)

    return call


def _seed_all(seed: int) -> None:
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # without what that queues for CUDA and others, each time with a formatted stack, which takes a millisecond
        torch.default_generator.manual_seed(seed)
        torch.random._seed_custom_device(seed)  # checked with torch 2.11 and 2.13
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# -- running ------------------------------------------------------------------------------------------------------


def run_case(name: str, case: Case, mechanism: Any = "auto") -> dict[str, Any]:
    """Capture a case, poison the captured tensors, call it on other tensors, and compare each call with eager.

    Returns:
        A record: ``class`` (of `CLASSES`), ``reasons``, ``exact`` and the counts of ``explain()``.

    Raises:
        DeviceLostError: This process cannot use the device any more.
    """
    try:
        eager = [eager_call(case, tensors) for tensors in case.sets]
    except Exception as error:  # the sample is at fault, or the device does not implement the operator
        check_device(error)
        return {"class": "skipped", "reasons": [f"eager: {first_line(error)}"]}
    return _run(name, case, eager, mechanism)


def eager_call(case: Case, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Result and arguments after an eager call on copies."""
    arguments = clones(tensors)
    _seed_all(7)
    return case.call(*arguments), arguments


def _run(name: str, case: Case, eager: list[tuple[Any, list[torch.Tensor]]], mechanism: Any) -> dict[str, Any]:
    fast = pygraph.graphify(pygraph.indirect(pygraph.devicify(case.call), mechanism=mechanism))
    check = Check(name.partition(".")[0] not in UNINITIALISED)
    report: dict[str, Any] = {}
    try:
        check_calls(case, eager, fast, check, 1 + _ROUNDS)
        report = _report(fast)
        ended, reasons = classify(report)
    except Mismatch as error:
        ended, reasons = "wrong", [str(error)]
        report = report or _report(fast)
    except Exception as error:
        check_device(error)
        ended, reasons = "error", [f"{type(error).__name__}: {first_line(error)}"]
    finally:
        fast.cache_clear()
    counts = {key: report[key] for key in ("kernels", "kernels_in_graphs", "nodes", "patched_nodes") if key in report}
    bytes_copied = report.get("bytes_copied_per_replay", 0)
    notes = {"note": check.note} if check.note else {}
    return {"class": ended, "reasons": reasons, "exact": check.exact, "bytes": bytes_copied, **counts, **notes}


def check_calls(
    case: Case, eager: list[tuple[Any, list[torch.Tensor]]], fast: Callable[..., Any], check: Check, turns: int
) -> None:
    """Call a transformed function with each set of tensors in turn, the first being poisoned; compare with eager.

    Raises:
        Mismatch: A result, argument or alias differs from eager, or a result has changed after it was returned.
    """
    held: list[tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = []
    for turn in range(turns):
        which = turn % len(case.sets)
        arguments = clones(case.sets[which])
        _seed_all(7)
        result = fast(*arguments)
        check(f"call {turn}", case, which, eager[which], result, arguments)
        taken = aliases(result, arguments)
        own = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        held.append((arguments, [(t, plain(t)) for t, alias in zip(own, taken, strict=True) if alias is None]))
        if turn == 0:
            poison(arguments)
    if check.values:
        for turn, (_, results) in enumerate(held):
            if not all(same_bits(plain(tensor), before) for tensor, before in results):
                raise Mismatch(f"the result of call {turn} changed after it was returned")
    _synchronise(case)


SPREADS = ("none", "rounding", "arbitrary")
"""How much eager may differ from itself, least first."""


class Check:
    """Compare calls with eager; a difference counts unless eager does not repeat itself either."""

    def __init__(self, values: bool, strides: bool = True) -> None:
        self.values = values
        self.strides = strides
        self.exact = True
        self.note = "" if values else "uninitialised memory: layout only"

    def __call__(
        self, what: str, case: Case, which: int, eager: tuple[Any, list[torch.Tensor]], result: Any, arguments: Any
    ) -> None:
        expected, expected_arguments = eager
        try:
            self._once(what, result, arguments, eager)
        except Mismatch:
            spread: list[str] = []
            for turns in _REPEATS:
                spread = self._spread(case, which, eager, turns)
                with contextlib.suppress(Mismatch):
                    self._once(what, result, arguments, eager, spread)
                    break
            kinds = [kind for kind in SPREADS[1:] if kind in spread]
            if not kinds:
                raise
            self.exact = False
            self.note = f"eager does not repeat itself ({', '.join(kinds)})"
            self._once(what, result, arguments, eager, spread)
        if aliases(result, arguments) != aliases(expected, expected_arguments):
            got, wanted = aliases(result, arguments), aliases(expected, expected_arguments)
            raise Mismatch(f"{what}: results lie in the memory of arguments {got} instead of {wanted}")

    def _once(self, what: str, result: Any, arguments: Any, eager: Any, spread: Sequence[str] = ()) -> None:
        expected, expected_arguments = eager
        count = len(pytree.tree_leaves(expected))
        results, others = spread[:count], spread[count:]
        told: dict[str, Any] = {"values": self.values, "strides": self.strides}
        self.exact &= compare(result, expected, f"{what}, result", **told, spread=results)
        self.exact &= compare(arguments, expected_arguments, f"{what}, arguments", **told, spread=others)

    def _spread(self, case: Case, which: int, eager: Any, turns: int) -> list[str]:
        """How much eager differs from itself over so many calls, per leaf of result and arguments."""
        wanted = pytree.tree_leaves(eager)
        spread = ["none"] * len(wanted)
        for turn in range(turns):
            if turn == 1:
                scribble(case)
            with filled_memory() if turn == 0 else contextlib.nullcontext():
                again = pytree.tree_leaves(eager_call(case, case.sets[which]))
            for index, (a, b) in enumerate(zip(again, wanted, strict=True)):
                spread[index] = max(spread[index], _difference(a, b), key=SPREADS.index)
        return spread


def _difference(a: Any, b: Any) -> str:
    """Whether two leaves are the same, close or neither."""
    try:
        return "none" if compare(a, b, "") else "rounding"
    except Mismatch:
        try:
            compare(a, b, "", spread=["rounding"])
        except Mismatch:
            return "arbitrary"
        return "rounding"


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Have torch fill what it allocates, so that results that nothing was written to show.

    In ordinary calls they can repeat themselves for a while, as they get the same memory again.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operators that have no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def scribble(case: Case) -> None:
    """Write something else into the memory that small results will get, which may still be filled as above."""
    for device in {tensor.device for tensors in case.sets for tensor in tensors}:
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in (512, 4096) for _ in range(256)]
        for number, block in enumerate(blocks):
            block.fill_(1 + number % 250)


def _report(fast: Any) -> dict[str, Any]:
    return {**fast.explain().to_dict(), "replays": fast.cache_info().hits}


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _synchronise(case: Case) -> None:
    if any(tensor.is_cuda for tensor in case.sets[0]):
        torch.cuda.synchronize()


def check_device(error: BaseException) -> None:
    """Raise DeviceLostError if the device does not answer any more after ``error``."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError as lost:
        raise DeviceLostError(f"{first_line(error)} (then: {first_line(lost)})") from lost


def classify(report: dict[str, Any]) -> tuple[str, list[str]]:
    """The class of a case whose results are right, and why, given ``explain().to_dict()``.

    >>> counts = {"kernels": 2, "kernels_in_graphs": 2, "nodes": 2, "bytes_copied_per_replay": 0, "fallbacks": []}
    >>> classify(counts)
    ('zero-copy', [])
    >>> classify({**counts, "kernels_in_graphs": 0, "fallbacks": [{"what": "aten.sum", "reason": "…"}]})
    ('not capturable', ['aten.sum: …'])
    """
    reasons = list(dict.fromkeys(_fallback_text(f["what"], f["reason"]) for f in report["fallbacks"]))
    replays = report.get("replays", _ROUNDS)
    if report["bytes_copied_per_replay"]:
        return "copied", reasons or ["no reason given"]
    if report["kernels_in_graphs"] == 0:
        if report["kernels"] == 0 and not reasons:
            return "no device work", []
        return "not capturable", reasons or ["no reason given"]
    if replays < _ROUNDS:  # what was captured last has not been replayed, or not on other tensors
        return "not capturable", [f"{_ROUNDS - replays} of {_ROUNDS} later calls capture it anew"]
    if report["nodes"] == 0:
        return "no device work", reasons
    if report["kernels_in_graphs"] < report["kernels"]:
        return "partly", reasons or ["no reason given"]
    return "zero-copy", reasons


def _fallback_text(what: str, reason: str) -> str:
    """One line for a fallback, without the place in this program that a trace ends at."""
    reason = re.sub(r"^trace\(call\)\(…\): | From \S+:\d+\.$| \(unhinted.*", "", reason)
    what = what.removeprefix("the call").strip()
    text = f"{what}: {reason}" if what else reason
    return text if len(text) <= 160 else f"{text[:159]}…"
