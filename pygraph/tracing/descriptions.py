"""Operations whose fake implementations are missing, or differ from the device's."""

# Kernels are registered with torch by name. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.errors import TraceError
from pygraph.guards.iterators import is_generator
from pygraph.tracing.layouts import as_on_device

aten = torch.ops.aten


def _encoder_layer(src: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(src)


def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    return hy, hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    rows, width = workspace.shape[0], 3 * (workspace.shape[1] // 5)
    input_gates, hidden_gates = workspace.new_empty(rows, width), workspace.new_empty(rows, width)
    hx = torch.empty_like(grad_hy, memory_format=torch.contiguous_format)
    if not has_bias:
        return input_gates, hidden_gates, hx, None, None
    return input_gates, hidden_gates, hx, workspace.new_empty(width), workspace.new_empty(width)


_library = torch.library.Library("aten", "IMPL")
for _name, _description in (
    ("_transformer_encoder_layer_fwd", _encoder_layer),  # described from torch 2.13 on
    ("_thnn_fused_gru_cell", _gru_cell),
    ("_thnn_fused_gru_cell_backward", _gru_cell_backward),
):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _library.impl(_name, _description, "Meta")


def without_undescribed(target: Any, args: Any, out: Any) -> Any:
    """The result of an operation, without parts that only its fake implementation returns."""
    if target is aten._native_multi_head_attention.default and len(args) > 10 and not args[10]:
        return out[0], None  # attention weights that nobody wants: an empty tensor (torch 2.11 to 2.13)
    if target is aten.native_batch_norm.default and not args[5] and out[0].device.type != "cuda":
        # Without training, its saved statistics are described as the running ones, as they are on CUDA. On the host
        # they are empty (torch 2.11 to 2.13).
        return out[0], aten.new_empty.default(out[1], [0]), aten.new_empty.default(out[2], [0])
    return out


def check_described(target: Any, args: Any) -> None:
    """Refuse an operation whose fake results differ from the device's.

    Raises:
        TraceError: It is such an operation.
    """
    # Without training, its saved statistics are described as the running ones (torch 2.11 to 2.13).
    if target is aten._native_batch_norm_legit.default and not args[5]:
        raise TraceError(f"PyTorch describes the results of {target} wrongly")


# ---- descriptions that differ from torch's ---------------------------------------------------------------------------


def describe_own(mode: FakeTensorMode) -> None:
    """Have a mode use descriptions of our own, for operations that torch describes for some dtypes only or wrongly.

    A subclass would do, had control flow (``torch.cond``) not its rules by the very class of a mode.
    """
    own = weakref.ref(mode)

    def dispatch(
        func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        mode = own()
        assert mode is not None
        kwargs = kwargs or {}
        if any(map(is_generator, (*args, *kwargs.values()))):
            # Operations on fakes move no generator, and some descriptions refuse them (those in torch._refs).
            args = [None if is_generator(value) else value for value in args]
            kwargs = {name: None if is_generator(value) else value for name, value in kwargs.items()}
        description = _OWN.get(func)
        if description is None:
            result = FakeTensorMode.dispatch(mode, func, types, args, kwargs)
            with mode:
                return as_on_device(func, args, kwargs, result)
        with mode:
            return description(*args, **kwargs)

    mode.dispatch = dispatch


@contextlib.contextmanager
def described(mode: FakeTensorMode | None) -> Generator[None, None, None]:
    """A block in which a mode of somebody else's, as Dynamo's, uses descriptions of our own."""
    if mode is None or "dispatch" in vars(mode):
        yield
        return
    describe_own(mode)
    try:
        yield
    finally:
        del mode.dispatch


_ALIGNMENT: Final = 16
"""Bytes of which the larger stride of a matrix must be a multiple."""


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of a grouped product of matrices, with the checks of `GroupedMMUtils.h`.

    Torch's description (2.11 to 2.13) is one of `bfloat16` alone, and leaves the padding of rows out where torch is
    built without CUDA. Kernels also check the addresses, which are not known here.
    """
    floats = (torch.float32, torch.bfloat16, torch.float16)
    _check(mat_a.dtype in floats and mat_a.dtype == mat_b.dtype, "matrices of one dtype, of 16 or 32 bits")
    _check(mat_a.dim() in (2, 3) and mat_b.dim() in (2, 3), "matrices or batches of them")
    a_is_2d, b_is_2d = mat_a.dim() == 2, mat_b.dim() == 2
    _check((a_is_2d and b_is_2d) or mat_a.shape[-1] == mat_b.shape[-2], "matching dimensions")
    _check(_is_dense(mat_a) and _is_dense(mat_b), "strides that are multiples of 16 bytes")
    _check((offs is not None) == (a_is_2d or b_is_2d), "offsets where a factor is a matrix")
    _check(offs is None or (offs.dim() == 1 and offs.dtype == torch.int32), "a row of int32 as offsets")
    _check(bias is None and out_dtype in (None, mat_a.dtype), "no bias, and no other dtype as result")
    if offs is None:
        _check(mat_a.shape[0] == mat_b.shape[0], "matching batches")
        size = [mat_a.shape[0], mat_a.shape[1], mat_b.shape[-1]]
    elif a_is_2d and b_is_2d:
        size = [offs.shape[0], mat_a.shape[0], mat_b.shape[1]]
    else:
        _check(offs.shape[0] == (mat_b if a_is_2d else mat_a).shape[0], "as many offsets as matrices")
        size = [mat_a.shape[-2], mat_b.shape[-1]]
    if torch.version.hip:
        return mat_a.new_empty(size)
    unit = _ALIGNMENT // mat_a.element_size()
    row = (size[-1] + unit - 1) // unit * unit
    stride = [row, 1] if len(size) == 2 else [size[1] * row, row, 1]
    return mat_a.new_empty_strided(size, stride)


def _check(holds: bool, expected: str) -> None:
    if not holds:
        raise RuntimeError(f"grouped_mm takes {expected}")


def _is_dense(matrix: torch.Tensor) -> bool:
    """Whether rows or columns are dense, and the distance between them is a multiple of 16 bytes."""
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    unit = _ALIGNMENT // matrix.element_size()
    if down == 1 and right >= max(1, rows):
        return right % unit == 0
    return right == 1 and down >= max(1, columns) and down % unit == 0


_OWN: Final[dict[Any, Callable[..., Any]]] = {aten._grouped_mm.default: _grouped_mm}
