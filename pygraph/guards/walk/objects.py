"""Rules for objects with attributes: tensors, modules, optimizers, objects of the user's classes."""

# Attributes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import abc
import argparse
import collections
import contextlib
import functools
import gc
import queue
import sys
import types
from multiprocessing import sharedctypes
from typing import Any, Generic

import torch
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.guards.attributes import attributes_of, slots_of
from pygraph.guards.contents import Contents
from pygraph.guards.packages import is_library, is_library_class
from pygraph.guards.report_names import join
from pygraph.guards.settings import PARAMETRIZED
from pygraph.guards.snapshot import SCALER_RECORDS
from pygraph.guards.tensor_hooks import hooks_of
from pygraph.guards.walk.containers import walk_attributes, walk_container, walk_items
from pygraph.guards.walk.state import Walk
from pygraph.guards.weak_references import WeakAttributes

# Classes of libraries whose objects change their attributes while a function uses them.
_STATEFUL = (
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler,
    torch.distributions.Distribution, types.SimpleNamespace, argparse.Namespace,
    collections.UserDict, collections.UserList, collections.ChainMap, queue.Queue, BaseException,
    functools.partialmethod, functools.singledispatchmethod, sharedctypes.SynchronizedBase, contextlib.nullcontext,
    contextlib.closing,
)  # fmt: skip

# Classes of libraries whose methods read no attributes of a user's object that are not looked at in any case.
_WITHOUT_STATE = (object, abc.ABC, Generic, torch.nn.Module)

_CALLABLE = (types.FunctionType, types.MethodType, functools.partial)

# Attributes that every nn.Module has: hooks that run in a call, and tables that a call does not look at.
HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_MACHINERY = frozenset(torch.nn.Module().__dict__) - {"training"} - _TABLES - HOOKS

GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")  # fmt: skip


def walk_tensor(walk: Walk, name: str, tensor: torch.Tensor, depth: int) -> None:
    """Note a tensor, and guard its class and the attributes that it has been given."""
    is_parameter = issubclass(type(tensor), torch.nn.Parameter)
    walk.names[id(tensor)] = name
    walk.kinds.setdefault(id(tensor), "parameter" if is_parameter else "closed-over")
    walk.tensors.append(tensor)
    walk.guards.code.add_object(name, tensor)
    walk_attributes(walk, name, tensor, depth)
    if walk.follows_hooks and (is_parameter or tensor.requires_grad):
        walk.guards.hooks.add(name, tensor)
        for hooks in hooks_of(tensor):
            if hooks is not None:
                walk_container(walk, f"the hooks of {name}", hooks, depth)


def walk_donated(walk: Walk, name: str, tensor: torch.Tensor, depth: int) -> None:
    """Do nothing: whether the function uses a donated tensor will show; its identity is guarded where it was found."""


def refuse_script_module(walk: Walk, name: str, module: Any, depth: int) -> None:
    """Refuse a TorchScript module."""
    raise TraceError(
        describe(name or "the function", f"a {type(module).__name__}",
                 expected="modules whose state lies in Python objects",
                 remedy="Transform the module that it was made from.")
    )  # fmt: skip


def _communicates(cls: type) -> bool:
    """Whether modules of a class talk to other processes while they run: DDP, and FSDP where that has been imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return issubclass(cls, (torch.nn.parallel.DistributedDataParallel, *sharded))


def walk_module(walk: Walk, name: str, module: torch.nn.Module, depth: int) -> None:
    """Guard, snapshot and walk an ``nn.Module``: parameters, buffers, submodules, hooks, other attributes, code.

    Raises:
        TraceError: It talks to other processes, by hooks whose state a trace would change and not put back.
    """
    if _communicates(type(module)):
        problem = f"a {type(module).__name__}, which talks to other processes while it runs"
        what = name or "the module"
        raise TraceError(describe(what, problem, expected="modules of one process", remedy="Transform a part of it."))
    state, by_name = module.__dict__, _is_read_by_name(module)
    walk.guards.code.add_object(name, module)
    walk.guards.attributes.add(name, module, state)
    walk.copy_container(name, state)
    walk.guards.lengths.append((state, len(state)))
    for key, value in list(state.items()):
        if key in _TABLES:
            _walk_table(walk, join(name, key), name, value, depth)
        elif key in HOOKS:
            walk_container(walk, join(name, key), value, depth)
        elif key not in _MACHINERY and (key == "training" or not by_name):
            walk.guards.entries.append((state, key, value))
            walk.visit(join(name, key), value, depth)
    if by_name:
        walk.code.add_attributes(name, module, state, depth)
    for buffer in (state.get("_buffers") or {}).values():
        if buffer is not None:
            walk.kinds[id(buffer)] = "buffer"
    if isinstance(module, ParametrizationList):
        walk.code.names.add(PARAMETRIZED)
    for key in GLOBAL_HOOKS:
        walk.visit(key, getattr(torch.nn.modules.module, key), depth)
    walk.visit_class_of(name, module, depth)
    forward = type(module).forward
    if isinstance(forward, types.FunctionType):
        walk.visit(name, forward, depth)


def _is_read_by_name(value: Any) -> bool:
    """Whether of an object only the attributes count that code has names for, as its methods are all the user's."""
    if type(attributes_of(value)) is not dict or type(value) in pytree.SUPPORTED_NODES:
        return False
    bases = type(value).__mro__
    return all(base in _WITHOUT_STATE or not is_library_class(base) for base in bases)


def _walk_table(walk: Walk, name: str, owner: str, table: dict[str, Any], depth: int) -> None:
    """Guard, snapshot and walk the parameters, buffers or submodules of a module."""
    walk.copy_container(name, table)
    walk.guards.lengths.append((table, len(table)))
    walk.guards.key_orders[id(table)] = tuple(table)
    for key, child in list(table.items()):
        walk.guards.entries.append((table, key, child))
        walk.visit(join(owner, key), child, depth)


def walk_dict_or_list(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Guard, snapshot and walk a dict or a list, and its attributes if its class is the user's."""
    walk_container(walk, name, value, depth)
    _walk_user_object(walk, name, value, depth)


def walk_other(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Guard, snapshot and walk an object of a kind that has no rule of its own."""
    if walk.may_go_deeper(name, depth):
        walk_items(walk, name, value, depth)
    _walk_user_object(walk, name, value, depth)


def is_user_object(value: Any) -> bool:
    """Whether an object's attributes are state of the user's."""
    return issubclass(type(value), _STATEFUL) or not is_library_class(type(value))


def _walk_user_object(walk: Walk, name: str, value: Any, depth: int) -> None:
    if is_user_object(value):
        if walk.may_go_deeper(name, depth):
            _walk_object(walk, name, value, depth)
        return
    state = attributes_of(value) or {}
    if (wrapped := state.get("__wrapped__")) is not None:
        walk.visit(name, wrapped, depth)  # a transformed function's own
    if issubclass(type(value), torch.library.CustomOpDef):  # pyright: ignore[reportPrivateImportUsage]  # in its docs
        return  # an operation of the user's is opaque to a trace, and so is what its code reads
    for key, item in list(state.items()):  # what a library has been given to call, as the hooks of saved tensors
        if issubclass(type(item), _CALLABLE) and not is_library(getattr(item, "__module__", None)):
            walk.visit(join(name, key), item, depth + 1)


def walk_decorating(walk: Walk, name: str, manager: Any, depth: int) -> None:
    """Walk what a context manager is made of that decorates a function: of each call of it, another one is made."""
    for key in ("func", "args", "kwds"):
        walk.visit(join(name, key), manager.__dict__.get(key), depth + 1)


def walk_key(walk: Walk, name: str, key: Any, depth: int) -> None:
    """Walk the function that ``functools.cmp_to_key`` has been given, which has no name there."""
    for item in gc.get_referents(key):
        walk.visit(name, item, depth + 1)


def _walk_object(walk: Walk, name: str, value: Any, depth: int) -> None:
    cls = type(value)
    walk.guards.code.add_object(name, value)
    if issubclass(cls, torch.optim.Optimizer):
        walk.optimizers.append(value)
    state = attributes_of(value)
    if state is not None:
        _walk_state(walk, name, value, state, depth)
    if issubclass(cls, BaseException):
        contents = Contents(lambda: value.args, lambda args: setattr(value, "args", args))
        walk.guard_contents(join(name, "args"), contents)
        for index, item in enumerate(value.args):
            walk.visit(f"{name}.args[{index}]", item, depth + 1)
    slots = slots_of(value)
    if slots is not None:
        items, contents = slots
        walk.guard_contents(name, contents)
        for key, item in items.items():
            walk.visit(join(name, key), item, depth + 1)
    walk.visit_class_of(name, value, depth)
    call = getattr(cls, "__call__", None)  # noqa: B004  (its function is wanted, not whether it is there)
    if isinstance(call, types.FunctionType):
        walk.visit(name, call, depth)


def _walk_state(walk: Walk, name: str, value: Any, state: dict[str, Any], depth: int) -> None:
    """Guard, snapshot and walk the attributes in an object's dict."""
    walk.copy_container(name, state)
    if id(value) in walk.weakly - walk.strongly:
        # It belongs to somebody else, as a trainer that counts steps: not all of it concerns who refers to it.
        walk.weakly.add(id(state))
        attributes = WeakAttributes(value)
        walk.guards.add_contents(attributes.number())
        walk.code.spaces.append((name, attributes, depth))
    else:
        walk.guards.attributes.add(name, value, state)
        walk.guards.lengths.append((state, len(state)))
        if _is_read_by_name(value):
            walk.code.add_attributes(name, value, state, depth)
            return
        for key, item in list(state.items()):
            walk.guards.entries.append((state, key, item))
            walk.visit(join(name, key), item, depth + 1)
    records = state.get(SCALER_RECORDS) if issubclass(type(value), torch.amp.GradScaler) else None
    if records is not None and not records:
        walk.snapshot.scaler_records.append((state, records))
