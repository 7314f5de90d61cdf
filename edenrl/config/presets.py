"""Settings for built-in environments that several trainers share, or that are long."""

from __future__ import annotations

from typing import Any

__all__ = ["HIDDEN_POINT_MASS_RMA", "QUADRUPED", "QUADRUPED_TERRAIN", "QUADRUPED_TERRAIN_RMA"]

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
"""RMA on the courses, with networks for a CPU."""

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
