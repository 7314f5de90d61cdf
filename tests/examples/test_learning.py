"""Does it learn? One task sized for every change, the others for `pytest -m slow`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edenrl.training import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


def train_and_evaluate(run_dir, *flags, script="train_ppo.py"):
    command = [sys.executable, EXAMPLES / script, "--run_dir", run_dir, "--quiet", "--num_threads", "1", *flags]
    subprocess.run(command, check=True)
    command = [sys.executable, EXAMPLES / "evaluate.py", run_dir, "--json", "--checkpoint", "latest", "--seed", "777"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.extended
def test_point_mass_reaches_its_goal(tmp_path):
    result = train_and_evaluate(tmp_path / "run", "--checkpoint.interval_iterations", "1000")
    assert result["episodes"] == 128 and result["success_rate"] >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["2", "3"])
def test_point_mass_on_other_seeds(tmp_path, seed):
    assert train_and_evaluate(tmp_path / "run", "--seed", seed)["success_rate"] >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "solved"), [("CartPole-v1", 475), ("Pendulum-v1", -200), ("InvertedPendulum-v5", 1000)]
)
def test_small_gymnasium_tasks_are_solved(tmp_path, env, solved):
    assert train_and_evaluate(tmp_path / "run", "--env.name", env)["return_mean"] >= solved


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_half_cheetah_runs(tmp_path, seed):
    result = train_and_evaluate(tmp_path / "run", "--env.name", "HalfCheetah-v5", "--seed", seed)
    assert result["return_mean"] >= 4500 and result["return_median"] >= 5000


@pytest.mark.slow
def test_half_cheetah_runs_with_simba_and_muon(tmp_path):
    result = train_and_evaluate(tmp_path / "run", "--env.name", "HalfCheetah-v5", script="train_simba.py")
    assert result["return_mean"] >= 5500


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.7, 0.9])
def test_constrained_ppo_keeps_the_share_of_the_task_that_is_asked_for(tmp_path, alpha):
    train_and_evaluate(tmp_path / "run", "--algorithm.alpha", str(alpha), script="train_cmdp.py")
    table = read_metrics(tmp_path / "run" / "metrics.csv")
    settled = [row["task_ratio"] for row in table[-60:]]
    assert abs(sum(settled) / len(settled) - alpha) <= 0.05
    # On the task alone it is about -130.
    assert table[-1]["eval/style_return"] > -60
