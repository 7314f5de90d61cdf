"""The configuration of GRPO: defaults, and groups that must divide the environments."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from edenrl.config import EnvConfig, GRPOConfig, RunConfig


class Train(RunConfig):
    """Train GRPO."""

    algorithm: GRPOConfig = Field(default_factory=GRPOConfig)
    """GRPO."""


@pytest.mark.parametrize(
    ("num_envs", "size", "advice"),
    [
        (10, 4, "set env.num_envs to 8 or 12, or algorithm.group_size to 2 or 5"),
        (10, 8, "set env.num_envs to 8 or 16, or algorithm.group_size to 5 or 10"),
        (7, 4, "set env.num_envs to 4 or 8, or algorithm.group_size to 7"),
        (3, 4, "set env.num_envs to 4, or algorithm.group_size to 3"),
        (1, 4, "set env.num_envs to 4"),
    ],
)
def test_groups_must_divide_the_environments(num_envs: int, size: int, advice: str) -> None:
    with pytest.raises(ValidationError) as error:
        Train(env=EnvConfig(num_envs=num_envs), algorithm=GRPOConfig(group_size=size))
    message = error.value.errors()[0]["msg"]
    assert message == f"env.num_envs = {num_envs} is not a multiple of algorithm.group_size = {size}; {advice}"
    Train(env=EnvConfig(num_envs=size * 3), algorithm=GRPOConfig(group_size=size))


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValidationError, match="group_size"):
        GRPOConfig(group_size=1)


def test_adaptive_schedule_needs_lr_within_its_bounds() -> None:
    with pytest.raises(ValidationError, match="min_lr 1e-05, lr 0.1, max_lr 0.01"):
        GRPOConfig(lr=0.1)
    assert GRPOConfig(lr=0.1, lr_schedule="linear").schedule_options() == {"final_fraction": 0.0}
