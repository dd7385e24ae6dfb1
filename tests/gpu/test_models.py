"""Real models on a GPU, through `pygraph.jit` and `torch.compile(backend="pygraph")`, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import (
    EXAMPLES,
    OF_EXPERTS,
    WAYS,
    Decoder,
    assert_explained,
    check_generation,
    check_inference,
    check_training,
    llama_with_cache,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),  # copies of models
]

CUDA = torch.device("cuda", 0)


@pytest.fixture(params=WAYS)
def how(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def exact_convolutions() -> Any:
    """CuDNN chooses the same kernels in every run, those without atomics, and float32 is float32."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_inference(name: str, how: str, dtype: torch.dtype) -> None:
    if name == "mask r-cnn" and dtype is torch.bfloat16:
        pytest.skip("torchvision's detection makes float32 boxes that its kernels do not take with bfloat16 features")
    fast = check_inference(EXAMPLES[name], how, CUDA, dtype)
    if how == "jit":
        assert_explained(fast, EXAMPLES[name].why_not)


@pytest.mark.parametrize("name", EXAMPLES)
def test_training(name: str, how: str) -> None:
    """The loop outside; where nothing is in the way, forward and backward are graphs."""
    fast = check_training(EXAMPLES[name], how, CUDA)
    if how == "jit":
        assert_explained(fast, EXAMPLES[name].why_not_trained, trained=True)


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts(name: str) -> None:
    """In float32 the products of groups run between graphs; recent devices have a kernel for those of bfloat16."""
    example = OF_EXPERTS[name]
    assert_explained(check_inference(example, "jit", CUDA), example.why_not)
    assert_explained(check_training(example, "jit", CUDA, whole=True), example.why_not_trained)
    recent = torch.cuda.get_device_capability(CUDA)[0] in (9, 10)
    assert_explained(check_inference(example, "jit", CUDA, torch.bfloat16), None if recent else example.why_not)


def test_training_with_convolutions_that_do_not_repeat() -> None:
    """Then neither do forward and backward, and both are graphs all the same."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        fast = check_training(EXAMPLES["resnet"], "jit", CUDA)
    assert_explained(fast, EXAMPLES["resnet"].why_not_trained, trained=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_whole_step(name: str) -> None:
    example = EXAMPLES[name]
    fast = check_training(example, "jit", CUDA, whole=True)
    assert_explained(fast, example.why_not_trained)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_the_part_of_a_detector_that_depends_on_no_data(train: bool) -> None:
    """Jitting the whole of Mask R-CNN gives graphs of parts; its backbone, where most of the work is, is one."""
    check = check_training if train else check_inference
    backbone = check(EXAMPLES["mask r-cnn"], "jit", CUDA, part="backbone").backbone
    # The gradient of a bias is as large as what cuDNN has allocated and freed just before, and lies there.
    allowed = ("a kernel holds its pointer where it cannot be patched",) if train else ()
    assert_explained(backbone, None, trained=train, allowed=allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_generation_by_llama(how: str, dtype: torch.dtype) -> None:
    if how == "compile" and dtype is torch.bfloat16:
        pytest.skip("two tokens may be equally likely up to rounding, which fused kernels do otherwise")
    make = lambda: llama_with_cache(EXAMPLES["llama"].model(CUDA, dtype).eval(), 24)  # noqa: E731
    check_generation(make, how, CUDA)


def test_generation_by_a_decoder(how: str) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return Decoder().to(CUDA).eval()

    check_generation(make, how, CUDA)
