"""Train FlashSAC, off-policy, on any environment by name: PointMass, a Gymnasium id, mjlab or your own.

python examples/train_flashsac.py --profile cpu --env.name HalfCheetah-v5     # small enough for one core
python examples/train_flashsac.py --env.name mjlab:TASK --env.num_envs 1024 --total_frames 50e6 --device cuda
"""

from edenrl.collectors import RepeatedNoise, exploring_policy, make_collector, make_replay
from edenrl.config import FlashSACRunConfig as Train
from edenrl.config import parse_cli, presets
from edenrl.envs import action_box
from edenrl.modules import average_batch_statistics, flash_actor, flash_critic, observation_groups, unit_norm_hook
from edenrl.objectives import FlashSACLoss
from edenrl.training import Run, check_precision, run_script, speedups


def make_policy(cfg: Train, env):
    """The actor for an environment; evaluation rebuilds it from a run's config.json with this."""
    groups = observation_groups(env.observation_spec, cfg.algorithm.actor_groups)
    return flash_actor(groups, env.action_spec_unbatched, **cfg.algorithm.network_options("actor"))


def main(argv=None):
    cfg = parse_cli(Train, argv, presets=presets.FLASHSAC, profiles=presets.FLASHSAC_PROFILES)
    algo = cfg.algorithm
    with Run(cfg) as run:  # seeds, device, run directory, checkpoints, evaluation, Ctrl-C
        precision, compiled = speedups(algo.precision, algo.compile, run.device)
        env = run.env()
        policy = run.keep(policy=make_policy(cfg, env))
        low, high = action_box(env)
        groups = observation_groups(env.observation_spec, algo.critic_groups)
        critic = flash_critic(groups, len(low), **algo.network_options("critic"))
        loss = run.keep(loss=FlashSACLoss(policy, critic, **algo.loss_options()))
        options = dict(num_envs=cfg.env.num_envs, device=run.device, **algo.replay_options())
        replay = run.keep(replay=make_replay(loss.observation_keys, low, high, **options))
        warmup, updates = cfg.warmup_and_updates(run.iterations)
        every = {"policy": algo.actor_delay, "temperature": algo.actor_delay, "critic": 1}
        steps = {}
        for part, parameters in loss.parameter_groups().items():
            options = dict(updates=updates, every=every[part], amp_dtype=precision)
            steps[part] = run.gradient_step(loss, {f"{part}_optimizer": parameters}, name=f"{part}_step", **options)
        unit_norm_hook(steps["policy"].optimizers["policy_optimizer"], policy)  # after each step: back to unit norm
        unit_norm_hook(steps["critic"].optimizers["critic_optimizer"], critic)
        if compiled:
            loss.compile_networks()
        noise = RepeatedNoise(low, high, exponent=algo.noise_exponent, longest=algo.noise_longest).to(run.device)
        acting = exploring_policy(policy, noise)
        collector = run.keep(collector=make_collector(run.training_env(env), acting, **run.collector_options(steps=1)))
        run.begin()  # creates the run directory, or restores a checkpoint
        noise.uniform.fill_(steps["critic"].updates == 0)  # uniform random actions until the first update
        if steps["critic"].updates and len(replay):
            warmup = 0  # resumed with its replay buffer: no second warm-up
        for _ in run:
            for _ in range(algo.steps_per_env):
                replay.extend(run.collect(collector))
                if len(replay) >= warmup and replay.can_sample():
                    noise.uniform.fill_(False)
                    for _ in range(algo.updates_per_step):
                        update(run, loss, steps, replay.sample().to(run.device), algo.actor_delay)
            average_batch_statistics(policy, critic, loss.target_critic)
            run.log({"replay_size": len(replay)})


def update(run, loss, steps, batch, actor_delay):
    """Updates the critic and its target. Every `actor_delay`-th call updates the actor and the temperature first."""
    if steps["critic"].updates == 0:
        check_precision(loss, batch, steps["critic"].amp_dtype)
    if steps["critic"].updates % actor_delay == 0:
        with steps["policy"].autocast():
            losses = loss.actor_loss(batch)
            alpha_losses = loss.temperature_loss(batch, losses.pop("log_prob"))
        steps["temperature"](alpha_losses)
        run.record(losses, alpha_losses, grad_norm_policy=steps["policy"](losses)["grad_norm_policy"])
    with steps["critic"].autocast():
        losses = loss.critic_loss(batch)
    run.record(losses, steps["critic"](losses))
    loss.update_target()


if __name__ == "__main__":
    run_script(main)
