"""Train constrained PPO: the best style at a task return of alpha times the best (ConTrack).

python examples/train_cmdp.py --algorithm.alpha 0.7        # ConflictPointMass: follow a goal, but slowly
python examples/train_cmdp.py --env.name Quadruped         # settings from PRESETS, each can be overridden
python examples/train_cmdp.py --resume runs/...            # continue, bit for bit
"""

import torch
from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import QUADRUPED_STYLE, CMDPConfig, EnvConfig, EvaluationConfig, RunConfig, parse_cli
from edenrl.distributed import num_iterations
from edenrl.envs import action_box, wrap_env
from edenrl.modules import MirrorAugmentation, TaskConstraint, observation_groups, update_normalization, value_critic
from edenrl.objectives import CMDPLoss, TwoChannelGAE, check_reward_groups
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import (
    Run,
    average,
    build_env,
    collector_options,
    evaluate_run,
    make_policy,
    rollout_metrics,
    run_script,
    setup,
)

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line. Both
# learn the task first and compare with the best of the whole run.
SMALL = dict(actor_hidden=(64, 64), critic_hidden=(64, 64), clip_value=False, desired_kl=0.02, entropy_coeff=0.0)
PRESETS = {
    "ConflictPointMass": dict(
        total_frames=900_000,
        algorithm=SMALL | dict(gamma=0.8, lmbda=0.8, steps_per_env=8, epochs=4, num_minibatches=2, lr=1e-3)
        | dict(init_std=0.5, warmup_iters=60, vg_window=256, vg_star_window=1000),
        evaluation=dict(num_episodes=128, metric="updates"),
    ),
    "Quadruped": QUADRUPED_STYLE,
    "QuadrupedTerrain": QUADRUPED_STYLE,  # the flat ground's, untuned; the robot is blind
}  # fmt: skip


class Train(RunConfig):
    """Constrained PPO; a table of metrics, checkpoints and a config.json end up in the run directory."""

    algorithm: CMDPConfig = Field(default_factory=CMDPConfig)
    """Constrained PPO."""
    env: EnvConfig = Field(default_factory=lambda: EnvConfig(name="ConflictPointMass"))
    """Environment; it publishes reward_groups."""
    # The trade-off is where lambda has settled: the newest policy, unless another metric is asked for.
    evaluation: EvaluationConfig = Field(default_factory=lambda: EvaluationConfig(metric="updates"))
    """Evaluation; the metric "updates" makes the newest checkpoint the best."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    algo, device = cfg.algorithm, setup(cfg)

    env = build_env(cfg, device)
    check_reward_groups(env.observation_spec)
    policy = make_policy(cfg, env).to(device)
    critic = value_critic(
        observation_groups(env.observation_spec, algo.critic_groups),
        num_values=2,
        hidden=algo.critic_hidden,
        activation=algo.activation,
        normalize=algo.normalize_observations,
    ).to(device)
    constraint = TaskConstraint(**algo.constraint_options()).to(device)

    whole = algo.normalize_advantage == "rollout"
    gae = TwoChannelGAE(gamma=algo.gamma, lmbda=algo.lmbda, value_network=critic, average_gae=whole)
    loss = CMDPLoss(
        policy,
        critic,
        constraint,
        clip_epsilon=algo.clip_epsilon,
        entropy_coeff=algo.entropy_coeff,
        critic_coeff=algo.critic_coeff,
        clip_value=algo.clip_value,
        action_bound_coeff=algo.action_bound_coeff,
        functional=False,
    )

    augment = MirrorAugmentation(getattr(env, "mirrors", {}) if algo.symmetry else None, policy, critic)
    frames = cfg.env.num_envs * algo.steps_per_env
    iterations, updates = num_iterations(cfg.total_frames, frames), algo.epochs * algo.num_minibatches
    optimizer = make_optimizer(algo.optimizer, loss.parameters(), lr=algo.lr)
    schedule = make_lr_schedule(algo.lr_schedule, optimizer, iterations * updates, **algo.schedule_options())
    step = GradientStep(
        loss, optimizer, max_grad_norm=algo.max_grad_norm, lr_schedule=schedule, on_nonfinite=algo.on_nonfinite
    )
    training_env = wrap_env(env, action_mode=cfg.env.action_mode, reward_scale=cfg.env.reward_scale)
    collector = make_collector(training_env, policy, frames_per_batch=frames, **collector_options(cfg))

    run = Run(
        cfg,
        algo.name,
        dict(policy=policy, critic=critic, constraint=constraint, optimizer=optimizer, step=step, collector=collector),
        iterations=iterations,
        frames_per_iteration=frames,
        evaluate=lambda: {**evaluate_run(cfg, policy, device), "updates": float(constraint.updates)},
    )
    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            step.restart_schedule(algo.lr_schedule, algo.lr, run.remaining * updates, **algo.schedule_options())
        rollouts = iter(collector)
        for _ in run:
            rollout = next(rollouts)
            gae(rollout)
            data, metrics = augment(rollout.exclude("next", "collector").reshape(-1)), []
            for _ in range(algo.epochs):
                for batch in data[torch.randperm(len(data), device=device)].split(len(data) // algo.num_minibatches):
                    losses = loss(batch)
                    metrics.append({**losses, **step(losses)})
            # After the update, so that the policy that was optimized is the one that acted.
            update_normalization(policy, rollout)
            update_normalization(critic, rollout)
            constraint.update(rollout["next", "metrics", "task_return"], rollout["next", "done"])
            run.log(average(metrics), rollout_metrics(rollout, action_box(env)), {"skipped_updates": step.skipped})
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
