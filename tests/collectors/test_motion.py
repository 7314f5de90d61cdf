"""Motion clips against tests/golden/amp.npz and by hand; files that must be refused; the windows of the policy."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from edenrl.collectors import Collector, MotionDataset, WindowBuffer
from edenrl.envs import PointMass, Quadruped
from edenrl.envs.quadruped import JOINT_NAMES, save_trot_clips, trot_clip

GOLDEN = "amp"


def bundle(path, *clips, fps=50.0, **entries):
    values = {f"motion_{i}": clip for i, clip in enumerate(clips)}
    values |= {"fps": fps, "num_motions": len(clips), **entries}
    np.savez(path, **{name: value for name, value in values.items() if value is not None})
    return path


def line(length, slope=1.0, width=2):
    """Frames whose entries are slope times their index, and ten more in each column."""
    return (np.arange(length)[:, None] * slope + 10 * np.arange(width)).astype(np.float32)


class Walker(EnvBase):
    """Publishes windows of the last frames; a frame is (episode, step). Rows end after 3, 4, 5, ... steps."""

    amp_joint_names: tuple[str, ...] | None = None
    control_dt: float | None = 0.02
    returns_fresh_tensors = True

    def __init__(self, num_envs=3, num_frames=2, gate=1.0):
        super().__init__(batch_size=[num_envs])
        self.gate, self.num_frames = gate, num_frames
        vector = lambda n: Unbounded((num_envs, n))  # noqa: E731
        self.observation_spec = Composite(
            observation=vector(2), amp_window=vector(2 * num_frames), amp_gate=vector(1), shape=[num_envs]
        )
        self.action_spec, self.reward_spec = vector(1), vector(1)
        self.episode, self.step_count = torch.zeros(num_envs), torch.zeros(num_envs)
        self.window = torch.zeros(num_envs, num_frames, 2)

    def _observe(self):
        gate = torch.full((*self.batch_size, 1), self.gate)
        window = self.window.flatten(1).clone()
        entries = {"observation": self.window[:, -1].clone(), "amp_window": window, "amp_gate": gate}
        return TensorDict(entries, batch_size=self.batch_size)

    def _reset(self, tensordict=None, **kwargs):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = torch.ones(self.batch_size, dtype=torch.bool) if mask is None else mask.flatten()
        self.episode[rows] += 1
        self.step_count[rows] = 0
        self.window[rows] = torch.stack([self.episode, self.step_count], -1)[rows, None]
        return self._observe()

    def _step(self, tensordict):
        self.step_count += 1
        self.window = torch.cat([self.window[:, 1:], torch.stack([self.episode, self.step_count], -1)[:, None]], 1)
        ended = (self.step_count >= 3 + torch.arange(len(self.step_count)))[:, None]
        flags = {"done": ended, "terminated": ended, "reward": torch.ones(*self.batch_size, 1)}
        return self._observe().update(flags)

    def _set_seed(self, seed):
        pass


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_windows_are_the_published_ones(golden, tmp_path):
    clips = [golden[f"motion_clip{i}"] for i in range(int(golden["motion_clip_index"].max()) + 1)]
    path = bundle(tmp_path / "clips.npz", *(clip.numpy() for clip in clips))
    motion = MotionDataset(path, int(golden["cfg_num_frames"]))
    windows = motion.windows(golden["motion_clip_index"], golden["motion_base"])
    torch.testing.assert_close(windows, golden["motion_windows"], rtol=1e-5, atol=1e-5)


def test_window_by_hand(tmp_path):
    motion = MotionDataset(bundle(tmp_path / "a.npz", line(8), line(6, 100.0)), 3)
    window = motion.windows(torch.tensor([0, 1]), torch.tensor([1.25, 3.5]))
    # Frames b - 1, b, b + 1: 0.25, 1.25, 2.25 in the first clip; 2.5, 3.5, 4.5 times 100 in the second.
    assert window[..., 0].tolist() == [[0.25, 1.25, 2.25], [250.0, 350.0, 450.0]]
    assert window[..., 1].tolist() == [[10.25, 11.25, 12.25], [260.0, 360.0, 460.0]]


def test_samples_lie_within_their_clip_and_cover_it(tmp_path):
    motion = MotionDataset(bundle(tmp_path / "a.npz", line(8), 1000 + line(20)), 4, seed=3)
    windows = motion.sample(4000)[..., 0]
    torch.testing.assert_close(windows.diff(dim=1), torch.ones(4000, 3), rtol=0, atol=2e-4)
    second = windows[:, 0] > 500
    assert 0.46 < second.float().mean() < 0.54, "clips are drawn evenly, whatever their length"
    for first, length in ((windows[~second, 0], 8), (windows[second, 0] - 1000, 20)):
        # The oldest frame of K = 4 is b - 2 in [0, T - 4).
        assert 0 <= first.min() < 0.2 and length - 4 - 0.2 < first.max() <= length - 4


def test_seed_and_state_decide_the_samples_and_the_global_generator_is_left_alone(tmp_path):
    path = bundle(tmp_path / "a.npz", line(9))
    one, same, other = (MotionDataset(path, seed=seed) for seed in (1, 1, 2))
    before = torch.get_rng_state()
    first = one.sample(5)
    assert torch.equal(first, same.sample(5)) and not torch.equal(first, other.sample(5))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.sample(5), other.sample(5)) and torch.equal(before, torch.get_rng_state())
    assert one.sample(0).shape == (0, 5, 2)


def test_state_of_other_clips_is_refused(tmp_path):
    one = MotionDataset(bundle(tmp_path / "a.npz", line(9)))
    other = MotionDataset(bundle(tmp_path / "b.npz", line(9) + 1))
    with pytest.raises(ValueError, match="b.npz does not hold the clips"):
        other.load_state_dict(one.state_dict())
    slower = MotionDataset(bundle(tmp_path / "c.npz", line(9), fps=25.0))
    with pytest.raises(ValueError, match=r"c.npz does not hold the clips .* \(fps 50, now 25\)"):
        slower.load_state_dict(one.state_dict())
    older = {name: value for name, value in one.state_dict().items() if name != "fps"}
    slower.load_state_dict(older)


def test_a_window_outside_its_clip_is_refused(tmp_path):
    motion = MotionDataset(bundle(tmp_path / "a.npz", line(8)), 4)
    clip = torch.zeros(1, dtype=torch.int64)
    assert motion.windows(clip, torch.tensor([5.999])).shape == (1, 4, 2)
    for base in (1.9, 6.0):
        with pytest.raises(ValueError, match="motion_0; expected 2 up to but not including 6"):
            motion.windows(clip, torch.tensor([base]))


def test_a_step_in_seconds_lines_clips_up(tmp_path):
    """The same motion recorded at 25, 50 and 120 frames per second."""
    moments = {fps: np.arange(round(3 * fps)) / fps for fps in (25.0, 50.0, 120.0)}
    paths = [bundle(tmp_path / f"{fps}.npz", t[:, None].repeat(2, 1), fps=fps) for fps, t in moments.items()]
    for path in paths:
        motion = MotionDataset(path, 5, dt=0.02)
        window = motion.sample(64)[..., 0]
        torch.testing.assert_close(window.diff(dim=1), torch.full((64, 4), 0.02), rtol=0, atol=1e-5)
        assert window.min() >= -1e-6 and window.max() <= 3 - 1 / motion.fps + 1e-6


def test_distance_is_that_to_the_nearest_window(tmp_path):
    motion = MotionDataset(bundle(tmp_path / "a.npz", line(40), 500 + line(40)), 3)
    exact = motion.windows(torch.tensor([0, 1, 1]), torch.tensor([4.0, 2.0, 30.0])).flatten(1)
    # Four windows a frame, so at most an eighth of a frame away.
    assert motion.distance(exact).max() <= 0.125 + 1e-4
    away = exact + torch.tensor([[0.0], [3.0], [0.0]])
    # Shifted by 3 within the second clip it is the window three frames on.
    assert motion.distance(away).max() <= 0.125 + 1e-4
    sideways = exact.reshape(3, 3, 2) + torch.tensor([2.0, -2.0])
    assert motion.distance(sideways.flatten(1)).tolist() == pytest.approx([2.0, 2.0, 2.0], abs=0.01)
    assert motion.distance(exact[None]).shape == (1, 3) and motion.distance(exact[:0]).shape == (0,)
    many = motion.sample(10_000).flatten(1) + torch.randn(10_000, 1)  # more than are compared at once
    torch.testing.assert_close(motion.distance(many)[-3:], motion.distance(many[-3:]), rtol=0, atol=1e-3)


# ---- files that are refused ------------------------------------------------------------------------------------------


def nan_at(length, frame, column):
    clip = line(length)
    clip[frame, column] = np.nan
    return clip


@pytest.mark.parametrize(
    ("clips", "entries", "expected"),
    [
        ([line(9)], dict(fps=None), "fps is missing; the file has ['motion_0', 'num_motions']"),
        ([line(9)], dict(num_motions=None), "num_motions is missing"),
        ([line(9)], dict(num_motions=2), "motion_1 is missing"),
        ([line(9), line(9)], dict(num_motions=1), "num_motions is 1, but the file also has ['motion_1']"),
        ([line(9)], dict(fps=0.0), "fps is 0"),
        ([line(9)], dict(fps=np.inf), "fps is inf"),
        ([line(9)], dict(fps=np.ones(2)), "fps is float64 of shape (2,); expected one number"),
        ([line(9)], dict(num_motions=0), "num_motions is 0"),
        ([line(9), line(6)], {}, "motion_1 has 6 frames; windows of 5 frames, 0.02 s apart at 50 fps, need 7"),
        ([line(1)], {}, "motion_0 has 1 frames"),
        ([line(9), line(9, width=3)], {}, "motion_1 has frames of width 3, motion_0 of 2"),
        ([line(9), nan_at(9, 4, 1)], {}, "motion_1 is not finite in frame 4, column 1"),
        ([np.arange(9.0)], {}, "motion_0 is float64 of shape (9,)"),
        ([line(9).astype(str)], {}, "motion_0 is <U"),
        ([line(9)], dict(joint_names=np.array(["hip"])), "joint_names is ['hip']; expected 2 different names"),
        ([line(9)], dict(joint_names=np.array(["hip", "hip"])), "expected 2 different names"),
    ],
)
def test_a_bad_bundle_is_refused_by_file_and_entry(tmp_path, clips, entries, expected):
    path = bundle(tmp_path / "bad.npz", *clips, **entries)
    with pytest.raises(ValueError) as raised:
        MotionDataset(path)
    message = str(raised.value)
    assert message.startswith(str(path)) and expected in message and "\n" not in message


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("key", ["motion_0", "joint_names"])
def test_a_booby_trap_in_an_array_is_not_sprung(tmp_path, key):
    mark = tmp_path / "sprung"
    ragged = np.empty(2, dtype=object)
    ragged[:] = [Trap(mark), 1]
    path = bundle(tmp_path / "trap.npz", line(9), **{key: ragged})
    with np.load(path, allow_pickle=True) as data, pytest.raises(FileExistsError):
        _ = data[key]  # the trap works
        _ = data[key]
    mark.rmdir()
    with pytest.raises(ValueError, match=f"trap.npz: {key} cannot be read"):
        MotionDataset(path)
    assert not mark.exists()


def test_a_file_that_is_a_pickle_is_not_loaded(tmp_path):
    mark = tmp_path / "sprung"
    (tmp_path / "trap.npz").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(ValueError, match="trap.npz is not a motion bundle"):
        MotionDataset(tmp_path / "trap.npz")
    assert not mark.exists()


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.npz: no such motion file"):
        MotionDataset(tmp_path / "none.npz")
    np.save(tmp_path / "one.npy", line(9))
    with pytest.raises(ValueError, match="holds one array"):
        MotionDataset(tmp_path / "one.npy")
    (tmp_path / "text.npz").write_text("motion")
    with pytest.raises(ValueError, match="text.npz is not a motion bundle"):
        MotionDataset(tmp_path / "text.npz")
    whole = bundle(tmp_path / "whole.npz", line(900)).read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="half.npz is not a motion bundle"):
        MotionDataset(tmp_path / "half.npz")
    damaged = io.BytesIO()
    with zipfile.ZipFile(damaged, "w") as archive:
        for name in ("fps", "num_motions", "motion_0"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00 nothing")
    (tmp_path / "damaged.npz").write_bytes(damaged.getvalue())
    with pytest.raises(ValueError, match="damaged.npz: fps cannot be read"):
        MotionDataset(tmp_path / "damaged.npz")


# ---- against an environment ------------------------------------------------------------------------------------------


def test_columns_are_mapped_by_name(tmp_path):
    pytest.importorskip("mujoco")
    env = Quadruped(1, groups=["policy", "amp"], num_threads=1)
    save_trot_clips(tmp_path / "trot.npz", speeds=(0.6,), standing=False)
    order = np.random.default_rng(0).permutation(12)
    bundle(tmp_path / "mixed.npz", trot_clip()[:, order], joint_names=np.array(JOINT_NAMES)[order])
    straight, mapped = (MotionDataset(tmp_path / f"{name}.npz").match(env) for name in ("trot", "mixed"))
    assert torch.equal(straight.sample(20), mapped.sample(20)) and mapped.joint_names == list(JOINT_NAMES)
    names = [*JOINT_NAMES[:-1], "tail"]
    other = MotionDataset(bundle(tmp_path / "tail.npz", trot_clip(), joint_names=np.array(names)))
    with pytest.raises(ValueError, match=r"tail.npz: joint_names lacks \['RR_knee'\] and has \['tail'\]"):
        other.match(env)


def test_names_on_one_side_alone_change_nothing(tmp_path):
    path = bundle(tmp_path / "a.npz", line(9), joint_names=np.array(["b", "a"]))
    assert torch.equal(MotionDataset(path, 2).match(Walker()).sample(4), MotionDataset(path, 2).sample(4))
    env = Walker()
    env.amp_joint_names = ("a", "b")
    swapped = MotionDataset(path, 2).match(env).sample(4)
    assert torch.equal(swapped, MotionDataset(path, 2).sample(4).flip(-1))
    bare = bundle(tmp_path / "bare.npz", line(9))
    assert torch.equal(MotionDataset(bare, 2).match(env).sample(4), MotionDataset(bare, 2).sample(4))


def test_another_width_is_refused(tmp_path):
    motion = MotionDataset(bundle(tmp_path / "a.npz", line(9, width=3)), 2)
    with pytest.raises(
        ValueError, match="a.npz: motion_0 has frames of width 3.* 6 numbers; Walker publishes 'amp_window' w"
    ):
        motion.match(TransformedEnv(Walker(), StepCounter()))


def test_an_environment_without_windows_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"PointMass publishes .* and not \['amp_window', 'amp_gate'\]"):
        MotionDataset(bundle(tmp_path / "a.npz", line(9))).match(PointMass(2))


def test_another_rate_is_refused_or_resampled(tmp_path, caplog):
    path = bundle(tmp_path / "a.npz", line(20), fps=25.0)
    with pytest.raises(ValueError, match=r"fps is 25, .* takes control steps of 0.02 s \(50 per second\)"):
        MotionDataset(path, 2).match(Walker())
    motion = MotionDataset(path, 2).match(Walker(), resample=True)
    torch.testing.assert_close(motion.sample(9)[..., 0].diff(dim=1), torch.full((9, 1), 0.5), rtol=0, atol=1e-5)
    short = MotionDataset(bundle(tmp_path / "b.npz", line(6), fps=200.0), 2)
    with pytest.raises(
        ValueError, match="b.npz: motion_0 has 6 frames; windows of 2 frames, 0.02 s apart at 200 fps, need 13"
    ):
        short.match(Walker(), resample=True)
    assert not caplog.records
    env = Walker()
    env.control_dt = None
    MotionDataset(path, 2).match(env)
    assert "Walker does not say how long a control step is" in caplog.text


# ---- the policy's windows --------------------------------------------------------------------------------------------


def collected(frames, **options):
    env = Walker(**options)
    return next(iter(Collector(env, None, frames_per_batch=frames, total_frames=frames)))


def test_windows_of_the_policy_never_span_a_reset():
    rollout = collected(1500)
    windows = WindowBuffer(5000, 4, 8).add_rollout(rollout).reshape(-1, 2, 2)
    assert len(windows) == 1500 and rollout["next", "done"].sum() > 300
    episode, step = windows.unbind(-1)
    assert torch.equal(episode[:, 0], episode[:, 1]) and bool((step.diff(dim=1) == 1).all())
    # The window at the end of an episode is its true last one: the third step in row 0.
    last = rollout["next", "amp_window"][0][rollout["next", "done"][0].squeeze(-1)]
    assert len(last) > 100 and torch.equal(last[:, [1, 3]], torch.tensor([[2.0, 3.0]]).expand(len(last), 2))


def test_windows_without_a_true_last_observation_are_left_out():
    rollout = collected(300)
    done = rollout["next", "done"]
    marked = rollout.set(("next", "final_obs_missing"), done)
    assert len(WindowBuffer(5000, 4, 8).add_rollout(marked)) == 300 - int(done.sum())


def test_closed_gates_stay_outside_and_the_oldest_make_room():
    buffer = WindowBuffer(10, 3, 6)
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    gate = (torch.arange(8) % 2).float()[:, None]
    data = TensorDict(next={"amp_window": rows, "amp_gate": gate}, batch_size=[8])
    assert buffer.add_rollout(data)[:, 0].tolist() == [1, 3, 5, 7] and len(buffer) == 4
    assert set(buffer.sample()["amp_window"][:, 0].tolist()) <= {1, 3, 5, 7}
    data["next", "amp_gate"] = torch.zeros(8, 1)
    assert buffer.add_rollout(data).shape == (0, 3) and len(buffer) == 4
    many = torch.arange(100.0, 125.0)[:, None].expand(25, 3)
    full = TensorDict(next={"amp_window": many, "amp_gate": torch.ones(25, 1)}, batch_size=[25])
    assert len(buffer.add_rollout(full)) == 25
    assert sorted(buffer[:]["amp_window"][:, 0].tolist()) == list(range(115, 125))


def test_the_buffer_continues_and_leaves_the_global_generator_alone():
    rollout = collected(1000)
    one, other = WindowBuffer(600, 4, 8, seed=1), WindowBuffer(600, 4, 8, seed=2)
    before = torch.get_rng_state()
    one.add_rollout(rollout)
    one.sample()
    other.load_state_dict(one.state_dict())
    assert len(other) == 600
    for _ in range(3):
        assert torch.equal(one.sample()["amp_window"], other.sample()["amp_window"])
        for buffer in (one, other):
            buffer.add_rollout(rollout[:, :7])
    assert torch.equal(one[:]["amp_window"], other[:]["amp_window"]) and torch.equal(before, torch.get_rng_state())


def test_small_distances_keep_their_digits(tmp_path):
    motion = MotionDataset(bundle(tmp_path / "a.npz", 300 + 0 * line(60)), 3)
    for offset in (1e-3, 5e-3):
        windows = torch.full((100, 6), 300.0) + offset
        torch.testing.assert_close(motion.distance(windows), torch.full((100,), offset), rtol=0.05, atol=0)


def test_a_base_that_is_no_number_is_refused(tmp_path):
    motion = MotionDataset(bundle(tmp_path / "a.npz", line(9)), 3)
    with pytest.raises(ValueError, match="base nan was given for motion_0"):
        motion.windows(torch.tensor([0]), torch.tensor([float("nan")]))


# ---- angles, quaternions and weights ---------------------------------------------------------------------------------


def turning(length, speed, fps=50.0, start=3.0):
    """An angle in [-pi, pi) that turns at a constant speed (rad/s), beside a column that is none."""
    angle = start + speed * np.arange(length) / fps
    wrapped = (angle + np.pi) % (2 * np.pi) - np.pi
    return np.stack([wrapped, np.linspace(0.0, 1.0, length)], -1).astype(np.float32)


@pytest.mark.parametrize("speed", [0.7, -2.0, 40.0])
@pytest.mark.parametrize("dt", [0.02, 0.013])
def test_angles_take_the_short_way(tmp_path, speed, dt, caplog):
    clip = turning(300, speed)
    path = bundle(tmp_path / "a.npz", clip, angles=np.array([True, False]))
    windows = MotionDataset(path, 5, dt=dt, seed=2).sample(500)
    rate = windows[..., 0].diff(dim=1) / dt
    torch.testing.assert_close(rate, torch.full_like(rate, speed), rtol=1e-3, atol=0.05)
    exact = MotionDataset(path, 2).windows(torch.zeros(9, dtype=torch.int64), torch.arange(9) * 30.0)[:, 0]
    recorded = torch.from_numpy(clip[::30][:9])
    assert torch.equal(exact[:, 1], recorded[:, 1])
    torch.testing.assert_close(exact[:, 0].sin(), recorded[:, 0].sin(), rtol=0, atol=1e-4)
    assert not caplog.records


def test_what_looks_like_an_undeclared_angle_is_told(tmp_path, caplog):
    MotionDataset(bundle(tmp_path / "quiet.npz", turning(300, 2.0), angles=np.array([False, False])))
    MotionDataset(bundle(tmp_path / "line.npz", line(30)))
    assert not caplog.records
    MotionDataset(bundle(tmp_path / "a.npz", turning(20, 0.1, start=0.0), turning(300, 2.0)))
    assert "motion_1 jumps by about a full turn in column 0" in caplog.text and "bool [2]" in caplog.text


def spinning(length, flip=()):
    """A quaternion w, x, y, z that turns about z, with a sign that is flipped in some frames."""
    half = np.linspace(0.0, 4.0, length)
    q = np.stack([np.cos(half), 0 * half, 0 * half, np.sin(half)], -1)
    q[list(flip)] *= -1
    return np.concatenate([np.linspace(0, 1, length)[:, None], q], -1).astype(np.float32)


@pytest.mark.parametrize("shape", [(0, 4), (0,)])
def test_a_file_may_say_that_it_has_no_quaternions(tmp_path, shape):
    motion = MotionDataset(bundle(tmp_path / "a.npz", spinning(40), quaternions=np.zeros(shape, int)), 3)
    assert motion.sample(4).shape == (4, 3, 5)


def test_blended_quaternions_have_unit_norm_whatever_their_signs(tmp_path):
    columns = np.array([[1, 2, 3, 4]])
    plain = MotionDataset(bundle(tmp_path / "a.npz", spinning(40), quaternions=columns), 3)
    flipped = MotionDataset(bundle(tmp_path / "b.npz", spinning(40, range(7, 40, 3)), quaternions=columns), 3)
    windows = plain.sample(300)
    torch.testing.assert_close(windows[..., 1:].norm(dim=-1), torch.ones(300, 3))
    torch.testing.assert_close(flipped.sample(300), windows)


def test_quaternion_columns_follow_the_names(tmp_path):
    names = ["height", "qw", "qx", "qy", "qz"]
    path = bundle(tmp_path / "a.npz", spinning(40), quaternions=np.array([[1, 2, 3, 4]]), joint_names=np.array(names))
    straight, mapped = MotionDataset(path, 3), MotionDataset(path, 3)
    mapped._order_columns(["qz", "height", "qy", "qx", "qw"], "env")
    assert torch.equal(mapped.sample(50), straight.sample(50)[..., [4, 0, 3, 2, 1]])


def test_weights_say_how_often_a_clip_is_drawn(tmp_path):
    clips = [line(9), 100 + line(30), 200 + line(9)]
    motion = MotionDataset(bundle(tmp_path / "a.npz", *clips, weights=np.array([3.0, 0.0, 1.0])), 3)
    first = motion.sample(4000)[:, 0, 0]
    assert not ((first > 90) & (first < 190)).any()
    assert 0.72 < (first < 90).float().mean() < 0.78
    assert motion.sample(0).shape == (0, 3, 2)
    other = MotionDataset(bundle(tmp_path / "b.npz", *clips, weights=np.array([1.0, 1.0, 1.0])), 3)
    with pytest.raises(ValueError, match="does not hold the clips"):
        other.load_state_dict(motion.state_dict())


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (dict(angles=np.array([1, 0])), r"angles is int64 of shape \(2,\); expected bool \[2\]"),
        (dict(angles=np.array([True])), r"angles is bool of shape \(1,\)"),
        (dict(quaternions=np.array([[0, 1, 2, 3]])), "expected four different columns of the 2"),
        (dict(quaternions=np.array([0, 1, 0, 1])), "in the order w, x, y, z"),
        (dict(weights=np.array([1.0, 2.0])), "expected 1 numbers of at least 0"),
        (dict(weights=np.array([0.0])), "one above 0"),
        (dict(weights=np.array([np.nan])), r"weights is \[nan\]"),
    ],
)
def test_wrong_descriptions_of_columns_are_refused(tmp_path, entries, expected):
    with pytest.raises(ValueError, match=expected):
        MotionDataset(bundle(tmp_path / "a.npz", line(9), **entries))


def test_a_quaternion_without_unit_norm_is_refused(tmp_path):
    clip = spinning(40)
    clip[11, 1:] *= 1.5
    with pytest.raises(ValueError, match=r"motion_1 has a quaternion of norm 1.5 in frame 11, .* w, x, y, z"):
        MotionDataset(bundle(tmp_path / "a.npz", spinning(40), clip, quaternions=np.array([[1, 2, 3, 4]])))


def test_a_file_without_names_is_told_what_to_save(tmp_path, caplog):
    env = Walker()
    env.amp_joint_names = ("a", "b")
    MotionDataset(bundle(tmp_path / "bare.npz", line(9)), 2).match(env)
    assert "bare.npz has no joint_names" in caplog.text and "['a', 'b']. Save the names" in caplog.text
