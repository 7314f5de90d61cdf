"""Configuration of HIM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from edenrl.config.base import Count, Name, NonNegative, Positive, refuse
from edenrl.config.ppo import PPOSettings


def _raw(normalize: bool) -> bool:
    if normalize:
        raise refuse(
            "expected false: the estimator learns the raw velocity and the raw next observation; scale observations in "
            "the environment"
        )
    return normalize


def _one(groups: tuple[str, ...]) -> tuple[str, ...]:
    if len(groups) != 1:
        raise refuse(f"expected one group, got {len(groups)}: actor and critic read one each")
    return groups


OneGroup = Annotated[tuple[Name, ...], AfterValidator(_one)]


class HIMConfig(PPOSettings):
    """PPO with a hybrid internal model: the actor contains an estimator of the velocity and of the next state.

    Network sizes follow HIMLoco (Long et al. 2024, arXiv:2312.11460). Everything else follows PPO.
    """

    name: Literal["him"] = "him"
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    actor_groups: OneGroup = ("history",)
    """The group of stacked frames that the actor reads."""
    critic_groups: OneGroup = ("critic",)
    """The group that the critic reads: one frame and the true linear velocity."""
    history_layout: Literal["oldest_first", "newest_first"] | None = None
    """Order of the stacked frames. None: as the environment declares it."""
    normalize_observations: Annotated[bool, AfterValidator(_raw)] = False
    """Must be false, because the estimator's targets are raw."""
    actor_hidden: tuple[Count, ...] = (512, 256, 256)
    """Widths of the actor's hidden layers, such as 512,256,256."""
    critic_hidden: tuple[Count, ...] = (512, 256, 256)
    """Widths of the critic's hidden layers, such as 512,256,256."""
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
    """Activation between hidden layers."""
    encoder_hidden: tuple[Count, ...] = (256, 256)
    """Widths of the hidden layers of the history encoder."""
    target_hidden: tuple[Count, ...] = (256, 256)
    """Widths of the hidden layers of the target encoder, which reads the next critic observation."""
    latent_dim: Count = 32
    """Width of the latent."""
    num_prototypes: Annotated[Count, Field(ge=2)] = 64  # assignments to a single one say nothing
    """Number of prototypes that latents are assigned to."""
    target_skip_dim: Annotated[int, Field(ge=0)] = 3
    """Leading entries of the next frame (the command) that the target encoder does not read."""
    temperature: Positive = 3.0
    """Softmax temperature of the predicted assignments."""
    sinkhorn_eps: Positive = 0.05
    """Entropy regularization of the Sinkhorn assignments. A smaller value gives harder assignments."""
    sinkhorn_iterations: Count = 3
    """Sinkhorn iterations that balance the assignments."""
    estimator_max_grad_norm: Positive = 10.0
    """Largest gradient norm of the estimator."""
    accept_missing_final_observations: bool = False
    """Accept environments that hide the last observation of an episode: the one before it is then the target."""
    mirror_data: bool | None = None
    """Double every rollout by its mirror image. None: where the environment declares the mirrors."""
    symmetry_loss: bool | None = None
    """Add losses that make actor and critic symmetric. None: where the environment declares the mirrors."""
    symmetry_scale: NonNegative = 1.0
    """Weight of the two losses that make actor and critic symmetric."""
    mirrored_log_prob: Literal["original", "mirrored"] = "original"
    """Log-probability of a mirrored action: the original action's, or the policy's at the mirrored observation."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """Optimizer of actor, critic and estimator."""

    @model_validator(mode="before")
    @classmethod
    def _read_one_switch(cls, data: Any) -> Any:
        """Reads the single switch that configurations of earlier versions have."""
        if not isinstance(data, dict) or "symmetry" not in data:
            return data
        if "mirror_data" in data or "symmetry_loss" in data:
            raise refuse("symmetry is now two switches, mirror_data and symmetry_loss; leave symmetry out")
        both = data["symmetry"]
        others = {name: value for name, value in data.items() if name != "symmetry"}
        return {**others, "mirror_data": both, "symmetry_loss": both}

    def network_options(self) -> dict[str, Any]:
        """Options of ``edenrl.modules.him_actor``."""
        sizes = self.pick("encoder_hidden", "target_hidden", "latent_dim", "num_prototypes", "target_skip_dim")
        actor = {"history": self.actor_groups[0], "hidden": self.actor_hidden}
        return {**actor, **sizes, **self.pick("activation", "init_std")}

    def estimator_options(self) -> dict[str, float]:
        """Options of ``edenrl.objectives.HIMEstimatorLoss``."""
        return self.pick("temperature", "sinkhorn_eps", "sinkhorn_iterations")

    def check_options(self) -> dict[str, bool]:
        """Options of ``edenrl.modules.HIMRolloutCheck``."""
        return self.pick("accept_missing_final_observations")
