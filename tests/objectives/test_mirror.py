"""MirrorLoss: numbers by hand, its gradient, and actors of several kinds."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded

from edenrl.modules import RMAActor, SignedPermutation, categorical_actor, gaussian_actor, rma_policy
from edenrl.objectives import MirrorLoss, make_loss
from edenrl.testing import check_loss_module

MIRRORS = {
    "observation": SignedPermutation([1, 0, 2], [1, 1, -1]),
    "action": SignedPermutation([1, 0], [-1, -1]),
    "unread": SignedPermutation([0]),
}


def linear_actor(weight):
    """An actor whose mean is ``weight @ observation``."""
    actor = gaussian_actor({"observation": 3}, 2, hidden=(), normalize=False)
    with torch.no_grad():
        actor.module[0].module.mlp[0].weight.copy_(torch.tensor(weight))
    return actor


def test_numbers_and_gradient_by_hand():
    actor = linear_actor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    data = TensorDict(observation=torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 0.0]]), batch_size=[2])
    # mu(o) = (o0, 0), M mu(o) = (0, -o0), mu(M o) = (o1, 0): differences (o1, o0), squares 4, 1 and 1, 0.
    out = MirrorLoss(actor, MIRRORS, symmetry_coeff=0.5)(data)
    assert out["loss_symmetry"].item() == pytest.approx(0.5 * (5 + 1) / 4)
    assert out["symmetry_error"].item() == pytest.approx(6 / 4)
    out["loss_symmetry"].backward()
    # d/dw00 of 0.5/4 * sum((w00 o1)^2 + (w00 o0)^2): both sides carry gradient.
    weight = actor.module[0].module.mlp[0].weight
    assert weight.grad[0, 0].item() == pytest.approx(0.5 / 4 * 2 * 6)


def test_a_symmetric_actor_has_no_loss():
    # Swapping the first two inputs, with the third negated, swaps and negates the outputs.
    actor = linear_actor([[1.0, -2.0, 3.0], [2.0, -1.0, 3.0]])
    data = TensorDict(observation=torch.randn(16, 3), batch_size=[16])
    assert MirrorLoss(actor, MIRRORS)(data)["loss_symmetry"] < 1e-12


@pytest.mark.parametrize("kind", ["gaussian", "squashed", "rma"])
def test_loss_contract(kind):
    torch.manual_seed(0)
    if kind == "rma":
        widths = dict(prop=2, priv_explicit=1, priv_latent=2, history=20)
        actor = rma_policy(RMAActor(widths, 2, hidden=(8,), priv_hidden=(4,)))
        names = {"prop": 2, "priv_explicit": 1, "priv_latent": 2}
        mirrors = {name: SignedPermutation(range(width), [-1] * width) for name, width in names.items()}
        mirrors["action"] = MIRRORS["action"]
        data = TensorDict({name: torch.randn(4, 5, width) for name, width in names.items()}, batch_size=[4, 5])
    else:
        box = Bounded(-1.0, 1.0, shape=(2,))
        actor = gaussian_actor({"observation": 3}, box, hidden=(8,), squash=kind == "squashed")
        mirrors, data = MIRRORS, TensorDict(observation=torch.randn(4, 5, 3), batch_size=[4, 5])
    check_loss_module(MirrorLoss(actor, mirrors), data)


def test_what_does_not_fit_is_refused():
    actor = gaussian_actor({"observation": 3}, 2)
    with pytest.raises(ValueError, match=r"needs a mirror for \['observation', 'action'\]; given are none"):
        MirrorLoss(actor, {})
    with pytest.raises(ValueError, match="needs a policy that writes 'loc'"):
        MirrorLoss(categorical_actor({"observation": 3}, 2), MIRRORS)
    for options in (dict(symmetry_coeff=-1.0), dict(reduction="max")):
        with pytest.raises(ValueError, match="MirrorLoss needs (symmetry_coeff >= 0|reduction 'mean')"):
            MirrorLoss(actor, MIRRORS, **options)


def test_by_name():
    assert type(make_loss("mirror", gaussian_actor({"observation": 3}, 2), MIRRORS)) is MirrorLoss
