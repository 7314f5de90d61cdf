"""What holds for every environment, with one case each; the other files hold what is special about an environment."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import check_env_specs

import edenrl.envs
from edenrl.envs import (
    CartPoleSwingUp,
    ConflictPointMass,
    DifferentiableEnv,
    GymVectorEnv,
    HiddenPointMass,
    LearningEnvAdapter,
    PointMass,
    Quadruped,
    QuadrupedTerrain,
    VecEnvAdapter,
    as_vec_env,
    make_env,
    make_gym_env,
    wrap_env,
)
from edenrl.envs.quadruped import GROUPS

# The cases ------------------------------------------------------------------------------------------------------------


class AsLearning:
    """PointMass, seen as a learning environment."""

    single_observation_space: spaces.Space = spaces.Box(-np.inf, np.inf, (14,))

    def __init__(self, num_envs: int, **options: Any) -> None:
        self.env = as_vec_env(PointMass(num_envs, **options))
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.single_action_space = self.env.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.seed(seed)
        return self.env.reset()[0]["observation"], {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        observation, reward, done, extras = self.env.step(action)
        time_outs = extras["time_outs"]
        info = {"final_obs": extras["final_observations"]["observation"]}
        return observation["observation"], reward, done.bool() & ~time_outs, time_outs, info


def robot(cls: type[Quadruped]) -> Callable[..., EnvBase]:
    def build(num_envs: int, *, max_steps: int, seed: int | None, **options: Any) -> EnvBase:
        pytest.importorskip("mujoco", minversion="3.17")
        fixed = dict(groups=GROUPS, num_threads=1, randomize={"push": [0.5, 1.0]}, episode_seconds=0.02 * max_steps)
        return cls(num_envs, seed=seed, **{**fixed, **options})

    return build


MUJOCO = {"HalfCheetah-v5": (17, 6), "InvertedPendulum-v5": (4, 1), "Ant-v5": (105, 8)}


def gym(name: str) -> Callable[..., EnvBase]:
    def build(num_envs: int, *, max_steps: int, seed: int | None, **options: Any) -> EnvBase:
        if name in MUJOCO:
            pytest.importorskip("mujoco")
        return make_gym_env(name, num_envs, seed=seed, max_episode_steps=max_steps, **options)

    return build


def metrics(*names: str) -> dict[Any, tuple[int, ...]]:
    return {("metrics", name): (1,) for name in names}


@dataclass(frozen=True)
class Case:
    """An environment, how to build it, and what it promises."""

    cls: type[EnvBase]
    build: Callable[..., EnvBase]
    """``build(num_envs, *, max_steps, seed, **options)``."""
    observations: dict[Any, tuple[int, ...]]
    """Shape of every entry of ``observation_spec`` for one row."""
    action: tuple[int, ...]
    """Shape of one row's action."""
    wrong: dict[str, Any] = field(default_factory=dict)
    """Settings out of range."""
    precise: bool = False
    """Whether ``dtype`` can be chosen."""
    gradient: bool = False
    """Whether the reward of a step depends on the action of the one before, differentiably."""
    partial: bool = True
    """Whether rows can be reset before they ended."""
    resumes: bool = True
    """Whether the state is saved; that of an adapter is in the environment that it wraps."""


LIMIT = {"max_steps": 0}
POINT_METRICS = ("success", "final_distance", "path_length", "collisions")
ROBOT: dict[Any, tuple[int, ...]] = {
    "policy": (45,),
    "critic": (48,),
    "history": (6 * 45,),
    "prop": (53,),
    "scan": (132,),
    "priv_explicit": (9,),
    "priv_latent": (29,),
    "prop_history": (10 * 53,),
    "amp_window": (60,),
    "amp_gate": (1,),
    "depth": (58, 87),
    "delta_yaw_ok": (1,),
    **{("reward_groups", name): (1,) for name in ("task", "style", "penalty")},
}
ROBOT_METRICS = ("success", "fallen", "diverged", "velocity_error", "yaw_error", "distance", "difficulty")
ROBOT_WRONG: dict[str, Any] = {"episode_seconds": 0.0, "zero_commands": 2.0}
ROBOT_WRONG |= {"history_length": 0, "prop_history_length": 0}

CASES = {
    "PointMass": Case(
        PointMass,
        PointMass,
        {"observation": (14,), **metrics(*POINT_METRICS)},
        (2,),
        wrong={**LIMIT, "success_bonus": float("nan"), "dtype": torch.int64},
        precise=True,
        gradient=True,
    ),
    "ConflictPointMass": Case(
        ConflictPointMass,
        ConflictPointMass,
        {
            "observation": (10,),
            **metrics("goal_distance", "speed"),
            **{("reward_groups", name): (1,) for name in ("task", "style", "penalty")},
        },
        (2,),
        wrong=LIMIT,
        precise=True,
        gradient=True,
    ),
    "HiddenPointMass": Case(
        HiddenPointMass,
        HiddenPointMass,
        {
            "prop": (8,),
            "priv_explicit": (2,),
            "priv_latent": (6,),
            "prop_history": (80,),
            "critic": (16,),
            **metrics("tracking_error"),
        },
        (2,),
        wrong=LIMIT,
        precise=True,
    ),
    "CartPoleSwingUp": Case(
        CartPoleSwingUp,
        CartPoleSwingUp,
        {"observation": (5,), **metrics("upright_time", "hold_time", "success")},
        (1,),
        wrong={**LIMIT, "start_anywhere": 1.5},
        precise=True,
        gradient=True,
    ),
    "Quadruped": Case(
        Quadruped,
        robot(Quadruped),
        {**ROBOT, **metrics(*ROBOT_METRICS)},
        (12,),
        wrong=ROBOT_WRONG,
    ),
    "QuadrupedTerrain": Case(
        QuadrupedTerrain,
        robot(QuadrupedTerrain),
        {**ROBOT, **metrics(*ROBOT_METRICS)},
        (12,),
        wrong={**ROBOT_WRONG, "kinds": ["lava"]},
    ),
    "gym:Pendulum-v1": Case(
        GymVectorEnv, gym("Pendulum-v1"), {"observation": (3,)}, (1,), wrong={"vectorization": "ray"}
    ),
    "gym:CartPole-v1": Case(GymVectorEnv, gym("CartPole-v1"), {"observation": (4,)}, ()),
    **{
        f"gym:{name}": Case(GymVectorEnv, gym(name), {"observation": (width,)}, (actions,))
        for name, (width, actions) in MUJOCO.items()
    },
    "VecEnvAdapter": Case(
        VecEnvAdapter,
        lambda num_envs, **options: VecEnvAdapter(as_vec_env(PointMass(num_envs, **options))),
        {"observation": (14,), "final_obs_missing": (1,), **metrics(*POINT_METRICS)},
        (2,),
        resumes=False,
    ),
    "LearningEnvAdapter": Case(
        LearningEnvAdapter,
        lambda num_envs, **options: LearningEnvAdapter(AsLearning(num_envs, **options)),
        {"observation": (14,), "final_obs_missing": (1,)},
        (2,),
        partial=False,
        resumes=False,
    ),
}

every = pytest.mark.parametrize("name", CASES)


def make(name: str, num_envs: int = 4, max_steps: int = 5, seed: int | None = 0, **options: Any) -> EnvBase:
    return CASES[name].build(num_envs, **{"max_steps": max_steps, "seed": seed, **options})


def actions_of(env: EnvBase, steps: int, seed: int = 0) -> list[Tensor]:
    """Random actions, small enough that a robot stays on its feet."""
    torch.manual_seed(seed)
    drawn = [env.action_spec.rand() for _ in range(steps)]
    return [0.1 * action if action.is_floating_point() else action for action in drawn]


def play(env: EnvBase, root: TensorDictBase, actions: list[Tensor]) -> tuple[list[TensorDictBase], TensorDictBase]:
    """Steps with partial resets; the transitions and the next root."""
    steps = []
    for action in actions:
        data, root = env.step_and_maybe_reset(root.set("action", action.clone()))
        steps.append(data)
    return steps, root


def assert_equal(found: TensorDictBase, expected: TensorDictBase) -> None:
    keys = set(expected.keys(True, True))
    assert set(found.keys(True, True)) == keys
    for key in keys:
        # Metrics are NaN until the environment reports them.
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0, equal_nan=True, msg=str(key))


# What holds -----------------------------------------------------------------------------------------------------------


def test_every_environment_has_a_case(built_in_environments: frozenset[str]) -> None:
    assert built_in_environments <= set(CASES)
    published = [getattr(edenrl.envs, name) for name in edenrl.envs.__all__]
    classes = {cls for cls in published if inspect.isclass(cls) and issubclass(cls, EnvBase)}
    assert {cls for cls in classes if not inspect.isabstract(cls)} == {case.cls for case in CASES.values()}


@every
@pytest.mark.parametrize("num_envs", [1, 4])
def test_the_check_for_environments_passes(name: str, num_envs: int) -> None:
    check_env_specs(make(name, num_envs))
    check_env_specs(wrap_env(make(name, num_envs), reward_scale=0.5))


@every
def test_data_is_what_the_specs_say(name: str) -> None:
    case, env = CASES[name], make(name)
    assert type(env) is case.cls and env.batch_size == (4,) and env.device == torch.device("cpu")
    assert env.returns_fresh_tensors
    spec = env.observation_spec
    assert {key: tuple(leaf.shape) for key, leaf in spec.items(True, True)} == {
        key: (4, *shape) for key, shape in case.observations.items()
    }
    assert {leaf.dtype for leaf in spec.values(True, True)} <= {torch.float32, torch.bool}
    assert tuple(env.action_spec.shape) == (4, *case.action)
    flags = {"done", "terminated", "truncated"}
    root, last = env.reset(), play(env, env.reset(), actions_of(env, 6))[0][-1]["next"]
    for data, more in ((root, flags), (last, flags | {"reward"})):
        assert set(data.keys(True, True)) == set(case.observations) | more
        for key, leaf in spec.items(True, True):
            assert data[key].shape == leaf.shape and data[key].dtype == leaf.dtype, key
        assert all(data[flag].shape == (4, 1) and data[flag].dtype == torch.bool for flag in flags)
        assert all(leaf.device == env.device for leaf in data.values(True, True))
    assert last["reward"].shape == (4, 1) and last["reward"].dtype == env.reward_spec.dtype


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.precise])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_entry_has_the_chosen_precision(name: str, dtype: torch.dtype) -> None:
    env = make(name, dtype=dtype)
    check_env_specs(env)
    data = env.rollout(2)
    assert {leaf.dtype for leaf in data.values(True, True)} == {dtype, torch.bool}
    assert env.action_spec.dtype == env.reward_spec.dtype == dtype


@every
def test_the_seed_decides(name: str) -> None:
    def run(seed: int | None, later: int | None = None, generator: int = 0) -> TensorDictBase:
        torch.manual_seed(generator)
        env = make(name, seed=seed)
        if later is not None:
            assert env.set_seed(later) is not None
        root = env.reset()
        return torch.stack(play(env, root, actions_of(env, 12))[0])

    assert_equal(run(7), run(7, generator=3))
    assert_equal(run(8, later=7), run(9, later=7))
    assert_equal(run(7), run(8, later=7))
    assert_equal(run(None, generator=5), run(None, generator=5))
    key = next(iter(CASES[name].observations))
    for other in (run(8), run(None, generator=5)):
        assert not torch.equal(run(7)[key], other[key])
    assert not torch.equal(run(None, generator=5)[key], run(None, generator=6)[key])
    # Rows differ, and so do the episodes of a row.
    starts = run(7)[key][[0, 5, 10]]
    assert not torch.equal(starts[:, 0], starts[:, 1]) and not torch.equal(starts[0], starts[1])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.partial])
def test_a_partial_reset_touches_only_its_rows(name: str) -> None:
    keep, change = [0, 2], [1, 3]
    mask = torch.tensor([[False], [True], [False], [True]])
    env, twin = (make(name, max_steps=50) for _ in range(2))
    *before, last = actions_of(env, 5)
    root = play(env, env.reset(), before)[1]
    other = play(twin, twin.reset(), before)[1]
    after = env.reset(root.clone().set("_reset", mask))
    for key in CASES[name].observations:
        # Between steps the metrics of an adapter are unknown, and zero.
        if name != "VecEnvAdapter" or key[0] != "metrics":
            assert torch.equal(after[key][keep], root[key][keep]), key
    first = next(iter(CASES[name].observations))
    assert (after[first][change] != root[first][change]).flatten(1).any(1).all()
    assert not after["done"].any()
    # What follows in the other rows is what would have followed without the reset, but for what is drawn.
    if CASES[name].resumes and "generator" in (state := twin.get_extra_state()):
        env.set_extra_state({**env.get_extra_state(), "generator": state["generator"]})
    found, expected = (e.step(r.set("action", last))["next"] for e, r in ((env, after), (twin, other)))
    assert_equal(found[keep], expected[keep])
    assert (found[first][change] != expected[first][change]).flatten(1).any(1).all()


@every
def test_outputs_are_fresh(name: str) -> None:
    env, twin = (make(name) for _ in range(2))
    actions = actions_of(env, 12)
    steps, root = play(env, env.reset(), actions[:6])
    expected, other = play(twin, twin.reset(), actions[:6])
    kept, copies, start = [*steps, root], [data.clone() for data in (*steps, root)], root.clone()
    more, end = play(env, start.clone(), actions[6:8])
    for data, copy in zip(kept, copies, strict=True):
        assert_equal(data.exclude("action"), copy.exclude("action"))
    # Writing into what was returned does not reach the environment.
    now = end.clone()
    for data in (*kept, *more, end):
        for leaf in data.values(True, True):
            leaf.fill_(1)
    if CASES[name].precise:
        assert_equal(env.detach_state(), now.exclude("action"))
    found = play(env, now, actions[8:])[0]
    expected = play(twin, other, actions[6:])[0][2:]
    for one, two in zip(found, expected, strict=True):
        assert_equal(one["next"], two["next"])


@every
def test_a_time_out_truncates_and_keeps_the_true_last_observation(name: str) -> None:
    short, long = make(name, max_steps=5), make(name, max_steps=50)
    actions = actions_of(short, 5)
    steps, root = play(short, short.reset(), actions)
    unbroken = play(long, long.reset(), actions)[0]
    assert not any(data["next", "done"].any() for data in (*steps[:-1], *unbroken))
    last = steps[-1]["next"]
    assert last["truncated"].all() and last["done"].all() and not last["terminated"].any()
    for key in (*CASES[name].observations, "reward"):
        # The success of some tasks is to have lasted, and the log of a vector environment speaks at ends alone.
        if key != ("metrics", "success") and (name != "VecEnvAdapter" or key[0] != "metrics"):
            assert torch.equal(last[key], unbroken[-1]["next", key]), key
    first = next(iter(CASES[name].observations))
    assert (root[first] != last[first]).flatten(1).any(1).all() and not root["done"].any()
    for key in CASES[name].observations:
        if key[0] == "metrics" and key[1] != "difficulty":
            assert not root[key].any(), key


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.resumes])
def test_a_saved_state_continues_bit_for_bit(name: str) -> None:
    env = make(name)
    actions = actions_of(env, 24)
    root = play(env, env.reset(), actions[:8])[1]  # past an end, in the middle of an episode
    file, start = io.BytesIO(), root.clone()
    torch.save(env.state_dict(), file)
    expected = play(env, root, actions[8:])[0]
    assert any(data["next", "done"].any() for data in expected)
    for target in (make(name, seed=99), env):  # another one, and itself with the steps undone
        file.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that a state is not exact
            target.load_state_dict(torch.load(file, weights_only=True))
        for one, two in zip(play(target, start.clone(), actions[8:])[0], expected, strict=True):
            assert_equal(one, two)
    file.seek(0)
    with pytest.raises(ValueError, match="num_envs="):
        make(name, num_envs=2).load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gradient])
def test_a_reset_row_and_a_detached_state_carry_no_gradient(name: str) -> None:
    env = make(name, max_steps=50, dtype=torch.float64)
    cuts = isinstance(env, DifferentiableEnv)
    assert cuts

    def act() -> Tensor:
        return torch.zeros(4, *CASES[name].action, dtype=torch.float64, requires_grad=True)

    first, second, third = act(), act(), act()
    data = env.step(env.reset().set("action", first))["next"].exclude("reward")
    root = env.reset(data.set("_reset", torch.tensor([[False], [True], [False], [False]])))
    reward = env.step(root.set("action", second))["next", "reward"]
    (gradient,) = torch.autograd.grad(reward.sum(), first)
    assert not gradient[1].any() and (gradient[[0, 2, 3]].abs().sum(-1) > 0).all()

    before = env.get_extra_state()
    root = env.detach_state()
    after = env.get_extra_state()
    assert torch.equal(before["generator"], after["generator"])
    assert all(torch.equal(before["state"][key], after["state"][key]) for key in before["state"])
    assert not root["observation"].requires_grad
    reward = env.step(root.set("action", third))["next", "reward"]
    gradients = torch.autograd.grad(reward.sum(), [first, second, third], allow_unused=True)
    assert [g is None for g in gradients] == [True, True, False]


@pytest.mark.parametrize("adapter", ["VecEnvAdapter", "LearningEnvAdapter"])
def test_an_adapter_tells_what_the_environment_tells(adapter: str) -> None:
    direct, adapted = make("PointMass"), make(adapter)
    actions = actions_of(direct, 12)
    expected, found = (torch.stack(play(env, env.reset(), actions)[0]) for env in (direct, adapted))
    assert expected["next", "done"].sum() >= 8
    assert not found["next", "final_obs_missing"].any()
    missing = ["final_obs_missing", ("next", "final_obs_missing"), "metrics", ("next", "metrics")]
    assert_equal(found.exclude(*missing), expected.exclude(*missing))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "Adapter" not in name])
@pytest.mark.parametrize("num_envs", [0, -1])
def test_a_number_of_rows_below_one_is_refused(name: str, num_envs: int) -> None:
    with pytest.raises(ValueError, match=f"num_envs={num_envs} was given .* at least 1"):
        make(name, num_envs=num_envs)


@pytest.mark.parametrize(
    ("name", "setting", "value"), [(name, *wrong) for name, case in CASES.items() for wrong in case.wrong.items()]
)
def test_settings_out_of_range_are_refused_by_name(name: str, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=setting):
        make(name, **{setting: value})


@pytest.mark.parametrize("name", [name for name in CASES if "Adapter" not in name])
def test_the_registry_builds_it_and_refuses_an_unknown_keyword_by_name(name: str) -> None:
    few: dict[str, Any] = {"num_threads": 1} if "Quadruped" in name else {}
    assert type(make_env(name.upper() if "gym" not in name else name, 2, seed=0, **few)) is CASES[name].cls
    with pytest.raises(ValueError, match="no_such_setting"):
        make_env(name, 2, no_such_setting=1)
