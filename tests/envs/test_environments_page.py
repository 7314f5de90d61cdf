"""The page "Bring your environment": its examples run, those of packages that are not installed are skipped."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.envs.utils import check_env_specs

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


def package(block: str) -> str | None:
    found = re.match(r"# pip install (\S+)", block)
    return found and found[1]


def run(*blocks: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "environments.md", "exec"), scope)
    return scope


def test_every_family_has_an_example() -> None:
    assert {package(block) for block in BLOCKS} == {None, *MODULES}
    assert len([block for block in BLOCKS if "losses = ppo_losses(" in block]) == 11


@pytest.mark.parametrize("number", range(3, len(BLOCKS)))
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


def test_a_registered_name_reaches_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from edenrl.envs import registry

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    assert run(FIRST, MY_ROBOTS, BY_NAME)["losses"]["loss_critic"].isfinite()


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scripts_find_a_module_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = (line for line in PAGE.splitlines() if line.startswith("python examples/train_ppo.py --env.name"))
    (tmp_path / "my_robots.py").write_text(MY_ROBOTS)
    monkeypatch.chdir(tmp_path)
    # As in a script, whose own folder stands first instead of the working directory.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    monkeypatch.delitem(sys.modules, "my_robots", raising=False)
    size = ["--total_frames=12288", "--evaluation.num_episodes=4", "--num_threads=1", "--quiet=true"]
    networks = ["--algorithm.actor_hidden=8", "--algorithm.critic_hidden=8", "--algorithm.epochs=1"]
    load_script("train_ppo").main([*command.split()[2:], "--run_dir=run", *size, *networks])
    capsys.readouterr()
    load_script("evaluate").main(["run", "--json"])
    assert '"length_max": 50.0' in capsys.readouterr().out
