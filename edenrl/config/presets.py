"""Settings for the built-in robot, shared by the trainers that build on PPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["QUADRUPED", "QUADRUPED_TERRAIN", "with_groups"]

_SMALL = {"actor_hidden": (64, 64), "critic_hidden": (64, 64)}

# Symmetry and a learning rate that follows a KL of 0.02 are what makes it walk within a minute.
QUADRUPED: dict[str, Any] = {
    "total_frames": 1_000_000,
    "env": {"num_envs": 64, "kwargs": {"groups": ["policy", "critic", "metrics"]}},
    "algorithm": _SMALL
    | {
        "symmetry": True,
        "steps_per_env": 24,
        "num_minibatches": 2,
        "lr": 3e-3,
        "desired_kl": 0.02,
        "entropy_coeff": 0.0,
        "init_std": 0.8,
        "normalize_observations": False,
        "actor_groups": ("policy",),
        "critic_groups": ("critic",),
    },
    "evaluation": {"num_episodes": 64},
}
"""Velocity commands on flat ground."""

QUADRUPED_TERRAIN: dict[str, Any] = QUADRUPED | {
    "total_frames": 5_000_000,
    "env": {"num_envs": 64, "kwargs": {"groups": ["policy", "critic", "scan", "metrics"]}},
    "algorithm": QUADRUPED["algorithm"]
    | {
        "actor_hidden": (128, 64),
        "critic_hidden": (128, 64),
        "actor_groups": ("policy", "scan"),
        "critic_groups": ("critic", "scan"),
    },
}
"""Courses that get harder as they are mastered; actor and critic see the ground around the robot."""


def with_groups(preset: Mapping[str, Any], *groups: str) -> dict[str, Any]:
    """A preset whose environment publishes further groups.

    Examples:
        >>> with_groups(QUADRUPED, "amp")["env"]["kwargs"]["groups"]
        ['policy', 'critic', 'metrics', 'amp']
    """
    kwargs = preset["env"]["kwargs"]
    return {**preset, "env": {**preset["env"], "kwargs": {**kwargs, "groups": [*kwargs["groups"], *groups]}}}
