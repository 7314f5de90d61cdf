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
from edenrl.modules.normalization import RunningNorm
from edenrl.modules.symmetry import MirrorAugmentation, SignedPermutation

__all__ = [
    "GaussianMLP",
    "GroupMLP",
    "MirrorAugmentation",
    "RunningNorm",
    "SignedPermutation",
    "StateIndependentStd",
    "categorical_actor",
    "gaussian_actor",
    "make_actor",
    "observation_groups",
    "update_normalization",
    "value_critic",
]
