"""Reward groups behind ``wrap_env``: summed in the environment's units, scaled as the reward is."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from edenrl.collectors import Collector
from edenrl.envs import ConflictPointMass, PointMass, Quadruped, RewardGroups, make_env, wrap_env
from edenrl.modules import gaussian_actor
from edenrl.training import evaluate

GROUPS = ("task", "style", "penalty")


def test_groups_are_scaled_with_the_reward_and_returns_are_not() -> None:
    """The same steps with and without a scale, past ends and the reset of one row."""
    raw, scaled = (wrap_env(ConflictPointMass(3, seed=1, max_steps=7), reward_scale=s) for s in (1.0, 0.25))
    check_env_specs(wrap_env(ConflictPointMass(3), reward_scale=0.25))
    sums = {name: torch.zeros(3, 1) for name in GROUPS}
    roots = [raw.reset(), scaled.reset()]
    torch.manual_seed(0)
    for step in range(30):
        action = torch.randn(3, 2)
        stepped = [
            env.step_and_maybe_reset(root.set("action", action)) for env, root in zip((raw, scaled), roots, strict=True)
        ]
        (a, b), roots = [data["next"] for data, _ in stepped], [root for _, root in stepped]
        torch.testing.assert_close(b["reward"], 0.25 * a["reward"])
        torch.testing.assert_close(sum(b["reward_groups"].values()), b["reward"])
        done = a["done"]
        if step == 10:
            done = torch.tensor([[False], [True], [False]])
            roots = [env.reset(root.set("_reset", done)) for env, root in zip((raw, scaled), roots, strict=True)]
        for name in GROUPS:
            torch.testing.assert_close(b["reward_groups", name], 0.25 * a["reward_groups", name])
            sums[name] += a["reward_groups", name]
            for entry in (a, b):
                torch.testing.assert_close(entry["metrics", f"{name}_return"], sums[name])
            sums[name] = torch.where(done, 0.0, sums[name])
            for root in roots:
                torch.testing.assert_close(root["metrics", f"{name}_return"], sums[name])
        total = sum(a["metrics", f"{name}_return"] for name in GROUPS)
        torch.testing.assert_close(total, a["episode_reward"])


def test_an_environment_without_metrics_gets_them_and_one_without_groups_stays_as_it_is() -> None:
    env = wrap_env(Quadruped(2, seed=0, groups=["policy", "reward_groups"], num_threads=1))
    assert set(env.rollout(2)["next", "metrics"].keys()) == {f"{name}_return" for name in GROUPS}
    assert "task_return" not in wrap_env(PointMass(2)).observation_spec["metrics"].keys()
    assert not any(isinstance(t, RewardGroups) for t in wrap_env(PointMass(2)).transform)


def test_sums_go_on_across_batches_and_from_a_restored_collector() -> None:
    def collector() -> Collector:
        env = wrap_env(ConflictPointMass(2, seed=4, max_steps=9), reward_scale=0.5)
        return Collector(env, None, frames_per_batch=8, total_frames=-1)

    torch.manual_seed(0)
    whole = collector()
    batches = iter(whole)
    first = [next(batches).clone() for _ in range(3)]
    state, rng = whole.state_dict(), torch.get_rng_state()
    expected = next(batches)["next"]
    # 16 steps in all: the second episode began after 9 and holds what the last 7 paid, in the environment's units.
    paid = torch.cat([2 * data["reward_groups", "task"] for data in (*(b["next"] for b in first), expected)], 1)
    torch.testing.assert_close(expected["metrics", "task_return"][:, -1], paid[:, 9:].sum(1))
    other = collector()
    batches = iter(other)
    next(batches)
    other.load_state_dict(state)
    torch.set_rng_state(rng)
    again = next(batches)["next"]
    for name in GROUPS:
        assert torch.equal(again["metrics", f"{name}_return"], expected["metrics", f"{name}_return"])


def test_evaluation_reports_the_returns_of_the_groups() -> None:
    actor = gaussian_actor({"observation": 10}, 2)
    result = evaluate(actor, lambda n: wrap_env(make_env("ConflictPointMass", n, seed=0, max_steps=5)), 4)
    parts = [result[f"{name}_return"] for name in GROUPS]
    assert sum(parts) == pytest.approx(result["return_mean"], abs=1e-4) and all(part != 0.0 for part in parts)
