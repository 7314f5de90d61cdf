"""Every training script starts from another run's weights."""

from pathlib import Path

import pytest
import torch
from trainer_cases import TRAINERS, checkpointed

from edenrl.config import load_config
from edenrl.training import Run, build_env, evaluate_run, load_weights, read_metrics

LAST = "--init_checkpoint=latest"


class Stop(Exception):
    """Ends a run before its first iteration."""


def started(monkeypatch, script, run_dir, *flags, iterations=1):
    """The run of a script as it is when it has begun, and what it says about its weights."""
    caught = []
    begin = Run.begin

    def stop(run):
        begin(run)
        caught.append((run, {name: c.state_dict() for name, c in run.components.items() if hasattr(c, "parameters")}))
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Run, "begin", stop)
        script.train(run_dir, iterations, *flags)
    run, states = caught[0]
    return run, states, run.initial.report()


@pytest.mark.parametrize("seed", [3, 12])
@pytest.mark.parametrize("name", list(TRAINERS))
def test_a_run_of_its_own_kind_gives_everything_that_is_trained(tmp_path, monkeypatch, name, seed):
    script = TRAINERS[name]
    script.train(tmp_path / "first", 3, f"--seed={seed}", "--quiet")
    flags = [f"--init_from={tmp_path / 'first'}", LAST, f"--seed={seed + 1}", "--quiet"]
    run, states, report = started(monkeypatch, script, tmp_path / "second", *flags)
    saved = checkpointed(tmp_path / "first")
    taken = [line.split(":")[0].strip() for line in report.splitlines() if line.endswith("all of it was taken")]
    assert "policy" in taken and len(taken) == len(report.splitlines()) - 1
    assert {"critic", "loss", "discriminator"} & saved.keys() <= {*taken}
    for part in taken:
        for key, value in saved[part].items():
            assert torch.equal(states[part][key], value), (part, key)
    # The first evaluation is the last one of the other run.
    last = read_metrics(tmp_path / "first" / "metrics.csv")[-1]
    policy = script.module.make_policy(run.cfg, build_env(run.cfg, num_envs=1))
    policy.load_state_dict(states["policy"])
    now = evaluate_run(run.cfg, policy, torch.device("cpu"))
    for metric in ("return_mean", "return_std", "length_mean"):
        assert now[metric] == last[f"eval/{metric}"]


def test_grpos_reference_is_the_policy_that_it_starts_from(tmp_path, monkeypatch):
    TRAINERS["GRPO"].train(tmp_path / "first", 3, "--quiet")
    _, states, report = started(
        monkeypatch, TRAINERS["GRPO"], tmp_path / "second", f"--init_from={tmp_path / 'first'}", LAST, "--seed=5"
    )
    for key, value in states["policy"].items():
        assert torch.equal(states["reference"][key], value)
    assert "reference:" not in report


@pytest.mark.parametrize("seed", [2, 6])
def test_from_ppo_to_amp(tmp_path, monkeypatch, seed):
    robot = [flag for flag in TRAINERS["AMP"].flags if "discriminator" not in flag and "window" not in flag]
    TRAINERS["PPO"].module.main(
        [*robot, "--env.name=Quadruped", f"--run_dir={tmp_path / 'ppo'}", "--total_frames=128", f"--seed={seed}"]
    )
    _, states, report = started(
        monkeypatch, TRAINERS["AMP"], tmp_path / "amp", f"--init_from={tmp_path / 'ppo'}", LAST, "--seed=9"
    )
    saved = checkpointed(tmp_path / "ppo")
    for part in ("policy", "critic"):
        assert all(torch.equal(states[part][key], value) for key, value in saved[part].items())
    assert "discriminator: nothing was taken; new are norm, trunk.0, head (not there)" in report


def test_from_ppo_to_him_what_fits(tmp_path, monkeypatch):
    robot = [flag for flag in TRAINERS["AMP"].flags if "discriminator" not in flag and "window" not in flag]
    TRAINERS["PPO"].module.main([*robot, "--env.name=Quadruped", f"--run_dir={tmp_path / 'ppo'}", "--total_frames=128"])
    _, states, report = started(
        monkeypatch, TRAINERS["HIM"], tmp_path / "him", f"--init_from={tmp_path / 'ppo'}", LAST, "--seed=9"
    )
    saved, inner = checkpointed(tmp_path / "ppo"), "module.0.module."
    for key in ("mlp.2.weight", "mlp.2.bias", "std.raw_log_std"):
        assert torch.equal(states["policy"][f"{inner}actor.{key}"], saved["policy"][inner + key])
    assert "mlp.0.weight ((8, 52) here, (8, 45) there)" in report and "critic: all of it was taken" in report


def test_from_an_rma_teacher_to_the_depth_student(tmp_path, monkeypatch):
    script = TRAINERS["Distillation"]
    _, states, report = started(monkeypatch, script, tmp_path / "run", f"--init_from={script.teacher}", LAST)
    teacher = checkpointed(script.teacher)["policy"]
    for key, value in teacher.items():
        assert torch.equal(states["policy"][key.removeprefix("module.0.")], value)
    assert "encoder.gru, encoder.out.0 (not there)" in report and "teacher:" not in report


@pytest.mark.parametrize(("workers", "seed"), [(2, 1), (4, 7)])
def test_workers_act_with_these_weights(tmp_path, workers, seed):
    script, first = TRAINERS["PPO"], tmp_path / "first"
    script.train(first, 3, "--quiet", f"--seed={seed}")
    many = ["--collector=multi_sync", f"--num_workers={workers}", "--algorithm.epochs=1"]
    script.train(
        tmp_path / "second", 1, f"--init_from={first}", LAST, *many, "--quiet", "--algorithm.num_minibatches=1"
    )
    # The ratio of the first mini-batch is 1 exactly where the workers have acted with the learner's policy.
    row = read_metrics(tmp_path / "second" / "metrics.csv")[0]
    assert row["max_ratio"] == pytest.approx(1.0, abs=1e-4) and row["kl_approx"] == pytest.approx(0.0, abs=1e-6)


def test_other_widths_are_named_and_nothing_in_common_is_refused(tmp_path, capsys):
    ppo = TRAINERS["PPO"]
    ppo.train(tmp_path / "first", 1, "--quiet")
    ppo.train(tmp_path / "cart", 1, f"--init_from={tmp_path / 'first'}", "--env.name=CartPoleSwingUp")
    said = capsys.readouterr().out
    assert "mlp.0.weight ((8," in said and "critic: took mlp.2; new are norm.mean" in said
    flags = [*TRAINERS["FlashSAC"].flags, f"--run_dir={tmp_path / 'sac'}", f"--init_from={tmp_path / 'first'}"]
    message = TRAINERS["FlashSAC"].refused(capsys, *flags)
    assert "No weights of" in message and "critic: mlp.0, mlp.2, norm; policy" in " ".join(message.split())
    assert not (tmp_path / "sac").exists()


def test_a_run_that_started_so_is_continued_and_repeated(tmp_path):
    script, start = TRAINERS["PPO"], f"--init_from={tmp_path / 'first'}"
    script.train(tmp_path / "first", 2, "--quiet")
    for folder in ("a", "b"):
        script.train(tmp_path / folder, 4, start, LAST, "--quiet")
    script.train(tmp_path / "parts", 2, start, LAST, "--quiet")
    script.train(tmp_path / "parts", 4, "--quiet", resume=True)
    states = [checkpointed(tmp_path / folder)["policy"] for folder in ("a", "b", "parts")]
    assert all(torch.equal(states[0][key], other[key]) for other in states[1:] for key in other)
    cfg = load_config(script.module.Train, Path(tmp_path / "parts" / "config.json"))
    assert cfg.init_from == str(tmp_path / "first") and cfg.resume is None
    policy = script.policy(tmp_path / "first")
    load_weights({"policy": policy}, tmp_path / "a", "latest")
