"""The worked example of CONTRIBUTING.md: its files, put into a copy of the library, train and resume."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import torch
from tensordict import TensorDict

from edenrl.modules import gaussian_actor, value_critic
from edenrl.objectives import make_loss
from edenrl.testing import check_loss_module

actor, critic = gaussian_actor({"observation": 3}, 2, hidden=(8,)), value_critic({"observation": 3}, hidden=(8,))
batch = actor(TensorDict(observation=torch.randn(4, 5, 3), batch_size=[4, 5])).detach()
batch.update({"advantage": torch.randn(4, 5, 1), "value_target": torch.randn(4, 5, 1)})
loss = make_loss("a2c", actor, critic)
check_loss_module(loss, batch, reaches={"loss_objective": ["policy"], "loss_critic": ["critic"]})
"""
SIZE = ["--env.num_envs=4", "--algorithm.steps_per_env=8", "--evaluation.num_episodes=2", "--num_threads=1"]


def files(page: Path) -> list[tuple[str, str]]:
    """Path and content of every block that stands below the path of its file."""
    return re.findall(r"^`(\S+)`\n\n```\w+\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def library(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library, laid out as a wheel installs it, to which the files of the page are added."""
    folder = tmp_path_factory.mktemp("library")
    ignore = shutil.ignore_patterns("__pycache__", "objectives", "collectors")
    shutil.copytree(root / "edenrl", folder / "edenrl", ignore=ignore)
    shutil.copytree(root / "examples", folder / "examples", ignore=ignore)
    for room in ("objectives", "collectors"):
        shutil.copytree(root / room, folder / "edenrl" / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name, content in files(root / "CONTRIBUTING.md"):
        path = folder / re.sub(r"^(objectives|collectors)/", r"edenrl/\1/", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:  # what the page adds to an existing file goes to its end
            file.write(content)
    return folder


def run(library: Path, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(library), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=library, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_names_the_files_of_an_algorithm(root: Path) -> None:
    names = [name for name, _ in files(root / "CONTRIBUTING.md")]
    assert names == [
        "edenrl/config/a2c.py",
        "edenrl/config/__init__.py",
        "objectives/a2c.py",
        "objectives/__init__.py",
        "examples/train_a2c.py",
        "docs/pages/algorithms/a2c.md",
    ]


def test_the_files_keep_the_widths_of_the_code(root: Path) -> None:
    contents = dict(files(root / "CONTRIBUTING.md"))
    assert len(contents["examples/train_a2c.py"].splitlines()) <= 80
    assert max(len(line) for content in contents.values() for line in content.splitlines()) <= 120


def test_the_loss_of_the_page_keeps_the_contract(library: Path) -> None:
    run(library, "-c", CHECK)
    run(library, "-m", "doctest", "edenrl/objectives/a2c.py")


def test_the_script_of_the_page_trains_and_resumes(library: Path) -> None:
    script = "examples/train_a2c.py"
    run(library, script, "--run_dir=run", "--total_frames=96", *SIZE)
    assert "A2C on PointMass" in run(library, script, "--resume=run", "--total_frames=160")
    rows = (library / "run" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 160 // (4 * 8)
    assert "return_mean" in run(library, "examples/evaluate.py", "run", "--json")
