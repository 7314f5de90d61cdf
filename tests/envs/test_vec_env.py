from __future__ import annotations

import importlib.util
import logging
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from edenrl.collectors import Collector
from edenrl.config import load_config
from edenrl.envs import PointMass, VecEnvAdapter, action_box, as_vec_env, make_env, register_env, registry, wrap_env
from edenrl.envs.recorded_metrics import recorded_metrics
from edenrl.modules import make_actor, observation_groups, value_critic
from edenrl.objectives import GAE
from edenrl.training import build_env, evaluate, load_policy_weights, read_metrics, rollout_metrics
from edenrl.training.metrics import IterationMetrics

# One list per environment of (observations of an episode from its first to its last, how it ends); rewards are 1.
SCRIPT = [
    [([0, 1, 2], "terminated"), ([10, 11, 12, 13], "")],
    [([100, 101, 102, 103], "time_out"), ([110, 111, 112], "")],
    [([200, 201, 202, 203, 204], "time_out"), ([210, 211], "")],
]
# What five steps of it must leave in the data, by hand.
OBSERVATION = [[0, 1, 10, 11, 12], [100, 101, 102, 110, 111], [200, 201, 202, 203, 210]]
NEXT_GIVEN = [[1, 2, 11, 12, 13], [101, 102, 103, 111, 112], [201, 202, 203, 204, 211]]
# Without final observations: those acted on, 1, 102 and 203.
NEXT_MISSING = [[1, 1, 11, 12, 13], [101, 102, 102, 111, 112], [201, 202, 203, 203, 211]]
TERMINATED = [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
TRUNCATED = [[0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
ENDED = [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]


class ScriptedVecEnv:
    """Plays a script and resets inside step, in any of the dialects of vector environments."""

    num_actions = 2
    device = "cpu"
    max_episode_length = 4

    def __init__(
        self,
        script: list[list[tuple[list[float], str]]] | None = None,
        *,
        form: str = "tensordict",
        final: str | None = "final_observations",
        time_outs: bool = True,
        flags: torch.dtype = torch.long,
        column: bool = False,
        reuse: bool = False,
        extras: dict[str, Any] | None = None,
    ) -> None:
        self.script = SCRIPT if script is None else script
        self.num_envs = len(self.script)
        self.form, self.final, self.time_outs = form, final, time_outs
        self.flags, self.column, self.reuse = flags, column, reuse
        self.more = extras or {}
        self.episode, self.place = [0] * self.num_envs, [0] * self.num_envs
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.actions: list[Tensor] = []
        self.buffers: dict[str, Tensor] = {}
        self.closed = False
        if form == "legged_gym":
            self.get_privileged_observations = lambda: self._value().unsqueeze(-1)

    def _value(self) -> Tensor:
        rows = zip(self.script, self.episode, self.place, strict=True)
        return torch.tensor([float(script[e][0][k]) for script, e, k in rows])

    def _buffer(self, name: str, value: Tensor) -> Tensor:
        """With `reuse`, always the same tensor, overwritten."""
        if not self.reuse:
            return value
        return self.buffers.setdefault(name, torch.empty_like(value)).copy_(value)

    def _pack(self, value: Tensor, name: str) -> Any:
        policy = self._buffer(f"{name} policy", torch.stack([value, -value], -1))
        critic = self._buffer(f"{name} critic", value.unsqueeze(-1).clone())
        groups = {"policy": policy, "critic": critic}
        if self.form == "tensordict":
            return TensorDict(groups, batch_size=[self.num_envs])
        if self.form == "dict":
            return groups
        if self.form == "tensor":
            return policy
        if self.form == "legged_gym":
            return policy, critic
        return policy, {"observations": {"critic": critic}}

    def get_observations(self) -> Any:
        observation = self._pack(self._value(), "observation")
        return observation[0] if self.form == "legged_gym" else observation

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        self.actions.append(actions.clone())
        self.place = [k + 1 for k in self.place]
        final = self._value()
        ends = [
            script[e][1] if k == len(script[e][0]) - 1 else ""
            for script, e, k in zip(self.script, self.episode, self.place, strict=True)
        ]
        for row, end in enumerate(ends):
            if end:
                self.episode[row], self.place[row] = self.episode[row] + 1, 0
        self.episode_length_buf = torch.tensor(self.place)
        observation = self._pack(self._value(), "observation")

        def flag(name: str, kinds: tuple[str, ...]) -> Tensor:
            value = torch.tensor([end in kinds for end in ends]).to(self.flags)
            return self._buffer(name, value.unsqueeze(-1) if self.column else value)

        extras: dict[str, Any] = dict(self.more)
        if self.time_outs:
            extras["time_outs"] = flag("time_outs", ("time_out",))
        if self.final is not None:
            last = self._pack(final, "final")
            extras[self.final] = last
        rewards = self._buffer("rewards", torch.ones(self.num_envs))
        dones = flag("dones", ("terminated", "time_out"))
        if self.form == "legged_gym":
            return *observation, rewards, dones, extras
        if self.form == "rsl_rl 2":
            observation, extras["observations"] = observation[0], observation[1]["observations"]
        return observation, rewards, dones, extras

    def close(self) -> None:
        self.closed = True


def collect(inner: Any, steps: int = 5, **kwargs: Any) -> TensorDictBase:
    env = wrap_env(VecEnvAdapter(inner, **kwargs))
    collector = Collector(env, None, frames_per_batch=inner.num_envs * steps, total_frames=-1)
    data = next(iter(collector))
    collector.shutdown()
    return data


def column(data: TensorDictBase, *key: str) -> list[list[float]]:
    return data[key][..., 0].tolist()


def check_flags(data: TensorDictBase, terminated: Any = TERMINATED, truncated: Any = TRUNCATED) -> None:
    flags = {name: column(data["next"], name) for name in ("terminated", "truncated", "done")}
    assert flags == {"terminated": terminated, "truncated": truncated, "done": ENDED}
    assert not data["done"].any() and not data["terminated"].any() and not data["truncated"].any()


FORMS = ["tensordict", "dict", "rsl_rl 2", "legged_gym"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("final", ["final_observations", "final_obs", "time_outs_obs"])
def test_the_true_last_observation_stands_in_next(form: str, final: str) -> None:
    data = collect(ScriptedVecEnv(form=form, final=final))
    assert column(data, "policy") == column(data, "critic") == OBSERVATION
    assert data["policy"][..., 1].tolist() == [[-x for x in row] for row in OBSERVATION]
    assert column(data, "next", "policy") == column(data, "next", "critic") == NEXT_GIVEN
    check_flags(data)
    assert not data["next", "final_obs_missing"].any()
    assert (data["next", "reward"] == 1).all()
    assert column(data, "next", "step_count") == [[1, 2, 1, 2, 3], [1, 2, 3, 1, 2], [1, 2, 3, 4, 1]]


@pytest.mark.parametrize("form", FORMS)
def test_without_it_the_observation_acted_on_stands_in(form: str, caplog: pytest.LogCaptureFixture) -> None:
    inner = ScriptedVecEnv(form=form, final=None)
    env = VecEnvAdapter(inner)
    assert env.final_obs == "unknown"
    data = env.rollout(5, break_when_any_done=False)
    assert column(data, "policy") == column(data, "critic") == OBSERVATION
    assert column(data, "next", "policy") == column(data, "next", "critic") == NEXT_MISSING
    check_flags(data)
    assert column(data, "next", "final_obs_missing") == ENDED
    assert env.final_obs == "missing"
    said = [record.message for record in caplog.records if "last observation" in record.message]
    assert len(said) == 1 and "V(s_t)" in said[0] and "ScriptedVecEnv" in said[0]


@pytest.mark.parametrize("flags", [torch.long, torch.bool, torch.float32])
@pytest.mark.parametrize("as_column", [False, True])
def test_flags_of_any_type(flags: torch.dtype, as_column: bool) -> None:
    data = collect(ScriptedVecEnv(flags=flags, column=as_column))
    check_flags(data)
    assert column(data, "next", "policy") == NEXT_GIVEN


def test_without_time_outs_every_end_is_a_termination(caplog: pytest.LogCaptureFixture) -> None:
    data = collect(ScriptedVecEnv(time_outs=False))
    check_flags(data, terminated=ENDED, truncated=[[0] * 5] * 3)
    said = [record.message for record in caplog.records if "time_outs" in record.message]
    assert len(said) == 1 and "termination" in said[0]


def test_a_lone_tensor_is_the_policy_group() -> None:
    env = VecEnvAdapter(ScriptedVecEnv(form="tensor"))
    assert list(env.observation_spec.keys()) == ["policy", "final_obs_missing"]
    assert column(env.rollout(5, break_when_any_done=False), "next", "policy") == NEXT_GIVEN


def test_final_observations_of_some_groups_only(caplog: pytest.LogCaptureFixture) -> None:
    class Partly(ScriptedVecEnv):
        def step(self, actions: Tensor) -> tuple[Any, ...]:
            *rest, extras = super().step(actions)
            return *rest, {**extras, "final_observations": extras["final_observations"].select("critic")}

    data = collect(Partly())
    assert column(data, "next", "critic") == NEXT_GIVEN
    assert column(data, "next", "policy") == NEXT_MISSING
    assert column(data, "next", "final_obs_missing") == ENDED
    assert "no last observation of ['policy']" in caplog.text


# Observations 1, 2, 3, a time-out, then 10 and 11; V(s) = s, rewards 1, gamma 0.9, lambda 0.95, so
# gamma * lambda = 0.855. Last step: 1 + 0.9 * 11 - 10 = 0.9.
# Last observation 4: third step 1 + 0.9 * 4 - 3 = 1.6; second 1 + 0.9 * 3 - 2 + 0.855 * 1.6 = 3.068;
# first 1 + 0.9 * 2 - 1 + 0.855 * 3.068 = 4.42314.
# V(s_t): third step 1 + 0.9 * 3 - 3 = 0.7; second 1.7 + 0.855 * 0.7 = 2.2985; first 1.8 + 0.855 * 2.2985 = 3.765217.
# Terminated: third step 1 - 3 = -2; second 1.7 - 0.855 * 2 = -0.01; first 1.8 - 0.855 * 0.01 = 1.79145.
@pytest.mark.parametrize(
    ("final", "end", "expected"),
    [
        ("final_observations", "time_out", [4.42314, 3.068, 1.6, 0.9]),
        (None, "time_out", [3.765217, 2.2985, 0.7, 0.9]),
        ("final_observations", "terminated", [1.79145, -0.01, -2.0, 0.9]),
        (None, "terminated", [1.79145, -0.01, -2.0, 0.9]),
    ],
)
def test_advantages_at_the_end_of_an_episode(final: str | None, end: str, expected: list[float]) -> None:
    inner = ScriptedVecEnv([[([1, 2, 3, 4], end), ([10, 11, 12], "")]], final=final)
    critic = TensorDictModule(lambda x: x, in_keys=["critic"], out_keys=["state_value"])
    data = GAE(gamma=0.9, lmbda=0.95, value_network=critic)(collect(inner, steps=4))
    torch.testing.assert_close(data["advantage"].flatten(), torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("final", ["final_observations", None])
def test_buffers_that_are_overwritten_do_not_change_what_was_collected(form: str, final: str | None) -> None:
    plain, reused = (collect(ScriptedVecEnv(form=form, final=final, reuse=reuse)) for reuse in (False, True))
    assert column(reused, "policy") == OBSERVATION
    assert (plain.exclude("action") == reused.exclude("action")).all()
    # Also step by step, without a collector in between that copies.
    env = VecEnvAdapter(ScriptedVecEnv(form=form, final=final, reuse=True))
    root, steps = env.reset(), []
    for _ in range(5):
        data, root = env.step_and_maybe_reset(root.set("action", torch.zeros(3, 2)))
        steps.append(data)
    assert column(torch.stack(steps, 1), "policy") == OBSERVATION
    assert column(torch.stack(steps, 1), "next", "policy") == (NEXT_GIVEN if final else NEXT_MISSING)


def test_log_probabilities_and_values_recomputed_from_overwritten_buffers_match() -> None:
    env = VecEnvAdapter(ScriptedVecEnv(reuse=True))
    groups = observation_groups(env.observation_spec)
    actor = make_actor({"policy": groups["policy"]}, env.action_spec_unbatched, hidden=(8,))
    critic = value_critic(groups, hidden=(8,))
    data = next(iter(Collector(wrap_env(env), actor, frames_per_batch=15, total_frames=-1)))
    log_prob = actor.get_dist(data).log_prob(data["action"])
    torch.testing.assert_close(log_prob, data["action_log_prob"], rtol=1e-5, atol=1e-5)
    GAE(gamma=0.9, lmbda=0.95, value_network=critic)(data)
    known = torch.tensor(OBSERVATION).float().unsqueeze(-1)
    value = critic(TensorDict({"policy": torch.cat([known, -known], -1), "critic": known}, [3, 5]))["state_value"]
    torch.testing.assert_close(value, data["state_value"], rtol=1e-5, atol=1e-5)


def test_the_log_reaches_the_metrics_of_a_rollout() -> None:
    log = {"Episode_Reward/track": torch.tensor([1.0, 2.0, 6.0]), "Curriculum/level": 0.5, "new": 1.0}
    inner = ScriptedVecEnv(extras={"log": log})
    inner.extras = {"log": {"Episode_Reward/track": 0.0, "Curriculum/level": 0.0}}  # type: ignore[attr-defined]
    data = collect(inner)
    metrics = rollout_metrics(data)
    assert metrics["episode/Episode_Reward/track"].item() == 3.0
    assert metrics["episode/Curriculum/level"].item() == 0.5
    assert metrics["episode/count"].item() == 3
    assert metrics["episode/new"].item() == 1.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(np.array([1.0, 2.0, 6.0]), 3.0), (np.array(1.5), 1.5), (np.array([True, False]), 0.5), (np.float32(2), 2.0)],
)
def test_numbers_of_numpy_are_metrics_too(value: Any, expected: float) -> None:
    data = collect(ScriptedVecEnv(extras={"log": {"level": value, "none": np.zeros(0), "text": np.array("a")}}))
    assert rollout_metrics(data)["episode/level"].item() == expected
    assert list(data["next", "metrics"].keys()) == ["level"]


@pytest.mark.parametrize("name", [1, 2.5, None, ("a", "b"), ("a", 1), False])
@pytest.mark.parametrize("announced", [False, True])
def test_metrics_that_are_not_named_by_texts_get_their_text(name: Any, announced: bool) -> None:
    inner = ScriptedVecEnv(extras={"log": {name: 2.0, "level": 1.0}})
    if announced:
        inner.extras = {"log": {name: 0.0, "level": 0.0}}  # type: ignore[attr-defined]
    data = collect(inner)
    assert set(data["next", "metrics"].keys()) == {str(name), "level"}
    assert rollout_metrics(data)[f"episode/{name}"].item() == 2.0
    assert str(name) in VecEnvAdapter(inner, log_keys=[name]).observation_spec["metrics"].keys()


class LateLog(ScriptedVecEnv):
    """Logs `late` from step `first` on, its number then; row i ends every `lengths[i]` steps."""

    def __init__(self, first: int, lengths: list[int], announced: bool) -> None:
        super().__init__([[([0.0] * (length + 1), "time_out")] * 40 for length in lengths])
        self.first = first
        if announced:
            self.extras = {"log": {"late": 0.0}}

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        *rest, extras = super().step(actions)
        count = len(self.actions)
        value = torch.full((5,), float(count)) if count % 2 else float(count)
        return *rest, {**extras, **({"log": {"late": value}} if count >= self.first else {})}


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize(("first", "lengths"), [(3, [2, 5, 9]), (6, [3, 3]), (11, [1, 2, 3, 4])])
def test_a_log_counts_from_the_step_in_which_it_comes(first: int, lengths: list[int], announced: bool) -> None:
    env, steps = wrap_env(VecEnvAdapter(LateLog(first, lengths, announced))), 5
    collector = iter(Collector(env, None, frames_per_batch=steps * len(lengths), total_frames=-1))
    for batch in range(4):
        data = next(collector)
        begun = batch * steps
        expected = [float(t) if t >= first else math.nan for t in range(begun + 1, begun + steps + 1)]
        if announced or begun + steps >= first:
            found = data["next", "metrics", "late"].squeeze(-1)
            torch.testing.assert_close(found, torch.tensor([expected] * len(lengths)), equal_nan=True)
        ended = [t for t in range(begun + 1, begun + steps + 1) for length in lengths if t % length == 0]
        mean = rollout_metrics(data).get("episode/late", torch.tensor(math.nan)).item()
        if ended and min(ended) >= first:
            assert mean == pytest.approx(sum(ended) / len(ended))
        else:
            assert math.isnan(mean)


def test_short_rollouts_of_an_iteration_join_although_the_metric_came_later() -> None:
    env = wrap_env(VecEnvAdapter(LateLog(4, [1, 2], False)))
    collector, metrics = iter(Collector(env, None, frames_per_batch=2, total_frames=-1)), IterationMetrics()
    for _ in range(6):
        metrics.watch(next(collector))
    assert math.isnan(metrics.row()["episode/late"])
    metrics.clear()
    for _ in range(2):
        metrics.watch(next(collector))
    assert metrics.row()["episode/late"] == pytest.approx((7 + 8 + 8) / 3)


def test_an_evaluation_averages_what_came_over_the_episodes_that_have_it() -> None:
    def policy(data: TensorDictBase) -> TensorDictBase:
        return data.set("action", torch.zeros(2, 2))

    result = evaluate(policy, lambda rows: wrap_env(VecEnvAdapter(LateLog(4, [3, 5], False))), num_episodes=4)
    # Row 0 ends at 3 and 6, row 1 at 5 and 10.
    assert result["late"] == pytest.approx((6 + 5 + 10) / 3)


def test_workers_say_that_they_drop_what_was_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    from edenrl.collectors.make import _Worker

    collector = iter(
        _Worker(wrap_env(VecEnvAdapter(LateLog(2, [2], False))), None, frames_per_batch=4, total_frames=-1)
    )
    assert all(("next", "metrics", "late") not in next(collector).keys(True) for _ in range(2))
    assert caplog.text.count("reports the metrics ['late']") == 1 and "VecEnvAdapter(env, log_keys=[" in caplog.text


def test_a_log_is_held_until_the_next_one_and_weighted_by_the_episodes_that_ended() -> None:
    class Logging(ScriptedVecEnv):
        extras = {"log": {"height": 0.0}}

        def step(self, actions: Tensor) -> tuple[Any, ...]:
            *rest, dones, extras = super().step(actions)
            log = {"log": {"height": float(len(self.actions))}} if dones.any() else {}
            return *rest, dones, {**extras, **log}

    script = [[([0, 1], "time_out"), ([0, 1, 2, 3], "")]] * 2 + [[([0, 1, 2, 3], "terminated"), ([0, 1], "")]]
    data = collect(Logging(script), steps=4)
    assert column(data["next"], "metrics", "height") == [[1, 1, 3, 3]] * 3
    # Two episodes ended in step 1, one in step 3.
    assert rollout_metrics(data)["episode/height"].item() == pytest.approx((1 + 1 + 3) / 3)


def test_reward_groups(caplog: pytest.LogCaptureFixture) -> None:
    groups = {"rg": torch.tensor([1.0, 2.0, 3.0]), "rs": torch.tensor([4.0, 5.0, 6.0]), "rp": -torch.ones(3, 1)}
    data = collect(ScriptedVecEnv(extras=groups), reward_groups=True)
    assert column(data, "next", "reward_groups", "task") == [[1.0] * 5, [2.0] * 5, [3.0] * 5]
    assert column(data, "next", "reward_groups", "style") == [[4.0] * 5, [5.0] * 5, [6.0] * 5]
    assert column(data, "next", "reward_groups", "penalty") == [[-1.0] * 5] * 3
    assert "reward_groups" not in collect(ScriptedVecEnv(extras=groups))["next"].keys()
    assert "Pass VecEnvAdapter(env, reward_groups=True)" in caplog.text
    with pytest.raises(ValueError, match=r"gave no extras \['rs', 'rp'\]"):
        collect(ScriptedVecEnv(extras={"rg": groups["rg"]}), reward_groups=True)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("critic", r"'critic' in 2 of 3 environments \(the first is environment 1\)"),
        ("reward", r"'reward' in 1 of 3 environments \(the first is environment 2\)"),
        ("final", r"'policy' in 1 of 3 environments \(the first is environment 0\)"),
    ],
)
def test_values_that_are_not_finite_are_refused(what: str, message: str) -> None:
    class Broken(ScriptedVecEnv):
        def step(self, actions: Tensor) -> tuple[Any, ...]:
            observation, rewards, dones, extras = super().step(actions)
            if len(self.actions) == 2:
                if what == "critic":
                    observation["critic"][1:] = torch.nan
                elif what == "reward":
                    rewards[2] = torch.inf
                else:
                    extras["final_observations"]["policy"][0, 1] = -torch.inf
            return observation, rewards, dones, extras

    with pytest.raises(ValueError, match=f"Broken returned values that are not finite: {message}"):
        collect(Broken())


class HostReads(TorchDispatchMode):
    """Counts how often the host waits for a number of the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("final", ["final_observations", None])
def test_on_an_accelerator_the_host_does_not_wait_in_a_step(final: str | None) -> None:
    class NoReads(ScriptedVecEnv):
        def step(self, actions: Tensor) -> tuple[Any, ...]:
            with torch.utils._python_dispatch._disable_current_modes():
                observation, rewards, dones, extras = super().step(actions)
                if len(self.actions) == 5:
                    observation["critic"][2] = torch.nan
                return observation, rewards, dones, {**extras, "log": {"level": 2.0, "height": torch.ones(3)}}

    env = VecEnvAdapter(NoReads(final=final), log_keys=["level"])
    env._looking_is_free = False
    root = env.reset()
    for _ in range(2):  # until the first end of an episode, which is when the adapter learns what it has
        root = env.step_and_maybe_reset(root.set("action", torch.zeros(3, 2)))[1]
    for _ in range(3):
        with HostReads() as reads, recorded_metrics(env) as steps:
            env._step(TensorDict({"action": torch.zeros(3, 2)}, batch_size=[3]))
        assert reads.count == 0 and list(steps[0]) == ["height"]
    with pytest.raises(ValueError, match="'critic' in 1 of 3 environments"):
        env.reset(TensorDict({"_reset": torch.tensor([[False], [False], [True]])}, batch_size=[3]))


def test_a_row_that_runs_on_may_have_a_meaningless_final_observation() -> None:
    class Lazy(ScriptedVecEnv):
        def step(self, actions: Tensor) -> tuple[Any, ...]:
            observation, rewards, dones, extras = super().step(actions)
            for leaf in extras["final_observations"].values():
                leaf[dones == 0] = torch.nan
            return observation, rewards, dones, extras

    assert column(collect(Lazy()), "next", "policy") == NEXT_GIVEN


def wrong(**attributes: Any) -> ScriptedVecEnv:
    inner = ScriptedVecEnv()
    for name, value in attributes.items():
        setattr(inner, name, value)
    return inner


def test_what_is_no_vector_environment_is_refused() -> None:
    with pytest.raises(TypeError, match=r"was given a Env without num_envs, num_actions, device, get_observations"):
        VecEnvAdapter(gymnasium.Env())
    with pytest.raises(TypeError, match="observations of type ndarray; expected a TensorDict or dict of groups"):
        VecEnvAdapter(wrong(get_observations=lambda: np.zeros((3, 2))))
    with pytest.raises(ValueError, match=r"'policy': \(2, 4\).*expected \[3, ...\], one row per environment"):
        VecEnvAdapter(wrong(get_observations=lambda: torch.zeros(2, 4)))
    with pytest.raises(ValueError, match=r"observation groups named \['reward'\]"):
        VecEnvAdapter(wrong(get_observations=lambda: {"reward": torch.zeros(3, 4)}))
    with pytest.raises(ValueError, match=r"not finite: 'policy' in 3 of 3"):
        VecEnvAdapter(wrong(get_observations=lambda: torch.full((3, 2), torch.nan)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda o, r, d, e: (o, r, True, e), TypeError, r"dones=True from step; expected a tensor of shape \(3,\)"),
        (lambda o, r, d, e: (o, r[:2], d, e), TypeError, r"rewards=torch.float32 of shape \(2,\) from step"),
        (lambda o, r, d, e: (o, r, d, None), TypeError, "None as extras from step; expected a dict"),
        (
            lambda o, r, d, e: (o, r, d, {**e, "time_outs": torch.tensor(True)}),
            TypeError,
            r"extras\['time_outs'\]=torch.bool of shape \(\)",
        ),
        (lambda o, r, d, e: (o.exclude("critic"), r, d, e), ValueError, r"step observations \{'policy': \(3, 2\)\}"),
        (
            lambda o, r, d, e: (o, r, d, {**e, "final_observations": torch.zeros(3, 5)}),
            ValueError,
            r"final observations \{'policy': \(3, 5\)\}; expected \{'policy': \(3, 2\)\}",
        ),
        (
            lambda o, r, d, e: (o, r, d, {**e, "final_observations": torch.zeros(1, 2)}),
            ValueError,
            r"'policy': \(1, 2\)\}; expected \[3, ...\]",
        ),
    ],
)
def test_wrong_steps_are_refused(change: Any, error: type[Exception], message: str) -> None:
    inner = ScriptedVecEnv()
    step = inner.step
    with pytest.raises(error, match=f"ScriptedVecEnv (returned|gave).*{message}"):
        collect(wrong(step=lambda actions: change(*step(actions))))


class Resettable(ScriptedVecEnv):
    def restart(self, ids: Tensor) -> None:
        for row in ids.tolist():
            self.episode[row], self.place[row] = 1, 0


class ByIds(Resettable):
    def reset(self, env_ids: Tensor | None = None) -> tuple[Any, dict]:
        self.restart(torch.arange(3) if env_ids is None else env_ids)
        return self._pack(self._value(), "observation"), {}


class ByIndex(Resettable):
    def reset_idx(self, env_ids: Tensor) -> None:
        self.restart(env_ids)


class Inside(Resettable):
    @property
    def unwrapped(self) -> ByIds:
        inner = ByIds()
        inner.episode, inner.place = self.episode, self.place
        return inner


class Tuples(Resettable):
    """Returns (tensor, extras) from get_observations and reset, with flags and logs among the extras."""

    def get_observations(self) -> Any:
        policy, critic = super().get_observations().values()
        return policy, {"critic": critic, "time_outs": torch.zeros(3), "log": {"x": 1.0}}

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        observation, rewards, dones, extras = super().step(actions)
        return (observation["policy"], {"critic": observation["critic"]}), rewards, dones, extras

    def reset(self, env_ids: Tensor | None = None) -> Any:
        self.restart(torch.arange(3) if env_ids is None else env_ids)
        return self.get_observations()


@pytest.mark.parametrize("kind", [ByIds, ByIndex, Inside, Tuples])
def test_rows_that_did_not_end_are_reset_by_the_inner_environment(kind: type[Resettable]) -> None:
    env = VecEnvAdapter(kind())
    root = env.step_and_maybe_reset(env.reset().set("action", torch.zeros(3, 2)))[1]
    root = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
    assert column(root, "policy") == [1, 110, 201]
    data, root = env.step_and_maybe_reset(root.set("action", torch.zeros(3, 2)))
    # Row 0 ended: its waiting observation is handed out, nothing else is touched.
    assert column(data["next"], "policy") == [2, 111, 202] and column(root, "policy") == [10, 111, 202]
    assert column(env.reset(), "policy") == [10, 110, 210]


def test_time_limits_from_outside_work_with_partial_resets() -> None:
    env = TransformedEnv(VecEnvAdapter(ByIds()), StepCounter(max_steps=2))
    data = env.rollout(2, break_when_any_done=False)
    assert data["next", "truncated"][:, 1].all() and column(data, "next", "policy")[1] == [101, 102]
    with pytest.raises(RuntimeError, match="ScriptedVecEnv cannot reset all its environments.*StepCounter"):
        TransformedEnv(VecEnvAdapter(ScriptedVecEnv()), StepCounter(max_steps=2)).rollout(3, break_when_any_done=False)


class OnlyWhole(Resettable):
    def reset(self) -> tuple[Any, dict]:
        self.restart(torch.arange(3))
        return self._pack(self._value(), "observation"), {}


def test_all_rows_can_be_reset_together_when_some_have_just_ended() -> None:
    env = VecEnvAdapter(OnlyWhole())
    root = env.reset()
    for _ in range(2):  # row 0 ends at the second step
        root = env.step_and_maybe_reset(root.set("action", torch.zeros(3, 2)))[1]
    data = env.step(root.set("action", torch.zeros(3, 2)))["next"]
    assert data["done"].squeeze(-1).tolist() == [False, True, False]
    root = env.reset(data.clone().set("_reset", torch.ones(3, 1, dtype=torch.bool)))
    assert column(root, "policy") == [10, 110, 210]
    data = env.step(root.set("action", torch.zeros(3, 2)))["next"]
    with pytest.raises(RuntimeError, match="cannot reset environments that have not ended"):
        env.reset(data.clone().set("_reset", torch.tensor([[True], [False], [False]])))


class LeggedGym(ScriptedVecEnv):
    """Observations lie in a buffer that only `step` and `reset` fill."""

    def __init__(self) -> None:
        super().__init__(form="legged_gym")
        self.obs_buf, self.privileged_obs_buf = torch.zeros(3, 2), torch.zeros(3, 1)
        self.get_privileged_observations = lambda: self.privileged_obs_buf

    def reset(self) -> tuple[Tensor, Tensor]:
        self.obs_buf, self.privileged_obs_buf = super().get_observations(), self._value().unsqueeze(-1)
        return self.obs_buf, self.privileged_obs_buf

    def reset_idx(self, env_ids: Tensor) -> None:
        for row in env_ids.tolist():
            self.episode[row], self.place[row] = 1, 0

    def get_observations(self) -> Tensor:
        return self.obs_buf

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        result = super().step(actions)
        self.obs_buf, self.privileged_obs_buf = result[:2]
        return result


def test_an_environment_whose_observations_lie_in_a_buffer() -> None:
    env = VecEnvAdapter(LeggedGym())
    root = env.reset()
    assert column(root, "policy") == [0, 100, 200]
    root = env.step_and_maybe_reset(root.set("action", torch.zeros(3, 2)))[1]
    with pytest.raises(RuntimeError, match="returns what the last step saw"):
        env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))


def test_an_action_that_the_simulator_changes_in_place_stays_what_was_sampled() -> None:
    inner = ScriptedVecEnv()
    step = inner.step
    inner.step = lambda actions: step(actions.mul_(0.25))  # type: ignore[method-assign]
    data = VecEnvAdapter(inner).rollout(2, lambda td: td.set("action", torch.ones(3, 2)))
    assert (data["action"] == 1).all() and (inner.actions[0] == 0.25).all()


def test_final_observations_that_stop_coming_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    inner = ScriptedVecEnv()
    env = VecEnvAdapter(inner)
    root = env.reset()
    for k in range(3):
        inner.final = "final_observations" if k < 2 else None
        data, root = env.step_and_maybe_reset(root.set("action", torch.zeros(3, 2)))
    assert data["next", "final_obs_missing"].squeeze(-1).tolist()[1] and env.final_obs == "missing"
    assert "does not give the last observation" in caplog.text


def test_what_was_said_once_is_not_repeated_by_the_next_environment(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        collect(ScriptedVecEnv(final=None))
    assert caplog.text.count("does not give the last observation") == 1


def test_the_first_reset_hands_out_what_the_inner_environment_began() -> None:
    env = VecEnvAdapter(ScriptedVecEnv())
    assert column(env.reset(), "policy") == [0, 100, 200]
    with pytest.raises(RuntimeError, match="cannot reset all its environments"):
        env.reset()


def test_seed_close_and_time_limits_are_those_of_the_inner_environment(caplog: pytest.LogCaptureFixture) -> None:
    inner, seeds = ScriptedVecEnv(), list[int]()
    env = VecEnvAdapter(inner)
    env.set_seed(3)
    assert "has no seed()" in caplog.text
    inner.seed = seeds.append  # type: ignore[attr-defined]
    env.set_seed(4)
    assert seeds == [4]
    assert env.max_episode_length == 4
    env.rollout(2, break_when_any_done=False)
    assert env.episode_length_buf.tolist() == [0, 2, 2]
    env.episode_length_buf = torch.tensor([1, 2, 3])
    assert inner.episode_length_buf.tolist() == [1, 2, 3]
    assert env.to("cpu") is env
    with pytest.raises(RuntimeError, match="runs on cpu and cannot be moved to meta"):
        env.to("meta")
    env.close()
    assert inner.closed


def test_actions_pass_unchanged_and_the_box_of_the_inner_environment_is_kept() -> None:
    inner = ScriptedVecEnv()
    env = VecEnvAdapter(inner)
    assert isinstance(env.action_spec, Unbounded) and env.action_spec.shape == (3, 2)
    action = torch.randn(3, 2)
    env.step(env.reset().set("action", action))
    assert torch.equal(inner.actions[0], action)
    low, high = action_box(VecEnvAdapter(as_vec_env(PointMass(2))))  # type: ignore[misc]
    assert low.tolist() == [-1, -1] and high.tolist() == [1, 1]


def test_the_data_is_that_of_the_environment_itself() -> None:
    """Through both adapters and back, value by value, over many ends of episodes."""

    def batches(env: EnvBase) -> list[TensorDictBase]:
        torch.manual_seed(0)
        collector = iter(Collector(wrap_env(env), None, frames_per_batch=80, total_frames=-1))
        return [next(collector).exclude("metrics", ("next", "metrics")) for _ in range(4)]

    for direct, adapted in zip(
        batches(PointMass(4, seed=1, max_steps=7)),
        batches(VecEnvAdapter(as_vec_env(PointMass(4, seed=1, max_steps=7)))),
        strict=True,
    ):
        assert direct["next", "done"].sum() >= 8
        assert not adapted["next", "final_obs_missing"].any()
        assert (direct == adapted.exclude("final_obs_missing", ("next", "final_obs_missing"))).all()


def load_script(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ppo_trains_through_the_adapters_as_it_does_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    register_env("Direct", lambda num_envs, *, device, seed: PointMass(num_envs, device=device, seed=seed, max_steps=9))
    register_env(
        "Adapted",
        lambda num_envs, *, device, seed: VecEnvAdapter(
            as_vec_env(PointMass(num_envs, device=device, seed=seed, max_steps=9))
        ),
    )
    script = load_script("train_ppo")
    flags = ["--total_frames=800", "--env.num_envs=8", "--algorithm.steps_per_env=20", "--num_threads=1"]
    flags += ["--algorithm.actor_hidden=8", "--algorithm.critic_hidden=8", "--quiet=true"]
    flags += ["--evaluation.num_episodes=4", "--checkpoint.interval_iterations=1000"]
    weights, metrics = [], []
    for name in ("Direct", "Adapted"):
        run = tmp_path / name
        script.main([f"--env.name={name}", f"--run_dir={run}", *flags])
        cfg = load_config(script.Train, run / "config.json")
        policy = script.make_policy(cfg, build_env(cfg, num_envs=1))
        load_policy_weights(policy, str(run), "latest")
        weights.append(policy.state_dict())
        metrics.append(read_metrics(run / "metrics.csv"))
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]), key
    assert len(metrics[0]) == 5 and sum(row["episode/count"] for row in metrics[0]) >= 80
    for direct, adapted in zip(*metrics, strict=True):
        assert direct.keys() == adapted.keys()
        del direct["seconds"], adapted["seconds"]
        assert direct == pytest.approx(adapted, rel=1e-5)


class Grouped(EnvBase):
    """Two groups, reward groups, no metrics; row i ends after i + 2 steps, even rows by termination."""

    def __init__(self, num_envs: int = 3) -> None:
        super().__init__(batch_size=[num_envs])
        shape = self.batch_size

        def columns(*names: str) -> Composite:
            return Composite({name: Unbounded((*shape, 1)) for name in names}, shape=shape)

        self.observation_spec = Composite(policy=Unbounded((*shape, 2)), critic=Unbounded((*shape, 1)), shape=shape)
        self.observation_spec["reward_groups"] = columns("task", "style", "penalty")
        self.action_spec = Bounded(-2.0, 2.0, (*shape, 2))
        self.reward_spec = Unbounded((*shape, 1))
        flag = Binary(1, shape=(*shape, 1), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape)
        self.count = torch.zeros(num_envs, 1)

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _out(self, reward: Tensor | None = None) -> TensorDict:
        count = self.count
        zero = torch.zeros_like(count) if reward is None else reward
        groups = TensorDict({"task": zero, "style": 2 * zero, "penalty": -zero}, self.batch_size)
        done = count >= torch.arange(len(count)).unsqueeze(-1) + 2
        even = torch.arange(len(count)).unsqueeze(-1) % 2 == 0
        out = {"policy": torch.cat([count, -count], -1), "critic": count.clone(), "reward_groups": groups}
        return TensorDict({**out, "done": done, "terminated": done & even, "truncated": done & ~even}, self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.count = torch.zeros_like(self.count) if mask is None else self.count * ~mask
        return self._out()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.count = self.count + 1
        reward = self.count.clone()
        return self._out(reward).set("reward", reward)


def test_a_torchrl_environment_as_a_vector_environment() -> None:
    env = as_vec_env(Grouped(), max_episode_length=50)
    assert (env.num_envs, env.num_actions, env.max_episode_length) == (3, 2, 50)
    assert env.get_observations()["policy"].tolist() == [[0, 0]] * 3
    assert set(env.get_observations().keys()) == {"policy", "critic"}
    assert env.single_action_space.high.tolist() == [2, 2]
    steps = [env.step(torch.zeros(3, 2)) for _ in range(3)]
    observations = [step[0]["critic"].squeeze(-1).tolist() for step in steps]
    assert observations == [[1, 1, 1], [0, 2, 2], [1, 0, 3]]
    assert [step[1].tolist() for step in steps] == [[1, 1, 1], [2, 2, 2], [1, 3, 3]]
    assert [step[2].tolist() for step in steps] == [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert steps[0][2].dtype == torch.long
    assert [step[3]["time_outs"].tolist() for step in steps] == [[False] * 3, [False] * 3, [False, True, False]]
    assert steps[1][3]["final_observations"]["critic"][0].item() == 2
    assert steps[2][3]["final_observations"]["policy"][1].tolist() == [3, -3]
    assert [steps[2][3][name].tolist() for name in ("rg", "rs", "rp")] == [[1, 3, 3], [2, 6, 6], [-1, -3, -3]]
    assert env.episode_length_buf.tolist() == [1, 0, 3]
    observations, _ = env.reset(torch.tensor([2]))
    assert observations["critic"].squeeze(-1).tolist() == [1, 0, 0] and env.episode_length_buf.tolist() == [1, 0, 0]


def test_reward_groups_go_there_and_back() -> None:
    data = VecEnvAdapter(as_vec_env(Grouped(), max_episode_length=50)).rollout(3, break_when_any_done=False)
    assert column(data, "next", "reward_groups", "style") == [[2, 4, 2], [2, 4, 6], [2, 4, 6]]


def test_the_episode_length_buffer_spreads_the_first_time_outs() -> None:
    env = as_vec_env(PointMass(3, max_steps=10))
    env.episode_length_buf = torch.tensor([0, 7, 9])
    env.step(torch.zeros(3, 2))
    dones = [env.step(torch.zeros(3, 2))[2].tolist() for _ in range(2)]
    assert dones == [[0, 0, 0], [0, 1, 0]]
    assert env.episode_length_buf.tolist() == [3, 0, 2]


def test_metrics_are_logged_when_episodes_end() -> None:
    env = as_vec_env(PointMass(2, max_steps=3, seed=0))
    logs = [env.step(torch.ones(2, 2))[3].get("log") for _ in range(3)]
    assert logs[:2] == [None, None]
    assert set(logs[2]) == {"success", "final_distance", "path_length", "collisions"}
    assert logs[2]["path_length"].item() > 0


def test_steps_in_inference_mode_leave_usable_tensors() -> None:
    env = as_vec_env(PointMass(2, max_steps=3, seed=0))
    with torch.inference_mode():
        for _ in range(4):
            observations, rewards, dones, extras = env.step(torch.zeros(2, 2))
    for tensor in (*observations.values(), rewards, dones, extras["time_outs"], env.episode_length_buf):
        assert not tensor.is_inference()
    env.reset()
    observations = env.get_observations()["observation"]
    (observations * torch.ones(14, requires_grad=True)).sum().backward()


def test_environments_without_a_vector_view_are_refused() -> None:
    with pytest.raises(ValueError, match="Grouped has neither max_episode_length nor max_steps"):
        as_vec_env(Grouped())
    with pytest.raises(TypeError, match="given a dict; expected a torchrl.envs.EnvBase"):
        as_vec_env({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"actions \[N, a\] of floating-point numbers"):
        as_vec_env(make_env("CartPole-v1", 2), max_episode_length=5)


def test_the_runner_of_rsl_rl_trains_on_it() -> None:
    runners = pytest.importorskip("rsl_rl.runners")
    env = as_vec_env(PointMass(16, seed=0, max_steps=11))
    model = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "elu"}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    cfg = {
        "num_steps_per_env": 24,
        "save_interval": 100,
        "obs_groups": {"actor": ["observation"], "critic": ["observation"]},
        "actor": {**model, "distribution_cfg": gaussian},
        "critic": model,
        "algorithm": {"class_name": "PPO"},
    }
    runner = runners.OnPolicyRunner(env, cfg, log_dir=None, device="cpu")
    before = [parameter.detach().clone() for parameter in runner.alg.actor.parameters()]
    runner.learn(3, init_at_random_ep_len=True)
    after = list(runner.alg.actor.parameters())
    assert all(parameter.isfinite().all() for parameter in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_logging_goes_to_the_library_s_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="edenrl"):
        collect(ScriptedVecEnv(final=None))
    assert {record.name for record in caplog.records} == {"edenrl"}
