"""Train PPO with SimBaV2 networks and Muon on any environment by name: PointMass, a Gymnasium id, mjlab or your own.

python examples/train_simba.py --env.name HalfCheetah-v5     # settings from PRESETS, each can be overridden
python examples/train_simba.py --algorithm.group_hidden.scan 512,256 --algorithm.optimizer adam
"""

import torch
from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import RunConfig, SimbaPPOConfig, parse_cli
from edenrl.distributed import num_iterations
from edenrl.envs import action_box, wrap_env
from edenrl.modules import observation_groups, post_step_hook, simba_actor, simba_critic, update_normalization
from edenrl.objectives import GAE, PPOLoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import Run, average, build_env, collector_options, evaluate_run, rollout_metrics, run_script, setup

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line.
SMALL = dict(actor_dim=128, critic_dim=128, critic_blocks=1, expansion=2, encoder_hidden=None, clip_value=False)
FEW_ENVS = SMALL | dict(
    steps_per_env=128, num_minibatches=4, epochs=10, lr=1e-3, lr_schedule="linear", muon_adjust_lr="match_rms_adamw",
    critic_coeff=0.5, max_grad_norm=0.8, init_std=0.37, normalize_advantage="minibatch",
)  # fmt: skip
PRESETS = {
    "PointMass": dict(
        total_frames=1_000_000,
        env=dict(kwargs=dict(success_bonus=50.0), reward_scale=0.1),
        algorithm=SMALL,
        evaluation=dict(num_episodes=128),
    ),
    "HalfCheetah-v5": dict(total_frames=1_000_000, env=dict(num_envs=16, reward_scale=0.02), algorithm=FEW_ENVS),
}


class Train(RunConfig):
    """PPO with SimBaV2 networks; a table of metrics, checkpoints and a config.json end up in the run directory."""

    algorithm: SimbaPPOConfig = Field(default_factory=SimbaPPOConfig)
    """PPO, its networks and its optimizer."""


def network(cfg: Train, env, part):
    """The groups that the actor or the critic reads, and the options of its network."""
    algo = cfg.algorithm
    groups = observation_groups(env.observation_spec, algo.actor_groups if part == "actor" else algo.critic_groups)
    return groups, algo.network_options(part, groups, observation_groups(env.observation_spec))


def make_policy(cfg: Train, env):
    """The actor for an environment; evaluation rebuilds it from a run's config.json with this."""
    groups, options = network(cfg, env, "actor")
    squash = cfg.env.action_mode == "squash"
    return simba_actor(groups, env.action_spec_unbatched, init_std=cfg.algorithm.init_std, squash=squash, **options)


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    algo, device = cfg.algorithm, setup(cfg)

    env = build_env(cfg, device)
    policy = make_policy(cfg, env).to(device)
    groups, options = network(cfg, env, "critic")
    critic = simba_critic(groups, **options).to(device)

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

    frames = cfg.env.num_envs * algo.steps_per_env
    iterations, updates = num_iterations(cfg.total_frames, frames), algo.epochs * algo.num_minibatches
    # The loss itself, not its parameters: Muon needs the modules to tell hidden weights from others.
    optimizer = make_optimizer(algo.optimizer, loss, lr=algo.lr, **algo.optimizer_options())
    post_step_hook(optimizer, policy, critic)  # every weight back onto the sphere, after each step
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
            data, metrics = rollout.exclude("next", "collector").reshape(-1), []
            for _ in range(algo.epochs):
                for batch in data[torch.randperm(frames, device=device)].split(frames // algo.num_minibatches):
                    losses = loss(batch)
                    metrics.append({**losses, **step(losses)})
            # After the update, so that the policy that was optimized is the one that acted.
            update_normalization(policy, rollout)
            update_normalization(critic, rollout)
            run.log(average(metrics), rollout_metrics(rollout, action_box(env)), {"skipped_updates": step.skipped})
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
