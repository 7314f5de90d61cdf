"""Checkpoints whose files were changed on disk, and disks that are full."""

import errno
import json
import random
import shutil
from collections import namedtuple

import pytest
import torch
from torch import nn
from torchrl.checkpoint import Checkpoint, CheckpointError, StateDictCheckpointAdapter

from edenrl._files import DiskFullError, disk_space
from edenrl.training import Checkpoints, load_weights
from edenrl.training.checkpoint_files import DamagedCheckpointError, StateDictFile, check_checkpoint, folder_bytes
from edenrl.training.checkpoint_folder import has_checkpoint


class Notes:
    """A component that is no network."""

    def __init__(self):
        self.values = {"count": 3, "seen": torch.arange(40.0), "name": "notes", "none": None, "nested": [(1, 2.5)]}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


def folder(path, width=5, **options):
    torch.manual_seed(width)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
    parts = {"net": net, "optimizer": torch.optim.Adam(net.parameters()), "notes": Notes()}
    return parts, Checkpoints(path, parts, algorithm="PPO", **options)


def saved_run(path, *steps, width=5):
    """A run directory with checkpoints; the first weight of each is its step."""
    parts, checkpoints = folder(path / "checkpoints", width, keep_last=len(steps))
    for step in steps:
        nn.init.constant_(parts["net"][0].weight, float(step))
        checkpoints.save(step, return_mean=float(step))
    return parts, checkpoints


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def files_of(checkpoint):
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


@pytest.mark.parametrize(("width", "seed"), [(1, 0), (4, 1), (9, 2), (33, 3)])
def test_any_flipped_bit_of_any_file_is_found_and_the_file_named(tmp_path, width, seed):
    _, checkpoints = saved_run(tmp_path, 7, width=width)
    path, draw = checkpoints.latest(), random.Random(seed)
    assert check_checkpoint(path)["edenrl"]["files"].keys() == {
        file.relative_to(path).as_posix() for file in files_of(path) if file.name != "manifest.json"
    }
    for file in files_of(path):
        intact = file.read_bytes()
        for _ in range(20):
            flip(file, draw.randrange(8 * len(intact)))
            if file.name == "manifest.json" and _same_content(file.read_bytes(), intact):
                file.write_bytes(intact)
                continue
            with pytest.raises(DamagedCheckpointError, match=file.relative_to(path).as_posix()):
                check_checkpoint(path)
            file.write_bytes(intact)
    check_checkpoint(path)


def _same_content(damaged, intact):
    """Whether a flipped bit of the manifest changes white space alone."""
    try:
        return json.loads(damaged) == json.loads(intact)
    except ValueError:
        return False


@pytest.mark.parametrize("length", [0, 1, 8, -1])
def test_a_truncated_file_is_named_with_its_sizes(tmp_path, length):
    _, checkpoints = saved_run(tmp_path, 7)
    file = next(checkpoints.latest().rglob("state.tdc"))
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(
        DamagedCheckpointError, match=rf"state.tdc is damaged: it has \d+ bytes .* with {size}"
    ) as error:
        checkpoints.load()
    assert "holds no intact checkpoint" in str(error.value)


def _remove(file):
    file.unlink()


def _truncate(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("name", ["manifest.json", "state.tdc", "state.json"])
@pytest.mark.parametrize("damage", [_remove, _truncate, lambda file: flip(file, 90)])
def test_a_run_continues_from_the_older_intact_checkpoint_and_says_so(tmp_path, name, damage):
    parts, checkpoints = saved_run(tmp_path, 4, 6, 11)
    for path in checkpoints.rotation.all_paths()[:2]:
        damage(next(path.rglob(name)))
    with pytest.warns(UserWarning, match=rf"000011.*{name}.*000006.*{name}.*from .*000004, the newest intact one"):
        metadata = checkpoints.load()
    assert metadata["step"] == 4 and float(parts["net"][0].weight[0, 0]) == 4.0
    assert has_checkpoint(tmp_path)


def test_weights_are_not_loaded_from_a_damaged_checkpoint_and_the_intact_ones_are_named(tmp_path):
    parts, checkpoints = saved_run(tmp_path, 4, 6, 11)
    newest = checkpoints.latest()
    damaged = next((newest / "components").glob("*net")) / "state.tdc"
    flip(damaged, 100)
    for which in ("best", "latest", newest.name, str(newest)):
        with pytest.raises(DamagedCheckpointError, match=r"state.tdc.*Intact are: \S+0006, \S+0004\. Give one"):
            load_weights({"net": parts["net"]}, tmp_path, which)
    load_weights({"net": parts["net"]}, tmp_path, checkpoints.rotation.intact()[0])
    assert float(parts["net"][0].weight[0, 0]) == 6.0
    # What is not loaded is not compared: an optimizer's file does not matter to an evaluation.
    flip(damaged, 100)
    flip(next((newest / "components").glob("*optimizer")) / "state.tdc", 100)
    load_weights({"net": parts["net"]}, tmp_path, "latest")


def test_a_manifest_that_cannot_be_read_is_said_when_the_best_is_chosen(tmp_path):
    parts, checkpoints = saved_run(tmp_path, 4, 6, 11)
    (checkpoints.rotation.all_paths()[0] / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match=r"000011/manifest.json is damaged.*best of the other checkpoints"):
        assert load_weights({"net": parts["net"]}, tmp_path, "best").name.endswith("06")
    with pytest.raises(DamagedCheckpointError, match=r"000011/manifest.json is damaged"):
        load_weights({"net": parts["net"]}, tmp_path, "latest")


@pytest.mark.parametrize("bit", [0, 2, 4, 5])
@pytest.mark.parametrize("word", ["metadata", "sealed", "edenrl", "manifest"])
def test_a_flipped_bit_in_a_name_of_the_manifest_is_damage(tmp_path, word, bit):
    parts, checkpoints = saved_run(tmp_path, 4, 6)
    path = checkpoints.latest() / "manifest.json"
    flip(path, 8 * (path.read_bytes().index(f'"{word}"'.encode()) + 1) + bit)
    with pytest.raises(DamagedCheckpointError, match="manifest.json is damaged"):
        check_checkpoint(path.parent)
    with pytest.warns(UserWarning, match=r"manifest.json is damaged.*from .*000004"):
        assert checkpoints.load()["step"] == 4
    assert checkpoints.manifest("latest")[1]["step"] == 4


def test_a_newer_format_is_refused_and_not_taken_for_damage(tmp_path):
    _, checkpoints = saved_run(tmp_path, 4, 6)
    path = checkpoints.latest() / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["edenrl"]["format"] += 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="saved by a newer version of edenrl.*Update edenrl") as error:
        checkpoints.load()
    assert not isinstance(error.value, DamagedCheckpointError)


def _as_first_version(path):
    """Takes away what the manifests of the first versions did not have."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["edenrl"], manifest["metadata"]["sealed"], manifest["metadata"]["best"]
    file.write_text(json.dumps(manifest))


def test_a_run_of_the_first_versions_loads(tmp_path):
    parts, checkpoints = saved_run(tmp_path, 4, 6)
    for path in checkpoints.rotation.all_paths():
        _as_first_version(path)
    assert load_weights({"net": parts["net"]}, tmp_path, "best").name.endswith("06")
    assert checkpoints.load()["step"] == 6
    damaged = next((checkpoints.latest() / "components").glob("*net")) / "state.tdc"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"0006 cannot be loaded.*'net'.*without checksums.*move this one away"):
        checkpoints.load()


def test_the_files_are_those_of_torchrl(tmp_path):
    """Written by us and read by TorchRL, and the other way round, byte for byte the same."""
    parts, _ = folder(tmp_path)
    parts["empty"] = nn.Identity()
    for name, part in parts.items():
        StateDictFile().save(part, tmp_path / "ours" / name, args=(), kwargs={})
        StateDictCheckpointAdapter("consolidated").save(part, tmp_path / "theirs" / name, args=(), kwargs={})
        for file in ("state.tdc", "state.json"):
            ours, theirs = ((tmp_path / who / name / file).read_bytes() for who in ("ours", "theirs"))
            assert ours == theirs, (name, file)
    checkpoints = saved_run(tmp_path, 3)[1]
    assert Checkpoint(net=parts["net"]).load(checkpoints.latest()).loaded == {"net"}
    assert float(parts["net"][0].weight[0, 0]) == 3.0


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("free", [0, 1000])
def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path, monkeypatch, free):
    parts, checkpoints = folder(tmp_path, width=64)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - free, free))
    with pytest.raises(
        DiskFullError, match=rf"needs \d.* {free / 1000:.1f} kB are free.*No checkpoint" if free else "0 bytes"
    ):
        checkpoints.save(1)
    assert not tmp_path.exists() or not files_of(tmp_path)
    monkeypatch.undo()
    first = checkpoints.save(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, folder_bytes(first) - 1))
    with pytest.raises(DiskFullError, match=rf"{first} is complete and stays"):
        checkpoints.save(2)
    assert checkpoints.latest() == first and check_checkpoint(first)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("when", ["net", "notes", "optimizer"])
def test_a_disk_that_fills_up_on_the_way_leaves_the_older_checkpoint(tmp_path, monkeypatch, number, when):
    parts, checkpoints = folder(tmp_path)
    first = checkpoints.save(1)
    write = StateDictFile.save

    def full(self, component, path, **options):
        write(self, component, path, **options)
        if path.name.endswith(when):
            (path / "state.tdc").write_bytes(b"a part")
            raise OSError(number, "No space left on device")

    monkeypatch.setattr(StateDictFile, "save", full)
    with pytest.raises(DiskFullError, match=rf"the checkpoint needs .*{first} is complete and stays"):
        checkpoints.save(2)
    monkeypatch.undo()
    assert [path for path in tmp_path.iterdir()] == [first]
    assert checkpoints.load()["step"] == 1
    assert checkpoints.save(2) == checkpoints.latest()


def test_a_full_disk_is_recognized_behind_errors_that_follow_from_it(tmp_path):
    with pytest.raises(DiskFullError, match="could not be written"), disk_space(tmp_path, "it"):
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0") from None
    with pytest.raises(RuntimeError, match="something else"), disk_space(tmp_path, "it"):
        raise RuntimeError("something else")
