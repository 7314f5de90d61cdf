"""What a deployment of a quadruped's policy must know: terms of its groups, actions, rate and joints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edenrl.envs.quadruped.groups import AMP_FRAMES
from edenrl.envs.quadruped.model import DEFAULT_POSE, JOINT_NAMES, KP, KV, PHYSICS_DT, TORQUE_LIMIT

__all__ = ["SPEC_VALUES", "quadruped_contract"]

# What is randomized of the values that a policy spec states.
SPEC_VALUES = ("motor_strength", "kp", "kd", "joint_offset")


def _term(
    name: str, unit: str | None = None, meaning: str | None = None, width: int = 1, scale: float = 1.0
) -> dict[str, Any]:
    """A term whose features have the same scale."""
    return {"name": name, "width": width, "unit": unit, "scale": [scale] * width, "meaning": meaning}


_COMMAND = {
    "name": "command",
    "width": 3,
    "unit": "m/s, m/s, rad/s",
    "scale": [2.0, 2.0, 0.5],
    "meaning": "commanded velocity forward and to the left, and yaw rate, in the trunk's frame",
}
_ANGULAR_VELOCITY = _term(
    "angular velocity", "rad/s", "of the trunk, in its own frame: x forward, y left, z up", width=3, scale=0.25
)
_GRAVITY = _term("gravity direction", None, "unit vector in the trunk's frame; (0, 0, -1) when upright", width=3)
_JOINTS = [
    _term(
        "joint angles from the default pose",
        "rad",
        "angle less default position, in the order of joint_names",
        width=12,
    ),
    _term("joint velocities", "rad/s", "in the order of joint_names", width=12, scale=0.05),
    {
        "name": "last action",
        "width": 12,
        "scale": [1.0] * 12,
        "at_reset": 0.0,
        "meaning": "the action of the step before, clipped, before scale and bias",
    },
]
_LINEAR_VELOCITY = _term("linear velocity", "m/s", "of the trunk, in its own frame", width=3, scale=2.0)
_POLICY = [_COMMAND, _ANGULAR_VELOCITY, _GRAVITY, *_JOINTS]


_PROP = [
    _ANGULAR_VELOCITY,
    _term("roll", "rad"),
    _term("pitch", "rad", "positive with the nose down"),
    _term("zero", meaning="always 0"),
    _term("yaw to the way-point", "rad", "from the heading, positive to the left; 0 on flat ground"),
    _term("yaw to the next way-point", "rad", "as above, to the one after it"),
    _COMMAND,
    _term("on terrain", meaning="1 on terrain, otherwise 0"),
    _term("on flat ground", meaning="1 on flat ground, otherwise 0"),
    *_JOINTS,
    {
        "name": "foot contacts",
        "width": 4,
        "scale": [1.0] * 4,
        "at_reset": -0.5,
        "meaning": "0.5 where the foot FL, FR, RL, RR presses with more than 1 N, otherwise -0.5",
    },
]
_TERMS: dict[str, list[dict[str, Any]]] = {
    "policy": _POLICY,
    "critic": [*_POLICY, _LINEAR_VELOCITY],
    "history": _POLICY,
    "prop": _PROP,
    "prop_history": _PROP,
    "scan": [
        _term(
            "height scan",
            "m",
            "trunk height less 0.3 m above 12 x 11 points of the ground, in [-1, 1]; x from -0.45 to 1.2 m, for each y "
            "from -0.75 to 0.75 m, in steps of 0.15 m along the heading",
            132,
        )
    ],
    "priv_explicit": [
        _LINEAR_VELOCITY,
        _term("height above ground", "m"),
        _term("foot forces", "N", "normal force of FL, FR, RL, RR, at most 300 N", width=4, scale=0.01),
        _term("difficulty"),
    ],
    "priv_latent": [
        _term("trunk mass offset", "kg"),
        _term("trunk centre offset", "m", width=3),
        _term("friction"),
        _term("kp factors", width=12),
        _term("kd factors", width=12),
    ],
    "amp_window": [_term("joint angles", "rad", "in the order of joint_names", 12)],
    "amp_gate": [_term("moving", meaning="1 while commanded to move, otherwise 0")],
    "depth": [_term("depth image", None, "depth / 2.5 m - 0.5, row by row, at most 0.5", 58 * 87)],
    "delta_yaw_ok": [_term("way-point ahead", meaning="1 where it is less than 0.6 rad off the heading, otherwise 0")],
}


def quadruped_contract(
    ranges: Mapping[str, tuple[float, float]], frames: Mapping[str, int], dt: float, depth_interval: int, scale: float
) -> dict[str, Any]:
    """The return value of ``Quadruped.policy_contract()``.

    Args:
        ranges: low and high of each randomized parameter, see ``RANDOMIZATION``.
        frames: frames of ``history`` and ``prop_history``.
        dt: control step in s.
        depth_interval: control steps between depth images.
        scale: of the actions.
    """
    # A value that is not randomized counts as it is; those that are, are refused by the exporter.
    fixed = {name: ranges[name][0] for name in SPEC_VALUES}
    strength, bias = fixed["motor_strength"], DEFAULT_POSE + fixed["joint_offset"]
    return {
        "observations": _TERMS,
        "histories": {
            "history": _history(frames["history"], "policy"),
            "prop_history": _history(frames["prop_history"], "prop"),
            "amp_window": _history(AMP_FRAMES, None),
        },
        "intervals": {"depth": depth_interval},
        "actions": {
            "clip": True,
            "scale": [scale] * len(JOINT_NAMES),
            "bias": bias.tolist(),
            "names": list(JOINT_NAMES),
            "unit": "rad",
            "meaning": "target angles of the joints' PD servos",
        },
        "rate": {"control_dt": dt, "decimation": round(dt / PHYSICS_DT), "sim_dt": PHYSICS_DT},
        "entities": [
            {
                "name": "quadruped",
                "joint_names": list(JOINT_NAMES),
                "default_positions": DEFAULT_POSE.tolist(),
                "stiffness": [KP * fixed["kp"] * strength] * len(JOINT_NAMES),
                "damping": [KV * fixed["kd"] * strength] * len(JOINT_NAMES),
                "effort_limits": np.multiply(TORQUE_LIMIT, strength).tolist(),
            }
        ],
        "randomized": [name for name in SPEC_VALUES if ranges[name][0] != ranges[name][1]],
    }


def _history(frames: int, frame_of: str | None) -> dict[str, Any]:
    return {"frames": frames, "order": "oldest_first", "at_reset": "repeat", "frame_of": frame_of}
