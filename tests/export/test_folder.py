"""A process killed at any instant leaves the old export or the new one, never a mix."""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time

import pytest
import torch

from edenrl.envs import PointMass
from edenrl.export import export_policy
from edenrl.export.folder import publish, staging
from edenrl.modules import gaussian_actor

NAMES = ["policy.onnx", "policy.pt", "policy_spec.json"]
EXPORTS = {"old": NAMES, "new": ["policy.onnx", "policy_spec.json"], "first": NAMES}
EVENTS = ("os.symlink", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.mkdir", "open")


def put(out_dir, which):
    """Stages and publishes files that hold their export's name."""
    with staging(out_dir, NAMES) as staged:
        for name in EXPORTS[which]:
            (staged / name).write_text(which)
        publish(staged, NAMES)


def found(out_dir):
    """Which export the folder holds, after checking that it is whole."""
    there = {name: (out_dir / name).read_text() for name in NAMES if (out_dir / name).exists()}
    if not there:
        return None
    (which,) = set(there.values())
    assert sorted(there) == EXPORTS[which]
    return which


def killed_at(operation, action):
    """Runs ``action`` in a process that ends itself with SIGKILL before its n-th file operation; False if it ended."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event, arguments):
            nonlocal count
            if event in EVENTS:
                count += 1
                if count == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("before", ["old", None])
def test_a_kill_before_every_single_file_operation(tmp_path, before):
    seen, operation = [], 0
    while True:
        operation += 1
        out_dir = tmp_path / str(operation)
        if before:
            put(out_dir, before)
        if not killed_at(operation, lambda folder=out_dir: put(folder, "new")):
            break
        seen.append(found(out_dir))
        put(out_dir, "first")  # the next export works and cleans up
        assert found(out_dir) == "first" and len(list((out_dir / ".export").iterdir())) == 2
    assert found(out_dir) == "new" and operation > 8
    # The old one up to some operation and the new one from there on: one single turn-over.
    turn = seen.index("new")
    assert 0 < turn < len(seen) and seen == [before] * turn + ["new"] * (len(seen) - turn)


def check_exported(out_dir):
    """The task of the export in a folder, after checking every file against the spec."""
    if not (out_dir / "policy_spec.json").exists():
        return None
    spec = json.loads((out_dir / "policy_spec.json").read_text())
    for entry in spec["model"]["files"]:
        assert hashlib.sha256((out_dir / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
    actions = torch.jit.load(str(out_dir / "policy.pt"))(torch.zeros(1, 14))
    assert actions[0, 0] == {"A": 1.0, "B": 2.0}[spec["provenance"]["task"]]
    return spec["provenance"]["task"]


def check_random_kills(out_dir, times):
    policies = {}
    for task, bias in (("A", 1.0), ("B", 2.0)):
        policies[task] = gaussian_actor({"observation": 14}, 2, hidden=(4,))
        with torch.no_grad():
            policies[task].module[0].module.mlp[-1].weight.zero_()
            policies[task].module[0].module.mlp[-1].bias.fill_(bias)
    env, generator = PointMass(2, seed=0), random.Random(0)
    for _ in range(times):
        done, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            # The other one first, so that every round has something to change.
            for task in itertools.cycle("BA" if check_exported(out_dir) == "A" else "AB"):
                export_policy(policies[task], env, out_dir, formats=["jit"], task=task, verify=False)
                os.write(report, b".")
        finished = generator.randint(0, 2)
        for _ in range(finished):
            os.read(done, 1)
        time.sleep(generator.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(done)
        os.close(report)
        assert check_exported(out_dir) in ("A", "B") or not finished
    export_policy(policies["A"], env, out_dir, formats=["jit"], task="A")
    assert check_exported(out_dir) == "A" and len(list((out_dir / ".export").iterdir())) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_random_kills_of_real_exports(tmp_path):
    check_random_kills(tmp_path, 20)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_three_hundred_random_kills_of_real_exports(tmp_path):
    check_random_kills(tmp_path, 300)


def test_an_error_leaves_nothing_behind(tmp_path):
    put(tmp_path, "old")
    with pytest.raises(RuntimeError), staging(tmp_path, NAMES) as staged:
        (staged / "policy.onnx").write_text("half")
        raise RuntimeError
    assert found(tmp_path) == "old" and len(list((tmp_path / ".export").iterdir())) == 2


def test_a_copied_folder_is_a_whole_export(tmp_path):
    put(tmp_path / "a", "old")
    shutil.copytree(tmp_path / "a", tmp_path / "links", symlinks=True)
    shutil.copytree(tmp_path / "a", tmp_path / "files", ignore=shutil.ignore_patterns(".export"))
    (tmp_path / "a").rename(tmp_path / "moved")
    assert [found(tmp_path / name) for name in ("links", "files", "moved")] == ["old"] * 3
