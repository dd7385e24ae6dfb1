"""The state of a walk: objects that are still to be looked at, the nearest first, and what has been found so far."""

# Objects of any type are walked.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import abc
import collections
import heapq
import types
from typing import Any

import torch

from pygraph.guards.contents import MAX_BYTES_IN_ALL, Contents
from pygraph.guards.guard_set import GuardSet
from pygraph.guards.packages import is_installed, is_library_class
from pygraph.guards.snapshot import Snapshot
from pygraph.guards.values import is_plain
from pygraph.guards.walk import code_names
from pygraph.guards.walk.library import LibraryNames
from pygraph.guards.walk.unnamed_reads import Readers, names_of_printed

# All objects are followed this deep, and deeper ones as long as these are no more.
_DEEP, _MANY_DEEPER = 6, 20_000

# Methods that torch calls of modules and custom Functions: no code of the user's has names for them.
_CALLED_BY_TORCH = ("forward", "backward", "setup_context", "vjp", "jvp", "vmap")


class Walk:
    """A walk over the objects that a function can reach.

    Attributes:
        follows_hooks: Whether the hooks of tensors are looked at, which autograd calls.
        guards: Guards on what has been found.
        snapshot: Copies of what has been found.
        names: Names of objects in reports, by id.
        kinds: Whether tensors are a ``parameter``, a ``buffer`` or ``closed-over``, by id.
        tensors: The tensors that were found.
        optimizers: The optimizers that were found.
        objects: All objects that were looked at; they are kept alive, so that their ids stay theirs.
        seen: The ids of `objects`.
        weakly: The ids of all that weak references lead to.
        strongly: The ids of all that is found in other ways.
        whole: The function that the callable is a part of, without calling it: of all objects only the attributes count
            that code of the part has names for. None if it is no part.
        own: The object of which the callable is a method; None if it is no method.
        skipped: The name and the depth at which that was found; None if it was not.
        names_of_others: Names in the user's code that is not code of the part.
        unseen: The name of something that was not looked at, since there is too much that deep; None if all was.
        packaged: Whether the object that is being looked at belongs to an installed package.
        memory: How many bytes of NumPy arrays may still be compared.
        code: Names in the user's code, and the namespaces in which they are looked up.
    """

    def __init__(self, *, follows_hooks: bool = False) -> None:
        self.follows_hooks = follows_hooks
        self.names: dict[int, str] = {}
        self.guards = GuardSet(self.names)
        self.snapshot = Snapshot(self.names, self.guards.attributes)
        self.kinds: dict[int, str] = {}
        self.tensors: list[torch.Tensor] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.objects: list[Any] = []
        self.seen: set[int] = set()
        self.weakly: set[int] = set()
        self.strongly: set[int] = set()
        self.whole: Any = None
        self.own: Any = None
        self.skipped: tuple[str, int] | None = None
        self.names_of_others: set[str] = set()
        self.unseen: str | None = None
        self.packaged = False
        self.memory = MAX_BYTES_IN_ALL
        self.code = CodeNames()
        self._visits = 0
        self._deeper = 0
        self._queue: list[tuple[int, int, str, Any, bool]] = []
        # Referents of weak references are looked at when nothing else is left: they may be found in other ways.
        self._weak_queue: list[tuple[int, int, str, Any, bool]] = []

    # -- the order of the walk ----------------------------------------------------------------------------------------

    def visit(self, name: str, value: Any, depth: int, *, weakly: bool = False) -> None:
        """Have a value looked at, after all that is less deep."""
        if issubclass(type(value), type):  # code that finds it may make objects of it, by whatever name
            self.code.callable_classes.update(map(id, value.__mro__))
        self._add(name, value, depth, weakly=weakly)

    def takes_up_whole(self) -> bool:
        """Have the function be looked at that the callable is a part of, if what the part calls may call that again."""
        if self.skipped is None or self.whole is None:
            return False
        (name, depth), whole = self.skipped, self.whole
        called = whole.__name__
        if called not in self.names_of_others and not (called in self.code.names and self._has_others_of_whole()):
            return False
        self.whole = None
        self.seen.discard(id(whole))
        self.visit(name, whole, depth)
        return True

    def _has_others_of_whole(self) -> bool:
        """Whether there is an object besides the callable's own that has that function as its method, as in a tree."""
        name = self.whole.__name__
        kinds = {type(one) for one in self.objects if one is not self.own}
        methods = (next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), None) for kind in kinds)
        return any(method is self.whole for method in methods)

    def visit_class_of(self, name: str, value: object, depth: int) -> None:
        """Have the class of an object looked at, which code may have no name for."""
        self._add(name, type(value), depth, weakly=False)

    def _add(self, name: str, value: Any, depth: int, *, weakly: bool) -> None:
        (self.weakly if weakly else self.strongly).add(id(value))
        if not is_plain(value) and id(value) not in self.seen:
            self._visits += 1
            queue = self._weak_queue if weakly else self._queue
            heapq.heappush(queue, (depth, self._visits, name, value, self.packaged))

    def next(self) -> tuple[str, Any, int] | None:
        """The name of the next object, the object and its depth; None if only weak references lead to the others."""
        while self._queue:
            depth, _, name, value, packaged = heapq.heappop(self._queue)
            if id(value) not in self.seen:
                self.seen.add(id(value))
                self.objects.append(value)
                self.packaged = packaged and not _is_callers(value)
                return name, value, depth
        return None

    def is_at_end(self) -> bool:
        """Whether all has been looked at; the nearest object that only weak references lead to is next otherwise."""
        if not self._queue and self._weak_queue:
            heapq.heappush(self._queue, heapq.heappop(self._weak_queue))
        return not self._queue

    def may_go_deeper(self, name: str, depth: int) -> bool:
        """Whether what is found at a depth is looked at."""
        if depth < _DEEP:
            return True
        self._deeper += 1
        if self._deeper > _MANY_DEEPER:
            self.unseen = self.unseen or name
            self.code.readers.of_any = True  # what is not looked at may read any
            return False
        return True

    # -- what is found ------------------------------------------------------------------------------------------------

    def copy_container(self, name: str, container: Any) -> None:
        """Snapshot a dict or a list."""
        self.objects.append(container)
        self.note_owner(container)
        self.snapshot.add_container(name, container)
        self.guards.container_names[id(container)] = name

    def guard_contents(self, name: str, contents: Contents, compared: Contents | None = None) -> None:
        """Snapshot contents, and guard them, or others that are ``compared`` in their stead."""
        self.snapshot.contents.append((name, contents))
        self.note_owner(contents)
        self.guards.add_contents(contents if compared is None else compared)

    def note_owner(self, owner: object) -> None:
        """Note whether state that `Snapshot.restore` puts back belongs to an installed package."""
        if self.packaged:
            self.snapshot.mark_packaged(owner)


def _is_callers(value: object) -> bool:
    """Whether what a package leads to is not the package's: what is on a list, as of handlers, or of a user's class."""
    kind = type(value)
    return issubclass(kind, (list, collections.deque)) or not (is_library_class(kind) or is_installed(kind.__module__))


class CodeNames:
    """The names that code looks up, and the namespaces in which they may mean something.

    Attributes:
        names: All names in the user's code.
        library: Names in the code of libraries, and the objects that they stand for.
        spaces: Modules, classes, `WeakAttributes` and dicts of attributes of which only those count that code has names
            for: a name in reports, the object, its depth.
        callable_classes: The ids of classes that code may call.
        factories: Classes with a class method, which may call the class that it is called on.
        abstract_classes: Abstract classes that code may call, or use to check of which class an object is.
        imported: Modules and sets of names, by id, that have been looked up in each other.
        classes: The classes of the objects whose dicts of attributes are among `spaces`, by the id of the dict.
        looked_up: Attributes of `spaces`, by the id of the space and name, that are guarded.
        compares_identities: Whether code asks whether two objects that it has found are the same one.
        readers: The code that reads attributes without having names for them.
        read_only: The ids of functions of which nothing but their names is looked at.
        guarded_variables: Variables of modules and attributes of classes, by the id of their owner and name.
    """

    def __init__(self) -> None:
        self.names: set[str] = set(_CALLED_BY_TORCH)
        self.library = LibraryNames()
        self.spaces: list[tuple[str, Any, int]] = []
        self.callable_classes: set[int] = set()
        self.factories: set[type] = set()
        self.abstract_classes: list[abc.ABCMeta] = []
        self.classes: dict[int, type] = {}
        self.imported: set[tuple[int, int]] = set()
        self.looked_up: set[tuple[int, str]] = set()
        self.read_only: set[int] = set()
        self.guarded_variables: set[tuple[int, str]] = set()
        self.compares_identities = False
        self.readers = Readers()

    def add_code(self, fn: types.FunctionType) -> set[str]:
        """Note the names in the code of a function, and what it reads without; returns the names."""
        names = code_names.asked_for(fn.__code__) | names_of_printed(fn.__code__)
        self.names |= names
        self.readers.add_function(fn)
        if code_names.has_class_patterns(fn.__code__):
            self.readers.of_any = True
        self.compares_identities |= code_names.compares_identities(fn.__code__)
        return names

    def add_attributes(self, name: str, value: Any, state: dict[str, Any], depth: int) -> None:
        """Add the dict of an object's attributes, of which those count that code has names for."""
        self.classes[id(state)] = type(value)
        self.spaces.append((name, state, depth))

    def may_read_all_in(self, state: dict[str, Any]) -> bool:
        """Whether code that was found may read attributes that it has no names for in the dict of an object."""
        return self.readers.may_read_all_of(self.classes[id(state)])
