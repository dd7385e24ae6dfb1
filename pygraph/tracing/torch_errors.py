"""Errors that torch raises while a function is traced, in words of the user's: what is wrong there, and what to do."""

# Torch's errors of fake tensors have no public names. Checked with torch 2.11 and 2.13.
from __future__ import annotations

import re
import traceback

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pygraph.errors import PygraphError, TraceError
from pygraph.ir.source_lines import TORCH_FOLDER, first_line

_DECIDE_THERE = (
    "Decide there: keep it a tensor, by torch.where, index_select or index_copy_, or pass a number of the host."
)

_OPTIMIZERS = TORCH_FOLDER + "optim"

_SYMBOL = re.compile(r"[a-z]+\d+")
"""A number that torch knows nothing of."""

_TEXTS = (
    (
        "WeakValueDictionary.__init__",  # of a fake tensor
        "it pickles a tensor, whose values are on the device",
        "Pickle before or after the call.",
    ),
    (
        ".numpy() is not supported for tensor subclasses",
        "it converts a tensor to NumPy, and its values are on the device",
        "Compute with torch instead, or convert before or after the call.",
    ),
    (
        "Cannot access data pointer of Tensor",
        "it asks for the data pointer of a tensor, which another call's tensors do not share",
        "Pass tensors to operations; a kernel of your own becomes one by torch.library.custom_op.",
    ),
    (
        "_share_fd_: only available on CPU",  # which CUDA ignores
        "it moves a tensor to shared memory",
        "Move it before the call.",
    ),
    (
        "Not available for 'meta' device type",
        "it reads the storage of a tensor, whose values are on the device",
        "Read the tensor instead.",
    ),
    (
        "but got _NoItem",  # of pygraph.guards.growth
        "it reads a list to which it appends at every call",
        "Pass its items as an argument, or write to a tensor of a fixed length.",
    ),
    (
        "symbolically trace a dynamo-optimized function",
        "it calls a function that torch.compile has made (dynamo-optimized)",
        'Transform what that compiles, with fuse=True, or compile it with backend="pygraph".',
    ),
)
"""Parts of torch's messages, what they mean to a user, and what to do."""

_DEVICES = re.compile(r"found (?:at least two devices, |two different devices )(\S+?)(?: and |, )(\S+?)!?$")
"""As torch 2.13 says it, and torch 2.11."""


def in_words(failure: BaseException) -> tuple[str, str | None]:
    """The problem, and a remedy if there is one; of an error that has no translation, its kind and first line.

    >>> in_words(RuntimeError(".numpy() is not supported for tensor subclasses."))[0]
    'it converts a tensor to NumPy, and its values are on the device'
    >>> in_words(ZeroDivisionError("division by zero"))
    ('ZeroDivisionError: division by zero', None)
    """
    if isinstance(failure, PygraphError):
        return first_line(failure), None
    return translation(failure) or (f"{type(failure).__name__}: {_FAKE.sub('Tensor', first_line(failure))}", None)


def translation(failure: BaseException) -> tuple[str, str | None] | None:
    """The problem and the remedy, of an error of torch's that only a trace meets; None for any other one."""
    text = first_line(failure)
    if isinstance(failure, GuardOnDataDependentSymNode):
        return _of_a_decision(failure)
    if isinstance(failure, DataDependentOutputException):
        return f"{failure.func} gives a value of the host that depends on data of the device", _DECIDE_THERE
    if isinstance(failure, DynamicOutputShapeException):
        return f"the shape of what {failure.func} gives depends on data of the device", _DECIDE_THERE
    devices = _DEVICES.search(text)
    if devices is not None:
        remedy = "Move one to the other's device before the call, or create it there (device=x.device)."
        return f"an operation has tensors of two devices, {devices[1]} and {devices[2]}", remedy
    for part, problem, remedy in _TEXTS:
        if part in text:
            return problem, remedy
    return None


def is_of_a_trace(failure: BaseException) -> bool:
    """Whether an error is one that eager does not raise, since values are known there.

    >>> is_of_a_trace(RuntimeError(".numpy() is not supported for tensor subclasses.")), is_of_a_trace(KeyError("x"))
    (True, False)
    """
    return isinstance(failure, _OF_A_TRACE) or any(part in str(failure) for part, *_ in _TEXTS)


_OF_A_TRACE = (
    TraceError, GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException,
    UnsupportedOperatorException, UnsupportedFakeTensorException,
)  # fmt: skip

_FAKE = re.compile(r"FakeTensor|FunctionalTensor")
"""Classes of tensors in a trace, by which Python names them in its own errors."""


def _of_a_decision(failure: BaseException) -> tuple[str, str]:
    """A question of Python's about a number that is on the device."""
    condition = first_line(failure).partition(" (unhinted")[0].rpartition("expression ")[2]
    asked = "" if _SYMBOL.fullmatch(condition) else f": {condition}"
    if any(frame.filename.startswith(_OPTIMIZERS) for frame in traceback.extract_tb(failure.__traceback__)):
        remedy = "An optimizer that has capturable=True decides there."
    else:
        remedy = _DECIDE_THERE
    return f"Python code decides by a data-dependent number, which is on the device{asked}", remedy
