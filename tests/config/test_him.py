"""The configuration of HIM: defaults of the specification, one group each, no normalization."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from edenrl.config import HIMConfig, PPOConfig, presets


def test_defaults_are_those_of_the_specification() -> None:
    defaults = HIMConfig().model_dump()
    expected = dict(
        name="him",
        entropy_coeff=0.01,
        symmetry_scale=1.0,
        actor_hidden=(512, 256, 256),
        encoder_hidden=(256, 256),
        target_hidden=(256, 256),
        latent_dim=32,
        num_prototypes=64,
        target_skip_dim=3,
        temperature=3.0,
        sinkhorn_eps=0.05,
        sinkhorn_iterations=3,
        estimator_max_grad_norm=10.0,
        normalize_observations=False,
        actor_groups=("history",),
        critic_groups=("critic",),
        history_layout=None,
    )
    assert {name: defaults[name] for name in expected} == expected
    ppo = PPOConfig().model_dump()
    shared = (defaults.keys() & ppo.keys()) - expected.keys()
    assert len(shared) > 12 and {name: defaults[name] for name in shared} == {name: ppo[name] for name in shared}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(normalize_observations=True), "expected false: the estimator learns the raw"),
        (dict(actor_groups=("history", "scan")), "expected one group, got 2"),
        (dict(critic_groups=()), "expected one group, got 0"),
        (dict(critic_groups=None), "critic_groups"),
        (dict(history_layout="newest"), "'oldest_first' or 'newest_first'"),
        (dict(target_skip_dim=-1), "greater than or equal to 0"),
        (dict(temperature=0), "greater than 0"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HIMConfig(**given)


def test_the_preset_of_the_robot_shares_that_of_ppo() -> None:
    him, ppo = presets.HIM["Quadruped"]["algorithm"], presets.PPO["Quadruped"]["algorithm"]
    assert {name for name in ppo if him[name] != ppo[name]} == {"actor_groups"}
    assert HIMConfig(**him).symmetry
