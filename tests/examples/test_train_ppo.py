"""The PPO script as its user meets it: runs, resumes, interruptions and mistakes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trainer_cases import EXAMPLES, PATIENCE, TRAINERS, hide_newest, load_script, newest, refusals, rows, wait_for

from edenrl.config import load_config
from edenrl.envs import PointMass, register_env
from edenrl.modules import make_actor
from edenrl.training import load_policy_weights, read_metrics, run_script

PPO = TRAINERS["PPO"]
train, train_ppo, TINY, FRAMES = PPO.train, PPO.module, PPO.flags, PPO.frames
# Every column a PPO run writes; people's dashboards depend on these names.
COLUMNS = """iteration frames seconds loss_objective clip_fraction kl_approx loss_entropy entropy loss_critic
ESS max_ratio mean_ratio kl explained_variance loss grad_norm_policy grad_norm_critic lr episode/count
episode/return episode/length episode/success_rate episode/final_distance episode/path_length episode/collisions
action_saturation skipped_updates eval/return_mean eval/return_std eval/return_median eval/return_min eval/return_max
eval/length_mean eval/length_min eval/length_max eval/episodes eval/success_rate eval/final_distance eval/path_length
eval/collisions""".split()


def test_a_run_leaves_what_the_documentation_promises(tmp_path, capsys):
    train(tmp_path / "run", 12, "--checkpoint.interval_iterations=4")
    out, err = capsys.readouterr()
    assert "success" in out and "best checkpoint" in out and "\r" not in out + err
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert files == {"config.json", "metrics.csv", "observations.json", "progress.json", "checkpoints"}
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert sorted(header) == sorted(COLUMNS)
    progress = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert (progress["state"], progress["step"], progress["total"]) == ("complete", 12 * FRAMES, 12 * FRAMES)
    config = (tmp_path / "run" / "config.json").read_text()
    assert str(Path.home()) + os.sep not in config.replace(str(tmp_path), "")
    assert [row["iteration"] for row in rows(tmp_path / "run")] == list(range(12))


@pytest.mark.parametrize("schedule", ["adaptive", "constant"])
@pytest.mark.parametrize("env", ["PointMass", "CartPole-v1", "Pendulum-v1"])
def test_resumed_run_is_the_uninterrupted_run(tmp_path, env, schedule):
    flags = (f"--env.name={env}", f"--algorithm.lr_schedule={schedule}")
    PPO.whole_like_parts(tmp_path, 12, 5, *flags)


def evaluated(run_dir):
    """Iterations that were evaluated, with what came out."""
    table = read_metrics(run_dir / "metrics.csv")
    return {row["iteration"] + 1: row["eval/return_mean"] for row in table if "eval/return_mean" in row}


def test_evaluations_are_a_small_part_of_a_short_run_and_resume_as_planned(tmp_path):
    short = ("--checkpoint.interval_iterations=5", "--checkpoint.keep_last=99")
    train(tmp_path / "run", 130, *short)
    # 4 episodes of 100 steps, 5 * 100 steps of the batch are 62.5 iterations of 8.
    planned = evaluated(tmp_path / "run")
    assert [*planned] == [65, 130]
    whole = rows(tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        if int(checkpoint.name.split("-")[1]) > 40:
            shutil.rmtree(checkpoint)
    train(tmp_path / "run", 130, resume=True)
    assert evaluated(tmp_path / "run") == planned and rows(tmp_path / "run") == whole


@pytest.mark.parametrize("env", ["PointMass", "Pendulum-v1"])
def test_what_is_trained_does_not_depend_on_when_it_is_evaluated(tmp_path, env):
    for name, interval in (("often", 2), ("never", 99)):
        train(tmp_path / name, 9, f"--env.name={env}", f"--evaluation.interval_iterations={interval}")
    assert [*evaluated(tmp_path / "often")] == [2, 4, 6, 8, 9] and [*evaluated(tmp_path / "never")] == [9]
    assert rows(tmp_path / "often") == rows(tmp_path / "never")


@pytest.mark.parametrize(
    ("flags", "closest"),
    [
        (["--evaluation.metric=nope"], "measures "),
        (["--evaluation.metric=sucess_rate"], "measures success_rate, "),
        (["--evaluation.metric=success"], "measures success_rate, "),
        (["--env.name=Pendulum-v1", "--evaluation.metric=success_rate"], "Pendulum-v1 measures "),
        (["--env.name=CartPole-v1", "--evaluation.metric=return_man"], "measures return_m"),
    ],
)
def test_a_metric_that_no_evaluation_measures_is_refused_at_the_start(tmp_path, capsys, flags, closest):
    message = PPO.refused(capsys, *TINY, PPO.length(3), f"--run_dir={tmp_path / 'run'}", *flags)
    assert "evaluation.metric is '" in message and closest in message and not (tmp_path / "run").exists()


@pytest.mark.parametrize("metric", ["success_rate", "return_min", "final_distance", "length_max"])
def test_metrics_of_the_environment_may_be_named(tmp_path, capsys, metric):
    train(tmp_path / "run", 2, f"--evaluation.metric={metric}")
    assert "is seen at the first one" not in capsys.readouterr().out


def test_where_the_metrics_are_not_known_a_run_says_that_the_first_evaluation_tells(tmp_path, capsys):
    flags = ("--evaluation.metric=nope", "--evaluation.kwargs.max_steps=20")
    with pytest.raises(ValueError, match="evaluation.metric is 'nope'; this evaluation measures"):
        train(tmp_path / "run", 2, *flags)
    assert "Whether evaluations measure evaluation.metric 'nope' is seen at the first one." in capsys.readouterr().out


def test_resumed_mujoco_run_in_a_new_process_is_the_uninterrupted_run(tmp_path):
    flags = ("--env.name=HalfCheetah-v5", "--env.num_envs=8", "--algorithm.lr_schedule=constant")
    PPO.whole_like_parts(tmp_path, 6, 3, *flags, in_a_new_process=True)


def test_ctrl_c_in_a_terminal_reaches_every_process_and_the_run_still_saves(tmp_path):
    """A terminal signals the whole process group, the workers of an async vector included."""
    flags = ["--env.name=CartPole-v1", "--env.vectorization=async", "--env.num_envs=2"]
    process = PPO.launch(tmp_path / "run", 4000, *flags, new_session=True)
    wait_for(process, lambda: (tmp_path / "run" / "metrics.csv").exists() and len(rows(tmp_path / "run")) > 2)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output and "Stopping after this iteration" in output
    done = len(rows(tmp_path / "run"))
    assert newest(tmp_path / "run").name.endswith(f"{done:012d}")


@pytest.mark.slow
def test_sigkill_twenty_times(tmp_path):
    run_dir, generator, begun = tmp_path / "run", random.Random(20), 0
    for _ in range(20):
        progress = run_dir / "progress.json"
        mark = progress.stat().st_mtime_ns if progress.exists() else 0
        process = PPO.launch(run_dir, 4000, *([] if mark else ["--checkpoint.interval_iterations=1"]))
        # Importing takes seconds: wait until this process has written, then let it run for a random while.
        wait_for(process, lambda: progress.exists() and progress.stat().st_mtime_ns != mark)  # noqa: B023
        time.sleep(generator.uniform(0.0, 0.6))
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.communicate()
        begun += newest(run_dir) is not None
    assert begun >= 19
    done = len(rows(run_dir))
    train(run_dir, done + 3, resume=True)
    assert [row["iteration"] for row in rows(run_dir)] == list(range(done + 3))
    assert not list((run_dir / "checkpoints").glob(".*")), "half-written checkpoints were left behind"
    train(tmp_path / "whole", done + 3)
    assert rows(tmp_path / "whole") == rows(run_dir)


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path, capsys):
    train(tmp_path / "run", 3)
    hide_newest(tmp_path / "run")
    train(tmp_path / "run", 3, resume=True)
    assert "no checkpoint yet: starting from the beginning" in capsys.readouterr().out
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [0, 1, 2]


@refusals(
    """
    --algorithm.num_minibatches=7 -> do not split into algorithm.num_minibatches = 7 equal parts
    --env.name=HalfCheeta-v5 -> HalfCheetah-v5
    --env.kwargs.succes_bonus=3 -> succes_bonus
    --algorithm.actor_groups=polcy -> Groups of this environment: {'observation': 14}
    --env.name=CartPole-v1 --algorithm.action_bound_coeff=1.0 -> needs a Gaussian actor
    --run_dir=taken/run -> taken is a file; give the path of a directory
    --env.kwargs.num_envs=4 -> set --env.num_envs instead of --env.kwargs.num_envs
    --env.kwargs.max_steps=abc -> max_steps='abc' was given to PointMass
    --env.kwargs.success_bonus=abc -> success_bonus='abc' was given to PointMass
    --env.kwargs.dtype=float64 -> dtype='float64' was given to PointMass
    --env.name=Blackjack-v1 -> Tuple(Discrete(32), Discrete(11), Discrete(2)); expected Box
    --env.name=LunarLander-v3 -> Box2D is not installed
    --env.name=Pendulum-v1 --env.kwargs.max_episode_steps=abc -> max_episode_steps
    --env.vectorization=async -> --env.vectorization async is for Gymnasium ids
    --algorithm.init_std=100 -> algorithm.init_std = '100': expected a number between 0.001 and 20
    --algorithm.clip_epsilon=1.5 -> algorithm.clip_epsilon = '1.5': expected a number below 1
    """
)
def test_mistakes_get_one_screen_that_names_the_fix(refuses, tmp_path, flags, expected, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setitem(sys.modules, "Box2D", None)  # as on a machine without it
    refuses(PPO, [*TINY, *flags], expected)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, capsys):
    train(tmp_path / "run", 2)
    config = (tmp_path / "run" / "config.json").read_text()
    message = PPO.refused(capsys, f"--resume={tmp_path / 'run'}", "--algorithm.actor_hidden=16")
    assert "cannot change algorithm.actor_hidden (was [8], now [16])" in message
    assert (tmp_path / "run" / "config.json").read_text() == config


@pytest.mark.parametrize(
    "flag",
    [
        "--env.name=Pendulum-v1",
        "--env.kwargs.max_steps=40",
        "--algorithm.optimizer=sgd",
        "--algorithm.steps_per_env=16",
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused_by_name(tmp_path, capsys, flag):
    train(tmp_path / "run", 2)
    config = (tmp_path / "run" / "config.json").read_text()
    message = PPO.refused(capsys, f"--resume={tmp_path / 'run'}", flag)
    assert f"cannot change {flag[2:].split('=')[0]} (was " in message
    assert (tmp_path / "run" / "config.json").read_text() == config


def test_a_resumed_run_may_change_its_length_output_and_evaluation_and_with_a_restart_its_rate(tmp_path):
    train(tmp_path / "run", 2)
    free = ("--evaluation.num_episodes=3", "--checkpoint.keep_last=1", "--quiet", "--num_threads=1", "--device=cpu")
    train(tmp_path / "run", 3, *free, "--resume_schedule=restart", "--algorithm.lr=5e-4", resume=True)
    saved = load_config(train_ppo.Train, tmp_path / "run" / "config.json")
    assert (saved.total_frames, saved.evaluation.num_episodes, saved.algorithm.lr) == (3 * FRAMES, 3, 5e-4)
    # Whether this one invocation resumed, restarted, and where, is not the run's.
    assert (saved.resume, saved.resume_schedule, saved.run_dir) == (None, "restore", None)


def test_the_config_of_a_run_starts_another_one_and_evaluates_from_anywhere(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train("~/run", 2)
    assert (tmp_path / "run" / "config.json").exists()
    monkeypatch.chdir(tmp_path)
    train_ppo.main(["--config=~/run/config.json", "--quiet"])
    assert [path.name[:17] for path in (tmp_path / "runs").iterdir()] == ["ppo-PointMass-s1-"]
    (tmp_path / "run").rename(tmp_path / "moved")
    train("~/moved", 3, resume=True)
    assert [row["iteration"] for row in rows(tmp_path / "moved")] == [0, 1, 2]
    capsys.readouterr()
    load_script("evaluate").main(["~/moved", "--json", "--episodes=2"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2
    load_script("plot_runs").main(["~/moved", "--output=~/runs.png"])
    assert (tmp_path / "runs.png").exists()


class Shifted(PointMass):
    """Observations around 50 with a spread of 100."""

    def _step(self, tensordict):
        return self._shift(super()._step(tensordict))

    def _reset(self, tensordict):
        return self._shift(super()._reset(tensordict))

    def _shift(self, out):
        return out.set("observation", out["observation"] * 100 + 50)


def test_statistics_travel_with_the_policy_into_a_process_that_builds_nothing_else(tmp_path):
    register_env("Shifted", lambda n, **kw: Shifted(n, **kw), override=True)
    train(tmp_path / "run", 20, "--env.name=Shifted")
    probe = torch.randn(8, 14) * 100 + 50
    policy = make_actor({"observation": 14}, PointMass(1).action_spec_unbatched, hidden=(8,), init_std=1.0)
    load_policy_weights(policy, tmp_path / "run", "latest")
    policy.eval()
    expected = policy.module[0].module(probe)[0]
    assert policy.module[0].module.norm.mean.abs().max() > 10
    torch.save({"probe": probe, "expected": expected.detach()}, tmp_path / "probe.pt")
    code = f"""
import torch
from edenrl.modules import gaussian_actor
from edenrl.training import load_policy_weights
data = torch.load(r"{tmp_path / "probe.pt"}")
policy = gaussian_actor({{"observation": 14}}, 2, hidden=(8,))
load_policy_weights(policy, r"{tmp_path / "run"}", "latest")
policy.eval()
torch.testing.assert_close(policy.module[0].module(data["probe"])[0], data["expected"], rtol=0, atol=1e-6)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_other_scripts_read_the_run(tmp_path, capsys):
    train(tmp_path / "run", 4, "--env.name=CartPole-v1", "--checkpoint.interval_iterations=2")
    capsys.readouterr()
    evaluate = load_script("evaluate")
    evaluate.main([str(tmp_path / "run"), "--json", "--episodes", "6"])
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == 6 and "checkpoints" in result["checkpoint"]
    evaluate.main([str(tmp_path / "run"), "--checkpoint", "latest"])
    first = capsys.readouterr().out
    evaluate.main([str(tmp_path / "run"), "--checkpoint", "latest"])
    assert first == capsys.readouterr().out and "return_mean" in first

    plot = load_script("plot_runs")
    train(tmp_path / "other", 3)
    plot.main([str(tmp_path / "run"), str(tmp_path / "other"), "--output", str(tmp_path / "runs.png")])
    assert (tmp_path / "runs.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_evaluate_takes_a_checkpoint_by_name_or_path_and_lists_what_there_is(tmp_path, capsys, monkeypatch):
    train(tmp_path / "run", 2, "--checkpoint.interval_iterations=1")
    evaluate = load_script("evaluate")
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    expected = tmp_path / "run" / "checkpoints" / "checkpoint-000000000001"
    for given in (expected.name, "run/checkpoints/checkpoint-000000000001", str(expected)):
        evaluate.main(["run", "--json", "--episodes=1", "--checkpoint", given])
        assert Path(json.loads(capsys.readouterr().out)["checkpoint"]).resolve() == expected
    with pytest.raises(FileNotFoundError, match=r"nope is no checkpoint.* checkpoint-000000000001, checkpoint-0000"):
        evaluate.main(["run", "--checkpoint=nope"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{nope", "config.json is not readable as JSON"),
        ("[1]", "config.json must hold one JSON object"),
        ("{}", "names the algorithm None, but there is no train_none.py"),
        ('{"algorithm": {"name": "Magic"}}', "names the algorithm 'Magic', but there is no train_magic.py"),
        ('{"algorithm": {"name": "PPO", "gama": 1}}', "unknown field 'gama' in PPOConfig"),
    ],
)
def test_evaluate_says_what_is_wrong_with_a_config(tmp_path, capsys, text, expected):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: load_script("evaluate").main([str(tmp_path)]))
    message = capsys.readouterr().err
    assert stopped.value.code == 1 and expected in message and str(tmp_path) in message


def test_plotted_runs_of_one_name_are_told_apart_and_long_frame_counts_do_not_overlap(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    for seed in ("seed1", "seed2"):
        (tmp_path / seed / "run").mkdir(parents=True)
        lines = [f"{i * 10_000_000},{i}" for i in range(11)]
        (tmp_path / seed / "run" / "metrics.csv").write_text("\n".join(["frames,episode/return", *lines, ""]))
    monkeypatch.setattr(plt, "close", lambda *args: None)
    load_script("plot_runs").main(
        [str(tmp_path / s / "run") for s in ("seed1", "seed2")] + [f"--output={tmp_path}/x.png"]
    )
    figure = plt.gcf()
    axis = figure.axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["seed1/run", "seed2/run"]
    low, high = axis.get_xlim()
    labels = [tick.label1 for tick in axis.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    spans = [label.get_window_extent() for label in labels]
    assert "100M" in [label.get_text() for label in labels]
    assert all(a.x1 < b.x0 for a, b in zip(spans, spans[1:], strict=False))


def test_other_scripts_refuse_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run directory"):
        load_script("evaluate").main([str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"has no metrics.csv"):
        load_script("plot_runs").main([str(tmp_path)])


def test_output_to_a_file_is_a_few_plain_lines(tmp_path):
    command = [sys.executable, EXAMPLES / "train_ppo.py", *TINY, "--run_dir", tmp_path / "run"]
    began = time.monotonic()
    done = subprocess.run([*command, "--total_frames", str(40 * FRAMES)], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - began
    progress = [line for line in done.stdout.splitlines() if "frames," in line]
    assert 1 <= len(progress) <= 1 + seconds / 5
    assert all(f"{word} " in progress[0] for word in ("loss", "KL", "lr"))
    banner = dict(line.split("  ", 1) for line in done.stdout.split("\n\n")[0].splitlines() if "  " in line)
    banner = {name: value.strip() for name, value in banner.items()}
    policy = sum(p.numel() for p in PPO.policy(tmp_path / "run").parameters())
    assert banner["device"] == "cpu" and banner["environment"] == "PointMass"
    assert banner["environments"] == "8" and banner["run directory"] == str(tmp_path / "run")
    assert banner["networks"].startswith(f"policy {policy:,}, critic ")
    assert banner["frames"].startswith(f"{40 * FRAMES:,} in 40 iterations of {FRAMES:,}")
    assert "\r" not in done.stdout + done.stderr and not done.stderr.strip()


def test_squashed_and_unbounded_actions_train(tmp_path, recwarn):
    train(tmp_path / "squash", 2, "--env.action_mode=squash")
    train(tmp_path / "none", 2, "--env.action_mode=none")
    assert all(row["action_saturation"] < 0.01 for row in rows(tmp_path / "squash"))
