"""Train by the analytic policy gradient on a differentiable environment: PointMass (default), CartPoleSwingUp or yours.

python examples/train_apg.py --env.name CartPoleSwingUp    # starts from a preset; flags override it
python examples/train_apg.py --resume runs/...             # continue, bit for bit
"""

import torch
from pydantic import Field
from torchrl.envs.utils import ExplorationType

from edenrl.collectors import DifferentiableCollector
from edenrl.config import APGConfig, RunConfig, parse_cli, presets
from edenrl.distributed import world_size
from edenrl.envs import ScheduledEnv
from edenrl.modules import update_normalization
from edenrl.objectives import APGLoss
from edenrl.training import Run, make_policy, run_script


class Train(RunConfig):
    """Analytic policy gradient. The run directory receives checkpoints, a config.json and a table of metrics."""

    algorithm: APGConfig = Field(default_factory=APGConfig)
    """APG."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.APG)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        if isinstance(env, ScheduledEnv):
            if algo.updates is None:
                raise ValueError(
                    f"{cfg.env.name} sets its rollout lengths: give the budget in updates, --algorithm.updates 500."
                )
            run.count_updates()  # the budget is in updates, not in frames
        policy = run.keep(policy=make_policy(cfg, env))
        loss = APGLoss(policy, **algo.loss_options())
        step = run.gradient_step(loss, max_norm_before_clip=algo.max_grad_norm_before_clip or None)
        exploration = ExplorationType.DETERMINISTIC if algo.deterministic else ExplorationType.RANDOM
        collector = DifferentiableCollector(
            run.training_env(env),
            policy,
            algo.segment_length,
            reset_at_each_iter=algo.mode == "complete",
            action_adjoint_max_norm=algo.action_adjoint_max_norm,
            exploration_type=exploration,
        )
        run.keep(collector=collector)

        for _ in run:
            segments = []
            for segment in collector.update(algo.rollouts):  # [environments, steps], attached to the autograd graph
                # One backward per segment. Gradients of complete rollouts are averaged, those of segments summed.
                run.record(step.backward(loss(segment), 1 / algo.rollouts_per_update))
                segments.append(segment)
            run.log(step.step())
            rollout = torch.cat([segment.reshape(-1) for segment in segments])
            if step.applied:  # a skipped update may hold NaN; statistics never change during an update
                update_normalization(policy, rollout)
            run.watch(rollout)
            frames = collector.frames * world_size()  # of all processes together
            run.log(collector.metrics(), {"skipped_large": step.skipped_large, "frames": frames})


if __name__ == "__main__":
    run_script(main)
