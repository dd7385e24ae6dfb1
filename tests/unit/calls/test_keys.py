"""Cache keys: equal for calls that run the same, different for every setting that a trace depends on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from pygraph.calls.keys import UnhashableError, flatten_call, leaf_keys, object_key, overlap_key
from pygraph.guards.torch_settings import mode_key
from tests.leftovers import all_restored

X = torch.arange(6.0).view(2, 3)


@contextlib.contextmanager
def changed(read: Callable[[], Any], write: Callable[[Any], Any], value: Any):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def attribute(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: changed(lambda: getattr(owner, name), lambda v: setattr(owner, name, v), value)


def negated(read: Callable[[], bool], write: Callable[[bool], Any]) -> Callable[[], Any]:
    return lambda: changed(read, write, not read())


matmul, cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cuda, torch.backends.cudnn

MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "deterministic": negated(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "deterministic, warn only": lambda: changed(
        lambda: False, lambda v: torch.use_deterministic_algorithms(v, warn_only=v), True
    ),
    "cudnn.enabled": lambda: cudnn.flags(enabled=not cudnn.enabled),
    "cudnn.benchmark": lambda: cudnn.flags(benchmark=not cudnn.benchmark),
    "cudnn.deterministic": lambda: cudnn.flags(deterministic=not cudnn.deterministic),
    "flash": negated(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "memory-efficient": negated(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math": negated(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "cudnn attention": negated(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "fp16 reduction": attribute(
        matmul, "allow_fp16_reduced_precision_reduction", not matmul.allow_fp16_reduced_precision_reduction
    ),
    "bf16 reduction": attribute(
        matmul, "allow_bf16_reduced_precision_reduction", not matmul.allow_bf16_reduced_precision_reduction
    ),
    "matmul precision": attribute(matmul, "fp32_precision", "tf32"),
    "convolution precision": attribute(cudnn.conv, "fp32_precision", "ieee"),
    "rnn precision": attribute(cudnn.rnn, "fp32_precision", "ieee"),
    "fp16 accumulation": attribute(matmul, "allow_fp16_accumulation", not matmul.allow_fp16_accumulation),
    "reduction in math": negated(cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp),
    "overrideable attention": negated(torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    "flash attention 3": negated(torch._C._get_fa3_sdp_enabled, torch._C._set_sdp_use_fa3),
    "order of attentions": lambda: changed(
        torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, [2, 1, 0, 3, 4]
    ),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "uninitialised memory": attribute(
        torch.utils.deterministic, "fill_uninitialized_memory", not torch.utils.deterministic.fill_uninitialized_memory
    ),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_every_setting_is_part_of_the_key(mode: Callable[[], Any]) -> None:
    before = mode_key("cuda")
    with mode():
        assert mode_key("cuda") != before
    assert mode_key("cuda") == before


def test_the_legacy_switch_of_tf32_is_part_of_the_key() -> None:
    before = mode_key("cuda")
    with all_restored():
        torch.set_float32_matmul_precision("high")
        assert mode_key("cuda") != before
    assert mode_key("cuda") == before


@pytest.mark.parametrize(
    ("getter", "mode", "public"),
    [
        (torch._C._get_deterministic_algorithms, "deterministic", torch.are_deterministic_algorithms_enabled),
        (torch._C._get_deterministic_algorithms_warn_only, "deterministic, warn only",
         torch.is_deterministic_algorithms_warn_only_enabled),
        (torch._C._get_cudnn_enabled, "cudnn.enabled", lambda: cudnn.enabled),
        (torch._C._get_cudnn_benchmark, "cudnn.benchmark", lambda: cudnn.benchmark),
        (torch._C._get_cudnn_deterministic, "cudnn.deterministic", lambda: cudnn.deterministic),
        (torch._C._get_flash_sdp_enabled, "flash", cuda.flash_sdp_enabled),
        (torch._C._get_mem_efficient_sdp_enabled, "memory-efficient", cuda.mem_efficient_sdp_enabled),
        (torch._C._get_math_sdp_enabled, "math", cuda.math_sdp_enabled),
        (torch._C._get_cudnn_sdp_enabled, "cudnn attention", cuda.cudnn_sdp_enabled),
        (torch._C._get_cublas_allow_fp16_accumulation, "fp16 accumulation", lambda: matmul.allow_fp16_accumulation),
        (torch._C._get_math_sdp_allow_fp16_bf16_reduction, "reduction in math",
         cuda.fp16_bf16_reduction_math_sdp_allowed),
        (torch._C._get_deterministic_fill_uninitialized_memory, "uninitialised memory",
         lambda: torch.utils.deterministic.fill_uninitialized_memory),
        (lambda: torch._C._get_fp32_precision_getter("cuda", "matmul"), "matmul precision",
         lambda: matmul.fp32_precision),
        (lambda: torch._C._get_fp32_precision_getter("cuda", "conv"), "convolution precision",
         lambda: cudnn.conv.fp32_precision),
        (lambda: torch._C._get_fp32_precision_getter("cuda", "rnn"), "rnn precision",
         lambda: cudnn.rnn.fp32_precision),
    ],
)  # fmt: skip
def test_private_getters_agree_with_public_properties(
    getter: Callable[[], Any], mode: str, public: Callable[[], Any]
) -> None:
    assert getter() == public()
    with MODES[mode]():
        assert getter() == public()


def static_key(leaf: Any) -> Any:
    return object_key(leaf, 0, is_marked=True)


def leaf_key(leaf: Any) -> Any:
    return leaf_keys([leaf], frozenset())


@pytest.mark.parametrize(
    "other",
    [X.double(), X[:1], X.t().contiguous().t(), X.flatten(), X.clone().requires_grad_()],
)
def test_tensors_that_differ_in_layout_have_different_keys(other: torch.Tensor) -> None:
    assert leaf_key(other) != leaf_key(X)


def test_alignment_matters_on_a_device_only(device: torch.device) -> None:
    memory = torch.zeros(128, device=device)
    assert leaf_key(memory[:4]) != leaf_key(memory[1:5])
    assert leaf_key(memory[:4]) == leaf_key(memory[64:68])
    assert leaf_key(memory.cpu()[:4]) == leaf_key(memory.cpu()[1:5])


def test_requires_grad_matters_without_grad_too() -> None:
    with torch.no_grad():
        assert leaf_key(X.clone().requires_grad_()) != leaf_key(X.clone())


def test_inference_tensors_are_told_apart() -> None:
    with torch.inference_mode():
        inference = X.clone()
    assert leaf_key(inference) != leaf_key(X)


def test_values_of_tensors_and_live_numbers_do_not_matter() -> None:
    assert leaf_key(X.clone()) == leaf_key(torch.zeros(2, 3))
    assert leaf_key(2) == leaf_key(3)
    assert leaf_key(2.5) == leaf_key(3.5)


@pytest.mark.parametrize(
    ("a", "b"), [(1, 1.0), (1, True), (True, False), ("a", "b"), (None, 0), (float("inf"), -float("inf"))]
)
def test_other_leaves_are_told_apart(a: Any, b: Any) -> None:
    assert leaf_key(a) != leaf_key(b)


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (0.0, -0.0), (1j, 1.0), ("1", 1)])
def test_static_values_are_told_apart(a: Any, b: Any) -> None:
    assert static_key(a) != static_key(b)


def test_nan_is_equal_to_itself() -> None:
    assert static_key(float("nan")) == static_key(float("nan"))


def test_unhashable_values_are_named() -> None:
    with pytest.raises(UnhashableError) as caught:
        leaf_keys([X, {1, 2}], frozenset())
    assert caught.value.leaf == 1


def test_overlap_distinguishes_how_memory_is_shared() -> None:
    memory = torch.arange(8.0)
    keys = [
        overlap_key([memory[:4], memory.clone()[:4]]),
        overlap_key([memory[:4], memory[:4]]),
        overlap_key([memory[:4], memory[1:5]]),
        overlap_key([memory[:4], memory[2:6]]),
        overlap_key([first := memory[:4], first]),
    ]
    assert keys[0] == ()
    assert len(set(keys)) == len(keys)
    assert overlap_key([memory[:4], memory[1:5]]) == overlap_key([memory[2:6], memory[3:7]])


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((X,), {}),
    ((X, 2), {}),
    ((X,), {"k": 2}),
    ((X,), {"j": 2}),
    (([X, 2],), {}),
    (({"a": X}, None), {}),
    (([X], 2), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_flatten_call_gives_the_leaves_of_pytree(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    leaves, _ = flatten_call(args, kwargs)
    expected = pytree.tree_leaves((args, kwargs))
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))


def test_flatten_call_tells_structures_apart() -> None:
    assert len({flatten_call(args, kwargs)[1] for args, kwargs in CALLS}) == len(CALLS)
