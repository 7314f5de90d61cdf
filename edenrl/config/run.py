"""Configuration of a run: environment, evaluation, checkpoints, logger."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from edenrl.config.base import Config, Count, JsonDict, Name, Positive, Seed, refuse


def _folder(value: str) -> str:
    """`value` with ``~`` expanded. Neither it nor a parent may be a file."""
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise refuse(f"{error}; give the path in full") from None
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise refuse(f"{part} is a file; give the path of a directory")
    return str(path)


Folder = Annotated[Name, AfterValidator(_folder)]
# Arguments that an environment factory gets besides the keyword arguments, and the flag that sets each.
_OWN_FLAGS = {"name": "env.name", "num_envs": "env.num_envs", "vectorization": "env.vectorization"}
_OWN_FLAGS |= {"device": "device", "seed": "seed"}


def _own_flags(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs`, none of which may be set by another flag."""
    for name, flag in _OWN_FLAGS.items():
        if name in kwargs:
            raise refuse(f"{name!r} has a flag of its own: set --{flag} instead of --env.kwargs.{name}")
    return kwargs


EnvKwargs = Annotated[JsonDict, AfterValidator(_own_flags)]


class EnvConfig(Config):
    """The environment, the number of copies, and the treatment of rewards and actions."""

    name: Name = "PointMass"
    """Registered name, Gymnasium id (Ant-v5 or gym:Ant-v5), mjlab:<task>, isaaclab:<task> or <module>:<function>."""
    num_envs: Count = 256
    """Environments stepped together."""
    kwargs: EnvKwargs = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor, as JSON. --env.kwargs.KEY VALUE sets a single one."""
    vectorization: Literal["sync", "async"] = "sync"
    """How Gymnasium environments are stepped. sync: one after another. async: one process each."""
    reward_scale: Positive = 1.0
    """Factor on the reward that the learner sees. Evaluation reports the unscaled return."""
    action_mode: Literal["clip", "squash", "none"] = "clip"
    """How actions are kept within their bounds: clipped, squashed by a tanh, or not at all."""
    clip_actions: Positive | None = None
    """Largest magnitude of an action that the environment gets, with bounds or without. None: no such clip."""
    random_start: bool | None = None
    """Begin training at random steps of the time limits. None: where environment and algorithm allow it."""

    def action_options(self) -> dict[str, Any]:
        """Options of ``edenrl.envs.wrap_env`` that say what happens to actions."""
        return self.pick("action_mode", "clip_actions")


class EvaluationConfig(Config):
    """Evaluation of a policy: deterministic actions, whole episodes, a separate seed."""

    num_episodes: Count = 20
    """Finished episodes per evaluation."""
    seed: Seed = 12345
    """Seed of the evaluation environments, separate from the training seed."""
    kwargs: EnvKwargs = Field(default_factory=dict)
    """Overrides of env.kwargs in evaluation, as JSON. --evaluation.kwargs.KEY VALUE sets a single one."""
    interval_iterations: Count | None = None
    """Iterations between evaluations, each saved as a checkpoint. None: at checkpoints, for a tenth of the time."""
    metric: Name = "return_mean"
    """Evaluation metric that decides which checkpoint is the best, such as return_mean or success_rate."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value of the metric is the best."""


class CheckpointConfig(Config):
    """When checkpoints are written and how many stay on disk."""

    interval_iterations: Count | None = None
    """Iterations between checkpoints. None: ten checkpoints per run."""
    keep_last: Count = 2
    """Number of most recent checkpoints to keep, besides the best one."""


class LoggerConfig(Config):
    """The logger of metrics, in addition to metrics.csv in the run directory."""

    kind: Literal["csv", "tensorboard", "wandb"] = "csv"
    """Logger of the metrics. metrics.csv is always written."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """Mode of wandb. Without an account or network it falls back to offline."""
    project: Name = "edenrl"
    """Name of the wandb project."""


class RunConfig(Config):
    """Settings that every training run shares. A script's configuration adds ``algorithm``.

    Examples:
        ``examples/train_ppo.py`` adds ``algorithm: PPOConfig = Field(default_factory=PPOConfig)``.

        >>> from edenrl.config import RunConfig
        >>> RunConfig(total_frames="1e6").total_frames
        1000000
    """

    seed: Seed = 1
    """Seed of networks, environments and sampling."""
    total_frames: Count = 2_000_000
    """Environment steps to train for, summed over environments. 1e6 and 1_000_000 are also accepted."""
    device: Name = "auto"
    """Torch device such as cpu or cuda:0. auto: the accelerator if there is one, else the CPU."""
    run_dir: Folder | None = None
    """Directory of this run. None: runs/<algorithm>-<env>-s<seed>-<time>."""
    resume: Folder | None = None
    """Run directory to continue. It becomes run_dir. Other flags override its config.json."""
    resume_checkpoint: Name = "latest"
    """Checkpoint to continue from: latest, best, or a checkpoint's name. Later ones go when the run saves its next."""
    resume_schedule: Literal["restore", "restart"] = "restore"
    """On resume, restore the learning-rate schedule, or restart it over the remaining updates."""
    init_from: Folder | None = None
    """Run directory whose weights a new run starts with. Layers whose names or shapes differ stay new."""
    init_checkpoint: Name = "best"
    """Checkpoint of init_from: best, latest, or a checkpoint's name or path."""
    export: bool = False
    """At the end, export the best checkpoint's policy to policy/ of run_dir, as ONNX and TorchScript."""
    quiet: bool = False
    """Print no progress."""
    num_threads: Count | None = None
    """CPU threads that torch may use. None: torch decides."""
    collector: Literal["single", "multi_sync", "ray"] = "single"
    """What steps the environments: this process, num_workers local processes, or num_workers Ray actors."""
    num_workers: Count = 2
    """Workers that share env.num_envs. Only for collector multi_sync and ray."""
    process_timeout: Positive = 600.0
    """Seconds that a process under torchrun waits for the others before it stops."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    """Environment."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints."""
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Logging."""

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm, as in checkpoints and default run directories."""
        return str(self._of_algorithm("name", "run"))

    @property
    def random_start(self) -> bool | None:
        """``env.random_start``; false for algorithms whose episodes must all start at step 0."""
        return False if self._of_algorithm("whole_episodes") else self.env.random_start

    @property
    def frames_per_rollout(self) -> int:
        """Environment steps per iteration, summed over all environments of one process."""
        return self.env.num_envs * int(self._of_algorithm("steps_per_env", 1))

    @property
    def action_bound_scale(self) -> float | None:
        """Half the width of the action box for environments that declare none; None: they stay without one."""
        scale: float | None = self._of_algorithm("action_bound_scale")
        return scale

    def num_iterations(self, processes: int = 1) -> int:
        """Iterations of the whole run, from ``algorithm.updates`` if it is set, otherwise from ``total_frames``.

        Args:
            processes: processes that train together, each on ``env.num_envs`` environments.
        """
        given = self._of_algorithm("updates")
        return given or math.ceil(self.total_frames / (self.frames_per_rollout * processes))

    def warn(self, device: str, iterations: int) -> None:
        """Logs a warning for settings that are allowed but have a known drawback.

        Args:
            device: type of the device, such as "cpu".
            iterations: iterations of the whole run.
        """
        warn = self._of_algorithm("warn")
        if warn is not None:
            warn(device, iterations)

    def _of_algorithm(self, field: str, default: Any = None) -> Any:
        """A field of ``algorithm``, or `default`. Only the scripts' configurations have an ``algorithm``."""
        return getattr(getattr(self, "algorithm", None), field, default)

    @model_validator(mode="after")
    def _check_folders(self) -> RunConfig:
        if self.resume is not None and self.run_dir is not None:
            resumed, written = (Path(folder).resolve() for folder in (self.resume, self.run_dir))
            if resumed != written:
                raise refuse(
                    f"resume and run_dir name two directories, {self.resume} and {self.run_dir}; a resumed run goes on "
                    f"in its own. Leave run_dir out, or start a new run with --config {self.resume}/config.json"
                )
        return self

    @model_validator(mode="after")
    def _check_checkpoints(self) -> RunConfig:
        if self.resume is None and self.resume_checkpoint != "latest":
            raise refuse(f"resume_checkpoint = {self.resume_checkpoint!r} needs the run that it belongs to: set resume")
        if self.init_from is None and self.init_checkpoint != "best":
            raise refuse(f"init_checkpoint = {self.init_checkpoint!r} needs the run that it belongs to: set init_from")
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> RunConfig:
        if self.collector != "single" and self._of_algorithm("one_process", False):
            raise refuse(
                f"{self.algorithm_name} collects in one process, not with collector {self.collector!r}; set collector "
                "to 'single'"
            )
        if self.collector != "single" and self.env.num_envs % self.num_workers:
            fits = [n for n in range(1, self.env.num_envs + 1) if self.env.num_envs % n == 0]
            near = min(fits, key=lambda n: abs(n - self.num_workers))
            raise refuse(
                f"env.num_envs = {self.env.num_envs} environments do not split over num_workers = {self.num_workers}; "
                f"set num_workers to {near}, or env.num_envs to a multiple of {self.num_workers}"
            )
        return self

    @model_validator(mode="after")
    def _check_random_start(self) -> RunConfig:
        reason = self._of_algorithm("whole_episodes")
        if self.env.random_start and reason is not None:
            raise refuse(f"env.random_start is not for {self.algorithm_name}: {reason}; leave it out")
        return self

    @model_validator(mode="after")
    def _check_minibatches(self) -> RunConfig:
        steps, parts = self._of_algorithm("steps_per_env"), self._of_algorithm("num_minibatches")
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

    @model_validator(mode="after")
    def _check_groups(self) -> RunConfig:
        size, num_envs = self._of_algorithm("group_size"), self.env.num_envs
        if size is None or num_envs % size == 0:
            return self
        fewer, more = num_envs // size * size, -(-num_envs // size) * size
        sizes = sorted((n for n in range(2, num_envs + 1) if num_envs % n == 0), key=lambda n: abs(n - size))[:2]
        raise refuse(
            f"env.num_envs = {num_envs} is not a multiple of algorithm.group_size = {size}; set env.num_envs to "
            f"{f'{fewer} or {more}' if fewer else more}"
            + (f", or algorithm.group_size to {' or '.join(map(str, sorted(sizes)))}" if sizes else "")
        )
