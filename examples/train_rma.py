"""Train RMA: a teacher with privileged information, and the history encoder and estimator that replace it.

python examples/train_rma.py                                  # HiddenPointMass; settings from PRESETS
python examples/train_rma.py --env.name QuadrupedTerrain

What is evaluated, kept as the best and exported is the deployed policy: no privileged input.
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
PRESETS = {"HiddenPointMass": HIDDEN_POINT_MASS_RMA, "QuadrupedTerrain": QUADRUPED_TERRAIN_RMA}


class Train(RunConfig):
    """Rapid motor adaptation; a table of metrics, checkpoints and a config.json end up in the run directory."""

    env: EnvConfig = Field(default_factory=lambda: EnvConfig(name="HiddenPointMass"))
    """The environment."""
    algorithm: RMAConfig = Field(default_factory=RMAConfig)
    """RMA."""


def make_policy(cfg, env):
    """The deployed policy of a new actor; evaluation rebuilds it from a run's config.json with this."""
    widths, keys = cfg.algorithm.layout(observation_groups(env.observation_spec))
    actor = RMAActor(widths, env.action_spec_unbatched.shape[-1], **cfg.algorithm.network_options())
    return rma_policy(actor, keys, latent="history", estimated=True)


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=PRESETS)
    algo, device = cfg.algorithm, setup(cfg)

    env = build_env(cfg, device)
    policy = make_policy(cfg, env).to(device)  # what will be deployed; the other two share its weights
    actor, keys = rma_composition(policy).actor, rma_composition(policy).source
    teacher = rma_policy(actor, keys)
    acting = rma_policy(actor, keys, latent="switched", estimated=algo.train_with_estimated_states).to(device)
    groups = algo.critic_groups or tuple(
        key for name, key in rma_composition(teacher).keys.items() if name != "history"
    )
    critic = value_critic(
        observation_groups(env.observation_spec, groups),
        hidden=algo.critic_hidden,
        activation=algo.activation,
        normalize=algo.normalize_observations,
    ).to(device)

    whole = algo.normalize_advantage == "rollout"
    gae = GAE(gamma=algo.gamma, lmbda=algo.lmbda, value_network=critic, average_gae=whole)
    loss = RMALoss(
        teacher,
        critic,
        ramp=LinearRamp(**algo.ramp_options()),
        clip_epsilon=algo.clip_epsilon,
        entropy_coeff=algo.entropy_coeff,
        critic_coeff=algo.critic_coeff,
        clip_value=algo.clip_value,
        action_bound_coeff=algo.action_bound_coeff,
        normalize_advantage=algo.normalize_advantage == "minibatch",
        functional=False,
    ).to(device)
    dagger = RMADaggerLoss(teacher)
    mirrors = getattr(env, "mirrors", {})
    augment = MirrorAugmentation(mirrors if algo.symmetry == "augment" else None, acting, critic)
    mirror = MirrorLoss(teacher, mirrors, symmetry_coeff=algo.symmetry_coeff) if algo.symmetry == "loss" else None

    frames = cfg.env.num_envs * algo.steps_per_env
    iterations, updates = num_iterations(cfg.total_frames, frames), algo.epochs * algo.num_minibatches
    train = loss.parameter_groups()
    optimizers = dict(
        ppo=make_optimizer(algo.optimizer, train["policy"] + train["critic"], lr=algo.lr),
        estimator=make_optimizer(algo.optimizer, train["estimator"], lr=algo.estimator_lr),
    )
    imitation = make_optimizer(algo.optimizer, dagger.parameter_groups()["history_encoder"], lr=algo.lr)
    schedule = make_lr_schedule(algo.lr_schedule, optimizers["ppo"], iterations * updates, **algo.schedule_options())
    options = dict(max_grad_norm=algo.max_grad_norm, on_nonfinite=algo.on_nonfinite)
    step = GradientStep(loss, optimizers, lr_schedule=schedule, **options)
    imitate = GradientStep(dagger, imitation, **options)
    training_env = wrap_env(env, action_mode=cfg.env.action_mode, reward_scale=cfg.env.reward_scale)
    collector = make_collector(training_env, acting, frames_per_batch=frames, **collector_options(cfg))

    def minibatches(data):
        for _ in range(algo.epochs):
            yield from data[torch.randperm(len(data), device=device)].split(len(data) // algo.num_minibatches)

    components = dict(policy=policy, critic=critic, ramp=loss.ramp, step=step, imitate=imitate, collector=collector)
    run = Run(
        cfg,
        algo.name,
        {
            **components,
            **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()},
            "imitation_optimizer": imitation,
        },
        iterations=iterations,
        frames_per_iteration=frames,
        evaluate=lambda: evaluate_run(cfg, policy, device),
    )
    with run:
        if cfg.resume and cfg.resume_schedule == "restart":
            step.restart_schedule(algo.lr_schedule, algo.lr, run.remaining * updates, **algo.schedule_options())
        rollouts = iter(collector)
        for iteration in run:
            deployed = (iteration + 1) % algo.dagger_update_freq == 0
            rma_composition(acting).use_history(deployed)
            rollout = next(rollouts)
            gae(rollout)
            data, metrics, imitated = augment(rollout.exclude("next", "collector").reshape(-1)), [], []
            for batch in minibatches(data):
                losses = loss(batch)
                if mirror is not None:
                    losses.update(mirror(batch))
                metrics.append({**losses, **step(losses)})
            loss.ramp.advance()
            for batch in minibatches(data) if deployed else ():
                losses = dagger(batch)
                imitated.append({**losses, "grad_norm_history_encoder": imitate(losses)["grad_norm_history_encoder"]})
            if deployed:
                loss.ramp.advance()
            update_normalization(critic, rollout)
            skipped = {"skipped_updates": step.skipped + imitate.skipped}
            run.log(
                average(metrics),
                average(imitated) if deployed else {},
                rollout_metrics(rollout, action_box(env)),
                skipped,
            )
    collector.shutdown()


if __name__ == "__main__":
    run_script(main)
