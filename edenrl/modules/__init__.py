"""Networks and their TensorDict forms."""

from edenrl.modules.actor_critic import (
    GaussianMLP,
    GroupMLP,
    StateIndependentStd,
    categorical_actor,
    gaussian_actor,
    make_actor,
    observation_groups,
    update_normalization,
    value_critic,
)
from edenrl.modules.moments import merge_moments, several_processes
from edenrl.modules.normalization import RunningNorm

__all__ = [
    "GaussianMLP",
    "GroupMLP",
    "RunningNorm",
    "StateIndependentStd",
    "categorical_actor",
    "gaussian_actor",
    "make_actor",
    "merge_moments",
    "observation_groups",
    "several_processes",
    "update_normalization",
    "value_critic",
]
