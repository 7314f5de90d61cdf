"""What holds for every training script. What is special about one stands in its own file."""

import json
import random
import subprocess
import sys
import time

import pytest
from trainer_cases import EXAMPLES, TRAINERS, Script, assert_same, hide_newest, load_script, newest, rows

from edenrl.config import load_config, parse_cli, presets
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
}


@pytest.fixture(params=TRAINERS)
def script(request) -> Script:
    return TRAINERS[request.param]


def test_every_script_has_its_case_and_its_presets():
    assert {case.name for case in TRAINERS.values()} == {path.stem for path in EXAMPLES.glob("train_*.py")}
    assert TABLES.keys() == TRAINERS.keys()


def test_a_run_leaves_what_the_documentation_promises(script, tmp_path, capsys):
    script.train(tmp_path / "run", 3, "--checkpoint.interval_iterations=1", "--quiet")
    assert capsys.readouterr() == ("", "")
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.csv", "progress.json", "checkpoints"} <= files
    progress = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert progress["state"] == "complete" and progress["step"] == progress["total"] == 3 * script.frames
    table = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["iteration"] for row in table] == [0, 1, 2]
    header = set((tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(","))
    assert {"eval/return_mean", "eval/episodes", "episode/count", "episode/return"} <= header
    own = {name for name in header if not name.startswith(("eval/", "episode/"))}
    assert own == COMMON | script.metrics


def test_a_resumed_run_is_the_uninterrupted_run(script, tmp_path):
    script.train(tmp_path / "whole", 6, "--quiet")
    # Both know of six iterations, so that schedules agree; the second one dies after its checkpoint of the fourth.
    script.train(tmp_path / "parts", 6, "--checkpoint.interval_iterations=4", "--quiet")
    hide_newest(tmp_path / "parts")
    assert newest(tmp_path / "parts").name.endswith("4")
    script.train(tmp_path / "parts", 6, "--quiet", resume=True)
    assert len(rows(tmp_path / "whole")) == 6 and rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert_same(script.state(tmp_path / "whole"), script.state(tmp_path / "parts"))


def test_a_restarted_schedule_spans_what_is_left(script, tmp_path):
    script.train(tmp_path / "run", 4, "--algorithm.lr_schedule=linear", "--algorithm.lr=1e-3", "--quiet")
    script.train(tmp_path / "run", 8, "--resume_schedule=restart", "--algorithm.lr=5e-4", "--quiet", resume=True)
    rates = [row["lr"] for row in rows(tmp_path / "run") if "lr" in row]
    final = load_config(script.module.Train, tmp_path / "run" / "config.json").algorithm.final_lr_fraction
    assert rates[3] < 1e-3 and 0.5 * 5e-4 < max(rates[4:]) <= 5e-4
    assert rates[-1] == pytest.approx(5e-4 * final, abs=1.5e-4)


def test_a_finished_run_resumes_to_nothing(script, tmp_path, capsys):
    script.train(tmp_path / "run", 2, "--quiet")
    before = rows(tmp_path / "run")
    script.train(tmp_path / "run", 2, "--quiet=false", resume=True)
    assert rows(tmp_path / "run") == before and "Resumed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--algorithm.gama=0.9"], "--algorithm.gamma"),
        (["--env.num_envs=0"], "env.num_envs"),
        (["--env.name=HalfCheeta-v5"], "HalfCheeta"),
        (["--device=cuda:99"], "Set --device cpu"),
        (["--algorithm.lr_schedule=linaer"], "algorithm.lr_schedule = 'linaer'"),
        (["--resume=nowhere"], "nowhere"),
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


@pytest.mark.parametrize("flag", ["--seed=9", "--env.num_envs=16", "--env.reward_scale=0.7", "--algorithm.gamma=0.5"])
def test_what_a_resumed_run_cannot_change_is_refused_by_name(script, tmp_path, capsys, flag):
    script.train(tmp_path / "run", 1, "--quiet")
    config = (tmp_path / "run" / "config.json").read_text()
    message = script.refused(capsys, f"--resume={tmp_path / 'run'}", flag)
    assert f"cannot change {flag[2:].split('=')[0]} (was " in message
    assert f"--resume {tmp_path / 'run'}" in script.refused(capsys, f"--run_dir={tmp_path / 'run'}", *script.flags)
    assert (tmp_path / "run" / "config.json").read_text() == config


@pytest.mark.parametrize(("name", "env"), [(name, env) for name, table in TABLES.items() for env in table])
def test_presets_are_valid_and_shown_by_help(name, env, capsys):
    script, profiles = TRAINERS[name].module, presets.FLASHSAC_PROFILES if name == "FlashSAC" else {}
    cfg = parse_cli(script.Train, ["--env.name", env], presets=TABLES[name], profiles=profiles)
    assert cfg.env.name == env and cfg.total_frames == TABLES[name][env]["total_frames"]
    with pytest.raises(SystemExit) as stopped:
        script.main(["--env.name", env, "--help"])
    assert stopped.value.code == 0 and f"the preset for {env}" in " ".join(capsys.readouterr().out.split())


def test_other_scripts_read_the_run(script, tmp_path, capsys):
    script.train(tmp_path / "run", 2, "--quiet")
    load_script("evaluate").main([str(tmp_path / "run"), "--json", "--episodes", "2"])
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == 2 and "checkpoints" in result["checkpoint"]
    load_script("export_policy").main([str(tmp_path / "run"), "--formats", "jit"])
    assert (tmp_path / "run" / "policy" / "policy_spec.json").exists()


@pytest.mark.slow
def test_killed_runs_resume_bit_for_bit(script, tmp_path):
    """SIGKILL at random moments, a few times each; the survivor equals the run that nobody killed."""
    run_dir, generator, flags = tmp_path / "run", random.Random(script.name), [*script.flags, "--quiet"]
    # A schedule would know the length of the run, which is only known at the end here.
    flags += ["--algorithm.lr_schedule=constant", "--checkpoint.interval_iterations=1"]
    if script.name == "train_flashsac":
        flags.append("--algorithm.min_buffer=8")
    for _ in range(2):
        where = [f"--resume={run_dir}"] if (run_dir / "config.json").exists() else [f"--run_dir={run_dir}", *flags]
        command = [sys.executable, EXAMPLES / f"{script.name}.py", script.length(4000), *where]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        done = len(rows(run_dir)) if (run_dir / "metrics.csv").exists() else 0
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if (run_dir / "metrics.csv").exists() and len(rows(run_dir)) > done + 1:
                break
            time.sleep(0.02)
        time.sleep(generator.uniform(0.0, 0.4))
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.communicate()
    done = len(rows(run_dir))
    script.train(run_dir, done + 2, resume=True)
    script.module.main([f"--run_dir={tmp_path / 'whole'}", *flags, script.length(done + 2)])
    assert [row["iteration"] for row in rows(run_dir)] == list(range(done + 2))
    assert rows(tmp_path / "whole") == rows(run_dir)
    assert_same(script.state(tmp_path / "whole"), script.state(run_dir))
