"""Dynamo's tables of torch's functions, which must have the real ones."""

# Dynamo's tables have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
from __future__ import annotations

import functools


@functools.cache
def fill_tables() -> None:
    """Have Dynamo fill its tables before functions are replaced for a while.

    It identifies functions as long as the process lives, and the replacements do not last.
    """
    from torch._dynamo import trace_rules  # a trace imports it in any case
    from torch._dynamo.variables import misc
    from torch._dynamo.variables import torch as functions

    trace_rules.get_torch_obj_rule_map()
    trace_rules.is_numpy(None)
    misc.get_np_to_tnp_map()
    functions.TorchInGraphFunctionVariable._get_handlers()
