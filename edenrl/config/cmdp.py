"""Configuration of constrained PPO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edenrl.config.base import Count, NonNegative, Positive, Seed
from edenrl.config.ppo import PPOConfig


class CMDPConfig(PPOConfig):
    """PPO that maximizes style while it keeps a share of the best task return. Defaults follow ConTrack, 2026."""

    name: Literal["cmdp"] = "cmdp"  # type: ignore[assignment]
    """The algorithm; names the trainer script that rebuilds a run from its config.json."""
    alpha: Annotated[Positive, Field(le=1)] = 0.9
    """Share of the best task return that is kept, in (0, 1]."""
    lambda_lr: Positive = 0.05
    """Step size of lambda, whose sigmoid is the weight of the task."""
    lambda_init: float = 0.0
    """Lambda after warm-up."""
    warmup_iters: Seed = 0
    """Iterations on the task alone, before the constraint trades it for style."""
    vg_window: Count = 100
    """Finished episodes over which the task return is averaged."""
    vg_star_window: Count = 20
    """Iterations in which the best of these averages is looked for."""
    steps_per_env: Count = 16
    """Steps each environment takes per iteration."""
    epochs: Count = 10
    """Passes over each rollout."""
    num_minibatches: Count = 16
    """Mini-batches per pass; must divide env.num_envs * steps_per_env."""
    lr: Positive = 5e-4
    """Learning rate at the start."""
    entropy_coeff: NonNegative = 1e-3
    """Weight of the entropy bonus."""
    actor_hidden: tuple[Count, ...] = (256, 256, 128)
    """Widths of the actor's hidden layers, as 256,128,64."""
    critic_hidden: tuple[Count, ...] = (256, 256, 128)
    """Widths of the critic's hidden layers, as 256,128,64."""
    normalize_advantage: Literal["rollout", "none"] = "rollout"
    """Over what the advantages of each channel are brought to mean 0 and variance 1."""

    def constraint_options(self) -> dict[str, Any]:
        """Options of ``edenrl.modules.TaskConstraint``."""
        return self.pick("alpha", "lambda_lr", "lambda_init", "warmup_iters", "vg_window", "vg_star_window")
