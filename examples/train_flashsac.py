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
from edenrl.training import Run, average, build_env, collector_options, evaluate_run, rollout_metrics, run_script, setup
from edenrl.training import check_precision as compare_precisions
from edenrl.training import speedups as usable_speedups

# Lengths and sizes by environment (docs/pages/results.md); each can be overridden on the command line.
PRESETS = {
    # A shorter horizon lets half of the seeds dive forward and then run on their backs.
    "HalfCheetah-v5": dict(total_frames=300_000, algorithm=dict(gamma=0.995, updates_per_step=4)),
    "Pendulum-v1": dict(total_frames=12_000, env=dict(num_envs=4), algorithm=dict(steps_per_env=50)),
    "InvertedPendulum-v5": dict(total_frames=12_000, env=dict(num_envs=4), algorithm=dict(steps_per_env=50)),
    "PointMass": dict(total_frames=100_000, env=dict(num_envs=16, kwargs=dict(success_bonus=50.0))),
    "Quadruped": dict(total_frames=300_000, algorithm=dict(actor_groups=("policy",), critic_groups=("critic",))),
}


class Train(FlashSACRunConfig):
    """FlashSAC; a table of metrics, checkpoints and a config.json end up in the run directory."""


def make_policy(cfg: Train, env):
    """The actor for an environment; evaluation rebuilds it from a run's config.json with this."""
    groups = observation_groups(env.observation_spec, cfg.algorithm.actor_groups)
    return flash_actor(groups, env.action_spec_unbatched, **cfg.algorithm.network_options("actor"))


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS, profiles=FLASHSAC_PROFILES)
    algo, device, num_envs = cfg.algorithm, setup(cfg), cfg.env.num_envs
    cfg.check_sizes(device.type)
    precision, compiled = usable_speedups(algo.precision, algo.compile, device)

    env = build_env(cfg, device)
    policy = make_policy(cfg, env).to(device)
    low, high = action_box(env)
    groups = observation_groups(env.observation_spec, algo.critic_groups)
    critic = flash_critic(groups, len(low), **algo.network_options("critic")).to(device)
    loss = FlashSACLoss(policy, critic, **algo.loss_options()).to(device)
    # The buffer holds actions in the environment's units, the networks see them in [-1, 1].
    transforms = [ActionScaling(loc=(low + high) / 2, scale=(high - low) / 2, in_keys_inv=[])]
    if algo.normalize_rewards:
        transforms.append(RewardNormalizer(num_envs, algo.gamma, algo.max_value))
    replay_device = device if algo.buffer_dir is None else torch.device("cpu")
    replay = NStepReplayBuffer(
        observations=list(dict.fromkeys([*policy.module[0].in_keys, *groups])),
        observation_dtype=getattr(torch, algo.buffer_dtype),
        device=replay_device,
        transform=Compose(*transforms).to(replay_device),
        **algo.replay_options(),
    )

    frames = num_envs * algo.steps_per_env
    iterations = cfg.max_iterations or num_iterations(cfg.total_frames, frames)
    warmup = algo.warmup_frames(iterations * frames)
    updates = max(iterations * algo.steps_per_env - warmup // num_envs, 1) * algo.updates_per_step
    every, steps = dict(policy=algo.actor_delay, temperature=algo.actor_delay, critic=1), {}
    options = dict(max_grad_norm=algo.max_grad_norm, on_nonfinite=algo.on_nonfinite, amp_dtype=precision)
    for part, parameters in loss.parameter_groups().items():
        optimizer = make_optimizer("adam", parameters, lr=algo.lr)
        unit_norm_hook(optimizer, *{"policy": [policy], "critic": [critic]}.get(part, []))  # back onto the spheres
        total = max(updates // every[part], 1)
        schedule = make_lr_schedule(algo.lr_schedule, optimizer, total, **algo.schedule_options())
        steps[part] = GradientStep(loss, optimizer, lr_schedule=schedule, **options)
    if compiled:
        loss.compile_networks()
    noise = RepeatedNoise(low, high, exponent=algo.noise_exponent, longest=algo.noise_longest).to(device)
    training_env = wrap_env(env, action_mode="squash", reward_scale=cfg.env.reward_scale)
    acting = exploring_policy(policy, noise)
    collector = make_collector(training_env, acting, frames_per_batch=num_envs, **collector_options(cfg))

    state = dict(policy=policy, loss=loss, replay=replay, collector=collector)
    for part, step in steps.items():
        state |= {f"{part}_step": step, f"{part}_optimizer": step.optimizers["optimizer"]}
    length = dict(iterations=iterations, frames_per_iteration=frames)
    run = Run(cfg, algo.name, state, **length, evaluate=lambda: evaluate_run(cfg, policy, device))
    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            left = run.remaining * algo.steps_per_env * algo.updates_per_step
            for part, step in steps.items():
                step.restart_schedule(algo.lr_schedule, algo.lr, left // every[part], **algo.schedule_options())
        noise.uniform.fill_(steps["critic"].updates == 0)
        warmup *= not (steps["critic"].updates and len(replay))  # a longer run does not warm up again
        collected = iter(collector)
        for _ in run:
            rollouts, actor_metrics, critic_metrics = [], [], []
            for rollout in islice(collected, algo.steps_per_env):
                replay.extend(rollout)
                rollouts.append(rollout.select("action", "next"))
                ready = len(replay) >= warmup and replay.can_sample()
                noise.uniform.mul_(not ready)
                for _ in range(algo.updates_per_step if ready else 0):
                    batch = replay.sample().to(device)
                    if precision is not None and steps["critic"].updates == 0:
                        compare_precisions(loss, batch, precision)
                    if steps["critic"].updates % algo.actor_delay == 0:
                        with steps["policy"].autocast():
                            losses = loss.actor_loss(batch)
                            alpha_losses = loss.temperature_loss(batch, losses.pop("log_prob"))
                        steps["temperature"](alpha_losses)
                        actor_metrics.append({**losses, **alpha_losses, **steps["policy"](losses)})
                    with steps["critic"].autocast():
                        losses = loss.critic_loss(batch)
                    critic_metrics.append({**losses, **steps["critic"](losses)})
                    loss.update_target()
            average_batch_statistics(policy, critic, loss.target_critic)
            metrics = [average(rows) for rows in (actor_metrics, critic_metrics) if rows]
            data = rollout_metrics(torch.cat(rollouts, 1), (low, high))
            run.log(*metrics, data, {"replay_size": len(replay), "skipped_updates": steps["critic"].skipped})
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
