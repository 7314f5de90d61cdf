"""Settings for the built-in robot, shared by the trainers that build on PPO."""

from __future__ import annotations

from typing import Any

__all__ = ["QUADRUPED", "QUADRUPED_STYLE", "QUADRUPED_TERRAIN"]

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

# What keeps the robot upright and walking counts in both channels, so that the two that are traded are tracking on the
# one hand, energy and smoothness on the other.
_BOTH = ("alive", "trot", "air_time", "stand", "stand_pose", "height", "pose")
_STYLE = {"torque": -2e-3, "action_rate": -0.1, "joint_acceleration": -2.5e-6}
QUADRUPED_STYLE: dict[str, Any] = QUADRUPED | {
    "total_frames": 1_500_000,
    "env": {
        "num_envs": 64,
        "kwargs": {
            "groups": ["policy", "critic", "metrics", "reward_groups"],
            # Rewards are not cut at zero in the channels: without more for being alive, falling early would pay.
            "rewards": {"alive": 1.0, **_STYLE},
            "term_groups": {**dict.fromkeys(_BOTH, "penalty"), **dict.fromkeys(_STYLE, "style")},
        },
    },
    "algorithm": QUADRUPED["algorithm"]
    # In their own units the channels balance by themselves, and lambda only has to find where.
    | {"epochs": 5, "normalize_advantage": "none", "warmup_iters": 300, "vg_window": 64, "vg_star_window": 2000},
    "evaluation": {"num_episodes": 64, "metric": "updates"},
}
"""Velocity commands on flat ground, for constrained PPO: tracking against energy and smoothness."""
