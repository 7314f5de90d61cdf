"""The worked example of CONTRIBUTING.md: its files, put into a copy of the library, train and resume."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = ["--env.num_envs=4", "--algorithm.steps_per_env=8", "--evaluation.num_episodes=2", "--num_threads=1"]


def files(page: Path) -> list[tuple[str, str]]:
    """Path and content of every block that stands below the path of its file."""
    return re.findall(r"^`(\S+)`\n\n```\w+\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def check_of_the_loss(page: Path) -> str:
    """The block that calls ``check_loss_module``."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "check_loss_module(A2CLoss" in block]
    return block


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
    register(folder / "edenrl" / "objectives" / "__init__.py")
    return folder


def register(path: Path) -> None:
    """Adds the loss to the tuple of the losses that are registered, and moves its import before it."""
    line = "from edenrl.objectives.a2c import A2CLoss\n"
    text = path.read_text()
    assert text.count("for _loss in (\n") == 1 and text.endswith(line)
    path.write_text(line + text.removesuffix(line).replace("for _loss in (\n", "for _loss in (\n    A2CLoss,\n"))


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
        "edenrl/config/presets.py",
        "objectives/a2c.py",
        "objectives/__init__.py",
        "examples/train_a2c.py",
        "docs/pages/algorithms/a2c.md",
    ]


def test_the_files_keep_the_widths_of_the_code(root: Path) -> None:
    contents = dict(files(root / "CONTRIBUTING.md"))
    assert len(contents["examples/train_a2c.py"].splitlines()) <= 80
    assert max(len(line) for content in contents.values() for line in content.splitlines()) <= 120


def test_the_loss_of_the_page_keeps_the_contract(library: Path, root: Path) -> None:
    check = check_of_the_loss(root / "CONTRIBUTING.md")
    run(library, "-c", f"{check}\nfrom edenrl.objectives import make_loss\nmake_loss('a2c', actor, critic)")
    run(library, "-m", "doctest", "edenrl/objectives/a2c.py")


def test_the_script_of_the_page_trains_and_resumes(library: Path) -> None:
    script = "examples/train_a2c.py"
    run(library, script, "--run_dir=run", "--total_frames=96", *SIZE)
    assert "A2C on PointMass" in run(library, script, "--resume=run", "--total_frames=160")
    rows = (library / "run" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 160 // (4 * 8)
    assert "return_mean" in run(library, "examples/evaluate.py", "run", "--json")
