"""The configuration of HIM: defaults of the specification, one group each, no normalization."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from edenrl.config import HIMConfig, presets


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
    assert {name for name in ppo if him.get(name) != ppo[name]} == {"actor_groups", "symmetry"}
    config = HIMConfig(**him)
    assert config.mirror_data is None and config.symmetry_loss is None


def test_the_critic_is_as_wide_as_in_the_source() -> None:
    assert HIMConfig().critic_hidden == HIMConfig().actor_hidden == (512, 256, 256)


@pytest.mark.parametrize("on", [True, False])
def test_a_configuration_of_an_earlier_version_has_one_switch_for_both(on: bool) -> None:
    old = HIMConfig.model_validate({"symmetry": on})
    assert (old.mirror_data, old.symmetry_loss) == (on, on)
    with pytest.raises(ValidationError, match="symmetry is now two switches"):
        HIMConfig.model_validate({"symmetry": on, "mirror_data": True})
