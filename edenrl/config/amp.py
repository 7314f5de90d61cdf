"""Configuration of PPO with an adversarial motion prior."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from edenrl.config.base import Count, Name, NonNegative, refuse
from edenrl.config.ppo import PPOConfig


def _not_plain(name: Any) -> Any:
    if name == "PPO":
        raise refuse(
            "a plain PPO run holds no discriminator and cannot go on as one with a motion prior; start a new run from "
            "its policy and critic with --init_from RUN_DIR"
        )
    return name


def _no_windows(groups: tuple[str, ...]) -> tuple[str, ...]:
    if "amp_window" in groups:
        raise refuse("amp_window is the discriminator's alone; a policy that reads it would need it on the robot")
    return groups


NamedGroups = Annotated[tuple[Name, ...], Field(min_length=1)]


class AMPConfig(PPOConfig):
    """PPO with an adversarial motion prior, Peng et al. 2021, arXiv:2104.02180."""

    name: Annotated[Literal["AMP"], BeforeValidator(_not_plain)] = "AMP"  # type: ignore[assignment]
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    # Named, not "every group": only the discriminator reads the windows. A policy should not need them on a robot.
    actor_groups: Annotated[NamedGroups, AfterValidator(_no_windows)] = ("observation",)
    """Observation groups that the actor reads, in this order."""
    critic_groups: NamedGroups = ("observation",)
    """Observation groups that the critic reads, in this order."""
    motion: Name | None = None
    """Motion file (.npz). None: a built-in trot, for the quadruped only."""
    resample: bool = False
    """Interpolate clips whose fps differs from the control rate. false: refuse them."""
    num_frames: Annotated[Count, Field(ge=2)] = 5
    """Frames per window."""
    style_coeff: NonNegative = 5.0
    """Largest style reward."""
    style_scale: NonNegative | Literal["control_dt"] = 0.02
    """Factor on the style reward when it is added to the reward. 0: nothing is added. control_dt: the control step of
    the environment in seconds, so that style_coeff is per second."""
    grad_penalty_coeff: NonNegative = 5.0
    """Weight of the discriminator's gradient penalty, computed at expert windows."""
    discriminator_hidden: Annotated[tuple[Count, ...], Field(min_length=1)] = (256, 256)
    """Widths of the discriminator's hidden layers, such as 256,256."""
    trunk_weight_decay: NonNegative = 1e-3
    """Weight decay of the discriminator's hidden layers."""
    head_weight_decay: NonNegative = 1e-1
    """Weight decay of the discriminator's output layer."""
    discriminator_interval: Count = 1
    """PPO mini-batch steps per discriminator step. Raise it if the discriminator becomes too accurate."""
    window_buffer_size: Count = 100_000
    """Number of the policy's windows kept to train the discriminator."""

    @model_validator(mode="before")
    @classmethod
    def _without_warm_start(cls, values: Any) -> Any:
        # Runs from before ``init_from`` have this field. It says where their first weights came from.
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name != "warm_start"}

    def style_options(self, env: Any) -> dict[str, Any]:
        """Options of ``edenrl.modules.AMPReward`` for an environment, whose ``control_dt`` may be the scale."""
        scale: float | None = getattr(env, "control_dt", None) if self.style_scale == "control_dt" else self.style_scale
        if scale is None:
            raise ValueError(
                "--algorithm.style_scale control_dt: the environment does not say how long its control step is "
                "(attribute control_dt). Give the seconds as a number."
            )
        return {"coeff": self.style_coeff, "scale": scale}

    def discriminator_steps(self, updates: int) -> int:
        """Steps that the discriminator owes after an iteration of PPO, which ended with its update ``updates``."""
        before = updates - self.updates_per_iteration
        return updates // self.discriminator_interval - before // self.discriminator_interval

    def discriminator_options(self) -> dict[str, Any]:
        """Options of ``edenrl.modules.Discriminator``."""
        return {"num_frames": self.num_frames, "hidden": self.discriminator_hidden}
