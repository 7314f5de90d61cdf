"""What holds for every training script. What is special about one stands in its own file."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from trainer_cases import (
    EXAMPLES,
    PATIENCE,
    TRAINERS,
    Script,
    assert_same,
    checkpointed,
    hide_newest,
    load_script,
    newest,
    rows,
    wait_for,
)

from edenrl.config import load_config, parse_cli, presets
from edenrl.envs import make_env, register_env
from edenrl.objectives import GAE
from edenrl.training import read_metrics

COMMON = {"iteration", "frames", "seconds", "loss", "lr", "skipped_updates", "action_saturation"}
TABLES = {
    "PPO": presets.PPO,
    "SimBa": presets.SIMBA,
    "AMP": presets.AMP,
    "HIM": presets.HIM,
    "RMA": presets.RMA,
    "CMDP": presets.CMDP,
    "GRPO": presets.GRPO,
    "APG": presets.APG,
    "FlashSAC": presets.FLASHSAC,
    "Distillation": presets.DISTILLATION,
}
# A schedule over the length of the run and a warm-up that is a share of it: a longer run is another one.
KNOWS_ITS_LENGTH = {"APG", "FlashSAC"}
WITH_GAE = ["PPO", "SimBa", "AMP", "HIM", "RMA", "CMDP"]


@pytest.fixture(scope="module", params=TRAINERS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def script(name) -> Script:
    return TRAINERS[name]


@pytest.fixture(scope="module")
def finished(script, tmp_path_factory) -> Path:
    """A run of six iterations that several tests read and none changes."""
    run_dir, printed = tmp_path_factory.mktemp("runs") / "finished", io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        torch.manual_seed(0)
        script.train(run_dir, 6, "--quiet")
    assert not printed.getvalue(), "a quiet run prints nothing"
    return run_dir


def test_every_script_has_its_case_and_its_presets():
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if path.name.startswith(("train_", "distill_"))}
    assert {case.name for case in TRAINERS.values()} == scripts
    assert TABLES.keys() == TRAINERS.keys()


def test_a_run_leaves_what_the_documentation_promises(script, finished):
    files = {path.name for path in finished.iterdir()}
    own = {"trot.npz"} if script.name == "train_amp" else set()
    assert files == {"config.json", "metrics.csv", "observations.json", "progress.json", "checkpoints"} | own
    progress = json.loads((finished / "progress.json").read_text())
    assert progress["state"] == "complete" and progress["step"] == progress["total"] == 6 * script.frames
    table = read_metrics(finished / "metrics.csv")
    assert [row["iteration"] for row in table] == list(range(6))
    header = set((finished / "metrics.csv").read_text().splitlines()[0].split(","))
    assert {"eval/return_mean", "eval/episodes", "episode/count", "episode/return"} <= header
    own = {column for column in header if not column.startswith(("eval/", "episode/"))}
    assert own == COMMON | script.metrics


def test_a_resumed_run_is_the_uninterrupted_run(name, script, finished, tmp_path):
    """First a run that is made twice as long, then one that dies after its checkpoint of the fourth iteration."""
    script.train(tmp_path / "parts", 6 if name in KNOWS_ITS_LENGTH else 3, "--quiet")
    script.train(tmp_path / "parts", 6, "--quiet", resume=True)
    assert rows(tmp_path / "parts") == rows(finished)
    assert_same(checkpointed(tmp_path / "parts"), checkpointed(finished))
    script.train(tmp_path / "died", 6, "--quiet", "--checkpoint.interval_iterations=4")
    hide_newest(tmp_path / "died")
    assert newest(tmp_path / "died").name.endswith("4")
    script.train(tmp_path / "died", 6, "--quiet", resume=True)
    assert rows(tmp_path / "died") == rows(finished)
    assert_same(checkpointed(tmp_path / "died"), checkpointed(finished))


def test_a_restarted_schedule_spans_what_is_left(script, tmp_path):
    script.train(tmp_path / "run", 4, "--algorithm.lr_schedule=linear", "--algorithm.lr=1e-3", "--quiet")
    script.train(tmp_path / "run", 8, "--resume_schedule=restart", "--algorithm.lr=5e-4", "--quiet", resume=True)
    rates = [row["lr"] for row in rows(tmp_path / "run") if "lr" in row]
    final = load_config(script.module.Train, tmp_path / "run" / "config.json").algorithm.final_lr_fraction
    assert rates[3] < 1e-3 and 0.5 * 5e-4 < max(rates[4:]) <= 5e-4
    assert rates[-1] == pytest.approx(5e-4 * final, abs=1.5e-4)


def test_a_finished_run_resumes_to_nothing(script, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "run")
    script.train(tmp_path / "run", 6, "--quiet=false", resume=True)
    assert rows(tmp_path / "run") == rows(finished) and "is complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--algorithm.lr_schedul=linear"], "--algorithm.lr_schedule"),
        (["--env.num_envs=0"], "env.num_envs"),
        (["--env.name=HalfCheeta-v5"], "HalfCheeta"),
        (["--device=cuda:99"], "Set --device cpu"),
        (["--algorithm.lr_schedule=linaer"], "algorithm.lr_schedule = 'linaer'"),
        (["--run_dir=taken"], "taken is a file; give the path of a directory"),
        (["--env.kwargs.seed=4"], "set --seed instead of --env.kwargs.seed"),
        (["--env.kwargs.max_stepz=4"], "max_stepz"),
    ],
)
def test_mistakes_get_one_screen_that_names_the_fix(script, tmp_path, capsys, monkeypatch, flags, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    assert expected in " ".join(script.refused(capsys, *script.flags, script.length(2), *flags).split())
    assert not list(tmp_path.rglob("checkpoints")) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag", ["--seed=9", "--env.num_envs=16", "--env.reward_scale=0.7", "--algorithm.lr=5e-4"])
def test_what_a_resumed_run_cannot_change_is_refused_by_name(script, finished, capsys, flag):
    config = (finished / "config.json").read_text()
    message = script.refused(capsys, f"--resume={finished}", flag)
    assert f"cannot change {flag[2:].split('=')[0]} (was " in message
    assert ("--resume_schedule restart lets" in message) == ("lr" in flag)
    assert (finished / "config.json").read_text() == config


def test_a_run_directory_is_not_overwritten_nor_made_up(script, finished, capsys):
    before = rows(finished)
    assert f"--resume {finished}" in script.refused(capsys, *script.flags, script.length(2), f"--run_dir={finished}")
    assert "nowhere" in script.refused(capsys, "--resume=nowhere")
    assert rows(finished) == before


@pytest.mark.parametrize(("name", "env"), [(name, env) for name, table in TABLES.items() for env in table])
def test_presets_are_valid_and_shown_by_help_on_one_screen(name, env, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    module, profiles = TRAINERS[name].module, presets.FLASHSAC_PROFILES if name == "FlashSAC" else {}

    def parse(*flags):
        return parse_cli(module.Train, ["--env.name", env, *flags], presets=TABLES[name], profiles=profiles)

    assert parse().env.name == env and parse().total_frames == TABLES[name][env]["total_frames"]
    assert parse("--total_frames=64").total_frames == 64
    with pytest.raises(SystemExit) as stopped:
        module.main(["--env.name", env, "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and f"the preset for {env}" in " ".join(shown.split())
    assert len(shown.splitlines()) <= 40


def test_other_scripts_read_the_run(finished, tmp_path, capsys):
    load_script("evaluate").main([str(finished), "--json", "--episodes", "2"])
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == 2 and "checkpoints" in result["checkpoint"]
    load_script("export_policy").main([str(finished), "--formats", "jit", "--output", str(tmp_path / "policy")])
    assert {"policy.pt", "policy_spec.json"} <= {path.name for path in (tmp_path / "policy").iterdir()}


def register_poisoned(name, bad, entry):
    """An environment "Poisoned" that is another one, with a bad number in row 3 from the tenth step on."""

    def build(num_envs, **kwargs):
        env = make_env(name, num_envs, **kwargs)
        step, number = env._step, itertools.count(1)

        def poisoned(tensordict):
            out = step(tensordict)
            if next(number) >= 10:
                for key in entry:
                    out[key][3] = bad
            return out

        env._step = poisoned
        return env

    register_env("Poisoned", build, override=True)


@pytest.mark.parametrize("bad", ["NaN", "1e30"])
@pytest.mark.parametrize(
    ("name", "env", "entry"),
    [
        ("PPO", "PointMass", "reward"),
        ("SimBa", "PointMass", "reward"),
        ("RMA", "HiddenPointMass", "reward"),
        ("CMDP", "ConflictPointMass", ("reward_groups", "style")),
    ],
)
def test_a_poisonous_reward_stops_the_run_with_the_last_checkpoint_intact(name, env, entry, bad, tmp_path, capsys):
    """The tenth step of the run is in its second iteration."""
    script, run_dir = TRAINERS[name], tmp_path / "run"
    register_poisoned(env, float(bad), [entry])
    flags = ["--env.name=Poisoned", f"--run_dir={run_dir}", "--checkpoint.interval_iterations=1", script.length(50)]
    message = script.refused(capsys, *script.flags, *flags)
    key = ("next", entry) if isinstance(entry, str) else ("next", *entry)
    assert re.search(rf"{re.escape(str(key))} holds (nan|1e\+30) at env 3, step 1 ", message)
    assert f"(iteration 1; the full traceback is in {run_dir / 'error.txt'}; continue with " in message
    weights = script.policy(run_dir).state_dict().values()
    assert all(value.isfinite().all() for value in weights if value.is_floating_point())
    assert json.loads((run_dir / "progress.json").read_text())["state"] == "failed"


def test_a_poisonous_observation_is_named_before_the_reward_that_it_spoils(tmp_path, capsys):
    script = TRAINERS["PPO"]
    register_poisoned("PointMass", float("nan"), ["observation", "reward"])
    message = script.refused(capsys, *script.flags, "--env.name=Poisoned", f"--run_dir={tmp_path / 'run'}")
    assert "('next', 'observation') holds nan at env 3, step 1 " in message
    assert "(iteration 1; " in message


DEFAULT = {"PPO", "FlashSAC"}


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.extended) for n in TRAINERS])
def test_a_killed_and_a_stopped_run_go_on_as_if_nothing_had_happened(name, tmp_path):
    """SIGKILL at a random moment, then Ctrl-C, each in a process of its own; this one goes on to the end."""
    script, run_dir, generator = TRAINERS[name], tmp_path / "run", random.Random(name)
    # The length is only known at the end, so nothing may depend on it.
    flags = ["--quiet", "--algorithm.lr_schedule=constant", "--checkpoint.interval_iterations=1"]
    if name == "FlashSAC":
        flags.append("--algorithm.min_buffer=8")

    process = script.launch(run_dir, 4000, *flags)
    wait_for(process, lambda: (run_dir / "metrics.csv").exists() and len(rows(run_dir)) > 2)
    time.sleep(generator.uniform(0.0, 0.4))
    assert process.poll() is None, process.communicate()[0]
    process.kill()
    process.communicate()

    done = len(rows(run_dir))
    process = script.launch(run_dir, 4000, "--quiet=false")
    wait_for(process, lambda: len(rows(run_dir)) > done)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 130, output
    assert "Stopping after this iteration" in output and "--resume" in output and "Traceback" not in output
    assert json.loads((run_dir / "progress.json").read_text())["state"] == "interrupted"
    assert not list((run_dir / "checkpoints").glob(".*")), "half-written checkpoints were left behind"

    done = len(rows(run_dir))
    assert newest(run_dir).name.endswith(f"{done:012d}")
    script.train(run_dir, done + 2, "--quiet", resume=True)
    script.train(tmp_path / "whole", done + 2, *flags)
    assert [row["iteration"] for row in rows(run_dir)] == list(range(done + 2))
    assert rows(tmp_path / "whole") == rows(run_dir)
    assert_same(checkpointed(tmp_path / "whole"), checkpointed(run_dir))


@pytest.mark.parametrize("name", WITH_GAE)
def test_explained_variance_is_that_of_the_whole_rollout(name, tmp_path, monkeypatch):
    expected = []
    estimate = GAE.__call__

    def noted(self, rollout):
        out = estimate(self, rollout)
        values, returns = (out[key].double().flatten(0, 1) for key in ("state_value", "value_target"))
        expected.append(float((1 - (returns - values).var(0) / returns.var(0)).mean()))
        return out

    monkeypatch.setattr(GAE, "__call__", noted)
    TRAINERS[name].train(tmp_path / "run", 3, "--quiet", "--seed=5")
    assert [row["explained_variance"] for row in rows(tmp_path / "run")] == pytest.approx(expected, rel=1e-3, abs=1e-4)
