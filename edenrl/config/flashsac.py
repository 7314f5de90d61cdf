"""Configuration of FlashSAC."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from edenrl.config.base import Config, Count, Fraction, Groups, NonNegative, Positive, refuse
from edenrl.config.run import EnvConfig, Folder, RunConfig

_log = logging.getLogger("edenrl")

__all__ = ["FlashSACConfig", "FlashSACRunConfig"]


class FlashSACConfig(Config):
    """FlashSAC hyper-parameters.

    Defaults follow the paper, arXiv:2604.04539, and its release. They are for many environments on a GPU. The profile
    "cpu" has smaller sizes.
    """

    name: Literal["flashsac"] = "flashsac"
    """Name of the algorithm. It selects the trainer script that rebuilds a run from its config.json."""
    gamma: Annotated[Positive, Field(le=1)] = 0.99
    """Discount per step, in (0, 1]."""
    tau: Annotated[Positive, Field(le=1)] = 0.01
    """Polyak coefficient: share of the critic that is mixed into its target after each update, in (0, 1]."""
    batch_size: Annotated[Count, Field(ge=2)] = 2048
    """Transitions per update."""
    updates_per_step: Count = 2
    """Updates after each step of all environments."""
    actor_delay: Count = 2
    """Critic updates per update of actor and temperature."""
    n_steps: Count = 3
    """Steps of the n-step return, after which it bootstraps from the critic."""
    min_buffer: Count = 100_000
    """Transitions collected with uniform random actions before the first update. At most a tenth of the run."""
    buffer_size: Count = 10_000_000
    """Capacity of the replay buffer, in transitions."""
    buffer_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type in which the replay buffer stores observations."""
    buffer_dir: Folder | None = None
    """Directory for the replay buffer's data, if it is larger than the memory. None: keep it in memory."""
    save_buffer: bool = False
    """Save the replay buffer with each checkpoint. false: a resumed run first fills a new buffer."""
    alpha_init: Positive = 0.01
    """Temperature at the start."""
    target_sigma: Positive = 0.15
    """Action standard deviation (actions in [-1, 1]) whose entropy is the target of the temperature."""
    target_entropy: float | None = None
    """Target entropy of the temperature, in nats. None: computed from target_sigma."""
    action_bound_scale: Positive = 1.0
    """Half the width of the action box [-x, x] of an environment that declares no bounds. Others keep their own."""
    bc_coeff: NonNegative = 0.0
    """Weight of the loss that pulls the actor to the actions in the buffer. 0 turns it off."""
    normalize_rewards: bool = True
    """Divide rewards by the spread of their discounted returns."""
    max_value: Positive = 5.0
    """Largest magnitude of a (normalized) return that the critic can represent."""
    num_bins: Annotated[Count, Field(ge=2)] = 101
    """Bins of the critic's distribution between -max_value and max_value."""
    actor_dim: Count = 128
    """Width of the actor's features."""
    actor_blocks: Count = 2
    """Residual blocks of the actor."""
    critic_dim: Count = 256
    """Width of the critic's features."""
    critic_blocks: Count = 2
    """Residual blocks of the critic."""
    noise_exponent: Positive = 2.0
    """Noise is kept for k steps with probability proportional to k^-noise_exponent."""
    noise_longest: Count = 16
    """Largest number of steps for which the action noise is kept."""
    lr: Positive = 3e-4
    """Peak learning rate of all three optimizers."""
    lr_schedule: Literal["constant", "linear", "cosine", "step", "exponential", "warmup_cosine"] = "warmup_cosine"
    """Schedule of the learning rate over the run."""
    initial_lr_fraction: NonNegative = 1.0
    """Learning rate at the start of the warm-up, as a fraction of lr."""
    final_lr_fraction: Fraction = 0.5
    """Learning rate at the end of linear and cosine schedules, as a fraction of lr."""
    max_grad_norm: Positive | None = None
    """Largest gradient norm of each network. None: no clipping, because the weights are on a sphere."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """At a NaN or infinite gradient: raise stops and names the parameter, skip skips the step and counts it."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the networks' forward passes. On a CPU always float32, with a warning."""
    compile: bool = False
    """Run the networks through torch.compile. Ignored on a CPU, with a warning."""
    steps_per_env: Count = 100
    """Steps each environment takes per iteration. Each iteration writes one row of metrics."""
    actor_groups: Groups = None
    """Observation groups that the actor reads, in this order. None: all groups of the environment."""
    critic_groups: Groups = None
    """Observation groups that the critic reads, in this order. None: all groups of the environment."""

    @model_validator(mode="after")
    def _check_buffer(self) -> FlashSACConfig:
        if self.min_buffer > self.buffer_size:
            raise refuse(
                f"min_buffer {self.min_buffer} is more than buffer_size {self.buffer_size} holds, so no update would "
                "ever follow; lower min_buffer or raise buffer_size"
            )
        return self

    @property
    def optimizer(self) -> str:
        """Always adam, for all three optimizers."""
        return "adam"

    def optimizer_options(self) -> dict[str, Any]:
        """Options of ``edenrl.optim.make_optimizer`` for ``optimizer``."""
        return {}

    @property
    def updates_per_iteration(self) -> int:
        """Critic updates between two rows of metrics."""
        return self.steps_per_env * self.updates_per_step

    def schedule_options(self) -> dict[str, Any]:
        """Options of ``edenrl.optim.make_lr_schedule`` for ``lr_schedule``."""
        ends = self.lr_schedule in ("linear", "cosine", "warmup_cosine")
        warm = {"initial_fraction": self.initial_lr_fraction} if self.lr_schedule == "warmup_cosine" else {}
        return {**warm, "final_fraction": self.final_lr_fraction} if ends else {}

    def network_options(self, part: Literal["actor", "critic"]) -> dict[str, Any]:
        """Options of ``edenrl.modules.flash_actor`` or ``flash_critic``."""
        if part == "actor":
            return {"hidden_dim": self.actor_dim, "num_blocks": self.actor_blocks}
        ends = {"min_value": -self.max_value, "max_value": self.max_value, "num_bins": self.num_bins}
        return {"hidden_dim": self.critic_dim, "num_blocks": self.critic_blocks, **ends}

    def loss_options(self) -> dict[str, Any]:
        """Options of ``edenrl.objectives.FlashSACLoss``."""
        return self.pick("gamma", "tau", "alpha_init", "target_entropy", "target_sigma", "bc_coeff")

    def replay_options(self) -> dict[str, Any]:
        """Options of ``edenrl.collectors.make_replay``."""
        storage = {"max_size": self.buffer_size, "dtype": self.buffer_dtype, "memmap": self.buffer_dir}
        normalized = {"max_return": self.max_value} if self.normalize_rewards else {}
        return {**storage, "save_data": self.save_buffer, **normalized, **self.pick("n_steps", "gamma", "batch_size")}

    def warn(self, device: str, iterations: int) -> None:
        """Warns if the published sizes run on a CPU, where one update takes about a second."""
        if device == "cpu" and self.batch_size >= 2048:
            _log.warning(
                "An update of batch_size %d takes about a second on a CPU: add --profile cpu, or train on a GPU.",
                self.batch_size,
            )

    def warmup_frames(self, total_frames: int) -> int:
        """Transitions before the first update: ``min_buffer``, or a tenth of the run if that is less."""
        tenth = max(total_frames // 10, 1)
        if self.min_buffer > tenth:
            _log.warning("min_buffer is %d in this run of %d frames, not %d.", tenth, total_frames, self.min_buffer)
        return min(self.min_buffer, tenth)


class FlashSACRunConfig(RunConfig):
    """FlashSAC. The run directory receives checkpoints, a config.json and a table of metrics.

    Give the length of the run in environment steps or in iterations. The policy always stays within the action bounds:
    the environment's own, or those of algorithm.action_bound_scale.
    """

    total_frames: Count | None = None  # type: ignore[assignment]
    """Environment steps to train for, summed over environments and processes. None: see max_iterations."""
    max_iterations: Count | None = None
    """Iterations to train for, of algorithm.steps_per_env steps per environment. None: see total_frames."""
    profile: Literal["full", "cpu"] = "full"
    """Default sizes. full: the published ones. cpu: small networks, batches and buffer for one core."""
    env: EnvConfig = Field(default_factory=lambda: EnvConfig(action_mode="squash"))
    """Environment."""
    algorithm: FlashSACConfig = Field(default_factory=FlashSACConfig)
    """FlashSAC."""

    @model_validator(mode="after")
    def _check_length(self) -> FlashSACRunConfig:
        if (self.total_frames is None) == (self.max_iterations is None):
            given = "neither" if self.total_frames is None else f"both, {self.total_frames} and {self.max_iterations},"
            raise refuse(
                f"the length of the run is total_frames or max_iterations; {given} was given. Set one of them, and a "
                "preset's total_frames to None to count in iterations"
            )
        return self

    @model_validator(mode="after")
    def _check_action_mode(self) -> FlashSACRunConfig:
        if self.env.action_mode != "squash":
            raise refuse(
                f"env.action_mode {self.env.action_mode!r}: FlashSAC's policy ends in a tanh and stays in the action's "
                "box by itself; set env.action_mode to 'squash'"
            )
        return self

    def warmup_and_updates(self, iterations: int) -> tuple[int, int]:
        """Transitions before the first update, and critic updates after it, for a run of so many iterations."""
        algo = self.algorithm
        warmup = algo.warmup_frames(iterations * self.frames_per_rollout)
        steps = iterations * algo.steps_per_env - warmup // self.env.num_envs
        return warmup, max(steps, 1) * algo.updates_per_step

    def num_iterations(self, processes: int = 1) -> int:
        """Iterations of the whole run."""
        return self.max_iterations or super().num_iterations(processes)
