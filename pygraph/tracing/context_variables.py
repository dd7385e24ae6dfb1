"""Context variables (``contextvars``) that a traced function sets."""

from __future__ import annotations

import contextvars
import sys
from typing import Any


def changed_variable(context: contextvars.Context) -> str | None:
    """A context variable with another value in ``context`` than in the current one; those of torch do not count."""
    now = contextvars.copy_context()
    for variable, value in context.items():
        if (variable not in now or now[variable] is not value) and not _is_torchs(variable):
            return f"the context variable {variable.name}"
    return None


def _is_torchs(variable: contextvars.ContextVar[Any]) -> bool:
    if variable.name.startswith(("torch.", "decimal_context")):
        return True
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    if any(value is variable for module in modules for value in list(vars(module).values())):
        return True
    # Every setting in torch's modules of settings has one. Private; checked with torch 2.13.
    tables: list[dict[str, Any]] = [
        table for module in modules if isinstance(table := vars(module).get("_config"), dict)
    ]
    settings = [entry for table in tables for entry in list(table.values())]
    return any(getattr(entry, "user_override", None) is variable for entry in settings)
