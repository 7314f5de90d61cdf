"""The page "Bring your environment": its examples run, those of packages that are not installed are skipped."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from torchrl.envs.utils import check_env_specs

from edenrl.envs import registry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "environments.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
# What is imported to use what is installed.
MODULES = {
    "mjlab": "mjlab",
    "isaaclab": "isaaclab_tasks",
    "brax": "brax",
    "playground": "mujoco_playground",
    "dm_control": "dm_control",
    "genesis-world": "genesis",
}
FIRST, MY_ROBOTS, BY_NAME = BLOCKS[:3]
(MY_SLIDE,) = (block for block in BLOCKS if "class Slide(gymnasium.Env)" in block)
COMMANDS = re.findall(r"^python examples/train_ppo.py (--env.name .*)$", PAGE, flags=re.MULTILINE)


def package(block: str) -> str | None:
    found = re.match(r"# pip install (\S+)", block)
    return found and found[1]


def run(*blocks: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "environments.md", "exec"), scope)
    return scope


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the page, in the working directory of a script, whose own folder stands first in the path."""
    (tmp_path / "my_robots.py").write_text(MY_ROBOTS)
    (tmp_path / "my_slide.py").write_text(MY_SLIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    for name in ("my_robots", "my_slide"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.delitem(gymnasium.registry, "Slide-v0", raising=False)


def test_every_family_has_an_example() -> None:
    assert {package(block) for block in BLOCKS} == {None, *MODULES}
    assert len([block for block in BLOCKS if "losses = ppo_losses(" in block]) == 11


@pytest.mark.parametrize("number", [i for i, block in enumerate(BLOCKS) if "losses = ppo_losses(" in block])
def test_the_examples_of_the_page_run(number: int) -> None:
    block = BLOCKS[number]
    needed = package(block)
    if needed is not None and importlib.util.find_spec(MODULES[needed]) is None:
        pytest.skip(f"needs {needed}")
    losses = run(FIRST, block)["losses"]
    terms = {name: value for name, value in losses.items() if name.startswith("loss_")}
    assert set(terms) == {"loss_objective", "loss_critic", "loss_entropy"}
    assert all(value.isfinite() and value.requires_grad for value in terms.values())


def test_the_own_environment_of_the_page_keeps_the_contract() -> None:
    line = run(FIRST, next(block for block in BLOCKS if "class Line(EnvBase)" in block))["Line"]
    check_env_specs(line(3))
    env = line(3, seed=4)
    root = env.step_and_maybe_reset(env.rand_action(env.reset()))[1]
    reset = env.reset(root.clone().set("_reset", torch.tensor([[True], [False], [False]])))
    assert torch.equal(reset["observation"][1:], root["observation"][1:])
    assert not torch.equal(reset["observation"][0], root["observation"][0])


def test_the_registration_runs_when_pasted(tmp_path: Path) -> None:
    # As `python script.py` runs it beside my_robots.py.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert run(BY_NAME)["env"].batch_size == (4,)


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("command", COMMANDS)
def test_the_scripts_find_a_module_in_the_working_directory(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--total_frames=12288", "--evaluation.num_episodes=4", "--num_threads=1", "--quiet=true"]
    networks = ["--algorithm.actor_hidden=8", "--algorithm.critic_hidden=8", "--algorithm.epochs=1"]
    load_script("train_ppo").main([*command.split(), "--run_dir=run", *size, *networks])
    capsys.readouterr()
    load_script("evaluate").main(["run", "--json"])
    assert '"length_max": 50.0' in capsys.readouterr().out


def test_the_commands_show_a_factory_an_id_and_a_class() -> None:
    assert [command.split()[1] for command in COMMANDS] == ["my_robots:reacher", "my_slide:Slide-v0", "my_slide:Slide"]
