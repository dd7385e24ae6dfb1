"""What Dynamo remembers of torch's functions, which must be the real ones."""

# Dynamo's tables have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import functools


@functools.cache
def fill_tables() -> None:
    """Let Dynamo note what functions there are, before some are replaced for a while.

    It keeps them by identity for as long as the process lives, and what replaces them does not last.
    """
    from torch._dynamo import trace_rules  # a trace imports it in any case

    trace_rules.get_torch_obj_rule_map()
    trace_rules.is_numpy(None)
