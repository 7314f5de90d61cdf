"""Simulation: the analytic policy gradient, the quadruped's steps, and its depth camera."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import train_apg
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from benchmarks.measuring import MUJOCO, Row, Settings, alternate, make_row, seconds
from benchmarks.trainers import Trainer, compile_loss
from edenrl.collectors import DifferentiableCollector
from edenrl.config import presets
from edenrl.envs import PointMass, wrap_env
from edenrl.modules import update_normalization
from edenrl.objectives import APGLoss
from edenrl.training import make_policy

CONTROL_STEPS = 50


class APG(Trainer):
    """``train_apg.py`` with its preset for the point mass: complete rollouts of 100 steps."""

    def __init__(self, num_envs: int, settings: Settings) -> None:
        preset = presets.changed(presets.APG["PointMass"], env={"num_envs": num_envs})
        super().__init__(train_apg.Train(**preset), settings)
        env = PointMass(num_envs, device=settings.device, seed=0)
        self.policy = make_policy(self.cfg, env).to(settings.device)
        self.loss = APGLoss(self.policy, **self.algo.loss_options())
        self.step = self.gradient_step(self.loss)
        compile_loss(self.loss, settings)
        wrapped = wrap_env(env, **self.cfg.env.action_options())
        self.collector = DifferentiableCollector(
            wrapped,
            self.policy,
            self.algo.segment_length,
            reset_at_each_iter=True,
            exploration_type=ExplorationType.RANDOM,
        )

    @property
    def frames(self) -> int:
        """Frames of an update."""
        return self.cfg.env.num_envs * self.algo.segment_length

    def learn(self, rollout: object = None) -> None:
        """One update; it collects by itself, because the gradient passes through the simulation."""
        self.metrics.clear()
        for segment in self.collector.update(self.algo.rollouts):
            self.record(self.step.backward(self.loss(segment), 1 / self.algo.rollouts_per_update))
        self.metrics.log(self.step.step())
        update_normalization(self.policy, segment.reshape(-1))
        self.metrics.watch(segment)
        self.metrics.log(self.collector.metrics())
        self.metrics.row()


def apg(settings: Settings) -> Iterator[Row]:
    sizes = (16, 64) if settings.quick else (64, 1024)
    trainers = {size: APG(size, settings) for size in sizes}
    cases = {str(size): seconds(trainer.learn, settings.device) for size, trainer in trainers.items()}
    times = alternate(cases, settings.repeats, settings.warmups)
    rates = {size: [trainers[size].frames / value for value in times[str(size)]] for size in sizes}
    few, many = sizes
    steps = trainers[few].algo.segment_length
    yield make_row("apg", f"update, {few} envs x {steps}", "frames/s", rates[few], better="higher")
    yield make_row(
        "apg",
        f"update, {many} envs x {steps}",
        "frames/s",
        rates[many],
        f"ours with {few} envs",
        rates[few],
        better="higher",
    )


def wave(step: int, num_envs: int) -> torch.Tensor:
    """Actions that keep the legs moving."""
    return (0.5 * torch.sin(0.3 * step + torch.arange(12.0))).expand(num_envs, 12)


def environment_steps(env: EnvBase) -> Callable[[], None]:
    """Control steps with resets, as a collector takes them."""
    data = env.reset()

    def run() -> None:
        nonlocal data
        for step in range(CONTROL_STEPS):
            _, data = env.step_and_maybe_reset(data.set("action", wave(step, env.num_envs)))

    return run


def bare_steps(env: Any) -> Callable[[], None]:
    """MuJoCo's batch alone: the same model values, threads, start and control."""
    from mujoco.batch import Batch

    from edenrl.envs.quadruped import DEFAULT_POSE, build_model

    batch = Batch(build_model(env._field), env.num_envs, env._batch.nthread)
    for name, values in env._values.items():
        batch.expand(name)[:] = values
    batch.state[:] = env._state
    control = batch.bind("ctrl")

    def run() -> None:
        for step in range(CONTROL_STEPS):
            control[:] = DEFAULT_POSE + 0.25 * wave(step, env.num_envs).numpy()
            batch.step(nstep=4)

    return run


def control_rates(cases: dict[str, Callable[[], None]], num_envs: int, settings: Settings) -> dict[str, list[float]]:
    """Control steps per second of each case, all environments together."""
    times = alternate({name: seconds(run) for name, run in cases.items()}, settings.repeats)
    return {name: [CONTROL_STEPS * num_envs / value for value in values] for name, values in times.items()}


def quadruped(settings: Settings) -> Iterator[Row]:
    if not MUJOCO.installed:
        yield Row("quadruped", "not run", "control steps/s", "higher", note=MUJOCO.note)
        return
    from edenrl.envs import Quadruped

    for num_envs in (16, 64) if settings.quick else (64, 256):
        env = Quadruped(num_envs, seed=0)
        rates = control_rates({"ours": environment_steps(env), "bare": bare_steps(env)}, num_envs, settings)
        peer, work = "mujoco.batch.Batch", f"steps, {num_envs} envs"
        yield make_row("quadruped", work, "control steps/s", rates["ours"], peer, rates["bare"], better="higher")


def depth(settings: Settings) -> Iterator[Row]:
    if not MUJOCO.installed:
        yield Row("depth", "not run", "control steps/s", "higher", note=MUJOCO.note)
        return
    from edenrl.envs import Quadruped, QuadrupedTerrain

    groups = ["policy", "critic"]
    grounds: dict[str, Callable[..., EnvBase]] = {
        "flat ground": Quadruped,
        "terrain": partial(QuadrupedTerrain, difficulty=0.5),
    }
    for name, make in grounds.items():
        cases = {
            "depth": environment_steps(make(16, seed=0, groups=[*groups, "depth"])),
            "blind": environment_steps(make(16, seed=0, groups=groups)),
        }
        rates = control_rates(cases, 16, settings)
        peer, work = "the same without depth", f"steps with depth images, 16 envs, {name}"
        yield make_row("depth", work, "control steps/s", rates["depth"], peer, rates["blind"], better="higher")
