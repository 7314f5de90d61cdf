"""Rows of a group start in the same state, with every environment that says it can do so."""

from __future__ import annotations

import io

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase, PendulumEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

from edenrl.collectors import Collector
from edenrl.envs import (
    PointMass,
    SameStateGroups,
    assert_same_start,
    make_env,
    make_gym_env,
    registered_envs,
    repeat_in_groups,
    set_group_size,
    wrap_env,
)

IDS = ["PointMass", "CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"]


def equal_rows(values: torch.Tensor) -> list[list[int]]:
    """Rows by equality, in order of their first appearance."""
    groups: list[list[int]] = []
    for i, row in enumerate(values):
        mates = next((g for g in groups if torch.equal(values[g[0]], row)), None)
        mates.append(i) if mates else groups.append([i])
    return groups


@pytest.mark.parametrize("env_id", IDS)
def test_a_full_reset_starts_groups_together_and_anew_each_time(env_id: str) -> None:
    env = wrap_env(make_env(env_id, 6, seed=0))
    set_group_size(env, 3)
    first = env.reset()["observation"]
    assert equal_rows(first) == [[0, 1, 2], [3, 4, 5]]
    second = env.reset()["observation"]
    assert equal_rows(second) == [[0, 1, 2], [3, 4, 5]] and len(equal_rows(torch.cat([first, second]))) == 4


@pytest.mark.parametrize("env_id", IDS)
def test_members_with_equal_actions_stay_together(env_id: str) -> None:
    """Equal observations could hide a different state; equal trajectories cannot."""
    env = make_env(env_id, 4, seed=0)
    set_group_size(env, 2)
    td = env.reset()
    for _ in range(8):
        action = env.action_spec.rand()
        action = repeat_in_groups({"a": action}, 2)["a"]
        td = env.step(td.set("action", action))["next"]
        assert equal_rows(td["observation"]) == [[0, 1], [2, 3]]


def test_the_seed_decides() -> None:
    for env_id in ("PointMass", "CartPole-v1"):
        starts = []
        for seed in (1, 1, 2):
            env = make_env(env_id, 4, seed=seed)
            set_group_size(env, 2)
            starts.append(torch.cat([env.reset()["observation"] for _ in range(2)]))
        assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_point_mass_groups_start_where_their_first_row_would() -> None:
    alone, grouped = PointMass(4, seed=0), PointMass(4, seed=0)
    set_group_size(grouped, 2)
    assert torch.equal(grouped.reset()["observation"][::2], alone.reset()["observation"][::2])


def test_partial_resets_are_as_without_groups() -> None:
    mask = torch.tensor([[True], [True], [False], [True]])
    for env_id, apart in (("PointMass", [[0], [1], [2], [3]]), ("CartPole-v1", [[0, 1, 3], [2]])):
        env = make_env(env_id, 4, seed=0)
        set_group_size(env, 4)
        before = env.reset()
        after = env.reset(TensorDict({"_reset": mask, "done": mask, "observation": before["observation"]}, [4]))
        assert equal_rows(after["observation"]) == apart
        assert torch.equal(after["observation"][2], before["observation"][2])


def test_specs_hold_with_groups() -> None:
    for env in (PointMass(4, seed=0), make_gym_env("Pendulum-v1", 4, seed=0)):
        set_group_size(env, 2)
        check_env_specs(env)


def test_asynchronous_vectors_can_as_well() -> None:
    starts = []
    for vectorization in ("sync", "async"):
        env = make_gym_env("Pendulum-v1", 2, seed=3, vectorization=vectorization)
        set_group_size(env, 2)
        starts.append(env.reset()["observation"])
        env.close()
    assert torch.equal(*starts) and equal_rows(starts[0]) == [[0, 1]]


@pytest.mark.parametrize("env_id", ["PointMass", "CartPole-v1"])
def test_resumed_groups_draw_the_same_starts(env_id: str) -> None:
    def grouped(seed: int) -> EnvBase:
        env = make_env(env_id, 4, seed=seed)
        set_group_size(env, 2)
        return env

    env, fresh = grouped(1), grouped(9)
    env.reset()
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        assert torch.equal(env.reset()["observation"], fresh.reset()["observation"])


def test_a_collector_that_resets_gives_groups_in_every_batch() -> None:
    env = wrap_env(make_env("CartPole-v1", 4, seed=0))
    set_group_size(env, 2)
    collector = Collector(env, None, frames_per_batch=4 * 30, total_frames=-1, reset_at_each_iter=True)
    batches = iter(collector)
    starts = []
    for _ in range(3):
        rollout = next(batches)
        assert_same_start(rollout, ["observation"], 2)
        assert rollout["next", "step_count"][:, 0].eq(1).all() and rollout["next", "episode_reward"][:, 0].eq(1).all()
        starts.append(rollout["observation"][::2, 0])
    assert len(equal_rows(torch.cat(starts))) == 6
    with pytest.raises(ValueError, match="Row 1 starts with another 'observation' than row 0"):
        assert_same_start(rollout[:, 7:], ["observation"], 2)


class Alone(PointMass):
    """Keeps no promise: it says it can and does not."""

    def _reset(self, tensordict: TensorDict | None = None, **kwargs: object) -> TensorDict:
        self.group_size = 1
        return super()._reset(tensordict, **kwargs)


def test_a_broken_promise_is_found() -> None:
    env = Alone(4, seed=0)
    set_group_size(env, 2)
    with pytest.raises(ValueError, match="Row 1 starts with another 'observation' than row 0"):
        assert_same_start(env.rollout(2), ["observation"], 2)


def test_who_cannot_is_refused() -> None:
    with pytest.raises(ValueError, match="PendulumEnv cannot start several rows in the same state"):
        set_group_size(TransformedEnv(PendulumEnv()), 2)
    for size in (0, 1, 3, 8):
        with pytest.raises(ValueError, match=f"group_size={size} was given for 4 rows; expected a divisor of 4"):
            set_group_size(PointMass(4), size)


def test_every_built_in_environment_can() -> None:
    for name in registered_envs():
        if name == "PointMass" or name.startswith("CartPole"):
            assert isinstance(make_env(name, 2), SameStateGroups)
