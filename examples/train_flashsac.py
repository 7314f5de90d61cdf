"""Train FlashSAC, off-policy, on any environment by name: PointMass, a Gymnasium id, mjlab or your own.

python examples/train_flashsac.py --profile cpu --env.name HalfCheetah-v5     # small enough for one core
python examples/train_flashsac.py --env.name mjlab:TASK --env.num_envs 1024 --total_frames 50e6 --device cuda
"""

from itertools import islice

import torch
from torchrl.envs import ActionScaling, Compose

from edenrl.collectors import NStepReplayBuffer, RepeatedNoise, RewardNormalizer, exploring_policy, make_collector
from edenrl.config import FLASHSAC_PROFILES, FlashSACRunConfig, parse_cli
from edenrl.distributed import num_iterations
from edenrl.envs import action_box, wrap_env
from edenrl.modules import average_batch_statistics, flash_actor, flash_critic, observation_groups, unit_norm_hook
from edenrl.objectives import FlashSACLoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import (
    Run,
    average,
    build_env,
    collector_options,
    evaluate_run,
    rollout_metrics,
    run_script,
    setup,
    speedups,
)

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line.
PRESETS = {
    "HalfCheetah-v5": dict(total_frames=300_000, env=dict(num_envs=16)),
    "Pendulum-v1": dict(total_frames=20_000, env=dict(num_envs=4)),
    "InvertedPendulum-v5": dict(total_frames=20_000, env=dict(num_envs=4)),
    "PointMass": dict(
        total_frames=100_000, env=dict(num_envs=16, kwargs=dict(success_bonus=50.0)), evaluation=dict(num_episodes=128)
    ),
    "Quadruped": dict(total_frames=300_000, env=dict(num_envs=16), evaluation=dict(num_episodes=64)),
}


class Train(FlashSACRunConfig):
    """FlashSAC; a table of metrics, checkpoints and a config.json end up in the run directory."""


def make_policy(cfg: Train, env):
    """The actor for an environment; evaluation rebuilds it from a run's config.json with this."""
    algo = cfg.algorithm
    groups = observation_groups(env.observation_spec, algo.actor_groups)
    return flash_actor(groups, env.action_spec_unbatched, hidden_dim=algo.actor_dim, num_blocks=algo.actor_blocks)


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS, profiles=FLASHSAC_PROFILES)
    algo, device, num_envs = cfg.algorithm, setup(cfg), cfg.env.num_envs
    precision, compiled = speedups(algo.precision, algo.compile, device)

    env = build_env(cfg, device)
    policy = make_policy(cfg, env).to(device)
    groups = observation_groups(env.observation_spec, algo.critic_groups)
    critic = flash_critic(
        groups,
        env.action_spec_unbatched.shape[-1],
        hidden_dim=algo.critic_dim,
        num_blocks=algo.critic_blocks,
        num_bins=algo.num_bins,
        min_value=-algo.max_value,
        max_value=algo.max_value,
    ).to(device)
    loss = FlashSACLoss(
        policy,
        critic,
        gamma=algo.gamma,
        tau=algo.tau,
        alpha_init=algo.alpha_init,
        target_sigma=algo.target_sigma,
        target_entropy=algo.target_entropy,
        bc_coeff=algo.bc_coeff,
    ).to(device)

    low, high = action_box(env)
    # The buffer holds actions in the environment's units, the networks see them in [-1, 1].
    transforms = [ActionScaling(loc=(low + high) / 2, scale=(high - low) / 2, in_keys_inv=[])]
    if algo.normalize_rewards:
        transforms.append(RewardNormalizer(num_envs, algo.gamma, algo.max_value))
    replay = NStepReplayBuffer(
        algo.buffer_size,
        n_steps=algo.n_steps,
        gamma=algo.gamma,
        batch_size=algo.batch_size,
        observations=list(dict.fromkeys([*policy.module[0].in_keys, *groups])),
        observation_dtype=getattr(torch, algo.buffer_dtype),
        device=device if algo.buffer_dir is None else "cpu",
        memmap=algo.buffer_dir,
        transform=Compose(*transforms).to(device),
        save_data=algo.save_buffer,
    )

    frames = num_envs * algo.steps_per_env
    iterations = cfg.max_iterations or num_iterations(cfg.total_frames, frames)
    warmup = algo.warmup_frames(iterations * frames)
    updates = max(iterations * algo.steps_per_env - warmup // num_envs, 1) * algo.updates_per_step

    def make_step(group, network, every=1):
        optimizer = make_optimizer("adam", loss.parameter_groups()[group], lr=algo.lr)
        unit_norm_hook(optimizer, network)  # weights and norms back onto their spheres, after each step
        schedule = make_lr_schedule(algo.lr_schedule, optimizer, max(updates // every, 1), **algo.schedule_options())
        options = dict(max_grad_norm=algo.max_grad_norm, on_nonfinite=algo.on_nonfinite, amp_dtype=precision)
        return GradientStep(loss, optimizer, lr_schedule=schedule, **options)

    actor_step, critic_step = make_step("policy", policy, algo.actor_delay), make_step("critic", critic)
    alpha_step = make_step("temperature", torch.nn.Identity(), algo.actor_delay)
    if compiled:
        for network in (policy.module[0], critic, loss.target_critic):
            network.module.trunk.compile()
    noise = RepeatedNoise(low, high, exponent=algo.noise_exponent, longest=algo.noise_longest).to(device)
    training_env = wrap_env(env, action_mode="squash", reward_scale=cfg.env.reward_scale)
    acting = exploring_policy(policy, noise)
    collector = make_collector(training_env, acting, frames_per_batch=num_envs, **collector_options(cfg))

    steps = dict(actor_step=actor_step, alpha_step=alpha_step, critic_step=critic_step)
    optimizers = {name.replace("step", "optimizer"): step.optimizers["optimizer"] for name, step in steps.items()}
    run = Run(
        cfg,
        algo.name,
        dict(policy=policy, loss=loss, replay=replay, collector=collector, **optimizers, **steps),
        iterations=iterations,
        frames_per_iteration=frames,
        evaluate=lambda: evaluate_run(cfg, policy, device),
    )
    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            left = run.remaining * algo.steps_per_env * algo.updates_per_step
            for step, every in ((actor_step, algo.actor_delay), (alpha_step, algo.actor_delay), (critic_step, 1)):
                step.restart_schedule(algo.lr_schedule, algo.lr, left // every, **algo.schedule_options())
        noise.uniform.fill_(critic_step.updates == 0)
        collected = iter(collector)
        for _ in run:
            rollouts, actor_metrics, critic_metrics = [], [], []
            for rollout in islice(collected, algo.steps_per_env):
                replay.extend(rollout)
                rollouts.append(rollout.select("action", "next"))
                if len(replay) < warmup or not replay.can_sample():
                    continue
                noise.uniform.fill_(False)
                for _ in range(algo.updates_per_step):
                    batch = replay.sample().to(device)
                    if critic_step.updates % algo.actor_delay == 0:
                        with actor_step.autocast():
                            losses = loss.actor_loss(batch)
                            alpha_losses = loss.temperature_loss(batch, losses.pop("log_prob"))
                        actor_metrics.append(
                            {**losses, **alpha_losses, **alpha_step(alpha_losses), **actor_step(losses)}
                        )
                    with critic_step.autocast():
                        losses = loss.critic_loss(batch)
                    critic_metrics.append({**losses, **critic_step(losses)})
                    loss.update_target()
            average_batch_statistics(policy, critic, loss.target_critic)
            metrics = [average(rows) for rows in (actor_metrics, critic_metrics) if rows]
            data = rollout_metrics(torch.cat(rollouts, 1), (low, high))
            run.log(*metrics, data, {"replay_size": len(replay), "skipped_updates": critic_step.skipped})
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
