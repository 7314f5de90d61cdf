"""Runs that begin at random steps of their first episodes: time-outs spread, seeds, resume, logs, and who refuses."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import TRAINERS, refusals, rows

from edenrl.collectors import make_collector
from edenrl.config import RunConfig, load_config
from edenrl.envs import make_env
from edenrl.training import Run, build_env, evaluate_run, make_policy

PPO = TRAINERS["PPO"]
CPU = [
    "--env.name=CartPoleSwingUp",
    "--env.kwargs.max_steps=30",
]  # nothing terminates, episodes of 30 steps


def collected(tmp_path: Path, frames: int, **settings: Any) -> tuple[Any, Any]:
    """What a run with default settings collects first, and its configuration."""
    cfg = PPO.module.Train(run_dir=str(tmp_path / "run"), quiet=True, **settings)
    with Run(cfg) as run:
        env = run.env()
        policy = run.keep(policy=make_policy(cfg, env), critic=torch.nn.Linear(1, 1))[0]
        options = run.collector_options(frames // cfg.env.num_envs)
        with make_collector(run.training_env(env), policy, **options) as collector:
            return next(iter(collector)).clone(), cfg


@pytest.mark.parametrize(("num_envs", "steps", "seed"), [(32, 30, 1), (96, 50, 7)])
def test_time_outs_of_the_robot_are_spread_over_the_steps(tmp_path: Path, num_envs: int, steps: int, seed: int) -> None:
    pytest.importorskip("mujoco")
    env = {"name": "Quadruped", "num_envs": num_envs, "kwargs": {"episode_seconds": 0.02 * steps, "num_threads": 1}}
    data, _ = collected(tmp_path, num_envs * steps, env=env, seed=seed)
    timed_out = data["next", "truncated"].squeeze(-1) & data["next", "late_start"].squeeze(-1)
    times = Counter(timed_out.nonzero()[:, 1].tolist())
    assert sum(times.values()) > 0.6 * num_envs, "most robots stand that long"
    assert len(times) > steps / 3 and max(times.values()) < num_envs / 4
    assert not (data["next", "truncated"] & data["next", "terminated"])[timed_out].all()


def test_without_it_all_time_out_together(tmp_path: Path) -> None:
    env = {"name": "CartPoleSwingUp", "num_envs": 16, "kwargs": {"max_steps": 30}, "random_start": False}
    data, _ = collected(tmp_path, 16 * 60, env=env)
    assert "late_start" not in data["next"].keys()
    assert data["next", "truncated"].squeeze(-1).sum(0).nonzero().flatten().tolist() == [29, 59]


@pytest.mark.parametrize("workers", [1, 2])
def test_equal_seeds_start_alike_and_workers_differ(tmp_path: Path, workers: int) -> None:
    def first(seed: int) -> list[int]:
        options = {"collector": "single" if workers == 1 else "multi_sync", "num_workers": workers}
        env = {"name": "CartPoleSwingUp", "num_envs": 12, "kwargs": {"max_steps": 30}}
        data, _ = collected(tmp_path, 12 * 30, env=env, seed=seed, **options)
        return data["next", "done"].squeeze(-1).int().argmax(1).tolist()

    starts = first(3)
    assert starts == first(3) != first(4) and len(set(starts)) > 5
    assert starts[:6] != starts[6:]


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path) -> None:
    """Cut after 16 of the 30 steps of an episode: some first episodes have ended, some go on."""
    PPO.whole_like_parts(tmp_path, 8, 2, *CPU, dies=True)


def test_workers_resume_too(tmp_path: Path) -> None:
    flags = [*CPU, "--collector=multi_sync", "--algorithm.lr_schedule=constant"]
    PPO.train(tmp_path / "whole", 7, *flags)
    PPO.train(tmp_path / "parts", 2, *flags)
    PPO.train(tmp_path / "parts", 7, resume=True)
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert sum(row["episode/count"] for row in rows(tmp_path / "whole")) > 0


def test_a_run_that_did_not_know_it_resumes(tmp_path: Path, monkeypatch: Any) -> None:
    """Its checkpoint is as those of earlier versions: no clock is set on resume, and every episode counts."""
    monkeypatch.setattr("edenrl.training.environment.can_start_late", lambda env: False)
    PPO.train(tmp_path / "run", 2, *CPU)
    monkeypatch.undo()
    PPO.train(tmp_path / "run", 8, resume=True)
    assert [row["episode/count"] for row in rows(tmp_path / "run")] == [0, 0, 0, 8, 0, 0, 0, 8]


def test_means_over_episodes_leave_shortened_ones_out(tmp_path: Path) -> None:
    PPO.train(tmp_path / "run", 12, *CPU)
    table = rows(tmp_path / "run")
    assert sum(row["episode/count"] for row in table) > 8
    lengths = {row["episode/length"] for row in table if row["episode/count"]}
    assert lengths == {30.0}
    assert all(math.isnan(row.get("episode/return", math.nan)) for row in table[:3])


def test_evaluations_start_at_step_zero(tmp_path: Path) -> None:
    PPO.train(tmp_path / "run", 1, *CPU)
    cfg = load_config(PPO.module.Train, tmp_path / "run" / "config.json")
    cfg.env.random_start = True
    result = evaluate_run(cfg, PPO.policy(tmp_path / "run"), num_episodes=6)
    assert result["length_mean"] == 30.0


@refusals(
    """
    PPO --env.name=Pendulum-v1 --env.random_start=true -> Pendulum-v1 cannot start at random steps of its episodes
    GRPO --env.random_start=true -> env.random_start is not for GRPO: the environments of a group are compared
    APG --env.random_start=true -> env.random_start is not for APG: its gradients reach through whole rollouts
    """
)
def test_where_it_cannot_be_it_is_refused(tmp_path: Path, capsys: Any, flags: list[str], expected: str) -> None:
    script = TRAINERS[flags[0]]
    assert expected in script.refused(capsys, *script.flags, f"--run_dir={tmp_path / 'run'}", *flags[1:])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["GRPO", "APG"])
def test_grpo_and_apg_start_whole(name: str) -> None:
    assert TRAINERS[name].module.Train().random_start is False
    assert RunConfig().random_start is None
    assert build_env(RunConfig(), num_envs=2).max_steps == make_env("PointMass", 2).max_steps


def test_a_resumed_run_cannot_change_it(tmp_path: Path, capsys: Any) -> None:
    PPO.train(tmp_path / "run", 1, *CPU)
    message = PPO.refused(capsys, f"--resume={tmp_path / 'run'}", "--env.random_start=false", "--total_frames=640")
    assert "env.random_start" in message
