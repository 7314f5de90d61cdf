"""GAE against golden numbers, a slow reference, and hand-computed time-out cases."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives.value import GAE as TorchRLGAE

from edenrl.modules import value_critic
from edenrl.objectives import GAE

GOLDEN = "gae"
CLOSE = dict(rtol=1e-5, atol=1e-5)


class CountingIdentity(nn.Module):
    """V(s) = s, counting the observations it was asked for."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def forward(self, x):
        self.rows += x[..., 0].numel()
        return x


def identity_critic():
    return TensorDictModule(CountingIdentity(), in_keys=["observation"], out_keys=["state_value"])


def make_rollout(obs, next_obs, reward, terminated, truncated):
    """Stacks [N, T] arrays into a rollout [N, T] with trailing feature dimension."""
    as_tensor = [torch.as_tensor(x).unsqueeze(-1) for x in (obs, next_obs, reward, terminated, truncated)]
    obs, next_obs, reward, terminated, truncated = as_tensor
    return TensorDict(
        observation=obs.float(),
        next=dict(
            observation=next_obs.float(),
            reward=reward.float(),
            terminated=terminated,
            truncated=truncated,
            done=terminated | truncated,
        ),
        batch_size=obs.shape[:2],
        names=[None, "time"],
    )


def golden_rollout(golden, known, reward="rewards"):
    """The rollout of the file, with its last observations or with the first of the next episode in their place."""
    done, time_outs, values = (golden[name].T for name in ("dones", "time_outs", "values"))
    following = torch.cat([values[:, 1:], golden["last_values"][:, None]], 1)
    if known:
        following = torch.where(done, golden["final_values"].T, following)
    return make_rollout(values, following, golden[reward].T, done & ~time_outs, time_outs)


def golden_gae(golden, **options):
    gamma, lmbda = float(golden["gamma"]), float(golden["lam"])
    return GAE(gamma=gamma, lmbda=lmbda, value_network=identity_critic(), **options)


def assert_published(found, golden, kind):
    for key, name in (("advantage", "advantages"), ("value_target", "returns")):
        torch.testing.assert_close(found[key][..., 0], golden[f"{kind}.{name}"].T, **CLOSE)


def test_published_bootstrap_from_the_last_observation(golden):
    rollout = golden_rollout(golden, known=True)
    out = golden_gae(golden)(rollout.clone())
    assert_published(out, golden, "exact")
    counts = ~rollout["next", "terminated"]
    torch.testing.assert_close(
        rollout["next", "observation"] * counts, golden["exact.next_values"].T[..., None] * counts
    )
    normal = golden_gae(golden, average_gae=True)(rollout)["advantage"][..., 0]
    torch.testing.assert_close(normal, golden["exact.advantages_normalized"].T, **CLOSE)


def test_published_estimator_of_torchrl(golden):
    rollout = golden_rollout(golden, known=True)
    given = golden.under("torchrl.")
    for name in ("reward", "done", "terminated"):
        torch.testing.assert_close(rollout["next", name], given[name])
    torch.testing.assert_close(rollout["observation"], given["state_value"])
    following = {"state_value": given["next_state_value"], **rollout["next"].select("reward", "done", "terminated")}
    data = TensorDict(state_value=given["state_value"], next=following, batch_size=rollout.shape)
    out = GAE(gamma=float(golden["gamma"]), lmbda=float(golden["lam"]), value_network=None)(data)
    for result in (out, golden_gae(golden)(rollout)):
        torch.testing.assert_close(result["advantage"], given["advantage"], **CLOSE)
        torch.testing.assert_close(result["value_target"], given["value_target"], **CLOSE)


def test_published_approximation_of_rsl_rl(golden):
    rollout = golden_rollout(golden, known=False)
    assert_published(golden_gae(golden, auto_reset_env=True)(rollout.clone()), golden, "rsl")
    normal = golden_gae(golden, auto_reset_env=True, average_gae=True)(rollout)["advantage"][..., 0]
    torch.testing.assert_close(normal, golden["rsl.advantages_normalized"].T, **CLOSE)
    # As published: the value of a time-out is in its reward, and every end is a termination.
    rollout = golden_rollout(golden, known=False, reward="rsl.bootstrapped_rewards")
    rollout["next", "terminated"] = rollout["next", "done"].clone()
    assert_published(golden_gae(golden)(rollout), golden, "rsl")
    # It differs a lot from the last observation's: ours is the correct one on purpose.
    assert (golden["exact.advantages"] - golden["rsl.advantages"]).abs().max() > 1.5


def field_case(third_terminated):
    flags = torch.zeros(1, 4, dtype=torch.bool)
    end = flags.clone()
    end[0, 2] = True
    terminated, truncated = (end, flags) if third_terminated else (flags, end)
    return make_rollout([[1, 2, 3, 10]], [[2, 3, 4, 11]], [[1.0, 1, 1, 1]], terminated, truncated)


def test_time_out_bootstraps_from_the_final_observation():
    gae = GAE(gamma=0.9, lmbda=0.95, value_network=identity_critic())
    advantage = gae(field_case(third_terminated=False))["advantage"].flatten()
    torch.testing.assert_close(advantage, torch.tensor([4.42314, 3.068, 1.6, 0.9]), rtol=1e-5, atol=1e-5)
    advantage = gae(field_case(third_terminated=True))["advantage"].flatten()
    assert advantage[2].item() == pytest.approx(-2.0)


def test_the_fallback_without_final_observation_is_rsl_rls_and_asked_for_by_name():
    td = field_case(third_terminated=False)
    td["next", "observation"][0, 2] = 10.0  # a simulator that resets inside step: the next episode's first observation
    gae = GAE(gamma=0.9, lmbda=0.95, value_network=identity_critic(), auto_reset_env=True)
    expected = torch.tensor([3.765217, 2.2985, 0.7, 0.9])
    torch.testing.assert_close(gae(td)["advantage"].flatten(), expected, rtol=1e-5, atol=1e-5)


def slow_reference(reward, value, next_value, terminated, truncated, gamma, lmbda):
    """Splits one environment into episodes and applies the textbook sum of discounted TD errors."""
    steps = len(reward)
    advantage, start = np.zeros(steps), 0
    for end in range(steps):
        if not (terminated[end] or truncated[end] or end == steps - 1):
            continue
        for t in range(start, end + 1):
            for k in range(t, end + 1):
                bootstrap = 0.0 if terminated[k] else gamma * next_value[k]
                advantage[t] += (gamma * lmbda) ** (k - t) * (reward[k] + bootstrap - value[k])
        start = end + 1
    return advantage


@pytest.mark.parametrize("seed", range(5))
def test_matches_the_textbook_sum_per_episode(seed):
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(8, 65))
    terminated, truncated = rng.random((8, 64)) < 0.05, rng.random((8, 64)) < 0.08
    done = terminated | truncated
    next_obs = np.where(done, rng.normal(size=(8, 64)), obs[:, 1:])
    reward = rng.normal(size=(8, 64))
    td = make_rollout(obs[:, :-1], next_obs, reward, terminated, truncated)
    out = GAE(gamma=0.97, lmbda=0.9, value_network=identity_critic())(td)["advantage"][..., 0]
    for env in range(8):
        expected = slow_reference(reward[env], obs[env], next_obs[env], terminated[env], truncated[env], 0.97, 0.9)
        np.testing.assert_allclose(out[env].numpy(), expected, atol=1e-5)


def test_following_episode_cannot_leak_back():
    rng = np.random.default_rng(0)
    obs, reward = rng.normal(size=(2, 33)), rng.normal(size=(2, 32))
    truncated = np.zeros((2, 32), bool)
    truncated[:, 15] = True
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=identity_critic())
    results = []
    for late in (reward[:, 16:], np.full((2, 16), 1e6)):
        changed = np.concatenate([reward[:, :16], late], 1)
        td = make_rollout(obs[:, :-1], obs[:, 1:], changed, np.zeros_like(truncated), truncated)
        results.append(gae(td)["advantage"][:, :16])
    assert torch.equal(*results)


def test_each_observation_is_valued_once():
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(16, 25))
    truncated = rng.random((16, 24)) < 0.1
    td = make_rollout(obs[:, :-1], obs[:, 1:], np.ones((16, 24)), np.zeros_like(truncated), truncated)
    critic = identity_critic()
    ours = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(td.clone())
    ends = truncated.copy()
    ends[:, -1] = True
    assert critic.module.rows == 16 * 24 + ends.sum()
    theirs = TorchRLGAE(gamma=0.99, lmbda=0.95, value_network=identity_critic(), deactivate_vmap=True)(td.clone())
    torch.testing.assert_close(ours["advantage"], theirs["advantage"])


@pytest.mark.parametrize("time_first", [False, True])
def test_value_heads_are_independent_columns(time_first):
    torch.manual_seed(0)
    done = torch.rand(4, 32, 1) < 0.1
    value, next_value, reward = torch.randn(3, 4, 32, 2).unbind(0)

    def run(columns):
        wide = (len(columns),)
        td = TensorDict(
            state_value=value[..., columns],
            next=dict(
                state_value=next_value[..., columns],
                reward=reward[..., columns],
                done=done.expand(4, 32, *wide),
                terminated=done.expand(4, 32, *wide),
            ),
            batch_size=[4, 32],
        )
        if time_first:
            td = td.transpose(0, 1).contiguous()
            td.names = ["time", None]
        return GAE(gamma=0.99, lmbda=0.95, value_network=None)(td)["advantage"]

    both = run([0, 1])
    assert torch.equal(both[..., :1], run([0])) and torch.equal(both[..., 1:], run([1]))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (("next", "reward"), float("nan"), r"\('next', 'reward'\) holds nan at env 1, step 2"),
        (("next", "reward"), 1e30, r"\('next', 'reward'\) holds 1e\+30 at env 1, step 2"),
        ("observation", float("inf"), "'observation' holds inf at env 1, step 2"),
        (("next", "observation"), float("nan"), r"\('next', 'observation'\) holds nan at env 1, step 2"),
    ],
)
def test_nonfinite_data_is_refused_by_key_and_place(key, value, message):
    flags = torch.zeros(3, 4, 1, dtype=torch.bool)
    td = TensorDict(
        observation=torch.zeros(3, 4, 2),
        next=dict(observation=torch.zeros(3, 4, 2), reward=torch.zeros(3, 4, 1), done=flags, terminated=flags),
        batch_size=[3, 4],
    )
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=value_critic({"observation": 2}))
    assert gae(td.clone())["advantage"].isfinite().all()
    td[key][1, 2, 0] = value
    with pytest.raises(ValueError, match=message):
        gae(td)


def test_gamma_is_checked():
    with pytest.raises(ValueError, match=r"gamma in \[0, 1\], got 1.5"):
        GAE(gamma=1.5, lmbda=0.95, value_network=None)


def test_critic_stays_trainable():
    critic = value_critic({"observation": 2})
    flags = torch.zeros(3, 4, 1, dtype=torch.bool)
    td = TensorDict(
        observation=torch.zeros(3, 4, 2),
        next=dict(observation=torch.zeros(3, 4, 2), reward=torch.zeros(3, 4, 1), done=flags, terminated=flags),
        batch_size=[3, 4],
    )
    out = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(td)
    assert not out["advantage"].requires_grad
    assert all(p.requires_grad for p in critic.parameters())


def random_rollout(seed=0, heads=1, shape=(5, 12)):
    """A rollout whose next observations are consistent, with episode ends, and a linear critic."""
    torch.manual_seed(seed)
    obs = torch.randn(shape[0], shape[1] + 1, 3)
    terminated, truncated = torch.rand(*shape, 1) < 0.1, torch.rand(*shape, 1) < 0.1
    done = terminated | truncated
    td = TensorDict(
        observation=obs[:, :-1],
        next=dict(
            observation=torch.where(done, torch.randn(*shape, 3), obs[:, 1:]),
            reward=torch.randn(*shape, 1),
            done=done,
            terminated=terminated,
            truncated=truncated,
        ),
        batch_size=shape,
    )
    critic = TensorDictModule(nn.Linear(3, heads), in_keys=["observation"], out_keys=["state_value"])
    return td, critic


def torchrl_advantage(td, critic, **kwargs):
    theirs = TorchRLGAE(gamma=0.97, lmbda=0.9, value_network=critic, deactivate_vmap=True)
    return theirs(td, **kwargs)["advantage"]


@pytest.mark.parametrize("time_dim", [0, -2])
def test_time_dim_of_the_call_is_obeyed(time_dim):
    td, critic = random_rollout()
    td = td.transpose(0, 1).contiguous()
    ours = GAE(gamma=0.97, lmbda=0.9, value_network=critic)(td.clone(), time_dim=time_dim)["advantage"]
    torch.testing.assert_close(ours, torchrl_advantage(td.clone(), critic, time_dim=time_dim))
    td["next", "reward"][7, 2] = float("nan")
    with pytest.raises(ValueError, match="at env 2, step 7 "):
        GAE(gamma=0.97, lmbda=0.9, value_network=critic)(td, time_dim=time_dim)


def test_n_step_data_takes_torchrls_path():
    from torchrl.data import MultiStep

    td, critic = random_rollout()
    td = MultiStep(gamma=0.97, n_steps=3)(td)
    ours = GAE(gamma=0.97, lmbda=0.9, value_network=critic)(td.clone())["advantage"]
    torch.testing.assert_close(ours, torchrl_advantage(td.clone(), critic))


def test_keyword_call_equals_the_tensordict_call():
    td, critic = random_rollout()
    gae = GAE(gamma=0.97, lmbda=0.9, value_network=critic)
    expected = gae(td.clone())
    advantage, target = gae(
        observation=td["observation"],
        next_observation=td["next", "observation"],
        next_reward=td["next", "reward"],
        next_done=td["next", "done"],
        next_terminated=td["next", "terminated"],
    )
    torch.testing.assert_close(advantage, expected["advantage"])
    torch.testing.assert_close(target, expected["value_target"])


def test_a_critic_with_two_heads_shares_reward_and_flags_of_width_one():
    td, critic = random_rollout(heads=2)
    both = GAE(gamma=0.97, lmbda=0.9, value_network=critic)(td.clone())["advantage"]
    for head in range(2):
        one = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["state_value"])
        with torch.no_grad():
            one.module.weight.copy_(critic.module.weight[head : head + 1])
            one.module.bias.copy_(critic.module.bias[head : head + 1])
        torch.testing.assert_close(both[..., head : head + 1], torchrl_advantage(td.clone(), one))
    normal = GAE(gamma=0.97, lmbda=0.9, value_network=critic, average_gae=True)(td)["advantage"]
    torch.testing.assert_close(normal.mean((0, 1)), torch.zeros(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(normal.std((0, 1)), torch.ones(2))


def test_standardizing_one_sample_gives_zero():
    td, critic = random_rollout(shape=(1, 1))
    assert GAE(gamma=0.97, lmbda=0.9, value_network=critic, average_gae=True)(td)["advantage"].item() == 0.0


def test_frozen_layers_of_the_critic_stay_frozen():
    td, _ = random_rollout()
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    net[1].requires_grad_(False)
    critic = TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])
    GAE(gamma=0.97, lmbda=0.9, value_network=critic)(td)
    assert [p.requires_grad for p in net.parameters()] == [True, True, False, False]


def test_what_went_wrong_first_is_named():
    """The reward of env 0 goes bad at step 3, but an observation of env 1 was bad at step 2."""
    rollout = make_rollout(*np.zeros((3, 2, 5)), *np.zeros((2, 2, 5), dtype=bool))
    rollout["next", "reward"][0, 3] = float("nan")
    rollout["next", "observation"][1, 2] = float("nan")
    rollout["observation"][1, 3] = float("nan")
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=identity_critic())
    with pytest.raises(ValueError, match=r"\('next', 'observation'\) holds nan at env 1, step 2"):
        gae(rollout)
    rollout["next", "reward"][0, 2] = float("nan")  # within a step the observation comes first
    with pytest.raises(ValueError, match=r"\('next', 'observation'\) holds nan at env 1, step 2"):
        gae(rollout)
    rollout["next", "reward"][0, 1] = float("nan")
    with pytest.raises(ValueError, match=r"\('next', 'reward'\) holds nan at env 0, step 1"):
        gae(rollout)


@pytest.mark.parametrize("name", ["reward", "done", "terminated"])
def test_columns_without_their_last_dimension_are_refused(name):
    rollout = make_rollout(*np.zeros((3, 2, 5)), *np.zeros((2, 2, 5), dtype=bool))
    rollout["next", name] = rollout["next", name].squeeze(-1)
    message = rf"'{name}'\) has the shape \(2, 5\) of the batch; GAE needs a last dimension of 1, \(2, 5, 1\)"
    with pytest.raises(ValueError, match=message):
        GAE(gamma=0.9, lmbda=0.9, value_network=identity_critic())(rollout)


def test_a_critic_that_returns_nan_is_refused():
    td, critic = random_rollout()
    with torch.no_grad():
        critic.module.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="'state_value' holds nan at env 0, step 0"):
        GAE(gamma=0.97, lmbda=0.9, value_network=critic)(td)


def test_in_the_fallback_termination_wins_over_a_time_out():
    td = field_case(third_terminated=False)
    td["next", "terminated"] = td["next", "truncated"].clone()
    advantage = GAE(gamma=0.9, lmbda=0.95, value_network=identity_critic(), auto_reset_env=True)(td)["advantage"]
    assert advantage.flatten()[2].item() == pytest.approx(-2.0)


def mismatched(share, seed, shape, time_first=False):
    """A rollout in which that share of the next observations is not the observation of the following row."""
    td, critic = random_rollout(seed, shape=shape)
    changed = torch.rand(*shape, 1) < share
    td["next", "observation"] = torch.where(changed, torch.randn(*shape, 3), td["next", "observation"])
    if time_first:
        td = td.transpose(0, 1).contiguous()
        td.names = ["time", None]
    return td, critic


@pytest.mark.parametrize(
    ("share", "seed", "shape", "time_first"),
    [(0.0, 1, (3, 9), False), (0.05, 2, (7, 11), True), (0.5, 3, (1, 6), False), (1.0, 4, (6, 1), True)],
)
def test_next_observations_that_do_not_follow_are_valued_on_their_own(share, seed, shape, time_first):
    td, critic = mismatched(share, seed, shape, time_first)
    expected = TorchRLGAE(gamma=0.97, lmbda=0.9, value_network=critic, deactivate_vmap=True)(td.clone())
    for options in ({}, dict(value_chunk_size=2), dict(num_chunks=3)):
        gae = GAE(gamma=0.97, lmbda=0.9, value_network=critic, **options)
        out = gae(td.clone())
        for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
            torch.testing.assert_close(out[key], expected[key])
        # The time dimension is that of this call, not of the one before.
        target = GAE(gamma=0.97, lmbda=0.9, value_network=critic, **options).value_estimate(td.clone())
        torch.testing.assert_close(target, expected["value_target"])


@pytest.mark.parametrize(("gamma", "lmbda"), [(0.9, 0.0), (0.0, 0.7), (0.0, 0.0)])
@pytest.mark.parametrize(("shape", "time_first"), [((3, 9), False), ((1, 6), True)])
def test_value_targets_without_a_trace_are_those_of_one_step(gamma, lmbda, shape, time_first):
    td, critic = mismatched(0.3, 5, shape, time_first)
    gae = GAE(gamma=gamma, lmbda=lmbda, value_network=critic)
    going_on = (~td["next", "terminated"]).float()
    expected = td["next", "reward"] + gamma * going_on * critic(td["next"].clone())["state_value"]
    torch.testing.assert_close(gae.value_estimate(td), expected)
    assert "advantage" not in td.keys()
    torch.testing.assert_close(gae(td)["value_target"], expected)


def test_only_the_entries_that_differ_cost_a_second_pass():
    td, _ = random_rollout(shape=(4, 10))
    for name in ("terminated", "truncated", "done"):
        td["next", name] = torch.zeros(4, 10, 1, dtype=torch.bool)
    td["next", "observation"][:, :-1] = td["observation"][:, 1:]
    td["next", "observation"][2, 5, 1] += 1e-3
    critic = identity_critic()
    GAE(gamma=0.97, lmbda=0.9, value_network=critic)(td)
    assert critic.module.rows == 4 * 10 + 4 + 1


def test_each_input_of_the_critic_is_compared():
    torch.manual_seed(0)
    flags = torch.zeros(3, 8, 1, dtype=torch.bool)
    kind, image = torch.randint(5, (3, 9, 1)), torch.randn(3, 9, 2, 2)
    td = TensorDict(
        image=image[:, :-1],
        group=dict(kind=kind[:, :-1]),
        next=dict(
            image=image[:, 1:], group=dict(kind=kind[:, 1:]), reward=torch.ones(3, 8, 1), done=flags, terminated=flags
        ),
        batch_size=[3, 8],
    )
    critic = TensorDictModule(
        lambda image, kind: image.sum((-1, -2)).unsqueeze(-1) + kind,
        in_keys=["image", ("group", "kind")],
        out_keys=["state_value"],
    )
    for key, change in ((("next", "image"), 1.0), (("next", "group", "kind"), 1)):
        changed = td.clone()
        changed[key][1, 3] += change
        ours = GAE(gamma=0.97, lmbda=0.9, value_network=critic)(changed.clone())["advantage"]
        torch.testing.assert_close(ours, torchrl_advantage(changed, critic))


@pytest.mark.parametrize("options", [{}, dict(shifted=True), dict(value_chunk_size=2)])
@pytest.mark.parametrize(("seed", "shape"), [(0, (3, 7)), (1, (1, 12))])
def test_the_next_observation_of_a_terminated_step_may_be_absent(options, seed, shape):
    td, critic = random_rollout(seed, shape=shape)
    td["next", "done"][:, -1] = td["next", "terminated"][:, -1] = True
    td["next", "truncated"] = torch.zeros(*shape, 1, dtype=torch.bool)
    td["next", "terminated"] = td["next", "done"].clone()
    gae = GAE(gamma=0.97, lmbda=0.9, value_network=critic, **options)
    expected = gae(td.clone())
    td["next", "observation"][td["next", "terminated"].squeeze(-1)] = float("nan")
    out = gae(td.clone())
    torch.testing.assert_close(out["advantage"], expected["advantage"])
    assert out["next", "state_value"].isfinite().all()
    td["next", "terminated"][:, -1] = False  # now a time-out, which bootstraps from it
    with pytest.raises(ValueError, match=r"\('next', 'observation'\) holds nan at env 0, step"):
        gae(td)


def test_a_reward_without_the_dimension_of_the_agents_is_refused():
    """With as many agents as steps and environments the shapes would fit by chance."""
    td, _ = random_rollout(shape=(4, 4))
    critic = TensorDictModule(lambda x: torch.randn(*x.shape[:2], 4, 1), ["observation"], ["state_value"])
    with pytest.raises(RuntimeError, match="shape"):
        GAE(gamma=0.97, lmbda=0.9, value_network=critic)(td)


@pytest.mark.parametrize("absent", [["next"], [("next", "reward")], [("next", "done")]])
def test_a_rollout_without_outcomes_is_told_what_it_lacks(absent):
    done = torch.zeros(3, 4, 1, dtype=torch.bool)
    following = TensorDict(observation=torch.zeros(3, 4, 2), reward=torch.zeros(3, 4, 1), done=done, batch_size=[3, 4])
    data = TensorDict(observation=torch.zeros(3, 4, 2), next=following, batch_size=[3, 4]).exclude(*absent)
    key = "reward" if absent == ["next"] else absent[0][1]
    with pytest.raises(KeyError, match=rf"GAE needs a rollout .*'{key}'.* under 'next'.*collector or of env.rollout"):
        GAE(gamma=0.9, lmbda=0.9, value_network=value_critic({"observation": 2}))(data)
