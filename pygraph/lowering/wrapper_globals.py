"""Replacements of the globals of Inductor's wrappers, with which a run on fake tensors records every launch."""

# The wrapper's functions and Inductor's kernels are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pygraph.ir import ops
from pygraph.ir.kernel_writes import written_parameters
from pygraph.ir.launches import Kind, Number, constant_key, register
from pygraph.lowering.kernel_recorder import KernelRecorder, UntraceableError


def traced_globals(call: types.FunctionType, recorder: KernelRecorder) -> dict[str, Any]:
    """The globals of a wrapper, with replacements for all that does not go through torch's dispatcher."""
    found = dict(call.__globals__)
    for name in call.__code__.co_names:
        value = found.get(name)
        if name in _REPLACEMENTS:
            found[name] = _REPLACEMENTS[name]
        elif name == "assert_size_stride":
            found[name] = functools.partial(_check_layout, recorder)
        elif name.startswith("empty_strided_"):
            found[name] = functools.partial(_empty_strided, name.removeprefix("empty_strided_"))
        elif isinstance(value, torch.Tensor):
            found[name] = recorder.constant(value)
        elif hasattr(value, "run") and hasattr(value, "triton_meta"):
            found[name] = _RecordedKernel(value)
        elif value is not None and not _is_known(value):
            raise UntraceableError(f"it calls {name}, a {type(value).__name__}")
    return found


def _is_known(value: Any) -> bool:
    """Whether a global may stay as it is: torch's modules and operations, and values that do nothing to tensors."""
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type, int, float, str, tuple, torch.device)):
        return True
    return type(value).__module__.startswith(("torch._ops", "torch._inductor.select_algorithm"))


def _empty_strided(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    if device == "cpu":
        raise UntraceableError("it computes on the cpu")
    return torch.empty_strided(size, stride, dtype=dtype, device=torch.device(device, torch.cuda.current_device()))


def _reinterpret(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if dtype is not None and dtype != tensor.dtype:
        raise UntraceableError("it reads memory as another dtype")
    return ops.reinterpret(tensor, size, stride, offset)


def _same(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _check_layout(
    recorder: KernelRecorder, tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], of: str = "input"
) -> None:
    """Refuse an input that lies in memory otherwise than kernels were compiled for, and note it of a result.

    Args:
        recorder: Records the wrapper. A result of an operation is copied where the device lays it out otherwise.
        tensor: The input, or the result of an operation.
        size: Its sizes.
        stride: Its strides.
        of: The operation that it is a result of. Of an input, torch 2.11 says nothing, and 2.13 that it is one.
    """
    if 0 in size:
        return
    what, is_input = ("an input" if of == "input" else f"a result of {of}"), of == "input"
    strides = zip(size, tensor.stride(), stride, strict=False)
    differ = any(n > 1 and mine != wanted for n, mine, wanted in strides)
    if tuple(tensor.shape) != tuple(size) or (is_input and differ):
        found = f"{tuple(tensor.shape)} in strides {tensor.stride()}"
        raise UntraceableError(f"{what} is {found}, and kernels were compiled for {tuple(size)} in {tuple(stride)}")
    if differ:
        recorder.expect(tensor, stride)


# Addresses are checked before graphs take this way at all.
_REPLACEMENTS: Mapping[str, Any] = {
    "reinterpret_tensor": _reinterpret,
    "assert_alignment": _nothing,
    "copy_if_misaligned": _same,
    "get_raw_stream": _nothing,
}


_PARAMETER = re.compile(r"(in_out_ptr|out_ptr|in_ptr|ws_ptr|seed_offset|arg_)\w*")
_READ = ("in_ptr", "arg_")


class _RecordedKernel:
    """One of Inductor's kernels whose launches become nodes."""

    def __init__(self, tuner: Any) -> None:
        self._tuner = tuner

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        """Record a launch."""
        if kwargs:
            raise UntraceableError(f"a launch has options: {', '.join(kwargs)}")
        written_names = self._written(args)
        names = self._tuner.fn.arg_names
        tensors: dict[Kind, list[torch.Tensor]] = {"written": [], "read": []}
        positions: dict[int, tuple[Kind, int]] = {}
        written = {id(arg) for name, arg in zip(names, args, strict=False) if name in written_names}
        arguments: list[tuple[Kind, Any]] = []
        for arg in args:
            if not isinstance(arg, torch.Tensor):
                arguments.append(("constant", arg))
                continue
            if id(arg) not in positions:
                kind: Kind = "written" if id(arg) in written else "read"
                positions[id(arg)] = (kind, len(tensors[kind]))
                tensors[kind].append(arg)
            arguments.append(positions[id(arg)])
        name = register(TunedLaunch(self._tuner, tuple(arguments)))
        torch.ops.pygraph.launch.default(name, tensors["written"], tensors["read"], [])

    def _written(self, args: Sequence[Any]) -> set[str]:
        """Names of the parameters that the kernel writes, by Inductor's names for them or by a user kernel's code."""
        names = self._tuner.fn.arg_names
        tensors = {name: arg for name, arg in zip(names, args, strict=False) if isinstance(arg, torch.Tensor)}
        if all(_PARAMETER.fullmatch(name) for name in tensors):
            changed = set(self._tuner.mutated_arg_names)
            return {name for name in tensors if not name.startswith(_READ) or name in changed}
        return set(written_parameters(self._tuner, dict(zip(names, args, strict=False))))


@dataclasses.dataclass(frozen=True, eq=False)
class TunedLaunch:
    """A launch of one of Inductor's kernels.

    Attributes:
        kernel: The ``CachingAutotuner``, which chooses among its configurations at the first launch.
        arguments: Per argument its kind, and its position among the tensors of that kind or the number itself.
    """

    kernel: Any
    arguments: tuple[tuple[Kind, Any], ...]

    def tensors(self) -> Iterator[tuple[str, Kind, int]]:
        """Names of parameters, with the kind of tensor that each is given, and its position among those."""
        named = zip(self.kernel.fn.arg_names, self.arguments, strict=False)  # constants of the kernel come last
        return ((name, kind, value) for name, (kind, value) in named if kind in ("written", "read"))

    def __call__(
        self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], numbers: Sequence[Number]
    ) -> None:
        """Launch the kernel on the current stream."""
        values = [
            written[value] if kind == "written" else read[value] if kind == "read" else value
            for kind, value in self.arguments
        ]
        index = (written or read)[0].device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        if torch.cuda.current_device() == index:
            self.kernel.run(*values, stream=stream)
            return
        with torch.cuda.device(index):  # as the wrapper has it around all that it does
            self.kernel.run(*values, stream=stream)

    def signature(self) -> Any:
        """A text that equal launches have in common."""
        return repr((id(self.kernel), [(kind, constant_key(value)) for kind, value in self.arguments]))
