import math
import re

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from edenrl.modules import (
    GaussianMLP,
    GroupMLP,
    StateIndependentStd,
    categorical_actor,
    flash_actor,
    gaussian_actor,
    make_actor,
    observation_groups,
    update_normalization,
    value_critic,
    vector_groups,
)


@pytest.fixture
def spec():
    return Composite(
        policy=Unbounded((4, 45)),
        scan=Unbounded((4, 132)),
        depth=Unbounded((4, 58, 87)),
        count=Unbounded((4, 1), dtype=torch.int64),
        metrics=Composite(success=Unbounded((4, 1)), shape=(4,)),
        shape=(4,),
    )


def test_groups_are_read_from_the_spec_in_the_order_asked(spec):
    assert observation_groups(spec) == {"policy": 45, "scan": 132}
    assert list(observation_groups(spec, ["scan", "policy"])) == ["scan", "policy"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["polcy"], "'polcy' does not exist. Groups of this environment: {'policy': 45, 'scan': 132}"),
        (["depth"], r"'depth' has features of shape \(58, 87\), not a vector"),
        ([], "No observation group"),
    ],
)
def test_wrong_groups_are_refused_with_the_available_ones(spec, names, message):
    with pytest.raises(ValueError, match=message):
        observation_groups(spec, names)


def test_groups_are_concatenated_in_order():
    net = GroupMLP(3, 1, hidden=(), normalize=False)
    nn.init.constant_(net.mlp[0].weight, 0.0)
    net.mlp[0].weight.data[0] = torch.tensor([1.0, 10.0, 100.0])
    actor = value_critic({"b": 1, "a": 2}, hidden=(), normalize=False)
    actor.module.load_state_dict(net.state_dict())
    td = TensorDict(a=torch.tensor([[2.0, 3.0]]), b=torch.tensor([[1.0]]), batch_size=[1])
    assert actor(td)["state_value"].item() == 321.0


def test_orthogonal_weights_and_gains():
    net = GaussianMLP(8, 3, hidden=(16,), normalize=False)
    hidden, last = (m.weight for m in net.mlp if isinstance(m, nn.Linear))
    torch.testing.assert_close(hidden.T @ hidden, 2 * torch.eye(8), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(3), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("init", [0.01, 0.37, 1.0, 5.0])
def test_initial_std_is_exact(init):
    torch.testing.assert_close(StateIndependentStd(2, init)(), torch.full((2,), init), rtol=1e-5, atol=0)


def test_std_is_bounded_and_its_gradient_lives_at_the_bound():
    std = StateIndependentStd(2)
    for raw in (-50.0, 50.0):
        with torch.no_grad():
            std.raw_log_std.fill_(raw)
        value = std()
        assert (value >= 1e-3).all() and (value <= 20.6).all()
        torch.distributions.Normal(torch.zeros(2), value).sample()
        before = value.detach().clone()
        optimizer = torch.optim.Adam(std.parameters(), lr=0.1)
        (std() - 1).square().sum().backward()
        optimizer.step()
        moved = std().detach() - before
        assert (moved > 0).all() if raw < 0 else (moved < 0).all()


@pytest.mark.parametrize("raw", [-1e6, -5000.0, -4096.0, 0.0, 4096.0, 1e6])
def test_std_keeps_a_finite_gradient_however_far_it_is(raw):
    std = StateIndependentStd(1)
    with torch.no_grad():
        std.raw_log_std.fill_(raw)
    std().log().sum().backward()
    assert std.raw_log_std.grad.isfinite().all() and std.raw_log_std.grad.item() >= 0


def test_std_has_the_values_and_the_slope_of_its_formula():
    """Written out in float64 with 0.5 (x + sqrt(x^2 + 1)), whose slope at zero is a half."""
    raw = torch.linspace(-9.0, 9.0, 37, dtype=torch.float64)
    raw[5], raw[9] = math.log(20.0), math.log(1e-3)  # where the argument of the outer form is zero
    x, low, high = raw.clone().requires_grad_(), math.log(1e-3), math.log(20.0)

    def plus(y):
        return 0.5 * (y + (y * y + 1).sqrt())

    expected = low + plus(high - plus(high - x) - low)
    expected.sum().backward()
    std = StateIndependentStd(len(raw)).double()
    with torch.no_grad():
        std.raw_log_std.copy_(raw)
    log_std = std().log()
    log_std.sum().backward()
    torch.testing.assert_close(log_std, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(std.raw_log_std.grad, x.grad, rtol=1e-7, atol=1e-12)


def test_std_recovers_from_the_bound():
    std = StateIndependentStd(1)
    with torch.no_grad():
        std.raw_log_std.fill_(-8.0)
    optimizer = torch.optim.Adam(std.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        (std().log()).square().sum().backward()
        optimizer.step()
    assert std().item() == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ValueError, match="min_std < init_std < max_std"):
        StateIndependentStd(1, init_std=0.0)


def test_gaussian_actor_writes_the_documented_keys_and_density():
    torch.manual_seed(0)
    actor = gaussian_actor({"policy": 3}, 2, init_std=0.5)
    td = actor(TensorDict(policy=torch.randn(4, 5, 3), batch_size=[4, 5]))
    assert {"loc", "scale", "action", "action_log_prob"} <= set(td.keys())
    z = (td["action"] - td["loc"]) / 0.5
    expected = (-0.5 * z.square() - math.log(0.5) - 0.5 * math.log(2 * math.pi)).sum(-1)
    torch.testing.assert_close(td["action_log_prob"], expected, rtol=1e-5, atol=1e-5)
    assert td["action_log_prob"].shape == (4, 5)


@pytest.mark.parametrize("loc", [-1e6, 0.0, 1e6])
def test_squash_stays_in_an_asymmetric_box_with_finite_density(loc):
    actor = gaussian_actor({"policy": 3}, Bounded(-2.0, 5.0, shape=(2,)), squash=True)
    with torch.no_grad():
        actor.module[0].module.mlp[-1].bias.fill_(loc)
    td = actor(TensorDict(policy=torch.zeros(64, 3), batch_size=[64]))
    assert (td["action"] >= -2).all() and (td["action"] <= 5).all()
    assert td["action_log_prob"].isfinite().all()
    limit = {-1e6: -2.0, 0.0: 1.5, 1e6: 5.0}[loc]
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        mean = actor(TensorDict(policy=torch.zeros(1, 3), batch_size=[1]))["action"]
    torch.testing.assert_close(mean, torch.full((1, 2), limit), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, ExplorationType.MEAN])
def test_a_squashed_action_comes_with_the_sample_before_the_tanh(kind):
    torch.manual_seed(3)
    actor = gaussian_actor({"policy": 3}, Bounded(-2.0, 5.0, shape=(2,)), squash=True, init_std=2.0)
    with set_exploration_type(kind):
        td = actor(TensorDict(policy=torch.randn(4, 6, 3), batch_size=[4, 6]))
    assert set(actor.out_keys) == set(td.keys()) - {"policy"}
    torch.testing.assert_close(td["action"], 1.5 + 3.5 * td["pre_squash_action"].tanh(), rtol=1e-4, atol=1e-4)
    exact = torch.distributions.TransformedDistribution(
        torch.distributions.Independent(torch.distributions.Normal(td["loc"], td["scale"]), 1),
        [torch.distributions.TanhTransform(), torch.distributions.AffineTransform(1.5, 3.5)],
    ).log_prob(td["action"])
    torch.testing.assert_close(td["action_log_prob"], exact, rtol=1e-3, atol=1e-2)


def test_wrong_action_spaces_name_the_fix():
    with pytest.raises(ValueError, match="Use categorical_actor, or make_actor"):
        gaussian_actor({"observation": 4}, Categorical(2))
    with pytest.raises(ValueError, match="Use gaussian_actor"):
        categorical_actor({"observation": 4}, Unbounded(3))
    for spec in (MultiCategorical((2, 3)), Categorical(3, shape=(2,)), Bounded(0, 3, (2,), dtype=torch.int64)):
        for build in (make_actor, gaussian_actor, categorical_actor, flash_actor):
            with pytest.raises(ValueError, match="one discrete action.*let PPO draw.*TransformAction") as said:
                build({"observation": 4}, spec)
            assert "categorical_actor" not in str(said.value)
    with pytest.raises(ValueError, match="categorical_action_encoding=True"):
        make_actor({"observation": 4}, OneHot(3))
    with pytest.raises(ValueError, match=r"declares none.*squash=False \(--env.action_mode clip\)"):
        gaussian_actor({"observation": 4}, Unbounded(3), squash=True)
    with pytest.raises(ValueError, match=r"floating-point action vector, got Composite"):
        gaussian_actor({"observation": 4}, Composite(action=Unbounded(3)))
    with pytest.raises(ValueError, match="none of {'image': 'torch.uint8"):
        observation_groups(Composite(image=Unbounded((4, 8, 8), dtype=torch.uint8), shape=(4,)))
    with pytest.raises(ValueError, match=r"Unknown activation 'gelu'; choose one of \['elu'"):
        GroupMLP(3, 1, activation="gelu")


@pytest.mark.parametrize(
    ("low", "high", "named"),
    [
        ([-1.0, 0.5, -1.0], [1.0, 0.5, 2.0], "component 1 has [0.5, 0.5]"),
        ([-1.0, -1.0], [1.0, float("inf")], "component 1 has [-1, inf]"),
        ([3.0, -float("inf"), 0.0], [3.0, float("inf"), 1.0], "component 0 has [3, 3], component 1 has [-inf, inf]"),
        ([0.0], [-1.0], "component 0 has [0, -1]"),
    ],
)
def test_bounds_that_a_tanh_cannot_fill_are_named_with_what_the_algorithm_allows(low, high, named):
    spec = Bounded(torch.tensor(low), torch.tensor(high), (len(low),))
    with pytest.raises(ValueError, match=re.escape(named)) as said:
        gaussian_actor({"observation": 4}, spec, squash=True)
    assert "squash=False (--env.action_mode clip)" in str(said.value)
    gaussian_actor({"observation": 4}, spec)
    with pytest.raises(ValueError, match=re.escape(named)) as said:
        flash_actor({"observation": 4}, spec)
    assert "without a tanh, such as PPO" in str(said.value) and "squash" not in str(said.value)


def test_actor_is_chosen_from_the_spec():
    assert "logits" in make_actor({"observation": 4}, Categorical(2)).out_keys
    assert "loc" in make_actor({"observation": 4}, Bounded(-1, 1, (3,))).out_keys


def test_normalization_is_updated_inside_actor_and_critic():
    groups = {"a": 2, "b": 1}
    data = TensorDict(a=torch.randn(6, 7, 2) * 100 + 50, b=torch.randn(6, 7, 1), batch_size=[6, 7])
    for module in (gaussian_actor(groups, 2), categorical_actor(groups, 3), value_critic(groups)):
        update_normalization(module, data)
        norms = [m for m in module.modules() if type(m).__name__ == "RunningNorm"]
        assert [int(m.count) for m in norms] == [42]
        torch.testing.assert_close(norms[0].mean[:2].float(), data["a"].reshape(-1, 2).mean(0), rtol=1e-4, atol=1e-4)
    update_normalization(value_critic(groups, normalize=False), data)  # nothing to update is fine


def test_a_shared_trunk_is_counted_once_and_a_missing_input_is_named():
    trunk = TensorDictModule(GroupMLP(2, 4, hidden=()), in_keys=["a"], out_keys=["hidden"])
    heads = [TensorDictModule(nn.Linear(4, 1), in_keys=["hidden"], out_keys=[name]) for name in ("x", "y")]
    data = TensorDict(a=torch.randn(20, 2), batch_size=[20])
    update_normalization(nn.ModuleList([TensorDictSequential(trunk, head) for head in heads]), data)
    assert int(trunk.module.norm.count) == 20
    with pytest.raises(KeyError, match=r"reads \['a'\], of which the data lacks \['a'\]"):
        update_normalization(trunk, TensorDict(b=torch.zeros(3, 2), batch_size=[3]))


def test_distribution_stays_in_float32_under_autocast():
    actor = gaussian_actor({"policy": 3}, 2)
    td = TensorDict(policy=torch.randn(8, 3), batch_size=[8])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = actor(td)
    assert out["loc"].dtype == out["action_log_prob"].dtype == torch.float32


@pytest.mark.parametrize(("width", "edge"), [(1, 3e38), (4, 2e38)])
def test_a_box_whose_width_overflows_has_no_finite_bounds(width, edge):
    bounds = Bounded(-edge, edge, (width,))
    with pytest.raises(ValueError, match="finite action bounds with low < high; component 0 has"):
        gaussian_actor({"observation": 3}, bounds, squash=True)
    actor = gaussian_actor({"observation": 3}, Bounded(-edge / 4, edge / 4, (width,)), squash=True)
    assert actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))["action"].isfinite().all()


@pytest.mark.parametrize("width", [1, 5])
def test_vector_groups_are_the_floating_point_vectors(width, recwarn):
    spec = Composite(
        policy=Unbounded((4, width)),
        image=Unbounded((4, 8, 9)),
        number=Unbounded((4, 2), dtype=torch.int64),
        metrics=Composite(height=Unbounded((4, 1)), shape=(4,)),
        shape=(4,),
    )
    assert vector_groups(spec) == {"policy": width}
    assert not recwarn.list
