"""Guards on the classes that were registered with abstract ones (``register``), which no attribute shows."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Sequence
from typing import Any

_abc: Any = importlib.import_module("_abc")  # where CPython keeps what is registered, from 3.11 to 3.14


class Registrations:
    """The classes registered with abstract classes; ``registrations[…]`` tells whether they are still the same.

    One number counts what is registered in a whole process, so that they are compared only where it has changed.
    """

    def __init__(self, classes: Sequence[abc.ABCMeta]) -> None:
        self._classes = list(classes)
        self._token: object = abc.get_cache_token()
        self._before = self._registered()

    def __getitem__(self, key: object) -> bool:
        token: object = abc.get_cache_token()
        if token == self._token:
            return True
        if self._registered() != self._before:
            return False
        self._token = token
        return True

    def _registered(self) -> list[Any]:
        return [_abc._get_dump(cls)[0] for cls in self._classes]
