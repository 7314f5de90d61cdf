"""Train PPO on any environment by name: PointMass (default), a Gymnasium id, mjlab or your own.

python examples/train_ppo.py --env.name HalfCheetah-v5     # settings from PRESETS, each can be overridden
python examples/train_ppo.py --resume runs/...             # continue, bit for bit
"""

import torch
from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import QUADRUPED, QUADRUPED_TERRAIN, PPOConfig, RunConfig, parse_cli
from edenrl.distributed import num_iterations
from edenrl.envs import action_box, wrap_env
from edenrl.modules import MirrorAugmentation, observation_groups, update_normalization, value_critic
from edenrl.objectives import GAE, PPOLoss
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

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line.
SMALL = dict(actor_hidden=(64, 64), critic_hidden=(64, 64), clip_value=False)
FEW_ENVS = SMALL | dict(
    steps_per_env=128, num_minibatches=8, epochs=10, lr=3e-4, lr_schedule="linear", critic_coeff=0.5,
    entropy_coeff=0.0, max_grad_norm=0.8, init_std=0.37, activation="tanh", normalize_advantage="minibatch",
)  # fmt: skip
SHORT = dict(total_frames=200_000, env=dict(num_envs=16, reward_scale=0.1), algorithm=FEW_ENVS)
PRESETS = {
    "PointMass": dict(
        total_frames=1_000_000,
        env=dict(kwargs=dict(success_bonus=50.0), reward_scale=0.1),
        algorithm=SMALL,
        evaluation=dict(num_episodes=128),
    ),
    "HalfCheetah-v5": dict(total_frames=1_000_000, env=dict(num_envs=16, reward_scale=0.1), algorithm=FEW_ENVS),
    "Pendulum-v1": SHORT | dict(algorithm=FEW_ENVS | dict(gamma=0.95, init_std=1.0, lr=1e-3)),
    "InvertedPendulum-v5": SHORT,
    "CartPole-v1": SHORT,
    "Quadruped": QUADRUPED,
    "QuadrupedTerrain": QUADRUPED_TERRAIN,
}


class Train(RunConfig):
    """Proximal policy optimization; a table of metrics, checkpoints and a config.json end up in the run directory."""

    algorithm: PPOConfig = Field(default_factory=PPOConfig)
    """PPO."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    algo, device = cfg.algorithm, setup(cfg)

    env = build_env(cfg, device)
    policy = make_policy(cfg, env).to(device)
    critic = value_critic(
        observation_groups(env.observation_spec, algo.critic_groups),
        hidden=algo.critic_hidden,
        activation=algo.activation,
        normalize=algo.normalize_observations,
    ).to(device)

    whole = algo.normalize_advantage == "rollout"
    gae = GAE(gamma=algo.gamma, lmbda=algo.lmbda, value_network=critic, average_gae=whole)
    loss = PPOLoss(
        policy,
        critic,
        clip_epsilon=algo.clip_epsilon,
        entropy_coeff=algo.entropy_coeff,
        critic_coeff=algo.critic_coeff,
        clip_value=algo.clip_value,
        action_bound_coeff=algo.action_bound_coeff,
        normalize_advantage=algo.normalize_advantage == "minibatch",
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
        dict(policy=policy, critic=critic, optimizer=optimizer, step=step, collector=collector),
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
            gae(rollout)
            data, metrics = augment(rollout.exclude("next", "collector").reshape(-1)), []
            for _ in range(algo.epochs):
                for batch in data[torch.randperm(len(data), device=device)].split(len(data) // algo.num_minibatches):
                    losses = loss(batch)
                    metrics.append({**losses, **step(losses)})
            # After the update, so that the policy that was optimized is the one that acted.
            update_normalization(policy, rollout)
            update_normalization(critic, rollout)
            run.log(average(metrics), rollout_metrics(rollout, action_box(env)), {"skipped_updates": step.skipped})
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
