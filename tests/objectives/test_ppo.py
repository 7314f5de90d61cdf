"""PPOLoss against rsl_rl's numbers, by hand, and inside TorchRL's own trainer."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from edenrl.modules import TaskConstraint, categorical_actor, gaussian_actor, value_critic
from edenrl.objectives import GAE, CMDPLoss, GRPOLoss, HIMLoss, PPOLoss, gaussian_kl
from edenrl.optim import GradientStep, make_lr_schedule
from edenrl.testing import check_loss_module

GOLDEN = "ppo"
CLOSE = dict(rtol=1e-5, atol=1e-5)


def mlp(state):
    """rsl_rl's network with these parameters."""
    sizes = [value.t().shape for name, value in state.items() if name.endswith("weight")]
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ELU())]
    return nn.Sequential(*layers[:-1])


class ScalarStdGaussian(nn.Sequential):
    """rsl_rl's actor: an MLP mean and the standard deviation itself as parameter."""

    def __init__(self, state):
        super().__init__(*mlp(state))
        self.std = nn.Parameter(torch.ones_like(state["std"]))
        self.load_state_dict(state)

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x, self.std.expand_as(x)


def probabilistic(net):
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["obs"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )


def build(golden, functional=True, **kwargs):
    actor_net = ScalarStdGaussian(golden.under("actor."))
    critic_net = mlp(golden.under("critic."))
    critic_net.load_state_dict(golden.under("critic."))
    names = dict(clip_epsilon="clip_param", entropy_coeff="entropy_coef", critic_coeff="value_loss_coef")
    options = {ours: float(golden[theirs]) for ours, theirs in names.items()} | kwargs
    critic = ValueOperator(critic_net, in_keys=["obs"])
    loss = PPOLoss(probabilistic(actor_net), critic, functional=functional, **options)
    batch = TensorDict(
        obs=golden["obs"],
        action=golden["actions"],
        action_log_prob=golden["old_log_prob"],
        loc=golden["old_mean"],
        scale=golden["old_std"],
        state_value=golden["old_values"][:, None],
        value_target=golden["returns"][:, None],
        advantage=golden["advantages"][:, None],
        batch_size=[len(golden["obs"])],
    )
    return actor_net, critic_net, loss, batch


@pytest.mark.parametrize("when", ["old_", ""])
def test_policy_and_critic_give_the_published_numbers(golden, when):
    net = ScalarStdGaussian(golden.under(f"{when}actor."))
    actor = probabilistic(net)
    data = TensorDict(obs=golden["obs"], batch_size=[len(golden["obs"])])
    with torch.no_grad():
        log_prob = actor.get_dist(data).log_prob(golden["actions"])
        mean, std = net(golden["obs"])
    torch.testing.assert_close(mean, golden[f"{when}mean"], **CLOSE)
    torch.testing.assert_close(std, golden[f"{when}std"], **CLOSE)
    torch.testing.assert_close(log_prob, golden[f"{when}log_prob"], **CLOSE)
    if not when:
        value = build(golden)[1](golden["obs"]).squeeze(-1)
        torch.testing.assert_close(value, golden["values"], **CLOSE)
        torch.testing.assert_close((log_prob - golden["old_log_prob"]).exp(), golden["ratio"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("functional", [True, False])
def test_losses_and_kl_match_rsl_rl(golden, functional):
    _, _, loss, batch = build(golden, functional)
    out = loss(batch)
    torch.testing.assert_close(out["loss_objective"], golden["surrogate_loss"], **CLOSE)
    torch.testing.assert_close(out["loss_critic"], golden["value_loss_clipped"], **CLOSE)
    torch.testing.assert_close(out["entropy"], golden["entropy"], **CLOSE)
    torch.testing.assert_close(out["loss_entropy"], -golden["entropy_coef"] * golden["entropy"], **CLOSE)
    torch.testing.assert_close(out["kl"], golden["kl"], **CLOSE)
    torch.testing.assert_close(out["mean_ratio"], golden["ratio"].mean(), **CLOSE)
    total = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
    torch.testing.assert_close(total, golden["total_loss"], **CLOSE)
    explained = 1 - (golden["returns"] - golden["old_values"]).var() / golden["returns"].var()
    torch.testing.assert_close(out["explained_variance"], explained, **CLOSE)


def test_unclipped_value_loss_and_per_sample_terms(golden):
    _, _, loss, batch = build(golden, clip_value=False, reduction="none")
    out = loss(batch)
    torch.testing.assert_close(out["loss_critic"].mean(), golden["value_loss_unclipped"], **CLOSE)
    total = sum(out[k].mean() for k in ("loss_objective", "loss_critic", "loss_entropy"))
    torch.testing.assert_close(total, golden["total_loss_unclipped_value"], **CLOSE)
    kl = gaussian_kl(golden["old_mean"], golden["old_std"], golden["mean"], golden["std"])
    torch.testing.assert_close(kl, golden["kl_per_sample"], **CLOSE)


@pytest.mark.parametrize("functional", [True, False])
def test_gradients_clipping_and_adam_step_match_rsl_rl(golden, functional):
    actor_net, critic_net, loss, batch = build(golden, functional)
    parameters = {f"actor.{n}": p for n, p in actor_net.named_parameters()}
    parameters |= {f"critic.{n}": p for n, p in critic_net.named_parameters()}
    loss_td = loss(batch)
    sum(v for k, v in loss_td.items() if k.startswith("loss_")).backward()
    for name, p in parameters.items():
        torch.testing.assert_close(p.grad, golden[f"grad.{name}"], rtol=1e-4, atol=1e-6)
        p.grad = None

    seen = {}
    adam = torch.optim.Adam(loss.parameters(), lr=float(golden["learning_rate"]))
    adam.register_step_pre_hook(lambda *_: seen.update({n: p.grad.clone() for n, p in parameters.items()}))
    step = GradientStep(loss, adam, max_grad_norm=float(golden["max_grad_norm"]))
    metrics = step(loss(batch))
    torch.testing.assert_close(metrics["grad_norm_policy"], golden["grad_norm.actor"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["grad_norm_critic"], golden["grad_norm.critic"], rtol=1e-4, atol=1e-6)
    for name, p in parameters.items():
        torch.testing.assert_close(seen[name], golden[f"clipped_grad.{name}"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p.data, golden[f"updated.{name}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("suffix", ["", "_clamp"])
def test_adaptive_learning_rates_match_rsl_rl(golden, suffix):
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=float(golden["lr.initial"]))
    names = dict(target_kl="desired_kl", min_lr="min", max_lr="max")
    limits = {ours: float(golden[f"lr.{theirs}"]) for ours, theirs in names.items()}
    schedule = make_lr_schedule("adaptive", optimizer, 100, **limits)
    rates = []
    for kl in golden[f"lr.kl_sequence{suffix}"]:
        schedule.step(kl)
        rates.append(optimizer.param_groups[0]["lr"])
    torch.testing.assert_close(torch.tensor(rates), golden[f"lr.sequence{suffix}"], rtol=1e-6, atol=0)


def rollout(actor, critic, shape=(6,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict(observation=torch.randn(*shape, 3, generator=generator), batch_size=shape)
    td = critic(actor(td)).detach()
    td["advantage"] = torch.randn(*shape, 1, generator=generator)
    td["value_target"] = torch.randn(*shape, 1, generator=generator)
    return td


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 1)])
def test_no_outer_product_of_log_prob_and_advantage(shape):
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    loss = PPOLoss(actor, critic, clip_epsilon=(0.999, 1e9), clip_value=False, entropy_coeff=0.0)
    td = rollout(actor, critic, shape)
    ratio = torch.tensor([1.0, 2, 3, 4, 5, 6]).reshape(shape)
    td["action_log_prob"] = td["action_log_prob"] - ratio.log()
    td["advantage"] = torch.tensor([0.0, 1, 2, 3, 4, 5]).reshape(*shape, 1)
    assert loss(td)["loss_objective"].item() == pytest.approx(-70 / 6, rel=1e-5)


def test_exact_kl_is_positive_where_the_sampled_one_is_not():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    td = rollout(actor, critic, (512,))
    assert PPOLoss(actor, critic)(td)["kl"].abs() < 1e-6
    with torch.no_grad():
        actor.module[0].module.std.raw_log_std.add_(0.1)
    # Closed form by hand, both dimensions alike: log(s) + 1 / (2 s^2) - 1/2 each.
    std = actor.module[0].module.std().detach().double()
    expected = (std.log() + 1 / (2 * std.square()) - 0.5).sum()
    assert PPOLoss(actor, critic)(td)["kl"].item() == pytest.approx(expected.item(), rel=1e-3)


def test_squashing_leaves_the_kl_unchanged():
    torch.manual_seed(0)
    actor = gaussian_actor({"observation": 3}, Bounded(-2.0, 5.0, shape=(2,)), squash=True)
    critic = value_critic({"observation": 3})
    td = rollout(actor, critic, (64,))
    with torch.no_grad():
        actor.module[0].module.mlp[-1].bias.add_(0.3)
    out = PPOLoss(actor, critic)(td)
    assert out["kl"].item() == pytest.approx(2 * 0.3**2 / 2, rel=1e-4)


def test_action_bound_by_hand():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    td = rollout(actor, critic)
    with torch.no_grad():
        actor.module[0].module.mlp[-1].weight.zero_()
        actor.module[0].module.mlp[-1].bias.copy_(torch.tensor([1.5, -3.0]))
    out = PPOLoss(actor, critic, action_bound_coeff=2.0)(td)
    # 2 * ((0.5^2 + 0) / 2 + (0 + 2^2) / 2)
    assert out["loss_action_bound"].item() == pytest.approx(4.25)


def test_missing_entries_are_named():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    loss, td = PPOLoss(actor, critic), rollout(actor, critic)
    with pytest.raises(KeyError, match="collection-time 'loc'"):
        loss(td.exclude("loc"))
    with pytest.raises(KeyError, match="state_value"):
        PPOLoss(actor, critic, clip_value=False)(td.exclude("state_value"))
    with pytest.raises(KeyError, match="no 'advantage'. Run GAE on the rollout"):
        loss(td.exclude("advantage"))
    with pytest.raises(ValueError, match="needs functional=True"):
        PPOLoss(actor, critic, separate_losses=True, functional=False)
    with pytest.raises(ValueError, match="needs a Gaussian actor"):
        discrete = categorical_actor({"observation": 3}, 2)
        PPOLoss(discrete, critic, action_bound_coeff=1.0)(rollout(discrete, critic))


def test_without_critic():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    td = rollout(actor, critic)
    for loss in (PPOLoss(actor, critic, critic_coeff=0.0), PPOLoss(actor)):
        out = loss(td)
        assert set(loss.out_keys) == set(out.keys()) and "loss_critic" not in out.keys()
        assert set(loss.parameter_groups()) == {"policy"}


def test_several_advantages_per_sample_are_refused():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    td = rollout(actor, critic)
    for advantage, shape in ((torch.zeros(6, 2), r"\(6, 2\)"), (torch.zeros(6), r"\(6,\)")):
        with pytest.raises(ValueError, match=rf"of shape \(6, 1\), got {shape}"):
            PPOLoss(actor, critic)(td.clone().set("advantage", advantage))


def test_two_value_heads_keep_the_batch_shape():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3}, num_values=2)
    td = rollout(actor, critic, (4, 5))
    td["value_target"] = torch.randn(4, 5, 2)
    out = PPOLoss(actor, critic, reduction="none", clip_value=False)(td)
    assert out["loss_critic"].shape == out["loss_objective"].shape == (4, 5)
    expected = (critic(td.clone())["state_value"] - td["value_target"]).square().mean(-1)
    torch.testing.assert_close(out["loss_critic"], expected)


def test_explained_variance_compares_like_shapes_and_knows_constant_targets():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    td, loss = rollout(actor, critic), PPOLoss(actor, critic, clip_value=False)
    assert loss(td.clone().set("state_value", td["value_target"]))["explained_variance"].item() == 1.0
    assert loss(td.clone().set("value_target", torch.ones(6, 1)))["explained_variance"].item() == 0.0
    with pytest.raises(KeyError, match=r"shape of the targets \(6, 1\), got \(6,\)"):
        loss(td.clone().set("state_value", td["value_target"].squeeze(-1)))


@pytest.mark.parametrize("clip_value", [True, False])
def test_a_loss_without_explained_variance_differs_in_nothing_else(clip_value):
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    td, options = rollout(actor, critic), {"clip_value": clip_value, "functional": False}
    loss = PPOLoss(actor, critic, log_explained_variance=False, **options)
    expected, out = PPOLoss(actor, critic, **options)(td.clone()), loss(td.clone())
    assert set(loss.out_keys) == set(out.keys()) == set(expected.keys()) - {"explained_variance"}
    for name, value in out.items():
        assert torch.equal(value, expected[name]), name


def test_a_squashed_mean_falls_back_to_the_sampled_kl():
    from tensordict.nn import NormalParamExtractor
    from torchrl.modules import TanhNormal

    layers = nn.Sequential(nn.Linear(6, 6), NormalParamExtractor())
    net = TensorDictModule(layers, in_keys=["obs"], out_keys=["loc", "scale"])
    actor = ProbabilisticActor(
        net, in_keys=["loc", "scale"], distribution_class=TanhNormal, distribution_kwargs={"tanh_loc": True},
        return_log_prob=True, log_prob_key="action_log_prob",
    )  # fmt: skip
    td = actor(TensorDict(obs=5 * torch.randn(32, 6), batch_size=[32])).detach()
    td["advantage"] = torch.randn(32, 1)
    assert PPOLoss(actor)(td)["kl"].abs() < 1e-4


def test_frozen_parameters_are_in_no_group():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    actor.module[0].module.mlp[0].requires_grad_(False)
    critic.module.mlp[0].requires_grad_(False)
    loss = PPOLoss(actor, critic, functional=False)
    assert all(p.requires_grad for group in loss.parameter_groups().values() for p in group)
    check_loss_module(loss, rollout(actor, critic))


def test_composite_policies_build():
    from tensordict.nn import CompositeDistribution, set_composite_lp_aggregate
    from torch.distributions import Categorical

    with set_composite_lp_aggregate(False):
        net = TensorDictModule(nn.Linear(3, 5), in_keys=["observation"], out_keys=[("params", "agent", "logits")])
        actor = ProbabilisticActor(
            net,
            in_keys=["params"],
            out_keys=[("agent", "action")],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"agent": Categorical}, "name_map": {"agent": ("agent", "action")}
            },
            return_log_prob=True,
        )  # fmt: skip
        loss = PPOLoss(actor, value_critic({"observation": 3}))
        loss.set_keys(action=[("agent", "action")], sample_log_prob=[("agent", "action_log_prob")])
        assert ("agent", "action") in loss.in_keys


# ---- squashed actions ------------------------------------------------------------------------------------------------


def saturated(loss_class, low=-2.0, high=5.0, loc=20.0, scale=1.0, rows=257, seed=0, **options):
    """A loss whose policy acts where the tanh is flat, and what that policy collected."""
    torch.manual_seed(seed)
    box = Bounded(low, high, shape=(3,))
    actor = gaussian_actor({"observation": 4}, box, hidden=(8,), init_std=scale, squash=True)
    with torch.no_grad():
        actor.module[0].module.mlp[-1].bias.fill_(loc)
    data = TensorDict(observation=torch.randn(rows, 4), batch_size=[rows])
    width = 2 if loss_class is CMDPLoss else 1
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        data = actor(data)
    data["advantage"] = torch.randn(rows, width)
    if loss_class is CMDPLoss:
        options |= dict(critic_network=None, constraint=TaskConstraint(alpha=0.9))
    return actor, loss_class(actor, **options), data


@pytest.mark.parametrize("loss_class", [PPOLoss, CMDPLoss, GRPOLoss, HIMLoss])
@pytest.mark.parametrize(("loc", "scale"), [(0.0, 1.0), (5.0, 1.0), (-8.0, 3.0), (20.0, 0.5)])
def test_the_ratio_of_saturated_actions_starts_at_one(loss_class, loc, scale):
    _, loss, data = saturated(loss_class, loc=loc, scale=scale)
    out = loss(data)
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-4)
    assert out["kl_approx"].abs().item() < 1e-5 and out["kl"].item() == pytest.approx(0.0, abs=1e-6)
    out["loss_objective"].backward()
    squashed = [p.grad.clone() for p in loss.parameter_groups()["policy"] if p.grad is not None]
    # Far from saturation, with the same samples of noise, the gradient is the same.
    _, loss, data = saturated(loss_class, loc=0.0, scale=scale)
    loss(data)["loss_objective"].backward()
    free = [p.grad for p in loss.parameter_groups()["policy"] if p.grad is not None]
    torch.testing.assert_close(squashed, free, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-2.0, 5.0)])
def test_the_ratio_of_saturated_actions_is_that_of_the_gaussians(bounds):
    actor, loss, data = saturated(PPOLoss, *bounds, loc=9.0, reduction="none", entropy_coeff=0.0)
    with torch.no_grad():
        actor.module[0].module.mlp[-1].bias.add_(torch.tensor([0.3, -0.2, 0.1]))
    new = actor.get_dist(data.select("observation")).base_dist.log_prob(data["pre_squash_action"])
    old = IndependentNormal(data["loc"], data["scale"]).log_prob(data["pre_squash_action"])
    ratio = (new - old).exp()
    advantage = data["advantage"].squeeze(-1)
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(loss(data)["loss_objective"], expected, rtol=1e-3, atol=1e-4)


def test_reference_policy_of_saturated_actions_is_no_penalty_at_the_start():
    _, loss, data = saturated(GRPOLoss, kl_coeff=0.1)
    assert loss(data)["kl_reference"].item() == pytest.approx(0.0, abs=1e-6)


def test_the_sample_before_the_tanh_is_read_and_can_be_renamed():
    _, loss, data = saturated(PPOLoss)
    assert (
        "pre_squash_action" in loss.in_keys and "pre_squash_action" not in PPOLoss(gaussian_actor({"o": 1}, 1)).in_keys
    )
    with pytest.raises(KeyError, match="no 'pre_squash_action', the samples before the tanh"):
        loss(data.exclude("pre_squash_action"))
    expected = loss(data)["kl_approx"]
    loss.set_keys(pre_squash_action=("policy", "raw"))
    renamed = data.clone().rename_key_("pre_squash_action", ("policy", "raw"))
    assert ("policy", "raw") in loss.in_keys and torch.equal(loss(renamed)["kl_approx"], expected)


def test_the_loss_of_torchrl_trains_a_squashed_actor():
    actor, _, data = saturated(PPOLoss, loc=0.0)
    loss = ClipPPOLoss(actor, critic_network=None)
    out = loss(data)
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-4)
    out["loss_objective"].backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in loss.parameters())


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_class", [PPOLoss, GRPOLoss, HIMLoss])
@pytest.mark.parametrize("names", [{"loc": "old_loc"}, {"loc": ("old", "loc"), "scale": ("old", "scale")}])
def test_renamed_parameters_of_the_distribution_stay_in_keys(loss_class, names):
    actor = gaussian_actor({"observation": 3}, 2, hidden=(8,))
    data = actor(TensorDict(observation=torch.randn(7, 3), batch_size=[7])).detach().set("advantage", torch.randn(7, 1))
    loss = loss_class(actor)
    expected = loss(data)["kl"]
    loss.set_keys(**names)
    for name, key in names.items():
        data.rename_key_(name, key)
    assert set(names.values()) | {"loc", "scale"} - set(names) <= set(loss.in_keys)
    assert torch.equal(loss(data)["kl"], expected)
    loss.set_keys(**dict.fromkeys(names))
    assert {"loc", "scale"} <= set(loss.in_keys)


def test_no_value_clipping_has_two_names():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    td = rollout(actor, critic)
    without, off = PPOLoss(actor, critic, clip_value=None), PPOLoss(actor, critic, clip_value=False)
    assert torch.equal(without(td)["loss_critic"], off(td)["loss_critic"]) and without.out_keys == off.out_keys
    with pytest.raises(ValueError, match="clip_value True, False, None or a positive range, got -1"):
        PPOLoss(actor, critic, clip_value=-1)


def test_the_share_of_clipped_values_is_logged():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    td = rollout(actor, critic)
    td["state_value"] += 1000.0
    assert PPOLoss(actor, critic)(td)["value_clip_fraction"].item() == 1.0


# ---- what the parent takes -------------------------------------------------------------------------------------------


def collected(actor, shape, seed=0, names=None):
    """A rollout as it is collected: no values, no advantage."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        td = actor(TensorDict(observation=torch.randn(*shape, 3, generator=generator), batch_size=shape, names=names))
    done = torch.rand(*shape, 1, generator=generator) < 0.2
    reward = torch.randn(*shape, 1, generator=generator)
    following = torch.randn(*shape, 3, generator=generator)
    return td.set(
        "next", TensorDict(observation=following, reward=reward, done=done, terminated=done, batch_size=shape)
    )


def parts(seed=0):
    torch.manual_seed(seed)
    return gaussian_actor({"observation": 3}, 2, hidden=(8,)), value_critic({"observation": 3}, hidden=(8,))


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize(
    ("shape", "names", "by_keyword"),
    [((4, 5), None, False), ((3, 2, 7), None, False), ((9,), ["time"], False), ((9,), None, True)],
)
@pytest.mark.parametrize("seed", [0, 5])
def test_a_rollout_without_advantage_is_that_of_the_estimator(shape, names, by_keyword, functional, seed):
    actor, critic = parts(seed)
    loss = PPOLoss(actor, critic, functional=functional).make_value_estimator("gae", gamma=0.9, lmbda=0.8)
    td = collected(actor, shape, seed, names)
    given = GAE(gamma=0.9, lmbda=0.8, value_network=parts(seed)[1])(td.clone())
    expected = loss(given)
    if by_keyword:
        flat = td.flatten_keys("_").to_dict()
        out = dict(zip(loss.out_keys, loss(**flat), strict=True))
    else:
        out = loss(td)
        assert set(td.keys()) == {"observation", "loc", "scale", "action", "action_log_prob", "next"}
    assert set(out.keys()) == set(expected.keys())
    for key, value in expected.items():
        torch.testing.assert_close(out[key], value, rtol=1e-4, atol=1e-5)
    sum(out[key] for key in ("loss_objective", "loss_critic", "loss_entropy")).backward()
    reached = {name: [p.grad for p in group] for name, group in loss.parameter_groups().items()}
    assert all(grad is not None for grads in reached.values() for grad in grads)


def test_the_estimator_is_the_librarys_and_follows_its_settings():
    actor, critic = parts()
    loss = PPOLoss(actor, critic)
    assert isinstance(loss.value_estimator, GAE)
    loss.make_value_estimator(loss.value_type, gamma=0.5)
    assert isinstance(loss.value_estimator, GAE) and float(loss.value_estimator.gamma) == 0.5
    loss.set_keys(advantage="adv", reward="r", value_target="goal")
    keys = loss.value_estimator.tensor_keys
    assert (keys.advantage, keys.reward, keys.value_target) == ("adv", "r", "goal") and ("next", "r") in loss.in_keys
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.5)
    assert not isinstance(loss.value_estimator, GAE)


def test_a_batch_that_is_no_rollout_needs_an_advantage():
    actor, critic = parts()
    td = collected(actor, (6,))
    with pytest.raises(KeyError, match=r"no 'advantage'.*this batch \(6,\) has no dimension named 'time'"):
        PPOLoss(actor, critic)(td)
    with pytest.raises(KeyError, match=r"no 'advantage'.*this batch lacks \[\('next', 'reward'\)\]"):
        PPOLoss(actor, critic)(collected(actor, (2, 3)).exclude(("next", "reward")))
    with pytest.raises(KeyError, match=r"no 'advantage'. Run GAE .*\(advantage=...\).\"$"):
        PPOLoss(actor)(collected(actor, (2, 3)))
    two = value_critic({"observation": 3}, num_values=2)
    with pytest.raises(ValueError, match="one advantage per sample"):
        PPOLoss(actor, two)(collected(actor, (2, 3)))


def test_what_follows_a_terminated_step_may_be_nan_where_the_advantage_is_given():
    actor, critic = parts()
    td = rollout(actor, critic, (4, 5))
    td["next", "observation"] = torch.full((4, 5, 3), torch.nan)
    assert PPOLoss(actor, critic)(td)["loss_objective"].isfinite()


@pytest.mark.parametrize("pair", [(0.2, 0.28), (0.3, 0.1), [0.1, 0.5]])
def test_a_pair_of_clip_ranges_clips_values_by_the_smaller(pair):
    actor, critic = parts()
    td = rollout(actor, critic)
    td["state_value"] += 1.0
    expected = PPOLoss(actor, critic, clip_value=min(pair))(td)["loss_critic"]
    assert torch.equal(PPOLoss(actor, critic, clip_epsilon=pair)(td)["loss_critic"], expected)


@pytest.mark.parametrize(
    "pair", [(0.2, math.nan), (math.nan, 0.2), (0, 0), [0.2, 0], (1, 2), (-0.1, 0.2), (0.1, math.inf), (0.1,), ()]
)
def test_a_pair_of_clip_ranges_out_of_range_is_refused(pair):
    with pytest.raises(ValueError, match=r"PPOLoss needs clip_epsilon as a pair \(low, high\) with 0 < low < 1"):
        PPOLoss(*parts(), clip_epsilon=pair)


@pytest.mark.parametrize("shape", [(4, 5), (1, 3)])
def test_a_rollout_without_what_the_critic_reads_is_refused_by_name(shape):
    actor, critic = parts()
    td = collected(actor, shape).exclude("observation")
    with pytest.raises(KeyError, match=r"no 'advantage'.*this batch lacks \['observation'\]"):
        PPOLoss(actor, critic)(td)


@pytest.mark.parametrize("agents", [1, 4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_several_agents_share_a_batch(agents, reduction):
    actor, critic = parts()
    td = collected(actor, (5, agents)).exclude("next")
    td = critic(td).detach().update({"advantage": torch.randn(5, agents, 1), "value_target": torch.randn(5, agents, 1)})
    loss = PPOLoss(actor, critic, reduction=reduction)
    nested = td.clone()
    nested.batch_size = [5]
    flat, out = loss(td), loss(nested)
    for key in ("loss_objective", "loss_critic", "loss_entropy", "kl", "explained_variance"):
        torch.testing.assert_close(out[key], flat[key])


def test_the_old_distribution_may_be_missing_but_not_silently():
    actor, critic = parts()
    td = rollout(actor, critic)
    with pytest.warns(UserWarning, match="neither 'loc' nor 'scale': 'kl' is the sampled estimate"):
        out = PPOLoss(actor, critic)(td.exclude("loc", "scale"))
    assert torch.equal(out["kl"], out["kl_approx"])


class Choice(nn.Module):
    """A policy that is no TensorDict module."""

    in_keys = ["observation"]

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def get_dist(self, tensordict):
        return torch.distributions.Categorical(logits=tensordict["observation"] + self.bias)


def test_a_policy_needs_no_out_keys():
    td = TensorDict(observation=torch.zeros(4, 3), action=torch.zeros(4), advantage=torch.ones(4, 1), batch_size=[4])
    td["action_log_prob"] = torch.full((4,), 1 / 3).log()
    assert PPOLoss(Choice())(td)["loss_objective"].item() == pytest.approx(-1.0)


def test_composite_policies_train():
    from tensordict.nn import CompositeDistribution, set_composite_lp_aggregate
    from torch.distributions import Categorical, Normal

    with set_composite_lp_aggregate(False):
        net = nn.Sequential(nn.Linear(3, 4), Split())
        module = TensorDictModule(
            net,
            in_keys=["observation"],
            out_keys=[("params", "a", "logits"), ("params", "b", "loc"), ("params", "b", "scale")],
        )
        names = {"a": ("agent", "a"), "b": ("agent", "b")}
        actor = ProbabilisticActor(
            module,
            in_keys=["params"],
            out_keys=list(names.values()),
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"a": Categorical, "b": Normal}, "name_map": names},
            return_log_prob=True,
        )
        critic = value_critic({"observation": 3}, hidden=(8,))
        loss = PPOLoss(actor, critic, normalize_advantage=True)
        td = collected(actor, (4, 5))
        out = loss(td)
        assert out["mean_ratio"].item() == pytest.approx(1.0, abs=1e-5)
        sum(out[key] for key in ("loss_objective", "loss_critic", "loss_entropy")).backward()
        assert all(p.grad is not None for group in loss.parameter_groups().values() for p in group)


class Split(nn.Module):
    """Logits of two classes, a mean and a standard deviation."""

    def forward(self, x):
        return x[..., :2], x[..., 2], x[..., 3].exp()
