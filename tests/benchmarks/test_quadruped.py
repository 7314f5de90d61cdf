"""Control steps per second of the quadruped, next to MuJoCo alone: pytest -m benchmark -s tests/benchmarks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from edenrl.envs import Quadruped, QuadrupedTerrain
from edenrl.envs.quadruped import DEFAULT_POSE, GROUPS, build_model

pytest.importorskip("mujoco", minversion="4.0")
pytestmark = pytest.mark.benchmark

STEPS, REPEATS = 50, 5
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


def rates(cases: dict[str, Callable[[], None]], num_envs: int) -> dict[str, float]:
    """Median control steps per second of each case, all cases in turn."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(REPEATS + 1):
        for name, run in cases.items():
            begin = time.perf_counter()
            run()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return {name: STEPS * num_envs / statistics.median(values) for name, values in times.items()}


def show(title: str, table: dict[str, float]) -> None:
    first = next(iter(table.values()))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{title} (load {load})")
    for name, rate in table.items():
        print(f"  {name:28s} {rate:9.0f} control steps/s  {rate / first:5.2f}  {1e6 / rate:8.1f} us each")


@pytest.mark.parametrize("num_envs", [64, 256])
def test_share_of_the_simulation(num_envs: int) -> None:
    env = Quadruped(num_envs, seed=0)
    table = rates({"mujoco.batch.Batch": bare(env), "Quadruped": stepping(env)}, num_envs)
    show(f"{num_envs} environments", table)
    assert table["Quadruped"] > 0


def test_cost_of_each_group() -> None:
    num_envs = 64
    cases = {"policy, critic": stepping(Quadruped(num_envs, seed=0))}
    for group in GROUPS:
        if group not in (*DEFAULT, "depth"):
            cases[f"+ {group}"] = stepping(Quadruped(num_envs, seed=0, groups=[*DEFAULT, group]))
    cases["terrain"] = stepping(QuadrupedTerrain(num_envs, seed=0, difficulty=0.5))
    cases["terrain + scan"] = stepping(QuadrupedTerrain(num_envs, seed=0, difficulty=0.5, groups=[*DEFAULT, "scan"]))
    show(f"{num_envs} environments", rates(cases, num_envs))
    cases = {"16: policy, critic": stepping(QuadrupedTerrain(16, seed=0, difficulty=0.5))}
    cases["16: + depth"] = stepping(QuadrupedTerrain(16, seed=0, difficulty=0.5, groups=[*DEFAULT, "depth"]))
    cases["16, flat: + depth"] = stepping(Quadruped(16, seed=0, groups=[*DEFAULT, "depth"]))
    show("16 environments", rates(cases, 16))
