"""Train constrained PPO (ConTrack): maximize style while the task return stays at alpha times its best value.

python examples/train_cmdp.py --algorithm.alpha 0.7        # ConflictPointMass: follow a goal, but slowly
python examples/train_cmdp.py --env.name Quadruped         # starts from a preset; flags override it
"""

from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import CMDPConfig, EnvConfig, EvaluationConfig, RunConfig, parse_cli, presets
from edenrl.modules import MirrorAugmentation, TaskConstraint, update_normalization, whole_episode_ends
from edenrl.objectives import CMDPLoss, TwoChannelGAE, check_reward_groups, explained_variance
from edenrl.training import Run, make_critic, make_policy, minibatches, run_script, symmetry_mirrors


class Train(RunConfig):
    """Constrained PPO. The run directory receives checkpoints, a config.json and a table of metrics."""

    algorithm: CMDPConfig = Field(default_factory=CMDPConfig)
    """Constrained PPO."""
    env: EnvConfig = Field(default_factory=lambda: EnvConfig(name="ConflictPointMass"))
    """Environment; it publishes reward_groups."""
    # Lambda needs time to settle, so the newest checkpoint is the best one, unless another metric is set.
    evaluation: EvaluationConfig = Field(default_factory=lambda: EvaluationConfig(metric="updates"))
    """Evaluation; the metric "updates" makes the newest checkpoint the best."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.CMDP)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        check_reward_groups(env.observation_spec)
        policy, critic = run.keep(policy=make_policy(cfg, env), critic=make_critic(cfg, env, num_values=2))
        constraint = run.keep(constraint=TaskConstraint(**algo.constraint_options()))
        run.add_evaluation(lambda: {"updates": float(constraint.updates)}, "updates")
        gae = TwoChannelGAE(value_network=critic, **algo.gae_options())
        loss = CMDPLoss(policy, critic, constraint, functional=False, **algo.loss_options())
        augment = MirrorAugmentation(symmetry_mirrors(cfg, env), policy, critic)
        step = run.gradient_step(loss)
        collector = run.keep(collector=make_collector(run.training_env(env), policy, **run.collector_options()))

        for rollout in run.rollouts(collector):  # [environments, steps]
            gae(rollout)
            run.log({"explained_variance": explained_variance(rollout["state_value"], rollout["value_target"])})
            data = augment(rollout.exclude("next", "collector").reshape(-1))
            for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                losses = loss(batch)
                run.record(losses, step(losses))
            # The statistics change last: during the update the policy must normalize as it did while it collected.
            update_normalization(policy, rollout)
            update_normalization(critic, rollout)
            constraint.update(rollout["next", "metrics", "task_return"], whole_episode_ends(rollout))


if __name__ == "__main__":
    run_script(main)
