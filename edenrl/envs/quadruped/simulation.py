"""The physics of a batch of quadrupeds: MuJoCo's state, one control step, and what can be read off the state."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
from torchrl.envs import EnvBase

from edenrl.envs.quadruped.model import (
    DEFAULT_POSE,
    FOOT_RADIUS,
    HIP_X,
    HIP_Y,
    KP,
    KV,
    LINK,
    PHYSICS_DT,
    THIGH_Y,
    TORQUE_LIMIT,
    TRUNK_MASS,
    build_model,
    load_mujoco,
)
from edenrl.envs.quadruped.terrain import HeightField

__all__ = ["DT", "SUBSTEPS", "QuadrupedSimulation"]

SUBSTEPS = 4
DT = SUBSTEPS * PHYSICS_DT  # s, one control step


class QuadrupedSimulation(EnvBase):
    """Builds MuJoCo's batch, advances it, and reads positions, velocities and contacts from it.

    ``self._rows`` holds what the environment itself remembers about its rows, as arrays ``[N, ...]``; of these this
    part reads where rows start (``origin``) and their hidden parameters.

    Args:
        num_envs: number of robots.
        num_threads: threads of the simulation; None: one per CPU that this process may use.
        options: arguments of ``EnvBase``.
    """

    _rows: SimpleNamespace

    def __init__(self, num_envs: int, num_threads: int | None, **options: Any) -> None:
        super().__init__(batch_size=[num_envs], **options)
        self.num_envs = num_envs
        self._mujoco = load_mujoco()
        self._field = self._make_field()
        self.model = build_model(self._field)
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = available if num_threads is None else num_threads
        self._make_batch(max(1, min(num_envs, threads)))

    def _make_field(self) -> HeightField | None:
        """The ground; None: flat."""
        return None

    def _make_batch(self, threads: int) -> None:
        from mujoco.batch import Batch

        batch = Batch(self.model, self.num_envs, threads)
        self._batch = batch
        self._state, self._warnings = batch.state, batch.warning
        self._time, self._ctrl = batch.bind("time"), batch.bind("ctrl")
        self._qpos, self._qvel = batch.bind("qpos"), batch.bind("qvel")
        self._touch = batch.bind("sensordata")
        fields = "geom_friction body_mass body_ipos body_inertia actuator_gainprm actuator_biasprm actuator_forcerange"
        self._values = {name: batch.expand(name) for name in fields.split()}
        self._trunk = self.model.body("trunk").id

    def _write_parameters(self, ids: np.ndarray) -> None:
        """Write the hidden parameters of some rows into their models."""
        rows, values, trunk = self._rows, self._values, self._trunk
        values["geom_friction"][ids, :, 0] = rows.friction[ids, None]
        mass = TRUNK_MASS + rows.trunk_mass[ids]
        values["body_mass"][ids, trunk] = mass
        values["body_inertia"][ids, trunk] = self.model.body_inertia[trunk] * (mass / TRUNK_MASS)[:, None]
        values["body_ipos"][ids, trunk] = self.model.body_ipos[trunk] + rows.trunk_centre[ids]
        values["actuator_gainprm"][ids, :, 0] = KP * rows.kp[ids]
        values["actuator_biasprm"][ids, :, 1] = -KP * rows.kp[ids]
        values["actuator_biasprm"][ids, :, 2] = -KV * rows.kd[ids]
        limit = TORQUE_LIMIT * rows.motor_strength[ids]
        values["actuator_forcerange"][ids, :, 0], values["actuator_forcerange"][ids, :, 1] = -limit, limit
        self._batch.set_const(ids)

    def _stand(self, ids: np.ndarray, joints: np.ndarray, yaw: np.ndarray | float = 0.0) -> None:
        """Put rows at rest where they start, with the given joint angles and heading."""
        rows = self._rows
        self._state[ids] = 0.0
        self._warnings[ids] = 0
        self._ctrl[ids] = DEFAULT_POSE + rows.joint_offset[ids]
        self._qpos[ids, :2] = rows.origin[ids]
        # Feet touch the ground, which is flat at z = 0 wherever robots start.
        self._qpos[ids, 2] = FOOT_RADIUS + 0.002 - _foot_positions(joints)[..., 2].min(-1)
        self._qpos[ids, 3], self._qpos[ids, 6] = np.cos(0.5 * yaw), np.sin(0.5 * yaw)
        self._qpos[ids, 7:] = joints

    def _simulate(self) -> np.ndarray:
        """Advance the physics by one control step; returns which rows diverged, now back where they started."""
        mujoco = self._mujoco
        warned = self._warnings[:, :, 1].sum(-1)
        # MuJoCo would print every warning and append it to a file in the working directory.
        handler = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(_ignore)
        try:
            self._batch.step(nstep=SUBSTEPS)
        finally:
            mujoco.set_mju_user_warning(handler)
        # A row with a warning was silently reset by MuJoCo; one this fast is about to be. NaN compares false.
        sound = np.abs(self._state).max(-1) < 1e8
        sound &= (np.abs(self._qvel).max(-1) < 200.0) & (self._warnings[:, :, 1].sum(-1) == warned)
        diverged = ~sound
        if diverged.any():
            self._stand(np.flatnonzero(diverged), DEFAULT_POSE)
        return diverged

    def _kinematics(self) -> SimpleNamespace:
        """The state in the forms that rewards and observations need, copied."""
        qpos, qvel = self._qpos.copy(), self._qvel.copy()
        rotation = _rotations(qpos[:, 3:7])
        k = SimpleNamespace(
            position=qpos[:, :3],
            rotation=rotation,
            gravity=-rotation[:, 2],
            yaw=np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0]),
            velocity=np.einsum("nji,nj->ni", rotation, qvel[:, :3]),
            angular=qvel[:, 3:6],
            joints=qpos[:, 7:],
            joint_offset=qpos[:, 7:] - DEFAULT_POSE,
            joint_velocity=qvel[:, 6:],
        )
        k.height = self._ground_clearance(k)
        return k

    def _ground_clearance(self, k: SimpleNamespace) -> np.ndarray:
        """Height of the trunk above the ground, ``[N]``."""
        return k.position[:, 2]

    def _ground(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Height of the ground at points of the world; row ``i`` of both arrays belongs to robot ``i``."""
        return np.zeros_like(x)

    def simulation(self, row: int = 0) -> tuple[Any, Any]:
        """MuJoCo's model and data of one robot, as copies, for rendering and analysis.

        Args:
            row: which robot.

        Returns:
            ``(mujoco.MjModel, mujoco.MjData)`` with derived quantities computed.
        """
        model, data = self._batch.get_model(row), self._batch.get_data(row)
        self._mujoco.mj_forward(model, data)
        return model, data


def _ignore(message: str | bytes) -> None:
    """Take a warning of MuJoCo: divergence is detected and handled where it happens."""


def _rotations(quaternion: np.ndarray) -> np.ndarray:
    """Rotation matrices ``[N, 3, 3]`` of unit quaternions ``[N, 4]``, w first."""
    w, x, y, z = quaternion.T
    out = np.empty((len(quaternion), 3, 3))
    out[:, 0, 0], out[:, 0, 1], out[:, 0, 2] = 1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)
    out[:, 1, 0], out[:, 1, 1], out[:, 1, 2] = 2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)
    out[:, 2, 0], out[:, 2, 1], out[:, 2, 2] = 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)
    return out


def _foot_positions(joints: np.ndarray) -> np.ndarray:
    """Foot centres ``[N, 4, 3]`` in the trunk's frame, for joint angles ``[N, 12]``."""
    abduction, hip, knee = joints.reshape(-1, 4, 3).transpose(2, 0, 1)
    front, left = np.array([1.0, 1.0, -1.0, -1.0]), np.array([1.0, -1.0, 1.0, -1.0])
    x = -LINK * (np.sin(hip) + np.sin(hip + knee))
    z = -LINK * (np.cos(hip) + np.cos(hip + knee))
    cos, sin = np.cos(abduction), np.sin(abduction)
    side = left * THIGH_Y
    return np.stack([front * HIP_X + x, left * HIP_Y + cos * side - sin * z, sin * side + cos * z], -1)
