"""Triton kernels that load some of their pointers from a table.

A captured kernel node holds addresses. For a replay on other memory they can be patched, at a cost per node; or the
kernel itself looks them up. A *trampoline* is that kernel: the same code with the same parameters at the same offsets,
but a pointer parameter that is *indirect* is the address of a table entry, which holds the real pointer. Filling the
table then serves every kernel at once.

The trampoline is a Triton kernel of its own, compiled with the options of the original, that loads the pointers and
calls the original's Python function with them::

    def add_trampoline(x, y, out, n, BLOCK):
        x_loaded = tl.multiple_of(tl.load(x).to(tl.pointer_type(tl.float32)), [16])
        kernel(x_loaded, y, out, n, BLOCK)
"""

# Triton has no types, and neither its compiled kernels nor their sources are public. Checked with triton 3.6.
# pyright: reportPrivateUsage=false, reportMissingImports=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import importlib
import itertools
import linecache
import re
import threading
import weakref
from collections.abc import Sequence
from typing import Any

# Triton's names of element types in signatures, and in its language where they differ.
_ELEMENTS = {
    **{f"fp{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "bf16": "bfloat16",
    "i1": "int1",
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{name: f"float8{name[3:]}" for name in ("fp8e4nv", "fp8e5", "fp8e4b15", "fp8e4b8", "fp8e5b16")},
}

_POINTER = re.compile(r"\*k?(\w+)")

_DIVISIBLE = ["tt.divisibility", 16]


@dataclasses.dataclass(frozen=True)
class Trampoline:
    """A loaded kernel that takes addresses of table entries for some of its pointers.

    Attributes:
        function: The ``CUfunction`` handle, valid while this object lives.
        shared: Bytes of dynamic shared memory that a launch needs.
        block: Threads in a block.
        name: The kernel's name on the device.
        indirect: The parameters that are addresses of table entries.
        compiled: Triton's compiled kernel, which keeps the code loaded.
    """

    function: int
    shared: int
    block: tuple[int, int, int]
    name: str
    indirect: tuple[int, ...]
    compiled: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Refused:
    """The reason why a kernel has no trampoline."""

    reason: str


def trampoline(kernel: Any, indirect: Sequence[int]) -> Trampoline | Refused:
    """Compile a kernel that loads some pointers of ``kernel`` from a table, and load it in the current context.

    Its parameters have the sizes and offsets of the original's, hidden trailing ones included, and a launch needs the
    same grid. The table entry is read once per block, so it must hold the pointer when the kernel starts.

    Args:
        kernel: A ``triton.compiler.CompiledKernel``.
        indirect: Positions of those pointers among the parameters of the ``CUfunction``: constexprs, None and
            arguments that were specialised to 1 are not among them.

    Returns:
        The trampoline, the same one for the same arguments; or why there is none.

    Raises:
        ValueError: A position is not that of a pointer.
    """
    key = tuple(sorted(set(indirect)))
    with COMPILING:
        known = _TRAMPOLINES.setdefault(kernel, {})
        if key not in known:
            compiled = compile_trampoline(kernel, key)
            known[key] = compiled if isinstance(compiled, Refused) else _load(compiled, key)
        return known[key]


def can_load(kernel: Any) -> bool:
    """Whether a kernel may have trampolines."""
    return why_no_trampoline(kernel) is None


def _load(compiled: Any, indirect: tuple[int, ...]) -> Trampoline:
    compiled._init_handles()
    metadata = compiled.metadata
    threads = metadata.num_warps * metadata.target.warp_size
    return Trampoline(compiled.function, metadata.shared, (threads, 1, 1), compiled.name, indirect, compiled)


COMPILING = threading.Lock()
"""Held while Triton compiles: it reads settings of the process."""

_TRAMPOLINES: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Trampoline | Refused]] = weakref.WeakKeyDictionary()


# ---- the kernel that looks its pointers up ---------------------------------------------------------------------


def compile_trampoline(kernel: Any, indirect: Sequence[int]) -> Any:
    """The trampoline as Triton's compiled kernel, not loaded yet; needs no GPU.

    Args:
        kernel: As for `trampoline`.
        indirect: As for `trampoline`.

    Returns:
        A ``triton.compiler.CompiledKernel``, or a `Refused`.

    Raises:
        ValueError: A position is not that of a pointer.
    """
    reason = why_no_trampoline(kernel)
    if reason is not None:
        return Refused(reason)
    compiler = importlib.import_module("triton.compiler")
    source = kernel.src
    names = list(source.signature)
    parameters = runtime_parameters(kernel)
    chosen: list[str] = []
    for position in indirect:
        if not 0 <= position < len(parameters) or not _POINTER.fullmatch(source.signature[parameters[position]]):
            raise ValueError(f"parameter {position} of {kernel.name} is no pointer: {source.signature}")
        chosen.append(parameters[position])
    for name in chosen:
        if _element(source.signature[name]) is None:
            return Refused(f"{name} points to {source.signature[name]}, a type that is not known")
    aligned = {name for name in chosen if _DIVISIBLE in _attributes(source, names.index(name))}
    function = _function(source, chosen, aligned)
    signature = {name: "*i64" if name in chosen else kind for name, kind in source.signature.items()}
    # The address of an entry is a multiple of 8, whatever the pointer in it is.
    attributes = {path: value for path, value in source.attrs.items() if names[path[0]] not in chosen}
    # Metadata went through JSON, which has no tuples; the options must be hashable.
    metadata = kernel.metadata._asdict()
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in metadata.items()}
    built = compiler.compile(
        compiler.ASTSource(function, signature, source.constants, attributes),
        target=kernel.metadata.target,
        options=options,
    )
    return _difference(kernel, built) or built


def runtime_parameters(kernel: Any) -> list[str]:
    """Names of the arguments that a compiled kernel takes when it is launched, in the order of its parameters."""
    return [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]


def why_no_trampoline(kernel: Any) -> str | None:
    """The reason why a kernel can have no trampoline; None if it may have one."""
    compiler = importlib.import_module("triton.compiler")
    jit = importlib.import_module("triton.runtime.jit")
    source, metadata = kernel.src, kernel.metadata
    if not isinstance(source, compiler.ASTSource) or type(source.fn) is not jit.JITFunction:
        return "it was not compiled from a triton.jit function"
    if source.fn.noinline:
        return "its function is not inlined"
    if metadata.target.backend != "cuda":
        return f"it is a kernel for {metadata.target.backend}"
    if any(
        not isinstance(kind, str) or kind.startswith(("tensordesc", "nvTmaDesc")) for kind in source.signature.values()
    ):
        return "it takes tuples or tensor descriptors"
    if any(len(path) != 1 for path in (*source.constants, *source.attrs)):
        return "it takes tuples"
    if metadata.num_ctas != 1:
        return "it is launched in clusters"
    if metadata.launch_cooperative_grid or metadata.launch_pdl:
        return "its launch has attributes (cooperative grid, programmatic dependent launch)"
    if metadata.ir_override is not None:
        return "its code was overridden"
    return None


def _element(kind: str) -> str | None:
    match = _POINTER.fullmatch(kind)
    return _ELEMENTS.get(match.group(1)) if match else None


def _attributes(source: Any, position: int) -> list[Any]:
    return [list(attribute) for attribute in source.attrs.get((position,), ())]


_COUNTER = itertools.count()


def trampoline_text(source: Any, chosen: Sequence[str], aligned: set[str]) -> str:
    """The Python source of a trampoline.

    Args:
        source: The ``ASTSource`` of the original.
        chosen: Names of the parameters that are addresses of table entries.
        aligned: Names of parameters whose pointers are multiples of 16, for which the original was specialised.
    """
    lines = [f"def {source.fn.__name__}_trampoline({', '.join(source.signature)}):"]
    passed = list(source.signature)
    for name in chosen:
        pointer = f"tl.load({name}).to(tl.pointer_type(tl.{_element(source.signature[name])}))"
        lines.append(f"    {name}_loaded = {f'tl.multiple_of({pointer}, [16])' if name in aligned else pointer}")
        passed[passed.index(name)] = f"{name}_loaded"
    lines.append(f"    pygraph_kernel({', '.join(passed)})")
    return "\n".join(lines) + "\n"


def _function(source: Any, chosen: Sequence[str], aligned: set[str]) -> Any:
    """The trampoline as a ``triton.jit`` function; Triton reads its text through the cache of source lines."""
    triton = importlib.import_module("triton")
    text = trampoline_text(source, chosen, aligned)
    filename = f"<pygraph trampoline {next(_COUNTER)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope = {"tl": triton.language, "pygraph_kernel": source.fn, "__name__": __name__}
    exec(compile(text, filename, "exec"), scope)
    try:
        return triton.jit(scope[f"{source.fn.__name__}_trampoline"])
    finally:
        del linecache.cache[filename]


def _difference(kernel: Any, built: Any) -> Refused | None:
    """The reason why a launch of the trampoline differs from one of the original, if it does."""
    for field in ("num_warps", "cluster_dims", "global_scratch_size", "profile_scratch_size"):
        ours, theirs = getattr(built.metadata, field, None), getattr(kernel.metadata, field, None)
        if ours != theirs:
            return Refused(f"{field} is {ours} in the trampoline and {theirs} in the kernel")
    ours, theirs = parameter_sizes(built), parameter_sizes(kernel)
    return Refused(f"its parameters are {theirs}, the trampoline's {ours}") if ours != theirs else None


def parameter_sizes(kernel: Any) -> list[str] | None:
    """The types of a compiled kernel's parameters in PTX, hidden ones included; None if there is no PTX."""
    text = kernel.asm.get("ptx")
    if text is None:
        return None
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", text, re.DOTALL)
    return re.findall(r"\.param\s+\.(\w+)", entry.group(1)) if entry else None
