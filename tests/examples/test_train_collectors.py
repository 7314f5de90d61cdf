"""The PPO script with worker processes: stopped, killed, resumed."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from trainer_cases import PATIENCE, TRAINERS, assert_same, checkpointed, newest, rows, wait_for

PPO = TRAINERS["PPO"]


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


def wait_until_alone(leader):
    deadline = time.monotonic() + PATIENCE
    while members := session(leader):
        assert time.monotonic() < deadline, f"the workers {members} outlived the script"
        time.sleep(0.05)


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left-over processes in /proc")
def test_stopped_and_killed_with_its_workers_and_the_rest_equals_the_uninterrupted_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = PPO.launch(parts, 4000, "--collector=multi_sync", new_session=True)
    wait_for(process, lambda: (parts / "metrics.csv").exists() and len(rows(parts)) > 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 130 and "Stopping after this iteration" in output, output
    assert json.loads((parts / "progress.json").read_text())["state"] == "interrupted"
    wait_until_alone(process.pid)

    done = len(rows(parts))
    process = PPO.launch(parts, 4000, "--checkpoint.interval_iterations=1", new_session=True)
    wait_for(process, lambda: len(rows(parts)) > done + 1)
    assert len(session(process.pid)) >= 2
    process.kill()
    process.communicate()
    wait_until_alone(process.pid)
    assert not newest(parts).name.endswith(f"{done:012d}")

    done = len(rows(parts))
    PPO.train(parts, done + 2, "--quiet", resume=True)
    PPO.train(whole, done + 2, "--quiet", "--collector=multi_sync")
    assert len(rows(whole)) == done + 2 and rows(whole) == rows(parts)
    # The workers of a resumed run number their trajectories anew.
    states = [
        {name: state for name, state in checkpointed(run).items() if name != "collector"} for run in (whole, parts)
    ]
    assert_same(*states)
