"""Metrics of an iteration."""

import math

import pytest
import torch
from tensordict import TensorDict

from edenrl.training import average, rollout_metrics
from edenrl.training.metrics import IterationMetrics


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
        "episode/count": 2,
        "episode/return": 4.0,
        "episode/length": 4.0,
        "episode/success_rate": 0.5,
        "action_saturation": pytest.approx(2 / 6),
    }
    rollout["next", "done"] = torch.zeros_like(done)
    assert rollout_metrics(rollout)["episode/return"].isnan()


@pytest.mark.parametrize("late", [[0, 0, 0], [1, 0, 1], [1, 1, 1]])
def test_shortened_episodes_are_in_no_mean(late):
    returns, late = torch.tensor([1.0, 5.0, 9.0]), torch.tensor(late, dtype=torch.bool)
    ended = dict(done=torch.ones(3, 1).bool(), episode_reward=returns[:, None], late_start=late[:, None])
    out = rollout_metrics(TensorDict(next={**ended, "metrics": {"success": returns[:, None] / 10}}, batch_size=[3]))
    assert out["episode/count"] == (~late).sum()
    if late.all():
        assert out["episode/return"].isnan() and out["episode/success_rate"].isnan()
    else:
        assert out["episode/return"] == returns[~late].mean()
        assert out["episode/success_rate"] == pytest.approx(float(returns[~late].mean()) / 10)


def test_a_metric_that_is_nan_at_the_end_of_an_episode_is_shown():
    values = torch.tensor([[math.nan, 1.0], [math.nan, 3.0]])
    ended = dict(done=torch.tensor([[False, True], [False, True]]).unsqueeze(-1), metrics=dict(h=values.unsqueeze(-1)))
    assert rollout_metrics(TensorDict(next=ended, batch_size=[2, 2]))["episode/h"] == 2.0
    values[0, 1] = math.nan
    assert rollout_metrics(TensorDict(next=ended, batch_size=[2, 2]))["episode/h"].isnan()


def test_each_name_is_averaged_over_the_updates_that_have_it():
    one, two, five = (torch.tensor(value) for value in (1.0, 2.0, 5.0))
    out = average([{"loss": one, "extra": five}, {"loss": two}])
    assert out["loss"] == 1.5 and out["extra"] == 5.0
    assert average([]) == {}


def test_the_row_of_an_iteration():
    metrics = IterationMetrics()
    metrics.record({"loss": torch.tensor(1.0)}, {"norm": torch.tensor(4.0)})
    metrics.record(TensorDict(loss=torch.tensor(3.0)))
    assert metrics.mean("loss") == 2.0 and math.isnan(metrics.mean("unknown"))
    for length in (4, 8):
        done = torch.tensor([[[False]], [[True]]])
        ended = dict(done=done, step_count=torch.full((2, 1, 1), length), observation=torch.zeros(2, 1, 3))
        metrics.watch(TensorDict(action=torch.zeros(2, 1, 1), next=ended, batch_size=[2, 1]))
    metrics.log({"own": 7, "loss": torch.tensor(9.0)})
    row = metrics.row()
    assert row == {"loss": 9.0, "norm": 4.0, "episode/count": 2.0, "episode/length": 6.0, "own": 7.0}
    metrics.clear()
    assert metrics.row() == {}


@pytest.mark.parametrize("add", ["log", "record"])
@pytest.mark.parametrize("name", ["iteration", "seconds"])
def test_a_metric_cannot_take_the_name_of_a_column_of_the_run(add, name):
    with pytest.raises(ValueError, match=f"'{name}' is a column of the run itself"):
        getattr(IterationMetrics(), add)({name: torch.tensor(1.0)})


@pytest.mark.parametrize("add", ["log", "record"])
@pytest.mark.parametrize("shape", [(2,), (0,), (3, 1)])
def test_a_metric_that_is_no_scalar_is_refused_by_name(add, shape):
    with pytest.raises(ValueError, match=rf"'spread' has the shape \({shape[0]}"):
        getattr(IterationMetrics(), add)({"loss": torch.zeros(1), "spread": torch.zeros(shape)})


def test_plain_numbers_are_recorded():
    metrics = IterationMetrics()
    metrics.record({"a": 3.0})
    metrics.record({"a": torch.tensor([5.0])})
    assert metrics.row() == {"a": 4.0}
