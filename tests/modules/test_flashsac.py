"""FlashSAC's networks against the published ones, and which pass moves which statistics."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.data import Bounded, Unbounded

from edenrl.modules import (
    FlashActor,
    FlashCritic,
    UnitBatchNorm,
    UnitLinear,
    UnitRMSNorm,
    average_batch_statistics,
    flash_actor,
    flash_critic,
    project_unit_norms_,
    unit_norm_hook,
)
from edenrl.objectives.flashsac import squashed_sample

sys.path.insert(0, str(Path(__file__).parents[1]))
from flashsac_golden import ACTOR_HEAD, CRITIC_HEAD, LAYER, assert_after, build  # noqa: E402

GOLDEN = "flashsac_networks"
OUTPUT = dict(rtol=1e-4, atol=1e-5)


def test_layers_are_the_published_ones(golden):
    g = golden
    norm = UnitBatchNorm(g["batchnorm.input"].shape[-1])
    for ours_name, theirs in (("scale", "scale"), ("shift", "shift")):
        getattr(norm, ours_name).data.copy_(g[f"batchnorm.{theirs}"])
    norm.running_mean.copy_(g["batchnorm.running_mean"])
    norm.running_var.copy_(g["batchnorm.running_var"])
    assert_close(norm(g["batchnorm.input"]), g["batchnorm.eval_output"], **LAYER)
    assert torch.equal(norm.running_mean, g["batchnorm.running_mean"])
    assert_close(norm(g["batchnorm.input"], batch_stats=True), g["batchnorm.train_output"], **LAYER)
    assert_close(norm.running_mean, g["batchnorm.running_mean_after_train"], **LAYER)
    assert_close(norm.running_var, g["batchnorm.running_var_after_train"], **LAYER)
    norm.project_()
    assert_close(norm.scale.data, g["batchnorm.scale_projected"], **LAYER)
    assert_close(norm.shift.data, g["batchnorm.shift_projected"], **LAYER)

    rms = UnitRMSNorm(g["rmsnorm.input"].shape[-1])
    rms.scale.data.copy_(g["rmsnorm.scale"])
    assert_close(rms(g["rmsnorm.input"]), g["rmsnorm.output"], **LAYER)
    rms.project_()
    assert_close(rms.scale.data, g["rmsnorm.scale_projected"], **LAYER)

    linear = UnitLinear(*g["linear.weight"].t().shape)
    linear.weight.data.copy_(g["linear.weight"])
    linear.project_()
    assert_close(linear.weight.data, g["linear.weight_projected"], **LAYER)


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("batch_stats", [False, True])
def test_networks_are_the_published_ones(golden, batch_stats, side_by_side, monkeypatch):
    monkeypatch.setattr(sys.modules[FlashCritic.__module__], "_side_by_side", lambda _: side_by_side)
    actor, critic = build(golden)
    before = copy.deepcopy((actor.state_dict(), critic.state_dict()))
    mode = "train" if batch_stats else "eval"
    loc, scale = actor(golden["obs"], batch_stats=batch_stats)
    assert_close(loc, golden[f"actor_{mode}.mean"], **OUTPUT)
    assert_close(scale, golden[f"actor_{mode}.std"], **OUTPUT)
    drawn = golden["noise"]
    action, log_prob = squashed_sample(loc, scale, drawn)
    assert_close(loc + scale * drawn, golden[f"actor_{mode}.raw_action"], **OUTPUT)
    assert_close(action, golden[f"actor_{mode}.action"], **OUTPUT)
    assert_close(log_prob, golden[f"actor_{mode}.log_prob"], rtol=1e-4, atol=1e-4)
    value, log_prob = critic(golden["obs"], golden["critic_action"], batch_stats=batch_stats)
    assert_close(value, golden[f"critic_{mode}.q"].t(), **OUTPUT)
    assert_close(log_prob, golden[f"critic_{mode}.log_prob"].transpose(0, 1), **OUTPUT)
    if batch_stats:
        assert_after(actor, golden, "actor_train.after.", ACTOR_HEAD)
        assert_after(critic, golden, "critic_train.after.", CRITIC_HEAD)
    else:
        for net, state in zip((actor, critic), before, strict=True):
            assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_policy_acts_with_the_published_deterministic_action_on_running_statistics(golden):
    net, _ = build(golden)
    sizes = {name: int(value) for name, value in golden.under("config.").items()}
    box = Bounded(-1, 1, (sizes["action_dim"],))
    actor = flash_actor({"observation": sizes["obs_dim"]}, box, hidden_dim=sizes["actor_hidden_dim"])
    actor.module[0].module.load_state_dict(net.state_dict())
    for mode in (True, False):  # a policy that is being trained is in train() mode
        actor.train(mode)
        loc = actor(TensorDict(observation=golden["obs"], batch_size=[len(golden["obs"])]))["loc"]
        assert_close(loc.tanh(), golden["actor_eval.deterministic_action"], **OUTPUT)


def on_spheres(net):
    for layer in net.modules():
        if isinstance(layer, UnitLinear):
            assert_close(layer.weight.norm(dim=-1), torch.ones(layer.weight.shape[:-1]), rtol=1e-5, atol=1e-5)
        elif isinstance(layer, UnitBatchNorm | UnitRMSNorm):
            total = layer.scale.square().sum(-1)
            total = total + layer.shift.square().sum(-1) if isinstance(layer, UnitBatchNorm) else total
            assert_close(total, torch.full_like(total, layer.scale.shape[-1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("net", [FlashActor({"a": 2, "b": 3}, 2, hidden_dim=8), FlashCritic(5, hidden_dim=8)])
def test_fresh_networks_and_every_step_are_on_the_spheres(net):
    on_spheres(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    handle = unit_norm_hook(optimizer, net)
    a, b = torch.randn(6, 2), torch.randn(6, 3)
    for _ in range(3):
        optimizer.zero_grad()
        sum(out.square().sum() for out in net(a, b, batch_stats=True)).backward()
        optimizer.step()
        on_spheres(net)
    handle.remove()
    optimizer.step()
    with pytest.raises(AssertionError):
        on_spheres(net)
    project_unit_norms_(net)
    on_spheres(net)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_members_are_independent_and_equal_single_networks(side_by_side, monkeypatch):
    monkeypatch.setattr(sys.modules[FlashCritic.__module__], "_side_by_side", lambda _: side_by_side)
    both = FlashCritic(5, hidden_dim=8, num_bins=7)
    x = torch.randn(6, 5)
    for member in range(2):
        one = FlashCritic(5, hidden_dim=8, num_bins=7, num_members=1)
        state = both.state_dict()
        one.load_state_dict({k: v if k == "atoms" else v[member : member + 1] for k, v in state.items()})
        for stats in (False, True):
            probe = copy.deepcopy(both)
            for got, alone in zip(probe(x, batch_stats=stats), one(x, batch_stats=stats), strict=True):
                assert_close(got[:, member], alone[:, 0])
        both_after = copy.deepcopy(both)
        both_after(x, batch_stats=True)
        assert_close(both_after.trunk.bn.running_mean[member], one.trunk.bn.running_mean[0])


@pytest.mark.parametrize("side_by_side", [False, True])
def test_rows_are_left_out_behind_the_batch_statistics(side_by_side, monkeypatch):
    monkeypatch.setattr(sys.modules[FlashCritic.__module__], "_side_by_side", lambda _: side_by_side)
    critic, x = FlashCritic(5, hidden_dim=8, num_bins=7), torch.randn(6, 5)
    whole = copy.deepcopy(critic).logits(x, batch_stats=True)
    for rows in (slice(2), slice(2, None)):
        assert_close(copy.deepcopy(critic).logits(x, batch_stats=True, rows=rows), whole[rows])


@pytest.mark.parametrize("batch", [(), (6,), (2, 3)])
def test_any_batch_shape(batch):
    actor, critic = FlashActor({"a": 5}, 2, hidden_dim=8), FlashCritic(7, hidden_dim=8)
    x, action = torch.randn(*batch, 5), torch.randn(*batch, 2)
    loc, scale = actor(x)
    value, log_prob = critic(x, action)
    assert loc.shape == scale.shape == (*batch, 2) and value.shape == (*batch, 2) and log_prob.shape == (*batch, 2, 101)
    flat = critic(x.reshape(-1, 5), action.reshape(-1, 2))
    assert_close(value.reshape(-1, 2), flat[0])
    assert_close(log_prob.reshape(-1, 2, 101), flat[1])


def test_reduced_precision_leaves_the_outputs_in_single(golden):
    actor, critic = build(golden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [*actor(golden["obs"]), *critic(golden["obs"], golden["critic_action"])]
    exact = [*actor(golden["obs"]), *critic(golden["obs"], golden["critic_action"])]
    for reduced, single in zip(outputs, exact, strict=True):
        assert reduced.dtype == torch.float32 and not torch.equal(reduced, single)
        assert_close(reduced, single, rtol=0.1, atol=0.1)


def test_processes_agree_on_statistics(monkeypatch):
    """Means 0 and 2 with variances 1 and 3: those of both halves together, by hand."""
    module, norm = sys.modules[UnitBatchNorm.__module__], UnitBatchNorm(2)
    average_batch_statistics(norm)  # alone: nothing happens
    assert norm.running_mean.tolist() == [0, 0] and norm.running_var.tolist() == [1, 1]

    def all_reduce(both):
        both += torch.tensor([2.0, 3.0 + 2.0**2]).double().unsqueeze(-1)  # the other process: mean, mean of squares

    monkeypatch.setattr(module, "several_processes", lambda: True)
    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    average_batch_statistics(norm)
    assert norm.running_mean.tolist() == [1, 1] and norm.running_var.tolist() == [3, 3]


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="finite action bounds"):
        flash_actor({"a": 2}, Unbounded((2,)))
    with pytest.raises(ValueError, match="num_blocks"):
        FlashActor({"a": 2}, 1, num_blocks=0)
    with pytest.raises(ValueError, match="min_value < max_value"):
        FlashCritic(3, min_value=1.0, max_value=-1.0)
    assert flash_critic({"a": 2}, 1, hidden_dim=4).in_keys == ["a", "action"]


@pytest.mark.parametrize("members", [None, 3])
def test_running_statistics_never_become_nan(members):
    norm = UnitBatchNorm(4, members)
    shape = (6, 4) if members is None else (members, 4, 6)
    good = torch.randn(shape)
    norm(good, batch_stats=True)
    before = norm.running_mean.clone(), norm.running_var.clone()
    bad = good.clone()
    bad[(2, 1) if members is None else (2, 1, 5)] = float("nan")
    assert norm(bad, batch_stats=True).isnan().any()
    assert norm.running_mean.isfinite().all() and norm.running_var.isfinite().all()
    hit = (1,) if members is None else (2, 1)
    assert norm.running_mean[hit] == before[0][hit] and norm.running_var[hit] == before[1][hit]
    rest = torch.ones_like(before[0], dtype=torch.bool)
    rest[hit] = False
    assert (norm.running_mean != before[0])[rest].all()
