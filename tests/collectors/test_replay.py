"""The n-step replay against lists, against the published buffer, and at every edge: ends, wrap-around, files."""

import copy
import errno
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage, OneHot, RoundRobinWriter, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from edenrl._files import DiskFullError
from edenrl.collectors import Collector, NStepReplayBuffer, RewardNormalizer, storage_space
from edenrl.envs import PointMass, wrap_env
from edenrl.training.checkpoint import Checkpoints

GOLDEN = "flashsac_data"


def stream(num_envs, steps, end_rate=0.2, seed=0, width=2):
    """Random episodes ``[N, T]``; the observation holds (env, a number that never repeats), actions and rewards too."""
    rng = torch.Generator().manual_seed(seed)
    unique = iter(range(1, 10**6))

    def observation(env):
        return torch.tensor([float(env), float(next(unique)), *[0.5] * (width - 2)])

    current = [observation(env) for env in range(num_envs)]
    out = []
    for _ in range(steps):
        rows = []
        for env in range(num_envs):
            kind = torch.rand(2, generator=rng)
            ended = bool(kind[0] < end_rate)
            terminated, truncated = ended and bool(kind[1] < 0.6), ended and bool(kind[1] > 0.4)  # sometimes both
            after = observation(env)
            flags = {"terminated": terminated, "truncated": truncated, "done": ended}
            ends = {"observation": after, "reward": torch.randn(1, generator=rng)}
            ends |= {name: torch.tensor([value]) for name, value in flags.items()}
            rows.append(TensorDict(observation=current[env], action=torch.rand(1, generator=rng), next=ends))
            current[env] = observation(env) if ended else after
        out.append(torch.stack(rows))
    return torch.stack(out, 1)


def by_list(data, start, env, n, gamma):
    """The n-step transition from step ``start`` of an environment, one step after the other."""
    reward, k = 0.0, 0
    while True:
        ended = data[env, start + k]["next"]
        reward += gamma**k * float(ended["reward"])
        k += 1
        if k == n or bool(ended["done"]):
            return reward, k, ended


def find(data, sample):
    """Where a sampled observation comes from; it is unique in the stream."""
    hits = (data["observation"] == sample["observation"]).all(-1).nonzero()
    assert len(hits) == 1
    return hits[0].tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("num_envs", "end_rate"), [(1, 0.3), (3, 0.15), (4, 0.6), (2, 0.0), (3, 1.0)])
def test_every_sample_is_what_a_list_gives(n, num_envs, end_rate):
    gamma, data = 0.9, stream(num_envs, 60, end_rate, seed=n)
    rng = torch.Generator().manual_seed(n)
    buffer = NStepReplayBuffer(17 * num_envs, n_steps=n, gamma=gamma)
    written, seen = 0, set()
    while written < 60:
        length = min(int(torch.randint(1, 6, (1,), generator=rng)), 60 - written)
        buffer.extend(data[:, written : written + length])
        written += length
        held = min(written, 17)
        assert len(buffer) == held * num_envs and buffer.samplable == max(held - n, 0) * num_envs
        if not buffer.can_sample():
            with pytest.raises(RuntimeError, match=f"n_steps={n}"):
                buffer.sample(1)
            continue
        batch = buffer.sample(40)
        for sample in batch.unbind(0):
            env, start = find(data, sample)
            assert written - held <= start < written - n
            reward, k, ended = by_list(data, start, env, n, gamma)
            assert int(sample["steps_to_next_obs"]) == k
            assert torch.equal(sample["action"], data[env, start]["action"])
            assert float(sample["next", "reward"]) == pytest.approx(reward, abs=1e-5)
            for key in ("observation", "terminated", "truncated", "done"):
                assert torch.equal(sample["next", key], ended[key]), key
            seen.add((env, start))
    assert len(seen) > 20


def assert_published(found, expected, i):
    """Every one of our transitions is the published one in row i."""
    assert len(found) > 0
    for ours, theirs in (("observation", "obs"), ("action", "action"), (("next", "observation"), "next_obs")):
        assert (found[ours] == expected[theirs][i]).all()
    for name in ("terminated", "truncated"):
        assert (found["next", name] == expected[name][i]).all()
    reward = expected["reward"][i].expand(len(found), 1)
    torch.testing.assert_close(found["next", "reward"], reward, rtol=1e-6, atol=1e-6)


def test_published_n_step_data(golden):
    g, n = golden, int(golden["nstep.n"])

    def raw(name):
        return g[f"nstep.raw.{name}"].transpose(0, 1)

    ends = {name: raw(name).unsqueeze(-1) for name in ("reward", "terminated", "truncated")}
    ends |= {"observation": raw("next_obs"), "done": ends["terminated"] | ends["truncated"]}
    data = TensorDict(dict(observation=raw("obs"), action=raw("action"), next=ends), batch_size=raw("reward").shape)
    envs, steps = data.shape
    buffer = NStepReplayBuffer(1000, n_steps=n, gamma=float(g["nstep.gamma"]))
    buffer.extend(data)
    batch = buffer.sample(2000)
    matches = (batch["observation"].unsqueeze(1) == g["nstep.all.obs"]).all(-1)
    assert bool((matches.sum(1) == 1).all())
    row = matches.int().argmax(1)
    # Every step that theirs can return, except those of the newest rows.
    assert set(g["nstep.sample.index"].tolist()) <= set(row.tolist()) and len(set(row.tolist())) == (steps - n) * envs
    torch.testing.assert_close(batch["next", "reward"].squeeze(-1), g["nstep.all.reward"][row], rtol=1e-6, atol=1e-6)
    for ours, theirs in (("observation", "next_obs"), ("terminated", "terminated"), ("truncated", "truncated")):
        value = g[f"nstep.all.{theirs}"][row]
        assert torch.equal(batch["next", ours].view(value.shape), value)
    assert torch.equal(batch["action"], g["nstep.all.action"][row])
    for i, index in enumerate(g["nstep.sample.index"]):
        assert_published(batch[row == index], g.under("nstep.sample."), i)
    # A ring of the 9 newest steps holds what theirs of 21 n-step rows may return, and more.
    slots, capacity, total = g["nstep.ring.index"], int(g["nstep.ring.capacity"]), len(g["nstep.all.obs"])
    written = total - capacity + (slots - g["nstep.ring.write_slot"]) % capacity
    assert torch.equal(g["nstep.all.obs"][written], g["nstep.ring.obs"])
    ring = NStepReplayBuffer(9 * envs, n_steps=n, gamma=float(g["nstep.gamma"]))
    for step in range(steps):
        ring.extend(data[:, step : step + 1])
    batch = ring.sample(1000)
    for i, observation in enumerate(g["nstep.ring.obs"]):
        assert_published(batch[(batch["observation"] == observation).all(-1)], g.under("nstep.ring."), i)


def constant(num_envs, steps, end_at=None, kind="truncated"):
    ends = {name: torch.zeros(num_envs, steps, 1, dtype=torch.bool) for name in ("terminated", "truncated")}
    if end_at is not None:
        ends[kind][:, end_at] = True
    count = torch.arange(steps + 1.0).expand(num_envs, -1).unsqueeze(-1)
    ends |= {"observation": count[:, 1:].clone(), "reward": torch.ones(num_envs, steps, 1)}
    ends["done"] = ends["terminated"] | ends["truncated"]
    data = dict(observation=count[:, :-1].clone(), action=torch.zeros(num_envs, steps, 1), next=ends)
    return TensorDict(data, batch_size=[num_envs, steps])


@pytest.mark.parametrize(("kind", "reward"), [("truncated", 1.9 + 0.81 * 10), ("terminated", 1.9)])
def test_bootstrap_by_hand(kind, reward):
    # Rewards 1, gamma 0.9, Q(next) = 10: a window cut after two steps, and a whole one.
    buffer = NStepReplayBuffer(20, n_steps=3, gamma=0.9)
    buffer.extend(constant(1, 9, end_at=3, kind=kind))
    batch = buffer.sample(200)
    value = batch["next", "reward"] + 0.9 ** batch["steps_to_next_obs"] * 10 * ~batch["next", "terminated"]
    start = batch["observation"]
    assert value[start == 2].tolist() == pytest.approx([reward] * int((start == 2).sum()), abs=1e-5)
    assert value[start == 0].tolist() == pytest.approx([10.0] * int((start == 0).sum()), abs=1e-5)


def test_all_valid_starts_are_drawn_equally_often():
    # 3 environments, 20 transitions kept (7 rows), 100 steps: 4 rows may start a window of 3.
    data, buffer = stream(3, 100), NStepReplayBuffer(20, n_steps=3)
    for step in range(100):
        buffer.extend(data[:, step : step + 1])
    drawn = buffer.sample(50_000)["observation"][:, 1]
    expected = data["observation"][:, 93:97, 1].flatten().sort()[0]
    values, counts = drawn.unique(return_counts=True)
    assert torch.equal(values, expected)
    chi_square = float(((counts - 50_000 / 12) ** 2 / (50_000 / 12)).sum())
    assert chi_square < 31.3  # 0.1 % quantile of 11 degrees of freedom


@pytest.mark.parametrize("where", ["within a batch", "between batches"])
def test_a_reset_without_an_end_is_an_end(where):
    data = constant(2, 8)
    data["observation"][1, 4:] += 100.0  # row 1 was reset before step 4
    data["next", "observation"][1, 4:] += 100.0
    data["next", "terminated"][0, 3] = True  # and row 0 ended at the same step
    data["observation"][0, 4:] += 50.0
    data["next", "observation"][0, 4:] += 50.0
    buffer = NStepReplayBuffer(40, n_steps=3, gamma=1.0)
    for part in [data] if where == "within a batch" else [data[:, :4], data[:, 4:]]:
        buffer.extend(part)
    for sample in buffer.sample(300).unbind(0):
        start, after = float(sample["observation"]), float(sample["next", "observation"])
        broken = start in (1.0, 2.0, 3.0) and after == 4.0 and start + 3 > 4
        assert after == min(start + 3, 4.0) if start < 4 else after == start + 3
        if broken:
            assert bool(sample["next", "done"]) and float(sample["next", "reward"]) == 4 - start
    # The data that was handed in is as it was.
    assert not bool(data["next", "truncated"].any())


def test_only_wanted_groups_are_stored_and_memory_is_about_half():
    data = stream(4, 40, width=64)
    data["wide"] = torch.zeros(4, 40, 1000)
    buffer = NStepReplayBuffer(160, n_steps=3)
    buffer.extend(data)
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(160, ndim=2), batch_size=8)
    plain.extend(data.exclude("wide"))

    def size(storage):
        return storage._storage.bytes() / 160

    assert "wide" not in buffer.sample(2).keys()
    assert size(buffer.storage) <= 0.55 * size(plain.storage)
    halved = NStepReplayBuffer(160, n_steps=3, observation_dtype=torch.bfloat16)
    halved.extend(data)
    assert size(halved.storage) <= 0.3 * size(plain.storage)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduced_precision_rounds_observations_only(dtype):
    data = stream(2, 20)
    data["observation"] /= 7
    data["next", "observation"] /= 7
    exact, reduced = (NStepReplayBuffer(60, n_steps=2, observation_dtype=d) for d in (None, dtype))
    batches = []
    for buffer in (exact, reduced):
        buffer.extend(data)
        torch.manual_seed(0)
        batches.append(buffer.sample(50))
    for key in ("observation", ("next", "observation")):
        assert batches[1][key].dtype == torch.float32
        assert torch.equal(batches[1][key], batches[0][key].to(dtype).float())
    assert torch.equal(batches[0]["next", "reward"], batches[1]["next", "reward"])
    if dtype == torch.float16:
        data["observation"][0, 0, 0] = 1e5
        with pytest.raises(ValueError, match="65504"):
            reduced.extend(data)


def same_samples(one, two, size=64):
    rng = torch.get_rng_state()
    first = one.sample(size)
    torch.set_rng_state(rng)
    second = two.sample(size)
    for key, value in first.items(True, True):
        assert torch.equal(value, second[key]), key


@pytest.mark.parametrize("steps", [5, 40])
def test_a_restored_buffer_goes_on_identically(tmp_path, steps):
    data = stream(3, 60)
    buffers = [NStepReplayBuffer(45, n_steps=3, observation_dtype=torch.bfloat16) for _ in range(3)]
    buffers[0].extend(data[:, :5])
    for step in range(5, steps):
        buffers[0].extend(data[:, step : step + 1])
    buffers[1].load_state_dict(copy.deepcopy(buffers[0].state_dict()))
    Checkpoint(replay=buffers[0]).save(tmp_path / "c")
    Checkpoint(replay=buffers[2]).load(tmp_path / "c")
    for step in range(steps, 60):
        for buffer in buffers:
            buffer.extend(data[:, step : step + 1])
        if step % 6 == 0:
            same_samples(buffers[0], buffers[1])
            same_samples(buffers[0], buffers[2])
    with pytest.raises(ValueError, match="size it was saved with"):
        NStepReplayBuffer(21, n_steps=3).load_state_dict(buffers[0].state_dict())


@pytest.mark.parametrize("key", [("agents", "observation"), "walker/joints_pos", "a~1b"])
def test_observations_of_any_name_are_restored(key):
    data = stream(3, 30).rename_key_("observation", key)
    data["next"] = data["next"].rename_key_("observation", key)
    one, two = (NStepReplayBuffer(45, n_steps=3, observations=[key]) for _ in range(2))
    one.extend(data[:, :10])
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for buffer in (one, two):
        buffer.extend(data[:, 10:15])
    same_samples(one, two)


def test_observations_without_a_feature_dimension_break_no_window():
    data = constant(2, 9)
    for part in (data, data["next"]):
        part["count"] = part["observation"].squeeze(-1).long()
    buffer = NStepReplayBuffer(40, n_steps=3, observations=["observation", "count"])
    for part in data.split(4, 1):
        buffer.extend(part)
    batch = buffer.sample(100)
    assert not bool(batch["next", "done"].any()) and bool((batch["steps_to_next_obs"] == 3).all())
    assert torch.equal(batch["next", "count"], batch["count"] + 3)


def test_restored_in_another_precision():
    data = stream(3, 40)
    data["observation"] /= 7
    data["next", "observation"] /= 7
    dtypes = (None, torch.bfloat16, None)
    exact, reduced, plain = (NStepReplayBuffer(45, n_steps=3, observation_dtype=dtype) for dtype in dtypes)
    for buffer in (exact, reduced):
        buffer.extend(data[:, :14])
    plain.load_state_dict(copy.deepcopy(reduced.state_dict()))
    same_samples(plain, reduced)
    reduced.load_state_dict(copy.deepcopy(exact.state_dict()))
    for buffer in (reduced, plain):
        buffer.extend(data[:, 14:28])
    sample, key = plain.sample(200), ("next", "observation")
    assert plain.storage._storage["observation"].dtype == torch.float32
    assert not torch.equal(sample[key], sample[key].bfloat16().float())
    sample = reduced.sample(200)
    assert reduced.storage._storage["observation"].dtype == torch.bfloat16
    assert torch.equal(sample[key], sample[key].bfloat16().float())
    other = NStepReplayBuffer(45, n_steps=3, observations=["policy"])
    with pytest.raises(ValueError, match=r"observations \['observation'\], this one \['policy'\]"):
        other.load_state_dict(exact.state_dict())


def test_samples_drawn_ahead_do_not_outlive_their_data():
    data = stream(3, 30)
    buffer = NStepReplayBuffer(45, n_steps=3, batch_size=16, prefetch=2)
    buffer.extend(data[:, :10])
    for step in range(10, 20):
        buffer.extend(data[:, step : step + 1])
        for sample in buffer.sample().unbind(0):
            env, start = find(data, sample)
            assert float(sample["next", "reward"]) == pytest.approx(by_list(data, start, env, 3, 0.99)[0], abs=1e-5)
    state = copy.deepcopy(buffer.state_dict())
    buffer.empty()
    with pytest.raises(RuntimeError, match="holds 0 steps"):
        buffer.sample()
    buffer.extend(stream(3, 10, seed=1))
    buffer.sample()
    buffer.load_state_dict(state)
    assert all(find(data, sample)[1] < 17 for sample in buffer.sample().unbind(0))


def test_a_buffer_on_disk_is_saved_without_a_copy_in_memory(tmp_path):
    data = stream(3, 40)
    one, two = (NStepReplayBuffer(90, n_steps=3, memmap=tmp_path / "data") for _ in range(2))
    for count, part in enumerate(data[:, :35].split(5, 1)):
        one.extend(part)
        saved, stored = one.state_dict()["data"], one.storage._storage
        assert all(v.data_ptr() == stored.get(tuple(k.split("/"))).data_ptr() for k, v in saved.items())
        if count in (1, 6):  # not yet full, and after it has wrapped
            checkpoints = Checkpoints(tmp_path / f"c{count}", {"replay": one}, algorithm="x")
            checkpoints.save(1)
            Checkpoints(tmp_path / f"c{count}", {"replay": two}, algorithm="x").load()
            same_samples(one, two)
    for buffer in (one, two):
        buffer.extend(data[:, 35:])
    same_samples(one, two)


def test_saved_without_data_it_starts_empty():
    buffer = NStepReplayBuffer(45, n_steps=3, save_data=False)
    with pytest.raises(RuntimeError, match="holds 0 steps per environment"):
        buffer.sample(1)
    buffer.extend(stream(3, 10))
    state = buffer.state_dict()
    buffer.load_state_dict(state)
    assert len(buffer) == 0 and not buffer.can_sample()
    buffer.extend(stream(3, 10))
    assert len(buffer) == 30


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve disk space")
@pytest.mark.parametrize("size", [9_000, 70_000])
def test_a_buffer_on_disk_takes_its_space_at_once(tmp_path, monkeypatch, size):
    """A file of a memory map that has no blocks yet kills the process when the disk is full by then."""
    buffer = NStepReplayBuffer(size, n_steps=3, memmap=tmp_path / "data")
    buffer.extend(stream(3, 4))
    files = list((tmp_path / "data").rglob("*.memmap"))
    assert files and all(file.stat().st_blocks * 512 >= file.stat().st_size for file in files)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match=r"The disk of .*other is full: the replay buffer needs .* are free"):
        NStepReplayBuffer(size, n_steps=3, memmap=tmp_path / "other").extend(stream(3, 4))


def test_memmap_holds_the_same(tmp_path):
    data = stream(3, 30)
    memory, disk = NStepReplayBuffer(45, n_steps=3), NStepReplayBuffer(45, n_steps=3, memmap=tmp_path / "buffer")
    for part in data.split(5, 1):
        memory.extend(part)
        disk.extend(part)
    same_samples(memory, disk)
    assert any((tmp_path / "buffer").rglob("*.memmap"))


def test_buffers_in_one_directory_do_not_write_into_each_other(tmp_path):
    """Two processes of one run, and two runs, are given the same directory."""
    streams = [stream(3, 30, seed=seed) for seed in (0, 1)]
    disks = [NStepReplayBuffer(90, n_steps=3, memmap=tmp_path) for _ in streams]
    memories = [NStepReplayBuffer(90, n_steps=3) for _ in streams]
    for data, disk, memory in zip(streams, disks, memories, strict=True):
        disk.extend(data)
        memory.extend(data)
    for disk, memory in zip(disks, memories, strict=True):
        same_samples(memory, disk)
    code = f"import edenrl.collectors as c; print(c.NStepReplayBuffer(9, memmap={str(tmp_path)!r}).storage.scratch_dir)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert [Path(buffer.storage.scratch_dir).name for buffer in disks] == ["0", "1"]
    assert Path(done.stdout.strip()).name == "2", done.stderr
    # What a buffer that is gone has left is used again.
    del disks[0]
    gc.collect()
    assert Path(NStepReplayBuffer(9, memmap=tmp_path).storage.scratch_dir).name == "0"


def test_too_large_is_refused_with_bytes(monkeypatch):
    monkeypatch.setattr(storage_space, "free_bytes", lambda *_: 1_000_000)
    # 2 observations, action and reward of 4 bytes, two flags.
    with pytest.raises(ValueError, match=r"needs 1,800,000,000 bytes \(18 per step\), but 1,000,000 .* 55,555"):
        NStepReplayBuffer(100_000_000, n_steps=3).extend(stream(2, 2))


def test_limits_of_containers_and_processes_count(tmp_path, monkeypatch):
    root, proc = tmp_path / "cgroup", tmp_path / "self"
    (root / "job" / "step").mkdir(parents=True)
    proc.write_text("0::/job/step\n")
    for folder, limit in (("job", "1000"), ("job/step", "max")):
        for name, text in (("max", limit), ("current", "700"), ("stat", "anon 500\ninactive_file 150")):
            (root / folder / f"memory.{name}").write_text(f"{text}\n")
    assert storage_space._group_free_bytes(proc, root) == [450]
    assert storage_space._group_free_bytes(tmp_path / "none", root) == []
    monkeypatch.setattr(storage_space, "_group_free_bytes", lambda: [1000, 4000])
    assert storage_space.free_bytes(torch.device("cpu"), None) in (None, 1000)
    monkeypatch.setattr(storage_space, "several_processes", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert storage_space.free_bytes(torch.device("cpu"), None) in (None, 250)


def test_free_memory_is_found(tmp_path):
    for place in ((torch.device("cpu"), None), (torch.device("cpu"), tmp_path / "later")):
        assert storage_space.free_bytes(*place) is None or storage_space.free_bytes(*place) > 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda b: NStepReplayBuffer(0), "max_size >= 1"),
        (lambda b: NStepReplayBuffer(10, gamma=1.5), "gamma in"),
        (lambda b: NStepReplayBuffer(10, observation_dtype=torch.int8), "floating-point"),
        (lambda b: NStepReplayBuffer(10, device="cuda", memmap="x"), "memmap needs device 'cpu', got 'cuda'"),
        (lambda b: b.extend(stream(2, 3)[0]), r"\[environments, steps\]"),
        (lambda b: b.extend(stream(3, 3)), "2 environments, got 3"),
        (lambda b: NStepReplayBuffer(6, n_steps=3).extend(stream(2, 1)), "leaves 3 steps .* more than n_steps=3"),
        (lambda b: NStepReplayBuffer(10, n_steps=3).extend(stream(2, 9)), "hold a batch of 9"),
    ],
)
def test_mistakes_are_refused(act, message):
    buffer = NStepReplayBuffer(100, n_steps=3)
    buffer.extend(stream(2, 3))
    with pytest.raises(ValueError, match=message):
        act(buffer)


def test_missing_flags_and_single_steps_are_refused():
    data = stream(2, 3)
    data["next"] = data["next"].exclude("truncated", "done")
    with pytest.raises(KeyError, match="all three flags"):
        NStepReplayBuffer(100).extend(data)
    with pytest.raises(TypeError, match="use extend"):
        NStepReplayBuffer(100).add(data[0, 0])


def test_it_serves_torchrl_losses():
    """TorchRL's DQN finds the discount of each window: with Q = 10 everywhere the targets are those worked by hand."""
    buffer = NStepReplayBuffer(100, n_steps=3, gamma=0.9, batch_size=64)
    data = constant(1, 9, end_at=3, kind="truncated")
    data["action"] = torch.tensor([1, 0]).expand(1, 9, 2)
    buffer.extend(data)
    net = nn.Linear(1, 2)
    nn.init.zeros_(net.weight)
    net.bias.data.copy_(torch.tensor([10.0, 0.0]))
    loss = DQNLoss(QValueActor(net, spec=OneHot(2)), action_space="one-hot", delay_value=False)
    loss.make_value_estimator(gamma=0.9)
    batch = buffer.sample()
    loss(batch)
    assert batch["td_error"].abs().max() < 1e-8  # every target is 10 again


def test_module_reads_a_sample():
    buffer = NStepReplayBuffer(100, n_steps=2, batch_size=5)
    buffer.extend(stream(2, 10))
    module = TensorDictModule(nn.Linear(2, 1), in_keys=["observation"], out_keys=["value"])
    assert module(buffer.sample())["value"].shape == (5, 1)


@pytest.mark.parametrize("key", ["observation", "action", ("next", "observation"), ("next", "reward")])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
def test_data_that_is_not_finite_is_refused_before_anything_is_stored(key, value):
    data = stream(3, 12, seed=4)
    buffer = NStepReplayBuffer(60, n_steps=2, transform=RewardNormalizer(3))
    buffer.extend(data[:, :5])
    before = copy.deepcopy(buffer.state_dict())
    bad = data[:, 5:].clone()
    bad[key][2, 4, 0] = value
    with pytest.raises(ValueError, match=rf"{re.escape(repr(key))} holds .* at env 2, step 4 .*rollout is refused"):
        buffer.extend(bad)
    after = buffer.state_dict()
    assert after["written"] == before["written"] and after["data"].keys() == before["data"].keys()
    assert all(torch.equal(after["data"][name], kept) for name, kept in before["data"].items())
    assert all(torch.equal(after["transforms"][name], kept) for name, kept in before["transforms"].items())
    buffer.extend(data[:, 5:])  # it goes on


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampler", SamplerWithoutReplacement()),
        ("storage", LazyTensorStorage(7)),
        ("writer", RoundRobinWriter()),
        ("collate_fn", lambda x: x),
        ("priority_key", "td_error"),
        ("dim_extend", 1),
        ("delayed_init", True),
    ],
)
def test_options_that_would_be_ignored_are_refused(name, value):
    with pytest.raises(TypeError, match=rf"leave \['{name}'\] out"):
        NStepReplayBuffer(10, **{name: value})
    buffer = NStepReplayBuffer(10)
    with pytest.raises(TypeError, match="takes no sampler"):
        buffer.set_sampler(SamplerWithoutReplacement())


@pytest.mark.parametrize(("num_envs", "started"), [(1, False), (3, True)])
def test_a_collector_fills_it_by_itself(num_envs, started):
    """As TorchRL's ``Collector(replay_buffer=...)`` does with its own buffers, in a thread or not."""
    buffer = NStepReplayBuffer(1000, n_steps=2, batch_size=8)
    env = wrap_env(PointMass(num_envs, seed=num_envs))
    sizes = dict(frames_per_batch=8 * num_envs, total_frames=40 * num_envs)
    with Collector(env, None, replay_buffer=buffer, **sizes) as collector:
        if started:
            collector.start()
            collector._thread.join(60)
        else:
            assert [batch for batch in collector] == [None] * 5
    assert len(buffer) == 40 * num_envs and buffer.sample()["next", "observation"].shape == (8, 14)
