"""`pygraph.trace`: the Program of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

from pygraph.api.functions import check_function, check_parameters
from pygraph.api.options import make_options, no_unknown_options
from pygraph.ir.leaves import static_leaves
from pygraph.ir.program import Program
from pygraph.tracing.trace import trace_call

P = ParamSpec("P")


@no_unknown_options
def trace(
    fn: Callable[P, Any], *, static_argnums: int | Sequence[int] = (), static_argnames: str | Sequence[str] = ()
) -> Callable[P, Program]:
    """Return a function that traces ``fn`` on its arguments and returns the Program, like ``jax.make_jaxpr``.

    Args:
        fn: A function or module over pytrees of tensors, numbers, ``None`` and static values.
        static_argnums: Positions of arguments that are baked in as they are.
        static_argnames: The same for keyword arguments.

    Returns:
        A function with the signature of ``fn`` that returns a `Program` at stage ``aten``.

    Raises:
        ArgumentError: An option has a wrong value, or names no argument.
        TraceError: When called: the function cannot be traced; the message says why and where.

    Example:
        >>> import torch, pygraph
        >>> print(pygraph.trace(lambda x, k: x * k + 1)(torch.ones(3), 2.0), end="")  # doctest: +ELLIPSIS
        # <lambda> (aten): trace
        def program(
            args_0: "float32[3] cpu",  # args[0]
            args_1: "float",  # args[1], live
        ):
            mul: "float32[3] cpu" = aten.mul.Tensor(args_0, args_1)  # ...:1
            add: "float32[3] cpu" = aten.add.Tensor(mul, 1)  # ...:1
            return (
                add,  # result
            )
    """
    call = "trace(…)"
    options = make_options(call, static_argnums=static_argnums, static_argnames=static_argnames)
    check_function("trace", fn)
    check_parameters("trace", fn, options)

    @functools.wraps(fn, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def traced(*args: P.args, **kwargs: P.kwargs) -> Program:
        static = static_leaves(args, kwargs, options.static_argnums, options.static_argnames)
        return trace_call(fn, args, kwargs, static=static).program

    return traced
