"""What does not fit the memory is refused before it is allocated, with the bytes and what can be changed."""

import pytest
import torch

from edenrl.collectors import Collector, DifferentiableCollector, WindowBuffer, make_collector, storage_space
from edenrl.envs import PointMass
from edenrl.modules import gaussian_actor

# Observation 14, action 2, reward 1, metrics 4; flags done, terminated, truncated. Twice what is there before a step.
ROW = 4 * (2 * 14 + 2 + 1 + 2 * 4) + 2 * 3


def leave(monkeypatch, free):
    monkeypatch.setattr(storage_space, "free_bytes", lambda *_: free)


def actor():
    return gaussian_actor({"observation": 14}, 2, hidden=(4,))


COLLECTORS = {
    "Collector": lambda env, n, t: Collector(env, None, frames_per_batch=n * t, total_frames=-1),
    "make_collector": lambda env, n, t: make_collector(env, None, frames_per_batch=n * t),
    "callable": lambda env, n, t: Collector(lambda: env, actor(), frames_per_batch=n * t, total_frames=-1),
    "workers": lambda env, n, t: make_collector(
        env, None, frames_per_batch=n * t, kind="multi_sync", worker_env=lambda i: env, num_workers=1
    ),
    "differentiable": lambda env, n, t: DifferentiableCollector(env, actor(), steps=t),
}


@pytest.mark.parametrize("name", COLLECTORS)
@pytest.mark.parametrize(("num_envs", "steps"), [(1, 3000), (3, 700), (16, 77)])
def test_a_rollout_that_does_not_fit_is_refused(monkeypatch, name, num_envs, steps):
    needed = ROW * num_envs * steps
    leave(monkeypatch, needed - 1)
    text = rf"A rollout of {num_envs * steps:,} steps needs {needed:,} bytes \({ROW} per step\), but "
    text += rf"{needed - 1:,} bytes of memory on cpu are free.*num_envs.*steps_per_env"
    with pytest.raises(ValueError, match=text):
        COLLECTORS[name](PointMass(num_envs, seed=1), num_envs, steps)


@pytest.mark.parametrize("name", ["Collector", "make_collector", "callable", "differentiable"])
def test_a_rollout_that_just_fits_is_collected(monkeypatch, name):
    leave(monkeypatch, ROW * 5 * 6)
    data = next(iter(COLLECTORS[name](PointMass(5, seed=2), 5, 6)))
    assert data.batch_size == (5, 6)


@pytest.mark.parametrize(("capacity", "width"), [(1000, 6), (70_001, 15)])
def test_a_window_buffer_that_does_not_fit_is_refused(monkeypatch, capacity, width):
    needed = capacity * (4 * width + 8)
    leave(monkeypatch, needed - 1)
    with pytest.raises(ValueError, match=rf"{capacity:,} windows needs {needed:,} bytes .*window_buffer_size"):
        WindowBuffer(capacity, width, 8)
    leave(monkeypatch, needed)
    buffer = WindowBuffer(capacity, width, 8)
    assert buffer[:].bytes() <= needed and buffer.storage._storage.bytes() == needed


def test_where_the_system_says_nothing_nothing_is_refused(monkeypatch):
    leave(monkeypatch, None)
    storage_space.require_space("A rollout", 10, 1e30, "num_envs", device=torch.device("cpu"))
