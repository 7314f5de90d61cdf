"""Configuration of constrained PPO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edenrl.config.base import Count, NonNegative, Positive, Seed
from edenrl.config.ppo import PPOConfig


class CMDPConfig(PPOConfig):
    """PPO that maximizes style and keeps a share of the best task return. Defaults follow ConTrack, 2026."""

    name: Literal["cmdp"] = "cmdp"  # type: ignore[assignment]
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    alpha: Annotated[Positive, Field(le=1)] = 0.9
    """Share of the best task return to keep, in (0, 1]."""
    lambda_lr: Positive = 0.05
    """Step size of lambda. The sigmoid of lambda is the weight of the task."""
    lambda_init: float = 0.0
    """Value of lambda at the end of the warm-up."""
    warmup_iters: Seed = 0
    """Iterations of warm-up, in which only the task is learned."""
    vg_window: Count = 100
    """Number of last finished episodes over which the task return is averaged."""
    vg_star_window: Count = 20
    """Number of last iterations whose largest average counts as the best task return."""
    steps_per_env: Count = 16
    """Steps each environment takes per iteration."""
    epochs: Count = 10
    """Passes over each rollout."""
    num_minibatches: Count = 16
    """Mini-batches per pass. The number must divide env.num_envs * steps_per_env."""
    lr: Positive = 5e-4
    """Learning rate at the start."""
    entropy_coeff: NonNegative = 1e-3
    """Weight of the entropy bonus."""
    actor_hidden: tuple[Count, ...] = (256, 256, 128)
    """Widths of the actor's hidden layers, such as 256,128,64."""
    critic_hidden: tuple[Count, ...] = (256, 256, 128)
    """Widths of the critic's hidden layers, such as 256,128,64."""
    normalize_advantage: Literal["rollout", "none"] = "rollout"
    """Standardize the advantages of each channel over the rollout, or not at all."""

    def constraint_options(self) -> dict[str, Any]:
        """Options of ``edenrl.modules.TaskConstraint``."""
        return self.pick("alpha", "lambda_lr", "lambda_init", "warmup_iters", "vg_window", "vg_star_window")
