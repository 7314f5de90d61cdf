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

    Defaults follow the paper, arXiv:2604.04539, and its release: many environments on a GPU. The profile
    "cpu" has smaller sizes.
    """

    name: Literal["flashsac"] = "flashsac"
    """The algorithm; names the trainer script that rebuilds a run from its config.json."""
    gamma: Annotated[Positive, Field(le=1)] = 0.99
    """Discount per step, in (0, 1]."""
    tau: Annotated[Positive, Field(le=1)] = 0.01
    """Share of the critic that its target takes over after each update."""
    batch_size: Annotated[Count, Field(ge=2)] = 2048
    """Transitions per update."""
    updates_per_step: Count = 2
    """Updates after each step of all environments."""
    actor_delay: Count = 2
    """Updates of the critic per update of actor and temperature."""
    n_steps: Count = 3
    """Steps whose rewards are summed before the critic takes over."""
    min_buffer: Count = 100_000
    """Transitions collected with uniform random actions before the first update; at most a tenth of the run."""
    buffer_size: Count = 10_000_000
    """Transitions the replay buffer holds."""
    buffer_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """How observations are stored in the replay buffer."""
    buffer_dir: Folder | None = None
    """Directory that holds the replay buffer's data, for buffers larger than the memory; None: in memory."""
    save_buffer: bool = False
    """Save the replay buffer with each checkpoint; otherwise a resumed run fills a new one before it goes on."""
    alpha_init: Positive = 0.01
    """Temperature at the start."""
    target_sigma: Positive = 0.15
    """Standard deviation of the action noise, of a range of 2, whose entropy the temperature aims at."""
    target_entropy: float | None = None
    """Entropy that the temperature aims at, in nats; None: as target_sigma says."""
    bc_coeff: NonNegative = 0.0
    """Weight of the pull of the actor to the actions in the buffer; 0 turns it off."""
    normalize_rewards: bool = True
    """Divide rewards by the spread of their discounted returns."""
    max_value: Positive = 5.0
    """Largest magnitude of a (normalized) return that the critic can tell."""
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
    """Exponent of the law of how many steps the action noise stays the same; larger means fewer."""
    noise_longest: Count = 16
    """Most steps the action noise stays the same."""
    lr: Positive = 3e-4
    """Learning rate at its peak, of all three optimizers."""
    lr_schedule: Literal["constant", "linear", "cosine", "step", "exponential", "warmup_cosine"] = "warmup_cosine"
    """How the learning rate changes over the run."""
    initial_lr_fraction: NonNegative = 1.0
    """Where the warm-up begins, as a fraction of lr."""
    final_lr_fraction: Fraction = 0.5
    """Where linear and cosine schedules end, as a fraction of lr."""
    max_grad_norm: Positive | None = None
    """Largest gradient norm of each network; None: no clipping, the weights are on a sphere."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """What a NaN or infinite gradient does: stop and name the parameter, or skip the step and count it."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the networks' forward passes; on a CPU float32 is used, with a warning."""
    compile: bool = False
    """Run the networks through torch.compile; on a CPU they are not, with a warning."""
    steps_per_env: Count = 100
    """Steps each environment takes per iteration, between two rows of metrics."""
    actor_groups: Groups = None
    """Observation groups the actor reads, in this order; None: every group the environment publishes."""
    critic_groups: Groups = None
    """Observation groups the critic reads, in this order; None: every group the environment publishes."""

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
        """Adam, for all three."""
        return "adam"

    def optimizer_options(self) -> dict[str, Any]:
        """Options of ``edenrl.optim.make_optimizer`` for ``optimizer``."""
        return {}

    @property
    def updates_per_iteration(self) -> int:
        """Updates of the critic between two rows of metrics."""
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
        """Warns of the published sizes on a CPU, where one update of them takes about a second."""
        if device == "cpu" and self.batch_size >= 2048:
            _log.warning(
                "An update of batch_size %d takes about a second on a CPU: add --profile cpu, or train on a GPU.",
                self.batch_size,
            )

    def warmup_frames(self, total_frames: int) -> int:
        """Transitions before the first update: ``min_buffer``, or a tenth of a run that is too short for it."""
        tenth = max(total_frames // 10, 1)
        if self.min_buffer > tenth:
            _log.warning("min_buffer is %d in this run of %d frames, not %d.", tenth, total_frames, self.min_buffer)
        return min(self.min_buffer, tenth)


class FlashSACRunConfig(RunConfig):
    """FlashSAC; a table of metrics, checkpoints and a config.json end up in the run directory.

    The length of the run is given in environment steps or in iterations; the policy stays in the action's box.
    """

    total_frames: Count | None = None  # type: ignore[assignment]
    """Environment steps to train for, summed over environments and processes; or give max_iterations."""
    max_iterations: Count | None = None
    """Iterations to train for, each algorithm.steps_per_env steps of every environment; or give total_frames."""
    profile: Literal["full", "cpu"] = "full"
    """Sizes to start from: full, the published ones, or cpu, small networks, batches and buffer for one core."""
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
        """Transitions before the first update, and updates of the critic after them, in a run of so many iterations."""
        algo = self.algorithm
        warmup = algo.warmup_frames(iterations * self.frames_per_rollout)
        steps = iterations * algo.steps_per_env - warmup // self.env.num_envs
        return warmup, max(steps, 1) * algo.updates_per_step

    def num_iterations(self, processes: int = 1) -> int:
        """Iterations of the whole run."""
        return self.max_iterations or super().num_iterations(processes)
