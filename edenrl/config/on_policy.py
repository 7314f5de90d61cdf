"""Configuration that on-policy algorithms share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from edenrl.config.base import Config, Count, Fraction, Groups, NonNegative, Positive, refuse


def _below_one(clip_epsilon: float) -> float:
    if clip_epsilon >= 1:
        raise refuse(
            "expected a number below 1: ratios are clipped to [1 - clip_epsilon, 1 + clip_epsilon], above zero"
        )
    return clip_epsilon


def _within_bounds(init_std: float) -> float:
    if not 1e-3 < init_std < 20:
        raise refuse("expected a number between 0.001 and 20, the bounds that the policy's standard deviation keeps")
    return init_std


class OnPolicySettings(Config):
    """Settings of the algorithms that use the clipped probability ratio: PPO, its variants and GRPO."""

    gamma: Annotated[Positive, Field(le=1)] = 0.99
    """Discount per step, in (0, 1]."""
    clip_epsilon: Annotated[Positive, AfterValidator(_below_one)] = 0.2
    """Clip range of the probability ratio and, in a clipped value loss, of the change of the value."""
    entropy_coeff: NonNegative = 0.01
    """Weight of the entropy bonus."""
    epochs: Count = 5
    """Passes over each rollout."""
    num_minibatches: Count = 4
    """Mini-batches per pass. The number must divide env.num_envs * steps_per_env."""
    lr: Positive = 1e-3
    """Learning rate at the start."""
    lr_schedule: Literal["adaptive", "constant", "linear", "cosine", "step", "exponential", "warmup_cosine"] = (
        "adaptive"
    )
    """Schedule of the learning rate. adaptive keeps the KL near desired_kl, within [min_lr, max_lr]."""
    final_lr_fraction: Fraction = 0.0
    """Learning rate at the end of linear and cosine schedules, as a fraction of lr."""
    desired_kl: Positive = 0.01
    """Target KL divergence per update of the adaptive schedule, in nats."""
    min_lr: Positive = 1e-5
    """Smallest learning rate of the adaptive schedule."""
    max_lr: Positive = 1e-2
    """Largest learning rate of the adaptive schedule."""
    max_grad_norm: Positive = 1.0
    """Largest gradient norm. Each network is clipped separately."""
    steps_per_env: Count = 24
    """Steps each environment takes per iteration."""
    init_std: Annotated[Positive, AfterValidator(_within_bounds)] = 1.0
    """Standard deviation of the action noise at the start."""
    normalize_observations: bool = True
    """Normalize observations by their running mean and variance."""
    action_bound_coeff: NonNegative = 0.0
    """Weight of the penalty on action means outside [-1, 1]. 0 turns it off."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """At a NaN or infinite gradient: raise stops and names the parameter, skip skips the step and counts it."""
    actor_groups: Groups = None
    """Observation groups that the actor reads, in this order. None: all groups of the environment."""

    @property
    def updates_per_iteration(self) -> int:
        """Mini-batch steps per rollout, all epochs together."""
        return self.epochs * self.num_minibatches

    def optimizer_options(self) -> dict[str, Any]:
        """Options of ``edenrl.optim.make_optimizer`` for ``optimizer``."""
        return {}

    def schedule_options(self) -> dict[str, float]:
        """Options of ``edenrl.optim.make_lr_schedule`` for ``lr_schedule``."""
        if self.lr_schedule == "adaptive":
            return {"target_kl": self.desired_kl, "min_lr": self.min_lr, "max_lr": self.max_lr}
        ends = self.lr_schedule in ("linear", "cosine", "warmup_cosine")
        return {"final_fraction": self.final_lr_fraction} if ends else {}

    @model_validator(mode="after")
    def _check_learning_rate(self) -> OnPolicySettings:
        if self.lr_schedule == "adaptive" and not self.min_lr <= self.lr <= self.max_lr:
            raise refuse(
                f"lr_schedule 'adaptive' needs min_lr <= lr <= max_lr, got min_lr {self.min_lr:g}, lr {self.lr:g}, "
                f"max_lr {self.max_lr:g}; move lr inside, widen the bounds, or choose another lr_schedule"
            )
        return self
