"""Configuration of APG."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from edenrl.config.base import Config, Count, Fraction, Groups, NonNegative, Positive, refuse


class APGConfig(Config):
    """Analytic policy gradient hyper-parameters.

    Defaults follow the differentiable trainer of EmbodiChain.
    """

    one_process: ClassVar[bool] = True  # no workers: the script steps the environments itself
    whole_episodes: ClassVar[str] = "its gradients reach through whole rollouts, which shorter episodes would cut"

    name: Literal["APG"] = "APG"
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    mode: Literal["segment", "complete"] = "segment"
    """segment: episodes continue from one segment to the next. complete: every rollout starts from a reset."""
    segment_length: Count = 16
    """Steps per segment, and the longest time a gradient reaches back. In complete mode: steps per rollout."""
    update_horizon: Count | None = None
    """Steps per update in segment mode, a multiple of segment_length. None: one segment."""
    rollouts_per_update: Count = 1
    """Independent rollouts that are averaged into one update, in complete mode."""
    updates: Count | None = None
    """Updates of the run. None: as total_frames says. Environments that schedule their rollouts need it."""
    gamma: Annotated[Positive, Field(le=1)] = 0.99
    """Discount per step, in (0, 1]."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus. The bonus is discounted and summed like the rewards."""
    lr: Positive = 2.5e-4
    """Learning rate at the start."""
    lr_schedule: Literal["constant", "linear", "cosine", "step", "exponential", "warmup_cosine"] = "constant"
    """Schedule of the learning rate over the run."""
    final_lr_fraction: Fraction = 0.0
    """Learning rate at the end of linear and cosine schedules, as a fraction of lr."""
    max_grad_norm: Positive = 0.5
    """Largest gradient norm."""
    max_grad_norm_before_clip: NonNegative = 0.0
    """Skip and count updates whose gradient norm is above this. 0 turns it off."""
    action_adjoint_max_norm: NonNegative = 0.0
    """Largest gradient norm at each action, per environment and step. 0 turns the bound off."""
    skip_nonfinite: bool = True
    """Skip and count updates with a NaN or infinite loss or gradient. false: stop the run instead."""
    actor_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the actor's hidden layers, such as 256,128,64."""
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation between hidden layers."""
    init_std: Positive = 1.0
    """Standard deviation of the action noise at the start."""
    deterministic: bool = False
    """Collect with the mean action instead of sampled actions."""
    normalize_observations: bool = True
    """Normalize observations by their running mean and variance, which are frozen during each update."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer."""
    actor_groups: Groups = None
    """Observation groups that the actor reads, in this order. None: all groups of the environment."""

    @property
    def steps_per_env(self) -> int:
        """Steps each environment takes per update."""
        return self.segment_length * self.rollouts

    @property
    def updates_per_iteration(self) -> int:
        """1: every iteration is one update."""
        return 1

    @property
    def on_nonfinite(self) -> Literal["raise", "skip"]:
        """Reaction to a NaN or infinite gradient, by the name that ``GradientStep`` uses."""
        return "skip" if self.skip_nonfinite else "raise"

    def loss_options(self) -> dict[str, Any]:
        """Options of ``edenrl.objectives.APGLoss``."""
        return self.pick("gamma", "entropy_coeff", "mode")

    def optimizer_options(self) -> dict[str, Any]:
        """Options of ``edenrl.optim.make_optimizer`` for ``optimizer``."""
        return {}

    @property
    def rollouts(self) -> int:
        """Segments, or complete rollouts, per update."""
        return self.rollouts_per_update * ((self.update_horizon or self.segment_length) // self.segment_length)

    def schedule_options(self) -> dict[str, float]:
        """Options of ``edenrl.optim.make_lr_schedule`` for ``lr_schedule``."""
        ends = self.lr_schedule in ("linear", "cosine", "warmup_cosine")
        return {"final_fraction": self.final_lr_fraction} if ends else {}

    @model_validator(mode="after")
    def _check_update(self) -> APGConfig:
        horizon, length = self.update_horizon, self.segment_length
        if self.mode == "segment" and self.rollouts_per_update != 1:
            raise refuse(
                f"rollouts_per_update {self.rollouts_per_update} is for mode 'complete'; in mode 'segment' set "
                f"update_horizon to a multiple of segment_length such as {self.rollouts_per_update * length}"
            )
        if self.mode == "complete" and horizon is not None:
            raise refuse(
                f"update_horizon {horizon} is for mode 'segment'; in mode 'complete' set segment_length to the steps "
                "of a rollout and rollouts_per_update to their number"
            )
        if horizon is not None and horizon % length:
            near = max(round(horizon / length), 1) * length
            raise refuse(
                f"update_horizon {horizon} is not a multiple of segment_length {length}; the closest is {near}, or "
                "choose another segment_length"
            )
        if self.deterministic and self.entropy_coeff > 0:
            raise refuse(
                f"entropy_coeff {self.entropy_coeff:g} would widen a noise that deterministic collection never "
                "samples; set one of the two"
            )
        return self
