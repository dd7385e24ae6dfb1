"""PyTorch's operator descriptions (``op_db``), the dtypes that each is run in, and its samples as flat tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from conformance_cases import InPlace, load_operators, same_layout, samples
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

# Each takes another way than float32: complex tensors are conjugated lazily, integers are promoted, and half precision
# is computed in float32.
_ORDER = {
    name: place
    for place, name in enumerate(("float32", "complex64", "int64", "bfloat16", "float16", "float64", "bool"))
}


def load_entries() -> dict[str, Any]:
    """The entries of ``op_db``, which has those of ``opinfo.definitions``, by name; a variant's name after a dot."""
    return {name: entry for name, entry in load_operators().items() if not isinstance(entry, InPlace)}


def dtypes(entry: Any, device_type: str) -> list[str]:
    """The dtypes that an entry is run in: the first two of `_ORDER` that it supports, else any."""
    supported = entry.supported_dtypes("cuda" if device_type == "cuda" else "cpu")
    names = sorted(str(dtype).removeprefix("torch.") for dtype in supported)
    return sorted(names, key=lambda name: _ORDER.get(name, len(_ORDER)))[:2]


def differentiable(entry: Any, device_type: str, dtype: str) -> bool:
    """Whether an entry has gradients in a dtype."""
    kind = "cuda" if device_type == "cuda" else "cpu"
    return entry.supports_autograd and getattr(torch, dtype) in entry.supported_backward_dtypes(kind)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Arguments of an operator, whose tensors are given apart from the rest.

    Attributes:
        sets: Two lists of tensors of the same layout; the second has other values if these could be made.
        wanted: Positions of the tensors that gradients are meant for.
        process: What PyTorch's tests apply to the results before they take gradients.
        broadcasts: The first argument has another shape than the result.
    """

    sets: tuple[list[torch.Tensor], list[torch.Tensor]]
    wanted: tuple[int, ...]
    process: Callable[[Any], Any]
    broadcasts: bool
    _others: tuple[Any, ...]
    _places: tuple[int, ...]
    _structure: pytree.TreeSpec

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with these tensors."""
        filled = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, self._structure)
        return (first, *args), kwargs


def load_samples(entry: Any, device: torch.device, dtype: str, *, requires_grad: bool = False) -> Iterator[Sample]:
    """All samples of an entry; those with ``requires_grad`` may be others."""
    kind = getattr(torch, dtype)
    streams = [samples(entry, device, kind, None, seed, requires_grad=requires_grad) for seed in range(2)]
    for sample, other in itertools.zip_longest(*streams):
        if sample is None:
            return
        leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        first = [leaves[place] for place in places]
        second = first
        if other is not None:
            again, other_structure = pytree.tree_flatten((other.input, other.args, other.kwargs))
            if other_structure == structure and same_layout(leaves, again):
                second = [again[place] for place in places]
        yield Sample(
            ([tensor.detach() for tensor in first], [tensor.detach() for tensor in second]),
            tuple(index for index, tensor in enumerate(first) if tensor.requires_grad),
            sample.output_process_fn_grad,
            sample.broadcasts_input,
            tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            places,
            structure,
        )
