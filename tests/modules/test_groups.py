"""What a user is told who composes networks wrongly."""

import re

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded

from edenrl.modules import (
    Discriminator,
    RMAActor,
    RunningNorm,
    categorical_actor,
    flash_actor,
    flash_critic,
    gaussian_actor,
    make_actor,
    rma_policy,
    simba_actor,
    simba_critic,
    value_critic,
)

BOX = Bounded(-1.0, 1.0, (2,))
SMALL = dict(hidden_dim=8)
RMA = RMAActor(dict(prop=6, priv_explicit=3, priv_latent=5, history=60), 2)
GROUPS = {"policy": 3, "scan": 5}
NETWORKS = {
    "gaussian_actor": lambda groups: gaussian_actor(groups, 2),
    "gaussian_actor plain": lambda groups: gaussian_actor(groups, 2, normalize=False),
    "gaussian_actor squash": lambda groups: gaussian_actor(groups, BOX, squash=True),
    "make_actor": lambda groups: make_actor(groups, BOX),
    "categorical_actor": lambda groups: categorical_actor(groups, 2),
    "value_critic": lambda groups: value_critic(groups),
    "value_critic plain": lambda groups: value_critic(groups, 3, normalize=False),
    "simba_actor": lambda groups: simba_actor(groups, 2, **SMALL),
    "simba_critic": lambda groups: simba_critic(groups, **SMALL),
    "flash_actor": lambda groups: flash_actor(groups, BOX, **SMALL),
    "flash_critic": lambda groups: flash_critic(groups, 2, **SMALL),
}
every = pytest.mark.parametrize("name", NETWORKS)


def data(groups, batch, **changed):
    entries = {name: torch.zeros(*batch, width) for name, width in groups.items()} | {"action": torch.zeros(*batch, 2)}
    return TensorDict(entries | changed, batch_size=batch)


@every
@pytest.mark.parametrize("batch", [(4,), (2, 3)])
@pytest.mark.parametrize(("group", "width"), [("policy", 1), ("policy", 4), ("scan", 7), ("scan", 2)])
def test_a_group_of_another_width_is_named(name, batch, group, width):
    network = NETWORKS[name](GROUPS)
    network(data(GROUPS, batch))
    wrong = data(GROUPS, batch, **{group: torch.zeros(*batch, width)})
    shape, expected = re.escape(str((*batch, width))), GROUPS[group]
    with pytest.raises(ValueError, match=rf"'{group}' has the shape {shape}, expected \(\*batch, {expected}\)"):
        network(wrong)


@every
def test_one_group_is_not_spread_over_several_features(name):
    with pytest.raises(ValueError, match=r"'policy' has the shape \(4, 1\), expected \(\*batch, 6\)"):
        NETWORKS[name]({"policy": 6})(data({"policy": 1}, (4,)))


@pytest.mark.parametrize("name", ["gaussian_actor", "value_critic plain", "flash_critic", "categorical_actor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_group_of_another_dtype_is_named(name, dtype):
    wrong = data(GROUPS, (4,), scan=torch.zeros(4, 5, dtype=dtype))
    with pytest.raises(ValueError, match=f"'scan' is {dtype}, but the parameters are torch.float32"):
        NETWORKS[name](GROUPS)(wrong)


def test_groups_of_different_batches_are_named():
    wrong = data(GROUPS, (4,), scan=torch.zeros(4, 1, 5))
    with pytest.raises(ValueError, match=r"different batch shapes, \{'policy': \(4, 3\), 'scan': \(4, 1, 5\)"):
        value_critic(GROUPS)(wrong)


def test_the_distribution_and_a_functional_call_name_the_group_too():
    from edenrl.objectives import PPOLoss

    actor, critic = gaussian_actor(GROUPS, 2), value_critic(GROUPS)
    wrong = data(GROUPS, (4,), scan=torch.zeros(4, 6))
    with pytest.raises(ValueError, match="'scan' has the shape"):
        actor.get_dist(wrong)
    batch = critic(actor(data(GROUPS, (4,)))).detach()
    batch.update({"advantage": torch.zeros(4, 1), "value_target": torch.zeros(4, 1), "scan": torch.zeros(4, 6)})
    with pytest.raises(ValueError, match="'scan' has the shape"):
        PPOLoss(actor, critic)(batch)


@pytest.mark.parametrize("keys", [None, "flat"])
def test_a_chunk_of_another_width_is_named(keys):
    policy = rma_policy(RMA, keys)
    entries = {"prop": torch.zeros(4, 6), "priv_explicit": torch.zeros(4, 3), "priv_latent": torch.zeros(4, 9)}
    if keys:
        entries = {"flat": torch.zeros(4, 70)}
    with pytest.raises(ValueError, match="'flat' has the shape" if keys else r"'priv_latent' has the shape \(4, 9\)"):
        policy(TensorDict(entries, batch_size=[4]))


def test_an_error_that_is_not_about_the_inputs_stays():
    class Fails(torch.nn.Module):
        def forward(self, *groups):
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        gaussian_actor(GROUPS, 2, build=lambda *_: Fails())(data(GROUPS, (4,)))
    with pytest.raises(KeyError, match="scan"):
        gaussian_actor(GROUPS, 2)(data(GROUPS, (4,)).exclude("scan"))


@every
@pytest.mark.parametrize(
    ("groups", "error", "said"),
    [
        (3, TypeError, "needs groups as a mapping of names to widths.*got 3"),
        (["policy"], TypeError, r"needs groups as a mapping.*got \['policy'\]"),
        ({}, ValueError, "needs at least one observation group"),
        ({"policy": (3,)}, TypeError, r"width of each group as an integer.*got \{'policy': \(3,\)\}"),
        ({"policy": 3, "scan": 0}, ValueError, r"at least one feature, got \{'scan': 0\}"),
    ],
)
def test_groups_are_a_mapping_of_names_to_widths(name, groups, error, said):
    with pytest.raises(error, match=said):
        NETWORKS[name](groups)


@pytest.mark.parametrize("widths", [64, "64", 64.0, (64, 0.5), None])
@pytest.mark.parametrize(
    "build",
    [
        lambda widths: gaussian_actor(GROUPS, 2, hidden=widths),
        lambda widths: value_critic(GROUPS, hidden=widths),
        lambda widths: Discriminator(3, hidden=widths),
        lambda widths: simba_critic(GROUPS, encoder_hidden={"scan": widths}, **SMALL),
        lambda widths: RMAActor(RMA.widths, 2, scan_hidden=widths),
        lambda widths: RMAActor(RMA.widths, 2, hidden=widths),
    ],
)
def test_widths_of_layers_are_a_sequence(build, widths):
    with pytest.raises(TypeError, match=rf"needs \w*hidden.* as a sequence of widths.*got {re.escape(repr(widths))}"):
        build(widths)
    with pytest.raises(ValueError, match=r"needs every width in \w*hidden.* to be at least 1, got \(8, 0\)"):
        build((8, 0))


@pytest.mark.parametrize(("shape", "given"), [(3, (4, 1)), (3, (3, 4)), ((2, 3), (5, 3))])
def test_normalization_does_not_broadcast(shape, given):
    with pytest.raises(ValueError, match=r"was given features of shape"):
        RunningNorm(shape)(torch.zeros(given))
