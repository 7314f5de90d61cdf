"""PPOLoss against rsl_rl's numbers, by hand, and inside TorchRL's own trainer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

from edenrl.modules import categorical_actor, gaussian_actor, value_critic
from edenrl.objectives import PPOLoss, gaussian_kl
from edenrl.optim import GradientStep, make_lr_schedule
from edenrl.testing import check_loss_module

GOLDEN = Path(__file__).parents[1] / "golden" / "ppo.npz"


class ScalarStdGaussian(nn.Sequential):
    """rsl_rl's actor: an MLP mean and the standard deviation itself as parameter."""

    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 3))
        self.std = nn.Parameter(torch.ones(3))

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x, self.std.expand_as(x)


@pytest.fixture(scope="module")
def golden():
    return {k: torch.from_numpy(v) for k, v in np.load(GOLDEN, allow_pickle=False).items()}


def load(module, golden, prefix):
    module.load_state_dict({k.removeprefix(prefix): v for k, v in golden.items() if k.startswith(prefix)})
    return module


def build(golden, functional=True, **kwargs):
    actor_net = load(ScalarStdGaussian(), golden, "actor.")
    critic_net = load(
        nn.Sequential(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 1)), golden, "critic."
    )
    actor = ProbabilisticActor(
        TensorDictModule(actor_net, in_keys=["obs"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )
    options = dict(clip_epsilon=0.2, entropy_coeff=0.005, critic_coeff=1.0) | kwargs
    loss = PPOLoss(actor, ValueOperator(critic_net, in_keys=["obs"]), functional=functional, **options)
    batch = TensorDict(
        obs=golden["obs"],
        action=golden["actions"],
        action_log_prob=golden["old_log_prob"],
        loc=golden["old_mean"],
        scale=golden["old_std"],
        state_value=golden["old_values"][:, None],
        value_target=golden["returns"][:, None],
        advantage=golden["advantages"][:, None],
        batch_size=[64],
    )
    return actor_net, critic_net, loss, batch


@pytest.mark.parametrize("functional", [True, False])
def test_losses_and_kl_match_rsl_rl(golden, functional):
    _, _, loss, batch = build(golden, functional)
    out = loss(batch)
    close = dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["loss_objective"], golden["surrogate_loss"], **close)
    torch.testing.assert_close(out["loss_critic"], golden["value_loss_clipped"], **close)
    torch.testing.assert_close(out["entropy"], golden["entropy"], **close)
    torch.testing.assert_close(out["loss_entropy"], -0.005 * golden["entropy"], **close)
    torch.testing.assert_close(out["kl"], golden["kl"], **close)
    torch.testing.assert_close(out["mean_ratio"], golden["ratio"].mean(), **close)
    total = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
    torch.testing.assert_close(total, golden["total_loss"], **close)
    explained = 1 - (golden["returns"] - golden["old_values"]).var() / golden["returns"].var()
    torch.testing.assert_close(out["explained_variance"], explained, **close)


def test_unclipped_value_loss_and_per_sample_terms(golden):
    _, _, loss, batch = build(golden, clip_value=False, reduction="none")
    out = loss(batch)
    close = dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["loss_critic"].mean(), golden["value_loss_unclipped"], **close)
    total = sum(out[k].mean() for k in ("loss_objective", "loss_critic", "loss_entropy"))
    torch.testing.assert_close(total, golden["total_loss_unclipped_value"], **close)
    kl = gaussian_kl(golden["old_mean"], golden["old_std"], golden["mean"], golden["std"])
    torch.testing.assert_close(kl, golden["kl_per_sample"], **close)


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
    adam = torch.optim.Adam(loss.parameters(), lr=1e-3)
    adam.register_step_pre_hook(lambda *_: seen.update({n: p.grad.clone() for n, p in parameters.items()}))
    step = GradientStep(loss, adam, max_grad_norm=1.0)
    metrics = step(loss(batch))
    torch.testing.assert_close(metrics["grad_norm_policy"], golden["grad_norm.actor"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["grad_norm_critic"], golden["grad_norm.critic"], rtol=1e-4, atol=1e-6)
    for name, p in parameters.items():
        torch.testing.assert_close(seen[name], golden[f"clipped_grad.{name}"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p.data, golden[f"updated.{name}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("suffix", ["", "_clamp"])
def test_adaptive_learning_rates_match_rsl_rl(golden, suffix):
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=float(golden["lr.initial"]))
    schedule = make_lr_schedule("adaptive", optimizer, 100, target_kl=0.01, min_lr=1e-5, max_lr=1e-2)
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
    from torchrl.data import Bounded

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


def test_shared_trunk_belongs_to_the_policy():
    from tensordict.nn import TensorDictSequential

    trunk = TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["hidden"])
    actor = ProbabilisticActor(
        TensorDictSequential(trunk, TensorDictModule(nn.Linear(4, 2), in_keys=["hidden"], out_keys=["logits"])),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(trunk, ValueOperator(nn.Linear(4, 1), in_keys=["hidden"]))
    groups = PPOLoss(actor, critic).parameter_groups()
    assert [tuple(p.shape) for p in groups["policy"]] == [(4, 3), (4,), (2, 4), (2,)]
    assert [tuple(p.shape) for p in groups["critic"]] == [(1, 4), (1,)]


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


def test_a_squashed_mean_falls_back_to_the_sampled_kl():
    from torchrl.modules import TanhNormal

    net = TensorDictModule(ScalarStdGaussian(), in_keys=["obs"], out_keys=["loc", "scale"])
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
