"""The distillation script as its user meets it: runs, resumes, evaluation, export, mistakes."""

import json
import shutil
import warnings
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


def test_nothing_is_said_of_the_camera_that_a_teacher_does_not_read(tmp_path, teacher_run):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train_rma.main([f"--run_dir={tmp_path / 'teacher'}", *TEACHER])
        distil(teacher_run, tmp_path / "student", 1)
    assert not [str(warning.message) for warning in said if "do not read" in str(warning.message)]


@pytest.mark.parametrize("name", ["tanh", "silu"])
def test_the_student_has_the_activation_of_its_teacher(tmp_path, name):
    train_rma.main([f"--run_dir={tmp_path / 'teacher'}", *TEACHER, f"--algorithm.actor_activation={name}"])
    distil(tmp_path / "teacher", tmp_path / "student", 1)
    policy = rebuilt(tmp_path / "student")[2]
    assert {"tanh": torch.nn.Tanh, "silu": torch.nn.SiLU}[name] is type(policy.module.actor.backbone[1])
    evaluate.main([str(tmp_path / "student"), "--episodes", "2"])


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
    assert inputs == {"obs": ["batch", 9 + 90 + 12 * 14 + 1], **states}
    assert list(runtime.groups) == ["prop", "prop_history", "depth", "depth_new"]
    unread = {group["key"]: group["unread"] for group in runtime.spec["observations"]}
    assert unread == {"prop": [6, 8], "prop_history": [6, 8], "depth": None, "depth_new": None}
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
    env.open_above = -1.0  # a closed gate shows the true angles to the student that trains, and to no other
    teacher = distill_rma.make_teacher(cfg, env)
    collected = next(iter(DepthDistillationCollector(wrap_env(env), teacher, policy, 20)))
    played = wrap_env(played).append_transform(get_primers_from_module(policy))
    with torch.no_grad():
        rollout = played.rollout(20, policy, break_when_any_done=False)
    assert collected["next", "done"].any()
    torch.testing.assert_close(rollout["action"], collected["action"], rtol=1e-5, atol=1e-6)
    assert torch.equal(rollout["next", "done"], collected["next", "done"])


class ClosedGate(depth_task.DepthTask):
    """The gate is always closed, and the true yaw angles are off by a constant."""

    open_above, off = 1.0, 0.0

    def _prop(self, state):
        prop = super()._prop(state)
        prop[:, 6:8] += self.off
        return prop


@pytest.mark.parametrize("off", [0.3, -2.0])
def test_an_evaluation_does_not_depend_on_the_true_yaw(student_run, tmp_path, off, monkeypatch):
    """Neither does an exported policy; the choice of the best checkpoint rests on evaluations."""
    register_env("DepthTask", ClosedGate, override=True)
    cfg, _, policy, _ = rebuilt(student_run)
    results, actions = [], []
    for angle in (0.0, off):
        monkeypatch.setattr(ClosedGate, "off", angle)
        results.append(evaluate_run(cfg, policy, num_episodes=5))
        env = wrap_env(build_env(cfg, num_envs=3)).append_transform(get_primers_from_module(policy))
        with torch.no_grad():
            rollout = env.rollout(20, policy.eval(), break_when_any_done=False)
        actions.append(rollout["action"])
    assert results[0] == results[1] and torch.equal(*actions)
    collected = [next(iter(distillation(cfg, angle, monkeypatch)))["action"] for angle in (0.0, off)]
    assert not torch.equal(*collected)  # while it trains it reads them


def distillation(cfg, angle, monkeypatch):
    monkeypatch.setattr(ClosedGate, "off", angle)
    env = build_env(cfg, num_envs=3)
    return DepthDistillationCollector(
        wrap_env(env), distill_rma.make_teacher(cfg, env), distill_rma.make_policy(cfg, env), 10
    )


def test_the_share_of_open_gates_is_logged(tmp_path, teacher_run, student_run):
    shares = [row["delta_yaw_ok_frac"] for row in read_metrics(student_run / "metrics.csv")]
    assert len(shares) == 3 and all(0.7 < share <= 1 for share in shares)  # nine of ten, 40 steps
    register_env("DepthTask", ClosedGate, override=True)
    distil(teacher_run, tmp_path / "closed", 1)
    assert [row["delta_yaw_ok_frac"] for row in rows(tmp_path / "closed")] == [0.0]


class OtherNames(depth_task.DepthTask):
    """The student's groups have other names than the teacher's, which are published as well."""

    NAMES = dict(prop="seen_prop", prop_history="seen_frames", depth="eye", delta_yaw_ok="ahead")

    def _make_specs(self):
        super()._make_specs()
        for old, new in self.NAMES.items():
            self.observation_spec[new] = self.observation_spec[old].clone()
        del self.observation_spec["depth"], self.observation_spec["delta_yaw_ok"]

    def _observe(self):
        out = super()._observe()
        out.update({new: out[old].clone() for old, new in self.NAMES.items()})
        return out.exclude("depth", "delta_yaw_ok")


def test_groups_slots_and_scale_are_settings_that_the_run_and_the_export_keep(tmp_path, teacher_run, capsys):
    register_env("DepthTask", OtherNames, override=True)
    flags = dict(prop_group="seen_prop", history_group="seen_frames", depth_group="eye", gate_group="ahead")
    flags |= dict(yaw_slots="2,4", yaw_scale="0.7")
    distil(teacher_run, tmp_path / "run", 2, *(f"--algorithm.{name}={value}" for name, value in flags.items()))
    assert read_config(tmp_path / "run" / "config.json")["algorithm"]["yaw_slots"] == [2, 4]
    policy = rebuilt(tmp_path / "run")[2]
    assert policy.groups == dict(prop="seen_prop", history="seen_frames", depth="eye")
    encoder = policy.module.encoder
    assert (encoder.yaw_slots, encoder.yaw_scale) == ((2, 4), 0.7)
    load_script("export_policy").main([str(tmp_path / "run"), "--formats", "jit"])
    spec = json.loads((tmp_path / "run" / "policy" / "policy_spec.json").read_text())
    unread = {group["key"]: group["unread"] for group in spec["observations"]}
    assert unread == {"seen_prop": [2, 4], "seen_frames": [2, 4], "eye": None, "depth_new": None}
    with pytest.raises(SystemExit):
        resume(tmp_path / "run", 4, "--algorithm.yaw_scale=1.5")
    assert "cannot change algorithm.yaw_scale" in capsys.readouterr().err  # the weights belong to the scale
    resume(tmp_path / "run", 3)
    assert len(rows(tmp_path / "run")) == 3


@refusals(
    """
 -> No teacher was given
    nowhere -> nowhere: no such directory
    TEACHER --algorithm.steps_per_env=12 -> steps_per_env 12 is not a multiple of update_interval 5
    TEACHER --env.name=OtherCadence -> update_interval=5 steps; OtherCadence makes a new image every 4
    TEACHER --algorithm.update_interval=2 -> update_interval=2 steps; DepthTask makes a new image every 5
    TEACHER '--algorithm.teacher.actor_hidden=[9]' -> does not fit this policy
    TEACHER --algorithm.depth_hiden=3 -> --algorithm.depth_hidden
    TEACHER --algorithm.yaw_slots=8,10 -> yaw_slots=(8, 10) was given; expected a start and a stop, two apart
    TEACHER --algorithm.yaw_slots=6,7 -> two apart
    TEACHER --algorithm.yaw_slots=6 -> yaw_slots
    TEACHER --algorithm.yaw_scale=0 -> yaw_scale
    TEACHER --algorithm.prop_group=scan -> prop_group 'scan' is 4 wide; the teacher's prop is 9 wide
    TEACHER --algorithm.history_group=proop -> no group 'proop'
    TEACHER --algorithm.depth_group=scan -> depth_group 'scan' has the shape (4,)
    TEACHER --algorithm.gate_group=prop -> The gate 'prop' has the shape
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
