"""Train RMA: a teacher with privileged observations, and the history encoder and estimator that replace these.

python examples/train_rma.py --env.name QuadrupedTerrain     # default: HiddenPointMass; both start from a preset
"""

import torch
from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import EnvConfig, RMAConfig, RunConfig, parse_cli, presets
from edenrl.modules import MirrorAugmentation, RMAActor, update_normalization, vector_groups
from edenrl.modules.rma_compositions import rma_composition, rma_policy
from edenrl.objectives import GAE, LinearRamp, MirrorLoss, RMADaggerLoss, RMALoss, explained_variance
from edenrl.training import Run, make_critic, minibatches, run_script, symmetry_mirrors


class Train(RunConfig):
    """Rapid motor adaptation. The run directory receives checkpoints, a config.json and a table of metrics."""

    env: EnvConfig = EnvConfig(name="HiddenPointMass")
    """Environment."""
    algorithm: RMAConfig = Field(default_factory=RMAConfig)
    """RMA."""


def make_policy(cfg, env):
    """An untrained policy that needs no privileged observations. This is the one that is evaluated and exported."""
    widths, keys = cfg.algorithm.layout(vector_groups(env.observation_spec))
    num_actions = cfg.algorithm.num_actions(env.action_spec_unbatched, cfg.env.action_mode)
    actor = RMAActor(widths, num_actions, **cfg.algorithm.network_options())
    return rma_policy(actor, keys, latent="history", estimated=True)


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.RMA)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        policy = run.keep(policy=make_policy(cfg, env))  # for deployment; teacher and acting share its weights
        net = rma_composition(policy)  # its network: the actor, and the keys of the actor's inputs
        teacher = rma_policy(net.actor, net.source)
        acting = rma_policy(net.actor, net.source, **algo.acting_options()).to(run.device)
        critic = run.keep(critic=make_critic(cfg, env, groups=net.privileged_groups))
        gae = GAE(value_network=critic, **algo.gae_options())
        ramp = run.keep(ramp=LinearRamp(**algo.ramp_options()))
        loss = RMALoss(teacher, critic, ramp=ramp, functional=False, **algo.loss_options())
        dagger = RMADaggerLoss(teacher)
        augment = MirrorAugmentation(symmetry_mirrors(cfg, env, "augment"), teacher, critic, also=[net.keys["history"]])
        mirrors = symmetry_mirrors(cfg, env, "loss")
        mirror_loss = None if mirrors is None else MirrorLoss(teacher, mirrors, symmetry_coeff=algo.symmetry_coeff)
        groups = {**loss.parameter_groups(), **dagger.parameter_groups()}
        trained = {"optimizer": groups["policy"] + groups["critic"], "estimation": groups["estimator"]}
        step = run.gradient_step(loss, trained, lr={"estimation": algo.estimator_lr})
        imitate = run.gradient_step(dagger, {"imitation": groups["history_encoder"]}, name="imitate", schedule=False)
        collector = run.keep(collector=make_collector(run.training_env(env), acting, **run.collector_options()))
        for iteration in run:  # not run.rollouts, because the latent is chosen before the rollout
            is_dagger = (iteration + 1) % algo.dagger_update_freq == 0
            rma_composition(acting).use_history(is_dagger)  # DAgger collects with the history latent
            rollout = run.collect(collector)  # [environments, steps]
            gae(rollout)
            run.log({"explained_variance": explained_variance(rollout["state_value"], rollout["value_target"])})
            with torch.no_grad():  # PPO's KL compares the teacher before and after the update, not with `acting`
                rollout.update(teacher.get_dist_params(rollout.select(*teacher.in_keys)).select("loc", "scale"))
            data = augment(rollout.exclude("next", "collector").reshape(-1))
            for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                losses = loss(batch)
                if mirror_loss is not None:
                    losses.update(mirror_loss(batch))
                run.record(losses, step(losses))
            ramp.advance()  # counts updates: PPO on a rollout is one, DAgger on it is another
            if is_dagger:
                for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                    losses = dagger(batch)
                    run.record(losses, grad_norm_history=imitate(losses)["grad_norm_history_encoder"])
                ramp.advance()
            update_normalization(critic, rollout)


if __name__ == "__main__":
    run_script(main)
