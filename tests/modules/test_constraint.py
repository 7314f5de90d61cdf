"""TaskConstraint against the published sequence, tables worked out by hand, and resumption."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edenrl.modules import TaskConstraint

GOLDEN = "cmdp"


def update(constraint, *returns):
    """One update with these finished episodes, one after another in a single environment, and some that run on."""
    steps = len(returns) + 1
    sums, done = torch.full((1, steps, 1), 99.0), torch.zeros(1, steps, 1, dtype=torch.bool)
    sums[0, : len(returns), 0] = torch.tensor([float(r) for r in returns])
    done[0, : len(returns)] = True
    constraint.update(sums, done)


@pytest.mark.parametrize("sequence", ["a", "b"])
def test_the_published_controller(golden, sequence):
    g = golden
    constraint = TaskConstraint(
        float(g["dual_alpha"]),
        lambda_lr=float(g["dual_lambda_lr"]),
        lambda_init=float(g["dual_lambda_init"]),
        warmup_iters=int(g["dual_warmup"]),
        vg_window=int(g["dual_vg_window"]),
        vg_star_window=int(g["dual_star_window"]),
    )
    rest = list(g[f"dual_{sequence}_returns"])
    for i, count in enumerate(g[f"dual_{sequence}_counts"]):
        assert float(constraint.weight) == pytest.approx(float(g[f"dual_{sequence}_w_task_used"][i]), abs=1e-5)
        update(constraint, *rest[:count])
        rest = rest[count:]
        warm = i < int(g["dual_warmup"])
        # The release parks lambda at 20 during warm-up; ours rests at its start, which is where both go on from.
        expected = float(g["dual_lambda_init"]) if warm else float(g[f"dual_{sequence}_lambda"][i])
        assert float(constraint.multiplier) == pytest.approx(expected, abs=1e-5)
        if not warm:
            after = float(constraint.weight)
            assert after == pytest.approx(float(g[f"dual_{sequence}_w_task_after"][i]), abs=1e-5)
        for name in ("vg_hat", "vg_star", "ratio"):
            value = {
                "vg_hat": constraint.task_return,
                "vg_star": constraint.task_return_best,
                "ratio": constraint.ratio,
            }
            published = float(g[f"dual_{sequence}_{name}"][i])
            assert float(value[name]) == pytest.approx(published, rel=1e-5, abs=1e-5, nan_ok=True)
    assert not rest


def test_the_published_task_returns(golden):
    """Every finished episode counts once, with the sum of its task rewards; what runs on does not."""
    sums, running = [], torch.zeros(golden["rg"].shape[1])
    for reward, done in zip(golden["rg"], golden["dones"], strict=True):
        running = running + reward
        sums.append(running)
        running = torch.where(done, 0.0, running)
    torch.testing.assert_close(running, golden["unfinished_task_sums"], rtol=1e-5, atol=1e-5)
    finished = golden["finished_task_returns"]
    for window in (1, len(finished)):
        constraint = TaskConstraint(vg_window=window)
        constraint.update(torch.stack(sums, 1).unsqueeze(-1), golden["dones"].T.unsqueeze(-1))
        expected = finished[-window:].mean()
        torch.testing.assert_close(constraint.task_return.float(), expected, rtol=1e-5, atol=1e-5)


# Each row: finished returns, then J_hat, J_star, ratio and lambda after the update; alpha 0.9, lambda_lr 0.05.
TABLES = {
    "no episode yet, then the field case: ratio 0.5 from lambda 0 gives 0.02": (
        dict(vg_window=1),
        [
            ([], math.nan, math.nan, math.nan, 0.0),
            ([], math.nan, math.nan, math.nan, 0.0),
            ([10], 10, 10, 1.0, -0.005),
            ([5], 5, 10, 0.5, 0.015),
            ([], 5, 10, 0.5, 0.035),  # nothing new: the window is what it was
        ],
    ),
    "a window smaller than the history": (
        dict(vg_window=2),
        [([1, 3], 2, 2, 1.0, -0.005), ([5], 4, 4, 1.0, -0.010), ([7, 1, 1], 1, 4, 0.25, 0.0225)],
    ),
    "a window larger than the history": (
        dict(vg_window=50),
        [([2], 2, 2, 1.0, -0.005), ([4, 6], 4, 4, 1.0, -0.010), ([0], 3, 4, 0.75, -0.0025)],
    ),
    "the best is forgotten after two updates": (
        dict(vg_window=1, vg_star_window=2),
        [([10], 10, 10, 1.0, -0.005), ([5], 5, 10, 0.5, 0.015), ([5], 5, 5, 1.0, 0.010), ([4], 4, 5, 0.8, 0.015)],
    ),
    "negative returns: -20 with -10 as the best is worse, not twice as good": (
        dict(vg_window=1),
        [([-10], -10, -10, 1.0, -0.005), ([-20], -20, -10, 0.0, 0.04), ([-10], -10, -10, 1.0, 0.035)],
    ),
    "from below zero to above": (
        dict(vg_window=1),
        [([-4], -4, -4, 1.0, -0.005), ([2], 2, 2, 1.0, -0.010), ([-1], -1, 2, -0.5, 0.06)],
    ),
    "a best return of zero": (dict(vg_window=1), [([0], 0, 0, 1.0, -0.005), ([0], 0, 0, 1.0, -0.010)]),
    "one update of warm-up": (
        dict(vg_window=1, warmup_iters=1, lambda_init=0.5),
        [([10], 10, 10, 1.0, 0.5), ([5], 5, 10, 0.5, 0.52)],
    ),
    "five updates of warm-up, whose returns are the best afterwards": (
        dict(vg_window=1, warmup_iters=5),
        [
            ([], math.nan, math.nan, math.nan, 0.0),
            ([8], 8, 8, 1.0, 0.0),
            ([10], 10, 10, 1.0, 0.0),
            ([6], 6, 10, 0.6, 0.0),
            ([7], 7, 10, 0.7, 0.0),
            ([5], 5, 10, 0.5, 0.02),
        ],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_by_hand(name):
    options, rows = TABLES[name]
    constraint = TaskConstraint(**options)
    for i, (returns, *expected) in enumerate(rows):
        warm = i < options.get("warmup_iters", 0)
        before = float(constraint.multiplier)
        assert float(constraint.weight) == pytest.approx(1.0 if warm else 1 / (1 + math.exp(-before)))
        update(constraint, *returns)
        out = (constraint.task_return, constraint.task_return_best, constraint.ratio, constraint.multiplier)
        assert [float(value) for value in out] == pytest.approx(expected, abs=1e-6, nan_ok=True)
        assert int(constraint.updates) == i + 1 and int(constraint.skipped) == 0


def test_metrics_are_those_of_the_last_update():
    constraint = TaskConstraint(vg_window=1)
    update(constraint, 10)
    update(constraint, 5)
    metrics = {name: float(value) for name, value in constraint.metrics().items()}
    expected = {"task_return": 5, "task_return_best": 10, "task_ratio": 0.5, "lambda": 0.015, "task_weight": 0.50375}
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_returns_that_are_not_finite_are_left_out_and_a_window_of_nothing_else_is_skipped():
    constraint = TaskConstraint(vg_window=2)
    update(constraint, math.nan, math.inf)
    assert int(constraint.skipped) == 1 and float(constraint.multiplier) == 0.0 and math.isnan(constraint.ratio)
    update(constraint, 4)  # the window is inf, 4
    assert (float(constraint.task_return), int(constraint.skipped)) == (4.0, 1)
    update(constraint, 2, -math.inf)
    assert float(constraint.task_return) == 2.0 and float(constraint.ratio) == 0.5
    # What a checkpoint stores stays finite, whatever came in.
    assert all(value.isfinite().all() for value in constraint.state_dict().values())


def test_the_last_episodes_of_a_rollout_are_those_that_end_last():
    constraint = TaskConstraint(vg_window=2)
    sums, done = torch.arange(6.0).reshape(2, 3, 1), torch.ones(2, 3, 1, dtype=torch.bool)
    constraint.update(sums, done)  # environments 0 and 1 end step 2 with 2 and 5
    assert constraint.returns.tolist() == [2.0, 5.0]


def test_a_restored_state_goes_on_alike_from_the_middle_of_a_window_and_of_warm_up():
    torch.manual_seed(3)
    stream = [torch.randn(n).tolist() for n in (0, 2, 1, 0, 4, 3, 1, 2, 0, 5)]
    options = dict(vg_window=4, vg_star_window=3, warmup_iters=4)
    for cut in range(len(stream)):
        whole, first, second = (TaskConstraint(**options) for _ in range(3))
        for returns in stream:
            update(whole, *returns)
        for returns in stream[:cut]:
            update(first, *returns)
        second.load_state_dict(first.state_dict())
        for returns in stream[cut:]:
            update(second, *returns)
        for name, value in whole.state_dict().items():
            assert torch.equal(value, second.state_dict()[name]), (cut, name)
        assert torch.equal(whole.weight, second.weight)


@pytest.mark.parametrize("alpha", [0.7, 0.9])
@pytest.mark.parametrize("offset", [0.0, -20.0])
def test_the_loop_comes_to_rest_at_the_share_that_is_asked_for(alpha, offset):
    """A policy that circles at a share s of the goal's radius follows the weight, s = w at rest, with a lag."""
    constraint = TaskConstraint(alpha, warmup_iters=30, vg_window=1, vg_star_window=1000)
    share, best = 0.0, 10.0 + offset
    for _ in range(900):
        share += 0.2 * (float(constraint.weight) - share)
        update(constraint, 10.0 * (1.0 - (1.0 - share) ** 2) + offset)
    # 0.9 of a best return of -10 is -11: what may be lost is a share of its size.
    kept = best - (1.0 - alpha) * abs(best)
    assert float(constraint.task_return) == pytest.approx(kept, abs=0.05)
    assert float(constraint.weight) == pytest.approx(1.0 - math.sqrt((10.0 + offset - kept) / 10.0), abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(alpha=0.0), r"alpha in \(0, 1\].*got 0.0"),
        (dict(alpha=1.5), r"alpha in \(0, 1\].*got 1.5"),
        (dict(lambda_lr=0.0), "lambda_lr > 0.*got 0.0"),
        (dict(lambda_init=math.nan), "finite lambda_init.*nan"),
        (dict(warmup_iters=-1), "warmup_iters as a whole number of at least 0, got -1"),
        (dict(vg_window=0), "vg_window as a whole number of at least 1, got 0"),
        (dict(vg_star_window=2.5), "vg_star_window as a whole number of at least 1, got 2.5"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TaskConstraint(**options)


def test_shapes_are_refused():
    constraint = TaskConstraint()
    with pytest.raises(ValueError, match=r"\[N, T, 1\], got \(2, 3\) and \(2, 3\)"):
        constraint.update(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"got \(2, 3, 1\) and \(3, 2, 1\)"):
        constraint.update(torch.zeros(2, 3, 1), torch.zeros(3, 2, 1, dtype=torch.bool))


def episodes():
    """Two rollouts of four environments; no episode of the second ends in the last two."""
    torch.manual_seed(5)
    sums = torch.randn(2, 4, 6, 1) + 3.0
    done = torch.rand(2, 4, 6, 1) < 0.4
    done[1, 2:] = False
    return sums, done


def observe(part):
    constraint = TaskConstraint(vg_window=5, vg_star_window=2)
    for sums, done in zip(*episodes(), strict=True):
        constraint.update(sums[part], done[part])
    return constraint.state_dict()


def test_two_processes_see_the_episodes_of_both(tmp_path):
    """Equal to one process with all environments, in the order in which episodes end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, __file__, str(tmp_path)], env={**shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=180) for process in processes] == [0, 0]
    whole = observe(slice(None))
    # Every entry is alike for the window of five: not a tie that any order would pass.
    assert len(set(whole["returns"].tolist())) == 5
    for rank in range(2):
        own = torch.load(tmp_path / f"{rank}.pt")
        for name, value in whole.items():
            assert torch.equal(own[name], value), (rank, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    number = torch.distributed.get_rank()
    torch.save(observe(slice(2 * number, 2 * number + 2)), Path(sys.argv[1]) / f"{number}.pt")
    torch.distributed.destroy_process_group()
