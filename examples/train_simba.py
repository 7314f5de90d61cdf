"""Train PPO with SimBaV2 networks and Muon on any environment by name: PointMass, a Gymnasium id, mjlab or your own.

python examples/train_simba.py --env.name HalfCheetah-v5     # starts from a preset; flags override it
python examples/train_simba.py --algorithm.group_hidden.scan 512,256 --algorithm.optimizer adam
"""

from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import RunConfig, SimbaPPOConfig, parse_cli, presets
from edenrl.modules import (
    observation_groups,
    post_step_hook,
    simba_actor,
    simba_critic,
    update_normalization,
    vector_groups,
)
from edenrl.objectives import GAE, PPOLoss, explained_variance
from edenrl.training import Run, minibatches, run_script


class Train(RunConfig):
    """PPO with SimBaV2 networks. The run directory receives checkpoints, a config.json and a table of metrics."""

    algorithm: SimbaPPOConfig = Field(default_factory=SimbaPPOConfig)
    """PPO, its networks and its optimizer."""


def make_policy(cfg: Train, env):
    """The actor for an environment; evaluation rebuilds it from a run's config.json with this."""
    algo, spec = cfg.algorithm, env.observation_spec
    groups = observation_groups(spec, algo.actor_groups)
    options = algo.network_options("actor", groups, vector_groups(spec))
    squash = cfg.env.action_mode == "squash"
    return simba_actor(groups, env.action_spec_unbatched, init_std=algo.init_std, squash=squash, **options)


def make_critic(cfg: Train, env):
    """The value network for an environment."""
    algo, spec = cfg.algorithm, env.observation_spec
    groups = observation_groups(spec, algo.critic_groups)
    return simba_critic(groups, **algo.network_options("critic", groups, vector_groups(spec)))


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.SIMBA)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        policy, critic = run.keep(policy=make_policy(cfg, env), critic=make_critic(cfg, env))
        gae = GAE(value_network=critic, **algo.gae_options())
        loss = PPOLoss(policy, critic, functional=False, **algo.loss_options())
        step = run.gradient_step(loss)
        post_step_hook(step.optimizers["optimizer"], policy, critic)  # after each step: weight rows back to unit norm
        collector = run.keep(collector=make_collector(run.training_env(env), policy, **run.collector_options()))

        for rollout in run.rollouts(collector):  # [environments, steps]
            gae(rollout)
            run.log({"explained_variance": explained_variance(rollout["state_value"], rollout["value_target"])})
            data = rollout.exclude("next", "collector")
            for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                losses = loss(batch)
                run.record(losses, step(losses))
            # The statistics change last: during the update the policy must normalize as it did while it collected.
            update_normalization(policy, rollout)
            update_normalization(critic, rollout)


if __name__ == "__main__":
    run_script(main)
