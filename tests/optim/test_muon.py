"""MuonAdamW against torch's two optimizers, and how it splits the parameters."""

import copy
import io

import pytest
import torch
from torch import nn

from edenrl.modules import GroupSimBa, HyperDense, gaussian_actor, simba_actor, simba_critic, value_critic
from edenrl.objectives import PPOLoss
from edenrl.optim import GradientStep, MuonAdamW, make_lr_schedule, make_optimizer


def mlp(*widths):
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Recurrent(nn.Module):
    """Normalized input, a GRU and a head."""

    def __init__(self):
        super().__init__()
        self.norm, self.gru, self.head = nn.LayerNorm(4), nn.GRU(4, 8, num_layers=2), mlp(8, 8, 2)

    def forward(self, x):
        return self.head(self.gru(self.norm(x))[0])


class Prototypes(nn.Module):
    """Two encoders side by side, an embedding, prototypes of its own, a standard deviation and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 8)
        self.encoders = nn.ModuleDict({"policy": mlp(5, 8, 8), "scan": mlp(7, 8, 8)})
        self.trunk = mlp(24, 8, 8, 2)
        self.prototypes = nn.Parameter(torch.randn(16, 8))
        self.std = nn.Parameter(torch.ones(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), *mlp(16, 8, 8, 2))


@pytest.mark.parametrize(
    ("network", "hidden"),
    [
        (mlp(3, 8, 8, 8, 1), ["2.weight", "4.weight"]),
        (mlp(3, 8, 1), []),
        (mlp(3, 1), []),
        (convolutional(), ["5.weight"]),
        # Of the first layer only the weights on its input stay out.
        (Recurrent(), ["gru.weight_hh_l0", "gru.weight_ih_l1", "gru.weight_hh_l1", "head.0.weight"]),
        (Prototypes(), ["encoders.policy.2.weight", "encoders.scan.2.weight", "trunk.0.weight", "trunk.2.weight"]),
        (
            GroupSimBa({"observation": 3}, 2, hidden_dim=8, num_blocks=1, encoder_hidden=None),
            ["trunk.blocks.0.w1.weight", "trunk.blocks.0.w2.weight", "trunk.head.w1.weight"],
        ),
        (
            GroupSimBa({"a": 3, "b": 4}, 2, hidden_dim=8, num_blocks=1),
            ["encoder.encoders.a.2.weight", "encoder.encoders.b.2.weight", "trunk.embedder.w.weight"]
            + ["trunk.blocks.0.w1.weight", "trunk.blocks.0.w2.weight", "trunk.head.w1.weight"],
        ),
    ],
    ids=["mlp", "one hidden layer", "linear", "cnn", "gru", "prototypes", "simba", "simba with encoders"],
)
def test_the_partition_is_complete_and_disjoint_and_muon_has_the_hidden_matrices(network, hidden):
    optimizer = MuonAdamW(network)
    trainable = {name for name, p in network.named_parameters() if p.requires_grad}
    muon, adamw = optimizer.partition["muon"], optimizer.partition["adamw"]
    assert muon == hidden
    assert sorted(muon + adamw) == sorted(trainable)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in network.parameters() if p.requires_grad)
    named = dict(network.named_parameters())
    assert [id(named[name]) for name in muon] == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert not hidden or hidden[0] in repr(optimizer)


def test_actor_and_critic_have_first_and_last_layers_of_their_own():
    actor, critic = gaussian_actor({"o": 3}, 2, hidden=(8, 8)), value_critic({"o": 3}, hidden=(8, 8))
    expected = [id(actor.module[0].module.mlp[2].weight), id(critic.module.mlp[2].weight)]
    for networks in ([actor, critic], nn.ModuleList([actor, critic]), PPOLoss(actor, critic, functional=False)):
        assert [id(p) for p in MuonAdamW(networks).param_groups[0]["params"]] == expected
    assert "std" in " ".join(MuonAdamW(actor).partition["adamw"])


def test_a_shared_trunk_is_counted_once():
    trunk = mlp(3, 8, 8)
    actor, critic = nn.Sequential(trunk, mlp(8, 8, 2)), nn.Sequential(trunk, mlp(8, 8, 1))
    held = [id(p) for group in MuonAdamW([actor, critic]).param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == 4 + 4 + 4


@pytest.mark.parametrize("wrong", [list(mlp(3, 8, 1).parameters()), [torch.zeros(3)]])
def test_parameters_are_refused_because_their_modules_are_needed(wrong):
    with pytest.raises(TypeError, match=r"by their modules, which \w+ does not show. Pass the networks"):
        MuonAdamW(wrong)


def test_a_functional_loss_and_a_frozen_network_are_refused():
    actor, critic = gaussian_actor({"o": 3}, 2), value_critic({"o": 3})
    with pytest.raises(TypeError, match="PPOLoss does not show"):
        make_optimizer("muon", PPOLoss(actor, critic), lr=1e-3)
    with pytest.raises(ValueError, match="without a trainable parameter"):
        MuonAdamW(nn.Linear(2, 1).requires_grad_(False))


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_equals_torch_muon_and_adamw_over_twenty_steps_with_changing_rates(adjust_lr_fn):
    ours = mlp(3, 16, 8, 16, 2)
    theirs = copy.deepcopy(ours)
    optimizer = MuonAdamW(ours, lr=1e-2, weight_decay=0.02, muon_weight_decay=0.3, adjust_lr_fn=adjust_lr_fn)
    hidden = [theirs[2].weight, theirs[4].weight]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.3, adjust_lr_fn=adjust_lr_fn)
    rest = [p for p in theirs.parameters() if all(p is not h for h in hidden)]
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.02)
    schedules = [make_lr_schedule("cosine", opt, 20, final_fraction=0.1) for opt in (optimizer, muon, adamw)]
    for _ in range(20):
        x = torch.randn(8, 3)
        for net, optimizers in ((ours, [optimizer]), (theirs, [muon, adamw])):
            for opt in optimizers:
                opt.zero_grad()
            (net(x) - 1).square().mean().backward()
            for opt in optimizers:
                opt.step()
        for schedule in schedules:
            schedule.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            # Not bit for bit: the fused kernel of AdamW rounds differently.
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == muon.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_the_orthogonalised_step_has_singular_values_near_one():
    net = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 64), nn.Linear(64, 1))
    before = net[1].weight.detach().clone()
    net[1].weight.grad = torch.randn(64, 32)
    MuonAdamW(net, lr=1.0, muon_weight_decay=0.0).step()
    # A tall matrix of 64 x 32 is scaled by sqrt(64 / 32).
    values = torch.linalg.svdvals(before - net[1].weight.detach()) / 2**0.5
    assert 0.6 <= values.min() and values.max() <= 1.3


@pytest.mark.parametrize(
    ("shape", "adjust_lr_fn", "factor"),
    [((8, 32), None, 1.0), ((32, 8), "original", 2.0), ((8, 32), "match_rms_adamw", 0.2 * 32**0.5)],
)
def test_wide_and_tall_matrices_are_scaled_as_stated(shape, adjust_lr_fn, factor):
    net = nn.Sequential(nn.Linear(1, shape[1]), nn.Linear(shape[1], shape[0]), nn.Linear(shape[0], 1))
    before = net[1].weight.detach().clone()
    net[1].weight.grad = nn.init.orthogonal_(torch.empty(shape))
    MuonAdamW(net, lr=1.0, muon_weight_decay=0.0, adjust_lr_fn=adjust_lr_fn).step()
    values = torch.linalg.svdvals(before - net[1].weight.detach()) / factor
    assert 0.6 <= values.min() and values.max() <= 1.3


@pytest.mark.parametrize("networks", [1, 2])
def test_weight_decay_reaches_each_method_with_its_own_value(networks):
    nets = [mlp(3, 8, 8, 1) for _ in range(networks)]
    before = [copy.deepcopy(net) for net in nets]
    optimizer = MuonAdamW(nets, lr=0.1, weight_decay=0.5, muon_weight_decay=0.25)
    for net in nets:
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
    optimizer.step()
    for net, old in zip(nets, before, strict=True):
        torch.testing.assert_close(net[2].weight, old[2].weight * (1 - 0.1 * 0.25))
        torch.testing.assert_close(net[0].weight, old[0].weight * (1 - 0.1 * 0.5))


def test_zero_and_missing_gradients_are_safe():
    net = mlp(3, 8, 8, 1)
    before = copy.deepcopy(net)
    optimizer = MuonAdamW(net, lr=0.1, weight_decay=0.0, muon_weight_decay=0.0)
    optimizer.step()  # no gradient at all
    net[2].weight.grad = torch.zeros_like(net[2].weight)
    net[0].weight.grad = torch.zeros_like(net[0].weight)
    optimizer.step()
    for p, q in zip(net.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)
    net(torch.randn(4, 3)).sum().backward()
    assert net[2].weight.grad is not None
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def train(net, optimizer, steps, schedule=None):
    for _ in range(steps):
        optimizer.zero_grad()
        (net(torch.randn(8, 3)) - 1).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def test_a_saved_and_loaded_state_continues_bit_for_bit():
    net = mlp(3, 8, 8, 1)
    optimizer = MuonAdamW(net, lr=1e-2)
    schedule = make_lr_schedule("linear", optimizer, 20)
    train(net, optimizer, 10, schedule)
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    states = torch.load(file)
    other = mlp(3, 8, 8, 1)
    resumed = MuonAdamW(other, lr=1.0)
    resumed_schedule = make_lr_schedule("linear", resumed, 20)
    for part, state in zip((other, resumed, resumed_schedule), states, strict=True):
        part.load_state_dict(state)
    rng = torch.get_rng_state()
    train(net, optimizer, 10, schedule)
    torch.set_rng_state(rng)
    train(other, resumed, 10, resumed_schedule)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert resumed.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"] and resumed.partition == optimizer.partition


def test_a_copy_steps_its_own_parameters():
    net = mlp(3, 8, 8, 1)
    optimizer = MuonAdamW(net, lr=1e-2)
    train(net, optimizer, 2)
    twin, twin_optimizer = copy.deepcopy((net, optimizer))
    rng = torch.get_rng_state()
    train(net, optimizer, 2)
    torch.set_rng_state(rng)
    train(twin, twin_optimizer, 2)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p is not q and torch.equal(p, q)


def test_the_closure_is_evaluated_once_and_its_loss_returned():
    net = mlp(3, 8, 8, 1)
    optimizer = MuonAdamW(net, lr=1e-2)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    before = net[2].weight.detach().clone()
    assert optimizer.step(closure).item() >= 0 and len(calls) == 1
    assert not torch.equal(net[2].weight, before)


def test_a_gradient_scaler_skips_an_overflow_and_otherwise_changes_nothing():
    net = mlp(3, 8, 8, 1)
    twin = copy.deepcopy(net)
    plain, scaled = MuonAdamW(twin, lr=1e-2), MuonAdamW(net, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf"), 1.0):
        scaled.zero_grad()
        plain.zero_grad()
        scaler.scale(net(torch.ones(2, 3)).square().mean() * factor).backward()
        scaler.step(scaled)
        scaler.update()
        if factor == 1.0:
            twin(torch.ones(2, 3)).square().mean().backward()
            plain.step()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == 4.0


def test_the_kl_adaptive_rate_reaches_both_methods():
    actor, critic = simba_actor({"o": 3}, 2, hidden_dim=8), simba_critic({"o": 3}, hidden_dim=8)
    optimizer = make_optimizer("muon", [actor, critic], lr=1e-3)
    schedule = make_lr_schedule("adaptive", optimizer, 1, target_kl=0.01)
    schedule.step(0.001)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.5e-3, 1.5e-3])
    step = GradientStep(PPOLoss(actor, critic, functional=False), optimizer, lr_schedule=schedule)
    step.restart_schedule("linear", 1e-4, 10)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 1e-4]


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop"])
def test_other_optimizers_take_a_module_too(name):
    net = mlp(3, 8, 1)
    optimizer = make_optimizer(name, net, lr=0.1)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in net.parameters()]


def test_linear_subclasses_count_as_linear():
    assert MuonAdamW(nn.Sequential(*(HyperDense(4, 4) for _ in range(3)))).partition["muon"] == ["1.weight"]
