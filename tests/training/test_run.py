import math
import os
import signal

import pytest
import torch
from tensordict import TensorDict

from edenrl.config import RunConfig
from edenrl.training import Run, average, read_metrics, rollout_metrics, setup


def test_average_leaves_out_what_a_dropped_update_left():
    metrics = [{"loss": torch.tensor(v)} for v in (1.0, math.nan, 3.0, math.inf)]
    assert average(metrics)["loss"].item() == 2.0
    assert average(metrics[1:2])["loss"].isnan()


def test_rollout_metrics_by_hand():
    done = torch.tensor([[0, 1, 0], [0, 0, 1]], dtype=torch.bool).unsqueeze(-1)
    rollout = TensorDict(
        action=torch.tensor([[0.0, 1.5, -3.0], [0.5, 0.0, 0.0]]).unsqueeze(-1),
        next=dict(
            done=done,
            episode_reward=torch.tensor([[1.0, 2.0, 9.0], [9.0, 9.0, 6.0]]).unsqueeze(-1),
            step_count=torch.tensor([[1, 2, 1], [4, 5, 6]]).unsqueeze(-1),
            metrics=dict(
                success=torch.tensor([[0.0, 1.0, math.nan], [0, 0, 0]]).unsqueeze(-1), image=torch.zeros(2, 3, 4)
            ),
        ),
        batch_size=[2, 3],
    )
    out = {
        name: value.item()
        for name, value in rollout_metrics(rollout, (torch.tensor([-1.0]), torch.tensor([1.0]))).items()
    }
    assert out == {
        "episode/count": 2, "episode/return": 4.0, "episode/length": 4.0, "episode/success_rate": 0.5,
        "action_saturation": pytest.approx(2 / 6),
    }  # fmt: skip
    rollout["next", "done"] = torch.zeros_like(done)
    assert rollout_metrics(rollout)["episode/return"].isnan()


def test_setup_seeds_everything_and_names_a_device_that_is_not_there():
    import random

    import numpy as np

    draws = []
    for _ in range(2):
        setup(RunConfig(seed=5))
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    with pytest.raises(ValueError, match="Set --device cpu"):
        setup(RunConfig(device="cuda:77"))


def test_a_run_of_ones_own(tmp_path):
    """The frame works without an environment or a policy: here it minimizes a parabola."""
    weight = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)

    def build(resume=None):
        cfg = RunConfig(run_dir=str(tmp_path / "run"), resume=resume, quiet=True)
        return Run(cfg, "Parabola", dict(policy=weight, optimizer=optimizer), iterations=10, frames_per_iteration=1)

    with pytest.raises(SystemExit) as stopped, build() as run:
        for iteration in run:
            loss = weight.weight.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss, "plain": 1.0})
            if iteration == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 130 and run.iteration == 4 and run.remaining == 6
    with build(resume=str(tmp_path / "run")) as run:
        seen = []
        for iteration in run:
            run.log({"loss": weight.weight.square().sum()})
            seen.append(iteration)
    assert seen == list(range(4, 10))
    assert [row["iteration"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == list(range(10))


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    net = torch.nn.Linear(1, 1)
    cfg = RunConfig(run_dir=str(tmp_path / "run"), resume=str(tmp_path / "run"), quiet=True)

    def build():
        return Run(cfg, "Nothing", dict(policy=net), iterations=1, frames_per_iteration=1)

    with build() as run:
        with pytest.raises(BlockingIOError, match="Another process is training in"):
            build().__enter__()
        for _ in run:
            pass
    with build():  # free again
        pass


def test_a_script_without_workers_refuses_the_flag_that_asks_for_them(tmp_path):
    cfg = RunConfig(run_dir=str(tmp_path / "run"), collector="multi_sync")
    with pytest.raises(ValueError, match="Set --collector single"):
        Run(cfg, "Nothing", dict(policy=torch.nn.Linear(1, 1)), iterations=1, frames_per_iteration=1)
