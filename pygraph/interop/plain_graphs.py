"""Plain training graphs: those of which AOTAutograd's metadata says that its wrappers have next to nothing to do.

AOTAutograd's wrappers see to every kind of graph: results that are aliases, updated inputs, tensor subclasses, tokens,
symbolic sizes, states of random numbers. A plain graph has none of these. What is not understood is not plain.
"""

# AOTAutograd's function and its metadata are private. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

# What the metadata (`ViewAndMutationMeta`) says of a plain graph.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_intermediate_bases": (0,),
    "num_outputs_aliased": (0,),
    "num_mutated_inp_runtime_indices": (0,),
    "num_outputs_rng_offset": (0,),
    "is_rng_op_functionalized": (False,),
    "num_graphsafe_rng_states": (0,),
    "tokens": ({},),
    "num_backward_tokens": (0,),
    "num_symints_saved_for_bw": (0,),
    "num_opaque_objects_saved_for_bw": (0, None),
    "dynamic_outputs": (False,),
    "dynamic_saved_tensors_idxs": ({},),
    "grad_enabled_mutation": (None,),
    "indices_of_inputs_that_requires_grad_with_mutations_in_bw": ([],),
}
_UNKNOWN = object()
_INPUTS = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True)
class PlainGraph:
    """A plain graph, and what is left to do in its calls.

    Attributes:
        function: AOTAutograd's autograd function.
        returned: The number of results of its forward that are the caller's; the others are saved tensors.
        unchecked: The number of saved tensors, the last ones, that autograd does not check for updates.
        updated: Positions of the inputs that the graph updates and that autograd has to know of.
        detached: Positions of the inputs that never get gradients, though they require grad.
        unsafe_views: Positions of the results that are views of tensors that nobody else has.
        constant: Positions of the results that are not differentiable.
        tangents: Positions of the results of which backward takes a tangent, with its layout (`MemoryFormatMeta`).
        is_nondeterministic: Whether backward must not run where deterministic algorithms are asked for.
    """

    function: Any
    returned: int
    unchecked: int
    updated: tuple[int, ...]
    detached: tuple[int, ...]
    unsafe_views: tuple[int, ...]
    constant: tuple[int, ...]
    tangents: tuple[tuple[int, Any], ...]
    is_nondeterministic: bool

    @classmethod
    def of(cls, node: Any, args: Sequence[Any]) -> PlainGraph | None:
        """Describe the graph that was called, if it is plain.

        Args:
            node: The ``grad_fn`` of its results.
            args: The inputs.
        """
        function = node._forward_cls  # pyright: ignore[reportPrivateUsage]
        metadata, detached = function.metadata, _detached(node, args)
        if detached is None or not _is_plain(function):
            return None
        results = metadata.output_info
        with_tangent = [index for index, one in enumerate(results) if _has_tangent(one)]
        formats = [one.memory_format for one in metadata.subclass_tangent_meta]
        if len(with_tangent) != len(formats) or None in formats:
            return None
        return cls(
            function=function,
            returned=len(results),
            unchecked=metadata.num_tensors_saved_with_no_vc_check,
            updated=tuple(metadata.mutated_graph_handled_indices_seen_by_autograd),
            detached=detached,
            unsafe_views=tuple(metadata.unsafe_view_out_indices),
            constant=tuple(index for index, one in enumerate(results) if not one.requires_grad),
            tangents=tuple(zip(with_tangent, formats, strict=True)),
            is_nondeterministic=metadata.deterministic is False,
        )


def is_plain_input(value: Any) -> bool:
    """Whether an input is a tensor, of no subclass and of no transform of ``torch.func``, be it active or not."""
    return type(value) in _INPUTS and not torch._C._functorch.is_functorch_wrapped_tensor(value)  # pyright: ignore


def _is_plain(function: Any) -> bool:
    """Whether backward gets nothing but saved tensors and tangents, and the caller nothing but new tensors."""
    metadata = function.metadata
    if function.maybe_subclass_metadata is not None:
        return False
    if any(getattr(metadata, name, _UNKNOWN) not in values for name, values in _PLAIN.items()):
        return False
    # By name, since their classes are in another private module.
    if any(type(one).__name__ != "PlainTensorMeta" for one in metadata.subclass_tangent_meta):
        return False
    if any(one.output_type.name not in ("non_alias", "unsafe_view_alias") for one in metadata.output_info):
        return False
    if not all(issubclass(one.raw_type, torch.Tensor) for one in metadata.output_info):
        return False
    updates_in_graph = metadata.keep_input_mutations or not metadata.mutated_graph_handled_indices_seen_by_autograd
    return updates_in_graph and metadata.num_forward == len(metadata.output_info)


def _has_tangent(result: Any) -> bool:
    """Whether backward takes a tangent of a result (`OutputAliasInfo`); torch 2.11 does if the result requires grad."""
    return getattr(result, "requires_grad_for_backward", result.requires_grad)


def _detached(node: Any, args: Sequence[Any]) -> tuple[int, ...] | None:
    """Positions of the inputs that AOTAutograd has detached; None if its function had other inputs than these."""
    edges = node.next_functions
    if len(edges) != len(args):
        return None
    found: list[int] = []
    for index, ((following, number), value) in enumerate(zip(edges, args, strict=True)):
        if following is None:
            if value.requires_grad:
                found.append(index)
        elif not value.requires_grad or torch.autograd.graph.get_gradient_edge(value)[:2] != (following, number):
            return None
    return tuple(found)
