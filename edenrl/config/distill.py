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
    """The flags with which a distillation takes the environment and the networks of a teacher's run.

    Args:
        teacher: the configuration of the teacher's run.
        folder: its directory.

    Raises:
        ValueError: for a run of another algorithm.
    """
    if not isinstance(teacher.algorithm, RMAConfig):
        raise ValueError(f"{folder} is a run of {teacher.algorithm.name}; expected one of train_rma.py.")
    networks = teacher.algorithm.model_dump_json()
    return [f"--env.name={teacher.env.name}", f"--algorithm.teacher_run={folder}", f"--algorithm.teacher={networks}"]


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

    def encoder_options(self) -> dict[str, int]:
        """Options of ``DepthEncoder``. Its output takes the place of the teacher's scan latent."""
        return {"latent": self.teacher["scan_hidden"][-1], "hidden": self.depth_hidden}

    def require_teacher(self) -> None:
        """Refuses a distillation that was started without a teacher.

        Raises:
            ValueError: for an empty ``teacher``.
        """
        if not self.teacher:
            raise ValueError(
                "No teacher was given. Start with distill_rma.py TEACHER_RUN, a run directory of train_rma.py."
            )

    def groups_and_image(self, teacher: Any, specs: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
        """What the student reads: the groups of ``prop`` and ``history`` by part, and the size of a depth image.

        Args:
            teacher: composition of the teacher's policy, from ``rma_composition``.
            specs: observation spec of the environment.

        Raises:
            ValueError: if the parts are not separate groups, or if there is no group "depth".
        """
        published = sorted(specs.keys())
        if teacher.flat is not None or "depth" not in published:
            raise ValueError(
                f"A depth student reads prop, its history and depth as groups; this environment has {published}."
            )
        keys = {name: teacher.keys[name] for name in ("prop", "history")}
        return keys, tuple(specs["depth"].shape[-2:])

    @model_validator(mode="after")
    def _check_steps(self) -> DepthDistillationConfig:
        steps, interval = self.steps_per_env, self.update_interval
        if steps % interval:
            raise refuse(
                f"steps_per_env {steps} is not a multiple of update_interval {interval}; the closest is "
                f"{max(round(steps / interval), 1) * interval}: every iteration begins with a new image"
            )
        return self
