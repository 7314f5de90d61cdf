"""What each observation group costs the quadruped: pytest -m benchmark -s tests/benchmarks.

``examples/benchmark.py --cases quadruped`` measures the environment beside MuJoCo alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from benchmarks.simulation import CONTROL_STEPS, environment_steps

from edenrl.envs import Quadruped, QuadrupedTerrain
from edenrl.envs.quadruped import GROUPS

pytest.importorskip("mujoco", minversion="3.17")
pytestmark = pytest.mark.benchmark

REPEATS = 5
InTurn = Callable[..., dict[str, float]]
DEFAULT = ("policy", "critic")


def show(in_turn: InTurn, cases: dict[str, Callable[[], None]], num_envs: int) -> dict[str, float]:
    """Prints and returns control steps per second of each case, by the wall: the physics has threads of its own."""
    medians = in_turn(f"{num_envs} environments", cases, REPEATS, time.perf_counter)
    table = {name: CONTROL_STEPS * num_envs / seconds for name, seconds in medians.items()}
    first = next(iter(table.values()))
    for name, rate in table.items():
        print(f"  {name:28s} {rate:9.0f} control steps/s  {rate / first:5.2f}  {1e6 / rate:8.1f} us each")
    return table


def test_cost_of_each_group(in_turn: InTurn) -> None:
    num_envs = 64
    cases = {"policy, critic": environment_steps(Quadruped(num_envs, seed=0))}
    for group in GROUPS:
        if group not in (*DEFAULT, "depth"):
            cases[f"+ {group}"] = environment_steps(Quadruped(num_envs, seed=0, groups=[*DEFAULT, group]))
    terrain = QuadrupedTerrain(num_envs, seed=0, difficulty=0.5)
    cases["terrain"] = environment_steps(terrain)
    scanned = QuadrupedTerrain(num_envs, seed=0, difficulty=0.5, groups=[*DEFAULT, "scan"])
    cases["terrain + scan"] = environment_steps(scanned)
    table = show(in_turn, cases, num_envs)
    assert min(table.values()) > 0
