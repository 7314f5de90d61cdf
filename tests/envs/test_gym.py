from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import Categorical
from torchrl.envs.utils import RandomPolicy, check_env_specs

from edenrl.envs import GymVectorEnv, make_gym_env, wrap_env

needs_mujoco = pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="needs mujoco")
MUJOCO = [pytest.param(name, marks=needs_mujoco) for name in ("HalfCheetah-v5", "InvertedPendulum-v5", "Ant-v5")]


def actions(env: GymVectorEnv, steps: int, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [env.action_spec.rand() for _ in range(steps)]


def run(env: GymVectorEnv, data: TensorDict, sequence: list[torch.Tensor]) -> tuple[list[TensorDict], TensorDict]:
    out = []
    for action in sequence:
        data, root = env.step_and_maybe_reset(data.set("action", action))
        out.append(data.clone())
        data = root
    return out, data


class Buffers(VectorEnv):
    """A vector environment that reuses one observation array; the observation is the step index."""

    def __init__(self, terminated: Any = None, truncated: Any = None) -> None:
        self.num_envs = 2
        self.autoreset_mode = AutoresetMode.DISABLED
        self.single_observation_space = spaces.Dict(
            {"policy": spaces.Box(-np.inf, np.inf, (3,)), "critic": spaces.Box(-np.inf, np.inf, (1,))}
        )
        self.single_action_space = spaces.Box(-1, 1, (1,))
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.action_space = batch_space(self.single_action_space, 2)
        self.buffer = {"policy": np.zeros((2, 3), np.float32), "critic": np.zeros((2, 1), np.float32)}
        self.flags = np.zeros(2, bool)
        self.terminated = self.flags if terminated is None else terminated
        self.truncated = self.flags if truncated is None else truncated
        self.rewards = np.zeros(2)

    def _observe(self) -> dict[str, np.ndarray]:
        for array in self.buffer.values():
            array[:] = self.index
        return self.buffer

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.index = 0
        return self._observe(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.index += 1
        self.rewards[:] = self.index
        return self._observe(), self.rewards, self.terminated, self.truncated, {}


class Opaque(gymnasium.Env):
    """An environment that keeps state in an object of its own."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self) -> None:
        self.engine = object()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", *MUJOCO[:1]])
def test_equals_raw_environments_past_ends(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transition equals that of single environments which are reset by hand when they end."""
    # MuJoCo logs a warning about Gymnasium's own model file to the working directory.
    monkeypatch.chdir(tmp_path)
    limit: dict[str, Any] = {} if env_id == "CartPole-v1" else {"max_episode_steps": 12}
    env = make_gym_env(env_id, 3, seed=5, **limit)
    raw = [gymnasium.make(env_id, **limit) for _ in range(3)]
    for i, single in enumerate(raw):
        single.reset(seed=5 + i)
    root = env.reset()
    starts = [single.reset()[0] for single in raw]
    np.testing.assert_array_equal(root["observation"].numpy(), np.asarray(starts, np.float32))
    ends = np.zeros(3, int)
    lengths = []
    for action in actions(env, 60):
        data, root = env.step_and_maybe_reset(root.set("action", action))
        for i, single in enumerate(raw):
            observation, reward, terminated, truncated, _ = single.step(action[i].numpy())
            got = data["next"][i]
            np.testing.assert_array_equal(got["observation"].numpy(), np.asarray(observation, np.float32))
            assert got["reward"].item() == np.float32(reward)
            assert (got["terminated"].item(), got["truncated"].item()) == (terminated, truncated)
            assert got["done"].item() == (terminated or truncated)
            if terminated or truncated:
                ends[i] += 1
                lengths.append(truncated)
                observation = single.reset()[0]
            np.testing.assert_array_equal(root["observation"][i].numpy(), np.asarray(observation, np.float32))
    assert (ends >= 1).all()
    assert all(lengths) == (env_id != "CartPole-v1")


def test_async_equals_sync_but_cannot_be_saved() -> None:
    results = []
    for vectorization in ("sync", "async"):
        env = make_gym_env("Pendulum-v1", 2, seed=3, vectorization=vectorization, max_episode_steps=6)
        out, _ = run(env, env.reset(), actions(env, 15))
        results.append(torch.stack([data["next", "observation"] for data in out]))
        assert env.get_extra_state()["exact"] == (vectorization == "sync")
        env.close()
    assert torch.equal(*results)


def test_discrete_actions_are_integers() -> None:
    env = make_gym_env("CartPole-v1", 3, seed=0)
    assert isinstance(env.action_spec, Categorical)
    action = env.action_spec.rand()
    assert action.shape == (3,) and action.dtype == torch.int64


def test_dict_observations_are_root_keys_and_buffers_are_copied() -> None:
    env = GymVectorEnv(Buffers())
    check_env_specs(env)
    collector = Collector(env, RandomPolicy(env.action_spec), frames_per_batch=32, total_frames=32)
    data = next(iter(collector))
    collector.shutdown()
    steps = torch.arange(16.0).expand(2, 16)
    for key, width in (("policy", 3), ("critic", 1)):
        assert torch.equal(data[key], steps[..., None].expand(2, 16, width))
        assert torch.equal(data["next", key], steps[..., None].expand(2, 16, width) + 1)
    assert torch.equal(data["next", "reward"], steps[..., None] + 1)


@pytest.mark.parametrize("field", ["terminated", "truncated"])
@pytest.mark.parametrize("value", [True, np.ones(3, bool), np.ones(2, np.int64), np.ones((2, 1), bool)])
def test_bad_flags_are_refused_at_the_first_step(field: str, value: Any) -> None:
    env = GymVectorEnv(Buffers(**{field: value}))
    with pytest.raises(TypeError, match=rf"{field}=.*bool numpy array of shape \(2,\)"):
        env.rand_step(env.reset())


def test_loading_checks_the_kind() -> None:
    state = make_gym_env("CartPole-v1", 2, seed=1).state_dict()
    with pytest.raises(ValueError, match="CartPoleEnv.*PendulumEnv"):
        make_gym_env("Pendulum-v1", 2).load_state_dict(state)


def test_inexact_state_says_so() -> None:
    env = GymVectorEnv(SyncVectorEnv([Opaque], autoreset_mode=AutoresetMode.DISABLED))
    for inexact in (env, GymVectorEnv(Buffers())):
        assert inexact.get_extra_state() == {"exact": False}
        with pytest.warns(UserWarning, match="episodes start anew") as record:
            inexact.load_state_dict(inexact.state_dict())
        assert len(record) == 1


@needs_mujoco
def test_mujoco_is_quiet(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mujoco

    monkeypatch.chdir(tmp_path)
    before = mujoco.get_mju_user_warning()
    make_gym_env("HalfCheetah-v5", 2, seed=0)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert mujoco.get_mju_user_warning() is before


def test_training_stack() -> None:
    env = wrap_env(make_gym_env("Pendulum-v1", 2, seed=0, max_episode_steps=5), reward_scale=0.1)
    check_env_specs(env)
    data = env.rollout(10, break_when_any_done=False)
    rewards = data["next", "reward"][:, :5].sum(1) * 10
    assert torch.allclose(data["next", "episode_reward"][:, 4], rewards, rtol=1e-5)
    assert data["next", "step_count"][:, :, 0].tolist() == [[1, 2, 3, 4, 5] * 2] * 2


def test_refusals() -> None:
    with pytest.raises(ValueError, match="AutoresetMode.DISABLED"):
        GymVectorEnv(SyncVectorEnv([Opaque]))
    with pytest.raises(TypeError, match="make_gym_env"):
        GymVectorEnv(gymnasium.make("CartPole-v1"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="observation 'observation' is Tuple"):
        make_gym_env("Blackjack-v1", 1)
