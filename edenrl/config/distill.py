"""Configuration of the distillation of a depth student."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from edenrl.config import presets
from edenrl.config.base import Config, Count, Fraction, JsonDict, Name, Positive, Seed, refuse
from edenrl.config.rma import RMAConfig
from edenrl.config.run import Folder


def teacher_flags(teacher: Any, folder: Path) -> list[str]:
    """The flags that name a teacher's run and hand its networks to a distillation.

    Args:
        teacher: the configuration of the teacher's run.
        folder: its directory.

    Raises:
        ValueError: for a run of another algorithm.
    """
    if not isinstance(teacher.algorithm, RMAConfig):
        raise ValueError(f"{folder} is a run of {teacher.algorithm.name}; expected one of train_rma.py.")
    networks = teacher.algorithm.model_dump_json()
    return [f"--algorithm.teacher_run={folder}", f"--algorithm.teacher={networks}"]


def distillation_preset(teacher: Any) -> dict[str, Any]:
    """The preset of a teacher's environment, which is the teacher's and also publishes depth.

    Args:
        teacher: the configuration of the teacher's run.

    Examples:
        >>> from types import SimpleNamespace
        >>> from edenrl.config import EnvConfig
        >>> robot = EnvConfig(name="Robot", kwargs={"groups": ["prop"]})
        >>> distillation_preset(SimpleNamespace(env=robot))["env"]["kwargs"]
        {'groups': ['prop', 'depth']}
    """
    env = teacher.env.model_dump()
    groups = env["kwargs"].get("groups")
    if groups is not None and "depth" not in groups:
        env["kwargs"]["groups"] = [*groups, "depth"]
    tables = {name.lower(): preset for name, preset in presets.DISTILLATION.items()}
    return presets.changed({"env": env}, **tables.get(env["name"].lower(), {}))


class DepthDistillationConfig(Config):
    """Distillation of an RMA teacher into a student with a depth camera.

    Defaults follow Cheng et al. 2023, "Extreme Parkour with Legged Robots", arXiv:2309.14341. Each iteration has 24
    images and one Adam step on all of them.
    """

    one_process: ClassVar[bool] = True  # no workers: the script steps the environments itself

    name: Literal["distill_rma"] = "distill_rma"
    """Name of the script that rebuilds a run from its config.json."""
    teacher_run: Folder | None = None
    """Run directory of the teacher. Read when a distillation starts, not when it is resumed."""
    teacher_checkpoint: Name = "best"
    """Checkpoint of the teacher: best, latest, or a checkpoint's name or path."""
    teacher: JsonDict = Field(default_factory=dict)
    """Algorithm settings of the teacher. The script reads them from the teacher's config.json."""
    depth_hidden: Count = 512
    """Width of the depth encoder's GRU."""
    steps_per_env: Count = 120
    """Steps each environment takes per iteration. Must be a multiple of update_interval."""
    update_interval: Count = 5
    """Control steps from one depth image to the next. Must equal the environment's depth_interval."""
    num_pretrain_iters: Seed = 0
    """Number of first iterations in which the teacher's actions drive the robot."""
    lr: Positive = 1e-3
    """Learning rate at the start."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over the run."""
    final_lr_fraction: Fraction = 0.0
    """Learning rate at the end of linear and cosine schedules, as a fraction of lr."""
    max_grad_norm: Positive = 1.0
    """Largest gradient norm of the student's actor. The encoder's gradient is not clipped."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """At a NaN or infinite gradient: raise stops and names the parameter, skip skips the step and counts it."""

    @property
    def optimizer(self) -> str:
        """Always adam."""
        return "adam"

    def optimizer_options(self) -> dict[str, float]:
        """Options of ``edenrl.optim.make_optimizer`` for ``optimizer``."""
        return {}

    @property
    def updates_per_iteration(self) -> int:
        """1: one update, back through the whole rollout."""
        return 1

    def schedule_options(self) -> dict[str, float]:
        """Options of ``edenrl.optim.make_lr_schedule`` for ``lr_schedule``."""
        return {} if self.lr_schedule == "constant" else {"final_fraction": self.final_lr_fraction}

    @model_validator(mode="after")
    def _check_steps(self) -> DepthDistillationConfig:
        steps, interval = self.steps_per_env, self.update_interval
        if steps % interval:
            raise refuse(
                f"steps_per_env {steps} is not a multiple of update_interval {interval}; the closest is "
                f"{max(round(steps / interval), 1) * interval}: every iteration begins with a new image"
            )
        return self
