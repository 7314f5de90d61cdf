"""Configuration of PPO."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from edenrl.config.base import Config, Count, Fraction, Groups, NonNegative, Positive, refuse


class PPOConfig(Config):
    """PPO hyper-parameters.

    Defaults follow Rudin et al. 2021, "Learning to Walk in Minutes", arXiv:2109.11978: few steps from many environments
    and a learning rate driven by the KL divergence between the old and the new policy.
    """

    name: Literal["PPO"] = "PPO"
    """The algorithm; names the trainer script that rebuilds a run from its config.json."""
    gamma: Annotated[Positive, Field(le=1)] = 0.99
    """Discount per step, in (0, 1]."""
    lmbda: Fraction = 0.95
    """GAE lambda, in [0, 1]: 0 trusts the critic, 1 trusts the returns."""
    clip_epsilon: Positive = 0.2
    """Clip range of the probability ratio, and of the value when clip_value is set."""
    entropy_coeff: NonNegative = 0.01
    """Weight of the entropy bonus."""
    critic_coeff: Positive = 1.0
    """Weight of the value loss."""
    clip_value: bool = True
    """Clip the value loss around the values at collection."""
    epochs: Count = 5
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
    """Largest gradient norm; actor and critic are clipped separately."""
    steps_per_env: Count = 24
    """Steps each environment takes per iteration."""
    actor_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the actor's hidden layers, as 256,128,64."""
    critic_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the critic's hidden layers, as 256,128,64."""
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation between hidden layers."""
    init_std: Positive = 1.0
    """Standard deviation of the action noise at the start."""
    normalize_observations: bool = True
    """Normalize observations by their running mean and variance."""
    normalize_advantage: Literal["rollout", "minibatch", "none"] = "rollout"
    """Over what the advantages are brought to mean 0 and variance 1."""
    symmetry: bool = False
    """Double every rollout by its mirror image, as the environment's mirrors describe it."""
    action_bound_coeff: NonNegative = 0.0
    """Weight of the penalty on action means outside [-1, 1]; 0 turns it off."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer of actor and critic."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """What a NaN or infinite gradient does: stop and name the parameter, or skip the step and count it."""
    actor_groups: Groups = None
    """Observation groups the actor reads, in this order; None: every group the environment publishes."""
    critic_groups: Groups = None
    """Observation groups the critic reads, in this order; None: every group the environment publishes."""

    def schedule_options(self) -> dict[str, float]:
        """Options of ``edenrl.optim.make_lr_schedule`` for ``lr_schedule``."""
        if self.lr_schedule == "adaptive":
            return {"target_kl": self.desired_kl, "min_lr": self.min_lr, "max_lr": self.max_lr}
        ends = self.lr_schedule in ("linear", "cosine", "warmup_cosine")
        return {"final_fraction": self.final_lr_fraction} if ends else {}

    @model_validator(mode="after")
    def _check_learning_rate(self) -> PPOConfig:
        if self.lr_schedule == "adaptive" and not self.min_lr <= self.lr <= self.max_lr:
            raise refuse(
                f"lr_schedule 'adaptive' needs min_lr <= lr <= max_lr, got min_lr {self.min_lr:g}, lr {self.lr:g}, "
                f"max_lr {self.max_lr:g}; move lr inside, widen the bounds, or choose another lr_schedule"
            )
        return self
