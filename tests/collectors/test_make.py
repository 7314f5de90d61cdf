"""Workers that collect: the same rows, in a fixed order, from the policy that is being optimized."""

import importlib.util
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from edenrl.collectors import Collector, make, make_collector
from edenrl.config import EnvConfig, RunConfig
from edenrl.envs import PointMass, spawn_seeds
from edenrl.modules import make_actor, update_normalization
from edenrl.training import collector_options

ROWS, STEPS = 6, 40
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the ray package")
KINDS = ["multi_sync", pytest.param("ray", marks=[needs_ray, pytest.mark.extended])]


def options(collector, env="PointMass", **changes):
    # Scaled rewards, so that a worker that ignores the configuration is noticed.
    cfg = RunConfig(collector=collector, seed=4, env=EnvConfig(name=env, num_envs=ROWS, reward_scale=0.5))
    return {"frames_per_batch": ROWS * STEPS, **collector_options(cfg), **changes}


def make_policy():
    torch.manual_seed(0)
    return make_actor({"observation": 14}, PointMass(1).action_spec_unbatched, hidden=(8,))


def move(policy, batch):
    """What an update does to the policy: other parameters, other statistics."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3)
    update_normalization(policy, batch)


def differing(ours, theirs):
    """Largest difference by key, apart from trajectory numbers, which workers draw from one pool."""
    ours, theirs = ours.exclude("collector"), theirs.exclude("collector")
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    pairs = {key: (ours[key].double(), theirs[key].double()) for key in ours.keys(True, True)}
    return {key: float((a - b).abs().max()) for key, (a, b) in pairs.items() if not torch.equal(a, b)}


@pytest.fixture(scope="module", params=KINDS)
def collected(request):
    """Batches around an update, the state after it, what came next, and what a new collector makes of that state."""
    policy = make_policy()
    collector = make_collector(None, policy, **options(request.param))
    try:
        batches = iter(collector)
        first = next(batches).clone()
        move(policy, first)
        if request.param == "multi_sync":
            for process in collector.procs:  # Ctrl-C in a terminal reaches the workers too
                os.kill(process.pid, signal.SIGINT)
        second = next(batches).clone()
        state = collector.state_dict()
        third = next(batches).clone()
    finally:
        collector.shutdown()
    with make_collector(None, policy, **options(request.param, seed=77)) as again:
        again.load_state_dict(state)
        continued = next(iter(again)).clone()
    assert request.param == "ray" or again.closed  # Ray's collector does not tell
    return {"policy": policy, "batches": [first, second, third], "continued": continued}


def test_rows_are_those_of_the_workers_one_after_another(collected):
    """Each worker is our own collector with the worker's seeds, run here."""
    batches = collected["batches"]
    assert batches[0].batch_size == (ROWS, STEPS)
    for worker, rows in enumerate((slice(0, ROWS // 2), slice(ROWS // 2, ROWS))):
        policy, seed = make_policy(), spawn_seeds(4, 2)[worker]
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        alone = Collector(options("multi_sync")["worker_env"](worker), policy, frames_per_batch=ROWS * STEPS // 2,
                          total_frames=-1)  # fmt: skip
        taken = iter(alone)
        own = next(taken).clone()
        assert differing(batches[0][rows], own) == {}
    assert not torch.equal(batches[0]["observation"][: ROWS // 2], batches[0]["observation"][ROWS // 2 :])


def test_the_policy_that_acts_is_the_one_that_is_optimized(collected):
    policy, (first, second, third) = collected["policy"], collected["batches"]
    for batch in (second, third):
        log_prob = policy.get_dist(batch.copy()).log_prob(batch["action"])
        torch.testing.assert_close(log_prob, batch["action_log_prob"], rtol=1e-5, atol=1e-5)
    moved = policy.get_dist(first.copy()).log_prob(first["action"]) - first["action_log_prob"]
    assert moved.abs().max() > 0.1, "the update changed nothing: the test proves too little"


def test_a_new_collector_continues_bit_for_bit(collected):
    third, continued = collected["batches"][2], collected["continued"]
    assert differing(third, continued) == {}
    assert third["next", "done"].any(), "no episode ended: the test proves too little"


_FAILS = """
import sys
from edenrl.collectors import make_collector
from edenrl.envs import make_env, wrap_env
from edenrl.modules import gaussian_actor, observation_groups


def maker(worker, broken=False):
    if broken:
        raise RuntimeError("cannot be built")
    return wrap_env(make_env("PointMass", 2, seed=worker))


def broken(worker):
    return maker(worker, broken=True)


if __name__ == "__main__":
    env = maker(0)
    policy = gaussian_actor(observation_groups(env.observation_spec), env.action_spec_unbatched)
    options = dict(frames_per_batch=8, kind="multi_sync", num_workers=2)
    collector = make_collector(None, policy, worker_env=broken if "worker" in sys.argv else maker, **options)
    if "batch" in sys.argv:
        next(iter(collector))
    raise KeyError("an error of the script")
"""


@pytest.mark.parametrize(("when", "message"), [("worker", "cannot be built"), ("before", "of the script"),
                                               ("batch", "of the script")])  # fmt: skip
def test_a_program_that_fails_ends(tmp_path, when, message):
    """The traceback keeps the collector until the interpreter ends, and TorchRL's then waits for ever."""
    (tmp_path / "fails.py").write_text(_FAILS)
    done = subprocess.run([sys.executable, "fails.py", when], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and message in done.stderr


def test_a_gymnasium_environment_gets_a_seed_of_its_own_in_every_row():
    make_env = options("multi_sync", env="Pendulum-v1")["worker_env"]
    rows = torch.cat([make_env(worker).reset()["observation"] for worker in range(2)])
    assert len({tuple(row) for row in rows.tolist()}) == ROWS
    whole = make.Collector  # the same class builds a single collector
    assert make_collector(make_env(0), None, frames_per_batch=6).__class__ is whole


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(kind="several"), "choose 'single', 'multi_sync' or 'ray'"),
        (dict(worker_env=None), "needs worker_env"),
        (dict(frames_per_batch=7), "frames_per_batch=7 does not split over num_workers=2"),
    ],
)
def test_mistakes_are_named(changes, expected):
    with pytest.raises(ValueError, match=expected):
        make_collector(None, make_policy(), **options("multi_sync", **changes))


def test_workers_are_refused_under_torchrun(monkeypatch):
    monkeypatch.setattr(make, "several_processes", lambda: True)
    with pytest.raises(ValueError, match="multi_sync cannot be combined with torchrun"):
        make_collector(None, make_policy(), **options("multi_sync"))


def test_missing_ray_is_answered_with_its_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "edenrl\[ray\]"'):
        make_collector(None, make_policy(), **options("ray"))


@needs_ray
def test_more_ray_workers_than_processors_are_refused_instead_of_waited_for():
    with pytest.raises(ValueError, match=r"--num_workers 100 Ray actors need as many CPUs, the cluster has \d+"):
        make_collector(None, make_policy(), **options("ray", num_workers=100, frames_per_batch=100))


def test_workers_that_do_not_share_the_environments_evenly_are_refused():
    with pytest.raises(ValueError, match="num_workers = 4; set num_workers to 3, or env.num_envs to a multiple of 4"):
        RunConfig(collector="multi_sync", num_workers=4, env=EnvConfig(num_envs=6))
    RunConfig(num_workers=4, env=EnvConfig(num_envs=6))
