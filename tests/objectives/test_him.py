"""The losses of HIM against the published numbers of tests/golden/him.npz, by hand, and against the contract."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchrl.collectors import Collector
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

from edenrl.modules import (
    GroupMLP,
    HIMActor,
    HIMEstimator,
    HIMLayout,
    MirrorAugmentation,
    SignedPermutation,
    gaussian_actor,
    him_actor,
    value_critic,
)
from edenrl.objectives import GAE, HIMEstimatorLoss, HIMLoss, PPOLoss
from edenrl.optim import GradientStep

LAYOUT = HIMLayout(frame=10, frames=6, order="oldest_first")
CLOSE = dict(rtol=1e-5, atol=1e-5)
GRADIENT = dict(rtol=1e-4, atol=1e-5)


GOLDEN = "him"


def layers(network: nn.Module) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]


def load(network: nn.Module, golden: Any, name: str) -> None:
    with torch.no_grad():
        for i, layer in enumerate(layers(network)):
            layer.weight.copy_(golden[f"{name}{i}_weight"])
            layer.bias.copy_(golden[f"{name}{i}_bias"])


def networks(golden: Any) -> tuple[HIMActor, ProbabilisticActor, ValueOperator]:
    frame, frames = int(golden["cfg_one_step_obs"]), int(golden["cfg_history"])
    names = dict(hidden="actor", encoder_hidden="encoder", target_hidden="target")
    sizes = {ours: golden[f"cfg_{theirs}_hidden_dims"].tolist() for ours, theirs in names.items()}
    sizes |= {name: int(golden[f"cfg_{name}"]) for name in ("latent_dim", "num_prototypes", "target_skip_dim")}
    actor = him_actor(HIMLayout(frame, frames, "oldest_first"), golden["actor_mean"].shape[-1], **sizes)
    net = actor.module[0].module
    hidden = golden["cfg_critic_hidden_dims"].tolist()
    critic = ValueOperator(GroupMLP(frame + 3, 1, hidden=hidden, normalize=False), in_keys=["critic"])
    load(net.estimator.encoder, golden, "encoder")
    load(net.estimator.target_encoder, golden, "target")
    load(net.actor.mlp, golden, "actor")
    load(critic, golden, "critic")
    net.estimator.prototypes.data.copy_(golden["prototypes_raw"])
    return net, actor, critic


def golden_mirrors(golden: Any) -> dict[str, SignedPermutation]:
    perm, sign = golden["mirror_obs_perm"].tolist(), golden["mirror_obs_sign"].tolist()
    frames = int(golden["cfg_history"])
    return {
        "history": SignedPermutation([len(perm) * t + i for t in range(frames) for i in perm], sign * frames),
        "critic": SignedPermutation(golden["mirror_critic_perm"].tolist(), golden["mirror_critic_sign"].tolist()),
        "action": SignedPermutation(golden["mirror_action_perm"].tolist(), golden["mirror_action_sign"].tolist()),
    }


def batch(actor: nn.Module, critic: nn.Module, *shape: int, frame: int = 10, frames: int = 6) -> TensorDict:
    data = TensorDict(
        history=torch.randn(*shape, frames * frame),
        critic=torch.randn(*shape, frame + 3),
        next=dict(critic=torch.randn(*shape, frame + 3)),
        batch_size=shape,
    )
    with torch.no_grad():
        data = critic(actor(data))
    data["advantage"], data["value_target"] = torch.randn(*shape, 1), torch.randn(*shape, 1)
    return data


def test_estimator_losses_and_gradients_match_the_published_ones(golden: Any) -> None:
    net, _, _ = networks(golden)
    settings = dict(temperature="temperature", sinkhorn_eps="sinkhorn_eps", sinkhorn_iterations="sinkhorn_iters")
    loss = HIMEstimatorLoss(net.estimator, **{ours: golden[f"cfg_{name}"].item() for ours, name in settings.items()})
    data = TensorDict(
        history=golden["obs_history"],
        next=dict(critic=golden["next_critic_obs"]),
        batch_size=[len(golden["obs_history"])],
    )
    out = loss(data)
    torch.testing.assert_close(out["loss_swap"], golden["loss_swap"], **CLOSE)
    torch.testing.assert_close(out["loss_estimation"], golden["loss_estimation"], **CLOSE)
    (out["loss_swap"] + out["loss_estimation"]).backward()
    for name, network in (("encoder", net.estimator.encoder), ("target", net.estimator.target_encoder)):
        for i, layer in enumerate(layers(network)):
            torch.testing.assert_close(layer.weight.grad, golden[f"grad_{name}{i}_weight"], **GRADIENT)
            torch.testing.assert_close(layer.bias.grad, golden[f"grad_{name}{i}_bias"], **GRADIENT)
    torch.testing.assert_close(net.estimator.prototypes.grad, golden["grad_prototypes"], **GRADIENT)
    torch.testing.assert_close(net.estimator.prototypes.data, golden["prototypes"], **CLOSE)
    parameters = loss.parameter_groups()["estimator"]
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    torch.testing.assert_close(norm, golden["grad_norm"], **GRADIENT)
    assert all(p.grad is None for p in net.actor.parameters())


def test_the_step_clips_the_estimator_at_its_own_norm(golden: Any) -> None:
    net, _, _ = networks(golden)
    loss = HIMEstimatorLoss(net.estimator)
    data = TensorDict(
        history=golden["obs_history"],
        next=dict(critic=golden["next_critic_obs"]),
        batch_size=[len(golden["obs_history"])],
    )
    limit = float(golden["grad_norm"]) / 2
    before = {p: p.detach().clone() for p in loss.parameters()}
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=1.0), max_grad_norm=limit)
    metrics = step(loss(data))
    torch.testing.assert_close(metrics["grad_norm_estimator"], golden["grad_norm"], **GRADIENT)
    before[net.estimator.prototypes] = golden["prototypes"]
    moved = torch.stack([(p.detach() - old).norm() for p, old in before.items()]).norm()
    assert float(moved) == pytest.approx(limit, rel=1e-4)


@pytest.mark.parametrize("functional", [True, False])
def test_symmetry_losses_and_gradients_match_the_published_ones(golden: Any, functional: bool) -> None:
    net, actor, critic = networks(golden)
    scale = float(golden["cfg_mirror_scale"])
    loss = HIMLoss(
        actor, critic, mirrors=golden_mirrors(golden), symmetry_scale=scale, functional=functional, entropy_coeff=0.0
    )
    data = TensorDict(
        history=golden["obs_history"], critic=golden["critic_obs"], batch_size=[len(golden["obs_history"])]
    )
    with torch.no_grad():
        data = critic(actor(data))
    torch.testing.assert_close(data["loc"], golden["actor_mean"], **CLOSE)
    data["advantage"] = data["value_target"] = torch.zeros(len(data), 1)
    out = loss(data)
    torch.testing.assert_close(out["loss_actor_symmetry"], golden["loss_mirror_actor"], **CLOSE)
    torch.testing.assert_close(out["loss_critic_symmetry"], golden["loss_mirror_critic"], **CLOSE)
    (out["loss_actor_symmetry"] + out["loss_critic_symmetry"]).backward()
    for name, network, prefix in (
        ("actor", net.actor.mlp, "grad_mirror_actor_bothsides_"),
        ("critic", critic, "grad_mirror_critic_"),
    ):
        for i, layer in enumerate(layers(network)):
            torch.testing.assert_close(layer.weight.grad, golden[f"{prefix}{name}{i}_weight"], **GRADIENT)
            torch.testing.assert_close(layer.bias.grad, golden[f"{prefix}{name}{i}_bias"], **GRADIENT)
    assert all(p.grad is None for p in net.estimator.parameters())


def test_on_data_with_its_mirror_the_gradient_is_twice_the_published_one(golden: Any) -> None:
    """There it does not matter that the published gradient holds M mu(o) constant, up to the factor."""
    net, actor, critic = networks(golden)
    mirrors = golden_mirrors(golden)

    def held(o: Tensor) -> Tensor:
        return (net(mirrors["history"](o))[0] - mirrors["action"](net(o)[0]).detach()).square().sum(-1).mean()

    (golden["cfg_mirror_scale"] * held(golden["obs_history"])).backward()
    for i, layer in enumerate(layers(net.actor.mlp)):
        prefix = f"grad_mirror_actor_targetdetached_actor{i}"
        torch.testing.assert_close(layer.weight.grad, golden[f"{prefix}_weight"], **GRADIENT)
        torch.testing.assert_close(layer.bias.grad, golden[f"{prefix}_bias"], **GRADIENT)
    o = torch.cat([golden["obs_history"], mirrors["history"](golden["obs_history"])])
    expected = torch.autograd.grad(2 * held(o), list(net.actor.mlp.parameters()))
    data = TensorDict(history=o, critic=golden["critic_obs"].repeat(2, 1), batch_size=[len(o)])
    with torch.no_grad():
        data = critic(actor(data))
    data["advantage"] = data["value_target"] = torch.zeros(len(o), 1)
    loss = HIMLoss(actor, critic, mirrors=mirrors, functional=False)(data)["loss_actor_symmetry"]
    for found, wanted in zip(torch.autograd.grad(loss, list(net.actor.mlp.parameters())), expected, strict=True):
        torch.testing.assert_close(found, wanted, **GRADIENT)


def test_mirrored_data_matches_the_published_ones(golden: Any) -> None:
    net, actor, critic = networks(golden)
    data = TensorDict(
        history=golden["obs_history"], critic=golden["critic_obs"], batch_size=[len(golden["obs_history"])]
    )
    data = actor(data).detach()
    doubled = MirrorAugmentation(golden_mirrors(golden), actor, critic, log_prob="mirrored")(data)
    assert len(doubled) == 2 * len(data)
    mirrored = critic(doubled[len(data) :])
    torch.testing.assert_close(critic(data)["state_value"], golden["value"], **CLOSE)
    torch.testing.assert_close(mirrored["history"], golden["mirrored_obs_history"])
    torch.testing.assert_close(mirrored["critic"], golden["mirrored_critic_obs"])
    torch.testing.assert_close(mirrored["loc"], golden["actor_mean_mirrored_obs"], **CLOSE)
    torch.testing.assert_close(mirrored["state_value"], golden["value_mirrored_obs"], **CLOSE)
    expected = actor.get_dist(mirrored).log_prob(mirrored["action"])
    torch.testing.assert_close(mirrored["action_log_prob"], expected)


@pytest.mark.parametrize("time_outs", [False, True])
def test_mirrored_returns_match_the_published_ones(golden: Any, time_outs: bool) -> None:
    """The observation is a pair (value, value of the mirror image): a mirror exchanges them, the critic reads one."""
    o = torch.stack([golden["ret_values"].T, golden["ret_values_mirror"].T], -1)
    last = golden["ret_last_values"][:, None, None].expand(-1, 1, 2)  # the published one is shared by both
    done = golden["ret_dones"].T.unsqueeze(-1)
    truncated = golden["ret_time_outs"].T.unsqueeze(-1) if time_outs else torch.zeros_like(done)
    actor = gaussian_actor({"o": 2}, 1, hidden=(4,), normalize=False)
    following = dict(
        o=torch.cat([o[:, 1:], last], 1),
        reward=golden["ret_rewards"].T.unsqueeze(-1),
        done=done,
        truncated=truncated,
        terminated=done & ~truncated,
    )
    rollout = actor(TensorDict(o=o, next=following, batch_size=o.shape[:2])).detach()
    envs, steps = rollout.shape
    critic = TensorDictModule(nn.Linear(2, 1, bias=False), in_keys=["o"], out_keys=["state_value"])
    critic.module.weight.data.copy_(torch.tensor([[1.0, 0.0]]))
    mirrors = {"o": SignedPermutation([1, 0]), "action": SignedPermutation([0], [-1])}
    doubled = MirrorAugmentation(mirrors, actor, critic, log_prob="mirrored")(rollout)
    assert doubled.batch_size == (2 * envs, steps)
    for key in ("reward", "done", "terminated", "truncated"):
        assert torch.equal(doubled["next", key][envs:], rollout["next", key])
    # The published time-outs start from the value of the step itself, as where the last observation is hidden.
    gae = GAE(
        gamma=float(golden["cfg_gamma"]), lmbda=float(golden["cfg_lam"]), value_network=critic, average_gae=True,
        auto_reset_env=True,
    )  # fmt: skip
    gae(doubled)
    which = "_timeout" if time_outs else ""
    for key, name in (("value_target", "ret_returns"), ("advantage", "ret_advantages")):
        found = doubled[key].squeeze(-1).unflatten(0, (2, envs)).permute(2, 0, 1)
        torch.testing.assert_close(found, golden[f"{name}{which}"], **CLOSE)


def test_a_final_observation_that_is_known_is_what_both_halves_learn_from() -> None:
    """gamma 0.9, lambda 0: the target is 1 + 0.9 V(last), of the observation and of its own mirror image."""
    actor = gaussian_actor({"o": 2}, 1, hidden=(4,), normalize=False)
    critic = TensorDictModule(nn.Linear(2, 1, bias=False), in_keys=["o"], out_keys=["state_value"])
    critic.module.weight.data.copy_(torch.tensor([[1.0, 0.0]]))
    yes, no = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, 1, dtype=torch.bool)
    last = torch.tensor([[[2.0, 5.0]]])
    following = dict(o=last, reward=torch.ones(1, 1, 1), done=yes, truncated=yes, terminated=no)
    rollout = actor(TensorDict(o=torch.zeros(1, 1, 2), next=following, batch_size=[1, 1])).detach()
    mirrors = {"o": SignedPermutation([1, 0]), "action": SignedPermutation([0], [-1])}
    doubled = GAE(gamma=0.9, lmbda=0.0, value_network=critic)(MirrorAugmentation(mirrors, actor, critic)(rollout))
    assert doubled["value_target"].flatten().tolist() == pytest.approx([1 + 0.9 * 2, 1 + 0.9 * 5])


def test_uniform_scores_give_log_k_over_k() -> None:
    estimator = HIMEstimator(LAYOUT, num_prototypes=8, latent_dim=4)
    for p in [*layers(estimator.encoder)[-1:], *layers(estimator.target_encoder)[-1:]]:
        nn.init.zeros_(p.weight)  # latents of length 0 score 0 everywhere
    data = TensorDict(history=torch.randn(16, 60), next=dict(critic=torch.randn(16, 13)), batch_size=[16])
    out = HIMEstimatorLoss(estimator)(data)
    assert out["loss_swap"].item() == pytest.approx(math.log(8) / 8, rel=1e-5)
    assert float(out["prototype_entropy"]) == 0.0 and float(out["latent_variance"]) == pytest.approx(0.0, abs=1e-6)


def test_eight_clusters_are_told_apart() -> None:
    torch.manual_seed(0)
    layout = HIMLayout(frame=8, frames=1, order="oldest_first")
    estimator = HIMEstimator(
        layout, encoder_hidden=(32,), target_hidden=(32,), num_prototypes=8, latent_dim=8, target_skip_dim=0
    )
    loss = HIMEstimatorLoss(estimator, temperature=0.1)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    step, outs = GradientStep(loss, optimizer, max_grad_norm=10.0), []
    centres = 3 * torch.eye(8)
    for _ in range(150):
        frames = centres[torch.arange(64) % 8] + 0.1 * torch.randn(64, 8)
        critic = torch.cat([frames + 0.1 * torch.randn(64, 8), frames[:, :3]], -1)
        outs.append(loss(TensorDict(history=frames, next=dict(critic=critic), batch_size=[64])))
        step(outs[-1])
    first, last = outs[0], outs[-1]
    assert last["loss_swap"] < 0.4 * first["loss_swap"]
    assert last["loss_estimation"] < 0.1 * first["loss_estimation"]
    assert last["prototype_entropy"] > math.log(8) - 0.05 and last["latent_variance"] > 0.5
    torch.testing.assert_close(estimator.unit_prototypes().norm(dim=1), torch.ones(8))


def test_velocity_errors_by_hand() -> None:
    """True velocities (0 0 0) and (2 2 2), estimate (1 1 1): error 1, standard deviation 1."""
    layout = HIMLayout(frame=2, frames=1, order="oldest_first")
    estimator = HIMEstimator(layout, encoder_hidden=(), target_skip_dim=0)
    last = layers(estimator.encoder)[-1]
    nn.init.zeros_(last.weight)
    last.bias.data[:3] = 1.0
    critic = torch.cat([torch.zeros(2, 2), torch.tensor([[0.0], [2.0]]).expand(2, 3)], -1)
    data = TensorDict(history=torch.zeros(2, 2), next=dict(critic=critic), batch_size=[2])
    out = HIMEstimatorLoss(estimator)(data)
    assert float(out["velocity_error"]) == pytest.approx(1.0) and out["loss_estimation"].item() == pytest.approx(1.0)
    assert float(out["velocity_error_relative"]) == pytest.approx(1.0)
    critic[:, 2:] = torch.tensor([5.0, 6.0, 7.0])
    out = HIMEstimatorLoss(estimator, reduction="none")(data)
    assert out["loss_estimation"].tolist() == pytest.approx([(16 + 25 + 36) / 3] * 2)


def test_equivariance_error_by_hand() -> None:
    """mu = (x, 0): with M (x, y) = (y, x) in and out mu(M o) = (y, 0), M mu(o) = (0, x): unrelated, error 1."""
    net = nn.Linear(2, 2)
    actor = ProbabilisticActor(
        TensorDictModule(lambda o: (net(o), torch.ones_like(o)), in_keys=["o"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True,
        log_prob_key="action_log_prob",
    )  # fmt: skip
    mirrors = {"o": SignedPermutation([1, 0]), "action": SignedPermutation([1, 0])}
    loss = HIMLoss(actor, mirrors=mirrors, symmetry_scale=0.5, functional=False)
    for weight, error, symmetry in (([[1.0, 0], [0, 0]], 1.0, 0.5 * 5), ([[1.0, 0], [0, 1]], 0.0, 0.0)):
        net.weight.data, net.bias.data = torch.tensor(weight), torch.zeros(2)
        data = actor(TensorDict(o=torch.tensor([[1.0, 2.0]]), advantage=torch.ones(1, 1), batch_size=[1])).detach()
        out = loss(data)
        assert float(out["equivariance_error"]) == pytest.approx(error, abs=1e-6)
        assert out["loss_actor_symmetry"].item() == pytest.approx(symmetry)
        assert "loss_critic_symmetry" not in out.keys()


def small(**options: object) -> tuple[ProbabilisticActor, nn.Module, dict[str, SignedPermutation]]:
    torch.manual_seed(0)
    layout = HIMLayout(frame=4, frames=3, order="newest_first")
    actor = him_actor(layout, 2, hidden=(8,), encoder_hidden=(8,), target_hidden=(8,), latent_dim=4, num_prototypes=6)
    critic = value_critic({"critic": 7}, hidden=(8,), normalize=False)
    frame = ([0, 2, 1, 3], [1, -1, -1, 1])
    mirrors = {
        "history": SignedPermutation([4 * t + i for t in range(3) for i in frame[0]], frame[1] * 3),
        "critic": SignedPermutation([*frame[0], 4, 5, 6], [*frame[1], 1, -1, 1]),
        "action": SignedPermutation([1, 0], [-1, -1]),
    }
    return actor, critic, mirrors


def test_twice_the_data_costs_twice_the_update() -> None:
    """Counted in products, which no other work on the machine disturbs: doubling, values and five passes of losses."""
    actor, critic, mirrors = small()
    loss = HIMLoss(actor, critic, mirrors=mirrors, functional=False)
    estimator = HIMEstimatorLoss(actor.module[0].module.estimator)
    gae, double = GAE(gamma=0.9, lmbda=0.9, value_network=critic), MirrorAugmentation(mirrors, actor, critic)
    rollout, no = batch(actor, critic, 8, 6, frame=4, frames=3), torch.zeros(8, 6, 1, dtype=torch.bool)
    rollout["next"].update(dict(reward=torch.randn(8, 6, 1), done=no, terminated=no))

    def products(rollout: TensorDict, *change: MirrorAugmentation) -> int:
        with FlopCounterMode(display=False) as counter:
            for augment in change:
                rollout = augment(rollout)
            data = gae(rollout).reshape(-1)
            for _ in range(5):
                terms = [*loss(data).items(), *estimator(data).items()]
                torch.stack([value for name, value in terms if name.startswith("loss_")]).sum().backward()
        return counter.get_total_flops()

    assert 1.9 < products(rollout.clone(), double) / products(rollout.clone()) <= 2.2


def test_without_mirrors_it_is_ppo() -> None:
    actor, critic, _ = small()
    data = batch(actor, critic, 16, frame=4, frames=3)
    data["action_log_prob"] += 0.3 * torch.randn(16)
    ours, theirs = (kind(actor, critic, functional=False)(data) for kind in (HIMLoss, PPOLoss))
    assert set(ours.keys()) == set(theirs.keys())
    assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys())


def test_wrong_input_is_refused() -> None:
    actor, critic, mirrors = small()
    estimator = actor.module[0].module.estimator
    loss, data = HIMEstimatorLoss(estimator), batch(actor, critic, 5, frame=4, frames=3)
    with pytest.raises(ValueError, match=r"'history' has shape \(5, 8\); the estimator was built for \(5, 12\)"):
        loss(data.set("history", torch.zeros(5, 8)))
    with pytest.raises(ValueError, match=r"needs a mirror for \['critic', 'action'\]; mirrors has \['history'\]"):
        HIMLoss(actor, critic, mirrors={"history": mirrors["history"]})


class Script(EnvBase):
    """Two rows that count their steps from 0 and end at 3; the critic sees (t, -t) and a velocity (t, 10 t, 100 t)."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2])
        self.t = torch.zeros(2)
        self.observation_spec = Composite(history=Unbounded((2, 4)), critic=Unbounded((2, 5)), shape=(2,))
        self.action_spec, self.reward_spec = Unbounded((2, 1)), Unbounded((2, 1))
        flags = {name: Binary(1, (2, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(flags, shape=(2,))

    def _observe(self, done: Tensor) -> TensorDict:
        t = self.t[:, None]
        before = (t - 1).clamp_min(0)
        entries = dict(
            history=torch.cat([before, -before, t, -t], -1),
            critic=torch.cat([t, -t, t, 10 * t, 100 * t], -1),
            done=done,
            truncated=done.clone(),
            terminated=torch.zeros_like(done),
        )
        return TensorDict(entries, [2])

    def _reset(self, tensordict: TensorDict | None) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.t = torch.zeros(2) if mask is None else self.t.masked_fill(mask.squeeze(-1), 0.0)
        return self._observe(torch.zeros(2, 1, dtype=torch.bool))

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.t = self.t + 1
        return self._observe((self.t >= 3)[:, None]).set("reward", torch.zeros(2, 1))

    def _set_seed(self, seed: int | None) -> None:
        pass


def test_the_target_of_an_ended_episode_is_its_last_observation() -> None:
    layout = HIMLayout(frame=2, frames=2, order="oldest_first")
    actor = him_actor(layout, 1, hidden=(4,), encoder_hidden=(), target_skip_dim=0)
    rollout = next(iter(Collector(Script(), actor, frames_per_batch=14, total_frames=14)))
    assert rollout["next", "critic"][0, :, 2].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert rollout["critic"][0, :, 2].tolist() == [0, 1, 2, 0, 1, 2, 0]
    layout.check(rollout["history"], rollout["critic"])
    estimator = actor.module[0].module.estimator
    nn.init.zeros_(layers(estimator.encoder)[-1].weight)  # estimates 0
    loss = HIMEstimatorLoss(estimator, reduction="none")(rollout)["loss_estimation"]
    expected = [t * t * (1 + 100 + 10_000) / 3 for t in (1, 2, 3, 1, 2, 3, 1)]
    assert loss[0].tolist() == pytest.approx(expected) and torch.equal(loss[0], loss[1])
