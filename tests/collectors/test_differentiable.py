"""Collection that keeps the graph: continuation, resets, release of tapes, exploding gradients, refusals."""

import copy
import gc
import io
import math
import weakref

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType
from torchrl.modules import ProbabilisticActor

from edenrl.collectors import AdjointClip, DifferentiableCollector
from edenrl.envs import CartPoleSwingUp, PointMass, RolloutPlan, make_env, wrap_env
from edenrl.modules import categorical_actor, gaussian_actor, update_normalization
from edenrl.objectives import APGLoss
from edenrl.optim import GradientStep

GOLDEN = "apg"


def make_actor(**kwargs):
    return gaussian_actor({"observation": 14}, 2, hidden=(8,), **kwargs)


def build(env=None, steps=5, **kwargs):
    actor = make_actor()
    return actor, DifferentiableCollector(wrap_env(env or PointMass(4, seed=0, max_steps=7)), actor, steps, **kwargs)


# Adjoint clipping


@pytest.mark.parametrize("case", ["ordinary", "extreme", "batched3d"])
def test_golden_clipping(golden, case):
    clip = AdjointClip(float(golden["clip.max_norm"]))
    out = clip(golden[f"clip.{case}.input"])
    torch.testing.assert_close(out, golden[f"clip.{case}.output"], rtol=1e-5, atol=0)
    metrics = clip.metrics()
    for name in ("rows", "clipped_rows", "nonfinite_rows"):
        assert metrics[f"adjoint_{name}"] == golden[f"clip.{case}.stats.{name}"]
    for ours, theirs in (("norm_mean", "preclip_mean_norm"), ("norm_max", "preclip_max_norm")):
        torch.testing.assert_close(
            metrics[f"adjoint_{ours}"], golden[f"clip.{case}.metrics.{theirs}"], rtol=1e-5, atol=0
        )
    stats = golden.under(f"clip.{case}.stats.")
    torch.testing.assert_close(metrics["adjoint_norm_max"], stats["norm_max"], rtol=1e-5, atol=0)
    total = metrics["adjoint_norm_mean"] * stats["finite_rows"]
    torch.testing.assert_close(total, stats["norm_sum"], rtol=1e-5, atol=0)
    for name in ("clipped", "nonfinite"):
        share = metrics[f"adjoint_{name}_rows"] / metrics["adjoint_rows"]
        torch.testing.assert_close(share, golden[f"clip.{case}.metrics.{name}_fraction"])


def test_golden_counts_add_up_over_calls(golden):
    clip = AdjointClip(float(golden["clip.max_norm"]))
    clip(golden["clip.ordinary.input"])
    clip(golden["clip.batched3d.input"])
    metrics, stats = clip.metrics(), "clip.ordinary_then_batched3d.stats"
    for name in ("rows", "clipped_rows", "nonfinite_rows"):
        assert metrics[f"adjoint_{name}"] == golden[f"{stats}.{name}"]
    torch.testing.assert_close(metrics["adjoint_norm_max"], golden[f"{stats}.norm_max"], rtol=1e-5, atol=0)
    mean = golden[f"{stats}.norm_sum"] / golden[f"{stats}.finite_rows"]
    torch.testing.assert_close(metrics["adjoint_norm_mean"], mean, rtol=1e-5, atol=0)
    assert clip.metrics() == {}


def test_golden_clipping_switched_off(golden):
    out = AdjointClip(0.0)(golden["clip.ordinary.input"])
    torch.testing.assert_close(out, golden["clip.disabled.output"], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="max_norm=-1"):
        AdjointClip(-1)


# Continuation


def test_segments_continue_episodes_and_the_graph_ends_with_each():
    _, collector = build()
    first, second = collector.update(segments=2)
    assert first.batch_size == (4, 5) and first.names == [None, "time"]
    assert torch.equal(first["next", "observation"][:, -1], second["observation"][:, 0])
    # Episodes of 7 steps: the count of the discount goes on into the second segment and restarts at each done.
    assert first["elapsed"][0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert second["elapsed"][0, :, 0].tolist() == [5, 6, 0, 1, 2]
    assert second["step_count"][0, :, 0].tolist() == [5, 6, 0, 1, 2]
    third = next(collector.update())
    assert third["elapsed"][0, :, 0].tolist() == [0, 1, 2, 3, 0]  # from 0 in a new update, in mid-episode
    assert third["step_count"][0, :, 0].tolist() == [3, 4, 5, 6, 0]
    assert third["next", "reward"].requires_grad
    assert not any(leaf.requires_grad for leaf in (*first.values(True, True), *second.values(True, True)))


def test_a_segment_starts_from_a_detached_state():
    actor, collector = build(steps=1)
    seen = []
    for segment in collector.update(segments=3):
        assert segment["next", "reward"].requires_grad
        assert not segment["observation"].requires_grad and not segment["step_count"].requires_grad
        seen.append(segment)
        (gradient,) = torch.autograd.grad(segment["next", "observation"].sum(), [actor.module[0].module.mlp[0].weight])
        assert gradient.abs().sum() > 0
    assert len(seen) == 3 and collector.frames == 12


def test_every_rollout_from_a_reset():
    _, collector = build(reset_at_each_iter=True)
    for data in collector.update(segments=2):
        assert (data["step_count"][:, 0] == 0).all() and data["elapsed"][0, :, 0].tolist() == [0, 1, 2, 3, 4]


def test_iterating_yields_segments_without_end():
    _, collector = build()
    batches = [batch for batch, _ in zip(collector, range(3), strict=False)]
    assert [int(batch["step_count"][0, 0]) for batch in batches] == [0, 5, 3]


def test_samples_or_takes_the_mean():
    actor, collector = build(exploration_type=ExplorationType.DETERMINISTIC)
    data = next(collector.update())
    assert torch.equal(data["action"], data["loc"])
    _, collector = build()
    data = next(collector.update())
    assert (data["action"] != data["loc"]).all()


@pytest.mark.parametrize("task", ["PointMass", "CartPoleSwingUp"])
def test_a_new_collector_continues_bit_for_bit(task):
    def build(seed):
        torch.manual_seed(seed)
        env = make_env(task, 4, seed=seed, max_steps=7)
        actor = gaussian_actor(
            {"observation": env.observation_spec["observation"].shape[-1]}, env.action_spec_unbatched
        )
        return actor, DifferentiableCollector(wrap_env(env), actor, 5)

    actor, collector = build(0)
    for _ in range(3):
        list(collector.update(2))
    file = io.BytesIO()
    torch.save({"collector": collector.state_dict(), "actor": actor.state_dict(), "rng": torch.get_rng_state()}, file)
    expected = [segment for _ in range(3) for segment in collector.update(2)]

    other_actor, other = build(9)
    list(other.update())
    file.seek(0)
    state = torch.load(file, weights_only=False)
    other_actor.load_state_dict(state["actor"])
    other.load_state_dict(state["collector"])
    torch.set_rng_state(state["rng"])
    for ours, theirs in zip(expected, [s for _ in range(3) for s in other.update(2)], strict=True):
        assert (ours == theirs).all(), "a resumed segment differs"
    assert (other.frames, other.rollouts) == (collector.frames, collector.rollouts) == (240, 12)


class Forgetful(PointMass):
    """Saves nothing of its state."""

    def state_dict(self, *args, **kwargs):
        return {}

    def load_state_dict(self, *args, **kwargs):
        pass


def test_an_environment_that_saves_nothing_starts_new_episodes_and_says_so(caplog):
    _, collector = build(Forgetful(4, seed=0))
    list(collector.update())
    _, other = build(Forgetful(4, seed=1))
    other.load_state_dict(collector.state_dict())
    assert "Forgetful does not save its simulation state" in caplog.text
    assert (next(other.update())["step_count"][:, 0] == 0).all()


# A simulator whose tape has to be released


class Handle:
    """What a tape holds on to for one step."""


class Taped(PointMass):
    """Counts the steps whose graph is alive; the gradient of row ``bad``'s reward becomes infinite at step ``at``."""

    def __init__(self, *args, bad=None, at=2, bad_reward=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.alive = weakref.WeakSet()
        self.bad, self.at, self.bad_reward, self.count = bad, at, bad_reward, 0

    def _step(self, tensordict):
        env = self

        class Tape(torch.autograd.Function):
            @staticmethod
            def forward(ctx, reward, explode):
                ctx.handle, ctx.explode = Handle(), explode
                env.alive.add(ctx.handle)
                return reward.clone()

            @staticmethod
            def backward(ctx, gradient):
                if ctx.explode:
                    gradient = gradient.clone()
                    gradient[env.bad] = float("inf")
                return gradient, None

        self.count += 1
        due = self.count == self.at
        out = super()._step(tensordict)
        out["reward"] = Tape.apply(out["reward"], due and self.bad is not None)
        if due and self.bad_reward is not None:
            out["reward"] = out["reward"].index_fill(0, torch.tensor([1]), self.bad_reward)
        return out


def update(collector, loss, step, segments=2):
    """One update as examples/train_apg.py makes it."""
    seen = []
    for segment in collector.update(segments):
        step.backward(loss(segment))
        seen.append(segment)
    return step.step(), seen


def assemble(env, on_nonfinite="skip", steps=5, lr=0.1, **options):
    actor = make_actor()
    clip = {name: options.pop(name) for name in ("action_adjoint_max_norm",) if name in options}
    collector = DifferentiableCollector(wrap_env(env), actor, steps, **clip)
    loss = APGLoss(actor)
    step = GradientStep(loss, torch.optim.SGD(actor.parameters(), lr=lr), on_nonfinite=on_nonfinite, **options)
    return actor, collector, loss, step


@pytest.mark.parametrize("trouble", [{}, {"bad": 1}, {"bad_reward": float("nan")}])
def test_every_update_ends_with_no_graph_alive(trouble):
    env = Taped(4, seed=0, max_steps=7, **trouble)
    _, collector, loss, step = assemble(env)
    for number in range(3):
        for segment in collector.update(2):
            assert len(env.alive) == 5
            step.backward(loss(segment))
        assert len(env.alive) == 0, f"update {number} left graphs alive"
        step.step()
        assert not any(leaf.requires_grad for leaf in segment.values(True, True))
    assert step.skipped == (1 if trouble else 0)


def test_memory_is_flat():
    env = Taped(4, seed=0, max_steps=7)
    _, collector, loss, step = assemble(env, lr=1e-3, steps=1)

    def tensors():
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    counts = []
    for number in range(200):
        update(collector, loss, step)
        if number in (20, 199):
            counts.append(tensors())
    assert counts[0] == counts[1] and len(env.alive) == 0


# Exploding gradients


def weights(actor):
    return [parameter.detach().clone() for parameter in actor.parameters()]


def test_an_exploding_row_is_taken_out_and_the_others_learn_on():
    torch.manual_seed(3)
    actor, collector, loss, step = assemble(Taped(4, seed=0, bad=1), action_adjoint_max_norm=1e6)
    reference = copy.deepcopy(actor)
    update(collector, loss, step, segments=1)
    assert step.applied and step.skipped == 0
    metrics = collector.metrics()
    # The bad row at step 2, and step 1 before it, whose adjoint passes through step 2.
    assert metrics["adjoint_nonfinite_rows"] == 2 and metrics["adjoint_rows"] == 20

    # The same update without the explosion, in which the adjoints of these two actions are zeroed by hand.
    torch.manual_seed(3)
    make_actor()

    class Zeroed(PointMass):
        def _step(self, tensordict):
            self.count = getattr(self, "count", 0) + 1
            action = tensordict["action"]
            if self.count <= 2:
                keep = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
                action = action * keep + (action * (1 - keep)).detach()
            return super()._step(tensordict.clone(False).set("action", action))

    other = DifferentiableCollector(wrap_env(Zeroed(4, seed=0)), reference, 5)
    other_loss = APGLoss(reference)
    other_step = GradientStep(other_loss, torch.optim.SGD(reference.parameters(), lr=0.1))
    update(other, other_loss, other_step, segments=1)
    for ours, theirs in zip(weights(actor), weights(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("trouble", [{"bad": 1}, {"bad_reward": float("nan")}])
def test_without_clipping_the_update_is_skipped_and_counted(trouble):
    actor, collector, loss, step = assemble(Taped(4, seed=0, **trouble))
    before = weights(actor)
    update(collector, loss, step)  # the first of its two segments is invalid
    assert not step.applied and (step.skipped, step.skipped_large) == (1, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(actor), strict=True))
    update(collector, loss, step)
    assert step.applied and step.skipped == 1
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(actor), strict=True))


def test_with_skipping_off_the_update_is_named():
    actor, collector, loss, step = assemble(Taped(4, seed=0, bad=1, at=22), on_nonfinite="raise")
    update(collector, loss, step)
    update(collector, loss, step)
    before = weights(actor)
    with pytest.raises(FloatingPointError, match=r"Non-finite gradient in .* in update 3\. No parameter was changed"):
        update(collector, loss, step)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(actor), strict=True))


def test_large_gradients_are_skipped_and_counted_on_their_own():
    actor, collector, loss, step = assemble(PointMass(4, seed=0), max_norm_before_clip=1e-6)
    before = weights(actor)
    metrics, _ = update(collector, loss, step)
    assert metrics["grad_norm_policy"] > 1e-6 and not step.applied and (step.skipped, step.skipped_large) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(actor), strict=True))


def test_normalization_is_frozen_during_an_update():
    actor, collector, loss, step = assemble(PointMass(4, seed=0))
    norm = actor.module[0].module.norm
    _, segments = update(collector, loss, step)
    assert norm.count == 0
    update_normalization(actor, torch.cat(segments, 1))
    assert norm.count == 40


# Scheduled rollouts


class Scheduled(PointMass):
    """Rollout i has i + 2 steps, a scale per row and a label."""

    def prepare_rollout(self, index):
        scale = torch.arange(1.0, self.num_envs + 1) if index else 0.5
        return RolloutPlan(index + 2, objective_scale=scale, metadata={"level": index})


def test_an_environment_schedules_its_rollouts():
    actor, collector = build(Scheduled(4, seed=0), reset_at_each_iter=True)
    first, second = collector.update(segments=2)
    assert (first.shape, second.shape) == ((4, 2), (4, 3))
    assert (first["objective_scale"] == 0.5).all()
    assert second["objective_scale"][:, 0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert collector.metrics() == {"plan/level": torch.tensor(1.0)} and collector.frames == 20
    _, other = build(Scheduled(4, seed=0), reset_at_each_iter=True)
    other.load_state_dict(collector.state_dict())
    assert next(other.update()).shape == (4, 4)
    with pytest.raises(ValueError, match="Scheduled schedules complete rollouts"):
        build(Scheduled(4, seed=0))
    with pytest.raises(ValueError, match="num_steps=0"):
        RolloutPlan(0)
    for scale in (math.nan, math.inf, torch.tensor([1.0, math.nan])):
        with pytest.raises(ValueError, match="objective_scale=.* expected finite numbers"):
            RolloutPlan(3, objective_scale=scale)


# Refusals


class SampledOnly(torch.distributions.Normal):
    """Cannot be reparameterized."""

    has_rsample = False


def test_a_policy_that_samples_without_reparameterization_is_refused():
    head = TensorDictModule(nn.Linear(14, 2), in_keys=["observation"], out_keys=["loc"])
    actor = ProbabilisticActor(
        head, in_keys=["loc"], distribution_class=SampledOnly, distribution_kwargs={"scale": torch.ones(2)}
    )
    with pytest.raises(RuntimeError, match="samples without reparameterization"):
        next(DifferentiableCollector(PointMass(2), actor, 3).update())
    with pytest.raises(RuntimeError, match="'action' carries no gradient"):
        next(DifferentiableCollector(PointMass(2), categorical_actor({"observation": 14}, 2), 3).update())
    frozen = make_actor().requires_grad_(False)
    with pytest.raises(RuntimeError, match="its parameters are frozen"):
        next(DifferentiableCollector(PointMass(2), frozen, 3).update())


class NoGrad(PointMass):
    def _step(self, tensordict):
        with torch.no_grad():
            return super()._step(tensordict)


class CutObservation(PointMass):
    def _observe(self):
        out = super()._observe()
        return out.set("observation", out["observation"].detach())


@pytest.mark.parametrize(
    ("env", "message"),
    [(NoGrad, "rewards of NoGrad carry no gradient"), (CutObservation, "next observations .* of CutObservation carry")],
)
def test_an_environment_without_a_graph_is_refused(env, message):
    with pytest.raises(RuntimeError, match=message):
        next(DifferentiableCollector(env(2), make_actor(), 3).update())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_collecting_without_autograd_is_refused(context):
    _, collector = build()
    with context(), pytest.raises(RuntimeError, match="where the graph is missing"):
        next(collector.update())


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"GymVectorEnv has no detach_state\(\)"):
        DifferentiableCollector(wrap_env(make_env("Pendulum-v1", 2)), make_actor(), 4)
    with pytest.raises(ValueError, match="steps=0"):
        DifferentiableCollector(PointMass(2), make_actor(), 0)


def test_works_without_the_training_stack_and_on_one_environment():
    actor = make_actor()
    data = next(DifferentiableCollector(CartPoleSwingUp(1), gaussian_actor({"observation": 5}, 1), 3).update())
    assert data.shape == (1, 3) and isinstance(data, TensorDict)
    assert next(DifferentiableCollector(PointMass(2), actor, 3).update())["next", "reward"].requires_grad
