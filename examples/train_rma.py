"""Train RMA: a teacher with privileged information, and the history encoder and estimator that replace it.

python examples/train_rma.py --env.name QuadrupedTerrain     # default: HiddenPointMass; both start from a preset
"""

import torch
from pydantic import Field

from edenrl.collectors import make_collector
from edenrl.config import EnvConfig, RMAConfig, RunConfig, parse_cli, presets
from edenrl.modules import MirrorAugmentation, RMAActor, observation_groups, update_normalization
from edenrl.modules.rma_compositions import rma_composition, rma_policy
from edenrl.objectives import GAE, LinearRamp, MirrorLoss, RMADaggerLoss, RMALoss
from edenrl.training import Run, make_critic, minibatches, run_script, symmetry_mirrors


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
    cfg = parse_cli(Train, argv, presets=presets.RMA)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        env = run.env()
        policy = run.keep(policy=make_policy(cfg, env))  # what will be deployed; the next two share its weights
        net = rma_composition(policy)
        teacher = rma_policy(net.actor, net.source)
        acting = rma_policy(net.actor, net.source, **algo.acting_options()).to(run.device)
        critic = run.keep(critic=make_critic(cfg, env, groups=net.privileged_groups))
        gae = GAE(value_network=critic, **algo.gae_options())
        ramp = run.keep(ramp=LinearRamp(**algo.ramp_options()))
        loss = RMALoss(teacher, critic, ramp=ramp, functional=False, **algo.loss_options())
        dagger = RMADaggerLoss(teacher)
        also = [net.keys["history"]]  # which the losses read, beside actor and critic
        augment = MirrorAugmentation(symmetry_mirrors(cfg, env, "augment"), teacher, critic, also=also)
        mirrors = symmetry_mirrors(cfg, env, "loss")
        mirror = None if mirrors is None else MirrorLoss(teacher, mirrors, symmetry_coeff=algo.symmetry_coeff)
        groups = {**loss.parameter_groups(), **dagger.parameter_groups()}
        trained = {"optimizer": groups["policy"] + groups["critic"], "estimation": groups["estimator"]}
        step = run.gradient_step(loss, trained, lr={"estimation": algo.estimator_lr})
        imitate = run.gradient_step(dagger, {"imitation": groups["history_encoder"]}, name="imitate", schedule=False)
        collector = run.keep(collector=make_collector(run.training_env(env), acting, **run.collector_options()))
        for iteration in run:
            by_history = (iteration + 1) % algo.dagger_update_freq == 0
            rma_composition(acting).use_history(by_history)
            rollout = run.collect(collector)  # [environments, steps]
            gae(rollout)
            with torch.no_grad():  # acting may read estimates; the KL is to tell how far the update moves the teacher
                rollout.update(teacher.get_dist_params(rollout.select(*teacher.in_keys)).select("loc", "scale"))
            data = augment(rollout.exclude("next", "collector").reshape(-1))
            for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                losses = loss(batch)
                if mirror is not None:
                    losses.update(mirror(batch))
                run.record(losses, step(losses))
            ramp.advance()
            if by_history:
                for batch in minibatches(data, algo.epochs, algo.num_minibatches):
                    losses = dagger(batch)
                    run.record(losses, grad_norm_history=imitate(losses)["grad_norm_history_encoder"])
                ramp.advance()
            update_normalization(critic, rollout)


if __name__ == "__main__":
    run_script(main)
