from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchrl.envs import EnvBase

from edenrl.envs import PointMass, make_env, register_env, registered_envs, registry


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


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of the user's own."""
    (tmp_path / "my_robots.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    for name in ("my_robots", "my_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_factory_in_the_users_own_module_is_named_by_module_and_factory(in_folder: Path) -> None:
    env = make_env("my_robots:adapted", 3, seed=1, max_steps=7)
    assert env.batch_size == (3,) and env.max_episode_length == 7
    assert type(make_env("my_robots:Mine", 2)).__name__ == "Mine"
    assert isinstance(make_env("edenrl.envs:PointMass", 1), PointMass)


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
