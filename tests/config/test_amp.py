"""The configuration of AMP: defaults, and settings that cannot work."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from edenrl.config import AMPConfig, presets


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (dict(name="PPO"), "--algorithm.warm_start RUN_DIR"),
        (dict(name="GRPO"), "name"),
        (dict(actor_groups=None), "actor_groups"),
        (dict(actor_groups=("observation", "amp_window")), "discriminator's alone"),
        (dict(num_frames=1), "num_frames"),
        (dict(discriminator_hidden=()), "discriminator_hidden"),
        (dict(style_scale=-0.1), "style_scale"),
        (dict(discriminator_interval=0), "discriminator_interval"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError) as error:
        AMPConfig.model_validate(values)
    assert expected in str(error.value)


@pytest.mark.parametrize("name", ["Quadruped", "QuadrupedTerrain"])
def test_the_presets_are_those_of_ppo_with_windows(name: str) -> None:
    plain, amp = presets.PPO[name], presets.AMP[name]
    assert amp["env"]["kwargs"]["groups"] == [*plain["env"]["kwargs"]["groups"], "amp"]
    assert amp["env"]["num_envs"] == 64 and amp["algorithm"] == plain["algorithm"]
