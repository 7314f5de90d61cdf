from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv, VecGymEnvTransform
from torchrl.envs.utils import check_env_specs
from torchrl.modules import IndependentNormal, ProbabilisticActor

from edenrl.envs import (
    ActionMode,
    ClipAction,
    FillFinalObservation,
    FreshTensors,
    PointMass,
    action_box,
    action_saturation,
    bound_actions,
    make_gym_env,
    wrap_env,
)
from edenrl.objectives import GAE


class Echo(EnvBase):
    """Observes the action it received, in an asymmetric box; rewards 1 per step and ends after 3."""

    def __init__(self, num_envs: int = 2) -> None:
        super().__init__(batch_size=[num_envs])
        low, high = torch.tensor([-2.0, 0.0]), torch.tensor([5.0, 1.0])
        self.action_spec = Bounded(low.expand(num_envs, 2), high.expand(num_envs, 2), (num_envs, 2))
        self.observation_spec = Composite(observation=Unbounded((num_envs, 2)), shape=[num_envs])
        self.reward_spec = Unbounded((num_envs, 1))
        self.count = 0

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDict:
        self.count = 0
        return TensorDict({"observation": torch.zeros(*self.batch_size, 2)}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.count += 1
        done = torch.full((*self.batch_size, 1), self.count == 3)
        values = {"observation": tensordict["action"].clone(), "reward": torch.ones(*self.batch_size, 1)}
        return TensorDict({**values, "done": done, "terminated": done.clone()}, self.batch_size)


def gaussian_actor(mean: float) -> ProbabilisticActor:
    """A Gaussian of the given mean and standard deviation 1, whatever it observes."""
    layer = nn.Linear(2, 4)
    nn.init.zeros_(layer.weight)
    with torch.no_grad():
        # NormalParamExtractor maps 0 to a scale of 1.
        layer.bias.copy_(torch.tensor([mean, mean, 0.0, 0.0]))
    network = TensorDictModule(nn.Sequential(layer, NormalParamExtractor()), ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        network, ["loc", "scale"], ["action"], distribution_class=IndependentNormal, return_log_prob=True
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_clip_keeps_the_raw_sample_and_its_log_prob(sign: int) -> None:
    env = wrap_env(Echo(), action_mode="clip")
    collector = Collector(env, gaussian_actor(sign * 1e6), frames_per_batch=12, total_frames=12)
    data = next(iter(collector))
    collector.shutdown()
    bound = torch.tensor([5.0, 1.0] if sign > 0 else [-2.0, 0.0])
    assert (data["next", "observation"] == bound).all()
    assert (data["action"] * sign > 1e5).all()
    normal = torch.distributions.Normal(data["loc"], data["scale"])
    assert torch.allclose(data["action_log_prob"], normal.log_prob(data["action"]).sum(-1))
    box = action_box(env)
    assert box is not None
    assert action_saturation(data["action"], box).item() == 1.0


def test_a_squashed_action_that_ran_away_is_saturated() -> None:
    box = (torch.tensor([-1.0, -2.0]), torch.tensor([1.0, float("inf")]))
    mean = torch.tensor([[9.0, 0.0], [-9.0, -9.0], [0.5, 9.0], [3.0, 0.0]])
    action = torch.tanh(mean) * (1 - 1e-6)  # the factor that keeps log-probabilities finite
    action[1, 1] = -2.0  # at the only bound of an open side
    assert action_saturation(action, box).item() == pytest.approx(3 / 8)


def test_clip_leaves_the_inside_alone_and_clips_by_component() -> None:
    env = TransformedEnv(Echo(1), ClipAction())
    out = env.step(env.reset().set("action", torch.tensor([[-3.0, 0.25]])))
    assert out["next", "observation"].tolist() == [[-2.0, 0.25]]
    assert out["action"].tolist() == [[-3.0, 0.25]]
    assert isinstance(env.action_spec, Unbounded)
    assert env.action_spec.shape == (1, 2) and env.action_spec.dtype == torch.float32
    assert isinstance(env.base_env.action_spec, Bounded)


def test_gradient_passes_inside_the_box_only() -> None:
    env = TransformedEnv(PointMass(1, seed=0), ClipAction())
    action = torch.tensor([[0.5, 3.0]], requires_grad=True)
    env.step(env.reset().set("action", action))["next", "reward"].sum().backward()
    assert action.grad is not None
    assert action.grad[0, 0] != 0 and action.grad[0, 1] == 0


@pytest.mark.parametrize("build", [lambda: Echo(), lambda: PointMass(3, seed=0)])
def test_specs_of_the_stack(build: type) -> None:
    check_env_specs(TransformedEnv(build(), ClipAction()))
    check_env_specs(wrap_env(build(), reward_scale=0.5))


def test_return_is_raw_and_reward_is_scaled() -> None:
    env = wrap_env(Echo(), reward_scale=0.1)
    data = env.rollout(5, break_when_any_done=False)
    assert torch.allclose(data["next", "reward"], torch.tensor(0.1))
    assert data["next", "episode_reward"][0, :, 0].tolist() == [1.0, 2.0, 3.0, 1.0, 2.0]
    assert data["next", "step_count"][0, :, 0].tolist() == [1, 2, 3, 1, 2]
    assert [type(t) for t in wrap_env(Echo()).transform] == [FreshTensors, ClipAction, RewardSum, StepCounter]


def test_modes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squash = wrap_env(Echo(), action_mode="squash")
        # Nothing to clip and nothing to warn about without a box.
        for mode in ("clip", "none"):
            assert not any(isinstance(t, ClipAction) for t in wrap_env(discrete(), action_mode=mode).transform)
    assert not any(isinstance(t, ClipAction) for t in squash.transform)
    with pytest.warns(UserWarning, match=r"low=\[-2.0, 0.0\], high=\[5.0, 1.0\]") as record:
        env = wrap_env(Echo(1), action_mode="none")
    assert len(record) == 1
    out = env.step(env.reset().set("action", torch.tensor([[1e6, -9.0]])))
    assert out["next", "observation"].tolist() == [[1e6, -9.0]]


def discrete() -> EnvBase:
    return make_gym_env("CartPole-v1", 2, seed=0)


def test_action_box() -> None:
    box = action_box(wrap_env(Echo(3)))
    assert box is not None
    assert box[0].tolist() == [-2.0, 0.0] and box[1].tolist() == [5.0, 1.0]
    assert action_box(discrete()) is None
    unbounded = Echo()
    unbounded.action_spec = Unbounded((2, 2))
    assert action_box(unbounded) is None


class NoBox(Echo):
    """Echo that declares no action box."""

    def __init__(self, num_envs: int = 3) -> None:
        super().__init__(num_envs)
        self.action_spec = Unbounded((num_envs, 2))


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize(
    "build",
    [
        NoBox,
        lambda: TransformedEnv(NoBox(), RewardSum()),
        lambda: TransformedEnv(TransformedEnv(NoBox(), RewardSum()), StepCounter(), auto_unwrap=False),
        lambda: SerialEnv(2, lambda: NoBox(1)),
    ],
)
def test_a_box_for_those_that_declare_none(build: type, scale: float) -> None:
    env = build()
    _ = env.rollout(2)["action"]  # fills the caches of the specs
    assert bound_actions(env, scale) is env
    for stage in (env, wrap_env(env, action_mode="squash")):
        box = action_box(stage)
        assert box is not None
        assert box[0].tolist() == [-scale] * 2 and box[1].tolist() == [scale] * 2
        assert isinstance(stage.action_spec_unbatched, Bounded)
        assert stage.rollout(3)["action"].abs().max() <= scale
    check_env_specs(env)


@pytest.mark.parametrize("limit", [0.5, 3.0, 100])
@pytest.mark.parametrize("mode", ["clip", "squash", "none"])
@pytest.mark.parametrize("build", [Echo, NoBox])
def test_actions_are_clipped_by_number(build: type, mode: ActionMode, limit: float) -> None:
    """In every mode, with a box and without; the box of "clip" comes last. The data keeps the raw sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = wrap_env(build(3), action_mode=mode, clip_actions=limit)
    check_env_specs(env)
    data = env.rollout(10, gaussian_actor(2.0), break_when_any_done=False)
    normal = torch.distributions.Normal(data["loc"], data["scale"])
    assert torch.allclose(data["action_log_prob"], normal.log_prob(data["action"]).sum(-1))
    applied = data["action"].clamp(-limit, limit)
    bounds = torch.full((2,), -limit), torch.full((2,), float(limit))
    if build is Echo:
        low, high = torch.tensor([-2.0, 0.0]), torch.tensor([5.0, 1.0])
        applied = applied.clamp(low, high) if mode == "clip" else applied
        bounds = bounds[0].clamp(low, high), bounds[1].clamp(low, high)
    assert torch.equal(data["next", "observation"], applied)
    assert (data["action"].abs() > 0.5).any()
    box = action_box(env)
    assert box is not None
    assert torch.equal(torch.stack(box), torch.stack(bounds))


def test_a_numeric_clip_needs_a_positive_number_and_a_continuous_action() -> None:
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="limit="):
            ClipAction(limit=limit)
    with pytest.raises(ValueError, match=r"clip_actions=1.0 .* no continuous action"):
        wrap_env(discrete(), clip_actions=1.0)
    with pytest.raises(TypeError, match=r"ClipAction\(limit=1.0\)"):
        _ = TransformedEnv(discrete(), ClipAction(limit=1)).action_spec


def test_declared_boxes_and_discrete_actions_stay() -> None:
    half_open = Echo()
    half_open.action_spec = Bounded(-1.0, torch.inf, (2, 2))
    for env in (Echo(), half_open, discrete()):
        before = env.action_spec
        assert bound_actions(env, 3.0).action_spec == before
    with pytest.raises(ValueError, match="scale=0"):
        bound_actions(NoBox(), 0.0)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="'clamp'.*'clip', 'squash' or 'none'"):
        wrap_env(Echo(), action_mode="clamp")  # type: ignore[arg-type]
    for scale in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="reward_scale"):
            wrap_env(Echo(), reward_scale=scale)
    with pytest.raises(ValueError, match="one ClipAction per key"):
        ClipAction(["action", "other"])
    with pytest.raises(TypeError, match="bounded action spec"):
        _ = TransformedEnv(discrete(), ClipAction()).action_spec


def test_a_cloned_clip_takes_the_box_of_its_new_environment() -> None:
    first = TransformedEnv(PointMass(4), ClipAction())
    first.rand_step(first.reset())
    other = TransformedEnv(PointMass(2), first.transform.clone())
    action = torch.full((2, 2), 5.0)
    assert other.step(other.reset().set("action", action))["next", "observation"][:, 6:8].max() == 1.0


class HidesItsLastObservation(EnvBase):
    """Counts, and resets row i inside step after 3 + i steps; row 1 starts at 10. Reset as TorchRL's Isaac wrapper."""

    def __init__(self, nan_in_running_row: bool = False) -> None:
        super().__init__(batch_size=[2])
        self.observation_spec = Composite(
            policy=Unbounded((2, 2)), image=Unbounded((2, 4), dtype=torch.uint8), shape=[2]
        )
        self.action_spec = Unbounded((2, 1))
        self.reward_spec = Unbounded((2, 1))
        self.full_done_spec = Composite(
            {name: Binary(1, (2, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")}, shape=[2]
        )
        self.nan_in_running_row = nan_in_running_row

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _out(self) -> dict[str, torch.Tensor]:
        value = (self.count + torch.tensor([0, 10])).unsqueeze(-1)
        return {"policy": value.float().repeat(1, 2), "image": value.to(torch.uint8).repeat(1, 4)}

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None and not mask.all():
            return tensordict.exclude("_reset")  # type: ignore[union-attr]
        self.count = torch.zeros(2, dtype=torch.long)
        return TensorDict(self._out(), [2])

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.count = self.count + 1
        truncated = self.count >= torch.tensor([3, 4])
        self.count = self.count * ~truncated
        out = TensorDict({**self._out(), "reward": torch.ones(2, 1)}, [2])
        if self.nan_in_running_row:
            out["policy"][1, 1] = torch.nan
        flag = truncated.unsqueeze(-1)
        return out.update({"done": flag, "terminated": torch.zeros_like(flag), "truncated": flag.clone()})


def as_isaac_lab(**kwargs: bool) -> TransformedEnv:
    """What the registry builds for isaaclab:<task>."""
    inner = TransformedEnv(HidesItsLastObservation(**kwargs), VecGymEnvTransform())
    return TransformedEnv(inner, FillFinalObservation(), auto_unwrap=True)


def test_hidden_last_observations_become_those_acted_on(caplog: pytest.LogCaptureFixture) -> None:
    bare = TransformedEnv(HidesItsLastObservation(), VecGymEnvTransform()).rollout(5, break_when_any_done=False)
    assert bare["next", "policy"].isnan().any(-1).nonzero().tolist() == [[0, 2], [1, 3]]

    collector = Collector(wrap_env(as_isaac_lab()), None, frames_per_batch=20, total_frames=-1)
    data = next(iter(collector))
    collector.shutdown()
    assert data["policy"][..., 0].tolist()[0][:3] == [0, 1, 2]
    assert data["next", "policy"][0, :, 1].tolist()[:3] == [1, 2, 2]
    assert data["policy"][1, :, 0].tolist()[:4] == [10, 11, 12, 13]
    assert data["next", "policy"][1, :, 1].tolist()[:4] == [11, 12, 13, 13]
    assert data["next", "image"][1, :4, 0].tolist() == [11, 12, 13, 13]
    assert torch.equal(data["next", "final_obs_missing"], data["next", "done"])
    assert not data["final_obs_missing"].any()
    assert [r.message.count("V(s_t)") for r in caplog.records] == [1]


def test_a_time_out_is_then_bootstrapped_from_the_value_acted_on() -> None:
    # V(s) = s, rewards 1, gamma 0.9, lambda 0: 1 + 0.9 * 1 - 0, 1 + 0.9 * 2 - 1, then V(s_t): 1 + 0.9 * 2 - 2.
    critic = TensorDictModule(lambda x: x[..., :1], in_keys=["policy"], out_keys=["state_value"])
    data = as_isaac_lab().rollout(3, break_when_any_done=False)
    advantage = GAE(gamma=0.9, lmbda=0.0, value_network=critic)(data)["advantage"]
    torch.testing.assert_close(advantage[0].flatten(), torch.tensor([1.9, 1.8, 0.8]))


def test_nan_in_a_running_row_is_left_to_be_refused() -> None:
    data = as_isaac_lab(nan_in_running_row=True).rollout(2)
    critic = TensorDictModule(lambda x: x[..., :1], in_keys=["policy"], out_keys=["state_value"])
    assert not data["next", "final_obs_missing"].any()
    with pytest.raises(ValueError, match=r"'policy'.* holds nan at env 1"):
        GAE(gamma=0.9, lmbda=0.0, value_network=critic)(data)


def test_specs_of_filled_observations() -> None:
    check_env_specs(TransformedEnv(PointMass(3, max_steps=2), FillFinalObservation()))


def test_environments_of_environments_can_be_wrapped() -> None:
    env = wrap_env(TransformedEnv(SerialEnv(2, lambda: TransformedEnv(GymEnv("Pendulum-v1"))), RewardSum()))
    assert env.rollout(3)["next", "step_count"].shape == (2, 3, 1)
    assert any(isinstance(transform, FreshTensors) for transform in env.transform)
