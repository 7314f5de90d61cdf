"""The distillation loss against published numbers, by hand, in its contract, and on a task that only depth solves."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from edenrl.collectors import DepthDistillationCollector
from edenrl.envs import wrap_env
from edenrl.objectives import DepthDistillationLoss
from edenrl.optim import GradientStep

spec = importlib.util.spec_from_file_location("depth_task", Path(__file__).parents[1] / "depth_task.py")
depth_task = importlib.util.module_from_spec(spec)
spec.loader.exec_module(depth_task)
DepthTask, make_networks = depth_task.DepthTask, depth_task.make_networks

GOLDEN = "depth"
LOSSES = ["loss_action", "loss_yaw"]


@pytest.fixture
def loss():
    return DepthDistillationLoss(make_networks()[1])


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    widths = dict(teacher_action=2, student_action=2, yaw=2, yaw_prediction=2)
    data = {name: torch.randn(4, 6, width, generator=generator) for name, width in widths.items()}
    for name in ("student_action", "yaw_prediction"):
        data[name].requires_grad_()
    new = (torch.arange(6) % 3 == 0).reshape(1, 6, 1).expand(4, 6, 1)
    return TensorDict({**data, "depth_new": new.clone()}, batch_size=[4, 6])


def collect(steps=10, envs=6, seed=0):
    teacher, student = make_networks(seed)
    collector = DepthDistillationCollector(wrap_env(DepthTask(envs, seed=seed)), teacher, student, steps)
    return student, iter(collector)


def test_golden_losses_and_gradients(golden, loss):
    """Twice as many actions as yaw angles: the encoder ran at every other step."""
    actions, yaws = golden["student_actions"].clone().requires_grad_(), golden["yaw_student"].clone().requires_grad_()
    steps = len(actions)
    spread = torch.full((steps, 2), float("nan"))  # what lies between images must not matter
    prediction, true = spread.clone(), spread.clone()
    prediction[::2], true[::2] = yaws, golden["yaw_true"]
    data = TensorDict(
        teacher_action=golden["teacher_actions"],
        student_action=actions,
        yaw=true,
        yaw_prediction=prediction,
        depth_new=(torch.arange(steps) % 2 == 0).unsqueeze(-1),
        batch_size=[steps],
    )
    out = loss(data)
    torch.testing.assert_close(out["loss_action"], golden["loss_action"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["loss_yaw"], golden["loss_yaw"], rtol=1e-5, atol=1e-5)
    total = out["loss_action"] + out["loss_yaw"]
    torch.testing.assert_close(total, golden["loss_student"], rtol=1e-5, atol=1e-5)
    total.backward()
    torch.testing.assert_close(actions.grad, golden["grad_student_actions"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(yaws.grad, golden["grad_yaw_student"], rtol=1e-5, atol=1e-5)


def test_an_exact_student_has_a_finite_gradient(loss):
    data = batch()
    data["student_action"] = data["teacher_action"].clone().requires_grad_()
    loss(data)["loss_action"].backward()
    assert not data["student_action"].grad.any()


def test_reductions(loss):
    data = batch()
    per = loss(data)  # mean
    loss.reduction = "none"
    steps = loss(data)
    loss.reduction = "sum"
    total = loss(data)
    action = (data["teacher_action"] - data["student_action"]).square().sum(-1).sqrt()
    yaw = (data["yaw"] - data["yaw_prediction"]).square().sum(-1).sqrt() * data["depth_new"][..., 0]
    torch.testing.assert_close(steps["loss_action"], action)
    torch.testing.assert_close(steps["loss_yaw"], yaw)
    torch.testing.assert_close(total["loss_yaw"], yaw.sum())
    torch.testing.assert_close(per["loss_yaw"], yaw.sum() / 8)  # images at 2 of 6 steps of 4 rows
    torch.testing.assert_close(per["loss_action"], action.mean())


def test_every_yaw_counts_without_a_mark(loss):
    data = batch()
    yaw = (data["yaw"] - data["yaw_prediction"]).square().sum(-1).sqrt()
    torch.testing.assert_close(loss(data.exclude("depth_new"))["loss_yaw"], yaw.mean())


def test_what_does_not_fit_is_refused(loss):
    data = batch()
    with pytest.raises(ValueError, match="'student_action' carries no gradient"):
        loss(data.detach())
    with pytest.raises(ValueError, match=r"'yaw' and 'yaw_prediction' have the shapes \(4, 6, 3\) and \(4, 6, 2\)"):
        loss(data.set("yaw", torch.zeros(4, 6, 3)))
    with torch.no_grad():
        loss(data.exclude("yaw").set("yaw", torch.zeros(4, 6, 2)))  # a validation needs no graph


# Through a rollout


def test_each_loss_reaches_its_modules():
    student, rollouts = collect()
    loss = DepthDistillationLoss(student)
    groups = loss.parameter_groups()
    parameters = [p for group in groups.values() for p in group]
    assert {id(p) for p in parameters} == {id(p) for p in loss.parameters() if p.requires_grad}
    assert len({id(p) for p in parameters}) == len(parameters)
    names = {id(p): name for name, p in student.module.named_parameters()}
    parts = {group: {names[id(p)].rsplit(".", 1)[0] for p in members} for group, members in groups.items()}
    assert {name.split(".")[1] for name in parts["student_actor"]} == {"backbone", "history_encoder"}
    assert all(name.startswith("encoder.backbone.") for name in parts["depth_backbone"])
    assert parts["depth_recurrent"] == {"encoder.combine.0", "encoder.combine.2", "encoder.gru", "encoder.out.0"}
    out = loss(next(rollouts))
    reached = {}
    for name in LOSSES:
        gradients = torch.autograd.grad(out[name], parameters, allow_unused=True, retain_graph=True)
        found = {id(p) for p, g in zip(parameters, gradients, strict=True) if g is not None and g.any()}
        reached[name] = {group for group, members in groups.items() if {id(p) for p in members} <= found}
        assert found == {id(p) for group in reached[name] for p in groups[group]}
    assert reached == {"loss_action": set(groups), "loss_yaw": {"depth_backbone", "depth_recurrent"}}


def test_only_the_actor_is_clipped_and_every_norm_is_reported():
    student, rollouts = collect()
    loss = DepthDistillationLoss(student)
    trained = [p for p in loss.parameters() if p.requires_grad]
    step = GradientStep(loss, torch.optim.SGD(trained, 1.0), max_grad_norm={"student_actor": 0.1})
    before = {id(p): p.detach().clone() for p in trained}
    metrics = step(loss(next(rollouts)))
    moved = {
        name: torch.cat([(p.detach() - before[id(p)]).flatten() for p in members]).norm()
        for name, members in loss.parameter_groups().items()
    }
    assert metrics["grad_norm_student_actor"] > 0.1
    torch.testing.assert_close(moved["student_actor"], torch.tensor(0.1), rtol=1e-3, atol=0)
    for name in ("depth_backbone", "depth_recurrent"):
        assert metrics[f"grad_norm_{name}"] > 0
        torch.testing.assert_close(moved[name], metrics[f"grad_norm_{name}"], rtol=1e-4, atol=1e-6)


def test_every_step_of_the_rollout_counts():
    """The gradient of the whole is that of its steps: none is dropped at a boundary."""
    student, rollouts = collect(steps=15)
    loss, rollout = DepthDistillationLoss(student, reduction="none"), next(rollouts)
    weight = student.module.actor.backbone[0].weight
    steps = loss(rollout)["loss_action"]
    parts = [torch.autograd.grad(steps[:, t].sum(), weight, retain_graph=True)[0] for t in range(15)]
    loss.reduction = "mean"
    (whole,) = torch.autograd.grad(loss(rollout)["loss_action"], weight)
    assert all(part.any() for part in parts)
    torch.testing.assert_close(whole, sum(parts) / steps.numel())


@pytest.mark.extended
def test_the_student_learns_to_use_its_eyes():
    """Only the image shows what the teacher is told: with other rows' images the student is lost."""
    teacher, student = make_networks(hidden=32)
    env = DepthTask(32, seed=0, max_steps=100)
    collector = DepthDistillationCollector(wrap_env(env), teacher, student, 10)
    loss = DepthDistillationLoss(student)
    optimizer = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], 5e-3)
    step, history = GradientStep(loss, optimizer), []
    for iteration, rollout in zip(range(170), collector, strict=False):
        if iteration == 120:
            optimizer.param_groups[0]["lr"] = 1e-3
        losses = loss(rollout)
        step(losses)
        history.append(torch.stack([losses[name].detach() for name in LOSSES]))
    start, end = torch.stack(history[:5]).mean(0), torch.stack(history[-5:]).mean(0)
    assert (end < 0.5 * start).all(), (start, end)

    encoder, seen = student.module.encoder, {}
    original, order = encoder.forward, torch.arange(32).roll(1)
    with torch.no_grad():
        for name, rows in (("own", torch.arange(32)), ("others", order)):
            encoder.forward = lambda depth, prop, hidden, rows=rows: original(depth[rows], prop, hidden)
            losses = [loss(rollout) for _, rollout in zip(range(4), collector, strict=False)]
            seen[name] = sum(float(out["loss_action"]) for out in losses) / 4
    assert seen["others"] > 5 * seen["own"], seen
