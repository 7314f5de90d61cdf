import math

import pytest
import torch
from torch import nn

from edenrl.optim import KLAdaptiveLR, make_lr_schedule, make_optimizer

GOLDEN = "flashsac_data"


def optimizer_of(lr=1e-3, groups=1):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr / (i + 1)} for i in range(groups)])


def rates(schedule, optimizer, steps):
    out = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        out.append(optimizer.param_groups[0]["lr"])
    return out


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop"])
def test_optimizers_by_name_take_steps(name):
    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(name, [weight], lr=0.1)
    weight.square().sum().backward()
    optimizer.step()
    assert (weight < 1).all()


def test_fused_adam_equals_plain_adam():
    torch.manual_seed(0)
    plain, fused = nn.Linear(4, 3), nn.Linear(4, 3)
    fused.load_state_dict(plain.state_dict())
    a = torch.optim.Adam(plain.parameters(), lr=1e-2)
    b = make_optimizer("adam", fused.parameters(), lr=1e-2)
    assert b.param_groups[0]["fused"]
    for _ in range(20):
        x = torch.randn(8, 4)
        for net, opt in ((plain, a), (fused, b)):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
    torch.testing.assert_close(plain.weight, fused.weight, rtol=1e-5, atol=1e-6)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"Unknown optimizer 'adm'; choose one of \['adam'"):
        make_optimizer("adm", [nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="Unknown learning-rate schedule 'lin'"):
        make_lr_schedule("lin", optimizer_of(), 10)
    with pytest.raises(ValueError, match=r"'linear' schedule has no option \['warmup'\]"):
        make_lr_schedule("linear", optimizer_of(), 10, warmup=3)
    with pytest.raises(ValueError, match="total_updates >= 1"):
        make_lr_schedule("linear", optimizer_of(), 0)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("linear", "final_fraction", -1),
        ("step", "every", 0),
        ("exponential", "gamma", -1),
        ("warmup_cosine", "warmup", 0),
    ],
)
def test_options_out_of_range_are_named(name, option, value):
    with pytest.raises(ValueError, match=f"{name!r} schedule needs {option}"):
        make_lr_schedule(name, optimizer_of(), 10, **{option: value})


def test_groups_generators_and_named_parameters_all_train():
    net = nn.Linear(2, 2)
    for params in (
        net.parameters(),
        [{"params": net.parameters(), "lr": 1e-2}],
        net.named_parameters(),
        [{"params": [net.weight]}, {"params": [net.bias], "lr": 1.0}],
    ):
        optimizer = make_optimizer("adam", params, lr=1e-3)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
        assert all(group["fused"] for group in optimizer.param_groups)


def test_schedules_by_hand():
    def run(name, steps, **kw):
        optimizer = optimizer_of(1.0)
        return rates(make_lr_schedule(name, optimizer, steps, **kw), optimizer, steps + 1)

    assert run("constant", 3) == [1.0] * 4
    assert run("linear", 4) == pytest.approx([0.75, 0.5, 0.25, 0.0, 0.0])
    assert run("linear", 4, final_fraction=0.4) == pytest.approx([0.85, 0.7, 0.55, 0.4, 0.4])
    assert run("cosine", 2) == pytest.approx([0.5, 0.0, 0.0], abs=1e-12)
    assert run("step", 3, every=2) == pytest.approx([1.0, 0.1, 0.1, 0.01])
    assert run("exponential", 2) == pytest.approx([0.1, 0.01, 0.001])
    assert run("warmup_cosine", 4, warmup=2) == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0], abs=1e-12)


def test_adaptive_bands_and_bounds_over_all_groups():
    optimizer = optimizer_of(1e-3, groups=2)
    schedule = make_lr_schedule("adaptive", optimizer, 1, target_kl=0.01)
    for kl, expected in ((0.05, 1e-3 / 1.5), (0.004, 1e-3), (0.01, 1e-3), (0.0, 1e-3), (0.004, 1.5e-3)):
        schedule.step(torch.tensor(kl))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(expected / 2)
    for _ in range(30):
        schedule.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 1e-5


def test_nonfinite_kl_is_counted_then_raises():
    optimizer = optimizer_of()
    schedule = KLAdaptiveLR(optimizer, 0.01, max_nonfinite=3)
    for _ in range(3):
        schedule.step(math.nan)
    assert schedule.nonfinite == 3 and optimizer.param_groups[0]["lr"] == 1e-3
    schedule.step(0.01)  # a good one starts the count anew
    for _ in range(3):
        schedule.step(math.inf)
    with pytest.raises(FloatingPointError, match="4 updates in a row"):
        schedule.step(math.nan)


@pytest.mark.parametrize("name", ["adaptive", "cosine"])
def test_a_resumed_schedule_continues_and_owns_no_copy_of_the_rate(name):
    kwargs = dict(target_kl=0.01) if name == "adaptive" else {}

    def build():
        optimizer = optimizer_of(1e-3, groups=2)
        return optimizer, make_lr_schedule(name, optimizer, 100, **kwargs)

    def advance(optimizer, schedule, steps):
        for _ in range(steps):
            optimizer.step()
            schedule.step(*([0.05] if name == "adaptive" else []))

    optimizer, schedule = build()
    advance(optimizer, schedule, 3 if name == "adaptive" else 37)
    if name == "adaptive":
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2.962963e-4, rel=1e-6)
    fresh_optimizer, fresh = build()
    fresh_optimizer.load_state_dict(optimizer.state_dict())
    fresh.load_state_dict(schedule.state_dict())
    if name == "adaptive":
        fresh.step(0.01)
        assert fresh_optimizer.param_groups[0]["lr"] == pytest.approx(2.962963e-4, rel=1e-6)
    advance(optimizer, schedule, 5)
    advance(fresh_optimizer, fresh, 5)
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in fresh_optimizer.param_groups]


def test_warm_up_from_a_fraction_is_the_published_one(golden):
    g = golden
    init, peak, end = (float(g[f"lr.{name}"]) for name in ("init", "peak", "end"))
    warmup, total = int(g["lr.warmup_steps"]), int(g["lr.decay_steps"])
    optimizer = optimizer_of(peak)
    options = dict(warmup=warmup, initial_fraction=init / peak, final_fraction=end / peak)
    schedule = make_lr_schedule("warmup_cosine", optimizer, total, **options)
    got = [optimizer.param_groups[0]["lr"], *rates(schedule, optimizer, int(g["lr.step"].max()))]
    for step, expected in zip(g["lr.step"].tolist(), g["lr.value"].tolist(), strict=True):
        assert got[step] == pytest.approx(expected, rel=1e-5)
