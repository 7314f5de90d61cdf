"""Showing a run's policy, and the quadruped under the training script."""

import subprocess
import sys

import pytest
from trainer_cases import EXAMPLES, load_script, rows

pytest.importorskip("mujoco", minversion="4.0")
imageio = pytest.importorskip("imageio")

TINY = ["--env.num_envs=4", "--evaluation.num_episodes=1", "--num_threads=1", "--checkpoint.interval_iterations=2"]
FRAMES = 4 * 24


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "robot"
    arguments = [f"--run_dir={folder}", "--env.name=Quadruped", f"--total_frames={2 * FRAMES}", "--quiet", *TINY]
    load_script("train_ppo").main(arguments)
    return folder


def test_writes_an_animation(run_dir, capsys):
    load_script("play").main([str(run_dir), "--lines", "--seconds", "0.4"])
    frames = imageio.mimread(run_dir / "play.gif")
    assert len(frames) == 10 and frames[0].shape[:2] == (360, 480)
    assert (frames[0] != frames[-1]).any()
    assert "10 frames" in capsys.readouterr().out


def test_shows_a_student_that_carries_a_state(tmp_path):
    small = ["--env.num_envs=2", "--evaluation.num_episodes=1", "--num_threads=1", "--quiet"]
    short = ["--env.kwargs.episode_seconds=0.4", '--env.kwargs.kinds=["rough"]', "--algorithm.steps_per_env=10"]
    teacher = [f"--run_dir={tmp_path / 'teacher'}", "--env.name=QuadrupedTerrain", "--total_frames=20", *short, *small]
    load_script("train_rma").main([*teacher, "--algorithm.dagger_update_freq=1", "--algorithm.epochs=1"])
    student = [str(tmp_path / "teacher"), f"--run_dir={tmp_path / 'student'}", "--total_frames=20", *small]
    load_script("distill_rma").main([*student, "--algorithm.steps_per_env=5", "--algorithm.depth_hidden=8"])
    load_script("play").main([str(tmp_path / "student"), "--lines", "--seconds", "0.2"])
    assert len(imageio.mimread(tmp_path / "student" / "play.gif")) == 5


def test_draws_lines_where_there_is_no_opengl(run_dir, tmp_path, capsys, monkeypatch):
    play = load_script("play")

    def no_context(env):
        raise RuntimeError("no display")

    monkeypatch.setattr(play, "Rendered", no_context)
    play.main([str(run_dir), "--output", str(tmp_path / "a.gif"), "--seconds", "0.2"])
    assert len(imageio.mimread(tmp_path / "a.gif")) == 5
    assert "RuntimeError: no display" in capsys.readouterr().err


def test_refuses_another_kind_of_file(run_dir):
    with pytest.raises(ValueError, match=r"\.gif or \.mp4"):
        load_script("play").main([str(run_dir), "--output", "play.png"])


def test_a_run_resumes_bit_for_bit(run_dir, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train, name = load_script("train_ppo"), "--env.name=Quadruped"
    short = "--env.kwargs.episode_seconds=0.5"  # several episodes end on the way
    train.main([f"--run_dir={whole}", name, short, f"--total_frames={4 * FRAMES}", "--quiet", *TINY])
    train.main([f"--run_dir={parts}", name, short, f"--total_frames={2 * FRAMES}", "--quiet", *TINY])
    train.main([f"--resume={parts}", f"--total_frames={4 * FRAMES}", "--quiet"])
    expected, got = rows(whole), rows(parts)
    assert len(expected) == 4 and got == expected
    assert sum(row["episode/count"] for row in expected) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_quadruped_follows_commands_and_stands_still(tmp_path, seed):
    import json

    def evaluate(kwargs):
        command = [sys.executable, EXAMPLES / "evaluate.py", tmp_path / "run", "--json", "--seed", "777"]
        command += ["--checkpoint", "latest", "--episodes", "64", "--kwargs", json.dumps(kwargs)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    command = [sys.executable, EXAMPLES / "train_ppo.py", "--env.name", "Quadruped", "--seed", seed, "--quiet"]
    subprocess.run([*command, "--run_dir", tmp_path / "run", "--num_threads", "1"], check=True)
    moving, standing = evaluate({}), evaluate({"zero_commands": 1.0})
    assert moving["velocity_error"] < 0.10 and moving["fallen"] == 0.0
    assert standing["velocity_error"] < 0.03 and standing["fallen"] == 0.0
