"""The AMP script: equal to PPO where it must be, resumption, refusals, plain policies, several processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from amp_case import Windowed
from trainer_cases import TRAINERS, load_script, refusals, rows
from trainer_cases import read_component as component

from edenrl.config import load_config
from edenrl.envs import register_env
from edenrl.modules import Discriminator, gaussian_actor, value_critic
from edenrl.training import load_weights

CASE = Path(__file__).with_name("amp_case.py")
PPO = [
    "--env.name=Windowed",
    "--env.num_envs=8",
    "--algorithm.steps_per_env=8",
    "--algorithm.actor_hidden=8",
    "--algorithm.critic_hidden=8",
    "--algorithm.actor_groups=observation",
    "--algorithm.critic_groups=observation",
    "--algorithm.epochs=2",
    "--algorithm.num_minibatches=2",
    "--evaluation.num_episodes=4",
    "--checkpoint.interval_iterations=1000",
    "--num_threads=1",
]
TINY = [*PPO, "--algorithm.num_frames=2", "--algorithm.discriminator_hidden=8", "--algorithm.window_buffer_size=300"]
FRAMES = 64
# The robot has the groups and the number of frames of its preset.
_WINDOWED = ("--env.name", "--algorithm.actor_g", "--algorithm.critic_g", "--algorithm.num_frames")
ON_THE_QUADRUPED = [flag for flag in TINY if not flag.startswith(_WINDOWED)]
ON_THE_QUADRUPED += ["--env.kwargs.episode_seconds=0.2", "--env.kwargs.num_threads=1", "--quiet"]

train_amp, train_ppo = load_script("train_amp"), load_script("train_ppo")


@pytest.fixture(autouse=True)
def windowed():
    register_env("Windowed", lambda n, **kw: Windowed(n, **kw), override=True)
    Windowed.built = 0


@pytest.fixture
def clips(tmp_path):
    """Two clips of two columns at the control rate."""
    t = np.arange(40)[:, None] / 60 + np.array([0.0, 0.5])
    path = tmp_path / "clips.npz"
    np.savez(path, motion_0=np.sin(3 * t), motion_1=np.cos(5 * t), fps=60.0, num_motions=2)
    return path


def train(run_dir, iterations, *flags, motion=None, resume=False):
    flags = [*([] if resume else TINY), *([] if motion is None else [f"--algorithm.motion={motion}"]), *flags]
    place = "--resume" if resume else "--run_dir"
    train_amp.main([f"{place}={run_dir}", f"--total_frames={iterations * FRAMES}", "--quiet", *flags])


def networks(run_dir, discriminator=True):
    """The last weights and statistics of a run."""
    nets = {
        "policy": gaussian_actor({"observation": 14}, 2, hidden=(8,)),
        "critic": value_critic({"observation": 14}, hidden=(8,)),
    }
    nets |= {"discriminator": Discriminator(2, 2, (8,))} if discriminator else {}
    load_weights(nets, run_dir, "latest")
    return {f"{name}.{key}": value for name, net in nets.items() for key, value in net.state_dict().items()}


@pytest.mark.parametrize("flags", [["--env.kwargs.gate=closed"], ["--algorithm.style_scale=0"]])
def test_where_no_style_counts_it_is_ppo_bit_for_bit(tmp_path, clips, flags):
    train(tmp_path / "amp", 3, *flags, motion=clips)
    env_flags = [flag for flag in flags if flag.startswith("--env")]
    train_ppo.main([f"--run_dir={tmp_path / 'ppo'}", f"--total_frames={3 * FRAMES}", "--quiet", *PPO, *env_flags])
    train(tmp_path / "styled", 3, motion=clips)
    amp, ppo, styled = (networks(tmp_path / name, False) for name in ("amp", "ppo", "styled"))
    assert all(torch.equal(value, ppo[name]) for name, value in amp.items())
    assert not torch.equal(styled["policy.module.0.module.mlp.0.weight"], ppo["policy.module.0.module.mlp.0.weight"])


def test_without_open_gates_nothing_is_judged(tmp_path, clips):
    train(tmp_path / "run", 3, "--env.kwargs.gate=closed", motion=clips)
    assert component(tmp_path / "run", "discriminator_step")["updates"] == 0
    table = rows(tmp_path / "run")
    assert all(row["style_gate"] == 0 and "style_reward" not in row and "d_policy" not in row for row in table)


def test_resumed_run_is_the_uninterrupted_run(tmp_path, clips):
    train(tmp_path / "whole", 16, motion=clips)
    train(tmp_path / "parts", 7, motion=clips)
    moved = clips.rename(clips.with_name("moved.npz"))
    train(tmp_path / "parts", 16, motion=moved, resume=True)
    assert len(rows(tmp_path / "whole")) == 16 and rows(tmp_path / "whole") == rows(tmp_path / "parts")
    whole, parts = networks(tmp_path / "whole"), networks(tmp_path / "parts")
    assert any(name.endswith("_u") for name in whole) and "discriminator.norm.count" in whole
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    windows = [component(tmp_path / name, "windows")["_storage"] for name in ("whole", "parts")]
    assert windows[0]["_len"] == windows[1]["_len"] == 300
    assert torch.equal(windows[0]["_storage"]["amp_window"], windows[1]["_storage"]["amp_window"])


@pytest.mark.parametrize("flags", [[], ["--algorithm.style_scale=control_dt"], ["--env.reward_scale=0.5"]])
def test_the_returns_of_episodes_are_task_style_and_both(tmp_path, clips, flags):
    train(tmp_path / "run", 24, *flags, motion=clips)
    scale = 0.5 if "--env.reward_scale=0.5" in flags else 1.0
    ended = [row for row in rows(tmp_path / "run") if "episode/return" in row]
    assert len(ended) >= 2
    for row in ended:
        task, style = scale * row["episode/return"], row["episode/style_return"]
        assert style > 0 and row["episode/total_return"] == pytest.approx(task + style, abs=1e-3)
        # Never more than the largest style reward at every step.
        factor = 1 / 60 if "--algorithm.style_scale=control_dt" in flags else 0.02
        assert style <= 5 * factor * row["episode/length"] + 1e-6


def test_other_clips_are_refused_on_resume(tmp_path, clips, capsys):
    train(tmp_path / "run", 2, motion=clips)
    np.savez(tmp_path / "other.npz", motion_0=np.random.randn(40, 2), fps=60.0, num_motions=1)
    argv = [f"--resume={tmp_path / 'run'}", f"--algorithm.motion={tmp_path / 'other.npz'}", "--total_frames=1000"]
    assert "does not hold the clips that this run was trained on" in TRAINERS["AMP"].refused(capsys, *argv)


def test_a_run_without_a_file_leaves_its_trot_and_metrics(tmp_path):
    pytest.importorskip("mujoco")
    flags = [*ON_THE_QUADRUPED, "--export"]
    train_amp.main([f"--run_dir={tmp_path / 'run'}", f"--total_frames={2 * FRAMES}", *flags])
    with np.load(tmp_path / "run" / "trot.npz") as data:
        assert int(data["num_motions"]) == 4 and data["motion_0"].std() > 0.1, "the trot, without standing"
    expected = """loss_discriminator loss_grad_penalty d_expert d_policy accuracy grad_norm_discriminator style_reward
    style_gate style_share motion_distance lr loss kl episode/velocity_error"""
    assert set(expected.split()) <= set(rows(tmp_path / "run")[1])
    spec = json.loads((tmp_path / "run" / "policy" / "policy_spec.json").read_text())
    assert [entry["key"] for entry in spec["observations"]] == ["policy"]


def test_one_step_of_the_discriminator_in_four(tmp_path, clips):
    flags = ["--algorithm.epochs=5", "--algorithm.num_minibatches=2", "--algorithm.discriminator_interval=4"]
    train(tmp_path / "run", 10, *flags, motion=clips)
    assert component(tmp_path / "run", "step")["updates"] == 100
    assert component(tmp_path / "run", "discriminator_step")["updates"] == 25


def test_gates_that_open_late_do_not_hurry_the_discriminator(tmp_path, clips):
    flags = ["--algorithm.epochs=5", "--algorithm.discriminator_interval=4", "--env.kwargs.gate=late"]
    train(tmp_path / "run", 10, *flags, motion=clips)
    # Open from the sixth of ten iterations of ten steps on: 100 // 4 - 50 // 4.
    assert component(tmp_path / "run", "discriminator_step")["updates"] == 13


def test_the_discriminators_rate_follows_the_policys(tmp_path, clips):
    train(tmp_path / "run", 4, "--algorithm.lr_schedule=linear", "--algorithm.final_lr_fraction=0.5", motion=clips)
    groups = component(tmp_path / "run", "discriminator_optimizer")["param_groups"]
    policy = component(tmp_path / "run", "optimizer")["param_groups"]
    groups, policy = (list(g.values()) if isinstance(g, dict) else list(g) for g in (groups, policy))
    assert [group["lr"] for group in groups] == [policy[0]["lr"]] * 2 == [pytest.approx(5e-4)] * 2
    assert [group["weight_decay"] for group in groups] == [1e-3, 1e-1]


def bad(path, **entries):
    np.savez(path, **{"motion_0": np.zeros((9, 2)), "fps": 60.0, "num_motions": 1, **entries})


BAD = {
    "missing": (dict(num_motions=2), "motion_1 is missing"),
    "short": (dict(motion_0=np.zeros((3, 2))), "motion_0 has 3 frames"),
    "nan": (dict(motion_0=np.full((9, 2), np.nan)), "motion_0 is not finite"),
    "ragged": (dict(num_motions=2, motion_1=np.zeros((9, 3))), "motion_1 has frames of width 3"),
    "pickled": (dict(motion_0=np.array([[1], {}], dtype=object)), "motion_0 cannot be read"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_clips_are_refused_before_the_environment_is_built(tmp_path, capsys, kind):
    entries, expected = BAD[kind]
    bad(tmp_path / "clips.npz", **entries)
    message = TRAINERS["AMP"].refused(
        capsys, *TINY, f"--run_dir={tmp_path / 'run'}", f"--algorithm.motion={tmp_path / 'clips.npz'}"
    )
    assert "clips.npz: " in message and expected in message
    assert Windowed.built == 0 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("entries", "flags", "expected"),
    [
        (dict(motion_0=np.zeros((9, 3))), [], "motion_0 has frames of width 3"),
        (dict(fps=30.0), [], "fps is 30"),
        ({}, ["--algorithm.num_frames=3"], "in windows of 3 frames 6 numbers"),
    ],
)
def test_clips_that_do_not_fit_leave_no_run(tmp_path, capsys, entries, flags, expected):
    bad(tmp_path / "clips.npz", **entries)
    where = [f"--run_dir={tmp_path / 'run'}", f"--algorithm.motion={tmp_path / 'clips.npz'}"]
    assert expected in TRAINERS["AMP"].refused(capsys, *TINY, *where, *flags)
    assert not (tmp_path / "run").exists()


@refusals(
    """
    -> There is no built-in motion for Windowed: set --algorithm.motion FILE.npz
    --algorithm.motion=nowhere.npz -> nowhere.npz: no such motion file
    --algorithm.actor_groups=None -> algorithm.actor_groups
    --algorithm.num_frames=1 -> algorithm.num_frames = '1'
    --algorithm.style_scale=-1 -> algorithm.style_scale
    """
)
def test_mistakes_name_the_fix_before_the_environment_is_built(refuses, tmp_path, flags, expected):
    refuses(TRAINERS["AMP"], [*TINY, f"--run_dir={tmp_path / 'run'}", *flags], expected)
    assert Windowed.built == 0 and not (tmp_path / "run").exists()


def test_a_ppo_run_cannot_be_resumed_but_started_from(tmp_path, clips, capsys):
    train_ppo.main([f"--run_dir={tmp_path / 'ppo'}", f"--total_frames={4 * FRAMES}", "--quiet", *PPO])
    message = TRAINERS["AMP"].refused(capsys, f"--resume={tmp_path / 'ppo'}", f"--algorithm.motion={clips}")
    assert "a plain PPO run holds no discriminator" in message and "--init_from RUN_DIR" in message
    still = ["--algorithm.lr=1e-12", "--algorithm.lr_schedule=constant", "--algorithm.normalize_observations=false"]
    train_ppo.main([f"--run_dir={tmp_path / 'raw'}", f"--total_frames={4 * FRAMES}", "--quiet", *PPO, still[-1]])
    train(tmp_path / "amp", 1, *still, f"--init_from={tmp_path / 'raw'}", motion=clips)
    raw = gaussian_actor({"observation": 14}, 2, hidden=(8,), normalize=False)
    amp, critics = gaussian_actor({"observation": 14}, 2, hidden=(8,), normalize=False), []
    for _ in range(2):
        critics.append(value_critic({"observation": 14}, hidden=(8,), normalize=False))
    load_weights({"policy": raw, "critic": critics[0]}, tmp_path / "raw", "latest")
    load_weights({"policy": amp, "critic": critics[1]}, tmp_path / "amp", "latest")
    for old, new in ((raw, amp), critics):
        for name, value in old.state_dict().items():
            torch.testing.assert_close(new.state_dict()[name], value, rtol=0, atol=1e-8)
    # A resumed run goes on from its own checkpoint, not from the start it was given.
    train(tmp_path / "amp", 2, motion=clips, resume=True)
    assert len(rows(tmp_path / "amp")) == 2


def test_an_amp_run_evaluates_exports_and_loads_as_a_plain_policy(tmp_path, clips, capsys, monkeypatch):
    train(tmp_path / "run", 2, motion=clips)
    clips.unlink()  # nobody who acts needs the clips
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "train_amp", train_amp)
    load_script("evaluate").main([str(tmp_path / "run"), "--json", "--checkpoint", "latest"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 4
    monkeypatch.syspath_prepend(str(CASE.parents[2] / "examples"))
    load_script("export_policy").main([str(tmp_path / "run")])
    spec = json.loads((tmp_path / "run" / "policy" / "policy_spec.json").read_text())
    assert [entry["key"] for entry in spec["observations"]] == ["observation"]
    cfg = load_config(train_amp.Train, tmp_path / "run" / "config.json")
    assert cfg.algorithm.name == "AMP" and networks(tmp_path / "run")  # and a policy built as PPO's takes its weights


def test_a_collector_of_workers_feeds_it(tmp_path, clips, monkeypatch):
    pytest.importorskip("mujoco")
    flags = [*ON_THE_QUADRUPED, "--collector=multi_sync"]
    train_amp.main([f"--run_dir={tmp_path / 'run'}", f"--total_frames={FRAMES}", *flags])
    assert "style_reward" in rows(tmp_path / "run")[0]


def ranks(folder, clips, *flags):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", port, str(CASE)]
    command += [str(folder), *TINY, f"--run_dir={folder / 'run'}", f"--algorithm.motion={clips}", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_two_processes_have_one_discriminator(tmp_path, clips):
    first, second = ranks(tmp_path, clips, f"--total_frames={2 * 6 * FRAMES}")
    assert first["steps"] == second["steps"] == 24 and first["windows"] == 300
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    # The statistics are of both processes: the windows and as many of the clips, from each.
    assert first["state"]["discriminator.norm.count"].item() == pytest.approx(2 * 2 * 6 * FRAMES)


@pytest.mark.extended
def test_a_process_without_open_gates_holds_nobody_up(tmp_path, clips):
    first, second = ranks(tmp_path, clips, f"--total_frames={2 * 2 * FRAMES}", "--env.kwargs.gate=first")
    assert (first["windows"], second["windows"]) == (128, 0) and first["steps"] == second["steps"] == 0
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
