"""Saved tensors whose storages are resized, as no other device than CUDA allows it."""

from __future__ import annotations

import pytest
import torch

from tests.unit.native.test_saved_memory import Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
]


def test_a_storage_that_was_resized() -> None:
    """As fully sharded training does it with memory that it wants back."""
    training = Training(torch.device("cuda"))
    for _ in range(4):
        training.check(training.inputs())
    for _ in range(3):
        result = training.fast(training.inputs())
        storages = [t.untyped_storage() for t in result.grad_fn.saved_tensors if not t.requires_grad]  # pyright: ignore
        result.sum().backward()
        del result
        for storage in storages:
            storage.resize_(0)
        del storages, storage
        training.check(training.inputs())
