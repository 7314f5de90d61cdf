import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from edenrl.optim import GradientStep, make_lr_schedule


class TwoGroups(nn.Module):
    """Two scalars with known gradients: d/da = 3, d/db = 4 (and a third that nothing trains)."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0]))
        self.b = nn.Parameter(torch.tensor([1.0]))

    def parameter_groups(self):
        return {"actor": [self.a], "critic": [self.b]}

    def forward(self, scale=1.0):
        return TensorDict(
            loss_a=(3 * self.a * scale).sum(), loss_b=(4 * self.b).sum(), metric=torch.tensor(7.0), kl=torch.tensor(1.0)
        )


def test_sums_losses_and_clips_each_group_on_its_own_norm():
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), max_grad_norm={"actor": 1.0})
    metrics = step(loss())
    assert metrics["loss"].item() == 7.0
    assert (metrics["grad_norm_actor"].item(), metrics["grad_norm_critic"].item()) == (3.0, 4.0)
    assert loss.a.item() == pytest.approx(0.9, abs=1e-6)  # clipped to 1
    assert loss.b.item() == pytest.approx(0.6)  # not clipped
    assert loss.a.grad is None


def test_several_named_optimizers():
    loss = TwoGroups()
    optimizers = {"a": torch.optim.SGD([loss.a], lr=0.1), "b": torch.optim.SGD([loss.b], lr=0.01)}
    GradientStep(loss, optimizers)(loss())
    assert (loss.a.item(), loss.b.item()) == pytest.approx((0.7, 0.96))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_gradient_raises_and_names_the_parameter(bad):
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.Adam(loss.parameters(), lr=0.1))
    with pytest.raises(FloatingPointError, match=r"gradient in a \(loss_a=(nan|inf), loss_b=4\)"):
        step(loss(scale=torch.tensor(bad)))
    assert (loss.a.item(), loss.b.item()) == (1.0, 1.0) and step.skipped == 1
    step(loss())  # the next good update goes through
    assert loss.a.item() < 1.0


def test_skip_counts_and_leaves_everything_untouched():
    loss = TwoGroups()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    schedule = make_lr_schedule("linear", optimizer, 10)
    step = GradientStep(loss, optimizer, on_nonfinite="skip", lr_schedule=schedule)
    step(loss(scale=torch.tensor(float("nan"))))
    assert (loss.a.item(), loss.b.item(), step.skipped) == (1.0, 1.0, 1)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1


def test_nonfinite_loss_with_finite_gradients_is_refused():
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    out = loss()
    out["loss_a"] = out["loss_a"] + torch.tensor(float("nan"))
    with pytest.raises(FloatingPointError, match="Non-finite loss"):
        step(out)
    assert loss.a.item() == 1.0


def test_adaptive_rate_changes_before_the_step_of_the_same_update():
    loss = TwoGroups()
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-3)
    schedule = make_lr_schedule("adaptive", optimizer, 1, target_kl=0.01)
    metrics = GradientStep(loss, optimizer, lr_schedule=schedule)(loss())
    assert metrics["lr"].item() == pytest.approx(1e-3 / 1.5)
    assert loss.a.item() == pytest.approx(1 - 3e-3 / 1.5)


def test_other_schedules_advance_after_the_step():
    loss = TwoGroups()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    step = GradientStep(loss, optimizer, lr_schedule=make_lr_schedule("linear", optimizer, 2))
    step(loss())
    assert loss.a.item() == pytest.approx(1 - 0.3) and optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_wrong_wiring_is_refused():
    loss = TwoGroups()
    stranger = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="a parameter that is not the loss's"):
        GradientStep(loss, torch.optim.SGD([loss.a, loss.b, stranger], lr=0.1))
    with pytest.raises(ValueError, match=r"max_grad_norm names \['polcy'\]; the loss trains \['actor', 'critic'\]"):
        GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), max_grad_norm={"polcy": 1.0})
    with pytest.raises(ValueError, match="'raise' or 'skip'"):
        GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), on_nonfinite="ignore")
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"scalar loss_\* entries, got {'loss_a': \(2,\)}. Use reduction"):
        step(TensorDict(loss_a=loss.a.expand(2)))
    with pytest.raises(ValueError, match=r"scalar loss_\* entries, got {}"):
        step(TensorDict(metric=torch.tensor(0.0)))


def test_parameters_outside_the_optimizer_are_left_alone():
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD([loss.a], lr=0.1), max_grad_norm=1.0)
    with pytest.warns(UserWarning, match="no optimizer of this step holds {'critic': 1}"):
        metrics = step(loss())
    assert loss.b.item() == 1.0 and "grad_norm_critic" not in metrics


def test_bfloat16_autocast_trains():
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    step = GradientStep(net, torch.optim.SGD(net.parameters(), lr=0.1), amp_dtype=torch.bfloat16)
    x, losses = torch.randn(64, 8), []
    for _ in range(20):
        with step.autocast():
            out = net(x)
            assert out.dtype == torch.bfloat16
        losses.append(step(TensorDict(loss_mse=(out.float() - 1).square().mean()))["loss"].item())
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_scaler_skips_an_overflow_and_halves():
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), amp_dtype=torch.float16)
    scale = step.scaler.get_scale()
    step(loss(scale=torch.tensor(float("inf"))))
    assert (loss.a.item(), loss.b.item(), step.skipped) == (1.0, 1.0, 1)
    assert step.scaler.get_scale() == scale / 2
    step(loss())
    assert loss.a.item() == pytest.approx(0.7)


def test_state_round_trip():
    def build():
        loss = TwoGroups()
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        schedule = make_lr_schedule("cosine", optimizer, 10)
        return loss, optimizer, GradientStep(loss, optimizer, lr_schedule=schedule, on_nonfinite="skip")

    loss, optimizer, step = build()
    step(loss())
    step(loss(scale=torch.tensor(float("nan"))))
    other_loss, other_optimizer, other = build()
    other_loss.load_state_dict(loss.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    other.load_state_dict(step.state_dict())
    assert other.skipped == 1
    step(loss())
    other(other_loss())
    assert loss.a.item() == other_loss.a.item()


def test_restart_keeps_momentum_and_runs_over_what_is_left():
    loss = TwoGroups()
    optimizer = torch.optim.Adam(loss.parameters(), lr=1.0)
    step = GradientStep(loss, optimizer, lr_schedule=make_lr_schedule("linear", optimizer, 10))
    for _ in range(5):
        step(loss())
    momentum = optimizer.state[loss.a]["exp_avg"].clone()
    step.restart_schedule("linear", lr=0.2, remaining_updates=2)
    assert optimizer.param_groups[0]["lr"] == 0.2 and torch.equal(optimizer.state[loss.a]["exp_avg"], momentum)
    assert [step(loss())["lr"].item() for _ in range(2)] == pytest.approx([0.1, 0.0])


@pytest.mark.parametrize("before", ["linear", "adaptive"])
def test_restart_keeps_the_ratio_of_the_groups(before):
    loss = TwoGroups()
    groups = [{"params": [loss.a], "lr": 0.1}, {"params": [loss.b], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups)
    options = {"target_kl": 0.01} if before == "adaptive" else {}
    step = GradientStep(loss, optimizer, lr_schedule=make_lr_schedule(before, optimizer, 2, **options))
    if before == "linear":
        for _ in range(2):  # to its end, where every rate is zero
            step(loss())
    step.restart_schedule("linear", lr=0.4, remaining_updates=2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.08])
    step(loss())
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.04])


def test_a_restarted_schedule_that_is_saved_and_restored_ends_where_it_would_have():
    def build():
        loss = TwoGroups()
        optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
        return loss, optimizer, GradientStep(loss, optimizer, lr_schedule=make_lr_schedule("linear", optimizer, 10))

    loss, optimizer, step = build()
    step.restart_schedule("linear", lr=0.4, remaining_updates=4)
    step(loss())
    other_loss, other_optimizer, other = build()
    other_optimizer.load_state_dict(optimizer.state_dict())
    other.load_state_dict(step.state_dict())
    assert other_optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    assert [other(other_loss())["lr"].item() for _ in range(3)] == pytest.approx([0.2, 0.1, 0.0])


def test_a_saved_schedule_of_another_kind_is_not_forced_into_this_one():
    loss = TwoGroups()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    adaptive = GradientStep(loss, optimizer, lr_schedule=make_lr_schedule("adaptive", optimizer, 1, target_kl=0.01))
    linear = GradientStep(loss, optimizer, lr_schedule=make_lr_schedule("linear", optimizer, 10))
    linear.load_state_dict(adaptive.state_dict())
    assert linear.lr_schedule.last_epoch == 0


@pytest.mark.parametrize("norm", [-1, 0, float("nan"), float("inf"), "1"])
def test_clip_norms_must_be_positive_numbers(norm):
    loss = TwoGroups()
    with pytest.raises(ValueError, match="max_grad_norm of 'actor' must be a positive number"):
        GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), max_grad_norm=norm)


def test_an_adaptive_schedule_without_kl_names_the_key_before_anything_is_computed():
    loss = TwoGroups()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    schedule = make_lr_schedule("adaptive", optimizer, 1, target_kl=0.01)
    step = GradientStep(loss, optimizer, lr_schedule=schedule, kl_key="my_kl")
    with pytest.raises(KeyError, match="'my_kl'"):
        step(loss())
    assert loss.a.grad is None


def test_a_gradient_norm_beyond_float32_is_called_that():
    net = nn.Linear(4, 1)
    step = GradientStep(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(FloatingPointError, match="Non-finite gradient norm"):
        step(TensorDict(loss_big=(net.weight * 1e30).sum()))


def test_a_scaler_that_never_finds_its_scale_raises():
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), amp_dtype=torch.float16)
    with pytest.raises(FloatingPointError, match="gradient in a"):
        for _ in range(20):
            step(loss(scale=torch.tensor(float("nan"))))
    assert step.skipped == 20 and loss.a.item() == 1.0


def test_metrics_stand_on_the_device_of_the_loss():
    loss = TwoGroups()
    metrics = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))(loss())
    assert {value.device.type for value in metrics.values()} == {"cpu"}
    assert all(isinstance(value, torch.Tensor) and value.ndim == 0 for value in metrics.values())


def test_accumulated_gradients_are_one_update():
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), max_grad_norm={"actor": 1.0})
    first = step.backward(loss(), scale=0.5)
    assert loss.a.item() == 1.0 and not first["loss_a"].requires_grad and first["metric"].item() == 7.0
    step.backward(loss(scale=3.0), scale=0.5)
    metrics = step.step()
    # 0.5 * (3 + 4) + 0.5 * (9 + 4) = 10; d/da = 0.5 * (3 + 9) = 6, d/db = 0.5 * (4 + 4) = 4.
    assert metrics["loss"].item() == 10.0
    assert (metrics["grad_norm_actor"].item(), metrics["grad_norm_critic"].item()) == (6.0, 4.0)
    assert loss.a.item() == pytest.approx(0.9, abs=1e-6) and loss.b.item() == pytest.approx(0.6)
    assert step.applied and step.updates == 1
    with pytest.raises(RuntimeError, match=r"call backward\(losses\) first"):
        step.step()


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("backwards", [0, 1, 3])
def test_a_cancelled_update_leaves_nothing(dtype, backwards):
    loss, other = TwoGroups(), TwoGroups()
    step, reference = (
        GradientStep(part, torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9), amp_dtype=dtype)
        for part in (loss, other)
    )
    step(loss()), reference(other())
    for number in range(backwards):
        step.backward(loss(scale=float("nan") if number == 1 else 5.0))
    step.cancel_update()
    assert not step.applied and step.updates == 1 and loss.a.grad is None
    with pytest.raises(RuntimeError, match=r"call backward\(losses\) first"):
        step.step()
    metrics, expected = step(loss()), reference(other())
    assert metrics == expected and step.state_dict() == reference.state_dict()
    assert (loss.a.item(), loss.b.item()) == (other.a.item(), other.b.item()) and step.applied


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan"))])
def test_a_scale_that_is_no_number_is_refused_before_anything_is_added(scale):
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), on_nonfinite="skip")
    step.backward(loss())
    with pytest.raises(ValueError, match="scale=.* expected a finite number"):
        step.backward(loss(), scale)
    assert step.step()["loss"].item() == 7.0


def test_one_bad_loss_among_several_drops_the_update():
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), on_nonfinite="skip")
    step.backward(loss(scale=torch.tensor(float("nan"))))
    step.backward(loss())
    step.step()
    assert (loss.a.item(), loss.b.item(), step.skipped, step.applied) == (1.0, 1.0, 1, False)
    step(loss())  # nothing of it is left
    assert (loss.a.item(), loss.b.item()) == pytest.approx((0.7, 0.6)) and step.applied


def test_a_gradient_beyond_use_is_dropped_and_counted_apart():
    loss = TwoGroups()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    schedule = make_lr_schedule("linear", optimizer, 10)
    step = GradientStep(loss, optimizer, lr_schedule=schedule, max_grad_norm=1.0, max_norm_before_clip=5.0)
    metrics = step(loss(scale=2.0))
    assert metrics["grad_norm_actor"].item() == 6.0
    assert (loss.a.item(), loss.b.item()) == (1.0, 1.0) and optimizer.param_groups[0]["lr"] == 0.1
    assert (step.skipped, step.skipped_large, step.applied) == (0, 1, False)
    step(loss())  # 3 and 4: within it
    assert step.applied and loss.a.item() == pytest.approx(0.9, abs=1e-6)
    other = GradientStep(loss, optimizer, lr_schedule=schedule, max_norm_before_clip=5.0)
    other.load_state_dict(step.state_dict())
    assert (other.skipped_large, other.updates) == (1, 2)
    with pytest.raises(ValueError, match="max_norm_before_clip must be a positive number or None, got 0"):
        GradientStep(loss, optimizer, max_norm_before_clip=0)


def test_the_error_names_the_update():
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    step(loss())
    with pytest.raises(FloatingPointError, match=r"Non-finite gradient in a \(.*\) in update 2\."):
        step(loss(scale=torch.tensor(float("inf"))))


@pytest.mark.parametrize(("kept", "left"), [("a", "critic"), ("b", "actor")])
def test_a_group_without_an_optimizer_is_warned_of_once(kept, left):
    loss = TwoGroups()
    step = GradientStep(loss, torch.optim.SGD([getattr(loss, kept)], lr=0.1))
    with pytest.warns(UserWarning, match=rf"\['actor', 'critic'\], but no optimizer of this step holds \{{'{left}': 1"):
        step(loss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(loss())
        GradientStep(loss, {name: torch.optim.SGD([getattr(loss, name)], lr=0.1) for name in ("a", "b")})(loss())


def test_parts_of_a_loss_may_have_steps_of_their_own():
    loss = TwoGroups()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("a", "b"):
            step = GradientStep(loss, torch.optim.SGD([getattr(loss, name)], lr=0.1))
            step(loss().select(f"loss_{name}"))
    assert loss.a.item() == pytest.approx(0.7) and loss.b.item() == pytest.approx(0.6)
