"""MirrorLoss: numbers by hand, its gradient, and actors of several kinds."""

import pytest
import torch
from tensordict import TensorDict

from edenrl.modules import SignedPermutation, categorical_actor, gaussian_actor
from edenrl.objectives import MirrorLoss

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


def test_what_does_not_fit_is_refused():
    actor = gaussian_actor({"observation": 3}, 2)
    with pytest.raises(ValueError, match=r"needs a mirror for \['observation', 'action'\]; given are none"):
        MirrorLoss(actor, {})
    with pytest.raises(ValueError, match="needs a policy that writes 'loc'"):
        MirrorLoss(categorical_actor({"observation": 3}, 2), MIRRORS)
