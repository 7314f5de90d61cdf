"""A numeric clip of the actions: what the simulator gets in training, in evaluation, in play.py and from an export."""

import json
import sys

import numpy as np
import pytest
import torch
from torchrl.data import Unbounded
from trainer_cases import TRAINERS, load_script, rows

from edenrl.config import RunConfig, load_config
from edenrl.envs import PointMass, register_env


class Recorder(PointMass):
    """Remembers the actions that it gets."""

    seen: list[torch.Tensor] = []

    def __init__(self, num_envs, *, box=True, **kwargs):
        super().__init__(num_envs, **kwargs)
        if not box:
            self.action_spec = Unbounded(self.action_spec.shape)

    def _step(self, tensordict):
        self.seen.append(tensordict["action"].clone())
        return super()._step(tensordict)

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


def largest():
    """The largest component since the last call."""
    found = max(float(actions.abs().max()) for actions in Recorder.seen)
    Recorder.seen.clear()
    return found


@pytest.mark.parametrize(
    ("name", "box", "limit", "mode"),
    [("PPO", "true", 0.002, "clip"), ("PPO", "false", 0.01, "clip"), ("FlashSAC", "false", 0.01, "squash")],
)
def test_the_simulator_gets_clipped_actions_everywhere(tmp_path, monkeypatch, capsys, name, box, limit, mode):
    pytest.importorskip("onnxruntime")
    register_env("Recorder", Recorder, override=True)
    Recorder.seen.clear()
    script, run = TRAINERS[name], tmp_path / "run"
    flags = ["--env.name=Recorder", f"--env.kwargs.box={box}", f"--env.clip_actions={limit}", "--export", "--quiet"]
    script.train(run, 3, *flags, "--evaluation.kwargs.max_steps=20")
    assert largest() == pytest.approx(limit)
    assert 0.5 < rows(run)[-1]["action_saturation"] <= 1
    cfg = load_config(script.module.Train, run / "config.json")
    assert (cfg.env.clip_actions, cfg.env.action_mode) == (limit, mode)
    actions = json.loads((run / "policy" / "policy_spec.json").read_text())["actions"]
    assert (actions["low"], actions["high"], actions["clip"]) == ([-limit] * 2, [limit] * 2, True)

    monkeypatch.setitem(sys.modules, f"train_{name.lower()}", script.module)
    load_script("evaluate").main([str(run)])
    assert largest() == pytest.approx(limit)
    load_script("play").main([str(run), "--seconds", "0.5"])
    assert largest() == pytest.approx(limit)
    load_script("run_policy").main([str(run / "policy"), "--episodes", "2"])
    assert largest() == pytest.approx(limit)


def test_without_a_number_nothing_changes():
    assert RunConfig().env.clip_actions is None
