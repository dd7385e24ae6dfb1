"""Operations on lists of tensors with a live number: one graph for all values, and the results of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph
from pygraph.transforms.devicify import devicify_program
from pygraph.transforms.rules.foreach_rules import PER_ENTRY

OPERATIONS = sorted(PER_ENTRY, key=str)


def arguments(op: Any, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """Arguments that fit the schema; None where a number goes, and a list of None where a list of them goes."""
    torch.manual_seed(0)
    kinds = [str(argument.type) for argument in op._schema.arguments if not argument.kwarg_only]
    made: dict[str, Any] = {"number": None, "List[number]": [None, None], "Tensor": None}

    def tensors() -> list[torch.Tensor]:
        return [(torch.rand(shape) * 3 + 1).to(dtype).to(device) for shape in ((3,), (2, 2))]

    return [tensors() if kind == "List[Tensor]" else made[kind] for kind in kinds]


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("op", OPERATIONS, ids=str)
def test_numbers_are_live(op: Any, dtype: torch.dtype, device: torch.device) -> None:
    given = arguments(op, device, dtype)
    takes_tensor = "Tensor" in [str(argument.type) for argument in op._schema.arguments]
    has_alpha = "alpha" in [argument.name for argument in op._schema.arguments]

    def fn(lists: list[Any], k: Any) -> Any:
        number = torch.tensor(k) if takes_tensor else k  # on the host, as torch.optim gives it
        args = [number if x is None else [number, k * 2] if x == [None, None] else x for x in lists]
        return op(*args, alpha=k) if has_alpha else op(*args)

    whole = not dtype.is_floating_point
    try:
        fn(given, 2 if whole else 0.3)
    except (RuntimeError, NotImplementedError):
        pytest.skip("eager refuses it")
    fast = pygraph.jit(fn)
    for k in (1, 2, 3, 5) if whole else (0.3, 0.7, 1.1, 2.6):
        exact = device.type != "cuda" and not (op.name().startswith("aten::_foreach_pow") or dtype is torch.bfloat16)
        tolerance = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(fast(given, k), fn(given, k), **tolerance)
    info = fast.cache_info()
    # Exponents are baked in; torch 2.11 asks for the base's value during the trace, too.
    power, _, overload = op.name().partition(".")
    by_value = power == "aten::_foreach_pow" and (overload != "ScalarAndTensor" or torch.__version__ < "2.12")
    if dtype.is_floating_point and not by_value:
        assert (info.hits, info.misses, info.captures) == (3, 1, 1)


@pytest.mark.parametrize("op", [torch._foreach_add, torch._foreach_mul, torch._foreach_div], ids=lambda op: op.__name__)
def test_one_number_for_a_whole_list_stays_one_kernel(op: Any, device: torch.device) -> None:
    """On CUDA one kernel does a list of any length; the number is read on the device."""
    lists = [torch.ones(3, device=device), torch.ones(2, device=device)]
    program = devicify_program(pygraph.trace(lambda xs, k: op(xs, k))(lists, 0.5))
    (target,) = [str(node.target) for node in program.nodes if "foreach" in str(node.target)]
    assert target == f"aten.{op.__name__}.Tensor"
