"""The discriminator's loss against tests/golden/amp.npz, by hand, and against the contract of a loss."""

import copy
import logging
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from edenrl.modules import AMPReward, Discriminator, SaturationWatch
from edenrl.objectives import AMPLoss
from edenrl.optim import GradientStep

GOLDEN = "amp"


def layers(net):
    trunk = [layer for layer in net.trunk if isinstance(layer, nn.Linear)]
    return {**{f"trunk{i}": layer for i, layer in enumerate(trunk)}, "head": net.head}


def golden_loss(golden, **kwargs):
    hidden = golden["cfg_hidden_dims"].tolist()
    net = Discriminator(int(golden["cfg_frame_dim"]), int(golden["cfg_num_frames"]), hidden, normalize=False)
    with torch.no_grad():
        for name, layer in layers(net).items():
            weight = layer.parametrizations.weight
            weight.original.copy_(golden[f"{name}_weight_raw"])
            layer.bias.copy_(golden[f"{name}_bias"])
            weight[0]._u.copy_(golden[f"{name}_u"])
            weight[0]._v.copy_(golden[f"{name}_v"])
    return AMPLoss(net.eval(), **kwargs)


def golden_batch(golden, rows):
    """As many windows of both kinds: each is repeated, which leaves the means as they are."""
    entries = {"expert_window": golden["windows_expert"], "amp_window": golden["windows_policy"]}
    count = math.lcm(*map(len, entries.values()))
    data = {name: value.repeat(count // len(value), 1) for name, value in entries.items()}
    return TensorDict(data, batch_size=[count]).reshape(*([rows] if rows > 1 else []), count // rows)


@pytest.mark.parametrize("rows", [1, 2])
def test_losses_and_gradients_are_the_published_ones(golden, rows):
    loss = golden_loss(golden, grad_penalty_coeff=float(golden["cfg_grad_pen_coef"]))
    out = loss(golden_batch(golden, rows))
    close = dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["loss_discriminator"], golden["loss_lsgan"], **close)
    halves = golden["loss_expert"] + golden["loss_policy"]
    torch.testing.assert_close(out["loss_discriminator"], halves / 2, **close)
    torch.testing.assert_close(out["loss_grad_penalty"], golden["loss_grad_pen"], **close)
    total = out["loss_discriminator"] + out["loss_grad_penalty"]
    torch.testing.assert_close(total, golden["loss_total"], **close)
    torch.testing.assert_close(out["d_expert"], golden["d_expert"].mean(), **close)
    torch.testing.assert_close(out["d_policy"], golden["d_policy"].mean(), **close)
    right = ((golden["d_expert"] > 0).float().mean() + (golden["d_policy"] < 0).float().mean()) / 2
    torch.testing.assert_close(out["accuracy"], right)
    total.backward()
    for name, layer in layers(loss.discriminator).items():
        weight = layer.parametrizations.weight.original
        torch.testing.assert_close(weight.grad, golden[f"grad_{name}_weight_raw"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.bias.grad, golden[f"grad_{name}_bias"], rtol=1e-4, atol=1e-5)


def make(**kwargs):
    net = Discriminator(2, 3, (8, 8))
    net.update_normalization(torch.randn(50, 6))
    return AMPLoss(net, **kwargs)


def batch(*shape):
    windows = {"expert_window": torch.randn(*shape, 6), "amp_window": torch.randn(*shape, 6)}
    return TensorDict(windows, batch_size=shape)


def test_gradient_penalty_of_a_linear_discriminator():
    loss = AMPLoss(Discriminator(2, 2, (4,), normalize=False), grad_penalty_coeff=3.0)
    loss.discriminator.trunk, loss.discriminator.head = nn.Identity(), nn.Linear(4, 1)
    weight = torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    loss.discriminator.head.weight.data.copy_(weight)
    windows = TensorDict(expert_window=torch.randn(7, 4), amp_window=torch.randn(7, 4), batch_size=[7])
    assert loss(windows)["loss_grad_penalty"].item() == pytest.approx(3.0 * 5.25)


def test_the_penalty_is_taken_at_normalized_windows():
    loss = make(reduction="none")
    loss.discriminator.eval()
    data = batch(5)
    x = loss.discriminator.normalize(data["expert_window"]).requires_grad_()
    (slope,) = torch.autograd.grad(loss.discriminator.network(x).sum(), x)
    torch.testing.assert_close(loss(data)["loss_grad_penalty"].detach(), 5.0 * slope.square().sum(-1))
    # Statistics of other units change the windows, not the meaning: no factor of the units may enter.
    scaled = copy.deepcopy(loss)
    scaled.discriminator.norm.mean *= 100
    scaled.discriminator.norm.var *= 100**2
    scaled.discriminator.norm.eps *= 100
    torch.testing.assert_close(
        scaled(data.apply(lambda w: w * 100))["loss_grad_penalty"], loss(data)["loss_grad_penalty"]
    )


def test_one_power_iteration_a_call_and_statistics_stay():
    loss = make()
    twin = copy.deepcopy(loss)
    loss(batch(6))
    with torch.no_grad():
        twin.discriminator.network(torch.randn(1, 6))
    for name, value in loss.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


def test_without_gradient_the_numbers_are_the_same():
    loss = make()
    loss.discriminator.eval()
    data = batch(6)
    with torch.no_grad():
        silent = loss(data)
    out = loss(data)
    assert all(not value.requires_grad for value in silent.values())
    for name, value in out.items():
        torch.testing.assert_close(silent[name], value.detach())


def train(expert, policy, iterations, batch_size=64):
    """Discriminator on two sources of windows, as the trainer does it; mean accuracy and style reward at the end."""
    torch.manual_seed(0)
    net = Discriminator(2, 2, (32, 32))
    loss = AMPLoss(net)
    step = GradientStep(loss, torch.optim.Adam(net.optimizer_groups(), lr=1e-3))
    watch, accuracies = SaturationWatch(patience=10), []
    for _ in range(iterations):
        windows = TensorDict(expert_window=expert(batch_size), amp_window=policy(batch_size), batch_size=[batch_size])
        net.update_normalization(windows["expert_window"], windows["amp_window"])
        losses = loss(windows)
        step(losses)
        accuracies.append(losses["accuracy"].item())
        watch(accuracies[-1])
    return sum(accuracies[-40:]) / 40, AMPReward(net, coeff=1.0).style(policy(4096)).mean().item()


def test_equal_sources_leave_the_neutral_reward(caplog):
    with caplog.at_level(logging.WARNING, "edenrl"):
        accuracy, style = train(lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4), 200)
    assert 0.45 < accuracy < 0.55 and abs(style - 0.75) < 0.05 and not caplog.records


def test_separate_sources_are_told_apart_and_reported(caplog):
    with caplog.at_level(logging.WARNING, "edenrl"):
        accuracy, style = train(lambda n: torch.randn(n, 4) + 10, lambda n: torch.randn(n, 4) - 10, 200)
    assert accuracy == 1.0 and style < 0.2
    assert [record.message[:45] for record in caplog.records] == ["The discriminator's accuracy was above 0.99 f"]


def test_expert_is_the_positive_side():
    loss = make(grad_penalty_coeff=0.0)
    step = GradientStep(loss, torch.optim.Adam(loss.discriminator.parameters(), lr=1e-2))
    data = TensorDict(expert_window=torch.ones(32, 6), amp_window=-torch.ones(32, 6), batch_size=[32])
    for _ in range(50):
        step(loss(data))
    assert loss(data)["d_expert"] > 0.3 and loss(data)["d_policy"] < -0.3


def test_windows_of_another_shape_are_refused():
    data = TensorDict(amp_window=torch.zeros(4, 6), expert_window=torch.zeros(4, 3, 2), batch_size=[4])
    message = r"windows of shape \(4, 6\): 3 flattened frames of 2; got \(4, 3, 2\) and \(4, 6\)"
    with pytest.raises(ValueError, match=message):
        make()(data)
