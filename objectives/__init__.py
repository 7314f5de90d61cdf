"""Losses and advantage estimators, one file per algorithm."""

from edenrl.objectives.amp import AMPLoss
from edenrl.objectives.apg import APGLoss
from edenrl.objectives.base import LossMixin, require, require_not_negative
from edenrl.objectives.cmdp import CMDPLoss, TwoChannelGAE, check_reward_groups
from edenrl.objectives.distillation import DepthDistillationLoss
from edenrl.objectives.explained_variance import explained_variance
from edenrl.objectives.flashsac import FlashSACLoss
from edenrl.objectives.gae import GAE
from edenrl.objectives.grpo import GroupRelativeAdvantage, GRPOLoss
from edenrl.objectives.him import HIMEstimatorLoss, HIMLoss
from edenrl.objectives.mirror import MirrorLoss
from edenrl.objectives.ppo import PPOLoss, gaussian_kl
from edenrl.objectives.registry import make_loss, register_loss, registered_losses
from edenrl.objectives.rma import LinearRamp, RMADaggerLoss, RMALoss

__all__ = [
    "AMPLoss",
    "APGLoss",
    "CMDPLoss",
    "DepthDistillationLoss",
    "FlashSACLoss",
    "GAE",
    "GRPOLoss",
    "GroupRelativeAdvantage",
    "HIMEstimatorLoss",
    "HIMLoss",
    "LinearRamp",
    "LossMixin",
    "MirrorLoss",
    "PPOLoss",
    "RMADaggerLoss",
    "RMALoss",
    "TwoChannelGAE",
    "check_reward_groups",
    "explained_variance",
    "gaussian_kl",
    "make_loss",
    "register_loss",
    "registered_losses",
    "require",
    "require_not_negative",
]

# A loss is registered under its class's name without "Loss": make_loss("PPO", ...) builds a PPOLoss.
for _loss in (
    AMPLoss,
    APGLoss,
    CMDPLoss,
    DepthDistillationLoss,
    FlashSACLoss,
    GRPOLoss,
    HIMEstimatorLoss,
    HIMLoss,
    MirrorLoss,
    PPOLoss,
    RMADaggerLoss,
    RMALoss,
):
    register_loss(_loss.__name__.removesuffix("Loss"), _loss, override=True)
