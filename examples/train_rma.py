"""Train RMA: a teacher with privileged information, and the history encoder and estimator that replace it.

python examples/train_rma.py                                  # HiddenPointMass; settings from PRESETS
python examples/train_rma.py --env.name QuadrupedTerrain
"""

import torch
from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import HIDDEN_POINT_MASS_RMA, QUADRUPED_TERRAIN_RMA, EnvConfig, RMAConfig, RunConfig, parse_cli
from edenrl.distributed import num_iterations
from edenrl.envs import action_box, wrap_env
from edenrl.modules import (
    MirrorAugmentation,
    RMAActor,
    observation_groups,
    rma_composition,
    rma_policy,
    update_normalization,
    value_critic,
)
from edenrl.objectives import GAE, LinearRamp, MirrorLoss, RMADaggerLoss, RMALoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer
from edenrl.training import Run, average, build_env, collector_options, evaluate_run, rollout_metrics, run_script, setup

# Settings by environment, found by measuring (docs/pages/results.md); each can be overridden on the command line.
PRESETS = dict.fromkeys(("QuadrupedTerrain", "Quadruped"), QUADRUPED_TERRAIN_RMA)
PRESETS["HiddenPointMass"] = HIDDEN_POINT_MASS_RMA


class Train(RunConfig):
    """Rapid motor adaptation; a table of metrics, checkpoints and a config.json end up in the run directory."""

    env: EnvConfig = EnvConfig(name="HiddenPointMass")
    """Environment."""
    algorithm: RMAConfig = Field(default_factory=RMAConfig)
    """RMA."""


def make_policy(cfg, env):
    """The deployed policy of a new actor, without privileged input: what is evaluated and exported."""
    widths, keys = cfg.algorithm.layout(observation_groups(env.observation_spec))
    num_actions = cfg.algorithm.num_actions(env.action_spec_unbatched, cfg.env.action_mode)
    actor = RMAActor(widths, num_actions, **cfg.algorithm.network_options())
    return rma_policy(actor, keys, latent="history", estimated=True)


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    algo, device = cfg.algorithm, setup(cfg)

    env = build_env(cfg, device)
    policy = make_policy(cfg, env).to(device)  # what will be deployed; the other two share its weights
    net = rma_composition(policy)
    teacher = rma_policy(net.actor, net.source)
    acting = rma_policy(net.actor, net.source, latent="switched", estimated=algo.train_with_estimated_states).to(device)
    privileged = tuple(dict.fromkeys(key for name, key in net.keys.items() if name != "history" or net.flat))
    critic_groups = observation_groups(env.observation_spec, algo.critic_groups or privileged)
    critic = value_critic(critic_groups, **algo.critic_options()).to(device)

    whole = algo.normalize_advantage == "rollout"
    gae = GAE(gamma=algo.gamma, lmbda=algo.lmbda, value_network=critic, average_gae=whole)
    ramp = LinearRamp(**algo.ramp_options()).to(device)
    loss = RMALoss(teacher, critic, ramp=ramp, functional=False, **algo.loss_options())
    dagger = RMADaggerLoss(teacher)
    mirrors = getattr(env, "mirrors", {})
    images = mirrors if algo.symmetry == "augment" else None
    augment = MirrorAugmentation(images, teacher, critic, also=[net.keys["history"]])  # which only the losses read
    mirror = MirrorLoss(teacher, mirrors, symmetry_coeff=algo.symmetry_coeff) if algo.symmetry == "loss" else None

    frames = cfg.env.num_envs * algo.steps_per_env
    iterations, updates = num_iterations(cfg.total_frames, frames), algo.epochs * algo.num_minibatches
    algo.check_length(iterations)
    trained = {**loss.parameter_groups(), **dagger.parameter_groups()}
    optimizer = make_optimizer(algo.optimizer, trained["policy"] + trained["critic"], lr=algo.lr)
    estimation = make_optimizer(algo.optimizer, trained["estimator"], lr=algo.estimator_lr)
    imitation = make_optimizer(algo.optimizer, trained["history_encoder"], lr=algo.lr)
    options = dict(max_grad_norm=algo.max_grad_norm, on_nonfinite=algo.on_nonfinite)
    schedule = make_lr_schedule(algo.lr_schedule, optimizer, iterations * updates, **algo.schedule_options())
    step = GradientStep(loss, dict(ppo=optimizer, estimator=estimation), lr_schedule=schedule, **options)
    imitate = GradientStep(dagger, imitation, **options)
    training_env = wrap_env(env, action_mode=cfg.env.action_mode, reward_scale=cfg.env.reward_scale)
    collector = make_collector(training_env, acting, frames_per_batch=frames, **collector_options(cfg))

    components = dict(policy=policy, critic=critic, ramp=ramp, step=step, imitate=imitate, collector=collector)
    components |= dict(optimizer=optimizer, estimation=estimation, imitation=imitation)
    length = dict(iterations=iterations, frames_per_iteration=frames)
    run = Run(cfg, algo.name, components, **length, evaluate=lambda: evaluate_run(cfg, policy, device))

    def minibatches(data):
        for _ in range(algo.epochs):
            yield from data[torch.randperm(len(data), device=device)].split(len(data) // algo.num_minibatches)

    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            step.restart_schedule(algo.lr_schedule, algo.lr, run.remaining * updates, **algo.schedule_options())
            imitation.param_groups[0]["lr"] = algo.lr  # of no schedule, and the checkpoint restored the old one
        rollouts = iter(collector)
        for iteration in run:
            by_history = (iteration + 1) % algo.dagger_update_freq == 0
            rma_composition(acting).use_history(by_history)
            rollout = next(rollouts)
            gae(rollout)
            # What has acted may read estimates: the KL divergence is to tell how far the update moves the teacher.
            with torch.no_grad():
                rollout.update(teacher.get_dist_params(rollout.select(*teacher.in_keys)).select("loc", "scale"))
            data, metrics, imitated = augment(rollout.exclude("next", "collector").reshape(-1)), [], []
            for batch in minibatches(data):
                losses = loss(batch) if mirror is None else loss(batch).update(mirror(batch))
                metrics.append({**losses, **step(losses)})
            ramp.advance()
            if by_history:
                for batch in minibatches(data):
                    losses = dagger(batch)
                    imitated.append({**losses, "grad_norm_history": imitate(losses)["grad_norm_history_encoder"]})
                ramp.advance()
            update_normalization(critic, rollout)
            imitated = {"skipped_updates": step.skipped + imitate.skipped} | (average(imitated) if imitated else {})
            run.log(average(metrics), imitated, rollout_metrics(rollout, action_box(env)))
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
