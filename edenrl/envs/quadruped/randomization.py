"""Hidden parameters of the quadruped that are drawn anew for every episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np

__all__ = ["NOMINAL", "RANDOMIZATION", "draw_parameters", "merge_ranges"]

Range = tuple[float, float]

RANDOMIZATION = {
    "friction": (0.5, 1.2),
    "trunk_mass": (-1.0, 2.0),
    "trunk_centre": (-0.02, 0.02),
    "motor_strength": (0.9, 1.1),
    "kp": (0.9, 1.1),
    "kd": (0.9, 1.1),
    "joint_offset": (-0.02, 0.02),
    "push": (0.0, 0.0),
}
NOMINAL = {name: 1.0 if name in ("motor_strength", "kp", "kd") else 0.0 for name in RANDOMIZATION} | {"friction": 0.8}


def merge_ranges(
    argument: str, defaults: Mapping[str, tuple[float, float]], given: Mapping[str, Sequence[float]] | None
) -> dict[str, tuple[float, float]]:
    """Ranges by name, of which some replace the defaults.

    Args:
        argument: the argument of the environment that gave them, for messages.
        defaults: low and high of every name.
        given: those that replace them; None: none.

    Raises:
        ValueError: for an unknown name, or what is no [low, high].

    Examples:
        >>> merge_ranges("commands", {"vx": (0.0, 1.0), "vy": (-0.3, 0.3)}, {"vx": [0, 2]})
        {'vx': (0.0, 2.0), 'vy': (-0.3, 0.3)}
    """
    ranges = dict(defaults)
    for name, value in (given or {}).items():
        if name not in ranges:
            raise ValueError(f"{argument} names {name!r}, which does not exist; choose from {list(defaults)}.")
        if len(value) != 2 or not float(value[0]) <= float(value[1]):
            raise ValueError(f"{argument} gives {name}={list(value)}; expected [low, high].")
        ranges[name] = (float(value[0]), float(value[1]))
    return ranges


def draw_parameters(
    rows: SimpleNamespace, ids: np.ndarray, ranges: Mapping[str, Range], uniform: Callable[..., np.ndarray]
) -> None:
    """Draws the parameters of some rows.

    Args:
        rows: where they are kept, arrays ``[N, ...]`` by the names of ``RANDOMIZATION``.
        ids: the rows.
        ranges: low and high of each.
        uniform: draws from the environment's generator: ``uniform(range, *shape)``.
    """
    n = len(ids)
    rows.friction[ids] = uniform(ranges["friction"], n)
    rows.trunk_mass[ids] = uniform(ranges["trunk_mass"], n)
    rows.trunk_centre[ids] = uniform(ranges["trunk_centre"], n, 3)
    rows.motor_strength[ids] = uniform(ranges["motor_strength"], n, 12)
    # What acts is the product; the factors published are the ones that act.
    rows.kp[ids] = uniform(ranges["kp"], n, 12) * rows.motor_strength[ids]
    rows.kd[ids] = uniform(ranges["kd"], n, 12) * rows.motor_strength[ids]
    rows.joint_offset[ids] = uniform(ranges["joint_offset"], n, 12)
