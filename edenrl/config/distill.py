"""Configuration of the distillation of a depth student."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

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
    yaw_slots: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (6, 8)
    """Start and stop of the two entries of prop that hold the true yaw angles, such as 6,8."""
    yaw_scale: Positive = 1.5
    """Largest yaw angle that the student can predict, in rad."""
    prop_group: Name | None = None
    """Observation group that the student reads as prop. None: the teacher's."""
    history_group: Name | None = None
    """Observation group that the student reads as the history of prop. None: the teacher's."""
    depth_group: Name = "depth"
    """Observation group that holds the depth image."""
    gate_group: Name = "delta_yaw_ok"
    """Group that opens the gate above 0.5. While it is closed, a student in training acts on the true yaw angles."""
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

    def encoder_options(self) -> dict[str, Any]:
        """Options of ``DepthEncoder``. Its output takes the place of the teacher's scan latent."""
        sizes = {"latent": self.teacher["scan_hidden"][-1], "hidden": self.depth_hidden}
        return {**sizes, **self.pick("yaw_slots", "yaw_scale")}

    def collector_options(self) -> dict[str, Any]:
        """Options of ``DepthDistillationCollector``."""
        return {"steps": self.steps_per_env, "num_pretrain_iters": self.num_pretrain_iters, "gate": self.gate_group}

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
        """What the student reads: the groups of prop, history and depth image, and the size of an image.

        Args:
            teacher: composition of the teacher's policy, from ``rma_composition``.
            specs: observation spec of the environment.

        Raises:
            ValueError: if the teacher's parts are not separate groups, or for a group that the environment lacks or
                that has another shape.
        """
        if teacher.flat is not None:
            raise ValueError(
                f"A depth student reads prop and its history as groups; this teacher reads all from {teacher.flat!r}."
            )
        keys = {
            "prop": self.prop_group or teacher.keys["prop"],
            "history": self.history_group or teacher.keys["history"],
            "depth": self.depth_group,
        }
        for name, group in keys.items():
            if group not in specs.keys():
                raise ValueError(
                    f"algorithm.{name}_group: this environment has no group {group!r}; it has {sorted(specs.keys())}."
                )
        for name in ("prop", "history"):
            width, wanted = specs[keys[name]].shape[-1], teacher.actor.widths[name]
            if width != wanted:
                raise ValueError(
                    f"algorithm.{name}_group {keys[name]!r} is {width} wide; the teacher's {name} is {wanted} wide."
                )
        image = tuple(specs[self.depth_group].shape[len(specs.shape) :])
        if len(image) != 2:
            raise ValueError(
                f"algorithm.depth_group {self.depth_group!r} has the shape {image}; expected the height and width of "
                "an image."
            )
        return keys, image

    @model_validator(mode="after")
    def _check_steps(self) -> DepthDistillationConfig:
        steps, interval = self.steps_per_env, self.update_interval
        if steps % interval:
            raise refuse(
                f"steps_per_env {steps} is not a multiple of update_interval {interval}; the closest is "
                f"{max(round(steps / interval), 1) * interval}: every iteration begins with a new image"
            )
        return self
