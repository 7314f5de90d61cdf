"""The APG script as its user meets it: runs, resumes, evaluation and saving, trouble, mistakes; and that it learns."""

import json
import subprocess
import sys

import pytest
import torch
from trainer_cases import EXAMPLES, TRAINERS, load_script, refusals, rows

from edenrl.config import load_config
from edenrl.envs import PointMass, RolloutPlan, register_env
from edenrl.training import build_env, load_policy_weights, read_metrics, run_script

APG = TRAINERS["APG"]
train, train_apg, TINY = APG.train, APG.module, APG.flags

MODES = {
    "segments": ["--algorithm.update_horizon=12", "--algorithm.action_adjoint_max_norm=1"],
    "complete": ["--algorithm.mode=complete", "--algorithm.rollouts_per_update=2", "--algorithm.lr_schedule=constant"],
    "cart-pole": ["--env.name=CartPoleSwingUp", "--algorithm.entropy_coeff=0.01", "--env.kwargs.max_steps=25"],
}


@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_is_the_uninterrupted_run(tmp_path, mode):
    whole = APG.whole_like_parts(tmp_path, 14, 6, *MODES[mode], "--algorithm.lr_schedule=constant")
    frames = {"segments": 96, "complete": 64, "cart-pole": 32}[mode]
    assert [row["frames"] for row in rows(whole)] == [frames * (i + 1) for i in range(14)]


def test_evaluates_saves_and_keeps_the_best(tmp_path):
    train(
        tmp_path / "run",
        8,
        "--evaluation.interval_iterations=2",
        "--evaluation.metric=final_distance",
        "--evaluation.mode=min",
        "--checkpoint.interval_iterations=3",
        "--checkpoint.keep_last=9",
    )
    table = read_metrics(tmp_path / "run" / "metrics.csv")
    scores = {int(row["iteration"]) + 1: row["eval/final_distance"] for row in table if "eval/final_distance" in row}
    assert list(scores) == [2, 4, 6, 8]
    saved = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [2, 3, 4, 6, 8]
    cfg = load_config(train_apg.Train, tmp_path / "run" / "config.json")
    policy = train_apg.make_policy(cfg, build_env(cfg, num_envs=1))
    best = load_policy_weights(policy, tmp_path / "run", "best")
    assert int(best.name.split("-")[1]) == min(scores, key=scores.get)


class Poisoned(PointMass):
    """The reward of row 3 is NaN at step 10 of the run, and only then."""

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 10:
            out["reward"] = out["reward"].index_fill(0, torch.tensor([3]), float("nan"))
        return out


def test_a_poisoned_update_is_skipped_and_counted_or_stops_the_run(tmp_path, capsys):
    register_env("Poisoned", Poisoned, override=True)
    train(tmp_path / "run", 5, "--env.name=Poisoned")
    assert [row["skipped_updates"] for row in rows(tmp_path / "run")] == [0, 0, 1, 1, 1]
    assert all(value.isfinite().all() for value in APG.policy(tmp_path / "run").state_dict().values())
    with pytest.raises(SystemExit):
        run_script(
            lambda: train(tmp_path / "stop", 5, "--env.name=Poisoned", "--algorithm.skip_nonfinite=false", "--quiet")
        )
    assert "in update 3. No parameter was changed" in capsys.readouterr().err


class Scheduled(PointMass):
    """Rollouts of 2, 3, 4, ... steps."""

    def prepare_rollout(self, index):
        return RolloutPlan(index + 2, metadata={"level": index})


def test_scheduled_rollouts_have_a_budget_in_updates(tmp_path, capsys):
    register_env("Scheduled", Scheduled, override=True)
    flags = ["--env.name=Scheduled", "--algorithm.mode=complete", "--algorithm.rollouts_per_update=2"]
    train(tmp_path / "whole", 4, *flags)
    assert "4 of 4" in capsys.readouterr().out
    # Rollouts of 2 + 3, 4 + 5, 6 + 7, 8 + 9 steps of 8 environments.
    assert [row["frames"] for row in rows(tmp_path / "whole")] == [40, 112, 216, 352]
    assert [row["plan/level"] for row in rows(tmp_path / "whole")] == [1, 3, 5, 7]
    train(tmp_path / "parts", 2, *flags)
    train(tmp_path / "parts", 4, resume=True)
    assert [row["loss"] for row in rows(tmp_path / "parts")] == [row["loss"] for row in rows(tmp_path / "whole")]
    capsys.readouterr()
    assert "--algorithm.updates" in APG.refused(capsys, f"--run_dir={tmp_path / 'x'}", *TINY, *flags)


@refusals(
    """
    --algorithm.update_horizon=10 -> is not a multiple of segment_length 4
    --algorithm.gama=0.9 -> --algorithm.gamma
    --env.name=Pendulum-v1 -> GymVectorEnv has no detach_state()
    --env.name=CartPole-v1 -> has no detach_state()
    """
)
def test_mistakes_name_the_fix(refuses, flags, expected):
    refuses(APG, [*TINY, *flags], expected)


def test_evaluate_reads_the_run(tmp_path, capsys):
    train(tmp_path / "run", 2, "--env.action_mode=squash")
    capsys.readouterr()
    sys.modules["train_apg"] = train_apg
    load_script("evaluate").main([str(tmp_path / "run"), "--json", "--episodes", "6"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 6


def learn(run_dir, *flags):
    command = [sys.executable, EXAMPLES / "train_apg.py", "--run_dir", run_dir, "--quiet", "--num_threads", "1", *flags]
    subprocess.run(command, check=True)
    command = [sys.executable, EXAMPLES / "evaluate.py", run_dir, "--json", "--checkpoint", "latest", "--seed", "777"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_point_mass_learns_in_a_few_updates(tmp_path):
    flags = [
        "--algorithm.mode=complete",
        "--algorithm.segment_length=40",
        "--env.num_envs=32",
        "--algorithm.lr_schedule=constant",
        "--algorithm.actor_hidden=64,64",
    ]
    train(tmp_path / "run", 20, *flags)
    objective = [row["objective"] for row in rows(tmp_path / "run")]
    assert sum(objective[-3:]) / 3 > 0.85 * sum(objective[:3]) / 3  # negative: distances to the goal


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_point_mass_reaches_its_goal(tmp_path, seed):
    result = learn(tmp_path / "run", "--seed", seed)
    assert result["episodes"] == 128 and result["success_rate"] >= 0.95


def test_evaluation_starts_where_it_is_told(tmp_path):
    flags = ["--env.name=CartPoleSwingUp", "--env.kwargs.max_steps=1", "--evaluation.num_episodes=64"]
    train(tmp_path / "hanging", 1, *flags)
    train(tmp_path / "anywhere", 1, *flags, "--evaluation.kwargs.start_anywhere=1.0")
    upright = [
        read_metrics(tmp_path / name / "metrics.csv")[-1]["eval/upright_time"] for name in ("hanging", "anywhere")
    ]
    assert upright[0] == 0 < upright[1]


@pytest.mark.slow
def test_cart_pole_swings_up_and_holds(tmp_path):
    result = learn(tmp_path / "run", "--env.name", "CartPoleSwingUp", "--seed", "1")
    assert result["episodes"] == 20 and result["upright_time"] > 5
