"""The distillation script as its user meets it: runs, resumes, evaluation, export, mistakes."""

import json
import shutil
from pathlib import Path

import depth_task
import distill_rma
import evaluate
import pytest
import torch
import train_rma
from torchrl.checkpoint import Checkpoint, CheckpointError, CheckpointRotation
from torchrl.modules.utils import get_primers_from_module
from trainer_cases import TRAINERS, load_script, refusals, rows

from edenrl.collectors import DepthDistillationCollector
from edenrl.config import load_config, read_config
from edenrl.envs import register_env, wrap_env
from edenrl.export import export_policy, load_policy
from edenrl.modules import rma_composition
from edenrl.training import build_env, evaluate_run, export_run, load_policy_weights, read_metrics

TEACHER = [
    "--env.name=DepthTask",
    "--env.num_envs=4",
    "--total_frames=96",
    "--algorithm.steps_per_env=8",
    "--algorithm.num_minibatches=2",
    "--algorithm.epochs=1",
    "--algorithm.actor_hidden=8",
    "--algorithm.critic_hidden=8",
    "--algorithm.scan_hidden=8,4",
    "--algorithm.priv_hidden=8,6",
    "--algorithm.estimator_hidden=8",
    "--evaluation.num_episodes=4",
    "--num_threads=1",
    "--quiet",
]
TINY = ["--algorithm.steps_per_env=10", "--algorithm.depth_hidden=8", "--checkpoint.interval_iterations=1000"]
FRAMES = 40  # per iteration


class OtherCadence(depth_task.DepthTask):
    depth_interval = 4


@pytest.fixture(autouse=True)
def tasks():
    register_env("DepthTask", depth_task.DepthTask, override=True)
    register_env("OtherCadence", OtherCadence, override=True)


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    register_env("DepthTask", depth_task.DepthTask, override=True)
    folder = tmp_path_factory.mktemp("runs") / "teacher"
    train_rma.main([f"--run_dir={folder}", *TEACHER])
    return folder


def distil(teacher, run_dir, iterations, *flags):
    distill_rma.main([str(teacher), f"--run_dir={run_dir}", f"--total_frames={iterations * FRAMES}", *TINY, *flags])


def resume(run_dir, iterations, *flags):
    distill_rma.main([f"--resume={run_dir}", f"--total_frames={iterations * FRAMES}", *flags])


def rebuilt(run_dir):
    cfg = load_config(distill_rma.Train, Path(run_dir) / "config.json")
    env = build_env(cfg, num_envs=3)
    policy = distill_rma.make_policy(cfg, env)
    return cfg, env, policy, load_policy_weights(policy, run_dir, "latest")


@pytest.fixture(scope="module")
def student_run(teacher_run):
    folder = teacher_run.parent / "student"
    distil(teacher_run, folder, 3)
    return folder


@pytest.mark.parametrize("cut", [1, 3])
def test_resumed_run_is_the_uninterrupted_run_and_needs_no_teacher(tmp_path, teacher_run, cut):
    teacher = shutil.copytree(teacher_run, tmp_path / "teacher")
    distil(teacher, tmp_path / "whole", 5, "--algorithm.num_pretrain_iters=2")
    distil(teacher, tmp_path / "parts", cut, "--algorithm.num_pretrain_iters=2")
    shutil.rmtree(teacher)  # the checkpoint is self-contained
    resume(tmp_path / "parts", 5)
    assert len(rows(tmp_path / "whole")) == 5 and rows(tmp_path / "whole") == rows(tmp_path / "parts")
    whole, parts = (rebuilt(tmp_path / name)[2].state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole | parts)
    assert int(whole["module.updates"]) == 5
    saved = CheckpointRotation(tmp_path / "parts" / "checkpoints", keep_last=1).latest()
    held = set(Checkpoint.manifest(saved)["components"])
    assert {"policy", "teacher", "optimizer", "step", "collector", "rng"} <= held


def test_a_run_without_a_checkpoint_starts_over_with_its_teacher(tmp_path, teacher_run):
    distil(teacher_run, tmp_path / "run", 2)
    expected = rows(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.csv").unlink()
    resume(tmp_path / "run", 2)
    assert rows(tmp_path / "run") == expected


def test_the_teacher_is_the_one_of_the_run(teacher_run, student_run):
    """Its labels are the trained actor's actions, before and after the distillation."""
    teacher_cfg = evaluate.load_run(teacher_run)[1]
    env = build_env(teacher_cfg, num_envs=3)
    deployed = train_rma.make_policy(teacher_cfg, env)
    load_policy_weights(deployed, teacher_run)
    td = env.reset()
    actor = rma_composition(deployed).actor
    with torch.no_grad():
        chunks = {name: td[key] for name, key in rma_composition(deployed).keys.items() if name != "priv_latent"}
        expected = actor(**chunks, latent="history")[0]
    cfg = load_config(distill_rma.Train, student_run / "config.json")
    teacher = distill_rma.make_teacher(cfg, env)
    load_policy_weights(teacher, teacher_run)
    with torch.no_grad():
        torch.testing.assert_close(teacher(td.clone())["loc"], expected, rtol=0, atol=1e-6)
    saved = distill_rma.make_teacher(cfg, env)
    Checkpoint(teacher=saved).load(CheckpointRotation(student_run / "checkpoints", keep_last=1).latest())
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in teacher.state_dict().items())


def test_the_environment_and_networks_are_the_teachers(tmp_path, teacher_run, student_run):
    cfg = read_config(student_run / "config.json")
    assert cfg["env"]["name"] == "DepthTask" and cfg["env"]["num_envs"] == 4
    assert cfg["algorithm"]["teacher"]["scan_hidden"] == [8, 4]
    table = read_metrics(student_run / "metrics.csv")
    for name in ("student_actor", "depth_backbone", "depth_recurrent"):
        assert all(row[f"grad_norm_{name}"] > 0 for row in table)
    assert all(abs(row["loss"] - row["loss_action"] - row["loss_yaw"]) < 1e-5 for row in table)


def test_groups_of_the_teacher_get_the_camera(tmp_path, teacher_run):
    teacher = shutil.copytree(teacher_run, tmp_path / "teacher")
    config = read_config(teacher / "config.json")
    config["env"]["kwargs"] = {"groups": ["prop", "scan"], "seed_of_course": 3}
    (teacher / "config.json").write_text(json.dumps(config))
    cfg = distill_rma.parse([str(teacher), "--seed=4"])
    assert cfg.env.kwargs == {"groups": ["prop", "scan", "depth"], "seed_of_course": 3}
    assert cfg.seed == 4 and cfg.algorithm.teacher_run == str(teacher)


def test_evaluate_and_export_read_the_run(student_run, capsys):
    capsys.readouterr()
    evaluate.main([str(student_run), "--json", "--episodes", "6"])
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == 6
    load_script("export_policy").main([str(student_run), "--formats", "onnx", "jit"])
    assert "policy.pt" in capsys.readouterr().out
    load_script("run_policy").main([str(student_run / "policy"), "--episodes", "6"])  # looks when an image is new
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("return"))
    assert float(shown["return_mean"]) == pytest.approx(result["return_mean"], rel=2e-3)


def test_the_exported_student_acts_as_the_student_over_a_sequence(student_run, tmp_path):
    """Twenty-two steps with resets of single rows, state in and out."""
    cfg, env, policy, _ = rebuilt(student_run)
    export_run(cfg, policy, student_run, tmp_path / "policy")
    runtime = load_policy(tmp_path / "policy")
    inputs = {entry["name"]: entry["shape"] for entry in runtime.spec["model"]["inputs"]}
    states = {"depth_hidden_in": ["batch", 8], "depth_latent_in": ["batch", 4], "depth_yaw_in": ["batch", 2]}
    assert inputs == {"obs": ["batch", 9 + 90 + 1 + 12 * 14 + 1], **states}
    assert list(runtime.groups) == ["prop", "prop_history", "delta_yaw_ok", "depth", "depth_new"]
    env = wrap_env(env).append_transform(get_primers_from_module(policy))
    policy.eval()
    td, resets = env.reset(), 0
    for _ in range(22):
        with torch.no_grad():
            acted = policy(td)
        groups = {key: td[key].flatten(1).numpy() for key in runtime.groups}
        actions = torch.from_numpy(runtime(groups))
        torch.testing.assert_close(actions, acted["action"], rtol=1e-4, atol=1e-4)
        stepped, td = env.step_and_maybe_reset(acted)
        ended = stepped["next", "done"][:, 0]
        resets += int(ended.sum())
        if ended.any():
            runtime.reset(ended.numpy())
    assert resets > 3


def test_an_untrained_student_is_not_evaluated_nor_exported(teacher_run, student_run, tmp_path):
    cfg = load_config(distill_rma.Train, student_run / "config.json")
    policy = distill_rma.make_policy(cfg, build_env(cfg, num_envs=1))
    with pytest.raises(ValueError, match="never updated"):
        evaluate_run(cfg, policy)
    with pytest.raises(ValueError, match="never updated"):
        export_policy(
            policy, wrap_env(build_env(cfg, num_envs=1)).append_transform(get_primers_from_module(policy)), tmp_path
        )
    path = CheckpointRotation(teacher_run / "checkpoints", keep_last=1).latest()
    with pytest.raises(CheckpointError, match="does not fit this policy"):
        evaluate.main([str(student_run), f"--checkpoint={path}"])


def test_a_rollout_of_the_policy_is_what_the_collector_collects(student_run):
    """Evaluation sees, holds and forgets as the distillation did."""
    cfg, env, policy, _ = rebuilt(student_run)
    policy.eval()
    played = build_env(cfg, num_envs=3)
    teacher = distill_rma.make_teacher(cfg, env)
    collected = next(iter(DepthDistillationCollector(wrap_env(env), teacher, policy, 20)))
    played = wrap_env(played).append_transform(get_primers_from_module(policy))
    with torch.no_grad():
        rollout = played.rollout(20, policy, break_when_any_done=False)
    assert collected["next", "done"].any()
    torch.testing.assert_close(rollout["action"], collected["action"], rtol=1e-5, atol=1e-6)
    assert torch.equal(rollout["next", "done"], collected["next", "done"])


@refusals(
    """
 -> No teacher was given
    nowhere -> nowhere: no such directory
    TEACHER --algorithm.steps_per_env=12 -> steps_per_env 12 is not a multiple of update_interval 5
    TEACHER --env.name=OtherCadence -> update_interval=5 steps; OtherCadence makes a new image every 4
    TEACHER --algorithm.update_interval=2 -> update_interval=2 steps; DepthTask makes a new image every 5
    TEACHER '--algorithm.teacher.actor_hidden=[9]' -> does not fit this policy
    TEACHER --algorithm.depth_hiden=3 -> --algorithm.depth_hidden
    TEACHER --algorithm.teacher_checkpoint=3 -> 3 is no checkpoint
    """
)
def test_mistakes_name_the_fix(refuses, teacher_run, flags, expected):
    flags = [str(teacher_run) if flag == "TEACHER" else flag for flag in flags]
    refuses(TRAINERS["Distillation"], [*flags, *TINY[1:]], expected)


def test_what_is_no_teacher_is_refused_before_the_environment(student_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("edenrl.training.run.build_env", lambda *args: pytest.fail("the environment was built"))
    for flags, expected in (
        ([str(student_run)], "is a run of distill_rma; expected one of train_rma.py"),
        ([str(tmp_path)], "it has no config.json"),
        ([], "No teacher was given"),
    ):
        assert expected in TRAINERS["Distillation"].refused(capsys, *flags)


def test_the_learning_rate_can_follow_a_schedule(tmp_path, teacher_run):
    distil(teacher_run, tmp_path / "run", 4, "--algorithm.lr_schedule=linear", "--algorithm.lr=1e-3")
    rates = [row["lr"] for row in rows(tmp_path / "run")]
    assert rates[0] > rates[1] > rates[2] > rates[3] >= 0
    resume(tmp_path / "run", 8, "--resume_schedule=restart")
    assert rows(tmp_path / "run")[4]["lr"] > 5e-4
