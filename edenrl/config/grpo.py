"""Configuration of GRPO."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from edenrl.config.base import Config, Count, Fraction, Groups, NonNegative, Positive, refuse


class GRPOConfig(Config):
    """GRPO hyper-parameters.

    Defaults follow Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, as EmbodiChain uses them for control; learning
    rate and network are those of PPO here.
    """

    name: Literal["GRPO"] = "GRPO"
    """The algorithm; names the trainer script that rebuilds a run from its config.json."""
    group_size: Annotated[Count, Field(ge=2)] = 4
    """Environments that start in the same state and are compared with each other; must divide env.num_envs."""
    gamma: Annotated[Positive, Field(le=1)] = 0.99
    """Discount per step, in (0, 1]."""
    eps: NonNegative = 1e-8
    """Added to the standard deviation of a group's returns."""
    truncate_at_first_done: bool = True
    """Learn only from the first episode of each environment in a rollout."""
    reset_before_rollout: bool = True
    """Start every rollout with a reset, each group in one state."""
    clip_epsilon: Positive = 0.2
    """Clip range of the probability ratio."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl_coeff: NonNegative = 0.02
    """Weight of the penalty that holds the policy to the one training began with; 0 turns it off."""
    epochs: Count = 10
    """Passes over each rollout."""
    num_minibatches: Count = 4
    """Mini-batches per pass; must divide env.num_envs * steps_per_env."""
    lr: Positive = 1e-3
    """Learning rate at the start."""
    lr_schedule: Literal["adaptive", "constant", "linear", "cosine", "step", "exponential", "warmup_cosine"] = (
        "adaptive"
    )
    """How the learning rate changes; adaptive follows desired_kl within [min_lr, max_lr]."""
    final_lr_fraction: Fraction = 0.0
    """Where linear and cosine schedules end, as a fraction of lr."""
    desired_kl: Positive = 0.01
    """KL divergence per update that the adaptive schedule aims at, in nats."""
    min_lr: Positive = 1e-5
    """Lower bound of the adaptive schedule."""
    max_lr: Positive = 1e-2
    """Upper bound of the adaptive schedule."""
    max_grad_norm: Positive = 1.0
    """Largest gradient norm."""
    steps_per_env: Count = 100
    """Steps each environment takes per iteration; nothing is estimated beyond them, so they should hold an episode."""
    actor_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the actor's hidden layers, as 256,128,64."""
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation between hidden layers."""
    init_std: Positive = 1.0
    """Standard deviation of the action noise at the start."""
    normalize_observations: bool = True
    """Normalize observations by their running mean and variance."""
    action_bound_coeff: NonNegative = 0.0
    """Weight of the penalty on action means outside [-1, 1]; 0 turns it off."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer of the actor."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """What a NaN or infinite gradient does: stop and name the parameter, or skip the step and count it."""
    actor_groups: Groups = None
    """Observation groups the actor reads, in this order; None: every group the environment publishes."""

    def schedule_options(self) -> dict[str, float]:
        """Options of ``edenrl.optim.make_lr_schedule`` for ``lr_schedule``."""
        if self.lr_schedule == "adaptive":
            return {"target_kl": self.desired_kl, "min_lr": self.min_lr, "max_lr": self.max_lr}
        ends = self.lr_schedule in ("linear", "cosine", "warmup_cosine")
        return {"final_fraction": self.final_lr_fraction} if ends else {}

    @model_validator(mode="after")
    def _check_learning_rate(self) -> GRPOConfig:
        if self.lr_schedule == "adaptive" and not self.min_lr <= self.lr <= self.max_lr:
            raise refuse(
                f"lr_schedule 'adaptive' needs min_lr <= lr <= max_lr, got min_lr {self.min_lr:g}, lr {self.lr:g}, "
                f"max_lr {self.max_lr:g}; move lr inside, widen the bounds, or choose another lr_schedule"
            )
        return self
