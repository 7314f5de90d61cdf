"""The PPO script with worker processes: stopped, resumed, killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edenrl.training import read_metrics

SCRIPT = Path(__file__).parents[2] / "examples" / "train_ppo.py"
FRAMES = 64
TINY = [
    "--collector=multi_sync",
    "--env.num_envs=8",
    "--algorithm.steps_per_env=8",
    "--algorithm.actor_hidden=8",
    "--algorithm.critic_hidden=8",
    "--algorithm.epochs=2",
    "--algorithm.num_minibatches=2",
    "--evaluation.num_episodes=4",
    "--checkpoint.interval_iterations=1000",
    "--num_threads=1",
]
PATIENCE = 240  # seconds until a process that hangs fails its test


def launch(run_dir, iterations, *flags):
    command = [sys.executable, str(SCRIPT), f"--total_frames={iterations * FRAMES}", *flags]
    command += [f"--run_dir={run_dir}", *TINY] if not run_dir.exists() else [f"--resume={run_dir}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def session(leader):
    """Processes that a script started and that are still there."""
    members = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) == leader and int(entry) != leader:
                members.append(int(entry))
        except ProcessLookupError:
            continue
    return members


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def begun(process, run_dir):
    table = run_dir / "metrics.csv"
    wait_until(
        lambda: process.poll() is not None or (table.exists() and len(table.read_text().splitlines()) > 3),
        "the run wrote nothing",
    )
    assert process.poll() is None, process.communicate()[0]


def rows(run_dir):
    table = read_metrics(run_dir / "metrics.csv")
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("eval/")} for row in table]


pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left-over processes in /proc")


@pytest.mark.extended
def test_ctrl_c_in_a_terminal_saves_and_the_rest_equals_the_uninterrupted_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = launch(parts, 4000)
    begun(process, parts)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 130 and "Stopping after this iteration" in output, output
    assert json.loads((parts / "progress.json").read_text())["state"] == "interrupted"
    wait_until(lambda: not session(process.pid), "workers were left behind")
    done = len(rows(parts))
    for run_dir in (parts, whole):
        process = launch(run_dir, done + 3)
        output = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 0, output
    assert len(rows(whole)) == done + 3 and rows(whole) == rows(parts)


@pytest.mark.extended
def test_workers_end_with_a_killed_script(tmp_path):
    process = launch(tmp_path / "run", 4000)
    begun(process, tmp_path / "run")
    assert len(session(process.pid)) >= 2
    process.kill()
    process.communicate()
    wait_until(lambda: not session(process.pid), "workers outlived the script")
