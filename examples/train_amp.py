"""Train PPO with an adversarial motion prior: the quadruped after a trot (default), or any environment with amp_window.

python examples/train_amp.py                                    # leaves the trot in the run directory
python examples/train_amp.py --env.name my_robots:walker --algorithm.motion walks.npz
"""

import tempfile

import torch
from pydantic import Field

from edenrl import distributed
from edenrl.collectors import MotionDataset, WindowBuffer, make_collector
from edenrl.config import QUADRUPED, QUADRUPED_TERRAIN, AMPConfig, EnvConfig, RunConfig, parse_cli, with_groups
from edenrl.envs import action_box, wrap_env
from edenrl.envs.quadruped import save_trot_clips
from edenrl.modules import AMPReward, Discriminator, MirrorAugmentation, SaturationWatch, update_normalization
from edenrl.objectives import GAE, AMPLoss, PPOLoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import build_env, collector_options, evaluate_run, load_weights, make_critic, make_policy
from edenrl.training.run import Run, average, rollout_metrics, run_script, setup

PRESETS = {"Quadruped": with_groups(QUADRUPED, "amp"), "QuadrupedTerrain": with_groups(QUADRUPED_TERRAIN, "amp")}


class Train(RunConfig):
    """PPO with an adversarial motion prior; metrics, checkpoints and a config.json end up in the run directory."""

    env: EnvConfig = Field(default_factory=lambda: EnvConfig(name="Quadruped"))
    """Environment."""
    algorithm: AMPConfig = Field(default_factory=AMPConfig)
    """PPO and the motion prior."""


def load_motion(cfg, **options):
    """The clips of --algorithm.motion; without it a trot, for the robot that has one."""
    if cfg.algorithm.motion is not None:
        return MotionDataset(cfg.algorithm.motion, cfg.algorithm.num_frames, **options)
    if cfg.env.name.lower() not in map(str.lower, PRESETS):
        raise ValueError(f"There is no built-in motion for {cfg.env.name}: set --algorithm.motion FILE.npz.")
    with tempfile.TemporaryDirectory() as folder:
        save_trot_clips(f"{folder}/trot.npz", standing=False)  # told to stand, the quadruped closes its gate
        return MotionDataset(f"{folder}/trot.npz", cfg.algorithm.num_frames, **options)


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    algo, device = cfg.algorithm, setup(cfg)

    own = dict(seed=cfg.seed + distributed.rank(), device=device)
    motion = load_motion(cfg, **own)
    env = build_env(cfg, device)
    motion.match(env, resample=algo.resample)
    policy = make_policy(cfg, env).to(device)
    critic = make_critic(cfg, env).to(device)

    whole, each = (algo.normalize_advantage == name for name in ("rollout", "minibatch"))
    gae = GAE(gamma=algo.gamma, lmbda=algo.lmbda, value_network=critic, average_gae=whole)
    loss = PPOLoss(
        policy, critic, clip_epsilon=algo.clip_epsilon, clip_value=algo.clip_value, entropy_coeff=algo.entropy_coeff,
        critic_coeff=algo.critic_coeff, action_bound_coeff=algo.action_bound_coeff, normalize_advantage=each,
        functional=False,
    )  # fmt: skip
    augment = MirrorAugmentation(getattr(env, "mirrors", {}) if algo.symmetry else None, policy, critic)
    frames = cfg.env.num_envs * algo.steps_per_env
    iterations = distributed.num_iterations(cfg.total_frames, frames)
    updates, minibatch = algo.epochs * algo.num_minibatches, frames // algo.num_minibatches
    optimizer = make_optimizer(algo.optimizer, loss.parameters(), lr=algo.lr)
    schedule = make_lr_schedule(algo.lr_schedule, optimizer, iterations * updates, **algo.schedule_options())
    step = GradientStep(
        loss, optimizer, max_grad_norm=algo.max_grad_norm, lr_schedule=schedule, on_nonfinite=algo.on_nonfinite
    )

    # The prior draws from generators of its own: where no gate opens, PPO remains what it is without one.
    with torch.random.fork_rng():
        prior = Discriminator(motion.frame_dim, algo.num_frames, algo.discriminator_hidden).to(device)
    add_style = AMPReward(prior, coeff=algo.style_coeff, scale=algo.style_scale)
    prior_loss, saturated = AMPLoss(prior, grad_penalty_coeff=algo.grad_penalty_coeff), SaturationWatch()
    decayed = prior.optimizer_groups(algo.trunk_weight_decay, algo.head_weight_decay)
    prior_optimizer = make_optimizer("adam", decayed, lr=algo.lr)
    prior_step = GradientStep(prior_loss, prior_optimizer, on_nonfinite=algo.on_nonfinite)
    buffer = WindowBuffer(algo.window_buffer_size, motion.window_dim, minibatch, **own)

    training_env = wrap_env(env, action_mode=cfg.env.action_mode, reward_scale=cfg.env.reward_scale)
    collector = make_collector(training_env, policy, frames_per_batch=frames, **collector_options(cfg))
    parts = dict(policy=policy, critic=critic, optimizer=optimizer, step=step, collector=collector)
    parts |= dict(discriminator=prior, discriminator_optimizer=prior_optimizer, discriminator_step=prior_step)
    parts |= dict(motion=motion, windows=buffer)
    run = Run(
        cfg, algo.name, parts, iterations=iterations, frames_per_iteration=frames,
        evaluate=lambda: evaluate_run(cfg, policy, device),
    )  # fmt: skip
    if algo.warm_start is not None and run.checkpoints.latest() is None:
        load_weights(dict(policy=policy, critic=critic), algo.warm_start, "latest")
    with run:
        if algo.motion is None and distributed.rank() == 0:
            save_trot_clips(run.dir / "trot.npz", standing=False)
        if cfg.resume and cfg.resume_schedule == "restart":
            step.restart_schedule(algo.lr_schedule, algo.lr, run.remaining * updates, **algo.schedule_options())
        rollouts = iter(collector)
        for _ in run:
            rollout = add_style(next(rollouts))
            gae(rollout)
            data, metrics, scores = augment(rollout.exclude("next", "collector").reshape(-1)), [], []
            for _ in range(algo.epochs):
                for batch in data[torch.randperm(len(data), device=device)].split(len(data) // algo.num_minibatches):
                    losses = loss(batch)
                    metrics.append({**losses, **step(losses)})
            update_normalization(torch.nn.ModuleList([policy, critic]), rollout)
            # Statistics before the steps: the next rollout is scored with those that the discriminator last saw.
            seen = buffer.add_rollout(rollout)
            prior.update_normalization(seen, motion.sample(len(seen)).flatten(1))
            for group in prior_optimizer.param_groups:
                group["lr"] = optimizer.param_groups[0]["lr"]
            every = algo.discriminator_interval  # steps that fell due before the first gate opened are not made up for
            due = step.updates // every - (step.updates - updates) // every
            for _ in range(due if min(distributed.exchange(len(buffer))) else 0):
                windows = buffer.sample().set("expert_window", motion.sample(minibatch).flatten(1))
                losses = prior_loss(windows)
                scores.append({**prior_step(losses), **losses})
            judged = average(scores) if scores else {}
            saturated(float(judged.get("accuracy", "nan")))
            style = {**add_style.metrics(rollout), "motion_distance": motion.distance(seen).mean()}
            shown = rollout_metrics(rollout, action_box(env)), {"skipped_updates": step.skipped}
            run.log(judged, average(metrics), style, *shown)  # in this order: loss and lr are PPO's
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
