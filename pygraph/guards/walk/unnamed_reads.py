"""Which attributes code reads without having names for them: those of any object, or of its method's own object only.

`self.__dict__[key]` reads attributes of ``self`` and of nothing else: what a trainer counts in its other objects may
change. What cannot be told from the code counts as a read of any object.
"""

# Functions, classes and what they close over are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import opcode
import re
import sys
import types
from collections.abc import Sequence, Set
from typing import Any

from pygraph.guards.packages import is_library
from pygraph.guards.storage import stored_in_cell
from pygraph.guards.walk.code_names import functions_in, has_imports

# Attributes of an object with which all of its attributes can be read.
_ATTRIBUTES = frozenset({"__dict__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__"})

# Builtin functions that read the attributes of their first argument, by whatever name.
_BUILTINS = frozenset({"getattr", "vars", "dir"})

# What reads attributes of any object that it can reach: by these names only, or by them as variables and of modules.
_UNMISTAKABLE = frozenset({"deepcopy", "asdict", "astuple", "getmembers", "getattr_static", "attrgetter"})
_OF_MODULES = frozenset({"eval", "exec", "copy", "replace", "fields", "dump", "dumps"})

# How methods call their object, also those of classes that no module has.
_OWN_OBJECT = "self"

_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME"})
_OF_VARIABLES = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})

_NAMES = _ATTRIBUTES | _BUILTINS | _UNMISTAKABLE | _OF_MODULES

# Functions that print an object call its `__repr__`, which has names for what it reads, or a module's `extra_repr`.
_PRINTING = frozenset({"print", "str", "repr", "format"})
_OF_PRINTED = frozenset({"extra_repr", "_get_name"})
_FORMATTING = frozenset(
    opcode.opmap[name] for name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC") if name in opcode.opmap
)

# A replacement field of `str.format` up to its conversion, and an attribute in it: `{loss.avg:.3f}`.
_FIELD, _FIELD_ATTRIBUTE = re.compile(r"\{([^{}:!]+)"), re.compile(r"\.(\w+)")


@dataclasses.dataclass(frozen=True)
class UnnamedReads:
    """The reads of code that has no names for them.

    Attributes:
        of_any: Whether it reads attributes of objects of any class.
        of_own: Whether it reads attributes of the object whose method it is.
        by_modules: Variables that make ``of_any`` hold if they are modules, as ``copy`` in ``copy.copy(x)``.
    """

    of_any: bool = False
    of_own: bool = False
    by_modules: frozenset[str] = frozenset()

    def __or__(self, other: UnnamedReads) -> UnnamedReads:
        """The reads of two pieces of code."""
        return UnnamedReads(
            self.of_any or other.of_any, self.of_own or other.of_own, self.by_modules | other.by_modules
        )


_NOTHING, _ANY = UnnamedReads(), UnnamedReads(of_any=True)
_OWN = UnnamedReads(of_own=True)


@functools.lru_cache(maxsize=8192)  # every walk asks, and it takes longer than all else of a walk
def unnamed_reads(code: types.CodeType) -> UnnamedReads:
    """Look for reads without names in code and in the functions that are defined in it.

    >>> unnamed_reads((lambda self, key: self.__dict__[key]).__code__).of_own
    True
    >>> unnamed_reads((lambda self, key: getattr(self.options, key)).__code__).of_any
    True
    >>> unnamed_reads((lambda options, other: (getattr(options, "scale", 1.0), other.copy())).__code__)
    UnnamedReads(of_any=False, of_own=False, by_modules=frozenset({'other'}))
    """
    return _reads(code, code.co_varnames[0] if code.co_argcount else None)


def names_of_printed(code: types.CodeType) -> set[str]:
    """Names of methods and attributes that code reads of what it prints and formats, without having them as names.

    >>> sorted(names_of_printed((lambda loss: print("{loss.avg:.3f}".format(loss=loss))).__code__))
    ['_get_name', 'avg', 'extra_repr']
    """
    names = {name for text in code.co_consts if isinstance(text, str) for name in names_in_fields(text)}
    if not (_PRINTING.isdisjoint(code.co_names) and _FORMATTING.isdisjoint(code.co_code[::2])):
        names |= _OF_PRINTED
    return names.union(*map(names_of_printed, functions_in(code)))


def names_in_fields(text: str) -> set[str]:
    """The attributes that a text for ``str.format`` reads."""
    return (
        {name for field in _FIELD.findall(text) for name in _FIELD_ATTRIBUTE.findall(field)} if "{" in text else set()
    )


class Readers:
    """The code of a function that reads attributes without having names for them.

    Attributes:
        of_any: Whether there is any that may read attributes of objects of all classes.
    """

    def __init__(self) -> None:
        self.of_any = False
        # Classes with a method that reads attributes of its object, by module and qualified name.
        self._own: set[tuple[str, str]] = set()

    def add_function(self, fn: types.FunctionType) -> None:
        """Note what a function reads."""
        reads, owner = unnamed_reads(fn.__code__), _class_of_method(fn)
        if reads.of_any or (reads.of_own and owner is None) or any(_is_module(fn, name) for name in reads.by_modules):
            self.of_any = True
        elif reads.of_own and owner is not None:
            self._own.add(owner)

    def add_method(self, cls: type, fn: Any) -> None:
        """Note that a class has a function as its method, which may have been defined for another class."""
        is_others = issubclass(type(fn), types.FunctionType) and _class_of_method(fn) not in (None, _named(cls))
        if is_others and unnamed_reads(fn.__code__).of_own:
            self.of_any = True

    def add_value(self, value: Any) -> None:
        """Note a function or a class that was found, under whatever name; a library's may read all that it is given."""
        name = type.__dict__["__name__"].__get__(value) if issubclass(type(value), type) else value.__name__
        if name in _NAMES and is_library(value.__module__):
            self.of_any = True

    def add_texts(self, texts: Set[str]) -> None:
        """Note texts that name attributes, one of which may stand for all of them."""
        if not _ATTRIBUTES.isdisjoint(texts):
            self.of_any = True

    def may_read_all_of(self, cls: type) -> bool:
        """Whether attributes of a class's objects may be read that code has no names for."""
        return self.of_any or any(_named(base) in self._own for base in cls.__mro__)


def _class_of_method(fn: types.FunctionType) -> tuple[str, str] | None:
    """The module and the qualified name of the class of which a function is a method; None if it is none."""
    owner, _, name = fn.__qualname__.rpartition(".")
    if not owner or owner.endswith("<locals>"):
        return None
    found: Any = sys.modules.get(fn.__module__)
    for part in (*owner.split("."), name):
        found = vars(found).get(part) if issubclass(type(found), (types.ModuleType, type)) else None
    is_method = found is not None and not issubclass(type(found), staticmethod)
    return (fn.__module__, owner) if is_method or fn.__code__.co_varnames[:1] == (_OWN_OBJECT,) else None


def _named(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _is_module(fn: types.FunctionType, variable: str) -> bool:
    """Whether a variable of a function is a module, or may be one that the function imports."""
    if variable in fn.__code__.co_freevars:
        value = stored_in_cell((fn.__closure__ or ())[fn.__code__.co_freevars.index(variable)])
    else:
        value = fn.__globals__.get(variable)
    return issubclass(type(value), types.ModuleType) or (variable not in fn.__globals__ and has_imports(fn.__code__))


def _reads(code: types.CodeType, own: str | None) -> UnnamedReads:
    found = _NOTHING
    if not _NAMES.isdisjoint(code.co_names):
        instructions = [one for one in dis.get_instructions(code) if one.opname not in _SKIPPED]
        if any(one.opname.startswith("STORE_") and own in _variables(one) for one in instructions):
            own = None  # it is another object from there on
        for index, one in enumerate(instructions):
            if isinstance(one.argval, str) and one.argval in _NAMES:
                found |= _read(instructions, index, own)
    for inner in functions_in(code):
        found |= _reads(inner, own if own in inner.co_freevars else None)
    return found


def _read(code: Sequence[dis.Instruction], index: int, own: str | None) -> UnnamedReads:
    """The reads of an instruction that has one of the names."""
    name, kind = code[index].argval, code[index].opname
    if kind == "LOAD_CONST" or kind.startswith("STORE_"):
        return _NOTHING
    before = _variables(code[index - 1])[-1:] if index else ()
    if name in _ATTRIBUTES:
        return _OWN if own is not None and own in before else _ANY
    is_variable = kind in _OF_VARIABLES
    if name in _OF_MODULES and not is_variable and kind != "IMPORT_FROM":
        return UnnamedReads(by_modules=frozenset(before))
    if name in _BUILTINS and is_variable:
        return _read_by_builtin(code, index, own)
    return _ANY


def _read_by_builtin(code: Sequence[dis.Instruction], index: int, own: str | None) -> UnnamedReads:
    """The reads of a call of ``getattr``, ``vars`` or ``dir``, by the instructions that make its arguments."""
    name, arguments = code[index].argval, _arguments(code[index + 1 :])
    if not arguments:
        return _ANY
    if name == "getattr" and len(arguments) > 1 and _is_name(arguments[1]):
        return _NOTHING  # it is among the texts of the code
    # What `getattr` and `dir` find may be a method, which reads what it likes.
    is_own = arguments[0] is not None and own is not None and _variables(arguments[0])[:1] == (own,)
    return _OWN if name == "vars" and is_own else _ANY


def _is_name(one: dis.Instruction | None) -> bool:
    """Whether an instruction loads a text that names one attribute."""
    text = one.argval if one is not None and one.opname == "LOAD_CONST" else None
    return isinstance(text, str) and text.isidentifier() and text not in _ATTRIBUTES


def _arguments(code: Sequence[dis.Instruction]) -> list[dis.Instruction | None] | None:
    """The instruction that loads each argument of a call, None where there are several; None if it cannot be told."""
    makers: dict[int, list[dis.Instruction]] = collections.defaultdict(list)
    depth = 0
    for one in code:
        if one.opname == "PUSH_NULL":
            continue
        if one.opname in ("PRECALL", "CALL") and one.arg == depth:
            found = [makers[argument + 1] for argument in range(depth)]
            return [made[0] if len(made) == 1 else None for made in found]
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            return None
        effect = dis.stack_effect(one.opcode, one.arg)
        for height in range(depth + 1, depth + effect + 1) if effect > 0 else (depth + effect,):
            makers[height].append(one)
        depth += effect
        if depth < 0:
            return None  # it is no call
    return None


def _variables(one: dis.Instruction) -> tuple[str, ...]:
    """The variables that an instruction loads or stores: two, for some."""
    if "FAST" not in one.opname and "DEREF" not in one.opname and one.opname not in _OF_VARIABLES:
        return ()
    held: Any = one.argval
    return tuple[str, ...](held) if isinstance(held, tuple) else (held,)
