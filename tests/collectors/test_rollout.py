import io
import warnings
from contextlib import nullcontext

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs.libs.gym import GymWrapper
from torchrl.modules import GRUModule

from edenrl.collectors import Collector, make_collector
from edenrl.envs import PointMass, make_env, wrap_env
from edenrl.modules import gaussian_actor, make_actor


def build(name, seed, num_envs=4, frames=80):
    torch.manual_seed(seed)
    env = make_env(name, num_envs, seed=seed)
    width = env.observation_spec["observation"].shape[-1]
    policy = make_actor({"observation": width}, env.action_spec_unbatched, hidden=(8,))
    return policy, Collector(wrap_env(env), policy, frames_per_batch=frames, total_frames=-1)


def take(collector, batches):
    iterator = iter(collector)
    return [next(iterator) for _ in range(batches)]


@pytest.mark.parametrize("name", ["PointMass", "CartPole-v1", "Pendulum-v1"])
def test_a_new_collector_continues_bit_for_bit(name):
    policy, collector = build(name, seed=0)
    take(collector, 5)
    file = io.BytesIO()
    torch.save({"collector": collector.state_dict(), "policy": policy.state_dict(), "rng": torch.get_rng_state()}, file)
    expected = take(collector, 10)

    other_policy, other = build(name, seed=99)
    take(other, 1)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    other_policy.load_state_dict(state["policy"])
    other.load_state_dict(state["collector"])
    torch.set_rng_state(state["rng"])
    for ours, theirs in zip(expected, take(other, 10), strict=True):
        assert (ours == theirs).all(), "a resumed batch differs"
    assert any(batch["next", "done"].any() for batch in expected), "no episode ended: the test proves too little"


def test_an_environment_that_saves_nothing_starts_new_episodes_and_says_so(caplog):
    def collect():
        env = GymWrapper(SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.DISABLED))
        return Collector(wrap_env(env), None, frames_per_batch=30, total_frames=-1)

    collector, other = collect(), collect()
    seen = take(collector, 3)[-1]["collector", "traj_ids"].max()
    other.load_state_dict(collector.state_dict())
    assert "GymWrapper does not save its simulation state" in caplog.text
    batch = take(other, 1)[0]
    assert (batch["collector", "traj_ids"] > seen).all() and (batch["step_count"][:, 0] == 0).all()


def test_state_dict_does_not_alias_the_running_environment():
    _, collector = build("PointMass", seed=0)
    take(collector, 1)
    state = collector.state_dict()
    before = state["carrier"]["observation"].clone()
    take(collector, 1)
    assert torch.equal(state["carrier"]["observation"], before)


def test_recomputed_log_probabilities_match_the_stored_ones():
    policy, collector = build("PointMass", seed=0)
    batch = take(collector, 2)[1]
    log_prob = policy.get_dist(batch).log_prob(batch["action"])
    torch.testing.assert_close(log_prob, batch["action_log_prob"], rtol=1e-5, atol=1e-5)


def test_feed_forward_policies_get_no_init_tracker_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        _, collector = build("PointMass", seed=0)
    assert "is_init" not in take(collector, 1)[0].keys()


def test_recurrent_policies_get_their_state():
    env = make_env("PointMass", 4, seed=0)
    gru = GRUModule(input_size=14, hidden_size=6, in_key="observation", out_key="features")
    actor = gaussian_actor({"features": 6}, 2, hidden=(8,), normalize=False)
    collector = Collector(wrap_env(env), TensorDictSequential(gru, actor), frames_per_batch=40, total_frames=-1)
    batch = take(collector, 1)[0]
    assert batch["is_init"][:, 0].all() and batch["recurrent_state"][:, 1:].abs().sum() > 0


def test_rollouts_hold_no_inference_tensors_and_own_their_data():
    _, collector = build("PointMass", seed=0)
    first, second = take(collector, 2)
    leaves = list(first.values(True, True))
    assert not any(leaf.is_inference() for leaf in leaves)
    assert not torch.equal(first["observation"], second["observation"])


def test_policy_without_tensordict_is_taken_as_torchrl_takes_it():
    module = TensorDictModule(torch.nn.Linear(14, 2), in_keys=["observation"], out_keys=["action"])
    collector = Collector(make_env("PointMass", 4, seed=0), module, frames_per_batch=8, total_frames=-1)
    assert take(collector, 1)[0]["action"].shape == (4, 2, 2)


class FixedLength(PointMass):
    """Every episode ends at step 5, reported as a termination or, rightly, as a time-out."""

    def __init__(self, num_envs, flag, **kwargs):
        super().__init__(num_envs, max_steps=5, success_bonus=0.0, **kwargs)
        self.flag = flag

    def _step(self, tensordict):
        out = super()._step(tensordict)
        limit = out["truncated"].clone()
        out["terminated"], out["truncated"] = torch.zeros_like(limit), torch.zeros_like(limit)
        out[self.flag] = limit
        out["done"] = limit.clone()
        return out


@pytest.mark.parametrize(("flag", "warnings_expected"), [("terminated", 1), ("truncated", 0)])
def test_a_time_limit_declared_as_termination_is_suspected_once(caplog, flag, warnings_expected):
    env = wrap_env(FixedLength(4, flag, seed=0))
    take(Collector(env, None, frames_per_batch=40, total_frames=-1), 8)
    assert caplog.text.count("were terminated at step 5 and none was truncated") == warnings_expected


class Undeclared(FixedLength):
    """The same mistake in its commonest form: there is no truncated entry at all."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, "terminated", **kwargs)
        del self.done_spec["truncated"]

    def _reset(self, tensordict):
        return super()._reset(tensordict).exclude("truncated")

    def _step(self, tensordict):
        return super()._step(tensordict).exclude("truncated")


def test_a_time_limit_without_a_truncated_entry_is_suspected(caplog):
    env = wrap_env(Undeclared(4, seed=0))
    take(Collector(env, None, frames_per_batch=40, total_frames=-1), 8)
    assert caplog.text.count("were terminated at step 5 and none was truncated") == 1


class OneBuffer(PointMass):
    """A simulator that writes every step into the same buffer: the observation is the number of steps taken."""

    returns_fresh_tensors = False

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.buffer = torch.zeros(num_envs, 14)

    def _reset(self, tensordict):
        self.buffer.zero_()
        return super()._reset(tensordict).set("observation", self.buffer)

    def _step(self, tensordict):
        self.buffer += 1
        return super()._step(tensordict).set("observation", self.buffer)


def test_a_reused_buffer_does_not_overwrite_what_was_collected():
    env = wrap_env(OneBuffer(2, seed=0))
    batch = take(Collector(env, None, frames_per_batch=32, total_frames=-1), 1)[0]
    assert batch["observation"][0, :, 0].tolist() == list(range(16))
    assert batch["next", "observation"][0, :, 0].tolist() == list(range(1, 17))


def test_episodes_of_different_length_are_no_suspicion(caplog):
    _, collector = build("CartPole-v1", seed=0)
    take(collector, 10)
    assert "truncated" not in caplog.text


@pytest.mark.parametrize("error", [None, KeyError])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_with_block_shuts_a_collector_down(num_envs, error):
    env = wrap_env(PointMass(num_envs, seed=num_envs))
    with nullcontext() if error is None else pytest.raises(error):
        with make_collector(env, None, frames_per_batch=2 * num_envs) as collector:
            assert isinstance(collector, Collector) and next(iter(collector)).batch_size == (num_envs, 2)
            if error is not None:
                raise error
    assert env.is_closed and collector.closed
    collector.shutdown()  # again does nothing


@pytest.mark.parametrize("updates", [1, 6])
def test_the_version_of_the_policy_is_part_of_the_state(updates):
    def collect(seed):
        env, actor = PointMass(2, seed=seed), gaussian_actor({"observation": 14}, 2, hidden=(4,))
        return Collector(wrap_env(env), actor, frames_per_batch=8, total_frames=-1, track_policy_version=True)

    collector, other = collect(1), collect(2)
    take(collector, 1)
    for _ in range(updates):
        collector.update_policy_weights_()
    other.load_state_dict(collector.state_dict())
    assert other.policy_version == collector.policy_version == updates
    expected, found = (take(each, 1)[0]["policy_version"] for each in (collector, other))
    assert torch.equal(found, expected) and (found[:, -1] == updates).all()
