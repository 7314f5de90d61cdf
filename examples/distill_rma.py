"""Distil an RMA teacher, which reads a scan of the terrain, into a student with a depth camera.

python examples/distill_rma.py TEACHER_RUN         # a run directory of train_rma.py, finished or still running
python examples/distill_rma.py --resume runs/...   # continue, bit for bit; the teacher is inside
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import train_rma
from evaluate import load_run
from pydantic import Field

from edenrl.collectors import DepthDistillationCollector
from edenrl.config import DepthDistillationConfig, RMAConfig, RunConfig, parse_cli, presets
from edenrl.config.distill import distillation_preset, teacher_flags
from edenrl.modules import DepthEncoder, DepthPolicy, DepthStudent, rma_composition, rma_policy
from edenrl.objectives import DepthDistillationLoss
from edenrl.training import Run, load_policy_weights, run_script


class Train(RunConfig):
    """Distillation of an RMA teacher into a depth student: distill_rma.py TEACHER_RUN [--FIELD VALUE ...]."""

    algorithm: DepthDistillationConfig = Field(default_factory=DepthDistillationConfig)
    """Distillation."""


def parse(argv):
    """Parses the configuration. If TEACHER_RUN is given, its environment and networks are the defaults."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        return parse_cli(Train, argv, presets=presets.DISTILLATION)
    folder = Path(argv.pop(0)).expanduser().resolve()
    _, teacher_cfg = load_run(folder)
    presets_of_teacher = {teacher_cfg.env.name: distillation_preset(teacher_cfg)}
    return parse_cli(Train, [*teacher_flags(teacher_cfg, folder), *argv], presets=presets_of_teacher)


def make_teacher(cfg, env):
    """The policy that gives the target actions, from the history latent, the true scan and the true priv_explicit."""
    teacher_cfg = SimpleNamespace(env=cfg.env, algorithm=RMAConfig.model_validate(cfg.algorithm.teacher))
    net = rma_composition(train_rma.make_policy(teacher_cfg, env))
    return rma_policy(net.actor, net.source, latent="history")


def make_policy(cfg, env):
    """An untrained student; evaluation rebuilds it from a run's config.json with this."""
    teacher, algo = rma_composition(make_teacher(cfg, env)), cfg.algorithm
    keys, image = algo.groups_and_image(teacher, env.observation_spec)
    encoder = DepthEncoder(teacher.actor.widths["prop"], image=image, **algo.encoder_options())
    return DepthPolicy(DepthStudent(teacher.actor, encoder), keys, update_interval=algo.update_interval)


def main(argv=None):
    cfg = parse(argv)
    algo = cfg.algorithm
    algo.require_teacher()
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        teacher, policy = make_teacher(cfg, env).requires_grad_(False), make_policy(cfg, env)
        student = policy.module
        if run.is_new:  # a resumed run restores the teacher from its own checkpoint
            load_policy_weights(teacher, algo.teacher_run, algo.teacher_checkpoint, env=env)
            student.actor.load_state_dict(rma_composition(teacher).actor.state_dict())
        run.keep(teacher=teacher, policy=policy)
        loss = DepthDistillationLoss(student)
        step = run.gradient_step(loss, max_grad_norm={"student_actor": algo.max_grad_norm})  # encoder: no clipping
        collector = DepthDistillationCollector(run.training_env(env), teacher, policy, **algo.collector_options())
        run.keep(collector=collector)
        for rollout in run.rollouts(collector):  # [environments, steps]
            losses = loss(rollout)
            metrics = step(losses)  # one update: back-propagation through the whole rollout
            run.record(losses, metrics, delta_yaw_ok_frac=rollout["delta_yaw_ok"].float().mean())
            student.updates += int(step.applied)  # a student without updates refuses to act in evaluation


if __name__ == "__main__":
    run_script(main)
