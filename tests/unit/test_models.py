"""Small real models on the emulated device: inference, training and generation against eager; all are graphs there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.runtime.emulated.driver import driver
from tests import extent
from tests.models import (
    EXAMPLES,
    OF_EXPERTS,
    Decoder,
    assert_explained,
    check_generation,
    check_inference,
    check_training,
    llama_with_cache,
)

SMALL = ("bert", "gpt2", "decoder", "gcn", "gcn without loops", "lstm")
ON_CUDA_ONLY = ("lstm",)  # which is cuDNN's there


@pytest.fixture
def emulated() -> torch.device:
    """The emulated device; `tests/gpu/test_models.py` has all models on CUDA."""
    driver()  # registers the torch device
    return torch.device("emu", 0)


def why_not(name: str) -> Any:
    return None if name in ON_CUDA_ONLY else EXAMPLES[name].why_not


@pytest.mark.parametrize("name", SMALL)
def test_inference(name: str, emulated: torch.device) -> None:
    assert_explained(check_inference(EXAMPLES[name], "jit", emulated), why_not(name))


@pytest.mark.parametrize("name", extent.third(SMALL))
def test_training(name: str, emulated: torch.device) -> None:
    """The loop outside; forward and backward are graphs."""
    assert_explained(check_training(EXAMPLES[name], "jit", emulated), why_not(name), trained=True)


@pytest.mark.parametrize("name", ["bert", pytest.param("decoder", marks=pytest.mark.slow)])
def test_a_whole_step(name: str, emulated: torch.device) -> None:
    assert_explained(check_training(EXAMPLES[name], "jit", emulated, whole=True), None)


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts(name: str, emulated: torch.device) -> None:
    """Products of groups run between graphs, forwards and backwards."""
    fast = check_inference(OF_EXPERTS[name], "jit", emulated)
    assert_only_groups_between_graphs(fast)
    step = check_training(OF_EXPERTS[name], "jit", emulated, whole=True)
    assert_only_groups_between_graphs(step)


def test_experts_differentiated_outside(emulated: torch.device) -> None:
    assert_only_groups_between_graphs(check_training(OF_EXPERTS["mixtral"], "jit", emulated))


def assert_only_groups_between_graphs(fast: Any) -> None:
    assert_explained(fast, OF_EXPERTS["mixtral"].why_not)
    report = fast.explain().to_dict()
    between = [note["what"] for note in report["fallbacks"] if "copied" not in note["what"]]
    assert set(between) == {"aten._grouped_mm.default"}
    assert all(entry["kernels_in_graphs"] for entry in report["entries"] if entry["kernels"])


def test_generation_by_a_decoder(emulated: torch.device) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return Decoder().to(emulated).eval()

    check_generation(make, "jit", emulated)


def test_generation_by_llama(emulated: torch.device) -> None:
    make = lambda: llama_with_cache(EXAMPLES["llama"].model(emulated).eval(), 24)  # noqa: E731
    check_generation(make, "jit", emulated)
