"""The first update in reduced precision, compared with the one in float32."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded

from edenrl.modules import flash_actor, flash_critic
from edenrl.objectives import FlashSACLoss
from edenrl.training import check_precision


def flashsac(rows=64):
    torch.manual_seed(0)
    actor = flash_actor({"observation": 17}, Bounded(-1, 1, (6,)), hidden_dim=32, num_blocks=1)
    loss = FlashSACLoss(actor, flash_critic({"observation": 17}, 6, hidden_dim=32, num_blocks=1))
    ends = dict(observation=torch.randn(rows, 17), reward=torch.randn(rows, 1))
    ends["terminated"] = torch.zeros(rows, 1, dtype=torch.bool)
    data = dict(observation=torch.randn(rows, 17), action=torch.rand(rows, 6) * 2 - 1, next=ends)
    return loss, TensorDict(data, batch_size=[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flashsac_passes_and_nothing_is_changed(dtype):
    loss, batch = flashsac()
    state, random = copy.deepcopy(loss.state_dict()), torch.get_rng_state()
    check_precision(loss, batch, dtype)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in loss.state_dict().items())
    assert all(parameter.grad is None for parameter in loss.parameters())


class Temperature(nn.Module):
    """Learns a temperature from log-densities that a product in reduced precision has rounded."""

    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, td):
        log_prob = (td["log_prob"] @ torch.ones(1, 1)).float()
        # A number of 8 bits: 1001 becomes 1000, and 0.4 becomes 1.4.
        return TensorDict(loss_temperature=(self.log_alpha.exp() * (1001.4 - log_prob)).mean())


class Network(nn.Module):
    """A gradient that only the reduced precision turns round."""

    def __init__(self, factor):
        super().__init__()
        self.net, self.factor = nn.Linear(4, 1), factor

    def forward(self, td):
        out = self.net(td["x"])
        change = self.factor if out.dtype == torch.bfloat16 else 1.0
        out = out.float()
        return TensorDict(loss_value=(change * (out - out.detach())).mean())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Temperature(), r"In bfloat16 the first update is not that of float32: loss_temperature .* and not 0\.4.*"),
        (Network(-1.0), "cosine of the gradients of all -1 and not 1"),
        (Network(0.5), r"gradient norm of all \S+ and not"),
        (Network(float("nan")), "loss_value nan"),
    ],
)
def test_what_would_train_differently_is_refused(loss, message):
    torch.manual_seed(0)
    batch = TensorDict(log_prob=torch.full((8, 1), 1001.0), x=torch.randn(8, 4), batch_size=[8])
    with pytest.raises(ValueError, match=message) as caught:
        check_precision(loss, batch, torch.bfloat16)
    assert "algorithm.precision" in str(caught.value)


def test_a_group_without_a_gradient_is_the_same_in_both():
    check_precision(Network(1.0), TensorDict(x=torch.zeros(8, 4), batch_size=[8]), torch.bfloat16)
    net = TensorDictModule(nn.Linear(3, 1, bias=False), ["x"], ["loss_value"])
    check_precision(net, TensorDict(x=torch.zeros(3)), torch.bfloat16)


def test_of_compiled_networks_plain_copies_are_compared():
    loss, batch = flashsac()
    loss.compile_networks()
    check_precision(loss, batch, torch.bfloat16)


def test_a_loss_without_groups_is_one_group():
    net = TensorDictModule(nn.Linear(3, 1), ["x"], ["loss_value"])
    check_precision(net, TensorDict(x=torch.ones(3)), torch.bfloat16)
