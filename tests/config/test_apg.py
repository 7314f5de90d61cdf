"""edenrl.config.APGConfig: defaults, and settings that contradict each other."""

import pytest
from pydantic import ValidationError

from edenrl.config import APGConfig


def test_defaults_are_those_of_the_specification() -> None:
    cfg = APGConfig()
    assert (cfg.mode, cfg.segment_length, cfg.gamma, cfg.entropy_coeff) == ("segment", 16, 0.99, 0.0)
    assert (cfg.max_grad_norm, cfg.lr, cfg.skip_nonfinite) == (0.5, 2.5e-4, True)
    assert (cfg.max_grad_norm_before_clip, cfg.action_adjoint_max_norm, cfg.updates) == (0.0, 0.0, None)
    assert all(field.description for field in APGConfig.model_fields.values())


def test_rollouts_per_update() -> None:
    assert APGConfig().rollouts == 1
    assert APGConfig(segment_length=8, update_horizon=24).rollouts == 3
    assert APGConfig(mode="complete", rollouts_per_update=4).rollouts == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(update_horizon=40), "update_horizon 40 is not a multiple of segment_length 16; the closest is 32"),
        (dict(update_horizon=4), "the closest is 16"),
        (dict(rollouts_per_update=3), "rollouts_per_update 3 is for mode 'complete'; .* such as 48"),
        (dict(mode="complete", update_horizon=32), "update_horizon 32 is for mode 'segment'"),
        (dict(deterministic=True, entropy_coeff=0.1), "deterministic collection never samples"),
        (dict(gamma=1.5), "gamma"),
        (dict(max_grad_norm_before_clip=-1), "max_grad_norm_before_clip"),
    ],
)
def test_contradictions_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        APGConfig(**options)


def test_schedule_options() -> None:
    assert APGConfig().schedule_options() == {}
    assert APGConfig(lr_schedule="linear", final_lr_fraction=0.4).schedule_options() == {"final_fraction": 0.4}
