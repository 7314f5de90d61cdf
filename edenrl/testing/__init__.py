"""Checks for losses of your own: whether one keeps the contract that this library relies on."""

from edenrl.testing.loss_module import check_loss_module

__all__ = ["check_loss_module"]
