"""Train by the analytic policy gradient on a differentiable environment: PointMass (default), CartPoleSwingUp or yours.

python examples/train_apg.py --env.name CartPoleSwingUp    # settings from PRESETS, each can be overridden
python examples/train_apg.py --resume runs/...             # continue, bit for bit
"""

import torch
from pydantic import Field
from torchrl.envs.utils import ExplorationType

from edenrl.collectors import DifferentiableCollector
from edenrl.config import APGConfig, RunConfig, parse_cli
from edenrl.distributed import num_iterations, world_size
from edenrl.envs import ScheduledEnv, action_box, wrap_env
from edenrl.modules import update_normalization
from edenrl.objectives import APGLoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import Run, average, build_env, evaluate_run, make_policy, rollout_metrics, run_script, setup

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line.
SMALL = dict(actor_hidden=(64, 64), lr_schedule="linear", final_lr_fraction=0.1, lr=3e-3, init_std=0.3)
PRESETS = {
    "PointMass": dict(
        total_frames=960_000,
        env=dict(num_envs=64),
        algorithm=SMALL | dict(mode="complete", segment_length=100),
        evaluation=dict(num_episodes=128, metric="success_rate"),
    ),
    "CartPoleSwingUp": dict(
        total_frames=4_096_000,
        # Half of the episodes practise from anywhere, evaluation starts hanging. Without the bound on adjoints the few
        # rows whose gradients explode near the top drown the others.
        env=dict(num_envs=128, action_mode="squash", kwargs=dict(start_anywhere=0.5)),
        algorithm=SMALL
        | dict(segment_length=128, activation="tanh", lr=5e-3, init_std=0.1)
        | dict(action_adjoint_max_norm=0.002, max_grad_norm=1.0),
        evaluation=dict(metric="upright_time", interval_iterations=25, kwargs=dict(start_anywhere=0.0)),
    ),
}


class Train(RunConfig):
    """Analytic policy gradient; a table of metrics, checkpoints and a config.json end up in the run directory."""

    algorithm: APGConfig = Field(default_factory=APGConfig)
    """APG."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    algo, device = cfg.algorithm, setup(cfg)

    env = build_env(cfg, device)
    scheduled = isinstance(env, ScheduledEnv)
    if scheduled and algo.updates is None:
        raise ValueError(f"{cfg.env.name} schedules its rollouts: give the budget in updates, --algorithm.updates 500.")
    policy = make_policy(cfg, env).to(device)
    loss = APGLoss(policy, gamma=algo.gamma, entropy_coeff=algo.entropy_coeff, mode=algo.mode)

    frames = cfg.env.num_envs * algo.segment_length * algo.rollouts
    updates = algo.updates or num_iterations(cfg.total_frames, frames)
    optimizer = make_optimizer(algo.optimizer, loss.parameters(), lr=algo.lr)
    schedule = make_lr_schedule(algo.lr_schedule, optimizer, updates, **algo.schedule_options())
    step = GradientStep(
        loss,
        optimizer,
        max_grad_norm=algo.max_grad_norm,
        lr_schedule=schedule,
        on_nonfinite="skip" if algo.skip_nonfinite else "raise",
        max_norm_before_clip=algo.max_grad_norm_before_clip or None,
    )
    collector = DifferentiableCollector(
        wrap_env(env, action_mode=cfg.env.action_mode, reward_scale=cfg.env.reward_scale),
        policy,
        algo.segment_length,
        reset_at_each_iter=algo.mode == "complete",
        action_adjoint_max_norm=algo.action_adjoint_max_norm,
        exploration_type=ExplorationType.DETERMINISTIC if algo.deterministic else ExplorationType.RANDOM,
    )

    run = Run(
        cfg,
        algo.name,
        dict(policy=policy, optimizer=optimizer, step=step, collector=collector),
        iterations=updates,
        frames_per_iteration=1 if scheduled else frames,
        evaluate=lambda: evaluate_run(cfg, policy, device),
        unit="updates" if scheduled else "frames",
    )
    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            step.restart_schedule(algo.lr_schedule, algo.lr, run.remaining, **algo.schedule_options())
        for _ in run:
            metrics, segments = [], []
            for segment in collector.update(algo.rollouts):
                # One backward per segment; complete rollouts are averaged, segments add up to the update's horizon.
                metrics.append(step.backward(loss(segment), 1 / algo.rollouts_per_update))
                segments.append(segment)
            stepped = step.step()
            rollout = torch.cat([segment.reshape(-1) for segment in segments])
            if step.applied:  # Frozen while the update was made; a skipped one may hold anything.
                update_normalization(policy, rollout)
            run.log(
                average(metrics),
                stepped,
                rollout_metrics(rollout, action_box(env)),
                collector.metrics(),
                {"skipped_updates": step.skipped, "skipped_large": step.skipped_large},
                {"frames": collector.frames * world_size()},  # of all processes together
            )


if __name__ == "__main__":
    run_script(main)
