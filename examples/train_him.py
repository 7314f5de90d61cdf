"""Train HIM on the built-in robot (default) or any environment that publishes a history of frames.

python examples/train_him.py                               # Quadruped; settings from PRESETS, each can be overridden
python examples/train_him.py --env.name my_package:make_env --algorithm.history_layout newest_first
"""

import torch
from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import QUADRUPED_HIM, EnvConfig, HIMConfig, RunConfig, parse_cli
from edenrl.distributed import num_iterations
from edenrl.envs import action_box, wrap_env
from edenrl.modules import HIMLayout, MirrorAugmentation, him_actor, observation_groups, value_critic
from edenrl.objectives import GAE, HIMEstimatorLoss, HIMLoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import Run, average, build_env, collector_options, evaluate_run, rollout_metrics, run_script, setup

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line. Those
# of the courses are the flat ground's, untuned; the robot is blind there.
PRESETS = {"Quadruped": QUADRUPED_HIM, "QuadrupedTerrain": QUADRUPED_HIM}


class Train(RunConfig):
    """Hybrid internal model; a table of metrics, checkpoints and a config.json end up in the run directory."""

    env: EnvConfig = Field(default_factory=lambda: EnvConfig(name="Quadruped", num_envs=64))
    """Environment."""
    algorithm: HIMConfig = Field(default_factory=HIMConfig)
    """PPO, the estimator and the symmetry."""


def layout_of(cfg: Train, env):
    """Where the current frame and the velocity stand in the environment's groups."""
    algo = cfg.algorithm
    return HIMLayout.of(env, *algo.actor_groups, *algo.critic_groups, order=algo.history_layout)


def make_policy(cfg: Train, env):
    """The actor for an environment; evaluation rebuilds it from a run's config.json with this."""
    squash = cfg.env.action_mode == "squash"
    return him_actor(layout_of(cfg, env), env.action_spec_unbatched, squash=squash, **cfg.algorithm.network_options())


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    algo, device = cfg.algorithm, setup(cfg)

    env = build_env(cfg, device)
    layout, (history, critic_group) = layout_of(cfg, env), (*algo.actor_groups, *algo.critic_groups)
    policy = make_policy(cfg, env).to(device)
    groups = observation_groups(env.observation_spec, algo.critic_groups)
    critic = value_critic(groups, hidden=algo.critic_hidden, activation=algo.activation, normalize=False).to(device)

    whole = algo.normalize_advantage == "rollout"
    gae = GAE(gamma=algo.gamma, lmbda=algo.lmbda, value_network=critic, average_gae=whole)
    mirrors = getattr(env, "mirrors", {}) if algo.symmetry else None
    augment = MirrorAugmentation(mirrors, policy, critic, log_prob=algo.mirrored_log_prob)
    loss = HIMLoss(
        policy,
        critic,
        mirrors=mirrors,
        symmetry_scale=algo.symmetry_scale,
        clip_epsilon=algo.clip_epsilon,
        entropy_coeff=algo.entropy_coeff,
        critic_coeff=algo.critic_coeff,
        clip_value=algo.clip_value,
        action_bound_coeff=algo.action_bound_coeff,
        normalize_advantage=algo.normalize_advantage == "minibatch",
        functional=False,
    )
    estimator_loss = HIMEstimatorLoss(policy.module[0].module.estimator, **algo.estimator_options())
    estimator_loss.set_keys(history=history, critic=critic_group)

    frames = cfg.env.num_envs * algo.steps_per_env
    iterations, updates = num_iterations(cfg.total_frames, frames), algo.epochs * algo.num_minibatches
    trained = [p for group in loss.parameter_groups().values() for p in group]
    optimizer = make_optimizer(algo.optimizer, trained, lr=algo.lr)
    estimator_optimizer = make_optimizer(algo.optimizer, estimator_loss.parameters(), lr=algo.lr)
    schedule = make_lr_schedule(algo.lr_schedule, optimizer, iterations * updates, **algo.schedule_options())
    step = GradientStep(
        loss, optimizer, max_grad_norm=algo.max_grad_norm, lr_schedule=schedule, on_nonfinite=algo.on_nonfinite
    )
    estimator_step = GradientStep(
        estimator_loss, estimator_optimizer, max_grad_norm=algo.estimator_max_grad_norm, on_nonfinite=algo.on_nonfinite
    )
    training_env = wrap_env(env, action_mode=cfg.env.action_mode, reward_scale=cfg.env.reward_scale)
    collector = make_collector(training_env, policy, frames_per_batch=frames, **collector_options(cfg))

    parts = dict(policy=policy, critic=critic, optimizer=optimizer, estimator_optimizer=estimator_optimizer)
    run = Run(
        cfg,
        algo.name,
        parts | dict(step=step, estimator_step=estimator_step, collector=collector),
        iterations=iterations,
        frames_per_iteration=frames,
        evaluate=lambda: evaluate_run(cfg, policy, device),
    )
    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            step.restart_schedule(algo.lr_schedule, algo.lr, run.remaining * updates, **algo.schedule_options())
        rollouts, checked = iter(collector), False
        for _ in run:
            rollout = next(rollouts)
            checked = checked or layout.check(rollout[history], rollout[critic_group])
            with torch.no_grad():  # before anything is trained on it
                fresh = {f"fresh/{name}": value for name, value in estimator_loss(rollout).items()}
            doubled = gae(augment(rollout))
            kept = doubled.exclude("next", "collector").set("next", doubled["next"].select(critic_group))
            data, metrics = kept.reshape(-1), []
            for _ in range(algo.epochs):
                for batch in data[torch.randperm(len(data), device=device)].split(len(data) // algo.num_minibatches):
                    losses = loss(batch)
                    metrics.append({**losses, **step(losses)})
                    for group in estimator_optimizer.param_groups:  # at the policy's rate, also while that adapts
                        group["lr"] = optimizer.param_groups[0]["lr"]
                    losses = estimator_loss(batch)
                    metrics[-1] |= {**losses, "grad_norm_estimator": estimator_step(losses)["grad_norm_estimator"]}
            skipped = {"skipped_updates": step.skipped + estimator_step.skipped}
            run.log(average(metrics), fresh, rollout_metrics(rollout, action_box(env)), skipped)
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
