"""The hybrid internal model against the published numbers of tests/golden/him.npz, and its layout by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded

from edenrl.modules import HIMActor, HIMEstimator, HIMLayout, HIMRolloutCheck, him_actor, sinkhorn, value_critic
from edenrl.optim import MuonAdamW

LAYOUT = HIMLayout(frame=10, frames=6, order="oldest_first")
CLOSE = dict(rtol=1e-5, atol=1e-5)


GOLDEN = "him"


def load(network: nn.Module, golden: Any, name: str) -> None:
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(golden[f"{name}{i}_weight"])
            layer.bias.copy_(golden[f"{name}{i}_bias"])


def golden_actor(golden: Any, order: Literal["oldest_first", "newest_first"] | None = None) -> HIMActor:
    frame, frames = int(golden["cfg_one_step_obs"]), int(golden["cfg_history"])
    published = "oldest_first" if golden["cfg_current_frame_is_last"] else "newest_first"
    layout = HIMLayout(frame=frame, frames=frames, order=order or published)
    actor = HIMActor(
        layout,
        golden["actor_mean"].shape[-1],
        hidden=golden["cfg_actor_hidden_dims"].tolist(),
        encoder_hidden=golden["cfg_encoder_hidden_dims"].tolist(),
        target_hidden=golden["cfg_target_hidden_dims"].tolist(),
        **{name: int(golden[f"cfg_{name}"]) for name in ("latent_dim", "num_prototypes", "target_skip_dim")},
    )
    load(actor.estimator.encoder, golden, "encoder")
    load(actor.estimator.target_encoder, golden, "target")
    load(actor.actor.mlp, golden, "actor")
    actor.estimator.prototypes.data.copy_(golden["prototypes_raw"])
    return actor


def test_estimates_targets_and_actions_match_the_published_ones(golden: Any) -> None:
    actor = golden_actor(golden)
    velocity, latent = actor.estimator(golden["obs_history"])
    torch.testing.assert_close(velocity, golden["velocity"], **CLOSE)
    torch.testing.assert_close(latent, golden["latent"], **CLOSE)
    assert torch.equal(actor.estimator.target_input(golden["next_critic_obs"]), golden["target_input"])
    torch.testing.assert_close(actor.estimator.target(golden["next_critic_obs"]), golden["target_latent"], **CLOSE)
    torch.testing.assert_close(actor(golden["obs_history"])[0], golden["actor_mean"], **CLOSE)
    torch.testing.assert_close(actor.estimator.unit_prototypes(), golden["prototypes"], **CLOSE)
    frame = int(golden["cfg_one_step_obs"])
    found = actor.estimator.layout.velocity_of(golden["next_critic_obs"])
    assert torch.equal(found, golden["next_critic_obs"][:, frame:])


def test_assignments_match_the_published_ones(golden: Any) -> None:
    for side in "st":
        found = sinkhorn(golden[f"score_{side}"], float(golden["cfg_sinkhorn_eps"]), int(golden["cfg_sinkhorn_iters"]))
        torch.testing.assert_close(found, golden[f"q_{side}"], **CLOSE)


def test_assignments_by_hand() -> None:
    """Two samples, two prototypes, weights 2 1 / 1 1: columns 2/3 1/2 / 1/3 1/2, then rows 4/7 3/7 / 2/5 3/5."""
    scores = torch.tensor([[2.0, 1.0], [1.0, 1.0]]).log()
    expected = torch.tensor([[4 / 7, 3 / 7], [2 / 5, 3 / 5]])
    torch.testing.assert_close(sinkhorn(scores, eps=1.0, iterations=1), expected)


@pytest.mark.parametrize("magnitude", [1.0, 50.0, 200.0])
@pytest.mark.parametrize("batch", [1, 64, 100_000])
def test_assignments_stay_finite_and_every_sample_has_weight_one(magnitude: float, batch: int) -> None:
    torch.manual_seed(0)
    scores = (torch.rand(batch, 16) * 2 - 1) * magnitude
    q = sinkhorn(scores)
    assert q.isfinite().all() and (q >= 0).all()
    torch.testing.assert_close(q.sum(1), torch.ones(batch), **CLOSE)
    # The first sample against float64, in which nothing is lost.
    torch.testing.assert_close(q[0], sinkhorn(scores.double())[0].float(), rtol=0, atol=2e-3)


def test_every_prototype_gets_its_share() -> None:
    torch.manual_seed(0)
    q = sinkhorn(torch.rand(64, 16), iterations=200)
    torch.testing.assert_close(q.sum(0), torch.full((16,), 4.0), rtol=0.01, atol=0)
    # With scores so large that almost every assignment is hard, the columns still approach their share.
    q = sinkhorn(torch.rand(64, 16) * 5, iterations=5000)
    torch.testing.assert_close(q.sum(0), torch.full((16,), 4.0), rtol=0.05, atol=0)


def test_actor_and_estimator_do_not_train_each_other() -> None:
    actor = HIMActor(LAYOUT, 4, hidden=(8,))
    actor(torch.randn(5, 60))[0].square().sum().backward()
    names = {name.split(".")[0] for name, p in actor.named_parameters() if p.grad is not None}
    assert names == {"actor"}
    actor.zero_grad()
    velocity, latent = actor.estimator(torch.randn(5, 60))
    (velocity.sum() + latent[:, 0].sum()).backward()
    names = {".".join(name.split(".")[:2]) for name, p in actor.named_parameters() if p.grad is not None}
    assert names == {"estimator.encoder"}


def test_both_orders_of_one_stack_give_one_action(golden: Any) -> None:
    newest = golden_actor(golden, "newest_first")
    reversed_stack = golden["obs_history"].unflatten(1, (int(golden["cfg_history"]), -1)).flip(1).flatten(1)
    torch.testing.assert_close(newest(reversed_stack)[0], golden["actor_mean"], **CLOSE)
    assert not torch.allclose(newest(golden["obs_history"])[0], golden["actor_mean"], atol=1e-2)


def env(history: int = 12, critic: int = 7, **attributes: Any) -> Any:
    spec = Composite(history=Unbounded((2, history)), critic=Unbounded((2, critic)), shape=(2,))
    return SimpleNamespace(observation_spec=spec, **attributes)


def test_the_velocity_is_found_by_name() -> None:
    critic = torch.arange(7.0)
    declared = {
        None: [4, 5, 6],
        (("frame", 4), ("linear_velocity", 3)): [4, 5, 6],
        (("linear_velocity", 3), ("frame", 4)): [0, 1, 2],
        (("gravity", 3), ("linear_velocity", 3), ("foot", 1)): [3, 4, 5],
    }
    for critic_layout, entries in declared.items():
        layout = HIMLayout.of(env(history_layout="newest_first", critic_layout=critic_layout))
        assert layout.velocity_of(critic).tolist() == entries
        assert layout.frame_of(critic).tolist() == [i for i in range(7) if i not in entries]
        estimator = HIMEstimator(layout, target_skip_dim=1)
        assert estimator.target_input(critic).tolist() == [*layout.frame_of(critic).tolist()[1:], *entries]


def test_layouts_that_do_not_fit_are_refused_with_the_numbers() -> None:
    order = {"history_layout": "oldest_first"}
    assert HIMLayout.of(env(**order)) == HIMLayout(4, 3, "oldest_first")
    assert HIMLayout.of(env(), order="newest_first") == HIMLayout(4, 3, "newest_first")
    for given, message in (
        (
            dict(history=13, **order),
            r"'history' has 13 entries and 'critic' 7: .* 4 entries, no multiple of which is 13",
        ),
        (dict(critic=3, **order), r"'critic' 3: .* 3 - 3 = 0 entries"),
        (dict(), "set history_layout to 'oldest_first'"),
        (dict(critic_layout=(("frame", 4), ("velocity", 3)), **order), r"frame 4, velocity 3; expected .* the 7 of"),
        (dict(critic_layout=(("frame", 5), ("linear_velocity", 3)), **order), r"add up to the 7 of 'critic'"),
    ):
        with pytest.raises(ValueError, match=message):
            HIMLayout.of(env(**given))
    with pytest.raises(ValueError, match="history_layout='newest_first' was given, but the environment declares 'old"):
        HIMLayout.of(env(**order), order="newest_first")
    with pytest.raises(ValueError, match="critic_observation"):
        HIMLayout.of(env(**order), critic="critic_observation")
    for wrong in (dict(order="sideways"), dict(frame=0), dict(velocity=5)):
        with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
            HIMLayout(**(dict(frame=4, frames=3, order="oldest_first") | wrong))
    with pytest.raises(ValueError, match="target_skip_dim=4 was given; .* less than the 4"):
        HIMEstimator(HIMLayout(4, 3, "oldest_first"), target_skip_dim=4)
    with pytest.raises(ValueError, match="has 61 entries; expected 6 frames of 10"):
        HIMActor(LAYOUT, 4)(torch.zeros(2, 61))


def rollout(noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Stacks of 3 frames, oldest first, and the critic's, from a random walk [8 robots, 12 steps]."""
    torch.manual_seed(0)
    walk = torch.randn(8, 14, 4).cumsum(1)
    history = torch.cat([walk[:, i : i + 12] for i in range(3)], -1)
    return history + noise * torch.randn_like(history), torch.cat([walk[:, 2:], torch.randn(8, 12, 3)], -1)


def test_a_rollout_shows_whether_the_order_is_declared_right() -> None:
    history, critic = rollout()
    right, wrong = (HIMLayout(4, 3, order) for order in ("oldest_first", "newest_first"))
    assert right.check(history, critic) and right.check(*rollout(noise=0.1))
    # Right after a reset all frames are the current one: nothing is shown yet, whatever is declared.
    frame = critic[..., :4]
    assert not right.check(frame.repeat(1, 1, 3), critic) and not wrong.check(frame.repeat(1, 1, 3), critic)
    assert HIMLayout(4, 1, "newest_first").check(frame, critic)
    with pytest.raises(ValueError, match="declared newest_first, .* closest to frame 2 of 3, not to frame 0"):
        wrong.check(history, critic)
    wrong.check(history.unflatten(-1, (3, 4)).flip(-2).flatten(-2), critic)
    with pytest.raises(ValueError, match="current frame of the history is not the critic's"):
        right.check(*rollout(noise=3.0))
    with pytest.raises(ValueError):  # the velocity first, but declared last
        right.check(history, critic.roll(3, -1))


def stacked(frames: Tensor, missing: Tensor | None = None) -> TensorDict:
    """Stacks of the last two frames ``[N, T, 4]`` of ``[N, T + 1, 2]``."""
    history, critic = torch.cat([frames[:, :-1], frames[:, 1:]], -1), torch.cat([frames[:, 1:], frames[:, 1:, :1]], -1)
    critic = torch.cat([critic, torch.zeros_like(critic[..., :2])], -1)
    data = TensorDict(history=history, critic=critic, next={}, batch_size=history.shape[:2])
    if missing is not None:
        data["next", "final_obs_missing"] = missing
    return data


@pytest.mark.parametrize(("rows", "steps", "count"), [(3, 4, 1), (8, 2, 5)])
def test_rows_without_their_last_observation_are_refused_or_accepted(rows: int, steps: int, count: int) -> None:
    torch.manual_seed(rows)
    frames, missing = torch.randn(rows, steps + 1, 2), torch.zeros(rows, steps, 1, dtype=torch.bool)
    layout = HIMLayout(frame=2, frames=2, order="oldest_first")
    check, accepting = HIMRolloutCheck(layout), HIMRolloutCheck(layout, accept_missing_final_observations=True)
    check(stacked(frames))
    check(stacked(frames, missing))
    missing.view(-1)[torch.randperm(rows * steps)[:count]] = True
    with pytest.raises(ValueError, match=f"does not give the last observation of {count} episodes"):
        check(stacked(frames, missing))
    accepting(stacked(frames, missing))


def test_a_rollout_is_compared_with_the_layout_until_it_proves_something() -> None:
    torch.manual_seed(0)
    still, moving = torch.ones(4, 3, 2), torch.randn(4, 6, 2)
    wrong = HIMRolloutCheck(HIMLayout(frame=2, frames=2, order="newest_first"))
    wrong(stacked(still))
    with pytest.raises(ValueError, match="declared newest_first"):
        wrong(stacked(moving))
    right = HIMRolloutCheck(HIMLayout(frame=2, frames=2, order="oldest_first"))
    right(stacked(moving))
    swapped = stacked(moving)
    swapped["history"] = swapped["history"].flip(-1)
    right(swapped)  # it was shown already


def test_muon_trains_hidden_weights_and_adamw_the_rest() -> None:
    actor, critic = him_actor(LAYOUT, 4, hidden=(32, 16)), value_critic({"critic": 13}, normalize=False)
    optimizer = MuonAdamW([actor, critic], lr=1e-3)
    muon, adamw = optimizer.partition["muon"], optimizer.partition["adamw"]
    names = [f"{i}.{name}" for i, net in enumerate((actor, critic)) for name, _ in net.named_parameters()]
    assert sorted([*muon, *adamw]) == sorted(names)
    assert not any("prototypes" in name or "std" in name or "bias" in name for name in muon)
    assert any("prototypes" in name for name in adamw)


def test_the_start_value_of_prototypes_is_on_the_sphere() -> None:
    prototypes = HIMEstimator(LAYOUT, num_prototypes=9, latent_dim=5).prototypes
    assert prototypes.shape == (9, 5)
    torch.testing.assert_close(prototypes.norm(dim=1), torch.ones(9))
    assert math.isclose(float(prototypes.detach().mean()), 0.0, abs_tol=0.3)
