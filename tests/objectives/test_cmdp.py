"""Constrained PPO: two channels against the published numbers, the mixture against PPO, and what is refused."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from edenrl.envs import ConflictPointMass, PointMass
from edenrl.modules import TaskConstraint, gaussian_actor, value_critic
from edenrl.objectives import GAE, CMDPLoss, PPOLoss, TwoChannelGAE, check_reward_groups

GOLDEN = "cmdp"
CLOSE = dict(rtol=1e-5, atol=1e-5)


def value_of_observation():
    return TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["state_value"])


def test_published_returns_and_advantages(golden):
    series = (
        "values",
        "advantages_raw",
        "advantages",
        "returns",
        "rewards_2ch",
        "rg",
        "rs",
        "rp",
        "dones",
        "time_outs",
    )
    g = {name: golden[name].transpose(0, 1) for name in series}  # [T, N] -> [N, T]
    following = torch.cat([g["values"][:, 1:], golden["last_values"][:, None]], 1)
    column = {name: g[name].unsqueeze(-1) for name in ("rg", "rs", "rp", "dones", "time_outs")}
    rollout = TensorDict(
        observation=g["values"],
        next=dict(
            observation=following,
            reward_groups=dict(task=column["rg"], style=column["rs"], penalty=column["rp"]),
            done=column["dones"],
            terminated=column["dones"] & ~column["time_outs"],
            truncated=column["time_outs"],
        ),
        batch_size=g["rg"].shape,
    )
    # The release bootstraps a time-out from V(s_t), which ours does where the last observation is missing.
    options = dict(
        gamma=float(golden["cfg_gamma"]), lmbda=float(golden["cfg_lam"]), value_network=value_of_observation()
    )
    out = TwoChannelGAE(**options, auto_reset_env=True)(rollout.clone())
    torch.testing.assert_close(out["advantage"], g["advantages_raw"], **CLOSE)
    torch.testing.assert_close(out["value_target"], g["returns"], **CLOSE)
    bootstrap = options["gamma"] * g["values"] * column["time_outs"]
    torch.testing.assert_close(out["next", "reward_channels"] + bootstrap, g["rewards_2ch"], **CLOSE)
    out = TwoChannelGAE(**options, auto_reset_env=True, average_gae=True)(rollout.clone())
    torch.testing.assert_close(out["advantage"], g["advantages"], **CLOSE)
    flat = out["advantage"].transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(flat, golden["batch_advantages"], **CLOSE)


def test_published_mixture_and_losses(golden):
    """One action of standard deviation 1 whose distance from the mean gives the log-probabilities of the table."""
    new, old = golden["batch_log_prob_new"], golden["batch_log_prob_old"]
    shift = -5.0 - 0.5 * float(torch.tensor(2 * torch.pi).log())  # log-probability of a distance of sqrt(10) and 0 more
    distance = (2.0 * (shift - (new - new.max()) + 5.0 + 5.0)).sqrt()
    base = -0.5 * distance.square() - 0.5 * float(torch.tensor(2 * torch.pi).log())
    actor = ProbabilisticActor(
        TensorDictModule(lambda x: (x, torch.ones_like(x)), in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )
    critic = TensorDictModule(nn.Identity(), in_keys=["values"], out_keys=["state_value"])
    constraint = TaskConstraint(lambda_init=float(golden["batch_lambda"]))
    loss = CMDPLoss(
        actor, critic, constraint, clip_epsilon=float(golden["cfg_clip"]), entropy_coeff=0.0, functional=False
    )
    batch = TensorDict(
        observation=torch.zeros(len(new), 1),
        loc=torch.zeros(len(new), 1),
        scale=torch.ones(len(new), 1),
        action=distance[:, None],
        action_log_prob=base - (new - old),  # only the ratio counts
        values=golden["batch_values_new"],
        state_value=golden["batch_values_old"],
        value_target=golden["batch_returns"],
        advantage=golden["batch_advantages"],
        batch_size=new.shape,
    )
    out = loss(batch)
    torch.testing.assert_close(out["task_weight"], golden["batch_w_task"], **CLOSE)
    torch.testing.assert_close(out["loss_objective"], golden["loss_surrogate"], **CLOSE)
    torch.testing.assert_close(out["loss_critic"], golden["loss_value"], **CLOSE)
    loss.reduction = "none"
    mixed = -loss(batch.set("action_log_prob", base))["loss_objective"]  # a ratio of 1
    torch.testing.assert_close(mixed, golden["batch_mixed_advantage"], **CLOSE)


def build(cls=CMDPLoss, num_values=2, dtype=torch.float32, seed=0, **kwargs):
    torch.manual_seed(seed)
    actor = gaussian_actor({"observation": 3}, 2, hidden=(8,))
    critic = value_critic({"observation": 3}, num_values=num_values, hidden=(8,))
    constraint = [TaskConstraint(lambda_init=0.4, vg_window=2)] if cls is CMDPLoss else []
    for part in constraint:
        part.update(torch.tensor([[[8.0], [6.0]]]), torch.ones(1, 2, 1, dtype=torch.bool))
    return cls(actor, critic, *constraint, **kwargs).to(dtype), actor.to(dtype), critic.to(dtype)


def batch_of(actor, critic, rows=32, dtype=torch.float32):
    data = TensorDict(observation=torch.randn(rows, 3, dtype=dtype), batch_size=[rows])
    data = critic(actor(data)).detach()
    shape = data["state_value"].shape
    data["action_log_prob"] = data["action_log_prob"] + 0.3 * torch.randn(rows, dtype=dtype)
    noise = {name: torch.randn(shape, dtype=dtype) for name in ("advantage", "value_target")}
    return data.update(noise)


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equal_channels_are_ppo_exactly(functional, reduction):
    options = dict(functional=functional, reduction=reduction, dtype=torch.float64)
    ppo, actor, one = build(PPOLoss, num_values=1, **options)
    cmdp, twin, two = build(**options)
    twin.load_state_dict(actor.state_dict())
    # Both values are the one of PPO.
    state = one.state_dict()
    two.load_state_dict({k: torch.cat([v, v]) if "mlp.2" in k else v for k, v in state.items()})
    if functional:
        for own, other in ((cmdp.actor_network_params, twin), (cmdp.critic_network_params, two)):
            own.update_(TensorDict.from_module(other).data)
        ppo.actor_network_params.update_(TensorDict.from_module(actor).data)
        ppo.critic_network_params.update_(TensorDict.from_module(one).data)
    data = batch_of(actor, one, dtype=torch.float64)
    doubled = data.clone()
    for key in ("advantage", "state_value", "value_target"):
        doubled[key] = data[key].expand(-1, 2).clone()
    expected, out = ppo(data), cmdp(doubled)
    for name, value in expected.items():
        if name == "loss_critic":  # a mean over twice as many equal numbers
            torch.testing.assert_close(out[name], value.squeeze(-1) if value.ndim > 1 else value)
        else:
            assert torch.equal(out[name], value) or name == "explained_variance", name
    if reduction == "mean":
        for loss, result in ((ppo, expected), (cmdp, out)):
            sum(v for k, v in result.items() if k.startswith("loss_")).backward()
            assert all(p.grad is not None for p in loss.parameter_groups()["policy"])
        for a, b in zip(ppo.parameter_groups()["policy"], cmdp.parameter_groups()["policy"], strict=True):
            assert torch.equal(a.grad, b.grad)


def test_the_mixture_follows_the_weight():
    """Weight 1 sees the task alone and weight 0 style alone; between them the objective's gradient is their mixture."""
    loss, actor, critic = build(functional=False)
    data = batch_of(actor, critic)
    data["action_log_prob"] = actor.get_dist(data).log_prob(data["action"]).detach()  # ratio 1: nothing is clipped

    def gradient(multiplier, advantage):
        loss.constraint.multiplier.fill_(multiplier)
        loss.zero_grad()
        loss(data.clone().set("advantage", advantage))["loss_objective"].backward()
        return torch.cat([p.grad.flatten() for p in loss.parameter_groups()["policy"]])

    task, style = data["advantage"].unbind(-1)
    only = [gradient(0.0, torch.stack([x, x], -1)) for x in (task, style)]
    torch.testing.assert_close(gradient(50.0, data["advantage"]), only[0])
    torch.testing.assert_close(gradient(-50.0, data["advantage"]), only[1])
    share = float(torch.tensor(0.7).sigmoid())
    torch.testing.assert_close(gradient(0.7, data["advantage"]), share * only[0] + (1 - share) * only[1])


def test_metrics_of_the_constraint_are_returned_and_its_state_is_the_losses():
    loss, actor, critic = build()
    out = loss(batch_of(actor, critic))
    names = ("task_weight", "lambda", "task_return", "task_return_best", "task_ratio")
    # alpha 0.9, the first ratio is 1: lambda 0.4 - 0.005.
    assert [float(out[name]) for name in names] == pytest.approx([0.597490, 0.395, 7.0, 7.0, 1.0], abs=1e-5)
    other, _, _ = build(seed=1)
    other.constraint.update(torch.ones(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool))
    other.load_state_dict(loss.state_dict())
    assert float(other.constraint.task_return) == 7.0


def test_normalizing_the_mixture_is_refused():
    actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3}, num_values=2)
    with pytest.raises(ValueError, match="undo the mixture.*average_gae=True"):
        CMDPLoss(actor, critic, TaskConstraint(), normalize_advantage=True)


def test_one_channel_is_refused_with_its_shape():
    loss, actor, critic = build()
    data = batch_of(actor, critic)
    for key in ("advantage", "state_value", "value_target"):
        with pytest.raises(ValueError, match=rf"'{key}' of shape \(32, 2\), got \(32, 1\).*num_values=2"):
            loss(data.clone().set(key, data[key][..., :1]))
    with pytest.raises(KeyError, match="no 'advantage'"):
        loss(data.exclude("advantage"))
    rollout = ConflictPointMass(3, seed=0).rollout(5)
    gae = TwoChannelGAE(gamma=0.9, lmbda=0.9, value_network=value_critic({"observation": 10}))
    with pytest.raises(ValueError, match=r"two values, task and style, \(3, 5, 2\); its values are \(3, 5, 1\)"):
        gae(rollout)


def grouped(*names):
    groups = {name: torch.zeros(3, 5, 1) for name in names}
    rollout = ConflictPointMass(3, seed=0).rollout(5)
    return rollout.set(("next", "reward_groups"), TensorDict(groups, batch_size=[3, 5]))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["task", "style"], r"groups \['style', 'task'\].*lacks \['penalty'\]"),
        (["task", "style", "penalty", "bonus"], r"has the unknown groups \['bonus'\]"),
        (["task", "styl", "penalty"], r"lacks \['style'\] and has the unknown groups \['styl'\]"),
        ([], r"groups \[\].*lacks \['task', 'style', 'penalty'\]"),
    ],
)
def test_groups_missing_extra_or_misnamed_are_refused_by_name(names, message):
    gae = TwoChannelGAE(gamma=0.9, lmbda=0.9, value_network=value_critic({"observation": 10}, num_values=2))
    with pytest.raises(ValueError, match=message):
        gae(grouped(*names))
    with pytest.raises(ValueError, match=message):
        check_reward_groups(grouped(*names)["next"])


def test_an_environment_without_groups_is_refused_before_anything_is_built():
    with pytest.raises(ValueError, match=r"the reward groups \[\].*--env.kwargs.groups"):
        check_reward_groups(PointMass(2).observation_spec)
    check_reward_groups(ConflictPointMass(2).observation_spec)


def test_a_reward_that_is_not_finite_is_named_by_its_group():
    rollout = grouped("task", "style", "penalty")
    rollout["next", "reward_groups", "style"][1, 2] = torch.nan
    gae = TwoChannelGAE(gamma=0.9, lmbda=0.9, value_network=value_critic({"observation": 10}, num_values=2))
    with pytest.raises(ValueError, match=r"'reward_groups', 'style'\) holds nan at env 1, step 2"):
        gae(rollout)


def random_rollout(envs=4, steps=32, time_last=True):
    torch.manual_seed(1)
    done = torch.rand(envs, steps, 1) < 0.1
    truncated = done & (torch.rand(envs, steps, 1) < 0.5)
    observation = torch.randn(envs, steps, 2)
    # Within an episode the next observation is the one that follows.
    following = torch.where(done, torch.randn(envs, steps, 2), observation.roll(-1, 1))
    groups = {name: torch.randn(envs, steps, 1) for name in ("task", "style", "penalty")}
    out = TensorDict(
        observation=observation,
        next=dict(
            observation=following,
            reward_groups=groups,
            done=done,
            terminated=done & ~truncated,
            truncated=truncated,
        ),
        batch_size=[envs, steps],
        names=[None, "time"],
    )
    return out if time_last else out.transpose(0, 1)


@pytest.mark.parametrize("time_last", [True, False])
def test_channels_are_independent_columns_bit_for_bit(time_last):
    """One done flag for both; each channel is what GAE makes of it alone."""
    data = random_rollout(time_last=time_last)
    options = dict(gamma=0.97, lmbda=0.9)
    both = TwoChannelGAE(**options, value_network=value_of_observation())(data.clone())
    for channel, name in enumerate(("task", "style")):
        single = data.clone().exclude(("next", "reward_groups"))
        groups = data["next", "reward_groups"]
        single["next", "reward"] = groups[name] + groups["penalty"]
        for key in ("observation", ("next", "observation")):
            single[key] = data[key][..., channel : channel + 1]
        alone = GAE(**options, value_network=value_of_observation())(single)
        for key in ("advantage", "value_target", "state_value"):
            assert torch.equal(both[key][..., channel], alone[key][..., 0]), (key, channel)
    # Mixing commutes with the estimator, which is linear.
    share = torch.tensor([0.3, 0.7])
    rows = both if time_last else both.transpose(0, 1)
    mixed, _ = generalized_advantage_estimate(
        0.97,
        0.9,
        (rows["state_value"] * share).sum(-1, keepdim=True),
        (rows["next", "state_value"] * share).sum(-1, keepdim=True),
        (rows["next", "reward_channels"] * share).sum(-1, keepdim=True),
        rows["next", "done"],
        rows["next", "terminated"],
    )
    torch.testing.assert_close((rows["advantage"] * share).sum(-1, keepdim=True), mixed, rtol=0, atol=2e-6)


def test_each_channel_is_standardized_on_its_own():
    data = random_rollout()
    data["next", "reward_groups", "style"] *= 100.0
    out = TwoChannelGAE(gamma=0.97, lmbda=0.9, value_network=value_of_observation(), average_gae=True)(data)
    flat = out["advantage"].reshape(-1, 2)
    torch.testing.assert_close(flat.mean(0), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(flat.std(0), torch.ones(2), rtol=0, atol=1e-5)


def test_a_plain_reward_that_is_not_finite_is_refused_too():
    rollout = random_rollout()
    rollout["next", "reward"] = torch.zeros(*rollout.shape, 1)
    rollout["next", "reward"][2, 7] = torch.nan
    with pytest.raises(ValueError, match=r"'reward'\) holds nan at env 2, step 7"):
        TwoChannelGAE(gamma=0.99, lmbda=0.95, value_network=value_critic({"observation": 2}, num_values=2))(rollout)
