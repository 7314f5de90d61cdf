"""Stacked frames: what the spec says of their order and beginning, and what the runtime makes of it."""

import json

import numpy as np
import pytest
import torch
from torchrl.envs import CatFrames, ExplorationType, TransformedEnv, set_exploration_type

from edenrl.envs import ConflictPointMass, HiddenPointMass, PointMass, wrap_env
from edenrl.export import export_policy, load_policy, nominal_env
from edenrl.modules import (
    HIMLayout,
    RMAActor,
    UnitBatchNorm,
    flash_actor,
    gaussian_actor,
    him_actor,
    rma_policy,
    simba_actor,
)

pytest.importorskip("onnxruntime")


class Stack:
    """A reader that knows the spec alone: rebuilds a group from the frames of one row."""

    def __init__(self, group):
        self.history, self.frames = group["history"], []

    def __call__(self, frame, first):
        if first:
            before = {"repeat": frame, "zeros": np.zeros_like(frame)}[self.history["at_reset"]]
            self.frames = [before] * self.history["frames"]
        self.frames = [*self.frames[1:], frame]
        ordered = self.frames if self.history["order"] == "oldest_first" else self.frames[::-1]
        return np.concatenate(ordered)


def robot(**options):
    from edenrl.envs import Quadruped

    return nominal_env(Quadruped(2, num_threads=1, seed=3, episode_seconds=0.14, **options))


def stacked(env, frames, key, out, **padding):
    return TransformedEnv(env, CatFrames(frames, dim=-1, in_keys=[key], out_keys=[out], **padding))


def flash(groups, spec):
    policy = flash_actor(groups, spec, hidden_dim=16)
    for part in policy.modules():
        if isinstance(part, UnitBatchNorm):
            part.running_mean.normal_(), part.running_var.uniform_(0.5, 2.0)
    return policy


def simba(groups, spec):
    policy = simba_actor(groups, spec, hidden_dim=16)
    policy.module[0].module.norm.mean.normal_()
    return policy


def rma_of(widths, dim):
    return rma_policy(RMAActor(widths, dim), latent="history", estimated=True)


HIDDEN = dict(prop=8, priv_explicit=2, priv_latent=6, history=80)
ROBOT = dict(prop=53, scan=0, priv_explicit=9, priv_latent=29, history=20 * 53)
# Algorithm and source of the stack -> (environment, policy of it, {history: frames, order, at_reset, frame_of}).
CASES = {
    "flashsac, robot": (
        lambda: robot(groups=["policy", "history"], history_length=5),
        lambda env: flash({"policy": 45, "history": 225}, env.action_spec_unbatched),
        {"history": (5, "oldest_first", "repeat", "policy")},
    ),
    "flashsac, CatFrames": (
        lambda: stacked(ConflictPointMass(2, seed=1, max_steps=5), 3, "observation", "stack"),
        lambda env: flash({"stack": 30}, env.action_spec_unbatched),
        {"stack": (3, "oldest_first", "repeat", "observation")},
    ),
    "simba, robot": (
        lambda: robot(groups=["history"], history_length=2),
        lambda env: simba({"history": 90}, env.action_spec_unbatched),
        {"history": (2, "oldest_first", "repeat", "policy")},
    ),
    "simba, CatFrames of zeros": (
        lambda: stacked(PointMass(2, seed=1, max_steps=5), 4, "observation", "observation", padding="constant"),
        lambda env: simba({"observation": 56}, env.action_spec_unbatched),
        {"observation": (4, "oldest_first", "zeros", None)},
    ),
    "rma, robot": (
        lambda: robot(groups=["prop", "priv_explicit", "priv_latent", "prop_history"], prop_history_length=20),
        lambda env: rma_of(ROBOT, 12),
        {"prop_history": (20, "oldest_first", "repeat", "prop")},
    ),
    "rma, hidden point mass": (
        lambda: HiddenPointMass(2, seed=1, max_steps=6),
        lambda env: rma_of(HIDDEN, 2),
        {"prop_history": (10, "oldest_first", "repeat", "prop")},
    ),
    "him, robot": (
        lambda: robot(groups=["history", "critic", "policy"], history_length=4),
        lambda env: him_actor(HIMLayout.of(env), 12, hidden=(16,)),
        {"history": (4, "oldest_first", "repeat", "policy")},
    ),
    "him, CatFrames": (
        lambda: stacked(ConflictPointMass(2, seed=1, max_steps=5), 3, "observation", "history"),
        lambda env: him_actor(HIMLayout(frame=10, frames=3, order="oldest_first"), 2, hidden=(16,)),
        {"history": (3, "oldest_first", "repeat", "observation")},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_few_steps_are_replayed_from_the_spec_alone(tmp_path, case):
    if "robot" in case:
        pytest.importorskip("mujoco", minversion="3.17")
    torch.manual_seed(5)
    make, build, histories = CASES[case]
    env = wrap_env(make(), action_mode="squash" if case.startswith("flashsac") else "clip")
    policy = build(env).eval()
    export_policy(policy, env, tmp_path, formats=["onnx"])
    runtime = load_policy(tmp_path)
    spec = json.loads((tmp_path / "policy_spec.json").read_text())
    found = {group["key"]: group["history"] for group in spec["observations"] if group["history"]}
    fields = ("frames", "order", "at_reset", "frame_of")
    assert {key: tuple(entry[name] for name in fields) for key, entry in found.items()} == histories
    for group in spec["observations"]:
        frames = group["history"]["frames"] if group["history"] else 1
        assert sum(term["width"] for term in group["terms"]) * frames == group["width"]

    readers = {g["key"]: [Stack(g), Stack(g)] for g in spec["observations"] if g["history"]}
    td, first, restarts = env.reset(), np.ones(2, bool), 0
    for step in range(17):
        if step == 9:  # one row begins anew on its own
            reset = torch.tensor([[False], [True]])
            td, first = env.reset(td.set("_reset", reset)), reset.numpy()[:, 0]
        runtime.reset(first)
        # The newest frame is all that the reader is given; it ends every stack that is oldest first.
        frames = {key: td[key].numpy() for key in runtime.groups if key not in histories}
        for key, (count, *_) in histories.items():
            frames[key] = td[key].numpy().reshape(2, count, -1)[:, -1]
        groups = runtime.observe(frames)
        for key, rows in readers.items():
            mine = np.stack([reader(frames[key][row], first[row]) for row, reader in enumerate(rows)])
            np.testing.assert_allclose(mine, td[key].numpy(), rtol=0, atol=1e-6)
            np.testing.assert_allclose(groups[key], td[key].numpy(), rtol=0, atol=1e-6)
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            td = policy(td)
        np.testing.assert_allclose(runtime(groups), td["action"].numpy(), rtol=1e-4, atol=1e-4)
        stepped, td = env.step_and_maybe_reset(td)
        first = stepped["next", "done"].numpy()[:, 0]
        restarts += int(first.sum())
    assert restarts >= 2


@pytest.mark.parametrize(("algorithm", "stated"), [("flashsac", True), ("simba", True), ("him", False), ("rma", False)])
def test_the_spec_tells_where_the_normalization_is(tmp_path, algorithm, stated):
    if algorithm == "rma":
        env = HiddenPointMass(2, seed=1)
        policy = rma_of(HIDDEN, 2)
    elif algorithm == "him":
        env, policy = CASES["him, CatFrames"][0](), him_actor(HIMLayout(10, 3, "oldest_first"), 2, hidden=(16,))
    else:
        env = PointMass(2, seed=1)
        policy = {"flashsac": flash, "simba": simba}[algorithm]({"observation": 14}, env.action_spec_unbatched)
    export_policy(policy, env, tmp_path, formats=["jit"])
    spec = json.loads((tmp_path / "policy_spec.json").read_text())
    assert spec["model"]["normalization"] == ("in the graph" if stated else "none")
    group = spec["observations"][0]
    assert (group["mean"] is not None) == (group["std"] is not None) == stated
    if algorithm == "flashsac":
        norm = next(part for part in policy.modules() if isinstance(part, UnitBatchNorm))
        assert group["mean"] == pytest.approx(norm.running_mean.tolist(), rel=1e-5)
        assert group["std"] == pytest.approx(norm.running_var.sqrt().tolist(), rel=1e-5)


class Newest(ConflictPointMass):
    """Declares a stack, newest frame first, that begins with zeros."""

    def policy_contract(self):
        term = {"name": "half", "width": 5, "scale": [1.0] * 5}
        history = {"frames": 2, "order": "newest_first", "at_reset": "zeros"}
        return {"observations": {"observation": [term]}, "histories": {"observation": history}}


class Silent(ConflictPointMass):
    """Declares nothing."""

    def policy_contract(self):
        return {}


def exported(policy, env, folder):
    export_policy(policy, env, folder, formats=["onnx"])
    return load_policy(folder)


def test_the_runtime_stacks_newest_first(tmp_path):
    runtime = exported(gaussian_actor({"observation": 10}, 2, hidden=(8,)), Newest(2), tmp_path)
    frames = np.arange(20, dtype=np.float32).reshape(4, 5)
    stacks = [runtime.observe({"observation": frame})["observation"].tolist() for frame in frames[:3]]
    assert stacks == [[*range(5), *[0] * 5], [*range(5, 10), *range(5)], [*range(10, 15), *range(5, 10)]]
    runtime.reset()
    assert runtime.observe({"observation": frames[3]})["observation"].tolist() == [*range(15, 20), *[0] * 5]
    with pytest.raises(ValueError, match=r"2 frames were given and the history of 'observation' has 1 rows.*reset\(\)"):
        runtime.observe({"observation": frames[:2]})
    with pytest.raises(ValueError, match="A frame of 'observation' has 5 features; 4 were given"):
        runtime.observe({"observation": frames[0, :4]})
    with pytest.raises(KeyError, match="The history 'observation' needs a frame under 'observation'"):
        runtime.observe({})
    with pytest.raises(ValueError, match=r"'observation' holds 2 frames of 5, newest first: observe\(\) stacks them"):
        runtime({"observation": frames[0]})
    with pytest.raises(ValueError, match=r"\[10\].*'observation' holds 2 frames of 5, newest first"):
        runtime(frames[0])


@pytest.mark.parametrize(("frames", "rows"), [(3, 1), (5, 2)])
def test_a_frame_that_is_refused_changes_no_history(tmp_path, frames, rows):
    env = stacked(stacked(PointMass(2, max_steps=5), frames, "observation", "stack"), 2, "observation", "short")
    policy = gaussian_actor({"stack": 14 * frames, "short": 28, "observation": 14}, 2, hidden=(8,))
    runtime = exported(policy, env, tmp_path)
    good = [np.full((rows, 14), number, np.float32) for number in range(1, 4)]
    expected = [runtime.observe({"observation": frame}) for frame in good]
    runtime.reset()
    bad = good[0].copy()
    bad[-1, 3] = np.nan
    refused = [
        ({"observation": bad}, ValueError, rf"frame of 'stack' is not finite: in row {rows - 1} feature \[3\] is nan"),
        ({"stack": good[0], "short": good[0]}, KeyError, r"\['observation'\] were not given"),
        ({"stack": good[0], "observation": good[0][:, 1:]}, ValueError, "'short' has 14 features; 13 were given"),
        ({"observation": good[0][:, None]}, ValueError, rf"have the shape \({rows}, 1, 14\)"),
    ]
    for frame, wanted in zip(good, expected, strict=True):
        for given, error, message in refused:
            with pytest.raises(error, match=message):
                runtime.observe(given)
        found = runtime.observe({"observation": frame})
        for key, value in wanted.items():
            np.testing.assert_array_equal(found[key], value)


def test_an_order_that_only_the_policy_knows_is_stated_without_a_beginning(tmp_path):
    layout = HIMLayout(frame=5, frames=2, order="newest_first")
    runtime = exported(him_actor(layout, 2, history="observation", hidden=(8,)), Silent(2), tmp_path)
    (group,) = runtime.spec["observations"]
    assert group["history"] == {"frames": 2, "order": "newest_first", "at_reset": None, "frame_of": None}
    with pytest.raises(
        ValueError, match=r"does not say how the history of 'observation' begins.*2 frames.*newest first"
    ):
        runtime.observe({"observation": np.zeros(5)})
    assert runtime(np.zeros(10)).shape == (2,)


def test_frames_of_frames_and_images_are_left_to_the_transforms(tmp_path):
    twice = stacked(stacked(PointMass(2), 2, "observation", "stack"), 3, "stack", "twice")
    (group,) = exported(gaussian_actor({"twice": 84}, 2, hidden=(8,)), twice, tmp_path).spec["observations"]
    assert (group["history"], group["terms"], group["transforms"]) == (None, [], ["CatFrames", "CatFrames"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(tmp_path, bad):
    runtime = exported(gaussian_actor({"observation": 14}, 2, hidden=(8,)), PointMass(2), tmp_path / "a")
    obs = np.zeros((5, 14))
    obs[3, [1, 12]] = bad
    for given in (obs, {"observation": obs}):
        with pytest.raises(
            ValueError, match=r"row 3 is not finite: observation/position\[1\] is .*, .*obstacle radii\[0\]"
        ):
            runtime(given)
    with pytest.raises(ValueError, match=r"observation/position\[1\] is"):
        runtime(obs[3])
    assert np.isfinite(runtime(obs[2])).all()
    env = stacked(PointMass(2), 3, "observation", "stack")
    runtime = exported(gaussian_actor({"stack": 42}, 2, hidden=(8,)), env, tmp_path / "b")
    obs = np.zeros(42)
    obs[14 + 5] = bad
    with pytest.raises(ValueError, match=r"stack/frame 1/goal position\[1\] is"):
        runtime(obs)
    runtime = exported(gaussian_actor({"observation": 10}, 2, hidden=(8,)), Silent(2), tmp_path / "c")
    obs = np.full(10, bad)
    with pytest.raises(ValueError, match=r"observation/\[0\] is .* and 5 more"):
        runtime(obs)


def test_a_recurrent_policy_survives_what_is_refused(tmp_path, recurrent_actor):
    from torchrl.modules import GRUModule

    runtime = exported(recurrent_actor(GRUModule), PointMass(2), tmp_path)
    first = runtime(np.ones(14))
    before = {name: value.copy() for name, value in runtime.state.items()}
    with pytest.raises(ValueError, match="not finite"):
        runtime(np.full(14, np.nan))
    for name, value in runtime.state.items():
        np.testing.assert_array_equal(value, before[name])
    assert np.isfinite(first).all()
