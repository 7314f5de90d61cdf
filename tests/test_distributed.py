"""Two processes that train one policy: equal where they must be, together when one fails or is stopped."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trainer_cases import TRAINERS, rows

from edenrl import distributed
from edenrl.training import read_metrics

EXAMPLES = Path(__file__).parents[1] / "examples"
CASES = Path(__file__).parent / "distributed_cases.py"
TINY = TRAINERS["PPO"].flags
FRAMES = 2 * TRAINERS["PPO"].frames
ITERATIONS = 80
PATIENCE = 180  # seconds until a process that hangs fails its test


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(*arguments):
    """Two processes with the variables of torchrun, but nobody who ends one when the other fails."""
    port = str(free_port())
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(CASES), *map(str, arguments)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def start_torchrun(*arguments):
    """Under torchrun, in a process group of its own that a signal can reach as a terminal's would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", str(free_port())]
    return subprocess.Popen(
        [*command, str(CASES), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process):
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        pytest.fail(f"still running after {PATIENCE} s:\n{process.communicate()[0]}")


def results(folder):
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def wait_for_iteration(run_dir, number, *processes):
    table = run_dir / "metrics.csv"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if table.exists() and len(table.read_text().splitlines()) > number:
            return
        time.sleep(0.02)
    pytest.fail(f"no iteration {number}: {[finish(p) for p in processes if p.poll() is not None]}")


@pytest.fixture(scope="module")
def units(tmp_path_factory):
    folder = tmp_path_factory.mktemp("units")
    for process in start_ranks("units", folder):
        output = finish(process)
        assert process.returncode == 0, output
    return results(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("whole")
    process = start_torchrun("train", folder, *TINY, f"--total_frames={ITERATIONS * FRAMES}", f"--run_dir={folder}/run")
    output = finish(process)
    assert process.returncode == 0, output
    return folder, output


@pytest.mark.parametrize("normalize", ["rollout", "minibatch"])
def test_half_the_environments_in_each_process_is_all_of_them_in_one(units, normalize):
    alone, first, second = units[0]["alone"][normalize], *(unit["together"][normalize] for unit in units)
    assert len(set(alone["rates"])) > 1, "the learning rate never changed: the test proves too little"
    assert min(alone["norms"]) > 0.01, "nothing was clipped: the test proves too little"
    assert max(alone["clipped"]) > 0, "no ratio was clipped: the test proves too little"
    assert alone["rates"] == first["rates"] == second["rates"]
    for network in ("actor", "critic"):
        for name, value in alone[network].items():
            torch.testing.assert_close(first[network][name], value, rtol=1e-5, atol=1e-5)
            assert torch.equal(first[network][name], second[network][name]), f"{name} differs between the processes"


def test_statistics_are_those_of_all_samples(units):
    for unit in units:
        assert unit["statistics"] == {
            "even": [6.0, 26.0, 4],
            "uneven": [3.25, 15.6875, 4],
            "one has none": [2.0, 1.0, 2],
            "twice nothing": [6.0, 26.0, 4],
            "loaded": [6.0, 26.0, 4],
        }


def test_a_loss_that_is_not_finite_in_one_process_is_dropped_by_both(units):
    for unit in units:
        assert unit["steps"]["skipped"] == 2 and unit["steps"]["unchanged"]
        assert "Non-finite gradient in used.weight" in unit["steps"]["raised"]
    assert "in at least one process" in units[0]["steps"]["raised"]


def test_a_head_that_one_process_does_not_use_gets_half_its_gradient(units):
    for unit in units:
        moved = {name: torch.tensor(value) for name, value in unit["steps"]["moved"].items()}
        torch.testing.assert_close(moved["used.weight"], torch.tensor([[0.1, 0.2]]))
        torch.testing.assert_close(moved["other.weight"], torch.tensor([[0.05, 0.1]]))


def test_the_rate_follows_the_mean_kl(units):
    """Target 0.01; means 0.02 (at the edge: no change), 0.003 (up), 0.023 (down), NaN (no change, counted)."""
    for unit in units:
        assert unit["steps"]["rates"] == pytest.approx([1e-3, 1.5e-3, 1e-3, 1e-3], rel=1e-6)
        assert unit["steps"]["bad kl"] == 1


def test_a_metric_of_one_process_neither_blocks_nor_vanishes(units):
    for unit in units:
        assert unit["row"] == {"loss": 0.5, "episode/count": 3.0, "only here": 5.0}
        assert unit["from_first"] == "rank 0"


def test_rows_are_averaged_by_episodes():
    rows = [
        {"loss": 1.0, "kl": math.nan, "episode/count": 3.0, "episode/return": 10.0, "episode/length": 4.0},
        {"loss": 2.0, "kl": 0.5, "episode/count": 0.0, "episode/return": math.nan, "episode/length": math.nan},
        {"loss": 6.0, "kl": 1.5, "episode/count": 1.0, "episode/return": 2.0, "episode/length": 8.0},
    ]
    assert distributed.average_rows(rows) == {
        "loss": 3.0, "kl": 1.0, "episode/count": 4.0, "episode/return": 8.0, "episode/length": 5.0
    }  # fmt: skip
    none = distributed.average_rows([{"episode/count": 0.0, "episode/return": math.nan}] * 2)
    assert none["episode/count"] == 0 and math.isnan(none["episode/return"])
    assert distributed.average_rows(rows[:1]) == pytest.approx(rows[0], nan_ok=True)


def test_a_run_of_two_processes(whole):
    folder, output = whole
    first, second = results(folder)
    assert first["digest"] == second["digest"] and first["lr"] == second["lr"]
    assert first["iteration"] == second["iteration"] == ITERATIONS
    assert not torch.equal(first["env seed"], second["env seed"])
    assert not torch.equal(first["torch rng"], second["torch rng"])
    assert first["written"] and second["written"] == []
    run = folder / "run"
    assert {path.name for path in run.iterdir()} == {
        "config.json",
        "metrics.csv",
        "observations.json",
        "progress.json",
        "checkpoints",
    }
    rows = read_metrics(run / "metrics.csv")
    assert [row["frames"] for row in rows] == [FRAMES * (i + 1) for i in range(ITERATIONS)]
    assert output.count("best checkpoint") == 1 and "Error" not in output
    # Both processes' samples are in the statistics.
    assert int(first["state"]["policy.module.0.module.norm.count"]) == ITERATIONS * FRAMES


@pytest.mark.extended
def test_stopped_and_resumed_equals_uninterrupted(whole, tmp_path):
    """Ctrl-C reaches every process of the group; SIGTERM goes to torchrun, which passes it on."""
    place = [f"--run_dir={tmp_path}/run", *TINY]
    many = f"--total_frames={2000 * FRAMES}"
    for number, stop in ((3, lambda p: os.killpg(p.pid, signal.SIGINT)), (7, lambda p: p.send_signal(signal.SIGTERM))):
        process = start_torchrun("train", tmp_path, *place, many)
        wait_for_iteration(tmp_path / "run", number, process)
        stop(process)
        output = finish(process)
        assert process.returncode != 0 and output.count("Stopping after this iteration") == 1, output
        assert "continue with" in output and "Stopped at once" not in output, output
        assert json.loads((tmp_path / "run" / "progress.json").read_text())["state"] == "interrupted"
        done = len(read_metrics(tmp_path / "run" / "metrics.csv"))
        kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
        assert f"checkpoint-{done:012d}" in kept and not [name for name in kept if name.startswith(".")]
        place = [f"--resume={tmp_path}/run"]
    assert done < ITERATIONS, "the signals came too late to leave anything to resume"
    process = start_torchrun("train", tmp_path, *place, f"--total_frames={ITERATIONS * FRAMES}")
    output = finish(process)
    assert process.returncode == 0, output
    for ours, theirs in zip(results(tmp_path), results(whole[0]), strict=True):
        assert ours["digest"] == theirs["digest"] and torch.equal(ours["torch rng"], theirs["torch rng"])
    assert rows(whole[0] / "run") == rows(tmp_path / "run")


def test_two_processes_start_from_the_weights_of_another_run(whole, tmp_path):
    still = ["--algorithm.lr=1e-12", "--algorithm.lr_schedule=constant", f"--init_from={whole[0] / 'run'}"]
    flags = [*TINY, *still, "--init_checkpoint=latest", f"--total_frames={FRAMES}", f"--run_dir={tmp_path}/run"]
    process = start_torchrun("train", tmp_path, *flags)
    output = finish(process)
    assert process.returncode == 0 and output.count("all of it was taken") == 2, output
    before, (first, second) = results(whole[0])[0]["state"], results(tmp_path)
    assert first["digest"] == second["digest"]
    for key in (key for key in before if key.startswith("policy.") and ".norm." not in key):
        torch.testing.assert_close(first["state"][key], before[key], rtol=0, atol=1e-8)


def test_another_number_of_processes_is_refused(whole, capsys):
    message = TRAINERS["PPO"].refused(capsys, f"--resume={whole[0] / 'run'}")
    assert "was saved by 2 process(es), this run has 1" in message and "torchrun --nproc_per_node 2" in message


def test_an_error_in_one_process_ends_both_with_its_message(tmp_path):
    process = start_torchrun(
        "train", tmp_path, *TINY, "--env.name=Fragile", f"--total_frames={100 * FRAMES}", f"--run_dir={tmp_path}/run"
    )
    output = finish(process)
    assert process.returncode != 0
    assert "process 1: error: the simulator of this process broke" in output
    assert "Process 0 stops because of process 1: ValueError: the simulator of this process broke" in output


def test_a_killed_process_ends_the_other(tmp_path):
    processes = start_ranks("train", tmp_path, *TINY, f"--total_frames={5000 * FRAMES}", f"--run_dir={tmp_path}/run")
    wait_for_iteration(tmp_path / "run", 3, *processes)
    os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGKILL)
    # Its peer's sockets close with the killed process, so the rest takes no time-out to notice.
    output = processes[0].communicate(timeout=30)[0]
    assert processes[0].returncode not in (0, None)
    assert "Process 0 stops because of another process ended without a message" in output
    processes[1].communicate()
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["state"] == "failed"


def test_in_a_single_process_everything_is_this_process():
    assert (distributed.rank(), distributed.world_size(), distributed.local_device("cpu")) == (0, 1, "cpu")
    net = torch.nn.Linear(2, 1)
    before = net.weight.clone()
    distributed.broadcast_modules([net])
    component = distributed.PerProcess(net)
    component.collect()
    saved = {name: value.clone() for name, value in component.state_dict().items()}
    net.weight.data.zero_()
    component.load_state_dict(saved)
    assert torch.equal(net.weight, before)
