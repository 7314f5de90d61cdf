"""Settings for the built-in robot, shared by the trainers that build on PPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "HIDDEN_POINT_MASS_RMA",
    "QUADRUPED",
    "QUADRUPED_HIM",
    "QUADRUPED_STYLE",
    "QUADRUPED_TERRAIN",
    "QUADRUPED_TERRAIN_RMA",
    "with_groups",
]

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

QUADRUPED_HIM: dict[str, Any] = QUADRUPED | {
    "env": {"num_envs": 64, "kwargs": {"groups": ["history", "critic", "metrics"]}},
    "algorithm": QUADRUPED["algorithm"]
    | {
        "actor_groups": ("history",),
        "encoder_hidden": (128, 64),
        "target_hidden": (64, 64),
        "latent_dim": 16,
        "num_prototypes": 32,
    },
}
"""The same with an actor that estimates its velocity from a history."""

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

_RMA_GROUPS = ["prop", "scan", "priv_explicit", "priv_latent", "prop_history", "metrics"]
QUADRUPED_TERRAIN_RMA: dict[str, Any] = QUADRUPED_TERRAIN | {
    "env": {"num_envs": 64, "kwargs": {"groups": _RMA_GROUPS}},
    "algorithm": {
        "actor_hidden": (128, 64),
        "critic_hidden": (128, 64),
        "scan_hidden": (64, 32),
        "priv_hidden": (32, 16),
        "estimator_hidden": (64, 32),
        "symmetry": "augment",
        "steps_per_env": 24,
        "num_minibatches": 2,
        "lr": 1e-3,
        "desired_kl": 0.02,
        "estimator_lr": 1e-3,
        "entropy_coeff": 0.0,
        "init_std": 0.8,
        "dagger_update_freq": 10,
        "priv_reg_begin": 500,
        "priv_reg_length": 1000,
    },
}
"""RMA on the courses, with networks for a CPU; on flat ground it is untuned."""

HIDDEN_POINT_MASS_RMA: dict[str, Any] = {
    "total_frames": 600_000,
    "env": {"num_envs": 128},
    "algorithm": {
        "actor_hidden": (64, 64),
        "critic_hidden": (64, 64),
        "critic_groups": ("critic",),
        "priv_hidden": (32, 8),
        "estimator_hidden": (32,),
        "steps_per_env": 32,
        "gamma": 0.95,
        "num_minibatches": 4,
        "lr": 1e-3,
        "estimator_lr": 1e-3,
        "desired_kl": 0.02,
        "entropy_coeff": 0.0,
        "init_std": 0.5,
        "dagger_update_freq": 5,
        "priv_reg_begin": 120,
        "priv_reg_length": 50,
        "priv_reg_end": 0.02,
        "clip_value": False,
    },
    "evaluation": {"num_episodes": 128},
}
"""RMA on a point whose dynamics are hidden."""


def with_groups(preset: Mapping[str, Any], *groups: str) -> dict[str, Any]:
    """A preset whose environment publishes further groups.

    Examples:
        >>> with_groups(QUADRUPED, "amp")["env"]["kwargs"]["groups"]
        ['policy', 'critic', 'metrics', 'amp']
    """
    kwargs = preset["env"]["kwargs"]
    return {**preset, "env": {**preset["env"], "kwargs": {**kwargs, "groups": [*kwargs["groups"], *groups]}}}
