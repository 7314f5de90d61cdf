"""Discriminator, frame statistics and style reward against tests/golden/amp.npz and by hand."""

import copy
import logging
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs import TransformedEnv, check_env_specs

from edenrl.collectors import Collector
from edenrl.envs import Quadruped
from edenrl.modules import AMPReward, Discriminator, FrameNorm, SaturationWatch

CLOSE = dict(rtol=1e-5, atol=1e-5)


GOLDEN = "amp"


def layers(net):
    trunk = [layer for layer in net.trunk if isinstance(layer, nn.Linear)]
    return {**{f"trunk{i}": layer for i, layer in enumerate(trunk)}, "head": net.head}


def golden_discriminator(golden):
    hidden = golden["cfg_hidden_dims"].tolist()
    net = Discriminator(int(golden["cfg_frame_dim"]), int(golden["cfg_num_frames"]), hidden, normalize=False)
    for name, layer in layers(net).items():
        weight = layer.parametrizations.weight
        with torch.no_grad():
            weight.original.copy_(golden[f"{name}_weight_raw"])
            layer.bias.copy_(golden[f"{name}_bias"])
            weight[0]._u.copy_(golden[f"{name}_u"])
            weight[0]._v.copy_(golden[f"{name}_v"])
    return net.eval()


def rollout(windows, gate=None, **entries):
    shape = windows.shape[:-1]
    gate = torch.ones(*shape, 1) if gate is None else gate
    step = {"amp_window": windows, "amp_gate": gate, "reward": torch.zeros(*shape, 1), **entries}
    return TensorDict(next=step, batch_size=shape)


def test_outputs_are_the_published_ones(golden):
    net = golden_discriminator(golden)
    for name, layer in layers(net).items():
        torch.testing.assert_close(layer.weight, golden[f"{name}_weight_eff"], **CLOSE)
        torch.testing.assert_close(layer.weight * golden[f"{name}_sigma"], golden[f"{name}_weight_raw"], **CLOSE)
    for kind in ("policy", "expert"):
        torch.testing.assert_close(net(golden[f"windows_{kind}"]), golden[f"d_{kind}"], **CLOSE)
        torch.testing.assert_close(net.score(golden[f"windows_{kind}"]), golden[f"d_{kind}"], **CLOSE)


@pytest.mark.parametrize("rows", [1, 2])
def test_style_reward_is_the_published_one(golden, rows):
    count = len(golden["gate"])
    shape = (count,) if rows == 1 else (rows, count // rows)
    coeff, scale = float(golden["cfg_reward_coef"]), float(golden["cfg_reward_scale"])
    reward = AMPReward(golden_discriminator(golden), coeff=coeff, scale=scale)
    gate = golden["gate"].float().reshape(*shape, 1)
    task = torch.randn(*shape, 1)
    out = reward(rollout(golden["windows_policy"].reshape(*shape, -1), gate, reward=task.clone()))["next"]
    torch.testing.assert_close(out["style_reward"].flatten(), golden["style_reward"], **CLOSE)
    added = (out["reward"] - task).flatten()
    torch.testing.assert_close(added, golden["style_reward_gated_scaled"], **CLOSE)
    assert torch.equal(out["reward"][gate < 0.5], task[gate < 0.5]), "a closed gate must not touch the reward"


def test_frame_statistics_are_the_published_ones(golden):
    norm = FrameNorm(len(golden["norm_init_mean"]), clip=float(golden["norm_clip"]), eps=float(golden["norm_eps"]))
    for name in ("mean", "var", "count"):
        assert torch.equal(getattr(norm, name).float(), golden[f"norm_init_{name}"])
    for i in range(len(golden["norm_count"])):
        norm.update(golden[f"norm_batch{i}"])
        torch.testing.assert_close(norm.mean.float(), golden["norm_mean"][i], **CLOSE)
        torch.testing.assert_close(norm.var.float(), golden["norm_var"][i], **CLOSE)
        torch.testing.assert_close(norm.count.float(), golden["norm_count"][i], **CLOSE)
        torch.testing.assert_close(norm(golden["norm_query"]), golden["norm_out"][i], **CLOSE)
    before = copy.deepcopy(norm.state_dict())
    norm.eval().update(torch.full_like(golden["norm_batch0"], 9.0))
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_a_cast_leaves_the_frame_statistics_exact():
    norm = FrameNorm(2)
    norm.update(torch.randn(7, 2))
    exact = {name: value.clone() for name, value in norm.state_dict().items()}
    half = norm.to(torch.float16).to(torch.float32)
    assert all(torch.equal(value, half.state_dict()[name]) for name, value in exact.items())
    assert half.count.dtype == torch.float64 and half(torch.zeros(2)).dtype == torch.float32


def test_windows_are_normalized_frame_by_frame():
    net = Discriminator(2, 3, (4,))
    # Last frames of the two windows: (0, 10) and (2, 30). Mean (1, 20), variance (1, 100), to 1e-4.
    windows = torch.tensor([[9.0, 9.0, 9.0, 9.0, 0.0, 10.0], [9.0, 9.0, 9.0, 9.0, 2.0, 30.0]])
    net.update_normalization(windows[:1], windows[1:])
    expected = torch.tensor([[0.0, 1.0, 1.0, 0.0, 2.0, -1.0]])
    given = torch.tensor([[1.0, 30.0, 2.0, 20.0, 3.0, 10.0]])
    torch.testing.assert_close(net.normalize(given), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(net(given), net.network(net.normalize(given)))


@pytest.mark.parametrize("training", [True, False])
def test_scoring_changes_nothing_and_training_mode_does(training):
    net = Discriminator(3, 4, (8, 8)).train(training)
    windows = torch.randn(6, 5, 12)
    before = copy.deepcopy(net.state_dict())
    AMPReward(net)(rollout(windows))
    net.score(windows)
    after = net.state_dict()
    vectors = [name for name in before if name.endswith(("_u", "_v"))]
    assert len(vectors) == 6 and all(torch.equal(before[name], after[name]) for name in before)
    assert net.training is training and net.trunk[0].parametrizations.weight.training is training
    net(windows)
    changed = [name for name in before if not torch.equal(before[name], net.state_dict()[name])]
    assert set(changed) <= set(vectors) and bool(changed) is training
    net.train().update_normalization(windows)
    assert not torch.equal(before["norm.mean"], net.state_dict()["norm.mean"])


def test_a_whole_rollout_scores_as_its_steps_do():
    net = Discriminator(12, 5)
    net.update_normalization(torch.randn(40, 60))
    reward = AMPReward(net)
    data = rollout(torch.randn(16, 24, 60), (torch.rand(16, 24, 1) < 0.7).float(), reward=torch.randn(16, 24, 1))
    steps = torch.stack([reward(step.clone()) for step in data.unbind(1)], 1)
    whole = reward(data.clone())
    for key in ("reward", "style_reward"):
        torch.testing.assert_close(whole["next", key], steps["next", key], rtol=0, atol=1e-6)


def test_style_reward_by_hand():
    net = Discriminator(1, 2, (1,), normalize=False)

    class Fixed(nn.Module):
        def forward(self, x):
            return x[..., -1:]

    net.trunk, net.head = nn.Identity(), Fixed()
    d = torch.tensor([1.0, 0.0, -1.0, 3.0, 4.0])
    reward = AMPReward(net, coeff=2.0, scale=0.5)
    data = reward(rollout(torch.stack([torch.zeros(5), d], -1), torch.tensor([[1.0], [1.0], [1.0], [0.5], [0.51]])))
    # 2 max(0, 1 - (d - 1)^2 / 4); a gate of exactly 0.5 is closed.
    assert data["next", "style_reward"].flatten().tolist() == [2.0, 1.5, 0.0, 0.0, 0.0]
    assert data["next", "reward"].flatten().tolist() == [1.0, 0.75, 0.0, 0.0, 0.0]
    metrics = {name: value.item() for name, value in reward.metrics(data).items()}
    assert metrics == pytest.approx({"style_reward": 3.5 / 4, "style_gate": 0.8, "style_share": 1.0})


def test_metrics_where_no_gate_is_open():
    reward = AMPReward(Discriminator(3, 2, (4,)))
    metrics = reward.metrics(reward(rollout(torch.randn(4, 6), torch.zeros(4, 1))))
    assert metrics["style_reward"].isnan() and metrics["style_gate"] == 0 and metrics["style_share"] == 0


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        (dict(amp_window=torch.zeros(4, 3, 14)), ValueError, "windows [*batch, 15] (5 frames of 3)"),
        (dict(amp_gate=torch.ones(4, 3)), ValueError, "gates and rewards [*batch, 1]"),
        (dict(amp_window=torch.full((4, 3, 15), float("nan"))), ValueError, "holds nan at env 0, step 0"),
        (dict(amp_gate=None), KeyError, "lacks [('next', 'amp_gate')]"),
    ],
)
def test_wrong_data_is_refused(change, error, expected):
    data = rollout(torch.zeros(4, 3, 15))
    for name, value in change.items():
        data["next"] = data["next"].exclude(name) if value is None else data["next"].set(name, value)
    with pytest.raises(error) as raised:
        AMPReward(Discriminator(3, hidden=(4,)))(data)
    assert expected in str(raised.value)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="num_frames=1"):
        Discriminator(3, 1)
    with pytest.raises(ValueError, match="scale=-1"):
        AMPReward(Discriminator(3, hidden=(4,)), scale=-1)


def test_a_collector_takes_it_as_postprocessing():
    pytest.importorskip("mujoco")
    env = Quadruped(2, groups=["policy", "amp"], seed=0, num_threads=1)
    reward = AMPReward(Discriminator(12, hidden=(8,)))
    plain = next(iter(Collector(env, None, frames_per_batch=8, total_frames=8)))
    env.set_seed(0)
    torch.manual_seed(0)
    data = next(iter(Collector(env, None, frames_per_batch=8, total_frames=8, postproc=reward)))
    assert data["next", "style_reward"].shape == (2, 4, 1) and ("next", "style_reward") not in plain.keys(True)


def test_an_environment_takes_it_as_a_transform():
    pytest.importorskip("mujoco")
    robot = dict(groups=["policy", "amp"], seed=0, num_threads=1, episode_seconds=0.1)
    reward = AMPReward(Discriminator(12, hidden=(8,)), scale=1.0)
    act = dict(policy=lambda td: td.set("action", torch.zeros(2, 12)), break_when_any_done=False)
    plain = Quadruped(2, **robot).rollout(12, **act)
    env = TransformedEnv(Quadruped(2, **robot), reward.as_transform())
    data = env.rollout(12, **act)
    expected = reward(plain.clone())  # in one pass, across the ends of episodes
    assert data["next", "done"].any()
    for name in ("reward", "style_reward"):
        torch.testing.assert_close(data["next", name], expected["next", name], rtol=0, atol=1e-6)
    assert not torch.equal(data["next", "reward"], plain["next", "reward"])
    env.set_seed(0)
    check_env_specs(env)
    with pytest.raises(ValueError, match=r"keys \('next', name\), got \['window'\]"):
        AMPReward(Discriminator(12, hidden=(8,)), window_key="window").as_transform()


def warnings_of(caplog, watch, accuracies):
    with caplog.at_level(logging.WARNING, "edenrl"):
        result = [watch(accuracy) for accuracy in accuracies]
    return result, [record.message for record in caplog.records]


def test_a_saturated_discriminator_is_reported_once(caplog):
    result, messages = warnings_of(caplog, SaturationWatch(patience=3), [1.0, 1.0, 0.98, 1.0, 1.0, 1.0, 1.0])
    assert result == [False] * 5 + [True] * 2
    assert len(messages) == 1 and "above 0.99 for 3 iterations" in messages[0]


def test_iterations_without_a_step_of_the_discriminator_do_not_hide_saturation(caplog):
    rare = [1.0, math.nan, math.nan, 1.0, math.nan]  # as with a long discriminator_interval
    assert warnings_of(caplog, SaturationWatch(patience=2), rare)[0] == [False] * 3 + [True] * 2


def test_accuracy_at_the_limit_is_no_saturation(caplog):
    assert warnings_of(caplog, SaturationWatch(patience=2), [0.99, 0.99, 0.5]) == ([False] * 3, [])


def test_deepcopy_and_state_dict_keep_the_numbers():
    net = Discriminator(3, 4, (8,))
    net.update_normalization(torch.randn(9, 12))
    windows = torch.randn(5, 12)
    other = Discriminator(3, 4, (8,))
    other.load_state_dict(net.state_dict())
    twin = copy.deepcopy(net)
    assert torch.equal(net.score(windows), twin.score(windows)) and torch.equal(
        net.score(windows), other.score(windows)
    )


@pytest.mark.parametrize("key", ["amp_window", "amp_gate", "reward"])
def test_what_is_not_finite_is_named_by_row_or_step(key):
    reward = AMPReward(Discriminator(frame_dim=3, hidden=(8,)))
    step = {"amp_window": torch.zeros(4, 6, 15), "amp_gate": torch.ones(4, 6, 1), "reward": torch.zeros(4, 6, 1)}
    step[key][3, 2, 0] = float("inf")
    data = TensorDict(next=step, batch_size=[4, 6])
    with pytest.raises(ValueError, match=rf"\('next', '{key}'\) holds inf at env 3, step 2"):
        reward(data)
    with pytest.raises(ValueError, match=rf"\('next', '{key}'\) holds inf at row 20"):
        reward(data.reshape(-1))


@pytest.mark.parametrize(("rows", "horizons", "scale"), [(1, (5,), 0.02), (3, (4, 9, 6), 1.0), (6, (2, 7, 7), 0.3)])
def test_returns_of_finished_episodes_across_rollouts(rows, horizons, scale):
    """Rollouts that cut episodes anywhere, one after another, against the sums of each episode by hand."""
    torch.manual_seed(rows)
    reward = AMPReward(Discriminator(2, 3, (8,)), coeff=2.0, scale=scale)
    returns = reward.episode_returns()
    running, lengths = [[0.0, 0.0] for _ in range(rows)], [0] * rows
    for steps in horizons:
        done = torch.rand(rows, steps, 1) < 0.3
        count = torch.zeros(rows, steps, 1, dtype=torch.int64)
        data = rollout(torch.randn(rows, steps, 6), torch.randint(2, (rows, steps, 1)).float(), done=done)
        task = data["next", "reward"].copy_(torch.randn(rows, steps, 1)).clone()
        ended = []
        for row in range(rows):
            for t in range(steps):
                lengths[row] += 1
                count[row, t] = lengths[row]
                if done[row, t]:
                    lengths[row] = 0
        reward(data.set(("next", "step_count"), count))
        for row in range(rows):
            for t in range(steps):
                gate = float(data["next", "amp_gate"][row, t])
                style = scale * gate * float(data["next", "style_reward"][row, t])
                running[row][0] += style
                running[row][1] += float(task[row, t]) + style
                if done[row, t]:
                    ended.append(running[row])
                    running[row] = [0.0, 0.0]
        state = returns.state_dict()
        found = returns(data)
        again = reward.episode_returns()  # as after a resume
        again.load_state_dict(state)
        assert again(data).items() == found.items() or not ended
        for column, name in enumerate(("style", "total")):
            value = float(found[f"episode/{name}_return"])
            assert (
                math.isnan(value)
                if not ended
                else value == pytest.approx(sum(pair[column] for pair in ended) / len(ended), abs=1e-5)
            )


def test_an_episode_that_was_lost_is_not_counted():
    """A collector that starts new episodes on resume leaves sums that belong to none."""
    reward = AMPReward(Discriminator(2, 2, (8,)), scale=0.0)
    returns = reward.episode_returns()
    ends = torch.tensor([[[False], [True]]])
    first = dict(reward=torch.full((1, 2, 1), 9.0), done=ends & False, step_count=torch.tensor([[[1], [2]]]))
    returns(reward(rollout(torch.randn(1, 2, 4), **first)))
    second = dict(reward=torch.ones(1, 2, 1), done=ends, step_count=torch.tensor([[[1], [2]]]))
    assert float(returns(reward(rollout(torch.randn(1, 2, 4), **second)))["episode/total_return"]) == 2.0
