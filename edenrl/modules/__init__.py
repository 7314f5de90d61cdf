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
from edenrl.modules.amp import AMPReward, Discriminator, FrameNorm, SaturationWatch
from edenrl.modules.constraint import TaskConstraint
from edenrl.modules.him import HIMActor, HIMEstimator, HIMLayout, him_actor, sinkhorn
from edenrl.modules.moments import merge_moments, several_processes
from edenrl.modules.normalization import RunningNorm
from edenrl.modules.simba import (
    GaussianSimBa,
    GroupEncoder,
    GroupSimBa,
    HyperDense,
    Scaler,
    SimBa,
    post_step_hook,
    project_,
    simba_actor,
    simba_critic,
)
from edenrl.modules.symmetry import MirrorAugmentation, SignedPermutation

__all__ = [
    "AMPReward",
    "Discriminator",
    "FrameNorm",
    "GaussianMLP",
    "GaussianSimBa",
    "GroupEncoder",
    "GroupMLP",
    "GroupSimBa",
    "HIMActor",
    "HIMEstimator",
    "HIMLayout",
    "HyperDense",
    "RunningNorm",
    "SaturationWatch",
    "Scaler",
    "SimBa",
    "MirrorAugmentation",
    "RunningNorm",
    "SignedPermutation",
    "StateIndependentStd",
    "TaskConstraint",
    "categorical_actor",
    "gaussian_actor",
    "him_actor",
    "make_actor",
    "merge_moments",
    "observation_groups",
    "post_step_hook",
    "project_",
    "several_processes",
    "simba_actor",
    "simba_critic",
    "sinkhorn",
    "update_normalization",
    "value_critic",
]
