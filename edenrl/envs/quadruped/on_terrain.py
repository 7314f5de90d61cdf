"""The quadruped on courses of rough ground, stairs, gaps and steps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from edenrl.envs.quadruped.model import HIP_X, HIP_Y, THIGH_Y
from edenrl.envs.quadruped.quadruped import STILL, Quadruped
from edenrl.envs.quadruped.terrain import FINISH, LANE, START, TERRAIN_KINDS, HeightField, build_course

__all__ = ["QuadrupedTerrain"]

LEVELS = 11
_YAW_GAIN, _YAW_LIMIT = 1.5, 0.8  # 1/s, rad/s
# Gaps count as ground this deep for the height of the trunk, so that looking into one is not yet a fall.
_SHALLOW = -0.1  # m


class QuadrupedTerrain(Quadruped):
    """``Quadruped`` on courses that get harder as they are mastered.

    A course is a lane of 8 m; the robot starts at its low end and is done when it has passed 7.4 m (``success``, a
    truncation). Five way-points wind through it; the commanded yaw rate turns the robot to the next one, the commanded
    forward speed is drawn every 5 s, the sideways speed is zero. Leaving the lane is a termination like falling.

    Rows take the ``kinds`` in turn: ``rough`` ground, ``stairs``, ``gaps``, ``steps``; ``build_course`` says how their
    sizes grow with the difficulty. Without ``difficulty`` each row has its own, in steps of 0.1 from 0 (flat) to 1: a
    row that succeeded continues one step harder, one that did not get half-way one step easier.

    Everything else is as in ``Quadruped``; the height above ground that rewards and falls refer to is measured from the
    mean of the ground under the four hips. ``metrics`` has the row's ``difficulty``.

    Args:
        num_envs: Number of robots, at least 1.
        kinds: Kinds of ground, row ``i`` gets ``kinds[i % len(kinds)]``. Default: all four.
        difficulty: One difficulty in [0, 1] for every row and episode. Default: the curriculum.
        terrain_seed: Seed of the courses' random parts, apart from the environment's seed. Default 0.
        kwargs: Arguments of ``Quadruped``. Defaults differ: ``vx`` 0.5 to 1 m/s, no zero commands, 20 s.

    Raises:
        ValueError: an unknown argument or kind, or a difficulty outside [0, 1].

    Source: the curriculum follows Rudin et al. 2021, arXiv:2109.11978.

    Examples:
        >>> from edenrl.envs import QuadrupedTerrain
        >>> env = QuadrupedTerrain(2, kinds=["gaps"], difficulty=0.5, groups=["policy", "scan"], seed=0, num_threads=1)
        >>> env.reset()["scan"].shape
        torch.Size([2, 132])
    """

    def __init__(
        self,
        num_envs: int,
        *,
        kinds: Sequence[str] = TERRAIN_KINDS,
        difficulty: float | None = None,
        terrain_seed: int = 0,
        zero_commands: float = 0.0,
        episode_seconds: float = 20.0,
        **kwargs: Any,
    ) -> None:
        known = set(inspect.signature(Quadruped.__init__).parameters) - {"self", "num_envs"}
        if unknown := sorted(set(kwargs) - known):
            raise ValueError(
                f"QuadrupedTerrain does not take {unknown}; besides kinds, difficulty and terrain_seed it takes "
                f"{sorted(known)}."
            )
        levels = np.linspace(0.0, 1.0, LEVELS) if difficulty is None else [difficulty]
        self._course = build_course(tuple(kinds), tuple(float(level) for level in levels), terrain_seed)
        self.kinds = tuple(kinds)
        super().__init__(num_envs, zero_commands=zero_commands, episode_seconds=episode_seconds, **kwargs)

    def _default_commands(self) -> dict[str, tuple[float, float]]:
        return {"vx": (0.5, 1.0), "vy": (0.0, 0.0), "yaw": (0.0, 0.0)}

    def _make_field(self) -> HeightField | None:
        return self._course.field

    def _empty_rows(self) -> SimpleNamespace:
        rows = super()._empty_rows()
        rows.kind = np.arange(self.num_envs) % len(self.kinds)
        rows.level = np.zeros(self.num_envs, dtype=np.int64)
        rows.waypoint = np.zeros(self.num_envs, dtype=np.int64)
        rows.progress = np.zeros(self.num_envs)
        rows.ended = np.zeros(self.num_envs, dtype=np.bool_)
        return rows

    def _place(self, ids: np.ndarray) -> None:
        rows = self._rows
        ended, success = rows.ended[ids], rows.success[ids] > 0
        behind = rows.progress[ids] < START + 0.5 * (FINISH - START)
        change = np.where(success, 1, np.where(behind, -1, 0)) * ended
        rows.level[ids] = np.clip(rows.level[ids] + change, 0, len(self._course.difficulties) - 1)
        rows.ended[ids], rows.waypoint[ids], rows.progress[ids] = False, 0, START
        offset = np.stack([np.full(len(ids), START), self._uniform((-0.3, 0.3), len(ids))], -1)
        rows.origin[ids] = self._course.origin(rows.kind[ids], rows.level[ids]) + offset

    def _start_yaw(self) -> tuple[float, float]:
        return -0.3, 0.3

    def _ground(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return self._course.field.height(x, y)

    def _ground_clearance(self, k: SimpleNamespace) -> np.ndarray:
        x, y = np.array([1.0, 1.0, -1.0, -1.0]) * HIP_X, np.array([1.0, -1.0, 1.0, -1.0]) * (HIP_Y + THIGH_Y)
        cos, sin = np.cos(k.yaw)[:, None], np.sin(k.yaw)[:, None]
        ground = self._ground(k.position[:, :1] + cos * x - sin * y, k.position[:, 1:2] + sin * x + cos * y)
        return k.position[:, 2] - np.maximum(ground, _SHALLOW).mean(-1)

    def _after_motion(self, k: SimpleNamespace) -> None:
        rows = self._rows
        waypoints = self._course.waypoints[rows.kind, rows.level]
        passed = (waypoints[:, :, 0] < k.position[:, :1] + 0.2).sum(-1)
        rows.waypoint[:] = np.minimum(np.maximum(rows.waypoint, passed), waypoints.shape[1] - 1)
        turn = np.clip(_YAW_GAIN * self._yaw_to_waypoints(k)[:, 0], -_YAW_LIMIT, _YAW_LIMIT)
        rows.command[:, 2] = np.where(np.abs(rows.command[:, 0]) > STILL, turn, 0.0)

    def _yaw_to_waypoints(self, k: SimpleNamespace) -> np.ndarray:
        rows = self._rows
        waypoints = self._course.waypoints[rows.kind, rows.level]
        both = np.minimum(rows.waypoint[:, None] + np.arange(2), waypoints.shape[1] - 1)
        offset = np.take_along_axis(waypoints, both[:, :, None], 1) - k.position[:, None, :2]
        angle = np.arctan2(offset[..., 1], offset[..., 0]) - k.yaw[:, None]
        return np.arctan2(np.sin(angle), np.cos(angle))

    def _difficulty(self) -> np.ndarray:
        difficulty: np.ndarray = self._course.difficulties[self._rows.level]
        return difficulty

    def _judge(self, k: SimpleNamespace, failed: np.ndarray) -> None:
        rows = self._rows
        place = k.position[:, :2] - self._course.origin(rows.kind, rows.level)
        rows.progress[:] = np.maximum(rows.progress, place[:, 0])
        arrived = place[:, 0] > FINISH
        left = (np.abs(place[:, 1]) > LANE) | (place[:, 0] < 0.0)
        rows.terminated[:] = failed | left
        rows.truncated[:] = (rows.steps >= self.max_steps) | arrived
        rows.success[:] = arrived & ~rows.terminated
        rows.ended[:] = rows.terminated | rows.truncated
