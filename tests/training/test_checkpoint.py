import shutil

import pytest
import torch
from torch import nn
from torchrl.checkpoint import CheckpointError

from edenrl.modules import gaussian_actor, update_normalization, value_critic
from edenrl.training import Checkpoints, load_policy_weights


def build(path, width=8, algorithm="PPO", **kwargs):
    torch.manual_seed(width)
    policy, critic = gaussian_actor({"o": 3}, 2, hidden=(width,)), value_critic({"o": 3}, hidden=(width,))
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()])
    parts = dict(policy=policy, critic=critic, optimizer=optimizer)
    return parts, Checkpoints(path, parts, algorithm=algorithm, **kwargs)


def train_a_little(parts):
    from tensordict import TensorDict

    td = TensorDict(o=torch.randn(32, 3) * 100 + 50, batch_size=[32])
    for name in ("policy", "critic"):
        update_normalization(parts[name], td)
    (parts["policy"].get_dist(td).mean - 1).square().mean().backward()
    parts["optimizer"].step()


def state(parts):
    return {n: p.state_dict() for n, p in parts.items()}


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def test_round_trip_restores_everything_and_returns_metadata(tmp_path):
    parts, checkpoints = build(tmp_path)
    train_a_little(parts)
    saved = {n: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for n, s in state(parts).items()}
    path = checkpoints.save(7, frames=123, return_mean=1.5)
    train_a_little(parts)
    assert not equal(saved["policy"], state(parts)["policy"])
    metadata = checkpoints.load()
    assert equal(saved["policy"], state(parts)["policy"]) and equal(saved["critic"], state(parts)["critic"])
    assert (metadata["step"], metadata["frames"], checkpoints.latest()) == (7, 123, path)


def test_keeps_the_last_and_the_best(tmp_path):
    _, checkpoints = build(tmp_path, keep_last=2)
    for step, score in ((1, 1.0), (2, 9.0), (3, 2.0), (4, 3.0), (5, None)):
        checkpoints.save(step, **({} if score is None else {"return_mean": score}))
    kept = sorted(int(p.name[-3:]) for p in checkpoints.rotation.checkpoints())
    assert kept == [2, 4, 5]
    assert checkpoints.best().name.endswith("002") and checkpoints.latest().name.endswith("005")


def test_another_architecture_is_refused_before_anything_changes(tmp_path):
    build(tmp_path)[1].save(1)
    parts, checkpoints = build(tmp_path, width=16)
    before = {k: v.clone() for k, v in parts["policy"].state_dict().items()}
    with pytest.raises(
        CheckpointError,
        match=r"policy.module.0.module.mlp.0.weight is shape \(8, 3\) in the checkpoint and shape \(16, 3\)",
    ):
        checkpoints.load()
    assert equal(before, parts["policy"].state_dict())


def test_another_algorithm_is_refused(tmp_path):
    build(tmp_path, algorithm="AMP")[1].save(1)
    with pytest.raises(CheckpointError, match="saved by 'AMP', this run is 'PPO'"):
        build(tmp_path)[1].load()


def test_a_policy_without_statistics_does_not_load_into_one_that_expects_them(tmp_path):
    policy = gaussian_actor({"o": 3}, 2, hidden=(8,), normalize=False)
    Checkpoints(tmp_path, {"policy": policy}, algorithm="PPO").save(1)
    wanted = gaussian_actor({"o": 3}, 2, hidden=(8,))
    with pytest.raises(CheckpointError, match="policy.module.0.module.norm.mean is nothing in the checkpoint"):
        Checkpoints(tmp_path, {"policy": wanted}, algorithm="PPO").load()


def test_a_missing_component_is_named(tmp_path):
    parts, checkpoints = build(tmp_path)
    checkpoints.save(1)
    with pytest.raises(CheckpointError, match=r"missing=\['extra'\]"):
        Checkpoints(tmp_path, {**parts, "extra": torch.optim.SGD(parts["policy"].parameters())}, algorithm="PPO").load()
    shutil.rmtree(next((checkpoints.latest() / "components").glob("*critic*")))
    with pytest.raises(CheckpointError, match=r"-critic/state.* is missing"):
        checkpoints.load()


def test_nonfinite_parameters_are_never_saved(tmp_path):
    parts, checkpoints = build(tmp_path)
    good = checkpoints.save(1)
    with torch.no_grad():
        parts["critic"].module.mlp[0].weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="critic.module.mlp.0.weight is not finite"):
        checkpoints.save(2)
    assert checkpoints.latest() == good
    checkpoints.load()
    assert parts["critic"].module.mlp[0].weight.isfinite().all()


def test_leftovers_of_a_killed_process_are_swept_and_never_loaded(tmp_path):
    _, checkpoints = build(tmp_path)
    good = checkpoints.save(1)
    (tmp_path / ".checkpoint-000000000002.stage-abc").mkdir()
    (tmp_path / "checkpoint-000000000003").mkdir()  # no manifest: never published
    assert checkpoints.latest() == good
    checkpoints.sweep()
    assert not list(tmp_path.glob(".checkpoint*"))


def test_policy_alone_is_loaded_from_a_run(tmp_path):
    parts, checkpoints = build(tmp_path / "checkpoints")
    train_a_little(parts)
    checkpoints.save(1, return_mean=5.0)
    expected = {k: v.clone() for k, v in parts["policy"].state_dict().items()}
    train_a_little(parts)
    checkpoints.save(2, return_mean=1.0)
    fresh = gaussian_actor({"o": 3}, 2, hidden=(8,))
    assert load_policy_weights(fresh, tmp_path).name.endswith("001")
    assert equal(expected, fresh.state_dict())
    assert load_policy_weights(fresh, tmp_path, "latest").name.endswith("002")
    assert equal(parts["policy"].state_dict(), fresh.state_dict())
    with pytest.raises(CheckpointError, match="does not fit this policy"):
        load_policy_weights(gaussian_actor({"o": 3}, 2, hidden=(9,)), tmp_path)
    with pytest.raises(FileNotFoundError, match="elsewhere: no such directory"):
        load_policy_weights(fresh, tmp_path / "elsewhere")
    (tmp_path / "begun").mkdir()
    with pytest.raises(FileNotFoundError, match="begun is not a run directory"):
        load_policy_weights(fresh, tmp_path / "begun")
    (tmp_path / "begun" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="begun has no checkpoint yet"):
        load_policy_weights(fresh, tmp_path / "begun")


def test_only_networks_define_the_layout(tmp_path):
    net = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, {"net": net, "opt": torch.optim.Adam(net.parameters())}, algorithm="X")
    checkpoints.save(1)
    from torchrl.checkpoint import Checkpoint

    layout = Checkpoint.manifest(checkpoints.latest())["metadata"]["layout"]
    assert layout == {"net": {"weight": [2, 2], "bias": [2]}}
