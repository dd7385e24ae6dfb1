"""Functions of ``math`` on live numbers, by whatever name a traced function has for them.

They are written in C and take a real float from a number, so that nothing that a live number answers could make the
result live. So the functions are replaced by proxies for the time of a trace: in ``math`` itself, and wherever a walk
over what the traced function reaches has found one (see `pygraph.tracing.iterators`), as after
``from math import sqrt``: in variables of modules, closures, defaults, classes, containers. One that the walk does not
find has its number baked in.

A function has one proxy for the life of the process, so that ``f is math.sqrt`` is true in a trace where it is in
eager. Other threads may find it meanwhile, and modules that are imported then keep it: of numbers that are not live,
it returns what the function returns. It has the function's class, hash and attributes; only ``type(f)`` differs.
"""

# Numbers are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Generator
from typing import Any

from pygraph.tracing.function_proxies import FunctionProxy, original_of
from pygraph.tracing.number_operations import called

# Without `prod`, which multiplies whatever it is given. Some are there from Python 3.12 (`sumprod`) or 3.13 (`fma`) on.
_NAMES = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "comb", "copysign", "cos", "cosh",
    "degrees", "dist", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "factorial", "floor", "fma", "fmod", "frexp",
    "fsum", "gamma", "gcd", "hypot", "isclose", "isfinite", "isinf", "isnan", "isqrt", "lcm", "ldexp", "lgamma", "log",
    "log10", "log1p", "log2", "modf", "nextafter", "perm", "pow", "radians", "remainder", "sin", "sinh", "sqrt",
    "sumprod", "tan", "tanh", "trunc", "ulp",
)  # fmt: skip


class MathFunction(FunctionProxy):
    """A proxy of a function of ``math`` that knows live numbers."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; of live numbers, the result is live, too."""
        original = original_of(self)
        return called(f"math.{original.__name__}", original, args, kwargs)

    def __getattribute__(self, name: str) -> Any:
        return getattr(original_of(self), name)


_PROXIES = {vars(math)[name]: MathFunction(vars(math)[name]) for name in _NAMES if name in vars(math)}


def is_math_function(value: object) -> bool:
    """Whether a value is a function that has a proxy.

    >>> is_math_function(math.sqrt), is_math_function(len), is_math_function([])
    (True, False, False)
    """
    return type(value) is types.BuiltinFunctionType and value in _PROXIES


def proxy_of(function: Any) -> MathFunction:
    """The proxy of a function for which `is_math_function` holds."""
    return _PROXIES[function]


@contextlib.contextmanager
def math_served() -> Generator[None, None, None]:
    """Have ``math`` hold proxies for the time of a trace, but where somebody has replaced a function."""
    found = [(name, proxy_of(value)) for name, value in vars(math).items() if is_math_function(value)]
    try:
        for name, proxy in found:
            setattr(math, name, proxy)
        yield
    finally:
        for name, proxy in found:
            if vars(math)[name] is proxy:
                setattr(math, name, original_of(proxy))
