"""Docstrings as mkdocstrings reads them: our ``Example:`` is a section of examples, and overloads have their types."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
        """Give what implements overloads the types of these: its own are ``Any``, and say nothing."""
        for function in _functions(pkg):
            if function.overloads:
                function.returns = _either(one.returns for one in function.overloads)
                # One that may be called without parentheses has an overload without parameters.
                firsts = [one.parameters[0].annotation for one in function.overloads if len(one.parameters)]
                optional = ["None"] if len(firsts) < len(function.overloads) else []
                function.parameters[0].annotation = _either([*firsts, *optional])


def _either(types: Iterable[Any]) -> str:
    return " | ".join(dict.fromkeys(map(str, types)))


def _functions(scope: griffe.Module | griffe.Class) -> list[griffe.Function]:
    found: list[griffe.Function] = []
    for member in scope.members.values():
        if isinstance(member, griffe.Function):
            found.append(member)
        elif isinstance(member, griffe.Module | griffe.Class):
            found += _functions(member)
    return found
