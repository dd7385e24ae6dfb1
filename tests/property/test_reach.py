"""The strategies reach what they claim: features of a fixed number of draws, counted while the functions run."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.utils import _pytree as pytree

import pygraph
from tests.property.strategies import (
    DATA_DEPENDENT,
    NUMBER_KINDS,
    OPERATIONS,
    STACKS,
    AliasInput,
    Case,
    NumberInput,
    Pool,
    Step,
    cases,
    is_writable,
    stacks,
)

pytestmark = pytest.mark.slow  # what they reach changes only with them

DRAWS = 400

# feature: at least this many of the draws
EXPECTED = {
    "empty argument": 40,
    "0-d argument": 10,
    "non-contiguous argument": 30,
    "expanded argument": 10,
    "misaligned argument": 20,
    "overlapping arguments": 20,
    "the same tensor twice": 10,
    "an argument is written": 30,
    "a view of an argument is written": 3,
    "overlapping arguments, one written": 5,
    "a closed-over tensor is written": 10,
    "module state is written": 5,
    "random draw": 30,
    "data-dependent step": 10,
    "a result is an argument": 40,
    "a result is a view of an argument": 10,
    "results share memory": 30,
    "a result is empty": 20,
    "a result is a number": 5,
    "a live number is used": 30,
    "closed-over tensor": 80,
    "module in train mode": 3,
    "nested results": 30,
    "eager raises": 0,
    "cannot be traced": 0,
}
AT_MOST = {"eager raises": 20, "cannot be traced": 40, "nothing computed": 130}


@functools.cache
def reached(device: torch.device) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()

    @seed(0)
    @settings(max_examples=DRAWS, phases=(Phase.generate,), database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases(), stacks)
    def draw(case: Case, stack: Any) -> None:
        counts.update(features(case, device) | {f"stack {stack.names}"})

    draw()
    return counts


def features(case: Case, device: torch.device) -> set[str]:
    found: set[str] = set()

    def spy(op: str, step: Step, pool: Pool) -> None:
        found.add(f"step {op}")

    fn = case.function(device, spy)
    args = case.arguments(device)
    tensors = [
        leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
    ]
    contents = [_bits(tensor) for tensor in tensors]
    count = fn.state.module.count.clone() if fn.state.module is not None else None
    versions = [tensor._version for tensor in fn.state.tensors]
    torch.manual_seed(0)
    generator = _random_state(device)
    with torch.no_grad():
        try:
            result = fn(*args)
        except Exception:
            return {"eager raises"}
    if not torch.equal(generator, _random_state(device)):
        found.add("random draw")
    counted = count is not None and not torch.equal(count, fn.state.module.count)
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    overlapping = len(set(storages)) < len(storages)
    written = any(not torch.equal(_bits(t), bits) for t, bits in zip(tensors, contents, strict=True))
    outs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    out_storages = [out.untyped_storage().data_ptr() for out in outs if out.numel()]
    found |= {
        name
        for name, holds in {
            "empty argument": any(not t.numel() for t in tensors),
            "0-d argument": any(not t.dim() for t in tensors),
            "non-contiguous argument": any(not t.is_contiguous() for t in tensors),
            "expanded argument": any(not is_writable(t) for t in tensors),
            "misaligned argument": any(t.data_ptr() % 16 for t in tensors),
            "overlapping arguments": overlapping,
            "the same tensor twice": len({id(t) for t in tensors}) < len(tensors),
            "an argument is written": written,
            "a view of an argument is written": written and {"step view"} <= found,
            "overlapping arguments, one written": overlapping and written,
            "a closed-over tensor is written": any(
                t._version != v for t, v in zip(fn.state.tensors, versions, strict=True)
            ),
            "module state is written": counted,
            "a result is an argument": any(out is t for out in outs for t in tensors),
            "a result is a view of an argument": any(
                all(out is not t for t in tensors) and out.untyped_storage().data_ptr() in storages
                for out in outs if out.numel()
            ),
            "results share memory": len(set(out_storages)) < len(out_storages),
            "a result is empty": any(not out.numel() for out in outs),
            "a result is a number": any(isinstance(leaf, (int, float)) for leaf in pytree.tree_leaves(result)),
            "a live number is used": any(isinstance(i, NumberInput) for i in case.inputs)
            and bool({"step number", "step write"} & found),
            "closed-over tensor": bool(case.closed),
            "module in train mode": case.module == "train" and counted,
            "nested results": case.tree == "nested",
            "data-dependent step": any(step.op in DATA_DEPENDENT for step in case.steps),
            "nothing computed": not ({f"step {op}" for op in OPERATIONS} - {"step view", "step output"}) & found,
        }.items()
        if holds
    }  # fmt: skip
    found |= {f"number {i.kind}" for i in case.inputs if isinstance(i, NumberInput)}
    found |= {f"alias {i.view}" for i in case.inputs if isinstance(i, AliasInput)}
    try:
        with torch.no_grad():
            pygraph.trace(case.function(device))(*case.arguments(device))
    except Exception:  # with what exceptions is the laws' business
        found.add("cannot be traced")
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor.detach().cpu().double(), 77)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


@pytest.mark.parametrize("feature", EXPECTED)
def test_features_are_reached(device: torch.device, feature: str) -> None:
    assert reached(device)[feature] >= EXPECTED[feature]


@pytest.mark.parametrize("feature", AT_MOST)
def test_draws_are_not_wasted(device: torch.device, feature: str) -> None:
    assert reached(device)[feature] <= AT_MOST[feature]


def test_every_operation_number_and_stack_is_reached(device: torch.device) -> None:
    counts = reached(device)
    wanted = [f"step {op}" for op in (*OPERATIONS, *DATA_DEPENDENT)]
    wanted += [f"number {kind}" for kind in NUMBER_KINDS]
    wanted += [f"alias {view}" for view in ("same", "tail", "transposed", "detached")]
    wanted += [f"stack {stack.names}" for stack in STACKS]
    assert [name for name in wanted if counts[name] < 3] == []


def test_a_case_is_reproducible(device: torch.device) -> None:
    @seed(0)
    @settings(max_examples=20, phases=(Phase.generate,), database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases())
    def check(case: Case) -> None:
        texts = []
        for _ in range(2):
            torch.manual_seed(0)
            with torch.no_grad():
                try:
                    result = case.function(device)(*case.arguments(device))
                except Exception as error:
                    result = repr(error)
            texts.append(str(pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), result)))
        assert texts[0] == texts[1]

    check()
