"""The reward normalizer against the published statistics."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.envs import Compose

from edenrl.collectors import NStepReplayBuffer, RewardNormalizer

GOLDEN = "flashsac_data"


def published(golden):
    """Their rewards, with each end one step earlier: theirs keeps an end's own reward for the next episode."""
    g = golden.under("reward.")
    ends = g["terminated"] | g["truncated"]
    earlier = torch.cat([ends[1:], torch.zeros_like(ends[:1])])
    flags = {"terminated": earlier.t().unsqueeze(-1), "truncated": torch.zeros_like(earlier).t().unsqueeze(-1)}
    data = TensorDict({"next": {"reward": g["input"].t().unsqueeze(-1), **flags}}, batch_size=g["input"].t().shape)
    return g, data, RewardNormalizer(len(data), float(g["gamma"]), float(g["G_max"]))


def test_published_statistics(golden):
    g, data, normalizer = published(golden)
    tolerance = dict(rtol=1e-5, atol=1e-6, check_dtype=False)
    for step in range(data.shape[1]):
        normalizer.update(data["next"][:, step : step + 1])
        for ours, theirs in (("largest", "G_abs_max"), ("mean", "mean"), ("var", "var"), ("count", "count")):
            assert_close(getattr(normalizer, ours), g[theirs][step], **tolerance)
        probe = TensorDict({"next": {"reward": g["probe"]}}, batch_size=g["probe"].shape[:1])
        assert_close(normalizer(probe)["next", "reward"], g["normalized"][step], **tolerance)
        # Ours forgets at an end what theirs forgets one step later.
        still = ~data["next", "terminated"][:, step, 0]
        assert_close(normalizer.returns[still], g["G"][step][still], **tolerance)
    both = {bool(g["G_abs_max"][i] / g["G_max"] > g["var"][i].sqrt()) for i in range(data.shape[1])}
    assert both == {True, False}  # each side of the maximum decides somewhere


def test_blocks_of_steps_are_single_steps(golden):
    _, data, whole = published(golden)
    parts = RewardNormalizer(len(data), whole.gamma, whole.max_return)
    whole.update(data["next"])
    for part in data["next"].split(7, 1):
        parts.update(part)
    assert all(torch.equal(value, parts.state_dict()[name]) for name, value in whole.state_dict().items())


def test_the_last_reward_of_an_episode_stays_in_it():
    normalizer = RewardNormalizer(1, gamma=1.0)
    ends = {"terminated": torch.tensor([[[True], [False]]]), "truncated": torch.zeros(1, 2, 1, dtype=torch.bool)}
    normalizer.update(TensorDict({"reward": torch.tensor([[[100.0], [1.0]]]), **ends}, batch_size=[1, 2]))
    assert normalizer.returns.tolist() == [1.0]


def test_old_transitions_are_scaled_with_todays_statistics():
    buffer = NStepReplayBuffer(100, n_steps=1, transform=RewardNormalizer(2, gamma=0.5, max_return=1.0))

    def extend(reward):
        flags = {name: torch.ones(2, 4, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
        ends = {"observation": torch.randn(2, 4, 1), "reward": torch.full((2, 4, 1), reward), **flags}
        data = dict(observation=torch.randn(2, 4, 1), action=torch.zeros(2, 4, 1), next=ends)
        buffer.extend(TensorDict(data, batch_size=[2, 4]))

    extend(2.0)
    assert buffer.sample(8)["next", "reward"].unique().tolist() == [1.0]
    extend(8.0)
    assert buffer.sample(100)["next", "reward"].unique().tolist() == [0.25, 1.0]


@pytest.mark.parametrize("how", ["reset", "restored", "restored without data"])
def test_an_episode_that_was_broken_off_leaves_nothing_to_the_next(how):
    def data(first):
        flags = {name: torch.zeros(2, 1, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
        ends = {"observation": first + 1.0, "reward": torch.ones(2, 1, 1), **flags}
        return TensorDict(dict(observation=first, action=torch.zeros(2, 1, 1), next=ends), batch_size=[2, 1])

    def build():
        normalizer = RewardNormalizer(2, gamma=1.0)
        options = dict(n_steps=1, save_data=how != "restored without data", transform=Compose(normalizer))
        return normalizer, NStepReplayBuffer(100, **options)

    normalizer, buffer = build()
    for step in range(3):
        buffer.extend(data(torch.full((2, 1, 1), float(step))))
    assert normalizer.returns.tolist() == [3.0, 3.0]
    if how != "reset":
        state = copy.deepcopy(buffer.state_dict())
        normalizer, buffer = build()
        buffer.load_state_dict(state)
    buffer.extend(data(torch.tensor([[[3.0]], [[100.0]]])))  # row 1 was reset
    assert normalizer.returns.tolist() == ([1.0, 1.0] if how == "restored without data" else [4.0, 1.0])
    assert float(normalizer.count) == 8


def test_mistakes_are_refused(golden):
    _, data, normalizer = published(golden)
    with pytest.raises(ValueError, match="rewards of 3 environments"):
        normalizer.update(data["next"][:3])
    data["next", "reward"][0, 0] = torch.nan
    with pytest.raises(ValueError, match="'reward' holds nan at env 0, step 0"):
        normalizer.update(data["next"])
    with pytest.raises(ValueError, match="max_return > 0"):
        RewardNormalizer(4, max_return=0.0)
