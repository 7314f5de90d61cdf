from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
import torch
from torchrl.envs import EnvBase

from edenrl.envs import GymVectorEnv, PointMass, make_env, register_env, registered_envs, registry


@pytest.fixture(autouse=True)
def _isolated_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield


def test_names_resolve_in_any_case_and_registered_ones_come_first() -> None:
    env = make_env("pointMASS", 3, seed=4, success_bonus=2.0)
    assert isinstance(env, PointMass) and env.batch_size == (3,) and env.success_bonus == 2.0
    assert torch.equal(env.reset()["observation"], PointMass(3, seed=4).reset()["observation"])
    register_env("CartPole-v1", PointMass)
    assert isinstance(make_env("cartpole-V1", 1), PointMass)
    assert not isinstance(make_env("gym:CartPole-v1", 1), PointMass)


def test_register_by_call_and_by_decorator() -> None:
    @register_env("mine")
    def mine(num_envs: int, *, device: str, seed: int | None) -> EnvBase:
        return PointMass(num_envs, device=device, seed=seed, max_steps=3)

    assert register_env("theirs", mine) is mine
    assert {"mine", "theirs", "PointMass"} <= set(registered_envs())
    assert make_env("mine", 2).max_steps == 3


def test_registering_twice_needs_override() -> None:
    with pytest.raises(ValueError, match="'PointMass' is already registered.*override=True"):
        register_env("pointmass", PointMass)
    register_env("pointmass", lambda num_envs, device, seed: PointMass(num_envs, max_steps=2), override=True)
    assert make_env("PointMass", 1).max_steps == 2
    with pytest.raises(ValueError, match="':'"):
        register_env("gym:x", PointMass)


@pytest.mark.parametrize(
    ("name", "closest"),
    [("PointMas", "PointMass"), ("HalfCheeta-v5", "HalfCheetah-v5"), ("gym:Cartpole-v1", "CartPole-v1")],
)
def test_unknown_names_list_the_closest(name: str, closest: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown environment '{name}'. Closest names: [^.]*{closest}"):
        make_env(name, 1)


def test_unknown_version_and_module() -> None:
    with pytest.raises(ValueError, match="HalfCheetah-v5"):
        make_env("HalfCheetah-v99", 1)
    with pytest.raises(ValueError, match="Unknown environment"):
        make_env("nowhere_module:Thing-v0", 1)


def test_num_envs_must_be_positive() -> None:
    with pytest.raises(ValueError, match="num_envs=0.*at least 1"):
        make_env("PointMass", 0)


def test_a_factory_must_give_the_batch_size() -> None:
    register_env("wrong", lambda num_envs, device, seed: PointMass(1))
    with pytest.raises(ValueError, match=r"'wrong' returned batch size \[1\]; expected .*\[3\]"):
        make_env("wrong", 3)


@pytest.mark.parametrize(
    ("name", "package", "hint"),
    [
        ("HalfCheetah-v5", "mujoco", r'pip install "edenrl\[mujoco\]"'),
        ("mjlab:Some-Task", "mjlab", "pip install mjlab"),
        ("isaaclab:Some-Task", "isaaclab_tasks", "IsaacLab"),
    ],
)
def test_missing_packages_give_the_install_command(
    name: str, package: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == package else find(n, *a))
    with pytest.raises(ImportError, match=hint):
        make_env(name, 1)


@pytest.mark.parametrize("name", ["Quadruped", "QuadrupedTerrain"])
def test_an_old_mujoco_is_named_with_the_version_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.setitem(sys.modules, "mujoco.batch", None)  # as before mujoco 3.17
    with pytest.raises(ImportError, match=r"mujoco 3\.17 or newer.*pip install \"edenrl\[mujoco\]\""):
        make_env(name, 1)


def test_import_loads_no_simulator() -> None:
    """Nothing beyond what TorchRL loads by itself."""
    code = (
        "import sys, torchrl.envs; before = set(sys.modules); import edenrl.envs; "
        "print([m for m in sys.modules if m.startswith(('mujoco', 'gymnasium.envs.mujoco')) and m not in before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_wrong_arguments_are_refused_with_what_is_taken() -> None:
    with pytest.raises(ValueError, match="takes .*success_bonus.* called with .*'succes_bonus'"):
        make_env("PointMass", 2, succes_bonus=3)
    with pytest.raises(ValueError, match="'CartPole-v1' does not take the arguments {'gravitas': 1}"):
        make_env("CartPole-v1", 2, gravitas=1)
    register_env("Bare", lambda num_envs: PointMass(num_envs))
    with pytest.raises(ValueError, match="A factory takes num_envs and the keywords device and seed"):
        make_env("Bare", 2)


@pytest.mark.parametrize("num_envs", [0, -1, 2.5, True, "4"])
def test_num_envs_must_be_a_positive_whole_number(num_envs: object) -> None:
    with pytest.raises(ValueError, match="expected a whole number, at least 1"):
        make_env("PointMass", num_envs)  # type: ignore[arg-type]


def test_prefixes_are_taken_in_any_case() -> None:
    assert make_env("GYM:CartPole-v1", 2).batch_size == (2,)


MODULE = """
from edenrl.envs import PointMass, VecEnvAdapter, as_vec_env


def adapted(num_envs, *, device, seed, max_steps=5):
    return VecEnvAdapter(as_vec_env(PointMass(num_envs, device=device, seed=seed, max_steps=max_steps)))


class Mine(PointMass):
    pass


number = 3
"""
GYM_MODULE = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Slide(gymnasium.Env):
    action_space = spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, width=2, start=0.5):
        self.observation_space = spaces.Box(-9, 9, (width,))
        self.start = start

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-self.start, self.start, self.observation_space.shape).astype(np.float32)
        return self.x, {}

    def step(self, action):
        self.x = np.clip(self.x + 0.1 * action, -9, 9).astype(np.float32)
        return self.x, -float(abs(self.x).sum()), False, False, {}


def make(width=2, **kwargs):
    return gymnasium.wrappers.TimeLimit(Slide(width, **kwargs), 4)


def with_num_envs(num_envs, *, device, seed):
    return Slide()


def seeded(seed):
    return Slide()


def nothing():
    return 3


gymnasium.register("Slide-v0", Slide, max_episode_steps=6)
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of the user's own."""
    (tmp_path / "my_robots.py").write_text(MODULE)
    (tmp_path / "my_slide.py").write_text(GYM_MODULE)
    (tmp_path / "my_broken.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    monkeypatch.delitem(gymnasium.registry, "Slide-v0", raising=False)
    for name in ("my_robots", "my_broken", "my_slide"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_factory_in_the_users_own_module_is_named_by_module_and_factory(in_folder: Path) -> None:
    env = make_env("my_robots:adapted", 3, seed=1, max_steps=7)
    assert env.batch_size == (3,) and env.max_episode_length == 7
    assert type(make_env("my_robots:Mine", 2)).__name__ == "Mine"
    assert isinstance(make_env("edenrl.envs:PointMass", 1), PointMass)


def ends(env: EnvBase) -> int:
    return int(env.rollout(12, break_when_any_done=False)["next", "truncated"].sum())


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("name", "kwargs", "width", "episodes"),
    [
        ("my_slide:Slide-v0", {}, 2, 2),
        ("my_slide:Slide-v0", {"width": 5, "max_episode_steps": 3}, 5, 4),
        ("gym:my_slide:Slide-v0", {}, 2, 2),
        ("my_slide:Slide", {}, 2, 0),
        ("my_slide:Slide", {"width": 4, "max_episode_steps": 4}, 4, 3),
        ("my_slide:make", {"width": 3}, 3, 3),
    ],
)
def test_gymnasium_environments_in_the_users_own_module(
    in_folder: Path, name: str, kwargs: dict[str, int], width: int, episodes: int, num_envs: int
) -> None:
    env = make_env(name, num_envs, seed=3, **kwargs)
    assert isinstance(env, GymVectorEnv) and env.batch_size == (num_envs,)
    assert env.observation_spec["observation"].shape == (num_envs, width)
    assert ends(env) == episodes * num_envs
    starts = [make_env(name, num_envs, seed=seed, **kwargs).reset()["observation"] for seed in (3, 3, 4)]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_what_takes_a_number_of_environments_is_called_with_it() -> None:
    def counted(n: int, **kwargs: object) -> EnvBase:
        return PointMass(n, **kwargs)  # type: ignore[arg-type]

    def listed(*args: int, **kwargs: object) -> EnvBase:
        return PointMass(*args, **kwargs)  # type: ignore[arg-type]

    for factory in (counted, listed, lambda n, device, seed: PointMass(n, seed=seed)):
        register_env("Counted", factory, override=True)
        assert make_env("Counted", 3).batch_size == (3,)


def test_registered_gymnasium_classes_and_factories_are_built_too(in_folder: Path) -> None:
    make_env("my_slide:Slide", 1)
    module = sys.modules["my_slide"]
    register_env("Sliding", module.Slide)
    register_env("SlidingShort", module.make)
    register_env("SlidingLambda", lambda width: module.Slide(width))
    assert make_env("sliding", 2, width=7, max_episode_steps=2).observation_spec["observation"].shape == (2, 7)
    assert ends(make_env("slidingshort", 2)) == 6
    assert make_env("slidinglambda", 2, width=6).observation_spec["observation"].shape == (2, 6)
    env = make_env("Sliding", 2, vectorization="async")
    assert env.reset()["observation"].shape == (2, 2)
    env.close()


def test_mistakes_in_gymnasium_factories_are_named(in_folder: Path) -> None:
    with pytest.raises(ValueError, match="'my_slide:with_num_envs' returned a Slide; .*single Gymnasium environment"):
        make_env("my_slide:with_num_envs", 2)
    with pytest.raises(ValueError, match="'my_slide:seeded' takes .*single Gymnasium environment takes none"):
        make_env("my_slide:seeded", 2)
    with pytest.raises(ValueError, match="'my_slide:nothing' cannot be built.*gymnasium.Env"):
        make_env("my_slide:nothing", 2)
    with pytest.raises(ValueError, match="'my_slide:Slide' does not take the arguments {'wide': 2}"):
        make_env("my_slide:Slide", 2, wide=2)
    with pytest.raises(ValueError, match="'my_slide' has no function or class 'Slide-v1'.*Slide-v0"):
        make_env("my_slide:Slide-v1", 2)


def test_mistakes_in_module_and_factory_are_named(in_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'my_robots:adaptd': 'my_robots' has no function or class 'adaptd'.*adapted"):
        make_env("my_robots:adaptd", 1)
    with pytest.raises(ValueError, match="has no function or class 'number'"):
        make_env("my_robots:number", 1)
    with pytest.raises(ValueError, match=f"no module 'my_robot' in {in_folder}"):
        make_env("my_robot:adapted", 1)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        make_env("my_broken:adapted", 1)
    with pytest.raises(ValueError, match="takes .*max_steps.* called with .*'steps'"):
        make_env("my_robots:adapted", 1, steps=3)


@pytest.mark.parametrize("name", [".my_robots:reacher", "./my_robots:reacher", ":reacher"])
def test_what_cannot_be_a_module_is_refused_by_name(name):
    with pytest.raises(ValueError, match="Unknown environment .* is no module name. Expected <module>:<factory>"):
        make_env(name, 2)


def test_the_arguments_of_an_inherited_constructor_are_checked():
    class Sub(PointMass):
        pass

    register_env("Sub", Sub, override=True)
    with pytest.raises(ValueError, match="bogus"):
        make_env("Sub", 2, bogus=1)


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "def __init__(self, width): pass",
        "def __init__(self, num_envs, *, device, seed): pass",
        "def __init__(self, *args, **kwargs): pass",
    ],
)
@pytest.mark.parametrize("base", ["", "(dict)", "(torch.nn.Module)", "(enum.Enum)"])
def test_a_class_that_is_no_environment_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, body: str
) -> None:
    (tmp_path / "no_envs.py").write_text(f"import enum, torch\nclass NotAnEnv{base}:\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "no_envs", raising=False)
    with pytest.raises(ValueError, match="'no_envs:NotAnEnv' is the class NotAnEnv, which is no environment; expected"):
        make_env("no_envs:NotAnEnv", 2)
    register_env("NotAnEnv", sys.modules["no_envs"].NotAnEnv, override=True)
    with pytest.raises(ValueError, match="'NotAnEnv' is the class NotAnEnv, which is no environment"):
        make_env("NotAnEnv", 2)
    registry._REGISTRY.pop("notanenv")
