"""Defaults of the algorithms that build on PPO: their own, and for the rest PPO's."""

from __future__ import annotations

from typing import Any

import pytest

from edenrl.config import AMPConfig, Config, GRPOConfig, HIMConfig, PPOConfig

AMP = {
    "name": "AMP",
    "num_frames": 5,
    "style_coeff": 5.0,
    "style_scale": 0.02,
    "grad_penalty_coeff": 5.0,
    "trunk_weight_decay": 1e-3,
    "head_weight_decay": 1e-1,
    "discriminator_hidden": (256, 256),
    "window_buffer_size": 100_000,
    "discriminator_interval": 1,
    "actor_groups": ("observation",),
    "critic_groups": ("observation",),
}
# Other passes over the data and another horizon than PPO's.
GRPO = {
    "name": "GRPO",
    "epochs": 10,
    "clip_epsilon": 0.2,
    "entropy_coeff": 0.0,
    "kl_coeff": 0.02,
    "group_size": 4,
    "eps": 1e-8,
    "reset_before_rollout": True,
    "truncate_at_first_done": True,
    "gamma": 0.99,
    "steps_per_env": 100,
}
HIM = {
    "name": "him",
    "entropy_coeff": 0.01,
    "symmetry_scale": 1.0,
    "actor_hidden": (512, 256, 256),
    "critic_hidden": (512, 256, 256),
    "accept_missing_final_observations": False,
    "mirror_data": None,
    "symmetry_loss": None,
    "encoder_hidden": (256, 256),
    "target_hidden": (256, 256),
    "latent_dim": 32,
    "num_prototypes": 64,
    "target_skip_dim": 3,
    "temperature": 3.0,
    "sinkhorn_eps": 0.05,
    "sinkhorn_iterations": 3,
    "estimator_max_grad_norm": 10.0,
    "normalize_observations": False,
    "actor_groups": ("history",),
    "critic_groups": ("critic",),
    "history_layout": None,
}


@pytest.mark.parametrize(("cls", "own"), [(AMPConfig, AMP), (GRPOConfig, GRPO), (HIMConfig, HIM)])
def test_defaults_are_those_of_the_specification(cls: type[Config], own: dict[str, Any]) -> None:
    defaults, ppo = cls().model_dump(), PPOConfig().model_dump()
    shared = (defaults.keys() & ppo.keys()) - own.keys()
    expected = own | {name: ppo[name] for name in shared}
    assert len(shared) > 12 and {name: defaults[name] for name in expected} == expected
