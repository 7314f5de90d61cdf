"""ConflictPointMass against its equations, and the trade-off that it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edenrl.envs import ConflictPointMass


def test_matches_its_equations_past_ends_and_partial_resets() -> None:
    env = ConflictPointMass(3, seed=1, dtype=torch.float64, max_steps=9)
    root = env.reset()
    rng = np.random.default_rng(0)
    ends, means = 0, np.zeros((3, 3))  # count, distance, speed
    for step in range(40):
        action = rng.uniform(-1.5, 1.5, (3, 2))
        before = root["observation"].numpy().copy()
        data, root = env.step_and_maybe_reset(root.set("action", torch.from_numpy(action)))
        after = data["next"]
        if step == 4:
            root = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
        for i in range(3):
            p, v, goal, goal_v, last = np.split(before[i], 5)
            a = np.clip(action[i], -1, 1)
            v = 5.0 * (a - p)
            p = p + 0.1 * v
            turn = 0.1 * (goal[0] * goal_v[1] - goal[1] * goal_v[0]) / 0.36  # rad in a step, 1 rad/s either way
            assert abs(turn) == pytest.approx(0.1)
            goal = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]) @ goal
            goal_v = 10 * turn * np.array([-goal[1], goal[0]])
            np.testing.assert_allclose(after["observation"][i], np.concatenate([p, v, goal, goal_v, a]), atol=1e-12)
            groups = [1 - ((p - goal) ** 2).sum() / 0.36, -(v**2).sum() / 0.36, -0.02 * ((a - last) ** 2).sum()]
            found = [after["reward_groups", name][i].item() for name in ("task", "style", "penalty")]
            assert found == pytest.approx(groups, abs=1e-12)
            assert after["reward"][i].item() == pytest.approx(sum(groups), abs=1e-12)
            means[i] += [1, np.linalg.norm(p - goal), np.linalg.norm(v)]
            assert after["metrics", "goal_distance"][i].item() == pytest.approx(means[i, 1] / means[i, 0], abs=1e-12)
            assert after["metrics", "speed"][i].item() == pytest.approx(means[i, 2] / means[i, 0], abs=1e-12)
            if after["done"][i] or (step == 4 and i == 1):
                ends, means[i] = ends + 1, 0.0
                start = root["observation"][i].numpy()
                assert np.abs(start[:2]).max() <= 0.6 and not start[2:4].any()
                assert (start[8:] == start[:2]).all()
                assert (start[4:6] ** 2).sum() == pytest.approx(0.36) == (start[6:8] ** 2).sum()
        assert not after["terminated"].any()
    assert ends == 12  # rows 0 and 2 at steps 9, 18, 27 and 36; row 1 at 5, 14, 23 and 32


def returns(share: float) -> tuple[float, float]:
    """Mean task and style reward of a controller that circles with the goal at a share of its radius."""
    env = ConflictPointMass(64, seed=3, dtype=torch.float64, max_steps=200)
    root, sums = env.reset(), torch.zeros(2, dtype=torch.float64)
    for step in range(150):
        o = root["observation"]
        turn = 0.1 * (o[:, 4:5] * o[:, 7:8] - o[:, 5:6] * o[:, 6:7]) / 0.36
        ahead = share * torch.cat([o[:, 4:5] - turn * o[:, 5:6], o[:, 5:6] + turn * o[:, 4:5]], -1)
        action = o[:, :2] + 2.0 * (ahead - o[:, :2])  # half of the way in a step: there in one
        root = env.step(root.set("action", action))["next"].exclude("reward")
        if step >= 50:  # past the start
            sums += torch.stack([root["reward_groups", name].mean() for name in ("task", "style")]) / 100
    return float(sums[0]), float(sums[1])


@pytest.mark.parametrize("share", [0.0, 0.45, 0.68, 1.0])
def test_following_costs_style_as_documented(share: float) -> None:
    task, style = returns(share)
    assert task == pytest.approx(1 - (1 - share) ** 2, abs=0.01) and style == pytest.approx(-(share**2), abs=0.01)
