"""Repeated noise: the published law of its lengths, and how it is carried through episodes."""

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.data import Bounded
from torchrl.envs import ExplorationType, set_exploration_type

from edenrl.collectors import Collector, RepeatedNoise, exploring_policy
from edenrl.collectors.exploration import zeta_cdf, zeta_length
from edenrl.envs import PointMass
from edenrl.modules import flash_actor

GOLDEN = "flashsac_data"


def test_published_lengths(golden):
    cdf = zeta_cdf(float(golden["zeta.mu"]), int(golden["zeta.max_n"]))
    assert_close(cdf, golden["zeta.cdf"], rtol=0, atol=1e-6)
    assert torch.equal(zeta_length(cdf, golden["zeta.uniform"]), golden["zeta.integer"])


def state(rows, width=2):
    noise = {"noise": torch.zeros(rows, width), "noise_steps": torch.zeros(rows, 1, dtype=torch.long)}
    loc = torch.full((rows, width), 0.3)
    return TensorDict(dict(loc=loc, scale=torch.full_like(loc, 0.5), **noise), batch_size=[rows])


def test_noise_is_kept_for_lengths_of_that_law():
    low, high = torch.tensor([-2.0, -1.0]), torch.tensor([2.0, 5.0])
    explore, td = RepeatedNoise(low, high, exponent=2.0, longest=4), state(2000)
    noises = []
    for _ in range(40):
        td = explore(td)
        unit = (td["action"] - low) / (high - low) * 2 - 1
        raw = unit.double().clamp(-1 + 1e-7, 1 - 1e-7).atanh()
        assert_close((raw - 0.3) / 0.5, td["next", "noise"].double(), rtol=0, atol=2e-2)
        noises.append(td["next", "noise"][:, 0])
        td = td.exclude("next", "action").update(td["next"])
    same = torch.stack(noises[1:]) == torch.stack(noises[:-1])
    # Every row began together; a new noise comes with the rate 1 / mean length once that is forgotten.
    weights = torch.arange(1.0, 5.0) ** -2
    mean = float((weights * torch.arange(1.0, 5.0)).sum() / weights.sum())
    assert float(same[10:].float().mean()) == pytest.approx(1 - 1 / mean, abs=0.01)
    first = torch.stack(noises)
    lengths = (first == first[0]).cumprod(0).sum(0)
    shares = torch.stack([(lengths == k).float().mean() for k in range(1, 5)])
    assert_close(shares, weights / weights.sum(), rtol=0, atol=0.04)
    # Independent standard normal noise in every component and row.
    assert abs(float(first[0].mean())) < 0.1 and abs(float(first[0].std()) - 1) < 0.1


def test_a_collector_carries_the_noise_and_an_episode_begins_with_a_new_one():
    env = PointMass(4, seed=0, max_steps=6)
    actor = flash_actor({"observation": 14}, env.action_spec_unbatched, hidden_dim=4)
    explore = RepeatedNoise(-torch.ones(2), torch.ones(2), exponent=0.01, longest=16)
    collector = Collector(env, exploring_policy(actor, explore), frames_per_batch=4 * 24, total_frames=-1)
    data = next(iter(collector))
    left, noise = data["noise_steps"].squeeze(-1), data["next", "noise"]
    begins = torch.zeros_like(left, dtype=torch.bool)
    begins[:, 6::6] = True
    assert bool((left[begins] == 0).all())
    goes_on = left > 0
    assert goes_on.any() and torch.equal(noise[goes_on], data["noise"][goes_on])
    assert not torch.equal(noise[:, 6], noise[:, 5])
    saved = collector.state_dict()
    assert torch.equal(saved["carrier"]["noise"], collector._carrier["noise"])
    collector.shutdown()


def test_uniform_actions_fill_the_box():
    explore = RepeatedNoise(torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 0.5]))
    explore.uniform.fill_(True)
    action = explore(state(4000))["action"]
    assert_close(action.mean(0), torch.tensor([1.0, 0.25]), rtol=0, atol=0.1)
    assert_close(action.std(0), torch.tensor([4.0, 0.5]) / 12**0.5, rtol=0.05, atol=0)


def test_without_noise_it_acts_as_the_policy_that_is_evaluated():
    low, high = torch.tensor([-1.0, -0.1, 2.0]), torch.tensor([3.0, 5.0, 2.5])
    actor = flash_actor({"observation": 4}, Bounded(low, high), hidden_dim=8)
    td = TensorDict(observation=3 * torch.randn(50, 4), batch_size=[50])
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        evaluated = actor(td.clone())["action"]
    td.update({"noise": torch.zeros(50, 3), "noise_steps": torch.ones(50, 1, dtype=torch.long)})
    acted = exploring_policy(actor, RepeatedNoise(low, high))(td)["action"]
    assert_close(acted, evaluated)
    assert bool(((acted > low) & (acted < high)).all())


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="finite bounds"):
        RepeatedNoise(torch.tensor([0.0]), torch.tensor([torch.inf]))
    with pytest.raises(ValueError, match="longest >= 1"):
        RepeatedNoise(torch.tensor([0.0]), torch.tensor([1.0]), longest=0)
