"""`devicify`: take the host out of the device's part of a Program, so that a graph of it can be recorded."""

from __future__ import annotations

from torch import fx

from pygraph.errors import StageError, describe
from pygraph.ir.decisions import is_question
from pygraph.ir.descriptors import ScalarArgument
from pygraph.ir.effects import has_effect
from pygraph.ir.order import note_order
from pygraph.ir.program import Program
from pygraph.ir.random_integers import RANDOM_INTEGERS
from pygraph.transforms.host_values.code_motion import gather_device_work
from pygraph.transforms.host_values.constants import host_constants
from pygraph.transforms.host_values.elements import read_elements
from pygraph.transforms.host_values.graph_edit import GraphEdit
from pygraph.transforms.host_values.operands import replace_host_operands
from pygraph.transforms.host_values.scalar_arithmetic import device_arithmetic
from pygraph.transforms.host_values.transfers import (
    TO_COPY,
    is_device_operation,
    is_number,
    is_upload,
    on_device,
    write_uploads_alike,
)
from pygraph.transforms.host_values.uploads import Uploads
from pygraph.transforms.padding.bounds import Bounds, pad_to_bounds


def devicify_program(program: Program, bounds: Bounds = ()) -> Program:
    """Make the device's part of a Program independent of host values and host memory.

    Before::

        def program(x: "bfloat16[4] cuda", k: "float", i: "int64[2] cpu"):
            mul = aten.mul.Tensor(x, k)
            index = aten.index.Tensor(mul, [i])

    After::

        def program(x: "bfloat16[4] cuda", k: "float", i: "int64[2] cpu"):
            copy = aten._to_copy.default(i, device="cuda:0")
            scalar = pygraph.scalar(k, dtype=float32, device="cuda:0")
            wide = aten._to_copy.default(x, dtype=float32)
            product = aten.mul.Tensor(wide, scalar)
            mul = aten._to_copy.default(product, dtype=bfloat16)
            index = aten.index.Tensor(mul, [copy])

    - A host number, or a 0-d CPU tensor, that a device operation takes becomes a ``pygraph.scalar``, and the
      operation the one that takes tensors (see `pygraph.transforms.rules`). A number read from a device tensor only to
      go back to the device stays there, without a synchronisation.
    - Arithmetic on 0-d CPU tensors that only the device uses is done there, where all devices round alike.
    - A number that is read from an input on the host (a 0-d CPU tensor of the caller's) is an input of its own.
    - Constants on the host become constants on the device, uploaded once. Those that are made by exact operations
      alone (``arange``, ``zeros`` ...) are made on the device. Random ones stay: the host's generator draws them.
      Tensors that the caller can change are read at every call.
    - Host work and uploads move to the front, downloads and the host work on them as far back as their users
      allow, so that device operations form long runs. Random draws on the host keep their order.

    Results are those of eager torch on CUDA bit for bit, except: ``pow`` with a number 2, 0.5, -1 ... (eager has
    special cases, also for ``(-inf) ** 0.5`` and ``(-0.0) ** 0.5``), and sums with a factor from the host
    (``addmm(..., alpha=k)``), which are within a rounding or two. ``x / k`` is ``x * (1 / k)`` on CUDA, as in
    eager. A number too large for the dtype becomes inf where eager's ``masked_fill`` or ``full`` raise.

    Method: CUDA-Graph-aware code transformation (CGCT) of PyGraph, arXiv 2503.19779.

    Args:
        program: A Program at stage ``aten``; it is not changed.
        bounds: The most entries of results whose size depends on data, by operation or line: these are padded.

    Returns:
        A Program with the same results. All inputs stay, used or not; uploaded constants, and numbers read from
        inputs, are appended to them. ``fallbacks`` names every operation that still takes a host value. A Program
        without a device is returned with only its history changed.

    Raises:
        StageError: A later pass has been applied already.
        DeviceError: if a constant has to be uploaded and the device is not there.

    >>> import torch, pygraph
    >>> devicify_program(pygraph.trace(lambda x, k: x * k)(torch.ones(2), 3.0)).history
    ('trace', 'devicify')
    """
    if program.stage != "aten":
        raise StageError(
            describe(f"devicify({program.name})", f"stage {program.stage!r}", expected="'aten'",
                     remedy="Apply devicify first: graphify(indirect(devicify(f))).")
        )  # fmt: skip
    history = (*program.history, "devicify")
    if program.device.type == "cpu":
        return program.replace(history=history)
    edit = GraphEdit(program)
    note_order(edit.graph)
    fallbacks = pad_to_bounds(edit, bounds) if bounds else []
    write_uploads_alike(edit.graph)
    arithmetic = device_arithmetic(edit.graph)
    uploads = Uploads(edit, host_constants(edit.graph, program, arithmetic), arithmetic)
    for node in list(edit.graph.nodes):
        if node.target is TO_COPY and is_upload(node):
            uploads.replace_copy(node)
    for node in list(edit.graph.nodes):
        if is_device_operation(node) and not is_question(node):
            fallbacks += replace_host_operands(node, uploads)
    edit.graph.eliminate_dead_code(is_impure_node=has_effect)
    read_elements(edit)
    gather_device_work(edit.graph, edit.device)
    edit.graph.lint()
    edit.module.recompile()
    new = tuple(fallback for fallback in fallbacks if fallback not in program.fallbacks)
    return program.replace(
        module=edit.module, inputs=tuple(edit.inputs), history=history, fallbacks=(*program.fallbacks, *new)
    )


def undevicified_scalars(program: Program) -> set[int]:
    """Indices of the `ScalarArgument` inputs whose values a device operation still takes as host values.

    The caller can bake those in, by tracing again with them static. Host arithmetic is followed backwards. Bounds of
    random integers are none of them: these are drawn between graphs.

    Args:
        program: A Program that `devicify_program` returned.
    """
    pending = [
        source
        for node in program.nodes
        if is_device_operation(node) and node.target is not RANDOM_INTEGERS
        for source in node.all_input_nodes
        if is_number(source)
    ]
    numbers = {
        node: index
        for index, (node, descriptor) in enumerate(zip(program.placeholders, program.inputs, strict=True))
        if isinstance(descriptor, ScalarArgument)
    }
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen and not on_device(node):
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return {numbers[node] for node in seen if node in numbers}
