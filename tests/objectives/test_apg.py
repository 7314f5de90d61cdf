"""APGLoss on rollouts of DifferentiableCollector: published numbers, numbers by hand, finite differences."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType
from torchrl.modules import IndependentNormal, ProbabilisticActor

from edenrl.collectors import DifferentiableCollector
from edenrl.envs import CartPoleSwingUp, PointMass
from edenrl.modules import gaussian_actor
from edenrl.objectives import APGLoss

GOLDEN = "apg"
RETURNS, GRADIENTS = dict(rtol=1e-5, atol=1e-5), dict(rtol=1e-4, atol=1e-6)


class Scripted(EnvBase):
    """A simulator given as a function, with the ends of its episodes and the states after them written down."""

    def __init__(self, initial, dynamics, actions, dones=None, restarts=None):
        num_envs, width = initial.shape
        super().__init__(batch_size=[num_envs])
        self.initial, self.dynamics = initial, dynamics
        self.dones, self.restarts, self.time, self.state = dones, restarts, 0, initial
        self.observation_spec = Composite(
            observation=Unbounded((num_envs, width), dtype=initial.dtype), shape=(num_envs,)
        )
        self.action_spec = Unbounded((num_envs, actions), dtype=initial.dtype)
        self.reward_spec = Unbounded((num_envs, 1), dtype=initial.dtype)
        flag = Binary(1, shape=(num_envs, 1), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(num_envs,))

    def _set_seed(self, seed):
        pass

    def _observe(self, done):
        return TensorDict(
            observation=self.state.clone(),
            done=done,
            terminated=done.clone(),
            truncated=torch.zeros_like(done),
            batch_size=self.batch_size,
        )

    def _reset(self, tensordict=None):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            self.time, self.state = 0, self.initial
        else:
            self.state = torch.where(mask, self.restarts[self.time - 1], self.state)
        return self._observe(torch.zeros(*self.batch_size, 1, dtype=torch.bool))

    def _step(self, tensordict):
        self.state, reward = self.dynamics(self.state, tensordict["action"])
        done = torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        if self.dones is not None:
            done = self.dones[self.time, :, None].clone()
        self.time += 1
        return self._observe(done).set("reward", reward)

    def detach_state(self):
        self.state = self.state.detach().clone()


def linear_actor(linear):
    """Mean from a linear layer, standard deviation 1; played by its mean in these tests."""
    head = TensorDictModule(
        lambda s: (linear(s), torch.ones_like(linear(s))), in_keys=["observation"], out_keys=["loc", "scale"]
    )
    head.linear = linear
    return ProbabilisticActor(head, in_keys=["loc", "scale"], distribution_class=IndependentNormal)


def collect(env, actor, steps, **kwargs):
    return DifferentiableCollector(env, actor, steps, exploration_type=ExplorationType.DETERMINISTIC, **kwargs)


def integrator(state, action, dt):
    a = action.tanh()
    v = state[:, 2:] + dt * a
    p = state[:, :2] + dt * v
    cost = p.square().sum(-1) + 0.1 * v.square().sum(-1) + 0.01 * a.square().sum(-1)
    return torch.cat([p, v], -1), -cost.unsqueeze(-1)


@pytest.fixture
def golden_actor(golden):
    linear = nn.Linear(4, 2)
    with torch.no_grad():
        linear.weight.copy_(golden["policy.weight"])
        linear.bias.copy_(golden["policy.bias"])
    return linear_actor(linear)


def golden_env(golden):
    dynamics = partial(integrator, dt=golden["dt"])
    actions = golden["pre_squash_actions"].shape[-1]
    return Scripted(golden["initial_state"], dynamics, actions, golden["dones"], golden["reset_state"])


def golden_gradient(golden, actor, case, collector, segments=1, **loss_options):
    """Accumulates the update's gradient, compares it, and returns the segments and the loss of each."""
    loss = APGLoss(actor, gamma=float(golden["gamma"]), **loss_options)
    kept, losses = [], []
    for segment in collector.update(segments):
        if case == "complete_scaled":
            segment["objective_scale"] = golden["objective_scale"][:, None, None].expand(*segment.shape, 1)
        out = loss(segment)
        out["loss_objective"].backward()
        kept.append(segment)
        losses.append(out.detach())
    linear = actor.module[0].linear
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(linear, name).grad, golden[f"grad.{case}.{name}"], **GRADIENTS)
    return kept, losses


def test_golden_rollout_is_reproduced(golden, golden_actor):
    collector = collect(golden_env(golden), golden_actor, len(golden["rewards"]))
    (data,), _ = golden_gradient(golden, golden_actor, "one_segment", collector)
    for key, name in (("observation", "observations"), ("action", "pre_squash_actions")):
        torch.testing.assert_close(data[key].transpose(0, 1), golden[name], **RETURNS)
    torch.testing.assert_close(data["next", "reward"].squeeze(-1).T, golden["rewards"], **RETURNS)
    torch.testing.assert_close(data["action"].tanh().transpose(0, 1), golden["accelerations"], **RETURNS)
    assert torch.equal(data["next", "done"].squeeze(-1).T, golden["dones"])
    last = torch.where(golden["dones"][-1, :, None], golden["reset_state"][-1], data["next", "observation"][:, -1])
    torch.testing.assert_close(last, golden["final_observation"], **RETURNS)


@pytest.mark.parametrize(
    ("case", "mode"), [("one_segment", "segment"), ("complete", "complete"), ("complete_scaled", "complete")]
)
def test_golden_returns_and_gradients(golden, golden_actor, case, mode):
    collector = collect(golden_env(golden), golden_actor, len(golden["rewards"]))
    (data,), (out,) = golden_gradient(golden, golden_actor, case, collector, mode=mode)
    expected = {"one_segment": "segmented", "complete": "complete", "complete_scaled": "complete_scaled"}[case]
    torch.testing.assert_close(out["loss_objective"], golden[f"loss.{expected}"], **RETURNS)
    torch.testing.assert_close(out["objective"], -golden[f"loss.{expected}"], **RETURNS)
    alive = golden["alive_mask"].float().mean() if mode == "complete" else torch.tensor(1.0)
    torch.testing.assert_close(out["alive_fraction"], alive)
    if case != "complete_scaled":
        with torch.no_grad():
            loss = APGLoss(golden_actor, gamma=float(golden["gamma"]), mode=mode, reduction="none")
            rows = loss(data)["loss_objective"]
        torch.testing.assert_close(-rows, golden[f"{expected}_return"], **RETURNS)


def test_golden_segments_carry_the_discount_and_cut_the_gradient(golden, golden_actor):
    collector = collect(golden_env(golden), golden_actor, int(golden["segment_length"]))
    segments, losses = golden_gradient(golden, golden_actor, "two_segments", collector, segments=2)
    each = torch.stack([out["loss_objective"] for out in losses])
    torch.testing.assert_close(each, golden["loss.two_segments"], **RETURNS)
    for name in ("loss.two_segments_total", "loss.segmented"):
        torch.testing.assert_close(each.sum(), golden[name], **RETURNS)
    # The discount after the first segment is the one the second starts with.
    started = golden["gamma"] ** segments[1]["elapsed"][:, 0, 0].float()
    torch.testing.assert_close(started, golden["two_segments.discount_after"][0], **RETURNS)


def test_golden_adjoint_clipping_within_a_rollout(golden, golden_actor):
    limit = float(golden["adjoint_clip.max_norm"])
    steps = len(golden["rewards"])
    collector = collect(golden_env(golden), golden_actor, steps, action_adjoint_max_norm=limit)
    golden_gradient(golden, golden_actor, "one_segment_adjoint_clip", collector)
    metrics = collector.metrics()
    expected = golden.under("adjoint_clip.")
    assert metrics["adjoint_rows"] == expected["rows"]
    assert metrics["adjoint_clipped_rows"] == expected["clipped_rows"]
    assert metrics["adjoint_nonfinite_rows"] == expected["nonfinite_rows"]
    torch.testing.assert_close(metrics["adjoint_norm_max"], expected["norm_max"], rtol=1e-5, atol=0)
    mean = expected["norm_sum"] / expected["finite_rows"]
    torch.testing.assert_close(metrics["adjoint_norm_mean"], mean, rtol=1e-5, atol=0)
    assert collector.metrics() == {}


def scalar_actor():
    """a = k x with k = -1, in float64."""
    linear = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(linear.weight, -1.0)
    return linear_actor(linear), linear.weight


def drift(state, action):
    x = state + 0.1 * action
    return x, -x.square()


@pytest.mark.parametrize(("steps", "segments", "expected"), [(2, 1, -0.4716), (1, 2, -0.3258)])
def test_gradient_by_hand_with_and_without_a_cut(steps, segments, expected):
    # x' = x + 0.1 k x: J = -(1 + 0.1 k)^2 - (1 + 0.1 k)^4, at k = -1: dJ/dk = -0.2 * 0.9 - 0.4 * 0.9^3 = -0.4716.
    # With the state detached after each step: -0.2 * 0.9 * 1 - 0.2 * 0.9 * 0.81 = -0.3258.
    actor, k = scalar_actor()
    loss = APGLoss(actor, gamma=1.0)
    for segment in collect(Scripted(torch.ones(1, 1).double(), drift, 1), actor, steps).update(segments):
        loss(segment)["loss_objective"].backward()
    assert -k.grad.item() == pytest.approx(expected, abs=1e-12)


def test_a_reset_row_carries_no_gradient_into_the_finished_episode():
    # Row 0 runs on, row 1 is reset to x = 1 after its first step.
    actor, _ = scalar_actor()
    dones = torch.tensor([[False, True], [False, False]])
    env = Scripted(torch.ones(2, 1).double(), drift, 1, dones, torch.ones(2, 2, 1).double())
    seen = []
    watch = TensorDictModule(lambda a: (seen.append(a), a)[1], in_keys=["action"], out_keys=["action"])
    policy = nn.Sequential()
    policy.in_keys = actor.in_keys
    policy.forward = lambda td: watch(actor(td))
    for segment in collect(env, policy, 2):
        later = segment["next", "reward"][:, 1].sum()
        (gradient,) = torch.autograd.grad(later, seen[0], retain_graph=True)
        # Row 0: x2 = 0.81, d(-x2^2)/da0 = -2 * 0.81 * 0.09; row 1: exactly nothing.
        assert gradient[0].item() == pytest.approx(-0.1458, abs=1e-12) and gradient[1].item() == 0.0
        assert segment["elapsed"].squeeze(-1).tolist() == [[0, 1], [0, 0]]
        break


@pytest.mark.parametrize("horizon", [1, 5, 20])
@pytest.mark.parametrize("task", [PointMass, CartPoleSwingUp])
@pytest.mark.parametrize("mode", ["segment", "complete"])
def test_gradient_equals_finite_differences_of_the_return(task, mode, horizon):
    width, actions = {PointMass: (14, 2), CartPoleSwingUp: (5, 1)}[task]
    torch.manual_seed(1)
    linear = nn.Linear(width, actions).double()
    actor = linear_actor(linear)
    loss = APGLoss(actor, gamma=0.97, mode=mode).double()

    def objective(**options):
        env = task(3, seed=5, dtype=torch.float64, max_steps=13)
        return next(iter(collect(env, actor, horizon, **options)))

    out = loss(objective())
    gradient = torch.autograd.grad(out["loss_objective"], [linear.weight, linear.bias])
    direction = [torch.randn_like(p) for p in (linear.weight, linear.bias)]

    def moved(step):
        for p, d in zip((linear.weight, linear.bias), direction, strict=True):
            p.data += step * d
        return loss(objective())["objective"].item()

    eps = 1e-5
    above = moved(eps)
    below = moved(-2 * eps)
    moved(eps)
    slope = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True)).item()
    assert -slope == pytest.approx((above - below) / (2 * eps), rel=1e-6, abs=1e-9)
    assert abs(slope) > 1e-4


def test_complete_counts_nothing_after_the_first_done():
    def run(poison):
        def dynamics(state, action):
            x, reward = drift(state, action)
            # Row 1 is done after step 2; what it is paid from then on, NaN included, must not matter.
            return x, torch.where(torch.tensor([[False], [env.time >= 2]]), reward * poison, reward)

        actor, k = scalar_actor()
        dones = torch.tensor([[False, False], [False, True], [False, False], [False, True], [True, False]])
        env = Scripted(torch.ones(2, 1).double(), dynamics, 1, dones, torch.full((5, 2, 1), 3.0).double())
        for data in collect(env, actor, 5).update():
            out = APGLoss(actor, gamma=0.9, mode="complete")(data)
            out["loss_objective"].backward()
        return out["objective"].item(), k.grad.item(), out["alive_fraction"].item()

    # By hand, row 0: -sum_{t<5} 0.9^t 0.81^(t+1), row 1 the first two of these terms.
    objective = -sum(0.9**t * 0.81 ** (t + 1) for t in [0, 1, 2, 3, 4, 0, 1]) / 2
    assert run(1.0)[0] == pytest.approx(objective, abs=1e-12) and run(1.0)[2] == pytest.approx(0.7)
    assert run(1.0) == run(7.0)
    assert run(float("nan"))[0] == run(1.0)[0]


def rollout(actor, num_envs=4, steps=6, max_steps=4, **kwargs):
    env = PointMass(num_envs, seed=0, max_steps=max_steps)
    return next(iter(DifferentiableCollector(env, actor, steps, **kwargs)))


@pytest.mark.parametrize("mode", ["segment", "complete"])
def test_entropy_has_the_weights_of_the_reward(mode):
    actor = gaussian_actor({"observation": 14}, 2, hidden=(8,), init_std=0.5)
    data = rollout(actor)
    out = APGLoss(actor, gamma=0.9, entropy_coeff=0.3, mode=mode)(data)
    exact = 2 * (0.5 * np.log(2 * np.pi * np.e) + np.log(0.5))
    # Episodes of 4 steps in a rollout of 6: segment restarts the discount, complete stops there.
    weights = sum(0.9**t for t in ([0, 1, 2, 3, 0, 1] if mode == "segment" else [0, 1, 2, 3]))
    assert out["entropy"].item() == pytest.approx(exact, rel=1e-5)
    assert out["loss_entropy"].item() == pytest.approx(-0.3 * weights * exact, rel=1e-5)
    std = actor.module[0].module.std.raw_log_std
    (gradient,) = torch.autograd.grad(out["loss_entropy"], std)
    # d entropy / d log std = 1 per action, and the raw parameter is a log std up to its soft bounds.
    assert gradient.mean().item() == pytest.approx(-0.3 * weights, rel=0.05)


def test_squashed_policies_estimate_their_entropy():
    env = PointMass(256, seed=0)
    actor = gaussian_actor({"observation": 14}, env.action_spec_unbatched, hidden=(8,), squash=True, init_std=0.05)
    data = next(iter(DifferentiableCollector(env, actor, 4)))
    out = APGLoss(actor, entropy_coeff=0.1)(data)
    # Hardly squashed at this width: that of the Gaussian, less the mean log slope of the tanh, about 2 * 0.05^2.
    exact = 2 * (0.5 * np.log(2 * np.pi * np.e) + np.log(0.05))
    assert out["entropy"].item() == pytest.approx(exact, abs=0.1)
    out["loss_entropy"].backward()
    assert actor.module[0].module.std.raw_log_std.grad.abs().sum() > 0


@pytest.fixture
def actor():
    return gaussian_actor({"observation": 14}, 2, hidden=(8,))


def test_the_discount_is_computed_from_the_flags_when_the_data_does_not_carry_it(actor):
    data = rollout(actor)
    loss = APGLoss(actor)
    torch.testing.assert_close(loss(data.exclude("elapsed"))["loss_objective"], loss(data)["loss_objective"])


def test_data_without_a_graph_or_of_another_shape_is_refused(actor):
    data = rollout(actor)
    with pytest.raises(ValueError, match="carry no gradient: collect with DifferentiableCollector"):
        APGLoss(actor)(data.detach())
    with torch.no_grad():  # where nobody asks for a gradient there is nothing to miss
        assert APGLoss(actor)(data)["loss_objective"].isfinite()
    data["next", "reward"] = data["next", "reward"].expand(4, 6, 2)
    with pytest.raises(ValueError, match=r"expected shape \(4, 6, 1\), got \(4, 6, 2\)"):
        APGLoss(actor)(data)
    with pytest.raises(ValueError, match="probabilistic"):
        APGLoss(nn.Linear(2, 2))


def test_the_entropy_of_a_saturated_policy_is_that_of_its_own_samples():
    torch.manual_seed(0)
    actor = gaussian_actor({"observation": 3}, Bounded(-1.0, 1.0, (1,)), hidden=(8,), squash=True, init_std=0.5)
    with torch.no_grad():
        actor.module[0].module.mlp[-1].bias.fill_(15.0)
    data = TensorDict(observation=torch.zeros(1, 4000, 3), batch_size=[1, 4000])
    data["next"] = dict(reward=torch.zeros(1, 4000, 1, requires_grad=True), done=torch.zeros(1, 4000, 1).bool())
    # Far out the slope of the tanh is 4 exp(-2 x): the Gaussian's entropy, + log 4 - 2 * mean.
    expected = 0.5 * math.log(2 * math.pi * math.e * 0.5**2) + math.log(4) - 2 * 15.0
    assert APGLoss(actor)(data)["entropy"].item() == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("mode", ["segment", "complete"])
@pytest.mark.parametrize(("rows", "steps"), [(3, 0), (0, 4), (0, 0)])
def test_an_empty_rollout_is_refused(mode, rows, steps):
    actor = gaussian_actor({"observation": 14}, 2, hidden=(8,))
    end = dict(
        reward=torch.zeros(rows, steps, 1, requires_grad=True), done=torch.zeros(rows, steps, 1, dtype=torch.bool)
    )
    rollout = TensorDict(observation=torch.zeros(rows, steps, 14), next=end, batch_size=[rows, steps])
    with pytest.raises(ValueError, match=rf"no step: .*\[{rows}, {steps}\]"):
        APGLoss(actor, mode=mode)(rollout)
