"""Train GRPO, which needs no critic. The simulator must be able to start groups of environments in the same state.

python examples/train_grpo.py --env.name CartPole-v1       # starts from a preset; flags override it
python examples/train_grpo.py --resume runs/...            # continue, bit for bit
"""

from pydantic import Field

from edenrl.collectors import Collector
from edenrl.config import GRPOConfig, RunConfig, parse_cli, presets
from edenrl.envs import assert_same_start, set_group_size
from edenrl.modules import observation_groups, update_normalization
from edenrl.objectives import GroupRelativeAdvantage, GRPOLoss
from edenrl.training import Run, make_policy, minibatches, run_script


class Train(RunConfig):
    """Group-relative policy updates. The run directory receives checkpoints, a config.json and a table of metrics."""

    algorithm: GRPOConfig = Field(default_factory=GRPOConfig)
    """GRPO."""


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.GRPO)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        set_group_size(env, algo.group_size)
        policy = run.keep(policy=make_policy(cfg, env))
        advantages = GroupRelativeAdvantage(**algo.advantage_options())
        loss = GRPOLoss(policy, functional=False, **algo.loss_options())
        if loss.reference is not None:
            run.keep(reference=loss.reference)
        step = run.gradient_step(loss)
        collector = Collector(
            run.training_env(env),
            policy,
            frames_per_batch=cfg.frames_per_rollout,
            total_frames=-1,
            reset_at_each_iter=algo.reset_before_rollout,
        )
        run.keep(collector=collector)

        observations = list(observation_groups(env.observation_spec, algo.actor_groups))
        for rollout in run.rollouts(collector):  # [environments, steps]
            if algo.reset_before_rollout:
                assert_same_start(rollout, observations, algo.group_size)
            advantages(rollout)
            # Masked steps are dropped here, so mini-batches have equal sizes and no computation is wasted.
            data = rollout.exclude("next", "collector")[rollout["group_mask"].squeeze(-1)]
            for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                losses = loss(batch)
                run.record(losses, step(losses))
            # The statistics change last: during the update the policy must normalize as it did while it collected.
            # A NaN reward marks a step at which the simulation failed. Its observation may be NaN, too.
            valid = ~rollout["next", "reward"].isnan().squeeze(-1)
            update_normalization(policy, rollout[valid])
            run.log(advantages.metrics(rollout))


if __name__ == "__main__":
    run_script(main)
