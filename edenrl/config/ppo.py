"""Configuration of PPO."""

from __future__ import annotations

from typing import Any, Literal

from edenrl.config.base import Count, Fraction, Groups, Positive
from edenrl.config.on_policy import OnPolicySettings


class PPOSettings(OnPolicySettings):
    """Settings of PPO that do not depend on its networks and optimizer.

    Defaults follow Rudin et al. 2021, "Learning to Walk in Minutes", arXiv:2109.11978: few steps from many
    environments, and a learning rate that follows the KL divergence between the old and the new policy.
    """

    lmbda: Fraction = 0.95
    """GAE lambda, in [0, 1]. 0 trusts the critic, 1 trusts the returns."""
    critic_coeff: Positive = 1.0
    """Weight of the value loss."""
    clip_value: bool = True
    """Clip the value loss around the values stored at collection."""
    normalize_advantage: Literal["rollout", "minibatch", "none"] = "rollout"
    """Standardize the advantages over the rollout, over each mini-batch, or not at all."""
    critic_groups: Groups = None
    """Observation groups that the critic reads, in this order. None: all groups of the environment."""

    def gae_options(self) -> dict[str, Any]:
        """Options of ``edenrl.objectives.GAE``."""
        return {**self.pick("gamma", "lmbda"), "average_gae": self.normalize_advantage == "rollout"}

    def loss_options(self) -> dict[str, Any]:
        """Options of ``edenrl.objectives.PPOLoss``."""
        names = ("clip_epsilon", "entropy_coeff", "critic_coeff", "clip_value", "action_bound_coeff")
        normalize = self.normalize_advantage == "minibatch"
        # The scripts log the explained variance of the whole rollout.
        return {**self.pick(*names), "normalize_advantage": normalize, "log_explained_variance": False}


class PPOConfig(PPOSettings):
    """PPO with multi-layer perceptrons."""

    name: Literal["PPO"] = "PPO"
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    actor_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the actor's hidden layers, such as 256,128,64."""
    critic_hidden: tuple[Count, ...] = (256, 128, 64)
    """Widths of the critic's hidden layers, such as 256,128,64."""
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation between hidden layers."""
    symmetry: bool = False
    """Double every rollout by its mirror image. The environment must publish mirrors."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer of actor and critic."""
