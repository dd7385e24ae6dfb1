"""The names by which code asks for what it uses: those that it looks up, texts that it asks by, modules it imports.

Methods that the interpreter calls by itself (`__getitem__`, `__init__`) have no name in anybody's code.
"""

from __future__ import annotations

import dis
import itertools
import opcode
import operator
import sys
import types
from collections.abc import Iterator, Set
from typing import Any

# Functions and attributes that look something up whose name is given as text.
_BY_TEXT = frozenset(
    {
        "getattr", "hasattr", "setattr", "delattr", "globals", "locals", "vars", "__dict__", "__getattribute__",
        "attrgetter", "methodcaller", "getattr_static", "eval", "exec",
    }
)  # fmt: skip

# Methods that run where an object or a class is made, and no more when it is used.
_MAKING = frozenset({"__new__", "__init__", "__post_init__", "__init_subclass__", "__set_name__", "__prepare__"})

# Code with one of these may make an object of a class that it has no name for: `type(self)()`, `dataclasses.replace`.
_MAKE_LIKE = frozenset({"type", "__class__", "replace", "__replace__"})

# Methods that run where an object is stored or finalized, of which a trace keeps nothing.
_ASIDE = frozenset({"__sizeof__", "__del__"})

_IMPORT, _MATCH_CLASS = opcode.opmap["IMPORT_NAME"], opcode.opmap["MATCH_CLASS"]
_EXTENDED, _LOAD_GLOBAL, _CACHE = opcode.opmap["EXTENDED_ARG"], opcode.opmap["LOAD_GLOBAL"], opcode.opmap["CACHE"]

# Instructions that load what is no object of a trainer's: None, or a class.
_IS, _CONSTANT = opcode.opmap["IS_OP"], (opcode.opmap["LOAD_CONST"], _LOAD_GLOBAL)

# Instructions that ask for an attribute, and by how many bits their argument is shifted: by one from CPython 3.12 on.
_OF_ATTRIBUTES = {
    opcode.opmap[name]: int(name == "LOAD_ATTR" and sys.version_info >= (3, 12))
    for name in ("LOAD_ATTR", "LOAD_METHOD")
    if name in opcode.opmap
}

# Instructions of other names than those of attributes and modules, CPython 3.11 to 3.14; all but the first are rare.
_OF_VARIABLES = frozenset(
    opcode.opmap[name]
    for name in (
        "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME", "DELETE_NAME",
        "LOAD_FROM_DICT_OR_GLOBALS",
    )
    if name in opcode.opmap
)  # fmt: skip


def looked_up(code: types.CodeType) -> set[str]:
    """Names that code and the functions defined in it look up, in globals or as attributes."""
    names = set(code.co_names)
    for inner in functions_in(code):
        names |= looked_up(inner)
    return names


def asked_for(code: types.CodeType) -> set[str]:
    """`looked_up`, and texts that may be names where the code has something that looks up by text."""
    names = looked_up(code)
    return names if names.isdisjoint(_BY_TEXT) else names | _texts(code)


def variables_of(code: types.CodeType) -> set[str]:
    """Names that code and the functions defined in it may look up in globals, those of attributes left out.

    >>> sorted(variables_of((lambda optimizer: print(optimizer.step() + scale)).__code__))
    ['print', 'scale']
    """
    if not looked_up(code).isdisjoint(_BY_TEXT):
        return asked_for(code)
    names: set[str] = set()
    above = 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= above
        above = argument << 8 if operation == _EXTENDED else 0
        if operation in _OF_VARIABLES:
            names.add(code.co_names[argument >> 1 if operation == _LOAD_GLOBAL else argument])
    return names.union(*map(variables_of, functions_in(code)))


def attributes_of_globals(code: types.CodeType) -> dict[str, set[str] | None]:
    """The attributes that code, and the functions defined in it, ask for of each global variable.

    Returns:
        By the variable's name; None where the code does more with it than asking for an attribute.

    >>> found = attributes_of_globals((lambda x: (spaces.Box(x), spaces.size, use(spaces.Box), math.pi)).__code__)
    >>> sorted(found["spaces"]), found["use"]
    (['Box', 'size'], None)
    """
    found: dict[str, set[str] | None] = {}
    above, variable = 0, None
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if operation == _CACHE:
            continue
        argument |= above
        above = argument << 8 if operation == _EXTENDED else 0
        if operation == _EXTENDED:
            continue
        if variable is not None:
            asked = found.setdefault(variable, set())
            if operation not in _OF_ATTRIBUTES:
                found[variable] = None
            elif asked is not None:
                asked.add(code.co_names[argument >> _OF_ATTRIBUTES[operation]])
        variable = code.co_names[argument >> 1] if operation == _LOAD_GLOBAL else None
    for inner in map(attributes_of_globals, functions_in(code)):
        for variable, asked in inner.items():
            known = found.setdefault(variable, set())
            found[variable] = None if known is None or asked is None else known | asked
    return found


def asks_of(code: types.CodeType, variable: str, name: str) -> bool:
    """Whether code, or a function defined in it, asks for an attribute of what a variable holds.

    >>> asks_of((lambda self: self.step() + other.run()).__code__, "self", "run")
    False
    >>> asks_of((lambda self: (lambda x: self.step(x))).__code__, "self", "step")
    True
    """
    pairs = list(itertools.pairwise(dis.get_instructions(code)))
    loads = [(one, other) for one, other in pairs if one.opname.startswith("LOAD_")]
    others = {b.argval for a, b in loads if a.argval == variable and b.opname.startswith("STORE_")}
    asks = {a.argval for a, b in loads if b.argval == name and b.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return not asks.isdisjoint({variable, *others}) or any(
        asks_of(inner, variable, name) for inner in functions_in(code)
    )


def imported(names: Set[str], package: Any = None) -> dict[str, types.ModuleType]:
    """The modules that code with these names may mean, by full names; it imports from ``package`` if that is one.

    >>> def fn():
    ...     import json.decoder
    ...     return json
    >>> list(imported(looked_up(fn.__code__)))
    ['json.decoder']
    """
    modules: dict[str, Any] = sys.modules
    found = sorted(names & modules.keys())
    if isinstance(package, str) and package:  # `from .names import K`
        parts = package.split(".")
        for count in range(len(parts), 0, -1):
            above = ".".join(parts[:count])
            found += [full for name in sorted(names) if (full := f"{above}.{name}" if name else above) in modules]
    return {name: modules[name] for name in found if isinstance(modules[name], types.ModuleType)}


def compares_identities(code: types.CodeType) -> bool:
    """Whether code, or a function defined in it, asks whether two objects that it has found are the same one.

    >>> compares_identities((lambda self, x: self.last is x).__code__)
    True
    >>> compares_identities((lambda self, x: self.last is None or type(x) is list).__code__)
    False
    """
    before = None
    for operation in code.co_code[::2]:
        if operation == _IS and before not in _CONSTANT:
            return True
        before = before if operation == _CACHE else operation
    return any(map(compares_identities, functions_in(code)))


def has_imports(code: types.CodeType) -> bool:
    """Whether code, or a function defined in it, imports anything."""
    return _IMPORT in code.co_code[::2] or any(map(has_imports, functions_in(code)))


def is_called_by_interpreter(name: str) -> bool:
    """Whether a method of this name runs where an object is used, without its name."""
    return name.startswith("__") and name.endswith("__") and name not in _MAKING | _ASIDE


def may_make_others(names: Set[str]) -> bool:
    """Whether code with these names may make an object of a class that it has no name for."""
    return not names.isdisjoint(_MAKE_LIKE)


def texts_of(getter: operator.attrgetter[Any] | operator.methodcaller) -> set[str]:
    """The names of the attributes, or of the method, that an object of ``operator`` looks up.

    >>> sorted(texts_of(operator.attrgetter("options.scale")))
    ['options', 'scale']
    """
    made, arguments = getter.__reduce__()[:2]
    found = getattr(made, "args", ()) or arguments  # of a partial, where a method gets keyword arguments
    texts = found if isinstance(getter, operator.attrgetter) else found[:1]
    return {name for text in texts for name in text.split(".")}


def has_class_patterns(code: types.CodeType) -> bool:
    """Whether code, or a function defined in it, matches classes, whose attributes have their names elsewhere."""
    return _MATCH_CLASS in code.co_code[::2] or any(map(has_class_patterns, functions_in(code)))


def is_making(name: str) -> bool:
    """Whether a method of this name runs where an object or a class is made."""
    return name in _MAKING


def functions_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of the functions that are defined in code, but not of those in these."""
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _texts(code: types.CodeType) -> set[str]:
    texts = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    for inner in functions_in(code):
        texts |= _texts(inner)
    return texts
