"""torch's settings that few functions read or set: guards compare them where code has a name for them.

Settings that choose kernels are part of every cache key instead, see `torch_settings`.
"""

# Some settings have private names only. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import __future__, _tensor_str
from torch.backends import mha
from torch.distributions import Distribution
from torch.nn.utils import parametrize


@dataclasses.dataclass(frozen=True)
class NamedSetting:
    """A setting, or several that are set together.

    Attributes:
        title: The setting's name in reports.
        names: The names that code has for functions and attributes that read or set it.
        read: Returns its values, each immutable or an object of its own.
        write: Sets the values; None where a trace need not restore them.
        setters: torch's functions that set it, if they are written in Python.
        is_asked: Whether torch's own code that computes reads it, by one of the names.
        of_thread: Whether each thread has its own.
    """

    title: str
    names: frozenset[str]
    read: Callable[[], Sequence[Any]]
    write: Callable[[Sequence[Any]], object] | None
    setters: tuple[Callable[..., Any], ...] = ()
    is_asked: bool = False
    of_thread: bool = False


def _setting(
    title: str,
    names: str,
    read: Callable[[], Any],
    write: Callable[[Any], object],
    *setters: Callable[..., Any],
    is_asked: bool = False,
    of_thread: bool = False,
) -> NamedSetting:
    """A setting that has a single value."""
    known = frozenset(names.split())
    return NamedSetting(title, known, lambda: (read(),), lambda values: write(*values), setters, is_asked, of_thread)


def _set_conversion(values: Sequence[bool]) -> None:
    __future__.set_overwrite_module_params_on_conversion(values[0])
    __future__.set_swap_module_params_on_conversion(values[1])


def _set_printing(values: Sequence[Any]) -> None:
    options = vars(_tensor_str.PRINT_OPTS)
    options.update(zip(options, values, strict=True))


PARAMETRIZED = "_cache_enabled"
"""The name that stands for the cache of modules with parametrizations."""

NAMED: tuple[NamedSetting, ...] = (
    NamedSetting(
        "anomaly detection",
        frozenset({"set_detect_anomaly", "detect_anomaly", "set_anomaly_enabled", "is_anomaly_enabled"}),
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.set_anomaly_enabled(*values),
    ),
    _setting(
        "the number of threads", "get_num_threads set_num_threads", torch.get_num_threads, torch.set_num_threads,
        of_thread=True,
    ),
    _setting("the use of oneDNN", "mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    _setting("oneDNN's determinism", "mkldnn", torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    _setting("the use of NNPACK", "nnpack", torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
    _setting(
        "how often warnings are given", "is_warn_always_enabled set_warn_always", torch.is_warn_always_enabled,
        torch.set_warn_always,
    ),
    _setting(
        "checks of sparse tensors", "check_sparse_tensor_invariants _set_check_sparse_tensor_invariants",
        torch._C._check_sparse_tensor_invariants,
        torch._C._set_check_sparse_tensor_invariants,
    ),
    NamedSetting(
        "how modules are converted",
        frozenset(
            f"{way}_{what}_module_params_on_conversion" for way in ("get", "set") for what in ("overwrite", "swap")
        ),
        lambda: (
            __future__.get_overwrite_module_params_on_conversion(), __future__.get_swap_module_params_on_conversion()
        ),
        _set_conversion,
        (__future__.set_overwrite_module_params_on_conversion, __future__.set_swap_module_params_on_conversion),
    ),
    NamedSetting(
        "how tensors are printed", frozenset({"set_printoptions", "PRINT_OPTS"}),
        lambda: tuple(vars(_tensor_str.PRINT_OPTS).values()), _set_printing, (torch.set_printoptions,),
    ),
    _setting(
        "fast paths of attention", "get_fastpath_enabled set_fastpath_enabled", mha.get_fastpath_enabled,
        mha.set_fastpath_enabled, mha.set_fastpath_enabled, is_asked=True,
    ),
    # Dynamo switches them off for good when it first compiles something.
    NamedSetting(
        "checks of distributions", frozenset({"_validate_args", "set_default_validate_args"}),
        lambda: (Distribution._validate_args,), None, is_asked=True,
    ),
    # The cache of `parametrize.cached` while it is active; `forget_cached_fakes` removes what a trace has cached.
    NamedSetting(
        "the cache of parametrizations", frozenset({PARAMETRIZED}),
        lambda: (parametrize._cache_enabled, *parametrize._cache.values()), None,
    ),
)  # fmt: skip


NAMES: frozenset[str] = frozenset(name for setting in NAMED for name in setting.names)
"""The names of all settings."""


def settings_named(names: frozenset[str] | set[str], by_torch: frozenset[str] | set[str]) -> Iterator[NamedSetting]:
    """The settings that the user's code has ``names`` for, or torch's code, with the names ``by_torch``, reads."""
    return (s for s in NAMED if s.names & names or (s.is_asked and s.names & by_torch))
