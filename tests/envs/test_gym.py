from __future__ import annotations

import importlib.util
import math
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

from edenrl.envs import GymVectorEnv, make_gym_env, spawn_seeds, wrap_env
from edenrl.modules import make_actor, observation_groups

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
        single.reset(seed=spawn_seeds(5, 3)[i])
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


def vector(
    mode: str, kind: str = "sync", env_id: str = "Pendulum-v1", rows: int = 3, limit: int | None = 5
) -> VectorEnv:
    vector_kwargs = {"autoreset_mode": mode}
    kwargs = {} if limit is None else {"max_episode_steps": limit}
    return gymnasium.make_vec(env_id, rows, vectorization_mode=kind, vector_kwargs=vector_kwargs, **kwargs)


class Countdown(gymnasium.Env):
    """A nested observation, ends after as many steps as were drawn at the reset."""

    observation_space = spaces.Dict(left=spaces.Dict(now=spaces.Discrete(9)), drawn=spaces.Box(-1, 1, (2,)))
    action_space = spaces.Box(-1, 1, (1,))

    def observe(self) -> dict[str, Any]:
        return {"left": {"now": self.left}, "drawn": self.drawn}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 7))
        self.drawn = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self.observe(), float(action[0]), self.left == 0, False, {}


def assert_same_data(one: GymVectorEnv, other: GymVectorEnv, steps: int = 50) -> None:
    sequence = actions(one, steps)
    ends = 0
    for left, right in zip(run(one, one.reset(), sequence)[0], run(other, other.reset(), sequence)[0], strict=True):
        assert (left == right).all() and set(left.keys(True)) == set(right.keys(True))
        ends += int(left["next", "done"].sum())
    assert ends >= 6


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(("env_id", "limit"), [("Pendulum-v1", 5), ("CartPole-v1", None)])
def test_a_vector_that_resets_in_the_same_step_gives_the_same_data(kind: str, env_id: str, limit: int | None) -> None:
    disabled = GymVectorEnv(vector("Disabled", "sync", env_id, limit=limit), seed=4)
    same_step = GymVectorEnv(vector("SameStep", kind, env_id, limit=limit), seed=4)
    check_env_specs(GymVectorEnv(vector("SameStep", "sync", env_id, limit=limit), seed=1))
    assert_same_data(disabled, same_step, 60)
    same_step.close()


@pytest.mark.parametrize("rows", [1, 4])
def test_nested_last_observations_of_the_same_step_arrive(rows: int) -> None:
    build = [Countdown] * rows
    disabled = GymVectorEnv(SyncVectorEnv(build, autoreset_mode=AutoresetMode.DISABLED), seed=rows)
    same_step = GymVectorEnv(SyncVectorEnv(build, autoreset_mode=AutoresetMode.SAME_STEP), seed=rows)
    assert_same_data(disabled, same_step)
    last = same_step.rollout(20, break_when_any_done=False)["next"]
    assert last["left.now"][last["terminated"].squeeze(-1)][:, 0].eq(1).all()


def test_rows_that_run_on_can_be_reset_beside_those_that_wait() -> None:
    env = GymVectorEnv(SyncVectorEnv([Countdown] * 3, autoreset_mode=AutoresetMode.SAME_STEP), seed=2)
    data = env.reset()
    while not 0 < int((data := env.step(data.set("action", torch.zeros(3, 1))))["next", "done"].sum()) < 3:
        data = data["next"].exclude("reward").clone()
    done = data["next", "done"]
    inner = env._env.envs
    waits = {row: inner[row].drawn.copy() for row in range(3)}
    mask = torch.ones(3, 1, dtype=torch.bool)
    mask[int((~done).nonzero()[0, 0])] = False
    root = env.reset(data["next"].exclude("reward").set("_reset", mask))
    for row in range(3):
        assert (root["drawn"][row].numpy() == inner[row].drawn).all()
        assert (inner[row].drawn == waits[row]).all() == bool(done[row] | ~mask[row])


def test_a_state_saved_between_an_end_and_its_reset_keeps_the_next_episode() -> None:
    def build(seed: int) -> GymVectorEnv:
        return GymVectorEnv(SyncVectorEnv([Countdown] * 3, autoreset_mode=AutoresetMode.SAME_STEP), seed=seed)

    env, fresh = build(2), build(9)
    data = env.reset()
    while not (data := env.step(data.set("action", torch.zeros(3, 1))))["next", "done"].any():
        data = data["next"].exclude("reward").clone()
    fresh.load_state_dict(env.state_dict())
    root = data["next"].exclude("reward").set("_reset", data["next", "done"].clone())
    assert (env.reset(root.clone()) == fresh.reset(root.clone())).all()


def test_final_observations_of_a_whole_vector_are_read_and_missing_ones_are_an_error() -> None:
    class Batched(Buffers):
        metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

        def __init__(self, final: Any) -> None:
            super().__init__(truncated=np.array([True, False]))
            self.final = final

        def step(self, actions: Any) -> tuple[Any, ...]:
            return *super().step(actions)[:4], {} if self.final is None else {"final_obs": self.final}

    final = {"policy": np.full((2, 3), 7.0), "critic": np.full((2, 1), 8.0)}
    env = GymVectorEnv(Batched(final))
    after = env.step(env.rand_action(env.reset()))["next"]
    assert after["policy"].tolist() == [[7] * 3, [1] * 3] and after["critic"].tolist() == [[8], [1]]
    env = GymVectorEnv(Batched(None))
    with pytest.raises(ValueError, match=r"gave no infos\['final_obs'\]"):
        env.step(env.rand_action(env.reset()))


@pytest.mark.parametrize("mode", ["Disabled", "SameStep"])
def test_the_mode_is_read_from_the_metadata_also_through_wrappers(mode: str) -> None:
    from gymnasium.wrappers import vector as wrappers

    for name in ("RecordEpisodeStatistics", "NormalizeReward", "ClipAction"):
        env = GymVectorEnv(getattr(wrappers, name)(vector(mode)), seed=0)
        assert env.rollout(12, break_when_any_done=False)["next", "done"].sum() == 6
    if mode == "Disabled":  # Gymnasium refuses it otherwise
        flat = GymVectorEnv(wrappers.FlattenObservation(vector(mode)), seed=3)
        assert_same_data(flat, GymVectorEnv(vector(mode), seed=3))
    with pytest.raises(
        ValueError, match="metadata of .*NEXT_STEP.*Build it with autoreset_mode=AutoresetMode.DISABLED"
    ):
        GymVectorEnv(wrappers.RecordEpisodeStatistics(vector("NextStep")))


@pytest.mark.parametrize("mode", ["Disabled", "SameStep"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_reset_of_no_row_changes_nothing(mode: str, kind: str) -> None:
    env = GymVectorEnv(vector(mode, kind), seed=0)
    root = env.step_and_maybe_reset(env.rand_action(env.reset()))[1]
    none = torch.zeros(3, 1, dtype=torch.bool)
    for _ in range(2):
        again = env.reset(root.clone().set("_reset", none))
        assert torch.equal(again["observation"], root["observation"])
        again["observation"].zero_()
    env.close()


def test_device_and_seed_are_taken_by_the_constructor() -> None:
    built = GymVectorEnv(vector("Disabled"), device="cpu", seed=11)
    later = GymVectorEnv(vector("Disabled"), seed=3)
    later.set_seed(11)
    made = make_gym_env("Pendulum-v1", 3, seed=11)
    assert built.device == torch.device("cpu")
    first = built.reset()["observation"]
    assert torch.equal(first, later.reset()["observation"]) and torch.equal(first, made.reset()["observation"])


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (spaces.MultiDiscrete([2, 3]), (2, 3)),
        (spaces.MultiDiscrete([4, 4, 4]), (4, 4, 4)),
        (spaces.MultiBinary(2), (2, 2)),
    ],
)
def test_several_discrete_actions_become_one_as_the_error_says(space: spaces.Space, shape: tuple[int, ...]) -> None:
    class Several(Countdown):
        action_space = space
        observation_space = spaces.Box(-9, 9, (len(shape),))

        def observe(self) -> Any:
            return np.zeros(len(shape), np.float32)

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            assert self.action_space.contains(np.asarray(action, self.action_space.dtype))
            return np.asarray(action, np.float32), 0.0, False, False, {}

    def one() -> gymnasium.Env:
        def decode(action: Any) -> Any:
            return np.stack(np.unravel_index(action, shape))

        return gymnasium.wrappers.TransformAction(Several(), decode, spaces.Discrete(math.prod(shape)))

    with pytest.raises(ValueError, match="TransformAction"):
        make_actor({"observation": len(shape)}, make_gym_env(Several, 2).action_spec_unbatched)
    env = make_gym_env(one, 2, seed=0)
    actor = make_actor(observation_groups(env.observation_spec), env.action_spec_unbatched, hidden=(8,))
    data = wrap_env(env).rollout(50, actor)
    expected = torch.stack(torch.unravel_index(data["action"], shape), -1).float()
    assert torch.equal(data["next", "observation"], expected)


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
