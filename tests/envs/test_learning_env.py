from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, Unbounded
from torchrl.envs.utils import check_env_specs

from edenrl.collectors import Collector, DifferentiableCollector
from edenrl.envs import (
    DifferentiableVecEnv,
    LearningEnvAdapter,
    LearningVecEnv,
    wrap_env,
)
from edenrl.training import rollout_metrics


class Line:
    """x' = x + 0.1 a, reward -x'^2; row i is truncated after `limits[i]` steps and restarts at 1."""

    device = torch.device("cpu")
    single_observation_space: spaces.Space = spaces.Box(-np.inf, np.inf, (1,))
    single_action_space: spaces.Space = spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self, limits: tuple[int, ...] = (2, 1000), final: str | None = "final_observation") -> None:
        self.limits, self.num_envs, self.final = torch.tensor(limits), len(limits), final
        self.resets: list[Any] = []
        self.closed = False
        self.info: dict[str, Any] = {}

    def observe(self, x: Tensor) -> Any:
        return x

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.resets.append(seed)
        self.x = torch.ones(self.num_envs, 1)
        self.count = torch.zeros(self.num_envs, dtype=torch.long)
        return self.observe(self.x), dict(self.info)

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        last = self.x + 0.1 * action
        self.count = self.count + 1
        truncated = self.count >= self.limits
        self.x = torch.where(truncated.unsqueeze(-1), torch.ones_like(last), last)
        self.count = self.count * ~truncated
        info = dict(self.info)
        if self.final is not None:
            info[self.final] = self.observe(last)
        reward = -last.square().squeeze(-1)
        return self.observe(self.x), reward, torch.zeros_like(truncated), truncated, info

    def detach_state(self) -> Any:
        self.x = self.x.detach()
        return self.observe(self.x)

    def close(self) -> None:
        self.closed = True


class Grouped(Line):
    single_observation_space = spaces.Dict(
        policy=spaces.Box(-np.inf, np.inf, (1,)), critic=spaces.Box(-np.inf, np.inf, (2,))
    )

    def observe(self, x: Tensor) -> Any:
        return {"policy": x, "critic": torch.cat([x, -x], -1)}


def play(env: LearningEnvAdapter, gain: Tensor, steps: int, key: str = "observation") -> tuple[list[Any], list[Any]]:
    """Acts with a = gain * x; returns what each step gave and the roots in between."""
    root, data = env.reset(), []
    roots = [root.clone(False)]
    for _ in range(steps):
        step, root = env.step_and_maybe_reset(root.set("action", gain * root[key]))
        data.append(step)
        roots.append(root.clone(False))
    return data, roots


def test_protocols_are_checked_at_run_time() -> None:
    assert isinstance(Line(), LearningVecEnv) and isinstance(Line(), DifferentiableVecEnv)

    class Plain(Line):
        detach_state = property()  # type: ignore[assignment]

    assert not isinstance(object(), LearningVecEnv)
    assert isinstance(Plain(), LearningVecEnv)
    with pytest.raises(TypeError, match="Plain has no detach_state"):
        LearningEnvAdapter(Plain()).detach_state()
    with pytest.raises(TypeError, match="object without num_envs, device, single_observation_space"):
        LearningEnvAdapter(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Line, Grouped])
def test_specs(kind: type[Line]) -> None:
    check_env_specs(LearningEnvAdapter(kind((2, 3, 1000))))


def test_transitions_at_the_end_of_an_episode() -> None:
    # a = -x: x goes 1, 0.9, 0.81; row 0 restarts after two steps.
    data, roots = play(LearningEnvAdapter(Line()), torch.tensor(-1.0), 3)
    observation = torch.stack([step["observation"].squeeze(-1) for step in data], -1)
    after = torch.stack([step["next", "observation"].squeeze(-1) for step in data], -1)
    torch.testing.assert_close(observation, torch.tensor([[1, 0.9, 1], [1, 0.9, 0.81]]))
    torch.testing.assert_close(after, torch.tensor([[0.9, 0.81, 0.9], [0.9, 0.81, 0.729]]))
    assert [step["next", "truncated"].squeeze(-1).tolist() for step in data] == [[0, 0], [1, 0], [0, 0]]
    assert not any(step["next", "terminated"].any() for step in data)
    assert not any(step["next", "final_obs_missing"].any() for step in data)
    torch.testing.assert_close(data[1]["next", "reward"].squeeze(-1), torch.tensor([-0.6561, -0.6561]))


@pytest.mark.parametrize(("final", "value", "known"), [("final_obs", 0.81, "given"), (None, 0.9, "missing")])
def test_final_observations(final: str | None, value: float, known: str, caplog: pytest.LogCaptureFixture) -> None:
    env = LearningEnvAdapter(Line(final=final))
    data, _ = play(env, torch.tensor(-1.0), 4)
    assert data[1]["next", "observation"][0].item() == pytest.approx(value)
    assert env.final_obs == known
    assert data[1]["next", "final_obs_missing"].squeeze(-1).tolist() == [final is None, False]
    assert len([r for r in caplog.records if "last observation" in r.message]) == (final is None)


@pytest.mark.parametrize(("kind", "key"), [(Line, "observation"), (Grouped, "policy")])
def test_the_gradient_passes_as_through_the_formula(kind: type[Line], key: str) -> None:
    # J = -(x1^2 + x2^2) with x1 = 1 + 0.1 k, x2 = x1 (1 + 0.1 k), k = -1: dJ/dk = -2 * 0.9 * 0.1
    # - 4 * 0.9^3 * 0.1 = -0.18 - 0.2916 = -0.4716.
    gain = torch.tensor(-1.0, requires_grad=True)
    data, _ = play(LearningEnvAdapter(kind((1000,))), gain, 2, key)
    sum(step["next", "reward"].sum() for step in data).backward()
    assert gain.grad is not None
    assert gain.grad.item() == pytest.approx(-0.4716, abs=1e-6)


def test_a_detached_state_cuts_the_gradient() -> None:
    # Without the path through x1: dJ/dk = -0.18 - 2 * 0.81 * 0.9 * 0.1 = -0.3258.
    env, gain = LearningEnvAdapter(Line((1000,))), torch.tensor(-1.0, requires_grad=True)
    root, total = env.reset(), torch.zeros(())
    for _ in range(2):
        step = env.step(root.set("action", gain * root["observation"]))
        total = total + step["next", "reward"].sum()
        root = env.detach_state()
        assert not root["observation"].requires_grad
        assert root["observation"].item() == pytest.approx(step["next", "observation"].item())
    total.backward()
    assert gain.grad is not None
    assert gain.grad.item() == pytest.approx(-0.3258, abs=1e-6)


@pytest.mark.parametrize("final", ["final_observation", None])
def test_a_row_that_was_reset_carries_no_gradient_into_the_episode_before(final: str | None) -> None:
    env = LearningEnvAdapter(Line((1, 1000), final=final))
    first = torch.full((2, 1), -1.0, requires_grad=True)
    step, root = env.step_and_maybe_reset(env.reset().set("action", first))
    (of_step,) = torch.autograd.grad(step["next", "reward"].sum(), first, retain_graph=True)
    torch.testing.assert_close(of_step, torch.tensor([[-0.18], [-0.18]]))
    later, _ = env.step_and_maybe_reset(root.set("action", torch.zeros(2, 1)))
    (of_later,) = torch.autograd.grad(later["next", "reward"].sum(), first)
    torch.testing.assert_close(of_later, torch.tensor([[0.0], [-0.18]]))


def test_metrics_per_environment_and_for_all() -> None:
    inner = Line((2, 2))
    inner.info = {"success": torch.tensor([True, False]), "metrics": {"distance": torch.tensor([1.0, 4.0]), "level": 3}}
    data = next(iter(Collector(wrap_env(LearningEnvAdapter(inner)), None, frames_per_batch=8, total_frames=-1)))
    metrics = rollout_metrics(data)
    assert metrics["episode/success_rate"].item() == 0.5
    assert metrics["episode/distance"].item() == 2.5
    assert metrics["episode/level"].item() == 3
    assert data["metrics", "distance"].squeeze(-1).tolist() == [[0, 1, 0, 1], [0, 4, 0, 4]]

    late = Line((2, 2))
    env = LearningEnvAdapter(late)
    late.info = {**inner.info, "metrics": {**inner.info["metrics"], "word": "no number"}}
    unannounced = next(iter(Collector(wrap_env(env), None, frames_per_batch=8, total_frames=-1)))
    metrics = rollout_metrics(unannounced)
    assert metrics["episode/success_rate"].item() == 0.5
    assert metrics["episode/distance"].item() == 2.5
    assert set(unannounced["next", "metrics"].keys()) == {"success", "distance", "level"}
    named = LearningEnvAdapter(late, metric_keys=["success"])
    assert named.rollout(2)["next", "metrics", "success"][:, 0].squeeze(-1).tolist() == [1, 0]


def test_seeds_resets_and_close() -> None:
    inner = Line()
    env = LearningEnvAdapter(inner, seed=4)
    env.reset()
    assert inner.resets == [4]  # the first reset hands out what was begun
    env.set_seed(7)
    env.reset()
    env.reset()
    assert inner.resets == [4, 7, None]
    root = env.reset()
    with pytest.raises(RuntimeError, match="row 1 has not ended"):
        env.reset(root.set("_reset", torch.tensor([[False], [True]])))
    env.close()
    assert inner.closed


@pytest.mark.parametrize(
    ("space", "spec"), [(spaces.Box(-2.0, 3.0, (1,)), Bounded), (Line.single_action_space, Unbounded)]
)
def test_actions_keep_their_box(space: spaces.Space, spec: type) -> None:
    inner = Line()
    inner.single_action_space = space
    env = LearningEnvAdapter(inner)
    assert isinstance(env.action_spec, spec) and env.action_spec.shape == (2, 1)
    if spec is Bounded:
        assert env.action_spec.space.low.flatten().tolist() == [-2, -2]


def test_what_does_not_fit_is_refused() -> None:
    inner = Line()
    inner.single_action_space = spaces.Discrete(3)
    with pytest.raises(TypeError, match=r"action space is Discrete\(3\); expected a Box"):
        LearningEnvAdapter(inner)
    inner = Line()
    inner.single_observation_space = spaces.Box(-1, 1, (4,))
    with pytest.raises(ValueError, match=r"declares observations of shape \{'observation': \(4,\)\}.*gave.*\(1,\)"):
        LearningEnvAdapter(inner)

    class Scalar(Line):
        def step(self, action: Tensor) -> tuple[Any, ...]:
            observation, reward, terminated, _, info = super().step(action)
            return observation, reward, terminated, False, info

    with pytest.raises(
        TypeError, match=r"Scalar returned truncated=False from step; expected a tensor of shape \(2,\)"
    ):
        LearningEnvAdapter(Scalar()).rollout(2)

    class Diverges(Line):
        def step(self, action: Tensor) -> tuple[Any, ...]:
            observation, reward, *rest = super().step(action)
            return observation, reward / torch.tensor([1.0, 0.0]), *rest

    with pytest.raises(ValueError, match="Diverges returned values that are not finite: 'reward' in 1 of 2"):
        LearningEnvAdapter(Diverges()).rollout(2)


def test_metrics_that_come_late_reach_differentiable_segments() -> None:
    inner = Line((9, 9))
    env = LearningEnvAdapter(inner)
    policy = TensorDictModule(nn.Linear(1, 1), in_keys=["observation"], out_keys=["action"])
    collector = DifferentiableCollector(wrap_env(env, action_mode="none"), policy, 3)
    next(iter(collector.update()))
    inner.info = {"metrics": {"distance": torch.tensor([1.0, 4.0])}}
    (data,) = collector.update()
    assert data["next", "metrics", "distance"].squeeze(-1).tolist() == [[1.0] * 3, [4.0] * 3]
