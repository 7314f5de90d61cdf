"""Configuration of GRPO."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from edenrl.config.base import Count, NonNegative
from edenrl.config.on_policy import OnPolicySettings


class GRPOConfig(OnPolicySettings):
    """GRPO hyper-parameters.

    Defaults follow Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, as EmbodiChain uses them for control. Learning
    rate and network are those of PPO in this library.
    """

    one_process: ClassVar[bool] = True  # no workers: the script steps the environments itself
    whole_episodes: ClassVar[str] = "the environments of a group are compared over the same steps"

    name: Literal["GRPO"] = "GRPO"
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    group_size: Annotated[Count, Field(ge=2)] = 4
    """Environments that start in the same state and are compared. The number must divide env.num_envs."""
    eps: NonNegative = 1e-8
    """Added to the standard deviation of a group's returns."""
    truncate_at_first_done: bool = True
    """Learn only from the first episode of each environment in a rollout."""
    reset_before_rollout: bool = True
    """Reset before every rollout, each group in one state."""
    kl_coeff: NonNegative = 0.02
    """Weight of the penalty that keeps the policy close to the initial policy. 0 turns it off."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    epochs: Count = 10
    """Passes over each rollout."""
    steps_per_env: Count = 100
    """Steps each environment takes per iteration. They should hold an episode: later rewards count as zero."""
    actor_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the actor's hidden layers, such as 256,128,64."""
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation between hidden layers."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer of the actor."""

    def advantage_options(self) -> dict[str, Any]:
        """Options of ``edenrl.objectives.GroupRelativeAdvantage``."""
        return self.pick("gamma", "group_size", "eps", "truncate_at_first_done")

    def loss_options(self) -> dict[str, Any]:
        """Options of ``edenrl.objectives.GRPOLoss``."""
        return self.pick("clip_epsilon", "entropy_coeff", "kl_coeff", "action_bound_coeff")
