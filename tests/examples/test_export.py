"""Exporting and playing policies from the command line."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from trainer_cases import EXAMPLES, TRAINERS, load_script

from edenrl.export import PolicySpec, load_policy
from edenrl.training import run_script

TINY = [*TRAINERS["PPO"].flags, TRAINERS["PPO"].length(8), "--checkpoint.interval_iterations=1"]


@pytest.fixture(scope="module")
def scripts():
    """The scripts as modules."""
    return {name: load_script(name) for name in ("train_ppo", "evaluate", "export_policy", "run_policy")}


@pytest.fixture(scope="module")
def run(scripts, tmp_path_factory):
    """A finished run that was trained with ``--export``."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    scripts["train_ppo"].main([*TINY, f"--run_dir={folder}", "--export", "--env.kwargs.max_steps=20"])
    return folder


def fails(capsys, main, *argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: main([str(argument) for argument in argv]))
    assert stopped.value.code in (1, 2)
    return capsys.readouterr().err


def test_export_at_the_end_of_training(run):
    assert {path.name for path in (run / "policy").iterdir()} == {
        ".export",
        "policy.onnx",
        "policy.pt",
        "policy_spec.json",
    }
    spec = PolicySpec.model_validate_json((run / "policy" / "policy_spec.json").read_text())
    assert spec.provenance.task == "PointMass" and spec.actions.clip
    best = {path.name for path in (run / "checkpoints").iterdir()}
    assert spec.provenance.checkpoint in best and spec.provenance.checkpoint_sha256


def test_the_exported_policy_is_the_best_checkpoint(run, scripts):
    trainer, cfg = scripts["evaluate"].load_run(str(run))
    from edenrl.training import build_env, load_policy_weights

    policy = trainer.make_policy(cfg, build_env(cfg, num_envs=1)).eval()
    load_policy_weights(policy, run, "best")
    obs = torch.randn(5, 14)
    expected = policy.module[0].module(obs)[0].detach()
    torch.testing.assert_close(torch.from_numpy(load_policy(run / "policy")(obs.numpy())), expected)


def test_a_finished_run_is_exported_on_resume(scripts, tmp_path, capsys):
    main = scripts["train_ppo"].main
    main([*TINY, f"--run_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run" / "policy").exists()
    main([f"--resume={tmp_path / 'run'}", "--export"])
    assert (tmp_path / "run" / "policy" / "policy.onnx").exists()
    assert "exported policy" in capsys.readouterr().out


def test_a_missing_extra_stops_the_training_before_it_begins(scripts, tmp_path, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnx" else find_spec(name, *a))
    message = fails(capsys, scripts["train_ppo"].main, *TINY, f"--run_dir={tmp_path / 'run'}", "--export")
    assert 'needs onnx, not installed: pip install "edenrl[onnx]"' in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [ImportError, OSError])
def test_a_broken_onnxruntime_stops_training_and_script_before_they_begin(
    run, scripts, tmp_path, capsys, monkeypatch, kind
):
    import_module = importlib.import_module

    def broken(name, *args):
        if name == "onnxruntime":
            raise kind("libonnxruntime.so: cannot open")
        return import_module(name, *args)

    def build(*args, **kwargs):
        raise AssertionError("something was built")

    monkeypatch.setattr(importlib, "import_module", broken)
    message = fails(capsys, scripts["train_ppo"].main, *TINY, f"--run_dir={tmp_path / 'run'}", "--export")
    assert "onnxruntime, which is installed but cannot be imported" in message and "cannot open" in message
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(scripts["export_policy"], "load_run", build)
    message = fails(capsys, scripts["export_policy"].main, run, "--output", tmp_path / "out")
    assert "onnxruntime, which is installed but cannot be imported" in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize("formats", [["onnx"], ["jit", "pt2"]])
def test_the_export_script_without_verification(run, scripts, tmp_path, capsys, monkeypatch, formats):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    command = [str(run), "--no_verify", "--output", str(tmp_path / "out"), "--formats", *formats]
    scripts["export_policy"].main(command)
    assert "--no_verify compares nothing" in capsys.readouterr().out
    spec = PolicySpec.model_validate_json((tmp_path / "out" / "policy_spec.json").read_text())
    assert spec.model.verification is None


def test_the_export_script(run, scripts, tmp_path, capsys):
    scripts["export_policy"].main([str(run), "--formats", "onnx", "pt2", "--output", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert "largest deviation" in out and "p50" in out and "p99" in out
    assert {p.name for p in (tmp_path / "out").glob("policy*")} == {"policy.onnx", "policy.pt2", "policy_spec.json"}
    scripts["export_policy"].main([str(run), "--formats", "jit", "--output", str(tmp_path / "out")])
    assert "largest deviation jit" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").glob("policy*")} == {"policy.pt", "policy_spec.json"}
    main = scripts["export_policy"].main
    assert "expected different names out of ['onnx', 'jit', 'pt2']" in fails(capsys, main, run, "--formats", "tflite")
    assert "is not a run directory" in fails(capsys, main, tmp_path)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text((run / "config.json").read_text())
    assert "has no checkpoint yet" in fails(capsys, main, tmp_path / "begun")


def test_playing_equals_evaluating(run, scripts, capsys):
    """The same episodes in onnxruntime and in the library, from the same seed, in the environment of the run."""
    capsys.readouterr()
    scripts["evaluate"].main([str(run), "--episodes", "6", "--seed", "5", "--json"])
    expected = json.loads(capsys.readouterr().out)
    scripts["run_policy"].main([str(run / "policy"), "--episodes", "6", "--seed", "5"])
    out = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in out.strip().splitlines()[2:] if not line.startswith("latency"))
    assert float(rows["return_mean"]) == pytest.approx(expected["return_mean"], rel=1e-3)
    assert float(rows["length_mean"]) == expected["length_mean"] == 20
    assert "p50" in out and "p99" in out
    scripts["run_policy"].main([str(run / "policy"), "--episodes", "2", "--kwargs", '{"max_steps": 10}'])
    assert "length_max        10\n" in capsys.readouterr().out


def test_playing_on_another_environment_is_refused(run, scripts, tmp_path, capsys):
    main = scripts["run_policy"].main
    message = fails(capsys, main, run / "policy", "--env", "CartPole-v1")
    assert "reads {'observation': (14,)}; this environment publishes {'observation': (4,)}. Play it on Point" in message
    assert "holds no exported policy" in fails(capsys, main, tmp_path)


def test_a_run_whose_policy_has_another_name(tmp_path):
    from edenrl.config import RunConfig
    from edenrl.training import Run

    with pytest.raises(ValueError, match=r"exports the run's component 'policy', and this run has \['actor'\]"):
        cfg = RunConfig(run_dir=str(tmp_path / "run"), export=True)
        with Run(cfg, "X", iterations=1, frames_per_iteration=1) as run:
            run.keep(actor=torch.nn.Linear(1, 1))
            run.begin()


def test_the_scripts_run_as_programs(run):
    """From anywhere, and with nothing on standard error."""
    command = [sys.executable, EXAMPLES / "run_policy.py", run / "policy"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
