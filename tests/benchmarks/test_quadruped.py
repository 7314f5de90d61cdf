"""Control steps per second of the quadruped, next to MuJoCo alone: pytest -m benchmark -s tests/benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from edenrl.envs import Quadruped, QuadrupedTerrain
from edenrl.envs.quadruped import DEFAULT_POSE, GROUPS, build_model

pytest.importorskip("mujoco", minversion="3.17")
pytestmark = pytest.mark.benchmark

STEPS, REPEATS = 50, 5
InTurn = Callable[..., dict[str, float]]
DEFAULT = ("policy", "critic")


def wave(step: int, num_envs: int) -> torch.Tensor:
    return (0.5 * torch.sin(0.3 * step + torch.arange(12.0))).expand(num_envs, 12)


def stepping(env: Quadruped) -> Callable[[], None]:
    """Steps with resets, as a collector does."""
    state = {"data": env.reset()}

    def run() -> None:
        for step in range(STEPS):
            _, state["data"] = env.step_and_maybe_reset(state["data"].set("action", wave(step, env.num_envs)))

    return run


def bare(env: Quadruped) -> Callable[[], None]:
    """MuJoCo's batch alone: the same model values, threads, start and control."""
    from mujoco.batch import Batch

    batch = Batch(build_model(env._field), env.num_envs, env._batch.nthread)
    for name, values in env._values.items():
        batch.expand(name)[:] = values
    batch.state[:] = env._state
    control = batch.bind("ctrl")

    def run() -> None:
        for step in range(STEPS):
            control[:] = DEFAULT_POSE + 0.25 * wave(step, env.num_envs).numpy()
            batch.step(nstep=4)

    return run


def show(in_turn: InTurn, cases: dict[str, Callable[[], None]], num_envs: int) -> dict[str, float]:
    """Prints and returns control steps per second of each case, by the wall: the physics has threads of its own."""
    medians = in_turn(f"{num_envs} environments", cases, REPEATS, time.perf_counter)
    table = {name: STEPS * num_envs / seconds for name, seconds in medians.items()}
    first = next(iter(table.values()))
    for name, rate in table.items():
        print(f"  {name:28s} {rate:9.0f} control steps/s  {rate / first:5.2f}  {1e6 / rate:8.1f} us each")
    return table


@pytest.mark.parametrize("num_envs", [64, 256])
def test_share_of_the_simulation(num_envs: int, in_turn: InTurn) -> None:
    env = Quadruped(num_envs, seed=0)
    table = show(in_turn, {"mujoco.batch.Batch": bare(env), "Quadruped": stepping(env)}, num_envs)
    assert table["Quadruped"] > 0


def test_cost_of_each_group(in_turn: InTurn) -> None:
    num_envs = 64
    cases = {"policy, critic": stepping(Quadruped(num_envs, seed=0))}
    for group in GROUPS:
        if group not in (*DEFAULT, "depth"):
            cases[f"+ {group}"] = stepping(Quadruped(num_envs, seed=0, groups=[*DEFAULT, group]))
    cases["terrain"] = stepping(QuadrupedTerrain(num_envs, seed=0, difficulty=0.5))
    cases["terrain + scan"] = stepping(QuadrupedTerrain(num_envs, seed=0, difficulty=0.5, groups=[*DEFAULT, "scan"]))
    show(in_turn, cases, num_envs)
    cases = {"16: policy, critic": stepping(QuadrupedTerrain(16, seed=0, difficulty=0.5))}
    cases["16: + depth"] = stepping(QuadrupedTerrain(16, seed=0, difficulty=0.5, groups=[*DEFAULT, "depth"]))
    cases["16, flat: + depth"] = stepping(Quadruped(16, seed=0, groups=[*DEFAULT, "depth"]))
    show(in_turn, cases, 16)
