"""The reward of the quadruped: terms, their weights, and the groups they are summed by."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np

from edenrl.envs.quadruped.model import KP, KV, TORQUE_LIMIT
from edenrl.envs.quadruped.simulation import DT

__all__ = ["REWARD_WEIGHTS", "reward_matrix", "reward_terms"]

NOMINAL_HEIGHT = 0.30  # m

REWARD_WEIGHTS = {
    "task": {"track_velocity": 1.5, "track_yaw": 0.75, "alive": 0.1},
    "style": {
        "trot": 1.0,
        "air_time": 1.0,
        "stand": 1.0,
        "stand_pose": -0.5,
        "stand_speed": -5.0,
        "height": -20.0,
        "pose": -0.05,
    },
    "penalty": {
        "vertical_velocity": -2.0,
        "roll_pitch_rate": -0.05,
        "tilt": -2.0,
        "torque": -2e-4,
        "action_rate": -0.01,
        "joint_acceleration": -2.5e-7,
    },
}


def reward_matrix(weights: Mapping[str, float] | None, groups: Mapping[str, str] | None) -> np.ndarray:
    """Weights ``[terms, groups]``, in the order of ``REWARD_WEIGHTS``.

    Args:
        weights: weights that replace the defaults, by term.
        groups: groups that replace the defaults, by term.

    Raises:
        ValueError: for an unknown term or group.

    Examples:
        >>> reward_matrix({"alive": 2.0}, {"alive": "style"})[2]
        array([0., 2., 0.])
    """
    terms = {name: (group, weight) for group, part in REWARD_WEIGHTS.items() for name, weight in part.items()}
    for argument, given in (("rewards", weights), ("term_groups", groups)):
        if unknown := [name for name in given or {} if name not in terms]:
            raise ValueError(f"{argument} names {unknown}, which do not exist; choose from {list(terms)}.")
    columns = list(REWARD_WEIGHTS)
    if wrong := {name: group for name, group in (groups or {}).items() if group not in columns}:
        raise ValueError(f"term_groups gives {wrong}, which are no groups; choose from {columns}.")
    matrix = np.zeros((len(terms), len(columns)))
    for row, (name, (group, weight)) in enumerate(terms.items()):
        matrix[row, columns.index((groups or {}).get(name, group))] = (weights or {}).get(name, weight)
    return matrix


def reward_terms(
    k: SimpleNamespace, rows: SimpleNamespace, targets: np.ndarray, action: np.ndarray, contact: np.ndarray
) -> np.ndarray:
    """The terms of a step before weights, ``[N, terms]`` in the order of ``REWARD_WEIGHTS``.

    Args:
        k: kinematics after the step.
        rows: what the environment remembers, from before the step.
        targets: joint targets of the servos, ``[N, 12]``.
        action: actions, ``[N, 12]``.
        contact: which feet touch the ground, ``[N, 4]``.
    """
    command, moving = rows.command, np.abs(rows.command).max(-1) > 0.0
    velocity_error = np.square(k.velocity[:, :2] - command[:, :2]).sum(-1)
    yaw_error = np.square(k.angular[:, 2] - command[:, 2])
    # One diagonal pair carries while the other swings.
    trot = (contact[:, 0] == contact[:, 3]) & (contact[:, 1] == contact[:, 2]) & (contact[:, 0] != contact[:, 1])
    landed = contact & ~rows.contact
    air_time = (landed * (np.minimum(rows.air_time, 0.5) - 0.15)).sum(-1)
    pose = np.square(k.joint_offset).sum(-1)
    torque = np.clip(
        KP * rows.kp * (targets - k.joints) - KV * rows.kd * k.joint_velocity,
        -TORQUE_LIMIT * rows.motor_strength,
        TORQUE_LIMIT * rows.motor_strength,
    )
    acceleration = (k.joint_velocity - rows.last_joint_velocity) / DT
    return np.stack(
        [
            np.exp(-velocity_error / 0.1),
            np.exp(-yaw_error / 0.1),
            np.ones(len(action)),
            trot & moving,
            air_time * moving,
            contact.all(-1) & ~moving,
            np.abs(k.joint_offset).sum(-1) * ~moving,
            np.hypot(k.velocity[:, 0], k.velocity[:, 1]) * ~moving,
            np.square(k.height - NOMINAL_HEIGHT),
            pose,
            np.square(k.velocity[:, 2]),
            np.square(k.angular[:, :2]).sum(-1),
            np.square(k.gravity[:, :2]).sum(-1),
            np.square(torque).sum(-1),
            np.square(action - rows.last_action).sum(-1),
            np.square(acceleration).sum(-1),
        ],
        axis=-1,
    )
