"""Iterations of the training scripts, without their run directory, in two halves that are timed apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import train_ppo
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from benchmarks.environments import TrivialEnv
from benchmarks.measuring import Settings, clock
from edenrl.collectors import make_collector
from edenrl.modules import update_normalization
from edenrl.objectives import GAE, PPOLoss, explained_variance
from edenrl.optim import GradientStep
from edenrl.training import make_critic, make_policy, minibatches
from edenrl.training.environment import training_env
from edenrl.training.metrics import IterationMetrics
from edenrl.training.optimization import build_gradient_step


def compile_loss(loss: Any, settings: Settings) -> None:
    """Compiles a loss in place if the settings ask for it. Every case that compiles anything does it here."""
    if not settings.compile:
        return
    if hasattr(loss, "compile_networks"):
        loss.compile_networks()
    else:
        loss.compile()


class Trainer:
    """What the scripts get from ``edenrl.training.Run``: gradient steps, a collector and metrics.

    A subclass builds its parts in the constructor and sets ``self.batches``, which yields rollouts. One that does not
    learn like PPO has a ``learn`` of its own.
    """

    batches: Iterator[TensorDictBase]
    policy: nn.Module
    critic: nn.Module
    gae: GAE
    loss: nn.Module
    step: GradientStep

    def __init__(self, cfg: Any, settings: Settings) -> None:
        self.cfg, self.algo, self.settings = cfg, cfg.algorithm, settings
        self.metrics = IterationMetrics()

    def gradient_step(self, loss: nn.Module, trained: Mapping[str, Any] | None = None, **options: Any) -> GradientStep:
        """As ``Run.gradient_step``."""
        step, _ = build_gradient_step(self.algo, loss, trained, iterations=10_000, **options)
        self.metrics.steps.append(step)
        return step

    def rollouts(self, env: EnvBase, policy: nn.Module) -> Iterator[TensorDictBase]:
        """Rollouts of the wrapped environment."""
        wrapped = training_env(self.cfg, env, seed=0)
        return iter(make_collector(wrapped, policy, frames_per_batch=self.cfg.frames_per_rollout))

    def record(self, *metrics: Mapping[str, Tensor] | TensorDictBase, **named: Tensor) -> None:
        """As ``Run.record``."""
        self.metrics.record(*metrics, named)

    def collect(self) -> TensorDictBase:
        """The next rollout; its episodes enter the metrics."""
        self.metrics.clear()
        rollout = next(self.batches)
        self.metrics.watch(rollout)
        return rollout

    def learn(self, rollout: TensorDictBase) -> None:
        """The update on a rollout; here that of PPO."""
        self.gae(rollout)
        self.record(explained_variance=explained_variance(rollout["state_value"], rollout["value_target"]))
        data = rollout.exclude("next", "collector").reshape(-1)
        for batch in minibatches(data, self.algo.epochs, self.algo.num_minibatches):
            losses = self.loss(batch)
            self.record(losses, self.step(losses))
        update_normalization(self.policy, rollout)
        update_normalization(self.critic, rollout)

    def iterate(self) -> tuple[float, float]:
        """One iteration; returns the seconds of collecting and of learning, metrics included."""
        began = clock(self.settings.device)
        rollout = self.collect()
        collected = clock(self.settings.device)
        self.learn(rollout)
        self.metrics.row()
        return collected - began, clock(self.settings.device) - collected


class PPO(Trainer):
    """``train_ppo.py``, on the trivial environment unless another one is given."""

    def __init__(
        self, num_envs: int, settings: Settings, env: EnvBase | None = None, preset: Mapping[str, Any] | None = None
    ) -> None:
        fields: dict[str, Any] = {} if preset is None else dict(preset)
        fields["env"] = {**fields.get("env", {}), "num_envs": num_envs}
        super().__init__(train_ppo.Train(**fields), settings)
        env = TrivialEnv(num_envs, device=settings.device) if env is None else env
        self.policy = make_policy(self.cfg, env).to(settings.device)
        self.critic = make_critic(self.cfg, env).to(settings.device)
        self.gae = GAE(value_network=self.critic, **self.algo.gae_options())
        self.loss = PPOLoss(self.policy, self.critic, functional=False, **self.algo.loss_options())
        self.step = self.gradient_step(self.loss)
        compile_loss(self.loss, settings)
        self.batches = self.rollouts(env, self.policy)
