"""Losses and advantage estimators, one file per algorithm."""

from edenrl.objectives.apg import APGLoss
from edenrl.objectives.gae import GAE
from edenrl.objectives.ppo import PPOLoss, gaussian_kl

__all__ = ["APGLoss", "GAE", "PPOLoss", "gaussian_kl"]
