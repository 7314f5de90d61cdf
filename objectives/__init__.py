"""Losses and advantage estimators, one file per algorithm."""

from edenrl.objectives.apg import APGLoss
from edenrl.objectives.flashsac import FlashSACLoss
from edenrl.objectives.gae import GAE
from edenrl.objectives.grpo import GroupRelativeAdvantage, GRPOLoss
from edenrl.objectives.ppo import PPOLoss, gaussian_kl
from edenrl.objectives.registry import make_loss, register_loss, registered_losses

__all__ = [
    "APGLoss",
    "FlashSACLoss",
    "GAE",
    "GRPOLoss",
    "GroupRelativeAdvantage",
    "PPOLoss",
    "gaussian_kl",
    "make_loss",
    "register_loss",
    "registered_losses",
]

register_loss("APG", APGLoss, override=True)
register_loss("FlashSAC", FlashSACLoss, override=True)
register_loss("GRPO", GRPOLoss, override=True)
register_loss("PPO", PPOLoss, override=True)
