"""Train PPO with an adversarial motion prior: a trotting quadruped (default), or any environment with amp_window.

python examples/train_amp.py                                    # leaves the trot in the run directory
python examples/train_amp.py --env.name my_robots:walker --algorithm.motion walks.npz
"""

import torch
from pydantic import Field

from edenrl import distributed
from edenrl.collectors import WindowBuffer, load_motion, make_collector
from edenrl.config import AMPConfig, EnvConfig, RunConfig, parse_cli, presets
from edenrl.envs.quadruped import save_trot_clips
from edenrl.modules import AMPReward, Discriminator, MirrorAugmentation, SaturationWatch, update_normalization
from edenrl.objectives import GAE, AMPLoss, PPOLoss, explained_variance
from edenrl.optim import GradientStep, make_optimizer
from edenrl.training import Run, follow_rate, make_critic, make_policy, minibatches, run_script, symmetry_mirrors


class Train(RunConfig):
    """Adversarial motion prior. The run directory receives checkpoints, a config.json and a table of metrics."""

    env: EnvConfig = Field(default_factory=lambda: EnvConfig(name="Quadruped"))
    """Environment."""
    algorithm: AMPConfig = Field(default_factory=AMPConfig)
    """PPO and the motion prior."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.AMP)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        own = dict(seed=run.seed, device=run.device)
        motion = run.keep(motion=load_motion(algo.motion, cfg.env.name, algo.num_frames, **own))
        env = run.env()
        motion.match(env, resample=algo.resample)
        policy, critic = run.keep(policy=make_policy(cfg, env), critic=make_critic(cfg, env))
        gae = GAE(value_network=critic, **algo.gae_options())
        loss = PPOLoss(policy, critic, functional=False, **algo.loss_options())
        augment = MirrorAugmentation(symmetry_mirrors(cfg, env), policy, critic)
        step = run.gradient_step(loss)
        with torch.random.fork_rng():  # PPO draws the same random numbers as in a run without a prior
            prior = run.keep(discriminator=Discriminator(motion.frame_dim, **algo.discriminator_options()))
        add_style = AMPReward(prior, **algo.style_options(env))
        returns = run.keep(style_returns=add_style.episode_returns())
        prior_loss = AMPLoss(prior, grad_penalty_coeff=algo.grad_penalty_coeff)
        decayed = prior.optimizer_groups(algo.trunk_weight_decay, algo.head_weight_decay)
        optimizer = run.keep(discriminator_optimizer=make_optimizer("adam", decayed, lr=algo.lr))
        prior_step = run.keep(discriminator_step=GradientStep(prior_loss, optimizer, on_nonfinite=algo.on_nonfinite))
        size = cfg.frames_per_rollout // algo.num_minibatches  # windows per discriminator step
        warn_if_saturated = SaturationWatch()
        windows = run.keep(windows=WindowBuffer(algo.window_buffer_size, motion.window_dim, size, **own))
        collector = run.keep(collector=make_collector(run.training_env(env), policy, **run.collector_options()))
        run.begin()  # creates the run directory, or restores a checkpoint
        if algo.motion is None and run.leads:
            save_trot_clips(run.dir / "trot.npz", standing=False)
        for rollout in run.rollouts(collector):  # [environments, steps]
            gae(add_style(rollout))
            run.log({"explained_variance": explained_variance(rollout["state_value"], rollout["value_target"])})
            data = augment(rollout.exclude("next", "collector").reshape(-1))
            for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                losses = loss(batch)
                run.record(losses, step(losses))
            update_normalization(torch.nn.ModuleList([policy, critic]), rollout)
            # Statistics first: the next rollout is then scored with the same statistics as the steps below use.
            seen = windows.add_rollout(rollout)
            prior.update_normalization(seen, motion.sample(len(seen)).flatten(1))
            follow_rate(prior_step, step)
            due = algo.discriminator_steps(step.updates)
            ready = min(distributed.exchange(len(windows))) > 0  # every process has windows
            for _ in range(due if ready else 0):
                losses = prior_loss(windows.sample().set("expert_window", motion.sample(size).flatten(1)))
                run.record(losses, grad_norm_discriminator=prior_step(losses)["grad_norm_discriminator"])
            warn_if_saturated(run.mean("accuracy"))
            run.log(add_style.metrics(rollout), returns(rollout), {"motion_distance": motion.distance(seen).mean()})


if __name__ == "__main__":
    run_script(main)
