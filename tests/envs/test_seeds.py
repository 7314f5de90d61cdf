"""Seeds of rows: independent of each other, and of the rows of other seeds."""

from __future__ import annotations

import importlib.util

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from edenrl.collectors import WindowBuffer, make_collector
from edenrl.config import EnvConfig, RunConfig
from edenrl.envs import (
    GymVectorEnv,
    Quadruped,
    QuadrupedTerrain,
    make_env,
    make_gym_env,
    set_group_size,
    spawn_seeds,
)
from edenrl.envs.seeds import chosen_seed
from edenrl.training import setup
from edenrl.training.environment import build_env, collector_options

needs_mujoco = pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="needs mujoco")


def starts(env_id: str, seed: int, rows: int, **options: object) -> list[tuple[float, ...]]:
    observation = make_gym_env(env_id, rows, seed=seed, **options).reset()["observation"]
    return [tuple(row.tolist()) for row in observation]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(("seeds", "rows"), [((0, 1, 2), 8), ((5, 6, 7, 8), 5), ((40, 41, 47), 16)])
def test_rows_of_neighbouring_seeds_start_apart(env_id: str, seeds: tuple[int, ...], rows: int) -> None:
    found = [start for seed in seeds for start in starts(env_id, seed, rows)]
    assert len(set(found)) == len(seeds) * rows
    assert found[:rows] == starts(env_id, seeds[0], rows)


def test_seeds_are_distinct_repeatable_and_fit_31_bits() -> None:
    drawn = [word for seed in range(50) for word in spawn_seeds(seed, 100)]
    assert len(set(drawn)) >= 5000 - 1 and 0 <= min(drawn) and max(drawn) < 2**31
    assert spawn_seeds(2**63, 3) == spawn_seeds(2**63, 64)[:3]
    for other in range(1, 300):
        assert not np.any(np.isin(spawn_seeds(other, 64), spawn_seeds(0, 64)))
    with pytest.raises(ValueError, match="expected a whole number from 0 to"):
        spawn_seeds(-1, 2)


def test_without_a_seed_the_global_generator_decides() -> None:
    torch.manual_seed(3)
    first = chosen_seed(None)
    torch.manual_seed(3)
    assert chosen_seed(None) == first != chosen_seed(None)
    assert chosen_seed(0) == 0


def test_vectors_with_one_generator_are_seeded_too() -> None:
    class Disabled(CartPoleVectorEnv):
        metadata = {**CartPoleVectorEnv.metadata, "autoreset_mode": AutoresetMode.DISABLED}

        def reset(self, *, seed: int | None = None, options: dict | None = None):  # type: ignore[no-untyped-def]
            assert seed is None or isinstance(seed, int)
            return super().reset(seed=seed, options=options)

    def first(seed: int) -> torch.Tensor:
        env = GymVectorEnv(Disabled(num_envs=3))
        env.set_seed(seed)
        return env.reset()["observation"]

    assert torch.equal(first(4), first(4)) and not torch.equal(first(4), first(5))


def test_a_wrapped_vector_gets_the_seeds_of_the_bare_one() -> None:
    kwargs = {"autoreset_mode": "Disabled"}
    inner = gymnasium.make_vec("Pendulum-v1", 3, vectorization_mode="sync", vector_kwargs=kwargs)
    env = GymVectorEnv(RecordEpisodeStatistics(inner))
    env.set_seed(6)
    assert [tuple(row.tolist()) for row in env.reset()["observation"]] == starts("Pendulum-v1", 6, 3)


def test_groups_of_neighbouring_seeds_start_apart() -> None:
    found = []
    for seed in (0, 1, 2):
        env = make_gym_env("CartPole-v1", 6, seed=seed)
        set_group_size(env, 2)
        found += [tuple(row.tolist()) for _ in range(3) for row in env.reset()["observation"][::2]]
    assert len(set(found)) == 27


@needs_mujoco
@pytest.mark.parametrize("cls", [Quadruped, QuadrupedTerrain])
@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_of_the_constructor_and_of_set_seed_is_the_same(cls: type[Quadruped], seed: int) -> None:
    built, later = cls(3, seed=seed, num_threads=1), cls(3, seed=seed + 1, num_threads=1)
    later.set_seed(seed)
    for _ in range(2):
        assert torch.equal(built.reset()["policy"], later.reset()["policy"])


@pytest.mark.parametrize(("seeds", "processes"), [((0, 1, 2), 3), ((7, 8), 5)])
def test_processes_and_workers_of_neighbouring_seeds_share_no_stream(monkeypatch, seeds, processes) -> None:
    """Before, process 1 of seed 0 drew what process 0 of seed 1 drew."""
    drawn, episodes, of_workers = set(), set(), set()
    for seed in seeds:
        cfg = RunConfig(seed=seed, env=EnvConfig(num_envs=processes), collector="multi_sync", num_workers=processes)
        for number in range(processes):
            monkeypatch.setattr("edenrl.distributed.rank", lambda number=number: number)
            setup(cfg)
            drawn.add((float(torch.rand(())), float(np.random.rand())))
            episodes.add(tuple(build_env(cfg, num_envs=1).reset()["observation"][0].tolist()))
            worker = collector_options(cfg)["worker_env"](number)
            of_workers.add(tuple(worker.reset()["observation"][0].tolist()))
    assert len(drawn) == len(episodes) == len(of_workers) == len(seeds) * processes


@pytest.mark.parametrize("seed", [-1, 2**64, 2**70, 10**30, 1.5, True, "3"])
@pytest.mark.parametrize("name", ["PointMass", "HiddenPointMass", "CartPole-v1", "Quadruped"])
def test_a_seed_that_no_generator_takes_is_refused_with_the_range(name: str, seed: object) -> None:
    if name == "Quadruped":
        pytest.importorskip("mujoco")
    message = rf"(?s){seed!r}.*expected a whole number from 0 to 2\*\*64 - 1"
    with pytest.raises(ValueError, match=message):
        make_env(name, 2, seed=seed)  # type: ignore[arg-type]
    if isinstance(seed, int) and not isinstance(seed, bool):
        with pytest.raises(ValueError, match=message):
            make_env(name, 2).set_seed(seed)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30])
def test_other_parts_that_draw_refuse_such_seeds_too(seed: int) -> None:
    with pytest.raises(ValueError, match="expected a whole number from 0 to"):
        WindowBuffer(8, window_dim=2, batch_size=2, seed=seed)
    env = make_env("PointMass", 2, seed=0)
    options = {"kind": "multi_sync", "num_workers": 1, "worker_env": lambda worker: env}
    with pytest.raises(ValueError, match="expected a whole number from 0 to"):
        make_collector(env, None, frames_per_batch=4, seed=seed, **options)


@pytest.mark.parametrize("seed", [0, 2**31, 2**63, 2**64 - 1, np.int64(7)])
def test_every_other_seed_is_taken(seed: int) -> None:
    for name in ("PointMass", "CartPole-v1"):
        assert torch.equal(*(make_env(name, 2, seed=seed).reset()["observation"] for _ in range(2)))
