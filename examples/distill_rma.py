"""Distil an RMA teacher, which is given the ground around it, into a student with a depth camera.

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
from edenrl.config import DepthDistillationConfig, RMAConfig, RunConfig, parse_cli
from edenrl.distributed import num_iterations
from edenrl.envs import action_box, wrap_env
from edenrl.modules import DepthEncoder, DepthPolicy, DepthStudent, rma_composition, rma_policy
from edenrl.objectives import DepthDistillationLoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import Run, build_env, evaluate_run, load_policy_weights, rollout_metrics, run_script, setup

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line.
FEW = dict(env=dict(num_envs=16), algorithm=dict(steps_per_env=10, num_pretrain_iters=50))
EVALUATE = dict(num_episodes=8, interval_iterations=300)
PRESETS = {"QuadrupedTerrain": FEW | dict(total_frames=144_000, evaluation=EVALUATE)}


class Train(RunConfig):
    """Distillation of an RMA teacher into a depth student: distill_rma.py TEACHER_RUN [--FIELD VALUE ...]."""

    algorithm: DepthDistillationConfig = Field(default_factory=DepthDistillationConfig)
    """Distillation."""


def parse(argv):
    """The configuration; the environment and the networks of TEACHER_RUN, where one is given, are its defaults."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        return parse_cli(Train, argv, presets=PRESETS)
    run = Path(argv.pop(0)).expanduser().resolve()
    teacher = load_run(run)[1]
    if not isinstance(teacher.algorithm, RMAConfig):
        raise ValueError(f"{run} is a run of {teacher.algorithm.name}; expected one of train_rma.py.")
    own = next((p for name, p in PRESETS.items() if name.lower() == teacher.env.name.lower()), {})
    kwargs = dict(teacher.env.kwargs)
    if "groups" in kwargs:
        kwargs["groups"] = [*kwargs["groups"], *({"depth"} - {*kwargs["groups"]})]
    preset = own | dict(env=teacher.env.model_dump() | dict(kwargs=kwargs) | own.get("env", {}))
    settings = f"--algorithm.teacher={teacher.algorithm.model_dump_json()}"
    argv = [f"--env.name={teacher.env.name}", f"--algorithm.teacher_run={run}", settings, *argv]
    return parse_cli(Train, argv, presets={teacher.env.name: preset})


def make_teacher(cfg, env):
    """The teacher as it labels: history latent, true scan and true priv_explicit."""
    algo = RMAConfig.model_validate(cfg.algorithm.teacher)
    deployed = rma_composition(train_rma.make_policy(SimpleNamespace(env=cfg.env, algorithm=algo), env))
    return rma_policy(deployed.actor, deployed.source, latent="history")


def make_policy(cfg, env):
    """An untrained student; evaluation rebuilds it from a run's config.json with this."""
    teacher, algo = rma_composition(make_teacher(cfg, env)), cfg.algorithm
    if teacher.flat is not None or "depth" not in env.observation_spec.keys():
        published = sorted(env.observation_spec.keys())
        raise ValueError(
            f"A depth student reads prop, its history and depth as groups; {cfg.env.name} has {published}."
        )
    prop, image = teacher.actor.widths["prop"], env.observation_spec["depth"].shape[-2:]
    encoder = DepthEncoder(prop, image=image, latent=algo.teacher["scan_hidden"][-1], hidden=algo.depth_hidden)
    keys = {name: teacher.keys[name] for name in ("prop", "history")}
    return DepthPolicy(DepthStudent(teacher.actor, encoder), keys, update_interval=algo.update_interval)


def main(argv=None):
    cfg = parse(argv)
    algo, device = cfg.algorithm, setup(cfg)
    if not algo.teacher:
        raise ValueError(
            "No teacher was given. Start with distill_rma.py TEACHER_RUN, a run directory of train_rma.py."
        )

    env = build_env(cfg, device)
    teacher, policy = make_teacher(cfg, env).to(device), make_policy(cfg, env).to(device)
    student = policy.module
    loss = DepthDistillationLoss(student)

    frames = cfg.env.num_envs * algo.steps_per_env
    iterations = num_iterations(cfg.total_frames, frames)
    optimizer = make_optimizer("adam", (p for p in loss.parameters() if p.requires_grad), lr=algo.lr)
    schedule = make_lr_schedule(algo.lr_schedule, optimizer, iterations, **algo.schedule_options())
    options = dict(max_grad_norm={"student_actor": algo.max_grad_norm}, on_nonfinite=algo.on_nonfinite)
    step = GradientStep(loss, optimizer, lr_schedule=schedule, **options)
    collector = DepthDistillationCollector(
        wrap_env(env, action_mode=cfg.env.action_mode, reward_scale=cfg.env.reward_scale),
        teacher,
        policy,
        algo.steps_per_env,
        num_pretrain_iters=algo.num_pretrain_iters,
    )

    run = Run(
        cfg,
        algo.name,
        dict(policy=policy, teacher=teacher, optimizer=optimizer, step=step, collector=collector),
        iterations=iterations,
        frames_per_iteration=frames,
        evaluate=lambda: evaluate_run(cfg, policy, device),
    )
    if run.checkpoints.latest() is None:  # those of a distillation hold the teacher
        load_policy_weights(teacher, algo.teacher_run, algo.teacher_checkpoint)
        student.actor.load_state_dict(rma_composition(teacher).actor.state_dict())
    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            step.restart_schedule(algo.lr_schedule, algo.lr, run.remaining, **algo.schedule_options())
        rollouts = iter(collector)
        for _ in run:
            rollout = next(rollouts)
            losses = loss(rollout)
            metrics = {**losses.detach(), **step(losses)}  # one step back through the whole rollout
            student.updates += int(step.applied)
            run.log(metrics, rollout_metrics(rollout, action_box(env)), {"skipped_updates": step.skipped})


if __name__ == "__main__":
    run_script(main)
