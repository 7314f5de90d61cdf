"""Optimizers, learning-rate schedules and the update step."""

from edenrl.optim.gradient_step import GradientStep
from edenrl.optim.muon import MuonAdamW
from edenrl.optim.schedules import KLAdaptiveLR, make_lr_schedule, make_optimizer

__all__ = ["GradientStep", "KLAdaptiveLR", "MuonAdamW", "make_lr_schedule", "make_optimizer"]
