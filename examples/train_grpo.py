"""Train GRPO, which needs no critic, on an environment that can start groups of rows in the same state.

python examples/train_grpo.py --env.name CartPole-v1       # settings from PRESETS, each can be overridden
python examples/train_grpo.py --resume runs/...            # continue, bit for bit
"""

import torch
from pydantic import Field

from edenrl.collectors import Collector
from edenrl.config import GRPOConfig, RunConfig, parse_cli
from edenrl.distributed import num_iterations
from edenrl.envs import action_box, assert_same_start, set_group_size, wrap_env
from edenrl.modules import observation_groups, update_normalization
from edenrl.objectives import GroupRelativeAdvantage, GRPOLoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import Run, average, build_env, evaluate_run, make_policy, rollout_metrics, run_script, setup

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line.
SMALL = dict(actor_hidden=(64, 64), activation="tanh")
PRESETS = {
    "PointMass": dict(
        total_frames=2_000_000,
        env=dict(kwargs=dict(success_bonus=50.0), num_envs=64),
        algorithm=SMALL | dict(group_size=8, kl_coeff=0.0, init_std=0.6),
        evaluation=dict(num_episodes=128),
    ),
    "CartPole-v1": dict(
        total_frames=400_000,
        env=dict(num_envs=32),
        algorithm=SMALL | dict(group_size=8, steps_per_env=500),
    ),
}


class Train(RunConfig):
    """Group relative policy optimization; metrics, checkpoints and a config.json end up in the run directory."""

    algorithm: GRPOConfig = Field(default_factory=GRPOConfig)
    """GRPO."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    if cfg.collector != "single":
        raise ValueError(f"GRPO collects in one process, not with {cfg.collector!r}. Set --collector single.")
    algo, device = cfg.algorithm, setup(cfg)

    env = build_env(cfg, device)
    set_group_size(env, algo.group_size)
    policy = make_policy(cfg, env).to(device)
    observations = list(observation_groups(env.observation_spec, algo.actor_groups))

    advantages = GroupRelativeAdvantage(
        gamma=algo.gamma, group_size=algo.group_size, eps=algo.eps, truncate_at_first_done=algo.truncate_at_first_done
    )
    loss = GRPOLoss(
        policy,
        clip_epsilon=algo.clip_epsilon,
        entropy_coeff=algo.entropy_coeff,
        kl_coeff=algo.kl_coeff,
        action_bound_coeff=algo.action_bound_coeff,
        functional=False,
    )

    frames = cfg.env.num_envs * algo.steps_per_env
    iterations, updates = num_iterations(cfg.total_frames, frames), algo.epochs * algo.num_minibatches
    optimizer = make_optimizer(algo.optimizer, loss.parameters(), lr=algo.lr)
    schedule = make_lr_schedule(algo.lr_schedule, optimizer, iterations * updates, **algo.schedule_options())
    step = GradientStep(
        loss, optimizer, max_grad_norm=algo.max_grad_norm, lr_schedule=schedule, on_nonfinite=algo.on_nonfinite
    )
    training_env = wrap_env(env, action_mode=cfg.env.action_mode, reward_scale=cfg.env.reward_scale)
    collector = Collector(
        training_env, policy, frames_per_batch=frames, total_frames=-1, reset_at_each_iter=algo.reset_before_rollout
    )
    components = dict(policy=policy, optimizer=optimizer, step=step, collector=collector)
    if loss.reference is not None:
        components["reference"] = loss.reference
    run = Run(
        cfg,
        algo.name,
        components,
        iterations=iterations,
        frames_per_iteration=frames,
        evaluate=lambda: evaluate_run(cfg, policy, device),
    )
    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            step.restart_schedule(algo.lr_schedule, algo.lr, run.remaining * updates, **algo.schedule_options())
        rollouts = iter(collector)
        for _ in run:
            rollout = next(rollouts)
            if algo.reset_before_rollout:
                assert_same_start(rollout, observations, algo.group_size)
            advantages(rollout)
            # Only what counts: the mini-batches are then equally large, and nothing is computed in vain.
            data = rollout.exclude("next", "collector")[rollout["group_mask"].squeeze(-1)]
            metrics = []
            for _ in range(algo.epochs):
                for index in torch.randperm(len(data), device=device).tensor_split(algo.num_minibatches):
                    losses = loss(data[index])
                    metrics.append({**losses, **step(losses)})
            # After the update, so that the policy that was optimized is the one that acted. Where the reward is missing
            # the simulation broke down, and the observation may be NaN as well.
            update_normalization(policy, rollout[~rollout["next", "reward"].isnan().squeeze(-1)])
            run.log(average(metrics), advantages.metrics(rollout), rollout_metrics(rollout, action_box(env)))
            run.log({"skipped_updates": step.skipped})
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
