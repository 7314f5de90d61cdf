"""Random steps at which first episodes start: spread time-outs, marked rows, seeds, and environments that cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrl.envs import EnvBase, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from edenrl.collectors import Collector
from edenrl.envs import (
    CartPoleSwingUp,
    ConflictPointMass,
    HiddenPointMass,
    PointMass,
    RandomStart,
    SimulatorClock,
    VecEnvAdapter,
    as_vec_env,
    can_start_late,
    make_env,
    wrap_env,
)

LIMIT = 40


def quadruped(rows: int) -> EnvBase:
    pytest.importorskip("mujoco")
    return make_env("Quadruped", rows, seed=2, episode_seconds=0.02 * LIMIT, num_threads=1)


def counted(rows: int, limit: int = LIMIT) -> EnvBase:
    """The environment's own time limit is out of reach; a step counter around it ends the episodes."""
    return TransformedEnv(CartPoleSwingUp(rows, seed=2, max_steps=10_000), StepCounter(max_steps=limit))


MAKERS: dict[str, Callable[[int], EnvBase]] = {
    "quadruped": quadruped,
    "point mass": lambda rows: PointMass(rows, seed=2, max_steps=LIMIT),
    "hidden point mass": lambda rows: HiddenPointMass(rows, seed=2, max_steps=LIMIT),
    "conflict": lambda rows: ConflictPointMass(rows, seed=2, max_steps=LIMIT),
    "cart-pole": lambda rows: CartPoleSwingUp(rows, seed=2, max_steps=LIMIT),
    "vec env": lambda rows: VecEnvAdapter(as_vec_env(CartPoleSwingUp(rows, seed=2, max_steps=LIMIT))),
    "step counter": counted,
}


def started(env: EnvBase, seed: int, **options: bool) -> TransformedEnv:
    return wrap_env(env).append_transform(RandomStart(seed, **options))


def ends(data: Any, flag: str = "truncated") -> list[list[int]]:
    """The steps at which each row has a flag."""
    return [row.squeeze(-1).nonzero().flatten().tolist() for row in data["next", flag]]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (5, 3), (64, 11)])
def test_first_episodes_end_at_steps_spread_over_the_limit_and_later_ones_are_whole(
    name: str, rows: int, seed: int
) -> None:
    env = started(MAKERS[name](rows), seed)
    check_env_specs(started(MAKERS[name](rows), seed))
    data = env.rollout(2 * LIMIT, break_when_any_done=False, set_truncated=False)
    first = [row[0] for row in ends(data, "done")]
    if rows == 64 and name not in ("quadruped", "point mass"):  # whose episodes also terminate
        assert len(set(first)) > 20 and min(first) < 5 and max(first) > LIMIT - 6
    for row, (done, timed_out) in enumerate(zip(ends(data, "done"), ends(data), strict=True)):
        late = data["next", "late_start"][row].flatten()
        # Marked from the first step to the end of the first episode, and never again; a whole one is not marked.
        assert late.nonzero().flatten().tolist() == list(range(done[0] + 1)) or not late.any()
        begins = [end + 1 for end in done]
        whole = [end - begin + 1 for begin, end in zip(begins, done[1:], strict=False) if end in timed_out]
        assert set(whole) <= {LIMIT}
        assert data["late_start"][row, 1:].equal(data["next", "late_start"][row, :-1] & ~data["next", "done"][row, :-1])


@pytest.mark.parametrize("rows", [2, 7, 33])
def test_equal_seeds_start_alike_and_others_do_not(rows: int) -> None:
    def first(seed: int) -> list[list[int]]:
        env = started(CartPoleSwingUp(rows, seed=0, max_steps=500), seed)
        return ends(env.rollout(500, break_when_any_done=False))

    assert first(5) == first(5) != first(6)
    # The steps are no function of what the environment of the same seed draws.
    draws = torch.rand(rows, generator=torch.Generator().manual_seed(5))
    assert first(5) != [[500 - int(draw * 500) - 1] for draw in draws]


def test_the_state_of_an_episode_stays_that_of_its_start() -> None:
    plain, late = (wrap_env(PointMass(6, seed=1, max_steps=30)) for _ in range(2))
    late.append_transform(RandomStart(9))
    a, b = plain.reset(), late.reset()
    assert torch.equal(a["observation"], b["observation"]) and not b["step_count"].any()


def test_resets_before_the_first_step_give_the_same_clocks_and_later_ones_start_at_zero() -> None:
    env = started(CartPoleSwingUp(9, seed=0, max_steps=50), 4)
    env.reset()
    once = env.base_env._state["steps"].clone()  # type: ignore[union-attr]
    env.reset()
    assert once.any() and torch.equal(env.base_env._state["steps"], once)  # type: ignore[union-attr]
    env.step(env.rand_action(env.reset()))
    assert not env.reset()["late_start"].any() and not env.base_env._state["steps"].any()  # type: ignore[union-attr]
    begun = started(CartPoleSwingUp(9, seed=0, max_steps=50), 4, begun=True)
    assert not begun.reset()["late_start"].any() and not begun.base_env._state["steps"].any()  # type: ignore[union-attr]


def test_the_lowest_of_several_limits_counts() -> None:
    for outer, inner in ((30, 60), (60, 30)):
        env = TransformedEnv(CartPoleSwingUp(50, seed=0, max_steps=inner), StepCounter(max_steps=outer))
        first = [row[0] for row in ends(started(env, 1).rollout(30, break_when_any_done=False))]
        assert len(first) == 50 and len(set(first)) > 15


@pytest.mark.parametrize("rows", [3, 16])
def test_a_collector_continues_bit_for_bit_in_the_middle_of_first_episodes(rows: int) -> None:
    def build(begun: bool) -> Collector:
        env = started(PointMass(rows, seed=0, max_steps=20), 8, begun=begun)
        return Collector(env, None, frames_per_batch=rows * 5, total_frames=-1)

    collector = build(False)
    batches = iter(collector)
    torch.manual_seed(0)
    next(batches)
    state = collector.state_dict()
    torch.manual_seed(1)
    whole = [next(batches).clone() for _ in range(6)]
    assert whole[0]["next", "late_start"].any() and not whole[-1]["next", "late_start"].any()
    for begun in (True, False):  # what the state says counts
        other = build(begun)
        other.load_state_dict(state)
        torch.manual_seed(1)
        for ours, theirs in zip(whole, iter(other), strict=False):
            keys = [key for key in ours.keys(True, True) if "collector" not in key]
            assert all(torch.equal(ours[key], theirs[key]) for key in keys)


def test_states_that_an_earlier_version_saved_are_loaded() -> None:
    old = Collector(wrap_env(PointMass(4, seed=0, max_steps=9)), None, frames_per_batch=16, total_frames=-1)
    next(iter(old))
    env = started(PointMass(4, seed=1, max_steps=9), 3, begun=True)
    collector = Collector(env, None, frames_per_batch=16, total_frames=-1)
    collector.load_state_dict(old.state_dict())
    assert not next(iter(collector))["next", "late_start"].any()


class Ticking:
    """A vector environment in the style of rsl_rl that does nothing but count, in a buffer of its own."""

    num_envs, num_actions, device = 200, 1, "cpu"

    def __init__(self, limit: Any) -> None:
        self.max_episode_length, self.episode_length_buf = limit, torch.zeros(self.num_envs, dtype=torch.long)

    def get_observations(self) -> Tensor:
        return torch.zeros(self.num_envs, 1)

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        count = self.episode_length_buf + 1
        over = count >= self.max_episode_length
        self.episode_length_buf = count * ~over
        return self.get_observations(), torch.zeros(self.num_envs), over.long(), {"time_outs": over}


class Simulator:
    """What Isaac Lab and mjlab have; `Wrapped` reads it with __getattr__, as Gymnasium's wrappers do."""

    def __init__(self, limit: Any) -> None:
        self.episode_length_buf, self.max_episode_length = torch.zeros(3, dtype=torch.int32), limit


class Wrapped:
    def __init__(self, simulator: Simulator) -> None:
        self.unwrapped = simulator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwrapped, name)


class Adapter(SimulatorClock):
    def __init__(self, simulator: Any) -> None:
        self.simulator = simulator

    def _simulator(self) -> Any:
        return self.simulator


@pytest.mark.parametrize("limit", [7, 7.0, torch.tensor([5, 6, 7])])
def test_the_clock_is_set_where_the_simulator_reads_it(limit: Any) -> None:
    simulator = Simulator(limit)
    adapter = Adapter(Wrapped(simulator))
    assert adapter.max_steps is limit
    adapter.set_episode_steps(torch.tensor([1, 2, 3]))
    assert simulator.episode_length_buf.tolist() == [1, 2, 3] and simulator.episode_length_buf.dtype == torch.int32
    assert "episode_length_buf" not in vars(adapter.simulator)


def test_limits_may_differ_between_rows() -> None:
    env = started(VecEnvAdapter(Ticking(torch.tensor([3, 80] * 100))), 0)
    first = torch.tensor([row[0] + 1 for row in ends(env.rollout(80, break_when_any_done=False))])
    short, long = first.view(100, 2).T
    assert set(short.tolist()) == {1, 2, 3} and long.min() < 10 and len(set(long.tolist())) > 40


class ReadOnly(Ticking):
    """Its buffer can be read only."""

    episode_length_buf = property(lambda self: torch.zeros(200), None)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.max_episode_length = 9


def test_what_has_no_clock_that_can_be_set_is_known() -> None:
    cannot = [
        VecEnvAdapter(ReadOnly()),
        VecEnvAdapter(Ticking(None)),
        make_env("Pendulum-v1", 2),
        SerialEnv(2, lambda: make_env("PointMass", 1)),
        TransformedEnv(make_env("Pendulum-v1", 2), StepCounter()),
    ]
    assert not any(can_start_late(env) for env in cannot)
    assert all(can_start_late(make(2)) for make in MAKERS.values())
    with pytest.raises(TypeError, match="ReadOnly has no episode_length_buf that can be set"):
        cannot[0].set_episode_steps(torch.zeros(200))
    with pytest.raises(ValueError, match="without a clock that can be set"):
        started(cannot[2], 0).reset()
