"""Configuration of a run: environment, evaluation, checkpoints, logger."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from edenrl.config.base import Config, Count, JsonDict, Name, Positive, Seed, refuse


class EnvConfig(Config):
    """Which environment, how many copies, and how rewards and actions are treated at its boundary."""

    name: Name = "PointMass"
    """Registered name, Gymnasium id ("HalfCheetah-v5" or "gym:HalfCheetah-v5"), or "mjlab:<task>"/"isaaclab:<task>"."""
    num_envs: Count = 256
    """Environments stepped together."""
    kwargs: JsonDict = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor, as JSON; --env.kwargs.KEY VALUE sets a single one."""
    vectorization: Literal["sync", "async"] = "sync"
    """How the copies are stepped (Gymnasium ids only): one after another, or one process each."""
    reward_scale: Positive = 1.0
    """Factor on the reward the learner sees; evaluation reports the unscaled return."""
    action_mode: Literal["clip", "squash", "none"] = "clip"
    """How an action reaches its bounds: clipped, squashed by tanh, or passed as it is."""


class EvaluationConfig(Config):
    """How a policy is evaluated: deterministic actions, whole episodes, a seed of its own."""

    num_episodes: Count = 20
    """Finished episodes per evaluation."""
    seed: Seed = 12345
    """Seed of the evaluation environments, apart from the training seed."""
    interval_iterations: Count | None = None
    """Iterations between evaluations; None: at every checkpoint. Each is saved, so that the best can be kept."""
    metric: Name = "return_mean"
    """Evaluation metric that decides which checkpoint is the best, such as return_mean or success_rate."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest metric is the best."""


class CheckpointConfig(Config):
    """When checkpoints are written and how many stay on disk."""

    interval_iterations: Count | None = None
    """Iterations between checkpoints; None: ten per run."""
    keep_last: Count = 2
    """Most recent checkpoints kept besides the best one."""


class LoggerConfig(Config):
    """Where metrics go, besides the run directory's metrics.csv."""

    kind: Literal["csv", "tensorboard", "wandb"] = "csv"
    """Logger."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """How wandb runs; without an account or network it falls back to offline."""
    project: Name = "edenrl"
    """wandb project."""


class RunConfig(Config):
    """What every training run shares; a script's configuration adds ``algorithm``.

    Examples:
        ``examples/train_ppo.py`` adds ``algorithm: PPOConfig = Field(default_factory=PPOConfig)``.

        >>> from edenrl.config import RunConfig
        >>> RunConfig(total_frames="1e6").total_frames
        1000000
    """

    seed: Seed = 1
    """Seed of networks, environments and sampling."""
    total_frames: Count = 2_000_000
    """Environment steps to train for, summed over environments; 1e6 and 1_000_000 are read as well."""
    device: Name = "auto"
    """Torch device such as cpu or cuda:0; auto takes the accelerator when there is one."""
    run_dir: Name | None = None
    """Directory of this run; None: runs/<algorithm>-<env>-s<seed>-<time>."""
    resume: Name | None = None
    """Run directory to continue: its config.json is the base, and it becomes run_dir."""
    resume_schedule: Literal["restore", "restart"] = "restore"
    """On resume, restore the learning-rate schedule or restart it over the remaining updates."""
    quiet: bool = False
    """No progress output."""
    num_threads: Count | None = None
    """CPU threads torch may use; None leaves torch's own choice."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    """Environment."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints."""
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Logging."""

    @model_validator(mode="after")
    def _check_minibatches(self) -> RunConfig:
        algorithm = getattr(self, "algorithm", None)
        steps, parts = getattr(algorithm, "steps_per_env", None), getattr(algorithm, "num_minibatches", None)
        if steps is None or parts is None or self.env.num_envs * steps % parts == 0:
            return self
        frames = self.env.num_envs * steps
        fewer = next(n for n in range(min(parts, frames), 0, -1) if frames % n == 0)
        unit = parts // math.gcd(steps, parts)
        raise refuse(
            f"env.num_envs * algorithm.steps_per_env = {self.env.num_envs} * {steps} = {frames} frames do not split "
            f"into algorithm.num_minibatches = {parts} equal parts; set algorithm.num_minibatches to {fewer}, or "
            f"env.num_envs to a multiple of {unit} such as {math.ceil(self.env.num_envs / unit) * unit}"
        )
