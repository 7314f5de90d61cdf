"""The configuration of AMP: defaults, and settings that cannot work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from edenrl.config import AMPConfig, presets


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (dict(name="PPO"), "--init_from RUN_DIR"),
        (dict(name="GRPO"), "name"),
        (dict(actor_groups=None), "actor_groups"),
        (dict(actor_groups=("observation", "amp_window")), "discriminator's alone"),
        (dict(num_frames=1), "num_frames"),
        (dict(discriminator_hidden=()), "discriminator_hidden"),
        (dict(style_scale=-0.1), "style_scale"),
        (dict(style_scale="step"), "style_scale"),
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


@pytest.mark.parametrize("control_dt", [0.02, 0.005])
def test_the_style_may_be_scaled_by_the_control_step(control_dt: float) -> None:
    env = SimpleNamespace(control_dt=control_dt)
    assert AMPConfig().style_options(env) == {"coeff": 5.0, "scale": 0.02}
    assert AMPConfig(style_scale="control_dt", style_coeff=3.0).style_options(env) == {
        "coeff": 3.0,
        "scale": control_dt,
    }
    with pytest.raises(ValueError, match="does not say how long its control step is"):
        AMPConfig(style_scale="control_dt").style_options(SimpleNamespace())


@pytest.mark.parametrize(("interval", "per_iteration"), [(1, 8), (4, 10), (7, 3)])
def test_discriminator_steps_add_up(interval: int, per_iteration: int) -> None:
    config = AMPConfig(discriminator_interval=interval, epochs=per_iteration, num_minibatches=1)
    due = [config.discriminator_steps(per_iteration * (i + 1)) for i in range(20)]
    assert sum(due) == 20 * per_iteration // interval and max(due) - min(due) <= 1
