"""Configuration of PPO with SimBaV2 networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from edenrl.config.base import Count, NonNegative, Positive, refuse
from edenrl.config.ppo import PPOSettings


def _split_widths(value: Any) -> Any:
    """Widths of one group from the command line, where they are ``512,256`` or ``512``."""
    if isinstance(value, str):
        return tuple(value.split(","))
    return (value,) if isinstance(value, int) else value


Widths = Annotated[tuple[Count, ...], BeforeValidator(_split_widths)]


class SimbaPPOConfig(PPOSettings):
    """PPO with SimBaV2 networks over encoded observation groups, trained by Muon.

    Network sizes follow SimBaV2, arXiv:2502.15280: an actor of one block and a critic of two.
    """

    name: Literal["simba"] = "simba"
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    lr: Positive = 1e-4
    """Learning rate at the start."""
    entropy_coeff: NonNegative = 5e-4
    """Weight of the entropy bonus."""
    actor_dim: Count = 512
    """Width of the actor's features."""
    actor_blocks: Count = 1
    """Residual blocks of the actor."""
    critic_dim: Count = 512
    """Width of the critic's features."""
    critic_blocks: Count = 2
    """Residual blocks of the critic."""
    expansion: Count = 4
    """Inner width of a block, divided by the width of its features."""
    encoder_hidden: tuple[Count, ...] | None = (256,)
    """Hidden widths of every group's encoder, such as 256,128. None: no encoders."""
    group_hidden: dict[str, Widths] = Field(default_factory=dict)
    """Hidden widths for single groups. --algorithm.group_hidden.scan 512,256 sets those of group scan."""
    latent_dim: Count = 128
    """Output width of each encoder."""
    compile: bool = False
    """Run the trunks through torch.compile."""
    optimizer: Literal["adam", "adamw", "muon"] = "muon"
    """Optimizer of actor and critic."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay of AdamW, with optimizer adamw or muon."""
    muon_weight_decay: NonNegative = 0.1
    """Decoupled weight decay of Muon."""
    muon_adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """How Muon's step size depends on the shape of a matrix. See edenrl.optim.MuonAdamW."""

    def network_options(
        self, part: Literal["actor", "critic"], groups: Mapping[str, int], published: Mapping[str, int]
    ) -> dict[str, Any]:
        """Options of ``edenrl.modules.simba_actor`` or ``simba_critic``.

        Args:
            part: "actor" or "critic".
            groups: the groups it reads.
            published: every group of the environment.

        Raises:
            ValueError: if ``group_hidden`` names a group that the environment lacks.
        """
        if unknown := set(self.group_hidden) - set(published):
            raise ValueError(
                f"algorithm.group_hidden names {sorted(unknown)}. Groups of this environment: {dict(published)}."
            )
        hidden = self.encoder_hidden
        return {
            "hidden_dim": self.actor_dim if part == "actor" else self.critic_dim,
            "num_blocks": self.actor_blocks if part == "actor" else self.critic_blocks,
            "expansion": self.expansion,
            "encoder_hidden": None if hidden is None else {g: self.group_hidden.get(g, hidden) for g in groups},
            "latent_dim": self.latent_dim,
            "normalize": self.normalize_observations,
            "compile": self.compile,
        }

    def optimizer_options(self) -> dict[str, Any]:
        """Options of ``edenrl.optim.make_optimizer`` for ``optimizer``."""
        if self.optimizer == "adam":
            return {}
        muon = {"muon_weight_decay": self.muon_weight_decay, "adjust_lr_fn": self.muon_adjust_lr}
        return {"weight_decay": self.weight_decay, **(muon if self.optimizer == "muon" else {})}

    @model_validator(mode="after")
    def _check_encoders(self) -> SimbaPPOConfig:
        if self.encoder_hidden is None and self.group_hidden:
            raise refuse("encoder_hidden None means no encoders, but group_hidden sets some; leave one of them out")
        return self
