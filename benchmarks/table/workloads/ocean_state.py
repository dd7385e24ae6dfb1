"""The equation of state of sea water: how dynamic enthalpy changes with temperature.

After the 48-term expression of the Thermodynamic Equation of Seawater (IOC, SCOR and IAPSO, 2010): specific volume is
a cubic in pressure over a quadratic in pressure, whose factors are polynomials of salinity and temperature. Dynamic
enthalpy, its integral over pressure, is known in closed form; here is its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws

Pair = tuple[Tensor, Tensor]
"""A value, and its derivative by temperature."""


def _polynomial(temperature: Tensor, *factors: float) -> Pair:
    """A polynomial of temperature, by Horner's rule; factors of low powers come first."""
    value, slope = factors[-2] + factors[-1] * temperature, torch.full_like(temperature, factors[-1])
    for factor in factors[-3::-1]:
        value, slope = factor + temperature * value, value + temperature * slope
    return value, slope


def _sum(first: Pair, second: Pair, factor: Tensor | float) -> Pair:
    return first[0] + factor * second[0], first[1] + factor * second[1]


def denominators(salinity: Tensor, temperature: Tensor) -> tuple[Pair, Pair, Pair]:
    """The factors of 1, of 2p and of p² below the line."""
    root = salinity.sqrt()
    fresh = _polynomial(
        temperature, 9.998420897506056e2, 2.839940833161907, -3.147759265588511e-2, 1.181805545074306e-3
    )
    salt = _polynomial(temperature, -6.698001071123802, -2.986498947203215e-2, 2.327859407479162e-4)
    by_root = _polynomial(
        temperature, -3.988822378968490e-2, 5.095422573880500e-4, -1.426984671633621e-5, 1.645039373682922e-7
    )
    constant = _sum(fresh, _sum(salt, by_root, root), salinity)
    fresh = _polynomial(temperature, -2.233269627352527e-2, -3.436090079851880e-4, 3.726050720345733e-6)
    salt = _polynomial(temperature, -1.806789763745328e-4, 6.876837219536232e-7)
    linear = _sum(fresh, salt, salinity)
    value, slope = _polynomial(temperature, -3.087032500374211e-7, -1.988366587925593e-8, -1.061519070296458e-11)
    return constant, (0.5 * linear[0], 0.5 * linear[1]), (value + 1.550932729220080e-10 * salinity, slope)


def numerators(salinity: Tensor, temperature: Tensor) -> tuple[Pair, Pair, Pair, Pair]:
    """The factors of 1, p, p² and p³ above the line."""
    root = salinity.sqrt()
    fresh = _polynomial(
        temperature, 1.0, 2.775927747785646e-3, -2.349607444135925e-5, 1.119513357486743e-6, 6.743689325042773e-10
    )
    value, slope = _polynomial(
        temperature, -7.521448093615448e-3, -2.764306979894411e-5, 1.262937315098546e-7, 9.527875081696435e-10,
        -1.811147201949891e-11,
    )  # fmt: skip
    by_root = _polynomial(
        temperature, -3.303308871386421e-5, 3.801564588876298e-7, -7.672876869259043e-9, -4.634182341116144e-11,
        2.681097235569143e-12,
    )  # fmt: skip
    salt = _sum((value + 5.419326551148740e-6 * salinity, slope), by_root, root)
    constant = _sum(fresh, salt, salinity)
    fresh = _polynomial(
        temperature, -2.742185394906099e-5, -3.212746477974189e-7, 3.191413910561627e-9, -1.931012931541776e-12
    )
    linear = _sum(fresh, _polynomial(temperature, -1.105097577149576e-7, 6.211426728363857e-10), salinity)
    value, slope = _polynomial(temperature, -1.119011592875110e-10, -1.941660213148725e-11, -1.864826425365600e-14)
    mixed = 1.119522344879478e-14 * salinity
    quadratic = value + mixed * temperature, slope + mixed
    return constant, linear, quadratic, _polynomial(temperature, -1.200507748551599e-15, 6.057902487546866e-17)


def enthalpy_slope(salinity: Tensor, temperature: Tensor, pressure: Tensor) -> Tensor:
    """The derivative of dynamic enthalpy, in J/(kg K).

    Args:
        salinity: Absolute salinity, in g/kg.
        temperature: Conservative temperature, in °C.
        pressure: Sea pressure, in dbar.
    """
    p = pressure
    (b0, db0), (b1, db1), (b2, db2) = denominators(salinity, temperature)
    (a0, da0), (a1, da1), (a2, da2), (a3, da3) = numerators(salinity, temperature)
    # The division of polynomials leaves a part that is linear in p, and a remainder n + m p over the quadratic.
    cross, dcross = a3 * b1 / b2, (da3 * b1 + a3 * db1 - a3 * b1 * db2 / b2) / b2
    rest, drest = a2 - 2 * cross, da2 - 2 * dcross
    n, dn = a0 - rest * b0 / b2, da0 - (drest * b0 + rest * db0 - rest * b0 * db2 / b2) / b2
    inner = a3 * b0 + 2 * rest * b1
    dinner = da3 * b0 + a3 * db0 + 2 * (drest * b1 + rest * db1)
    m, dm = a1 - inner / b2, da1 - (dinner - inner * db2 / b2) / b2
    # The two roots of the quadratic.
    root = (b1 * b1 - b0 * b2).sqrt()
    droot = (2 * b1 * db1 - db0 * b2 - b0 * db2) / (2 * root)
    low, dlow, high, dhigh = b1 - root, db1 - droot, b1 + root, db1 + droot
    # Three terms of the integral: of the linear part, and two logarithms.
    part, dpart = rest + 0.5 * a3 * p, drest + 0.5 * da3 * p
    slope = p * (dpart - part * db2 / b2) / b2
    grown = 1 + p * (2 * b1 + b2 * p) / b0
    dgrown = p * (2 * db1 + db2 * p - (2 * b1 + b2 * p) * db0 / b0) / b0
    slope = slope + 0.5 * ((dm - m * db2 / b2) * grown.log() + m * dgrown / grown) / b2
    above, dabove = n * b2 - m * b1, dn * b2 + n * db2 - dm * b1 - m * db1
    below, dbelow = 2 * b2 * root, 2 * (db2 * root + b2 * droot)
    factor, dfactor = above / below, (dabove - above * dbelow / below) / below
    span, dspan = low * (high + b2 * p), dlow * (high + b2 * p) + low * (dhigh + db2 * p)
    ratio, dratio = 1 + p * below / span, p * (dbelow - below * dspan / span) / span
    return 1e4 * (slope + dfactor * ratio.log() + factor * dratio / ratio)


class EquationOfState(nn.Module):
    """The derivative as a module, without weights."""

    def forward(self, salinity: Tensor, temperature: Tensor, pressure: Tensor) -> Tensor:
        return enthalpy_slope(salinity, temperature, pressure)


def grid(points: int) -> tuple[int, int, int]:
    """The shape of an ocean of about as many points, which is eight times as wide as deep."""
    side = points ** (1 / 3)
    return math.ceil(2 * side), math.ceil(2 * side), math.ceil(0.25 * side)


def equation_of_state(small: bool) -> Task:
    """About a million points: 204 × 204 × 26."""
    shape = grid(4096 if small else 1048576)

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws = Draws(seed, device, dtype)
        uniform: Callable[..., Tensor] = draws.uniform
        return {
            "salinity": uniform(0.01, 10, *shape),
            "temperature": uniform(-12, 20, *shape),
            "pressure": uniform(0, 1000, 1, 1, shape[2]),
        }

    return Task(EquationOfState(), batch)


EQUATION_OF_STATE = Workload(
    name="equation-of-state-i", title="pyhpc_equation_of_state", training=False, batch_size=1048576,
    source="written here",
    hard="No construct of the host: one chain of elementwise operations, which compiles to a kernel or two. To copy "
    "its inputs costs more than a launch, so that PyTorch's graphs made it 29 % slower.",
    differs="The derivative is derived here from the closed form, not taken from the original's generated expression, "
    "and has another number of operations. In bfloat16, as in the paper, its values mean nothing.",
    make=equation_of_state,
)  # fmt: skip
