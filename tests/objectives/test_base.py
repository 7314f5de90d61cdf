"""What the losses share, on a loss that does nothing else."""

import copy
from dataclasses import dataclass

import pytest
import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import TensorDictModule, dispatch
from torch import nn
from torchrl.objectives import LossModule

from edenrl.modules import gaussian_actor, value_critic
from edenrl.objectives import LossMixin, PPOLoss, require, require_not_negative
from edenrl.testing import check_loss_module


class Imitation(LossMixin, LossModule):
    @dataclass
    class _AcceptedKeys:
        expert: NestedKey = "expert"

    _schedulable_buffers = frozenset({"coeff", "smooth_coeff"})

    def __init__(self, actor, *, coeff=1.0, smooth_coeff=None, reduction="mean"):
        require_not_negative(self, coeff=coeff)
        super().__init__(reduction=reduction)
        self.actor = actor
        self.register_coeff_buffer("coeff", coeff)
        self.register_optional_coeff("smooth_coeff", smooth_coeff)

    def _make_in_keys(self):
        return [*self.actor.in_keys, self.tensor_keys.expert]

    def _make_out_keys(self):
        smooth = [] if self.smooth_coeff is None else ["loss_smooth"]
        return ["loss_imitation", *smooth]

    def parameter_groups(self):
        return {"policy": self._trained(self.actor)}

    @dispatch
    def forward(self, tensordict):
        action = self.actor(tensordict.select(*self.actor.in_keys)).get("action")
        error = (action - tensordict.get(self.tensor_keys.expert)).square().mean(-1)
        out = TensorDict(loss_imitation=self._reduce_loss(self.coeff * error, tensordict))
        if self.smooth_coeff is not None:
            out.set("loss_smooth", self._reduce_loss(self.smooth_coeff * action.square().mean(-1), tensordict))
        return out


def make(**options):
    actor = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    return Imitation(actor, **options)


def batch(*shape):
    return TensorDict(observation=torch.randn(*shape, 3), expert=torch.randn(*shape, 2), batch_size=shape)


@pytest.mark.parametrize("smooth", [None, 0.5])
@pytest.mark.parametrize("shape", [(8,), (2, 5)])
def test_a_loss_of_these_parts_keeps_the_contract(smooth, shape):
    check_loss_module(make(smooth_coeff=smooth), batch(*shape))


def test_keys_follow_their_names():
    loss = make()
    assert loss.in_keys == ["observation", "expert"] and loss.out_keys == ["loss_imitation"]
    loss.set_keys(expert=("demo", "action"))
    assert loss.in_keys == ["observation", ("demo", "action")]
    loss.set_keys(expert=None)
    assert loss.in_keys == ["observation", "expert"]
    assert make(smooth_coeff=1.0).out_keys == ["loss_imitation", "loss_smooth"]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", None])
def test_reductions(reduction):
    loss, data = make(reduction=reduction), batch(4)
    rows = make(reduction="none")
    rows.actor = loss.actor
    expected = rows(data)["loss_imitation"]
    assert expected.shape == (4,)
    expected = {"sum": expected.sum(), "none": expected}.get(reduction, expected.mean())
    torch.testing.assert_close(loss(data)["loss_imitation"], expected)


def test_an_unknown_reduction_and_a_negative_coefficient_are_refused():
    with pytest.raises(ValueError, match="Imitation needs reduction 'mean', 'sum' or 'none', got 'median'"):
        make(reduction="median")
    for value in (-0.5, float("nan")):
        with pytest.raises(ValueError, match="Imitation needs coeff >= 0, got"):
            make(coeff=value)


def test_a_coefficient_can_be_scheduled_where_its_term_was_built():
    built, data = make(smooth_coeff=1.0), batch(4)
    before = built(data)["loss_smooth"]
    built.smooth_coeff = 3.0
    torch.testing.assert_close(built(data)["loss_smooth"], 3 * before)
    assert "smooth_coeff" in built.state_dict()
    plain = make()
    for loss in (plain, copy.deepcopy(plain)):
        with pytest.raises(
            AttributeError, match="without the term that smooth_coeff weighs; build it with smooth_coeff > 0"
        ):
            loss.smooth_coeff = 2.0
        assert loss.smooth_coeff is None and "smooth_coeff" not in loss.state_dict()


def test_what_a_loss_leaves_out_is_named():
    class Empty(LossMixin, LossModule):
        @dataclass
        class _AcceptedKeys:
            pass

    empty = Empty()
    for name, ask in (
        ("_make_in_keys", lambda: empty.in_keys),
        ("_make_out_keys", lambda: empty.out_keys),
        ("parameter_groups", empty.parameter_groups),
    ):
        with pytest.raises(NotImplementedError, match=name):
            ask()


@pytest.mark.parametrize("functional", [True, False])
def test_the_parameters_of_a_functional_loss_are_found_beside_its_network(functional):
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
    names = {name for name, _ in critic.named_parameters()}
    loss = PPOLoss(actor, critic, functional=functional)
    held = loss._parameters_of("critic_network")
    assert (held is loss.critic_network) == (not functional)
    assert len(list(held.parameters())) == len(names)
    with torch.no_grad():
        for parameter in held.parameters():
            parameter.zero_()
    data = TensorDict(observation=torch.randn(4, 3), batch_size=[4])
    with loss._with_parameters("critic_network"):
        assert loss.critic_network(data)["state_value"].abs().max() == 0


def test_require():
    require(nn.Identity(), "gamma", 0.5, True, "in [0, 1]")
    with pytest.raises(ValueError, match=r"^Identity needs gamma in \[0, 1\], got 2\.$"):
        require(nn.Identity(), "gamma", 2, False, "in [0, 1]")
    require_not_negative(nn.Identity(), a=0.0, b=None, c=torch.tensor(-1.0))
