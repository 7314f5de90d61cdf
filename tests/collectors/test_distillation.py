"""Distillation rollouts: when the encoder runs, what is held and forgotten, where gradient goes, and refusals."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import set_exploration_type

from edenrl.collectors import DepthDistillationCollector
from edenrl.envs import PointMass, wrap_env
from edenrl.modules import DepthPolicy, RMAActor, rma_policy
from edenrl.objectives import DepthDistillationLoss
from edenrl.optim import GradientStep

spec = importlib.util.spec_from_file_location("depth_task", Path(__file__).parents[1] / "depth_task.py")
depth_task = importlib.util.module_from_spec(spec)
spec.loader.exec_module(depth_task)
DepthTask, make_networks = depth_task.DepthTask, depth_task.make_networks

N = 6


def build(steps=10, dtype=torch.float32, **options):
    teacher, student = make_networks(dtype=dtype)
    collector = DepthDistillationCollector(
        wrap_env(DepthTask(N, seed=0, dtype=dtype)), teacher, student, steps, **options
    )
    return collector, teacher, student


def spy(module, name, monkeypatch):
    """Records the arguments of a method's calls."""
    calls, method = [], getattr(module, name)

    def recorded(*args):
        calls.append(args)
        return method(*args)

    monkeypatch.setattr(module, name, recorded)
    return calls


def test_the_encoder_runs_once_per_image_for_all_rows(monkeypatch):
    collector, _, student = build(steps=15)
    calls = spy(student.module.encoder, "forward", monkeypatch)
    rollouts = iter(collector)
    images = []
    for number in range(1, 4):
        rollout = next(rollouts)
        images += list(rollout["depth_new"].unbind(1))
        assert len(calls) == 3 * number
    assert all(depth.shape == (N, 12, 14) for depth, _, _ in calls)
    assert [bool(mark.all()) for mark in images] == [bool(mark.any()) for mark in images] == 9 * [True, *4 * [False]]
    assert rollout["next", "done"].any()  # also where rows were reset


def test_it_collects_what_it_says(monkeypatch):
    collector, teacher, student = build()
    asked = spy(collector, "_label", monkeypatch)
    rollout = next(iter(collector))
    assert rollout.shape == (N, 10) and rollout.names == [None, "time"] and len(asked) == 10
    assert rollout["student_action"].requires_grad and rollout["yaw_prediction"].requires_grad
    assert torch.equal(rollout["action"], rollout["student_action"])
    assert not rollout["teacher_action"].requires_grad and not rollout["action"].requires_grad
    names = {"reward", "done", "terminated", "truncated", "episode_reward", "step_count", "metrics"}
    assert set(rollout["next"].keys()) == names
    assert set(rollout.keys()) == {
        *("teacher_action", "student_action", "action"),
        *("yaw", "yaw_prediction", "delta_yaw_ok", "depth_new", "next"),
    }


def test_labels_are_the_teachers_own_actions():
    collector, teacher, _ = build()
    root = collector.env.base_env._observe()
    with torch.no_grad():
        actor = teacher.module[0].module.actor
        expected = actor(
            *(root[k] for k in ("prop", "scan", "priv_explicit")), history=root["prop_history"], latent="history"
        )[0]
    rollout = next(iter(collector))
    torch.testing.assert_close(rollout["teacher_action"][:, 0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(rollout["yaw"][:, 0], root["prop"][:, 6:8])


def test_latent_and_yaw_are_held_between_images_and_forgotten_at_a_reset(monkeypatch):
    collector, _, student = build(steps=20)
    acted = spy(student.module, "act", monkeypatch)
    rollout = next(iter(collector))
    held = [args[2:4] for args in acted]
    done = rollout["next", "done"][..., 0]
    assert done[:, [1, 2, 3]].any() or done[:, [6, 7, 8]].any()
    blind = torch.zeros(N, dtype=torch.bool)
    for t in range(20):
        if t % 5 == 0:
            blind[:] = False
        for now, before in zip(held[t], held[max(t - 1, 0)], strict=True):
            assert not now[blind].any()
            assert (now[~blind] != 0).all()
            if t % 5:
                assert torch.equal(now[~blind], before[~blind])
        blind |= done[:, t]
    assert torch.equal(rollout["yaw_prediction"], torch.stack([yaw for _, yaw in held], 1))


def test_rows_of_the_gru_are_zero_after_a_reset(monkeypatch):
    collector, _, student = build(steps=20)
    calls = spy(student.module.encoder, "forward", monkeypatch)
    rollout = next(iter(collector))
    done = rollout["next", "done"][..., 0]
    for image in range(1, 4):
        hidden, ended = calls[image][2], done[:, 5 * (image - 1) : 5 * image].any(1)
        assert ended.any() and not hidden[ended].any() and hidden[~ended].all(1).all()
    ended = done[:, 15:].any(1)
    assert not collector._hidden[ended].any() and collector._hidden[~ended].all(1).all()


def test_the_gate_opens_the_yaw_and_is_recorded(monkeypatch):
    """Rows whose gate is closed act on the true angles while they train."""
    collector, _, student = build(steps=20)
    acted = spy(student.module, "act", monkeypatch)
    rollout = next(iter(collector))
    opened = rollout["delta_yaw_ok"]
    assert opened.dtype == torch.bool and opened.shape == (N, 20, 1)
    assert torch.equal(opened, torch.stack([args[4] for args in acted], 1) > 0.5)
    assert opened.any() and not opened.all()
    with torch.no_grad():
        for t, (prop, history, latent, yaw, _) in enumerate(list(acted)):
            own, true = (student.module.act(prop, history, latent, angles) for angles in (yaw, prop[:, 6:8]))
            expected = torch.where(opened[:, t], own, true)
            torch.testing.assert_close(rollout["student_action"][:, t], expected, rtol=1e-5, atol=1e-6)


class Renamed(DepthTask):
    """Publishes the groups of the depth student under other names."""

    NAMES = dict(prop="state", prop_history="frames", depth="eye", delta_yaw_ok="ahead")

    def _make_specs(self):
        super()._make_specs()
        for old, new in self.NAMES.items():
            self.observation_spec[new] = self.observation_spec[old].clone()
            del self.observation_spec[old]

    def _observe(self):
        out = super()._observe()
        for old, new in self.NAMES.items():
            out.rename_key_(old, new)
        return out


def test_groups_of_other_names_give_the_same_rollouts():
    expected = next(iter(build()[0]))
    _, student = make_networks()
    teacher = make_networks()[0].module[0].module
    keys = dict(prop="state", history="frames")
    policy = DepthPolicy(student.module, {**keys, "depth": "eye"})
    collector = DepthDistillationCollector(
        wrap_env(Renamed(N, seed=0)), rma_policy(teacher.actor, keys, latent="history"), policy, 10, gate="ahead"
    )
    assert (next(iter(collector)).detach() == expected.detach()).all()


class Broken(DepthTask):
    """Gives a number that is not finite once."""

    bad = "depth", 0, 0, float("nan")

    def _observe(self):
        out = super()._observe()
        group, row, step, value = self.bad
        if self.clock == step:
            out[group][row].view(-1)[-1] = value
        return out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("group", ["prop", "prop_history", "depth", "scan", "priv_explicit", "delta_yaw_ok"])
@pytest.mark.parametrize(("row", "step"), [(0, 0), (3, 5), (5, 10)])
def test_an_observation_that_is_not_finite_is_named_where_it_enters(group, row, step, value):
    teacher, student = make_networks()
    env = Broken(N, seed=0, max_steps=20)
    env.bad = group, row, step, value
    stream = iter(DepthDistillationCollector(wrap_env(env), teacher, student, 15))
    with pytest.raises(ValueError, match=rf"'{group}' holds {value} at row {row}, step {step} "):
        next(stream)


def test_an_image_that_nobody_looks_at_may_hold_anything():
    teacher, student = make_networks()
    env = Broken(N, seed=0, max_steps=20)
    env.bad = "depth", 2, 7, float("nan")
    stream = iter(DepthDistillationCollector(wrap_env(env), teacher, student, 10))
    loss = DepthDistillationLoss(student)
    loss(next(stream))["loss_action"].backward()
    assert all(p.grad.isfinite().all() for p in student.parameters() if p.grad is not None)


# Gradient through time


def perturbed(rollouts, steps=10, at=None, size=0.0):
    """Yaw predictions of some rollouts that the teacher drives, when one image is perturbed; its gradient leaf."""
    collector, _, student = build(steps, torch.float64, num_pretrain_iters=9)
    encoder, leaves = student.module.encoder, []
    original = encoder.forward

    def forward(depth, prop, hidden):
        leaves.append((torch.full_like(depth, size if len(leaves) == at else 0.0)).requires_grad_())
        return original(depth + leaves[-1], prop, hidden)

    encoder.forward = forward
    stream = iter(collector)
    return [next(stream) for _ in range(rollouts)], leaves


def test_gradient_flows_back_to_the_first_image_of_the_rollout():
    """It equals what perturbing that image does to the last prediction of the rollout, by finite differences."""
    (rollout,), leaves = perturbed(1)
    last, done = rollout["yaw_prediction"][:, 5], rollout["next", "done"][:, :5].any(1)[:, 0]
    (gradient,) = torch.autograd.grad(last.sum(), leaves[0])
    size = 1e-5
    ends = [perturbed(1, at=0, size=s)[0][0]["yaw_prediction"][:, 5].detach().sum(-1) for s in (size, -size)]
    torch.testing.assert_close(gradient.sum((1, 2)), (ends[0] - ends[1]) / (2 * size), rtol=1e-6, atol=1e-9)
    reached = gradient.flatten(1).any(1)
    assert done.any() and torch.equal(reached, ~done)  # and not across the end of an episode


def test_gradient_does_not_flow_into_the_rollout_before():
    """Though the numbers do: the state of the GRU is carried over."""
    (_, second), leaves = perturbed(2)
    losses = (second["yaw_prediction"], second["student_action"])
    gradients = torch.autograd.grad(sum(part.sum() for part in losses), leaves, allow_unused=True)
    assert [gradient is None for gradient in gradients] == [True, True, False, False]
    moved = perturbed(2, at=1, size=0.1)[0][1]["yaw_prediction"]
    assert (moved - second["yaw_prediction"])[:, 0].abs().max() > 1e-6


def test_the_student_learns_and_the_teacher_does_not():
    collector, teacher, student = build()
    loss = DepthDistillationLoss(student)
    trained = [p for p in loss.parameters() if p.requires_grad]
    step = GradientStep(loss, torch.optim.Adam(trained, 1e-3))
    before, began = copy.deepcopy(teacher.state_dict()), copy.deepcopy(student.state_dict())
    teacher.train()  # a trainer that switches everything to training
    DepthDistillationCollector(collector.env, teacher, student, 10)
    stream = iter(collector)
    for _ in range(50):
        metrics = step(loss(next(stream)))
        assert metrics["grad_norm_depth_backbone"] > 0 and metrics["grad_norm_depth_recurrent"] > 0
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters()) and not teacher.training
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, began[name])}
    assert changed == {f"module.{name}" for name, p in student.module.named_parameters() if p.requires_grad}


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_over_fifty_iterations():
    teacher, student = make_networks(hidden=64)
    collector = DepthDistillationCollector(wrap_env(DepthTask(64, seed=0)), teacher, student, 20)
    loss = DepthDistillationLoss(student)
    step = GradientStep(loss, torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], 1e-4))
    kept, sizes = [], []  # who keeps rollouts keeps data, not graphs
    for _, rollout in zip(range(60), collector, strict=False):
        step(loss(rollout))
        kept.append(rollout)
        sizes.append(resident())
    # A graph of 64 rows and 4 images is about 10 MB; the data that is kept 0.1 MB.
    assert sizes[59] - sizes[9] < 50e6
    assert not any(rollout["student_action"].requires_grad for rollout in kept[:-1])


# Teacher driving, resuming


def test_the_teacher_drives_at_first():
    collector, *_ = build(num_pretrain_iters=2)
    stream = iter(collector)
    for number in range(4):
        rollout = next(stream)
        driver = "teacher_action" if number < 2 else "student_action"
        assert torch.equal(rollout["action"], rollout[driver])
        assert not torch.equal(rollout["teacher_action"], rollout["student_action"])


def test_the_exploration_type_around_it_changes_nothing():
    one = next(iter(build()[0]))
    with set_exploration_type("random"):
        two = next(iter(build()[0]))
    assert torch.equal(one["action"], two["action"]) and torch.equal(one["teacher_action"], two["teacher_action"])


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_restored_collector_continues_bit_for_bit(after):
    collector, *_ = build(num_pretrain_iters=2)
    stream = iter(collector)
    for _ in range(after):
        next(stream)
    saved = copy.deepcopy(collector.state_dict())
    expected = [next(stream).detach().clone() for _ in range(3)]
    other, *_ = build(num_pretrain_iters=2)
    next(iter(other))
    other.load_state_dict(saved)
    stream = iter(other)
    for rollout in expected:
        assert (next(stream).detach() == rollout).all()


class Forgetful(DepthTask):
    """Says, as Gymnasium environments may, that its state cannot be saved."""

    def get_extra_state(self):
        return {"exact": False}

    def set_extra_state(self, state):
        pass


def test_where_the_simulation_is_lost_the_old_episodes_are_forgotten():
    teacher, student = make_networks()
    first, second = (DepthDistillationCollector(wrap_env(Forgetful(N, seed=s)), teacher, student, 10) for s in (0, 1))
    next(iter(first))
    root = second._root.clone()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.iterations == 1 and not second._hidden.any() and (second._root == root).all()


# Refusals


class OtherCadence(DepthTask):
    depth_interval = 4


def test_settings_that_do_not_fit_are_refused():
    teacher, student = make_networks()
    env = wrap_env(DepthTask(2))
    for steps in (0, 12, -5):
        with pytest.raises(ValueError, match=rf"steps={steps} was given; expected a positive multiple"):
            DepthDistillationCollector(env, teacher, student, steps)
    with pytest.raises(ValueError, match="update_interval=3 steps; DepthTask makes a new image every 5"):
        DepthDistillationCollector(env, teacher, student, 15, update_interval=3)
    with pytest.raises(ValueError, match="update_interval=5 steps; OtherCadence makes a new image every 4"):
        DepthDistillationCollector(wrap_env(OtherCadence(2)), teacher, student, 20)
    with pytest.raises(ValueError, match="PointMass does not declare depth_interval"):
        DepthDistillationCollector(TransformedEnv(PointMass(2)), teacher, student, 20)
    with pytest.raises(ValueError, match="num_pretrain_iters=-1"):
        DepthDistillationCollector(env, teacher, student, 10, num_pretrain_iters=-1)


def test_teachers_that_do_not_fit_are_refused():
    teacher, student = make_networks()
    env = wrap_env(DepthTask(2))
    with pytest.raises(ValueError, match="share parameters"):
        DepthDistillationCollector(env, rma_policy(student.module.actor, latent="history"), student, 10)
    other = RMAActor(depth_task.WIDTHS, 3, hidden=(16,), scan_hidden=(8, 4), priv_hidden=(8, 6))
    with pytest.raises(ValueError, match=r"actions of shape \(2, 3\), the environment takes \(2, 2\)"):
        DepthDistillationCollector(env, rma_policy(other, latent="history"), student, 10)
    with pytest.raises(ValueError, match=r"does not publish \['heights'\]"):
        keyed = rma_policy(copy.deepcopy(student.module.actor), {"scan": "heights"}, latent="history")
        DepthDistillationCollector(env, keyed, student, 10)
    for gate, problem in (("ahead", r"does not publish \['ahead'\]"), ("prop", r"gate 'prop' has the shape \(2, 9\)")):
        with pytest.raises(ValueError, match=problem):
            DepthDistillationCollector(env, teacher, student, 10, gate=gate)
