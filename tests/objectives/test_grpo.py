"""GRPO against the published numbers of tests/golden/grpo.npz, by hand, and against the contract of a loss."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor

from edenrl.modules import categorical_actor, gaussian_actor, value_critic
from edenrl.objectives import GroupRelativeAdvantage, GRPOLoss, PPOLoss
from edenrl.optim import GradientStep

CASES = pytest.mark.parametrize(("case", "truncate"), [("truncated", True), ("full", False)])


GOLDEN = "grpo"


class Policy(nn.Module):
    """The policy of the reference data: tanh network, log standard deviation."""

    def __init__(self, golden, name):
        super().__init__()
        first, last = golden[f"{name}.0.weight"], golden[f"{name}.2.weight"]
        self.net = nn.Sequential(nn.Linear(*first.t().shape), nn.Tanh(), nn.Linear(*last.t().shape))
        self.log_std = nn.Parameter(torch.zeros(len(last)))
        self.load(golden, name)

    def load(self, golden, name):
        with torch.no_grad():
            for key, parameter in self.named_parameters():
                parameter.copy_(golden[f"{name}.{key.removeprefix('net.')}"])

    def forward(self, obs):
        loc = self.net(obs)
        return loc, self.log_std.exp().expand_as(loc)


def golden_actor(golden, name):
    net = Policy(golden, name)
    return net, ProbabilisticActor(
        TensorDictModule(net, in_keys=["obs"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )


def golden_rollout(golden):
    old = Policy(golden, "old_policy")
    loc, scale = old(golden["obs"])
    return TensorDict(
        obs=golden["obs"],
        action=golden["actions"],
        action_log_prob=golden["old_log_prob"],
        loc=loc.detach(),
        scale=scale.detach(),
        next=dict(reward=golden["rewards"].unsqueeze(-1), done=golden["dones"].unsqueeze(-1)),
        batch_size=golden["rewards"].shape,
    )


def golden_loss(golden, **kwargs):
    """The loss as the run had it: built on the reference policy, then trained on."""
    net, actor = golden_actor(golden, "ref_policy")
    names = dict(clip_epsilon="clip_coef", kl_coeff="kl_coef", entropy_coeff="ent_coef")
    loss = GRPOLoss(actor, **{ours: float(golden[theirs]) for ours, theirs in names.items()}, **kwargs)
    net.load(golden, "policy")
    return net, loss


def estimator(truncate, size=4):
    return GroupRelativeAdvantage(gamma=0.99, group_size=size, truncate_at_first_done=truncate)


def golden_estimator(golden, truncate):
    options = {name: golden[name].item() for name in ("gamma", "group_size", "eps")}
    return GroupRelativeAdvantage(**options, truncate_at_first_done=truncate)


def test_log_probabilities_match_the_published_ones(golden):
    rollout = golden_rollout(golden)
    for name, policy in (("log_prob", "policy"), ("ref_log_prob", "ref_policy"), ("old_log_prob", "old_policy")):
        found = golden_actor(golden, policy)[1].get_dist(rollout).log_prob(golden["actions"])
        torch.testing.assert_close(found, golden[name], rtol=1e-5, atol=1e-5)


@CASES
def test_returns_mask_and_advantages_match_the_published_ones(golden, case, truncate):
    rollout = golden_estimator(golden, truncate)(golden_rollout(golden))
    close = dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rollout["group_return"].squeeze(-1), golden[f"{case}.step_returns"], **close)
    assert torch.equal(rollout["group_mask"].squeeze(-1).float(), golden[f"{case}.seq_mask"])
    torch.testing.assert_close(rollout["advantage"].squeeze(-1), golden[f"{case}.advantages"], **close)


@CASES
@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_losses_and_gradients_match_the_published_ones(golden, case, truncate, functional, flat):
    net, loss = golden_loss(golden, functional=functional)
    rollout = golden_estimator(golden, truncate)(golden_rollout(golden)).exclude("next")
    out = loss(rollout.reshape(-1) if flat else rollout)
    close, fine = dict(rtol=1e-5, atol=1e-5), dict(rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(out["loss_objective"], golden[f"{case}.actor_loss"], **close)
    torch.testing.assert_close(out["kl_reference"], golden[f"{case}.kl"], **fine)
    torch.testing.assert_close(out["loss_kl"], golden["kl_coef"] * golden[f"{case}.kl"], **fine)
    torch.testing.assert_close(out["entropy"], -golden[f"{case}.entropy_loss"], **fine)
    torch.testing.assert_close(out["loss_entropy"], golden["ent_coef"] * golden[f"{case}.entropy_loss"], **fine)
    total = out["loss_objective"] + out["loss_kl"] + out["loss_entropy"]
    torch.testing.assert_close(total, golden[f"{case}.total_loss"], **close)
    total.backward()
    for name, parameter in net.named_parameters():
        expected = golden[f"{case}.grad.policy.{name.removeprefix('net.')}"]
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)
    norm = torch.stack([parameter.grad.norm() for parameter in net.parameters()]).norm()
    torch.testing.assert_close(norm, golden[f"{case}.grad_norm"], rtol=1e-5, atol=0)


def test_the_terms_of_every_step_match_the_published_ones(golden):
    _, loss = golden_loss(golden, reduction="none")
    out = loss(golden_estimator(golden, False)(golden_rollout(golden)))
    torch.testing.assert_close(out["loss_kl"], golden["kl_coef"] * golden["kl_per_step"], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(
        out["loss_entropy"], -golden["ent_coef"] * golden["entropy_per_step"], rtol=1e-5, atol=1e-8
    )
    ratio, clip = golden["ratio"], float(golden["clip_coef"])
    gain = torch.min(ratio * golden["full.advantages"], ratio.clamp(1 - clip, 1 + clip) * golden["full.advantages"])
    torch.testing.assert_close(out["loss_objective"], -gain, rtol=1e-5, atol=1e-5)


def test_the_metrics_cover_the_steps_that_count(golden):
    _, loss = golden_loss(golden)
    out = loss(golden_estimator(golden, True)(golden_rollout(golden)))
    ratio = golden["ratio"][golden["truncated.seq_mask"].bool()]
    close = dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["mean_ratio"], ratio.mean(), **close)
    torch.testing.assert_close(out["max_ratio"], ratio.max(), **close)
    torch.testing.assert_close(out["kl_approx"], -ratio.log().mean(), **close)
    torch.testing.assert_close(out["ESS"], ratio.sum() ** 2 / ratio.square().sum() / len(ratio), **close)
    clipped = ((ratio - 1).abs() > golden["clip_coef"]).float().mean()
    torch.testing.assert_close(out["clip_fraction"], clipped, **close)
    assert 0 < clipped < 1


def bandit(*returns):
    """One-step episodes with these returns."""
    n = len(returns)
    done = torch.ones(n, 1, 1, dtype=torch.bool)
    return TensorDict(next=dict(reward=torch.tensor(returns).reshape(n, 1, 1), done=done), batch_size=[n, 1])


def advantages(*returns, size=4):
    group = estimator(True, size)
    rollout = group(bandit(*returns))
    return rollout["advantage"].flatten(), rollout["group_mask"].flatten(), group.metrics(rollout)


def test_one_success_in_a_group_of_four():
    advantage, mask, metrics = advantages(0.0, 0.0, 0.0, 4.0)
    torch.testing.assert_close(advantage, torch.tensor([-0.57735, -0.57735, -0.57735, 1.73205]), rtol=1e-4, atol=0)
    assert mask.all() and metrics["group/zero_spread"] == 0 and metrics["group/return"] == 1


def test_equal_returns_teach_nothing_and_are_reported():
    advantage, _, metrics = advantages(1.0, 1.0, 1.0, 1.0)
    assert torch.equal(advantage, torch.zeros(4)) and metrics["group/zero_spread"] == 1
    assert advantages(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 4.0)[2]["group/zero_spread"] == 0.5


def test_a_nan_reward_is_missing_for_its_member_alone():
    # 3 members 0, 0, 4: mean 4/3, variance 32/9, so -4/3 / sqrt(32/9) = -1/sqrt(2) and sqrt(2).
    advantage, mask, metrics = advantages(0.0, float("nan"), 0.0, 4.0)
    torch.testing.assert_close(advantage, torch.tensor([-0.5, 0.0, -0.5, 1.0]) * 2**0.5)
    assert mask.tolist() == [True, False, True, True]
    assert metrics["group/nan_rewards"] == 1 and metrics["group/return"].item() == pytest.approx(4 / 3)


def test_a_nan_reward_spoils_the_returns_it_is_part_of_and_no_others():
    torch.manual_seed(0)
    reward, done = torch.randn(4, 6, 1), torch.zeros(4, 6, 1, dtype=torch.bool)
    reward[1, 3], done[1, 1], done[1, 4] = float("nan"), True, True
    rollout = TensorDict(next=dict(reward=reward, done=done), batch_size=[4, 6])
    out = estimator(False)(rollout)
    assert out["group_mask"][1].flatten().tolist() == [True, True, False, False, True, True]
    assert out["group_mask"][[0, 2, 3]].all() and not out["advantage"].isnan().any()
    assert torch.equal(out["advantage"][1, 2:4], torch.zeros(2, 1))
    # Its group mates at that step are compared with each other: three deviations that sum to zero.
    assert out["advantage"][:, 2].sum().abs() < 1e-5 and out["advantage"][0, 2] != 0
    assert not out["group_return"].isnan().any()


@pytest.mark.parametrize("members", [3, 4, 16])
def test_a_spread_of_rounding_errors_is_no_spread(members):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(200, 1, 30, generator=generator).expand(200, members, 30)
    # The same rewards in another order, so that the sums differ by rounding alone (gamma 1).
    order = torch.rand(200, members, 30, generator=generator).argsort(-1)
    reward = rewards.gather(-1, order).reshape(-1, 30, 1)
    rollout = TensorDict(
        next=dict(reward=reward, done=torch.zeros_like(reward, dtype=torch.bool)), batch_size=[len(reward), 30]
    )
    out = GroupRelativeAdvantage(gamma=1.0, group_size=members)(rollout)
    sums = out["group_return"][:, 0].reshape(200, members)
    assert (sums.std(1) > 0).any(), "the case this test is about does not occur"
    assert torch.equal(out["advantage"][:, 0], torch.zeros(len(reward), 1))
    assert (out["advantage"][:, 15] != 0).all()


def test_a_large_common_return_does_not_hide_a_real_difference():
    advantage = advantages(1000.0, 1000.0, 1000.0, 1001.0)[0]
    torch.testing.assert_close(advantage, torch.tensor([-0.57735, -0.57735, -0.57735, 1.73205]), rtol=1e-3, atol=0)


def two_lengths(after=0.0):
    """A group of two whose episodes end after 2 and 5 steps; then come rewards that must not matter."""
    reward, done = torch.ones(2, 6, 1), torch.zeros(2, 6, 1, dtype=torch.bool)
    done[0, 1], done[1, 4] = True, True
    reward[0, 2:], reward[1, 5:] = after, after
    return TensorDict(next=dict(reward=reward, done=done), batch_size=[2, 6])


def test_steps_after_the_end_have_no_weight():
    group = GroupRelativeAdvantage(gamma=1.0, group_size=2)
    one, other = group(two_lengths(0.0)), group(two_lengths(1e6))
    assert one["group_mask"].squeeze(-1).sum(1).tolist() == [2, 5]
    assert torch.equal(one["advantage"], other["advantage"]) and torch.equal(one["group_mask"], other["group_mask"])
    # Returns 2, 1 against 5, 4: one below, one above the mean; then the longer one is alone.
    assert one["advantage"].squeeze(-1).tolist() == [[-1, -1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert group.metrics(one)["group/counted"].item() == pytest.approx(7 / 12)
    # Five steps with someone left, in three of them a lone member.
    assert group.metrics(one)["group/zero_spread"].item() == pytest.approx(3 / 5)


def test_loss_and_gradient_ignore_steps_after_the_end():
    actor = gaussian_actor({"observation": 3}, 2, hidden=(8,))
    loss = GRPOLoss(actor, entropy_coeff=0.1)
    with torch.no_grad():
        actor.module[0].module.mlp[-1].bias.add_(0.3)
    results = []
    for after in (0.0, 1e6):
        torch.manual_seed(1)
        rollout = two_lengths(after)
        rollout["observation"] = torch.randn(2, 6, 3)
        rollout = GroupRelativeAdvantage(gamma=1.0, group_size=2)(actor(rollout).detach())
        rollout["action"] = torch.where(rollout["group_mask"], rollout["action"], after + 1.0)
        rollout["action_log_prob"] = rollout["action_log_prob"] - 0.1
        out = loss(rollout)
        terms = sum(value for name, value in out.items() if name.startswith("loss_"))
        results.append((out.detach(), torch.autograd.grad(terms, loss.parameter_groups()["policy"])))
    (one, gradient), (other, other_gradient) = results
    for name in one.keys():
        assert torch.equal(one[name], other[name]) and one[name].isfinite().all(), name
    assert all(torch.equal(a, b) for a, b in zip(gradient, other_gradient, strict=True))
    assert any((g != 0).any() for g in gradient)


def test_wrong_rollouts_are_refused():
    with pytest.raises(ValueError, match="group_size >= 2, got 1"):
        GroupRelativeAdvantage(gamma=0.9, group_size=1)
    with pytest.raises(ValueError, match=r"gamma in \[0, 1\], got 1.1"):
        GroupRelativeAdvantage(gamma=1.1)
    with pytest.raises(ValueError, match=r"multiple of group_size = 4, got the batch \(10, 1\)"):
        estimator(True)(bandit(*[0.0] * 10))
    with pytest.raises(ValueError, match=r"got the batch \(8,\)"):
        estimator(True)(bandit(*[0.0] * 8).reshape(-1))
    with pytest.raises(ValueError, match=r"\('next', 'reward'\) of shape \(4, 1, 1\), got \(4, 1\)"):
        rollout = bandit(*[0.0] * 4)
        rollout["next", "reward"] = torch.zeros(4, 1)
        estimator(True)(rollout)
    with pytest.raises(ValueError, match=r"\('next', 'reward'\) holds -inf at env 2, step 0"):
        estimator(True)(bandit(0.0, 0.0, float("-inf"), 0.0))
    for value in (1e18, -1e20, 3e38):  # their squares overflow: every advantage would be 0
        with pytest.raises(ValueError, match=r"\('next', 'reward'\) holds .* at env 1, step 0"):
            estimator(True)(bandit(0.0, value, 4.0, 0.0))
    assert estimator(True)(bandit(0.0, 1e17, 4.0, 0.0))["advantage"].abs().max() > 1.0
    with pytest.raises(ValueError, match=r"contains a NaN reward \(4 of them\): nothing is left"):
        estimator(True)(bandit(*[float("nan")] * 4))


def test_the_keys_of_the_estimator_can_be_renamed():
    group = GroupRelativeAdvantage(
        gamma=0.9, group_size=2, reward_key=("a", "r"), done_key="end", advantage_key=("b", "adv"), mask_key="m"
    )
    data = TensorDict(next=dict(a=dict(r=torch.tensor([[[0.0]], [[2.0]]])), end=torch.ones(2, 1, 1, dtype=torch.bool)))
    data.auto_batch_size_(2)
    assert group(data)["b", "adv"].flatten().tolist() == [-1, 1] and data["m"].all()
    assert group.in_keys == [("next", "a", "r"), ("next", "end")] and group.metrics(data)["group/return"] == 1


def rollout(actor, shape=(4, 5), masked=True):
    td = actor(TensorDict(observation=torch.randn(*shape, 3), batch_size=shape)).detach()
    td["advantage"] = torch.randn(*shape, 1)
    if masked:
        td["group_mask"] = torch.rand(*shape, 1) > 0.3
    return td


def moved(actor):
    """The policy a few updates later."""
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def test_without_reference_and_mask_it_is_ppo_without_a_critic():
    actor = gaussian_actor({"observation": 3}, 2)
    td = rollout(actor, masked=False).reshape(-1)  # flat, where TorchRL takes ESS over the whole batch
    moved(actor)
    ours, ppo = GRPOLoss(actor, kl_coeff=0.0, entropy_coeff=0.01)(td), PPOLoss(actor)(td)
    assert set(ours.keys()) == set(ppo.keys())
    for name, value in ppo.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("functional", [True, False])
def test_the_penalty_of_an_unchanged_policy_is_zero_with_zero_gradient(functional):
    actor = gaussian_actor({"observation": 3}, 2)
    loss, td = GRPOLoss(actor, kl_coeff=1.0, functional=functional), rollout(actor)
    out = loss(td)
    assert out["loss_kl"].item() == 0.0
    gradients = torch.autograd.grad(out["loss_kl"], loss.parameter_groups()["policy"])
    assert all((g == 0).all() for g in gradients)


def test_the_penalty_by_hand():
    actor = categorical_actor({"observation": 3}, 2)
    loss, td = GRPOLoss(actor, kl_coeff=2.0), rollout(actor, (1,), masked=False)
    with torch.no_grad():
        last = actor.module[0].module.mlp[-1]
        loss.reference.module[0].module.mlp[-1].weight.zero_()
        last.weight.zero_()
        last.bias.copy_(torch.tensor([0.0, 3.0]).log1p())  # probabilities 1/5 and 4/5
    td["action"] = torch.tensor([0])
    # d = log 0.5 - log 0.2 = log 2.5: 2 (2.5 - log 2.5 - 1)
    assert loss(td)["loss_kl"].item() == pytest.approx(2 * (1.5 - 0.9162907), rel=1e-5)


@pytest.mark.parametrize("functional", [True, False])
def test_the_reference_stays_what_it_was_and_is_saved(functional):
    actor = gaussian_actor({"observation": 3}, 2)
    loss = GRPOLoss(actor, kl_coeff=0.1, functional=functional)
    before = {name: value.clone() for name, value in loss.reference.state_dict().items()}
    assert not list(loss.reference.parameters())
    trained = {id(p) for p in loss.parameters()}
    assert trained == {id(p) for p in loss.parameter_groups()["policy"]}
    step = GradientStep(loss, torch.optim.Adam(loss.parameters(), lr=0.1), max_grad_norm=1.0)
    td = rollout(actor)
    for _ in range(3):
        step(loss(td))
    after = loss.reference.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loss(td)["kl_reference"] > 0

    fresh = GRPOLoss(gaussian_actor({"observation": 3}, 2), kl_coeff=0.1, functional=functional)
    fresh.load_state_dict(loss.state_dict())
    assert all(torch.equal(value, fresh.reference.state_dict()[name]) for name, value in before.items())
    torch.testing.assert_close(fresh(td)["loss_kl"], loss(td)["loss_kl"], rtol=0, atol=0)


def test_a_state_without_the_reference_is_refused():
    actor = gaussian_actor({"observation": 3}, 2)
    without = GRPOLoss(copy.deepcopy(actor), kl_coeff=0.0).state_dict()
    loss = GRPOLoss(actor, kl_coeff=0.1)
    for strict in (True, False):
        with pytest.raises(ValueError, match="no reference policy .*kl_coeff=0"):
            loss.load_state_dict(without, strict=strict)
    with pytest.raises(ValueError, match="no reference policy"):
        nn.ModuleDict({"loss": loss}).load_state_dict({f"loss.{k}": v for k, v in without.items()}, strict=False)
    GRPOLoss(copy.deepcopy(actor), kl_coeff=0.0).load_state_dict(without)


def test_a_batch_without_advantage_is_told_where_it_comes_from():
    actor = gaussian_actor({"observation": 3}, 2)
    with pytest.raises(KeyError, match="Run GroupRelativeAdvantage on the rollout"):
        GRPOLoss(actor)(rollout(actor).exclude("advantage"))
    with pytest.raises(ValueError, match="GRPOLoss needs one advantage per sample"):
        GRPOLoss(actor)(rollout(actor).set("advantage", torch.zeros(4, 5)))


def test_a_trunk_shared_with_a_critic_is_copied_whole():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    loss = GRPOLoss(actor, functional=False)
    assert set(loss.reference.state_dict()) == set(actor.state_dict())
    assert not set(critic.state_dict()) & set(loss.state_dict())
