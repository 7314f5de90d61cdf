"""Train PPO on any environment by name: PointMass (default), a Gymnasium id, mjlab or your own.

python examples/train_ppo.py --env.name HalfCheetah-v5     # starts from a preset; flags override it
python examples/train_ppo.py --resume runs/...             # continue, bit for bit
"""

from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import PPOConfig, RunConfig, parse_cli, presets
from edenrl.modules import MirrorAugmentation, update_normalization
from edenrl.objectives import GAE, PPOLoss, explained_variance
from edenrl.training import Run, make_critic, make_policy, minibatches, run_script, symmetry_mirrors


class Train(RunConfig):
    """Proximal policy optimization. The run directory receives checkpoints, a config.json and a table of metrics."""

    algorithm: PPOConfig = Field(default_factory=PPOConfig)
    """PPO."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.PPO)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        policy, critic = run.keep(policy=make_policy(cfg, env), critic=make_critic(cfg, env))  # saved in checkpoints
        gae = GAE(value_network=critic, **algo.gae_options())
        loss = PPOLoss(policy, critic, functional=False, **algo.loss_options())  # uses the networks' own parameters
        augment = MirrorAugmentation(symmetry_mirrors(cfg, env), policy, critic)
        step = run.gradient_step(loss)
        collector = run.keep(collector=make_collector(run.training_env(env), policy, **run.collector_options()))

        for rollout in run.rollouts(collector):  # [environments, steps]
            gae(rollout)
            run.log({"explained_variance": explained_variance(rollout["state_value"], rollout["value_target"])})
            data = augment(rollout.exclude("next", "collector").reshape(-1))  # adds mirror images, if symmetry is on
            for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                losses = loss(batch)
                run.record(losses, step(losses))
            # The statistics change last: during the update the policy must normalize as it did while it collected.
            update_normalization(policy, rollout)
            update_normalization(critic, rollout)


if __name__ == "__main__":
    run_script(main)
