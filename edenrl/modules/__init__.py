"""Networks and their TensorDict forms."""

from edenrl.modules.actor_critic import (
    categorical_actor,
    gaussian_actor,
    make_actor,
    observation_groups,
    update_normalization,
    value_critic,
    vector_groups,
)
from edenrl.modules.amp import AMPReward, Discriminator, FrameNorm, SaturationWatch
from edenrl.modules.constraint import TaskConstraint
from edenrl.modules.depth import DepthBackbone, DepthEncoder, DepthStudent
from edenrl.modules.depth_policy import DEPTH_STATES, DepthPolicy, DepthRefresh, require_depth_interval
from edenrl.modules.episodes import whole_episode_ends
from edenrl.modules.finite import refuse_nonfinite
from edenrl.modules.flashsac import FlashActor, FlashCritic, flash_actor, flash_critic
from edenrl.modules.him import HIMActor, HIMEstimator, him_actor, sinkhorn
from edenrl.modules.him_layout import HIMLayout, HIMRolloutCheck
from edenrl.modules.mlp import GaussianMLP, GroupMLP, StateIndependentStd
from edenrl.modules.moments import merge_moments, several_processes
from edenrl.modules.normalization import RunningNorm
from edenrl.modules.rma import RMA_CHUNKS, HistoryEncoder, RMAActor
from edenrl.modules.rma_compositions import RMAComposition, rma_composition, rma_policy
from edenrl.modules.simba import HyperDense, Scaler, SimBa, post_step_hook, project_
from edenrl.modules.simba_actor_critic import GaussianSimBa, GroupEncoder, GroupSimBa, simba_actor, simba_critic
from edenrl.modules.squash import PRE_SQUASH, SquashedActor, squashed_log_prob
from edenrl.modules.symmetry import MirrorAugmentation, SignedPermutation, check_mirror_widths, network_widths
from edenrl.modules.unit_norm import (
    UnitBatchNorm,
    UnitLinear,
    UnitRMSNorm,
    average_batch_statistics,
    project_unit_norms_,
    unit_norm_hook,
)

__all__ = [
    "AMPReward",
    "DEPTH_STATES",
    "DepthBackbone",
    "DepthEncoder",
    "DepthPolicy",
    "DepthRefresh",
    "DepthStudent",
    "Discriminator",
    "FlashActor",
    "FlashCritic",
    "FrameNorm",
    "GaussianMLP",
    "GaussianSimBa",
    "GroupEncoder",
    "GroupMLP",
    "GroupSimBa",
    "HIMActor",
    "HIMEstimator",
    "HIMLayout",
    "HIMRolloutCheck",
    "HistoryEncoder",
    "HyperDense",
    "MirrorAugmentation",
    "PRE_SQUASH",
    "RMAActor",
    "RMAComposition",
    "RMA_CHUNKS",
    "RunningNorm",
    "SaturationWatch",
    "Scaler",
    "SignedPermutation",
    "SimBa",
    "SquashedActor",
    "StateIndependentStd",
    "TaskConstraint",
    "UnitBatchNorm",
    "UnitLinear",
    "UnitRMSNorm",
    "average_batch_statistics",
    "categorical_actor",
    "check_mirror_widths",
    "flash_actor",
    "flash_critic",
    "gaussian_actor",
    "him_actor",
    "make_actor",
    "merge_moments",
    "network_widths",
    "observation_groups",
    "post_step_hook",
    "project_",
    "project_unit_norms_",
    "refuse_nonfinite",
    "require_depth_interval",
    "rma_composition",
    "rma_policy",
    "several_processes",
    "simba_actor",
    "simba_critic",
    "sinkhorn",
    "squashed_log_prob",
    "unit_norm_hook",
    "update_normalization",
    "value_critic",
    "vector_groups",
    "whole_episode_ends",
]
