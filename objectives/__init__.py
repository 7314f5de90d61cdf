"""Losses and advantage estimators, one file per algorithm."""

from edenrl.objectives.amp import AMPLoss
from edenrl.objectives.apg import APGLoss
from edenrl.objectives.cmdp import CMDPLoss, TwoChannelGAE, check_reward_groups
from edenrl.objectives.distillation import DepthDistillationLoss
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
    "FlashSACLoss",
    "DepthDistillationLoss",
    "GAE",
    "GRPOLoss",
    "GroupRelativeAdvantage",
    "HIMEstimatorLoss",
    "HIMLoss",
    "PPOLoss",
    "TwoChannelGAE",
    "check_reward_groups",
    "LinearRamp",
    "MirrorLoss",
    "RMADaggerLoss",
    "RMALoss",
    "gaussian_kl",
    "make_loss",
    "register_loss",
    "registered_losses",
]

register_loss("AMP", AMPLoss, override=True)
register_loss("APG", APGLoss, override=True)
register_loss("CMDP", CMDPLoss, override=True)
register_loss("FlashSAC", FlashSACLoss, override=True)
register_loss("DepthDistillation", DepthDistillationLoss, override=True)
register_loss("GRPO", GRPOLoss, override=True)
register_loss("HIM", HIMLoss, override=True)
register_loss("HIMEstimator", HIMEstimatorLoss, override=True)
register_loss("Mirror", MirrorLoss, override=True)
register_loss("PPO", PPOLoss, override=True)
register_loss("RMA", RMALoss, override=True)
register_loss("RMADagger", RMADaggerLoss, override=True)
