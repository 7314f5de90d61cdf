"""RMALoss and RMADaggerLoss: published numbers, and which parameters each loss reaches."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from edenrl.envs import HiddenPointMass
from edenrl.modules import RMA_CHUNKS, RMAActor, gaussian_actor, rma_composition, rma_policy, value_critic
from edenrl.objectives import LinearRamp, PPOLoss, RMADaggerLoss, RMALoss

WIDTHS = dict(prop=6, scan=11, priv_explicit=3, priv_latent=5, history=60)
SMALL = dict(hidden=(12, 8), scan_hidden=(8, 4), priv_hidden=(6, 3), estimator_hidden=(8,))
COUNTING = dict(ramp=LinearRamp(0.1, 0.4, begin=0, length=10))


GOLDEN = "rma"


def reference_policy(golden):
    """A policy on the flat key "policy" with the reference data's weights, and their names there by ours."""
    sizes = {name: int(golden[f"cfg_num_{name}"]) for name in ("prop", "scan", "priv_explicit", "priv_latent")}
    widths = {**sizes, "history": int(golden["cfg_num_hist"]) * sizes["prop"]}
    options = dict(
        hidden=golden["cfg_hidden_dims"].tolist(),
        scan_hidden=golden["cfg_scan_encoder_dims"].tolist(),
        priv_hidden=golden["cfg_priv_encoder_dims"].tolist(),
        estimator_hidden=golden["cfg_estimator_hidden_dims"].tolist(),
    )
    actor = RMAActor(widths, int(golden["cfg_num_actions"]), **options)
    names = {}
    for part, theirs in (
        ("scan_encoder", [f"scan_encoder{i}" for i in range(3)]),
        ("priv_encoder", [f"priv_encoder{i}" for i in range(2)]),
        ("history_encoder", [f"hist_encoder_{name}" for name in ("proj", "conv0", "conv1", "out")]),
        ("estimator", [f"estimator{i}" for i in range(3)]),
        ("backbone", [f"backbone{i}" for i in range(3)]),
    ):
        module = getattr(actor, part)
        layers = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv1d)]
        for (name, layer), reference in zip(layers, theirs, strict=True):
            layer.load_state_dict({p: golden[f"{reference}_{p}"] for p in ("weight", "bias")})
            names |= {f"{part}.{name}.{p}": f"{reference}_{p}" for p in ("weight", "bias")}
    return rma_policy(actor, "policy"), actor, names


def batch(shape=(4, 5), seed=0, flat=False):
    """A rollout by random numbers with everything that the losses read."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *size: torch.randn(*shape, *size, generator=generator)  # noqa: E731
    td = TensorDict({name: randn(width) for name, width in WIDTHS.items()}, batch_size=shape)
    if flat:
        td = TensorDict(policy=torch.cat([td[name] for name in RMA_CHUNKS], -1), batch_size=shape)
    else:
        td.rename_key_("history", "prop_history")
    td.update({"advantage": randn(1), "value_target": randn(1), "state_value": randn(1)})
    return td


def make(functional=True, flat=False, **options):
    torch.manual_seed(0)
    actor = RMAActor(WIDTHS, 4, **SMALL)
    keys = "policy" if flat else None
    groups = {"policy": sum(WIDTHS.values())} if flat else {"prop": 6, "priv_latent": 5}
    critic = value_critic(groups, hidden=(8,))
    loss = RMALoss(rma_policy(actor, keys), critic, functional=functional, **options)
    return actor, critic, loss, rma_policy(actor, keys, latent="switched", estimated=True)


def rollout(acting, shape=(4, 5), **options):
    with torch.no_grad():
        return acting(batch(shape, **options))


# Against published numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [True, False])
def test_estimator_and_regularization_equal_the_published_ones(golden, functional):
    policy, actor, names = reference_policy(golden)
    loss = RMALoss(policy, None, ramp=LinearRamp(1.0, 1.0), functional=functional)
    data = (
        policy(TensorDict(policy=golden["obs"], batch_size=[len(golden["obs"])]))
        .detach()
        .set("advantage", torch.zeros(len(golden["obs"]), 1))
    )
    out = loss(data)
    for entry, part in (("loss_estimator", "estimator"), ("loss_priv_reg", "priv_encoder")):
        torch.testing.assert_close(out[entry], golden[entry], atol=1e-5, rtol=1e-5)
        out[entry].backward(retain_graph=True)
        reached = {name for name, p in actor.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert reached == {name for name in names if name.startswith(part)}
        for name in reached:
            p = actor.get_parameter(name)
            torch.testing.assert_close(p.grad, golden[f"grad_{names[name]}"], atol=1e-5, rtol=1e-4)
        actor.zero_grad(set_to_none=True)
    torch.testing.assert_close(out["latent_distance"], golden["loss_priv_reg"], atol=1e-5, rtol=1e-5)


def test_dagger_equals_the_published_one(golden):
    policy, actor, names = reference_policy(golden)
    out = RMADaggerLoss(policy)(TensorDict(policy=golden["obs"], batch_size=[len(golden["obs"])]))
    torch.testing.assert_close(out["loss_dagger"], golden["loss_dagger"], atol=1e-5, rtol=1e-5)
    out["loss_dagger"].backward()
    reached = {name for name, p in actor.named_parameters() if p.grad is not None}
    assert reached == {name for name in names if name.startswith("history_encoder")}
    for name in reached:
        torch.testing.assert_close(actor.get_parameter(name).grad, golden[f"grad_{names[name]}"], atol=1e-5, rtol=1e-4)


def test_the_ramp_equals_the_published_one(golden):
    start, end, begin, length = golden["ramp_schedule"].tolist()
    ramp = LinearRamp(start, end, int(begin), int(length))
    values = []
    for counter in golden["ramp_counter"]:
        ramp.counter.copy_(counter)
        values.append(ramp())
    torch.testing.assert_close(torch.stack(values).double(), golden["ramp_coef"].double(), atol=1e-6, rtol=1e-6)


# Which parameters a loss reaches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("history", [True, False])
def test_every_parameter_belongs_to_its_group_and_only_its_losses_reach_it(functional, flat, history):
    actor, critic, loss, acting = make(functional, flat, **COUNTING)
    rma_composition(acting).use_history(history)
    data = rollout(acting, flat=flat)
    parts = dict(
        loss_objective=("scan_encoder", "priv_encoder", "backbone", "std"),
        loss_entropy=("std",),
        loss_critic=("critic",),
        loss_estimator=("estimator",),
        loss_priv_reg=("priv_encoder",),
        loss_dagger=("history_encoder",),
    )
    named = {**dict(actor.named_parameters()), **{f"critic.{n}": p for n, p in critic.named_parameters()}}
    dagger = RMADaggerLoss(rma_policy(actor, "policy" if flat else None))
    out = {**loss(data), **dagger(data)}
    assert set(parts) == {name for name in out if name.startswith("loss_")}
    for name, expected in parts.items():
        for p in named.values():
            p.grad = None
        out[name].backward(retain_graph=True)
        reached = {n for n, p in named.items() if p.grad is not None and bool((p.grad != 0).any())}
        # The mean does not depend on the noise, but the log-probability does.
        assert reached == {n for n in named if n.split(".")[0] in expected}, name
    groups = {**loss.parameter_groups(), **dagger.parameter_groups()}
    owner = {id(p): group for group, params in groups.items() for p in params}
    groups_by_part = dict(critic="critic", estimator="estimator", history_encoder="history_encoder")
    assert {n: owner[id(p)] for n, p in named.items()} == {
        n: groups_by_part.get(n.split(".")[0], "policy") for n in named
    }


# What acts, and what is learned from ----------------------------------------------------------------------------------


def test_a_rollout_keeps_the_true_chunk_and_the_surrogate_reads_it():
    actor, _, loss, acting = make()
    data = batch()
    with torch.no_grad():
        acted = acting(data.clone())
        true = rma_policy(actor)(data.clone())
    for key in data.keys():
        assert torch.equal(acted[key], data[key]), key
    assert not torch.allclose(acted["loc"], true["loc"])
    # log-ratio by hand, of Gaussians with the same scale
    log_ratio = ((acted["action"] - acted["loc"]).square() - (acted["action"] - true["loc"]).square()).sum(-1)
    log_ratio = log_ratio / (2 * acted["scale"][0, 0, 0] ** 2)
    torch.testing.assert_close(loss(acted)["mean_ratio"], log_ratio.exp().mean(), rtol=1e-4, atol=1e-5)


def test_the_ppo_terms_are_those_of_ppo():
    actor, critic, loss, acting = make()
    data = rollout(acting)
    ppo = PPOLoss(rma_policy(actor), critic)(data)
    out = loss(data)
    for name, value in ppo.items():
        torch.testing.assert_close(out[name], value)


def test_the_counter_is_state_and_its_weight_scales_one_loss():
    _, _, loss, acting = make(ramp=LinearRamp(0.0, 0.4, begin=1, length=2))
    data = rollout(acting)
    weights = []
    for _ in range(4):
        out = loss(data)
        weights.append(float(out["priv_reg_weight"]))
        torch.testing.assert_close(out["loss_priv_reg"], out["priv_reg_weight"] * out["latent_distance"])
        loss.ramp.advance()
    assert weights == pytest.approx([0.0, 0.0, 0.2, 0.4])
    other = make(ramp=LinearRamp(0.0, 0.4, begin=1, length=2))[2]
    other.load_state_dict(loss.state_dict())
    assert int(other.ramp.counter) == 4


def test_equal_latents_do_not_break_the_gradient():
    actor, _, loss, acting = make(ramp=LinearRamp(1.0, 1.0))
    with torch.no_grad():
        for encoder in (actor.priv_encoder, actor.history_encoder):
            for p in encoder.parameters():
                p.zero_()
    data = rollout(acting)
    out = {**loss(data), **RMADaggerLoss(rma_policy(actor))(data)}
    assert out["loss_priv_reg"] == out["loss_dagger"] == 0
    sum(value for name, value in out.items() if name.startswith("loss_")).backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in actor.parameters())


def test_the_history_encoder_and_the_estimator_learn_what_a_task_tells():
    """A teacher as it was made, acting on a task with hidden dynamics: its latent is in the history, not in a frame."""
    torch.manual_seed(0)
    widths = dict(prop=8, priv_explicit=2, priv_latent=6, history=80)
    actor = RMAActor(widths, 2, hidden=(32,), priv_hidden=(16, 4), estimator_hidden=(16,))
    acting = rma_policy(actor, latent="switched", estimated=True)
    rma_composition(acting).use_history(True)
    env = HiddenPointMass(128, seed=0)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        train, test = (env.rollout(60, acting, break_when_any_done=False).reshape(-1) for _ in range(2))
    loss, dagger = RMALoss(rma_policy(actor), functional=False), RMADaggerLoss(acting)
    for td in (train, test):
        td.set("advantage", torch.zeros(len(td), 1))
    groups = {**loss.parameter_groups(), **dagger.parameter_groups()}
    optimizer = torch.optim.Adam(groups["estimator"] + groups["history_encoder"], lr=3e-3)

    def losses(td):
        return dagger(td)["loss_dagger"], loss(td)["loss_estimator"]

    before = [float(x.detach()) for x in losses(test)]
    for _ in range(10):
        for batch in train[torch.randperm(len(train))].split(512):
            optimizer.zero_grad()
            sum(losses(batch)).backward()
            optimizer.step()
    after = [float(x.detach()) for x in losses(test)]
    # The same encoder on histories of other environments, whose frames tell as little as a single one would.
    shuffled = test.clone()
    shuffled["prop_history"] = test["prop_history"][torch.randperm(len(test))]
    assert after[0] < 0.9 * float(losses(shuffled)[0].detach()) and after[0] < 0.5 * before[0]
    assert after[1] < 0.2 * before[1]


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(latent="history"), dict(estimated=True), dict(latent="switched")])
def test_another_composition_is_not_trained(options):
    with pytest.raises(ValueError, match=r"privileged path.*Pass rma_policy\(actor\)"):
        RMALoss(rma_policy(RMAActor(WIDTHS, 4, **SMALL), **options))


def test_another_policy_is_refused():
    for loss in (RMALoss, RMADaggerLoss):
        with pytest.raises(ValueError, match="build the policy with rma_policy"):
            loss(gaussian_actor({"prop": 6}, 4))
    with pytest.raises(ValueError, match="length=0"):
        LinearRamp(length=0)
