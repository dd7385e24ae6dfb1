"""Turbulent kinetic energy: a time step of the closure of an ocean model.

After Gaspar, Grégoris and Lefevre (1990), as in the ocean model Veros: vertical mixing and dissipation are solved
implicitly, lateral diffusion and superbee advection are added, and the step is one of Adams and Bashforth. The last
axis of energy and velocity is time: now, next, before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws
from benchmarks.table.workloads.ocean_state import grid

NOW, NEXT, BEFORE = 0, 1, 2
STEP, LEAST, DISSIPATION, DIFFUSION, ALPHA = 1.0, 0.1, 0.7, 2000.0, 1.0
INNER = slice(2, -2)


def _number(value: float, like: Tensor) -> Tensor:
    """A number as a tensor, made on the CPU and copied to the device."""
    return torch.tensor([value], device=like.device)


def solve_tridiagonal(below: Tensor, diagonal: Tensor, above: Tensor, right: Tensor) -> Tensor:
    """The solution of tridiagonal systems along the last axis by Thomas's algorithm, in place, slice by slice."""
    levels = diagonal.shape[-1]
    for level in range(1, levels):
        factor = below[..., level] / diagonal[..., level - 1]
        diagonal[..., level] -= factor * above[..., level - 1]
        right[..., level] -= factor * right[..., level - 1]
    solution = torch.empty_like(right)
    solution[..., -1] = right[..., -1] / diagonal[..., -1]
    for level in reversed(range(levels - 1)):
        solution[..., level] = (right[..., level] - above[..., level] * solution[..., level + 1]) / diagonal[..., level]
    return solution


class TurbulentKineticEnergy(nn.Module):
    """A step in time. It changes `energy` and `tendency`, its arguments."""

    def forward(self, *, energy: Tensor, tendency: Tensor, **state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        roots = torch.maximum(_number(0.0, energy), energy[..., NOW]).sqrt()
        solution, water = self._mixed(energy, roots, state)
        energy[INNER, INNER, :, NEXT] = torch.where(water, solution, energy[INNER, INNER, :, NEXT])
        surface = self._surface(energy, state)
        energy[INNER, INNER, :, NEXT] += STEP * state["water"][INNER, INNER] * self._diffused(energy, state)
        self._advected(energy, tendency, state)
        energy[..., NEXT] += STEP * ((1.5 + LEAST) * tendency[..., NOW] - (0.5 + LEAST) * tendency[..., BEFORE])
        return energy, tendency, surface

    def _mixed(self, energy: Tensor, roots: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The energy after vertical mixing and dissipation, and where there is water."""
        mixing, length = state["mixing"][INNER, INNER], state["length"][INNER, INNER]
        between, heights, roots = state["between"], state["heights"], roots[INNER, INNER]
        below, diagonal, above, right, flux = (torch.zeros_like(mixing) for _ in range(5))
        flux[..., :-1] = STEP / between[1:] * ALPHA * 0.5 * (mixing[..., :-1] + mixing[..., 1:])
        lost = STEP * DISSIPATION * roots / length
        below[..., 1:-1] = -flux[..., :-2] / heights[1:-1]
        below[..., -1] = -flux[..., -2] / (0.5 * heights[-1])
        diagonal[..., 1:-1] = 1 + (flux[..., 1:-1] + flux[..., :-2]) / heights[1:-1] + lost[..., 1:-1]
        diagonal[..., -1] = 1 + flux[..., -2] / (0.5 * heights[-1]) + lost[..., -1]
        above[..., :-1] = -flux[..., :-1] / heights[:-1]
        right[...] = energy[INNER, INNER, :, NOW] + STEP * state["forcing"][INNER, INNER]
        right[..., -1] += STEP * state["surface_forcing"][INNER, INNER] / (0.5 * heights[-1])
        bottom = (state["bottom"][INNER, INNER] - 1).unsqueeze(-1)
        levels = torch.arange(mixing.shape[-1], device=mixing.device)
        water, edge = (bottom >= 0) & (levels >= bottom), (bottom >= 0) & (levels == bottom)
        diagonal = torch.where(edge, 1 + flux / heights + lost, torch.where(water, diagonal, 1.0))
        return solve_tridiagonal(water * below * ~edge, diagonal, water * above, water * right), water

    def _surface(self, energy: Tensor, state: dict[str, Tensor]) -> Tensor:
        """What has to be added at the surface where the energy would be negative there."""
        top, correction = energy[INNER, INNER, -1, NEXT], torch.zeros_like(energy[..., 0, 0])
        correction[INNER, INNER] = torch.where(top < 0.0, -top * 0.5 * state["heights"][-1] / STEP, 0.0)
        energy[INNER, INNER, -1, NEXT] = torch.maximum(_number(0.0, energy), top)
        return correction

    def _diffused(self, energy: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The tendency by lateral diffusion."""
        now, east, north = (
            energy[..., NOW],
            torch.zeros_like(state["east_water"]),
            torch.zeros_like(state["east_water"]),
        )
        width = state["cosine"][:, None] * state["east_edges"][:-1, None, None]
        east[:-1] = DIFFUSION * (now[1:] - now[:-1]) / width * state["east_water"][:-1]
        height = state["north_edges"][:-1, None]
        north[:, :-1] = DIFFUSION * (now[:, 1:] - now[:, :-1]) / height * state["north_water"][:, :-1]
        north[:, :-1] *= state["edge_cosine"][:-1, None]
        return -self._converged(east, north, state)

    def _converged(self, east: Tensor, north: Tensor, state: dict[str, Tensor]) -> Tensor:
        """What two fluxes bring to each cell."""
        cosine = state["cosine"][INNER, None]
        across = (east[INNER, INNER] - east[1:-3, INNER]) / (cosine * state["east_cells"][INNER, None, None])
        return -across - (north[INNER, INNER] - north[INNER, 1:-3]) / (cosine * state["north_cells"][INNER, None])

    def _advected(self, energy: Tensor, tendency: Tensor, state: dict[str, Tensor]) -> None:
        """The tendency by advection, written to that of now."""
        water, now, heights = state["water"], energy[..., NOW], state["heights"]
        fluxes = [torch.zeros_like(water) for _ in range(3)]
        cosine, edges = state["cosine"], state["edge_cosine"]
        both = [torch.zeros_like(water) for _ in range(3)]
        both[0][:-1], both[1][:, :-1] = water[1:] * water[:-1], water[:, 1:] * water[:, :-1]
        both[2][..., :-1] = water[..., 1:] * water[..., :-1]
        widths = cosine[INNER, None] * state["east_cells"][1:-2, None, None]
        fluxes[0][1:-2, INNER] = _superbee(state["east"][..., NOW], now, both[0], 0, widths)
        widths = (cosine * state["north_cells"])[1:-2, None]
        fluxes[1][INNER, 1:-2] = _superbee(state["north"][..., NOW], now, both[1], 1, widths, edges[1:-2, None])
        padded = (_padded(x) for x in (state["up"][..., NOW], now, both[2]))
        fluxes[2][INNER, INNER, :-1] = _superbee(*padded, 2, heights[:-1])
        east, north, up = fluxes
        tendency[INNER, INNER, :, NOW] = water[INNER, INNER] * self._converged(east, north, state)
        tendency[..., 0, NOW] -= up[..., 0] / heights[0]
        tendency[..., 1:-1, NOW] -= (up[..., 1:-1] - up[..., :-2]) / heights[1:-1]
        tendency[..., -1, NOW] -= (up[..., -1] - up[..., -2]) / (0.5 * heights[-1])


def _padded(x: Tensor) -> Tensor:
    """The tensor with a level of zeros below and above."""
    out = torch.zeros(*x.shape[:-1], x.shape[-1] + 2, dtype=x.dtype, device=x.device)
    out[..., 1:-1] = x
    return out


def _superbee(
    speed: Tensor, x: Tensor, both: Tensor, axis: int, widths: Tensor, factor: Tensor | float = 1.0
) -> Tensor:
    """The flux along an axis by the superbee scheme, between cells that are both water."""

    def along(tensor: Tensor, shift: int) -> Tensor:
        index = [INNER, INNER, slice(None)] if axis < 2 else [INNER, INNER, INNER]
        index[axis] = slice(1 + shift, tensor.shape[axis] - 2 + shift)
        return tensor[tuple(index)]

    ahead = (along(x, 2) - along(x, 1)) * along(both, 1)
    here = (along(x, 1) - along(x, 0)) * along(both, 0)
    behind = (along(x, 0) - along(x, -1)) * along(both, -1)
    speed = along(speed, 0)
    ratio = torch.where(speed > 0.0, behind, ahead) / torch.where(here.abs() < 1e-20, 1e-20, here)
    steep = torch.minimum(_number(1.0, ratio), 2 * ratio)
    limit = torch.maximum(_number(0.0, ratio), torch.maximum(steep, torch.minimum(_number(2.0, ratio), ratio)))
    courant = (factor * speed * STEP / widths).abs()
    smooth = factor * speed * (along(x, 1) + along(x, 0)) * 0.5
    return smooth - (factor * speed).abs() * ((1.0 - limit) + courant * limit) * here * 0.5


def turbulent_kinetic_energy(small: bool) -> Task:
    """About a million points: 204 × 204 × 26."""
    shape = grid(4096 if small else 1048576)

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws, (east, north, levels) = Draws(seed, device, torch.float64), shape

        def land() -> Tensor:
            return (draws.uniform(0, 1, *shape) < 0.8).double()

        flows = {name: draws.normal(*shape, 3) for name in ("east", "north", "up", "energy", "tendency")}
        lengths = {"east_cells": east, "east_edges": east, "north_cells": north, "north_edges": north,
                   "between": levels, "heights": levels, "cosine": north, "edge_cosine": north}  # fmt: skip
        return {
            **flows,
            **{name: draws.uniform(0.5, 1.5, length) for name, length in lengths.items()},
            **{name: land() for name in ("east_water", "north_water", "water")},
            **{name: draws.uniform(0.5, 1.5, *shape) for name in ("mixing", "length")},
            "bottom": draws.integers(0, levels, east, north),
            "forcing": draws.normal(*shape),
            "surface_forcing": draws.normal(east, north),
        }

    return Task(TurbulentKineticEnergy(), batch)


TURBULENT_KINETIC_ENERGY = Workload(
    name="turbulent-kinetic-energy-i", title="pyhpc_turbulent_kinetic_energy", training=False, batch_size=1048576,
    source="written here",
    hard="Two arguments are changed in place, for which PyTorch leaves graphs alone; limits are numbers made into "
    "tensors on the CPU and copied; a tridiagonal system is solved level by level in fifty steps of short kernels.",
    differs="In float64, as in torch's own runner, which gives this model autocast where others get bfloat16. Widths, "
    "heights and lengths are positive, where the original draws them from a normal distribution, so that results do "
    "not hang on rounding. Fluxes of all axes share one function.",
    make=turbulent_kinetic_energy,
)  # fmt: skip
