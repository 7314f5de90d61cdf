"""Train HIM on the built-in robot (default) or any environment that publishes a history of frames.

python examples/train_him.py                               # Quadruped; starts from a preset, flags override it
python examples/train_him.py --env.name my_package:make_env --algorithm.history_layout newest_first
"""

import torch
from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import EnvConfig, HIMConfig, RunConfig, parse_cli, presets
from edenrl.modules import HIMLayout, HIMRolloutCheck, MirrorAugmentation, him_actor
from edenrl.objectives import GAE, HIMEstimatorLoss, HIMLoss, explained_variance
from edenrl.training import Run, declared_mirrors, follow_rate, make_critic, minibatches, run_script


class Train(RunConfig):
    """Hybrid internal model. The run directory receives checkpoints, a config.json and a table of metrics."""

    env: EnvConfig = Field(default_factory=lambda: EnvConfig(name="Quadruped", num_envs=64))
    """Environment."""
    algorithm: HIMConfig = Field(default_factory=HIMConfig)
    """PPO, the estimator and the symmetry."""


def make_policy(cfg: Train, env):
    """The actor for an environment; evaluation rebuilds it from a run's config.json with this."""
    algo, squash = cfg.algorithm, cfg.env.action_mode == "squash"
    layout = HIMLayout.of(env, algo.actor_groups[0], algo.critic_groups[0], order=algo.history_layout)
    return him_actor(layout, env.action_spec_unbatched, squash=squash, **algo.network_options())


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.HIM)
    algo = cfg.algorithm
    history, critic_group = algo.actor_groups[0], algo.critic_groups[0]  # actor and critic read one group each
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        policy, critic = run.keep(policy=make_policy(cfg, env), critic=make_critic(cfg, env))
        gae = GAE(value_network=critic, **algo.gae_options())
        mirrors = declared_mirrors(cfg, env, "mirror_data", [history, critic_group])
        augment = MirrorAugmentation(mirrors, policy, critic, log_prob=algo.mirrored_log_prob)
        mirrors = declared_mirrors(cfg, env, "symmetry_loss", [history, critic_group])
        symmetry = dict(mirrors=mirrors, symmetry_scale=algo.symmetry_scale)
        loss = HIMLoss(policy, critic, functional=False, **symmetry, **algo.loss_options())
        step = run.gradient_step(loss)

        # The estimator is a part of the actor's network. It has its own loss and its own optimizer.
        estimator = policy.module[0].module.estimator  # ProbabilisticActor -> TensorDictModule -> network
        estimator_loss = HIMEstimatorLoss(estimator, **algo.estimator_options())
        estimator_loss.set_keys(history=history, critic=critic_group)
        estimator_step = run.gradient_step(
            estimator_loss,
            {"estimator_optimizer": estimator_loss.parameters()},
            name="estimator_step",
            schedule=False,  # follow_rate below sets the learning rate
            max_grad_norm=algo.estimator_max_grad_norm,
        )
        collector = run.keep(collector=make_collector(run.training_env(env), policy, **run.collector_options()))

        check = HIMRolloutCheck(estimator.layout, history, critic_group, **algo.check_options())
        for rollout in run.rollouts(collector):  # [environments, steps]
            check(rollout)
            with torch.no_grad():  # the estimator's error on data that it has not been trained on
                run.log({f"fresh/{name}": value for name, value in estimator_loss(rollout).items()})
            rollout = gae(augment(rollout))  # mirrored before GAE: mirror images get their own values and returns
            run.log({"explained_variance": explained_variance(rollout["state_value"], rollout["value_target"])})
            data = rollout.exclude("next", "collector")
            data = data.set("next", rollout["next"].select(critic_group))  # the estimator's target
            for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                losses = loss(batch)
                metrics = step(losses)
                follow_rate(estimator_step, step)  # the policy's learning rate, which may adapt
                estimator_losses = estimator_loss(batch)
                grad_norm = estimator_step(estimator_losses)["grad_norm_estimator"]
                run.record(losses, metrics, estimator_losses, grad_norm_estimator=grad_norm)


if __name__ == "__main__":
    run_script(main)
