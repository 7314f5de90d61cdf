"""Training on HalfCheetah-v5 beside Stable-Baselines3, with the settings of our preset on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tensordict import TensorDictBase

from benchmarks.measuring import MUJOCO, STABLE_BASELINES, Row, Settings, alternate, make_row, seconds
from benchmarks.trainers import PPO
from edenrl.config import presets
from edenrl.envs import make_env

TASK, ENVS, STEPS, EPOCHS, MINIBATCHES = "HalfCheetah-v5", 16, 128, 10, 8


class Ours(PPO):
    """``train_ppo.py`` with its preset for the task."""

    def __init__(self, settings: Settings) -> None:
        env = make_env(TASK, ENVS, settings.device, seed=1)
        super().__init__(ENVS, settings, env, presets.PPO[TASK])
        self.returns: list[float] = []

    def collect(self) -> TensorDictBase:
        rollout = super().collect()
        ended = rollout["next", "done"]
        self.returns += rollout["next", "episode_reward"][ended].tolist()
        return rollout


class StableBaselines:
    """Stable-Baselines3's PPO with the same sizes and settings, and normalized observations."""

    def __init__(self, settings: Settings) -> None:
        from stable_baselines3 import PPO as TheirPPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize

        algo = presets.PPO[TASK]["algorithm"]
        env = VecNormalize(make_vec_env(TASK, ENVS, seed=1), norm_reward=True)
        self.model = TheirPPO(
            "MlpPolicy",
            env,
            n_steps=STEPS,
            batch_size=ENVS * STEPS // MINIBATCHES,
            n_epochs=EPOCHS,
            learning_rate=algo["lr"],
            vf_coef=algo["critic_coeff"],
            max_grad_norm=algo["max_grad_norm"],
            policy_kwargs={"net_arch": list(algo["actor_hidden"]), "log_std_init": -1.0},
            device=settings.device,
            seed=1,
        )

    def iterate(self) -> None:
        self.model.learn(ENVS * STEPS, reset_num_timesteps=False)

    @property
    def returns(self) -> list[float]:
        return [episode["r"] for episode in self.model.ep_info_buffer]


def last(returns: list[float]) -> list[float]:
    """Returns of the last episodes, two of each environment."""
    return returns[-2 * ENVS :]


def training(settings: Settings) -> Iterator[Row]:
    if not MUJOCO.installed:
        yield Row("halfcheetah", "not run", "frames/s", "higher", note=MUJOCO.note)
        return
    iterations = 3 if settings.quick else 100
    ours = Ours(settings)
    cases: dict[str, Callable[[], float]] = {"ours": seconds(ours.iterate, settings.device)}
    if STABLE_BASELINES.installed:
        theirs = StableBaselines(settings)
        cases["theirs"] = seconds(theirs.iterate, settings.device)
    times = alternate(cases, iterations, settings.warmups)
    rates = {name: [ENVS * STEPS / value for value in values] for name, values in times.items()}
    frames = (iterations + settings.warmups) * ENVS * STEPS
    peer, note = STABLE_BASELINES.name, STABLE_BASELINES.note
    work = f"training iteration, {ENVS} envs x {STEPS}"
    yield make_row(
        "halfcheetah", work, "frames/s", rates["ours"], peer, rates.get("theirs"), better="higher", note=note
    )
    if not ours.returns:
        return  # too short a run: no episode has ended
    returns = last(theirs.returns) if STABLE_BASELINES.installed else None
    work = f"training episodes after {frames:,} frames, one seed"
    yield make_row("halfcheetah", work, "return", last(ours.returns), peer, returns, better="higher", note=note)
