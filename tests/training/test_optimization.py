"""Gradient steps as an algorithm's configuration describes them."""

import pytest
import torch
from torch import nn

from edenrl.config import PPOConfig, RunConfig, SimbaPPOConfig
from edenrl.optim import GradientStep, KLAdaptiveLR, MuonAdamW
from edenrl.training import Run, follow_rate
from edenrl.training.optimization import build_gradient_step


class Loss(nn.Module):
    """Two networks and the groups they are trained in; a third one is trained elsewhere."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic, self.other = nn.Linear(3, 2), nn.Linear(3, 1), nn.Linear(1, 1)

    def parameter_groups(self):
        return {"policy": list(self.actor.parameters()), "critic": list(self.critic.parameters())}


def trained_by(optimizer):
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def test_by_default_one_optimizer_has_all_groups():
    loss = Loss()
    algo = PPOConfig(optimizer="adamw", lr=2e-3, max_grad_norm=0.7, on_nonfinite="skip")
    step, _ = build_gradient_step(algo, loss, iterations=10)
    optimizer = step.optimizers["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.param_groups[0]["lr"] == 2e-3
    assert trained_by(optimizer) == {id(p) for net in (loss.actor, loss.critic) for p in net.parameters()}
    assert step.max_grad_norm == {"policy": 0.7, "critic": 0.7} and step.on_nonfinite == "skip"
    assert isinstance(step.lr_schedule, KLAdaptiveLR)


def test_muon_gets_the_modules_and_the_options_of_its_configuration():
    algo = SimbaPPOConfig(muon_weight_decay=0.25)
    loss = Loss()
    del loss.other
    step, _ = build_gradient_step(algo, loss, iterations=3)
    assert isinstance(step.optimizers["optimizer"], MuonAdamW)
    assert 0.25 in {group.get("weight_decay") for group in step.optimizers["optimizer"].param_groups}


def test_parameters_by_name_and_a_rate_of_ones_own():
    loss = Loss()
    trained = {"optimizer": loss.actor.parameters(), "slow": loss.critic.parameters()}
    step, _ = build_gradient_step(PPOConfig(lr=1e-3), loss, trained, iterations=3, lr={"slow": 1e-4})
    rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in step.optimizers.items()}
    assert rates == {"optimizer": 1e-3, "slow": 1e-4}


@pytest.mark.parametrize(
    ("options", "updates"),
    [({}, 6 * 5 * 4), ({"every": 2}, 6 * 5 * 4 // 2), ({"updates": 50}, 50), ({"updates": 1, "every": 4}, 1)],
)
def test_the_schedule_ends_with_the_run(options, updates):
    algo = PPOConfig(lr_schedule="linear", lr=1.0, epochs=5, num_minibatches=4, final_lr_fraction=0.25)
    step, _ = build_gradient_step(algo, Loss(), iterations=6, **options)
    rate = step.lr_schedule.lr_lambdas[0]
    assert rate(updates) == 0.25 and rate(updates - 1) > 0.25


def test_a_restart_spans_what_is_left_and_returns_rates_without_a_schedule():
    algo = PPOConfig(lr_schedule="linear", lr=0.8, epochs=2, num_minibatches=3)
    step, restart = build_gradient_step(algo, Loss(), iterations=6)
    step.optimizers["optimizer"].param_groups[0]["lr"] = 0.1
    restart(2)
    assert step.optimizers["optimizer"].param_groups[0]["lr"] == 0.8
    assert step.lr_schedule.lr_lambdas[0](2 * 2 * 3) == 0.0 and step.lr_schedule.lr_lambdas[0](11) > 0.0

    loss = Loss()
    constant, restart = build_gradient_step(algo, loss, {"a": loss.actor.parameters()}, iterations=6, schedule=False)
    constant.optimizers["a"].param_groups[0]["lr"] = 0.1
    restart(2)
    assert constant.lr_schedule is None and constant.optimizers["a"].param_groups[0]["lr"] == 0.8


def test_one_step_follows_the_rate_of_another():
    nets = nn.Linear(1, 1), nn.Linear(2, 2)
    leader = GradientStep(nets[0], torch.optim.SGD(nets[0].parameters(), lr=0.3))
    groups = [{"params": [p]} for p in nets[1].parameters()]
    follower = GradientStep(nets[1], torch.optim.SGD(groups, lr=0.1))
    follow_rate(follower, leader)
    assert [group["lr"] for group in follower.optimizers["optimizer"].param_groups] == [0.3, 0.3]


def test_a_run_keeps_the_steps_it_makes_under_their_names(tmp_path):
    class Train(RunConfig):
        algorithm: PPOConfig = PPOConfig()

    with Run(Train(run_dir=str(tmp_path / "run"), quiet=True, total_frames=1)) as run:
        loss = Loss()
        step = run.gradient_step(loss)
        trained = {"other_optimizer": loss.other.parameters()}
        with pytest.raises(ValueError, match="must be in exactly one group"):
            run.gradient_step(loss, trained, name="other_step")
        other = run.gradient_step(
            loss.other, {"other_optimizer": torch.optim.SGD(loss.other.parameters())}, name="other"
        )
        run.begin()
        kept = run.folder.checkpoints.components
        assert kept["step"] is step and kept["optimizer"] is step.optimizers["optimizer"]
        assert kept["other"] is other and kept["other_optimizer"] is other.optimizers["other_optimizer"]
