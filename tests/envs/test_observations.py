"""Observation groups: names that are taken, nested entries, integers and images, the same for every adapter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import check_env_specs

from edenrl.collectors import Collector
from edenrl.envs import GymVectorEnv, LearningEnvAdapter, PointMass, VecEnvAdapter, as_vec_env, make_gym_env, wrap_env
from edenrl.envs.observations import RESERVED_NAMES
from edenrl.modules import flash_actor, gaussian_actor, make_actor, observation_groups


class Counts(gymnasium.Env):
    """Each number of an observation is the step index; entries of the space may be anything."""

    action_space = spaces.Box(-1, 1, (2,))

    def __init__(self, space: spaces.Space) -> None:
        self.observation_space = space
        self.index = 0

    def observe(self, space: spaces.Space) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self.observe(entry) for key, entry in space.spaces.items()}
        if isinstance(space, spaces.Discrete):
            return space.start + self.index % space.n
        if isinstance(space, spaces.MultiDiscrete):
            return (space.start + self.index % space.nvec).astype(space.dtype)
        if isinstance(space, spaces.MultiBinary):
            return np.full(space.shape, self.index % 2, space.dtype)
        return np.full(space.shape, self.index, space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.index = 0
        return self.observe(self.observation_space), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.index += 1
        return self.observe(self.observation_space), 0.0, False, False, {}


def gym_env(space: spaces.Space, num_envs: int = 2) -> GymVectorEnv:
    return GymVectorEnv(SyncVectorEnv([lambda: Counts(space)] * num_envs, autoreset_mode=AutoresetMode.DISABLED))


class Groups:
    """The same groups for both kinds of adapters, as their inner environment."""

    num_envs, num_actions, device = 3, 2, torch.device("cpu")
    single_action_space = spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, groups: dict[str, Any], space: spaces.Space | None = None) -> None:
        self.groups = groups
        self.single_observation_space = space

    def get_observations(self) -> Any:
        return self.groups

    def reset(self, **kwargs: Any) -> Any:
        return self.groups, {}


class Rsl(Groups):
    def step(self, actions: Tensor) -> Any:
        return self.groups, torch.zeros(3), torch.zeros(3, dtype=torch.bool), {"time_outs": torch.zeros(3)}


class Learning(Groups):
    def step(self, action: Tensor) -> Any:
        never = torch.zeros(3, dtype=torch.bool)
        return self.groups, torch.zeros(3), never, never, {}


def gym_of(name: str) -> EnvBase:
    return gym_env(spaces.Dict({name: spaces.Box(-1, 1, (2,)), "x": spaces.Box(-1, 1, (3,))}))


def rsl_of(name: str) -> EnvBase:
    return VecEnvAdapter(Rsl({name: torch.zeros(3, 2), "x": torch.zeros(3, 3)}))


def learning_of(name: str) -> EnvBase:
    space = spaces.Dict({name: spaces.Box(-1, 1, (2,)), "x": spaces.Box(-1, 1, (3,))})
    return LearningEnvAdapter(Learning({name: torch.zeros(3, 2), "x": torch.zeros(3, 3)}, space))


@pytest.mark.parametrize("build", [gym_of, rsl_of, learning_of])
@pytest.mark.parametrize("name", [*sorted(RESERVED_NAMES), "_hidden"])
def test_names_that_are_taken_are_refused_by_every_adapter(build: Callable[[str], EnvBase], name: str) -> None:
    with pytest.raises(ValueError, match=rf"has observation groups named \['{name}'\].*Rename the groups"):
        build(name)


@pytest.mark.parametrize("build", [gym_of, rsl_of, learning_of])
@pytest.mark.parametrize("name", ["last_action", "next_waypoint", "scan.left"])
def test_names_that_look_like_them_are_kept(build: Callable[[str], EnvBase], name: str) -> None:
    assert observation_groups(build(name).observation_spec) == {name: 2, "x": 3}


def test_everything_that_policies_and_collection_write_is_on_the_list() -> None:
    for env in (PointMass(2, seed=0), make_gym_env("CartPole-v1", 2, seed=0)):
        actor = make_actor(observation_groups(env.observation_spec), env.action_spec_unbatched, hidden=(4,))
        data = next(iter(Collector(wrap_env(env), actor, frames_per_batch=8, total_frames=-1)))
        assert set(data.keys()) - RESERVED_NAMES == {"observation"}
        assert set(actor.out_keys) <= RESERVED_NAMES
    bounds = Bounded(-1.0, 1.0, (2,))
    assert set(gaussian_actor({"x": 3}, bounds, squash=True).out_keys) <= RESERVED_NAMES
    assert set(flash_actor({"x": 3}, bounds).out_keys) <= RESERVED_NAMES


class Own(EnvBase):
    """An environment of one's own that publishes the last action under the policy's key."""

    def __init__(self, name: str) -> None:
        super().__init__(batch_size=[2])
        self.name = name
        self.observation_spec = Composite({name: Unbounded((2, 2)), "metrics": Composite(shape=[2])}, shape=[2])
        self.action_spec, self.reward_spec = Bounded(-1, 1, (2, 2)), Unbounded((2, 1))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        return TensorDict({self.name: torch.zeros(2, 2)}, [2])

    def _step(self, tensordict: Any) -> TensorDict:
        zeros = torch.zeros(2, 1)
        return TensorDict({self.name: torch.zeros(2, 2), "reward": zeros, "done": zeros.bool()}, [2])

    def _set_seed(self, seed: int | None) -> None: ...


@pytest.mark.parametrize("name", ["action", "loc", "state_value"])
def test_an_environment_of_ones_own_is_refused_where_training_wraps_it(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Own has observation groups named \['{name}'\]"):
        wrap_env(Own(name))
    wrap_env(Own("last_action"))


@pytest.mark.parametrize("num_envs", [1, 4])
def test_nested_entries_of_a_gymnasium_space_are_named_by_their_path(num_envs: int) -> None:
    q, goal, deep = spaces.Box(-9, 9, (5,)), spaces.Box(-9, 9, (2,)), spaces.Box(-9, 9, (1,))
    space = spaces.Dict(robot=spaces.Dict(q=q, hand=spaces.Dict(grip=deep)), goal=goal)
    env = gym_env(space, num_envs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert observation_groups(env.observation_spec) == {"goal": 2, "robot.hand.grip": 1, "robot.q": 5}
    check_env_specs(env)
    data = env.rollout(3, break_when_any_done=False)
    assert data["next", "robot.q"][:, :, 4].tolist() == [[1, 2, 3]] * num_envs
    actor = make_actor(observation_groups(env.observation_spec), env.action_spec_unbatched, hidden=(4,))
    assert next(iter(Collector(wrap_env(env), actor, frames_per_batch=num_envs * 2, total_frames=-1)))["robot.q"].any()


NESTED = {"robot": {"q": torch.ones(3, 5), "hand": {"grip": torch.ones(3, 1)}}, "goal": torch.zeros(3, 2)}


@pytest.mark.parametrize("form", [dict, lambda groups: TensorDict(groups, batch_size=[3])])
def test_nested_entries_are_named_by_their_path_in_the_other_adapters(form: Callable[[Any], Any]) -> None:
    box = {width: spaces.Box(-9, 9, (width,)) for width in (1, 2, 5)}
    hand = spaces.Dict(grip=box[1])
    space = spaces.Dict(robot=spaces.Dict(q=box[5], hand=hand), goal=box[2])
    for env in (VecEnvAdapter(Rsl(form(NESTED))), LearningEnvAdapter(Learning(form(NESTED), space))):
        assert observation_groups(env.observation_spec) == {"robot.q": 5, "robot.hand.grip": 1, "goal": 2}
        check_env_specs(env)
        assert env.rollout(2)["next", "robot.q"].eq(1).all()
    assert "robot.q" in as_vec_env(env, max_episode_length=3).get_observations().keys()


def test_two_entries_of_one_name_are_refused() -> None:
    box = spaces.Box(-1, 1, (2,))
    with pytest.raises(ValueError, match="two observation entries that would both be the group 'a.b'"):
        gym_env(spaces.Dict({"a": spaces.Dict(b=box), "a.b": box}))
    with pytest.raises(ValueError, match="two observation entries that would both be the group 'a.b'"):
        VecEnvAdapter(Rsl({"a": {"b": torch.zeros(3, 2)}, "a.b": torch.zeros(3, 2)}))


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (spaces.Discrete(3), [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]),
        (spaces.Discrete(2, start=5), [[1, 0], [0, 1], [1, 0], [0, 1]]),
        (spaces.MultiDiscrete([2, 3]), [[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]),
        (spaces.MultiDiscrete([2, 2]), [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]),
        (spaces.MultiBinary(2), [[0, 0], [1, 1], [0, 0], [1, 1]]),
        (spaces.Box(0, 100, (2,), np.int64), [[0, 0], [1, 1], [2, 2], [3, 3]]),
        (spaces.Box(0, 255, (1,), np.uint8), [[0], [1], [2], [3]]),
        (spaces.Box(0, 9, (), np.float64), [[0], [1], [2], [3]]),
    ],
)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_integers_are_vectors_that_networks_read(
    space: spaces.Space, values: list[list[int]], num_envs: int, inside: bool
) -> None:
    name = "part.x" if inside else "observation"
    env = gym_env(spaces.Dict(part=spaces.Dict(x=space)) if inside else space, num_envs)
    check_env_specs(env)
    data = env.rollout(4)
    assert data[name].dtype == torch.float32 and data[name].tolist() == [values] * num_envs
    assert observation_groups(env.observation_spec) == {name: len(values[0])}


def test_integer_groups_of_the_other_adapters_are_read_too() -> None:
    env = VecEnvAdapter(Rsl({"mode": torch.tensor([[1], [2], [3]]), "foot": torch.ones(3, 4, dtype=torch.bool)}))
    assert observation_groups(env.observation_spec) == {"mode": 1, "foot": 4}
    assert env.rollout(2)["mode"][:, 1].tolist() == [[1.0], [2.0], [3.0]]


def test_images_keep_shape_and_type_and_one_warning_says_that_networks_leave_them_out() -> None:
    image, depth = spaces.Box(0, 255, (4, 6, 3), np.uint8), spaces.Box(0, 9, (4, 6), np.float64)
    env = gym_env(spaces.Dict(camera=spaces.Dict(rgb=image, depth=depth), x=spaces.Box(-9, 9, (2,))), 3)
    check_env_specs(env)
    data = env.rollout(2)
    assert data["camera.rgb"].dtype == torch.uint8 and data["camera.rgb"].shape == (3, 2, 4, 6, 3)
    assert data["camera.depth"].dtype == torch.float32 and data["camera.depth"].shape == (3, 2, 4, 6)
    with pytest.warns(UserWarning, match=r"do not read .*'camera.rgb': 'torch.uint8 \(4, 6, 3\)'") as said:
        assert observation_groups(env.observation_spec) == {"x": 2}
    assert len(said) == 1 and "'camera.depth': 'torch.float32 (4, 6)'" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observation_groups(env.observation_spec, ["x"])
        observation_groups(VecEnvAdapter(as_vec_env(PointMass(2))).observation_spec)


@pytest.mark.parametrize("shape", [(2, 3), (3, 1, 2)])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_flags_of_several_dimensions_are_float32_as_their_spec_says(shape: tuple[int, ...], num_envs: int) -> None:
    env = gym_env(spaces.MultiBinary(shape), num_envs)
    check_env_specs(env)
    data = env.rollout(2)
    assert data["observation"].dtype == torch.float32 and data["observation"].shape == (num_envs, 2, *shape)
    assert data["next", "observation"][:, 0].eq(1).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(3,), (4, 6)])
def test_types_that_torchrl_does_not_know_are_refused_by_name(dtype: type, shape: tuple[int, ...]) -> None:
    space = spaces.Dict(camera=spaces.Dict(depth=spaces.Box(0, 60000, shape, dtype)))
    with pytest.raises(ValueError, match=f"observation 'camera.depth' is {dtype.__name__}.*DtypeObservation"):
        gym_env(space)


def test_a_nested_spec_of_ones_own_environment_is_not_left_out_in_silence() -> None:
    spec = Composite(x=Unbounded((2, 3)), robot=Composite(q=Unbounded((2, 5)), shape=[2]), shape=[2])
    with pytest.warns(UserWarning, match="'robot.q'"):
        assert observation_groups(spec) == {"x": 3}


def test_other_spaces_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"observation 'robot.word' is Text.*gymnasium wrapper"):
        gym_env(spaces.Dict(robot=spaces.Dict(word=spaces.Text(4))))


def test_an_entry_state_is_called_observation_unless_there_is_one() -> None:
    box = spaces.Box(-1, 1, (2,))
    assert list(gym_env(spaces.Dict(state=box)).observation_spec.keys()) == ["observation"]
    both = gym_env(spaces.Dict(state=box, observation=box))
    assert observation_groups(both.observation_spec) == {"observation": 2, "state": 2}
