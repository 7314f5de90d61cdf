from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded
from torchrl.modules import ProbabilisticActor

from edenrl.modules import MirrorAugmentation, SignedPermutation, check_mirror_widths, gaussian_actor, value_critic
from edenrl.objectives import HIMLoss, MirrorLoss, PPOLoss

# Two numbers that change places, and one that changes its sign.
MIRRORS = {"observation": SignedPermutation([1, 0, 2], [1, 1, -1]), "action": SignedPermutation([1, 0], [-1, -1])}


@pytest.fixture
def actor() -> ProbabilisticActor:
    return gaussian_actor({"observation": 3}, 2, hidden=(8,), normalize=False)


def batch(actor: ProbabilisticActor, *shape: int) -> TensorDict:
    data = TensorDict(
        observation=torch.randn(*shape, 3), next=dict(observation=torch.randn(*shape, 3)), batch_size=shape
    )
    data["advantage"], data["value_target"] = torch.randn(*shape, 1), torch.randn(*shape, 1)
    data["state_value"] = torch.randn(*shape, 1)
    with torch.no_grad():
        return actor(data)


def test_permutation_by_hand() -> None:
    mirror = SignedPermutation([2, 1, 0], [-1, 1, -1])
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    assert mirror(x).tolist() == [[-3.0, 2.0, -1.0], [-6.0, 5.0, -4.0]]
    assert mirror(x).dtype == torch.float64
    assert torch.equal(mirror(mirror(x)), x)
    assert mirror.state_dict() == {}


@pytest.mark.parametrize(
    ("index", "sign", "message"),
    [
        ([1, 2, 0], None, "Mirroring twice"),
        ([1, 0], [1, -1], "Mirroring twice"),
        ([0, 0], None, "each of 0..1 once"),
        ([0, 1], [1], "one .1 or -1 for each"),
        ([0], [0.5], "one .1 or -1 for each"),
    ],
)
def test_refuses_what_is_not_a_mirror(index: list[int], sign: list[float] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SignedPermutation(index, sign)


def test_refuses_another_width() -> None:
    with pytest.raises(ValueError, match=r"width 2 .* \(4, 3\)"):
        SignedPermutation([1, 0])(torch.zeros(4, 3))


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_the_second_half_is_the_mirror_of_the_first(actor: ProbabilisticActor, shape: tuple[int, ...]) -> None:
    data = batch(actor, *shape)
    before = data.clone()
    doubled = MirrorAugmentation(MIRRORS, actor)(data)
    assert (data == before).all()
    assert doubled.batch_size == (2 * shape[0], *shape[1:])
    original, mirrored = doubled[: shape[0]], doubled[shape[0] :]
    assert (original == data).all()
    o, a = data["observation"], data["action"]
    assert torch.equal(mirrored["observation"], torch.stack([o[..., 1], o[..., 0], -o[..., 2]], -1))
    assert torch.equal(mirrored["next", "observation"][..., 2], -data["next", "observation"][..., 2])
    assert torch.equal(mirrored["action"], torch.stack([-a[..., 1], -a[..., 0]], -1))
    for key in ("advantage", "value_target", "state_value", "action_log_prob"):
        assert torch.equal(mirrored[key], data[key])
    expected = actor.get_dist(TensorDict(observation=mirrored["observation"], batch_size=shape))
    torch.testing.assert_close(mirrored["loc"], expected.base_dist.loc)
    assert not torch.allclose(mirrored["loc"], data["loc"])


def test_the_loss_sees_the_importance_weight_of_mirrored_actions(actor: ProbabilisticActor) -> None:
    """With the networks that collected the data: the ratio is 1 and exp(log pi(Ma | Mo) - log pi(a | o)); KL is 0."""
    data = batch(actor, 16)
    doubled = MirrorAugmentation(MIRRORS, actor)(data)
    loss = PPOLoss(
        actor, value_critic({"observation": 3}, normalize=False), functional=False, normalize_advantage=False
    )
    out = loss(doubled)
    mirrored = doubled[16:]
    ratio = (actor.get_dist(mirrored).log_prob(mirrored["action"]) - data["action_log_prob"]).exp()
    torch.testing.assert_close(out["mean_ratio"], 0.5 * (1 + ratio.mean()))
    assert out["kl"].item() == pytest.approx(0.0, abs=1e-6)


def test_off_and_refusals(actor: ProbabilisticActor) -> None:
    data = batch(actor, 4)
    assert MirrorAugmentation(None, actor)(data) is data
    with pytest.raises(ValueError, match=r"mirror for \['observation', 'action'\].*publishes none"):
        MirrorAugmentation({}, actor)
    with pytest.raises(ValueError, match=r"mirror for \['critic'\]"):
        MirrorAugmentation(MIRRORS, actor, value_critic({"critic": 2}))


def test_log_probabilities_may_be_the_mirror_images_own(actor: ProbabilisticActor) -> None:
    torch.nn.init.ones_(actor.module[0].module.mlp[-1].weight[:1])
    data = batch(actor, 2, 3)
    doubled = MirrorAugmentation(MIRRORS, actor, log_prob="mirrored")(data)
    mirrored = doubled[2:]
    scale, difference = mirrored["scale"], mirrored["action"] - mirrored["loc"]
    expected = (-0.5 * (difference / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
    torch.testing.assert_close(mirrored["action_log_prob"], expected)
    assert torch.equal(doubled[:2]["action_log_prob"], data["action_log_prob"])
    assert not torch.allclose(mirrored["action_log_prob"], data["action_log_prob"], atol=1e-3)
    with pytest.raises(ValueError, match="'original' or 'mirrored', got 'fresh'"):
        MirrorAugmentation(MIRRORS, actor, log_prob="fresh")


@pytest.mark.parametrize("log_prob", ["original", "mirrored"])
def test_the_mirror_of_the_mirror_is_the_original(actor: ProbabilisticActor, log_prob: str) -> None:
    data = batch(actor, 4)
    augment = MirrorAugmentation(MIRRORS, actor, log_prob=log_prob)
    twice = augment(augment(data)[4:])[4:]
    for key in ("observation", "action", ("next", "observation"), "action_log_prob", "loc", "advantage"):
        torch.testing.assert_close(twice[key], data[key])


def test_a_function_of_vectors_becomes_a_mirror() -> None:
    def mirror(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[..., 1], x[..., 0], -x[..., 2]], -1)

    found = SignedPermutation.from_function(mirror, 3)
    assert found.index.tolist() == [1, 0, 2] and found.sign.tolist() == [1.0, 1.0, -1.0]
    x = torch.randn(4, 5, 3)
    assert torch.equal(found(x), mirror(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.roll(1, -1), r"Mirroring twice does not give back components \[0, 1, 2\]"),
        (lambda x: 2 * x, r"sign=\[2.0, 2.0, 2.0\]"),
        (lambda x: x.abs(), r"it maps \[-1.0, -1.5, -2.0\]"),
        (lambda x: x[..., :2], r"width 3 to \(2,\)"),
        (lambda x: torch.stack([x[..., 0]] * 3, -1), r"index=\[0, 0, 0\]"),
    ],
)
def test_a_function_that_is_no_mirror_is_refused(function: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SignedPermutation.from_function(function, 3)


@pytest.mark.parametrize("log_prob", ["original", "mirrored"])
def test_a_saturated_action_is_mirrored_before_the_tanh(log_prob: str) -> None:
    torch.manual_seed(1)
    actor = gaussian_actor({"observation": 3}, Bounded(-2.0, 2.0, (2,)), squash=True, hidden=(8,), normalize=False)
    network = actor.module[0].module
    with torch.no_grad():
        network.mlp[-1].weight.zero_()
        network.mlp[-1].bias.copy_(torch.tensor([15.0, -15.0]))  # equals its own mirror image
    data = batch(actor, 33)
    doubled = MirrorAugmentation(MIRRORS, actor, log_prob=log_prob)(data)
    sample = data["pre_squash_action"]
    assert torch.equal(doubled["pre_squash_action"][33:], torch.stack([-sample[:, 1], -sample[:, 0]], -1))
    torch.testing.assert_close(doubled["action"], 2 * doubled["pre_squash_action"].tanh())
    out = PPOLoss(actor, entropy_coeff=0.0)(doubled)
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-4)


def mirror(width: int) -> SignedPermutation:
    return SignedPermutation(range(width))


@pytest.mark.parametrize(("part", "width", "right"), [("observation", 4, 3), ("extra", 1, 2), ("action", 3, 2)])
def test_mirrors_of_other_widths_are_refused_at_construction(part: str, width: int, right: int) -> None:
    mirrors = {"observation": mirror(3), "extra": mirror(2), "action": mirror(2)}
    actor = gaussian_actor({"observation": 3}, 2, hidden=(8,))
    critic = value_critic({"observation": 3, "extra": 2}, hidden=(8,))
    MirrorAugmentation(mirrors, actor, critic)
    HIMLoss(actor, critic, mirrors=mirrors)
    wrong = {**mirrors, part: mirror(width)}
    message = f"mirror of '{part}' has {width} entries, and '{part}' has {right}"
    for build in (lambda: MirrorAugmentation(wrong, actor, critic), lambda: HIMLoss(actor, critic, mirrors=wrong)):
        with pytest.raises(ValueError, match=message):
            build()
    if part != "extra":
        with pytest.raises(ValueError, match=message):
            MirrorLoss(actor, wrong)
        with pytest.raises(ValueError, match=message):
            MirrorAugmentation(wrong, _squashed())


def _squashed() -> ProbabilisticActor:
    spec = Bounded(-torch.ones(2), torch.ones(2), (2,))
    return gaussian_actor({"observation": 3}, spec, squash=True, hidden=(8,))


@pytest.mark.parametrize("width", [1, 4, 7])
def test_a_mirror_of_another_width_is_refused_by_name(width: int) -> None:
    mirrors = {"policy": SignedPermutation(list(range(3))), "action": SignedPermutation(list(range(width)))}
    check_mirror_widths(mirrors, {"policy": 3, "action": width, "other": 9})
    with pytest.raises(ValueError, match=rf"mirror of 'action' has {width} entries, and 'action' has {width + 1}"):
        check_mirror_widths(mirrors, {"action": width + 1})
