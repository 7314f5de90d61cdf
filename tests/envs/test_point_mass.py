from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs.utils import RandomPolicy

from edenrl.envs import PointMass

DT = 1.0 / 60.0


class Reference:
    """The dynamics of apg.md for one row, in float64 numpy."""

    def __init__(self, observation: np.ndarray, bonus: float = 5.0, max_steps: int = 100) -> None:
        self.p, self.v, self.goal, self.last = (observation[i : i + 2].copy() for i in (0, 2, 4, 6))
        self.centres, self.radii = observation[8:12].reshape(2, 2).copy(), observation[12:14].copy()
        self.bonus, self.max_steps, self.steps, self.path, self.collisions = bonus, max_steps, 0, 0.0, 0

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        a = np.clip(action, -1, 1)
        self.v = self.v * (1 - 5 * DT) + 5 * a * DT
        before, self.p = self.p, np.clip(self.p + self.v * DT, -1, 1)
        dist = math.hypot(*(self.p - self.goal))
        pen = [max(0.0, r - math.hypot(*(self.p - c))) for c, r in zip(self.centres, self.radii, strict=True)]
        success = dist < 0.03
        reward = -dist + 0.5 * math.exp(-(dist**2) / (2 * 0.05**2)) - 2 * sum(x**2 for x in pen)
        reward += -0.01 * (self.v**2).sum() - 0.001 * ((a - self.last) ** 2).sum() + self.bonus * success
        self.last = a
        self.steps += 1
        self.path += math.hypot(*(self.p - before))
        self.collisions += any(x > 0 for x in pen)
        observation = np.concatenate([self.p, self.v, self.goal, a, self.centres.ravel(), self.radii])
        return observation, reward, success, self.steps >= self.max_steps


@pytest.fixture
def env() -> PointMass:
    return PointMass(4, seed=0, dtype=torch.float64)


def test_matches_reference_past_ends_and_partial_resets() -> None:
    env = PointMass(3, seed=1, dtype=torch.float64, max_steps=9)
    data = env.reset()
    rows = [Reference(o, max_steps=9) for o in data["observation"].numpy()]
    rng = np.random.default_rng(0)
    ends = 0
    for step in range(40):
        action = rng.uniform(-1.5, 1.5, (3, 2))
        data, root = env.step_and_maybe_reset(data.set("action", torch.from_numpy(action)))
        if step == 4:
            # Row 1 restarts alone, in the middle of its episode; the others keep their clock and counters.
            mask = torch.tensor([[False], [True], [False]])
            root = env.reset(root.set("_reset", mask))
        for i, row in enumerate(rows):
            observation, reward, terminated, truncated = row.step(action[i])
            got = data["next"][i]
            np.testing.assert_allclose(got["observation"].numpy(), observation, atol=1e-12)
            assert got["reward"].item() == pytest.approx(reward, abs=1e-12)
            assert (got["terminated"].item(), got["truncated"].item()) == (terminated, truncated)
            assert got["done"].item() == (terminated or truncated)
            metrics = got["metrics"]
            assert metrics["path_length"].item() == pytest.approx(row.path, abs=1e-12)
            assert metrics["collisions"].item() == row.collisions
            assert metrics["success"].item() == float(terminated)
            assert metrics["final_distance"].item() == pytest.approx(math.hypot(*(row.p - row.goal)), abs=1e-12)
            if terminated or truncated or (step == 4 and i == 1):
                ends += 1
                start = root["observation"][i].numpy()
                assert (start[2:4] == 0).all() and (start[6:8] == 0).all()
                assert not np.allclose(start[4:6], observation[4:6])
                rows[i] = Reference(start, max_steps=9)
            else:
                np.testing.assert_array_equal(root["observation"][i].numpy(), got["observation"].numpy())
        data = root
    assert ends >= 12


def test_reward_by_hand(place: Callable[..., TensorDict]) -> None:
    # v = 5/60 * (1, 0) and p moves by v/60 = 1/720 to (0.001389, 0); goal (0.101389, 0): dist = 0.1.
    # Obstacle centre (0.001389, 0.05), radius 0.1: penetration 0.05. The other is far.
    # -0.1 + 0.5 exp(-0.01 / 0.005) - 2 * 0.0025 - 0.01 * (1/12)^2 - 0.001 * 1
    #   = -0.1 + 0.0676676 - 0.005 - 0.0000694 - 0.001 = -0.0384018
    env = PointMass(1, dtype=torch.float64)
    p = 1 / 720
    root = place(env, position=[[0, 0]], goal=[[p + 0.1, 0]], centres=[[p, 0.05], [0.9, 0.9]], radii=[[0.1, 0.1]])
    out = env.step(root.set("action", torch.tensor([[1.0, 0.0]], dtype=torch.float64)))
    assert out["next", "reward"].item() == pytest.approx(-0.0384018, abs=1e-7)
    assert out["next", "metrics", "collisions"].item() == 1


def test_success_terminates_and_can_coincide_with_the_time_limit(place: Callable[..., TensorDict]) -> None:
    env = PointMass(2, success_bonus=7.0, max_steps=1, dtype=torch.float64)
    root = place(env, position=[[0, 0], [0, 0]], goal=[[0.02, 0], [0.5, 0]], centres=[[[0.9, 0.9]] * 2] * 2)
    step = env.step(root.set("action", torch.zeros(2, 2, dtype=torch.float64)))["next"]
    assert step["terminated"].squeeze(-1).tolist() == [True, False]
    assert step["truncated"].squeeze(-1).tolist() == [True, True]
    assert step["done"].all()
    # -0.02 + 0.5 exp(-0.0004 / 0.005) + 7 = 7.4415582
    assert step["reward"][0].item() == pytest.approx(-0.02 + 0.4615582 + 7.0, abs=1e-7)
    assert step["metrics", "success"].squeeze(-1).tolist() == [1.0, 0.0]


def test_time_limit_is_100_steps() -> None:
    env = PointMass(16, seed=5)
    td = env.reset()
    for step in range(1, 101):
        td = env.step(td.set("action", torch.zeros(16, 2)))["next"].exclude("reward")
        assert td["truncated"].all().item() == (step == 100)


def test_clamps_the_action_it_is_given(env: PointMass) -> None:
    out = env.step(env.reset().set("action", torch.full((4, 2), 1e6, dtype=torch.float64)))
    assert (out["next", "observation"][:, 6:8] == 1.0).all()
    assert torch.allclose(out["next", "observation"][:, 2:4], torch.full((4, 2), 5 / 60, dtype=torch.float64))


def test_initial_distribution() -> None:
    o = PointMass(100_000, seed=0).reset()["observation"]
    position, velocity, goal, last, centres, radii = o.split([2, 2, 2, 2, 4, 2], -1)
    assert position.abs().max() <= 0.6 and position.abs().max() > 0.599
    assert goal.abs().max() <= 0.7 and goal.abs().max() > 0.699
    assert (velocity == 0).all() and (last == 0).all()
    assert radii.min() >= 0.08 and radii.max() <= 0.15 and radii.mean().item() == pytest.approx(0.115, abs=1e-3)
    distance = (centres.reshape(-1, 2, 2) - goal[:, None]).norm(dim=-1)
    assert distance.min() >= 0.25
    assert centres.abs().max() <= 1.0


def test_obstacles_are_clear_even_when_every_candidate_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    env = PointMass(1000, seed=0)
    draw = env._uniform

    def degenerate(low: float, high: float, *shape: int) -> torch.Tensor:
        # All candidates in the middle of the arena: rows with a goal near it must use the fallback.
        return draw(low, high, *shape) * (0.0 if len(shape) == 3 else 1.0)

    monkeypatch.setattr(env, "_uniform", degenerate)
    o = env.reset()["observation"]
    distance = (o[:, 8:12].reshape(-1, 2, 2) - o[:, None, 4:6]).norm(dim=-1)
    assert (o[:, 4:6].norm(dim=-1) < 0.25).any()
    assert distance.min() >= 0.25 and o[:, 8:12].abs().max() <= 1.0


@pytest.mark.parametrize("horizon", [1, 5, 20])
def test_gradient_matches_finite_differences(place: Callable[..., TensorDict], horizon: int) -> None:
    def total(gain: torch.Tensor) -> torch.Tensor:
        env = PointMass(2, dtype=torch.float64)
        data = place(
            env,
            position=[[-0.2, 0.1], [0.3, -0.3]],
            goal=[[0.3, 0.3], [-0.2, 0.0]],
            centres=[[[-0.2, 0.15], [0.6, -0.6]], [[0.3, -0.25], [0.5, 0.5]]],
            radii=[[0.1, 0.1], [0.12, 0.1]],
        )
        reward = torch.zeros((), dtype=torch.float64)
        for _ in range(horizon):
            o = data["observation"]
            data = env.step(data.set("action", gain * (o[:, 4:6] - o[:, 0:2]) - 0.1 * o[:, 2:4]))["next"]
            reward = reward + data["reward"].sum()
        return reward

    gain = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(total(gain), gain)
    eps = 1e-6
    with torch.no_grad():
        numeric = (total(gain + eps) - total(gain - eps)) / (2 * eps)
    assert gradient.item() == pytest.approx(numeric.item(), rel=1e-6)
    assert abs(gradient.item()) > 1e-4


def test_state_made_in_inference_mode_can_enter_autograd_after_detach(env: PointMass) -> None:
    with torch.inference_mode():
        env.reset()
    action = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    env.step(env.detach_state().set("action", action))["next", "reward"].sum().backward()
    assert action.grad is not None and action.grad.isfinite().all()


def test_gradient_is_finite_on_the_goal(place: Callable[..., TensorDict]) -> None:
    env = PointMass(1, dtype=torch.float64)
    root = place(env, position=[[0.1, 0.1]], goal=[[0.1, 0.1]], centres=[[0.1, 0.1], [0.5, 0.5]])
    action = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    env.step(root.set("action", action))["next", "reward"].sum().backward()
    assert action.grad is not None and action.grad.isfinite().all()


def test_metrics_survive_the_collector() -> None:
    env = PointMass(2, seed=0)
    collector = Collector(env, RandomPolicy(env.action_spec), frames_per_batch=20, total_frames=20)
    for data in collector:
        assert data["next", "metrics", "path_length"].shape == (2, 10, 1)
        assert (data["metrics", "path_length"][:, 0] == 0).all()
        assert (data["next", "metrics", "path_length"][:, -1] > 0).all()
    collector.shutdown()
