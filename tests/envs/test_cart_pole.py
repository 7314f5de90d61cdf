from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from edenrl.envs import CartPoleSwingUp


def accelerations(x_dot: float, theta: float, theta_dot: float, force: float) -> tuple[float, float]:
    """The cart-pole as two coupled equations, solved as a linear system (M + m = 1.1, m = 0.1, l = 0.5).

    (M + m) x'' + m l cos(theta) theta'' = f + m l theta'^2 sin(theta)
    cos(theta) x'' + 4/3 l theta'' = g sin(theta)
    """
    matrix = np.array([[1.1, 0.05 * math.cos(theta)], [math.cos(theta), 0.5 * 4 / 3]])
    right = np.array([force + 0.05 * theta_dot**2 * math.sin(theta), 9.8 * math.sin(theta)])
    return tuple(np.linalg.solve(matrix, right))


def test_matches_the_equations_of_motion_past_ends_and_partial_resets() -> None:
    env = CartPoleSwingUp(3, seed=1, dtype=torch.float64, max_steps=9)
    root = env.reset()
    rng = np.random.default_rng(0)
    ends = 0
    for step in range(40):
        action = rng.uniform(-1.5, 1.5, (3, 1))
        before = root["observation"].numpy().copy()
        data, root = env.step_and_maybe_reset(root.set("action", torch.from_numpy(action)))
        after = data["next", "observation"].numpy()
        if step == 4:
            root = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
        for i in range(3):
            x, x_dot, cos, sin, theta_dot = before[i]
            theta, a = math.atan2(sin, cos), float(np.clip(action[i, 0], -1, 1))
            acceleration, angular = accelerations(x_dot, theta, theta_dot, 10 * a)
            x_dot, theta_dot = x_dot + 0.02 * acceleration, theta_dot + 0.02 * angular
            x, theta = x + 0.02 * x_dot, theta + 0.02 * theta_dot
            np.testing.assert_allclose(after[i], [x, x_dot, math.cos(theta), math.sin(theta), theta_dot], atol=1e-12)
            height = (1 + math.cos(theta)) / 2
            reward = height - 0.02 * height * theta_dot**2
            reward -= 0.05 * x**2 + 0.005 * x_dot**2 + 0.005 * a**2
            assert data["next", "reward"][i].item() == pytest.approx(reward, abs=1e-12)
            if data["next", "done"][i] or (step == 4 and i == 1):
                ends += 1
                assert abs(abs(math.atan2(*root["observation"][i, [3, 2]].tolist())) - math.pi) <= 0.5
        assert not data["next", "terminated"].any()
    assert ends == 12  # rows 0 and 2 at steps 9, 18, 27 and 36; row 1 at 5, 14, 23 and 32


def test_without_a_force_energy_is_kept(place: Callable[..., TensorDict]) -> None:
    env = CartPoleSwingUp(1, dtype=torch.float64, max_steps=1000)
    root = place(env, x=[[0.0]], x_dot=[[0.0]], theta=[[2.0]], theta_dot=[[0.0]])
    energies = []
    for _ in range(300):
        root = env.step(root.set("action", torch.zeros(1, 1, dtype=torch.float64)))["next"].exclude("reward")
        _, x_dot, cos, _, theta_dot = root["observation"][0].tolist()
        kinetic = 0.55 * x_dot**2 + 0.05 * x_dot * theta_dot * cos + 0.05 * (2 / 3) * 0.5 * theta_dot**2
        energies.append(kinetic + 0.05 * 9.8 * cos)
    assert max(energies) - min(energies) < 0.02 * 0.05 * 9.8 * 2 * 3  # of the 0.98 J between hanging and upright


def test_upright_is_measured(place: Callable[..., TensorDict]) -> None:
    env = CartPoleSwingUp(2, dtype=torch.float64, max_steps=300)
    root = place(env, x=[[0.0]] * 2, x_dot=[[0.0]] * 2, theta=[[0.0], [math.pi]], theta_dot=[[0.0]] * 2)
    for _ in range(99):
        root = env.step(root.set("action", torch.zeros(2, 1, dtype=torch.float64)))["next"].exclude("reward")
    assert root["metrics", "upright_time"].flatten().tolist() == pytest.approx([1.98, 0.0])
    assert root["metrics", "success"].flatten().tolist() == [0.0, 0.0]
    root = env.step(root.set("action", torch.zeros(2, 1, dtype=torch.float64)))["next"].exclude("reward")
    assert root["metrics", "hold_time"].flatten().tolist() == pytest.approx([2.0, 0.0])
    assert root["metrics", "success"].flatten().tolist() == [1.0, 0.0]
    # A fall ends the holding, not the time that was spent upright.
    extra = env.get_extra_state()
    extra["state"]["theta"][0] = 1.0
    env.set_extra_state(extra)
    root = env.step(root.set("action", torch.zeros(2, 1, dtype=torch.float64)))["next"]
    assert root["metrics", "hold_time"][0].item() == 0.0 and root["metrics", "success"][0].item() == 0.0
    assert root["metrics", "upright_time"][0].item() == pytest.approx(2.0)


def test_initial_distribution() -> None:
    o = CartPoleSwingUp(100_000, seed=0).reset()["observation"]
    angle = torch.atan2(-o[:, 3], -o[:, 2])  # from hanging
    for value, bound in ((angle, 0.5), (o[:, 0], 0.5), (o[:, 1], 0.1), (o[:, 4], 0.1)):
        assert value.abs().max() <= bound * 1.0001 and value.abs().max() > 0.999 * bound
        assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_a_share_of_the_starts_is_anywhere() -> None:
    o = CartPoleSwingUp(100_000, seed=0, start_anywhere=1.0).reset()["observation"]
    angle = torch.atan2(o[:, 3], o[:, 2])
    for value, bound in ((angle, math.pi), (o[:, 0], 1.0), (o[:, 1], 1.0), (o[:, 4], 3.0)):
        assert value.abs().max() <= bound * 1.0001 and value.abs().max() > 0.999 * bound
        assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    # Upper half of the circle: never when hanging, half of the starts from anywhere.
    o = CartPoleSwingUp(100_000, seed=0, start_anywhere=0.4).reset()["observation"]
    assert (o[:, 2] > 0).float().mean().item() == pytest.approx(0.2, abs=0.005)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_refuses_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ValueError, match="start_anywhere=.* expected a probability"):
        CartPoleSwingUp(2, start_anywhere=share)
