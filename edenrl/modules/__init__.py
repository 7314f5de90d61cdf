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
from edenrl.modules.rma import (
    RMA_CHUNKS,
    HistoryEncoder,
    RMAActor,
    RMAComposition,
    rma_composition,
    rma_policy,
)
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
    "GaussianMLP",
    "GaussianSimBa",
    "GroupEncoder",
    "GroupMLP",
    "GroupSimBa",
    "HistoryEncoder",
    "HyperDense",
    "RMAActor",
    "RMAComposition",
    "RMA_CHUNKS",
    "RunningNorm",
    "Scaler",
    "SimBa",
    "MirrorAugmentation",
    "RunningNorm",
    "SignedPermutation",
    "StateIndependentStd",
    "categorical_actor",
    "gaussian_actor",
    "make_actor",
    "merge_moments",
    "observation_groups",
    "post_step_hook",
    "project_",
    "rma_composition",
    "rma_policy",
    "several_processes",
    "simba_actor",
    "simba_critic",
    "update_normalization",
    "value_critic",
]
