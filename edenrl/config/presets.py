"""Settings by trainer and environment, found by measuring (docs/pages/results.md).

Each trainer has one table: the name of an environment, and the fields of the run's configuration that differ from the
defaults there. The command line overrides every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "AMP",
    "APG",
    "CMDP",
    "DISTILLATION",
    "FLASHSAC",
    "FLASHSAC_PROFILES",
    "GRPO",
    "HIM",
    "PPO",
    "RMA",
    "SIMBA",
    "changed",
]

Preset = dict[str, Any]


def changed(preset: Mapping[str, Any], **fields: Any) -> Preset:
    """A copy of a preset with other fields; dictionaries are merged, everything else is replaced.

    Examples:
        >>> changed({"total_frames": 100, "env": {"num_envs": 4, "name": "A"}}, env={"num_envs": 8})
        {'total_frames': 100, 'env': {'num_envs': 8, 'name': 'A'}}
    """
    copy = dict(preset)
    for name, value in fields.items():
        old = copy.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = changed(old, **value)
        copy[name] = value
    return copy


# ---------------------------------------------------------------------------------------------------------------- PPO

_SMALL_NETWORKS: Preset = {"actor_hidden": (64, 64), "critic_hidden": (64, 64)}

# Few environments and long rollouts, as on Gymnasium tasks.
_FEW_ENVIRONMENTS: Preset = {
    "env": {"num_envs": 16, "reward_scale": 0.1},
    "algorithm": {
        **_SMALL_NETWORKS,
        "steps_per_env": 128,
        "epochs": 10,
        "num_minibatches": 8,
        "lr": 3e-4,
        "lr_schedule": "linear",
        "clip_value": False,
        "critic_coeff": 0.5,
        "entropy_coeff": 0.0,
        "max_grad_norm": 0.8,
        "init_std": 0.37,
        "activation": "tanh",
        "normalize_advantage": "minibatch",
    },
}
_SHORT = changed(_FEW_ENVIRONMENTS, total_frames=200_000)

# Symmetry and a learning rate that follows a KL of 0.02 make the robot walk within a minute.
_QUADRUPED: Preset = {
    "total_frames": 1_000_000,
    "env": {"num_envs": 64, "kwargs": {"groups": ["policy", "critic", "metrics"]}},
    "algorithm": {
        **_SMALL_NETWORKS,
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
# Actor and critic see the ground around the robot, and the courses get harder as they are mastered.
_QUADRUPED_TERRAIN = changed(
    _QUADRUPED,
    total_frames=5_000_000,
    env={"kwargs": {"groups": ["policy", "critic", "scan", "metrics"]}},
    algorithm={
        "actor_hidden": (128, 64),
        "critic_hidden": (128, 64),
        "actor_groups": ("policy", "scan"),
        "critic_groups": ("critic", "scan"),
    },
)

PPO: dict[str, Preset] = {
    "PointMass": {
        "total_frames": 1_000_000,
        "env": {"kwargs": {"success_bonus": 50.0}, "reward_scale": 0.1},
        "algorithm": {**_SMALL_NETWORKS, "clip_value": False},
        "evaluation": {"num_episodes": 128},
    },
    "HalfCheetah-v5": changed(_FEW_ENVIRONMENTS, total_frames=1_000_000),
    "Pendulum-v1": changed(_SHORT, algorithm={"gamma": 0.95, "init_std": 1.0, "lr": 1e-3}),
    "InvertedPendulum-v5": _SHORT,
    "CartPole-v1": _SHORT,
    "Quadruped": _QUADRUPED,
    "QuadrupedTerrain": _QUADRUPED_TERRAIN,
}
"""PPO."""

# ------------------------------------------------------------------------------------------- PPO with SimBaV2 networks

_SMALL_SIMBA: Preset = {
    "actor_dim": 128,
    "critic_dim": 128,
    "critic_blocks": 1,
    "expansion": 2,
    "encoder_hidden": None,
    "clip_value": False,
}

SIMBA: dict[str, Preset] = {
    "PointMass": {**PPO["PointMass"], "algorithm": _SMALL_SIMBA},
    "HalfCheetah-v5": {
        "total_frames": 1_000_000,
        "env": {"num_envs": 16, "reward_scale": 0.02},
        "algorithm": {
            **_SMALL_SIMBA,
            "steps_per_env": 128,
            "epochs": 10,
            "num_minibatches": 4,
            "lr": 1e-3,
            "lr_schedule": "linear",
            "muon_adjust_lr": "match_rms_adamw",
            "critic_coeff": 0.5,
            "max_grad_norm": 0.8,
            "init_std": 0.37,
            "normalize_advantage": "minibatch",
        },
    },
}
"""PPO with SimBaV2 networks and Muon."""

# -------------------------------------------------------------------------------------------- AMP, HIM: the quadruped

_AMP_GROUPS = {"kwargs": {"groups": ["policy", "critic", "metrics", "amp"]}}
_AMP_TERRAIN_GROUPS = {"kwargs": {"groups": ["policy", "critic", "scan", "metrics", "amp"]}}

AMP: dict[str, Preset] = {
    "Quadruped": changed(_QUADRUPED, env=_AMP_GROUPS),
    "QuadrupedTerrain": changed(_QUADRUPED_TERRAIN, env=_AMP_TERRAIN_GROUPS),
}
"""PPO with an adversarial motion prior."""

# HIM's switches for symmetry are on by themselves where an environment declares mirrors.
_WITHOUT_SYMMETRY = {name: value for name, value in _QUADRUPED["algorithm"].items() if name != "symmetry"}
_QUADRUPED_HIM = changed(
    {**_QUADRUPED, "algorithm": _WITHOUT_SYMMETRY},
    env={"kwargs": {"groups": ["history", "critic", "metrics"]}},
    algorithm={
        "actor_groups": ("history",),
        "encoder_hidden": (128, 64),
        "target_hidden": (64, 64),
        "latent_dim": 16,
        "num_prototypes": 32,
    },
)

HIM: dict[str, Preset] = {
    "Quadruped": _QUADRUPED_HIM,
    # The settings of the flat ground, not tuned for courses; the robot does not see the ground.
    "QuadrupedTerrain": _QUADRUPED_HIM,
}
"""Hybrid internal model."""

# ---------------------------------------------------------------------------------------------------------------- RMA

_RMA_COURSES: Preset = {
    "total_frames": 5_000_000,
    "env": {
        "num_envs": 64,
        "kwargs": {"groups": ["prop", "scan", "priv_explicit", "priv_latent", "prop_history", "metrics"]},
    },
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
    "evaluation": {"num_episodes": 64},
}

RMA: dict[str, Preset] = {
    "QuadrupedTerrain": _RMA_COURSES,
    "Quadruped": _RMA_COURSES,  # not tuned for flat ground
    "HiddenPointMass": {
        "total_frames": 600_000,
        "env": {"num_envs": 128},
        "algorithm": {
            **_SMALL_NETWORKS,
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
            "clip_value": False,
            "dagger_update_freq": 5,
            "priv_reg_begin": 120,
            "priv_reg_length": 50,
            "priv_reg_end": 0.02,
        },
        "evaluation": {"num_episodes": 128},
    },
}
"""Rapid motor adaptation."""

DISTILLATION: dict[str, Preset] = {
    "QuadrupedTerrain": {
        "total_frames": 144_000,
        "env": {"num_envs": 16},
        "algorithm": {"steps_per_env": 10, "num_pretrain_iters": 50},
        "evaluation": {"num_episodes": 8, "interval_iterations": 300},
    },
}
"""Distillation of an RMA teacher into a depth student; the rest comes from the teacher's run."""

# ---------------------------------------------------------------------------------------------------- constrained PPO

# Both tasks are learnt without the constraint first, and compared with the best of the whole run.
# Every reward term that keeps the robot upright and walking counts in both channels ("penalty"). What is traded is
# tracking on the one hand, energy and smoothness on the other.
_IN_BOTH_CHANNELS = ("alive", "trot", "air_time", "stand", "stand_pose", "height", "pose")
_STYLE_WEIGHTS = {"torque": -2e-3, "action_rate": -0.1, "joint_acceleration": -2.5e-6}
_QUADRUPED_STYLE = changed(
    _QUADRUPED,
    total_frames=1_500_000,
    env={
        "kwargs": {
            "groups": ["policy", "critic", "metrics", "reward_groups"],
            # Rewards are not cut at zero in the channels: without more for being alive, falling early would pay.
            "rewards": {"alive": 1.0, **_STYLE_WEIGHTS},
            "term_groups": {**dict.fromkeys(_IN_BOTH_CHANNELS, "penalty"), **dict.fromkeys(_STYLE_WEIGHTS, "style")},
        },
    },
    algorithm={
        "epochs": 5,
        # In their own units the channels are balanced already, and lambda only has to find the trade-off.
        "normalize_advantage": "none",
        "warmup_iters": 300,
        "vg_window": 64,
        "vg_star_window": 2000,
    },
    evaluation={"metric": "updates"},
)

CMDP: dict[str, Preset] = {
    "ConflictPointMass": {
        "total_frames": 900_000,
        "algorithm": {
            **_SMALL_NETWORKS,
            "gamma": 0.8,
            "lmbda": 0.8,
            "steps_per_env": 8,
            "epochs": 4,
            "num_minibatches": 2,
            "lr": 1e-3,
            "desired_kl": 0.02,
            "entropy_coeff": 0.0,
            "clip_value": False,
            "init_std": 0.5,
            "warmup_iters": 60,
            "vg_window": 256,
            "vg_star_window": 1000,
        },
        "evaluation": {"num_episodes": 128, "metric": "updates"},
    },
    "Quadruped": _QUADRUPED_STYLE,
    # The settings of the flat ground, not tuned for courses; the robot does not see the ground.
    "QuadrupedTerrain": _QUADRUPED_STYLE,
}
"""Constrained PPO with a task and a style channel."""

# ---------------------------------------------------------------------------------------------------------- GRPO, APG

_SMALL_ACTOR: Preset = {"actor_hidden": (64, 64), "activation": "tanh"}

GRPO: dict[str, Preset] = {
    "PointMass": {
        "total_frames": 2_000_000,
        "env": {"num_envs": 64, "kwargs": {"success_bonus": 50.0}},
        "algorithm": {**_SMALL_ACTOR, "group_size": 8, "kl_coeff": 0.0, "init_std": 0.6},
        "evaluation": {"num_episodes": 128},
    },
    "CartPole-v1": {
        "total_frames": 400_000,
        "env": {"num_envs": 32},
        "algorithm": {**_SMALL_ACTOR, "group_size": 8, "steps_per_env": 500},
    },
}
"""Group relative policy optimization."""

APG: dict[str, Preset] = {
    "PointMass": {
        "total_frames": 960_000,
        "env": {"num_envs": 64},
        "algorithm": {
            "actor_hidden": (64, 64),
            "mode": "complete",
            "segment_length": 100,
            "lr": 3e-3,
            "lr_schedule": "linear",
            "final_lr_fraction": 0.1,
            "init_std": 0.3,
        },
        "evaluation": {"num_episodes": 128, "metric": "success_rate"},
    },
    "CartPoleSwingUp": {
        "total_frames": 4_096_000,
        # Half of the episodes start anywhere, for practice; in evaluation all start with the pole hanging.
        "env": {"num_envs": 128, "action_mode": "squash", "kwargs": {"start_anywhere": 0.5}},
        "algorithm": {
            "actor_hidden": (64, 64),
            "activation": "tanh",
            "segment_length": 128,
            "lr": 5e-3,
            "lr_schedule": "linear",
            "final_lr_fraction": 0.1,
            "init_std": 0.1,
            "max_grad_norm": 1.0,
            # The gradients of a few rows explode near the top. Without this bound they drown the others.
            "action_adjoint_max_norm": 0.002,
        },
        "evaluation": {"metric": "upright_time", "interval_iterations": 25, "kwargs": {"start_anywhere": 0.0}},
    },
}
"""Analytic policy gradient."""

# ----------------------------------------------------------------------------------------------------------- FlashSAC

FLASHSAC: dict[str, Preset] = {
    # A shorter horizon lets half of the seeds dive forward and then run on their backs.
    "HalfCheetah-v5": {"total_frames": 300_000, "algorithm": {"gamma": 0.995, "updates_per_step": 4}},
    "Pendulum-v1": {"total_frames": 12_000, "env": {"num_envs": 4}, "algorithm": {"steps_per_env": 50}},
    "InvertedPendulum-v5": {"total_frames": 12_000, "env": {"num_envs": 4}, "algorithm": {"steps_per_env": 50}},
    "PointMass": {"total_frames": 100_000, "env": {"num_envs": 16, "kwargs": {"success_bonus": 50.0}}},
    "Quadruped": {"total_frames": 300_000, "algorithm": {"actor_groups": ("policy",), "critic_groups": ("critic",)}},
}
"""FlashSAC: lengths and sizes, on top of a profile."""

FLASHSAC_PROFILES: dict[str, Preset] = {
    "full": {},
    # Found by measuring HalfCheetah-v5 with 16 environments (docs/pages/results.md).
    "cpu": {
        "env": {"num_envs": 16},
        "algorithm": {
            "gamma": 0.98,
            "tau": 0.02,
            "batch_size": 128,
            "min_buffer": 2000,
            "buffer_size": 1_000_000,
            "save_buffer": True,
            "alpha_init": 0.001,
            "actor_dim": 64,
            "actor_blocks": 1,
            "critic_dim": 64,
            "critic_blocks": 1,
            "lr": 1e-3,
            "final_lr_fraction": 0.3,
        },
    },
}
"""FlashSAC: settings by the field ``profile``."""
