"""Docstrings as mkdocstrings reads them: our ``Example:`` is a section of examples, and overloads are not ``Any``."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """What is changed of every object before its page is made."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Make ``Example:`` Griffe's ``Examples:``, which shows doctests as code."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Leave out the types of what implements overloads: they are ``Any``, and say nothing."""
        for function in _functions(pkg):
            if function.overloads:
                function.returns = None
                function.parameters[0].annotation = None


def _functions(scope: griffe.Module | griffe.Class) -> list[griffe.Function]:
    found: list[griffe.Function] = []
    for member in scope.members.values():
        if isinstance(member, griffe.Function):
            found.append(member)
        elif isinstance(member, griffe.Module | griffe.Class):
            found += _functions(member)
    return found
