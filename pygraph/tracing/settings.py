"""Global settings of torch: changes by a traced function are noticed and put back, as a replay would not make them."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake  # checked with torch 2.11 and 2.13
from torch.nn.utils import parametrize

from pygraph.guards.settings import NAMED, NamedSetting
from pygraph.guards.torch_settings import SETTINGS, TorchSetting, autocast, mode_key


class SettingsWatch:
    """Compares torch's global settings before and after a function.

    Most of them are the process's: another thread may have changed one, as `torch.export` does for a while, which must
    not be undone. So if it is not known who has changed one, the function is run again under a profiler that compares
    the settings around its calls of torch's setters. If these change nothing, the function may still have set a setting
    to the value that it has by now; the call itself will do the same.

    Args:
        device_types: The devices whose autocast settings count.
        unclear: The watch of a first run after which that was not known.

    Attributes:
        changed: The first setting that the function has changed, and that was put back; None if there is none.
        unclear: The first one that it or another thread has changed, and that was left so.
        others: The first one that another thread has changed, or the function as a call of it would.
    """

    def __init__(self, device_types: Iterable[str], unclear: SettingsWatch | None = None) -> None:
        kinds = filter(torch.amp.is_autocast_available, sorted({"cpu", *device_types}))
        known: list[TorchSetting | NamedSetting] = [*SETTINGS, *NAMED, *map(autocast, kinds)]
        self._settings = [setting for setting in known if setting.write is not None]
        self._first = unclear
        self._before: list[Any] = []
        self.changed: str | None = None
        self.unclear: str | None = None
        self.others: str | None = None
        mode_key("cpu")  # what it asks torch for once must not become part of the trace

    def watch(self) -> AbstractContextManager[None]:
        """Watch the function for the time of the context, and put its changes back, also if it fails."""
        return self._watch() if self._first is None else self._watch_again(self._first)

    @contextmanager
    def _watch(self) -> Generator[None, None, None]:
        self._before, key = self._values(), mode_key("cpu")
        try:
            yield
        finally:
            changed = self._changed(self._before)
            if not changed and mode_key("cpu") != key:
                changed = [("a global setting of torch", False)]
            alone = is_alone()
            self.changed = next((title for title, of_thread in changed if alone or of_thread), None)
            self.unclear = next((title for title, of_thread in changed if not alone and not of_thread), None)
            self._put_back(self._before, of_process=alone)

    @contextmanager
    def _watch_again(self, first: SettingsWatch) -> Generator[None, None, None]:
        self._before = self._values()
        calls = _SetterCalls(lambda: [*self._values(), mode_key("cpu")])
        try:
            with calls.profiled():
                yield
        finally:
            if calls.changed:
                self.changed = first.unclear
                self._put_back(first._before, of_process=True)
            else:
                self.others = first.unclear
                self._put_back(self._before, of_process=False)

    def _values(self) -> list[Any]:
        return [setting.read() for setting in self._settings]

    def _changed(self, before: list[Any]) -> list[tuple[str, bool]]:
        """The titles of settings that have changed, each with whether it is a thread's."""
        pairs = zip(self._settings, self._values(), before, strict=True)
        return [(setting.title, setting.of_thread) for setting, now, then in pairs if now != then]

    def _put_back(self, values: list[Any], *, of_process: bool) -> None:
        for setting, then in zip(self._settings, values, strict=True):
            if setting.write is not None and (of_process or setting.of_thread) and setting.read() != then:
                setting.write(then)


def forget_cached_fakes() -> None:
    """Remove fake tensors from the cache of parametrized weights, which is on in `parametrize.cached`."""
    cache: dict[Any, Any] = parametrize._cache
    for key, value in list(cache.items()):
        if is_fake(value):
            del cache[key]


def is_alone() -> bool:
    """Whether this is the only thread that runs Python code."""
    return len(sys._current_frames()) == 1


class _SetterCalls:
    """The effect of this thread's calls of torch's setters."""

    def __init__(self, values: Callable[[], list[Any]]) -> None:
        self._values = values
        self._before: list[Any] | None = None
        self._after: list[Any] | None = None

    @property
    def changed(self) -> bool:
        """Whether the calls have changed a setting, and not put it back."""
        return self._before != self._after

    @contextmanager
    def profiled(self) -> Generator[None, None, None]:
        """Watch calls for the time of the context."""
        if sys.getprofile() is not None:
            yield  # the user's profiler could not be put back
            return
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: Any, event: str, arg: Any) -> None:
        if event.startswith("c_"):
            is_setter = getattr(arg, "__name__", "").startswith(_SETTERS)
        else:
            is_setter = frame.f_code in _SETTERS_IN_PYTHON
        if not is_setter:
            return
        if not event.endswith("call"):
            self._after = self._values()
        elif self._before is None:
            self._before = self._values()


# Prefixes of names of torch._C's functions that change a setting of the process. Checked with torch 2.11 and 2.13.
_SETTERS = (
    "_set_default_dtype", "_set_deterministic", "_set_cudnn", "_set_sdp", "_set_math_sdp", "_set_cublas", "_set_fp32",
    "_set_float32", "_set_linalg", "_set_blas", "_set_mkldnn", "_set_nnpack", "_set_warnAlways",
    "set_anomaly_enabled", "_set_check_sparse",
)  # fmt: skip

# Setters of settings that are in Python only.
_SETTERS_IN_PYTHON = frozenset(setter.__code__ for setting in NAMED for setter in setting.setters)
