"""PPO beside rsl_rl: an iteration, its collection, and the advantages."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torchrl import collectors
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
from torchrl.objectives.value import GAE as TorchRLGAE

from benchmarks.environments import OBSERVATION, TrivialEnv, TrivialVecEnv
from benchmarks.measuring import RSL_RL, Row, Settings, alternate, clock, make_row, seconds
from benchmarks.trainers import PPO
from edenrl.modules import value_critic
from edenrl.objectives import GAE

STEPS = 24


class RslRl:
    """rsl_rl's ``OnPolicyRunner`` with the settings of our ``PPOConfig``, and without a log."""

    def __init__(self, num_envs: int, settings: Settings) -> None:
        from rsl_rl.runners import OnPolicyRunner

        model = {
            "class_name": "MLPModel",
            "hidden_dims": [256, 128, 64],
            "activation": "elu",
            "obs_normalization": True,
        }
        noise = {"class_name": "GaussianDistribution", "init_std": 1.0}
        cfg: dict[str, Any] = {
            "num_steps_per_env": STEPS,
            "save_interval": 1_000_000,
            "obs_groups": {"actor": ["observation"], "critic": ["observation"]},
            "actor": {**model, "distribution_cfg": noise},
            "critic": model,
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": 5,
                "num_mini_batches": 4,
                "learning_rate": 1e-3,
                "schedule": "adaptive",
                "desired_kl": 0.01,
                "entropy_coef": 0.01,
            },
        }
        self.device = settings.device
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its networks
            self.runner = OnPolicyRunner(TrivialVecEnv(num_envs, settings.device), cfg, None, settings.device)
        self.collected = 0.0
        # The runner computes the returns right after the last step of a rollout.
        compute_returns = self.runner.alg.compute_returns

        def stamp(observation: TensorDict) -> None:
            self.collected = clock(self.device)
            compute_returns(observation)

        self.runner.alg.compute_returns = stamp

    def iterate(self) -> tuple[float, float]:
        """One iteration; returns the seconds of collecting and of learning."""
        began = clock(self.device)
        self.runner.learn(1)
        return self.collected - began, clock(self.device) - self.collected

    def collect(self) -> float:
        """Only collects a rollout; returns the seconds."""
        update = self.runner.alg.update
        self.runner.alg.update = self._forget
        collecting, _ = self.iterate()
        self.runner.alg.update = update
        return collecting

    def _forget(self) -> dict[str, float]:
        """In the place of an update: empties the storage, as an update does at its end."""
        self.runner.alg.storage.clear()
        return {}


Halves = Sequence[tuple[float, float]]


def in_three_units(halves: Halves, frames: int) -> dict[str, list[float]]:
    """Seconds of collecting and learning as frames per second, and as milliseconds of each."""
    return {
        "iteration": [frames / (collect + learn) for collect, learn in halves],
        "collect": [1e3 * collect for collect, _ in halves],
        "learn": [1e3 * learn for _, learn in halves],
    }


def iteration(settings: Settings) -> Iterator[Row]:
    """Iterations at each size; three rows a size."""
    for num_envs in settings.num_envs:
        cases: dict[str, Callable[[], tuple[float, float]]] = {"ours": PPO(num_envs, settings).iterate}
        if RSL_RL.installed:
            cases[RSL_RL.name] = RslRl(num_envs, settings).iterate
        results = alternate(cases, settings.repeats, settings.warmups)
        numbers = {name: in_three_units(halves, num_envs * STEPS) for name, halves in results.items()}
        for part, ours in numbers["ours"].items():
            work = f"{part}, {num_envs} envs x {STEPS}"
            theirs = numbers[RSL_RL.name][part] if RSL_RL.installed else None
            if part == "iteration":
                yield make_row("ppo", work, "frames/s", ours, RSL_RL.name, theirs, better="higher", note=RSL_RL.note)
            else:
                yield make_row("ppo", work, "ms", ours, RSL_RL.name, theirs, better="lower", note=RSL_RL.note)


def collection(settings: Settings) -> Iterator[Row]:
    """Rollouts at each size; a row for each peer."""
    for num_envs in settings.num_envs:
        ours = PPO(num_envs, settings)
        env = TransformedEnv(TrivialEnv(num_envs, device=settings.device), Compose(RewardSum(), StepCounter()))
        options: dict[str, Any] = {"frames_per_batch": num_envs * STEPS, "total_frames": -1}
        # Without the transforms of recurrent policies, as ours; TorchRL warns where nothing is said about them.
        plain = collectors.Collector(env, ours.policy, auto_register_policy_transforms=False, **options)
        cases: dict[str, Callable[[], float]] = {
            "ours": seconds(ours.collect, settings.device),
            "TorchRL Collector": seconds(partial(next, iter(plain)), settings.device),
        }
        if RSL_RL.installed:
            cases[RSL_RL.name] = RslRl(num_envs, settings).collect
        times = alternate(cases, settings.repeats, settings.warmups)
        plain.shutdown()
        rates = {name: [num_envs * STEPS / value for value in values] for name, values in times.items()}
        work = f"collect, {num_envs} envs x {STEPS}"
        notes = {RSL_RL.name: RSL_RL.note or "its time includes the critic", "TorchRL Collector": ""}
        for peer, note in notes.items():
            theirs = rates.get(peer)
            yield make_row("collection", work, "frames/s", rates["ours"], peer, theirs, better="higher", note=note)


def advantages(settings: Settings) -> Iterator[Row]:
    """Advantages of one rollout, with the critic's passes."""
    num_envs, device = settings.num_envs[-1], settings.device
    critic = value_critic({"observation": OBSERVATION}, hidden=(256, 128, 64)).to(device)
    observations = torch.randn(num_envs, STEPS + 1, OBSERVATION, device=device)
    truncated = torch.rand(num_envs, STEPS, 1, device=device) < 2 / 1000
    ends = {
        "observation": observations[:, 1:].contiguous(),
        "reward": torch.randn(num_envs, STEPS, 1, device=device),
        "done": truncated,
        "truncated": truncated,
        "terminated": torch.zeros_like(truncated),
    }
    # The first observation of a new episode is not the last one of the old episode.
    observations[:, 1:][truncated.squeeze(-1)] += 1.0
    rollout = TensorDict(
        observation=observations[:, :-1].contiguous(), next=ends, batch_size=[num_envs, STEPS], device=device
    )
    options: dict[str, Any] = {"gamma": 0.99, "lmbda": 0.95, "value_network": critic, "average_gae": True}
    ours, theirs = GAE(**options), TorchRLGAE(**options)
    cases = {
        "ours": seconds(lambda: ours(rollout.clone(False)), device),
        "TorchRL": seconds(lambda: theirs(rollout.clone(False)), device),
    }
    times = alternate(cases, settings.repeats)
    milliseconds = {name: [1e3 * value for value in values] for name, values in times.items()}
    work = f"advantages, {num_envs} x {STEPS}, value passes included"
    yield make_row("gae", work, "ms", milliseconds["ours"], "TorchRL GAE", milliseconds["TorchRL"], better="lower")
