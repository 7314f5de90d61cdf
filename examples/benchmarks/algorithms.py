"""What an iteration of GRPO, RMA, HIM, AMP and constrained PPO costs, as a multiple of plain PPO's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import train_amp
import train_cmdp
import train_grpo
import train_him
import train_rma
from tensordict import TensorDictBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.environments import OBSERVATION, TrivialEnv
from benchmarks.measuring import Row, Settings, alternate, make_row
from benchmarks.trainers import PPO, Trainer, compile_loss
from edenrl.collectors import Collector, WindowBuffer, load_motion
from edenrl.envs import set_group_size, wrap_env
from edenrl.modules import AMPReward, Discriminator, TaskConstraint, update_normalization, whole_episode_ends
from edenrl.modules.rma_compositions import rma_composition, rma_policy
from edenrl.objectives import (
    GAE,
    AMPLoss,
    CMDPLoss,
    GroupRelativeAdvantage,
    GRPOLoss,
    HIMEstimatorLoss,
    HIMLoss,
    LinearRamp,
    PPOLoss,
    RMADaggerLoss,
    RMALoss,
    TwoChannelGAE,
)
from edenrl.optim import GradientStep, make_optimizer
from edenrl.training import follow_rate, make_critic, make_policy, minibatches

# Rollout and passes are those of PPO everywhere; networks have the default widths of each algorithm.
AS_PPO = {"steps_per_env": 24, "epochs": 5, "num_minibatches": 4}
RMA_WIDTHS = {"prop": 53, "scan": 132, "priv_explicit": 9, "priv_latent": 29, "prop_history": 530}
HIM_WIDTHS = {"history": 6 * 45, "critic": OBSERVATION}


def config(script: Any, num_envs: int, **algorithm: Any) -> Any:
    """The configuration of a training script."""
    return script.Train(env={"num_envs": num_envs}, algorithm={**AS_PPO, **algorithm})


class GRPO(Trainer):
    def __init__(self, num_envs: int, settings: Settings) -> None:
        super().__init__(config(train_grpo, num_envs), settings)
        env = TrivialEnv(num_envs, device=settings.device)
        set_group_size(env, self.algo.group_size)
        self.policy = make_policy(self.cfg, env).to(settings.device)
        self.advantages = GroupRelativeAdvantage(**self.algo.advantage_options())
        self.loss = GRPOLoss(self.policy, functional=False, **self.algo.loss_options())
        self.step = self.gradient_step(self.loss)
        compile_loss(self.loss, settings)
        frames = self.cfg.frames_per_rollout
        options: dict[str, Any] = {"frames_per_batch": frames, "total_frames": -1, "reset_at_each_iter": True}
        self.batches = iter(Collector(wrap_env(env), self.policy, **options))

    def learn(self, rollout: TensorDictBase) -> None:
        self.advantages(rollout)
        data = rollout.exclude("next", "collector")[rollout["group_mask"].squeeze(-1)]
        for batch in minibatches(data, self.algo.epochs, self.algo.num_minibatches):
            losses = self.loss(batch)
            self.record(losses, self.step(losses))
        update_normalization(self.policy, rollout)


class RMA(Trainer):
    """``train_rma.py``; `dagger`: an iteration that also trains the history encoder, one in twenty by default."""

    def __init__(self, num_envs: int, settings: Settings, dagger: bool) -> None:
        super().__init__(config(train_rma, num_envs), settings)
        env = TrivialEnv(num_envs, RMA_WIDTHS, settings.device)
        self.trains_history = dagger
        policy = train_rma.make_policy(self.cfg, env).to(settings.device)
        net = rma_composition(policy)
        self.teacher = rma_policy(net.actor, net.source)
        acting = rma_policy(net.actor, net.source, **self.algo.acting_options()).to(settings.device)
        rma_composition(acting).use_history(dagger)
        self.critic = make_critic(self.cfg, env, groups=net.privileged_groups).to(settings.device)
        self.gae = GAE(value_network=self.critic, **self.algo.gae_options())
        ramp = LinearRamp(**self.algo.ramp_options()).to(settings.device)
        self.loss = RMALoss(self.teacher, self.critic, ramp=ramp, functional=False, **self.algo.loss_options())
        self.dagger = RMADaggerLoss(self.teacher)
        groups = {**self.loss.parameter_groups(), **self.dagger.parameter_groups()}
        trained = {"optimizer": groups["policy"] + groups["critic"], "estimation": groups["estimator"]}
        self.step = self.gradient_step(self.loss, trained, lr={"estimation": self.algo.estimator_lr})
        self.imitate = self.gradient_step(self.dagger, {"imitation": groups["history_encoder"]}, schedule=False)
        compile_loss(self.loss, settings)
        compile_loss(self.dagger, settings)
        self.batches = self.rollouts(env, acting)

    def learn(self, rollout: TensorDictBase) -> None:
        self.gae(rollout)
        with torch.no_grad():
            rollout.update(self.teacher.get_dist_params(rollout.select(*self.teacher.in_keys)).select("loc", "scale"))
        data = rollout.exclude("next", "collector").reshape(-1)
        for batch in minibatches(data, self.algo.epochs, self.algo.num_minibatches):
            losses = self.loss(batch)
            self.record(losses, self.step(losses))
        if self.trains_history:
            for batch in minibatches(data, self.algo.epochs, self.algo.num_minibatches):
                losses = self.dagger(batch)
                self.record(losses, self.imitate(losses))
        update_normalization(self.critic, rollout)


class HIM(Trainer):
    def __init__(self, num_envs: int, settings: Settings) -> None:
        super().__init__(config(train_him, num_envs, history_layout="oldest_first"), settings)
        env = TrivialEnv(num_envs, HIM_WIDTHS, settings.device)
        policy = train_him.make_policy(self.cfg, env).to(settings.device)
        critic = make_critic(self.cfg, env).to(settings.device)
        self.gae = GAE(value_network=critic, **self.algo.gae_options())
        self.loss = HIMLoss(policy, critic, functional=False, **self.algo.loss_options())
        self.step = self.gradient_step(self.loss)
        estimator = policy.module[0].module.estimator
        self.estimator_loss = HIMEstimatorLoss(estimator, **self.algo.estimator_options())
        self.estimator_loss.set_keys(history="history", critic="critic")
        self.estimator_step = self.gradient_step(
            self.estimator_loss,
            {"estimator_optimizer": self.estimator_loss.parameters()},
            schedule=False,
            max_grad_norm=self.algo.estimator_max_grad_norm,
        )
        compile_loss(self.loss, settings)
        compile_loss(self.estimator_loss, settings)
        self.batches = self.rollouts(env, policy)

    def learn(self, rollout: TensorDictBase) -> None:
        with torch.no_grad():
            self.metrics.log({f"fresh/{name}": value for name, value in self.estimator_loss(rollout).items()})
        self.gae(rollout)
        data = rollout.exclude("next", "collector")
        data = data.set("next", rollout["next"].select("critic"))
        for batch in minibatches(data, self.algo.epochs, self.algo.num_minibatches):
            losses = self.loss(batch)
            metrics = self.step(losses)
            follow_rate(self.estimator_step, self.step)
            estimator_losses = self.estimator_loss(batch)
            grad_norm = self.estimator_step(estimator_losses)["grad_norm_estimator"]
            self.record(losses, metrics, estimator_losses, grad_norm_estimator=grad_norm)


class AMP(Trainer):
    """``train_amp.py`` with the quadruped's trot as its motion."""

    def __init__(self, num_envs: int, settings: Settings) -> None:
        super().__init__(config(train_amp, num_envs), settings)
        device = settings.device
        self.motion = load_motion(None, "Quadruped", self.algo.num_frames, seed=0, device=device)
        widths = {"observation": OBSERVATION, "amp_window": self.motion.window_dim, "amp_gate": 1}
        env = TrivialEnv(num_envs, widths, device)
        env.simulation.pool["amp_gate"].fill_(1.0)
        self.policy = make_policy(self.cfg, env).to(device)
        self.critic = make_critic(self.cfg, env).to(device)
        self.gae = GAE(value_network=self.critic, **self.algo.gae_options())
        self.loss = PPOLoss(self.policy, self.critic, functional=False, **self.algo.loss_options())
        self.step = self.gradient_step(self.loss)
        self.prior = Discriminator(self.motion.frame_dim, **self.algo.discriminator_options()).to(device)
        self.add_style = AMPReward(self.prior, **self.algo.style_options(env))
        self.returns = self.add_style.episode_returns()
        self.prior_loss = AMPLoss(self.prior, grad_penalty_coeff=self.algo.grad_penalty_coeff)
        decayed = self.prior.optimizer_groups(self.algo.trunk_weight_decay, self.algo.head_weight_decay)
        self.prior_step = GradientStep(self.prior_loss, make_optimizer("adam", decayed, lr=self.algo.lr))
        self.size = self.cfg.frames_per_rollout // self.algo.num_minibatches
        buffer_size, window = self.algo.window_buffer_size, self.motion.window_dim
        self.windows = WindowBuffer(buffer_size, window, self.size, seed=0, device=device)
        compile_loss(self.loss, settings)
        compile_loss(self.prior_loss, settings)
        self.batches = self.rollouts(env, self.policy)

    def learn(self, rollout: TensorDictBase) -> None:
        self.gae(self.add_style(rollout))
        data = rollout.exclude("next", "collector").reshape(-1)
        for batch in minibatches(data, self.algo.epochs, self.algo.num_minibatches):
            losses = self.loss(batch)
            self.record(losses, self.step(losses))
        update_normalization(torch.nn.ModuleList([self.policy, self.critic]), rollout)
        seen = self.windows.add_rollout(rollout)
        self.prior.update_normalization(seen, self.motion.sample(len(seen)).flatten(1))
        follow_rate(self.prior_step, self.step)
        for _ in range(self.algo.discriminator_steps(self.step.updates)):
            experts = self.motion.sample(self.size).flatten(1)
            losses = self.prior_loss(self.windows.sample().set("expert_window", experts))
            metrics = self.prior_step(losses)
            self.record(losses, grad_norm_discriminator=metrics["grad_norm_discriminator"])
        distance = self.motion.distance(seen).mean()
        self.metrics.log(self.add_style.metrics(rollout), self.returns(rollout), {"motion_distance": distance})


class CMDP(Trainer):
    def __init__(self, num_envs: int, settings: Settings) -> None:
        super().__init__(config(train_cmdp, num_envs), settings)
        device = settings.device
        env = TrivialEnv(num_envs, device=device, reward_groups=("task", "style", "penalty"))
        self.policy = make_policy(self.cfg, env).to(device)
        self.critic = make_critic(self.cfg, env, num_values=2).to(device)
        self.constraint = TaskConstraint(**self.algo.constraint_options()).to(device)
        self.gae = TwoChannelGAE(value_network=self.critic, **self.algo.gae_options())
        self.loss = CMDPLoss(self.policy, self.critic, self.constraint, functional=False, **self.algo.loss_options())
        self.step = self.gradient_step(self.loss)
        compile_loss(self.loss, settings)
        self.batches = self.rollouts(env, self.policy)

    def learn(self, rollout: TensorDictBase) -> None:
        super().learn(rollout)
        self.constraint.update(rollout["next", "metrics", "task_return"], whole_episode_ends(rollout))


def build(num_envs: int, settings: Settings) -> dict[str, Trainer]:
    """One trainer of each algorithm, plain PPO first."""
    return {
        "PPO": PPO(num_envs, settings),
        "GRPO": GRPO(num_envs, settings),
        "RMA": RMA(num_envs, settings, dagger=False),
        "RMA with DAgger": RMA(num_envs, settings, dagger=True),
        "HIM": HIM(num_envs, settings),
        "AMP": AMP(num_envs, settings),
        "CMDP": CMDP(num_envs, settings),
    }


class FlopCount(TorchDispatchMode):
    """Adds up the operations by torch's formulas. ``FlopCounterMode`` itself fails in AMP's ``torch.func.vjp``."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(function._overloadpacket)
        if formula is None:
            with self:  # an operation that consists of others, such as linear in inference mode
                result = function.decompose(*args, **kwargs)
            return function(*args, **kwargs) if result is NotImplemented else result
        result = function(*args, **kwargs)
        self.total += formula(*args, **kwargs, out_val=result)
        return result


def count_flops(trainer: Trainer) -> int:
    """Floating-point operations of an iteration, the rollout included."""
    trainer.iterate()  # the first one may build buffers
    with FlopCount() as count:
        trainer.iterate()
    return count.total


def iterations(settings: Settings) -> Iterator[Row]:
    num_envs = 64 if settings.quick else 1024
    eager = dataclasses.replace(settings, compile=False)
    flops = {name: count_flops(trainer) for name, trainer in build(num_envs, eager).items()}
    cases = {name: trainer.iterate for name, trainer in build(num_envs, settings).items()}
    results = alternate(cases, settings.repeats, settings.warmups)
    milliseconds = {name: [1e3 * sum(halves) for halves in result] for name, result in results.items()}
    for name, ours in milliseconds.items():
        if name == "PPO":
            continue
        explained = flops[name] / flops["PPO"]
        yield make_row(
            "algorithms",
            f"{name} iteration, {num_envs} envs x {AS_PPO['steps_per_env']}",
            "ms",
            ours,
            "our plain PPO",
            milliseconds["PPO"],
            better="lower",
            note=f"operations explain a factor of {explained:.2f}",
        )
