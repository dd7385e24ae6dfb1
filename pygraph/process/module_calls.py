"""Calls of modules, which another function may serve while something in this thread asks for that.

Every call of a module runs ``torch.nn.Module._wrapped_call_impl``, whichever class the module has. While someone asks,
that function has other code, so that nothing costs anything as long as no one does.
"""

# The function is torch's own. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import threading
import types
from typing import Any, Protocol

import torch
from torch.nn.modules import module as torchs


class Server(Protocol):
    """Serves calls of modules."""

    def serve(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call."""


class _Here(threading.local):
    server: Server | None = None
    exempt: torch.nn.Module | None = None


_here = _Here()
_torchs_call: Any = torch.nn.Module._wrapped_call_impl
_own_code = _torchs_call.__code__
_own: Any = types.FunctionType(_own_code, _torchs_call.__globals__, "_own_call")
_lock = threading.Lock()
_open = 0


def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module as torch does."""
    return _own(module, *args, **kwargs)


def _served(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call of a module, while some thread asks for other ones than torch's."""
    server = _here.server
    if server is None:
        return _own(module, *args, **kwargs)
    if _here.exempt is module:
        _here.exempt = None
        return _own(module, *args, **kwargs)
    _here.server = None  # what it calls is its own affair
    try:
        return server.serve(module, args, kwargs)
    finally:
        _here.server = server


# Names in torch's module, as the code below runs there. Dynamo, which may trace it, takes torch's own way.
torchs._pygraph_served, torchs._pygraph_own = _served, _own  # pyright: ignore[reportAttributeAccessIssue]


def _other_call(self, *args, **kwargs):  # type: ignore
    if torch.compiler.is_compiling():
        return _pygraph_own(self, *args, **kwargs)  # type: ignore  # noqa: F821
    return _pygraph_served(self, args, kwargs)  # type: ignore  # noqa: F821


_other_code = _other_call.__code__


class Serving:
    """While this is entered, calls of modules in this thread go to a server.

    Args:
        server: The server.
        exempt: The module whose first call goes torch's way; None if there is none.
    """

    __slots__ = ("_before", "_server")

    def __init__(self, server: Server, exempt: torch.nn.Module | None = None) -> None:
        self._server = server, exempt

    def __enter__(self) -> None:
        global _open
        self._before = _here.server, _here.exempt
        with _lock:
            _open += 1
            if _open == 1:
                _torchs_call.__code__ = _other_code
        _here.server, _here.exempt = self._server

    def __exit__(self, *error: object) -> None:
        global _open
        _here.server, _here.exempt = self._before
        with _lock:
            _open -= 1
            if not _open:
                _torchs_call.__code__ = _own_code


def _after_fork() -> None:
    """Free the lock in a child process; other threads, which may have asked, are not there any more."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
