"""Descriptions of operations that torch describes otherwise than they are: results are laid out as eager's."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pygraph
from pygraph.errors import TraceError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped(a: Tensor, b: Tensor, offs: Tensor | None = None) -> Tensor:
    return F.grouped_mm(a, b, offs=offs)


def factors(a_is_2d: bool, b_is_2d: bool, columns: int, by_rows: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of a grouped product of three groups, of which the last has no row."""
    rows, inner, groups = 16, 24, 3
    a = torch.randn(rows, inner) if a_is_2d else torch.randn(groups, rows, inner)
    shape = (inner, columns) if b_is_2d else (groups, inner, columns)
    b = torch.randn(shape) if by_rows else torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
    return a.to(dtype), b.to(dtype)


def offsets(a: Tensor, b: Tensor) -> Tensor | None:
    if a.dim() == b.dim() == 3:
        return None
    grouped_size = a.shape[1] if a.dim() == b.dim() else a.shape[0] if a.dim() == 2 else b.shape[1]
    return torch.tensor([1, grouped_size, grouped_size], dtype=torch.int32)


def within(device: torch.device) -> dict[str, float]:
    """The tolerance of results: none on the emulated device."""
    return {"rtol": 0.0, "atol": 0.0} if device.type == "emu" else {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("a_is_2d", "b_is_2d"), list(itertools.product((True, False), repeat=2)))
def test_results_of_grouped_products_are_laid_out_as_eagers(a_is_2d: bool, b_is_2d: bool, dtype: torch.dtype) -> None:
    for columns, by_rows in ((24, True), (24, False), (5, False)):
        a, b = factors(a_is_2d, b_is_2d, columns, by_rows, dtype)
        offs = offsets(a, b)
        expected = grouped(a, b, offs)
        program = pygraph.trace(grouped)(a, b, offs)
        (spec,) = (output.spec for output in program.outputs)  # pyright: ignore
        assert (spec.shape, spec.stride, spec.dtype) == (expected.shape, expected.stride(), expected.dtype)
        torch.testing.assert_close(pygraph.evaluate(program, a, b, offs), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("a", "b", "offs"),
    [
        (torch.ones(4, 8), torch.ones(2, 8, 5), torch.tensor([1, 4], dtype=torch.int32)),  # rows of 20 bytes
        (torch.ones(4, 8), torch.ones(2, 12, 8), torch.tensor([1, 4], dtype=torch.int32)),
        (torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([1, 4])),
        (torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([[1, 4]], dtype=torch.int32)),
        (torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([4], dtype=torch.int32)),
        (torch.ones(4, 8), torch.ones(2, 8, 8), None),
        (torch.ones(2, 4, 8), torch.ones(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)),
        (torch.ones(3, 4, 8), torch.ones(2, 8, 8), None),
        (torch.ones(4, 8).double(), torch.ones(2, 8, 8).double(), torch.tensor([1, 4], dtype=torch.int32)),
        (torch.ones(4, 8), torch.ones(2, 8, 8).bfloat16(), torch.tensor([1, 4], dtype=torch.int32)),
        (torch.ones(8), torch.ones(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)),
        (torch.ones(1, 8).expand(4, 8), torch.ones(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)),
    ],
)
def test_what_eager_raises_for_is_not_traced(a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    with pytest.raises(RuntimeError):
        grouped(a, b, offs)
    with pytest.raises(TraceError, match="grouped_mm"):
        pygraph.trace(grouped)(a, b, offs)


def test_gradients_of_grouped_products(device: torch.device) -> None:
    """They are grouped products too, by the layout of the factors; the rest of a training step is in graphs."""
    for by_rows in (True, False):
        a, b = factors(True, False, 24, by_rows, torch.float32)
        offs = offsets(a, b)
        assert offs is not None

        def step(a: Tensor, b: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
            loss = grouped(torch.sin(a), torch.cos(b), offs).square().sum()
            return loss.detach(), *torch.autograd.grad(loss, (a, b))

        leaves = [tensor.to(device).requires_grad_() for tensor in (a, b)]
        fast = pygraph.jit(step)
        for _ in range(3):
            expected = step(*leaves, offs.to(device))
            got = fast(*leaves, offs.to(device))
            for mine, other in zip(got, expected, strict=True):
                assert mine.stride() == other.stride()
                torch.testing.assert_close(mine.cpu(), other.cpu(), **within(device))
        report = fast.explain().to_dict()
        assert {note["what"] for note in report["fallbacks"]} == {"aten._grouped_mm.default"}
        assert report["entries"][0]["kernels_in_graphs"] > 0


def test_products_of_batches_are_in_graphs(device: torch.device) -> None:
    a, b = (tensor.to(device) for tensor in factors(False, False, 5, False, torch.float32))
    fast = pygraph.jit(lambda a, b: F.grouped_mm(a, b) * 2)
    for _ in range(3):
        torch.testing.assert_close(fast(a, b).cpu(), (F.grouped_mm(a, b) * 2).cpu(), **within(device))
    (entry,) = fast.explain().to_dict()["entries"]
    assert entry["kernels_in_graphs"] == entry["kernels"] > 0


def test_offsets_are_live(device: torch.device) -> None:
    a, b = (tensor.to(device) for tensor in factors(True, False, 24, True, torch.float32))
    fast = pygraph.jit(grouped)
    for ends in ([1, 5, 16], [16, 16, 16], [0, 0, 16], [4, 9, 16]):
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        torch.testing.assert_close(fast(a, b, offs).cpu(), grouped(a, b, offs).cpu(), **within(device))
    assert fast.cache_info().misses == 1
